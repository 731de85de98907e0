"""The shell wrappers, run for real, with stand-ins on PATH for torchrun, python and the queues."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from helpers import ROOT

SIGNALS = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
CORES = len(os.sched_getaffinity(0))
UNIREF50 = "run_train_uniref50_ddp.sh"
DPO = "scripts/run_dpo_ddp_local.sh"
LOCAL = {  # wrappers that start torchrun on this machine, and their script
    "run_ddp.sh": "train_ddp.py",
    UNIREF50: "run_train_uniref50_ddp.py",
    DPO: "run_dpo_ddp.py",
}
# prints its arguments and what it sees of the environment, then exits with $STATUS
RECORD = f"""#!{sys.executable}
import json, os, sys
name = os.path.basename(sys.argv[0])
record = {{"name": name, "argv": sys.argv[1:], "cwd": os.getcwd(), "parent": os.getppid()}}
print(json.dumps({{**record, "env": dict(os.environ)}}))
print(os.environ.get("LAST_LINE", ""))
print("to stderr", file=sys.stderr)
sys.exit(int(os.environ.get("STATUS", 0)))
"""
# what python is asked for: the number of GPUs, and to check the options and prepare a file
PYTHON = """#!/bin/sh
[ "$1" = -c ] && { echo "${GPUS-0}"; exit; }
echo "prepared: $RANK of $WORLD_SIZE at $MASTER_ADDR $*" >&2
exit "${PREPARED-0}"
"""
STUBS = {**dict.fromkeys(["torchrun", "srun", "mpiexec", "qsub"], RECORD), "python": PYTHON}
STUBS["qstat"] = '#!/bin/sh\necho "    Resource_List.walltime = ${WALLTIME-02:00:00}"\n'
STUBS["scontrol"] = '#!/bin/sh\n[ "$1" = show ] && printf "n7\\nn8\\n" || echo "scontrol $*"\n'


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a wrapper in an empty folder: run(wrapper, *arguments, **environment)."""
    (tmp_path / "stubs").mkdir()
    for name, text in STUBS.items():
        (tmp_path / "stubs" / name).write_text(text)
        (tmp_path / "stubs" / name).chmod(0o755)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")

    def call(wrapper, *arguments, **environment):
        command = [str(ROOT / wrapper), *map(str, arguments)]
        env = {"PATH": f"{tmp_path}/stubs:/usr/bin:/bin", **environment}
        return subprocess.run(command, env=env, timeout=30, capture_output=True, text=True)

    return call


def records(text):
    """What the stand-ins have printed."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def started(result):
    """(words of torchrun before the script, options of the script)"""
    assert result.returncode == 0, result.stderr
    (record,) = records(result.stdout)
    place = [word.endswith(".py") for word in record["argv"]].index(True)
    return record["argv"][:place], record["argv"][place + 1 :]


def refused(result):
    """What a wrong call says, which starts nothing."""
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    return result.stderr


@pytest.fixture(params=LOCAL)
def local(request, run):
    """local(count, *arguments, **environment): a wrapper that starts so many processes."""
    flag = ["--gpus"] if request.param == UNIREF50 else []
    return partial(run, request.param, *flag)


def test_one_machine(local):
    """The process becomes torchrun, which must not handle signals that nohup ignores."""
    (record,) = records(local(2, "--lr=1", "--a b", GPUS="8").stdout)
    where = ["--standalone", "--local-addr=127.0.0.1"]
    assert record["argv"][:4] == [*where, "--nproc_per_node=2", SIGNALS]
    assert Path(record["argv"][4]).resolve() == ROOT / LOCAL[local.args[0]]
    assert record["argv"][-2:] == ["--lr=1", "--a b"]
    assert record["cwd"] == os.getcwd()  # the user's relative paths stay valid
    assert record["env"]["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert record["env"]["OMP_NUM_THREADS"] == str(max(1, CORES // 2))
    assert record["parent"] == os.getpid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # conftest.py restores it
    assert started(local(1))[0][-1] == SIGNALS.replace("SIGHUP,", "")


def test_several_machines(local):
    nodes = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node0"}
    ports = {"29500": {}, "13456": {"SLURM_JOB_ID": "123456"}, "29501": {"MASTER_PORT": "29501"}}
    for port, variables in ports.items():
        where = ["--nnodes=2", "--node_rank=1", "--master_addr=node0", f"--master_port={port}"]
        argv, _ = started(local(1, **nodes, **variables))
        assert argv == [*where, "--nproc_per_node=1", SIGNALS]
    assert "set NODE_RANK and MASTER_ADDR" in refused(local(1, NNODES="2", NODE_RANK="1"))


def test_count(local):
    """GPUs limit it, and where there are none, or none is used, the cores."""
    assert "not 'two'" in refused(local("two"))
    assert "2 GPU(s)" in refused(local(3, GPUS="2"))
    for arguments in (["--device", "cpu"], ["device=cpu"], ["--no_cuda"]):
        assert started(local(CORES, *arguments, GPUS="99", OMP_NUM_THREADS="1"))
        assert f"{CORES} CPU core(s)" in refused(local(CORES + 1, *arguments, GPUS="99"))


def test_help(run):
    for wrapper in (*LOCAL, "scripts/run_ddp_slurm.sh"):
        assert "\nUsage" in run(wrapper, "--help").stdout


STARTED = [  # a wrapper, words, processes where there are eight GPUs, options of the script
    ("run_ddp.sh", "4 False d=*", 4, "--use_projection=False d=*"),
    ("run_ddp.sh", "lr=1", 8, "--use_projection=True lr=1"),
    (DPO, "--lr=1", 8, "--lr=1"),
    (DPO, "--no_cuda", min(2, CORES), "--no_cuda"),
    (UNIREF50, "--config=my.yaml --yes", 8, "--config=my.yaml"),
    (UNIREF50, "--config=my.yaml --device=cpu", min(2, CORES), "--config=my.yaml --device=cpu"),
]


@pytest.mark.parametrize(("wrapper", "words", "count", "options"), STARTED)
def test_what_is_started(run, wrapper, words, count, options):
    argv, own = started(run(wrapper, *words.split(), GPUS="8"))
    assert f"--nproc_per_node={count}" in argv
    assert own[-len(options.split()) :] == options.split()


# of run_train_uniref50_ddp.sh, and the options of the script
FLAGS = {"config": "config", "datafile": "datafile", "seed": "seed", "work-dir": "output_dir"}
FLAGS |= {"project": "wandb_project", "name": "wandb_name", "method": "sampling_method"}


@pytest.mark.parametrize("flag", FLAGS)
def test_flag_of_uniref50(run, flag):
    """In each of its forms. (Whether the script has such an option: test_readme.py.)"""
    option = f"--{FLAGS[flag]}"
    assert started(run(UNIREF50, f"--{flag}", "a b"))[1][-2:] == [option, "a b"]
    assert started(run(UNIREF50, f"-{flag[0]}", "a b"))[1][-2:] == [option, "a b"]
    assert started(run(UNIREF50, f"--{flag}=a b"))[1][-1] == f"{option}=a b"


def test_what_uniref50_passes_on(run):
    """Options in their order, after a config. What the script refuses starts nothing."""
    config = "configs/config_uniref50_ddp.yaml"
    own = ["--lr=1e-4", "training.batch_size=8", "--fresh", "--max_minutes", "5", "--seed=1"]
    result = run(UNIREF50, *own, RANK="3", WORLD_SIZE="8")
    options = [f"--config={ROOT / config}", *own]
    assert started(result)[1] == options
    said = f"prepared: 0 of 1 at localhost {ROOT}/run_train_uniref50_ddp.py"
    assert " ".join([said, *options, "--prepare_only"]) in result.stderr.splitlines()
    assert "prepared: " in refused(run(UNIREF50, "--lr=x", PREPARED="2"))
    Path("configs").mkdir()
    Path(config).touch()
    assert started(run(UNIREF50))[1] == [f"--config={config}"]


def test_dpo_keeps_logs(run):
    result = run(DPO, "--config", "a b.yaml", "--lr=1e-6")
    assert started(result)[1] == ["--config", "a b.yaml", "--lr=1e-6"]
    err, out = sorted(Path("logs").glob("dpo_ddp_*"))
    assert out.read_text() == result.stdout
    assert err.read_text() == result.stderr == "to stderr\n"


def test_aurora(run):
    """All tiles of all nodes. Submitted again when time was up, if asked for; not if it failed."""
    Path("nodes").write_text("x1c0.hostmgmt.cm.aurora\nx1c0.hostmgmt.cm.aurora\nx1c1.hostmgmt\n")
    job = {"PBS_NODEFILE": "nodes", "PBS_JOBID": "1234567.aurora", "PBS_JOBNAME": "mine"}
    job.update(PBS_O_WORKDIR=os.getcwd(), ZE_AFFINITY_MASK="0", OPTIONS="--lr 1e-6 --backend ccl")
    job["LAST_LINE"] = "stopped by time limit: the same command (without --fresh) goes on"

    def aurora(status=0, **environment):
        """What it has started."""
        log = Path("logs/dpo_ddp_1234567.aurora.out")
        log.unlink(missing_ok=True)
        result = run("scripts/run_dpo_ddp_aurora.sh", STATUS=str(status), **job, **environment)
        assert result.returncode == status
        return records(log.read_text())

    (record,) = aurora(status=5, REQUEUE="1")
    env = record["env"]
    assert env["WORLD_SIZE"] == "24"
    assert env["MASTER_ADDR"] == "x1c0.hsn.cm.aurora.alcf.anl.gov"
    assert env["MASTER_PORT"] == "24567"
    assert "ZE_AFFINITY_MASK" not in env  # or all ranks of a node would share a tile
    assert [record["name"], *record["argv"][:4]] == ["mpiexec", "-n", "24", "-ppn", "12"]
    words = "--config configs/run_dpo_ddp.yaml --output_dir outputs/dpo_ddp_mine --max_minutes 115"
    script = record["argv"].index("run_dpo_ddp.py")
    assert record["argv"][script + 1 :] == [*words.split(), "--lr", "1e-6", "--backend", "ccl"]
    assert len(aurora()) == 1
    _, again = aurora(REQUEUE="1")
    assert again["name"] == "qsub"
    assert again["argv"][-1].endswith("scripts/run_dpo_ddp_aurora.sh")
    assert "OUTPUT_DIR=outputs/dpo_ddp_mine" in again["argv"][-2]
    assert "--fresh=False" in again["argv"][-2], "it would start anew each time"
    # a limit of 0 minutes would be none
    assert run("scripts/run_dpo_ddp_aurora.sh", WALLTIME="00:05:00", **job).returncode == 2


def test_slurm(run):
    """One process for each task. The job is queued again where the script asks for it."""
    job = {"SLURM_JOB_ID": "123456", "SLURM_JOB_NODELIST": "n[7-8]", "SLURM_CPUS_PER_TASK": "8"}
    job.update(MASTER_ADDR="stale", MASTER_PORT="1")
    slurm = partial(run, "scripts/run_ddp_slurm.sh", **job)

    result = slurm("other.py", "--lr=1", "a b")
    (record,) = records(result.stdout)
    launch = ["--mpi=none", "--kill-on-bad-exit=1", "--cpus-per-task=8"]
    assert record["argv"] == [*launch, "python", "other.py", "--lr=1", "a b"]
    assert record["env"]["MASTER_ADDR"] == "n7"
    assert record["env"]["MASTER_PORT"] == "13456"
    assert result.returncode == 0
    assert "scontrol" not in result.stdout

    stopped = "[RANK 0] 2025-01-15 14:23:45 INFO: stopped by SIGUSR1: the same command"
    result = slurm("--fresh", LAST_LINE=stopped, SLURM_RESTART_COUNT="1")
    assert records(result.stdout)[0]["argv"][-3:] == ["train_ddp.py", "--fresh", "--fresh=False"]
    assert result.stdout.splitlines()[-1] == "scontrol requeue 123456"
    assert result.returncode == 0
    failed = slurm(LAST_LINE=stopped, STATUS="9")
    assert failed.returncode == 9
    assert "scontrol" not in failed.stdout
