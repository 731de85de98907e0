"""Draw sequences for a structure with a network of run_dpo_ddp.py, beside the one it came from.

    python tools/design_dpo.py outputs/dpo_ddp/best.pt complex.cif --design_chains B
    python tools/design_dpo.py best_model.pt complex.pdb --design_chains B --fixed_chains A \\
        --fixed_positions B5 B42A --num_samples 20 --temperature 0.2
    python tools/design_dpo.py weights/v_48_020.pt complex.pdb --mutable_ranges A5-A12

The network: best.pt or latest.pt of a run, or ProteinMPNN's own format, as best_model.pt and the
released weights have it. If the weights that training began with are there (--reference, or
reference_model.pt beside the network), they draw as many, for comparison.

Writes a FASTA file: first the structure's own sequence, then those drawn, with '/' between chains.
Residues that are not resolved keep their letter. Positions are numbers from 0 on over the design
chains, or residues of the file, such as B42A. Prints of both networks the recovery (share of the
designed residues with the structure's letter) and the perplexity of what they drew (at temperature
1), and the perplexity of the structure's own sequence. Warns of a collapse, where one letter has
more than half of the designed positions.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np
import torch
import torch.nn.functional as F
from score_dpo import load_network
from tqdm import tqdm

from run_dpo_ddp import (
    ALPHABET,
    UNKNOWN,
    WIDTH,
    InputError,
    Parser,
    choose_device,
    choose_residues,
    count,
    featurise,
    join_chains,
    log_probabilities,
    read_structure,
)


def parse_args(words=None):
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("checkpoint", help="the network")
    add("pdb_file", help="PDB or mmCIF, also .gz")
    add("--reference", help="weights to compare with; None: reference_model.pt beside the network")
    add("--design_chains", nargs="+", help="None: the first chain with protein")
    add("--fixed_chains", nargs="+", default=[], help="context")
    add("--mutable_positions", nargs="+", help="design these alone")
    add("--mutable_ranges", nargs="+", help="and these, such as 6-17 or B6-B17")
    add("--fixed_positions", nargs="+", default=[], help="keep the letters of these")
    add("--num_samples", type=count, default=8, help="sequences to draw")
    add("--temperature", type=float, default=0.1, help="of the probabilities; 0: the likeliest")
    add("--seed", type=int, default=42, help="of the decoding orders and the letters")
    add("--out", default="designs.fasta", help="file to write")
    add("--device", default="auto", choices=["auto", "cuda", "xpu", "cpu"], help="auto: the best")
    args = parser.parse_args(words)
    if Path(args.out).exists():
        parser.error(f"{args.out} exists: give another --out")
    return args


def split_ranges(texts):
    """[[first, last]] of texts such as 6-17, B6-B17 or B-3-B6, where a number is negative."""
    return [re.sub(r"(\d[A-Za-z]?)-", r"\1 ", text, count=1).split() for text in texts]


def read_complex(args):
    """The Complex to design; its `designed` without the fixed positions. Raises ValueError."""
    structure = read_structure(args.pdb_file)
    for note in structure.notes:
        print(note)

    row = {"design_chains": args.design_chains, "fixed_chains": args.fixed_chains}
    row["mutable_positions"] = args.mutable_positions
    if args.mutable_ranges:
        row["mutable_ranges"] = split_ranges(args.mutable_ranges)
    found = join_chains(args.pdb_file, structure, row)

    labels = found.chain.labels[: found.length]
    found.designed[: found.length] &= ~choose_residues(args.fixed_positions, [], labels)
    if not found.designed.any():
        raise ValueError("--fixed_positions: nothing is left to design")
    return found


def decode(model, structures, encoded, native, designed, orders, temperature, generator):
    """Letters (C, N), and log p of each (C, N) at temperature 1, residue by residue in the orders
    (C, N). encoded: of model.encode. Where `designed` (N,) is False, letters are `native` (N,)."""
    nodes, edges = encoded
    near = structures.neighbours >= 0
    neighbours = structures.neighbours.clamp(min=0)
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


@torch.no_grad()
def sample(args, model, found, device):
    """Letters (C, L) of the whole Complex; perplexity of each (C,), and of its own sequence."""
    whole = found.chain.whole()
    k = min(model.neighbours, int(whole.sum()))
    parts = (found.chain.coords, found.chain.numbers, found.index)
    backbone = featurise(*[part[whole] for part in parts], k)
    structures = backbone._replace(neighbours=backbone.neighbours.long()).to(device)
    native = torch.from_numpy(found.chain.letters[whole]).long().to(device)
    designed = torch.from_numpy(found.designed[whole])

    generator = torch.Generator().manual_seed(args.seed)
    context = (~designed).nonzero().flatten()
    places = designed.nonzero().flatten()
    orders = []
    for _ in range(args.num_samples):
        shuffled = places[torch.randperm(len(places), generator=generator)]
        orders.append(torch.cat([context, shuffled]))
    orders = torch.stack(orders).to(device)
    designed = designed.to(device)
    model = model.to(device)
    encoded = model.encode(structures)
    inputs = (structures, encoded, native, designed, orders)
    drawn, logp = decode(model, *inputs, args.temperature, generator)
    letters = np.tile(found.chain.letters, (args.num_samples, 1))
    letters[:, whole] = drawn.cpu().numpy()

    # its own letters are known: all of them in one pass
    row = torch.arange(len(native), device=device)
    own = []
    for order in orders:
        logits = model(structures, native[None], row, order.argsort(), encoded)
        own.append(log_probabilities(logits, native[None])[0])
    perplexity = []
    for values in (logp, torch.stack(own)):
        perplexity.append((-values[:, designed].cpu().double().mean(1)).exp().numpy())
    return letters, perplexity[0], perplexity[1].mean()


def text_of(found, letters):
    """The sequence, with '/' between chains."""
    parts = []
    for number in np.unique(found.index):
        parts.append("".join(ALPHABET[i] for i in letters[found.index == number]))
    return "/".join(parts)


def warn_of_collapse(found, letters):
    for number, row in enumerate(letters):
        counts = np.bincount(row[found.designed], minlength=len(ALPHABET))
        share = counts.max() / counts.sum()
        if share > 0.5 and counts.sum() > 3:
            letter = ALPHABET[counts.argmax()]
            text = f"{letter} at {share:.0%} of the designed positions of sequence {number}"
            hint = "lower --lr, a larger --beta, or --sft_weight keep the network near its start"
            print(f"warning: collapse: {text}; {hint}")


def run(args):
    networks = {"network": load_network(args.checkpoint)[0]}
    path = Path(args.reference or Path(args.checkpoint).with_name("reference_model.pt"))
    if args.reference or (path.exists() and path != Path(args.checkpoint)):
        networks["reference"] = load_network(path)[0]
    device = choose_device(args, local_rank=0)
    found = read_complex(args)
    native = found.chain.letters
    stem = Path(args.pdb_file).name.split(".")[0]
    title = f">{stem} designed_residues={found.designed.sum()} model={args.checkpoint}"
    lines = [title, text_of(found, native)]
    for who, model in networks.items():
        letters, perplexity, own = sample(args, model, found, device)
        recovery = (letters == native)[:, found.designed].mean(1)
        text = f"recovery {recovery.mean():.4f}, perplexity {perplexity.mean():.3f}"
        print(f"{who:10} {text}, of the structure's own sequence {own:.3f}")

        if who == "network":
            for number, row in enumerate(letters):
                score = f"perplexity={perplexity[number]:.4f} recovery={recovery[number]:.4f}"
                lines.append(f">{stem}_{number} T={args.temperature:g} seed={args.seed} {score}")
                lines.append(text_of(found, row))
            warn_of_collapse(found, letters)

    with open(args.out, "x") as file:
        file.write("\n".join(lines) + "\n")
    print(f"{args.out}: {args.num_samples} sequences")


def main():
    try:
        run(parse_args())
    except (InputError, OSError, ValueError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
