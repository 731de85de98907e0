"""The causal sets of run_train_quantumgrav_ddp.py: theory of what is generated, storage, readers, split and batches."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import one_process, run_ranks

script = importlib.import_module("run_train_quantumgrav_ddp")

# ---- Theory ------------------------------------------------------------------------------------------


def expected_fraction(d: int) -> float:
    return math.gamma(d + 1) * math.gamma(d / 2) / (2 * math.gamma(1.5 * d))


def expected_chains(k: int, d: int) -> float:
    """Meyer's chi_k: chains of k elements over n (n - 1) ... (n - k + 1)."""
    ratio = math.gamma(d / 2) * math.gamma(d) / (math.gamma(k * d / 2) * math.gamma((k + 1) * d / 2))
    return (math.gamma(d + 1) / 2) ** (k - 1) * ratio / k


def near(values, expected: float) -> bool:
    """Whether the mean of `values` is within 5 standard errors of `expected`, these being small."""
    error = np.std(values, ddof=1) / len(values) ** 0.5
    assert 0 < error < 0.02 * expected, "too few draws for a sharp test"
    return abs(np.mean(values) - expected) < 5 * error


def is_order(order: np.ndarray) -> bool:
    """Strictly upper triangular bool, and transitive."""
    after = order.astype(int)
    return order.dtype == bool and not np.tril(order).any() and not ((after @ after > 0) & ~order).any()


@pytest.mark.parametrize("d", [2, 3, 4])
def test_sprinklings_have_the_expected_chains(d):
    """Ordering fraction, chains of 3 and of 4; in two dimensions also links and minimal and maximal elements."""
    rng, n = np.random.default_rng(d), 40
    orders = [script.sprinkle(rng, n, d) for _ in range(4000 if d == 4 else 6000 if d == 3 else 1000)]
    assert all(is_order(order) for order in orders[:50])
    counts = [order.astype(float) for order in orders]
    assert near([script.ordering_fraction(order) for order in orders], expected_fraction(d))
    assert near([c.sum() / (n * (n - 1)) for c in counts], expected_chains(2, d))
    assert near([(c @ c).sum() / (n * (n - 1) * (n - 2)) for c in counts], expected_chains(3, d))
    if d < 4:  # too rare in four dimensions
        assert near([(c @ c @ c).sum() / (n * (n - 1) * (n - 2) * (n - 3)) for c in counts], expected_chains(4, d))
    assert abs(np.median(script.myrheim_meyer(np.array([script.ordering_fraction(o) for o in orders]))) - d) < 0.1
    if d == 2:
        harmonic = sum(1 / i for i in range(1, n + 1))
        assert near([script.links(order).sum() for order in orders], (n + 1) * harmonic - 2 * n)
        assert near([(~order.any(0)).sum() for order in orders], harmonic)
        assert near([(~order.any(1)).sum() for order in orders], harmonic)


def test_myrheim_meyer_dimension():
    found = script.myrheim_meyer(np.array([1 / 2, 8 / 35, 1 / 10, expected_fraction(6), 0.999, 0.0]))
    assert found[:4] == pytest.approx([2, 3, 4, 6], abs=1e-6) and 1 <= found[4] < 1.1 and found[5] == pytest.approx(12)


def test_kleitman_rothschild_orders():
    """n^2 / 8 links, all of them the drawn edges; the ordering fraction tends to 3 / 8."""
    rng, n = np.random.default_rng(7), 64
    orders = [script.make_order("kr", rng, n, 0.0) for _ in range(200)]
    far = n * n / 16 * (1 - 0.75 ** (n / 2))
    assert near([script.ordering_fraction(order) for order in orders], (n * n / 8 + far) * 2 / (n * (n - 1)))
    assert abs(np.mean([script.ordering_fraction(order) for order in orders]) - 3 / 8) < 0.01
    assert near([script.links(order).sum() for order in orders], n * n / 8)
    assert all(is_order(order) and script.heights(order).max() == 2 for order in orders[:20])


def test_layers():
    """With p = 1 a layer precedes every later one; else links join neighbouring layers only, with probability p."""
    layer, rng = np.sort(np.random.default_rng(3).integers(5, size=40)), np.random.default_rng(4)
    whole = script.layered(rng, layer, 1.0)
    assert np.array_equal(whole, layer[:, None] < layer[None, :])
    neighbours, shares = layer[None, :] - layer[:, None] == 1, []
    for _ in range(100):
        order = script.layered(rng, layer, 0.4)
        link = script.links(order)
        assert is_order(order) and not (order & ~whole).any() and not (link & ~neighbours).any()
        shares.append(link.sum() / neighbours.sum())
    assert near(shares, 0.4)


@pytest.mark.parametrize("kind", script.KINDS)
def test_every_kind_is_an_order(kind):
    rng = np.random.default_rng(11)
    assert all(is_order(script.make_order(kind, rng, n, 0.02)) for n in (2, 3, 4, 5, 17, 33))


def test_percolation_meets_the_fraction_of_a_sprinkling():
    """On average exactly, and of every set within a few pairs."""
    rng, gaps = np.random.default_rng(5), []
    for number in range(60):
        target = script.ordering_fraction(script.sprinkle(rng, 40, 2 + number % 3))
        order = script.percolate(rng, 40, target)
        gaps.append(script.ordering_fraction(order) - target)
        assert is_order(order)
    assert max(map(abs, gaps)) < 0.12 and abs(np.mean(gaps)) < 0.01 and np.median(np.abs(gaps)) < 0.02
    assert script.percolate(rng, 20, 1.0).sum() >= 189 and script.percolate(rng, 20, 0.0).sum() <= 1


def test_percolation_and_destroyed_start_from_all_dimensions():
    """Their ordering fractions spread over those of 2, 3 and 4 dimensions."""
    args = script.parse_args(["--kinds=percolation", "--samples=60", "--min_size=48", "--max_size=48"])
    source = script.Generated(args)
    found = script.myrheim_meyer(np.array([script.ordering_fraction(source[i][0]) for i in range(60)]))
    assert all(((found > d - 0.5) & (found < d + 0.5)).sum() > 8 for d in (2, 3, 4))


def test_destroyed_sets():
    """No flipped pair: the sprinkling itself. Else another order, with more relations the more were flipped."""
    def pair(share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(seed)
        plain = script.sprinkle(rng, 40, int(rng.integers(2, 5)))
        return plain, script.make_order("destroyed", np.random.default_rng(seed), 40, share)

    plain, same = pair(0.0, 1)
    assert np.array_equal(plain, same)
    pairs = [pair(0.02, seed) for seed in range(30)]
    assert all(is_order(b) and (a != b).any() for a, b in pairs)
    more, most = (sum(b.sum() - a.sum() for a, b in found) for found in (pairs, [pair(0.1, n) for n in range(30)]))
    assert 0 < more < most


def test_links_closure_and_heights_against_plain_loops():
    rng = np.random.default_rng(0)
    for kind in script.KINDS:
        order = script.make_order(kind, rng, 24, 0.02)
        n, link, height = len(order), script.links(order), np.zeros(len(order), int)
        for j in range(n):
            below = [i for i in range(n) if order[i, j]]
            height[j] = max((height[i] + 1 for i in below), default=0)
            for i in below:
                assert link[i, j] == (not any(order[i, k] and order[k, j] for k in range(n)))
        assert not (link & ~order).any() and np.array_equal(script.closure(link), order)
        assert np.array_equal(script.heights(order), height)
        assert not ((link.astype(int) @ link.astype(int) > 0) & link).any()  # no link has a way round it
    chain = np.eye(9, k=1, dtype=bool)  # closure takes several rounds
    assert np.array_equal(script.closure(chain), np.triu(np.ones((9, 9), bool), 1))
    assert script.heights(script.closure(chain)).tolist() == list(range(9))


# ---- Storage -----------------------------------------------------------------------------------------

KINDS = "mink2,mink3,mink4,percolation,layered,kr,destroyed"


def arguments(folder: Path, *options: str, sets: int = 35):
    small = ["--min_size=4", "--max_size=12", "--num_workers=1", f"--samples={sets}", f"--kinds={KINDS}"]
    return script.parse_args([*small, f"--cache_dir={folder}/cache", f"--output_dir={folder}/run", *options])


def load(args) -> script.CausalSets:
    return script.CausalSets(Path(script.prepare_sets(args)), args, torch.device("cpu"))


def content(folder: str | Path) -> dict[str, bytes]:
    return {name: (Path(folder) / f"{name}.bin").read_bytes() for name in script.FILES}


def parts_of(orders: list[np.ndarray], labels: list[list[int]], graph: str = "links") -> dict[str, bytes]:
    """What must be kept of these orders."""
    rows = [script.describe_set(order, row, graph) for order, row in zip(orders, labels, strict=True)]
    return {n: b"".join(np.asarray(r[n], t).tobytes() for r in rows) for n, (t, _) in script.FILES.items()}


def test_a_set_depends_on_seed_and_number_alone(tmp_path, monkeypatch):
    """Not on the number of workers, nor on how many a worker makes at a time, nor on how many sets there are."""
    plain = content(script.prepare_sets(arguments(tmp_path / "a", sets=120)))
    args = arguments(tmp_path / "b", "--num_workers=2", sets=120)
    assert content(script.prepare_sets(args)) == plain  # two chunks, two processes
    for chunk in (1, 7, 1000):
        monkeypatch.setattr(script, "CHUNK", chunk)
        found = content(script.prepare_sets(arguments(tmp_path / f"c{chunk}", sets=31)))
        assert all(plain[name].startswith(found[name]) for name in plain)
    other = content(script.prepare_sets(arguments(tmp_path / "d", "--data_seed=1", sets=31)))
    assert other["past"] != found["past"] and other["sizes"] != found["sizes"]
    source = script.Generated(args)
    backwards = [source[i] for i in reversed(range(120))][::-1]  # number 119 made first
    assert parts_of(*map(list, zip(*backwards, strict=True))) == plain
    assert all(4 <= len(order) <= 12 for order, _ in backwards) and {len(o) for o, _ in backwards} == {*range(4, 13)}
    sizes, kinds = [len(order) for order, _ in backwards], KINDS.split(",")
    assert all(sizes[shift:] != sizes[:-shift] for shift in range(1, 100))  # none is made twice
    for number, (_, labels) in enumerate(backwards):
        kind = kinds[number % 7]
        dim = int(kind[4:]) if kind.startswith("mink") else -1
        assert labels == [number % 7, dim, int(dim > 0)]


def test_a_second_start_generates_nothing(tmp_path, monkeypatch, capsys):
    """What is damaged is made anew: truncated always, changed with --verify_data."""
    calls, plain = [], script.make_chunk
    monkeypatch.setattr(script, "make_chunk", lambda *args: calls.append(args[2]) or plain(*args))
    monkeypatch.setattr(script, "CHUNK", 10)
    args = arguments(tmp_path)
    folder = Path(script.prepare_sets(args))
    whole = content(folder)
    assert calls == [0, 10, 20, 30]
    assert script.prepare_sets(args) == str(folder) and len(calls) == 4
    for options in (["--graph=order"], ["--samples=36"], ["--max_size=11"], ["--destroyed_share=0.5"]):
        assert script.prepare_sets(arguments(tmp_path, *options)) != str(folder)
    del calls[:]
    script.start_logging(0)
    for name in ("past", "manifest"):
        path = folder / (f"{name}.bin" if name == "past" else "manifest.json")
        path.write_bytes(path.read_bytes()[:-1]) if name == "past" else path.unlink()
        assert script.prepare_sets(args) == str(folder) and content(folder) == whole and len(calls) == 4
        del calls[:]
    said = capsys.readouterr().out
    assert "WARNING" in said and "past.bin is damaged" in said and "anew" in said
    changed = bytearray(whole["features"])
    changed[0] ^= 1
    (folder / "features.bin").write_bytes(changed)
    assert script.prepare_sets(args) and not calls
    assert script.prepare_sets(arguments(tmp_path, "--verify_data")) == str(folder) and content(folder) == whole


def test_the_folder_is_whole_or_not_there(tmp_path, monkeypatch):
    """Killed while it was made: the next start makes it again."""
    args, plain = arguments(tmp_path), script.write_file
    def fail(path, *rest):
        if path.name == "manifest.json":
            raise KeyboardInterrupt
        plain(path, *rest)
    monkeypatch.setattr(script, "write_file", fail)
    with pytest.raises(KeyboardInterrupt):
        script.prepare_sets(args)
    monkeypatch.setattr(script, "write_file", plain)
    assert len(load(args)) == 35


def test_what_is_kept_of_a_set():
    """Features, statistics and both lists of neighbours against plain loops."""
    order = script.make_order("mink3", np.random.default_rng(2), 14, 0.0)
    n, link = len(order), script.links(order)
    for graph, edges in (("links", link), ("order", order)):
        kept = script.describe_set(order, [3, -1], graph)
        past = [[i for i in range(n) if edges[i, j]] for j in range(n)]
        future = [[j for j in range(n) if edges[i, j]] for i in range(n)]
        assert kept["past"].tolist() == sum(past, []) and kept["past_count"].tolist() == list(map(len, past))
        assert kept["future"].tolist() == sum(future, []) and kept["future_count"].tolist() == list(map(len, future))
        assert kept["sizes"] == n and kept["edges"] == sum(map(len, past)) and kept["labels"] == [3, -1]
    up, down = np.zeros(n, int), np.zeros(n, int)
    for i in range(n):
        up[i] = max((up[j] + 1 for j in range(i) if order[j, i]), default=0)
    for i in reversed(range(n)):
        down[i] = max((down[j] + 1 for j in range(i, n) if order[i, j]), default=0)
    columns = [link.sum(0), link.sum(1), up, down, order.sum(0), order.sum(1)]
    assert np.array_equal(kept["features"], np.stack(columns, axis=1))
    chains = sum(order[i, j] and order[j, k] for i in range(n) for j in range(n) for k in range(n))
    expected = [n, order.sum(), link.sum(), (up == 0).sum(), (down == 0).sum(), up.max() + 1, chains]
    assert list(kept["statistics"]) == expected


# ---- Readers -----------------------------------------------------------------------------------------


def orders_of(count: int = 6, least: int = 3) -> list[np.ndarray]:
    kinds, rng = list(script.KINDS), np.random.default_rng(9)
    return [script.make_order(kinds[i % 7], rng, least + 2 * i, 0.02) for i in range(count)]


def write_groups(path: Path, sets: list[dict], julia: bool = True) -> None:
    """A store of the project: a group for each set; Julia's matrices arrive transposed."""
    zarr = pytest.importorskip("zarr")
    root = zarr.open_group(str(path), mode="w", zarr_format=2)
    for number, arrays in enumerate(sets, 1):
        group = root.create_group(f"cset_{number}")
        for name, array in arrays.items():
            array = np.asarray(array)
            group.create_array(name, data=np.ascontiguousarray(array.T) if julia and array.ndim == 2 else array)


def a_set(order: np.ndarray, number: int, **more) -> dict:
    link = script.links(order)
    return {"adj": order.astype(np.uint8), "linkmat": link.astype(np.uint8), "cset_type": np.int64(number % 3 + 1),
            "in_degrees_link": link.sum(0), "manifold_like": np.float64(number % 2)} | more  # fmt: skip


def write_npz(path: Path, orders: list[np.ndarray], **more) -> None:
    edges = [np.stack(script.links(order).nonzero()) for order in orders]
    arrays = {"node_ptr": np.cumsum([0, *map(len, orders)]), "edge_ptr": np.cumsum([0, *(e.shape[1] for e in edges)])}
    arrays |= {"edge_index": np.concatenate(edges, axis=1), "y_cset_type": np.arange(len(orders)) % 3 + 1}
    np.savez(path, **{name: value for name, value in (arrays | more).items() if value is not None})


def files(folder: Path, *paths: Path, tasks: str = "cset_type,manifold_like", more: tuple = ()):
    options = [f"--files={','.join(map(str, paths))}", f"--active_tasks={tasks}", "--num_workers=1", *more]
    return script.parse_args([*options, f"--cache_dir={folder}/cache", f"--output_dir={folder}/run"])


@pytest.mark.parametrize("leave_out", ["adj", "linkmat", "none"])
@pytest.mark.parametrize("julia", [True, False])
def test_read_groups_of_a_zarr_store(tmp_path, leave_out, julia):
    """From the order or from the links, in either triangle; sets in the order of their numbers, not of their names."""
    orders = orders_of(11)
    labels = [[i % 3 + 1, i % 2] for i in range(11)]
    sets = [{k: v for k, v in a_set(order, i).items() if k != leave_out} for i, order in enumerate(orders)]
    write_groups(tmp_path / "a.zarr", sets, julia)
    args = files(tmp_path, tmp_path / "a.zarr")
    assert content(script.prepare_sets(args)) == parts_of(orders, labels)
    data = load(args)
    assert data.classes == {"cset_type": ["1", "2", "3"], "manifold_like": ["0", "1"]}
    assert data.labels[:, 0].tolist() == [i % 3 for i in range(11)] and data.skipped == 0


@pytest.mark.parametrize("name", ["adjacency_matrix", "link_matrix"])
def test_read_the_older_flat_store(tmp_path, name):
    """Padded to the largest, with the sizes in atomcount; elements without relations at the end stay."""
    zarr = pytest.importorskip("zarr")
    orders = orders_of()
    orders[1] = np.zeros((5, 5), bool)  # an antichain: only atomcount knows its size
    most = max(map(len, orders))
    padded = np.zeros((len(orders), most, most), np.float32)
    for row, order in zip(padded, orders, strict=True):
        row[: len(order), : len(order)] = order if name == "adjacency_matrix" else script.links(order)
    root = zarr.open_group(str(tmp_path / "a.zarr"), mode="w", zarr_format=2)
    arrays = {name: padded.transpose(0, 2, 1), "atomcount": np.array([len(o) for o in orders], np.int32)}
    arrays |= {"dimension": np.arange(len(orders), dtype=np.int32) % 3 + 2, "num_samples": np.array([len(orders)])}
    for key, array in arrays.items():
        root.create_array(key, data=np.ascontiguousarray(array))
    args = files(tmp_path, tmp_path / "a.zarr", tasks="dimension")
    labels = [[i % 3 + 2] for i in range(len(orders))]
    assert content(script.prepare_sets(args)) == parts_of(orders, labels)
    assert load(args).classes == {"dimension": ["2", "3", "4"]}


def test_read_npz_beside_zarr_and_choose_the_graph(tmp_path):
    """Two files are read one after the other; -1 is no label; --graph order keeps all related pairs."""
    orders = orders_of()
    write_npz(tmp_path / "a.npz", orders, y_cset_type=np.array([1, 2, -1, 2, 1, 2]))
    write_groups(tmp_path / "b.zarr", [a_set(order, i) for i, order in enumerate(orders)])
    args = files(tmp_path, tmp_path / "a.npz", tmp_path / "b.zarr", tasks="cset_type", more=("--graph=order",))
    labels = [[y] for y in (1, 2, -1, 2, 1, 2)] + [[i % 3 + 1] for i in range(6)]
    assert content(script.prepare_sets(args)) == parts_of(orders * 2, labels, "order")
    assert load(args).labels[:, 0].tolist() == [0, 1, -1, 1, 0, 1, 0, 1, 2, 0, 1, 2]


def test_zarr_is_not_installed(tmp_path, monkeypatch):
    (tmp_path / "a.zarr").mkdir()
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(ValueError, match=r"a\.zarr: pip install zarr"):
        script.prepare_sets(files(tmp_path, tmp_path / "a.zarr"))


def test_files_that_cannot_be_read(tmp_path):
    """Each says its name, what was found and what is expected."""
    write_npz(tmp_path / "no_label.npz", orders_of(), y_cset_type=None)
    write_npz(tmp_path / "short.npz", orders_of(), y_cset_type=np.zeros(5, int))
    write_npz(tmp_path / "no_ptr.npz", orders_of(), node_ptr=None)
    (tmp_path / "text.npz").write_text("no arrays")
    (tmp_path / "empty.zarr").mkdir()
    write_groups(tmp_path / "other.zarr", [{"matrix": np.eye(3), "cset_type": np.int64(1)}])
    expected = {"none.npz": "no such file", "no_label.npz": "expected node_ptr, edge_ptr, edge_index, y_cset_type",
                "short.npz": "shapes", "no_ptr.npz": "holds edge_ptr", "text.npz": "expected an .npz file",
                "empty.zarr": "expected", "other.zarr": "expected adj or linkmat"}  # fmt: skip
    for name, text in expected.items():
        with pytest.raises(ValueError, match=name) as caught:
            script.prepare_sets(files(tmp_path, tmp_path / name, tasks="cset_type"))
        assert text in str(caught.value), name


def test_bad_sets_are_all_listed(tmp_path, capsys):
    """With file, number and what would be right; --skip_bad_data leaves them out, counts and lists them."""
    orders = orders_of(9, least=6)
    sets = [a_set(order, i) for i, order in enumerate(orders)]
    cycle, gap = orders[1].copy(), np.eye(len(orders[2]), k=1, dtype=np.uint8)
    cycle[-1, 0] = cycle[0, -1] = True
    sets[1]["adj"], sets[2]["adj"], sets[3]["adj"] = cycle.astype(np.uint8), gap, np.zeros((4, 3), np.uint8)
    sets[4]["adj"] = sets[4]["adj"] * 2
    del sets[5]["cset_type"]
    del sets[6]["adj"], sets[6]["linkmat"]
    sets[7]["adj"] = np.zeros((1, 1), np.uint8)
    write_groups(tmp_path / "a.zarr", sets)
    write_npz(tmp_path / "b.npz", orders)
    arrays = dict(np.load(tmp_path / "b.npz"))
    arrays["edge_index"][0, arrays["edge_ptr"][4]] = 99
    arrays["edge_index"][:, arrays["edge_ptr"][6]] = 2  # an element in its own past
    np.savez(tmp_path / "b.npz", **arrays)
    paths = [tmp_path / "a.zarr", tmp_path / "b.npz"]
    with pytest.raises(ValueError) as caught:
        script.prepare_sets(files(tmp_path, *paths, tasks="cset_type"))
    said = str(caught.value)
    assert "9 bad sets of 18 (--skip_bad_data" in said and len(said.splitlines()) == 10
    words = {1: "both triangles", 2: "not transitive", 3: "expected (n, n)", 4: "other entries than 0 and 1",
             5: "cset_type", 6: "matrix", 7: "n from 2"}  # fmt: skip
    for number, text in words.items():
        line = next(line for line in said.splitlines() if f"a.zarr: set {number}:" in line)
        assert text in line, line
    assert "b.npz: set 4: edge_index outside 0 to 13" in said and "b.npz: set 6: related pairs in both" in said
    args = files(tmp_path, *paths, tasks="cset_type", more=("--skip_bad_data",))
    folder = Path(script.prepare_sets(args))
    assert (folder / "skipped_data.txt").read_text().splitlines() == [line.strip() for line in said.splitlines()[1:]]
    good, rest = [orders[0], orders[8]], [orders[i] for i in (0, 1, 2, 3, 5, 7, 8)]
    labels = [[1], [3]] + [[i % 3 + 1] for i in (0, 1, 2, 3, 5, 7, 8)]
    assert content(folder) == parts_of(good + rest, labels)
    script.start_logging(0)
    data = script.load_data(args, one_process())
    assert data.skipped == 9 and len(data) == 9
    said = capsys.readouterr().out
    assert "Preparing data loaders..." in said and "left out 9 bad sets, listed in" in said


def test_only_bad_sets_are_an_error_in_any_case(tmp_path):
    write_npz(tmp_path / "a.npz", [np.eye(30, k=1, dtype=bool)] * 25)
    arrays = dict(np.load(tmp_path / "a.npz"))
    np.savez(tmp_path / "a.npz", **arrays | {"edge_index": arrays["edge_index"] + 50})
    with pytest.raises(ValueError, match="25 bad sets of 25") as caught:
        script.prepare_sets(files(tmp_path, tmp_path / "a.npz", tasks="cset_type", more=("--skip_bad_data",)))
    assert len(str(caught.value).splitlines()) == 22 and str(caught.value).endswith("... and 5 more")



@pytest.mark.parametrize("name, place, value", [
    pytest.param("edge_ptr", 0, 3), pytest.param("edge_ptr", 3, 0),
    pytest.param("node_ptr", 0, -2), ("node_ptr", 2, 99)])  # fmt: skip
def test_pointers_of_npz_must_fit(tmp_path, name, place, value):
    """They begin at 0 and ascend: edges that belong to no set are not dropped in silence."""
    write_npz(tmp_path / "a.npz", orders_of())
    arrays = dict(np.load(tmp_path / "a.npz"))
    arrays[name][place] = value
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ValueError, match=r"a\.npz"):
        script.prepare_sets(files(tmp_path, tmp_path / "a.npz", tasks="cset_type"))


def test_labels_must_be_integers(tmp_path):
    """A curvature is no class: it is refused, not cut."""
    write_npz(tmp_path / "a.npz", orders_of(), y_cset_type=np.array([0.5, 1, 2, 1, 2.7, 0]))
    with pytest.raises(ValueError, match=r"a\.npz"):
        script.prepare_sets(files(tmp_path, tmp_path / "a.npz", tasks="cset_type"))


@pytest.mark.parametrize("share, count", [
    (0.25, 25), (1.0, 100), pytest.param(0.14, 14)])
def test_subset_is_a_share(tmp_path, share, count):
    args = arguments(tmp_path, f"--subset={share}")
    parts = script.split_sets(args, one_process(), range(100))
    assert sum(map(len, parts.values())) == count


def test_tasks_must_be_in_the_data(tmp_path):
    script.start_logging(0)
    cases = {"--active_tasks=cls,colour": "colour", "--stop_tasks={}": None, '--task_weights={"dim": 2}': "dim"}
    stop = '{"manifold": {"metric": "loss", "mode": "min", "delta": 0, "grace_period": 0, "init_best_score": 9}}'
    cases |= {f"--stop_tasks={stop}": "manifold"}
    for option, task in cases.items():
        if task is None:
            script.load_data(arguments(tmp_path, option), one_process())
            continue
        with pytest.raises(ValueError, match=f"task '{task}': expected one of --active_tasks"):
            script.load_data(arguments(tmp_path, option), one_process())
    with pytest.raises(ValueError, match="two classes or more"):  # only one dimension
        script.load_data(arguments(tmp_path, "--kinds=mink2,kr", "--active_tasks=dim"), one_process())


# ---- Split -------------------------------------------------------------------------------------------


def split_on_ranks(ddp, folder: str, options: list[str]) -> tuple[dict[str, np.ndarray], str]:
    args = arguments(Path(folder), *options)
    data = script.load_data(args, ddp)
    return script.split_sets(args, ddp, data), args.data_key


def test_split(tmp_path, capsys):
    """Disjoint, all sets, the same on all ranks of any world size and for any --seed; kept in split.npz; logged."""
    script.start_logging(0)
    parts, key = split_on_ranks(one_process(), str(tmp_path), [])
    said = capsys.readouterr().out
    lines = ["Data split complete:", "  Training samples:   28", "  Validation samples: 3", "  Test samples:       4"]
    assert all(f"INFO: {line}\n" in said for line in lines)
    kept = np.load(tmp_path / "run" / "split.npz")
    assert {*kept} == {"train", "valid", "test"} and all(np.array_equal(kept[n], parts[n]) for n in parts)
    assert sorted(np.concatenate(list(parts.values()))) == list(range(35))  # disjoint, and all of them
    for other, other_key in run_ranks(3, split_on_ranks, str(tmp_path), ["--seed=7", "--shuffle_labels"]):
        assert other_key == key and all(np.array_equal(other[n], parts[n]) for n in parts)
    another, _ = split_on_ranks(one_process(), str(tmp_path), ["--split_seed=1"])
    assert not np.array_equal(another["test"], parts["test"])
    half, _ = split_on_ranks(one_process(), str(tmp_path), ["--subset=0.5", "--split=0.5,0.25,0.25"])
    assert [len(half[n]) for n in ("train", "valid", "test")] == [9, 4, 5]
    assert len({*np.concatenate(list(half.values())).tolist()}) == 18  # the original draws with replacement
    with pytest.raises(ValueError, match="at least one of each"):
        split_on_ranks(one_process(), str(tmp_path), ["--subset=0.1"])


# ---- Batches -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", ["links", "order"])
@pytest.mark.parametrize("scale", ["log", "raw"])
def test_batch_against_a_loop_over_sets(tmp_path, graph, scale):
    """Any sets in any order, one of them twice: features, owners, pointers and neighbours."""
    columns = ["past_size", "in_degree", "future_height", "out_degree", "past_height", "future_size"]
    args = arguments(tmp_path, f"--graph={graph}", f"--feature_scale={scale}", f"--features={','.join(columns)}")
    data, source = load(args), script.Generated(args)
    for ids in ([5, 0, 34, 12, 12, 3], [7], list(range(35))):
        batch, offset, owner, features = data.batch(np.array(ids)), 0, [], []
        ptr, pointer, rows = [0], {"past": [0], "future": [0]}, {"past": [], "future": []}
        for place, number in enumerate(ids):
            order = source[number][0]
            edges, n = script.links(order) if graph == "links" else order, len(order)
            kept = script.describe_set(order, [0, 0, 0], graph)["features"]
            features += [[kept[i][script.FEATURES.index(name)] for name in columns] for i in range(n)]
            for i in range(n):
                for way, matrix in (("past", edges[:, i]), ("future", edges[i])):
                    found = [offset + j for j in range(n) if matrix[j]]
                    rows[way] += found
                    pointer[way].append(pointer[way][-1] + len(found))
            owner, offset = owner + [place] * n, offset + n
            ptr.append(offset)
        features = np.array(features, np.float32)
        np.testing.assert_allclose(batch.features, np.log1p(features) if scale == "log" else features, rtol=1e-6)
        assert batch.owner.tolist() == owner and batch.ptr.tolist() == ptr
        assert batch.past_ptr.tolist() == pointer["past"] and batch.past.tolist() == rows["past"]
        assert batch.future_ptr.tolist() == pointer["future"] and batch.future.tolist() == rows["future"]
        assert batch.longest == max(np.diff(ptr)) and batch.features.dtype == torch.float32


def test_labels_become_classes(tmp_path):
    """Of generated sets, with their names; the dimension of what is no sprinkling is unknown."""
    data = load(arguments(tmp_path))
    assert data.classes["cls"] == KINDS.split(",") and data.classes["dim"] == ["2", "3", "4"]
    assert data.classes["manifold"] == ["other", "sprinkling"]
    assert data.labels[:7].tolist() == [[0, 0, 1], [1, 1, 1], [2, 2, 1], *([i, -1, 0] for i in (3, 4, 5, 6))]
    assert json.loads((next((tmp_path / "cache").iterdir()) / "meta.json").read_text())["skipped"] == 0
