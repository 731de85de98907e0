"""Train a graph network on causal sets: is a partial order a piece of spacetime, and of which kind?

A causal set is a finite set of events, partially ordered by "is in the past of" (Bombelli et al.
1987). The network sees elements, links (related pairs with nothing between them) and counts, and
predicts classes (tasks), such as cls: points scattered in Minkowski space ("sprinklings"), or
random orders like them; and numbers (targets), such as a curvature.

    python tools/make_causal_sets.py    # of the repository: 12,000 sets, data/causal_sets.npz
    torchrun --standalone --nproc_per_node=2 run_train_quantumgrav_ddp.py
    mpiexec -n 12 python run_train_quantumgrav_ddp.py --lr 3e-4 --output_dir outputs/x    # or srun

Data (--data): .npz files or zarr stores of arrays whose first axis counts the sets; or stores of a
group of such arrays for each set, cset_0, cset_1, ... Of two names the first that is there is read:
adjacency_matrix or adj (sets, N, N), 1 where i is in the past of j, which needs i < j; or, of links
alone, link_matrix or linkmat; or, for large sets, link_pairs (links, 2), the links (i, j) of all
sets, and link_counts, how many each set has; atomcount or cset_size, the elements of each set;
num_samples or num_causal_sets, the sets in use; for each task whole numbers (below 0 or NaN: not
known) or names; for each target numbers (NaN: not known).

Logged, over all ranks: step, epoch, lr, loss (summed over tasks and targets), grad_norm (before
clipping), skipped (steps whose gradient was not finite), samples_per_s, data_wait (part of the
time), peak_gb (of a GPU). After every epoch: val/loss, and METRICS of each task and target.

Files in --output_dir: latest.pt, from which the same command goes on; best.pt, step_N.pt;
metrics.jsonl; split.npz (what was trained on); at the end summary.json, curves.png, predictions.npz
(test). "(all ranks)": every rank must call it, in the same order; "(rank 0)": only rank 0 does.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch>=2.11,<2.14", "numpy>=2.2,<3", "tqdm>=4.67,<5", "pyyaml>=6.0,<7", "wandb>=0.25,<1",
#     "matplotlib>=3.10,<4", "pandas>=2.2,<4", "scikit-learn>=1.7,<2", "zarr>=3,<4"]
# ///

import argparse
import contextlib
import fcntl
import functools
import hashlib
import itertools
import json
import logging
import math
import os
import shutil
import signal
import sys
import tempfile
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
from sklearn.metrics import confusion_matrix, f1_score
from sklearn.preprocessing import StandardScaler
from sklearn.utils.class_weight import compute_sample_weight
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

# --------------------------------------------------------------------------------------------------
# Arguments

BATCH_SIZE = 64  # sets of a micro-batch, if --batch_size is not given
EVAL_BATCH_SIZE = 32  # sets that a rank validates at a time


def parse_args():
    parser = Parser(description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False)
    add = parser.add_argument_group("data").add_argument
    add("--data", nargs="+", type=expanded, default=["data/causal_sets.npz"], help=".npz or zarr")
    add("--tasks", nargs="*", help="classes to predict; where nothing is given: cls")
    add("--targets", nargs="*", default=[], help="numbers to predict")
    add("--class_weights", default="none", choices=["none", "balanced"], help="by 1 / share")
    add("--skip_bad_data", **FLAG, help="leave out damaged sets, and list them")
    add("--split", nargs=3, type=number(0, 1), default=[0.75, 0.1, 0.15], help="train valid test")
    add("--split_seed", type=NATURAL, default=0, help="another seed draws another split")

    add = parser.add_argument_group("model").add_argument
    add("--hidden_dim", type=COUNT, default=64, help="width")
    add("--num_layers", type=COUNT, default=3, help="layers of message passing")
    add("--messages", default="mean", choices=["mean", "sum", "none"], help="how added up")
    add("--dropout", type=number(0, 1), default=0.0, help="after each layer")
    add("--head_dim", type=COUNT, default=128, help="hidden width of a head")
    add("--start_from", type=expanded, help="weights to begin with: best.pt of another run")

    add = parser.add_argument_group("training").add_argument
    add("--num_epochs", type=COUNT, default=15, help="passes over the training sets at most")
    add("--lr", type=number(0), default=4e-3, help="peak learning rate")
    add("--warmup", type=number(0, 1), default=0.3, help="fraction of the run in which lr rises")
    add("--weight_decay", type=number(0), default=5e-5, help="of matrices; biases and norms: 0")

    add = parser.add_argument_group("evaluation, after every epoch").add_argument
    add("--stop_metrics", nargs="+", default=["loss"], help="the first chooses best.pt")
    add("--patience", type=NATURAL, default=0, help="stop after so many epochs without a gain")
    add("--stop_mode", default="any", choices=["any", "all"], help="of --stop_metrics for a gain")
    add("--delta", type=number(0), default=0.0, help="a gain must be larger than this")
    add("--grace", type=NATURAL, help="epochs that --patience ignores; None: those of the warm-up")

    add = parser.add_argument_group("as in config files of QuantumGrav").add_argument
    add("--world_size", dest="nproc_per_node", type=COUNT, default=1, help="as --nproc_per_node")
    add("--master_addr", help="where ranks meet; the variable MASTER_ADDR wins")
    add("--master_port", help="and on which port; the variable MASTER_PORT wins")
    add("--find_unused_parameters", type=boolean, choices=[False], help="as it is: all are used")

    # fp32 on GPUs, too: a network this small leaves them waiting for the host, and casts add to it
    add_common_arguments(parser, output_dir="outputs/quantumgrav", precision="fp32")
    args = parse_with_config(parser)

    args.tasks = args.tasks or ([] if args.targets else ["cls"])
    args.outputs = (*args.tasks, *args.targets)
    metrics = ["loss", *[f"{task}/{name}" for task in args.tasks for name in METRICS]]
    metrics += [f"{target}/{name}" for target in args.targets for name in TARGET_METRICS]
    if len(set(metrics)) < len(metrics):
        parser.error("--tasks and --targets: one is given twice")
    for name in args.stop_metrics:
        if name not in metrics:
            parser.error(f"--stop_metrics {name}: expected some of {', '.join(metrics)}")
    for name in ("master_addr", "master_port"):
        if getattr(args, name) and not os.environ.get(name.upper()):
            os.environ[name.upper()] = getattr(args, name)
    return args


# --------------------------------------------------------------------------------------------------
# Data

# of an element, and of a set; chains: of three; intervals_of_k: pairs with k elements between them
FEATURES = "in_degree out_degree past_height future_height past_size future_size".split()
STATISTICS = "elements pairs links minimal_elements maximal_elements longest_chain chains".split()
STATISTICS += [*[f"intervals_of_{k}" for k in range(11)], "larger_intervals"]
PARTS = ["train", "valid", "test"]
# what `describe` makes of a set; a file of each has the rows of all sets
ARRAYS = {
    "features": np.dtype((np.float32, len(FEATURES))),  # of each element
    "past": np.dtype(np.int16),  # what each element is linked to in its past, numbered in its set
    "future": np.dtype(np.int16),
    "statistics": np.dtype((np.float64, len(STATISTICS))),  # of each set
    "digests": np.dtype("S16"),  # equal for equal matrices
}


class Batch(NamedTuple):
    """B sets, not padded but laid one after the other: a graph of N elements and E links. Element i
    has the links past[past_ptr[i] : past_ptr[i + 1]]. Outputs are the tasks, then the targets."""

    features: torch.Tensor  # (N, 6) float32, logarithms of FEATURES
    sizes: torch.Tensor  # (B,) int64, elements per set
    past: torch.Tensor  # (E,) int64
    past_ptr: torch.Tensor  # (N + 1,) int64
    future: torch.Tensor  # (E,) int64
    future_ptr: torch.Tensor  # (N + 1,) int64
    statistics: torch.Tensor  # (B, 19) float32, logarithms of STATISTICS, standardized
    labels: torch.Tensor  # (B, outputs) float32: classes; targets, standardized; 0 where not known
    weights: torch.Tensor  # (B, outputs) float32, in the loss; 0 where not known
    totals: torch.Tensor  # (outputs,) float32, their sums over the global batch

    def to(self, device):
        return Batch(*[tensor.to(device, non_blocking=True) for tensor in self])


class CausalSets(Dataset):
    """What `prepare` has written, mapped into memory that the ranks of a node share. facts: what a
    network knows of its data; None: found in these. begun: of a network that goes on with these."""

    def __init__(self, folder, args, facts=None, begun=None):
        meta = json.loads((folder / "meta.json").read_text())
        self.hash = meta["hash"]
        self.names = np.array(meta["names"], object)  # where each set is from
        self.labels = np.load(folder / "labels.npy")  # (sets, outputs): class, value, NaN: unknown
        arrays = [np.memmap(folder / f"{name}.bin", ARRAYS[name], mode="r") for name in ARRAYS]
        # np.asarray: still mapped, and faster than np.memmap itself
        self.features, self.past, self.future, *of_sets = map(np.asarray, arrays)
        self.raw_statistics, self.digests = of_sets
        self.sizes, _, self.links = self.raw_statistics[:, :3].T.astype(np.int64)
        self.cost = self.sizes + self.links  # time and memory of a set grow with it
        # set i has the rows node_ptr[i] : node_ptr[i + 1] of features; link_ptr: of past and future
        self.node_ptr = np.concatenate([[0], np.cumsum(self.sizes)])
        self.link_ptr = np.concatenate([[0], np.cumsum(self.links)])

        values = np.hstack([self.labels, np.log1p(self.raw_statistics)])
        if facts is None:
            # sets of one digest are copies; the original is the first of them
            _, first, copy_of = np.unique(self.digests, return_index=True, return_inverse=True)
            self.split = split_sets(first[copy_of], args.split, args.split_seed)
            classes = meta["classes"]  # {task: names of its classes, target: []}
            self.say_what_is_known(classes, first[copy_of])
            is_class = [len(names) > 0 for names in classes.values()] + [False] * len(STATISTICS)
            # a class is left as it is: where all are 0 the mean is 0, and the scale 1
            train = self.part("train")
            scaler = StandardScaler().fit(np.where(is_class, 0, values[train]))
            facts = {"classes": classes, "means": scaler.mean_.tolist()}
            facts["scales"] = scaler.scale_.tolist()
            facts["sizes"] = [int(self.sizes[train].min()), int(self.sizes[train].max())]
            if begun:  # a network goes on with the means and scales of its own data
                for key in ("means", "scales"):
                    facts[key][len(classes) :] = begun[key][len(begun["classes"]) :]
                    for i, k in find_same(classes, begun["classes"]).items():
                        facts[key][i] = begun[key][k]
        self.facts = facts
        self.classes = facts["classes"]
        values = np.nan_to_num((values - facts["means"]) / facts["scales"]).astype(np.float32)
        self.standardized, self.statistics = np.split(values, [len(self.classes)], axis=1)
        self.weights = (~np.isnan(self.labels)).astype(np.float32)
        for i in range(len(args.tasks) if args.class_weights == "balanced" else 0):
            ids = np.flatnonzero((self.weights[:, i] > 0) & (self.split == 0))
            self.weights[ids, i] = compute_sample_weight("balanced", self.labels[ids, i])

    def say_what_is_known(self, classes, original):
        """Copies; in each part the sets of a class, the range of a target. InputError: too few."""
        copies = np.flatnonzero(original != np.arange(len(original)))
        if len(copies) > 0:
            logging.info(f"{len(copies)} sets are copies, such as set {copies[0]}: in one part")
        odd = np.flatnonzero(np.nan_to_num(self.labels - self.labels[original]).any(axis=1))
        if len(odd) > 0:
            pair = " and ".join(self.names[[odd[0], original[odd[0]]]])
            logging.warning(f"{len(odd)} copies have other labels, such as {pair}")
        for part, (i, (output, names)) in itertools.product(PARTS, enumerate(classes.items())):
            labels = self.labels[self.part(part), i]
            found, counts = np.unique(labels[~np.isnan(labels)], return_counts=True)
            if len(found) < (2 if part == "train" else 1):
                raise InputError(f"{output}: too few labels in the {part} part: only {found}")
            text = f"{counts.sum()} known, from {found[0]:g} to {found[-1]:g}"
            if names:
                known = dict(zip(found, counts, strict=True))
                text = ", ".join(f"{name} {known.get(k, 0)}" for k, name in enumerate(names[:20]))
            logging.info(f"{part}, {output}: {text}")

    def part(self, name):
        """The ids of the sets to train on, to validate on or to test on."""
        return np.flatnonzero(self.split == PARTS.index(name))

    def __getitem__(self, item):
        """What the sampler yields -> the Batch."""
        _, global_ids, positions_in_batch = item
        return self.make_batch(global_ids[positions_in_batch], global_ids)

    def make_batch(self, ids, global_ids):
        """The Batch of the sets `ids`, which are some of a global batch."""
        node_rows = [slice(self.node_ptr[i], self.node_ptr[i + 1]) for i in ids]
        link_rows = [slice(self.link_ptr[i], self.link_ptr[i + 1]) for i in ids]
        features = torch.from_numpy(np.concatenate([self.features[rows] for rows in node_rows]))
        degrees = features[:, :2].T.long()  # of past and future
        past_ptr, future_ptr = F.pad(degrees.cumsum(1), (1, 0))
        shift = np.repeat(np.cumsum(self.sizes[ids]) - self.sizes[ids], self.links[ids])
        past = torch.from_numpy(np.concatenate([self.past[rows] for rows in link_rows]) + shift)
        future = torch.from_numpy(np.concatenate([self.future[rows] for rows in link_rows]) + shift)
        of_sets = [self.sizes, self.statistics, self.standardized, self.weights]
        sizes, statistics, labels, weights = [torch.from_numpy(array[ids]) for array in of_sets]
        totals = torch.from_numpy(self.weights[global_ids].sum(0))
        links = (past, past_ptr, future, future_ptr)
        # degrees and heights range over orders of magnitude: hence their logarithm
        return Batch(features.log1p(), sizes, *links, statistics, labels, weights, totals)


def find_same(classes, others):
    """{number of an output: its number in others}, where these have it with the same classes"""
    same = [name for name, names in classes.items() if others.get(name) == names]
    return {list(classes).index(name): list(others).index(name) for name in same}


def split_sets(original, fractions, seed):
    """(sets,) uint8: 0 train, 1 valid, 2 test, in these fractions, rounded. A copy lies in the part
    of its original, or sets to train on would also be in the test."""
    first = np.unique(original)
    count = len(first)
    if abs(sum(fractions) - 1) > 1e-6 or min(fractions) * count < 1:
        raise InputError(f"--split {fractions}: expected sum 1, and a set of {count} in each part")
    ends = np.floor(np.cumsum(fractions[:2]) * count + 0.5)
    split = np.zeros(len(original), np.uint8)
    order = np.random.default_rng(seed).permutation(first)
    split[order] = np.digitize(np.arange(count), ends)
    return split[original]


# --------------------------------------------------------------------------------------------------
# Model


class SumNeighbors(torch.autograd.Function):
    """(N, D) -> (N, D): for each element the sum of its neighbors' rows in one direction. The
    gradient is the sum over the reversed links: embedding_bag would find them by sorting."""

    @staticmethod
    def forward(ctx, x, neighbors, ptr, reversed_neighbors, reversed_ptr):
        ctx.save_for_backward(reversed_neighbors, reversed_ptr)
        return F.embedding_bag(neighbors, x, ptr, mode="sum", include_last_offset=True)

    @staticmethod
    def backward(ctx, grad):
        rows, ptr = ctx.saved_tensors
        sums = F.embedding_bag(rows, grad.contiguous(), ptr, mode="sum", include_last_offset=True)
        return sums, None, None, None, None


class MessageLayer(nn.Module):
    """Messages, normalization, activation, residual connection, dropout: (N, inputs) -> (N, D)."""

    def __init__(self, args, inputs):
        super().__init__()
        self.aggregation = args.messages
        sources = 1 if args.messages == "none" else 3  # itself; or its past, its future, itself
        width = args.hidden_dim
        self.linear = nn.Linear(inputs * sources, width)
        # LayerNorm, not BatchNorm: a set's output must not depend on who else is in the batch
        self.norm = nn.LayerNorm(width)
        self.skip = nn.Linear(inputs, width, bias=False) if inputs != width else nn.Identity()
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, x, batch):
        inputs = []
        past = (batch.past, batch.past_ptr)
        future = (batch.future, batch.future_ptr)
        directions = [(past, future), (future, past)] if self.aggregation != "none" else []
        for links, reversed_links in directions:
            # in fp32 under autocast, too: thousands of neighbors are too many to add up in bf16
            messages = SumNeighbors.apply(x.float(), *links, *reversed_links)
            if self.aggregation == "mean":
                messages = messages / links[1].diff().clamp(min=1).float()[:, None]
            inputs.append(messages)
        y = F.relu(self.norm(self.linear(torch.cat([*inputs, x], dim=1))))
        return self.dropout(y + self.skip(x))


class CausalSetNet(nn.Module):
    """Message passing, pooling over each set, and one head for each task and target."""

    def __init__(self, args, classes):
        super().__init__()
        widths = [len(FEATURES)] + [args.hidden_dim] * (args.num_layers - 1)
        self.layers = nn.ModuleList([MessageLayer(args, width) for width in widths])
        self.norm = nn.LayerNorm(2 * args.hidden_dim)
        self.classes = classes
        self.heads = nn.ModuleList()
        for names in classes.values():
            hidden = nn.Linear(2 * args.hidden_dim + len(STATISTICS), args.head_dim)
            output = nn.Linear(args.head_dim, max(1, len(names)))
            self.heads.append(nn.Sequential(hidden, nn.ReLU(), output))

    def forward(self, batch):
        """{task: (B, classes) logits, target: (B, 1) standardized values}"""
        x = batch.features
        for layer in self.layers:
            x = layer(x, batch)
        # over each set; unsafe: does not check the sizes, which it would read back from a GPU
        options = {"lengths": batch.sizes, "unsafe": True}
        mean = torch.segment_reduce(x.float(), "mean", **options)
        maximum = torch.segment_reduce(x.float(), "max", **options)  # ties share its gradient
        # no message tells how many elements lie between two others: so the heads get such numbers
        x = torch.cat([self.norm(torch.cat([mean, maximum], dim=1)), batch.statistics], dim=1)
        return {name: head(x).float() for name, head in zip(self.classes, self.heads, strict=True)}


def load_network(path):
    """(network, options of its run, what it knows of its data) of a checkpoint. (rank 0)"""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        options = argparse.Namespace(**state["args"])
        network = CausalSetNet(options, state["data"]["classes"])
        network.load_state_dict(state["model"])
        return network, options, state["data"]
    except FileNotFoundError:
        raise InputError(f"{path}: there is no such file") from None
    except Exception as error:  # it holds something else
        text = f"expected best.pt, step_N.pt or latest.pt of {Path(__file__).name}"
        raise InputError(f"{path}: {type(error).__name__}; {text}") from None


def take_over(args, model, classes, network, options):
    """Begin with the weights of a network. Heads that it has not, or of other classes, are new."""
    for name in ("hidden_dim", "num_layers", "messages", "head_dim"):
        needed = getattr(options, name)
        if getattr(args, name) != needed:
            raise InputError(f"--start_from {args.start_from}: it needs --{name} {needed}")
    model.layers.load_state_dict(network.layers.state_dict())
    model.norm.load_state_dict(network.norm.state_dict())
    same = find_same(classes, network.classes)
    for i, k in same.items():
        model.heads[i] = network.heads[k]
    new = [name for i, name in enumerate(classes) if i not in same]
    logging.info(f"--start_from {args.start_from}: all is taken over, but new are the heads {new}")


# --------------------------------------------------------------------------------------------------
# Loss

LOGGED = ["loss"]


def batch_loss(outputs, batch):
    """What this micro-batch adds to the loss of the global batch: for each task the mean cross
    entropy, for each target the mean squared error of standardized values, summed. Parts have
    different numbers of labels: so each is divided by the weights of the whole global batch."""
    loss = 0.0
    for i, output in enumerate(outputs.values()):
        labels = batch.labels[:, i]
        if output.shape[1] > 1:
            errors = F.cross_entropy(output, labels.long(), reduction="none")
        else:
            errors = (output[:, 0] - labels).square()
        loss = loss + (errors * batch.weights[:, i]).sum() / batch.totals[i].clamp(min=1e-6)
    return loss


# --------------------------------------------------------------------------------------------------
# Evaluation

METRICS = ["loss", "accuracy", "f1_macro", "f1_weighted", "ece"]  # of a task
TARGET_METRICS = ["loss", "mae", "rmse", "r2"]


def classification(logp, labels, _=None):
    """METRICS of log-probabilities (n, K) and labels (n,): cross entropy in nats; f1, mean over
    classes, or weighted by their sets; calibration error in 15 bins (Guo et al. 2017)."""
    labels = labels.astype(int)
    guess = logp.argmax(1)
    confidence = np.nan_to_num(np.exp(logp.max(1)))  # a NaN counts as 0
    bins = np.minimum((confidence * 15).astype(int), 14)
    gaps = np.bincount(bins, weights=(guess == labels) - confidence)  # the sum in each bin
    loss = -logp[np.arange(len(labels)), labels].mean()
    f1 = [f1_score(labels, guess, average=average) for average in ("macro", "weighted")]
    values = [loss, (guess == labels).mean(), *f1, np.abs(gaps).sum() / len(labels)]
    return dict(zip(METRICS, map(float, values), strict=True))


def regression(values, labels, scale):
    """TARGET_METRICS of values (n,) and labels (n,) in the target's unit; but loss is the mean
    square in standard deviations, and r2 is the share of the variance that is explained."""
    square = float(np.square(values - labels).mean())
    r2 = float(1 - square / labels.var()) if labels.var() > 0 else 0.0
    mae = float(np.abs(values - labels).mean())
    return {"loss": square / scale**2, "mae": mae, "rmse": square**0.5, "r2": r2}


@torch.no_grad()
def predict(model, data, ids, device):
    """{task: log-probabilities (len(ids), classes), target: values (len(ids),)}, without autocast.
    Batch k goes to rank k % world_size: so each set counts once, whatever that is. (all ranks)"""
    widths = [max(1, len(names)) for names in data.classes.values()]
    values = torch.zeros(len(ids), sum(widths), device=device)
    model.eval()
    batches = np.array_split(np.arange(len(ids)), math.ceil(len(ids) / EVAL_BATCH_SIZE))
    for rows in batches[dist.get_rank() :: dist.get_world_size()]:
        batch = data.make_batch(ids[rows], ids[rows]).to(device)
        values[rows[0] : rows[-1] + 1] = torch.cat(list(model(batch).values()), dim=1)
    model.train()
    dist.all_reduce(values)  # each row is zero on all ranks but one
    values = dict(zip(data.classes, values.cpu().double().split(widths, dim=1), strict=True))
    for i, (name, names) in enumerate(data.classes.items()):
        target = values[name][:, 0] * data.facts["scales"][i] + data.facts["means"][i]
        values[name] = (values[name].log_softmax(dim=1) if names else target).numpy()
    return values


def evaluate(model, data, ids, device):
    """Returns loss, summed, and OUTPUT/... METRICS; and what `predict` returns. (all ranks)"""
    predictions = predict(model, data, ids, device)
    metrics = {"loss": 0.0}
    for i, (name, names) in enumerate(data.classes.items()):
        labels = data.labels[ids, i]
        known = ~np.isnan(labels)
        function = classification if names else regression
        # All ranks decide by these, so one computes them: the last bit may depend on the processor.
        scale = data.facts["scales"][i]
        values = on_rank0(function, predictions[name][known], labels[known], scale)
        metrics["loss"] += values["loss"]
        metrics.update({f"{name}/{metric}": value for metric, value in values.items()})
    return metrics, predictions


def is_better(name, value, best, delta=0.0):
    """Whether a metric is better than `best` (None: there is none yet) by more than delta."""
    sign = -1 if name.endswith(("loss", "ece", "mae", "rmse")) else 1  # these should fall
    return best is None or sign * (value - best) > delta


def count_waiting(loop, metrics, epoch, args):
    """Count the epochs without a gain in loop["waited"]. A gain is when any, or all, of
    --stop_metrics beat loop["best_values"] by more than --delta: only then are these replaced."""
    gained = {}
    for name in args.stop_metrics:
        if is_better(name, metrics[name], loop["best_values"].get(name), args.delta):
            gained[name] = metrics[name]
    needed = len(set(args.stop_metrics)) if args.stop_mode == "all" else 1
    if len(gained) >= needed:
        loop["best_values"].update(gained)
        loop["waited"] = 0
    elif epoch >= (args.warmup * args.num_epochs if args.grace is None else args.grace):
        loop["waited"] += 1


def note_best(loop, metrics, args):
    """Whether the first of --stop_metrics is better than ever. Then it is kept in loop["best"]."""
    name = args.stop_metrics[0]
    if not is_better(name, metrics[name], loop["best"].get("value")):
        return False
    loop["best"] = {"metric": name, "value": metrics[name], "step": loop["step"]}
    return True


def report(args, data, ids, metrics, predictions):
    """The test, beside what needs no network; predictions.npz. Returns the baselines, and for each
    task the f1 of each class and the confusion matrix (a row for each label). (rank 0)"""
    logging.info("test " + " ".join(f"{name}={value:.4f}" for name, value in metrics.items()))
    baselines = measure_baselines(data)
    by_class = {}
    arrays = {"ids": ids, "names": data.names[ids].astype(str), "labels": data.labels[ids]}
    for (name, names), labels in zip(data.classes.items(), data.labels[ids].T, strict=True):
        figure = "accuracy" if names else "rmse"
        reached = metrics[f"{name}/{figure}"]
        for kind, value in {**baselines[name], "this network": reached}.items():
            logging.info(f"test {figure}  {name:10} {kind:20} {value:.4f}")
            if is_better(figure, value, reached):
                logging.warning(f"{name}: the network is worse than what needs no network: {kind}")
        arrays[f"logp_{name}" if names else name] = predictions[name]
        if names:
            known = ~np.isnan(labels)
            pair = (labels[known], predictions[name][known].argmax(1))
            classes = range(len(names))
            f1 = f1_score(*pair, labels=classes, average=None, zero_division=0).tolist()
            matrix = confusion_matrix(*pair, labels=classes).tolist()
            by_class[name] = {"names": names, "f1": f1, "confusion": matrix}
    np.savez(Path(args.output_dir) / "predictions.npz", **arrays)
    return baselines, by_class


def measure_baselines(data):
    """{task: {name: test accuracy}, target: {name: test rmse}} of what needs no network: commonest
    class or mean; logistic or ridge regression on STATISTICS; boosting on these and quantiles of
    FEATURES; of the target `dim` or `dimension` what related pairs say (Meyer 1988). (rank 0)"""
    from sklearn import dummy, ensemble, linear_model, metrics

    sets = np.split(data.features, data.node_ptr[1:-1])
    quantiles = [np.quantile(x, [0.1, 0.3, 0.5, 0.7, 0.9], axis=0).ravel() for x in sets]
    inputs = np.hstack([data.statistics, quantiles])
    elements, pairs = data.raw_statistics[:, :2].T
    dims = np.linspace(12, 1, 11_001)  # with them the share of related pairs falls
    expected = [math.gamma(d + 1) * math.gamma(d / 2) / (2 * math.gamma(1.5 * d)) for d in dims]
    dims = np.interp(2 * pairs / (elements * (elements - 1)), expected, dims)
    baselines = {}
    for (name, names), labels in zip(data.classes.items(), data.labels.T, strict=True):
        train = np.flatnonzero(~np.isnan(labels) & (data.split == 0))[:50_000]  # more takes long
        test = ~np.isnan(labels) & (data.split == 2)
        models = {"mean": dummy.DummyRegressor(), "ridge regression": linear_model.RidgeCV()}
        models["boosting"] = ensemble.HistGradientBoostingRegressor(random_state=0)
        if names:
            linear = linear_model.LogisticRegression(C=100, max_iter=2000)  # C=1 is less accurate
            models = {"commonest": dummy.DummyClassifier(), "logistic regression": linear}
            models["boosting"] = ensemble.HistGradientBoostingClassifier(random_state=0)
        guesses = {}
        for kind, model in models.items():
            columns = inputs if kind == "boosting" else data.statistics
            guesses[kind] = model.fit(columns[train], labels[train]).predict(columns[test])
        if name in ("dim", "dimension") and not names:
            guesses["Myrheim-Meyer"] = dims[test]
        score = metrics.accuracy_score if names else metrics.root_mean_squared_error
        baselines[name] = {kind: score(labels[test], guess) for kind, guess in guesses.items()}
    return baselines


# --------------------------------------------------------------------------------------------------
# Train


def lr_factor(args, step, steps):
    """Share of the peak rate: half a cosine up from 1/25, then one to 0 (Smith and Topin 2018)."""
    warmup_steps = round(args.warmup * steps)
    if step < warmup_steps:
        return 0.04 + 0.96 * (0.5 - 0.5 * math.cos(math.pi * step / warmup_steps))
    return 0.5 + 0.5 * math.cos(math.pi * (step - warmup_steps) / (steps - warmup_steps))


def make_optimizer(args, model):
    # Weight decay pulls towards zero. That helps matrices; a bias or a norm's scale needs its size.
    decay = [p for p in model.parameters() if p.ndim > 1]
    no_decay = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decay}, {"params": no_decay, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=args.lr, weight_decay=args.weight_decay, fused=True)


def train(args, device, data, model, state, log):
    """Returns why training was stopped, "" if it has ended; and `loop`, its state. (all ranks)"""
    world_size = dist.get_world_size()
    # in fp32 an element or link takes up to 3 numbers for each unit of a layer
    room = room_on_gpu(model, device) / (4 * 3 * args.hidden_dim * args.num_layers)
    sampler = GlobalBatchSampler(data.part("train"), args, data.cost, room)
    steps = sampler.steps * args.num_epochs
    logging.info(f"  {steps:,} steps, {sampler.steps:,} an epoch")
    optimizer = make_optimizer(args, model)
    autocast = choose_precision(args, device)
    loop = {"step": 0, "best_values": {}, "best": {}, "waited": 0}
    if state:
        loop = state["loop"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        state.clear()  # each rank has a copy: free it
    ddp_model = wrap_ddp(model, args, device)
    contents = {"loop": loop, "model": model, "data": data.facts}
    save = functools.partial(save_checkpoint, args=args, log=log, **contents)
    sampler.start = loop["step"]
    batches = make_loader(data, sampler, args, device)

    logging.info("Starting distributed training...")
    bar = tqdm(total=steps, initial=loop["step"], disable=None if dist.get_rank() == 0 else True)
    meter = Meter(LOGGED, args, device)
    reason = ""
    while loop["step"] < steps and not reason and not 0 < args.patience <= loop["waited"]:
        step = loop["step"]
        epoch, position = divmod(step, sampler.steps)
        if position == 0:
            logging.info(f"Starting training epoch {epoch}")
        seed_step(args, step)
        lr = args.lr * lr_factor(args, step, steps)
        for group in optimizer.param_groups:
            group["lr"] = lr

        # forward and backward, micro-batch by micro-batch; the last one sums over the ranks
        metrics = torch.zeros(len(LOGGED), device=device)
        for micro in range(1, sampler.accumulation + 1):
            batch = meter.next_batch(batches, device)
            ddp_model.require_backward_grad_sync = micro == sampler.accumulation
            with autocast():
                loss = batch_loss(ddp_model(batch), batch)
            (loss * world_size).backward()  # DDP takes the mean, we want the sum
            metrics += loss.detach()
        norm = update_if_finite(args, optimizer)
        meter.add(metrics, norm)
        loop["step"] += 1
        bar.update()

        # log, and agree whether to stop
        must_evaluate = position == sampler.steps - 1
        must_save = loop["step"] % args.save_every == 0 or must_evaluate
        log_row = {"step": loop["step"], "epoch": epoch, "lr": lr}
        reason = meter.log_and_agree(log, log_row, sampler.global_batch, must_save)

        # evaluate: all ranks get the same metrics, and so agree on what is best
        if must_evaluate:
            val_metrics, _ = evaluate(model, data, data.part("valid"), device)
            if not math.isfinite(val_metrics["loss"]):
                raise RuntimeError(f"the validation loss is {val_metrics['loss']}: a lower --lr?")
            val_row = {f"val/{name}": value for name, value in val_metrics.items()}
            log.write({"step": loop["step"], "epoch": epoch, **val_row})
            count_waiting(loop, val_metrics, epoch, args)
            if note_best(loop, val_metrics, args):
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
    free_on_resume = "data skip_bad_data num_epochs patience grace master_addr master_port".split()
    state = open_run(args, free_on_resume)
    begun = state["data"] if state else None
    if args.start_from and not state:
        *start, begun = on_rank0(load_network, args.start_from)
    logging.info("Preparing data loaders...")
    data = CausalSets(read_once(prepare, args), args, begun=begun)
    if args.prepare_only:
        logging.info(f"The data are read: {args.cache_dir}")
        return 0
    for name, title in {"train": "Training", "valid": "Validation", "test": "Test"}.items():
        logging.info(f"  {title + ' samples:':19} {len(data.part(name)):,}")
    torch.manual_seed(args.seed)  # the same weights on all ranks
    model = CausalSetNet(args, data.classes)
    if args.start_from and not state:
        take_over(args, model, data.classes, *start)
    begin_run(args, state, data.hash)
    split = Path(args.output_dir) / "split.npz"  # by which tools know what was trained on
    on_rank0(functools.partial(np.savez, split, digests=data.digests, split=data.split))
    model.to(device)
    logging.info(f"{sum(p.numel() for p in model.parameters()):,} parameters")

    log = RunLog(args, state)
    with logging_redirect_tqdm():
        reason, loop = train(args, device, data, model, state, log)
    figures = {"steps": loop["step"], "best": loop["best"]}
    if reason:
        return log.stop(reason, **figures)
    if 0 < args.patience <= loop["waited"]:
        logging.info(f"Stopped early: no gain in {loop['waited']} epochs.")
    logging.info("Starting testing phase...")
    for stop in STOP_SIGNALS:  # all is saved: from here on they end the process
        signal.signal(stop, signal.SIG_DFL)
    model.load_state_dict(on_rank0(torch.load, f"{args.output_dir}/best.pt", "cpu")["model"])
    ids = data.part("test")
    metrics, predictions = evaluate(model, data, ids, device)
    baselines, by_class = on_rank0(report, args, data, ids, metrics, predictions)
    log.close("finished", **figures, test=metrics, baselines=baselines, classes=by_class)
    logging.info("Training and evaluation completed successfully!")
    return 0


# --------------------------------------------------------------------------------------------------
# Reading

# Rank 0 reads the user's files once. Training needs only what `write_sets` has written. The names
# are those of stores of QuantumGrav.jl and of its Python package.
ADJACENCY = ["adjacency_matrix", "adj"]
PAIRS = "link_pairs"
PAIR_COUNTS = "link_counts"
RELATIONS = [*ADJACENCY, "link_matrix", "linkmat", PAIRS]
SIZE_ARRAYS = ["atomcount", "cset_size"]
COUNTS = ["num_samples", "num_causal_sets"]
READER = 9  # raise it when you change what is read or kept: else an old cache is used


def choose(arrays, *names, option=""):
    for name in names:
        if name in arrays:
            return name
    found = ", ".join(arrays) or "none"
    raise ValueError(f"found the arrays {found}; expected {' or '.join(names)}{option}")


def expect(condition, text):
    if not condition:
        raise ValueError(text)


@functools.lru_cache(maxsize=2)
def open_arrays(path, outputs):
    """{name: array} of an .npz file or a folder of a zarr store; those not needed are empty."""
    needed = {*RELATIONS, PAIR_COUNTS, *SIZE_ARRAYS, *COUNTS, *outputs}
    if path.is_dir():
        import zarr

        # we look for them ourselves: groups that Julia writes have no file that zarr knows them by
        arrays = {folder.name: np.empty(0) for folder in sorted(path.glob("*/"))}
        for name in needed.intersection(arrays):
            arrays[name] = zarr.open_array(path / name, mode="r")
        return arrays
    expect(zipfile.is_zipfile(path), "is no .npz file, and no zarr store")
    file = np.load(path)
    arrays = dict.fromkeys(file.files, np.empty(0))
    for name in needed.intersection(arrays):
        try:
            arrays[name] = file[name]
        except ValueError:
            text = "expected texts, numbers, matrices of one size (pad them with zeros)"
            raise ValueError(f"{name} is an array of objects; {text}") from None
    return arrays


def list_units(path, outputs):
    """What is read at a time: (a group of one set, None), or (an .npz file, or a folder of arrays
    that hold all sets, counted by the first axis; a range of these sets)."""
    groups = sorted((int(g.name[5:]), g) for g in path.glob("cset_*") if g.name[5:].isdigit())
    units = [(group, None) for _, group in groups]
    for folder in [] if units else [path, *sorted(path.glob("*/"))]:
        arrays = open_arrays(folder, outputs)
        if not any(name in arrays for name in RELATIONS):
            continue
        name = choose(arrays, *RELATIONS)
        counted = choose(arrays, PAIR_COUNTS) if name == PAIRS else name
        count = arrays[counted].shape[0]
        shapes = {other: (count,) for other in [*outputs, choose(arrays, *SIZE_ARRAYS)]}
        if name == PAIRS:
            shapes[name] = (int(arrays[counted][...].sum()), 2)
        for other, expected in shapes.items():
            shape = arrays[choose(arrays, other, option=" (of --tasks or --targets)")].shape
            expect(shape == expected, f"{other} has shape {shape}; {counted} needs {expected}")
        # about 1 MB, or a chunk of a store, which is decompressed at once
        chunk = 1 if name == PAIRS else getattr(arrays[name], "chunks", [1])[0]
        step = chunk * (math.ceil(2**20 * count / max(1, arrays[name].nbytes) / chunk) or 1)
        for total in arrays.keys() & COUNTS:
            count = min(count, number_of(arrays[total][...], total))
        units += [(folder, range(i, min(i + step, count))) for i in range(0, count, step)]
    expect(units, f"has no sets, or none of {', '.join(RELATIONS)}")
    return units


def read_unit(unit, outputs):
    """Yields for each set its name, and {name of an array: its value}."""
    path, ids = unit
    arrays = open_arrays(path, outputs)
    if ids is None:
        yield str(path), {name: array[...] for name, array in arrays.items()}
        return
    names = [*outputs, choose(arrays, *SIZE_ARRAYS), choose(arrays, *RELATIONS)]
    columns = {name: arrays[name][ids.start : ids.stop] for name in names if name != PAIRS}
    if PAIRS in names:
        ptr = np.insert(np.cumsum(arrays[PAIR_COUNTS][: ids.stop]), 0, 0)[ids.start :]
        columns[PAIRS] = np.split(arrays[PAIRS][ptr[0] : ptr[-1]], ptr[1:-1] - ptr[0])
    for i, number in enumerate(ids):
        yield f"{path}: set {number}", {name: column[i] for name, column in columns.items()}


def number_of(value, name, option=""):
    """A whole number, -1 where it is not known; of --tasks or a name; of --targets any, or NaN."""
    number = np.asarray(value).item()
    if isinstance(number, bytes):
        number = number.decode()
    if option == "--targets":
        with contextlib.suppress(ValueError):
            number = float(number)
        is_sound = isinstance(number, float) and not math.isinf(number)
        expect(is_sound, f"{name} is {number}; expected a number or NaN (names are for --tasks)")
        return number
    if isinstance(number, str) and not number.strip().removeprefix("-").isdecimal():
        return -1 if number.strip() in ("", "nan") else number.strip()  # a name, such as mink2
    if isinstance(number, float) and math.isnan(number):
        return -1
    hint = " (others are for --targets)" if option else ""
    expect(float(number).is_integer(), f"{name} is {number}; expected a whole number{hint}")
    return int(number)


def relations_of(values):
    """Of a set: for each element an integer, whose bit i is 1 if the input says that i is in its
    past (all such i, or the links only). ValueError where the input is malformed."""
    name = choose(values, *RELATIONS)
    given = values[name]
    size = choose(values, *SIZE_ARRAYS) if name == PAIRS else choose(values, *SIZE_ARRAYS, name)
    n = len(given) if size == name else number_of(values[size], size)
    expect(2 <= n <= 32767, f"{n} elements; expected 2 to 32767")
    if name == PAIRS:
        earlier, later = given.T
        is_sound = (0 <= earlier) & (earlier < later) & (later < n)
        expect(len(given) and is_sound.all(), f"{name} has none, or not all 0 <= i < j < {n}")
        relations = [0] * n
        for i, j in given.astype(int).tolist():
            relations[j] |= 1 << i
        return relations
    shape = given.shape
    expect(shape == shape[:1] * 2 and n <= shape[0], f"{n} elements in {name} of shape {shape}")
    matrix = np.zeros_like(given, bool)
    matrix[:n, :n] = given[:n, :n]
    expect((matrix == given).all(), f"{name}: expected 0 and 1, and only 0 beyond {n} elements")
    expect(matrix.any(), f"{name} has no pairs at all: is a chunk of the store missing?")
    if not np.triu(matrix).any():
        matrix = matrix.T  # as arrays of Julia arrive
    expect(not matrix.diagonal().any(), f"{name} has pairs with i == j; expected 0 for these")
    text = "a cycle, or not sorted, such as by the number of elements in the past"
    expect(not np.tril(matrix).any(), f"{name} has pairs with i > j: {text}")
    rows = np.packbits(matrix[:n, :n].T, axis=1, bitorder="little")
    return [int.from_bytes(row.tobytes(), "little") for row in rows]


def links_of(relations):
    """Of relations, all or enough to imply the others (at least the links): for each element the
    earlier ones that it is linked to, and its whole past as an integer."""
    links = []
    past = []
    for left in relations:
        linked = []
        before = 0
        while left:  # the latest element that is left is linked; those in its past are not
            latest = left.bit_length() - 1
            linked.append(latest)
            before |= past[latest] | 1 << latest
            left &= ~before
        links.append(linked[::-1])
        past.append(before)
    return links, past


def climb(links, elements):
    """For each element the longest chain up to it, without it, and all that comes before it: (n,),
    and bits (n, words) uint64. `elements`: in an order in which links[e] come before e."""
    height = [0] * len(links)
    before = [0] * len(links)
    for element in elements:
        for other in links[element]:
            height[element] = max(height[element], height[other] + 1)
            before[element] |= before[other] | 1 << other
    width = 8 * math.ceil(len(links) / 64)
    whole = b"".join(bits.to_bytes(width, "little") for bits in before)
    return height, np.frombuffer(whole, np.uint64).reshape(len(links), -1)


def count_intervals(past, future):
    """(12,): related pairs with 0, ..., 10 elements between them, and with more (Glaser and Surya
    2013), of bits of `climb`. Beyond 2,048 elements: of random ones, and scaled up."""
    n = len(past)
    draws = np.random.default_rng(0)
    rows, columns = [draws.permutation(n)[:2048] for _ in range(2)]
    is_related = np.unpackbits(past[rows].view(np.uint8), axis=1, count=n, bitorder="little")
    later, earlier = np.nonzero(is_related[:, columns])
    counts = np.zeros(12)
    for pairs in np.array_split(np.arange(len(later)), 1 + len(later) * past.shape[1] // 2**17):
        both = past[rows[later[pairs]]] & future[columns[earlier[pairs]]]
        between = np.bitwise_count(both).sum(1, dtype=np.int64)
        counts += np.bincount(np.minimum(between, 11), minlength=12)
    return counts * (np.bitwise_count(past).sum() / max(1, counts.sum()))


def describe(values):
    """What is kept of a set: {name in ARRAYS: its rows}. ValueError where it is no order."""
    name = choose(values, *RELATIONS)
    relations = relations_of(values)
    links, past = links_of(relations)
    in_degree = list(map(len, links))
    if name in ADJACENCY:
        expect(past == relations, f"{name} is not transitive; links alone go under link_matrix")
    else:
        expect(in_degree == list(map(int.bit_count, relations)), f"{name} has pairs besides links")
    reversed_links = [[] for _ in links]
    for later, linked in enumerate(links):
        for earlier in linked:
            reversed_links[earlier].append(later)
    out_degree = list(map(len, reversed_links))
    past_height, past = climb(links, range(len(links)))
    future_height, future = climb(reversed_links, reversed(range(len(links))))
    past_size = np.bitwise_count(past).sum(1, dtype=np.int64)
    future_size = np.bitwise_count(future).sum(1, dtype=np.int64)

    features = [in_degree, out_degree, past_height, future_height, past_size, future_size]
    features = np.array(features, np.float32).T.copy()
    extremal = [np.count_nonzero(past_size == 0), np.count_nonzero(future_size == 0)]
    chains = (past_size * future_size).sum()  # by the element in the middle
    counts = [len(links), past_size.sum(), sum(in_degree), *extremal, max(past_height) + 1, chains]
    statistics = np.array([*counts, *count_intervals(past, future)])
    past_links = np.concatenate(links).astype(np.int16)
    future_links = np.concatenate(reversed_links).astype(np.int16)
    digest = hashlib.sha256(features.tobytes() + past_links.tobytes()).hexdigest()[:16]
    arrays = [features, past_links, future_links, statistics, np.array(digest, "S16")]
    return dict(zip(ARRAYS, arrays, strict=True))


class Units(Dataset):
    def __getitem__(self, item):
        """The folder of a unit, made once: so a killed reading loses no more than that."""
        unit, args, reading = item
        return cached(reading, "unit", str(unit), functools.partial(write_unit, unit, args))


def write_unit(unit, args, folder):
    """NAME.bin for each of ARRAYS; labels.json: [[[name, label, ...], ...], bad sets]"""
    arrays = {name: [] for name in ARRAYS}
    rows = []
    bad = []
    for name, values in read_unit(unit, args.outputs):
        try:
            row = [name]
            for output in args.outputs:
                option = "--targets" if output in args.targets else "--tasks"
                value = values[choose(values, output, option=f" (of {option})")]
                row.append(number_of(value, output, option))
            for key, array in describe(values).items():
                arrays[key].append(array.tobytes())
            rows.append(row)
        except ValueError as error:
            bad.append(f"{name}: {error}")
    for name, parts in arrays.items():
        (folder / f"{name}.bin").write_bytes(b"".join(parts))
    (folder / "labels.json").write_text(json.dumps([rows, bad]))


def write_sets(args, digest, folder):
    """Read --data with all cores, unit by unit, into the folder. (rank 0)"""
    rows = []
    bad = []
    reading = f"{args.cache_dir}/reading-{digest[:16]}"
    for path in map(Path, args.data):
        try:
            items = [(unit, args, reading) for unit in list_units(path, args.outputs)]
            cores = len(os.sched_getaffinity(0))
            options = argparse.Namespace(num_workers=min(len(items) - 1, cores))
            loader = make_loader(Units(), items, options, torch.device("cpu"))
            for unit_folder in tqdm(loader, desc=path.name, total=len(items), disable=None):
                for name in ARRAYS:
                    with open(folder / f"{name}.bin", "ab") as file:
                        file.write((unit_folder / f"{name}.bin").read_bytes())
                more, wrong = json.loads((unit_folder / "labels.json").read_text())
                rows += more
                bad += wrong
        except Exception as error:  # zarr and its decoders raise many kinds; a worker adds lines
            text = (str(error).strip() or repr(error)).splitlines()[-1]
            raise InputError(f"{path}: {text} (--help has the format)") from error
    if bad:
        lines = "\n  ".join(["", *bad[:20]])
        if not rows or not args.skip_bad_data:
            hint = "--skip_bad_data leaves them out" if rows else "none is left"
            raise InputError(f"{len(bad)} bad sets; {hint}:{lines}")
        logging.warning(f"{len(bad)} bad sets are left out:{lines}")

    classes = dict.fromkeys(args.outputs, [])
    names, *columns = [list(column) for column in zip(*rows, strict=True)]
    for i, task in enumerate(args.tasks):
        found = [label for label in set(columns[i]) if isinstance(label, str) or label >= 0]
        found.sort(key=lambda label: (isinstance(label, str), label))  # numbers, then names
        numbers = {label: number for number, label in enumerate(found)}
        columns[i] = [numbers.get(label, math.nan) for label in columns[i]]
        classes[task] = list(map(str, found))
    labels = np.array(columns, np.float64).T
    np.save(folder / "labels.npy", labels)
    digests = (folder / "digests.bin").read_bytes()
    content = hashlib.sha256(json.dumps(classes).encode() + labels.tobytes() + digests)
    meta = {"classes": classes, "hash": content.hexdigest()[:12], "names": names}
    (folder / "meta.json").write_text(json.dumps(meta))
    shutil.rmtree(reading, ignore_errors=True)


def prepare(args):
    """The folder with the sets of --data, read once, and kept. (rank 0)"""
    key = [READER, args.tasks, args.targets]
    for path in map(Path, args.data):
        if not path.exists():
            raise InputError(f"--data {path}: there is no such file: make_causal_sets.py makes one")
        stats = [file.stat() for file in [path, *sorted(path.rglob("*"))]]
        key.append([str(path.resolve()), [(stat.st_size, stat.st_mtime_ns) for stat in stats]])
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    with contextlib.suppress(OSError):  # `cached` says what is wrong
        Path(args.cache_dir).mkdir(parents=True, exist_ok=True)
        lock = open(f"{args.cache_dir}/reading.lock", "a")  # held until this function ends
        fcntl.lockf(lock, fcntl.LOCK_EX)  # another run may be reading the same: wait for it
    write = functools.partial(write_sets, args, digest)
    return cached(args.cache_dir, "sets", [digest, args.skip_bad_data], write)


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
    add("--batch_size", type=NATURAL, default=0, help=f"micro-batch; 0: {BATCH_SIZE}, or what fits")
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
        elif value is not None:  # left empty: the default
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
