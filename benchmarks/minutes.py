"""The held-out figure after some minutes, beside what one would train with instead.

    pip install "accelerate>=1.10"
    python benchmarks/minutes.py
    python benchmarks/minutes.py --minutes 0.5 --seeds 1

The same data, network and batch. Minutes are of wall-clock, from the start of the program
to its end: imports, reading, the teacher, evaluations and saving included. Two short runs of a
side tell how many steps fit into the minutes, so that its learning rate has come down to 0 when
they are over. Both sides run at the same time, each with one thread on a core of its own, and
change cores with each seed. The saved networks are then judged by one program.

train_ddp   Texts and queries of data/pydocs.jsonl.gz; a fifth of the queries are set aside, with
            their documents, half of these for the evaluations of train_ddp.py. The student is
            builtin:bert, the teacher builtin:lsa, as many steps in phase 1 as in phase 2.
    ours    train_ddp.py; rates of both sides were chosen by --part dev
    it      SentenceTransformerTrainer: its template of distillation (EmbedDistillLoss, cosine),
            then MultipleNegativesRankingLoss (its cached form is the same loss, with one more pass
            forward). Texts of similar length share a step, the C library keeps freed memory, and
            nothing is evaluated on the way
"""

import argparse
import gzip
import json
import os
import statistics
import sys
import time
from argparse import Namespace
from pathlib import Path

import bench_train_ddp
import numpy as np
import sides
import torch

BATCH = 128
LENGTH = 48  # tokens
PROBE = (20, 60)  # steps of the short runs
PARTS = {8: "dev", 9: "test"}  # by the last digit of a row's number


def read_pydocs():
    """{part: rows}; no text of one part is in another."""
    with gzip.open(sides.ROOT / "data" / "pydocs.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    parts = {"test": [], "dev": [], "train": []}
    for number, row in enumerate(rows):
        parts[PARTS.get(number % 10, "train")].append(row)
    seen = set()
    for name, rows in parts.items():
        parts[name] = [row for row in rows if not seen & {row["query"], row["positive"]}]
        for row in parts[name]:
            seen |= {row["query"], row["positive"]}
    return parts


def write_collection(folder, rows):
    """In BEIR's layout."""
    (folder / "qrels").mkdir(parents=True)
    corpus = []
    queries = []
    qrels = ["query-id\tcorpus-id\tscore"]
    for number, row in enumerate(rows):
        corpus.append(json.dumps({"_id": f"d{number}", "text": row["positive"]}))
        queries.append(json.dumps({"_id": f"q{number}", "text": row["query"]}))
        qrels.append(f"q{number}\td{number}\t1")
    for name, lines in {"corpus.jsonl": corpus, "queries.jsonl": queries}.items():
        (folder / name).write_text("\n".join(lines) + "\n")
    (folder / "qrels" / "dev.tsv").write_text("\n".join(qrels) + "\n")


def prepare(folder, layers, width):
    """train.jsonl, dev/, the student and, to judge by, the rows set aside."""
    import train_ddp

    parts = read_pydocs()
    lines = [
        json.dumps({name: row[name] for name in ("query", "positive")}) for row in parts["train"]
    ]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    write_collection(folder / "dev", parts["dev"])
    texts = [f"{row['query']}\n{row['positive']}" for row in parts["train"]]
    args = Namespace(student_max_length=LENGTH, seed=0)
    train_ddp.make_bert(folder / "student", args, texts, layers, width)
    print({name: len(rows) for name, rows in parts.items()}, "queries of each part\n")
    return parts


def command_of(side, out, steps, seed, rates):
    if side == "it":
        settings = {"out": str(out), "steps": steps, "seed": seed, "rates": rates}
        return [__file__, f"--port={json.dumps(settings)}"]
    options = f"""--phase1_data=train.jsonl --phase2_data=train.jsonl --eval_data=dev
        --teacher_model=builtin:lsa --student_model=student --use_projection=False
        --global_batch_size={BATCH} --batch_size={BATCH} --max_steps={steps} --seed={seed}
        --phase1_epochs=1000 --phase2_epochs=1000 --phase1_lr=8e-3 --phase2_lr=4e-3
        --false_negative_margin=2
        --output_dir={out} --cache_dir={out}/cache --save_to_artifacts --artifacts_dir={out}/saved
        --device=cpu --precision=fp32 --log_every=100"""
    return [sides.ROOT / "train_ddp.py", *options.split()]


def train_with_trainer(out, steps, seed, rates):
    """Both phases with the Trainer of sentence-transformers."""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
    from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
    from sentence_transformers.sentence_transformer import losses

    import train_ddp

    sides.keep_freed_memory()
    student = SentenceTransformer("student", device="cpu")
    student[0].auto_model.pooler.requires_grad_(False)  # nothing uses it
    rows = [json.loads(line) for line in Path("train.jsonl").read_text().splitlines()]
    queries = [row["query"] for row in rows]
    documents = [row["positive"] for row in rows]
    pairs = [f"{query}\n{document}" for query, document in zip(queries, documents, strict=True)]
    texts = list(dict.fromkeys(queries + documents))
    vectors = train_ddp.lsa_vectors([("document", text) for text in texts], pairs)
    vectors = vectors[:, : student.get_embedding_dimension()].astype(np.float32)
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-6)
    phases = [
        (
            Dataset.from_dict({"sentence": texts}).add_column("label", list(vectors)),
            losses.EmbedDistillLoss(student, distance_metric="cosine"),
            texts,
        ),
        (
            Dataset.from_dict({"anchor": queries, "positive": documents}),
            losses.MultipleNegativesRankingLoss(student, scale=50.0),
            pairs,
        ),
    ]
    for (data, loss, texts), lr in zip(phases, rates, strict=True):
        ids = student.tokenizer(texts, truncation=True, max_length=2 * LENGTH)["input_ids"]
        lengths = torch.tensor([len(tokens) for tokens in ids])
        settings = Arguments(
            output_dir=f"{out}/trainer",
            per_device_train_batch_size=BATCH,
            learning_rate=lr,
            warmup_steps=0.1,
            max_steps=steps,
            seed=seed,
            batch_sampler=bench_train_ddp.similar_lengths(lengths, BATCH, 1),
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        names = {"model": student, "args": settings, "train_dataset": data, "loss": loss}
        SentenceTransformerTrainer(**names).train()
    student.save(f"{out}/saved/student", create_model_card=False)


def run_sides(folder, steps, seed, rates):
    """Both at the same time. Returns {side: (seconds, folder of the saved student)}."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    began = time.monotonic()
    running = {}
    for core, (side, count) in zip(np.roll(cores, seed), steps.items(), strict=True):
        out = folder / f"{side}-{count}-{seed}"
        command = command_of(side, out, count, seed, rates)
        log = folder / f"{side}.log"
        (process,) = sides.start_ranks(1, command, folder, log, OMP_NUM_THREADS="1")
        os.sched_setaffinity(process.pid, {int(core)})
        running[side] = process, out, log
    found = {}
    while len(found) < len(running):
        time.sleep(0.05)
        for side, (process, out, log) in running.items():
            if side not in found and process.poll() is not None:
                if process.returncode != 0:
                    sys.exit(log.read_text()[-3000:])
                (saved,) = (out / "saved").iterdir()
                found[side] = time.monotonic() - began, saved
    return found


def ndcg(saved, rows):
    """By sentence-transformers' own evaluator."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

    queries = {str(number): row["query"] for number, row in enumerate(rows)}
    documents = {str(number): row["positive"] for number, row in enumerate(rows)}
    relevant = {number: {number} for number in queries}
    evaluator = InformationRetrievalEvaluator(queries, documents, relevant)
    return evaluator(SentenceTransformer(str(saved), device="cpu"))["cosine_ndcg@10"]


def fit_steps(folder, rates):
    """{side: (seconds of start and end, seconds of a step of both phases)}"""
    few, many = (
        run_sides(folder, dict.fromkeys(["ours", "it"], count), 0, rates) for count in PROBE
    )
    costs = {}
    for side in few:
        step = (many[side][0] - few[side][0]) / (PROBE[1] - PROBE[0])
        costs[side] = few[side][0] - PROBE[0] * step, step
    return costs


def main():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    add = parser.add_argument
    add("--minutes", type=float, nargs="+", default=[1, 2, 4])
    add("--seeds", type=int, nargs="+", default=[1, 2, 3])
    add("--rates", type=float, nargs=2, default=[8e-3, 4e-3], help="of the Trainer, both phases")
    add("--layers", type=int, default=1, help="of the student [1]")
    add("--width", type=int, default=128, help="of the student [128]")
    add("--part", choices=["dev", "test"], default="test", help="what the figures are of [test]")
    add("--port", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.port is not None:
        train_with_trainer(**args.port)
        return
    with sides.workplace() as folder:
        parts = prepare(folder, args.layers, args.width)
        costs = fit_steps(folder, args.rates)
        for side, (start, step) in costs.items():
            print(f"{side}: {start:.1f} s, and {1000 * step:.0f} ms for a step of both phases")
        sides.print_head("minutes", "side", "steps", "seconds", "ndcg@10", "mean")
        for minutes in args.minutes:
            steps = {}
            for side, (start, step) in costs.items():
                steps[side] = max(1, round((60 * minutes - start) / step))
            rounds = [run_sides(folder, steps, seed, args.rates) for seed in args.seeds]
            for side, count in steps.items():
                seconds = ", ".join(f"{found[side][0]:.0f}" for found in rounds)
                values = [ndcg(found[side][1], parts[args.part]) for found in rounds]
                figures = ", ".join(f"{value:.3f}" for value in values)
                row = [f"{minutes:g}", side, count, seconds, figures]
                sides.print_row(*row, f"{statistics.mean(values):.3f}")


if __name__ == "__main__":
    main()
