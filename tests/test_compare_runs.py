"""tools/compare_runs.py."""

import csv
import json
import re
from functools import partial

import pytest
from helpers import call_script

compare = partial(call_script, "tools/compare_runs")


def write_run(folder, value, accuracy, status="finished", metric="loss", script="a.py", **options):
    best = {"metric": metric, "value": value, "step": 9}
    summary = {"status": status, "steps": 9, "script": script, "best": best, "args": options}
    summary["test"] = {"loss": 1.0, "cls/accuracy": accuracy}
    summary["baselines"] = {"cls": {"majority": 0.2}}
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps(summary))


@pytest.mark.parametrize("metric", ["loss", "accuracy"])
def test_the_best_is_chosen_by_validation(metric, tmp_path):
    """lr 0.1 is the best on the validation set, lr 0.2 on the test set."""
    values = [0.30, 0.32, 0.34, 0.40, 0.50]
    if metric == "accuracy":
        values = [0.70, 0.68, 0.66, 0.60, 0.50]
    runs = [tmp_path / f"run{i}" for i in range(5)]
    for i, accuracy in enumerate([0.80, 0.84, 0.82, 0.90, 0.94]):
        options = {"lr": 0.1 if i < 3 else 0.2, "seed": i % 3, "output_dir": f"run{i}"}
        write_run(runs[i], values[i], accuracy, metric=metric, **options)

    path = tmp_path / "runs.csv"
    header, first, second, *_, last = compare(*runs, "--csv", path).splitlines()
    assert header.split() == f"runs with n validation {metric} test loss test cls/accuracy".split()
    best, worst = ("0.3200", "0.4500") if metric == "loss" else ("0.6800", "0.5500")
    tests = "1.0000 ± 0.0000 0.8200 ± 0.0200"
    assert first.split() == f"lr 0.1 3 {best} ± 0.0200 {tests}".split()
    tests = "1.0000 ± 0.0000 0.9200 ± 0.0283"
    assert second.split() == f"lr 0.2 2 {worst} ± 0.0707 {tests}".split()
    assert last == "best by validation: lr 0.1"

    with open(path, newline="") as file:
        rows = [*csv.DictReader(file)]
    assert [row["run"] for row in rows] == [str(run) for run in runs]
    assert rows[0]["args/lr"] == "0.1"
    assert rows[0]["test/cls/accuracy"] == "0.8"
    assert "exists" in compare(*runs, "--csv", path, status=2)


def test_what_is_left_out_or_cannot_be_compared(tmp_path):
    write_run(tmp_path / "a", 0.3, 0.8, lr=0.1)
    write_run(tmp_path / "c", 0.01, 0.99, status="stopped by SIGTERM", lr=0.3)
    write_run(tmp_path / "e.old-20260101-000000", 0.01, 0.99, lr=0.3)
    (tmp_path / "d").mkdir()
    (tmp_path / "f.csv").touch()
    write_run(tmp_path / "g", 0.01, 0.8, lr=0.1)
    text = compare(*sorted(tmp_path.glob("*")))
    assert text.count("left out") == 5
    assert "g: another run has its options and its seed" in text
    assert "0.0100" not in text

    assert "none of these runs is finished" in compare(tmp_path / "c", status=2)
    assert "these runs have" in compare(tmp_path / "a", "--metrics", "x", status=2)


def test_what_measured_other_things_is_refused(tmp_path):
    """The hash of the data comes first in `data_hash`; then those of the networks that a run begins
    with, which may differ."""
    write_run(tmp_path / "a", 0.3, 0.8, data_hash="1 x")
    for name, (other, said) in {
        "b": ({"script": "b.py"}, "script is a.py in .*a and b.py in .*b"),
        "c": ({"metric": "accuracy"}, "best/metric is loss"),
        "d": ({"tasks": ["cls"]}, r"tasks is None in .*a and \['cls'\] in .*d"),
        "e": ({"data_hash": "2 x"}, "data is 1 in .*a and 2 in .*e"),
        "f": ({"val_ratio": 0.2}, "val_ratio"),
    }.items():
        write_run(tmp_path / name, 0.2, 0.8, **{"data_hash": "1 x", **other})
        text = compare(tmp_path / "a", tmp_path / name, status=2)
        assert re.search(f"not comparable: {said}", text), text
    write_run(tmp_path / "g", 0.2, 0.8, data_hash="1 y", student="large")
    assert "student large" in compare(tmp_path / "a", tmp_path / "g")


def test_curves(tmp_path):
    for name, value in {"a": 0.3, "b": 0.2}.items():
        write_run(tmp_path / name, value, 0.8, lr=value)
        rows = [{"step": step, "val/loss": value + 1 / step} for step in (1, 2)]
        text = "".join(json.dumps(row) + "\n" for row in [*rows, {"step": 2, "loss": 1.0}])
        (tmp_path / name / "metrics.jsonl").write_text(text)
    compare(tmp_path / "a", tmp_path / "b", "--curves", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    text = compare(tmp_path / "a", "--curves", "/proc/nothing/curves.png", status=2)
    assert text.endswith("No such file or directory: '/proc/nothing/curves.png'\n")
    (tmp_path / "b" / "metrics.jsonl").write_text("")
    text = compare(tmp_path / "b", "--curves", tmp_path / "other.png", status=2)
    assert "no val/loss in metrics.jsonl" in text
