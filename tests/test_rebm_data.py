"""Readers, augmentations and orders of images, of run_train_rebm_ddp.py."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
import torch
from helpers import one_process

import run_train_rebm_ddp as rebm

DRAW = np.random.default_rng(0)


def write_cifar(folder, classes: int, kind: str) -> dict:
    """Ten rows a file, as CIFAR's; returns what they hold."""
    files = {"train": [f"data_batch_{i}" for i in range(1, 6)] if classes == 10 else ["train"],
             "test": ["test_batch" if classes == 10 else "test"]}  # fmt: skip
    found = {}
    for part, names in files.items():
        count = 10 * len(names)
        images, labels = DRAW.integers(0, 256, (count, 3072), np.uint8), DRAW.integers(0, classes, count)
        for i, name in enumerate(names):
            x, y = images[10 * i : 10 * i + 10], labels[10 * i : 10 * i + 10]
            if kind == "python":
                row = {b"data": x, b"labels": y.tolist()} if classes == 10 else {
                    b"data": x, b"coarse_labels": [0] * 10, b"fine_labels": y.tolist()}  # fmt: skip
                (folder / name).write_bytes(pickle.dumps(row, protocol=2))
            else:
                columns = [y[:, None]] if classes == 10 else [np.zeros((10, 1)), y[:, None]]
                (folder / f"{name}.bin").write_bytes(np.hstack([*columns, x]).astype(np.uint8).tobytes())
        found[part] = images.reshape(-1, 3, 32, 32), labels
    return found


@pytest.mark.parametrize("classes, kind", itertools.product((10, 100), ("python", "binary")))
def test_cifar(tmp_path, classes, kind):
    folder = tmp_path / f"cifar-{classes}-batches"
    folder.mkdir()
    expected = write_cifar(folder, classes, kind)
    for place in (folder, tmp_path):  # the folder itself, or where the archive was unpacked
        found = rebm.read_cifar(str(place), classes)
        for part in ("train", "test"):
            assert all(np.array_equal(a, b) for a, b in zip(found[part], expected[part], strict=True))
    damaged = next(folder.glob("test*"))
    damaged.write_bytes(damaged.read_bytes()[:-7])
    with pytest.raises(ValueError, match=f"{damaged.with_suffix('').name}.*expected a file of CIFAR-{classes}"):
        rebm.read_cifar(str(folder), classes)
    other = {b"data": expected["test"][0].reshape(-1, 3072), b"labels": [classes] * 10, b"fine_labels": [classes] * 10}
    for content in b"", other, other | {b"labels": [0] * 9, b"fine_labels": [0] * 9}:  # empty; no such class; too few
        if content and kind == "binary":
            content = np.full((10, 3073 + (classes == 100)), classes, np.uint8).tobytes()
        damaged.write_bytes(pickle.dumps(content, protocol=2) if isinstance(content, dict) else content)
        with pytest.raises(ValueError, match=f"expected a file of CIFAR-{classes}"):
            rebm.read_cifar(str(folder), classes)
    with pytest.raises(ValueError, match="no CIFAR-.*tar xf"):
        rebm.read_cifar(str(tmp_path / "nowhere"), classes)


def test_pickles_run_nothing(tmp_path):
    write_cifar(tmp_path, 10, "python")

    class Attack:
        def __reduce__(self):
            return (__import__("os").system, (f"touch {tmp_path}/ran",))

    (tmp_path / "test_batch").write_bytes(pickle.dumps(Attack()))
    with pytest.raises(ValueError, match="holds a (posix|os).system"):
        rebm.read_cifar(str(tmp_path), 10)
    assert not (tmp_path / "ran").exists()


def test_tiny_images(tmp_path):
    """Fortran order within a row, excluded rows stepped over, nothing read beyond the batch."""
    images = DRAW.integers(0, 256, (40, 32, 32, 3), np.uint8)
    (tmp_path / "tiny.bin").write_bytes(b"".join(image.tobytes(order="F") for image in images))
    listed = np.array([0, 3, 4, 17, 39, 99])
    np.savetxt(tmp_path / "a.txt", listed[3:], fmt="%d")
    np.savetxt(tmp_path / "b.txt", listed[:4], fmt="%d")
    lists = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    pixels, excluded = rebm.read_tiny_images(str(tmp_path / "tiny.bin"), lists)
    kept, jump = np.setdiff1d(np.arange(40), listed), 13
    for rows, expected in (range(35), kept), (range(0, 35 * jump, jump), kept[jump * np.arange(35) % 35]):
        source = rebm.Images(pixels, None, torch.device("cpu"), rows, excluded)
        assert len(source) == len(kept) == 35 and source.home is None and sorted(expected) == kept.tolist()
        for part, here in (source, expected), (source.part(slice(5, 20)), expected[5:20]):
            ids = DRAW.permutation(len(here))
            wanted = images[here[ids]].transpose(0, 3, 1, 2) / np.float32(255)
            np.testing.assert_allclose(part.batch(ids).numpy(), wanted, atol=1e-7)
    (tmp_path / "tiny.bin").write_bytes(b"x" * 5000)
    with pytest.raises(ValueError, match="5000 bytes; expected rows of 3072"):
        rebm.read_tiny_images(str(tmp_path / "tiny.bin"), [])


def test_image_folders(tmp_path):
    """Decoded once into a cache; damaged images are all named, or left out on demand."""
    from PIL import Image

    for part, count in ("train", 6), ("val", 4):
        for name in ("cat", "dog"):
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(count):
                shade = 40 + 100 * (name == "dog") + i
                Image.new("RGB", (50 + 10 * i, 40), (shade, 0, 0)).save(tmp_path / part / name / f"{i}.png")
    deeper = tmp_path / "train" / "cat" / "dog"  # the first folder is the class
    deeper.mkdir()
    (tmp_path / "train" / "cat" / "5.png").rename(deeper / "5.png")
    base = [f"--indist_ds_dir={tmp_path}", "--indist_dataset=folder", "--image_size=28",
            f"--cache_dir={tmp_path}/cache", "--model_type=convnext_tiny",
            "--outdist_max_samples=20", "--num_workers=2"]  # fmt: skip
    data = rebm.load_data(rebm.parse_args(base), one_process())
    assert data.classes == 2 and data.channels == 3 and data.size == 28 and len(data.test) == 8
    assert data.train.labels.tolist() == [0] * 6 + [1] * 6
    labels = data.test.targets(np.arange(8))
    assert labels.tolist() == [0] * 4 + [1] * 4 and data.test.batch(np.arange(8)).shape == (8, 3, 32, 32)
    red = rebm.augment(data.test.batch(np.arange(8)), "none", 28, None)[:, 0].amax((1, 2)) * 255
    assert red.round().int().tolist() == [40, 41, 42, 43, 140, 141, 142, 143]
    for name in ("cat/2.png", "dog/0.png"):
        (tmp_path / "train" / name).write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"2 bad images of 12(.|\n)*cat/2.png(.|\n)*dog/0.png"):
        rebm.load_data(rebm.parse_args(base), one_process())
    data = rebm.load_data(rebm.parse_args([*base, "--skip_bad_data"]), one_process())
    assert len(data.train) + len(data.valid) == 10


@pytest.mark.parametrize("content, message", [
    ({"x_train": np.zeros((4, 8, 8), np.uint8)}, "holds x_train; expected x_train, y_train, x_test, y_test"),
    ({"x_train": np.zeros((4, 8, 8))}, "float64 of shape"),
    ({"x_train": np.zeros((4, 8, 8, 2), np.uint8)}, "channels"), ({"x_train": np.zeros((4, 8, 9), np.uint8)}, "S, S"),
    ({"y_train": np.arange(3)}, "expected 4 integers"),
    ({"y_train": np.full(4, -1)}, "expected 4 integers")])  # fmt: skip
def test_bad_arrays(tmp_path, content, message):
    good = {"x_train": np.zeros((4, 8, 8), np.uint8), "y_train": np.arange(4)}
    good |= {"x_test": good["x_train"], "y_test": good["y_train"]}
    np.savez(tmp_path / "a.npz", **(content if "expected x_train" in message else good | content))
    with pytest.raises(ValueError, match=message):
        rebm.read_arrays(str(tmp_path / "a.npz"), True)


@pytest.mark.parametrize("content, message", [
    ({"y_train": np.arange(20) % 4 + 1}, r"no training images of: \[0\]"),
    ({"y_test": np.full(20, 6)}, r"no training images of: \[4 5 6\]"),
    ({"y_train": np.full(20, 10**12)}, r"no training images of: \[0 1 2 3"),
    ({"x_test": np.zeros((20, 9, 9), np.uint8)}, r"\(1, 9, 9\) to test, \(1, 8, 8\) to train on")])  # fmt: skip
def test_parts_that_do_not_fit(tmp_path, content, message):
    good = {"x_train": np.zeros((20, 8, 8), np.uint8), "y_train": np.arange(20) % 4}
    good |= {"x_test": good["x_train"], "y_test": good["y_train"]}
    np.savez(tmp_path / "a.npz", **good | content)
    args = rebm.parse_args(["--indist_dataset=file", f"--indist_ds_dir={tmp_path}/a.npz"])
    with pytest.raises(ValueError, match=message):
        rebm.load_data(args, one_process())


def test_mapped_arrays(tmp_path):
    """A .npy is not loaded, whatever the order of its axes; a batch reads its rows alone."""
    images = DRAW.integers(0, 256, (30, 8, 8, 3), np.uint8)
    np.save(tmp_path / "a.npy", images)
    pixels, labels = rebm.read_arrays(str(tmp_path / "a.npy"), False)["train"]
    assert isinstance(pixels, np.memmap) and pixels.base is not None and labels is None
    ids = DRAW.permutation(30)[:7]
    found = rebm.Images(pixels, None, torch.device("cpu")).batch(ids)
    assert found.is_contiguous() and np.array_equal(found.mul(255).round(), images[ids].transpose(0, 3, 1, 2))
    wide = rebm.parse_args(["--indist_dataset=digits", f"--outdist_dataset_ood_detection={tmp_path}/a.npy"])
    with pytest.raises(ValueError, match=r"a.npy: images \(3, 8, 8\); expected \(1, 8, 8\) or larger"):
        rebm.load_data(wide, one_process())


@pytest.mark.parametrize("kind", rebm.GENERATED)
def test_generated_images(kind):
    """A function of kind, seed and shape; not all the same."""
    a, b, c = (rebm.make_images(kind, 40, (3, 16, 16), seed) for seed in (1, 1, 2))
    assert a.shape == (40, 3, 16, 16) and a.dtype == np.uint8
    assert np.array_equal(a, b) and not np.array_equal(a, c)
    assert len(np.unique(a.reshape(40, -1), axis=0)) == 40 and a.std() > 20


PILLOW = {  # operation: what Pillow makes of an image at an amount, and how many levels a pixel may be away
    "Color": ("Color", 1.01), "Brightness": ("Brightness", 1.01), "Contrast": ("Contrast", 1.51),
    "Sharpness": ("Sharpness", 2.01), "Posterize": (lambda o, x, m: o.posterize(x, 8 - round(m)), 0.01),
    "Solarize": (lambda o, x, m: o.solarize(x, round(256 - m)), 0.01),
    "AutoContrast": (lambda o, x, m: o.autocontrast(x), 1.01),
    "Equalize": (lambda o, x, m: o.equalize(x), 0.01), "Invert": (lambda o, x, m: o.invert(x), 0.01)}  # fmt: skip


@pytest.mark.parametrize("name", PILLOW)
def test_operations_are_pillows(name):
    from PIL import Image, ImageEnhance, ImageOps

    images, (how, tolerance) = DRAW.integers(20, 220, (3, 32, 32, 3), np.uint8) // 3 + 50, PILLOW[name]
    amount = {"Posterize": 3, "Solarize": 156}.get(name, 0.5)
    found = rebm.OPERATIONS[name][2](torch.from_numpy(images.transpose(0, 3, 1, 2).copy()).float() / 255, amount) * 255
    for image, ours in zip(images, found, strict=True):
        image = Image.fromarray(image)
        enhance = None if callable(how) else getattr(ImageEnhance, how)(image).enhance
        theirs = how(ImageOps, image, amount) if enhance is None else enhance(1 + amount)
        assert np.abs(ours.numpy().transpose(1, 2, 0) - np.asarray(theirs)).max() <= tolerance


def test_movements():
    x = torch.zeros(1, 1, 9, 9)
    x[0, 0, 4, 6] = 1.0  # right of the centre
    move = rebm.OPERATIONS
    assert move["TranslateX"][2](x, 2 / 9)[0, 0, 4, 4] == 1 and move["TranslateY"][2](x, -1 / 9)[0, 0, 5, 6] == 1
    assert move["Rotate"][2](x, torch.pi / 2)[0, 0].nonzero().tolist() in ([[2, 4]], [[6, 4]])
    assert move["ShearY"][2](x, 0.5)[0, 0].nonzero().tolist() == [[3, 6]]


@pytest.mark.parametrize("kind", rebm.AUGMENTATIONS)
def test_augmentations_depend_on_the_draws_alone(kind):
    """Each image by its own draws, whatever batch it is in; in [0, 1]; others at other draws."""
    torch.manual_seed(0)
    x, draws = torch.rand(24, 3, 32, 32), torch.rand(24, 10)
    whole = rebm.augment(x, kind, 28, draws)
    assert whole.shape == (24, 3, 28, 28) and whole.min() >= 0 and whole.max() <= 1.0001
    order = torch.randperm(24)
    torch.testing.assert_close(rebm.augment(x[order], kind, 28, draws[order]), whole[order])
    assert kind == "none" or (rebm.augment(x, kind, 28, draws.flip(0)) != whole).flatten(1).any(1).sum() > 2
    if kind == "autoaugment_cutout":
        assert 0.1 < (whole == 0).float().mean() < 0.6


def test_streams_differ(tmp_path):
    """Images to classify, real and OOD images: other orders, by epoch and by seed; each once in an epoch."""
    orders = {}
    for seed, name, epoch in itertools.product((0, 1), (0, 1, 2), (0, 1)):
        sampler = rebm.GlobalBatchSampler(60, 12, 1, seed + 1000 * name, one_process())
        batches = list(itertools.islice(rebm.stream(sampler, 5 * epoch), 5))
        assert {when for when, _ in batches} == {epoch}
        orders[seed, name, epoch] = np.concatenate([batch for _, batch in batches])
        assert sorted(orders[seed, name, epoch]) == list(range(60))
    for a, b in itertools.combinations(orders.values(), 2):
        assert (a == b).mean() < 0.2
    with pytest.raises(ValueError, match="5 samples, global batch 12"):
        rebm.GlobalBatchSampler(5, 12, 1, 0, one_process())
