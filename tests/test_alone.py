"""A script copied alone into an empty folder trains there, on small files of the user's formats.

Each format is a function that writes such files into the folder, and returns the options.
"""

import bz2
import csv
import gzip
import json
import shutil
import subprocess
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from helpers import ROOT, environment, write_proteins
from PIL import Image

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


def pairs(count=40):
    """Rows of queries with a document and one that is wrong."""
    rows = []
    for i in range(count):
        row = {"query": f"where is item {i}", "positive": f"item {i} is in hall {i % 7}"}
        rows.append({**row, "negative": f"nothing is in room {i}"})
    return rows


def csv_pairs(folder):
    with open(folder / "pairs.csv", "w") as file:
        writer = csv.DictWriter(file, ["query", "positive", "negative"])
        writer.writeheader()
        writer.writerows(pairs())
    return ["--phase1_data=pairs.csv", "--phase2_data=pairs.csv"]


def json_pairs(folder):
    with gzip.open(folder / "pairs.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in pairs())
    return ["--phase1_data=pairs.jsonl.gz", "--phase2_data=pairs.jsonl.gz"]


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
    return ["--data=photos", "--image_shape=3x16"]


def image_arrays(folder):
    images = np.random.default_rng(0).integers(0, 99, (90, 9, 9), np.uint8)
    labels = np.arange(90) % 3
    images += (70 * labels[:, None, None]).astype(np.uint8)
    np.savez(folder / "mine.npz", train_images=images, train_labels=labels[:, None])
    return ["data=mine.npz"]


def digits(folder):
    return []


def check_rebm(folder, summary):
    assert summary["best"]["metric"] == "dat/robust"
    assert set(summary["stages"]) == {"at", "dat"}


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


def lines_of_proteins(folder):
    (folder / "mine.txt").write_text("\n".join(proteins(folder)))
    return ["--datafile=mine.txt"]


def list_of_proteins(folder):
    rows = [{"protein_seq": text, "length": len(text)} for text in proteins(folder)]
    torch.save(rows, folder / "processed.pt")
    return ["--datafile=processed.pt"]


def atom_lines(letters, scale):
    """(record, atom, residue, number, x, y, z) of the backbone of a helix."""
    names = {"A": "ALA", "L": "LEU", "K": "LYS", "E": "GLU", "S": "SER"}
    atoms = {"N": (-1.2, 0.5, -0.4), "CA": (0, 0, 0), "C": (1.1, 0.6, 0.7), "O": (1.5, 1.7, 0.8)}
    for number, letter in enumerate(letters, start=1):
        turn = 1.745 * number
        centre = np.array([scale * np.cos(turn), scale * np.sin(turn), 1.5 * number])
        for atom, offset in atoms.items():
            yield "ATOM", atom, names[letter], number, *(centre + offset)


def write_pdb(path, letters, scale):
    with open(path, "w") as file:
        for i, (record, atom, name, number, *place) in enumerate(atom_lines(letters, scale)):
            start = f"{record:<6}{i + 1:5d}  {atom:<3} {name} A{number:4d}    "
            file.write(start + "".join(f"{x:8.3f}" for x in place) + "  1.00  0.00\n")
        file.write("TER\nEND\n")


def write_mmcif_gz(path, letters, scale):
    columns = """group_PDB id type_symbol label_atom_id label_alt_id label_comp_id label_asym_id
        label_entity_id label_seq_id pdbx_PDB_ins_code Cartn_x Cartn_y Cartn_z auth_seq_id
        auth_asym_id pdbx_PDB_model_num"""
    lines = ["data_mine", "loop_", *[f"_atom_site.{name}" for name in columns.split()]]
    for i, (record, atom, name, number, *place) in enumerate(atom_lines(letters, scale)):
        xyz = " ".join(f"{x:.3f}" for x in place)
        start = f"{record} {i + 1} {atom[0]} {atom} . {name} A 1 {number}"
        lines.append(f"{start} ? {xyz} {number} A 1")
    path.write_bytes(gzip.compress("\n".join(lines).encode()))


def structures(name, write):
    """Pairs on four structures in a format, and a file of weights."""

    def prepare(folder):
        letters = "ALKESAALKLSEAKLE"
        (folder / "mine").mkdir()
        lines = []
        for i in range(4):
            write(folder / "mine" / f"{i}.{name}", letters, 2.2 + 0.1 * i)
            for place in range(6):
                other = letters[:place] + "W" + letters[place + 1 :]
                row = {"pdb_file": f"mine/{i}.{name}", "preferred_seq": letters}
                lines.append(json.dumps({**row, "unpreferred_seq": other}))
        (folder / "pairs.jsonl").write_text("\n".join(lines))
        shutil.copy(ROOT / "data" / "dpo" / "soluble_v_48_020.pt", folder)
        return ["--train_data=pairs.jsonl", "--base_model_dir=."]

    return prepare


def check_dpo(folder, summary):
    assert summary["best"]["metric"] == "loss"
    assert summary["baselines"]["before"]["loss"] == pytest.approx(np.log(2), rel=1e-6)
    assert len(summary["held_out"]) == 6
    saved = torch.load(folder / "run" / "best_model.pt", weights_only=True)
    released = torch.load(folder / "soluble_v_48_020.pt", weights_only=True)
    assert saved["num_edges"] == released["num_edges"]
    assert saved["model_state_dict"].keys() == released["model_state_dict"].keys()


def check_quantumgrav(folder, summary):
    assert summary["steps"] == 2 * (SETS * 3 // 4 // 15)
    assert 0 <= summary["test"]["manifold/accuracy"] <= 1
    (read,) = (folder / "cache").iterdir()
    assert len(np.load(read / "labels.npy")) == SETS


def check_train_ddp(folder, summary):
    assert summary["best"]["metric"] == "ndcg@10"
    assert set(summary["phases"]) == {"phase 1", "phase 2"}
    for path in summary["artifacts"]:
        assert (folder / path / "modules.json").exists()


def check_uniref50(folder, summary):
    assert summary["steps"] == 5 and summary["val"]["nelbo"] < 4
    (read,) = (folder / "cache").iterdir()
    offsets = [np.fromfile(read / f"{part}.offsets", np.int64) for part in ("train", "valid")]
    assert sum(map(len, offsets)) == SETS + 2


SCRIPTS = {  # options of a tiny run, what is looked at, and the folders that are made
    "run_train_quantumgrav_ddp": (
        "--hidden_dim=8 --head_dim=8 --num_layers=1 --num_epochs=2 --batch_size=15",
        check_quantumgrav,
        {"cache", "run"},
    ),
    "run_train_rebm_ddp": (
        """--width=8 --at_epochs=5 --total_epochs=1 --at_lr=1e-2 indist_attack_clf.max_steps=2
        --batch_size=15 --min_imgs_per_threshold=30 attack.max_steps=2""",
        check_rebm,
        {"cache", "run"},
    ),
    "train_ddp": (
        """--teacher_model=builtin:lsa:8 --student_model=builtin:bert:1x32 --projection_hidden=16
        --eval_fraction=0.3 --batch_size=10 --max_steps=3 --save_to_artifacts""",
        check_train_ddp,
        {"cache", "run", "artifacts"},
    ),
    "run_train_uniref50_ddp": (
        """--val_ratio=0.2 --hidden_size=16 --n_blocks_prot=1 --n_heads=2 --cond_dim=8
        --max_protein_len=48 --batch_size=8 --n_iters=5 --accum=1""",
        check_uniref50,
        {"cache", "run"},
    ),
    "run_dpo_ddp": (
        "--num_epochs=2 --num_orders=1 --batch_size=6 --lr=1e-5 --val_fraction=0.25",
        check_dpo,
        {"cache", "run"},
    ),
}
CASES = {  # script, the user's files
    "npz": ("run_train_quantumgrav_ddp", npz),
    "image folder": ("run_train_rebm_ddp", image_folder),
    "image arrays": ("run_train_rebm_ddp", image_arrays),
    "digits": ("run_train_rebm_ddp", digits),
    "csv": ("train_ddp", csv_pairs),
    "jsonl.gz": ("train_ddp", json_pairs),
    "txt and parquet": ("train_ddp", texts_and_parquet),
    "fasta.bz2": ("run_train_uniref50_ddp", packed_fasta),
    "a sequence a line": ("run_train_uniref50_ddp", lines_of_proteins),
    "processed.pt": ("run_train_uniref50_ddp", list_of_proteins),
    "pdb": ("run_dpo_ddp", structures("pdb", write_pdb)),
    "cif.gz": ("run_dpo_ddp", structures("cif.gz", write_mmcif_gz)),
}
for version in (2, 3):
    for layout in ("flat", "one group", "groups"):
        store = zarr(version, layout)
        CASES[f"zarr {version} {layout}"] = ("run_train_quantumgrav_ddp", store)


@pytest.mark.parametrize("case", CASES)
def test_alone(case, tmp_path):
    name, write = CASES[case]
    options, check, expected = SCRIPTS[name]
    shutil.copy(ROOT / f"{name}.py", tmp_path)
    command = [sys.executable, f"{name}.py", *options.split(), *write(tmp_path)]
    env = environment(PYTHONPATH="", HF_HUB_OFFLINE=1)

    def call(*more):
        done = subprocess.run([*command, *more], cwd=tmp_path, env=env, capture_output=True, text=1)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def made():
        return {path.name for path in set(tmp_path.iterdir()) - before}

    before = set(tmp_path.iterdir())
    if case in ("npz", "csv", "image folder", "fasta.bz2", "pdb"):  # one of each is enough
        call("--prepare_only")
        assert made() == {"cache"}
    text = call("--output_dir=run")
    assert "completed successfully!" in text
    assert made() == expected
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "finished"
    check(tmp_path, summary)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert all(np.isfinite(row["loss"]) for row in rows if "loss" in row)
