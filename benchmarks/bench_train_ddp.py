"""Training steps of train_ddp.py beside the Trainer of sentence-transformers.

    pip install "accelerate>=1.10"
    python benchmarks/bench_train_ddp.py
    python benchmarks/bench_train_ddp.py --rounds 1 --seconds 3 --works "phase 1"

The same student, texts, batch (64 per process), processes (two, one thread each) and fp32 on a CPU.
The student is a BERT with random weights, builtin:bert:3x384: 3 layers of width 384, 768 within a
layer, a vocabulary of at most 8,000 words. Texts are the first 600 queries of data/pydocs.jsonl.gz,
with their documents. The teacher's vectors are ready.

ours         train_ddp.py; phase 1 by the cosine alone, phase 2 by InfoNCE alone
default      SentenceTransformerTrainer as its documentation writes it: EmbedDistillLoss (cosine),
             MultipleNegativesRankingLoss with negatives from all ranks
best         the Trainer with what we found to help it: texts of similar length share a step, of
             both processes; DDP looks for no unused parameters, of which there are none, and sends
             no buffers; the C library keeps all memory that was freed
"""

import gzip
import itertools
import json
from pathlib import Path

import numpy as np
import sides
import torch

UNIT = "samples/s"
PROCESSES = 2
BATCH = 64
ROWS = 600
LENGTH = 128
WORKS = {"phase 1": 1, "phase 2": 2}
NAMES = {
    "default": "SentenceTransformerTrainer, default",
    "best": "SentenceTransformerTrainer, at its best",
}
MODELS = f"""--phase1_data=pairs.jsonl --phase2_data=pairs.jsonl --student_max_length={LENGTH}
    --teacher_model=builtin:lsa:384 --cache_dir=cache"""
OPTIONS = f"""{MODELS} --student_model=student --use_projection=False --eval_samples=50
    --phase1_l2_weight=0 --phase1_cosine_weight=1 --phase2_l2_weight=0 --infonce_weight=1
    --false_negative_margin=2 --phase1_lr=2e-5 --phase2_lr=2e-5 --log_every=1 --eval_every=1000000
    --phase1_epochs=100000 --phase2_epochs=100000 --batch_size={BATCH}"""


# ---- The Trainer, in each of its processes -------------------------------------------------------


def similar_lengths(lengths):
    """A batch sampler for the Trainer: texts of similar length together, 25 steps at a time. The
    Trainer gives batches to the ranks in turns: each next PROCESSES of them are a step."""
    from sentence_transformers.base.sampler import DefaultBatchSampler

    together = PROCESSES * BATCH

    class SimilarLengths(DefaultBatchSampler):
        def __iter__(self):
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(len(lengths), generator=generator)
            steps = []
            for part in order.split(25 * together):
                part = part[lengths[part].argsort(descending=True)]
                steps += [step for step in part.split(together) if len(step) == together]
            for i in torch.randperm(len(steps), generator=generator).tolist():
                for rank in range(PROCESSES):
                    yield steps[i][rank::PROCESSES].tolist()

        def __len__(self):
            return PROCESSES * (len(lengths) // together)

    return SimilarLengths


def port(side, phase, seed):
    """A training of SentenceTransformerTrainer. (each rank)"""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
    from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
    from sentence_transformers.sentence_transformer import losses
    from transformers import TrainerCallback

    student = SentenceTransformer("student", device="cpu")
    rows = [json.loads(line) for line in Path("pairs.jsonl").read_text().splitlines()]
    queries = [row["query"] for row in rows]
    documents = [row["positive"] for row in rows]
    if phase == 1:
        texts = list(dict.fromkeys(queries + documents))
        vectors = np.random.default_rng(0).standard_normal((len(texts), 384), np.float32)
        data = Dataset.from_dict({"sentence": texts}).add_column("label", list(vectors))
        loss = losses.EmbedDistillLoss(student, distance_metric="cosine")
    else:
        texts = [query + document for query, document in zip(queries, documents, strict=True)]
        data = Dataset.from_dict({"anchor": queries, "positive": documents})
        loss = losses.MultipleNegativesRankingLoss(student, scale=50.0, gather_across_devices=True)
    options = {}
    if side == "best":
        sides.keep_freed_memory()
        student[0].auto_model.pooler.requires_grad_(False)  # nothing uses it
        options.update(ddp_find_unused_parameters=False, ddp_broadcast_buffers=False)
        ids = student.tokenizer(texts, truncation=True, max_length=2 * LENGTH)["input_ids"]
        options["batch_sampler"] = similar_lengths(torch.tensor([len(tokens) for tokens in ids]))

    class Steps(TrainerCallback):
        def on_step_end(self, *others, **more):
            sides.note_step()

    settings = Arguments(
        output_dir=f"trainer-{side}",
        per_device_train_batch_size=BATCH,
        learning_rate=2e-5,
        warmup_steps=0.1,
        num_train_epochs=100_000,
        seed=seed,
        dataloader_drop_last=True,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )
    names = {"model": student, "args": settings, "train_dataset": data, "loss": loss}
    SentenceTransformerTrainer(**names, callbacks=[Steps()]).train()


# ---- All sides, in turns -------------------------------------------------------------------------


def prepare(folder, phase):
    """pairs.jsonl, and the student."""
    with gzip.open(sides.ROOT / "data" / "pydocs.jsonl.gz", "rt") as file:
        (folder / "pairs.jsonl").write_text("".join(itertools.islice(file, ROWS)))
    options = f"{MODELS} --prepare_only --student_model=builtin:bert:3x384"
    sides.script_job("train_ddp.py", "prepare", folder, options).wait()
    (model,) = (folder / "cache").glob("bert-*")
    model.rename(folder / "student")


def start(folder, phase, side, seed):
    amount = BATCH * PROCESSES
    if side in NAMES:
        settings = {"side": side, "phase": phase, "seed": seed}
        return sides.port_job(__file__, side, folder, settings, amount, PROCESSES)
    options = f"{OPTIONS} --skip_phase{3 - phase} --seed={seed}"
    return sides.script_job("train_ddp.py", side, folder, options, amount, PROCESSES)


if __name__ == "__main__":
    sides.run(__doc__, UNIT, WORKS, NAMES, prepare, start, port, seconds=24.0)
