"""What every script does around its steps, by the lines that all have: shown with one script, in
short processes or none, or with each. (Of whole runs: test_contract.py, test_faults.py.)"""

import argparse
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import ROOT, call_script, check_refused, environment, parse_arguments, refusal
from matplotlib.figure import Figure
from runs import COMMON, SCRIPTS, TINY, Run, Task

import run_train_quantumgrav_ddp as script

FAST = script.__name__

# ---- A script alone ------------------------------------------------------------------------------

FEWER_STEPS = {  # run_dpo_ddp.py begins with weights that the user has
    "train_ddp": "--max_steps=3",
    "run_train_uniref50_ddp": "--n_iters=3",
    "run_dpo_ddp": f"""--num_epochs=1 --base_model_name=v_48_020
        --base_model_dir={ROOT}/data/dpo/soluble_model_weights""",
    "run_train_quantumgrav_ddp": "--num_epochs=1",
    "run_train_rebm_ddp": "--total_epochs=1",
}


def files_of(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", SCRIPTS)
def test_alone(name, tmp_path):
    """Copied alone into an empty folder it reads the user's data there once, and trains."""
    shutil.copy(ROOT / f"{name}.py", tmp_path)
    options = [*COMMON, *TINY[name](tmp_path), *FEWER_STEPS[name].split(), "--batch_size=0"]
    before = set(tmp_path.iterdir())
    call_script(tmp_path / name, *options, "--prepare_only")
    assert set(tmp_path.iterdir()) - before == {tmp_path / "cache"}
    read = files_of(tmp_path / "cache")
    assert read

    command = [sys.executable, f"{name}.py", *options, "--output_dir=run"]
    env = environment(PYTHONPATH="", HF_HUB_OFFLINE=1)
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "completed successfully!" in done.stdout
    assert set(tmp_path.iterdir()) - before == {tmp_path / "cache", tmp_path / "run"}
    assert read.items() <= files_of(tmp_path / "cache").items(), "read once more"
    run = Run(tmp_path / "run")
    assert run.summary["status"] == "finished"
    assert np.isfinite(run.losses).all()
    most = importlib.import_module(name).BATCH_SIZE
    size = re.search(r"Total batch size: .* \((\S+) per GPU", done.stdout)[1]
    assert float(size) == 24 / -(-24 // most)


# ---- Options -------------------------------------------------------------------------------------

CONFIGS = {  # a config file; the options that it gives, or what its refusal names
    "lr: 1\nattack_steps:\n": ["--lr=1"],
    "model: {lr: 1}": ["--lr=1"],
    "attack: {eps: 1, attack_steps: 2}": ["--attack_eps=1", "--attack_steps=2"],
    "attack: {inner: {lr: 1}}": "unrecognized arguments: --attack_lr=1",
    "a: {b: {attack: {eps: [1, 2]}}}": ["--attack_eps", "1", "2"],
    "lr: 1\nlearn: 2\nsee: {d: 3, e: null}": "arguments: --learn=2 --d=3",
    "lr: 1\nlr: 2": "lr is given twice",
    "a: {lr: 1}\nb: {lr: 1}": "--lr is given twice",
    "lr: {{ rate }}": "unhashable key",
    "config: b.yaml": "--config is given twice",
    "- lr": "expected lines such as",
    "lr: [": "while parsing",
}


@pytest.mark.parametrize("text", CONFIGS)
def test_config(tmp_path, monkeypatch, text):
    """A section groups options, unless their names begin with it: then it never means another."""
    config = tmp_path / "config.yaml"
    config.write_text(text)
    parser = script.Parser(allow_abbrev=False)
    for name in ("config", "lr", "attack_steps"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--attack_eps", nargs="+")
    monkeypatch.setattr(sys, "argv", ["script", f"--config={config}"])
    expected = CONFIGS[text]
    if isinstance(expected, list):
        args = script.parse_with_config(parser)
        assert args == parser.parse_args([*expected, f"--config={config}"])
        sys.argv.append("--lr=5")
        assert script.parse_with_config(parser).lr == "5"
    else:
        check_refused(f"--config {config}: .*{expected}", script.parse_with_config, parser)


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
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(script.InputError, match=f"--data: {tmp_path}/pipe is a pipe"):
        parse_arguments(script, f"--data={tmp_path}/pipe")


def test_nobody_reads_the_log(tmp_path):
    """Nor is there anybody who reads errors. Training goes on, and the status is 0."""
    task = Task(FAST, tmp_path, None)
    command = [sys.executable, f"{ROOT}/{FAST}.py", *task.argv, "--num_epochs=1", "--num_workers=0"]
    line = f"{shlex.join(command)} --output_dir={tmp_path}/run | true; exit ${{PIPESTATUS[0]}}"
    for more in ("", "2>&-"):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shell = ["bash", "-c", line.replace("|", f"{more} |")]
        done = subprocess.run(shell, stderr=subprocess.PIPE, env=environment())
        assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr
        assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "finished"


REFUSED = {
    "--output_dir=/proc/nothing": "--output_dir /proc/nothing is not writable",
    "--cache_dir=/proc/nothing": "--cache_dir /proc/nothing is not writable",
    "--device=cuda": "--device cuda: .* cpu",
    "--max_minutes=inf": "--max_minutes: inf: must be",
    "--save_ever=9": "--save_ever=9",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_and_refusals(name, tmp_path):
    """Status 2 and one line, which names the option. (Each script looks at its folders itself.)"""
    text = call_script(name, "--help")
    assert text.startswith("usage: ") and "--batch_size" in text and "[RANK" not in text
    argv = [*Task(name, tmp_path, None).argv, f"--output_dir={tmp_path}/run"]
    for words in list(REFUSED)[: None if name == FAST else 2]:
        line = refusal(call_script(name, *argv, words, status=2))
        assert re.search(REFUSED[words], line), line


# ---- Checkpoints ---------------------------------------------------------------------------------


def make_args(folder, **options):
    return argparse.Namespace(output_dir=str(folder), log_every=1, wandb_mode="disabled", **options)


def save(folder, step):
    log = SimpleNamespace(wandb_id="id", path=folder / "metrics.jsonl")
    log.path.touch()
    script.save_checkpoint("latest.pt", make_args(folder), log, {"step": step})


def find(folder, fresh=False):
    """The step to go on from; None for a new run."""
    state = script.find_checkpoint(make_args(folder, fresh=fresh))
    return state and state["loop"]["step"]


@pytest.fixture
def folder(tmp_path, group):
    """Of a run, with latest.pt of step 2."""
    (tmp_path / "run").mkdir()
    save(tmp_path / "run", 2)
    return tmp_path / "run"


def test_ranks_that_have_read_different_data(folder, monkeypatch):
    monkeypatch.setattr(script, "gather", lambda own: [own, "other data"])
    with pytest.raises(script.InputError, match="the ranks have read different data"):
        script.begin_run(make_args(folder), None, "data")


def test_no_file_takes_the_place_of_latest_before_it_is_on_disk(folder, monkeypatch):
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=OSError("No space left on device")))
    with pytest.raises(OSError, match="No space"):
        save(folder, 3)
    assert find(folder) == 2


def test_fresh(folder, monkeypatch):
    """The old run is moved aside once the data are read. One that a launcher restarts goes on."""
    monkeypatch.setattr(script, "SCRIPT", torch.load(folder / "latest.pt")["script"])
    options = {"prepare_only": False, "global_batch_size": 8, "fresh": True}
    for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        monkeypatch.setenv(name, "1")
        assert script.open_run(make_args(folder, **options), options)["loop"]["step"] == 2
        monkeypatch.delenv(name)
    args = make_args(folder, **options)
    assert script.open_run(args, options) is None
    assert (folder / "latest.pt").exists()
    script.begin_run(args, None, "data")
    (old,) = folder.parent.glob("run.old-*")
    assert (old / "latest.pt").exists()
    (folder / "my_data.txt").touch()
    assert find(folder, fresh=True) is None
    assert (folder / "my_data.txt").exists()


def test_a_run_without_its_checkpoint(folder):
    """It had ended, and somebody has removed latest.pt. No new run writes over what is there."""
    (folder / "latest.pt").rename(folder / "best.pt")
    assert find(folder) is None  # killed before its first save
    (folder / "summary.json").touch()
    check_refused("--fresh moves it aside", find, folder)
    assert find(folder, fresh=True) is None
    (old,) = folder.parent.glob("run.old-*")
    assert (old / "best.pt").exists()


# ---- The log -------------------------------------------------------------------------------------

STATE = {"loop": {"step": 7}, "args": {"num_epochs": 3}, "wandb_id": "abc", "log_size": 0}


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_log_of_a_resumed_run(group, tmp_path, monkeypatch, mode):
    """A file that is too short is not filled up. wandb: the old group, and online the old id."""
    asked = []
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **own: asked.append(own)))
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    args = make_args(tmp_path)
    args.wandb_mode = mode
    script.RunLog(args, {**STATE, "log_size": 100})
    assert path.read_text() == '{"step": 1}\n'
    (options,) = asked
    assert options.get("id") == ("abc" if mode == "online" else None)
    assert options["group"] == "abc"


@pytest.mark.parametrize(("step", "epochs"), [(7, 3), (8, 1)])
def test_summary_of_a_start_that_makes_no_step(group, tmp_path, step, epochs):
    """It has the options of the steps that were made."""
    args = make_args(tmp_path)
    args.num_epochs = 1
    script.RunLog(args, STATE).close("finished", steps=step)
    assert json.loads((tmp_path / "summary.json").read_text())["args"]["num_epochs"] == epochs


def test_curves(group, tmp_path, monkeypatch):
    """A panel for each column that changes, with straight lines between what was measured."""
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *more, **options: drawn.append(figure))
    log = script.RunLog(make_args(tmp_path), None)
    log.draw()
    assert not drawn
    for row in ({"step": 0, "val/loss": 4}, {"step": 1, "loss": 2}, {"step": 4, "val/loss": 0}):
        log.write({**row, "phase": row["step"], "epoch": row["step"], "skipped": 0})
    log.draw()
    lines = [axes.lines[0] for axes in drawn[0].axes]
    curves = {line.get_label(): line.get_xydata().tolist() for line in lines}
    assert curves.keys() == {"loss", "val/loss"}
    assert curves["val/loss"] == [[0, 4], [1, 3], [4, 0]]


# ---- The loader ----------------------------------------------------------------------------------


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
    monkeypatch.setattr(os, "fork", mock.Mock(side_effect=KeyboardInterrupt))
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        make_loader()
    assert time.monotonic() - begin > 0.15


# ---- The cache -----------------------------------------------------------------------------------


def test_runs_that_share_a_cache(tmp_path):
    """A run leaves another one's half-made folder alone, and takes what it has made meanwhile."""

    def quick(folder):
        np.save(folder / "a.npy", np.zeros(3))

    def slow(folder):
        np.save(folder / "a.npy", np.ones(3))
        script.cached(tmp_path, "data", [1], quick)
        assert np.load(folder / "a.npy").all()

    folder = script.cached(tmp_path, "data", [1], slow)
    assert list(tmp_path.iterdir()) == [folder]
    assert not np.load(folder / "a.npy").any()


def test_a_cache_that_another_machine_does_not_see_or_may_not_read(tmp_path, monkeypatch, group):
    monkeypatch.setattr(script, "on_rank0", lambda *args, group: tmp_path / "data")
    check_refused("all ranks must see --cache_dir", script.read_once, None, None)
    (tmp_path / "data").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    check_refused("data cannot be read here", script.read_once, None, None)
