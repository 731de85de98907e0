"""Training steps of train_ddp.py beside the Trainer of sentence-transformers.

    pip install "accelerate>=1.10"
    python benchmarks/bench_train_ddp.py
    python benchmarks/bench_train_ddp.py --rounds 1 --seconds 3 --works phase1 --sides best
    python benchmarks/bench_train_ddp.py --device cuda --precision bf16

The same student, texts and batch. The student is a BERT with random weights, its MLP twice as wide
as the rest, a vocabulary of at most 8,000 words. Texts are queries of data/pydocs.jsonl.gz, with
their documents. The teacher's vectors are ready. On a CPU two processes of one thread each, 3
layers of width 384, 64 texts or pairs per process; on a GPU one process, 6 layers, 256 of them.

ours      train_ddp.py; phase 1 by the cosine alone, phase 2 by InfoNCE alone
default   SentenceTransformerTrainer as its documentation writes it: EmbedDistillLoss (cosine),
          MultipleNegativesRankingLoss with negatives from all ranks
best      the Trainer with what we found to help it: texts of similar length share a step, of all
          processes; DDP looks for no unused parameters, of which there are none, and sends no
          buffers; the C library keeps all memory that was freed; on a GPU two processes load data
compiled  as best, by torch.compile
"""

import gzip
import itertools
import json
from argparse import Namespace
from pathlib import Path

import numpy as np
import sides
import torch

UNIT = "samples/s"
LENGTH = 128
SIZES = {
    "cpu": {"layers": 3, "batch": 64, "rows": 600, "processes": 2, "every": 1},
    "cuda": {"layers": 6, "batch": 256, "rows": 6000, "processes": 1, "every": 10},
}
WORKS = {"phase1": 1, "phase2": 2}
NAMES = {
    "default": "SentenceTransformerTrainer, default",
    "best": "SentenceTransformerTrainer, at its best",
    "compiled": "SentenceTransformerTrainer, at its best and compiled",
}
OPTIONS = f"""--phase1_data=pairs.jsonl --phase2_data=pairs.jsonl --student_max_length={LENGTH}
    --teacher_model=builtin:lsa --cache_dir=cache --student_model=student --use_projection=False
    --eval_samples=50 --phase2_l2_weight=0
    --infonce_weight=1 --false_negative_margin=2 --phase1_lr=2e-5 --phase2_lr=2e-5
    --eval_every=1000000 --phase1_epochs=100000 --phase2_epochs=100000"""


def sizes():
    """Those of SIZES for this device; with --small a layer, and few texts."""
    found = dict(SIZES[sides.chosen.device])
    if sides.chosen.small:
        found.update(layers=1, batch=8, rows=500, processes=1)
    return found


# ---- The Trainer, in each of its processes -------------------------------------------------------


def similar_lengths(student, texts, most, batch, processes=1):
    """A batch sampler for the Trainer: texts of similar length together, 25 steps at a time. The
    Trainer gives batches to the ranks in turns: each next `processes` of them are a step."""
    from sentence_transformers.base.sampler import DefaultBatchSampler

    together = processes * batch
    ids = student.tokenizer(texts, truncation=True, max_length=most)["input_ids"]
    lengths = torch.tensor([len(tokens) for tokens in ids])

    class SimilarLengths(DefaultBatchSampler):
        def __iter__(self):
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(len(lengths), generator=generator)
            steps = []
            for part in order.split(25 * together):
                part = part[lengths[part].argsort(descending=True)]
                steps += [step for step in part.split(together) if len(step) == together]
            for i in torch.randperm(len(steps), generator=generator).tolist():
                for rank in range(processes):
                    yield steps[i][rank::processes].tolist()

        def __len__(self):
            return processes * (len(lengths) // together)

    return SimilarLengths


def read_pairs(path):
    """(queries, documents, both as one text, each distinct text once)"""
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    queries = [row["query"] for row in rows]
    documents = [row["positive"] for row in rows]
    pairs = [f"{query}\n{document}" for query, document in zip(queries, documents, strict=True)]
    return queries, documents, pairs, list(dict.fromkeys(queries + documents))


def train(student, data, loss, callbacks=None, **settings):
    """Training by SentenceTransformerTrainer on columns {name: values}, without a word."""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer
    from sentence_transformers import SentenceTransformerTrainingArguments as Arguments

    settings.update(save_strategy="no", logging_strategy="no", report_to=[], disable_tqdm=True)
    arguments = Arguments(warmup_steps=0.1, **settings)
    data = Dataset.from_dict(data)
    options = {"args": arguments, "train_dataset": data, "loss": loss, "callbacks": callbacks}
    SentenceTransformerTrainer(student, **options).train()


def port(side, phase, seed, device, precision, batch, processes, every, **others):
    """A training of a phase. (each rank)"""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import losses
    from transformers import TrainerCallback

    student = SentenceTransformer("student", device="cpu")
    queries, documents, pairs, texts = read_pairs("pairs.jsonl")
    if phase == 1:
        vectors = np.random.default_rng(0).standard_normal((len(texts), 384), np.float32)
        data = {"sentence": texts, "label": list(vectors)}
        loss = losses.EmbedDistillLoss(student, distance_metric="cosine")
    else:
        data = {"anchor": queries, "positive": documents}
        loss = losses.MultipleNegativesRankingLoss(student, scale=50.0, gather_across_devices=True)
    options = {}
    if side != "default":
        sides.keep_freed_memory()
        student[0].auto_model.pooler.requires_grad_(False)  # nothing uses it
        options.update(ddp_find_unused_parameters=False, ddp_broadcast_buffers=False)
        measured = texts if phase == 1 else pairs
        sampler = similar_lengths(student, measured, 2 * LENGTH, batch, processes)
        options.update(batch_sampler=sampler, torch_compile=side == "compiled")
        if device != "cpu":
            options["dataloader_num_workers"] = 2

    class Steps(TrainerCallback):
        def on_step_end(self, *others, **more):
            sides.note_step(every)

    train(
        student,
        data,
        loss,
        [Steps()],
        output_dir=f"trainer-{side}",
        per_device_train_batch_size=batch,
        learning_rate=2e-5,
        num_train_epochs=100_000,
        seed=seed,
        dataloader_drop_last=True,
        use_cpu=device == "cpu",
        bf16=precision == "bf16",
        tf32=precision == "tf32" if device == "cuda" else None,
        **options,
    )


# ---- All sides, in turns -------------------------------------------------------------------------


def prepare(folder, phase):
    """pairs.jsonl, and the student."""
    import train_ddp

    found = sizes()
    with gzip.open(sides.ROOT / "data" / "pydocs.jsonl.gz", "rt") as file:
        lines = list(itertools.islice(file, found["rows"]))
    (folder / "pairs.jsonl").write_text("".join(lines))
    texts = ["\n".join([row["query"], row["positive"]]) for row in map(json.loads, lines)]
    args = Namespace(student_max_length=LENGTH, seed=0)
    train_ddp.make_bert(folder / "student", args, texts, found["layers"], width=384)


def start(folder, phase, side, seed):
    found = sizes()
    amount = found["batch"] * found["processes"]
    if side in NAMES:
        settings = {"side": side, "phase": phase, "seed": seed, **found}
        return sides.port_job(__file__, side, folder, settings, amount, found["processes"])
    options = f"""{OPTIONS} --skip_phase{3 - phase} --seed={seed} --batch_size={found["batch"]}
        --log_every={found["every"]}"""
    return sides.script_job("train_ddp.py", side, folder, options, amount, found["processes"])


if __name__ == "__main__":
    sides.run(__doc__, UNIT, WORKS, NAMES, prepare, start, port, 24.0)
