"""The reader of run_train_quantumgrav_ddp.py: stores of every layout, set by set; odd ones, each
with what must happen. And the way from a store over training to tools/predict_causal_sets.py."""

import csv
import json
from functools import partial

import numpy as np
import pytest
from helpers import call_script, import_tool, parse_arguments
from runs import Run

import run_train_quantumgrav_ddp as script

zarr = pytest.importorskip("zarr")
make = import_tool("make_causal_sets")
SETS = 30
ROOM = 15  # elements in padded arrays; the sets have 10 to 14
TASKS = ["kind", "flat"]
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


def put(folder, name, array, zarr_format, **options):
    array = np.asarray(array)
    options = {"chunks": array.shape, **options}
    zarr.create_array(folder / name, data=array, zarr_format=zarr_format, **options)


def write_grouped(path, zarr_format=2, matrices=("adj", "linkmat"), sets=ORIGINALS):
    """As Julia writes them: transposed."""
    zarr.create_group(path, zarr_format=zarr_format)
    for i, (order, labels) in enumerate(sets, start=1):
        group = path / f"cset_{i}"
        zarr.create_group(group, zarr_format=zarr_format)
        found = {"adj": order.T, "linkmat": script.links_of(order).T}
        arrays = {name: found[name].astype(np.uint8) for name in matrices}
        for name, array in {**arrays, **labels, "in_degrees": found["adj"].sum(1)}.items():
            put(group, name, array, zarr_format)
    return path


def flat_arrays(size="atomcount", matrix="adjacency_matrix", room=SETS):
    arrays = {matrix: np.zeros((room, ROOM, ROOM), np.float32)}
    for name in (size, *TASKS):
        arrays[name] = np.zeros(room, np.int32)
    for i, (order, labels) in enumerate(ORIGINALS):
        n = len(order)
        arrays[matrix][i, :n, :n] = script.links_of(order) if matrix == "link_matrix" else order
        arrays[size][i] = n
        for name, value in labels.items():
            arrays[name][i] = value
    return arrays


def write_flat(path, arrays=None, zarr_format=2, group="", **options):
    """`options` are those of the matrices' array."""
    zarr.create_group(path, zarr_format=zarr_format)
    if group:
        zarr.create_group(path / group, zarr_format=zarr_format)
    for name, array in (arrays or flat_arrays()).items():
        own = options if array.ndim == 3 else {}
        put(path / group, name, array, zarr_format, **{"chunks": (4, *array.shape[1:]), **own})
    return path


def write(path, **changes):
    """Flat arrays with these changes; those that are None are left out."""
    arrays = {**flat_arrays(), **changes}
    arrays = {name: array for name, array in arrays.items() if array is not None}
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    else:
        write_flat(path, arrays)
    return path


def forget_groups(path):
    """Remove the files that say of folders that they are groups."""
    for file in [*path.rglob(".zgroup"), *path.rglob("zarr.json")]:
        if file.name == ".zgroup" or json.loads(file.read_text())["node_type"] == "group":
            file.unlink()
    return path


def with_unknown_codec(path, name, zarr_format=2):
    """An array that zarr cannot open."""
    write_flat(path, {**flat_arrays(), "note": np.ones(SETS, int)}, zarr_format)
    file = path / name / (".zarray" if zarr_format == 2 else "zarr.json")
    assert '"zstd"' in file.read_text()
    file.write_text(file.read_text().replace('"zstd"', '"made_up"'))


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """{name: path}, the same sets in every layout"""
    folder = tmp_path_factory.mktemp("stores")
    arrays = flat_arrays()
    matrices = arrays["adjacency_matrix"]
    transposed = {**arrays, "adjacency_matrix": matrices.transpose(0, 2, 1)}
    more = {**flat_arrays(room=SETS + 3), "num_samples": np.array([SETS])}
    links = flat_arrays("cset_size", "link_matrix")
    for number in (2, 3):  # zarr format
        write_grouped(folder / f"grouped{number}.zarr", number)
        forget_groups(write_grouped(folder / f"no_root{number}.zarr", number))
        forget_groups(write_flat(folder / f"flat{number}.zarr", arrays, number))
        with_unknown_codec(folder / f"unknown{number}.zarr", "note", number)
    write_flat(folder / "links.zarr", links, 3)
    write_flat(folder / "transposed.zarr", transposed)
    write_flat(folder / "in_group.zarr", arrays, group="all")
    write_flat(folder / "more.zarr", more)
    gaps = write_grouped(folder / "gaps.zarr", matrices=["linkmat"])
    for i in range(SETS, 0, -1):  # by name cset_14 would come before cset_7
        (gaps / f"cset_{i}").rename(gaps / f"cset_{7 * i}")
    strangers = write(folder / "without_suffix", link_matrix=np.zeros((2, 2, 2)))
    (strangers / "README").write_text("other files")
    (strangers / "empty").mkdir()
    write_flat(folder / "columns_first.zarr", order="F", chunks=(7, 4, 15))
    write_flat(folder / "shards.zarr", zarr_format=3, chunks=(2, 15, 15), shards=(6, 15, 15))
    sizes = arrays["atomcount"].astype(float)
    write(folder / "types.zarr", adjacency_matrix=matrices.astype(">i8"), atomcount=sizes)
    write(folder / "flat.npz", adjacency_matrix=matrices.astype(bool))
    return {path.name: path for path in folder.iterdir()}


def test_every_layout_set_by_set(stores):
    for path in stores.values():
        found = list(script.read_sets(path, TASKS))
        assert len(found) == SETS, path
        for i, (name, values) in enumerate(found):
            if (path / "cset_7").exists():
                assert name == f"cset_{7 * i + 7 if path.stem == 'gaps' else i + 1}"
            order, labels = ORIGINALS[i]
            assert np.array_equal(script.order_of(values), order), path
            assert {task: script.number_of(values[task], task) for task in TASKS} == labels, path


def load(path, *options):
    """The data of a run with these options."""
    words = [f"--data={path}", f"--cache_dir={path.parent}/cache", "--tasks", *TASKS, *options]
    args = parse_arguments(script, *words)
    return script.CausalSets(script.prepare(args), args)


def test_both_groups_of_a_store_are_read(tmp_path):
    for group in ("first", "second"):
        write_flat(tmp_path / "a.zarr" / group)
    assert len(load(tmp_path / "a.zarr").labels) == 2 * SETS


LABELS = {  # labels of three sets in turn: the classes, and the labels' numbers
    "names.npz": (["tree", "", "antichain"], ["antichain", "tree"], [1, -1, 0]),
    "bytes.zarr": (np.array(["tree", "", "bee"], "S"), ["bee", "tree"], [1, -1, 0]),
    "variable.zarr": (np.array(["b", "", "a"], np.dtypes.StringDType()), ["a", "b"], [1, -1, 0]),
    "texts.npz": ([" 3", "-1", "12"], ["3", "12"], [0, -1, 1]),
}


@pytest.mark.parametrize("name", LABELS)
def test_labels(name, tmp_path):
    """Names in the order of the alphabet, an empty name is none; texts of numbers are numbers."""
    values, classes, numbers = LABELS[name]
    data = load(write(tmp_path / name, kind=np.tile(values, SETS // 3)))
    assert data.classes == {"kind": [*map(str, classes)], "flat": ["0", "1"]}
    assert data.labels[:, 0].tolist() == numbers * (SETS // 3)
    assert data.labels[:, 1].tolist() == [labels["flat"] for _, labels in ORIGINALS]


def test_names_beside_numbers():
    """Of another store: below 0 is no label."""
    numbers, classes = script.classes_of(["tree", -1, 12, "", 3, "ant"])
    assert (numbers, classes) == ([3, -1, 1, -1, 0, 2], ["3", "12", "ant", "tree"])


# --------------------------------------------------------------------------------------------------
# What is refused


def cut(path):
    write(path)
    path.write_bytes(path.read_bytes()[:-100])


def of_different_sizes(path):
    matrices = np.empty(SETS, object)
    matrices[:] = [order for order, _ in ORIGINALS]
    write(path, adjacency_matrix=matrices)


def with_a_damaged_chunk(path):
    write_flat(path)
    (path / "adjacency_matrix" / "2.0.0").write_bytes(b"damaged")


REFUSED = {  # name: what writes it, and a part of the one line
    "missing.npz": (lambda path: None, "--data"),
    "text.npz": (lambda path: path.write_text("no archive"), "no .npz file"),
    "objects.npz": (of_different_sizes, "pad matrices of different sizes with zeros, and give"),
    "cut.npz": (cut, "cut.npz: "),
    "empty.zarr": (lambda path: path.mkdir(), "has no adjacency_matrix or adj or link_matrix"),
    "damaged.zarr": (with_a_damaged_chunk, "damaged.zarr: "),
    "unknown.zarr": (partial(with_unknown_codec, name="kind"), "made_up"),
    # without sizes the padding would be read as elements
    "sizes.zarr": (partial(write, atomcount=None), "expected atomcount or cset_size"),
    "label.zarr": (partial(write, kind=None), "flat; expected kind"),
    "short.npz": (partial(write, kind=np.ones(SETS - 1)), "kind has shape (29,); expected (30,)"),
    "one.npz": (partial(write, kind=np.ones(SETS, int)), "kind: expected 2 classes or more"),
    "no_sets.npz": (partial(write, **{k: v[:0] for k, v in flat_arrays().items()}), "no sets"),
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
    ({"adj": np.zeros((1, 1))}, "2 to 32767"),
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
    sets = list(ORIGINALS)
    sets[4] = (np.ones((10, 10), bool), sets[4][1])  # a cycle
    sets[18] = (sets[18][0], {"kind": np.inf, "flat": 0})
    sets[20] = (sets[20][0], {"kind": np.nan, "flat": 0})
    sets[22] = (sets[22][0], {"kind": 3})
    path = write_grouped(tmp_path / "a.zarr", matrices=["adj"], sets=sets)
    with pytest.raises(script.InputError, match="4 of 30 sets are bad:") as raised:
        load(path)
    expected = ["cset_5: adj has a cycle", "cset_19: kind is inf", "cset_21: kind is nan"]
    expected.append("cset_23: has adj, in_degrees, kind; expected flat")
    for line, start in zip(str(raised.value).splitlines()[1:5], expected, strict=True):
        assert line.startswith(f"  {path}: {start}")
    assert not list(tmp_path.glob("cache/*"))

    data = load(path, "--skip_bad_data", *"--split 0.4 0.3 0.3".split())
    assert f"{path}: cset_5: adj has a cycle" in caplog.text
    kept = [len(order) for i, (order, _) in enumerate(ORIGINALS) if i not in (4, 18, 20, 22)]
    assert data.sizes.tolist() == kept


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_missing_chunks_are_noted(zarr_format, tmp_path, caplog):
    """Zarr reads them as zeros: as sets of the first class."""
    path = write_flat(tmp_path / "a.zarr", zarr_format=zarr_format)
    (path / "kind" / ("1" if zarr_format == 2 else "c/1")).unlink()
    assert load(path).classes["kind"] == ["0", "3", "7"]
    path = write_grouped(tmp_path / "b.zarr", zarr_format)
    (path / "cset_8" / "kind" / ("0" if zarr_format == 2 else "c")).unlink()
    assert load(path, "--tasks=kind").classes["kind"] == ["0", "3", "7"]
    warnings = [line.message for line in caplog.records if line.levelname == "WARNING"]
    assert warnings[0].startswith("kind: 1 chunks are not stored")
    assert "1 labels are not stored, and read as zeros, such as cset_8/kind" in warnings


def test_copies_lie_in_one_part(tmp_path, caplog):
    """Also where one is written as links, or transposed as by Julia. They are counted."""
    arrays = flat_arrays()
    np.savez(tmp_path / "first.npz", **{name: array[:10] for name, array in arrays.items()})
    write_flat(tmp_path / "all.zarr", flat_arrays("cset_size", "link_matrix"))
    write_grouped(tmp_path / "julia.zarr", sets=ORIGINALS[:10])
    words = [f"{tmp_path}/{name}" for name in ("first.npz", "all.zarr", "julia.zarr")]
    caplog.set_level("INFO")
    for seed in range(5):
        split = ["--split", "0.4", "0.3", "0.3", f"--split_seed={seed}"]
        parts = load(tmp_path / "first.npz", *split, "--data", *words).split
        assert np.array_equal(parts[:10], parts[10:20])
        assert np.array_equal(parts[:10], parts[40:])
        assert np.bincount(parts[10:40]).tolist() == [12, 9, 9]  # the shares are of the originals
    assert f"20 sets are copies, such as {tmp_path}/all.zarr set 0" in caplog.text
    assert "10 matrices have ones below the diagonal alone, and are read transposed" in caplog.text


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
    """The folder of a run on three stores, 90 sets."""
    out = tmp_path_factory.mktemp("trained")
    paths = [stores["grouped2.zarr"], stores["links.zarr"], stores["flat.npz"]]
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


def test_predictions_of_new_sets(trained, stores, tmp_path):
    """With labels, and without: the same probabilities."""
    best = trained / "best.pt"
    sets = [(order, {}) for order, _ in ORIGINALS]
    sets.insert(4, (np.ones((10, 10), bool), {}))
    path = write_grouped(tmp_path / "b.zarr", sets=sets)
    rows, said = predict(tmp_path / "b.csv", best, path, "--skip_bad_data")
    assert f"  {path}: cset_5: adj has a cycle" in said and "accuracy" not in said
    labelled, said = predict(tmp_path / "c.csv", best, stores["flat3.zarr"], "--labels", *TASKS)
    assert "kind, 30 sets with a label" in said and "flat, 15 sets with a label" in said
    for i, (row, other) in enumerate(zip(rows, labelled, strict=True)):
        assert (row["source"], row["set"]) == (str(path), f"cset_{i + 1 + (i > 3)}")
        labels = ORIGINALS[i][1]
        assert other["kind_label"] == str(labels["kind"]) and row["kind_label"] == ""
        assert other["flat_label"] == {-1: "", 0: "0", 1: "1"}[labels["flat"]]
        for name in ("kind_3", "kind_7", "flat_0", "flat_1"):
            assert float(row[name]) == pytest.approx(float(other[name]), rel=1e-4)


def test_what_cannot_be_predicted(trained, stores, tmp_path):
    new = stores["flat3.zarr"]
    write(tmp_path / "other.npz", kind=np.arange(SETS) + 3)
    write(tmp_path / "bad.npz", kind=np.full(SETS, 0.5))
    (tmp_path / "text.pt").write_text("no network")
    (tmp_path / "there.csv").touch()
    out = ["--out", tmp_path / "d.csv"]
    best = trained / "best.pt"
    wrong = {
        "missing.pt: expected best.pt or latest.pt of": [tmp_path / "missing.pt", new, *out],
        "text.pt: expected best.pt or latest.pt of": [tmp_path / "text.pt", new, *out],
        "exists: give another --out": [best, new, "--out", tmp_path / "there.csv"],
        "there is no folder": [best, new, "--out", tmp_path / "missing" / "d.csv"],
        "are of SETS, and none are given": [best, "--labels", "kind", *out],
        "none are given": [best, "--skip_bad_data", *out],
        "has the tasks kind, flat": [best, new, "--labels", "x", *out],
        "knows 3, 7, but not 4": [best, tmp_path / "other.npz", "--labels", "kind", *out],
        "bad.npz: set 0: kind is 0.5": [best, tmp_path / "bad.npz", "--labels", "kind", *out],
        "was trained on": [best, stores["flat.npz"], *out],
        "no_such.zarr": [best, tmp_path / "no_such.zarr", *out],
    }
    for text, words in wrong.items():
        said = call_script("tools/predict_causal_sets", *words, status=2)
        assert text in said
        assert len(said.splitlines()) == (22 if "bad.npz" in text else 1)
    assert not (tmp_path / "d.csv").exists()
