"""tools/prepare_images.py, evaluate_rebm.py, generate_rebm.py: readers against what was written,
known answers, and the way from images over training to figures and pictures."""

import json
import math
import pickle
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import ROOT, call_program, call_script, import_tool, write_digits
from PIL import Image

import run_train_rebm_ddp as script

prepare = import_tool("prepare_images")
evaluate = import_tool("evaluate_rebm")
generate = import_tool("generate_rebm")

TRAIN = """--width=8 --attack.max_steps=3 --attack.step_size=0.3 --indist_attack_clf.max_steps=2
    --at_epochs=4 --total_epochs=1 --at_lr=2e-2 --optimizer=adamw --lr=3e-3 --AUC_th=0.6 --ema=0.9
    --min_imgs_per_threshold=48 --batch_size=24 --eval_steps=2 --device=cpu""".split()


# --------------------------------------------------------------------------------------------------
# prepare_images.py


def prepared(out, *words):
    """The images in the folder that prepare_images.py makes."""
    prepare.main([*map(str, words), f"--out={out}"])
    return script.Images(out)


@pytest.fixture
def refused(tmp_path, capsys):
    """refused(message, *words): prepare_images.py says this, and leaves no folder."""

    def call(message, *words):
        with pytest.raises(SystemExit) as caught:
            prepared(tmp_path / "none", *words)
        assert caught.value.code == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "none").exists()

    return call


@pytest.mark.parametrize("classes", [10, 100])
def test_cifar(tmp_path, classes, refused):
    """200 rows a file, in the form of CIFAR's."""
    folder = tmp_path / f"cifar-{classes}-batches"
    folder.mkdir()
    files = ["train", "test"]
    if classes == 10:
        files = [*[f"data_batch_{i}" for i in range(1, 6)], "test_batch"]
    key = b"labels" if classes == 10 else b"fine_labels"
    x = np.random.default_rng(classes).integers(0, 256, (200 * len(files), 3072), np.uint8)
    y = np.arange(len(x)) % classes
    for number, name in enumerate(files):
        rows = slice(200 * number, 200 * number + 200)
        content = {b"data": x[rows], key: y[rows].tolist(), b"coarse_labels": [0] * 200}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))

    data = prepared(tmp_path / "out", f"cifar{classes}", tmp_path)
    assert len(data.classes) == classes
    assert data.size == 32
    assert np.array_equal(data.images, x.reshape(-1, 3, 32, 32))
    assert np.array_equal(data.labels, y)
    assert data.part("test").tolist() == [*range(len(x) - 200, len(x))]
    assert len(data.part("valid")) == (len(x) - 200) * 7 // 100

    damaged = folder / files[-1]
    damaged.write_bytes(damaged.read_bytes()[:-7])
    refused(f"{damaged}: ", f"cifar{classes}", tmp_path)


def test_pickles_run_nothing(tmp_path, refused):
    class Bad:
        def __reduce__(self):
            return (__import__("os").system, (f"touch {tmp_path}/ran",))

    (tmp_path / "train").write_bytes(pickle.dumps(Bad()))
    refused("it holds a posix.system", "cifar100", tmp_path)
    assert not (tmp_path / "ran").exists()


def test_tiny_images(tmp_path, refused):
    """Fortran order within a row; the rows that are CIFAR's are left out, or it is said."""
    images = np.random.default_rng(0).integers(0, 256, (60, 32, 32, 3), np.uint8)
    source = tmp_path / "tiny.bin"
    source.write_bytes(b"".join(image.tobytes(order="F") for image in images))
    (tmp_path / "a.txt").write_text("0\n39\n")
    (tmp_path / "b.txt").write_text("17\n")
    refused("give files with the rows that are images of CIFAR", "tinyimages", source)
    lists = [tmp_path / "a.txt", tmp_path / "b.txt"]
    data = prepared(tmp_path / "out", "tinyimages", source, "--exclude", *lists)
    kept = np.setdiff1d(np.arange(60), [0, 17, 39])
    assert data.classes == []
    assert np.array_equal(data.images, images[kept].transpose(0, 3, 1, 2))

    with mock.patch.object(prepare, "TINY_IMAGES", 30):
        few = prepared(tmp_path / "few", "tinyimages", source, "--exclude=none").images
    found = {image.tobytes() for image in few}
    assert len(found) == 30
    assert found <= {image.tobytes() for image in images.transpose(0, 3, 1, 2)}


def write_pictures(folder, count, classes=("cat", "dog")):
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            color = (40 + 100 * number + i, 0, 0)
            Image.new("RGB", (50 + 10 * i, 40), color).save(folder / name / f"{i}.png")


def test_image_folders(tmp_path, refused):
    """Classes, squares, OOD images. Bad images are all named, or left out."""
    raw = tmp_path / "raw"
    write_pictures(raw / "train", 6)
    write_pictures(raw / "val", 4)
    words = ["folder", raw, "--size=28", "--valid=2"]
    data = prepared(tmp_path / "out", *words)
    assert data.classes == ["cat", "dog"]
    assert data.size == 28
    assert data.images.shape[2:] == (32, 32)
    test = data.part("test")
    assert data.labels[test].tolist() == [0] * 4 + [1] * 4
    red = data.images[test][:, 0].max((1, 2))
    assert red.tolist() == [40, 41, 42, 43, 140, 141, 142, 143]
    write_pictures(tmp_path / "others", 12, ("", "deep/er"))
    assert prepared(tmp_path / "ood", "folder", tmp_path / "others", "--size=28").classes == []

    bad = [raw / "train" / "cat" / "2.png", raw / "train" / "dog" / "0.png"]
    for path in bad:
        path.write_bytes(b"no image")
        refused(str(path), *words)
    refused("2 of 20 images are bad", *words)
    data = prepared(tmp_path / "rest", *words, "--skip_bad_data")
    parts = np.concatenate([data.part(name) for name in ("train", "valid", "test")])
    assert len(parts) == 18
    assert data.images[parts].max((1, 2, 3)).all()  # none of them is black

    for path in bad:
        path.unlink()
    stray = raw / "train" / "stray.png"
    Image.new("RGB", (40, 40)).save(stray)
    refused(f"{stray} lies in no folder of a class", *words)
    stray.unlink()
    (raw / "val" / "dog").rename(raw / "val" / "wolf")
    refused("the training part has no images of wolf", *words)


def test_pictures_of_other_kinds(tmp_path, refused, capsys):
    """What is transparent becomes white. 16 bits are refused, other files are counted."""
    others = tmp_path / "others"
    write_pictures(others, 12, ("",))
    Image.new("RGBA", (40, 40), (0, 0, 0, 0)).save(others / "9a.png")
    (others / "notes.txt").write_text("no image")
    words = ["folder", others, "--size=28"]
    data = prepared(tmp_path / "out", *words)
    assert (data.images.min((1, 2, 3)) == 255).sum() == 1
    assert "1 files are left out" in capsys.readouterr().out
    Image.fromarray(np.full((40, 40), 40_000, np.uint16)).save(others / "deep.png")
    refused("deep.png: mode I;16: expected 8 bits", *words)


def test_folders_of_three_parts(tmp_path, refused):
    words = ["folder", tmp_path / "raw", "--size=28"]
    write_pictures(tmp_path / "raw" / "train", 6)
    refused("has train/, but neither val/ nor test/", *words)
    write_pictures(tmp_path / "raw" / "val", 3)
    write_pictures(tmp_path / "raw" / "test", 4)
    refused("has val/ and test/, leave it out", *words, "--valid=2")
    data = prepared(tmp_path / "out", *words)
    assert [len(data.part(name)) for name in ("train", "valid", "test")] == [12, 6, 8]


def test_arrays(tmp_path, refused):
    x = np.random.default_rng(0).integers(0, 256, (20, 8, 8), np.uint8)
    y = np.arange(20) % 4
    good = {"x_train": x, "y_train": y, "x_test": x[:8], "y_test": y[:8]}
    path = tmp_path / "a.npz"
    wrong = {
        "images are float64": {"x_train": x / 2},
        "x_test is not a file": {"x_test": []},
        "y_train is int64 (20,), not 20 whole numbers from 0 on": {"y_train": y - 1},
        "y_train is int64 (3,), not 20 whole": {"y_train": y[:3]},
        "the training part has no images of 4, 5, 6": {"y_test": np.full(8, 6)},
    }
    for message, change in wrong.items():
        content = {**good, **change}
        np.savez(path, **{name: array for name, array in content.items() if len(array)})
        refused(message, "arrays", path, "--valid=2")

    np.savez(path, **good)
    data = prepared(tmp_path / "out", "arrays", path, "--valid=2")
    assert np.array_equal(data.images[:, 0], np.concatenate([x, x[:8]]))
    assert np.array_equal(data.labels, np.concatenate([y, y[:8]]))
    assert len(data.part("test")) == 8
    assert len(data.part("valid")) == 2


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


def test_a_network_is_measured(trained):
    """Accuracy under attack falls with the radius, to 0."""
    out = trained / "figures.json"
    words = [trained / "out/best.pt", "--radii", "0.1", "0.5", "6", "--attack_steps=10"]
    words += ["--starts=3", "--num_samples=40", "--steps=5", f"--out={out}", "--device=cpu"]
    status, text = call_program(ROOT / "tools/evaluate_rebm.py", *words)
    assert status == 0, text
    found = json.loads(out.read_text())
    order = [found[name] for name in ("clean", "robust@0.1", "robust@0.5", "robust@6")]
    assert order == sorted(order, reverse=True)
    assert order[0] > 0.5
    assert order[-1] == 0
    for kind in script.GENERATED:
        assert 0 <= found[f"adv_auroc {kind}"] <= found[f"auroc {kind}"] <= 1
    assert 0 < found["frechet_pixels real"] < found["frechet_pixels"]
    assert found["options"]["starts"] == 3


def test_a_network_generates(trained):
    """Images on which the logit of their class is higher than where they started."""
    checkpoint = trained / "out/best.pt"
    words = [checkpoint, f"--out={trained}/samples.png", f"--npz={trained}/samples.npz"]
    words += ["--num_samples=33", "--steps=4", "--batch_size=7", "--device=cpu"]
    status, text = call_program(ROOT / "tools/generate_rebm.py", *words)
    assert status == 0, text
    assert Image.open(trained / "samples.png").width >= 480
    made = np.load(trained / "samples.npz")
    assert np.array_equal(made["labels"], np.arange(33) % 10)
    args = SimpleNamespace(checkpoint=checkpoint, data=None, outdist_data=None)
    network, _, _, noise = generate.load_network(args, torch.device("cpu"))
    found = []
    for images in (noise.images[noise.part("test")[:33]], made["images"]):
        logits = network(script.pixels(torch.from_numpy(images)))
        found.append(script.label_logit(logits, torch.from_numpy(made["labels"])))
    assert (found[1] > found[0]).all()
    status, _ = call_program(ROOT / "tools/generate_rebm.py", *words)
    assert status == 2  # it does not write over a file


def test_files_that_are_no_checkpoints(tmp_path):
    torch.save({"script": "train_ddp.py", "format": 3}, tmp_path / "other.pt")
    (tmp_path / "text.pt").write_text("no checkpoint")
    messages = {"other.pt": "is no checkpoint of run_train_rebm_ddp.py", "text.pt": "or damaged"}
    for name, message in messages.items():
        status, text = call_program(ROOT / "tools/evaluate_rebm.py", tmp_path / name)
        assert status == 2
        assert message in text
        assert len(text.splitlines()) == 1


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
    moves = (evaluate.random_points(x, eps, norm, rng) - x).flatten(1)
    lengths = torch.linalg.vector_norm(moves, 2 if norm == "L2" else math.inf, dim=1)
    assert 0.7 * eps < lengths.max() <= eps * (1 + 1e-5)
    assert 20 < expected.sum() < 180
    # up the cross entropy alone; then that first attack leads away, and the targeted ones find it
    for gain, starts in ((script.cross_entropy, 1), (script.label_logit, 3)):
        args = SimpleNamespace(starts=starts, attack_steps=30)
        with mock.patch.object(evaluate, "cross_entropy", gain):
            found = evaluate.survivors(network, x, labels, options, eps, args, rng)
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
