"""Make a folder of images for run_train_rebm_ddp.py.

    python tools/prepare_images.py digits                                       data/digits
    python tools/prepare_images.py cifar10 downloads --out data/cifar10
    python tools/prepare_images.py folder raw/imagenet --size 256 --out data/imagenet
    python tools/prepare_images.py folder raw/openimages --size 256 --out data/openimages
    python tools/prepare_images.py tinyimages tiny_images.bin --exclude a.txt b.txt --out data/tiny
    python tools/prepare_images.py arrays images.npz --out data/mine

digits      scikit-learn's 1,797 digits of 8 x 8 pixels; no download
cifar10, cifar100    the folder with what tar made of cifar-10-python.tar.gz, or of the binary one
            (https://www.cs.toronto.edu/~kriz/cifar.html)
folder      train/CLASS/... and val/CLASS/... (or test/CLASS/...). A folder without train/ holds OOD
            images, in any folders below it. Images are cut to squares of 8/7 --size, so that
            training can crop and a test takes the middle
tinyimages  tiny_images.bin, rows of 3,072 bytes; --exclude names files with the numbers of the rows
            that are images of CIFAR, one a line (--exclude none keeps them)
arrays      .npz with x_train, y_train, x_test, y_test, or with x_train alone (OOD images), or .npy
            (OOD images); uint8 (N, S, S), (N, S, S, C) or (N, C, S, S)

Writes a folder of arrays that can be mapped into memory; it is there whole or not at all:
    images.npy (N, C, side, side) uint8
    labels.npy (N,) int64   number of the class, from 0 on; all 0 of OOD images
    split.npy (N,) uint8    0 train, 1 valid, 2 test; from --split_seed alone
    meta.json               names of the classes ([] of OOD images), size of a network's input,
                            bytes and checksum of each file
Held out of the training images are --valid for validation. OOD images, which come without a test
part, are split at random: a tenth, at most 1,024 and 10,000, to validate and to test.
"""

import hashlib
import json
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from make_causal_sets import HelpFormatter, Parser, stop
from tqdm import tqdm

KINDS = ["digits", "cifar10", "cifar100", "folder", "tinyimages", "arrays"]
ENDINGS = {".png", ".jpg", ".jpeg", ".bmp", ".webp"}
ROW = 32 * 32 * 3  # bytes of an image of CIFAR or Tiny Images


def parse_args(words=None):
    parser = Parser(description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("kind", choices=KINDS, help="what the images are")
    add("source", nargs="?", type=Path, help="folder or file; none for digits")
    add("--out", type=Path, help="folder to write; default: data/KIND")
    add("--size", type=int, help="side of a network's input; for folders, which need it")
    text = "images held out of the training part; default: 7 %%, at most 1,000"
    add("--valid", type=int, help=text)
    text = "files with rows of tinyimages to leave out, or none"
    add("--exclude", nargs="+", default=[], metavar="FILE", help=text)
    add("--max_images", type=int, default=1_000_000, help="of tinyimages, chosen at random")
    add("--skip_bad_data", action="store_true", help="leave out images that cannot be read")
    add("--split_seed", type=int, default=0, help="of the split")
    add("--workers", type=int, default=8, help="threads that read the images of a folder")
    args = parser.parse_args(words)
    args.out = args.out or Path("data") / args.kind
    if args.out.exists():
        parser.error(f"{args.out} exists: remove it, or give another --out")
    if (args.kind == "digits") != (args.source is None):
        parser.error("all kinds but digits need their folder or file")
    if args.kind == "folder" and (args.size is None or args.size < 8):
        parser.error("--size: a folder needs the side of a network's input, 8 or more")
    if args.kind == "tinyimages" and not args.exclude:
        text = "files with the rows that are images of CIFAR, or none"
        parser.error(f"--exclude: tinyimages needs {text}: what is CIFAR must not be an OOD image")
    if args.workers < 1 or args.max_images < 20 or args.split_seed < 0:
        parser.error("--workers from 1, --max_images from 20, --split_seed from 0")
    return args


# ---- Readers: {"train": (images (N, C, S, S) uint8, labels (N,)), "test": ...}, class names ----


def read_digits(args):
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = np.round(images.reshape(-1, 1, 8, 8) * (255 / 16)).astype(np.uint8)
    order = np.random.default_rng(args.split_seed).permutation(len(images))
    test = order[:360]
    train = order[360:]
    parts = {"train": (images[train], labels[train]), "test": (images[test], labels[test])}
    return parts, [str(digit) for digit in range(10)]


class PlainUnpickler(pickle.Unpickler):
    """Reads arrays, lists and dictionaries; whatever else a file names is not run."""

    KNOWN = {"_reconstruct", "ndarray", "dtype", "encode"}

    def find_class(self, module, name):
        if module.split(".")[0] not in ("numpy", "_codecs") or name not in self.KNOWN:
            raise pickle.UnpicklingError(f"it holds a {module}.{name}")
        return super().find_class(module, name)


def read_cifar_file(path, classes):
    """(images, labels) of one file of CIFAR, pickled or binary."""
    try:
        if path.suffix == ".bin":  # of CIFAR-100 the fine label comes second
            head = 2 if classes == 100 else 1
            table = np.fromfile(path, np.uint8).reshape(-1, head + ROW)
            images = table[:, head:]
            labels = table[:, head - 1]
        else:
            with open(path, "rb") as file:
                table = PlainUnpickler(file, encoding="bytes").load()
            images = table[b"data"]
            labels = table[b"fine_labels" if classes == 100 else b"labels"]
        labels = np.array(labels, np.int64)
        if images.dtype != np.uint8 or images.shape != (len(labels), ROW) or len(labels) == 0:
            raise ValueError(f"{len(labels)} labels, images {images.dtype} {[*images.shape]}")
        if labels.min() < 0 or labels.max() >= classes:
            raise ValueError(f"labels from {labels.min()} to {labels.max()}")
    except Exception as error:  # damaged pickles raise many kinds
        stop(2, f"{path}: {error}: expected a file of CIFAR-{classes}")
    return images.reshape(-1, 3, 32, 32), labels


def read_cifar(args):
    classes = int(args.kind.removeprefix("cifar"))
    names = {"train": ["train"], "test": ["test"]}
    if classes == 10:
        names["train"] = [f"data_batch_{number}" for number in range(1, 6)]
        names["test"] = ["test_batch"]
    places = [args.source, *sorted(args.source.glob(f"cifar-{classes}-*"))]
    found = [place for place in places if [*place.glob(f"{names['test'][0]}*")]]
    if not found:
        wanted = f"what tar xf cifar-{classes}-python.tar.gz makes"
        stop(2, f"{args.source}: no CIFAR-{classes} there: expected {wanted}")
    parts = {}
    for part, files in names.items():
        read = []
        for name in files:
            path = found[0] / f"{name}.bin"
            if not path.exists():
                path = found[0] / name
            read.append(read_cifar_file(path, classes))
        parts[part] = [np.concatenate(arrays) for arrays in zip(*read, strict=True)]
    return parts, [str(number) for number in range(classes)]


def decode(path, side):
    """The middle of an image as a square (3, side, side), or what is wrong with it."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            image = image.convert("RGB")
        scale = side / min(image.size)
        size = [max(side, round(length * scale)) for length in image.size]
        image = image.resize(size, Image.Resampling.BICUBIC)
        left = (image.width - side) // 2
        top = (image.height - side) // 2
        return np.asarray(image.crop((left, top, left + side, top + side))).transpose(2, 0, 1)
    except Exception as error:  # Pillow raises many kinds
        return f"{path}: {error}"


def decode_all(paths, side, out, workers):
    """Write the images of `paths` into out/images.npy; the problems, {path: text}."""
    shape = (len(paths), 3, side, side)
    array = np.lib.format.open_memmap(out / "images.npy", "w+", np.uint8, shape)
    problems = {}
    with ThreadPoolExecutor(workers) as pool, tqdm(total=len(paths), disable=None) as bar:
        for first in range(0, len(paths), 256):  # a few at a time: memory has bounds
            some = paths[first : first + 256]
            images = pool.map(decode, some, [side] * len(some))
            for number, image in enumerate(images, start=first):
                if isinstance(image, str):
                    problems[paths[number]] = image
                else:
                    array[number] = image
            bar.update(len(some))
    array.flush()
    return problems


def read_folder(args, out):
    """The images go straight to out/images.npy: they may be too many for memory."""
    roots = [args.source]
    if (args.source / "train").is_dir():
        test = "val" if (args.source / "val").is_dir() else "test"
        roots = [args.source / "train", args.source / test]
    paths = []
    names = []
    parts = []
    for number, root in enumerate(roots):
        found = sorted(path for path in root.rglob("*") if path.suffix.lower() in ENDINGS)
        if not found:
            stop(2, f"{root}: no images there: expected {', '.join(sorted(ENDINGS))}")
        for path in found:
            paths.append(path)
            names.append(path.relative_to(root).parts[0] if len(roots) > 1 else "")
            parts.append(2 * number)  # 0 train, 2 test
    side = args.size * 8 // 7
    problems = decode_all(paths, side, out, args.workers)
    lines = [*problems.values()]
    if problems:
        (out / "bad_images.txt").write_text("\n".join(lines) + "\n")
        if not args.skip_bad_data:
            shown = "\n  ".join(lines[:20])
            more = f"\n  and {len(lines) - 20} more" if len(lines) > 20 else ""
            text = f"{len(lines)} of {len(paths)} images are bad (--skip_bad_data leaves them out)"
            stop(2, f"{text}:\n  {shown}{more}")
        print(f"left out {len(lines)} bad images, listed in {args.out}/bad_images.txt")
        good = [number for number, path in enumerate(paths) if path not in problems]
        paths = [paths[number] for number in good]
        names = [names[number] for number in good]
        parts = [parts[number] for number in good]
        if decode_all(paths, side, out, args.workers):  # anew: an array has no gaps
            stop(1, f"{args.source} changes while it is read")
    parts = np.array(parts)
    if len(roots) == 1:
        return np.zeros(len(paths), np.int64), parts, []
    classes, labels = np.unique(names, return_inverse=True)
    classes = [str(name) for name in classes]
    return labels, parts, classes


def read_tiny_images(args, out):
    """Some of the rows, at random, without the excluded ones; straight to out/images.npy."""
    size = args.source.stat().st_size
    if size == 0 or size % ROW:
        text = "expected rows of 3,072 bytes, 79,302,017 in the whole file"
        stop(2, f"{args.source} has {size} bytes: {text}")
    keep = np.ones(size // ROW, bool)
    for name in args.exclude:
        if name != "none":
            try:
                keep[np.loadtxt(name, np.int64, ndmin=1)] = False
            except (OSError, ValueError, IndexError) as error:
                stop(2, f"--exclude {name}: {error}: expected row numbers, one a line")
    rows = np.flatnonzero(keep)
    print(f"{len(keep) - len(rows):,} of {len(keep):,} images are excluded")
    if len(rows) > args.max_images:
        rows = np.random.default_rng(args.split_seed).choice(rows, args.max_images, replace=False)
        rows.sort()  # one way through the file
    source = np.memmap(args.source, np.uint8, "r").reshape(-1, 3, 32, 32)
    shape = (len(rows), 3, 32, 32)
    array = np.lib.format.open_memmap(out / "images.npy", "w+", np.uint8, shape)
    for first in tqdm(range(0, len(rows), 10_000), unit="0,000", disable=None):
        some = rows[first : first + 10_000]
        # an image of 32 x 32 x 3 stands there with its first index running fastest
        array[first : first + 10_000] = source[some].transpose(0, 1, 3, 2)
    array.flush()
    return len(rows)


def read_arrays(args):
    try:
        found = np.load(args.source, mmap_mode="r", allow_pickle=False)
        if isinstance(found, np.ndarray):
            found = {"x_train": found}
        arrays = {name: found[name] for name in found}
    except Exception as error:  # those of zipfile and zlib, too
        stop(2, f"{args.source}: {error}: expected a file of numpy's savez or save")
    wanted = ["x_train", "y_train", "x_test", "y_test"]
    if {*arrays} not in ({"x_train"}, {*wanted}):
        names = ", ".join(arrays)
        stop(2, f"{args.source} holds {names}: expected {', '.join(wanted)}, or x_train alone")
    parts = {}
    for part in ("train", "test"):
        if f"x_{part}" not in arrays:
            continue
        x = arrays[f"x_{part}"]
        y = arrays.get(f"y_{part}", np.zeros(len(x), np.int64))
        images = x
        if x.ndim == 3:
            images = x[:, None]
        elif x.ndim == 4 and x.shape[1] not in (1, 3):
            images = x.transpose(0, 3, 1, 2)
        shape = images.shape
        if x.dtype != np.uint8 or len(shape) != 4 or shape[1] not in (1, 3) or shape[2] != shape[3]:
            text = "expected uint8 (N, S, S), (N, S, S, C) or (N, C, S, S), with C 1 or 3"
            stop(2, f"{args.source}: x_{part} is {x.dtype} {[*x.shape]}: {text}")
        if y.shape != (len(x),) or y.dtype.kind not in "iu" or (len(y) and y.min() < 0):
            least = f", the least is {y.min()}" if y.size and y.min() < 0 else ""
            text = f"y_{part} is {y.dtype} {[*y.shape]}{least}"
            stop(2, f"{args.source}: {text}: expected {len(x)} whole numbers from 0 on")
        parts[part] = (images, y.astype(np.int64))
    if len(parts) == 1:
        return parts, []
    if parts["test"][0].shape[1:] != parts["train"][0].shape[1:]:
        shapes = " and ".join(str([*images.shape[1:]]) for images, _ in parts.values())
        stop(2, f"{args.source}: images of {shapes}: expected the same shape in both parts")
    highest = max(labels.max(initial=-1) for _, labels in parts.values())
    return parts, [str(number) for number in range(min(highest, 10**6) + 1)]


# ---- The folder --------------------------------------------------------------------------------


def check_classes(args, classes, labels, parts):
    """Every class is in the training part and in the test part, and there are two or more."""
    if len(classes) < 2:
        stop(2, f"{args.source}: {len(classes)} class: a classifier needs two or more")
    for part, name in ((0, "training"), (2, "test")):
        present = {*np.unique(labels[parts == part]).tolist()}
        missing = [text for number, text in enumerate(classes) if number not in present]
        if missing and (part == 0 or len(present) == 0 or args.kind == "folder"):
            text = f"the {name} part has no images of {', '.join(missing[:9])}"
            stop(2, f"{args.source}: {text} ({len(missing)} of {len(classes)} classes)")


def make_split(args, parts, is_outside):
    """(N,) uint8, from what is a test image: 0 train, 1 valid, 2 test."""
    rng = np.random.default_rng(args.split_seed + 1)
    split = parts.astype(np.uint8)
    train = rng.permutation(np.flatnonzero(split == 0))
    valid = min(1000, len(train) * 7 // 100)
    if is_outside:
        valid = min(1024, len(train) // 10)
        split[train[valid : valid + min(10_000, len(train) // 10)]] = 2
    elif args.valid is not None:
        valid = args.valid
    if not 0 < valid < len(train):
        stop(2, f"{valid} images to validate of {len(train)} to train on: give another --valid")
    split[train[:valid]] = 1
    return split


def write_meta(out, args, classes, size):
    files = {}
    for name in ("images.npy", "labels.npy", "split.npy"):
        digest = hashlib.sha256()
        with open(out / name, "rb") as file:
            for block in iter(lambda: file.read(2**24), b""):
                digest.update(block)
        files[name] = [(out / name).stat().st_size, digest.hexdigest()]
    options = {"kind": args.kind, "source": str(args.source), "split_seed": args.split_seed}
    meta = {"classes": classes, "size": size, "files": files, "args": options}
    (out / "meta.json").write_text(json.dumps(meta, indent=1))


def main(words=None):
    args = parse_args(words)
    if args.source and not args.source.exists():
        stop(2, f"there is no {args.source}")
    out = args.out.with_name(f"{args.out.name}.tmp")
    shutil.rmtree(out, ignore_errors=True)  # of a run that was killed
    try:
        out.mkdir(parents=True)
        if args.kind == "folder":
            labels, parts, classes = read_folder(args, out)
            size = args.size
        elif args.kind == "tinyimages":
            labels = np.zeros(read_tiny_images(args, out), np.int64)
            parts = labels
            classes = []
            size = 32
        else:
            readers = {"digits": read_digits, "arrays": read_arrays}
            found, classes = readers.get(args.kind, read_cifar)(args)
            numbers = {"train": 0, "test": 2}
            labels = np.concatenate([y for _, y in found.values()])
            parts = np.repeat(
                [numbers[name] for name in found], [len(y) for _, y in found.values()]
            )
            images = np.concatenate([x for x, _ in found.values()])
            size = images.shape[2]
            np.save(out / "images.npy", images)
        if classes:
            check_classes(args, classes, labels, parts)
        split = make_split(args, parts, is_outside=not classes)
        np.save(out / "labels.npy", labels)
        np.save(out / "split.npy", split)
        write_meta(out, args, classes, size)
        out.rename(args.out)
    except OSError as error:
        stop(1, f"{error}")
    counts = np.bincount(split, minlength=3)
    what = f"{len(classes)} classes" if classes else "OOD images"
    print(f"{args.out}: {what}; images to train, validate, test: {', '.join(map(str, counts))}")


if __name__ == "__main__":
    main()
