"""A script started by every launcher, and stopped by signals.

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

import pytest
import torch
from helpers import ROOT, environment, free_port, write_causal_sets

SCRIPT = str(ROOT / "run_train_quantumgrav_ddp.py")
ENDLESS = ["--num_epochs=100000", "--save_every=1000000"]
DRIVER = """
import run_train_quantumgrav_ddp as block


def main(args):
    block.setup_ddp(args)
    block.logging.error(f"after {block.sum_over_ranks(block.torch.ones(1))}")


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
    """The command line of what a script does without its task."""
    path = tmp_path / "driver.py"
    path.write_text(DRIVER)
    return [str(path), "--device=cpu"]


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
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        losses.append([row["loss"] for row in rows if "loss" in row])
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
    server.start(variables_of(launcher), driver)
    assert server.wait() == [0, 0], server.text
    check_ranks(server.text, 2)
    assert server.text.count("ERROR: after [2.0]") == 2


def test_python_in_an_sbatch_file_is_one_process(server, driver):
    """There, Slurm's variables of a rank are set, too, but there is no step, and no second rank."""
    variables = variables_of("SLURM")[0]
    for name in ("SLURM_STEP_ID", "MASTER_ADDR", "MASTER_PORT"):
        del variables[name]
    server.start([variables], driver)
    assert server.wait() == [0], server.text
    check_ranks(server.text, 1)


def test_a_rank_without_a_world_size(server, driver):
    server.start([{"RANK": 0}], driver)
    assert server.wait() == [2], server.text
    assert "RANK is set, but not WORLD_SIZE" in server.text


OPEN_MPI = "--allow-run-as-root --oversubscribe --bind-to none -n 2 --map-by ppr:2:node"


@pytest.mark.parametrize(
    ("package", "program", "options"),
    [("openmpi-bin", "mpiexec.openmpi", OPEN_MPI), ("mpich", "mpiexec.hydra", "-n 2 -ppn 2")],
)
def test_mpiexec(package, program, options, driver):
    """The real launchers: two ranks, each with its own number."""
    mpiexec = shutil.which(program)
    if mpiexec is None:
        pytest.skip(f"{program} is not installed (Debian: {package})")
    command = [mpiexec, *options.split(), sys.executable, *driver]
    env = environment(MASTER_PORT=free_port(), PYTHONPATH=ROOT)
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    check_ranks(result.stdout, 2)
    assert result.stdout.count("ERROR: after [2.0]") == 2


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
    # torchrun's status is 1; a thread of its own store may abort it at the very end
    assert job.wait(60) in (1, -signal.SIGABRT), job.text
    check_stopped(tmp_path / "out", job.text, "SIGTERM")
    assert job.is_gone()


@pytest.mark.parametrize(("name", "status"), [("SIGUSR1", 0), ("SIGINT", 130)])
def test_signal_to_one_rank(server, task, tmp_path, name, status):
    """As srun and scancel --signal send them: all ranks stop."""
    server.start(variables_of("SLURM"), [SCRIPT, *task(tmp_path / "out", *ENDLESS)])
    server.wait_for("step=3 ")
    os.kill(server.pids[1], getattr(signal, name))
    assert server.wait() == [status, status], server.text
    check_stopped(tmp_path / "out", server.text, name)
