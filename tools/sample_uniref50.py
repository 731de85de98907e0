"""Draw protein sequences from a network of run_train_uniref50_ddp.py.

    python tools/sample_uniref50.py experiments_ddp/best.pt --out samples.fasta
    python tools/sample_uniref50.py experiments_ddp/best.pt --count 100 --length 120 --steps 60
    python tools/sample_uniref50.py experiments_ddp/best.pt --infill motifs.fasta --count 4
    python tools/sample_uniref50.py experiments_ddp/best.pt --compare uniref50.fasta.gz

Methods. rigorous: samples of the model. Residues appear one by one in a random order, which is
exact; with --steps N several appear together, each drawn by itself, which is faster and close.
simple: the surest residues first (MaskGIT, Chang et al. 2022), which is fast, but its samples have
another law: too sharp. --temperature other than 1 changes the law, too.

--infill FILE: FASTA, or a sequence on each line; each `?` is drawn, --count times, given the rest.

--compare FILE, of proteins, such as the training data (the first 2,000 of each part). 1mer_js,
2mer_js, 3mer_js: how far the samples are from sequences there that are not held out (Jensen-Shannon
divergences of words of one, two and three residues, in nats); beside it the same of as many
held-out sequences, as few sequences are far from anything. uniqueness: share of distinct ones.
nearest: two sequences are laid beside each other, without gaps, where most residues agree; their
likeness is this number over the longer one's length; shown is the mean, over samples, of the
likeness to the nearest held-out sequence. Beside it stand the same of the samples with their
residues shuffled, and of the first 200 held-out sequences (the nearest other one).
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from tqdm import tqdm

import run_train_uniref50_ddp as script
from run_train_uniref50_ddp import BEGIN, END, FIRST, KINDS, MASK, InputError

SCRIPT = "run_train_uniref50_ddp.py"
REFERENCE = 2000  # sequences of each part that samples are compared with


def parse_args(words=None):
    parser = script.Parser(__doc__)
    add = parser.add_argument
    add("checkpoint", type=Path, help="best.pt or latest.pt of a run")
    add("--out", type=Path, default=Path("samples.fasta"), help="file to write")
    add("--count", type=script.COUNT, default=16, help="samples; with --infill of each record")
    whole = script.number(0, kind=int)
    add("--length", type=whole, default=0, help="residues; 0: as in the training data")
    add("--infill", type=Path, metavar="FILE", help="sequences whose `?` are drawn")
    text = "see above; without it: the run's --sampling_method"
    add("--method", choices=["rigorous", "simple"], help=text)
    add("--steps", type=whole, default=0, help="network calls per batch; 0: one per residue")
    add("--temperature", type=script.number(1e-6), default=1.0, help="of the predictions")
    text = "sample i depends on (seed, i) alone; simple: on its batch, too"
    add("--seed", type=whole, default=0, help=text)
    add("--batch_size", type=script.COUNT, default=16, help="sequences per network call")
    add("--device", default="auto", choices=["auto", "cuda", "xpu", "cpu"], help="auto: the best")
    add("--compare", type=Path, metavar="FILE", help="proteins, such as the training data")
    args = parser.parse_args(words)

    if args.infill is not None and args.length > 0:
        parser.error("--length and --infill: give one of the two")
    if not args.out.parent.is_dir():
        parser.error(f"--out {args.out}: there is no folder {args.out.parent}")
    if args.out.exists():
        parser.error(f"{args.out} exists: give another --out")
    return args


def load_network(path, device):
    """(network with its averaged weights, checkpoint)"""
    if not path.is_file():
        raise InputError(f"{path}: there is no such file")
    state = script.read_checkpoint(path)
    if not isinstance(state, dict) or state.get("script") != SCRIPT:
        raise InputError(f"{path}: expected best.pt or latest.pt of {SCRIPT}")
    model = script.Denoiser(argparse.Namespace(**state["args"]))
    try:
        model.load_state_dict(state["average"])
    except RuntimeError:
        text = "a changed copy needs a copy of tools/ beside it"
        raise InputError(f"{path}: its network is not that of {SCRIPT}: {text}") from None
    return model.eval().to(device), state


# ---- Templates: BEGIN, residues or MASK, END


def draw_lengths(counts, number, seed, most):
    """Lengths in residues as in the training data. counts: {residues: sequences}."""
    lengths = np.array([int(length) for length in counts])
    shares = np.array([*counts.values()]) / sum(counts.values())
    generator = np.random.default_rng([seed, 0, 1])  # another stream than those of the samples
    return np.minimum(generator.choice(lengths, number, p=shares), most)


def read_templates(path, copies, most):
    """(templates, names): `copies` of each record of a file, `?` to be drawn."""
    templates = []
    names = []
    for number, (place, sequence) in enumerate(script.read_records(path), start=1):
        hidden = np.frombuffer(sequence.removesuffix(b"*"), np.uint8) == ord("?")
        tokens, problem = script.encode(sequence.replace(b"?", b"A"))
        if problem:
            raise InputError(f"{path}: {place}: {problem}; expected residues and `?`")
        if not hidden.any():
            raise InputError(f"{path}: {place} has no `?`: there is nothing to draw")
        if len(tokens) > most:
            text = f"{place} has {len(tokens)} residues; the network knows at most {most}"
            raise InputError(f"{path}: {text}")

        template = np.array([BEGIN, *tokens, END], np.uint8)
        template[1:-1][hidden] = MASK
        title = place.partition(">")[2].split()
        for copy in range(1, copies + 1):
            templates.append(template)
            names.append(f"{title[0] if title else f'record_{number}'}/{copy}")
    return templates, names


def make_templates(args, state):
    """(templates, names) of --infill, of --length, or of lengths as in the training data."""
    most = state["args"]["max_protein_len"] - 2
    if args.infill is not None:
        return read_templates(args.infill, args.count, most)
    if args.length > most:
        raise InputError(f"--length {args.length}: the network knows at most {most} residues")
    lengths = [args.length] * args.count
    if args.length == 0:
        lengths = draw_lengths(state["loop"]["lengths"], args.count, args.seed, most)
    names = [f"sample_{number}" for number in range(args.count)]
    return [np.array([BEGIN, *[MASK] * length, END], np.uint8) for length in lengths], names


# ---- Drawing


def make_predict(model, letters, temperature, autocast, device):
    """predict(batch): logits (M, 26) of batch.hidden; those of residues that the training data lack
    are -inf, since a network never learns that something cannot be."""
    absent = torch.tensor([count == 0 for count in letters], device=device)

    def predict(batch):
        with autocast():
            logits = model(batch)
        return (logits / temperature).masked_fill(absent, -torch.inf)

    return predict


def draw_residues(logits, uniform):
    """Tokens drawn by logits (M, 26) at uniform numbers (M,), both in float64: with 24 bits rare
    residues would be too rare (Zheng et al. 2024)."""
    total = logits.double().softmax(1).cumsum(1)
    kinds = torch.searchsorted(total, uniform[:, None] * total[:, -1:], right=True)[:, 0]
    return FIRST + kinds.clamp(max=KINDS - 1)


@torch.no_grad()
def draw_sequences(predict, templates, numbers, device, method, steps, seed):
    """Fill in the MASKs of templates; a list of token arrays. What is drawn for a sample depends on
    (seed, its number) alone."""
    batch = script.make_batch(templates, np.zeros(len(templates)), numbers, 1)
    free = np.flatnonzero(batch.noisy.numpy() == MASK)
    owner = batch.owner.numpy()[free]
    if method == "simple" and steps == 0:
        steps = int(np.bincount(owner).max())

    # uniform numbers, for each residue: when it is drawn, and which one; simple: in each step
    draws = np.zeros((len(free), 2 if method == "rigorous" else 2 * steps))
    for i, number in enumerate(numbers):
        mine = owner == i
        draws[mine] = np.random.default_rng([seed, number]).random(draws[mine].shape)

    draw = draw_rigorously if method == "rigorous" else draw_simply
    found = draw(predict, batch.to(device), free, owner, draws, steps)
    return [tokens.numpy() for tokens in found.cpu().split(batch.lengths)]


def draw_rigorously(predict, batch, free, owner, draws, steps):
    """Samples of the model. steps 0: in each call a residue of each sequence appears, in a random
    order: exact for a model that predicts each residue from any others (Uria et al. 2014). Else
    each residue appears in any of the steps (tau-leaping, Lou et al. 2024)."""
    if steps > 0:
        step_of = (steps * draws[:, 0]).astype(np.int64)
    else:
        order = np.lexsort((draws[:, 0], owner))  # sequence after sequence, in each the first first
        step_of = np.zeros(len(free), np.int64)
        step_of[order] = np.arange(len(free)) - np.searchsorted(owner, owner)

    # everything that the steps need is on the device before they begin: none waits for the host
    device = batch.noisy.device
    order = np.argsort(step_of, kind="stable")
    sizes = np.unique(step_of, return_counts=True)[1]
    numbers = []  # of each sequence, in each step
    for part in np.split(owner[order], sizes.cumsum()[:-1]):
        numbers.append(np.bincount(part, minlength=len(batch.lengths)).tolist())
    places = torch.from_numpy(free[order]).to(device).split(sizes.tolist())
    uniform = torch.from_numpy(draws[order, 1]).to(device).split(sizes.tolist())
    x = batch.noisy.clone()
    for k in tqdm(range(len(sizes)), unit=" steps", disable=None, leave=False):
        logits = predict(batch._replace(noisy=x, hidden=places[k], numbers=numbers[k]))
        x.index_copy_(0, places[k], draw_residues(logits, uniform[k]).to(x.dtype))
    return x


def draw_simply(predict, batch, free, owner, draws, steps):
    """Surest first (MaskGIT, Chang et al. 2022): each step draws a residue for every hidden place
    and hides those of the lowest probability again, with some Gumbel noise."""
    device = batch.noisy.device
    # so many places of each sequence are hidden after step k, with a cosine as in MaskGIT
    shares = np.cos(np.pi / 2 * np.arange(steps + 1) / steps)[:, None]
    left = np.round(shares * np.bincount(owner)).astype(int).tolist()
    uniform = torch.from_numpy(draws).to(device)
    free = torch.from_numpy(free).to(device)
    hidden = torch.arange(len(free), device=device)  # which of `free`, sequence after sequence
    x = batch.noisy.clone()
    for k in tqdm(range(steps), unit=" steps", disable=None, leave=False):
        places = free.index_select(0, hidden)
        logits = predict(batch._replace(noisy=x, hidden=places, numbers=left[k]))
        which, noise = uniform[:, 2 * k : 2 * k + 2].index_select(0, hidden).unbind(1)
        found = draw_residues(logits, which)
        x.index_copy_(0, places, found.to(x.dtype))

        sure = logits.double().log_softmax(1).gather(1, found[:, None] - FIRST)[:, 0]
        sure -= 4.5 * (1 - (k + 1) / steps) * torch.log(-torch.log(noise))
        again = []
        parts = zip(hidden.split(left[k]), sure.split(left[k]), left[k + 1], strict=True)
        for part, part_sure, number in parts:
            again.append(part[part_sure.argsort()[:number]])
        hidden = torch.cat(again)
        x.index_fill_(0, free.index_select(0, hidden), MASK)
    return x


def draw(args, predict, templates, device):
    """A sequence of tokens for each template."""
    # batches of similar length: short ones need fewer steps
    order = sorted(range(len(templates)), key=lambda i: len(templates[i]))
    found = {}
    for start in range(0, len(order), args.batch_size):
        numbers = order[start : start + args.batch_size]
        batch = [templates[i] for i in numbers]
        how = (args.method, args.steps, args.seed)
        sequences = draw_sequences(predict, batch, numbers, device, *how)
        found.update(zip(numbers, sequences, strict=True))
    return [found[i] for i in range(len(templates))]


def letters_of(tokens):
    """The residues among tokens, as text."""
    letters = np.frombuffer(script.RESIDUES.encode(), np.uint8)
    return letters[tokens[script.is_residue(tokens)] - FIRST].tobytes().decode()


def write_fasta(args, texts, names):
    with open(args.out, "x") as file:
        for name, text in zip(names, texts, strict=True):
            file.write(f">{name} method={args.method} seed={args.seed} length={len(text)}\n")
            for start in range(0, len(text), 80):
                file.write(text[start : start + 80] + "\n")


# ---- Comparison


def read_reference(path, val_ratio):
    """(sequences that are not held out, those that are) of a file, as texts."""
    parts = {False: [], True: []}  # by whether they are held out
    bad = []
    for place, sequence in tqdm(script.read_records(path), unit=" records", disable=None):
        tokens, problem = script.encode(sequence)
        if problem:
            bad.append(f"{place}: {problem}")
            continue
        part = parts[script.is_held_out(tokens, val_ratio)]
        if len(part) < REFERENCE:
            part.append(letters_of(np.frombuffer(tokens, np.uint8)))
        if min(map(len, parts.values())) == REFERENCE:
            break
    if bad:
        print(f"--compare {path}: {len(bad)} bad records are left out, such as {bad[0]}")
    if not all(parts.values()):
        raise InputError(f"--compare {path}: expected proteins, and some that are held out")
    return parts[False], parts[True]


def word_metrics(ours, theirs):
    """Metrics of the words of samples against those of other sequences."""
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
    metrics["uniqueness"] = len(set(ours)) / len(ours)
    return metrics


def likeness(text, others):
    """Of a text to the nearest of others: residues that agree where most do, over the longer
    length."""
    a = np.frombuffer(text.encode(), np.uint8)
    best = 0.0
    for other in others:
        b = np.frombuffer(other.encode(), np.uint8)
        here, there = np.nonzero(a[:, None] == b)
        agreeing = np.bincount(there - here + len(a), minlength=1)  # for each place of b beside a
        best = max(best, float(agreeing.max()) / max(len(a), len(b)))
    return best


def compare(ours, train, held_out, seed):
    metrics = word_metrics(ours, train)
    for name, value in word_metrics(held_out[: len(ours)], train).items():
        metrics[f"{name}, held out"] = value
    generator = np.random.default_rng(seed)
    shuffled = ["".join(generator.permutation([*text])) for text in ours]
    metrics["nearest"] = np.mean([likeness(text, held_out) for text in ours])
    metrics["nearest, shuffled"] = np.mean([likeness(text, held_out) for text in shuffled])
    found = []
    for i, text in enumerate(held_out[:200]):
        found.append(likeness(text, held_out[:i] + held_out[i + 1 :]))
    metrics["nearest, held out"] = np.mean(found)
    return metrics


def main(words=None):
    args = parse_args(words)
    device = script.choose_device(args, local_rank=0)
    model, state = load_network(args.checkpoint, device)
    args.method = args.method or state["args"]["sampling_method"]
    templates, names = make_templates(args, state)
    if args.compare:
        train, held_out = read_reference(args.compare, state["args"]["val_ratio"])
    autocast, _ = script.choose_precision(argparse.Namespace(precision="auto"), device)
    predict = make_predict(model, state["loop"]["letters"], args.temperature, autocast, device)
    sequences = draw(args, predict, templates, device)
    texts = [letters_of(tokens) for tokens in sequences]
    write_fasta(args, texts, names)
    print(f"{args.out}: {len(texts):,} sequences, of step {state['loop']['step']}")
    if args.compare:
        for name, value in compare(texts, train, held_out, args.seed).items():
            print(f"{name:20} {value:.4f}")


if __name__ == "__main__":
    try:
        main()
    except (script.RunError, OSError) as error:
        print(f"sample_uniref50.py: {error}", file=sys.stderr)
        sys.exit(2)
