"""The changes of scripts shown in docs/DDP_TRAINING_GUIDE.md fit and work."""

import re
import shutil
import subprocess

import pytest
from helpers import ROOT, call_program
from runs import Run

SCRIPT = "run_train_quantumgrav_ddp.py"


def text_after(words):
    """The guide from these words, which are bold, on."""
    return (ROOT / "docs" / "DDP_TRAINING_GUIDE.md").read_text().split(f"\n**{words}**")[1]


def write_script(folder, change):
    """A copy of the script with a change of the guide, if any: the diff, or the last line of
    make_optimizer, after these words."""
    script = folder / SCRIPT
    shutil.copy(ROOT / SCRIPT, script)
    if change == "Another optimizer.":
        line = re.search(r"`(return torch.optim.*)`", text_after(change))[1]
        text, count = re.subn(r"return torch\.optim\..*", line, script.read_text())
        assert count == 1
        script.write_text(text)
    elif change:
        apply_diff(change, folder)
    return script


def apply_diff(change, folder):
    diff = re.search(r"^```diff\n(.*?)^```$", text_after(change), re.M | re.S)[1]
    # a repository of its own, or git may look for one in the folders above
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    subprocess.run(["git", "apply", "-"], cwd=folder, input=diff, text=True, check=True)


def train(script, data, *options):
    """The losses of a short run."""
    argv = "--num_epochs=1 --batch_size=12 --hidden_dim=8 --head_dim=8 --log_every=1 --device=cpu"
    folder = script.parent / "run"
    argv = [*argv.split(), f"--data={data}", f"--cache_dir={data.parent}/cache"]
    call_program(script, *argv, f"--output_dir={folder}", *options)
    return Run(folder).losses


@pytest.fixture(scope="module")
def unchanged(causal_sets, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unchanged")
    return train(write_script(folder, None), causal_sets)


CHANGES = {  # its name in the guide: an option that it needs; whether the first loss is the same
    "Another network.": ([], False),
    "Another metric.": (["--stop_metrics=cls/balanced_accuracy"], True),
    "Another optimizer.": ([], True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_applies_and_trains(change, causal_sets, unchanged, tmp_path):
    options, is_same = CHANGES[change]
    losses = train(write_script(tmp_path, change), causal_sets, *options)
    assert len(losses) == len(unchanged)
    assert (losses[0] == unchanged[0]) == is_same
    assert (losses == unchanged) == (change == "Another metric.")
