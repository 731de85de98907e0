"""What every training script must do, on 1, 2 and 3 processes. A script joins by existing and by
an entry in TINY."""

import json
import signal

import numpy as np
import pytest
import torch
from helpers import call_script
from runs import SCRIPTS, TINY, Run, Task, assert_same_end

SIGTERM = signal.SIGTERM
SIGKILL = signal.SIGKILL
# The workers of a killed rank keep its connections open until they see that it is gone, after 5 s.
QUICK_END = "--num_workers=0"


@pytest.fixture(scope="module", params=SCRIPTS)
def task(request, tmp_path_factory, server):
    return Task(request.param, tmp_path_factory.mktemp(request.param), server)


def test_every_script_has_a_tiny_run():
    assert set(SCRIPTS) == set(TINY)


def test_two_processes_train(task):
    """Weights move, the loss falls, one rank writes, the summary is complete."""
    run = task.whole
    summary = run.summary
    steps = [row["step"] for row in run.rows if "loss" in row]
    assert summary["status"] == "finished"
    assert summary["world_size"] == 2
    assert len(steps) > 30
    assert steps == list(range(1, summary["steps"] + 1))
    for phase in (None, 1, 2):
        losses = [row["loss"] for row in run.rows if "loss" in row and row.get("phase") == phase]
        if losses:
            share = 0.9 if len(losses) > 20 else 1
            assert sum(losses[-5:]) < share * sum(losses[:5])

    state = run.state
    for name, weight in state["model"].items():
        assert weight.isfinite().all()
        assert not name.startswith(("module.", "_orig_mod."))
    decay = summary["args"]["wd" if task.name == "run_train_rebm_ddp" else "weight_decay"]
    assert [group["weight_decay"] for group in state["optimizer"]["param_groups"]] == [decay, 0]

    best = summary["best"]
    values = [row["val/" + best["metric"]] for row in run.rows if "val/" + best["metric"] in row]
    assert best["value"] == (min(values) if best["better"] == "lower" else max(values))
    assert torch.load(run.folder / "best.pt", weights_only=True)["step"] == best["step"]
    assert summary["baselines"]
    files = {path.name for path in run.folder.iterdir()}
    assert {"latest.pt", "previous.pt"} <= files
    assert "new.tmp" not in files

    for once in ("Starting distributed training...", "completed successfully!"):
        assert run.text.count(once) == 1
    assert "no curves.png" not in run.text
    for rank in (0, 1):
        assert f"Process {rank}/2 started" in run.text
        assert f"Initializing DDP for rank {rank}..." in run.text


def test_number_of_processes_changes_nothing(task):
    """One process begins, and three go on. Each step has the samples and the figures of the run on
    two: none of them twice, none left out."""
    folder = task.folder / "moved"
    task.run(folder, ranks=1, faults=[[0, 22, "signal", SIGTERM]], statuses={143})
    run = task.run(folder, ranks=3)
    assert "resuming" in run.text
    whole = task.whole
    assert len(run.figures) == len(whole.figures)
    for ours, theirs in zip(run.figures, whole.figures, strict=True):
        ours = dict(ours)
        theirs = dict(theirs)
        for name in {"val/ndcg@10", "val/mrr@10"} & theirs.keys():
            # one of the 53 queries has two documents at 0.9993012: the last bit ranks them
            assert ours.pop(name) == pytest.approx(theirs.pop(name), abs=0.5 / 53 + 1e-4)
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-7)
        for name in {"loss", "val/loss"} & theirs.keys():
            if theirs["step"] <= 30:
                assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-7)

    first = run.trained_on(world_size=1)
    second = run.trained_on(world_size=3)
    assert first
    assert second
    assert not first.keys() & second.keys()
    made = {**first, **second}
    for step, ids in whole.trained_on().items():
        assert sorted(made.pop(step)) == sorted(ids)
    assert not made


def test_what_is_held_out_is_never_trained_on(task):
    """Over all ranks and steps, where a script or its data keeps the numbers of the split."""
    whole = task.whole
    splits = list(task.folder.glob("*/split.npy"))
    if splits:
        train = np.flatnonzero(np.load(splits[0]) == 0)
    elif (whole.folder / "split.npz").exists():
        train = np.load(whole.folder / "split.npz")["train"]
    elif (whole.folder / "split.json").exists():  # names that end with the number of the row
        names = json.loads((whole.folder / "split.json").read_text())["train"]
        train = [int(name.rpartition(":")[2]) for name in names]
    else:
        pytest.skip("this script splits by content")
    trained = set()
    for ids in whole.trained_on().values():
        trained |= set(ids)
    assert trained
    assert trained <= set(train)


# an option that cannot change: mostly it makes another network
REFUSED = {
    "train_ddp": ("--projection_hidden=8", "the checkpoint does not fit: "),
    "run_train_uniref50_ddp": ("--hidden_size=8", "the checkpoint does not fit: "),
    "run_dpo_ddp": ("--beta=0.2", "--beta: this run was started with 0.1"),
    "run_train_quantumgrav_ddp": ("--hidden_dim=8", "the checkpoint does not fit: "),
    "run_train_rebm_ddp": ("--width=8", "the checkpoint does not fit: "),
}


def test_stopped_and_restarted_equals_undisturbed(task, matrix):
    """A rank is killed; all are told to stop; an option is given that cannot change, and the
    checkpoint is damaged; they are told to stop in the evaluation of the end. After the restarts
    every bit is the same, and a restart of the finished run changes nothing."""
    folder = task.folder / "broken"
    latest = folder / "latest.pt"
    faults = [[1, 9, "signal", SIGKILL]]
    run = task.run(folder, QUICK_END, faults=faults, statuses={-9, 1})
    assert run.seconds < 30, run.text[-3000:]
    assert "another rank has died; the same command, given again, goes on" in run.text
    matrix(task.name, "rank killed", "the others end with 1; the same bits", run.seconds)

    run = task.run(folder, faults=[[0, 15, "signal", SIGTERM]], statuses={143})
    matrix(task.name, "SIGTERM to one rank", "all save and end; the same bits", run.seconds)
    assert "resuming" in run.text
    assert "stopped by SIGTERM: the same command goes on from the checkpoint" in run.text
    assert run.state["step"] == 16

    content = latest.read_bytes()
    option, expected = REFUSED[task.name]
    run = task.run(folder, option, statuses={2, -15})
    assert expected in run.refusal()
    assert latest.read_bytes() == content
    latest.write_bytes(content[: len(content) // 2])

    last = task.whole.summary["steps"]
    faults = [[1, last - 1, "evaluation", SIGTERM]]
    run = task.run(folder, faults=faults, statuses={143})
    matrix(task.name, "SIGTERM in an evaluation", "all save and end; the same bits", run.seconds)
    assert "latest.pt is damaged: trying the one before it" in run.text
    assert run.state["step"] == last
    assert last not in run.evaluated
    assert last in task.whole.evaluated

    run = task.run(folder)
    assert f"resuming {latest} at step {last}" in run.text
    assert_same_end(run, task.whole)
    assert run.figures == task.whole.figures
    outcome = "named; the one before it is taken; the same bits"
    matrix(task.name, "checkpoint damaged", outcome, run.seconds)

    rows = run.rows
    run = task.run(folder)
    assert f"step={last} " not in run.text
    assert_same_end(run, task.whole)
    assert run.rows == rows


@pytest.mark.parametrize("name", SCRIPTS)
def test_help(name):
    status, text = call_script(name, "--help")
    assert status == 0
    assert text.startswith("usage: ")
    assert "--batch_size" in text
    assert "[RANK" not in text


# --------------------------------------------------------------------------------------------------
# Of lines that every script has: shown with one


@pytest.fixture(scope="module")
def fast(tmp_path_factory, server):
    return Task("run_train_quantumgrav_ddp", tmp_path_factory.mktemp("fast"), server)


def test_three_processes_end_alike(fast):
    """With more than two the order of a sum matters."""
    whole = fast.run(fast.folder / "three", ranks=3)
    folder = fast.folder / "killed"
    faults = [[2, 31, "signal", SIGKILL]]
    fast.run(folder, QUICK_END, ranks=3, faults=faults, statuses={-9, 1})
    run = fast.run(folder, ranks=3)
    assert "resuming" in run.text
    assert_same_end(run, whole)
    assert run.figures == whole.figures


def test_checkpoint_of_other_options(fast):
    """What can change is said and applied. Another seed, script or format is refused."""
    folder = fast.folder / "other"
    fast.run(folder, faults=[[0, 3, "signal", SIGTERM]], statuses={143})
    faults = [[1, 6, "signal", SIGTERM]]
    run = fast.run(folder, "--weight_decay=0.25", faults=faults, statuses={143})
    assert run.text.count("--weight_decay 0.25, it was ") == 1
    groups = run.state["optimizer"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.25, 0]

    said = fast.run(folder, "--seed=7", statuses={2, -15}).refusal()
    assert "--seed: this run was started with 42" in said
    state = Run(folder).state
    for key, value in {"script": "other.py", "format": -1}.items():
        torch.save({**state, key: value}, folder / "latest.pt")
        said = fast.run(folder, statuses={2, -15}).refusal()
        assert f"latest.pt has {key} {value}, not {state[key]}" in said
        assert "--fresh" in said
