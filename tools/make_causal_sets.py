"""Make causal sets for run_train_quantumgrav_ddp.py, to try it or to compare with.

    python tools/make_causal_sets.py                     # 12,000 sets: data/causal_sets.npz
    python tools/make_causal_sets.py --samples 100000 --min_size 64 --max_size 128 --out large.npz

Kinds, in turn: sprinklings into Minkowski space (mink2, mink3, mink4: the dimension), transitive
percolation with the same share of related pairs, layered orders, sprinklings with some pairs
flipped (destroyed); if asked for, Kleitman-Rothschild orders (kr). Set number i depends on (--seed,
i) alone.

Writes an .npz file in the layout of QuantumGrav; G sets of at most N elements:
    adjacency_matrix (G, N, N) uint8    1 where i is in the past of j; zeros beyond the elements
    atomcount (G,)                      the elements of each set
    cls, dim, manifold (G,)             labels: the kind; its dimension, -1 for none; 0 or 1
"""

import functools
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"  # the matrices are small: processes are faster than threads

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from run_train_quantumgrav_ddp import COUNT, InputError, Parser, closure, number

KINDS = "mink2 mink3 mink4 percolation layered kr destroyed".split()
SPRINKLINGS = {"mink2": 2, "mink3": 3, "mink4": 4}  # their dimensions
DESTROYED_SHARE = 0.02  # of the pairs


def parse_args(words=None):
    parser = Parser(__doc__)
    add = parser.add_argument
    kinds = [kind for kind in KINDS if kind != "kr"]
    add("--out", type=Path, default=Path("data/causal_sets.npz"), help="file to write")
    add("--samples", type=COUNT, default=12_000, help="sets")
    add("--kinds", nargs="+", default=kinds, choices=KINDS, help="of sets, in turn")
    add("--min_size", type=number(2, kind=int), default=32, help="elements of a set at least")
    add("--max_size", type=COUNT, default=64, help="elements of a set at most")
    add("--seed", type=number(0, kind=int), default=0, help="of the sets")
    add("--workers", type=COUNT, default=os.cpu_count(), help="processes")
    args = parser.parse_args(words)
    if not args.min_size <= args.max_size <= 32767:  # elements are numbered in int16
        parser.error("expected --min_size <= --max_size <= 32767")
    if "kr" in args.kinds and args.min_size < 4:
        parser.error("--kinds kr: expected --min_size 4 or more, as it has three layers")
    if args.out.suffix != ".npz":
        parser.error(f"--out {args.out}: expected a name that ends in .npz")
    if args.out.exists():
        parser.error(f"{args.out} is there: remove it, or give another --out")
    return args


# Orders are (n, n) bool, strictly upper triangular, [i, j]: i is in the past of j


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


def make_set(args, i):
    """Set number i: (order, kind)."""
    kind = args.kinds[i % len(args.kinds)]
    rng = np.random.default_rng([args.seed, i])
    n = int(rng.integers(args.min_size, args.max_size + 1))
    order = make_order(kind, rng, n)
    while not order.any():  # the script takes a set without any pair for a damaged one
        order = make_order(kind, rng, n)
    return order, kind


def main(words=None):
    args = parse_args(words)
    matrices = np.zeros((args.samples, args.max_size, args.max_size), np.uint8)
    sizes = np.zeros(args.samples, np.int64)
    kinds = []
    with ProcessPoolExecutor(args.workers) as pool:
        # an executor notices if a worker dies, such as one killed for its memory; a Pool waits on
        sets = pool.map(functools.partial(make_set, args), range(args.samples), chunksize=100)
        for i, (order, kind) in enumerate(tqdm(sets, total=args.samples, disable=None)):
            sizes[i] = len(order)
            matrices[i, : len(order), : len(order)] = order
            kinds.append(kind)
    dim = [SPRINKLINGS.get(kind, -1) for kind in kinds]
    manifold = [int(kind in SPRINKLINGS) for kind in kinds]
    labels = {"cls": kinds, "dim": dim, "manifold": manifold}

    # the file is there whole, or not at all
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.out.parent, prefix="unfinished-") as folder:
        unfinished = Path(folder) / args.out.name
        np.savez_compressed(unfinished, adjacency_matrix=matrices, atomcount=sizes, **labels)
        unfinished.rename(args.out)
    print(f"{args.out}: {args.samples} sets")


if __name__ == "__main__":
    try:
        main()
    except (InputError, OSError, BrokenProcessPool) as error:
        print(f"make_causal_sets.py: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
