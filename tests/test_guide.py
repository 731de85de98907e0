"""The changes of scripts shown in docs/DDP_TRAINING_GUIDE.md fit and work."""

import re
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT, call_script
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
    call_script(script.with_suffix(""), *argv.split())
    assert Run(tmp_path / "run").summary["status"] == "finished"


def test_a_search(causal_sets, tmp_path, start):
    """Each start adds trials to the study. A failed one does not end it; a pruned one is gone."""
    optuna = pytest.importorskip("optuna")
    guide = (ROOT / "docs" / "DDP_TRAINING_GUIDE.md").read_text()
    shown = re.search(r"^```python\n([^`]*^import optuna\n.*?)^```$", guide, re.M | re.S)[1]
    shutil.copy(ROOT / SCRIPT, tmp_path)
    tiny = f"--data={causal_sets} --device=cpu --batch_size=24 --num_epochs"
    pruned = {"--num_epochs=15": f"{tiny}=300", "n_trials=30": "n_trials=1"}  # with two ranks
    pruned["MedianPruner(n_warmup_steps=5)"] = "ThresholdPruner(upper=-1)"
    two = {"--nproc_per_node=2 --num_epochs=15": f"{tiny}=1", "n_trials=30": "n_trials=2"}
    two["1e-3, 2e-2"] = "*[(1e-3, 2e-2), (1e30, 1e31)][trial.number % 2]"  # the first: NaN
    for changes in (pruned, two):
        text = shown
        for old, new in {**changes, "python run": f"{sys.executable} run"}.items():
            assert text.count(old) == 1
            text = text.replace(old, new)
        (tmp_path / "search.py").write_text(text)
        job = start([sys.executable, "search.py"])
        assert job.wait() == 0, job.text[-3000:]
        assert not job.processes()
    assert job.text.count("RuntimeError: the validation loss is nan") == 1
    study = optuna.load_study(study_name="search", storage=f"sqlite:///{tmp_path}/search.db")
    states = [trial.state.name for trial in study.trials]
    assert states == ["PRUNED", "PRUNED", "COMPLETE"]
    assert not [*tmp_path.glob("outputs/trial1/best.pt")]  # whose loss is NaN
    found = [Run(tmp_path / "outputs" / f"trial{number}").summary for number in (0, 2)]
    assert found[0]["status"].startswith("stopped by SIGTERM")
    assert study.best_value == found[1]["best"]["value"]
