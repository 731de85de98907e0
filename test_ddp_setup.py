"""Check a machine for distributed training: the first command on a new machine.

    python test_ddp_setup.py                                  # a process per GPU, or 2 processes
    python test_ddp_setup.py --nproc_per_node 4 --backend gloo --json check.json
    python test_ddp_setup.py --quick                          # under 15 s: no speeds
    torchrun --nproc_per_node=8 test_ddp_setup.py             # or srun, mpiexec: checks its ranks

Prints a line for each check: OK, WARN or FAIL, what was found, and what to do about it. If a check
fails the exit status is 1. First come checks of the environment, in one process. Then ranks start
and check, with the distributed lines that all training scripts have: sums with known results, the
gradient and the update of a DDP step against those of one process, and each precision against
float64. They measure all-reduces, matrix products, and how much faster all ranks are than one.
Last a rank fails on purpose, and the job must end.

The table at the end predicts how much faster the training scripts are on several ranks, with the
batch of each rank fixed. It knows the time of arithmetic and of all-reduces only, not that of
loading data. To judge it, compare the measured speed-up with the predicted one on the line above.

A launcher's ranks do not check the port, which is the launcher's business, nor the failing rank.
"""

import argparse
import contextlib
import copy
import ctypes
import difflib
import fcntl
import gc
import importlib.util
import json
import logging
import math
import os
import platform
import queue
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import zipfile
from collections import Counter
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import yaml
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
from tqdm import tqdm

OK = "OK"
WARN = "WARN"
FAIL = "FAIL"
MARK = "check: "  # begins a line by which rank 0 tells the process that started it something
ON_PURPOSE = "this rank fails on purpose"

CHECKPOINT_GB = 1.4  # the largest of the scripts' checkpoints, with the optimizer's state
BUCKET = 25 * 2**20  # bytes of gradients that DDP sums at a time
MESSAGES = [4 * 2**10, 64 * 2**10, 2**20, 4 * 2**20, BUCKET, 64 * 2**20]  # bytes


class Workload(NamedTuple):
    """A step of a training script with its full-size config."""

    parameters: float  # that are trained
    tflop: float  # of a micro-batch, forward and backward
    micro_batches: int  # in a step, on each rank
    launch_ms: float  # an accelerator needs this long just to launch a micro-batch's kernels


WORKLOADS = {
    "train_ddp": Workload(116e6, 2.8, 1, 8),  # 64 texts of 85 tokens, mpnet-base and the head
    "dpo": Workload(1.7e6, 0.028, 1, 6),  # a pair of 200 residues
    "uniref50": Workload(66.8e6, 1.7, 4, 7),  # 16 sequences of 286 residues
    "quantumgrav": Workload(0.03e6, 0.01, 1, 6),  # 64 sets
    "rebm": Workload(46.2e6, 4.9, 1, 30),  # 16 images, WideResNet-34-10, attack of 10 steps
}
EFFICIENCY = 0.4  # share of the rate of matrix products that a training step reaches
RANKS = [1, 2, 4, 8, 16]  # of the predictions


# --------------------------------------------------------------------------------------------------
# Arguments


def parse_args():
    parser = Parser(description=__doc__)
    add = parser.add_argument
    text = "processes; 0: one per GPU, 2 without GPUs"
    add("--nproc_per_node", type=int, default=0, help=text)
    add("--device", default="auto", choices=["auto", "cuda", "xpu", "cpu"], help="auto: the best")
    add("--backend", default="auto", help="nccl, gloo or xccl; auto: what the device wants")
    add("--quick", **FLAG, default=False, help="environment, sums and a DDP step only")
    add("--output_dir", help="where runs will write; None: the system's temporary folder")
    add("--json", help="file for the results")
    add("--timeout_minutes", type=float, default=1.0, help="limit of each wait for other ranks")
    add("--local_rank", help=argparse.SUPPRESS)  # of torch.distributed.launch
    add("--role", default="", help=argparse.SUPPRESS)  # of a rank that this program has started
    # what the shared lines read beside these
    parser.set_defaults(compile=False, find_unused_parameters=False, deterministic=False)
    parser.set_defaults(max_grad_norm=1.0, max_bad_steps=10, max_minutes=0.0)
    args = parser.parse_args(as_options(parser, sys.argv[1:]))

    if args.nproc_per_node < 0:
        parser.error(f"--nproc_per_node {args.nproc_per_node}: below 0")
    if args.timeout_minutes <= 0:
        parser.error(f"--timeout_minutes {args.timeout_minutes}: must be above 0")
    args.ranks = args.nproc_per_node or count_accelerators(args) or 2  # on this machine
    started = find_ranks()
    if started:
        args.ranks = int(os.environ.get("LOCAL_WORLD_SIZE", started[1]))
    if not args.role:
        args.nproc_per_node = 1  # this process starts the ranks itself, or a launcher has
    return args


def count_accelerators(args):
    if args.device == "cpu" or not torch.accelerator.is_available():
        return 0
    return torch.accelerator.device_count()


# --------------------------------------------------------------------------------------------------
# Report


class Report:
    """Prints a line for each check. A rank that this program has started sends its lines to the
    process that started it, which prints them."""

    def __init__(self, args):
        self.args = args
        self.start = time.monotonic()
        self.checks = []
        self.measured = {}

    def add(self, name, status, found):
        """name: of the check; found: what, and what to do about it."""
        if self.args.role:
            self.send(name=name, status=status, found=found)
            return
        self.checks.append({"name": name, "status": status, "found": found})
        print(f"{status:<4}  {name}: {found}", flush=True)

    def add_measured(self, measured):
        """What `measure` returns."""
        self.measured = measured
        if self.args.role:
            self.send(measured=measured)

    def send(self, **row):
        print(MARK + json.dumps(row), flush=True)

    def receive(self, line):
        row = json.loads(line.removeprefix(MARK))
        if "measured" in row:
            self.add_measured(row["measured"])
        else:
            self.add(**row)

    def has_failed(self, *names):
        """Whether one of these checks has failed, or without names any check."""
        for check in self.checks:
            if check["status"] == FAIL and (not names or check["name"] in names):
                return True
        return False

    def finish(self):
        """Print the tables and the last line, write --json; returns the exit status."""
        if self.measured:
            print(show_tables(self.measured))
        counts = Counter(check["status"] for check in self.checks)
        seconds = time.monotonic() - self.start
        parts = [f"{counts[status]} {status}" for status in (OK, WARN, FAIL)]
        print(f"\n{', '.join(parts)} in {seconds:.0f} s", flush=True)
        if self.args.json:
            content = {"torch": torch.__version__, "host": socket.gethostname(), "seconds": seconds}
            content.update(checks=self.checks, measured=self.measured)
            try:
                Path(self.args.json).write_text(json.dumps(content, indent=1))
            except OSError as error:
                raise InputError(f"--json {self.args.json}: {error.strerror}") from None
        return 1 if self.has_failed() else 0


# --------------------------------------------------------------------------------------------------
# The environment: checks in one process. Each returns (status, what was found, what to do).


def check_versions(args):
    found = f"python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}"
    numbers = [int(number) for number in torch.__version__.split(".")[:2]]
    if sys.version_info < (3, 10) or numbers < [2, 13]:
        text = "the scripts need python 3.10 and torch 2.13: pip install -r requirements.txt"
        return FAIL, f"{found}; {text}"
    missing = []
    for name in ("matplotlib", "sklearn", "wandb"):  # the others were imported above
        if importlib.util.find_spec(name) is None:
            missing.append(name)
    if missing:
        return WARN, f"{found}, no {', '.join(missing)}: pip install -r requirements.txt"
    return OK, found


def free_memory():
    """Bytes; a container's limit counts."""
    with contextlib.suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        return limit - int(Path("/sys/fs/cgroup/memory.current").read_text())
    with contextlib.suppress(OSError):
        lines = Path("/proc/meminfo").read_text()
        return 1024 * int(re.search(r"MemAvailable: *(\d+)", lines)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_devices(args):
    devices = count_accelerators(args)
    if devices == 0:
        free = free_memory() / 1e9
        found = f"no accelerator, {free:.1f} GB of memory free for {args.ranks} ranks"
        if args.device not in ("auto", "cpu"):
            return FAIL, f"{found}; --device {args.device} is not here"
        if args.device == "auto" and shutil.which("nvidia-smi"):
            return WARN, f"{found}; there is an NVIDIA driver: install PyTorch's CUDA build"
        if free < 2 * args.ranks:
            return WARN, f"{found}; start fewer ranks, or free memory: each wants 2 GB"
        return OK, found

    kind = torch.accelerator.current_accelerator().type
    module = torch.get_device_module(kind)
    found = f"{devices} x {module.get_device_name(0)}"
    if args.ranks > devices:
        return FAIL, f"{found} for {args.ranks} ranks; start at most {devices}"
    for number in range(devices):
        free, total = module.mem_get_info(number)
        if free < 0.8 * total:
            text = f"device {number} has {free / 1e9:.1f} of {total / 1e9:.1f} GB free"
            return WARN, f"{found}; {text}: another process uses it"
    return OK, f"{found}, {total / 1e9:.1f} GB each"


def check_backend(args):
    kind = "cpu"
    if count_accelerators(args) > 0:
        kind = torch.accelerator.current_accelerator().type
    wanted = dist.get_default_backend_for_device(kind)
    backend = wanted if args.backend == "auto" else args.backend

    built = []
    for name in ("gloo", "nccl", "xccl", "mpi"):
        if dist.is_backend_available(name):
            built.append(name)

    found = f"{backend} for {kind} (this torch has {', '.join(built)})"
    if not dist.is_backend_available(backend):
        return FAIL, f"{found}; take --backend {wanted}, or another build of torch"
    if kind == "cpu" and backend != "gloo":
        return FAIL, f"{found}; CPUs need --backend gloo"
    if kind != "cpu" and backend == "gloo":
        return WARN, f"{found}; gloo is slow there: take --backend {wanted}"
    return OK, found


def check_threads(args):
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    setting = os.environ.get("OMP_NUM_THREADS", "")
    share = max(1, cores // args.ranks)
    threads = int(setting) if setting.isdecimal() else share
    found = f"{cores} cores for {args.ranks} ranks, threads of a rank: {threads}"
    if threads > 1 and threads * args.ranks > cores:
        return WARN, f"{found}; threads wait for cores: export OMP_NUM_THREADS={share}"
    return OK, found


def check_host_name(args):
    """gloo and NCCL ask for the address that the machine's own name has."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
        with socket.socket() as probe:
            probe.bind((address, 0))
    except OSError as error:
        text = f"add '127.0.0.1 {name}' to /etc/hosts, or export GLOO_SOCKET_IFNAME=lo"
        return FAIL, f"{name} has no address that works ({error}); {text}"
    if address.startswith("127."):
        return OK, f"{name} is {address}; on several machines export GLOO_SOCKET_IFNAME"
    return OK, f"{name} is {address}"


def check_port(args):
    address = os.environ.get("MASTER_ADDR", "localhost")
    port = os.environ.get("MASTER_PORT", "29500")
    try:
        own = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None)}
        master = {info[4][0] for info in socket.getaddrinfo(address, None)}
    except OSError as error:
        return FAIL, f"MASTER_ADDR={address} ({error}); export the first machine's address"
    if not master & (own | {"127.0.0.1", "::1"}):
        return OK, f"{port} is on {address}, another machine: not tried"

    with socket.socket() as other:
        other.bind(("", 0))
        free = other.getsockname()[1]
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(port)))
            probe.listen()
        except (OSError, OverflowError, ValueError) as error:
            text = f"export MASTER_PORT={free}, or use torchrun --standalone"
            return FAIL if "MASTER_PORT" in os.environ else WARN, f"{port} ({error}); {text}"
    return OK, f"{port} is free"


def check_disk(args):
    """Write a checkpoint where runs will write, and read it."""
    weights = {"weight": torch.arange(8_000_000, dtype=torch.float32)}  # 32 MB
    try:
        if args.output_dir:
            Path(args.output_dir).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="ddp-check-", dir=args.output_dir) as folder:
            place = Path(folder).parent
            path = Path(folder) / "latest.pt"
            begin = time.monotonic()
            with open(path, "wb") as file:
                torch.save(weights, file)
                file.flush()
                os.fsync(file.fileno())
            rate = 32 / (time.monotonic() - begin)
            same = is_whole(path) and load_checkpoint(path)["weight"].equal(weights["weight"])
            free = shutil.disk_usage(folder).free / 1e9
    except (OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        return FAIL, f"no 32 MB can be written ({reason}); give another --output_dir"

    if not same:
        return FAIL, f"a checkpoint in {place} reads back different; use another disk"
    found = f"{free:.1f} GB free in {place}, a checkpoint is written at {rate:.0f} MB/s"
    if free < 3 * CHECKPOINT_GB:
        text = f"the largest run keeps 3 checkpoints of {CHECKPOINT_GB} GB"
        return WARN, f"{found}; {text}: give another --output_dir"
    return OK, found


def check_shared_memory(args):
    if not Path("/dev/shm").is_dir():
        return OK, "no /dev/shm here: it is not used"
    free = shutil.disk_usage("/dev/shm").free / 1e9
    found = f"{free:.2f} GB free in /dev/shm"
    if free < 0.2 * args.ranks:
        text = "loader processes and NCCL die of this: docker run --shm-size=8g, or --ipc=host"
        return WARN, f"{found}; {text}"
    return OK, found


ENVIRONMENT = {
    "versions": check_versions,
    "devices": check_devices,
    "backend": check_backend,
    "threads": check_threads,
    "host name": check_host_name,
    "port": check_port,
    "disk": check_disk,
    "shared memory": check_shared_memory,
}


def check_environment(report, args, names):
    """Whether ranks can be started."""
    for name in names:
        report.add(name, *ENVIRONMENT[name](args))
    return not report.has_failed("versions", "devices", "backend", "host name")


# ==================================================================================================
# Distributed training. These lines are the same in every script: read them once.
# "(all ranks)": every rank must call this, in the same order. "(rank 0)": only rank 0 calls it.

START = time.monotonic()
PARENT = os.getppid()
SCRIPT = Path(sys.argv[0]).name
FORMAT = 2  # of checkpoints

# In these variables launchers tell a process its rank, the number of ranks, and its rank on this
# machine.
RANK_VARIABLES = [
    ["RANK", "WORLD_SIZE", "LOCAL_RANK"],  # torchrun
    ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"],  # Open MPI
    ["PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID"],  # PALS (Aurora) ...
    ["PALS_RANKID", "WORLD_SIZE", "PALS_LOCAL_RANKID"],  # ... where the job exports WORLD_SIZE
    ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"],  # MPICH, Intel MPI
    ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"],  # srun
    ["RANK", "WORLD_SIZE", "RANK"],  # by hand, on one machine
]

stop_signal = 0  # the last signal that this process got
folder_lock = None  # the file that rank 0 keeps open, and so locked, as long as it lives


class RunError(Exception):
    """The run cannot go on: one line that says why, no traceback, exit status 1."""


class InputError(RunError):
    """What the user gave cannot work: also one line, exit status 2."""


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """--help with the docstring as it stands and the default of every option."""


class Parser(argparse.ArgumentParser):
    source = "command line"  # or the file that is being read

    def __init__(self, description):
        super().__init__(description=description, formatter_class=HelpFormatter, allow_abbrev=False)

    def error(self, message):
        raise InputError(f"{self.source}: {message}")


def boolean(text):
    if text.lower() in ("true", "yes", "1"):
        return True
    if text.lower() in ("false", "no", "0"):
        return False
    raise argparse.ArgumentTypeError(f"{text} is neither True nor False")


def count(text):
    """The type of options that are whole numbers from 1 on."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return int(text)


def default_timeout(parser):
    """Minutes. Many documents set NCCL_TIMEOUT, which neither NCCL nor PyTorch reads."""
    seconds = os.environ.get("NCCL_TIMEOUT", "1800")
    if not seconds.isdecimal() or int(seconds) == 0:
        parser.error(f"NCCL_TIMEOUT={seconds} in the environment: must be a number of seconds")
    return int(seconds) / 60


# an option that may be given as --compile, --compile=True, --compile no
FLAG = {"type": boolean, "nargs": "?", "const": True, "metavar": "BOOL"}


def add_common_arguments(parser, output_dir, batch_size, precision="auto"):
    add = parser.add_argument_group("the same in every script").add_argument
    add("--config", help="YAML or JSON file of options; the command line wins")
    add("--output_dir", default=output_dir, help="a run found there is resumed")
    add("--fresh", **FLAG, default=False, help="start anew; the old run is moved aside")
    add("--seed", type=int, default=42, help="of initialisation, order and dropout")
    add("--batch_size", type=count, default=batch_size, help="samples per GPU and micro-batch")
    add("--global_batch_size", type=int, default=0, help="samples per step; 0: batch_size x GPUs")
    add("--num_workers", type=int, default=0, help="processes per rank that prepare batches")
    add("--max_grad_norm", type=float, default=1.0, help="clip the gradient; 0: do not")
    add("--max_bad_steps", type=count, default=10, help="non-finite steps in a row that end a run")
    kinds = ["auto", "fp32", "tf32", "bf16", "fp16"]
    add("--precision", default=precision, choices=kinds, help="auto: bf16 on GPUs")
    add("--deterministic", **FLAG, default=False, help="bit-identical repeats on GPUs, too; slower")
    add("--compile", **FLAG, default=False, help="torch.compile the model for training")
    text = "for a step that uses only some of the parameters; slower"
    add("--find_unused_parameters", **FLAG, default=False, help=text)
    add("--save_every", type=count, default=500, help="steps between checkpoints")
    add("--max_minutes", type=float, default=0, help="then save and stop; 0: no limit")
    add("--log_every", type=count, default=10, help="steps between log lines")
    add("--wandb_mode", default="disabled", choices=["online", "offline", "disabled"], help="wandb")
    add("--nproc_per_node", type=count, default=1, help="processes to start, if no launcher did")
    add("--device", default="auto", choices=["auto", "cuda", "xpu", "cpu"], help="auto: the best")
    add("--backend", default="auto", help="nccl, gloo, xccl; auto: by the device")
    text = "limit of one collective; NCCL_TIMEOUT in the environment sets it, too, in seconds"
    add("--timeout_minutes", type=float, default=default_timeout(parser), help=text)
    add("--local_rank", help=argparse.SUPPRESS)  # of torch.distributed.launch, which also sets RANK


def parse_with_config(parser):
    """Options of the command line; else of the --config file; else the defaults."""
    words = sys.argv[1:]
    # the file may come first, without --config
    if words and "=" not in words[0] and words[0].endswith((".yaml", ".yml", ".json")):
        words = [f"--config={words[0]}", *words[1:]]
    words = as_options(parser, words)
    args = parser.parse_args(words)
    if args.config:
        parser.source = args.config
        try:
            content = yaml.safe_load(Path(args.config).read_text()) or {}
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            parser.error(" ".join(str(error).split()))  # YAML's own errors have several lines
        if not isinstance(content, dict):
            parser.error("must be made of lines such as lr: 0.001")
        args = parser.parse_args(as_options(parser, config_words(content)))
        parser.source = "command line"
        args = parser.parse_args(words, args)  # on top of what the file said
    for name in ("global_batch_size", "num_workers", "max_grad_norm", "max_minutes"):
        if not getattr(args, name) >= 0:
            parser.error(f"--{name} {getattr(args, name)}: must not be below 0")
    if not args.timeout_minutes > 0:
        parser.error(f"--timeout_minutes {args.timeout_minutes}: must be above 0")
    if not 0 <= args.seed < 2**32:
        parser.error(f"--seed {args.seed}: must be from 0 to below {2**32:,}")
    return args


def config_words(content, prefix="--"):
    """A YAML file as a command line; a key in a section becomes --section.key."""
    words = []
    for key, value in content.items():
        if isinstance(value, dict):
            words += config_words(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            words += [f"{prefix}{key}", *map(str, value)]
        elif value is not None:
            words.append(f"{prefix}{key}={value}")
    return words


def as_options(parser, words):
    """key=value becomes --key=value. --section.key becomes --section_key if that is an option, else
    --key: then the section only groups options."""
    known = [*vars(parser.parse_args([])), "help"]  # the names of all options
    options = []
    for word in words:
        key, equals, value = word.partition("=")
        if word.startswith("--") or (equals and key.replace(".", "_").isidentifier()):
            parts = key.removeprefix("--").replace("-", "_").split(".")
            names = ["_".join(parts[start:]) for start in range(len(parts))]
            found = [name for name in names if name in known]
            if not found:
                near = difflib.get_close_matches(parts[-1], known, n=1, cutoff=0.7)
                hint = f"did you mean {near[0]}?" if near else "--help lists them"
                parser.error(f"there is no option {'.'.join(parts)}: {hint}")
            key = f"--{found[0]}"
        options.append(key + equals + value)
    return options


def find_ranks():
    """(rank, world size, local rank) from the launcher that started us, None without one."""
    incomplete = None
    for names in RANK_VARIABLES:
        # inside sbatch, but without srun, Slurm sets these for a single plain process, too
        if "SLURM_PROCID" in names and "SLURM_STEP_ID" not in os.environ:
            continue
        missing = [name for name in names if name not in os.environ]
        if not missing:
            return [int(os.environ[name]) for name in names]
        if names[0] in os.environ:
            incomplete = f"{names[0]} is set, but not {missing[0]}: use torchrun, or export it"
    if incomplete:
        raise InputError(incomplete)
    return None


class LogHandler(logging.StreamHandler):
    def emit(self, record):
        with tqdm.external_write_mode(self.stream):  # takes the progress bar away and puts it back
            super().emit(record)


def setup_ddp(args):
    """Start the log, choose the device, join the process group; returns the device. (all ranks)"""
    # plain python is a group of one: the code below has one path only
    rank, world_size, local_rank = find_ranks() or (0, 1, 0)
    if "MASTER_ADDR" not in os.environ and rank != local_rank:  # there are ranks elsewhere
        raise InputError("several machines, but no MASTER_ADDR: export the name of the first one")
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500" if world_size > 1 else "0")  # 0: any free one

    logging.basicConfig(
        format=f"[RANK {rank}] %(asctime)s %(levelname)s: %(message)s",
        level=logging.INFO,
        datefmt="%Y-%m-%d %H:%M:%S",
        handlers=[LogHandler(sys.stdout)],
    )
    logging.info(f"Process {rank}/{world_size} started")
    if args.nproc_per_node not in (1, world_size):
        logging.info(f"  --nproc_per_node {args.nproc_per_node} is ignored: a launcher started it")
    device = choose_device(args, local_rank)
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        on_this_machine = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        torch.set_num_threads(max(1, torch.get_num_threads() // on_this_machine))
    keep_freed_memory()
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS repeats nothing
        torch.use_deterministic_algorithms(True)

    logging.info(f"Initializing DDP for rank {rank}...")
    backend = args.backend
    if backend == "auto":
        backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(
        backend,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=args.timeout_minutes),
        device_id=None if device.type == "cpu" else device,
    )
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, on_signal)
    if rank > 0:
        logging.getLogger().setLevel(logging.ERROR)  # from here on others log errors only
    logging.info(f"{world_size} ranks, {backend} on {device}, torch {torch.__version__}")
    return device


def keep_freed_memory():
    """Let the C library keep the memory of freed tensors for the next ones: fetching it from the
    system again and again can take a sixth of a step on CPUs."""
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        mallopt = ctypes.CDLL(None).mallopt
        if mallopt(-3, 2**30):  # M_MMAP_THRESHOLD; 0: too high for an older glibc
            mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def choose_device(args, local_rank):
    """The accelerator of this rank, or the CPU where there is none."""
    device = torch.device("cpu")
    kind = torch.accelerator.current_accelerator(check_available=True)
    if args.device != "cpu" and kind is not None and kind.type in ("cuda", "xpu"):
        devices = torch.accelerator.device_count()
        # torchrun shows all devices to all ranks; other launchers may show each rank its own one
        masks = "CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES ZE_AFFINITY_MASK"
        masked = any(name in os.environ for name in masks.split())
        if devices == 1 and masked and "TORCHELASTIC_RUN_ID" not in os.environ:
            local_rank = 0
        if local_rank >= devices:
            text = f"local rank {local_rank}, but {devices} devices on this machine"
            raise InputError(f"{text}: start at most {devices} processes, or give --device cpu")
        device = torch.device(kind.type, local_rank)
        torch.accelerator.set_device_index(local_rank)
    if args.device not in ("auto", device.type):
        raise InputError(f"--device {args.device}: this machine has {device.type}")
    return device


def on_signal(number, frame):
    global stop_signal
    stop_signal = number  # no more than that: training ends its step first, and agrees to stop


def ignore_signals(worker):
    """For the workers of a DataLoader. A launcher's signal reaches them, too. They ignore it: their
    rank still needs them, and they end when it ends."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def cleanup():
    gc.collect()  # gloo may abort where a tensor of the group outlives it
    if dist.is_initialized():  # not after --help
        dist.destroy_process_group()


def launch(parse_args, main):
    """Run main(args) as this rank, or hand over to torchrun to start --nproc_per_node ranks."""

    @record  # torchrun's summary then shows the traceback of the rank that failed first
    def run():
        try:
            args = parse_args()
            if args.nproc_per_node > 1 and find_ranks() is None:
                hand_over_to_torchrun(args.nproc_per_node)
            return main(args)
        except RunError as error:
            refuse(error)

    try:
        status = run()
    except Exception:  # whatever it is, the other ranks are waiting for this one
        logging.error(traceback.format_exc())
        os._exit(1)  # at once, with no cleanup that waits for others: the launcher ends them
    cleanup()
    sys.stdout.flush()
    os._exit(status or 0)  # sys.exit would wait for a wandb that hangs


def hand_over_to_torchrun(processes):
    """Become torchrun, with the same script and options, as run_ddp.sh starts it."""
    where = ["--standalone"]  # on any free port
    if "MASTER_ADDR" in os.environ or "MASTER_PORT" in os.environ:
        where = [f"--master_addr={os.environ.get('MASTER_ADDR', 'localhost')}"]
        where.append(f"--master_port={os.environ.get('MASTER_PORT', '29500')}")
    threads = max(1, torch.get_num_threads() // processes)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # torchrun would say 1
    options = [f"--nproc_per_node={processes}", "--shutdown-timeout=120"]
    options.append("--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
    torchrun = [sys.executable, "-m", "torch.distributed.run", *where, *options]
    os.execv(sys.executable, [*torchrun, *sys.argv])


def refuse(error):
    """Say why the run cannot go on, and end. Usually all ranks fail for the same reason, and one
    line is enough. Rank 0 writes it and exits. The others wait, and the launcher ends them. A rank
    that still lives after three seconds failed alone, and writes its own line."""
    is_rank0 = all(os.environ.get(names[0], "0") == "0" for names in RANK_VARIABLES)
    if not is_rank0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher's must end it now
        time.sleep(3)
    sys.stderr.write(f"{SCRIPT}: error: {error}\n")
    os._exit(2 if isinstance(error, InputError) else 1)


def sum_over_ranks(values):
    """Each element of a tensor summed over the ranks, as floats. It waits for the device. (all
    ranks)"""
    rows = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, values)
    columns = zip(*torch.stack(rows).tolist(), strict=True)
    return [math.fsum(column) for column in columns]  # in Python: some devices have no float64


def on_rank0(function, *args):
    """function(*args), called on rank 0 alone: what it returns, or raises, on all ranks, so that
    nobody waits for a rank 0 that has failed. (all ranks)"""
    outcome = [None, None]  # result, error
    if dist.get_rank() == 0:
        try:
            outcome[0] = function(*args)
        except RunError as error:
            outcome[1] = error
        except Exception:  # not every error can be sent to the other ranks, but its text can
            outcome[1] = RuntimeError(traceback.format_exc())
    dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


class GlobalBatchSampler(DistributedSampler):
    """Shuffles by (seed, epoch) alone, cuts the order into global batches, and deals each to the
    micro-batches of the ranks. The samples of a step depend neither on the number of ranks nor on
    a restart.

    Yields (ids of a micro-batch of this rank, ids of the whole global batch). cost[id] is the work
    that a sample makes, such as its length. The global batch stays a random sample; within it, ids
    of similar cost share a micro-batch, where they need little padding, and all ranks get equal
    work."""

    def __init__(self, ids, args, state, cost=None):
        super().__init__(ids, seed=args.seed, drop_last=True)
        world_size = self.num_replicas
        self.ids = ids
        self.cost = cost
        self.start = 0
        self.global_batch = args.global_batch_size or args.batch_size * world_size
        if state:  # a resumed run keeps its global batch, on any number of ranks
            self.global_batch = state["global_batch"]
            if args.global_batch_size not in (0, self.global_batch):
                text = f"this run was started with {self.global_batch}"
                raise InputError(f"--global_batch_size {args.global_batch_size}: {text}")
        self.accumulation = math.ceil(self.global_batch / (args.batch_size * world_size))
        parts = world_size * self.accumulation
        self.steps = len(ids) // self.global_batch  # an epoch leaves out the few that are left over
        if not parts <= self.global_batch <= len(ids):
            limits = f"{parts} (ranks x micro-batches) to {len(ids)} (to train on)"
            raise InputError(f"{self.global_batch} samples a step: must be from {limits}")
        each = f"{self.global_batch / parts:g} per GPU × {world_size} GPUs"
        if self.accumulation > 1:
            each += f" × {self.accumulation} micro-batches"
        logging.info(f"  Total batch size:   {self.global_batch:,} ({each})")

    def set_epoch(self, epoch, start=0):
        self.epoch = epoch
        self.start = start

    def __len__(self):
        return (self.steps - self.start) * self.accumulation

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(len(self.ids), generator=generator, dtype=torch.int32).numpy()
        for step in range(self.start, self.steps):
            first = step * self.global_batch
            batch = self.ids[order[first : first + self.global_batch]]
            if self.cost is not None:
                batch = batch[np.argsort(self.cost[batch], kind="stable")]
            for part in np.array_split(batch, self.accumulation):
                yield part[self.owners(len(part)) == self.rank], batch

    def owners(self, count):
        """The rank of each of `count` samples: 0 1 2 2 1 0 0 1 2 ... They are sorted by cost, and
        so no rank always gets the costliest."""
        ranks = np.arange(self.num_replicas)
        return np.resize(np.concatenate([ranks, ranks[::-1]]), count)


def choose_precision(args, device):
    """The dtype for torch.autocast; float32: no autocast."""
    name = args.precision
    if name == "auto":
        name = "fp32" if device.type == "cpu" else "bf16"
    # cuDNN rounds to TF32 unless told otherwise. These are the older of PyTorch's two switches:
    # torch.compile may fail once the newer one, fp32_precision, was used.
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = name == "tf32"
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name, torch.float32)


def wrap_ddp(model, args, device):
    if args.compile:
        model = torch.compile(model)
    if dist.get_world_size() == 1:
        return model  # nothing to add up, and DDP would take its time for it
    wrapped = DistributedDataParallel(
        model,
        device_ids=None if device.type == "cpu" else [device.index],
        find_unused_parameters=args.find_unused_parameters,
        gradient_as_bucket_view=True,
        forward_sync_buffers=False,  # they are the same on all ranks, or each rank's own
    )
    # DDP regroups its buckets of gradients after the first backward pass. That changes the order of
    # sums over three or more ranks, and a resumed run would differ in the last bit. So make that
    # pass now. It needs no network, only a loss that depends on every parameter: 0 x their sum.
    wrapped.module = nn.Identity()
    wrapped(sum((p * 0).sum() for p in model.parameters() if p.requires_grad)).backward()
    wrapped.module = model
    wrapped.zero_grad()
    return wrapped


def default_generator(device):
    """What dropout on this device draws from. (torch.manual_seed seeds all devices, slowly.)"""
    if device.type == "cpu":
        return torch.default_generator
    return torch.get_device_module(device).default_generators[device.index]


class StepGuard:
    """Skips updates that are not finite, and lets the ranks agree to stop.

    To read a number from a GPU the host waits until the GPU has done all that is queued, and then
    the GPU waits for the host. So a step reads nothing: its flags are copied to the host while the
    next step is queued, and are read one step late."""

    def __init__(self, args, device):
        self.args = args
        self.deadline = START + 60 * (args.max_minutes or math.inf)
        self.launched = find_ranks() is not None
        self.bad_in_row = torch.zeros((), device=device)
        self.flags = None  # of the call before, on their way to the host
        self.arrived = None  # event: they are there
        self.reason = ""

    def update(self, optimizer, scaler):
        """Clip and step. Returns the gradient's norm, on the device."""
        if not optimizer.defaults.get("fused"):
            raise InputError("only an optimizer with fused=True can skip a step without a wait")
        scaler.unscale_(optimizer)
        parameters = []
        for group in optimizer.param_groups:
            parameters += group["params"]
        limit = self.args.max_grad_norm if self.args.max_grad_norm > 0 else math.inf
        norm = nn.utils.clip_grad_norm_(parameters, limit)
        # DDP has summed the gradients: a NaN of one rank is on every rank, and all skip alike.
        bad = norm.isfinite().logical_not().float()
        optimizer.found_inf = bad  # where this is 1 fused optimizers leave weights and state alone
        optimizer.step()
        scaler.update()
        optimizer.zero_grad()
        self.bad_in_row = (self.bad_in_row + bad) * bad  # back to 0 after a good step
        return norm

    def agree(self):
        """Why to stop, or "": what any rank knew at the call before. (all ranks)"""
        if self.flags is not None:
            if self.arrived is not None:
                self.arrived.synchronize()
            bad, number, late, orphaned = self.flags.tolist()
            if bad >= self.args.max_bad_steps:
                text = f"{bad:.0f} steps in a row without a finite gradient"
                raise RunError(f"{text}: lower --lr, or look for such numbers in the data")
            if number > 0:
                self.reason = signal.Signals(int(number)).name
            elif late > 0:
                self.reason = "time limit"
            elif orphaned > 0:
                self.reason = "death of the launcher"

        # full_like is computed on the device; torch.tensor would be a copy to it, which waits
        number = torch.full_like(self.bad_in_row, stop_signal)
        late = torch.full_like(self.bad_in_row, time.monotonic() > self.deadline)
        # a rank whose launcher was killed gets another parent, and nobody would ever end it
        is_orphan = self.launched and os.getppid() != PARENT
        orphaned = torch.full_like(self.bad_in_row, is_orphan)
        flags = torch.stack([self.bad_in_row, number, late, orphaned])
        if dist.get_world_size() > 1:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        self.flags = flags.to("cpu", non_blocking=True)
        if flags.device.type != "cpu":
            self.arrived = torch.accelerator.current_stream().record_event()
        return self.reason


def exit_status(reason):
    """For a reason to stop; "" means finished. A time limit and a queue's SIGUSR1 are planned."""
    if reason:
        logging.info(f"stopped by {reason}: the same command goes on from the checkpoint")
    statuses = {"": 0, "time limit": 0, "SIGUSR1": 0, "SIGINT": 130, "SIGTERM": 143}
    return statuses.get(reason, 1)


def save_checkpoint(folder, name, state):
    """Write folder/name whole or not at all; the latest.pt before becomes previous.pt. (rank 0)"""
    new = folder / "new.tmp"
    try:
        with open(new, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        if name == "latest.pt" and (folder / name).exists():
            os.replace(folder / name, folder / "previous.pt")
        os.replace(new, folder / name)
    except (OSError, RuntimeError) as error:  # most likely a full disk; the next may succeed
        new.unlink(missing_ok=True)
        reason = str(error).splitlines()[0]
        logging.warning(f"no {name} at step {state['step']}, the run goes on: {reason}")


def is_whole(path):
    """Whether a checkpoint can be read, and its checksums are right, which torch.load ignores."""
    try:
        load_checkpoint(path)
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except Exception:  # missing, cut short, or a flipped bit, which raises errors of many kinds
        return False


def load_checkpoint(path):
    return torch.load(path, map_location="cpu", weights_only=True)


def prepare_folder(folder, fresh):
    """Lock the folder; the newest whole checkpoint in it, or None. (rank 0)"""
    global folder_lock
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder_lock = open(f"{folder}.lock", "w")  # beside it, since --fresh moves the folder
        # until this process ends (flock would be inherited by the workers, which may live longer)
        fcntl.lockf(folder_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"another run is at work in {folder}: give another --output_dir") from None
    except OSError as error:  # some network file systems have no locks
        logging.warning(f"{folder} cannot be locked ({error}): start no second run in it")

    first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    try:
        if fresh and first_start and folder.exists():
            folder.rename(f"{folder}.old-{time.strftime('%Y%m%d-%H%M%S')}")
        folder.mkdir(exist_ok=True)
        (folder / "new.tmp").touch()  # can we write here? better known now than after hours
        (folder / "new.tmp").unlink()
    except OSError as error:
        raise InputError(f"{folder} is not writable: {error}") from None

    latest = folder / "latest.pt"
    previous = folder / "previous.pt"
    if is_whole(latest):
        return latest
    if is_whole(previous):
        if latest.exists():
            logging.warning(f"{latest} is damaged: trying the one before it")
            latest.rename(folder / "damaged.pt")  # or the next save would put it over previous.pt
        return previous
    if latest.exists() or previous.exists():
        raise InputError(f"no checkpoint in {folder} is whole: --fresh moves the folder aside")
    return None


def open_run(args, data_hash):
    """The checkpoint to go on from, or None for a new run. (all ranks)"""
    path = on_rank0(prepare_folder, Path(args.output_dir), args.fresh)
    if path is None:
        return None
    state = load_checkpoint(path) if path.exists() else {}
    if state.get("step") != on_rank0(state.get, "step"):
        raise InputError(f"{path} is not that of rank 0: all machines must see --output_dir")
    hint = "--fresh moves the old run aside, --output_dir names another folder"
    for what, now in {"script": SCRIPT, "format": FORMAT}.items():
        if state.get(what) != now:
            raise InputError(f"{path} has {what} {state.get(what)}, not {now}: {hint}")
    if state["data_hash"] != data_hash:
        raise InputError(f"{path} was trained on other data: {hint}")
    if state["args"]["seed"] != args.seed:  # the order of the epoch would change
        raise InputError(f"--seed: this run was started with {state['args']['seed']}; {hint}")
    logging.info(f"resuming {path} at step {state['step']}")
    for name, value in vars(args).items():
        if value != state["args"].get(name):
            logging.info(f"  --{name} {value}, it was {state['args'].get(name)}")
    return state


def restore(state, model, optimizer, scaler):
    # keep the saved momenta, but take today's options, such as --weight_decay
    options = optimizer.state_dict()["param_groups"]
    try:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict({**state["optimizer"], "param_groups": options})
        scaler.load_state_dict(state["scaler"])
    except (KeyError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:120]
        hint = "give the options it had; or --fresh, which moves the old run aside"
        raise InputError(f"the checkpoint does not fit: {hint} ({reason} ...)") from None


class RunLog:
    """The log line, metrics.jsonl and wandb; at the end summary.json and curves.png. (rank 0)"""

    def __init__(self, args, state):
        self.args = args
        self.folder = Path(args.output_dir)
        self.path = self.folder / "metrics.jsonl"
        # steps after the checkpoint (without one: all) are made again: remove their lines
        kept = state["log_size"] if state else 0
        if dist.get_rank() == 0 and self.size() > kept:
            os.truncate(self.path, kept)
        self.wandb_id = state["wandb_id"] if state else os.urandom(4).hex()
        self.rows = queue.SimpleQueue()
        self.thread = threading.Thread(target=self.feed_wandb, daemon=True)
        if dist.get_rank() == 0 and args.wandb_mode != "disabled":
            self.thread.start()

    def size(self):
        """Bytes of metrics.jsonl, to be kept in a checkpoint."""
        return self.path.stat().st_size if self.path.exists() else 0

    def feed_wandb(self):
        """In a thread of its own: what wandb does wrong, or slowly, never reaches training."""
        try:
            import wandb

            options = {"mode": self.args.wandb_mode, "config": vars(self.args), "id": self.wandb_id}
            project = os.environ.get("WANDB_PROJECT", Path(SCRIPT).stem)
            run = wandb.init(project=project, resume="allow", **options)
            for row in iter(self.rows.get, None):  # until there is a None in the queue
                run.log(row, step=row["step"])
            run.finish()
        except Exception as error:
            logging.warning(f"wandb is off, metrics.jsonl goes on: {error}")

    def write(self, row):
        logging.info(" ".join(f"{name}={value:.6g}" for name, value in row.items()))
        if dist.get_rank() > 0:
            return
        row = {name: value for name, value in row.items() if math.isfinite(value)}  # NaN: no JSON
        size = self.size()
        try:
            with open(self.path, "a") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            logging.warning(f"metrics.jsonl lacks step {row['step']}: {error}")
            if self.path.exists():
                os.truncate(self.path, size)  # a full disk may have taken half of the line
        if self.thread.is_alive():
            self.rows.put(row)

    def close(self, **summary):
        if dist.get_rank() > 0:
            return
        seconds = round(time.monotonic() - START, 1)
        summary.update(script=SCRIPT, seconds=seconds, world_size=dist.get_world_size())
        summary.update(torch=torch.__version__, args=vars(self.args))
        try:
            (self.folder / "summary.json").write_text(json.dumps(summary, indent=1))
            draw_curves(self.path)
        except Exception as error:  # no matplotlib, no disk: no reason to fail a run that is over
            logging.warning(f"no summary.json or no curves.png: {error}")
        if self.thread.is_alive():
            self.rows.put(None)
            self.thread.join(timeout=30)


def draw_curves(path):
    """curves.png: each number of metrics.jsonl against the step. (rank 0)"""
    from matplotlib.figure import Figure

    curves = {}
    for line in open(path):
        row = json.loads(line)
        step = row.pop("step")
        for name, value in row.items():
            curves.setdefault(name, []).append((step, value))
    figure = Figure((12, 1 + len(curves)), layout="constrained")
    for number, (name, points) in enumerate(curves.items(), start=1):
        axis = figure.add_subplot(math.ceil(len(curves) / 3), 3, number, title=name)
        axis.plot(*zip(*points, strict=True), linewidth=1)
    figure.savefig(path.with_name("curves.png"), dpi=110)


# End of the lines that every script has.
# ==================================================================================================


# --------------------------------------------------------------------------------------------------
# The ranks: checks that all of them make together. Each returns (status, what was found).


def gather(item):
    """`item` of every rank. (all ranks)"""
    items = [None] * dist.get_world_size()
    dist.all_gather_object(items, item)
    return items


def is_alike(tensor):
    """Whether all ranks have the same bits. (all ranks)"""
    return len(set(gather(tensor.detach().cpu().numpy().tobytes()))) == 1


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def check_group(args, device):
    versions = f"python {platform.python_version()}, torch {torch.__version__}"
    all_versions = sorted(set(gather(versions)))
    hosts = sorted(set(gather(socket.gethostname())))
    found = f"{dist.get_world_size()} ranks on {', '.join(hosts)}; {dist.get_backend()} on"
    found += f" {device.type}; threads of a rank: {torch.get_num_threads()}"
    if len(all_versions) > 1:
        text = f"the machines have {' and '.join(all_versions)}"
        return FAIL, f"{found}; {text}: install the same on all"
    return OK, found


def check_sums(args, device):
    """All-reduces and broadcasts of known values."""
    n = dist.get_world_size()
    wrong = []

    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        values = torch.full((1000,), dist.get_rank() + 1, dtype=dtype, device=device)
        sent = values.clone()
        dist.all_reduce(values)
        dist.broadcast(sent, src=n - 1)
        share = values.float() / (n * (n + 1) / 2)
        tolerance = 0.01 if dtype == torch.bfloat16 else 0  # it has 8 bits for a number
        if ((share - 1).abs() > tolerance).any():
            wrong.append(f"the sum of 1 to {n} in {dtype} is {values[0].item():g}")
        if (sent != n).any():
            wrong.append(f"a broadcast of {n} in {dtype} is {sent[0].item():g}")

    # numbers of which float32 would lose the last digits
    large = torch.tensor([2.0**24, 1.0], device=device) * (dist.get_rank() + 1)
    if sum_over_ranks(large) != [2.0**24 * n * (n + 1) / 2, n * (n + 1) / 2]:
        wrong.append(f"sum_over_ranks gives {sum_over_ranks(large)}")
    if wrong:
        return FAIL, f"{'; '.join(wrong)}: try another --backend, or another build of torch"
    return OK, "all-reduces and broadcasts in fp32, bf16, int64 are right"


def make_network(device):
    """The same on all ranks."""
    torch.manual_seed(0)
    layers = [nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 4)]
    return nn.Sequential(*layers).to(device)


def check_step(args, device):
    """A step with unequal shares of a batch, on all ranks, against one process with all of it."""
    n = dist.get_world_size()
    torch.manual_seed(1)
    x = torch.randn(9 * n + 1, 16).to(device)
    target = torch.randn(9 * n + 1, 4).to(device)
    alone = make_network(device)
    (alone(x) - target).square().sum().div(len(x)).backward()
    expected = flat(p.grad for p in alone.parameters())

    model = wrap_ddp(make_network(device), args, device)
    before = flat(model.parameters())
    own = slice(dist.get_rank(), None, n)
    loss = (model(x[own]) - target[own]).square().sum() / len(x)
    (loss * n).backward()  # DDP takes the mean of the ranks, and the sum is meant
    found = flat(p.grad for p in model.parameters())
    error = ((found - expected).norm() / expected.norm()).item()

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    guard = StepGuard(args, device)
    guard.update(optimizer, torch.amp.GradScaler(device.type, enabled=False))

    text = f"the gradient differs from that of one process by {error:.0e} of its length"
    if error > 1e-4:
        return FAIL, f"{text}: try another --backend, or another build of torch"
    if not is_alike(flat(model.parameters())):
        return FAIL, f"{text}, but after the update the ranks have different weights"
    if flat(model.parameters()).equal(before):
        return FAIL, f"{text}, but the update changed nothing: install the pinned torch"
    return OK, f"{text}, after the update all ranks have the same weights"


def check_precision(args, device):
    """A matrix product in each precision against float64 on the CPU."""
    torch.manual_seed(2)
    a = torch.randn(256, 256)
    b = torch.randn(256, 256)
    exact = a.double() @ b.double()

    limits = {"fp32": 1e-5, "tf32": 3e-3, "bf16": 3e-2, "fp16": 3e-3}
    parts = []
    wrong = []
    for name, limit in limits.items():
        args.precision = name
        dtype = choose_precision(args, device)
        product = (a.to(device, dtype) @ b.to(device, dtype)).cpu().double()
        error = ((product - exact).norm() / exact.norm()).item()
        parts.append(f"{name} {error:.0e}")
        if not error < limit:
            wrong.append(f"{name} must be below {limit:.0e}")

    args.precision = "auto"
    auto = str(choose_precision(args, device)).removeprefix("torch.")
    found = f"error of a matrix product: {', '.join(parts)}; --precision auto is {auto}"
    if wrong:
        return FAIL, f"{found}; {', '.join(wrong)}: train in another precision"
    return OK, found


RANK_CHECKS = {"process group": check_group, "sums": check_sums, "DDP step": check_step}
FULL_RANK_CHECKS = {**RANK_CHECKS, "precision": check_precision}


def check_ranks(report, args):
    """All checks that need a group, and the measurements. (all ranks)"""
    name = "process group"
    try:
        device = setup_ddp(args)
        checks = RANK_CHECKS if args.quick else FULL_RANK_CHECKS
        for name, check in checks.items():
            results = gather(check(args, device))
            if dist.get_rank() == 0:
                order = (OK, WARN, FAIL)
                report.add(name, *max(results, key=lambda result: order.index(result[0])))
        if not args.quick:
            name = "speed"
            measured = measure(args, device)
            if dist.get_rank() == 0:
                report.add_measured(measured)
                if "training" in measured:
                    report.add("speed-up", *judge_training(measured))
    except (dist.DistError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        hint = "can the ranks reach each other? GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, firewall"
        report.add(name, FAIL, f"rank {(find_ranks() or [0])[0]}: {reason}; {hint}")
        raise


# --------------------------------------------------------------------------------------------------
# Speed


def time_call(function, device):
    """Seconds."""
    begin = time.perf_counter()
    function()
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - begin


def median_time(function, device, repeats=5):
    return statistics.median([time_call(function, device) for _ in range(repeats)])


def time_together(function, device):
    """Seconds of a call that all ranks make at once: the mean of their medians. (all ranks)"""
    time_call(function, device)
    slowest = max(gather(time_call(function, device)))
    repeats = min(30, max(3, int(0.5 / slowest)))  # half a second, the same on all ranks
    return statistics.mean(gather(median_time(function, device, repeats)))


def measure(args, device):
    """Of this machine, with all its ranks at work. (all ranks)"""
    measured = {"ranks": dist.get_world_size(), "backend": dist.get_backend()}
    measured.update(device=device.type, all_reduce=[], tflop_per_s={})
    if dist.get_world_size() > 1:  # one rank exchanges nothing
        for size in MESSAGES:
            buffer = torch.zeros(size // 4, device=device)
            seconds = time_together(partial(dist.all_reduce, buffer), device)
            measured["all_reduce"].append({"bytes": size, "seconds": seconds})
        measured["training"] = measure_training(args, device)

    for name in ("fp32", "bf16"):
        args.precision = name
        dtype = choose_precision(args, device)
        for side in (256, 1024, 4096, 8192):
            a = torch.ones(side, side, device=device, dtype=dtype)
            seconds = time_together(partial(torch.matmul, a, a), device)
            measured["tflop_per_s"][name] = 2 * side**3 / seconds / 1e12
            if seconds > 0.01:  # the next size would take long
                break
    return measured


def measure_training(args, device):
    """Seconds of forward and backward passes of four matrices: on rank 0 alone, on all ranks, and
    on all ranks with the exchange of gradients. (all ranks)"""
    width, batch = (1024, 256) if device.type == "cpu" else (4096, 4096)
    x = torch.ones(batch, width, device=device)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(4)]).to(device)
    ddp_model = wrap_ddp(copy.deepcopy(model), args, device)

    def step(model):
        model.zero_grad()
        model(x).square().mean().backward()

    for _ in range(2):
        step(model)
    found = {"gradient_bytes": 4 * sum(p.numel() for p in model.parameters())}
    found["alone"] = on_rank0(median_time, partial(step, model), device, 20)
    found["together"] = time_together(partial(step, model), device)
    found["exchanging"] = time_together(partial(step, ddp_model), device)
    return found


def judge_training(measured):
    """The measured speed-up beside the predicted one."""
    n = measured["ranks"]
    training = measured["training"]
    together = training["together"]
    size = training["gradient_bytes"]
    speed_up = n * training["alone"] / training["exchanging"]
    step = together + exposed_seconds(measured, size, 2 / 3 * together, n)

    times = [f"{1000 * training[name]:.0f} ms" for name in ("alone", "together", "exchanging")]
    found = f"{n} ranks do {speed_up:.2f} times the work of one"
    found += f" (predicted {n * training['alone'] / step:.2f}): a step takes {times[0]} on one"
    found += f" rank, {times[1]} on all, {times[2]} with the exchange of {size / 1e6:.0f} MB"
    if speed_up < 1:
        return WARN, f"{found}; larger batches on each rank exchange less"
    return OK, found


def all_reduce_seconds(measured, size, ranks):
    """Of `size` bytes, interpolated in the table; a ring moves 2 (N - 1) / N of them."""
    sizes = [row["bytes"] for row in measured["all_reduce"]]
    times = [row["seconds"] for row in measured["all_reduce"]]
    known = math.exp(np.interp(math.log(size), np.log(sizes), np.log(times)))
    known *= max(1, size / sizes[-1])  # beyond the table in proportion
    n = measured["ranks"]
    return known * (1 - 1 / ranks) / (1 - 1 / n)


def exposed_seconds(measured, size, backward, ranks):
    """How long the exchange of `size` bytes of gradients goes on after a backward pass, of which
    the buckets become ready one after the other."""
    buckets = math.ceil(size / BUCKET)
    each = all_reduce_seconds(measured, size / buckets, ranks)
    done = 0
    for bucket in range(1, buckets + 1):
        ready = bucket / buckets * backward
        done = max(done, ready) + each
    return max(0, done - backward)


def predict(measured, workload, ranks):
    """How many times the work of one rank `ranks` of them do, with the batch of each fixed."""
    precision = "fp32" if measured["device"] == "cpu" else "bf16"
    rate = EFFICIENCY * measured["tflop_per_s"][precision]
    micro_batch = workload.tflop / rate
    if measured["device"] != "cpu":
        micro_batch = max(micro_batch, workload.launch_ms / 1000)
    # only the last micro-batch of a step exchanges gradients
    size = 4 * workload.parameters
    exposed = exposed_seconds(measured, size, 2 / 3 * micro_batch, ranks)
    step = workload.micro_batches * micro_batch
    return ranks * step / (step + exposed)


def show_tables(measured):
    n = measured["ranks"]
    lines = ["", f"Measured with {n} ranks at work ({measured['backend']}, {measured['device']})"]
    for row in measured["all_reduce"]:
        size = row["bytes"]
        bandwidth = 2 * (n - 1) / n * size / row["seconds"] / 1e9
        lines.append(
            f"  all-reduce of {size / 2**10:>6,.0f} KiB: {1000 * row['seconds']:8.3f} ms,"
            f" {bandwidth:7.3f} GB/s on the bus"
        )
    for name, rate in measured["tflop_per_s"].items():
        lines.append(f"  matrix products in {name}: {rate:.2g} TFLOP/s on each rank")

    if n == 1:
        lines.append("  One rank exchanges nothing. For predictions: --nproc_per_node 2 or more")
        return "\n".join(lines)
    lines += ["", "Predicted speed-up, the batch of each rank fixed"]
    lines.append("  ranks  " + "".join(f"{name:>12}" for name in WORKLOADS))
    for ranks in RANKS:
        row = f"  {ranks:>5}  "
        for workload in WORKLOADS.values():
            row += f"{predict(measured, workload, ranks):>12.2f}"
        lines.append(row)
    lines.append(f"  More than {n} ranks: if the bandwidth stays that of {n}.")
    return "\n".join(lines)


# --------------------------------------------------------------------------------------------------
# Main


def run_job(args, role, seconds, on_line):
    """This program with this role in args.ranks processes; its exit status, -9 if it was killed
    because it took longer than `seconds`."""
    command = [sys.executable, os.path.abspath(__file__), f"--nproc_per_node={args.ranks}"]
    for name in ("device", "backend", "quick", "timeout_minutes"):
        command.append(f"--{name}={getattr(args, name)}")

    env = dict(os.environ)
    env.pop("MASTER_PORT", None)  # a port that is taken must not hide everything else
    env.pop("MASTER_ADDR", None)
    job = subprocess.Popen(
        [*command, f"--role={role}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=env,
        start_new_session=True,
    )

    def kill():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)

    timer = threading.Timer(seconds, kill)
    timer.start()
    try:
        for line in job.stdout:
            on_line(line.rstrip())
        return job.wait()
    finally:
        timer.cancel()
        kill()


def start_ranks(report, args):
    """The checks of ranks, in processes of this program's own."""
    lines = []

    def on_line(line):
        if line.startswith(MARK):
            report.receive(line)
        else:
            lines.append(line)

    status = run_job(args, "check", 60 + 120 * args.timeout_minutes, on_line)
    if status == 0:
        report.add("end of the ranks", OK, f"{args.ranks} processes ended with status 0")
        return
    last = report.checks[-1]["name"]
    found = f"status {status} after the check '{last}'; their last lines are these:"
    report.add("end of the ranks", FAIL, "\n    ".join([found, *lines[-25:]]))


def check_failing_rank(args):
    """A rank that raises must end the whole job, and the traceback must name it."""
    lines = []
    times = []

    def on_line(line):
        lines.append(line)
        if ON_PURPOSE in line:
            times.append(time.monotonic())

    status = run_job(args, "fail", 60 + 60 * args.timeout_minutes, on_line)
    if not times:
        return FAIL, f"it ended before that, with status {status}: {' | '.join(lines[-3:])}"
    seconds = time.monotonic() - times[0]
    found = f"rank {args.ranks - 1} raised, the job ended after {seconds:.1f} s, status {status}"
    if status == 0 or seconds > 20:
        return FAIL, f"{found}; jobs with a failed rank would go on: use the pinned torch"
    return OK, found


def fail_on_purpose(args):
    """In the last rank, while the others wait for it."""
    setup_ddp(args)
    dist.barrier()
    if dist.get_rank() == dist.get_world_size() - 1:
        raise RuntimeError(ON_PURPOSE)
    dist.barrier()
    return 0


def check_under_launcher(report, args):
    """The ranks are there already; rank 0 speaks."""
    rank = find_ranks()[0]
    names = [name for name in ENVIRONMENT if name != "port"]
    if rank == 0 and not check_environment(report, args, names):
        return report.finish()
    status = 0
    try:
        check_ranks(report, args)
    finally:
        if rank == 0:
            status = report.finish()
    return status


def main(args):
    if args.role == "fail":
        return fail_on_purpose(args)
    report = Report(args)
    if args.role == "check":
        check_ranks(report, args)
        return 0
    if find_ranks():
        return check_under_launcher(report, args)
    if check_environment(report, args, ENVIRONMENT):
        start_ranks(report, args)
        if not args.quick and args.ranks > 1:
            report.add("failing rank", *check_failing_rank(args))
    return report.finish()


if __name__ == "__main__":
    launch(parse_args, main)
