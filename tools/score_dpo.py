"""Score preference pairs with a network, beside a reference: log-probabilities, rewards, margins.

    python tools/score_dpo.py outputs/dpo_ddp/best.pt pairs.json
    python tools/score_dpo.py best_model.pt pairs.json --reference weights/v_48_020.pt
    python tools/score_dpo.py outputs/dpo_ddp/best.pt pairs.json --split outputs/dpo_ddp/split.json

The network: best.pt or latest.pt of a run of run_dpo_ddp.py, or ProteinMPNN's own format, as
best_model.pt and the released weights have it. The reference: --reference, or reference_model.pt
beside the network. The pairs: the file that the run was given; --split takes the held-out ones.

Writes a CSV file with a line for each pair: logp_... and reference_..., log-probabilities of both
sequences at temperature 1, in nats, over designed residues; reward_... and margin, at --beta and
--temperature as in training; of the preferred sequence nll (nats), recovery and entropy per
designed residue. Prints means of these over pairs (those in the log of a training are over
residues).
"""

import csv
import functools
import json
import math
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np
import torch
from tqdm import tqdm

import run_dpo_ddp as script
from run_dpo_ddp import InputError

SCRIPT = "run_dpo_ddp.py"
DEFAULTS = {"beta": 0.1, "temperature": 0.1, "seed": 42}  # where the network has no run


def parse_args():
    parser = script.Parser(description=__doc__)
    add = parser.add_argument
    add("checkpoint", help="the network")
    add("data", help="pairs, as for run_dpo_ddp.py --train_data")
    add("--reference", help="weights to compare with; None: reference_model.pt beside the network")
    add("--out", default="scores.csv", help="file to write")
    add("--split", help="split.json of a run: score the pairs that it held out")
    add("--beta", type=float, help="None: that of the run, or 0.1")
    add("--temperature", type=float, help="of the rewards; None: that of the run, or 0.1")
    add("--batch_size", type=script.count, default=16, help="pairs per forward pass")
    add("--device", default="auto", choices=["auto", "cuda", "xpu", "cpu"], help="auto: the best")
    args = parser.parse_args()

    args.max_length = math.inf  # the training has a limit
    if Path(args.out).exists():
        parser.error(f"{args.out} exists: give another --out")
    return args


def load_network(path):
    """(network, options of its run or None); says what was found."""
    state = {}
    if zipfile.is_zipfile(path):  # as torch saves, but for old weights
        if not script.is_whole(path):
            text = "is damaged; expected best.pt of a run, or ProteinMPNN weights"
            raise InputError(f"{path} {text}")
        state = script.load_checkpoint(path)
    if "script" not in state:
        model = script.read_model(path)
        print(f"{path}: a network in ProteinMPNN's own format")
        return model.eval(), None

    if state["script"] != SCRIPT or state["format"] != script.FORMAT:
        text = f"a checkpoint of {state['script']}, format {state['format']}"
        raise InputError(f"{path} is {text}; expected {SCRIPT}, format {script.FORMAT}")
    model = script.ProteinMPNN(state["neighbours"], state["noise_level"])
    model.load_state_dict(state["model"])
    print(f"{path}: checkpoint of a run, step {state['step']}")
    return model.eval(), state["args"]


def load_pairs(args, k):
    """The pairs of the file, and the ids of those to score: all, or the held-out part."""
    pairs = script.Pairs(args, k)
    read = functools.cache(script.try_structure)  # each file once
    for place, path, row in tqdm(script.read_rows(args.data), unit=" pairs", disable=None):
        pairs.add(place, path, row, read(path))
    if pairs.problems:
        raise InputError("\n  ".join(script.first_lines(pairs.problems)))
    for note in script.first_lines(pairs.notes):
        print(note)

    ids = np.arange(len(pairs))
    if args.split:
        held = json.loads(Path(args.split).read_text())["valid"]
        ids = ids[[pair.name in held for pair in pairs.pairs]]
    if len(ids) == 0:
        raise InputError(f"{args.data}: no pairs" + (f" of {args.split}" if args.split else ""))
    return pairs, ids


@torch.no_grad()
def score(model, pairs, ids, args):
    """Of pairs under a network: log-probabilities of both sequences (2, N, 2), at temperature 1 and
    at --temperature; and {name: (N,)} per designed residue of the preferred one."""
    tables = []
    for start in tqdm(range(0, len(ids), args.batch_size), unit=" batches", disable=None):
        some = ids[start : start + args.batch_size]
        batch = pairs[some, some, script.EVALUATION].to(args.device)
        logits = model(batch.structures, batch.residues[:2], *batch.residues[2:4])
        rows = [script.table_rows(logits, batch, heat) for heat in (1.0, args.temperature)]
        rows = torch.stack(rows)
        rows[..., script.SCORES :] /= batch.counts[:, None]
        tables.append(rows.cpu().double())

    table = torch.cat(tables, dim=1).numpy()
    # the two numbers of each log-probability, see sequence_scores
    logp = table[..., : script.SCORES].reshape(2, -1, 2, 2).sum(2)
    nll, recovery, entropy = table[0, :, script.SCORES :].T
    return logp, {"nll": nll, "recovery": recovery, "entropy": entropy}


def run(args):
    model, options = load_network(args.checkpoint)
    beside = Path(args.checkpoint).with_name("reference_model.pt")
    reference, _ = load_network(args.reference or beside)
    if reference.neighbours != model.neighbours:
        text = f"{model.neighbours} and {reference.neighbours} neighbours"
        raise InputError(f"network and reference are of different kinds: {text}")
    for name in DEFAULTS:
        if getattr(args, name, None) is None:
            setattr(args, name, (options or DEFAULTS)[name])
    for name in ("beta", "temperature"):
        if not 0 < getattr(args, name) < math.inf:
            raise InputError(f"--{name} {getattr(args, name)}: must be a finite number above 0")
    args.device = script.choose_device(args, local_rank=0)

    pairs, ids = load_pairs(args, model.neighbours)
    logp, each = score(model.to(args.device), pairs, ids, args)
    logp_reference, each_reference = score(reference.to(args.device), pairs, ids, args)
    rewards = args.beta * (logp[1] - logp_reference[1])
    margin = rewards[:, 0] - rewards[:, 1]
    columns = {
        "pair": [pairs.pairs[number].name for number in ids],
        "logp_chosen": logp[0, :, 0],
        "logp_rejected": logp[0, :, 1],
        "reference_chosen": logp_reference[0, :, 0],
        "reference_rejected": logp_reference[0, :, 1],
        "reward_chosen": rewards[:, 0],
        "reward_rejected": rewards[:, 1],
        "margin": margin,
        **each,
    }
    with open(args.out, "x", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for name, *values in zip(*columns.values(), strict=True):
            writer.writerow([name, *[f"{value:.6f}" for value in values]])

    print(f"beta {args.beta:g}, temperature {args.temperature:g}, {len(ids)} pairs")
    print(f"reward accuracy {np.mean(margin > 0):.4f}, margin {margin.mean():.4f}")
    networks = {"network": (logp[0], each), "reference": (logp_reference[0], each_reference)}
    for name, (own, values) in networks.items():
        text = f"likelihood accuracy {np.mean(own[:, 0] > own[:, 1]):.4f}"
        text += f", recovery {values['recovery'].mean():.4f}"
        text += f", perplexity {np.exp(values['nll'].mean()):.3f}"
        print(f"{name:10} {text}, entropy {values['entropy'].mean():.4f}")
    print(args.out)


def main():
    try:
        run(parse_args())
    except (InputError, OSError, ValueError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
