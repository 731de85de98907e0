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
    arrays = {matrix: np.zeros((room, ROOM, ROOM), np.float32)}
    for name in (size, "kind", "flat"):
        arrays[name] = np.zeros(room, np.int32)

    for i, (order, labels) in enumerate(ORIGINALS):
        n = len(order)
        arrays[matrix][i, :n, :n] = make.links(order) if matrix == "link_matrix" else order
        arrays[size][i] = n
        for name, value in labels.items():
            arrays[name][i] = value
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
    return path


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """{name: path}, the same sets in every layout"""
    folder = tmp_path_factory.mktemp("stores")
    arrays = flat_arrays()
    transposed = {**arrays, "adjacency_matrix": arrays["adjacency_matrix"].transpose(0, 2, 1)}
    more = {**flat_arrays(room=SETS + 3), "num_samples": np.array([SETS])}
    links = flat_arrays("cset_size", "link_matrix")
    paths = []
    for number in (2, 3):  # zarr format
        paths.append(write_grouped(folder / f"grouped{number}.zarr", number))
        paths.append(write_grouped(folder / f"linkmat{number}.zarr", number, ["linkmat"]))
        paths.append(forget_groups(write_grouped(folder / f"no_root{number}.zarr", number)))
        paths.append(write_flat(folder / f"links{number}.zarr", links, number))
        paths.append(write_flat(folder / f"transposed{number}.zarr", transposed, number))
        paths.append(write_flat(folder / f"in_group{number}.zarr", arrays, number, "all"))
        paths.append(write_flat(folder / f"more{number}.zarr", more, number))
        paths.append(forget_groups(write_flat(folder / f"flat{number}.zarr", arrays, number)))
    paths.append(folder / "flat.npz")
    np.savez_compressed(paths[-1], **arrays)
    return {path.name: path for path in paths}


def test_every_layout_set_by_set(stores):
    args = SimpleNamespace(sources=[*stores.values()], skip_bad_data=False, workers=2)
    sets, problems = convert.read_sources(args, ["kind", "flat"])
    assert len(stores) == 17 and len(sets) == 17 * SETS and not problems
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


def test_what_is_no_order():
    chain = np.triu(np.ones((3, 3)), 1)
    cycle = chain.copy()
    cycle[2, 0] = 1
    cases = [  # arrays of a set: a part of the message
        ({"adj": cycle}, "has a cycle"),
        ({"adj": np.diag([1, 0, 0]) + chain}, "has a cycle"),
        ({"linkmat": np.array([[0, 1, 0], [0, 0, 0], [0, 1, 0]])}, "not sorted in time"),
        ({"adj": np.diag([1, 1], 1)}, "not transitive"),
        ({"linkmat": chain}, "nothing between them"),
        ({"adj": 2 * chain}, "other entries than 0 and 1"),
        ({"adj": np.zeros((3, 4))}, "shape (3, 4)"),
        ({"adj": np.zeros((1, 1))}, "expected 2 to 32767"),
        ({"adj": chain, "atomcount": 2}, "pairs beyond its 2 elements"),
        ({"adj": chain, "atomcount": 4}, "4 elements"),
        ({"adj": np.zeros((4, 4))}, "no pairs at all"),
    ]

    for arrays, text in cases:
        with pytest.raises(ValueError) as raised:
            convert.order_of(arrays)
        assert text in str(raised.value)


def test_labels():
    values = [3, 3.0, True, np.int8(3), np.array([3]), -5]
    assert [convert.label_of(value, "kind") for value in values] == [3, 3, 1, 3, 3, -1]
    for value in (0.5, np.nan, "a"):
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
    sets = list(ORIGINALS)
    sets[4] = (np.ones((10, 10), bool), {"kind": 3})  # a cycle
    sets[20] = (sets[20][0], {"kind": 0.5})
    paths = [write_grouped(tmp_path / "a.zarr", matrices=["adj"], sets=sets)]
    paths.append(write_flat(tmp_path / "b.zarr", flat_arrays()))
    chunk = tmp_path / "b.zarr" / "adjacency_matrix" / "2.0.0"  # sets 8 to 11
    assert chunk.exists()
    chunk.write_bytes(b"damaged")

    words = [*paths, "--labels", "kind", "--out", tmp_path / "out"]
    text = refusal(*words)
    lines = [line.strip() for line in text.splitlines()[1:]]
    starts = [f"{tmp_path}/a.zarr: cset_5: adj has a cycle", f"{tmp_path}/a.zarr: cset_21: kind is"]
    starts += [f"{tmp_path}/b.zarr: set {i}: " for i in (8, 9, 10, 11)]
    assert "6 of 60 sets cannot be read" in text
    for line, start in zip(lines, starts, strict=True):
        assert line.startswith(start)
    assert not (tmp_path / "out").exists()

    run("convert_causal_sets", *words, "--skip_bad_data")
    assert (tmp_path / "out" / "skipped.txt").read_text().splitlines() == lines
    sizes = np.diff(np.load(tmp_path / "out" / "node_ptr.npy"))
    kept = [i for i in range(60) if i not in (4, 20, 38, 39, 40, 41)]
    assert [len(ORIGINALS[i % SETS][0]) for i in kept] == sizes.tolist()


WRONG = {  # what is given: a part of the message
    # without sizes the padding would be read as elements
    "good.zarr padded.zarr --labels kind": "padded.zarr: has adjacency_matrix; expected atomcount",
    "padded.npz --labels kind": "padded.npz: has adjacency_matrix; expected atomcount or cset_size",
    "missing.zarr --labels kind": "missing.zarr",
    "good.zarr --labels colour": "colour",
    "good.zarr --labels one": "--labels one: expected 2 values or more from 0 on, found ",
    "cut.npz --labels kind": "cut.npz: ",
    "good.zarr --labels kind --split 0.9 0.1 0.1": "with the sum 1",
    "good.zarr --labels kind --split 0.98 0.01 0.01": "too few",
    "good.zarr --labels kind --out full": "full holds a data set",
}


def test_what_cannot_be_is_one_line(refusal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_flat(tmp_path / "good.zarr", {**flat_arrays(), "one": np.ones(SETS, int)})
    padded = {"adjacency_matrix": flat_arrays()["adjacency_matrix"]}
    write_flat(tmp_path / "padded.zarr", padded)
    np.savez(tmp_path / "padded.npz", **padded)
    (tmp_path / "cut.npz").write_bytes((tmp_path / "padded.npz").read_bytes()[:-100])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "meta.json").write_text("{}")
    for words, text in WRONG.items():
        said = refusal("--out=out", "--workers=1", *words.split())
        assert text in said, words
        assert len(said.splitlines()) == 1
        assert not (tmp_path / "out").exists()


# --------------------------------------------------------------------------------------------------
# From a store over training to predictions


def predict(out, *words):
    """(rows of the CSV file, what is said)"""
    said = run("predict_causal_sets", *words, "--out", out)
    with open(out, newline="") as file:
        return [*csv.DictReader(file)], said


def test_convert_train_predict(stores, tmp_path):
    paths = [stores["grouped2.zarr"], stores["links3.zarr"], stores["flat.npz"]]
    folder = tmp_path / "sets"
    run("convert_causal_sets", *paths, "--labels", "kind", "flat", "--out", folder)
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["classes"] == {"kind": ["3", "7"], "flat": ["0", "1"]}
    assert np.bincount(np.load(folder / "split.npy")).tolist() == [68, 9, 13]

    folders = ["--data", folder, "--output_dir", tmp_path / "run"]
    status, text = call_script("run_train_quantumgrav_ddp", *folders, *TRAIN.split())
    assert status == 0, text

    # the folder that it was trained on: the test sets, with the figures of the run
    best = tmp_path / "run" / "best.pt"
    of_folder, said = predict(tmp_path / "a.csv", best, folder)
    expected = np.flatnonzero(np.load(folder / "split.npy") == 2)
    assert [int(row["set"]) for row in of_folder] == expected.tolist()
    test = json.loads((tmp_path / "run" / "summary.json").read_text())["test"]
    assert f"loss={test['kind/loss']:.4f} accuracy={test['kind/accuracy']:.4f}" in said

    # a store: its sets are the first ones of the folder
    of_store, _ = predict(tmp_path / "b.csv", best, paths[0], "--labels", "flat", "kind")
    for i, (row, (_, labels)) in enumerate(zip(of_store, ORIGINALS, strict=True)):
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
    }
    for text, words in wrong.items():
        status, said = call_script("tools/predict_causal_sets", *words)
        assert status == 2 and text in said
        assert len(said.splitlines()) == 1
    assert not (tmp_path / "d.csv").exists()
