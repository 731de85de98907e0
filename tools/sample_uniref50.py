"""Draw protein sequences from a network of run_train_uniref50_ddp.py.

    python tools/sample_uniref50.py experiments_ddp/best.pt --out samples.fasta
    python tools/sample_uniref50.py experiments_ddp/best.pt --count 100 --length 120 --steps 60
    python tools/sample_uniref50.py experiments_ddp/best.pt --infill motifs.fasta --count 4
    python tools/sample_uniref50.py experiments_ddp/best.pt --compare input_data/uniref50

Methods. rigorous: samples of the model. With --steps 0 residues appear one by one, which is exact;
with N steps several appear together, each drawn by itself, which is faster and close. simple: the
surest residues first (MaskGIT, Chang et al. 2022). It is fast, but its law is another one: of a
network that had learned its data to 2 % of their entropy, motifs came 2.3 times too often, and the
samples were 0.5 nats per residue too sharp. --temperature and --top_p other than 1 change the law,
too.

--infill FILE: FASTA; each `?` of a record is drawn, --count times, given the other residues.

--compare FOLDER (of tools/prepare_uniref50.py) prints how far the samples are from the sequences
there that the network was trained on: residue_kl, residue_js, 2mer_js, 3mer_js (divergences in
nats), length_wasserstein (residues), repeats (share of residues in runs of four or more),
uniqueness (share of distinct samples), identity_mean and identity_max (best match with one of
2,000 training sequences without gaps, as a share of the shorter one).
"""

import argparse
import gzip
import json
import os
import sys
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
    Proteins,
    RunError,
    Sampling,
    as_text,
    choose_device,
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
    parser = Parser(description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("checkpoint", type=Path, help="best.pt or latest.pt of a run")
    add("--out", type=Path, default=Path("samples.fasta"), help="file to write")
    add("--count", type=int, default=16, help="samples; with --infill of each record")
    add("--length", type=int, default=0, help="residues; 0: as in the training data")
    add("--infill", type=Path, help="FASTA (or .gz) whose `?` are drawn")
    add("--method", default="rigorous", choices=["rigorous", "simple"], help="see above")
    add("--steps", type=int, default=0, help="network calls per batch; 0: one per residue")
    add("--temperature", type=float, default=1.0, help="of the predictions")
    text = "draw from the likeliest residues of so much probability"
    add("--top_p", type=float, default=1.0, help=text)
    add("--seed", type=int, default=0, help="sample i depends on (seed, i) alone")
    add("--batch_size", type=int, default=16, help="sequences per network call")
    add("--device", default="auto", choices=["auto", "cuda", "xpu", "cpu"], help="auto: the best")
    add("--compare", type=Path, metavar="FOLDER", help="folder of the training data")
    args = parser.parse_args(words)
    if args.count < 1 or args.batch_size < 1:
        parser.error("--count, --batch_size: expected 1 or more")
    if min(args.length, args.steps, args.seed) < 0:
        parser.error("--length, --steps, --seed: expected 0 or more")
    if not args.temperature >= 0 or not 0 < args.top_p <= 1:
        parser.error("--temperature must be from 0 on, --top_p above 0 and at most 1")
    if args.infill is not None and args.length > 0:
        parser.error("--length and --infill: give one of the two")
    if not args.out.parent.is_dir():
        parser.error(f"--out {args.out}: there is no folder {args.out.parent}")
    return args


def stop(status, message):
    """End the program with one line."""
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    sys.exit(status)


class Parser(argparse.ArgumentParser):
    def error(self, message):
        stop(2, message)


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the docstring as it is, and every default."""


def load(path, device):
    """(network with its averaged weights, checkpoint)"""
    if not is_whole(path):
        stop(2, f"{path} is not there, or is damaged: expected best.pt or latest.pt of a run")
    state = load_checkpoint(path)
    if state.get("script") != SCRIPT or state.get("format") != FORMAT:
        stop(2, f"{path} is no checkpoint of {SCRIPT}, format {FORMAT}")
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model = Denoiser(argparse.Namespace(**state["args"]), dtype)
    with torch.no_grad():
        for parameter, average in zip(model.parameters(), state["average"], strict=True):
            parameter.copy_(average)
    return model.eval().to(device), state


def read_templates(path, count, most):
    """(templates, names): `count` of each record of a FASTA file, `?` to be drawn."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="ascii", errors="replace") as file:
        before, *records = ("\n" + file.read()).split("\n>")
    if before.strip() or not records:
        stop(2, f"{path}: expected FASTA, with `>` as its first character")
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
            stop(2, f"{path}: {name} has {''.join(wrong)[:12]!r}; expected residues and `?`")
        if "?" not in text:
            stop(2, f"{path}: {name} has no `?`: there is nothing to draw")
        if len(text) > most:
            stop(2, f"{path}: {name} has {len(text)} residues; the network knows at most {most}")
        template = [BEGIN, *[tokens[letter] for letter in text], END]
        for copy in range(1, count + 1):
            templates.append(np.array(template, np.uint8))
            names.append(f"{name}/{copy}")
    return templates, names


def make_templates(args, state):
    """(templates, names) of --infill, of --length, or of lengths as in the training data."""
    most = state["args"]["max_protein_len"] - 2
    if args.infill is not None:
        return read_templates(args.infill, args.count, most)
    if args.length > most:
        stop(2, f"--length {args.length}: the network was trained on at most {most} residues")
    lengths = draw_lengths(state["lengths"], args.count, args.seed, most)
    if args.length > 0:
        lengths[:] = args.length
    names = [f"sample_{number}" for number in range(args.count)]
    return [empty_template(length) for length in lengths], names


def draw(args, model, state, templates, device):
    """A sequence of tokens for each template."""
    how = Sampling(
        args.method,
        args.steps,
        args.seed,
        args.temperature,
        args.top_p,
    )
    # batches of similar length: short ones need fewer steps
    order = sorted(range(len(templates)), key=lambda i: len(templates[i]))
    found = {}
    for start in range(0, len(order), args.batch_size):
        numbers = order[start : start + args.batch_size]
        title = f"{start + len(numbers)}/{len(order)} samples"

        def progress(steps, title=title):
            return tqdm(steps, title, unit=" steps", disable=None, leave=False)

        batch = [templates[i] for i in numbers]
        sequences = draw_sequences(model, batch, numbers, how, device, progress)
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


def js(p, q):
    middle = (p + q) / 2
    return (kl(p, middle) + kl(q, middle)) / 2


def length_distance(ours, theirs):
    """Wasserstein distance of the lengths, in residues."""
    grid = np.unique([len(s) for s in [*ours, *theirs]])
    shares = []
    for group in (ours, theirs):
        lengths = np.sort([len(sequence) for sequence in group])
        shares.append(np.searchsorted(lengths, grid[:-1], side="right") / len(group))
    return float((np.abs(shares[0] - shares[1]) * np.diff(grid)).sum())


def in_runs(sequence, least=4):
    """Residues that stand in runs of the same one."""
    edges = np.flatnonzero(np.diff(sequence, prepend=-1, append=-1))
    runs = np.diff(edges)
    return int(runs[runs >= least].sum())


def spectra(sequences, size):
    """Fourier transforms of where each residue stands: (frequencies, sequences, 26)."""
    places = torch.zeros(len(sequences), size, KINDS)
    for i, sequence in enumerate(sequences):
        places[i, np.arange(len(sequence)), sequence] = 1
    return torch.fft.rfft(places, dim=1).transpose(0, 1)


def best_identity(ours, theirs):
    """For each of `ours` the most equal residues with one of `theirs`, without gaps, as a share of
    the shorter one: (S,). Fourier transforms give all offsets at once."""
    best = np.zeros(len(ours))
    theirs = sorted(theirs, key=len)
    for low in range(0, len(ours), 64):
        group = ours[low : low + 64]
        for start in range(0, len(theirs), 64):
            others = theirs[start : start + 64]
            longest = max(len(sequence) for sequence in group)
            size = 1 << (longest + len(others[-1]) - 2).bit_length()  # so that nothing wraps round
            product = spectra(group, size) @ spectra(others, size).conj().transpose(1, 2)
            matches = torch.fft.irfft(product, size, dim=0).amax(0).round().numpy()
            shorter = np.minimum.outer([len(s) for s in group], [len(s) for s in others])
            best[low : low + 64] = np.maximum(best[low : low + 64], (matches / shorter).max(1))
    return best


def compare(ours, theirs):
    """Metrics of samples against training sequences, both as arrays of numbers from 0 to 25."""
    metrics = {}
    for length in (1, 2, 3):
        counts = [count_words(group, length) for group in (ours, theirs)]
        if counts[0].sum() == 0 or counts[1].sum() == 0:  # all are shorter
            continue
        p, q = [count / count.sum() for count in counts]
        if length == 1:
            # half a count more of each: a residue that the training data lack is not infinity
            metrics["residue_kl"] = kl(p, (counts[1] + 0.5) / (counts[1] + 0.5).sum())
        name = "residue_js" if length == 1 else f"{length}mer_js"
        metrics[name] = js(p, q)
    metrics["length_wasserstein"] = length_distance(ours, theirs)
    metrics["repeats"] = sum(map(in_runs, ours)) / sum(map(len, ours))
    metrics["uniqueness"] = len({sequence.tobytes() for sequence in ours}) / len(ours)
    identity = best_identity(ours, theirs)
    metrics["identity_mean"] = float(identity.mean())
    metrics["identity_max"] = float(identity.max())
    return metrics


def read_reference(folder, number):
    """Evenly spaced training sequences of a folder, as numbers from 0 to 25."""
    try:
        json.loads((folder / "meta.json").read_text())
        proteins = Proteins(folder, "train", 0)
    except (OSError, ValueError) as error:
        stop(2, f"--compare {folder}: no folder of tools/prepare_uniref50.py ({error})")
    rows = np.linspace(0, len(proteins) - 1, min(len(proteins), number)).astype(np.int64)
    found = []
    for row in rows:
        start, end = proteins.offsets[row : row + 2]
        found.append(proteins.tokens[start + 1 : end - 1].astype(np.int64) - FIRST)
    return found


def main():
    args = parse_args()
    try:
        device = choose_device(args, local_rank=0)
        model, state = load(args.checkpoint, device)
        templates, names = make_templates(args, state)
        reference = read_reference(args.compare, REFERENCE) if args.compare else []
        sequences = draw(args, model, state, templates, device)
        new = args.out.with_name(f"{args.out.name}.tmp")
        names = [f"{name} method={args.method} seed={args.seed}" for name in names]
        write_fasta(new, [as_text(tokens) for tokens in sequences], names)
        os.replace(new, args.out)
    except InputError as error:
        stop(2, str(error))
    except (RunError, OSError) as error:
        stop(1, str(error))
    print(f"{args.out}: {len(sequences):,} sequences, of step {state['step']}")
    if reference:
        ours = [tokens[1:-1].astype(np.int64) - FIRST for tokens in sequences]
        for name, value in compare(ours, reference).items():
            print(f"{name:18} {value:.4f}")


if __name__ == "__main__":
    main()
