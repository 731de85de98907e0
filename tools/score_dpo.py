"""Score preference pairs, or sequences, with a network, beside its reference.

    python tools/score_dpo.py outputs/dpo_ddp/best_model.pt
    python tools/score_dpo.py outputs/dpo_ddp/best_model.pt pairs.json
    python tools/score_dpo.py soluble_v_48_030.pt pairs.json --reference soluble_v_48_020.pt
    python tools/score_dpo.py outputs/dpo_ddp/best_model.pt variants.csv --score ddg

The reference is that of the run, or --reference. Without data: the pairs that the run held out.

Of pairs it writes a CSV file with a line for each: what the training logs as val/..., with beta and
temperature of the run (of released weights 0.1). Prints the means, of network and reference.

Of sequences, a CSV file as for tools/make_dpo_pairs.py, it writes the table, and of network and
reference logp_per_residue, at temperature 1, in nats: the mean over designed residues that are not
X (what the released program calls score, times -1), and over decoding orders, the same for all
sequences on a backbone; the standard error over the orders; and the difference of the two. Prints
means, and with --score Spearman's rho with this column, of the lines where it is not empty, NA or
nan, and its standard error (Bonett and Wright 2000).
"""

import copy
import os
import tempfile
from argparse import Namespace
from pathlib import Path

import numpy as np
import pandas
import torch
from make_dpo_pairs import call, check_new, read_backbones, read_table  # finds run_dpo_ddp.py
from tqdm import tqdm

import run_dpo_ddp as script
from run_dpo_ddp import UNKNOWN, HelpFormatter, InputError, Parser

BATCH_RESIDUES = 4096  # of sequences that are scored at a time: takes about 0.5 GB


def parse_args():
    parser = Parser(description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("checkpoint", help="best_model.pt, step_N.pt or latest.pt of a run, or released weights")
    add("data", nargs="?", help="pairs, as for run_dpo_ddp.py --train_data; or sequences, a .csv")
    add("--reference", help="weights to compare with; None: those of the run")
    add("--orders", type=script.COUNT, help="decoding orders; None: as many as the run, or 4")
    add("--score", help="of a table of sequences: the column to compare with; or charge")
    add("--out", default="scores.csv", help="file to write")
    add("--device", default="auto", choices=["auto", "cuda", "xpu", "cpu"], help="auto: the best")
    return parser.parse_args()


def load_models(args):
    """({"network": ..., "reference": its reference, if there is one}, on the device, the options of
    its run or {}). Raises InputError."""
    model = script.read_model(args.checkpoint)
    models = {"network": model}
    state = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
    if args.reference:
        models["reference"] = script.read_model(args.reference, model.k_neighbors)
    elif "reference" in state:
        models["reference"] = copy.deepcopy(model)
        models["reference"].load_state_dict(state["reference"])
    for model in models.values():
        model.to(script.choose_device(args, local_rank=0))
    return models, state.get("args", {})


def load_pairs(args, options, orders, k):
    """Pairs, of which the held-out ones are scored: all of args.data, or those of the run."""
    if args.data:
        given = {"train_data": args.data, "val_data": None, "max_length": 10**9}
        options = Namespace(**given, eval_orders=orders, skip_bad_data=False)
        with tempfile.TemporaryDirectory() as options.cache_dir:
            data = script.Pairs(script.prepare(options, k), options)
        data.valid_ids = np.arange(len(data.name))
        return data
    if not options:
        raise InputError("give the pairs, or best_model.pt of a run, which held some out")
    options = Namespace(**{**options, "eval_orders": orders})
    data = script.Pairs(script.prepare(options, k), options)
    if data.hash != options.data_hash:
        raise InputError(f"{options.train_data}: the pairs have changed since the run")
    data.split()
    return data


@torch.no_grad()
def score_pairs(models, data, settings):
    """{"network": table of pair_scores, a row for each pair, "reference": the same}."""
    rows = {who: [] for who in models}
    for number in tqdm(range(len(data.valid_ids)), unit=" pairs", disable=None):
        batch = data.validation_batch([number]).to(models["network"].W_out.weight.device)
        logits = {who: model(batch) for who, model in models.items()}
        logp = script.log_probabilities(logits["reference"] / settings.temperature, batch.letters)
        for who in models:
            scores = script.pair_scores(settings, logits[who], logp, batch)
            rows[who].append({name: values.mean().item() for name, values in scores.items()})
    names = pandas.Index([data.name[i] for i in data.valid_ids], name="pair")
    return {who: pandas.DataFrame(rows[who], index=names) for who in models}


@torch.no_grad()
def score_sequences(model, backbone, letters, decode_rank):
    """log p (S, N) of the sequences letters (S, N) on a Backbone, each in its own decoding order
    (S, N), at temperature 1."""
    inputs = backbone.features(model)
    device = inputs.atoms.device
    residues = torch.arange(letters.shape[1], device=device)
    count = max(1, BATCH_RESIDUES // len(residues))
    logp = []
    for some, ranks in zip(letters.split(count), decode_rank.split(count), strict=True):
        # one after the other, as the pairs of a Batch: the backbone is encoded once for all
        inputs.source = residues.repeat(len(some))
        inputs.letters = some.reshape(1, -1).to(device)
        inputs.decode_rank = ranks.flatten().to(device)
        found = script.log_probabilities(model(inputs), inputs.letters)
        logp.append(found.view(some.shape).cpu())
    return torch.cat(logp)


def score_table(model, backbones, orders):
    """log p per designed residue: a row for each line of a table, a column for each order."""
    tables = []
    for _, backbone, part, letters in tqdm(backbones, unit=" backbones", disable=None):
        ranks = [script.decode_ranks(backbone.designed, order) for order in range(orders)]
        ranks = torch.stack(ranks).repeat(len(part), 1)
        letters = letters.repeat_interleave(orders, dim=0)
        is_scored = backbone.designed & (letters != UNKNOWN)
        logp = score_sequences(model, backbone, letters, ranks) * is_scored
        means = (logp.sum(1) / is_scored.sum(1)).view(-1, orders)
        tables.append(pandas.DataFrame(means.double().numpy(), index=part.index))
    return pandas.concat(tables)


def run_on_table(args, models, orders):
    """Score the sequences of a table. Raises InputError."""
    table, scores = read_table(args.data, args.score)
    backbones = read_backbones(args.data, table)
    found = {}
    for who, model in models.items():
        found[f"{who}_logp_per_residue"] = score_table(model, backbones, orders)
    if len(found) == 2:
        found["difference"] = np.subtract(*found.values())
    names = list(found)
    for name in names:
        table[name] = found[name].mean(axis=1)
        table[f"{name}_error"] = found[name].std(axis=1) / orders**0.5

    print(f"{len(table):,} sequences, {len(backbones):,} backbones, {orders} decoding orders")
    report = pandas.DataFrame({"mean": table[names].mean()})
    if args.score:
        count = scores.notna().sum()
        rho = table[names].assign(score=scores).corr("spearman")["score"].drop("score")
        report["rho"] = rho
        report["rho_error"] = (1 - rho**2) * ((1 + rho**2 / 2) / (count - 3)) ** 0.5
        print(f"rho: Spearman's, with {args.score}, of {count:,} sequences")
    print(report.round(4))
    folder = Path(args.out).resolve().parent
    for fields, _, part, _ in backbones:
        table.loc[part.index, "pdb_file"] = os.path.relpath(fields["pdb_file"], folder)
    table.to_csv(args.out, index=False, float_format="%.6f")
    print(args.out)


def run(args):
    check_new(args.out)
    if args.data and not os.path.exists(args.data):
        raise InputError(f"{args.data}: there is no such file")
    models, options = load_models(args)
    orders = args.orders or options.get("eval_orders", 4)
    if args.data and args.data.lower().endswith((".csv", ".csv.gz")):
        return run_on_table(args, models, orders)
    if args.score:
        raise InputError(f"--score {args.score}: expected sequences, as a .csv file")
    if "reference" not in models:
        raise InputError("give --reference, the weights that training started from")
    settings = Namespace(**{"beta": 0.1, "temperature": 0.1, "loss_type": "sigmoid", **options})
    data = load_pairs(args, options, orders, models["network"].k_neighbors)
    tables = score_pairs(models, data, settings)
    tables["network"].to_csv(args.out, float_format="%.6f")
    count = len(data.valid_ids)
    print(f"beta {settings.beta:g}, temperature {settings.temperature:g}, {count} pairs")
    print(pandas.DataFrame({who: table.mean() for who, table in tables.items()}).round(4))
    print(args.out)


if __name__ == "__main__":
    call(run, parse_args)
