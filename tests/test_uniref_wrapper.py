"""run_train_uniref50_ddp.sh, run for real with stand-ins for python and torchrun on PATH."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
WRAPPER = ROOT / "run_train_uniref50_ddp.sh"
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
VARIABLES = (
    "NNODES NODE_RANK MASTER_ADDR MASTER_PORT OMP_NUM_THREADS OMP_THREAD_LIMIT SKIP_CHECK RANK WORLD_SIZE "
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
).split()
# Prints its arguments and what it sees of the environment, then exits with $STATUS.
RECORD = f"""#!{sys.executable} -S
import json, os, sys
names = ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "OMP_NUM_THREADS")
seen = {{name: os.environ.get(name) for name in names}}
print(json.dumps({{"argv": sys.argv[1:], "cwd": os.getcwd(), "env": seen, "parent": os.getppid()}}))
print("to stderr", file=sys.stderr)
sys.exit(int(os.environ.get("STATUS", 0)))
"""
# Says which signals it gets; ends with status 7 at the second one, a line later.
LISTEN = f"""#!{sys.executable} -S
import signal, sys, time
seen = []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: seen.append(number))
print("ready", flush=True)
while len(seen) < 2:
    time.sleep(0.01)
print("got", *sorted(int(number) for number in seen), flush=True)
time.sleep(0.2)
print("checkpoint written", file=sys.stderr)
sys.exit(7)
"""
# What python is asked for: how many GPUs torch sees, and the check of the machine.
PYTHON = """#!/bin/sh
[ "$1" = -c ] && { echo "${GPUS-0}"; exit "${TORCH-0}"; }
echo "checked: $* rank=$RANK$SLURM_PROCID master=$MASTER_ADDR"
exit "${CHECK-0}"
"""
SCRIPT = str(ROOT / "run_train_uniref50_ddp.py")
STAMP = r"ddp_\d{8}_\d{6}"


@pytest.fixture
def run(tmp_path):
    """Runs the wrapper in a folder with a config and data of its own: run(*arguments, **environment)."""
    stubs, folder = tmp_path / "stubs", tmp_path / "elsewhere"
    for path in (stubs, folder / "input_data", folder / "configs"):
        path.mkdir(parents=True)
    (folder / "input_data/processed_uniref50.pt").touch()
    (folder / "configs/config_uniref50_ddp.yaml").write_text("training:\n  seed: 42\n")

    def stub(name: str, text: str) -> None:
        (stubs / name).write_text(text)
        (stubs / name).chmod(0o755)

    def call(*arguments: str, start=subprocess.run, **environment: str):
        env = {k: v for k, v in os.environ.items() if k not in VARIABLES and k[:5] != "SLURM"}
        env |= {"PATH": f"{stubs}:/usr/bin:/bin"} | environment
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": folder, "env": env}
        return start(["bash", str(WRAPPER), *arguments], **pipes)

    call.stub, call.folder = stub, folder
    stub("torchrun", RECORD)
    stub("python", PYTHON)
    return call


def started(result) -> dict:
    """What torchrun was called with; "options": those of the script, without a name made from the time."""
    assert result.returncode == 0, result.stderr
    record = json.loads(next(line for line in result.stdout.splitlines() if line[0] == "{"))
    options = record["argv"][record["argv"].index(SCRIPT) + 1 :]
    return record | {"options": [o for o in options if not re.fullmatch(f"--wandb_name={STAMP}", o)], "all": options}


def refused(result) -> str:
    """The one line of a wrong call, which starts nothing."""
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    return result.stderr


def the_log(folder: Path) -> Path:
    (path,) = folder.glob("logs/*.log")
    return path


CONFIG, WORK = "--config=configs/config_uniref50_ddp.yaml", "--work_dir=./experiments_ddp"


def test_defaults(run):
    result = run()
    record = started(result)
    assert record["argv"][:3] == [
        "--standalone", "--nproc_per_node=2", "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
    ]  # fmt: skip
    assert record["options"] == [CONFIG, WORK]  # the config decides the rest, the seed too
    assert record["cwd"] == str(run.folder.resolve())  # the user's relative paths stay valid
    assert record["env"]["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert record["env"]["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "120"
    assert int(record["env"]["OMP_NUM_THREADS"]) >= 1
    assert record["parent"] == os.getpid()  # exec: signals to the wrapper reach torchrun
    log = the_log(run.folder / "experiments_ddp")
    assert re.fullmatch(STAMP, log.stem)
    assert f"--wandb_name={log.stem}" in record["all"]
    assert str(log.relative_to(run.folder)) in result.stdout  # the user reads where the log is
    text = log.read_text()
    assert f"checked: {ROOT}/test_ddp_setup.py --quick --nproc=2 --device=auto" in text
    assert "checked" not in result.stdout
    assert json.dumps(record["argv"])[1:-1] in text and text.endswith("to stderr\n")  # both streams
    assert text.index("checked") < text.index("torchrun --standalone") < text.index('{"argv"')


LONG = [
    ("--work-dir", "out", "--work_dir=out"),
    ("--config", "mine.yaml", "--config=mine.yaml"),
    ("--datafile", "mine.fasta", "--datafile=mine.fasta"),
    ("--project", "proteins", "--wandb_project=proteins"),
    ("--name", "a b", "--wandb_name=a b"),
    ("--seed", "7", "--seed=7"),
    ("--method", "simple", "--sampling_method=simple"),
]
SHORT = dict(zip("--work-dir --config --datafile --project --name --seed --method".split(), "wcdpnsm", strict=True))


@pytest.mark.parametrize("form", ["long", "equals", "short", "script's name"])
def test_flags(run, form):
    """Every flag, in each of its forms, becomes the script's own option with the value unchanged."""
    (run.folder / "mine.yaml").write_text("datafile: other.fasta\n")
    (run.folder / "mine.fasta").touch()
    arguments = []
    for flag, value, option in LONG:
        if form == "equals":
            arguments.append(f"{flag}={value}")
        else:
            own = {"long": flag, "short": "-" + SHORT[flag], "script's name": option.partition("=")[0]}
            arguments += [own[form], value]
    record = started(run(*arguments))
    assert sorted(record["all"]) == sorted(option for *_, option in LONG)
    assert (run.folder / "out/logs/a b.log").exists()


def test_what_is_passed_on(run):
    """Options of the script in their order, key=value, and everything after --; not --yes."""
    own = ["--lr=1e-4", "training.batch_size=8", "--compile", "--max_minutes", "5", "--prompt=a *"]
    record = started(run(*own[:3], "--yes", *own[3:], "--seed=1", "--", "-x", "y", "--seed", "2"))
    assert record["options"] == [CONFIG, WORK, "--seed=1", *own, "-x", "y", "--seed", "2"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--name"], "--name needs a value"),
        (["--name", "--fresh"], "--name needs a value"),
        (["--name="], "--name= needs a value"),
        (["-d"], "-d needs a value"),
        (["--name", ""], "--name needs a value"),
        (["-x"], "unexpected '-x'"),
        (["8"], "the number of processes is --gpus 8"),
        (["--lr=1", "word"], "unexpected 'word'"),
        (["--prepare", "in", "out"], "python run_train_uniref50_ddp.py --prepare IN OUT"),
        (["--fresh", "--sample=4"], "--fresh would move aside the run that --sample takes its weights from"),
        (["--fresh=maybe"], "--fresh is True or False, not 'maybe'"),
        (["--method", "fast"], "--method must be rigorous or simple, not 'fast'"),
        (["--gpus", "0"], "--gpus must be a whole number from 1, not '0'"),
        (["--gpus", "two"], "--gpus must be a whole number from 1, not 'two'"),
        (["--gpus", str(CORES + 1)], f"--gpus is {CORES + 1} but there is no GPU and {CORES} CPU core(s)"),
        (["--config", "none.yaml"], "no config file none.yaml; give one with --config"),
        (["--work-dir", "/dev/null/x"], "cannot write /dev/null/x/logs/ddp_"),
    ],
)  # fmt: skip
def test_wrong_calls(run, arguments, expected):
    assert expected in refused(run(*arguments))
    assert not (run.folder / "experiments_ddp").exists()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"TORCH": "1"}, "python on PATH cannot import torch"),
        ({"PATH": "/usr/bin:/bin"}, "no torchrun on PATH"),
        ({"GPUS": "1"}, "--gpus is 2 but 1 GPU(s) are visible; try --gpus 1"),
        ({"NNODES": "two"}, "NNODES must be a whole number"),
        ({"NNODES": "2", "NODE_RANK": "2"}, "NODE_RANK must be from 0 to NNODES - 1 = 1, not '2'"),
        ({"NNODES": "2"}, "set NODE_RANK too: 0 to 1"),
        ({"NNODES": "2", "NODE_RANK": "1"}, "set MASTER_ADDR too"),
    ],
)
def test_wrong_environment(run, environment, expected):
    if environment.get("PATH"):
        run.stub("python", PYTHON)
        (run.folder.parent / "stubs/torchrun").unlink()
        environment = {"PATH": f"{run.folder.parent / 'stubs'}:/usr/bin:/bin"}
    assert expected in refused(run("--gpus=2", **environment))


def test_no_data(run):
    """Where UniRef50 is published and what to do with it; the same for a path of the config and one given."""
    (run.folder / "input_data/processed_uniref50.pt").unlink()
    yaml = run.folder / "configs/config_uniref50_ddp.yaml"
    for arguments, config, path in [
        ([], "", "./input_data/processed_uniref50.pt"),
        (["-d", "missing.fasta"], "datafile: configs\n", "missing.fasta"),
        ([], "data:\n  datafile: 'gone' # path\n", "gone"),
    ]:
        yaml.write_text(config)
        result = run(*arguments)
        assert (result.returncode, result.stdout) == (2, "")
        lines = [line.strip() for line in result.stderr.splitlines()]
        assert lines[0] == f"run_train_uniref50_ddp.sh: no data file {path}. UniRef50 is published at"
        assert lines[1] == "https://ftp.uniprot.org/pub/databases/uniprot/uniref/uniref50/uniref50.fasta.gz"
        assert lines[3] == "python run_train_uniref50_ddp.py --prepare uniref50.fasta.gz ./input_data/uniref50"
        assert lines[4].endswith("--datafile ./input_data/uniref50")
    for config in ("datafile: markov:20\n", "data:\n  datafile: configs\n", '{"datafile": "configs", "seed": 1}'):
        yaml.write_text(config)
        assert started(run())["options"] == [CONFIG, WORK]  # the config's data is left to the config
    yaml.write_text("datafile: null\n")
    assert started(run("--sample", "4"))["options"] == [CONFIG, WORK, "--sample", "4"]  # needs none
    assert run("--sample", "4", "-d", "missing").returncode == 2
    assert started(run("-d", "markov:20"))["options"][2:] == ["--datafile=markov:20"]


@pytest.mark.parametrize("key", ["work_dir: deep/er", 'output_dir:   "deep/er"  # mine', "work_dir: 'deep/er'"])
def test_work_dir_of_the_config(run, key):
    yaml = run.folder / "configs/config_uniref50_ddp.yaml"
    yaml.write_text(f"section:\n  {key.replace('deep', 'other')}\n{key}\n")
    assert started(run())["options"] == [CONFIG]
    assert the_log(run.folder / "deep/er")
    assert not (run.folder / "experiments_ddp").exists()
    assert started(run("-w", "mine"))["options"] == [CONFIG, "--work_dir=mine"]
    assert the_log(run.folder / "mine")
    yaml.write_text(f"# {key}\nwork_dir: ~\n")
    assert started(run())["options"] == [CONFIG, WORK]


def test_config_beside_the_wrapper(run):
    """From another folder the default config is the repository's."""
    (run.folder / "configs/config_uniref50_ddp.yaml").unlink()
    config = ROOT / "configs/config_uniref50_ddp.yaml"
    if config.exists():
        assert started(run("-d", "markov:20"))["options"][0] == f"--config={config}"
    else:
        assert f"no config file {config}" in refused(run())


def test_a_resumed_run_keeps_its_name(run):
    (run.folder / "experiments_ddp").mkdir()
    (run.folder / "experiments_ddp/latest.pt").touch()
    assert started(run())["all"] == [CONFIG, WORK]
    assert started(run("-n", "mine"))["all"] == [CONFIG, WORK, "--wandb_name=mine"]
    again = started(run("--fresh"))
    assert re.fullmatch(f"--wandb_name={STAMP}", again["all"][2])
    (run.folder / "configs/config_uniref50_ddp.yaml").write_text("wandb_name: theirs\n")
    assert started(run("--fresh"))["all"] == [CONFIG, WORK]


def test_fresh_moves_the_old_run_aside(run):
    """Before the log is opened: the log of the new run stays with it, also when a second --fresh follows."""
    folder = run.folder / "experiments_ddp"
    assert started(run("--fresh"))["options"] == [CONFIG, WORK]  # nothing was there
    assert [p.name for p in run.folder.glob("experiments_ddp*")] == ["experiments_ddp"]
    (folder / "latest.pt").write_text("old")
    result = run("--fresh", "--name=second")
    assert started(result)["options"] == [CONFIG, WORK, "--wandb_name=second"]
    (aside,) = run.folder.glob("experiments_ddp.old-????????-??????")
    assert f"moved to ./{aside.name}" in result.stdout
    assert (aside / "latest.pt").read_text() == "old" and the_log(aside).stem != "second"
    assert the_log(folder).stem == "second" and not (folder / "latest.pt").exists()
    assert started(run("--fresh=False", "--name=second", "--work-dir=experiments_ddp/"))
    nodes = {"NNODES": "2", "MASTER_ADDR": "node0", "NODE_RANK": "1"}
    assert started(run("--fresh", "--name=second", **nodes))  # the first machine moves it, no other
    assert len(list(run.folder.glob("experiments_ddp.old-*"))) == 1


def test_several_nodes(run):
    nodes = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29501", "RANK": "3"}
    record = started(run("--name=n", **nodes, SLURM_PROCID="2"))
    assert record["argv"][:4] == ["--nnodes=2", "--node_rank=1", "--master_addr=node0", "--master_port=29501"]
    assert "--standalone" not in record["argv"]
    text = (run.folder / "experiments_ddp/logs/n.node1.log").read_text()  # a shared folder: one log per machine
    assert "rank= master=\n" in text  # the check is of this machine alone
    assert started(run(**nodes | {"MASTER_PORT": ""}))["argv"][3] == "--master_port=29500"


def test_gpus(run):
    assert "--nproc_per_node=3" in started(run(GPUS="3"))["argv"]
    assert "--nproc_per_node=1" in started(run("--gpus", "1", GPUS="3"))["argv"]
    for cpu in (["--device", "cpu"], ["--device=cpu"], ["--", "device=cpu"]):
        assert "--nproc_per_node=2" in started(run("-n", "cpu", *cpu, GPUS="3"))["argv"]
    assert "--nproc=2 --device=cpu" in (run.folder / "experiments_ddp/logs/cpu.log").read_text()


def test_failed_check(run):
    result = run(CHECK="1")
    assert (result.returncode, result.stdout) == (2, "")
    first, last = result.stderr.splitlines()
    assert first.startswith("checked: ")  # what failed is shown
    assert "test_ddp_setup.py --quick failed" in last and "SKIP_CHECK=1" in last
    log = the_log(run.folder / "experiments_ddp")
    assert first in log.read_text()
    assert started(run("--name=n", CHECK="1", SKIP_CHECK="1"))
    assert "checked" not in (run.folder / "experiments_ddp/logs/n.log").read_text()


@pytest.mark.parametrize("status", [1, 137])
def test_exit_status_is_torchruns(run, status):
    result = run(STATUS=str(status))
    assert result.returncode == status
    assert "to stderr" in the_log(run.folder / "experiments_ddp").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signals(run, number):
    """A signal to the wrapper, then Ctrl-C to the whole group: torchrun gets both, its last words reach the log."""
    run.stub("torchrun", LISTEN)
    process = run(start=lambda *a, **k: subprocess.Popen(*a, start_new_session=True, **k), SKIP_CHECK="1")
    try:
        assert any(line == "ready\n" for line in process.stdout)
        process.send_signal(number)
        time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        rest, _ = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 7
    expected = f"got {signal.SIGINT:d} {number:d}\ncheckpoint written\n"
    assert rest == expected
    assert the_log(run.folder / "experiments_ddp").read_text().endswith("ready\n" + expected)


def test_closed_terminal(run):
    """The log goes on when nobody reads the output any more (a lost connection, `| head`)."""
    run.stub("torchrun", LISTEN)
    process = run(start=subprocess.Popen, SKIP_CHECK="1")
    assert any(line == "ready\n" for line in process.stdout)
    process.stdout.close()
    process.send_signal(signal.SIGUSR1)
    process.send_signal(signal.SIGTERM)
    process.stderr.read()  # until tee has ended too
    assert process.wait(20) == 7
    log = the_log(run.folder / "experiments_ddp")
    assert log.read_text().endswith(f"got {signal.SIGUSR1:d} {signal.SIGTERM:d}\ncheckpoint written\n")


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help(run, flag):
    result = run("--fresh", flag)
    assert (result.returncode, result.stderr) == (0, "")
    assert "\nUsage" in result.stdout
    assert not any(line.startswith(("#", "set ")) for line in result.stdout.splitlines())
    for long, *_ in LONG:
        assert f"-{SHORT[long]}, {long} " in result.stdout
