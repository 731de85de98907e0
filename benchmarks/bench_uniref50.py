"""run_train_uniref50_ddp.py beside a port of the step of the program that its document describes.

    python benchmarks/bench_uniref50.py [--rounds 3] [--steps 4] [--config small|default] [-- options of the script]

Both sides: a model of the same width, depth and heads, the same sequences, processes and threads, 16 sequences x 4
accumulation steps per process. Times are of whole optimizer steps, counted in real residues (no padding, no BOS or
EOS) per second over all processes. The first steps are left out; the rounds alternate.

The port does what that program did. Rows of 512 int64 tokens, right-padded, no BOS or EOS, the first 510 residues of
a sequence. Attention in a Python loop over the sequences: start and end by `.item()`, scores [heads, 512, 512] in
memory, softmax in fp32, no padding mask. Score entropy by boolean indexing, averaged over all 512 positions. AdamW
with its defaults (not fused), the EMA tensor by tensor, DDP without no_sync, so gradients are exchanged in each of
the 4 micro-steps, and the loss is read by `.item()` in each of them. On a GPU bf16 autocast with a GradScaler, as
there; on a CPU fp32. Left out, to the port's advantage: its loader (the rows are ready in memory), its progress bar,
failed imports in each layer. The 8-block default model has 66,724,096 parameters, as there.

Lengths (--lengths): `uniref50` draws them from a log-normal law whose mean is 286, the mean of UniRef50, the residues
at random; or a FASTA file, used as it is.

Padding: share of the processed tokens that are padding. MFU: floating-point operations that the real residues need
(forward and backward: 6 x matmul parameters + 12 x blocks x width x length of the sequence, per residue) over the
rate of a large matrix product, which every process measures at the same time as the others just before the steps.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = {  # width, blocks, heads, width of the condition
    "small": (128, 4, 4, 64),
    "default": (768, 8, 12, 256),
}
LETTERS = "ACDEFGHIKLMNPQRSTVWY"  # ids 5 to 24 in this order
PAD, MASK, VOCAB, LENGTH = 1, 36, 37, 512
SIGMA_MIN, SIGMA_MAX = 1e-4, 0.8


# ---- The port: model ----
class PortNorm(nn.Module):
    """LayerNorm without bias, in fp32 whatever autocast says, the weight by a multiplication of its own."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight, self.dim = nn.Parameter(torch.ones(dim)), dim

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            x = F.layer_norm(x.float(), [self.dim])
        return x * self.weight


class PortRotary(nn.Module):
    """cos and sin [1, length, 3, 1, head]: rotation for q and k, 1 and 0 for v."""

    def __init__(self, head: int):
        super().__init__()
        self.register_buffer("inv_freq", 10000.0 ** (-torch.arange(0, head, 2).float() / head))
        self.length = 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if x.shape[1] != self.length:
            self.length = x.shape[1]
            angle = torch.outer(torch.arange(self.length, device=x.device).float(), self.inv_freq)
            angle = torch.cat([angle, angle], -1)[None, :, None, None].repeat(1, 1, 3, 1, 1)
            self.cos, self.sin = angle.cos(), angle.sin()
            self.cos[:, :, 2], self.sin[:, :, 2] = 1.0, 0.0
        return self.cos, self.sin


def port_attention(qkv: Tensor) -> Tensor:
    """[batch, length, 3, heads, head] -> [batch, length, heads * head], one sequence after another."""
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
    def __init__(self, dim: int, heads: int, cond: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = PortNorm(dim), PortNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.ada = nn.Linear(cond, 6 * dim)
        nn.init.zeros_(self.ada.weight)
        nn.init.zeros_(self.ada.bias)

    def forward(self, x: Tensor, c: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
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

    def __init__(self, dim: int, blocks: int, heads: int, cond: int):
        super().__init__()
        self.embedding, self.rotary = nn.Embedding(VOCAB, dim), PortRotary(dim // heads)
        self.time = nn.Sequential(nn.Linear(cond, cond), nn.SiLU(), nn.Linear(cond, cond))
        self.blocks = nn.ModuleList(PortBlock(dim, heads, cond) for _ in range(blocks))
        self.norm, self.ada = PortNorm(dim), nn.Linear(cond, 2 * dim)
        self.head = nn.Linear(dim, VOCAB, bias=False)
        nn.init.zeros_(self.ada.weight)
        nn.init.zeros_(self.ada.bias)

    def forward(self, tokens: Tensor, sigma: Tensor) -> Tensor:
        half = self.time[0].in_features // 2
        angle = sigma[:, None] * torch.exp(torch.arange(half, device=sigma.device) * (-math.log(10000) / half))
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


# ---- The port: loss and step ----
def port_loss(model: nn.Module, clean: Tensor) -> Tensor:
    """Mean over all positions, padding too, of the weighted score entropy of [batch, 512] tokens."""
    t = torch.rand(len(clean), device=clean.device) * (1 - 1e-3) + 1e-3
    sigma = SIGMA_MIN + (SIGMA_MAX - SIGMA_MIN) * (1 - torch.cos(math.pi * t)) / 2
    dsigma = math.pi / 2 * (SIGMA_MAX - SIGMA_MIN) * torch.sin(math.pi * t)
    noisy = torch.where(torch.rand(clean.shape, device=clean.device) < 1 - (-sigma)[:, None].exp(), MASK, clean)
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

    def __init__(self, model: nn.Module, decay: float):
        self.parameters, self.decay, self.updates = list(model.parameters()), decay, 0
        self.shadow = [p.detach().clone() for p in self.parameters]

    @torch.no_grad()
    def update(self) -> None:
        self.updates += 1
        rest = 1 - min(self.decay, (1 + self.updates) / (10 + self.updates))
        for shadow, parameter in zip(self.shadow, self.parameters, strict=True):
            shadow.sub_(rest * (shadow - parameter))


class PortTrainer:
    def __init__(self, args: argparse.Namespace, model: nn.Module, device: torch.device):
        self.raw, self.accum = model.to(device).train(), args.accum
        self.model = self.raw
        if dist.get_world_size() > 1:
            self.model = nn.parallel.DistributedDataParallel(self.raw)
        self.optimizer = torch.optim.AdamW(self.raw.parameters(), lr=5e-5, weight_decay=0.01)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.1 + 0.9 * step / 5000)
        self.scaler, self.ema = torch.amp.GradScaler("cuda", enabled=device.type == "cuda"), PortEMA(self.raw, 0.9995)

    def step(self, batches: list[Tensor]) -> float:
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


def load_weights(model: nn.Module, file: Path) -> int:
    """Weights of the other side's checkpoint where names and order aside a shape is the same; how many numbers."""
    left = list(torch.load(file, map_location="cpu", weights_only=True)["model"].values())
    copied = 0
    for parameter in model.parameters():
        place = next((i for i, tensor in enumerate(left) if tensor.shape == parameter.shape), None)
        if place is not None:
            parameter.data.copy_(left.pop(place))
            copied += parameter.numel()
    return copied


# ---- Data ----
def read_fasta(path: Path) -> list[str]:
    """The sequences of a FASTA file, upper-case."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else open(path) as file:
        records = file.read().split(">")[1:]
    return ["".join(record.split("\n")[1:]).replace(" ", "").upper() for record in records]


def draw_sequences(count: int, seed: int) -> list[str]:
    """Random residues, log-normal lengths: UniRef50's mean of 286, median about 208, 20 at least."""
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.normal(0, 0.8, count))
    lengths = np.maximum(20, np.round(lengths * 286 / lengths.mean())).astype(int)
    residues = np.frombuffer(LETTERS.encode(), np.uint8)
    return [rng.choice(residues, n).tobytes().decode() for n in lengths]


def port_rows(sequences: list[str]) -> list[Tensor]:
    """Rows [512] of int64 ids: the first 510 residues, padding; letters that the vocabulary lacks vanish."""
    ids = {letter: 5 + i for i, letter in enumerate(LETTERS)}
    rows = []
    for sequence in sequences:
        row = torch.full((LENGTH,), PAD, dtype=torch.int64)
        known = [ids[letter] for letter in sequence[: LENGTH - 2] if letter in ids]
        row[: len(known)] = torch.tensor(known)
        rows.append(row)
    return rows


# ---- Figures ----
def flops_per_residue(shape: tuple[int, ...], lengths: list[int]) -> float:
    """Forward and backward, mean over the residues of the (cropped) sequences."""
    dim, blocks, _, _ = shape
    cropped = np.minimum(lengths, LENGTH - 2).astype(float)
    mean = (cropped**2).sum() / cropped.sum()  # length of the sequence of a residue
    return 6 * (12 * blocks * dim**2 + VOCAB * dim) + 12 * blocks * dim * mean


def matmul_rate(device: torch.device) -> float:
    """Floating-point operations per second of this process: the best of some large products."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a, b, best = torch.randn(size, size, device=device).to(dtype), torch.randn(size, size, device=device).to(dtype), 0.0
    dist.barrier()
    for _ in range(12):
        begin = clock(device)
        a @ b
        best = max(best, 2 * size**3 / (clock(device) - begin))
    return best


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic()


# ---- Both sides under torchrun ----
def torchrun(args: argparse.Namespace, command: list[str], log: Path) -> None:
    env = os.environ | {"OMP_NUM_THREADS": str(args.threads)}
    with open(log, "w") as file:
        call = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={args.nproc}"]
        job = subprocess.Popen([*call, *command], env=env, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT)
        try:
            status = job.wait()
        finally:  # where this program is ended, its processes end too
            job.terminate()
            job.wait()
    if status:
        sys.exit(f"exit status {status}: see {log}\n" + "\n".join(log.read_text().splitlines()[-15:]))


def port(args: argparse.Namespace) -> None:
    """The port's steps; rank 0 writes the figures to args.result. (every rank runs this)"""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        result = port_steps(args, rank, world, device)
        if rank == 0:
            args.result.write_text(json.dumps(result))
    finally:
        gc.collect()  # with gloo the group must outlive DDP's reducer
        dist.destroy_process_group()


def port_steps(args: argparse.Namespace, rank: int, world: int, device: torch.device) -> dict[str, float]:
    torch.manual_seed(42)
    model = PortModel(*CONFIGS[args.config])
    copied = load_weights(model, args.weights) if args.weights else 0
    trainer = PortTrainer(args, model, device)
    rows = port_rows(read_fasta(args.work / "sequences.fasta"))
    random.Random(42).shuffle(rows)
    rows = rows[rank::world]
    torch.manual_seed(42 + rank)
    peak = torch.tensor(matmul_rate(device), dtype=torch.float64, device=device)
    dist.all_reduce(peak)
    sums, seconds, place = torch.zeros(2, dtype=torch.float64), 0.0, 0  # residues, tokens
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
            sums += torch.tensor([sum(int((b != PAD).sum()) for b in batches), sum(b.numel() for b in batches)])
    if not math.isfinite(loss):
        sys.exit(f"the port's loss is {loss}")
    sums = sums.to(device)
    dist.all_reduce(sums)
    residues, tokens = sums.tolist()
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "residues/s": residues / seconds, "padding": 1 - residues / tokens, "peak": peak.item(), "loss": loss,
        "parameters": parameters, "copied": copied,
    }  # fmt: skip


def theirs(args: argparse.Namespace, work: Path, name: str, weights: Path | None) -> dict[str, float]:
    result = work / f"{name}.json"
    numbers = {n: getattr(args, n) for n in ("config", "device", "batch", "accum", "steps", "warm")}
    command = [str(Path(__file__).resolve()), "--role=port", f"--work={work}", f"--result={result}"]
    command += [f"--{n}={v}" for n, v in numbers.items()] + ([f"--weights={weights}"] if weights else [])
    torchrun(args, command, work / f"{name}.log")
    return json.loads(result.read_text())


def ours(args: argparse.Namespace, work: Path, name: str, steps: int) -> dict[str, float]:
    """The script as a user starts it; mean figures of the steps after the first ones, from its metrics.jsonl."""
    dim, blocks, heads, cond = CONFIGS[args.config]
    values = {
        "datafile": work / "data", "output_dir": work / name, "hidden_size": dim, "n_blocks_prot": blocks,
        "n_heads": heads, "cond_dim": cond, "dropout": 0.1, "max_protein_len": LENGTH, "batch_size": args.batch,
        "accum": args.accum, "n_iters": steps, "log_freq": 1, "wandb_mode": "disabled", "device": args.device,
        "eval_sequences": 2, "eval_draws": 1, "snapshot_sampling": False,  # of the evaluation after the last step
    }  # fmt: skip
    options = [f"--{n}={v}" for n, v in values.items()]
    torchrun(args, ["run_train_uniref50_ddp.py", *options, *args.options], work / f"{name}.log")
    rows = [json.loads(line) for line in (work / name / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "tokens/s" in row][args.warm :]
    if not rows:
        return {}
    return {
        "residues/s": statistics.harmonic_mean([row["tokens/s"] for row in rows]),
        "padding": statistics.mean(row["padding"] for row in rows),
    }


# ---- The table ----
def spread(values: list[float], digits: int = 0) -> str:
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def rounds_of(work: str, other: str, unit: str, mine: list[float], theirs: list[float], ratios: list[float]) -> list:
    """What --json writes of a comparison, in every benchmark alike: a record for each round."""
    rows = zip(mine, theirs, ratios, strict=True)
    return [{"work": work, "with": other, "unit": unit, "ours": a, "other": b, "ratio": r} for a, b, r in rows]


def compare(args: argparse.Namespace, work: Path) -> list[dict]:
    """Both sides in alternation; prints the table. Returns the rounds."""
    sequences = draw_sequences(args.sequences, 42) if args.lengths == "uniref50" else read_fasta(Path(args.lengths))
    lengths = [len(sequence) for sequence in sequences]
    fasta = work / "sequences.fasta"
    fasta.write_text("".join(f">s{i}\n{sequence}\n" for i, sequence in enumerate(sequences)))
    weights = None
    if not args.port_only:
        prepare = [sys.executable, "run_train_uniref50_ddp.py", "--prepare", str(fasta), str(work / "data")]
        subprocess.run(prepare, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        ours(args, work, "warm", 1)
        weights = work / "warm" / "latest.pt"
    sides: dict[str, list[dict]] = {"run_train_uniref50_ddp.py": [], "port of the original": []}
    for i in range(args.rounds):
        if not args.port_only:
            sides["run_train_uniref50_ddp.py"].append(ours(args, work, f"ours{i}", args.warm + args.steps))
        sides["port of the original"].append(theirs(args, work, f"theirs{i}", weights))
    port = sides["port of the original"]
    print(
        f"{args.config} model, {port[0]['parameters']:,} parameters there ({port[0]['copied']:,} of them equal to ours "
        f"at the start)\n{args.nproc} processes x {args.threads} threads on {args.device}, {args.batch} x {args.accum} "
        f"sequences per process and step, {args.steps} steps, {args.rounds} rounds\n{len(lengths):,} sequences, mean "
        f"length {statistics.mean(lengths):.0f}, median {statistics.median(lengths):.0f}\nmatrix products: "
        f"{spread([r['peak'] / 1e9 for r in port])} GFLOP/s over all processes\n"
    )
    print("| side | real residues/s | padding | MFU |\n|---|---|---|---|")
    need = flops_per_residue(CONFIGS[args.config], lengths)
    for side, rounds in sides.items():
        if rounds:
            mfu = [100 * r["residues/s"] * need / p["peak"] for r, p in zip(rounds, port, strict=True)]
            padding = statistics.mean(r["padding"] for r in rounds)
            print(f"| {side} | {spread([r['residues/s'] for r in rounds])} | {padding:.1%} | {spread(mfu, 1)} % |")
    if args.port_only:
        return []
    mine, other = ([r["residues/s"] for r in rounds] for rounds in sides.values())
    ratios = [a / b for a, b in zip(mine, other, strict=True)]
    print(f"| ratio | {spread(ratios, 2)} | | |")
    name = f"{args.config} model, lengths of {Path(args.lengths).name}"
    return rounds_of(name, "port of the original", "real residues/s", mine, other, ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2, help="processes of both sides")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads per process")
    parser.add_argument("--rounds", type=int, default=3, help="alternating runs of both sides")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps that are timed per run")
    parser.add_argument("--warm", type=int, default=1, help="steps before them")
    parser.add_argument("--batch", type=int, default=16, help="sequences per process and micro-step")
    parser.add_argument("--accum", type=int, default=4, help="micro-steps per optimizer step")
    parser.add_argument("--config", default="small", choices=CONFIGS, help="small: 128 x 4 blocks; default: 768 x 8")
    parser.add_argument("--lengths", default="uniref50", help="uniref50, or a FASTA file")
    parser.add_argument("--sequences", type=int, default=20_000, help="how many are drawn")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--port_only", action="store_true", help="the port alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rounds there")
    parser.add_argument("options", nargs="*", help="after --: more options of run_train_uniref50_ddp.py")
    parser.add_argument("--role", default="compare", choices=("compare", "port"), help=argparse.SUPPRESS)
    for name in ("--work", "--result", "--weights"):
        parser.add_argument(name, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role == "port":
        return port(args)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as work:
        found = compare(args, args.work or Path(work))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
