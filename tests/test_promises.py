"""What every script does around its steps, by the lines that all have: shown with one script, where
no process has to be started, or a single short one. (Of whole runs: test_contract.py,
test_faults.py.)"""

import argparse
import json
import math
import multiprocessing
import os
import re
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import call_script, parse_arguments, refusal
from matplotlib.figure import Figure
from runs import SCRIPTS, Task

import run_train_quantumgrav_ddp as script

FAST = script.__name__

# --------------------------------------------------------------------------------------------------
# Options


@pytest.mark.parametrize("text", ["\ufeffsave_every: 7\nseed:\n", '{"save_every": 7}'])
def test_config(tmp_path, text):
    """YAML, of which JSON is a part; an option without a value has its default."""
    config = tmp_path / "config.yaml"
    config.write_text(text, encoding="utf-8")
    args = parse_arguments(script, f"--config={config}")
    assert (args.save_every, args.seed) == (7, 42)
    assert parse_arguments(script, f"--config={config}", "--save_every=5").save_every == 5


SECTIONS = {  # a config file; the options that it gives, or what its refusal names
    "model: {lr: 1}": ["--lr=1"],
    "attack: {eps: 1, attack_steps: 2}": ["--attack_eps=1", "--attack_steps=2"],
    "attack: {inner: {lr: 1}}": "attack: inner: lr: there is no option --attack_lr",
    "a: {b: {attack: {eps: [1, 2]}}}": ["--attack_eps", "1", "2"],
    "model: {none:}": "model: none: there is no option --none",
    "- lr": "expected lines such as",
    "lr: [": "while parsing",
}


@pytest.mark.parametrize("text", SECTIONS)
def test_sections_of_a_config(tmp_path, monkeypatch, text):
    """A section groups options, unless their names begin with it: then it never means another."""
    config = tmp_path / "config.yaml"
    config.write_text(text)
    parser = script.Parser(allow_abbrev=False)
    for name in ("config", "lr", "attack_steps"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--attack_eps", nargs="+")
    monkeypatch.setattr(sys, "argv", ["script", f"--config={config}"])
    expected = SECTIONS[text]
    if isinstance(expected, list):
        args = script.parse_with_config(parser)
        assert args == parser.parse_args([*expected, f"--config={config}"])
    else:
        with pytest.raises(script.InputError, match=f"--config {config}: .*{expected}"):
            script.parse_with_config(parser)


def test_home_folder_and_variables(tmp_path, monkeypatch):
    """As in a shell: no folder with the name ~ is made, to be removed by `rm -r ~`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    (tmp_path / "c.yaml").write_text("cache_dir: $SCRATCH/cache\ndata: [~/a.npz, b~/c]\n")
    args = parse_arguments(script, "--config=~/c.yaml", "--output_dir=~/run")
    assert [args.output_dir, args.cache_dir] == [f"{tmp_path}/run", "/scratch/me/cache"]
    assert args.data == [f"{tmp_path}/a.npz", "b~/c"]
    monkeypatch.delenv("SCRATCH")
    with pytest.raises(script.InputError, match="SCRATCH/cache: there is no such variable"):
        parse_arguments(script, "--config=~/c.yaml")


REFUSED = {
    "--output_dir=/proc/nothing": "--output_dir /proc/nothing is not writable",
    "--cache_dir=/proc/nothing": "--cache_dir /proc/nothing is not writable",
    "--device=cuda": "--device cuda: .* cpu",
    "--config=/nowhere.yaml": "--config /nowhere.yaml: .*No such file",
    "--max_minutes=inf": "--max_minutes: inf: must be",
    "--save_every=0": "--save_every: 0: must be from 1 to inf",
    "--save_ever=9": "--save_ever=9",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_refused(name, tmp_path):
    """Status 2 and one line, which names the option. (Each script looks at its folders itself.)"""
    task = Task(name, tmp_path, None)
    for words in list(REFUSED)[: None if name == FAST else 2]:
        line = refusal(call_script(name, *task.argv, words, status=2))
        assert re.search(REFUSED[words], line), line


# --------------------------------------------------------------------------------------------------
# A step


@pytest.mark.parametrize("fused", [False, True])
def test_step_without_a_finite_gradient_changes_nothing(fused):
    """Neither weights, nor the optimizer's state. (Statistics of the batch: test_rebm.py.)"""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=fused)
    args = argparse.Namespace(max_grad_norm=1.0)
    values = []
    for factor in (1.0, math.nan, 1.0):
        (weight.sum() * factor).backward()
        norm = script.update_if_finite(args, optimizer)
        assert norm.isnan() == math.isnan(factor)
        values.append(weight.detach().clone())
    assert values[0].equal(values[1])
    assert values[2].isfinite().all() and not values[2].equal(values[1])


@pytest.mark.parametrize("is_emulated", [True, False])
def test_precision_auto(monkeypatch, is_emulated):
    """A GPU that only emulates bf16 is slower with it."""

    def is_bf16_supported(including_emulation=True):
        return including_emulation or not is_emulated

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    args = argparse.Namespace(precision="auto")
    autocast = script.choose_precision(args, torch.device("cuda"))
    assert autocast.keywords["enabled"] == (not is_emulated)


@pytest.mark.parametrize("is_bound", [True, False])
def test_threads_are_divided_once(monkeypatch, is_bound):
    """Of two ranks on this machine, unless the launcher has bound them to cores of their own."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    cores = range(4 if is_bound else 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(cores))
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


def test_the_slowest_loader_is_shown(monkeypatch):
    """Whichever rank has it: the others wait for it in the sum of the gradients."""
    args = argparse.Namespace(log_every=1, max_minutes=0)
    meter = script.Meter([], args, torch.device("cpu"))
    meter.add(torch.zeros(0), torch.tensor(1.0))

    def gather(own):
        sums, seconds, _, wish = own
        return [own, [sums, seconds, 100 * seconds, wish]]

    monkeypatch.setattr(script, "gather", gather)
    rows = []
    meter.log_and_agree(argparse.Namespace(write=rows.append), {"step": 1}, 8)
    assert rows[0]["data_wait"] == pytest.approx(100)


# --------------------------------------------------------------------------------------------------
# Checkpoints


def make_args(folder, **options):
    return argparse.Namespace(output_dir=str(folder), log_every=1, wandb_mode="disabled", **options)


def save(folder, step):
    log = SimpleNamespace(wandb_id="id", path=folder / "metrics.jsonl")
    log.path.touch()
    script.save_checkpoint("latest.pt", make_args(folder), log, {"step": step})


def find(folder, fresh=False):
    """The step to go on from; None for a new run."""
    try:
        state = script.find_checkpoint(make_args(folder, fresh=fresh))
    finally:
        script.folder_lock.close()
    return state and state["loop"]["step"]


@pytest.fixture
def folder(tmp_path, group):
    """Of a run, with latest.pt of step 2."""
    folder = tmp_path / "run"
    folder.mkdir()
    save(folder, 2)
    return folder


def test_a_save_that_fails(folder, monkeypatch):
    """It is an error, and latest.pt is as it was: nothing takes its place before it is on disk."""

    def fail(*args, **options):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        save(folder, 3)
    assert find(folder) == 2


def test_a_run_without_its_checkpoint(folder):
    """It had ended, and somebody has removed latest.pt. No new run writes over what is there."""
    (folder / "latest.pt").rename(folder / "best.pt")
    assert find(folder) is None  # killed before its first save
    (folder / "summary.json").touch()
    with pytest.raises(script.InputError, match="--fresh moves it aside"):
        find(folder)
    assert find(folder, fresh=True) is None
    (old,) = folder.parent.glob("run.old-*")
    assert (old / "best.pt").exists()


def test_fresh(folder):
    """The old run is moved aside; where there is none, nothing is."""
    assert find(folder, fresh=True) is None
    (old,) = folder.parent.glob("run.old-*")
    assert (old / "latest.pt").exists()
    (folder / "my_data.txt").touch()
    assert find(folder, fresh=True) is None
    assert (folder / "my_data.txt").exists()


@pytest.mark.parametrize("launcher", ["TORCHELASTIC", "SLURM"])
def test_a_restart_is_not_fresh(folder, monkeypatch, launcher):
    """The launcher has given --fresh again: the run of its first start goes on."""
    monkeypatch.setenv(f"{launcher}_RESTART_COUNT", "1")
    assert find(folder, fresh=True) == 2


# --------------------------------------------------------------------------------------------------
# The log


def test_a_log_that_is_shorter_than_the_checkpoint_says(group, tmp_path):
    """It is not filled up. (That later rows are removed: test_contract.py.)"""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    script.RunLog(make_args(tmp_path), {"wandb_id": "id", "log_size": 100})
    assert path.read_text() == '{"step": 1}\n'


def test_curves(group, tmp_path, monkeypatch):
    """A panel for each column, in which lines lead straight from one measured value to the next.
    None where a run was stopped before its first row."""
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *more, **options: drawn.append(figure))
    log = script.RunLog(make_args(tmp_path), None)
    log.close("stopped by SIGTERM", steps=0)
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "stopped by SIGTERM"
    assert not drawn

    log = script.RunLog(make_args(tmp_path), None)
    log.write({"step": 0, "val/loss": 4.0})
    for step in (1, 2, 4):
        log.write({"step": step, "loss": 2.0 / step})
    log.write({"step": 4, "val/loss": 0.0})
    log.close("finished", steps=4)
    (figure,) = drawn
    lines = {line.get_label(): line for axes in figure.axes for line in axes.lines}
    assert lines.keys() == {"loss", "val/loss"}
    assert lines["loss"].get_xydata()[1:3].tolist() == [[1, 2], [2, 1]]
    steps, values = lines["val/loss"].get_xydata().T
    assert values.tolist() == (4 - steps).tolist()


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_wandb(group, tmp_path, monkeypatch, mode):
    """A resumed run: online it has the old id, offline a new one in the same group."""
    asked = []
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **own: asked.append(own)))
    args = make_args(tmp_path)
    args.wandb_mode = mode
    script.RunLog(args, {"wandb_id": "abc", "log_size": 0})
    (options,) = asked
    assert options["id"] == ("abc" if mode == "online" else None)
    assert options["group"] == "abc"


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


def test_a_cache_that_another_machine_does_not_see(tmp_path, monkeypatch, group):
    monkeypatch.setattr(script, "on_rank0", lambda *args, group: tmp_path / "only-there")
    with pytest.raises(script.InputError, match="all of them must see --cache_dir"):
        script.read_once(None, None)
