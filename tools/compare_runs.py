"""Compare finished runs of a training script by their summaries: mean, spread and best.

    python tools/compare_runs.py outputs/seed*
    python tools/compare_runs.py outputs/lr*_seed* --csv runs.csv

Runs that differ by --seed alone are one row: the mean over them, and their standard deviation. Rows
come in the order of their validation metric, by which each run chose its best.pt, the best first.
Test metrics are shown and decide nothing: once you choose by them, they are no test any more.
"""

import argparse
import csv
import json
import statistics
import sys
from pathlib import Path

# options that do not change what is trained
IGNORED = """config output_dir fresh num_workers save_every log_every max_minutes wandb_mode
    nproc_per_node device backend timeout_minutes local_rank world_size master_addr master_port
    eval_edges""".split()


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the docstring as it is, and every default."""


def stop(message):
    print(f"compare_runs.py: {message}", file=sys.stderr)
    sys.exit(2)


def parse_args(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="FOLDER", help="--output_dir of the runs")
    add("--metrics", nargs="+", help="test metrics in the table; default: all")
    add("--csv", type=Path, help="also write a line for each run there")
    args = parser.parse_args(words)
    if args.csv and args.csv.exists():
        stop(f"{args.csv} exists: give another --csv")
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
    """[(folder, summary)] of the finished runs; says why others are left out."""
    runs = []
    for folder in dict.fromkeys(folders):
        if not folder.is_dir() and folder.suffix == ".lock":  # what seed* finds beside the folders
            continue
        if ".old-" in folder.name:
            print(f"left out: {folder}: --fresh has moved it aside")
            continue
        try:
            summary = json.loads((folder / "summary.json").read_text())
            status = summary["status"]
            if status == "finished":
                runs.append((folder, summary))
            else:
                print(f"left out: {folder}: {status}")
        except FileNotFoundError:
            print(f"left out: {folder}: no summary.json, so it is not finished")
        except (OSError, ValueError, KeyError, TypeError) as error:
            stop(f"{folder}/summary.json is no summary of a run ({error!r})")
    if not runs:
        stop("none of these runs is finished")
    for key in ("script", "best/metric"):
        found = {flat(summary).get(key) for _, summary in runs}
        if len(found) > 1:
            stop(f"runs of different {key}: {', '.join(map(str, found))}")
    return runs


def differing_options(runs):
    """The names of the options, other than the seed, in which the runs differ."""
    names = []
    for name in dict.fromkeys(name for _, summary in runs for name in summary["args"]):
        values = {json.dumps(summary["args"].get(name)) for _, summary in runs}
        if len(values) > 1 and name not in [*IGNORED, "seed"]:
            names.append(name)
    return names


def group_runs(runs):
    """{"lr 0.001": [the runs with that]}"""
    names = differing_options(runs)
    groups = {}
    for folder, summary in runs:
        title = ", ".join(f"{name} {summary['args'].get(name)}" for name in names) or "all"
        groups.setdefault(title, []).append((folder, summary))
    for title, group in groups.items():
        seeds = [summary["args"].get("seed") for _, summary in group]
        if len(set(seeds)) < len(seeds):
            print(f"{title}: several runs have the same seed")
    return groups


def spread(values):
    """Mean ± standard deviation (of a sample: n - 1)."""
    text = f"{statistics.mean(values):.4f}"
    if len(values) > 1:
        text += f" ± {statistics.stdev(values):.4f}"
    return text


def compare(runs, metrics):
    """The table, rows of words: [header, best group, ..., worst group]."""
    best = runs[0][1]["best"]
    tests = [flat(summary.get("test", {})) for _, summary in runs]
    names = [name for name in tests[0] if all(name in test for test in tests)]
    for name in metrics or []:
        if name not in names:
            stop(f"--metrics {name}: these runs have {', '.join(names) or 'none'}")
    names = metrics or names

    rows = []
    for title, group in group_runs(runs).items():
        values = [summary["best"]["value"] for _, summary in group]
        row = [title, str(len(group)), spread(values)]
        for name in names:
            row.append(spread([flat(summary["test"])[name] for _, summary in group]))
        rows.append((statistics.mean(values), row))
    rows.sort(key=lambda item: item[0], reverse=best["better"] == "higher")
    header = ["runs with", "n", f"validation {best['metric']}", *[f"test {name}" for name in names]]
    return [header, *[row for _, row in rows]]


def print_table(rows):
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )


def write_csv(path, runs):
    """A line for each run: its folder, options, validation and test metrics, baselines."""
    lines = []
    for folder, summary in runs:
        line = {"run": str(folder)}
        for key in ("best", "test", "baselines", "seconds", "world_size", "args"):
            line.update(flat({key: summary.get(key, {})}))
        lines.append(line)
    names = list(dict.fromkeys(name for line in lines for name in line))
    with open(path, "x", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(lines)


def main():
    args = parse_args()
    runs = read_runs(args.runs)
    rows = compare(runs, args.metrics)
    print_table(rows)
    if len(rows) > 2:
        print(f"\nbest by validation: {rows[1][0]}")
    if args.csv:
        write_csv(args.csv, runs)


if __name__ == "__main__":
    main()
