"""test_ddp_setup.py, the machine check: what it says on a sound machine, on broken ones, and with broken features."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import resource
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers import free_port, run_ranks

import test_ddp_setup as program

ROOT = Path(__file__).resolve().parents[1]
LINE = re.compile(r"(OK|WARN|FAIL) {1,4}([a-z][a-z -]*): (.+)")
QUICK_NAMES = [*program.ENVIRONMENT, *program.QUICK, "end of the processes"]
FULL_NAMES = [*program.ENVIRONMENT, *program.FULL, "end of the processes", "failing rank"]


def start(*arguments: str, **environment: str) -> subprocess.Popen:
    """The program, with only `environment` of what launchers set."""
    command = [sys.executable, str(ROOT / "test_ddp_setup.py"), *arguments]
    env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | environment
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run(*arguments: str, timeout: float = 60, **environment: str) -> tuple[int, str, dict[str, tuple]]:
    """(exit status, output, {check: (status, fact and advice)})"""
    process = start(*arguments, **environment)
    try:
        output = process.communicate(timeout=timeout)[0]
    finally:
        process.kill()
    return process.returncode, output, parse(output)


def parse(output: str) -> dict[str, tuple]:
    found = [match for match in map(LINE.fullmatch, output.splitlines()) if match]
    return {match[2]: (match[1], match[3]) for match in found}


def test_two_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    status, output, checks = run("--nproc", "2", "--json", str(tmp_path / "out.json"), timeout=110)
    assert status == 0, output
    assert list(checks) == FULL_NAMES
    assert {state for state, _ in checks.values()} <= {"OK", "WARN"}  # WARN: a small /dev/shm, a full disk, ...
    assert all(checks[name][0] == "OK" for name in [*program.FULL, "end of the processes", "failing rank"])
    assert not list(tmp_path.glob("ddp-check-*"))  # the temporary folder is removed

    written = json.loads((tmp_path / "out.json").read_text())
    assert [row["name"] for row in written["results"]] == FULL_NAMES
    assert {row["name"]: row["status"] for row in written["results"]} == {n: s for n, (s, _) in checks.items()}
    measured = written["measured"]
    assert (measured["ranks"], measured["backend"], measured["device"]) == (2, "gloo", "cpu")
    assert [row["bytes"] for row in measured["all_reduce"]] == program.MESSAGES
    assert all(row["seconds"] > 0 and row["bus_gb_per_s"] > 0 for row in measured["all_reduce"])
    assert min(measured["matmul_tflop_per_s"].values()) > 0
    assert list(measured["speedup"]) == ["train_ddp", "dpo", "uniref50", "quantumgrav", "rebm"]
    for speedups in measured["speedup"].values():
        assert speedups[0] == 1 and all(1 <= s <= n for s, n in zip(speedups, program.RANKS, strict=True))

    table = [line.split() for line in output.partition("Predicted speed-up")[2].splitlines()]
    rows = {row[0]: " ".join(row[6:]) for row in table if row and row[0] in ("1", "2", "4", "8", "16")}
    assert list(rows) == ["1", "2", "4", "8", "16"]
    assert re.search(r"64\s+5e-05\s+5000", rows["1"]) and re.search(r"512\s+4e-04\s+40000\s+5.5x", rows["8"])
    assert "Only 2 ranks were measured: predictions beyond use the bandwidth of 2" in output
    assert "speed-up(N) = N t / (t + exposed)" in output


def test_wrong_backend(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["test_ddp_setup.py", "--backend", "nccl", "--json", str(tmp_path / "out.json")])
    monkeypatch.setattr(program, "start_job", None)  # it must not get there
    assert program.main() == 1
    checks = parse(capsys.readouterr().out)
    assert list(checks) == list(program.ENVIRONMENT)
    assert checks["backend"][0] == "FAIL"
    assert "--backend nccl" in checks["backend"][1] and " — use " in checks["backend"][1]
    assert json.loads((tmp_path / "out.json").read_text())["status"] == "FAIL"
    with pytest.raises(SystemExit) as error:
        program.parse_args(["--backend", "nonsense"])
    assert error.value.code == 2


@contextlib.contextmanager
def small_disk(folder: Path, size: int):
    """A folder that takes `size` bytes: a tmpfs; where that cannot be mounted, a limit on the size of files."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if mounted.returncode:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        yield
    except OSError as error:
        pytest.skip(f"neither a tmpfs nor RLIMIT_FSIZE: {mounted.stderr.decode().strip()}, {error}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        if not mounted.returncode:
            subprocess.run(["umount", str(folder)], check=True)


def test_busy_port_and_full_disk(tmp_path):
    (tmp_path / "small").mkdir()
    with socket.socket() as server, small_disk(tmp_path / "small", 8 << 20):
        server.bind(("", 0))
        server.listen()
        port = str(server.getsockname()[1])
        status, output, checks = run("--quick", "--output_dir", str(tmp_path / "small"), MASTER_PORT=port)
        assert list((tmp_path / "small").iterdir()) == []
    assert status == 1
    assert list(checks) == QUICK_NAMES
    assert {name for name, (state, _) in checks.items() if state == "FAIL"} == {"port", "disk"}, output
    assert f"port {port} (MASTER_PORT)" in checks["port"][1] and "export MASTER_PORT=" in checks["port"][1]
    assert f"MASTER_PORT={port}" not in checks["port"][1]  # another one is proposed
    assert str(tmp_path / "small") in checks["disk"][1] and "give another --output_dir" in checks["disk"][1]


def test_started_by_a_launcher(tmp_path):
    common = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "SLURM_NTASKS": "2"}
    out = str(tmp_path / "out.json")
    ranks = [
        start("--quick", "--json", out, **common, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)) for rank in (0, 1)
    ]
    outputs = [process.communicate(timeout=60)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], outputs
    assert list(parse(outputs[0])) == [name for name in [*program.ENVIRONMENT, *program.QUICK] if name != "port"]
    assert "2 ranks on 1 host" in outputs[0] and parse(outputs[1]) == {}  # rank 0 speaks
    assert len(json.loads(Path(out).read_text())["results"]) == len(parse(outputs[0]))


def test_missing_peers_are_no_hang(tmp_path):
    alone = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    status, output, checks = run("--quick", "--timeout", "2", **alone, TMPDIR=str(tmp_path))
    assert status == 1
    assert checks["process group"][0] == "FAIL" and "no answer after 2 s" in checks["process group"][1]
    assert "1 FAIL" in output and not list(tmp_path.glob("ddp-check-*"))


def test_rank_without_world_size(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["test_ddp_setup.py"])
    monkeypatch.setenv("RANK", "0")
    assert program.main() == 1
    checks = parse(capsys.readouterr().out)
    assert list(checks) == ["launcher"] and "WORLD_SIZE" in checks["launcher"][1]


# Each check must FAIL once its feature is broken.


def repeats_an_index(self, positions):
    items = original_permuted(self, positions)
    items[-1] = items[0]
    return items


def forgets_position(self, epoch, start=0):
    self.epoch, self.start = epoch, 0


def skips_one_sample(ddp, sums):
    sums = original_reduce_sums(ddp, sums)
    return {n: v - 1 if n == "count" else v for n, v in sums.items()}


def rank_noise(seed, epoch, ids, draws, stream=0):
    return torch.rand(len(ids), draws)


def keeps_prefixes(path):
    state = original_load(path)
    return {**state, "model": {k: v + 1 for k, v in state["model"].items()}}


original_permuted, original_reduce_sums = program.GlobalBatchSampler.permuted, program.reduce_sums
original_load = program.load_checkpoint
BROKEN = {  # what is broken: (owner, its attribute, replacement, check)
    "index repeated": (program.GlobalBatchSampler, "permuted", repeats_an_index, "sampler"),
    "restart at the beginning": (program.GlobalBatchSampler, "set_epoch", forgets_position, "sampler"),
    "gradients not averaged": (program, "wrap_ddp", lambda model, ddp: model, "gradients"),
    "no all-reduce at all": (program, "wrap_ddp", lambda model, ddp: model, "accumulation"),
    "no no_sync": (program, "sync_gradients", lambda model, last: contextlib.nullcontext(), "accumulation"),
    "sample not counted": (program, "reduce_sums", skips_one_sample, "evaluation"),
    "sums not reduced": (program, "reduce_sums", lambda ddp, sums: sums, "all-reduce"),
    "noise by rank": (program, "keyed_uniform", rank_noise, "noise"),
    "other weights loaded": (program, "load_checkpoint", keeps_prefixes, "checkpoint"),
    "random state not restored": (program, "restore_rng", lambda states, ddp, seed: None, "checkpoint"),
    "not written": (program, "atomic_write", lambda path, write: False, "checkpoint"),
    "no update": (program.StepGuard, "step", lambda self, loss, step, ids: None, "precision"),
    "update of a bad step": (torch, "isfinite", lambda x: torch.ones_like(x, dtype=torch.bool), "non-finite step"),
}


def judge_broken(ddp, folder: str) -> dict[str, str]:
    """In a rank: the status of each check as it is, then of each with a feature broken."""
    args = program.parse_args([])
    args.folder = folder
    statuses = {name: check(ddp, args).status for name, check in program.FULL.items()}
    for what, (owner, attribute, replacement, name) in BROKEN.items():
        with mock.patch.object(owner, attribute, replacement):
            statuses[what] = program.FULL[name](ddp, args).status
    return statuses


def test_checks_fail_with_broken_features(tmp_path):
    ranks = run_ranks(2, judge_broken, str(tmp_path))
    for name in program.FULL:
        assert {rank[name] for rank in ranks} == {"OK"}, name
    for what in BROKEN:
        assert "FAIL" in {rank[what] for rank in ranks}, what


def test_prediction():
    """Against the formula by hand: one bucket cannot overlap, and many hide behind a long backward."""
    sizes = (1 << 10, 1 << 20, 1 << 30)
    measured = {"ranks": 2, "device": "cuda", "precision": "bf16", "matmul_tflop_per_s": {"bf16": 100.0}}
    measured["all_reduce"] = [{"bytes": size, "seconds": size / 1e9} for size in sizes]  # bus bandwidth 1 GB/s
    speedups = program.predict(measured)
    for ranks, speedup in zip(program.RANKS, speedups["quantumgrav"], strict=True):
        exposed = 2 * (ranks - 1) / ranks * 4e6 / 1e9
        assert speedup == pytest.approx(ranks * 6e-3 / (6e-3 + exposed))
    ideal = copy.deepcopy(measured)
    for row in ideal["all_reduce"]:
        row["seconds"] /= 1e6
    assert program.predict(ideal)["train_ddp"] == pytest.approx(program.RANKS, rel=1e-4)
    assert program.predict({**measured, "all_reduce": []}) == {}
