"""Training steps of train_ddp.py beside the program that it replaces and beside the Trainer of
sentence-transformers.

    pip install "accelerate>=1.10"
    python benchmarks/bench_train_ddp.py
    python benchmarks/bench_train_ddp.py --rounds 1 --rows 300 --batch 8

The same student, texts, batch, processes (two, one thread each, under torchrun) and fp32 on a CPU.
The student is a BERT with random weights in the shape of 3 layers of all-MiniLM (384 wide), the
teacher one of 6 layers: what they cost is real, what they know does not matter. The texts are the
documentation that comes with Python. Each side runs --epochs epochs; the first warms up. In each
round all sides run, one after the other; ratios are of the same round.

ours         train_ddp.py; phase 1 by the cosine alone, phase 2 by InfoNCE alone
replaced     the same of the program that it replaces (commit e7785a5)
default      SentenceTransformerTrainer as its documentation writes it: EmbedDistillLoss (cosine),
             MultipleNegativesRankingLoss with negatives from all ranks
best         the Trainer with what we found to help it: texts of similar length share a batch, and
             the C library keeps freed memory, as in train_ddp.py

--teacher also measures three epochs of phase 1 in wall seconds, with start and the teacher. Its
vectors are computed once by all ranks here and in best; in default by `Dataset.map`, by each.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import sides

LENGTH = 128
OPTIONS = f"""--use_projection=False --student_max_length={LENGTH} --teacher_max_length={LENGTH}
    --eval_samples=50 --phase1_l2_weight=0 --phase1_cosine_weight=1 --phase2_l2_weight=0
    --infonce_weight=1 --false_negative_margin=2 --phase1_lr=2e-5 --phase2_lr=2e-5 --device=cpu
    --wandb_mode=disabled --log_every=5 --eval_every=1000000 --save_every=1000000""".split()
OTHERS = {  # side: what the tables call it
    "replaced": sides.REPLACED,
    "default": "SentenceTransformerTrainer, default",
    "best": "SentenceTransformerTrainer, at its best",
}
LOSSES = {1: "EmbedDistillLoss", 2: "MultipleNegativesRankingLoss"}


# ---- A run of a side: (samples per second after the first epoch, wall seconds) -------------------


def run_script(args, work, side, phase, epochs, cache):
    """train_ddp.py, of this folder or of the program replaced."""
    program = sides.ROOT if side == "ours" else work / "worktree"
    out = work / side
    shutil.rmtree(out, ignore_errors=True)
    command = [program / "train_ddp.py", *OPTIONS, f"--skip_phase{3 - phase}"]
    command += [f"--phase{number}_data={work}/pairs.jsonl" for number in (1, 2)]
    command += [f"--student_model={work}/student", f"--teacher_model={work}/teacher"]
    command += [f"--phase{phase}_epochs={epochs}", f"--batch_size={args.batch}"]
    command += [f"--cache_dir={cache}", f"--output_dir={out}"]
    wall = sides.torchrun(args.nproc, 1, command, work / f"{side}.log", work)
    speeds = []
    for line in (out / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        speed = row.get("samples_per_s", row.get("samples/s"))
        if speed is not None:
            speeds.append(speed)
    if epochs > 1:
        speeds = speeds[len(speeds) // epochs :]
    return statistics.harmonic_mean(speeds), wall


def run_trainer(args, work, side, phase, epochs, cache):
    result = work / "result.json"
    command = [Path(__file__).resolve(), "--side", side, "--work", work, "--phase", phase]
    command += ["--epochs", epochs, "--batch", args.batch, "--result", result]
    if cache is not None:
        command += ["--cache", cache]
    wall = sides.torchrun(args.nproc, 1, command, work / f"{side}.log", work)
    return json.loads(result.read_text())["samples_per_s"], wall


def run_side(args, work, side, phase, epochs, cache):
    if side in ("ours", "replaced"):
        return run_script(args, work, side, phase, epochs, cache)
    return run_trainer(args, work, side, phase, epochs, cache)


# ---- The Trainer, in each of its processes -------------------------------------------------------


def similar_lengths(lengths):
    """A batch sampler for the Trainer: texts of similar length together, 50 batches at a time."""
    import torch
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
    sys.path.insert(0, str(sides.ROOT))
    import train_ddp

    train_ddp.keep_freed_memory()


def trainer(args):
    """One training of SentenceTransformerTrainer. (each rank runs this)"""
    import numpy as np
    import torch
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
    from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
    from sentence_transformers.sentence_transformer import losses
    from transformers import TrainerCallback

    student = SentenceTransformer(str(args.work / "student"), device="cpu")
    rows = [json.loads(line) for line in open(args.work / "pairs.jsonl")]
    queries = [row["query"] for row in rows]
    documents = [row["positive"] for row in rows]
    if args.phase == 1:
        texts = list(dict.fromkeys(queries + documents))
        data = Dataset.from_dict({"sentence": texts})
        if args.cache is not None:
            data = data.add_column("label", list(np.load(args.cache / "trainer.npy")))
        else:
            teacher = SentenceTransformer(str(args.work / "teacher"), device="cpu")
            data = data.map(
                lambda rows: {"label": teacher.encode(rows["sentence"]).tolist()}, batched=True
            )
        loss = losses.EmbedDistillLoss(student, distance_metric="cosine")
    else:
        texts = [query + document for query, document in zip(queries, documents, strict=True)]
        data = Dataset.from_dict({"anchor": queries, "positive": documents})
        loss = losses.MultipleNegativesRankingLoss(student, scale=50.0, gather_across_devices=True)
    options = {}
    if args.side == "best":
        keep_freed_memory()
        ids = student.tokenizer(texts, truncation=True, max_length=2 * LENGTH)["input_ids"]
        options["batch_sampler"] = similar_lengths(torch.tensor([len(tokens) for tokens in ids]))

    class Clock(TrainerCallback):
        """Steps and seconds after the first epoch, as on the other sides."""

        def on_step_end(self, settings, state, control, **others):
            now = time.monotonic()
            if state.global_step == state.max_steps // args.epochs:
                self.begin = now
                self.first = state.global_step
            self.end = now
            self.last = state.global_step

    clock = Clock()
    settings = Arguments(
        output_dir=str(args.work / "trainer"),
        per_device_train_batch_size=args.batch,
        learning_rate=2e-5,
        warmup_steps=0.1,
        num_train_epochs=args.epochs,
        dataloader_drop_last=True,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )
    names = {"model": student, "args": settings, "train_dataset": data, "loss": loss}
    SentenceTransformerTrainer(**names, callbacks=[clock]).train()
    if int(os.environ["RANK"]) == 0:
        samples = (clock.last - clock.first) * args.batch * int(os.environ["WORLD_SIZE"])
        speed = samples / (clock.end - clock.begin)
        args.result.write_text(json.dumps({"samples_per_s": speed}))
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # while its objects live, gloo's threads abort some processes that have ended well


def encode_once(args):
    """Teacher vectors of the Trainer's texts in one file, computed by all ranks. (each rank)"""
    import numpy as np
    import torch.distributed as dist
    from sentence_transformers import SentenceTransformer

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    rows = [json.loads(line) for line in open(args.work / "pairs.jsonl")]
    texts = [row["query"] for row in rows] + [row["positive"] for row in rows]
    texts = list(dict.fromkeys(texts))
    teacher = SentenceTransformer(str(args.work / "teacher"), device="cpu")
    mine = teacher.encode(texts[rank::world_size])
    parts = [None] * world_size
    dist.all_gather_object(parts, mine)
    if rank == 0:
        vectors = np.zeros((len(texts), mine.shape[1]), np.float32)
        for number, part in enumerate(parts):
            vectors[number::world_size] = part
        np.save(args.cache / "trainer.npy", vectors)
    dist.barrier()
    os._exit(0)


# ---- All sides, in turns -------------------------------------------------------------------------


def prepare(args, work):
    """pairs.jsonl, the models, and the caches that the steps alone start from."""
    tool = sides.ROOT / "tools" / "make_builtin_models.py"
    texts = [sys.executable, tool, "pydocs", "--out", work / "pydocs"]
    subprocess.run(texts, check=True, stdout=subprocess.DEVNULL)
    lines = (work / "pydocs" / "pairs.jsonl").read_text().splitlines()[: args.rows]
    (work / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    tool = sides.ROOT / "tools" / "prepare_texts.py"
    command = [sys.executable, tool, f"--phase2_data={work}/pairs.jsonl", f"--out={work}/texts"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    for name, size in {"student": "3x384", "teacher": "6x384"}.items():
        command = [sys.executable, sides.ROOT / "tools" / "make_builtin_models.py", "bert"]
        command += ["--texts", work / "texts", "--size", size, "--length", str(LENGTH)]
        subprocess.run([*command, "--out", work / name], check=True, stdout=subprocess.DEVNULL)
    (work / "cache").mkdir()
    encode_for_trainer(args, work, work / "cache")
    for side in ("ours", "replaced"):
        run_script(args, work, side, 1, 1, work / "cache")


def encode_for_trainer(args, work, cache):
    command = [Path(__file__).resolve(), "--side", "encode", "--work", work, "--cache", cache]
    return sides.torchrun(args.nproc, 1, command, work / "encode.log", work)


def print_rows(work, unit, found):
    """A row for each side beside ours; returns the records."""
    records = []
    mine = found["ours"]
    for side, name in OTHERS.items():
        theirs = found[side]
        rounds = sides.compare(work, name, unit, mine, theirs)
        cells = [sides.spread(mine, 1), sides.spread(theirs, 1)]
        sides.print_row(work, name, *cells, sides.spread(sides.ratios(rounds), 2))
        records += rounds
    return records


def steps_alone(args, work):
    records = []
    sides.print_head("samples/s, steps alone", "beside", "ours", "it", "ratio")
    for phase, loss in LOSSES.items():

        def turn(side, phase=phase):
            return run_side(args, work, side, phase, args.epochs, work / "cache")[0]

        found = sides.in_rounds(["ours", *OTHERS], args.rounds, turn, warm_up=False)
        records += print_rows(f"phase {phase}: {loss}", "samples/s", found)
    return records


def with_teacher(args, work):
    """Three epochs of phase 1, each side from an empty cache."""
    print()
    sides.print_head("wall seconds, with the teacher", "beside", "ours", "it", "ratio")

    def turn(side):
        cache = work / "empty-cache"
        shutil.rmtree(cache, ignore_errors=True)
        cache.mkdir()
        seconds = 0.0
        if side == "best":
            seconds = encode_for_trainer(args, work, cache)
        if side == "default":
            cache = None
        return seconds + run_side(args, work, side, 1, 3, cache)[1]

    found = sides.in_rounds(["ours", *OTHERS], args.teacher, turn, warm_up=False)
    return print_rows("three epochs of phase 1", "seconds", found)


def parse_args():
    parser = sides.make_parser(__doc__)
    add = parser.add_argument
    add("--rounds", type=int, default=5, help="turns of each side")
    add("--nproc", type=int, default=2, help="processes of each side")
    add("--epochs", type=int, default=2, help="of a turn; all but the first are measured")
    add("--rows", type=int, default=3000, help="queries with a document")
    add("--batch", type=int, default=64, help="samples per process and step")
    add("--teacher", type=int, nargs="?", const=1, default=0, metavar="ROUNDS", help="see above")
    add("--side", default="", help=argparse.SUPPRESS)  # this and the rest: a process of the Trainer
    for name in ("--work", "--cache", "--result"):
        add(name, type=Path, help=argparse.SUPPRESS)
    add("--phase", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.epochs < 2 and not args.side:
        parser.error(f"--epochs {args.epochs}: expected 2 or more, the first warms up")
    return args


def main():
    args = parse_args()
    if args.side == "encode":
        encode_once(args)
    elif args.side:
        trainer(args)
    with sides.workplace() as work:
        prepare(args, work)
        text = f"batch {args.batch} each, {args.rows} rows, {args.rounds} rounds"
        print(f"{args.nproc} processes x 1 thread, {text}\n")
        records = steps_alone(args, work)
        if args.teacher:
            records += with_teacher(args, work)
    sides.write_json(args.json, records)


if __name__ == "__main__":
    main()
