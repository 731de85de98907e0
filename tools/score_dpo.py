"""Score preference pairs with a network, beside a reference: log-probabilities, rewards, margins.

    python tools/score_dpo.py outputs/dpo_ddp/best.pt pairs.json
    python tools/score_dpo.py best_model.pt pairs.json --reference weights/v_48_020.pt
    python tools/score_dpo.py outputs/dpo_ddp/best.pt pairs.json --split outputs/dpo_ddp/split.json

The network: best.pt or latest.pt of a run of run_dpo_ddp.py, or ProteinMPNN's own format, as
best_model.pt and the released weights have it. The reference: --reference, or reference_model.pt
beside the network. The pairs: the file that the run was given; --split takes the held-out ones.

Writes a CSV file with a line for each pair: logp_... and reference_..., log-probabilities of both
sequences at temperature 1, in nats, over designed residues with their weights; reward_... and
margin, at --beta and --temperature as in training; of the preferred sequence nll (nats), recovery
and entropy per designed residue. Prints means of these.
"""

import csv
import json
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np
import torch
from tqdm import tqdm

from run_dpo_ddp import (
    EVALUATION,
    FORMAT,
    InputError,
    Pairs,
    Parser,
    ProteinMPNN,
    Structure,
    choose_device,
    count,
    is_whole,
    load_checkpoint,
    log_probabilities,
    read_model,
    read_rows,
    sequence_scores,
    sum_by_pair,
    try_structure,
)

SCRIPT = "run_dpo_ddp.py"


def parse_args(words=None):
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("checkpoint", help="the network")
    add("data", help="pairs, as for run_dpo_ddp.py --train_data")
    add("--reference", help="weights to compare with; None: reference_model.pt beside the network")
    add("--out", default="scores.csv", help="file to write")
    add("--split", help="split.json of a run: score the pairs that it held out")
    add("--beta", type=float, help="None: that of the run, or 0.1")
    add("--temperature", type=float, help="of the rewards; None: that of the run, or 0.1")
    add("--orders", type=count, default=1, help="decoding orders to average over")
    add("--seed", type=int, help="of the orders; None: that of the run, or 42")
    add("--max_length", type=count, default=100_000, help="residues designed at most")
    add("--batch_size", type=count, default=16, help="pairs per forward pass")
    add("--device", default="auto", choices=["auto", "cuda", "xpu", "cpu"], help="auto: the best")
    args = parser.parse_args(words)
    if Path(args.out).exists():
        parser.error(f"{args.out} exists: give another --out")
    return args


def load_network(path):
    """(network, options of its run or None); says what was found."""
    path = Path(path)
    expected = "expected best.pt of a run, or ProteinMPNN weights"
    if not path.is_file():
        raise InputError(f"{path}: no such file; {expected}")
    if zipfile.is_zipfile(path) and not is_whole(path):
        raise InputError(f"{path} is damaged; {expected}")
    try:
        state = load_checkpoint(path)
    except Exception as error:  # torch raises six kinds
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{path}: {reason}; {expected}") from None
    if isinstance(state, dict) and "script" in state:
        if state["script"] != SCRIPT or state["format"] != FORMAT:
            text = f"a checkpoint of {state['script']}, format {state['format']}"
            raise InputError(f"{path} is {text}; expected {SCRIPT}, format {FORMAT}")
        model = ProteinMPNN(state["neighbours"], state["noise_level"])
        model.load_state_dict(state["model"])
        print(f"{path}: checkpoint of a run, step {state['step']}")
        return model.eval(), state["args"]
    model = read_model(path)
    text = f"noise {model.noise_level:g} Å, {model.neighbours} neighbours"
    if "step" in state:
        text += f", step {state['step']}"
    print(f"{path}: ProteinMPNN's own format, {text}")
    return model.eval(), None


def reference_path(args):
    """What the network is compared with."""
    path = args.reference or Path(args.checkpoint).with_name("reference_model.pt")
    if not Path(path).is_file():
        raise InputError(f"{path}: no such file; give the weights that training began with")
    return path


def load_pairs(args, k):
    """The pairs of the file, or those of its held-out part."""
    pairs = Pairs(args, k)
    structures = {}
    for place, path, row in tqdm(read_rows(args.data), unit=" pairs", disable=None):
        if path not in structures:
            structures[path] = try_structure(path) if path else "no pdb_file"
        pairs.add(place, path, row, structures[path])
    for structure in structures.values():
        if isinstance(structure, Structure):
            for note in structure.notes:
                print(note)
    if pairs.problems:
        raise InputError("\n  ".join(pairs.problems[:20]))
    pairs.finish()
    ids = np.arange(len(pairs))
    if args.split:
        held = set(json.loads(Path(args.split).read_text())["valid"])
        ids = np.array([i for i in ids if pairs.pairs[i].name in held], np.int64)
    if len(ids) == 0:
        raise InputError(f"{args.data}: no pairs" + (f" of {args.split}" if args.split else ""))
    return pairs, ids


@torch.no_grad()
def score(model, pairs, ids, args):
    """{name: (N,) or (2, N) float64} of pairs under a network, means over decoding orders."""
    found = {"logp": [], "scaled": [], "nll": [], "recovery": [], "entropy": []}
    for start in tqdm(range(0, len(ids), args.batch_size), unit=" batches", disable=None):
        some = ids[start : start + args.batch_size]
        sums = {name: 0.0 for name in found}
        for order in range(EVALUATION, EVALUATION + args.orders):
            batch = pairs[some, some, order].to(args.device)
            letters = batch.residues[:2]
            logits = model(batch.structures, letters, batch.residues[2], batch.residues[3])
            for name, temperature in {"logp": 1.0, "scaled": args.temperature}.items():
                parts = sequence_scores(logits, letters, batch, temperature)
                sums[name] = sums[name] + parts.cpu().double().sum(0)
            designed = (batch.weights > 0).float()
            own = logits[0].log_softmax(-1)
            values = {
                "nll": -log_probabilities(logits[:1], letters[:1])[0],
                "recovery": own.argmax(-1) == letters[0],
                "entropy": -(own.exp() * own).sum(-1),
            }
            residues = sum_by_pair(designed[None], batch)[0]
            for name, value in values.items():
                mean = sum_by_pair((value * designed)[None], batch)[0] / residues
                sums[name] = sums[name] + mean.cpu().double()
        for name, total in sums.items():
            found[name].append(total / args.orders)
    return {name: torch.cat(parts, dim=-1).numpy() for name, parts in found.items()}


def write_csv(path, names, columns):
    with open(path, "x", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["pair", *columns])
        for name, *values in zip(names, *columns.values(), strict=True):
            writer.writerow([name, *[f"{value:.6f}" for value in values]])


def run(args):
    model, options = load_network(args.checkpoint)
    reference, _ = load_network(reference_path(args))
    defaults = {"beta": 0.1, "temperature": 0.1, "seed": 42, "decoding_order": "random"}
    for name, default in defaults.items():
        if getattr(args, name, None) is None:
            setattr(args, name, (options or defaults).get(name, default))
    args.device = choose_device(args, local_rank=0)
    if reference.neighbours != model.neighbours:
        text = f"{model.neighbours} and {reference.neighbours} neighbours"
        raise InputError(f"network and reference are of different kinds: {text}")
    pairs, ids = load_pairs(args, model.neighbours)
    ours = score(model.to(args.device), pairs, ids, args)
    theirs = score(reference.to(args.device), pairs, ids, args)

    rewards = args.beta * (ours["scaled"] - theirs["scaled"])
    margin = rewards[0] - rewards[1]
    columns = {
        "logp_chosen": ours["logp"][0],
        "logp_rejected": ours["logp"][1],
        "reference_chosen": theirs["logp"][0],
        "reference_rejected": theirs["logp"][1],
        "reward_chosen": rewards[0],
        "reward_rejected": rewards[1],
        "margin": margin,
    }
    for name in ("nll", "recovery", "entropy"):
        columns[name] = ours[name]
    write_csv(args.out, [pairs.pairs[number].name for number in ids], columns)

    print(f"beta {args.beta:g}, temperature {args.temperature:g}, {len(ids)} pairs")
    print(f"reward accuracy {np.mean(margin > 0):.4f}, margin {margin.mean():.4f}")
    for name, table in {"network": ours, "reference": theirs}.items():
        better = np.mean(table["logp"][0] > table["logp"][1])
        text = f"likelihood accuracy {better:.4f}, recovery {table['recovery'].mean():.4f}"
        perplexity = np.exp(table["nll"].mean())
        print(
            f"{name:10} {text}, perplexity {perplexity:.3f}, entropy {table['entropy'].mean():.4f}"
        )
    print(args.out)


def main():
    try:
        run(parse_args())
    except (InputError, OSError, ValueError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
