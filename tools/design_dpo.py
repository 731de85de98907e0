"""Draw sequences for a structure with a network of run_dpo_ddp.py, beside the one it came from.

    python tools/design_dpo.py outputs/dpo_ddp/best.pt complex.cif --design_chains B
    python tools/design_dpo.py best_model.pt complex.pdb --design_chains B --fixed_chains A \\
        --mutable_ranges 6-17 --num_samples 20 --temperature 0.2
    python tools/design_dpo.py v_48_020.pt complex.pdb --num_samples 48 --out designs.csv

The network: best.pt or latest.pt of a run, or ProteinMPNN's own format, as best_model.pt and the
released weights have it. If the weights that training began with are there (--reference, or
reference_model.pt beside the network), they draw as many, for comparison.

Writes FASTA: the structure's own sequence, then those drawn, with '/' between chains; or, if --out
ends in .csv, a table for tools/make_dpo_pairs.py (of the design chains alone, without '/'), to
which you can add a column with your own score. Positions count from 0 on over the design chains.

Prints of each network's sequences: recovery (share of the designed residues with the structure's
letter), net charge per 100 designed residues (K + R - D - E), and the perplexity under either
network, at temperature 1, in one decoding order. Warns of a collapse, where one letter has more
than half of the designed positions.
"""

import csv
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np
import torch
import torch.nn.functional as F
from make_dpo_pairs import net_charge
from score_dpo import load_network, load_reference
from tqdm import tqdm

import run_dpo_ddp as script
from run_dpo_ddp import ALPHABET, UNKNOWN, WIDTH, InputError

TOGETHER = 8  # sequences that are scored at once


def span(text):
    """[first, last] of first-last."""
    return [int(end) for end in text.split("-")]


def parse_args():
    parser = script.Parser(description=__doc__)
    add = parser.add_argument
    add("checkpoint", help="the network")
    add("pdb_file", help="PDB or mmCIF, also .gz")
    add("--reference", help="weights to compare with; None: reference_model.pt beside the network")
    add("--design_chains", nargs="+", help="None: the first chain with protein")
    add("--fixed_chains", nargs="+", default=[], help="context")
    add("--mutable_positions", nargs="+", type=int, help="design these alone")
    add("--mutable_ranges", nargs="+", type=span, help="and these, such as 6-17")
    add("--num_samples", type=script.COUNT, default=8, help="sequences to draw")
    text = "of the probabilities; 0: the likeliest"
    add("--temperature", type=script.number(0, 1e6), default=0.1, help=text)
    add("--seed", type=int, default=42, help="of the decoding orders and the letters")
    add("--out", default="designs.fasta", help="file to write, .fasta or .csv")
    add("--device", default="auto", choices=["auto", "cuda", "xpu", "cpu"], help="auto: the best")
    args = parser.parse_args()

    if not Path(args.out).parent.is_dir():
        parser.error(f"--out {args.out}: there is no folder {Path(args.out).parent}")
    if Path(args.out).exists():
        parser.error(f"{args.out} exists: give another --out")
    return args


def read_complex(args):
    """(Complex to design, the row of data that means it). Raises ValueError."""
    structure = script.read_structure(args.pdb_file)
    if structure.note:
        print(structure.note)
    names = ("design_chains", "fixed_chains", "mutable_positions", "mutable_ranges")
    row = {name: getattr(args, name) for name in names if getattr(args, name)}
    row.setdefault("design_chains", [next(iter(structure.chains))])
    return script.join_chains(args.pdb_file, structure, row), row


def decode(model, structures, native, designed, orders, temperature, generator):
    """Letters (C, N), and log p of each (C, N) at temperature 1, residue by residue in the orders
    (C, N). Where `designed` (N,) is False, letters are `native` (N,)."""
    nodes, edges = model.encode(structures)
    neighbours = structures.neighbours  # as many of each residue
    near = torch.ones_like(neighbours)
    versions, residues = orders.shape
    rows = torch.arange(versions, device=native.device)
    letters = native.repeat(versions, 1)
    logp = torch.zeros(versions, residues, device=native.device)
    tables = []
    for layer in model.decoder_layers:
        own, edge, letter, other = layer.W1.weight.split(WIDTH, dim=1)
        # what residues tell their neighbours, without their letter until they are decoded
        said = F.linear(nodes, other).repeat(versions, 1, 1)
        tables.append((layer, own, letter, other, F.linear(edges, edge), said))

    for step in tqdm(range(residues), unit=" residues", disable=None):
        at = orders[:, step]
        around = neighbours[at]
        h = nodes[at]
        inputs = []
        for layer, own, _, _, between, said in tables:
            inputs.append(h)
            x = between[at] + said[rows[:, None], around]
            h = layer(h, x + F.linear(h, own, layer.W1.bias).unsqueeze(1), near[at])

        logits = model.W_out(h)
        drawn = torch.where(designed[at], draw(logits, temperature, generator), native[at])
        letters[rows, at] = drawn
        logp[rows, at] = logits.log_softmax(-1)[rows, drawn]
        for (_, _, letter, other, _, said), h in zip(tables, inputs, strict=True):
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


def network_inputs(model, found, device):
    """Structures, letters (N,), and which are designed (N,), of the N residues with all atoms."""
    whole = found.chain.whole()
    arrays = script.featurise(found, min(model.neighbours, int(whole.sum())))
    tensors = [torch.from_numpy(arrays[name]) for name in script.Backbones._fields]
    tensors[0] = tensors[0].long()
    structures = script.Backbones(*[tensor.to(device) for tensor in tensors])
    native = torch.from_numpy(found.chain.letters[whole]).long().to(device)
    return structures, native, torch.from_numpy(found.designed[whole])


def random_order(designed, generator):
    """(N,) a decoding order: the context first."""
    context = (~designed).nonzero().flatten()
    places = designed.nonzero().flatten()
    return torch.cat([context, places[torch.randperm(len(places), generator=generator)]])


@torch.no_grad()
def sample(args, model, found, device):
    """Letters (C, L) of the whole Complex."""
    structures, native, designed = network_inputs(model, found, device)
    generator = torch.Generator().manual_seed(args.seed)
    orders = [random_order(designed, generator) for _ in range(args.num_samples)]
    orders = torch.stack(orders).to(device)
    inputs = (structures, native, designed.to(device), orders, args.temperature, generator)
    drawn, _ = decode(model, *inputs)
    letters = np.tile(found.chain.letters, (args.num_samples, 1))
    letters[:, found.chain.whole()] = drawn.cpu().numpy()
    return letters


@torch.no_grad()
def perplexities(args, model, found, letters, device):
    """(C,) of letters (C, L), per designed residue, at temperature 1."""
    structures, native, designed = network_inputs(model, found, device)
    order = random_order(designed, torch.Generator().manual_seed(args.seed))
    rank = order.argsort().to(device)
    row = torch.arange(len(native), device=device)
    encoded = model.encode(structures)
    losses = []
    for part in torch.from_numpy(letters[:, found.chain.whole()]).long().split(TOGETHER):
        part = part.to(device)
        logp = script.log_probabilities(model(structures, part, row, rank, encoded), part)
        losses.append(-logp[:, designed.to(device)].cpu().double().mean(1))
    return torch.cat(losses).exp().numpy()


def text_of(found, letters):
    """The sequence, with '/' between chains."""
    starts = np.flatnonzero(np.diff(found.index)) + 1
    chains = np.split(np.array(list(ALPHABET))[letters], starts)
    return "/".join("".join(chain) for chain in chains)


def warn_of_collapse(found, letters):
    for number, row in enumerate(letters[:, found.designed]):
        counts = np.bincount(row)
        share = counts.max() / len(row)
        if share > 0.5 and len(row) > 3:
            text = f"{ALPHABET[counts.argmax()]} at {share:.0%} of the designed positions"
            hint = "lower --lr, a larger --beta, or --sft_weight keep the network near its start"
            print(f"warning: collapse: {text} of sequence {number}; {hint}")


def describe(args, networks, found, letters, device):
    """{name: (C,)} of sequences with these letters (C, L)."""
    designed = letters[:, found.designed]
    recovery = (designed == found.chain.letters[found.designed]).mean(1)
    charges = np.array([net_charge("".join(np.array(list(ALPHABET))[row])) for row in designed])
    columns = {"recovery": recovery, "charge_per_100": 100 * charges / designed.shape[1]}
    for who, model in networks.items():
        columns[f"perplexity_{who}"] = perplexities(args, model, found, letters, device)
    return columns


def fasta_lines(args, found, letters, columns):
    stem = Path(args.pdb_file).name.split(".")[0]
    title = f">{stem} designed_residues={found.designed.sum()} model={args.checkpoint}"
    lines = [title, text_of(found, found.chain.letters)]
    for number, row in enumerate(letters):
        scores = " ".join(f"{name}={values[number]:.4f}" for name, values in columns.items())
        lines.append(f">{stem}_{number} T={args.temperature:g} seed={args.seed} {scores}")
        lines.append(text_of(found, row))
    return lines


def as_field(value):
    """A field of the data as a text in a CSV file, see make_dpo_pairs.py."""
    if isinstance(value, str):
        return value
    words = []
    for part in value:
        words.append("-".join(map(str, part)) if isinstance(part, list) else str(part))
    return " ".join(words)


def write_designs(args, found, row, letters, columns):
    with open(args.out, "x", newline="") as file:
        if not args.out.lower().endswith(".csv"):
            file.write("\n".join(fasta_lines(args, found, letters, columns)) + "\n")
            return
        path = os.path.relpath(args.pdb_file, Path(args.out).resolve().parent)
        fields = {"pdb_file": path, **row}
        writer = csv.writer(file)
        writer.writerow([*fields, "sequence", *columns])
        for number, own in enumerate(letters[:, : found.length]):
            sequence = "".join(ALPHABET[letter] for letter in own)
            scores = [f"{values[number]:.4f}" for values in columns.values()]
            writer.writerow([*map(as_field, fields.values()), sequence, *scores])


def run(args):
    device = script.choose_device(args, local_rank=0)
    networks = {"network": load_network(args.checkpoint)[0].to(device)}
    reference = load_reference(args)
    if reference is not None:
        networks["reference"] = reference.to(device)
    found, row = read_complex(args)
    for who, model in networks.items():
        letters = sample(args, model, found, device)
        columns = describe(args, networks, found, letters, device)
        means = ", ".join(f"{name} {values.mean():.4f}" for name, values in columns.items())
        print(f"{who:10} {means}")
        if who == "network":
            warn_of_collapse(found, letters)
            write_designs(args, found, row, letters, columns)
    print(f"{args.out}: {args.num_samples} sequences")


def main():
    try:
        run(parse_args())
    except (InputError, OSError, ValueError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
