"""Train a language model of proteins on UniRef50 by masked diffusion.

Some residues of a sequence are masked: one, two, or up to all, each number is equally likely. A
transformer that reads in both directions predicts them. Their mean cross entropy, times the number
of residues, is on average a bound on -log p of the sequence, given its length: that of SEDD (Lou
et al. 2024), MDLM (Sahoo et al. 2024) and order-agnostic models (Uria et al. 2014).

    ./run_train_uniref50_ddp.sh --config configs/config_uniref50_quickstart.yaml   # all GPUs
    torchrun --standalone --nproc_per_node=8 run_train_uniref50_ddp.py --datafile uniref50.fasta.gz
    python tools/sample_uniref50.py experiments_ddp/best.pt --out samples.fasta

Data (--datafile): FASTA, a sequence on each line, or an alignment (.a2m .a3m), also packed; or a
table (.csv .jsonl .parquet; .pt: a list saved by torch.save) with a column protein_seq, sequence or
text. Letters: the 20 residues and X B U Z O J, also lower case. Of a sequence that is longer than
--max_protein_len a random part is used. --val_ratio of them are held out by a hash, so that equal
ones are on one side; or give files. What is in those is not trained on, wherever else it stands.

Logged, over all ranks: step, epoch, lr, loss (estimates the bound, in nats per residue), residues
(of a step), grad_norm (before clipping), skipped (steps whose gradient was not finite),
samples_per_s (sequences), data_wait (part of the time), peak_gb (of a GPU). Of averaged weights, on
held-out sequences: val/nelbo (the bound, nats per residue), val/nelbo_se (its standard error),
val/bits and val/perplexity (the same, in bits, and its exp); val/ce_15, ce_50, ce_85: cross entropy
where up to 30 %, 30 to 70 %, more are masked. summary.json has what the residues' frequencies give,
and the same of --test_file. Files in --output_dir: latest.pt, best.pt, step_N.pt, metrics.jsonl; at
the end summary.json, curves.png. The same command, given again, goes on from latest.pt.
"(all ranks)": every rank must call it, in the same order; "(rank 0)": only rank 0 does.
"""

# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch>=2.11,<2.14", "numpy>=2.2,<3", "tqdm>=4.67,<5", "pyyaml>=6.0,<7", "wandb>=0.25,<1",
#     "matplotlib>=3.10,<4", "pandas>=2.2,<4",
# ]
# ///

import argparse
import array
import bz2
import copy
import fcntl
import functools
import gzip
import hashlib
import itertools
import json
import logging
import lzma
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

BATCH_SIZE = 16  # sequences of a micro-batch, if --batch_size is not given


def parse_args():
    parser = Parser(description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False)
    add = parser.add_argument_group("data").add_argument
    add("--datafile", type=expanded, default="./input_data/processed_uniref50.pt", help="see above")
    add("--val_ratio", type=number(0, 1), default=0.005, help="share of sequences that is held out")
    add("--valid_file", type=expanded, help="proteins to validate on, in place of --val_ratio")
    add("--test_file", type=expanded, help="proteins for the test at the end, with best.pt")
    add("--skip_bad_data", **FLAG, help="leave out bad records, and list them")
    add("--max_protein_len", type=number(3, kind=int), default=512, help="residues + 2 at most")

    add = parser.add_argument_group("model").add_argument
    add("--hidden_size", type=COUNT, default=768, help="width")
    add("--n_blocks_prot", type=COUNT, default=8, help="transformer blocks")
    add("--n_heads", type=COUNT, default=12, help="attention heads")
    add("--dropout", type=number(0, 0.999), default=0.1, help="after attention and MLP")
    add("--token_dropout", **FLAG, help="embeddings as released ESM-2 has them")
    add("--start_from", type=expanded, help="weights to begin with: best.pt of another run")

    add = parser.add_argument_group("training").add_argument
    add("--epochs", type=COUNT, default=50, help="passes over the data at most")
    add("--n_iters", type=COUNT, default=500_000, help="optimizer steps at most")
    add("--accum", type=COUNT, default=4, help="micro-batches; not with --global_batch_size")
    add("--optimizer", default="adamw", choices=["adamw", "muon"], help="of the blocks' matrices")
    add("--beta2", type=number(0, 0.999999), default=0.999, help="AdamW's")
    add("--lr", type=number(0), default=5e-5, help="peak learning rate, on one GPU")
    add("--warmup", type=NATURAL, default=5000, help="steps, on one GPU")
    scalings = ["none", "linear", "conservative"]  # x 1, x GPUs, x min(GPUs, 6)
    add("--lr_scaling", default="linear", choices=scalings, help="of lr and warmup by the GPUs")
    add("--weight_decay", type=number(0), default=0.01, help="of matrices; biases and norms: 0")
    add("--ema", type=number(0, 1), default=0.9995, help="decay of the averaged weights")
    add("--gradient_checkpointing", **FLAG, help="compute activations twice")
    add("--max_memory_per_gpu", type=number(0, 1), default=1.0, help="share that a rank may take")

    add = parser.add_argument_group("evaluation").add_argument
    add("--eval_freq", type=COUNT, default=2000, help="steps between evaluations")
    add("--eval_sequences", type=number(2, kind=int), default=2000, help="held-out ones at most")
    add("--eval_draws", type=COUNT, default=2, help="draws of the noise for each of them")
    add("--eval_batch_size", type=COUNT, default=16, help="sequences per forward pass")
    add("--sampling_method", default="rigorous", choices=["rigorous", "simple"], help="of samples")

    add = parser.add_argument_group("names of the original").add_argument
    absent = argparse.SUPPRESS  # no default: that of the option itself holds
    add("--work_dir", dest="output_dir", type=expanded, default=absent, help="as --output_dir")
    add("--log_freq", dest="log_every", type=COUNT, default=absent, help="as --log_every")
    add("--wandb_project", help="as the environment variable WANDB_PROJECT")
    add("--wandb_name", help="as the environment variable WANDB_NAME")

    add_common_arguments(parser, output_dir="./experiments_ddp")
    parser.set_defaults(log_every=100, save_every=2000)
    args = parse_with_config(parser)
    if args.hidden_size % (8 * args.n_heads) != 0 or args.hidden_size > 256 * args.n_heads:
        text = f"flash attention needs {args.n_heads} x 8, 16, ... or 256"
        parser.error(f"--hidden_size {args.hidden_size}: {text}")
    for name in ("wandb_project", "wandb_name"):
        if getattr(args, name):
            os.environ[name.upper()] = getattr(args, name)
    return args


# --------------------------------------------------------------------------------------------------
# Data

RESIDUES = "ACDEFGHIKLMNPQRSTVWYXBUZOJ"  # tokens 0 to 25; the last six: unknown or rare
NUM_RESIDUES = len(RESIDUES)
BEGIN, END, MASK = range(26, 29)
VOCAB = 32  # tokens 29 to 31 are free: so the matrices fit a GPU's tiles
TRAIN, VALID, TEST = range(3)  # parts of the data
RATES, MASKS, EVALUATION = range(1, 4)  # random streams: the last number of a seed (0 is ignored)


class Batch(NamedTuple):
    """B sequences of different lengths, not padded but laid one after the other: T tokens."""

    noisy: torch.Tensor  # (T,) uint8, MASK where a residue is masked
    targets: torch.Tensor  # (T,) int64, the masked residue; -100 elsewhere: cross_entropy skips it
    loss_weights: torch.Tensor  # (T,) float32, where masked: residues / masked ones; else 0
    positions: torch.Tensor  # (T,) int32, of a token in its sequence
    starts: torch.Tensor  # (B + 1,) int32, where each sequence starts, and where the last one ends
    lengths: array.array  # (B,), in tokens; of a list --compile would make a program for each
    step_residues: int  # of the whole global batch: the loss is divided by it

    def to(self, device):
        return Batch(*[tensor.to(device, non_blocking=True) for tensor in self[:5]], *self[5:])


def make_batch(sequences, mask_rates, generators, step_residues):
    """Of the residues of each sequence a share is masked, rounded up; its generator says which."""
    lengths = [len(tokens) for tokens in sequences]
    starts = np.cumsum([0, *lengths], dtype=np.int32)
    clean = np.concatenate(sequences)
    positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    loss_weights = np.zeros(len(clean), np.float32)
    for i, tokens in enumerate(sequences):
        residues = starts[i] + np.flatnonzero(tokens < NUM_RESIDUES)
        count = math.ceil(mask_rates[i] * len(residues))
        masked = generators[i].permutation(residues)[:count]
        loss_weights[masked] = len(residues) / max(1, count)
    noisy = np.where(loss_weights > 0, np.uint8(MASK), clean)
    targets = np.where(loss_weights > 0, clean.astype(np.int64), -100)
    tensors = map(torch.from_numpy, (noisy, targets, loss_weights, positions, starts))
    return Batch(*tensors, array.array("i", lengths), int(step_residues))


def draw_mask_rates(count, generator):
    """Rates above 0, up to 1; uniform, but spread evenly: less noise (Kingma et al. 2021)."""
    return 1 - (generator.permutation(count) + generator.random()) / count


class Proteins:
    """What `prepare` has written, mapped into memory that the ranks of a machine share."""

    def __init__(self, folder, args):
        self.tokens = np.asarray(np.memmap(folder / "tokens", np.uint8, "r"))  # each: BEGIN ... END
        arrays = np.load(folder / "arrays.npz")
        self.offsets = arrays["offsets"]  # of each sequence, and the end
        self.train, self.valid, self.test = [np.flatnonzero(arrays["parts"] == p) for p in range(3)]
        self.residue_counts = arrays["residue_counts"]  # (3, 26), of each part
        self.hash = str(arrays["hash"])
        number = min(len(self.valid), args.eval_sequences)
        self.eval_rows = self.valid[np.linspace(0, len(self.valid) - 1, number).astype(int)]
        text = f"{len(self.valid):,} held out, of which {number:,} are validated on"
        logging.info(f"  {len(self.train):,} sequences to train on, {text}")
        residues = np.diff(self.offsets).astype(np.int32) - 2
        self.lengths = np.minimum(residues, args.max_protein_len - 2)  # what is used of each
        longer = np.count_nonzero(residues > self.lengths)
        logging.info(f"  of {longer:,}, longer than --max_protein_len, a part is used each time")
        for text in arrays["left_out"]:
            logging.warning(text)

    def facts(self):
        """Of the training part: how often residues occur, and lengths of sequences used whole."""
        whole = self.train[np.diff(self.offsets)[self.train] - 2 == self.lengths[self.train]]
        lengths, counts = np.unique(self.lengths[whole], return_counts=True)
        lengths = dict(zip(lengths.tolist(), counts.tolist(), strict=True))
        return {"residue_counts": self.residue_counts[TRAIN].tolist(), "lengths": lengths}

    def unigram_nats(self, part):
        """What the frequencies of residues in the training part give: nats per residue."""
        counts = self.residue_counts[TRAIN] + 0.5  # a residue that it lacks costs much
        found = self.residue_counts[part]
        return float(-found @ np.log(counts / counts.sum()) / found.sum())

    def crop(self, row, generator):
        """lengths[row] residues [a, b), a at random; with BEGIN if a is 0, END if b is the end."""
        tokens = self.tokens[self.offsets[row] : self.offsets[row + 1]]
        residues = len(tokens) - 2
        a = generator.integers(residues - self.lengths[row] + 1)
        b = a + self.lengths[row]
        return tokens[a + (a > 0) : b + 1 + (b == residues)]  # residue i is token i + 1


class NoisyProteins(Dataset):
    """Micro-batches. Crops and masks depend on seed, step, and position in the global batch."""

    def __init__(self, args, proteins):
        self.proteins = proteins
        self.seed = args.seed

    def __getitem__(self, item):
        step, global_ids, positions_in_batch = item  # of the sampler
        seed = [self.seed, step]
        rates = draw_mask_rates(len(global_ids), np.random.default_rng([*seed, RATES]))
        generators = [np.random.default_rng([*seed, i, MASKS]) for i in positions_in_batch]
        sequences = list(map(self.proteins.crop, global_ids[positions_in_batch], generators))
        step_residues = self.proteins.lengths[global_ids].sum()
        return make_batch(sequences, rates[positions_in_batch], generators, step_residues)


# --------------------------------------------------------------------------------------------------
# Model


class Block(nn.Module):
    """A transformer block: attention and MLP, each after a norm and beside a residual."""

    def __init__(self, args):
        super().__init__()
        width = args.hidden_size
        self.heads = args.n_heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, x, cos, sin, batch):
        """x (T, D); cos, sin (T, 1, 1, E): -> (T, D)"""
        q_k, v = self.qkv(self.norm1(x)).unflatten(1, (3, self.heads, -1)).split([2, 1], 1)
        q, k = rotate(q_k, cos, sin).unbind(1)
        heads = attend(q, k, v.squeeze(1), batch)  # (T, heads, E)
        x = x + self.dropout(self.out(heads.flatten(1)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


def rotate(x, cos, sin):
    """Rotary embedding (Su et al. 2021): channels i and i + E / 2 of x (T, 2, heads, E) rotate."""
    others = x.float().roll(x.shape[-1] // 2, -1)  # of i: i + E / 2, where sin is negative
    return torch.addcmul(x.float() * cos, others, sin).to(x.dtype)


@torch.compiler.disable  # the lengths are new in every step, and each would be a new program
def attend(q, k, v, batch):
    """Attention within each sequence. q, k, v and the result are (T, heads, E)."""
    if q.device.type == "cuda" and q.dtype != torch.float32:
        from torch.nn.attention.varlen import varlen_attn

        longest = max(batch.lengths)
        return varlen_attn(q, k, v, batch.starts, batch.starts, longest, longest)
    # elsewhere one sequence after the other: no work is done for padding, and no mask is needed
    outputs = []
    for parts in zip(*[x.split(batch.lengths.tolist()) for x in (q, k, v)], strict=True):
        q_k_v = [part.transpose(0, 1)[None] for part in parts]  # (1, heads, n, E)
        outputs.append(F.scaled_dot_product_attention(*q_k_v)[0].transpose(0, 1))
    return torch.cat(outputs)


class Denoiser(nn.Module):
    """The network of ESM-2 (Lin et al. 2023), without padding. Like MDLM's it is told no time."""

    def __init__(self, args):
        super().__init__()
        width = args.hidden_size
        self.recompute = args.gradient_checkpointing
        self.token_dropout = args.token_dropout
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList([Block(args) for _ in range(args.n_blocks_prot)])
        self.norm = nn.LayerNorm(width)
        self.dense = nn.Linear(width, width)  # the head: its last matrix is that of the embeddings
        self.dense_norm = nn.LayerNorm(width)
        self.head_bias = nn.Parameter(torch.zeros(VOCAB))
        nn.init.zeros_(self.dense_norm.weight)  # at first all residues are equally likely

    def forward(self, batch):
        """Logits (T, 26) of the residues, in fp32."""
        x = self.dense_norm(F.gelu(self.dense(self.hidden(batch))))
        return F.linear(x, self.embed.weight, self.head_bias)[:, :NUM_RESIDUES].float()

    def hidden(self, batch, blocks=None):
        """The hidden states (T, D) after so many blocks; by default of all, and normalized."""
        x = self.embed(batch.noisy.int())
        if self.token_dropout:  # none for a masked token, and larger ones the more are masked
            is_mask = batch.noisy == MASK
            lengths = batch.starts.diff()
            visible = F.pad((~is_mask).cumsum(0), (1, 0))[batch.starts].diff()  # of each sequence
            factors = 0.88 * lengths / visible.clamp(min=1)  # 0.88: ESM-2 saw so many, on average
            factors = factors.repeat_interleave(lengths, output_size=len(x)).to(x.dtype)  # (T,)
            x = x.masked_fill(is_mask[:, None], 0.0) * factors[:, None]

        pairs = x.shape[1] // self.blocks[0].heads // 2  # of channels, in a head
        frequencies = 1e4 ** (-torch.arange(pairs, device=x.device) / pairs)
        angles = (batch.positions[:, None] * torch.cat([-frequencies, frequencies]))[:, None, None]
        rotation = [angles.cos(), angles.sin()]
        for block in self.blocks[:blocks]:
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, *rotation, batch, use_reentrant=False)
            else:
                x = block(x, *rotation, batch)
        return self.norm(x) if blocks is None else x


# --------------------------------------------------------------------------------------------------
# Loss

LOGGED = ["loss"]


def nats_of(logits, batch):
    """(T,): what each token adds to a bound on -log p; on average MDLM's loss (Ou et al. 2025)."""
    return F.cross_entropy(logits, batch.targets, reduction="none") * batch.loss_weights


def batch_loss(logits, batch):
    """By the residues of the whole global batch: what micro-batches give adds up to the mean."""
    return nats_of(logits, batch).sum() / batch.step_residues


# --------------------------------------------------------------------------------------------------
# Evaluation


@torch.no_grad()
def evaluate(args, model, proteins, rows, autocast, device):
    """Metrics of --eval_draws draws for each sequence, which are the same each time. (all ranks)"""
    lengths = proteins.lengths[rows]
    generator = np.random.default_rng([0, 1, 0, EVALUATION])
    rates = draw_mask_rates(len(rows) * args.eval_draws, generator).reshape(-1, len(rows))
    nats = torch.zeros(rates.size, dtype=torch.float64)  # item i: a draw for row i % len(rows)

    # batches are of similar length; batch k goes to rank k % world_size: each item counts once
    order = np.tile(lengths, args.eval_draws).argsort(kind="stable")
    batches = np.array_split(order, math.ceil(len(order) / args.eval_batch_size))
    for items in batches[dist.get_rank() :: dist.get_world_size()]:
        generators = [np.random.default_rng([0, 0, item, EVALUATION]) for item in items]
        sequences = list(map(proteins.crop, rows[items % len(rows)], generators))
        batch = make_batch(sequences, rates.flat[items], generators, 1).to(device)
        with autocast():
            token_nats = nats_of(model(batch), batch)
        sums = [part.sum() for part in token_nats.split(batch.lengths.tolist())]
        nats[items] = torch.stack(sums).double().cpu()
    dist.all_reduce(nats)  # each item is 0 on all ranks but one

    # one rank computes what all decide by: on another processor the last bit may differ
    return on_rank0(summarize, nats.view(rates.shape).numpy(), rates, lengths)


def summarize(nats, mask_rates, lengths):
    """Metrics of all sequences together: nats (draws, sequences) by residues, lengths.sum()."""
    bound = nats.mean(0)
    nelbo = bound.sum() / lengths.sum()
    error = math.sqrt(((bound - nelbo * lengths) ** 2).sum() * len(lengths) / (len(lengths) - 1))
    metrics = {"nelbo": nelbo, "nelbo_se": error / lengths.sum()}  # of a ratio of two means
    metrics["perplexity"] = np.exp(min(nelbo, 700.0))  # a diverged bound would overflow
    metrics["bits"] = nelbo / math.log(2)
    # the cross entropy by mask rate: the mean of the three, each by its residues, is the bound
    mask_rates = np.ceil(mask_rates * lengths) / lengths  # what was masked
    for name, low, high in [("ce_15", 0, 0.3), ("ce_50", 0.3, 0.7), ("ce_85", 0.7, 1)]:
        inside = (low < mask_rates) & (mask_rates <= high)
        if inside.any():
            metrics[name] = nats[inside].sum() / (inside * lengths).sum()
    return {name: float(value) for name, value in metrics.items()}


# --------------------------------------------------------------------------------------------------
# Train


def lr_factor(args, step, steps):
    """Of the peak rate: a straight rise from above 0, then half a cosine, which ends at 1 %."""
    warmup_steps = min(args.warmup * args.gpu_factor, steps // 2)
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    done = (step - warmup_steps) / max(1, steps - warmup_steps)
    return 0.01 + 0.99 * (0.5 + 0.5 * math.cos(math.pi * done))


def gpu_factor(args, world_size):
    """Of learning rate (Goyal et al. 2017) and warm-up: 1 if the batch does not grow with GPUs."""
    most = {"none": 1, "linear": math.inf, "conservative": 6}[args.lr_scaling]
    return 1 if args.global_batch_size > 0 else min(world_size, most)


def make_optimizer(args, model, autocast):
    """AdamW; with --optimizer muon, Muon for the matrices of the blocks."""
    names = ["qkv", "out", "up", "down"] if args.optimizer == "muon" else []
    stacks = [[getattr(block, name).weight for block in model.blocks] for name in names]
    in_muon = {p for stack in stacks for p in stack}
    matrices = [p for p in model.parameters() if p.ndim > 1 and p not in in_muon]
    vectors = [p for p in model.parameters() if p.ndim < 2]  # biases and norms need their size
    groups = [{"params": stack, "muon": True} for stack in stacks]
    groups += [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = Muon(groups, args.lr, (0.9, args.beta2), weight_decay=args.weight_decay, fused=True)
    optimizer.autocast = autocast
    return optimizer


class Muon(torch.optim.AdamW):
    """AdamW; but Muon (Jordan et al. 2024) for groups with `muon`, of matrices of one shape: a step
    is their momentum with all singular values near 1, as large as AdamW's (Liu et al. 2025)."""

    @torch.no_grad()
    def step(self):
        is_good = 1 - self.found_inf  # 0: nothing changes, and the host need not know
        for group in self.param_groups:
            if "muon" not in group:
                continue
            params = group["params"]
            grads = torch.stack([p.grad for p in params]).where(is_good > 0, 0.0)
            state = self.state[params[0]]  # of the whole group
            if not state:  # AdamW looks for a step when it is loaded
                state.update(step=torch.zeros(()), momentum=torch.zeros_like(grads))
            momentum = state["momentum"].lerp_(grads, 0.05 * is_good)
            with self.autocast():
                update = orthogonalize(grads.lerp(momentum, 0.95)).float()
            lr = group["lr"] * is_good
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
            torch._foreach_sub_(params, list(0.2 * math.sqrt(max(params[0].shape)) * lr * update))
            for p in params:
                p.grad = None  # AdamW leaves it alone
        super().step()


def orthogonalize(x):
    """Matrices x (n, a, b), their singular values moved to about 1 by Newton-Schulz steps."""
    if x.shape[1] > x.shape[2]:
        return orthogonalize(x.mT).mT
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * (gram @ gram)) @ x
    return x


def train(args, device, proteins, model, autocast, state, log):
    """Returns why it was stopped, "" if it has ended; and `loop`: where it stands. (all ranks)"""
    # a token takes about 28 fp32 numbers for a unit of a block, or 1 where only its input is kept
    numbers = 28 + args.n_blocks_prot if args.gradient_checkpointing else 28 * args.n_blocks_prot
    room = args.max_memory_per_gpu * room_on_gpu(model, device) / (4 * numbers * args.hidden_size)
    sampler = GlobalBatchSampler(proteins.train, args, proteins.lengths, room)
    steps = min(sampler.steps * args.epochs, args.n_iters)
    logging.info(f"  {steps:,} steps, {sampler.steps:,} an epoch; lr, warmup x {args.gpu_factor}")
    optimizer = make_optimizer(args, model, autocast)
    ema_model = copy.deepcopy(model).eval()  # exponential moving average of the weights
    ema_params = list(ema_model.parameters())
    params = list(model.parameters())
    loop = {"step": 0, "best": {}}
    if state:
        loop = state["loop"]
        model.load_state_dict(state["model"])
        ema_model.load_state_dict(state["ema_model"])
        optimizer.load_state_dict(state["optimizer"])
        state.clear()  # each rank has a copy: free it
    ddp_model = wrap_ddp(model, args, device)
    world_size = dist.get_world_size()
    contents = {"model": model, "ema_model": ema_model, "data": proteins.facts()}
    save = functools.partial(save_checkpoint, args=args, log=log, loop=loop, **contents)
    sampler.start = loop["step"]
    batches = make_loader(NoisyProteins(args, proteins), sampler, args, device)

    logging.info("Starting distributed training...")
    bar = tqdm(total=steps, initial=loop["step"], disable=None if dist.get_rank() == 0 else True)
    meter = Meter(LOGGED, args, device)
    reason = ""
    while loop["step"] < steps and not reason:
        step = loop["step"]
        epoch, position = divmod(step, sampler.steps)
        if position == 0:
            logging.info(f"Starting training epoch {epoch}")
        seed_step(args, step)
        lr = args.lr * args.gpu_factor * lr_factor(args, step, steps)
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
        ema_decay = min(args.ema, (1 + step) / (10 + step))  # early weights are soon forgotten
        with torch.no_grad():
            torch._foreach_lerp_(ema_params, params, 1 - ema_decay)
        meter.add(metrics, norm)
        loop["step"] += 1
        bar.update()

        # log, and agree whether to stop
        must_evaluate = loop["step"] % args.eval_freq == 0 or loop["step"] == steps
        must_save = loop["step"] % args.save_every == 0 or must_evaluate
        log_row = {"step": loop["step"], "epoch": epoch, "lr": lr, "residues": batch.step_residues}
        reason = meter.log_and_agree(log, log_row, sampler.global_batch, must_save)

        # evaluate: all ranks get the same metrics, and so agree on what is best
        if must_evaluate:
            val_metrics = evaluate(args, ema_model, proteins, proteins.eval_rows, autocast, device)
            if not math.isfinite(val_metrics["nelbo"]):
                raise RuntimeError(f"the validation nelbo is {val_metrics['nelbo']}: a lower --lr?")
            val_row = {f"val/{name}": value for name, value in val_metrics.items()}
            log.write({"step": loop["step"], "epoch": epoch, **val_row})
            if not loop["best"] or val_metrics["nelbo"] < loop["best"]["value"]:
                logging.info(f"Saving checkpoint for model at step {loop['step']}")
                best = {"metric": "nelbo", "value": val_metrics["nelbo"], "step": loop["step"]}
                loop["best"] = {**best, "val": val_metrics}
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
    factor = gpu_factor(args, dist.get_world_size())  # open_run changes args.global_batch_size
    free_on_resume = """datafile valid_file test_file skip_bad_data epochs n_iters accum eval_freq
        eval_batch_size gradient_checkpointing max_memory_per_gpu sampling_method wandb_project
        wandb_name""".split()
    state = open_run(args, free_on_resume)
    args.gpu_factor = state["args"]["gpu_factor"] if state else factor  # a resumed run keeps it
    if (args.wandb_project or args.wandb_name) and args.wandb_mode == "disabled":
        logging.warning("nothing is sent to wandb without --wandb_mode online or offline")
    if device.type != "cpu":
        torch.get_device_module(device).set_per_process_memory_fraction(args.max_memory_per_gpu)
    args.start_hash = state["args"]["start_hash"] if state else None
    weights = None
    if args.start_from and not state:
        weights, args.start_hash = on_rank0(read_weights, args)
    logging.info("Preparing data loaders...")
    proteins = Proteins(read_once(prepare, args), args)
    if args.prepare_only:
        logging.info(f"The data are read: {args.cache_dir}")
        return 0

    begin_run(args, state, proteins.hash)
    torch.manual_seed(args.seed)  # the same weights on all ranks
    model = Denoiser(args).to(device)
    if weights:
        model.load_state_dict(weights)
    del weights  # each rank has a copy
    logging.info(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    autocast = choose_precision(args, device)
    log = RunLog(args, state)
    with logging_redirect_tqdm():
        reason, loop = train(args, device, proteins, model, autocast, state, log)
    figures = {"steps": loop["step"], "best": loop["best"]}
    if reason:
        return log.stop(reason, **figures)
    if not loop["best"]:
        raise InputError(f"--n_iters {args.n_iters}: the run ends without an evaluation: give more")
    figures["baselines"] = {"unigram": proteins.unigram_nats(VALID)}
    best = {**loop["best"], **figures["baselines"]}
    logging.info("best at step {step}: nelbo {value:.4f}, unigram {unigram:.4f}".format(**best))
    for stop in STOP_SIGNALS:  # all is saved: from here on they end the process
        signal.signal(stop, signal.SIG_DFL)
    if len(proteins.test) > 0:
        state = on_rank0(torch.load, f"{args.output_dir}/best.pt", "cpu")
        model.load_state_dict(state["ema_model"])
        figures["test"] = evaluate(args, model.eval(), proteins, proteins.test, autocast, device)
        figures["baselines"]["test_unigram"] = proteins.unigram_nats(TEST)
        logging.info(f"test of {len(proteins.test):,}: nelbo {figures['test']['nelbo']:.4f}")
    log.close("finished", **figures)
    logging.info("Training and evaluation completed successfully!")
    return 0


# --------------------------------------------------------------------------------------------------
# Reading

SIZES = ["hidden_size", "n_blocks_prot", "n_heads", "token_dropout"]  # of a network
READER = 9  # raise it when you change what is read or kept: else an old cache is used
LETTERS = (RESIDUES + RESIDUES.lower()).encode()
TOKENS = bytes.maketrans(LETTERS, 2 * bytes(range(NUM_RESIDUES)))
TO_LETTERS = bytes.maketrans(bytes(range(NUM_RESIDUES)), RESIDUES.encode())
OPENERS = {b"\x1f\x8b\x08": gzip.open, b"BZh": bz2.open, b"\xfd7z": lzma.open}  # by how files begin
TABLES = (".pt", ".parquet", ".jsonl", ".csv")
COLUMNS = ["protein_seq", "sequence", "text"]  # of which the first one that is there is read
EXPECTED = "expected FASTA, alignments .a2m .a3m, a sequence a line, or .csv .jsonl .parquet .pt"
NUCLEOTIDES = bytes(RESIDUES.index(letter) for letter in "ACGTUN")  # letters of DNA and RNA
BAD = "bad records are left out"
NUCLEIC = "records of A C G T U N alone are left out as DNA or RNA"
SHARED = "sequences are left out, which are in the test or the validation, too"


def read_weights(args):
    """The averaged weights of the checkpoint --start_from, and their hash. (rank 0)"""
    try:
        state = torch.load(args.start_from, map_location="cpu", weights_only=True)
        weights = state["ema_model"]
        sizes = {name: state["args"][name] for name in SIZES}
    except Exception as error:  # there is no such file, or it holds something else
        text = f"expected best.pt or step_N.pt of {SCRIPT}, or a file of tools/esm_uniref50.py"
        raise InputError(f"--start_from {args.start_from}: {text} ({error!r})") from None
    if sizes != {name: getattr(args, name) for name in SIZES}:
        options = " ".join(f"--{name}={value}" for name, value in sizes.items())
        raise InputError(f"--start_from {args.start_from}: its network needs {options}")
    content = b"".join(tensor.float().numpy().tobytes() for tensor in weights.values())
    return weights, hashlib.blake2b(content, digest_size=6).hexdigest()


def read_records(path):
    """Yields (where it stands in the file, sequence) of each record."""
    name = path.name.removesuffix(".gz").removesuffix(".bz2").removesuffix(".xz")
    try:
        yield from read_table(path, name) if name.endswith(TABLES) else read_text(path)
    except InputError:
        raise
    except Exception as error:  # of gzip, torch, pandas; some have many lines
        raise InputError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None


def read_text(path):
    """Of FASTA, which begins with >, or of a file with a sequence on each line."""
    opener = OPENERS.get(np.fromfile(path, np.uint8, 3).tobytes(), open)
    gaps = str.maketrans("", "", "-." if ".a2m" in path.name or ".a3m" in path.name else "")
    # titles may have letters of any encoding: what is not UTF-8 is replaced
    with opener(path, "rt", encoding="utf-8-sig", errors="replace") as file:
        where = ""  # where the record begins
        lines = None  # of the record, if this is FASTA
        for number, line in enumerate(file, 1):
            if line.startswith(">"):
                if lines is not None:
                    yield where, "".join(lines)
                elif where:
                    raise InputError(f"{path}: line {number}: found >; expected it from line 1 on")
                where = f"line {number} {line.split()[0]}"
                lines = []
            elif lines is not None:
                lines.append("".join(line.split()).translate(gaps))
            elif line.strip():
                where = f"line {number}"
                yield where, line
        if lines is not None:
            yield where, "".join(lines)


def read_table(path, name):
    """Of a column of COLUMNS; a .pt file has a list of dicts with such a key, or of texts."""
    import pandas

    names = []
    if name.endswith(".pt"):
        entries = torch.load(path, weights_only=True)
    elif name.endswith(".csv"):
        entries = pandas.read_csv(path, dtype=str, keep_default_na=False)
    elif name.endswith(".jsonl"):
        entries = pandas.read_json(path, lines=True, dtype=False)
    else:
        entries = pandas.read_parquet(path)
    if isinstance(entries, pandas.DataFrame):
        columns = [column for column in COLUMNS if column in entries]
        if not columns:
            text = f"found the columns {', '.join(map(str, entries))}"
            raise InputError(f"{path}: {text}; expected {', '.join(COLUMNS)}")
        names = [*entries.get("name", entries.get("id", []))]
        entries = entries[columns[0]].tolist()
    elif isinstance(entries, dict):
        entries = entries.get("sequences", entries.get("data"))
    if not isinstance(entries, (list, tuple)):
        raise InputError(f"{path}: expected a list, or a dict with one as sequences or data")
    for number, entry in enumerate(entries):
        if isinstance(entry, dict):
            entry = next((entry[column] for column in COLUMNS if column in entry), "")
        where = f"entry {number} >{names[number]}" if names else f"entry {number}"
        yield where, "".join(entry.split()) if isinstance(entry, str) else ""


def encode(sequence):
    """(tokens as bytes, "") of the letters of a sequence; or (b"", what is wrong with them)."""
    letters = sequence.strip().encode().removesuffix(b"*")  # some files mark the end so
    wrong = letters.translate(None, LETTERS)
    if wrong:
        return b"", f"{wrong[:12].decode(errors='backslashreplace')!r} among the residues"
    return letters.translate(TOKENS), "" if letters else "no residues"


def is_held_out(tokens, val_ratio):
    """By the sequence alone: equal ones are on one side, in any file and on any seed."""
    digest = hashlib.blake2b(tokens.translate(TO_LETTERS), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64 < val_ratio


def read_proteins(args, left_out):
    """Yields (part, tokens as bytes) of all files; appends to left_out where others stand."""
    held = {}  # {a sequence of --test_file or --valid_file: its part}
    for part, path in [(TEST, args.test_file), (VALID, args.valid_file), (TRAIN, args.datafile)]:
        records = [] if path is None else read_records(Path(path))
        for where, sequence in tqdm(records, unit=" records", disable=None, leave=False):
            where = f"{Path(path).name}: {where}"
            tokens, problem = encode(sequence)
            if problem:
                left_out[BAD].append(f"{where}: {problem}")
            elif len(tokens) > 20 and not tokens.translate(None, NUCLEOTIDES):
                left_out[NUCLEIC].append(where)
            elif held.get(tokens, part) != part:
                left_out[SHARED].append(where)
            elif part != TRAIN:
                held[tokens] = part
                yield part, tokens
            elif args.valid_file is None and is_held_out(tokens, args.val_ratio):
                yield VALID, tokens
            else:
                yield TRAIN, tokens


def write_tokens(args, folder):
    """Read the files, and write the arrays of `Proteins`. (rank 0)"""
    offsets = array.array("q", [0])
    parts = array.array("b")
    residue_counts = np.zeros((3, NUM_RESIDUES), np.int64)
    digest = hashlib.blake2b(digest_size=6)
    left_out = {BAD: [], NUCLEIC: [], SHARED: []}  # where they stand
    with open(folder / "tokens", "wb") as file:
        for part, tokens in read_proteins(args, left_out):
            parts.append(part)
            residue_counts[part] += np.bincount(bytearray(tokens), minlength=NUM_RESIDUES)
            tokens = b"%c%b%c" % (BEGIN, tokens, END)
            file.write(tokens)
            if part != TEST:
                digest.update(b"%c%b" % (part, tokens))
            offsets.append(offsets[-1] + len(tokens))

    bad = left_out[BAD]
    if bad and not args.skip_bad_data:
        text = f"{len(bad):,} bad records ({EXPECTED}; --skip_bad_data leaves them out), such as:"
        raise InputError("\n  ".join([text, *bad[:20]]))
    if bad:
        logging.warning("\n  ".join([f"{len(bad):,} {BAD}, such as:", *bad[:20]]))
    rare = residue_counts[:, 20:].sum() / max(1, residue_counts.sum())
    nucleic = len(left_out[NUCLEIC])
    if rare > 0.02 or nucleic > len(parts):  # of UniProt's annotated proteins they are 0.005 %
        text = f"{rare:.0%} of the letters are X B U Z O J, {nucleic} records DNA or RNA"
        raise InputError(f"{args.datafile}: expected proteins; {text}")
    train, valid, test = [parts.count(part) for part in (TRAIN, VALID, TEST)]
    if train == 0 or valid < 2 or (args.test_file and test < 2):
        text = f"{args.datafile}: {train} to train on, {valid} held out, {test} to test"
        raise InputError(f"{text}, {len(left_out[SHARED])} in two files; expected more proteins")
    arrays = {"offsets": offsets, "parts": parts, "residue_counts": residue_counts}
    texts = [f"{len(own):,} {what}, such as {own[0]}" for what, own in left_out.items() if own]
    np.savez(folder / "arrays.npz", **arrays, hash=digest.hexdigest(), left_out=texts)


def prepare(args):
    """The folder with the tokens of the files, read once, and kept. (rank 0)"""
    key = [READER, args.val_ratio, args.skip_bad_data]
    for option in ("datafile", "valid_file", "test_file"):
        path = getattr(args, option)
        if path is not None and not Path(path).is_file():
            url = "ftp.uniprot.org/pub/databases/uniprot/uniref/uniref50/uniref50.fasta.gz"
            found = "is a folder" if Path(path).is_dir() else f"there is no such file; see {url}"
            raise InputError(f"--{option} {path}: {found}")
        stat = path and Path(path).stat()
        key.append(path and [str(Path(path).resolve()), stat.st_size, stat.st_mtime_ns])
    return cached(args.cache_dir, "uniref50", key, functools.partial(write_tokens, args))


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
