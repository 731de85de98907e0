"""What every script does around its steps, by the lines that all have: shown with one script, where
no process has to be started, or a single short one. (Of whole runs: test_contract.py,
test_faults.py.)"""

import argparse
import errno
import json
import multiprocessing
import os
import re
import shutil
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import call_script, parse_arguments, refusal
from matplotlib.figure import Figure
from runs import SCRIPTS, Task

import run_train_quantumgrav_ddp as script
import run_train_rebm_ddp

FAST = script.__name__

# --------------------------------------------------------------------------------------------------
# Options


@pytest.mark.parametrize("text", ["save_every: 7\nseed:\n", '{\n\t"save_every": 7}'])
@pytest.mark.parametrize("mark", ["", "\ufeff"])  # a byte-order mark
def test_config(tmp_path, text, mark):
    """YAML or JSON; an option without a value has its default."""
    config = tmp_path / ("config.json" if "{" in text else "config.yaml")
    config.write_text(mark + text, encoding="utf-8")
    args = parse_arguments(script, f"--config={config}")
    assert (args.save_every, args.seed) == (7, 42)
    config.write_text(text.replace("save_every", "save_evry"))
    with pytest.raises(script.InputError, match="--save_evry"):
        parse_arguments(script, f"--config={config}")


def test_home_folder(tmp_path, monkeypatch):
    """No folder with the name ~ is made, to be removed by `rm -r ~`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "c.yaml").write_text("cache_dir: ~/cache\ndata: [~/a.npz, b~/c]\n")
    args = parse_arguments(script, "--config=~/c.yaml", "--output_dir=~/run")
    assert [args.output_dir, args.cache_dir] == [f"{tmp_path}/run", f"{tmp_path}/cache"]
    assert args.data == [f"{tmp_path}/a.npz", "b~/c"]


def test_value_that_looks_like_an_option():
    args = parse_arguments(run_train_rebm_ddp, "--output_dir", "lr=3e-4", "seed=7")
    assert (args.output_dir, args.seed) == ("lr=3e-4", 7)


REFUSED = {
    "--device=cuda": "--device cuda: .* cpu",
    "--config=/nowhere.yaml": "--config /nowhere.yaml: .*No such file",
    "--max_minutes=inf": "--max_minutes: inf: must be",
    "--save_every=0": "--save_every: 0: must be from 1 to inf",
    "--output_dir=/proc/nothing": "--output_dir /proc/nothing",
    "--cache_dir=/proc/nothing": "--cache_dir /proc/nothing is not writable",
}
REFUSALS = [(FAST, words) for words in REFUSED]
for name in set(SCRIPTS) - {FAST}:  # each decides when it looks at its folders
    REFUSALS += [(name, "--output_dir=/proc/nothing"), (name, "--cache_dir=/proc/nothing")]


@pytest.mark.parametrize(("name", "words"), sorted(REFUSALS))
def test_refused(name, words, tmp_path):
    """Status 2 and one line, which names the option."""
    task = Task(name, tmp_path, None)
    line = refusal(call_script(name, *task.argv, words, status=2))
    assert re.search(REFUSED[words], line), line


# --------------------------------------------------------------------------------------------------
# A step


@pytest.mark.parametrize("optimizer", ["SGD", "fused AdamW"])
def test_step_without_a_finite_gradient_changes_nothing(optimizer):
    """Neither weights, nor the optimizer's state. (Statistics of the batch: test_rebm.py.)"""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    if optimizer == "SGD":
        other = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    else:
        other = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    args = argparse.Namespace(max_grad_norm=1.0)

    def step(factor):
        (model(torch.rand(4, 3) * factor).sum() * factor).backward()
        norm = script.update_if_finite(args, other, scaler)
        return norm, {name: value.clone() for name, value in model.state_dict().items()}

    _, before = step(1.0)
    norm, after = step(float("nan"))
    assert norm.isnan()
    for name, value in before.items():
        assert value.equal(after[name]), name
    _, later = step(1.0)
    assert all(value.isfinite().all() for value in later.values())
    assert not later["weight"].equal(before["weight"])


@pytest.mark.parametrize("is_emulated", [True, False])
def test_precision_auto(monkeypatch, is_emulated):
    """A GPU that only emulates bf16 is slower with it."""

    def is_bf16_supported(including_emulation=True):
        return including_emulation or not is_emulated

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    args = argparse.Namespace(precision="auto")
    autocast, _ = script.choose_precision(args, torch.device("cuda"))
    assert autocast.args[1] == (torch.float32 if is_emulated else torch.bfloat16)


@pytest.mark.parametrize("is_bound", [True, False])
def test_threads_are_divided_once(monkeypatch, is_bound):
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


@pytest.mark.parametrize("device, backend", [("xpu", "gloo"), ("cpu", "nccl"), ("cuda", "xccl")])
def test_backends_that_do_not_fit(device, backend, monkeypatch):
    """Whatever torch has: gloo does not know the memory of Intel's GPUs."""
    monkeypatch.setattr(script, "choose_device", lambda *args: torch.device(device))
    monkeypatch.setattr(dist, "is_backend_available", lambda backend: True)
    with pytest.raises(script.InputError, match=f"--backend {backend} is not for {device}"):
        script.setup_ddp(parse_arguments(script, f"--backend={backend}"))


# --------------------------------------------------------------------------------------------------
# Checkpoints


class Folder:
    """A run's folder with latest.pt of step 2 and previous.pt of step 1."""

    def __init__(self, folder):
        self.folder = folder
        self.latest = folder / "latest.pt"
        self.loop = {}
        folder.mkdir()
        self.save(1)
        self.save(2)

    def save(self, step, **more):
        model = torch.nn.Linear(1000, 1, bias=False)
        model.weight.data = torch.arange(1000.0)[None] + step
        args = make_args(self.folder)
        log = SimpleNamespace(wandb_id="id", size=lambda: 0)
        loop = {"step": step, **self.loop}
        script.save_checkpoint("latest.pt", args, log, loop, model=model, **more)

    def step(self, name):
        return script.read_checkpoint(self.folder / name)["loop"]["step"]

    def find(self, fresh=False):
        """The step to go on from; None for a new run."""
        try:
            state = script.find_checkpoint(self.folder, fresh)
        finally:
            script.folder_lock.close()
        return state and state["loop"]["step"]


def make_args(folder, **options):
    return argparse.Namespace(output_dir=str(folder), log_every=1, wandb_mode="disabled", **options)


@pytest.fixture
def run(tmp_path, group):
    return Folder(tmp_path / "run")


def damage(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 0xFF
    path.write_bytes(content)


def test_no_flipped_byte_is_read(run):
    """Wherever it is: either the file is not whole, or it reads as it was written."""
    copy = run.folder / "copy.pt"
    seen = 0
    for position in range(0, run.latest.stat().st_size, 23):
        shutil.copy(run.latest, copy)
        damage(copy, position)
        state = script.read_checkpoint(copy)
        if state is not None:
            weight = state["model"]["weight"].flatten()
            assert weight.equal(torch.arange(1000.0) + 2), position
        else:
            seen += 1
    assert seen > 100


def test_damaged_checkpoints(run):
    """The one before is taken, and not replaced by it. No whole one is, and stays, an error."""
    damage(run.latest, 3000)
    damaged = run.latest.read_bytes()
    assert run.find() == 1
    assert (run.folder / "damaged.pt").read_bytes() == damaged, "perhaps only its disk was"
    run.save(3)
    assert run.step("latest.pt") == 3
    assert run.step("previous.pt") == 1
    for name in ("latest.pt", "previous.pt"):
        damage(run.folder / name, 3000)
    for _ in range(2):
        with pytest.raises(script.InputError, match="no checkpoint .* is whole"):
            run.find()
    assert run.find(fresh=True) is None


def test_a_kill_within_a_save(run):
    """latest.pt has become previous.pt, and the new one has not its name yet."""
    run.latest.rename(run.folder / "previous.pt")
    assert run.find() == 2
    assert not (run.folder / "damaged.pt").exists()


@pytest.mark.parametrize("name", ["best.pt", "phase1_best.pt", "at_best.pt", "best_model.pt"])
def test_folder_with_best_but_no_latest(run, name):
    """It is not taken for a new run's, which would write over these weights."""
    run.latest.rename(run.folder / name)
    (run.folder / "previous.pt").unlink()
    with pytest.raises(script.InputError, match="--fresh moves it aside"):
        run.find()
    assert run.find(fresh=True) is None
    (old,) = run.folder.parent.glob("run.old-*")
    assert [path.name for path in old.glob("*.pt")] == [name]


def test_folder_with_a_file_of_the_user(run):
    """It is no run: a new one begins there, and --fresh leaves it where it is."""
    run.latest.rename(run.folder / "my_data.pt")
    (run.folder / "previous.pt").unlink()
    for fresh in (True, False):
        (run.folder / "metrics.jsonl").unlink(missing_ok=True)
        assert run.find(fresh) is None
        assert (run.folder / "my_data.pt").exists()


def test_a_restart_is_not_fresh(run, monkeypatch, caplog):
    """The launcher has given --fresh again: the run of its first start goes on. This is said."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert run.find(fresh=True) == 2
    assert "--fresh: this is a restart" in caplog.text


def test_a_checkpoint_of_another_program(run):
    torch.save({"epoch": 3}, run.latest)
    args = argparse.Namespace(output_dir=str(run.folder), fresh=False)
    with pytest.raises(script.InputError, match="holds a run of None"):
        script.open_run(args, "hash", [])


def test_best_weights_that_are_gone(run, caplog):
    run.loop = {"best": {"value": 1.0}}
    run.save(3)
    assert run.find() == 3
    assert "best.pt is gone" in caplog.text
    caplog.clear()
    shutil.copy(run.latest, run.folder / "best.pt")
    assert run.find() == 3
    assert "is gone" not in caplog.text


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_file_system_without_fsync(run, monkeypatch, code):
    def fsync(file):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fsync)
    run.save(5, must_succeed=True)
    assert run.step("latest.pt") == 5


# --------------------------------------------------------------------------------------------------
# The log


def test_half_a_line_is_not_made_longer(group, tmp_path, caplog):
    """metrics.jsonl was cut after the checkpoint that a run goes on from."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    state = {"wandb_id": "id", "log_size": 24}
    os.truncate(path, 20)
    log = script.RunLog(make_args(tmp_path), state)
    assert "has been cut" in caplog.text
    log.write({"step": 3})
    assert path.read_text() == '{"step": 1}\n{"step": 3}\n'


def test_curves(group, tmp_path, monkeypatch, caplog):
    """A panel for what was measured, with a mark at each value, and at no other place. None where a
    run was stopped before its first row."""
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *more, **options: drawn.append(figure))
    (tmp_path / "metrics.jsonl").touch()
    log = script.RunLog(make_args(tmp_path), None)
    log.close("stopped by SIGTERM", steps=0)
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "stopped by SIGTERM"
    assert not drawn
    assert "curves.png" not in caplog.text

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


def test_the_slowest_loader_is_shown(group, tmp_path, monkeypatch):
    """Whichever rank has it: the others wait for it in the sum of the gradients."""
    args = make_args(tmp_path, max_minutes=0)
    meter = script.Meter([], args, torch.device("cpu"))
    meter.add(torch.zeros(0), torch.tensor(1.0))

    def gather(own):
        return [own, {**own, "data_wait": 100 * own["seconds"]}]

    monkeypatch.setattr(script, "gather", gather)
    rows = []
    meter.meet(argparse.Namespace(write=rows.append), {"step": 1}, 8)
    assert rows[0]["data_wait"] == pytest.approx(100)


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_wandb(group, tmp_path, monkeypatch, caplog, mode):
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


# --------------------------------------------------------------------------------------------------
# The loader


class Ones(torch.utils.data.Dataset):
    def __getitem__(self, i):
        return torch.full((1000, 1000), float(i)), torch.tensor(i)


def make_loader():
    args = argparse.Namespace(num_workers=1, timeout_minutes=1)
    return script.make_loader(Ones(), range(3), args, torch.device("cpu"))


def test_batches_of_workers_travel_without_shared_memory():
    batches = make_loader()
    for i in range(3):
        large, small = next(batches)
        assert large.eq(i).all()
        assert small == i
        assert not large.is_shared()
        large += 1  # it is ours


def test_workers_are_forked_a_while_after_the_last_collective(monkeypatch):
    """Else one in thousands of them hangs for ever (cpython issue 112275)."""
    forked = []

    def fork():
        forked.append(time.monotonic())
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fork", fork)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        make_loader()
    assert forked[0] - begin > 0.15


# --------------------------------------------------------------------------------------------------
# The cache


def test_runs_that_share_a_cache(tmp_path):
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


def test_array_that_a_full_disk_has_cut(tmp_path):
    def write(folder):
        np.save(folder / "a.npy", np.ones(1000))
        os.truncate(folder / "a.npy", 4000)

    with pytest.raises((ValueError, OSError, script.RunError)):
        script.cached(tmp_path, "data", [1], write)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("lost", ["data.txt", "part/data.txt", "sizes.json"])
@pytest.mark.parametrize("is_cut", [True, False])
def test_cache_that_has_lost_a_file(lost, is_cut, tmp_path, caplog):
    """Programs that tidy up take files out of old folders. It is made again."""
    made = []

    def write(folder):
        made.append(folder)
        (folder / "part").mkdir()
        for name in ("data.txt", "part/data.txt"):
            (folder / name).write_text("all of it")

    folder = script.cached(tmp_path, "data", [1], write)
    assert script.cached(tmp_path, "data", [1], write) == folder
    assert len(made) == 1
    if is_cut:
        os.truncate(folder / lost, 3)
    else:
        (folder / lost).unlink()
    assert script.cached(tmp_path, "data", [1], write) == folder
    assert len(made) == 2
    assert (folder / "part" / "data.txt").read_text() == "all of it"
    assert f"{folder} is damaged" in caplog.text
