"""run_train_uniref50_ddp.py beside the program it replaced, and a port of the original's step.

    python benchmarks/bench_uniref50.py [--rounds 3] [--steps 4] [--config small|default]

All sides: a model of the same width, depth and heads, the same sequences, processes and threads,
16 sequences x 4 micro-batches per process. Times are of whole optimizer steps, counted in real
residues per second over all processes. The first steps are left out; the rounds alternate.

Our steps and those of the program replaced (commit e7785a5) are made of the same number of
sequences on average; there all those of a step had one length, ours are a random sample.

The port does what the original did. Rows of 512 int64 tokens, padded, the first 510 residues of a
sequence. Attention in a Python loop over the sequences: start and end by `.item()`, scores in
memory, softmax in fp32, no mask. Score entropy by boolean indexing, averaged over all 512
positions. AdamW not fused, the averaged weights tensor by tensor, DDP without no_sync, so gradients
are exchanged in each of the 4 micro-batches, and the loss is read in each of them. On a GPU bf16
autocast with a GradScaler, as there; on a CPU fp32. Left out, to the port's advantage: its loader
(the rows are ready in memory), its progress bar, failed imports in each layer.

Lengths: drawn from a log-normal law whose mean is 286, that of UniRef50; or --lengths FILE.fasta.
Padding: share of the tokens computed that are padding.
"""

import argparse
import gc
import gzip
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import sides
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

CONFIGS = {  # width, blocks, heads, width of the condition
    "small": (128, 4, 4, 64),
    "default": (768, 8, 12, 256),
}
LETTERS = "ACDEFGHIKLMNPQRSTVWY"  # ids 5 to 24 in this order
PAD = 1
MASK = 36
VOCAB = 37
LENGTH = 512
SIGMA_MIN = 1e-4
SIGMA_MAX = 0.8


# ---- The port: model, loss and step --------------------------------------------------------------


class PortNorm(nn.Module):
    """LayerNorm without bias, in fp32 whatever autocast says, its weight by a product."""

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.dim = dim

    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            x = F.layer_norm(x.float(), [self.dim])
        return x * self.weight


class PortRotary(nn.Module):
    """cos and sin [1, length, 3, 1, head]: rotation for q and k, 1 and 0 for v."""

    def __init__(self, head):
        super().__init__()
        self.register_buffer("inv_freq", 10000.0 ** (-torch.arange(0, head, 2).float() / head))
        self.length = 0

    def forward(self, x):
        if x.shape[1] != self.length:
            self.length = x.shape[1]
            angle = torch.outer(torch.arange(self.length, device=x.device).float(), self.inv_freq)
            angle = torch.cat([angle, angle], -1)[None, :, None, None].repeat(1, 1, 3, 1, 1)
            self.cos = angle.cos()
            self.sin = angle.sin()
            self.cos[:, :, 2] = 1.0
            self.sin[:, :, 2] = 0.0
        return self.cos, self.sin


def port_attention(qkv):
    """[batch, length, 3, heads, head] -> [batch, length, heads * head], one by one."""
    batch, length, _, heads, head = qkv.shape
    flat = qkv.reshape(batch * length, 3, heads, head)
    ends = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=qkv.device)
    outputs = []
    for i in range(batch):
        rows = flat[ends[i].item() : ends[i + 1].item()]
        q, k, v = (rows[:, j].transpose(0, 1) for j in range(3))  # [heads, length, head]
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(head)
        weights = scores.float().softmax(-1).to(v.dtype)
        outputs.append(torch.matmul(weights, v).transpose(0, 1).reshape(length, heads * head))
    return torch.cat(outputs).view(batch, length, heads * head)


class PortBlock(nn.Module):
    def __init__(self, dim, heads, cond):
        super().__init__()
        self.heads = heads
        self.norm1 = PortNorm(dim)
        self.norm2 = PortNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.ada = nn.Linear(cond, 6 * dim)
        nn.init.zeros_(self.ada.weight)
        nn.init.zeros_(self.ada.bias)

    def forward(self, x, c, cos, sin):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.ada(c)[:, None].chunk(6, -1)
        qkv = self.qkv(self.norm1(x) * (1 + scale1) + shift1)
        qkv = qkv.view(*x.shape[:2], 3, self.heads, -1)
        left, right = qkv.chunk(2, -1)
        qkv = qkv * cos.to(qkv.dtype) + torch.cat([-right, left], -1) * sin.to(qkv.dtype)
        x = x + gate1 * F.dropout(self.out(port_attention(qkv)), 0.1, self.training)
        y = self.mlp(self.norm2(x) * (1 + scale2) + shift2)
        return x + gate2 * F.dropout(y, 0.1, self.training)


class PortModel(nn.Module):
    """Tokens [batch, 512] and sigma [batch] -> log-scores [batch, 512, 37]."""

    def __init__(self, dim, blocks, heads, cond):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, dim)
        self.rotary = PortRotary(dim // heads)
        self.time = nn.Sequential(nn.Linear(cond, cond), nn.SiLU(), nn.Linear(cond, cond))
        self.blocks = nn.ModuleList(PortBlock(dim, heads, cond) for _ in range(blocks))
        self.norm = PortNorm(dim)
        self.ada = nn.Linear(cond, 2 * dim)
        self.head = nn.Linear(dim, VOCAB, bias=False)
        nn.init.zeros_(self.ada.weight)
        nn.init.zeros_(self.ada.bias)

    def forward(self, tokens, sigma):
        half = self.time[0].in_features // 2
        waves = torch.arange(half, device=sigma.device) * (-math.log(10000) / half)
        angle = sigma[:, None] * torch.exp(waves)
        c = self.time(torch.cat([angle.cos(), angle.sin()], -1))
        x = self.embedding(tokens)
        with torch.autocast("cuda", torch.bfloat16, enabled=x.is_cuda):
            cos, sin = self.rotary(x)
            for block in self.blocks:
                x = block(x, c, cos, sin)
            shift, scale = self.ada(c)[:, None].chunk(2, -1)
            logits = self.head(self.norm(x) * (1 + scale) + shift)
        expm1 = torch.where(sigma < 0.5, torch.expm1(sigma), sigma.exp() - 1)
        return logits - expm1.log().to(logits.dtype)[:, None, None] - math.log(MASK)


def port_loss(model, clean):
    """Mean over all positions, padding too, of the weighted score entropy of [batch, 512]."""
    t = torch.rand(len(clean), device=clean.device) * (1 - 1e-3) + 1e-3
    sigma = SIGMA_MIN + (SIGMA_MAX - SIGMA_MIN) * (1 - torch.cos(math.pi * t)) / 2
    dsigma = math.pi / 2 * (SIGMA_MAX - SIGMA_MIN) * torch.sin(math.pi * t)
    hide = torch.rand(clean.shape, device=clean.device) < 1 - (-sigma)[:, None].exp()
    noisy = torch.where(hide, MASK, clean)
    score = model(noisy, sigma)
    masked = noisy == MASK
    ratio = (1 / torch.expm1(sigma))[:, None].expand_as(noisy)[masked]
    negative = ratio * torch.gather(score[masked], -1, clean[masked][:, None]).squeeze(-1)
    positive = score[masked][:, :-1].exp().sum(-1)
    entropy = torch.zeros(clean.shape, device=clean.device)
    entropy[masked] += (positive - negative + ratio * (ratio.log() - 1)).float()
    return (dsigma[:, None] * entropy).mean()


class PortEMA:
    """A copy of the weights, updated tensor by tensor."""

    def __init__(self, model, decay):
        self.parameters = list(model.parameters())
        self.decay = decay
        self.updates = 0
        self.shadow = [p.detach().clone() for p in self.parameters]

    @torch.no_grad()
    def update(self):
        self.updates += 1
        rest = 1 - min(self.decay, (1 + self.updates) / (10 + self.updates))
        for shadow, parameter in zip(self.shadow, self.parameters, strict=True):
            shadow.sub_(rest * (shadow - parameter))


class PortTrainer:
    def __init__(self, args, model, device):
        self.raw = model.to(device).train()
        self.accum = args.accum
        self.model = self.raw
        if dist.get_world_size() > 1:
            self.model = nn.parallel.DistributedDataParallel(self.raw)
        self.optimizer = torch.optim.AdamW(self.raw.parameters(), lr=5e-5, weight_decay=0.01)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: 0.1 + 0.9 * step / 5000
        )
        self.scaler = torch.amp.GradScaler("cuda", enabled=device.type == "cuda")
        self.ema = PortEMA(self.raw, 0.9995)

    def step(self, batches):
        """An optimizer step of [batch, 512] micro-batches; their mean loss."""
        total = 0.0
        for batch in batches:
            with torch.autocast("cuda", enabled=batch.is_cuda):
                loss = port_loss(self.model, batch) / self.accum
            self.scaler.scale(loss).backward()
            total += loss.item()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.raw.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.ema.update()
        self.optimizer.zero_grad()
        return total


# ---- Data ----------------------------------------------------------------------------------------


def read_fasta(path):
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt") as file:
        records = file.read().split(">")[1:]
    return ["".join(record.split("\n")[1:]).replace(" ", "").upper() for record in records]


def draw_sequences(count, seed):
    """Random residues, log-normal lengths: the mean of UniRef50, 286, median about 208."""
    generator = np.random.default_rng(seed)
    lengths = np.exp(generator.normal(0, 0.8, count))
    lengths = np.maximum(20, np.round(lengths * 286 / lengths.mean())).astype(int)
    residues = np.frombuffer(LETTERS.encode(), np.uint8)
    return [generator.choice(residues, length).tobytes().decode() for length in lengths]


def port_rows(sequences):
    """Rows [512] of int64 ids; letters that the vocabulary lacks vanish, as in the original."""
    ids = {letter: 5 + number for number, letter in enumerate(LETTERS)}
    rows = []
    for sequence in sequences:
        row = torch.full((LENGTH,), PAD, dtype=torch.int64)
        known = [ids[letter] for letter in sequence[: LENGTH - 2] if letter in ids]
        row[: len(known)] = torch.tensor(known)
        rows.append(row)
    return rows


# ---- The sides, under torchrun -------------------------------------------------------------------


def clock(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic()


def port(args):
    """The port's steps; rank 0 writes the figures to args.result. (every rank runs this)"""
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(42)
    trainer = PortTrainer(args, PortModel(*CONFIGS[args.config]), device)
    rows = port_rows(read_fasta(args.work / "sequences.fasta"))
    random.Random(42).shuffle(rows)
    rows = rows[rank::world_size]
    torch.manual_seed(42 + rank)
    sums = torch.zeros(2, dtype=torch.float64)  # residues, tokens
    seconds = 0.0
    place = 0
    for step in range(args.warm + args.steps):
        batches = []
        for _ in range(args.accum):
            picked = [rows[(place + i) % len(rows)] for i in range(args.batch)]
            batches.append(torch.stack(picked).to(device))
            place += args.batch
        begin = clock(device)
        loss = trainer.step(batches)
        if step >= args.warm:
            seconds += clock(device) - begin
            sums[0] += sum(int((batch != PAD).sum()) for batch in batches)
            sums[1] += sum(batch.numel() for batch in batches)
    if not math.isfinite(loss):
        sys.exit(f"the port's loss is {loss}")
    sums = sums.to(device)
    dist.all_reduce(sums)
    residues, tokens = sums.tolist()
    if rank == 0:
        found = {"residues/s": residues / seconds, "padding": 1 - residues / tokens}
        args.result.write_text(json.dumps(found))
    del trainer
    gc.collect()  # with gloo the group must outlive DDP's reducer
    dist.destroy_process_group()


def run(args, work, name, command, folder):
    shutil.rmtree(work / name, ignore_errors=True)  # a run found there would be resumed
    sides.torchrun(args.nproc, args.threads, command, work / f"{name}.log", folder)


def original(args, work):
    result = work / "port.json"
    command = [str(Path(__file__).resolve()), "--role=port", f"--work={work}", f"--result={result}"]
    for option in ("config", "device", "batch", "accum", "steps", "warm"):
        command.append(f"--{option}={getattr(args, option)}")
    run(args, work, "port", command, work)
    return json.loads(result.read_text())


def options_of(args, work, name):
    """Those that both forms of the script know."""
    width, blocks, heads, cond = CONFIGS[args.config]
    return f"""--output_dir={work}/{name} --hidden_size={width} --n_blocks_prot={blocks}
        --n_heads={heads} --cond_dim={cond} --dropout=0.1 --max_protein_len={LENGTH}
        --accum={args.accum} --n_iters={args.warm + args.steps} --wandb_mode=disabled
        --device={args.device} --eval_sequences=2 --eval_draws=1""".split()


def steady(work, name, key, args):
    """(harmonic mean of a rate over the steps after the first ones, their rows)"""
    lines = (work / name / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    rows = [row for row in rows if key in row][args.warm :]
    return statistics.harmonic_mean([row[key] for row in rows]), rows


def ours(args, work):
    options = options_of(args, work, "ours")
    options += [f"--datafile={work}/data", f"--batch_size={args.batch}", "--log_every=1"]
    options.append("--samples_per_eval=0")
    run(args, work, "ours", ["run_train_uniref50_ddp.py", *options], sides.ROOT)
    rate, _ = steady(work, "ours", "residues_per_s", args)
    return {"residues/s": rate, "padding": 0.0}


def replaced(args, work):
    options = options_of(args, work, "replaced")
    # its batch is in rows of 512 tokens, each for 512 / mean length sequences
    rows = max(1, round(args.batch * args.mean_tokens / LENGTH))
    options += [f"--datafile={work}/data-replaced", f"--batch_size={rows}", "--log_freq=1"]
    options.append("--snapshot_sampling=False")
    run(args, work, "replaced", ["run_train_uniref50_ddp.py", *options], work / "worktree")
    rate, rows = steady(work, "replaced", "tokens/s", args)
    return {"residues/s": rate, "padding": statistics.mean(row["padding"] for row in rows)}


# ---- The table -----------------------------------------------------------------------------------

SIDES = {
    "run_train_uniref50_ddp.py": ours,
    sides.REPLACED: replaced,
    "port of the original": original,
}


def prepare(args, work):
    """Sequences, as each side reads them; their lengths."""
    if args.lengths == "uniref50":
        sequences = draw_sequences(args.sequences, 42)
    else:
        sequences = read_fasta(Path(args.lengths))
    fasta = work / "sequences.fasta"
    records = [f">s{number}\n{sequence}\n" for number, sequence in enumerate(sequences)]
    fasta.write_text("".join(records))
    tool = [sys.executable, "tools/prepare_uniref50.py", fasta, work / "data"]
    subprocess.run(tool, cwd=sides.ROOT, check=True, stdout=subprocess.DEVNULL)
    words = ["run_train_uniref50_ddp.py", "--prepare", fasta, work / "data-replaced"]
    old = [sys.executable, *words]
    subprocess.run(old, cwd=work / "worktree", check=True, stdout=subprocess.DEVNULL)
    return [len(sequence) for sequence in sequences]


def compare(args, work):
    """All sides in alternation; prints the table. Returns the rounds."""
    lengths = prepare(args, work)
    args.mean_tokens = np.minimum(np.array(lengths) + 2, LENGTH).mean()
    found = sides.in_rounds(SIDES, args.rounds, lambda side: SIDES[side](args, work), warm_up=False)
    print(
        f"{args.config} model, {args.nproc} processes x {args.threads} threads on {args.device}, "
        f"{args.batch} x {args.accum} sequences per process and step, {args.steps} steps, "
        f"{args.rounds} rounds\n{len(lengths):,} sequences, mean length "
        f"{statistics.mean(lengths):.0f}, median {statistics.median(lengths):.0f}\n"
    )
    sides.print_head("side", "real residues/s", "ours over theirs", "padding")
    speeds = {}
    for side, runs in found.items():
        speeds[side] = [run["residues/s"] for run in runs]
    mine = speeds["run_train_uniref50_ddp.py"]
    name = f"{args.config} model, lengths of {Path(args.lengths).name}"
    records = []
    for side, theirs in speeds.items():
        rounds = sides.compare(name, side, "real residues/s", mine, theirs)
        padding = statistics.mean(run["padding"] for run in found[side])
        cells = [sides.spread(theirs, 0), sides.spread(sides.ratios(rounds), 2)]
        sides.print_row(side, *cells, f"{padding:.1%}")
        if side != "run_train_uniref50_ddp.py":
            records += rounds
    return records


def main():
    parser = sides.make_parser(__doc__)
    add = parser.add_argument
    add("--rounds", type=int, default=3, help="turns of each side")
    add("--nproc", type=int, default=2, help="processes of all sides")
    add("--threads", type=int, default=1, help="CPU threads per process")
    add("--steps", type=int, default=4, help="optimizer steps that are timed per run")
    add("--warm", type=int, default=1, help="steps before them")
    add("--batch", type=int, default=16, help="sequences per process and micro-batch")
    add("--accum", type=int, default=4, help="micro-batches per optimizer step")
    text = "small: 128 x 4 blocks; default: 768 x 8"
    add("--config", default="small", choices=CONFIGS, help=text)
    add("--lengths", default="uniref50", help="uniref50, or a FASTA file")
    add("--sequences", type=int, default=20_000, help="how many are drawn")
    add("--device", default="cpu", choices=("cpu", "cuda"))
    add("--role", default="compare", choices=("compare", "port"), help=argparse.SUPPRESS)
    add("--work", type=Path, help=argparse.SUPPRESS)
    add("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role == "port":
        port(args)
        return
    with sides.workplace() as work:
        records = compare(args, work)
    sides.write_json(args.json, records)


if __name__ == "__main__":
    main()
