"""tools/prepare_images.py, evaluate_rebm.py, generate_rebm.py: readers against what was written,
known answers, and the way from images over training to figures and pictures."""

import importlib
import json
import math
import pickle
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import ROOT, call_script, write_digits

import run_train_rebm_ddp as script

sys.path.insert(0, str(ROOT / "tools"))
prepare = importlib.import_module("prepare_images")
evaluate = importlib.import_module("evaluate_rebm")
generate = importlib.import_module("generate_rebm")

TRAIN = """--width=8 --attack.max_steps=3 --attack.step_size=0.3 --indist_attack_clf.max_steps=2
    --at_epochs=4 --total_epochs=1 --at_lr=2e-2 --optimizer=adamw --lr=3e-3 --AUC_th=0.6 --ema=0.9
    --min_imgs_per_threshold=48 --batch_size=24 --eval_steps=2 --device=cpu""".split()


def run(tool, words, capsys):
    """(exit status, its last words) of a tool."""
    status = 0
    try:
        with mock.patch.object(sys, "argv", ["tool", *map(str, words)]):
            tool.main()
    except SystemExit as end:
        status = end.code
    output = capsys.readouterr()
    return status, output.err if status else output.out


def refused(words, message, capsys):
    status, text = run(prepare, words, capsys)
    assert status == 2 and message in text and "Traceback" not in text, text


# --------------------------------------------------------------------------------------------------
# prepare_images.py


def write_cifar(folder, classes):
    """200 rows a file, as CIFAR's; {part: (images, labels)} of what they hold."""
    files = {"train": ["train"], "test": ["test"]}
    if classes == 10:
        files = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}
    rng = np.random.default_rng(classes)
    held = {}
    for part, names in files.items():
        x = rng.integers(0, 256, (200 * len(names), 3072), np.uint8)
        y = np.arange(len(x)) % classes
        held[part] = (x.reshape(-1, 3, 32, 32), y)
        for name, rows in zip(names, np.split(np.arange(len(x)), len(names)), strict=True):
            key = b"labels" if classes == 10 else b"fine_labels"
            content = {b"data": x[rows], key: y[rows].tolist(), b"coarse_labels": [0] * 200}
            (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    return held


@pytest.mark.parametrize("classes", [10, 100])
def test_cifar(tmp_path, classes, capsys):
    folder = tmp_path / f"cifar-{classes}-batches"
    folder.mkdir()
    held = write_cifar(folder, classes)
    name = f"cifar{classes}"
    out = tmp_path / "out"
    assert run(prepare, [name, tmp_path, f"--out={out}"], capsys)[0] == 0
    data = script.Images(out)
    assert len(data.classes) == classes and data.size == 32
    test = data.part("test")
    assert np.array_equal(data.images[test], held["test"][0])
    assert np.array_equal(data.labels[test], held["test"][1])
    both = np.sort(np.concatenate([data.part("train"), data.part("valid")]))
    assert np.array_equal(data.images[both], held["train"][0])
    assert np.array_equal(data.labels[both], held["train"][1])
    assert len(data.part("valid")) == len(both) * 7 // 100

    damaged = next(folder.glob("test*"))
    damaged.write_bytes(damaged.read_bytes()[:-7])
    refused([name, tmp_path, f"--out={tmp_path}/other"], f"{damaged}: ", capsys)
    assert not (tmp_path / "other").exists()


def test_pickles_run_nothing(tmp_path, capsys):
    write_cifar(tmp_path, 10)

    class Bad:
        def __reduce__(self):
            return (__import__("os").system, (f"touch {tmp_path}/ran",))

    (tmp_path / "test_batch").write_bytes(pickle.dumps(Bad()))
    refused(["cifar10", tmp_path, f"--out={tmp_path}/out"], "it holds a posix.system", capsys)
    assert not (tmp_path / "ran").exists()


def test_tiny_images(tmp_path, capsys):
    """Fortran order within a row; the rows that are CIFAR's are left out, or it is said."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (60, 32, 32, 3), np.uint8)
    source = tmp_path / "tiny.bin"
    source.write_bytes(b"".join(image.tobytes(order="F") for image in images))
    listed = np.array([0, 3, 4, 17, 39])
    np.savetxt(tmp_path / "a.txt", listed[3:], fmt="%d")
    np.savetxt(tmp_path / "b.txt", listed[:3], fmt="%d")
    words = ["tinyimages", source, f"--out={tmp_path}/out"]
    refused(words, "what is CIFAR must not be an OOD image", capsys)
    lists = ["--exclude", f"{tmp_path}/a.txt", f"{tmp_path}/b.txt"]
    assert run(prepare, [*words, *lists], capsys)[0] == 0
    data = script.Images(tmp_path / "out")
    kept = np.setdiff1d(np.arange(60), listed)
    assert data.classes == [] and np.array_equal(data.images, images[kept].transpose(0, 3, 1, 2))
    words[2:] = [f"--out={tmp_path}/few", "--exclude=none"]
    with mock.patch.object(prepare, "TINY_IMAGES", 30):
        assert run(prepare, words, capsys)[0] == 0
    few = {image.tobytes() for image in script.Images(tmp_path / "few").images}
    assert len(few) == 30 and few <= {x.tobytes() for x in images.transpose(0, 3, 1, 2)}
    source.write_bytes(b"x" * 5000)
    refused([*words[:2], f"--out={tmp_path}/x", *lists], "has 5000 bytes: expected rows", capsys)


def write_pictures(folder, count, classes=("cat", "dog")):
    from PIL import Image

    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            color = (40 + 100 * number + i, 0, 0)
            Image.new("RGB", (50 + 10 * i, 40), color).save(folder / name / f"{i}.png")


def test_image_folders(tmp_path, capsys):
    """Classes, squares, OOD images; all bad images by name; classes that are not the same in both
    parts, or only one, by name."""
    write_pictures(tmp_path / "raw" / "train", 6)
    write_pictures(tmp_path / "raw" / "val", 4)
    words = ["folder", f"{tmp_path}/raw", "--size=28", "--valid=2"]
    assert run(prepare, [*words, f"--out={tmp_path}/out"], capsys)[0] == 0
    data = script.Images(tmp_path / "out")
    assert data.classes == ["cat", "dog"] and data.size == 28 and data.images.shape[2:] == (32, 32)
    test = data.part("test")
    assert data.labels[test].tolist() == [0] * 4 + [1] * 4
    red = data.images[test][:, 0].max((1, 2))
    assert red.tolist() == [40, 41, 42, 43, 140, 141, 142, 143]
    write_pictures(tmp_path / "others", 12, ("", "deep/er"))
    other = ["folder", f"{tmp_path}/others", "--size=28", f"--out={tmp_path}/ood"]
    assert run(prepare, other, capsys)[0] == 0
    assert script.Images(tmp_path / "ood").classes == []

    bad = [tmp_path / "raw" / "train" / name for name in ("cat/2.png", "dog/0.png")]
    for path in bad:
        path.write_bytes(b"no image")
    words.append(f"--out={tmp_path}/bad")
    status, text = run(prepare, words, capsys)
    assert status == 2 and "2 of 20 images are bad" in text
    assert all(str(path) in text for path in bad)
    assert run(prepare, [*words, "--skip_bad_data"], capsys)[0] == 0
    data = script.Images(tmp_path / "bad")
    parts = np.concatenate([data.part(name) for name in ("train", "valid", "test")])
    assert len(parts) == 18 and data.images[parts].max((1, 2, 3)).all()  # none of them is black
    assert str(bad[1]) in (tmp_path / "bad" / "bad_images.txt").read_text()

    words[-1] = f"--out={tmp_path}/x"
    (tmp_path / "raw" / "val" / "dog").rename(tmp_path / "raw" / "val" / "wolf")
    words.append("--skip_bad_data")
    refused(words, "the training part has no images of wolf", capsys)
    write_pictures(tmp_path / "one" / "train", 4, ("cat",))
    write_pictures(tmp_path / "one" / "val", 4, ("cat",))
    words[1] = f"{tmp_path}/one"
    refused(words, "1 class: a classifier needs two or more", capsys)

    write_pictures(tmp_path / "three" / "train", 6)
    words = ["folder", f"{tmp_path}/three", "--size=28", f"--out={tmp_path}/all"]
    refused(words, "has train/, but neither val/ nor test/", capsys)
    write_pictures(tmp_path / "three" / "val", 3)
    write_pictures(tmp_path / "three" / "test", 4)
    refused([*words, "--valid=2"], "has val/ and test/, leave it out", capsys)
    assert run(prepare, words, capsys)[0] == 0
    data = script.Images(tmp_path / "all")
    assert [len(data.part(name)) for name in ("train", "valid", "test")] == [12, 6, 8]


def test_arrays(tmp_path, capsys):
    x = np.random.default_rng(0).integers(0, 256, (20, 8, 8), np.uint8)
    y = np.arange(20) % 4
    good = {"x_train": x, "y_train": y, "x_test": x[:8], "y_test": y[:8]}
    path = tmp_path / "a.npz"
    words = ["arrays", path, f"--out={tmp_path}/out", "--valid=2"]
    wrong = {
        "images are float64": {"x_train": x / 2},
        "not uint8 (N, S, S)": {"x_train": x[:, :, :7]},
        "y_test is not a file": {"y_test": None},
        "there are y_train, x_test, y_test": {"x_train": None},
        "label 3 (of train, then test) is -1": {"y_train": np.where(np.arange(20) == 3, -1, y)},
        "have [3, 8] labels, not [20, 8]": {"y_train": y[:3]},
        "the training part has no images of 4, 5, 6": {"y_test": np.full(8, 6)},
    }
    for message, change in wrong.items():
        content = {**good, **change}
        np.savez(path, **{name: array for name, array in content.items() if array is not None})
        refused(words, message, capsys)
        assert not (tmp_path / "out").exists()

    np.savez(path, **good)
    assert run(prepare, words, capsys)[0] == 0
    data = script.Images(tmp_path / "out")
    assert np.array_equal(data.images[:, 0], np.concatenate([x, x[:8]]))
    assert len(data.part("test")) == 8 and len(data.part("valid")) == 2
    refused(words, "exists: remove it", capsys)


# --------------------------------------------------------------------------------------------------
# evaluate_rebm.py, generate_rebm.py


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tools")
    write_digits(folder / "digits", 300, 60)
    options = [f"--data={folder}/digits", *TRAIN, f"--output_dir={folder}/out"]
    status, text = call_script("run_train_rebm_ddp", *options)
    assert status == 0, text[-3000:]
    return folder


def test_a_network_is_measured(trained, capsys):
    """Accuracy under attack falls with the radius, to 0; figures are the same each time."""
    out = trained / "evaluation.json"
    words = [trained / "out/best.pt", "--radii", "0.1", "0.5", "6", "--attack_steps=10"]
    words += ["--starts=3", "--num_samples=40", "--steps=5", f"--out={out}", "--device=cpu"]
    status, text = run(evaluate, words, capsys)
    assert status == 0, text
    found = json.loads(out.read_text())
    order = [found[name] for name in ("clean", "robust@0.1", "robust@0.5", "robust@6")]
    assert order == sorted(order, reverse=True) and order[0] > 0.5 and order[-1] == 0
    for kind in script.GENERATED:
        assert 0 <= found[f"adv_auroc {kind}"] <= found[f"auroc {kind}"] <= 1
    assert 0 < found["frechet_pixels real"] < found["frechet_pixels"]
    data = script.Images(trained / "digits")
    labels = data.labels[data.part("test")]
    assert found["commonest class"] == np.bincount(labels).max() / len(labels)
    assert run(evaluate, words, capsys)[0] == 0
    assert json.loads(out.read_text()) == found


def test_a_network_generates(trained, capsys):
    from PIL import Image

    out = trained / "samples.png"
    words = [trained / "out/best.pt", f"--out={out}", f"--npz={trained}/samples.npz"]
    words += ["--num_samples=33", "--steps=4", "--batch_size=7", "--device=cpu"]
    status, text = run(generate, words, capsys)
    assert status == 0, text
    picture = Image.open(out)
    assert picture.width >= 480 and picture.width % 100 == 0
    made = np.load(trained / "samples.npz")
    assert made["images"].shape == (33, 1, 8, 8) and made["images"].dtype == np.uint8
    assert np.array_equal(made["labels"], np.arange(33) % 10)
    args = torch.load(trained / "out/best.pt", weights_only=True)["args"]
    network = script.make_network(SimpleNamespace(**args), 10, 1, 8)
    script.load_weights(network, trained / "out/best.pt")
    noise = script.GeneratedImages("noise", 1, 8)
    first = noise.images[noise.part("test")[:33]]

    def logits(images):
        with torch.no_grad():
            return network(script.pixels(torch.from_numpy(images)))

    labels = torch.from_numpy(made["labels"])
    gained = script.label_logit(logits(made["images"]), labels)
    assert (gained > script.label_logit(logits(first), labels)).all()
    assert run(generate, words, capsys)[0] == 2  # it does not write over a file


def test_checkpoints_that_are_none(capsys, tmp_path):
    torch.save({"script": "train_ddp.py", "format": 3}, tmp_path / "other.pt")
    (tmp_path / "text.pt").write_text("no checkpoint")
    messages = {"other.pt": "is no checkpoint of run_train_rebm_ddp.py", "text.pt": "is damaged"}
    for name, message in messages.items():
        for tool in (evaluate, generate):
            status, text = run(tool, [tmp_path / name, f"--out={tmp_path}/x"], capsys)
            assert status == 2 and message in text and len(text.splitlines()) == 1


@pytest.mark.parametrize("norm", ["L2", "Linf"])
def test_robust_accuracy_of_a_linear_network(norm):
    """A linear network errs within a radius where the margin, by the length of the difference of
    two classes' weights in the other norm, is below it."""
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 16, generator=rng)
    x = 0.35 + 0.3 * torch.rand(200, 1, 4, 4, generator=rng)  # the ball stays within [0, 1]
    eps = 0.05 if norm == "L2" else 0.012

    def network(z):
        return z.flatten(1) @ weight.T

    logits = network(x)
    labels = logits.argmax(1)
    expected = torch.ones(200, dtype=torch.bool)
    for other in range(3):
        difference = weight[labels] - weight[other]
        length = difference.norm(dim=1) if norm == "L2" else difference.abs().sum(1)
        lead = logits.gather(1, labels[:, None])[:, 0] - logits[:, other]
        expected &= (other == labels) | (lead > eps * length)
    options = SimpleNamespace(indist_attack_clf_norm=norm)
    args = SimpleNamespace(starts=3, attack_steps=30)
    moves = (evaluate.random_points(x, eps, norm, rng) - x).flatten(1)
    lengths = torch.linalg.vector_norm(moves, 2 if norm == "L2" else math.inf, dim=1)
    assert 0.7 * eps < lengths.max() <= eps * (1 + 1e-5)
    found = evaluate.survivors(network, x, labels, options, eps, args, rng)
    assert 20 < expected.sum() < 180
    assert torch.equal(found, expected)
    wrong = (labels + 1) % 3
    assert not evaluate.survivors(network, x, wrong, options, eps, args, rng).any()


def test_the_frechet_distance():
    from scipy.linalg import sqrtm

    rng = torch.Generator().manual_seed(0)
    a = torch.randn(80, 6, generator=rng).double()
    b = torch.randn(90, 6, generator=rng).double() * 1.5 + 0.3
    root = sqrtm(np.cov(a.T) @ np.cov(b.T)).real
    means = (a.mean(0) - b.mean(0)).square().sum().item()
    expected = means + np.trace(np.cov(a.T) + np.cov(b.T) - 2 * root)
    assert evaluate.frechet(a, b) == pytest.approx(float(expected), rel=1e-6)
    assert evaluate.frechet(a, a) == pytest.approx(0, abs=1e-9)
