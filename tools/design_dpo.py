"""Draw sequences for a structure with a network of run_dpo_ddp.py, beside the one it came from.

    python tools/design_dpo.py outputs/dpo_ddp/best_model.pt complex.cif --design_chains B
    python tools/design_dpo.py best_model.pt complex.pdb --design_chains B --fixed_chains A \\
        --mutable_ranges 6-17 --num_samples 20 --temperature 0.2
    python tools/design_dpo.py v_48_020.pt complex.pdb --num_samples 48 --out designs

The network: best_model.pt, step_N.pt or latest.pt of a run, or released weights of ProteinMPNN. Its
reference, that of the run or --reference, draws as many, for comparison.

Writes designs.fasta: the structure's own sequence, then those drawn, with '/' between chains; and
designs.csv, a table for tools/make_dpo_pairs.py (the design chains alone, without '/'), to which
you can add a column with your own score. Positions count from 0 on over the design chains.

Prints of each network's sequences: recovery (share of the designed residues with the structure's
letter), net charge per 100 designed residues (K + R - D - E), and their perplexity, under itself
and under the reference, at temperature 1.
"""

import json
import math
import os
import sys
from argparse import Namespace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np
import pandas
import torch
import torch.nn.functional as F
from make_dpo_pairs import LISTS, net_charge
from score_dpo import call, check_new, load_networks
from tqdm import tqdm

import run_dpo_ddp as script
from run_dpo_ddp import ALPHABET, UNKNOWN, WIDTH


def span(text):
    """[first, last] of first-last."""
    first, last = text.split("-")
    return [int(first), int(last)]


def parse_args():
    parser = script.Parser(description=__doc__, formatter_class=script.HelpFormatter)
    add = parser.add_argument
    add("checkpoint", help="the network")
    add("pdb_file", help="PDB or mmCIF, also .gz")
    add("--reference", help="weights to compare with; None: those of the run")
    add("--design_chains", nargs="+", default=[], help="none: the first chain with protein")
    add("--fixed_chains", nargs="+", default=[], help="context")
    add("--mutable_positions", nargs="+", type=int, default=[], help="design these alone")
    add("--mutable_ranges", nargs="+", type=span, default=[], help="and these, such as 6-17")
    add("--num_samples", type=script.COUNT, default=8, help="sequences to draw")
    text = "of the probabilities; 0: the likeliest"
    add("--temperature", type=script.number(0, 1e6), default=0.1, help=text)
    add("--seed", type=script.NATURAL, default=42, help="of the decoding orders and the letters")
    add("--out", default="designs", help="writes OUT.fasta and OUT.csv")
    add("--device", default="auto", choices=["auto", "cuda", "xpu", "cpu"], help="auto: the best")
    return parser.parse_args()


class Complex:
    """The chains that the arguments name, in a structure: those to design come first."""

    def __init__(self, args):
        self.fields = {name: getattr(args, name) for name in LISTS if getattr(args, name)}
        row = script.Row(args.pdb_file, "", "", **self.fields)
        structure = script.read_structure(args.pdb_file)
        for text, found in structure.notes.items():
            print(f"{len(found)} residues {text}, such as {found[0]}")
        joined, self.chain, self.length = script.join_chains(row, structure.chains)
        self.native = joined.letters
        self.whole = np.isfinite(joined.coords).all(axis=(1, 2))
        self.designed = self.whole & script.choose_mutable(row, self.length, len(self.whole))
        if not self.designed.any():
            raise ValueError(f"{args.pdb_file}: no residue to design has N, CA, C and O")
        self.backbone = [
            part[self.whole] for part in (joined.coords, joined.residue_index, self.chain)
        ]

    def text(self, letters):
        """The sequence, with '/' between chains."""
        chains = np.split(letters, np.flatnonzero(np.diff(self.chain)) + 1)
        return "/".join("".join(ALPHABET[letter] for letter in own) for own in chains)


def decode(model, backbone, native, designed, orders, temperature, generator):
    """Letters (C, N), and log p of each (C, N) at temperature 1, residue by residue in the orders
    (C, N). Where `designed` (N,) is False, letters are `native` (N,)."""
    nodes, edges = model.encode(backbone)
    is_neighbor = torch.ones_like(backbone.neighbors)  # all residues have as many
    versions, residues = orders.shape
    rows = torch.arange(versions, device=native.device)
    letters = native.repeat(versions, 1)
    logp = torch.zeros(versions, residues, device=native.device)
    tables = []
    for layer in model.decoder_layers:
        own, edge, letter, other = layer.W1.weight.split(WIDTH, dim=1)
        # what residues tell their neighbors, without their letter until they are decoded
        said = F.linear(nodes, other).repeat(versions, 1, 1)
        tables.append((layer, own, letter, other, F.linear(edges, edge), said))

    for step in tqdm(range(residues), unit=" residues", disable=None):
        at = orders[:, step]
        around = backbone.neighbors[at]
        h = nodes[at]
        before = []
        for layer, own, _, _, between, said in tables:
            before.append(h)
            x = between[at] + said[rows[:, None], around]
            h = layer(h, x + F.linear(h, own, layer.W1.bias).unsqueeze(1), is_neighbor[at])

        logits = model.W_out(h)
        drawn = torch.where(designed[at], draw(logits, temperature, generator), native[at])
        letters[rows, at] = drawn
        logp[rows, at] = logits.log_softmax(-1)[rows, drawn]
        for (_, _, letter, other, _, said), h in zip(tables, before, strict=True):
            said[rows, at] = F.linear(model.W_s(drawn), letter) + F.linear(h, other)
    return letters, logp


def draw(logits, temperature, generator):
    """Letters (C,), never X. The numbers come from the host: the same on every device."""
    logits = logits[:, :UNKNOWN].float()
    if temperature == 0:
        return logits.argmax(-1)
    uniform = torch.rand(len(logits), UNKNOWN, generator=generator).clamp(min=1e-30)
    # the largest of logit / T plus Gumbel noise is a draw from the softmax
    return (logits / temperature - (-uniform.log()).log().to(logits.device)).argmax(-1)


@torch.no_grad()
def sample(args, model, reference, found, device):
    """A table of the sequences that a network draws."""
    designed = torch.from_numpy(found.designed[found.whole])
    native = torch.from_numpy(found.native[found.whole]).long().to(device)
    features = script.featurize(*found.backbone, min(model.k_neighbors, len(native)))
    backbone = Namespace(**{name: tensor.to(device) for name, tensor in features.items()})
    backbone.source = torch.arange(len(native), device=device)
    ranks = [script.decode_ranks(designed, [args.seed, i]) for i in range(args.num_samples)]
    orders = torch.stack(ranks).argsort(1).to(device)
    generator = torch.Generator().manual_seed(args.seed)
    own = designed.to(device)
    drawn, logp = decode(model, backbone, native, own, orders, args.temperature, generator)
    rows = []
    for letters, mine, decode_rank in zip(drawn, logp, ranks, strict=True):
        whole = found.native.copy()
        whole[found.whole] = letters.cpu().numpy()
        text = "".join(ALPHABET[letter] for letter in whole[found.designed])
        row = {"sequence": found.text(whole)}
        row["recovery"] = np.mean(whole[found.designed] == found.native[found.designed])
        row["charge_per_100"] = 100 * net_charge(text) / len(text)
        row["perplexity"] = math.exp(-mine[own].mean())
        if reference is not None:
            backbone.letters, backbone.decode_rank = letters[None], decode_rank.to(device)
            logits = reference(backbone)
            losses = -script.log_probabilities(logits, letters[None])[0]
            row["perplexity_reference"] = math.exp(losses[own].mean())
        rows.append(row)
    return pandas.DataFrame(rows)


def write_designs(args, found, table):
    """OUT.fasta and OUT.csv"""
    stem = Path(args.pdb_file).name.split(".")[0]
    title = f">{stem} designed_residues={found.designed.sum()} model={args.checkpoint}"
    lines = [title, found.text(found.native)]
    for number, row in table.iterrows():
        scores = " ".join(f"{name}={value:.4f}" for name, value in row.iloc[1:].items())
        lines.append(f">{stem}_{number} T={args.temperature:g} seed={args.seed} {scores}")
        lines.append(row.sequence)
    Path(f"{args.out}.fasta").write_text("\n".join(lines) + "\n")

    path = os.path.relpath(args.pdb_file, Path(args.out).resolve().parent)
    table["sequence"] = [text.replace("/", "")[: found.length] for text in table["sequence"]]
    table.insert(0, "pdb_file", path)
    for name, value in found.fields.items():
        table.insert(1, name, json.dumps(value))
    table.to_csv(f"{args.out}.csv", index=False, float_format="%.4f")


def run(args):
    args.out = args.out.removesuffix(".csv").removesuffix(".fasta")
    check_new(f"{args.out}.fasta")
    check_new(f"{args.out}.csv")
    device = script.choose_device(args, local_rank=0)
    model, reference, _ = load_networks(args)
    found = Complex(args)
    reference = reference and reference.to(device)
    for who, network in {"network": model, "reference": reference}.items():
        if network is None:
            continue
        table = sample(args, network.to(device), reference, found, device)
        means = table.drop(columns="sequence").mean()
        print(f"{who:10} {', '.join(f'{name} {value:.4f}' for name, value in means.items())}")
        if who == "network":
            write_designs(args, found, table)
    print(f"{args.out}.fasta, {args.out}.csv: {args.num_samples} sequences")


if __name__ == "__main__":
    call(run, parse_args)
