"""A script started by every launcher, stopped by signals, and broken on purpose.

It is the script with the fewest imports; the lines that launch are the same in all. Where a
launcher is only its environment variables, the ranks are forked from a process that has the
imports behind it.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from helpers import (
    ROOT,
    SIGNALS,
    TWO_RANKS,
    Job,
    call_program,
    environment,
    free_port,
    write_causal_sets,
    write_structures,
)

SCRIPT = str(ROOT / "run_train_quantumgrav_ddp.py")
FILES = """best.pt confusion_cls.png curves.png latest.pt metrics.jsonl predictions.npz previous.pt
    summary.json""".split()
ENDLESS = ["--num_epochs=100000", "--save_every=1000000"]

# --------------------------------------------------------------------------------------------------
# Runs


@pytest.fixture(scope="module")
def task(tmp_path_factory, server):
    """task(output folder, *more): the arguments of a tiny run. (The server imports while the
    first run goes on.)"""
    folder = tmp_path_factory.mktemp("task") / "sets"
    split = ["--split", "0.4", "0.3", "0.3"]
    write_causal_sets(folder, "--samples=40", "--min_size=8", "--max_size=12", *split)
    argv = f"""--data={folder} --hidden_dim=8 --head_dim=8 --num_layers=1 --num_epochs=2
        --global_batch_size=8 --batch_size=4 --log_every=1 --save_every=2 --wandb_mode=disabled
        --timeout_minutes=1""".split()
    return lambda output, *more: [*argv, f"--output_dir={output}", *more]


@pytest.fixture(scope="module")
def alone(task, tmp_path_factory):
    """(folder, output) of plain python: one process."""
    folder = tmp_path_factory.mktemp("alone")
    job = Job([sys.executable, SCRIPT, *task(folder / "out")], folder / "job.txt", environment())
    assert job.wait() == 0, job.text
    return folder / "out", job.text


def read_rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def check_ranks(text, world_size):
    for number in range(world_size):
        assert f"[RANK {number}] " in text
        assert text.count(f"Process {number}/{world_size} started") == 1
        assert text.count(f"Initializing DDP for rank {number}...") == 1
    assert f"Process {world_size}/" not in text
    assert f"{world_size} ranks, gloo on cpu" in text
    batch = {1: "8 (4 per GPU × 1 GPUs × 2 micro-batches)", 2: "8 (4 per GPU × 2 GPUs)"}
    assert text.count(f"Total batch size:   {batch[world_size]}") == 1
    assert text.count("Starting distributed training...") == 1


def check_run(folder, text, alone, world_size):
    """A complete run with `world_size` ranks and one writer, equal to that of one process."""
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["steps"] == 4
    assert summary["world_size"] == world_size
    assert sorted(path.name for path in folder.iterdir()) == FILES
    check_ranks(text, world_size)
    end = "Training and testing completed successfully!"
    for once in ("step=1 ", "Starting training epoch 1", end):
        assert text.count(once) == 1, once
    rows = read_rows(folder)
    expected = read_rows(alone[0])
    assert [row["step"] for row in rows] == [1, 2, 2, 3, 4, 4]
    assert [row["step"] for row in expected] == [1, 2, 2, 3, 4, 4]
    for row, other in zip(rows, expected, strict=True):
        for name in ("loss", "val/loss"):
            assert (name in row) == (name in other)
            if name in row:
                assert row[name] == pytest.approx(other[name], rel=1e-5, abs=1e-6)


# --------------------------------------------------------------------------------------------------
# Launchers


def test_plain_python(alone):
    check_run(*alone, alone, 1)


def test_torch_distributed_launch(start, task, alone, tmp_path):
    """It gives --local-rank to each rank."""
    launcher = [sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node=2"]
    port = f"--master-port={free_port()}"
    job = start([*launcher, port, SCRIPT, *task(tmp_path / "out")])
    assert job.wait() == 0, job.text
    check_run(tmp_path / "out", job.text, alone, 2)
    assert job.is_gone()


def test_nproc_per_node(start, task, alone, tmp_path):
    """Plain python, which becomes torchrun."""
    job = start([sys.executable, SCRIPT, *task(tmp_path / "out", "--nproc_per_node=2")])
    assert job.wait() == 0, job.text
    check_run(tmp_path / "out", job.text, alone, 2)
    assert job.is_gone()


VARIABLES = {  # of rank {0} of two on one machine
    "Open MPI": """OMPI_COMM_WORLD_RANK={0} OMPI_COMM_WORLD_SIZE=2
        OMPI_COMM_WORLD_LOCAL_RANK={0} OMPI_COMM_WORLD_LOCAL_SIZE=2""",
    "Hydra": "PMI_RANK={0} PMI_SIZE=2 MPI_LOCALRANKID={0} MPI_LOCALNRANKS=2",
    "PALS": "PALS_RANKID={0} PALS_LOCAL_RANKID={0} WORLD_SIZE=2",
    "PALS with PMI": "PALS_RANKID={0} PALS_LOCAL_RANKID={0} PMI_SIZE=2",
    "SLURM": "SLURM_PROCID={0} SLURM_NTASKS=2 SLURM_LOCALID={0} SLURM_JOB_ID=77 SLURM_STEP_ID=0",
    "by hand": "RANK={0} WORLD_SIZE=2",
}


def variables_of(launcher):
    """The environment variables of both ranks."""
    common = {"MASTER_PORT": free_port()}
    if launcher != "Hydra":  # on one machine it needs no address
        common["MASTER_ADDR"] = "localhost"
    both = []
    for rank in (0, 1):
        own = dict(common)
        for word in VARIABLES[launcher].format(rank).split():
            name, value = word.split("=")
            own[name] = value
        both.append(own)
    return both


@pytest.mark.parametrize("launcher", VARIABLES)
def test_launchers_by_their_variables(server, task, alone, tmp_path, launcher):
    server.start(variables_of(launcher), [SCRIPT, *task(tmp_path / "out")])
    assert server.wait() == [0, 0], server.text
    check_run(tmp_path / "out", server.text, alone, 2)


def test_python_in_an_sbatch_file_is_one_process(server, task, alone, tmp_path):
    """There, Slurm's variables of a rank are set, too, but there is no step, and no second rank."""
    variables = variables_of("SLURM")[0]
    for name in ("SLURM_STEP_ID", "MASTER_ADDR", "MASTER_PORT"):
        del variables[name]
    server.start([variables], [SCRIPT, *task(tmp_path / "out")])
    assert server.wait() == [0], server.text
    check_run(tmp_path / "out", server.text, alone, 1)


def family(name):
    """The mpiexec of a family, and how it places two ranks on this machine."""
    if name == "MPICH":
        found = shutil.which("mpiexec.hydra") or shutil.which("mpiexec.mpich")
        return found, ["-n", "2", "-ppn", "2"]
    options = "--allow-run-as-root --oversubscribe --bind-to none -n 2 --map-by ppr:2:node"
    return shutil.which("mpiexec.openmpi"), options.split()


@pytest.mark.parametrize("name", ["Open MPI", "MPICH"])
def test_mpiexec(name, tmp_path):
    """The document's command: two ranks, each with its own number, in one run."""
    mpiexec, placed = family(name)
    if mpiexec is None:
        pytest.skip(f"{name}'s mpiexec is not installed (Debian: openmpi-bin, mpich)")
    write_structures(tmp_path, 4, pairs=4, least=8, most=12)
    command = [sys.executable, str(ROOT / "run_dpo_ddp.py"), f"--train_data={tmp_path}/pairs.json"]
    command += [f"--output_dir={tmp_path}/out", "--base_model_name=random", "--num_epochs=1"]
    command += ["--backend", "ccl", "--num_orders=1", "--device=cpu"]
    env = os.environ | {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    options = {"env": env, "capture_output": True, "text": True, "timeout": 90}
    result = subprocess.run([mpiexec, *placed, *command], **options)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    for rank in range(2):
        assert f"Initializing DDP for rank {rank}..." in result.stdout
    assert "Initialized DDP: rank=0, world_size=2, local_rank=0" in result.stdout
    assert result.stdout.count("completed successfully!") == 1
    assert "Batch size per GPU: 1, Total batch size: 2" in result.stdout
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["world_size"] == 2


# --------------------------------------------------------------------------------------------------
# What cannot work


def test_wrong_option_starts_nothing(task, tmp_path):
    """Before the hand-over to torchrun, which would write a report of its own."""
    argv = task(tmp_path / "out", "--nproc_per_node=2", "--batch_sise=4")
    status, text = call_program(SCRIPT, *argv)
    assert status == 2
    assert text.count("\n") == 1
    assert "no option batch_sise: did you mean batch_size?" in text
    assert not (tmp_path / "out").exists()


def test_missing_data_is_one_line(start, task, tmp_path):
    """Of all ranks together. torchrun writes, too: the ranks' errors go into files here."""
    data = tmp_path / "sets"
    files = ["--redirects=2", f"--log-dir={tmp_path}/logs"]
    job = start([*TWO_RANKS, *files, SCRIPT, *task(tmp_path / "out", f"--data={data}")])
    assert job.wait() == 1
    lines = []
    for path in (tmp_path / "logs").rglob("stderr.log"):
        lines += path.read_text().splitlines()
    assert len(lines) == 1, lines
    said = f"no data in {data}: python tools/make_causal_sets.py --out {data}"
    assert lines[0].startswith(f"run_train_quantumgrav_ddp.py: error: {said}")
    assert not (tmp_path / "out").exists()
    assert job.is_gone()


def test_nproc_on_a_port_that_is_taken(start, task, tmp_path):
    """MASTER_PORT is used as it is given: torchrun ends soon, and names it."""
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = taken.getsockname()[1]
        argv = task(tmp_path / "out", "--nproc_per_node", "2")
        job = start([sys.executable, SCRIPT, *argv], MASTER_PORT=port)
        assert job.wait(60) == 1
        assert f"port: {port}" in job.text
    assert job.is_gone()


# --------------------------------------------------------------------------------------------------
# A rank that fails

DRIVER = """
import logging

import run_train_quantumgrav_ddp as block


def main(args):
    block.setup_ddp(args)
    rank = block.dist.get_rank()
    for step in range(10**9):
        if step == 10:
            logging.warning("all ranks warn")
            logging.error("step 10")
        if step == 11 and rank == 1 and args.seed == 3:
            raise ZeroDivisionError("boom in step 11")
        block.dist.barrier()


if __name__ == "__main__":
    block.launch(block.parse_args, main)
"""


@pytest.fixture
def driver(tmp_path):
    """What a script does without its task."""
    path = tmp_path / "driver.py"
    path.write_text(DRIVER)
    return path


def test_a_rank_that_raises_ends_the_job(start, driver):
    command = [*TWO_RANKS, *SIGNALS, driver, "--device=cpu", "--seed=3"]
    job = start(command, PYTHONPATH=ROOT)
    job.wait_for("boom in step 11")
    assert job.wait(10) == 1, job.text  # and not after the 30 minutes of the group's timeout
    assert job.text.count("all ranks warn") == 1  # rank 0 alone
    assert job.text.count("ERROR: step 10") == 2
    assert re.search(r"\[RANK 1\] .* ERROR: Traceback \(most recent call last\)", job.text)
    assert "SIGABRT" not in job.text
    assert "terminate called" not in job.text
    assert job.is_gone()
    # torchrun's own report has the error, too (@record)
    assert re.search(r"rank +: 1 ", job.text)
    assert job.text.count("ZeroDivisionError: boom in step 11") >= 2


def test_kill_of_a_rank_ends_the_job(start, driver):
    job = start([*TWO_RANKS, driver, "--device=cpu"], PYTHONPATH=ROOT)
    job.wait_for(r"RANK 1.* step 10")
    os.kill(job.rank(1), signal.SIGKILL)
    assert job.wait(20) == 1, job.text
    assert job.is_gone()


# --------------------------------------------------------------------------------------------------
# Signals


def check_stopped(folder, text, reason):
    """All ranks stopped after the same step, which was saved; the summary says why."""
    state = torch.load(folder / "latest.pt", weights_only=True)
    steps = re.findall(r"INFO: step=(\d+) .* lr=", text)
    assert state["step"] == int(steps[-1]) >= 3
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == f"stopped by {reason}"
    assert summary["steps"] == state["step"]
    said = f"INFO: stopped by {reason}: the same command goes on from the checkpoint"
    assert text.count(said) == 1
    check_ranks(text, 2)


def test_sigterm_to_the_launcher(start, task, tmp_path):
    """It reaches the ranks and their workers; they save and end."""
    argv = task(tmp_path / "out", *ENDLESS, "--num_workers=1", "--nproc_per_node=2")
    job = start([sys.executable, SCRIPT, *argv])
    job.wait_for("step=3 ")
    job.process.send_signal(signal.SIGTERM)
    assert job.wait(60) == 1, job.text  # torchrun's; that of the ranks is 143
    check_stopped(tmp_path / "out", job.text, "SIGTERM")
    assert job.is_gone()


@pytest.mark.parametrize(("name", "status"), [("SIGUSR1", 0), ("SIGINT", 130)])
def test_signal_to_one_rank(server, task, tmp_path, name, status):
    """As srun and scancel --signal send them: all ranks stop."""
    server.start(variables_of("SLURM"), [SCRIPT, *task(tmp_path / "out", *ENDLESS)])
    deadline = time.monotonic() + 60
    while "step=3 " not in server.text:
        assert time.monotonic() < deadline, server.text
        time.sleep(0.02)
    os.kill(server.pids[1], getattr(signal, name))
    assert server.wait() == [status, status], server.text
    check_stopped(tmp_path / "out", server.text, name)
