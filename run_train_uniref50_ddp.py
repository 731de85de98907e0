"""Train a language model of proteins on UniRef50 by masked diffusion.

Some residues of a sequence are hidden: one, two, or up to all, each number is equally likely. A
transformer that reads in both directions predicts them. Their mean cross entropy, times the number
of residues, is on average a bound on -log p of the sequence, given its length. It is the bound of
SEDD (Lou et al. 2024), MDLM (Sahoo et al. 2024) and order-agnostic models (Uria et al. 2014).

    ./run_train_uniref50_ddp.sh --config configs/config_uniref50_quickstart.yaml   # all GPUs
    python run_train_uniref50_ddp.py --datafile uniref50.fasta.gz --nproc_per_node 2
    torchrun --standalone --nproc_per_node=8 run_train_uniref50_ddp.py --datafile uniref50.fasta.gz
    python tools/sample_uniref50.py experiments_ddp/best.pt --out samples.fasta

Data (--datafile): FASTA, or a sequence on each line, also packed (.gz .bz2 .xz .zst); or a list
saved by torch.save, of texts, or of dicts with protein_seq, sequence or text. Letters are the 20
residues and X B U Z O J, in upper or lower case. --val_ratio of the sequences are held out, chosen
by a hash: equal ones are on one side.

Logged, over all ranks: step, epoch, lr, loss (an estimate of the bound, nats per residue), residues
(of a step), grad_norm (before clipping), skipped (steps whose gradient was not finite),
samples_per_s (sequences), data_wait (share of the time). val/..., of averaged weights: nelbo (the
bound on held-out sequences, nats per residue; of those that are too long a part is taken) beside
unigram (by how often each residue occurs in the training data), below_unigram (their difference),
nelbo_se, below_unigram_se (standard errors), perplexity.

Files in --output_dir: latest.pt, previous.pt, best.pt, metrics.jsonl; at the end summary.json,
curves.png. The same command, given again, goes on from latest.pt.

Below, "(all ranks)" means that every rank must call a function, in the same order, and "(rank 0)"
that only rank 0 does. The task comes first, then the reading of files, then what all scripts share.
"""

# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch>=2.11,<2.14", "numpy>=2.2,<3", "tqdm>=4.67,<5", "pyyaml>=6.0,<7", "wandb>=0.25,<1",
#     "matplotlib>=3.10,<4", "pandas>=2.2,<4",
# ]
# ///

import argparse
import collections
import contextlib
import copy
import ctypes
import errno
import fcntl
import functools
import hashlib
import io
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
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

# --------------------------------------------------------------------------------------------------
# Arguments


def parse_args():
    parser = Parser(description=__doc__)
    add = parser.add_argument_group("data").add_argument
    default = "./input_data/processed_uniref50.pt"
    text = "FASTA, or a sequence a line, also packed (.gz .bz2 .xz .zst); or the original's .pt"
    add("--datafile", default=default, help=text)
    add("--cache_dir", default="./cache", help="where what is read once is kept")
    add("--val_ratio", type=number(0, 1), default=0.05, help="share of sequences that is held out")
    add("--skip_bad_data", **FLAG, default=False, help="leave out bad records, and list them")
    text = "tokens, begin and end among them; of longer sequences a random part is used"
    add("--max_protein_len", type=number(3, kind=int), default=512, help=text)

    add = parser.add_argument_group("model").add_argument
    add("--hidden_size", type=COUNT, default=768, help="width")
    add("--n_blocks_prot", type=COUNT, default=8, help="transformer blocks")
    add("--n_heads", type=COUNT, default=12, help="attention heads")
    add("--cond_dim", type=COUNT, default=256, help="width of the noise embedding")
    add("--dropout", type=number(0, 0.999), default=0.1, help="after attention and MLP")

    add = parser.add_argument_group("training").add_argument
    text = "a new run has batch_size x accum x GPUs samples a step, or --global_batch_size"
    add("--accum", type=COUNT, default=4, help=text)
    text = "optimizer steps at most; with more GPUs the same steps see more data"
    add("--n_iters", type=COUNT, default=500_000, help=text)
    add("--epochs", type=COUNT, default=50, help="passes over the data at most")
    add("--ema", type=number(0, 1), default=0.9995, help="decay of the averaged weights")

    add = parser.add_argument_group("optim").add_argument
    add("--lr", type=number(0), default=5e-5, help="peak learning rate, on one GPU")
    add("--warmup", type=number(0, kind=int), default=5000, help="steps to reach it, on one GPU")
    kinds = ["none", "linear", "conservative"]
    text = "lr and warmup grow N, or min(N, 6), times on N GPUs; none with --global_batch_size"
    add("--lr_scaling", default="linear", choices=kinds, help=text)
    add("--weight_decay", type=number(0), default=0.01, help="of matrices, but not of embeddings")
    add("--beta2", type=number(0, 0.999999), default=0.999, help="AdamW's")

    add = parser.add_argument_group("memory").add_argument
    add("--gradient_checkpointing", **FLAG, default=False, help="compute activations twice")
    text = "share of a GPU that a rank may take"
    add("--max_memory_per_gpu", type=number(0, 1), default=0.85, help=text)

    add = parser.add_argument_group("eval").add_argument
    add("--eval_freq", type=COUNT, default=2000, help="steps between evaluations")
    two = number(2, kind=int)  # of one there is no standard error
    add("--eval_sequences", type=two, default=2000, help="held-out sequences at most")
    add("--eval_draws", type=COUNT, default=2, help="draws of the noise for each of them")
    add("--eval_batch_size", type=COUNT, default=16, help="sequences per forward pass")

    add = parser.add_argument_group("sampling").add_argument
    text = "what tools/sample_uniref50.py does with these weights, if it is not told otherwise"
    add("--sampling_method", default="rigorous", choices=["rigorous", "simple"], help=text)

    add = parser.add_argument_group("names of the original").add_argument
    same = {"default": argparse.SUPPRESS}
    add("--work_dir", dest="output_dir", **same, help="as --output_dir")
    add("--log_freq", dest="log_every", type=COUNT, **same, help="as --log_every")
    add("--wandb_project", help="as the environment variable WANDB_PROJECT")
    add("--wandb_name", help="as the environment variable WANDB_NAME")

    add_common_arguments(parser, output_dir="./experiments_ddp", batch_size=16)
    parser.set_defaults(log_every=100, save_every=2000)
    args = parse_with_config(parser)

    width, rest = divmod(args.hidden_size, args.n_heads)
    if rest > 0 or width % 8 != 0 or width > 256:  # flash attention has these limits
        text = f"must be {args.n_heads} heads times a multiple of 8, at most 256"
        parser.error(f"--hidden_size {args.hidden_size}: {text}")
    if args.cond_dim % 2 != 0:
        parser.error(f"--cond_dim {args.cond_dim}: must be even")
    for name in ("wandb_project", "wandb_name"):
        if getattr(args, name):
            os.environ[name.upper()] = getattr(args, name)
    return args


# --------------------------------------------------------------------------------------------------
# Data

# The vocabulary: 0 begin, 2 end, 5 to 30 the residues, 36 the mask. The other numbers are free, as
# in the original; 64 makes the two matrices that know the vocabulary fit a GPU's tiles.
BEGIN = 0
END = 2
FIRST = 5
RESIDUES = "ACDEFGHIKLMNPQRSTVWYXBUZOJ"  # the last six as they stand in UniRef: unknown or rare
KINDS = len(RESIDUES)
MASK = 36
VOCABULARY = 64


class Batch(NamedTuple):
    """Sequences of different lengths, not padded but laid one after the other: T tokens of B
    sequences, of which M residues are hidden."""

    noisy: torch.Tensor  # (T,) uint8, MASK where a residue is hidden
    positions: torch.Tensor  # (T,) int32, of a token in its sequence
    owner: torch.Tensor  # (T,) int32, the sequence of a token
    starts: torch.Tensor  # (B + 1,) int32, where each sequence starts, and where the last one ends
    hidden: torch.Tensor  # (M,) int64, the places of hidden residues, sequence by sequence
    targets: torch.Tensor  # (M,) int64, which residues they are, from 0 to 25
    weights: torch.Tensor  # (M,) float32, residues of the sequence / hidden ones
    lengths: list  # of the sequences, in tokens
    numbers: list  # of places in `hidden` that each sequence has
    count: int  # residues of the whole global batch: the loss is divided by it

    def to(self, device):
        moved = [tensor.to(device, non_blocking=True) for tensor in self[:-3]]
        return Batch(*moved, self.lengths, self.numbers, self.count)


def is_residue(tokens):
    return (tokens >= FIRST) & (tokens < FIRST + KINDS)


def make_batch(sequences, shares, seeds, count):
    """Hide a share of the residues of each sequence, rounded up. The seed of a sequence says which.
    sequences: arrays of tokens; shares: numbers from 0 to 1; count: see Batch."""
    lengths = [len(tokens) for tokens in sequences]
    starts = np.cumsum([0, *lengths], dtype=np.int32)
    owner = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    tokens = np.concatenate(sequences)
    residues = np.flatnonzero(is_residue(tokens))
    hidden = []
    weights = []
    parts = np.split(residues, np.searchsorted(residues, starts[1:-1]))  # of each sequence
    for places, share, seed in zip(parts, shares, seeds, strict=True):
        number = math.ceil(share * len(places))
        draws = np.random.default_rng(seed).random(len(places))
        hidden.append(places[draws.argsort()[:number]])
        weights.append(np.full(number, len(places) / max(1, number), np.float32))

    numbers = [len(places) for places in hidden]
    hidden = np.concatenate(hidden)
    targets = tokens[hidden].astype(np.int64) - FIRST
    positions = np.arange(len(tokens), dtype=np.int32) - starts[owner]
    tokens[hidden] = MASK
    arrays = (tokens, positions, owner, starts, hidden, targets, np.concatenate(weights))
    return Batch(*map(torch.from_numpy, arrays), lengths, numbers, int(count))


def spread_shares(number, generator):
    """Shares above 0, and up to 1, for a number of sequences. Each share alone is uniform, together
    they are spread evenly: less noise than independent ones (Kingma et al. 2021)."""
    return 1 - (generator.permutation(number) + generator.random()) / number


class Proteins:
    """One part, train or valid, of what `prepare` has written, mapped into memory that the ranks of
    a machine share: sequence after sequence, each from BEGIN to END."""

    def __init__(self, folder, part, most):
        # np.asarray: still mapped, and faster than np.memmap itself
        self.tokens = np.asarray(np.memmap(folder / f"{part}.tokens", np.uint8, "r"))
        self.offsets = np.asarray(np.memmap(folder / f"{part}.offsets", "<i8", "r"))
        self.most = most  # tokens of a crop

    def __len__(self):
        return len(self.offsets) - 1

    def __getitem__(self, rows):
        """The lengths of the crops of these rows, in tokens. So GlobalBatchSampler can take this
        object for the costs of all sequences, of which no array is needed."""
        return np.minimum(self.offsets[rows + 1] - self.offsets[rows], self.most)

    def crops(self, rows, draws):
        """(starts, ends, residues): which tokens the crops of these rows are, and how many of them
        are residues. A crop is the whole sequence if it is short enough; else a part of it, which
        begins where `draws` say, a number from 0 to below 1 for each row."""
        whole = self.offsets[rows + 1] - self.offsets[rows]
        lengths = self[rows]
        first = (draws * (whole - lengths + 1)).astype(np.int64)
        residues = lengths - (first == 0) - (first + lengths == whole)  # without BEGIN and END
        starts = self.offsets[rows] + first
        return starts, starts + lengths, residues


class NoisyProteins(Dataset):
    """Micro-batches of the training part. Crops and hidden residues depend on seed, step, and place
    in the global batch, not on the number of ranks. Each rank draws the crops and shares of the
    whole global batch, two numbers for each sequence, and hides residues of its own sequences."""

    def __init__(self, proteins, seed):
        self.proteins = proteins
        self.seed = seed

    def __getitem__(self, item):
        """item, of the sampler: the step, the rows of the global batch, and the places in it of
        this micro-batch."""
        step, rows, places = item
        # the third number is not 0: numpy takes [seed, step, 0] for the sampler's [seed, epoch]
        generator = np.random.default_rng([self.seed, step, 1])
        starts, ends, residues = self.proteins.crops(rows, generator.random(len(rows)))
        shares = spread_shares(len(rows), generator)
        sequences = [self.proteins.tokens[starts[place] : ends[place]] for place in places]
        seeds = [[self.seed, step, place + 2] for place in places]
        return make_batch(sequences, shares[places], seeds, residues.sum())


# --------------------------------------------------------------------------------------------------
# Model


class Block(nn.Module):
    """A transformer block whose norms and residuals are modulated by the noise level (DiT, Peebles
    and Xie 2023). At the start of training it changes nothing."""

    def __init__(self, args):
        super().__init__()
        width = args.hidden_size
        self.heads = args.n_heads
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.adapt = nn.Linear(args.cond_dim, 6 * width)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, x, cond, owners, turns, batch, is_last):
        """x (T, D); cond (B, C); owners (T, B), a one-hot row for each token: its sequence; turns
        (T, 1, E / 2), complex: -> (T, D). The last block returns the hidden residues alone, (M, D):
        they look at all tokens, and the other tokens are of no further use."""
        # `owners @ rows` gives each token the row of its sequence. The gradient is a product, too:
        # faster than the sum token by token that an index would need, and the same bits each time.
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adapt(cond).chunk(6, dim=1)
        h = self.norm1(x) * (owners @ (1 + scale1)) + owners @ shift1
        q, k, v = self.qkv(h).unflatten(1, (3, self.heads, -1)).unbind(1)  # (T, heads, E)
        if is_last:
            x = x.index_select(0, batch.hidden)
            owners = owners.index_select(0, batch.hidden)
        h = self.out(attend(q, k, v, turns, owners, batch, is_last))
        x = torch.addcmul(x, owners @ gate1, self.dropout(h))
        h = self.norm2(x) * (owners @ (1 + scale2)) + owners @ shift2
        h = self.down(F.gelu(self.up(h)))
        return torch.addcmul(x, owners @ gate2, self.dropout(h))


def angles_of(values, count):
    """(n,) -> (n, count): values, such as positions, times frequencies from 1 to above 1e-4"""
    return values[:, None] * 1e4 ** (-torch.arange(count, device=values.device) / count)


def rotate(x, turns):
    """Rotary position embedding (Su et al. 2021): two numbers of x (T, heads, E) that stand side by
    side are a point, a complex number, which a factor in `turns` (T, 1, E / 2) turns round 0."""
    points = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(points * turns).flatten(-2).to(x.dtype)


# not compiled: the lengths are new in every step, and each would be a new program
@torch.compiler.disable
def attend(q, k, v, turns, owners, batch, is_last):
    """Attention within each sequence. q, k and v are (T, heads, E): -> (T, D), or (M, D) of the
    hidden residues."""
    k = rotate(k, turns)
    lengths = batch.lengths  # how many rows of q each sequence has
    if is_last:
        q = q.index_select(0, batch.hidden)
        turns = turns.index_select(0, batch.hidden)
        lengths = batch.numbers
    q = rotate(q, turns)
    if q.device.type == "cuda" and q.dtype != torch.float32:
        from torch.nn.attention.varlen import varlen_attn

        # owners has a row for each row of q: its sums say how many of them each sequence has
        ends = owners.sum(0, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        longest = max(batch.lengths)
        return varlen_attn(q, k, v, F.pad(ends, (1, 0)), batch.starts, longest, longest).flatten(1)
    # elsewhere one sequence after the other: no work is done for padding, and no mask is needed
    outputs = []
    sequences = (q.split(lengths), k.split(batch.lengths), v.split(batch.lengths))
    for parts in zip(*sequences, strict=True):
        query, key, value = [part.transpose(0, 1)[None] for part in parts]  # (1, H, n, E)
        output = F.scaled_dot_product_attention(query, key, value)
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs).flatten(1)


class Denoiser(nn.Module):
    """Which residues are hidden: the encoder of SEDD (Lou et al. 2024) without padding."""

    def __init__(self, args):
        super().__init__()
        width = args.hidden_size
        self.recompute = args.gradient_checkpointing
        self.embed = nn.Embedding(VOCABULARY, width)
        first = nn.Linear(args.cond_dim, args.cond_dim)
        second = nn.Linear(args.cond_dim, args.cond_dim)
        self.noise_mlp = nn.Sequential(first, nn.SiLU(), second, nn.SiLU())
        self.blocks = nn.ModuleList([Block(args) for _ in range(args.n_blocks_prot)])
        self.norm = nn.LayerNorm(width, bias=False)
        self.adapt = nn.Linear(args.cond_dim, 2 * width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if "adapt" in name or "head" in name:  # at first all residues are equally likely
                nn.init.zeros_(parameter)

    def forward(self, batch):
        """Logits (M, 26) of the hidden residues, in fp32."""
        # The network is told the noise level sigma of each sequence: a share 1 - exp(-sigma) is
        # hidden (Lou et al. 2024). If all is hidden, sigma would be infinite: 99.9 % stand for all.
        numbers = torch.arange(len(batch.lengths), dtype=torch.int32, device=batch.noisy.device)
        owners = batch.owner[:, None] == numbers  # (T, B)
        hidden = (owners & (batch.noisy == MASK)[:, None]).sum(0)
        residues = (owners & (batch.noisy >= FIRST)[:, None]).sum(0)
        sigma = -torch.log1p(-(hidden / residues).clamp(max=0.999))
        angles = angles_of(sigma, self.noise_mlp[0].in_features // 2)
        cond = self.noise_mlp(torch.cat([angles.cos(), angles.sin()], dim=1))  # (B, C)
        # the residual stream, too, has the dtype of autocast: half of the memory
        x = self.embed(batch.noisy.int()).to(cond.dtype)  # (T, D)
        owners = owners.to(x.dtype)
        angles = angles_of(batch.positions, self.embed.embedding_dim // self.blocks[0].heads // 2)
        turns = torch.polar(torch.ones_like(angles), angles)[:, None]  # (T, 1, E / 2)

        for block in self.blocks:
            inputs = (x, cond, owners, turns, batch, block is self.blocks[-1])
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, *inputs, use_reentrant=False)
            else:
                x = block(*inputs)

        owners = owners.index_select(0, batch.hidden)
        shift, scale = self.adapt(cond).chunk(2, dim=1)
        x = self.norm(x) * (owners @ (1 + scale)) + owners @ shift
        return self.head(x)[:, FIRST : FIRST + KINDS].float()


# --------------------------------------------------------------------------------------------------
# Loss


def share_of_loss(logits, batch):
    """What this micro-batch adds to the loss of the step, the bound in nats per residue.

    Where k of n residues are hidden, each has the weight n / k. All k are equally likely, so the
    weighted sum is on average a bound on -log p of the sequence (Uria et al. 2014). SEDD and MDLM
    draw a time and hide each residue with this chance; on average that is the same loss (Ou et al.
    2025).

    The sum is divided by the residues of the whole global batch. So the shares of all micro-batches
    and ranks add up to the mean over residues; a mean of their means would be another number."""
    nats = F.cross_entropy(logits, batch.targets, reduction="none")
    return (nats * batch.weights).sum() / batch.count


# --------------------------------------------------------------------------------------------------
# Evaluation


@torch.no_grad()
def evaluate(model, data, args, autocast, device):
    """Metrics of held-out sequences; None if the ranks agreed to stop. Crops and hidden residues
    are the same in each evaluation. (all ranks)"""
    valid = data.valid
    number = min(len(valid), args.eval_sequences)
    rows = np.linspace(0, len(valid) - 1, number).astype(np.int64)
    rows = rows[np.argsort(valid[rows], kind="stable")]  # equal work on all ranks
    generator = np.random.default_rng(0)
    starts, ends, residues = valid.crops(rows, generator.random(number))
    shares = spread_shares(number, generator)
    sequences = [valid.tokens[start:end] for start, end in zip(starts, ends, strict=True)]
    nats = np.zeros((number, args.eval_draws))

    # batch k goes to rank k % world_size: each sequence counts once, on any number of ranks
    batches = np.array_split(np.arange(number), math.ceil(number / args.eval_batch_size))
    for first in range(0, len(batches), dist.get_world_size()):
        if max(gather(wish_to_stop(args))):  # in between, since an evaluation may take long
            return None
        if first + dist.get_rank() >= len(batches):
            continue
        part = batches[first + dist.get_rank()]
        mine = [sequences[i] for i in part]
        for draw in range(args.eval_draws):
            # Of two draws, the second one hides half of the residues more, or fewer, than the first
            # did. (1 - ...: a share is above 0, and may be 1.)
            shifted = 1 - (shares[part] + draw / args.eval_draws) % 1
            seeds = [[row, draw + 1] for row in rows[part]]
            batch = make_batch(mine, shifted, seeds, count=1).to(device)
            with autocast():
                logits = model(batch)
            losses = F.cross_entropy(logits, batch.targets, reduction="none") * batch.weights
            owner = batch.owner[batch.hidden].cpu()
            nats[part, draw] = np.bincount(owner, losses.cpu(), minlength=len(part))
    dist.all_reduce(torch.from_numpy(nats))  # each row is zero on all ranks but one
    # by rank 0 for all, who decide by it: another processor might round differently
    return on_rank0(summarize, nats, sequences, residues, data.letters)


def mean_and_error(nats, residues):
    """Nats per residue of all sequences together, and its standard error over sequences."""
    mean = nats.sum() / residues.sum()
    error = math.sqrt(((nats - mean * residues) ** 2).sum()) / residues.sum()
    error *= math.sqrt(len(nats) / (len(nats) - 1))
    return float(mean), float(error)


def summarize(nats, sequences, residues, letters):
    """Metrics of the model's nats (sequences, draws). letters: how often each residue occurs in the
    training part."""
    nats = nats.mean(1)
    letters = np.array(letters) + 0.5  # a residue that the training part lacks costs much
    surprise = np.zeros(VOCABULARY)  # of other tokens: 0
    surprise[FIRST : FIRST + KINDS] = -np.log(letters / letters.sum())
    unigram = np.array([surprise[tokens].sum() for tokens in sequences])
    nelbo, nelbo_se = mean_and_error(nats, residues)
    gain, gain_se = mean_and_error(unigram - nats, residues)
    return {
        "nelbo": nelbo,
        "nelbo_se": nelbo_se,
        "unigram": mean_and_error(unigram, residues)[0],
        "below_unigram": gain,
        "below_unigram_se": gain_se,
        "perplexity": float(np.exp(min(nelbo, 700.0))),  # a diverged bound would overflow
    }


# --------------------------------------------------------------------------------------------------
# Train


def lr_factor(step, steps, warmup):
    """What the peak rate is multiplied by: a straight rise from above 0, then half a cosine, which
    ends at 1 %, as in the original."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, steps - warmup)
    return 0.01 + 0.99 * (0.5 + 0.5 * math.cos(math.pi * done))


def make_optimizer(args, model):
    # Weight decay pulls towards zero. That helps matrices; a bias or a norm's scale needs its size.
    embedding = model.embed.weight
    decay = [p for p in model.parameters() if p.ndim > 1 and p is not embedding]
    no_decay = [p for p in model.parameters() if p.ndim < 2 or p is embedding]
    groups = [{"params": decay}, {"params": no_decay, "weight_decay": 0.0}]
    options = {"betas": (0.9, args.beta2), "weight_decay": args.weight_decay}
    return torch.optim.AdamW(groups, lr=args.lr, fused=True, **options)


def train(args, device, data, model, state, log, loop):
    """Returns why training was stopped, or "" if it has ended. `loop` says where training stands.
    (all ranks)"""
    world_size = dist.get_world_size()
    ids = np.arange(len(data.train), dtype=np.int32)  # half of the memory of int64
    sampler = GlobalBatchSampler(ids, args, cost=data.train)
    steps = sampler.count_steps(args.epochs, most=args.n_iters)
    warmup = warmup_steps(args, loop["gpu_factor"], steps)
    peak = args.lr * loop["gpu_factor"]
    logging.info(f"  {steps:,} steps, {sampler.steps:,} an epoch; peak learning rate {peak:g}")
    if loop["steps"] not in (0, steps):
        text = f"that of a run of {steps:,} steps, not of {loop['steps']:,}"
        logging.info(f"  from here on the learning rate is {text}: it jumps")
    loop["steps"] = steps

    def must_evaluate(step):
        return step >= steps or step % args.eval_freq == 0

    optimizer = make_optimizer(args, model)
    autocast, scaler = choose_precision(args, device)
    average = copy.deepcopy(model).eval()  # exponential moving average of the weights
    if state:
        restore(state, model=model, average=average, optimizer=optimizer, scaler=scaler)
    averaged = list(average.parameters())
    weights = list(model.parameters())
    # Compiled here, block by block, and not as a whole by wrap_ddp: DDP then still sends the
    # gradients of one block while those of the next are computed. One program serves all blocks and
    # all numbers of tokens.
    if args.compile:
        for block in model.blocks:
            block.compile(dynamic=True)
        torch._dynamo.config.optimize_ddp = False  # for the reason in wrap_ddp
    ddp_model = wrap_ddp(model, argparse.Namespace(compile=False), device)
    fixed = {"args": args, "log": log, "loop": loop, "model": model, "average": average}
    save = functools.partial(save_checkpoint, **fixed)
    if loop["step"] == 0:
        save("latest.pt", optimizer=optimizer, scaler=scaler, must_succeed=True)
    sampler.start = loop["step"]
    batches = make_loader(NoisyProteins(data.train, args.seed), sampler, args, device)

    logging.info("Starting distributed training...")
    bar = tqdm(total=steps, initial=loop["step"], disable=None if dist.get_rank() == 0 else True)
    meter = Meter(["loss", "residues"], args, device)
    reason = ""
    while not reason:
        step = loop["step"]
        epoch, position = divmod(step, sampler.steps)

        # Evaluate. All ranks have the same metrics, and so agree on what is best. A run that was
        # stopped before its evaluation makes it now; so does one that goes on with fewer --n_iters.
        if must_evaluate(step) and loop["validated"] < step:
            metrics = evaluate(average, data, args, autocast, device)
            if metrics is None:  # the next start makes it; the save before it may have failed
                reason = max(gather(wish_to_stop(args)))
                save("latest.pt", optimizer=optimizer, scaler=scaler, must_succeed=True)
                break
            row = {f"val/{name}": value for name, value in metrics.items()}
            log.write({"step": step, "epoch": (step - 1) // sampler.steps, **row})
            if not math.isfinite(metrics["nelbo"]):
                text = f"the held-out bound of step {step} is {metrics['nelbo']}"
                raise RunError(f"{text}: --fresh and a lower --lr")
            loop["validated"] = step
            if not loop["best"] or metrics["nelbo"] < loop["best"]["value"]:
                logging.info(f"Saving checkpoint for model at step {step}")
                before = dict(loop)
                loop["best"] = {"metric": "nelbo", "value": metrics["nelbo"], "step": step}
                loop["metrics"] = metrics
                if not save("best.pt", must_succeed=step >= steps):
                    loop.update(before)  # best.pt, too, is that of before
            meter.start()
        if step >= steps:
            save("latest.pt", optimizer=optimizer, scaler=scaler, must_succeed=True)
            break
        if position == 0:
            logging.info(f"Starting training epoch {epoch}")

        seed_step(args, step)
        lr = peak * lr_factor(step, steps, warmup)
        for group in optimizer.param_groups:
            group["lr"] = lr

        # forward and backward, micro-batch by micro-batch; the last one adds up over the ranks
        shares = torch.zeros(2, device=device)
        for micro in range(1, sampler.accumulation + 1):
            batch = meter.next_batch(batches, device)
            ddp_model.require_backward_grad_sync = micro == sampler.accumulation
            with autocast():
                loss = share_of_loss(ddp_model(batch), batch)
            # DDP divides the sum over the ranks by their number, but the shares are to be added up
            scaler.scale(loss * world_size).backward()
            shares += torch.stack([loss.detach(), (batch.noisy >= FIRST).sum()])
        norm = update_if_finite(args, optimizer, scaler)
        decay = min(args.ema, (1 + step) / (10 + step))  # early weights are soon forgotten
        with torch.no_grad():
            torch._foreach_lerp_(averaged, weights, 1 - decay)
        meter.add(shares, norm)
        loop["step"] += 1
        bar.update()

        # log and save; also before an evaluation, which may be interrupted
        must_save = loop["step"] % args.save_every == 0 or must_evaluate(loop["step"])
        row = {"step": loop["step"], "epoch": epoch, "lr": lr}
        reason = meter.meet(log, row, sampler.global_batch, must_save)
        if reason or must_save:
            save("latest.pt", optimizer=optimizer, scaler=scaler, must_succeed=bool(reason))
    bar.close()
    return reason


# --------------------------------------------------------------------------------------------------
# Main


class Data:
    """What `prepare` has written of --datafile."""

    def __init__(self, folder, args):
        meta = json.loads((folder / "meta.json").read_text())
        self.hash = meta["hash"]
        self.letters = meta["letters"]  # how often each of RESIDUES occurs in the training part
        self.lengths = meta["lengths"]  # {residues: sequences} of the training part
        self.train = Proteins(folder, "train", args.max_protein_len)
        self.valid = Proteins(folder, "valid", args.max_protein_len)
        most = args.max_protein_len - 2
        long = sum(count for length, count in self.lengths.items() if int(length) > most)
        held_out = f"held out: {len(self.valid):,}"
        logging.info(f"  sequences to train on: {len(self.train):,}; {held_out}")
        if long > 0:
            logging.info(f"  {long:,} are longer than {most} residues: a part is used each time")
        if meta["note"]:
            logging.warning(meta["note"])


def gpu_factor(args, world_size):
    """What learning rate and warm-up are multiplied by. Where the batch does not grow with the
    GPUs, 1. (Goyal et al. 2017 scale the rate so; the longer warm-up is the original's.)"""
    if args.global_batch_size > 0 or args.lr_scaling == "none":
        return 1
    if args.lr_scaling == "conservative":
        return min(world_size, 6)
    return world_size


def warmup_steps(args, factor, steps):
    warmup = round(args.warmup * factor)
    if warmup > steps // 2:
        warmup = steps // 10
        text = f"--warmup {args.warmup} x {factor} is more than half of {steps} steps"
        logging.warning(f"{text}: it takes {warmup}")
    return warmup


def main(args):
    device = setup_ddp(args)
    if device.type != "cpu":
        module = torch.get_device_module(device)
        module.set_per_process_memory_fraction(args.max_memory_per_gpu, device)
    # auto is fp32 on a GPU that lacks bf16
    is_old = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
    if is_old and args.precision in ("bf16", "fp16"):
        raise InputError(f"--precision {args.precision}: attention on this GPU has only fp32")
    logging.info("Preparing data loaders...")
    data = Data(read_once(prepare, args), args)
    if args.prepare_only:
        logging.info(f"{args.datafile} is read: {args.cache_dir}")
        return 0

    batch_is_given = args.global_batch_size > 0
    loop = {
        "step": 0,
        "steps": 0,  # of the whole run
        "validated": 0,  # the step of the last evaluation
        "best": {},
        "metrics": {},  # of the best
        "gpu_factor": gpu_factor(args, dist.get_world_size()),
        "letters": data.letters,  # this and the next: for whoever draws samples
        "lengths": data.lengths,
    }
    may_change = """datafile cache_dir epochs n_iters accum gradient_checkpointing
        max_memory_per_gpu eval_freq eval_batch_size sampling_method wandb_project
        wandb_name""".split()
    state = open_run(args, data.hash, may_change)
    if state:  # a resumed run keeps its batch and its rate, on any number of GPUs
        loop = state["loop"]
    elif batch_is_given:
        logging.info("  a step has --global_batch_size samples: --accum is not used")
    else:
        args.global_batch_size = args.batch_size * args.accum * dist.get_world_size()
    torch.manual_seed(args.seed)  # the same weights on all ranks
    model = Denoiser(args).to(device)
    logging.info(f"{sum(p.numel() for p in model.parameters()):,} parameters")

    log = RunLog(args, state)
    with logging_redirect_tqdm():
        reason = train(args, device, data, model, state, log, loop)
    if reason:
        log.close(f"stopped by {reason}", steps=loop["step"], best=loop["best"])
        return exit_status(reason)
    end_on_signals()
    best = loop["metrics"]
    text = ", ".join(f"{name} {value:.4f}" for name, value in best.items())
    logging.info(f"best at step {loop['best']['step']}, in nats per residue: {text}")
    if best["below_unigram"] <= 0:
        logging.warning("the network is no better than the residues' shares: train longer")
    baselines = {"unigram": best["unigram"]}
    summary = {"best": loop["best"], "val": best, "baselines": baselines}
    log.close("finished", steps=loop["step"], **summary)
    logging.info("Training and evaluation completed successfully!")
    return 0


# --------------------------------------------------------------------------------------------------
# Reading: the user's file, once, by rank 0. Training needs only what `write_tokens` leaves

PUBLISHED = "https://ftp.uniprot.org/pub/databases/uniprot/uniref/uniref50/uniref50.fasta.gz"
READER = 2  # raise it when you change what is read or kept: else an old cache is used
LETTERS = (RESIDUES + RESIDUES.lower()).encode()
TOKENS = bytes.maketrans(LETTERS, 2 * bytes(range(FIRST, FIRST + KINDS)))

COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\xfd7zXZ": "xz", b"(\xb5/\xfd": "zstd"}
HEADERS = "sequence sequences seq protein proteins peptide peptides text".split()  # of a column


def open_text(path):
    """A file, packed or not, as text: one letter for each byte, \\n at the end of each line."""
    import fsspec  # comes with torch

    with open(path, "rb") as file:
        start = file.read(6)
    packed = [name for magic, name in COMPRESSED.items() if start.startswith(magic)]
    try:
        file = fsspec.open(str(path), "rb", compression=packed[0] if packed else None).open()
    except ValueError:  # a compression that this Python does not know
        raise InputError(f"{path} is packed by {packed[0]}: pip install backports.zstd") from None
    # titles may have letters of any encoding, of which latin-1 refuses none
    text = io.TextIOWrapper(io.BufferedReader(file, 2**20), encoding="latin-1")
    if text.read(3) != "\xef\xbb\xbf":  # a byte-order mark
        text.seek(0)
    return text


def is_fasta(path):
    """True: FASTA; False: a sequence on each line. What could pass for one of them, but was not
    meant to be read as such, is refused."""
    with open_text(path) as file:
        head = file.read(2**20)
    first, _, rest = head.lstrip().partition("\n")
    is_header = first.strip().lower() in HEADERS
    if len(first) < 16 and first.isalpha():  # a word, before sequences in capital letters
        is_header |= rest.partition("\n")[0].isupper() and not first.isupper()
    found = ""
    if "\0" in head:
        line = head[: head.index("\0")].count("\n") + 1
        found = f"no text (a NUL byte on line {line}: an archive, or UTF-16?)"
    elif not first:
        found = "empty"
    elif first.startswith("@"):
        found = "FASTQ (its first letter is @)"
    elif re.match(">(P1|F1|DL|DC|RL|RC|N1|N3|XX);", first):
        found = f"PIR ({first[:40]}), whose second lines are titles"
    elif not first.startswith(">") and "\n>" in head:
        found = f"{first[:40]!r} before the first '>': remove it"
    elif is_header and not first.startswith(">"):
        found = f"{first[:40]!r}, a header, before the first sequence: remove it"
    if found:
        text = "expected proteins, as FASTA or with a sequence on each line"
        raise InputError(f"{path}: {text}; it is {found}")
    return first.startswith(">")


def read_records(path):
    """Yields (where it stands in the file, sequence as bytes) of each record."""
    if not os.path.exists(path):
        raise InputError(f"{path}: there is no such file")
    expected = "a whole file"
    try:
        with open(path, "rb") as file:
            start = file.read(4)
        if start.startswith((b"PK\3\4", b"\x80")):  # as torch.save begins
            expected = "one that torch.save has written (unpack other archives)"
            yield from read_list(path)
            return
        read_text = read_fasta if is_fasta(path) else read_lines
        with open_text(path) as file:
            yield from read_text(file)
    except (InputError, MemoryError):
        raise
    except Exception as error:  # each kind of compression has its own, and torch has five
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:120]
        text = f"cannot be read to its end, expected {expected}"
        raise InputError(f"{path} {text}: {reason}") from None


def read_fasta(file):
    place = ""
    lines = []
    for number, line in enumerate(file, 1):
        if not line.startswith(">"):
            lines.append(line)
            continue
        if place:
            yield place, "".join(lines).encode("latin-1").translate(None, b"\n \t")
        place = f"line {number} {line[:30].strip()}"
        lines = []
    yield place, "".join(lines).encode("latin-1").translate(None, b"\n \t")


def read_lines(file):
    for number, line in enumerate(file, 1):
        sequence = line.strip()
        if sequence:
            yield f"line {number}", sequence.encode("latin-1")


def read_list(path):
    """Of a list of strings, or of dicts, as the original's files have it, saved by torch.save."""
    entries = torch.load(path, weights_only=True)
    if isinstance(entries, dict):
        entries = entries.get("sequences", entries.get("data"))
    if not isinstance(entries, list):
        raise InputError(f"{path}: expected a list, or a dict with a list as sequences or data")
    for number, entry in enumerate(entries):
        place = f"entry {number}"
        if isinstance(entry, dict):
            names = [name for name in ("protein_seq", "sequence", "text") if name in entry]
            if not names:
                place += " has no protein_seq, sequence or text"
            entry = entry[names[0]] if names else ""
        if not isinstance(entry, str):
            place += f" is no text, but {type(entry).__name__}"
            entry = ""
        yield place, "".join(entry.split()).encode("utf-8", "replace")


def encode(sequence):
    """(tokens as bytes, "") of the letters of a sequence; or (b"", what is wrong with them)."""
    sequence = sequence.removesuffix(b"*")  # some files mark the end so
    wrong = sequence.translate(None, LETTERS)
    if wrong:
        return b"", f"{wrong[:12].decode('utf-8', 'backslashreplace')!r} among the residues"
    if not sequence:
        return b"", "no residues"
    return sequence.translate(TOKENS), ""


def is_held_out(tokens, val_ratio):
    """By the sequence alone: equal ones are on one side, in any file and on any seed."""
    digest = hashlib.blake2b(tokens, digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64 < val_ratio


def write_tokens(folder, args):
    """Read --datafile, and write for the parts train and valid: PART.tokens (uint8), sequence after
    sequence, each from BEGIN to END; PART.offsets (int64), where each begins, and where the last
    one ends; skipped.txt, bad records; meta.json. The memory that this needs does not grow with
    the file, unless that is a .pt list. (rank 0)"""
    files = {}
    ends = {"train": 0, "valid": 0}
    for part in ends:
        files[part, "tokens"] = open(folder / f"{part}.tokens", "wb")
        files[part, "offsets"] = open(folder / f"{part}.offsets", "wb")
        files[part, "offsets"].write(bytes(8))  # the first begins at 0
    counts = {"train": 0, "valid": 0}
    lengths = collections.Counter()
    bad = 0
    examples = []
    skipped = open(folder / "skipped.txt", "w")
    records = read_records(Path(args.datafile))
    bar = tqdm(records, unit=" records", unit_scale=True, disable=None, leave=False)
    for place, sequence in bar:
        tokens, problem = encode(sequence)
        if problem:
            bad += 1
            skipped.write(f"{place}: {problem}\n")
            if bad <= 20:
                examples.append(f"{place}: {problem}")
            continue
        part = "valid" if is_held_out(tokens, args.val_ratio) else "train"
        counts[part] += 1
        if part == "train":
            lengths[len(tokens)] += 1
        ends[part] += len(tokens) + 2
        files[part, "tokens"].write(b"%c%b%c" % (BEGIN, tokens, END))
        files[part, "offsets"].write(ends[part].to_bytes(8, "little"))
    for file in (skipped, *files.values()):
        file.close()

    if bad > 0 and not args.skip_bad_data:
        text = f"{bad} records are not proteins; expected FASTA, or a sequence on each line"
        hint = "--skip_bad_data leaves out such records:"
        raise InputError(f"{args.datafile}: {text}; {hint}" + list_problems(examples))
    letters, train_hash = read_through(folder / "train.tokens")
    _, valid_hash = read_through(folder / "valid.tokens")
    nucleotides = sum(letters[RESIDUES.index(letter)] for letter in "ACGTUN")
    if nucleotides > 0.9 * sum(letters):
        text = f"{nucleotides / sum(letters):.0%} of its letters are A C G T U N"
        raise InputError(f"{args.datafile}: expected proteins; it is DNA or RNA: {text}")
    if counts["train"] == 0 or counts["valid"] < 2:
        text = f"{counts['train']} proteins to train on, {counts['valid']} held out, {bad} bad ones"
        hint = "expected more different ones (equal ones are on one side), or another --val_ratio"
        raise InputError(f"{args.datafile}: {text}; {hint}")
    note = ""
    if bad > 0:
        text = f"{bad} bad records are left out: all are in skipped.txt in the cache, such as"
        note = text + list_problems(examples)
    meta = {"letters": letters, "lengths": lengths, "note": note, "hash": train_hash + valid_hash}
    (folder / "meta.json").write_text(json.dumps(meta))


def read_through(path):
    """(how often each of RESIDUES stands in a file of tokens, a hash of the file)"""
    counts = np.zeros(256, np.int64)
    digest = hashlib.blake2b(digest_size=6)
    with open(path, "rb") as file:
        for block in iter(functools.partial(file.read, 2**22), b""):
            counts += np.bincount(np.frombuffer(block, np.uint8), minlength=256)
            digest.update(block)
    return counts[FIRST : FIRST + KINDS].tolist(), digest.hexdigest()


def prepare(args):
    """The folder with the tokens of --datafile, read once, and kept. (rank 0)"""
    path = Path(args.datafile)
    if not path.is_file():
        found = "is a folder; expected a file" if path.is_dir() else "there is no such file"
        raise InputError(f"--datafile {path}: {found}. UniRef50 is at {PUBLISHED}")
    stat = path.stat()
    key = [READER, str(path.resolve()), stat.st_size, stat.st_ctime_ns]
    key += [args.val_ratio, args.skip_bad_data]
    return cached(args.cache_dir, "uniref50", key, lambda new: write_tokens(new, args))


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
