"""run_train_rebm_ddp.py and its tools: known answers, and runs. (Images: test_rebm_images.py.)"""

import json
import math
import os
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT, call_script, check_refusal, check_refused, import_tool, parse_arguments
from PIL import Image
from runs import Task, differences
from sklearn.metrics import roc_auc_score

import run_train_rebm_ddp as script

evaluate = import_tool("evaluate_rebm")
generate = import_tool("generate_rebm")
CPU = torch.device("cpu")
WIDE = "--model_type=WideResNet28x2"

arguments = partial(parse_arguments, script)


@pytest.fixture(scope="module")
def task(tmp_path_factory, server):
    """A run of a second: seven steps of stage 1, and 14 of stage 2."""
    return Task(script.__name__, tmp_path_factory.mktemp("rebm"), server, less=250)


@pytest.fixture
def digits(task):
    """(arguments of the run, its images, its OOD images)"""
    args = arguments(*task.argv)
    indist = script.Images(script.prepare(args, args.data))
    return args, indist, script.Images(script.prepare(args, args.outdist_data, indist))


def small_network(*options):
    torch.manual_seed(0)
    return script.make_network(arguments(*options), 10, 1, 8)


def start_networks(*options):
    indist = SimpleNamespace(classes=list("0123456789"), shape=(1, 8))
    return script.start_networks(arguments(*options), CPU, indist, None)


def plain_wide_resnet(weights, x):
    """Zagoruyko and Komodakis' network of depth 28, as a function of its weights by name."""

    def norm(x, name):
        names = ("running_mean", "running_var", "weight", "bias")
        return F.relu(F.batch_norm(x, *[weights[f"{name}.{part}"] for part in names]))

    mean = torch.tensor([0.4913997551666284, 0.48215855929893703, 0.4465309133731618])
    deviation = torch.tensor([0.24703225141799082, 0.24348516474564, 0.26158783926049628])
    x = (x - mean.view(3, 1, 1)) / deviation.view(3, 1, 1)
    x = F.conv2d(x, weights["conv1.weight"], padding=1)
    for group in (1, 2, 3):
        for number in range(4):
            name = f"block{group}.layer.{number}"
            stride = 2 if group > 1 and number == 0 else 1
            y = norm(x, f"{name}.bn1")
            if f"{name}.convShortcut.weight" in weights:
                x = F.conv2d(y, weights[f"{name}.convShortcut.weight"], stride=stride)
            y = F.conv2d(y, weights[f"{name}.conv1.weight"], stride=stride, padding=1)
            y = norm(y, f"{name}.bn2")
            x = x + F.conv2d(y, weights[f"{name}.conv2.weight"], padding=1)
    x = F.avg_pool2d(norm(x, "bn1"), 8).flatten(1)
    return F.linear(x, weights["fc.weight"], weights["fc.bias"])


def test_wide_resnet_is_that_of_its_authors():
    for name, count in {"WideResNet28x2": 1_467_610, "WideResNet34x10": 46_160_474}.items():
        with torch.device("meta"):
            model = script.make_network(arguments(f"model.model_type={name}"), 10, 3, 32)
        assert sum(p.numel() for p in model.parameters()) == count
    torch.manual_seed(0)
    model = script.make_network(arguments(WIDE), 10, 3, 32).eval()
    for name, tensor in model.state_dict().items():
        if "running" in name or "bn" in name and tensor.is_floating_point():
            tensor.copy_(torch.rand_like(tensor) + 0.5)
    x = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        expected = plain_wide_resnet(model.state_dict(), x)
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)


def test_weights_load_by_name(tmp_path):
    """With the prefixes of wrappers, and from the files of the original. Others are named."""
    path = tmp_path / "weights.pth"
    state = {}
    for name, tensor in small_network(WIDE).state_dict().items():
        state[name] = torch.randn(tensor.shape).to(tensor.dtype)
    averaged = {f"module.module.{name}": tensor for name, tensor in state.items()}
    forms = {
        "compiled": {"model": {f"module._orig_mod.{name}": t for name, t in state.items()}},
        "ours": {"script": "run_train_rebm_ddp.py", "model": {}, "average": state},
        "original": {"ema_state_dict": {"module.n_averaged": torch.ones(()), **averaged}},
    }
    for form, content in forms.items():
        torch.save(content, path)
        model = small_network(WIDE)
        script.read_weights(path, model)
        assert not differences(state, model.state_dict()), form

    wrong = {
        "its classes are b, a": {**forms["ours"], "data": {"classes": ["b", "a"]}},
        "13. weights do not fit, such as conv1.weight, bl.*; expected": {"net.0": torch.zeros(3)},
        r"1 .*mismatch for fc.bias: .*\[3\].*\[10\]": {**state, "fc.bias": torch.zeros(3)},
    }
    for message, content in wrong.items():
        torch.save(content, path)
        check_refused(f"weights.pth: {message}", script.read_weights, path, model, ["a", "b"])
    path.write_text("lr: 1e-3")
    wrong = {path: "no tensors", tmp_path: "is a folder", tmp_path / "a": "there is no such file"}
    for other, message in wrong.items():
        check_refused(f"{other}: {message}", script.read_weights, other, model)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_attacked_network_has_the_trained_weights(group, precision):
    """And buffers; in bf16 those of autocast. Attacks leave no gradients, nor other statistics."""
    args = arguments(WIDE, f"precision={precision}")
    networks, autocast = start_networks(WIDE, f"precision={precision}")
    model, ema_model, frozen, ddp_model = networks
    ddp_model.eval()
    assert any(p.dtype == torch.bfloat16 for p in frozen.parameters()) == (precision == "bf16")
    x = torch.rand(8, 1, 8, 8)
    model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()})
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with autocast():
        batch = script.Batch(torch.arange(8), (255 * x).byte(), torch.arange(8))
        script.batch_losses(args, networks, batch, 0)
    script.update_frozen(networks)
    assert not differences(before, model.state_dict())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    with autocast():
        assert torch.equal(frozen(x), model.eval()(x))
        assert not torch.equal(ema_model(x), frozen(x))


def test_an_attack_makes_whole_steps():
    """1e-30 of a loss leads where the loss leads, no gradient nowhere; pixels stay in [0, 1]."""
    x = torch.full((2, 1, 2, 2), 0.5)
    weight = torch.tensor([1.0, -2.0, 3.0, 0.5])
    direction = (weight / weight.norm()).view(1, 2, 2)
    for factor, size in ((1.0, 0.1), (1e-30, 0.1), (0.0, 0.1), (1.0, 9.0)):

        def gain(logits, labels, factor=factor):
            return logits * factor

        z = script.attack(lambda z: z.flatten(1) @ weight, gain, x, None, 1, size)
        expected = (x + (factor > 0) * size * direction).clamp(0, 1)
        torch.testing.assert_close(z, expected)


def test_the_losses(group):
    """Cross entropies of attacked images, of real and attacked OOD images; logits of the labels."""
    args = arguments("indist_attack_clf.max_steps=2")
    networks, _ = start_networks()
    model, frozen = networks.model, networks.frozen
    rng = torch.Generator().manual_seed(0)
    clf, real, ood = torch.randint(0, 256, (3, 8, 1, 8, 8), generator=rng).byte()
    y = torch.arange(8) % 10
    ball = (args.indist_attack_clf_step_size, args.indist_attack_clf_eps)
    x = script.attack(frozen, script.cross_entropy, script.pixels(clf), y.flip(0), 2, *ball)
    step = args.attack_step_size
    fake = script.attack(frozen, script.label_logit, script.pixels(ood), y, 2, step)
    logits = torch.cat([model(script.pixels(real)), model(fake)])
    truth = torch.cat([torch.ones(8), torch.zeros(8)])
    clf_loss = F.cross_entropy(model(x), y.flip(0))
    bce = F.binary_cross_entropy_with_logits(logits.logsumexp(1), truth)
    expected = torch.autograd.grad(8 * (clf_loss + bce), list(model.parameters()))

    batch = script.Batch(torch.arange(8), clf, y.flip(0), real, y, ood)
    sums, scores = script.batch_losses(args, networks, batch, 2)
    sums.sum().backward()
    assert sums.tolist() == pytest.approx([8 * clf_loss.item(), 8 * bce.item()], rel=1e-5)
    found = [p.grad for p in model.parameters()]
    torch.testing.assert_close(found, list(expected), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(scores.flatten(), logits.gather(1, y.repeat(2)[:, None])[:, 0])
    batch = script.Batch(torch.arange(8), clf, y.flip(0))
    loss, _ = script.batch_losses(args, networks, batch, 0)
    assert loss.item() == pytest.approx(8 * clf_loss.item(), rel=1e-5)


def test_the_auc():
    """scikit-learn's, with ties and without."""
    for levels in (5, 1000):
        rng = torch.Generator().manual_seed(levels)
        real = torch.randint(levels, (50,), generator=rng).float() + 1
        fake = torch.randint(levels, (70,), generator=rng).float()
        expected = roc_auc_score([1] * 50 + [0] * 70, torch.cat([real, fake]))
        assert script.auc(real, fake).item() == pytest.approx(expected, abs=1e-12)


def test_the_average_of_the_weights():
    """d = min(decay, (1 + n) / (10 + n)), running statistics included, counters not."""
    model = small_network(WIDE)
    ema_model = small_network(WIDE)
    for tensor in model.state_dict().values():
        tensor += 1
    networks = script.Networks(model, ema_model, None, None)
    for decay, share in ((0.999, 9 / 15), (0.0, 1)):
        script.update_ema(arguments(f"ema={decay}"), networks, 5)
        found = ema_model.bn1.running_var - 1
        torch.testing.assert_close(found, torch.full_like(found, share))
    assert ema_model.bn1.num_batches_tracked == 0


def test_the_best_weights():
    """Those of the longest attack, then of the highest accuracy under attack, then without."""
    loop = {"step": 1, "best": {}}
    found = []
    for T, robust, clean in [(3, 0.6, 0.9), (3, 0.5, 1.0), (3, 0.6, 0.8), (3, 0.6, 0.9), (5, 0, 0)]:
        metrics = {"clean": clean, "robust": robust}
        found.append(script.note_best(loop, "dat", metrics, T))
    assert found == [True, False, False, True, True]
    assert (loop["best"]["dat"]["T"], loop["best"]["dat"]["value"]) == (5, 0)


def test_images_are_drawn_to_train_on(digits):
    """Anew in each step, and of the training part alone."""
    args, indist, outdist = digits
    data = script.TrainingData(args, indist, outdist, "dat")
    ids = indist.part(script.TRAIN)[:24]
    batch = data[5, ids, np.arange(24)]
    later = data[6, ids, np.arange(24)]
    for name in ("clf_x", "real_x", "real_y", "ood_x"):
        assert not torch.equal(getattr(batch, name), getattr(later, name))
    for source, drawn in ((indist, batch.real_x), (outdist, batch.ood_x)):
        known = {image.tobytes() for image in source.images[source.part(script.TRAIN)]}
        assert {image.numpy().tobytes() for image in drawn} <= known


def test_the_length_of_the_attack(task, tmp_path):
    """T grows when the mean AUC of the last two steps, both finite and with this T, is high."""
    options = ["AUC_th=0.7", "attack.max_steps=5", "min_imgs_per_threshold=48"]
    faults = [[0, 14, "multiply", math.nan], [0, 15, "multiply", 1]]
    run = task.run(tmp_path / "out", *options, faults=faults)
    rows = [row for row in run.rows if "T" in row]
    T = 0
    window = []
    for row in rows:
        assert row["T"] == T
        window = [*window, math.nan if row["skipped"] else row["auc"]][-2:]
        if len(window) == 2 and np.mean(window) >= 0.7 and T < 5:
            T += 1
            window = []
    assert 0 < T
    assert [row["step"] for row in rows if row["skipped"]] == [15]
    assert (run.state["loop"]["T"], len(run.state["loop"]["aucs"])) == (T, len(window))


def test_stages_in_two_runs(task, digits, tmp_path, group, monkeypatch):
    """Validation is in fp32, also where training is not. Stage 2 starts from the given weights, and
    freezes the statistics of batch normalization."""
    steps = ["--attack_max_steps=0", "--indist_attack_clf_max_steps=0"]
    wide = [WIDE, "--global_batch_size=100", *steps]
    at = task.run(tmp_path / "at", *wide, "--total_epochs=0", "--precision=bf16", ranks=1)
    args, indist, _ = digits
    model = small_network(WIDE)
    at_best = script.read_weights(at.folder / "at_best.pt", model)
    best = script.read_weights(at.folder / "best.pt", model)
    assert not differences(best, at_best) and best["bn1.running_mean"].any()
    for name, value in script.evaluate(args, model.eval(), indist, CPU).items():
        assert at.rows[-1][f"val/at/{name}"] == pytest.approx(value, rel=1e-5), name

    more = ["--at_epochs=0", "--total_epochs=1", f"--ckpt_path={at.folder}/best.pt"]
    state = task.run(tmp_path / "dat", *wide, *more).state["model"]
    assert torch.equal(best["bn1.running_mean"], state["bn1.running_mean"])
    assert not torch.equal(best["bn1.weight"], state["bn1.weight"])

    monkeypatch.setattr(script.dist, "get_world_size", lambda: 2)
    check_refused("batch normalization over several processes takes", start_networks, WIDE)


def test_the_commands_of_the_original():
    """CONFIG.yaml KEY=VALUE, dots, and the names of its sections."""
    config = str(ROOT / "configs/config_rebm_cifar10.yaml")
    # torch.distributed.launch gives a word of its own first
    words = ["--local-rank=0", config, "use_ddp=False", "attack.max_steps=100", "ddp_backend=gloo"]
    words += ["--indist_attack_clf.eps=0.25", "model.ckpt_path=~/a=b", "rand_seed=5"]
    args = arguments(*words)
    assert (args.lr, args.seed) == (1e-3, 5)  # the rate is the file's
    assert (args.use_ddp, args.attack_max_steps, args.backend) == (False, 100, "gloo")
    assert (args.indist_attack_clf_eps, args.ckpt_path) == (0.25, os.path.expanduser("~/a=b"))
    assert arguments("--config", config, "seed=7").seed == 7


def test_options_that_cannot_be():
    wrong = {
        "at_epochs=0": "and --ckpt_path to start from",
        "use_ema=True fp16=True": "unrecognized .*; fp16 is precision here; use_ema is ema here",
        "attack.lr=0.5": "unrecognized arguments: --attack_lr=0.5",  # it was --lr
        "indist_attack_clf.norm=Linf": "0.5 in Linf makes any image grey",
    }
    for option, said in wrong.items():
        check_refused(said, arguments, *option.split())


def test_a_first_step_that_is_skipped_leaves_no_trace():
    """torch's fused SGD takes whatever lies in memory as its momentum then."""
    model = torch.nn.Linear(1000, 100)
    optimizer = script.make_optimizer(arguments("at_optimizer=sgd"), model, "at")
    before = model.weight.detach().clone()
    for factor in (math.nan, 0.0):
        (model.weight.sum() * factor + model.bias.sum() * factor).backward()
        script.update_if_finite(arguments(), optimizer)
    assert torch.allclose(model.weight, before, atol=1e-3)


# ---- Tools: from images over training to figures and pictures -----------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory, server):
    """The folder of a run, out/, its data, digits.npz, and the first of the test, 0.png, ..."""
    folder = tmp_path_factory.mktemp("tools")
    task = Task(script.__name__, folder, server, "--at_epochs=8", "--batch_size=24")
    task.run(folder / "out", ranks=1)
    for i, image in enumerate(np.load(folder / "digits.npz")["x_test"][:20]):
        Image.fromarray(image).save(folder / f"{i}.png")
    return folder


def test_a_network_is_measured(trained, tmp_path, monkeypatch):
    """Accuracy under attack falls with the radius, to 0. Weights alone, as others release them, and
    under DDP's names, have the same figures."""
    monkeypatch.chdir(tmp_path)
    best = trained / "out/best.pt"
    state = torch.load(best)["ema_model"]
    torch.save({f"module.{name}": tensor for name, tensor in state.items()}, "a.pth")
    options = "--radii 0.1 0.5 6 --attack_steps=10 --ood_images=100 --outside noise blobs"
    alone = f"a.pth --model_type=SmallNet --data={trained}/digits.npz --cache_dir=cache"
    figures = []
    for name, network in {"ours.json": best, "alone.json": alone}.items():
        words = f"{network} --out={name} --device=cpu {options}"
        text = call_script("tools/evaluate_rebm", *words.split())
        assert f"{name}: of 100 noise, 100 blobs, 60 test images" in text
        figures.append(json.loads(Path(name).read_text()))
        del figures[-1]["options"]

    found = figures[0]
    order = [found[name] for name in ("clean", "robust@0.1", "robust@0.5", "robust@6")]
    assert order == sorted(order, reverse=True)
    assert order[0] > 0.5 and order[-1] == 0
    share = found["clean"]
    assert found["standard_errors"]["clean"] == pytest.approx(math.sqrt(share * (1 - share) / 59))
    for kind in script.SYNTHETIC:
        attacked, _ = [own.pop(f"adv_auroc {kind}") for own in figures]  # in the ball of training
        assert 0 <= attacked <= found[f"auroc {kind}"] <= 1
    assert found == figures[1]

    check_refusal(f"evaluate_rebm {best} --out=ours.json", "--out ours.json exists")
    check_refusal(f"evaluate_rebm {best} --norm=L2", "--norm L2: give --radii in this norm")
    check_refusal("evaluate_rebm a.pth", "a.pth: it is of .*; or weights, --model_type and --data")


def test_a_network_generates(trained):
    """Images on which the logit of their class is higher than where they started."""
    words = [f"{trained}/out/best.pt", "--num_samples=33", "--steps=4", "--batch_size=7"]
    files = [f"--out={trained}/samples.png", f"--folder={trained}/samples", "--device=cpu"]
    text = call_script("tools/generate_rebm", *words, *files)
    assert "samples.png: 30 of 33 images, 10 classes" in text
    paths = sorted((trained / "samples").iterdir())
    made = np.stack([np.asarray(Image.open(path)) for path in paths])
    assert made.shape == (33, 8, 8, 3) and paths[32].name == "000032.png"
    made = made.transpose(0, 3, 1, 2)[:, :1]
    # the eighth column has class 7, and the second row its second image, within a line of grey
    shown = np.asarray(Image.open(trained / "samples.png").resize((100, 30), 0))[..., 0]
    assert np.array_equal(shown[11:19, 71:79], made[17, 0])
    call_script("tools/generate_rebm", *words, *files, status=2)  # it does not write over a file

    args = parse_arguments(generate, *words, f"--out={trained}/other.png")
    network, state = generate.load_network(args, CPU)
    # attacks of others call .view on gradients by images: their channels must not be last
    assert all(weight.is_contiguous() for weight in network.parameters())
    noise = generate.load_images(args, state)[1]["noise"]
    starts = noise.images[noise.part(script.TEST)[:33]]
    found = []
    for images in (starts, made):
        logits = network(script.pixels(torch.from_numpy(images.copy())))
        found.append(script.label_logit(logits, torch.arange(33) % 10))
    assert (found[1] > found[0]).all()

    few = SimpleNamespace(images=noise.images, part=lambda part: noise.part(part)[:20])
    args.num_samples = 60
    images, labels, _ = generate.choose_starts(args, state, few)
    several, _ = generate.generate(network, images, labels, args, 0.1)
    assert len(several.flatten(1).unique(dim=0)) == 60, "some are made twice"


def test_images_are_led_to_classes(trained, tmp_path, monkeypatch):
    """Each of one's own to each class, within the ball; or to any."""
    monkeypatch.chdir(tmp_path)
    network = f"{trained}/out/best.pt --device=cpu"
    words = f"{network} --images {trained}/0.png {trained}/1.png {trained}/2.png --to"
    text = call_script("tools/generate_rebm", *words.split(), "any", "--out=any.png")
    assert "any.png: 3 of 3 images, 1 classes" in text
    own = ["--out=a.png", "--folder=a", "--radius=1"]
    text = call_script("tools/generate_rebm", *words.split(), "7", "3", *own)
    assert "a.png: 6 of 6 images, 2 classes" in text and "led to: " in text
    images = np.load(trained / "digits.npz")["x_test"].astype(float)
    for i in range(6):
        made = np.asarray(Image.open(f"a/{i:06}.png"))[..., 0]
        distance = np.linalg.norm((made - images[i // 2]) / 255)
        assert 0 < distance <= 1 + 8 / 2 / 255  # they are rounded

    check_refusal(f"generate_rebm {words} cat", "--to cat: expected any, or some of 0, 1")
    check_refusal(f"generate_rebm {words} any 1", "--to any: expected no class beside it")
    Path("bad.png").write_bytes(b"no picture")
    check_refusal(f"generate_rebm {network} --images bad.png", "cannot identify image file")


def test_other_images_than_those_of_the_run(trained, task, tmp_path, monkeypatch):
    """Are named, or refused where they do not fit."""
    monkeypatch.chdir(tmp_path)
    words = f"{trained}/out/best.pt --steps=1 --device=cpu --cache_dir=cache --num_samples=20"
    text = call_script("tools/generate_rebm", *words.split(), f"--data={task.folder}/digits.npz")
    assert "not the images of the run" in text
    np.savez("two.npz", x_train=np.load(f"{trained}/digits.npz")["x_test"], y_train=[0, 1] * 30)
    check_refusal(f"generate_rebm {words} --data=two.npz --out=b.png", "network's, 1, 0, 1, 2")


def test_pictures_are_classified(trained):
    """From files, without the data of the run."""
    data = np.load(trained / "digits.npz")
    paths = [trained / f"{i}.png" for i in range(20)]
    names, shares, scores = zip(*evaluate.classify(trained / "out/best.pt", paths), strict=True)
    assert np.mean(np.array(names) == data["y_test"][:20].astype(str)) > 0.5
    network = small_network().eval()
    script.read_weights(trained / "out/best.pt", network)
    for i, image in enumerate(torch.from_numpy(data["x_test"][:20])):
        logits = network(script.pixels(image[None, None]))[0]
        assert logits.softmax(0).max().item() == shares[i]
        assert logits.logsumexp(0).item() == scores[i]


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
    package = mock.Mock()
    whole = package.AutoAttack.return_value
    whole.run_standard_evaluation = lambda x, labels, bs: torch.cat([x[:2], 1e3 * (x[2:] - 1)])
    monkeypatch.setitem(sys.modules, "autoattack", package)
    attacks = evaluate.make_autoattack(network, 5, 0.5, "L2")
    options = package.AutoAttack.call_args.kwargs
    assert (options["norm"], options["eps"]) == ("L2", 0.5)
    assert whole.fab.n_target_classes == whole.apgd_targeted.n_target_classes == 4

    expected = network(attacks[0](x, labels)).argmax(1) == labels
    assert evaluate.autoattack(network, attacks, x, labels).equal(expected)
    assert expected[:2].all() and not expected.all()
    for name in ("autoattack", "torchattacks"):
        monkeypatch.setitem(sys.modules, name, None)
    said = "--autoattack needs a package: pip install"
    check_refused(said, evaluate.make_autoattack, network, 5, 0.5, "L2")


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
