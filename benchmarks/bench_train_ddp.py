"""train_ddp.py beside sentence-transformers' own Trainer: same student, texts, batch, steps, processes, threads.

    pip install "accelerate>=1.10" && python benchmarks/bench_train_ddp.py [--rounds 3] [--measured 1] [--epochs]

The student is a random BERT in the shape of 3 layers of all-MiniLM (384 wide), the teacher one of 6 layers: what
they cost is real, what they know does not matter here. Texts: the documentation that comes with Python. Phase 1 is
EmbedDistillLoss (cosine) there, phase 2 MultipleNegativesRankingLoss with negatives from all ranks; the same losses
here. Both sides run in fp32 under torchrun with one thread per process. The rounds alternate. Two tables:
  steps alone: samples per second of the training loop, both sides with the teacher vectors at hand. The first epoch
  warms up; whole ones after it are measured, as texts of about the same length come together on our side, and a few
  steps would be of the short ones, or of the long;
  three epochs: wall time of phase 1 over three epochs with each side getting the teacher's vectors its documented
  way: `Dataset.map(teacher.encode)` in every process there, the block cache shared by the ranks here.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STUDENT, TEACHER, LENGTH = "builtin:bert:3x384", "builtin:bert:6x384", 128


def options(work: Path) -> list[str]:
    """The common arguments of train_ddp.py."""
    return [
        "--phase1_data=pydocs", "--phase2_data=pydocs", f"--teacher_model={TEACHER}", f"--student_model={STUDENT}",
        f"--student_max_length={LENGTH}", f"--teacher_max_length={LENGTH}", "--use_projection=False",
        "--max_chars=2000", "--eval_samples=50",
        "--phase1_l2_weight=0", "--phase1_cosine_weight=1", "--phase2_l2_weight=0",
        "--infonce_weight=1", "--false_negative_margin=2", "--phase1_lr=2e-5", "--phase2_lr=2e-5",
        "--wandb_mode=disabled", f"--cache_dir={work / 'cache'}", "--log_every=1", "--eval_every=1000000",
        "--save_every=1000000", "--device=cpu",
    ]  # fmt: skip


def torchrun(nproc: int, command: list[str], log: Path) -> float:
    """Run under torchrun with one thread per process; seconds of wall time. Raises if it fails."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    begin = time.monotonic()
    with open(log, "w") as file:
        call = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}", *command]
        status = subprocess.run(call, env=env, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT).returncode
    if status:  # the ranks' own last words, before torchrun's
        said = log.read_text().partition("] failed (exitcode: ")[0]
        sys.exit(f"exit status {status}: see {log}\n" + "\n".join(said.splitlines()[-40:]))
    return time.monotonic() - begin


def ours(args: argparse.Namespace, work: Path, name: str, phase: int, extra: list[str]) -> tuple[float, float]:
    """(samples per second of the loop after the first epoch, wall seconds) of one phase of train_ddp.py."""
    folder, other = work / "out" / name, 3 - phase
    shutil.rmtree(folder, ignore_errors=True)
    rows = [f"--max_samples_phase{p}={args.rows}" for p in (1, 2)]
    command = ["train_ddp.py", *options(work), *rows, f"--skip_phase{other}", f"--output_dir={folder}", *extra]
    wall = torchrun(args.nproc, [*command, f"--batch_size={args.batch}"], work / f"{name}.log")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    speeds = [row["samples/s"] for row in rows if "samples/s" in row]  # of every step, all of one size
    return statistics.harmonic_mean(speeds[len(speeds) // (1 + args.measured) :] or [0.0]), wall


def theirs(args: argparse.Namespace, work: Path, name: str, phase: int, extra: list[str]) -> tuple[float, float]:
    """The same of SentenceTransformerTrainer, in a process of its own."""
    result = work / f"{name}.json"
    command = [str(Path(__file__).resolve()), "--role=trainer", f"--work={work}", f"--result={result}"]
    wall = torchrun(args.nproc, [*command, f"--phase={phase}", f"--batch={args.batch}", *extra], work / f"{name}.log")
    return json.loads(result.read_text())["samples_per_s"], wall


def trainer(args: argparse.Namespace) -> None:
    """One training of SentenceTransformerTrainer, as its documentation writes it. (every rank runs this)"""
    import numpy as np
    import sentence_transformers as st
    import torch
    from datasets import Dataset
    from sentence_transformers.sentence_transformer import losses
    from transformers import TrainerCallback

    sys.path.insert(0, str(ROOT))
    import train_ddp

    corpus = next(args.work.glob("cache/corpus-*"))
    texts = train_ddp.Corpus(corpus)
    models = json.loads((args.work / "models.json").read_text())
    student = st.SentenceTransformer(models["student"], device="cpu")
    if args.phase == 1:
        rows = np.load(corpus / "phase1.npy")
        data = Dataset.from_dict({"sentence": [texts.text(i) for i in rows]})
        if args.encode:
            teacher = st.SentenceTransformer(models["teacher"], device="cpu")
            data = data.map(lambda b: {"label": teacher.encode(b["sentence"]).tolist()}, batched=True)
        else:
            vectors = np.load(next(args.work.glob("cache/teacher-*")) / "vectors.npy")[rows].astype(np.float32)
            data = data.add_column("label", list(vectors))
        loss = losses.EmbedDistillLoss(student, distance_metric="cosine")
    else:
        columns = {"anchor": "queries", "positive": "positives"}
        data = Dataset.from_dict({c: [texts.text(i) for i in np.load(corpus / f"{a}.npy")] for c, a in columns.items()})
        loss = losses.MultipleNegativesRankingLoss(student, scale=50.0, gather_across_devices=True)
    settings = st.SentenceTransformerTrainingArguments(
        output_dir=str(args.work / "trainer"), per_device_train_batch_size=args.batch, learning_rate=2e-5,
        warmup_steps=0.1, save_strategy="no", logging_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
        dataloader_drop_last=True, num_train_epochs=1 + args.measured,
    )  # fmt: skip

    class Clock(TrainerCallback):
        """Steps and seconds after the first epoch, as on the other side."""

        def on_step_end(self, settings, state, control, **_):
            if state.global_step == state.max_steps // (1 + args.measured):
                self.begin, self.first = time.monotonic(), state.global_step
            self.end, self.last = time.monotonic(), state.global_step

    clock = Clock()
    names = {"model": student, "args": settings, "train_dataset": data, "loss": loss}
    st.SentenceTransformerTrainer(**names, callbacks=[clock]).train()
    if int(os.environ.get("RANK", 0)) == 0:
        samples = (clock.last - clock.first) * args.batch * int(os.environ.get("WORLD_SIZE", 1))
        args.result.write_text(json.dumps({"samples_per_s": samples / (clock.end - clock.begin)}))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # while its objects live, gloo's threads abort some processes that have ended well


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def rounds_of(work: str, other: str, unit: str, mine: list[float], theirs: list[float], ratios: list[float]) -> list:
    """What --json writes of a comparison, in every benchmark alike: a record for each round."""
    rows = zip(mine, theirs, ratios, strict=True)
    return [{"work": work, "with": other, "unit": unit, "ours": a, "other": b, "ratio": r} for a, b, r in rows]


def compare(args: argparse.Namespace, work: Path) -> list[dict]:
    """Both sides in alternation; prints the tables. Returns the rounds."""
    other_side, found = "SentenceTransformerTrainer", []
    ours(args, work, "warm", 1, ["--max_steps=1"])  # builds models, tokens and vectors that both sides use
    builtin = sorted(work.glob("cache/builtin-bert-*"), key=lambda p: (p / "model.safetensors").stat().st_size)
    (work / "models.json").write_text(json.dumps({"student": str(builtin[0]), "teacher": str(builtin[1])}))
    print(f"{args.nproc} processes x 1 thread, batch {args.batch} each, {args.measured} measured epoch(s) of "
          f"{args.rows} entries, {args.rounds} rounds\n")  # fmt: skip
    print("| samples/s, steps alone | train_ddp.py | SentenceTransformerTrainer | ratio |\n|---|---|---|---|")
    for phase, loss in ((1, "EmbedDistillLoss"), (2, "MultipleNegativesRankingLoss")):
        mine, other, epochs = [], [], f"--phase{phase}_epochs={1 + args.measured}"
        for i in range(args.rounds):
            mine.append(ours(args, work, f"ours{phase}-{i}", phase, [epochs])[0])
            other.append(theirs(args, work, f"theirs{phase}-{i}", phase, [f"--measured={args.measured}"])[0])
        ratio = [a / b for a, b in zip(mine, other, strict=True)]
        print(f"| phase {phase}: {loss} | {spread(mine)} | {spread(other)} | {spread(ratio)} |", flush=True)
        found += rounds_of(f"phase {phase}: {loss}", other_side, "samples/s", mine, other, ratio)
    mine, other = [], []
    for i in range(args.epochs):
        for folder in work.glob("cache/teacher-*"):
            shutil.rmtree(folder)
        mine.append(ours(args, work, f"ours-epochs{i}", 1, ["--phase1_epochs=3"])[1])
        other.append(theirs(args, work, f"theirs-epochs{i}", 1, ["--measured=2", "--encode"])[1])
    if args.epochs:
        name, ratio = "three epochs with the teacher", [b / a for a, b in zip(mine, other, strict=True)]
        print(f"\n| wall seconds, {name} | {spread(mine)} | {spread(other)} | {spread(ratio)} |")
        found += rounds_of(name, other_side, "seconds", mine, other, ratio)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2, help="processes of both sides")
    parser.add_argument("--rounds", type=int, default=3, help="alternating runs of both sides")
    parser.add_argument("--measured", type=int, default=1, metavar="EPOCHS", help="measured epochs, after the first")
    parser.add_argument("--rows", type=int, default=3000, help="documentation entries that are read")
    parser.add_argument("--batch", type=int, default=64, help="samples per process and step")
    parser.add_argument("--epochs", type=int, nargs="?", const=1, default=0, metavar="ROUNDS",
                        help="also three epochs with the teacher (minutes), once or in ROUNDS rounds")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rounds there")
    parser.add_argument("--role", default="compare", choices=("compare", "trainer"), help=argparse.SUPPRESS)
    for name in ("--work", "--result"):
        parser.add_argument(name, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--phase", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--encode", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measured < 1:
        parser.error(f"--measured {args.measured}: at least 1 epoch after the first is measured")
    if args.role == "trainer":
        return trainer(args)
    with tempfile.TemporaryDirectory() as work:
        found = compare(args, args.work or Path(work))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
