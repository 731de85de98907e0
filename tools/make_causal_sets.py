"""Make causal sets for run_train_quantumgrav_ddp.py, to try it or to compare with.

    python tools/make_causal_sets.py                     # 12,000 sets: data/causal_sets.npz
    python tools/make_causal_sets.py --num_samples 100000 --min_size 64 --max_size 128 --out l.npz

Kinds, in turn: sprinklings into Minkowski space (mink2, mink3, mink4: the dimension), transitive
percolation with about the same share of related pairs, layered orders, sprinklings with some pairs
flipped (destroyed); if asked for, sprinklings into 2D spacetimes of constant curvature (curved).

Curved: light cone coordinates u, v in -1..1, ds^2 = -W du dv, W = (1 + k u v)^-2, k uniform in
-0.7..0.7. The Ricci scalar of any such metric is R = (4 / W) d/du d/dv log W, so here -8 k, by the
convention that de Sitter space has R > 0: its metric, of radius r, is this with k = -1 / (4 r^2).

Writes an .npz file of arrays; of G sets of at most N elements:
    atomcount (G,)                      the elements of each set
    cls, dim, manifold, curvature (G,)  labels: kind; dimension or NaN; 0 or 1; R or NaN
    adjacency_matrix (G, N, N) uint8    1 where i is in the past of j; zeros beyond the elements
or with --layout links, for large sets, in place of the last one,
    link_pairs (links, 2) int16         (i, j) with i in the past of j and nothing between them
    link_counts (G,)                    how many of these rows, in this order, each set has
"""

import functools
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from run_train_quantumgrav_ddp import COUNT, HelpFormatter, InputError, Parser, links_of, number

KINDS = "mink2 mink3 mink4 percolation layered destroyed".split()
SPRINKLINGS = {"mink2": 2, "mink3": 3, "mink4": 4, "curved": 2}  # their dimensions


def parse_args(words=None):
    parser = Parser(description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--out", type=Path, default=Path("data/causal_sets.npz"), help="file to write")
    add("--num_samples", "--samples", type=COUNT, default=12_000, help="sets")
    add("--kinds", nargs="+", default=KINDS, choices=[*KINDS, "curved"], help="of sets, in turn")
    add("--min_size", type=number(2, kind=int), default=32, help="elements of a set at least")
    # we and the script number elements in int16
    add("--max_size", type=number(2, 32767, int), default=64, help="elements of a set at most")
    add("--layout", default="matrices", choices=["matrices", "links"], help="what is written")
    add("--seed", type=number(0, kind=int), default=0, help="set i depends on it and on i alone")
    # not os.cpu_count(): a job may own fewer cores than the machine has
    add("--workers", type=COUNT, default=len(os.sched_getaffinity(0)), help="processes")
    args = parser.parse_args(words)
    if args.min_size > args.max_size:
        parser.error(f"--min_size {args.min_size}: expected at most --max_size {args.max_size}")
    if args.out.exists():
        parser.error(f"--out {args.out} exists: expected a new file")
    return args


def pack(rows):
    """(n, n) bool, [j, i]: i is in the past of j -> orders as we keep them, and as links_of takes
    them: an integer for each element j, whose bit i is 1 where i is in its past."""
    packed = np.packbits(rows, axis=1, bitorder="little")
    return [int.from_bytes(row.tobytes(), "little") for row in packed]


def ordering_fraction(past):
    """Share of the pairs that are related."""
    return 2 * sum(map(int.bit_count, past)) / (len(past) * (len(past) - 1))


def order_points(time, place):
    """The order of points of Minkowski space: time (n,), place (n, dimension - 1)."""
    time, *place = np.vstack([time, place.T])[:, time.argsort()]
    past = []
    # a few rows at a time: more would need more memory, and would not fit into a cache
    for rows in np.array_split(np.arange(len(time)), 1 + len(time) ** 2 // 2**17):
        end = rows[-1] + 1  # later elements are in the past of none of these
        distance2 = sum((x[rows, None] - x[:end]) ** 2 for x in place)
        is_related = (time[rows, None] - time[:end]) ** 2 > distance2
        past += pack(np.tril(is_related, rows[0] - 1))
    return past


def sprinkle(rng, n, dim):
    """The order of n uniform points of a causal diamond of height 2 in `dim`-dimensional Minkowski
    space. At time t it is a ball of radius 1 - |t|: so 1 - |t| is distributed as U^(1/dim)."""
    radius = rng.random(n) ** (1 / dim)
    time = (1 - radius) * rng.choice([-1.0, 1.0], n)
    place = rng.standard_normal((n, dim - 1))
    place /= np.linalg.norm(place, axis=1)[:, None]
    place *= (radius * rng.random(n) ** (1 / (dim - 1)))[:, None]
    return order_points(time, place)


def sprinkle_curved(rng, n, k):
    """The order of n points of the diamond -1 < u, v < 1 with the density (1 + k u v)^-2."""
    points = np.zeros((0, 2))
    while len(points) < n:
        drawn = rng.uniform(-1, 1, (4 * n, 2))
        share = ((1 - abs(k)) / (1 + k * drawn.prod(1))) ** 2  # of the largest density
        points = np.concatenate([points, drawn[rng.random(4 * n) < share]])
    u, v = points[:n].T
    return order_points(u + v, (u - v)[:, None])  # light goes along u and v as in flat space


def percolate(rng, n, fraction):
    """Transitive percolation with about this ordering fraction: the closure of pairs that are drawn
    with probability p. Of the same draws a larger p relates more pairs, so we find p by halving."""
    draws = np.ones((n, n))  # never drawn
    draws.T[np.triu_indices(n, 1)] = rng.random(n * (n - 1) // 2)
    tried = []  # the last one need not be the closest
    p = 0.5
    for halving in range(2, 16):
        excess = ordering_fraction(links_of(pack(draws < p))[1]) - fraction
        tried.append((abs(excess), p))
        p -= np.sign(excess) / 2**halving
    _, p = min(tried)
    return links_of(pack(draws < p))[1]


def make_order(kind, rng, n, k=0.0):
    """A random order of this kind. k: of a curved one, as above"""
    if kind == "layered":  # random pairs of neighboring layers, and what follows from them
        layer = np.sort(rng.integers(rng.integers(3, 9), size=n))
        p = rng.uniform(0.2, 0.8)
        is_drawn = (layer[:, None] - layer == 1) & (rng.random((n, n)) < p).T
        return links_of(pack(is_drawn))[1]
    if kind == "curved":
        return sprinkle_curved(rng, n, k)
    if kind in SPRINKLINGS:
        return sprinkle(rng, n, SPRINKLINGS[kind])

    past = sprinkle(rng, n, int(rng.integers(2, 5)))
    if kind == "percolation":  # counting pairs does not tell it from a sprinkling
        return percolate(rng, n, ordering_fraction(past))
    rows, columns = np.triu_indices(n, 1)  # destroyed: 2 % of the pairs
    flipped = rng.choice(len(rows), round(0.02 * len(rows)), replace=False)
    for earlier, later in zip(rows[flipped].tolist(), columns[flipped].tolist(), strict=True):
        past[later] ^= 1 << earlier
    return links_of(past)[1]


def make_set(args, i):
    """Set number i: (bits of its matrix, or its links; its size, its kind, its curvature)"""
    kind = args.kinds[i % len(args.kinds)]
    rng = np.random.default_rng([args.seed, i])
    n = int(rng.integers(args.min_size, args.max_size + 1))
    k = rng.uniform(-0.7, 0.7) if kind == "curved" else 0
    past = []
    while not any(past):  # the script takes a set without any pair for a damaged one
        past = make_order(kind, rng, n, k)

    labels = (n, kind, -8 * k if kind in SPRINKLINGS else np.nan)
    if args.layout == "links":
        links, _ = links_of(past)
        later = np.repeat(np.arange(n), list(map(len, links)))
        return np.stack([np.concatenate(links), later], axis=1).astype(np.int16), *labels
    packed = [np.frombuffer(bits.to_bytes(n // 8 + 1, "little"), np.uint8) for bits in past]
    return np.array(packed), *labels


def main(words=None):
    args = parse_args(words)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    chunk = 1 + 6400 // args.max_size  # at a time: many small sets, or one large set
    with ProcessPoolExecutor(args.workers) as pool:
        sets = pool.map(functools.partial(make_set, args), range(args.num_samples), chunksize=chunk)
        sets = list(tqdm(sets, total=args.num_samples, disable=None))
    orders, sizes, kinds, curvatures = zip(*sets, strict=True)
    arrays = {"atomcount": sizes, "cls": kinds, "curvature": curvatures}
    arrays["dim"] = [SPRINKLINGS.get(kind, np.nan) for kind in kinds]
    arrays["manifold"] = [int(kind in SPRINKLINGS) for kind in kinds]
    if args.layout == "links":
        arrays.update(link_pairs=np.concatenate(orders), link_counts=list(map(len, orders)))
    else:
        matrices = np.zeros((args.num_samples, args.max_size, args.max_size), np.uint8)
        for matrix, packed, n in zip(matrices, orders, sizes, strict=True):
            matrix[:n, :n] = np.unpackbits(packed, axis=1, count=n, bitorder="little").T
        arrays["adjacency_matrix"] = matrices
    unfinished = args.out.with_suffix(".tmp.npz")  # --out is there whole, or not at all
    np.savez_compressed(unfinished, **arrays)
    unfinished.rename(args.out)
    print(f"{args.out}: {args.num_samples} sets")


if __name__ == "__main__":
    try:
        main()
    except (InputError, OSError) as error:
        print(f"make_causal_sets.py: error: {error}", file=sys.stderr)
        sys.exit(2)
