"""run_train_uniref50_ddp.sh, run for real with stand-ins for python and torchrun on PATH."""

import json
import os
import subprocess
import sys

import pytest
from helpers import ROOT, SIGNALS

SCRIPT = str(ROOT / "run_train_uniref50_ddp.py")
CORES = len(os.sched_getaffinity(0))
# prints its arguments and what it sees of the environment
RECORD = f"""#!{sys.executable}
import json, os, sys
names = ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "OMP_NUM_THREADS"]
seen = {{name: os.environ.get(name) for name in names}}
print(json.dumps({{"argv": sys.argv[1:], "cwd": os.getcwd(), "env": seen, "pid": os.getppid()}}))
"""
# what python is asked for: the number of GPUs, and to check the options and prepare a file
PYTHON = """#!/bin/sh
[ "$1" = -c ] && { echo "${GPUS-0}"; exit "${TORCH-0}"; }
echo "prepared: $*" >&2
exit "${PREPARED-0}"
"""
CONFIG = "--config=configs/config_uniref50_ddp.yaml"


@pytest.fixture
def run(tmp_path):
    """Runs the wrapper in a folder with a config: run(*arguments, **environment)."""
    stubs = tmp_path / "stubs"
    folder = tmp_path / "elsewhere"
    for path in (stubs, folder / "configs"):
        path.mkdir(parents=True)
    (folder / "configs/config_uniref50_ddp.yaml").touch()
    for name, text in {"torchrun": RECORD, "python": PYTHON}.items():
        (stubs / name).write_text(text)
        (stubs / name).chmod(0o755)

    def call(*arguments, **environment):
        names = "NNODES NODE_RANK MASTER_ADDR MASTER_PORT OMP_NUM_THREADS OMP_THREAD_LIMIT".split()
        env = {name: value for name, value in os.environ.items() if name not in names}
        env.update({"PATH": f"{stubs}:/usr/bin:/bin", **environment})
        command = ["bash", str(ROOT / "run_train_uniref50_ddp.sh"), *arguments]
        return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True)

    call.folder = folder
    call.stubs = stubs
    return call


def started(result):
    """What torchrun was called with; `options` are the script's."""
    assert result.returncode == 0, result.stderr
    record = json.loads(result.stdout)
    record["options"] = record["argv"][record["argv"].index(SCRIPT) + 1 :]
    checked = " ".join([f"prepared: {SCRIPT}", *record["options"], "--prepare_only"])
    assert result.stderr.strip() == checked  # the same options, before there are processes
    return record


def refused(result):
    """The one line of a wrong call, which starts nothing."""
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    return result.stderr


def test_defaults(run):
    record = started(run())
    assert record["argv"][:-2] == ["--standalone", f"--nproc_per_node={min(2, CORES)}", *SIGNALS]
    assert record["options"] == [CONFIG]  # the config decides the rest
    assert record["cwd"] == str(run.folder.resolve())  # the user's relative paths stay valid
    assert record["env"]["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert int(record["env"]["OMP_NUM_THREADS"]) >= 1
    assert record["pid"] == os.getpid()  # exec: signals to the wrapper reach torchrun


FLAGS = [
    ("-c", "--config", "mine.yaml", "--config=mine.yaml"),
    ("-w", "--work-dir", "out", "--output_dir=out"),
    ("-d", "--datafile", "mine.fasta", "--datafile=mine.fasta"),
    ("-p", "--project", "proteins", "--wandb_project=proteins"),
    ("-n", "--name", "a b", "--wandb_name=a b"),
    ("-s", "--seed", "7", "--seed=7"),
    ("-m", "--method", "simple", "--sampling_method=simple"),
]


@pytest.mark.parametrize("form", ["long", "equals", "short"])
def test_flags(run, form):
    """Every flag, in each of its forms, is the script's own option with the value unchanged."""
    arguments = []
    for short, flag, value, _ in FLAGS:
        if form == "equals":
            arguments.append(f"{flag}={value}")
        else:
            arguments += [flag if form == "long" else short, value]
    assert started(run(*arguments))["options"] == [option for *_, option in FLAGS]


def test_what_is_passed_on(run):
    """Options of the script in their order, and key=value; not --yes."""
    own = ["--lr=1e-4", "training.batch_size=8", "--compile", "--fresh", "--max_minutes", "5"]
    record = started(run(*own[:3], "--yes", *own[3:], "--seed=1"))
    assert record["options"] == [CONFIG, *own, "--seed=1"]


WRONG = [
    (["--name", "--fresh"], {}, "--name needs a value"),
    (["-d", ""], {}, "-d needs a value"),
    (["--gpus", "two"], {}, "--gpus must be a whole number from 1, not 'two'"),
    (["--gpus", str(CORES + 1)], {}, f"no GPU and {CORES} CPU core(s): --gpus {CORES}"),
    ([], {"TORCH": "1"}, "python on PATH has no working torch"),
    (["--gpus=2"], {"GPUS": "1"}, "--gpus is 2 but 1 GPU(s) are visible: --gpus 1"),
    ([], {"NNODES": "2"}, "with NNODES=2 set NODE_RANK, too"),
    ([], {"NNODES": "2", "NODE_RANK": "1"}, "with NNODES=2 set MASTER_ADDR, too"),
]


@pytest.mark.parametrize(("arguments", "environment", "expected"), WRONG)
def test_wrong_calls(run, arguments, environment, expected):
    assert expected in refused(run(*arguments, **environment))


def test_no_torchrun(run):
    (run.stubs / "torchrun").unlink()
    assert "no torchrun on PATH" in refused(run())


def test_what_the_script_refuses_starts_nothing(run):
    result = run("--lr=x", PREPARED="2")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("prepared: ")


def test_gpus(run):
    assert "--nproc_per_node=3" in started(run(GPUS="3"))["argv"]
    assert "--nproc_per_node=1" in started(run("--gpus", "1", GPUS="3"))["argv"]
    for cpu in (["--device", "cpu"], ["--device=cpu"], ["device=cpu"]):
        assert f"--nproc_per_node={min(2, CORES)}" in started(run(*cpu, GPUS="3"))["argv"]


def test_several_machines(run):
    nodes = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node0"}
    where = ["--nnodes=2", "--node_rank=1", "--master_addr=node0", "--master_port=29500"]
    assert started(run(**nodes))["argv"][:4] == where
    where[3] = "--master_port=29501"
    assert started(run(**nodes, MASTER_PORT="29501"))["argv"][:4] == where


def test_config_beside_the_wrapper(run):
    """From another folder the default config is the repository's."""
    (run.folder / "configs/config_uniref50_ddp.yaml").unlink()
    assert started(run())["options"] == [f"--config={ROOT}/configs/config_uniref50_ddp.yaml"]


def test_help(run):
    result = run("--fresh", "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert "\nUsage" in result.stdout
    assert not any(line.startswith(("#", "set ")) for line in result.stdout.splitlines())
    for short, flag, *_ in FLAGS:
        assert f"{short}, {flag} " in result.stdout
