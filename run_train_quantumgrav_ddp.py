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
stores with groups cset_0, cset_1, ... of such arrays. Other names: see ADJACENCY in the script.

Logged, over all ranks: step, epoch, lr, loss (cross entropy in nats per set, summed over the
tasks), grad_norm (before clipping), skipped (steps whose gradient was not finite), samples_per_s,
data_wait (share of the time), peak_gb (of a GPU). After every epoch: val/loss, and val/TASK/...
loss, accuracy, f1_macro, f1_weighted, ece (calibration error in 15 bins).

Files in --output_dir: latest.pt, best.pt, step_N.pt, metrics.jsonl; at the end summary.json,
curves.png, and of the test set predictions.npz and confusion_TASK.png. The same command goes on
from latest.pt.

Below, "(all ranks)" means that every rank must call a function, in the same order, and "(rank 0)"
that only rank 0 does.
"""

# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch>=2.11,<2.14", "numpy>=2.2,<3", "tqdm>=4.67,<5", "pyyaml>=6.0,<7", "wandb>=0.25,<1",
#     "matplotlib>=3.10,<4", "pandas>=2.2,<4", "scikit-learn>=1.7,<2", "zarr>=3,<4",
# ]
# ///

import argparse
import fcntl
import functools
import hashlib
import itertools
import json
import logging
import math
import os
import re
import signal
import sys
import tempfile
import time
import traceback
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

BATCH_SIZE = 64  # sets of a micro-batch, if --batch_size is not given
EVAL_BATCH_SIZE = 32  # sets that a rank validates at a time
DATA = "data/causal_sets.npz"  # what tools/make_causal_sets.py writes


def parse_args():
    parser = Parser(description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False)
    add = parser.add_argument_group("task").add_argument
    add("--data", nargs="+", type=expanded, default=[DATA], help=".npz files and .zarr stores")
    add("--tasks", nargs="+", default=["cls"], help="arrays of labels to predict")
    add("--skip_bad_data", **FLAG, help="leave out damaged sets, and list them")
    add("--split", nargs=3, type=number(0, 1), default=[0.75, 0.1, 0.15], help="train valid test")
    add("--split_seed", type=NATURAL, default=0, help="another seed draws another split")
    add("--features", nargs="+", default=FEATURES[:4], choices=FEATURES, help="inputs per element")

    add = parser.add_argument_group("model").add_argument
    add("--hidden_dim", type=COUNT, default=64, help="width")
    add("--num_layers", type=COUNT, default=3, help="layers of message passing")
    add("--messages", default="mean", choices=["mean", "sum", "none"], help="how they are added up")
    add("--dropout", type=number(0, 1), default=0.0, help="after each layer")
    add("--head_dim", type=COUNT, default=64, help="hidden width of a head")

    add = parser.add_argument_group("optimization").add_argument
    add("--num_epochs", type=COUNT, default=15, help="passes over the training sets at most")
    add("--lr", type=number(0), default=1e-3, help="peak learning rate")
    add("--weight_decay", type=number(0), default=5e-5, help="of matrices; biases and norms: 0")
    add("--warmup", type=number(0, 1), default=0.3, help="share of the run in which lr rises")

    add = parser.add_argument_group("validation, after every epoch").add_argument
    add("--stop_metrics", nargs="+", default=["loss"], help="the first chooses best.pt")
    add("--patience", type=NATURAL, default=0, help="epochs without a gain that end it; 0: never")
    add("--stop_mode", default="any", choices=["any", "all"], help="of them must get better")
    add("--delta", type=number(0), default=0.0, help="a gain must be larger than this")
    add("--grace", type=NATURAL, default=0, help="epochs at the start that --patience ignores")

    add = parser.add_argument_group("as in config files of QuantumGrav").add_argument
    add("--world_size", type=COUNT, help="as --nproc_per_node")
    add("--master_addr", help="where ranks meet; the variable MASTER_ADDR wins")
    add("--master_port", help="and on which port; the variable MASTER_PORT wins")

    # fp32 on GPUs, too: with a network this small they wait for the host, and casts are more to do
    add_common_arguments(parser, output_dir="outputs/quantumgrav", precision="fp32")
    args = parse_with_config(parser)

    for name in ("tasks", "stop_metrics"):
        if len(set(getattr(args, name))) < len(getattr(args, name)):
            parser.error(f"--{name}: one is given twice")
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

# what may be known of an element
FEATURES = "in_degree out_degree past_height future_height past_size future_size".split()


class Batch(NamedTuple):
    """B sets of different sizes, not padded but laid one after the other: a big graph of N elements
    and E links, in which no link leads from one set to another.

    The neighbors of element i in its past are past[past_ptr[i] : past_ptr[i + 1]]; of its future
    likewise."""

    features: torch.Tensor  # (N, features) float32
    sizes: torch.Tensor  # (B,) int64, elements per set
    past: torch.Tensor  # (E,) int64
    past_ptr: torch.Tensor  # (N + 1,) int64
    future: torch.Tensor  # (E,) int64
    future_ptr: torch.Tensor  # (N + 1,) int64
    labels: torch.Tensor  # (B, tasks) int64, -1 where there is none
    counts: torch.Tensor  # (tasks,) int64, labelled sets of the global batch: divides the loss

    def to(self, device):
        return Batch(*[tensor.to(device, non_blocking=True) for tensor in self])


class CausalSets(Dataset):
    """What `prepare` has written, mapped into memory that the ranks of a node share."""

    def __init__(self, folder, args):
        meta = json.loads((folder / "meta.json").read_text())
        self.classes = meta["classes"]
        self.hash = meta["hash"]

        def load(name):
            # np.asarray: still mapped, and faster than np.memmap itself
            return np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r"))

        # rows node_ptr[i] to node_ptr[i + 1] - 1 of features belong to set i, and edge_ptr says the
        # same of past and future, the neighbors of its elements, which begin at 0 in each set
        self.node_ptr = load("node_ptr")
        self.edge_ptr = load("edge_ptr")
        self.features = load("features")  # FEATURES of each element
        self.past = load("past")
        self.future = load("future")
        self.labels = load("labels")  # a column for each task, -1 where there is no label
        self.statistics = load("statistics")  # of each set, for the baselines
        self.original = load("original")  # the first set that is the same: mostly itself
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
            logging.warning(f"{lacking} of the {len(names)} classes of {task} are not in {part}")

    def part(self, name):
        """Numbers of the sets to train on, to validate on or to test on."""
        return np.flatnonzero(self.split == ["train", "valid", "test"].index(name))

    def __getitem__(self, item):
        """What the sampler yields -> the Batch."""
        _, global_ids, positions = item
        return self.make_batch(global_ids[positions], global_ids)

    def make_batch(self, ids, global_ids):
        """The Batch of the sets `ids`, which are some of a global batch."""
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
            torch.from_numpy((self.labels[global_ids] >= 0).sum(0)),
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

    original[i] is the first set that is the same as set i: i itself, unless set i is a copy. Copies
    lie in one part, or sets to train on would also be in the test."""
    distinct = np.unique(original)
    count = len(distinct)
    if abs(sum(shares) - 1) > 1e-6 or min(shares) * count < 1:
        text = f"expected three shares, sum 1, each of at least one of the {count} sets"
        raise InputError(f"--split {shares}: {text}")
    ends = np.floor(np.cumsum(shares[:2]) * count + 0.5).astype(int)
    _, valid, test = np.split(np.random.default_rng(seed).permutation(distinct), ends)
    split = np.zeros(len(original), np.uint8)
    split[valid] = 1
    split[test] = 2
    return split[original]


# --------------------------------------------------------------------------------------------------
# Model


def sum_bags(x, rows, ptr):
    """(B, D): the sums of x[rows[ptr[i] : ptr[i + 1]]], made without a copy of these rows."""
    return F.embedding_bag(rows, x, ptr, mode="sum", include_last_offset=True)


class SumNeighbors(torch.autograd.Function):
    """(N, D) -> (N, D): for each element the sum of its neighbors' rows in one direction. The
    gradient is the sum over the reversed links. We have these lists; the backward pass of
    embedding_bag would find them by sorting."""

    @staticmethod
    def forward(ctx, x, neighbors, ptr, reversed_neighbors, reversed_ptr):
        ctx.save_for_backward(reversed_neighbors, reversed_ptr)
        return sum_bags(x, neighbors, ptr)

    @staticmethod
    def backward(ctx, gradient):
        return sum_bags(gradient.contiguous(), *ctx.saved_tensors), None, None, None, None


class MessageLayer(nn.Module):
    """Messages, normalisation, activation, residual connection, dropout: (N, inputs) -> (N, D)."""

    def __init__(self, inputs, args):
        super().__init__()
        self.aggregation = args.messages
        # the element itself; else messages from its past, from its future, and itself
        sources = 1 if args.messages == "none" else 3
        self.linear = nn.Linear(inputs * sources, args.hidden_dim)
        # LayerNorm, not BatchNorm: a set's output must not depend on who else is in the batch
        self.norm = nn.LayerNorm(args.hidden_dim)
        self.skip = nn.Identity()
        if inputs != args.hidden_dim:
            self.skip = nn.Linear(inputs, args.hidden_dim, bias=False)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, x, batch):
        inputs = [x]
        if self.aggregation != "none":
            past = (batch.past, batch.past_ptr)
            future = (batch.future, batch.future_ptr)
            inputs = [self.aggregate(x, past, future), self.aggregate(x, future, past), x]
        y = F.relu(self.norm(self.linear(torch.cat(inputs, dim=1))))
        return self.dropout(y + self.skip(x))

    def aggregate(self, x, links, reversed_links):
        """(N, D): for each element the sum or mean over its neighbors in one direction"""
        total = SumNeighbors.apply(x.float(), *links, *reversed_links)  # fp32 under autocast, too
        if self.aggregation == "sum":
            return total
        return total / links[1].diff().clamp(min=1)[:, None]  # by the number of neighbors


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


def batch_loss(logits, batch):
    """What this micro-batch adds to the mean cross entropy of the global batch.

    Why not the mean over the micro-batch? Ranks may have different numbers of labelled sets, and a
    mean of such means is not the mean. So each share is divided by the count of the whole global
    batch, and the shares are summed: over micro-batches by backward(), over ranks by DDP, which
    takes their mean, times the number of ranks (see `train`). A task without labels in the global
    batch counts 0."""
    loss = torch.zeros((), device=batch.labels.device)
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
    guess = logp.argmax(1)
    confidence = np.nan_to_num(np.exp(logp.max(1)))  # a NaN counts as 0
    bins = np.minimum((confidence * 15).astype(int), 14)
    gaps = np.bincount(bins, weights=(guess == labels) - confidence)  # the sum in each bin
    return {
        "loss": float(-logp[np.arange(len(labels)), labels].mean()),
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
    batches = np.array_split(np.arange(len(ids)), math.ceil(len(ids) / EVAL_BATCH_SIZE))
    for rows in batches[dist.get_rank() :: dist.get_world_size()]:
        batch = data.make_batch(ids[rows], ids).to(device)
        for task, logits in model(batch).items():
            logp[task][rows[0] : rows[-1] + 1] = logits.log_softmax(dim=1)
    model.train()

    for part in logp.values():
        dist.all_reduce(part)  # each row is zero on all ranks but one
    return {task: part.cpu().double().numpy() for task, part in logp.items()}


def evaluate(model, data, ids, args, device):
    """Returns metrics of the sets `ids`: loss, and TASK/... METRICS of each task; and their
    log-probabilities, as `predict` does. (all ranks)"""
    logp = predict(model, data, ids, args, device)
    metrics = {"loss": 0.0}
    for i, task in enumerate(data.classes):
        labels = data.labels[ids, i]
        known = labels >= 0
        # All ranks decide by these, so one computes them: the last bit may depend on the processor.
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


def count_waiting(loop, metrics, epoch, args):
    """Count the epochs without a gain in loop["waited"]. A gain is when any, or all, of
    --stop_metrics are better than loop["best_values"] by more than --delta; with `all`, one that is
    better alone keeps its old best value."""
    gained = {}
    for name in args.stop_metrics:
        if is_better(name, metrics[name], loop["best_values"].get(name), args.delta):
            gained[name] = metrics[name]
    needed = len(args.stop_metrics) if args.stop_mode == "all" else 1
    if len(gained) >= needed:
        loop["best_values"].update(gained)
        loop["waited"] = 0
    elif epoch >= args.grace:
        loop["waited"] += 1


def is_best(loop, metrics, args):
    """Whether the first of --stop_metrics is better than ever, by however little. Then it is kept
    in loop["best"]."""
    name = args.stop_metrics[0]
    if not is_better(name, metrics[name], loop["best"].get("value")):
        return False
    loop["best"] = {"metric": name, "value": metrics[name], "step": loop["step"]}
    return True


def is_stopped_early(loop, args):
    return 0 < args.patience <= loop["waited"]


def measure_baselines(data):
    """{task: {name: test accuracy}} of what needs no network. (rank 0)

    majority             the commonest class
    logistic regression  on counts of elements, pairs, links, chains
    Myrheim-Meyer        for a task `dim` or `dimension`: the dimension whose sprinklings have that
                         share of related pairs (Meyer 1988)"""
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
            sizes, pairs = counts[test, :2].T
            dims = myrheim_meyer(2 * pairs / (sizes * (sizes - 1)))
            guesses["Myrheim-Meyer"] = np.abs(dims[:, None] - np.array(names, float)).argmin(1)
        baselines[task] = {
            name: float((labels[test] == guess).mean()) for name, guess in guesses.items()
        }
    return baselines


def myrheim_meyer(fractions):
    """The dimensions from 1 to 12 whose sprinklings have these shares of related pairs."""
    dims = np.linspace(1, 12, 11_001)
    expected = [math.gamma(d + 1) * math.gamma(d / 2) / (2 * math.gamma(1.5 * d)) for d in dims]
    return np.interp(-np.asarray(fractions), -np.array(expected), dims)  # they fall with d


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
    save_predictions(args, data, ids, logp)
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
            include_values=len(names) <= 30,  # more are slow to draw, and nobody reads them
            xticks_rotation="vertical",
        )
        plot.figure_.savefig(folder / f"confusion_{task}.png", bbox_inches="tight")


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
    """Returns why training was stopped, "" if it has ended; and `loop`, which says where training
    stands. (all ranks)"""
    world_size = dist.get_world_size()
    # in fp32 an element or link takes up to 3 numbers for each unit of a layer
    room = room_on_gpu(model, device) / (4 * 3 * args.hidden_dim * args.num_layers)
    sampler = GlobalBatchSampler(data.part("train"), args, data.cost, room)
    steps = sampler.steps * args.num_epochs
    logging.info(f"  {steps:,} steps, {sampler.steps:,} an epoch")
    optimizer = make_optimizer(args, model)
    autocast = choose_precision(args, device)
    # where training stands; and, for whoever loads the weights, the names of the outputs
    loop = {"step": 0, "best_values": {}, "best": {}, "waited": 0, "classes": data.classes}
    if state:
        loop = state["loop"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        state.clear()  # each rank has a copy: free it
    ddp_model = wrap_ddp(model, args, device)
    save = functools.partial(save_checkpoint, args=args, log=log, loop=loop, model=model)
    sampler.start = loop["step"]
    batches = make_loader(data, sampler, args, device)

    logging.info("Starting distributed training...")
    bar = tqdm(total=steps, initial=loop["step"], disable=None if dist.get_rank() == 0 else True)
    meter = Meter(["loss"], args, device)
    reason = ""
    while loop["step"] < steps and not reason and not is_stopped_early(loop, args):
        step = loop["step"]
        epoch, position = divmod(step, sampler.steps)
        if position == 0:
            logging.info(f"Starting training epoch {epoch}")
        seed_step(args, step)
        lr = args.lr * lr_factor(args, step, steps)
        for group in optimizer.param_groups:
            group["lr"] = lr

        # forward and backward, micro-batch by micro-batch; the last one sums over the ranks
        step_loss = torch.zeros(1, device=device)
        for micro in range(1, sampler.accumulation + 1):
            batch = meter.next_batch(batches, device)
            ddp_model.require_backward_grad_sync = micro == sampler.accumulation
            with autocast():
                loss = batch_loss(ddp_model(batch), batch)
            (loss * world_size).backward()  # DDP takes the mean, we want the sum
            step_loss += loss.detach()
        norm = update_if_finite(args, optimizer)
        meter.add(step_loss, norm)
        loop["step"] += 1
        bar.update()

        # log, and agree whether to stop
        must_evaluate = position == sampler.steps - 1
        must_save = loop["step"] % args.save_every == 0 or must_evaluate
        row = {"step": loop["step"], "epoch": epoch, "lr": lr}
        reason = meter.log_and_agree(log, row, sampler.global_batch, must_save)

        # evaluate: all ranks get the same metrics, and so agree on what is best
        if must_evaluate:
            metrics, _ = evaluate(model, data, data.part("valid"), args, device)
            if not math.isfinite(metrics["loss"]):
                raise RuntimeError(f"the validation loss is {metrics['loss']}: a lower --lr?")
            row = {f"val/{name}": value for name, value in metrics.items()}
            log.write({"step": loop["step"], "epoch": epoch, **row})
            count_waiting(loop, metrics, epoch, args)
            if is_best(loop, metrics, args):
                logging.info(f"Found better model at epoch {epoch}.")
                save("best.pt")

        # save, with what the evaluation has changed
        if args.keep_every and loop["step"] % args.keep_every == 0:
            save(f"step_{loop['step']}.pt")
        if reason or must_save:
            save("latest.pt", optimizer=optimizer)
            meter.start()  # neither counts as time of steps
    bar.close()
    return reason, loop


# --------------------------------------------------------------------------------------------------
# Main


def main(args):
    device = setup_ddp(args)
    free_on_resume = "data skip_bad_data num_epochs patience world_size master_addr master_port"
    state = open_run(args, free_on_resume.split())
    logging.info("Preparing data loaders...")
    data = CausalSets(read_once(prepare, args), args)
    if args.prepare_only:
        logging.info(f"The data are read: {args.cache_dir}")
        return 0
    logging.info("Data split complete:")
    for name, title in {"train": "Training", "valid": "Validation", "test": "Test"}.items():
        logging.info(f"  {title + ' samples:':19} {len(data.part(name)):,}")
    begin_run(args, state, data.hash)
    torch.manual_seed(args.seed)  # the same weights on all ranks
    model = CausalSetNet(args, data.classes).to(device)
    logging.info(f"{sum(p.numel() for p in model.parameters()):,} parameters")

    log = RunLog(args, state)
    with logging_redirect_tqdm():
        reason, loop = train(args, device, data, model, state, log)
    figures = {"steps": loop["step"], "best": loop["best"]}
    if reason:
        return log.stop(reason, **figures)
    if is_stopped_early(loop, args):
        logging.info(f"Stopped early: no gain in {loop['waited']} epochs.")
    logging.info("Training process completed.")
    logging.info("Starting testing phase...")
    for stop in STOP_SIGNALS:  # all is saved: from here on they end the process
        signal.signal(stop, signal.SIG_DFL)
    best = Path(args.output_dir) / "best.pt"
    model.load_state_dict(on_rank0(torch.load, best, "cpu")["model"])
    ids = data.part("test")
    metrics, logp = evaluate(model, data, ids, args, device)
    baselines = on_rank0(report, args, data, ids, metrics, logp)
    log.close("finished", **figures, test=metrics, baselines=baselines)
    logging.info("Training and testing completed successfully!")
    return 0


# --------------------------------------------------------------------------------------------------
# Reading: rank 0 reads the user's files once. Training needs only what `write_sets` has written

# Names in stores of QuantumGrav.jl and of its Python package. The first that is there is read.
ADJACENCY = ["adjacency_matrix", "adj"]  # all related pairs
LINKS = ["link_matrix", "linkmat"]  # those with nothing between them
SIZES = ["atomcount", "cset_size"]
COUNTS = ["num_samples", "num_causal_sets"]  # how many sets of a larger store are there
READER = 8  # raise it when you change what is read or kept: else an old cache is used


def choose(arrays, *names):
    for name in names:
        if name in arrays:
            return name
    raise ValueError(f"has {', '.join(arrays) or 'nothing'}; expected {' or '.join(names)}")


def open_arrays(folder, tasks):
    """{name: array} of the arrays directly in a folder of a zarr store; of those that we do not
    need, which may be many, {name: None}. We look for them ourselves: groups that Julia writes have
    no file that zarr would know them by."""
    import zarr

    arrays = {}
    for path in sorted(folder.iterdir()):
        meta = path / "zarr.json"  # of format 3; groups have it, too
        if (path / ".zarray").exists() or (meta.exists() and '"array"' in meta.read_text()):
            is_needed = path.name in [*ADJACENCY, *LINKS, *SIZES, *COUNTS, *tasks]
            arrays[path.name] = zarr.open_array(path, mode="r") if is_needed else None
    return arrays


def lost_chunks(array):
    """Chunks that a store lacks, or leaves out because they are zeros: both read as zeros."""
    return getattr(array, "nchunks", 0) - getattr(array, "nchunks_initialized", 0)


def read_sets(path, tasks):
    """Yields for each set its name, and {name of an array: its value}.

    path is an .npz file or a zarr store whose arrays hold all sets, counted by the first axis, in
    the store itself or in a group; or a zarr store with a group for each set."""
    if path.is_file():
        try:
            arrays = dict(np.load(path))
        except (TypeError, ValueError):
            text = "pad matrices of different sizes with zeros, and give atomcount"
            raise ValueError(f"no .npz file, or one with arrays of objects: {text}") from None
        yield from read_flat(arrays, tasks)
        return
    groups = [group for group in path.glob("cset_*") if group.name[5:].isdigit()]
    lost = []
    for group in sorted(groups, key=lambda group: int(group.name[5:])):
        arrays = open_arrays(group, tasks)
        lost += [f"{group.name}/{task}" for task in tasks if lost_chunks(arrays.get(task)) > 0]
        values = {name: None if array is None else array[...] for name, array in arrays.items()}
        yield group.name, values
    if lost:
        logging.warning(f"{len(lost)} labels are not stored, and read as zeros, such as {lost[0]}")
    if groups:
        return
    for folder in [path, *sorted(path.iterdir())]:
        arrays = open_arrays(folder, tasks) if folder.is_dir() else {}
        if any(name in arrays for name in [*ADJACENCY, *LINKS]):
            groups.append(folder)
            yield from read_flat(arrays, tasks)
    if not groups:
        raise ValueError(f"has no {' or '.join([*ADJACENCY, *LINKS])}")


def read_flat(arrays, tasks):
    """The sets of arrays whose first axis counts them, as `read_sets` yields them."""
    matrix = choose(arrays, *ADJACENCY, *LINKS)
    matrices = arrays[matrix]
    count = matrices.shape[0]
    numbers = {}
    for name in [*tasks, choose(arrays, *SIZES)]:
        array = arrays[choose(arrays, name)]
        if array.shape != (count,):
            raise ValueError(f"{name} has shape {array.shape}; expected ({count},) as {matrix}")
        lost = lost_chunks(array)
        if lost > 0:
            logging.warning(f"{name}: {lost} chunks are not stored, and read as zeros")
        numbers[name] = array[...]
    for name in COUNTS:
        if name in arrays:
            count = min(count, number_of(arrays[name][...], name))

    # what is packed together is read once: a chunk, or all of an .npz file
    piece = max(1, getattr(matrices, "chunks", matrices.shape)[0])
    for first in range(0, count, piece):
        rows = matrices[first : min(first + piece, count)]
        for i, row in enumerate(rows, first):
            yield f"set {i}", {matrix: row, **{name: value[i] for name, value in numbers.items()}}


def number_of(value, name):
    """A size or a label; a label may also be a name. Some write numbers as texts."""
    number = np.asarray(value).item()
    if isinstance(number, bytes):
        number = number.decode()
    if isinstance(number, str) and not re.fullmatch(r" *-?\d+ *", number):
        return number
    if not float(number).is_integer():  # also NaN
        raise ValueError(f"{name} is {number}; expected a whole number")
    return int(number)


def order_of(values):
    """The order (n, n) bool of a set: [i, j] where i is in the past of j, so that i < j. Raises
    ValueError where the matrix is no such thing."""
    name = choose(values, *ADJACENCY, *LINKS)
    matrix = values[name]
    n = len(matrix)
    for size in SIZES:
        if size in values:
            n = number_of(values[size], size)
    if matrix.shape != (len(matrix), len(matrix)) or not 2 <= n <= min(len(matrix), 32767):
        text = f"{n} elements in {name} of shape {matrix.shape}"
        raise ValueError(f"{text}; expected a square of 2 to 32767")
    if matrix[n:].any() or matrix[:, n:].any():
        raise ValueError(f"{name} has pairs beyond its {n} elements")
    matrix = matrix[:n, :n]
    if not ((matrix == 0) | (matrix == 1)).all():
        raise ValueError(f"{name} has other entries than 0 and 1")
    if not matrix.any():
        raise ValueError(f"{name} has no pairs at all: is a chunk of the store missing?")

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
    """(n,) elements of the longest chain before each element: its proper time."""
    count = np.zeros(len(order), np.int64)
    after = order.any(0)  # at first those that come after an element
    while after.any():
        count += after
        after = order[after].any(0)  # then those that come after one of these, and so on
    return count


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
    """Lists: what `describe` returns of each set; its labels; its file and name; what is wrong with
    bad sets"""
    sets = []
    labels = []
    names = []
    bad = []
    turned = []
    for path in paths:
        try:
            for name, values in tqdm(read_sets(path, tasks), desc=path.name, disable=None):
                try:
                    own = [number_of(values[choose(values, task)], task) for task in tasks]
                    sets.append(describe(order_of(values)))
                    labels.append(own)
                    names.append((str(path), name))
                    if np.tril(values[choose(values, *ADJACENCY, *LINKS)]).any():
                        turned.append(f"{path}: {name}")
                except ValueError as error:
                    bad.append(f"{path}: {name}: {error}")
        except Exception as error:  # zarr and its decoders raise many kinds
            raise InputError(f"{path}: {error} (--help has the format)") from error

    if turned:
        text = "have ones below the diagonal alone, and are read transposed, as Julia writes them"
        logging.info(f"{len(turned)} matrices {text}, such as {turned[0]}")
    return sets, labels, names, bad


def find_copies(sets):
    """(sets,) int64: the first set that has the same order, its elements in the same places."""
    original = np.arange(len(sets))
    seen = {}
    for i, values in enumerate(sets):
        key = values["features"].tobytes() + values["past"].tobytes()
        original[i] = seen.setdefault(key, i)
    return original


def hash_of_orders(arrays):
    """By which data that were trained on are known again, whatever their labels and file names."""
    digest = hashlib.sha256(arrays["features"])
    digest.update(arrays["past"])
    return digest.hexdigest()[:12]


def classes_of(values):
    """(labels (sets,), -1 where there is none; the names of the classes) of the values of a task"""
    known = {value for value in values if value != "" and (isinstance(value, str) or value >= 0)}
    names = sorted(known, key=lambda value: (isinstance(value, str), value))
    numbers = {name: number for number, name in enumerate(names)}
    return [numbers.get(value, -1) for value in values], [str(name) for name in names]


def write_sets(folder, args):
    """Read --data, and write its arrays. (rank 0)"""
    sets, values, names, bad = read_all([Path(path) for path in args.data], args.tasks)
    if bad:
        text = "\n  ".join([f"{len(bad)} of {len(sets) + len(bad)} sets are bad:", *bad[:20]])
        if not args.skip_bad_data:
            raise InputError(f"{text}\n(--skip_bad_data leaves them out)")
        logging.warning(text)
    if not sets:
        raise InputError(f"--data {' '.join(args.data)}: no sets")

    arrays = {name: np.concatenate([found[name] for found in sets]) for name in sets[0]}
    classes = {}
    labels = []
    for task, column in zip(args.tasks, zip(*values, strict=True), strict=True):
        own, classes[task] = classes_of(column)
        labels.append(own)
        if len(classes[task]) < 2:
            raise InputError(f"--tasks {task}: expected 2 classes or more, found {classes[task]}")
    arrays["labels"] = np.stack(labels, axis=1)
    arrays["original"] = find_copies(sets)
    copies = np.flatnonzero(arrays["original"] != np.arange(len(sets)))
    if len(copies) > 0:
        text = f"{len(copies)} sets are copies, such as {' '.join(names[copies[0]])}"
        logging.info(f"{text}: each lies in the part of its original")
    arrays["node_ptr"] = np.cumsum([0, *arrays["statistics"][:, 0]], dtype=np.int64)
    arrays["edge_ptr"] = np.cumsum([0, *arrays["statistics"][:, 2]], dtype=np.int64)
    digest = hashlib.sha256(json.dumps(classes).encode())
    for name, array in sorted(arrays.items()):
        np.save(folder / f"{name}.npy", array)
        digest.update(array)
    meta = {"classes": classes, "hash": f"{digest.hexdigest()[:12]} {hash_of_orders(arrays)}"}
    (folder / "meta.json").write_text(json.dumps(meta))


def prepare(args):
    """The folder with the sets of --data, read once, and kept. (rank 0)"""
    key = [READER, args.tasks, args.skip_bad_data]
    for path in map(Path, args.data):
        if not path.exists():
            raise InputError(f"--data {path} is not there (tools/make_causal_sets.py makes one)")
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        stats = [file.stat() for file in files]
        key.append([str(path.resolve()), [(stat.st_size, stat.st_mtime_ns) for stat in stats]])
    return cached(args.cache_dir, "sets", key, lambda new: write_sets(new, args))


# ==================================================================================================
# Distributed training. These lines are the same in every script: read them once.

START = time.monotonic()
SCRIPT = Path(sys.argv[0]).name
sys.stderr = sys.stderr or open(os.devnull, "w")  # where it is closed

# In these a launcher tells a process its rank, the number of ranks, and its rank on this machine.
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

# options that may differ when a run is resumed; with others it would be another run
FREE_ON_RESUME = """config output_dir cache_dir fresh batch_size num_workers compile deterministic
    save_every keep_every max_minutes log_every wandb_mode nproc_per_node device backend
    timeout_minutes""".split()

STOP_SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
# nohup ignores SIGHUP; but where torchrun sends it, to end its ranks, they have to save
if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN or "TORCHELASTIC_RUN_ID" in os.environ:
    STOP_SIGNALS.append(signal.SIGHUP)
HINT = "give the same again, another --output_dir, or --fresh, which moves the old run aside"
stop_signal = ""  # name of the last signal that asked this process to stop
folder_lock = None  # the file that rank 0 keeps open, and so locked, as long as it lives


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


def boolean(text):
    if text.lower() not in ("true", "yes", "1", "false", "no", "0"):
        raise argparse.ArgumentTypeError(f"{text} is neither True nor False")
    return text.lower() in ("true", "yes", "1")


def expanded(text):
    """The type of options that are paths: ~/ and $SCRATCH mean the same in a config file."""
    path = os.path.expanduser(os.path.expandvars(text))
    if "$" in path:
        raise argparse.ArgumentTypeError(f"{text}: there is no such variable")
    if Path(path).is_fifo():  # each rank would read a part of it
        raise argparse.ArgumentTypeError(f"{text} is a pipe: give a file")
    return path


COUNT = number(1, kind=int)
NATURAL = number(0, kind=int)
# an option that may be given as --compile, --compile=True, --compile no
FLAG = {"type": boolean, "nargs": "?", "const": True, "default": False, "metavar": "BOOL"}


def add_common_arguments(parser, output_dir, precision="auto"):
    add = parser.add_argument_group("the same in every script").add_argument
    add("--config", type=expanded, help="YAML file of options; the command line wins")
    add("--output_dir", type=expanded, default=output_dir, help="a run found there is resumed")
    add("--cache_dir", type=expanded, default="cache", help="where what is read once is kept")
    add("--prepare_only", **FLAG, help="read the data into --cache_dir, no more")
    add("--fresh", **FLAG, help="start anew; the old run is moved aside")
    add("--seed", type=number(0, 2**32, int), default=42, help="of all that is random")
    text = f"mean micro-batch; 0: {BATCH_SIZE}, or on GPUs with --global_batch_size what fits"
    add("--batch_size", type=NATURAL, default=0, help=text)
    add("--global_batch_size", type=NATURAL, default=0, help="of a step; 0: batch_size x GPUs")
    add("--num_workers", type=NATURAL, default=0, help="processes that make batches")
    add("--max_grad_norm", type=number(0), default=1.0, help="clip the gradient; 0: do not")
    choices = ["auto", "fp32", "tf32", "bf16"]
    add("--precision", default=precision, choices=choices, help="auto: bf16 on GPUs, else fp32")
    add("--deterministic", **FLAG, help="bit-identical repeats on GPUs, too; slower")
    add("--compile", **FLAG, help="torch.compile the model for training")
    add("--save_every", type=COUNT, default=500, help="steps between saves of latest.pt")
    add("--keep_every", type=NATURAL, default=0, help="steps between kept step_N.pt; 0: none")
    add("--max_minutes", type=number(0), default=0, help="then save and stop; 0: no limit")
    add("--log_every", type=COUNT, default=10, help="steps between log lines")
    add("--wandb_mode", default="disabled", choices=["online", "offline", "disabled"], help="wandb")
    add("--nproc_per_node", type=COUNT, default=1, help="processes to start, if no launcher did")
    add("--device", default="auto", choices=["auto", "cuda", "xpu", "cpu"], help="auto: GPU or CPU")
    choices = ["auto", "nccl", "gloo", "xccl", "ccl", "xpu"]
    add("--backend", default="auto", choices=choices, help="auto (also ccl, xpu): by the device")
    minutes = float(os.environ.get("NCCL_TIMEOUT") or 1800) / 60  # many guides export it
    add("--timeout_minutes", type=number(0.01), default=minutes, help="limit of one collective")
    # torch.distributed.launch gives it, but also sets RANK: ignore it
    add("--local_rank", "--local-rank", type=lambda text: None, help=argparse.SUPPRESS)


def parse_with_config(parser):
    """Options of the command line; else of the --config file; else the defaults."""
    args = parser.parse_args()
    if args.config is None:
        return args
    try:
        content = yaml.load(Path(args.config).read_text(encoding="utf-8-sig"), UniqueKeyLoader)
        if not isinstance(content, dict):
            raise InputError("expected lines such as batch_size: 32")
        words = config_words(content, parser)
        names = [word.partition("=")[0] for word in words if word[:2] == "--"]
        names += [word[:8] for word in sys.argv if word.partition("=")[0] == "--config"]
        if len(set(names)) < len(names):  # in two sections, or files
            raise InputError(f"{max(names, key=names.count)} is given twice")
        parser.parse_args(words)
    except (OSError, ValueError, yaml.YAMLError, InputError) as error:
        raise InputError(f"--config {args.config}: {' '.join(str(error).split())}") from None
    return parser.parse_args([*words, *sys.argv[1:]])  # of two values the later one counts


class UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a key that is given twice, of which yaml would take the last one."""

    def construct_mapping(self, node, deep=False):
        keys = [str(key.value) for key, _ in node.value]
        if len(set(keys)) < len(keys):
            raise InputError(f"{max(keys, key=keys.count)} is given twice")
        return super().construct_mapping(node, deep)


def config_words(content, parser, prefix="--"):
    """A YAML file as a command line. A section only groups options, unless their names begin with
    it: where there are options --attack_..., attack: {lr: 1} is --attack_lr, never --lr."""
    options = parser._option_string_actions
    words = []
    for key, value in content.items():
        name = prefix + str(key).removeprefix(prefix[2:])  # --attack_lr, of lr and of attack_lr
        if isinstance(value, dict):
            is_prefix = any(option.startswith(f"{name}_") for option in options)
            words += config_words(value, parser, f"{name}_" if is_prefix else prefix)
        elif isinstance(value, list):
            words += [name, *map(str, value)]
        elif value is not None or name not in options:  # left empty: the default
            words.append(f"{name}={value}")
    return words


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


def on_signal(number, frame):
    global stop_signal
    stop_signal = signal.Signals(number).name  # training ends its step first, and saves


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


def on_rank0(function, *args, group=None):
    """What function(*args) returns, or raises, on rank 0: on all ranks. (all ranks)"""
    outcome = [None, None]  # result, error
    if dist.get_rank() == 0:
        try:
            outcome[0] = function(*args)
        except Exception as error:  # not every error can be sent to the ranks, but its text can
            is_ours = isinstance(error, InputError)
            outcome[1] = error if is_ours else RuntimeError(traceback.format_exc())
    dist.broadcast_object_list(outcome, group=group)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def cached(cache_dir, name, key, write):
    """The folder of what write(folder) makes, once for each key: whole, or not at all. (rank 0)"""
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    folder = Path(cache_dir) / f"{name}-{digest}"
    if os.path.exists(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = tempfile.TemporaryDirectory(dir=folder.parent, prefix="unfinished-")
    except OSError as error:
        raise InputError(f"--cache_dir {cache_dir} is not writable: {error}") from None
    with unfinished:
        new = Path(unfinished.name) / "data"
        new.mkdir()
        write(new)
        if not folder.exists():  # else another run was faster
            new.rename(folder)
    return folder


def read_once(prepare, args):
    """The folder that prepare(args) returns on rank 0, however long it takes. (all ranks)"""
    if dist.get_rank() == 0:  # a signal raises KeyboardInterrupt: what is half written is removed
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # a group of its own: a collective of the default one fails after --timeout_minutes
    reading_group = dist.new_group(backend="gloo", timeout=timedelta(days=30))
    folder = on_rank0(prepare, args, group=reading_group)
    if not os.access(folder, os.R_OK | os.X_OK):
        raise InputError(f"{folder} cannot be read here: all ranks must see --cache_dir")
    return folder


class GlobalBatchSampler(DistributedSampler):
    """Which samples each step is made of. They depend on (seed, epoch) alone, and so neither on the
    number of ranks nor on a restart.

    Yields for each micro-batch of this rank, from step `start` on: the step; the ids of the whole
    global batch; the positions in it of this rank's samples (seed random draws by them).

    cost[id] is the work that a sample makes, such as its length. The global batch is a random one.
    In it samples of similar cost share a micro-batch, and all micro-batches of all ranks are of
    equal work. room: the largest sum of costs that fits a GPU; 0: there is none."""

    def __init__(self, ids, args, cost, room=0):
        super().__init__(ids, seed=args.seed)
        self.ids = ids
        self.cost = cost
        self.global_batch = args.global_batch_size
        self.steps = len(ids) // self.global_batch  # an epoch leaves out the few that are left over
        self.start = 0
        ranks = self.num_replicas
        self.accumulation = math.ceil(self.global_batch / ((args.batch_size or BATCH_SIZE) * ranks))
        if args.batch_size == 0 and room > 0:  # if they are large, a GPU waits for the host less
            work = cost[ids].mean() * self.global_batch / ranks
            most = cost[ids].max()
            fewest = math.ceil(work / max(room - 2 * most, most))  # see cut_by_work
            self.accumulation = max(1, min(fewest, self.global_batch // ranks))
        parts = ranks * self.accumulation
        if not parts <= self.global_batch <= len(ids):
            limits = f"{parts} (ranks x micro-batches) to {len(ids)} (to train on)"
            raise InputError(f"--global_batch_size {self.global_batch}: must be from {limits}")
        each = self.global_batch / parts
        text = f"{each:g} per GPU x {ranks} GPUs x {self.accumulation} micro-batches"
        logging.info(f"  Total batch size: {self.global_batch:,} ({text})")

    def __iter__(self):
        for step in itertools.count(self.start):
            epoch, position = divmod(step, self.steps)
            if position == 0 or step == self.start:
                order = np.random.default_rng([self.seed, epoch]).permutation(self.ids)
            global_ids = order[position * self.global_batch : (position + 1) * self.global_batch]
            global_ids = global_ids[np.argsort(self.cost[global_ids], kind="stable")]
            cuts = cut_by_work(self.cost[global_ids], self.accumulation, self.num_replicas)
            for positions in np.split(np.arange(len(global_ids)), cuts):
                yield step, global_ids, positions[self.rank :: self.num_replicas]


def cut_by_work(cost, micro_batches, ranks):
    """Where to cut samples of rising cost (n,) for micro-batches of equal work, each with one for
    every rank. A rank that takes every ranks-th has too much by less than twice the largest."""
    total = np.cumsum(cost)
    number = np.arange(1, micro_batches)
    cuts = np.rint(np.searchsorted(total, total[-1] * number / micro_batches, "right") / ranks)
    cuts = np.maximum.accumulate(np.maximum(cuts - number, 0)) + number  # at least one for a rank
    return np.minimum(ranks * cuts.astype(int), len(cost) - ranks * number[::-1])


def room_on_gpu(model, device):
    """Bytes of a GPU for the activations of a micro-batch of this rank; 0 on a CPU. (all ranks)"""
    if device.type == "cpu":
        return 0
    properties = torch.get_device_module(device).get_device_properties(device)
    gpus = gather((os.uname().nodename, str(properties.uuid), properties.total_memory))
    memory = min(gpu[-1] / gpus.count(gpu) for gpu in gpus)  # some ranks may share a GPU
    # weights, gradient, optimizer, averaged weights and a copy in bf16 take 24 bytes a parameter
    return max(1, 0.7 * memory - 24 * sum(p.numel() for p in model.parameters()))


def make_loader(dataset, sampler, args, device):
    """An endless iterator over micro-batches. The host makes the next one while a GPU computes; if
    that takes longer than the GPU needs (data_wait is high), give --num_workers."""
    loader = DataLoader(
        dataset,
        batch_size=None,  # the sampler makes whole batches
        sampler=sampler,
        num_workers=args.num_workers,
        # forked workers share the dataset's memory; others would each be sent a copy
        multiprocessing_context="fork" if args.num_workers > 0 else None,
        pin_memory=device.type != "cpu",
        worker_init_fn=start_worker,
    )
    if args.num_workers > 0:
        # A fork while a thread of gloo holds Python's lock would hang (before Python 3.12: cpython
        # issue 112275). It does for a moment after each collective.
        time.sleep(0.2)
    return iter(loader)


def start_worker(worker):
    """Called in each worker of a loader."""
    # a launcher sends its signals to the workers, too, but their rank needs them to end its step
    for stop in STOP_SIGNALS:
        signal.signal(stop, signal.SIG_IGN)
    # Send batches through a pipe. Torch's own way, a file in shared memory for each tensor, is slow
    # for small ones, and hangs where /dev/shm is full.
    ForkingPickler.register(torch.Tensor, lambda tensor: (torch.from_numpy, (tensor.numpy(),)))


def choose_precision(args, device):
    """A function that makes the context of a forward pass: torch.autocast for bf16."""
    precision = args.precision
    if precision == "auto":
        has_bf16 = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
        precision = "bf16" if device.type != "cpu" and has_bf16 else "fp32"
        logging.info(f"  Precision: {precision}")
    # cuDNN rounds to TF32 unless told otherwise
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    return functools.partial(torch.autocast, device.type, torch.bfloat16, precision == "bf16")


def wrap_ddp(model, args, device):
    compiled = torch.compile(model) if args.compile else model
    torch._dynamo.config.optimize_ddp = False  # to split it at DDP's buckets fails if shapes vary
    if dist.get_world_size() == 1:  # nothing to add up
        return compiled
    ddp_model = DistributedDataParallel(compiled, gradient_as_bucket_view=True)
    ddp_model.broadcast_buffers = False  # they are alike. (Torch 2.13 renames the argument.)
    # After its first backward pass DDP reorders the gradients, and sums over three or more ranks
    # change in the last bit. So make that pass now, through nn.Identity, with a loss of 0.
    network = ddp_model.module
    ddp_model.module = nn.Identity()
    zero = sum((p * 0).sum() for p in model.parameters() if p.requires_grad)
    ddp_model(zero).backward()
    ddp_model.module = network
    ddp_model.zero_grad()
    return ddp_model


def seed_step(args, step):
    """Dropout depends on (seed, step, rank) alone: there is no random state to be saved."""
    seed = (args.seed * 1_000_003 + step) * 4099 + dist.get_rank()
    torch.default_generator.manual_seed(seed)  # torch.manual_seed asks all kinds of devices: slow
    if torch.accelerator.is_available():
        torch.get_device_module().manual_seed(seed)


def update_if_finite(args, optimizer):
    """Clip, and step if the gradient is finite. Returns its norm. With a fused optimizer nothing is
    read from the device, so that the host can go on and queue the next step."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = nn.utils.clip_grad_norm_(parameters, args.max_grad_norm or math.inf)
    # All ranks have the same gradients by now: a NaN of one is on every rank, and all skip alike.
    if optimizer.defaults.get("fused"):
        optimizer.found_inf = (~norm.isfinite()).float()  # 1: step() changes nothing
        optimizer.step()
    elif norm.isfinite():  # the host waits for the device here, which costs speed
        optimizer.step()
    optimizer.zero_grad()
    return norm


class Meter:
    """Sums what the steps give, on the device.

    To read a number the host waits for the GPU, and then the GPU for the host. So a step reads
    nothing. About once a second, and for every log line, the ranks meet: they read their sums, and
    agree whether to stop."""

    def __init__(self, names, args, device):
        self.names = names  # of metrics (n,): the sum over the ranks is that of the step
        self.args = args
        # of the steps whose gradient was finite: their metrics, its norm, and how many they are
        self.sums = torch.zeros(len(names) + 2, device=device)
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

    def add(self, metrics, norm):
        values = torch.cat([metrics, norm.reshape(1), torch.ones_like(norm).reshape(1)])
        is_finite = norm.isfinite()
        self.sums += torch.where(is_finite, values, 0.0)
        self.bad_in_row = torch.where(is_finite, 0.0, self.bad_in_row + 1)
        self.steps += 1

    def log_and_agree(self, log, row, samples_per_step, now=False):
        """Agree whether to stop. Every --log_every steps, or now, write `row`, to which this adds
        the means and the speed. Returns why to stop, "" if training goes on. (all ranks)"""
        must_log = now or row["step"] % self.args.log_every == 0
        if not must_log and self.steps % self.every > 0:
            return ""
        sums = self.sums.tolist()  # waits for the device
        seconds = time.monotonic() - self.began
        is_late = 0 < 60 * self.args.max_minutes < time.monotonic() - START
        wish = "time limit" if is_late else stop_signal  # "": go on
        everyone = gather([sums, seconds, self.data_wait, wish])
        all_sums, all_seconds, all_waits, wishes = zip(*everyone, strict=True)
        # the next meeting is in about a second, by the clock of rank 0: after the same step for all
        self.every = max(1, int(self.steps / all_seconds[0]))
        reason = max(wishes)
        if not must_log and not reason:
            return ""

        *_, norm, good = sums  # the same on all ranks
        if self.bad_in_row >= 10:
            raise RuntimeError("10 steps in a row without a finite gradient: a lower rate?")
        if good > 0:
            for name, total in zip(self.names, np.sum(all_sums, axis=0), strict=False):
                row[name] = total / good
            row["grad_norm"] = norm / good
        row["skipped"] = self.steps - good
        row["samples_per_s"] = self.steps * samples_per_step / all_seconds[0]
        row["data_wait"] = max(all_waits) / all_seconds[0]
        if self.sums.device.type != "cpu":
            row["peak_gb"] = torch.accelerator.max_memory_allocated() / 1e9  # of rank 0
        log.write(row)
        self.start()
        return reason


def save_checkpoint(name, args, log, loop, **contents):
    """Write OUTPUT_DIR/name. Modules and optimizers in `contents` give their state. (rank 0)"""
    if dist.get_rank() > 0:
        return
    state = {"script": SCRIPT, "args": vars(args), "loop": loop}
    state.update(wandb_id=log.wandb_id, log_size=log.path.stat().st_size)
    for key, value in contents.items():
        state[key] = value.state_dict() if hasattr(value, "state_dict") else value
    new = Path(args.output_dir) / "new.tmp"
    with open(new, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(new.with_name(name))  # which is never half written


def lock_folder(folder):
    """Only one run works in a folder. (rank 0)"""
    global folder_lock
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder_lock = open(folder / "lock", "a")
        fcntl.lockf(folder_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"another run is at work in {folder}: give another --output_dir") from None
    except OSError as error:
        raise InputError(f"--output_dir {folder} is not writable: {error}") from None


def find_checkpoint(args):
    """The state to go on from; None for a new run. (rank 0)"""
    folder = Path(args.output_dir)
    latest = folder / "latest.pt"
    summary = folder / "summary.json"  # of a run that has ended
    if args.fresh and (latest.exists() or summary.exists()):
        moved = folder.rename(f"{folder}.old-{time.strftime('%Y%m%d-%H%M%S')}")
        logging.info(f"--fresh: what {folder} had is now in {moved}")
        lock_folder(folder)
    if latest.exists():
        return torch.load(latest, map_location="cpu", weights_only=True)
    if summary.exists():
        raise InputError(f"{folder} holds a run without its latest.pt: --fresh moves it aside")
    return None


def open_run(args, free_on_resume):
    """Before anything long: lock --output_dir, which only rank 0 needs to see, settle the batch and
    compare options. Returns the state to go on from, None for a new run. (all ranks)"""
    if args.prepare_only:
        return None
    restarts = [os.environ.get(f"{name}_RESTART_COUNT", "0") for name in ("TORCHELASTIC", "SLURM")]
    args.fresh = args.fresh and restarts == ["0", "0"]  # a launcher that restarts gives it again
    on_rank0(lock_folder, Path(args.output_dir))
    state = None if args.fresh else on_rank0(find_checkpoint, args)
    if state and state.get("script") != SCRIPT:
        raise InputError(f"{args.output_dir} holds a run of {state.get('script')}: {HINT}")
    if args.global_batch_size == 0:
        args.batch_size = args.batch_size or BATCH_SIZE
        args.global_batch_size = args.batch_size * getattr(args, "accum", 1) * dist.get_world_size()
        if state:  # a resumed run keeps its own, on any number of ranks
            args.global_batch_size = state["args"]["global_batch_size"]
            logging.info(f"the run keeps its --global_batch_size {args.global_batch_size}")
    for rank, theirs in enumerate(gather(vars(args))):
        different = [name for name in theirs if theirs[name] != vars(args).get(name)]
        if different:
            text = f"rank {rank} has another {' and '.join(different)}"
            raise InputError(f"{text}: are there two jobs on one MASTER_PORT?")
    saved = state["args"] if state else vars(args)
    for name, value in vars(args).items():
        if value != saved.get(name) and name not in [*FREE_ON_RESUME, *free_on_resume]:
            text = f"{name} is {value}, and {args.output_dir} has a run with {saved.get(name)}"
            raise InputError(f"{text}: {HINT}")
    where = f" at step {state['loop']['step']}" if state else ""
    logging.info(f"{'resuming' if state else 'a new run in'} {args.output_dir}{where}")
    return state


def begin_run(args, state, data_hash):
    """Once all is read. From here on a signal ends the run after a step. (all ranks)"""
    args.data_hash = data_hash
    if len(set(gather(data_hash))) > 1:
        raise InputError("the ranks have read different data: all must see one --cache_dir")
    if state and state["args"]["data_hash"] != data_hash:
        raise InputError(f"{args.output_dir} has a run on other data (data_hash): {HINT}")
    if args.fresh:  # the data are good: move the old run aside
        on_rank0(find_checkpoint, args)
    for stop in STOP_SIGNALS:
        signal.signal(stop, on_signal)


class RunLog:
    """The log line, metrics.jsonl and wandb; at the end summary.json, curves.png. (all ranks)"""

    def __init__(self, args, state):
        self.args = args
        self.path = Path(args.output_dir) / "metrics.jsonl"
        self.wandb_id = state["wandb_id"] if state else os.urandom(4).hex()
        self.wandb = None
        self.trained = (state["loop"]["step"], state["args"]) if state else (-1, {})
        if dist.get_rank() > 0:
            return
        # steps after the checkpoint (without one: all) are made again: remove their lines
        self.path.touch()
        os.truncate(self.path, min(state["log_size"], self.path.stat().st_size) if state else 0)
        self.path.with_name("summary.json").unlink(missing_ok=True)  # of a run that had ended
        if args.wandb_mode != "disabled":
            import wandb

            # Only an online run can be resumed: of an offline one `wandb sync` would overwrite what
            # was sent before. So there each start has an id of its own, in one group.
            online = {"id": self.wandb_id, "resume": "allow"} if args.wandb_mode == "online" else {}
            project = os.environ.get("WANDB_PROJECT", Path(SCRIPT).stem)
            options = {"group": self.wandb_id, "mode": args.wandb_mode, "config": vars(args)}
            self.wandb = wandb.init(project=project, **options, **online)

    def write(self, row):
        logging.info(" ".join(f"{name}={value:.6g}" for name, value in row.items()))
        if dist.get_rank() > 0:
            return
        with open(self.path, "a") as file:
            file.write(json.dumps(row) + "\n")
        if self.wandb:
            self.wandb.log(row, step=row["step"])

    def close(self, status, **summary):
        """status: "finished", or why the run was stopped"""
        if dist.get_rank() > 0:
            return
        steps, options = self.trained
        if summary["steps"] > steps:  # else it keeps the options with which the steps were made
            options = vars(self.args)
        summary.update(status=status, script=SCRIPT, args=options, torch=torch.__version__)
        summary.update(world_size=dist.get_world_size(), seconds=round(time.monotonic() - START, 1))
        if torch.accelerator.is_available():
            summary["peak_gb"] = torch.accelerator.max_memory_allocated() / 1e9
        self.path.with_name("summary.json").write_text(json.dumps(summary, indent=1))
        self.draw()
        if self.wandb:
            self.wandb.finish()

    def stop(self, reason, **summary):
        """Returns the exit status: a time limit, and the SIGUSR1 of a batch queue, are planned."""
        self.close(f"stopped by {reason}", **summary)
        logging.info(f"stopped by {reason}: the same command (without --fresh) goes on")
        return 0 if reason in ("time limit", "SIGUSR1") else 1

    def draw(self):
        """curves.png: a panel for each column of metrics.jsonl that changes, or has one value"""
        import pandas

        rows = pandas.read_json(self.path, lines=True)
        if len(rows) > 0:  # a run that is stopped at once has none
            rows = rows.set_index("step").drop(columns=["phase", "epoch"], errors="ignore")
            rows = rows.loc[:, (rows.nunique() > 1) | (rows.count() == 1)]
            size = (8, 2 * len(rows.columns))
            axes = rows.interpolate("index", limit_area="inside").plot(subplots=True, figsize=size)
            rows.plot(subplots=True, ax=axes, style=".", markersize=5, legend=False)  # as measured
            axes[0].figure.savefig(self.path.with_name("curves.png"), bbox_inches="tight")


if __name__ == "__main__":
    launch(parse_args, main)
