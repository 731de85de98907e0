"""How run_train_rebm_ddp.py reads images: what users have in their folders, and what each gets."""

import os
import pickle
import re
import shutil
import subprocess
import sys
import zlib
from functools import partial

import numpy as np
import pytest
import torch
from helpers import ROOT, call_script, environment, on_small_disk, parse_arguments
from PIL import Image

import run_train_rebm_ddp as script
from run_train_rebm_ddp import TEST, TRAIN, VALID

COLORS = {"cat": (200, 40, 40), "dog": (40, 40, 200)}


def picture(path, mode="RGB", size=(24, 20), color=None, **options):
    """A picture of noise about a colour; no two are equal."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(zlib.crc32(str(path).encode()))
    noise = rng.integers(0, 40, (size[1], size[0], 3), np.uint8)
    image = Image.fromarray(noise + np.array(color or (60, 60, 60), np.uint8))
    image.convert(mode).save(path, **options)
    return path


def photos(root, parts=("train", "test"), count=12):
    """ROOT/PART/cat/0.png, ROOT/PART/dog/0.png, ..."""
    for part in parts:
        for name, color in COLORS.items():
            for i in range(count):
                picture(root / part / name / f"{i}.png", color=color)
    return root


def read(root, *options, indist=None):
    size = ["--size=16"] if root.is_dir() else []
    args = parse_arguments(script, f"--cache_dir={root}.cache", *size, *options)
    return script.Images(script.prepare(args, str(root), indist))


def counts(data):
    """Images to train, to validate, to test on."""
    return [len(data.part(part)) for part in (TRAIN, VALID, TEST)]


# --------------------------------------------------------------------------------------------------
# Folders. Each makes something odd of 24 + 24 images of cats and dogs in train/ and test/, of which
# 2 become validation; the parts that there are then, and what is said.


def not_read(root):
    picture(root / "train/.ipynb_checkpoints/0.png")
    picture(root / "train/cat/.thumb.png")
    picture(root / "__MACOSX/train/cat/0.png")
    (root / "train/dog/e.heic").write_bytes(b"not read")
    (root / "labels.csv").write_text("not read")


def linked_class(root):
    (root / "train/dog").rename(root.parent / f"{root.name}.elsewhere")
    (root / "train/dog").symlink_to(root.parent / f"{root.name}.elsewhere")


def other_endings(root):
    picture(root / "train/cat/a.JPG", format="JPEG")
    picture(root / "train/cat/b.webp")
    picture(root / "train/dog/of/any/kind/e.tiff")


def no_train(root):
    shutil.rmtree(root / "test")
    for path in (root / "train").iterdir():
        path.rename(root / path.name)
    (root / "train").rmdir()


def copies(root):
    """Three images of the test also stand in train/."""
    for i in range(3):
        os.link(root / f"test/cat/{i}.png", root / f"train/cat/copy{i}.png")


def longer_names(root):
    """As in a public report: they became two classes."""
    (root / "train").rename(root / "training_set")
    (root / "test").rename(root / "Test-Set")


FOLDERS = {  # what is changed, the parts, what is said
    "not read": (not_read, [22, 2, 24], "5 files or folders are not read .*__MACOSX"),
    "linked class": (linked_class, [22, 2, 24], ""),
    "other endings": (other_endings, [25, 2, 24], ""),
    "Valid is the test": (lambda root: (root / "test").rename(root / "Valid"), [22, 2, 24], ""),
    "three parts": (lambda root: photos(root, ["validation"], count=4), [24, 8, 24], ""),
    "longer names": (longer_names, [22, 2, 24], ""),
    "no train": (no_train, [19, 1, 4], "1 of 2 classes have nothing to validate on"),
    "empty class": (lambda root: (root / "train/owl").mkdir(), [22, 2, 24], "not read .*train/owl"),
    "copies": (copies, [22, 2, 24], "3 images equal held-out ones.*copy0"),
    "loose": (lambda root: picture(root / "train/a.png"), [22, 2, 24], "1 images have no .*/a.png"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_that_are_read(tmp_path, caplog, name):
    root = photos(tmp_path / "photos")
    change, parts, said = FOLDERS[name]
    change(root)
    data = read(root)
    assert counts(data) == parts
    assert data.classes == ["cat", "dog"]
    assert data.images.shape[1:] == (3, 16, 16)
    found = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(found) == (said != "") and re.search(said, "".join(found))
    # the colour tells the class
    if name != "other endings":
        for part in (TRAIN, TEST):
            red = data.images[data.part(part)].astype(int).mean((2, 3))
            is_dog = red[:, 0] < red[:, 2]
            assert np.array_equal(is_dog, data.labels[data.part(part)] == 1)


def nested_root(root):
    (root / "set").mkdir()
    for part in ("train", "test"):
        (root / part).rename(root / "set" / part)


def dangling_image(root):
    (root / "train/cat/new.png").symlink_to(root / "nowhere.png")


def several_damaged(root):
    (root / "train/cat/0.png").write_bytes(b"")
    Image.fromarray(np.full((20, 20), 40_000, np.uint16)).save(root / "train/cat/1.png")
    whole = (root / "test/dog/2.png").read_bytes()
    (root / "test/dog/2.png").write_bytes(whole[: len(whole) // 2])


def class_of_trains(root):
    """Classes alone, and one is named train."""
    for folder in ("train", "test"):
        shutil.rmtree(root / folder)
    for name in ("airplane", "bus", "train"):
        picture(root / name / "0.png")


REFUSED = {  # what is changed, what is said
    "class of trains": (class_of_trains, "no images there, or no classes; expected train/CLASS"),
    "dangling image": (dangling_image, "No such file.*new.png"),
    "nested root": (nested_root, "has one class, set; two are needed"),
    "damaged": (
        several_damaged,
        "(?s)3 images cannot.*/2.png: .*truncated.*/0.png: .*/1.png: mode",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_folders_that_are_refused(tmp_path, name):
    """All problems at once; nothing is left in the cache."""
    root = photos(tmp_path / "photos")
    change, said = REFUSED[name]
    change(root)
    with pytest.raises(script.InputError, match=said):
        read(root)
    assert not list(tmp_path.glob("photos.cache/*"))


def test_a_folder_that_may_not_be_read(tmp_path, monkeypatch):
    """It is an error of one line: its images would be missing silently."""
    root = photos(tmp_path / "photos")
    plain = script.Path.iterdir

    def iterdir(path):
        if path.name == "dog":
            raise PermissionError(13, "Permission denied", str(path))
        return plain(path)

    monkeypatch.setattr(script.Path, "iterdir", iterdir)
    with pytest.raises(script.InputError, match=r"photos: .*Permission denied: '.*/dog'"):
        read(root)


def test_many_small_classes(tmp_path):
    """A random share is held out, not one of each class, of which nothing would be left."""
    for i in range(150):
        picture(tmp_path / "photos" / f"class{i % 30:02}" / f"{i}.png")
    data = read(tmp_path / "photos")
    assert counts(data) == [119, 9, 22] and len(data.classes) == 30


# --------------------------------------------------------------------------------------------------
# Pictures


def read_one(path, channels=3, size=16):
    return script.read_image(path, channels, size)


def test_orientation(tmp_path):
    """A photo lies on its side, and says so in its EXIF."""
    pixels = np.zeros((32, 32, 3), np.uint8)
    pixels[:16] = 255  # the sky
    upright = Image.fromarray(pixels)
    exif = Image.Exif()
    exif[0x0112] = 6  # turn it by 90 degrees
    upright.rotate(90).save(tmp_path / "a.jpg", exif=exif, quality=95)
    found = read_one(tmp_path / "a.jpg").astype(int)
    assert found[:, :6].min() > 240
    assert found[:, 10:].max() < 15


@pytest.mark.parametrize(("mode", "ending"), [("P", "png"), ("1", "png"), ("CMYK", "jpg")])
def test_modes(tmp_path, mode, ending):
    """All become colours, or grey."""
    path = picture(tmp_path / f"a.{ending}", mode=mode, color=(200, 200, 200))
    with Image.open(path) as image:
        expected = np.asarray(image.convert("L").resize((16, 16))).mean()
    for channels in (3, 1):
        found = read_one(path, channels)
        assert found.shape == (channels, 16, 16)
        assert abs(found.mean() - expected) < 12


def test_transparent_and_long_pictures(tmp_path):
    Image.new("RGBA", (40, 30), (0, 0, 0, 0)).save(tmp_path / "a.png")
    assert read_one(tmp_path / "a.png").min() == 255
    picture = Image.new("P", (40, 30), 0)
    picture.save(tmp_path / "b.png", transparency=0)
    assert read_one(tmp_path / "b.png").min() == 255
    # of a long picture the middle stays
    pixels = np.zeros((10, 90, 3), np.uint8)
    pixels[:, 40:50] = 255
    Image.fromarray(pixels).save(tmp_path / "a.png")
    assert read_one(tmp_path / "a.png", size=10).min() == 255


# --------------------------------------------------------------------------------------------------
# Arrays, digits, OOD images, the hub


def test_arrays(tmp_path, caplog):
    x = np.random.default_rng(0).integers(0, 256, (40, 8, 8), np.uint8)
    y = np.arange(40) % 4
    good = {"x_train": x, "y_train": y, "x_test": x[:8] // 2, "y_test": y[:8]}
    path = tmp_path / "a.npz"
    wrong = {
        "x_train is float64": {"x_train": x / 256},
        r"x_train is uint8 \(40, 64\); expected uint8": {"x_train": x.reshape(40, 64)},
        r"y_train is int64 \(3,\); expected 40 whole": {"y_train": y[:3]},
        "y_train is float64 .*; expected 40 whole numbers, or names": {"y_train": y / 2},
        "nothing to train on of 1, 2, 3": {"y_train": y % 1},
    }
    for message, change in wrong.items():
        np.savez(path, **{**good, **change})
        with pytest.raises(script.InputError, match=message):
            read(path)
    path.write_bytes(b"no arrays")
    with pytest.raises(script.InputError, match="a.npz: .*expected an .npz file of arrays"):
        read(path)

    np.savez(path, **good, train=y)
    data = read(path)
    assert counts(data) == [37, 3, 8] and data.shape == (1, 8)
    assert data.classes == ["0", "1", "2", "3"]
    assert np.array_equal(data.images[:, 0], np.concatenate([x, x[:8] // 2]))
    assert np.array_equal(data.labels, np.concatenate([y, y[:8]]))
    assert "a.npz: 1 arrays are not read, such as train" in caplog.text
    assert read(path, "--size=16").shape == (1, 16)
    names = np.array(["d", "c", "", "a"])  # "" is not known, either
    np.savez(path, **{**good, "y_train": names[y], "y_test": names[y[:8]]})
    assert read(path).classes == ["a", "c", "d"]


def test_arrays_of_other_names(tmp_path, caplog):
    """Are named, with the names that are expected."""
    x = np.random.default_rng(0).integers(0, 256, (60, 8, 8), np.uint8)
    np.savez(tmp_path / "a.npz", train=x, y_train=np.arange(60) % 3)
    with pytest.raises(script.InputError, match="or x_train and y_train"):
        read(tmp_path / "a.npz")
    assert "2 arrays are not read, such as train" in caplog.text


def test_labels_below_0_are_not_known(tmp_path, caplog):
    """They were a class of their own, and trained."""
    x = np.random.default_rng(0).integers(0, 256, (60, 8, 8), np.uint8)
    y = np.arange(60) % 3 - 1
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y)
    data = read(tmp_path / "a.npz")
    assert data.classes == ["0", "1"]
    assert sum(counts(data)) == 40
    assert "a.npz: 20 images have no class, or one that is not known: left out" in caplog.text
    # of OOD images no label is asked for
    np.savez(tmp_path / "b.npz", x_train=x // 2, y_train=y)
    assert sum(counts(read(tmp_path / "b.npz", indist=data))) == 60


@pytest.mark.parametrize("axis", [1, 3])
def test_arrays_as_medmnist_has_them(tmp_path, axis):
    """Colours first or last; a column of labels; ten classes in the order of their numbers."""
    x = np.random.default_rng(0).integers(0, 256, (120, 9, 9, 3), np.uint8)
    y = (np.arange(120) % 12)[:, None]
    images = np.moveaxis(x, 3, axis)
    arrays = {}
    for part, rows in {"train": slice(72), "val": slice(72, 96), "test": slice(96, 120)}.items():
        arrays[f"{part}_images"] = images[rows]
        arrays[f"{part}_labels"] = y[rows]
    np.savez(tmp_path / "a.npz", **arrays)
    data = read(tmp_path / "a.npz")
    assert counts(data) == [72, 24, 24]
    assert data.classes == [str(i) for i in range(12)]
    assert read(tmp_path / "a.npz", "--grey").shape == (1, 9)
    order = np.concatenate([data.part(part) for part in (TRAIN, VALID, TEST)])
    assert np.array_equal(data.images[order], x.transpose(0, 3, 1, 2))
    assert np.array_equal(data.labels[order], y[:, 0])


class OldPickler(pickle._Pickler):
    """Writes texts as Python 2 did, with which CIFAR was made."""

    dispatch = dict(pickle._Pickler.dispatch)

    def save_text(self, text):
        text = text if isinstance(text, bytes) else text.encode()
        self.write(pickle.BINSTRING + len(text).to_bytes(4, "little") + text)

    dispatch[bytes] = save_text
    dispatch[str] = save_text


def write_cifar(folder, name, content):
    folder.mkdir(exist_ok=True)
    with open(folder / name, "wb") as file:
        OldPickler(file, protocol=2).dump(content)
    text = (folder / name).read_bytes()
    (folder / name).write_bytes(text.replace(b"numpy._core", b"numpy.core"))


def cifar_100(folder, x, y):
    write_cifar(folder, "meta", {"fine_label_names": ["apple", "bear"], "coarse_label_names": []})
    for name, rows in {"train": slice(0, 48), "test": slice(48, 60)}.items():
        content = {"data": x[rows].reshape(-1, 3072), "fine_labels": y[rows].tolist()}
        write_cifar(folder, name, {**content, "coarse_labels": [], "filenames": ["a.png"]})


def cifar_10(folder, x, y):
    write_cifar(folder, "batches.meta", {"label_names": ["apple", "bear"], "num_vis": 3072})
    for number in range(6):
        rows = slice(10 * number, 10 * number + 10)
        content = {"data": x[rows].reshape(-1, 3072), "labels": y[rows].tolist()}
        name = f"data_batch_{number + 1}" if number < 5 else "test_batch"
        write_cifar(folder, name, {**content, "batch_label": "training batch"})
    (folder / "readme.html").write_text("")


@pytest.mark.parametrize(("write", "test"), [(cifar_10, 10), (cifar_100, 12)])
def test_cifar_as_its_authors_ship_it(tmp_path, write, test):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (60, 3, 32, 32), np.uint8)
    y = rng.integers(0, 2, 60)
    write(tmp_path / "cifar", x, y)
    args = parse_arguments(script, f"--cache_dir={tmp_path}/cache")
    data = script.Images(script.prepare(args, str(tmp_path / "cifar")))
    assert data.classes == ["apple", "bear"]
    assert np.array_equal(data.images, x)
    assert np.array_equal(data.labels, y)
    assert data.part(TEST).tolist() == list(range(60 - test, 60))


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("harm",)


def test_pickles_that_are_not_cifar(tmp_path, monkeypatch):
    """Nothing in them is run; a lacking file, and one that is cut, is named."""
    monkeypatch.chdir(tmp_path)
    x = np.zeros((60, 3, 32, 32), np.uint8)
    cifar_10(tmp_path / "cifar", x, np.arange(60) % 2)
    args = parse_arguments(script)
    third = tmp_path / "cifar" / "data_batch_3"
    whole = third.read_bytes()
    for content, said in {
        pickle.dumps(Harmful()): "data_batch_3: posix.mkdir is refused",
        pickle.dumps({"data": np.vectorize}): "data_batch_3: numpy.vectorize is refused",
        whole[:-300]: "data_batch_3: .*; expected it as CIFAR's authors ship it",
        b"": "data_batch_3: ",
        pickle.dumps({"labels": []}): "data_batch_3: 'data'; expected",
    }.items():
        third.write_bytes(content)
        with pytest.raises(script.InputError, match=said):
            script.prepare(args, "cifar")
    third.unlink()
    with pytest.raises(script.InputError, match="No such file.*data_batch_3"):
        script.prepare(args, "cifar")
    assert not (tmp_path / "harm").exists()


def test_digits_and_generated_images(tmp_path):
    args = parse_arguments(script, f"--cache_dir={tmp_path}")
    indist = script.Images(script.prepare(args, "digits"))
    assert counts(indist) == [1336, 101, 360]
    for kind in script.GENERATED:
        outdist = script.Images(script.prepare(args, kind, indist))
        assert outdist.shape == indist.shape == (1, 8)
        assert counts(outdist) == [20_000, 1000, 10_000]
        assert outdist.classes == []
        assert 115 < outdist.images.mean() < 140


def test_ood_images_are_none_to_classify(tmp_path, caplog):
    """An OOD folder may have any folders; pictures that are to be classified are left out."""
    root = photos(tmp_path / "photos")
    indist = read(root)
    others = tmp_path / "others"
    for i in range(30):
        picture(others / f"{i}.png")
    picture(others / "deep/er/0.png")
    for i in range(5):
        os.link(root / f"test/cat/{i}.png", others / f"same{i}.png")
    data = read(others, indist=indist)
    assert sum(counts(data)) == 31
    assert data.shape == indist.shape
    assert "5 images equal held-out ones, or those to classify" in caplog.text


def test_hub(tmp_path, monkeypatch, caplog):
    """Images and labels by their kinds; splits that are not read are named, and images whose label
    is kept secret are left out."""
    import datasets

    rows = {"img": [], "fine_label": []}
    for i in range(63):
        path = picture(tmp_path / f"{i}.png", color=(100 * (i % 2), 50, 50))
        rows["img"].append(str(path))
        rows["fine_label"].append(i % 2 if i < 60 else -1)
    kinds = {"img": datasets.Image(), "fine_label": datasets.ClassLabel(names=["b", "a"])}
    table = datasets.Dataset.from_dict(rows, features=datasets.Features(kinds))
    tables = datasets.DatasetDict(
        train=table.select(range(40)), test=table.select(range(40, 63)), extra=table.select([0])
    )
    monkeypatch.setattr(datasets, "load_dataset", lambda name: tables)
    args = parse_arguments(script, f"--cache_dir={tmp_path}/x.cache", "--size=16")
    data = script.Images(script.prepare(args, "some/pictures"))
    assert data.classes == ["a", "b"]
    assert sum(counts(data)) == 60
    red = data.images[:, 0].mean((1, 2))
    assert ((red > 80) == (data.labels == 0)).all()
    assert "1 splits are not read, such as extra" in caplog.text
    assert "3 images have no class, or one that is not known" in caplog.text
    for part in ("train", "test"):  # as many other images are other data
        tables[part] = tables[part].shuffle(seed=1)
    assert script.Images(script.prepare(args, "some/pictures")).hash != data.hash


def test_no_hub(tmp_path):
    """Said in one line, with what works without it."""
    command = [sys.executable, ROOT / "run_train_rebm_ddp.py", "--data=no-one/nothing"]
    env = environment(HF_HUB_OFFLINE="1")
    done = subprocess.run(
        [*command, "--prepare_only", f"--cache_dir={tmp_path}"],
        env=env,
        capture_output=True,
        text=1,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "no-one/nothing: no such folder or file here" in done.stderr
    assert "digits need none" in done.stderr


# --------------------------------------------------------------------------------------------------
# The cache


def test_the_cache(tmp_path):
    """Read once for each content; another place of the same images is the same data."""
    root = photos(tmp_path / "photos")
    first = read(root)
    made = {path: path.stat().st_ino for path in tmp_path.glob("photos.cache/*/*")}
    read(root)
    assert {path: path.stat().st_ino for path in tmp_path.glob("photos.cache/*/*")} == made
    moved = root.rename(tmp_path / "moved")
    assert read(moved).hash == first.hash
    # what a link leads to has changed
    (moved / "train/cat/link.png").symlink_to(picture(tmp_path / "elsewhere.png"))
    linked = read(moved).hash
    assert linked != first.hash
    picture(tmp_path / "elsewhere.png", size=(30, 30), color=(9, 9, 9))
    assert read(moved).hash != linked


def test_full_disk(tmp_path):
    """While the cache is written: it says so, and nothing half-made stays."""
    root = photos(tmp_path / "photos")
    cache = tmp_path / "small"
    cache.mkdir()
    with on_small_disk(cache, 1 << 16):
        options = [f"--data={root}", f"--cache_dir={cache}", f"--output_dir={tmp_path}/out"]
        text = call_script("run_train_rebm_ddp", *options, "--size=64", "--device=cpu", status=1)
        assert not list(cache.iterdir())
    assert "No space left on device" in text


def test_some_images_are_of_all_classes(tmp_path):
    """Files lie in the order of their classes."""
    data = read(photos(tmp_path / "photos", count=40))
    part = data.part(TRAIN)
    some = data.some(TRAIN, 18)
    assert len(some) == 18 and np.isin(some, part).all()
    assert set(data.labels[some]) == {0, 1}


def test_augmentations():
    """Moved by so many pixels at most, mirrored or not; other draws make another image."""
    rng = np.random.default_rng(0)
    image = rng.integers(1, 256, (3, 32, 32), np.uint8)
    draw = partial(script.augment, image)
    assert np.array_equal(draw("none", rng), image)
    for kind, most in {"shift": 2, "original": 4}.items():
        found = [draw(kind, np.random.default_rng(seed)) for seed in range(40)]
        assert len({made.tobytes() for made in found}) > 15
        rows = [int((made == 0).all((0, 2)).sum()) for made in found]
        assert max(rows) == most
        torch.from_numpy(np.stack(found))
