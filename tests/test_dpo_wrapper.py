"""scripts/run_dpo_ddp_local.sh and scripts/run_dpo_ddp_aurora.sh with stand-ins for torchrun, PBS and PALS; and
run_dpo_ddp.py under a real mpiexec of each family, where it is installed."""

from __future__ import annotations

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
names = "WORLD_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS ZE_AFFINITY_MASK CCL_PROCESS_LAUNCHER".split()
names += ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
print(json.dumps({{"name": os.path.basename(sys.argv[0]), "argv": sys.argv[1:], "parent": os.getppid(),
                  "env": {{name: os.environ.get(name) for name in names}}}}))
print(os.environ.get("LAST_LINE", ""))
print("to stderr", file=sys.stderr)
sys.exit(int(os.environ.get("STATUS", 0)))
"""


@pytest.fixture
def run(tmp_path):
    """run(wrapper, *arguments, **environment) in a folder of its own with stand-ins on PATH."""
    stubs, folder = tmp_path / "stubs", tmp_path / "elsewhere"
    stubs.mkdir(), folder.mkdir()

    def stub(name: str, text: str) -> None:
        (stubs / name).write_text(text)
        (stubs / name).chmod(0o755)

    def call(wrapper: str, *arguments: str, **environment: str):
        env = {k: v for k, v in os.environ.items() if k[:3] not in ("PBS", "OMP", "CCL") and k[:6] != "MASTER"}
        env |= {"PATH": f"{stubs}:/usr/bin:/bin"} | environment
        command = ["bash", str(ROOT / "scripts" / wrapper), *arguments]
        return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=30)

    call.stub, call.folder = stub, folder
    for name in "torchrun", "mpiexec", "qsub":
        stub(name, RECORD)
    stub("python", "#!/bin/sh\necho 0\n")  # what torch sees: no GPU
    return call


def records(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def test_local_starts_torchrun_and_keeps_logs(run):
    result = run("run_dpo_ddp_local.sh", "1", "--config", "a b.yaml", "lr=1e-6", STATUS="3")
    (record,) = records(result.stdout)
    assert result.returncode == 3 and "to stderr" in result.stderr  # the status is torchrun's
    assert record["argv"][:2] == ["--standalone", "--nproc_per_node=1"]
    assert record["argv"][2:] == ["--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
                                  str(ROOT / "run_dpo_ddp.py"), "--config", "a b.yaml", "lr=1e-6"]  # fmt: skip
    assert record["env"]["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1" and record["parent"] == os.getpid()
    assert record["env"]["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "120" and int(record["env"]["OMP_NUM_THREADS"]) > 0
    (out,), (err,) = (list((run.folder / "logs").glob(f"dpo_ddp_*.{end}")) for end in ("out", "err"))
    assert records(out.read_text()) == [record] and "to stderr" in err.read_text()


def test_local_counts_gpus(run):
    run.stub("python", "#!/bin/sh\necho 4\n")
    assert records(run("run_dpo_ddp_local.sh").stdout)[0]["argv"][1] == "--nproc_per_node=4"
    for count, text in ("5", "NGPUS is 5 but 4 GPU(s) are visible"), ("two", "not 'two'"), ("0", "not '0'"):
        result = run("run_dpo_ddp_local.sh", count)
        assert result.returncode == 2 and text in result.stderr and result.stderr.count("\n") == 1
    result = run("run_dpo_ddp_local.sh", "9999", "--no_cuda")
    assert result.returncode == 2 and "no GPU" in result.stderr


def test_local_on_several_machines(run):
    arguments = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node0"}
    argv = records(run("run_dpo_ddp_local.sh", "1", **arguments).stdout)[0]["argv"]
    assert argv[:4] == ["--nnodes=2", "--node_rank=1", "--master_addr=node0", "--master_port=29500"]
    assert run("run_dpo_ddp_local.sh", "1", NNODES="2", NODE_RANK="0").returncode == 2  # no MASTER_ADDR


@pytest.fixture
def aurora(run):
    """The PBS script in a job of two nodes: aurora(**environment) -> (status, records of its log, its log)."""
    (run.folder / "run_dpo_ddp.py").touch()
    (run.folder / "configs").mkdir()
    (run.folder / "configs" / "run_dpo_ddp.yaml").touch()
    (run.folder / "nodes").write_text("x1c0s0b0n0.hostmgmt.cm.aurora.alcf.anl.gov\n" * 2 + "x1c0s1b0n0.hostmgmt\n" * 2)
    run.stub("qstat", "#!/bin/sh\necho '    Resource_List.walltime = 02:00:00'\n")

    def call(**environment: str):
        job = {"PBS_NODEFILE": str(run.folder / "nodes"), "PBS_JOBID": "1234567.aurora", "PBS_JOBNAME": "dpo_ddp",
               "PBS_O_WORKDIR": str(run.folder), "ZE_AFFINITY_MASK": "0"}  # fmt: skip
        result = run("run_dpo_ddp_aurora.sh", **job | environment)
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
    assert env["MASTER_ADDR"] == "x1c0s0b0n0.hsn.cm.aurora.alcf.anl.gov" and env["MASTER_PORT"] == "24567"
    assert env["ZE_AFFINITY_MASK"] is None  # or all ranks of a node would share a tile
    assert env["CCL_PROCESS_LAUNCHER"] == "pmix" and "--pmi=pmix" in argv
    (bind,) = [word for word in argv if word.startswith("--cpu-bind=list:")]
    cores = [range(*(int(end) + i for i, end in enumerate(part.split("-")))) for part in bind[16:].split(":")]
    flat = [core for part in cores for core in part]
    assert len(cores) == 12 and len(set(flat)) == 48 and not {0, 52} & set(flat)  # those are the system's
    script = argv.index("run_dpo_ddp.py")
    assert argv[script + 1 :] == ["--config", "configs/run_dpo_ddp.yaml", "--output_dir", "outputs/dpo_ddp_dpo_ddp",
                                  "--max_minutes", "115", "--lr", "1e-6", "--backend", "ccl"]  # fmt: skip
    assert (aurora.folder / "logs" / "dpo_ddp_1234567.aurora.err").exists(), text


def test_aurora_submits_again_when_time_was_up(aurora):
    stopped = {"LAST_LINE": "checkpoint written, stopped by time limit: the same command goes on from here"}
    assert len(aurora(**stopped)[1]) == 1  # only where it is asked for
    again = aurora(REQUEUE="1", **stopped)[1][-1]
    assert again["name"] == "qsub" and again["argv"][-1].endswith("scripts/run_dpo_ddp_aurora.sh")
    assert "OUTPUT_DIR=outputs/dpo_ddp_dpo_ddp" in " ".join(again["argv"])
    assert aurora(REQUEUE="1", STATUS="1", **stopped)[1][-1]["name"] == "mpiexec"  # not where it failed


def test_aurora_outside_of_a_job(run):
    result = run("run_dpo_ddp_aurora.sh")
    assert result.returncode == 2 and "qsub scripts/run_dpo_ddp_aurora.sh" in result.stderr


# ---- A real mpiexec ----------------------------------------------------------------------------------


def family(name: str) -> tuple[str | None, list[str]]:
    """The mpiexec of a family, and how it places two ranks on this machine."""
    if name == "MPICH":
        return shutil.which("mpiexec.hydra") or shutil.which("mpiexec.mpich"), ["-n", "2", "-ppn", "2"]
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2", "--map-by", "ppr:2:node"]
    return shutil.which("mpiexec.openmpi"), options


@pytest.mark.parametrize("name, launcher", [("Open MPI", "Open MPI"), ("MPICH", "Hydra")])
def test_mpiexec(name, launcher, tmp_path):
    """Two ranks, each with its own number, in one run."""
    mpiexec, placed = family(name)
    if mpiexec is None:
        pytest.skip(f"{name}'s mpiexec is not installed (Debian: apt-get install openmpi-bin mpich)")
    write_structures(tmp_path, 4, pairs=4, least=8, most=12)
    command = [sys.executable, str(ROOT / "run_dpo_ddp.py"), f"--train_data={tmp_path}/pairs.json", "--num_epochs=1",
               f"--output_dir={tmp_path}/out", f"--cache_dir={tmp_path}/cache", "--base_model_name=random",
               "--num_orders=1", "--wandb_mode=disabled", "--device=cpu"]  # fmt: skip
    env = os.environ | {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}

    result = subprocess.run([mpiexec, *placed, *command], env=env, capture_output=True, text=True, timeout=90)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    for rank in range(2):
        assert f"Initialized DDP: rank={rank}, world_size=2, local_rank={rank}" in result.stdout
    assert result.stdout.count("finished:") == 1 and f"started by {launcher}" in result.stdout
    assert "Batch size per GPU: 1, Total batch size: 2" in result.stdout
    summary = json.loads(Path(tmp_path, "out", "summary.json").read_text())
    assert summary["world_size"] == 2 and summary["backend"] == "gloo"
