"""Train a graph network on causal sets: is a partial order a piece of spacetime, and of which kind?

A causal set is a finite partial order: its elements are events, and the order is "is in the past
of" (Bombelli et al. 1987). The network sees elements and links (related pairs with nothing between
them) and says how the set was made. Tasks: cls, which of several kinds it is: points scattered in
Minkowski space of 2, 3 or 4 dimensions ("sprinklings"), or random orders that look like them; dim,
the dimension of a sprinkling; manifold, whether it is a sprinkling at all.

    python tools/make_causal_sets.py                     # once: 12,000 sets in data/causal_sets
    torchrun --standalone --nproc_per_node=2 run_train_quantumgrav_ddp.py
    python run_train_quantumgrav_ddp.py --config configs/config_quantumgrav_quickstart.yaml
    python run_train_quantumgrav_ddp.py --nproc_per_node 3 --lr 3e-4 --output_dir outputs/lr3
    mpiexec -n 12 python run_train_quantumgrav_ddp.py    # or srun

Several machines: docs/DDP_TRAINING_GUIDE.md. The format of the data: tools/make_causal_sets.py.

Logged, over all ranks: step, epoch, lr, loss (cross entropy in nats per set, summed over the
tasks), grad_norm (before clipping), skipped (steps whose gradient was not finite), samples_per_s,
data_wait (share of the time). After every epoch: val/loss, val/loss_se (its standard error), and
val/TASK/... loss, accuracy, f1_macro, f1_weighted, ece (calibration error in 15 bins).

Files in --output_dir: latest.pt, previous.pt, best.pt, metrics.jsonl; at the end predictions.npz
and confusion_TASK.png (of the test set), summary.json (with the test's metrics), curves.png.

Unlike the original (ssciwr/QuantumGrav) all ranks share one split; validation and test count each
set once; edges carry messages both ways by default; runs can be resumed.
"""

import argparse
import contextlib
import ctypes
import difflib
import fcntl
import gc
import hashlib
import json
import logging
import math
import os
import queue
import signal
import sys
import threading
import time
import traceback
import warnings
import zipfile
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import yaml
from sklearn.metrics import ConfusionMatrixDisplay, confusion_matrix, f1_score
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from tqdm import tqdm

# --------------------------------------------------------------------------------------------------
# Arguments


def parse_args():
    parser = Parser(description=__doc__)
    add = parser.add_argument_group("task").add_argument
    text = "folder of tools/make_causal_sets.py, or of tools/convert_causal_sets.py"
    add("--data", default="data/causal_sets", help=text)
    text = "labels to learn: cls, dim, manifold, or those of your own data"
    add("--tasks", nargs="+", default=["cls"], help=text)
    kinds = range(6)
    text = "columns: in_degree out_degree past_height future_height past_size future_size"
    add("--features", nargs="+", type=int, default=[0, 1, 2, 3], choices=kinds, help=text)

    add = parser.add_argument_group("model").add_argument
    add("--hidden_dim", type=count, default=64, help="width")
    add("--num_layers", type=count, default=3, help="layers of message passing")
    kinds = ["mean", "sum", "gcn", "none"]
    add("--messages", default="mean", choices=kinds, help="over neighbours; none: no messages")
    add("--bidirectional", **FLAG, default=True, help="messages from the future, too")
    add("--skip", **FLAG, default=True, help="residual connections")
    add("--dropout", type=float, default=0.0, help="after each layer")
    kinds = ["mean", "max", "sum"]
    add("--pooling", nargs="+", default=kinds, choices=kinds, help="from elements to sets")
    add("--head_dim", type=count, default=64, help="hidden width of a head")

    add = parser.add_argument_group("optimization").add_argument
    add("--num_epochs", type=count, default=15, help="passes over the training sets at most")
    add("--lr", type=float, default=1e-3, help="peak learning rate")
    add("--weight_decay", type=float, default=5e-5, help="of matrices; biases and norms: 0")
    kinds = ["onecycle", "constant"]
    add("--schedule", default="onecycle", choices=kinds, help="of the learning rate")
    add("--warmup", type=float, default=0.3, help="share of the run (onecycle)")

    add = parser.add_argument_group("validation, after every epoch").add_argument
    add("--eval_edges", type=count, default=32_768, help="elements and edges per forward pass")
    text = "what --patience watches, such as: loss cls/f1_macro; the first also chooses best.pt"
    add("--stop_metrics", nargs="+", default=["loss"], help=text)
    add("--patience", type=int, default=0, help="epochs without a gain that end it; 0: never")
    kinds = ["any", "all"]
    add("--stop_mode", default="any", choices=kinds, help="of --stop_metrics that must get better")
    add("--delta", type=float, default=0.0, help="better means by more than this")
    add("--grace", type=int, default=0, help="epochs before patience counts")

    add = parser.add_argument_group("section parallel: of the original's files").add_argument
    add("--world_size", type=count, help="as --nproc_per_node")
    add("--master_addr", help="as the environment variable MASTER_ADDR")
    add("--master_port", help="as the environment variable MASTER_PORT")
    add("--rank", help=argparse.SUPPRESS)
    add("--output_device", help=argparse.SUPPRESS)

    add_common_arguments(parser, output_dir="outputs/quantumgrav", batch_size=64)
    args = parse_with_config(parser)

    if args.rank or args.output_device:
        parser.error("--rank, --output_device: leave them out, the launcher and DDP choose them")
    metrics = ["loss"]
    for task in args.tasks:
        metrics += [f"{task}/{name}" for name in METRICS]
    for name in args.stop_metrics:
        if name not in metrics:
            parser.error(f"--stop_metrics {name}: expected some of {', '.join(metrics)}")
    below = {"lr": math.inf, "weight_decay": math.inf, "dropout": 1, "warmup": 1}
    for name, limit in below.items():
        if not 0 <= getattr(args, name) < limit:
            parser.error(f"--{name} {getattr(args, name)}: must be from 0 to below {limit}")
    if args.world_size and args.nproc_per_node == 1:
        args.nproc_per_node = args.world_size
    for name in ("master_addr", "master_port"):
        if getattr(args, name):
            os.environ.setdefault(name.upper(), getattr(args, name))
    return args


# --------------------------------------------------------------------------------------------------
# Data


class Batch(NamedTuple):
    """Sets of different sizes, not padded but laid one after the other, as one big graph in which
    no edge leads from one set to another. Elements are numbered through."""

    features: torch.Tensor  # (N, F) float32
    sizes: torch.Tensor  # (B,) int64, elements per set
    # Edges, once by their later element: past_degree = [0, 1, 2] with past = [0, 0, 1] means that
    # element 1 has an edge from element 0, and element 2 has edges from the elements 0 and 1 ...
    past: torch.Tensor  # (E,) int32
    past_degree: torch.Tensor  # (N,) int32
    # ... and once by their earlier element: these are the edges to the future.
    future: torch.Tensor  # (E,) int32
    future_degree: torch.Tensor  # (N,) int32
    labels: torch.Tensor  # (B, T) int64, -1 where there is none
    counts: torch.Tensor  # (T,) int64, labelled sets of the global batch: the loss is divided by it

    def to(self, device):
        return Batch(*[tensor.to(device, non_blocking=True) for tensor in self])


class CausalSets(Dataset):
    """A folder of tools/make_causal_sets.py, mapped into memory that the ranks of a node share."""

    def __init__(self, folder, tasks, columns):
        self.hash, meta = read_meta(folder)
        names = list(meta["classes"])
        if not set(tasks) <= set(names):
            raise InputError(f"--tasks {' '.join(tasks)}: {folder} has {', '.join(names)}")
        arrays = "node_ptr edge_ptr features labels split past past_degree future future_degree"
        for name in arrays.split():
            array = np.load(folder / f"{name}.npy", mmap_mode="r")
            setattr(self, name, np.asarray(array))  # still mapped; np.memmap itself is slower
        self.baselines = json.loads((folder / "baselines.json").read_text())
        self.columns = columns
        self.classes = {task: meta["classes"][task] for task in tasks}
        self.labels = self.labels[:, [names.index(task) for task in self.classes]]
        self.sizes = np.diff(self.node_ptr)  # elements of each set
        self.edges = np.diff(self.edge_ptr)
        self.cost = self.sizes + self.edges  # time and memory of a set grow with it
        for name in ("train", "valid", "test"):
            if (self.labels[self.part(name)] < 0).all(axis=0).any():
                raise InputError(f"{folder}: a task of --tasks has no label in the {name} part")

    def part(self, name):
        """Numbers of the sets to train on, to validate on or to test on."""
        return np.flatnonzero(self.split == ["train", "valid", "test"].index(name))

    def __getitem__(self, item):
        """item: (ids, whole), the sets of a micro-batch, and those of the whole global batch."""
        ids, whole = item
        nodes = ragged_rows(self.node_ptr, ids)
        edges = ragged_rows(self.edge_ptr, ids)
        # edges are stored with elements numbered from 0 in each set, which starts here at `first`
        first = np.cumsum(self.sizes[ids]) - self.sizes[ids]
        shift = np.repeat(first.astype(np.int32), self.edges[ids])
        return Batch(
            # degrees and heights range over orders of magnitude: hence their logarithm
            torch.from_numpy(self.features.take(nodes, axis=0)[:, self.columns]).log1p(),
            torch.from_numpy(self.sizes[ids]),
            torch.from_numpy(self.past.take(edges) + shift),
            torch.from_numpy(self.past_degree.take(nodes).astype(np.int32)),
            torch.from_numpy(self.future.take(edges) + shift),
            torch.from_numpy(self.future_degree.take(nodes).astype(np.int32)),
            torch.from_numpy(self.labels[ids]),
            torch.from_numpy((self.labels[whole] >= 0).sum(0)),
        )


def ragged_rows(ptr, ids):
    """The rows of the sets `ids` in an array where set i has rows ptr[i] to ptr[i + 1] - 1."""
    lengths = ptr[ids + 1] - ptr[ids]
    first = np.cumsum(lengths) - lengths
    return np.arange(lengths.sum()) + np.repeat(ptr[ids] - first, lengths)


def read_meta(folder):
    """(hash of the folder, content of its meta.json)"""
    if not (folder / "meta.json").exists():
        hint = "for sets of your own: tools/convert_causal_sets.py"
        text = f"no data in {folder}: python tools/make_causal_sets.py --out {folder}; {hint}"
        raise InputError(text)
    text = (folder / "meta.json").read_text()
    try:
        meta = json.loads(text)
        if "classes" not in meta or "sha256" not in meta:
            raise ValueError
    except (TypeError, ValueError):
        text = f"{folder}/meta.json is damaged, or another tool's: make the folder again"
        raise InputError(text) from None
    return hashlib.sha256(text.encode()).hexdigest()[:12], meta


def check_data(folder):
    """The hash of the folder, once its arrays are found to be as they were written. (rank 0)"""
    data_hash, meta = read_meta(folder)
    for name, written in meta["sha256"].items():
        path = folder / f"{name}.npy"
        try:
            found = hashlib.sha256(np.load(path, mmap_mode="r")).hexdigest()
        except (OSError, EOFError, ValueError) as error:
            found = str(error)
        if found != written:
            raise InputError(f"{path} is missing or damaged: remove {folder}, and make it again")
    if not (folder / "baselines.json").exists():
        raise InputError(f"{folder}/baselines.json is missing: remove {folder}, and make it again")
    return data_hash


# --------------------------------------------------------------------------------------------------
# Model


warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")


class Neighbours:
    """For each element the weighted sum over its neighbours in one direction, past or future.

    Weights: 1 (sum), 1 / degree (mean), or those of D^-1/2 (A + 1) D^-1/2, with D the degrees and
    self-loops counted (gcn: Kipf and Welling 2017). On CPUs the sum is a product with a sparse
    matrix, which is 2 to 8 times as fast there; elsewhere it is index_select and index_add."""

    def __init__(self, kind, columns, degree, back_columns, back_degree):
        """columns (E,): the neighbours of each element in turn; degree (N,): how many.
        back_*: the same edges in the other direction, for the transposed matrix."""
        row_scale = torch.ones_like(degree, dtype=torch.float32)
        column_scale = row_scale
        self.self_loop = None
        if kind == "mean":
            row_scale = 1 / degree.clamp(min=1)
        elif kind == "gcn":
            row_scale = (degree + 1).rsqrt()
            column_scale = row_scale
            self.self_loop = (row_scale * column_scale)[:, None]
        self.columns = columns
        self.rows, self.weight = weigh_edges(columns, degree, row_scale, column_scale)
        self.matrix = None
        if columns.device.type == "cpu":
            self.matrix = sparse_matrix(columns, degree, self.weight)
            _, back_weight = weigh_edges(back_columns, back_degree, column_scale, row_scale)
            self.transpose = sparse_matrix(back_columns, back_degree, back_weight)

    def __call__(self, x):
        """(N, D) -> (N, D)"""
        x = x.float()  # sums of many numbers stay in fp32, under autocast, too
        if self.matrix is not None:
            return SparseProduct.apply(x, self)
        messages = x.index_select(0, self.columns) * self.weight[:, None]
        total = torch.zeros_like(x).index_add(0, self.rows, messages)
        if self.self_loop is not None:
            total = total + x * self.self_loop
        return total

    def multiply(self, matrix, x):
        # added to a tensor of our own: `matrix @ x` copies the result twice
        if self.self_loop is None:
            return x.new_empty(x.shape).addmm_(matrix, x, beta=0)
        return (x * self.self_loop).addmm_(matrix, x)


class SparseProduct(torch.autograd.Function):
    """The matrix of Neighbours times x. The gradient of x is the transposed matrix times that of
    the product. Both matrices are at hand, so that nothing is sorted here."""

    @staticmethod
    def forward(ctx, x, neighbours):
        ctx.neighbours = neighbours
        return neighbours.multiply(neighbours.matrix, x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.neighbours.multiply(ctx.neighbours.transpose, gradient), None


def weigh_edges(columns, degree, row_scale, column_scale):
    """The row of each edge: 0 degree[0] times, 1 degree[1] times, and so on; and its weight."""
    # with output_size nothing is read back from the GPU
    rows = torch.repeat_interleave(degree, output_size=len(columns))
    return rows, row_scale.index_select(0, rows) * column_scale.index_select(0, columns)


def sparse_matrix(columns, degree, values):
    """(N, N), row i with the next degree[i] of `values` in the next degree[i] of `columns`."""
    ptr = F.pad(degree.cumsum(0), (1, 0)).int()
    size = (len(degree), len(degree))
    return torch.sparse_csr_tensor(ptr, columns, values, size, check_invariants=False)


class MessageLayer(nn.Module):
    """Messages, normalisation, activation, residual connection, dropout: (N, inputs) -> (N, D)."""

    def __init__(self, inputs, directions, args):
        super().__init__()
        width = args.hidden_dim
        # messages from each direction, and the element itself (gcn: its self-loop is a message)
        self.add_self = args.messages != "gcn"
        parts = directions + 1 if self.add_self else directions
        self.linear = nn.Linear(inputs * parts, width)
        # LayerNorm, not BatchNorm: a set's output must not depend on who else is in the batch
        self.norm = nn.LayerNorm(width)
        self.dropout = args.dropout
        self.skip = None
        if args.skip:
            self.skip = nn.Identity() if inputs == width else nn.Linear(inputs, width, bias=False)

    def forward(self, x, neighbours):
        """neighbours: a Neighbours for each direction"""
        parts = [sum_of_neighbours(x) for sum_of_neighbours in neighbours]
        if self.add_self:
            parts.append(x)
        y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        y = F.relu(self.norm(self.linear(y)))
        if self.skip is not None:
            y = y + self.skip(x)
        if self.training and self.dropout > 0:
            y = dropout(y, self.dropout)
        return y


def dropout(x, share):
    """F.dropout. On CPUs drawing a random number for each element takes longer than the rest of a
    layer: there, each draw of 64 bits serves four elements."""
    if x.device.type != "cpu":
        return F.dropout(x, share)
    draws = torch.empty(math.ceil(x.numel() / 4), dtype=torch.int64).random_(-(2**63), None)
    uniform = draws.view(torch.int16)[: x.numel()].view(x.shape)  # from -32768 to 32767
    keep = (uniform >= round(65536 * share) - 32768).to(x.dtype)
    return x * (keep / (1 - share))


class CausalSetNet(nn.Module):
    """Message passing, pooling over each set, and one head per task."""

    def __init__(self, args, classes):
        super().__init__()
        self.kind = args.messages
        self.pooling = args.pooling
        self.directions = 2 if args.bidirectional else 1
        if args.messages == "none":
            self.directions = 0
        widths = [len(args.features)] + [args.hidden_dim] * args.num_layers
        self.layers = nn.ModuleList([MessageLayer(w, self.directions, args) for w in widths[:-1]])
        pooled = widths[-1] * len(args.pooling) + 1  # and the size of the set
        self.norm = nn.LayerNorm(pooled)
        self.heads = nn.ModuleDict()
        for task, names in classes.items():
            hidden = nn.Linear(pooled, args.head_dim)
            output = nn.Linear(args.head_dim, len(names))
            self.heads[task] = nn.Sequential(hidden, nn.ReLU(), output)

    def forward(self, batch):
        """{task: (B, classes) logits}"""
        past = (batch.past, batch.past_degree)
        future = (batch.future, batch.future_degree)
        directions = [past + future, future + past]
        neighbours = [Neighbours(self.kind, *edges) for edges in directions[: self.directions]]
        x = batch.features
        for layer in self.layers:
            x = layer(x, neighbours)
        x = self.norm(pool(x.float(), batch.sizes, self.pooling))
        return {task: head(x).float() for task, head in self.heads.items()}


class SetMaximum(torch.autograd.Function):
    """The maximum over the elements of each set. Where several elements have it (after a ReLU many
    are 0), they share the gradient evenly. scatter_reduce does that, too, in twice the time;
    segment_reduce gives each of them all of a negative gradient."""

    @staticmethod
    def forward(ctx, x, owner, sets):
        """x (N, D); owner (N,): the set of each element -> (sets, D)"""
        lowest = x.new_full((sets, x.shape[1]), -math.inf)
        maximum = lowest.scatter_reduce_(0, owner[:, None].expand_as(x), x, "amax")
        ctx.save_for_backward(x, owner, maximum)
        return maximum

    @staticmethod
    def backward(ctx, gradient):
        x, owner, maximum = ctx.saved_tensors
        # 1 where x is the maximum, else 0: a quarter of the time of `==` and .to(x.dtype)
        has_it = (x - maximum.index_select(0, owner)).sign().add_(1)
        sharers = torch.zeros_like(maximum).index_add_(0, owner, has_it)
        return has_it * (gradient / sharers).index_select(0, owner), None, None


def pool(x, sizes, kinds):
    """(N, D), (B,) -> (B, len(kinds) D + 1): over the elements of each set, and the logarithm of
    its size, which a mean or a maximum cannot see."""
    owner = torch.repeat_interleave(sizes, output_size=len(x))
    total = x.new_zeros(len(sizes), x.shape[1]).index_add(0, owner, x)
    pooled = {"sum": total, "mean": total / sizes[:, None]}
    if "max" in kinds:
        pooled["max"] = SetMaximum.apply(x, owner, len(sizes))
    parts = [pooled[kind] for kind in kinds]
    return torch.cat([*parts, sizes.log()[:, None]], dim=1)


# --------------------------------------------------------------------------------------------------
# Loss


def share_of_loss(logits, batch):
    """What this micro-batch adds to the mean cross entropy of the global batch.

    Why not the mean over the micro-batch? Ranks may have different numbers of labelled sets, and a
    mean of such means is not the mean. So each share is divided by the count of the whole global
    batch, and the shares are summed: over micro-batches by backward(), over ranks by DDP, which
    takes their mean, times the number of ranks (see `train`)."""
    loss = 0.0
    for i, output in enumerate(logits.values()):
        labels = batch.labels[:, i]
        total = F.cross_entropy(output, labels, ignore_index=-1, reduction="sum")
        loss = loss + total / batch.counts[i].clamp(min=1)
    return loss


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
# Evaluation

METRICS = ["loss", "accuracy", "f1_macro", "f1_weighted", "ece"]  # of a task
FALLING = ("loss", "ece")  # endings of the metrics that should fall; all others should rise


def classification(logp, labels):
    """METRICS of log-probabilities (n, K) and labels (n,); ece as in Guo et al. (2017)."""
    loss = -logp[np.arange(len(labels)), labels].mean()
    guess = logp.argmax(1)
    confidence = np.nan_to_num(np.exp(logp.max(1)))  # of a network that gives NaN, too
    bins = np.minimum((confidence * 15).astype(int), 14)
    gaps = np.bincount(bins, weights=(guess == labels) - confidence)  # sum of each bin
    return {
        "loss": float(loss),
        "accuracy": float((guess == labels).mean()),
        "f1_macro": float(f1_score(labels, guess, average="macro")),
        "f1_weighted": float(f1_score(labels, guess, average="weighted")),
        "ece": float(np.abs(gaps).sum() / len(labels)),
    }


@torch.no_grad()
def predict(model, data, ids, args, device, guard):
    """{task: log-probabilities (len(ids), classes)}, or None if the ranks agreed to stop. Batch k
    goes to rank k % world_size, each set once: the same on any world size. In fp32 without
    torch.compile, whatever training uses. (all ranks)"""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    # a batch ends where the elements and edges so far pass a multiple of --eval_edges
    number = np.cumsum(data.cost[ids]) // args.eval_edges
    batches = np.split(np.arange(len(ids)), np.flatnonzero(np.diff(number)) + 1)
    logp = {}
    for task, names in data.classes.items():
        logp[task] = torch.zeros(len(ids), len(names), dtype=torch.float64, device=device)
    model.eval()
    for first in range(0, len(batches), world_size):
        if guard.agree():  # here and not once at the end: an evaluation may take long
            return None
        if first + rank < len(batches):
            rows = batches[first + rank]
            for task, logits in model(data[ids[rows], ids[rows]].to(device)).items():
                logp[task][rows[0] : rows[-1] + 1] = logits.double().log_softmax(dim=1)
    model.train()
    for part in logp.values():
        dist.all_reduce(part)  # each row is zero on all ranks but one
    return {task: part.cpu().numpy() for task, part in logp.items()}


def evaluate(logp, data, ids):
    """Metrics of all tasks, from log-probabilities of the sets `ids`. loss_se: standard error."""
    metrics = {"loss": 0.0, "loss_se": 0.0}
    deviation = np.zeros(len(ids))  # of a set's loss from the mean, summed over the tasks
    for i, task in enumerate(data.classes):
        labels = data.labels[ids, i]
        known = labels >= 0
        task_metrics = classification(logp[task][known], labels[known])
        metrics["loss"] += task_metrics["loss"]
        for name, value in task_metrics.items():
            metrics[f"{task}/{name}"] = value
        losses = -logp[task][known, labels[known]]
        deviation[known] += (losses - losses.mean()) / known.mean()
    metrics["loss_se"] = float(deviation.std() / math.sqrt(len(ids)))
    return metrics


def is_better(name, value, best, delta=0.0):
    """Whether a metric is better than `best` (None: there is none yet) by more than delta.
    What is not a number is never better."""
    if best is None:
        return math.isfinite(value)
    if name.endswith(FALLING):
        return value < best - delta
    return value > best + delta


def count_patience(loop, metrics, args):
    """Count the epochs without a gain, after an epoch. The count starts anew when any, or all, of
    the metrics get better. With `all`, one that gets better alone keeps its old best value."""
    patience = loop["patience"]
    gained = {}
    for name in args.stop_metrics:
        if is_better(name, metrics[name], patience["best"].get(name), args.delta):
            gained[name] = metrics[name]
    needed = len(set(args.stop_metrics)) if args.stop_mode == "all" else 1
    if len(gained) >= needed:
        patience["best"].update(gained)
        patience["waited"] = 0
    elif loop["validated"] > args.grace:
        patience["waited"] += 1


def is_best(loop, metrics, args):
    """Whether this epoch is the best so far, by the first of --stop_metrics; then it is noted."""
    metric = args.stop_metrics[0]
    best = loop["best"]
    before = best["value"] if best and best["metric"] == metric else None
    if not is_better(metric, metrics[metric], before):
        return False
    loop["best"] = {"metric": metric, "value": metrics[metric], "step": loop["step"]}
    loop["best"]["better"] = "lower" if metric.endswith(FALLING) else "higher"
    return True


def is_done(loop, args, steps):
    """Whether all steps are made, or patience is over."""
    return loop["step"] >= steps or 0 < args.patience <= loop["patience"]["waited"]


# --------------------------------------------------------------------------------------------------
# Train


def lr_factor(args, step, steps):
    """What the peak rate is multiplied by. onecycle: half a cosine up from 1/25, and half a cosine
    down to 0 (Smith and Topin 2018)."""
    if args.schedule == "constant":
        return 1.0
    rise = max(1, round(args.warmup * steps))
    if step < rise:
        up = (step + 1) / (rise + 1)
        return 0.04 + 0.96 * (0.5 - 0.5 * math.cos(math.pi * up))
    return 0.5 + 0.5 * math.cos(math.pi * (step - rise) / (steps - rise))


def make_optimizer(args, model):
    # Weight decay pulls towards zero. That helps matrices; a bias or a norm's scale needs its size.
    decay = [p for p in model.parameters() if p.ndim > 1]
    no_decay = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decay}, {"params": no_decay, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=args.lr, weight_decay=args.weight_decay, fused=True)


def validate(args, device, data, model, loop, guard, log):
    """The metrics of the validation set, logged; None if the ranks agreed to stop. (all ranks)"""
    ids = data.part("valid")
    logp = predict(model, data, ids, args, device, guard)
    if logp is None:
        return None
    # by rank 0 for all, who decide by it: another processor might round differently
    metrics = on_rank0(evaluate, logp, data, ids)
    loss = metrics["loss"]
    logging.info(f"Validation: loss={loss:.3f} ± {metrics['loss_se']:.3f}")
    row = {f"val/{name}": value for name, value in metrics.items()}
    log.write({"step": loop["step"], "epoch": loop["validated"], **row})
    if not math.isfinite(loss):
        raise RunError(f"the validation loss is {loss}: lower --lr, and start with --fresh")
    return metrics


def train(args, device, data, model, state, guard, log):
    """Returns where training stands: its step, its best epoch, and more. (all ranks)"""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    sampler = GlobalBatchSampler(data.part("train"), args, state, data.cost)
    steps = args.num_epochs * sampler.steps
    # Even without workers this keeps a GPU busy: nothing in a step waits for it. While it computes,
    # the host prepares the next batch and queues its copy, from pinned memory. If preparing takes
    # longer than computing (data_wait is high), give --num_workers.
    loader = DataLoader(
        data,
        batch_size=None,  # our sampler makes whole batches
        sampler=sampler,
        num_workers=args.num_workers,
        persistent_workers=args.num_workers > 0,
        pin_memory=device.type != "cpu",
        worker_init_fn=ignore_signals,
    )

    optimizer = make_optimizer(args, model)
    dtype = choose_precision(args, device)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    ddp_model = wrap_ddp(model, args, device)
    generator = default_generator(device)
    # all that the loop must know to go on: it is saved with the weights
    loop = {
        "step": 0,
        "validated": 0,  # epochs
        "best": None,
        "patience": {"best": {}, "waited": 0},
        "global_batch": sampler.global_batch,
    }
    if state:
        restore(state, model, optimizer, scaler)
        loop = {name: state[name] for name in loop}
        if is_done(loop, args, steps):
            logging.info("nothing is left to train: the test follows, with the options of then")
            log.args = argparse.Namespace(**state["args"])

    def save(name):
        content = {"script": SCRIPT, "format": FORMAT, "data_hash": data.hash, "args": vars(args)}
        content.update(loop, wandb_id=log.wandb_id, log_size=log.size(), classes=data.classes)
        content["model"] = model.state_dict()
        content["optimizer"] = optimizer.state_dict()
        content["scaler"] = scaler.state_dict()
        on_rank0(save_checkpoint, Path(args.output_dir), name, content)

    logging.info("Starting distributed training...")
    bar = tqdm(total=steps, initial=loop["step"], disable=rank > 0 or not sys.stderr.isatty())
    batches = None
    began = time.monotonic()
    since = loop["step"]
    data_wait = 0.0
    sums = torch.zeros(3, device=device)  # loss, gradient norm, steps; without skipped steps
    while not guard.reason:
        step = loop["step"]
        epoch, position = divmod(step, sampler.steps)

        # after every epoch: validate and decide; all ranks have the same metrics, and so agree
        if epoch > loop["validated"]:
            paused = time.monotonic()
            metrics = validate(args, device, data, model, loop, guard, log)
            if metrics is None:  # the ranks stop: this step's checkpoint was made before
                break
            loop["validated"] = epoch
            count_patience(loop, metrics, args)
            if is_best(loop, metrics, args):
                logging.info(f"Found better model at epoch {epoch - 1}.")
                logging.info(f"Saving checkpoint for model at epoch {epoch - 1}")
                save("best.pt")
            if is_done(loop, args, steps):
                save("latest.pt")  # the same command, given again, then knows that all is done
            began += time.monotonic() - paused
        if is_done(loop, args, steps):
            break

        if position == 0 or batches is None:
            logging.info(f"Starting training epoch {epoch}")
            sampler.set_epoch(epoch, start=position)
            batches = iter(loader)

        # Dropout depends on (seed, step, rank) alone. A run that is resumed, or killed and started
        # again, draws the same, and there is no random state to be saved. (The factors keep
        # steps below 1,000,003 and ranks below 4,099 apart.)
        generator.manual_seed((args.seed * 1_000_003 + step) * 4099 + rank)
        lr = args.lr * lr_factor(args, step, steps)
        for group in optimizer.param_groups:
            group["lr"] = lr

        # forward and backward, micro-batch by micro-batch
        step_loss = torch.zeros((), device=device)
        for micro in range(1, sampler.accumulation + 1):
            asked = time.monotonic()
            batch = next(batches).to(device)
            data_wait += time.monotonic() - asked
            # gradients are added up over the ranks in the last micro-batch only
            sync = contextlib.nullcontext()
            if world_size > 1 and micro < sampler.accumulation:
                sync = ddp_model.no_sync()
            with sync:
                with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                    loss = share_of_loss(ddp_model(batch), batch)
                scaler.scale(loss * world_size).backward()  # DDP takes the mean, we want the sum
            step_loss += loss.detach()

        # update, unless the gradient is not finite; then the step counts in no mean, either
        norm = guard.update(optimizer, scaler)
        values = torch.stack([step_loss, norm, torch.ones_like(norm)])
        sums += torch.where(norm.isfinite(), values, 0.0)
        step += 1
        loop["step"] = step
        bar.update()

        # once in a while: log. Here the host waits for the GPU. (all ranks)
        if step % args.log_every == 0 or step == steps:
            loss_sum, norm_sum, good = sum_over_ranks(sums)
            seconds = time.monotonic() - began
            made = step - since
            row = {"step": step, "epoch": epoch, "lr": lr, "skipped": made - good / world_size}
            if good > 0:
                row["loss"] = loss_sum * world_size / good  # each rank has a share of the loss ...
                row["grad_norm"] = norm_sum / good  # ... and all of the norm
            row["samples_per_s"] = made * sampler.global_batch / seconds
            row["data_wait"] = data_wait / seconds
            log.write(row)
            began = time.monotonic()
            since = step
            data_wait = 0.0
            sums.zero_()

        # save; also before a validation, which may be long and may be interrupted (all ranks)
        reason = guard.agree()
        if reason or step % args.save_every == 0 or step % sampler.steps == 0:
            save("latest.pt")
    bar.close()
    if is_done(loop, args, steps) and loop["step"] < steps:
        logging.info(f"Stopped early: no gain in {loop['patience']['waited']} epochs")
    return loop


# --------------------------------------------------------------------------------------------------
# Main


def write_predictions(folder, data, ids, logp):
    """predictions.npz, and a confusion matrix for each task. (rank 0)"""
    from matplotlib.figure import Figure

    arrays = {f"logp_{task}": logp[task] for task in logp}
    np.savez(folder / "predictions.npz", ids=ids, labels=data.labels[ids], **arrays)
    for i, (task, names) in enumerate(data.classes.items()):
        labels = data.labels[ids, i]
        known = labels >= 0
        guess = logp[task][known].argmax(1)
        counts = confusion_matrix(labels[known], guess, labels=range(len(names)), normalize="true")
        axis = Figure((2 + len(names), 2 + len(names)), layout="constrained").add_subplot()
        ConfusionMatrixDisplay(counts, display_labels=names).plot(ax=axis, colorbar=False)
        axis.figure.savefig(folder / f"confusion_{task}.png")


def report(args, data, ids, logp):
    """Metrics of the test, logged beside the accuracies of what needs no network. Returns both.
    (rank 0)"""
    metrics = evaluate(logp, data, ids)
    logging.info("test " + " ".join(f"{name}={value:.4f}" for name, value in metrics.items()))
    baselines = {task: data.baselines[task] for task in data.classes}
    for task, accuracies in baselines.items():
        accuracy = metrics[f"{task}/accuracy"]
        for name, value in {**accuracies, "this network": accuracy}.items():
            logging.info(f"test accuracy  {task:10} {name:20} {value:.4f}")
        if any(value > accuracy for value in accuracies.values()):
            logging.warning(f"{task}: the network is worse than what needs no network")
    try:
        write_predictions(Path(args.output_dir), data, ids, logp)
    except OSError as error:  # a full disk: no reason to fail a run that is over
        logging.warning(f"no predictions.npz or no confusion matrix: {error}")
    return {"test": metrics, "baselines": baselines}


def test(args, device, data, model, loop, guard):
    """The best weights on the test set; {} if the ranks agreed to stop. (all ranks)"""
    logging.info("Starting testing phase...")
    path = Path(args.output_dir) / "best.pt"
    state = load_checkpoint(path) if on_rank0(is_whole, path) else {}
    if loop["best"] and state.get("step") == loop["best"]["step"]:
        model.load_state_dict(state["model"])
    else:
        reason = "is missing, damaged, or not of the best epoch (a full disk?)"
        logging.warning(f"{path} {reason}: the last weights are tested")
    ids = data.part("test")
    logp = predict(model, data, ids, args, device, guard)
    if logp is None:
        return {}
    return on_rank0(report, args, data, ids, logp)


def main(args):
    device = setup_ddp(args)
    logging.info("Preparing data loaders...")
    folder = Path(args.data)
    data_hash = on_rank0(check_data, folder)
    data = CausalSets(folder, args.tasks, args.features)
    if data.hash != data_hash:
        raise InputError(f"{folder} is not the same here as on rank 0")
    logging.info("Data split complete:")
    for title, part in [("Training", "train"), ("Validation", "valid"), ("Test", "test")]:
        logging.info(f"  {title + ' samples:':19} {len(data.part(part)):,}")
    state = open_run(args, data.hash)
    # with others the weights, or their momenta, would fit, but mean something else
    for name in ("tasks", "features", "messages", "pooling"):
        if state and state["args"][name] != getattr(args, name):
            text = f"this run was started with {state['args'][name]}"
            raise InputError(f"--{name}: {text}; --fresh moves the old run aside")
    torch.manual_seed(args.seed)  # the same weights on all ranks
    model = CausalSetNet(args, data.classes).to(device)
    logging.info(f"{sum(p.numel() for p in model.parameters()):,} parameters")

    guard = StepGuard(args, device)
    log = RunLog(args, state)
    loop = train(args, device, data, model, state, guard, log)
    tested = {}
    if not guard.reason:
        logging.info("Training process completed.")
        tested = test(args, device, data, model, loop, guard)
    status = f"stopped by {guard.reason}" if guard.reason else "finished"
    log.close(status=status, steps=loop["step"], best=loop["best"], **tested)
    if not guard.reason:
        logging.info("Training and testing completed successfully!")
    return exit_status(guard.reason)


if __name__ == "__main__":
    launch(parse_args, main)
