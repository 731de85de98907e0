"""How run_train_quantumgrav_ddp.py reads stores of every layout; its tools: the theory of the sets
that make_causal_sets.py makes, and predict_causal_sets.py."""

import csv
import json
import math
import os
import shutil
from functools import partial

import networkx as nx
import numpy as np
import pytest
import torch
from helpers import call_script, check_refusal, check_refused, import_tool, parse_arguments
from runs import Run

import run_train_quantumgrav_ddp as script

zarr = pytest.importorskip("zarr")
make = import_tool("make_causal_sets")
TASKS = ["kind", "flat"]
TRAIN = """--num_epochs 2 --batch_size 10 --hidden_dim 8 --head_dim 8 --device cpu
    --tasks kind flat --targets root"""

# ---- Sets, and stores of them --------------------------------------------------------------------

SETS = 30
KIND = np.resize([3, 7], SETS)
FLAT = np.resize([0, -1, 1, -1], SETS)  # of kind 7 it is not known


def matrix_of(packed, n):
    return np.unpackbits(packed, axis=1, count=n, bitorder="little").T


def draw(count):
    """Bool matrices of 15 rows, of sets with 10 to 14 elements; and these sizes."""
    args = make.parse_args("--out=a --kinds mink2 layered --min_size=10 --max_size=14".split())
    matrices = np.zeros((count, 15, 15), bool)
    sizes = np.zeros(count, int)
    for i in range(count):
        packed, n, *_ = make.make_set(args, i)
        matrices[i, :n, :n] = matrix_of(packed, n)
        sizes[i] = n
    return matrices, sizes


MATRICES, SIZES = draw(SETS)
ORDERS = [matrix[:n, :n] for matrix, n in zip(MATRICES, SIZES, strict=True)]
LINKS = np.array([matrix & (matrix.astype(int) @ matrix == 0) for matrix in MATRICES])
ROOT = np.sqrt(SIZES)  # a target
ALL = {"adjacency_matrix": MATRICES, "atomcount": SIZES, "kind": KIND, "flat": FLAT, "root": ROOT}
BAD = np.ones((10, 10), np.uint8)  # a cycle


def write_arrays(folder, arrays, zarr_format):
    zarr.create_group(folder, zarr_format=zarr_format)
    for name, array in arrays.items():
        array = np.asarray(array)
        chunks = (4, *array.shape[1:]) if array.ndim > 0 else ()
        zarr.create_array(folder / name, data=array, chunks=chunks, zarr_format=zarr_format)


def write(path, zarr_format=2, **changes):
    """Flat arrays with these changes; those that are None are left out."""
    arrays = {name: array for name, array in {**ALL, **changes}.items() if array is not None}
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    else:
        write_arrays(path, arrays, zarr_format)
    return path


def write_grouped(path, zarr_format=2, matrices=MATRICES, name="adj", changes=()):
    """A group for each set, transposed, as Julia writes them. `changes`: {number: its arrays}"""
    zarr.create_group(path, zarr_format=zarr_format)
    for i, n in enumerate(SIZES):
        arrays = {name: matrices[i, :n, :n].T.astype(np.uint8), "kind": KIND[i], "flat": FLAT[i]}
        arrays["root"] = ROOT[i]
        arrays.update(dict(changes).get(i + 1, {}))
        write_arrays(path / f"cset_{i + 1}", arrays, zarr_format)
    return path


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """{name: path}, the same sets in every layout"""
    folder = tmp_path_factory.mktemp("stores")
    groups = write_grouped(folder / "groups.zarr")
    for file in groups.rglob(".zgroup"):  # Julia writes none
        file.unlink()
    gaps = write_grouped(folder / "gaps.zarr", 3, LINKS, "linkmat")
    for i in range(SETS, 0, -1):  # by name cset_14 would come before cset_7
        (gaps / f"cset_{i}").rename(gaps / f"cset_{7 * i}")
    more = {name: np.concatenate([array, array[:3]]) for name, array in ALL.items()}
    more["cset_size"] = more.pop("atomcount").astype(float)
    write(folder / "more.zarr", 3, **more, atomcount=None, num_samples=np.array([SETS]))
    for name, rows in {"first": slice(12), "second": slice(12, SETS)}.items():
        arrays = {key: array[rows] for key, array in ALL.items()}
        arrays.update(adjacency_matrix=None, link_matrix=LINKS[rows])
        within = write(folder / "no_suffix" / name, **arrays)
    (within / "not_needed").mkdir()
    (within / "not_needed" / ".zarray").write_text("no array that zarr can open")
    write(folder / "transposed.npz", adjacency_matrix=MATRICES.transpose(0, 2, 1))
    return {path.name: path for path in folder.iterdir()}


def test_every_layout_set_by_set(stores):
    expected = [script.describe({"adjacency_matrix": order}) for order in ORDERS]
    for path in stores.values():
        data = load(path)
        (folder,) = path.parent.glob("cache/sets-*")
        for name in script.ARRAYS:
            own = b"".join(described[name].tobytes() for described in expected)
            assert (folder / f"{name}.bin").read_bytes() == own, (path, name)
        assert np.array_equal(data.labels[:, 0], KIND == 7), path
        assert np.array_equal(data.labels[:, 1], np.where(FLAT < 0, np.nan, FLAT), True), path
        shutil.rmtree(folder)


def load(path, *options):
    """The data of a run with these options."""
    words = [f"--data={path}", f"--cache_dir={path.parent}/cache", "--tasks", *TASKS, *options]
    args = parse_arguments(script, *words)
    return script.CausalSets(script.prepare(args), args)


def test_a_reading_that_was_stopped_goes_on(stores, tmp_path, monkeypatch):
    """It does not read again what it has read."""
    path = shutil.copytree(stores["groups.zarr"], tmp_path / "a.zarr")
    whole = load(stores["groups.zarr"])
    plain = script.describe
    calls = []

    def describe(values):
        calls.append(values)
        if len(calls) == 11:
            raise KeyboardInterrupt
        return plain(values)

    monkeypatch.setattr(script, "describe", describe)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: [])  # this process reads
    with pytest.raises(KeyboardInterrupt):
        load(path)
    assert load(path).hash == whole.hash
    assert len(calls) == 11 + 20
    assert len(list(tmp_path.glob("cache/*-*"))) == 1


NONE = math.nan
LABELS = {  # labels of three sets in turn: the classes, and the labels' numbers
    "names.npz": ([" tree ", "", "antichain"], ["antichain", "tree"], [1, NONE, 0]),
    "bytes.zarr": (np.array(["tree", " ", "bee"], "S"), ["bee", "tree"], [1, NONE, 0]),
    "variable.zarr": (np.array(["b", "", "a"], np.dtypes.StringDType()), ["a", "b"], [1, NONE, 0]),
    "mixed.npz": (["tree", "-1", " 12"], ["12", "tree"], [1, NONE, 0]),
    "floats.zarr": ([3.0, NONE, 12.0], ["3", "12"], [0, NONE, 1]),
}


@pytest.mark.parametrize("name", LABELS)
def test_labels(name, tmp_path):
    """Names in the order of the alphabet, an empty name is none; texts of numbers are numbers."""
    values, classes, numbers = LABELS[name]
    data = load(write(tmp_path / name, kind=np.tile(values, SETS // 3)))
    assert data.classes == {"kind": classes, "flat": ["0", "1"]}
    assert np.array_equal(data.labels[:, 0], numbers * (SETS // 3), equal_nan=True)


def test_targets(tmp_path):
    """Numbers or their texts; NaN is not known. Standardized over what is trained on."""
    sizes = SIZES.astype(float)
    sizes[4] = np.nan
    path = write(tmp_path / "a.npz", x=sizes, text=sizes.astype(str))
    data = load(path, "--targets", "x", "text")
    train = data.part("train")
    batch = data.make_batch(np.arange(SETS), train)
    for column in (2, 3):
        assert np.array_equal(data.labels[:, column], sizes, equal_nan=True)
        standardized = (sizes - np.nanmean(sizes[train])) / np.nanstd(sizes[train])
        assert np.allclose(batch.labels[:, column], np.nan_to_num(standardized), atol=1e-6)
        assert batch.weights[:, column].tolist() == (~np.isnan(sizes)).tolist()
        assert batch.totals[column] == np.count_nonzero(~np.isnan(sizes[train]))
    sizes[3] = np.inf
    check_refused("set 3: x is inf", load, write(tmp_path / "b.npz", x=sizes), "--targets", "x")


# ---- What is refused -----------------------------------------------------------------------------


PAIRS = {"adjacency_matrix": None, "link_pairs": np.eye(3)[:, :2], "link_counts": 2 * KIND**0}
REFUSED = {  # name: what writes it, and a part of the one line
    "missing.npz": (lambda path: None, "--data"),
    "text.npz": (lambda path: path.write_text("no arrays"), "no .npz file"),
    "empty.zarr": (lambda path: path.mkdir(), "none of adjacency_matrix, adj, link_matrix"),
    "objects.npz": (partial(write, kind=np.array([None] * SETS)), "kind is an array of objects"),
    # without sizes the padding would be read as elements
    "sizes.zarr": (partial(write, atomcount=None), "expected atomcount or cset_size"),
    "short.npz": (partial(write, kind=np.ones(SETS - 1)), "kind has shape (29,); adjacency"),
    "one.npz": (partial(write, kind=np.ones(SETS, int)), "kind: too few labels in the train part"),
    "no_label.npz": (partial(write, kind=None), "flat, root; expected kind (of --tasks or --"),
    "counts.npz": (partial(write, **PAIRS), "link_pairs has shape (3, 2); link_counts needs (60,"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_stores_that_are_refused(name, tmp_path):
    make_file, text = REFUSED[name]
    make_file(tmp_path / name)
    with pytest.raises(script.InputError) as raised:
        load(tmp_path / name)
    assert text in str(raised.value)
    assert "\n" not in str(raised.value)


CHAIN = np.triu(np.ones((3, 3)), 1)
NO_ORDERS = [  # arrays of a set: a part of the message
    ({"adj": np.diag([1, 0, 0]) + CHAIN}, "pairs with i == j"),
    ({"linkmat": np.array([[0, 1, 0], [0, 0, 0], [0, 1, 0]])}, "not sorted, such as by the"),
    ({"adj": np.diag([1, 1], 1)}, "not transitive; links alone go under link_matrix"),
    ({"linkmat": CHAIN}, "has pairs besides links"),
    ({"adj": 2 * CHAIN}, "expected 0 and 1, and only 0 beyond 3"),
    ({"adj": np.zeros((3, 4))}, "3 elements in adj of shape (3, 4)"),
    ({"adj": CHAIN, "atomcount": 2}, "only 0 beyond 2 elements"),
    ({"adj": CHAIN, "atomcount": 4}, "4 elements"),
    ({"adj": CHAIN, "atomcount": 2.5}, "expected a whole number"),
    ({"adj": np.zeros((4, 4))}, "no pairs at all"),
    ({"link_pairs": np.array([[0, 3]]), "atomcount": 3}, "0 <= i < j < 3"),
    ({"link_pairs": np.array([[1, 0]]), "atomcount": 3}, "0 <= i < j < 3"),
    ({"link_pairs": np.zeros((0, 2), int), "atomcount": 3}, "link_pairs has none"),
    ({"link_pairs": np.array([[0, 1]])}, "expected atomcount"),
]


@pytest.mark.parametrize(("arrays", "text"), NO_ORDERS)
def test_what_is_no_order(arrays, text):
    with pytest.raises(ValueError) as raised:
        script.describe(arrays)
    assert text in str(raised.value)


def test_damaged_sets_are_listed_and_may_be_left_out(tmp_path, caplog):
    changes = {5: {"adj": BAD}, 21: {"kind": 0.5}}
    path = write_grouped(tmp_path / "a.zarr", changes=changes)
    shutil.rmtree(path / "cset_23" / "flat")
    with pytest.raises(script.InputError, match="3 bad sets; --skip_bad_data") as raised:
        load(path)
    expected = ["cset_5: adj has pairs with i == j", "cset_21: kind is 0.5"]
    expected.append("cset_23: found the arrays adj, kind, root; expected flat (of --tasks)")
    for line, start in zip(str(raised.value).splitlines()[1:4], expected, strict=True):
        assert line.startswith(f"  {path}/{start}")
    data = load(path, "--skip_bad_data", *"--split 0.4 0.3 0.3".split())
    assert f"3 bad sets are left out:\n  {path}/cset_5: adj has pairs" in caplog.text
    assert data.sizes.tolist() == np.delete(SIZES, [4, 20, 22]).tolist()


def test_copies_lie_in_one_part(stores, tmp_path, caplog):
    """Also where one is written as links, or transposed as by Julia. They are counted."""
    first = write(tmp_path / "first.npz", **{name: array[:10] for name, array in ALL.items()})
    paths = [first, stores["gaps.zarr"], stores["transposed.npz"]]
    caplog.set_level("INFO")
    for seed in range(5):
        split = ["--split", "0.4", "0.3", "0.3", f"--split_seed={seed}", "--tasks", "kind"]
        parts = load(first, *split, "--data", *map(str, paths)).split
        assert np.array_equal(parts[:10], parts[10:20])
        assert np.array_equal(parts[10:40], parts[40:])
        assert np.bincount(parts[10:40]).tolist() == [12, 9, 9]  # the shares are of the originals
    assert "40 sets are copies, such as set 10" in caplog.text


def test_data_are_read_once(tmp_path, monkeypatch):
    """And again when they have changed, or for other labels."""
    path = write(tmp_path / "a.npz")
    first = load(path)
    monkeypatch.setattr(script, "list_units", None)
    assert load(path, "--split_seed=3").hash == first.hash
    with pytest.raises(script.InputError):
        load(path, "--tasks=kind")
    write(path)
    with pytest.raises(script.InputError):
        load(path)


# ---- From a store over training to predictions ---------------------------------------------------


def predict(out, *words):
    """(rows of the CSV file, what is said)"""
    said = call_script("tools/predict_causal_sets", *words, "--out", out)
    with open(out, newline="") as file:
        return [*csv.DictReader(file)], said


@pytest.fixture(scope="module")
def trained(stores, tmp_path_factory):
    """The folder of a run on two stores, 60 sets."""
    out = tmp_path_factory.mktemp("trained")
    paths = [stores["groups.zarr"], stores["transposed.npz"]]
    words = ["--data", *paths, "--output_dir", out / "run", "--cache_dir", out / "cache"]
    call_script("run_train_quantumgrav_ddp", *words, *TRAIN.split())
    return out / "run"


def test_predictions_of_the_test_sets(trained, tmp_path):
    rows, said = predict(tmp_path / "a.csv", trained / "best.pt")
    found = np.load(trained / "predictions.npz")
    test = Run(trained).summary["test"]
    assert f"kind loss={test['kind/loss']:.4f} accuracy={test['kind/accuracy']:.4f}" in said
    assert f"mae={test['root/mae']:.4f} rmse={test['root/rmse']:.4f}" in said
    columns = [found[name] for name in ("ids", "logp_kind", "root")]
    for row, i, logp, size in zip(rows, *columns, strict=True):
        # of two stores
        assert row["set"].endswith(f"cset_{i + 1}" if i < SETS else f": set {i - SETS}")
        assert row["part"] == "test"
        chances = [float(row["kind_3"]), float(row["kind_7"])]
        assert np.allclose(chances, np.exp(logp), rtol=1e-4)
        assert row["kind"] == ("3" if logp[0] > logp[1] else "7")
        assert float(row["root"]) == pytest.approx(size, rel=1e-4)


def test_columns_of_one_name(trained, tmp_path):
    """None is lost: the later one gets another name, which is said."""
    path = write(tmp_path / "a.npz")
    rows, _ = predict(tmp_path / "a.csv", trained / "best.pt", path)
    state = torch.load(trained / "best.pt", weights_only=True)
    state["data"]["classes"] = {"kind": ["label", "7"], "part": ["0", "1"], "kind_7": []}
    torch.save(state, tmp_path / "odd.pt")
    odd, said = predict(tmp_path / "b.csv", tmp_path / "odd.pt", path)
    assert "two columns would be called kind_7: the later one is kind_7_" in said
    names = {"kind_label_": "kind_3", "kind_7": "kind_7", "part_0": "flat_0", "part_": "flat"}
    for name, before in {**names, "kind_7_": "root"}.items():
        assert [row[name] for row in odd] == [row[before] for row in rows]


def test_predictions_of_new_sets(trained, tmp_path):
    """Without labels, and with: the same probabilities. The metrics are of sets that were neither
    trained nor validated on: the test sets of the run, and 10 that it has not."""
    path = write_grouped(tmp_path / "b.zarr", changes={5: {"adj": BAD}})
    for folder in [*path.glob("*/kind"), *path.glob("*/flat")]:
        shutil.rmtree(folder)
    alone = shutil.copy(trained / "best.pt", tmp_path)  # without split.npz
    rows, said = predict(tmp_path / "b.csv", alone, path, "--skip_bad_data")
    assert f"  {path}/cset_5: adj has pairs" in said and "accuracy" not in said
    assert "it is not known which of these sets were trained on" in said

    matrices, sizes = draw(SETS + 10)
    labels = {name: np.resize(ALL[name], SETS + 10) for name in TASKS}
    labels["root"] = np.sqrt(sizes)
    new = write(tmp_path / "c.npz", adjacency_matrix=matrices, atomcount=sizes, **labels)
    labelled, said = predict(tmp_path / "c.csv", trained / "best.pt", new, "--labels", *labels)
    split = np.load(trained / "split.npz")["split"]
    parts = [script.PARTS[number] for number in split[:SETS]] + [""] * 10
    assert [row["part"] for row in labelled] == parts
    assert f"{parts.count('train')} of 40 sets are in the train part of the run" in said
    tested = [row for row in labelled if row["part"] in ("", "test")]
    assert f"kind: {len(tested)} of the 40 sets with a label are neither" in said
    accuracy = np.mean([row["kind"] == row["kind_label"] for row in tested])
    assert f"accuracy={accuracy:.4f}" in said

    for row, i in zip(rows, np.delete(np.arange(SETS), 4), strict=True):
        other = labelled[i]
        assert row["set"] == f"{path}/cset_{i + 1}" and other["set"] == f"{new}: set {i}"
        assert other["kind_label"] == str(KIND[i]) and row["kind_label"] == ""
        assert other["flat_label"] == {-1: "", 0: "0", 1: "1"}[FLAT[i]]
        for name in ("kind_3", "kind_7", "flat_0", "flat_1", "root"):
            assert float(row[name]) == pytest.approx(float(other[name]), rel=1e-4)


UNPREDICTABLE = {  # words; what is said
    "text.pt new.npz": "text.pt: UnpicklingError; expected best.pt, step_N.pt or",
    "best.pt new.npz --out=text.pt": "text.pt exists: expected a new file",
    "best.pt --labels kind": "are of SETS, and none are given",
    "best.pt new.npz --labels x": "the network has kind, flat, root",
    "best.pt other.npz --labels kind": "knows 3, 7, but not 10: leave out --labels kind",
    "changed.pt": "changed since the network was trained",
}


def test_what_cannot_be_predicted(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "new.npz")
    write(tmp_path / "other.npz", kind=np.arange(SETS) + 3)
    (tmp_path / "text.pt").write_text("no network")
    state = torch.load(shutil.copy(trained / "best.pt", tmp_path), weights_only=True)
    state["args"]["data_hash"] = "of other data"
    torch.save(state, tmp_path / "changed.pt")
    for words, said in UNPREDICTABLE.items():
        check_refusal(f"predict_causal_sets --out=new.csv {words}", said)


# ---- Theory --------------------------------------------------------------------------------------

KINDS = [*make.KINDS, "curved"]
INTERVALS = [script.STATISTICS.index(f"intervals_of_{k}") for k in range(11)]


def make_sets(kind, n, count=1, more=""):
    args = make.parse_args(f"--out=a --kinds={kind} --min_size={n} --max_size={n} {more}".split())
    return [make.make_set(args, i) for i in range(count)]


def assert_mean(found, expected, share):
    """It is within 5 standard errors. If they are no small share of it the test is not sharp."""
    errors = np.std(found, axis=0, ddof=1) / len(found) ** 0.5
    assert np.all(errors < share * expected)
    assert np.all(abs(np.mean(found, axis=0) - expected) < 5 * errors)


@pytest.mark.parametrize(("d", "share"), [(2, 1 / 2), (3, 8 / 35), (4, 1 / 10)])
def test_sprinklings_have_as_many_related_pairs_as_meyer_says(d, share):
    rng = np.random.default_rng(d)
    orders = [make.sprinkle(rng, 40, d) for _ in range(1250 * (d - 1))]
    assert_mean(list(map(make.ordering_fraction, orders)), share, 0.02)


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


def test_intervals_of_large_sets_are_counted_in_a_sample():
    n = 8000
    shares = []
    for seed in range(5):
        [(links, *_)] = make_sets("mink2", n, more=f"--layout=links --seed={seed}")
        assert len(links) == pytest.approx((n + 1) * sum(1 / np.arange(1, n + 1)) - 2 * n, rel=0.05)
        numbers = script.describe({"link_pairs": links, "atomcount": n})["statistics"]
        shares.append(numbers[INTERVALS][0] / len(links))
    assert_mean(shares, 1, 0.02)


def test_percolation_has_as_many_pairs_as_a_sprinkling():
    errors = []
    for seed in range(100):
        rng = np.random.default_rng(seed)
        sprinkled = make.sprinkle(rng, 48, int(rng.integers(2, 5)))
        order = make.make_order("percolation", np.random.default_rng(seed), 48)
        errors.append(abs(make.ordering_fraction(order) - make.ordering_fraction(sprinkled)))
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
    make.main([*options, f"--out={path}", "--workers=2"])
    assert [file.name for file in path.parent.iterdir()] == ["sets.npz"]
    for option in ("--max_size=40000", "--min_size=17", f"--out={path}"):
        said = call_script("tools/make_causal_sets", *options, option, status=2)
        assert len(said.splitlines()) == 1 and option.partition("=")[2] in said

    arrays = np.load(path)
    args = make.parse_args([*options, "--samples=9000"])
    for i, matrix in enumerate(arrays["adjacency_matrix"]):
        packed, size, kind, curvature = make.make_set(args, i)
        order = matrix_of(packed, size)
        assert order.any()  # the script refuses others
        assert np.array_equal(np.argwhere(matrix), np.argwhere(order))
        dim = make.SPRINKLINGS.get(kind, np.nan)
        expected = [size, kind, dim, dim > 0, curvature if kind == "curved" else 0 * dim]
        names = ("atomcount", "cls", "dim", "manifold", "curvature")
        np.testing.assert_equal([arrays[name][i] for name in names], expected)
    assert set(arrays["atomcount"]) == set(range(6, 17))
    args.seed = 1
    assert not np.array_equal(make.make_set(args, i)[0], packed)

    make.main([*options, "--layout=links"])
    assert {*np.load(other)} - {*arrays} == {"link_pairs", "link_counts"}
    found = []
    for file in (path, other):
        words = [f"--data={file}", f"--cache_dir={tmp_path}/cache", "--tasks", "cls", "manifold"]
        folder = script.prepare(parse_arguments(script, *words, "--targets", "dim", "curvature"))
        found.append({file.stem: file.read_bytes() for file in folder.glob("*.[bn]*")})
        found[-1]["meta"] = json.loads((folder / "meta.json").read_text())
        assert len(found[-1]["meta"].pop("names")) == 150
    assert found[0] == found[1] and found[0].keys() > script.ARRAYS.keys()
