"""What every training script must do, on 1, 2 and 3 processes. A script joins by existing and by
an entry in TINY."""

import json
import shutil
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


@pytest.fixture(scope="module")
def stopped(task):
    """A run that was told to stop after step 11. A step later it has."""
    faults = [[0, 11, "signal", SIGTERM]]
    run = task.run(task.folder / "stopped", faults=faults, statuses={143})
    assert run.state["step"] == 12
    assert "stopped by SIGTERM: the same command goes on from the checkpoint" in run.text
    return run


def copy_run(run, name):
    """A copy of a run's folder, and of what its ranks wrote down."""
    folder = run.folder.with_name(name)
    shutil.copytree(run.folder, folder)
    for trace in run.folder.parent.glob(f"{run.folder.name}.trace-*"):
        shutil.copy(trace, folder.parent / trace.name.replace(run.folder.name, name, 1))
    return folder


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

    for name, weight in run.state["model"].items():
        assert weight.isfinite().all()
        assert not name.startswith(("module.", "_orig_mod."))
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
    """The same global batch on one process: all figures of all steps agree."""
    run = task.run(task.folder / "one", ranks=1)
    assert len(run.figures) == len(task.whole.figures)
    for ours, theirs in zip(run.figures, task.whole.figures, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-7)
        for name in {"loss", "val/loss"} & theirs.keys():
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-7)
    check_samples(run.trained_on(), task.whole)


def check_samples(made, whole):
    """Every step was made of the samples of the undisturbed run, in whatever order."""
    assert {step: sorted(ids) for step, ids in made.items()} == {
        step: sorted(ids) for step, ids in whole.trained_on().items()
    }


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


def test_stopped_and_restarted_equals_undisturbed(task):
    """A rank is killed; all are told to stop, and the checkpoint is damaged; they are told to stop
    in the evaluation of the end. After the restarts every bit is the same."""
    folder = task.folder / "broken"
    faults = [[1, 9, "signal", SIGKILL]]
    task.run(folder, QUICK_END, faults=faults, statuses={-9, 1})

    run = task.run(folder, faults=[[0, 15, "signal", SIGTERM]], statuses={143})
    assert "resuming" in run.text
    content = (folder / "latest.pt").read_bytes()
    (folder / "latest.pt").write_bytes(content[: len(content) // 2])

    last = task.whole.summary["steps"]
    faults = [[1, last - 1, "evaluation", SIGTERM]]
    run = task.run(folder, faults=faults, statuses={143})
    assert "latest.pt is damaged: trying the one before it" in run.text
    assert run.state["step"] == last
    assert last not in run.evaluated
    assert last in task.whole.evaluated

    run = task.run(folder)
    assert "resuming" in run.text
    assert_same_end(run, task.whole)
    assert run.figures == task.whole.figures


def test_resumed_on_another_number_of_processes(task, stopped):
    """From two to three, of which one is killed: the same samples, none twice, none left out."""
    folder = copy_run(stopped, "moved")
    faults = [[2, 31, "signal", SIGKILL]]
    task.run(folder, QUICK_END, ranks=3, faults=faults, statuses={-9, 1})
    run = task.run(folder, ranks=3)
    first = run.trained_on(world_size=2)
    second = run.trained_on(world_size=3)
    assert max(first) == 12
    assert min(second) == 13
    check_samples({**first, **second}, task.whole)
    assert run.losses == pytest.approx(task.whole.losses, rel=1e-4)


def test_finished_run_says_so(task):
    """It tests again, and does nothing else."""
    folder = copy_run(task.whole, "finished")
    run = task.run(folder)
    last = task.whole.summary["steps"]
    assert f"resuming {folder}/latest.pt at step {last}" in run.text
    assert f"step={last} " not in run.text
    assert_same_end(run, task.whole)
    assert run.rows == task.whole.rows


# an option that cannot change: mostly it makes another network
REFUSED = {
    "train_ddp": ("--projection_hidden=8", "the checkpoint does not fit: "),
    "run_train_uniref50_ddp": ("--hidden_size=8", "the checkpoint does not fit: "),
    "run_dpo_ddp": ("--beta=0.2", "--beta: this run was started with 0.1"),
    "run_train_quantumgrav_ddp": ("--hidden_dim=8", "the checkpoint does not fit: "),
    "run_train_rebm_ddp": ("--width=8", "the checkpoint does not fit: "),
}
DECAY = {"run_train_rebm_ddp": "--wd"}  # elsewhere --weight_decay


def test_options_changed_on_resume(task, stopped):
    """What can change is said and applied; what cannot is refused, and the run is untouched."""
    folder = copy_run(stopped, "changed")
    option, expected = REFUSED[task.name]
    run = task.run(folder, option, statuses={2, -15})
    assert expected in run.refusal()
    assert (folder / "latest.pt").read_bytes() == (stopped.folder / "latest.pt").read_bytes()

    option = DECAY.get(task.name, "--weight_decay")
    faults = [[1, 19, "signal", SIGTERM]]
    run = task.run(folder, f"{option}=0.25", faults=faults, statuses={143})
    assert run.text.count(f"{option} 0.25, it was ") == 1
    groups = run.state["optimizer"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.25, 0]


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


def test_checkpoint_of_something_else(fast):
    folder = fast.folder / "other"
    fast.run(folder, faults=[[0, 3, "signal", SIGTERM]], statuses={143})
    said = fast.run(folder, "--seed=7", statuses={2, -15}).refusal()
    assert "--seed: this run was started with 42" in said
    state = Run(folder).state
    for key, value in {"script": "other.py", "format": -1}.items():
        torch.save({**state, key: value}, folder / "latest.pt")
        said = fast.run(folder, statuses={2, -15}).refusal()
        assert f"latest.pt has {key} {value}, not {state[key]}" in said
        assert "--fresh" in said


@pytest.mark.parametrize("name", SCRIPTS)
def test_bad_arguments_and_help_start_nothing(name):
    for option in ("--no_such_option=1", "--batch_size=many"):
        status, text = call_script(name, option)
        assert status == 2
        assert text.count("\n") == 1
        assert option[2:].partition("=")[0] in text
    status, text = call_script(name, "--help")
    assert status == 0
    assert text.startswith("usage: ")
    assert "--batch_size" in text
    assert "[RANK" not in text
