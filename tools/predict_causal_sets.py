"""Apply a network of run_train_quantumgrav_ddp.py to causal sets.

    python tools/predict_causal_sets.py outputs/quantumgrav/best.pt new/*.zarr
    python tools/predict_causal_sets.py outputs/mine/best.pt new.npz --labels manifold_like
    python tools/predict_causal_sets.py outputs/quantumgrav/best.pt

SETS are stores (.zarr) and files (.npz) as that script reads them; they need no labels. --labels
names those of their labels that are tasks of the network. Without SETS: the test sets of the run.

Writes a CSV file with a line for each set: source; set (its name there; of the run's own data its
number, from 0 on); for each task the class that is guessed, the probability of each class, and the
label where there is one. Prints, for each task with labels, the metrics of the training script, and
the accuracy of always guessing the commonest of these labels.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pandas as pd
import torch
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
    if args.out.exists() or not args.out.parent.is_dir():
        parser.error(f"--out {args.out}: expected a new file, in a folder that is there")
    if not args.sets and (args.labels or args.skip_bad_data):
        parser.error("--labels and --skip_bad_data are of SETS, and none are given")
    return args


def load_network(path, device):
    """(network, options of its run, {task: classes})"""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        options = argparse.Namespace(**state["args"])
        # the run may have had more memory
        options.batch_size = min(options.batch_size, script.BATCH_SIZE)
        classes = state["loop"]["classes"]
        model = script.CausalSetNet(options, classes)
        model.load_state_dict(state["model"])
    except Exception as error:  # there is no such file, or its network is another
        text = f"expected best.pt, step_N.pt or latest.pt of {script.__file__}"
        raise InputError(f"{path}: {text} ({type(error).__name__})") from error
    return model.to(device), options, classes


def own_sets(options):
    """The test sets of the run: (data, the numbers of the sets, (source, name) of each)"""
    source = " ".join(options.data)
    data = script.CausalSets(script.prepare(options), options)
    if data.hash.split()[0] != options.data_hash.split()[0]:
        raise InputError(f"{source}: it has changed since the network was trained on it")
    ids = data.part("test")
    return data, ids, [(source, i) for i in ids]


class NewSets(script.CausalSets):
    """Sets that were just read, to be made into batches as those of a run are."""

    def __init__(self, sets, labels, classes, features):
        for name in sets[0]:
            setattr(self, name, np.concatenate([arrays[name] for arrays in sets]))
        self.labels = labels
        self.classes = classes
        self.columns = [script.FEATURES.index(name) for name in features]
        self.sizes = self.statistics[:, 0].astype(np.int64)
        self.edges = self.statistics[:, 2].astype(np.int64)
        self.node_ptr = np.cumsum([0, *self.sizes])
        self.edge_ptr = np.cumsum([0, *self.edges])


def new_sets(args, options, classes):
    """As `own_sets`, of the stores and files."""
    used = [Path(path).resolve() for path in options.data]
    for path in args.sets:
        if path.resolve() in used:
            raise InputError(f"{path}: the network was trained on it; without SETS: its test sets")
    source = " ".join(map(str, args.sets))
    sets, values, origins, bad = script.read_all(args.sets, args.labels)
    if bad:
        text = f"{len(bad)} sets are bad (--skip_bad_data leaves them out):"
        text = "\n  ".join([text, *bad[:20]])
        if not args.skip_bad_data:
            raise InputError(text)
        print(text)
    if not sets:
        raise InputError(f"{source}: no sets")
    labels = np.full((len(sets), len(classes)), -1)
    data = NewSets(sets, labels, classes, options.features)
    if script.hash_of_orders(vars(data)) in options.data_hash:
        raise InputError(f"{source}: a copy of what the network was trained on")

    for label, column in zip(args.labels, zip(*values, strict=True), strict=True):
        own, names = script.classes_of(column)
        unknown = set(names) - set(classes[label])
        if unknown:
            known = ", ".join(classes[label])
            raise InputError(f"{label}: the network knows {known}, but not {min(unknown)}")
        numbers = [classes[label].index(name) for name in names]
        # a set without a label has number -1 also in `own`, and finds the last entry
        labels[:, list(classes).index(label)] = np.array([*numbers, -1])[own]
    return data, np.arange(len(sets)), origins


def report(out, origins, logp, labels, classes):
    """Write the CSV file, print the metrics."""
    table = dict(zip(["source", "set"], zip(*origins, strict=True), strict=True))
    for (task, names), own in zip(classes.items(), labels.T, strict=True):
        table[task] = np.array(names)[logp[task].argmax(1)]
        for name, values in zip(names, logp[task].T, strict=True):
            table[f"{task}_{name}"] = np.exp(values)
        table[f"{task}_label"] = np.array([*names, ""])[own]  # -1 is the last one: no label

        known = own >= 0
        if known.any():
            metrics = script.classification(logp[task][known], own[known])
            metrics["commonest of these"] = np.bincount(own[known]).max() / known.sum()
            text = " ".join(f"{name}={value:.4f}" for name, value in metrics.items())
            print(f"{task}, {known.sum():,} sets with a label: {text}")
    pd.DataFrame(table).to_csv(out, index=False, mode="x", float_format="%.6g")
    print(f"{out}: {len(labels):,} sets")


def main():
    args = parse_args()
    device = script.choose_device(args, local_rank=0)
    model, options, classes = load_network(args.checkpoint, device)
    for label in args.labels:
        if label not in classes:
            raise InputError(f"--labels {label}: the network has the tasks {', '.join(classes)}")
    data, ids, origins = new_sets(args, options, classes) if args.sets else own_sets(options)

    # `predict` adds up over a group of processes: here a group of one
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    logp = script.predict(model, data, ids, options, device)
    dist.destroy_process_group()
    report(args.out, origins, logp, data.labels[ids], classes)


if __name__ == "__main__":
    try:
        main()
    except (InputError, OSError) as error:
        print(f"predict_causal_sets.py: {error}", file=sys.stderr)
        sys.exit(2)
