"""Checkpoints of the shared lines: damage is seen, and costs no other checkpoint."""

import shutil

import pytest
import torch

import train_ddp as script


@pytest.fixture
def folder(tmp_path):
    """A run's folder with latest.pt of step 2 and previous.pt of step 1."""
    for step in (1, 2):
        state = {"step": step, "model": {"weight": torch.arange(1000.0) + step}}
        script.save_checkpoint(tmp_path, "latest.pt", state)
    return tmp_path


def damage(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 0xFF
    path.write_bytes(content)


def test_no_flipped_byte_is_read(folder, tmp_path):
    """Wherever it is: either the file is not whole, or it reads as it was written."""
    latest = folder / "latest.pt"
    copy = folder / "copy.pt"
    seen = 0
    for position in range(0, latest.stat().st_size, 23):
        shutil.copy(latest, copy)
        damage(copy, position)
        if script.is_whole(copy):
            weight = script.load_checkpoint(copy)["model"]["weight"]
            assert weight.equal(torch.arange(1000.0) + 2), position
        else:
            seen += 1
    assert seen > 100


def test_a_damaged_checkpoint_does_not_replace_the_one_before(folder):
    damage(folder / "latest.pt", 3000)
    assert script.prepare_folder(folder, fresh=False) == folder / "previous.pt"
    script.save_checkpoint(folder, "latest.pt", {"step": 3})
    assert script.load_checkpoint(folder / "latest.pt")["step"] == 3
    assert script.load_checkpoint(folder / "previous.pt")["step"] == 1
    script.folder_lock.close()


def test_no_whole_checkpoint_is_an_error(folder):
    for name in ("latest.pt", "previous.pt"):
        damage(folder / name, 3000)
    for _ in range(2):  # and stays one
        with pytest.raises(script.InputError, match="no checkpoint .* is whole"):
            script.prepare_folder(folder, fresh=False)
        script.folder_lock.close()
    assert script.prepare_folder(folder, fresh=True) is None
    script.folder_lock.close()
