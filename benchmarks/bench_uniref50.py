"""Training steps of run_train_uniref50_ddp.py beside ESM-2, the masked language model of
transformers.

    python benchmarks/bench_uniref50.py
    python benchmarks/bench_uniref50.py --rounds 1 --seconds 3

All sides: the same width, depth and number of heads, the same sequences, two processes of one
thread each, 16 sequences x 4 micro-batches per process, fp32 on a CPU, dropout 0.1, residues hidden
with a chance that is drawn. Real residues per second of whole optimizer steps, over all processes:
steps by the mean number of residues of a step. Ours also feeds the noise into each block, and
averages the weights.

ours      the script: sequences are packed, no token is padding
padded    rows of 512 tokens, as in the original program; gradients are exchanged and the loss is
          read in each micro-batch, as there; AdamW not fused
best      sequences of similar length share a batch, which is padded to its longest; AdamW fused;
          gradients are exchanged once in a step, without copies of them and without buffers;
          the C library keeps all memory that was freed

Lengths: drawn from a log-normal law whose mean is 286, that of UniRef50.
"""

import contextlib

import numpy as np
import sides
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

UNIT = "real residues/s"
NAMES = {"padded": "ESM-2, rows of 512", "best": "ESM-2, at its best"}
PROCESSES = 2
BATCH = 16
ACCUMULATION = 4
WIDTH = 128
BLOCKS = 4
HEADS = 4
LENGTH = 512  # tokens, begin and end among them
SEQUENCES = 20_000
WORKS = {"small model, lengths of uniref50": None}
OPTIONS = f"""--hidden_size={WIDTH} --n_blocks_prot={BLOCKS} --n_heads={HEADS} --cond_dim=64
    --dropout=0.1 --max_protein_len={LENGTH} --batch_size={BATCH} --accum={ACCUMULATION}
    --eval_sequences=2 --eval_draws=1 --log_every=1 --datafile=proteins.txt --cache_dir=cache"""
BEGIN, PAD, END, FIRST, MASK = 0, 1, 2, 4, 32  # tokens of ESM-2


def draw_lengths():
    """Residues of each sequence: log-normal, median about 208."""
    lengths = np.exp(np.random.default_rng(42).normal(0, 0.8, SEQUENCES))
    return np.maximum(20, np.round(lengths * 286 / lengths.mean())).astype(int)


def residues_seen():
    """The mean number of a sequence's residues that a side sees."""
    return np.minimum(draw_lengths(), LENGTH - 2).mean()


def micro_batches(side, seed):
    """For ever, the lengths of the sequences of this rank's next micro-batch."""
    lengths = torch.from_numpy(np.minimum(draw_lengths(), LENGTH - 2))
    generator = torch.Generator().manual_seed(seed)
    together = BATCH * PROCESSES
    while True:
        order = torch.randperm(len(lengths), generator=generator)
        batches = []
        for part in order.split(50 * together):
            if side == "best":
                part = part[lengths[part].argsort()]
            batches += [batch for batch in part.split(together) if len(batch) == together]
        for i in torch.randperm(len(batches), generator=generator).tolist():
            yield lengths[batches[i][dist.get_rank() :: PROCESSES]]


def make_rows(lengths, longest):
    """(tokens with some hidden, labels), each (B, longest); label -100: not asked."""
    place = torch.arange(longest)
    ends = lengths[:, None] + 1
    tokens = torch.randint(FIRST, FIRST + 20, (len(lengths), longest))
    tokens[:, 0] = BEGIN
    tokens.masked_fill_(place == ends, END)
    tokens.masked_fill_(place > ends, PAD)
    is_residue = (place > 0) & (place < ends)
    hide = is_residue & (torch.rand(tokens.shape) < torch.rand(len(lengths), 1))
    return tokens.masked_fill(hide, MASK), tokens.masked_fill(~hide, -100)


def port(side, seed):
    """(each rank)"""
    from transformers import EsmConfig, EsmForMaskedLM

    dist.init_process_group("gloo")
    torch.manual_seed(seed)
    config = EsmConfig(
        vocab_size=33,
        hidden_size=WIDTH,
        num_hidden_layers=BLOCKS,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.0,
        position_embedding_type="rotary",
        token_dropout=False,
        pad_token_id=PAD,
        mask_token_id=MASK,
    )
    plain = EsmForMaskedLM(config).train()
    for name, parameter in plain.named_parameters():
        if "contact_head" in name or "position_embeddings" in name:
            parameter.requires_grad_(False)  # nothing uses them
    is_best = side == "best"
    options = {}
    if is_best:
        sides.keep_freed_memory()
        options = {"gradient_as_bucket_view": True, "broadcast_buffers": False}
    model = DistributedDataParallel(plain, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.01, fused=is_best)
    batches = micro_batches(side, seed)
    torch.manual_seed(seed + dist.get_rank())
    while True:
        for micro in range(1, ACCUMULATION + 1):
            lengths = next(batches)
            longest = int(lengths.max()) + 2 if is_best else LENGTH
            tokens, labels = make_rows(lengths, longest)
            is_last = micro == ACCUMULATION
            with model.no_sync() if is_best and not is_last else contextlib.nullcontext():
                output = model(tokens, attention_mask=(tokens != PAD).long(), labels=labels)
                (output.loss / ACCUMULATION).backward()
            if is_last or not is_best:
                output.loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        sides.note_step()


def prepare(folder, settings):
    sides.write_proteins(folder / "proteins.txt", draw_lengths())


def start(folder, settings, side, seed):
    amount = BATCH * ACCUMULATION * PROCESSES * residues_seen()  # of a step
    if side in NAMES:
        settings = {"side": side, "seed": seed}
        return sides.port_job(__file__, side, folder, settings, amount, PROCESSES)
    options = f"{OPTIONS} --seed={seed}"
    script = "run_train_uniref50_ddp.py"
    return sides.script_job(script, side, folder, options, amount, PROCESSES)


if __name__ == "__main__":
    sides.run(__doc__, UNIT, WORKS, NAMES, prepare, start, port, seconds=24.0)
