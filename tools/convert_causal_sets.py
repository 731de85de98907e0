"""Convert causal sets of the QuantumGrav project into a folder for run_train_quantumgrav_ddp.py.

    python tools/convert_causal_sets.py runs/*.zarr --labels manifold_like cset_type --out data/mine
    python run_train_quantumgrav_ddp.py --data data/mine --tasks manifold_like cset_type

What it reads (G sets; zarr format 2 or 3, with a root group or without; pip install zarr):
    grouped   STORE.zarr with a group cset_1, cset_2, ... for each set, as QuantumGrav.jl writes
              them: adj or linkmat (n, n), or both, and one number for each label
    flat      STORE.zarr or FILE.npz: adjacency_matrix or link_matrix (G, N, N), padded with zeros;
              atomcount or cset_size (G,), the elements of each set; each label (G,)
    ragged    FILE.npz: node_ptr (G + 1,), edge_ptr (G + 1,), edge_index (2, E), each label (G,) as
              y_LABEL. Set i has node_ptr[i + 1] - node_ptr[i] elements, numbered from 0, and the
              pairs (earlier, later) edge_ptr[i] to edge_ptr[i + 1] - 1 of edge_index

An adjacency matrix has all related pairs; a link matrix those with nothing between them, from which
the others follow. Elements are sorted in time, so that a matrix has entries in one triangle only:
the upper one, or the lower one, as arrays of Julia arrive transposed. A label is a whole number;
below 0: none.

Nothing is guessed. Damaged sets are listed by store and number, and nothing is written, unless
--skip_bad_data leaves them out (skipped.txt then lists them). The format of the
folder: tools/make_causal_sets.py.
"""

import contextlib
import functools
import json
import multiprocessing
import os
import re
import tempfile
import zipfile
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"  # the matrices are small; we use processes instead

import numpy as np
from make_causal_sets import (
    HelpFormatter,
    Parser,
    closure,
    describe_set,
    join,
    links,
    report,
    split_sets,
    start_worker,
    stop,
    write_folder,
)
from tqdm import tqdm

ADJACENCY = ["adj", "adjacency_matrix"]
LINKS = ["linkmat", "link_matrix"]
SIZES = ["atomcount", "cset_size"]
COUNTS = ["num_samples", "num_causal_sets"]  # of a flat store that has room for more sets
RAGGED = ["node_ptr", "edge_ptr", "edge_index"]
PIECE = 100  # sets that a worker reads at a time


def parse_args(words=None):
    parser = Parser(description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    split = [0.75, 0.1, 0.15]
    add("sources", nargs="+", type=Path, metavar="SOURCE", help="stores (.zarr) and files (.npz)")
    add("--out", type=Path, required=True, help="folder to write")
    add("--labels", nargs="+", required=True, metavar="NAME", help="labels to keep")
    add("--graph", default="links", choices=["links", "order"], help="edges: links or all pairs")
    add("--split", nargs=3, type=float, default=split, metavar="SHARE", help="train, valid, test")
    add("--split_seed", type=int, default=0, help="of the split")
    add("--skip_bad_data", action="store_true", help="leave out what is damaged, and list it")
    add("--workers", type=int, default=os.cpu_count(), help="processes")
    args = parser.parse_args(words)
    if not (min(args.split) > 0 and abs(sum(args.split) - 1) < 1e-6):
        parser.error(f"--split {args.split}: expected three shares above 0 with the sum 1")
    if args.workers < 1 or args.split_seed < 0:
        parser.error("--workers: expected 1 or more; --split_seed: 0 or more")
    if (args.out / "meta.json").exists():
        parser.error(f"{args.out} holds a data set: give another --out, or remove that folder")
    return args


# ---- Orders ----------------------------------------------------------------------------------


def first_of(names, found):
    """The first of these names that is in `found`, or None."""
    for name in names:
        if name in found:
            return name
    return None


def sorted_in_time(matrix, name):
    """A matrix (n, n) as booleans in the upper triangle. Raises ValueError with what is wrong."""
    if matrix.ndim != 2 or len(matrix) != matrix.shape[1] or not 2 <= len(matrix) <= 32767:
        raise ValueError(f"{name} of shape {matrix.shape}; expected (n, n), n from 2 to 32767")
    if not np.isin(matrix, (0, 1)).all():
        raise ValueError(f"{name} has other entries than 0 and 1")
    matrix = matrix.astype(bool)
    if name != "edges" and not np.triu(matrix).any():
        matrix = matrix.T
    if np.tril(matrix).any():
        circular = np.flatnonzero(np.diag(closure(matrix)))
        if len(circular) > 0:
            raise ValueError(f"{name} has a cycle: element {circular[0]} is before itself")
        raise ValueError(f"{name} has pairs in both triangles; expected elements sorted in time")
    return matrix


def order_of(values):
    """The order (n, n) bool of a set, from its arrays {name: array}. Raises ValueError."""
    matrices = {}
    for name in [*ADJACENCY, *LINKS, "edges"]:
        if name in values:
            matrices[name] = np.asarray(values[name])
    sizes = {int(np.asarray(values[name]).item()) for name in SIZES if name in values}
    if len(sizes) > 1:
        raise ValueError(f"two sizes, {sizes}")
    for n in sizes:
        for name, matrix in matrices.items():
            if not 2 <= n <= len(matrix):
                raise ValueError(f"{n} elements in {name} of shape {matrix.shape}")
            if matrix[n:].any() or matrix[:, n:].any():
                raise ValueError(f"{name} has pairs beyond its {n} elements")
            matrices[name] = matrix[:n, :n]

    matrices = {name: sorted_in_time(matrix, name) for name, matrix in matrices.items()}
    for name, matrix in matrices.items():
        if name != "edges" and not matrix.any():
            raise ValueError(f"{name} has no pairs at all (a missing chunk of a store reads so)")
    whole = first_of(ADJACENCY, matrices)
    link = first_of(LINKS, matrices)
    order = closure(matrices[whole or link or "edges"])
    if whole and not np.array_equal(order, matrices[whole]):
        raise ValueError(f"{whole} is not transitive; expected all related pairs")
    if link and not np.array_equal(links(order), matrices[link]):
        raise ValueError(f"{link} is not made of the pairs with nothing between them")
    return order


def label_of(value, name):
    """A label as an int, -1 for none. Raises ValueError."""
    number = np.asarray(value).item()
    if not isinstance(number, (bool, int, float)) or number != number // 1:
        raise ValueError(f"{name} is {number}; expected a whole number")
    return max(int(number), -1)


# ---- Arrays ----------------------------------------------------------------------------------


def zarr_arrays(folder):
    """{name: array} of those directly in a folder of a zarr store. We look at the folders
    themselves, since in some stores the groups have no file that says so."""
    import zarr

    arrays = {}
    for path in sorted(folder.iterdir()):
        is_array = (path / ".zarray").exists()  # zarr format 2
        if (path / "zarr.json").exists():  # format 3
            is_array = json.loads((path / "zarr.json").read_text())["node_type"] == "array"
        if is_array:
            arrays[path.name] = zarr.open_array(path, mode="r")
    return arrays


class Rows:
    """The rows of an array. A store is compressed chunk by chunk: the last chunk is kept."""

    def __init__(self, array):
        self.array = array
        self.step = getattr(array, "chunks", [1])[0]
        self.first = None

    def __getitem__(self, i):
        first = i - i % self.step
        if first != self.first:
            self.chunk = np.asarray(self.array[first : first + self.step])
            self.first = first
        return self.chunk[i - first]


# ---- Sources: the arrays of each set, by its number ------------------------------------------


def expect(found, what, *choices):
    """Raises ValueError unless one name of each of the choices is among those found."""
    for names in choices:
        if first_of(names, found) is None:
            raise ValueError(f"has {', '.join(sorted(found)) or 'nothing'}; expected {what}")


class Grouped:
    def __init__(self, groups, labels):
        self.groups = sorted(groups, key=lambda path: int(path.name.removeprefix("cset_")))
        self.labels = labels
        self.count = len(groups)

    def name(self, i):
        return self.groups[i].name

    def __getitem__(self, i):
        arrays = zarr_arrays(self.groups[i])
        what = ", ".join(["adj or linkmat", *self.labels])
        expect(arrays, what, ADJACENCY + LINKS, *[[name] for name in self.labels])
        wanted = [*ADJACENCY, *LINKS, *SIZES, *self.labels]
        return {name: arrays[name][...] for name in arrays if name in wanted}


class Flat:
    def __init__(self, arrays, labels):
        what = ", ".join(["adjacency_matrix or link_matrix", "atomcount or cset_size", *labels])
        expect(arrays, what, ADJACENCY + LINKS, SIZES, *[[name] for name in labels])
        wanted = [*ADJACENCY, *LINKS, *SIZES, *labels]
        self.rows = {name: Rows(arrays[name]) for name in arrays if name in wanted}
        shapes = {name: arrays[name].shape for name in self.rows}
        self.count = shapes[first_of(SIZES, arrays)][0]
        if {shape[:1] for shape in shapes.values()} != {(self.count,)}:
            raise ValueError(f"arrays of different lengths: {shapes}")
        stated = first_of(COUNTS, arrays)
        if stated:
            self.count = min(self.count, int(np.asarray(arrays[stated][...]).item()))

    def name(self, i):
        return f"set {i}"

    def __getitem__(self, i):
        return {name: rows[i] for name, rows in self.rows.items()}


class Ragged:
    def __init__(self, arrays, labels):
        self.labels = {name: f"y_{name}" for name in labels}
        what = ", ".join([*RAGGED, *self.labels.values()])
        expect(arrays, what, *[[name] for name in [*RAGGED, *self.labels.values()]])
        self.arrays = arrays
        self.count = len(arrays["node_ptr"]) - 1
        for name in ("node_ptr", "edge_ptr"):
            ptr = arrays[name]
            if len(ptr) != self.count + 1 or ptr[0] != 0 or (np.diff(ptr) < 0).any():
                text = f"expected {self.count + 1} numbers from 0 on that never fall"
                raise ValueError(f"{name}: {text}")
        shapes = {name: (self.count,) for name in self.labels.values()}
        shapes["edge_index"] = (2, int(arrays["edge_ptr"][-1]))
        for name, shape in shapes.items():
            if arrays[name].shape != shape:
                raise ValueError(f"{name} has shape {arrays[name].shape}; expected {shape}")

    def name(self, i):
        return f"set {i}"

    def __getitem__(self, i):
        n = int(self.arrays["node_ptr"][i + 1] - self.arrays["node_ptr"][i])
        pairs = slice(self.arrays["edge_ptr"][i], self.arrays["edge_ptr"][i + 1])
        earlier, later = self.arrays["edge_index"][:, pairs]
        edges = np.zeros((n, n), bool)
        if len(earlier) > 0:
            numbers = np.concatenate([earlier, later])
            if numbers.min() < 0 or numbers.max() >= n:
                raise ValueError(f"edge_index outside 0 to {n - 1}, the elements of the set")
            edges[earlier, later] = True
        values = {name: self.arrays[key][i] for name, key in self.labels.items()}
        return {"edges": edges, **values}


@functools.cache  # a worker opens each source once
def open_source(folder, labels):
    """The source in a folder: a zarr store, or an .npz file that was unpacked. Raises ValueError
    with what is missing."""
    groups = [path for path in folder.iterdir() if re.fullmatch(r"cset_\d+", path.name)]
    if groups:
        return Grouped(groups, labels)
    unpacked = {path.stem: np.load(path, mmap_mode="r") for path in folder.glob("*.npy")}
    if "edge_index" in unpacked:
        return Ragged(unpacked, labels)
    if unpacked:
        return Flat(unpacked, labels)
    arrays = zarr_arrays(folder)
    within = [path for path in folder.iterdir() if path.is_dir()]
    if not arrays and len(within) == 1:  # all arrays in one group
        arrays = zarr_arrays(within[0])
    return Flat(arrays, labels)


def read_piece(folder, labels, graph, first, last):
    """(a worker) The sets from number `first` to `last` - 1: [(name of the set, what describe_set
    returns)], and [(name, what is wrong)] of the others."""
    source = open_source(folder, labels)
    sets = []
    problems = []
    for i in range(first, last):
        try:
            values = source[i]
            found = [label_of(values[name], name) for name in labels]
            sets.append((source.name(i), describe_set(order_of(values), found, graph)))
        except Exception as error:  # zarr and its decoders raise many kinds
            reason = " ".join(str(error).split()) or type(error).__name__
            problems.append((source.name(i), reason))
    return sets, problems


def unpack(path, folder):
    """The folder of a source: itself, or, of an .npz file, where its arrays are unpacked."""
    if path.is_dir():
        return path
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder)
    return folder


def open_all(paths, labels, scratch):
    """[(path, folder, number of sets)] of these stores and files; .npz files are unpacked into
    `scratch`. Ends the program with all that is wrong."""
    opened = []
    problems = []
    for number, path in enumerate(paths):
        try:
            folder = unpack(path, scratch / str(number))
            opened.append((path, folder, open_source(folder, labels).count))
        except ImportError:
            stop(2, f"{path}: pip install zarr, which reads such stores")
        except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
            problems.append(f"{path}: {' '.join(str(error).split())}")
    if problems:
        stop(2, list_of(problems))
    return opened


def read_sources(paths, labels, graph, skip_bad_data, workers):
    """All sets of these stores and files: [(path, name of the set, what describe_set returns)], and
    [what is wrong with the others]. Ends the program if there are others, unless they may be left
    out."""
    labels = tuple(labels)
    sets = []
    problems = []
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        opened = open_all(paths, labels, scratch)
        total = sum(count for _, _, count in opened)
        bar = stack.enter_context(tqdm(total=total, unit=" sets", disable=None))
        # zarr has threads, and a fork would copy their locks: so the workers start afresh
        spawn = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(workers, spawn, start_worker, [os.getpid()])
        stack.callback(pool.shutdown, cancel_futures=True)

        jobs = []
        for path, folder, count in opened:
            for first in range(0, count, PIECE):
                last = min(first + PIECE, count)
                jobs.append((path, pool.submit(read_piece, folder, labels, graph, first, last)))
        for path, job in jobs:
            found, wrong = job.result()
            sets += [(path, name, arrays) for name, arrays in found]
            problems += [f"{path}: {name}: {reason}" for name, reason in wrong]
            bar.update(len(found) + len(wrong))

    if problems and not (skip_bad_data and sets):
        hint = " (--skip_bad_data leaves them out)" if sets else ""
        text = f"{len(problems)} of {total} sets cannot be read{hint}"
        stop(2, f"{text}:\n  {list_of(problems)}")
    if not sets:
        stop(2, f"no sets in {', '.join(map(str, paths))}")
    return sets, problems


def list_of(problems):
    """The first 20 of them, one in a line, and how many more there are."""
    lines = problems[:20]
    if len(problems) > 20:
        lines.append(f"... and {len(problems) - 20} more")
    return "\n  ".join(lines)


# ---- Folder ----------------------------------------------------------------------------------


def as_classes(sets, labels):
    """{label: [names]}. The labels of the sets become numbers of these classes, the values that
    occur, in rising order."""
    found = join(sets, "labels")
    classes = {}
    for column, name in enumerate(labels):
        values = np.unique(found[found[:, column] >= 0, column])
        if len(values) < 2:
            stop(2, f"--labels {name}: {len(values)} different values; expected 2 or more")
        classes[name] = [str(value) for value in values]
        for arrays in sets:
            label = arrays["labels"][0, column]
            if label >= 0:
                arrays["labels"][0, column] = np.searchsorted(values, label)
    return classes


def convert(args):
    found, problems = read_sources(
        args.sources, args.labels, args.graph, args.skip_bad_data, args.workers
    )
    sets = [arrays for _, _, arrays in found]
    if min(args.split) * len(sets) < 1:
        stop(2, f"{len(sets)} sets: too few for each part of --split {args.split}")
    classes = as_classes(sets, args.labels)
    split = split_sets(len(sets), args.split, args.split_seed)
    options = vars(args) | {"sources": [str(path) for path in args.sources], "out": str(args.out)}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "skipped.txt").write_text("".join(f"{problem}\n" for problem in problems))
    write_folder(args.out, sets, classes, split, options)
    print(f"{args.out}: {len(sets)} sets are written, {len(problems)} left out")


def main():
    args = parse_args()
    try:
        convert(args)
        report(args.out)
    except OSError as error:  # a full disk, no permission
        stop(1, f"{args.out} cannot be written: {error}")
    except BrokenProcessPool:
        stop(1, "a worker was killed (out of memory?)")
    except KeyboardInterrupt:
        stop(130, "stopped: remove --out if it is there, and start again")


if __name__ == "__main__":
    main()
