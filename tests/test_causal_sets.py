"""tools/make_causal_sets.py: theory of the sets, what the training script keeps of them, and the
file."""

import math

import networkx as nx
import numpy as np
import pytest
from helpers import import_tool

import run_train_quantumgrav_ddp as script

tool = import_tool("make_causal_sets")


# --------------------------------------------------------------------------------------------------
# Theory


def expected_chains(k, d):
    """Meyer's chi_k: chains of k elements over n (n - 1) ... (n - k + 1)."""
    ratio = math.gamma(d / 2) * math.gamma(d)
    ratio /= math.gamma(k * d / 2) * math.gamma((k + 1) * d / 2)
    return (math.gamma(d + 1) / 2) ** (k - 1) * ratio / k


def assert_near(values, expected):
    """Their mean is within 5 standard errors of `expected`, and these are small."""
    error = np.std(values, ddof=1) / len(values) ** 0.5
    assert 0 < error < 0.02 * expected, "too few draws for a sharp test"
    assert abs(np.mean(values) - expected) < 5 * error


@pytest.mark.parametrize("d, draws", [(2, 1000), (3, 2500), (4, 5000)])
def test_sprinklings_have_the_expected_chains(d, draws):
    n = 40
    rng = np.random.default_rng(d)
    orders = [tool.sprinkle(rng, n, d) for _ in range(draws)]
    fractions = [tool.ordering_fraction(order) for order in orders]
    assert_near(fractions, 2 * expected_chains(2, d))
    chains = [(order.sum(0) * order.sum(1)).sum() for order in orders]
    assert_near(np.array(chains) / (n * (n - 1) * (n - 2)), expected_chains(3, d))

    assert abs(np.median(script.myrheim_meyer(fractions)) - d) < 0.1
    assert script.myrheim_meyer(2 * expected_chains(2, d)) == pytest.approx(d, abs=1e-6)
    if d == 2:
        harmonic = sum(1 / i for i in range(1, n + 1))
        assert_near([script.links_of(order).sum() for order in orders], (n + 1) * harmonic - 2 * n)
        assert_near([(~order.any(0)).sum() for order in orders], harmonic)
        assert_near([(~order.any(1)).sum() for order in orders], harmonic)


def test_kleitman_rothschild_orders():
    """n^2 / 8 links; pairs of the outer layers are related if they meet in the middle."""
    n = 64
    rng = np.random.default_rng(7)
    orders = [tool.make_order("kr", rng, n) for _ in range(200)]
    far = n * n / 16 * (1 - 0.75 ** (n / 2))
    fractions = [tool.ordering_fraction(order) for order in orders]
    assert_near(fractions, (n * n / 8 + far) * 2 / (n * (n - 1)))
    assert_near([script.links_of(order).sum() for order in orders], n * n / 8)


def test_percolation_is_the_closest_that_its_draws_permit():
    """Against every set of smallest draws. The last trial of a bisection is often another."""
    n = 16
    pairs = np.triu_indices(n, 1)
    for seed in range(12):
        target = tool.ordering_fraction(tool.sprinkle(np.random.default_rng(seed), n, 2 + seed % 3))
        order = tool.percolate(np.random.default_rng(seed), n, target)
        draws = np.random.default_rng(seed).random(len(pairs[0]))
        edges = np.zeros((n, n), bool)
        closest = target
        for pair in draws.argsort():
            edges[pairs[0][pair], pairs[1][pair]] = True
            fraction = tool.ordering_fraction(script.closure(edges))
            closest = min(closest, abs(fraction - target))
        assert abs(tool.ordering_fraction(order) - target) == pytest.approx(closest, abs=1e-12)


@pytest.mark.parametrize("kind", tool.KINDS)
def test_a_set_against_networkx(kind):
    n = 24
    order = tool.make_order(kind, np.random.default_rng(5), n)
    dag = nx.from_numpy_array(order, create_using=nx.DiGraph)
    link = nx.to_numpy_array(nx.transitive_reduction(dag), nodelist=range(n)) > 0
    closed = nx.to_numpy_array(nx.transitive_closure_dag(dag), nodelist=range(n)) > 0
    assert np.array_equal(closed, order) and not np.tril(order).any()

    heights = np.zeros((2, n))
    for row, ordered in enumerate([dag, dag.reverse()]):
        for height, elements in enumerate(nx.topological_generations(ordered)):
            heights[row, elements] = height

    columns = [link.sum(0), link.sum(1), *heights, order.sum(0), order.sum(1)]
    kept = script.describe(order)
    assert np.array_equal(kept["features"], np.stack(columns, axis=1))
    steps = order.astype(int)
    counts = [n, order.sum(), link.sum(), (heights[0] == 0).sum(), (heights[1] == 0).sum()]
    counts += [nx.dag_longest_path_length(dag) + 1, (steps @ steps).sum()]
    assert kept["statistics"].tolist() == [counts]

    assert kept["past"].tolist() == np.argwhere(link.T)[:, 1].tolist()
    assert kept["future"].tolist() == np.argwhere(link)[:, 1].tolist()


# --------------------------------------------------------------------------------------------------
# The file

OPTIONS = "--samples=250 --min_size=6 --max_size=16".split()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("causal_sets") / "data" / "sets.npz"
    tool.main([f"--out={path}", "--workers=2", *OPTIONS])
    return path


def test_the_file(path):
    """Each set is there, as its number and the seed alone say."""
    assert [file.name for file in path.parent.iterdir()] == ["sets.npz"]
    arrays = np.load(path)
    args = tool.parse_args([*OPTIONS, "--samples=9000"])
    for i, matrix in enumerate(arrays["adjacency_matrix"]):
        order, kind = tool.make_set(args, i)
        assert order.any()  # the script refuses others
        assert np.array_equal(np.argwhere(matrix), np.argwhere(order))
        assert arrays["atomcount"][i] == len(order)
        assert arrays["cls"][i] == kind
        dim = tool.SPRINKLINGS.get(kind, -1)
        assert (arrays["dim"][i], arrays["manifold"][i]) == (dim, dim > 0)
    assert set(arrays["atomcount"]) == set(range(6, 17))

    args.seed = 1
    assert not np.array_equal(tool.make_set(args, 249)[0], order)


def test_bad_options(path, tmp_path):
    """A file that is there is left alone."""
    before = path.read_bytes()
    for option in ("--max_size=40000", "--samples=0", "--kinds=mink5", "--out=a", f"--out={path}"):
        with pytest.raises(script.InputError):
            tool.main([f"--out={tmp_path}/out.npz", *OPTIONS, option])
    with pytest.raises(script.InputError, match="it has three layers"):
        tool.main([f"--out={tmp_path}/out.npz", "--kinds=kr", "--min_size=3"])
    assert path.read_bytes() == before
    assert not list(tmp_path.iterdir())
