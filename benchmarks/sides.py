"""What the benchmarks of this folder share: runs that take turns, and what is made of their speeds.

A side is one of the programs that are compared: ours, the program that it replaces, a port of the
step of another program. A turn of a side is a run of it, under torchrun, with one thread a process.
All sides have a turn in each round, in an order that rotates. Ratios are of turns of the same
round, as the speed of a shared machine drifts.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMIT = "e7785a5"
REPLACED = f"the program replaced ({COMMIT})"
COMMON = "--device=cpu --precision=fp32 --wandb_mode=disabled --save_every=1000000"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


# ---- Runs ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def workplace():
    """A folder, removed at the end, with the program replaced in its folder `replaced-program`."""
    with tempfile.TemporaryDirectory() as name:
        program = Path(name) / "replaced-program"
        program.mkdir()
        command = ["git", "-C", ROOT, "archive", COMMIT]
        archive = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        subprocess.run(["tar", "-x", "-C", program], check=True, input=archive.stdout)
        yield Path(name)


def run_tool(name, *options):
    command = [sys.executable, ROOT / "tools" / name, *map(str, options)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def run(command, folder, processes, log):
    """Runs a program under torchrun in `folder`. Where it fails, this program ends, too."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher.append(f"--nproc_per_node={processes}")
    log = folder / log
    with open(log, "w") as file:
        done = subprocess.run(
            [*launcher, *map(str, command)],
            cwd=folder,
            env=os.environ | ENVIRONMENT,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    if done.returncode != 0:
        words = log.read_text().partition("] failed (exitcode: ")[0]  # of the ranks, not torchrun's
        sys.exit(f"exit status {done.returncode}: {command[0]} ends with\n{words[-3000:]}")


def run_script(script, side, folder, options, processes=1):
    """The rows of metrics.jsonl of a new run of a training script. side: "replaced" for the program
    replaced; anything else is ours. `folder` is that of workplace()."""
    program = folder / "replaced-program" if side == "replaced" else ROOT
    out = folder / f"run-{side}"
    shutil.rmtree(out, ignore_errors=True)
    command = [program / script, *COMMON.split(), f"--output_dir={out}", *options]
    run(command, folder, processes, f"{side}.log")
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def speeds_of(rows, *names):
    """The speed in each log line, which ours and the program replaced give by two names."""
    speeds = []
    for row in rows:
        for name in names:
            if name in row:
                speeds.append(row[name])
    return speeds


def steady(speeds):
    """The median of the log lines but the first, in which the run warms up. A line in which a
    checkpoint was written changes no median."""
    if len(speeds) < 2:
        sys.exit("a run made fewer than two log lines: give it more time")
    return statistics.median(speeds[1:])


def run_port(file, folder, settings, processes=1):
    """What port(**settings) of the program `file` of this folder returns, in a run of its own."""
    command = [Path(file).resolve(), f"--port={json.dumps(settings)}"]
    run(command, folder, processes, "port.log")
    return json.loads((folder / "answer.json").read_text())


def parse_args(parser, port):
    """The arguments; in a run of a port (each rank) this program ends here."""
    args = parser.parse_args()
    if args.port:
        found = port(**args.port)
        if os.environ["RANK"] == "0":
            Path("answer.json").write_text(json.dumps(found))
        sys.stdout.flush()
        os._exit(0)  # while DDP's objects live, gloo's threads abort some processes that end well
    return args


def steps_per_second(step, seconds=0.0, steps=1):
    """Of calls of step(), the median, after one that warms up: so many at least, and so long."""
    step()
    speeds = []
    end = time.monotonic() + seconds
    while len(speeds) < steps or time.monotonic() < end:
        begin = time.monotonic()
        step()
        speeds.append(1 / (time.monotonic() - begin))
    return statistics.median(speeds)


# ---- Rounds, ratios, tables ----------------------------------------------------------------------


def make_parser(doc):
    """With the options that all programs of this folder have."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=formatter)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rounds there")
    parser.add_argument("--port", type=json.loads, help=argparse.SUPPRESS)  # a run of a port
    return parser


def in_rounds(sides, rounds, turn):
    """{side: what turn(side) returned in each round}"""
    sides = list(sides)
    found = {side: [] for side in sides}
    for number in range(rounds):
        first = number % len(sides)
        for side in sides[first:] + sides[:first]:
            found[side].append(turn(side))
    return found


def spread(values, digits=2):
    """Median (smallest to largest)."""
    middle = statistics.median(values)
    return f"{middle:,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def print_row(*cells):
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def print_head(*cells):
    print_row(*cells)
    print("|" + "---|" * len(cells), flush=True)


def print_comparison_head(unit):
    print_head("work", "compared with", f"ours, {unit}", f"it, {unit}", "ratio")


def compare(work, unit, found, names, mine="ours"):
    """Prints a row for each of the others, {side: its name}, beside ours; `found` is that of
    in_rounds(). Returns a record for each round. ratio: how many times faster ours is."""
    records = []
    for side, name in names.items():
        rounds = []
        for ours, other in zip(found[mine], found[side], strict=True):
            ratio = other / ours if unit == "seconds" else ours / other
            record = {"work": work, "with": name, "unit": unit}
            rounds.append({**record, "ours": ours, "other": other, "ratio": ratio})
        digits = 0 if min(found[mine]) > 1000 else 2
        cells = [work, name, spread(found[mine], digits), spread(found[side], digits)]
        print_row(*cells, spread([record["ratio"] for record in rounds]))
        records += rounds
    return records


def write_json(path, records):
    if path is not None:
        path.write_text(json.dumps(records, indent=1))
