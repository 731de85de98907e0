"""Train a graph network on causal sets: is a partial order a piece of spacetime, and of which kind?

A causal set is a finite partial order: its elements are events, and the order is "is in the past
of" (Bombelli et al. 1987). The network sees elements and links (related pairs with nothing between
them) and says how the set was made. Tasks: cls, which of several kinds it is: points scattered in
Minkowski space of 2, 3 or 4 dimensions ("sprinklings"), or random orders that look like them; dim,
the dimension of a sprinkling; manifold, whether it is a sprinkling at all.

    python tools/make_causal_sets.py    # of the repository: 12,000 sets, data/causal_sets.npz
    torchrun --standalone --nproc_per_node=2 run_train_quantumgrav_ddp.py
    python run_train_quantumgrav_ddp.py --nproc_per_node 3 --lr 3e-4 --output_dir outputs/lr3
    mpiexec -n 12 python run_train_quantumgrav_ddp.py    # or srun

Data (--data): .npz files or zarr stores of arrays that count the sets by their first axis:
adjacency_matrix (sets, N, N), 1 where i is in the past of j, and all such i < j; atomcount, the
elements of each set; for each task an array of whole numbers (below 0: not known) or names. Or zarr
stores with groups cset_0, cset_1, ... of such arrays. Below, at "Reading", stand their other names.

Logged, over all ranks: step, epoch, lr, loss (cross entropy in nats per set, summed over the
tasks), grad_norm (before clipping), skipped (steps whose gradient was not finite), samples_per_s,
data_wait (share of the time). After every epoch: val/loss, and val/TASK/... loss, accuracy,
f1_macro, f1_weighted, ece (calibration error in 15 bins).

Files in --output_dir: latest.pt, previous.pt, best.pt, metrics.jsonl; at the end predictions.npz
and confusion_TASK.png (of the test set), summary.json, curves.png. The same command, given again,
goes on from latest.pt.

Below, "(all ranks)" means that every rank must call a function, in the same order, and "(rank 0)"
that only rank 0 does. The task comes first, then the reading of files, then what all scripts share.
"""

# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch>=2.11,<2.14", "numpy>=2.2,<3", "tqdm>=4.67,<5", "pyyaml>=6.0,<7", "wandb>=0.25,<1",
#     "matplotlib>=3.10,<4", "pandas>=2.2,<4", "scikit-learn>=1.7,<2", "zarr>=3,<4",
# ]
# ///

import argparse
import contextlib
import ctypes
import errno
import fcntl
import functools
import hashlib
import itertools
import json
import logging
import math
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import zipfile
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import yaml
from sklearn.metrics import ConfusionMatrixDisplay, f1_score
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

# --------------------------------------------------------------------------------------------------
# Arguments


def parse_args():
    parser = Parser(description=__doc__)
    add = parser.add_argument_group("task").add_argument
    text = "stores (.zarr) and files (.npz), in the layouts of QuantumGrav"
    add("--data", nargs="+", default=["data/causal_sets.npz"], help=text)
    add("--tasks", nargs="+", default=["cls"], help="labels to learn: arrays of the data")
    add("--cache_dir", default="cache", help="where what is read once is kept")
    add("--skip_bad_data", **FLAG, default=False, help="leave out damaged sets, and list them")
    add("--split", nargs=3, type=number(0, 1), default=[0.75, 0.1, 0.15], help="train valid test")
    add("--split_seed", type=number(0, kind=int), default=0, help="another one: another split")
    text = "what the network sees of an element, besides its links"
    add("--features", nargs="+", default=FEATURES[:4], choices=FEATURES, help=text)

    add = parser.add_argument_group("model").add_argument
    add("--hidden_dim", type=COUNT, default=64, help="width")
    add("--num_layers", type=COUNT, default=3, help="layers of message passing")
    kinds = ["mean", "sum", "none"]
    add("--messages", default="mean", choices=kinds, help="over neighbours; none: no messages")
    add("--dropout", type=number(0, 1), default=0.0, help="after each layer")
    add("--head_dim", type=COUNT, default=64, help="hidden width of a head")

    add = parser.add_argument_group("optimization").add_argument
    add("--num_epochs", type=COUNT, default=15, help="passes over the training sets at most")
    add("--lr", type=number(0), default=1e-3, help="peak learning rate")
    add("--weight_decay", type=number(0), default=5e-5, help="of matrices; biases and norms: 0")
    add("--warmup", type=number(0, 1), default=0.3, help="share of the run in which lr rises")

    add = parser.add_argument_group("validation, after every epoch").add_argument
    text = "what --patience watches, such as: loss cls/f1_macro; the first also chooses best.pt"
    add("--stop_metrics", nargs="+", default=["loss"], help=text)
    text = "epochs without a gain that end it; 0: never"
    add("--patience", type=number(0, kind=int), default=0, help=text)
    kinds = ["any", "all"]
    text = "a gain is when any, or all, of --stop_metrics get better"
    add("--stop_mode", default="any", choices=kinds, help=text)
    add("--delta", type=number(0), default=0.0, help="better means by more than this")
    text = "epochs at the start that --patience does not count"
    add("--grace", type=number(0, kind=int), default=0, help=text)

    add = parser.add_argument_group("section parallel: of QuantumGrav's files").add_argument
    add("--world_size", type=COUNT, help="as --nproc_per_node")
    text = "where the ranks of srun or mpiexec meet; the variable MASTER_ADDR wins"
    add("--master_addr", help=text)
    add("--master_port", help="and on which port; the variable MASTER_PORT wins")

    # fp32 on GPUs, too: a GPU waits for the host with a network this small, and casts are more work
    add_common_arguments(parser, output_dir="outputs/quantumgrav", batch_size=64, precision="fp32")
    args = parse_with_config(parser)

    if len(set(args.tasks)) < len(args.tasks):
        parser.error("--tasks: one is given twice")
    metrics = ["loss"]
    for task in args.tasks:
        metrics += [f"{task}/{name}" for name in METRICS]
    for name in args.stop_metrics:
        if name not in metrics:
            parser.error(f"--stop_metrics {name}: expected some of {', '.join(metrics)}")
    if args.nproc_per_node == 1 and args.world_size:
        args.nproc_per_node = args.world_size
    for name in ("master_addr", "master_port"):
        if getattr(args, name) and not os.environ.get(name.upper()):
            os.environ[name.upper()] = getattr(args, name)
    return args


# --------------------------------------------------------------------------------------------------
# Data


class Batch(NamedTuple):
    """Sets of different sizes, not padded but laid one after the other, as one big graph in which
    no edge leads from one set to another. Elements are numbered through.

    The neighbours of element i in its past are past[past_ptr[i] : past_ptr[i + 1]]; of its future
    likewise."""

    features: torch.Tensor  # (N, F) float32
    sizes: torch.Tensor  # (B,) int64, elements per set
    past: torch.Tensor  # (E,) int64
    past_ptr: torch.Tensor  # (N + 1,) int64
    future: torch.Tensor  # (E,) int64
    future_ptr: torch.Tensor  # (N + 1,) int64
    labels: torch.Tensor  # (B, T) int64, -1 where there is none
    counts: torch.Tensor  # (T,) int64, labelled sets of the global batch: the loss is divided by it

    def to(self, device):
        return Batch(*[tensor.to(device, non_blocking=True) for tensor in self])


class CausalSets(Dataset):
    """What `prepare` has written, mapped into memory that the ranks of a node share."""

    def __init__(self, folder, args):
        meta = json.loads((folder / "meta.json").read_text())
        self.classes = meta["classes"]
        self.hash = meta["hash"]
        for note in meta["notes"]:
            logging.warning(note)

        def load(name):
            # np.asarray: still mapped, and faster than np.memmap itself
            return np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r"))

        # rows node_ptr[i] to node_ptr[i + 1] - 1 of features belong to set i, and edge_ptr says the
        # same of past and future, the neighbours of its elements, counted within the set
        self.node_ptr = load("node_ptr")
        self.edge_ptr = load("edge_ptr")
        self.features = load("features")  # FEATURES of each element
        self.past = load("past")
        self.future = load("future")
        self.labels = load("labels")  # a column for each task, -1 where there is no label
        self.statistics = load("statistics")  # of each set, for the baselines
        self.original = load("original")  # the first set with the same order: mostly itself
        self.columns = [FEATURES.index(name) for name in args.features]
        self.split = split_sets(self.original, args.split, args.split_seed)
        for part in ("train", "valid", "test"):
            for task, labels in zip(self.classes, self.labels[self.part(part)].T, strict=True):
                self.count_classes(part, task, labels[labels >= 0])
        self.sizes = np.diff(self.node_ptr)  # elements of each set
        self.edges = np.diff(self.edge_ptr)
        self.cost = self.sizes + self.edges  # time and memory of a set grow with it

    def count_classes(self, part, task, labels):
        """Say how many sets of each class a part has. InputError where it has no labels."""
        names = self.classes[task]
        counts = np.bincount(labels, minlength=len(names))
        if not counts.any():
            raise InputError(f"--tasks {task}: no set of the {part} part has this label")
        texts = [f"{name} {count}" for name, count in zip(names, counts, strict=True)]
        logging.info(f"{part}, {task}: {', '.join(texts[:20])}")
        lacking = np.count_nonzero(counts == 0)
        if lacking > 0:
            logging.warning(f"{lacking} of the {len(names)} classes of {task} lack in {part}")

    def part(self, name):
        """Numbers of the sets to train on, to validate on or to test on."""
        return np.flatnonzero(self.split == ["train", "valid", "test"].index(name))

    def __getitem__(self, item):
        """item: (step, whole, places), the sets of the global batch, and which of them are in this
        micro-batch."""
        _, whole, places = item
        ids = whole[places]
        nodes = ragged_rows(self.node_ptr, ids)
        edges = ragged_rows(self.edge_ptr, ids)
        features = self.features[nodes]
        begin = np.cumsum(self.sizes[ids]) - self.sizes[ids]  # number of each set's first element
        begin = np.repeat(begin, self.edges[ids])
        return Batch(
            # degrees and heights range over orders of magnitude: hence their logarithm
            torch.from_numpy(features[:, self.columns]).log1p(),
            torch.from_numpy(self.sizes[ids]),
            torch.from_numpy(self.past[edges] + begin),
            pointers(features[:, FEATURES.index("in_degree")]),
            torch.from_numpy(self.future[edges] + begin),
            pointers(features[:, FEATURES.index("out_degree")]),
            torch.from_numpy(self.labels[ids]),
            torch.from_numpy((self.labels[whole] >= 0).sum(0)),
        )


def pointers(lengths):
    """(n,) -> (n + 1,) int64: where parts of these lengths begin, and where the last one ends."""
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))


def ragged_rows(ptr, ids):
    """The rows of the sets `ids` in an array where set i has rows ptr[i] to ptr[i + 1] - 1.
    With ptr [0, 2, 5] and ids [1, 0]: [2, 3, 4, 0, 1]."""
    lengths = ptr[ids + 1] - ptr[ids]
    begin = np.cumsum(lengths) - lengths
    return np.arange(lengths.sum()) + np.repeat(ptr[ids] - begin, lengths)


def split_sets(original, shares, seed):
    """(sets,) uint8: 0 train, 1 valid, 2 test, in these shares, rounded.

    original[i] is the first set with the order of set i: i itself, unless set i is a copy. Copies
    lie in one part, or the test would ask for what was learnt."""
    distinct = np.unique(original)
    count = len(distinct)
    if abs(sum(shares) - 1) > 1e-6 or min(shares) * count < 1:
        text = f"expected three shares, sum 1, each of at least one of the {count} sets"
        raise InputError(f"--split {shares}: {text}")
    ends = np.floor(np.cumsum(shares[:2]) * count + 0.5).astype(int)
    order = np.random.default_rng(seed).permutation(count)
    _, valid, test = np.split(distinct[order], ends)
    split = np.zeros(len(original), np.uint8)
    split[valid] = 1
    split[test] = 2
    return split[original]


# --------------------------------------------------------------------------------------------------
# Model


def sum_bags(x, rows, ptr):
    """(B, D): the sums of x[rows[ptr[i] : ptr[i + 1]]], made without a copy of these rows."""
    return F.embedding_bag(rows, x, ptr, mode="sum", include_last_offset=True)


class SumNeighbours(torch.autograd.Function):
    """(N, D) -> (N, D): for each element the sum of its neighbours' rows in one direction. Whoever
    is my neighbour in the past has me in its future: so the gradient is the sum in the other
    direction, which autograd does not know, and would find by sorting."""

    @staticmethod
    def forward(ctx, x, neighbours, ptr, others, others_ptr):
        ctx.save_for_backward(others, others_ptr)
        return sum_bags(x, neighbours, ptr)

    @staticmethod
    def backward(ctx, gradient):
        return sum_bags(gradient.contiguous(), *ctx.saved_tensors), None, None, None, None


class MessageLayer(nn.Module):
    """Messages, normalisation, activation, residual connection, dropout: (N, inputs) -> (N, D)."""

    def __init__(self, inputs, args):
        super().__init__()
        self.kind = args.messages
        # its neighbours in the past, those in the future, and the element itself
        parts = 1 if args.messages == "none" else 3
        self.linear = nn.Linear(inputs * parts, args.hidden_dim)
        # LayerNorm, not BatchNorm: a set's output must not depend on who else is in the batch
        self.norm = nn.LayerNorm(args.hidden_dim)
        self.skip = nn.Identity()
        if inputs != args.hidden_dim:
            self.skip = nn.Linear(inputs, args.hidden_dim, bias=False)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, x, batch):
        parts = [x]
        if self.kind != "none":
            past = (batch.past, batch.past_ptr)
            future = (batch.future, batch.future_ptr)
            parts = [self.messages(x, past, future), self.messages(x, future, past), x]
        y = F.relu(self.norm(self.linear(torch.cat(parts, dim=1))))
        return self.dropout(y + self.skip(x))

    def messages(self, x, there, back):
        """(N, D): for each element the sum or mean over its neighbours `there`, in one direction"""
        total = SumNeighbours.apply(x.float(), *there, *back)  # in fp32, under autocast, too
        if self.kind == "sum":
            return total
        degree = there[1].diff()
        return total / degree.clamp(min=1)[:, None]


class CausalSetNet(nn.Module):
    """Message passing, pooling over each set, and one head per task."""

    def __init__(self, args, classes):
        super().__init__()
        widths = [len(args.features)] + [args.hidden_dim] * (args.num_layers - 1)
        self.layers = nn.ModuleList([MessageLayer(width, args) for width in widths])
        pooled = 3 * args.hidden_dim + 1
        self.norm = nn.LayerNorm(pooled)
        self.tasks = list(classes)
        self.heads = nn.ModuleList()
        for names in classes.values():
            hidden = nn.Linear(pooled, args.head_dim)
            output = nn.Linear(args.head_dim, len(names))
            self.heads.append(nn.Sequential(hidden, nn.ReLU(), output))

    def forward(self, batch):
        """{task: (B, classes) logits}"""
        x = batch.features
        for layer in self.layers:
            x = layer(x, batch)
        x = self.norm(pool(x.float(), batch.sizes))
        return {task: head(x).float() for task, head in zip(self.tasks, self.heads, strict=True)}


def pool(x, sizes):
    """(N, D), (B,) -> (B, 3 D + 1): mean, maximum and sum over the elements of each set, and the
    logarithm of its size, which a mean or a maximum cannot see."""
    owner = torch.repeat_interleave(sizes, output_size=len(x))  # reads nothing back from a GPU
    index = owner[:, None].expand_as(x)
    # scatter_add with an expanded index: on CPUs it is many times as fast as index_add
    total = x.new_zeros(len(sizes), x.shape[1]).scatter_add(0, index, x)
    maximum = torch.full_like(total, -math.inf).scatter_reduce(0, index, x, "amax")
    return torch.cat([total / sizes[:, None], maximum, total, sizes.log()[:, None]], dim=1)


# --------------------------------------------------------------------------------------------------
# Loss


def share_of_loss(logits, batch):
    """What this micro-batch adds to the mean cross entropy of the global batch.

    Why not the mean over the micro-batch? Ranks may have different numbers of labelled sets, and a
    mean of such means is not the mean. So each share is divided by the count of the whole global
    batch, and the shares are summed: over micro-batches by backward(), over ranks by DDP, which
    takes their mean, times the number of ranks (see `train`). A task without labels in the global
    batch counts 0."""
    loss = 0.0
    for i, output in enumerate(logits.values()):
        labels = batch.labels[:, i]
        total = F.cross_entropy(output, labels, ignore_index=-1, reduction="sum")
        loss = loss + total / batch.counts[i].clamp(min=1)
    return loss


# --------------------------------------------------------------------------------------------------
# Evaluation

METRICS = ["loss", "accuracy", "f1_macro", "f1_weighted", "ece"]  # of a task


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
def predict(model, data, ids, args, device):
    """{task: log-probabilities (len(ids), classes)} on every rank, without autocast. Batch k goes
    to rank k % world_size: each set counts once, whatever the number of ranks. (all ranks)"""
    logp = {}
    for task, names in data.classes.items():
        logp[task] = torch.zeros(len(ids), len(names), device=device)

    model.eval()
    batches = np.array_split(np.arange(len(ids)), math.ceil(len(ids) / args.batch_size))
    for rows in batches[dist.get_rank() :: dist.get_world_size()]:
        batch = data[0, ids, rows].to(device)
        for task, logits in model(batch).items():
            logp[task][rows[0] : rows[-1] + 1] = logits.log_softmax(dim=1)
    model.train()

    for part in logp.values():
        dist.all_reduce(part)  # each row is zero on all ranks but one
    return {task: part.cpu().double().numpy() for task, part in logp.items()}


def evaluate(model, data, ids, args, device):
    """(metrics of the sets `ids`: their loss, and METRICS of each task; log-probabilities)
    (all ranks)"""
    logp = predict(model, data, ids, args, device)
    metrics = {"loss": 0.0}
    for i, task in enumerate(data.classes):
        labels = data.labels[ids, i]
        known = labels >= 0
        # All ranks decide by these, so one computes them: another processor might round otherwise.
        for name, value in on_rank0(classification, logp[task][known], labels[known]).items():
            metrics[f"{task}/{name}"] = value
        metrics["loss"] += metrics[f"{task}/loss"]
    return metrics, logp


def is_better(name, value, best, delta=0.0):
    """Whether a metric is better than `best` (None: there is none yet) by more than delta."""
    if best is None:
        return True
    if name.endswith(("loss", "ece")):
        return value < best - delta
    return value > best + delta


def note_epoch(loop, metrics, args):
    """Count the epochs without a gain in loop["waited"]. Returns whether this is the best epoch so
    far. A gain is when any, or all, of --stop_metrics get better than loop["bests"]; with `all`,
    one that gets better alone keeps its old best value."""
    gained = {}
    for name in args.stop_metrics:
        if is_better(name, metrics[name], loop["bests"].get(name), args.delta):
            gained[name] = metrics[name]
    needed = len(args.stop_metrics) if args.stop_mode == "all" else 1
    if len(gained) >= needed:
        loop["bests"].update(gained)
        loop["waited"] = 0
    elif loop["epoch"] > args.grace:
        loop["waited"] += 1

    first = args.stop_metrics[0]
    if not is_better(first, metrics[first], loop["best"].get("value")):
        return False
    loop["best"] = {"metric": first, "value": metrics[first], "step": loop["step"]}
    return True


# --------------------------------------------------------------------------------------------------
# Train


def lr_factor(args, step, steps):
    """What the peak rate is multiplied by: half a cosine up from 1/25, then half a cosine down to 0
    (Smith and Topin 2018)."""
    rise = round(args.warmup * steps)
    if step < rise:
        return 0.04 + 0.96 * (0.5 - 0.5 * math.cos(math.pi * step / rise))
    return 0.5 + 0.5 * math.cos(math.pi * (step - rise) / (steps - rise))


def make_optimizer(args, model):
    # Weight decay pulls towards zero. That helps matrices; a bias or a norm's scale needs its size.
    decay = [p for p in model.parameters() if p.ndim > 1]
    no_decay = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decay}, {"params": no_decay, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=args.lr, weight_decay=args.weight_decay, fused=True)


def train(args, device, data, model, state, log):
    """Returns why training was stopped, or "" if it has ended; and where it stands. (all ranks)"""
    world_size = dist.get_world_size()
    sampler = GlobalBatchSampler(data.part("train"), args, data.cost)
    steps = sampler.count_steps(args.num_epochs)
    optimizer = make_optimizer(args, model)
    autocast, scaler = choose_precision(args, device)
    # where training stands; and, for whoever loads the weights, the names of the outputs
    loop = {"step": 0, "epoch": 0, "bests": {}, "best": {}, "waited": 0, "classes": data.classes}
    if state:
        loop = restore(state, model=model, optimizer=optimizer, scaler=scaler)
    ddp_model = wrap_ddp(model, args, device)
    save = functools.partial(save_checkpoint, args=args, log=log, loop=loop, model=model)
    if loop["step"] == 0:
        save("latest.pt", optimizer=optimizer, scaler=scaler, must_succeed=True)
    sampler.start = loop["step"]
    batches = make_loader(data, sampler, args, device)

    logging.info("Starting distributed training...")
    bar = tqdm(total=steps, initial=loop["step"], disable=None if dist.get_rank() == 0 else True)
    meter = Meter(["loss"], args, device)
    reason = ""
    while not reason:
        step = loop["step"]
        epoch, position = divmod(step, sampler.steps)

        # An epoch is over: validate. All ranks have the same metrics, and so decide alike.
        if epoch > loop["epoch"]:
            metrics, _ = evaluate(model, data, data.part("valid"), args, device)
            reason = max(gather(wish_to_stop(args)))
            if reason:  # this validation is made again
                save("latest.pt", optimizer=optimizer, scaler=scaler, must_succeed=True)
                break
            row = {f"val/{name}": value for name, value in metrics.items()}
            log.write({"step": step, "epoch": epoch - 1, **row})
            if not math.isfinite(metrics["loss"]):
                text = f"the validation loss is {metrics['loss']}"
                raise RunError(f"{text}: --fresh and a lower --lr")
            loop["epoch"] = epoch
            before = loop["best"]
            if note_epoch(loop, metrics, args):
                logging.info(f"Found better model at epoch {epoch - 1}.")
                if not save("best.pt"):
                    loop["best"] = before
            meter.start()
        is_stopped_early = 0 < args.patience <= loop["waited"]
        if is_stopped_early:
            logging.info(f"Stopped early: no gain in {loop['waited']} epochs.")
        if is_stopped_early or step >= steps:
            save("latest.pt", optimizer=optimizer, scaler=scaler, must_succeed=True)
            break
        if position == 0:
            logging.info(f"Starting training epoch {epoch}")

        seed_step(args, step)
        lr = args.lr * lr_factor(args, step, steps)
        for group in optimizer.param_groups:
            group["lr"] = lr

        # forward and backward, micro-batch by micro-batch; the last one adds up over the ranks
        step_loss = torch.zeros(1, device=device)
        for micro in range(1, sampler.accumulation + 1):
            batch = meter.next_batch(batches, device)
            ddp_model.require_backward_grad_sync = micro == sampler.accumulation
            with autocast():
                loss = share_of_loss(ddp_model(batch), batch)
            scaler.scale(loss * world_size).backward()  # DDP takes the mean, we want the sum
            step_loss += loss.detach()
        norm = update_if_finite(args, optimizer, scaler)
        meter.add(step_loss, norm)
        loop["step"] += 1
        bar.update()

        # log and save; also before a validation, which may be interrupted
        must_save = loop["step"] % args.save_every == 0 or position == sampler.steps - 1
        row = {"step": loop["step"], "epoch": epoch, "lr": lr}
        reason = meter.meet(log, row, sampler.global_batch, must_save)
        if reason or must_save:
            save("latest.pt", optimizer=optimizer, scaler=scaler, must_succeed=bool(reason))
    bar.close()
    return reason, loop


# --------------------------------------------------------------------------------------------------
# Main


def measure_baselines(data):
    """{task: {name: test accuracy}} of what needs no network: the commonest class; logistic
    regression on counts of elements, pairs, links, chains; for a task `dim` or `dimension` that
    whose sprinklings have as many related pairs (Myrheim and Meyer: Meyer 1988). (rank 0)"""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    baselines = {}
    for column, (task, names) in enumerate(data.classes.items()):
        labels = data.labels[:, column]
        train = (labels >= 0) & (data.split == 0)
        test = (labels >= 0) & (data.split == 2)
        counts = data.statistics
        classifier = LogisticRegression(C=100, max_iter=2000)  # the default penalty costs accuracy
        model = make_pipeline(StandardScaler(), classifier)
        guesses = {"majority": np.bincount(labels[train]).argmax()}
        if len(np.unique(labels[train])) > 1:
            model.fit(np.log1p(counts[train]), labels[train])
            guesses["logistic regression"] = model.predict(np.log1p(counts[test]))
        if task in ("dim", "dimension") and all(name.isdigit() for name in names):
            found = myrheim_meyer(2 * counts[test, 1] / (counts[test, 0] * (counts[test, 0] - 1)))
            guesses["Myrheim-Meyer"] = np.abs(found[:, None] - np.array(names, float)).argmin(1)
        baselines[task] = {
            name: float((labels[test] == guess).mean()) for name, guess in guesses.items()
        }
    return baselines


def myrheim_meyer(fractions):
    """The dimensions from 1 to 12 whose sprinklings have these shares of related pairs."""
    dimensions = np.linspace(1, 12, 11_001)
    gamma = math.gamma
    expected = [gamma(d + 1) * gamma(d / 2) / (2 * gamma(1.5 * d)) for d in dimensions]
    return np.interp(-np.asarray(fractions), -np.array(expected), dimensions)  # they fall with d


def report(args, data, ids, metrics, logp):
    """The test, beside what needs no network; predictions.npz, a confusion matrix for each task.
    Returns the baselines. (rank 0)"""
    logging.info("test " + " ".join(f"{name}={value:.4f}" for name, value in metrics.items()))
    baselines = measure_baselines(data)
    for task in data.classes:
        accuracy = metrics[f"{task}/accuracy"]
        for name, value in {**baselines[task], "this network": accuracy}.items():
            logging.info(f"test accuracy  {task:10} {name:20} {value:.4f}")
        if accuracy < max(baselines[task].values()):
            logging.warning(f"{task}: the network is worse than what needs no network")
    try:
        save_predictions(args, data, ids, logp)
    except (ImportError, OSError, ValueError) as error:  # such as a full disk
        logging.warning(f"no predictions.npz or no confusion matrix: {error}")
    return baselines


def save_predictions(args, data, ids, logp):
    folder = Path(args.output_dir)
    arrays = {f"logp_{task}": part for task, part in logp.items()}
    np.savez(folder / "predictions.npz", ids=ids, labels=data.labels[ids], **arrays)
    for i, (task, names) in enumerate(data.classes.items()):
        labels = data.labels[ids, i]
        guess = logp[task].argmax(1)
        plot = ConfusionMatrixDisplay.from_predictions(
            labels[labels >= 0],
            guess[labels >= 0],
            labels=range(len(names)),
            display_labels=[name.replace("$", r"\$") for name in names],  # no formula
            normalize="true",
            include_values=len(names) <= 30,  # more numbers take minutes, and nobody reads them
            xticks_rotation="vertical",
        )
        plot.figure_.savefig(folder / f"confusion_{task}.png", bbox_inches="tight")


def test(args, device, data, model, best):
    """Metrics of the best weights on the test set, and baselines. (all ranks)"""
    state = on_rank0(read_checkpoint, Path(args.output_dir) / "best.pt")
    if state and state["loop"]["step"] == best["step"]:
        model.load_state_dict(state["model"])
    else:
        text = f"best.pt of step {best['step']} was not saved, or is damaged"
        logging.warning(f"{text}: the test is of latest.pt")
    ids = data.part("test")
    metrics, logp = evaluate(model, data, ids, args, device)
    return metrics, on_rank0(report, args, data, ids, metrics, logp)


def main(args):
    device = setup_ddp(args)
    logging.info("Preparing data loaders...")
    data = CausalSets(read_once(prepare, args), args)
    if args.prepare_only:
        logging.info(f"{len(data.labels):,} sets are read: {args.cache_dir}")
        return 0
    logging.info("Data split complete:")
    for name, title in {"train": "Training", "valid": "Validation", "test": "Test"}.items():
        logging.info(f"  {title + ' samples:':19} {len(data.part(name)):,}")
    may_change = "data cache_dir num_epochs patience world_size master_addr master_port".split()
    state = open_run(args, data.hash, may_change)
    torch.manual_seed(args.seed)  # the same weights on all ranks
    model = CausalSetNet(args, data.classes).to(device)
    logging.info(f"{sum(p.numel() for p in model.parameters()):,} parameters")

    log = RunLog(args, state)
    with logging_redirect_tqdm():
        reason, loop = train(args, device, data, model, state, log)
    if reason:
        log.close(f"stopped by {reason}", steps=loop["step"], best=loop["best"])
        return exit_status(reason)
    logging.info("Training process completed.")
    logging.info("Starting testing phase...")
    end_on_signals()
    metrics, baselines = test(args, device, data, model, loop["best"])
    log.close("finished", steps=loop["step"], best=loop["best"], test=metrics, baselines=baselines)
    logging.info("Training and testing completed successfully!")
    return 0


# --------------------------------------------------------------------------------------------------
# Reading: the user's files, once, by rank 0. Training needs only what `write_sets` leaves

# Names in stores of QuantumGrav.jl and of its Python package. The first that is there is read.
ADJACENCY = ["adjacency_matrix", "adj"]  # all related pairs
LINKS = ["link_matrix", "linkmat"]  # those with nothing between them
SIZES = ["atomcount", "cset_size"]
NUMBERS = ["num_samples", "num_causal_sets"]  # of sets, in a store that has room for more
FEATURES = "in_degree out_degree past_height future_height past_size future_size".split()
READER = 6  # raise it when you change what is read or kept: else an old cache is used


class ZarrFolder:
    """The arrays directly in a folder by their names, as np.load gives those of an .npz file. Each
    is opened when it is asked for. We look for the folders of arrays ourselves: groups that Julia
    writes have no file that zarr would know them by."""

    def __init__(self, folder, notes):
        self.folder = folder
        self.notes = notes  # here we write down what is missing
        self.names = [path.name for path in sorted(folder.iterdir()) if is_zarr_array(path)]

    def __iter__(self):
        return iter(self.names)

    def __getitem__(self, name):
        import zarr

        array = zarr.open(self.folder / name, mode="r")
        missing = array.nchunks - array.nchunks_initialized
        if missing > 0:
            self.notes.append(f"{self.folder / name}: {missing} of {array.nchunks} chunks")
        return array


def is_zarr_array(path):
    if (path / ".zarray").exists():  # format 2
        return True
    meta = path / "zarr.json"  # format 3
    try:
        return meta.exists() and json.loads(meta.read_text())["node_type"] == "array"
    except (ValueError, KeyError):  # zarr says what is wrong, if the array is asked for
        return True


def choose(arrays, *names):
    for name in names:
        if name in arrays:
            return name
    raise ValueError(f"has {', '.join(arrays) or 'nothing'}; expected {' or '.join(names)}")


def read_sets(path, tasks, notes):
    """Yields for each set its name, and {name of an array: its value}, or the error that came.

    path is an .npz file or a zarr store whose arrays hold all sets, counted by the first axis; or
    a zarr store with a group for each set. What is no error, but must be said, goes into notes."""
    if not path.exists():
        raise ValueError("there is no such file or store")
    if path.suffix == ".npz":
        if not zipfile.is_zipfile(path):
            raise ValueError("expected a whole file of arrays with names, as numpy.savez writes it")
        yield from read_flat(np.load(path), tasks)
        return
    if not path.is_dir():
        raise ValueError("expected an .npz file, or a zarr store, which is a folder")
    groups = [group for group in path.glob("cset_*") if group.name[5:].isdigit()]
    for group in sorted(groups, key=lambda group: int(group.name[5:])):
        try:
            arrays = ZarrFolder(group, notes)
            names = [choose(arrays, *ADJACENCY, *LINKS), *[choose(arrays, task) for task in tasks]]
            names += [name for name in SIZES if name in arrays]
            yield group.name, {name: arrays[name][...] for name in names}
        except ImportError:
            raise
        except Exception as error:  # zarr and its decoders raise many kinds
            yield group.name, error
    if not groups:
        yield from read_flat(find_arrays(path, notes), tasks)


def find_arrays(path, notes):
    """The arrays of a store: directly in it, or in one group."""
    found = []
    for folder in [path, *sorted(path.iterdir())]:
        if folder.is_dir():
            arrays = ZarrFolder(folder, notes)
            if any(name in arrays for name in [*ADJACENCY, *LINKS]):
                found.append(arrays)
    if len(found) > 1:
        names = ", ".join(str(arrays.folder) for arrays in found)
        raise ValueError(f"has several groups, give one of them to --data: {names}")
    return found[0] if found else ZarrFolder(path, notes)


def read_flat(arrays, tasks):
    """The sets of arrays whose first axis counts them, as `read_sets` yields them."""
    matrix = choose(arrays, *ADJACENCY, *LINKS)
    matrices = arrays[matrix]
    numbers = {}  # one for each set
    for name in [choose(arrays, *SIZES), *tasks]:
        numbers[name] = arrays[choose(arrays, name)][...]
        if numbers[name].shape != matrices.shape[:1]:
            text = f"{name} has shape {numbers[name].shape}"
            raise ValueError(f"{text}; expected {matrices.shape[:1]}, as {matrix} has")
    count = matrices.shape[0]
    for name in NUMBERS:
        if name in arrays:
            count = min(count, number_of(arrays[name][...], name))

    # what is packed together is read once: a chunk, or all of an .npz file
    piece = max(1, getattr(matrices, "chunks", matrices.shape)[0])
    for first in range(0, count, piece):
        ids = range(first, min(first + piece, count))
        try:
            rows = matrices[first : first + piece]
        except Exception as error:
            yield from [(f"set {i}", error) for i in ids]
            continue
        for i in ids:
            values = {name: array[i] for name, array in numbers.items()}
            yield f"set {i}", {matrix: rows[i - first], **values}


def number_of(value, name):
    """A size or a label; a label may also be a name. Some write numbers as texts."""
    number = np.asarray(value).item()
    if isinstance(number, bytes):
        number = number.decode()
    if isinstance(number, str):
        number = number.strip()
        if re.fullmatch(r"-?\d+", number):
            number = int(number)
        elif name not in SIZES:
            return number
    if not isinstance(number, (int, float)) or not float(number).is_integer():
        raise ValueError(f"{name} is {number}; expected a whole number")
    return int(number)


def order_of(values):
    """The order (n, n) bool of a set: [i, j] where i is in the past of j, so that i < j. Raises
    ValueError where the matrix is no such thing."""
    name = choose(values, *ADJACENCY, *LINKS)
    matrix = values[name]
    if matrix.ndim != 2 or len(matrix) != matrix.shape[1]:
        raise ValueError(f"{name} has shape {matrix.shape}; expected (n, n)")
    n = len(matrix)
    for size in SIZES:
        if size in values:
            n = number_of(values[size], size)
    if not 2 <= n <= min(len(matrix), 32767):  # elements are numbered in int16
        raise ValueError(f"{n} elements in {name} of shape {matrix.shape}; expected 2 to 32767")
    if matrix[n:].any() or matrix[:, n:].any():
        raise ValueError(f"{name} has pairs beyond its {n} elements")
    matrix = matrix[:n, :n]
    if not ((matrix == 0) | (matrix == 1)).all():
        raise ValueError(f"{name} has other entries than 0 and 1")
    if not matrix.any():
        text = "a missing chunk of a store reads so; an order without any relation is not taken"
        raise ValueError(f"{name} has no pairs at all: {text}")

    matrix = matrix.astype(bool)
    if not np.triu(matrix).any():
        matrix = matrix.T  # as arrays of Julia arrive
    if np.tril(matrix).any():
        text = "a cycle, ones on its diagonal, or elements that are not sorted in time"
        raise ValueError(f"{name} has {text}; expected 1 only where i < j")
    order = closure(matrix)
    if name in ADJACENCY and not np.array_equal(matrix, order):
        raise ValueError(f"{name} is not transitive; expected all related pairs")
    if name in LINKS and not np.array_equal(matrix, links_of(order)):
        raise ValueError(f"{name} is not made of the pairs with nothing between them")
    return order


def closure(edges):
    """The transitive closure (n, n) bool of an acyclic graph."""
    while True:
        step = edges.astype(np.float32)  # numpy multiplies floats much faster than integers
        more = edges | (step @ step > 0.5)
        if np.array_equal(more, edges):
            return edges
        edges = more


def links_of(order):
    """The transitive reduction (n, n) bool of an order: pairs with nothing between them."""
    step = order.astype(np.float32)  # counts below 2^24 are exact
    return order & (step @ step < 0.5)


def heights(order):
    """(n,) elements of the longest chain that ends just before each one: proper time."""
    count = np.zeros(len(order), np.int64)
    after = np.ones(len(order), bool)
    while True:
        # at first all elements; then those after any of them, after any of those, and so on
        after = order[after].any(0)
        if not after.any():
            return count
        count += after


def describe(order):
    """What is kept of a set with this order: {name: array}"""
    link = links_of(order)
    past_height = heights(order)
    future_height = heights(order.T)  # the past of the order turned round
    past_size = order.sum(0)
    future_size = order.sum(1)
    features = [link.sum(0), link.sum(1), past_height, future_height, past_size, future_size]
    statistics = [
        len(order),
        order.sum(),  # related pairs
        link.sum(),
        (past_size == 0).sum(),  # minimal elements
        (future_size == 0).sum(),  # maximal elements
        past_height.max() + 1,  # elements of the longest chain
        (past_size * future_size).sum(),  # chains of 3, counted by the one in the middle
    ]
    return {
        "features": np.stack(features, axis=1).astype(np.float32),
        "past": np.nonzero(link.T)[1].astype(np.int16),
        "future": np.nonzero(link)[1].astype(np.int16),
        "statistics": np.array([statistics], np.float64),
    }


def read_all(paths, tasks):
    """Five lists: of the sets (file, name), what `describe` returns, and labels; what is wrong with
    other sets; what else must be said."""
    names = []
    sets = []
    labels = []
    bad = []
    notes = []
    for path in paths:
        found = read_sets(path, tasks, notes)
        bar = tqdm(found, desc=path.name, unit=" sets", disable=None, leave=False)
        try:
            for name, values in bar:
                try:
                    if isinstance(values, Exception):
                        raise values
                    own = [number_of(values[task], task) for task in tasks]
                    sets.append(describe(order_of(values)))
                    labels.append(own)
                    names.append((str(path), name))
                except Exception as error:
                    bad.append(f"{path}: {name}: {' '.join(str(error).split())}")
        except ImportError:
            raise InputError(f"{path}: pip install zarr, which reads such stores") from None
        except Exception as error:
            text = " ".join(str(error).split())
            raise InputError(f"{path}: {text} (the script's --help has the format)") from None
    if notes:
        text = "arrays have chunks that are not stored and read as zeros, right if they held zeros"
        notes = [f"{len(notes)} {text}, such as {notes[0]}"]
    return names, sets, labels, bad, notes


def is_label(value):
    return value != "" if isinstance(value, str) else value >= 0


def find_copies(sets):
    """(samples,) int64: the first set that has the same order, its elements in the same places."""
    original = np.arange(len(sets))
    seen = {}
    for i, values in enumerate(sets):
        key = values["features"].tobytes() + values["past"].tobytes()
        original[i] = seen.setdefault(key, i)
    return original


def write_sets(folder, args):
    """Read --data, and write its arrays. (rank 0)"""
    _, sets, values, bad, notes = read_all([Path(path) for path in args.data], args.tasks)
    if bad and not args.skip_bad_data:
        text = f"{len(bad)} of {len(sets) + len(bad)} sets are bad"
        raise InputError(f"{text} (--skip_bad_data leaves them out):" + list_problems(bad))
    if not sets:
        raise InputError(f"--data {' '.join(args.data)}: no sets")
    if bad:
        notes.append(f"{len(bad)} bad sets are left out:" + list_problems(bad))

    labels = np.full((len(sets), len(args.tasks)), -1)
    classes = {}
    for column, task in enumerate(args.tasks):
        own = [row[column] for row in values]
        names = {value for value in own if is_label(value)}
        names = sorted(names, key=lambda value: (isinstance(value, str), value))
        numbers = {name: number for number, name in enumerate(names)}
        labels[:, column] = [numbers.get(value, -1) for value in own]
        classes[task] = [str(name) for name in names]
        if len(names) < 2:
            text = ", ".join(classes[task]) or "none"
            raise InputError(f"--tasks {task}: expected 2 values or more from 0 on, found {text}")
    arrays = {name: np.concatenate([found[name] for found in sets]) for name in sets[0]}
    arrays["labels"] = labels
    arrays["original"] = find_copies(sets)
    copies = np.count_nonzero(arrays["original"] < np.arange(len(sets)))
    if copies > 0:
        notes.append(f"{copies} sets are copies of others: they stay in one part of the split")
    arrays["node_ptr"] = np.cumsum([0, *arrays["statistics"][:, 0]], dtype=np.int64)
    arrays["edge_ptr"] = np.cumsum([0, *arrays["statistics"][:, 2]], dtype=np.int64)
    digest = hashlib.sha256(json.dumps(classes).encode())
    for name, array in sorted(arrays.items()):
        np.save(folder / f"{name}.npy", array)
        digest.update(array)
    meta = {"classes": classes, "notes": notes, "hash": digest.hexdigest()[:12]}
    (folder / "meta.json").write_text(json.dumps(meta))


def prepare(args):
    """The folder with the sets of --data, read once, and kept. (rank 0)"""
    key = [READER, args.tasks, args.skip_bad_data]
    for path in map(Path, args.data):
        if not path.exists():
            hint = "that of the default is made by tools/make_causal_sets.py of the repository"
            raise InputError(f"--data {path}: no such file or store; {hint}")
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        stats = [file.stat() for file in files if file.exists()]  # a link may lead nowhere
        key.append([str(path.resolve()), [(stat.st_size, stat.st_ctime_ns) for stat in stats]])
    return cached(args.cache_dir, "sets", key, lambda new: write_sets(new, args))


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
# What happens around a step: batches, precision, update, log, checkpoints. Also the same lines in
# every training script.

MAX_BAD_STEPS = 10  # in a row, then the run ends
# options that a resumed run may be given anew; with others it would be another run
MAY_CHANGE = """config output_dir skip_bad_data fresh batch_size num_workers compile deterministic
    save_every max_minutes log_every wandb_mode nproc_per_node device backend timeout_minutes
    local_rank""".split()

folder_lock = None  # the file that rank 0 keeps open, and so locked, as long as it lives


def list_problems(problems):
    """Of many at most 20, and a count."""
    more = [f"... and {len(problems) - 20} more"] if len(problems) > 20 else []
    return "\n  ".join(["", *problems[:20], *more])


def file_sizes(folder):
    """{path: bytes} of the files in a folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


def is_whole(folder):
    """Whether a folder of the cache still has what was written. Programs that tidy up take files
    out of old folders."""
    try:
        written = json.loads((folder / "sizes.json").read_text())
    except (OSError, ValueError):
        return False
    return written.items() <= file_sizes(folder).items()


def cached(cache_dir, name, key, write):
    """The folder of what write(folder) makes, once for each key. It is there whole, or not at all.
    Runs that share the cache do not touch each other's. (rank 0)"""
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    folder = Path(cache_dir) / f"{name}-{digest}"
    if is_whole(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.exists():
            logging.warning(f"{folder} is damaged, and made again")
            shutil.rmtree(folder)
        place = tempfile.TemporaryDirectory(dir=folder.parent, prefix="unfinished-")
    except OSError as error:
        raise InputError(f"--cache_dir {cache_dir} is not writable: {error}") from None
    for old in folder.parent.glob("unfinished-*"):
        with contextlib.suppress(OSError):  # another run is at work in it, and has it locked
            with open(old / "lock", "r+") as file:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(old)
    with place, lock_file(Path(place.name) / "lock"):
        new = Path(place.name) / "data"
        new.mkdir()
        write(new)
        for file in new.glob("*.npy"):
            np.load(file, mmap_mode="r")  # a full disk can cut off an array without an error
        (new / "sizes.json").write_text(json.dumps(file_sizes(new)))
        try:
            new.rename(folder)
        except OSError:  # another run was faster, with the same data
            if not folder.exists():
                raise
    return folder


def read_once(prepare, args):
    """The folder that prepare(args) returns on rank 0, however long it takes. (all ranks)"""
    end_on_signals()
    gather(None)  # all are there: to make a group waits as long as its limit says
    patient = dist.new_group(backend="gloo", timeout=timedelta(days=30))
    folder = on_rank0(prepare, args, group=patient)
    gather(None)  # all have it
    dist.destroy_process_group(patient)  # or its connections would stay
    for _ in range(60):  # a network file system may show a new folder late
        if folder.exists():
            return folder
        time.sleep(1)
    raise InputError(f"rank 0 has {folder}, this machine has not: all must see --cache_dir")


class GlobalBatchSampler(DistributedSampler):
    """Which samples each step is made of. They depend on (seed, epoch) alone, and so neither on the
    number of ranks nor on a restart.

    Yields for each micro-batch of this rank: the step, the ids of the whole global batch, and the
    places in it that are this rank's, from step `start` on. (Random draws that depend on the seed,
    the step and the place do not depend on the number of ranks.) cost[id] is the work that a sample
    makes, such as its length: the global batch stays a random sample; within it samples of similar
    cost share a micro-batch, where they need little padding, and all ranks get equal work."""

    def __init__(self, ids, args, cost=None):
        super().__init__(ids, seed=args.seed)
        self.ids = ids
        self.cost = np.zeros(ids.max() + 1) if cost is None else cost
        self.global_batch = args.global_batch_size
        self.steps = len(ids) // self.global_batch  # an epoch leaves out the few that are left over
        self.start = 0
        self.accumulation = math.ceil(self.global_batch / (args.batch_size * self.num_replicas))
        parts = self.num_replicas * self.accumulation
        if not parts <= self.global_batch <= len(ids):
            limits = f"{parts} (ranks x micro-batches) to {len(ids)} (to train on)"
            hint = "see --global_batch_size and --batch_size"
            raise InputError(f"{self.global_batch} samples a step: must be from {limits}; {hint}")
        each = f"{self.global_batch / parts:g} per GPU x {self.num_replicas} GPUs"
        logging.info(f"  Total batch size: {self.global_batch:,} ({each} x {self.accumulation})")

    def count_steps(self, epochs, most=math.inf):
        """Optimizer steps of a run; a warning if they are few."""
        steps = min(epochs * self.steps, most)
        if steps < 100:
            text = f"{len(self.ids)} samples, {self.global_batch} a step, {epochs} epochs"
            logging.warning(f"only {steps} optimizer steps ({text}): few networks learn in so few")
        return steps

    def __iter__(self):
        for step in itertools.count(self.start):
            epoch, position = divmod(step, self.steps)
            if position == 0 or step == self.start:
                order = np.random.default_rng([self.seed, epoch]).permutation(self.ids)
            whole = order[position * self.global_batch : (position + 1) * self.global_batch]
            whole = whole[np.argsort(self.cost[whole], kind="stable")]
            for places in np.array_split(np.arange(len(whole)), self.accumulation):
                # dealt to and fro, 0 1 2 2 1 0 0 1 ..., or the last rank would get the costliest
                turn = np.arange(len(places)) % (2 * self.num_replicas)
                mine = np.minimum(turn, 2 * self.num_replicas - 1 - turn) == self.rank
                yield step, whole, places[mine]


def make_loader(dataset, sampler, args, device):
    """An endless iterator over micro-batches. The host makes the next one while a GPU computes; if
    that takes longer than the GPU needs (data_wait is high), give --num_workers."""
    if args.num_workers > 0:
        # After a collective a thread of gloo holds a lock of Python for a moment. A worker that is
        # forked in this moment waits for it for ever (before Python 3.12: cpython issue 112275).
        time.sleep(0.2)
    loader = DataLoader(
        dataset,
        batch_size=None,  # the sampler makes whole batches
        sampler=sampler,
        num_workers=args.num_workers,
        # forked workers share the dataset's memory; others would each be sent a copy
        multiprocessing_context="fork" if args.num_workers > 0 else None,
        timeout=60 * args.timeout_minutes if args.num_workers > 0 else 0,  # a worker that is stuck
        pin_memory=device.type != "cpu",
        worker_init_fn=start_worker,
    )
    return iter(loader)


def start_worker(worker):
    """Called in each worker of a loader."""
    # A launcher sends its signals to the workers, too, but their rank still needs them.
    for stop in STOP_SIGNALS:
        signal.signal(stop, signal.SIG_IGN)
    # Send batches through a pipe. Torch's own way, a file in shared memory for each tensor, is slow
    # for small ones, and it fails where /dev/shm is full, or the path of TMPDIR is long.
    ForkingPickler.register(torch.Tensor, lambda tensor: (torch.from_numpy, (tensor.numpy(),)))


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


def seed_step(args, step):
    """Dropout depends on (seed, step, rank) alone: there is no random state to be saved. (The
    factors keep steps below 1,000,003 and ranks below 4,099 apart.)"""
    torch.manual_seed((args.seed * 1_000_003 + step) * 4099 + dist.get_rank())


def update_if_finite(args, optimizer, scaler):
    """Clip, and step if the gradient is finite. Returns its norm. With a fused optimizer nothing is
    read from the device, so that the host can go on and queue the next step."""
    scaler.unscale_(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = nn.utils.clip_grad_norm_(parameters, args.max_grad_norm or math.inf)
    # All ranks have the same gradients by now: a NaN of one is on every rank, and all skip alike.
    if optimizer.defaults.get("fused"):
        optimizer.found_inf = (~norm.isfinite()).float()  # 1: it changes nothing
        optimizer.step()
    elif norm.isfinite():  # the host waits for the device here, which costs speed
        optimizer.step()
    scaler.update()
    optimizer.zero_grad()
    return norm


class Meter:
    """Sums what the steps give, on the device.

    To read a number from a GPU the host waits until the GPU has done all that is queued, and then
    the GPU waits for the host. So a step reads nothing. About once a second, and for every log
    line, the ranks meet: they read their sums, and agree whether to stop."""

    def __init__(self, names, args, device):
        self.names = names  # of numbers of which each rank has a share
        self.args = args
        self.sums = torch.zeros(len(names) + 2, device=device)  # and the norm, and 1, of good steps
        self.bad_in_row = torch.zeros((), device=device)
        self.every = 1  # steps from one meeting to the next
        self.start()

    def start(self):
        self.sums.zero_()
        self.steps = 0
        self.data_wait = 0.0
        self.began = time.monotonic()

    def next_batch(self, batches, device):
        asked = time.monotonic()
        batch = next(batches).to(device)
        self.data_wait += time.monotonic() - asked
        return batch

    def add(self, shares, norm):
        """shares: (len(names),) of a step"""
        values = torch.cat([shares, norm.reshape(1), torch.ones_like(norm).reshape(1)])
        self.sums += torch.where(norm.isfinite(), values, 0.0)
        self.bad_in_row = torch.where(norm.isfinite(), 0.0, self.bad_in_row + 1)
        self.steps += 1

    def meet(self, log, row, samples, now=False):
        """Meet about once a second, at every log line, or now. Agree whether to stop. At a log
        line write `row`, to which this adds the means, and the speed; a step has so many samples.
        Returns why to stop, or "". (all ranks)"""
        must_log = row["step"] % self.args.log_every == 0 or now
        if not must_log and self.steps % self.every > 0:
            return ""
        sums = self.sums.tolist()  # waits for the device
        seconds = time.monotonic() - self.began
        own = {"sums": sums, "seconds": seconds, "data_wait": self.data_wait}
        own["wish"] = wish_to_stop(self.args)
        everyone = gather(own)
        if self.bad_in_row >= MAX_BAD_STEPS:
            text = f"{MAX_BAD_STEPS} steps in a row without a finite gradient"
            hint = "--fresh and a lower learning rate, or look for such numbers in the data"
            raise RunError(f"{text}: {hint}")
        # the next meeting is in about a second, by the clock of rank 0: after the same step for all
        seconds = everyone[0]["seconds"]
        self.every = max(1, int(self.steps / seconds))
        reason = max(theirs["wish"] for theirs in everyone)  # of any rank that has one
        if not must_log and not reason:
            return ""

        *_, norm, good = sums  # the same on all ranks
        row["skipped"] = self.steps - good
        if good > 0:
            shares = np.sum([theirs["sums"] for theirs in everyone], axis=0)
            for name, share in zip(self.names, shares, strict=False):
                row[name] = share / good
            row["grad_norm"] = norm / good
        row["samples_per_s"] = self.steps * samples / seconds
        row["data_wait"] = max(theirs["data_wait"] for theirs in everyone) / seconds
        log.write(row)
        self.start()
        return reason


def wish_to_stop(args):
    """Why this rank would stop; "" if it would go on."""
    if "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != PARENT:
        return "death of torchrun"  # nobody else would ever end this process
    if 0 < 60 * args.max_minutes < time.monotonic() - START:
        return "time limit"
    return stop_signal


def exit_status(reason):
    """For a reason to stop. A time limit, and the SIGUSR1 of a batch queue, are planned."""
    logging.info(f"stopped by {reason}: the same command (without --fresh) goes on")
    return {"time limit": 0, "SIGUSR1": 0, "SIGINT": 130, "SIGTERM": 143}.get(reason, 1)


def save_checkpoint(name, args, log, loop, must_succeed=False, **parts):
    """Write OUTPUT_DIR/name: options, where training stands, the state of `parts`. A run goes on
    without a save that fails, since the next may succeed; the first and the last one must.
    Returns whether it succeeded. (all ranks)"""

    def write():
        state = {"script": SCRIPT, "args": vars(args), "loop": loop}
        state.update(wandb_id=log.wandb_id, log_size=log.size())
        for key, part in parts.items():
            state[key] = part.state_dict()
            state[f"class of {key}"] = type(part).__name__
        folder = Path(args.output_dir)
        try:
            with open(folder / "new.tmp", "wb") as file:
                torch.save(state, file)
                file.flush()
                sync_to_disk(file)
            if name == "latest.pt" and (folder / name).exists():
                os.replace(folder / name, folder / "previous.pt")
            os.replace(folder / "new.tmp", folder / name)  # whole, or as it was
        except (OSError, RuntimeError) as error:  # most likely a full disk
            if "DataLoader worker" in str(error):  # its end can interrupt us anywhere
                raise
            with contextlib.suppress(OSError):
                (folder / "new.tmp").unlink()
            reason = f"is the disk full? {str(error).splitlines()[0]}"
            text = f"no {name} at step {loop['step']} ({reason})"
            if must_succeed:
                raise RunError(text) from None
            logging.warning(f"{text}; the run goes on")
            return False
        return True

    return on_rank0(write)


def restore(state, **parts):
    """Give `parts` what save_checkpoint has kept of them. Returns where training stands."""
    for name, part in parts.items():
        if name not in state:
            raise InputError(f"the checkpoint has no {name}: is it a copy of best.pt?")
        before = state[f"class of {name}"]
        if before != type(part).__name__:
            text = f"this {name} is {type(part).__name__}, that of the checkpoint {before}"
            raise InputError(f"{text}: --fresh moves the old run aside")
        try:
            part.load_state_dict(state[name])
        except (RuntimeError, ValueError) as error:
            raise InputError(f"the checkpoint does not fit this {name}: {error}") from None
    loop = state["loop"]
    state.clear()  # each rank has a copy: free it
    return loop


def sync_to_disk(file):
    try:
        os.fsync(file.fileno())
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that have no such call
            raise


def read_checkpoint(path):
    """Its content; None if it is missing or damaged. (rank 0)"""
    try:
        # torch.load does not look at the checksums
        if zipfile.ZipFile(path).testzip() is None:
            return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        return None
    except (PermissionError, pickle.UnpicklingError) as error:  # not for want of some bytes
        raise InputError(f"{path} cannot be read: {error}") from None
    except Exception as error:  # cut short, or a flipped bit, which raises errors of many kinds
        logging.warning(str(error))
    logging.warning(f"{path} is damaged")
    return None


def lock_file(path):
    """The file, open, and locked until it is closed. Raises BlockingIOError where another process
    has it."""
    file = open(path, "a")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:  # some network file systems have no locks
        logging.warning(f"{path} cannot be locked ({error}): start no second run there")
    return file


def lock_folder(folder):
    """Only one run works in a folder, by whatever name and on whatever mount. (rank 0)"""
    global folder_lock
    folder.mkdir(parents=True, exist_ok=True)
    try:
        folder_lock = lock_file(folder / "lock")
    except BlockingIOError:
        raise InputError(f"another run is at work in {folder}: give another --output_dir") from None


def find_checkpoint(folder, fresh):
    """The state to go on from; None for a new run. (rank 0)"""
    try:
        lock_folder(folder)
        counts = [os.environ.get(f"{name}_RESTART_COUNT") for name in ("TORCHELASTIC", "SLURM")]
        is_restart = any(count not in (None, "", "0") for count in counts)
        checkpoints = []  # what a run, of whichever script, would write over
        for pattern in ("latest.pt", "previous.pt", "*best.pt", "*_model.pt"):
            checkpoints += folder.glob(pattern)
        is_run = checkpoints or (folder / "metrics.jsonl").exists()
        if fresh and is_run and is_restart:
            logging.warning(f"--fresh: this is a restart, and goes on with what {folder} has")
        elif fresh and is_run:
            old = folder.rename(f"{folder}.old-{time.strftime('%Y%m%d-%H%M%S')}")
            logging.info(f"--fresh: what {folder} had is now in {old}")
            checkpoints = []
            lock_folder(folder)
        (folder / "metrics.jsonl").touch()
    except OSError as error:
        raise InputError(f"--output_dir {folder} is not writable: {error}") from None

    latest = folder / "latest.pt"
    previous = folder / "previous.pt"
    state = read_checkpoint(latest)
    if state is None:
        state = read_checkpoint(previous)
        if state is not None:
            with contextlib.suppress(FileNotFoundError):  # a kill within a save leaves none
                # or the next save would put it over previous.pt
                latest.replace(folder / "damaged.pt")
        elif checkpoints:
            raise InputError(f"no checkpoint in {folder} is whole: --fresh moves it aside")
    if state and state.get("loop", {}).get("best") and folder / "best.pt" not in checkpoints:
        logging.warning(f"{folder}/best.pt is gone, and comes back only if training gets better")
    return state


def open_run(args, data_hash, may_change):
    """Lock --output_dir, and find the state to go on from, None for a new run. Only rank 0 must see
    the folder. From here on signals are noted, and end the run after a step. (all ranks)"""
    state = on_rank0(find_checkpoint, Path(args.output_dir), args.fresh)
    hint = "give the same again, another --output_dir, or --fresh, which moves the old run aside"
    if state and state.get("script") != SCRIPT:
        raise InputError(f"{args.output_dir} holds a run of {state.get('script')}: {hint}")
    if args.global_batch_size == 0:
        args.global_batch_size = args.batch_size * dist.get_world_size()
        if state:  # a resumed run keeps its own, on any number of ranks
            args.global_batch_size = state["args"]["global_batch_size"]
    args.data_hash = data_hash
    compare_ranks(args)
    handle_signals(on_signal)  # from here on there is something to save
    if state is None:
        logging.info(f"a new run in {args.output_dir}")
        return None

    for name, value in vars(args).items():
        before = state["args"].get(name)
        if value == before or name in MAY_CHANGE:
            continue
        text = f"{name} is {value}, and {args.output_dir} has a run with {before}"
        if name == "data_hash":
            text = f"the data are not those of the run in {args.output_dir}"
        if name not in may_change:
            raise InputError(f"{text}: {hint}")
        logging.info(text)
    logging.info(f"resuming {args.output_dir} at step {state['loop']['step']}")
    return state


class RunLog:
    """The log line, metrics.jsonl and wandb; at the end summary.json and curves.png. (all ranks, of
    which rank 0 writes)"""

    def __init__(self, args, state):
        self.args = args
        self.path = Path(args.output_dir) / "metrics.jsonl"
        self.wandb_id = state["wandb_id"] if state else os.urandom(4).hex()
        self.wandb = None
        if dist.get_rank() > 0:
            return
        # steps after the checkpoint (without one: all) are made again: remove their lines
        size = state["log_size"] if state else 0
        kept = self.path.read_bytes()[:size]
        os.truncate(self.path, kept.rfind(b"\n") + 1)  # whole lines
        if len(kept) < size:
            logging.warning(f"{self.path} has been cut: rows before the checkpoint are lost")
        self.path.with_name("summary.json").unlink(missing_ok=True)  # of a run that had ended
        if args.wandb_mode != "disabled":
            try:
                self.wandb = self.start_wandb()
            except Exception as error:  # no network, no login: no reason to stop
                logging.warning(f"wandb is off, metrics.jsonl goes on: {error}")

    def start_wandb(self):
        import wandb

        sys.stdin = open(os.devnull)  # so that it never asks for a key among the log lines
        os.environ.setdefault("WANDB_INIT_TIMEOUT", "30")  # seconds
        # An offline run cannot be resumed: `wandb sync` of the second folder would overwrite what
        # the first has sent. So each start has an id of its own, in one group.
        is_online = self.args.wandb_mode == "online"
        return wandb.init(
            project=os.environ.get("WANDB_PROJECT", Path(SCRIPT).stem),
            mode=self.args.wandb_mode,
            id=self.wandb_id if is_online else None,
            resume="allow" if is_online else None,
            group=self.wandb_id,
            config=vars(self.args),
        )

    def size(self):
        """Bytes of metrics.jsonl, to be kept in a checkpoint."""
        return self.path.stat().st_size

    def write(self, row):
        logging.info(" ".join(f"{name}={value:.6g}" for name, value in row.items()))
        if dist.get_rank() > 0:
            return
        row = {name: value for name, value in row.items() if math.isfinite(value)}  # NaN: no JSON
        size = self.size() if self.path.exists() else 0
        try:
            with open(self.path, "a") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            logging.warning(f"metrics.jsonl lacks step {row['step']}: {error}")
            with contextlib.suppress(OSError):
                os.truncate(self.path, size)  # a full disk may have taken half of the line
        if self.wandb:
            try:
                self.wandb.log(row, step=row["step"])
            except Exception as error:
                logging.warning(f"wandb is off, metrics.jsonl goes on: {error}")
                self.wandb = None

    def close(self, status, **summary):
        """status: "finished", or why the run was stopped"""
        if dist.get_rank() > 0:
            return
        seconds = round(time.monotonic() - START, 1)
        summary.update(status=status, script=SCRIPT, seconds=seconds, args=vars(self.args))
        summary.update(world_size=dist.get_world_size(), torch=torch.__version__)
        try:
            self.path.with_name("summary.json").write_text(json.dumps(summary, indent=1))
            if self.size() > 0:  # a run that is stopped at once has no rows
                self.draw()
        except (ImportError, OSError, ValueError, KeyError) as error:  # the run itself is over
            logging.warning(f"no summary.json or no curves.png: {error}")
        if self.wandb:  # without a network its end would wait for ever
            finish = threading.Thread(target=self.wandb.finish, daemon=True)
            finish.start()
            finish.join(30)
            if finish.is_alive():
                folder = Path(self.wandb.dir).parent
                logging.warning(f"wandb lacks the last rows, send them: wandb sync {folder}")

    def draw(self):
        """curves.png: a panel for each column of metrics.jsonl"""
        import pandas
        from matplotlib import pyplot

        rows = pandas.read_json(self.path, lines=True).set_index("step")
        rows = rows.drop(columns=["epoch", "phase"], errors="ignore")
        lines = math.ceil(len(rows.columns) / 3)
        figure, axes = pyplot.subplots(lines, 3, squeeze=False, figsize=(12, 3 * lines))
        for axis, name in zip(axes.flat, rows.columns, strict=False):
            rows[name].dropna().plot(ax=axis, title=name, marker=".")
        figure.tight_layout()
        figure.savefig(self.path.with_name("curves.png"))


# End of the lines that every script has.
# ==================================================================================================


if __name__ == "__main__":
    launch(parse_args, main)
