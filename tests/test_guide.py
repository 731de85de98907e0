"""The changes shown in docs/DDP_TRAINING_GUIDE.md, "Change a script", fit and work."""

import json
import re
import subprocess

import pytest
from helpers import ROOT, call_program, write_causal_sets

SCRIPT = "run_train_quantumgrav_ddp.py"
TRAIN = "--num_epochs=1 --batch_size=12 --hidden_dim=8 --head_dim=8 --log_every=1 --device=cpu"


def changes():
    """The diffs of the guide, by the heading of the paragraph before each."""
    text = (ROOT / "docs" / "DDP_TRAINING_GUIDE.md").read_text()
    section = text.split("\n## 19. Change a script\n")[1].split("\n## ")[0]
    found = {}
    for part in section.split("\n**")[1:]:
        diffs = re.findall(r"^```diff\n(.*?)^```$", part, re.M | re.S)
        assert len(diffs) == 1
        found[part.split(".**")[0]] = diffs[0]
    return found


def train(script, data, *options):
    """(number of parameters, rows of metrics.jsonl) of a short run in the folder of the script."""
    output = script.parent / "run"
    argv = [*TRAIN.split(), f"--data={data}", f"--output_dir={output}", *options]
    status, text = call_program(script, *argv)
    assert status == 0, text
    lines = (output / "metrics.jsonl").read_text().splitlines()
    parameters = re.search(r"([\d,]+) parameters", text)[1]
    return int(parameters.replace(",", "")), [json.loads(line) for line in lines]


def changed_script(folder, name):
    """A copy of the script with a change of the guide."""
    script = folder / SCRIPT
    script.write_text((ROOT / SCRIPT).read_text())
    # a repository of its own, or git may look for one in the folders above
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    subprocess.run(["git", "apply", "-"], cwd=folder, input=changes()[name], text=True, check=True)
    assert script.read_text() != (ROOT / SCRIPT).read_text()
    return script


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "sets"
    write_causal_sets(folder, "--samples=60", "--min_size=8", "--max_size=16")
    return folder


@pytest.fixture(scope="module")
def unchanged(data, tmp_path_factory):
    script = tmp_path_factory.mktemp("unchanged") / SCRIPT
    script.write_text((ROOT / SCRIPT).read_text())
    return train(script, data)


def test_changes_are_small():
    assert list(changes()) == ["Another network", "Another metric", "Another term of the loss"]
    for name, diff in changes().items():
        new = re.findall(r"^\+(?!\+\+)", diff, re.M)
        assert len(new) <= 10, name


def test_network(data, unchanged, tmp_path):
    script = changed_script(tmp_path, "Another network")
    parameters, rows = train(script, data, "--messages=sum")
    # a layer of i inputs has maps from 3 i to 16 and from 16 to 8, instead of one from 3 i to 8
    more = [16 * 3 * i + 16 + 8 * 16 + 8 - (8 * 3 * i + 8) for i in (4, 8, 8)]
    assert parameters - unchanged[0] == sum(more)
    assert rows[0]["loss"] != unchanged[1][0]["loss"]


def test_metric(data, unchanged, tmp_path):
    script = changed_script(tmp_path, "Another metric")
    _, rows = train(script, data, "--stop_metrics=cls/balanced_accuracy")
    assert rows[0]["loss"] == unchanged[1][0]["loss"]
    assert "val/cls/balanced_accuracy" not in unchanged[1][-1]
    value = rows[-1]["val/cls/balanced_accuracy"]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["best"]["metric"].endswith("cls/balanced_accuracy")
    assert summary["best"]["value"] == value
    assert 0 <= value <= 1


def test_loss(data, unchanged, tmp_path):
    script = changed_script(tmp_path, "Another term of the loss")
    _, rows = train(script, data)
    # weights of the first step are the same, and nearly even: the entropy is at most ln 6 = 1.79
    less = unchanged[1][0]["loss"] - rows[0]["loss"]
    assert 0.1 * 1.5 < less <= 0.1 * 1.792
