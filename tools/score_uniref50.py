"""Score proteins with a network of run_train_uniref50_ddp.py, or make embeddings of them.

    python tools/score_uniref50.py experiments_ddp/best.pt proteins.fasta --out scores.csv
    python tools/score_uniref50.py experiments_ddp/best.pt proteins.fasta --orders 4
    python tools/score_uniref50.py experiments_ddp/best.pt protein.fasta --variants variants.csv
    python tools/score_uniref50.py experiments_ddp/best.pt proteins.fasta --embeddings means.npz

Scores: a CSV file of name, residues, nats_per_residue and se, its standard error. By default the
bound on -log p that training minimizes, the mean of --draws of the noise, whose mask rates are
spread evenly (so se is rather too large). --mask_rate: the cross entropy where this share of the
residues is masked, as in tables of masked language models. --orders: -log p by the chain rule, the
residues revealed one by one in random orders. It takes a network row for each residue; compare
single sequences so, as a draw of the bound has a standard deviation of about 30 nats. Printed are
all residues together, with the standard error over sequences, beside what the frequencies of the
residues in the training part give.

--variants TABLE: CSV with a column mutant, such as A42G or A42G:L7V (residues count from 1), and a
column name where FILE has several sequences. Adds score: the sum of log p(new) - log p(old), each
position masked alone in the sequence of FILE (masked marginals, Meier et al. 2021).

--embeddings OUT.npz: names, and embeddings (sequences, hidden_size), float32: means of the hidden
states over the residues, nothing masked; without --block of what is ESM-2's last_hidden_state.
"""

import itertools
import math
import re
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pandas
import torch
import torch.nn.functional as F
from sample_uniref50 import letters_of, load_network
from tqdm import tqdm

import run_train_uniref50_ddp as script
from run_train_uniref50_ddp import COUNT, NATURAL, NUM_RESIDUES, RESIDUES, InputError, Parser


def parse_args():
    parser = Parser(description=__doc__, formatter_class=script.HelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("checkpoint", type=Path, help="best.pt, step_N.pt or latest.pt of a run")
    add("file", type=Path, metavar="FILE", help="proteins, as for --datafile of the script")
    add("--out", type=Path, default=Path("scores.csv"), help="file to write")
    add("--held_out", action="store_true", help="only sequences that the run holds out")
    add("--draws", type=COUNT, default=8, help="of the noise, for each sequence")
    one_of = parser.add_mutually_exclusive_group().add_argument
    one_of("--mask_rate", type=script.number(1e-6, 1), help="of all draws; None: spread evenly")
    one_of("--orders", type=COUNT, help="of each sequence, in place of draws")
    one_of("--variants", type=Path, metavar="TABLE", help="substitutions to score")
    one_of("--embeddings", type=Path, metavar="OUT.npz", help="file to write, in place of --out")
    add("--block", type=NATURAL, help="embed after so many blocks; None: all, and the last norm")
    add("--seed", type=NATURAL, default=0, help="of masks and orders")
    add("--batch_size", type=COUNT, default=16, help="sequences per network call; shorter: more")
    add("--device", default="auto", choices=["auto", "cuda", "xpu", "cpu"], help="auto: the best")
    parser.set_defaults(precision="auto")  # bf16 on GPUs, as in the sampler
    args = parser.parse_args()
    out = args.embeddings or args.out
    if out.exists() or not out.parent.is_dir():
        parser.error(f"{out}: expected a new file, in a folder that is there")
    return args


def read_proteins(path, options, only_held_out):
    """(names, sequences) of a file. A sequence is a uint8 array of tokens: BEGIN, residues, END; of
    a long one the first part, without END, as in training."""
    most = options.max_protein_len - 2
    names = []
    sequences = []
    longer = []
    for number, (place, text) in enumerate(script.read_records(path), 1):
        residues, problem = script.encode(text)
        if problem:
            raise InputError(f"{path}: {place}: {problem}")
        if only_held_out and not script.is_held_out(residues, options.val_ratio):
            continue
        names.append(place.partition(">")[2] or f"record_{number}")
        tokens = np.array([script.BEGIN, *residues, script.END], np.uint8)
        if len(residues) > most:
            longer.append(names[-1])
            tokens = tokens[: most + 1]
        sequences.append(tokens)

    if not names:
        raise InputError(f"{path}: expected proteins, and with --held_out some that are held out")
    if only_held_out:
        print(f"{len(names):,} of {number:,} sequences are held out")
    if longer:
        text = f"more than {most} residues, such as {longer[0]}: the first {most} are used"
        print(f"{len(longer):,} sequences have {text}")
    return names, sequences


def read_variants(path, names, sequences):
    """(the table, {index of a sequence: {position: [(row, old token, new token)]}}). The first
    residue has position 1, which is its index in the tokens, too."""
    try:
        table = pandas.read_csv(path, dtype=str, keep_default_na=False, skip_blank_lines=False)
    except ValueError as error:  # several ones of pandas
        raise InputError(f"{path}: expected CSV: {' '.join(str(error).split())}") from error
    needed = ["mutant", "name"] if len(names) > 1 else ["mutant"]
    if not {*needed} <= {*table} or "score" in table:
        wanted = f"expected {' and '.join(needed)} among the columns, and no score"
        raise InputError(f"{path}: line 1: {wanted}; found {', '.join(table)}")
    indices = {name: index for index, name in enumerate(names)}
    if len(indices) < len(names):
        raise InputError(f"--variants: two sequences are named {max(names, key=names.count)}")

    changes = {index: {} for index in range(len(names))}
    for row, mutant in enumerate(table["mutant"]):
        place = f"{path}: line {row + 2}"
        name = table["name"][row] if len(names) > 1 else names[0]
        if name not in indices:
            raise InputError(f"{place}: no sequence is named {name!r}")
        index = indices[name]
        letters = letters_of(sequences[index])
        for text in mutant.split(":"):
            match = re.fullmatch(f"([{RESIDUES}])([0-9]+)([{RESIDUES}])", text)
            if match is None:
                raise InputError(f"{place}: {text!r}: expected residue, position, new residue")
            old, digits, new = match.groups()
            position = int(digits)
            found = letters[position - 1 : position] or f"not there, but 1 to {len(letters)} are"
            if found != old:
                raise InputError(f"{place}: {text}: residue {position} of {name} is {found}")
            letters = letters[: position - 1] + new + letters[position:]  # not to change twice
            change = (row, RESIDUES.index(old), RESIDUES.index(new))
            changes[index].setdefault(position, []).append(change)
    return table, changes


def make_inputs(args, sequences, changes):
    """Yields (index of a sequence, positions to mask, positions whose output is wanted), those of
    the longest sequences first."""
    longest_first = sorted(range(len(sequences)), key=lambda index: -len(sequences[index]))
    for index in tqdm(longest_first, unit=" sequences", disable=None, leave=False):
        residues = np.flatnonzero(sequences[index] < NUM_RESIDUES)
        # by seed and sequence: what else is in the file changes nothing
        generator = np.random.default_rng([args.seed, *sequences[index]])
        if args.embeddings is not None:
            yield index, [], residues
        elif args.variants is not None:
            for position in changes[index]:
                yield index, [position], [position]
        elif args.orders is not None:
            for _ in range(args.orders):
                order = generator.permutation(residues)
                for k in range(len(order)):  # the first k are revealed
                    yield index, order[k:], order[k : k + 1]
        else:
            for rate in script.draw_mask_rates(args.draws, generator):
                count = math.ceil((args.mask_rate or rate) * len(residues))
                masked = generator.permutation(residues)[:count]
                yield index, masked, masked


def outputs_of(network, sequences, inputs, most_tokens, device):
    """Yields (index of a sequence, wanted positions, outputs (positions, C) of the network there,
    in float64 on the CPU) for each of the inputs."""
    generator = np.random.default_rng(0)
    inputs = iter(inputs)
    for first in inputs:
        # none that follows is longer
        count = most_tokens // len(sequences[first[0]])
        batch_inputs = [first, *itertools.islice(inputs, count - 1)]
        noisy = []
        for index, masked, _ in batch_inputs:
            tokens = sequences[index].copy()
            tokens[masked] = script.MASK
            noisy.append(tokens)
        rates = np.zeros(len(noisy))  # mask no more than these
        batch = script.make_batch(noisy, rates, [generator] * len(noisy), 1).to(device)
        outputs = network(batch).cpu().double().split(batch.lengths.tolist())
        for (index, _, wanted), output in zip(batch_inputs, outputs, strict=True):
            yield index, wanted, output[wanted]


def score_sequences(outputs, sequences, repeats):
    """Nats per residue (sequences, repeats): of each draw of the noise, or of each order."""
    losses = [[] for _ in sequences]
    for index, wanted, logits in outputs:
        targets = torch.from_numpy(sequences[index][wanted]).long()
        # of k masked residues of n the mean: their sum times n / k, as in training, per residue
        losses[index].append(F.cross_entropy(logits, targets).item())
    # an order has n inputs
    return np.array([np.reshape(values, (repeats, -1)).mean(1) for values in losses])


def score_variants(outputs, changes, count):
    """(count,): of each row of the table, in nats."""
    scores = np.zeros(count)
    for index, (position,), logits in outputs:
        logp = logits[0].log_softmax(0).numpy()
        for row, old, new in changes[index][position]:
            scores[row] += logp[new] - logp[old]
    return scores


def report(args, names, sequences, nats, residue_counts):
    """Write nats per residue (sequences, repeats), print those of all residues."""
    lengths = np.array([np.count_nonzero(tokens < NUM_RESIDUES) for tokens in sequences])
    table = pandas.DataFrame({"name": names, "residues": lengths})
    table["nats_per_residue"] = nats.mean(1)
    table["se"] = pandas.DataFrame(nats).sem(axis=1)  # of one draw or order: none
    table.to_csv(args.out, index=False, mode="x", float_format="%.6f")

    counts = np.array(residue_counts) + 0.5  # as in `evaluate`
    surprise = np.append(-np.log(counts / counts.sum()), [0.0, 0.0])  # BEGIN and END: nothing
    unigram = np.array([surprise[tokens].sum() for tokens in sequences])
    print(f"{args.out}: {len(names):,} sequences, {lengths.sum():,} residues")
    for name, values in {"network": nats.mean(1) * lengths, "frequencies": unigram}.items():
        with np.errstate(all="ignore"):  # of one sequence the error over sequences is unknown
            metrics = script.summarize(values, unigram, lengths)
        error = metrics["nelbo_se"] if len(names) > 1 else math.nan
        text = f"perplexity {metrics['perplexity']:.4f}, {metrics['nelbo'] / math.log(2):.4f} bits"
        print(f"{name:12} {metrics['nelbo']:.4f} +- {error:.4f} nats per residue, {text}")


def main():
    args = parse_args()
    device = script.choose_device(args, local_rank=0)
    model, state, options = load_network(args.checkpoint, device)
    if args.block is not None and args.block > options.n_blocks_prot:
        raise InputError(f"--block {args.block}: the network has {options.n_blocks_prot} blocks")
    names, sequences = read_proteins(args.file, options, args.held_out)
    changes = {}
    if args.variants is not None:
        table, changes = read_variants(args.variants, names, sequences)

    network = model if args.embeddings is None else partial(model.hidden, blocks=args.block)
    inputs = make_inputs(args, sequences, changes)
    most_tokens = args.batch_size * options.max_protein_len
    outputs = outputs_of(network, sequences, inputs, most_tokens, device)
    autocast = script.choose_precision(args, device)
    with torch.no_grad(), autocast():
        if args.embeddings is not None:
            means = {index: hidden.mean(0).float() for index, _, hidden in outputs}
            embeddings = np.stack([means[index] for index in range(len(names))])
            with open(args.embeddings, "xb") as file:
                np.savez(file, names=names, embeddings=embeddings)
            print(f"{args.embeddings}: {len(names):,} sequences")
        elif args.variants is not None:
            table["score"] = score_variants(outputs, changes, len(table))
            table.to_csv(args.out, index=False, mode="x", float_format="%.6f")
            print(f"{args.out}: {len(table):,} variants")
        else:
            nats = score_sequences(outputs, sequences, args.orders or args.draws)
            report(args, names, sequences, nats, state["data"]["residue_counts"])


if __name__ == "__main__":
    try:
        main()
    except (InputError, OSError) as error:
        print(f"score_uniref50.py: {error}", file=sys.stderr)
        sys.exit(2)
