"""Check a machine for distributed training: does it do DDP right, and how fast?

    python test_ddp_setup.py                          # a process per GPU, or 2 without GPUs
    python test_ddp_setup.py --nproc_per_node 4 --backend gloo --json check.json
    torchrun --nproc_per_node=8 test_ddp_setup.py     # on several machines start it on each
    mpiexec -n 12 python test_ddp_setup.py            # or srun: checks the ranks of the job

The first command on a new machine. It prints a line for each check: OK, WARN or FAIL, what was
found, and what to do about it. If a check fails the exit status is 1 (and torchrun adds a traceback
of its own). If the ranks do not come together, or one of them dies, it ends with their errors.

All ranks check together: sums with known results, a DDP step against one process, fp32 and bf16.
They measure all-reduces, and how much more work all ranks do than one.

--json FILE: checks [{name, status, found}], measured {ranks, backend, device, tflop_per_s {fp32,
bf16}, all_reduce [{bytes, seconds}], step {alone, together}}, host, torch, seconds.
"""

# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.11,<2.14", "numpy>=2.2,<3"]
# ///

import argparse
import copy
import functools
import json
import logging
import math
import os
import shutil
import signal
import socket
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

STATUSES = ["OK", "WARN", "FAIL"]  # from good to bad
SIZES = [4 * 2**10, 256 * 2**10, 4 * 2**20, 25 * 2**20]  # bytes of all-reduces; DDP's: the last

measured = {}  # figures for --json

# --------------------------------------------------------------------------------------------------
# Arguments


def parse_args():
    parser = Parser(description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    ranks = torch.accelerator.device_count() or 2
    add("--nproc_per_node", type=COUNT, default=ranks, help="processes, if no launcher started any")
    devices = ["auto", "cuda", "xpu", "cpu"]
    add("--device", default="auto", choices=devices, help="auto: GPUs where there are any")
    backends = ["auto", "nccl", "gloo", "xccl", "ccl", "xpu"]
    add("--backend", default="auto", choices=backends, help="auto (also ccl, xpu): by the device")
    add("--timeout_minutes", type=number(0.01), default=2, help="limit of one collective")
    add("--json", type=Path, metavar="FILE", help="write the results there")
    # torch.distributed.launch gives it, but also sets RANK
    add("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    parser.set_defaults(deterministic=False)
    args = parser.parse_args()

    if args.json and find_ranks()[0] == 0:  # better now than after the checks
        try:
            args.json.write_text("")
        except OSError as error:
            parser.error(f"--json {args.json} cannot be written: {error.strerror}")
    return args


# --------------------------------------------------------------------------------------------------
# Checks, on all ranks. Each returns its status, and what it found and advises


def check_versions(args, device):
    found = f"python {sys.version.split()[0]}, torch {torch.__version__}, numpy {np.__version__}"
    different = sorted(set(gather(found)))
    if len(different) > 1:
        return "FAIL", f"{'; but '.join(different)}: install the same on all machines"

    version = [int(part) for part in torch.__version__.split(".")[:2]]
    if version < [2, 11]:
        return "FAIL", f"{found}; the scripts need torch 2.11: see requirements.txt"
    if version > [2, 13]:
        return "WARN", f"{found}; the scripts were tested with torch 2.11 to 2.13"
    return "OK", found


def check_devices(args, device):
    hosts = ", ".join(sorted(set(gather(socket.gethostname()))))
    found = f"world size {dist.get_world_size()} on {hosts}; {dist.get_backend()} on {device}"
    if device.type == "cpu":
        if args.device == "auto" and shutil.which("nvidia-smi"):
            advice = "are the GPUs hidden, or does this build of torch not fit the driver?"
            return "WARN", f"{found}, but there is an NVIDIA driver: {advice}"
        return "OK", found

    module = torch.get_device_module(device)
    found += f", {module.get_device_name(device)}"
    try:
        free, total = module.mem_get_info(device)
    except RuntimeError:  # some of Intel's GPUs do not tell
        return "OK", f"{found}, which does not say how much memory is free"
    found += f", {free / 1e9:.1f} of {total / 1e9:.1f} GB free"
    if free < 0.8 * total:
        return "WARN", f"{found}; another process uses it: end that one, or take another device"
    return "OK", found


def check_shared_memory(args, device):
    free = shutil.disk_usage("/dev/shm").free / 1e9 if os.path.isdir("/dev/shm") else 0
    found = f"{free:.2f} GB free in /dev/shm"
    if free < 1:
        advice = "NCCL dies of this: docker run --shm-size=8g, or --ipc=host"
        return "WARN", f"{found}; {advice}"
    return "OK", found


def check_sums(args, device):
    """An all-reduce with a known result."""
    world_size = dist.get_world_size()
    values = torch.full((1000,), dist.get_rank() + 1.0, device=device)
    dist.all_reduce(values)
    expected = world_size * (world_size + 1) / 2
    if (values != expected).any():
        found = f"1 + ... + {world_size} is {values[0].item():.0f}, not {expected:.0f}"
        return "FAIL", f"{found}; give another --backend"
    return "OK", f"1 + ... + {world_size} is {expected:.0f} on all ranks"


def check_DDP_step(args, device):
    """A step with unequal shares of a batch, on all ranks, against one process with all of it."""
    world_size = dist.get_world_size()
    torch.manual_seed(0)  # the same network and the same batch on all ranks
    alone = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4)).to(device)
    together = DistributedDataParallel(copy.deepcopy(alone))
    x = torch.randn(9 * world_size + 1, 16).to(device)
    target = torch.randn(9 * world_size + 1, 4).to(device)
    weights = [nn.utils.parameters_to_vector(alone.parameters())]

    (alone(x) - target).square().mean().backward()
    rows = slice(dist.get_rank(), None, world_size)
    loss = (together(x[rows]) - target[rows]).square().sum() / target.numel()
    (loss * world_size).backward()  # DDP takes the mean of the ranks, and the sum is meant
    for model in (alone, together):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        weights.append(nn.utils.parameters_to_vector(model.parameters()))

    before, expected, actual = weights
    error = ((actual - expected).norm() / (expected - before).norm()).item()
    found = f"the update differs from that of one process by {error:.0e} of its length"
    different = len(set(gather(actual.detach().cpu().numpy().tobytes())))
    if not error < 1e-4 or different > 1:
        found += f", the ranks have {different} different weights"
        return "FAIL", f"{found}; give another --backend"
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
    """A matrix product in fp32 and bf16: its error, by float64 on the CPU, and its speed."""
    torch.manual_seed(0)
    a = torch.randn(256, 256)
    b = torch.randn(256, 256)
    exact = a.double() @ b.double()

    side = 256 if device.type == "cpu" else 8192
    measured["tflop_per_s"] = {}
    texts = []
    wrong = []
    for name, dtype, limit in [("fp32", torch.float32, 1e-5), ("bf16", torch.bfloat16, 3e-2)]:
        product = a.to(device, dtype) @ b.to(device, dtype)
        error = ((product.cpu().double() - exact).norm() / exact.norm()).item()
        if not error < limit:
            wrong.append(name)
        large = torch.randn(side, side, device=device, dtype=dtype)
        seconds = seconds_of(functools.partial(torch.matmul, large, large), device)
        rate = 2 * side**3 / seconds / 1e12
        measured["tflop_per_s"][name] = rate
        texts.append(f"{name} {error:.0e} at {rate:.2g} TFLOP/s")

    found = f"error of a matrix product: {', '.join(texts)}"
    if wrong:
        return "FAIL", f"{found}; {' and '.join(wrong)}: too large, train in another precision"
    return "OK", found


def check_all_reduce(args, device):
    world_size = dist.get_world_size()
    measured["all_reduce"] = []
    texts = []
    for size in SIZES:
        buffer = torch.zeros(size // 4, device=device)
        seconds = seconds_of(functools.partial(dist.all_reduce, buffer), device)
        measured["all_reduce"].append({"bytes": size, "seconds": seconds})
        exchanged = 2 * (world_size - 1) / world_size * size  # bytes, as NCCL's own tests count
        bandwidth = exchanged / seconds / 1e9
        texts.append(f"{size // 2**10:,} KiB {1000 * seconds:.3g} ms ({bandwidth:.2g} GB/s)")
    return "OK", ", ".join(texts)


def check_speedup(args, device):
    """Forward and backward passes through four matrices: of rank 0 while the others wait, and of
    all ranks with DDP, each with a batch of the same size."""
    world_size = dist.get_world_size()
    width, batch = (1024, 128) if device.type == "cpu" else (4096, 4096)
    x = torch.randn(batch, width, device=device)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(4)]).to(device)
    ddp_model = DistributedDataParallel(copy.deepcopy(model))

    def step(model):
        model.zero_grad()
        model(x).square().mean().backward()

    alone = 0.0
    if dist.get_rank() == 0:
        alone = seconds_of(functools.partial(step, model), device)
    alone = max(gather(alone))  # here the others wait
    together = max(gather(seconds_of(functools.partial(step, ddp_model), device)))
    measured["step"] = {"alone": alone, "together": together}
    speedup = world_size * alone / together
    found = f"{world_size} ranks do {speedup:.2f} times the work of one"
    if speedup < 1:
        advice = "is the machine busy? If not, larger batches on each rank exchange less"
        return "WARN", f"{found}; {advice}"
    return "OK", found


# --------------------------------------------------------------------------------------------------
# Main

CHECKS = [check_versions, check_devices, check_shared_memory]
CHECKS += [check_sums, check_DDP_step, check_precision]
EXCHANGES = [check_all_reduce, check_speedup]  # one rank exchanges nothing


def main(args):
    device = setup_ddp(args)
    world_size = dist.get_world_size()
    measured.update(ranks=world_size, backend=dist.get_backend(), device=device.type)
    checks = []
    for check in CHECKS if world_size == 1 else CHECKS + EXCHANGES:
        outcomes = gather(check(args, device))
        statuses = [status for status, _ in outcomes]
        worst = max(statuses, key=STATUSES.index)
        rank = statuses.index(worst)  # the first one that has it
        found = outcomes[rank][1]
        if rank > 0:
            found = f"rank {rank}: {found}"
        name = check.__name__.removeprefix("check_").replace("_", " ")
        checks.append({"name": name, "status": worst, "found": found})
        if dist.get_rank() == 0:
            print(f"{worst:<4}  {name}: {found}", flush=True)

    statuses = [check["status"] for check in checks]
    if dist.get_rank() == 0:
        seconds = time.monotonic() - START
        counts = [f"{statuses.count(status)} {status}" for status in STATUSES]
        print(f"\n{', '.join(counts)} in {seconds:.0f} s")
        if args.json:
            results = {"checks": checks, "measured": measured, "host": socket.gethostname()}
            results.update(torch=torch.__version__, seconds=seconds)
            args.json.write_text(json.dumps(results, indent=1))
    return 1 if "FAIL" in statuses else 0


# ==================================================================================================
# Distributed training. These functions are the same in every script.

START = time.monotonic()
SCRIPT = Path(sys.argv[0]).name

# In these variables a launcher tells a process its rank, the number of ranks, and its rank on this
# machine. A launcher is there if all of its variables are.
LAUNCHERS = [
    ["RANK", "WORLD_SIZE", "LOCAL_RANK"],  # torchrun
    ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"],  # Open MPI
    ["PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID"],  # PALS (Aurora) ...
    ["PALS_RANKID", "WORLD_SIZE", "PALS_LOCAL_RANKID"],  # ... where the job exports WORLD_SIZE
    ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"],  # MPICH, Intel MPI
    ["FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"],  # flux run
    ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_ID"],  # srun (sbatch: no step)
    ["RANK", "WORLD_SIZE", "RANK"],  # by hand, on one machine
]

STOP_SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
# nohup ignores SIGHUP; but where torchrun sends it, to end its ranks, they have to save
if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN or "TORCHELASTIC_RUN_ID" in os.environ:
    STOP_SIGNALS.append(signal.SIGHUP)


class InputError(Exception):
    """What the user gave cannot work: one line, no traceback, status 2."""


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """--help with the docstring as it stands and the default of every option."""


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise InputError(message)  # so that one rank says it, not all


def number(least, most=math.inf, kind=float):
    """The type of options that are numbers within limits."""

    def parse(text):
        value = kind(text)
        if not least <= value <= most or value == math.inf:
            raise argparse.ArgumentTypeError(f"{text}: must be from {least} to {most}")
        return value

    parse.__name__ = "number"  # in argparse's own messages
    return parse


COUNT = number(1, kind=int)


def find_ranks():
    """(rank, number of ranks, rank on this machine), from the launcher"""
    for names in LAUNCHERS:
        values = [os.environ.get(name) for name in names]
        if all(values):
            return [int(value) for value in values[:3]]
    return 0, 1, 0


def setup_ddp(args):
    """Start the log, choose the device, join the process group; returns the device. (all ranks)"""
    # plain python is a group of one: the code below has one path only
    rank, world_size, local_rank = find_ranks()
    form = f"[RANK {rank}] %(asctime)s %(levelname)s: %(message)s"
    logging.basicConfig(format=form, level=logging.INFO, stream=sys.stdout)
    logging.raiseExceptions = False  # if nobody reads the log any more, train on
    logging.info(f"Process {rank}/{world_size} started")
    # once it has freed a block this large, glibc keeps freed memory for what is made next: faster
    torch.empty(2**25 - 2**13, dtype=torch.uint8)
    device = choose_device(args, local_rank)
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS repeats nothing
        torch.use_deterministic_algorithms(True)

    default_backend = dist.get_default_backend_for_device(device)
    backend = default_backend if args.backend in ("auto", "ccl", "xpu") else args.backend
    if backend not in (default_backend, "gloo"):
        raise InputError(f"--backend {backend} is not for {device.type}")
    options = {"timeout": timedelta(minutes=args.timeout_minutes)}
    if device.type != "cpu":
        # Python objects, such as a checkpoint, go from rank to rank without the GPU's memory
        backend = f"cpu:gloo,{device.type}:{backend}"
        options["device_id"] = device
    if not os.environ.get("MASTER_ADDR"):
        if rank != local_rank:  # there are ranks elsewhere
            raise InputError("several machines: export MASTER_ADDR, the name of the first one")
        os.environ["MASTER_ADDR"] = "localhost"
    if not os.environ.get("MASTER_PORT"):
        os.environ["MASTER_PORT"] = "29500" if world_size > 1 else "0"  # 0: any free one
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    logging.info(f"Initializing DDP for rank {rank}... at {address}")
    # Python's own handler would not run while torch waits for the other ranks
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # if another program listens on the port, torch would wait for ever
    signal.alarm(math.ceil(60 * args.timeout_minutes) + 3)
    dist.init_process_group(backend, rank=rank, world_size=world_size, **options)
    signal.alarm(0)
    ranks_on_host = gather(os.uname().nodename).count(os.uname().nodename)
    is_bound = len(os.sched_getaffinity(0)) < os.cpu_count()
    if "OMP_NUM_THREADS" not in os.environ and not is_bound:  # else each rank takes all cores
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks_on_host))
    if rank > 0:
        logging.getLogger().setLevel(logging.ERROR)  # from here on others log errors only
    logging.info(f"{world_size} ranks, {backend} on {device}, torch {torch.__version__}")
    return device


def choose_device(args, local_rank):
    """A GPU for this rank, or the CPU where there is none."""
    device_type = getattr(torch.accelerator.current_accelerator(True), "type", "cpu")
    if args.device not in ("auto", "cpu", device_type):
        raise InputError(f"--device {args.device}: this torch finds only {device_type} here")
    if args.device == "cpu" or device_type not in ("cuda", "xpu"):
        return torch.device("cpu")

    # torchrun shows all GPUs to all ranks; mpiexec and srun may show each rank its own one
    count = torch.accelerator.device_count()
    if count > 1 and local_rank >= count:
        raise InputError(f"{count} GPUs here, and a rank {local_rank}: start fewer processes")
    device = torch.device(device_type, local_rank % count)
    torch.accelerator.set_device_index(device.index)
    return device


def cleanup():
    gather(None)  # rank 0 may still write, and some launchers kill it when another rank has ended
    dist.destroy_process_group()


def launch(parse_args, main):
    """Run main(args) as this rank, or become torchrun to start --nproc_per_node ranks."""
    rank, world_size, _ = find_ranks()
    try:
        args = parse_args()
        if args.nproc_per_node > 1 and world_size == 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
            become_torchrun(args.nproc_per_node)
        status = main(args)
        cleanup()
    except InputError as error:
        if rank > 0:  # rank 0 says it for all, if it has the same error, and the launcher ends us
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(3)
        sys.stderr.write(f"{SCRIPT}: error: {error}\n")
        status = 2
    except (Exception, KeyboardInterrupt):
        traceback.print_exc()
        status = 1
    logging.shutdown()  # flushes standard output, and ignores that it may be closed
    os._exit(status)  # at once: a cleanup would wait for other ranks, which may wait for this one


def become_torchrun(processes):
    """Go on as torchrun, which hands all signals to the ranks, and gives them time to save."""
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "120")  # seconds
    # torchrun would set 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // processes)))
    signals = ",".join(stop.name for stop in STOP_SIGNALS)
    options = ["--standalone", f"--nproc_per_node={processes}", f"--signals-to-handle={signals}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *options, "--local-addr=127.0.0.1"]
    os.execv(sys.executable, [*torchrun, *sys.argv])


def gather(value):
    """[value of rank 0, value of rank 1, ...] on every rank. (all ranks)"""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


if __name__ == "__main__":
    launch(parse_args, main)
