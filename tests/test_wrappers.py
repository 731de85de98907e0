"""The shell wrappers, run for real, with stand-ins on PATH for torchrun, python and the queues."""

import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from helpers import ROOT, parse_arguments

SIGNALS = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
CORES = len(os.sched_getaffinity(0))
LOCAL = {  # wrappers that start torchrun on this machine, and their script
    "run_ddp.sh": "train_ddp.py",
    "run_train_uniref50_ddp.sh": "run_train_uniref50_ddp.py",
    "scripts/run_dpo_ddp_local.sh": "run_dpo_ddp.py",
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


@pytest.fixture
def run(tmp_path):
    """Runs a wrapper in an empty folder: run(wrapper, *arguments, **environment)."""
    stubs = tmp_path / "stubs"
    stubs.mkdir()

    def stub(name, text):
        (stubs / name).write_text(text)
        (stubs / name).chmod(0o755)

    def call(wrapper, *arguments, **environment):
        command = [str(ROOT / wrapper), *map(str, arguments)]
        env = {"PATH": f"{stubs}:/usr/bin:/bin", **environment}
        options = {"env": env, "cwd": call.folder, "timeout": 30}
        return subprocess.run(command, capture_output=True, text=True, **options)

    call.stub = stub
    call.folder = tmp_path / "elsewhere"
    call.folder.mkdir()
    for name in ("torchrun", "srun", "mpiexec", "qsub"):
        stub(name, RECORD)
    stub("python", PYTHON)
    return call


def records(text):
    """What the stand-ins have printed."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def started(result):
    """What torchrun was called with; `options` are the script's."""
    assert result.returncode == 0, result.stderr
    (record,) = records(result.stdout)
    place = [word.endswith(".py") for word in record["argv"]].index(True)
    record["script"] = Path(record["argv"][place]).resolve()
    record["options"] = record["argv"][place + 1 :]
    record["argv"] = record["argv"][:place]
    return record


def refused(result):
    """What a wrong call says, which starts nothing."""
    assert result.returncode in (1, 2)
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    return result.stderr


# --------------------------------------------------------------------------------------------------
# What the three wrappers of one machine have in common


@pytest.fixture(params=LOCAL)
def local(request, run):
    """local(count, *arguments, **environment): a wrapper that starts so many processes."""
    flag = ["--gpus"] if "uniref50" in request.param else []
    return partial(run, request.param, *flag)


def test_one_machine(local, request, run):
    """The process becomes torchrun, which gets its signals, in the user's folder. Those that nohup
    ignores torchrun must not handle: it would end the run."""
    record = started(local(2, "--lr=1", "--a b", GPUS="8"))
    where = ["--standalone", "--local-addr=127.0.0.1"]
    assert record["argv"] == [*where, "--nproc_per_node=2", SIGNALS]
    assert record["script"] == ROOT / LOCAL[request.node.callspec.params["local"]]
    assert record["options"][-2:] == ["--lr=1", "--a b"]
    assert record["cwd"] == str(run.folder.resolve())  # the user's relative paths stay valid
    assert record["env"]["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert int(record["env"]["OMP_NUM_THREADS"]) >= 1
    assert record["parent"] == os.getpid()

    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # conftest.py restores it
    assert started(local(1))["argv"][-1] == SIGNALS.replace("SIGHUP,", "")


def test_several_machines(local):
    nodes = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node0"}
    ports = {"29500": {}, "13456": {"SLURM_JOB_ID": "123456"}, "29501": {"MASTER_PORT": "29501"}}
    for port, variables in ports.items():
        argv = started(local(1, **nodes, **variables))["argv"]
        where = ["--nnodes=2", "--node_rank=1", "--master_addr=node0", f"--master_port={port}"]
        assert argv == [*where, "--nproc_per_node=1", SIGNALS]
    for name in ("NODE_RANK", "MASTER_ADDR"):
        assert "set NODE_RANK and MASTER_ADDR" in refused(local(1, **{**nodes, name: ""}))


def test_count(local):
    """GPUs limit it, and where there are none the cores, whatever the number of threads."""
    for count in ("0", "two", ""):
        assert f"not '{count}'" in refused(local(count))
    assert "--nproc_per_node=2" in started(local(2, GPUS="2"))["argv"]
    assert re.search(r"is 3 but .*2 GPU\(s\)", refused(local(3, GPUS="2")))

    for arguments, gpus in (([], "0"), (["--device", "cpu"], "99"), (["device=cpu"], "99")):
        record = started(local(CORES, *arguments, GPUS=gpus, OMP_NUM_THREADS="1"))
        assert f"--nproc_per_node={CORES}" in record["argv"]
        assert record["env"]["OMP_NUM_THREADS"] == "1"
        line = refused(local(CORES + 1, *arguments, GPUS=gpus))
        assert re.search(rf"is {CORES + 1} but .*{CORES} CPU core\(s\)", line)


def test_help(run):
    for wrapper in (*LOCAL, "scripts/run_ddp_slurm.sh"):
        result = run(wrapper, "--help")
        assert (result.returncode, result.stderr) == (0, "")
        assert "\nUsage" in result.stdout and "\nset " not in result.stdout


# --------------------------------------------------------------------------------------------------
# What each has of its own


def test_count_and_projection(run):
    expected = {  # words: number of processes, options of the script
        "": ("8", "--use_projection=True"),
        "4 False d=*": ("4", "--use_projection=False d=*"),
        "4 --lr=1": ("4", "--use_projection=True --lr=1"),
        "lr=1": ("8", "--use_projection=True lr=1"),
        "4 0 --use_projection=1": ("4", "--use_projection=0 --use_projection=1"),
    }
    for words, (count, options) in expected.items():
        record = started(run("run_ddp.sh", *words.split(), GPUS="8"))
        assert record["argv"][2] == f"--nproc_per_node={count}"
        assert record["options"] == options.split()


CONFIG = "configs/config_uniref50_ddp.yaml"
UNIREF50 = "run_train_uniref50_ddp.sh"


def test_default_config_and_counts(run):
    """The config of the folder, else that beside the wrapper; all GPUs, else two processes."""
    assert started(run(UNIREF50))["options"] == [f"--config={ROOT / CONFIG}"]
    (run.folder / "configs").mkdir()
    (run.folder / CONFIG).touch()
    record = started(run(UNIREF50))
    assert record["options"] == [f"--config={CONFIG}"]
    assert record["argv"][2] == f"--nproc_per_node={min(2, CORES)}"
    assert started(run(UNIREF50, GPUS="3"))["argv"][2] == "--nproc_per_node=3"


def test_flags(run):
    """The script takes each flag, in each of its forms, and gets the value unchanged."""
    import run_train_uniref50_ddp as script

    (run.folder / "mine.yaml").write_text("n_iters: 3\n")
    flags = {  # a value, and the option of the script
        "--config": (str(run.folder / "mine.yaml"), "config"),
        "--work-dir": ("out", "output_dir"),
        "--datafile": ("mine.fasta", "datafile"),
        "--project": ("proteins", "wandb_project"),
        "--name": ("a b", "wandb_name"),
        "--seed": ("7", "seed"),
        "--method": ("simple", "sampling_method"),
    }
    forms = [[], [], []]
    for flag, (value, _) in flags.items():
        forms[0] += [flag, value]
        forms[1] += [flag[1:3], value]
        forms[2].append(f"{flag}={value}")
    for arguments in forms:
        args = parse_arguments(script, *started(run(UNIREF50, *arguments))["options"])
        assert args.n_iters == 3
        for flag, (value, name) in flags.items():
            assert str(getattr(args, name)) == value, flag


def test_what_is_passed_on(run):
    """Options of the script in their order, and key=value; not --yes. The script sees them before
    there are processes, and what it refuses starts nothing."""
    own = ["--lr=1e-4", "training.batch_size=8", "--compile", "--fresh", "--max_minutes", "5"]
    many = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "first", "SLURM_PROCID": "1"}
    result = run(UNIREF50, *own[:3], "--yes", *own[3:], "--seed=1", **many)
    options = [f"--config={ROOT / CONFIG}", *own, "--seed=1"]
    assert started(result)["options"] == options
    words = [str(ROOT / "run_train_uniref50_ddp.py"), *options, "--prepare_only"]
    assert f"prepared: 0 of 1 at localhost {' '.join(words)}" in result.stderr.splitlines()
    assert "prepared: " in refused(run(UNIREF50, "--lr=x", PREPARED="2"))


def test_dpo_keeps_logs(run):
    """And takes all GPUs."""
    result = run("scripts/run_dpo_ddp_local.sh", "--config", "a b.yaml", "--lr=1e-6", GPUS="4")
    record = started(result)
    assert record["argv"][2] == "--nproc_per_node=4"
    assert record["options"] == ["--config", "a b.yaml", "--lr=1e-6"]
    (out,) = (run.folder / "logs").glob("dpo_ddp_*.out")
    (err,) = (run.folder / "logs").glob("dpo_ddp_*.err")
    assert out.read_text() == result.stdout
    assert err.read_text() == result.stderr == "to stderr\n"
    record = started(run("scripts/run_dpo_ddp_local.sh", "--no_cuda", GPUS="99"))
    assert record["argv"][2] == f"--nproc_per_node={min(2, CORES)}"


# --------------------------------------------------------------------------------------------------
# Queues


@pytest.fixture
def aurora(run):
    """The PBS script in a job of two nodes: aurora(**environment) -> (status, records)."""
    first = "x1c0s0b0n0.hostmgmt.cm.aurora.alcf.anl.gov\n"
    (run.folder / "nodes").write_text(first * 2 + "x1c0s1b0n0.hostmgmt\n" * 2)
    run.stub("qstat", "#!/bin/sh\necho '    Resource_List.walltime = 02:00:00'\n")
    job = {"PBS_NODEFILE": str(run.folder / "nodes"), "PBS_JOBID": "1234567.aurora"}
    job.update(PBS_JOBNAME="dpo_ddp", PBS_O_WORKDIR=str(run.folder), ZE_AFFINITY_MASK="0")

    def call(**environment):
        result = run("scripts/run_dpo_ddp_aurora.sh", **job, **environment)
        logs = run.folder / "logs"
        assert (logs / "dpo_ddp_1234567.aurora.err").exists()
        return result.returncode, records((logs / "dpo_ddp_1234567.aurora.out").read_text())

    return call


def test_aurora_takes_all_tiles_of_all_nodes(aurora):
    status, (record,) = aurora(OPTIONS="--lr 1e-6 --backend ccl", STATUS="5")
    argv = record["argv"]
    env = record["env"]
    assert status == 5
    assert record["name"] == "mpiexec"
    assert argv[:4] == ["-n", "24", "-ppn", "12"]
    assert env["WORLD_SIZE"] == "24"
    assert env["MASTER_ADDR"] == "x1c0s0b0n0.hsn.cm.aurora.alcf.anl.gov"
    assert env["MASTER_PORT"] == "24567"
    assert "ZE_AFFINITY_MASK" not in env  # or all ranks of a node would share a tile
    assert env["CCL_PROCESS_LAUNCHER"] == "pmix"
    assert "--pmi=pmix" in argv
    (bind,) = [word for word in argv if word.startswith("--cpu-bind=list:")]
    first = [*range(4, 28, 4), *range(56, 80, 4)]  # 0 and 52 are the system's
    assert bind == "--cpu-bind=list:" + ":".join(f"{core}-{core + 3}" for core in first)
    script = argv.index("run_dpo_ddp.py")
    expected = "--config configs/run_dpo_ddp.yaml --output_dir outputs/dpo_ddp_dpo_ddp"
    expected += " --max_minutes 115 --lr 1e-6 --backend ccl"
    assert argv[script + 1 :] == expected.split()


def test_aurora_submits_again_when_time_was_up(aurora):
    """Only where it is asked for, and not where the run failed."""
    stopped = {"LAST_LINE": "stopped by time limit: the same command (without --fresh) goes on"}
    assert len(aurora(**stopped)[1]) == 1
    again = aurora(REQUEUE="1", **stopped)[1][-1]
    assert again["name"] == "qsub"
    assert again["argv"][-1].endswith("scripts/run_dpo_ddp_aurora.sh")
    words = " ".join(again["argv"])
    assert "OUTPUT_DIR=outputs/dpo_ddp_dpo_ddp" in words
    assert "--fresh=False" in words, "it would start anew each time"
    assert aurora(REQUEUE="1", STATUS="1", **stopped)[1][-1]["name"] == "mpiexec"


def test_slurm(run):
    """A job of two nodes, seen from its batch script: one process for each task. It is queued again
    where the script asks for it, and then goes on instead of starting anew."""
    nodes = 'printf "n7\\nn8\\n"'
    run.stub("scontrol", f'#!/bin/sh\n[ "$1" = show ] && {nodes} || echo "scontrol $*"\n')
    job = {"SLURM_JOB_ID": "123456", "SLURM_JOB_NODELIST": "n[7-8]"}
    job.update(SLURM_NTASKS="16", SLURM_CPUS_PER_TASK="8", MASTER_ADDR="stale", MASTER_PORT="1")
    wrapper = "scripts/run_ddp_slurm.sh"

    result = run(wrapper, "other.py", "--lr=1", "a b", **job)
    (record,) = records(result.stdout)
    launch = ["--mpi=none", "--kill-on-bad-exit=1", "--cpus-per-task=8"]
    assert record["argv"] == [*launch, "python", "other.py", "--lr=1", "a b"]
    assert record["env"]["MASTER_ADDR"] == "n7"
    assert record["env"]["MASTER_PORT"] == "13456"
    assert result.returncode == 0
    assert "scontrol" not in result.stdout

    job["LAST_LINE"] = "[RANK 0] 2025-01-15 14:23:45 INFO: stopped by SIGUSR1: the same command"
    result = run(wrapper, "--fresh", **job)
    assert records(result.stdout)[0]["argv"][-2:] == ["train_ddp.py", "--fresh"]
    assert result.stdout.splitlines()[-1] == "scontrol requeue 123456"
    assert result.returncode == 0
    failed = run(wrapper, STATUS="9", **job)
    assert failed.returncode == 9
    assert "scontrol" not in failed.stdout
    again = run(wrapper, "--fresh", SLURM_RESTART_COUNT="1", **job)
    assert records(again.stdout)[0]["argv"][-2:] == ["--fresh", "--fresh=False"]


def test_outside_of_a_job(run):
    for wrapper in ("sbatch scripts/run_ddp_slurm.sh", "qsub scripts/run_dpo_ddp_aurora.sh"):
        assert wrapper in refused(run(wrapper.split()[1]))
