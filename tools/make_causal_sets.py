"""Make a data set of causal sets for run_train_quantumgrav_ddp.py, and measure its baselines.

    python tools/make_causal_sets.py                                   12,000 sets: the quickstart
    python tools/make_causal_sets.py --samples 100000 --min_size 64 --max_size 128 --out data/large

Kinds, in turn: sprinklings into Minkowski space (mink2, mink3, mink4: the dimension), transitive
percolation with the same share of related pairs, layered and Kleitman-Rothschild orders (kr), and
sprinklings with some pairs flipped (destroyed). Set number i depends on (--seed, i) alone, so the
number of workers changes the speed only. After a kill the same command goes on.

Writes a folder of arrays that can be mapped into memory; G sets, N elements, E edges in all:
    node_ptr (G + 1,) int64    set i has the elements node_ptr[i] to node_ptr[i + 1] - 1
    edge_ptr (G + 1,) int64    and the edges edge_ptr[i] to edge_ptr[i + 1] - 1
    features (N, 6) float32    in_degree and out_degree (of links), past_height and future_height
                               (longest chains), past_size and future_size (of the order)
    past (E,) int16            for each element in turn, the earlier elements that it has an edge
                               from, numbered within their set, ascending
    past_degree (N,) int16     how many those are
    future (E,) int16          for each element in turn, the later elements that it has an edge to
    future_degree (N,) int16   how many those are
    labels (G, 3) int64        cls, dim, manifold; -1 where there is none
    statistics (G, 7) float64  elements, related pairs, links, minimal and maximal elements,
                               longest chain, chains of 3
    split (G,) uint8           0 train, 1 valid, 2 test; from --split_seed alone
    baselines.json             test accuracy of what needs no network, for each task
    meta.json                  options, names of classes and features, checksums; written last
The edges are kept twice. A network multiplies by the matrix of edges, and its gradient by the
transpose: with both lists at hand, neither is sorted anew in each step of training.

Baselines. majority: the commonest class. Myrheim-Meyer: the dimension whose sprinklings have this
share of related pairs (Meyer 1988). logistic regression: on the logarithms of the statistics.
"""

import argparse
import contextlib
import hashlib
import json
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"  # the matrices are small; we use processes instead

import numpy as np
from tqdm import tqdm

KINDS = "mink2 mink3 mink4 percolation layered kr destroyed".split()
SPRINKLINGS = {"mink2": 2, "mink3": 3, "mink4": 4}  # their dimensions
FEATURES = "in_degree out_degree past_height future_height past_size future_size".split()
ARRAYS = "features past past_degree future future_degree labels statistics".split()
SET_OPTIONS = "kinds samples min_size max_size destroyed_share graph seed".split()
SPLIT_OPTIONS = ["split", "split_seed"]
OUT = Path("data/causal_sets")
CHUNK = 500  # sets in a part: what a kill can lose of each worker


def stop(status, message):
    """End the program with one line."""
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    sys.exit(status)


class Parser(argparse.ArgumentParser):
    def error(self, message):
        stop(2, message)  # one line, without the usage


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the docstring as it is, and every default."""


def parse_args(words=None):
    parser = Parser(description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    kinds = [kind for kind in KINDS if kind != "kr"]
    split = [0.75, 0.1, 0.15]
    add("--out", type=Path, default=OUT, help="folder to write")
    add("--samples", type=int, default=12_000, help="sets")
    add("--kinds", nargs="+", default=kinds, choices=KINDS, help="of sets, in turn")
    add("--min_size", type=int, default=32, help="elements of a set at least")
    add("--max_size", type=int, default=64, help="elements of a set at most")
    add("--destroyed_share", type=float, default=0.02, help="share of the pairs that is flipped")
    add("--graph", default="links", choices=["links", "order"], help="edges: links or all pairs")
    add("--split", nargs=3, type=float, default=split, metavar="SHARE", help="train, valid, test")
    add("--seed", type=int, default=0, help="of the sets")
    add("--split_seed", type=int, default=0, help="of the split")
    add("--workers", type=int, default=os.cpu_count(), help="processes")
    args = parser.parse_args(words)

    if len(set(args.kinds)) < len(args.kinds):
        parser.error(f"--kinds {' '.join(args.kinds)}: name each kind once")
    if not 2 <= args.min_size <= args.max_size <= 32767:  # elements are numbered in int16
        sizes = f"--min_size {args.min_size} --max_size {args.max_size}"
        parser.error(f"{sizes}: expected 2 <= min_size <= max_size <= 32767")
    if not 0 <= args.destroyed_share <= 1:
        parser.error(f"--destroyed_share {args.destroyed_share}: expected a share from 0 to 1")
    if not (min(args.split) > 0 and abs(sum(args.split) - 1) < 1e-6):
        parser.error(f"--split {args.split}: expected three shares above 0 with the sum 1")
    if min(args.split) * args.samples < 1:
        parser.error(f"--samples {args.samples}: too few for each part of --split {args.split}")
    for name, least in {"seed": 0, "split_seed": 0, "workers": 1}.items():
        if getattr(args, name) < least:
            parser.error(f"--{name} {getattr(args, name)}: expected {least} or more")
    return args


# ---- Orders: (n, n) bool, strictly upper triangular, [i, j]: i is in the past of j -----------


def closure(edges):
    """The transitive closure (n, n) bool of an acyclic graph."""
    while True:
        step = edges.astype(np.float32)  # numpy multiplies floats much faster than integers
        more = edges | (step @ step > 0.5)
        if np.array_equal(more, edges):
            return edges
        edges = more


def links(order):
    """The transitive reduction (n, n) bool of an order: pairs with nothing between them."""
    step = order.astype(np.float32)  # counts below 2^24 are exact
    return order & (step @ step < 0.5)


def heights(order):
    """(n,) elements of the longest chain that ends just before each one: proper time."""
    count = np.zeros(len(order), np.int64)
    after = np.ones(len(order), bool)
    while True:
        after = order[after].any(0)  # those with one more element before them
        if not after.any():
            return count
        count += after


def ordering_fraction(order):
    """Share of the pairs that are related."""
    return 2 * np.count_nonzero(order) / (len(order) * (len(order) - 1))


def sprinkle(rng, n, dim):
    """The order of n uniform points of a causal diamond in `dim`-dimensional Minkowski space.

    The diamond has height 2. At time t it is a ball of radius 1 - |t|, so that its volume beyond
    radius r is proportional to r^dim, and 1 - |t| is distributed as U^(1/dim).
    """
    radius = rng.random(n) ** (1 / dim)
    time = (1 - radius) * rng.choice([-1.0, 1.0], n)
    place = rng.standard_normal((n, dim - 1))
    place /= np.linalg.norm(place, axis=1)[:, None]
    place *= (radius * rng.random(n) ** (1 / (dim - 1)))[:, None]

    by_time = time.argsort()
    time = time[by_time]
    place = place[by_time]
    distance2 = ((place[:, None] - place) ** 2).sum(-1)
    return np.triu((time[:, None] - time) ** 2 > distance2, 1)


def percolate(rng, n, fraction):
    """Transitive percolation with this ordering fraction, as nearly as these draws permit.

    Its order is the closure of the pairs whose uniform draw is at most p. The ordering fraction
    never falls with p, so that we find p by bisection. Only the draws themselves need be tried.
    """
    pairs = np.triu_indices(n, 1)
    draws = np.full((n, n), 2.0)  # never drawn
    draws[pairs] = rng.random(len(pairs[0]))
    trials = np.append(-1.0, np.sort(draws[pairs]))  # at -1 no pair is drawn
    low = 0
    high = len(trials) - 1
    best = None
    smallest = np.inf
    while low <= high:
        middle = (low + high) // 2
        order = closure(draws <= trials[middle])
        excess = ordering_fraction(order) - fraction
        if abs(excess) < smallest:  # the last trial need not be the closest
            smallest = abs(excess)
            best = order
        if excess < 0:
            low = middle + 1
        else:
            high = middle - 1
    return best


def layered(rng, layer, p):
    """Closure of random edges, with probability p, between neighbouring layers; layer (n,)."""
    n = len(layer)
    return closure((layer[None, :] - layer[:, None] == 1) & (rng.random((n, n)) < p))


def make_order(kind, rng, n, destroyed_share):
    """(n, n) bool: a random order of this kind."""
    if kind == "layered":
        layer = np.sort(rng.integers(rng.integers(3, 9), size=n))
        return layered(rng, layer, rng.uniform(0.2, 0.8))
    if kind == "kr":  # nearly all large orders look like this (Kleitman and Rothschild 1975)
        layer = np.repeat([0, 1, 2], [n // 4, n - 2 * (n // 4), n // 4])
        return layered(rng, layer, 0.5)

    if kind in SPRINKLINGS:
        return sprinkle(rng, n, SPRINKLINGS[kind])
    order = sprinkle(rng, n, int(rng.integers(2, 5)))
    if kind == "percolation":  # counting pairs does not tell it from a sprinkling
        return percolate(rng, n, ordering_fraction(order))

    rows, columns = np.triu_indices(n, 1)  # destroyed
    flipped = rng.choice(len(rows), round(destroyed_share * len(rows)), replace=False)
    order[rows[flipped], columns[flipped]] ^= True
    return closure(order)


# ---- Sets ------------------------------------------------------------------------------------


def describe_set(order, labels, graph):
    """What is kept of a set, {name: array}, from its order (n, n) bool, triangular, n <= 32767.

    The first axis of each array counts sets (one here), elements or edges, so that sets are joined
    by putting arrays of the same name one after the other. labels: a class for each task, or -1.
    """
    link = links(order)
    edges = link if graph == "links" else order
    past_height = heights(order)
    future_height = heights(order.T)  # the past of the order turned round
    past_size = order.sum(0)
    future_size = order.sum(1)
    features = [link.sum(0), link.sum(1), past_height, future_height, past_size, future_size]
    statistics = [
        len(order),
        order.sum(),  # related pairs
        link.sum(),
        (past_size == 0).sum(),  # minimal elements
        (future_size == 0).sum(),  # maximal elements
        past_height.max() + 1,  # elements of the longest chain
        (past_size * future_size).sum(),  # chains of 3, counted by the one in the middle
    ]
    return {
        "node_count": np.array([len(order)]),
        "edge_count": np.array([edges.sum()]),
        "features": np.stack(features, axis=1).astype(np.float32),
        "past": np.nonzero(edges.T)[1].astype(np.int16),
        "past_degree": edges.sum(0).astype(np.int16),
        "future": np.nonzero(edges)[1].astype(np.int16),
        "future_degree": edges.sum(1).astype(np.int16),
        "labels": np.array([labels], np.int64),
        "statistics": np.array([statistics], np.float64),
    }


def make_set(args, i):
    """Set number i, as describe_set returns it."""
    cls = i % len(args.kinds)
    kind = args.kinds[cls]
    rng = np.random.default_rng([args.seed, i])
    n = int(rng.integers(args.min_size, args.max_size + 1))
    order = make_order(kind, rng, n, args.destroyed_share)
    labels = [cls, -1, 0]
    if kind in SPRINKLINGS:
        labels = [cls, list(SPRINKLINGS).index(kind), 1]
    return describe_set(order, labels, args.graph)


def join(sets, name):
    """The array of this name of all sets."""
    return np.concatenate([arrays[name] for arrays in sets])


def split_sets(samples, shares, seed):
    """(samples,) uint8: 0 train, 1 valid, 2 test, in exactly these shares, rounded."""
    train_end, valid_end = np.floor(np.cumsum(shares[:2]) * samples + 0.5).astype(int)
    order = np.random.default_rng(seed).permutation(samples)
    split = np.zeros(samples, np.uint8)
    split[order[train_end:valid_end]] = 1
    split[order[valid_end:]] = 2
    return split


# ---- Parts: finished chunks of sets, which a kill cannot take away ---------------------------


@contextlib.contextmanager
def whole_file(path):
    """A binary file to write that gets its name when all is written, on the disk too."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path, content):
    with whole_file(path) as file:
        file.write(json.dumps(content, indent=1).encode())


def make_part(args, path, start):
    """(a worker) Make CHUNK sets from number `start` on, and write them to `path`."""
    sets = [make_set(args, i) for i in range(start, min(start + CHUNK, args.samples))]
    with whole_file(path) as file:
        np.savez(file, **{name: join(sets, name) for name in sets[0]})


def end_with_parent(parent):
    """(a thread of a worker) A program that is killed cannot end its workers: they see to it."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


def start_worker(parent):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the program decides
    threading.Thread(target=end_with_parent, args=[parent], daemon=True).start()


def make_parts(args, parts):
    """Make the parts that are not there yet. Returns all: a list of {name: array of its sets}."""
    paths = {start: parts / f"sets_{start:09d}.npz" for start in range(0, args.samples, CHUNK)}
    missing = [start for start, path in paths.items() if not path.exists()]
    if len(missing) < len(paths):
        print(f"{len(paths) - len(missing)} of {len(paths)} parts are there already", flush=True)

    fork = multiprocessing.get_context("fork")  # the workers need not import numpy again
    workers = ProcessPoolExecutor(args.workers, fork, start_worker, [os.getpid()])
    try:
        jobs = [workers.submit(make_part, args, paths[start], start) for start in missing]
        for job in tqdm(jobs, unit=f" x {CHUNK} sets", disable=None):  # None: on a terminal only
            job.result()
    finally:
        workers.shutdown(cancel_futures=True)  # what has begun is finished

    sets = []
    for path in paths.values():
        with np.load(path) as file:
            sets.append(dict(file))
    return sets


def remove_parts(parts):
    """Remove what this program wrote into `parts`, and the folder if nothing else is in it."""
    for path in parts.glob("sets_*"):
        path.unlink()
    (parts / "options.json").unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        parts.rmdir()


# ---- Baselines -------------------------------------------------------------------------------


def myrheim_meyer(fraction):
    """The dimension d from 1 to 12 whose sprinklings have this share of related pairs.

    It is Gamma(d + 1) Gamma(d / 2) / (2 Gamma(3 d / 2)), which falls with d.
    """
    low = 1.0
    high = 12.0
    for _ in range(50):
        d = (low + high) / 2
        expected = math.lgamma(d + 1) + math.lgamma(d / 2) - math.lgamma(1.5 * d)
        if math.exp(expected) / 2 > fraction:
            low = d
        else:
            high = d
    return low


def myrheim_meyer_classes(statistics, names):
    """(G,) the class whose name, such as "3", is nearest to the dimension found."""
    elements = statistics[:, 0]
    fractions = 2 * statistics[:, 1] / (elements * (elements - 1))
    found = np.array([myrheim_meyer(fraction) for fraction in fractions])
    dimensions = np.array(names, np.float64)
    return np.abs(found[:, None] - dimensions).argmin(1)


def logistic_regression(statistics, labels, test_statistics):
    """Classes of the test sets."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    classifier = LogisticRegression(C=100, max_iter=2000)  # the default penalty costs accuracy
    model = make_pipeline(StandardScaler(), classifier)
    model.fit(np.log1p(statistics), labels)
    return model.predict(np.log1p(test_statistics))


def measure_baselines(labels, statistics, split, classes):
    """{task: {baseline: accuracy on the test sets}}; {} for a task without labels."""
    baselines = {}
    for column, (task, names) in enumerate(classes.items()):
        known = labels[:, column] >= 0
        train = known & (split == 0)
        test = known & (split == 2)
        seen = labels[train, column]
        guesses = {}
        if train.any() and test.any():
            guesses["majority"] = np.bincount(seen).argmax()
            if task in ("dim", "dimension"):
                guesses["Myrheim-Meyer"] = myrheim_meyer_classes(statistics[test], names)
            if len(set(seen)) > 1:
                found = logistic_regression(statistics[train], seen, statistics[test])
                guesses["logistic regression"] = found

        baselines[task] = {}
        for name, guess in guesses.items():
            baselines[task][name] = float((labels[test, column] == guess).mean())
    return baselines


# ---- Folder ----------------------------------------------------------------------------------


def checksum(array):
    return hashlib.sha256(np.ascontiguousarray(array)).hexdigest()


def write_array(out, name, array):
    """Write one array of the folder and return its checksum."""
    with whole_file(out / f"{name}.npy") as file:
        np.save(file, array)
    return checksum(array)


def write_folder(out, sets, classes, split, options):
    """Write the whole folder.

    sets: a list of what describe_set returns, each of one or of several sets that were joined.
    classes: {task: [names]}, a task for each column of the labels. split (G,) uint8.
    options: of the program that made them, kept in meta.json.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / "meta.json").unlink(missing_ok=True)  # it says that all is there: it comes last
    for path in out.glob("*.npy.*.tmp"):  # of a program that was killed
        path.unlink()

    sums = {}
    for name in ("node", "edge"):
        pointer = np.concatenate([[0], np.cumsum(join(sets, f"{name}_count"))])
        sums[f"{name}_ptr"] = write_array(out, f"{name}_ptr", pointer)
    for name in ARRAYS:  # one after the other: only one of them is in memory twice
        sums[name] = write_array(out, name, join(sets, name))
    finish_folder(out, sums, classes, split, options)


def finish_folder(out, sums, classes, split, options):
    """Write what depends on the split, and meta.json last; sums: checksums of the other arrays."""
    labels = np.load(out / "labels.npy")
    statistics = np.load(out / "statistics.npy")
    baselines = measure_baselines(labels, statistics, split, classes)

    (out / "meta.json").unlink(missing_ok=True)
    write_json(out / "baselines.json", baselines)
    sums = {**sums, "split": write_array(out, "split", split)}
    meta = {"args": options, "classes": classes, "features": FEATURES, "sha256": sums}
    write_json(out / "meta.json", meta)


def check_options(out, found, expected):
    """What is in the folder was made with the same options."""
    for name, value in expected.items():
        if found.get(name) != value:
            made = f"{out} was made with --{name} {found.get(name, 'unknown')}, not {value}"
            stop(2, f"{made}: give another --out, or remove the folder")


def check_arrays(out, sums):
    """The arrays are what their checksums say."""
    for name, expected in sums.items():
        if checksum(np.load(out / f"{name}.npy", mmap_mode="r")) != expected:
            stop(2, f"{out}/{name}.npy is damaged: remove the folder and start again")


def make_folder(args):
    """Make the folder, or what is missing of it, and say what was done."""
    set_options = {name: getattr(args, name) for name in SET_OPTIONS}
    split_options = {name: getattr(args, name) for name in SPLIT_OPTIONS}
    options = {**set_options, **split_options}
    classes = {"cls": args.kinds, "dim": ["2", "3", "4"], "manifold": ["other", "sprinkling"]}
    split = split_sets(args.samples, args.split, args.split_seed)
    parts = args.out / "parts"

    if (args.out / "meta.json").exists():
        meta = json.loads((args.out / "meta.json").read_text())
        found = meta.get("args", {})
        check_options(args.out, found, set_options)
        check_arrays(args.out, meta["sha256"])
        if found == options:
            print(f"{args.out} is complete: nothing to do")
        else:
            finish_folder(args.out, meta["sha256"], classes, split, options)
            print(f"{args.out}: the sets are kept, and split anew")
    else:
        if (parts / "options.json").exists():
            found = json.loads((parts / "options.json").read_text())
            check_options(parts, found, set_options)
        else:
            parts.mkdir(parents=True, exist_ok=True)
            write_json(parts / "options.json", set_options)
        sets = make_parts(args, parts)
        write_folder(args.out, sets, classes, split, options)
        print(f"{args.out}: {args.samples} sets are written")

    remove_parts(parts)


def report(out):
    """Print what is in the folder, its baselines, and the command to run next."""
    edges = np.load(out / "edge_ptr.npy", mmap_mode="r")[-1]
    elements = np.load(out / "node_ptr.npy", mmap_mode="r")[-1]
    train, valid, test = np.bincount(np.load(out / "split.npy"), minlength=3)
    print(f"{elements} elements, {edges} edges; {train} sets to train, {valid} valid, {test} test")

    print("\ntask      baseline             accuracy on the test sets")
    for task, found in json.loads((out / "baselines.json").read_text()).items():
        for name, accuracy in found.items():
            print(f"{task:9} {name:20} {accuracy:.4f}")

    command = "torchrun --standalone --nproc_per_node=2 run_train_quantumgrav_ddp.py"
    command += " --config configs/config_quantumgrav_quickstart.yaml"
    if out != OUT:
        command += f" --data {out}"
    tasks = [*json.loads((out / "meta.json").read_text())["classes"]]
    if "cls" not in tasks:
        command += f" --tasks {' '.join(tasks)}"
    print(f"\nNext:\n{command}")


def main():
    args = parse_args()
    try:
        make_folder(args)
        report(args.out)

    except OSError as error:  # a full disk, no permission
        stop(1, f"{args.out} cannot be written: {error}")
    except BrokenProcessPool:
        stop(1, "a worker was killed (out of memory?); the same command goes on")
    except KeyboardInterrupt:
        stop(130, "stopped; the same command goes on")


if __name__ == "__main__":
    main()
