"""tools/compare_runs.py."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOOL = ROOT / "tools" / "compare_runs.py"


def write_run(folder, value, accuracy, status="finished", better="lower", script="a.py", **options):
    best = {"metric": "loss", "value": value, "better": better, "step": 9}
    summary = {"status": status, "steps": 9, "script": script, "best": best, "args": options}
    summary["test"] = {"loss": 1.0, "cls/accuracy": accuracy}
    summary["baselines"] = {"cls": {"majority": 0.2}}
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps({**summary, "seconds": 5.0, "world_size": 2}))


def compare(*words):
    command = [sys.executable, TOOL, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


@pytest.fixture
def runs(tmp_path):
    """lr 0.1 is the best on the validation set, lr 0.2 on the test set."""
    for seed, value, accuracy in [(0, 0.30, 0.80), (1, 0.32, 0.84), (2, 0.34, 0.82)]:
        write_run(tmp_path / f"a{seed}", value, accuracy, lr=0.1, seed=seed, output_dir=f"a{seed}")
    for seed, value, accuracy in [(0, 0.40, 0.90), (1, 0.50, 0.94)]:
        write_run(tmp_path / f"b{seed}", value, accuracy, lr=0.2, seed=seed, output_dir=f"b{seed}")
    return sorted(tmp_path.glob("*"))


def test_the_best_is_chosen_by_validation(runs):
    done = compare(*runs)
    assert done.returncode == 0, done.stderr
    header, first, second, *_ = done.stdout.splitlines()
    assert header.split() == "runs with n validation loss test loss test cls/accuracy".split()
    assert first.split() == "lr 0.1 3 0.3200 ± 0.0200 1.0000 ± 0.0000 0.8200 ± 0.0200".split()
    assert second.split() == "lr 0.2 2 0.4500 ± 0.0707 1.0000 ± 0.0000 0.9200 ± 0.0283".split()
    assert done.stdout.splitlines()[-1] == "best by validation: lr 0.1"


def test_a_metric_that_should_rise(runs):
    for path in runs:
        summary = json.loads((path / "summary.json").read_text())
        summary["best"]["better"] = "higher"
        (path / "summary.json").write_text(json.dumps(summary))
    assert "best by validation: lr 0.2" in compare(*runs).stdout


def test_csv_has_a_line_for_each_run(runs, tmp_path):
    path = tmp_path / "runs.csv"
    assert compare(*runs, "--csv", path).returncode == 0
    with open(path, newline="") as file:
        rows = [*csv.DictReader(file)]
    assert [row["run"] for row in rows] == [str(run) for run in runs]
    assert [row["test/cls/accuracy"] for row in rows] == ["0.8", "0.84", "0.82", "0.9", "0.94"]
    assert rows[0]["best/value"] == "0.3" and rows[0]["args/lr"] == "0.1"
    assert rows[0]["baselines/cls/majority"] == "0.2"
    assert "exists" in compare(*runs, "--csv", path).stderr


def test_unfinished_runs_are_left_out(runs, tmp_path):
    write_run(tmp_path / "c", 0.01, 0.99, status="stopped by SIGTERM", lr=0.3)
    write_run(tmp_path / "e.old-20260101-000000", 0.01, 0.99, lr=0.3)
    (tmp_path / "d").mkdir()
    (tmp_path / "d.lock").touch()
    done = compare(*runs, *sorted(tmp_path.glob("[c-e]*")))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("left out") == 3
    assert f"left out: {tmp_path}/c: stopped by SIGTERM" in done.stdout
    assert f"left out: {tmp_path}/d: no summary.json, so it is not finished" in done.stdout
    assert "0.0100" not in done.stdout
    assert compare(tmp_path / "c").returncode == 2


def test_what_cannot_be_compared(runs, tmp_path):
    assert (
        "--metrics x: these runs have loss, cls/accuracy" in compare(*runs, "--metrics", "x").stderr
    )
    write_run(tmp_path / "c", 0.01, 0.99, script="b.py", lr=0.3)
    done = compare(*runs, tmp_path / "c")
    assert done.returncode == 2
    assert done.stderr.startswith("compare_runs.py: runs of different script: ")
    (tmp_path / "c" / "summary.json").write_text("{")
    assert "is no summary of a run" in compare(*runs, tmp_path / "c").stderr
