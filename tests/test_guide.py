"""The changes of scripts shown in docs/DDP_TRAINING_GUIDE.md fit and work."""

import re
import shutil
import subprocess

import pytest
from helpers import ROOT, call_program
from runs import Run

SCRIPT = "run_train_quantumgrav_ddp.py"


@pytest.mark.parametrize("change", ["Another network.", "Another optimizer."])
def test_a_change_applies_and_trains(change, causal_sets, tmp_path):
    """It is a diff, or the last line of make_optimizer."""
    shown = (ROOT / "docs" / "DDP_TRAINING_GUIDE.md").read_text().split(f"\n**{change}**")[1]
    script = tmp_path / SCRIPT
    shutil.copy(ROOT / SCRIPT, script)
    if change == "Another optimizer.":
        line = re.search(r"`(return torch.optim.*)`", shown)[1]
        text, count = re.subn(r"return torch\.optim\..*", line, script.read_text())
        assert count == 1
        script.write_text(text)
    else:
        diff = re.search(r"^```diff\n(.*?)^```$", shown, re.M | re.S)[1]
        # a repository of its own, or git may look for one in the folders above
        subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
        subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=diff, text=True, check=True)

    argv = f"""--data={causal_sets} --cache_dir={causal_sets.parent}/cache --num_epochs=1
        --batch_size=12 --hidden_dim=8 --head_dim=8 --device=cpu --output_dir={tmp_path}/run"""
    call_program(script, *argv.split())
    assert Run(tmp_path / "run").summary["status"] == "finished"
