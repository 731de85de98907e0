"""Fine-tune ProteinMPNN on preferences: of two sequences for a backbone the preferred one becomes
the likelier (DPO, Rafailov et al. 2023; ProteinMPNN, Dauparas et al. 2022). Rewards are relative to
a reference, the network that training starts from, or another one.

    torchrun --nproc_per_node=4 run_dpo_ddp.py --train_data pairs.json --output_dir outputs/dpo_ddp
    ./scripts/run_dpo_ddp_local.sh 2 --config configs/run_dpo_ddp_quickstart.yaml

Data (--train_data, --val_data): a JSON array of rows, or a row per line, see class Row:
    {"pdb_file": "1UBI.pdb", "preferred_seq": "MQIFVKT...", "unpreferred_seq": "MQAFVKT..."}
Held out are whole clusters, else structures; of one structure, pairs by their sequences.

Logged, means over pairs; those with val/ before training and after each epoch, too:
    loss                 without --sft_weight's part; at the start ln 2, with ipo 1 / (2 beta)^2
    rewards/chosen, rewards/rejected    of the preferred, of the unpreferred sequence: beta times
                         the log-ratio to the reference, nats
    rewards/margins, rewards/accuracies    their difference; how often it is above 0 (ties: half)
    val/nll, val/recovery    -log p of the preferred sequence's letters, at temperature 1, and how
                         many of them are the likeliest; means over the designed residues
    lr, grad_norm (before clipping), skipped (steps whose gradient was not finite), samples_per_s
    (pairs), data_wait (part of the time), peak_gb (of a GPU)

Files in --output_dir: latest.pt, from which the same command goes on, best_model.pt (of the epoch
with the lowest val/loss), step_N.pt, all files of ProteinMPNN, too; metrics.jsonl; curves.png;
summary.json, in which 1UBI:7 was held out: the row of index 7, or of line 7.
"(all ranks)": every rank must call it, in the same order; "(rank 0)": only rank 0 does.
"""

# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch>=2.11,<2.14", "numpy>=2.2,<3", "tqdm>=4.67,<5", "pyyaml>=6.0,<7", "wandb>=0.25,<1",
#     "matplotlib>=3.10,<4", "pandas>=2.2,<4", "gemmi>=0.7,<1",
# ]
# ///

import argparse
import collections
import copy
import dataclasses
import fcntl
import functools
import hashlib
import itertools
import json
import logging
import math
import os
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import NamedTuple

import gemmi
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

BATCH_SIZE = 1  # pairs of a micro-batch, if --batch_size is not given
EVAL_BATCH_SIZE = 2  # held-out pairs of a forward pass, each in --eval_orders orders


def parse_args():
    parser = Parser(description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False)
    add = parser.add_argument_group("data").add_argument
    add("--train_data", type=expanded, default="data/input/test_data_real.json", help="pairs")
    add("--val_data", type=expanded, help="pairs to validate on")
    add("--val_fraction", type=number(0.001, 0.9), default=0.1, help="held out, if no --val_data")
    add("--max_length", type=COUNT, default=500, help="residues of the design chains at most")
    add("--skip_bad_data", **FLAG, help="leave out rows that are wrong, and list them")

    add = parser.add_argument_group("model").add_argument
    add("--base_model_name", default="v_48_020", help="NAME.pt in --base_model_dir; or random")
    add("--base_model_dir", type=expanded, default="data/dpo/soluble_model_weights", help="weights")
    add("--reference", type=expanded, help="weights; None: those that training starts from")

    add = parser.add_argument_group("preferences").add_argument
    add("--beta", type=number(1e-6), default=0.1, help="larger: closer to the reference")
    add("--temperature", type=number(1e-3), default=0.1, help="logits are divided by it")
    add("--loss_type", default="sigmoid", choices=["sigmoid", "ipo"], help="DPO, or IPO")
    add("--sft_weight", type=number(0), default=0.0, help="of the term nll, see val/nll")

    add = parser.add_argument_group("training").add_argument
    add("--num_epochs", type=COUNT, default=10, help="passes over the pairs")
    add("--lr", "--learning_rate", type=number(0), default=3e-7, help="peak learning rate")
    add("--warmup_steps", type=NATURAL, default=0, help="steps in which lr rises")
    add("--weight_decay", type=number(0), default=0.0, help="of all weights")
    add("--no_cuda", **FLAG, help="as --device cpu")

    add = parser.add_argument_group("evaluation").add_argument
    add("--eval_orders", type=COUNT, default=4, help="decoding orders of each held-out pair")

    # fp32 on GPUs, too: at temperature 0.1 the rounding of bf16 is larger than what is learned
    add_common_arguments(parser, output_dir="outputs/dpo_ddp", precision="fp32")
    args = parse_with_config(parser)
    args.device = "cpu" if args.no_cuda else args.device
    del args.no_cuda  # a resumed run may have another device, but no other options
    return args


# --------------------------------------------------------------------------------------------------
# Data

ALPHABET = "ACDEFGHIKLMNPQRSTVWYX"  # letters 0 to 20 in ProteinMPNN's order
UNKNOWN = 20  # X


@dataclasses.dataclass
class Row:
    """A row of the data. The sequences have a letter for each residue in the file, and so none for
    a residue that is missing there. Chains that are not named are not seen. Raises TypeError."""

    pdb_file: str  # PDB or mmCIF, also .gz; relative to the data file
    preferred_seq: str  # of all design chains, one after the other
    unpreferred_seq: str
    chain_id: str = ""  # the chain to design; "": the first one
    design_chains: list = ()  # or several
    fixed_chains: list = ()  # context
    mutable_positions: list = ()  # design these alone: indices from 0 on, or "A12" as in the file
    mutable_ranges: list = ()  # of each range the first and the last
    cluster: str | int = ""  # held out together; all pairs on a structure have the same
    weight: float | int = 1.0  # of the pair in the loss of training
    margin: float | int = 0.0  # by how much the rewards are to differ, see `pair_scores`

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default and not isinstance(value, field.type):
                raise TypeError(f"{field.name} is {value!r:.80}; expected {field.type}")
        if not (0 <= self.weight < math.inf and 0 <= self.margin < math.inf):
            raise TypeError(f"weight {self.weight}, margin {self.margin}; expected 0 or more")


class Batch(NamedTuple):
    """P pairs, not padded but laid one after the other: M residues that have all atoms. The
    backbones, B residues, are in it once each, for all pairs on them."""

    atoms: torch.Tensor  # (B, 5, 3) float32: N, CA, C, O, and CB, for glycine, too; Angstrom
    residue_index: torch.Tensor  # (B,) int64: number of the residue in its chain
    chain_index: torch.Tensor  # (B,) int64
    neighbors: torch.Tensor  # (B, K) int64: the nearest residues, and itself; -1: no further one
    source: torch.Tensor  # (M,) int64: which of the B residues each residue of a pair is
    letters: torch.Tensor  # (2, M) int64: of the preferred and of the unpreferred sequence
    decode_rank: torch.Tensor  # (M,) int64: rank of the residue in the pair's decoding order
    pair: torch.Tensor  # (M,) int64: the residue's pair, from 0 to P - 1
    designed: torch.Tensor  # (M,) float32: 1 or 0
    counts: torch.Tensor  # (P,) float32: designed residues
    margin: torch.Tensor  # (P,) float32
    weight: torch.Tensor  # (P,) float32

    def to(self, device):
        return Batch(*[tensor.to(device, non_blocking=True) for tensor in self])


def featurize(coords, residue_index, chain_index, k):
    """What a Batch has of a backbone: coords (L, 4, 3) without NaN. Neighbors: k, by CA."""
    coords = torch.from_numpy(coords)
    n, ca, c, _ = coords.unbind(1)
    normal = torch.linalg.cross(ca - n, c - ca)
    cb = -0.58273431 * normal + 0.56802827 * (ca - n) - 0.54067466 * (c - ca) + ca
    # by products distances would lose digits, and so others would be the nearest
    distance = torch.cdist(ca, ca, compute_mode="donot_use_mm_for_euclid_dist")
    nearest = distance.topk(min(k, len(ca)), largest=False).indices
    return {
        "atoms": torch.cat([coords, cb.unsqueeze(1)], dim=1),
        "residue_index": torch.from_numpy(residue_index),
        "chain_index": torch.from_numpy(chain_index),
        "neighbors": F.pad(nearest, (0, k - nearest.shape[1]), value=-1),
    }


class Pairs(Dataset):
    """The pairs and their backbones, read from the file that `prepare` has written."""

    def __init__(self, folder, args):
        self.args = args
        kept = torch.load(folder / "pairs.pt", mmap=True, weights_only=True)
        self.hash = kept["hash"]
        # of each backbone, see Batch
        self.atoms = kept["atoms"].split(kept["sizes"])
        self.residue_index = kept["residue_index"].split(kept["sizes"])
        self.chain_index = kept["chain_index"].split(kept["sizes"])
        self.neighbors = kept["neighbors"].split(kept["sizes"])
        # of each pair
        self.letters = kept["letters"].split(kept["length"])  # (L, 2)
        self.designed = kept["designed"].split(kept["length"])
        self.lengths = np.array(kept["length"])  # what a pair costs, in time and memory
        self.margin = torch.tensor(kept["margin"])
        self.weight = torch.tensor(kept["weight"])
        self.backbone = kept["backbone"]
        self.name = kept["name"]
        self.group = np.array(kept["group"])  # pairs of one group are held out together
        self.is_valid = np.array(kept["is_valid"])  # of --val_data

    def __getitem__(self, item):
        """A micro-batch. item: the step, the ids of the global batch, and the positions in it."""
        step, global_ids, positions_in_batch = item
        ids = global_ids[positions_in_batch]
        # numpy takes [a, b, 0] for [a, b], and the sampler draws by [seed, epoch]: hence i + 1
        return self.make_batch(ids, [[self.args.seed, step, i + 1] for i in ids])

    def validation_batch(self, numbers):
        """Held-out pairs, of those from 0 on, in decoding orders that never change."""
        numbers = np.repeat(numbers, self.args.eval_orders)
        order = np.arange(len(numbers)) % self.args.eval_orders
        return self.make_batch(self.valid_ids[numbers], np.stack([order, numbers + 1], axis=1))

    def make_batch(self, ids, seeds):
        """The pairs `ids`, in random decoding orders by `seeds`."""
        backbones = list(dict.fromkeys(self.backbone[i] for i in ids))  # each once
        sizes = [len(self.atoms[i]) for i in backbones]
        rows = dict(zip(backbones, torch.arange(sum(sizes)).split(sizes), strict=True))
        neighbors = []
        for i in backbones:
            own = self.neighbors[i][:, : max(sizes)]
            neighbors.append(torch.where(own < 0, -1, own + rows[i][0]))
        designed = [self.designed[i] for i in ids]
        ranks = [decode_ranks(own, seed) for own, seed in zip(designed, seeds, strict=True)]
        return Batch(
            atoms=torch.cat([self.atoms[i] for i in backbones]),
            residue_index=torch.cat([self.residue_index[i] for i in backbones]),
            chain_index=torch.cat([self.chain_index[i] for i in backbones]),
            neighbors=torch.cat(neighbors),
            source=torch.cat([rows[self.backbone[i]] for i in ids]),
            letters=torch.cat([self.letters[i] for i in ids]).T.long(),
            decode_rank=torch.cat(ranks),
            pair=torch.from_numpy(np.repeat(np.arange(len(ids)), self.lengths[ids])),
            designed=torch.cat(designed).float(),
            counts=torch.tensor([own.sum() for own in designed]).float(),
            margin=self.margin[ids],
            weight=self.weight[ids],
        )

    def split(self):
        """Choose what to train on, and what to validate on: --val_data, or whole groups, in random
        order, as long as they fit into --val_fraction of the pairs. Raises InputError."""
        is_held = self.is_valid
        if self.args.val_data:
            both = np.intersect1d(self.group[is_held], self.group[~is_held])
            if len(both) > 0:
                text = "structures or clusters are in --val_data and in --train_data, too"
                logging.warning(f"{len(both)} {text}: the validation is not of new structures")
        else:
            sizes = np.bincount(self.group)
            if len(sizes) == 1:
                raise InputError("all pairs are linked by shared sequences: give --val_data")
            rows_left = math.ceil(self.args.val_fraction * len(self.group))
            held = []
            # not by --seed: runs with other seeds hold out the same
            for number in np.random.default_rng(42).permutation(len(sizes)):
                if sizes[number] <= rows_left and len(held) < len(sizes) - 1:
                    held.append(number)
                    rows_left -= sizes[number]
            is_held = np.isin(self.group, held or sizes.argmin())  # the smallest, if none fits
        self.train_ids = np.flatnonzero(~is_held)
        self.valid_ids = np.flatnonzero(is_held)


def decode_ranks(designed, seed):
    """(L,) int64: rank of each residue in a random decoding order, what is not designed first."""
    draw = np.random.default_rng(seed).random(len(designed))
    return torch.from_numpy((designed.numpy() + draw).argsort().argsort())


# --------------------------------------------------------------------------------------------------
# Model

WIDTH = 128  # D
SCALE = 30.0  # what a sum of messages is divided by
RADIAL = 16  # Gaussians for a distance
# Distances between atoms of a residue and atoms of its neighbor; N, CA, C, O, CB are 0 to 4.
DISTANCES = """11 00 22 33 44 10 12 13 14 02 03 04 42 43 32 01 21 31 41 20 30 40 24 34 23""".split()


class Layer(nn.Module):
    """A layer of messages from neighbors, each made of `inputs` vectors. The names are those of
    the released weights. has_edges: it has what updates the edges, too."""

    def __init__(self, inputs, has_edges):
        super().__init__()
        self.W1 = nn.Linear(inputs * WIDTH, WIDTH)
        self.W2 = nn.Linear(WIDTH, WIDTH)
        self.W3 = nn.Linear(WIDTH, WIDTH)
        self.norm1 = nn.LayerNorm(WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.dense = nn.ModuleDict({"W_in": wide, "W_out": nn.Linear(4 * WIDTH, WIDTH)})
        if has_edges:
            self.W11 = nn.Linear(inputs * WIDTH, WIDTH)
            self.W12 = nn.Linear(WIDTH, WIDTH)
            self.W13 = nn.Linear(WIDTH, WIDTH)
            self.norm3 = nn.LayerNorm(WIDTH)

    def forward(self, h, x, is_neighbor):
        """Nodes h (..., D) after the messages of their neighbors: x (..., K, D) is what W1 made,
        is_neighbor (..., K) is 1 where there is a neighbor, else 0."""
        mask = is_neighbor.to(x.dtype)
        # W3 is linear, and so it is applied to the sum instead of each message
        total = (mask.unsqueeze(-2) @ F.gelu(self.W2(F.gelu(x)))).squeeze(-2)
        message = F.linear(total, self.W3.weight) + mask.sum(-1, keepdim=True) * self.W3.bias
        h = self.norm1(h + message / SCALE)
        return self.norm2(h + self.dense["W_out"](F.gelu(self.dense["W_in"](h))))


def join_linear(linear, h, edges, neighbor):
    """linear([h_i, edge_ij, h_j]) (B, K, D) of nodes h (B, D) and edges (B, K, D); neighbor (B, K):
    the nodes j. The nodes' parts are computed once per node, then fetched."""
    own, edge, other = linear.weight.split(WIDTH, dim=1)
    x = F.linear(edges, edge)  # the largest tensor: what follows is added in place
    x += F.linear(h, own, linear.bias).unsqueeze(1)
    x += F.linear(h, other).index_select(0, neighbor.flatten()).view(edges.shape)
    return x


class ProteinMPNN(nn.Module):
    """Inverse folding: the released weights fit, and give what the official program computes
    without dropout and noise. (There X is nobody's neighbor; here it is, if it has all atoms.)"""

    def __init__(self, k_neighbors=48, noise_level=0.0):
        super().__init__()
        self.k_neighbors = k_neighbors
        self.noise_level = noise_level  # of the coordinates that it was trained on, Angstrom
        self.features = nn.ModuleDict()
        self.features["embeddings"] = nn.ModuleDict({"linear": nn.Linear(66, RADIAL)})
        inputs = (1 + len(DISTANCES)) * RADIAL
        self.features["edge_embedding"] = nn.Linear(inputs, WIDTH, bias=False)
        self.features["norm_edges"] = nn.LayerNorm(WIDTH)
        self.W_e = nn.Linear(WIDTH, WIDTH)
        self.W_s = nn.Embedding(len(ALPHABET), WIDTH)
        self.encoder_layers = nn.ModuleList([Layer(3, has_edges=True) for _ in range(3)])
        self.decoder_layers = nn.ModuleList([Layer(4, has_edges=False) for _ in range(3)])
        self.W_out = nn.Linear(WIDTH, len(ALPHABET))

        atom_pairs = torch.tensor([[int(own), int(other)] for own, other in DISTANCES])
        self.register_buffer("atom_pairs", atom_pairs, persistent=False)
        self.register_buffer("centers", torch.linspace(2.0, 22.0, RADIAL), persistent=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.xavier_uniform_(parameter)

    def first_edges(self, batch, neighbor):
        """Edges (B, K, D) from each node to its neighbors (B, K): of the distances between their
        atoms, each as RADIAL Gaussians, and of how far apart they are in the chain."""
        own_atoms = batch.atoms.index_select(1, self.atom_pairs[:, 0]).unsqueeze(1)
        other_atoms = batch.atoms.index_select(1, self.atom_pairs[:, 1]).flatten(1)
        other_atoms = F.embedding(neighbor, other_atoms).unflatten(-1, (-1, 3))
        distance = (own_atoms - other_atoms).square_().sum(-1, keepdim=True).add_(1e-6).sqrt_()
        x = (distance - self.centers).mul_(RADIAL / 20.0).square_()  # the largest tensor: in place
        # the clamp keeps out denormal numbers: with them a CPU's product takes 200 times as long
        x = x.clamp_(max=50.0).neg_().exp_().flatten(2)

        offset = batch.residue_index.unsqueeze(1) - batch.residue_index[neighbor]
        is_same_chain = batch.chain_index.unsqueeze(1) == batch.chain_index[neighbor]
        offset = torch.where(is_same_chain, (offset + 32).clamp(0, 64), 65)  # 65: another chain
        position = self.features["embeddings"]["linear"]  # of one-hot offsets: a table
        x = torch.cat([F.embedding(offset, position.weight.T) + position.bias, x], dim=-1)
        return self.W_e(self.features["norm_edges"](self.features["edge_embedding"](x)))

    def encode(self, batch):
        """Nodes (B, D) and edges (B, K, D) of the backbones, whatever their sequences."""
        is_neighbor = batch.neighbors >= 0
        neighbor = batch.neighbors.clamp(min=0)
        edges = self.first_edges(batch, neighbor)
        h = edges.new_zeros(len(batch.atoms), WIDTH)
        for layer in self.encoder_layers:
            h = layer(h, join_linear(layer.W1, h, edges, neighbor), is_neighbor)
            x = F.gelu(layer.W12(F.gelu(join_linear(layer.W11, h, edges, neighbor))))
            edges = layer.norm3(edges + layer.W13(x))
        return h, edges

    def forward(self, batch):
        """Logits (C, M, 21) of a Batch, or of what has its fields up to decode_rank: C versions of
        the sequences. A residue sees the letters of those neighbors that are decoded before it."""
        nodes, edges = self.encode(batch)  # of the backbones
        versions, residues = batch.letters.shape

        def of_pairs(x):
            """(B, ...) -> (M, ...). If no backbone is shared, it is the same."""
            return x if len(x) == residues else x.index_select(0, batch.source)

        is_neighbor = of_pairs(batch.neighbors) >= 0
        backbone_neighbor = of_pairs(batch.neighbors).clamp(min=0)
        # a pair's residues are one after the other, as those of its backbone are
        shift = torch.arange(residues, device=batch.source.device) - batch.source
        neighbor = backbone_neighbor + shift.unsqueeze(1)
        is_decoded = batch.decode_rank[neighbor] < batch.decode_rank.unsqueeze(1)
        # Message of neighbor j: with its letter if it is decoded before, else from the encoder:
        #   torch.where(is_decoded, with_letter[:, neighbor], without_letter[backbone_neighbor])
        # One gather from both, one below the other, is faster than two and a where.
        row = torch.arange(versions, device=neighbor.device).view(-1, 1, 1) * residues + neighbor
        row = torch.where(is_decoded, row, versions * residues + backbone_neighbor)

        h = of_pairs(nodes).expand(versions, -1, -1)
        embedded = self.W_s(batch.letters)
        for layer in self.decoder_layers:
            own, edge, letter, other = layer.W1.weight.split(WIDTH, dim=1)
            with_letter = F.linear(embedded, letter) + F.linear(h, other)  # (C, M, D)
            without_letter = F.linear(nodes, other)  # (B, D)
            x = torch.cat([with_letter.flatten(0, 1), without_letter])
            x = x.index_select(0, row.flatten()).view(*row.shape, WIDTH)
            x += of_pairs(F.linear(edges, edge))
            x += F.linear(h, own, layer.W1.bias).unsqueeze(2)
            h = layer(h, x, is_neighbor)
        with torch.autocast(h.device.type, enabled=False):  # bf16 would round the logits, too
            return self.W_out(h.to(self.W_out.weight.dtype))


# --------------------------------------------------------------------------------------------------
# Loss

LOGGED = "loss rewards/accuracies rewards/margins rewards/chosen rewards/rejected".split()


def log_probabilities(logits, letters):
    """log p (C, M) of letters (C, M). It has no floor: unlikely letters have a gradient, too."""
    return F.log_softmax(logits, dim=-1).gather(-1, letters.unsqueeze(-1)).squeeze(-1)


def sum_by_pair(values, batch):
    """(C, M) -> (C, P): sums over the designed residues of each pair"""
    sums = values.new_zeros(values.shape[0], len(batch.counts))
    return sums.index_add(1, batch.pair, values * batch.designed)


def pair_scores(args, logits, reference_logp, batch):
    """{name: (P,)} of pairs. logits (2, M, 21): of the network. reference_logp (2, M): log p of the
    letters under the reference, at --temperature."""
    logp = log_probabilities(logits / args.temperature, batch.letters)
    # The difference is taken at each residue. At temperature 0.1 the log p of a whole sequence is
    # thousands of nats, and what is learned is a thousandth of one: float32 cannot hold that.
    chosen, rejected = sum_by_pair(logp - reference_logp, batch)
    ratio = chosen - rejected
    if args.loss_type == "ipo":  # Azar et al. 2023; per residue as in TRL
        loss = (ratio / batch.counts - 1 / (2 * args.beta)).square()
    else:  # Rafailov et al. 2023; margin as in Amini et al. 2024
        loss = -F.logsigmoid(args.beta * ratio - batch.margin)

    nll = -log_probabilities(logits[:1], batch.letters[:1])  # at temperature 1
    hits = (logits[:1].argmax(-1) == batch.letters[:1]).to(nll.dtype)
    nll, recovery = sum_by_pair(torch.cat([nll, hits]), batch) / batch.counts
    return {
        "loss": loss,
        "rewards/accuracies": (1 + ratio.sign()) / 2,
        "rewards/margins": args.beta * ratio,
        "rewards/chosen": args.beta * chosen,
        "rewards/rejected": args.beta * rejected,
        "nll": nll,
        "recovery": recovery,
    }


def batch_loss(args, logits, reference_logp, batch):
    """What a micro-batch adds to the loss of the step, and to what is LOGGED of it, (5,), without
    weights. Divided by the pairs of the global batch: the mean of the ranks' means is another."""
    scores = pair_scores(args, logits, reference_logp, batch)
    losses = scores["loss"] + args.sft_weight * scores["nll"]
    metrics = torch.stack([scores[name].detach().sum() for name in LOGGED])
    pairs = args.global_batch_size
    return (losses * batch.weight).sum() / pairs, metrics / pairs


# --------------------------------------------------------------------------------------------------
# Evaluation


@torch.no_grad()
def evaluate(args, model, reference, reference_logp, data, autocast, device):
    """Means of `pair_scores` over the held-out pairs, each in --eval_orders orders. reference_logp:
    {batch: (2, M)}, filled in the first validation for those to come. (all ranks)"""
    count = len(data.valid_ids)
    sums = {}
    # dealt to the ranks: each pair counts once, and the batches do not depend on the ranks
    batches = np.array_split(np.arange(count), math.ceil(count / EVAL_BATCH_SIZE))
    for number in range(dist.get_rank(), len(batches), dist.get_world_size()):
        batch = data.validation_batch(batches[number]).to(device)
        with autocast():
            logits = model(batch)
            if number not in reference_logp:
                reference_logits = reference(batch) / args.temperature
                reference_logp[number] = log_probabilities(reference_logits, batch.letters)
        for name, values in pair_scores(args, logits, reference_logp[number], batch).items():
            sums[name] = sums.get(name, 0.0) + values.double().sum()
    totals = collections.Counter()
    for own in gather({name: float(value) for name, value in sums.items()}):
        totals.update(own)
    return {name: total / (count * args.eval_orders) for name, total in totals.items()}


# --------------------------------------------------------------------------------------------------
# Train


def train(args, device, data, model, reference, state, log):
    """Returns why it was stopped, "" if it has ended; and `loop`: where it stands. (all ranks)"""
    # in fp32 a residue takes about 80 values for each unit of a message from a neighbor
    room = room_on_gpu(model, device) / (4 * 80 * WIDTH * model.k_neighbors)
    # sorted by cost, pairs on the same backbone come one after the other
    cost = data.lengths + np.array(data.backbone) / len(data.atoms)
    sampler = GlobalBatchSampler(data.train_ids, args, cost, room)
    steps = sampler.steps * args.num_epochs
    logging.info(f"  {steps:,} steps, {sampler.steps:,} an epoch")
    decay = args.weight_decay
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, weight_decay=decay, fused=True)
    world_size = dist.get_world_size()
    autocast = choose_precision(args, device)
    loop = {"step": 0, "baseline": {}, "best": {}, "best_metrics": {}}  # baseline: before training
    if state:
        loop = state["loop"]
        model.load_state_dict(state["model_state_dict"])
        reference.load_state_dict(state["reference"])
        optimizer.load_state_dict(state["optimizer"])
        state.clear()  # each rank has a copy: free it
    if args.compile:  # one program for batches of any number of residues: another takes minutes
        torch._dynamo.config.assume_static_by_default = False
    ddp_model = wrap_ddp(model, args, device)
    compiled_reference = torch.compile(reference) if args.compile else reference
    # the first three make a checkpoint a file of ProteinMPNN, too
    contents = {"num_edges": model.k_neighbors, "noise_level": model.noise_level}
    contents.update(model_state_dict=model, reference=reference)
    save = functools.partial(save_checkpoint, args=args, log=log, loop=loop, **contents)
    validation_logp = {}  # under the reference, see `evaluate`
    sampler.start = loop["step"]
    batches = make_loader(data, sampler, args, device)
    if not loop["baseline"]:
        loop["baseline"] = evaluate(args, model, reference, validation_logp, data, autocast, device)
        val_row = {f"val/{name}": value for name, value in loop["baseline"].items()}
        log.write({"step": 0, "epoch": 0, **val_row})
        save("latest.pt", optimizer=optimizer)

    logging.info("Starting distributed training...")
    bar = tqdm(total=steps, initial=loop["step"], disable=None if dist.get_rank() == 0 else True)
    meter = Meter(LOGGED, args, device)
    reason = ""
    while loop["step"] < steps and not reason:
        step = loop["step"]
        epoch, position = divmod(step, sampler.steps)
        if position == 0:
            logging.info(f"Starting training epoch {epoch}")
        lr = args.lr * min(1.0, (step + 1) / (args.warmup_steps + 1))
        for group in optimizer.param_groups:
            group["lr"] = lr

        # forward and backward, micro-batch by micro-batch; the last one sums over the ranks
        metrics = torch.zeros(len(LOGGED), device=device)
        for micro in range(1, sampler.accumulation + 1):
            batch = meter.next_batch(batches, device)
            ddp_model.require_backward_grad_sync = micro == sampler.accumulation
            with autocast():
                logits = ddp_model(batch)
                with torch.no_grad():
                    reference_logits = compiled_reference(batch) / args.temperature
                    reference_logp = log_probabilities(reference_logits, batch.letters)
            loss, micro_metrics = batch_loss(args, logits, reference_logp, batch)
            (loss * world_size).backward()  # DDP takes the mean, we want the sum
            metrics += micro_metrics
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
            val_metrics = evaluate(args, model, reference, validation_logp, data, autocast, device)
            val_loss = val_metrics["loss"]
            if not math.isfinite(val_loss):
                raise RuntimeError(f"the validation loss is {val_loss}: a lower --lr?")
            val_row = {f"val/{name}": value for name, value in val_metrics.items()}
            log.write({"step": loop["step"], "epoch": epoch, **val_row})
            if not loop["best"] or val_loss < loop["best"]["value"]:
                loop["best"] = {"metric": "loss", "value": val_loss, "step": loop["step"]}
                loop["best_metrics"] = val_metrics
                save("best_model.pt")

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
    # these may change on a resume: data are compared by their content
    free_on_resume = "train_data val_data max_length skip_bad_data num_epochs".split()
    state = open_run(args, free_on_resume)
    model, reference = on_rank0(load_networks, args)
    logging.info("Preparing data loaders...")
    data = Pairs(read_once(functools.partial(prepare, k=model.k_neighbors), args), args)
    if args.loss_type == "ipo" and data.margin.any():
        raise InputError("pairs with a margin: expected --loss_type sigmoid")
    data.split()
    # pairs of one structure, cluster or sequence are a group
    for part, ids in {"training": data.train_ids, "validation": data.valid_ids}.items():
        logging.info(f"{len(ids):,} {part} pairs, of {len(np.unique(data.group[ids])):,} groups")
    if args.prepare_only:
        logging.info(f"The data are read: {args.cache_dir}")
        return 0

    begin_run(args, state, data.hash)
    log = RunLog(args, state)
    with logging_redirect_tqdm():
        reason, loop = train(args, device, data, model.to(device), reference.to(device), state, log)
    if reason:
        return log.stop(reason, steps=loop["step"], best=loop["best"])
    held_out = [data.name[i] for i in data.valid_ids]
    figures = {"best": loop["best"], "validation": loop["best_metrics"], "held_out": held_out}
    log.close("finished", steps=loop["step"], baselines={"before": loop["baseline"]}, **figures)
    logging.info("Training and evaluation completed successfully!")
    return 0


# --------------------------------------------------------------------------------------------------
# Reading

# Weights, structures and pairs, once: training needs only the network and Pairs.
READER = 9  # raise it when you change what is read or kept: else an old cache is used
RESIDUE_NAMES = gemmi.expand_one_letter_sequence(ALPHABET[:-1], gemmi.ResidueKind.AA)
LETTERS = dict(zip(RESIDUE_NAMES, ALPHABET[:-1], strict=True))  # {"ALA": "A", ...}
# selenomethionine, and protonation states as AMBER and CHARMM name them
OTHERS = """MSE:M HID:H HIE:H HIP:H HSD:H HSE:H HSP:H CYX:C CYM:C ASH:D GLH:E LYN:K"""
LETTERS.update(entry.split(":") for entry in OTHERS.split())


class Chain(NamedTuple):
    """L residues of a protein chain, in the order of the file; or of several chains."""

    letters: np.ndarray  # (L,) uint8
    coords: np.ndarray  # (L, 4, 3) float32: N, CA, C, O in Angstrom, NaN where missing
    residue_index: np.ndarray  # (L,) int64: from 0 on in each chain, with gaps as in the file
    labels: np.ndarray  # (L,) str: A12, or with an insertion code A12B


def load_networks(args):
    """The network to start from, and the reference, on the CPU. Raises InputError. (rank 0)"""
    if args.base_model_name == "random":
        torch.manual_seed(args.seed)
        model = ProteinMPNN()
    else:
        path = Path(args.base_model_dir) / f"{args.base_model_name.removesuffix('.pt')}.pt"
        logging.info(f"Starting from {path}")
        model = read_model(path)
    reference = copy.deepcopy(model)
    if args.reference:
        reference = read_model(args.reference, model.k_neighbors)
    return model, reference.requires_grad_(False)


def read_model(path, neighbors=None):
    """The network in a file, on the CPU. neighbors: how many it must have. Raises InputError."""
    if not os.path.exists(path):
        raise InputError(f"{path}: there is no such file")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        model = ProteinMPNN(content["num_edges"], content.get("noise_level") or 0.0)
        model.load_state_dict(content["model_state_dict"])
    except Exception as error:  # of many kinds: it holds something else
        # one sentence: those after it may advise to load the file in an unsafe way
        reason = f"{type(error).__name__} {' '.join(str(error).split()).partition('. ')[0]:.400}"
        files = "best_model.pt, step_N.pt or latest.pt of run_dpo_ddp.py, or weights of ProteinMPNN"
        expected = f"expected {files}, vanilla or soluble, not CA-only or LigandMPNN"
        raise InputError(f"{path}: {reason}; {expected}") from None
    if neighbors and model.k_neighbors != neighbors:
        raise InputError(f"{path} has {model.k_neighbors} neighbors; expected {neighbors}")
    return model


def read_structure(path, notes):
    """A PDB or mmCIF file as ProteinMPNN reads it: the first model, the first alternative of each
    atom, ATOM records and MSE; what has another name is X if it has a CA. Returns {name: Chain} and
    a digest, the same of copies; adds to `notes`, {what is odd: [residue]}. Raises ValueError."""
    expected = "expected a PDB or mmCIF file with protein, plain or gz"
    try:
        structure = gemmi.read_structure(path, format=gemmi.CoorFormat.Detect)
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}; {expected}") from None
    structure.remove_alternative_conformations()
    chains = {}
    digest = hashlib.sha256()
    for chain in next(iter(structure), []):
        own = read_chain(chain, Path(path).name, notes)
        if len(own.letters) > 0:
            chains[chain.name] = own
            digest.update(own.letters.tobytes() + own.coords.tobytes())
    if not chains:
        raise ValueError(f"{path}: no amino acids as ATOM, with a CA; {expected}")
    return chains, digest.hexdigest()


def read_chain(chain, file, notes):
    """A gemmi chain as a Chain; notes: see `read_structure`."""
    residues = []
    coords = []
    for residue in chain:
        where = f"{file} {chain.name}{residue.seqid} {residue.name}"
        if residue.name not in LETTERS and not residue.find_atom("CA", "*", gemmi.Element("C")):
            continue  # no amino acid
        if residue.het_flag == "H" and residue.name != "MSE":
            notes["residues are HETATM, and left out (as ATOM they would be read)"].append(where)
            continue
        atoms = [residue.find_atom(name, "*") for name in ("N", "CA", "C", "O")]
        if residue.name not in LETTERS:
            notes["residues of unknown names are read as X"].append(where)
        if None in atoms:
            notes["residues lack one of N, CA, C and O, and are not designed"].append(where)
        residues.append(residue)
        coords.append([atom.pos.tolist() if atom else [math.nan] * 3 for atom in atoms])
    letters = [ALPHABET.index(LETTERS.get(residue.name, "X")) for residue in residues]
    # residues with insertion codes (42, 42A) have the same number: count them
    steps = np.diff([residue.seqid.num for residue in residues]).clip(min=1)
    residue_index = np.cumsum([0, *steps])[: len(letters)]
    labels = np.array([f"{chain.name}{residue.seqid}" for residue in residues])
    return Chain(np.array(letters, np.uint8), np.array(coords, np.float32), residue_index, labels)


def read_rows(option, path):
    """Yields (where it stands, path of its structure, fields) of a JSON array, or of an object per
    line. Fields that are null are left out. Raises InputError."""
    if not os.path.exists(path):
        raise InputError(f"{option} {path}: there is no such file")
    where = path
    rows = []
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        if text.lstrip().startswith("["):
            rows = [(f"{path}: index {number}", row) for number, row in enumerate(json.loads(text))]
        else:
            for number, line in enumerate(text.split("\n"), 1):
                where = f"{path}: line {number}"
                if line.strip():
                    rows.append((where, json.loads(line)))
    except (OSError, ValueError) as error:
        expected = "expected JSON, an array or an object per line; make_dpo_pairs.py reads CSV"
        raise InputError(f"{where}: {error}; {expected}") from None

    for where, fields in rows:
        if not isinstance(fields, dict):
            raise InputError(f"{where}: {fields!r:.80}; expected an object with pdb_file, ...")
        fields = {name: value for name, value in fields.items() if value is not None}
        structure = os.path.abspath(Path(path).parent.resolve() / str(fields.get("pdb_file")))
        yield where, structure, fields


def join_chains(row, chains):
    """Of the chains that a Row means, those to design first: all as one Chain, (L,) the number of
    each residue's chain, and the names of the design chains. Raises ValueError."""
    design = row.design_chains or [row.chain_id or next(iter(chains))]
    if row.chain_id and design != [row.chain_id]:
        raise ValueError(f"chain_id {row.chain_id} and design_chains {', '.join(design)}: give one")
    names = [*design, *row.fixed_chains]
    for name in names:
        if name not in chains:
            raise ValueError(f"chain {name}; expected one of {' '.join(chains)}")
        if names.count(name) > 1:
            raise ValueError(f"chain {name} is named twice")
    parts = [chains[name] for name in names]
    joined = Chain(*[np.concatenate(arrays) for arrays in zip(*parts, strict=True)])
    index = np.repeat(np.arange(len(names)), [len(part.letters) for part in parts])
    return joined, index, design


def read_pair(row, chains, max_length):
    """Of the N residues that have all atoms: letters (N, 2) of a pair, in fixed chains those of the
    structure; (N,) bool, what is designed, never X: the network must not learn to say it; (coords,
    residue_index, chain_index). And the part of preferred_seq that is native. Raises ValueError."""
    joined, chain_index, design = join_chains(row, chains)
    length = np.count_nonzero(chain_index < len(design))
    letters = np.stack([joined.letters, joined.letters])
    for own, name in zip(letters, ["preferred_seq", "unpreferred_seq"], strict=True):
        own[:length] = read_letters(name, getattr(row, name), chains, design)
    if length > max_length:
        raise ValueError(f"{length} residues; expected at most --max_length {max_length}")
    agreement = np.mean(letters[0, :length] == joined.letters[:length])

    whole = np.isfinite(joined.coords).all(axis=(1, 2))
    mutable = choose_mutable(row, joined.labels[:length], len(whole))
    designed = whole & mutable & (letters != UNKNOWN).all(axis=0)
    differ = letters[0] != letters[1]
    if not (differ & designed).any():
        raise ValueError("the sequences do not differ at residues that are mutable, whole, not X")
    wrong = np.flatnonzero(differ & whole & ~designed)
    if len(wrong) > 0:
        raise ValueError(f"the sequences differ at residue {wrong[0]}, which is X, or not mutable")
    backbone = joined.coords[whole], joined.residue_index[whole], chain_index[whole]
    return letters[:, whole].T, designed[whole], backbone, agreement


def read_letters(name, text, chains, design):
    """A sequence as letters (L,); design: the names of its chains. Raises ValueError."""
    letters = np.array([ALPHABET.find(letter) for letter in text.upper()])
    if (letters < 0).any():
        where = letters.argmin()
        expected = f"letters of {ALPHABET}, none for residues that are not in the file"
        raise ValueError(f"{name} has {text[where]!r} at {where}; expected {expected}")
    native = np.concatenate([chains[key].letters for key in design])
    if len(letters) != len(native):
        sizes = ", ".join(f"{key} has {len(chain.letters)}" for key, chain in chains.items())
        expected = f"{len(native)}, one per residue of design_chains {' '.join(design)} ({sizes})"
        own = "".join(ALPHABET[letter] for letter in native)
        raise ValueError(f"{name} has {len(letters)} letters; expected {expected}: {own}")
    return letters


def choose_mutable(row, labels, total):
    """(total,) bool: what a Row lets change; the first residues have labels. Raises ValueError."""
    ranges = [[index, index] for index in row.mutable_positions] + list(row.mutable_ranges)
    mutable = np.arange(total) < (0 if ranges else len(labels))
    labels = labels.tolist()
    for ends in ranges:
        first, last = [labels.index(end) if end in labels else end for end in ends]
        if first not in range(len(labels)) or last not in range(first, len(labels)):
            expected = f"0 to {len(labels) - 1}, or such as {labels[0]}"
            raise ValueError(f"mutable residues {first} to {last}; expected {expected}")
        mutable[first : last + 1] = True
    return mutable


def write_pairs(args, rows, k, folder):
    """Read the pairs, and write what Pairs loads. rows: [(is it of --val_data, where it stands,
    path of its structure, fields)]. Raises InputError. (rank 0)"""
    backbones = []
    indices = {}  # of backbones
    clusters = {}  # of structures
    cluster_ids = {}
    pairs = []
    trained_on = {}  # {(backbone, letters of a pair): where it stands}
    bad = []
    notes = collections.defaultdict(list)  # {what is odd: [where]}
    read = functools.cache(functools.partial(read_structure, notes=notes))  # each file once
    for is_valid, where, path, fields in tqdm(rows, "Reading", unit=" pairs", disable=None):
        for name in fields.keys() - Row.__annotations__.keys():
            notes[f"rows have a field {name!r}, which is not read"].append(where)
        try:
            row = Row(**{name: fields[name] for name in fields.keys() & Row.__annotations__.keys()})
            chains, structure = read(path)
            letters, designed, backbone, agreement = read_pair(row, chains, args.max_length)
            # what the network sees: a copy of a file may have other names of chains, or numbers
            key = hashlib.sha256(b"".join(array.tobytes() for array in backbone)).digest()
            content = (key, letters.tobytes())
            opposite = trained_on.get((key, letters[:, ::-1].tobytes()))
            if is_valid and content in trained_on:
                raise ValueError("this pair is in --train_data, too; expected others")
            cluster = str(row.cluster) or structure
            if clusters.setdefault(structure, cluster) != cluster:
                raise ValueError("pairs before on this structure have another cluster, or none")
        except (AttributeError, TypeError, ValueError) as error:
            bad.append(f"{where}: {error}")
            continue
        if len(np.unique(backbone[2])) < len(chains):
            notes["pairs do not see all chains of their file, see fixed_chains"].append(where)
        if opposite:
            notes["pairs say the opposite of another one"].append(f"{where} and {opposite}")
        if agreement < 0.15:  # by chance it is 0.06, of designs 0.3 to 0.6
            text = f"{where}: {agreement:.0%} of the letters are those of the structure"
            notes["sequences may be of other chains, or of these in another order"].append(text)
        if not is_valid:
            trained_on[content] = where
        if key not in indices:
            indices[key] = len(backbones)
            backbones.append(featurize(*backbone, k))
        pair = {"letters": torch.from_numpy(letters), "designed": torch.from_numpy(designed)}
        pair.update(length=len(letters), margin=float(row.margin), weight=float(row.weight))
        pair.update(is_valid=is_valid, backbone=indices[key])
        pair["group"] = cluster_ids.setdefault(cluster, len(cluster_ids))
        pair["name"] = f"{Path(path).name.split('.')[0]}:{where.split()[-1]}"
        pairs.append(pair)

    some = "".join(f"\n  {text}" for text in bad[:20])
    if bad and not args.skip_bad_data:
        raise InputError(f"{len(bad)} bad pairs; --skip_bad_data leaves them out:{some}")
    for path, is_valid in {args.train_data: False, args.val_data: True}.items():
        if path and not any(pair["is_valid"] == is_valid for pair in pairs):
            raise InputError(f"{path}: no pairs; see --help{some}")
    if bad:
        logging.warning(f"{len(bad)} bad pairs are left out:{some}")
    if len(cluster_ids) == 1 and not args.val_data:
        logging.info("One structure or cluster: pairs are held out by their sequences")
        for pair, group in zip(pairs, group_by_sequence(pairs), strict=True):
            pair["group"] = group
    for text, found in notes.items():
        logging.warning(f"{len(found)} {text}, such as {found[0]}")

    kept = {name: torch.cat([one[name] for one in backbones]) for name in backbones[0]}
    kept["sizes"] = [len(one["atoms"]) for one in backbones]
    for name, example in pairs[0].items():
        values = [pair[name] for pair in pairs]
        kept[name] = torch.cat(values) if torch.is_tensor(example) else values
    digest = hashlib.sha256()
    for value in kept.values():
        digest.update(value.numpy() if torch.is_tensor(value) else repr(value).encode())
    torch.save({**kept, "hash": digest.hexdigest()[:12]}, folder / "pairs.pt")


def group_by_sequence(pairs):
    """The group of each pair: pairs that share a sequence are in one."""
    group = np.arange(len(pairs))
    first = {}  # {sequence: the first pair with it}
    for i, pair in enumerate(pairs):
        for letters in pair["letters"].T:
            k = first.setdefault(letters.numpy().tobytes(), i)
            group[group == group[i]] = group[k]
    return np.unique(group, return_inverse=True)[1].tolist()


def prepare(args, k):
    """The folder with the pairs, which are read once. k: neighbors of a residue. (rank 0)"""
    rows = [(False, *row) for row in read_rows("--train_data", args.train_data)]
    if args.val_data:
        rows += [(True, *row) for row in read_rows("--val_data", args.val_data)]
    files = sorted(filter(os.path.exists, {path for _, _, path, _ in rows}))
    stats = [[path, os.stat(path).st_size, os.stat(path).st_mtime_ns] for path in files]
    key = [READER, k, args.max_length, args.skip_bad_data, rows, stats]
    return cached(args.cache_dir, "pairs", key, functools.partial(write_pairs, args, rows, k))


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
