"""What every training script must do, on 1, 2 and 3 processes. It joins by its tiny_... in runs."""

import argparse
import importlib
import re
import shutil
from signal import SIGKILL, SIGTERM

import numpy as np
import pytest
import torch
from helpers import run_here
from runs import DROPOUT, SCRIPTS, STOPPED, Task, print_row

# The workers of a killed rank keep its connections open until they see that it is gone, after 5 s.
QUICK_END = "--num_workers=0"


@pytest.fixture(scope="module", params=SCRIPTS)
def task(request, tmp_path_factory, server):
    return Task(request.param, tmp_path_factory.mktemp(request.param), server)


def test_two_processes_train(task):
    """Weights move, the loss falls, the summary is complete."""
    run = task.whole
    summary = run.summary
    steps = [row["step"] for row in run.rows if "loss" in row]
    assert summary["status"] == "finished"
    assert summary["world_size"] == 2
    assert len(steps) > 30
    assert steps == list(range(1, summary["steps"] + 1))
    for phase in {row.get("phase") for row in run.rows if "loss" in row}:
        losses = [row["loss"] for row in run.rows if "loss" in row and row.get("phase") == phase]
        share = 0.9 if len(losses) > 20 else 1
        assert sum(losses[-5:]) < share * sum(losses[:5])

    is_dpo = task.name == "run_dpo_ddp"  # whose files have the names of ProteinMPNN's
    for name, weight in run.state["model_state_dict" if is_dpo else "model"].items():
        assert weight.isfinite().all()
        assert not name.startswith(("module.", "_orig_mod."))
    decay = summary["args"]["wd" if task.name == "run_train_rebm_ddp" else "weight_decay"]
    decays = [group["weight_decay"] for group in run.state["optimizer"]["param_groups"]]
    assert set(decays) == ({decay} if is_dpo else {decay, 0})

    best = summary["best"]
    values = [row["val/" + best["metric"]] for row in run.rows if "val/" + best["metric"] in row]
    falls = best["metric"].endswith(("loss", "nelbo"))
    assert best["value"] == (min(values) if falls else max(values))
    state = torch.load(run.folder / ("best_model.pt" if is_dpo else "best.pt"), weights_only=True)
    assert state.get("loop", state)["step"] == best["step"]
    assert len(run.kept) == summary["steps"] // 7
    kept = torch.load(run.folder / "step_14.pt", weights_only=True)
    assert kept.keys() == state.keys() and kept["loop"]["step"] == 14  # so tools read both
    assert summary["baselines"]


def test_compiled_on_two_processes(task, request):
    """The first steps are those of the run that is not compiled."""
    if not request.config.getoption("--all-faults"):
        pytest.skip("slow: --all-faults")
    faults = [[rank, 4, "signal", SIGTERM] for rank in (0, 1)]
    more = ["--compile", QUICK_END, "--timeout_minutes=5"]
    run = task.run(task.folder / "compiled", *more, faults=faults, statuses=STOPPED)
    assert run.losses == pytest.approx(task.whole.losses[:4], rel=1e-3)


def test_number_of_processes_changes_nothing(task):
    """One process begins, and three go on: each step has the samples and figures of that on two."""
    folder = task.folder / "moved"
    task.run(folder, ranks=1, faults=[[0, 22, "signal", SIGTERM]], statuses=STOPPED)
    run = task.run(folder, ranks=3)
    assert "resuming" in run.text
    whole = task.whole
    assert len(run.figures) == len(whole.figures)
    for ours, theirs in zip(run.figures, whole.figures, strict=True):
        for name in {"val/ndcg@10", "val/mrr@10", "val/asym_ndcg@10"} & theirs.keys():
            # of two documents with nearly the same score the last bit ranks one first
            assert ours.pop(name) == pytest.approx(theirs.pop(name), abs=0.5 / 31 + 1e-4)
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-7)
        for name in {"loss", "val/loss"} & theirs.keys():
            if theirs["step"] <= 30:
                assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-7)

    first = run.trained_on(world_size=1)
    second = run.trained_on(world_size=3)
    assert first and second and not first.keys() & second.keys()
    made = {step: sorted(ids) for step, ids in [*first.items(), *second.items()]}
    assert made == {step: sorted(ids) for step, ids in whole.trained_on().items()}


def test_validation_does_not_depend_on_the_batch_size(task, monkeypatch):
    """To the last bit, of the same weights."""
    script = importlib.import_module(task.name)
    measured = []

    def evaluate(*args):
        measured.append(plain(*args))
        raise KeyboardInterrupt  # the first one is enough

    plain = script.evaluate
    monkeypatch.setattr(script, "evaluate", evaluate)
    words = [word for word in task.argv if re.match("--.*lr=", word)]
    still = [re.sub("=.*", "=0", word) for word in words]  # learning rates of 0
    for size in (1, 3, 64):
        folder = task.folder / f"size-{size}"
        options = [*task.argv, *still, f"--batch_size={size}", f"--output_dir={folder}"]
        with pytest.raises(KeyboardInterrupt):
            run_here(script, *options, "--num_workers=0")
    np.testing.assert_equal(measured[1:], measured[:1] * 2)


def test_what_is_held_out_is_never_trained_on(task):
    """Over all ranks and steps, where a script or its data keeps the numbers of the split."""
    whole = task.whole
    if task.name == "run_train_quantumgrav_ddp":
        script = importlib.import_module(task.name)
        (folder,) = (task.folder / "cache").glob("sets-*")
        data = script.CausalSets(folder, argparse.Namespace(**whole.summary["args"]))
        train = data.part("train")
        assert len(train) == 0.75 * 300
    elif task.name == "run_train_rebm_ddp":
        read = list(task.folder.glob("cache/images-*/rows.npz"))
        first = min(read, key=lambda path: path.stat().st_mtime)  # the images to classify
        train = np.flatnonzero(np.load(first)["split"] == 0)
    elif task.name == "run_dpo_ddp":  # names that end with the number of the row
        train = set(range(80)) - {int(name.split(":")[-1]) for name in whole.summary["held_out"]}
        assert len(train) == 64
    else:
        pytest.skip("this script splits by content")
    trained = set().union(*whole.trained_on().values())
    assert trained and trained <= set(train)


def test_stopped_and_restarted_equals_undisturbed(task):
    """A rank is killed; all are told to stop, also in an evaluation; an option is given that cannot
    change. After the restarts every bit is the same, also if the finished run is restarted."""
    folder = task.folder / "broken"
    faults = [[1, 11, "signal", SIGKILL]]  # 3 steps after a checkpoint
    run = task.run(folder, QUICK_END, faults=faults, statuses={-9, 1})
    assert run.seconds < 30, run.text[-3000:]
    print_row(task.name, "rank killed", "the others end with 1; the same bits", run.seconds)

    run = task.run(folder, faults=[[0, 15, "signal", SIGTERM]], statuses=STOPPED)
    print_row(task.name, "SIGTERM to one rank", "all save and end; the same bits", run.seconds)
    assert "resuming" in run.text
    assert "stopped by SIGTERM: the same command " in run.text
    assert run.step == 15

    content = (folder / "latest.pt").read_bytes()
    refused = task.run(folder, "--seed=9", statuses={2, -15})
    assert "has a run with 42" in refused.refusal()
    assert (folder / "latest.pt").read_bytes() == content

    # it runs to its end and counts, and the next step sees the signal
    evaluated = task.whole.evaluated[-2]
    faults = [[1, evaluated - 1, "evaluation", SIGTERM]]
    run = task.run(folder, faults=faults, statuses=STOPPED)
    print_row(task.name, "SIGTERM in an evaluation", "it counts; the same bits", run.seconds)
    assert run.step == evaluated + 1
    assert run.evaluated[-1] == evaluated

    for step in (run.step, task.whole.step):
        run = task.restart(folder)
        assert re.search(rf"resuming .* at step {step}\b", run.text)


LONGER = {  # than the tiny run
    "train_ddp": "--phase2_epochs=4",
    "run_train_uniref50_ddp": "--n_iters=50",
    "run_dpo_ddp": "--num_epochs=5",
    "run_train_quantumgrav_ddp": "--num_epochs=6",
    "run_train_rebm_ddp": "--total_epochs=3",
}


def test_a_finished_run_is_made_longer(task):
    folder = task.folder / "longer"
    shutil.copytree(task.whole.folder, folder)
    run = task.run(folder, LONGER[task.name], ranks=1)
    assert f"resuming {folder} at step {task.whole.step}" in run.text
    assert run.step > task.whole.step and run.summary["status"] == "finished"
    assert run.rows[: len(task.whole.rows)] == task.whole.rows
    if task.name == "run_train_rebm_ddp":
        refused = task.run(folder, "--total_epochs=0", ranks=1, statuses={2})
        assert "stage 2 has begun" in refused.refusal()


def test_three_processes_end_alike(tmp_path, server):
    """With more than two the order of a sum matters. One is killed now and then; dropout."""
    name = "run_train_quantumgrav_ddp"
    task = Task(name, tmp_path, server, *DROPOUT[name])
    whole = task.run(tmp_path / "three", ranks=3)
    folder = tmp_path / "killed"
    for step in (14, 27):
        faults = [[step % 3, step, "signal", SIGKILL]]
        task.run(folder, QUICK_END, ranks=3, faults=faults, statuses={-9, 1})
    # an option that may change is applied
    run = task.run(folder, "--save_every=7", ranks=3)
    assert run.summary["args"]["save_every"] == 7
    task.check_same(folder, whole)
