"""Check this machine for distributed training: the first command on a new machine.

One line per check, `OK|WARN|FAIL  name: what was measured — what to do about it`; exit status 1 if any check
FAILs. First the environment, then real processes that use the same DDP block as the training scripts.

Run
    python test_ddp_setup.py                          one process per GPU; 2 processes where there is none
    python test_ddp_setup.py --nproc 4                four processes on this machine
    python test_ddp_setup.py --quick                  environment and one all-reduce, under 10 s
    python test_ddp_setup.py --output_dir /scratch/me --json check.json
    torchrun --nproc_per_node=8 test_ddp_setup.py     under a launcher (srun, mpiexec, ...): checks its ranks
    torchrun --nproc_per_node=8 --nnodes=2 --node_rank=0 --master_addr=HOST test_ddp_setup.py    (1 on node 2)

Not checked under a launcher: the free port (the launcher's business) and how a rank that raises ends the job.

Last comes what the all-reduces and matrix products measured here mean for the training scripts: the
predicted speed-up on 1 to 16 ranks, beside the table of batch, learning rate and warm-up by number of GPUs.
The prediction leaves out what a script loses to data loading, unequal batches and work done on rank 0 alone.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import dataclasses
import difflib
import functools
import gc
import hashlib
import importlib.metadata
import importlib.util
import io
import itertools
import json
import logging
import math
import os
import platform
import queue
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

# ---- Constants -----------------------------------------------------------------------------------

INSTALL = "pip install -r requirements.txt"
MARK = "check-row "  # starts a line by which a rank tells the program that started it something
RAISED = "raising an error on purpose"
DISK_MB = 32  # size of the checkpoint that is written and read
CHECKPOINT_GB = 1.4  # the largest of the scripts' checkpoints: 116 M parameters with AdamW's state
MESSAGES = [4 << 10, 64 << 10, 1 << 20, 4 << 20, 25 << 20, 64 << 20]  # bytes; 25 MiB is DDP's bucket
RANKS = (1, 2, 4, 8, 16)
EFFICIENCY = 0.4  # of the matrix-product rate that a training step reaches
# script: (parameters, TFLOP of a micro-step of the default batch, micro-steps, its least time on an accelerator
# in ms where the launches of many small kernels take longer than the arithmetic)
SCRIPTS = {
    "train_ddp": (116e6, 2.7, 4, 0),
    "dpo": (1.66e6, 0.068, 1, 25),
    "uniref50": (66.7e6, 3.3, 4, 0),
    "quantumgrav": (1e6, 0.05, 1, 6),
    "rebm": (46.2e6, 8.7, 1, 0),
}
# GPUs: effective batch, learning rate, warm-up steps, speed-up, as the UniRef50 guide recommends and expects
SEED_TABLE = {
    1: (64, 5e-5, 5000, 1.0),
    2: (128, 1e-4, 10000, 1.8),
    4: (256, 2e-4, 20000, 3.2),
    8: (512, 4e-4, 40000, 5.5),
}

# ---- Arguments -----------------------------------------------------------------------------------

def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=0, help="processes to start (default: all GPUs, 2 on a CPU)")
    devices, backends = ("auto", "cuda", "xpu", "cpu"), ("auto", "nccl", "gloo", "xccl", "ccl", "xpu")
    parser.add_argument("--device", default="auto", choices=devices, help="auto: the accelerator if there is one")
    parser.add_argument("--backend", default="auto", choices=backends, help="auto: by device")
    parser.add_argument("--output_dir", help="where runs will write (default: a temporary folder, removed afterwards)")
    parser.add_argument("--json", metavar="FILE", help="write the results there, too")
    parser.add_argument("--quick", action="store_true", help="environment and one all-reduce only")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that the processes may take")
    parser.add_argument("--local_rank", type=int, help="set by torch.distributed.launch")
    parser.add_argument("--role", default="", choices=("", "ranks", "raise"), help=argparse.SUPPRESS)  # start_job
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    # what the block reads beyond these; `rank`: where a launcher started us; `ranks`: on this machine
    parser.set_defaults(rank=-1, ranks=0, ddp_timeout_minutes=1.0, max_grad_norm=1.0, max_minutes=0.0, max_bad_steps=10)
    args = parser.parse_args(split_tokens(parser, sys.argv[1:] if argv is None else argv))
    if args.nproc < 0:
        parser.error(f"--nproc {args.nproc} must be at least 1")
    return args

# ===== shared DDP block: begin (identical in every script; tests/test_shared_block.py) =====
class ArgumentParser(argparse.ArgumentParser):
    """argparse with one-line errors (exit status 2) that name the nearest known option."""
    source = ""  # "FILE: " while a --config file is being read
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {self.source}{message}\n")
    def unknown(self, key: str) -> NoReturn:
        known, last = [option.lstrip("-") for option in self._option_string_actions], key.rpartition(".")[2]
        near = difflib.get_close_matches(key, known, 1, 0.8) + difflib.get_close_matches(last, known, 1, 0.5)
        self.error(f"unknown option {key!r}; " + (f"the nearest known one is {near[0]!r}" if near else "see --help"))

def boolean(text: str) -> bool:
    """True, yes, on, 1 or False, no, off, 0, in any case (argparse's type=bool takes 'False' for True)."""
    if (value := str(text).lower()) not in ("true", "yes", "on", "1", "false", "no", "off", "0"):
        raise argparse.ArgumentTypeError(f"{text!r} is not one of True, False, yes, no, 1, 0")
    return value in ("true", "yes", "on", "1")

LAUNCHERS = {"torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),  # and the others' names for these
             "Open MPI": tuple(f"OMPI_COMM_WORLD_{n}" for n in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
             "Hydra": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
             "PALS": ("PALS_RANKID", "WORLD_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
             "SLURM": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")}
# Who this process is among the ranks (numbers), where its tensors live (torch.device), and by what it was started.
DDPContext = collections.namedtuple("DDPContext", "rank world_size local_rank local_world_size device backend launcher")
LOGGER = logging.getLogger("ddp")
log_all, warn = LOGGER.info, LOGGER.warning  # from any rank; log0: from rank 0 alone
FLAG = {"type": boolean, "nargs": "?", "const": True, "default": False, "metavar": "BOOL"}  # --name or --name=False

def add_ddp_arguments(parser: ArgumentParser, output_dir: str, wandb_project: str) -> None:
    """The options that every script has: batch and step, checkpoints, logging, runtime."""
    g = parser.add_argument_group("Step").add_argument
    g("--global_batch_size", type=int, help="samples per optimizer step, on any number of GPUs (sets --accumulation)")
    g("--accumulation", type=int, default=1, help="micro-batches per optimizer step")
    g("--lr_scaling", default="none", choices=("none", "linear", "sqrt", "conservative"), help="by the number of ranks")
    g("--max_grad_norm", type=float, default=1.0, help="clip the gradient's norm (0 = no clipping)")
    g("--max_bad_steps", type=int, default=10, help="non-finite steps in a row that end the run")
    g("--precision", default="auto", choices=("auto", "fp32", "bf16", "fp16"), help="auto: bf16 where the GPU has it")
    g("--compile", help="torch.compile the model", **FLAG)
    g("--seed", type=int, default=42, help="one seed for initialisation, split, order and noise")
    g = parser.add_argument_group("Checkpoints").add_argument
    g("--output_dir", default=output_dir, help="checkpoints, metrics, summary; a run found there is resumed")
    g("--fresh", help="start anew; a run in --output_dir is moved aside", **FLAG)
    g("--save_every", type=int, default=500, help="optimizer steps between checkpoints")
    g("--keep_checkpoints", type=int, default=2, help="checkpoints to keep beside best.pt")
    g("--max_minutes", type=float, default=0.0, help="write a checkpoint and stop after so long (0 = no limit)")
    g = parser.add_argument_group("Logging").add_argument
    g("--log_every", type=int, default=10, help="optimizer steps between log lines")
    g("--wandb_mode", default="auto", choices=("auto", "online", "offline", "disabled"), help="auto: online with a key")
    g("--wandb_project", default=wandb_project, help="wandb project")
    g("--wandb_name", help="wandb run name")
    g = parser.add_argument_group("Runtime").add_argument
    g("--config", help="YAML or JSON file of defaults; the command line wins")
    g("--nproc", type=int, default=0, help="start so many processes on this machine (plain python only)")
    g("--device", default="auto", choices=("auto", "cuda", "xpu", "cpu"), help="auto: the accelerator if there is one")
    g("--backend", default="auto", choices=("auto", "nccl", "gloo", "xccl", "ccl", "xpu"), help="auto: by device")
    g("--ddp_timeout_minutes", type=float, help="limit of a collective [default: NCCL_TIMEOUT seconds, else 30]")
    g("--local_rank", type=int, help="set by torch.distributed.launch")

def split_tokens(parser: ArgumentParser, argv: list[str]) -> list[str]:
    """A command line with `key=value`, `--key value` and `--key-with-hyphens` brought to `--key=value`."""
    options, tokens, wants_value = parser._option_string_actions, [], False
    for token in argv:
        key, equals, value = token.partition("=")
        if token.startswith("--") or (equals and not wants_value and re.fullmatch(r"[A-Za-z_][\w.]*", key)):
            key = "--" + key.removeprefix("--").replace("-", "_")
            if key not in options:
                parser.unknown(key[2:])
            token, wants_value = key + equals + value, not equals and options[key].nargs is None
        elif wants_value:
            token, wants_value = f"{tokens.pop()}={token}", False
        tokens.append(token)
    return tokens

def read_config(parser: ArgumentParser, path: str) -> list[str]:
    """A YAML or JSON file as tokens. In a section training: training.batch_size, or batch_size of its --help group."""
    import yaml
    options, tokens, parser.source = parser._option_string_actions, [], f"{path}: "
    try:
        tree = (json.loads if path.endswith(".json") else yaml.safe_load)(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        parser.error(" ".join(str(error).split()))
    if not isinstance(tree, dict):
        parser.error(f"holds {type(tree).__name__}, not a mapping of option names to values")
    groups = {(group.title or "").lower(): group._group_actions for group in parser._action_groups}
    def walk(node: dict, prefix: str, inside: list) -> None:
        for key, value in node.items():
            name = f"--{key}" if options.get(f"--{key}") in inside else f"--{prefix}{key}"
            if name not in options and isinstance(value, dict):
                walk(value, f"{prefix}{key}.", groups.get(str(key).lower(), []))
            elif name not in options:
                parser.unknown(f"{prefix}{key}")
            elif value is not None:
                value = ",".join(map(str, value)) if isinstance(value, list) else value
                tokens.append(f"{name}={json.dumps(value) if isinstance(value, dict) else value}")
    walk(tree, "", [])
    parser.parse_args(tokens)  # wrong values are errors of the file, too
    parser.source = ""
    return tokens

def parse_arguments(parser: ArgumentParser, argv: list[str] | None = None) -> argparse.Namespace:
    """The command line over a --config file over the defaults. `args.given`: names of what the user set."""
    tokens = split_tokens(parser, sys.argv[1:] if argv is None else argv)
    if configs := [token.partition("=")[2] for token in tokens if token.startswith("--config=")]:
        tokens = read_config(parser, configs[-1]) + tokens
    args, options = parser.parse_args(tokens), parser._option_string_actions
    args.given = sorted({options[name].dest for token in tokens if (name := token.partition("=")[0]) in options})
    for name in ("accumulation", "save_every", "log_every", "keep_checkpoints", "max_bad_steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)} must be at least 1")
    if args.global_batch_size is not None and (args.global_batch_size < 1 or "accumulation" in args.given):
        parser.error(f"--global_batch_size {args.global_batch_size}: above 0; it or --accumulation, one of the two")
    if args.global_batch_size and "lr_scaling" in args.given and args.lr_scaling != "none":
        parser.error(f"--lr_scaling {args.lr_scaling}: the fixed --global_batch_size does not grow with the ranks")
    args.changed = {n: getattr(args, n) for n in args.given if getattr(args, n) != parser.get_default(n)}
    return args

def find_ranks(env: dict[str, str], devices: int) -> tuple[int, int, int, int, str]:
    """(rank, world size, local rank, local world size, launcher); `devices`: processes that this node can take."""
    def number(name: str) -> int | None:
        if env.get(name) and not env[name].isdigit():
            raise ValueError(f"{name}={env[name]!r} is not a number")
        return int(env[name]) if env.get(name) else None
    for launcher, names in LAUNCHERS.items():
        rank, world, local, local_world = map(number, names)
        if rank is None:
            continue
        if launcher == "PALS" and world is None and (world := number("PMI_SIZE")) is None:
            with contextlib.suppress(ImportError, RuntimeError):  # no mpi4py; no MPI library for it
                from mpi4py import MPI
                world = MPI.COMM_WORLD.Get_size()
        if launcher == "Hydra" and local is None:  # PALS and srun --mpi=pmi2 set PMI_RANK beside their own variables
            local, local_world = map(number, LAUNCHERS["PALS" if env.get("PALS_LOCAL_RANKID") else "SLURM"][2:])
        if world is None:
            raise ValueError(f"{names[0]}={rank} is set but no world size is: export {names[1]}")
        if rank >= world:
            raise ValueError(f"{names[0]}={rank} is not below {names[1]}={world}")
        if local is None and world > devices:
            raise ValueError(f"{names[2]} is not set and {world} ranks do not fit {devices} places: export {names[2]}")
        local = rank if local is None else local
        return rank, world, local, local_world or min(world, max(devices, local + 1)), launcher
    return 0, 1, 0, 1, "python"

def find_master(env: dict[str, str], world_size: int, local_world_size: int) -> tuple[str, str]:
    """(MASTER_ADDR, MASTER_PORT): as set, else the job's first host, else this one if it holds all ranks."""
    job = re.match(r"\d*", env.get("SLURM_JOB_ID") or env.get("PBS_JOBID") or "").group()
    port = env.get("MASTER_PORT") or (str(20000 + int(job) % 20000) if job else "29500")
    if env.get("MASTER_ADDR"):
        return env["MASTER_ADDR"], port
    if env.get("SLURM_JOB_NODELIST"):  # "gpu[03-05,9]-ib,login1" -> "gpu03-ib"; split at commas in no bracket
        return re.sub(r"\[(\d+)[^\]]*\]", r"\1", re.split(r",(?![^\[]*\])", env["SLURM_JOB_NODELIST"])[0]), port
    if env.get("PBS_NODEFILE"):
        return Path(env["PBS_NODEFILE"]).read_text().split()[0], port
    if world_size > local_world_size:
        raise ValueError(f"{world_size} ranks on several nodes and MASTER_ADDR is not set: export the first one's")
    return "localhost", port

def choose_device(name: str, local_rank: int) -> torch.device:
    """The accelerator number `local_rank` (0 where the launcher shows each rank one), or the CPU."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "cpu" or (name == "auto" and (found is None or found.type not in ("cuda", "xpu"))):
        return torch.device("cpu")
    if found is None or name not in ("auto", found.type):
        raise ValueError(f"--device {name}: this machine shows {found.type if found else 'no accelerator'}")
    if 1 < (count := torch.accelerator.device_count()) <= local_rank:
        raise ValueError(f"local rank {local_rank} has no device: {count} are visible: start at most {count} per node")
    torch.accelerator.set_device_index(index := local_rank if count > 1 else 0)
    return torch.device(found.type, index)

def choose_backend(name: str, device: torch.device) -> str:
    """The process group's backend for `device`. Raises ValueError if `name` cannot serve it."""
    if (serves := {"nccl": "cuda", "xccl": "xpu", "ccl": "xpu", "xpu": "xpu"}.get(name, device.type)) != device.type:
        raise ValueError(f"--backend {name} serves {serves} devices, the device is {device.type}: use --backend auto")
    if name == "gloo" or device.type == "cpu":
        return "gloo"
    if device.type == "cuda" and not dist.is_nccl_available():
        raise ValueError("this torch was built without NCCL: use --backend gloo")
    if device.type == "cuda" or dist.is_xccl_available():
        return "nccl" if device.type == "cuda" else "xccl"
    with contextlib.suppress(ImportError):
        importlib.import_module("oneccl_bindings_for_pytorch")  # registers the backend "ccl"
        return "ccl"
    warn("no xccl in this torch and no oneCCL bindings: falling back to gloo, which is slow")
    return "gloo"

def setup_ddp(args: argparse.Namespace) -> DDPContext:
    """Find this process's rank and device, start its log, signals and the process group. (all ranks)"""
    env = ({} if args.local_rank is None else {"LOCAL_RANK": str(args.local_rank)}) | os.environ
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    devices = 0 if args.device == "cpu" or not torch.accelerator.is_available() else torch.accelerator.device_count()
    rank, world_size, local_rank, local_world_size, launcher = find_ranks(env, devices or max(cores, 16))
    launcher = "--nproc" if getattr(args, "nproc", 0) > 1 else launcher
    start_logging(rank)
    device = choose_device(args.device, local_rank)
    backend = choose_backend(args.backend, device)
    if "OMP_NUM_THREADS" not in env:
        torch.set_num_threads(max(1, cores // local_world_size))
    log_all(f"Process {rank}/{world_size} started")
    if world_size > 1:
        address, port = find_master(env, world_size, local_world_size)
        os.environ.update(MASTER_ADDR=address, MASTER_PORT=port)  # unchanged where they were set
        limit = timedelta(minutes=args.ddp_timeout_minutes or float(env.get("NCCL_TIMEOUT") or 1800) / 60)
        ids = {"rank": rank, "world_size": world_size, "device_id": None if device.type == "cpu" else device}
        try:
            dist.init_process_group(backend, timeout=limit, **ids)
        except dist.DistNetworkError as error:
            advice = f"rank {rank} cannot reach rank 0 at {address}:{port}: check MASTER_ADDR, MASTER_PORT, firewall"
            busy = f"port {port} is already in use on {address}: export MASTER_PORT, or use torchrun --standalone"
            raise RuntimeError(busy if "EADDRINUSE" in str(error) else advice) from error
        log_all(f"Initialized DDP: rank={rank}, world_size={world_size}, local_rank={local_rank}")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):  # not before: no handler runs while init waits
        signal.signal(number, StepGuard.on_signal)
    log_all(f"Using device: {device}")
    return DDPContext(rank, world_size, local_rank, local_world_size, device, backend, launcher)

def cleanup() -> None:  # destroy the process group, once main has returned
    gc.collect()  # while a tensor or the DDP object is alive, gloo's threads abort one good exit in four
    if dist.is_initialized():
        dist.destroy_process_group()

def launch(main: Callable[[argparse.Namespace], int], args: argparse.Namespace, spawned: bool = False) -> int:
    """Run `main(args)` as this rank, or in --nproc new processes (`spawned`: one of them); returns the exit status."""
    try:
        if tuple(int(p) for p in torch.__version__.split(".")[:2]) < (2, 10):
            raise ValueError(f"torch {torch.__version__} is too old: these scripts need torch 2.10 or newer")
        if args.nproc and not spawned:
            _, world_size, _, _, launcher = find_ranks(dict(os.environ), sys.maxsize)
            if world_size > 1 or launcher == "torchrun":
                raise ValueError(f"--nproc {args.nproc}: {launcher} has already started {world_size} ranks: drop it")
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if args.nproc > 1 and not spawned:
        return start_processes(main, args)
    try:
        return record(main)(args)
    except Exception:  # whatever it is: said with its rank and traceback, and a status of 1
        LOGGER.error("failed on rank %s\n%s", os.environ.get("RANK", "0"), traceback.format_exc())
        if dist.is_initialized():  # peers may be gone: no waiting for them in destroy or at exit
            sys.stdout.flush()
            os._exit(1)
        return 1
    finally:
        cleanup()

def start_processes(main: Callable, args: argparse.Namespace) -> int:
    """Start --nproc ranks of `main` on this machine; passes signals on to them and their exit status back."""
    with socket.create_server(("localhost", 0)) as probe:
        os.environ.update({"MASTER_PORT": str(probe.getsockname()[1])} | os.environ | {"MASTER_ADDR": "localhost"})
    context = torch.multiprocessing.spawn(run_process, (main, args), nprocs=args.nproc, join=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda n, _: [os.kill(p.pid, n) for p in context.processes if p.is_alive()])
    try:
        while not context.join(grace_period=5):
            continue
    except torch.multiprocessing.ProcessExitedException as error:
        return error.exit_code if error.exit_code > 0 else 128 - error.exit_code
    return 0

def run_process(local_rank: int, main: Callable, args: argparse.Namespace) -> None:  # of start_processes
    os.environ.update(zip(LAUNCHERS["torchrun"], 2 * (str(local_rank), str(args.nproc)), strict=True))
    sys.exit(launch(main, args, spawned=True))

def start_logging(rank: int) -> None:
    """`[RANK 0] 2025-01-15 14:23:45 INFO: text` on standard output, from this rank."""
    line = logging.Formatter(f"[RANK {rank}] %(asctime)s %(levelname)s: %(message)s", "%Y-%m-%d %H:%M:%S")
    LOGGER.handlers, LOGGER.propagate, LOGGER.rank = [logging.StreamHandler(sys.stdout)], False, rank
    LOGGER.handlers[0].setFormatter(line)
    LOGGER.setLevel(logging.INFO)

def log0(text: str) -> None:  # (rank 0 only)
    if getattr(LOGGER, "rank", 0) == 0:
        LOGGER.info(text)

def reduce_sums(ddp: DDPContext, sums: dict[str, float | torch.Tensor]) -> dict[str, float]:
    """Sums over all ranks in float64, in one collective and one host sync. (all ranks, same keys)"""
    packed = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=ddp.device).squeeze() for v in sums.values()])
    if ddp.world_size > 1:
        dist.all_reduce(packed)
    return dict(zip(sums, packed.tolist(), strict=True))

def barrier(ddp: DDPContext) -> None:  # (all ranks)
    reduce_sums(ddp, {"ranks": 1.0})  # dist.barrier() would choose a device of its own on NCCL

def on_rank0(ddp: DDPContext, function: Callable, *args):
    """`function(*args)` on rank 0; its result, or an error if it raised, on every rank: nobody waits. (all ranks)"""
    outcome, error, StepGuard.beat = [None, None], None, math.inf  # however long rank 0 takes
    try:
        outcome[0] = function(*args) if ddp.rank == 0 else None
    except Exception as caught:
        error, outcome[1] = caught, f"{type(caught).__name__}: {caught}"
    if ddp.world_size > 1:
        dist.broadcast_object_list(outcome, src=0, device=ddp.device)
    StepGuard.beat = time.monotonic()
    if outcome[1] is not None:
        raise error or RuntimeError(f"rank 0 failed in {function.__name__}: {outcome[1]}")
    return outcome[0]

def require_same(ddp: DDPContext, what: str, value: bytes) -> None:
    """Raises RuntimeError on all ranks if `value` differs between ranks. (all ranks)"""
    digest = hashlib.sha256(value).digest()
    if reduce_sums(ddp, {"other": float(on_rank0(ddp, lambda: digest) != digest)})["other"]:
        raise RuntimeError(f"the ranks disagree on {what}: do all nodes see the same files and versions?")

def keyed_uniform(seed: int, epoch: int, ids: torch.Tensor, draws: int, stream: int = 0) -> torch.Tensor:
    """ids (B,) int64 -> (B, draws) float32 in [0, 1) by seed, epoch, id, draw alone: SplitMix64 (Steele et al. 2014)"""
    def mix(x: torch.Tensor) -> torch.Tensor:  # int64 wraps; the masks make the shifts logical
        x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
        x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
        return x ^ ((x >> 31) & 0x1FFFFFFFF)
    golden, state = -0x61C8864680B583EB, torch.zeros((), dtype=torch.int64, device=ids.device)
    for part in (seed, epoch, stream):
        state = mix(state * golden + part + 1)
    rows = mix(mix(ids.long() + state) * golden + 1)[:, None]
    return ((mix(rows + torch.arange(1, draws + 1, device=ids.device) * golden) >> 40) & 0xFFFFFF).float() / 2**24

def resolve_batch(args: argparse.Namespace, world_size: int, kept: int | None = None) -> tuple[int, int]:
    """(global batch, micro-batches per step). `kept`: the resumed run's global batch, which stays on any world size."""
    cell = world_size * args.batch_size
    if kept and args.global_batch_size not in (None, kept):
        raise ValueError(f"--global_batch_size {args.global_batch_size}: this run was started with {kept}")
    total = kept or args.global_batch_size or cell * args.accumulation
    if total % cell and not kept:
        raise ValueError(f"--global_batch_size {total} is not a multiple of {world_size} ranks x --batch_size "
                         f"{args.batch_size} = {cell}")
    micro = total / world_size / (accumulation := -(-total // cell))
    log0(f"Batch size per GPU: {args.batch_size}, Total batch size: {total}")
    log0(f"global batch {total} = {world_size} ranks x {micro:g} x {accumulation} accumulation")
    return total, accumulation

def scaled_lr(lr: float, rule: str, world_size: int) -> float:
    """--lr_scaling of the rate to `world_size` ranks (linear: Goyal et al. 2017; sqrt: Krizhevsky 2014)."""
    factor = {"none": 1, "linear": world_size, "sqrt": world_size**0.5, "conservative": min(world_size, 6)}[rule]
    if factor != 1:
        log0(f"learning rate {lr:g} x {factor:g} ({rule} scaling, {world_size} ranks) = {lr * factor:g}")
    return lr * factor

def lr_at(step: int, total: int, warmup: int, schedule: str) -> float:
    """Factor on the rate at 0-based `step`: warm-up from above zero, then constant or decaying to zero at `total`."""
    done = (step - warmup) / max(1, total - warmup)
    decay = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 + 0.5 * math.cos(math.pi * done)}[schedule]
    return (step + 1) / (warmup + 1) if step < warmup else decay

class GlobalBatchSampler(DistributedSampler):
    """The items, shuffled by (seed, epoch) alone, cut into global batches (what is left over waits for another epoch),
    dealt round-robin to the ranks, cut into micro_steps. Yields this rank's micro-batches (int64 ids) from `start` on.
    `cut(ids, epoch)` may regroup the items of `window` batches into as many: length buckets, token or node budgets."""
    def __init__(self, n: int, global_batch: int, micro_steps: int, seed: int, ddp: DDPContext, window: int = 1,
                 cut: Callable | None = None):
        super().__init__(range(n), ddp.world_size, ddp.rank, shuffle=True, seed=seed, drop_last=True)
        if n < global_batch or global_batch < ddp.world_size * micro_steps:
            raise ValueError(f"{n} samples, global batch {global_batch}, {ddp.world_size} ranks x {micro_steps} "
                             "micro-batches: each must be at least the next")
        self.n, self.global_batch, self.micro_steps, self.start = n, global_batch, micro_steps, 0
        self.window, self.cut = window, cut or (lambda ids, epoch: ids.reshape(-1, global_batch))
    def __len__(self) -> int:  # micro-batches left in the epoch
        return max(0, self.n // self.global_batch - self.start) * self.micro_steps
    def set_epoch(self, epoch: int, start: int = 0) -> None:
        self.epoch, self.start = epoch, start
    def permuted(self, positions: np.ndarray) -> np.ndarray:
        """Items at `positions` of the shuffle, by a Feistel network (randperm: 2 s, 480 MB a rank for 60 M items)."""
        half = max(1, ((self.n - 1).bit_length() + 1) // 2)
        mask, keys = (1 << half) - 1, np.random.SeedSequence([self.seed, self.epoch]).generate_state(8, np.uint64)
        items, walk = positions.astype(np.uint64), np.ones(len(positions), bool)
        while walk.any():
            left, right = items[walk] >> np.uint64(half), items[walk] & np.uint64(mask)
            for key in keys:
                mixed = (right + key) * np.uint64(0x9E3779B97F4A7C15)
                mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
                left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(32))) & np.uint64(mask))
            items[walk] = (left << np.uint64(half)) | right
            walk = items >= self.n  # cycle walking (Black and Rogaway 2002)
        return items.astype(np.int64)
    def batches(self, start: int = 0) -> Iterator[np.ndarray]:
        """Global batches of the epoch from number `start` on. (the same on all ranks)"""
        end, stride = self.n // self.global_batch * self.global_batch, self.window * self.global_batch
        windows = (np.arange(low, min(low + stride, end)) for low in range(start // self.window * stride, end, stride))
        batches = (batch for window in windows for batch in self.cut(self.permuted(window), self.epoch))
        return itertools.islice(batches, start % self.window, None)  # its first window holds batch `start`
    def deal(self, batch: np.ndarray, rank: int | None = None) -> list[np.ndarray]:
        """The micro-batches of a rank (this one) in a global batch; neighbours of a sorted batch stay together."""
        mine = batch[self.rank if rank is None else rank :: self.num_replicas]
        ends = [len(mine) * micro // self.micro_steps for micro in range(self.micro_steps + 1)]
        return [mine[a:b] for a, b in itertools.pairwise(ends)]
    def __iter__(self) -> Iterator[np.ndarray]:
        return itertools.chain.from_iterable(map(self.deal, self.batches(self.start)))
    def fingerprint(self) -> bytes:
        """Hash of the plan's inputs and of its first and last 1,000 batches, for require_same."""
        digest = hashlib.sha256(repr((self.n, self.global_batch, self.seed, self.epoch)).encode())
        for start in {0, max(0, self.n // self.global_batch - 1000)}:
            for batch in itertools.islice(self.batches(start), 1000):
                digest.update(batch.tobytes())
        return digest.digest()

def wrap_ddp(model: torch.nn.Module, ddp: DDPContext) -> torch.nn.Module:
    """DistributedDataParallel; the model itself in a world of one. Every parameter must get a gradient."""
    if ddp.world_size == 1:
        return model
    ids = None if ddp.device.type == "cpu" else [ddp.device.index]
    wrapped = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)  # saves a copy
    wrapped.broadcast_buffers = False  # evaluation uses the unwrapped model; the argument warns from torch 2.13 on
    # the first backward pass fixes the order of 3 ranks' sums: one of zeros, so that a resume does not change it
    zero, wrapped.module = sum((p * 0).sum() for p in model.parameters() if p.requires_grad), torch.nn.Identity()
    wrapped(zero).backward()
    wrapped.module = model
    wrapped.zero_grad(set_to_none=True)
    return wrapped

def unwrap(model: torch.nn.Module) -> torch.nn.Module:  # without DDP's and torch.compile's wrappers
    while isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, DistributedDataParallel) else model._orig_mod
    return model

def sync_gradients(model: torch.nn.Module, last: bool):
    """Context for a micro-batch's forward and backward: gradients are all-reduced in the last one only."""
    wrapped = getattr(model, "_orig_mod", model)
    return contextlib.nullcontext() if last or not isinstance(wrapped, DistributedDataParallel) else wrapped.no_sync()

def resolve_precision(name: str, device: torch.device) -> torch.dtype:  # of --precision
    if name == "fp16" and device.type == "cpu":
        raise ValueError("--precision fp16 is many times slower than fp32 on a CPU: use bf16 or fp32")
    has_bf16 = device.type == "xpu" or device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    auto = torch.bfloat16 if has_bf16 else torch.float32
    return {"auto": auto, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]

class StepGuard:
    """The end of an optimizer step, and what all ranks agree on there: non-finite numbers, signals, the time limit."""
    signal, beat = 0, 0.0  # of this process: the signal it got, and when it last showed that it is not stuck
    def __init__(self, args: argparse.Namespace, ddp: DDPContext, optimizer: torch.optim.Optimizer,
                 dtype: torch.dtype, started: float):
        self.ddp, self.optimizer, self.max_norm = ddp, optimizer, args.max_grad_norm or math.inf
        self.scaler = torch.amp.GradScaler(ddp.device.type, enabled=dtype == torch.float16)
        if not self.scaler.is_enabled() and not optimizer.defaults.get("fused"):
            raise ValueError(f"{type(optimizer).__name__} needs fused=True, or it cannot skip a non-finite update")
        self.deadline = started + 60 * args.max_minutes if args.max_minutes else math.inf
        self.max_bad, self.bad_in_row, self.bad_steps = args.max_bad_steps, 0, 0
        self.pending, self.event, self.recent = None, None, collections.deque(maxlen=min(3, args.max_bad_steps))
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
    @classmethod
    def on_signal(cls, number: int, _frame) -> None:
        """Ask for a stop at the next step; end a process stuck with a dead peer before the launcher's SIGKILL does."""
        def watch() -> None:
            while time.monotonic() - cls.beat < 20.0:
                time.sleep(0.5)
            os._exit(128 + number)
        if not cls.signal:
            cls.signal, cls.beat = number, time.monotonic()
            threading.Thread(target=watch, daemon=True).start()
    def step(self, loss: torch.Tensor, step: int, ids: list) -> tuple[torch.Tensor, str]:
        """Clip, update if all is finite, agree: (gradient norm, why to stop or ''). `ids`: of this rank. (all ranks)"""
        StepGuard.beat = now = time.monotonic()
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.max_norm, foreach=True)
        flags = torch.tensor([0.0, StepGuard.signal, now > self.deadline]).to(self.ddp.device, non_blocking=True)
        # under a scaler a gradient that overflows is routine: it skips by itself
        flags[0] = ~torch.isfinite(loss.detach() if self.scaler.is_enabled() else loss.detach() + norm)
        if self.ddp.world_size > 1:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        if not self.scaler.is_enabled():  # fused optimizers skip the update on the device where found_inf is 1
            self.optimizer.grad_scale, self.optimizer.found_inf = None, flags[0]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        reason = self.finish()  # of the step before: the device is still busy with this one
        self.pending = (step, ids, flags.to("cpu", non_blocking=True))
        self.event = None if self.ddp.device.type == "cpu" else torch.accelerator.current_stream().record_event()
        return norm, reason
    def finish(self) -> str:
        """Read the flags of the last step: why to stop, the same on all ranks; RuntimeError after max_bad_steps."""
        if self.pending is None:
            return ""
        if self.event is not None:
            self.event.synchronize()
        (step, ids, flags), self.pending = self.pending, None
        bad, number, late = flags.tolist()
        self.recent.append((step, ids))
        self.bad_in_row, self.bad_steps = self.bad_in_row + 1 if bad else 0, self.bad_steps + bool(bad)
        if bad and self.ddp.rank == 0:
            warn(f"non-finite loss or gradient at step {step}: the update was skipped on all ranks")
        if self.bad_in_row >= self.max_bad:
            samples = "; ".join(f"step {n}: {[int(i) for part in ids for i in part][:64]}" for n, ids in self.recent)
            raise RuntimeError(f"{self.bad_in_row} steps in a row with a non-finite loss or gradient; "
                               f"samples of this rank in the last ones: {samples}")
        return signal.Signals(int(number)).name if number else "time limit" if late else ""

def stop_status(reason: str) -> int:  # status and last line of a run that stopped early, its checkpoint written
    resumes = "requeue me" if reason == "SIGUSR1" else f"stopped by {reason}: the same command goes on from here"
    log0(f"checkpoint written, {resumes}")
    return {"SIGTERM": 143, "SIGINT": 130}.get(reason, 0)

def rng_states(ddp: DDPContext) -> list[dict]:  # random state of every rank, for a checkpoint (all ranks)
    state = {"cpu": torch.get_rng_state()}
    if ddp.device.type != "cpu":
        state[ddp.device.type] = torch.get_device_module(ddp.device).get_rng_state(ddp.device)
    states = [state] * ddp.world_size
    if ddp.world_size > 1:
        dist.all_gather_object(states, state)
    return states

def restore_rng(states: list[dict], ddp: DDPContext, seed: int) -> None:
    """This rank's random state; on another world size a new one from (seed, rank)."""
    torch.manual_seed(seed + ddp.rank)
    if len(states) == ddp.world_size:
        torch.set_rng_state(states[ddp.rank]["cpu"])
        if ddp.device.type in states[ddp.rank].keys() - {"cpu"}:
            torch.get_device_module(ddp.device).set_rng_state(states[ddp.rank][ddp.device.type], ddp.device)

def atomic_write(path: Path, write: Callable) -> bool:
    """`write(file)` to a temporary file, fsync, rename; False and a warning if that fails (disk full). (rank 0 only)"""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    StepGuard.beat = math.inf  # however long it takes
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        return True
    except (OSError, RuntimeError) as error:  # torch.save turns "no space left" into RuntimeError
        temporary.unlink(missing_ok=True)
        free = shutil.disk_usage(path.parent).free / 1e6
        warn(f"could not write {path} ({str(error).splitlines()[0]}; {free:.0f} MB free): the old file is untouched")
        return False
    finally:
        StepGuard.beat = time.monotonic()

def save_checkpoint(directory: str | Path, state: dict, step: int, keep: int, best: bool = False) -> bool:
    """step_*.pt (the `keep` newest stay), latest.pt and, if asked, best.pt, atomically. (rank 0 only)"""
    numbered = Path(directory) / f"step_{step:08d}.pt"
    if not atomic_write(numbered, lambda file: torch.save(state, file)):  # noqa: TID251
        return False
    for name in ("latest.pt", "best.pt") if best else ("latest.pt",):
        link = numbered.with_name(f".{name}.link")
        link.unlink(missing_ok=True)
        try:
            os.link(numbered, link)
        except OSError:  # a file system without hard links
            shutil.copy(numbered, link)
        link.replace(numbered.with_name(name))
    for old in sorted(numbered.parent.glob("step_*.pt"))[:-keep]:
        old.unlink()
    return True

def load_checkpoint(path: str | Path) -> dict:
    """A checkpoint, on the CPU, its model's names without `module.` and `_orig_mod.`. ValueError if it is damaged."""
    Path(path).stat()  # FileNotFoundError if it is not there
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load does not look at the checksums
            if damaged := archive.testzip():
                raise ValueError(f"checksum of {damaged} is wrong")
        state = torch.load(path, map_location="cpu", weights_only=True)  # noqa: TID251
    except Exception as error:
        first = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        raise ValueError(f"{path} is damaged or no checkpoint ({first})") from error
    return state | {"model": {re.sub(r"^(module\.|_orig_mod\.)+", "", k): v for k, v in state.get("model", {}).items()}}

def find_checkpoint(directory: Path) -> str | None:
    """The newest whole checkpoint of a run; damaged ones are named in warnings. (rank 0 only)"""
    files = sorted(directory.glob("step_*.pt")) + [*directory.glob("latest.pt")]
    for path in reversed(files):
        try:
            load_checkpoint(path)
            return str(path)
        except ValueError as error:
            warn(f"{error}: using the one before it")
    if files:
        raise ValueError(f"no whole checkpoint is left in {directory}: restore one, or give --fresh")

def open_run(args: argparse.Namespace, ddp: DDPContext, same: tuple[str, ...]) -> dict | None:
    """Prepare --output_dir; the checkpoint to resume from, if any: its arguments in `same` must be ours. (all ranks)"""
    folder = Path(args.output_dir)
    def prepare() -> str | None:
        if args.fresh and not restarts and folder.exists() and any(folder.iterdir()):  # torchrun's restarts go on
            aside = folder.rename(folder.with_name(f"{folder.name}.old-{time.strftime('%Y%m%d-%H%M%S')}"))
            log0(f"--fresh: the run in {folder} was moved to {aside}")
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise ValueError(f"--output_dir {folder} is not writable")
        for left in [*folder.glob(".*.tmp"), *folder.glob(".*.link")]:  # of a save that was killed
            left.unlink()
        return find_checkpoint(folder)
    restarts = reduce_sums(ddp, {"n": float(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))})["n"]  # nodes may differ
    if (path := on_rank0(ddp, prepare)) is None:
        return None
    state = load_checkpoint(path)
    for name in same:
        if (old := state["args"].get(name)) != (new := getattr(args, name)):
            raise ValueError(f"{folder} holds a run with {'data' if name == 'data_key' else '--' + name} {old!r}, this "
                             f"one has {new!r}: give another --output_dir, or --fresh to move the old run aside")
    log0(f"resuming {path}: step {state['step']}, epoch {state['epoch']}")
    return state

class RunLog:
    """metrics.jsonl, the log line, wandb, summary.json and curves.png of a run."""
    def __init__(self, args: argparse.Namespace, ddp: DDPContext, resumed: dict | None):
        self.args, self.ddp, self.folder, resumed = args, ddp, Path(args.output_dir), resumed or {}
        self.wandb_id, self.wall = resumed.get("wandb_id") or os.urandom(4).hex(), resumed.get("wall_s", 0.0)
        self.last_step, (self.final_loss, self.speed) = resumed.get("step", 0), resumed.get("speed", (None, None))
        self.started = time.monotonic()
        self.reset()
        log0(f"command: {' '.join(sys.argv)}")
        log0(f"torch {torch.__version__}, world size {ddp.world_size}, backend {ddp.backend}, started by "
             f"{ddp.launcher}, {torch.get_num_threads()} CPU threads per rank")
        changed = ", ".join(f"{n}={v}" for n, v in args.changed.items())
        log0(f"arguments that differ from the defaults: {changed or 'none'}")
        if ddp.rank == 0:
            path, self.queue, self.unwritten = self.folder / "metrics.jsonl", queue.SimpleQueue(), b""
            path.touch()  # and drop records of steps that this run makes again
            rows = [row for row in path.read_text().splitlines(True) if self.last_step and row.endswith("}\n")]
            rows = [row for row in rows if json.loads(row)["step"] <= self.last_step]
            atomic_write(path, lambda file: file.write("".join(rows).encode()))
            self.thread = threading.Thread(target=self.feed_wandb, daemon=True)
            self.thread.start()
    def feed_wandb(self) -> None:
        """wandb in a thread of its own: what it does wrong, or slowly, never reaches the training loop."""
        mode = self.args.wandb_mode
        if mode == "auto":
            netrc = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
            key = os.environ.get("WANDB_API_KEY") or (netrc.exists() and "wandb" in netrc.read_text())
            mode = os.environ.get("WANDB_MODE") or ("online" if key else "disabled")
            log0(f"wandb {mode} (--wandb_mode auto: {'an' if key else 'no'} API key is configured)")
        if mode == "disabled":
            return
        try:
            import wandb
            run = wandb.init(project=self.args.wandb_project, name=self.args.wandb_name, id=self.wandb_id, mode=mode,
                             resume="allow", dir=str(self.folder), config=vars(self.args),
                             settings=wandb.Settings(init_timeout=30, silent=True))
            while (row := self.queue.get()) is not None:
                run.log(row)
            run.finish()
        except Exception as error:
            warn(f"wandb failed and is off; metrics.jsonl has everything ({type(error).__name__}: {str(error)[:200]})")
    def waiting(self, iterator: Iterator):
        """next(iterator), its time counted as waiting for data."""
        begin, item = time.monotonic(), next(iterator)
        StepGuard.beat = time.monotonic()
        self.waited, self.steps = self.waited + StepGuard.beat - begin, self.steps + 1
        return item
    def add(self, samples: int, **sums: tuple[torch.Tensor, float]) -> None:
        """Add the (sum, count) pairs of a micro-batch of this rank; they stay on the device."""
        self.samples += samples
        for name, (total, count) in sums.items():
            old = self.sums.get(name, (0.0, 0.0))
            self.sums[name] = (old[0] + total.detach().double(), old[1] + count)
    def interval(self, step: int, total: int, epoch: int, model: torch.nn.Module, lr: float, norm: torch.Tensor,
                 **extra) -> None:
        """Reduce what was added since the last call and record it. (all ranks) The only host sync of the loop."""
        sums = {f"{n}/{i}": v for n, pair in self.sums.items() for i, v in enumerate(pair)}
        sums = reduce_sums(self.ddp, {**sums, "samples": self.samples, "norm": norm.detach() / self.ddp.world_size})
        seconds, wrapped = time.monotonic() - self.last, getattr(model, "_orig_mod", model)
        means = {n: sums[f"{n}/0"] / sums[f"{n}/1"] for n in self.sums if sums[f"{n}/1"]}  # where there were any
        timers = wrapped._get_ddp_logging_data() if isinstance(wrapped, DistributedDataParallel) else {}  # ns per step
        exposed = timers.get("avg_backward_comm_time", 0) - timers.get("avg_backward_compute_comm_overlap_time", 0)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1000)
        if self.ddp.device.type != "cpu":  # of the device's allocator, not of the process (in kB; macOS: bytes)
            peak = torch.accelerator.max_memory_allocated(self.ddp.device)
        wait, comm = self.waited / seconds, max(0.0, exposed * 1e-9) * self.steps / seconds
        speeds = {"samples/s": sums["samples"] / seconds, "data_wait": wait, "comm": comm, "mem_gb": peak / 1e9}
        self.last_step, self.final_loss, self.speed = step, means.get("loss"), speeds["samples/s"]
        numbers = " ".join(f"{n}={v:.6f}" for n, v in means.items())
        log0(f"step={step}/{total} epoch={epoch} {numbers} grad_norm={sums['norm']:.3f} lr={lr:.3e} samples/s="
             f"{self.speed:.0f} data_wait={wait:.1%} comm={comm:.1%} mem_gb={speeds['mem_gb']:.1f}"
             + "".join(f" {n}={v:.6g}" for n, v in extra.items()))
        self.write({"step": step, "epoch": epoch, **means, "grad_norm": sums["norm"], "lr": lr, **speeds, **extra})
        self.reset()
    def reset(self) -> None:
        """Start an interval (also after an evaluation or a checkpoint, so that speeds are of training alone)."""
        self.last, self.waited, self.steps, self.samples, self.sums = time.monotonic(), 0.0, 0, 0, {}
    def write(self, row: dict) -> None:
        """One record to metrics.jsonl and wandb. (rank 0 writes)"""
        if self.ddp.rank == 0:
            row = {k: None if v != v or v in (math.inf, -math.inf) else v for k, v in row.items()}  # JSON has no NaN
            self.unwritten += (json.dumps(row) + "\n").encode()
            with contextlib.suppress(OSError), open(self.folder / "metrics.jsonl", "ab", buffering=0) as file:
                self.unwritten = self.unwritten[file.write(self.unwritten) :]  # disk full: the rest waits
            if self.thread.is_alive():  # not when wandb is off
                self.queue.put(row)
    def close(self, status: str, **fields) -> None:
        """summary.json, the end of wandb, and every loss and metric against the step in curves.png. (rank 0 writes)"""
        if self.ddp.rank > 0:
            return
        summary = {"script": Path(sys.argv[0]).name, "status": status, **fields, "world_size": self.ddp.world_size,
                   "backend": self.ddp.backend, "device": str(self.ddp.device), "args": vars(self.args),
                   "wall_s": self.wall + time.monotonic() - self.started}
        atomic_write(self.folder / "summary.json", lambda file: file.write(json.dumps(summary, indent=1).encode()))
        self.queue.put(None)
        self.thread.join(timeout=30)
        try:
            from matplotlib.figure import Figure
        except ImportError:
            return warn("no curves.png: pip install matplotlib")
        curves, speeds = collections.defaultdict(list), {"samples/s", "data_wait", "comm", "mem_gb"}
        for row in map(json.loads, re.findall(r".*}\n", (self.folder / "metrics.jsonl").read_text())):  # whole records
            for name in (name for name, value in row.items() if isinstance(value, float) and name not in speeds):
                curves[name].append((row["step"], row[name]))
        rows = max(1, -(-len(curves) // 3))  # margins are given, as finding good ones takes as long as drawing
        figure = Figure((12, 2.6 * rows))
        figure.subplots_adjust(0.06, 0.2 / rows, 0.99, 1 - 0.12 / rows, wspace=0.25, hspace=0.5)
        for place, (name, points) in enumerate(curves.items(), 1):
            axis = figure.add_subplot(rows, 3, place, title=name, xlabel="optimizer step")
            axis.plot(*zip(*points, strict=True), marker="." if len(points) < 30 else None, linewidth=1)
        atomic_write(self.folder / "curves.png", lambda file: figure.savefig(file, dpi=110))
# ===== shared DDP block: end =====

# ---- Checks --------------------------------------------------------------------------------------

@dataclass
class Outcome:
    """What a check found."""

    status: str  # OK, WARN, FAIL
    fact: str
    advice: str = ""

def failure(error: Exception, who: str = "", otherwise: str = "see the traceback") -> Outcome:
    """FAIL with the words of an error; the block's errors say what to do after a colon."""
    fact, _, advice = (str(error) or type(error).__name__).splitlines()[0].partition(": ")
    return Outcome("FAIL", who + fact, advice or otherwise)

def verdict(good: bool, fact: str, advice: str, otherwise: str = "FAIL") -> Outcome:
    return Outcome("OK", fact) if good else Outcome(otherwise, fact, advice)

class Report:
    """The lines of the program. In a rank that the program started they go to the starter, which prints them."""

    def __init__(self, through_pipe: bool = False):
        self.through_pipe, self.results, self.measured, self.current = through_pipe, [], None, "start"
        self.started = time.monotonic()

    def send(self, row: dict) -> None:
        """A row: {"begin": name}, {"measured": …} or a result {"status", "name", "fact", "advice"}."""
        self.current = row.get("begin", self.current)
        if self.through_pipe:
            sys.stdout.write(MARK + json.dumps(row) + "\n")
            sys.stdout.flush()
        elif "measured" in row:
            self.measured = row["measured"]
        elif "status" in row and row["name"] not in [r["name"] for r in self.results]:  # the first error is the cause
            self.results.append(row)
            advice = f" — {row['advice']}" if row["advice"] else ""
            self.say(f"{row['status']:<4}  {row['name']}: {row['fact']}{advice}")

    def add(self, name: str, outcome: Outcome) -> None:
        self.send({"status": outcome.status, "name": name, "fact": outcome.fact, "advice": outcome.advice})

    def say(self, text: str) -> None:
        print(text, flush=True)  # noqa: T201

    def failed(self, *names: str) -> bool:
        return any(r["status"] == "FAIL" and (not names or r["name"] in names) for r in self.results)

    def finish(self, args: argparse.Namespace) -> int:
        """Table, last line, --json; returns the exit status."""
        if self.measured:
            self.say(show_table(self.measured))
        count = collections.Counter(r["status"] for r in self.results)
        seconds = time.monotonic() - self.started
        self.say(f"\n{count['OK']} OK, {count['WARN']} WARN, {count['FAIL']} FAIL in {seconds:.1f} s")
        if args.json:
            worst = next((s for s in ("FAIL", "WARN") if count[s]), "OK")
            content = {"status": worst, "wall_s": seconds, "torch": torch.__version__, "host": socket.gethostname()}
            text = json.dumps({**content, "results": self.results, "measured": self.measured}, indent=1)
            if not atomic_write(Path(args.json), lambda file: file.write(text.encode())):
                return 1
        return int(self.failed())

# The environment: functions of the arguments, in one process. `args.ranks`: the ranks on this machine.

def check_versions(args: argparse.Namespace) -> Outcome:
    fact = f"python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}"
    if sys.version_info < (3, 10) or tuple(int(p) for p in torch.__version__.split(".")[:2]) < (2, 10):
        return Outcome("FAIL", fact, "the scripts need python 3.10 and torch 2.10: pip install -r requirements.txt")
    missing = [name for name in ("tqdm", "wandb", "yaml", "matplotlib") if importlib.util.find_spec(name) is None]
    return verdict(not missing, f"{fact}, without {', '.join(missing)}" if missing else fact, INSTALL, "WARN")

def free_memory() -> float:
    """GB; a container's limit counts."""
    with contextlib.suppress(OSError, ValueError):
        used, limit = (int(Path(f"/sys/fs/cgroup/memory.{n}").read_text()) for n in ("current", "max"))
        return (limit - used) / 1e9
    with contextlib.suppress(OSError):
        return int(re.search(r"MemAvailable: *(\d+)", Path("/proc/meminfo").read_text())[1]) / 1e6
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9

def check_devices(args: argparse.Namespace) -> Outcome:
    device = choose_device(args.device, 0)
    if device.type == "cpu":
        free = free_memory()
        fact = f"cpu, {free:.1f} GB of memory free for {args.ranks} ranks"
        if args.device == "auto" and (Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi")):
            return Outcome("WARN", f"{fact}; an NVIDIA driver, but torch sees no GPU", "install torch's CUDA build")
        return verdict(free > 2 * args.ranks, fact, "start fewer ranks or free memory: 2 GB each is little", "WARN")
    count, module = torch.accelerator.device_count(), torch.get_device_module(device)
    if args.ranks > count:
        return Outcome("FAIL", f"{count} {device.type} devices for {args.ranks} ranks", f"--nproc {count} at most")
    free = [module.mem_get_info(index) for index in range(count)]
    least = min(f / t for f, t in free)
    fact = f"{count} x {module.get_device_name(0)}, {min(f for f, _ in free) / 1e9:.1f} GB free on each"
    return verdict(least > 0.8, fact, "another process uses one of them: see nvidia-smi or xpu-smi", "WARN")

def check_backend(args: argparse.Namespace) -> Outcome:
    device = choose_device(args.device, 0)
    built = [name for name in ("gloo", "nccl", "xccl", "mpi") if getattr(dist, f"is_{name}_available")()]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):  # for its warnings
        start_logging(0)
        backend = choose_backend(args.backend, device)
    LOGGER.handlers.clear()
    fact = f"{backend} for {device.type} (in this torch: {', '.join(built)})"
    slow = device.type != "cpu" and backend == "gloo"
    return verdict(not slow, fact, f"gloo is slow here: {said.getvalue().strip() or 'use --backend auto'}", "WARN")

def check_threads(args: argparse.Namespace) -> Outcome:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    setting = os.environ.get("OMP_NUM_THREADS")
    threads = int(setting) if (setting or "").isdigit() else max(1, cores // args.ranks)
    shown = f"OMP_NUM_THREADS={setting}" if setting else "OMP_NUM_THREADS not set"
    fact = f"{cores} of {os.cpu_count()} cores usable, {args.ranks} ranks x {threads} threads ({shown})"
    advice = f"threads fight for cores: unset OMP_NUM_THREADS, or export OMP_NUM_THREADS={max(1, cores // args.ranks)}"
    return verdict(threads == 1 or threads * args.ranks <= cores, fact, advice, "WARN")

def check_port(args: argparse.Namespace) -> Outcome:
    address, setting = os.environ.get("MASTER_ADDR", "localhost"), os.environ.get("MASTER_PORT")
    try:
        own, master = ({i[4][0] for i in socket.getaddrinfo(a, None)} for a in (socket.gethostname(), address))
    except OSError as error:
        return Outcome("FAIL", f"MASTER_ADDR={address} is unknown ({error})", "export the first node's address")
    name = f"port {setting or 29500} ({'MASTER_PORT' if setting else 'the default'})"
    if not (own | {"127.0.0.1", "::1"}) & master:
        return Outcome("OK", f"{name} is on {address}, not this machine: not tried")
    with socket.socket() as probe, socket.socket() as other:
        other.bind(("", 0))
        advice = f"export MASTER_PORT={other.getsockname()[1]}, or use torchrun --standalone"
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(setting or 29500)))
            probe.listen()
        except (OSError, OverflowError, ValueError) as error:
            return Outcome("FAIL" if setting else "WARN", f"{name} cannot be used: {error}", advice)
    return Outcome("OK", f"{name} is free")

def check_host(args: argparse.Namespace) -> Outcome:
    """gloo and NCCL ask what address the machine's own name has."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
        with socket.socket() as probe:
            probe.bind((address, 0))
    except OSError as error:
        advice = f"add '127.0.0.1 {name}' to /etc/hosts, or export GLOO_SOCKET_IFNAME=lo (several nodes: eth0, …)"
        return Outcome("FAIL", f"the machine's name {name} has no usable address ({error})", advice)
    alone = " (one machine only; several need GLOO_SOCKET_IFNAME)" if address.startswith("127.") else ""
    return Outcome("OK", f"{name} is {address}{alone}")

def check_disk(args: argparse.Namespace) -> Outcome:
    """A checkpoint is written and read where runs will write."""
    folder, said = Path(args.folder), io.StringIO()
    weights = {"module.weight": torch.arange(DISK_MB * 250_000, dtype=torch.float32)}
    begin = time.monotonic()
    with contextlib.redirect_stdout(said):
        start_logging(0)
        written = save_checkpoint(folder, {"model": weights}, 0, keep=1)
    LOGGER.handlers.clear()
    rate, free = DISK_MB / (time.monotonic() - begin), shutil.disk_usage(folder).free / 1e9
    if not written:
        why = re.search(r"\(.*\)", said.getvalue())  # of the warning
        advice = "free space there, or give another --output_dir"
        return Outcome("FAIL", f"no {DISK_MB} MB checkpoint can be written in {folder.parent} {why and why[0]}", advice)
    if not torch.equal(load_checkpoint(folder / "latest.pt")["model"]["weight"], weights["module.weight"]):
        return Outcome("FAIL", f"a checkpoint in {folder.parent} reads back different", "use another disk")
    for file in folder.iterdir():
        file.unlink()
    fact = f"{free:.1f} GB free in {folder.parent}, checkpoint written at {rate:.0f} MB/s"
    advice = f"the largest run keeps 3 checkpoints of {CHECKPOINT_GB} GB: give another --output_dir"
    return verdict(free > 3 * CHECKPOINT_GB, fact, advice, "WARN")

def check_shared_memory(args: argparse.Namespace) -> Outcome:
    if not Path("/dev/shm").is_dir():
        return Outcome("OK", f"no /dev/shm on {platform.system()}: not used")
    free = shutil.disk_usage("/dev/shm").free / 1e9
    advice = "data loader workers and NCCL die of this: docker run --shm-size=8g, or --ipc=host"
    return verdict(free > 0.2 * args.ranks, f"{free:.2f} GB free in /dev/shm", advice, "WARN")

def check_wandb(args: argparse.Namespace) -> Outcome:
    if importlib.util.find_spec("wandb") is None:
        return Outcome("WARN", "not installed: metrics go to metrics.jsonl alone", INSTALL)
    file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    key = os.environ.get("WANDB_API_KEY") or (file.exists() and "wandb" in file.read_text())
    mode = os.environ.get("WANDB_MODE") or ("online" if key else "disabled until `wandb login` or --wandb_mode offline")
    return Outcome("OK", f"{importlib.metadata.version('wandb')}, {'an' if key else 'no'} API key, runs will be {mode}")

ENVIRONMENT = {
    "versions": check_versions,
    "devices": check_devices,
    "backend": check_backend,
    "threads": check_threads,
    "host name": check_host,
    "port": check_port,
    "disk": check_disk,
    "shared memory": check_shared_memory,
    "wandb": check_wandb,
}

def check_environment(report: Report, args: argparse.Namespace, skip: tuple[str, ...] = ()) -> bool:
    """All of ENVIRONMENT; False if processes cannot start."""
    for name, check in ENVIRONMENT.items():
        if name in skip:
            continue
        try:
            report.add(name, check(args))
        except (ValueError, OSError, RuntimeError) as error:
            report.add(name, failure(error, otherwise="correct the variable or option that names it"))
    return not report.failed("versions", "devices", "backend", "host name")

# In the ranks: functions of (ddp, args) that all ranks call together. Each returns what this rank found, and
# makes its collectives whatever it finds; the worst outcome of all ranks is reported.

def gather(ddp: DDPContext, item) -> list:
    """`item` of every rank."""
    items = [item] * ddp.world_size
    if ddp.world_size > 1:
        dist.all_gather_object(items, item)
    return items

def alike(ddp: DDPContext, tensor: torch.Tensor) -> bool:
    """Whether all ranks have the same bits."""
    return len(set(gather(ddp, tensor.detach().cpu().numpy().tobytes()))) == 1

def probe(ddp: DDPContext, seed: int = 42, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    """A small model, the same on all ranks."""
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(16, 64), torch.nn.LayerNorm(64), torch.nn.GELU(), torch.nn.Linear(64, 4)]
    return torch.nn.Sequential(*layers).to(ddp.device, dtype)

def loss_sum(model: torch.nn.Module, ids: np.ndarray, ddp: DDPContext) -> torch.Tensor:
    """Sum of the probe's losses over samples `ids`, which are functions of their number alone."""
    dtype = next(model.parameters()).dtype
    x = keyed_uniform(7, 0, torch.as_tensor(ids, device=ddp.device), 16).to(dtype) - 0.5
    target = torch.stack([x.sum(1), x.square().sum(1), x[:, 0] * x[:, 1], x[:, 2].sin()], 1)
    return (model(x) - target).square().sum()

def flat(model: torch.nn.Module, part: str = "data") -> torch.Tensor:
    """A copy of all weights, or with "grad" of all gradients, as one vector."""
    return torch.cat([getattr(p, part).flatten() for p in unwrap(model).parameters()])

def check_group(ddp: DDPContext, args: argparse.Namespace) -> Outcome:
    versions = f"python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}"
    hosts, found = (sorted(set(gather(ddp, item))) for item in (socket.gethostname(), versions))
    fact = f"{ddp.world_size} ranks on {len(hosts)} host(s), {ddp.backend} on {ddp.device.type}"
    fact += f", {torch.get_num_threads()} thread(s) each, {'; '.join(found)}"
    return verdict(len(found) == 1, fact, "install the same versions on all hosts")

def check_all_reduce(ddp: DDPContext, args: argparse.Namespace) -> Outcome:
    """Sums, maxima and broadcasts with known results."""
    n, wrong = ddp.world_size, []
    for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16):
        values = torch.full((1000,), ddp.rank + 1, dtype=dtype, device=ddp.device)
        sent = values.clone()
        if n > 1:
            dist.all_reduce(values)
            dist.broadcast(sent, src=n - 1)
        limit = 0.01 if dtype == torch.bfloat16 else 0.0  # bf16 holds whole numbers up to 256 exactly
        if ((values.double() / (n * (n + 1) / 2) - 1).abs() > limit).any():
            wrong.append(f"sum in {dtype} is {values[0].item():g}, not {n * (n + 1) / 2:g}")
        if not bool((sent == n).all()):
            wrong.append(f"broadcast in {dtype} gave {sent[0].item():g}, not {n}")
    sums = reduce_sums(ddp, {"one": 1.0, "rank": torch.tensor(float(ddp.rank)), "large": 2.0**40 + ddp.rank})
    if sums != {"one": n, "rank": n * (n - 1) / 2, "large": n * 2.0**40 + n * (n - 1) / 2}:
        wrong.append(f"reduce_sums gave {sums}")
    if on_rank0(ddp, socket.gethostname) != gather(ddp, socket.gethostname())[0]:
        wrong.append("on_rank0 gave another value than rank 0's")
    advice = "the network or the driver corrupts data: try --backend gloo, and NCCL_P2P_DISABLE=1"
    fact = f"sums and broadcasts over {n} ranks exact in fp32, fp64, bf16, int64"
    return verdict(not wrong, "; ".join(wrong) or fact, advice)

def check_gradients(ddp: DDPContext, args: argparse.Namespace, micro_steps: int = 1) -> Outcome:
    """Shares of unequal size against the whole batch in one process; the loss is divided by the global count."""
    ids, model = np.arange(9 * ddp.world_size + 1), probe(ddp)
    wrapped = wrap_ddp(copy.deepcopy(model), ddp)
    (loss_sum(model, ids, ddp) / len(ids)).backward()
    local = []
    for micro, part in enumerate(np.array_split(ids[ddp.rank :: ddp.world_size], micro_steps)):
        with sync_gradients(wrapped, last=micro == micro_steps - 1):
            (loss_sum(wrapped, part, ddp) * ddp.world_size / len(ids)).backward()
        local.append(alike(ddp, flat(wrapped, "grad")))
    error = ((flat(wrapped, "grad") - flat(model, "grad")).norm() / flat(model, "grad").norm()).item()
    once = ddp.world_size == 1 or local == [False] * (micro_steps - 1) + [True]
    fact = f"relative difference to one process {error:.1e} in fp64, {micro_steps} micro-batch(es), "
    fact += "reduced once" if once else f"NOT reduced in the last alone: ranks equal after each {local}"
    return verdict(error < 1e-12 and once, fact, "DDP averages wrongly here: try another backend or torch build")

def check_sampler(ddp: DDPContext, args: argparse.Namespace) -> Outcome:
    """Each index once, on this and other numbers of ranks; a restart inside the epoch goes on where it was."""
    total, micro, wrong = 24 * ddp.world_size, 2, []
    for n in (10 * total, 10 * total + 7):  # the second leaves 7 for another epoch
        sampler = GlobalBatchSampler(n, total, micro, 42, ddp)
        epochs = []
        for epoch in (0, 1):
            sampler.set_epoch(epoch)
            epochs.append([batch.tolist() for batch in sampler])
            ranks = gather(ddp, epochs[epoch])
            seen = [i for batches in ranks for batch in batches for i in batch]
            if len(seen) != 10 * total or len(set(seen)) != len(seen) or not set(seen) <= set(range(n)):
                wrong.append(f"epoch {epoch} of {n} samples gave {len(seen)}, {len(set(seen))} of them different")
            wrong += ["the ranks have different numbers of micro-batches"] * (len(set(map(len, ranks))) > 1)
        wrong += ["two epochs have the same order"] * (epochs[0] == epochs[1])
        sampler.set_epoch(1, start=4)
        if [batch.tolist() for batch in sampler] != epochs[1][4 * micro :]:
            wrong.append("a restart inside the epoch repeats or skips samples")
        require_same(ddp, "the order of samples", sampler.fingerprint())
        first = sorted(next(sampler.batches()).tolist())
        for world in (1, 2, 3, 5, 8):
            other = GlobalBatchSampler(n, total, micro, 42, ddp._replace(world_size=world, rank=0))
            other.set_epoch(1)
            dealt = [other.deal(next(other.batches()), rank) for rank in range(world)]
            if sorted(np.concatenate(sum(dealt, [])).tolist()) != first:
                wrong.append(f"{world} ranks make another global batch")
    begin = time.monotonic()
    next(iter(GlobalBatchSampler(60_000_000, total, micro, 42, ddp)))
    seconds = time.monotonic() - begin
    fact = f"each of {10 * total} samples once, restart exact, 60 M samples ready in {1000 * seconds:.1f} ms"
    return verdict(not wrong and seconds < 2, "; ".join(wrong) or fact, "data would repeat or get lost: report this")

def check_evaluation(ddp: DDPContext, args: argparse.Namespace) -> Outcome:
    """range(rank, n, world_size) without padding, sums and counts reduced."""
    model, n = wrap_ddp(probe(ddp), ddp), 6 * ddp.world_size + 5
    with torch.no_grad():
        alone = loss_sum(unwrap(model), np.arange(n), ddp).item() / n
        mine = np.arange(ddp.rank, n, ddp.world_size)
        sums = reduce_sums(ddp, {"loss": loss_sum(unwrap(model), mine, ddp), "count": float(len(mine))})
    error = abs(sums["loss"] / sums["count"] - alone) / alone
    fact = f"{sums['count']:.0f} of {n} samples, relative difference to one process {error:.1e}"
    return verdict(sums["count"] == n and error < 1e-12, fact, "metrics depend on the number of ranks: report this")

def check_noise(ddp: DDPContext, args: argparse.Namespace) -> Outcome:
    """Random numbers belong to the sample, not to the rank that has it."""
    table = keyed_uniform(42, 3, torch.arange(40 * ddp.world_size, device=ddp.device), 5)
    mine = torch.arange(ddp.rank, len(table), ddp.world_size, device=ddp.device)
    good = torch.equal(keyed_uniform(42, 3, mine, 5), table[mine]) and 0.4 < table.mean().item() < 0.6
    good &= len(table.unique()) > 0.99 * table.numel() and alike(ddp, table)
    advice = "integer arithmetic on this device is not as on others: use --device cpu to compare"
    return verdict(good, f"the numbers of {len(table)} samples {'do not' * good or 'DO'} depend on the ranks", advice)

def check_checkpoint(ddp: DDPContext, args: argparse.Namespace) -> Outcome:
    """Rank 0 saves names with `module.`, all load into a bare model; a damaged file is noticed."""
    folder, model = Path(args.folder), wrap_ddp(probe(ddp), ddp)
    names = {f"module.{k}": v for k, v in unwrap(model).state_dict().items()}
    states = rng_states(ddp)
    after = torch.rand(3)
    state = {"model": names, "rng": states, "step": 1}
    written = on_rank0(ddp, lambda: all([save_checkpoint(folder, state, step, keep=2) for step in (1, 2)]))
    visible = gather(ddp, (folder / "latest.pt").exists())
    wrong = [] if written else ["it could not be written"]
    if written and visible[ddp.rank]:
        loaded, bare = load_checkpoint(folder / "latest.pt"), probe(ddp, seed=1)
        bare.load_state_dict(loaded["model"])
        wrong += [] if torch.equal(flat(bare), flat(model)) else ["loaded weights differ"]
        restore_rng(loaded["rng"], ddp, 42)
        wrong += [] if torch.equal(torch.rand(3), after) else ["the random state is not restored"]
    barrier(ddp)
    if ddp.rank == 0 and written:
        os.truncate(folder / "latest.pt", 1000)
        LOGGER.disabled = True  # the warning is expected
        found = find_checkpoint(folder)
        LOGGER.disabled = False
        wrong += [] if str(found).endswith("step_00000001.pt") else [f"with a damaged latest.pt {found} is used"]
    if not all(visible) and args.output_dir:
        wrong.append(f"only {sum(visible)} of {ddp.world_size} ranks see {args.output_dir}")
    fact = f"saved by rank 0 with module. names, loaded by {sum(visible)} ranks bit for bit, damaged file noticed"
    return verdict(not wrong, "; ".join(wrong) or fact, "give an --output_dir that all nodes share and that has space")

def check_precision(ddp: DDPContext, args: argparse.Namespace) -> Outcome:
    """A few optimizer steps in each precision against fp64."""
    ids, parts, good = np.arange(16 * ddp.world_size), [], True
    mine = ids[ddp.rank :: ddp.world_size]
    with torch.no_grad():
        reference = loss_sum(probe(ddp), ids, ddp).item()
    for name, limit in (("fp32", 1e-5), ("bf16", 0.03), ("fp16", 0.01)):
        try:
            dtype = resolve_precision(name, ddp.device)
        except ValueError:
            parts.append(f"{name} refused on {ddp.device.type}")
            continue
        model = wrap_ddp(probe(ddp, dtype=torch.float32), ddp)
        before = flat(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        guard = StepGuard(args, ddp, optimizer, dtype, time.monotonic())
        for step in range(4):
            with torch.autocast(ddp.device.type, dtype, enabled=dtype != torch.float32):
                loss = loss_sum(model, mine, ddp)
            if step == 0:
                error = abs(reduce_sums(ddp, {"loss": loss.detach()})["loss"] - reference) / reference
            guard.scaler.scale(loss / len(mine)).backward()
            guard.step(loss, step, [mine])
        guard.finish()
        equal = alike(ddp, flat(model))
        good &= error < limit and equal and not torch.equal(flat(model), before)
        parts.append(f"{name} {error:.0e}{'' if equal else ' (weights DIFFER between ranks)'}")
    auto = str(resolve_precision("auto", ddp.device)).removeprefix("torch.")
    return verdict(good, f"loss against fp64: {', '.join(parts)}; auto is {auto}", "train with --precision fp32")

def check_bad_step(ddp: DDPContext, args: argparse.Namespace) -> Outcome:
    """A loss that is not a number on the last rank in step 1 of 3: all ranks skip that step."""
    model, ids = wrap_ddp(probe(ddp, dtype=torch.float32), ddp), np.arange(8)
    guard = StepGuard(args, ddp, torch.optim.AdamW(model.parameters(), fused=True), torch.float32, time.monotonic())
    moved = []
    LOGGER.disabled = True  # the warning is expected
    for step in range(3):
        loss = loss_sum(model, ids, ddp)
        loss = loss * math.nan if step == 1 and ddp.rank == ddp.world_size - 1 else loss
        loss.backward()
        before = flat(model)
        guard.step(loss, step, [ids])
        moved.append(not torch.equal(flat(model), before))
    guard.finish()
    LOGGER.disabled = False
    equal = alike(ddp, flat(model))
    fact = f"NaN on rank {ddp.world_size - 1} in step 1 of 0, 1, 2: steps {[i for i in range(3) if moved[i]]} updated, "
    fact += f"{guard.bad_steps} skip counted, weights {'equal' if equal else 'DIFFERENT'} on all ranks"
    good = moved == [True, False, True] and guard.bad_steps == 1 and equal
    return verdict(good, fact, "fused AdamW ignores found_inf: use the pinned torch")

QUICK = {"process group": check_group, "all-reduce": check_all_reduce}
FULL = {
    **QUICK,
    "gradients": check_gradients,
    "accumulation": functools.partial(check_gradients, micro_steps=3),
    "sampler": check_sampler,
    "evaluation": check_evaluation,
    "noise": check_noise,
    "checkpoint": check_checkpoint,
    "precision": check_precision,
    "non-finite step": check_bad_step,
}

# What the hardware does, and what that means for the scripts.

def timed(ddp: DDPContext, function: Callable, budget: float = 0.4) -> float:
    """Median seconds of `function()`, which all ranks call together; the mean of the ranks."""

    def once() -> float:
        begin = time.perf_counter()
        function()
        if ddp.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter() - begin

    def mean(seconds: float) -> float:
        return reduce_sums(ddp, {"seconds": seconds})["seconds"] / ddp.world_size

    once()
    first = mean(once())  # which also lines the ranks up
    return mean(float(np.median([once() for _ in range(int(min(30, max(3, budget / first))))])))

def measure(ddp: DDPContext) -> dict:
    """All-reduce by message size, and matrix products on all ranks at once. (all ranks)"""
    messages, rates = [], {}
    for size in MESSAGES if ddp.world_size > 1 else ():
        buffer = torch.zeros(size // 4, device=ddp.device)
        seconds = timed(ddp, lambda buffer=buffer: dist.all_reduce(buffer))
        bus = 2 * (ddp.world_size - 1) / ddp.world_size * size / seconds
        messages.append({"bytes": size, "seconds": seconds, "bus_gb_per_s": bus / 1e9})
    for name in ("fp32", "bf16"):
        for side in (256, 1024, 4096, 8192):
            a = torch.ones(side, side, device=ddp.device, dtype=resolve_precision(name, ddp.device))
            seconds = timed(ddp, lambda a=a: a @ a)
            rates[name] = 2 * side**3 / seconds / 1e12
            if seconds * 64 > 0.5:  # the next size would take long: CPUs differ by 1,000 in bf16
                break
    used = "bf16" if resolve_precision("auto", ddp.device) == torch.bfloat16 else "fp32"
    measured = {"ranks": ddp.world_size, "backend": ddp.backend, "device": ddp.device.type, "precision": used}
    measured |= {"all_reduce": messages, "matmul_tflop_per_s": rates}
    return {**measured, "speedup": predict(measured)}

def all_reduce_seconds(measured: dict, size: float, ranks: int) -> float:
    """Time for `size` bytes on `ranks` ranks at the bus bandwidth that was measured for messages of that size."""
    sizes, seconds = zip(*((m["bytes"], m["seconds"]) for m in measured["all_reduce"]), strict=True)
    known = float(np.exp(np.interp(math.log(size), np.log(sizes), np.log(seconds)))) * max(1.0, size / sizes[-1])
    return known * (1 - 1 / ranks) / (1 - 1 / measured["ranks"])

def predict(measured: dict) -> dict[str, list[float]]:
    """Speed-up of each script on each of RANKS; the formula is in show_table."""
    if not measured["all_reduce"]:
        return {}
    table = {}
    for script, (parameters, tflop, micro_steps, least_ms) in SCRIPTS.items():
        micro = tflop / (EFFICIENCY * measured["matmul_tflop_per_s"][measured["precision"]])
        if measured["device"] != "cpu":
            micro = max(micro, least_ms / 1000)
        backward, buckets = 2 / 3 * micro, math.ceil(4 * parameters / (25 << 20))
        table[script] = []
        for ranks in RANKS:
            one = all_reduce_seconds(measured, 4 * parameters / buckets, ranks)
            done = 0.0
            for bucket in range(buckets):  # a bucket goes when it is ready and the one before it is through
                done = max(done, (bucket + 1) / buckets * backward) + one
            step = micro_steps * micro
            table[script].append(ranks * step / (step + max(0.0, done - backward)))
    return table

def show_table(measured: dict) -> str:
    n, rates = measured["ranks"], measured["matmul_tflop_per_s"]
    lines = ["", f"Measured on {n} rank(s) ({measured['backend']}, {measured['device']})"]
    if measured["all_reduce"]:
        lines += ["  all-reduce of        takes   bus bandwidth"]
    for row in measured["all_reduce"]:
        size = f"{row['bytes'] >> 10} KiB" if row["bytes"] < 1 << 20 else f"{row['bytes'] >> 20} MiB"
        lines.append(f"  {size:>13} {1000 * row['seconds']:9.3f} ms {row['bus_gb_per_s']:10.3f} GB/s")
    shown = ", ".join(f"{name} {rate:.2g}" for name, rate in rates.items())
    lines.append(f"  matrix product, TFLOP/s per rank with all ranks at work: {shown}")
    if not measured["speedup"]:
        return "\n".join([*lines, "One rank reduces nothing: for predictions run with --nproc 2 or more."])
    gradients = "".join(f"{f'{4 * p / 1e6:.1f} MB':>12}" for p, *_ in SCRIPTS.values())
    lines += ["", "Predicted speed-up at a fixed batch per rank".ljust(71) + "UniRef50 guide, effective batch"]
    lines.append("  ranks " + "".join(f"{s:>12}" for s in SCRIPTS) + " |  batch      lr  warm-up  expects")
    lines.append("  grads " + gradients + " |")
    for index, ranks in enumerate(RANKS):
        batch, lr, warmup, expected = SEED_TABLE.get(ranks, ("-",) * 4)
        lr, expected = (lr, expected) if lr == "-" else (f"{lr:.0e}", f"{expected}x")
        row = "".join(f"{column[index]:>11.2f}x" for column in measured["speedup"].values())
        lines.append(f"  {ranks:>5} {row} |{batch:>7} {lr:>7} {warmup:>8} {expected:>8}")
    lines += [
        "  (guide, 8 GPUs and more, conservative: 12 per GPU, rate 3e-04, warm-up 30000)",
        f"  speed-up(N) = N t / (t + exposed); t = micro-steps x FLOP / ({EFFICIENCY} x {measured['precision']} matrix"
        " product rate); exposed = end of the chain of bucket all-reduces - end of backward",
        "  A bucket of 25 MiB takes 2 (N-1)/N x bytes / bus bandwidth, interpolated in the table above.",
        f"  Only {n} ranks were measured: predictions beyond use the bandwidth of {n}, and one such device per rank.",
    ]
    return "\n".join(lines)

# ---- Main ----------------------------------------------------------------------------------------

def make_folder(output_dir: str | None) -> str:
    """A new folder in --output_dir, or in the system's place for temporary files."""
    if output_dir:
        os.makedirs(output_dir, exist_ok=True)
    return tempfile.mkdtemp(prefix="ddp-check-", dir=output_dir)

def watch(report: Report, args: argparse.Namespace) -> None:
    """End this rank if the checks take longer than --timeout: nothing here hangs."""

    def expire() -> None:
        fact = f"no answer after {args.timeout:.0f} s"
        advice = "the ranks cannot reach each other: firewall, GLOO_SOCKET_IFNAME/NCCL_SOCKET_IFNAME, NCCL_DEBUG=INFO"
        report.add(report.current, Outcome("FAIL", fact, advice))
        if args.rank == 0:
            shutil.rmtree(args.folder, ignore_errors=True)
            report.finish(args)
        os._exit(1)

    timer = threading.Timer(args.timeout, expire)
    timer.daemon = True
    timer.start()

def run_checks(report: Report, args: argparse.Namespace) -> None:
    """The checks that need a group, and the measurements. (all ranks)"""
    watch(report, args)
    report.send({"begin": "process group"})
    rank = ""
    try:
        ddp = setup_ddp(args)
        rank = f"rank {ddp.rank}: "
        args.folder = on_rank0(ddp, getattr, args, "folder")
        for name, check in (QUICK if args.quick else FULL).items():
            report.send({"begin": name})
            outcomes = gather(ddp, dataclasses.astuple(check(ddp, args)))
            if ddp.rank == 0:
                report.add(name, Outcome(*max(outcomes, key=lambda o: ("OK", "WARN", "FAIL").index(o[0]))))
        report.send({"begin": "speed"})
        measured = None if args.quick else measure(ddp)
    except Exception as error:
        report.add(report.current, failure(error, rank))
        raise
    if ddp.rank == 0 and measured:
        report.send({"measured": measured})

def run_ranks(args: argparse.Namespace) -> int:
    """One rank. Where a launcher started it, rank 0 also checks the environment, prints and judges."""
    report, first = Report(through_pipe=args.role == "ranks"), args.rank == 0
    if args.role:
        run_checks(report, args)
        return 0
    args.folder = make_folder(args.output_dir) if first else ""
    try:
        if not first or check_environment(report, args, skip=("port",)):
            run_checks(report, args)
    finally:
        if first:
            shutil.rmtree(args.folder, ignore_errors=True)
            status = report.finish(args)
    return status if first else 0

def raise_in_last_rank(args: argparse.Namespace) -> int:
    """The last rank fails, the others wait for it in an all-reduce."""
    ddp = setup_ddp(args)
    barrier(ddp)
    if ddp.rank == ddp.world_size - 1:
        log_all(RAISED)
        raise RuntimeError("on purpose")
    barrier(ddp)
    return 0

def start_job(args: argparse.Namespace, role: str, seconds: float, on_line: Callable[[str], None]) -> int:
    """This program with `role` in args.ranks processes, line by line; the exit status, -9 if it had to be killed."""
    options = {"role": role, "nproc": args.ranks, "device": args.device, "backend": args.backend, "folder": args.folder}
    options |= {"timeout": args.timeout} | ({"output_dir": args.output_dir} if args.output_dir else {})
    command = [sys.executable, os.path.abspath(__file__), *(f"--{name}={value}" for name, value in options.items())]
    pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    env = {name: value for name, value in os.environ.items() if name != "MASTER_PORT"}  # these ranks take a free one
    pipes |= dict(start_new_session=True, errors="replace", env=env)
    job = subprocess.Popen(command + ["--quick"] * args.quick, **pipes)

    def kill() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)  # the job, and whatever it started

    timer = threading.Timer(seconds, kill)
    timer.start()
    try:
        for line in job.stdout:
            on_line(line.rstrip("\n"))
        return job.wait()
    finally:
        timer.cancel()
        kill()

def check_in_processes(report: Report, args: argparse.Namespace) -> None:
    """All checks that need a group, in processes of this program's own."""
    log, begin = collections.deque(maxlen=30), time.monotonic()

    def on_line(line: str) -> None:
        if line.startswith(MARK):
            report.send(json.loads(line.removeprefix(MARK)))
        else:
            log.append(line)

    before = report.failed()
    status = start_job(args, "ranks", args.timeout + 20, on_line)
    fact = f"{args.ranks} processes ended with status {status} after {time.monotonic() - begin:.1f} s"
    fact += f" in '{report.current}'" if status else ""
    report.add("end of the processes", verdict(status == 0, fact, "see their last lines below"))
    if status != 0 or (report.failed() and not before):
        report.say("\n".join(["Last lines of the processes:", *(f"    {line}" for line in log)]))

def check_failing_rank(args: argparse.Namespace) -> Outcome:
    """A rank that raises ends the job, with a traceback that names the rank."""
    seen, raised = [], []

    def on_line(line: str) -> None:
        seen.append(line)
        if RAISED in line:
            raised.append(time.monotonic())

    status = start_job(args, "raise", min(args.timeout, 90), on_line)
    rank, text = args.ranks - 1, "\n".join(seen)
    if not raised:
        return Outcome("FAIL", f"the job ended too early, status {status}: {' | '.join(seen[-3:])}", "report this")
    seconds = time.monotonic() - raised[0]
    named = f"failed on rank {rank}" in text and "on purpose" in text
    fact = f"rank {rank} raised, the job ended after {seconds:.1f} s with status {status}"
    fact += ", its traceback names the rank" if named else ", NO traceback names the rank"
    return verdict(status != 0 and named and seconds < 20, fact, "jobs with a failed rank would go on: report this")

def main() -> int:
    args = parse_args()
    if args.role:  # started by start_job
        return launch(run_ranks if args.role == "ranks" else raise_in_last_rank, args)
    report = Report()
    devices = torch.accelerator.device_count() if torch.accelerator.is_available() and args.device != "cpu" else 0
    try:
        args.rank, world, _, local_world, launcher = find_ranks(dict(os.environ), devices or os.cpu_count() or 1)
    except ValueError as error:
        report.add("launcher", failure(error))
        return report.finish(args)
    if world > 1 or launcher == "torchrun":
        args.ranks, args.nproc = local_world, 0
        return launch(run_ranks, args)
    args.rank, args.ranks = -1, args.nproc or devices or 2
    args.folder = make_folder(args.output_dir)
    try:
        if check_environment(report, args):
            check_in_processes(report, args)
            if not args.quick:
                report.add("failing rank", check_failing_rank(args))
    finally:
        shutil.rmtree(args.folder, ignore_errors=True)
    return report.finish(args)

if __name__ == "__main__":
    sys.exit(main())
