"""Train a graph network on causal sets: is a partial order a piece of spacetime, and of which dimension?

A causal set is a finite partial order, elements being events and the order "is in the past of" (Bombelli et al. 1987).
The network sees its links (the order without what follows from it) and says what made it.

Run
    python run_train_quantumgrav_ddp.py --nproc 3                        three processes on this machine
    torchrun --nproc_per_node=3 run_train_quantumgrav_ddp.py             one node; also torch.distributed.launch
    torchrun --nproc_per_node=8 --nnodes=2 --node_rank=0 --master_addr=HOST run_train_quantumgrav_ddp.py     two nodes
    python run_train_quantumgrav_ddp.py --config configs/config_quantumgrav_quickstart.yaml
    python run_train_quantumgrav_ddp.py --seeds 0,1,2 --ablation         mean and spread, beside no message passing
    python run_train_quantumgrav_ddp.py --sweep "lr=1e-3,3e-4;hidden_dim=32,64"     a grid, in a table
Data
    --kinds        sets are generated: sprinklings into Minkowski space (mink2, mink3, mink4: the dimension), transitive
                   percolation with the same share of related pairs, layered and Kleitman-Rothschild (kr) orders, and
                   sprinklings with some pairs flipped (destroyed). Set number i depends on (--data_seed, i) alone.
    --files        instead: stores of the QuantumGrav project (.zarr) or .npz with node_ptr, edge_ptr, edge_index (links
                   from past to future) and y_NAME, integers, -1 for none
    --active_tasks cls (the kind), dim (of sprinklings), manifold (sprinkling or not); of files what they have labels of
Logged metrics (over all ranks; in metrics.jsonl and wandb)
    loss, val loss          cross entropy in nats per set, over the active tasks by --task_weights
    val TASK/accuracy, f1_macro, f1_weighted, ece (calibration error, 15 bins); samples/s: sets a second, nodes/s
Files in --output_dir: best.pt, latest.pt, final_model.pt, split.npz, metrics.jsonl, report.json, predictions.npz (log-
probabilities of the test set), confusion_TASK.png, results.csv (of several runs), summary.json, curves.png

Differences from the original: one split for all ranks (there each drew its own: 77 to 99 % of the test set was trained
on by some rank); all ranks validate and test, each set once, and rank 0 decides for all; the scheduler is used; edges
carry messages both ways; features are logarithms; runs can be resumed.
"""

from __future__ import annotations

import argparse
import atexit
import collections
import contextlib
import difflib
import gc
import hashlib
import importlib
import io
import itertools
import json
import logging
import math
import multiprocessing
import os
import queue
import re
import resource
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
import zipfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
from tqdm import tqdm

# ---- Constants -----------------------------------------------------------------------------------

KINDS = {"mink2": 2, "mink3": 3, "mink4": 4, "percolation": -1, "layered": -1, "kr": -1, "destroyed": -1}  # dimension
FEATURES = ("in_degree", "out_degree", "past_height", "future_height", "past_size", "future_size")  # of an element
STATISTICS = ("elements", "related pairs", "links", "minimal", "maximal", "longest chain", "chains of 3")  # of a set
METRICS = ("loss", "accuracy", "f1_macro", "f1_weighted", "ece")  # of a task
SCHEDULES = {"CosineAnnealingLR": "cosine", "OneCycleLR": "onecycle", "StepLR": "step", "ReduceLROnPlateau": "plateau",
             "LinearLR": "linear", "ConstantLR": "constant"}
SAME = ("data_key split split_seed subset active_tasks task_weights features feature_scale graph hidden_dim dropout "
        "num_layers gnn_layer_type bidirectional normalizer_type activation_type with_skip pooling head_dim "
        "optimizer_type lr_scheduler shuffle_labels seed").split()  # what a resumed run must have kept
REFUSED = {  # keys of the original that can do nothing here: why
    "parallel.rank": "the launcher says it", "log_level": "rank 0 logs, and every rank warns",
    "parallel.output_device parallel.find_unused_parameters": "a head that is not active is not built",
    "criterion apply_model validation.validator testing.tester": "cross entropy and the metrics are built in",
    "training.optimizer_args training.lr_scheduler_args": "give the kwargs, by name",
    "training.drop_last validation.drop_last testing.drop_last": "batches are whole, evaluation has every set once",
    "training.shuffle validation.shuffle testing.shuffle data.shuffle": "training shuffles, evaluation never does",
    "training.pin_memory validation.pin_memory testing.pin_memory training.prefetch_factor training.persistent_workers "
    "validation.prefetch_factor testing.prefetch_factor validation.num_workers testing.num_workers":
        "the data stay on the device: no process loads them",
    "data.reader data.pre_transform data.transform data.pre_filter data.chunksize": "the formats are built in",
}

# ---- Arguments -----------------------------------------------------------------------------------

def words(text: str) -> list[str]:
    """`a,b,c` as a list."""
    return text.replace(",", " ").split()

def floats(text: str) -> list[float]:
    return [float(word) for word in words(text)]

def integers(text: str) -> list[int]:
    return [int(word) for word in words(text)]

def json_object(text: str) -> dict:
    """A JSON object, which is what a mapping in YAML arrives as."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object such as {{\"cls\": 1.0}}")
    return found

def refuse_tag(_loader, suffix: str, node) -> NoReturn:
    """YAML's `!pyobject torch.nn.ReLU` would run whatever a file names; `!sweep` and the like have options."""
    import yaml
    raise yaml.YAMLError(f"line {node.start_mark.line + 1}: the tag !{suffix} is not taken: !pyobject would import and "
                         "run whatever the file names, so give names (relu, AdamW); for !sweep and !range give --sweep")

def parse_args(argv: list[str] | None = None) -> Namespace:
    """Every option, and the checks that need neither data nor devices."""
    import yaml
    yaml.SafeLoader.add_multi_constructor("!", refuse_tag)
    p = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    def section(title: str) -> Callable:  # of options with two names each: --lr and, as in YAML, training.lr
        add = p.add_argument_group(title).add_argument
        return lambda name, *more, **kw: add(*(f"--{n}" for n in (name, f"{title.lower()}.{name}", *more)), **kw)
    g = section("Data")
    g("files", type=words, default=[], help="stores (.zarr) or arrays (.npz), instead of generated sets")
    g("kinds", type=words, default="mink2,mink3,mink4,percolation,layered,destroyed", help=f"of {', '.join(KINDS)}")
    g("samples", type=int, default=10_000, help="sets that are generated")
    g("min_size", type=int, default=32, help="elements of a set at least")
    g("max_size", type=int, default=64, help="elements of a set at most")
    g("destroyed_share", type=float, default=0.02, help="of the pairs of a destroyed set that are flipped")
    g("data_seed", type=int, default=0, help="of the generated sets")
    g("cache_dir", "data.output", default="./cache", help="where the sets are kept, as arrays")
    g("num_workers", "data.n_processes", "training.num_workers", type=int, default=2, help="processes that prepare")
    g("skip_bad_data", help="leave out bad sets of --files and list them", **FLAG)
    g("verify_data", "data.validate_data", help="compare the checksums of the cache too", **FLAG)
    g("split", type=floats, default="0.8,0.1,0.1", help="shares to train on, validate on, test on")
    g("split_seed", type=int, default=0, help="of the split, which no rank and no --seed changes")
    g("subset", type=float, default=1.0, help="share of the sets that is used at all")
    g("graph", default="links", choices=("links", "order"), help="edges: links, or all related pairs")
    g("features", type=words, default=",".join(FEATURES[:4]), help=f"of {', '.join(FEATURES)}")
    g("feature_scale", default="log", choices=("log", "raw"), help="log(1 + value), or as they are")
    g("shuffle_labels", help="permute the labels of all sets: a control, which must stay at chance", **FLAG)
    g = section("Model")
    g("type", default="GNNModel", choices=("GNNModel",), help="the one that there is")
    g("hidden_dim", type=int, default=64, help="width")
    g("num_layers", type=int, default=3, help="layers of message passing")
    g("gnn_layer_type", default="mean", choices=("mean", "sum", "gcn", "none"), help="messages; none: an ablation")
    g("bidirectional", help="messages from the future too, not from the past alone", **FLAG | {"default": True})
    g("normalizer_type", default="layer", choices=("layer", "batch", "none"), help="batch: statistics of each rank")
    g("activation_type", default="relu", choices=("relu", "gelu", "silu", "tanh"), help="after each normalisation")
    g("with_skip", help="residual connections", **FLAG | {"default": True})
    g("dropout", type=float, default=0.0, help="after each layer")
    g("pooling", "model.pooling_layers", type=words, default="mean,max,sum", help="of mean, max, sum, concatenated")
    g("head_dim", type=int, default=64, help="hidden width of a head (0: linear)")
    g("kernel", default="auto", choices=("auto", "sparse", "dense"), help="how messages are summed; dense: padded")
    g("active_tasks", type=words, default="cls", help="heads")
    g("task_weights", type=json_object, default="{}", help='of the heads\' losses, {"cls": 1.0}; else 1')
    g = section("Training")
    g("num_epochs", type=int, default=100, help="passes over the training sets at most")
    g("batch_size", type=int, default=64, help="sets per GPU and micro-batch on average, of similar size")
    kwargs = "training.optimizer_kwargs"
    g("lr", f"{kwargs}.lr", type=float, default=1e-3, help="peak learning rate")
    g("weight_decay", f"{kwargs}.weight_decay", type=float, default=5e-5, help="none on biases and norms")
    g("optimizer_type", default="AdamW", choices=("AdamW", "Adam", "SGD"), help="SGD: with momentum 0.9")
    g("lr_scheduler", "training.lr_scheduler_type", default="onecycle", choices=(*SCHEDULES, *SCHEDULES.values()),
      help="the rate over the run")
    kwargs = "training.lr_scheduler_kwargs"
    g("warmup_steps", f"{kwargs}.warmup_steps", type=int, default=0, help="optimizer steps (constant, linear, cosine)")
    g("pct_start", f"{kwargs}.pct_start", type=float, default=0.3, help="share of the run that rises (onecycle)")
    g("step_size", f"{kwargs}.step_size", type=int, default=30, help="epochs between falls (step)")
    g("gamma", f"{kwargs}.gamma", f"{kwargs}.factor", type=float, default=0.1, help="factor of a fall (step, plateau)")
    g("lr_patience", f"{kwargs}.patience", type=int, default=10, help="epochs without gain before a fall (plateau)")
    g("checkpoint_at", type=int, default=0, help="epochs between weights that stay, checkpoint_epoch_N.pt (0: none)")
    g = section("Validation")
    g("eval_batch_size", "validation.batch_size", "testing.batch_size", type=int, default=256, help="sets at a time")
    g("check_finite", help="end the run, with an error, where a validation metric is not finite",
      **FLAG | {"default": True})
    g = section("Early_stopping")
    g("stop_tasks", "early_stopping.tasks", type=json_object, default="{}",
      help='{TASK: {"metric": "f1_macro", "mode": "max", "delta": 0, "grace_period": 0, "init_best_score": 0}}')
    g("stop_mode", "early_stopping.mode", default="any", choices=("any", "all"), help="tasks that must get better")
    g("patience", type=int, default=5, help="epochs without gain, after all grace periods, that end the run")
    g = section("Runs")
    g("seeds", type=integers, default=[], help="train once for each, and give mean and spread")
    g("sweep", default="", help='train once for each point of a grid, "lr=1e-3,3e-4;hidden_dim=32,64"')
    g("ablation", help="train the same network without messages too", **FLAG)
    g = section("Parallel")
    g("world_size", type=int, default=0, help="= --nproc where no launcher has started the ranks")
    g("master_addr", help="MASTER_ADDR, unless that is set")
    g("master_port", type=int, help="MASTER_PORT, unless that is set")
    for said in (f"{name} ({why})" for names, why in REFUSED.items() for name in names.split()):
        p.add_argument(f"--{said.split()[0]}", dest="refused", action="append", type=lambda _, said=said: said,
                       default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    add_ddp_arguments(p, output_dir="outputs/quantumgrav_ddp", wandb_project="quantumgrav-ddp")
    for name, other in (("training.path", "output_dir"), ("training.seed", "seed"), ("name", "wandb_name"),
                        ("training.device", "device"), ("parallel.backend", "backend")):
        p._option_string_actions[f"--{name}"] = p._option_string_actions[f"--{other}"]
    args = parse_arguments(p, argv)
    args.command = sys.argv[1:] if argv is None else argv
    args.lr_scheduler = SCHEDULES.get(args.lr_scheduler, args.lr_scheduler)
    check_values(p, args)
    args.runs = plan_runs(args)
    return args

def check_values(p: ArgumentParser, args: Namespace) -> None:
    """Ends with one line where an option has a value that cannot be."""
    above_0 = ("samples min_size num_epochs batch_size lr eval_batch_size hidden_dim step_size gamma subset").split()
    from_0 = ("num_layers head_dim weight_decay warmup_steps lr_patience checkpoint_at patience num_workers world_size "
              "destroyed_share dropout").split()
    lists = {"kinds": KINDS, "features": FEATURES, "pooling": ("mean", "max", "sum")}
    numbers = ("delta", "grace_period", "init_best_score")
    odd = [f"{task}: {rule!r}" for task, rule in args.stop_tasks.items() if not (
        isinstance(rule, dict) and {*rule} == {"metric", "mode", *numbers} and rule["metric"] in METRICS
        and rule["mode"] in ("min", "max") and all(isinstance(rule[n], (int, float)) for n in numbers)
        and rule["delta"] >= 0 <= rule["grace_period"])]
    generated = [n for n in args.given if n in "kinds samples min_size max_size destroyed_share data_seed".split()]
    refused = {
        "not taken: " + "; ".join(getattr(args, "refused", ())): hasattr(args, "refused"),
        **{f"--{n} {getattr(args, n)} must be above 0": not 0 < getattr(args, n) < math.inf for n in above_0},
        **{f"--{n} {getattr(args, n)} must not be negative": not 0 <= getattr(args, n) < math.inf for n in from_0},
        **{f"--{n} {','.join(getattr(args, n))} must be some of {', '.join(known)}, each once":
            not getattr(args, n) or len({*getattr(args, n)} & {*known}) < len(getattr(args, n))
            for n, known in lists.items()},
        f"--max_size {args.max_size} must be from --min_size {args.min_size} to 32767":
            not args.min_size <= args.max_size <= 32767,
        f"--split {args.split} must be three shares above 0 that make 1":
            len(args.split) != 3 or not abs(sum(args.split) - 1) < 1e-6 or min(args.split) <= 0,
        f"--seeds {args.seeds} must differ": len({*args.seeds}) < len(args.seeds),
        f"--sweep {args.sweep!r}; expected such as 'lr=1e-3,3e-4;hidden_dim=32,64'":
            args.sweep and not all(re.fullmatch(r"\s*[\w.]+=[^=]+", part) for part in args.sweep.split(";")),
        f"--early_stopping.tasks {'; '.join(odd)}: each task needs metric (of {', '.join(METRICS)}), mode (min, max), "
        f"{', '.join(numbers)}": bool(odd),
        "--dropout must be below 1, --destroyed_share, --subset at most 1, --pct_start between 0 and 1":
            args.dropout >= 1 or args.destroyed_share > 1 or args.subset > 1 or not 0 < args.pct_start < 1,
        "--active_tasks names none": not args.active_tasks,
        f"--files has its own sets; {', '.join('--' + n for n in generated)} are for those that are generated":
            bool(args.files and generated)}
    for message in (m for m, wrong in refused.items() if wrong):
        p.error(message)

def place_ranks(args: Namespace) -> Namespace:
    """What the section `parallel` of a config asks for, where no launcher and no variable has said it."""
    for name in ("master_addr", "master_port"):
        if getattr(args, name) is not None:
            os.environ.setdefault(name.upper(), str(getattr(args, name)))
    started = any(names[0] in os.environ for names in LAUNCHERS.values())
    args.nproc = args.nproc or (0 if started else args.world_size)
    return args

# ---- Data ----------------------------------------------------------------------------------------

CHUNK = 100  # sets that a worker makes at a time
FILES = {  # of a prepared folder: type, columns. Edges lie by their earlier element (future) and by their later (past).
    "sizes": (np.int64, 1), "edges": (np.int64, 1), "labels": (np.int64, 0), "statistics": (np.float64, 7),
    "features": (np.float32, len(FEATURES)), "past_count": (np.int32, 1), "future_count": (np.int32, 1),
    "past": (np.int16, 1), "future": (np.int16, 1)}

def closure(edges: np.ndarray) -> np.ndarray:
    """The transitive closure (n, n) bool of an acyclic graph."""
    while True:
        step = edges.astype(np.float32)
        more = edges | (step @ step > 0.5)
        if np.array_equal(more, edges):
            return edges
        edges = more

def links(order: np.ndarray) -> np.ndarray:
    """The transitive reduction (n, n) bool of an order: pairs with nothing between them."""
    step = order.astype(np.float32)  # counts below 2^24 are exact
    return order & (step @ step < 0.5)

def heights(order: np.ndarray) -> np.ndarray:
    """(n,) elements of the longest chain that ends just before each one: its proper time, in a sprinkling."""
    count, after = np.zeros(len(order), np.int64), np.ones(len(order), bool)
    while (after := order[after].any(0)).any():
        count += after
    return count

def ordering_fraction(order: np.ndarray) -> float:
    """Share of the pairs that are related."""
    return float(2 * np.count_nonzero(order) / max(1, len(order) * (len(order) - 1)))

def myrheim_meyer(fraction: np.ndarray) -> np.ndarray:
    """Dimension, 1 to 12, of the sprinklings whose expected ordering fraction is `fraction`: it solves
    Gamma(d + 1) Gamma(d / 2) / (2 Gamma(3 d / 2)) = fraction, which falls with d (Meyer 1988)."""
    fraction = torch.as_tensor(fraction, dtype=torch.float64)
    low, high = torch.full_like(fraction, 1.0), torch.full_like(fraction, 12.0)
    for _ in range(50):
        d = (low + high) / 2
        more = torch.exp(torch.lgamma(d + 1) + torch.lgamma(d / 2) - torch.lgamma(1.5 * d)) / 2 > fraction
        low, high = torch.where(more, d, low), torch.where(more, high, d)
    return low.numpy()

def sprinkle(rng: np.random.Generator, n: int, dim: int) -> np.ndarray:
    """Order (n, n) bool, strictly upper triangular, of n points drawn uniformly from the causal diamond of height 2 in
    `dim`-dimensional Minkowski space: at time t it is a ball of radius 1 - |t|, so that 1 - |t| is U^(1/dim)."""
    radius = rng.random(n) ** (1 / dim)
    time_ = (1 - radius) * rng.choice([-1.0, 1.0], n)
    place = rng.standard_normal((n, dim - 1))
    place *= (radius * rng.random(n) ** (1 / (dim - 1)) / np.linalg.norm(place, axis=1))[:, None]
    by_time = time_.argsort()
    time_, place = time_[by_time], place[by_time]
    apart = sum((x[:, None] - x) ** 2 for x in place.T)
    return np.triu((time_[:, None] - time_) ** 2 > apart, 1)

def percolate(rng: np.random.Generator, n: int, fraction: float) -> np.ndarray:
    """Transitive percolation with this ordering fraction: the closure of the pairs whose uniform draw is below p, which
    never falls with p, so that p is found by bisection."""
    draws, low, high = np.triu(rng.random((n, n)), 1) + np.tril(np.ones((n, n))), 0.0, 1.0
    for _ in range(14):
        order = closure(draws < (low + high) / 2)
        low, high = ((low + high) / 2, high) if ordering_fraction(order) < fraction else (low, (low + high) / 2)
    return order

def layered(rng: np.random.Generator, layer: np.ndarray, p: float) -> np.ndarray:
    """Closure of random edges, with probability p, between neighbouring layers; layer (n,) ascending."""
    return closure((layer[None, :] - layer[:, None] == 1) & (rng.random((len(layer), len(layer))) < p))

def make_order(kind: str, rng: np.random.Generator, n: int, destroyed_share: float) -> np.ndarray:
    """Order (n, n) of a kind (see KINDS). What is no sprinkling starts from a dimension of 2, 3 or 4 at random."""
    if kind == "layered":
        count = rng.integers(3, 9)
        return layered(rng, np.sort(rng.integers(count, size=n)), rng.uniform(0.2, 0.8))
    if kind == "kr":  # Kleitman and Rothschild (1975): nearly all large orders look so
        return layered(rng, np.repeat([0, 1, 2], [n // 4, n - 2 * (n // 4), n // 4]), 0.5)
    order = sprinkle(rng, n, KINDS[kind] if KINDS[kind] > 0 else int(rng.integers(2, 5)))
    if kind == "percolation":
        return percolate(rng, n, ordering_fraction(order))
    if kind == "destroyed":
        upper = np.triu_indices(n, 1)
        flipped = rng.choice(len(upper[0]), round(destroyed_share * len(upper[0])), replace=False)
        order[upper[0][flipped], upper[1][flipped]] ^= True
        order = closure(order)
    return order

class Generated:
    """Sets of --kinds in turn: number i is a function of (--data_seed, i) alone, whoever makes it."""
    def __init__(self, args: Namespace):
        self.args, self.heads = args, ("cls", "dim", "manifold")
        self.names = {"cls": dict(enumerate(args.kinds)), "manifold": {0: "other", 1: "sprinkling"}}
    def __len__(self) -> int:
        return self.args.samples
    def __getitem__(self, i: int) -> tuple[np.ndarray, list[int]]:
        """Order (n, n) and a label for each head."""
        args, number = self.args, i % len(self.args.kinds)
        rng, kind = np.random.default_rng([args.data_seed, i]), args.kinds[number]
        n = int(rng.integers(args.min_size, args.max_size + 1))
        return make_order(kind, rng, n, args.destroyed_share), [number, KINDS[kind], int(KINDS[kind] > 0)]

def as_order(adjacency: np.ndarray | None, link: np.ndarray | None) -> np.ndarray:
    """The order (n, n) of an adjacency or link matrix, in either triangle (Julia's arrays arrive transposed). Raises
    ValueError where it is no order whose elements are sorted in time."""
    found = np.asarray(link if adjacency is None else adjacency)
    if found.ndim != 2 or found.shape[0] != found.shape[1] or not 1 < len(found) <= 32767:
        raise ValueError(f"a matrix of shape {found.shape}; expected (n, n), n from 2 to 32767")
    if not np.isin(found, (0, 1)).all():
        raise ValueError("other entries than 0 and 1; expected 1 where an element is in the past of another")
    found = found.astype(bool)
    found = found.T if not np.triu(found).any() else found
    if np.tril(found).any():
        raise ValueError("related pairs in both triangles; expected elements sorted in time")
    order = closure(found)
    if adjacency is not None and not np.array_equal(order, found):
        raise ValueError("an adjacency matrix that is not transitive; expected the whole order")
    return order

def whole(value, name: str) -> int:
    """A label, of one entry. Raises ValueError where it is no whole number."""
    if (number := np.asarray(value).item()) != int(number):
        raise ValueError(f"{name} is {number}; expected a whole number, the class (-1: none)")
    return int(number)

class ZarrStore:
    """A .zarr of the QuantumGrav project: groups cset_1, cset_2, ... with adj or linkmat and scalars; or, older, arrays
    adjacency_matrix or link_matrix (sets, n, n), atomcount and labels."""
    def __init__(self, path: str, wanted: list[str]):
        """Raises ValueError with what is missing."""
        try:
            import zarr
        except ImportError as error:
            raise ValueError(f"{path}: pip install zarr, which reads such stores") from error
        try:
            self.root = zarr.open_group(path, mode="r")
        except Exception as error:  # zarr raises many kinds
            raise ValueError(f"{path}: {error}; expected a zarr group") from error
        groups = [name for name in self.root.group_keys() if re.fullmatch(r"cset_\d+", name)]
        self.groups, self.names = sorted(groups, key=lambda name: int(name[5:])), {}
        first = self.root[self.groups[0]] if groups else self.root
        arrays, self.heads = {*first.array_keys()}, wanted
        matrix = arrays & {"adj", "linkmat", "adjacency_matrix", "link_matrix"}
        if not matrix or {*wanted} - arrays:
            raise ValueError(f"{path}: holds {', '.join(sorted(arrays)) or 'nothing'}; expected adj or linkmat in "
                             f"groups cset_1, cset_2, ..., or adjacency_matrix or link_matrix, and {', '.join(wanted)}")
        self.count = len(groups) or first[matrix.pop()].shape[0]
    def __len__(self) -> int:
        return self.count
    def __getitem__(self, i: int) -> tuple[np.ndarray, list[int]]:
        if self.groups:
            group = self.root[self.groups[i]]
            adjacency, link = (np.asarray(group[n]) if n in group else None for n in ("adj", "linkmat"))
            return as_order(adjacency, link), [whole(group[head], head) for head in self.heads]
        n = int(self.root["atomcount"][i]) if "atomcount" in self.root else None
        adjacency, link = (np.asarray(self.root[name][i])[:n, :n] if name in self.root else None
                           for name in ("adjacency_matrix", "link_matrix"))
        return as_order(adjacency, link), [whole(self.root[head][i], head) for head in self.heads]

class Arrays:
    """A .npz with links: set i has elements 0 to node_ptr[i + 1] - node_ptr[i] - 1 and the columns edge_ptr[i] to
    edge_ptr[i + 1] - 1 of edge_index (2, E), pairs (earlier, later) of them; y_NAME (sets,)."""
    def __init__(self, path: str, wanted: list[str]):
        """Raises ValueError with what is missing or does not fit."""
        try:
            self.arrays = dict(np.load(path, allow_pickle=False))
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path}: {error}; expected an .npz file of plain arrays") from error
        needed = ["node_ptr", "edge_ptr", "edge_index", *(f"y_{head}" for head in wanted)]
        found = {name: array.shape for name, array in self.arrays.items()}
        if {*needed} - {*found} or {name for name in found if name not in needed and not name.startswith("y_")}:
            raise ValueError(f"{path}: holds {', '.join(found) or 'nothing'}; expected {', '.join(needed)}")
        self.heads, self.names, self.count = wanted, {}, len(self.arrays["node_ptr"]) - 1
        edges = (2, int(self.arrays["edge_ptr"][-1]))
        shapes = [(self.count + 1,)] * 2 + [edges] + [(self.count,)] * len(wanted)
        ends = np.diff(self.arrays["node_ptr"], prepend=0), np.diff(self.arrays["edge_ptr"], prepend=0)
        if [found[name] for name in needed] != shapes or any(count[0] != 0 or min(count) < 0 for count in ends):
            raise ValueError(f"{path}: shapes {[found[name] for name in needed]} of {', '.join(needed)}; "
                             f"expected {shapes}, node_ptr and edge_ptr from 0 and never falling")
    def __len__(self) -> int:
        return self.count
    def __getitem__(self, i: int) -> tuple[np.ndarray, list[int]]:
        n = int(self.arrays["node_ptr"][i + 1] - self.arrays["node_ptr"][i])
        earlier, later = self.arrays["edge_index"][:, self.arrays["edge_ptr"][i] : self.arrays["edge_ptr"][i + 1]]
        if len(earlier) and not (0 <= min(earlier.min(), later.min()) and max(earlier.max(), later.max()) < n):
            raise ValueError(f"edge_index outside 0 to {n - 1}, the elements of the set")
        matrix = np.zeros((n, n), bool)
        matrix[earlier, later] = True
        return as_order(None, matrix), [whole(self.arrays[f"y_{head}"][i], head) for head in self.heads]

def open_source(args: Namespace, path: str | None):
    """What the sets come from: something with a length, an order and labels for each number, `heads`, `names`."""
    if path is None:
        return Generated(args)
    if not Path(path).exists():
        raise ValueError(f"{path}: no such file; expected a .zarr store, an .npz file, or --kinds to generate sets")
    return (ZarrStore if Path(path).is_dir() else Arrays)(path, args.active_tasks)

def describe_set(order: np.ndarray, labels: list[int], graph: str) -> dict[str, np.ndarray]:
    """What is kept of a set: FILES."""
    link, size = links(order), len(order)
    edges = link if graph == "links" else order
    past, future = heights(order), heights(order[::-1, ::-1].T)[::-1]
    step = order.astype(np.float32)
    features = [link.sum(0), link.sum(1), past, future, order.sum(0), order.sum(1)]
    return {"sizes": size, "edges": edges.sum(), "labels": labels, "features": np.stack(features, axis=1),
            "statistics": [size, order.sum(), link.sum(), (~order.any(0)).sum(), (~order.any(1)).sum(), past.max() + 1,
                           (step @ step).sum(dtype=np.float64)],
            "past_count": edges.sum(0), "future_count": edges.sum(1), "past": edges.T.nonzero()[1],
            "future": edges.nonzero()[1]}

def make_chunk(args: Namespace, path: str | None, low: int) -> tuple[dict[str, bytes], list[str]]:
    """FILES of the sets `low` to `low` + CHUNK of a source, and what is wrong with the others."""
    torch.set_num_threads(1)
    source, parts, problems = open_source(args, path), collections.defaultdict(list), []
    for number in range(low, min(low + CHUNK, len(source))):
        try:
            found = describe_set(*source[number], args.graph)
        except (ValueError, KeyError, IndexError, OSError) as error:
            problems.append(f"{path}: set {number}: {error}")
            continue
        for name, value in found.items():
            parts[name].append(np.ascontiguousarray(value, FILES[name][0]).tobytes())
    return {name: b"".join(values) for name, values in parts.items()}, problems

def prepare_sets(args: Namespace) -> str:
    """The cache folder of this run's sets, filled unless it is whole; chunk by chunk, in bounded memory. Raises
    ValueError with all problems, unless bad sets are left out. (rank 0 only)"""
    paths = args.files or [None]
    key = [[os.path.abspath(p), *((f.stat().st_size, f.stat().st_mtime_ns) for f in sorted(
        [Path(p), *Path(p).rglob("*")]) if f.is_file())] for p in args.files]
    key += [getattr(args, n) for n in ("graph", *(("active_tasks", "skip_bad_data") if args.files else (
        "kinds", "samples", "min_size", "max_size", "destroyed_share", "data_seed")))]
    folder = cache_folder(args, "csets", key)
    if cache_is_whole(folder, args.verify_data):
        return str(folder)
    sources = [open_source(args, path) for path in paths]
    work = [(path, low) for path, source in zip(paths, sources, strict=True) for low in range(0, len(source), CHUNK)]
    total, problems, sizes = sum(map(len, sources)), [], {}
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(open(folder / f"{name}.bin", "wb")) for name in FILES}
        workers = min(args.num_workers, len(work))  # they take seconds to start
        if workers > 1:
            pool = stack.enter_context(ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")))
        make = pool.map if workers > 1 else map
        bar = tqdm(total=total, desc="sets", disable=not sys.stderr.isatty())
        for parts, wrong in make(make_chunk, *zip(*((args, *item) for item in work), strict=True)):
            problems += wrong
            for name, content in parts.items():
                files[name].write(content)
            bar.update(CHUNK)
        for file in files.values():  # a full disk shows here at the latest
            file.flush()
            os.fsync(file.fileno())
    if problems and (not args.skip_bad_data or len(problems) == total):
        shown = "\n  ".join(problems[:20] + [f"... and {len(problems) - 20} more"] * (len(problems) > 20))
        raise ValueError(f"{len(problems)} bad sets of {total} (--skip_bad_data goes on without them):\n  {shown}")
    meta = {"heads": sources[0].heads, "names": sources[0].names, "skipped": len(problems)}
    write_file(folder / "meta.json", json.dumps(meta).encode())
    write_file(folder / "skipped_data.txt", "".join(f"{line}\n" for line in problems).encode())
    for path in [*(folder / f"{name}.bin" for name in FILES), folder / "meta.json"]:
        sizes[path.name] = [path.stat().st_size, sha256_of(path)]
    write_file(folder / "manifest.json", json.dumps(sizes, indent=1).encode())
    return str(folder)

class Batch(NamedTuple):
    """B causal sets of N elements, one after the other, with E edges. `past[past_ptr[i] : past_ptr[i + 1]]` are the
    rows of the elements that have an edge to element i, `future` those that it has an edge to."""
    features: Tensor  # (N, F) float32
    owner: Tensor  # (N,) int64, the element's set
    ptr: Tensor  # (B + 1,) int64, first elements of the sets
    past_ptr: Tensor  # (N + 1,) int32, as all that follow: sparse products would convert int64 each time
    past: Tensor  # (E,)
    future_ptr: Tensor  # (N + 1,)
    future: Tensor  # (E,)
    longest: int  # elements of the largest set

def pointers(counts: Tensor) -> Tensor:
    """(n + 1,) where stretches of `counts` (n,) elements begin, and the end."""
    return F.pad(counts.cumsum(0), (1, 0))

class CausalSets:
    """A prepared folder. It lives on the device where it fits, else it is mapped into memory, which ranks share."""
    def __init__(self, folder: Path, args: Namespace, device: torch.device):
        meta = json.loads((folder / "meta.json").read_text())
        arrays = {}
        for name, (kind, columns) in FILES.items():
            path = folder / f"{name}.bin"  # numpy cannot map an empty one, where no set has an edge
            array = np.memmap(path, kind, "c") if path.stat().st_size else np.zeros(0, kind)
            columns = columns or len(meta["heads"])
            arrays[name] = np.asarray(array.reshape(-1, columns) if columns > 1 or name == "labels" else array)
        self.heads, self.skipped, self.device = meta["heads"], meta["skipped"], device
        self.sizes, self.edges, self.statistics = (arrays.pop(name) for name in ("sizes", "edges", "statistics"))
        labels, self.classes = arrays.pop("labels"), {}
        self.labels = np.full_like(labels, -1)
        for column, head in enumerate(self.heads):  # classes are the values that occur; below 0 there is none
            values = np.unique(labels[labels[:, column] >= 0, column])
            self.labels[:, column] = np.where(labels[:, column] < 0, -1, np.searchsorted(values, labels[:, column]))
            names = meta["names"].get(head, {})
            self.classes[head] = [names.get(str(value), str(value)) for value in values]
        fits = device.type == "cpu" or sum(a.nbytes for a in arrays.values()) < 0.3 * torch.get_device_module(
            device).get_device_properties(device).total_memory
        self.home = device if fits else torch.device("cpu")
        self.arrays = {name: torch.from_numpy(array).to(self.home) for name, array in arrays.items()}
        self.first_node, self.first_edge = (np.cumsum(a) - a for a in (self.sizes, self.edges))
        self.columns = torch.tensor([FEATURES.index(name) for name in args.features], device=self.home)
        self.log = args.feature_scale == "log"
    def __len__(self) -> int:
        return len(self.sizes)
    def batch(self, ids: np.ndarray) -> Batch:
        """The sets `ids` (B,), by index arithmetic: nothing is done set by set."""
        nodes, edges = int(self.sizes[ids].sum()), int(self.edges[ids].sum())
        sizes, counts, first_node, first_edge = (torch.from_numpy(a[ids]).to(self.home, non_blocking=True) for a in (
            self.sizes, self.edges, self.first_node, self.first_edge))
        ptr, edge_ptr = pointers(sizes), pointers(counts)
        owner = torch.repeat_interleave(sizes, output_size=nodes)  # of each element; a size that is known avoids a wait
        rows = torch.arange(nodes, device=self.home) + (first_node - ptr[:-1]).index_select(0, owner)
        edge_owner = torch.repeat_interleave(counts, output_size=edges)
        edge_rows = torch.arange(edges, device=self.home) + (first_edge - edge_ptr[:-1]).index_select(0, edge_owner)
        shift, take = ptr[:-1].int().index_select(0, edge_owner), self.arrays
        x = take["features"].index_select(0, rows).index_select(1, self.columns)
        past, future = (take[n].index_select(0, edge_rows) + shift for n in ("past", "future"))
        past_ptr, future_ptr = (pointers(take[f"{n}_count"].index_select(0, rows)).int() for n in ("past", "future"))
        found = x.log1p() if self.log else x, owner, ptr, past_ptr, past, future_ptr, future
        return Batch(*(t.to(self.device, non_blocking=True) for t in found), int(self.sizes[ids].max()))

def load_data(args: Namespace, ddp: DDPContext) -> CausalSets:
    """The sets, whose labels the active tasks must have. Sets args.data_key. (all ranks)"""
    log0("Preparing data loaders...")
    folder = Path(on_rank0(ddp, prepare_sets, args))
    if not (folder / "manifest.json").exists():
        raise ValueError(f"rank 0 wrote {folder}, but it is not here: --cache_dir must be shared by the nodes")
    args.data_key = hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()[:16]
    require_same(ddp, "the data", args.data_key.encode())
    data = CausalSets(folder, args, ddp.device)
    if data.skipped and ddp.rank == 0:
        warn(f"left out {data.skipped} bad sets, listed in {folder / 'skipped_data.txt'}")
    for task in {*args.active_tasks} | {*args.task_weights} | {*args.stop_tasks}:
        if task not in args.active_tasks or task not in data.heads or len(data.classes[task]) < 2:
            raise ValueError(f"task {task!r}: expected one of --active_tasks ({', '.join(args.active_tasks)}) with two "
                             f"classes or more in the data: { {h: data.classes[h] for h in data.heads} }")
    return data

def shuffled(n: int, seed: int) -> np.ndarray:
    """The numbers 0 to n - 1 (n,) int64 in random order, the same anywhere."""
    return keyed_uniform(seed, 0, torch.arange(n), 1)[:, 0].argsort(stable=True).numpy()

def split_sets(args: Namespace, ddp: DDPContext, data: CausalSets) -> dict[str, np.ndarray]:
    """Numbers of the sets to train on, validate on and test on, from --split_seed alone; kept in split.npz. (all
    ranks)"""
    order = shuffled(len(data), args.split_seed)[: math.ceil(args.subset * len(data) - 1e-9)]
    train, valid = math.ceil(args.split[0] * len(order) - 1e-9), math.floor(args.split[1] * len(order) + 1e-9)
    parts = dict(zip(("train", "valid", "test"), np.split(order, [train, train + valid]), strict=True))
    if min(map(len, parts.values())) < 1:
        raise ValueError(f"{len(order)} sets by --split {args.split}: { {n: len(i) for n, i in parts.items()} }; "
                         "expected at least one of each")
    require_same(ddp, "the split", order.tobytes())
    content = io.BytesIO()
    np.savez(content, **parts)
    on_rank0(ddp, write_file, Path(args.output_dir) / "split.npz", content.getvalue())
    log0("Data split complete:")
    for name, part in zip(("Training", "Validation", "Test"), parts.values(), strict=True):
        log0(f"  {name + ' samples:':<19} {len(part):,}")
    return parts

def sha256_of(path: Path) -> str:
    return hashlib.sha256(np.memmap(path, np.uint8, "r")).hexdigest()

def cache_is_whole(folder: Path, verify: bool) -> bool:
    """Whether a cache folder is complete. A truncated or changed file is named, and the folder made anew."""
    manifest = folder / "manifest.json"
    for name, (size, checksum) in (json.loads(manifest.read_text()) if manifest.exists() else {}).items():
        found = (folder / name).stat().st_size if (folder / name).exists() else -1
        if found != size or (verify and sha256_of(folder / name) != checksum):
            warn(f"{folder / name} is damaged ({found} bytes, {size} expected): making {folder} anew")
            manifest.unlink()
            return False
    return manifest.exists()

def cache_folder(args: Namespace, kind: str, *key) -> Path:
    """The folder of a cached thing, named by a hash of all that went into it."""
    digest = hashlib.sha256(json.dumps([1, *key], default=str).encode()).hexdigest()
    return Path(args.cache_dir) / f"{kind}-{digest[:16]}"

def write_file(path: Path, content: bytes) -> None:
    """In a folder that is made for it. Raises OSError if that fails. (rank 0 only)"""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not atomic_write(path, lambda file: file.write(content)):
        raise OSError(f"{path} could not be written: free space there or give another folder")

def bucket_by_tokens(lengths: Callable, mean_items: int, least: int, seed: int) -> Callable:
    """A `cut` for GlobalBatchSampler: batches of similar lengths(ids), nearly equal numbers of tokens with padding, in
    random order, `mean_items` items on average and never fewer than `least`."""
    def cut(ids: np.ndarray, epoch: int) -> list[np.ndarray]:
        sizes, count = lengths(ids), len(ids) // mean_items
        order = np.argsort(sizes, kind="stable")
        sizes = padded = sizes[order]
        for _ in range(3):  # as padding depends on the cut
            total = np.cumsum(padded)
            ends = np.searchsorted(total, total[-1] * np.arange(1, count) / count) + 1
            ends = np.minimum(ends, len(ids) - least * np.arange(count - 1, 0, -1))  # longest last: few in a batch
            edges = np.r_[0, ends, len(ids)]
            padded = np.repeat(sizes[edges[1:] - 1], np.diff(edges))
        batches = np.split(ids[order], ends)
        return [batches[i] for i in np.random.default_rng([seed, epoch, int(ids[0])]).permutation(count)]
    return cut

# ---- Model ---------------------------------------------------------------------------------------

class SparseProduct(torch.autograd.Function):
    """Row i of the result is the sum of the rows col[k] of x (M, D), times value[k], k from ptr[i] to ptr[i + 1] - 1;
    and own[i], where that is given, times row i. The gradient is the same with the transpose, which a Batch has at hand
    (back_*): on a CPU this is several times as fast as index_select and index_add."""
    @staticmethod
    def multiply(x: Tensor, own: Tensor | None, ptr: Tensor, col: Tensor, value: Tensor) -> Tensor:
        matrix = torch.sparse_csr_tensor(ptr, col, value, (len(ptr) - 1, len(x)), check_invariants=False)
        out = x.new_empty(len(ptr) - 1, x.shape[1]) if own is None else own * x
        return out.addmm_(matrix, x, beta=0 if own is None else 1)  # in place: `matrix @ x` copies twice
    @staticmethod
    def forward(ctx, x: Tensor, own: Tensor | None, ptr: Tensor, col: Tensor, value: Tensor, *back: Tensor) -> Tensor:
        ctx.save_for_backward(own, *back)
        return SparseProduct.multiply(x, own, ptr, col, value)
    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple:
        return SparseProduct.multiply(gradient.contiguous(), *ctx.saved_tensors), *[None] * 7

class Messages:
    """Messages of a kind and sums over the elements of each set, for a batch. gcn: D^-1/2 (A + 1) D^-1/2 x, D the
    degrees with self-loops (Kipf and Welling 2017); mean and sum are those over the neighbours. Three kernels, one
    result: sparse products (CPU), index_add (elsewhere), products of sets padded to the largest ("dense")."""
    def __init__(self, batch: Batch, kind: str, kernel: str):
        self.batch, self.kind, self.edges, self.own, self.matrix = batch, kind, {}, {}, {}
        self.kernel = "index_add" if kernel == "sparse" and batch.features.device.type != "cpu" else kernel
        self.rows = torch.arange(len(batch.owner), device=batch.owner.device, dtype=torch.int32)
        ptr, col = {"past": batch.past_ptr, "future": batch.future_ptr}, {"past": batch.past, "future": batch.future}
        count = {way: ptr[way].diff() for way in ptr}
        self.row = {way: torch.repeat_interleave(self.rows, count[way], output_size=len(col[way])) for way in ptr}
        ones = torch.ones(len(self.rows), device=batch.owner.device)
        for way, other in (("past", "future"), ("future", "past")) if kind != "none" else ():
            scale = (count[way] + 1).rsqrt() if kind == "gcn" else 1 / count[way].clamp(min=1)
            left, right = scale if kind != "sum" else ones, scale if kind == "gcn" else ones  # edge i, j: their product
            self.own[way] = scale.square()[:, None] if kind == "gcn" else None
            forth = left.index_select(0, self.row[way]) * right.index_select(0, col[way])
            back = right.index_select(0, self.row[other]) * left.index_select(0, col[other])
            self.edges[way] = ptr[way], col[way], forth, ptr[other], col[other], back
        if self.kernel == "dense":
            self.local = self.rows.long() - batch.ptr[batch.owner]
            self.place = batch.owner * batch.longest + self.local
    def mix(self, x: Tensor, way: str) -> Tensor:
        """(N, D) -> (N, D), from the neighbours in the past or in the future of each element."""
        _, col, value, *_ = self.edges[way]
        if self.kernel == "sparse":
            return SparseProduct.apply(x.float(), self.own[way], *self.edges[way])
        if self.kernel == "dense":
            sets, longest = len(self.batch.ptr) - 1, self.batch.longest
            if way not in self.matrix:  # once for all layers
                at = self.place[self.row[way]] * longest + self.local[col]
                self.matrix[way] = value.new_zeros(sets * longest**2).index_copy(0, at, value).view(sets, longest, -1)
            padded = x.new_zeros(sets * longest, x.shape[1]).index_copy(0, self.place, x).view(sets, longest, -1)
            found = (self.matrix[way].to(x.dtype) @ padded).flatten(0, 1).index_select(0, self.place)
        else:
            found = x.float().index_select(0, col) * value[:, None]
            found = torch.zeros_like(x, dtype=torch.float32).index_add(0, self.row[way], found)
        return torch.addcmul(found, x, self.own[way]) if self.kind == "gcn" else found
    def pool(self, x: Tensor, kinds: list[str]) -> Tensor:
        """(N, D) -> (B, len(kinds) D + 1): means, maxima, sums over each set, and the logarithm of its size."""
        b, sizes, parts = self.batch, self.batch.ptr.diff()[:, None], {}
        if {"mean", "sum"} & {*kinds}:
            if b.features.device.type == "cpu":
                back = torch.arange(len(x) + 1, dtype=torch.int32), b.owner.int(), torch.ones(len(x))
                parts["sum"] = SparseProduct.apply(x.float(), None, b.ptr.int(), self.rows, back[2], *back)
            else:
                parts["sum"] = torch.zeros_like(x[: len(sizes)], dtype=torch.float32).index_add(0, b.owner, x.float())
            parts["mean"] = parts["sum"] / sizes
        if "max" in kinds:
            parts["max"] = torch.segment_reduce(x.float(), "max", lengths=sizes[:, 0], axis=0, unsafe=True)
        return torch.cat([*(parts[kind] for kind in kinds), sizes.float().log()], dim=1)

class MessageLayer(nn.Module):
    """Messages, normalisation, activation, residual connection, dropout: (N, inputs) -> (N, hidden_dim)."""
    def __init__(self, inputs: int, args: Namespace):
        super().__init__()
        self.kind, width = args.gnn_layer_type, args.hidden_dim
        self.ways = () if self.kind == "none" else ("past", "future")[: 1 + args.bidirectional]
        self.linear = nn.Linear(inputs * (len(self.ways) + (self.kind != "gcn")), width)
        self.norm = {"layer": nn.LayerNorm, "batch": nn.BatchNorm1d, "none": nn.Identity}[args.normalizer_type](width)
        self.activation = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh}[args.activation_type]()
        same = nn.Identity() if inputs == width else nn.Linear(inputs, width, bias=False)
        self.skip, self.dropout = same if args.with_skip else None, args.dropout
    def forward(self, x: Tensor, messages: Messages) -> Tensor:
        parts = [messages.mix(x, way) for way in self.ways] + [x] * (self.kind != "gcn")
        y = self.activation(self.norm(self.linear(torch.cat(parts, dim=1) if parts[1:] else parts[0])))
        y = y if self.skip is None else y + self.skip(x)
        if not self.training or not self.dropout or x.device.type != "cpu":
            return F.dropout(y, self.dropout, self.training)
        # a CPU's generator is slow: one number of it makes the 16 bits of four elements
        bits = torch.randint(-(2**63), 2**63 - 1, (-(-y.numel() // 4),)).view(torch.int16)
        keep = bits[: y.numel()].view(y.shape) >= round(65536 * self.dropout) - 32768
        return y * keep.to(y.dtype).mul_(1 / (1 - self.dropout))

class CausalSetNet(nn.Module):
    """Layers of message passing, pooling over each set, and a head for each active task: an inactive one is not built,
    so that every parameter always gets a gradient."""
    def __init__(self, args: Namespace, classes: dict[str, int], dtype: torch.dtype, device_type: str):
        super().__init__()
        self.args, self.dtype, self.device_type = args, dtype, device_type
        self.kernel = "sparse" if args.kernel == "auto" else args.kernel
        widths = [len(args.features), *[args.hidden_dim] * args.num_layers]
        self.layers = nn.ModuleList(MessageLayer(width, args) for width in widths[:-1])
        pooled = widths[-1] * len(args.pooling) + 1
        self.norm = nn.LayerNorm(pooled) if args.normalizer_type == "layer" else nn.Identity()
        self.heads = nn.ModuleDict()
        for task, count in classes.items():
            hidden = [nn.Linear(pooled, args.head_dim), nn.ReLU()] if args.head_dim else []
            self.heads[task] = nn.Sequential(*hidden, nn.Linear(args.head_dim or pooled, count))
    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """{task: (B, classes) float32 logits}"""
        with torch.autocast(self.device_type, self.dtype, enabled=self.dtype != torch.float32):
            x, messages = batch.features, Messages(batch, self.args.gnn_layer_type, self.kernel)
            for layer in self.layers:
                x = layer(x, messages)
            x = self.norm(messages.pool(x, self.args.pooling))
            return {task: head(x).float() for task, head in self.heads.items()}

def keep_freed_memory() -> None:
    """Make glibc keep the memory of freed tensors for the next ones: fetching it can be half of a CPU's step."""
    import ctypes
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 2**31 - 1), mallopt(-1, 2**31 - 1)  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD

# ---- Loss ----------------------------------------------------------------------------------------

def weighted_loss(logits: dict[str, Tensor], labels: Tensor, weights: Tensor) -> Tensor:
    """Sum over tasks of weights (tasks,) times the cross entropy, in nats, of those sets that have a label: labels
    (B, tasks) int64, -1 where there is none."""
    losses = [F.cross_entropy(x, labels[:, i], ignore_index=-1, reduction="sum") for i, x in enumerate(logits.values())]
    return (torch.stack(losses) * weights).sum()

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

# ---- Evaluate ------------------------------------------------------------------------------------

@torch.no_grad()
def log_probabilities(task: Task, ids: np.ndarray) -> np.ndarray:
    """Log-probabilities (len(ids), classes of all active tasks) float64. Batches are the same on any number of ranks,
    which share them: each set once, and the same bits. (all ranks)"""
    ddp, size, training = task.ddp, task.args.eval_batch_size, task.model.training
    average_buffers(task.model, ddp)
    table = torch.zeros(len(ids), sum(task.classes.values()), dtype=torch.float64, device=ddp.device)
    order = np.argsort(task.data.sizes[ids], kind="stable")  # sets of similar size
    task.model.eval()
    for places in np.split(order, range(size, len(ids), size))[ddp.rank :: ddp.world_size]:
        logits = task.model(task.data.batch(ids[places])).values()
        found = torch.cat([F.log_softmax(x.double(), dim=1) for x in logits], dim=1)
        table[torch.from_numpy(places).to(ddp.device)] = found
        StepGuard.beat = time.monotonic()
    task.model.train(training)
    if ddp.world_size > 1:
        dist.all_reduce(table)  # a row is zero on all ranks but one
    return table.cpu().numpy()

def average_buffers(model: nn.Module, ddp: DDPContext) -> None:
    """Mean over ranks of batch normalisation's running statistics, which each rank has of its own sets. (all ranks)"""
    for buffer in (b for b in model.buffers() if b.is_floating_point() and ddp.world_size > 1):
        dist.all_reduce(buffer.div_(ddp.world_size))

def classification(logp: np.ndarray, labels: np.ndarray) -> dict:
    """Of log-probabilities (n, K) and labels (n,), at least one: METRICS, and the confusion matrix (K, K), true by
    found. Expected calibration error: mean over 15 bins of |accuracy - confidence| (Guo et al. 2017)."""
    count, found, confidence = logp.shape[1], logp.argmax(1), np.exp(logp.max(1))
    confusion = np.bincount(labels * count + found, minlength=count**2).reshape(count, count)
    support = confusion.sum(1)
    f1 = 2 * confusion.diagonal() / np.maximum(1, support + confusion.sum(0))
    bins = np.minimum((confidence * 15).astype(int), 14)
    gaps = np.bincount(bins, (found == labels) - confidence, 15)
    return {"loss": float(-logp[np.arange(len(labels)), labels].mean()), "accuracy": float((found == labels).mean()),
            "f1_macro": float(f1[(support > 0) | (confusion.sum(0) > 0)].mean()),
            "f1_weighted": float(f1 @ support / len(labels)), "ece": float(np.abs(gaps).sum() / len(labels)),
            "confusion": confusion.tolist()}

def evaluate(task: Task, ids: np.ndarray) -> tuple[dict, np.ndarray]:
    """{task: METRICS and more} of the sets `ids`, with the whole "loss" and its standard error "loss_se"; and their
    log-probabilities. The same on any number of ranks. (all ranks)"""
    table, found, whole, column = log_probabilities(task, ids), {}, np.zeros(len(ids)), 0
    for number, (name, count) in enumerate(task.classes.items()):
        labels, logp = task.labels[ids, number], table[:, column : column + count]
        known, column = labels >= 0, column + count
        found[name] = classification(logp[known], labels[known])
        # as in training, the mean is over the sets that have a label
        whole[known] -= float(task.weights[number]) * logp[known, labels[known]] * len(ids) / known.sum()
    return {"loss": float(whole.mean()), "loss_se": float(whole.std() / max(1, len(ids) - 1) ** 0.5), **found}, table

def baselines(task: Task, parts: dict[str, np.ndarray]) -> dict[str, dict]:
    """What needs no network, {task: {name: METRICS}} on the test set: the commonest class; of dimensions the nearest to
    Myrheim and Meyer's; logistic regression on STATISTICS. (rank 0 only)"""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    statistics, found = np.log1p(task.data.statistics), {}
    for number, (name, count) in enumerate(task.classes.items()):
        train, test = (ids[task.labels[ids, number] >= 0] for ids in (parts["train"], parts["test"]))
        known, labels = task.labels[train, number], task.labels[test, number]
        shares = np.log((np.bincount(known, minlength=count) + 1e-9) / len(known))
        found[name] = {"majority": classification(np.tile(shares, (len(test), 1)), labels)}
        if name in ("dim", "dimension"):
            n, related = task.data.statistics[test, 0], task.data.statistics[test, 1]
            dimension = myrheim_meyer(2 * related / np.maximum(1, n * (n - 1)))[:, None]
            distance = np.abs(dimension - np.array([float(label) for label in task.data.classes[name]]))
            found[name]["Myrheim-Meyer"] = classification(F.log_softmax(torch.tensor(-distance), dim=1).numpy(), labels)
        model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=5000)).fit(statistics[train], known)
        logp = np.full((len(test), count), -30.0)
        logp[:, model.classes_] = model.predict_log_proba(statistics[test])
        found[name]["logistic regression"] = classification(logp, labels)
    return found

def picture(confusion: list[list[int]], names: list[str], path: Path) -> None:
    """A confusion matrix, rows the true classes, as shares of each. (rank 0 only)"""
    from matplotlib.figure import Figure
    counts = np.array(confusion)
    shares = counts / np.maximum(1, counts.sum(1, keepdims=True))
    figure = Figure(figsize=(2 + 0.7 * len(names), 1.6 + 0.6 * len(names)), layout="constrained")
    axis = figure.add_subplot(xlabel="found", ylabel="true")
    axis.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axis.set_xticks(range(len(names)), names, rotation=45, ha="right")
    axis.set_yticks(range(len(names)), names)
    for (row, column), share in np.ndenumerate(shares):
        axis.text(column, row, f"{share:.2f}", ha="center", va="center", color="white" if share > 0.5 else "black")
    figure.savefig(path, dpi=110)

def by_size(task: Task, ids: np.ndarray, logp: np.ndarray, bins: int = 4) -> dict[str, list[dict]]:
    """{task: accuracy of the sets of each quarter of the sizes}."""
    sizes, found, column = task.data.sizes[ids], {}, 0
    place = np.searchsorted(np.quantile(sizes, np.linspace(0, 1, bins + 1))[1:-1].round(), sizes, side="right")
    for number, (name, count) in enumerate(task.classes.items()):
        labels, right = task.labels[ids, number], logp[:, column : column + count].argmax(1)
        found[name], column = [], column + count
        for part in np.unique(place[labels >= 0]):
            inside = (place == part) & (labels >= 0)
            found[name].append({"sizes": f"{sizes[inside].min()} to {sizes[inside].max()}", "sets": int(inside.sum()),
                                "accuracy": float((right == labels)[inside].mean())})
    return found

def test(task: Task, parts: dict[str, np.ndarray]) -> dict:
    """The test phase, of the weights as they are: report.json, predictions.npz, confusion_TASK.png. (all ranks)"""
    metrics, logp = evaluate(task, parts["test"])
    report = {"test": metrics, "sizes": by_size(task, parts["test"], logp), "sets": len(parts["test"]),
              "classes": {name: task.data.classes[name] for name in task.classes}}
    report["baselines"], folder = on_rank0(task.ddp, baselines, task, parts), Path(task.args.output_dir)
    def write() -> None:
        content = io.BytesIO()
        np.savez(content, ids=parts["test"], logp=logp, labels=task.labels[parts["test"]])
        write_file(folder / "predictions.npz", content.getvalue())
        for name in task.classes:
            picture(metrics[name]["confusion"], task.data.classes[name], folder / f"confusion_{name}.png")
        write_file(folder / "report.json", json.dumps(report, indent=1).encode())  # last: it says that all is there
    on_rank0(task.ddp, write)
    for name in task.classes:
        log0(f"test set, task {name}: {len(parts['test'])} sets")
        log0(" " * 24 + "".join(f"{n:>13}" for n in METRICS))
        for line, row in [*report["baselines"][name].items(), ("this network", metrics[name])]:
            log0(f"  {line:<22}" + "".join(f"{row[n]:>13.4f}" for n in METRICS))
        for true, row in zip(task.data.classes[name], metrics[name]["confusion"], strict=True):
            log0(f"  true {true:<14} found " + " ".join(f"{count:>6}" for count in row))
        for row in report["sizes"][name]:
            log0("  {sizes} elements: accuracy {accuracy:.4f} of {sets} sets".format(**row))
    return report

# ---- Train ---------------------------------------------------------------------------------------

@dataclass
class Task:
    """What training and evaluation share."""
    args: Namespace
    ddp: DDPContext
    model: CausalSetNet
    data: CausalSets
    classes: dict[str, int]  # active task: number of classes
    labels: np.ndarray  # (sets, tasks) int64, -1 where there is none
    weights: Tensor  # (tasks,) of the losses

@dataclass
class Standing:
    """Where training stands: what a checkpoint must bring back beside the weights."""
    step: int = 0
    epoch: int = 0
    best: dict | None = None
    stopping: dict | None = None  # of EarlyStopping, on rank 0, which decides
    lowest: float = math.inf  # val loss, epochs without a lower one, factor of the rate: the plateau schedule
    flat: int = 0
    fall: float = 1.0
    peak: float = 0.0  # learning rate, by the number of ranks that the run began on
    history: list[dict] = field(default_factory=list)
    owed: bool = False  # the epoch's validation has yet to be made

class EarlyStopping:
    """Patience over several tasks, {name: rule}, each with its metric, mode min or max, delta to be exceeded, grace
    period in checks and first score to beat. Better by `how` (any or all tasks), patience starts anew; else, once all
    grace periods are over, it shrinks. With how = all, a task that gets better alone keeps its old best score."""
    def __init__(self, rules: dict[str, dict], how: str, patience: int):
        self.rules, self.how, self.patience, self.left = rules, {"any": any, "all": all}[how], patience, patience
        self.best = {name: rule["init_best_score"] for name, rule in rules.items()}
        self.grace = {name: rule["grace_period"] for name, rule in rules.items()}
    def check(self, values: dict[str, float]) -> tuple[bool, bool]:
        """(stop, better) after the metrics of an epoch. What is not a number is never better."""
        better = {}
        for name, rule in self.rules.items():
            gain = (self.best[name] - values[name]) * (1 if rule["mode"] == "min" else -1)
            better[name] = gain > rule["delta"]
        whole = self.how(better.values())
        if whole:
            self.best |= {name: values[name] for name in better if better[name]}
            self.left = self.patience
        elif all(grace <= 0 for grace in self.grace.values()):
            self.left -= 1
        self.grace = {name: grace - (grace > 0) for name, grace in self.grace.items()}
        return self.left <= 0, whole

def decide(task: Task, standing: Standing, metrics: dict) -> tuple[bool, bool]:
    """(stop, better): rank 0's decision for all, in one broadcast. Without tasks to watch it is by the val loss. Raises
    RuntimeError on all ranks where a metric is not finite. (all ranks)"""
    args, ddp, decision = task.args, task.ddp, torch.zeros(3, dtype=torch.int64, device=task.ddp.device)
    if ddp.rank == 0:
        values = {name: metrics[name][rule["metric"]] for name, rule in args.stop_tasks.items()}
        lowest = standing.best["value"] if standing.best else math.nan
        stop, better = False, metrics["loss"] < lowest or lowest != lowest
        if values:
            stopping = EarlyStopping(args.stop_tasks, args.stop_mode, args.patience)
            vars(stopping).update(standing.stopping or {})
            stop, better = stopping.check(values)
            standing.stopping = {name: vars(stopping)[name] for name in ("left", "best", "grace")}
            log0(f"early stopping: {show(values)}, best {show(stopping.best)}, patience left {stopping.left}")
        wrong = args.check_finite and not all(map(math.isfinite, [metrics["loss"], *values.values()]))
        decision += torch.tensor([stop, better or standing.best is None, wrong], device=ddp.device)
    if ddp.world_size > 1:
        dist.broadcast(decision, 0)
    stop, better, wrong = map(bool, decision.tolist())
    if wrong:
        raise RuntimeError(f"validation after epoch {standing.epoch - 1} is not finite (loss {metrics['loss']}): lower "
                           "--lr, or --check_finite False to go on")
    return stop, better

def rate_factor(args: Namespace, standing: Standing, steps: int, per_epoch: int) -> float:
    """What the peak rate is multiplied by at this step. onecycle (Smith and Topin 2018): cosines, from 1/25 up to 1 in
    the first pct_start of the run, then down to 4e-6."""
    step, kind = standing.step, args.lr_scheduler
    if kind == "onecycle":
        top = max(1e-9, args.pct_start * steps - 1)
        low, part = (1 / 25, step / top) if step <= top else (4e-6, (steps - 1 - step) / (steps - 1 - top))
        return low + (1 - low) * (0.5 - 0.5 * math.cos(math.pi * min(1.0, part)))
    if kind == "step":
        return args.gamma ** (step // per_epoch // args.step_size)
    return standing.fall if kind == "plateau" else lr_at(step, steps, min(args.warmup_steps, steps), kind)

def plateau(args: Namespace, standing: Standing, loss: float) -> None:
    """The rate falls after more than lr_patience epochs in a row without a val loss lower by a ten-thousandth."""
    lower = loss < standing.lowest * (1 - 1e-4)
    standing.lowest, standing.flat = (loss, 0) if lower else (standing.lowest, standing.flat + 1)
    if standing.flat > args.lr_patience:
        standing.fall, standing.flat = standing.fall * args.gamma, 0

def deal_sets(task: Task, sampler: GlobalBatchSampler, train: np.ndarray, batch: np.ndarray) -> tuple:
    """This rank's micro-batches of a global batch (places in `train`): their numbers of sets (0: one stands in where
    this rank has none), sets, labels (B, tasks); and how many sets of the whole batch have a label of each task."""
    ids, micro = train[batch], []
    for part in sampler.deal(batch):
        mine = train[part if len(part) else batch[:1]]
        micro.append((len(part), mine, task.data.batch(mine), torch.from_numpy(task.labels[mine]).to(task.ddp.device)))
    return micro, (task.labels[ids] >= 0).sum(0)

def checkpoint(task: Task, standing: Standing, guard: StepGuard, log: RunLog, total: int, best: bool,
               done: bool) -> None:
    """Everything needed to go on bit by bit, written by rank 0. (all ranks)"""
    args, ddp, states, buffers = task.args, task.ddp, rng_states(task.ddp), [list(task.model.buffers())]
    if buffers[0] and ddp.world_size > 1:  # batch normalisation's statistics differ between ranks inside an epoch
        buffers = [None] * ddp.world_size
        dist.all_gather_object(buffers, list(task.model.buffers()))
    def write() -> None:
        state = {
            "format": 1, "script": "run_train_quantumgrav_ddp.py", "args": vars(args), "world_size": ddp.world_size,
            "global_batch": total, "step": standing.step, "epoch": standing.epoch, "standing": vars(standing),
            "model": task.model.state_dict(), "buffers": buffers, "rng": states, "bad_steps": guard.bad_steps,
            "classes": {n: task.data.classes[n] for n in task.classes}, "optimizer": guard.optimizer.state_dict(),
            "scaler": guard.scaler.state_dict(), "wandb_id": log.wandb_id, "done": done,
            "speed": (log.final_loss, log.speed), "wall_s": log.wall + time.monotonic() - log.started}
        if not save_checkpoint(args.output_dir, state, standing.step, args.keep_checkpoints, best) and done:
            raise OSError(f"the end of the run could not be saved: free space in {args.output_dir}, run again")
    on_rank0(ddp, write)
    log.reset()

def save_weights(task: Task, name: str) -> None:
    """The model's weights alone, which stay. (rank 0 only)"""
    state = {"model": task.model.state_dict(), "args": vars(task.args), "epoch": None}
    atomic_write(Path(task.args.output_dir) / name, lambda file: torch.save(state, file))  # noqa: TID251

def end_epoch(task: Task, standing: Standing, log: RunLog, valid: np.ndarray) -> tuple[bool, bool]:
    """Validate, decide, say so: (stop, better). (all ranks)"""
    metrics, _ = evaluate(task, valid)
    row = {"val loss": metrics["loss"], "val loss_se": metrics["loss_se"]}
    row |= {f"val {name}/{n}": metrics[name][n] for name in task.classes for n in METRICS[len(task.classes) == 1 :]}
    log0(f"Validation: loss={metrics['loss']:.3f} ± {metrics['loss_se']:.3f} " + show(dict(list(row.items())[2:])))
    place = {"step": standing.step, "epoch": standing.epoch}
    standing.history.append(place | row)
    log.write(place | row)
    plateau(task.args, standing, metrics["loss"])
    stop, better = decide(task, standing, metrics)
    if better:
        name, rule = next(iter(task.args.stop_tasks.items()), ("", {"metric": "loss"}))
        value = metrics[name][rule["metric"]] if name else metrics["loss"]
        standing.best = {"name": f"val {name}{'/' * bool(name)}{rule['metric']}", "value": value, "step": standing.step}
        log0(f"Found better model at epoch {standing.epoch - 1}.")
    log0(f"Saving checkpoint for model at epoch {standing.epoch - 1}")
    return stop, better

def show(metrics: dict[str, float]) -> str:
    return " ".join(f"{n}={v:.4f}" for n, v in metrics.items())

def train(task: Task, log: RunLog, state: dict | None, parts: dict, total: int, micro_steps: int,
          began: float) -> tuple[str, Standing]:
    """Train from where `state` stands. Returns (why it was stopped or '', standing). (all ranks)"""
    args, ddp, ids = task.args, task.ddp, parts["train"]
    standing, sizes = Standing(**state["standing"]) if state else Standing(), task.data.sizes[ids]
    cut = bucket_by_tokens(lambda places: sizes[places], total, max(1, total // args.batch_size), args.seed)
    sampler = GlobalBatchSampler(len(ids), total, micro_steps, args.seed, ddp, max(16, -(-2048 // total)), cut)
    per_epoch = len(sampler) // micro_steps
    standing.peak = standing.peak or scaled_lr(args.lr, args.lr_scaling, ddp.world_size)
    steps, peak = args.num_epochs * per_epoch, standing.peak
    log_all(f"Initializing DDP for rank {ddp.rank}...")
    model = wrap_ddp(torch.compile(task.model, dynamic=True) if args.compile else task.model, ddp)
    groups = [{"params": [p for p in unwrap(model).parameters() if p.ndim > 1]},
              {"params": [p for p in unwrap(model).parameters() if p.ndim < 2], "weight_decay": 0.0}]
    extra = {"momentum": 0.9} if args.optimizer_type == "SGD" else {}
    optimizer = getattr(torch.optim, args.optimizer_type)(  # fused: the update can be skipped on the device
        groups, lr=peak, weight_decay=args.weight_decay, fused=True, **extra)
    guard = StepGuard(args, ddp, optimizer, task.model.dtype, began)
    torch.manual_seed(args.seed + ddp.rank)  # dropout differs between ranks
    if state:
        optimizer.load_state_dict(state["optimizer"])
        guard.scaler.load_state_dict(state["scaler"])
        restore_rng(state["rng"], ddp, args.seed)
        task.model.load_state_dict(state["model"])
        for buffer, kept in zip(task.model.buffers(), state["buffers"][ddp.rank % len(state["buffers"])], strict=True):
            buffer.copy_(kept)
        guard.bad_steps = state["bad_steps"]
    log0(f"{args.num_epochs} epochs x {per_epoch} steps, peak learning rate {peak:g}, {args.lr_scheduler}")
    standing.epoch, position = divmod(standing.step, per_epoch)
    sampler.set_epoch(standing.epoch, position)
    require_same(ddp, "the batches", sampler.fingerprint())
    log0("Starting distributed training...")
    bar = tqdm(total=steps, initial=standing.step, disable=ddp.rank > 0 or not sys.stderr.isatty())
    log.reset()
    reason, batches, nodes = "", None, 0
    stop = bool(state and state["done"] and standing.stopping and standing.stopping["left"] <= 0)
    while not reason:
        if standing.owed:  # also first of all in a run that was stopped before it
            standing.owed, (stop, better), nodes = False, end_epoch(task, standing, log, parts["valid"]), 0
            checkpoint(task, standing, guard, log, total, better, done=stop or standing.step >= steps)
            if args.checkpoint_at and standing.epoch % args.checkpoint_at == 0:
                on_rank0(ddp, save_weights, task, f"checkpoint_epoch_{standing.epoch}.pt")
        if stop or standing.step >= steps:
            break
        if position == 0 or batches is None:  # an epoch starts, or goes on after a restart
            sampler.set_epoch(standing.epoch, position)
            batches = (deal_sets(task, sampler, ids, batch) for batch in sampler.batches(position))
            log0(f"Starting training epoch {standing.epoch}")
        for group in optimizer.param_groups:
            group["lr"] = peak * rate_factor(args, standing, steps, per_epoch)
        micro, counts = log.waiting(batches)
        # DDP averages over ranks: times ranks / sets, that is the mean over the labelled sets of the whole step
        weights = task.weights / torch.from_numpy(np.maximum(counts, 1)).to(ddp.device)
        summed = torch.zeros((), device=ddp.device)
        for number, (count, mine, batch, labels) in enumerate(micro, 1):
            with sync_gradients(model, number == len(micro)):
                loss = weighted_loss(model(batch), labels, weights.float()) * bool(count)
                guard.scaler.scale(loss * ddp.world_size).backward()
            log.add(count, loss=(loss, 1 / (ddp.world_size * len(micro))))
            summed, nodes = summed + loss.detach(), nodes + int(task.data.sizes[mine].sum()) * bool(count)
        norm, reason = guard.step(summed, standing.step + 1, [mine[:count] for count, mine, *_ in micro])
        standing.step += 1
        bar.update()
        last = standing.step == steps
        if standing.step % args.log_every == 0 or last:
            rate = reduce_sums(ddp, {"nodes": nodes})["nodes"] / max(1e-9, time.monotonic() - log.last)
            log.interval(standing.step, steps, standing.epoch, model, group["lr"], norm, **{"nodes/s": rate})
            nodes = 0
        standing.epoch, position = divmod(standing.step, per_epoch)
        standing.owed = position == 0
        if standing.owed:  # a stop comes before it, as it may take longer than there is time
            reason = reason or guard.finish()
        if reason or not standing.owed and standing.step % args.save_every == 0:
            checkpoint(task, standing, guard, log, total, best=False, done=False)
            nodes = 0
    log0(f"stopped early, after epoch {standing.epoch - 1}" if stop else f"{standing.epoch} epochs done")
    guard.finish()
    bar.close()
    return reason, standing

# ---- Main ----------------------------------------------------------------------------------------

def plan_runs(args: Namespace) -> list[tuple[str, str, Namespace]]:
    """(name, group, arguments) of each run that --seeds, --sweep and --ablation ask for, in a folder of --output_dir;
    those of a group differ by their seed. Empty: one run, in --output_dir itself."""
    points, runs = [[]], []
    for part in filter(None, args.sweep.split(";")):
        key, _, values = part.strip().partition("=")
        points = [[*point, f"{key}={value.strip()}"] for point in points for value in values.split(",")]
    wanted = args.seeds or args.sweep or args.ablation
    for point, ablated, seed in itertools.product(points if wanted else [], (False, True)[: 1 + args.ablation],
                                                  args.seeds or [None]):
        group = "_".join([*point, *["no_messages"] * ablated])
        name = "_".join(filter(None, [group, f"seed{seed}" if seed is not None else ""])) or "messages"
        more = [*point, *["gnn_layer_type=none"] * ablated, *[f"seed={seed}"] * (seed is not None), "--seeds=",
                "--sweep=", "--ablation=False", f"--output_dir={Path(args.output_dir) / name}"]
        runs.append((name, group or "this network", parse_args([*args.command, *more])))
    return runs

def run_once(args: Namespace, ddp: DDPContext, began: float) -> tuple[str, dict]:
    """One training and its test phase, from where the run in --output_dir stands. Returns (why it was stopped or '',
    report). (all ranks)"""
    data, folder = load_data(args, ddp), Path(args.output_dir)
    state = open_run(args, ddp, SAME)
    if state and state["done"] and args.num_epochs == state["args"]["num_epochs"] and on_rank0(
            ddp, (folder / "report.json").exists):
        log0(f"the run in {folder} is finished, after {state['step']} steps: --fresh starts anew")
        return "", on_rank0(ddp, lambda: json.loads((folder / "report.json").read_text()))
    total, micro_steps = resolve_batch(args, ddp.world_size, state["global_batch"] if state else None)
    log = RunLog(args, ddp, state)
    parts = split_sets(args, ddp, data)
    more = f" GPUs × {micro_steps} accumulation" if micro_steps > 1 else " GPUs"
    log0(f"  Total batch size:   {total} ({total / ddp.world_size / micro_steps:g} per GPU × {ddp.world_size}{more})")
    labels = np.stack([data.labels[:, data.heads.index(name)] for name in args.active_tasks], axis=1)
    for name, ids in parts.items():
        if not (labels[ids] >= 0).any(0).all():
            raise ValueError(f"no set of the {name} split has a label of one of {', '.join(args.active_tasks)}: "
                             "expected some of each (more sets, a larger share in --split)")
    if args.shuffle_labels:
        labels = labels[shuffled(len(labels), args.seed)]
    torch.manual_seed(args.seed)  # the same on all ranks
    classes = {name: len(data.classes[name]) for name in args.active_tasks}
    model = CausalSetNet(args, classes, resolve_precision(args.precision, ddp.device), ddp.device.type).to(ddp.device)
    log0(f"model: {sum(p.numel() for p in model.parameters()):,} parameters, {model.dtype}")
    weights = torch.tensor([float(args.task_weights.get(name, 1)) for name in classes], device=ddp.device)
    task = Task(args, ddp, model, data, classes, labels, weights)
    reason, standing = train(task, log, state, parts, total, micro_steps, began)
    if reason:
        log.close("stopped", steps=standing.step, reason=reason)
        return reason, {}
    log0("Training process completed.")
    on_rank0(ddp, save_weights, task, "final_model.pt")
    best = load_checkpoint(folder / "best.pt")
    model.load_state_dict(best["model"])
    log0("Starting testing phase...")
    log0(f"loading best model found: {folder / 'best.pt'}, epoch {best['epoch'] - 1}")
    report = test(task, parts)
    others = {f"{name}: {n}": row["accuracy"] for name, rows in report["baselines"].items() for n, row in rows.items()}
    log.close("finished", steps=standing.step, epochs=standing.epoch, samples_per_s=log.speed,
              final_loss=log.final_loss, best_metric=standing.best, baselines=others, test=report["test"],
              checkpoint=str(folder / "best.pt"))
    log0(f"finished: {folder}/summary.json, report.json, curves.png")
    return "", report

def compare(args: Namespace, reports: dict[str, tuple[str, dict]]) -> None:
    """results.csv, a row for each run and task, and mean and standard deviation over the seeds. (rank 0 only)"""
    rows, groups = ["run,group,task," + ",".join(METRICS)], collections.defaultdict(list)
    for name, (group, report) in reports.items():
        for task, found in ((task, report["test"][task]) for task in report["classes"]):
            rows.append(",".join([name, group, task, *(f"{found[n]:.6f}" for n in METRICS)]))
            groups[task, group.replace("_", " ")].append(found["accuracy"])
    write_file(Path(args.output_dir) / "results.csv", "".join(f"{row}\n" for row in rows).encode())
    first = next(iter(reports.values()))[1]
    for task, lines in first["baselines"].items():
        log0(f"task {task}, accuracy on {first['sets']} test sets:")
        shown = {name: [row["accuracy"]] for name, row in lines.items()}
        shown |= {group: values for (name, group), values in groups.items() if name == task}
        for name, values in shown.items():
            spread = f" ± {np.std(values, ddof=1):.4f} (deviation of {len(values)} seeds)" if values[1:] else ""
            log0(f"  {name:<24} {np.mean(values):.4f}{spread}")
    log0(f"compared: {args.output_dir}/results.csv")

def main(args: Namespace) -> int:
    """Every run that is asked for, one after the other. Returns the exit status."""
    ddp = setup_ddp(args)
    atexit.register(lambda: log_all(f"Process {ddp.rank} cleanup completed"))  # after the group is destroyed
    warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
    keep_freed_memory()
    torch.set_float32_matmul_precision("high")  # what stays in fp32 runs on tensor cores
    began, reason, reports = time.monotonic(), "", {}
    for name, group, run in args.runs or [("", "", args)]:
        if args.runs:
            log0(f"run {len(reports) + 1} of {len(args.runs)}: {name}")
        reason, report = run_once(run, ddp, began)
        if reason:
            barrier(ddp)  # the first rank to end makes some launchers kill the others
            return stop_status(reason)
        reports[name] = (group, report)
    if args.runs:
        on_rank0(ddp, compare, args, reports)
    log0("Training and testing completed successfully!")
    log_all(f"Cleaning up rank {ddp.rank}...")
    return 0

if __name__ == "__main__":
    sys.exit(launch(main, place_ranks(parse_args())))
