"""The shared DDP block, function by function: in one process, and in 2 or 3 gloo ranks (helpers.run_ranks)."""

from __future__ import annotations

import argparse
import collections
import importlib
import itertools
import json
import logging
import math
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
import types
import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import RankError, forkserver, one_process, run_ranks
from torch.utils.data import DataLoader

import test_ddp_setup as block
from test_ddp_setup import DDPContext, GlobalBatchSampler, RunLog, StepGuard

CPU = torch.device("cpu")


@pytest.fixture
def log(caplog):
    """The text that the block has logged so far: log()."""
    caplog.set_level(logging.INFO, logger="ddp")
    return lambda: caplog.text


@contextmanager
def listening():
    """The lines that this process logs (for ranks, where there is no caplog)."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    block.LOGGER.addHandler(handler)
    yield lines
    block.LOGGER.removeHandler(handler)


# ---- Ranks, master, device, backend ------------------------------------------------------------------

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
OPEN_MPI = {
    f"OMPI_COMM_WORLD_{k}": v for k, v in {"RANK": "3", "SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}.items()
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
PALS = {"PALS_RANKID": "3", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2"}
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "2"}


@pytest.mark.parametrize(
    ("env", "launcher"),
    [
        (TORCHRUN, "torchrun"),
        (OPEN_MPI, "Open MPI"),
        (HYDRA, "Hydra"),
        (PALS | {"WORLD_SIZE": "8"}, "PALS"),
        (PALS | {"PMI_SIZE": "8"}, "PALS"),
        (SLURM, "SLURM"),
    ],
)
def test_find_ranks(env, launcher):
    assert block.find_ranks(env, 2) == (3, 8, 1, 2, launcher)


def test_find_ranks_alone():
    assert block.find_ranks({"HOME": "/root", "WORLD_SIZE": "8", "RANK": ""}, 4) == (0, 1, 0, 1, "python")


def test_torchrun_wins_inside_other_launchers():
    """torchrun inside sbatch, or started by mpiexec: its own variables are the right ones."""
    others = {
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "1",
        "PMI_RANK": "0",
        "PMI_SIZE": "1",
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_SIZE": "1",
    }
    assert block.find_ranks(others | TORCHRUN, 2) == (3, 8, 1, 2, "torchrun")
    slurm_step = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}
    assert block.find_ranks(slurm_step | OPEN_MPI, 2)[4] == "Open MPI"


@pytest.mark.parametrize(
    ("env", "rank", "world_size"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, 1, 2),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, 1, 2),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, 1, 2),
        ({"PALS_RANKID": "1", "WORLD_SIZE": "2"}, 1, 2),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, 1, 2),
    ],
)
def test_missing_local_rank_is_the_rank_on_one_node(env, rank, world_size):
    assert block.find_ranks(env, 2)[:4] == (rank, world_size, rank, 2)
    with pytest.raises(ValueError, match="is not set and 2 ranks do not fit"):
        block.find_ranks(env, 1)


@pytest.mark.parametrize(
    ("env", "names"),
    [
        ({"RANK": "0"}, ("RANK=0", "export WORLD_SIZE")),
        ({"OMPI_COMM_WORLD_RANK": "0"}, ("OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_SIZE")),
        ({"PMI_RANK": "0"}, ("PMI_RANK=0", "PMI_SIZE")),
        ({"PALS_RANKID": "0"}, ("PALS_RANKID=0", "WORLD_SIZE")),
        ({"SLURM_PROCID": "0"}, ("SLURM_PROCID=0", "SLURM_NTASKS")),
    ],
)
def test_rank_without_world_size_is_an_error(env, names, monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ValueError, match="no world size") as error:
        block.find_ranks(env, 4)
    assert all(name in str(error.value) for name in names)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """install(name, source): a module of that name for this test."""
    monkeypatch.syspath_prepend(tmp_path)

    def call(name: str, source: str) -> None:
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / f"{name}.py").write_text(source)
        importlib.invalidate_caches()

    before = set(sys.modules)
    yield call
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) in {str(path) for path in tmp_path.glob("*.py")}:
            del sys.modules[name]


def test_pals_world_size_from_mpi4py(install):
    install("mpi4py", "class MPI:\n    class COMM_WORLD:\n        Get_size = staticmethod(lambda: 8)\n")
    assert block.find_ranks(PALS, 2) == (3, 8, 1, 2, "PALS")


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
@pytest.mark.parametrize("value", ["two", "-1", "1.0", "1;rm"])
def test_garbage_in_a_rank_variable(name, value):
    with pytest.raises(ValueError, match=f"{name}='{value}' is not a number"):
        block.find_ranks(TORCHRUN | {name: value}, 8)


@pytest.mark.parametrize("world_size", ["3", "0"])
def test_rank_outside_the_world(world_size):
    with pytest.raises(ValueError, match=f"RANK=3 is not below WORLD_SIZE={world_size}"):
        block.find_ranks(TORCHRUN | {"WORLD_SIZE": world_size}, 8)


def test_aurora_has_pmi_and_pals_variables():
    """PALS sets PMI_RANK and PMI_SIZE too; its local rank counts, on more nodes than one."""
    env = {"PMI_RANK": "13", "PMI_SIZE": "24", "PALS_RANKID": "13", "PALS_LOCAL_RANKID": "1"}
    assert block.find_ranks(env, 12)[:3] == (13, 24, 1)


def test_srun_with_pmi2_has_slurm_local_rank():
    env = {"PMI_RANK": "9", "PMI_SIZE": "16", "SLURM_PROCID": "9", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1"}
    assert block.find_ranks(env, 8)[:3] == (9, 16, 1)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu03", "gpu03"),
        ("gpu03,gpu07", "gpu03"),
        ("gpu[03-05,9],login1", "gpu03"),
        ("gpu[7,9-12]", "gpu7"),
        ("n[001]", "n001"),
        ("login1,gpu[03-05]", "login1"),
        ("rack[1-2]n[03-04]", "rack1n03"),
        ("node[03-05]-ib", "node03-ib"),
    ],
)
def test_master_from_a_slurm_node_list(nodes, first):
    env = {"SLURM_JOB_NODELIST": nodes, "SLURM_JOB_ID": "123456"}
    assert block.find_master(env, 16, 8) == (first, str(20000 + 123456 % 20000))


def test_master_from_a_pbs_node_file(tmp_path):
    (tmp_path / "nodes").write_text("x4702.hsn\nx4702.hsn\nx4703.hsn\n")
    env = {"PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_JOBID": "41234.aurora-pbs"}
    assert block.find_master(env, 24, 12) == ("x4702.hsn", "21234")


def test_master_address_is_never_touched(tmp_path):
    env = {"MASTER_ADDR": "10.1.2.3", "MASTER_PORT": "4711", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7"}
    assert block.find_master(env, 16, 8) == ("10.1.2.3", "4711")
    assert block.find_master({"MASTER_ADDR": "10.1.2.3"}, 16, 8) == ("10.1.2.3", "29500")


def test_master_is_this_node_or_an_error():
    assert block.find_master({}, 8, 8) == ("localhost", "29500")
    assert block.find_master({"MASTER_PORT": "4711"}, 8, 8)[1] == "4711"
    with pytest.raises(ValueError, match="16 ranks on several nodes"):
        block.find_master({}, 16, 8)


@pytest.mark.parametrize(
    ("backend", "device", "message"),
    [
        ("nccl", "cpu", "--backend nccl serves .*, the device is cpu"),
        ("nccl", "xpu", "--backend nccl serves .*, the device is xpu"),
        ("xccl", "cpu", "--backend xccl serves .*, the device is cpu"),
        ("ccl", "cuda", "--backend ccl serves .*, the device is cuda"),
        ("ccl", "cpu", "--backend ccl serves .*, the device is cpu"),
        ("xpu", "cpu", "--backend xpu serves .*, the device is cpu"),
    ],
)
def test_backend_that_cannot_serve_the_device(backend, device, message):
    with pytest.raises(ValueError, match=message):
        block.choose_backend(backend, torch.device(device, 0) if device != "cpu" else CPU)


def test_backend_chain(monkeypatch, log, install):
    xpu, cuda = torch.device("xpu", 0), torch.device("cuda", 0)
    assert block.choose_backend("auto", CPU) == block.choose_backend("gloo", CPU) == "gloo"
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert block.choose_backend("auto", cuda) == "nccl"
    assert block.choose_backend("gloo", cuda) == "gloo"
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(ValueError, match="built without NCCL"):
        block.choose_backend("auto", cuda)
    monkeypatch.setitem(sys.modules, "oneccl_bindings_for_pytorch", None)
    monkeypatch.setattr(dist, "is_xccl_available", lambda: False)
    assert block.choose_backend("auto", xpu) == "gloo"
    assert log().count("falling back to gloo") == 1
    install("oneccl_bindings_for_pytorch", "")
    for name in ("auto", "xccl", "ccl", "xpu"):
        monkeypatch.setattr(dist, "is_xccl_available", lambda: True)
        assert block.choose_backend(name, xpu) == "xccl"
        monkeypatch.setattr(dist, "is_xccl_available", lambda: False)
        assert block.choose_backend(name, xpu) == "ccl"
        assert "oneccl_bindings_for_pytorch" in sys.modules  # imported: it registers the backend
    assert log().count("falling back") == 1


def test_devices(monkeypatch):
    assert block.choose_device("cpu", 3) == CPU
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert block.choose_device("auto", 3) == CPU
    with pytest.raises(ValueError, match="--device cuda: this machine shows no accelerator"):
        block.choose_device("cuda", 0)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    assert block.choose_device("auto", 3) == torch.device("cuda", 3)
    assert block.choose_device("cpu", 3) == CPU
    with pytest.raises(ValueError, match="local rank 4 has no device.* 4 are visible"):
        block.choose_device("cuda", 4)
    with pytest.raises(ValueError, match="--device xpu: this machine shows cuda"):
        block.choose_device("xpu", 0)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)  # the launcher shows each rank one
    assert block.choose_device("auto", 3) == torch.device("cuda", 0)


def test_precision(monkeypatch):
    cuda = torch.device("cuda", 0)
    assert block.resolve_precision("auto", CPU) == torch.float32
    assert block.resolve_precision("bf16", CPU) == torch.bfloat16
    assert block.resolve_precision("fp16", cuda) == torch.float16
    with pytest.raises(ValueError, match="fp16 .* CPU"):
        block.resolve_precision("fp16", CPU)
    for has_bf16, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda has_bf16=has_bf16, **_: has_bf16)
        assert block.resolve_precision("auto", cuda) == expected


def look_around(ctx, keep):
    with torch.no_grad():
        total = torch.tensor([float(ctx.rank)])
        dist.all_reduce(total)
    return (
        ctx,
        total.item(),
        os.environ["MASTER_ADDR"],
        torch.get_num_threads(),
        signal.getsignal(signal.SIGUSR1) == StepGuard.on_signal,
    )


def test_setup_in_three_ranks():
    for rank, (ctx, total, master, threads, handled) in enumerate(run_ranks(3, look_around, None)):
        assert ctx == DDPContext(rank, 3, rank, 3, CPU, "gloo", "torchrun")
        assert (total, master, threads, handled) == (3.0, "localhost", 1, True)


def test_old_torch_is_named(monkeypatch, capsys):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    assert block.launch(lambda args: 0, argparse.Namespace(nproc=0)) == 2
    assert capsys.readouterr().err == "torch 2.9.1+cu128 is too old: these scripts need torch 2.10 or newer\n"


def test_nproc_inside_a_launcher_is_refused(monkeypatch, capsys):
    """It would start world_size x nproc processes, all of which write to one folder."""
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert block.launch(lambda args: 0, argparse.Namespace(nproc=2)) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and "--nproc 2" in line and "torchrun" in line


# ---- Arguments ---------------------------------------------------------------------------------------


def parse(*argv: str) -> argparse.Namespace:
    """By the block's parser, with options of all kinds beside those of the block."""
    parser = block.ArgumentParser(allow_abbrev=False)
    group = parser.add_argument_group("Optimization")
    group.add_argument("--batch_size", type=int, default=64)
    group.add_argument("--phase1_lr", type=float, default=2e-5)
    group.add_argument("--phase2_lr", type=float, default=5e-6)
    group.add_argument("--use_projection", type=block.boolean, default=True)
    group.add_argument("--teacher_query_prompt")
    group.add_argument("--false_negative_margin", type=float, default=0.0)
    group.add_argument("--matryoshka_dims", type=lambda text: [int(n) for n in text.split(",")], default=[])
    block.add_ddp_arguments(parser, "./checkpoints", "train_ddp")
    return block.parse_arguments(parser, list(argv))


@pytest.fixture
def refused(capsys):
    """refused(*argv): the one line with which the arguments are refused, with exit status 2."""

    def call(*argv: str) -> str:
        with pytest.raises(SystemExit) as stop:
            parse(*argv)
        captured = capsys.readouterr()
        assert (stop.value.code, captured.out, captured.err.count("\n")) == (2, "", 1)
        return captured.err

    return call


@pytest.mark.parametrize(
    "argv",
    [
        ["--batch_size", "8", "--wandb_name", "a=b", "--fresh", "--phase1_lr", "1e-4"],
        ["--batch_size=8", "--wandb_name=a=b", "--fresh=True", "--phase1_lr=1e-4"],
        ["batch_size=8", "wandb_name=a=b", "fresh=1", "phase1_lr=0.0001"],
        ["--batch-size", "8", "--wandb-name=a=b", "--fresh", "phase1_lr=1e-4"],
        ["--batch-size=8", "--wandb-name", "a=b", "--fresh", "true", "--phase1-lr", "1e-4"],
    ],
)
def test_spellings(argv):
    args = parse(*argv)
    assert (args.batch_size, args.wandb_name, args.fresh, args.phase1_lr) == (8, "a=b", True, 1e-4)
    assert args.given == ["batch_size", "fresh", "phase1_lr", "wandb_name"]


def test_values_with_equals_signs_and_hyphens():
    args = parse(
        "--teacher_query_prompt", "task=search query: ", "--output-dir=a-b/c_d", "--false_negative_margin", "-2"
    )
    assert (args.teacher_query_prompt, args.output_dir, args.false_negative_margin) == (
        "task=search query: ",
        "a-b/c_d",
        -2.0,
    )


@pytest.mark.parametrize("spelling", ["--local_rank=1", "--local-rank=1"])
def test_local_rank_of_torch_distributed_launch(spelling):
    assert parse(spelling).local_rank == 1


@pytest.mark.parametrize("text", ["True", "true", "1", "yes", "TRUE", "on"])
def test_boolean_true(text):
    assert block.boolean(text) is True
    assert parse(f"--use_projection={text}").use_projection is True


@pytest.mark.parametrize("text", ["False", "false", "0", "no", "FALSE", "off"])
def test_boolean_false(text):
    assert block.boolean(text) is False
    assert parse("--use_projection", text).use_projection is False
    assert parse(f"fresh={text}").fresh is False


def test_boolean_errors(refused):
    line = refused("--use_projection=maybe")
    assert "--use_projection" in line and "'maybe' is not one of True, False" in line
    assert "--use_projection" in refused("--use_projection")  # without a value it would say nothing


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--batch_sise=8"], ("'batch_sise'", "'batch_size'")),
        (["batch_sise=8"], ("'batch_sise'", "'batch_size'")),
        (["--lr", "1"], ("'lr'",)),
        (["step.batch_size=8"], ("'step.batch_size'", "'batch_size'")),
        (["--xyzzy=8"], ("'xyzzy'", "--help")),
        (["--batch_size=two"], ("--batch_size", "'two'")),
        (["--batch_size=2.5"], ("--batch_size", "'2.5'")),
        (["--batch_size"], ("--batch_size", "expected one argument")),
        (["--precision=fp8"], ("--precision", "'fp8'", "bf16")),
        (["eight"], ("eight",)),
        (["--accumulation=0"], ("--accumulation 0 must be at least 1",)),
        (["--save_every=0"], ("--save_every 0",)),
        (["--log_every=-1"], ("--log_every -1",)),
        (["--keep_checkpoints=0"], ("--keep_checkpoints 0",)),
        (["--max_bad_steps=0"], ("--max_bad_steps 0",)),
        (["--global_batch_size=8", "--accumulation=2"], ("--global_batch_size", "accumulation")),
        (["--global_batch_size=-8"], ("--global_batch_size",)),
    ],
)
def test_bad_arguments_are_one_line(refused, argv, words):
    line = refused(*argv)
    assert all(word in line for word in words), line


CONFIG = {
    "phase1_lr": 1e-4,
    "matryoshka_dims": [64, 128],
    "Optimization": {"batch_size": 16, "phase2_lr": 2e-5},
    "runtime": {"nproc": 2},
    "fresh": True,
    "use_projection": False,
    "wandb_name": None,
}


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_config_sets_defaults_and_the_command_line_wins(tmp_path, suffix):
    path = tmp_path / f"run.{suffix}"
    path.write_text(json.dumps(CONFIG))  # JSON is YAML too
    args = parse("--config", str(path))
    assert (args.phase1_lr, args.matryoshka_dims, args.batch_size, args.nproc, args.fresh, args.use_projection) == (
        1e-4,
        [64, 128],
        16,
        2,
        True,
        False,
    )
    assert args.wandb_name is None
    assert args.given == sorted(
        ["config", "phase1_lr", "matryoshka_dims", "batch_size", "phase2_lr", "nproc", "fresh", "use_projection"]
    )
    for argv in (
        ["batch_size=4", f"--config={path}"],
        ["--config", str(path), "--batch-size", "4"],
        [f"config={path}", "--batch_size=4"],
    ):
        args = parse(*argv, "--fresh=False")
        assert (args.batch_size, args.fresh, args.phase2_lr) == (4, False, 2e-5)


@pytest.mark.parametrize(
    "text", ["phase1_lr: 1e-4", 'phase1_lr: !!float "1e-4"', "phase1_lr: 0.0001", "optimization:\n  phase1_lr: 1e-4"]
)
def test_yaml_numbers(tmp_path, text):
    (tmp_path / "run.yaml").write_text(text)
    args = parse("--config", str(tmp_path / "run.yaml"))
    assert args.phase1_lr == 1e-4


@pytest.mark.parametrize("value", ["True", "true", "1", "yes", '"True"'])
def test_yaml_booleans(tmp_path, value):
    (tmp_path / "run.yaml").write_text(f"fresh: {value}\n")
    assert parse(f"--config={tmp_path / 'run.yaml'}").fresh is True


def test_dotted_options_are_sections(tmp_path):
    parser = block.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--training.batch_size", type=int, default=1)
    parser.add_argument("--model.hidden", type=int, required=True)
    block.add_ddp_arguments(parser, "out", "project")
    (tmp_path / "run.yaml").write_text("training:\n  batch_size: 4\nmodel:\n  hidden: 8\nseed: 7\n")
    args = block.parse_arguments(parser, ["--config", str(tmp_path / "run.yaml"), "model.hidden=16"])
    assert (vars(args)["training.batch_size"], vars(args)["model.hidden"], args.seed) == (4, 16, 7)
    args = block.parse_arguments(parser, ["--config", str(tmp_path / "run.yaml")])
    assert vars(args)["model.hidden"] == 8  # required, and given by the file


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("batch_sise: 8", ("'batch_sise'", "'batch_size'")),
        ("optimization:\n  batch_sise: 8", ("'optimization.batch_sise'", "'batch_size'")),
        ("somewhere:\n  batch_size: 8", ("'somewhere.batch_size'", "'batch_size'")),
        ("batch_size: eight", ("--batch_size", "'eight'")),
        ("batch_size: true", ("--batch_size", "'True'")),
        ("batch_size: 2.5", ("--batch_size", "'2.5'")),
        ("precision: fp8", ("--precision", "'fp8'")),
        ("batch_size: 8\n  seed: 3", ("line 2",)),
        ("- batch_size", ("list", "not a mapping")),
        ("", ("not a mapping",)),
    ],
)
def test_config_errors_name_file_key_and_nearest(tmp_path, refused, text, words):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    line = refused("--config", str(path))
    assert str(path) in line and all(word in line for word in words), line


def test_config_file_errors(tmp_path, refused):
    assert "No such file" in refused(f"--config={tmp_path / 'none.yaml'}")
    (tmp_path / "run.json").write_text('{"seed": 1,}')
    line = refused(f"--config={tmp_path / 'run.json'}")
    assert "run.json" in line and "line 1" in line


def test_file_is_not_blamed_for_the_command_line(tmp_path, refused):
    (tmp_path / "run.yaml").write_text("seed: 3\n")
    assert "run.yaml" not in refused(f"--config={tmp_path / 'run.yaml'}", "--seed=x")


# ---- Batch and learning rate -------------------------------------------------------------------------


def batch_args(batch_size=4, accumulation=1, global_batch_size=None):
    return argparse.Namespace(batch_size=batch_size, accumulation=accumulation, global_batch_size=global_batch_size)


@pytest.mark.parametrize(
    ("args", "world_size", "kept", "expected", "line"),
    [
        (batch_args(16, 4), 4, None, (256, 4), "global batch 256 = 4 ranks x 16 x 4 accumulation"),
        (batch_args(1), 4, None, (4, 1), "Batch size per GPU: 1, Total batch size: 4"),
        (batch_args(16, global_batch_size=256), 4, None, (256, 4), "global batch 256 = 4 ranks x 16 x 4 accumulation"),
        (
            batch_args(16, global_batch_size=256),
            1,
            None,
            (256, 16),
            "global batch 256 = 1 ranks x 16 x 16 accumulation",
        ),
        (batch_args(16, 4), 1, 256, (256, 16), "global batch 256 = 1 ranks x 16 x 16 accumulation"),
        (batch_args(4), 3, 8, (8, 1), "global batch 8 = 3 ranks"),  # resumed on 3 ranks: 3 + 3 + 2
    ],
)
def test_resolve_batch(log, args, world_size, kept, expected, line):
    assert block.resolve_batch(args, world_size, kept) == expected
    assert line in log()


def test_global_batch_that_does_not_divide():
    with pytest.raises(ValueError, match="--global_batch_size 100 is not a multiple of 3 ranks x --batch_size 16 = 48"):
        block.resolve_batch(batch_args(16, global_batch_size=100), 3)


@pytest.mark.parametrize(
    ("rule", "world_size", "factor"),
    [
        ("none", 8, 1),
        ("linear", 8, 8),
        ("sqrt", 8, 8**0.5),
        ("conservative", 4, 4),
        ("conservative", 8, 6),
        ("linear", 1, 1),
    ],
)
def test_scaled_lr(log, rule, world_size, factor):
    assert block.scaled_lr(1e-3, rule, world_size) == pytest.approx(1e-3 * factor, rel=1e-15)
    assert ("scaling" in log()) == (factor != 1)


def test_lr_at():
    for schedule in ("constant", "linear", "cosine"):
        rates = [block.lr_at(step, 100, 10, schedule) for step in range(100)]
        assert 0 < rates[0] < rates[9] < 1
        assert rates[10] == max(rates) == 1.0  # the peak is reached
        assert rates[:10] == pytest.approx([(i + 1) / 11 for i in range(10)])
        assert block.lr_at(0, 5, 0, schedule) == 1.0
        if schedule == "constant":
            assert set(rates[10:]) == {1.0}
            continue
        assert all(a > b for a, b in itertools.pairwise(rates[10:]))
        assert 0 < rates[99] < 0.02
        assert block.lr_at(100, 100, 10, schedule) == pytest.approx(0.0)
        assert block.lr_at(55, 100, 10, schedule) == pytest.approx(0.5)


# ---- Noise -------------------------------------------------------------------------------------------


def test_keyed_uniform_is_uniform():
    numbers = block.keyed_uniform(42, 3, torch.arange(4096), 256).double()
    assert numbers.shape == (4096, 256)
    assert 0 <= numbers.min() and numbers.max() < 1
    count = numbers.numel()
    assert numbers.mean().item() == pytest.approx(0.5, abs=5 / math.sqrt(12 * count))
    for low_bits in (numbers, numbers * 2**12 % 1):  # leading and trailing bits
        found = torch.histc(low_bits, 64, 0, 1)
        chi2 = ((found - count / 64) ** 2 / (count / 64)).sum().item()
        assert 20 < chi2 < 130  # 63 degrees of freedom; 8e-8 and 1e-6 outside
    assert numbers.unique().numel() > 0.95 * count  # 2^20 draws of 2^24 numbers: 3 % collide
    centred = numbers - 0.5
    for a, b in ((centred[:-1], centred[1:]), (centred[:, :-1], centred[:, 1:]), (centred[::2], centred[1::2])):
        assert abs((a * b).mean().item() * 12) < 5 / math.sqrt(a.numel())  # neighbours are uncorrelated


def test_keyed_uniform_depends_on_the_sample_alone():
    ids = torch.tensor([5, 123_456_789_012, 0, 7, 59_999_999])
    whole = block.keyed_uniform(1, 2, ids, 8, stream=3)
    parts = torch.cat(
        [block.keyed_uniform(1, 2, ids[:2], 8, stream=3), block.keyed_uniform(1, 2, ids[2:], 8, stream=3)]
    )
    assert torch.equal(whole, parts)
    assert torch.equal(whole.flip(0), block.keyed_uniform(1, 2, ids.flip(0), 8, stream=3))
    assert torch.equal(whole[:, :3], block.keyed_uniform(1, 2, ids, 3, stream=3))
    assert torch.equal(whole, block.keyed_uniform(1, 2, ids.int().long() * 0 + ids, 8, stream=3))


def test_keyed_uniform_differs_by_each_key():
    base, ids = dict(seed=1, epoch=2, stream=3), torch.arange(2000)
    numbers = {"base": block.keyed_uniform(ids=ids, draws=4, **base)}
    for name in base:
        numbers[name] = block.keyed_uniform(ids=ids, draws=4, **(base | {name: base[name] + 1}))
    numbers["swapped"] = block.keyed_uniform(ids=ids, draws=4, seed=2, epoch=1, stream=3)
    numbers["id"] = block.keyed_uniform(ids=ids + 2000, draws=4, **base)
    for (_, a), (_, b) in itertools.combinations(numbers.items(), 2):
        assert (a == b).float().mean() < 0.001
        assert abs(torch.corrcoef(torch.stack([a.ravel(), b.ravel()]))[0, 1].item()) < 0.06
    shifted = numbers["base"].roll(1, 0)
    assert (numbers["epoch"] == shifted).float().mean() < 0.001  # no epoch is another one moved by an id


# ---- Data order --------------------------------------------------------------------------------------


def context(rank: int, world_size: int) -> DDPContext:
    return DDPContext(rank, world_size, rank, world_size, CPU, "gloo", "test")


def samplers(n, total, world_size, micro_steps, seed=1, **options) -> list[GlobalBatchSampler]:
    return [
        GlobalBatchSampler(n, total, micro_steps, seed, context(rank, world_size), **options)
        for rank in range(world_size)
    ]


def global_batches(ranks: list[GlobalBatchSampler]) -> list[list[int]]:
    """The sorted ids of each global batch, from what all ranks yield; checks that all do the same number of steps."""
    micro, found = ranks[0].micro_steps, [list(sampler) for sampler in ranks]
    assert len({len(f) for f in found}) == 1
    assert len(found[0]) == len(ranks[0])
    batches = []
    for low in range(0, len(found[0]), micro):
        cells = [cell for f in found for cell in f[low : low + micro]]
        assert all(len(cell) for cell in cells)
        assert max(map(len, cells)) - min(map(len, cells)) <= 1  # equal work
        batches.append(sorted(np.concatenate(cells).tolist()))
    return batches


SHAPES = [
    (1, 1, 1, 1), (2, 1, 1, 1), (2, 2, 2, 1), (3, 2, 2, 1), (5, 4, 2, 2), (7, 3, 3, 1),
    (8, 8, 8, 1), (8, 8, 2, 4), (16, 16, 5, 3), (17, 4, 1, 4), (64, 10, 3, 2), (100, 7, 2, 3),
    (257, 16, 4, 4), (1000, 33, 3, 5), (1023, 64, 8, 2), (1024, 64, 5, 1), (4097, 256, 3, 7),
]  # fmt: skip


@pytest.mark.parametrize(("n", "total", "world_size", "micro_steps"), SHAPES)
def test_sampler_takes_each_item_once(n, total, world_size, micro_steps):
    ranks = samplers(n, total, world_size, micro_steps)
    batches = global_batches(ranks)
    assert [len(batch) for batch in batches] == [total] * (n // total)
    items = list(itertools.chain(*batches))
    assert len(set(items)) == len(items) == n // total * total
    assert 0 <= min(items) and max(items) < n


def test_sampler_refuses_what_cannot_be_dealt():
    for n, total, world_size, micro_steps in ((3, 4, 1, 1), (100, 3, 2, 2)):
        with pytest.raises(ValueError, match=f"{n} samples, global batch {total}, {world_size} ranks x {micro_steps}"):
            samplers(n, total, world_size, micro_steps)


def test_sampler_shuffles_by_seed_and_epoch():
    def order(seed, epoch):
        sampler = samplers(1000, 1000, 1, 1, seed)[0]
        sampler.set_epoch(epoch)
        return next(iter(sampler))

    orders = [order(1, 0), order(1, 1), order(2, 0), order(2, 1), np.arange(1000)]
    assert (order(1, 0) == orders[0]).all()
    for a, b in itertools.combinations(orders, 2):
        assert (a == b).mean() < 0.01
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.15
    steps = np.diff(orders[0])
    assert len(np.unique(steps)) > 400  # no stride


def test_every_item_is_left_out_sometimes():
    sampler, seen = samplers(10, 8, 1, 1)[0], collections.Counter()
    for epoch in range(200):
        sampler.set_epoch(epoch)
        seen.update(next(iter(sampler)).tolist())
    assert len(seen) == 10 and min(seen.values()) > 130 and max(seen.values()) < 190  # 160 each, sigma 5.7


def test_global_batches_do_not_depend_on_the_ranks():
    for epoch in (0, 5):
        plans = []
        for world_size, micro_steps in ((1, 1), (2, 1), (3, 2), (4, 4)):
            ranks = samplers(500, 24, world_size, micro_steps)
            for sampler in ranks:
                sampler.set_epoch(epoch)
            plans.append(global_batches(ranks))
        assert all(plan == plans[0] for plan in plans)
        assert len({sampler.fingerprint() for sampler in ranks}) == 1


@pytest.mark.parametrize("window", [1, 4])
def test_restart_on_another_world_size(window):
    options = dict(window=window, cut=lambda ids, epoch: np.sort(ids).reshape(-1, 12)) if window > 1 else {}
    whole = global_batches(samplers(200, 12, 2, 1, **options))
    for position in range(len(whole) + 1):
        ranks = samplers(200, 12, 3, 2, **options)
        for sampler in ranks:
            sampler.set_epoch(0, position)
        assert global_batches(ranks) == whole[position:]


def test_cut_groups_a_window():
    """Length buckets: batches cut from sorted windows cover the same items, in any order of the batches."""

    def cut(ids, epoch):
        ids = np.sort(ids)
        pieces = [ids[low : low + 10] for low in range(0, len(ids), 10)]
        return pieces[::-1] if epoch else pieces

    ranks = samplers(105, 10, 2, 2, window=4, cut=cut)
    batches = global_batches(ranks)
    assert sorted(itertools.chain(*batches)) == sorted(itertools.chain(*global_batches(samplers(105, 10, 2, 2))))
    assert [len(b) for b in batches] == [10] * 10
    first = sorted(itertools.chain(*batches[:4]))
    assert batches[:4] == [first[low : low + 10] for low in range(0, 40, 10)]
    ranks[0].set_epoch(1)
    assert next(ranks[0].batches())[0] > np.mean(first)  # the epoch reaches `cut`


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_batches_of_unequal_size_restart(world_size):
    """Token budgets: as many batches per window, of any size; the position counts them."""

    def cut(ids, epoch):
        count = len(ids) // 20
        cuts = [20 * k + (7 if k % 2 else -7) for k in range(1, count)]
        return np.split(np.sort(ids), cuts)

    plan = [batch.tolist() for batch in samplers(300, 20, 1, 1, window=4, cut=cut)[0].batches()]
    assert len(plan) == 300 // 20 and len({len(b) for b in plan}) > 2
    for position in (0, 1, 7, len(plan) - 1, len(plan)):
        ranks = samplers(300, 20, world_size, 2, window=4, cut=cut)
        for sampler in ranks:
            sampler.set_epoch(0, position)
        found = [list(sampler) for sampler in ranks]
        assert {len(f) for f in found} == {2 * len(plan[position:])} == {len(ranks[0])}
        for number, batch in enumerate(plan[position:]):
            cells = [cell for f in found for cell in f[2 * number : 2 * number + 2]]
            assert sorted(np.concatenate(cells).tolist()) == sorted(batch)


def test_sampler_drives_a_data_loader():
    data = torch.arange(100) * 10
    sampler = samplers(100, 12, 2, 3)[1]
    loader = DataLoader(data, batch_sampler=sampler)
    assert isinstance(sampler, torch.utils.data.DistributedSampler)
    assert len(loader) == 8 * 3
    assert [b.tolist() for b in loader] == [(ids * 10).tolist() for ids in sampler]


def test_sixty_million_items_start_at_once():
    tracemalloc.start()
    begin = time.perf_counter()
    sampler = GlobalBatchSampler(60_000_000, 512, 2, 42, context(3, 8), window=64)
    sampler.set_epoch(1, 100_000)
    first = next(iter(sampler))
    fingerprint = sampler.fingerprint()
    seconds, peak = time.perf_counter() - begin, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (len(first), len(fingerprint), len(sampler)) == (32, 32, (60_000_000 // 512 - 100_000) * 2)
    assert first.max() > 30_000_000
    assert seconds < 2
    assert peak < 50e6


def test_fingerprint_tells_plans_apart():
    base = dict(n=1000, total=10, world_size=1, micro_steps=1, seed=1)
    prints = [
        samplers(**(base | change))[0].fingerprint()
        for change in (
            {},
            {"n": 1001},
            {"total": 20},
            {"seed": 2},
            {"window": 2, "cut": lambda ids, e: ids[::-1].reshape(-1, 10)},
        )
    ]
    other = samplers(**base)[0]
    other.set_epoch(1)
    assert len({*prints, other.fingerprint()}) == 6
    other.set_epoch(0, start=50)
    assert other.fingerprint() == prints[0]  # of the epoch, not of where a rank stands


# ---- Collectives -------------------------------------------------------------------------------------


def sum_up(ctx):
    calls, real = [], dist.all_reduce
    dist.all_reduce = lambda tensor, *a, **k: (calls.append(tensor.dtype), real(tensor, *a, **k))[1]
    sums = {
        "big": 2.0**52 if ctx.rank == 0 else 1,
        "tensor": torch.tensor(0.1),
        "count": ctx.rank,
        "half": torch.tensor([0.5], dtype=torch.bfloat16),
    }
    result = block.reduce_sums(ctx, sums)
    block.barrier(ctx)
    dist.all_reduce = real
    return result, calls


def test_reduce_sums():
    for result, calls in run_ranks(3, sum_up):
        assert list(result) == ["big", "tensor", "count", "half"]
        assert result["big"] == 2.0**52 + 2  # float64 on all the way
        assert result["tensor"] == pytest.approx(3 * float(torch.tensor(0.1)), rel=1e-15)
        assert (result["count"], result["half"]) == (3.0, 1.5)
        assert calls == [torch.float64, torch.float64]  # one collective each: the sums, the barrier
    assert block.reduce_sums(one_process(), {"a": 2}) == {"a": 2.0}


def boast(path):
    Path(path).open("a").write("x")
    return {"answer": 42}


def break_down(path):
    raise FileNotFoundError(f"no {path}")


def on_rank0_twice(ctx, path):
    result = block.on_rank0(ctx, boast, path)
    try:
        block.on_rank0(ctx, break_down, path)
    except Exception as error:
        block.barrier(ctx)  # the ranks are still together
        return result, type(error).__name__, str(error)


def test_on_rank0(tmp_path):
    results = run_ranks(2, on_rank0_twice, str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "x"
    assert [r[0] for r in results] == [{"answer": 42}] * 2
    assert results[0][1:] == ("FileNotFoundError", f"no {tmp_path}/file")
    assert results[1][1] == "RuntimeError"
    assert "rank 0 failed in break_down: FileNotFoundError: no " in results[1][2]


def compare(ctx, values):
    try:
        block.require_same(ctx, "the data", values[ctx.rank])
        return "same"
    except RuntimeError as error:
        return str(error)


def test_require_same():
    assert run_ranks(2, compare, [b"abc", b"abc"]) == ["same", "same"]
    for values in ([b"abc", b"abd", b"abc"], [b"a", b"b", b"c"]):
        assert all("the ranks disagree on the data" in r for r in run_ranks(3, compare, values))
    assert compare(one_process(), [b"abc"]) == "same"


def test_a_rank_that_raises_is_reported():
    with pytest.raises(RankError, match="(?s)rank 1: .*boom") as error:
        run_ranks(2, fail_on_one)
    assert (error.value.rank, error.value.kind) == (1, "ZeroDivisionError")


def fail_on_one(ctx):
    if ctx.rank == 1:
        raise ZeroDivisionError("boom")
    block.barrier(ctx)


# ---- Gradients ---------------------------------------------------------------------------------------


def network(seed=0, dtype=torch.float64) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).to(dtype)


def batch_of(ids) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(24, 6, generator=generator, dtype=torch.float64)[torch.as_tensor(ids)]


def accumulate(ctx, parts: int):
    """(gradients after `parts` micro-batches of 24 samples, all-reduces, local gradients before the last)."""
    model = block.wrap_ddp(network(ctx.rank), ctx)  # DDP starts from rank 0's weights
    calls = []
    if ctx.world_size > 1:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        def counted(group, bucket):
            calls.append(bucket.buffer().numel())
            return allreduce_hook(group, bucket)

        model.register_comm_hook(None, counted)
    mine, before = batch_of(range(ctx.rank, 24, ctx.world_size)), None
    for number, part in enumerate(mine.chunk(parts)):
        if number == parts - 1 and parts > 1:
            before = torch.cat([p.grad.flatten() for p in model.parameters()])
        with block.sync_gradients(model, number == parts - 1):
            loss = model(part).square().sum() * ctx.world_size / 24
            loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()]).clone(), calls, before


def test_ddp_gradient_equals_one_process():
    alone, _, _ = accumulate(one_process(), 1)
    for world_size, parts in ((2, 1), (2, 3), (3, 2)):
        results = run_ranks(world_size, accumulate, parts)
        for gradient, calls, _ in results:
            assert torch.linalg.norm(gradient - alone) < 1e-12 * torch.linalg.norm(alone)
            assert sum(calls) == alone.numel()  # every gradient is sent once, whatever the accumulation
        if parts > 1:  # and until then the ranks have their own
            assert not torch.allclose(results[0][2], results[1][2])


def test_wrappers_in_a_world_of_one():
    model = network()
    assert block.wrap_ddp(model, one_process()) is model
    assert block.unwrap(torch.compile(model, backend="eager")) is model
    with block.sync_gradients(model, False):
        pass


def unwrap_all(ctx):
    model = network()
    wrapped = block.wrap_ddp(model, ctx)
    assert type(wrapped).__name__ == "DistributedDataParallel"
    assert wrapped.gradient_as_bucket_view
    both = [
        block.unwrap(wrapped),
        block.unwrap(torch.compile(wrapped, backend="eager")),
        block.unwrap(block.wrap_ddp(torch.compile(model, backend="eager"), ctx)),
    ]
    compiled = torch.compile(wrapped, backend="eager")
    with block.sync_gradients(compiled, False):
        skipped = not wrapped.require_backward_grad_sync
    return all(inner is model for inner in both), skipped, wrapped.require_backward_grad_sync


def test_unwrap_in_two_ranks():
    assert run_ranks(2, unwrap_all) == [(True, True, True)] * 2


def forward_with_buffers(ctx):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a warning per rank and start would hide others
        wrapped = block.wrap_ddp(torch.nn.BatchNorm1d(3), ctx)
    wrapped.module.running_mean.fill_(ctx.rank)
    calls, real = [], wrapped._sync_buffers
    wrapped._sync_buffers = lambda *a, **k: (calls.append(a), real(*a, **k))
    wrapped.train()
    for _ in range(2):
        wrapped(torch.full((4, 3), float(ctx.rank))).sum().backward()
    return wrapped.module.running_mean.tolist(), len(calls)


def test_buffers_are_not_broadcast_every_step():
    assert run_ranks(2, forward_with_buffers) == [([0.0] * 3, 0), ([1.0] * 3, 0)]


# ---- The end of a step -------------------------------------------------------------------------------


def guard_of(ctx, model, started=None, dtype=torch.float32, **changes):
    options = dict(max_grad_norm=1.0, max_minutes=0.0, max_bad_steps=3) | changes
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    return StepGuard(
        argparse.Namespace(**options), ctx, optimizer, dtype, time.monotonic() if started is None else started
    )


def snapshot(guard) -> list[torch.Tensor]:
    states = [v for state in guard.optimizer.state.values() for v in state.values()]
    return [t.detach().clone() for t in (*guard.parameters, *states)]


def one_step(guard, model, number, data, spoil=1.0, ids=()):
    loss = model(data).square().mean()
    guard.scaler.scale(loss).backward()
    return guard.step(loss.detach() * spoil, number, list(ids))


def meet_nan(ctx, how: str):
    """Steps 1, 2 good; 3 bad on rank 1 alone; 4 good. (unchanged by 3, changed by 4, bad steps, lines, weights)"""
    model = network(dtype=torch.float32)
    wrapped = block.wrap_ddp(model, ctx)
    guard = guard_of(ctx, model)
    data = batch_of(range(ctx.rank, 24, ctx.world_size)).float()
    with listening() as lines:
        for number in (1, 2):
            one_step(guard, wrapped, number, data)
        before, mine = snapshot(guard), ctx.rank == ctx.world_size - 1
        if how == "data":
            one_step(guard, wrapped, 3, data * (math.nan if mine else 1.0))
        else:  # a finite gradient and a loss that is not
            one_step(guard, wrapped, 3, data, spoil=math.inf if mine else 1.0)
        after = snapshot(guard)
        one_step(guard, wrapped, 4, data)
        last = snapshot(guard)
        guard.finish()
    same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    moved = all(not torch.equal(a, b) for a, b in zip(after, last, strict=True))
    return (
        same,
        moved,
        guard.bad_steps,
        guard.bad_in_row,
        [line for line in lines if "non-finite" in line],
        torch.cat([p.detach().flatten() for p in guard.parameters]),
    )


@pytest.mark.parametrize("how", ["data", "loss"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_non_finite_step_is_skipped_on_all_ranks(how, world_size):
    results = run_ranks(world_size, meet_nan, how)
    for same, moved, bad_steps, in_row, _, weights in results:
        assert same and moved
        assert (bad_steps, in_row) == (1, 0)
        assert weights.isfinite().all() and torch.equal(weights, results[0][5])
    assert len(results[0][4]) == 1 and "at step 3:" in results[0][4][0]


def keep_failing(ctx, max_bad: int):
    model = network(dtype=torch.float32)
    wrapped, guard = block.wrap_ddp(model, ctx), guard_of(ctx, model, max_bad_steps=max_bad)
    data = batch_of(range(ctx.rank, 24, ctx.world_size)).float()
    for number in range(1, 20):
        bad = number in (2, 3) or number >= 6  # two in a row are not three
        ids = [np.arange(10 * number, 10 * number + 3) + 1000 * ctx.rank]
        try:
            one_step(guard, wrapped, number, data * (math.nan if bad and ctx.rank == 0 else 1.0), ids=ids)
        except RuntimeError as error:
            return number, str(error)


def test_stops_after_max_bad_steps_with_the_samples():
    for rank, (number, text) in enumerate(run_ranks(2, keep_failing, 3)):
        assert number == 9  # 6, 7 and 8 were bad; read one step later
        assert text.startswith("3 steps in a row with a non-finite loss or gradient")
        for step in (6, 7, 8):
            ids = [1000 * rank + 10 * step + i for i in range(3)]
            assert f"step {step}: {ids}" in text
        assert "step 5" not in text


def test_bad_last_step_is_counted_and_named(log):
    model = network(dtype=torch.float32)
    guard, data = guard_of(one_process(), model), batch_of(range(24)).float()
    one_step(guard, model, 1, data)
    one_step(guard, model, 2, data * math.nan)
    assert guard.bad_steps == 0
    guard.finish()
    assert guard.bad_steps == 1
    assert "at step 2:" in log()


def test_clipping():
    model = network(dtype=torch.float32)
    data = batch_of(range(24)).float() * 100
    loss = model(data).square().mean()
    norm = torch.linalg.norm(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
    seen = []
    for limit in (0.5, 0.0):
        guard = guard_of(one_process(), model, max_grad_norm=limit)
        guard.optimizer.step = lambda: seen.append(
            torch.linalg.norm(torch.cat([p.grad.flatten() for p in model.parameters()])).item()
        )
        model(data).square().mean().backward()
        returned, reason = guard.step(loss, 1, [])
        assert returned.item() == pytest.approx(norm.item(), rel=1e-5) and reason == ""
    assert seen == pytest.approx([0.5, norm.item()], rel=1e-4)


def test_fp16_scaler_skips_and_backs_off():
    model = network(dtype=torch.float32)
    guard, data = guard_of(one_process(), model, dtype=torch.float16), batch_of(range(24)).float()
    assert guard.scaler.is_enabled()
    one_step(guard, model, 1, data)
    before, scale = snapshot(guard), guard.scaler.get_scale()
    one_step(guard, model, 2, data * math.inf)
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(guard), strict=True))
    assert guard.scaler.get_scale() == scale / 2
    guard.finish()
    assert guard.bad_steps == 1
    assert not guard_of(one_process(), model).scaler.is_enabled()


def be_asked(ctx, number):
    model = network(dtype=torch.float32)
    wrapped, guard = block.wrap_ddp(model, ctx), guard_of(ctx, model)
    data, reasons = batch_of(range(24)).float(), []
    for step in range(1, 6):
        if step == 3 and ctx.rank == 1:
            os.kill(os.getpid(), number)
        reasons.append(one_step(guard, wrapped, step, data)[1])
    return reasons


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_to_one_rank_stops_all_at_the_same_step(name):
    results = run_ranks(2, be_asked, getattr(signal, name))
    assert results == [["", "", "", name, name]] * 2  # sent before step 3, read one step later


def run_late(ctx):
    model = network(dtype=torch.float32)
    started = time.monotonic() - (61 if ctx.rank == 1 else 0)
    wrapped, guard = block.wrap_ddp(model, ctx), guard_of(ctx, model, started=started, max_minutes=1.0)
    data = batch_of(range(24)).float()
    return [one_step(guard, wrapped, step, data)[1] for step in (1, 2)]


def test_max_minutes():
    assert run_ranks(2, run_late) == [["", "time limit"]] * 2


def count_reductions(ctx):
    model = network(dtype=torch.float32)
    wrapped, guard = block.wrap_ddp(model, ctx), guard_of(ctx, model)
    calls, real = [], dist.all_reduce
    dist.all_reduce = lambda tensor, *a, **k: (calls.append(tensor.numel()), real(tensor, *a, **k))[1]
    for step in range(4):
        one_step(guard, wrapped, step, batch_of(range(24)).float())
    dist.all_reduce = real
    return calls


def test_one_small_reduction_per_step():
    for calls in run_ranks(2, count_reductions):
        assert len(calls) == 4 and max(calls) <= 8


def be_stuck(ctx):
    os.kill(os.getpid(), signal.SIGTERM)
    StepGuard.beat -= 19.5  # of 20 s
    time.sleep(15)


def test_a_stuck_rank_ends_itself_after_a_signal():
    begin = time.monotonic()
    with pytest.raises(RankError, match="died with exit code 143"):
        run_ranks(1, be_stuck)
    assert time.monotonic() - begin < 10


def test_stop_status(log):
    assert [block.stop_status(reason) for reason in ("SIGTERM", "SIGINT", "time limit")] == [143, 130, 0]
    assert "requeue" not in log()
    assert block.stop_status("SIGUSR1") == 0
    assert log().splitlines()[-1].endswith("checkpoint written, requeue me")


# ---- Random state ------------------------------------------------------------------------------------


def draw_and_restore(ctx, path):
    torch.manual_seed(ctx.rank)
    states = block.rng_states(ctx)
    if ctx.rank == 0:
        torch.save(states, path)
    block.barrier(ctx)
    first = torch.rand(1).item()
    states = torch.load(path, weights_only=True)
    block.restore_rng(states, ctx, 5)
    again = torch.rand(1).item()
    block.restore_rng(states[:1], ctx, 5)  # as if saved on one rank
    return first, again, torch.rand(1).item()


def test_random_state_of_every_rank(tmp_path):
    results = run_ranks(2, draw_and_restore, str(tmp_path / "rng.pt"))
    for first, again, _ in results:
        assert first == again
    assert results[0][0] != results[1][0] and results[0][2] != results[1][2]
    assert not {r[2] for r in results} & {r[0] for r in results}


# ---- Checkpoints -------------------------------------------------------------------------------------


def state_of(step: int, size: int = 1000) -> dict:
    return {
        "model": {"weight": torch.full((size,), float(step))},
        "step": step,
        "epoch": step // 10,
        "args": {"seed": 42},
    }


def save_steps(folder: Path, *steps: int, keep: int = 2, best: int | None = None) -> None:
    for step in steps:
        assert block.save_checkpoint(folder, state_of(step), step, keep, step == best)


def test_keep_checkpoints(tmp_path):
    save_steps(tmp_path, 9, 10, 100, 1000, keep=2, best=10)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "best.pt",
        "latest.pt",
        "step_00000100.pt",
        "step_00001000.pt",
    ]
    assert block.load_checkpoint(tmp_path / "latest.pt")["step"] == 1000
    assert block.load_checkpoint(tmp_path / "best.pt")["step"] == 10
    save_steps(tmp_path, 1001, keep=1)
    assert sorted(p.name for p in tmp_path.glob("step_*")) == ["step_00001001.pt"]


def test_file_system_without_hard_links(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError("no links here")))
    save_steps(tmp_path, 1, 2)
    assert block.load_checkpoint(tmp_path / "latest.pt")["step"] == 2


@pytest.fixture(params=["limit", "tmpfs"])
def small_disk(request, tmp_path):
    """A folder where a file of 8 MB does not fit."""
    if request.param == "limit":
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4_000_000, hard))
        yield tmp_path
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        return
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(tmp_path)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_full_disk_keeps_the_old_checkpoint(small_disk, log):
    save_steps(small_disk, 1)
    files = {p.name: p.stat().st_size for p in small_disk.iterdir()}
    assert block.save_checkpoint(small_disk, state_of(2, size=2_000_000), 2, keep=2) is False
    assert {p.name: p.stat().st_size for p in small_disk.iterdir()} == files  # nothing half written is left
    assert block.load_checkpoint(block.find_checkpoint(small_disk))["step"] == 1
    assert "could not write" in log() and "MB free" in log() and "step_00000002.pt" in log()
    save_steps(small_disk, 3)
    assert block.load_checkpoint(block.find_checkpoint(small_disk))["step"] == 3


def save_for_ever(pipe, folder: str, first: int) -> None:
    for step in itertools.count(first):
        block.save_checkpoint(folder, state_of(step, 300_000), step, keep=2, best=step % 2 == 0)
        pipe.send(step)


def test_kill_during_saves(tmp_path):
    chance, done = random.Random(0), 0
    for _ in range(20):
        ours, theirs = forkserver().Pipe(duplex=False)
        process = forkserver().Process(target=save_for_ever, args=(theirs, str(tmp_path), done + 1))
        process.start()
        theirs.close()
        assert ours.poll(20)
        time.sleep(chance.uniform(0, 0.03))
        process.kill()
        process.join()
        try:
            while True:
                done = ours.recv()
        except EOFError:
            ours.close()
        names = [p for p in tmp_path.iterdir() if not p.name.startswith(".")]
        assert {p.name for p in names} > {"latest.pt"}
        for path in names:  # all that has a name is whole
            state = block.load_checkpoint(path)
            assert (state["model"]["weight"] == state["step"]).all()
        step = block.load_checkpoint(block.find_checkpoint(tmp_path))["step"]
        assert done <= step <= done + 1
        done = step


def test_what_killed_saves_leave_is_removed(tmp_path):
    """Each is as large as a checkpoint: a job that is killed often would fill the disk."""
    save_steps(tmp_path, 1)
    (tmp_path / ".step_00000002.pt.4194305.tmp").write_bytes(b"half")  # above the largest pid
    (tmp_path / ".latest.pt.link").write_bytes(b"half")
    block.open_run(run_args(tmp_path), one_process(), ())
    save_steps(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest.pt", "step_00000001.pt", "step_00000002.pt"]


def truncate(path: Path) -> None:
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 2)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    place = bytes(content).index(np.float32(3).tobytes() * 4) + 5  # inside the weights of step 3
    content[place] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, empty])
def test_damaged_latest_is_named_and_the_one_before_is_used(tmp_path, log, damage):
    save_steps(tmp_path, 1, 2, 3)
    damage(tmp_path / "latest.pt")
    with pytest.raises(ValueError, match="latest.pt is damaged"):
        block.load_checkpoint(tmp_path / "latest.pt")
    found = block.find_checkpoint(tmp_path)
    assert block.load_checkpoint(found)["step"] == 2
    assert "WARNING" in log() and "latest.pt is damaged" in log() and "the one before it" in log()
    damage3 = truncate if damage is flip_a_bit else damage
    damage3(Path(found))
    with pytest.raises(ValueError, match="no whole checkpoint is left in .*--fresh"):
        block.find_checkpoint(tmp_path)
    assert "step_00000002.pt is damaged" in log()


def test_no_checkpoint_is_none(tmp_path):
    assert block.find_checkpoint(tmp_path) is None
    with pytest.raises(FileNotFoundError):
        block.load_checkpoint(tmp_path / "latest.pt")


def test_names_from_wrapped_models(tmp_path):
    plain = network().state_dict()
    for prefix in ("", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."):
        torch.save({"model": {prefix + k: v for k, v in plain.items()}, "step": 1}, tmp_path / "one.pt")
        state = block.load_checkpoint(tmp_path / "one.pt")
        assert list(state["model"]) == list(plain)
        network(1).load_state_dict(state["model"])
    inner = {"model": {"encoder.module.weight": torch.zeros(1)}}
    torch.save(inner, tmp_path / "one.pt")
    assert list(block.load_checkpoint(tmp_path / "one.pt")["model"]) == ["encoder.module.weight"]  # a part named so


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_malicious_checkpoint_is_refused(tmp_path):
    proof = tmp_path / "proof"
    torch.save({"model": {}, "step": 1, "bad": Malicious(str(proof))}, tmp_path / "latest.pt")
    with pytest.raises(ValueError, match="latest.pt is damaged or no checkpoint"):
        block.load_checkpoint(tmp_path / "latest.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Malicious(str(proof))))
    with pytest.raises(ValueError, match="plain.pt is damaged or no checkpoint"):
        block.load_checkpoint(tmp_path / "plain.pt")
    assert not proof.exists()


# ---- Opening a run -----------------------------------------------------------------------------------


def run_args(folder: Path, *argv: str) -> argparse.Namespace:
    return parse(f"--output_dir={folder}", "--wandb_mode=disabled", *argv)


def test_open_run_resumes_or_names_the_first_difference(tmp_path, log):
    folder, alone = tmp_path / "run", one_process()
    args = run_args(folder, "--matryoshka_dims=64,128", "--seed=3")
    assert block.open_run(args, alone, ("seed",)) is None
    state = state_of(5) | {"args": vars(args)}
    block.save_checkpoint(folder, state, 5, 2)
    same = ("matryoshka_dims", "seed", "batch_size")
    assert block.open_run(args, alone, same)["step"] == 5
    assert "resuming" in log() and "step 5, epoch 0" in log()
    other = run_args(folder, "--matryoshka_dims=64,128", "--seed=4", "--batch_size=3")
    with pytest.raises(ValueError, match=r"holds a run with --seed 3, this one has 4: .*--output_dir.*--fresh"):
        block.open_run(other, alone, same)
    assert block.open_run(other, alone, ("matryoshka_dims",))["step"] == 5


def test_fresh_moves_the_old_run_aside(tmp_path, log):
    folder = tmp_path / "run"
    save_folder = run_args(folder)
    block.open_run(save_folder, one_process(), ())
    block.save_checkpoint(folder, state_of(5), 5, 2)
    assert block.open_run(run_args(folder, "--fresh"), one_process(), ()) is None
    assert list(folder.iterdir()) == []
    (aside,) = (p for p in tmp_path.iterdir() if p != folder)
    assert block.load_checkpoint(aside / "latest.pt")["step"] == 5
    assert str(aside) in log()


def open_together(ctx, folder):
    args = run_args(Path(folder))
    try:
        state = block.open_run(args, ctx, ("seed",))
        return state and state["step"]
    except (ValueError, RuntimeError) as error:
        return str(error)


def test_open_run_on_two_ranks(tmp_path):
    assert run_ranks(2, open_together, str(tmp_path / "run")) == [None, None]
    block.save_checkpoint(tmp_path / "run", state_of(5), 5, 2)
    assert run_ranks(2, open_together, str(tmp_path / "run")) == [5, 5]
    truncate(tmp_path / "run" / "latest.pt")
    for text in run_ranks(2, open_together, str(tmp_path / "run")):
        assert "no whole checkpoint is left" in text


# ---- Log, metrics, wandb -----------------------------------------------------------------------------


def open_log(folder: Path, *argv: str, resumed: dict | None = None) -> RunLog:
    folder.mkdir(exist_ok=True)
    return RunLog(parse(f"--output_dir={folder}", *(argv or ["--wandb_mode=disabled"])), one_process(), resumed)


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_first_lines_of_a_run(tmp_path, log):
    open_log(tmp_path, "--wandb_mode=disabled", "--batch_size=64", "--seed=7")
    text = log()
    assert "command: " in text and f"torch {torch.__version__}, world size 1, backend gloo" in text
    differ = next(line for line in text.splitlines() if "differ from the defaults" in line)
    assert "seed=7" in differ and "batch_size" not in differ  # 64 is the default


def test_keep_until_drops_what_is_made_again(tmp_path):
    first = open_log(tmp_path)
    for step in (0, 10, 20, 20, 30):
        first.write({"step": step, "loss": 1.0 / 3 + step})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 40, "lo')  # killed while writing
    open_log(tmp_path, resumed={"step": 20})
    assert [row["step"] for row in rows_of(tmp_path)] == [0, 10, 20, 20]
    assert rows_of(tmp_path)[1]["loss"] == 1.0 / 3 + 10  # full precision
    open_log(tmp_path)  # a new run in the folder of one that was killed before its first checkpoint
    assert rows_of(tmp_path) == []


def interval_record(ctx, folder):
    log = RunLog(run_args(Path(folder)), ctx, None)
    model = block.wrap_ddp(network(), ctx)
    with listening() as lines:
        for _ in range(2):  # 1 + 2 samples on rank 0, 3 + 6 on rank 1
            count = 1 + 2 * ctx.rank
            log.add(count, loss=(torch.tensor(1.0 + ctx.rank) * count, count), rare=(torch.tensor(1.0), ctx.rank))
        time.sleep(0.05)
        log.waiting(iter([1]))
        log.interval(120, 1000, 1, model, 3e-4, torch.tensor(0.912), phase=2)
    log.close("finished", steps=120)
    return log.final_loss, lines


def test_half_a_record_does_not_stop_the_end(tmp_path):
    """As a full disk leaves it."""
    log = RunLog(run_args(tmp_path), one_process(), None)
    log.write({"step": 1, "loss": 0.5})
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 2, "lo')
    log.close("finished", steps=1)
    assert (tmp_path / "curves.png").exists() and (tmp_path / "summary.json").exists()


def test_interval_is_a_mean_over_all_ranks(tmp_path):
    (first, lines), (second, silent) = run_ranks(2, interval_record, str(tmp_path))
    (record,) = rows_of(tmp_path)  # rank 0 alone writes
    assert record["loss"] == first == second == (2 * 1 * 1.0 + 2 * 3 * 2.0) / 8
    assert record["rare"] == 4.0 / 2
    assert record["grad_norm"] == pytest.approx(0.912, rel=1e-6)
    assert 0 < record["samples/s"] < 8 / 0.05
    assert (record["step"], record["epoch"], record["lr"], record["phase"]) == (120, 1, 3e-4, 2)
    (line,) = lines
    assert line.startswith("step=120/1000 epoch=1 loss=1.750000 rare=2.000000 grad_norm=0.912 lr=3.000e-04 samples/s=")
    assert all(name in line for name in ("data_wait=", "comm=", "mem_gb="))
    assert silent == []


def test_interval_without_counted_items(tmp_path):
    """A loss over a variable number of items may have none in an interval."""
    log = open_log(tmp_path)
    log.add(4, loss=(torch.tensor(2.0), 1), pairs=(torch.tensor(0.0), 0))
    log.interval(1, 10, 0, network(), 1e-3, torch.tensor(1.0))
    assert rows_of(tmp_path)[0]["loss"] == 2.0


def test_close_writes_summary_and_curves(tmp_path):
    log = open_log(tmp_path, "--wandb_mode=disabled", "--seed=7", resumed={"step": 0, "wall_s": 100.0})
    for step in range(5):
        log.write({"step": step, "epoch": 0, "loss": 1.0 / (step + 1), "ndcg@10": 0.1 * step})
    log.close("finished", steps=4, best_metric={"name": "ndcg@10", "value": 0.4, "step": 4})
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["world_size"], summary["backend"], summary["device"]) == (
        "finished",
        4,
        1,
        "gloo",
        "cpu",
    )
    assert summary["args"]["seed"] == 7 and 100 < summary["wall_s"] < 110
    assert summary["best_metric"]["value"] == 0.4
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_a_run_stopped_before_its_first_record_ends_well(tmp_path):
    open_log(tmp_path).close("stopped", steps=0, reason="SIGTERM")
    assert json.loads((tmp_path / "summary.json").read_text())["reason"] == "SIGTERM"


class FakeWandb(types.ModuleType):
    """wandb that records; `fail` is called first in each of its functions."""

    def __init__(self, **fail):
        super().__init__("wandb")
        self.fail, self.options, self.rows, self.ended = fail, None, [], False
        self.Settings = lambda **options: options

    def init(self, **options):
        self.fail.get("init", bool)()
        self.options = options
        return self

    def log(self, row):
        self.fail.get("log", bool)()
        self.rows.append(row)

    def finish(self):
        self.fail.get("finish", bool)()
        self.ended = True


def test_wandb_gets_the_same_records(tmp_path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    log = open_log(tmp_path, "--wandb_mode=offline", "--wandb_project=p", "--wandb_name=n")
    for step in range(3):
        log.write({"step": step, "loss": 1 / 3})
    log.close("finished")
    assert wandb.rows == rows_of(tmp_path) and wandb.ended
    assert {k: wandb.options[k] for k in ("project", "name", "mode", "resume", "id")} == dict(
        project="p", name="n", mode="offline", resume="allow", id=log.wandb_id
    )
    again = open_log(tmp_path, "--wandb_mode=offline", resumed={"step": 3, "wandb_id": log.wandb_id})
    again.close("finished")
    assert wandb.options["id"] == log.wandb_id  # a resumed run goes on in the same wandb run


def explode():
    raise ConnectionError("no network")


@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_wandb_that_fails(tmp_path, monkeypatch, log, where):
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(**{where: explode}))
    run = open_log(tmp_path, "--wandb_mode=online")
    for step in range(3):
        run.write({"step": step, "loss": 1.0})
    run.close("finished", steps=3)
    assert len(rows_of(tmp_path)) == 3 and (tmp_path / "summary.json").exists()
    assert log().count("wandb failed and is off") == 1 and "no network" in log()


@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_wandb_that_never_returns(tmp_path, monkeypatch, where):
    for_ever = threading.Event()
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(**{where: for_ever.wait}))
    begin = time.monotonic()
    run = open_log(tmp_path, "--wandb_mode=online")
    for step in range(500):
        run.write({"step": step, "loss": 1.0})
    assert time.monotonic() - begin < 2
    waits, thread = [], run.thread
    assert thread.daemon  # it does not keep the interpreter from ending
    run.thread = types.SimpleNamespace(join=lambda timeout: waits.append(timeout), is_alive=thread.is_alive)
    run.close("finished", steps=500)
    assert len(waits) == 1 and waits[0] <= 30
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 500
    for_ever.set()
    thread.join(5)


def test_wandb_auto(tmp_path, monkeypatch, log):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    first = open_log(tmp_path, "--wandb_mode=auto")
    first.thread.join(5)
    assert wandb.options is None and "wandb disabled" in log()  # one line, and nothing is started
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    second = open_log(tmp_path, "--wandb_mode=auto")
    second.queue.put(None)
    second.thread.join(5)
    assert wandb.options["mode"] == "online"
