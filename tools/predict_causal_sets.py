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
import csv
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch.distributed as dist

import run_train_quantumgrav_ddp as script
from run_train_quantumgrav_ddp import InputError

SCRIPT = "run_train_quantumgrav_ddp.py"


def parse_args():
    parser = script.Parser(__doc__)
    add = parser.add_argument
    add("checkpoint", type=Path, help="best.pt or latest.pt of a run")
    add("sets", nargs="*", type=Path, metavar="SETS", help="stores and files")
    add("--out", type=Path, default=Path("predictions.csv"), help="file to write")
    add("--labels", nargs="+", default=[], metavar="NAME", help="labels in the stores and files")
    add("--skip_bad_data", action="store_true", help="leave out damaged sets, and list them")
    add("--device", default="auto", choices=["auto", "cuda", "xpu", "cpu"], help="auto: the best")
    args = parser.parse_args()
    if not args.out.parent.is_dir():
        parser.error(f"--out {args.out}: there is no folder {args.out.parent}")
    if args.out.exists():
        parser.error(f"{args.out} exists: give another --out")
    return args


def own_sets(options):
    """The test sets of the run: (data, the numbers of the sets, (source, name) of each)"""
    source = " ".join(options.data)
    data = script.CausalSets(script.prepare(options), options)
    if data.hash != options.data_hash:
        raise InputError(f"{source}: it has changed since the network was trained on it")
    ids = data.part("test")
    return data, ids, [(source, i) for i in ids]


class NewSets(script.CausalSets):
    """Sets that were just read, to be made into batches as those of a run are."""

    def __init__(self, sets, labels, classes, features):
        for name in sets[0]:
            setattr(self, name, np.concatenate([arrays[name] for arrays in sets]))
        self.labels = np.array(labels)
        self.classes = classes
        self.columns = [script.FEATURES.index(name) for name in features]
        self.sizes = self.statistics[:, 0].astype(np.int64)
        self.edges = self.statistics[:, 2].astype(np.int64)
        self.node_ptr = np.cumsum([0, *self.sizes])
        self.edge_ptr = np.cumsum([0, *self.edges])


def new_sets(args, options, classes):
    """The same of the stores and files."""
    used = [Path(path).resolve() for path in options.data]
    for path in args.sets:
        if path.resolve() in used:
            text = "without SETS this takes its test sets"
            raise InputError(f"the network was trained on {path}: {text}")

    names, sets, labels, bad, notes = script.read_all(args.sets, args.labels)
    if bad and not args.skip_bad_data:
        text = f"{len(bad)} of {len(bad) + len(sets)} sets are bad"
        raise InputError(f"{text} (--skip_bad_data leaves them out):{script.list_problems(bad)}")
    for problem in notes + [f"left out: {text}" for text in bad]:
        print(problem)
    if not sets:
        raise InputError(f"no sets in {' '.join(map(str, args.sets))}")

    rows = []
    for values in labels:
        own = dict(zip(args.labels, values, strict=True))
        rows.append([class_of(own.get(task, -1), task, classes) for task in classes])
    return NewSets(sets, rows, classes, options.features), np.arange(len(sets)), names


def class_of(label, task, classes):
    """The number of a label's class; -1: there is no label."""
    if not script.is_label(label):
        return -1
    if str(label) not in classes[task]:
        known = ", ".join(classes[task])
        raise InputError(f"{task}: the network knows {known}, but not {label}")
    return classes[task].index(str(label))


def write_csv(path, origins, logp, labels, classes):
    rows = []
    for i, (source, name) in enumerate(origins):
        row = {"source": source, "set": name}
        for column, (task, names) in enumerate(classes.items()):
            row[task] = names[logp[task][i].argmax()]
            for class_name, value in zip(names, logp[task][i], strict=True):
                row[f"{task}_{class_name}"] = f"{np.exp(value):.6g}"
            label = labels[i, column]
            row[f"{task}_label"] = names[label] if label >= 0 else ""
        rows.append(row)

    with open(path, "x", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def print_metrics(logp, labels):
    for column, task in enumerate(logp):
        known = labels[:, column] >= 0
        if known.any():
            own = labels[known, column]
            metrics = script.classification(logp[task][known], own)
            metrics["commonest of these"] = np.bincount(own).max() / len(own)
            text = " ".join(f"{name}={value:.4f}" for name, value in metrics.items())
            print(f"{task}, {len(own):,} sets with a label: {text}")


def load_network(path, device):
    """(network, options of its run, {task: classes})"""
    if not path.is_file():
        raise InputError(f"{path}: there is no such file")
    state = script.read_checkpoint(path)
    if not isinstance(state, dict) or state.get("script") != SCRIPT:
        raise InputError(f"{path}: expected best.pt or latest.pt of {SCRIPT}")

    options = argparse.Namespace(**state["args"])
    model = script.CausalSetNet(options, state["loop"]["classes"])
    try:
        model.load_state_dict(state["model"])
    except RuntimeError:
        text = "a changed copy needs a copy of tools/ beside it"
        raise InputError(f"{path}: its network is not that of {SCRIPT}: {text}") from None
    return model.to(device), options, state["loop"]["classes"]


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
    write_csv(args.out, origins, logp, data.labels[ids], classes)
    print_metrics(logp, data.labels[ids])
    print(f"{args.out}: {len(ids):,} sets")


if __name__ == "__main__":
    try:
        main()
    except (script.RunError, OSError) as error:
        print(f"predict_causal_sets.py: {error}", file=sys.stderr)
        sys.exit(2)
