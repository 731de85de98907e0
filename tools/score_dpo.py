"""Score preference pairs with a network, beside its reference: losses, rewards, margins.

    python tools/score_dpo.py outputs/dpo_ddp/best_model.pt
    python tools/score_dpo.py outputs/dpo_ddp/best_model.pt pairs.json
    python tools/score_dpo.py soluble_v_48_030.pt pairs.json --reference soluble_v_48_020.pt

The network: best_model.pt, step_N.pt or latest.pt of a run of run_dpo_ddp.py, or released weights
of ProteinMPNN. Without pairs: those that the run held out. The reference is that of the run.

Writes a CSV file with a line for each pair: what the training logs as val/..., with beta and
temperature of the run (of released weights 0.1). Prints the means, of network and reference.
"""

import argparse
import copy
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np
import pandas
import torch
from tqdm import tqdm

import run_dpo_ddp as script
from run_dpo_ddp import InputError


def parse_args():
    parser = script.Parser(description=__doc__, formatter_class=script.HelpFormatter)
    add = parser.add_argument
    add("checkpoint", help="the network")
    add("data", nargs="?", help="pairs, as for run_dpo_ddp.py --train_data")
    add("--reference", help="weights to compare with; None: those of the run")
    add("--out", default="scores.csv", help="file to write")
    add("--skip_bad_data", action="store_true", help="leave out rows that are wrong, list them")
    add("--device", default="auto", choices=["auto", "cuda", "xpu", "cpu"], help="auto: the best")
    return parser.parse_args()


def check_new(path):
    """Raises InputError unless a file can be made there."""
    if Path(path).exists() or not Path(path).parent.is_dir():
        raise InputError(f"--out {path} exists, or its folder does not: expected a new file")


def load_networks(args):
    """(network, its reference or None, the options of its run or {}). Raises InputError."""
    model = script.read_model(args.checkpoint)
    state = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
    reference = None
    if args.reference:
        reference = script.read_model(args.reference)
        if reference.k_neighbors != model.k_neighbors:
            text = f"{reference.k_neighbors} neighbors, the network {model.k_neighbors}"
            raise InputError(f"--reference {args.reference} has {text}")
    elif "reference" in state:
        reference = copy.deepcopy(model)
        reference.load_state_dict(state["reference"])
    return model, reference, state.get("args", {})


def load_pairs(args, options, k):
    """(pairs, ids of those to score): all of args.data, or what the run held out."""
    if args.data:
        given = {"train_data": args.data, "val_data": None, "max_length": 10**9}
        given["eval_orders"] = options.get("eval_orders", 4)
        options = argparse.Namespace(**given, skip_bad_data=args.skip_bad_data)
        with tempfile.TemporaryDirectory() as options.cache_dir:
            data = script.Pairs(script.prepare(options, k), options)
        return data, np.arange(len(data.name))
    if not options:
        raise InputError("give the pairs, or best_model.pt of a run, which held some out")
    options = argparse.Namespace(**options)
    data = script.Pairs(script.prepare(options, k), options)
    if data.hash != options.data_hash:
        raise InputError(f"{options.train_data}: the pairs have changed since the run")
    data.split()
    return data, data.valid_ids


@torch.no_grad()
def score(model, reference, data, ids, settings, device):
    """Tables of pair_scores, a row for each pair: of the network, and of the reference."""
    tables = [[], []]
    for i in tqdm(ids, unit=" pairs", disable=None):
        batch = data.validation_batch([i]).to(device)
        reference_logits = reference(batch)
        logp = script.log_probabilities(reference_logits / settings.temperature, batch.letters)
        for table, logits in zip(tables, [model(batch), reference_logits], strict=True):
            scores = script.pair_scores(settings, logits, logp, batch)
            table.append({name: values.mean().item() for name, values in scores.items()})
    names = [data.name[i] for i in ids]
    return [pandas.DataFrame(table, index=pandas.Index(names, name="pair")) for table in tables]


def run(args):
    check_new(args.out)
    model, reference, options = load_networks(args)
    if reference is None:
        raise InputError("give --reference, the weights that training started from")
    settings = {"beta": 0.1, "temperature": 0.1, "loss_type": "sigmoid"}
    settings = argparse.Namespace(**{**settings, **options})
    data, ids = load_pairs(args, options, model.k_neighbors)
    device = script.choose_device(args, local_rank=0)
    tables = score(model.to(device), reference.to(device), data, ids, settings, device)
    tables[0].to_csv(args.out, float_format="%.6f")
    print(f"beta {settings.beta:g}, temperature {settings.temperature:g}, {len(ids)} pairs")
    print(pandas.DataFrame({"network": tables[0].mean(), "reference": tables[1].mean()}).round(4))
    print(args.out)


def call(run, parse_args):
    """run(parse_args()); what is wrong with the input becomes one line, and status 2."""
    try:
        run(parse_args())
    except (InputError, OSError, ValueError) as error:  # ValueError: of structures, and of pandas
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    call(run, parse_args)
