"""What every training script must do, on 1, 2 and 3 processes: a script joins by existing and by an entry in TINY."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from helpers import call_script
from runs import DROPOUT, SCRIPTS, TINY, Run, Server, apart, state_of, stopped


@pytest.fixture(scope="module")
def start():
    """start(script, argv, folder, world_size, faults): a Run."""
    server = Server()
    yield server.run
    server.close()


@pytest.fixture(scope="module", params=SCRIPTS)
def script(request, tmp_path_factory):
    """(name, arguments of its tiny run, folder)"""
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, TINY[request.param](folder), folder


@pytest.fixture(scope="module")
def whole(script, start):
    """The undisturbed run on two processes."""
    name, argv, folder = script
    run = start(name, argv, folder / "whole", 2, PICTURES=1)
    assert run.statuses == [0, 0], run.text[-3000:]
    return run


@pytest.fixture(scope="module")
def to_stop(script, whole, start):
    """(arguments, undisturbed run) of the runs on two processes that are stopped: with dropout,
    where there is one."""
    name, argv, folder = script
    if name not in DROPOUT:
        return argv, whole
    argv = [*argv, *DROPOUT[name]]
    run = start(name, argv, folder / "dropout", 2)
    assert run.statuses == [0, 0], run.text[-3000:]
    assert run.losses != whole.losses
    return argv, run


@pytest.fixture(scope="module")
def three(script, start):
    """The undisturbed run on three: with more than two ranks the order of a sum matters."""
    name, argv, folder = script
    run = start(name, argv, folder / "world3", 3)
    assert run.statuses == [0, 0, 0], run.text[-3000:]
    return run


def test_every_script_has_a_tiny_run():
    assert set(SCRIPTS) == set(TINY), (
        "a training script without an entry in TINY, or an entry without its script"
    )


def check_files(run: Run) -> None:
    keys = "status steps best baselines script seconds world_size torch args"
    assert set(keys.split()) <= set(run.summary)
    assert run.summary["world_size"] == 2
    best = run.summary["best"]
    metric = "val/" + best["metric"]
    values = [row[metric] for row in run.rows if metric in row]
    assert best["value"] == (min(values) if best["better"] == "lower" else max(values))
    assert torch.load(run.folder / "best.pt", weights_only=True)["step"] == best["step"]
    assert {"latest.pt", "previous.pt"} <= {path.name for path in run.folder.iterdir()}
    assert not [*run.folder.glob("*.tmp")]
    steps = [row["step"] for row in run.rows if "loss" in row]
    assert steps == [*range(1, run.summary["steps"] + 1)]
    assert run.text.count("completed successfully!") == 1


def test_two_processes_train(script, whole):
    """Steps are made, weights move, the loss falls, one rank writes, the summary is complete."""
    state, losses = state_of(whole), whole.losses
    phases = [
        [r["loss"] for r in whole.rows if "loss" in r and r.get("phase") == p] for p in (None, 1, 2)
    ]
    assert any(phases)
    assert whole.summary["status"] == "finished" and whole.summary["steps"] == len(losses) > 30
    for part in filter(None, phases):
        assert sum(part[-5:]) < (0.9 if len(part) > 20 else 1.0) * sum(part[:5])
    assert all(torch.isfinite(t).all() for t in state["model"].values() if t.is_floating_point())
    assert not any(name.startswith(("module.", "_orig_mod.")) for name in state["model"])
    check_files(whole)
    assert whole.text.count("Starting distributed training...") == 1
    assert (whole.folder / "curves.png").read_bytes()[1:4] == b"PNG"
    for rank in (0, 1):
        assert f"[RANK {rank}] " in whole.text
        assert f"Process {rank}/2 started" in whole.text
        assert f"Initializing DDP for rank {rank}..." in whole.text


# in the lines of metrics.jsonl
COMPARED = """loss infonce distance bce auc T grad_norm skipped val/ndcg@10 val/mrr@10 val/nelbo val/ce@0.5
    val/unigram val/rewards/margins val/perplexity val/loss val/loss_se val/cls/accuracy val/dim/f1_macro
    val/at/robust val/dat/robust val/dat/cross_entropy val/dat/adv_auroc""".split()


@pytest.mark.parametrize("world_size", [1, 3])
def test_number_of_processes_changes_nothing(script, whole, three, start, world_size):
    """The same global batch on 1, 2 and 3 processes: losses and metrics agree, all steps, both phases."""
    name, argv, folder = script
    run = three if world_size == 3 else start(name, argv, folder / f"world{world_size}", world_size)
    assert run.statuses == [0] * world_size, run.text[-3000:]
    assert len(run.rows) == len(whole.rows)
    for ours, theirs in zip(run.rows, whole.rows, strict=True):
        for key in COMPARED:
            if key in theirs:
                tolerance = 1e-4 if theirs["step"] <= 50 else 1e-3
                if key in ("loss", "val/loss"):
                    tolerance = 1e-5
                assert ours[key] == pytest.approx(theirs[key], rel=tolerance, abs=1e-7), (
                    theirs["step"],
                    key,
                )
    assert sorted(run.trained_on().items()) != []
    for step, ids in whole.trained_on().items():
        assert sorted(run.trained_on()[step]) == sorted(ids), (
            f"step {step} was made of other samples"
        )


def test_what_is_held_out_is_never_trained_on(script, whole):
    """Over all ranks and steps, where a script or its data keeps the numbers of the split."""
    splits = [*script[2].glob("*/split.npy")]
    if splits:
        split = np.load(splits[0])
        names = enumerate(["train", "valid", "test"])
        parts = {name: np.flatnonzero(split == number) for number, name in names}
    elif (whole.folder / "split.npz").exists():
        parts = np.load(whole.folder / "split.npz")
    elif (whole.folder / "split.json").exists():  # names that end with the number of the row
        split = json.loads((whole.folder / "split.json").read_text())
        parts = {"test": np.array([], int)}
        for part, names in split.items():
            parts[part] = np.array([int(name.rpartition(":")[2]) for name in names])
    else:
        pytest.skip("this script splits by content")
    trained = {i for ids in whole.trained_on().values() for i in ids}
    assert trained and trained <= {*parts["train"].tolist()}
    assert not trained & {*parts["valid"].tolist(), *parts["test"].tolist()}


@pytest.mark.parametrize(
    "world_size, ends", [(2, [(1, 9, 9), (0, 15, 15), (0, -1, 15)]), (3, [(2, 31, 9)])]
)
def test_stopped_and_restarted_equals_undisturbed(script, to_stop, three, start, world_size, ends):
    """A rank killed, or told to stop, in the middle, again and again, and in the last step, before the evaluation of
    the end: after the restarts every bit is the same."""
    name, argv, folder = script
    argv, whole = to_stop if world_size == 2 else (argv, three)
    target = folder / f"stopped-{world_size}"
    last = state_of(whole)["step"]
    for attempt, (rank, step, number) in enumerate(ends):
        broken = start(
            name, argv, target, world_size, [[rank, step % last, "signal", number]], attempt=attempt
        )
        assert set(broken.statuses) <= ({143} if number == 15 else {-9, 1}), broken.text[-3000:]
        assert number != 15 or stopped("SIGTERM") in broken.text
        if step < 0:
            assert state_of(broken)["step"] == last
            assert last not in broken.evaluated and last in whole.evaluated
        assert ("resuming" in broken.text) == (attempt > 0)
    run = start(name, argv, target, world_size, attempt=len(ends))
    assert run.statuses == [0] * world_size and "resuming" in run.text, run.text[-3000:]
    assert not apart(run, whole)
    assert run.losses == whole.losses
    assert run.summary.get("test") == whole.summary.get("test")
    assert run.trained_on() == whole.trained_on()


def test_resumed_on_another_world_size(script, whole, start):
    """Stopped on two processes, resumed on three: the same samples, none twice, none left out."""
    name, argv, folder = script
    target = folder / "moved"
    assert set(start(name, argv, target, 2, [[0, 11, "signal", 15]]).statuses) == {143}
    half = max(Run(target).trained_on())
    run = start(name, argv, target, 3, attempt=1)
    assert run.statuses == [0, 0, 0], run.text[-3000:]
    first, second, plan = {}, {}, whole.trained_on()
    for trace in folder.glob("moved.trace-*"):
        into = first if "of-2" in trace.name else second
        for number, ids in map(json.loads, trace.read_text().splitlines()):
            into.setdefault(number, []).extend(ids)
    assert max(first) == half and min(second) == half + 1 and len(first) + len(second) == len(plan)
    for step, ids in {**first, **second}.items():
        assert sorted(ids) == sorted(plan[step]) and len(set(ids)) == len(ids)
    assert run.losses == pytest.approx(whole.losses, rel=1e-4)


def test_finished_run_says_so(script, whole, start):
    name, argv, _ = script
    before = (whole.folder / "latest.pt").read_bytes()
    rows, tested = whole.rows, whole.summary.get("test")
    run = start(name, argv, whole.folder, 2, attempt=1)
    assert run.statuses == [0, 0]
    assert (whole.folder / "latest.pt").read_bytes() == before
    # it tests again, and nothing else
    last = whole.summary["steps"]
    assert f"resuming {whole.folder}/latest.pt at step {last}" in run.text
    assert f"step={last} " not in run.text
    assert run.rows == rows
    assert run.summary.get("test") == tested


def refused(run: Run) -> str:
    """The one line of a run that cannot work; the server ends the other rank like a launcher."""
    assert set(run.statuses) <= {2, -15}, run.text[-3000:]
    assert "Traceback" not in run.text
    said = [line for line in run.text.splitlines() if ": error: " in line]
    assert len(said) == 1, run.text[-3000:]
    return said[0]


# an option that makes another network; the weight decay, and its default or that of the tiny run
SMALLER = {
    "train_ddp": "--projection_hidden=8",
    "run_train_uniref50_ddp": "--hidden_size=8",
    "run_train_quantumgrav_ddp": "--hidden_dim=8",
    "run_train_rebm_ddp": "--width=8",
}
DECAY = {
    "train_ddp": ("--weight_decay", "0.01"),
    "run_train_uniref50_ddp": ("--weight_decay", "0.01"),
    "run_dpo_ddp": ("--weight_decay", "0.0"),
    "run_train_quantumgrav_ddp": ("--weight_decay", "5e-05"),
    "run_train_rebm_ddp": ("--wd", "0.0005"),
}


def test_options_changed_on_resume(script, start):
    """What can change is said and applied; what cannot is refused, and the run is untouched."""
    name, argv, folder = script
    target = folder / "changed"
    assert set(start(name, argv, target, 2, [[0, 11, "signal", 15]]).statuses) == {143}
    kept = state_of(Run(target))
    assert kept["step"] == 12

    if name == "run_dpo_ddp":  # its network has one size
        said = refused(start(name, [*argv, "--beta=0.2"], target, 2, attempt=1))
        assert "--beta: this run was started with 0.1" in said
    else:
        said = refused(start(name, [*argv, SMALLER[name]], target, 2, attempt=1))
        assert "--fresh" in said and "does not fit" in said
    others = {"script": "other.py", "format": -1}
    for key, value in others.items():
        torch.save({**kept, key: value}, target / "latest.pt")
        said = refused(start(name, argv, target, 2, attempt=2))
        assert f"latest.pt has {key} {value}, not {kept[key]}" in said and "--fresh" in said
    torch.save(kept, target / "latest.pt")

    faults = [[1, 19, "signal", 15]]
    option, before = DECAY[name]
    run = start(name, [*argv, f"{option}=0.25"], target, 2, faults, attempt=3)
    assert set(run.statuses) == {143}, run.text[-3000:]
    assert run.text.count(f"{option} 0.25, it was {before}") == 1
    groups = state_of(run)["optimizer"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.25, 0.0]


@pytest.mark.parametrize("name", SCRIPTS)
def test_bad_arguments_and_help_start_nothing(name):
    for option in ("--no_such_option=1", "--batch_size=many"):
        status, text = call_script(name, option)
        assert status == 2 and "[RANK" not in text
        assert len(text.strip().splitlines()) == 1
        assert option[2:].partition("=")[0] in text
    status, text = call_script(name, "--help")
    assert status == 0 and "[RANK" not in text
    assert text.startswith("usage: ") and "--batch_size" in text
