"""What happens to long runs, done to every script: how the run ends, in how many seconds, that it leaves no process
behind, and that the same command afterwards ends, bit for bit, where the undisturbed run does.

The test command has the core, each fault once. `python -m pytest tests/test_faults.py tests/test_two_hosts.py
--all-faults --matrix FILE` has every script x every fault and writes the table.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ROOT, call_script, write_causal_sets, write_digits
from runs import DROPOUT, RUN_OWN, SCRIPTS, TINY, Run, Server, apart, state_of, stopped
from test_launch import SIGNALS, TORCHRUN, Job, environment

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def server():
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="module")
def undisturbed(server, tmp_path_factory) -> Callable[[str], tuple[list[str], Callable[[], Run]]]:
    """undisturbed(script): the arguments of its tiny run, and what makes that run on two processes, once."""
    made, folder = {}, cache(tmp_path_factory.mktemp)
    argv = cache(lambda name: [*TINY[name](folder(name)), *DROPOUT.get(name, [])])

    def whole(name: str) -> Run:
        if name not in made:
            made[name] = server.run(name, argv(name), folder(name) / "whole", 2)
            assert made[name].statuses == [0, 0], made[name].text[-3000:]
        return made[name]

    return lambda name: (argv(name), partial(whole, name))


class Case:
    """A script, the folder of its run, and what is asserted of all runs."""

    def __init__(self, name: str, folder: Path, server: Server, undisturbed: Callable, fault: str):
        self.name, self.folder, self.server, self.undisturbed = name, folder, server, undisturbed
        self.jobs = []
        self.argv, self.made, self.attempts, self.seconds = *undisturbed(name), 0, 0.0
        self.draw = random.Random(f"{name} {fault}")  # the same in every session

    @property
    def whole(self) -> Run:
        """The run that nothing happens to; made when it is first asked for."""
        return self.made()

    def run(self, faults=(), *more: str, statuses, within: float, **env) -> Run:
        """A run with faults. It ends with one of `statuses` on each rank, `within` so many seconds of the fault."""
        self.attempts += 1
        argv = [*self.argv, *more]
        run = self.server.run(
            self.name, argv, self.folder, 2, faults=faults, attempt=self.attempts, **env
        )
        assert set(run.statuses) <= set(statuses), (run.statuses, run.text[-3000:])
        assert run.seconds < within, run.text[-3000:]
        self.seconds = max(self.seconds, run.seconds)
        return run

    def torchrun(self, tmp_path: Path, faults=(), *more: str, launcher: tuple = (), **env) -> Job:
        """The same under torchrun, as the wrappers start it."""
        command = [
            *TORCHRUN,
            "--standalone",
            "--nproc_per_node=2",
            *SIGNALS,
            *launcher,
            f"{ROOT}/tests/runs.py",
        ]
        env = {
            "FAULTS": json.dumps(faults),
            "OUTPUT": self.folder,
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1,
        } | env
        paths = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
        argv = [self.name, *self.argv, *more, f"--output_dir={self.folder}"]
        job = Job([*command, *argv], tmp_path / "job.txt", environment(PYTHONPATH=paths, **env))
        self.jobs.append(job)
        return job

    def ended(self, job: Job, begin: float, status: int, within: float) -> None:
        assert job.wait(within) == status, job.text[-3000:]
        self.seconds = max(self.seconds, time.monotonic() - begin)
        assert job.is_gone(), job.processes()

    def same(self, run: Run, losses: bool = True) -> None:
        """The end of the undisturbed run, in every bit; the same samples in every step."""
        assert not apart(run, self.whole)
        assert run.trained_on() == self.whole.trained_on()
        assert not losses or run.losses == self.whole.losses

    def restart(self, **options) -> None:
        """The same command, nothing in its way."""
        Path(f"{self.folder}.fault").unlink(missing_ok=True)
        self.attempts += 1
        run = self.server.run(self.name, self.argv, self.folder, 2, attempt=self.attempts)
        assert run.statuses == [0, 0] and "resuming" in run.text, run.text[-3000:]
        self.same(run, **options)

    def own_data(self, folder: Path) -> Path:
        """Data of its own, which may be damaged: the file, or the folder."""
        folder.mkdir()
        self.argv = [*TINY[self.name](folder), *DROPOUT.get(self.name, [])]
        names = {
            "train_ddp": "pairs.jsonl",
            "run_train_uniref50_ddp": "proteins.fasta",
            "run_dpo_ddp": "pairs.json",
        }
        names |= {"run_train_rebm_ddp": "digits", "run_train_quantumgrav_ddp": "sets"}
        return folder / names[self.name]

    def refused(self, run: Run) -> str:
        """The one line of a run that cannot work; the server ends the other rank."""
        assert "Traceback" not in run.text, run.text[-3000:]
        said = [line for line in run.text.splitlines() if ": error: " in line]
        assert len(said) == 1, run.text[-3000:]
        return said[0].partition(": error: ")[2]


def spoil_sets(folder: Path, numbers: list[int], new_sums: bool) -> None:
    """The features of these sets are NaN. Without a new checksum the file counts as damaged."""
    features, ptr = np.load(folder / "features.npy"), np.load(folder / "node_ptr.npy")
    for number in numbers:
        features[ptr[number] : ptr[number + 1]] = np.nan
    np.save(folder / "features.npy", features)
    if new_sums:
        meta = json.loads((folder / "meta.json").read_text())
        meta["sha256"]["features"] = hashlib.sha256(features).hexdigest()
        (folder / "meta.json").write_text(json.dumps(meta))


def change(path: Path) -> None:
    """Other data of the same form."""
    if path.name == "sets":
        shutil.rmtree(path)
        options = "--samples=300 --min_size=10 --max_size=20 --seed=1".split()
        return write_causal_sets(path, *options)
    if path.name == "digits":
        shutil.rmtree(path)
        return write_digits(path, 450, 60, "--valid=19")
    text = path.read_text()
    rows = {"proteins.fasta": lambda: text + ">new\nACDEFGHIKLMNPQRSTVWYACDEF\n",
            "pairs.jsonl": lambda: text + json.dumps({"query": "which is new", "positive": "this one is"}) + "\n",
            "pairs.json": lambda: json.dumps(json.loads(text)[:-1])}  # fmt: skip
    path.write_text(rows[path.name]())


def damage(path: Path) -> str:
    """A row in the middle is damaged; what must be said of it."""
    if path.name == "sets":
        spoil_sets(path, [100], new_sums=False)
        return r"sets/features.npy is .*: remove .*make_causal_sets.py --out "
    if path.name == "digits":
        images = np.load(path / "images.npy")
        images[200] ^= 1
        np.save(path / "images.npy", images)
        return r"digits/images.npy is .*: remove .* and prepare it anew"
    if path.name == "pairs.json":
        rows = json.loads(path.read_text())
        rows[40]["preferred_seq"] += "A"
        path.write_text(json.dumps(rows))
        return r"pairs.json: index 40: preferred_seq has \d+ letters; expected \d+"
    lines = path.read_text().splitlines()
    number = 131 if path.name == "pairs.jsonl" else 2 * 300
    lines[number - 1] = lines[number - 1][:20] + "#1"
    path.write_text("\n".join(lines) + "\n")
    return rf"{path.name}.*?line {number}: "


def mounted(folder: Path, options: str) -> None:
    """A small file system of its own; the test is skipped where that is not allowed."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"needs the right to mount a file system ({done.stderr.strip()})")


# ---- Faults: each returns its outcome for the table -----------------------------------------------------


def rank_killed(case: Case, tmp_path: Path) -> str:
    rank, step = case.draw.randrange(2), case.draw.randrange(9, 30)  # after the first checkpoint
    case.run([[rank, step, "signal", 9]], statuses=(-9, 1), within=20)
    case.restart()
    return f"rank {rank} at step {step}: the other ends with 1; the same bits after a restart"


def rank_killed_max_restarts(case: Case, tmp_path: Path) -> str:
    rank, step = case.draw.randrange(2), case.draw.randrange(9, 30)
    job = case.torchrun(tmp_path, [[rank, step, "signal", 9]], launcher=("--max-restarts=1",))
    case.ended(job, time.monotonic(), 0, 120)
    assert "resuming" in job.text
    case.same(Run(case.folder))
    return (
        f"rank {rank} at step {step}: torchrun restarts, status 0, the same bits (seconds: of all)"
    )


def signal_to_launcher(case: Case, tmp_path: Path, number: int = signal.SIGTERM) -> str:
    job = case.torchrun(tmp_path, [[rank, 9, "sleep", 2] for rank in (0, 1)])
    job.wait_for("step=9 ")
    begin = time.monotonic()
    job.process.send_signal(number)
    case.ended(job, begin, 1, 60)
    assert stopped(signal.Signals(number).name) in job.text
    case.restart()
    return (
        "checkpoint at the next step, status 1 of torchrun's agent; the same bits after a restart"
    )


def sigusr1_to_launcher(case: Case, tmp_path: Path) -> str:
    return signal_to_launcher(case, tmp_path, signal.SIGUSR1)


def signal_to_rank(
    case: Case, tmp_path: Path, number: int = signal.SIGTERM, status: int = 143
) -> str:
    rank, step = case.draw.randrange(2), case.draw.randrange(5, 30)
    run = case.run([[rank, step, "signal", number]], statuses=(status,), within=20)
    saved = step if step in case.whole.evaluated else step + 1
    assert state_of(run)["step"] == saved and saved not in run.evaluated
    assert stopped(signal.Signals(number).name) in run.text
    case.restart()
    return f"rank {rank} at step {step}: all save at step {saved}, status {status}; the same bits after a restart"


def sigusr1_to_rank(case: Case, tmp_path: Path) -> str:
    return signal_to_rank(case, tmp_path, signal.SIGUSR1, 0)


def signals_before_evaluations(case: Case, tmp_path: Path) -> str:
    for step in case.whole.evaluated:
        run = case.run([[step % 2, step - 1, "signal", 15]], statuses=(143,), within=20)
        assert state_of(run)["step"] == step and step not in run.evaluated
    case.restart()
    steps = ", ".join(map(str, case.whole.evaluated))
    return f"in steps {steps}, one after the other: all save before the evaluation; the same bits after each restart"


def wall_clock_limit(case: Case, tmp_path: Path) -> str:
    run = case.run([[0, 20, "sleep", 6]], "--max_minutes=0.1", statuses=(0,), within=20)
    assert stopped("time limit") in run.text
    assert run.summary["status"].startswith("stopped")
    case.restart()
    return "--max_minutes: checkpoint, status 0; the same bits after a restart"


def disk_full(case: Case, tmp_path: Path) -> str:
    mounted(case.folder, f"size={6 * (case.whole.folder / 'latest.pt').stat().st_size + (2 << 20)}")
    try:  # full from 9 to 15 and from 17 on; step 12's checkpoint is not written, step 16's is
        faults = [[0, 9, "fill", 0], [0, 15, "free", 0], [0, 17, "fill", 0], [1, 22, "signal", 9]]
        run = case.run(faults, statuses=(-9, 1), within=20)
        for text in ("no latest.pt at step 12, the run goes on: ", "No space left"):
            assert text in run.text, run.text[-3000:]
        assert state_of(run)["step"] == 16
        (case.folder / "filler").unlink()
        assert run.rows, "each line is whole"
        case.restart(losses=False)  # metrics of the steps before are lost, and nothing else
    finally:
        subprocess.run(["umount", case.folder], check=True)
    return "a warning, the old checkpoint is whole, training goes on; killed meanwhile: the same bits after a restart"


def checkpoint_damaged(case: Case, tmp_path: Path) -> str:
    for number, spoil in enumerate(("cut", "flip"), 1):
        run = case.run([[0, 9 * number, "signal", 15]], statuses=(143,), within=20)
        path = case.folder / "latest.pt"
        content = bytearray(path.read_bytes())
        if (
            spoil == "flip"
        ):  # in the middle of the largest tensor (a zip has padding, too, where it does no harm)
            with zipfile.ZipFile(path) as archive:
                member = max(archive.infolist(), key=lambda info: info.file_size)
            name, extra = struct.unpack_from("<HH", content, member.header_offset + 26)
            content[member.header_offset + 30 + name + extra + member.file_size // 2] ^= 4
        path.write_bytes(
            content[: len(content) // 2] if spoil == "cut" else content
        )  # step_*.pt is the same file
    run = case.run((), statuses=(0,), within=100)
    assert "latest.pt is damaged: trying the one before it" in run.text, run.text[-3000:]
    case.same(run)
    return "cut, bit flipped: named, the one before it is taken; the same bits"


def data_changed(case: Case, tmp_path: Path) -> str:
    path = case.own_data(tmp_path / "own")
    case.run([[0, 11, "signal", 15]], statuses=(143,), within=20)
    before, kept = (case.folder / "latest.pt").read_bytes(), tmp_path / "kept"
    copy = shutil.copytree if path.is_dir() else shutil.copy2
    copy(path, kept)
    change(path)
    Path(f"{case.folder}.fault").unlink()
    run = case.run((), statuses=(2, -15), within=60)
    said = case.refused(run)
    assert "latest.pt " in said and "data" in said and "--fresh" in said
    if path.is_dir():
        shutil.rmtree(path)
    assert (case.folder / "latest.pt").read_bytes() == before
    copy(kept, path)
    case.restart()
    outcome = "an error that says so, status 2, the run is untouched"
    return f"{outcome}; with the old data the same bits"


def damaged_row(case: Case, tmp_path: Path) -> str:
    said = damage(case.own_data(tmp_path / "own"))
    run = case.run((), statuses=(2, -15), within=60)
    case.refused(run)
    lines = [line.strip() for line in run.text.splitlines() if re.search(said, line)]
    assert len(lines) == 1, run.text[-3000:]
    found = lines[0].partition(": error: ")[2] or lines[0]
    assert not [*case.folder.glob("*.pt")]
    return f"status 2 before training: {found.replace(f'{tmp_path}/own/', '')!r}"


def nan_in_data(case: Case, tmp_path: Path) -> str:
    path = case.own_data(tmp_path / "own")
    train = np.flatnonzero(np.load(path / "split.npy") == 0).tolist()
    spoil_sets(path, train[:1], new_sums=True)
    run = case.run((), statuses=(0,), within=100)
    hit = [step for step, ids in sorted(run.trained_on().items()) if train[0] in ids]
    assert hit and [row["step"] for row in run.rows if row.get("skipped")] == hit
    assert [row["step"] for row in run.rows if "lr" in row and "loss" not in row] == hit
    assert all(torch.isfinite(tensor).all() for tensor in state_of(run)["model"].values())

    spoil_sets(path, train[::4], new_sums=True)
    shutil.rmtree(case.folder)
    run = case.run((), "--max_bad_steps=3", statuses=(1,), within=20)
    assert "3 steps in a row without a finite gradient" in run.text and "Traceback" not in run.text
    outcome = f"in {len(hit)} steps: skipped on all ranks, finite weights, status 0"
    return f"{outcome}; 3 in a row: one line, status 1"


def nan_on_one_rank(case: Case, tmp_path: Path) -> str:
    if case.name == "run_train_quantumgrav_ddp":
        return nan_in_data(case, tmp_path)
    # the other data cannot hold a NaN, but a loss may become one
    run = case.run([[1, 9, "nan", 0], [1, 10, "sound", 0]], statuses=(0,), within=100)
    assert [row["step"] for row in run.rows if row.get("skipped")] == [10]
    assert [row["step"] for row in run.rows if "lr" in row and "loss" not in row] == [10]
    assert all(
        torch.isfinite(t).all() for t in state_of(run)["model"].values() if t.is_floating_point()
    )
    shutil.rmtree(case.folder)
    for trace in case.folder.parent.glob(f"{case.folder.name}.*"):
        trace.unlink()
    run = case.run([[1, 12, "nan", 0]], "--max_bad_steps=3", statuses=(1,), within=20)
    assert "3 steps in a row without a finite gradient" in run.text and "Traceback" not in run.text
    assert 4 <= state_of(run)["step"] <= 12
    case.restart()
    return (
        "once: skipped on all ranks; 3 in a row: one line, status 1; the same bits after a restart"
    )


def slow_rank(case: Case, tmp_path: Path) -> str:
    run = case.run([[1, 9, "sleep", 4], [0, 13, "sleep", 2]], statuses=(0,), within=100)
    case.same(run)
    return "the others wait, status 0, the same bits"


def stuck_rank(case: Case, tmp_path: Path) -> str:
    # the other rank fails; then torchrun ends the stuck one: SIGTERM, which a stuck rank of the new
    # form does not obey, and SIGKILL (measured: some 30 s later)
    launcher = ("--shutdown-timeout=10",)
    limit = "--timeout_minutes=0.1"
    job = case.torchrun(tmp_path, [[1, 9, "sleep", 3600]], limit, launcher=launcher)
    job.wait_for("step=8 ")  # its line of step 9 needs the other rank
    case.ended(job, time.monotonic(), 1, 6 + 60)
    assert "Timed out" in job.text or "timed out" in job.text
    case.restart()
    outcome = "--timeout_minutes 0.1: all end within 6 + 60 s, status 1"
    return f"{outcome}; the same bits after a restart"


def out_of_memory(case: Case, tmp_path: Path) -> str:
    run = case.run([[1, 9, "memory", 64]], statuses=(1,), within=20)
    assert (
        "[RANK 1]" in run.text and "ERROR: Traceback" in run.text and "allocate memory" in run.text
    )
    case.restart()
    return "rlimit on rank 1: status 1 with its number; the same bits after a restart"


def wandb_without_network(case: Case, tmp_path: Path) -> str:
    with socket.socket() as silent:  # accepts and never answers
        silent.bind(("localhost", 0))
        silent.listen(100)
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        env = {
            "WANDB_API_KEY": "0" * 40,
            "WANDB_BASE_URL": address,
            "WANDB_SILENT": "true",
            "HOME": tmp_path,
        }
        # in a real process: wandb also does something at its exit
        job = case.torchrun(tmp_path, (), "--wandb_mode=online", **env)
        job.wait_for("completed successfully!")
        case.ended(job, time.monotonic(), 0, 15)
    case.same(Run(case.folder))
    return "status 0, training does not wait, the same bits (seconds: at the exit)"


def read_only_folder(case: Case, tmp_path: Path) -> str:
    mounted(case.folder, "ro,size=1m")
    try:
        run = case.run((), statuses=(2, -15), within=60)
    finally:
        subprocess.run(["umount", case.folder], check=True)
    assert "step=1 " not in run.text
    assert "is not writable" in case.refused(run)
    return "status 2 before training, says so"


def two_jobs(case: Case, tmp_path: Path) -> str:
    other = Case(case.name, case.folder.with_name("other"), case.server, case.undisturbed, "other")
    (tmp_path / "2").mkdir()
    begin, jobs = time.monotonic(), [case.torchrun(tmp_path), other.torchrun(tmp_path / "2")]
    for one, job in zip((case, other), jobs, strict=True):
        one.ended(job, begin, 0, 200)
        one.same(Run(one.folder))
    return "at once on one node, --standalone: status 0, both the same bits"


def port_taken(case: Case, tmp_path: Path) -> str:
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port, begin = taken.getsockname()[1], time.monotonic()
        command = [sys.executable, f"{ROOT}/{case.name}.py", *case.argv, "--nproc_per_node=2"]
        command.append(f"--output_dir={case.folder}")
        job = Job(command, tmp_path / "job.txt", environment(MASTER_PORT=port))
        case.ended(job, begin, 1, 60)
    assert f"port: {port}" in job.text and not case.folder.exists()
    return "status 1, names the port, nothing written"


def clock_set_back(case: Case, tmp_path: Path) -> str:
    begin = time.monotonic()
    faults = [[rank, 9, "clock", 7200] for rank in (0, 1)]
    run = case.run(faults, "--max_minutes=30", statuses=(0,), within=100)
    assert 0 < run.summary["seconds"] < time.monotonic() - begin
    rows = [row for row in run.rows if "samples_per_s" in row]
    assert all(row["samples_per_s"] > 0 and 0 <= row["data_wait"] <= 1 for row in rows)
    case.same(run)
    return "two hours back: times stay positive, no early stop, the same bits"


def launcher_killed(case: Case, tmp_path: Path) -> str:
    """torchrun's agent alone: nobody ends the ranks, they see that they have another parent."""
    slow = [[rank, step, "sleep", 0.5] for rank in (0, 1) for step in range(9, 45)]
    job = case.torchrun(tmp_path, slow)
    job.wait_for("step=9 ")
    begin = time.monotonic()
    job.process.kill()
    assert job.process.wait() == -9
    assert job.is_gone(20), job.text[-3000:]
    case.seconds = time.monotonic() - begin
    assert stopped("death of the launcher") in job.text
    assert 9 <= state_of(Run(case.folder))["step"] <= 12
    case.restart()
    return "torchrun's agent by SIGKILL: the ranks save and end; the same bits after a restart"


def started_twice(case: Case, tmp_path: Path) -> str:
    """The same command beside a living run."""
    slow = [[0, step, "sleep", 0.5] for step in range(9, 35)]
    case.server.start(case.name, case.argv, case.folder, 2, faults=slow)
    trace = case.folder.with_name(f"{case.folder.name}.trace-0-of-2")
    deadline = time.monotonic() + 100
    while not trace.exists() or len(trace.read_text().splitlines()) < 10:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    begin = time.monotonic()
    status, text = call_script(case.name, *case.argv, f"--output_dir={case.folder}")
    case.seconds = time.monotonic() - begin
    assert case.seconds < 20
    run = case.server.wait()
    assert status == 2 and "Traceback" not in text
    assert text.count(": error: ") == 1, text
    assert text.count(f"another run is at work in {case.folder}") == 1, text
    assert run.statuses == [0, 0], run.text[-3000:]
    case.same(run)
    return "one line, status 2; the first run goes on to the same bits"


def stopped_in_evaluation(case: Case, tmp_path: Path) -> str:
    step = case.whole.evaluated[min(1, len(case.whole.evaluated) - 2)]
    run = case.run([[1, step - 1, "evaluation", 15]], statuses=(143,), within=20)
    assert state_of(run)["step"] == step and step not in run.evaluated
    last = case.whole.evaluated[-1]
    run = case.run([[0, last - 1, "evaluation", 15]], statuses=(143,), within=20)
    assert state_of(run)["step"] == last and last not in run.evaluated
    case.restart()
    summaries = [run.summary for run in (Run(case.folder), case.whole)]
    figures = [
        {key: value for key, value in found.items() if key not in RUN_OWN} for found in summaries
    ]
    assert figures[0] == figures[1]
    return f"SIGTERM after steps {step}, {last}: checkpoint, 143; the same bits after each restart"


# each fault, and the script on which the core has it
FAULTS = {
    rank_killed: None, signal_to_rank: None,  # test_contract.py has these with every script, and the next
    rank_killed_max_restarts: "run_train_quantumgrav_ddp", signal_to_launcher: None,  # test_launch.py has SIGTERM
    sigusr1_to_launcher: "run_train_quantumgrav_ddp", sigusr1_to_rank: "run_train_quantumgrav_ddp",
    signals_before_evaluations: None, wall_clock_limit: "run_train_quantumgrav_ddp",
    disk_full: "run_train_uniref50_ddp", checkpoint_damaged: "train_ddp", data_changed: "train_ddp",
    damaged_row: "run_dpo_ddp",
    nan_on_one_rank: "run_train_uniref50_ddp", slow_rank: "run_train_quantumgrav_ddp",
    stuck_rank: "run_train_quantumgrav_ddp", out_of_memory: "run_train_quantumgrav_ddp",
    wandb_without_network: "run_train_quantumgrav_ddp", read_only_folder: "run_dpo_ddp",
    two_jobs: "run_train_quantumgrav_ddp", port_taken: None, clock_set_back: "train_ddp",  # port: test_launch.py
    launcher_killed: "run_train_quantumgrav_ddp", started_twice: "run_train_quantumgrav_ddp",
    stopped_in_evaluation: "run_train_quantumgrav_ddp",
}  # fmt: skip


def pytest_generate_tests(metafunc):
    if "fault" in metafunc.fixturenames:
        everything = metafunc.config.getoption("--all-faults")
        cases = []
        for name in SCRIPTS:
            for fault in FAULTS:
                if everything or FAULTS[fault] == name:
                    label = f"{name}-{fault.__name__}"
                    cases.append(pytest.param(name, fault, id=label))
        metafunc.parametrize("name, fault", cases)


def test_fault(name, fault, server, undisturbed, matrix, tmp_path):
    case = Case(name, tmp_path / "run", server, undisturbed, fault.__name__)
    try:
        outcome = fault(case, tmp_path)
    finally:
        for job in case.jobs:
            job.kill()  # after a failure
    matrix(name, fault.__name__.replace("_", " "), outcome, case.seconds)
