"""Score proteins with a network of run_train_uniref50_ddp.py, or make embeddings of them.

    python tools/score_uniref50.py experiments_ddp/best.pt proteins.fasta --orders 4

Written is a CSV file of name, residues, nats_per_residue and se, its standard error over the draws.
By default the bound on -log p that training minimizes, the mean of --draws of the noise (one draw
has a standard deviation of 20 to 46 nats). --orders: the same with less noise, by the chain rule,
residue by residue in random orders. Sequences of one length get the same masks and orders: the
difference of two variants has much less. --mask_rate: the cross entropy where this part is masked.
--variants: CSV with a column mutant, such as A42G, A42G:L7V (residues count from 1) or WT, and name
if FILE has several sequences. Adds score: the sum of log p(new) - log p(old), each position masked
alone in the sequence of FILE (masked marginals, Meier et al. 2021).
--embeddings: names, and embeddings (sequences, hidden_size): means of the hidden states over the
residues, nothing masked: of EsmModel's last_hidden_state in transformers, unless --block is given.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pandas
import torch
from sample_uniref50 import check_new, letters_of, load_network, read_proteins
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
    one_of("--orders", type=COUNT, help="of each sequence, in place of --draws")
    one_of("--variants", type=Path, metavar="TABLE", help="substitutions to score")
    one_of("--embeddings", type=Path, metavar="OUT.npz", help="file to write, in place of --out")
    add("--block", type=NATURAL, help="embed after so many blocks; None: all, and the last norm")
    add("--seed", type=NATURAL, default=0, help="of masks and orders")
    add("--batch_size", type=COUNT, default=64, help="masked copies per forward pass")
    add("--device", default="auto", choices=["auto", "cuda", "xpu", "cpu"], help="auto: the best")
    parser.set_defaults(precision="auto")  # bf16 on GPUs, as in the sampler
    args = parser.parse_args()
    check_new(parser, "--embeddings" if args.embeddings else "--out", args.embeddings or args.out)
    return args


def logp_of(args, network, tokens, masks):
    """Yields log-probabilities of residues, (len(tokens), 26), for each of masks: positions."""
    rows = np.tile(tokens, (len(masks), 1))
    for row, masked in zip(rows, masks, strict=True):
        row[masked] = script.MASK
    for part in np.split(rows, range(args.batch_size, len(rows), args.batch_size)):
        # the masks are in already: at rate 0 none is drawn
        batch = script.make_batch([*part], np.zeros(len(part)), [np.random] * len(part), 1)
        logits = network(batch.to(args.device)).cpu().double()
        yield from logits.log_softmax(1).numpy().reshape(*part.shape, -1)


def score(args, network, tokens):
    """Nats per residue of each draw of the noise, or of each order."""
    generator = np.random.default_rng([args.seed, len(tokens)])
    masks = []
    for rate in script.draw_mask_rates(args.orders or args.draws, generator):
        order = generator.permutation(np.flatnonzero(tokens < NUM_RESIDUES))
        if args.orders is not None:
            masks += [order[k:] for k in range(len(order))]  # the first k are revealed
        else:
            # 0.07 of 100 residues are 7, though their product is a little more
            masks.append(order[: int(np.ceil((args.mask_rate or rate) * len(order) - 1e-9))])

    nats = []
    for masked, logp in zip(masks, logp_of(args, network, tokens, masks), strict=True):
        wanted = masked if args.orders is None else masked[:1]
        # as in training their sum times n / k, of n residues k masked ones, and divided by n
        nats.append(-logp[wanted, tokens[wanted]].mean())
    return np.reshape(nats, (args.orders or args.draws, -1)).mean(1)


def report(proteins, nats, residue_counts):
    """The table of nats (sequences, draws or orders) per residue. Prints those of all together."""
    lengths = np.array([np.count_nonzero(own < NUM_RESIDUES) for own in proteins.values()])
    counts = np.array(residue_counts) + 0.5  # as in `Proteins.unigram_nats`
    surprise = np.log(counts.sum() / counts)
    unigram = np.array([surprise[own[own < NUM_RESIDUES]].sum() for own in proteins.values()])
    for name, sums in {"network": nats.mean(1) * lengths, "frequencies": unigram}.items():
        mean = sums.sum() / lengths.sum()
        error = pandas.Series(sums - mean * lengths).std() * len(sums) ** 0.5 / lengths.sum()
        spread = f" +- {error:.4f}" if len(sums) > 1 else ""
        text = f"perplexity {np.exp(mean):.4f}, {mean / np.log(2):.4f} bits"
        print(f"{name:12} {mean:.4f}{spread} nats per residue, {text}")
    table = pandas.DataFrame({"name": [*proteins], "residues": lengths})
    return table.assign(nats_per_residue=nats.mean(1), se=pandas.DataFrame(nats).sem(axis=1))


def score_variants(args, network, proteins):
    """The table of --variants with a column score: the masked marginals, in nats."""
    table = pandas.read_csv(args.variants, dtype=str, na_filter=False, skip_blank_lines=False)
    names = table["name"] if "name" in table else [*proteins] * len(table)
    if "mutant" not in table or "score" in table or len(names) != len(table):
        text = f"found the columns {', '.join(table)}; expected mutant, name, and no score"
        raise InputError(f"{args.variants}: {text}")
    changes = {}  # {name: {position: {row of the table: new residue}}}
    for row, (name, mutant) in enumerate(zip(names, table["mutant"], strict=True)):
        where = f"{args.variants}: line {row + 2}"
        if name not in proteins:
            text = f"no sequence named {name!r} in {args.file}; it begins with {[*proteins][:3]}"
            raise InputError(f"{where}: {text}")
        letters = letters_of(proteins[name])
        for text in mutant.split(":") if mutant not in ("", "WT") else []:
            position = int(text[1:-1]) if text[1:-1].isdecimal() else 0
            here = letters[position - 1 : position]  # "" past the end
            rows = changes.setdefault(name, {}).setdefault(position, {})
            if not here or text[0] != here or text[-1] not in RESIDUES or row in rows:
                has = f"{here}{position}" if here else f"residues 1 to {len(letters)}"
                text = f"{text!r}: expected such as A42G, once; {name!r} has {has} here"
                raise InputError(f"{where}: {text}")
            rows[row] = RESIDUES.index(text[-1])

    scores = np.zeros(len(table))
    for name, own in changes.items():
        tokens = proteins[name]
        for position, logp in zip(own, logp_of(args, network, tokens, [*own]), strict=True):
            for row, new in own[position].items():
                scores[row] += logp[position, new] - logp[position, tokens[position]]
    return table.assign(score=scores)


@torch.no_grad()
def main():
    args = parse_args()
    args.device = script.choose_device(args, local_rank=0)
    model, state, options = load_network(args.checkpoint, args.device)
    if args.block is not None and (args.embeddings is None or args.block > options.n_blocks_prot):
        raise InputError(f"--block is for --embeddings, up to {options.n_blocks_prot} here")
    proteins = read_proteins(args.file, options, args.held_out)
    sequences = tqdm(proteins.values(), unit=" sequences", disable=None, leave=False, delay=1)
    with script.choose_precision(args, args.device)():
        if args.variants is not None:
            table = score_variants(args, model, proteins)
        elif args.embeddings is None:
            nats = np.array([score(args, model, tokens) for tokens in sequences])
            table = report(proteins, nats, state["data"]["residue_counts"])
        else:
            means = []
            for tokens in sequences:
                batch = script.make_batch([tokens], [0.0], [np.random], 1).to(args.device)
                hidden = model.hidden(batch, args.block).cpu().float().numpy()
                means.append(hidden[tokens < NUM_RESIDUES].mean(0))
            with open(args.embeddings, "xb") as file:
                np.savez(file, names=[*proteins], embeddings=np.stack(means))
            print(f"{args.embeddings}: {len(means):,} embeddings")
            return
    table.to_csv(args.out, index=False, mode="x", float_format="%.6f")
    print(f"{args.out}: {len(table):,} rows")


if __name__ == "__main__":
    try:
        main()
    except (InputError, OSError, ValueError) as error:  # ValueError: pandas'
        print("score_uniref50.py: error:", *str(error).split(), file=sys.stderr)
        sys.exit(2)
