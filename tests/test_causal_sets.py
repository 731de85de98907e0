"""tools/make_causal_sets.py: theory of the sets, what the training script keeps of them, and the
file."""

import copy
import math

import networkx as nx
import numpy as np
import pytest
from helpers import call_script, import_tool

import run_train_quantumgrav_ddp as script

tool = import_tool("make_causal_sets")


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


@pytest.mark.parametrize("d", [2, 3, 4])
def test_sprinklings_have_the_expected_chains(d):
    n = 40
    rng = np.random.default_rng(d)
    orders = [tool.sprinkle(rng, n, d) for _ in range(1250 * (d - 1))]
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


def test_percolation():
    """Related are the pairs that are drawn first, and what follows from them: so many that the
    share of related pairs is that of a sprinkling, on average to .003."""
    errors = []
    for seed in range(200):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(32, 65))
        again = copy.deepcopy(rng)
        order = tool.make_order("percolation", rng, n)
        target = tool.ordering_fraction(tool.sprinkle(again, n, int(again.integers(2, 5))))
        draws = np.ones((n, n))
        draws[np.triu_indices(n, 1)] = again.random(n * (n - 1) // 2)
        last = draws[script.links_of(order)].max()
        assert np.array_equal(order, script.closure(draws <= last))
        errors.append(abs(tool.ordering_fraction(order) - target))
    assert np.mean(errors) < 0.003


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
    """One line, status 2. A file that is there is left alone."""
    before = path.read_bytes()
    for option in ("--max_size=40000", "--min_size=17", "--kinds=mink5", f"--out={path}"):
        words = [f"--out={tmp_path}/a", *OPTIONS, option]
        said = call_script("tools/make_causal_sets", *words, status=2)
        assert len(said.splitlines()) == 1 and option.partition("=")[2] in said
    assert path.read_bytes() == before
    assert not list(tmp_path.iterdir())
