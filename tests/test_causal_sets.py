"""tools/make_causal_sets.py: theory of the sets, what the training script keeps of them, and the
file."""

import networkx as nx
import numpy as np
import pytest
from helpers import call_script, import_tool

import run_train_quantumgrav_ddp as script

tool = import_tool("make_causal_sets")


@pytest.mark.parametrize(("d", "share"), [(2, 1 / 2), (3, 8 / 35), (4, 1 / 10)])
def test_sprinklings_have_as_many_related_pairs_as_meyer_says(d, share):
    rng = np.random.default_rng(d)
    count = 1250 * (d - 1)
    fractions = [tool.ordering_fraction(tool.sprinkle(rng, 40, d)) for _ in range(count)]
    error = np.std(fractions) / count**0.5
    assert error < 0.02 * share, "too few draws for a sharp test"
    assert abs(np.mean(fractions) - share) < 5 * error
    assert script.myrheim_meyer(share) == pytest.approx(d, abs=1e-6)


def test_percolation_has_as_many_pairs_as_a_sprinkling():
    """Each its own: counting pairs does not tell them apart."""
    errors = []
    for seed in range(100):
        rng = np.random.default_rng(seed)
        order = tool.make_order("percolation", rng, 48)
        again = np.random.default_rng(seed)
        sprinkled = tool.sprinkle(again, 48, int(again.integers(2, 5)))
        errors.append(abs(tool.ordering_fraction(order) - tool.ordering_fraction(sprinkled)))
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


def test_the_file(tmp_path):
    """Each set is there, as its number and the seed alone say."""
    path = tmp_path / "data" / "sets.npz"
    options = "--samples=150 --min_size=6 --max_size=16".split()
    tool.main([f"--out={path}", "--workers=2", *options])
    assert [file.name for file in path.parent.iterdir()] == ["sets.npz"]
    arrays = np.load(path)
    args = tool.parse_args([*options, "--samples=9000"])
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
    assert not np.array_equal(tool.make_set(args, i)[0], order)

    before = path.read_bytes()
    for option in ("--max_size=40000", "--min_size=17", f"--out={path}"):
        words = [f"--out={tmp_path}/a", *options, option]
        said = call_script("tools/make_causal_sets", *words, status=2)
        assert len(said.splitlines()) == 1 and option.partition("=")[2] in said
    assert path.read_bytes() == before
