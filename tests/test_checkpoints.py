"""Checkpoints, as the shared lines write and read them: damage is seen, and costs no other one."""

import argparse
import shutil
from types import SimpleNamespace

import pytest
import torch

import run_train_quantumgrav_ddp as script

pytestmark = pytest.mark.usefixtures("group")


class Folder:
    def __init__(self, folder):
        self.folder = folder

    def save(self, step):
        model = torch.nn.Linear(1000, 1, bias=False)
        model.weight.data = torch.arange(1000.0)[None] + step
        args = argparse.Namespace(output_dir=str(self.folder))
        log = SimpleNamespace(wandb_id="id", size=lambda: 0)
        script.save_checkpoint("latest.pt", args, log, {"step": step}, model=model)

    def step(self, name):
        return script.read_checkpoint(self.folder / name)["loop"]["step"]

    def find(self, fresh=False):
        """The step to go on from; None for a new run."""
        state = script.find_checkpoint(self.folder, fresh)
        return state and state["loop"]["step"]


@pytest.fixture
def run(tmp_path):
    """A run's folder with latest.pt of step 2 and previous.pt of step 1."""
    run = Folder(tmp_path)
    run.save(1)
    run.save(2)
    yield run
    if script.folder_lock:
        script.folder_lock.close()


def damage(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 0xFF
    path.write_bytes(content)


def test_no_flipped_byte_is_read(run):
    """Wherever it is: either the file is not whole, or it reads as it was written."""
    latest = run.folder / "latest.pt"
    copy = run.folder / "copy.pt"
    seen = 0
    for position in range(0, latest.stat().st_size, 23):
        shutil.copy(latest, copy)
        damage(copy, position)
        state = script.read_checkpoint(copy)
        if state is not None:
            weight = state["model"]["weight"].flatten()
            assert weight.equal(torch.arange(1000.0) + 2), position
        else:
            seen += 1
    assert seen > 100


def test_a_damaged_checkpoint_does_not_replace_the_one_before(run):
    damage(run.folder / "latest.pt", 3000)
    assert run.find() == 1
    run.save(3)
    assert run.step("latest.pt") == 3
    assert run.step("previous.pt") == 1


def test_no_whole_checkpoint_is_an_error(run):
    for name in ("latest.pt", "previous.pt"):
        damage(run.folder / name, 3000)
    for _ in range(2):  # and stays one
        with pytest.raises(script.InputError, match="no checkpoint .* is whole"):
            run.find()
        script.folder_lock.close()
    assert run.find(fresh=True) is None
