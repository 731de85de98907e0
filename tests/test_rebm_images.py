"""How run_train_rebm_ddp.py reads images: what users have in their folders, and what each gets."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import zlib
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import ROOT, call_script, environment, on_small_disk, parse_arguments
from PIL import Image

import run_train_rebm_ddp as script

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


def read(root, *options, inside=None):
    shape = "3x16" if root.is_dir() else "auto"
    words = [f"--cache_dir={root}.cache", f"--image_shape={shape}", *options]
    args = parse_arguments(script, *words)
    return script.Images(script.prepare(args, str(root), inside))


def counts(data):
    """Images to train, to validate, to test on."""
    return [len(data.part(name)) for name in ("train", "valid", "test")]


def notes(root):
    found = []
    for path in Path(f"{root}.cache").glob("*/meta.json"):
        found += json.loads(path.read_text())["notes"]
    return "\n".join(found)


def meta(root):
    (path,) = Path(f"{root}.cache").glob("*/meta.json")
    return json.loads(path.read_text())


# --------------------------------------------------------------------------------------------------
# Folders. Each makes something odd of 24 + 24 images of cats and dogs in train/ and test/, of which
# 2 become validation. `notes` has to match; parts is what there is then.


def hidden(root):
    picture(root / "train/.ipynb_checkpoints/0.png")
    picture(root / "train/cat/.thumb.png")
    picture(root / "__MACOSX/train/cat/0.png")


def linked_class(root):
    (root / "train/dog").rename(root.parent / f"{root.name}.elsewhere")
    (root / "train/dog").symlink_to(root.parent / f"{root.name}.elsewhere")


def links_in_a_circle(root):
    (root / "train/cat/dogs").symlink_to(root / "train/dog")
    (root / "train/dog/cats").symlink_to(root / "train/cat")


def other_endings(root):
    picture(root / "train/cat/a.JPG", format="JPEG")
    picture(root / "train/cat/b.jpeg")
    picture(root / "train/cat/c.webp")
    picture(root / "train/cat/d.bmp")
    picture(root / "train/dog/e.tiff")
    (root / "train/dog/e.heic").write_bytes(b"not read")
    (root / "train/dog/Thumbs.db").write_bytes(b"not read")


def animated(root):
    frames = [Image.new("RGB", (20, 20), (200, 40 * i, 9)) for i in range(3)]
    frames[0].save(root / "train/cat/a.gif", save_all=True, append_images=frames[1:])


def deeper(root):
    (root / "train/cat").rename(root / "cats")
    (root / "train/cat").mkdir()
    (root / "cats").rename(root / "train/cat/of_all_kinds")


def no_train(root):
    shutil.rmtree(root / "test")
    for path in (root / "train").iterdir():
        path.rename(root / path.name)
    (root / "train").rmdir()


def beside_train(root):
    (root / "labels.csv").write_text("not read")
    picture(root / "extra/0.png")


def class_not_tested(root):
    for path in (root / "test/dog").iterdir():
        path.unlink()


def copies(root):
    """Three images of the test also stand in train/."""
    for i in range(3):
        os.link(root / f"test/cat/{i}.png", root / f"train/cat/copy{i}.png")


def in_two_classes(root):
    """Four images of cats stand among the dogs, too."""
    for i in range(4):
        os.link(root / f"train/cat/{i}.png", root / f"train/dog/cat{i}.png")


FOLDERS = {  # what is changed, the parts, a note
    "hidden": (hidden, [22, 2, 24], "2 hidden files or folders are not read, .*ipynb_checkpoints"),
    "linked class": (linked_class, [22, 2, 24], ""),
    "links in a circle": (links_in_a_circle, [40, 4, 24], "2 links lead to a folder that they are"),
    "other endings": (other_endings, [27, 2, 24], "2 files have no ending of an .*Thumbs.db"),
    "animated": (animated, [23, 2, 24], "1 files have several pictures, the first is .*a.gif"),
    "deeper": (deeper, [22, 2, 24], ""),
    "Valid is the test": (lambda root: (root / "test").rename(root / "Valid"), [22, 2, 24], ""),
    "three parts": (lambda root: photos(root, ["validation"], count=4), [24, 8, 24], ""),
    "only train": (lambda root: shutil.rmtree(root / "test"), [18, 2, 4], ""),
    "no train": (no_train, [18, 2, 4], ""),
    "beside train": (beside_train, [22, 2, 24], "2 files or folders beside train are not read"),
    "class not tested": (class_not_tested, [22, 2, 12], "to test on of 1 of 2 classes:\n  dog"),
    "in two classes": (in_two_classes, [26, 2, 24], "4 images equal an image of another .*/cat"),
    "copies": (copies, [22, 2, 24], "3 images equal held-out ones"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_that_are_read(tmp_path, name):
    root = photos(tmp_path / "photos")
    change, parts, said = FOLDERS[name]
    change(root)
    data = read(root)
    assert counts(data) == parts
    assert len(data.classes) == 2
    assert data.images.shape[1:] == (3, 16, 16)
    assert re.search(said, notes(root)), notes(root)
    if not said:
        assert notes(root) == ""
    # the colour tells the class
    if name not in ("other endings", "links in a circle", "in two classes"):
        for part in ("train", "test"):
            red = data.images[data.part(part)].astype(int).mean((2, 3))
            is_dog = red[:, 0] < red[:, 2]
            assert len(set(zip(is_dog, data.labels[data.part(part)], strict=True))) <= 2


def nested_root(root):
    (root / "set").mkdir()
    for part in ("train", "test"):
        (root / part).rename(root / "set" / part)


def no_images(root):
    for path in root.rglob("*.png"):
        path.rename(path.with_suffix(".txt"))


def dangling_image(root):
    (root / "train/cat/new.png").symlink_to(root / "nowhere.png")


def sixteen_bits(root):
    Image.fromarray(np.full((20, 20), 40_000, np.uint16)).save(root / "train/cat/deep.png")


def several_damaged(root):
    (root / "train/cat/0.png").write_bytes(b"")
    (root / "train/cat/1.png").write_bytes(b"no image")
    whole = (root / "test/dog/2.png").read_bytes()
    (root / "test/dog/2.png").write_bytes(whole[: len(whole) // 2])


REFUSED = {  # what is changed, what is said
    "empty class": (lambda root: (root / "train/bird").mkdir(), "of 1 of 3 classes:\n  bird"),
    "dangling image": (dangling_image, "1 images are bad(?s:.*)new.png: a link that leads nowhere"),
    "loose": (lambda root: picture(root / "train/stray.png"), "1 images have no class, .*/stray"),
    "nested root": (nested_root, "has 1 classes: set; expected two or more, as train/CLASS/ or in"),
    "val twice": (lambda root: photos(root, ["val", "validation"], 2), "expected .* one of each"),
    "no images": (no_images, "no images there"),
    "16 bits": (sixteen_bits, "cat/deep.png: mode I;16: expected 8 bits a channel"),
    "damaged": (several_damaged, "(?s)3 images are bad.*/2.png: .*truncated.*/0.png: .*/1.png: "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_folders_that_are_refused(tmp_path, name):
    """All problems at once; nothing is left in the cache."""
    root = photos(tmp_path / "photos")
    change, said = REFUSED[name]
    change(root)
    with pytest.raises(script.InputError, match=said):
        read(root)
    cache = Path(f"{root}.cache")
    assert not cache.exists() or not list(cache.iterdir())


def test_damaged_images_are_left_out(tmp_path):
    root = photos(tmp_path / "photos")
    several_damaged(root)
    data = read(root, "--skip_bad_data")
    assert counts(data) == [20, 2, 23]
    assert "3 images are bad" in notes(root)
    read_parts = np.concatenate([data.part(name) for name in ("train", "valid", "test")])
    assert data.images[read_parts].max((1, 2, 3)).all()  # none of them is black
    for names in (["dog"], ["cat", "dog"]):
        for path in root.glob(f"train/{names[0]}/*"):
            path.write_bytes(b"")
        said = "\n  ".join([f"nothing to train on of {len(names)} of 2 classes:", *names])
        with pytest.raises(script.InputError, match=said):
            read(root, "--skip_bad_data")


# --------------------------------------------------------------------------------------------------
# Pictures


def read_one(path, channels=3, size=16):
    return script.square(script.open_image(path), channels, size)


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


@pytest.mark.parametrize(
    ("mode", "ending"),
    [("L", "png"), ("P", "png"), ("1", "png"), ("CMYK", "jpg"), ("LA", "png"), ("RGBA", "webp")],
)
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


def test_arrays(tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (40, 8, 8), np.uint8)
    y = np.arange(40) % 4
    good = {"x_train": x, "y_train": y, "x_test": x[:8] // 2, "y_test": y[:8]}
    path = tmp_path / "a.npz"
    wrong = {
        "x_train is float64": {"x_train": x / 256},
        r"x_train is uint8 \(40, 8, 7\); expected uint8": {"x_train": x[:, :, :7]},
        "x_train has 40 images, and 3 labels": {"y_train": y[:3]},
        "nothing to train on of 3 of 4 classes": {"y_train": y % 1},
        "8 images have no class": {"y_test": []},
        "labels of x_train: expected whole numbers": {"y_train": np.where(y == 1, np.nan, y)},
    }
    for message, change in wrong.items():
        content = {**good, **change}
        np.savez(path, **{name: array for name, array in content.items() if len(array)})
        with pytest.raises(script.InputError, match=message):
            read(path)
    path.write_bytes(b"no arrays")
    with pytest.raises(script.InputError, match="a.npz: .*expected an .npz file of arrays"):
        read(path)

    np.savez(path, **good, ids=y)
    data = read(path)
    assert counts(data) == [36, 4, 8]
    assert data.shape == (1, 8)
    assert data.classes == ["0", "1", "2", "3"]
    assert np.array_equal(data.images[:, 0], np.concatenate([x, x[:8] // 2]))
    assert np.array_equal(data.labels, np.concatenate([y, y[:8]]))
    assert "a.npz: 1 arrays are not read, such as ids" in notes(path)
    assert read(path, "--image_shape=3x16").images.shape[1:] == (3, 16, 16)
    np.savez(path, **{**good, "y_train": y.astype(float)})
    assert np.array_equal(read(path).labels, data.labels)
    np.savez(path, x_test=x, y_test=y)
    with pytest.raises(script.InputError, match="nothing to train on of 4 of 4 classes"):
        read(path)


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
    order = np.concatenate([data.part(name) for name in ("train", "valid", "test")])
    assert np.array_equal(data.images[order], x.transpose(0, 3, 1, 2))
    assert np.array_equal(data.labels[order], y[:, 0])


def test_digits_and_generated_images(tmp_path):
    args = parse_arguments(script, f"--cache_dir={tmp_path}")
    folder = script.prepare(args, "digits")
    inside = script.Images(folder)
    assert len(inside.part("test")) == 360
    assert min(np.bincount(inside.labels[inside.part("valid")])) >= 9  # of each class alike
    for kind in script.GENERATED:
        outside = script.Images(script.prepare(args, kind, folder))
        assert outside.shape == inside.shape == (1, 8)
        assert counts(outside) == [20_000, 1000, 10_000]
        assert outside.classes == []
        assert 115 < outside.images.mean() < 140


def test_outside_images_are_no_inside_images(tmp_path):
    """An OOD folder may have any folders; pictures that are to be classified are left out."""
    root = photos(tmp_path / "photos")
    (inside,) = [read(root)]
    (folder,) = Path(f"{root}.cache").iterdir()
    others = tmp_path / "others"
    for i in range(30):
        picture(others / f"{i}.png")
    picture(others / "deep/er/0.png")
    for i in range(5):
        os.link(root / f"test/cat/{i}.png", others / f"same{i}.png")
    data = read(others, inside=folder)
    assert sum(counts(data)) == 31
    assert data.shape == inside.shape
    assert "5 images equal held-out ones, or those to classify" in notes(others)


def test_hub(tmp_path, monkeypatch):
    """Images and labels by their kinds; splits that are not read are named, and images whose label
    is kept secret."""
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
    monkeypatch.setenv("HF_ENDPOINT", "http://localhost:9")  # nobody is asked
    args = parse_arguments(script, f"--cache_dir={tmp_path}/x.cache", "--image_shape=3x16")
    data = script.Images(script.prepare(args, "some/pictures"))
    assert data.classes == ["a", "b"]
    assert sum(counts(data)) == 60
    red = data.images[:, 0].mean((1, 2))
    assert ((red > 80) == (data.labels == 0)).all()
    said = notes(tmp_path / "x")
    assert "1 splits are not read, such as extra" in said
    assert "3 images without a label are not read, such as test 20" in said
    for part in ("train", "test"):  # as many other images are other data
        tables[part] = tables[part].shuffle(seed=1)
    assert script.Images(script.prepare(args, "some/pictures")).hash != data.hash


def test_no_hub(tmp_path):
    """Within seconds, and with what works without it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import socket\n\ndef fail(*args, **options):\n    raise OSError('no network')\n\n"
        "socket.create_connection = fail\nsocket.socket.connect = fail\n"
    )
    begin = time.monotonic()
    command = [sys.executable, ROOT / "run_train_rebm_ddp.py", "--data=no-one/nothing"]
    env = environment(PYTHONPATH=tmp_path, HF_HUB_OFFLINE="", HTTPS_PROXY="")
    for name in ("HF_HUB_OFFLINE", "HTTPS_PROXY", "https_proxy", "HF_ENDPOINT"):
        env.pop(name, None)
    done = subprocess.run(
        [*command, "--prepare_only", f"--cache_dir={tmp_path}"],
        env=env,
        capture_output=True,
        text=1,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "no-one/nothing: no such folder or file here" in done.stderr
    assert "without a download: digits" in done.stderr
    assert time.monotonic() - begin < 40  # most of it are imports


# --------------------------------------------------------------------------------------------------
# The cache


def test_the_cache(tmp_path):
    """Read once for each shape and content; another place of the same images is the same data."""
    root = photos(tmp_path / "photos")
    first = read(root)
    made = {path: path.stat().st_ino for path in Path(f"{root}.cache").glob("*/*")}
    read(root)
    assert {path: path.stat().st_ino for path in Path(f"{root}.cache").glob("*/*")} == made
    moved = root.rename(tmp_path / "moved")
    assert read(moved).hash == first.hash
    picture(moved / "train/cat/more.png")
    assert read(moved).hash != first.hash


def test_full_disk(tmp_path):
    """While the cache is written: one line, and nothing half-made."""
    root = photos(tmp_path / "photos")
    cache = tmp_path / "small"
    cache.mkdir()
    with on_small_disk(cache, 1 << 16):
        options = [f"--data={root}", f"--cache_dir={cache}", f"--output_dir={tmp_path}/out"]
        options += ["--image_shape=3x64", "--device=cpu"]
        text = call_script("run_train_rebm_ddp", *options, status=1)
        assert not list(cache.iterdir())
    assert "a disk is full" in text
    assert "Traceback" not in text


def test_names_and_folders(tmp_path, monkeypatch, caplog):
    """A built-in set wins over a folder of its name, which is said; a folder that may not be read
    is an error of one line."""
    photos(tmp_path / "blobs")
    monkeypatch.chdir(tmp_path)
    script.find_images("blobs", [1, 8])
    assert "for the file or folder here say ./blobs" in caplog.text
    refuse = mock.Mock(side_effect=PermissionError(13, "Permission denied", "blobs/train"))
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(script.InputError, match=r"./blobs: .*Permission denied: 'blobs/train'"):
        script.prepare(parse_arguments(script, f"--cache_dir={tmp_path}/cache"), "./blobs")


def test_some_images_are_of_all_classes(tmp_path):
    """Files lie in the order of their classes."""
    data = read(photos(tmp_path / "photos", count=40))
    part = data.part("train")
    some = data.some("train", len(part) // 4)
    assert len(some) == len(part) // 4
    assert np.isin(some, part).all()
    assert set(data.labels[some]) == {0, 1}
    assert data.some("train", len(part)).tolist() == part.tolist()


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
