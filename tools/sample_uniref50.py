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
import re
import sys
from collections import Counter
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from tqdm import tqdm

import run_train_uniref50_ddp as script
from run_train_uniref50_ddp import InputError

SCRIPT = "run_train_uniref50_ddp.py"
REFERENCE = 2000  # training sequences that samples are compared with


def parse_args(words=None):
    parser = script.Parser(description=__doc__)
    add = parser.add_argument
    add("checkpoint", type=Path, help="best.pt or latest.pt of a run")
    add("--out", type=Path, default=Path("samples.fasta"), help="file to write")
    add("--count", type=script.count, default=16, help="samples; with --infill of each record")
    add("--length", type=int, default=0, help="residues; 0: as in the training data")
    add("--infill", type=Path, help="FASTA whose `?` are drawn")
    add("--method", default="rigorous", choices=["rigorous", "simple"], help="see above")
    add("--steps", type=int, default=0, help="network calls per batch; 0: one per residue")
    add("--temperature", type=float, default=1.0, help="of the predictions")
    add("--seed", type=int, default=0, help="sample i depends on (seed, i) alone")
    add("--batch_size", type=script.count, default=16, help="sequences per network call")
    add("--device", default="auto", choices=["auto", "cuda", "xpu", "cpu"], help="auto: the best")
    add("--compare", type=Path, metavar="FOLDER", help="folder of the training data")
    args = parser.parse_args(words)

    if min(args.length, args.steps, args.seed) < 0:
        parser.error("--length, --steps, --seed: expected 0 or more")
    if not args.temperature > 0:
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
    if not script.is_whole(path):
        raise InputError(f"{path} is missing or damaged: expected best.pt or latest.pt of a run")
    state = script.load_checkpoint(path)
    if state.get("script") != SCRIPT or state.get("format") != script.FORMAT:
        raise InputError(f"{path} is no checkpoint of {SCRIPT}, format {script.FORMAT}")
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model = script.Denoiser(argparse.Namespace(**state["args"]), dtype)
    with torch.no_grad():
        for parameter, average in zip(model.parameters(), state["average"], strict=True):
            parameter.copy_(average)
    return model.eval().to(device), state


def read_templates(path, copies, most):
    """(templates, names): `copies` of each record of a FASTA file, `?` to be drawn."""
    if not path.is_file():
        raise InputError(f"--infill {path}: no such file")
    before, *records = ("\n" + path.read_text(errors="replace")).split("\n>")
    if before.strip() or not records:
        raise InputError(f"{path}: expected FASTA, with `>` as its first character")
    tokens = {letter: script.FIRST + number for number, letter in enumerate(script.RESIDUES)}
    tokens["?"] = script.MASK
    templates = []
    names = []
    for number, record in enumerate(records, start=1):
        header, _, text = record.partition("\n")
        name = (header.split() or [f"record_{number}"])[0]
        text = "".join(text.split()).upper()
        wrong = "".join(sorted(set(text) - set(tokens)))
        if wrong:
            raise InputError(f"{path}: {name} has {wrong[:12]!r}; expected residues and `?`")
        if "?" not in text:
            raise InputError(f"{path}: {name} has no `?`: there is nothing to draw")
        if len(text) > most:
            text = f"{name} has {len(text)} residues; the network knows at most {most}"
            raise InputError(f"{path}: {text}")

        template = [script.BEGIN, *[tokens[letter] for letter in text], script.END]
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
        text = f"--length {args.length}: the network was trained on at most {most} residues"
        raise InputError(text)
    lengths = script.draw_lengths(state["lengths"], args.count, args.seed, most)
    if args.length > 0:
        lengths[:] = args.length
    names = [f"sample_{number}" for number in range(args.count)]
    return [script.empty_template(length) for length in lengths], names


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
        sequences = script.draw_sequences(predict, batch, numbers, device, *how, progress)
        found.update(zip(numbers, sequences, strict=True))
    return [found[i] for i in range(len(templates))]


def compare(ours, theirs):
    """Metrics of samples against training sequences, both as text."""
    from scipy.spatial.distance import jensenshannon  # its square is the divergence

    metrics = {}
    for length in (1, 2, 3):
        counts = [Counter(), Counter()]
        for counter, texts in zip(counts, (ours, theirs), strict=True):
            for text in texts:
                counter.update(text[i : i + length] for i in range(len(text) - length + 1))
        if all(counts):  # else all are shorter
            words = counts[0] | counts[1]
            p = [counts[0][word] for word in words]
            q = [counts[1][word] for word in words]
            metrics[f"{length}mer_js"] = jensenshannon(p, q) ** 2
    runs = re.finditer(r"(\w)\1{3,}", "\n".join(ours))
    metrics["repeats"] = sum(len(run[0]) for run in runs) / sum(map(len, ours))
    metrics["uniqueness"] = len(set(ours)) / len(ours)
    return metrics


def read_reference(folder):
    """Evenly spaced training sequences of a folder, as text."""
    if not (folder / "meta.json").exists():
        raise InputError(f"--compare {folder}: no folder of tools/prepare_uniref50.py")
    proteins = script.Proteins(folder, "train", 0)
    found = []
    for row in np.linspace(0, len(proteins) - 1, min(len(proteins), REFERENCE)).astype(int):
        start, end = proteins.offsets[row : row + 2]
        found.append(script.letters_of(proteins.tokens[start:end]))
    return found


def run(args):
    device = script.choose_device(args, local_rank=0)
    model, state = load(args.checkpoint, device)
    templates, names = make_templates(args, state)
    reference = read_reference(args.compare) if args.compare else []
    sequences = draw(args, model, templates, device)
    names = [f"{name} method={args.method} seed={args.seed}" for name in names]
    script.write_fasta(args.out, sequences, names)
    print(f"{args.out}: {len(sequences):,} sequences, of step {state['step']}")
    if reference:
        ours = [script.letters_of(tokens) for tokens in sequences]
        for name, value in compare(ours, reference).items():
            print(f"{name:12} {value:.4f}")


def main():
    try:
        run(parse_args())
    except (script.RunError, OSError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, InputError) else 1)


if __name__ == "__main__":
    main()
