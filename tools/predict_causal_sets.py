"""Apply a network of run_train_quantumgrav_ddp.py to causal sets.

    python tools/predict_causal_sets.py outputs/quantumgrav/best.pt new/*.zarr
    python tools/predict_causal_sets.py outputs/mine/best.pt new.npz --labels manifold_like
    python tools/predict_causal_sets.py outputs/quantumgrav/best.pt

SETS are stores (.zarr) and files (.npz) as that script reads them; they need no labels. --labels
names those of their labels that are tasks or targets of the network. Without SETS: the test sets
of the run.

Writes a CSV file with a line for each set: set, where it is from; part, which is train, valid or
test if the run had the same set (by split.npz beside the checkpoint); for each task the class that
is guessed, the probability of each class, and the label where there is one; for each target the
value and the label. Prints the metrics of the training script over the sets that have labels and
were neither trained nor validated on, and what the commonest class, or the mean, would reach.
"""

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pandas as pd
import torch.distributed as dist

import run_train_quantumgrav_ddp as script
from run_train_quantumgrav_ddp import HelpFormatter, InputError, Parser


def parse_args():
    parser = Parser(description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("checkpoint", type=Path, help="best.pt, step_N.pt or latest.pt of a run")
    add("sets", nargs="*", type=Path, metavar="SETS", help="stores and files")
    add("--out", type=Path, default=Path("predictions.csv"), help="file to write")
    add("--labels", nargs="+", default=[], metavar="NAME", help="labels of SETS")
    add("--skip_bad_data", action="store_true", help="leave out damaged sets of SETS")
    add("--device", default="auto", choices=["auto", "cuda", "xpu", "cpu"], help="auto: the best")
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f"--out {args.out} exists: expected a new file")
    if not args.out.parent.is_dir():
        parser.error(f"--out {args.out}: there is no such folder")
    if not args.sets and (args.labels or args.skip_bad_data):
        parser.error("--labels and --skip_bad_data are of SETS, and none are given")
    return args


def own_sets(options, facts):
    """The test sets of the run: (data, their ids, the part of each)"""
    data = script.CausalSets(script.prepare(options), options, begun=facts)
    if data.hash != options.data_hash:
        raise InputError(f"{' '.join(options.data)}: changed since the network was trained on it")
    ids = data.part("test")
    return data, ids, np.full(len(ids), "test")


def new_sets(args, options, facts, folder):
    """As `own_sets`, of SETS, which are read into `folder`."""
    classes = facts["classes"]
    for path in args.sets:
        if not path.exists():
            raise InputError(f"{path}: there is no such file")
    for label in args.labels:
        if label not in classes:
            raise InputError(f"--labels {label}: the network has {', '.join(classes)}")
    options.data = [str(path) for path in args.sets]
    options.tasks = [label for label in args.labels if classes[label]]
    options.targets = [label for label in args.labels if not classes[label]]
    options.outputs = (*options.tasks, *options.targets)
    options.skip_bad_data = args.skip_bad_data
    options.class_weights = "none"
    options.cache_dir = folder
    folder = script.prepare(options)

    # a column for each output of the network, and its numbers of classes in place of ours
    meta = json.loads((folder / "meta.json").read_text())
    labels = pd.DataFrame(np.nan, index=range(len(meta["names"])), columns=list(classes))
    for output, column in zip(options.outputs, np.load(folder / "labels.npy").T, strict=True):
        labels[output] = column
        unknown = set(meta["classes"][output]) - set(classes[output])
        if unknown:
            known = ", ".join(classes[output])
            text = f"{output}: the network knows {known}, but not {min(unknown)}"
            raise InputError(f"{text}: leave out --labels {output}")
        if classes[output]:
            numbers = map(classes[output].index, meta["classes"][output])
            labels[output] = labels[output].map(dict(enumerate(numbers)))
    np.save(folder / "labels.npy", labels.to_numpy())
    data = script.CausalSets(folder, options, facts)
    known = facts.get("sizes", [0, np.inf])  # networks of earlier versions do not tell
    if data.sizes.min() < known[0] or data.sizes.max() > known[1]:
        text = f"{known[0]} to {known[1]} elements; these have {data.sizes.min()} to"
        print(f"the network was trained on sets of {text} {data.sizes.max()}")
    return data, np.arange(len(labels)), parts_of(data.digests, args.checkpoint)


def parts_of(digests, checkpoint):
    """For each set the part of the run that has had the same one; "" for a new set."""
    path = checkpoint.with_name("split.npz")
    if not path.exists():
        print(f"{path} is not there: it is not known which of these sets were trained on")
        return np.full(len(digests), "", "U5")
    run = np.load(path)
    numbers = dict(zip(run["digests"], run["split"], strict=True))
    parts = np.array([numbers.get(digest, -1) for digest in digests])
    for number, part in enumerate(script.PARTS):
        count = np.count_nonzero(parts == number)
        if count > 0:
            print(f"{count:,} of {len(parts):,} sets are in the {part} part of the run")
    return np.array([*script.PARTS, ""])[parts]  # -1 is the last one


def report(args, data, ids, parts, predictions):
    """Write the CSV file, print the metrics."""
    table = {}

    def add_column(name, column):
        free = name
        while free in table:
            free += "_"
        table[free] = column
        if free != name:
            print(f"two columns would be called {name}: the later one is {free}")

    add_column("set", data.names[ids])
    add_column("part", parts)
    is_new = ~np.isin(parts, ["train", "valid"])
    for i, (output, classes) in enumerate(data.classes.items()):
        labels = data.labels[ids, i]
        known = ~np.isnan(labels)
        tested = known & is_new
        values = predictions[output]
        if classes:
            label_names = [classes[int(k)] if k == k else "" for k in labels]
            add_column(f"{output}_label", label_names)
            add_column(output, np.array(classes)[values.argmax(1)])
            for name, logp in zip(classes, values.T, strict=True):
                add_column(f"{output}_{name}", np.exp(logp))
        else:
            add_column(f"{output}_label", labels)
            add_column(output, values)
        if known.any():
            text = "with a label are neither trained nor validated on"
            print(f"{output}: {tested.sum():,} of the {known.sum():,} sets {text}")
        if not tested.any():
            continue
        if classes:
            metrics = script.classification(values[tested], labels[tested])
            counts = np.bincount(labels[tested].astype(int))
            metrics["commonest of these"] = counts.max() / tested.sum()
        else:
            metrics = script.regression(values[tested], labels[tested], data.facts["scales"][i])
            metrics["rmse of their mean"] = labels[tested].std()
        print(output, " ".join(f"{name}={value:.4f}" for name, value in metrics.items()))
    pd.DataFrame(table).to_csv(args.out, index=False, mode="x", float_format="%.6g")
    print(f"{args.out}: {len(ids):,} sets")


def main():
    args = parse_args()
    device = script.choose_device(args, local_rank=0)
    model, options, facts = script.load_network(args.checkpoint)
    # the script adds up over a group of processes: here a group of one
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        sets = new_sets(args, options, facts, folder) if args.sets else own_sets(options, facts)
        predictions = script.predict(model.to(device), *sets[:2], device)
        report(args, *sets, predictions)
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except (InputError, OSError) as error:
        print(f"predict_causal_sets.py: error: {error}", file=sys.stderr)
        sys.exit(2)
