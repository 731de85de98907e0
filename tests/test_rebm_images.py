"""How run_train_rebm_ddp.py reads images: what users have in their folders, and what each gets."""

import io
import os
import pickle
import re
import shutil
import zlib

import datasets
import numpy as np
import pytest
import scipy.io
from helpers import check_refused, parse_arguments
from PIL import Image

import run_train_rebm_ddp as script
from run_train_rebm_ddp import TEST, TRAIN, VALID

COLORS = {"cat": (200, 40, 40), "dog": (40, 40, 200)}


def picture(path, color=(60, 60, 60)):
    """A picture of noise about a colour; no two are equal."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(zlib.crc32(str(path).encode()))
    noise = rng.integers(0, 40, (20, 24, 3), np.uint8)
    Image.fromarray(noise + np.array(color, np.uint8)).save(path)
    return path


def photos(root, parts=("train", "test")):
    """ROOT/PART/cat/0.png, ROOT/PART/dog/0.png, ..."""
    for part in parts:
        for name, color in COLORS.items():
            for i in range(12):
                picture(root / part / name / f"{i}.png", color)
    return root


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def read(name, *options, **more):
    """The images that a run has of --data NAME. more: of OOD images, see prepare()"""
    args = parse_arguments(script, "--cache_dir=cache", *options)
    return script.Images(script.prepare(args, str(name), **more))


def counts(data):
    """Images to train, to validate, to test on."""
    return [len(data.part(part)) for part in (TRAIN, VALID, TEST)]


def odd_files(root):
    picture(root / "train/cat/a.JPG", COLORS["cat"])
    picture(root / "train/dog/of/any/kind/e.tiff", COLORS["dog"])
    picture(root / "train/.ipynb_checkpoints/0.png")
    picture(root / "train/cat/.thumb.png")
    picture(root / "__MACOSX/train/cat/0.png")
    (root / "train/dog/e.heic").write_bytes(b"not read")
    (root / "train/owl").mkdir()
    picture(root / "train/a.png")


def seg(root):
    """As a data set of landscapes has them; and a class whose name is written in two ways."""
    for name in ("seg_train", "seg_test"):
        (root / name / "cat").rename(root / name / "cafe\u0301")
        for path in (root / name / "cafe\u0301").glob("1*.png"):
            (root / name / "caf\u00e9").mkdir(exist_ok=True)
            path.rename(root / name / "caf\u00e9" / path.name)


def a_class_called_train(root):
    (root / "cat").rename(root / "train")


def tiny_imagenet(root):
    """train/CLASS/images/..., val/images/... with a list of classes, test/images/... without."""
    lines = []
    for name, color in COLORS.items():
        for i in range(12):
            picture(root / f"train/{name}/images/{i}.png", color)
        for i in range(3):
            picture(root / f"val/images/{name}{i}.png", color)
            lines.append(f"{name}{i}.png\t{name}\t0\t0\t9\t9\n")
    (root / "val/val_annotations.txt").write_text("".join(lines))
    picture(root / "test/images/test_0.png")


def copies(root):
    for i in range(3):
        os.link(root / f"test/cat/{i}.png", root / f"train/cat/copy{i}.png")


TWO = ["train", "test"]  # 24 images each; of a missing part some are taken from train/
FOLDERS = {  # folders of images, what is odd, images of each part, what is said
    "longer names": (["training_set", "Valid-Set"], None, [22, 2, 24], ""),
    "three parts": ([*TWO, "validation"], None, [24, 24, 24], ""),
    "one part": ([""], None, [19, 1, 4], "1 of 2 classes .* nothing to validate on"),
    "odd files": (TWO, odd_files, [24, 2, 24], "owl has no.*5 files .*MACOSX.*1 images .*/a.png"),
    "seg": (["seg_train", "seg_test"], seg, [22, 2, 24], ""),
    "a class called train": ([""], a_class_called_train, [19, 1, 4], "nothing to validate on"),
    "tiny imagenet": ([], tiny_imagenet, [22, 2, 6], "val_annotations.*1 images .* no class"),
    "copies": (TWO, copies, [22, 2, 24], "3 images .* equal held-out ones.*copy0"),
}


@pytest.mark.parametrize(("folders", "make_odd", "expected", "said"), FOLDERS.values(), ids=FOLDERS)
def test_folders_that_are_read(tmp_path, caplog, folders, make_odd, expected, said):
    root = photos(tmp_path / "photos", folders)
    if make_odd:
        make_odd(root)
    data = read(root, "--size=16")
    assert counts(data) == expected
    assert len(data.classes) == 2
    assert data.images.shape[1:] == (3, 16, 16)
    found = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert bool(found) == bool(said) and re.search(said, "".join(found))
    for part in (TRAIN, TEST):  # the colour tells the class
        red, _, blue = data.images[data.part(part)].mean((2, 3)).T
        assert np.array_equal(red < blue, data.labels[data.part(part)] == data.classes.index("dog"))
    assert set(data.labels[data.some(TRAIN, 12)]) == {0, 1}  # the first ones would be cats


def damaged(root):
    (root / "a/train/cat/0.png").write_bytes(b"")
    Image.fromarray(np.full((20, 20), 40_000, np.uint16)).save(root / "a/train/cat/1.png")
    whole = (root / "a/test/dog/2.png").read_bytes()
    (root / "a/test/dog/2.png").write_bytes(whole[: len(whole) // 2])
    frames = [Image.fromarray(np.full((20, 20), 60 * i, np.uint8)) for i in range(3)]
    frames[0].save(root / "a/train/cat/0.gif", save_all=True, append_images=frames[1:])


REFUSED = {  # what is said
    "no images there, or no classes; expected train/CLASS": lambda root: shutil.rmtree(root / "a"),
    "has one class, a; two are needed": lambda root: None,
    "No such file.*new.png": lambda root: (root / "a/train/cat/new.png").symlink_to("nowhere.png"),
    "(?s)4 images cannot.*/2.png: .*truncated.*/0.gif: 3 pictures.*/0.png: .*/1.png: mode": damaged,
}


@pytest.mark.parametrize("said", REFUSED)
def test_folders_that_are_refused(tmp_path, said):
    """All damaged images at once; nothing is left in the cache."""
    root = photos(tmp_path / "photos", ["a/train", "a/test"])
    REFUSED[said](root)
    check_refused(said, read, root)
    assert not list(tmp_path.glob("cache/*"))


def test_ood_images_are_none_to_classify(tmp_path, caplog):
    """An OOD folder may have any folders; pictures that are to be classified are left out."""
    root = photos(tmp_path / "photos")
    indist = read(root, "--size=16")
    others = tmp_path / "others"
    for name in [*range(30), "deep/er/0"]:
        picture(others / f"{name}.png")
    for i in range(5):
        os.link(root / f"test/cat/{i}.png", others / f"same{i}.png")
    data = read(others, indist=indist)
    assert sum(counts(data)) == 31
    assert data.shape == indist.shape
    assert counts(read(others, indist=indist, only_test=True)) == [0, 0, 31]
    assert re.search("5 images .* equal held-out ones, or those to classify", caplog.text)


def test_the_cache(tmp_path):
    """Another place of the same images is the same data. What a link leads to may change, and so
    may Tiny ImageNet's list of classes."""
    root = tmp_path / "photos"
    tiny_imagenet(root)
    (root / "train/cat/link.png").symlink_to(picture(tmp_path / "elsewhere.png"))
    first = read(root).hash
    root = root.rename(tmp_path / "moved")
    assert read(root).hash == first
    path = root / "val/val_annotations.txt"
    path.write_text(path.read_text().replace("cat0.png\tcat", "cat0.png\tdog"))
    second = read(root).hash
    picture(tmp_path / "elsewhere.png", (9, 9, 9))
    assert len({first, second, read(root).hash}) == 3


def test_pictures(tmp_path):
    """A photo on its side, as its EXIF says; a transparent, a long, and a print's picture."""
    sky = np.zeros((32, 32, 3), np.uint8)
    sky[:16] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # turn it by 90 degrees
    Image.fromarray(sky).rotate(90).save(tmp_path / "a.jpg", exif=exif, quality=95)
    found = script.read_image(tmp_path / "a.jpg", 3, 16)
    assert found[:, :6].min() > 240
    assert found[:, 10:].max() < 15

    Image.new("RGBA", (40, 30), (0, 0, 0, 0)).save(tmp_path / "a.png")
    assert script.read_image(tmp_path / "a.png", 3, 16).min() == 255
    # of a long picture the middle stays
    pixels = np.zeros((10, 90, 3), np.uint8)
    pixels[:, 40:50] = 255
    Image.fromarray(pixels).convert("CMYK").save(tmp_path / "b.jpg", quality=95)
    for channels in (3, 1):
        found = script.read_image(tmp_path / "b.jpg", channels, 10)
        assert found.shape == (channels, 10, 10) and found[:, 2:-2, 2:-2].min() > 240


def test_augmentations():
    """Shifted by so many pixels at most, where the rim becomes black, and mirrored or not."""
    image = np.broadcast_to(np.arange(1, 33, dtype=np.uint8), (3, 32, 32))
    assert script.augment(image, "none", None) is image
    for kind, most in {"shift": 2, "original": 4}.items():
        rngs = map(np.random.default_rng, range(60))
        made = np.stack([script.augment(image, kind, rng)[0] for rng in rngs])
        for axis in (1, 2):
            assert set((made == 0).all(axis).sum(1)) == set(range(most + 1))
        is_mirrored = made[:, 16, 12] > made[:, 16, 20]
        assert is_mirrored.any() == (kind == "original") and not is_mirrored.all()


def test_arrays_as_keras_has_them(tmp_path, caplog):
    """Labels are numbers, or names; those below 0, or "", are not known."""
    x = np.random.default_rng(0).integers(0, 256, (80, 8, 8), np.uint8)
    y = np.arange(80) % 4 - 1
    path = tmp_path / "a.npz"
    good = {"x_train": x[:60], "y_train": y[:60], "x_test": x[60:], "y_test": y[60:]}
    np.savez(path, **good, train=y)
    data = read(path)
    assert data.classes == ["0", "1", "2"]
    assert np.array_equal(data.images[:, 0], x[y >= 0])
    assert np.array_equal(data.labels, y[y >= 0])
    assert counts(data) == [42, 3, 15]
    assert re.search("1 arrays of .*a.npz are not read, such as train", caplog.text)
    assert re.search("20 images of .*a.npz have no class, or one that is not known", caplog.text)
    assert read(path, "--size=16").shape == (1, 16)
    names = np.array(["c", "b", "a", ""])[y]
    np.savez(path, **{**good, "y_train": names[:60], "y_test": names[60:]})
    assert np.array_equal(read(path).labels, 2 - data.labels)

    wrong = {
        "x_train is float64": {**good, "x_train": x[:60] / 256},
        "x_train has no pixel above 1; expected 0 to 255": {**good, "x_train": x[:60] // 128},
        r"y_train is int64 \(3,\); expected 60 whole": {**good, "y_train": y[:3]},
        "y_train is float64 .*; expected 60 whole numbers": {**good, "y_train": y[:60] / 2},
        "nothing to train on of 0, 1": {**good, "y_train": y[:60] * 0 + 2},
    }
    for message, arrays in wrong.items():
        np.savez(path, **arrays)
        check_refused(message, read, path)
    path.write_bytes(b"no arrays")
    check_refused("a.npz: .*expected an .npz file of arrays", read, path)


def test_arrays_as_ood_sets_have_them(tmp_path):
    """One array of images; SVHN's file of Matlab, with colors after places, and 10 for 0."""
    x = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), np.uint8)
    indist = read(photos(tmp_path / "photos"), "--size=8")
    images = x.transpose(0, 3, 1, 2)
    np.save("300K.npy", x)
    assert np.array_equal(read("300K.npy", indist=indist).images, images)
    labels = (np.arange(40) % 10 + 1)[:, None].astype(np.uint8)
    scipy.io.savemat("a.mat", {"X": x.transpose(1, 2, 3, 0), "y": labels})
    data = read("a.mat")
    assert np.array_equal(data.images, images)
    assert np.array_equal(data.labels, labels[:, 0] - 1) and data.classes[-1] == "10"


def test_arrays_as_medmnist_has_them(tmp_path):
    """Colours first or last; a column of labels; twelve classes in the order of their numbers."""
    x = np.random.default_rng(0).integers(0, 256, (120, 3, 9, 9), np.uint8)
    y = (np.arange(120) % 12)[:, None]
    parts = {"train": slice(72), "val": slice(72, 96), "test": slice(96, 120)}
    labels = {f"{part}_labels": y[rows] for part, rows in parts.items()}
    for images in (x, x.transpose(0, 2, 3, 1)):
        arrays = {f"{part}_images": images[rows] for part, rows in parts.items()}
        np.savez(tmp_path / "a.npz", **arrays, **labels)
        data = read(tmp_path / "a.npz")
        assert counts(data) == [72, 24, 24]
        assert data.classes == list(map(str, range(12)))
        assert np.array_equal(data.images, x)
        assert np.array_equal(data.labels, y[:, 0])
    assert read(tmp_path / "a.npz", "--grey").shape == (1, 9)


class OldPickler(pickle._Pickler):
    """Writes texts as Python 2 did, with which CIFAR was made."""

    def save_text(self, text):
        text = text if isinstance(text, bytes) else text.encode()
        self.write(pickle.BINSTRING + len(text).to_bytes(4, "little") + text)

    dispatch = {**pickle._Pickler.dispatch, bytes: save_text, str: save_text}


CIFAR = {  # files, of which the first has the names of the classes, and the last is the test
    "label": ["batches.meta", *[f"data_batch_{i}" for i in range(1, 6)], "test_batch"],
    "fine_label": ["meta", "train", "test"],
}


@pytest.mark.parametrize("kind", CIFAR)
def test_cifar_as_its_authors_ship_it(tmp_path, kind):
    """Nothing in its pickles is run; a lacking file, and one that is cut, is named."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (60, 3, 32, 32), np.uint8)
    y = rng.integers(0, 2, 60)
    meta, *parts = CIFAR[kind]
    contents = {meta: {f"{kind}_names": ["apple", "bear"]}}
    for name, rows in zip(parts, np.split(np.arange(60), len(parts)), strict=True):
        contents[name] = {"data": x[rows].reshape(-1, 3072), f"{kind}s": y[rows].tolist()}
    folder = tmp_path / "data" / "cifar"
    folder.mkdir(parents=True)
    for name, content in contents.items():
        file = io.BytesIO()
        OldPickler(file, protocol=2).dump(content)
        (folder / name).write_bytes(file.getvalue().replace(b"numpy._core", b"numpy.core"))

    data = read(folder.parent)
    assert data.classes == ["apple", "bear"]
    assert np.array_equal(data.images, x)
    assert np.array_equal(data.labels, y)
    assert data.part(TEST).tolist() == rows.tolist()

    file = folder / parts[-1]
    wrong = {
        f"{file.name}: posix.mkdir is refused": b"cposix\nmkdir\n(S'harm'\ntR.",  # mkdir("harm")
        f"{file.name}: .*; expected it as CIFAR's authors ship it": file.read_bytes()[:-300],
    }
    for said, content in wrong.items():
        file.write_bytes(content)
        check_refused(said, read, folder)
    file.unlink()
    check_refused(f"No such file.*{file.name}", read, folder)
    assert not os.path.exists("harm")


def test_digits_and_generated_images():
    indist = read("digits")
    assert counts(indist) == [1336, 101, 360] and indist.images.max() == 255
    outdist = read("blobs", indist=indist)
    assert outdist.shape == indist.shape == (1, 8)
    assert counts(outdist) == [20_000, 1000, 10_000]
    assert 115 < outdist.images.mean() < 140


def test_hub(tmp_path, monkeypatch, caplog):
    """Images and labels by their kinds. Splits and images without labels are left out."""
    paths = [str(picture(tmp_path / f"{i}.png", (100 * (i % 2), 50, 50))) for i in range(63)]
    columns = {"img": paths, "fine_label": [i % 2 if i < 60 else -1 for i in range(63)]}
    kinds = {"img": datasets.Image(), "fine_label": datasets.ClassLabel(names=["b", "a"])}
    table = datasets.Dataset.from_dict(columns, features=datasets.Features(kinds))
    tables = {"train": table.select(range(40)), "test": table.select(range(40, 63)), "extra": table}
    hub = {("some/pictures", "full"): tables}
    monkeypatch.setattr(datasets, "load_dataset", lambda *name: hub[name])
    data = read("some/pictures:full", "--size=16")
    assert data.classes == ["a", "b"]
    assert sum(counts(data)) == 60
    assert np.array_equal(data.images[:, 0].mean((1, 2)) > 80, data.labels == 0)
    assert "1 splits of some/pictures:full are not read, such as extra" in caplog.text
    assert "3 images of some/pictures:full have no class" in caplog.text
    tables["train"] = tables["train"].shuffle(seed=1)  # as many other images are other data
    assert read("some/pictures:full", "--size=16").hash != data.hash
    check_refused("some/pictures: there is no such folder or file", read, "some/pictures")
