"""Draw sequences for a structure with a network of run_dpo_ddp.py, beside the one it came from.

    python tools/design_dpo.py outputs/dpo_ddp/best.pt complex.cif --design_chains B
    python tools/design_dpo.py best_model.pt complex.pdb --design_chains B --fixed_chains A \\
        --fixed_positions 4 41 --num_samples 20 --temperature 0.2
    python tools/design_dpo.py weights/v_48_020.pt complex.pdb --mutable_ranges 4-11 20-25

The network: best.pt or latest.pt of a run, or ProteinMPNN's own format, as best_model.pt and the
released weights have it. If the weights that training began with are there (--reference, or
reference_model.pt beside the network), they draw as many, for comparison.

Writes a FASTA file: first the structure's own sequence, then those drawn, with '/' between chains.
Residues that are not resolved keep their letter. Positions count from 0 on over the design chains.
Prints of both networks the recovery (share of the designed residues with the structure's letter)
and the perplexity of what they drew (at temperature 1). Warns of a collapse, where one letter has
more than half of the designed positions.
"""

import math
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np
import torch
import torch.nn.functional as F
from score_dpo import load_network
from tqdm import tqdm

import run_dpo_ddp as script
from run_dpo_ddp import ALPHABET, UNKNOWN, WIDTH, InputError


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
    add("--fixed_positions", nargs="+", type=int, default=[], help="keep the letters of these")
    add("--num_samples", type=script.count, default=8, help="sequences to draw")
    add("--temperature", type=float, default=0.1, help="of the probabilities; 0: the likeliest")
    add("--seed", type=int, default=42, help="of the decoding orders and the letters")
    add("--out", default="designs.fasta", help="file to write")
    add("--device", default="auto", choices=["auto", "cuda", "xpu", "cpu"], help="auto: the best")
    args = parser.parse_args()
    if not 0 <= args.temperature < math.inf:
        parser.error(f"--temperature {args.temperature}: must be a finite number from 0 on")
    if Path(args.out).exists():
        parser.error(f"{args.out} exists: give another --out")
    return args


def read_complex(args):
    """The Complex to design; its `designed` without the fixed positions. Raises ValueError."""
    structure = script.read_structure(args.pdb_file)
    for note in structure.notes:
        print(note)
    names = ("design_chains", "fixed_chains", "mutable_positions", "mutable_ranges")
    row = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    found = script.join_chains(args.pdb_file, structure, row)

    for place in args.fixed_positions:
        if not 0 <= place < found.length:
            hint = f"expected a number from 0 to {found.length - 1}"
            raise ValueError(f"--fixed_positions {place}: {hint}")
        found.designed[place] = False
    if not found.designed.any():
        raise ValueError("--fixed_positions: nothing is left to design")
    return found


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


@torch.no_grad()
def sample(args, model, found, device):
    """Letters (C, L) of the whole Complex, and the perplexity of each (C,)."""
    whole = found.chain.whole()
    backbone = script.featurise(found, min(model.neighbours, int(whole.sum())))
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
    inputs = (structures, native, designed, orders, args.temperature, generator)
    drawn, logp = decode(model.to(device), *inputs)

    letters = np.tile(found.chain.letters, (args.num_samples, 1))
    letters[:, whole] = drawn.cpu().numpy()
    return letters, (-logp[:, designed].cpu().double().mean(1)).exp().numpy()


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
            hint = "a reference that does this, too, needs --sft_epochs or released weights; else"
            hint += " lower --lr, a larger --beta, or --sft_weight keep the network near its start"
            print(f"warning: collapse: {text} of sequence {number}; {hint}")


def run(args):
    networks = {"network": load_network(args.checkpoint)[0]}
    beside = Path(args.checkpoint).with_name("reference_model.pt")
    if args.reference or (beside.exists() and beside != Path(args.checkpoint)):
        networks["reference"] = load_network(args.reference or beside)[0]
    device = script.choose_device(args, local_rank=0)
    found = read_complex(args)
    native = found.chain.letters
    stem = Path(args.pdb_file).name.split(".")[0]
    title = f">{stem} designed_residues={found.designed.sum()} model={args.checkpoint}"
    lines = [title, text_of(found, native)]
    for who, model in networks.items():
        letters, perplexity = sample(args, model, found, device)
        recovery = (letters == native)[:, found.designed].mean(1)
        print(f"{who:10} recovery {recovery.mean():.4f}, perplexity {perplexity.mean():.3f}")
        if who == "network":
            warn_of_collapse(found, letters)
            for number, row in enumerate(letters):
                score = f"perplexity={perplexity[number]:.4f} recovery={recovery[number]:.4f}"
                lines.append(f">{stem}_{number} T={args.temperature:g} seed={args.seed} {score}")
                lines.append(text_of(found, row))

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
