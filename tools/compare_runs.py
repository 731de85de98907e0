"""Compare finished runs of a training script by their summaries: mean, spread and best.

    python tools/compare_runs.py outputs/seed*
    python tools/compare_runs.py outputs/lr*_seed* --csv runs.csv --curves runs.png

Runs that differ by --seed alone are one row: the mean over them, and their standard deviation. Rows
come in the order of their validation metric, by which each run chose its best.pt, the best first.
Test metrics are shown and decide nothing: once you choose by them, they are no test any more.

Runs that measured different things are refused: another script, other data, other tasks, another
held-out set. Of two runs with the same options and the same seed the second is left out.
"""

import argparse
import csv
import json
import statistics
import sys
from itertools import chain
from pathlib import Path

# options that do not change what is trained
IGNORED = """config output_dir fresh num_workers save_every log_every max_minutes wandb_mode
    nproc_per_node device backend timeout_minutes local_rank world_size master_addr master_port
    cache_dir prepare_only batch_size data_hash seed save_to_artifacts artifacts_dir""".split()

# options that decide what is measured, and on what
MEASURED = """tasks split split_seed val_fraction val_ratio max_protein_len eval_sequences
    eval_draws eval_fraction eval_samples eval_distractors base_model_name loss_type beta
    temperature image_shape indist_attack_clf_eps indist_attack_clf_norm""".split()

# endings of the metrics that should fall; all others should rise
FALLING = ("loss", "nelbo", "perplexity", "ece")


def stop(message):
    """End the program with one line."""
    print(f"compare_runs.py: {message}", file=sys.stderr)
    sys.exit(2)


class Parser(argparse.ArgumentParser):
    def error(self, message):
        stop(message)  # one line, without the usage


def parse_args():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = Parser(description=__doc__, formatter_class=formatter, allow_abbrev=False)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="FOLDER", help="--output_dir of the runs")
    add("--metrics", nargs="+", help="test metrics in the table; default: all")
    add("--csv", type=Path, help="also write a line for each run there")
    add("--curves", type=Path, help="also draw the validation metric of each run over its steps")
    args = parser.parse_args()
    for name in ("csv", "curves"):
        path = getattr(args, name)
        if path and path.exists():
            parser.error(f"{path} exists: give another --{name}")
    return args


def flat(values, prefix=""):
    """{"a": {"b": 1}} as {"a/b": 1}"""
    found = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found.update(flat(value, f"{prefix}{name}/"))
        else:
            found[prefix + name] = value
    return found


def read_runs(folders):
    """Summaries of the finished runs, flat, with their folder as "run". Says which are left out."""
    runs = []
    for folder in folders:
        try:
            summary = json.loads((folder / "summary.json").read_text())
            status = summary["status"]
        except OSError:
            status = "no summary.json, so it is not finished"
        except (ValueError, KeyError) as error:
            status = f"its summary.json is damaged ({error!r})"
        if ".old-" in folder.name:
            status = "--fresh has moved it aside"
        if status != "finished":
            print(f"left out: {folder}: {status}")
            continue
        run = {"run": str(folder), **flat(summary)}
        # the first word is the hash of the data, others are of networks that begin or teach
        run["data"] = str(run.get("args/data_hash")).partition(" ")[0]
        runs.append(run)
    if not runs:
        stop("none of these runs is finished")
    for key in ["script", "best/metric", "data", *[f"args/{name}" for name in MEASURED]]:
        for run in runs:
            if run.get(key) != runs[0].get(key):
                pair = [f"{one.get(key)} in {one['run']}" for one in (runs[0], run)]
                name = key.removeprefix("args/")
                stop(f"not comparable: {name} is {' and '.join(pair)}; compare them apart")
    return runs


def group_runs(runs):
    """{"lr 0.001": [the runs with that]}, by the options that differ between runs, but the seed"""
    differing = []
    for key in dict.fromkeys(chain(*runs)):
        if key.startswith("args/") and key.removeprefix("args/") not in IGNORED:
            if any(run.get(key) != runs[0].get(key) for run in runs):
                differing.append(key)
    groups = {}
    for run in runs:
        words = [f"{key.removeprefix('args/')} {run.get(key)}" for key in differing]
        group = groups.setdefault(", ".join(words) or "all", [])
        if run.get("args/seed") in [other.get("args/seed") for other in group]:
            print(f"left out: {run['run']}: another run has its options and its seed")
        else:
            group.append(run)
    return groups


def spread(group, key):
    """Mean ± standard deviation (of a sample: n - 1)."""
    values = [run[key] for run in group]
    text = f"{statistics.mean(values):.4f}"
    if len(values) > 1:
        text += f" ± {statistics.stdev(values):.4f}"
    return text


def compare(runs, metrics):
    """The table, rows of words: [header, best group, ..., worst group]."""
    names = []
    for key in runs[0]:
        if key.startswith("test/") and all(key in run for run in runs):
            names.append(key.removeprefix("test/"))
    for name in metrics or []:
        if name not in names:
            stop(f"--metrics {name}: these runs have {', '.join(names) or 'none'}")
    names = metrics or names

    def validation(group):
        return statistics.mean(run["best/value"] for run in group[1])

    metric = runs[0]["best/metric"]
    is_rising = not metric.endswith(FALLING)
    header = ["runs with", "n", f"validation {metric}"]
    rows = [header + [f"test {name}" for name in names]]
    for title, group in sorted(group_runs(runs).items(), key=validation, reverse=is_rising):
        row = [title, str(len(group)), spread(group, "best/value")]
        rows.append(row + [spread(group, f"test/{name}") for name in names])
    return rows


def write_csv(path, runs):
    """A line for each run: its folder, options, validation and test metrics, baselines."""
    with open(path, "x", newline="") as file:
        writer = csv.DictWriter(file, dict.fromkeys(chain(*runs)))
        writer.writeheader()
        writer.writerows(runs)


def draw_curves(path, runs):
    """A line for each run: the validation metric by which it chose its best weights."""
    from matplotlib import pyplot

    column = f"val/{runs[0]['best/metric']}"
    figure, axis = pyplot.subplots(figsize=(7, 3.5))
    # thinner from run to run, so that equal lines are all seen
    for width, run in zip(range(2 * len(runs), 0, -2), runs, strict=True):
        rows = [json.loads(line) for line in Path(run["run"], "metrics.jsonl").open()]
        points = [(row["step"], row[column]) for row in rows if column in row]
        if not points:
            stop(f"{run['run']}: no {column} in metrics.jsonl")
        axis.plot(*zip(*points, strict=True), linewidth=width, label=run["run"])
    axis.set(xlabel="step", ylabel=column)
    axis.legend()
    figure.tight_layout()
    figure.savefig(path)


def main():
    args = parse_args()
    runs = read_runs(args.runs)
    rows = compare(runs, args.metrics)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())
    if len(rows) > 2:
        print(f"\nbest by validation: {rows[1][0]}")
    try:
        if args.csv:
            write_csv(args.csv, runs)
        if args.curves:
            draw_curves(args.curves, runs)
    except OSError as error:
        stop(error)


if __name__ == "__main__":
    main()
