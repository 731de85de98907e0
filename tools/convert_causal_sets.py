"""Convert causal sets of the QuantumGrav project into a folder for run_train_quantumgrav_ddp.py.

    python tools/convert_causal_sets.py runs/*.zarr --labels manifold_like cset_type --out data/mine
    python run_train_quantumgrav_ddp.py --data data/mine --tasks manifold_like cset_type

What it reads (G sets; zarr format 2 or 3, with a root group or without; pip install zarr):
    grouped   STORE.zarr with a group cset_1, cset_2, ... for each set, as QuantumGrav.jl writes
              them: adj or linkmat (n, n), and one number for each label
    flat      STORE.zarr or FILE.npz: adjacency_matrix or link_matrix (G, N, N), padded with zeros;
              atomcount or cset_size (G,), the elements of each set; each label (G,)

An adjacency matrix has all related pairs; a link matrix those with nothing between them, from which
the others follow. (If both are there, the first is read.) Elements are sorted in time, so that a
matrix has entries in one triangle only: the upper one, or the lower one, as arrays of Julia arrive
transposed. A label is a whole number; below 0: none.

Nothing is guessed. Damaged sets are listed by store and number, and nothing is written, unless
--skip_bad_data leaves them out (skipped.txt then lists them). The format of the folder:
tools/make_causal_sets.py.
"""

import os
import re
from functools import cache, partial
from pathlib import Path

if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"  # the matrices are small; we use processes instead

import numpy as np
from make_causal_sets import (
    Parser,
    add_folder_options,
    check_split,
    closure,
    describe_set,
    in_workers,
    join,
    links,
    run,
    split_sets,
    stop,
    write_folder,
)

ADJACENCY = ["adj", "adjacency_matrix"]
LINKS = ["linkmat", "link_matrix"]
SIZES = ["atomcount", "cset_size"]
COUNTS = ["num_samples", "num_causal_sets"]  # of a flat store that has room for more sets


def parse_args(words=None):
    parser = Parser(__doc__)
    add = parser.add_argument
    add("sources", nargs="+", type=Path, metavar="SOURCE", help="stores (.zarr) and files (.npz)")
    add("--out", type=Path, required=True, help="folder to write")
    add("--labels", nargs="+", required=True, metavar="NAME", help="labels to keep")
    add("--skip_bad_data", action="store_true", help="leave out what is damaged, and list it")
    add_folder_options(add)
    args = parser.parse_args(words)
    check_split(args.split)
    if (args.out / "meta.json").exists():
        parser.error(f"{args.out} holds a data set: give another --out, or remove that folder")
    return args


# ---- Sets: what is wrong with one is a ValueError --------------------------------------------


def order_of(values):
    """The order (n, n) bool of a set, from its arrays {name: array}."""
    name = choose(values, *ADJACENCY, *LINKS)
    matrix = values[name]
    if matrix.ndim != 2 or len(matrix) != matrix.shape[1]:
        raise ValueError(f"{name} has shape {matrix.shape}; expected (n, n)")
    n = len(matrix)
    for size in SIZES:
        if size in values:
            n = label_of(values[size], size)
    if not 2 <= n <= min(len(matrix), 32767):  # elements are numbered in int16
        raise ValueError(f"{n} elements in {name} of shape {matrix.shape}; expected 2 to 32767")
    if matrix[n:].any() or matrix[:, n:].any():
        raise ValueError(f"{name} has pairs beyond its {n} elements")

    matrix = matrix[:n, :n]
    if not np.isin(matrix, (0, 1)).all():
        raise ValueError(f"{name} has other entries than 0 and 1")
    if not matrix.any():
        raise ValueError(f"{name} has no pairs at all (a missing chunk of a store reads so)")
    matrix = matrix.astype(bool)
    if not np.triu(matrix).any():
        matrix = matrix.T
    if np.tril(matrix).any():
        raise ValueError(f"{name} has a cycle, or its elements are not sorted in time")

    order = closure(matrix)
    if name in ADJACENCY and not np.array_equal(matrix, order):
        raise ValueError(f"{name} is not transitive; expected all related pairs")
    if name in LINKS and not np.array_equal(matrix, links(order)):
        raise ValueError(f"{name} is not made of the pairs with nothing between them")
    return order


def label_of(value, name):
    """A label as an int, -1 for none."""
    number = np.asarray(value).item()
    if not isinstance(number, (int, float)) or not float(number).is_integer():
        raise ValueError(f"{name} is {number}; expected a whole number")
    return max(int(number), -1)


# ---- Sources: source[i] are the arrays of set i ----------------------------------------------


def zarr_arrays(folder):
    """{name: array} of those directly in a folder of a zarr store. We look at the folders
    themselves, since in some stores the groups have no file that says so."""
    import zarr

    arrays = {}
    for path in sorted(folder.iterdir()):
        if (path / ".zarray").exists() or (path / "zarr.json").exists():  # format 2, format 3
            found = zarr.open(path, mode="r")
            if isinstance(found, zarr.Array):
                arrays[path.name] = found
    return arrays


def choose(arrays, *names):
    """The first of the names that is there."""
    for name in names:
        if name in arrays:
            return name
    raise ValueError(f"has {', '.join(arrays) or 'nothing'}; expected {' or '.join(names)}")


class Grouped:
    """A zarr store with a group for each set."""

    piece = 1  # sets that are read together

    def __init__(self, groups, labels):
        self.groups = sorted(groups, key=lambda path: int(path.name.removeprefix("cset_")))
        self.names = [group.name for group in self.groups]
        self.labels = labels

    def __getitem__(self, i):
        arrays = zarr_arrays(self.groups[i])
        names = [choose(arrays, *ADJACENCY, *LINKS), *self.labels]
        names += [name for name in SIZES if name in arrays]
        return {name: arrays[choose(arrays, name)][...] for name in names}


class Flat:
    """Arrays whose first axis counts the sets."""

    def __init__(self, arrays, labels):
        self.matrix = choose(arrays, *ADJACENCY, *LINKS)
        self.matrices = arrays[self.matrix]
        count = self.matrices.shape[0]
        self.numbers = {}  # one for each set
        for name in [choose(arrays, *SIZES), *labels]:
            numbers = arrays[choose(arrays, name)][...]
            if numbers.shape != (count,):
                raise ValueError(f"{name} has shape {numbers.shape}; expected ({count},)")
            self.numbers[name] = numbers

        for name in COUNTS:
            if name in arrays:
                count = min(count, int(arrays[name][...].item()))
        self.names = [f"set {i}" for i in range(count)]
        # what is compressed together is read once: a chunk of the matrices, or all of an .npz file
        self.piece = getattr(self.matrices, "chunks", [max(1, count)])[0]
        self.first = None  # of the piece that was read last

    def __getitem__(self, i):
        first = i - i % self.piece
        if first != self.first:
            self.rows = self.matrices[first : first + self.piece]
            self.first = first
        values = {name: numbers[i] for name, numbers in self.numbers.items()}
        values[self.matrix] = self.rows[i - first]
        return values


@cache  # a worker opens each source once
def open_source(path, labels):
    """A zarr store or an .npz file. Raises ValueError with what is missing."""
    if path.suffix == ".npz":
        return Flat(np.load(path), labels)
    if not path.is_dir():
        raise ValueError("expected an .npz file, or a zarr store, which is a folder")
    groups = [folder for folder in path.iterdir() if re.fullmatch(r"cset_\d+", folder.name)]
    if groups:
        return Grouped(groups, labels)
    arrays = zarr_arrays(path)
    within = [folder for folder in path.iterdir() if folder.is_dir()]
    if not arrays and len(within) == 1:  # all arrays in one group
        arrays = zarr_arrays(within[0])
    return Flat(arrays, labels)


def read_piece(labels, piece):
    """(a worker) The sets of a piece, (path, its first set): [(path, name of the set, what
    describe_set returns)], and [what is wrong with the others]."""
    path, first = piece
    source = open_source(path, labels)
    sets = []
    problems = []
    for i, set_name in enumerate(source.names[first : first + source.piece], start=first):
        try:
            values = source[i]
            numbers = [label_of(values[label], label) for label in labels]
            sets.append((path, set_name, describe_set(order_of(values), numbers)))
        except Exception as error:  # zarr and its decoders raise many kinds
            problems.append(f"{path}: {set_name}: {one_line(error)}")
    return sets, problems


def one_line(error):
    return " ".join(str(error).split()) or type(error).__name__


def read_sources(args, labels):
    """The sets of all args.sources: [(path, name of the set, what describe_set returns)], and
    [what is wrong with the others]. Ends the program if there are others, unless they may be left
    out (args.skip_bad_data), or if there are no sets."""
    labels = tuple(labels)
    pieces = []
    problems = []
    for path in args.sources:
        try:
            source = open_source(path, labels)
        except ImportError:
            stop(2, f"{path}: pip install zarr, which reads such stores")
        except Exception as error:  # as in read_piece
            problems.append(f"{path}: {one_line(error)}")
            continue
        for first in range(0, len(source.names), source.piece):
            pieces.append((path, first))
    if problems:
        stop(2, "\n  ".join(problems))

    # zarr has threads, and a fork would copy their locks: so the workers start afresh
    read = partial(read_piece, labels)
    sets = []
    for found, wrong in in_workers(read, pieces, args.workers, "spawn", " pieces"):
        sets += found
        problems += wrong

    if problems and not args.skip_bad_data:
        lines = problems[:20]
        if len(problems) > 20:
            lines.append(f"... and {len(problems) - 20} more")
        counts = f"{len(problems)} of {len(sets) + len(problems)} sets cannot be read"
        stop(2, "\n  ".join([f"{counts} (--skip_bad_data leaves them out):", *lines]))
    if not sets:
        stop(2, f"no sets that can be read in {', '.join(map(str, args.sources))}")
    return sets, problems


# ---- Folder ----------------------------------------------------------------------------------


def number_classes(sets, names):
    """{label: [its values, in rising order, as text]}. In the sets the numbers of these classes
    take the place of the values."""
    labels = join(sets, "labels")
    classes = {}
    for column, name in enumerate(names):
        known = labels[:, column] >= 0
        values, numbers = np.unique(labels[known, column], return_inverse=True)
        labels[known, column] = numbers
        classes[name] = [str(value) for value in values]
    for i, arrays in enumerate(sets):
        arrays["labels"] = labels[i : i + 1]
    return classes


def main():
    args = parse_args()
    found, problems = read_sources(args, args.labels)
    sets = [arrays for _, _, arrays in found]
    print(f"{len(sets)} sets are read, {len(problems)} left out")
    split = split_sets(len(sets), args.split, args.split_seed)
    classes = number_classes(sets, args.labels)
    for name, values in classes.items():
        if len(values) < 2:
            found = ", ".join(values) or "none"
            stop(2, f"--labels {name}: expected 2 values or more from 0 on, found {found}")
        column = join(sets, "labels")[:, args.labels.index(name)]
        counts = np.bincount(column[column >= 0])
        pairs = zip(values, counts, strict=True)
        print(f"{name}: {', '.join(f'{value} ({count} sets)' for value, count in pairs)}")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "skipped.txt").write_text("".join(f"{problem}\n" for problem in problems))
    write_folder(args.out, sets, classes, split, vars(args))


if __name__ == "__main__":
    run(main)
