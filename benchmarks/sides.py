"""What the benchmarks share: sides that take turns, and what is made of their speeds.

A side is one of the programs that are compared: `ours`, or another one, such as a port of another
program's step. In a round all sides are started, with one thread a process. Then they work in turns
of a few seconds: while one side works, the processes of the others are stopped (SIGSTOP). So all
see the same moods of a shared machine. A round ends when each side has worked for --seconds; a
ratio is of speeds of the same round. The next round starts all sides anew, with another seed: the
spread of the rounds then also has what differs between runs of the same program.

Each side writes a line into its metrics.jsonl after a step, or after every so many. Its speed in a
round is the number of lines by the time that it worked, from the last line before the first turn to
the last one in the round: a step that was stopped in the middle counts as long as it worked.
"""

import argparse
import contextlib
import ctypes
import functools
import json
import math
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
COMMON = "--device=cpu --precision=fp32 --wandb_mode=disabled --save_every=1000000"
TURN = 3.0  # seconds
WARM = 2  # lines that a side writes before it is measured
COUNTED = '"lr"'  # what is in the line of a step, and in no other
RESIDUES = "ACDEFGHIKLMNPQRSTVWY"

sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # the scripts, and helpers.py
running = []  # jobs


# ---- Data ----------------------------------------------------------------------------------------


def run_tool(name, *options):
    command = [sys.executable, ROOT / "tools" / name, *map(str, options)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def write_proteins(path, lengths):
    """A random sequence on each line."""
    draw = np.random.default_rng(0)
    rows = ["".join(draw.choice(list(RESIDUES), length)) for length in lengths]
    path.write_text("\n".join(rows) + "\n")


def write_images(path, count, shape):
    """An .npz file of noise: `count` images to train on, 50 to validate on, and 50 to test."""
    draw = np.random.default_rng(0)
    arrays = {}
    for part, number in {"train": count, "val": 50, "test": 50}.items():
        arrays[f"x_{part}"] = draw.integers(0, 256, (number, *shape), np.uint8)
        arrays[f"y_{part}"] = np.arange(number) % 10
    np.savez(path, **arrays)


# ---- Runs ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def workplace():
    """A folder for the runs. At the end they end, and it is removed."""
    with tempfile.TemporaryDirectory() as name:
        try:
            yield Path(name)
        finally:
            end_all()


def end_with_parent():
    """In a new process: Linux ends it, stopped or not, however this program ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def start_ranks(count, command, folder, log, **variables):
    """`python COMMAND` in `folder`, a process for each rank, with more environment variables. They
    write into the file `log`."""
    with socket.create_server(("localhost", 0)) as probe:
        port = probe.getsockname()[1]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **variables}
    env.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    env.update(WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count))
    words = [sys.executable, *map(str, command)]
    processes = []
    with open(log, "w") as file:
        options = {"cwd": folder, "env": env, "stdout": file, "stderr": file}
        options.update(start_new_session=True, preexec_fn=end_with_parent)
        for rank in range(count):
            env.update(RANK=str(rank), LOCAL_RANK=str(rank))
            processes.append(subprocess.Popen(words, **options))
    return processes


class Job:
    """A run of a program. Its clock runs while it works."""

    def __init__(self, command, out, amount, processes):
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        self.metrics = out / "metrics.jsonl"
        self.log = Path(f"{out}.log")
        self.amount = amount  # samples that a line of metrics.jsonl stands for
        self.clock = 0.0
        self.last = None  # (clock, lines) at the last line
        self.first = None  # that at the begin of the round
        variables = {"OMP_NUM_THREADS": "1", "METRICS": str(self.metrics)}
        self.processes = start_ranks(processes, command, out.parent, self.log, **variables)
        running.append(self)

    def send(self, number):
        for process in self.processes:
            process.send_signal(number)

    def fail(self):
        statuses = [process.poll() for process in self.processes]
        text = self.log.read_text()[-3000:]
        sys.exit(f"a process of {self.log.stem} ended, {statuses}; its last words:\n{text}")

    def wait(self):
        """Until all processes have ended, and well."""
        for process in self.processes:
            if process.wait() != 0:
                self.fail()

    def lines(self):
        """How many there are. If a process has ended, this program ends, too."""
        if any(process.poll() is not None for process in self.processes):
            self.fail()
        return self.metrics.read_text().count(COUNTED) if self.metrics.exists() else 0

    def warm_up(self):
        """It works until it has written WARM lines, and is stopped."""
        while self.lines() < WARM:
            time.sleep(0.1)
        self.send(signal.SIGSTOP)

    def take_turn(self):
        begin = time.time()
        self.send(signal.SIGCONT)
        time.sleep(TURN)
        self.send(signal.SIGSTOP)
        lines = self.lines()
        written_at = self.metrics.stat().st_mtime
        if written_at > begin:
            self.last = (self.clock + written_at - begin, lines)
        self.clock += time.time() - begin

    def work_until_a_line(self):
        """If it has written none since the begin of the round, it takes some turns more."""
        while self.last == self.first:
            self.take_turn()

    def speed(self):
        """Samples per second in the round."""
        clock, lines = self.first
        last_clock, last_lines = self.last
        return (last_lines - lines) * self.amount / (last_clock - clock)


def script_job(script, name, folder, options, amount=1, processes=1):
    """A new run of a training script. `folder` is that of workplace()."""
    out = folder / f"run-{name}"
    command = [ROOT / script, *COMMON.split(), f"--output_dir={out}", *options.split()]
    return Job(command, out, amount, processes)


def port_job(file, name, folder, settings, amount, processes=1):
    """port(**settings) of the program `file` of this folder."""
    command = [Path(file).resolve(), f"--port={json.dumps(settings)}"]
    return Job(command, folder / f"run-{name}", amount, processes)


def end_all():
    for job in running:
        job.send(signal.SIGKILL)
        for process in job.processes:
            process.wait()
    running.clear()


# ---- In a port -----------------------------------------------------------------------------------


def keep_freed_memory():
    """As the scripts do (setup_ddp): the C library keeps what was freed for the next step."""
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(-3, 2**25)
    mallopt(-3, 2**30)
    mallopt(-1, 2**31 - 1)


def note_step():
    """After each step. (each rank)"""
    if os.environ["RANK"] == "0":
        with open(os.environ["METRICS"], "a") as file:
            file.write('{"lr": 0}\n')


# ---- Rounds and tables ---------------------------------------------------------------------------


def measure_round(jobs, seconds):
    """The speed of each job."""
    for job in jobs:
        job.warm_up()
    for job in jobs:
        job.work_until_a_line()
        job.first = job.last
    for _ in range(math.ceil(seconds / TURN)):
        for job in jobs:
            job.take_turn()
    for job in jobs:
        job.work_until_a_line()
    speeds = [job.speed() for job in jobs]
    end_all()
    return speeds


def print_row(*cells):
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def print_head(*names):
    print_row(*names)
    print("|" + "---|" * len(names), flush=True)


def spread(values):
    """Median (smallest to largest)."""
    digits = 0 if min(values) > 1000 else 2
    middle = statistics.median(values)
    return f"{middle:,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def run(doc, unit, works, names, prepare, start, port, seconds=12.0):
    """A benchmark. works: {name: its settings}; names: {side: what the table calls it} of all but
    ours. Before a work prepare(folder, settings) makes its data, and start(folder, settings, side,
    seed) returns the job of a side. In a run of a port (each rank) it is port(**settings)."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=formatter)
    add = parser.add_argument
    add("--works", nargs="+", default=list(works), choices=works, help="all, if not given")
    add("--rounds", type=int, default=5)
    add("--seconds", type=float, default=seconds, help=f"of each side in a round [{seconds:g}]")
    add("--port", type=json.loads, help=argparse.SUPPRESS)  # a run of a port
    args = parser.parse_args()
    if args.port is not None:
        port(**args.port)
        return

    print(f"a thread each, {args.rounds} rounds of {args.seconds:g} s\n")
    print_head("work", "compared with", f"ours, {unit}", f"it, {unit}", "ratio")
    for work in args.works:
        with workplace() as folder:
            prepare(folder, works[work])
            start_side = functools.partial(start, folder, works[work])
            rounds = []
            for seed in range(args.rounds):
                jobs = [start_side(side, seed) for side in ["ours", *names]]
                rounds.append(measure_round(jobs, args.seconds))
        ours, *others = zip(*rounds, strict=True)
        for name, speeds in zip(names.values(), others, strict=True):
            ratios = [a / b for a, b in zip(ours, speeds, strict=True)]
            print_row(work, name, spread(ours), spread(speeds), spread(ratios))
