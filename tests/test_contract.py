"""What every training script must do, on 1, 2 and 3 processes: a script joins by existing and by an entry in TINY."""

from __future__ import annotations

import importlib
import json

import numpy as np
import pytest
import torch
from runs import SCRIPTS, TINY, Run, Server, differences, state_of


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
def three(script, start):
    """The undisturbed run on three: with more than two ranks the order of a sum matters."""
    name, argv, folder = script
    run = start(name, argv, folder / "world3", 3)
    assert run.statuses == [0, 0, 0], run.text[-3000:]
    return run


def test_every_script_has_a_tiny_run():
    assert set(SCRIPTS) == set(TINY), "a training script without an entry in TINY, or an entry without its script"


def test_two_processes_train(whole):
    """Steps are made, weights move, the loss falls, one rank writes, the summary is complete."""
    state, losses = state_of(whole), whole.losses
    phases = [[r["loss"] for r in whole.rows if "loss" in r and r.get("phase") == p] for p in (None, 1, 2)]
    assert any(phases)
    assert whole.summary["status"] == "finished" and whole.summary["steps"] == len(losses) > 30
    for part in filter(None, phases):
        assert sum(part[-5:]) < (0.9 if len(part) > 20 else 1.0) * sum(part[:5])
    assert all(torch.isfinite(t).all() for t in state["model"].values() if t.is_floating_point())
    assert not any(name.startswith(("module.", "_orig_mod.")) for name in state["model"])
    keys = "script status steps epochs wall_s world_size backend device samples_per_s final_loss best_metric baselines"
    assert set((keys + " checkpoint args").split()) <= set(whole.summary)
    assert set(whole.summary["best_metric"]) == {"name", "value", "step"}
    left = [p.name for p in whole.folder.iterdir() if p.name.startswith(".")]
    assert not left, "temporary files of more than one writer"
    assert whole.text.count("finished:") == 1 and whole.text.count("command:") == 1
    assert (whole.folder / "curves.png").read_bytes()[1:4] == b"PNG"
    for rank in (0, 1):
        assert f"Initialized DDP: rank={rank}, world_size=2, local_rank={rank}" in whole.text


@pytest.mark.parametrize("world_size", [1, 3])
def test_number_of_processes_changes_nothing(script, whole, three, start, world_size):
    """The same global batch on 1, 2 and 3 processes: losses and metrics agree, all steps, both phases."""
    name, argv, folder = script
    run = three if world_size == 3 else start(name, argv, folder / f"world{world_size}", world_size)
    assert run.statuses == [0] * world_size, run.text[-3000:]
    assert len(run.rows) == len(whole.rows)
    for ours, theirs in zip(run.rows, whole.rows, strict=True):
        for key in ("loss", "infonce", "distance", "ndcg@10", "mrr@10", "nelbo", "ce@0.5", "unigram", "grad_norm",
                    "bce", "auc", "val robust@0.15", "val frechet_pixels", "val adv_ood_auc noise",
                    "val loss", "val rewards/margins", "val cls/accuracy", "val dim/f1_macro"):  # fmt: skip
            if key in theirs:
                tolerance = 1e-5 if key == "loss" else 1e-4 if theirs["step"] <= 50 else 1e-3
                assert ours[key] == pytest.approx(theirs[key], rel=tolerance, abs=1e-7), (theirs["step"], key)
    assert sorted(run.trained_on().items()) != []
    for step, ids in whole.trained_on().items():
        assert sorted(run.trained_on()[step]) == sorted(ids), f"step {step} was made of other samples"


def test_what_is_held_out_is_never_trained_on(whole):
    """Counted over all ranks and steps, where a script keeps the numbers of its split."""
    if not (whole.folder / "split.npz").exists():
        pytest.skip("this script keeps names, or splits by content")
    parts = np.load(whole.folder / "split.npz")
    trained = {i for ids in whole.trained_on().values() for i in ids}
    assert trained and trained <= {*parts["train"].tolist()}
    assert not trained & {*parts["valid"].tolist(), *parts["test"].tolist()}


@pytest.mark.parametrize("world_size, ends", [(2, [(1, 9, 9), (0, 15, 15), (0, -1, 15)]), (3, [(2, 31, 9)])])
def test_stopped_and_restarted_equals_undisturbed(script, whole, three, start, world_size, ends):
    """A rank killed, or told to stop, in the middle, again and again, and in the last step, before the evaluation of
    the end: after the restarts every bit is the same."""
    name, argv, folder = script
    target, whole = folder / f"stopped-{world_size}", three if world_size == 3 else whole
    last = state_of(whole)["step"]
    for attempt, (rank, step, number) in enumerate(ends):
        broken = start(name, argv, target, world_size, [[rank, step % last, "signal", number]], attempt=attempt)
        assert set(broken.statuses) <= ({143} if number == 15 else {-9, 1}), broken.text[-3000:]
        assert number != 15 or "checkpoint written, stopped by SIGTERM" in broken.text
        if step < 0:
            assert state_of(broken)["step"] == last
            assert last not in broken.evaluated and last in whole.evaluated
        assert ("resuming" in broken.text) == (attempt > 0)
    run = start(name, argv, target, world_size, attempt=len(ends))
    assert run.statuses == [0] * world_size and "resuming" in run.text, run.text[-3000:]
    ours, theirs = state_of(run), state_of(whole)
    for key in theirs.keys() - {"wall_s", "speed", "wandb_id", "args"}:
        assert not differences(ours[key], theirs[key], key)
    assert run.losses == whole.losses
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
    run = start(name, argv, whole.folder, 2, attempt=1)
    assert run.statuses == [0, 0] and "is finished" in run.text
    assert (whole.folder / "latest.pt").read_bytes() == before


@pytest.mark.parametrize("name", SCRIPTS)
def test_bad_arguments_and_help_start_nothing(name, capsys):
    module = importlib.import_module(name)
    for argv, status in (["--no_such_option=1"], 2), (["--batch_size=many"], 2), (["--help"], 0):
        with pytest.raises(SystemExit) as caught:
            module.parse_args(argv)
        output = capsys.readouterr()
        assert caught.value.code == status and not module.dist.is_initialized()
        assert len(output.err.strip().splitlines()) == (1 if status else 0)
        assert not status or argv[0][2:].partition("=")[0] in output.err
