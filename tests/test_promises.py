"""What every script does around its steps, where no process has to be started, or
a single short one. (Done to whole runs: test_contract.py, test_faults.py.)"""

import argparse
import errno
import importlib
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import call_script, parse_arguments
from matplotlib.figure import Figure
from runs import SCRIPTS, Task


@pytest.fixture(params=SCRIPTS)
def script(request):
    return importlib.import_module(request.param)


@pytest.fixture(scope="module", params=SCRIPTS)
def task(request, tmp_path_factory, server):
    return Task(request.param, tmp_path_factory.mktemp(request.param), server)


# --------------------------------------------------------------------------------------------------
# Options


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.yaml", "save_every: 7\n"),
        ("config.yaml", "\ufeffsave_every: 7\n"),
        ("config.json", '{\n\t"save_every": 7\n}'),
        ("config.json", '\ufeff{"save_every": 7}'),
    ],
    ids=["YAML", "with a byte-order mark", "JSON with tabs", "JSON with a byte-order mark"],
)
def test_config(script, tmp_path, name, text):
    config = tmp_path / name
    config.write_text(text, encoding="utf-8")
    assert parse_arguments(script, f"--config={config}").save_every == 7


def test_option_of_a_config_without_a_value(script, tmp_path):
    """It has its default; but a name that no option has is an error."""
    config = tmp_path / "config.yaml"
    config.write_text("save_every:\nsave_evry:\n")
    with pytest.raises(script.InputError, match="--save_evry"):
        parse_arguments(script, f"--config={config}")


def test_values_that_look_like_options(script):
    assert parse_arguments(script, "--output_dir", "lr=3e-4").output_dir == "lr=3e-4"
    assert parse_arguments(script, "--output_dir=lr=3e-4").output_dir == "lr=3e-4"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--device=cuda", "--device cuda: .* cpu"),
        ("--config=/nowhere.yaml", "--config /nowhere.yaml: .*No such file"),
        ("--output_dir=/proc/nothing", "--output_dir /proc/nothing"),
        ("--cache_dir=/proc/nothing", "--cache_dir /proc/nothing is not writable"),
        ("--max_minutes=inf", "--max_minutes: inf: must be"),
        ("--save_every=0", "--save_every: 0: must be from 1 to inf"),
    ],
)
def test_refused(task, words, said):
    """Status 2 and one line, which names the option."""
    status, text = call_script(task.name, *task.argv, words)
    assert status == 2, text
    (line,) = [line for line in text.splitlines() if ": error: " in line]
    assert re.search(said, line), line
    assert "Traceback" not in text


def test_prepare_only(task, tmp_path):
    """It reads, and makes no folder for a run; the next call finds what was read."""
    more = ["--prepare_only", f"--cache_dir={tmp_path}/cache", f"--output_dir={tmp_path}/run"]
    status, text = call_script(task.name, *task.argv, *more)
    assert status == 0, text
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    assert made
    status, text = call_script(task.name, *task.argv, *more)
    assert status == 0, text
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()} == made
    assert not (tmp_path / "run").exists()


# --------------------------------------------------------------------------------------------------
# A step


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "fused"])
def test_step_without_a_finite_gradient_changes_nothing(script, optimizer):
    """Neither weights, nor the optimizer's state, nor statistics of the batch."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    if optimizer == "SGD":
        other = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    else:
        other = torch.optim.AdamW(model.parameters(), lr=0.1, fused=optimizer == "fused")
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    args = argparse.Namespace(max_grad_norm=1.0)

    def step(factor):
        kept = [buffer.clone() for buffer in model.buffers()]
        (model(torch.rand(4, 3) * factor).sum() * factor).backward()
        norm = script.update_if_finite(args, model, kept, other, scaler)
        return norm, {name: value.clone() for name, value in model.state_dict().items()}

    _, before = step(1.0)
    norm, after = step(float("nan"))
    assert norm.isnan()
    for name, value in before.items():
        assert value.equal(after[name]), name
    _, later = step(1.0)
    assert all(value.isfinite().all() for value in later.values())
    assert not later["0.weight"].equal(before["0.weight"])


@pytest.mark.parametrize("is_emulated", [True, False])
def test_precision_auto(script, monkeypatch, is_emulated):
    """A GPU that only emulates bf16 is slower with it."""

    def is_bf16_supported(including_emulation=True):
        return including_emulation or not is_emulated

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    args = argparse.Namespace(precision="auto")
    autocast, _ = script.choose_precision(args, torch.device("cuda"))
    assert autocast.args[1] == (torch.float32 if is_emulated else torch.bfloat16)


def test_few_steps_are_said(task):
    """With the numbers that make it so, once for each phase."""
    if task.name == "run_train_uniref50_ddp":
        pytest.skip("--n_iters ends this run: see test_uniref50.py")
    form = r"WARNING: only (\d+) optimizer steps \(\d+ samples, \d+ a step, (\d+) epochs\)"
    said = re.findall(form, task.whole.text)
    summary = task.whole.summary
    assert sum(int(steps) for steps, _ in said) == summary["steps"]
    options = [value for name, value in summary["args"].items() if name.endswith("_epochs")]
    assert [int(epochs) for _, epochs in said] == options


# --------------------------------------------------------------------------------------------------
# A run's folder


def make_args(folder, **options):
    return argparse.Namespace(output_dir=str(folder), log_every=1, wandb_mode="disabled", **options)


def save(script, folder, step=0, **more):
    log = SimpleNamespace(wandb_id="id", size=lambda: 0)
    model = torch.nn.Linear(2, 2)
    script.save_checkpoint("latest.pt", make_args(folder), log, {"step": step}, model=model, **more)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_file_system_without_fsync(script, group, tmp_path, monkeypatch, code):
    def fsync(file):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fsync)
    save(script, tmp_path, 5, must_succeed=True)
    assert script.read_checkpoint(tmp_path / "latest.pt")["loop"]["step"] == 5


def test_failed_save(script, group, tmp_path, monkeypatch, caplog):
    """A warning where the run may go on; else an error. Its own clean-up may fail, too."""
    save(script, tmp_path, 1)

    def fail(*args, **options):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "fsync", fail)
    monkeypatch.setattr("pathlib.Path.unlink", fail)
    save(script, tmp_path, 2)
    assert "no latest.pt at step 2: " in caplog.text
    with pytest.raises(script.RunError, match="no latest.pt at step 2: .*Read-only"):
        save(script, tmp_path, 2, must_succeed=True)
    assert script.read_checkpoint(tmp_path / "latest.pt")["loop"]["step"] == 1


def test_folder_with_best_but_no_latest(script, group, tmp_path):
    """It is not taken for a new run's, which would write over best.pt."""
    save(script, tmp_path)
    (tmp_path / "latest.pt").rename(tmp_path / "best.pt")
    with pytest.raises(script.InputError, match="--fresh moves it aside"):
        script.find_checkpoint(tmp_path, fresh=False)
    script.folder_lock.close()
    assert script.find_checkpoint(tmp_path, fresh=True) is None
    script.folder_lock.close()
    assert not (tmp_path / "best.pt").exists()
    (old,) = tmp_path.parent.glob(f"{tmp_path.name}.old-*")
    assert (old / "best.pt").exists()


def test_curves(script, group, tmp_path, monkeypatch):
    """A panel for what was measured, with a mark at each value, and at no other place."""
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *more, **options: drawn.append(figure))
    (tmp_path / "metrics.jsonl").touch()
    log = script.RunLog(make_args(tmp_path), None)
    log.write({"step": 1, "epoch": 0, "phase": 1, "val/loss": 1.5})
    for step in (1, 2, 3):
        log.write({"step": step, "epoch": 0, "phase": 1, "lr": 0.1, "loss": 2.0 / step})
    log.write({"step": 3, "epoch": 1, "phase": 1, "val/loss": 1.2})
    log.close("finished", steps=3)
    (figure,) = drawn
    lines = [line for axes in figure.axes for line in axes.lines]
    found = {line.get_label(): list(line.get_xdata()) for line in lines}
    assert found == {"lr": [1, 2, 3], "loss": [1, 2, 3], "val/loss": [1, 3]}
    assert all(line.get_marker() not in ("", "None") for line in lines)
    assert "step" in {axes.get_xlabel() for axes in figure.axes}
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "finished"


def test_a_run_that_is_stopped_before_its_first_row(script, group, tmp_path, caplog):
    (tmp_path / "metrics.jsonl").touch()
    script.RunLog(make_args(tmp_path), None).close("stopped by SIGTERM", steps=0)
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "stopped by SIGTERM"
    assert "curves.png" not in caplog.text


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_wandb(script, group, tmp_path, monkeypatch, caplog, mode):
    """A resumed run: online it has the old id, offline a new one in the same group. It can ask for
    nothing. Rows that did not reach the server are named with the folder to send."""
    asked = []

    def init(**options):
        asked.append((options, sys.stdin.read()))
        return SimpleNamespace(dir=f"{tmp_path}/wandb/run-1/files", finish=lambda: time.sleep(60))

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    monkeypatch.setattr(sys, "stdin", sys.stdin)  # restored in the end
    plain = threading.Thread.join
    monkeypatch.setattr(threading.Thread, "join", lambda thread, limit=None: plain(thread, 0.1))
    (tmp_path / "metrics.jsonl").touch()
    args = make_args(tmp_path)
    args.wandb_mode = mode
    log = script.RunLog(args, {"wandb_id": "abc", "log_size": 0})
    ((options, typed),) = asked
    assert typed == ""
    assert options["id"] == ("abc" if mode == "online" else None)
    assert options["group"] == log.wandb_id == "abc"
    log.close("finished")
    assert f"wandb sync {tmp_path}/wandb/run-1" in caplog.text


@pytest.mark.parametrize("is_bound", [True, False])
def test_threads_are_divided_once(script, monkeypatch, is_bound):
    """Of two ranks on this machine, unless the launcher has bound them to cores of their own."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    cores = range(4 if is_bound else 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(cores))
    monkeypatch.setattr(script, "compare_ranks", lambda args: None)
    monkeypatch.setattr(script, "gather", lambda value: [value, value])
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    args = parse_arguments(script, "--device=cpu")
    try:
        script.setup_ddp(args)
        assert torch.get_num_threads() == (4 if is_bound else 2)
    finally:
        torch.distributed.destroy_process_group()
        torch.set_num_threads(before)


# --------------------------------------------------------------------------------------------------
# Signals


def test_nohup(script, monkeypatch):
    """SIGHUP is left alone where the run was started with nohup."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    for handler in (signal.SIG_IGN, signal.SIG_DFL):
        signal.signal(signal.SIGHUP, handler)
        script.handle_signals(script.on_signal)
        is_ours = signal.getsignal(signal.SIGHUP) == script.on_signal
        assert is_ours == (handler == signal.SIG_DFL)


def test_rank_started_by_hand_outlives_its_shell(script, monkeypatch):
    """Only under torchrun does the end of the parent end a rank."""
    monkeypatch.setattr(script, "PARENT", -1)
    monkeypatch.setattr(script, "stop_signal", "")
    args = argparse.Namespace(max_minutes=0)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert script.wish_to_stop(args) == ""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert script.wish_to_stop(args) == "death of torchrun"


def test_time_limit(script, monkeypatch):
    monkeypatch.setattr(script, "START", time.monotonic() - 120)
    monkeypatch.setattr(script, "stop_signal", "")
    assert script.wish_to_stop(argparse.Namespace(max_minutes=0)) == ""  # no limit
    assert script.wish_to_stop(argparse.Namespace(max_minutes=3)) == ""
    assert script.wish_to_stop(argparse.Namespace(max_minutes=1)) == "time limit"


# --------------------------------------------------------------------------------------------------
# The loader


class Ones(torch.utils.data.Dataset):
    def __getitem__(self, i):
        return torch.full((1000, 1000), float(i)), torch.tensor(i)


def test_batches_of_workers_travel_without_shared_memory(script):
    args = argparse.Namespace(num_workers=1, timeout_minutes=1)
    batches = script.make_loader(Ones(), range(3), args, torch.device("cpu"))
    for i in range(3):
        large, small = next(batches)
        assert large.eq(i).all()
        assert small == i
        assert not large.is_shared()
        large += 1  # it is ours


def test_workers_are_forked_a_while_after_the_last_collective(script, monkeypatch):
    """Else one in thousands of them hangs for ever (cpython issue 112275)."""
    forked = []

    def fork():
        forked.append(time.monotonic())
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fork", fork)
    args = argparse.Namespace(num_workers=1, timeout_minutes=1)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        script.make_loader(Ones(), range(3), args, torch.device("cpu"))
    assert forked[0] - begin > 0.15


# --------------------------------------------------------------------------------------------------
# The cache


def test_runs_that_share_a_cache(script, tmp_path):
    """A run leaves another one's half-made folder alone, and takes what it has made meanwhile."""

    def quick(folder):
        np.save(folder / "a.npy", np.zeros(3))

    def slow(folder):
        np.save(folder / "a.npy", np.ones(3))
        other = multiprocessing.get_context("fork").Process(
            target=script.cached, args=(tmp_path, "data", [1], quick)
        )
        other.start()
        other.join()
        assert other.exitcode == 0
        assert np.load(folder / "a.npy").all()

    folder = script.cached(tmp_path, "data", [1], slow)
    assert list(tmp_path.iterdir()) == [folder]
    assert not np.load(folder / "a.npy").any()


def test_array_that_a_full_disk_has_cut(script, tmp_path):
    def write(folder):
        np.save(folder / "a.npy", np.ones(1000))
        os.truncate(folder / "a.npy", 4000)

    with pytest.raises((ValueError, OSError, script.RunError)):
        script.cached(tmp_path, "data", [1], write)
    assert not list(tmp_path.iterdir())
