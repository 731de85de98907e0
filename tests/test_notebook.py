"""docs/train_ddp_example.ipynb is what docs/make_notebook.py says, runs from top to bottom, and cleans up."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))

pytest.importorskip("nbclient", reason="no nbclient: pip install -r requirements-dev.txt")
import make_notebook  # noqa: E402


@pytest.fixture
def cpu(tmp_path, monkeypatch):
    """The environment of a machine without a GPU, whose temporary folder is ours."""
    values = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TMPDIR": tmp_path, "JUPYTER_RUNTIME_DIR": tmp_path}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("tempfile.tempdir", None)  # read TMPDIR again
    return tmp_path


@pytest.mark.timeout(900)  # it starts seven trainings; a cell has 300 s
def test_notebook_runs(cpu):
    clone, temporary = cpu / "clone", cpu / "temporary"
    temporary.mkdir()
    needed = ("*.py", "tools/*.py", "docs/*.py", "docs/*.ipynb", "docs/*.md")
    for path in [path for pattern in needed for path in ROOT.glob(pattern)]:
        (clone / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, clone / path.relative_to(ROOT))
    before = {path: path.stat().st_mtime_ns for path in clone.rglob("*")}
    command = [sys.executable, str(clone / "docs" / "make_notebook.py"), "--check"]
    env = os.environ | {"TMPDIR": str(temporary), "PYTHONDONTWRITEBYTECODE": "1"}
    found = subprocess.run(command, env=env, cwd=cpu, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert {path: path.stat().st_mtime_ns for path in clone.rglob("*")} == before, "it wrote into the repository"
    assert not list(temporary.iterdir()), "its temporary folder is still there"


@pytest.mark.timeout(400)
def test_failing_cell_leaves_no_process(cpu):
    """A cell that raises while its training goes on: the cell is named, and its processes are ended by the cell."""
    notebook = make_notebook.build()
    wanted = ("sys.path.insert", "import torch", "def run(", "SCRIPT =")
    setup = [next(cell for cell in notebook.cells if text in cell.source) for text in wanted]
    launch = "torchrun --standalone --nproc_per_node=2 {SCRIPT} --num_epochs 100000 --patience 100000"
    # the first line of output is compared with a number, which is a TypeError
    fault = make_notebook.new_code_cell(f'run(f"{launch} --output_dir $WORK/endless", stop_at=1)')
    notebook.cells = [*setup, fault]
    with pytest.raises(RuntimeError) as caught:
        make_notebook.execute(notebook)
    text = str(caught.value)
    assert text.startswith("cell 5 (code, after ") and "TypeError" in text, text
    assert "left running" not in text, text
    assert not list(cpu.iterdir())


def test_differences_are_seen():
    """Another source, a cell too few or too many, and another output where it must be the same; not elsewhere."""
    made = make_notebook.build()
    number, same = next((n, cell) for n, cell in enumerate(made.cells) if "same" in cell.metadata.get("tags", []))
    same.outputs = [make_notebook.nbformat.v4.new_output("stream", text="1")]
    kept = copy.deepcopy(made)
    made.cells[1].outputs = same.outputs  # of a cell without the tag
    assert make_notebook.differing(made, kept) == ""
    kept.cells[number].outputs[0].text = "2"
    assert make_notebook.differing(made, kept).endswith("has another output")
    kept.cells[1].source += "#"
    assert make_notebook.differing(made, kept) == 'cell 2 (code, after "Training with DDP, by example") is another one'
    kept.cells = made.cells[:-1]
    assert make_notebook.differing(made, kept).startswith(f"cell {len(made.cells)} (code, after ")
    kept.cells = [*made.cells, make_notebook.new_code_cell("1")]
    assert make_notebook.differing(made, kept).startswith(f"cell {len(made.cells) + 1} (code, after ")
