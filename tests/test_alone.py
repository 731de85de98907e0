"""A script copied alone into an empty folder reads the user's data there, and trains."""

import importlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from helpers import ROOT, call_script, environment
from runs import COMMON, SCRIPTS, TINY, Run

FEWER_STEPS = {  # run_dpo_ddp.py begins with weights that the user has
    "train_ddp": "--max_steps=3",
    "run_train_uniref50_ddp": "--n_iters=3",
    "run_dpo_ddp": f"""--num_epochs=1 --base_model_name=v_48_020
        --base_model_dir={ROOT}/data/dpo/soluble_model_weights""",
    "run_train_quantumgrav_ddp": "--num_epochs=1",
    "run_train_rebm_ddp": "--total_epochs=1",
}


def files_of(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", SCRIPTS)
def test_alone(name, tmp_path):
    shutil.copy(ROOT / f"{name}.py", tmp_path)
    options = [*COMMON, *TINY[name](tmp_path), *FEWER_STEPS[name].split(), "--batch_size=0"]
    before = set(tmp_path.iterdir())
    call_script(tmp_path / name, *options, "--prepare_only")
    assert set(tmp_path.iterdir()) - before == {tmp_path / "cache"}
    read = files_of(tmp_path / "cache")
    assert read

    command = [sys.executable, f"{name}.py", *options, "--output_dir=run"]
    env = environment(PYTHONPATH="", HF_HUB_OFFLINE=1)
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "completed successfully!" in done.stdout
    assert set(tmp_path.iterdir()) - before == {tmp_path / "cache", tmp_path / "run"}
    assert read.items() <= files_of(tmp_path / "cache").items(), "read once more"
    run = Run(tmp_path / "run")
    assert run.summary["status"] == "finished"
    assert np.isfinite(run.losses).all()
    most = importlib.import_module(name).BATCH_SIZE
    size = re.search(r"Total batch size: .* \((\S+) per GPU", done.stdout)[1]
    assert float(size) == 24 / -(-24 // most)
