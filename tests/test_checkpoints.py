"""Checkpoints of the shared lines, of both forms: damage is seen, and costs no other checkpoint."""

import argparse
import shutil
from types import SimpleNamespace

import pytest
import torch

import run_train_quantumgrav_ddp
import run_train_rebm_ddp

pytestmark = pytest.mark.usefixtures("group")


class Old:
    script = run_train_rebm_ddp
    read = staticmethod(run_train_rebm_ddp.load_checkpoint)
    is_whole = staticmethod(run_train_rebm_ddp.is_whole)

    def __init__(self, folder):
        self.folder = folder

    def save(self, step):
        state = {"step": step, "model": {"weight": torch.arange(1000.0) + step}}
        self.script.save_checkpoint(self.folder, "latest.pt", state)

    def step(self, name):
        return self.read(self.folder / name)["step"]

    def find(self, fresh=False):
        """The step to go on from; None for a new run."""
        path = self.script.prepare_folder(self.folder, fresh)
        return path and self.step(path.name)


class New(Old):
    script = run_train_quantumgrav_ddp
    read = staticmethod(run_train_quantumgrav_ddp.read_checkpoint)

    @classmethod
    def is_whole(cls, path):
        return cls.read(path) is not None

    def save(self, step):
        model = torch.nn.Linear(1000, 1, bias=False)
        model.weight.data = torch.arange(1000.0)[None] + step
        args = argparse.Namespace(output_dir=str(self.folder))
        log = SimpleNamespace(wandb_id="id", size=lambda: 0)
        self.script.save_checkpoint("latest.pt", args, log, {"step": step}, model=model)

    def step(self, name):
        return self.read(self.folder / name)["loop"]["step"]

    def find(self, fresh=False):
        state = self.script.find_checkpoint(self.folder, fresh)
        return state and state["loop"]["step"]


@pytest.fixture(params=[Old, New])
def run(request, tmp_path):
    """A run's folder with latest.pt of step 2 and previous.pt of step 1."""
    run = request.param(tmp_path)
    run.save(1)
    run.save(2)
    yield run
    if run.script.folder_lock:
        run.script.folder_lock.close()


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
        if run.is_whole(copy):
            weight = run.read(copy)["model"]["weight"].flatten()
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
        with pytest.raises(run.script.InputError, match="no checkpoint .* is whole"):
            run.find()
        run.script.folder_lock.close()
    assert run.find(fresh=True) is None
