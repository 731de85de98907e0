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


def put(folder, name, array, zarr_format=2, **options):
    array = np.asarray(array)
    options = {"chunks": array.shape, **options}
    return zarr.create_array(folder / name, data=array, zarr_format=zarr_format, **options)


def write_grouped(path, zarr_format=2, matrices=("adj", "linkmat"), sets=ORIGINALS):
    """As Julia writes them: transposed."""
    zarr.create_group(path, zarr_format=zarr_format)
    for i, (order, labels) in enumerate(sets, start=1):
        group = path / f"cset_{i}"
        zarr.create_group(group, zarr_format=zarr_format)
        found = {"adj": order.T, "linkmat": script.links_of(order).T}
        for name in matrices:
            put(group, name, found[name].astype(np.uint8), zarr_format)
        for name, value in labels.items():
            put(group, name, value, zarr_format)
        put(group, "in_degrees_link", script.links_of(order).sum(0), zarr_format)
    return path


def flat_arrays(size="atomcount", matrix="adjacency_matrix", room=SETS):
    arrays = {matrix: np.zeros((room, ROOM, ROOM), np.float32)}
    for name in (size, "kind", "flat"):
        arrays[name] = np.zeros(room, np.int32)

    for i, (order, labels) in enumerate(ORIGINALS):
        n = len(order)
        arrays[matrix][i, :n, :n] = script.links_of(order) if matrix == "link_matrix" else order
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


def with_arrays(**changes):
    """A flat store with these arrays added or replaced, and those that are None left out."""

    def write(path):
        arrays = {**flat_arrays(), **changes}
        arrays = {name: array for name, array in arrays.items() if array is not None}
        if path.suffix == ".npz":
            np.savez(path, **arrays)
        else:
            write_flat(path, arrays)

    return write


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


def assert_originals(path):
    """The reader finds ORIGINALS there."""
    found = list(script.read_sets(path, TASKS, []))
    assert len(found) == SETS
    for i, (name, values) in enumerate(found):
        assert name == (f"cset_{i + 1}" if (path / "cset_1").exists() else f"set {i}")
        order, labels = ORIGINALS[i]
        assert np.array_equal(script.order_of(values), order)
        assert {task: script.number_of(values[task], task) for task in TASKS} == labels


def test_every_layout_set_by_set(stores):
    assert len(stores) == 17
    for path in stores.values():
        assert_originals(path)


def load(path, *options):
    """The data of a run with these options."""
    words = [f"--data={path}", f"--cache_dir={path.parent}/cache", "--tasks", *TASKS, *options]
    args = parse_arguments(script, *words)
    return script.CausalSets(script.prepare(args), args)


# --------------------------------------------------------------------------------------------------
# Odd stores that are read


def change_array(name, **options):
    """A flat store with this array written anew, with other options."""

    def write(path):
        arrays = flat_arrays()
        write_flat(path, {key: array for key, array in arrays.items() if key != name})
        dtype = options.pop("dtype", arrays[name].dtype)
        put(path, name, arrays[name].astype(dtype), **options)

    return write


def rewrite_meta(path, old, new):
    for file in [path / ".zarray", path / "zarr.json"]:
        if file.exists():
            text = file.read_text()
            assert old in text
            file.write_text(text.replace(old, new))


def with_unknown_codec(path, name="note", zarr_format=2):
    """An array that zarr cannot open."""
    write_flat(path, flat_arrays(), zarr_format)
    if name == "note":
        put(path, name, np.ones(SETS, int), zarr_format)
    rewrite_meta(path / name, '"zstd"', '"made_up"')


def with_gaps(path):
    """cset_10 comes after cset_2, though it is not so by name."""
    write_grouped(path)
    for i in range(SETS, 0, -1):
        (path / f"cset_{i}").rename(path / f"cset_{7 * i}")


def with_strangers(path):
    write_flat(path, {**flat_arrays(), "link_matrix": np.zeros((2, 2, 2))})
    (path / "README").write_text("other files")
    (path / "empty").mkdir()


def npz_with_an_object(path):
    np.savez(path, note=np.array([{}], object), **flat_arrays())


READ = {  # name: what writes it
    "bool.zarr": change_array("adjacency_matrix", dtype=bool),
    "big_endian.zarr": change_array("adjacency_matrix", dtype=">i8"),
    "sizes_as_floats.zarr": change_array("atomcount", dtype=float),
    "columns_first.zarr": change_array("adjacency_matrix", order="F"),
    "odd_chunks.zarr": change_array("adjacency_matrix", chunks=(7, 4, 15)),
    "shards.zarr": change_array(
        "adjacency_matrix", zarr_format=3, chunks=(2, 15, 15), shards=(6, 15, 15)
    ),
    "raw.zarr": change_array("adjacency_matrix", compressors=None),
    "without_suffix": with_strangers,
    "unknown2.zarr": with_unknown_codec,
    "unknown3.zarr": partial(with_unknown_codec, zarr_format=3),
    "gaps.zarr": with_gaps,
    "object.npz": npz_with_an_object,
}


@pytest.mark.parametrize("name", READ)
def test_odd_stores_that_are_read(name, tmp_path):
    READ[name](tmp_path / name)
    data = load(tmp_path / name)
    assert data.classes == {"kind": ["3", "7"], "flat": ["0", "1"]}
    expected = [[labels["kind"] // 4, labels["flat"]] for _, labels in ORIGINALS]
    assert data.labels.tolist() == expected
    kept = [script.describe(order) for order, _ in ORIGINALS]
    assert np.array_equal(data.features, np.concatenate([values["features"] for values in kept]))
    assert np.array_equal(data.past, np.concatenate([values["past"] for values in kept]))


NAMES = {  # how they are stored
    "fixed.npz": "U",
    "fixed.zarr": "U",
    "bytes.npz": "S",
    "bytes.zarr": "S",
    "variable.zarr": "T",
}


@pytest.mark.parametrize("name", NAMES)
def test_labels_that_are_names(name, tmp_path):
    """In the order of the alphabet; an empty name is none."""
    dtype = np.dtypes.StringDType() if NAMES[name] == "T" else NAMES[name]
    names = np.array(["tree", "", "antichain"] * 10).astype(dtype)
    with_arrays(kind=names)(tmp_path / name)
    data = load(tmp_path / name)
    assert data.classes["kind"] == ["antichain", "tree"]
    assert data.labels[:, 0].tolist() == [1, -1, 0] * 10


def test_numbers_as_texts_and_large_ones(tmp_path, caplog):
    """Texts of numbers are numbers; those above 2^53 stay what they are. A class that a part lacks
    is named."""
    with_arrays(kind=np.array([" 3", "-1", "12"] * 10))(tmp_path / "a.npz")
    data = load(tmp_path / "a.npz")
    assert data.classes["kind"] == ["3", "12"]
    assert data.labels[:, 0].tolist() == [0, -1, 1] * 10

    large = np.array([2**63, 2**63 + 1, 5] * 10, np.uint64)
    large[0] = 7
    with_arrays(kind=large)(tmp_path / "b.npz")
    data = load(tmp_path / "b.npz")
    assert data.classes["kind"] == ["5", "7", str(2**63), str(2**63 + 1)]
    assert "1 of the 4 classes of kind lack in " in caplog.text


def test_names_beside_a_store_without_labels(tmp_path):
    """There -1 is no label, and no class of its own."""
    with_arrays(kind=np.array(["tree", "antichain"] * 15))(tmp_path / "a.npz")
    with_arrays(kind=np.full(SETS, -1))(tmp_path / "b.npz")
    data = load(tmp_path / "a.npz", "--data", f"{tmp_path}/a.npz", f"{tmp_path}/b.npz")
    assert data.classes["kind"] == ["antichain", "tree"]
    assert data.labels[:, 0].tolist() == [1, 0] * 15 + [-1] * SETS


# --------------------------------------------------------------------------------------------------
# What is refused


def in_two_groups(path):
    for group in ("first", "second"):
        write_flat(path / group, flat_arrays())


def cut(path):
    with_arrays()(path)
    path.write_bytes(path.read_bytes()[:-100])


REFUSED = {  # name: what writes it, and a part of the one line
    "missing.npz": (lambda path: None, "--data"),
    "text.npz": (lambda path: path.write_text("no archive"), "expected a whole file of arrays"),
    "text.zarr": (lambda path: path.write_text("no folder"), "expected an .npz file, or a zarr"),
    "cut.npz": (cut, "cut.npz"),
    "empty.zarr": (lambda path: path.mkdir(), "expected adjacency_matrix or adj or link_matrix"),
    "groups.zarr": (in_two_groups, "groups.zarr/first"),
    # without sizes the padding would be read as elements
    "sizes.zarr": (with_arrays(atomcount=None), "expected atomcount or cset_size"),
    "label.zarr": (with_arrays(kind=None), "expected kind"),
    "short.npz": (with_arrays(kind=np.ones(SETS - 1)), "kind has shape (29,); expected (30,)"),
    "object.npz": (with_arrays(kind=np.array([{}] * SETS, object)), "object.npz"),
    "one.npz": (with_arrays(kind=np.ones(SETS, int)), "--tasks kind: expected 2 values or more"),
    "no_sets.npz": (with_arrays(**{k: v[:0] for k, v in flat_arrays().items()}), "no sets"),
    "one_set.npz": (with_arrays(adjacency_matrix=np.ones((9, 9))), "atomcount has shape (30,)"),
    "unknown.zarr": (partial(with_unknown_codec, name="kind"), "made_up"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_stores_that_are_refused(name, tmp_path):
    write, text = REFUSED[name]
    write(tmp_path / name)
    with pytest.raises(script.InputError) as raised:
        load(tmp_path / name)
    assert text in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.glob("cache/*"))


def test_a_group_may_be_named(tmp_path):
    in_two_groups(tmp_path / "groups.zarr")
    assert_originals(tmp_path / "groups.zarr" / "second")


CHAIN = np.triu(np.ones((3, 3)), 1)
NO_ORDERS = [  # arrays of a set: a part of the message
    ({"adj": np.diag([1, 0, 0]) + CHAIN}, "has a cycle"),
    ({"linkmat": np.array([[0, 1, 0], [0, 0, 0], [0, 1, 0]])}, "not sorted in time"),
    ({"adj": np.diag([1, 1], 1)}, "not transitive"),
    ({"linkmat": CHAIN}, "nothing between them"),
    ({"adj": 2 * CHAIN}, "other entries than 0 and 1"),
    ({"adj": np.zeros((3, 4))}, "shape (3, 4)"),
    ({"adj": np.zeros((1, 1))}, "expected 2 to 32767"),
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


def test_labels():
    values = [3, 3.0, True, np.int8(3), np.array([3]), "a"]
    assert [script.number_of(value, "kind") for value in values] == [3, 3, 1, 3, 3, "a"]
    for value in (0.5, np.nan, np.inf):
        with pytest.raises(ValueError, match="expected a whole number"):
            script.number_of(value, "kind")


# --------------------------------------------------------------------------------------------------
# What is read with a note


def test_damaged_sets_are_listed_and_may_be_left_out(tmp_path, caplog):
    sets = list(ORIGINALS)
    sets[4] = (np.ones((10, 10), bool), sets[4][1])  # a cycle
    sets[20] = (sets[20][0], {"kind": 0.5, "flat": 0})
    sets[22] = (sets[22][0], {"kind": 3})
    paths = [write_grouped(tmp_path / "a.zarr", matrices=["adj"], sets=sets)]
    paths.append(write_flat(tmp_path / "b.zarr", flat_arrays()))
    chunk = tmp_path / "b.zarr" / "adjacency_matrix" / "2.0.0"  # sets 8 to 11
    assert chunk.exists()
    chunk.write_bytes(b"damaged")

    words = ["--data", *map(str, paths), f"--cache_dir={tmp_path}/cache", "--tasks", *TASKS]
    with pytest.raises(script.InputError, match="7 of 60 sets are bad") as raised:
        script.prepare(parse_arguments(script, *words))
    starts = ["a.zarr: cset_5: adj has a cycle", "a.zarr: cset_21: kind is", "a.zarr: cset_23: has"]
    starts += [f"b.zarr: set {i}: " for i in (8, 9, 10, 11)]
    for start in starts:
        assert start in str(raised.value)
    assert not list(tmp_path.glob("cache/*"))

    args = parse_arguments(script, *words, "--skip_bad_data")
    data = script.CausalSets(script.prepare(args), args)
    for start in starts:
        assert start in caplog.text
    kept = [i for i in range(60) if i not in (4, 20, 22, 38, 39, 40, 41)]
    assert data.sizes.tolist() == [len(ORIGINALS[i % SETS][0]) for i in kept]


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_missing_chunks_are_noted(zarr_format, tmp_path, caplog):
    """Zarr reads them as zeros: as sets of the first class. Each time that the data are used."""
    path = write_flat(tmp_path / "a.zarr", flat_arrays(), zarr_format)
    (path / "kind" / ("1" if zarr_format == 2 else "c/1")).unlink()
    for _ in range(2):
        caplog.clear()
        data = load(path)
        assert data.classes["kind"] == ["0", "3", "7"]
        assert "WARNING" in caplog.text
        assert "kind: 1 of 8 chunks" in caplog.text
        assert "adjacency_matrix" not in caplog.text


def test_copies_lie_in_one_part(tmp_path, caplog):
    """Also where one is written as links, or transposed as by Julia."""
    arrays = flat_arrays()
    first = {name: array[:10] for name, array in arrays.items()}
    np.savez(tmp_path / "first.npz", **first)
    write_flat(tmp_path / "all.zarr", flat_arrays("cset_size", "link_matrix"))
    write_grouped(tmp_path / "julia.zarr", sets=ORIGINALS[:10])
    words = [f"{tmp_path}/{name}" for name in ("first.npz", "all.zarr", "julia.zarr")]
    for seed in range(5):
        split = ["--split", "0.4", "0.3", "0.3", f"--split_seed={seed}"]
        data = load(tmp_path / "first.npz", *split, "--data", *words)
        parts = data.split
        assert np.array_equal(parts[:10], parts[10:20])
        assert np.array_equal(parts[:10], parts[40:])
        assert np.bincount(parts[10:40]).tolist() == [12, 9, 9]  # the shares are of the originals
    assert "20 sets are copies" in caplog.text


def test_data_are_read_once(tmp_path, monkeypatch):
    """And again when they have changed, or for other labels."""
    path = tmp_path / "a.npz"
    np.savez(path, **flat_arrays())
    first = load(path)

    def fail(*args):
        raise script.InputError("read again")

    monkeypatch.setattr(script, "read_all", fail)
    assert load(path, "--split_seed=3").hash == first.hash
    with pytest.raises(script.InputError, match="read again"):
        load(path, "--tasks=kind")
    np.savez(path, **flat_arrays())
    with pytest.raises(script.InputError, match="read again"):
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
    paths = [stores["grouped2.zarr"], stores["links3.zarr"], stores["flat.npz"]]
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
    unlabelled = write_grouped(tmp_path / "b.zarr", sets=[(order, {}) for order, _ in ORIGINALS])
    rows, said = predict(tmp_path / "b.csv", best, unlabelled)
    assert "accuracy" not in said
    labelled, said = predict(tmp_path / "c.csv", best, stores["flat3.zarr"], "--labels", *TASKS)
    assert "kind, 30 sets with a label" in said and "flat, 15 sets with a label" in said
    for i, (row, other) in enumerate(zip(rows, labelled, strict=True)):
        assert (row["source"], row["set"]) == (str(unlabelled), f"cset_{i + 1}")
        labels = ORIGINALS[i][1]
        assert other["kind_label"] == str(labels["kind"]) and row["kind_label"] == ""
        assert other["flat_label"] == {-1: "", 0: "0", 1: "1"}[labels["flat"]]
        for name in ("kind_3", "kind_7", "flat_0", "flat_1"):
            assert float(row[name]) == pytest.approx(float(other[name]), rel=1e-4)


def test_what_cannot_be_predicted(trained, stores, tmp_path):
    new = stores["flat3.zarr"]
    other = tmp_path / "other.npz"
    np.savez(other, **{**flat_arrays(), "kind": np.arange(SETS) + 3})
    (tmp_path / "there.csv").touch()
    out = ["--out", tmp_path / "d.csv"]
    best = trained / "best.pt"
    wrong = {
        "there is no such file": [tmp_path / "missing.pt", new, *out],
        "exists": [best, new, "--out", tmp_path / "there.csv"],
        "has the tasks kind, flat": [best, new, "--labels", "x", *out],
        "knows 3, 7, but not 4": [best, other, "--labels", "kind", *out],
        "was trained on": [best, stores["flat.npz"], *out],
        "no_such.zarr": [best, tmp_path / "no_such.zarr", *out],
    }
    for text, words in wrong.items():
        said = call_script("tools/predict_causal_sets", *words, status=2)
        assert text in said
        assert len(said.splitlines()) == 1
    assert not (tmp_path / "d.csv").exists()
