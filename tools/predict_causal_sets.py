"""Apply a network of run_train_quantumgrav_ddp.py to causal sets.

    python tools/predict_causal_sets.py outputs/quantumgrav/best.pt data/causal_sets
    python tools/predict_causal_sets.py outputs/mine/best.pt new/*.zarr --labels manifold_like

The sets: one folder of tools/make_causal_sets.py or tools/convert_causal_sets.py (of the folder
that the network was trained on, the test sets alone), or stores and files that the latter reads;
--labels names those of their labels that are tasks of the network.

Writes a CSV file with a line for each set: source; set (its number there, from 0 on, or its name);
for each task the class that is guessed, the probability of each class, and the label where there is
one. Prints, for each task with labels, the metrics of the training script, and the accuracy of the
commonest class beside them.
"""

import argparse
import csv
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from convert_causal_sets import number_classes, read_sources
from make_causal_sets import ARRAYS, Parser, count, join, run, stop
from tqdm import tqdm

from run_train_quantumgrav_ddp import (
    CausalSetNet,
    CausalSets,
    InputError,
    check_data,
    choose_device,
    classification,
    is_whole,
    load_checkpoint,
    read_meta,
)


def parse_args(words=None):
    parser = Parser(__doc__)
    add = parser.add_argument
    add("checkpoint", type=Path, help="best.pt or latest.pt of a run")
    add("sources", nargs="+", type=Path, metavar="SETS", help="a folder, or stores and files")
    add("--out", type=Path, default=Path("predictions.csv"), help="file to write")
    add("--labels", nargs="+", default=[], metavar="NAME", help="labels in stores and files")
    add("--skip_bad_data", action="store_true", help="leave out what is damaged, and list it")
    add("--device", default="auto", choices=["auto", "cuda", "xpu", "cpu"], help="auto: the best")
    add("--workers", type=count, default=os.cpu_count(), help="processes that read stores")
    args = parser.parse_args(words)

    if args.out.exists():
        parser.error(f"{args.out} exists: give another --out")
    if not args.out.parent.is_dir():
        parser.error(f"--out {args.out}: there is no folder {args.out.parent}")
    args.is_folder = (args.sources[0] / "meta.json").exists()
    if args.is_folder and (len(args.sources) > 1 or args.labels):
        parser.error(f"{args.sources[0]} is a folder of arrays: give it alone, without --labels")
    return args


# ---- Sets ------------------------------------------------------------------------------------


class NewSets(CausalSets):
    """Sets from their arrays, to be made into batches as those of a folder are."""

    def __init__(self, arrays, columns):
        for name, array in arrays.items():
            setattr(self, name, array)
        self.columns = columns
        self.sizes = np.diff(self.node_ptr)
        self.edges = np.diff(self.edge_ptr)
        self.cost = self.sizes + self.edges


def from_folder(folder, state):
    """(arrays, {label: its classes}, the numbers of the sets, where each of these comes from)"""
    data_hash = check_data(folder)
    arrays = {}
    for name in ["node_ptr", "edge_ptr", "split", *ARRAYS]:
        arrays[name] = np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r"))
    ids = np.arange(len(arrays["labels"]))
    if data_hash == state["data_hash"]:
        ids = np.flatnonzero(arrays["split"] == 2)
        print(f"{folder}: the network was trained on it, so only its test sets")
    return arrays, read_meta(folder)[1]["classes"], ids, [(folder, i) for i in ids]


def from_stores(args):
    """The same, of stores and files."""
    found, problems = read_sources(args, args.labels)
    for problem in problems:
        print(f"left out: {problem}")
    sets = [arrays for _, _, arrays in found]
    classes = number_classes(sets, args.labels)
    arrays = {name: join(sets, name) for name in ARRAYS}
    for name in ("node", "edge"):
        arrays[f"{name}_ptr"] = np.concatenate([[0], np.cumsum(join(sets, f"{name}_count"))])
    return arrays, classes, np.arange(len(sets)), [(path, name) for path, name, _ in found]


def labels_of_tasks(labels, classes, known):
    """{task: labels as numbers of the classes `known`, those of the network; -1: none}"""
    found = {}
    for column, (task, names) in enumerate(classes.items()):
        if task not in known:
            continue
        for name in names:
            if name not in known[task]:
                stop(2, f"{task}: the network knows {', '.join(known[task])}, but not {name}")
        numbers = np.array([known[task].index(name) for name in names] + [-1])
        found[task] = numbers[labels[:, column]]
    return found


# ---- Predictions -----------------------------------------------------------------------------


@torch.no_grad()
def predict(model, data, ids, eval_edges, device):
    """{task: log-probabilities (len(ids), classes)}, batches of about so many elements and edges"""
    number = np.cumsum(data.cost[ids]) // eval_edges
    batches = np.split(ids, np.flatnonzero(np.diff(number)) + 1)
    found = {task: [] for task in model.heads}
    for batch in tqdm(batches, unit=" batches", disable=None):
        for task, logits in model(data[batch, batch].to(device)).items():
            found[task].append(logits.double().log_softmax(dim=1).cpu().numpy())
    return {task: np.concatenate(parts) for task, parts in found.items()}


def write_csv(path, origins, logp, labels, classes):
    rows = []
    for i, (source, number) in enumerate(origins):
        row = {"source": source, "set": number}
        for task, names in classes.items():
            chances = np.exp(logp[task][i])
            row[task] = names[chances.argmax()]
            for name, chance in zip(names, chances, strict=True):
                row[f"{task}_{name}"] = f"{chance:.6g}"
            if task in labels:
                label = labels[task][i]
                row[f"{task}_label"] = names[label] if label >= 0 else ""
        rows.append(row)

    with open(path, "x", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def print_metrics(logp, labels):
    for task, numbers in labels.items():
        known = numbers >= 0
        if not known.any():
            continue
        metrics = classification(logp[task][known], numbers[known])
        metrics["commonest class"] = np.bincount(numbers[known]).max() / known.sum()
        text = " ".join(f"{name}={value:.4f}" for name, value in metrics.items())
        print(f"{task}, {known.sum():,} sets with a label: {text}")


def main():
    args = parse_args()
    state = load_checkpoint(args.checkpoint) if is_whole(args.checkpoint) else {}
    if state.get("script") != "run_train_quantumgrav_ddp.py" or "classes" not in state:
        stop(2, f"{args.checkpoint}: expected best.pt or latest.pt of run_train_quantumgrav_ddp.py")
    known = state["classes"]
    options = argparse.Namespace(**state["args"])
    if not set(args.labels) <= set(known):
        stop(2, f"--labels {' '.join(args.labels)}: the network has the tasks {', '.join(known)}")
    try:
        device = choose_device(args, local_rank=0)
        if args.is_folder:
            arrays, classes, ids, origins = from_folder(args.sources[0], state)
        else:
            arrays, classes, ids, origins = from_stores(args)
    except InputError as error:
        stop(2, error)

    model = CausalSetNet(options, known)
    try:
        model.load_state_dict(state["model"])
    except RuntimeError:
        hint = "if you changed a copy, copy tools/ beside it, and use that"
        stop(2, f"{args.checkpoint}: its network is not that of {state['script']}: {hint}")
    model.eval().to(device)
    labels = labels_of_tasks(arrays["labels"][ids], classes, known)
    if classes and not labels:
        print(f"no metrics: the labels are {', '.join(classes)}, the tasks {', '.join(known)}")
    logp = predict(model, NewSets(arrays, options.features), ids, options.eval_edges, device)
    write_csv(args.out, origins, logp, labels, known)
    print_metrics(logp, labels)
    print(f"{args.out}: {len(ids):,} sets")


if __name__ == "__main__":
    run(main)
