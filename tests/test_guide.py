"""The changes of scripts shown in docs/DDP_TRAINING_GUIDE.md fit and work."""

import importlib.util
import re
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from helpers import ROOT, call_program, write_causal_sets
from runs import Run
from torch import nn

SCRIPT = "run_train_quantumgrav_ddp.py"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "sets.npz"
    write_causal_sets(path, "--samples=60", "--min_size=8", "--max_size=16")
    return path


def write_script(folder, name, change):
    """A copy of a script with a change of the guide, if any: the diff after these words."""
    script = folder / name
    script.write_text((ROOT / name).read_text())
    if change:
        text = (ROOT / "docs" / "DDP_TRAINING_GUIDE.md").read_text().split(f"\n**{change}**")[1]
        diff = re.search(r"^```diff\n(.*?)^```$", text, re.M | re.S)[1]
        # a repository of its own, or git may look for one in the folders above
        subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
        subprocess.run(["git", "apply", "-"], cwd=folder, input=diff, text=True, check=True)
    return script


def train(script, data, *options, status=0):
    """(output, Run) of a short run."""
    argv = "--num_epochs=1 --batch_size=12 --hidden_dim=8 --head_dim=8 --log_every=1 --device=cpu"
    folder = script.parent / "run"
    argv = [*argv.split(), f"--data={data}", f"--cache_dir={data.parent}/cache"]
    found, text = call_program(script, *argv, f"--output_dir={folder}", *options)
    assert found == status, text
    return text, Run(folder)


def count_parameters(text):
    return int(re.search(r"([\d,]+) parameters", text)[1].replace(",", ""))


@pytest.fixture(scope="module")
def unchanged(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unchanged")
    return train(write_script(folder, SCRIPT, None), data)


def test_network(data, unchanged, tmp_path):
    text, run = train(write_script(tmp_path, SCRIPT, "Another network."), data, "--messages=sum")
    # a layer of i inputs has maps from 3 i to 16 and from 16 to 8, instead of one from 3 i to 8
    more = [16 * 3 * i + 16 + 8 * 16 + 8 - (8 * 3 * i + 8) for i in (4, 8, 8)]
    assert count_parameters(text) - count_parameters(unchanged[0]) == sum(more)
    assert run.losses[0] != unchanged[1].losses[0]


def test_metric(data, unchanged, tmp_path):
    script = write_script(tmp_path, SCRIPT, "Another metric.")
    _, run = train(script, data, "--stop_metrics=cls/balanced_accuracy")
    assert run.losses[0] == unchanged[1].losses[0]
    best = run.summary["best"]
    assert best["metric"] == "cls/balanced_accuracy"
    assert 0 <= best["value"] == run.rows[-1]["val/cls/balanced_accuracy"] <= 1


def test_loss(data, unchanged, tmp_path):
    _, run = train(write_script(tmp_path, SCRIPT, "Another term of the loss."), data)
    # weights of the first step are the same, and nearly even: the entropy is at most ln 6 = 1.79
    assert 0.1 * 1.5 < unchanged[1].losses[0] - run.losses[0] <= 0.1 * 1.792


def test_optimizer(data, unchanged, tmp_path):
    """It trains, is resumed, and is not taken for the other one."""
    script = write_script(tmp_path, SCRIPT, "Another optimizer.")
    _, run = train(script, data)
    assert run.losses[0] == unchanged[1].losses[0]
    assert run.losses[1] != unchanged[1].losses[1]
    text, _ = train(script, data, "--num_epochs=2")
    assert "resuming" in text
    script.write_text((ROOT / SCRIPT).read_text())
    text, _ = train(script, data, "--num_epochs=3", status=2)
    assert "AdamW" in text
    assert "Both" in text


def create_model(name, in_chans, num_classes):
    """As timm's: without classes it gives vectors."""
    assert (name, num_classes) == ("convnext_tiny", 0)
    model = nn.Sequential(nn.Conv2d(in_chans, 6, 4, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model.num_features = 6
    return model


def test_network_of_timm(tmp_path):
    path = write_script(tmp_path, "run_train_rebm_ddp.py", "A network of timm")
    spec = importlib.util.spec_from_file_location("changed", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    timm = SimpleNamespace(create_model=create_model)
    with mock.patch.dict(sys.modules, timm=timm):
        with mock.patch.object(sys, "argv", ["changed", "--model_type=convnext_tiny"]):
            model = script.make_network(script.parse_args(), 10, 3, 32)
    x = torch.rand(2, 3, 32, 32)
    attack = script.Attack(model, script.logsumexp, 0.1)
    assert model(x).shape == (2, 10)
    assert (model(attack(x, None, 5)).logsumexp(1) > model(x).logsumexp(1)).all()
