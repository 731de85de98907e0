"""Make a folder of images for run_train_rebm_ddp.py.

    python tools/prepare_images.py digits                                       data/digits
    python tools/prepare_images.py cifar10 downloads --out data/cifar10
    python tools/prepare_images.py folder raw/imagenet --size 256 --out data/imagenet
    python tools/prepare_images.py folder raw/openimages --size 256 --out data/openimages
    python tools/prepare_images.py tinyimages tiny_images.bin --exclude a.txt b.txt --out data/tiny
    python tools/prepare_images.py arrays images.npz --out data/mine

digits      scikit-learn's 1,797 digits of 8 x 8 pixels; no download
cifar10, cifar100    the folder with what tar made of cifar-10-python.tar.gz
            (https://www.cs.toronto.edu/~kriz/cifar.html)
folder      train/CLASS/... and val/CLASS/... (or test/CLASS/...). A folder without train/ holds OOD
            images, in any folders below it. Images are cut to squares of 8/7 --size, so that
            training can crop and a test takes the middle; transparent pixels become white
tinyimages  a million rows, at random, of tiny_images.bin; --exclude names files with the numbers of
            the rows that are images of CIFAR, one a line (--exclude none keeps them)
arrays      .npz with x_train, y_train, x_test, y_test, or with x_train alone (OOD images); uint8
            (N, S, S), (N, S, S, C) or (N, C, S, S)

Writes a folder of arrays that can be mapped into memory; it is there whole or not at all:
    images.npy (N, C, side, side) uint8
    labels.npy (N,) int64   number of the class, from 0 on; all 0 of OOD images
    split.npy (N,) uint8    0 train, 1 valid, 2 test, 3 images that could not be read
    meta.json               names of the classes ([] of OOD images), size of a network's input,
                            bytes and checksum of each file
Of the training images --valid are held out for validation. The folder val/ is the test part, unless
there is test/, too: then val/ is the validation part. OOD images are split at random: a tenth to
validate (at most 1,024), and a tenth to test (at most 10,000).
"""

import argparse
import hashlib
import json
import pickle
import shutil
import sys
from multiprocessing.pool import ThreadPool
from pathlib import Path

import numpy as np
from tqdm import tqdm

ENDINGS = {".png", ".jpg", ".jpeg", ".bmp", ".webp"}
ROW = 32 * 32 * 3  # bytes of an image of Tiny Images
TINY_IMAGES = 1_000_000  # of them at most
TRAIN, VALID, TEST, UNREADABLE = range(4)  # in split.npy


def stop(status, message):
    """End the program with one line."""
    print(f"prepare_images.py: {message}", file=sys.stderr)
    sys.exit(status)


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the docstring as it is, and every default."""


class Parser(argparse.ArgumentParser):
    def error(self, message):
        stop(2, message)  # one line, without the usage


def parse_args(words=None):
    parser = Parser(description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("kind", choices=[*READERS], help="what the images are")
    add("source", nargs="?", type=Path, help="folder or file; none for digits")
    add("--out", type=Path, help="folder to write; default: data/KIND")
    add("--size", type=int, help="side of a network's input; for folders, which need it")
    add("--valid", type=int, help="training images to hold out; default: 7 %%, at most 1,000")
    text = "files with rows of tinyimages to leave out, or none"
    add("--exclude", nargs="+", default=[], metavar="FILE", help=text)
    add("--skip_bad_data", action="store_true", help="leave out images that cannot be read")
    args = parser.parse_args(words)
    args.out = args.out or Path("data") / args.kind
    if args.kind == "folder" and not args.size:
        parser.error("--size: a folder needs the side of a network's input")
    if args.kind == "tinyimages" and not args.exclude:
        parser.error("--exclude: give files with the rows that are images of CIFAR, or none")
    return args


# ---- Readers -----------------------------------------------------------------------------------
# Each writes images.npy (N, C, side, side) uint8 into the folder `out`, and returns labels (N,),
# parts (N,) as in split.npy, the names of the classes, and the size of a network's input


def read_digits(args, out):
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = np.round(images.reshape(-1, 1, 8, 8) * (255 / 16)).astype(np.uint8)
    order = np.roll(np.random.default_rng(0).permutation(len(images)), -360)
    np.save(out / "images.npy", images[order])
    parts = np.full(len(order), TRAIN)
    parts[-360:] = TEST
    return labels[order], parts, [str(digit) for digit in range(10)], 8


class PlainUnpickler(pickle.Unpickler):
    """Reads arrays, lists and dictionaries; whatever else a file names is not run."""

    KNOWN = {"_reconstruct", "ndarray", "dtype", "encode"}

    def find_class(self, module, name):
        if module.split(".")[0] not in ("numpy", "_codecs") or name not in self.KNOWN:
            raise pickle.UnpicklingError(f"it holds a {module}.{name}")
        return super().find_class(module, name)


def read_cifar(args, out):
    if args.kind == "cifar10":
        classes = 10
        files = [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]
        key = b"labels"
    else:
        classes = 100
        files = ["train", "test"]
        key = b"fine_labels"
    folder = args.source
    for path in args.source.glob(f"cifar-{classes}-*/{files[-1]}"):
        folder = path.parent

    images = []
    labels = []
    for name in files:
        try:
            with open(folder / name, "rb") as file:
                table = PlainUnpickler(file, encoding="bytes").load()
            images.append(table[b"data"].reshape(-1, 3, 32, 32))
            labels += table[key]
        except Exception as error:  # damaged pickles raise many kinds
            text = f"expected a file of cifar-{classes}-python.tar.gz"
            stop(2, f"{folder / name}: {type(error).__name__} {error}: {text}")
    np.save(out / "images.npy", np.concatenate(images))
    parts = np.full(len(labels), TRAIN)
    parts[-len(images[-1]) :] = TEST
    return np.array(labels), parts, [str(number) for number in range(classes)], 32


def read_folder(args, out):
    from PIL import Image, ImageOps

    folders = [args.source / name for name in ("train", "test", "val")]
    folders = [folder for folder in folders if folder.is_dir()]
    is_outside = not (args.source / "train").is_dir()
    if is_outside:
        folders = [args.source]
    elif len(folders) == 1:
        stop(2, f"{args.source} has train/, but neither val/ nor test/, images to test on")
    paths = []
    names = []
    parts = []
    for folder, part in zip(folders, [TRAIN, TEST, VALID], strict=False):
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        found = [path for path in files if path.suffix.lower() in ENDINGS]
        endings = ", ".join(sorted(ENDINGS))
        if not found:
            stop(2, f"{folder}: no images there: expected {endings}")
        if len(found) < len(files):
            print(f"{folder}: {len(files) - len(found)} files are left out, which are no {endings}")
        for path in found:
            if path.parent == folder and not is_outside:
                stop(2, f"{path} lies in no folder of a class: expected {folder}/CLASS/{path.name}")
        paths += found
        names += [path.relative_to(folder).parts[0] for path in found]
        parts += [part] * len(found)

    side = args.size * 8 // 7
    shape = (len(paths), 3, side, side)
    array = np.lib.format.open_memmap(out / "images.npy", "w+", np.uint8, shape)

    def copy(number):
        """Write the middle of an image, as a square. Returns what is wrong with it, or nothing."""
        try:
            with Image.open(paths[number]) as image:
                if image.mode[0] in "IF":  # convert would clip their pixels at 255
                    raise ValueError(f"mode {image.mode}: expected 8 bits a channel")
                if image.has_transparency_data:
                    image = image.convert("RGBA")
                    white = Image.new("RGBA", image.size, "white")
                    image = Image.alpha_composite(white, image)
                square = ImageOps.fit(image.convert("RGB"), (side, side), Image.Resampling.BICUBIC)
            array[number] = np.asarray(square).transpose(2, 0, 1)
        except Exception as error:  # Pillow raises many kinds
            parts[number] = UNREADABLE
            return f"{paths[number]}: {error}"

    with ThreadPool() as pool:
        results = pool.imap(copy, range(len(paths)), chunksize=64)
        problems = [text for text in tqdm(results, total=len(paths), disable=None) if text]
    if problems and not args.skip_bad_data:
        shown = "\n  ".join(problems[:20])
        text = f"{len(problems)} of {len(paths)} images are bad (--skip_bad_data leaves them out)"
        stop(2, f"{text}, such as\n  {shown}")
    if problems:
        (out / "bad_images.txt").write_text("\n".join(problems) + "\n")
        print(f"left out {len(problems)} bad images, listed in {args.out}/bad_images.txt")

    if is_outside:
        return np.zeros(len(paths), np.int64), np.array(parts), [], args.size
    classes, labels = np.unique(names, return_inverse=True)
    return labels, np.array(parts), classes.tolist(), args.size


def read_tiny_images(args, out):
    """Some of the rows, at random, without the excluded ones."""
    size = args.source.stat().st_size
    if size % ROW:
        stop(2, f"{args.source} has {size} bytes: expected rows of {ROW:,} bytes")
    keep = np.ones(size // ROW, bool)
    for name in args.exclude:
        if name != "none":
            try:
                keep[np.loadtxt(name, np.int64, ndmin=1)] = False
            except (OSError, ValueError, IndexError) as error:
                stop(2, f"--exclude {name}: {error}: expected row numbers, one a line")
    rows = np.flatnonzero(keep)
    print(f"{len(keep) - len(rows):,} of {len(keep):,} images are excluded")
    if len(rows) > TINY_IMAGES:
        rows = np.random.default_rng(0).choice(rows, TINY_IMAGES, replace=False)
        rows.sort()  # one way through the file

    source = np.memmap(args.source, np.uint8, "r").reshape(-1, 3, 32, 32)
    shape = (len(rows), 3, 32, 32)
    array = np.lib.format.open_memmap(out / "images.npy", "w+", np.uint8, shape)
    for number, row in enumerate(tqdm(rows, disable=None)):
        # an image of 32 x 32 x 3 stands there with its first index running fastest
        array[number] = source[row].transpose(0, 2, 1)
    return np.zeros(len(rows), np.int64), np.full(len(rows), TRAIN), [], 32


def channels_first(x):
    """(N, S, S), (N, S, S, C) or (N, C, S, S) as the last of them"""
    if x.ndim == 3:
        x = x[:, None]
    if x.ndim == 4 and x.shape[1] not in (1, 3):
        x = x.transpose(0, 3, 1, 2)
    if x.dtype != np.uint8 or x.ndim != 4 or x.shape[1] not in (1, 3) or x.shape[2] != x.shape[3]:
        raise ValueError(f"images are {x.dtype} {x.shape}, not uint8 (N, S, S) or (N, S, S, C)")
    return x


def read_arrays(args, out):
    images = []
    labels = []
    parts = []
    try:
        with np.load(args.source) as file:
            is_outside = file.files == ["x_train"]
            names = {"train": TRAIN} if is_outside else {"train": TRAIN, "test": TEST}
            for name, part in names.items():
                x = channels_first(file[f"x_{name}"])
                y = np.zeros(len(x), np.int64) if is_outside else file[f"y_{name}"]
                if y.shape != (len(x),) or y.dtype.kind not in "iu" or y.min() < 0:
                    text = f"not {len(x)} whole numbers from 0 on"
                    raise ValueError(f"y_{name} is {y.dtype} {y.shape}, {text}")
                images.append(x)
                labels.append(y)
                parts.append(np.full(len(x), part))
        images = np.concatenate(images)
        labels = np.concatenate(labels).astype(np.int64)
    except Exception as error:  # those of zipfile and zlib, too
        expected = "x_train, y_train, x_test, y_test, or x_train alone"
        stop(2, f"{args.source}: {error}: expected an .npz of {expected}")
    np.save(out / "images.npy", images)
    classes = [] if is_outside else [str(number) for number in range(labels.max() + 1)]
    return labels, np.concatenate(parts), classes, images.shape[2]


READERS = {
    "digits": read_digits,
    "cifar10": read_cifar,
    "cifar100": read_cifar,
    "folder": read_folder,
    "tinyimages": read_tiny_images,
    "arrays": read_arrays,
}

# ---- The folder --------------------------------------------------------------------------------


def make_split(args, labels, parts, classes):
    """(N,) uint8: parts, where some of TRAIN became VALID, and TEST if there was none."""
    split = parts.astype(np.uint8)
    if classes:
        counts = np.bincount(labels[split == TRAIN], minlength=len(classes))
        missing = [classes[number] for number in np.flatnonzero(counts == 0)]
        if missing:
            stop(2, f"{args.source}: the training part has no images of {', '.join(missing[:9])}")
        if len(classes) == 1:
            text = "a classifier needs two or more; OOD images lie in a folder without train/"
            stop(2, f"{args.source}: 1 class: {text}")
    if VALID in split:
        if args.valid is not None:
            stop(2, f"--valid {args.valid}: {args.source} has val/ and test/, leave it out")
        return split

    train = np.random.default_rng(1).permutation(np.flatnonzero(split == TRAIN))
    valid = min(1000, len(train) * 7 // 100)
    if not classes:
        valid = min(1024, len(train) // 10)
        split[train[valid : valid + min(10_000, len(train) // 10)]] = TEST
    elif args.valid is not None:
        valid = args.valid
    if not 0 < valid < len(train):
        stop(2, f"{valid} images to validate of {len(train)} to train on: give another --valid")
    split[train[:valid]] = VALID
    return split


def main(words=None):
    args = parse_args(words)
    if args.out.exists():
        stop(2, f"{args.out} exists: remove it, or give another --out")
    if args.kind != "digits" and not (args.source and args.source.exists()):
        stop(2, f"there is no {args.source}: {args.kind} needs its folder or file")
    out = args.out.with_name(f"{args.out.name}.tmp")
    shutil.rmtree(out, ignore_errors=True)  # of a run that was killed
    try:
        out.mkdir(parents=True)
        labels, parts, classes, size = READERS[args.kind](args, out)
        split = make_split(args, labels, parts, classes)
        np.save(out / "labels.npy", labels)
        np.save(out / "split.npy", split)
        files = {}
        for name in ("images.npy", "labels.npy", "split.npy"):
            content = np.memmap(out / name, np.uint8, "r")  # mapped: it may be larger than memory
            files[name] = [len(content), hashlib.sha256(content).hexdigest()]
        meta = {"classes": classes, "size": size, "files": files, "source": str(args.source)}
        (out / "meta.json").write_text(json.dumps(meta, indent=1))
        out.rename(args.out)
    except OSError as error:
        stop(1, str(error))
    train, valid, test, _ = np.bincount(split, minlength=4)
    what = f"{len(classes)} classes" if classes else "OOD images, without classes"
    print(f"{args.out}: {what}; images to train, validate, test: {train}, {valid}, {test}")


if __name__ == "__main__":
    main()
