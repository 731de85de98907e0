"""run_train_uniref50_ddp.py beside a port of the original's step.

    python benchmarks/bench_uniref50.py
    python benchmarks/bench_uniref50.py --rounds 1 --seconds 3 --sequences 400

All sides: a model of the same width, depth and heads, the same sequences, two processes of one
thread each, 16 sequences x 4 micro-batches per process, fp32 on a CPU. Real residues per second of
whole optimizer steps, over all processes: steps by the mean number of residues of a step.

The port does what the original did. Rows of 512 int64 tokens, padded, the first 510 residues of a
sequence. Attention in a Python loop over the sequences: start and end by `.item()`, scores in
memory, softmax in fp32, no mask. Score entropy by boolean indexing, averaged over all 512
positions. AdamW not fused, the averaged weights tensor by tensor, DDP without no_sync, so gradients
are exchanged in each of the 4 micro-batches, and the loss is read in each of them. Left out, to the
port's advantage: its loader (the rows are ready in memory), its progress bar, failed imports in
each layer.

Lengths: drawn from a log-normal law whose mean is 286, that of UniRef50.
Padding: share of the tokens computed that are padding.
"""

import functools
import itertools
import math
import sys
from pathlib import Path

import numpy as np
import sides
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

SCRIPT = "run_train_uniref50_ddp.py"
UNIT = "real residues/s"
NAMES = {"port": "port of the original"}
PROCESSES = 2
BATCH = 16
ACCUMULATION = 4
WIDTH = 128
BLOCKS = 4
HEADS = 4
COND = 64  # width of the condition
LETTERS = "ACDEFGHIKLMNPQRSTVWY"  # ids 5 to 24 in this order
PAD = 1
MASK = 36
VOCAB = 37
LENGTH = 512
SIGMA_MIN = 1e-4
SIGMA_MAX = 0.8
OPTIONS = f"""--hidden_size={WIDTH} --n_blocks_prot={BLOCKS} --n_heads={HEADS} --cond_dim={COND}
    --dropout=0.1 --max_protein_len={LENGTH} --accum={ACCUMULATION} --eval_sequences=2
    --eval_draws=1"""


# ---- The port: model, loss and step --------------------------------------------------------------


def port_rotation():
    """cos and sin [1, length, 3, 1, head]: rotation for q and k, 1 and 0 for v."""
    head = WIDTH // HEADS
    frequencies = 10000.0 ** (-torch.arange(0, head, 2).float() / head)
    angle = torch.outer(torch.arange(LENGTH).float(), frequencies)
    angle = torch.cat([angle, angle], -1)[None, :, None, None].repeat(1, 1, 3, 1, 1)
    cos = angle.cos()
    sin = angle.sin()
    cos[:, :, 2] = 1.0
    sin[:, :, 2] = 0.0
    return cos, sin


def port_attention(qkv):
    """[batch, length, 3, heads, head] -> [batch, length, heads * head], one by one."""
    batch, length, _, heads, head = qkv.shape
    flat = qkv.reshape(batch * length, 3, heads, head)
    ends = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32)
    outputs = []
    for i in range(batch):
        rows = flat[ends[i].item() : ends[i + 1].item()]
        q, k, v = rows.permute(1, 2, 0, 3)  # [heads, length, head]
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(head)
        weights = scores.float().softmax(-1).to(v.dtype)
        outputs.append(torch.matmul(weights, v).transpose(0, 1).reshape(length, heads * head))
    return torch.cat(outputs).view(batch, length, heads * head)


class PortBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH, bias=False)
        self.norm2 = nn.LayerNorm(WIDTH, bias=False)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        wide = 4 * WIDTH
        self.mlp = nn.Sequential(nn.Linear(WIDTH, wide), nn.GELU(), nn.Linear(wide, WIDTH))
        self.ada = nn.Linear(COND, 6 * WIDTH)
        nn.init.zeros_(self.ada.weight)
        nn.init.zeros_(self.ada.bias)

    def forward(self, x, c, cos, sin):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.ada(c)[:, None].chunk(6, -1)
        qkv = self.qkv(self.norm1(x) * (1 + scale1) + shift1)
        qkv = qkv.view(*x.shape[:2], 3, HEADS, -1)
        left, right = qkv.chunk(2, -1)
        qkv = qkv * cos + torch.cat([-right, left], -1) * sin
        x = x + gate1 * F.dropout(self.out(port_attention(qkv)), 0.1, self.training)
        y = self.mlp(self.norm2(x) * (1 + scale2) + shift2)
        return x + gate2 * F.dropout(y, 0.1, self.training)


class PortModel(nn.Module):
    """Tokens [batch, 512] and sigma [batch] -> log-scores [batch, 512, 37]."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.rotation = port_rotation()
        self.time = nn.Sequential(nn.Linear(COND, COND), nn.SiLU(), nn.Linear(COND, COND))
        self.blocks = nn.ModuleList(PortBlock() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.ada = nn.Linear(COND, 2 * WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        nn.init.zeros_(self.ada.weight)
        nn.init.zeros_(self.ada.bias)

    def forward(self, tokens, sigma):
        half = COND // 2
        waves = torch.arange(half) * (-math.log(10000) / half)
        angle = sigma[:, None] * torch.exp(waves)
        c = self.time(torch.cat([angle.cos(), angle.sin()], -1))
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, c, *self.rotation)
        shift, scale = self.ada(c)[:, None].chunk(2, -1)
        logits = self.head(self.norm(x) * (1 + scale) + shift)
        expm1 = torch.where(sigma < 0.5, torch.expm1(sigma), sigma.exp() - 1)
        return logits - expm1.log()[:, None, None] - math.log(MASK)


def port_loss(model, clean):
    """Mean over all positions, padding too, of the weighted score entropy of [batch, 512]."""
    t = torch.rand(len(clean)) * (1 - 1e-3) + 1e-3
    sigma = SIGMA_MIN + (SIGMA_MAX - SIGMA_MIN) * (1 - torch.cos(math.pi * t)) / 2
    dsigma = math.pi / 2 * (SIGMA_MAX - SIGMA_MIN) * torch.sin(math.pi * t)
    hide = torch.rand(clean.shape) < 1 - (-sigma)[:, None].exp()
    noisy = torch.where(hide, MASK, clean)
    score = model(noisy, sigma)
    masked = noisy == MASK
    ratio = (1 / torch.expm1(sigma))[:, None].expand_as(noisy)[masked]
    negative = ratio * torch.gather(score[masked], -1, clean[masked][:, None]).squeeze(-1)
    positive = score[masked][:, :-1].exp().sum(-1)
    entropy = torch.zeros(clean.shape)
    entropy[masked] += (positive - negative + ratio * (ratio.log() - 1)).float()
    return (dsigma[:, None] * entropy).mean()


def port_rows(fasta):
    """Rows [sequences, 512] of ids, in an order of chance."""
    sequences = Path(fasta).read_text().split()[1::2]
    rows = torch.full((len(sequences), LENGTH), PAD)
    for row, sequence in zip(rows, sequences, strict=True):
        ids = [5 + LETTERS.index(letter) for letter in sequence[: LENGTH - 2]]
        row[: len(ids)] = torch.tensor(ids)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(42))
    return rows[order]


def port(fasta):
    """(each rank)"""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(42)
    model = nn.parallel.DistributedDataParallel(PortModel().train())
    parameters = list(model.parameters())
    average = [parameter.detach().clone() for parameter in parameters]
    optimizer = torch.optim.AdamW(parameters, lr=5e-5, weight_decay=0.01)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1 + 0.9 * step / 5000)

    rows = port_rows(fasta)[rank :: dist.get_world_size()]
    torch.manual_seed(42 + rank)
    numbers = itertools.count()  # of the micro-batches

    def step():
        for _ in range(ACCUMULATION):
            places = torch.arange(BATCH) + BATCH * next(numbers)
            batch = rows[places % len(rows)]
            loss = port_loss(model, batch) / ACCUMULATION
            loss.backward()
            if not math.isfinite(loss.item()):
                sys.exit(f"the port's loss is {loss}")
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        rate.step()
        rest = 1 - min(0.9995, (1 + rate.last_epoch) / (10 + rate.last_epoch))
        with torch.no_grad():
            for mean, parameter in zip(average, parameters, strict=True):
                mean.sub_(rest * (mean - parameter))
        optimizer.zero_grad()

    sides.repeat(step)


# ---- All sides, in turns -------------------------------------------------------------------------


def make_sequences(count, folder):
    """Random residues, log-normal lengths (the mean of UniRef50, 286, median about 208), as each
    side reads them. Returns the lengths."""
    draw = np.random.default_rng(42)
    lengths = np.exp(draw.normal(0, 0.8, count))
    lengths = np.maximum(20, np.round(lengths * 286 / lengths.mean())).astype(int)

    residues = np.frombuffer(LETTERS.encode(), np.uint8)
    records = []
    for number, length in enumerate(lengths):
        records.append(f">s{number}\n{draw.choice(residues, length).tobytes().decode()}\n")
    (folder / "sequences.fasta").write_text("".join(records))
    return lengths


def start(folder, residues, side, seed):
    """The jobs of a side. residues: the mean number that it sees of a sequence."""
    amount = BATCH * ACCUMULATION * PROCESSES * residues  # of a step
    if side == "port":
        settings = {"fasta": f"{folder}/sequences.fasta"}
        return [sides.port_job(__file__, side, folder, settings, amount, PROCESSES)]
    options = f"""{OPTIONS} --seed={seed} --datafile=sequences.fasta --batch_size={BATCH}
        --log_every=1"""
    job = sides.script_job(SCRIPT, side, folder, options.split(), amount, PROCESSES)
    if not (folder / "cache").exists():
        sides.warm_up([job])  # alone: it reads the sequences
    return [job]


def main():
    parser = sides.make_parser(__doc__, seconds=24.0)
    add = parser.add_argument
    add("--sequences", type=int, default=20_000, help="how many are drawn")
    args = sides.parse_args(parser, port)

    with sides.workplace() as folder:
        lengths = make_sequences(args.sequences, folder)
        residues = np.minimum(lengths, LENGTH - 2).mean()
        start_side = functools.partial(start, folder, residues)
        measured = sides.measure(start_side, ["ours", *NAMES], args.rounds, args.seconds)

    found = sides.speeds(measured)
    print(
        f"{PROCESSES} processes x 1 thread, {BATCH} x {ACCUMULATION} sequences per process and "
        f"step, {args.rounds} rounds of {args.seconds:g} s\n"
        f"{args.sequences:,} sequences, mean length {lengths.mean():.0f}\n"
    )
    sides.print_comparison_head(UNIT)
    records = sides.compare("small model, lengths of uniref50", UNIT, found, NAMES)
    of_port = 1 - residues / LENGTH
    print(f"\npadding: ours 0.0%  port {of_port:.1%}")
    sides.write_json(args.json, records)


if __name__ == "__main__":
    main()
