"""Score preference pairs with a network, beside a reference: log-probabilities, rewards, margins.

    python tools/score_dpo.py outputs/dpo_ddp/best.pt pairs.json
    python tools/score_dpo.py best_model.pt pairs.json --reference weights/v_48_020.pt
    python tools/score_dpo.py outputs/dpo_ddp/best.pt

The network: best.pt or latest.pt of a run of run_dpo_ddp.py, or ProteinMPNN's own format, as
best_model.pt and the released weights have it. Without pairs: those that the run held out.

Writes a CSV file with a line for each pair: logp_... and reference_..., log-probabilities of both
sequences at temperature 1, in nats, over designed residues; reward_... and margin, with beta and
temperature of the run (else 0.1); of the preferred sequence nll (nats), recovery and entropy per
designed residue. Prints means of these over pairs (a training logs those over residues), and the
likelihood accuracy at temperature 1 (a training: at its --temperature).
"""

import argparse
import csv
import math
import sys
import tempfile
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
# of the rewards, where the network has no run
DEFAULTS = {"beta": 0.1, "temperature": 0.1}


def parse_args():
    parser = script.Parser(description=__doc__)
    add = parser.add_argument
    add("checkpoint", help="the network")
    add("data", nargs="?", help="pairs, as for run_dpo_ddp.py --train_data")
    add("--reference", help="weights to compare with; None: reference_model.pt beside the network")
    add("--out", default="scores.csv", help="file to write")
    add("--skip_bad_data", action="store_true", help="leave out rows that are wrong, list them")
    add("--device", default="auto", choices=["auto", "cuda", "xpu", "cpu"], help="auto: the best")
    args = parser.parse_args()

    if not Path(args.out).parent.is_dir():
        parser.error(f"--out {args.out}: there is no folder {Path(args.out).parent}")
    if Path(args.out).exists():
        parser.error(f"{args.out} exists: give another --out")
    return args


def load_network(path):
    """(network, options of its run or None); says what was found."""
    state = {}
    if zipfile.is_zipfile(path):  # as torch saves, but for old weights
        state = script.read_checkpoint(path)
        if state is None:
            raise InputError(f"{path} is damaged: expected a checkpoint or ProteinMPNN weights")
    if "script" not in state:
        model = script.read_model(path)
        print(f"{path}: a network in ProteinMPNN's own format")
        return model.eval(), None
    if state["script"] != SCRIPT:
        raise InputError(f"{path}: expected best.pt or latest.pt of {SCRIPT}")
    model = script.ProteinMPNN(state["loop"]["num_edges"], state["loop"]["noise_level"])
    model.load_state_dict(state["model"])
    print(f"{path}: checkpoint of a run, step {state['loop']['step']}")
    return model.eval(), state["args"]


def load_reference(args):
    """The network of --reference; without it that beside the checkpoint, or None."""
    beside = Path(args.checkpoint).with_name("reference_model.pt")
    if args.reference:
        return load_network(args.reference)[0]
    if beside.exists() and beside != Path(args.checkpoint):
        return load_network(beside)[0]
    return None


def load_pairs(args, neighbours):
    """The pairs of the file."""
    args.train_data = args.data
    args.val_data = None
    args.max_length = 10**9  # the training has a limit
    with tempfile.TemporaryDirectory() as args.cache_dir:
        data = script.Pairs(script.prepare(args, neighbours), args)
    return data, np.arange(len(data))


def load_held_out(options, neighbours):
    """The pairs of a run, and the ids of those that it held out."""
    if options is None:
        raise InputError("give the pairs, or best.pt of a run, which says what was held out")
    options = argparse.Namespace(**options)
    data = script.Pairs(script.prepare(options, neighbours), options)
    if data.hash != options.data_hash:
        raise InputError(f"{options.train_data}: the pairs have changed since the run")
    data.split()
    return data, data.valid_ids


@torch.no_grad()
def score(model, data, ids, args, keep=False):
    """Of pairs under a network: pair_scores (2, N, SCORES) at temperature 1 and at --temperature,
    there with the log-ratio to data.reference. keep: this network becomes the reference."""
    model.to(args.device)
    tables = np.zeros((2, len(ids), script.SCORES))
    reference = np.zeros((1, data.pair_ptr[-1], 2), np.float32)
    for places in tqdm(data.batches(ids), unit=" batches", disable=None):
        batch = data.batch(ids[places], len(ids)).to(args.device)
        logits = model(*batch.inputs())
        for table, temperature in zip(tables, (1.0, args.temperature), strict=True):
            table[places] = script.pair_scores(logits, batch, temperature).cpu()
        logp = script.log_probabilities(logits / args.temperature, batch.letters)
        reference[0, script.ragged_range(data.pair_ptr, ids[places])] = logp.T.cpu()
    if keep:
        data.reference = reference
    return tables


def run(args):
    model, options = load_network(args.checkpoint)
    reference = load_reference(args)
    if reference is None:
        text = "no reference_model.pt beside the network"
        raise InputError(f"{text}: give --reference, the weights that training started from")
    if reference.neighbours != model.neighbours:
        text = f"{model.neighbours} and {reference.neighbours} neighbours"
        raise InputError(f"network and reference are of different kinds: {text}")
    for name, value in DEFAULTS.items():
        setattr(args, name, options[name] if options else value)
    args.device = script.choose_device(args, local_rank=0)

    if args.data is None:
        data, ids = load_held_out(options, model.neighbours)
    else:
        data, ids = load_pairs(args, model.neighbours)
    before, _ = score(reference, data, ids, args, keep=True)
    after, cold = score(model, data, ids, args)
    rewards = args.beta * cold[:, :2]  # of both sequences
    margin = rewards[:, 0] - rewards[:, 1]
    counts = data.counts[ids]
    columns = {
        "pair": data.name[ids],
        "logp_chosen": after[:, 2],
        "logp_rejected": after[:, 3],
        "reference_chosen": before[:, 2],
        "reference_rejected": before[:, 3],
        "reward_chosen": rewards[:, 0],
        "reward_rejected": rewards[:, 1],
        "margin": margin,
    }
    for number, name in enumerate(["nll", "recovery", "entropy"], start=4):
        columns[name] = after[:, number] / counts
    with open(args.out, "x", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for name, *values in zip(*columns.values(), strict=True):
            writer.writerow([name, *[f"{value:.6f}" for value in values]])

    print(f"beta {args.beta:g}, temperature {args.temperature:g}, {len(ids)} pairs")
    accuracy = script.share_of_right(torch.from_numpy(cold[:, 0] - cold[:, 1])).mean()
    print(f"reward accuracy {accuracy:.4f}, margin {margin.mean():.4f}; at temperature 1:")
    for who, table in {"network": after, "reference": before}.items():
        nll, recovery, entropy = (table[:, 4:] / counts[:, None]).mean(0)
        right = script.share_of_right(torch.from_numpy(table[:, 2] - table[:, 3])).mean()
        text = f"likelihood accuracy {right:.4f}, recovery {recovery:.4f}"
        print(f"{who:10} {text}, perplexity {math.exp(nll):.3f}, entropy {entropy:.4f}")
    print(args.out)


def main():
    try:
        run(parse_args())
    except (InputError, OSError, ValueError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
