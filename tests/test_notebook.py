"""docs/train_ddp_example.ipynb runs from top to bottom, and leaves nothing behind.

Its outputs are written anew by `jupyter execute --inplace docs/train_ddp_example.ipynb`.
"""

import copy
import shutil

import pytest
from helpers import ROOT

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")


def changed_at(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.timeout(900)  # it starts six trainings; a cell has 300 s
def test_notebook_runs(tmp_path, monkeypatch):
    """On a machine without a GPU. What a cell with the tag `same` prints is as it was written."""
    clone = tmp_path / "clone"
    for pattern in ("*.py", "tools/*.py", "docs/*"):
        for path in ROOT.glob(pattern):
            target = clone / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    for name in ("JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")

    before = changed_at(clone)
    notebook = nbformat.read(clone / "docs" / "train_ddp_example.ipynb", as_version=4)
    written = copy.deepcopy(notebook)
    place = {"metadata": {"path": str(clone / "docs")}}
    nbclient.NotebookClient(notebook, timeout=300, resources=place).execute()
    same = 0
    for cell, old in zip(notebook.cells, written.cells, strict=True):
        if "same" in cell.metadata.get("tags", []):
            assert cell.outputs == old.outputs
            same += 1
    assert same == 1
    assert changed_at(clone) == before, "it wrote into the repository"
    left = {path.name.split("_")[0] for path in temporary.iterdir()}
    assert left <= {"torchelastic", "torchinductor"}  # PyTorch leaves empty folders of these names
