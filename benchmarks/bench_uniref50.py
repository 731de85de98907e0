"""Training steps of run_train_uniref50_ddp.py beside ESM-2, the masked language model of
transformers.

    python benchmarks/bench_uniref50.py
    python benchmarks/bench_uniref50.py --rounds 1 --seconds 3 --sides best
    python benchmarks/bench_uniref50.py --device cuda --precision bf16

Real residues per second of whole optimizer steps, over all processes: steps by the mean number of
residues of a step. All sides: the same width, depth and number of heads, sequences of the same
lengths, dropout 0.1, residues hidden with a chance that is drawn. On a CPU a small network, two
processes of one thread each, 4 micro-batches of 16 sequences per process; on a GPU the default
network, one process, batches of 64.

ours      the script: sequences are packed, no token is padding. It averages its weights, too
best      sequences of similar length share a batch, which is padded to its longest; attention by
          scaled_dot_product_attention, AdamW fused, no loss read; gradients are exchanged once in a
          step, without copies of them and without buffers; the C library keeps all memory that was
          freed
compiled  as best, by torch.compile with dynamic shapes

In the last two residues are drawn at random where they are needed, also on a GPU: to load and to
move batches costs them nothing.

Lengths: drawn from a log-normal law whose mean is 286, that of UniRef50.
"""

import argparse
import contextlib

import numpy as np
import sides
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

UNIT = "real residues/s"
NAMES = {
    "best": "ESM-2, at its best",
    "compiled": "ESM-2, at its best and compiled",
}
SIZES = {
    "cpu": {"width": 128, "blocks": 4, "heads": 4, "batch": 16, "accum": 4, "every": 1},
    "cuda": {"width": 768, "blocks": 8, "heads": 12, "batch": 64, "accum": 1, "every": 10},
}
LENGTH = 512  # tokens, begin and end among them
SEQUENCES = 20_000
WORKS = {"lengths of UniRef50": None}
BEGIN, PAD, END, FIRST, MASK = 0, 1, 2, 4, 32  # tokens of ESM-2


def sizes():
    """(those of SIZES for this device, processes); with --small a layer, and few sequences."""
    found = dict(SIZES[sides.chosen.device])
    if sides.chosen.small:
        found.update(blocks=1, batch=4, accum=1)
    return found, 2 if sides.chosen.device == "cpu" and not sides.chosen.small else 1


def draw_lengths():
    """Residues of each sequence: log-normal, median about 208."""
    lengths = np.exp(np.random.default_rng(42).normal(0, 0.8, SEQUENCES))
    return np.maximum(20, np.round(lengths * 286 / lengths.mean())).astype(int)


def micro_batches(batch, seed):
    """For ever, the lengths of the sequences of this rank's next micro-batch."""
    lengths = torch.from_numpy(np.minimum(draw_lengths(), LENGTH - 2))
    generator = torch.Generator().manual_seed(seed)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    together = batch * world_size
    while True:
        order = torch.randperm(len(lengths), generator=generator)
        batches = []
        for part in order.split(50 * together):
            part = part[lengths[part].argsort()]
            batches += [rows for rows in part.split(together) if len(rows) == together]
        for i in torch.randperm(len(batches), generator=generator).tolist():
            yield lengths[batches[i][rank::world_size]]


def make_rows(lengths, device):
    """(tokens with some hidden, labels), each (B, longest); label -100: not asked."""
    longest = int(lengths.max()) + 2
    lengths = lengths.to(device, non_blocking=True)
    place = torch.arange(longest, device=device)
    ends = lengths[:, None] + 1
    tokens = torch.randint(FIRST, FIRST + 20, (len(lengths), longest), device=device)
    tokens[:, 0] = BEGIN
    tokens.masked_fill_(place == ends, END)
    tokens.masked_fill_(place > ends, PAD)
    is_residue = (place > 0) & (place < ends)
    share = torch.rand(len(lengths), 1, device=device)
    hide = is_residue & (torch.rand(tokens.shape, device=device) < share)
    return tokens.masked_fill(hide, MASK), tokens.masked_fill(~hide, -100)


def make_model(width, blocks, heads, dropout=0.1, **options):
    from transformers import EsmConfig, EsmForMaskedLM

    config = EsmConfig(
        vocab_size=33,
        hidden_size=width,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=0.0,
        position_embedding_type="rotary",
        token_dropout=False,
        pad_token_id=PAD,
        mask_token_id=MASK,
        attn_implementation="sdpa",
        **options,
    )
    model = EsmForMaskedLM(config).train()
    for name, parameter in model.named_parameters():
        if "contact_head" in name or "position_embeddings" in name:
            parameter.requires_grad_(False)  # nothing uses them
    return model


def port(side, seed, device, precision, width, blocks, heads, batch, accum, every):
    """(each rank)"""
    import run_train_uniref50_ddp as script

    dist.init_process_group("gloo")
    torch.manual_seed(seed)
    sides.keep_freed_memory()
    model = make_model(width, blocks, heads).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.01, fused=True)
    if side == "compiled":
        model = torch.compile(model, dynamic=True)
    no_sync = contextlib.nullcontext
    if dist.get_world_size() > 1:
        options = {"gradient_as_bucket_view": True, "broadcast_buffers": False}
        model = DistributedDataParallel(model, **options)
        no_sync = model.no_sync
    args = argparse.Namespace(precision=precision)
    autocast = script.choose_precision(args, torch.device(device))
    batches = micro_batches(batch, seed)
    torch.manual_seed(seed + dist.get_rank())
    while True:
        for micro in range(1, accum + 1):
            tokens, labels = make_rows(next(batches), device)
            with no_sync() if micro < accum else contextlib.nullcontext():
                with autocast():
                    is_real = (tokens != PAD).long()
                    loss = model(tokens, attention_mask=is_real, labels=labels).loss
                (loss / accum).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        sides.note_step(every)


def prepare(folder, settings):
    sides.write_proteins(folder / "proteins.txt", draw_lengths())


def start(folder, settings, side, seed):
    found, processes = sizes()
    seen = np.minimum(draw_lengths(), LENGTH - 2).mean()  # of a sequence
    amount = found["batch"] * found["accum"] * processes * seen  # of a step
    if side in NAMES:
        settings = {"side": side, "seed": seed, **found}
        return sides.port_job(__file__, side, folder, settings, amount, processes)
    options = f"""--hidden_size={found["width"]} --n_blocks_prot={found["blocks"]}
        --n_heads={found["heads"]} --dropout=0.1 --max_protein_len={LENGTH}
        --batch_size={found["batch"]} --accum={found["accum"]} --log_every={found["every"]}
        --eval_sequences=2 --eval_draws=1 --eval_freq=1000000 --datafile=proteins.txt
        --cache_dir=cache --epochs=1000 --seed={seed}"""
    script = "run_train_uniref50_ddp.py"
    return sides.script_job(script, side, folder, options, amount, processes)


if __name__ == "__main__":
    sides.run(__doc__, UNIT, WORKS, NAMES, prepare, start, port, 24.0)
