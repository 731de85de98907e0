"""Apply a network of run_train_quantumgrav_ddp.py to causal sets.

    python tools/predict_causal_sets.py outputs/quantumgrav/best.pt data/causal_sets
    python tools/predict_causal_sets.py outputs/mine/best.pt new/*.zarr --labels manifold_like

The sets: one folder of tools/make_causal_sets.py or tools/convert_causal_sets.py, or stores and
files that the latter reads; --labels names those of their labels that are tasks of the network.

Writes a CSV file with a line for each set: source; set (its number there, from 0 on); for each
task the class that is guessed, the probability of each class, and the label where there is one.
Prints, for each task with labels, the metrics of the training script, and the accuracy of the
commonest class beside them. Of the folder that it was trained on, a network gets the test sets
alone, unless --part says otherwise.
"""

import argparse
import csv
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.nn.functional as F
from convert_causal_sets import number_classes, read_sources
from make_causal_sets import ARRAYS, Parser, count, join, run, stop
from tqdm import tqdm

from run_train_quantumgrav_ddp import (
    FORMAT,
    CausalSetNet,
    CausalSets,
    InputError,
    check_data,
    choose_device,
    classification,
    is_whole,
    load_checkpoint,
)

SCRIPT = "run_train_quantumgrav_ddp.py"
PARTS = ["train", "valid", "test"]


def parse_args(words=None):
    parser = Parser(__doc__)
    add = parser.add_argument
    add("checkpoint", type=Path, help="best.pt or latest.pt of a run")
    add("sources", nargs="+", type=Path, metavar="SETS", help="a folder, or stores and files")
    add("--out", type=Path, default=Path("predictions.csv"), help="file to write")
    text = "of a folder; default: test if the network was trained on this folder, else all"
    add("--part", choices=[*PARTS, "all"], help=text)
    add("--labels", nargs="+", default=[], metavar="NAME", help="labels in stores and files")
    add("--skip_bad_data", action="store_true", help="leave out what is damaged, and list it")
    add("--eval_edges", type=int, default=32_768, help="elements and edges per forward pass")
    add("--device", default="auto", choices=["auto", "cuda", "xpu", "cpu"], help="auto: the best")
    add("--workers", type=count, default=os.cpu_count(), help="processes that read stores")
    args = parser.parse_args(words)
    if args.out.exists():
        parser.error(f"{args.out} exists: give another --out")
    args.is_folder = (args.sources[0] / "node_ptr.npy").exists()
    if args.is_folder and (len(args.sources) > 1 or args.labels):
        parser.error(f"{args.sources[0]} is a folder of arrays: give it alone, without --labels")
    if args.part and not args.is_folder:
        parser.error("--part: only a folder of arrays has parts")
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


def from_folder(args, state):
    """(arrays, {label: its classes}, the numbers of the sets, where each of these comes from)"""
    folder = args.sources[0]
    data_hash = check_data(folder)
    meta = json.loads((folder / "meta.json").read_text())
    graph = state["meta"]["args"]["graph"]
    if meta["args"]["graph"] != graph:
        stop(2, f"{folder}: expected --graph {graph}, that of the sets the network was trained on")
    if meta["features"] != state["meta"]["features"]:
        stop(2, f"{folder} has other features than the sets the network was trained on")
    arrays = {}
    for name in ["node_ptr", "edge_ptr", *ARRAYS]:
        arrays[name] = np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r"))

    part = args.part or ("test" if data_hash == state["data_hash"] else "all")
    ids = np.arange(len(arrays["labels"]))
    if part != "all":
        ids = np.flatnonzero(np.load(folder / "split.npy") == PARTS.index(part))
    print(f"{folder}: {len(ids):,} sets ({part})")
    return arrays, meta["classes"], ids, [(folder, i) for i in ids]


def from_stores(args, state):
    """The same, of stores and files."""
    tasks = state["args"]["tasks"]
    if not set(args.labels) <= set(tasks):
        stop(2, f"--labels {' '.join(args.labels)}: the network has the tasks {', '.join(tasks)}")
    found, problems = read_sources(args, args.labels, state["meta"]["args"]["graph"])
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


def load(path, device):
    """(network, {task: its classes}, checkpoint)"""
    if not is_whole(path):
        stop(2, f"{path} is not there, or is damaged: expected best.pt or latest.pt of a run")
    state = load_checkpoint(path)
    if state.get("script") != SCRIPT or state.get("format") != FORMAT or "meta" not in state:
        stop(2, f"{path} is no checkpoint of {SCRIPT}, format {FORMAT}")
    args = argparse.Namespace(**state["args"])
    classes = {task: state["meta"]["classes"][task] for task in args.tasks}
    model = CausalSetNet(args, classes)
    model.load_state_dict(state["model"])
    return model.eval().to(device), classes, state


@torch.no_grad()
def predict(model, data, ids, eval_edges, device):
    """{task: log-probabilities (len(ids), classes)}, batches of about so many elements and edges"""
    number = np.cumsum((data.sizes + data.edges)[ids]) // eval_edges
    batches = np.split(ids, np.flatnonzero(np.diff(number)) + 1)
    found = {task: [] for task in model.heads}
    for batch in tqdm(batches, unit=" batches", disable=None):
        for task, logits in model(data[batch, batch].to(device)).items():
            found[task].append(F.log_softmax(logits.double(), dim=1).cpu().numpy())
    return {task: np.concatenate(parts) for task, parts in found.items()}


def write_csv(path, origins, logp, labels, classes):
    header = ["source", "set"]
    for task in logp:
        header += [task, *[f"{task}_{name}" for name in classes[task]]]
        if task in labels:
            header.append(f"{task}_label")
    with open(path, "x", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        for row, origin in enumerate(origins):
            line = [*origin]
            for task, names in classes.items():
                line.append(names[logp[task][row].argmax()])
                line += [f"{p:.6g}" for p in np.exp(logp[task][row])]
                if task in labels:
                    label = labels[task][row]
                    line.append(names[label] if label >= 0 else "")
            writer.writerow(line)


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
    try:
        device = choose_device(args, local_rank=0)
        model, known, state = load(args.checkpoint, device)
        read_sets = from_folder if args.is_folder else from_stores
        arrays, classes, ids, origins = read_sets(args, state)
    except InputError as error:
        stop(2, error)
    labels = labels_of_tasks(arrays["labels"][ids], classes, known)
    logp = predict(model, NewSets(arrays, state["args"]["features"]), ids, args.eval_edges, device)
    write_csv(args.out, origins, logp, labels, known)
    print_metrics(logp, labels)
    print(f"{args.out}: {len(ids):,} sets")


if __name__ == "__main__":
    run(main)
