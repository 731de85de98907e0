"""Twenty steps of each script, of which tests/golden/*.json has what holds on every machine: the number, the learning
rate and the logged names of each step, and the loss and gradient of the first. Those of later steps are of one machine:
processors round differently, and training enlarges that (in run_train_rebm_ddp to 2e-3 of the loss of step 2).

python tests/test_golden.py --update [SCRIPT ...] rewrites tests/golden/*.json; the commit that does so says why.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def golden_run_train_uniref50_ddp(folder: Path) -> list[str]:
    """Twenty steps and one evaluation; Muon, curriculum and crops are on the way."""
    from helpers import write_proteins  # which imports the scripts

    write_proteins(folder / "proteins.fasta", 600)
    return f"""--datafile={folder}/proteins.fasta --cache_dir={folder}/cache --hidden_size=32 --n_blocks_prot=2
        --n_heads=2 --cond_dim=16 --max_protein_len=40 --dropout=0.1 --batch_size=8 --accum=2 --n_iters=20 --lr=5e-3
        --warmup=5 --optimizer=Muon --use_curriculum --preschool_time=10 --log_freq=1 --eval_freq=20 --num_workers=0
        --eval_sequences=30 --snapshot_sampling=False --wandb_mode=disabled --device=cpu --precision=fp32
        --output_dir={folder}/out""".split()


def golden_run_dpo_ddp(folder: Path) -> list[str]:
    """Ten steps of warm start, ten of preferences, with every term of the loss."""
    from helpers import write_structures  # which imports the scripts

    write_structures(folder, 5, pairs=5, least=8, most=30)
    return f"""--train_data={folder}/pairs.json --cache_dir={folder}/cache --base_model_name=random --val_fraction=0.2
        --sft_epochs=2 --num_epochs=2 --batch_size=4 --lr=1e-4 --label_smoothing=0.1 --sft_weight=0.1 --num_orders=2
        --diversity_lambda=0.1 --log_every=1 --wandb_mode=disabled --device=cpu --precision=fp32
        --output_dir={folder}/out""".split()


def golden_run_train_rebm_ddp(folder: Path) -> list[str]:
    """Ten steps of each stage: running statistics, gathered and then frozen, accumulation, AutoAugment."""
    import numpy as np

    draw, wave = np.random.default_rng(0), np.arange(16)
    sizes = {"x_train": 100, "x_test": 20}
    images = {name: draw.integers(0, 128, (n, 16, 16, 3), np.uint8) for name, n in sizes.items()}
    labels = {f"y_{part[2:]}": np.arange(len(x)) % 4 for part, x in images.items()}
    for name, x in images.items():  # a stripe of another width in each class
        stripes = 60 + 60 * np.sin(wave * (1 + labels[f"y_{name[2:]}"])[:, None] / 3)
        x += stripes.astype(np.uint8)[:, None, :, None]
    np.savez(folder / "images.npz", **images, **labels)
    return f"""--indist_dataset=file --indist_ds_dir={folder}/images.npz --outdist_dataset=blobs
        --outdist_max_samples=100 --valid_images=20 --model_type=SmallNet --norm=batch --width=8 --attack.max_steps=3
        --indist_attack_clf.max_steps=2 --image_log.num_steps=2 --image_log.num_samples=20 --at_epochs=1
        --total_epochs=1 --at_lr=0.05 --lr=1e-2 --AUC_th=0.5 --min_imgs_per_threshold=16 --batch_size=4
        --accumulation=2 --eval_steps=2 --eval_restarts=1 --eval_images=20
        --outdist_dataset_ood_detection=noise --log_every=1 --wandb_mode=disabled --device=cpu
        --precision=fp32 --output_dir={folder}/out""".split()


GOLDEN = {
    "run_train_uniref50_ddp": golden_run_train_uniref50_ddp,
    "run_dpo_ddp": golden_run_dpo_ddp, "run_train_rebm_ddp": golden_run_train_rebm_ddp,
}  # fmt: skip


def measure(script: str) -> dict:
    from helpers import call_script  # which needs ROOT in sys.path

    with tempfile.TemporaryDirectory() as folder:
        status, text = call_script(script, *GOLDEN[script](Path(folder)))
        assert status == 0, text[-3000:]
        rows = [json.loads(line) for line in (Path(folder) / "out" / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "loss" in row]  # the others are of evaluations and of ranks
    names = ("loss", "clf_loss", "grad_norm")
    first = {name: rows[0][name] for name in names if name in rows[0]}
    steps = []
    for row in rows:
        steps.append({"step": row["step"], "lr": row["lr"], "keys": " ".join(sorted(row))})
    return {"first": first, "steps": steps}


@pytest.mark.parametrize("script", GOLDEN)
def test_twenty_steps_as_recorded(script):
    recorded = json.loads((ROOT / "tests" / "golden" / f"{script}.json").read_text())
    measured = measure(script)
    assert len(measured["steps"]) == len(recorded["steps"]) == 20
    for ours, theirs in zip(measured["steps"], recorded["steps"], strict=True):
        assert ours["step"] == theirs["step"]
        assert ours["lr"] == pytest.approx(theirs["lr"], rel=1e-9, abs=0), f"step {theirs['step']}"
        assert ours["keys"] == theirs["keys"], f"step {theirs['step']}"
    assert measured["first"] == {k: pytest.approx(v, rel=1e-4) for k, v in recorded["first"].items()}


if __name__ == "__main__" and sys.argv[1:2] == ["--update"]:
    sys.path.insert(0, str(ROOT))
    for name in sys.argv[2:] or GOLDEN:
        path = ROOT / "tests" / "golden" / f"{name}.json"
        path.write_text(json.dumps(measure(name), indent=1) + "\n")
        print(f"wrote {path}")
