"""tools/compare_runs.py."""

import csv
import json
import re
from functools import partial

import pytest
from helpers import call_script

compare = partial(call_script, "tools/compare_runs")


def write_run(folder, value, accuracy=0.8, status="finished", metric="loss", **options):
    best = {"metric": metric, "value": value, "step": 9}
    script = options.pop("script", "a.py")
    options = {"data_hash": "1 x", "seed": 0, "output_dir": str(folder), **options}
    summary = {"status": status, "steps": 9, "script": script, "best": best, "args": options}
    summary["test"] = {"loss": 1.0, "cls/accuracy": accuracy}
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps(summary))
    rows = [{"step": 1, "val/loss": 0.4}, {"step": 2, "val/loss": 0.3}, {"step": 2, "loss": 1}]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))


VALUES = {"loss": [0.30, 0.32, 0.34, 0.40, 0.50], "accuracy": [0.70, 0.68, 0.66, 0.60, 0.50]}


@pytest.mark.parametrize("metric", VALUES)
def test_the_best_is_chosen_by_validation(metric, tmp_path):
    """lr 0.1 is best on the validation set, lr 0.2 on the test set, with any batch_size."""
    values = VALUES[metric]
    runs = [tmp_path / f"run{i}" for i in range(5)]
    for i, accuracy in enumerate([0.80, 0.84, 0.82, 0.90, 0.94]):
        options = {"lr": 0.1 if i < 3 else 0.2, "seed": i % 3, "batch_size": 2**i}
        write_run(runs[i], values[i], accuracy, metric=metric, **options)

    path = tmp_path / "runs.csv"
    header, below, first, second, _, last = compare(*runs, "--csv", path).splitlines()
    assert header.split() == f"n val/{metric} test/loss test/cls/accuracy".split()
    assert below.split() == 3 * ["mean", "std"]
    best, worst = ("0.3200", "0.4500") if metric == "loss" else ("0.6800", "0.5500")
    assert first.split() == f"lr 0.1 3 {best} 0.0200 1.0000 0.0000 0.8200 0.0200".split()
    assert second.split() == f"lr 0.2 2 {worst} 0.0707 1.0000 0.0000 0.9200 0.0283".split()
    assert last == "best by validation: lr 0.1"
    with open(path, newline="") as file:
        rows = [*csv.DictReader(file)]
    assert [row["run"] for row in rows] == [str(run) for run in runs]
    assert (rows[0]["args/lr"], rows[0]["test/cls/accuracy"]) == ("0.1", "0.8")
    assert f"--csv {path} exists: expected a new file" in compare(*runs, "--csv", path, status=2)
    gone = f"{tmp_path}/gone/runs.csv"
    assert f"--csv {gone}: there is no such folder" in compare(*runs, "--csv", gone, status=2)


def test_what_is_left_out(tmp_path):
    write_run(tmp_path / "a", 0.3, lr=0.1)
    write_run(tmp_path / "c", 0.01, status="stopped by SIGTERM", lr=0.3)
    write_run(tmp_path / "d.old-20260101-000000", 0.01, lr=0.3)
    (tmp_path / "e").mkdir()
    write_run(tmp_path / "g", 0.01, lr=0.1)
    curves = tmp_path / "curves.png"
    text = compare(*sorted(tmp_path.iterdir()), "--curves", curves)
    assert re.findall(r"left out: \S+/(\w)", text) == ["c", "d", "e", "g"]
    assert "g: another run has its options and its seed" in text
    assert re.search(r"^all +1 +0.3000 +- ", text, re.MULTILINE)  # one run has no spread
    assert curves.stat().st_size > 10_000
    assert "none of these runs is finished" in compare(tmp_path / "c", status=2)


def test_what_measured_other_things_is_refused(tmp_path):
    """The hash of the data comes first in `data_hash`; those of networks may differ."""
    write_run(tmp_path / "a", 0.3)
    others = {"script": {"script": "b.py"}, "best/metric": {"metric": "accuracy"}}
    others |= {"args/tasks": {"tasks": ["cls"]}, "data": {"data_hash": "2 x"}}
    for said, other in others.items():
        folder = tmp_path / said.replace("/", "-")
        write_run(folder, 0.2, **other)
        first, header, *rows = compare(tmp_path / "a", folder, status=2).splitlines()
        assert first == "compare_runs.py: error: not comparable, compare them apart:"
        assert header.split() == ["run", said]
        assert [row.split()[0] for row in rows] == [f"{tmp_path}/a", str(folder)]
    write_run(tmp_path / "g", 0.2, data_hash="1 y", student="large")
    assert "student large" in compare(tmp_path / "a", tmp_path / "g")
