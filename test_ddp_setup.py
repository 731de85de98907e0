"""Check a machine for distributed training: the first command on a new machine.

    python test_ddp_setup.py                                  # a process per GPU, or 2 processes
    python test_ddp_setup.py --nproc_per_node 4 --backend gloo --json check.json
    python test_ddp_setup.py --quick                          # under 15 s: no speeds
    torchrun --nproc_per_node=8 test_ddp_setup.py             # or srun, mpiexec: checks its ranks

Prints a line for each check: OK, WARN or FAIL, what was found, and what to do about it. If a check
fails the exit status is 1. One process checks the environment. Then ranks start: sums with known
results, a DDP step against one process, each precision against float64, speeds. Last a rank fails
on purpose, and the job must end. (A launcher's ranks check neither the port nor this.)

The last lines predict how much faster the training scripts are on these ranks than on one, with the
batch of each rank fixed. They know the time of arithmetic and of all-reduces only, not that of
loading data. To judge them, compare the measured speed-up with the one predicted beside it.
"""

import argparse
import contextlib
import copy
import ctypes
import difflib
import fcntl
import gc
import json
import logging
import math
import os
import queue
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
from datetime import timedelta
from functools import partial
from pathlib import Path

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
STATUSES = [OK, WARN, FAIL]

CHECKPOINT_GB = 1.4  # the largest of the scripts' checkpoints, with the optimizer's state
BUCKET = 25 * 2**20  # bytes of gradients that DDP sums at a time
SIZES = [4 * 2**10, 256 * 2**10, 4 * 2**20, BUCKET]  # bytes of the all-reduces that are timed
EFFICIENCY = 0.4  # share of the rate of matrix products that a training step reaches

# A step of each training script with its full-size config, on each rank: trained parameters; TFLOP
# of a micro-batch, forward and backward; micro-batches; ms that an accelerator needs just to launch
# the kernels of a micro-batch.
WORKLOADS = {
    "train_ddp": (116e6, 2.8, 1, 8),  # 64 texts of 85 tokens, mpnet-base and the head
    "dpo": (1.7e6, 0.028, 1, 6),  # a pair of 200 residues
    "uniref50": (66.8e6, 1.7, 4, 7),  # 16 sequences of 286 residues
    "quantumgrav": (0.03e6, 0.01, 1, 6),  # 64 sets
    "rebm": (46.2e6, 4.9, 1, 30),  # 16 images, WideResNet-34-10, attack of 10 steps
}


# --------------------------------------------------------------------------------------------------
# Arguments


def parse_args():
    parser = Parser(description=__doc__)
    add = parser.add_argument
    text = "processes; None: one per GPU, 2 without GPUs"
    add("--nproc_per_node", type=count, help=text)
    add("--device", default="auto", choices=["auto", "cuda", "xpu", "cpu"], help="auto: the best")
    add("--backend", default="auto", help="nccl, gloo or xccl; auto: what the device wants")
    add("--quick", **FLAG, default=False, help="no speeds, and no rank that fails")
    add("--output_dir", default=".", help="where runs will write")
    add("--json", help="file for the results")
    add("--timeout_minutes", type=float, default=1.0, help="limit of each wait for other ranks")
    add("--local_rank", help=argparse.SUPPRESS)  # of torch.distributed.launch
    add("--results", help=argparse.SUPPRESS)  # where a rank that this program starts leaves them
    # what the shared lines read beside these
    parser.set_defaults(compile=False, find_unused_parameters=False, deterministic=False)
    args = parser.parse_args(as_options(parser, sys.argv[1:]))

    args.ranks = args.nproc_per_node
    if args.ranks is None:
        args.ranks = 2 if find_device(args) == "cpu" else torch.accelerator.device_count()
    if not args.results:
        args.nproc_per_node = 1  # this process starts the ranks itself, or a launcher has
    return args


def find_device(args):
    """What the scripts would train on: cuda, xpu or cpu."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if args.device == "cpu" or found is None or found.type not in ("cuda", "xpu"):
        return "cpu"
    return found.type


# --------------------------------------------------------------------------------------------------
# The environment: checks in one process. Each returns its status, and what it found and advises.


def check_versions(args):
    found = f"python {sys.version.split()[0]}, torch {torch.__version__}, numpy {np.__version__}"
    torch_version = [int(number) for number in torch.__version__.split(".")[:2]]
    if sys.version_info < (3, 10) or torch_version < [2, 11]:
        text = "the scripts need python 3.10 and torch 2.11: pip install -r requirements.txt"
        return FAIL, f"{found}; {text}"
    return OK, found


def check_devices(args):
    kind = find_device(args)
    if kind == "cpu":
        if args.device not in ("auto", "cpu"):
            return FAIL, f"no {args.device} device that this torch can use; give --device cpu"
        if args.device == "auto" and shutil.which("nvidia-smi"):
            text = "are the GPUs hidden, or does this build of torch not fit the driver?"
            return WARN, f"no accelerator, but there is an NVIDIA driver: {text}"
        return OK, "no accelerator, the CPU is used"

    devices = torch.accelerator.device_count()
    found = f"{devices} x {torch.get_device_module(kind).get_device_name(0)}"
    if find_ranks() is None and args.ranks > devices:
        return FAIL, f"{found} for {args.ranks} ranks; start at most {devices}"
    return OK, found


def check_backend(args):
    kind = find_device(args)
    wanted = dist.get_default_backend_for_device(kind)
    backend = wanted if args.backend == "auto" else args.backend
    needs_gpu = backend in ("nccl", "xccl")
    if not dist.is_backend_available(backend) or (kind == "cpu" and needs_gpu):
        return FAIL, f"{backend} does not work here; give --backend gloo"
    if backend != wanted:
        return WARN, f"{backend} for {kind}; {wanted} is made for it: give --backend {wanted}"
    return OK, f"{backend} for {kind}"


def check_host_name(args):
    """torchrun, gloo and NCCL ask for the address of the machine's own name."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
        with socket.socket() as probe:
            probe.bind((address, 0))
    except OSError as error:
        text = f"add the line '127.0.0.1 {name}' to /etc/hosts"
        return FAIL, f"{name} has no address that works ({error}); {text}"

    found = f"{name} is {address}"
    if address.startswith("127."):
        found += "; on several machines export GLOO_SOCKET_IFNAME"
    return OK, found


def check_port(args):
    """Where the ranks of several machines would meet."""
    port = os.environ.get("MASTER_PORT", "29500")
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", int(port)))
            probe.listen()
    except (OSError, OverflowError, ValueError) as error:
        status = FAIL if "MASTER_PORT" in os.environ else WARN
        text = "export another MASTER_PORT, or use torchrun --standalone"
        return status, f"{port}: {error}; {text}"
    return OK, f"{port} is free"


def check_disk(args):
    """Write as much as a small checkpoint where runs will write."""
    folder = Path(args.output_dir).resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        content = os.urandom(32_000_000)
        with tempfile.TemporaryFile(dir=folder) as file:
            begin = time.monotonic()
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            rate = 32 / (time.monotonic() - begin)
        free = shutil.disk_usage(folder).free / 1e9
    except OSError as error:
        return FAIL, f"{folder} does not take 32 MB ({error.strerror}); give another --output_dir"

    found = f"{free:.1f} GB free in {folder}, written at {rate:.0f} MB/s"
    if free < 3 * CHECKPOINT_GB:
        text = f"the largest run keeps 3 checkpoints of {CHECKPOINT_GB} GB"
        return WARN, f"{found}; {text}: give another --output_dir"
    return OK, found


def check_shared_memory(args):
    if not Path("/dev/shm").is_dir():
        return OK, "no /dev/shm here: it is not used"
    free = shutil.disk_usage("/dev/shm").free / 1e9
    found = f"{free:.2f} GB free in /dev/shm"
    if free < 1:
        text = "loader processes and NCCL die of this: docker run --shm-size=8g, or --ipc=host"
        return WARN, f"{found}; {text}"
    return OK, found


ENVIRONMENT = {
    "versions": check_versions,
    "devices": check_devices,
    "backend": check_backend,
    "host name": check_host_name,
    "port": check_port,
    "disk": check_disk,
    "shared memory": check_shared_memory,
}


# ==================================================================================================
# Distributed training. These lines are the same in every script: read them once.
# "(all ranks)": every rank must call this, in the same order. "(rank 0)": only rank 0 calls it.

START = time.monotonic()
PARENT = os.getppid()
SCRIPT = Path(sys.argv[0]).name
FORMAT = 3  # of checkpoints

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
                near = difflib.get_close_matches(names[0], known, n=1, cutoff=0.7)
                near += difflib.get_close_matches(parts[-1], known, n=1, cutoff=0.7)
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
    dist.barrier()  # a rank that refuses the data must not leave while another still connects
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
    except Exception as error:  # whatever it is, the other ranks are waiting for this one
        logging.error(traceback.format_exc())
        if "by peer" in str(error):  # Connection reset by peer, Connection closed by peer
            logging.error("another rank has died; the same command, given again, goes on")
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
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "120")  # its option is new in 2.13
    options = [f"--nproc_per_node={processes}"]
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
            named = "--global_batch_size, or --batch_size x GPUs"
            limits = f"{parts} (ranks x micro-batches) to {len(ids)} (to train on)"
            raise InputError(f"{named}: {self.global_batch} samples a step, must be from {limits}")
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
    )
    # buffers are the same on all ranks, or each rank's own. As an attribute, since torch 2.13 has
    # another name for the argument
    wrapped.broadcast_buffers = False
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

    if (folder / "meta.json").exists():
        raise InputError(f"{folder} holds data, not a run: give another --output_dir")
    first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    try:
        if fresh and first_start and folder.exists():
            old = folder.rename(f"{folder}.old-{time.strftime('%Y%m%d-%H%M%S')}")
            logging.info(f"the run in {folder} is now in {old}")
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
        logging.info(f"a new run in {args.output_dir}")
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
            if self.path.exists():
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
# The ranks: checks that all of them make together. Each returns its status, and what it found and
# advises.

OTHER_BACKEND = "give another --backend, or install another build of torch"


def gather(item):
    """`item` of every rank. (all ranks)"""
    items = [None] * dist.get_world_size()
    dist.all_gather_object(items, item)
    return items


def check_group(args, device):
    version = f"python {sys.version.split()[0]}, torch {torch.__version__}"
    versions = sorted(set(gather(version)))
    hosts = sorted(set(gather(socket.gethostname())))
    found = f"{dist.get_world_size()} ranks on {', '.join(hosts)}; {dist.get_backend()} on {device}"
    if len(versions) > 1:
        text = f"the machines have {' and '.join(versions)}"
        return FAIL, f"{found}; {text}: install the same on all"
    if device.type != "cpu":
        free, total = torch.get_device_module(device).mem_get_info(device)
        found += f", {free / 1e9:.1f} of {total / 1e9:.1f} GB free"
        if free < 0.8 * total:
            return WARN, f"{found}; another process uses it: end that one, or take another device"
    return OK, found


def check_threads(args, device):
    """Of all ranks on this machine, against the cores that they may use together."""
    host = socket.gethostname()
    cores = range(os.cpu_count())
    if hasattr(os, "sched_getaffinity"):
        cores = os.sched_getaffinity(0)  # a launcher may give each rank its own
    ranks = [row for row in gather([host, cores, torch.get_num_threads()]) if row[0] == host]
    cores = set().union(*[row[1] for row in ranks])
    threads = sum(row[2] for row in ranks)

    found = f"{threads} in {len(ranks)} ranks on {len(cores)} cores of {host}"
    if threads > max(len(ranks), len(cores)):
        share = max(1, len(cores) // len(ranks))
        return WARN, f"{found}; they wait for each other: export OMP_NUM_THREADS={share}"
    return OK, found


def check_sums(args, device):
    """All-reduces with known results."""
    n = dist.get_world_size()
    expected = n * (n + 1) // 2
    wrong = []  # all ranks make all sums, or they would wait for each other
    for dtype in (torch.float32, torch.int64):
        values = torch.full((1000,), dist.get_rank() + 1, dtype=dtype, device=device)
        dist.all_reduce(values)
        if (values != expected).any():
            wrong.append(f"1 + ... + {n} in {dtype} is {values[0].item()}, not {expected}")
    if wrong:
        return FAIL, f"{'; '.join(wrong)}; {OTHER_BACKEND}"
    return OK, f"1 + ... + {n} is {expected} on all ranks"


def check_step(args, device):
    """A step with unequal shares of a batch, on all ranks, against one process with all of it."""
    n = dist.get_world_size()
    torch.manual_seed(0)  # the same network and the same batch on all ranks
    network = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4)).to(device)
    x = torch.randn(9 * n + 1, 16).to(device)
    target = torch.randn(9 * n + 1, 4).to(device)
    alone = copy.deepcopy(network)
    together = wrap_ddp(copy.deepcopy(network), args, device)

    (alone(x) - target).square().mean().backward()
    own = slice(dist.get_rank(), None, n)
    loss = (together(x[own]) - target[own]).square().sum() / target.numel()
    (loss * n).backward()  # DDP takes the mean of the ranks, and the sum is meant
    weights = []
    for model in (alone, together):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        weights.append(nn.utils.parameters_to_vector(model.parameters()).detach())

    update = weights[0] - nn.utils.parameters_to_vector(network.parameters()).detach()
    error = ((weights[1] - weights[0]).norm() / update.norm()).item()
    found = f"the update differs from that of one process by {error:.0e} of its length"
    versions = set(gather(weights[1].cpu().numpy().tobytes()))  # before a rank returns
    if not error < 1e-4:
        return FAIL, f"{found}; {OTHER_BACKEND}"
    if len(versions) > 1:
        return FAIL, f"{found}, but the ranks have different weights; {OTHER_BACKEND}"
    return OK, f"{found}, all ranks have the same weights"


def check_precision(args, device):
    """A matrix product in each precision against float64 on the CPU."""
    torch.manual_seed(0)
    a = torch.randn(256, 256)
    b = torch.randn(256, 256)
    exact = a.double() @ b.double()

    errors = []
    wrong = []
    for name, limit in {"fp32": 1e-5, "tf32": 3e-3, "bf16": 3e-2, "fp16": 3e-3}.items():
        args.precision = name
        dtype = choose_precision(args, device)
        product = (a.to(device, dtype) @ b.to(device, dtype)).cpu().double()
        error = ((product - exact).norm() / exact.norm()).item()
        errors.append(f"{name} {error:.0e}")
        if not error < limit:
            wrong.append(name)
    found = f"error of a matrix product: {', '.join(errors)}"
    if wrong:
        return FAIL, f"{found}; {', '.join(wrong)}: too large, train in another precision"
    return OK, found


RANK_CHECKS = {
    "process group": check_group,
    "threads": check_threads,
    "sums": check_sums,
    "DDP step": check_step,
    "precision": check_precision,
}


# --------------------------------------------------------------------------------------------------
# Speed


def seconds_of(function, device):
    """The median of some calls, which all ranks make at once."""
    times = []
    for _ in range(8):
        begin = time.perf_counter()
        function()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - begin)
    return float(np.median(times[1:]))


def measure(args, device):
    """Of this machine, with all its ranks at work. (all ranks)"""
    measured = {"ranks": dist.get_world_size(), "backend": dist.get_backend()}
    measured.update(device=device.type, tflop_per_s={}, all_reduce=[])
    side = 1024 if device.type == "cpu" else 8192
    for name in ("fp32", "bf16"):
        args.precision = name
        a = torch.randn(side, side, device=device, dtype=choose_precision(args, device))
        seconds = seconds_of(partial(torch.matmul, a, a), device)
        measured["tflop_per_s"][name] = 2 * side**3 / seconds / 1e12

    if dist.get_world_size() > 1:  # one rank exchanges nothing
        for size in SIZES:
            buffer = torch.zeros(size // 4, device=device)
            seconds = seconds_of(partial(dist.all_reduce, buffer), device)
            measured["all_reduce"].append({"bytes": size, "seconds": seconds})
        measured["training"] = measure_training(args, device)
    return measured


def measure_training(args, device):
    """Seconds of forward and backward passes of four matrices: on rank 0 alone, on all ranks, and
    on all ranks with the exchange of gradients. (all ranks)"""
    width, batch = (1024, 128) if device.type == "cpu" else (4096, 4096)
    x = torch.randn(batch, width, device=device)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(4)]).to(device)
    ddp_model = wrap_ddp(copy.deepcopy(model), args, device)

    def step(model):
        model.zero_grad()
        model(x).square().mean().backward()

    found = {"gradient_bytes": 4 * sum(p.numel() for p in model.parameters())}
    found["alone"] = on_rank0(seconds_of, partial(step, model), device)
    found["together"] = seconds_of(partial(step, model), device)
    found["exchanging"] = seconds_of(partial(step, ddp_model), device)
    return found


def judge_training(measured):
    """The measured speed-up beside the predicted one."""
    n = measured["ranks"]
    training = measured["training"]
    speed_up = n * training["alone"] / training["exchanging"]
    predicted = predict(measured, training["gradient_bytes"], training["together"], 1)
    predicted *= training["alone"] / training["together"]  # ranks slow each other down

    found = f"{n} ranks do {speed_up:.2f} times the work of one, {predicted:.2f} were predicted"
    found += f" (four matrices, {training['gradient_bytes'] / 1e6:.0f} MB of gradients)"
    if speed_up < 1:
        return WARN, f"{found}; larger batches on each rank exchange less"
    return OK, found


def predict(measured, gradient_bytes, seconds, micro_batches):
    """How many times the work of one rank the measured ranks do, with the batch of each fixed. A
    micro-batch takes so many seconds forward and backward, without any exchange."""
    # DDP sums a bucket as soon as it is full, one after the other, and only in the last micro-batch
    buckets = math.ceil(gradient_bytes / BUCKET)
    sizes = [row["bytes"] for row in measured["all_reduce"]]
    times = [row["seconds"] for row in measured["all_reduce"]]
    each = np.interp(gradient_bytes / buckets, sizes, times)
    # either the last bucket alone is left at the end, or they have queued since the first was full
    backward = 2 / 3 * seconds
    exposed = max(each, buckets * each - (1 - 1 / buckets) * backward)
    step = micro_batches * seconds
    return measured["ranks"] * step / (step + exposed)


def predict_script(measured, parameters, tflop, micro_batches, launch_ms):
    """The same of a line of WORKLOADS."""
    if measured["device"] == "cpu":
        seconds = tflop / (EFFICIENCY * measured["tflop_per_s"]["fp32"])
    else:
        seconds = tflop / (EFFICIENCY * measured["tflop_per_s"]["bf16"])
        seconds = max(seconds, launch_ms / 1000)
    return predict(measured, 4 * parameters, seconds, micro_batches)


def print_speeds(measured):
    n = measured["ranks"]
    print(f"\nMeasured with {n} ranks at work ({measured['backend']}, {measured['device']})")
    for name, rate in measured["tflop_per_s"].items():
        print(f"  matrix products in {name}: {rate:.2g} TFLOP/s on each rank")
    for row in measured["all_reduce"]:
        milliseconds = 1000 * row["seconds"]
        bandwidth = 2 * (n - 1) / n * row["bytes"] / row["seconds"] / 1e9
        size = f"{row['bytes'] / 2**10:>6,.0f} KiB"
        print(f"  all-reduce of {size}: {milliseconds:8.3f} ms, {bandwidth:7.3f} GB/s on the bus")

    if n == 1:
        print("  One rank exchanges nothing. For predictions: --nproc_per_node 2 or more")
        return
    print(f"\nPredicted speed-up of {n} ranks, the batch of each fixed")
    for name, workload in WORKLOADS.items():
        print(f"  {name:<12} {predict_script(measured, *workload):6.2f}")


# --------------------------------------------------------------------------------------------------
# Main


def report(results, name, status, found):
    results["checks"].append({"name": name, "status": status, "found": found})
    print(f"{status:<4}  {name}: {found}", flush=True)


def has_failed(results):
    return any(check["status"] == FAIL for check in results["checks"])


def check_ranks(results, args):
    """All that needs a process group; rank 0 reports it. (all ranks)"""
    logging.disable(logging.INFO)  # the report is enough
    try:
        device = setup_ddp(args)
    except RuntimeError as error:
        hint = "can the ranks reach each other? GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, firewall"
        raise RunError(f"no process group: {str(error).splitlines()[0]}; {hint}") from None

    is_first = dist.get_rank() == 0
    for name, check in RANK_CHECKS.items():
        rows = gather(check(args, device))
        status, found = max(rows, key=lambda row: STATUSES.index(row[0]))
        if len({row[0] for row in rows}) > 1:  # not all ranks found the same
            found = f"rank {rows.index((status, found))}: {found}"
        if is_first:
            report(results, name, status, found)

    if not args.quick:
        results["measured"] = measure(args, device)
        if is_first and dist.get_world_size() > 1:
            report(results, "speed-up", *judge_training(results["measured"]))


def fail_on_purpose():
    """In the last rank, while the others wait for it. (all ranks)"""
    logging.disable(logging.CRITICAL)  # it is no news
    dist.barrier()  # rank 0 has saved the results
    if dist.get_rank() == dist.get_world_size() - 1:
        raise RuntimeError("on purpose")
    dist.barrier()


def start_ranks(args, path):
    """check_ranks in processes of this program's own, which leave the results in a file. Returns
    their exit status and what they have written to stderr."""
    env = dict(os.environ)
    env.pop("MASTER_ADDR", None)  # it may be another machine
    env.pop("MASTER_PORT", None)

    ranks = [f"--nproc_per_node={args.ranks}", f"--results={path}"]
    command = [sys.executable, __file__, *sys.argv[1:], *ranks]
    job = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    try:
        _, errors = job.communicate(timeout=60 + 120 * args.timeout_minutes)
    except subprocess.TimeoutExpired:
        job.terminate()
        _, errors = job.communicate()
    return job.returncode, errors


def check_own_ranks(results, args):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "results.json")
        status, errors = start_ranks(args, path)
        if not path.exists():
            print(errors)
            text = f"status {status} before the checks had ended; the lines above say why"
            report(results, "end of the ranks", FAIL, text)
            return
        seconds = time.time() - path.stat().st_mtime  # all that was left is the end of the ranks
        content = json.loads(path.read_text())
    results["checks"] += content["checks"]
    results["measured"] = content["measured"]

    if args.quick or args.ranks == 1:
        report(results, "end of the ranks", FAIL if status else OK, f"status {status}")
        return
    found = f"rank {args.ranks - 1} raised, the job ended after {seconds:.1f} s, status {status}"
    # NCCL does not see that a rank is gone: the others wait until the limit of a collective
    waits = 0 if find_device(args) == "cpu" else min(120, 60 * args.timeout_minutes)
    if status == 0 or seconds > 20 + waits:
        found += "; jobs with a failed rank would go on: install the pinned torch"
        report(results, "failing rank", FAIL, found)
    else:
        report(results, "failing rank", OK, found)


def save(results, path):
    try:
        Path(path).write_text(json.dumps(results, indent=1))
    except OSError as error:
        raise InputError(f"--json {path}: {error.strerror}") from None


def finish(results, args):
    """The speeds, the last line, --json; returns the exit status."""
    if results["measured"]:
        print_speeds(results["measured"])
    statuses = [check["status"] for check in results["checks"]]
    counts = [f"{statuses.count(status)} {status}" for status in STATUSES]
    seconds = time.monotonic() - START
    print(f"\n{', '.join(counts)} in {seconds:.0f} s", flush=True)
    if args.json:
        results.update(host=socket.gethostname(), torch=torch.__version__, seconds=seconds)
        save(results, args.json)
    return int(has_failed(results))


def main(args):
    results = {"checks": [], "measured": {}}
    if args.results:  # this is a rank of start_ranks
        check_ranks(results, args)
        if dist.get_rank() == 0:
            save(results, args.results)
        if not args.quick and args.ranks > 1:
            fail_on_purpose()
        return 0

    launched = find_ranks()
    rank = launched[0] if launched else 0
    if rank == 0:
        for name, check in ENVIRONMENT.items():
            if name != "port" or launched is None:
                report(results, name, *check(args))
    if has_failed(results):  # then no rank starts
        return finish(results, args)
    if launched is None:
        check_own_ranks(results, args)
    else:
        check_ranks(results, args)
    return finish(results, args) if rank == 0 else 0


if __name__ == "__main__":
    launch(parse_args, main)
