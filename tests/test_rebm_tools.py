"""tools/evaluate_rebm.py, generate_rebm.py: from images over training to figures and pictures."""

import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import call_script, import_tool, write_digits
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
    words += [f"--out={out}", "--ood_images=100", "--device=cpu"]
    call_script("tools/evaluate_rebm", *words)
    found = json.loads(out.read_text())
    order = [found[name] for name in ("clean", "robust@0.1", "robust@0.5", "robust@6")]
    assert order == sorted(order, reverse=True)
    assert order[0] > 0.5 and order[-1] == 0
    for kind in script.SYNTHETIC:
        assert 0 <= found[f"adv_auroc {kind}"] <= found[f"auroc {kind}"] <= 1
    assert found["options"]["attack_steps"] == 10
    call_script("tools/evaluate_rebm", *words, status=2)  # it does not write over a file


def test_a_network_generates(trained):
    """Images on which the logit of their class is higher than where they started."""
    checkpoint = trained / "out/best.pt"
    words = [checkpoint, f"--out={trained}/samples.png", f"--npz={trained}/samples.npz"]
    words += ["--num_samples=33", "--steps=4", "--batch_size=7", "--device=cpu"]
    text = call_script("tools/generate_rebm", *words)
    assert "samples.png: 30 of 33 images, 10 classes" in text
    assert re.search(r"best.pt: of step \d+, stage 2, T = \d", text)
    made = np.load(trained / "samples.npz")
    assert np.array_equal(made["labels"], np.arange(33) % 10)
    # the eighth column has class 7, and the second row its second image, within a line of grey
    shown = np.asarray(Image.open(trained / "samples.png").resize((100, 30), 0))[..., 0]
    assert np.array_equal(shown[11:19, 71:79], made["images"][17, 0])

    network, state = generate.load_network(checkpoint, CPU)
    args = SimpleNamespace(data=None, outdist_data=None, cache_dir=None)
    _, noise = generate.load_images(args, state)
    starts = noise.part(script.TEST)
    found = []
    for images in (noise.images[starts[:33]], made["images"]):
        logits = network(script.pixels(torch.from_numpy(images)))
        found.append(script.label_logit(logits, torch.from_numpy(made["labels"])))
    assert (found[1] > found[0]).all()

    few = SimpleNamespace(images=noise.images, part=lambda part: starts[:20])
    more = SimpleNamespace(num_samples=60, step_size=None, steps=1, batch_size=60)
    several = generate.generate(network, state, few, CPU, more)
    assert len(several.flatten(1).unique(dim=0)) == 60, "some are made twice"
    call_script("tools/generate_rebm", *words, status=2)  # it does not write over a file


def test_one_image_is_classified(trained, tmp_path):
    """From a file, without the data of the run."""
    images = np.load(trained / "digits.npz")
    paths = [tmp_path / f"{i}.png" for i in range(20)]
    for path, image in zip(paths, images["x_test"][:20], strict=True):
        Image.fromarray(image).save(path)
    names, shares, scores = zip(*evaluate.classify(trained / "out/best.pt", paths), strict=True)
    assert np.mean(np.array(names) == images["y_test"][:20].astype(str)) > 0.5
    assert all(0.1 <= share <= 1 for share in shares) and all(map(math.isfinite, scores))


def test_other_images_than_those_of_the_run(trained, tmp_path):
    """Are named, or refused where they do not fit; and so is what is no checkpoint."""
    write_digits(tmp_path / "others.npz", 200, 60)
    call = ["tools/generate_rebm", trained / "out/best.pt", "--steps=1", "--device=cpu"]
    call += [f"--cache_dir={tmp_path}", "--num_samples=20", f"--data={tmp_path}/others.npz"]
    assert "other images than the run's" in call_script(*call, f"--out={tmp_path}/a.png")
    images = np.zeros((60, 8, 8), np.uint8) + np.arange(60, dtype=np.uint8)[:, None, None]
    np.savez(tmp_path / "two.npz", x_train=images, y_train=np.arange(60) % 2)
    call += [f"--out={tmp_path}/b.png", f"--data={tmp_path}/two.npz"]
    assert "not the network's" in call_script(*call, status=2)
    torch.save({"script": "train_ddp.py"}, tmp_path / "other.pt")
    text = call_script("tools/evaluate_rebm", tmp_path / "other.pt", status=2)
    assert "other.pt: expected best.pt, step_N.pt or latest.pt of run_train_rebm_ddp.py" in text
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
