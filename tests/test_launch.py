"""A script started by every launcher, also by mistake, and stopped by signals. It is the one with
the fewest imports; the lines that launch are the same in all.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
from helpers import ROOT, TWO_RANKS, environment, free_port, refusal
from runs import Run

SCRIPT = str(ROOT / "run_train_quantumgrav_ddp.py")
ENDLESS = ["--num_epochs=100000", "--save_every=1000000"]
# What a script does without its task. Its environment says which of the ranks fails.
DRIVER = """
import os

import run_train_quantumgrav_ddp as block


def main(args):
    block.setup_ddp(args)
    rank = block.dist.get_rank()
    if str(rank) == os.environ.get("FAILS"):
        raise block.InputError("no disk here")
    block.logging.error(f"after {block.gather(rank)}")
    return 0


if __name__ == "__main__":
    block.launch(block.parse_args, main)
"""


@pytest.fixture(scope="module")
def task(causal_sets):
    """task(output folder, *more): the arguments of a tiny run."""
    argv = f"""--data={causal_sets} --cache_dir={causal_sets.parent}/cache --split 0.4 0.3 0.3
        --hidden_dim=8 --head_dim=8 --num_layers=1 --num_epochs=2 --global_batch_size=48
        --batch_size=24 --log_every=1 --save_every=2 --timeout_minutes=1""".split()
    return lambda output, *more: [*argv, f"--output_dir={output}", *more]


@pytest.fixture
def driver(tmp_path):
    """Its command line."""
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


def test_torch_distributed_launch(start, task, tmp_path):
    """It gives --local-rank to each rank. (Plain python: test_alone.py; equal losses on any number
    of ranks: test_contract.py.)"""
    launcher = f"-m torch.distributed.launch --nproc_per_node=2 --master-port={free_port()}"
    job = start([sys.executable, *launcher.split(), SCRIPT, *task(tmp_path / "out")])
    assert job.wait() == 0, job.text
    assert job.is_gone()
    check_ranks(job.text, 2)
    for once in ("step=1 ", "Starting training epoch 1", "completed successfully!"):
        assert job.text.count(once) == 1, once
    assert Run(tmp_path / "out").summary["world_size"] == 2


EMPTY = "RANK= WORLD_SIZE= LOCAL_RANK= MASTER_ADDR= MASTER_PORT= NCCL_TIMEOUT= SLURM_PROCID="
VARIABLES = {  # of rank {0} of two on one machine
    "Open MPI": """OMPI_COMM_WORLD_RANK={0} OMPI_COMM_WORLD_SIZE=2
        OMPI_COMM_WORLD_LOCAL_RANK={0} OMPI_COMM_WORLD_LOCAL_SIZE=2""",
    "Hydra": "PMI_RANK={0} PMI_SIZE=2 MPI_LOCALRANKID={0} MPI_LOCALNRANKS=2",
    "PALS": "PALS_RANKID={0} PALS_LOCAL_RANKID={0} WORLD_SIZE=2",
    "PALS with PMI": "PALS_RANKID={0} PALS_LOCAL_RANKID={0} PMI_SIZE=2",
    "flux": "FLUX_TASK_RANK={0} FLUX_JOB_SIZE=2 FLUX_TASK_LOCAL_ID={0}",
    "SLURM": "SLURM_PROCID={0} SLURM_NTASKS=2 SLURM_LOCALID={0} SLURM_JOB_ID=77 SLURM_STEP_ID=0",
    "by hand": "RANK={0} WORLD_SIZE=2",
}
ALONE = {  # of what is one process
    "python in an sbatch file": "SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_JOB_ID=77",
    "empty": EMPTY,
}


def read_variables(words):
    return dict(word.split("=") for word in words.split())


def two_ranks(launcher="by hand", **more):
    """The environment variables of both."""
    common = {"MASTER_PORT": free_port(), **more}
    if launcher != "Hydra":  # on one machine it needs no address
        common["MASTER_ADDR"] = "localhost"
    words = VARIABLES[launcher]
    return [{**common, **read_variables(words.format(rank))} for rank in (0, 1)]


@pytest.mark.parametrize("launcher", [*VARIABLES, *ALONE])
def test_launchers_by_their_variables(server, driver, launcher):
    ranks = two_ranks(launcher) if launcher in VARIABLES else [read_variables(ALONE[launcher])]
    server.start(ranks, driver)
    assert set(server.wait()) == {0}, server.text
    check_ranks(server.text, len(ranks))
    assert server.text.count(f"ERROR: after {[0, 1][: len(ranks)]}") == len(ranks)


OPEN_MPI = "--allow-run-as-root --oversubscribe --bind-to none --mca plm isolated -n 2"


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
    assert result.stdout.count("ERROR: after [0, 1]") == 2


def test_nproc_per_node_in_a_shell_of_srun(start, driver):
    """srun --pty has made this shell its one task. Empty variables are as good as none. The port
    that is exported is taken: on one machine any free one will do."""
    variables = read_variables(f"{EMPTY} SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_LOCALID=0")
    with socket.create_server(("localhost", 0)) as other:
        variables.update(SLURM_STEP_ID=0, MASTER_PORT=other.getsockname()[1])
        command = [sys.executable, *driver, "--nproc_per_node=2"]
        job = start(command, PYTHONPATH=ROOT, **variables)
        assert job.wait() == 0, job.text
    check_ranks(job.text, 2)


# --------------------------------------------------------------------------------------------------
# Groups that cannot come together (of two commands: test_faults.py)


def test_several_machines_without_an_address(server, driver):
    server.start([read_variables("RANK=1 WORLD_SIZE=4 LOCAL_RANK=0")], driver)
    assert server.wait() == [2], server.text
    assert "export MASTER_ADDR" in refusal(server.text)


@pytest.mark.parametrize(("rank", "is_taken"), [(0, False), (1, False), (1, True)])
def test_a_rank_that_the_others_do_not_join(server, driver, rank, is_taken):
    """Nobody, or something that never answers, is at its port: --timeout_minutes holds."""
    variables = two_ranks()[rank]
    with socket.create_server(("", 0)) as other:
        if is_taken:
            variables["MASTER_PORT"] = other.getsockname()[1]
        server.start([variables], [*driver, "--timeout_minutes=0.05"])
        assert server.wait(40) in ([1], [-signal.SIGALRM]), server.text


def test_ctrl_c_while_the_others_are_awaited(server, driver):
    """It ends a rank at once."""
    server.start([two_ranks()[0]], driver)
    server.wait_for("Initializing DDP")
    time.sleep(1)
    os.kill(server.pids[0], signal.SIGINT)
    assert server.wait(20) == [-signal.SIGINT], server.text


def test_a_rank_that_fails_alone(server, driver):
    """It says so, and the other one does not wait for it."""
    server.start(two_ranks(FAILS=1), driver)
    assert server.wait(40) in ([1, 2], [-15, 2]), server.text
    assert "error: no disk here" in server.text


# --------------------------------------------------------------------------------------------------
# Signals (SIGTERM to one rank: test_contract.py)


def check_stopped(folder, text, reason):
    """After a step, which was saved."""
    run = Run(folder)
    steps = re.findall(r"INFO: step=(\d+) .* lr=", text)
    assert run.step == run.summary["steps"] == int(steps[-1]) >= 3
    assert run.summary["status"] == f"stopped by {reason}"
    assert text.count(f"INFO: stopped by {reason}: the same command ") == 1


@pytest.mark.parametrize(("name", "status"), [("SIGUSR1", 0), ("SIGINT", 1)])
def test_signal_to_one_rank(server, task, tmp_path, name, status):
    """As srun and scancel --signal send them: all ranks stop."""
    server.start(two_ranks("SLURM"), [SCRIPT, *task(tmp_path / "out", *ENDLESS)])
    server.wait_for("step=3 ")
    os.kill(server.pids[1], getattr(signal, name))
    assert server.wait() == [status, status], server.text
    check_stopped(tmp_path / "out", server.text, name)


LAUNCHERS = {"torchrun": [*TWO_RANKS, SCRIPT]}
LAUNCHERS["python"] = [sys.executable, SCRIPT, "--nproc_per_node=2"]  # it becomes torchrun


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_signals_to_the_launcher(start, task, tmp_path, launcher):
    """They reach the ranks and their workers, which save and end. Under nohup, torchrun takes
    SIGHUP all the same; plain python that has become torchrun outlives the terminal."""
    command = LAUNCHERS[launcher]
    job = start(["nohup", *command, *task(tmp_path / "out", *ENDLESS, "--num_workers=1")])
    job.wait_for("step=3 ")
    job.process.send_signal(signal.SIGHUP)
    if launcher == "python":
        last = re.findall(r"step=(\d+) ", job.text)[-1]
        job.wait_for(f"step={int(last) + 50} ")
        job.process.send_signal(signal.SIGTERM)
    # torchrun's status is 1; a thread of its own store may abort it at the very end
    assert job.wait(60) in (1, -signal.SIGABRT), job.text
    check_stopped(tmp_path / "out", job.text, "SIGHUP" if launcher == "torchrun" else "SIGTERM")
    assert job.is_gone()


def test_ranks_whose_shell_ends(start, task, tmp_path):
    """Started by hand, with nohup: they go on when their parent and their terminal are gone."""
    command = " ".join([sys.executable, SCRIPT, *task(tmp_path / "out", "--num_epochs=60")])
    ranks = " ".join(f"RANK={rank} WORLD_SIZE=2 nohup {command} &" for rank in (0, 1))
    end = f"until grep -q step=3 {tmp_path}/job.txt; do sleep 0.1; done"
    job = start(["bash", "-c", f"{ranks} {end}"], MASTER_PORT=free_port())
    assert job.wait() == 0
    for pid in job.processes():
        os.kill(pid, signal.SIGHUP)
    assert "step=100 " not in job.text  # or they were too fast for this test
    assert job.is_gone(60)
    assert job.text.count("completed successfully!") == 1, job.text[-3000:]
