"""docs/train_ddp_example.ipynb has the cells of docs/make_notebook.py, runs from top to bottom, and
leaves nothing behind."""

import copy
import os
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT

sys.path.insert(0, str(ROOT / "docs"))

pytest.importorskip("nbclient", reason="no nbclient: pip install -r requirements-dev.txt")
import make_notebook  # noqa: E402


@pytest.fixture
def cpu(tmp_path, monkeypatch):
    """The environment of a machine without a GPU, whose temporary folder is ours."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)  # read TMPDIR again
    return tmp_path


def changed_at(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.timeout(900)  # it starts six trainings; a cell has 300 s
def test_notebook_runs(cpu):
    clone = cpu / "clone"
    temporary = cpu / "temporary"
    temporary.mkdir()
    for pattern in ("*.py", "tools/*.py", "docs/*.py", "docs/*.ipynb", "docs/*.md"):
        for path in ROOT.glob(pattern):
            target = clone / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    before = changed_at(clone)
    command = [sys.executable, str(clone / "docs" / "make_notebook.py"), "--check"]
    env = {**os.environ, "TMPDIR": str(temporary), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, env=env, cwd=cpu, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert changed_at(clone) == before, "it wrote into the repository"
    assert list(temporary.iterdir()) == []


@pytest.mark.timeout(400)
def test_failing_cell_leaves_no_process(cpu):
    """A cell raises while its training goes on: it ends the training, and is named."""
    notebook = make_notebook.build()
    cells = []
    for text in ("sys.path.insert", "import torch", "def run(", "SCRIPT ="):
        cells.append(next(cell for cell in notebook.cells if text in cell.source))
    launch = "torchrun --standalone --nproc_per_node=2 {SCRIPT} --num_epochs 100000"
    options = "--patience 100000 --output_dir $WORK/endless"
    # the first line of output is compared with a number, which is a TypeError
    fault = make_notebook.new_code_cell(f'run(f"{launch} {options}", stop_at=1)')
    notebook.cells = [*cells, fault]
    with pytest.raises(RuntimeError) as caught:
        make_notebook.execute(notebook)
    text = str(caught.value)
    assert text.startswith("cell 5 (code, after "), text
    assert "TypeError" in text
    assert "left running" not in text
    assert list(cpu.iterdir()) == []


def test_differences_are_seen():
    """Another source, a cell too few or too many, and another output where it must be the same."""
    find_difference = make_notebook.find_difference
    made = make_notebook.build()
    count = len(made.cells)
    same = [n for n, cell in enumerate(made.cells) if "same" in cell.metadata.get("tags", [])][0]
    output = [make_notebook.nbformat.v4.new_output("stream", text="1")]
    made.cells[same].outputs = output
    kept = copy.deepcopy(made)
    made.cells[1].outputs = output  # it may differ, as this cell has no such tag
    assert find_difference(made, kept) == ""
    kept.cells[same].outputs[0].text = "2"
    assert find_difference(made, kept).endswith("has another output")
    kept.cells[1].source += "#"
    name = 'cell 2 (code, after "Training with DDP, by example")'
    assert find_difference(made, kept) == f"{name} is another one"
    kept.cells = made.cells[:-1]
    assert find_difference(made, kept).startswith(f"cell {count} (code, after ")
    kept.cells = [*made.cells, make_notebook.new_code_cell("1")]
    assert find_difference(made, kept).startswith(f"cell {count + 1} (code, after ")
