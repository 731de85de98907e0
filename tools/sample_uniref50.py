"""Draw protein sequences from a network of run_train_uniref50_ddp.py.

    python tools/sample_uniref50.py experiments_ddp/best.pt --out samples.fasta
    python tools/sample_uniref50.py experiments_ddp/best.pt --count 100 --length 120 --steps 60
    python tools/sample_uniref50.py experiments_ddp/best.pt --infill motifs.fasta --count 4
    python tools/sample_uniref50.py experiments_ddp/best.pt --compare input_data/uniref50

Methods. rigorous: samples of the model. With --steps 0 residues appear one by one, which is exact;
with N steps several appear together, each drawn by itself, which is faster and close. simple: the
surest residues first (MaskGIT, Chang et al. 2022). It is fast, but its law is another one: of a
network that had learned its data to 2 % of their entropy, motifs came 2.3 times too often, and the
samples were 0.5 nats per residue too sharp. --temperature other than 1 changes the law, too.

--infill FILE: FASTA; each `?` of a record is drawn, --count times, given the other residues.

--compare FOLDER (of tools/prepare_uniref50.py) prints how far the samples are from 2,000 sequences
there that the network was trained on: 1mer_js, 2mer_js, 3mer_js (Jensen-Shannon divergences of
words of one, two and three residues, in nats), repeats (share of residues in runs of four or more),
uniqueness (share of distinct samples).
"""

import argparse
import gzip
import os
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np
import torch
from tqdm import tqdm

from run_train_uniref50_ddp import (
    BEGIN,
    END,
    FIRST,
    FORMAT,
    KINDS,
    MASK,
    RESIDUES,
    Denoiser,
    InputError,
    Parser,
    Proteins,
    RunError,
    choose_device,
    count,
    draw_lengths,
    draw_sequences,
    empty_template,
    is_whole,
    load_checkpoint,
    write_fasta,
)

SCRIPT = "run_train_uniref50_ddp.py"
REFERENCE = 2000  # training sequences that samples are compared with


def parse_args(words=None):
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("checkpoint", type=Path, help="best.pt or latest.pt of a run")
    add("--out", type=Path, default=Path("samples.fasta"), help="file to write")
    add("--count", type=count, default=16, help="samples; with --infill of each record")
    add("--length", type=int, default=0, help="residues; 0: as in the training data")
    add("--infill", type=Path, help="FASTA (or .gz) whose `?` are drawn")
    add("--method", default="rigorous", choices=["rigorous", "simple"], help="see above")
    add("--steps", type=int, default=0, help="network calls per batch; 0: one per residue")
    add("--temperature", type=float, default=1.0, help="of the predictions")
    add("--seed", type=int, default=0, help="sample i depends on (seed, i) alone")
    add("--batch_size", type=count, default=16, help="sequences per network call")
    add("--device", default="auto", choices=["auto", "cuda", "xpu", "cpu"], help="auto: the best")
    add("--compare", type=Path, metavar="FOLDER", help="folder of the training data")
    args = parser.parse_args(words)
    if min(args.length, args.steps, args.seed) < 0:
        parser.error("--length, --steps, --seed: expected 0 or more")
    if args.temperature <= 0:
        parser.error(f"--temperature {args.temperature}: must be above 0")
    if args.infill is not None and args.length > 0:
        parser.error("--length and --infill: give one of the two")
    if not args.out.parent.is_dir():
        parser.error(f"--out {args.out}: there is no folder {args.out.parent}")
    if args.out.exists():
        parser.error(f"{args.out} exists: give another --out")
    return args


def load(path, device):
    """(network with its averaged weights, checkpoint)"""
    if not is_whole(path):
        raise InputError(
            f"{path} is not there, or is damaged: expected best.pt or latest.pt of a run"
        )
    state = load_checkpoint(path)
    if state.get("script") != SCRIPT or state.get("format") != FORMAT:
        raise InputError(f"{path} is no checkpoint of {SCRIPT}, format {FORMAT}")
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model = Denoiser(argparse.Namespace(**state["args"]), dtype)
    with torch.no_grad():
        for parameter, average in zip(model.parameters(), state["average"], strict=True):
            parameter.copy_(average)
    return model.eval().to(device), state


def read_templates(path, copies, most):
    """(templates, names): `copies` of each record of a FASTA file, `?` to be drawn."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="ascii", errors="replace") as file:
        before, *records = ("\n" + file.read()).split("\n>")
    if before.strip() or not records:
        raise InputError(f"{path}: expected FASTA, with `>` as its first character")
    tokens = {letter: FIRST + number for number, letter in enumerate(RESIDUES)}
    tokens["?"] = MASK
    templates = []
    names = []
    for number, record in enumerate(records, start=1):
        header, _, text = record.partition("\n")
        name = (header.split() or [f"record_{number}"])[0]
        text = "".join(text.split()).upper()
        wrong = sorted(set(text) - set(tokens))
        if wrong:
            raise InputError(
                f"{path}: {name} has {''.join(wrong)[:12]!r}; expected residues and `?`"
            )
        if "?" not in text:
            raise InputError(f"{path}: {name} has no `?`: there is nothing to draw")
        if len(text) > most:
            raise InputError(
                f"{path}: {name} has {len(text)} residues; the network knows at most {most}"
            )
        template = [BEGIN, *[tokens[letter] for letter in text], END]
        for copy in range(1, copies + 1):
            templates.append(np.array(template, np.uint8))
            names.append(f"{name}/{copy}")
    return templates, names


def make_templates(args, state):
    """(templates, names) of --infill, of --length, or of lengths as in the training data."""
    most = state["args"]["max_protein_len"] - 2
    if args.infill is not None:
        return read_templates(args.infill, args.count, most)
    if args.length > most:
        raise InputError(
            f"--length {args.length}: the network was trained on at most {most} residues"
        )
    lengths = draw_lengths(state["lengths"], args.count, args.seed, most)
    if args.length > 0:
        lengths[:] = args.length
    names = [f"sample_{number}" for number in range(args.count)]
    return [empty_template(length) for length in lengths], names


def draw(args, model, templates, device):
    """A sequence of tokens for each template."""

    def predict(batch):
        return model(batch) / args.temperature

    # batches of similar length: short ones need fewer steps
    order = sorted(range(len(templates)), key=lambda i: len(templates[i]))
    found = {}
    for start in range(0, len(order), args.batch_size):
        numbers = order[start : start + args.batch_size]
        title = f"{start + len(numbers)}/{len(order)} samples"
        progress = partial(tqdm, desc=title, unit=" steps", disable=None, leave=False)
        batch = [templates[i] for i in numbers]
        how = (args.method, args.steps, args.seed)
        sequences = draw_sequences(predict, batch, numbers, device, *how, progress)
        found.update(zip(numbers, sequences, strict=True))
    return [found[i] for i in range(len(templates))]


# ---- Comparison ------------------------------------------------------------------------------


def count_words(sequences, length):
    """How often each word of so many residues occurs: (26 ** length,)."""
    counts = np.zeros(KINDS**length, np.int64)
    for sequence in sequences:
        if len(sequence) >= length:
            words = np.lib.stride_tricks.sliding_window_view(sequence, length)
            numbers = words @ KINDS ** np.arange(length)
            counts += np.bincount(numbers, minlength=len(counts))
    return counts


def kl(p, q):
    """Kullback-Leibler divergence of two laws, in nats."""
    inside = p > 0
    return float((p[inside] * np.log(p[inside] / q[inside])).sum())


def in_runs(sequence, least=4):
    """Residues that stand in runs of the same one."""
    edges = np.flatnonzero(np.diff(sequence, prepend=-1, append=-1))
    runs = np.diff(edges)
    return int(runs[runs >= least].sum())


def compare(ours, theirs):
    """Metrics of samples against training sequences, both as arrays of numbers from 0 to 25."""
    metrics = {}
    for length in (1, 2, 3):
        counts = [count_words(group, length) for group in (ours, theirs)]
        if counts[0].sum() == 0 or counts[1].sum() == 0:  # all are shorter
            continue
        p, q = [count / count.sum() for count in counts]
        middle = (p + q) / 2
        metrics[f"{length}mer_js"] = (kl(p, middle) + kl(q, middle)) / 2
    metrics["repeats"] = sum(map(in_runs, ours)) / sum(map(len, ours))
    metrics["uniqueness"] = len({sequence.tobytes() for sequence in ours}) / len(ours)
    return metrics


def read_reference(folder, number):
    """Evenly spaced training sequences of a folder, as numbers from 0 to 25."""
    if not (folder / "meta.json").exists():
        raise InputError(f"--compare {folder}: no folder of tools/prepare_uniref50.py")
    proteins = Proteins(folder, "train", 0)
    found = []
    for row in np.linspace(0, len(proteins) - 1, min(len(proteins), number)).astype(int):
        start, end = proteins.offsets[row : row + 2]
        found.append(proteins.tokens[start + 1 : end - 1].astype(np.int64) - FIRST)
    return found


def run(args):
    device = choose_device(args, local_rank=0)
    model, state = load(args.checkpoint, device)
    templates, names = make_templates(args, state)
    reference = read_reference(args.compare, REFERENCE) if args.compare else []
    sequences = draw(args, model, templates, device)
    new = args.out.with_name(f"{args.out.name}.tmp")
    names = [f"{name} method={args.method} seed={args.seed}" for name in names]
    write_fasta(new, sequences, names)
    os.replace(new, args.out)
    print(f"{args.out}: {len(sequences):,} sequences, of step {state['step']}")
    if reference:
        ours = [tokens[1:-1].astype(np.int64) - FIRST for tokens in sequences]
        for name, value in compare(ours, reference).items():
            print(f"{name:12} {value:.4f}")


def main():
    try:
        run(parse_args())
    except (RunError, OSError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, InputError) else 1)


if __name__ == "__main__":
    main()
