"""run_train_uniref50_ddp.py as a user calls it: prepare, train, sample, fill in; and what it says of wrong uses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import call_script, write_proteins

SMALL = """--hidden_size=32 --n_blocks_prot=2 --n_heads=2 --cond_dim=16 --max_protein_len=64 --batch_size=8 --accum=1
    --n_iters=6 --lr=5e-3 --warmup=2 --eval_freq=3 --eval_sequences=10 --samples_per_eval=2 --sample_length=8
    --num_workers=1 --wandb_mode=disabled""".split()


def call(*options: str, status: int = 0) -> str:
    """Output of a run on the CPU that must end with `status`."""
    found, text = call_script("run_train_uniref50_ddp", "--device=cpu", *options)
    assert found == status, text[-3000:]
    return text


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with proteins.fasta, data/ (prepared) and run/ (six steps on it)."""
    folder = tmp_path_factory.mktemp("cli")
    write_proteins(folder / "proteins.fasta", 300)
    said = call("--prepare", folder / "proteins.fasta", folder / "data", "--val_ratio=0.2")
    assert "prepared" in said and "MB/s" in said
    said = call(f"--datafile={folder / 'data'}", f"--output_dir={folder / 'run'}", *SMALL)
    assert "step 6 held-out: nelbo=" in said and "step 3 samples:" in said and "finished:" in said
    return folder


def fasta(path: Path) -> list[tuple[str, str]]:
    records = [r.partition("\n") for r in path.read_text().split(">")[1:]]
    return [(header, body.replace("\n", "")) for header, _, body in records]


def test_train_writes_what_it_says(trained):
    run = trained / "run"
    for name in ("summary.json", "curves.png", "metrics.jsonl", "best.pt", "latest.pt"):
        assert (run / name).stat().st_size > 0
    assert len(fasta(run / "samples" / "step_00000006.fasta")) == 2
    state = torch.load(run / "best.pt", weights_only=True)
    assert sum(state["lengths"].values()) > 200 and len(state["ema"]) == len(list(state["model"]))


def test_sample_from_a_checkpoint_without_data(trained):
    out = trained / "new" / "samples.fasta"
    call("--sample=5", f"--checkpoint={trained / 'run' / 'best.pt'}", f"--out={out}", "--method=simple", "--steps=4")
    records = fasta(out)
    assert len(records) == 5 and all(20 <= len(body) <= 60 and body.isalpha() for _, body in records)
    assert "method=simple" in records[0][0] and f"length={len(records[0][1])}" in records[0][0]


def test_infill(trained):
    (trained / "motif.fasta").write_text(">m\nACD???FGHI\n")
    out = trained / "filled.fasta"
    call("--sample=3", f"--infill={trained / 'motif.fasta'}", f"--checkpoint={trained / 'run' / 'best.pt'}",
         f"--out={out}", f"--datafile={trained / 'data'}", "--nproc=2")  # fmt: skip
    records = fasta(out)
    assert [header.split()[0] for header, _ in records] == ["m/1", "m/2", "m/3"]
    assert all(body[:3] == "ACD" and body[6:] == "FGHI" and "?" not in body for _, body in records)


def test_no_data_says_where_to_get_it(tmp_path):
    said = call(f"--datafile={tmp_path / 'none.pt'}", f"--output_dir={tmp_path / 'run'}", status=1)
    assert "uniref50.fasta.gz" in said and "--prepare uniref50.fasta.gz" in said and not (tmp_path / "run").exists()


def test_wrong_uses_are_refused(trained, tmp_path):
    """Another model or other data in the folder of a run; a folder prepared otherwise; samples too long."""
    plain = (f"--datafile={trained / 'data'}", f"--output_dir={trained / 'run'}", *SMALL)
    assert "--hidden_size 32, this one has 64" in call(*plain, "--hidden_size=64", status=1)
    write_proteins(tmp_path / "other.fasta", 200)
    other = (f"--datafile={tmp_path / 'other.fasta'}", f"--cache_dir={tmp_path / 'cache'}", "--val_ratio=0.2")
    assert "holds a run with data " in call(*plain, *other, status=1)
    assert "prepared with 0.2" in call(*plain, "--val_ratio=0.1", status=1)
    checkpoint = f"--checkpoint={trained / 'run' / 'best.pt'}"
    said = call("--sample=2", checkpoint, "--sample_length=100", f"--out={tmp_path / 'x'}", status=1)
    assert "at most 62" in said and not (tmp_path / "x").exists()
    assert "is finished" in call(*plain)
