"""tools/make_causal_sets.py: theory of the sets, what is kept of them, and the program itself."""

import json
import math
import subprocess
import sys
import time

import networkx as nx
import numpy as np
import pytest
from helpers import ROOT, import_tool

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

    assert abs(np.median(tool.myrheim_meyer(fractions)) - d) < 0.1
    assert tool.myrheim_meyer(2 * expected_chains(2, d)) == pytest.approx(d, abs=1e-6)
    if d == 2:
        harmonic = sum(1 / i for i in range(1, n + 1))
        assert_near([tool.links(order).sum() for order in orders], (n + 1) * harmonic - 2 * n)
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
    assert_near([tool.links(order).sum() for order in orders], n * n / 8)


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
            fraction = tool.ordering_fraction(tool.closure(edges))
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
    kept = tool.describe_set(order, [3, -1, 0])
    assert np.array_equal(kept["features"], np.stack(columns, axis=1))
    steps = order.astype(int)
    counts = [n, order.sum(), link.sum(), (heights[0] == 0).sum(), (heights[1] == 0).sum()]
    counts += [nx.dag_longest_path_length(dag) + 1, (steps @ steps).sum()]
    assert kept["statistics"].tolist() == [counts]

    edges = np.argwhere(link).tolist()
    future = np.repeat(np.arange(n), kept["future_degree"])
    past = np.repeat(np.arange(n), kept["past_degree"])
    assert np.stack([future, kept["future"]], axis=1).tolist() == edges
    transposed = sorted([later, earlier] for earlier, later in edges)
    assert np.stack([past, kept["past"]], axis=1).tolist() == transposed


# --------------------------------------------------------------------------------------------------
# The program

SMALL = ["--samples=2000", "--min_size=6", "--max_size=16", "--workers=1"]


def make(out, *options):
    tool.make_folder(tool.parse_args([f"--out={out}", *SMALL, *options]))


def contents(out):
    return {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder of 2,000 sets, in four parts, of two workers."""
    out = tmp_path_factory.mktemp("causal_sets") / "whole"
    make(out, "--workers=2")
    return out


def test_the_folder(whole):
    arrays = {path.stem: np.load(path) for path in whole.glob("*.npy")}
    assert np.array_equal(np.diff(arrays["node_ptr"]), arrays["statistics"][:, 0])
    assert np.array_equal(np.diff(arrays["edge_ptr"]), arrays["statistics"][:, 2])
    assert set(arrays["statistics"][:, 0]) == set(range(6, 17))
    assert arrays["labels"][:4].tolist() == [[0, 0, 1], [1, 1, 1], [2, 2, 1], [3, -1, 0]]
    assert np.bincount(arrays["split"]).tolist() == [1500, 200, 300]

    baselines = json.loads((whole / "baselines.json").read_text())
    commonest = np.bincount(arrays["labels"][arrays["split"] == 0, 0]).argmax()
    test_kinds = arrays["labels"][arrays["split"] == 2, 0]
    assert baselines["cls"]["majority"] == np.mean(test_kinds == commonest)
    assert baselines["cls"]["logistic regression"] > 0.3
    assert baselines["dim"]["Myrheim-Meyer"] > 0.6


def test_a_set_depends_on_seed_and_number_alone(whole):
    expected = np.load(whole / "statistics.npy")[1099]
    args = tool.parse_args([*SMALL, "--samples=9000"])
    assert np.array_equal(tool.make_set(args, 1099)["statistics"][0], expected)
    args.seed = 1
    assert not np.array_equal(tool.make_set(args, 1099)["statistics"][0], expected)


def test_killed_and_started_again(whole, tmp_path, monkeypatch):
    """The same bytes as of an undisturbed run; finished parts are not made again."""
    out = tmp_path / "killed"
    command = [sys.executable, ROOT / "tools" / "make_causal_sets.py", f"--out={out}", *SMALL]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        while not list(out.glob("parts-*/*.npz")):
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
        process.communicate(timeout=20)  # returns when its worker has ended, too

    assert not (out / "meta.json").exists()
    make_set = tool.make_set

    def make_later_set(args, i):
        assert i >= 500, "the first part is there"
        return make_set(args, i)

    monkeypatch.setattr(tool, "make_set", make_later_set)  # its workers are forks of this process
    make(out)
    assert contents(out) == contents(whole)


def test_bad_options(tmp_path, capsys):
    for option in ("--max_size=40000", "--samples=5", "--kinds=mink5"):
        with pytest.raises(SystemExit) as caught:
            make(tmp_path / "out", option)
        assert caught.value.code == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
        assert not (tmp_path / "out").exists()


def test_a_complete_folder(whole):
    """It is left alone, and refused to other options."""
    before = contents(whole)
    make(whole)
    with pytest.raises(SystemExit):
        make(whole, "--seed=5")
    assert contents(whole) == before
