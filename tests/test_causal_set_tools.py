"""tools/convert_causal_sets.py, tools/predict_causal_sets.py: stores of every layout, set by set;
what is no set, by name; and the way from a store over training to predictions."""

import csv
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import call_script, import_tool

zarr = pytest.importorskip("zarr")
make = import_tool("make_causal_sets")
convert = import_tool("convert_causal_sets")
SETS = 30
ROOM = 15  # elements in padded arrays; the sets have 10 to 14
TRAIN = "--num_epochs 2 --batch_size 10 --hidden_dim 8 --head_dim 8 --device cpu --tasks kind flat"


# --------------------------------------------------------------------------------------------------
# Sets, and stores of them


def random_set(i):
    """(order, {label: value}): in turn of kind 3, flat 0 or 1, and of kind 7, where flat is not
    known."""
    rng = np.random.default_rng(i)
    n = int(rng.integers(10, 15))
    if i % 2 == 0:
        return make.make_order("mink2", rng, n), {"kind": 3, "flat": i // 2 % 2}
    return make.make_order("layered", rng, n), {"kind": 7, "flat": -1}


ORIGINALS = [random_set(i) for i in range(SETS)]


def put(folder, name, array, zarr_format, chunks=None):
    array = np.asarray(array)
    options = {"shape": array.shape, "dtype": array.dtype, "chunks": chunks or array.shape}
    store = zarr.create_array(folder / name, zarr_format=zarr_format, **options)
    store[...] = array


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
    return path


def flat_arrays(size="atomcount", matrix="adjacency_matrix", room=SETS):
    orders = [order for order, _ in ORIGINALS]
    if matrix == "link_matrix":
        orders = [make.links(order) for order in orders]
    arrays = {matrix: np.zeros((room, ROOM, ROOM), np.float32), size: np.zeros(room, np.int32)}
    for i, order in enumerate(orders):
        arrays[matrix][i, : len(order), : len(order)] = order
        arrays[size][i] = len(order)
    for name in ("kind", "flat"):
        values = [labels[name] for _, labels in ORIGINALS]
        arrays[name] = np.array(values + [0] * (room - SETS), np.int32)
    return arrays


def write_flat(path, arrays, zarr_format=2, group=""):
    zarr.create_group(path, zarr_format=zarr_format)
    if group:
        zarr.create_group(path / group, zarr_format=zarr_format)
    for name, array in arrays.items():
        put(path / group, name, array, zarr_format, chunks=(4, *array.shape[1:]))
    return path


def forget_groups(path):
    """Remove the files that say of folders that they are groups."""
    for file in [*path.rglob(".zgroup"), *path.rglob("zarr.json")]:
        if file.name == ".zgroup" or json.loads(file.read_text())["node_type"] == "group":
            file.unlink()


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """{name: path}, the same sets in every layout"""
    folder = tmp_path_factory.mktemp("stores")
    transposed = flat_arrays()
    transposed["adjacency_matrix"] = transposed["adjacency_matrix"].transpose(0, 2, 1)
    more = {**flat_arrays(room=SETS + 3), "num_samples": np.array([SETS])}
    links = flat_arrays("cset_size", "link_matrix")
    paths = []
    for number in (2, 3):  # zarr format
        paths.append(write_grouped(folder / f"grouped{number}.zarr", number))
        paths.append(write_grouped(folder / f"linkmat{number}.zarr", number, ["linkmat"]))
        paths.append(write_grouped(folder / f"no_root{number}.zarr", number))
        forget_groups(paths[-1])
        paths.append(write_flat(folder / f"flat{number}.zarr", flat_arrays(), number))
        paths.append(write_flat(folder / f"links{number}.zarr", links, number))
        paths.append(write_flat(folder / f"transposed{number}.zarr", transposed, number))
        paths.append(write_flat(folder / f"in_group{number}.zarr", flat_arrays(), number, "all"))
        paths.append(write_flat(folder / f"more{number}.zarr", more, number))
        paths.append(write_flat(folder / f"flat_no_root{number}.zarr", flat_arrays(), number))
        forget_groups(paths[-1])
    paths.append(folder / "flat.npz")
    np.savez_compressed(paths[-1], **flat_arrays())
    return {path.stem: path for path in paths}


def test_every_layout_set_by_set(stores):
    args = SimpleNamespace(sources=[*stores.values()], skip_bad_data=False, workers=2)
    sets, problems = convert.read_sources(args, ["kind", "flat"])
    assert len(stores) == 19 and len(sets) == 19 * SETS and not problems
    for number, (path, name, arrays) in enumerate(sets):
        assert path == args.sources[number // SETS]
        i = number % SETS
        assert name == (f"cset_{i + 1}" if (path / "cset_1").exists() else f"set {i}")
        order, labels = ORIGINALS[i]
        expected = make.describe_set(order, [labels["kind"], labels["flat"]])
        for key, array in expected.items():
            assert np.array_equal(arrays[key], array), (path, i, key)


# --------------------------------------------------------------------------------------------------
# What is no set


def chain(n):
    return np.triu(np.ones((n, n)), 1)


NOT_AN_ORDER = {  # arrays of a set: a part of the message
    "cycle": ({"adj": chain(3) + chain(3).T * [[0, 0, 1], [0, 0, 0], [1, 0, 0]]}, "has a cycle"),
    "itself": ({"adj": np.diag([1, 0, 0]) + chain(3)}, "has a cycle"),
    "unsorted": ({"linkmat": np.array([[0, 1, 0], [0, 0, 0], [0, 1, 0]])}, "not sorted in time"),
    "not transitive": ({"adj": np.diag([1, 1], 1)}, "not transitive"),
    "no links": ({"linkmat": chain(3)}, "nothing between them"),
    "numbers": ({"adj": 2 * chain(3)}, "other entries than 0 and 1"),
    "no number": ({"adj": np.nan * chain(3)}, "other entries than 0 and 1"),
    "shape": ({"adj": np.zeros((3, 4))}, "shape (3, 4)"),
    "one element": ({"adj": np.zeros((1, 1))}, "expected 2 to 32767"),
    "beyond": ({"adj": chain(4), "atomcount": 3}, "pairs beyond its 3 elements"),
    "too large": ({"adj": chain(4), "atomcount": 5}, "5 elements"),
    "missing": ({"adj": np.zeros((4, 4))}, "no pairs at all"),
}


@pytest.mark.parametrize("case", NOT_AN_ORDER)
def test_what_is_no_order(case):
    arrays, text = NOT_AN_ORDER[case]
    with pytest.raises(ValueError) as raised:
        convert.order_of(arrays)
    assert text in str(raised.value)


def test_labels():
    values = [3, 3.0, True, np.int8(3), np.array([3]), -5]
    assert [convert.label_of(value, "kind") for value in values] == [3, 3, 1, 3, 3, -1]
    for value in (0.5, np.nan, np.inf, "a"):
        with pytest.raises(ValueError, match="expected a whole number"):
            convert.label_of(value, "kind")


@pytest.fixture
def refusal(monkeypatch, capsys):
    """What the converter says when it ends with status 2."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["convert_causal_sets.py", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            convert.main()
        assert ended.value.code == 2
        return capsys.readouterr().err

    return call


def run(tool, *words):
    """What it says."""
    status, text = call_script(f"tools/{tool}", *words, "--workers=1")
    assert status == 0, text
    return text


def test_damaged_sets_are_listed_and_may_be_left_out(refusal, tmp_path):
    sets = [(order.copy(), labels) for order, labels in ORIGINALS]
    sets[4][0][9, 0] = True  # a cycle, in most sets
    sets[4][0][0, 9] = True
    sets[20] = (sets[20][0], {**sets[20][1], "kind": 0.5})
    paths = [write_grouped(tmp_path / "a.zarr", matrices=["adj"], sets=sets)]
    paths.append(write_flat(tmp_path / "b.zarr", flat_arrays()))
    chunk = tmp_path / "b.zarr" / "adjacency_matrix" / "2.0.0"  # sets 8 to 11
    assert chunk.exists()
    chunk.write_bytes(b"damaged")

    words = [*paths, "--labels", "kind", "--out", tmp_path / "out"]
    text = refusal(*words)
    lines = [line.strip() for line in text.splitlines()[1:]]
    starts = [f"{tmp_path}/a.zarr: cset_{i}: " for i in (5, 21)]
    starts += [f"{tmp_path}/b.zarr: set {i}: " for i in (8, 9, 10, 11)]
    assert text.startswith("convert_causal_sets.py: 6 of 60 sets cannot be read")
    for line, start in zip(lines, starts, strict=True):
        assert line.startswith(start)
    assert "cycle" in lines[0] and "whole number" in lines[1]
    assert not (tmp_path / "out").exists()

    run("convert_causal_sets", *words, "--skip_bad_data")
    assert (tmp_path / "out" / "skipped.txt").read_text().splitlines() == lines
    sizes = np.diff(np.load(tmp_path / "out" / "node_ptr.npy"))
    kept = [i for i in range(60) if i not in (4, 20, 38, 39, 40, 41)]
    assert [len(ORIGINALS[i % SETS][0]) for i in kept] == sizes.tolist()


WRONG = {  # what is given: a part of the message
    "good.zarr padded.zarr --labels kind": "padded.zarr: has adjacency_matrix; expected atomcount",
    "padded.npz --labels kind": "padded.npz: has adjacency_matrix; expected atomcount or cset_size",
    "missing.zarr --labels kind": "missing.zarr",
    "good.zarr --labels colour": "colour",
    "good.zarr --labels one": "--labels one: expected 2 values or more from 0 on, found ",
    "empty --labels kind": "has nothing; expected",
    "text.npz --labels kind": "text.npz: ",
    "cut.npz --labels kind": "cut.npz: ",
    "nothing.npz --labels kind": "nothing.npz: ",
    "good.zarr --labels kind --split 0.9 0.1 0.1": "with the sum 1",
    "good.zarr --labels kind --split 0.98 0.01 0.01": "too few",
    "good.zarr --labels kind --out full": "full holds a data set",
}


def test_what_cannot_be_is_one_line(refusal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_flat(tmp_path / "good.zarr", {**flat_arrays(), "one": np.ones(SETS, int)})
    # without sizes the padding would be read as elements
    padded = {"adjacency_matrix": flat_arrays()["adjacency_matrix"]}
    write_flat(tmp_path / "padded.zarr", padded)
    np.savez(tmp_path / "padded.npz", **padded)
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "meta.json").write_text("{}")
    (tmp_path / "text.npz").write_text("text")
    (tmp_path / "cut.npz").write_bytes((tmp_path / "padded.npz").read_bytes()[:-100])
    (tmp_path / "nothing.npz").write_bytes(b"")
    for words, text in WRONG.items():
        said = refusal("--out=out", "--workers=1", *words.split())
        assert text in said, words
        assert len(said.splitlines()) == 1
        assert not (tmp_path / "out").exists()

    monkeypatch.setitem(sys.modules, "zarr", None)
    convert.open_source.cache_clear()
    assert "pip install zarr" in refusal("good.zarr", "--labels=kind", "--out=out")


# --------------------------------------------------------------------------------------------------
# From a store over training to predictions


def predict(out, *words):
    """(rows of the CSV file, what is said)"""
    said = run("predict_causal_sets", *words, "--out", out)
    with open(out, newline="") as file:
        return [*csv.DictReader(file)], said


def test_convert_train_predict(stores, tmp_path):
    paths = [stores["grouped2"], stores["links3"], stores["flat"]]
    folder = tmp_path / "sets"
    labels = ["--labels", "kind", "flat"]
    said = run("convert_causal_sets", *paths, *labels, "--out", folder)
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["classes"] == {"kind": ["3", "7"], "flat": ["0", "1"]}
    assert f"{folder}: 68 sets to train, 9 to validate, 13 to test" in said

    folders = ["--data", folder, "--output_dir", tmp_path / "run"]
    status, text = call_script("run_train_quantumgrav_ddp", *folders, *TRAIN.split())
    assert status == 0, text

    # the folder that it was trained on: the test sets, with the figures of the run
    best = tmp_path / "run" / "best.pt"
    of_folder, said = predict(tmp_path / "a.csv", best, folder)
    expected = np.flatnonzero(np.load(folder / "split.npy") == 2)
    assert [int(row["set"]) for row in of_folder] == expected.tolist()
    test = json.loads((tmp_path / "run" / "summary.json").read_text())["test"]
    line = next(line for line in said.splitlines() if line.startswith("kind, "))
    assert f"accuracy={test['kind/accuracy']:.4f}" in line
    assert f"loss={test['kind/loss']:.4f}" in line

    # a store: its sets are the first ones of the folder
    of_store, _ = predict(tmp_path / "b.csv", best, paths[0], "--labels", "flat", "kind")
    assert len(of_store) == SETS
    for i, row in enumerate(of_store):
        labels = ORIGINALS[i][1]
        assert (row["source"], row["set"]) == (str(paths[0]), f"cset_{i + 1}")
        assert row["kind_label"] == str(labels["kind"])
        assert row["flat_label"] == {-1: "", 0: "0", 1: "1"}[labels["flat"]]
        chances = {name: float(row[f"kind_{name}"]) for name in ("3", "7")}
        assert sum(chances.values()) == pytest.approx(1, abs=1e-5)
        assert row["kind"] == max(chances, key=chances.get)
    both = [row for row in of_folder if int(row["set"]) < SETS]
    assert both
    for row in both:
        for name in ("kind_3", "kind_7", "flat_0", "flat_1"):
            found = of_store[int(row["set"])][name]
            assert float(row[name]) == pytest.approx(float(found), rel=1e-4)

    # what cannot be
    wrong = {
        "expected best.pt": [tmp_path / "missing.pt", paths[0], "--out", tmp_path / "d.csv"],
        "exists": [best, paths[0], "--out", tmp_path / "a.csv"],
        "has the tasks kind, flat": [best, paths[0], "--labels", "x", "--out", tmp_path / "d.csv"],
        "has nothing": [best, tmp_path / "run", "--out", tmp_path / "d.csv"],
    }
    for text, words in wrong.items():
        status, said = call_script("tools/predict_causal_sets", *words)
        assert status == 2 and text in said
        assert len(said.splitlines()) < 3
    assert not (tmp_path / "d.csv").exists()
