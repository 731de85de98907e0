"""A script copied alone into an empty folder trains there, on small files of the user's formats.

Each format is a function that writes such files into the folder, and returns the options.
"""

import bz2
import csv
import shutil
import subprocess
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from helpers import ROOT, environment, write_causal_sets, write_proteins, write_structures
from PIL import Image
from runs import Run

SETS = 60


def npz(folder):
    write_causal_sets(folder / "mine.npz", f"--samples={SETS}", "--min_size=8", "--max_size=12")
    return ["--data=mine.npz"]


def zarr_of_arrays(folder):
    """The first axis of each array counts the sets. (Other stores: test_causal_set_tools.py)"""
    zarr = pytest.importorskip("zarr")
    npz(folder)
    store = zarr.open_group(folder / "mine.zarr", mode="w", zarr_format=3)
    for name, array in np.load(folder / "mine.npz").items():
        store.create_array(name, data=array)
    (folder / "mine.npz").unlink()
    return ["--data=mine.zarr"]


def pairs():
    """Rows of queries with a document and one that is wrong."""
    rows = []
    for i in range(40):
        row = {"query": f"where is item {i}", "positive": f"item {i} is in hall {i % 7}"}
        rows.append({**row, "negative": f"nothing is in room {i}"})
    return rows


def csv_pairs(folder):
    with open(folder / "pairs.csv", "w") as file:
        writer = csv.DictWriter(file, ["query", "positive", "negative"])
        writer.writeheader()
        writer.writerows(pairs())
    return ["--phase1_data=pairs.csv", "--phase2_data=pairs.csv"]


def texts_and_parquet(folder):
    (folder / "texts.txt").write_text("\n".join(f"item {i} is heavy" for i in range(60)))
    table = pyarrow.Table.from_pylist(pairs())
    pyarrow.parquet.write_table(table, folder / "pairs.parquet")
    return ["--phase1_data=texts.txt", "--phase2_data=pairs.parquet"]


def image_folder(folder):
    rng = np.random.default_rng(0)
    for part, count in {"train": 40, "val": 8}.items():
        for color, name in enumerate(["blue", "red"]):
            (folder / "photos" / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 99, (20, 24, 3), np.uint8)
                pixels[:, :, 2 - 2 * color] += 150
                Image.fromarray(pixels).save(folder / "photos" / part / name / f"{i}.jpg")
    return ["--data=photos", "--size=16"]


def digits(folder):
    return []


def proteins(folder):
    """[sequence, ...]"""
    write_proteins(folder / "proteins.fasta", SETS)
    lines = (folder / "proteins.fasta").read_text().splitlines()
    (folder / "proteins.fasta").unlink()
    return lines[1::2]


def packed_fasta(folder):
    with bz2.open(folder / "mine.fasta.bz2", "wt") as file:
        file.writelines(f">{i}\n{text}\n" for i, text in enumerate(proteins(folder)))
    return ["--datafile=mine.fasta.bz2"]


def list_of_proteins(folder):
    rows = [{"protein_seq": text, "length": len(text)} for text in proteins(folder)]
    torch.save(rows, folder / "processed.pt")
    return ["--datafile=processed.pt"]


def pdb(folder):
    """Pairs on four structures, and a file of weights."""
    write_structures(folder, 4, least=16, most=16)
    shutil.copytree(ROOT / "data" / "dpo" / "soluble_model_weights", folder / "weights")
    return ["--train_data=pairs.json", "--base_model_dir=weights"]


# --------------------------------------------------------------------------------------------------
# What is looked at


def check_quantumgrav(folder, summary):
    assert summary["steps"] == 2 * (SETS * 3 // 4 // 15)
    assert 0 <= summary["test"]["cls/accuracy"] <= 1
    (read,) = (folder / "cache").iterdir()
    assert len(np.load(read / "labels.npy")) == SETS


def check_rebm(folder, summary):
    assert summary["best"]["metric"] == "dat/robust"
    assert set(summary["stages"]) == {"at", "dat"}


def check_train_ddp(folder, summary):
    assert summary["best"]["metric"] == "ndcg@10"
    assert set(summary["phases"]) == {"phase 1", "phase 2"}
    for path in summary["artifacts"]:
        assert (folder / path / "modules.json").exists()


def check_uniref50(folder, summary):
    assert summary["steps"] == 5 and summary["val"]["nelbo"] < 4
    (read,) = (folder / "cache").iterdir()
    assert len(np.load(read / "held_out.npy")) == SETS


def check_dpo(folder, summary):
    assert summary["best"]["metric"] == "loss"
    assert summary["baselines"]["before"]["loss"] == pytest.approx(np.log(2), rel=1e-6)
    assert len(summary["held_out"]) == 6
    saved = torch.load(folder / "run" / "best_model.pt", weights_only=True)
    released = torch.load(folder / "weights" / "v_48_020.pt", weights_only=True)
    assert saved["num_edges"] == released["num_edges"]
    assert saved["model_state_dict"].keys() == released["model_state_dict"].keys()


SCRIPTS = {  # options of a tiny run, what is looked at
    "run_train_quantumgrav_ddp": (
        "--hidden_dim=8 --head_dim=8 --num_layers=1 --num_epochs=2 --batch_size=15",
        check_quantumgrav,
    ),
    "run_train_rebm_ddp": (
        """--at_epochs=5 --total_epochs=1 --at_lr=1e-2 indist_attack_clf.max_steps=2
        --batch_size=15 --min_imgs_per_threshold=30 attack.max_steps=2""",
        check_rebm,
    ),
    "train_ddp": (
        """--teacher_model=builtin:lsa --student_model=builtin:bert --projection_hidden=16
        --eval_fraction=0.3 --batch_size=10 --max_steps=3 --save_to_artifacts""",
        check_train_ddp,
    ),
    "run_train_uniref50_ddp": (
        """--val_ratio=0.2 --hidden_size=16 --n_blocks_prot=1 --n_heads=2
        --max_protein_len=48 --batch_size=8 --n_iters=5 --accum=1""",
        check_uniref50,
    ),
    "run_dpo_ddp": (
        "--num_epochs=2 --batch_size=6 --lr=1e-5 --val_fraction=0.25",
        check_dpo,
    ),
}
CASES = [
    ("run_train_quantumgrav_ddp", npz),
    ("run_train_quantumgrav_ddp", zarr_of_arrays),
    ("run_train_rebm_ddp", image_folder),
    ("run_train_rebm_ddp", digits),
    ("train_ddp", csv_pairs),
    ("train_ddp", texts_and_parquet),
    ("run_train_uniref50_ddp", packed_fasta),
    ("run_train_uniref50_ddp", list_of_proteins),
    ("run_dpo_ddp", pdb),
]


def files_of(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("name", "write"), CASES)
def test_alone(name, write, tmp_path):
    options, check = SCRIPTS[name]
    shutil.copy(ROOT / f"{name}.py", tmp_path)
    command = [sys.executable, f"{name}.py", *options.split(), *write(tmp_path)]
    env = environment(PYTHONPATH="", HF_HUB_OFFLINE=1)
    before = set(tmp_path.iterdir())

    def call(*more):
        """The names of what is there now."""
        done = subprocess.run([*command, *more], cwd=tmp_path, env=env, capture_output=True, text=1)
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("completed successfully!" in done.stdout) == ("--prepare_only" not in more)
        return {path.name for path in set(tmp_path.iterdir()) - before}

    read = {}
    if write in (npz, image_folder, csv_pairs, packed_fasta, pdb):  # one of each script is enough
        assert call("--prepare_only") == {"cache"}
        read = files_of(tmp_path / "cache")
        assert read
    made = {"cache", "run", "artifacts"} if name == "train_ddp" else {"cache", "run"}
    assert call("--output_dir=run") == made
    assert read.items() <= files_of(tmp_path / "cache").items(), "read once more"
    run = Run(tmp_path / "run")
    assert run.summary["status"] == "finished"
    assert np.isfinite(run.losses).all()
    check(tmp_path, run.summary)
