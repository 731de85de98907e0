"""tools/convert_causal_sets.py, tools/predict_causal_sets.py: stores of every layout, set by set;
what is no set, by name; and the way from a store over training to predictions."""

import csv
import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

zarr = pytest.importorskip("zarr")

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
make = importlib.import_module("make_causal_sets")
convert = importlib.import_module("convert_causal_sets")
SETS = 30
ROOM = 15  # elements in padded arrays; the sets have 10 to 14
TRAIN = "--num_epochs 2 --batch_size 10 --hidden_dim 8 --head_dim 8 --device cpu --tasks kind flat"


# --------------------------------------------------------------------------------------------------
# Sets, and stores of them


def random_set(i):
    """(order, {label: value}): kinds 3 and 7; flat 0, 1 or, of one kind, none."""
    rng = np.random.default_rng(i)
    kind = ["mink2", "layered"][i % 2]
    order = make.make_order(kind, rng, int(rng.integers(10, 15)), 0)
    return order, {"kind": [3, 7][i % 2], "flat": [i // 2 % 2, -1][i % 2]}


ORIGINALS = [random_set(i) for i in range(SETS)]


def put(folder, name, array, zarr_format, chunks=None):
    array = np.asarray(array)
    chunks = chunks or array.shape
    store = zarr.create_array(
        folder / name, shape=array.shape, dtype=array.dtype, chunks=chunks, zarr_format=zarr_format
    )
    store[...] = array


def forget_groups(path):
    """Remove the files that say of folders that they are groups."""
    for file in [*path.rglob(".zgroup"), *path.rglob("zarr.json")]:
        if file.name == ".zgroup" or json.loads(file.read_text())["node_type"] == "group":
            file.unlink()


def write_grouped(path, zarr_format=2, matrices=("adj", "linkmat"), sets=ORIGINALS):
    """As Julia writes them: transposed."""
    zarr.create_group(path, zarr_format=zarr_format)
    for i, (order, labels) in enumerate(sets, start=1):
        group = path / f"cset_{i}"
        zarr.create_group(group, zarr_format=zarr_format)
        found = {"adj": order.T, "linkmat": make.links(order).T}
        for name in matrices:
            put(group, name, found[name].astype(np.uint8), zarr_format)
        for name, value in labels.items():
            put(group, name, value, zarr_format)
        put(group, "in_degrees_link", make.links(order).sum(0), zarr_format)


def padded(matrices):
    whole = np.zeros((len(matrices), ROOM, ROOM), np.float32)
    for i, matrix in enumerate(matrices):
        whole[i, : len(matrix), : len(matrix)] = matrix
    return whole


def flat_arrays(size="atomcount", matrix="adjacency_matrix", sets=ORIGINALS):
    orders = [order for order, _ in sets]
    if matrix == "link_matrix":
        orders = [make.links(order) for order in orders]
    arrays = {matrix: padded(orders)}
    if size:
        arrays[size] = np.array([len(order) for order in orders], np.int32)
    for name in ("kind", "flat"):
        arrays[name] = np.array([labels[name] for _, labels in sets], np.int32)
    return arrays


def write_flat(path, arrays, zarr_format=2, group=""):
    zarr.create_group(path, zarr_format=zarr_format)
    if group:
        zarr.create_group(path / group, zarr_format=zarr_format)
    for name, array in arrays.items():
        put(path / group, name, array, zarr_format, chunks=(4, *array.shape[1:]))


def ragged_arrays(sets=ORIGINALS):
    pairs = [np.argwhere(make.links(order)) for order, _ in sets]
    return {
        "node_ptr": np.cumsum([0, *[len(order) for order, _ in sets]]),
        "edge_ptr": np.cumsum([0, *map(len, pairs)]),
        "edge_index": np.concatenate(pairs).T,
        "y_kind": np.array([labels["kind"] for _, labels in sets]),
        "y_flat": np.array([labels["flat"] for _, labels in sets]),
    }


def write_layout(path, layout):
    name, _, zarr_format = layout.partition(", zarr ")
    number = int(zarr_format or 2)
    if name == "grouped":
        write_grouped(path, number)
    elif name == "grouped, only linkmat":
        write_grouped(path, number, ["linkmat"])
    elif name == "grouped, no root group":
        write_grouped(path, number)
        forget_groups(path)
    elif name == "flat, atomcount":
        write_flat(path, flat_arrays(), number)
    elif name == "flat, cset_size, links":
        write_flat(path, flat_arrays("cset_size", "link_matrix"), number)
    elif name == "flat, transposed":
        arrays = flat_arrays()
        arrays["adjacency_matrix"] = arrays["adjacency_matrix"].transpose(0, 2, 1)
        write_flat(path, arrays, number)
    elif name == "flat, in a group":
        write_flat(path, flat_arrays(), number, group="adjacency_matrix")
    elif name == "flat, no root group":
        write_flat(path, flat_arrays(), number)
        forget_groups(path)
    elif name == "flat, room for more":
        arrays = flat_arrays()
        for key, array in arrays.items():
            arrays[key] = np.concatenate([array, np.zeros_like(array[:3])])
        write_flat(path, {**arrays, "num_samples": np.array([SETS])}, number)
    elif name == "npz, flat":
        np.savez_compressed(path, **flat_arrays())
    elif name == "npz, ragged":
        np.savez(path, **ragged_arrays())


ZARR = ["grouped", "grouped, only linkmat", "grouped, no root group", "flat, atomcount"]
ZARR += ["flat, cset_size, links", "flat, transposed", "flat, in a group", "flat, no root group"]
ZARR += ["flat, room for more"]
LAYOUTS = [f"{name}, zarr {number}" for name in ZARR for number in (2, 3)]
LAYOUTS += ["npz, flat", "npz, ragged"]


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """{layout: path}"""
    folder = tmp_path_factory.mktemp("stores")
    paths = {}
    for layout in LAYOUTS:
        ending = ".npz" if layout.startswith("npz") else ".zarr"
        paths[layout] = folder / (layout.replace(" ", "_").replace(",", "") + ending)
        write_layout(paths[layout], layout)
    return paths


@pytest.fixture(scope="module")
def found(stores):
    """{path: [(name of the set, what is read of it)]}, of all stores at once."""
    sets, problems = convert.read_sources([*stores.values()], ["kind", "flat"], "links", False, 2)
    assert not problems
    by_path = {path: [] for path in stores.values()}
    for path, name, arrays in sets:
        by_path[path].append((name, arrays))
    return by_path


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_set_by_set(stores, found, layout):
    sets = found[stores[layout]]
    assert len(sets) == SETS
    for i, (name, arrays) in enumerate(sets):
        order, labels = ORIGINALS[i]
        assert name == (f"cset_{i + 1}" if layout.startswith("grouped") else f"set {i}")
        expected = make.describe_set(order, [labels["kind"], labels["flat"]], "links")
        for key, array in expected.items():
            assert np.array_equal(arrays[key], array), (i, key)


# --------------------------------------------------------------------------------------------------
# What is no set


def chain(n):
    return np.triu(np.ones((n, n)), 1)


NOT_AN_ORDER = {  # arrays of a set: a part of the message
    "cycle": ({"adj": chain(3) + chain(3).T * [[0, 0, 1], [0, 0, 0], [1, 0, 0]]}, "has a cycle"),
    "itself": ({"adj": np.diag([1, 0, 0]) + chain(3)}, "a cycle: element 0 is before itself"),
    "unsorted": ({"linkmat": np.array([[0, 1, 0], [0, 0, 0], [0, 1, 0]])}, "both triangles"),
    "not transitive": ({"adj": np.diag([1, 1], 1)}, "not transitive"),
    "no links": ({"linkmat": chain(3)}, "nothing between them"),
    "other links": ({"adj": chain(3), "linkmat": chain(3)}, "nothing between them"),
    "numbers": ({"adj": 2 * chain(3)}, "other entries than 0 and 1"),
    "no number": ({"adj": np.nan * chain(3)}, "other entries than 0 and 1"),
    "shape": ({"adj": np.zeros((3, 4))}, "shape (3, 4)"),
    "one element": ({"adj": np.zeros((1, 1))}, "n from 2 to 32767"),
    "beyond": ({"adj": chain(4), "atomcount": 3}, "pairs beyond its 3 elements"),
    "too large": ({"adj": chain(4), "atomcount": 5}, "5 elements"),
    "missing": ({"adj": np.zeros((4, 4))}, "no pairs at all"),
    "two sizes": ({"adj": chain(4), "atomcount": 4, "cset_size": 3}, "two sizes"),
}


@pytest.mark.parametrize("case", NOT_AN_ORDER)
def test_what_is_no_order(case):
    arrays, text = NOT_AN_ORDER[case]
    with pytest.raises(ValueError) as raised:
        convert.order_of(arrays)
    assert text in str(raised.value)


@pytest.mark.parametrize("value", [0.5, np.nan, np.inf, "a"])
def test_what_is_no_label(value):
    with pytest.raises(ValueError, match="expected a whole number"):
        convert.label_of(value, "kind")


def test_labels():
    values = [3, 3.0, True, np.int8(3), np.array([3]), -5]
    assert [convert.label_of(value, "kind") for value in values] == [3, 3, 1, 3, 3, -1]


def run(program, *words):
    command = [sys.executable, ROOT / program, *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)


def refusal(*words):
    done = run("tools/convert_causal_sets.py", *words)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    return done.stderr


def test_padded_stores_without_sizes_are_refused(tmp_path):
    """Their padding would be read as elements."""
    write_flat(tmp_path / "a.zarr", flat_arrays(size=None))
    np.savez(tmp_path / "b.npz", **flat_arrays(size=None))
    paths = [tmp_path / "a.zarr", tmp_path / "b.npz"]
    text = refusal(*paths, "--labels", "kind", "--out", tmp_path / "out")
    for path in paths:
        assert f"{path}: has adjacency_matrix, flat, kind; expected" in text
    assert "atomcount or cset_size" in text
    assert not (tmp_path / "out").exists()


def test_damaged_sets_are_listed_and_may_be_left_out(tmp_path):
    sets = [(order.copy(), labels) for order, labels in ORIGINALS]
    sets[4][0][9, 0] = True  # a cycle, in most sets
    sets[4][0][0, 9] = True
    sets[20] = (sets[20][0], {**sets[20][1], "kind": 0.5})
    write_grouped(tmp_path / "a.zarr", matrices=["adj"], sets=sets)
    write_flat(tmp_path / "b.zarr", flat_arrays())
    chunk = tmp_path / "b.zarr" / "adjacency_matrix" / "2.0.0"  # sets 8 to 11
    assert chunk.exists()
    chunk.write_bytes(b"damaged")

    words = [
        tmp_path / "a.zarr",
        tmp_path / "b.zarr",
        "--labels",
        "kind",
        "--out",
        tmp_path / "out",
    ]
    text = refusal(*words)
    lines = [line.strip() for line in text.splitlines()[1:]]
    starts = [f"{tmp_path}/a.zarr: cset_{i}: " for i in (5, 21)]
    starts += [f"{tmp_path}/b.zarr: set {i}: " for i in (8, 9, 10, 11)]
    assert text.startswith("convert_causal_sets.py: 6 of 60 sets cannot be read")
    for line, start in zip(lines, starts, strict=True):
        assert line.startswith(start)
    assert "cycle" in lines[0] and "whole number" in lines[1]
    assert not (tmp_path / "out").exists()

    done = run("tools/convert_causal_sets.py", *words, "--skip_bad_data")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "skipped.txt").read_text().splitlines() == lines
    sizes = np.diff(np.load(tmp_path / "out" / "node_ptr.npy"))
    kept = [i for i in range(60) if i not in (4, 20, 38, 39, 40, 41)]
    assert [len(ORIGINALS[i % SETS][0]) for i in kept] == sizes.tolist()


WRONG = {  # what is given: a part of the message
    "no such file": (["missing.zarr", "--labels", "kind"], "missing.zarr"),
    "no such label": (["good.zarr", "--labels", "colour"], "colour"),
    "no store": (["empty", "--labels", "kind"], "has nothing; expected"),
    "no npz": (["text.npz", "--labels", "kind"], "text.npz: File is not a zip file"),
    "one class": (["good.zarr", "--labels", "one"], "--labels one: 1 different values"),
    "split": (["good.zarr", "--labels", "kind", "--split", "0.9", "0.1", "0.1"], "with the sum 1"),
    "too few": (["good.zarr", "--labels", "kind", "--split", "0.98", "0.01", "0.01"], "too few"),
    "there": (["good.zarr", "--labels", "kind", "--out", "full"], "full holds a data set"),
    "pointers": (["falls.npz", "--labels", "kind"], "node_ptr: expected 31 numbers"),
    "numbers": (["outside.npz", "--labels", "kind"], "set 0: edge_index outside 0 to"),
}


@pytest.fixture(scope="module")
def wrong(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wrong")
    arrays = flat_arrays()
    write_flat(folder / "good.zarr", {**arrays, "one": np.ones(SETS, int)})
    (folder / "empty").mkdir()
    (folder / "full").mkdir()
    (folder / "full" / "meta.json").write_text("{}")
    (folder / "text.npz").write_text("text")
    arrays = ragged_arrays()
    falls = arrays["node_ptr"].copy()
    falls[3] = 0
    np.savez(folder / "falls.npz", **{**arrays, "node_ptr": falls})
    outside = arrays["edge_index"].copy()
    outside[0, 0] = 99
    np.savez(folder / "outside.npz", **{**arrays, "edge_index": outside})
    return folder


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_one_line(wrong, case):
    words, text = WRONG[case]
    if "--out" not in words:
        words = [*words, "--out", "out"]
    words = [wrong / word if (wrong / word).exists() else word for word in words]
    assert text in refusal(*words)


def test_without_zarr(tmp_path, monkeypatch, capsys):
    write_flat(tmp_path / "a.zarr", flat_arrays())
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(SystemExit):
        convert.open_all([tmp_path / "a.zarr"], ("kind",), tmp_path)
    assert "pip install zarr" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------
# From a store over training to predictions


def read_csv(path):
    with open(path, newline="") as file:
        return [*csv.DictReader(file)]


def test_convert_train_predict(stores, tmp_path):
    paths = [stores["grouped, zarr 2"], stores["flat, cset_size, links, zarr 3"]]
    paths.append(stores["npz, ragged"])
    done = run(
        "tools/convert_causal_sets.py",
        *paths,
        "--labels",
        "kind",
        "flat",
        "--out",
        tmp_path / "sets",
    )
    assert done.returncode == 0, done.stderr
    meta = json.loads((tmp_path / "sets" / "meta.json").read_text())
    assert meta["classes"] == {"kind": ["3", "7"], "flat": ["0", "1"]}
    assert f"--data {tmp_path}/sets --tasks kind flat" in done.stdout

    folders = ["--data", tmp_path / "sets", "--output_dir", tmp_path / "run"]
    done = run("run_train_quantumgrav_ddp.py", *folders, *TRAIN.split())
    assert done.returncode == 0, done.stderr

    # the store and the folder, of which the first sets are those of the store
    best = tmp_path / "run" / "best.pt"
    predict = "tools/predict_causal_sets.py"
    done = run(predict, best, paths[0], "--labels", "flat", "kind", "--out", tmp_path / "a.csv")
    assert done.returncode == 0, done.stderr
    of_store = read_csv(tmp_path / "a.csv")
    done = run(predict, best, tmp_path / "sets", "--part", "all", "--out", tmp_path / "b.csv")
    assert done.returncode == 0, done.stderr
    of_folder = read_csv(tmp_path / "b.csv")
    assert len(of_store) == SETS and len(of_folder) == 3 * SETS
    for i, row in enumerate(of_store):
        labels = ORIGINALS[i][1]
        assert (row["source"], row["set"]) == (str(paths[0]), f"cset_{i + 1}")
        assert row["kind_label"] == str(labels["kind"])
        assert row["flat_label"] == {-1: "", 0: "0", 1: "1"}[labels["flat"]]
        chances = {name: float(row[f"kind_{name}"]) for name in ("3", "7")}
        assert sum(chances.values()) == pytest.approx(1, abs=1e-5)
        assert row["kind"] == max(chances, key=chances.get)
        for name in ("kind_3", "kind_7", "flat_0", "flat_1"):
            assert float(of_folder[i][name]) == pytest.approx(float(row[name]), rel=1e-4)

    # the folder that it was trained on: the test sets, with the figures of the run
    done = run(predict, best, tmp_path / "sets", "--out", tmp_path / "c.csv")
    assert done.returncode == 0, done.stderr
    test = json.loads((tmp_path / "run" / "summary.json").read_text())["test"]
    line = next(line for line in done.stdout.splitlines() if line.startswith("kind, "))
    assert f"accuracy={test['kind/accuracy']:.4f}" in line
    assert f"loss={test['kind/loss']:.4f}" in line
    split = np.load(tmp_path / "sets" / "split.npy")
    assert [int(row["set"]) for row in read_csv(tmp_path / "c.csv")] == np.flatnonzero(
        split == 2
    ).tolist()

    # what cannot be
    wrong = {
        "is not there": [tmp_path / "missing.pt", paths[0], "--out", tmp_path / "d.csv"],
        "exists": [best, paths[0], "--out", tmp_path / "a.csv"],
        "has the tasks kind, flat": [best, paths[0], "--labels", "x", "--out", tmp_path / "d.csv"],
        "has nothing": [best, tmp_path / "run", "--out", tmp_path / "d.csv"],
    }
    for text, words in wrong.items():
        done = run(predict, *words)
        assert done.returncode == 2 and text in done.stderr
        assert len(done.stderr.splitlines()) < 3
    assert not (tmp_path / "d.csv").exists()
