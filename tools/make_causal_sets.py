"""Make causal sets for run_train_quantumgrav_ddp.py, to try it or to compare with.

    python tools/make_causal_sets.py                     # 12,000 sets: data/causal_sets.npz
    python tools/make_causal_sets.py --samples 100000 --min_size 64 --max_size 128 --out large.npz

Kinds, in turn: sprinklings into Minkowski space (mink2, mink3, mink4: the dimension), transitive
percolation with about the same share of related pairs, layered orders, sprinklings with some pairs
flipped (destroyed). What is drawn for set number i depends on (--seed, i) alone.

Writes an .npz file in the layout of QuantumGrav; G sets of at most N elements:
    adjacency_matrix (G, N, N) uint8    1 where i is in the past of j; zeros beyond the elements
    atomcount (G,)                      the elements of each set
    cls, dim, manifold (G,)             labels: the kind; its dimension, -1 for none; 0 or 1
"""

import functools
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"  # the matrices are small: processes are faster than threads

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from run_train_quantumgrav_ddp import COUNT, HelpFormatter, InputError, Parser, closure, number

KINDS = "mink2 mink3 mink4 percolation layered destroyed".split()
SPRINKLINGS = {"mink2": 2, "mink3": 3, "mink4": 4}  # their dimensions


def parse_args(words=None):
    parser = Parser(description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--out", type=Path, default=Path("data/causal_sets.npz"), help="file to write")
    add("--samples", type=COUNT, default=12_000, help="sets")
    add("--kinds", nargs="+", default=KINDS, choices=KINDS, help="of sets, in turn")
    add("--min_size", type=number(2, kind=int), default=32, help="elements of a set at least")
    # the script numbers elements in int16
    add("--max_size", type=number(2, 32767, int), default=64, help="elements of a set at most")
    add("--seed", type=number(0, kind=int), default=0, help="of the sets")
    # not os.cpu_count(): a job may own fewer cores than the machine has
    add("--workers", type=COUNT, default=len(os.sched_getaffinity(0)), help="processes")
    args = parser.parse_args(words)
    if args.min_size > args.max_size:
        parser.error(f"--min_size {args.min_size}: expected at most --max_size {args.max_size}")
    if args.out.exists():
        parser.error(f"{args.out} is there: remove it, or give another --out")
    return args


# Orders are (n, n) bool, strictly upper triangular, [i, j]: i is in the past of j


def ordering_fraction(order):
    """Share of the pairs that are related."""
    return 2 * np.count_nonzero(order) / (len(order) * (len(order) - 1))


def sprinkle(rng, n, dim):
    """The order of n uniform points of a causal diamond of height 2 in `dim`-dimensional Minkowski
    space. At time t it is a ball of radius 1 - |t|: so 1 - |t| is distributed as U^(1/dim)."""
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
    """Transitive percolation with about this ordering fraction: the closure of pairs that are drawn
    with probability p. Of the same draws a larger p relates more pairs, so we find p by halving."""
    draws = np.ones((n, n))  # never drawn
    draws[np.triu_indices(n, 1)] = rng.random(n * (n - 1) // 2)
    tried = []  # the last one need not be the closest
    p = 0.5
    for halving in range(2, 16):
        excess = ordering_fraction(closure(draws < p)) - fraction
        tried.append((abs(excess), p))
        p -= np.sign(excess) / 2**halving
    _, p = min(tried)
    return closure(draws < p)


def make_order(kind, rng, n):
    """(n, n) bool: a random order of this kind."""
    if kind == "layered":  # random pairs of neighboring layers, and what follows from them
        layer = np.sort(rng.integers(rng.integers(3, 9), size=n))
        p = rng.uniform(0.2, 0.8)
        return closure((layer[None, :] - layer[:, None] == 1) & (rng.random((n, n)) < p))
    if kind in SPRINKLINGS:
        return sprinkle(rng, n, SPRINKLINGS[kind])

    order = sprinkle(rng, n, int(rng.integers(2, 5)))
    if kind == "percolation":  # counting pairs does not tell it from a sprinkling
        return percolate(rng, n, ordering_fraction(order))
    rows, columns = np.triu_indices(n, 1)  # destroyed: 2 % of the pairs
    flipped = rng.choice(len(rows), round(0.02 * len(rows)), replace=False)
    order[rows[flipped], columns[flipped]] ^= True
    return closure(order)


def make_set(args, i):
    """Set number i: (order, kind)."""
    kind = args.kinds[i % len(args.kinds)]
    rng = np.random.default_rng([args.seed, i])
    n = int(rng.integers(args.min_size, args.max_size + 1))
    while True:
        order = make_order(kind, rng, n)
        if order.any():  # the script takes a set without any pair for a damaged one
            return order, kind


def main(words=None):
    args = parse_args(words)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    matrices = np.zeros((args.samples, args.max_size, args.max_size), np.uint8)
    sizes = []
    kinds = []
    with ProcessPoolExecutor(args.workers) as pool:
        sets = pool.map(functools.partial(make_set, args), range(args.samples), chunksize=100)
        for i, (order, kind) in enumerate(tqdm(sets, total=args.samples, disable=None)):
            sizes.append(len(order))
            matrices[i, : len(order), : len(order)] = order
            kinds.append(kind)
    arrays = {"adjacency_matrix": matrices, "atomcount": sizes, "cls": kinds}
    arrays["dim"] = [SPRINKLINGS.get(kind, -1) for kind in kinds]
    arrays["manifold"] = [int(kind in SPRINKLINGS) for kind in kinds]
    unfinished = args.out.with_suffix(".tmp.npz")  # --out is there whole, or not at all
    np.savez_compressed(unfinished, **arrays)
    unfinished.rename(args.out)
    print(f"{args.out}: {args.samples} sets")


if __name__ == "__main__":
    try:
        main()
    except (InputError, OSError) as error:
        print(f"make_causal_sets.py: {error}", file=sys.stderr)
        sys.exit(2)
