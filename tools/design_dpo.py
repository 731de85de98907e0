"""Draw sequences for structures with a network of run_dpo_ddp.py, beside the one it came from.

    python tools/design_dpo.py outputs/dpo_ddp/best_model.pt monomer.cif
    python tools/design_dpo.py best_model.pt complex.pdb --design_chains B --fixed_chains A \\
        --mutable_ranges B6-B17 --num_samples 20 --temperature 0.2
    python tools/design_dpo.py v_48_020.pt *.pdb --num_samples 48 --omit C --out designs
    python tools/design_dpo.py best_model.pt dimer.pdb --design_chains A B --tied A B --bias K=0.5

The reference, that of the run or --reference, draws as many, for comparison. As in the released
program letters come from the softmax of (logits + bias) / temperature over those that are not
omitted; for residues that are tied, from the mean of their logits.

Writes designs.fasta: each structure's own sequence, then those drawn, with '/' between chains; and
designs.csv, a table for tools/make_dpo_pairs.py (the design chains alone, without '/'), to which
you can add a column with your own score. Positions: of the file, with its chain before (B12), or
from 0 on over the design chains (11).

Prints of each network's sequences: recovery (share of the designed residues with the structure's
letter), net charge per 100 designed residues (K + R - D - E), and their perplexity, under itself
and under the reference, at temperature 1, without bias, and as if nothing was tied.
"""

import json
import math
import os
import re
from pathlib import Path

import numpy as np
import pandas
import torch
import torch.nn.functional as F
from make_dpo_pairs import Backbone, call, check_new, net_charge  # finds run_dpo_ddp.py
from score_dpo import load_models, score_sequences
from tqdm import tqdm

import run_dpo_ddp as script
from run_dpo_ddp import ALPHABET, UNKNOWN, WIDTH, HelpFormatter, InputError, Parser


def parse_args():
    parser = Parser(description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("checkpoint", help="best_model.pt, step_N.pt or latest.pt of a run, or released weights")
    add("pdb_file", nargs="+", help="PDB or mmCIF, also .gz")
    add("--reference", help="weights to compare with; None: those of the run")
    add("--design_chains", nargs="+", default=[], help="such as H L; none: the first with protein")
    add("--fixed_chains", nargs="+", default=[], help="context")
    add("--mutable_positions", nargs="+", default=[], help="design these alone, such as A6 or 5")
    add("--mutable_ranges", nargs="+", default=[], help="and these, such as A6-A17 or 5-16")
    add("--tied", nargs="+", default=[], help="design chains that get the same letters")
    add("--omit", default="", help="letters that are never drawn, such as CM")
    add("--bias", nargs="+", default=[], help="added to the logits, such as K=0.5 E=-0.5")
    add("--num_samples", type=script.COUNT, default=8, help="sequences to draw")
    add("--temperature", type=script.number(0, 1e6), default=0.1, help="0: the likeliest letters")
    add("--seed", type=script.NATURAL, default=42, help="of the decoding orders and the letters")
    add("--out", default="designs", help="writes OUT.fasta and OUT.csv")
    add("--device", default="auto", choices=["auto", "cuda", "xpu", "cpu"], help="auto: the best")
    return parser.parse_args()


def read_bias(args):
    """(20,) what is added to the logits of each letter but X. Raises InputError."""
    letters = ALPHABET[:UNKNOWN]
    bias = torch.zeros(UNKNOWN)
    for text in args.bias:
        match = re.fullmatch(rf"([{letters}])=([-+]?\d*\.?\d+)", text.upper())
        if not match:
            raise InputError(f"--bias {text}: expected such as K=0.5, with a letter of {letters}")
        bias[letters.index(match[1])] = float(match[2])
    omitted = set(args.omit.upper()) - {"X"}
    if not omitted < set(letters):
        raise InputError(f"--omit {args.omit}: expected letters of {letters}, not all of them")
    bias[[letters.index(letter) for letter in omitted]] = -math.inf
    return bias


def read_range(text):
    """Both ends of a range, such as A6-A17 or 5-16, for a Row. Raises ValueError."""
    ends = text.split("-")
    if len(ends) != 2 or ends[0].isdecimal() != ends[1].isdecimal():
        raise ValueError(f"range {text}; expected such as A6-A17, or 5-16")
    return [int(end) if end.isdecimal() else end for end in ends]


class Target(Backbone):
    """A structure to design. Raises ValueError."""

    def __init__(self, args, path):
        fields = {"design_chains": args.design_chains, "fixed_chains": args.fixed_chains}
        positions = [int(text) if text.isdecimal() else text for text in args.mutable_positions]
        ranges = [read_range(text) for text in args.mutable_ranges]
        fields.update(mutable_positions=positions, mutable_ranges=ranges)
        self.path = path
        self.fields = {name: value for name, value in fields.items() if value}
        super().__init__({"pdb_file": path, **self.fields})
        self.members = self.tie(args.tied)

    def tie(self, tied):
        """(N, G): the residues that get the same letter as each, itself among them; where it is
        alone, it stands there G times. Raises ValueError."""
        numbers = enumerate(self.design)
        chains = {name: np.flatnonzero(self.chain_index == number) for number, name in numbers}
        names = tied or self.design[:1]
        designed = [self.is_designed[chains.get(name, [])].tolist() for name in names]
        is_same = all(designed) and all(own == designed[0] for own in designed)
        if not is_same or len(set(tied)) < len(tied):
            lengths = ", ".join(f"{name} of {len(chain)}" for name, chain in chains.items())
            expected = f"equally long design chains ({lengths}) with the same residues to design"
            raise ValueError(f"--tied {' '.join(tied)}; expected {expected}")

        same = np.stack([chains[name] for name in names], axis=1)[designed[0]]
        members = np.arange(len(self.native))[:, None].repeat(same.shape[1], axis=1)
        for own in same.T:
            members[own] = same
        index = np.cumsum(self.is_whole) - 1  # among those that the network sees
        return torch.from_numpy(index[members[self.is_whole]])

    def text(self, letters):
        """The sequence (L,), with '/' between chains."""
        chains = np.split(letters, np.flatnonzero(np.diff(self.chain_index)) + 1)
        return "/".join("".join(ALPHABET[letter] for letter in own) for own in chains)


def decode(model, backbone, native, designed, members, ranks, bias, temperature, generator):
    """Letters (C, N), drawn residue by residue, and their rank in decoding order (C, N). Where
    `designed` (N,) is False they are `native` (N,). Random ranks (C, N) say the order; of those
    that are tied, members (N, G), the first says it for all, which come one after the other."""
    nodes, edges = model.encode(backbone)
    is_neighbor = torch.ones_like(backbone.neighbors)  # all residues have as many
    versions, residues = ranks.shape
    own_index = torch.arange(residues, device=native.device).unsqueeze(1)
    tied_index = (members < own_index).sum(1, keepdim=True)  # among those that are tied
    count = (members != own_index).sum(1, keepdim=True) + 1
    orders = (ranks[:, members].amin(-1) * residues + tied_index.T).argsort(1)
    rows = torch.arange(versions, device=native.device)
    letters = native.repeat(versions, 1)
    sums = 0.0
    tables = []
    for layer in model.decoder_layers:
        own, edge, letter, other = layer.W1.weight.split(WIDTH, dim=1)
        # what residues tell their neighbors, without their letter until they are decoded
        without_letter = F.linear(nodes, other).repeat(versions, 1, 1)
        tables.append((layer, own, letter, other, F.linear(edges, edge), without_letter))

    for step in tqdm(range(residues), unit=" residues", disable=None):
        at = orders[:, step]
        around = backbone.neighbors[at]
        h = nodes[at]
        before = []
        for layer, own, _, _, between, without_letter in tables:
            before.append(h)
            x = between[at] + without_letter[rows[:, None], around]
            h = layer(h, x + F.linear(h, own, layer.W1.bias).unsqueeze(1), is_neighbor[at])

        # all that are tied get what the last one draws, from the mean of their logits
        is_last = tied_index[at] == count[at] - 1
        sums = sums + model.W_out(h)
        drawn = draw(sums / count[at], bias, temperature, generator)
        drawn = torch.where(designed[at], drawn, native[at])
        sums = sums.masked_fill(is_last, 0.0)
        letters[rows[:, None], members[at]] = drawn[:, None]
        for (_, _, letter, other, _, without_letter), h in zip(tables, before, strict=True):
            without_letter[rows, at] = F.linear(h, other)
            with_letter = F.linear(model.W_s(drawn), letter) * is_last
            without_letter[rows[:, None], members[at]] += with_letter[:, None]
    return letters, orders.argsort(1)


def draw(logits, bias, temperature, generator):
    """Letters (C,), never X, of logits (C, 21) and a bias (20,). The random numbers come from the
    host: the same on every device."""
    logits = logits[:, :UNKNOWN].float() + bias
    if temperature == 0:
        return logits.argmax(-1)
    uniform = torch.rand(len(logits), UNKNOWN, generator=generator).clamp(min=1e-30)
    # the largest of logit / T plus Gumbel noise is a draw from the softmax
    return (logits / temperature - (-uniform.log()).log().to(logits.device)).argmax(-1)


@torch.no_grad()
def sample(args, model, reference, target, bias):
    """A table of the sequences that a network draws."""
    ranks = [script.decode_ranks(target.designed, [args.seed, i]) for i in range(args.num_samples)]
    native = torch.from_numpy(target.native[target.is_whole]).long()
    inputs = [native, target.designed, target.members, torch.stack(ranks), bias]
    inputs = [tensor.to(model.W_out.weight.device) for tensor in inputs]
    generator = torch.Generator().manual_seed(args.seed)
    backbone = target.features(model)
    drawn, decode_rank = decode(model, backbone, *inputs, args.temperature, generator)

    letters = np.tile(target.native, (args.num_samples, 1))
    letters[:, target.is_whole] = drawn.cpu()
    table = pandas.DataFrame({"sequence": [target.text(own) for own in letters]})
    table["recovery"] = (letters == target.native)[:, target.is_designed].mean(1)
    texts = ["".join(ALPHABET[letter] for letter in own) for own in letters[:, target.is_designed]]
    table["charge_per_100"] = [100 * net_charge(text) / len(text) for text in texts]
    for name, scorer in {"perplexity": model, "perplexity_reference": reference}.items():
        if scorer is not None:
            logp = score_sequences(scorer, target, drawn, decode_rank)
            table[name] = (-logp[:, target.designed].mean(1)).exp().numpy()
    return table


def add_designs(args, target, table, lines, tables):
    """Add a structure's own sequence and those of a table to the lines of OUT.fasta, and to the
    tables of OUT.csv."""
    stem = Path(target.path).name.split(".")[0]
    lines.append(f">{stem} designed_residues={target.designed.sum()} model={args.checkpoint}")
    lines.append(target.text(target.native))
    for number, row in table.iterrows():
        scores = " ".join(f"{name}={value:.4f}" for name, value in row.iloc[1:].items())
        lines.append(f">{stem}_{number} T={args.temperature:g} seed={args.seed} {scores}")
        lines.append(row.sequence)

    table["sequence"] = [text.replace("/", "")[: target.length] for text in table["sequence"]]
    table.insert(0, "pdb_file", os.path.relpath(target.path, Path(args.out).resolve().parent))
    for name, value in target.fields.items():
        table.insert(1, name, json.dumps(value))
    tables.append(table)


def run(args):
    args.out = args.out.removesuffix(".csv").removesuffix(".fasta")
    check_new(f"{args.out}.fasta")
    check_new(f"{args.out}.csv")
    bias = read_bias(args)
    models, _ = load_models(args)
    targets = []
    for path in args.pdb_file:
        try:
            targets.append(Target(args, path))
        except ValueError as error:
            raise InputError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from None

    lines = []
    tables = []
    for target in targets:
        print(f"{target.path}: {target.designed.sum()} of {len(target.native)} residues designed")
        for who, model in models.items():
            table = sample(args, model, models.get("reference"), target, bias)
            means = table.drop(columns="sequence").mean()
            print(f"{who:10} {', '.join(f'{name} {value:.4f}' for name, value in means.items())}")
            if who == "network":
                add_designs(args, target, table, lines, tables)
    Path(f"{args.out}.fasta").write_text("\n".join(lines) + "\n")
    pandas.concat(tables).to_csv(f"{args.out}.csv", index=False, float_format="%.4f")
    print(f"{args.out}.fasta, {args.out}.csv: {args.num_samples * len(targets)} sequences")


if __name__ == "__main__":
    call(run, parse_args)
