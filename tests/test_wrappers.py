"""The shell wrappers, run for real with stand-ins for torchrun, nvidia-smi and SLURM on PATH."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, SIGNALS

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
VARIABLES = """CUDA_VISIBLE_DEVICES ZE_AFFINITY_MASK NNODES NODE_RANK MASTER_ADDR MASTER_PORT
    OMP_NUM_THREADS OMP_THREAD_LIMIT TORCH_DISABLE_SHARE_RDZV_TCP_STORE PYTHON""".split()
ALL_GPUS = "0,1,2,3,4,5,6,7"
# Prints its arguments and what it sees of the environment, then exits with $STATUS.
RECORD = f"""#!{sys.executable}
import json, os, sys
names = ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
         "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
seen = {{name: os.environ.get(name) for name in names}}
record = {{"argv": sys.argv[1:], "cwd": os.getcwd(), "env": seen, "parent": os.getppid()}}
print(json.dumps(record))
print(os.environ.get("LAST_LINE", ""), file=sys.stderr)
sys.exit(int(os.environ.get("STATUS", 0)))
"""


@pytest.fixture
def run(tmp_path):
    """Runs a wrapper in an empty folder: run(wrapper, *arguments, **environment)."""
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    folder = tmp_path / "elsewhere"
    folder.mkdir()

    def stub(name, text):
        (stubs / name).write_text(text)
        (stubs / name).chmod(0o755)

    def call(wrapper, *arguments, **environment):
        env = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        env.update({"PATH": f"{stubs}:/usr/bin:/bin", **environment})
        command = ["bash", str(ROOT / wrapper), *arguments]
        options = {"env": env, "cwd": folder, "timeout": 30}
        return subprocess.run(command, capture_output=True, text=True, **options)

    call.stub = stub
    call.folder = folder
    stub("torchrun", RECORD)
    stub("nvidia-smi", "#!/bin/sh\nexit 9\n")
    # what torch sees: as many as there are commas and one, or nothing
    seen = 'echo "$CUDA_VISIBLE_DEVICES" | tr , "\\n" | wc -l'
    count = f'case "$CUDA_VISIBLE_DEVICES" in "" | -1) echo 0 ;; *) {seen} ;; esac'
    stub("python", f"#!/bin/sh\n{count}\n")
    return call


def started(result):
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def refused(result):
    """The one line of a wrong call, which starts nothing."""
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    return result.stderr


def test_single_node(run):
    record = started(run("run_ddp.sh", "8", "True", CUDA_VISIBLE_DEVICES=ALL_GPUS))
    launch = ["--standalone", "--nproc_per_node=8", *SIGNALS]
    assert record["argv"] == [*launch, str(ROOT / "train_ddp.py"), "--use_projection=True"]
    assert record["cwd"] == str(run.folder.resolve())  # the user's relative paths stay valid
    assert record["env"]["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert int(record["env"]["OMP_NUM_THREADS"]) >= 1
    assert record["parent"] == os.getpid()  # exec: signals to the wrapper reach torchrun


@pytest.mark.parametrize(
    ("arguments", "ngpus", "passed_on"),
    [
        ([], "8", ["--use_projection=True"]),
        (["2"], "2", ["--use_projection=True"]),
        (["4", "False", "--a b", "d=*"], "4", ["--use_projection=False", "--a b", "d=*"]),
        (["4", "--lr=1"], "4", ["--use_projection=True", "--lr=1"]),
        (["--lr", "1"], "8", ["--use_projection=True", "--lr", "1"]),
        (["lr=1"], "8", ["--use_projection=True", "lr=1"]),
        (["4", "0", "--use_projection=1"], "4", ["--use_projection=0", "--use_projection=1"]),
    ],
)  # fmt: skip
def test_arguments(run, arguments, ngpus, passed_on):
    argv = started(run("run_ddp.sh", *arguments, CUDA_VISIBLE_DEVICES=ALL_GPUS))["argv"]
    assert argv[1] == f"--nproc_per_node={ngpus}"
    assert argv[5:] == passed_on


def test_exit_status_is_torchruns(run):
    result = run("run_ddp.sh", "1", CUDA_VISIBLE_DEVICES="0", STATUS="137")
    assert result.returncode == 137
    assert "nproc_per_node=1" in result.stdout


@pytest.mark.parametrize("count", ["0", "-1", "two", "", "99999999999999999999"])
def test_bad_count(run, count):
    assert f"not '{count}'" in refused(run("run_ddp.sh", count, CUDA_VISIBLE_DEVICES="0"))


def test_bad_projection(run):
    line = refused(run("run_ddp.sh", "1", "Maybe", CUDA_VISIBLE_DEVICES="0"))
    assert "USE_PROJECTION must be True or False, not 'Maybe'" in line


def test_visible_gpus_limit_the_count(run):
    run.stub("python", "#!/bin/sh\necho 2\n")
    assert "--nproc_per_node=2" in started(run("run_ddp.sh", "2"))["argv"]
    assert "NGPUS is 3 but 2 GPU(s) are visible" in refused(run("run_ddp.sh", "3"))


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        ([], {}),
        ([], {"CUDA_VISIBLE_DEVICES": ""}),
        ([], {"CUDA_VISIBLE_DEVICES": "-1"}),
        (["--device", "cpu"], {"CUDA_VISIBLE_DEVICES": "0"}),
        (["--device=cpu"], {"CUDA_VISIBLE_DEVICES": "0"}),
    ],
)
def test_without_a_gpu_the_cores_limit_the_count(run, arguments, environment):
    environment = {**environment, "OMP_NUM_THREADS": "1"}  # says nothing about the cores
    record = started(run("run_ddp.sh", str(CORES), "True", *arguments, **environment))
    assert f"--nproc_per_node={CORES}" in record["argv"]
    assert record["env"]["OMP_NUM_THREADS"] == "1"
    line = refused(run("run_ddp.sh", str(CORES + 1), "True", *arguments, **environment))
    assert f"NGPUS is {CORES + 1} but there is no GPU and {CORES} CPU core(s)" in line


def test_asks_the_real_torch(run):
    run.stub("python", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    import torch

    gpus = torch.accelerator.device_count()
    line = refused(run("run_ddp.sh", "9999"))
    assert (f"but {gpus} GPU(s)" if gpus else "but there is no GPU") in line


def test_environment_without_torch(run):
    run.stub("python", "#!/bin/sh\nexit 1\n")
    assert "no working torch" in refused(run("run_ddp.sh", "1"))
    line = refused(run("run_ddp.sh", "1", PATH="/usr/bin:/bin", CUDA_VISIBLE_DEVICES="0"))
    assert "no torchrun on PATH" in line


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize("wrapper", ["run_ddp.sh", "scripts/run_ddp_slurm.sh"])
def test_help(run, wrapper, flag):
    result = run(wrapper, flag)
    assert result.returncode == 0
    assert result.stderr == ""
    assert "\nUsage" in result.stdout
    assert not any(line.startswith(("#", "set ")) for line in result.stdout.splitlines())


def test_several_nodes(run):
    nodes = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node0", "CUDA_VISIBLE_DEVICES": "0"}
    where = ["--nnodes=2", "--node_rank=1", "--master_addr=node0"]
    argv = started(run("run_ddp.sh", "1", **nodes))["argv"]
    assert argv[:4] == [*where, "--master_port=29500"]
    assert "--standalone" not in argv
    argv = started(run("run_ddp.sh", "1", **nodes, MASTER_PORT="29501"))["argv"]
    assert argv[:4] == [*where, "--master_port=29501"]


@pytest.mark.parametrize("missing", ["NODE_RANK", "MASTER_ADDR"])
def test_incomplete_nodes(run, missing):
    nodes = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node0", "CUDA_VISIBLE_DEVICES": "0"}
    nodes[missing] = ""
    assert f"set {missing}, too" in refused(run("run_ddp.sh", "1", **nodes))


@pytest.fixture
def slurm(run):
    """A job of two nodes, seen from its batch script."""
    run.stub("srun", RECORD)
    nodes = 'printf "n7\\nn8\\n"'
    run.stub("scontrol", f'#!/bin/sh\n[ "$1" = show ] && {nodes} || echo "scontrol $*"\n')
    (run.folder / "train_ddp.py").touch()
    (run.folder / "other.py").touch()

    def call(*arguments, **environment):
        job = {
            "SLURM_JOB_ID": "123456",
            "SLURM_JOB_NODELIST": "n[7-8]",
            "SLURM_NTASKS": "16",
            "SLURM_CPUS_PER_TASK": "8",
        }
        return run("scripts/run_ddp_slurm.sh", *arguments, **{**job, **environment})

    call.run = run
    return call


def srun_record(result):
    return json.loads(next(line for line in result.stdout.splitlines() if line[0] == "{"))


def test_slurm_starts_one_process_per_task(slurm):
    result = slurm("other.py", "--lr=1", "a b", MASTER_ADDR="stale", MASTER_PORT="1")
    record = srun_record(result)
    launch = ["--mpi=none", "--kill-on-bad-exit=1", "--cpus-per-task=8"]
    assert record["argv"] == [*launch, "python", "other.py", "--lr=1", "a b"]
    assert record["env"]["MASTER_ADDR"] == "n7"
    assert record["env"]["MASTER_PORT"] == "13456"
    assert result.returncode == 0
    assert "scontrol" not in result.stdout


def test_slurm_requeues_only_when_the_script_asks(slurm):
    asks = "[RANK 0] 2025-01-15 14:23:45 INFO: stopped by SIGUSR1: the same command goes on"
    result = slurm("--fresh", LAST_LINE=asks)
    assert srun_record(result)["argv"][-2:] == ["train_ddp.py", "--fresh"]
    assert result.stdout.splitlines()[-1] == "scontrol requeue 123456"
    assert result.returncode == 0
    failed = slurm(LAST_LINE=asks, STATUS="9")
    assert failed.returncode == 9
    assert "scontrol" not in failed.stdout
    again = slurm("--fresh", SLURM_RESTART_COUNT="1")  # goes on instead of starting anew
    assert srun_record(again)["argv"][-2:] == ["--fresh", "--fresh=False"]


def test_slurm_wrong_calls(slurm):
    assert "not in a SLURM job" in refused(slurm(SLURM_JOB_ID=""))
    assert "submit from the root of the repository" in refused(slurm("missing.py"))


def test_shellcheck():
    beside = Path(sys.executable).with_name("shellcheck")
    shellcheck = str(beside) if beside.exists() else shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed (pip install -r requirements-dev.txt)")
    wrappers = sorted([*ROOT.glob("*.sh"), *ROOT.glob("scripts/*.sh"), ROOT / ".ci/run"])
    assert ROOT / "run_ddp.sh" in wrappers
    result = subprocess.run([shellcheck, *wrappers], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    assert [path.name for path in wrappers if not os.access(path, os.X_OK)] == []
