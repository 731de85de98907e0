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
With each edge in both lists, training sorts nothing: a gradient needs the transposed matrix, too.

Baselines. majority: the commonest class. Myrheim-Meyer: the dimension whose sprinklings have this
share of related pairs (Meyer 1988). logistic regression: on the logarithms of the statistics.
"""

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"  # the matrices are small; we use processes instead

import numpy as np
from tqdm import tqdm

KINDS = "mink2 mink3 mink4 percolation layered kr destroyed".split()
SPRINKLINGS = {"mink2": 2, "mink3": 3, "mink4": 4}  # their dimensions
DESTROYED_SHARE = 0.02  # of the pairs
FEATURES = "in_degree out_degree past_height future_height past_size future_size".split()
ARRAYS = "features past past_degree future future_degree labels statistics".split()
CHUNK = 500  # sets in a part: what a kill can lose of each worker


# ---- Options, errors and workers, also of other tools ----------------------------------------


def stop(status, message):
    """End the program with one line."""
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    sys.exit(status)


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the docstring as it is, and every default."""


class Parser(argparse.ArgumentParser):
    def __init__(self, description):
        super().__init__(description=description, formatter_class=HelpFormatter, allow_abbrev=False)

    def error(self, message):
        stop(2, message)  # one line, without the usage


def count(text):
    """The type of options that are whole numbers from 1 on."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return int(text)


def add_folder_options(add):
    split = [0.75, 0.1, 0.15]
    add("--split", nargs=3, type=float, default=split, metavar="SHARE", help="train, valid, test")
    add("--split_seed", type=int, default=0, help="of the split")
    add("--workers", type=count, default=os.cpu_count(), help="processes")


def check_split(split):
    if not (min(split) > 0 and abs(sum(split) - 1) < 1e-6):
        stop(2, f"--split {split}: expected three shares above 0 with the sum 1")


def parse_args(words=None):
    parser = Parser(__doc__)
    add = parser.add_argument
    kinds = [kind for kind in KINDS if kind != "kr"]
    add("--out", type=Path, default=Path("data/causal_sets"), help="folder to write")
    add("--samples", type=count, default=12_000, help="sets")
    add("--kinds", nargs="+", default=kinds, choices=KINDS, help="of sets, in turn")
    add("--min_size", type=int, default=32, help="elements of a set at least")
    add("--max_size", type=int, default=64, help="elements of a set at most")
    add("--seed", type=int, default=0, help="of the sets")
    add_folder_options(add)

    args = parser.parse_args(words)
    if not 2 <= args.min_size <= args.max_size <= 32767:  # elements are numbered in int16
        parser.error("expected 2 <= --min_size <= --max_size <= 32767")
    if args.seed < 0:
        parser.error(f"--seed {args.seed}: must not be below 0")
    check_split(args.split)
    return args


def run(main):
    """Call main(); what ends it from outside is one line."""
    try:
        main()
    except (OSError, BrokenProcessPool) as error:  # a full disk; a worker killed for its memory
        stop(1, error)
    except KeyboardInterrupt:
        stop(130, "stopped: the same command may be given again")


def start_worker():
    """Ctrl-C reaches the workers, too, but the program decides. When it ends, they end: a program
    that is killed cannot see to that."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def end_with_program():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=end_with_program, daemon=True).start()


def in_workers(function, items, workers, method, unit):
    """[function(item) of each item], by processes; on a terminal with a bar."""
    context = multiprocessing.get_context(method)
    with ProcessPoolExecutor(workers, context, start_worker) as pool:
        return list(tqdm(pool.map(function, items), total=len(items), unit=unit, disable=None))


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
    found = []  # the last trial need not be the closest
    while low <= high:
        middle = (low + high) // 2
        order = closure(draws <= trials[middle])
        excess = ordering_fraction(order) - fraction
        found.append((abs(excess), trials[middle]))
        if excess < 0:
            low = middle + 1
        else:
            high = middle - 1
    _, p = min(found, key=lambda trial: trial[0])
    return closure(draws <= p)


def layered(rng, layer, p):
    """Closure of random edges, with probability p, between neighbouring layers; layer (n,)."""
    n = len(layer)
    return closure((layer[None, :] - layer[:, None] == 1) & (rng.random((n, n)) < p))


def make_order(kind, rng, n):
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
    flipped = rng.choice(len(rows), round(DESTROYED_SHARE * len(rows)), replace=False)
    order[rows[flipped], columns[flipped]] ^= True
    return closure(order)


# ---- Sets ------------------------------------------------------------------------------------


def describe_set(order, labels):
    """What is kept of a set, {name: array}, from its order (n, n) bool, triangular, n <= 32767.

    The first axis of each array counts sets (one here), elements or edges, so that sets are joined
    by putting arrays of the same name one after the other. labels: a class for each task, or -1.
    """
    link = links(order)
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
        "edge_count": np.array([link.sum()]),
        "features": np.stack(features, axis=1).astype(np.float32),
        "past": np.nonzero(link.T)[1].astype(np.int16),
        "past_degree": link.sum(0).astype(np.int16),
        "future": np.nonzero(link)[1].astype(np.int16),
        "future_degree": link.sum(1).astype(np.int16),
        "labels": np.array([labels], np.int64),
        "statistics": np.array([statistics], np.float64),
    }


def make_set(args, i):
    """Set number i, as describe_set returns it."""
    cls = i % len(args.kinds)
    kind = args.kinds[cls]
    rng = np.random.default_rng([args.seed, i])
    n = int(rng.integers(args.min_size, args.max_size + 1))
    order = make_order(kind, rng, n)
    labels = [cls, -1, 0]
    if kind in SPRINKLINGS:
        labels = [cls, list(SPRINKLINGS).index(kind), 1]
    return describe_set(order, labels)


def join(sets, name):
    """The array of this name of all sets."""
    return np.concatenate([arrays[name] for arrays in sets])


def split_sets(samples, shares, seed):
    """(samples,) uint8: 0 train, 1 valid, 2 test, in exactly these shares, rounded."""
    if min(shares) * samples < 1:
        stop(2, f"{samples} sets are too few for each part of --split {shares}")
    ends = np.floor(np.cumsum(shares[:2]) * samples + 0.5).astype(int)
    _, valid, test = np.split(np.random.default_rng(seed).permutation(samples), ends)
    split = np.zeros(samples, np.uint8)
    split[valid] = 1
    split[test] = 2
    return split


# ---- Parts: finished chunks of sets, which a kill cannot take away ---------------------------


def make_part(args, parts, start):
    """(a worker) Make CHUNK sets from number `start` on, if that was not done before."""
    path = parts / f"{start}.npz"
    if path.exists():
        return
    sets = [make_set(args, i) for i in range(start, min(start + CHUNK, args.samples))]
    unfinished = path.with_suffix(".tmp")
    with open(unfinished, "wb") as file:
        np.savez(file, **{name: join(sets, name) for name in sets[0]})
    unfinished.rename(path)


def make_parts(args, parts):
    """Make the parts that are not there yet. Returns all: a list of {name: array of its sets}."""
    parts.mkdir(parents=True, exist_ok=True)
    starts = range(0, args.samples, CHUNK)
    # fork: the workers need not import numpy again
    in_workers(partial(make_part, args, parts), starts, args.workers, "fork", f" x {CHUNK} sets")
    return [dict(np.load(parts / f"{start}.npz")) for start in starts]


# ---- Baselines -------------------------------------------------------------------------------


def myrheim_meyer(fractions):
    """The dimensions from 1 to 12 whose sprinklings have these shares of related pairs."""
    dimensions = np.linspace(1, 12, 11_001)
    expected = []  # they fall as the dimension rises
    for d in dimensions:
        expected.append(math.gamma(d + 1) * math.gamma(d / 2) / (2 * math.gamma(1.5 * d)))
    return np.interp(-np.asarray(fractions), -np.array(expected), dimensions)


def measure_baselines(labels, statistics, split, classes):
    """{task: {baseline: accuracy on the test sets}}; {} where there is nothing to tell apart."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    baselines = {}
    for column, (task, names) in enumerate(classes.items()):
        baselines[task] = {}
        known = labels[:, column] >= 0
        train = known & (split == 0)
        test = known & (split == 2)
        seen = labels[train, column]
        if len(set(seen)) < 2 or not test.any():
            continue

        guesses = {"majority": np.bincount(seen).argmax()}
        if task in ("dim", "dimension"):
            elements = statistics[test, 0]
            found = myrheim_meyer(2 * statistics[test, 1] / (elements * (elements - 1)))
            distances = np.abs(found[:, None] - np.array(names, float))  # a name such as "3"
            guesses["Myrheim-Meyer"] = distances.argmin(1)
        classifier = LogisticRegression(C=100, max_iter=2000)  # the default penalty costs accuracy
        model = make_pipeline(StandardScaler(), classifier)
        model.fit(np.log1p(statistics[train]), seen)
        guesses["logistic regression"] = model.predict(np.log1p(statistics[test]))
        for name, guess in guesses.items():
            baselines[task][name] = float((labels[test, column] == guess).mean())
    return baselines


# ---- Folder ----------------------------------------------------------------------------------


def write_folder(out, sets, classes, split, options):
    """Write the folder, and say what is in it.

    sets: a list of what describe_set returns, each of one or of several sets that were joined.
    classes: {task: [names]}, a task for each column of the labels. split (G,) uint8.
    options: of the program that made them, kept in meta.json.
    """
    out.mkdir(parents=True, exist_ok=True)
    sums = {}

    def write(name, array):
        np.save(out / f"{name}.npy", array)
        sums[name] = hashlib.sha256(np.ascontiguousarray(array)).hexdigest()

    for name in ("node", "edge"):
        write(f"{name}_ptr", np.concatenate([[0], np.cumsum(join(sets, f"{name}_count"))]))
    for name in ARRAYS:  # one after the other: only one of them is in memory twice
        write(name, join(sets, name))
    write("split", split)
    baselines = measure_baselines(join(sets, "labels"), join(sets, "statistics"), split, classes)
    (out / "baselines.json").write_text(json.dumps(baselines, indent=1))
    meta = {"args": options, "classes": classes, "features": FEATURES, "sha256": sums}
    (out / "meta.tmp").write_text(json.dumps(meta, indent=1, default=str))  # str: of paths
    (out / "meta.tmp").rename(out / "meta.json")  # it says that all is there: it comes last

    train, valid, test = np.bincount(split, minlength=3)
    print(f"{out}: {train} sets to train, {valid} to validate, {test} to test")
    for task, found in baselines.items():
        for name, accuracy in found.items():
            print(f"test accuracy  {task:10} {name:20} {accuracy:.4f}")


def make_folder(args):
    options = dict(vars(args))
    del options["out"], options["workers"]  # which change nothing in the sets
    if (args.out / "meta.json").exists():
        found = json.loads((args.out / "meta.json").read_text())["args"]
        for name, value in options.items():
            if found.get(name) != value:
                made = f"{args.out} was made with --{name} {found.get(name)}, not {value}"
                stop(2, f"{made}: give another --out, or remove the folder")
        print(f"{args.out} is complete: nothing to do")
        return

    split = split_sets(args.samples, args.split, args.split_seed)
    key = hashlib.sha256(json.dumps(options).encode()).hexdigest()[:8]
    sets = make_parts(args, args.out / f"parts-{key}")  # only those of the same options are used
    classes = {"cls": args.kinds, "dim": ["2", "3", "4"], "manifold": ["other", "sprinkling"]}
    write_folder(args.out, sets, classes, split, options)
    for parts in args.out.glob("parts-*"):
        shutil.rmtree(parts)


if __name__ == "__main__":
    run(lambda: make_folder(parse_args()))
