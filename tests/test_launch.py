"""A script started for real by every launcher, stopped by signals, and broken on purpose.

It is the one with the fewest imports, as the launching code is the same in all. Where a launcher is only its
environment variables, the ranks are forked from a process that has the imports behind it. mpiexec:
test_dpo_wrapper.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import ROOT, forkserver, free_port, run_program, write_causal_sets

SCRIPT = str(ROOT / "run_train_quantumgrav_ddp.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
FILES = """best.pt confusion_cls.png curves.png latest.pt metrics.jsonl predictions.npz previous.pt
    summary.json""".split()
ENDLESS = ["--num_epochs=100000", "--save_every=1000000"]
SIGNALS = ["--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1", "--shutdown-timeout=120"]  # as run_ddp.sh


def environment(**changes) -> dict[str, str]:
    base = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "Agg"}
    return base | {name: str(value) for name, value in changes.items()}


class Job:
    """A started job and its output so far."""

    def __init__(self, command: list[str], output: Path, env: dict[str, str]):
        self.output, self.mark = output, f"LAUNCH_TEST_JOB={os.urandom(8).hex()}"
        env = env | dict([self.mark.split("=")])
        with open(output, "wb") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=env, cwd=output.parent, start_new_session=True
            )

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait(self, seconds: float = 100.0) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {seconds} s:\n{self.text[-3000:]}")

    def wait_for(self, pattern: str, seconds: float = 100.0) -> None:
        deadline = time.monotonic() + seconds
        while not re.search(pattern, self.text):
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"no {pattern!r} (exit status {self.process.poll()}):\n{self.text[-3000:]}")
            time.sleep(0.05)

    def processes(self) -> dict[int, list[str]]:
        """Living processes of the job, by what they inherited (torchrun's have a session each): id, environment."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                variables = (process / "environ").read_text(errors="replace").split("\0")
                dead = (process / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
            except OSError:
                continue
            if self.mark in variables and not dead:
                found[int(process.name)] = variables
        return found

    def rank(self, number: int) -> int:
        """The process id of a rank that torchrun started."""
        return next(pid for pid, variables in self.processes().items() if f"RANK={number}" in variables)

    def is_gone(self, seconds: float = 5.0) -> bool:
        deadline = time.monotonic() + seconds
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.05)
        return not self.processes()

    def kill(self) -> None:
        """Whatever is left of it."""
        while left := self.processes():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def start(tmp_path):
    """start(command, **environment): a Job; whatever is left of it is killed at the end of the test."""
    jobs = []

    def call(command: list[str], **env) -> Job:
        jobs.append(Job(command, tmp_path / f"job{len(jobs)}.txt", environment(**env)))
        return jobs[-1]

    yield call
    for job in jobs:
        job.kill()


def serve(pipe) -> None:
    """Forks ranks for each request [(env, argv, output), ...]; answers their process ids, then their statuses."""
    import matplotlib.pyplot  # noqa: F401
    import sklearn.metrics  # noqa: F401

    pipe.send("ready")
    while (request := pipe.recv()) is not None:
        pids = []
        for env, argv, output in request:
            pids.append(os.fork())
            if pids[-1] == 0:
                run_program([SCRIPT, *argv], {**os.environ, **env}, output)
        pipe.send(pids)
        pipe.send([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """ranks(envs, argv): starts one rank per environment; returns (pids, outputs, wait for the statuses)."""
    ours, theirs = forkserver().Pipe()
    server = forkserver().Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    ready = []

    def call(envs: list[dict], argv: list[str]):
        if not ready:
            assert ours.poll(60)
            ready.append(ours.recv())
        folder = tmp_path_factory.mktemp("ranks")
        outputs = [folder / f"{number}.txt" for number in range(len(envs))]
        base = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        ours.send(
            [
                (base | {k: str(v) for k, v in env.items()}, argv, str(output))
                for env, output in zip(envs, outputs, strict=True)
            ]
        )
        pids = ours.recv()

        def wait(seconds: float = 60.0) -> list[int]:
            if not ours.poll(seconds):
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
                pytest.fail(
                    f"still running after {seconds} s:\n" + "\n".join(output.read_text()[-2000:] for output in outputs)
                )
            return ours.recv()

        return pids, outputs, wait

    yield call
    ours.send(None)
    server.join(5)
    server.kill()


@pytest.fixture(scope="module")
def task(tmp_path_factory, ranks):
    """task(output_dir, *more): the arguments of a tiny run. `ranks` imports while the first run goes on."""
    folder = tmp_path_factory.mktemp("task") / "sets"
    split = "--split 0.4 0.3 0.3".split()
    write_causal_sets(folder, "--samples=40", "--min_size=8", "--max_size=12", *split)
    argv = f"""--data={folder} --hidden_dim=8 --head_dim=8 --num_layers=1 --num_epochs=2
        --global_batch_size=8 --batch_size=4 --log_every=1 --save_every=2 --wandb_mode=disabled
        --timeout_minutes=1""".split()
    return lambda output, *more: [*argv, f"--output_dir={output}", *more]


@pytest.fixture(scope="module")
def alone(task, tmp_path_factory):
    """(output folder, output) of plain python: one process."""
    folder = tmp_path_factory.mktemp("alone")
    job = Job([sys.executable, SCRIPT, *task(folder / "out")], folder / "job.txt", environment())
    assert job.wait() == 0, job.text
    return folder / "out", job.text


def rows_of(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def check_ranks(text: str, world_size: int) -> None:
    for number in range(world_size):
        assert text.count(f"[RANK {number}] ") > 0
        assert text.count(f"Process {number}/{world_size} started") == 1
        assert text.count(f"Initializing DDP for rank {number}...") == 1
    assert f"Process {world_size}/" not in text
    assert f"{world_size} ranks, gloo on cpu" in text
    batch = {1: "8 (4 per GPU × 1 GPUs × 2 micro-batches)", 2: "8 (4 per GPU × 2 GPUs)"}
    for once in (f"Total batch size:   {batch[world_size]}", "Starting distributed training..."):
        assert text.count(once) == 1, once


def check_run(output: Path, text: str, alone, world_size: int) -> None:
    """A complete run with `world_size` ranks and one writer, equal to that of one process."""
    summary = json.loads((output / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 4)
    assert summary["world_size"] == world_size
    assert sorted(path.name for path in output.iterdir()) == FILES
    check_ranks(text, world_size)
    end = "Training and testing completed successfully!"
    for once in ("step=1 ", "Starting training epoch 1", end):
        assert text.count(once) == 1, once
    mine, theirs = rows_of(output), rows_of(alone[0])
    assert [row["step"] for row in mine] == [row["step"] for row in theirs] == [1, 2, 2, 3, 4, 4]
    for row, other in zip(mine, theirs, strict=True):
        for name in ("loss", "val/loss"):
            assert (name in row) == (name in other)
            assert row.get(name, 0.0) == pytest.approx(other.get(name, 0.0), rel=1e-5, abs=1e-6)


# ---- Launchers ---------------------------------------------------------------------------------------


def test_plain_python(alone):
    check_run(*alone, alone, 1)


def test_torchrun(start, task, alone, tmp_path):
    job = start([*TORCHRUN, "--standalone", "--nproc_per_node=2", SCRIPT, *task(tmp_path / "out")])
    assert job.wait() == 0, job.text
    check_run(tmp_path / "out", job.text, alone, 2)
    assert job.is_gone()


def test_torch_distributed_launch(start, task, alone, tmp_path):
    """It passes --local-rank=N on to each rank."""
    port = f"--master-port={free_port()}"
    launch = [sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node=2", port]
    job = start([*launch, SCRIPT, *task(tmp_path / "out")])
    assert job.wait() == 0, job.text
    check_run(tmp_path / "out", job.text, alone, 2)


VARIABLES = {
    "Open MPI": lambda rank: {
        "OMPI_COMM_WORLD_RANK": rank,
        "OMPI_COMM_WORLD_SIZE": 2,
        "OMPI_COMM_WORLD_LOCAL_RANK": rank,
        "OMPI_COMM_WORLD_LOCAL_SIZE": 2,
    },
    "Hydra": lambda rank: {"PMI_RANK": rank, "PMI_SIZE": 2, "MPI_LOCALRANKID": rank, "MPI_LOCALNRANKS": 2},
    "PALS": lambda rank: {"PALS_RANKID": rank, "PALS_LOCAL_RANKID": rank, "WORLD_SIZE": 2},
    "PALS with PMI": lambda rank: {"PALS_RANKID": rank, "PALS_LOCAL_RANKID": rank, "PMI_SIZE": 2},
    "SLURM": lambda rank: {
        "SLURM_PROCID": rank,
        "SLURM_NTASKS": 2,
        "SLURM_LOCALID": rank,
        "SLURM_JOB_ID": 77,
        "SLURM_STEP_ID": 0,
    },
}


@pytest.mark.parametrize("launcher", VARIABLES)
def test_launchers_by_their_variables(ranks, task, alone, tmp_path, launcher):
    master = {"MASTER_PORT": free_port()} | ({"MASTER_ADDR": "localhost"} if launcher != "Hydra" else {})
    _, outputs, wait = ranks([VARIABLES[launcher](rank) | master for rank in (0, 1)], task(tmp_path / "out"))
    statuses, text = wait(), "".join(output.read_text() for output in outputs)
    assert statuses == [0, 0], text
    check_run(tmp_path / "out", text, alone, 2)


def test_python_in_an_sbatch_file_is_one_process(ranks, task, alone, tmp_path):
    """There, Slurm's variables of a rank are set, too, but there is no step, and no second rank."""
    env = VARIABLES["SLURM"](0)
    del env["SLURM_STEP_ID"]
    _, outputs, wait = ranks([env], task(tmp_path / "out"))
    assert wait() == [0], outputs[0].read_text()
    check_run(tmp_path / "out", outputs[0].read_text(), alone, 1)


# ---- What starts nothing -----------------------------------------------------------------------------


@pytest.mark.parametrize("argument", ["--help", "--batch_sise=4"])
def test_starts_nothing(start, task, tmp_path, argument):
    job = start([sys.executable, SCRIPT, *task(tmp_path / "out", "--nproc_per_node=2", argument)])
    status, text = job.wait(), job.text
    assert "[RANK" not in text and not (tmp_path / "out").exists()
    if argument == "--help":
        assert status == 0 and text.startswith("usage: ") and "--batch_size" in text
        assert "python run_train_quantumgrav_ddp.py" in text
    else:
        assert status == 2 and text.count("\n") == 1
        assert "no option batch_sise: did you mean batch_size?" in text


@pytest.mark.parametrize("fault", ["wrong path", "damaged data"])
def test_bad_data_is_one_line(start, task, tmp_path, fault):
    """Under torchrun, which writes a report of its own: the ranks' errors go into files."""
    data = tmp_path / "sets"
    said = f"no data in {data}: python tools/make_causal_sets.py --out {data}"
    if fault == "damaged data":
        shutil.copytree(task("")[0].removeprefix("--data="), data)
        content = bytearray((data / "past.npy").read_bytes())
        content[-1] ^= 1
        (data / "past.npy").write_bytes(content)
        said = f"{data}/past.npy is "
    files = ["--redirects=2", f"--log-dir={tmp_path}/logs"]
    argv = task(tmp_path / "out", f"--data={data}")
    job = start([*TORCHRUN, "--standalone", "--nproc_per_node=2", *files, SCRIPT, *argv])
    assert job.wait() == 1
    lines = []
    for path in (tmp_path / "logs").rglob("stderr.log"):
        lines += path.read_text().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"run_train_quantumgrav_ddp.py: error: {said}")
    assert not (tmp_path / "out").exists()
    assert job.is_gone()


# ---- A rank that fails -------------------------------------------------------------------------------

DRIVER = """
import logging
import os

import run_train_quantumgrav_ddp as block


def main(args):
    block.setup_ddp(args)
    rank = block.dist.get_rank()
    for step in range(20 if os.environ["END"] == "finish" else 10**9):
        if step == 10:
            logging.warning("all ranks warn")
            logging.error("step 10")
        if step == 11 and rank == 1 and os.environ["END"] == "raise":
            raise ZeroDivisionError("boom in step 11")
        block.dist.barrier()
    return 3 if args.seed == 3 and rank == 0 else 0


if __name__ == "__main__":
    block.launch(block.parse_args, main)
"""


@pytest.fixture
def drive(start, tmp_path):
    """drive(launcher, end, *argv): the plumbing of a script without its task; `end` finish, raise or never."""

    def call(launcher: str, end: str, *argv: str) -> Job:
        (tmp_path / "driver.py").write_text(DRIVER)
        command, more = {
            "torchrun": ([*TORCHRUN, "--standalone", "--nproc_per_node=2", *SIGNALS], []),
            "nproc": ([sys.executable], ["--nproc_per_node=2"]),
        }[launcher]
        return start([*command, str(tmp_path / "driver.py"), "--device=cpu", *more, *argv], END=end, PYTHONPATH=ROOT)

    return call


@pytest.mark.parametrize("launcher", ["torchrun", "nproc"])
def test_a_rank_that_raises_ends_the_job(drive, launcher):
    job = drive(launcher, "raise")
    job.wait_for("boom in step 11")
    begin = time.monotonic()
    assert job.wait(20) == 1, job.text
    assert time.monotonic() - begin < 10  # and not the 30 minutes of the group's timeout
    assert re.search(r"\[RANK 1\] .* ERROR: Traceback \(most recent call last\)", job.text)
    assert "SIGABRT" not in job.text and "terminate called" not in job.text
    assert job.is_gone()
    # torchrun's own report knows the error, too (@record)
    assert re.search(r"rank +: 1 ", job.text)
    assert job.text.count("ZeroDivisionError: boom in step 11") >= 2


@pytest.mark.parametrize("launcher", ["torchrun", "nproc"])
def test_kill_of_a_rank_ends_the_job(drive, launcher):
    job = drive(launcher, "never")
    job.wait_for(r"RANK 1.* step 10")
    os.kill(job.rank(1), signal.SIGKILL)
    begin = time.monotonic()
    assert job.wait(20) == 1, job.text
    assert time.monotonic() - begin < 20
    assert job.is_gone()


def test_nproc_on_a_port_that_is_taken(start, task, tmp_path):
    """MASTER_PORT is taken as it is: busy, torchrun ends with its number in seconds."""
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = taken.getsockname()[1]
        argv = task(tmp_path / "out", "--nproc_per_node", "2")
        job = start([sys.executable, SCRIPT, *argv], MASTER_PORT=port)
        assert job.wait(60) == 1 and f"port: {port}" in job.text, job.text
    assert job.is_gone()


# 1: torchrun's own for every status but 0
@pytest.mark.parametrize(("argv", "status"), [([], 0), (["--seed=3"], 1)])
def test_nproc_passes_the_exit_status_on(drive, argv, status):
    job = drive("nproc", "finish", *argv)
    assert job.wait() == status, job.text
    assert job.text.count("all ranks warn") == 1  # of rank 0, and no other
    assert job.text.count("ERROR: step 10") == 2
    assert job.is_gone()


# ---- Signals -----------------------------------------------------------------------------------------


def stopped(output: Path, text: str, reason: str) -> None:
    """All ranks stopped at the same step, after it was saved; the summary says why."""
    state = torch.load(output / "latest.pt", weights_only=True)
    steps = [int(step) for step in re.findall(r"INFO: step=(\d+) .* lr=", text)]
    assert state["step"] == steps[-1] >= 3
    summary = json.loads((output / "summary.json").read_text())
    assert (summary["status"], summary["world_size"]) == (f"stopped by {reason}", 2)
    assert summary["steps"] == state["step"]
    said = f"INFO: stopped by {reason}: the same command goes on from the checkpoint"
    assert text.count(said) == 1


def test_sigterm_to_torchrun_writes_a_checkpoint(start, task, alone, tmp_path):
    """It reaches the ranks' workers, too."""
    argv = task(tmp_path / "out", *ENDLESS, "--num_workers=1")
    job = start([*TORCHRUN, "--standalone", "--nproc_per_node=2", *SIGNALS, SCRIPT, *argv])
    job.wait_for("step=3 ")
    job.process.send_signal(signal.SIGTERM)
    assert job.wait(60) == 1  # the agent's; the ranks' own is 143
    stopped(tmp_path / "out", job.text, "SIGTERM")
    assert job.is_gone()


def test_sigterm_to_nproc(start, task, alone, tmp_path):
    job = start([sys.executable, SCRIPT, *task(tmp_path / "out", *ENDLESS, "--nproc_per_node=2")])
    job.wait_for("step=3 ")
    job.process.send_signal(signal.SIGTERM)
    assert job.wait(60) == 1, job.text  # the agent's here, too
    stopped(tmp_path / "out", job.text, "SIGTERM")
    check_ranks(job.text, 2)
    assert job.is_gone()


@pytest.mark.parametrize(("name", "status"), [("SIGUSR1", 0), ("SIGINT", 130)])
def test_signal_to_one_rank(ranks, task, alone, tmp_path, name, status):
    """As srun and scancel --signal send them; and the run goes on from there."""
    envs = [VARIABLES["SLURM"](rank) | {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port()} for rank in (0, 1)]
    envs[1]["MASTER_PORT"] = envs[0]["MASTER_PORT"]
    argv = task(tmp_path / "out", *ENDLESS, "--num_epochs=60")
    pids, outputs, wait = ranks(envs, argv)
    deadline = time.monotonic() + 60
    while not outputs[0].exists() or "step=3 " not in outputs[0].read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(pids[1], getattr(signal, name))
    assert wait() == [status, status], outputs[1].read_text()
    text = outputs[0].read_text()
    stopped(tmp_path / "out", text, name)
    if name == "SIGINT":
        return
    last = torch.load(tmp_path / "out" / "latest.pt", weights_only=True)["step"]
    assert last < 120
    _, outputs, wait = ranks([{}], argv)  # on one process now
    assert wait() == [0], outputs[0].read_text()
    assert f"latest.pt at step {last}" in outputs[0].read_text()
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["steps"] == 120
    steps = [row["step"] for row in rows_of(tmp_path / "out") if "loss" in row]
    assert steps == list(range(1, 121))  # none missing, none twice
