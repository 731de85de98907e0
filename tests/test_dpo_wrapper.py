"""scripts/run_dpo_ddp_local.sh and scripts/run_dpo_ddp_aurora.sh with stand-ins for torchrun, PBS
and PALS; and run_dpo_ddp.py under a real mpiexec of each family, where it is installed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, free_port, write_structures

RECORD = f"""#!{sys.executable}
import json, os, sys
names = "WORLD_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS ZE_AFFINITY_MASK CCL_PROCESS_LAUNCHER"
names += " TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
print(json.dumps({{"name": os.path.basename(sys.argv[0]), "argv": sys.argv[1:],
                  "parent": os.getppid(), "env": {{n: os.environ.get(n) for n in names.split()}}}}))
print(os.environ.get("LAST_LINE", ""))
print("to stderr", file=sys.stderr)
sys.exit(int(os.environ.get("STATUS", 0)))
"""


@pytest.fixture
def run(tmp_path):
    """run(wrapper, *arguments, **environment) in a folder of its own with stand-ins on PATH."""
    stubs, folder = tmp_path / "stubs", tmp_path / "elsewhere"
    stubs.mkdir()
    folder.mkdir()

    def stub(name, text):
        (stubs / name).write_text(text)
        (stubs / name).chmod(0o755)

    def call(wrapper, *arguments, **environment):
        env = {}
        for name, value in os.environ.items():
            if name[:3] not in ("PBS", "OMP", "CCL") and name[:6] != "MASTER":
                env[name] = value
        env |= {"PATH": f"{stubs}:/usr/bin:/bin", **environment}
        command = ["bash", str(ROOT / "scripts" / wrapper), *arguments]
        options = {"capture_output": True, "text": True, "timeout": 30}
        return subprocess.run(command, env=env, cwd=folder, **options)

    call.stub, call.folder = stub, folder
    for name in ("torchrun", "mpiexec", "qsub"):
        stub(name, RECORD)
    stub("python", "#!/bin/sh\necho 0\n")  # what torch sees: no GPU
    return call


def records(text):
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def test_local_starts_torchrun_and_keeps_logs(run):
    result = run("run_dpo_ddp_local.sh", "1", "--config", "a b.yaml", "lr=1e-6", STATUS="3")
    (record,) = records(result.stdout)
    assert result.returncode == 3 and "to stderr" in result.stderr  # the status is torchrun's
    signals = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    assert record["argv"][:4] == [
        "--standalone",
        "--nproc_per_node=1",
        "--shutdown-timeout=120",
        signals,
    ]
    assert Path(record["argv"][4]).resolve() == ROOT / "run_dpo_ddp.py"
    assert record["argv"][5:] == ["--config", "a b.yaml", "lr=1e-6"]
    assert record["env"]["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert int(record["env"]["OMP_NUM_THREADS"]) > 0 and record["parent"] == os.getpid()
    (out,) = (run.folder / "logs").glob("dpo_ddp_*.out")
    (err,) = (run.folder / "logs").glob("dpo_ddp_*.err")
    assert records(out.read_text()) == [record] and "to stderr" in err.read_text()


def test_local_counts_gpus(run):
    run.stub("python", "#!/bin/sh\necho 4\n")
    (record,) = records(run("run_dpo_ddp_local.sh").stdout)
    assert record["argv"][1] == "--nproc_per_node=4"
    wrong = {"5": "NGPUS is 5 but 4 GPU(s) are visible", "two": "not 'two'", "0": "not '0'"}
    for count, text in wrong.items():
        result = run("run_dpo_ddp_local.sh", count)
        assert result.returncode == 2 and text in result.stderr
        assert result.stderr.count("\n") == 1
    result = run("run_dpo_ddp_local.sh", "9999", "--no_cuda")
    assert result.returncode == 2 and "no GPU" in result.stderr


def test_local_on_several_machines(run):
    nodes = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node0"}
    (record,) = records(run("run_dpo_ddp_local.sh", "1", **nodes).stdout)
    where = ["--nnodes=2", "--node_rank=1", "--master_addr=node0", "--master_port=29500"]
    assert record["argv"][:4] == where
    assert run("run_dpo_ddp_local.sh", "1", NNODES="2", NODE_RANK="0").returncode == 2


@pytest.fixture
def aurora(run):
    """The PBS script in a job of two nodes: aurora(**environment) -> (status, records, log)."""
    (run.folder / "run_dpo_ddp.py").touch()
    (run.folder / "configs").mkdir()
    (run.folder / "configs" / "run_dpo_ddp.yaml").touch()
    first = "x1c0s0b0n0.hostmgmt.cm.aurora.alcf.anl.gov\n"
    (run.folder / "nodes").write_text(first * 2 + "x1c0s1b0n0.hostmgmt\n" * 2)
    run.stub("qstat", "#!/bin/sh\necho '    Resource_List.walltime = 02:00:00'\n")

    def call(**environment):
        job = {"PBS_NODEFILE": str(run.folder / "nodes"), "PBS_JOBID": "1234567.aurora"}
        job |= {"PBS_JOBNAME": "dpo_ddp", "PBS_O_WORKDIR": str(run.folder)}
        result = run("run_dpo_ddp_aurora.sh", **{**job, "ZE_AFFINITY_MASK": "0", **environment})
        log = run.folder / "logs" / "dpo_ddp_1234567.aurora.out"
        text = log.read_text() if log.exists() else ""
        return result.returncode, records(text), text + result.stderr

    call.folder = run.folder
    return call


def test_aurora_takes_all_tiles_of_all_nodes(aurora):
    status, (record,), text = aurora(OPTIONS="--lr 1e-6 --backend ccl", STATUS="5")
    argv, env = record["argv"], record["env"]
    assert status == 5 and record["name"] == "mpiexec"
    assert argv[:4] == ["-n", "24", "-ppn", "12"] and env["WORLD_SIZE"] == "24"
    assert env["MASTER_ADDR"] == "x1c0s0b0n0.hsn.cm.aurora.alcf.anl.gov"
    assert env["MASTER_PORT"] == "24567"
    assert env["ZE_AFFINITY_MASK"] is None  # or all ranks of a node would share a tile
    assert env["CCL_PROCESS_LAUNCHER"] == "pmix" and "--pmi=pmix" in argv
    (bind,) = [word for word in argv if word.startswith("--cpu-bind=list:")]
    cores = []
    for part in bind.removeprefix("--cpu-bind=list:").split(":"):
        low, high = part.split("-")
        cores += range(int(low), int(high) + 1)
    assert len(cores) == len(set(cores)) == 48 and not {0, 52} & set(cores)  # the system's
    script = argv.index("run_dpo_ddp.py")
    expected = "--config configs/run_dpo_ddp.yaml --output_dir outputs/dpo_ddp_dpo_ddp"
    expected += " --max_minutes 115 --lr 1e-6 --backend ccl"
    assert argv[script + 1 :] == expected.split()
    assert (aurora.folder / "logs" / "dpo_ddp_1234567.aurora.err").exists(), text


def test_aurora_submits_again_when_time_was_up(aurora):
    stopped = {"LAST_LINE": "stopped by time limit: the same command goes on from the checkpoint"}
    assert len(aurora(**stopped)[1]) == 1  # only where it is asked for
    again = aurora(REQUEUE="1", **stopped)[1][-1]
    assert again["name"] == "qsub"
    assert again["argv"][-1].endswith("scripts/run_dpo_ddp_aurora.sh")
    assert "OUTPUT_DIR=outputs/dpo_ddp_dpo_ddp" in " ".join(again["argv"])
    failed = aurora(REQUEUE="1", STATUS="1", **stopped)[1][-1]
    assert failed["name"] == "mpiexec"  # not where it failed


def test_aurora_outside_of_a_job(run):
    result = run("run_dpo_ddp_aurora.sh")
    assert result.returncode == 2 and "qsub scripts/run_dpo_ddp_aurora.sh" in result.stderr


# ---- A real mpiexec --------------------------------------------------------------------------


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
