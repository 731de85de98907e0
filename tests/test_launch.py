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
import subprocess
import sys
import time

import pytest
import torch
from helpers import (
    ROOT,
    SIGNALS,
    TWO_RANKS,
    free_port,
    write_causal_sets,
    write_structures,
)

SCRIPT = str(ROOT / "run_train_quantumgrav_ddp.py")
ENDLESS = ["--num_epochs=100000", "--save_every=1000000"]
DRIVER = """
import run_train_quantumgrav_ddp as block


def main(args):
    block.setup_ddp(args)
    rank = block.dist.get_rank()
    block.logging.error(f"after {block.sum_over_ranks(block.torch.ones(1))}")
    if args.seed == 3 and rank == 1:
        raise ZeroDivisionError("boom")
    block.dist.barrier()


if __name__ == "__main__":
    block.launch(block.parse_args, main)
"""

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


@pytest.fixture
def driver(tmp_path):
    """What a script does without its task."""
    path = tmp_path / "driver.py"
    path.write_text(DRIVER)
    return path


def read_losses(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def check_ranks(text, world_size):
    for number in range(world_size):
        assert f"[RANK {number}] " in text
        assert text.count(f"Process {number}/{world_size} started") == 1
        assert text.count(f"Initializing DDP for rank {number}...") == 1
    assert f"Process {world_size}/" not in text
    assert f"{world_size} ranks, gloo on cpu" in text


# --------------------------------------------------------------------------------------------------
# Launchers


def test_python_and_torch_distributed_launch(start, task, tmp_path):
    """The latter gives --local-rank to each rank; it is the same run, with one writer."""
    torch_launch = f"-m torch.distributed.launch --nproc_per_node=2 --master-port={free_port()}"
    losses = []
    for world_size, launcher in ((1, []), (2, torch_launch.split())):
        folder = tmp_path / f"of-{world_size}"
        job = start([sys.executable, *launcher, SCRIPT, *task(folder)])
        assert job.wait() == 0, job.text
        assert job.is_gone()
        check_ranks(job.text, world_size)
        for once in ("step=1 ", "Starting training epoch 1", "completed successfully!"):
            assert job.text.count(once) == 1, once
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["status"] == "finished"
        assert summary["world_size"] == world_size
        losses.append(read_losses(folder))
    assert len(losses[0]) == 4
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


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
def test_launchers_by_their_variables(server, driver, launcher):
    server.start(variables_of(launcher), [str(driver), "--device=cpu"])
    assert server.wait() == [0, 0], server.text
    check_ranks(server.text, 2)
    assert server.text.count("ERROR: after [2.0]") == 2


def test_python_in_an_sbatch_file_is_one_process(server, driver):
    """There, Slurm's variables of a rank are set, too, but there is no step, and no second rank."""
    variables = variables_of("SLURM")[0]
    for name in ("SLURM_STEP_ID", "MASTER_ADDR", "MASTER_PORT"):
        del variables[name]
    server.start([variables], [str(driver), "--device=cpu"])
    assert server.wait() == [0], server.text
    check_ranks(server.text, 1)


def test_a_rank_without_a_world_size(server, driver):
    server.start([{"RANK": 0}], [str(driver), "--device=cpu"])
    assert server.wait() == [2], server.text
    assert "RANK is set, but not WORLD_SIZE" in server.text


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
    options = {"env": env, "capture_output": True, "text": True, "timeout": 200}
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


def test_a_rank_that_raises_ends_the_job(start, driver):
    job = start([*TWO_RANKS, *SIGNALS, driver, "--device=cpu", "--seed=3"], PYTHONPATH=ROOT)
    job.wait_for("boom")
    assert job.wait(10) == 1, job.text  # and not after the 30 minutes of the group's timeout
    assert job.is_gone()
    assert re.search(r"\[RANK 1\] .* ERROR: Traceback \(most recent call last\)", job.text)
    assert "SIGABRT" not in job.text
    assert "terminate called" not in job.text
    # torchrun's own report has the error, too (@record)
    assert re.search(r"rank +: 1 ", job.text)
    assert job.text.count("ZeroDivisionError: boom") >= 2


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
    """Plain python has become torchrun. The signal reaches the ranks and their workers; they save
    and end."""
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
