"""Compare finished runs of a training script by their summaries: mean, spread and best.

    python tools/compare_runs.py outputs/seed*
    python tools/compare_runs.py outputs/lr*_seed* --csv runs.csv --curves runs.png

Runs that differ by --seed alone are one row: how many they are, their mean, and their standard
deviation. Rows come in the order of their validation metric, by which each run chose its best.pt,
the best first. Test metrics decide nothing: once you choose by them, they are no test any more.

Runs that measured different things are refused: another script, other data, other tasks, another
held-out set. Of two runs with the same options and the same seed the second is left out.
"""

import argparse
import json
import sys
from pathlib import Path

import pandas as pd

# options that do not change what is trained
IGNORED = """config output_dir fresh num_workers save_every log_every max_minutes wandb_mode
    nproc_per_node device backend timeout_minutes local_rank world_size master_addr master_port
    cache_dir prepare_only batch_size accum data_hash seed save_to_artifacts artifacts_dir
    eval_batch_size gradient_checkpointing max_memory_per_gpu sampling_method wandb_project
    wandb_name""".split()

# options that decide what is measured, and on what
MEASURED = """tasks split split_seed val_fraction val_ratio max_protein_len eval_sequences
    eval_draws eval_fraction eval_samples eval_distractors base_model_name loss_type beta
    temperature size grey indist_attack_clf_eps indist_attack_clf_norm""".split()

# endings of the metrics that should fall; all others should rise
FALLING = ("loss", "nelbo", "perplexity", "ece", "mae", "rmse")


def stop(message):
    print(f"compare_runs.py: error: {message}", file=sys.stderr)
    sys.exit(2)


def parse_args():
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="FOLDER", help="--output_dir of the runs")
    add("--csv", type=Path, help="also write a line for each run there")
    add("--curves", type=Path, help="also draw the validation metric of each run over its steps")
    args = parser.parse_args()
    for name in ("csv", "curves"):
        path = getattr(args, name)
        if path and path.exists():
            stop(f"--{name} {path} exists: expected a new file")
        if path and not path.parent.is_dir():
            stop(f"--{name} {path}: there is no such folder")
    return args


def read_runs(folders):
    """A row for each finished run: its folder as "run", and its summary. Says what is left out."""
    summaries = []
    for folder in folders:
        try:
            summary = json.loads((folder / "summary.json").read_text())
            status = summary["status"]
        except (OSError, ValueError):
            status = "no whole summary.json, so it is not finished"
        if ".old-" in folder.name:
            status = "--fresh has moved it aside"
        if status == "finished":
            summaries.append({"run": str(folder), **summary})
        else:
            print(f"left out: {folder}: {status}")
    if not summaries:
        stop("none of these runs is finished")

    runs = pd.json_normalize(summaries, sep="/")  # {"args": {"lr": 1}} becomes "args/lr"
    # the first word is the hash of the data, others are of networks that begin or teach
    runs["data"] = runs["args/data_hash"].str.split().str[0]
    for name in ["script", "best/metric", "data", *[f"args/{name}" for name in MEASURED]]:
        if name in runs and runs[name].astype(str).nunique(dropna=False) > 1:
            table = runs[["run", name]].to_string(index=False)
            stop(f"not comparable, compare them apart:\n{table}")
    return runs


def title_runs(runs):
    """The runs with a column "options": those that differ, such as "lr 0.1, width 64"."""
    options = [name for name in runs if name.startswith("args/")]
    options = [name for name in options if name.removeprefix("args/") not in IGNORED]
    differing = [name for name in options if runs[name].astype(str).nunique(dropna=False) > 1]
    titles = []
    for _, run in runs.iterrows():
        words = [f"{name.removeprefix('args/')} {run[name]}" for name in differing]
        titles.append(", ".join(words) or "all")
    runs["options"] = titles
    is_twice = runs.duplicated(["options", "args/seed"])
    for folder in runs["run"][is_twice]:
        print(f"left out: {folder}: another run has its options and its seed")
    return runs[~is_twice]


def compare(runs):
    """A row for each group of runs that differ by their seed alone, the best first."""
    tests = [name for name in runs if name.startswith("test/") and runs[name].notna().all()]
    groups = runs.groupby("options")
    table = groups[["best/value", *tests]].agg(["mean", "std"])
    table["n", ""] = groups.size()
    metric = runs["best/metric"].iloc[0]
    table = table.sort_values(("best/value", "mean"), ascending=metric.endswith(FALLING))
    return table[["n", "best/value", *tests]].rename(columns={"best/value": f"val/{metric}"})


def draw_curves(path, runs):
    """A line for each run: the validation metric by which it chose its best weights."""
    from matplotlib import pyplot

    column = f"val/{runs['best/metric'].iloc[0]}"
    figure, axis = pyplot.subplots(figsize=(7, 3.5))
    for number, folder in enumerate(runs["run"]):
        rows = pd.read_json(Path(folder, "metrics.jsonl"), lines=True)
        if column not in rows:
            stop(f"{folder}: no {column} in metrics.jsonl")
        width = 2 * (len(runs) - number)  # thinner from run to run, so that equal lines are seen
        rows.dropna(subset=column).plot("step", column, ax=axis, label=folder, linewidth=width)
    axis.set_ylabel(column)
    figure.tight_layout()
    figure.savefig(path)


def main():
    args = parse_args()
    runs = title_runs(read_runs(args.runs))
    table = compare(runs)
    print(table.to_string(float_format="%.4f", na_rep="-", index_names=False))
    if len(table) > 1:
        print(f"\nbest by validation: {table.index[0]}")
    try:
        if args.csv:
            runs.to_csv(args.csv, index=False)
        if args.curves:
            draw_curves(args.curves, runs)
    except (OSError, ValueError) as error:  # ValueError: matplotlib's, of a name like curves.xyz
        stop(error)


if __name__ == "__main__":
    main()
