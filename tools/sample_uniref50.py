"""Draw protein sequences from a network of run_train_uniref50_ddp.py.

    python tools/sample_uniref50.py experiments_ddp/best.pt --num_samples 100 --length 120
    python tools/sample_uniref50.py experiments_ddp/best.pt --infill motifs.fasta --num_samples 4
    python tools/sample_uniref50.py experiments_ddp/best.pt --compare uniref50.fasta.gz

Methods. rigorous: samples of the model. Residues appear one by one in a random order, which is
exact; with --steps N several appear together, each drawn by itself, which is faster and close.
simple: the surest residues first (MaskGIT, Chang et al. 2022), which is fast, but its samples have
another law: too sharp. --temperature other than 1 changes the law, too.

--infill FILE: FASTA, or a sequence on each line. `?` is a residue to be drawn given the rest,
`?{30}` are 30, `?{20-40}` are 20 to 40: each of --num_samples draws how many, all are as likely.

--compare FILE: the training data, of which the same is held out as in the run. --compare FILE FILE:
the training data, and held-out proteins (--valid_file of the run). Of each part the first 2,000 are
taken. Printed of the samples, and ("held out") of as many held-out proteins, spread evenly:
1mer_js, 2mer_js, 3mer_js: how far the words of k residues are from those of training sequences, in
    nats (Jensen-Shannon divergence). The fewer the sequences, the larger: look at both figures.
degenerate: share in which one residue makes up more than a quarter, or stands six times in a row
nearest: likeness to the nearest (other) held-out sequence, on average. Two are laid beside each
    other, without gaps, where most residues agree; likeness is this over the longer one's length.
nearest, shuffled: of samples in random order; training: to training sequences (a copy has 1)
uniqueness: share of distinct samples
"""

import argparse
import math
import re
import sys
import textwrap
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from tqdm import tqdm

import run_train_uniref50_ddp as script
from run_train_uniref50_ddp import BEGIN, COUNT, END, MASK, NATURAL, InputError, Parser

REFERENCE = 2000  # sequences of each part that samples are compared with
GAP = re.compile(r"\?(?:\{([0-9]{1,9})(?:-([0-9]{1,9}))?\})?")  # ?, ?{30}, ?{20-40}


def parse_args():
    parser = Parser(description=__doc__, formatter_class=script.HelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("checkpoint", type=Path, help="best.pt, step_N.pt or latest.pt of a run")
    add("--out", type=Path, default=Path("samples.fasta"), help="file to write")
    add("--num_samples", "--count", type=COUNT, default=16, help="with --infill of each record")
    one_of = parser.add_mutually_exclusive_group().add_argument
    one_of("--length", type=NATURAL, default=0, help="residues; 0: as training sequences have")
    one_of("--infill", type=Path, metavar="FILE", help="sequences whose `?` are drawn")
    add("--method", choices=["rigorous", "simple"], help="without it the run's --sampling_method")
    add("--steps", type=NATURAL, default=0, help="forward passes per batch; 0: one per residue")
    add("--temperature", type=script.number(1e-6), default=1.0, help="of the predictions")
    add("--all_letters", action="store_true", help="draw X B U Z O J, too, if the data have them")
    add("--seed", type=NATURAL, default=0, help="of the samples")
    add("--batch_size", type=COUNT, default=16, help="sequences per forward pass")
    add("--device", default="auto", choices=["auto", "cuda", "xpu", "cpu"], help="auto: the best")
    add("--compare", type=Path, nargs="+", metavar="FILE", help="proteins, in one file or two")
    args = parser.parse_args()
    check_new(parser, "--out", args.out)
    return args


def check_new(parser, option, path):
    """That `path` can be written, which was given as `option`."""
    if path.exists():
        parser.error(f"{option} {path} exists: expected a new file")
    if not path.absolute().parent.is_dir():
        parser.error(f"{option} {path}: there is no such folder")


def load_network(path, device):
    """(network with its averaged weights, the checkpoint, options of its run)"""
    if not path.exists():
        raise InputError(f"{path}: there is no such file")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        options = argparse.Namespace(**state["args"])
        model = script.Denoiser(options)
        model.load_state_dict(state["ema_model"])
    except Exception as error:  # it is no checkpoint, or its network is another
        text = "expected best.pt, step_N.pt or latest.pt of run_train_uniref50_ddp.py"
        raise InputError(f"{path}: {type(error).__name__}; {text}") from None
    return model.eval().to(device), state, options


def read_templates(path, copies, limit, generator):
    """(templates, names): `copies` of each record of a file. A template has BEGIN, residues, MASK
    for what is to be drawn, and END. For each copy the lengths of its gaps are drawn."""
    templates = []
    names = []
    for number, (where, sequence) in enumerate(script.read_records(path), 1):
        gaps = [(int(a or 1), int(b or a or 1)) for a, b in GAP.findall(sequence)]
        text = GAP.sub("?", sequence.strip())
        tokens, problem = script.encode(text.replace("?", "A"))
        longest = len(tokens) + sum(most - 1 for _, most in gaps)
        if "{" in text or not all(1 <= least <= most for least, most in gaps):
            problem = "expected gaps such as ?, ?{30}, or ?{20-40}"
        elif longest > limit:
            problem = f"up to {longest} residues; the network knows at most {limit}"
        elif not problem and not gaps:
            problem = "no `?`: there is nothing to draw"
        if problem:
            raise InputError(f"{path}: {where}: {problem}")

        template = np.array([BEGIN, *tokens, END], np.uint8)
        is_gap = [letter == "?" for letter in text[: len(tokens)]]  # without a * at the end
        template[1:-1][is_gap] = MASK
        name = where.partition(">")[2] or f"record_{number}"
        for copy in range(1, copies + 1):
            repeats = np.ones(len(template), int)
            repeats[template == MASK] = [generator.integers(a, b + 1) for a, b in gaps]
            templates.append(np.repeat(template, repeats))
            names.append(f"{name}/{copy}")
    if not templates:
        raise InputError(f"{path}: it is empty; expected residues and `?`")
    return templates, names


def make_templates(args, most, known_lengths):
    """(templates, names). known_lengths: {residues: whole sequences of the training data}"""
    generator = np.random.default_rng([args.seed, 0, 1])  # another stream than in `draw`
    if args.infill is not None:
        return read_templates(args.infill, args.num_samples, most, generator)
    if args.length > most:
        raise InputError(f"--length {args.length}: the network knows at most {most} residues")
    known_lengths = {args.length: 1} if args.length > 0 else known_lengths
    if not known_lengths:
        raise InputError(f"all training sequences are longer than {most} residues: give --length")
    shares = np.array([*known_lengths.values()]) / sum(known_lengths.values())
    lengths = generator.choice([*known_lengths], args.num_samples, p=shares)
    templates = [np.array([BEGIN, *[MASK] * length, END], np.uint8) for length in lengths]
    return templates, [f"sample_{number}" for number in range(args.num_samples)]


def make_predict(model, residue_counts, all_letters, temperature, autocast, device):
    """predict(batch): logits (T, 26). Those of residues that the training data lack are -inf, since
    a network never learns that something cannot be."""
    is_impossible = torch.tensor(residue_counts, device=device) == 0
    if not all_letters:
        is_impossible[20:] = True  # X B U Z O J

    def predict(batch):
        with autocast():
            logits = model(batch)
        return (logits / temperature).masked_fill(is_impossible, -math.inf)

    return predict


@torch.no_grad()
def draw(predict, templates, device, method, steps, seed):
    """Fill in the MASKs of templates: a list of arrays of tokens. seed: a list of numbers."""
    generator = np.random.default_rng(seed)
    torch.manual_seed(int(generator.integers(2**63)))
    rates = np.zeros(len(templates))  # mask no more than the templates do
    batch = script.make_batch(templates, rates, [generator] * len(templates), 1).to(device)
    counts = [np.count_nonzero(template == MASK) for template in templates]
    if method == "rigorous":
        x = fill_rigorously(predict, batch, counts, steps, generator)
    else:
        x = fill_simply(predict, batch, counts, steps or max(counts))
    return [tokens.numpy() for tokens in x.cpu().split(batch.lengths.tolist())]


def draw_tokens(predict, batch, x):
    """For each token of x a residue that is drawn by the predictions, and its log-probability. In
    float64: with 24 bits rare residues would be too rare (Zheng et al. 2024)."""
    logp = predict(batch._replace(noisy=x)).double().log_softmax(1)
    tokens = torch.multinomial(logp.exp(), 1)
    return tokens[:, 0].to(x.dtype), logp.gather(1, tokens)[:, 0]


def fill_rigorously(predict, batch, counts, steps, generator):
    """Samples of the model. steps 0: in each call a residue of each sequence appears, in a random
    order: exact for a model that predicts each residue from any others (Uria et al. 2014). Else
    each residue appears in any of the steps (tau-leaping, Lou et al. 2024)."""
    order = []  # of each hidden residue the step in which it appears
    for count in counts:
        own = generator.integers(steps, size=count) if steps > 0 else generator.permutation(count)
        order.extend(own)
    x = batch.noisy
    when = torch.full(x.shape, -1, device=x.device)
    when[x == MASK] = torch.tensor(np.array(order), device=x.device)
    for step in tqdm(sorted(set(order)), unit=" steps", disable=None, leave=False):
        tokens, _ = draw_tokens(predict, batch, x)
        x = torch.where(when == step, tokens, x)
    return x


def fill_simply(predict, batch, counts, steps):
    """Surest first (MaskGIT, Chang et al. 2022): each step draws a residue for every hidden place
    and hides those of the lowest probability again, with some Gumbel noise."""
    x = batch.noisy
    for step in tqdm(range(1, steps + 1), unit=" steps", disable=None, leave=False):
        tokens, sure = draw_tokens(predict, batch, x)
        gumbel = -torch.log(-torch.log(torch.rand_like(sure)))
        sure = sure + 4.5 * (1 - step / steps) * gumbel
        sure[x != MASK] = math.inf  # what is shown stays
        x = torch.where(x == MASK, tokens, x)
        left = math.cos(math.pi / 2 * step / steps)  # this share is hidden after the step
        lengths = batch.lengths.tolist()
        parts = zip(x.split(lengths), sure.split(lengths), counts, strict=True)
        for part, part_sure, count in parts:
            part[part_sure.argsort()[: round(left * count)]] = MASK
    return x


def letters_of(tokens):
    return "".join(script.RESIDUES[token] for token in tokens if token < script.NUM_RESIDUES)


def draw_texts(args, predict, templates, device):
    """The text of each template. Batches are of similar length: short ones need fewer steps."""
    order = sorted(range(len(templates)), key=lambda i: len(templates[i]))
    texts = {}
    for start in range(0, len(order), args.batch_size):
        numbers = order[start : start + args.batch_size]
        batch = [templates[i] for i in numbers]
        found = draw(predict, batch, device, args.method, args.steps, [args.seed, numbers[0]])
        texts.update(zip(numbers, map(letters_of, found), strict=True))
    return [texts[i] for i in range(len(templates))]


def good_records(path, bad):
    """Yields (name, tokens as bytes) of proteins; appends to `bad` where other records stand."""
    for number, (where, sequence) in enumerate(script.read_records(path), 1):
        tokens, problem = script.encode(sequence)
        if problem:
            bad.append(f"{path}: {where}: {problem}")
        else:
            yield where.partition(">")[2] or f"record_{number}", tokens


def warn(found, text):
    if found:
        print(f"{len(found):,} {text}, such as {found[0]}")


def read_proteins(path, options, only_held_out):
    """{name: tokens}: BEGIN, residues, END; of a long sequence the first part."""
    if only_held_out and options.valid_file:
        raise InputError(f"--held_out: that of the run is {options.valid_file}: score this file")
    most = options.max_protein_len - 2
    proteins = {}
    bad = []
    for name, residues in good_records(path, bad):
        if name in proteins:
            raise InputError(f"{path}: two records are named {name}")
        if not only_held_out or script.is_held_out(residues, options.val_ratio):
            tokens = np.array([BEGIN, *residues, END], np.uint8)
            proteins[name] = tokens if len(residues) <= most else tokens[: most + 1]
    warn(bad, "bad records are left out")
    if not proteins:
        raise InputError(f"{path}: expected proteins, and with --held_out some that are held out")
    cut = [name for name, tokens in proteins.items() if tokens[-1] != END]
    warn(cut, f"longer than {most} residues, and cut")
    return proteins


def read_reference(paths, val_ratio):
    """(training sequences, held-out ones), as texts: the parts of one file, or a file each."""
    parts = {False: [], True: []}  # by whether they are held out
    bad = []
    for number, path in enumerate(paths):
        for _, tokens in good_records(path, bad):
            by_hash = len(paths) == 1 and script.is_held_out(tokens, val_ratio)
            part = parts[number > 0 or by_hash]
            if len(part) < REFERENCE:
                part.append(letters_of(tokens))
            elif len(paths) > 1 or min(map(len, parts.values())) == REFERENCE:
                break
    warn(bad, "bad records are left out")
    held_out = {*parts[True]}  # the script trains on none of them
    train = [text for text in parts[False] if text not in held_out]
    if not train or not held_out:
        raise InputError(f"--compare {paths[-1]}: expected proteins, and some that are held out")
    return train, parts[True]


def divergence(ours, theirs, length):
    """The Jensen-Shannon divergence of the words of `length` residues, in nats."""
    counts = [Counter(), Counter()]
    for counter, texts in zip(counts, (ours, theirs), strict=True):
        for text in texts:
            counter.update(text[i : i + length] for i in range(len(text) - length + 1))
    words = counts[0] | counts[1]
    table = torch.tensor([(counts[0][word], counts[1][word]) for word in words]).view(-1, 2)
    p, q = (table.double() / table.sum(0)).T  # nan where all texts are shorter
    nats = torch.special.entr(torch.stack([(p + q) / 2, p, q])).sum(1)
    return float(nats[0] - (nats[1] + nats[2]) / 2)


def is_degenerate(text):
    """Whether one residue is more than a quarter of all, or stands six times in a row."""
    return max(Counter(text).values()) > len(text) / 4 or bool(re.search(r"(.)\1{5}", text))


def nearest(texts, others):
    """The mean likeness of texts to the nearest of others, as the docstring above says."""
    likeness = np.zeros(len(texts))
    for i, text in enumerate(texts):
        a = np.frombuffer(text.encode(), np.uint8)
        for other in others:
            b = np.frombuffer(other.encode(), np.uint8)
            here, there = np.divmod(np.flatnonzero(a[:, None] == b), len(b))
            agreeing = np.bincount(there - here + len(a), minlength=1)  # for each place of b by a
            likeness[i] = max(likeness[i], agreeing.max() / max(len(a), len(b)))
    return likeness.mean()


def compare(ours, train, held_out, seed):
    """{name: metric} of samples, and of as many held-out sequences."""
    generator = np.random.default_rng(seed)
    shuffled = ["".join(generator.permutation([*text])) for text in ours]
    rows = np.linspace(0, len(held_out) - 1, min(len(held_out), len(ours))).astype(int)
    baseline = [held_out[row] for row in rows]
    others = [nearest([held_out[i]], held_out[:i] + held_out[i + 1 :]) for i in rows]

    metrics = {"uniqueness": len(set(ours)) / len(ours)}
    for suffix, texts in {"": ours, ", held out": baseline}.items():
        for length in (1, 2, 3):
            metrics[f"{length}mer_js{suffix}"] = divergence(texts, train, length)
        metrics[f"degenerate{suffix}"] = np.mean([is_degenerate(text) for text in texts])
        metrics[f"nearest, training{suffix}"] = nearest(texts, train)
    metrics["nearest"] = nearest(ours, held_out)
    metrics["nearest, shuffled"] = nearest(shuffled, held_out)
    metrics["nearest, held out"] = np.mean(others)
    return dict(sorted(metrics.items()))


def main():
    args = parse_args()
    device = script.choose_device(args, local_rank=0)
    model, state, options = load_network(args.checkpoint, device)
    args.method = args.method or options.sampling_method
    templates, names = make_templates(args, options.max_protein_len - 2, state["data"]["lengths"])
    if args.compare is not None:
        if len(args.compare) == 1 and getattr(options, "valid_file", None):
            raise InputError(f"--compare: give the run's {options.valid_file} as the second file")
        train, held_out = read_reference(args.compare, options.val_ratio)

    autocast = script.choose_precision(argparse.Namespace(precision="auto"), device)
    counts = state["data"]["residue_counts"]
    predict = make_predict(model, counts, args.all_letters, args.temperature, autocast, device)
    texts = draw_texts(args, predict, templates, device)
    with open(args.out, "x") as file:
        for name, text in zip(names, texts, strict=True):
            file.write(f">{name} method={args.method} seed={args.seed} length={len(text)}\n")
            file.write(textwrap.fill(text, 80) + "\n")
    print(f"{args.out}: {len(texts):,} sequences, of step {state['loop']['step']}")
    if args.compare is not None:
        print(f"{len(train):,} training proteins, {len(held_out):,} held out")
        for name, value in compare(texts, train, held_out, args.seed).items():
            print(f"{name:27} {value:.4f}")


if __name__ == "__main__":
    try:
        main()
    except (InputError, OSError) as error:
        print(f"sample_uniref50.py: error: {error}", file=sys.stderr)
        sys.exit(2)
