"""run_train_uniref50_ddp.py in minutes.py.

The proteins of the quickstart; a tenth of them, dev, for the evaluations of the script, a tenth for
the test, at random. Its network, batch and, for ours, its settings.

it      the Trainer of transformers on EsmForMaskedLM: proteins of similar length share a batch,
        which is padded to its longest; a collator hides residues at all rates; AdamW fused, half a
        cosine; the C library keeps freed memory, nothing is evaluated. Its learning rate and the
        deviation of its first weights were chosen on dev
judge   EsmForMaskedLM: the bound (nats a residue), four draws of hidden residues for each protein.
        Ours comes to it by tools/esm_uniref50.py
"""

import gzip
import math
import sys
from pathlib import Path

import bench_uniref50
import numpy as np
import sides
import torch
import torch.nn.functional as F
from bench_uniref50 import BEGIN, END, MASK, PAD

SCRIPT = "run_train_uniref50_ddp.py"
PROBE = (40, 160)  # steps of the short runs
PEER = {"lr": 4e-3, "deviation": 0.12}
SIZES = {"width": 64, "blocks": 3, "heads": 4}
BATCH = 32
LENGTH = 144  # tokens, begin and end among them
DRAWS = 4


def prepare(folder):
    """train.fasta, dev.fasta and test.fasta."""
    path = sides.ROOT / "data" / "ribosomal_families.fasta.gz"
    records = gzip.decompress(path.read_bytes()).decode().split(">")[1:]
    order = np.random.default_rng(0).permutation(len(records))
    tenth = len(records) // 10
    numbers = np.split(order, [tenth, 2 * tenth])
    for name, own in zip(["test", "dev", "train"], numbers, strict=True):
        (folder / f"{name}.fasta").write_text("".join(f">{records[i]}" for i in own))


def options(out, steps, seed, seconds):
    return f"""--datafile=train.fasta --valid_file=dev.fasta --max_protein_len={LENGTH}
        --hidden_size={SIZES["width"]} --n_blocks_prot={SIZES["blocks"]}
        --n_heads={SIZES["heads"]} --dropout=0 --batch_size={BATCH} --global_batch_size={BATCH}
        --n_iters={steps} --epochs=100000 --ema=0.97 --optimizer=muon --lr=1e-2
        --warmup={math.ceil(steps / 10)} --beta2=0.98 --eval_freq=100"""


def read_tokens(path):
    """Those of each protein, for EsmForMaskedLM."""
    sys.path.append(str(sides.ROOT / "tools"))
    from esm_uniref50 import VOCABULARY

    found = []
    for record in path.read_text().split(">")[1:]:
        _, *lines = record.split("\n")
        letters = "".join(lines).replace("J", "X")[: LENGTH - 2]
        found.append([BEGIN, *map(VOCABULARY.index, letters), END])
    return found


def hide(proteins, shares, generator):
    """What EsmForMaskedLM takes, of proteins, each with such a share of its residues hidden."""
    longest = max(map(len, proteins))
    tokens = torch.full((len(proteins), longest), PAD)
    labels = torch.full((len(proteins), longest), -100)
    for row, (protein, share) in enumerate(zip(proteins, shares, strict=True)):
        protein = torch.tensor(protein)
        tokens[row, : len(protein)] = protein
        residues = generator.permutation(len(protein) - 2)
        hidden = torch.from_numpy(1 + residues[: math.ceil(share * len(residues))])
        labels[row, hidden] = protein[hidden]
        tokens[row, hidden] = MASK
    return {"input_ids": tokens, "attention_mask": (tokens != PAD).long(), "labels": labels}


def port(out, steps, seed, end, lr, deviation):
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

    sides.keep_freed_memory()
    torch.manual_seed(seed)
    generator = np.random.default_rng(seed)
    sizes = {**SIZES, "dropout": 0.0, "initializer_range": deviation}
    model = bench_uniref50.make_model(**sizes)
    proteins = read_tokens(Path("train.fasta"))
    data = Dataset.from_dict({"input_ids": proteins, "length": list(map(len, proteins))})

    def collate(rows):
        # one share in each of as many equal parts of 0 to 1: spread more evenly than at random
        shares = (generator.permutation(len(rows)) + generator.random(len(rows))) / len(rows)
        return hide([row["input_ids"] for row in rows], shares, generator)

    settings = TrainingArguments(
        output_dir=f"{out}/trainer",
        per_device_train_batch_size=BATCH,
        learning_rate=lr,
        lr_scheduler_type="cosine",
        warmup_steps=0.1,
        weight_decay=0.01,
        adam_beta2=0.98,
        optim="adamw_torch_fused",
        max_steps=steps,
        seed=seed,
        train_sampling_strategy="group_by_length",
        remove_unused_columns=False,
        dataloader_drop_last=True,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    Trainer(model, settings, train_dataset=data, data_collator=collate).train()
    model.save_pretrained(out / "esm")


@torch.no_grad()
def judge(folder, out, part):
    from transformers import EsmForMaskedLM

    if not (out / "esm").exists():
        sides.run_tool("esm_uniref50.py", out / "best.pt", out / "esm")
    model = EsmForMaskedLM.from_pretrained(out / "esm").eval()
    proteins = sorted(read_tokens(folder / f"{part}.fasta"), key=len)
    generator = np.random.default_rng(0)
    nats = 0.0
    for first in range(0, len(proteins), BATCH):
        own = proteins[first : first + BATCH]
        for draw in range(DRAWS):
            shares = (draw + generator.random(len(own))) / DRAWS
            batch = hide(own, shares, generator)
            labels = batch.pop("labels")
            errors = F.cross_entropy(model(**batch).logits.mT, labels, reduction="none")
            means = errors.sum(1) / (labels >= 0).sum(1)
            nats += (means * torch.tensor([len(protein) - 2 for protein in own])).sum().item()
    return {"bound": nats / DRAWS / sum(len(protein) - 2 for protein in proteins)}
