"""Training steps of train_ddp.py beside the Trainer of sentence-transformers.

    pip install "accelerate>=1.10"
    python benchmarks/bench_train_ddp.py --teacher
    python benchmarks/bench_train_ddp.py --rounds 1 --seconds 3 --rows 300 --batch 8

The same student, texts, batch, processes (two, one thread each) and fp32 on a CPU. The student is a
BERT with random weights in the shape of 3 layers of all-MiniLM (384 wide), the teacher one of 6
layers: what they cost is real, what they know does not matter. The texts are data/pydocs.jsonl.gz.

ours         train_ddp.py; phase 1 by the cosine alone, phase 2 by InfoNCE alone
default      SentenceTransformerTrainer as its documentation writes it: EmbedDistillLoss (cosine),
             MultipleNegativesRankingLoss with negatives from all ranks
best         the Trainer with what we found to help it: texts of similar length share a batch, and
             the C library keeps all memory that was freed

--teacher also measures three epochs of phase 1 in wall seconds, one run of each side, with start
and the teacher. Its vectors are computed once by all ranks here and in best; in default by
`Dataset.map`, by each.
"""

import ctypes
import functools
import gzip
import itertools
import json
import shutil
import time
from pathlib import Path

import numpy as np
import sides
import torch
import torch.distributed as dist

UNIT = "samples/s"
PROCESSES = 2
LENGTH = 128
OPTIONS = f"""--use_projection=False --student_max_length={LENGTH} --teacher_max_length={LENGTH}
    --eval_samples=50 --phase1_l2_weight=0 --phase1_cosine_weight=1 --phase2_l2_weight=0
    --infonce_weight=1 --false_negative_margin=2 --phase1_lr=2e-5 --phase2_lr=2e-5 --log_every=1
    --eval_every=1000000"""
NAMES = {  # side: what the tables call it
    "default": "SentenceTransformerTrainer, default",
    "best": "SentenceTransformerTrainer, at its best",
}
SIDES = ["ours", *NAMES]
LOSSES = {1: "EmbedDistillLoss", 2: "MultipleNegativesRankingLoss"}


# ---- The Trainer, in each of its processes -------------------------------------------------------


def similar_lengths(lengths):
    """A batch sampler for the Trainer: texts of similar length together, 50 batches at a time."""
    from sentence_transformers.base.sampler import DefaultBatchSampler

    class SimilarLengths(DefaultBatchSampler):
        def __iter__(self):
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(len(lengths), generator=generator)
            batches = []
            for part in order.split(50 * self.batch_size):
                part = part[lengths[part].argsort(descending=True)]
                batches += [batch.tolist() for batch in part.split(self.batch_size)]
            batches = [batch for batch in batches if len(batch) == self.batch_size]
            for i in torch.randperm(len(batches), generator=generator).tolist():
                yield batches[i]

        def __len__(self):
            return len(lengths) // self.batch_size

    return SimilarLengths


def keep_freed_memory():
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(-3, 2**30)
    mallopt(-1, 2**31 - 1)


def encode_once(teacher, texts):
    """The vectors of all texts, of which each rank computes a part. (each rank)"""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    parts = [None] * world_size
    dist.all_gather_object(parts, teacher.encode(texts[rank::world_size]))
    vectors = np.zeros((len(texts), parts[0].shape[1]), np.float32)
    for number, part in enumerate(parts):
        vectors[number::world_size] = part
    return vectors


def make_labels(texts, side, with_teacher):
    """Texts with the teacher's vectors, or with some of the same size where only steps count."""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer

    data = Dataset.from_dict({"sentence": texts})
    if not with_teacher:
        vectors = np.random.default_rng(0).standard_normal((len(texts), 384), np.float32)
        return data.add_column("label", list(vectors))
    teacher = SentenceTransformer("teacher", device="cpu")
    if side == "best":
        return data.add_column("label", list(encode_once(teacher, texts)))
    return data.map(lambda rows: {"label": teacher.encode(rows["sentence"])}, batched=True)


def port(side, phase, epochs, batch, with_teacher, seed):
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
        data = make_labels(texts, side, with_teacher)
        loss = losses.EmbedDistillLoss(student, distance_metric="cosine")
    else:
        texts = [query + document for query, document in zip(queries, documents, strict=True)]
        data = Dataset.from_dict({"anchor": queries, "positive": documents})
        loss = losses.MultipleNegativesRankingLoss(student, scale=50.0, gather_across_devices=True)
    options = {}
    if side == "best":
        keep_freed_memory()
        ids = student.tokenizer(texts, truncation=True, max_length=2 * LENGTH)["input_ids"]
        options["batch_sampler"] = similar_lengths(torch.tensor([len(tokens) for tokens in ids]))

    class Steps(TrainerCallback):
        def on_step_end(self, *others, **more):
            sides.note_step()

    settings = Arguments(
        output_dir=f"trainer-{side}",
        per_device_train_batch_size=batch,
        learning_rate=2e-5,
        warmup_steps=0.1,
        num_train_epochs=epochs,
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


def prepare(rows, folder):
    """pairs.jsonl and the models."""
    pairs = folder / "pairs.jsonl"
    with gzip.open(sides.ROOT / "data" / "pydocs.jsonl.gz", "rt") as file:
        pairs.write_text("".join(itertools.islice(file, rows)))
    options = f"""--prepare_only --phase1_data={pairs} --phase2_data={pairs} --cache_dir={folder}
        --student_model=builtin:bert:3x384 --teacher_model=builtin:bert:6x384
        --student_max_length={LENGTH}"""
    sides.script_job("train_ddp.py", "prepare", folder, options.split()).wait()
    for model in folder.glob("bert-*"):
        layers = json.loads((model / "bert" / "config.json").read_text())["num_hidden_layers"]
        model.rename(folder / {3: "student", 6: "teacher"}[layers])


def start(folder, batch, phase, epochs, cache, side, seed):
    """The job of a side. cache: folder of the teacher's vectors; None: they are not in it yet, and
    computed."""
    amount = batch * PROCESSES
    if side in ("default", "best"):
        settings = {"side": side, "phase": phase, "epochs": epochs, "batch": batch}
        settings |= {"with_teacher": cache is None, "seed": seed}
        return sides.port_job(__file__, side, folder, settings, amount, PROCESSES)
    if cache is None:
        cache = folder / "empty-cache"
        shutil.rmtree(cache, ignore_errors=True)
    options = f"""{OPTIONS} --skip_phase{3 - phase} --phase{phase}_epochs={epochs}
        --phase1_data={folder}/pairs.jsonl --phase2_data={folder}/pairs.jsonl --seed={seed}
        --student_model={folder}/student --teacher_model={folder}/teacher --cache_dir={cache}
        --batch_size={batch}"""
    return sides.script_job("train_ddp.py", side, folder, options.split(), amount, PROCESSES)


def start_steps(folder, batch, phase, side, seed):
    """The jobs of a side, for ever in one phase."""
    return [start(folder, batch, phase, 100_000, folder / f"cache-{side}", side, seed)]


def measure_steps(args, folder):
    records = []
    sides.print_comparison_head(UNIT)
    for phase, loss in LOSSES.items():
        start_side = functools.partial(start_steps, folder, args.batch, phase)
        found = sides.speeds(sides.measure(start_side, SIDES, args.rounds, args.seconds))
        records += sides.compare(f"phase {phase}: {loss}", UNIT, found, NAMES)
    return records


def measure_with_teacher(args, folder):
    """Wall seconds of whole runs, one after the other."""
    found = {}
    for side in SIDES:
        begin = time.monotonic()
        start(folder, args.batch, 1, 3, None, side, seed=0).wait()
        found[side] = [time.monotonic() - begin]
    print()
    sides.print_comparison_head("seconds")
    return sides.compare("three epochs of phase 1", "seconds", found, NAMES)


def main():
    parser = sides.make_parser(__doc__, seconds=24.0)
    add = parser.add_argument
    add("--rows", type=int, default=600, help="queries with a document [600]")
    add("--batch", type=int, default=64, help="samples per process and step [64]")
    add("--teacher", action="store_true", help="see above")
    args = sides.parse_args(parser, port)

    with sides.workplace() as folder:
        prepare(args.rows, folder)
        turns = f"{args.rounds} rounds of {args.seconds:g} s"
        text = f"batch {args.batch} each, {args.rows} rows, {turns}"
        print(f"{PROCESSES} processes x 1 thread, {text}\n")
        records = measure_steps(args, folder)
        if args.teacher:
            records += measure_with_teacher(args, folder)
    sides.write_json(args.json, records)


if __name__ == "__main__":
    main()
