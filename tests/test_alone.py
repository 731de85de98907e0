"""A script copied alone into an empty folder trains there, on small files of the user's formats.

Each format is a function that writes such files into the folder, and returns the options.
"""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
from helpers import ROOT, environment

SETS = 60


def causal_sets():
    """SETS of QuantumGrav's arrays: random orders of two densities, which are the labels."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(8, 13, SETS)
    matrices = np.zeros((SETS, 12, 12), np.uint8)
    labels = np.arange(SETS) % 2
    for matrix, size, label in zip(matrices, sizes, labels, strict=True):
        order = np.triu(rng.random((size, size)) < (0.15, 0.5)[label], 1)
        order[0, 1] = True
        while not np.array_equal(order, order | (order @ order)):
            order |= order @ order
        matrix[:size, :size] = order
    return {"adjacency_matrix": matrices, "atomcount": sizes, "manifold": labels}


def write_arrays(group, arrays):
    for name, array in arrays.items():
        made = group.create_array(name, shape=array.shape, dtype=array.dtype)
        made[...] = array


def npz(folder):
    np.savez(folder / "mine.npz", **causal_sets())
    return ["--data", "mine.npz", "--tasks", "manifold"]


def zarr(version, layout):
    """The format of a store: `flat`, where the first axis of each array counts the sets; `one
    group`, the same within a group; `groups`, one for each set."""

    def write(folder):
        zarr = pytest.importorskip("zarr")
        store = zarr.open_group(folder / "mine.zarr", mode="w", zarr_format=version)
        arrays = causal_sets()
        if layout == "flat":
            write_arrays(store, arrays)
        elif layout == "one group":
            write_arrays(store.create_group("train"), arrays)
        else:
            for i, size in enumerate(arrays["atomcount"]):
                own = {"adjacency_matrix": arrays["adjacency_matrix"][i, :size, :size]}
                own["manifold"] = arrays["manifold"][i : i + 1]
                write_arrays(store.create_group(f"cset_{i}"), own)
        return ["--data", "mine.zarr", "--tasks", "manifold"]

    return write


QUANTUMGRAV = "run_train_quantumgrav_ddp"
TINY = "--hidden_dim=8 --head_dim=8 --num_layers=1 --num_epochs=2 --batch_size=15".split()
CASES = {"npz": (QUANTUMGRAV, TINY, npz)}  # script, its options, the user's files
for version in (2, 3):
    for layout in ("flat", "one group", "groups"):
        CASES[f"zarr {version} {layout}"] = (QUANTUMGRAV, TINY, zarr(version, layout))


@pytest.mark.parametrize("case", CASES)
def test_alone(case, tmp_path):
    name, options, write = CASES[case]
    shutil.copy(ROOT / f"{name}.py", tmp_path)
    command = [sys.executable, f"{name}.py", *options, *write(tmp_path)]
    env = environment(PYTHONPATH="")

    def call(*more):
        done = subprocess.run([*command, *more], cwd=tmp_path, env=env, capture_output=True, text=1)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    before = set(tmp_path.iterdir())
    if case == "npz":  # one is enough: it ends where the data are read
        call("--prepare_only")
        assert {path.name for path in set(tmp_path.iterdir()) - before} == {"cache"}
    text = call("--output_dir=run")
    assert "completed successfully!" in text
    assert {path.name for path in set(tmp_path.iterdir()) - before} == {"cache", "run"}
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["steps"] == 2 * (SETS * 3 // 4 // 15)
    assert 0 <= summary["test"]["manifold/accuracy"] <= 1
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert all(np.isfinite(row["loss"]) for row in rows if "loss" in row)
    (read,) = (tmp_path / "cache").iterdir()
    assert len(np.load(read / "labels.npy")) == SETS
