"""tools/make_causal_sets.py: theory of the sets, what is kept of them, and the program itself."""

import hashlib
import json
import math
import shutil
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
    if d == 2:
        harmonic = sum(1 / i for i in range(1, n + 1))
        assert_near([tool.links(order).sum() for order in orders], (n + 1) * harmonic - 2 * n)
        assert_near([(~order.any(0)).sum() for order in orders], harmonic)
        assert_near([(~order.any(1)).sum() for order in orders], harmonic)


def test_myrheim_meyer_dimension():
    found = tool.myrheim_meyer([1 / 2, 8 / 35, 1 / 10, 0.0])
    assert found == pytest.approx([2, 3, 4, 12], abs=1e-6)


def test_kleitman_rothschild_orders():
    """n^2 / 8 links; pairs of the outer layers are related if they meet in the middle."""
    n = 64
    rng = np.random.default_rng(7)
    orders = [tool.make_order("kr", rng, n, 0.0) for _ in range(200)]
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
@pytest.mark.parametrize("graph", ["links", "order"])
def test_a_set_against_networkx(kind, graph):
    n = 24
    order = tool.make_order(kind, np.random.default_rng(5), n, 0.02)
    dag = nx.from_numpy_array(order, create_using=nx.DiGraph)
    link = nx.to_numpy_array(nx.transitive_reduction(dag), nodelist=range(n)) > 0
    closed = nx.to_numpy_array(nx.transitive_closure_dag(dag), nodelist=range(n)) > 0
    assert np.array_equal(closed, order) and not np.tril(order).any()

    heights = np.zeros((2, n))
    for row, ordered in enumerate([dag, dag.reverse()]):
        for height, elements in enumerate(nx.topological_generations(ordered)):
            heights[row, elements] = height
    columns = [link.sum(0), link.sum(1), *heights, order.sum(0), order.sum(1)]
    kept = tool.describe_set(order, [3, -1, 0], graph)
    assert np.array_equal(kept["features"], np.stack(columns, axis=1))
    steps = order.astype(int)
    counts = [n, order.sum(), link.sum(), (heights[0] == 0).sum(), (heights[1] == 0).sum()]
    counts += [nx.dag_longest_path_length(dag) + 1, (steps @ steps).sum()]
    assert kept["statistics"].tolist() == [counts]

    edges = np.argwhere(link if graph == "links" else order).tolist()
    future = np.repeat(np.arange(n), kept["future_degree"])
    past = np.repeat(np.arange(n), kept["past_degree"])
    assert np.stack([future, kept["future"]], axis=1).tolist() == edges
    transposed = sorted([later, earlier] for earlier, later in edges)
    assert np.stack([past, kept["past"]], axis=1).tolist() == transposed


# --------------------------------------------------------------------------------------------------
# The program

SMALL = ["--samples=1100", "--min_size=6", "--max_size=16", "--workers=1"]


def command(out, *options):
    program = str(ROOT / "tools" / "make_causal_sets.py")
    return [sys.executable, program, f"--out={out}", *SMALL, *options]


def make(out, *options, status=0):
    """Run the program. Returns what it printed, or its one line of error."""
    done = subprocess.run(command(out, *options), capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    if status == 0:
        return done.stdout
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr


def contents(out):
    return {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder of 1,100 sets, in three parts, and what the program said."""
    out = tmp_path_factory.mktemp("causal_sets") / "whole"
    return out, make(out, "--workers=2")


def test_the_folder(whole):
    out, said = whole
    arrays = {path.stem: np.load(path) for path in out.glob("*.npy")}
    assert np.array_equal(np.diff(arrays["node_ptr"]), arrays["statistics"][:, 0])
    assert np.array_equal(np.diff(arrays["edge_ptr"]), arrays["statistics"][:, 2])
    assert arrays["labels"][:4].tolist() == [[0, 0, 1], [1, 1, 1], [2, 2, 1], [3, -1, 0]]
    assert np.bincount(arrays["split"]).tolist() == [825, 110, 165]
    meta = json.loads((out / "meta.json").read_text())
    sums = {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in arrays.items()}
    assert meta["sha256"] == sums and meta["classes"]["cls"][3] == "percolation"
    assert len(arrays["features"]) == arrays["node_ptr"][-1] and "torchrun" in said

    baselines = json.loads((out / "baselines.json").read_text())
    commonest = np.bincount(arrays["labels"][arrays["split"] == 0, 0]).argmax()
    test_kinds = arrays["labels"][arrays["split"] == 2, 0]
    assert baselines["cls"]["majority"] == np.mean(test_kinds == commonest)
    assert baselines["cls"]["logistic regression"] > 0.3
    assert baselines["dim"]["Myrheim-Meyer"] > 0.6
    assert set(baselines["dim"]) == {"majority", "Myrheim-Meyer", "logistic regression"}


def test_a_set_depends_on_seed_and_number_alone(whole):
    statistics = np.load(whole[0] / "statistics.npy")
    args = tool.parse_args(["--samples=9000", *SMALL[1:]])
    assert np.array_equal(tool.make_set(args, 1099)["statistics"][0], statistics[1099])
    args.seed = 1
    assert not np.array_equal(tool.make_set(args, 1099)["statistics"][0], statistics[1099])
    assert set(statistics[:, 0]) == set(range(6, 17))


def test_killed_and_started_again(whole, tmp_path):
    """The same bytes as of an undisturbed run on two workers; finished parts are not made again."""
    out = tmp_path / "killed"
    for _ in range(5):  # on a busy machine it may be done before it can be killed
        with subprocess.Popen(command(out), stdout=subprocess.PIPE) as process:
            while not list(out.glob("parts-*/*.npz")) and process.poll() is None:
                time.sleep(0.01)
            process.kill()
            process.communicate(timeout=20)  # returns when its worker has ended, too
        parts = len(list(out.glob("parts-*/*.npz")))
        if 0 < parts < 3:
            break
        shutil.rmtree(out)
    assert 0 < parts < 3 and not (out / "meta.json").exists()
    assert f"{parts} of 3 parts are there already" in make(out)
    assert contents(out) == contents(whole[0])


def test_a_complete_folder(whole):
    """It is left alone, and refused to other options."""
    before = contents(whole[0])
    assert "complete" in make(whole[0])
    said = make(whole[0], "--seed=5", status=2)
    assert "--seed 0, not 5" in said and "another --out" in said
    assert contents(whole[0]) == before


BAD_OPTIONS = ["--colour=red", "--kinds=mink5", "--min_size=20", "--max_size=40000", "--samples=5"]


@pytest.mark.parametrize("option", BAD_OPTIONS)
def test_bad_options(tmp_path, option, capsys):
    with pytest.raises(SystemExit) as caught:
        words = ["--min_size=6", "--max_size=16", f"--out={tmp_path}/out", option]
        tool.make_folder(tool.parse_args(words))
    said = capsys.readouterr().err
    assert caught.value.code == 2
    assert option.split("=")[1] in said and len(said.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    assert f"{tmp_path}/file" in make(tmp_path / "file", status=1)
