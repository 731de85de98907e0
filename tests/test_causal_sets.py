"""tools/make_causal_sets.py: theory of the sets, what the script keeps of them, and the file."""

import json
import math
import tracemalloc

import networkx as nx
import numpy as np
import pytest
from helpers import call_script, import_tool, parse_arguments

import run_train_quantumgrav_ddp as script

tool = import_tool("make_causal_sets")
KINDS = [*tool.KINDS, "curved"]
INTERVALS = [script.STATISTICS.index(f"intervals_of_{k}") for k in range(11)]


def matrix_of(packed, n):
    return np.unpackbits(packed, axis=1, count=n, bitorder="little").T


def make_sets(kind, n, count=1, more=""):
    args = tool.parse_args(f"--out=a --kinds={kind} --min_size={n} --max_size={n} {more}".split())
    return [tool.make_set(args, i) for i in range(count)]


def assert_mean(found, expected, share):
    """It is within 5 standard errors. If they are no small share of it the test is not sharp."""
    errors = np.std(found, axis=0, ddof=1) / len(found) ** 0.5
    assert np.all(errors < share * expected)
    assert np.all(abs(np.mean(found, axis=0) - expected) < 5 * errors)


@pytest.mark.parametrize(("d", "share"), [(2, 1 / 2), (3, 8 / 35), (4, 1 / 10)])
def test_sprinklings_have_as_many_related_pairs_as_meyer_says(d, share):
    rng = np.random.default_rng(d)
    orders = [tool.sprinkle(rng, 40, d) for _ in range(1250 * (d - 1))]
    assert_mean(list(map(tool.ordering_fraction, orders)), share, 0.02)


def test_curved_sets_have_as_many_related_pairs_as_their_label_says():
    """By an integral over both points. More in de Sitter space, where the label is above 0."""
    u = (np.arange(60) + 0.5) / 30 - 1
    curvatures = np.linspace(-5.6, 5.6, 113)
    mass = (1 - curvatures[:, None, None] / 8 * np.outer(u, u)) ** -2
    past = mass.cumsum(1) - mass / 2  # of points in the same row one half is earlier
    past = past.cumsum(2) - past / 2
    shares = 2 * (mass * past).sum((1, 2)) / mass.sum((1, 2)) ** 2
    orders, _, _, labels = zip(*make_sets("curved", 40, 1500), strict=True)
    expected = np.interp(labels, curvatures, shares) - 0.5
    found = np.bitwise_count(orders).sum((1, 2)) / (40 * 39 / 2) - 0.5
    for sign in (-1, 1):
        chosen = np.sign(labels) == sign
        assert_mean(sign * found[chosen], np.mean(sign * expected[chosen]), 0.1)
    assert_mean(found * expected / np.mean(expected**2), 1, 0.05)  # the slope of a fit


def test_sprinklings_have_as_many_intervals_as_theory_says():
    """A pair has shares a and b of the two light cone coordinates between its points, with density
    (1 - a) (1 - b): so each other point lies between them with the chance a b."""
    n = 40
    a, weights = np.polynomial.legendre.leggauss(n)  # integrals of polynomials from -1 to 1
    weights = weights * (1 - a) / 4
    chance = np.outer(a + 1, a + 1) / 4
    terms = [math.comb(n - 2, k) * chance**k * (1 - chance) ** (n - 2 - k) for k in range(11)]
    expected = n * (n - 1) * np.array([weights @ term @ weights for term in terms])
    assert expected[0] == pytest.approx((n + 1) * sum(1 / np.arange(1, n + 1)) - 2 * n)
    sets = make_sets("mink2", n, 600)
    matrices = [matrix_of(packed, n) for packed, *_ in sets]
    found = [script.describe({"adjacency_matrix": matrix})["statistics"] for matrix in matrices]
    assert_mean(np.array(found)[:, INTERVALS], expected, 0.05)


def test_large_sets_are_made_without_a_matrix_and_intervals_counted_in_a_sample():
    n = 8000
    shares = []
    for seed in range(5):
        tracemalloc.start()
        [(links, *_)] = make_sets("mink2", n, more=f"--layout=links --seed={seed}")
        assert tracemalloc.get_traced_memory()[1] < n * n / 2  # bytes, at the peak
        tracemalloc.stop()
        assert len(links) == pytest.approx((n + 1) * sum(1 / np.arange(1, n + 1)) - 2 * n, rel=0.05)
        numbers = script.describe({"link_pairs": links, "atomcount": n})["statistics"]
        shares.append(numbers[INTERVALS][0] / len(links))
    assert_mean(shares, 1, 0.02)


def test_percolation_has_as_many_pairs_as_a_sprinkling():
    errors = []
    for seed in range(100):
        rng = np.random.default_rng(seed)
        sprinkled = tool.sprinkle(rng, 48, int(rng.integers(2, 5)))
        order = tool.make_order("percolation", np.random.default_rng(seed), 48)
        errors.append(abs(tool.ordering_fraction(order) - tool.ordering_fraction(sprinkled)))
    assert np.mean(errors) < 0.003  # each its own: counting pairs does not tell them apart


@pytest.mark.parametrize("kind", KINDS)
def test_a_set_against_networkx(kind):
    [(packed, n, *_)] = make_sets(kind, 24)
    order = matrix_of(packed, n) > 0
    dag = nx.from_numpy_array(order, create_using=nx.DiGraph)
    link = nx.to_numpy_array(nx.transitive_reduction(dag), nodelist=range(n)) > 0
    closed = nx.to_numpy_array(nx.transitive_closure_dag(dag), nodelist=range(n)) > 0
    assert np.array_equal(closed, order) and not np.tril(order).any()

    heights = np.zeros((2, n))
    for row, ordered in enumerate([dag, dag.reverse()]):
        for height, elements in enumerate(nx.topological_generations(ordered)):
            heights[row, elements] = height
    columns = [link.sum(0), link.sum(1), *heights, order.sum(0), order.sum(1)]
    kept = script.describe({"adjacency_matrix": order})
    assert np.array_equal(kept["features"], np.stack(columns, axis=1))
    between = order.astype(int) @ order
    counts = [n, order.sum(), link.sum(), *(heights == 0).sum(1), heights.max() + 1, between.sum()]
    counts += [(between[order] == k).sum() for k in range(11)]
    assert kept["statistics"].tolist() == [*counts, (between[order] > 10).sum()]
    assert kept["past"].tolist() == np.argwhere(link.T)[:, 1].tolist()
    assert kept["future"].tolist() == np.argwhere(link)[:, 1].tolist()


def test_the_file(tmp_path):
    """Each set is there, as its number and the seed alone say, and in both layouts."""
    path = tmp_path / "data" / "sets.npz"
    other = tmp_path / "other.npz"
    options = f"--out={other} --samples=150 --min_size=6 --max_size=16 --kinds".split() + KINDS
    tool.main([*options, f"--out={path}", "--workers=2"])
    assert [file.name for file in path.parent.iterdir()] == ["sets.npz"]
    for option in ("--max_size=40000", "--min_size=17", f"--out={path}"):
        said = call_script("tools/make_causal_sets", *options, option, status=2)
        assert len(said.splitlines()) == 1 and option.partition("=")[2] in said

    arrays = np.load(path)
    args = tool.parse_args([*options, "--samples=9000"])
    for i, matrix in enumerate(arrays["adjacency_matrix"]):
        packed, size, kind, curvature = tool.make_set(args, i)
        order = matrix_of(packed, size)
        assert order.any()  # the script refuses others
        assert np.array_equal(np.argwhere(matrix), np.argwhere(order))
        dim = tool.SPRINKLINGS.get(kind, np.nan)
        expected = [size, kind, dim, dim > 0, curvature if kind == "curved" else 0 * dim]
        names = ("atomcount", "cls", "dim", "manifold", "curvature")
        np.testing.assert_equal([arrays[name][i] for name in names], expected)
    assert set(arrays["atomcount"]) == set(range(6, 17))
    args.seed = 1
    assert not np.array_equal(tool.make_set(args, i)[0], packed)

    tool.main([*options, "--layout=links"])
    assert {*np.load(other)} - {*arrays} == {"link_pairs", "link_counts"}
    found = []
    for file in (path, other):
        words = [f"--data={file}", f"--cache_dir={tmp_path}/cache", "--tasks", "cls", "manifold"]
        folder = script.prepare(parse_arguments(script, *words, "--targets", "dim", "curvature"))
        found.append({file.stem: file.read_bytes() for file in folder.glob("*.[bn]*")})
        found[-1]["meta"] = json.loads((folder / "meta.json").read_text())
        assert len(found[-1]["meta"].pop("names")) == 150
    assert found[0] == found[1] and found[0].keys() > script.ARRAYS.keys()
