"""Train a language model of proteins on UniRef50 by masked diffusion.

Residues of a sequence are hidden at a random rate, from none to all. A transformer that reads in
both directions predicts them. Its cross entropy, weighted by one over the time, bounds the
likelihood of the sequence (SEDD, Lou et al. 2024; MDLM, Sahoo et al. 2024).

    python tools/prepare_uniref50.py uniref50.fasta.gz input_data/uniref50      # once
    ./run_train_uniref50_ddp.sh --datafile input_data/uniref50                  # all GPUs
    ./run_train_uniref50_ddp.sh --config configs/config_uniref50_quickstart.yaml
    python run_train_uniref50_ddp.py --config configs/config_uniref50_quickstart.yaml
    torchrun --nproc_per_node=8 run_train_uniref50_ddp.py --datafile input_data/uniref50
    python tools/sample_uniref50.py experiments_ddp/best.pt --out samples.fasta

Data (--datafile): a folder of tools/prepare_uniref50.py, or a file that this tool reads (FASTA,
text, either as .gz, or the original's .pt), which is prepared into --cache_dir at the first start.
Held out are sequences by their hash: the same in any order and on any seed.

Every step is a random sample of --batch_size x --accum x GPUs sequences. They lie one after the
other without padding, and a token sees only its own sequence. Longer ones are cropped at random.

Logged, over all ranks: step, epoch, lr, loss (nats per residue, the bound), grad_norm (before
clipping), skipped (steps whose gradient was not finite), samples_per_s (sequences), residues_per_s,
data_wait (share of the time). val/..., with averaged weights and fixed noise: nelbo (held-out
bound, nats per residue), nelbo_se (its standard error), bits, perplexity, unigram (the entropy by
the residues' shares in the training data), below_unigram, below_unigram_se, ce@0.15 ... (cross
entropy where 15 % is hidden).

Files in --output_dir: latest.pt, previous.pt, best.pt, samples/*.fasta, metrics.jsonl, curves.png,
summary.json.

The best prediction of hidden residues does not depend on the noise level (Ou et al. 2024), but the
original shows it to the network, and so does this one. It costs 5 to 10 % of a step's time on CPUs;
on GPUs not measured. --time_conditioning False saves it.

Unlike the original (architvasan/protein_lig_sedd) the loss counts residues and not padding, no
residue is deleted, sequences begin and end with tokens of their own, the schedule ends fully
hidden, validation is by all ranks with fixed noise, and all times are optimizer steps.
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
import shlex
import signal
import subprocess
import sys
import threading
import time
import traceback
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
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from tqdm import tqdm

# --------------------------------------------------------------------------------------------------
# Arguments


class LogEvery(argparse.Action):
    """--log_freq, the original's name for --log_every."""

    def __call__(self, parser, namespace, value, option_string=None):
        namespace.log_every = value


def fraction(text):
    if not 0 <= float(text) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return float(text)


def parse_args():
    parser = Parser(description=__doc__)
    add = parser.add_argument_group("data").add_argument
    default = "./input_data/processed_uniref50.pt"
    add("--datafile", default=default, help="folder of tools/prepare_uniref50.py, or a file")
    add("--cache_dir", default="./cache", help="where a file is prepared")
    add("--val_ratio", type=fraction, default=0.05, help="share that is held out (of a file)")
    add("--skip_bad_data", **FLAG, default=False, help="leave out bad records (of a file)")
    add("--prepare_only", **FLAG, default=False, help="check the options, prepare a file, end")
    add("--max_protein_len", type=count, default=512, help="tokens; longer ones are cropped")

    add = parser.add_argument_group("model").add_argument
    add("--hidden_size", type=count, default=768, help="width")
    add("--n_blocks_prot", type=count, default=8, help="transformer blocks")
    add("--n_heads", type=count, default=12, help="attention heads")
    add("--cond_dim", type=count, default=256, help="width of the noise embedding")
    add("--dropout", type=fraction, default=0.1, help="after attention and MLP")
    add("--time_conditioning", **FLAG, default=True, help="show the noise level to the network")

    add = parser.add_argument_group("training").add_argument
    add("--accum", type=count, default=4, help="micro-batches per step, of a new run")
    add("--n_iters", type=count, default=500_000, help="optimizer steps at most")
    add("--epochs", type=count, default=50, help="passes over the data at most")
    add("--ema", type=fraction, default=0.9995, help="decay of the averaged weights")

    add = parser.add_argument_group("optim").add_argument
    add("--lr", type=float, default=5e-5, help="peak learning rate, on one GPU")
    add("--warmup", type=int, default=5000, help="steps to reach it, on one GPU")
    kinds = ["none", "linear", "conservative"]
    text = "what N GPUs multiply both by: 1, N, min(N, 6); none with --global_batch_size"
    add("--lr_scaling", default="linear", choices=kinds, help=text)
    add("--weight_decay", type=float, default=0.01, help="none on biases, norms, embeddings")
    add("--beta2", type=fraction, default=0.999, help="AdamW's")

    add = parser.add_argument_group("memory").add_argument
    add("--gradient_checkpointing", **FLAG, default=False, help="compute activations twice")
    add("--max_memory_per_gpu", type=fraction, default=0.85, help="share that a rank may take")

    add = parser.add_argument_group("eval").add_argument
    add("--eval_freq", type=count, default=2000, help="steps between evaluations")
    add("--eval_sequences", type=count, default=2000, help="held-out sequences at most")
    add("--eval_draws", type=count, default=2, help="draws of the noise for each of them")
    add("--eval_batch_size", type=count, default=16, help="sequences per forward pass")

    add = parser.add_argument_group("sampling, at every evaluation").add_argument
    add("--samples_per_eval", type=int, default=16, help="sequences; 0: none")
    text = "rigorous: samples of the model; simple: surest residues first, another law"
    add("--sampling_method", default="rigorous", choices=["rigorous", "simple"], help=text)
    text = "network calls per sample; 0: one per residue, which is exact (rigorous)"
    add("--sampling_steps", type=int, default=100, help=text)

    add = parser.add_argument_group("names of the original").add_argument
    add("--log_freq", action=LogEvery, type=count, help="as --log_every")
    add("--wandb_project", help="as the environment variable WANDB_PROJECT")
    add("--wandb_name", help="as the environment variable WANDB_NAME")

    add_common_arguments(parser, output_dir="./experiments_ddp", batch_size=16)
    parser.set_defaults(log_every=100, save_every=2000)
    args = parse_with_config(parser)

    if args.hidden_size % (2 * args.n_heads) != 0:
        text = f"must be {args.n_heads} heads times an even number"
        parser.error(f"--hidden_size {args.hidden_size}: {text}")
    if args.cond_dim % 2 != 0:
        parser.error(f"--cond_dim {args.cond_dim}: must be even")
    if args.max_protein_len < 3:
        parser.error(f"--max_protein_len {args.max_protein_len}: must be 3 or more")
    for name in ("dropout", "beta2"):
        if getattr(args, name) == 1:
            parser.error(f"--{name} 1: must be below 1")
    for name in ("lr", "warmup", "weight_decay", "samples_per_eval", "sampling_steps"):
        if not 0 <= getattr(args, name) < math.inf:
            parser.error(f"--{name} {getattr(args, name)}: must be a number from 0 on")
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

PUBLISHED = "https://ftp.uniprot.org/pub/databases/uniprot/uniref/uniref50/uniref50.fasta.gz"
EARLIEST = 1e-3  # time; the weight of a hidden residue, 1 / time, is at most 1000
ALL_BUT = 1e-3  # share that is not hidden at time 1, for a finite noise (Lou et al. 2024)


class Batch(NamedTuple):
    """Sequences of different lengths, not padded but laid one after the other: T tokens of B
    sequences, of which M residues are hidden."""

    noisy: torch.Tensor  # (T,) uint8, MASK where a residue is hidden
    positions: torch.Tensor  # (T,) int32, of a token in its sequence
    owner: torch.Tensor  # (T,) int32, the sequence of a token
    starts: torch.Tensor  # (B + 1,) int32, where each sequence starts, and where the last one ends
    sigma: torch.Tensor  # (B,) float32, the noise level
    hidden: torch.Tensor  # (M,) int64, the places of the hidden residues in `noisy`
    targets: torch.Tensor  # (M,) int64, which residues they are, from 0 to 25
    weights: torch.Tensor  # (M,) float32, of their cross entropies in the loss
    lengths: list  # of the sequences, in tokens
    count: int  # residues of the whole global batch: the loss is divided by it

    def to(self, device):
        moved = [tensor.to(device, non_blocking=True) for tensor in self[:-2]]
        return Batch(*moved, self.lengths, self.count)


def is_residue(tokens):
    return (tokens >= FIRST) & (tokens < FIRST + KINDS)


def make_batch(sequences, hide, shares, weights, count):
    """sequences and hide: arrays of tokens, and which of them to hide. For each sequence the share
    that is hidden, and the weight of its cross entropies."""
    lengths = [len(tokens) for tokens in sequences]
    tokens = np.concatenate(sequences)
    hide = np.concatenate(hide)
    hidden = np.flatnonzero(hide)
    owner = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    starts = np.cumsum([0, *lengths], dtype=np.int32)
    sigma = -np.log1p(-np.minimum(shares, 1 - ALL_BUT))
    return Batch(
        torch.from_numpy(np.where(hide, np.uint8(MASK), tokens)),
        torch.from_numpy(np.arange(len(tokens), dtype=np.int32) - starts[owner]),
        torch.from_numpy(owner),
        torch.from_numpy(starts),
        torch.from_numpy(sigma.astype(np.float32)),
        torch.from_numpy(hidden),
        torch.from_numpy(tokens[hidden].astype(np.int64) - FIRST),
        torch.from_numpy(weights[owner[hidden]].astype(np.float32)),
        lengths,
        int(count),
    )


class Proteins:
    """One part, train or valid, of a folder of tools/prepare_uniref50.py, mapped into memory that
    the ranks of a machine share."""

    def __init__(self, folder, part, most):
        self.tokens = np.asarray(np.memmap(folder / f"{part}.tokens", np.uint8, "r"))
        self.offsets = np.asarray(np.memmap(folder / f"{part}.offsets", np.int64, "r"))
        self.most = most  # tokens of a crop

    def __len__(self):
        return len(self.offsets) - 1

    def lengths(self, rows):
        """Tokens of sequences, with BEGIN and END."""
        return self.offsets[rows + 1] - self.offsets[rows]

    def __getitem__(self, rows):
        """Tokens of their crops: the cost that the sampler sorts a step by."""
        return np.minimum(self.lengths(rows), self.most)

    def crops(self, rows, places):
        """Of each sequence all, or --max_protein_len tokens from a place that is given by a number
        from 0 to below 1: (list of token arrays, how many of their tokens are residues)."""
        whole = self.lengths(rows)
        lengths = self[rows]
        first = (places * (whole - lengths + 1)).astype(np.int64)
        residues = lengths - (first == 0) - (first + lengths == whole)  # without BEGIN and END
        starts = self.offsets[rows] + first
        crops = [self.tokens[start : start + n] for start, n in zip(starts, lengths, strict=True)]
        return crops, residues


class NoisySequences(Dataset):
    """Item (ids, whole, step): the micro-batch of the sequences `ids`, part of the step's `whole`.

    Crops, times and hidden residues are those of (seed, step) and of the place in `whole`, so they
    are the same on any number of ranks."""

    def __init__(self, args, proteins):
        self.proteins = proteins
        self.seed = args.seed

    def __getitem__(self, item):
        ids, whole, step = item
        generator = np.random.default_rng([self.seed, step])
        crops, residues = self.proteins.crops(whole, generator.random(len(whole)))
        # times spread evenly over the step: less noise than independent ones (Kingma et al. 2021)
        places = (generator.permutation(len(whole)) + generator.random()) / len(whole)
        times = EARLIEST + (1 - EARLIEST) * places
        shares = (1 - ALL_BUT) * times
        ends = np.cumsum([len(tokens) for tokens in crops])
        draws = generator.random(ends[-1], dtype=np.float32)

        mine = np.flatnonzero(np.isin(whole, ids))
        sequences = [crops[i] for i in mine]
        hide = []
        for i in mine:
            is_low = draws[ends[i] - len(crops[i]) : ends[i]] < shares[i]
            hide.append(is_low & is_residue(crops[i]))
        return make_batch(sequences, hide, shares[mine], 1 / times[mine], residues.sum())


def find_data(args):
    """The folder of --datafile. A file is prepared first, if it was not before. (rank 0)"""
    path = Path(args.datafile)
    if path.is_dir():
        return path
    if not path.exists():
        text = f"--datafile {path}: no such file or folder. UniRef50 is at {PUBLISHED}; then"
        text += " python tools/prepare_uniref50.py uniref50.fasta.gz input_data/uniref50"
        raise InputError(f"{text} and --datafile input_data/uniref50")
    options = [f"--val_ratio={args.val_ratio}"]
    if args.skip_bad_data:
        options.append("--skip_bad_data")
    stat = path.stat()
    key = [str(path.resolve()), stat.st_size, stat.st_mtime_ns, *options]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    folder = Path(args.cache_dir) / f"uniref50-{digest[:16]}"
    if folder.exists():
        return folder

    words = [str(path), str(folder), *options]
    logging.info(shlex.join(["python", "tools/prepare_uniref50.py", *words]))
    tool = Path(__file__).parent / "tools" / "prepare_uniref50.py"
    done = subprocess.run([sys.executable, tool, *words], stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        said = done.stderr.strip() or f"{tool.name} ended with status {done.returncode}"
        raise InputError(said)
    return folder


VERIFIED = 2**28  # bytes; longer files are not read at the start, only their size is compared


def read_meta(folder):
    """(content of meta.json, hash of the data) of a folder that is whole."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        for name, size in meta["bytes"].items():
            path = folder / name
            if path.stat().st_size != size:
                raise ValueError(f"{name} has not {size} bytes")
            written = meta["sha256"][name]
            if size <= VERIFIED and hashlib.sha256(path.read_bytes()).hexdigest() != written:
                raise ValueError(f"{name} is not what was written")
    except (OSError, KeyError, ValueError) as error:
        text = f"{folder} is no whole folder of tools/prepare_uniref50.py ({error})"
        raise InputError(f"{text}: give another, or prepare the data again") from None
    checksums = json.dumps(meta["sha256"])
    return meta, hashlib.sha256(checksums.encode()).hexdigest()[:12]


def load_data(args):
    """(training part, validation part, meta.json, hash), the same on all ranks. (all ranks)"""
    folder = on_rank0(find_data, args)
    if not folder.exists():
        raise InputError(f"rank 0 has {folder}, this machine has not: all must see it")
    meta, data_hash = read_meta(folder)
    if data_hash != on_rank0(read_meta, folder)[1]:
        raise InputError(f"{folder} is not the same here as on rank 0")
    train = Proteins(folder, "train", args.max_protein_len)
    valid = Proteins(folder, "valid", args.max_protein_len)
    logging.info(f"  sequences to train on: {len(train):,}; held out: {len(valid):,}")
    if meta["val_ratio"] != args.val_ratio:
        logging.info(f"  {folder} was prepared with --val_ratio {meta['val_ratio']}: that holds")
    return train, valid, meta, data_hash


# --------------------------------------------------------------------------------------------------
# Model


class Block(nn.Module):
    """A transformer block whose norms and residuals are modulated by the noise level (DiT, Peebles
    and Xie 2023). At the start of training it changes nothing."""

    def __init__(self, args):
        super().__init__()
        width = args.hidden_size
        self.heads = args.n_heads
        self.dropout = args.dropout
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.adapt = nn.Linear(args.cond_dim, 6 * width)

    def forward(self, x, cond, owners, turns, starts, lengths):
        """x (T, D); cond (B, C); owners (T, B), 1 where a row of `cond` is a token's, or None where
        there is one row for all; turns (T, 1, 1, D / heads / 2, 2): -> (T, D)"""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adapt(cond).chunk(6, dim=1)
        h = add_scaled(spread(shift1, owners), 1 + scale1, owners, self.norm1(x))
        # q and k (T, 2, H, E), v (T, 1, H, E); the gradient of an index would be filled with zeros
        qk, v = self.qkv(h).unflatten(1, (3, self.heads, -1)).split((2, 1), dim=1)
        q, k = rotate(qk, turns).unbind(1)
        h = self.out(attend(q, k, v.squeeze(1), starts, lengths))
        x = add_scaled(x, gate1, owners, dropout(h, self.dropout, self.training))
        h = add_scaled(spread(shift2, owners), 1 + scale2, owners, self.norm2(x))
        h = self.down(F.gelu(self.up(h)))
        return add_scaled(x, gate2, owners, dropout(h, self.dropout, self.training))


def spread(rows, owners):
    """The row of each token's sequence (T, D). The product with a matrix of zeros and ones is
    exact (--precision tf32 rounds it). Its gradient is a product, too: faster than the sum token by
    token that an index would need, and the same bits each time."""
    return rows if owners is None else owners @ rows


def add_scaled(x, rows, owners, y):
    """x + y times the row of each token's sequence (T, D)."""
    # not addcmul: its backward pass multiplies by 1, and under autocast it keeps the rows in fp32
    return x + spread(rows, owners) * y


def rotate(x, turns):
    """Rotary position embedding (Su et al. 2021): pairs of numbers of x (..., E) turned by an
    angle, of which turns (..., E / 2, 2) has the cosine and the sine."""
    pairs = x.float().unflatten(-1, (-1, 2))
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        # as complex numbers: one pass over the memory
        turned = torch.view_as_complex(pairs) * torch.view_as_complex(turns)
        return torch.view_as_real(turned).flatten(-2).to(x.dtype)
    a, b = pairs.unbind(-1)
    cos, sin = turns.unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2).to(x.dtype)


@torch.compiler.disable  # the lengths are new in every step: compiled, each would be a new program
def attend(q, k, v, starts, lengths):
    """Attention (T, D) within each sequence; q, k and v are (T, heads, E)."""
    if q.device.type == "cuda" and q.dtype != torch.float32:
        from torch.nn.attention.varlen import varlen_attn

        longest = max(lengths)
        return varlen_attn(q, k, v, starts, starts, longest, longest).flatten(1)
    # elsewhere one sequence after the other: no work is done for padding, and no mask is needed
    outputs = []
    for parts in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        query, key, value = [part.transpose(0, 1)[None] for part in parts]  # (1, H, n, E)
        output = F.scaled_dot_product_attention(query, key, value)
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs).flatten(1)


def dropout(x, share, training):
    """F.dropout. On CPUs drawing a random number for each element takes longer than the rest of a
    layer: there, each draw of 64 bits serves four elements."""
    if share == 0 or not training:
        return x
    if x.device.type != "cpu":
        return F.dropout(x, share)
    draws = torch.empty(math.ceil(x.numel() / 4), dtype=torch.int64).random_(-(2**63), None)
    uniform = draws.view(torch.int16)[: x.numel()].view(x.shape)  # from -32768 to 32767
    keep = (uniform >= round(65536 * share) - 32768).to(x.dtype)
    return x * keep.mul_(1 / (1 - share))


class Denoiser(nn.Module):
    """Which residues are hidden: the encoder of SEDD (Lou et al. 2024) without padding."""

    def __init__(self, args, dtype=torch.float32):
        super().__init__()
        width = args.hidden_size
        self.dtype = dtype  # of autocast
        self.timed = args.time_conditioning
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

        waves = torch.arange(args.cond_dim // 2) / (args.cond_dim // 2)
        self.register_buffer("waves", torch.exp(-math.log(1e4) * waves), persistent=False)
        size = width // args.n_heads
        frequencies = 1e4 ** (-torch.arange(0, size, 2) / size)
        angles = torch.arange(args.max_protein_len)[:, None] * frequencies
        turns = torch.stack([angles.cos(), angles.sin()], dim=-1)  # (positions, E / 2, 2)
        self.register_buffer("turns", turns, persistent=False)

    def forward(self, batch):
        """Logits (M, 26) of the hidden residues, in fp32."""
        autocast = contextlib.nullcontext()
        if self.dtype != torch.float32:
            autocast = torch.autocast(batch.noisy.device.type, self.dtype)
        with autocast:
            x = self.encode(batch)
        return self.head(x.float())[:, FIRST : FIRST + KINDS]

    def encode(self, batch):
        """What the head reads at the hidden residues (M, D)."""
        # the residual stream, too, has the dtype of autocast: half of the memory
        x = self.embed(batch.noisy.int()).to(self.dtype)
        sigma = batch.sigma if self.timed else torch.zeros_like(batch.sigma[:1])
        angles = sigma[:, None] * self.waves
        cond = self.noise_mlp(torch.cat([angles.cos(), angles.sin()], dim=1))
        owners = None
        if self.timed:
            numbers = torch.arange(len(sigma), dtype=batch.owner.dtype, device=x.device)
            owners = (batch.owner[:, None] == numbers).to(self.dtype)
        turns = self.turns.index_select(0, batch.positions)[:, None, None]

        for block in self.blocks:
            inputs = (x, cond, owners, turns, batch.starts, batch.lengths)
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, *inputs, use_reentrant=False)
            else:
                x = block(*inputs)

        x = x.index_select(0, batch.hidden)  # the other tokens are of no further use
        if self.timed:
            owners = owners.index_select(0, batch.hidden)
        shift, scale = self.adapt(cond).chunk(2, dim=1)
        return add_scaled(spread(shift, owners), 1 + scale, owners, self.norm(x))


# --------------------------------------------------------------------------------------------------
# Loss


def share_of_loss(logits, batch):
    """What this micro-batch adds to the bound in nats per residue of the global batch.

    The weight of a hidden residue is 1 / time (Sahoo et al. 2024, eq. 10): few are hidden at early
    times, so they count more. Each share is divided by the residues of the whole global batch, not
    of the micro-batch, since a mean of such means is not the mean. The shares are summed: over
    micro-batches by backward(), over ranks by DDP, which takes their mean, times the number of
    ranks (see `train`)."""
    nats = F.cross_entropy(logits, batch.targets, reduction="none")
    return (nats * batch.weights).sum() / batch.count


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

RATES = [0.15, 0.5, 0.85]  # shares of hidden residues at which the cross entropy is reported
GOLDEN = 0.6180339887498949


def held_out_batch(proteins, rows, draw, shares):
    """Sequences of the validation part, of which a share of the residues, rounded up, is hidden.
    The noise is that of (row, draw) alone. The weight of a hidden residue is the number of residues
    over that of hidden ones. If all shares are equally likely, the weighted cross entropy is an
    unbiased estimate of a bound on -log p, that of an order-agnostic model (Uria et al. 2014;
    Hoogeboom et al. 2022)."""
    places = [np.random.default_rng(row).random() for row in rows]
    sequences, residues = proteins.crops(rows, np.array(places))
    hidden = np.ceil(shares * residues).astype(int)
    hide = []
    for row, tokens, number in zip(rows, sequences, hidden, strict=True):
        order = np.random.default_rng([row, draw]).permutation(np.flatnonzero(is_residue(tokens)))
        hide.append(np.isin(np.arange(len(tokens)), order[:number]))
    return make_batch(sequences, hide, hidden / residues, residues / hidden, 1)


@torch.no_grad()
def measure(args, device, model, proteins, meta, guard):
    """Metrics of the held-out sequences, None if the ranks agreed to stop. Batch k goes to rank
    k % world_size: the result is the same on any number of ranks. (all ranks)"""
    number = min(len(proteins), args.eval_sequences)
    rows = np.linspace(0, len(proteins) - 1, number).astype(np.int64)
    rows = rows[np.argsort(proteins.lengths(rows), kind="stable")]  # equal work on all ranks
    letters = np.array(meta["letters"]) + 0.5
    surprise = torch.from_numpy(-np.log(letters / letters.sum())).to(device)
    draws = args.eval_draws + len(RATES)
    # of each sequence: residues, nats by the residues' shares, nats by the model in each draw
    table = torch.zeros(number, 2 + draws, dtype=torch.float64, device=device)

    def add(part, column, batch, values):
        """Sum up the values of hidden residues, for each sequence."""
        owner = batch.owner.index_select(0, batch.hidden)
        table[part, column].index_add_(0, owner, values.double())

    for first in range(0, number, args.eval_batch_size * dist.get_world_size()):
        if guard.agree():  # here and not once at the end: an evaluation may take long
            return None
        start = first + args.eval_batch_size * dist.get_rank()
        part = slice(start, start + args.eval_batch_size)
        mine = rows[part]
        if len(mine) == 0:
            continue
        for draw in range(draws):
            # by the golden ratio the shares of a batch are spread evenly, whatever its rows
            shares = 1 - (mine * GOLDEN + draw / args.eval_draws) % 1
            if draw >= args.eval_draws:
                shares = np.full(len(mine), RATES[draw - args.eval_draws])
            batch = held_out_batch(proteins, mine, draw, shares).to(device)
            nats = F.cross_entropy(model(batch), batch.targets, reduction="none")
            add(part, 2 + draw, batch, nats.double() * batch.weights)
        batch = held_out_batch(proteins, mine, 0, np.ones(len(mine))).to(device)
        add(part, 0, batch, batch.weights)  # 1 each, as everything is hidden
        add(part, 1, batch, surprise.index_select(0, batch.targets))
    dist.all_reduce(table)  # each row is zero on all ranks but one
    # by rank 0 for all, who decide by it: another processor might round differently
    return on_rank0(summarize, table.cpu().numpy())


def mean_and_error(nats, residues):
    """Nats per residue of all sequences together, and its standard error over sequences."""
    mean = nats.sum() / residues.sum()
    error = math.sqrt(((nats - mean * residues) ** 2).sum()) / residues.sum()
    return float(mean), float(error)


def summarize(table):
    """Metrics of the table of `measure`."""
    residues = table[:, 0]
    unigram = table[:, 1]
    nats = table[:, 2 : -len(RATES)].mean(1)
    nelbo, error = mean_and_error(nats, residues)
    metrics = {"nelbo": nelbo, "nelbo_se": error, "bits": nelbo / math.log(2)}
    metrics["perplexity"] = float(np.exp(min(nelbo, 700.0)))  # a diverged bound would overflow
    metrics["unigram"] = mean_and_error(unigram, residues)[0]
    gain, error = mean_and_error(unigram - nats, residues)
    metrics.update(below_unigram=gain, below_unigram_se=error)
    for i, rate in enumerate(RATES, start=-len(RATES)):
        hidden = np.ceil(rate * residues)
        metrics[f"ce@{rate}"] = float((table[:, i] / residues * hidden).sum() / hidden.sum())
    return metrics


@contextlib.contextmanager
def averaged_weights(model, average):
    """The model in evaluation mode with the averaged weights."""
    parameters = [p.data for p in model.parameters()]
    kept = [p.clone() for p in parameters]
    torch._foreach_copy_(parameters, average)
    model.eval()
    yield
    torch._foreach_copy_(parameters, kept)
    model.train()


# --------------------------------------------------------------------------------------------------
# Sampling


def draw_lengths(counts, number, seed, most):
    """Lengths in residues as in the training data. counts: {residues: sequences}."""
    values = np.array([int(length) for length in counts])
    shares = np.array([*counts.values()]) / sum(counts.values())
    generator = np.random.default_rng([seed, number])
    return np.minimum(generator.choice(values, number, p=shares), most)


def empty_template(residues):
    """BEGIN, a MASK for each residue that is to be drawn, END."""
    return np.array([BEGIN, *[MASK] * residues, END], np.uint8)


def draw_residues(logits, uniform):
    """Tokens drawn by logits (M, 26) at uniform numbers (M,), both in float64: with 24 bits rare
    residues would be too rare (Zheng et al. 2024)."""
    total = logits.double().softmax(1).cumsum(1)
    kinds = torch.searchsorted(total, uniform[:, None] * total[:, -1:], right=True)[:, 0]
    return FIRST + kinds.clamp(max=KINDS - 1)


@torch.no_grad()
def draw_sequences(predict, templates, numbers, device, method, steps, seed, progress=iter):
    """Fill in the MASKs of templates (BEGIN, residues or MASK, END); a list of token arrays.

    predict(batch): logits (M, 26) of batch.hidden, as Denoiser gives. numbers: of the samples; what
    is drawn for one depends on (seed, its number) alone. steps: network calls; 0: one for each
    residue. progress: a progress bar, as tqdm."""
    nothing = np.zeros(len(templates))
    hide = [np.zeros(len(template), bool) for template in templates]
    batch = make_batch(templates, hide, nothing, nothing, 1)
    free = np.flatnonzero(batch.noisy.numpy() == MASK)
    owner = batch.owner.numpy()[free]
    counts = np.bincount(owner, minlength=len(templates))
    if method == "simple" and steps == 0:
        steps = int(counts.max())

    # uniform numbers, for each residue: when it is drawn, and which one; simple: in each step
    draws = np.zeros((len(free), 2 if method == "rigorous" else 2 * steps))
    for i, number in enumerate(numbers):
        mine = owner == i
        draws[mine] = np.random.default_rng([seed, number]).random(draws[mine].shape)

    draw = draw_rigorously if method == "rigorous" else draw_simply
    found = draw(predict, batch.to(device), free, owner, counts, draws, steps, progress)
    return [tokens.numpy() for tokens in found.cpu().split(batch.lengths)]


def noise_level(shares, device):
    """What the network is shown where these shares are hidden."""
    return torch.from_numpy(-np.log1p(-shares)).float().to(device)


def draw_rigorously(predict, batch, free, owner, counts, draws, steps, progress):
    """Samples of the model. At time 1 all is hidden; backwards in time, a residue that is hidden at
    a share m of hidden ones is still hidden at m' < m with probability m' / m. So each appears at
    a share that is uniform, which is drawn first, and the order of events is known beforehand.

    steps 0: residues appear one by one, each with what the network says at that share (first-
    hitting, Zheng et al. 2024): exact. Else those that fall between two of the shares of a grid
    appear together, each drawn by itself (tau-leaping with Tweedie's rule, Lou et al. 2024)."""
    device = batch.noisy.device
    appears = (1 - ALL_BUT) * draws[:, 0]
    if steps > 0:
        grid = (1 - ALL_BUT) * np.linspace(1, 0, steps + 1)
        step_of = np.searchsorted(-grid[1:-1], -appears)
        shares = np.repeat(grid[:-1, None], len(counts), axis=1)
    else:
        order = np.lexsort((-appears, owner))  # sequence after sequence, in each the largest first
        step_of = np.zeros(len(free), np.int64)
        step_of[order] = np.arange(len(free)) - np.searchsorted(owner, owner)
        shares = np.zeros((counts.max(), len(counts)))
        shares[step_of, owner] = appears

    # everything that the steps need is on the device before they begin: none waits for the host
    order = np.argsort(step_of, kind="stable")
    used, sizes = np.unique(step_of, return_counts=True)
    places = torch.from_numpy(free[order]).to(device).split(sizes.tolist())
    uniform = torch.from_numpy(draws[order, 1]).to(device).split(sizes.tolist())
    sigma = noise_level(shares[used], device)
    x = batch.noisy.clone()
    for k in progress(range(len(used))):
        logits = predict(batch._replace(noisy=x, hidden=places[k], sigma=sigma[k]))
        x.index_copy_(0, places[k], draw_residues(logits, uniform[k]).to(x.dtype))
    return x


def draw_simply(predict, batch, free, owner, counts, draws, steps, progress):
    """Surest first (MaskGIT, Chang et al. 2022): each step draws a residue for every hidden place
    and hides those of the lowest probability again, with some Gumbel noise. Fast, and another law
    than the model's: see tools/sample_uniref50.py."""
    device = batch.noisy.device
    # so many places of each sequence are hidden after step k, with a cosine as in MaskGIT
    left = np.round(np.cos(np.pi / 2 * np.arange(steps + 1) / steps)[:, None] * counts)
    shares = np.minimum(left / np.maximum(1, counts), 1 - ALL_BUT)
    left = left.astype(int).tolist()
    sigma = noise_level(shares, device)
    uniform = torch.from_numpy(draws).to(device)
    free = torch.from_numpy(free).to(device)
    hidden = torch.arange(len(free), device=device)  # which of `free`, sequence after sequence
    x = batch.noisy.clone()
    for k in progress(range(steps)):
        places = free.index_select(0, hidden)
        logits = predict(batch._replace(noisy=x, hidden=places, sigma=sigma[k]))
        which, noise = uniform[:, 2 * k : 2 * k + 2].index_select(0, hidden).unbind(1)
        found = draw_residues(logits, which)
        x.index_copy_(0, places, found.to(x.dtype))

        sure = logits.double().log_softmax(1).gather(1, found[:, None] - FIRST)[:, 0]
        sure -= 4.5 * (1 - (k + 1) / steps) * torch.log(-torch.log(noise))
        again = []
        parts = zip(hidden.split(left[k]), sure.split(left[k]), left[k + 1], strict=True)
        for part, part_sure, number in parts:
            again.append(part[part_sure.argsort()[:number]])
        hidden = torch.cat(again)
        x.index_fill_(0, free.index_select(0, hidden), MASK)
    return x


def letters_of(tokens):
    """The residues among tokens, as text."""
    letters = np.frombuffer(RESIDUES.encode(), np.uint8)
    return letters[tokens[is_residue(tokens)] - FIRST].tobytes().decode()


def write_fasta(path, sequences, names):
    with open(path, "w") as file:
        for name, tokens in zip(names, sequences, strict=True):
            text = letters_of(tokens)
            file.write(f">{name} length={len(text)}\n")
            for start in range(0, len(text), 80):
                file.write(text[start : start + 80] + "\n")


def draw_samples(args, device, model, meta, step):
    """--samples_per_eval samples, drawn by all ranks, in samples/step_N.fasta. (all ranks)"""
    number = args.samples_per_eval
    lengths = draw_lengths(meta["lengths"], number, args.seed, args.max_protein_len - 2)
    samples = torch.zeros(number, args.max_protein_len, dtype=torch.int32, device=device)
    mine = range(dist.get_rank(), number, dist.get_world_size())
    if len(mine) > 0:
        templates = [empty_template(lengths[i]) for i in mine]
        how = (args.sampling_method, args.sampling_steps, args.seed)
        found = draw_sequences(model, templates, mine, device, *how)
        for i, tokens in zip(mine, found, strict=True):
            samples[i, : len(tokens)] = torch.from_numpy(tokens)
    dist.all_reduce(samples)  # each row is zero on all ranks but one

    def write():
        path = Path(args.output_dir) / "samples" / f"step_{step:08d}.fasta"
        names = [f"sample_{i} step={step} method={args.sampling_method}" for i in range(number)]
        try:
            path.parent.mkdir(exist_ok=True)
            write_fasta(path, samples.cpu().numpy(), names)
        except OSError as error:  # a full disk, most likely, which may get better
            logging.warning(f"no {path}: {error}")

    on_rank0(write)


# --------------------------------------------------------------------------------------------------
# Train


LAST_RATE = 0.01  # of the peak: where the cosine ends, as in the original


def gpu_factor(args, world_size):
    """What learning rate and warm-up are multiplied by (linear: Goyal et al. 2017; conservative:
    linear up to 6). Where the batch does not grow with the GPUs, 1."""
    if args.global_batch_size or args.lr_scaling == "none":
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


def lr_factor(step, steps, warmup):
    """What the peak rate is multiplied by: a straight rise from above 0, then half a cosine."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, steps - warmup)
    return LAST_RATE + (1 - LAST_RATE) * (0.5 + 0.5 * math.cos(math.pi * done))


def make_optimizer(args, model):
    # Weight decay pulls towards zero. That helps matrices; a bias or a norm's scale needs its size.
    embedding = model.embed.weight
    decay = [p for p in model.parameters() if p.ndim > 1 and p is not embedding]
    no_decay = [p for p in model.parameters() if p.ndim < 2 or p is embedding]
    groups = [
        {"params": decay, "weight_decay": args.weight_decay},
        {"params": no_decay, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, args.beta2), fused=True)


class AllRows:
    """np.arange(number), as far as the sampler uses it, without its memory."""

    def __init__(self, number):
        self.number = number

    def __len__(self):
        return self.number

    def __getitem__(self, rows):
        return rows


class StepSampler(GlobalBatchSampler):
    """A new run has batch_size x accum x ranks sequences a step, and keeps them on other ranks.
    Also gives the number of the step, which the noise is drawn from."""

    def __init__(self, args, proteins, state):
        options = argparse.Namespace(**vars(args))
        if not state and not args.global_batch_size:
            options.global_batch_size = args.batch_size * args.accum * dist.get_world_size()
        super().__init__(AllRows(len(proteins)), options, state, cost=proteins)

    def __iter__(self):
        first = self.epoch * self.steps + self.start
        for number, (ids, whole) in enumerate(super().__iter__()):
            yield ids, whole, first + number // self.accumulation


def train(args, device, data, model, state, guard, log):
    """Returns where training stands: its step, its best evaluation, and more. (all ranks)"""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    proteins, held_out, meta, data_hash = data
    sampler = StepSampler(args, proteins, state)
    steps = min(args.epochs * sampler.steps, args.n_iters)
    # Even without workers this keeps a GPU busy, since nothing in a step waits for the GPU. While
    # it computes a step the host prepares the next batch and queues its copy, which does not wait
    # either: the memory is pinned. If preparing takes longer than computing (data_wait is high),
    # give --num_workers.
    loader = DataLoader(
        NoisySequences(args, proteins),
        batch_size=None,  # our sampler makes whole batches
        sampler=sampler,
        num_workers=args.num_workers,
        persistent_workers=args.num_workers > 0,
        pin_memory=device.type != "cpu",
        worker_init_fn=ignore_signals,
    )

    optimizer = make_optimizer(args, model)
    scaler = torch.amp.GradScaler(device.type, enabled=model.dtype == torch.float16)
    # Compiled block by block, not as a whole: DDP then still sends the gradients of one block while
    # those of the next are computed. One program serves all blocks and all numbers of tokens.
    if args.compile:
        for block in model.blocks:
            block.compile(dynamic=True)
    ddp_model = wrap_ddp(model, argparse.Namespace(**{**vars(args), "compile": False}), device)
    parameters = [p.data for p in model.parameters()]
    average = [p.clone() for p in parameters]  # exponential moving average
    generator = default_generator(device)
    # all that the loop must know to go on: it is saved with the weights
    loop = {
        "step": 0,
        "validated": 0,  # the step of the last evaluation
        "best": None,
        "metrics": None,  # of the best
        "global_batch": sampler.global_batch,
        "gpu_factor": gpu_factor(args, world_size),
    }
    if state:
        restore(state, model, optimizer, scaler)
        torch._foreach_copy_(average, [tensor.to(device) for tensor in state["average"]])
        loop = {name: state[name] for name in loop}
        if loop["step"] >= steps and loop["validated"] == loop["step"]:
            logging.info("nothing is left to train; the options are those of then")
            log.args = argparse.Namespace(**state["args"])
    warmup = warmup_steps(args, loop["gpu_factor"], steps)
    peak = args.lr * loop["gpu_factor"]
    logging.info(f"  {steps:,} steps, {sampler.steps:,} an epoch; peak learning rate {peak:g}")

    def save(name):
        content = {"script": SCRIPT, "format": FORMAT, "data_hash": data_hash, "args": vars(args)}
        content.update(loop, wandb_id=log.wandb_id, log_size=log.size())
        content["lengths"] = meta["lengths"]  # for tools/sample_uniref50.py
        content["model"] = model.state_dict()
        content["average"] = average
        content["optimizer"] = optimizer.state_dict()
        content["scaler"] = scaler.state_dict()
        on_rank0(save_checkpoint, Path(args.output_dir), name, content)

    logging.info("Starting distributed training...")
    bar = tqdm(total=steps, initial=loop["step"], disable=rank > 0 or not sys.stderr.isatty())
    batches = None
    began = time.monotonic()
    since = loop["step"]
    data_wait = 0.0
    residues = 0
    sums = torch.zeros(3, device=device)  # loss, gradient norm, steps; without skipped steps
    while not guard.reason:
        step = loop["step"]
        epoch, position = divmod(step, sampler.steps)

        # Once in a while, and at the end: validate and draw samples. A run that was stopped before
        # its evaluation makes it now; so does one that goes on with fewer --n_iters.
        is_due = step >= steps or (step > 0 and step % args.eval_freq == 0)
        if is_due and loop["validated"] < step:
            paused = time.monotonic()
            with averaged_weights(model, average):
                metrics = measure(args, device, model, held_out, meta, guard)
                if metrics is None:  # the ranks stop: this step's checkpoint was made before
                    break
                row = {f"val/{name}": value for name, value in metrics.items()}
                log.write({"step": step, "epoch": epoch, **row})
                if not math.isfinite(metrics["nelbo"]):
                    text = f"the held-out bound of step {step} is {metrics['nelbo']}"
                    raise RunError(f"{text}: lower --lr, and start with --fresh")
                if args.samples_per_eval > 0:
                    draw_samples(args, device, model, meta, step)
            loop["validated"] = step
            if loop["best"] is None or metrics["nelbo"] < loop["best"]["value"]:
                loop["best"] = {"metric": "nelbo", "value": metrics["nelbo"], "better": "lower"}
                loop["best"]["step"] = step
                loop["metrics"] = metrics
                logging.info(f"Saving checkpoint for model at step {step}")
                save("best.pt")
            if step >= steps:
                save("latest.pt")  # the same command, given again, then knows that all is done
            began += time.monotonic() - paused
        if step >= steps:
            break

        if position == 0 or batches is None:
            logging.info(f"Starting training epoch {epoch}")
            sampler.set_epoch(epoch, start=position)
            batches = iter(loader)

        # Dropout depends on (seed, step, rank) alone. A run that is resumed, or killed and started
        # again, draws the same, and there is no random state to be saved. (The factors keep
        # steps below 1,000,003 and ranks below 4,099 apart.)
        generator.manual_seed((args.seed * 1_000_003 + step) * 4099 + rank)
        lr = peak * lr_factor(step, steps, warmup)
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
                loss = share_of_loss(ddp_model(batch), batch)
                scaler.scale(loss * world_size).backward()  # DDP takes the mean, we want the sum
            step_loss += loss.detach()
        residues += batch.count  # of all ranks

        # update, unless the gradient is not finite; then the step counts in no mean, either
        norm = guard.update(optimizer, scaler)
        decay = min(args.ema, (1 + step) / (10 + step))  # early weights are soon forgotten
        torch._foreach_lerp_(average, parameters, 1 - decay)
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
            row["residues_per_s"] = residues / seconds
            row["data_wait"] = data_wait / seconds
            log.write(row)
            began = time.monotonic()
            since = step
            data_wait = 0.0
            residues = 0
            sums.zero_()

        # save; also before an evaluation, which may be long and may be interrupted (all ranks)
        reason = guard.agree()
        is_due = step % args.eval_freq == 0 or step == steps
        if reason or is_due or step % args.save_every == 0:
            save("latest.pt")
    bar.close()
    return loop


# --------------------------------------------------------------------------------------------------
# Main


def refuse_changes(args, state):
    """What a run that goes on must have kept: another value would change its steps, the meaning of
    its weights or of its best.pt, and nothing else would notice."""
    kept = "accum lr_scaling n_heads max_protein_len time_conditioning eval_sequences eval_draws"
    for name in kept.split():
        if state["args"].get(name) != getattr(args, name):
            text = f"this run was started with {state['args'].get(name)}"
            raise InputError(f"--{name} {getattr(args, name)}: {text}; --fresh starts anew")


def report(loop):
    """The last word: the best bound beside that of the residues' shares."""
    metrics = loop["metrics"]
    bound = f"{metrics['nelbo']:.4f} ± {metrics['nelbo_se']:.4f}"
    gain = f"{metrics['below_unigram']:+.4f} ± {metrics['below_unigram_se']:.4f}"
    logging.info(f"best at step {loop['best']['step']}: held-out bound {bound} nats per residue")
    logging.info(f"  by the residues' shares: {metrics['unigram']:.4f}; gain {gain}")
    if metrics["below_unigram"] <= 0:
        logging.warning("the network is no better than the residues' shares: train longer")
    return {"baselines": {"unigram": metrics["unigram"]}, "val": metrics}


def main(args):
    if args.prepare_only:
        logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
        read_meta(find_data(args))
        return 0
    device = setup_ddp(args)
    if device.type != "cpu":
        module = torch.get_device_module(device)
        module.set_per_process_memory_fraction(args.max_memory_per_gpu, device)
    data = load_data(args)
    state = open_run(args, data[-1])
    if state:
        refuse_changes(args, state)
    torch.manual_seed(args.seed)  # the same weights on all ranks
    model = Denoiser(args, choose_precision(args, device)).to(device)
    logging.info(f"{sum(p.numel() for p in model.parameters()):,} parameters")

    guard = StepGuard(args, device)
    log = RunLog(args, state)
    loop = train(args, device, data, model, state, guard, log)
    summary = {"status": f"stopped by {guard.reason}" if guard.reason else "finished"}
    if not guard.reason:
        summary.update(report(loop))
    log.close(**summary, steps=loop["step"], best=loop["best"])
    if not guard.reason:
        logging.info("Training and evaluation completed successfully!")
    return exit_status(guard.reason)


if __name__ == "__main__":
    launch(parse_args, main)
