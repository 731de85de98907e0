"""tools/evaluate_rebm.py, generate_rebm.py: from images over training to figures and pictures."""

import json
import math
import re
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import ROOT, call_script, import_tool, write_digits
from PIL import Image
from runs import COMMON, TINY

import run_train_rebm_ddp as script

evaluate = import_tool("evaluate_rebm")
generate = import_tool("generate_rebm")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tools")
    options = [*COMMON, *TINY["run_train_rebm_ddp"](folder), "--at_epochs=8", "--batch_size=24"]
    call_script("run_train_rebm_ddp", *options, f"--output_dir={folder}/out")
    return folder


def test_a_network_is_measured(trained):
    """Accuracy under attack falls with the radius, to 0."""
    out = trained / "figures.json"
    words = [trained / "out/best.pt", "--radii", "0.1", "0.5", "6", "--attack_steps=10"]
    words += [f"--out={out}", "--ood_images=100", "--device=cpu", "--outside", "noise", "blobs"]
    text = call_script("tools/evaluate_rebm", *words)
    assert "figures.json: of 100 noise, 100 blobs, 60 test images" in text
    found = json.loads(out.read_text())
    order = [found[name] for name in ("clean", "robust@0.1", "robust@0.5", "robust@6")]
    assert order == sorted(order, reverse=True)
    assert order[0] > 0.5 and order[-1] == 0
    for kind in script.SYNTHETIC:
        assert 0 <= found[f"adv_auroc {kind}"] <= found[f"auroc {kind}"] <= 1
    share = found["clean"]
    expected = math.sqrt(share * (1 - share) / 59)
    assert found["standard_errors"]["clean"] == pytest.approx(expected)
    assert found["options"]["attack_steps"] == 10
    call_script("tools/evaluate_rebm", *words, status=2)  # it does not write over a file


def test_a_network_generates(trained):
    """Images on which the logit of their class is higher than where they started."""
    checkpoint = trained / "out/best.pt"
    words = [checkpoint, f"--out={trained}/samples.png", f"--folder={trained}/samples"]
    words += ["--num_samples=33", "--steps=4", "--batch_size=7", "--device=cpu"]
    text = call_script("tools/generate_rebm", *words)
    assert "samples.png: 30 of 33 images, 10 classes" in text
    assert re.search(r"best.pt: of step \d+, T = \d", text)
    paths = sorted((trained / "samples").iterdir())
    made = np.stack([np.asarray(Image.open(path)) for path in paths])
    assert made.shape == (33, 8, 8, 3) and paths[32].name == "000032.png"
    made = made.transpose(0, 3, 1, 2)[:, :1]
    labels = torch.arange(33) % 10
    # the eighth column has class 7, and the second row its second image, within a line of grey
    shown = np.asarray(Image.open(trained / "samples.png").resize((100, 30), 0))[..., 0]
    assert np.array_equal(shown[11:19, 71:79], made[17, 0])

    given = {"checkpoint": checkpoint, "data": None, "outdist_data": None, "cache_dir": None}
    args = SimpleNamespace(**given, images=None, to=None, num_samples=33, batch_size=33)
    args.attack_steps = 4
    args.radius = math.inf
    network, state = generate.load_network(args, CPU)
    noise = generate.load_images(args, state)[1]["noise"]
    starts = noise.part(script.TEST)
    found = []
    for images in (noise.images[starts[:33]], made):
        logits = network(script.pixels(torch.from_numpy(images.copy())))
        found.append(script.label_logit(logits, labels))
    assert (found[1] > found[0]).all()

    few = SimpleNamespace(images=noise.images, part=lambda part: starts[:20])
    args.num_samples = 60
    images, labels, _ = generate.choose_starts(args, state, few)
    several, _ = generate.generate(network, images, labels, args, 0.1)
    assert len(several.flatten(1).unique(dim=0)) == 60, "some are made twice"
    call_script("tools/generate_rebm", *words, status=2)  # it does not write over a file


def test_images_are_led_to_classes(trained, tmp_path):
    """Each of one's own to each class, within the ball; or to any, where logsumexp is higher."""
    images = np.load(trained / "digits.npz")["x_test"][:3]
    paths = [tmp_path / f"{i}.png" for i in range(3)]
    for path, image in zip(paths, images, strict=True):
        Image.fromarray(image).save(path)
    words = [trained / "out/best.pt", "--device=cpu", "--images", *paths, "--to"]
    text = call_script("tools/generate_rebm", *words, "any", f"--out={tmp_path}/any.png")
    assert "any.png: 3 of 3 images, 1 classes" in text
    out = [f"--out={tmp_path}/a.png", f"--folder={tmp_path}/a", "--radius=1"]
    text = call_script("tools/generate_rebm", *words, "7", "3", *out)
    assert "a.png: 6 of 6 images, 2 classes" in text and "led to: " in text
    for i in range(6):
        made = np.asarray(Image.open(tmp_path / f"a/{i:06}.png"))[..., 0]
        distance = np.linalg.norm((made - images[i // 2].astype(float)) / 255)
        assert 0 < distance <= 1 + 8 / 2 / 255  # they are rounded
    said = call_script("tools/generate_rebm", *words, "cat", f"--out={tmp_path}/b.png", status=2)
    assert "--to cat: expected any, or some of 0, 1" in said
    said = call_script("tools/generate_rebm", *words, "any", "1", status=2)
    assert "--to any: expected no class beside it" in said
    (tmp_path / "0.png").write_bytes(b"no picture")
    said = call_script("tools/generate_rebm", *words, "any", f"--out={tmp_path}/b.png", status=2)
    assert "cannot identify image file" in said and len(said.splitlines()) == 2


def test_weights_alone(trained, tmp_path):
    """As others release them, and under DDP's names: the figures of best.pt."""
    state = torch.load(trained / "out/best.pt")["ema_model"]
    torch.save({f"module.{name}": tensor for name, tensor in state.items()}, tmp_path / "a.pth")
    common = [f"--cache_dir={tmp_path}/cache", "--radii=0.3", "--norm=Linf", "--device=cpu"]
    common += [f"--data={trained}/digits.npz", "--images=40", "--score=softmax", "--ood_images=99"]
    found = []
    for path, more in {trained / "out/best.pt": [], "a.pth": ["--model_type=SmallNet"]}.items():
        out = tmp_path / f"{len(more)}.json"
        call_script("tools/evaluate_rebm", tmp_path / path, *common, *more, f"--out={out}")
        found.append(json.loads(out.read_text()))
        del found[-1]["options"], found[-1]["adv_auroc noise"]  # its radius is of the training
    assert found[0] == found[1]
    said = call_script("tools/evaluate_rebm", tmp_path / "a.pth", *common, status=2)
    assert re.search("a.pth: it is .*; expected best.pt, .*; or weights, --model_type and", said)
    said = call_script("tools/evaluate_rebm", tmp_path / "a.pth", "--norm=L2", status=2)
    assert "--norm L2: give --radii in this norm" in said
    words = [*common, "--model_type=WideResNet28x2", f"--out={tmp_path}/b.json"]
    said = call_script("tools/evaluate_rebm", tmp_path / "a.pth", *words, status=2)
    assert re.search(r"a.pth: \d+ weights do not fit.*; expected weights of this --model", said)


def test_attacks_of_others_take_the_network(tmp_path):
    """They call .view on gradients by images, which must not have channels last, then."""
    with mock.patch.object(sys, "argv", ["script"]):
        options = script.parse_args()
    torch.manual_seed(0)
    state = {"script": "run_train_rebm_ddp.py", "args": vars(options), "loop": {"step": 1, "T": 0}}
    state["data"] = {"classes": ["a", "b"], "shape": [3, 20]}
    state["model"] = script.make_network(options, 2, 3, 20).state_dict()
    torch.save(state, tmp_path / "a.pt")
    model, _ = generate.load_network(SimpleNamespace(checkpoint=tmp_path / "a.pt"), CPU)
    x = torch.rand(4, 3, 20, 20, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).sum(), x)
    assert gradient.view(4, -1).norm(dim=1).min() > 0  # as torchattacks.PGDL2 has it


def test_calibration_and_false_positives():
    """By hand: bins of one image; and scikit-learn's first point of the curve."""
    logits = torch.tensor([[0.0, math.log(3)], [math.log(9), 0], [0, math.log(9)]])
    found = evaluate.calibration_error(logits, torch.tensor([1, 0, 0]))
    assert found.item() == pytest.approx(((1 - 0.75) + abs((1 - 0.9) + (0 - 0.9))) / 3)
    real = torch.arange(100.0)
    fake = torch.tensor([4.0, 5.0, 6.0, -3.0])
    assert evaluate.false_positive_rate(real, fake) == 0.5  # 95 of real are at least 5


def test_autoattack(monkeypatch):
    """The authors' package, where it is there, gets norm and radius; what it finds counts."""
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 5))
    x = torch.rand(6, 1, 2, 2)
    labels = network(x).argmax(1)

    class AutoAttack:
        def __init__(self, model, norm, eps, **options):
            assert (model, norm, eps) == (network, "L2", 0.5)
            self.apgd_targeted = self.fab = SimpleNamespace()

        def run_standard_evaluation(self, x, labels, bs):
            assert bs == 6 and len(labels) == 6 and self.fab.n_target_classes == 4
            return torch.where(torch.arange(6)[:, None, None, None] < 2, x, 1e3 * (x - 1))

    monkeypatch.setitem(sys.modules, "autoattack", SimpleNamespace(AutoAttack=AutoAttack))
    attacks = evaluate.make_autoattack(network, 5, 0.5, "L2")
    expected = network(attacks[0](x, labels)).argmax(1) == labels
    assert evaluate.autoattack(network, attacks, x, labels).equal(expected)
    assert expected[:2].all() and not expected.all()
    for name in ("autoattack", "torchattacks"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(script.InputError, match="--autoattack needs a package: pip install"):
        evaluate.make_autoattack(network, 5, 0.5, "L2")


def test_one_image_is_classified(trained, tmp_path):
    """From a file, without the data of the run."""
    images = np.load(trained / "digits.npz")
    paths = [tmp_path / f"{i}.png" for i in range(20)]
    for path, image in zip(paths, images["x_test"][:20], strict=True):
        Image.fromarray(image).save(path)
    names, shares, scores = zip(*evaluate.classify(trained / "out/best.pt", paths), strict=True)
    assert np.mean(np.array(names) == images["y_test"][:20].astype(str)) > 0.5

    guide = (ROOT / "docs/DDP_TRAINING_GUIDE.md").read_text()
    cell = next(cell for cell in guide.split("```") if "classify(" in cell)
    cell = cell.removeprefix("python").replace("outputs/images/best.pt", f"{trained}/out/best.pt")
    found = {}
    exec(cell.replace('["new.png", "other.jpg"]', repr(list(map(str, paths)))), found)
    assert (found["name"], found["score"]) == (names[-1], scores[-1])
    expected = torch.from_numpy(images["x_test"][19:20, None].copy())
    assert found["model"].eval()(script.pixels(expected)).logsumexp(1).item() == found["score"]
    assert all(0.1 <= share <= 1 for share in shares) and all(map(math.isfinite, scores))


def test_other_images_than_those_of_the_run(trained, tmp_path):
    """Are named, or refused where they do not fit; and so is what is no checkpoint."""
    write_digits(tmp_path / "others.npz", 200, 60)
    call = ["tools/generate_rebm", trained / "out/best.pt", "--steps=1", "--device=cpu"]
    call += [f"--cache_dir={tmp_path}", "--num_samples=20", f"--data={tmp_path}/others.npz"]
    assert "not the images of the run" in call_script(*call, f"--out={tmp_path}/a.png")
    images = np.zeros((60, 8, 8), np.uint8) + np.arange(60, dtype=np.uint8)[:, None, None]
    np.savez(tmp_path / "two.npz", x_train=images, y_train=np.arange(60) % 2)
    call += [f"--out={tmp_path}/b.png", f"--data={tmp_path}/two.npz"]
    assert "expected the network's, 1, 0, 1, 2" in call_script(*call, status=2)
    torch.save({"script": "train_ddp.py"}, tmp_path / "other.pt")
    text = call_script("tools/evaluate_rebm", tmp_path / "other.pt", status=2)
    assert "other.pt: it is of train_ddp.py; expected best.pt, step_N.pt or latest.pt of" in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize(("norm", "eps"), [("L2", 0.05), ("Linf", 0.012)])
def test_robust_accuracy_of_a_linear_network(norm, eps):
    """It errs where the margin, by the length of the weights' difference, is below the radius."""
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 16, generator=rng)
    x = 0.35 + 0.3 * torch.rand(200, 1, 4, 4, generator=rng)  # the ball stays within [0, 1]

    def network(z):
        return z.flatten(1) @ weight.T

    logits = network(x)
    labels = logits.argmax(1)
    expected = torch.ones(200, dtype=torch.bool)
    for other in range(3):
        difference = weight[labels] - weight[other]
        length = difference.norm(p=2 if norm == "L2" else 1, dim=1)
        lead = logits.gather(1, labels[:, None])[:, 0] - logits[:, other]
        expected &= (other == labels) | (lead > eps * length)
    assert 20 < expected.sum() < 180
    assert torch.equal(evaluate.survivors(network, x, labels, 20, eps, norm), expected)
    wrong = (labels + 1) % 3
    assert not evaluate.survivors(network, x, wrong, 20, eps, norm).any()
