"""A script copied alone into an empty folder trains there, on small files of the user's formats.

Each format is a function that writes such files into the folder, and returns the options.
"""

import bz2
import csv
import shutil
import subprocess
import sys

import numpy as np
import pytest
from helpers import ROOT, environment, write_causal_sets, write_proteins, write_structures
from PIL import Image
from runs import Run

SETS = 60


def npz(folder):
    write_causal_sets(folder / "mine.npz", f"--samples={SETS}", "--min_size=8", "--max_size=12")
    return ["--data=mine.npz"]


def texts_and_csv(folder):
    (folder / "texts.txt").write_text("\n".join(f"item {i} is heavy" for i in range(60)))
    with open(folder / "pairs.csv", "w") as file:
        writer = csv.writer(file)
        writer.writerow(["query", "positive", "negative"])
        for i in range(40):
            texts = [f"where is item {i}", f"item {i} is in hall {i % 7}"]
            writer.writerow([*texts, f"nothing is in room {i}"])
    return ["--phase1_data=texts.txt", "--phase2_data=pairs.csv"]


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


def packed_fasta(folder):
    write_proteins(folder / "mine.fasta", SETS)
    packed = bz2.compress((folder / "mine.fasta").read_bytes())
    (folder / "mine.fasta").unlink()
    (folder / "mine.fasta.bz2").write_bytes(packed)
    return ["--datafile=mine.fasta.bz2"]


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
    assert len(summary["held_out"]) == 6
    assert (folder / "run" / "best_model.pt").exists()


SCRIPTS = {  # the data, options of a tiny run, what is looked at
    "run_train_quantumgrav_ddp": (
        npz,
        "--hidden_dim=8 --head_dim=8 --num_layers=1 --num_epochs=2 --batch_size=15",
        check_quantumgrav,
    ),
    "run_train_rebm_ddp": (
        image_folder,
        """--at_epochs=5 --total_epochs=1 --at_lr=1e-2 indist_attack_clf.max_steps=2
        --batch_size=15 --min_imgs_per_threshold=30 attack.max_steps=2""",
        check_rebm,
    ),
    "train_ddp": (
        texts_and_csv,
        """--teacher_model=builtin:lsa --student_model=builtin:bert --projection_hidden=16
        --eval_fraction=0.3 --batch_size=10 --max_steps=3 --save_to_artifacts""",
        check_train_ddp,
    ),
    "run_train_uniref50_ddp": (
        packed_fasta,
        """--val_ratio=0.2 --hidden_size=16 --n_blocks_prot=1 --n_heads=2
        --max_protein_len=48 --batch_size=8 --n_iters=5 --accum=1""",
        check_uniref50,
    ),
    "run_dpo_ddp": (
        pdb,
        "--num_epochs=2 --batch_size=6 --lr=1e-5 --val_fraction=0.25",
        check_dpo,
    ),
}


def files_of(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", SCRIPTS)
def test_alone(name, tmp_path):
    write, options, check = SCRIPTS[name]
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
