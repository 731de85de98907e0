"""Check a machine for distributed training: does it do DDP right, and how fast?

    python test_ddp_setup.py                          # a process per GPU, or 2 without GPUs
    python test_ddp_setup.py --nproc_per_node 4 --backend gloo --json check.json
    torchrun --nproc_per_node=8 test_ddp_setup.py     # or srun, mpiexec: checks its ranks

The first command on a new machine. It prints a line for each check: OK, WARN or FAIL, what was
found, and what to do about it. If a check fails the exit status is 1.

The first process checks the environment. Then all ranks check together: sums with known results,
a DDP step against one process, each precision. They measure all-reduces, and how much more work all
ranks do than one. Last a rank ends without a word, and the others must notice.

--json FILE: checks [{name, status, found}], measured {ranks, backend, device, tflop_per_s,
all_reduce [{bytes, seconds}], step {alone, together}}, host, torch, seconds.
"""

import argparse
import copy
import ctypes
import functools
import json
import logging
import math
import multiprocessing
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import yaml
from torch.nn.parallel import DistributedDataParallel

STATUSES = ["OK", "WARN", "FAIL"]  # from good to bad
CHECKPOINT_GB = 4.3  # the largest of the scripts' checkpoints, with the optimizer's state
SIZES = [4 * 2**10, 256 * 2**10, 4 * 2**20, 25 * 2**20]  # bytes of all-reduces; DDP's: the last
TIME_LIMIT = 300  # seconds for all that the ranks do
REACH = "Can the ranks reach each other? GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, firewall"

checks = []  # {name, status, found} of each, in the order of the report
measured = {}  # figures for --json

# --------------------------------------------------------------------------------------------------
# Arguments


def parse_args():
    parser = Parser(description=__doc__)
    add = parser.add_argument
    text = "processes to start; None: one per GPU, 2 without GPUs"
    add("--nproc_per_node", dest="ranks", metavar="N", type=COUNT, help=text)
    kinds = ["auto", "cuda", "xpu", "cpu"]
    add("--device", default="auto", choices=kinds, help="auto: GPUs where there are any")
    add("--backend", default="auto", help="nccl, gloo, xccl; auto: by the device")
    add("--output_dir", default=".", help="where runs will write")
    add("--json", help="file for the results")
    add("--local_rank", "--local-rank", help=argparse.SUPPRESS)  # of torch.distributed.launch
    # The lines at the end of this file read these, too. (10 minutes: TIME_LIMIT is over first.)
    parser.set_defaults(nproc_per_node=1, timeout_minutes=10, compile=False, deterministic=False)
    return parser.parse_args()


def find_kind(args):
    """What the scripts would train on: cuda, xpu or cpu."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if args.device == "cpu" or found is None or found.type not in ("cuda", "xpu"):
        return "cpu"
    return found.type


# --------------------------------------------------------------------------------------------------
# Checks of the environment, in one process. Each returns its status, and what it found and advises


def check_versions(args):
    found = f"python {sys.version.split()[0]}, torch {torch.__version__}, numpy {np.__version__}"
    version = [int(part) for part in torch.__version__.split(".")[:2]]
    if sys.version_info < (3, 10) or version < [2, 11]:
        return "FAIL", f"{found}; python 3.10 and torch 2.11 at least: see requirements.txt"
    if version > [2, 13]:
        return "WARN", f"{found}; the scripts were tested with torch 2.11 to 2.13"
    return "OK", found


def check_devices(args):
    kind = find_kind(args)
    if args.device not in ("auto", kind):
        return "FAIL", f"no {args.device} device that this torch can use; give --device cpu"
    if kind == "cpu":
        if args.device == "auto" and shutil.which("nvidia-smi"):
            text = "are the GPUs hidden, or does this build of torch not fit the driver?"
            return "WARN", f"no accelerator, but there is an NVIDIA driver: {text}"
        return "OK", "the CPU"

    devices = torch.accelerator.device_count()
    found = f"{devices} x {torch.get_device_module(kind).get_device_name(0)}"
    if args.ranks and args.ranks > devices:
        return "FAIL", f"{found} for {args.ranks} ranks; start at most {devices}"
    return "OK", found


def check_backend(args):
    kind = find_kind(args)
    best = dist.get_default_backend_for_device(kind)
    if args.backend in ("auto", "ccl", "xpu", best):
        return "OK", f"{best} for {kind}"
    if kind == "cpu" or not dist.is_backend_available(args.backend):
        return "FAIL", f"{args.backend} does not work here; give --backend {best}"
    return "WARN", f"{args.backend} for {kind}; {best} is made for it"


def check_host_name(args):
    """torchrun, gloo and NCCL ask for the address of the machine's own name."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
        socket.create_server((address, 0)).close()
    except OSError as error:
        text = f"add the line '127.0.0.1 {name}' to /etc/hosts"
        return "FAIL", f"{name} has no address that works ({error}); {text}"
    if address.startswith("127."):
        return "OK", f"{name} is {address}; on several machines export GLOO_SOCKET_IFNAME"
    return "OK", f"{name} is {address}"


def check_port(args):
    """Where the ranks of srun, of mpiexec and of several machines meet."""
    port = os.environ.get("MASTER_PORT") or "29500"
    try:
        socket.create_server(("", int(port))).close()
    except (OSError, OverflowError, ValueError) as error:
        status = "FAIL" if os.environ.get("MASTER_PORT") else "WARN"
        return status, f"{port}: {error}; export another MASTER_PORT, or use torchrun --standalone"
    return "OK", f"{port} is free"


def check_disk(args):
    """Write as much as a small checkpoint where runs will write."""
    folder = Path(args.output_dir).resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(32_000_000))
        free = shutil.disk_usage(folder).free / 1e9
    except OSError as error:
        return "FAIL", f"{folder} does not take 32 MB ({error.strerror}); give another --output_dir"

    found = f"{free:.1f} GB free in {folder}"
    if free < 3 * CHECKPOINT_GB:
        text = f"the largest run keeps 3 checkpoints of {CHECKPOINT_GB} GB"
        return "WARN", f"{found}; {text}: give another --output_dir"
    return "OK", found


def check_shared_memory(args):
    free = shutil.disk_usage("/dev/shm").free / 1e9 if os.path.isdir("/dev/shm") else 0
    found = f"{free:.2f} GB free in /dev/shm"
    if free < 1:
        text = "NCCL dies of this: docker run --shm-size=8g, or --ipc=host"
        return "WARN", f"{found}; {text}"
    return "OK", found


# --------------------------------------------------------------------------------------------------
# Checks that all ranks make together


def check_process_group(args, device):
    version = f"python {sys.version.split()[0]}, torch {torch.__version__}"
    versions = sorted(set(gather(version)))
    hosts = sorted(set(gather(socket.gethostname())))
    found = f"{dist.get_world_size()} ranks on {', '.join(hosts)}; {dist.get_backend()} on {device}"
    if len(versions) > 1:
        return "FAIL", f"{found}; {' and '.join(versions)}: install the same on all machines"

    if device.type != "cpu":
        try:
            free, total = torch.get_device_module(device).mem_get_info(device)
        except RuntimeError:  # some Intel GPUs do not tell
            return "OK", f"{found}, which does not say how much memory is free"
        found += f", {free / 1e9:.1f} of {total / 1e9:.1f} GB free"
        if free < 0.8 * total:
            return "WARN", f"{found}; another process uses it: end that one, or take another device"
    return "OK", found


def check_threads(args, device):
    """Of all ranks on this machine, against the cores that they may use together."""
    host = socket.gethostname()
    own_cores = os.sched_getaffinity(0)  # a launcher may give each rank its own
    rows = gather([host, own_cores, torch.get_num_threads()])
    here = [row for row in rows if row[0] == host]
    cores = set().union(*[row[1] for row in here])
    threads = sum(row[2] for row in here)

    found = f"{threads} in {len(here)} ranks on {len(cores)} cores of {host}"
    if threads > max(len(here), len(cores)):
        share = max(1, len(cores) // len(here))
        return "WARN", f"{found}; they wait for each other: export OMP_NUM_THREADS={share}"
    return "OK", found


def check_sums(args, device):
    """An all-reduce with a known result."""
    n = dist.get_world_size()
    values = torch.full((1000,), dist.get_rank() + 1.0, device=device)
    dist.all_reduce(values)
    expected = n * (n + 1) / 2
    if (values != expected).any():
        found = f"1 + ... + {n} is {values[0].item():.0f}, not {expected:.0f}"
        return "FAIL", f"{found}; give another --backend"
    return "OK", f"1 + ... + {n} is {expected:.0f} on all ranks"


def check_DDP_step(args, device):
    """A step with unequal shares of a batch, on all ranks, against one process with all of it."""
    n = dist.get_world_size()
    torch.manual_seed(0)  # the same network and the same batch on all ranks
    alone = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4)).to(device)
    together = wrap_ddp(copy.deepcopy(alone), args, device)
    x = torch.randn(9 * n + 1, 16).to(device)
    target = torch.randn(9 * n + 1, 4).to(device)
    weights = [nn.utils.parameters_to_vector(alone.parameters())]

    (alone(x) - target).square().mean().backward()
    own = slice(dist.get_rank(), None, n)
    loss = (together(x[own]) - target[own]).square().sum() / target.numel()
    (loss * n).backward()  # DDP takes the mean of the ranks, and the sum is meant
    for model in (alone, together):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        weights.append(nn.utils.parameters_to_vector(model.parameters()))

    before, expected, actual = weights
    error = ((actual - expected).norm() / (expected - before).norm()).item()
    found = f"the update differs from that of one process by {error:.0e} of its length"
    different = len(set(gather(actual.detach().cpu().numpy().tobytes())))
    if not error < 1e-4 or different > 1:
        text = f"the ranks have {different} different weights"
        return "FAIL", f"{found}, {text}; give another --backend"
    return "OK", f"{found}, all ranks have the same weights"


def seconds_of(function, device):
    """The median of seven calls. The first one, which prepares what later ones find, is left out"""
    times = []
    for _ in range(8):
        begin = time.perf_counter()
        function()
        if device.type != "cpu":
            torch.accelerator.synchronize()  # a GPU ends later than the call that starts it
        times.append(time.perf_counter() - begin)
    return float(np.median(times[1:]))


def check_precision(args, device):
    """A matrix product in each precision: its error, by float64 on the CPU, and its speed."""
    torch.manual_seed(0)
    a = torch.randn(256, 256)
    b = torch.randn(256, 256)
    exact = a.double() @ b.double()

    side = 256 if device.type == "cpu" else 8192
    measured["tflop_per_s"] = {}
    texts = []
    wrong = []
    for name, limit in {"fp32": 1e-5, "tf32": 3e-3, "bf16": 3e-2, "fp16": 3e-3}.items():
        args.precision = name
        autocast, _ = choose_precision(args, device)
        with autocast():
            product = a.to(device) @ b.to(device)
        error = ((product.cpu().double() - exact).norm() / exact.norm()).item()
        if not error < limit:
            wrong.append(name)
        large = torch.randn(side, side, device=device, dtype=product.dtype)
        seconds = seconds_of(functools.partial(torch.matmul, large, large), device)
        rate = 2 * side**3 / seconds / 1e12
        measured["tflop_per_s"][name] = rate
        texts.append(f"{name} {error:.0e} at {rate:.2g} TFLOP/s")

    found = f"error of a matrix product: {', '.join(texts)}"
    if wrong:
        return "FAIL", f"{found}; {', '.join(wrong)}: too large, train in another precision"
    return "OK", found


def check_all_reduce(args, device):
    n = dist.get_world_size()
    measured["all_reduce"] = []
    texts = []
    for size in SIZES:
        buffer = torch.zeros(size // 4, device=device)
        seconds = seconds_of(functools.partial(dist.all_reduce, buffer), device)
        measured["all_reduce"].append({"bytes": size, "seconds": seconds})
        bandwidth = 2 * (n - 1) / n * size / seconds / 1e9  # as NCCL's own tests count it
        texts.append(f"{size // 2**10:,} KiB {1000 * seconds:.3g} ms ({bandwidth:.2g} GB/s)")
    return "OK", ", ".join(texts)


def check_speedup(args, device):
    """Forward and backward passes through four matrices: of rank 0 while the others wait, and of
    all ranks with DDP, each with a batch of the same size."""
    n = dist.get_world_size()
    width, batch = (1024, 128) if device.type == "cpu" else (4096, 4096)
    x = torch.randn(batch, width, device=device)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(4)]).to(device)
    ddp_model = wrap_ddp(copy.deepcopy(model), args, device)
    args.precision = "auto"
    autocast, _ = choose_precision(args, device)

    def step(model):
        model.zero_grad()
        with autocast():
            loss = model(x).square().mean()
        loss.backward()

    alone = on_rank0(seconds_of, functools.partial(step, model), device)
    together = max(gather(seconds_of(functools.partial(step, ddp_model), device)))
    measured["step"] = {"alone": alone, "together": together}
    found = f"{n} ranks do {n * alone / together:.2f} times the work of one"
    if n * alone < together:
        text = "is the machine busy? If not, larger batches on each rank exchange less"
        return "WARN", f"{found}; {text}"
    return "OK", found


def check_failing_rank():
    """The last rank ends, and the others wait for it. (all ranks)"""
    last = dist.get_world_size() - 1
    if dist.get_rank() == last:
        os._exit(0)  # no error, or a launcher would end the others
    try:
        gather(None)
    except RuntimeError:
        return "OK", f"rank {last} ended on purpose, and the others noticed"
    return "FAIL", f"rank {last} ended on purpose, and nobody noticed"


# --------------------------------------------------------------------------------------------------
# Main

ENVIRONMENT = [check_versions, check_devices, check_backend, check_host_name, check_port]
ENVIRONMENT += [check_disk, check_shared_memory]
TOGETHER = [check_process_group, check_threads, check_sums, check_DDP_step, check_precision]
EXCHANGES = [check_all_reduce, check_speedup]  # one rank exchanges nothing


def report(name, status, found):
    """name: of the function that has checked"""
    name = name.removeprefix("check_").replace("_", " ")
    checks.append({"name": name, "status": status, "found": found})
    print(f"{status:<4}  {name}: {found}", flush=True)


def finish(args):
    """--json, and the last line; ends the program. (rank 0)"""
    results = {"checks": checks, "measured": measured, "host": socket.gethostname()}
    results.update(torch=torch.__version__, seconds=time.monotonic() - START)
    if args.json:
        try:
            Path(args.json).write_text(json.dumps(results, indent=1))
        except OSError as error:
            report("json", "FAIL", f"cannot write {args.json}: {error.strerror}")
    statuses = [check["status"] for check in checks]
    counts = [f"{statuses.count(status)} {status}" for status in STATUSES]
    print(f"\n{', '.join(counts)} in {results['seconds']:.0f} s", flush=True)
    os._exit(1 if "FAIL" in statuses else 0)  # at once: a group that misses a rank may not close


def give_up(args):
    load = f"load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores"
    found = f"the checks took too long, more than {TIME_LIMIT} s; is the machine busy ({load})?"
    report("time", "FAIL", f"{found} {REACH}")
    finish(args)


def start_ranks(args):
    """This process becomes rank 0, and starts the others."""
    ranks = args.ranks
    if ranks is None:
        ranks = 2 if find_kind(args) == "cpu" else torch.accelerator.device_count()
    with socket.create_server(("localhost", 0)) as probe:
        port = probe.getsockname()[1]
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), WORLD_SIZE=str(ranks))
    context = multiprocessing.get_context("spawn")  # GPUs do not work in a process that is forked
    for rank in range(1, ranks):
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        context.Process(target=launch, args=(parse_args, main)).start()
    os.environ.update(RANK="0", LOCAL_RANK="0")


def end_with(parent):
    parent.join()
    os._exit(1)


def check_ranks(args, rank):
    """All that needs a process group; rank 0 reports it. (all ranks)"""
    logging.disable(logging.INFO)  # the report is enough
    check = check_process_group  # which of them an error belongs to
    try:
        device = setup_ddp(args)
        n = dist.get_world_size()
        measured.update(ranks=n, backend=dist.get_backend(), device=device.type)
        for check in TOGETHER + EXCHANGES if n > 1 else TOGETHER:
            outcomes = gather(check(args, device))
            if rank == 0:
                worst = max(outcomes, key=lambda outcome: STATUSES.index(outcome[0]))
                report(check.__name__, *worst)
    except (RuntimeError, RunError) as error:
        if rank > 0:
            raise
        text = f"{' '.join(str(error).split())}; did another rank say why? {REACH}"
        report(check.__name__, "FAIL", text)
        return
    if n > 1:
        outcome = check_failing_rank()
        if rank == 0:
            report("failing rank", *outcome)


def main(args):
    global MEETING_MINUTES
    MEETING_MINUTES = 6  # TIME_LIMIT is over first
    rank, world_size, _ = find_ranks() or (0, 1, 0)
    if rank > 0:
        parent = multiprocessing.parent_process()
        if parent:  # rank 0 has started this one
            threading.Thread(target=end_with, args=[parent], daemon=True).start()
        check_ranks(args, rank)
        os._exit(0)  # at once, as rank 0

    threading.Timer(TIME_LIMIT, give_up, [args]).start()
    # srun with one task sets a rank, too
    is_launched = world_size > 1 or "TORCHELASTIC_RUN_ID" in os.environ
    for check in ENVIRONMENT:
        if check != check_port or not is_launched:
            report(check.__name__, *check(args))
    if all(check["status"] != "FAIL" for check in checks):
        if not is_launched:
            start_ranks(args)
        check_ranks(args, rank)
    finish(args)


# --------------------------------------------------------------------------------------------------
# Precision and DDP as the training scripts have them, since these are what they use


def choose_precision(args, device):
    """(a function that makes the context of a forward pass, gradient scaler of fp16)"""
    name = args.precision
    if name == "auto":
        has_bf16 = device.type == "xpu" or (
            device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        )
        name = "bf16" if has_bf16 else "fp32"
        logging.info(f"--precision {name}")
    # cuDNN rounds to TF32 unless told otherwise
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = name == "tf32"
    torch.backends.cuda.enable_cudnn_sdp(False)  # this attention is slow where shapes vary
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name, torch.float32)
    is_low = dtype != torch.float32
    autocast = functools.partial(torch.autocast, device.type, dtype, enabled=is_low)
    return autocast, torch.amp.GradScaler(device.type, enabled=name == "fp16")


def wrap_ddp(model, args, device):
    compiled = model
    if args.compile:
        compiled = torch.compile(model)
        # do not split it at DDP's buckets: that takes long, and fails where shapes vary
        torch._dynamo.config.optimize_ddp = False
    if dist.get_world_size() == 1:  # nothing to add up
        return compiled
    wrapped = DistributedDataParallel(
        compiled,
        device_ids=None if device.type == "cpu" else [device.index],
        gradient_as_bucket_view=True,
    )
    # Buffers are alike on all ranks, or each rank's own. (Torch 2.13 renames the argument.)
    wrapped.broadcast_buffers = False
    # DDP puts the gradients in another order after its first backward pass. Sums over three and
    # more ranks then differ in the last bit: a run that was started again would differ from one
    # that was not. So make that pass now. It needs no batch: in place of the network stands one
    # that returns its input, and the loss is 0 x the sum of all parameters.
    network = wrapped.module
    wrapped.module = nn.Identity()
    zero = sum((p * 0).sum() for p in model.parameters() if p.requires_grad)
    wrapped(zero).backward()
    wrapped.module = network
    wrapped.zero_grad()
    return wrapped


# ==================================================================================================
# How a run starts and ends. These lines are the same in every script: read them once.

START = time.monotonic()
PARENT = os.getppid()
SCRIPT = Path(sys.argv[0]).name

# In these variables a launcher tells a process its rank, the number of ranks, and its rank on this
# machine. A launcher is there if all of its variables are.
LAUNCHERS = [
    ["RANK", "WORLD_SIZE", "LOCAL_RANK"],  # torchrun
    ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"],  # Open MPI
    ["PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID"],  # PALS (Aurora) ...
    ["PALS_RANKID", "WORLD_SIZE", "PALS_LOCAL_RANKID"],  # ... where the job exports WORLD_SIZE
    ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"],  # MPICH, Intel MPI
    ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_ID"],  # srun (sbatch: no step)
    ["RANK", "WORLD_SIZE", "RANK"],  # by hand, on one machine
]

MEETING_MINUTES = 2  # in which all ranks must have come; of many ranks see start_watchdog
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
stop_signal = ""  # name of the last signal that asked this process to stop

# words of errors that need no traceback, and what to do
HINTS = {
    " by peer": "another rank has died: the same command, given again, goes on",
    " allocate ": "half the --batch_size, with the same --global_batch_size, needs less memory",
    "Too many open files": "raise the limit: ulimit -n 4096",
    "No space left": "a disk is full",
    "DataLoader ": "--num_workers 0 needs no worker",  # that was killed, or timed out
    "Duplicate GPU": "two ranks have the same GPU: start fewer, or give --backend gloo",
}


class RunError(Exception):
    """The run cannot go on: one line that says why, no traceback."""

    status = 1


class InputError(RunError):
    """What the user gave cannot work."""

    status = 2


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """--help with the docstring as it stands and the default of every option."""


class Parser(argparse.ArgumentParser):
    def __init__(self, description):
        super().__init__(description=description, formatter_class=HelpFormatter, allow_abbrev=False)

    def parse_args(self, words=None):
        words = sys.argv[1:] if words is None else words
        # ~/ is the home folder, also after "=", where no shell sees to it, and in a config file
        home = os.path.expanduser("~/")
        words = [re.sub("(^|=)~/", rf"\1{home}", word, count=1) for word in words]
        return super().parse_args(words)

    def error(self, message):
        raise InputError(message)  # so that one rank says it, not all


def number(least, most=math.inf, kind=float):
    """The type of options that are numbers within limits."""

    def parse(text):
        value = kind(text)
        if not least <= value <= most or value == math.inf:
            raise argparse.ArgumentTypeError(f"{text}: must be from {least} to {most}")
        return value

    parse.__name__ = "number"  # for argparse's own messages
    return parse


def boolean(text):
    if text.lower() in ("true", "yes", "1"):
        return True
    if text.lower() in ("false", "no", "0"):
        return False
    raise argparse.ArgumentTypeError(f"{text} is neither True nor False")


COUNT = number(1, kind=int)
# an option that may be given as --compile, --compile=True, --compile no
FLAG = {"type": boolean, "nargs": "?", "const": True, "metavar": "BOOL"}


def add_common_arguments(parser, output_dir, batch_size, precision="auto"):
    add = parser.add_argument_group("the same in every script").add_argument
    add("--config", help="YAML or JSON file of options; the command line wins")
    add("--output_dir", default=output_dir, help="a run found there is resumed")
    add("--prepare_only", **FLAG, default=False, help="read the data into --cache_dir, no more")
    add("--fresh", **FLAG, default=False, help="start anew; the old run is moved aside")
    add("--seed", type=number(0, 2**32, int), default=42, help="of all that is random")
    add("--batch_size", type=COUNT, default=batch_size, help="samples per GPU and micro-batch")
    text = "samples per step, on any number of GPUs; 0: by batch_size and the GPUs"
    add("--global_batch_size", type=number(0, kind=int), default=0, help=text)
    add("--num_workers", type=number(0, kind=int), default=0, help="processes that make batches")
    add("--max_grad_norm", type=number(0), default=1.0, help="clip the gradient; 0: do not")
    kinds = ["auto", "fp32", "tf32", "bf16", "fp16"]
    add("--precision", default=precision, choices=kinds, help="auto: bf16 on GPUs that have it")
    add("--deterministic", **FLAG, default=False, help="bit-identical repeats on GPUs, too; slower")
    add("--compile", **FLAG, default=False, help="torch.compile the model for training")
    add("--save_every", type=COUNT, default=500, help="steps between checkpoints")
    add("--max_minutes", type=number(0), default=0, help="then save and stop; 0: no limit")
    add("--log_every", type=COUNT, default=10, help="steps between log lines")
    add("--wandb_mode", default="disabled", choices=["online", "offline", "disabled"], help="wandb")
    add("--nproc_per_node", type=COUNT, default=1, help="processes to start, if no launcher did")
    kinds = ["auto", "cuda", "xpu", "cpu"]
    add("--device", default="auto", choices=kinds, help="auto: GPUs where there are any")
    kinds = ["auto", "nccl", "gloo", "xccl", "ccl", "xpu"]
    add("--backend", default="auto", choices=kinds, help="auto (also ccl, xpu): by the device")
    seconds = os.environ.get("NCCL_TIMEOUT") or "1800"  # many guides export it
    if not seconds.isdigit() or int(seconds) == 0:
        parser.error(f"NCCL_TIMEOUT={seconds}: expected a number of seconds")
    minutes = int(seconds) / 60
    limit = number(0.01, 1e6)
    add("--timeout_minutes", type=limit, default=minutes, help="limit of one collective")
    # torch.distributed.launch gives it, but also sets RANK
    add("--local_rank", "--local-rank", help=argparse.SUPPRESS)


def parse_with_config(parser):
    """Options of the command line; else of the --config file; else the defaults."""
    args = parser.parse_args()
    path = args.config
    if path is None:
        return args

    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        # JSON may hold tabs, which YAML refuses
        content = json.loads(text) if path.endswith(".json") else yaml.safe_load(text)
        if not isinstance(content, dict):
            raise InputError("expected lines such as batch_size: 32")
        words = config_words(content, parser)
        parser.parse_args(words)
    except (OSError, ValueError, yaml.YAMLError, InputError) as error:
        raise InputError(f"--config {path}: {' '.join(str(error).split())}") from None
    return parser.parse_args([*words, *sys.argv[1:]])  # of two values the later one counts


def config_words(content, parser, section=""):
    """A YAML file as a command line. In a section, attack: {eps: 1} is --attack_eps if the script
    has such an option, and --eps if not: then the section only groups options."""
    words = []
    for key, value in content.items():
        name = f"--{section}_{key}"
        if name not in parser._option_string_actions:
            name = f"--{key}"
        if isinstance(value, dict):
            words += config_words(value, parser, key)
        elif isinstance(value, list):
            words += [name, *map(str, value)]
        elif value is not None:
            words.append(f"{name}={value}")
        elif name not in parser._option_string_actions:  # no value: the default
            raise InputError(f"{key}: there is no option {name}")
    return words


def find_ranks():
    """(rank, world size, local rank) from the launcher; None without one."""
    for names in LAUNCHERS:
        values = [os.environ.get(name) for name in names]
        if not all(values):  # some shells keep empty ones
            continue
        if not all(value.isdigit() for value in values[:3]) or int(values[0]) >= int(values[1]):
            text = " ".join(f"{name}={os.environ[name]}" for name in names[:3])
            raise InputError(f"{text}: expected a rank below the number of ranks, from a launcher")
        return tuple(map(int, values[:3]))
    if os.environ.get("RANK") or os.environ.get("PALS_RANKID"):
        raise InputError("this process has a rank, but no world size: export WORLD_SIZE")
    return None


def setup_ddp(args):
    """Start the log, choose the device, join the process group; returns the device. (all ranks)"""
    # plain python is a group of one: the code below has one path only
    rank, world_size, local_rank = find_ranks() or (0, 1, 0)
    form = f"[RANK {rank}] %(asctime)s %(levelname)s: %(message)s"
    clock = "%Y-%m-%d %H:%M:%S"
    logging.basicConfig(format=form, datefmt=clock, level=logging.INFO, stream=sys.stdout)
    logging.info(f"Process {rank}/{world_size} started")
    device = choose_device(args, local_rank)
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS repeats nothing
        torch.use_deterministic_algorithms(True)

    backend = args.backend
    if backend in ("auto", "ccl", "xpu"):
        backend = dist.get_default_backend_for_device(device)
    fitting = {"cpu": ["gloo"], "cuda": ["nccl", "gloo"], "xpu": ["xccl"]}
    if backend not in fitting[device.type] or not dist.is_backend_available(backend):
        raise InputError(f"--backend {backend} is not for {device.type}, or not in this torch")
    if device.type != "cpu":
        # Python objects, such as a checkpoint, go from rank to rank without the GPU's memory
        backend = f"cpu:gloo,{device.type}:{backend}"
    if not os.environ.get("MASTER_ADDR"):
        if rank != local_rank:  # there are ranks elsewhere
            raise InputError("several machines: export MASTER_ADDR, the name of the first one")
        os.environ["MASTER_ADDR"] = "localhost"
    if not os.environ.get("MASTER_PORT"):
        os.environ["MASTER_PORT"] = "29500" if world_size > 1 else "0"  # 0: any free one

    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"

    logging.info(f"Initializing DDP for rank {rank}...")
    handle_signals(signal.SIG_DFL)  # Python's own would not run before all ranks have come
    watchdog = start_watchdog(rank, world_size, place)
    try:
        wait = timedelta(minutes=args.timeout_minutes)
        gpu = None if device.type == "cpu" else device
        ranks = {"rank": rank, "world_size": world_size}
        dist.init_process_group(backend, timeout=wait, device_id=gpu, **ranks)
    except (dist.DistNetworkError, ValueError) as error:
        text = str(error).splitlines()[0]
        if "EADDRINUSE" in text:
            text = "the port is in use, export another MASTER_PORT"
        raise RunError(f"no meeting at {place}: {text}") from None
    watchdog.cancel()
    compare_ranks(args)

    # Launchers other than torchrun may leave all cores of a machine to each of its ranks.
    here = gather(socket.gethostname()).count(socket.gethostname())
    is_bound = len(os.sched_getaffinity(0)) < os.cpu_count()
    if not os.environ.get("OMP_NUM_THREADS") and not is_bound:
        torch.set_num_threads(max(1, torch.get_num_threads() // here))
    # glibc would give freed memory back to the system, and fetch it again in the next step: up to a
    # tenth of a step on CPUs. Keep it. (An older glibc takes only the first of both limits.)
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(-3, 2**25)  # M_MMAP_THRESHOLD, in bytes
    mallopt(-3, 2**30)
    mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    if rank > 0:
        logging.getLogger().setLevel(logging.ERROR)  # from here on others log errors only
    logging.info(f"{world_size} ranks, {backend} on {device}, torch {torch.__version__}")
    return device


def choose_device(args, local_rank):
    """A GPU for this rank, or the CPU where there is none."""
    kind = getattr(torch.accelerator.current_accelerator(check_available=True), "type", "cpu")
    if args.device not in ("auto", "cpu", kind):
        text = f"torch {torch.__version__} finds only {kind} here"
        raise InputError(f"--device {args.device}: {text}")
    if args.device == "cpu" or kind not in ("cuda", "xpu"):
        return torch.device("cpu")

    # torchrun shows all GPUs to all ranks; mpiexec and srun may show each rank its own one
    count = torch.accelerator.device_count()
    if count > 1 and local_rank >= count:
        raise InputError(f"{count} GPUs here, and a rank {local_rank}: start fewer processes")
    device = torch.device(kind, local_rank % count)
    torch.accelerator.set_device_index(device.index)
    return device


def start_watchdog(rank, world_size, place):
    """Ends this process if it is not cancelled in time. Torch would wait as long as for a slow
    rank, and for ever where another program listens on the port."""
    # many machines that read Python and torch from one file system need minutes for it
    minutes = MEETING_MINUTES + world_size // 64

    def give_up():
        text = f"{world_size} ranks did not meet at {place} in {minutes} minutes"
        sys.stderr.write(f"{SCRIPT}: error: {text}: are all of them started, and for this place?\n")
        os._exit(RunError.status)

    # rank 0, if there is one, says it for all
    seconds = 60 * minutes
    watchdog = threading.Timer(seconds if rank == 0 else seconds + 3, give_up)
    watchdog.daemon = True
    watchdog.start()
    return watchdog


def compare_ranks(args):
    """Refuse a group whose ranks were not started with the same command: a port that two jobs have
    chosen, or an old file on one machine. (all ranks)"""
    own = {"script": SCRIPT, **vars(args)}
    for rank, theirs in enumerate(gather(own)):
        for name in sorted((own.keys() | theirs.keys()) - {"local_rank"}):
            if theirs.get(name) != own.get(name):
                text = f"{name} is {own.get(name)} here, and {theirs.get(name)} on rank {rank}"
                raise InputError(f"the ranks are of different runs: {text}")


def handle_signals(handler):
    for stop in STOP_SIGNALS:
        # Under nohup a process ignores SIGHUP, and goes on doing so. But where torchrun sends it,
        # to end its ranks, they have to save.
        if signal.getsignal(stop) != signal.SIG_IGN or "TORCHELASTIC_RUN_ID" in os.environ:
            signal.signal(stop, handler)


def end_on_signals():
    """From here on a signal ends the process at once: there is nothing to save. (all ranks)"""
    handle_signals(signal.default_int_handler if dist.get_rank() == 0 else signal.SIG_DFL)


def on_signal(number, frame):
    global stop_signal
    stop_signal = signal.Signals(number).name  # training ends its step first, and agrees to stop


def cleanup():
    if dist.is_initialized():
        dist.destroy_process_group()


def launch(parse_args, main):
    """Run main(args) as this rank, or become torchrun to start --nproc_per_node ranks."""
    sys.stdout.reconfigure(errors="backslashreplace")  # an ASCII terminal is no reason to fail
    rank = 0
    try:
        rank, world_size, _ = find_ranks() or (0, 1, 0)
        args = parse_args()
        is_alone = world_size == 1 and "TORCHELASTIC_RUN_ID" not in os.environ
        if args.nproc_per_node > 1 and is_alone:
            become_torchrun(args.nproc_per_node)
        status = main(args)
        cleanup()
    except RunError as error:
        # Mostly all ranks have the same error. So rank 0 says it, and the others wait until their
        # launcher ends them. If it does not within three seconds, rank 0 may have no error.
        if rank > 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(3)
        sys.stderr.write(f"{SCRIPT}: error: {error}\n")
        status = error.status
    except KeyboardInterrupt:
        sys.stderr.write(f"{SCRIPT}: stopped before training or after it; nothing is lost\n")
        status = 130
    except Exception as error:
        explain(error)
        status = 1
    for worker in multiprocessing.active_children():  # one that is stuck would outlive us
        worker.kill()
    sys.stdout.flush()
    os._exit(status)  # at once: a cleanup would wait for other ranks, which may wait for this one


def explain(error):
    """One line for an error that users meet, with what to do; for others the traceback."""
    lines = f"{type(error).__name__}: {error}".splitlines()
    for words, hint in HINTS.items():
        for line in lines:
            if words in line:
                logging.error(f"{hint} ({line.strip()[:200]})")
                return
    logging.error(traceback.format_exc())


def become_torchrun(processes):
    """Go on as torchrun with the same script and options. Unlike by default it hands SIGUSR1 to the
    ranks, and gives them time to save."""
    # any free port of this machine, which may not know its own name
    where = ["--standalone", "--local-addr=127.0.0.1"]
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "120")  # seconds
    names = [stop.name for stop in STOP_SIGNALS if signal.getsignal(stop) != signal.SIG_IGN]
    threads = max(1, torch.get_num_threads() // processes)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # torchrun would say 1
    options = [f"--nproc_per_node={processes}", f"--signals-to-handle={','.join(names)}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *where, *options]
    os.execv(sys.executable, [*torchrun, *sys.argv])


def gather(value):
    """[value of rank 0, value of rank 1, ...] on every rank. (all ranks)"""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_rank0(function, *args, group=None):
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
    dist.broadcast_object_list(outcome, group=group)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


# ==================================================================================================


if __name__ == "__main__":
    launch(parse_args, main)
