"""The reader of run_train_quantumgrav_ddp.py: stores of every layout, set by set; odd ones, each
with what must happen. And the way from a store over training to tools/predict_causal_sets.py."""

import csv
import os
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from helpers import call_script, import_tool, parse_arguments
from runs import Run

import run_train_quantumgrav_ddp as script

zarr = pytest.importorskip("zarr")
make = import_tool("make_causal_sets")
TASKS = ["kind", "flat"]
TRAIN = "--num_epochs 2 --batch_size 10 --hidden_dim 8 --head_dim 8 --device cpu --tasks kind flat"

# --------------------------------------------------------------------------------------------------
# Sets, and stores of them

SETS = 30
KIND = np.resize([3, 7], SETS)
FLAT = np.resize([0, -1, 1, -1], SETS)  # of kind 7 it is not known
ORDERS = []  # of 10 to 14 elements
for number in range(SETS):
    draws = np.random.default_rng(number)
    name = "layered" if number % 2 else "mink2"
    ORDERS.append(make.make_order(name, draws, int(draws.integers(10, 15))))
MATRICES = np.array([np.pad(order, (0, 15 - len(order))) for order in ORDERS])  # bool
LINKS = np.array([script.links_of(matrix) for matrix in MATRICES])
SIZES = np.array([len(order) for order in ORDERS])
ALL = {"adjacency_matrix": MATRICES, "atomcount": SIZES, "kind": KIND, "flat": FLAT}
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
    within = write(folder / "no_suffix" / "all", adjacency_matrix=None, link_matrix=LINKS)
    (within.parent / "README").write_text("another file")
    (within / "not_needed").mkdir()
    (within / "not_needed" / ".zarray").write_text("no array that zarr can open")
    write(folder / "transposed.npz", adjacency_matrix=MATRICES.transpose(0, 2, 1))
    return {path.name: path for path in folder.iterdir()}


def test_every_layout_set_by_set(stores):
    for path in stores.values():
        found = list(script.read_sets(path, TASKS))
        assert len(found) == SETS, path
        for i, (name, values) in enumerate(found):
            if path.name in ("groups.zarr", "gaps.zarr"):
                assert name == f"cset_{(i + 1) * (7 if path.name == 'gaps.zarr' else 1)}"
            assert np.array_equal(script.order_of(values), ORDERS[i]), path
            labels = [script.number_of(values[task], task) for task in TASKS]
            assert labels == [KIND[i], FLAT[i]], path


def load(path, *options):
    """The data of a run with these options."""
    words = [f"--data={path}", f"--cache_dir={path.parent}/cache", "--tasks", *TASKS, *options]
    args = parse_arguments(script, *words)
    return script.CausalSets(script.prepare(args), args)


def test_both_groups_of_a_store_are_read(tmp_path):
    for group in ("first", "second"):
        write(tmp_path / "a.zarr" / group)
    assert len(load(tmp_path / "a.zarr").labels) == 2 * SETS


LABELS = {  # labels of three sets in turn: the classes, and the labels' numbers
    "names.npz": (["tree", "", "antichain"], ["antichain", "tree"], [1, -1, 0]),
    "bytes.zarr": (np.array(["tree", "", "bee"], "S"), ["bee", "tree"], [1, -1, 0]),
    "variable.zarr": (np.array(["b", "", "a"], np.dtypes.StringDType()), ["a", "b"], [1, -1, 0]),
    "texts.npz": ([" 3", "-1", "12"], ["3", "12"], [0, -1, 1]),
    "mixed.npz": (["tree", "-1", "12"], ["12", "tree"], [1, -1, 0]),
}


@pytest.mark.parametrize("name", LABELS)
def test_labels(name, tmp_path):
    """Names in the order of the alphabet, an empty name is none; texts of numbers are numbers."""
    values, classes, numbers = LABELS[name]
    data = load(write(tmp_path / name, kind=np.tile(values, SETS // 3)))
    assert data.classes == {"kind": classes, "flat": ["0", "1"]}
    assert data.labels[:, 0].tolist() == numbers * (SETS // 3)
    assert data.labels[:, 1].tolist() == FLAT.tolist()


# --------------------------------------------------------------------------------------------------
# What is refused


def write_cut(path):
    os.truncate(write(path), 1000)


REFUSED = {  # name: what writes it, and a part of the one line
    "missing.npz": (lambda path: None, "--data"),
    "cut.npz": (write_cut, "cut.npz: "),
    "text.npz": (lambda path: path.write_text("no arrays"), "no .npz file, or"),
    "array.npy": (lambda path: np.save(path, np.eye(3)), "no .npz file, or"),
    "empty.zarr": (lambda path: path.mkdir(), "has no adjacency_matrix or adj or link_matrix"),
    # without sizes the padding would be read as elements
    "sizes.zarr": (partial(write, atomcount=None), "expected atomcount or cset_size"),
    "short.npz": (partial(write, kind=np.ones(SETS - 1)), "kind has shape (29,); expected (30,)"),
    "one.npz": (partial(write, kind=np.ones(SETS, int)), "kind: expected 2 classes or more"),
    "no_sets.npz": (partial(write, num_samples=0), "no sets"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_stores_that_are_refused(name, tmp_path):
    make_file, text = REFUSED[name]
    make_file(tmp_path / name)
    with pytest.raises(script.InputError) as raised:
        load(tmp_path / name)
    assert text in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.glob("cache/*"))


CHAIN = np.triu(np.ones((3, 3)), 1)
NO_ORDERS = [  # arrays of a set: a part of the message
    ({"adj": np.diag([1, 0, 0]) + CHAIN}, "has a cycle"),
    ({"linkmat": np.array([[0, 1, 0], [0, 0, 0], [0, 1, 0]])}, "not sorted in time"),
    ({"adj": np.diag([1, 1], 1)}, "not transitive"),
    ({"linkmat": CHAIN}, "nothing between them"),
    ({"adj": 2 * CHAIN}, "other entries than 0 and 1"),
    ({"adj": np.zeros((3, 4))}, "shape (3, 4); expected a square"),
    ({"adj": CHAIN, "atomcount": 2}, "pairs beyond its 2 elements"),
    ({"adj": CHAIN, "atomcount": 4}, "4 elements"),
    ({"adj": CHAIN, "atomcount": 2.5}, "expected a whole number"),
    ({"adj": np.zeros((4, 4))}, "no pairs at all"),
]


@pytest.mark.parametrize(("arrays", "text"), NO_ORDERS)
def test_what_is_no_order(arrays, text):
    with pytest.raises(ValueError) as raised:
        script.order_of(arrays)
    assert text in str(raised.value)


def test_damaged_sets_are_listed_and_may_be_left_out(tmp_path, caplog):
    changes = {5: {"adj": BAD}, 21: {"kind": np.nan}}
    path = write_grouped(tmp_path / "a.zarr", changes=changes)
    shutil.rmtree(path / "cset_23" / "flat")
    with pytest.raises(script.InputError, match="3 of 30 sets are bad:") as raised:
        load(path)
    expected = ["cset_5: adj has a cycle", "cset_21: kind is nan"]
    expected.append("cset_23: has adj, kind; expected flat")
    for line, start in zip(str(raised.value).splitlines()[1:4], expected, strict=True):
        assert line.startswith(f"  {path}: {start}")
    assert not list(tmp_path.glob("cache/*"))

    data = load(path, "--skip_bad_data", *"--split 0.4 0.3 0.3".split())
    assert f"{path}: cset_5: adj has a cycle" in caplog.text
    assert data.sizes.tolist() == np.delete(SIZES, [4, 20, 22]).tolist()


def test_missing_chunks_are_noted(tmp_path, caplog):
    """Zarr reads them as zeros: as sets of the first class."""
    path = write(tmp_path / "a.zarr")
    (path / "kind" / "1").unlink()
    assert load(path).classes["kind"] == ["0", "3", "7"]
    path = write_grouped(tmp_path / "b.zarr", 3)
    (path / "cset_8" / "kind" / "c").unlink()
    assert load(path, "--tasks=kind").classes["kind"] == ["0", "3", "7"]
    assert "kind: 1 chunks are not stored" in caplog.text
    assert "1 labels are not stored, and read as zeros, such as cset_8/kind" in caplog.text


def test_copies_lie_in_one_part(stores, tmp_path, caplog):
    """Also where one is written as links, or transposed as by Julia. They are counted."""
    first = write(tmp_path / "first.npz", **{name: array[:10] for name, array in ALL.items()})
    paths = [first, stores["gaps.zarr"], stores["transposed.npz"]]
    caplog.set_level("INFO")
    for seed in range(5):
        split = ["--split", "0.4", "0.3", "0.3", f"--split_seed={seed}"]
        parts = load(first, *split, "--data", *map(str, paths)).split
        assert np.array_equal(parts[:10], parts[10:20])
        assert np.array_equal(parts[10:40], parts[40:])
        assert np.bincount(parts[10:40]).tolist() == [12, 9, 9]  # the shares are of the originals
    assert f"40 sets are copies, such as {paths[1]} cset_7" in caplog.text
    assert "60 matrices have ones below the diagonal alone, and are read transposed" in caplog.text


def test_data_are_read_once(tmp_path, monkeypatch):
    """And again when they have changed, or for other labels."""
    path = write(tmp_path / "a.npz")
    first = load(path)
    monkeypatch.setattr(script, "read_all", None)
    assert load(path, "--split_seed=3").hash == first.hash
    with pytest.raises(TypeError):
        load(path, "--tasks=kind")
    write(path)
    with pytest.raises(TypeError):
        load(path)


# --------------------------------------------------------------------------------------------------
# From a store over training to predictions


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
    assert [int(row["set"]) for row in rows] == found["ids"].tolist()
    test = Run(trained).summary["test"]
    assert f"loss={test['kind/loss']:.4f} accuracy={test['kind/accuracy']:.4f}" in said
    for row, logp in zip(rows, found["logp_kind"], strict=True):
        chances = [float(row["kind_3"]), float(row["kind_7"])]
        assert np.allclose(chances, np.exp(logp), rtol=1e-4)
        assert row["kind"] == ["3", "7"][logp.argmax()]


def test_predictions_on_a_smaller_gpu(trained, tmp_path):
    """They do not take the micro-batches of a run that had more memory."""
    state = torch.load(trained / "best.pt", weights_only=True)
    state["args"]["batch_size"] = 1000
    torch.save(state, tmp_path / "a.pt")
    _, options, _ = import_tool("predict_causal_sets").load_network(tmp_path / "a.pt", "cpu")
    assert options.batch_size == 64


def test_predictions_of_new_sets(trained, stores, tmp_path):
    """With labels, and without: the same probabilities."""
    best = trained / "best.pt"
    path = write_grouped(tmp_path / "b.zarr", changes={5: {"adj": BAD}})
    for folder in [*path.glob("*/kind"), *path.glob("*/flat")]:
        shutil.rmtree(folder)
    rows, said = predict(tmp_path / "b.csv", best, path, "--skip_bad_data")
    assert f"  {path}: cset_5: adj has a cycle" in said and "accuracy" not in said
    labelled, said = predict(tmp_path / "c.csv", best, stores["more.zarr"], "--labels", *TASKS)
    assert "kind, 30 sets with a label" in said and "flat, 15 sets with a label" in said
    del labelled[4]
    for row, other in zip(rows, labelled, strict=True):
        i = int(other["set"].removeprefix("set "))
        assert (row["source"], row["set"]) == (str(path), f"cset_{i + 1}")
        assert other["kind_label"] == str(KIND[i]) and row["kind_label"] == ""
        assert other["flat_label"] == {-1: "", 0: "0", 1: "1"}[FLAT[i]]
        for name in ("kind_3", "kind_7", "flat_0", "flat_1"):
            assert float(row[name]) == pytest.approx(float(other[name]), rel=1e-4)


def test_what_cannot_be_predicted(trained, stores, tmp_path):
    new = stores["more.zarr"]
    other = write(tmp_path / "other.npz", kind=np.arange(SETS) + 3)
    bad = write(tmp_path / "bad.npz", kind=np.full(SETS, 0.5))
    (tmp_path / "text.pt").write_text("no network")
    (tmp_path / "there.csv").touch()
    best = trained / "best.pt"
    state = torch.load(best, weights_only=True)
    state["args"]["data_hash"] = "of other data"
    torch.save(state, tmp_path / "changed.pt")
    wrong = {
        "text.pt: expected best.pt, step_N.pt or latest.pt of": [tmp_path / "text.pt", new],
        "there.csv: expected a new file": [best, new, "--out", tmp_path / "there.csv"],
        "are of SETS, and none are given": [best, "--labels", "kind"],
        "has the tasks kind, flat": [best, new, "--labels", "x"],
        "knows 3, 7, but not 10": [best, other, "--labels", "kind"],
        "bad.npz: set 0: kind is 0.5": [best, bad, "--labels", "kind"],
        "transposed.npz: the network was trained on it": [best, stores["transposed.npz"]],
        "changed since the network was trained": [tmp_path / "changed.pt"],
        "a copy of what": [best, stores["gaps.zarr"], new],
    }
    for text, words in wrong.items():
        options = [] if "--out" in words else ["--out", tmp_path / "d.csv"]
        said = call_script("tools/predict_causal_sets", *words, *options, status=2)
        assert text in said
        lines = [line for line in said.splitlines() if not line.startswith("WARNING")]
        assert len(lines) == (21 if "bad.npz" in text else 1)
    assert not (tmp_path / "d.csv").exists()
