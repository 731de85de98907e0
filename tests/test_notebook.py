"""docs/quantumgrav_example.ipynb runs from top to bottom, and leaves nothing behind.

Its outputs are written anew by `jupyter execute --inplace docs/quantumgrav_example.ipynb`.
"""

import copy

import pytest
from helpers import ROOT

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")


@pytest.mark.timeout(900)  # it starts four trainings; a cell has 300 s
def test_notebook_runs(tmp_path, monkeypatch):
    """On a machine without a GPU. What a cell with the tag `same` prints is as it was written."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    docs = ROOT / "docs"
    notebook = nbformat.read(docs / "quantumgrav_example.ipynb", as_version=4)
    written = copy.deepcopy(notebook)
    place = {"metadata": {"path": str(docs)}}
    nbclient.NotebookClient(notebook, timeout=300, resources=place).execute()
    pairs = zip(notebook.cells, written.cells, strict=True)
    same = [(new, old) for new, old in pairs if "same" in old.metadata.get("tags", [])]
    assert len(same) == 1
    assert same[0][0].outputs == same[0][1].outputs
    left = {path.name.split("_")[0] for path in temporary.iterdir()}
    assert left <= {"torchelastic", "torchinductor"}  # PyTorch leaves empty folders of these names
