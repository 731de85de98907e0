"""A script started by every launcher, also by mistake, and stopped by signals: the one with the
fewest imports, as the lines that launch are the same in all."""

import os
import re
import signal
import socket
import sys
import time
from multiprocessing import connection

import pytest
from helpers import ROOT, TWO_RANKS, free_port, refusal
from runs import Run

SCRIPT = str(ROOT / "run_train_quantumgrav_ddp.py")


@pytest.fixture
def endless(causal_sets, tmp_path):
    """The command line of a tiny run that does not end by itself."""
    argv = f"""--data={causal_sets} --cache_dir={causal_sets.parent}/cache
        --output_dir={tmp_path}/out --hidden_dim=8 --head_dim=8 --num_layers=1 --num_epochs=100000
        --global_batch_size=48 --batch_size=24 --log_every=1 --save_every=1000000 --device=cpu"""
    return [SCRIPT, *argv.split()]


@pytest.fixture
def reading(endless):
    """The command line of one that ends when the data are read."""
    return [*endless, "--prepare_only"]


def check_ranks(text, world_size):
    """Each has its own number, and all have met."""
    for number in range(world_size):
        assert text.count(f"Process {number}/{world_size} started") == 1
    assert text.count(f"{world_size} ranks, gloo on cpu") == 1
    assert text.count("The data are read") == 1


EMPTY = "RANK= WORLD_SIZE= LOCAL_RANK= MASTER_ADDR= MASTER_PORT= NCCL_TIMEOUT= SLURM_PROCID="
VARIABLES = {  # of rank {0} of two on one machine, which needs no address
    "Open MPI": """OMPI_COMM_WORLD_RANK={0} OMPI_COMM_WORLD_SIZE=2
        OMPI_COMM_WORLD_LOCAL_RANK={0} OMPI_COMM_WORLD_LOCAL_SIZE=2""",
    "Hydra": "PMI_RANK={0} PMI_SIZE=2 MPI_LOCALRANKID={0} MPI_LOCALNRANKS=2",
    "PALS": "PALS_RANKID={0} PALS_LOCAL_RANKID={0} WORLD_SIZE=2",
    "PALS with PMI": "PALS_RANKID={0} PALS_LOCAL_RANKID={0} PMI_SIZE=2",
    "flux": "FLUX_TASK_RANK={0} FLUX_JOB_SIZE=2 FLUX_TASK_LOCAL_ID={0}",
    "SLURM": "SLURM_PROCID={0} SLURM_NTASKS=2 SLURM_LOCALID={0} SLURM_JOB_ID=77 SLURM_STEP_ID=0",
    "by hand": "RANK={0} WORLD_SIZE=2",
    # of what is one process
    "python in an sbatch file": "SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_JOB_ID=77",
    "empty": EMPTY,
}


def read_variables(words):
    return dict(word.split("=") for word in words.split())


def variables_of_ranks(launcher):
    words = VARIABLES[launcher]
    port = free_port()
    ranks = (0, 1) if "{0}" in words else (0,)
    return [{"MASTER_PORT": port, **read_variables(words.format(rank))} for rank in ranks]


@pytest.mark.parametrize("launcher", VARIABLES)
def test_launchers_by_their_variables(server, reading, launcher):
    ranks = variables_of_ranks(launcher)
    server.start(ranks, reading)
    assert set(server.wait()) == {0}, server.text
    check_ranks(server.text, len(ranks))


LATE = """
import time
import run_train_quantumgrav_ddp as script

def main(args):
    script.setup_ddp(args)
    if script.dist.get_rank() == 0:
        time.sleep(2)
        print("rank 0 has written")
    return 0

script.launch(script.parse_args, main)
"""


def test_no_rank_ends_while_rank_0_writes(server, tmp_path):
    """mpiexec would kill rank 0."""
    (tmp_path / "late.py").write_text(LATE)
    ranks = [{**variables, "PYTHONPATH": ROOT} for variables in variables_of_ranks("by hand")]
    server.start(ranks, [str(tmp_path / "late.py"), "--device=cpu"])
    connection.wait([rank.sentinel for rank in server.ranks])
    assert "rank 0 has written" in server.text
    assert set(server.wait()) == {0}


def test_torch_distributed_launch(start, reading):
    """It gives --local-rank to each rank."""
    launch = "-m torch.distributed.launch --standalone --nproc_per_node=2".split()
    job = start([sys.executable, *launch, *reading])
    assert job.wait() == 0, job.text
    check_ranks(job.text, 2)


def test_nproc_per_node_in_a_shell_of_srun(start, reading):
    """srun --pty has made this shell its one task. The port that is exported is taken."""
    variables = read_variables(f"{EMPTY} SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_LOCALID=0")
    with socket.create_server(("localhost", 0)) as other:
        variables.update(SLURM_STEP_ID=0, MASTER_PORT=other.getsockname()[1])
        job = start([sys.executable, *reading, "--nproc_per_node=2"], **variables)
        assert job.wait() == 0, job.text
    check_ranks(job.text, 2)


def test_several_machines_without_an_address(server, reading):
    server.start([{"RANK": 1, "WORLD_SIZE": 4, "LOCAL_RANK": 0}], reading)
    assert server.wait() == [2], server.text
    assert "export MASTER_ADDR" in refusal(server.text)


@pytest.mark.parametrize(("rank", "is_taken"), [(0, False), (1, False), (1, True)])
def test_a_rank_that_the_others_do_not_join(server, reading, rank, is_taken):
    """Nobody, or something that never answers, is at its port: --timeout_minutes holds."""
    variables = variables_of_ranks("by hand")[rank]
    with socket.create_server(("", 0)) as other:
        if is_taken:
            variables["MASTER_PORT"] = other.getsockname()[1]
        server.start([variables], [*reading, "--timeout_minutes=0.05"])
        assert server.wait(40) in ([1], [-signal.SIGALRM]), server.text


def test_ctrl_c_while_the_others_are_awaited(server, reading):
    """It ends a rank at once."""
    server.start([variables_of_ranks("by hand")[0]], reading)
    server.wait_for("Initializing DDP")
    time.sleep(1)
    os.kill(server.pids[0], signal.SIGINT)
    assert server.wait(20) == [-signal.SIGINT], server.text


def check_stopped(folder, text, reason):
    """After a step, which was saved."""
    run = Run(folder)
    steps = re.findall(r"INFO: step=(\d+) .* lr=", text)
    assert run.step == run.summary["steps"] == int(steps[-1]) >= 3
    assert run.summary["status"] == f"stopped by {reason}"
    assert text.count(f"INFO: stopped by {reason}: the same command ") == 1


@pytest.mark.parametrize(("name", "status"), [("SIGUSR1", 0), ("SIGINT", 1)])
def test_signal_to_one_rank(server, endless, tmp_path, name, status):
    """As srun and scancel --signal send them: all ranks stop."""
    server.start(variables_of_ranks("SLURM"), endless)
    server.wait_for("step=3 ")
    os.kill(server.pids[1], getattr(signal, name))
    assert server.wait() == [status, status], server.text
    check_stopped(tmp_path / "out", server.text, name)


@pytest.mark.parametrize("launcher", ["torchrun", "python"])
def test_signals_to_the_launcher(start, endless, tmp_path, launcher):
    """All save and end. Under nohup torchrun takes SIGHUP all the same, plain python does not."""
    command = [*TWO_RANKS, *endless, "--num_workers=1"]
    if launcher == "python":
        command = [sys.executable, *endless, "--num_workers=1", "--nproc_per_node=2"]
    job = start(["nohup", *command])
    job.wait_for("step=3 ")
    os.kill(job.pids[0], signal.SIGHUP)
    if launcher == "python":
        last = re.findall(r"step=(\d+) ", job.text)[-1]
        job.wait_for(f"step={int(last) + 50} ")
        os.kill(job.pids[0], signal.SIGTERM)
    # torchrun's status is 1; a thread of its own store may abort it at the very end
    assert job.wait(60) in (1, -signal.SIGABRT), job.text
    check_stopped(tmp_path / "out", job.text, "SIGHUP" if launcher == "torchrun" else "SIGTERM")
