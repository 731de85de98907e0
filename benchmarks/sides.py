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
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
TURN = 3.0  # seconds
WARM = 2  # lines that a side writes before it is measured
COUNTED = '"lr"'  # what is in the line of a step, and in no other
AMINO_ACIDS = """ALA CYS ASP GLU PHE GLY HIS ILE LYS LEU MET ASN PRO GLN ARG SER THR VAL TRP
    TYR""".split()
RESIDUES = "ACDEFGHIKLMNPQRSTVWY"  # the same

running = []  # jobs


# ---- Data ----------------------------------------------------------------------------------------


def run_tool(name, *options):
    command = [sys.executable, ROOT / "tools" / name, *map(str, options)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def random_protein(draw, length):
    return "".join(draw.choice(list(RESIDUES), length))


def write_proteins(path, lengths):
    """A random sequence on each line."""
    draw = np.random.default_rng(0)
    path.write_text("".join(random_protein(draw, length) + "\n" for length in lengths))


def write_images(path, count, shape):
    """An .npz file of noise: `count` images to train on, 50 to validate on, and 50 to test."""
    draw = np.random.default_rng(0)
    arrays = {}
    for part, number in {"train": count, "val": 50, "test": 50}.items():
        arrays[f"x_{part}"] = draw.integers(0, 256, (number, *shape), np.uint8)
        arrays[f"y_{part}"] = np.arange(number) % 10
    np.savez(path, **arrays)


def write_pairs(length, count, folder):
    """pairs.json: `count` pairs, each of a PDB file of its own, a helix of `length` residues."""
    draw = np.random.default_rng(length)
    atoms = {"N": (-0.5, 1.4, 0), "CA": (0, 0, 0), "C": (1.5, 0, 0.2), "O": (2.1, 1.0, 0.4)}
    turn = np.radians(100) * np.arange(length)
    helix = np.c_[2.3 * np.cos(turn), 2.3 * np.sin(turn), 1.5 * np.arange(length)]
    rows = []
    for number in range(count):
        own = random_protein(draw, length)
        places = helix + draw.normal(0, 0.2, helix.shape)
        lines = []
        for i, place in enumerate(places):
            name = AMINO_ACIDS[RESIDUES.index(own[i])]
            for atom, offset in atoms.items():
                x, y, z = place + offset
                begin = f"ATOM  {len(lines) + 1:5d}  {atom:<3s} {name} A{i + 1:4d}    "
                lines.append(f"{begin}{x:8.3f}{y:8.3f}{z:8.3f}  1.00  0.00           {atom[0]}\n")
        path = folder / f"helix{length}_{number}.pdb"
        path.write_text("".join(lines) + "END\n")
        other = random_protein(draw, length)
        rows.append({"pdb_file": str(path), "preferred_seq": own, "unpreferred_seq": other})
    (folder / "pairs.json").write_text(json.dumps(rows))
    return rows


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


class Job:
    """A run of a program, a process for each rank. Its clock runs while it works."""

    def __init__(self, command, out, amount=1, processes=1):
        self.metrics = out / "metrics.jsonl"
        self.log = Path(f"{out}.log")
        self.amount = amount  # samples that a line of metrics.jsonl stands for
        self.clock = 0.0
        self.last = None  # (clock, lines) at the last line
        self.first = None  # that at the begin of the round
        self.processes = []
        running.append(self)

        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        env = os.environ | ENVIRONMENT | {"METRICS": str(self.metrics)}
        env.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
        env.update(WORLD_SIZE=str(processes), LOCAL_WORLD_SIZE=str(processes))
        with open(self.log, "w") as file:
            options = {"cwd": out.parent, "stdout": file, "stderr": file}
            for rank in range(processes):
                env.update(RANK=str(rank), LOCAL_RANK=str(rank))
                words = [sys.executable, *map(str, command)]
                options.update(env=env, preexec_fn=end_with_parent)
                self.processes.append(subprocess.Popen(words, **options))

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

    def note_turn(self, begin):
        """After a turn that began then."""
        lines = self.lines()
        written_at = self.metrics.stat().st_mtime
        if written_at > begin:
            self.last = (self.clock + written_at - begin, lines)
        self.clock += time.time() - begin

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


def note_step():
    """In a port, after each step. (each rank)"""
    if os.environ["RANK"] == "0":
        with open(os.environ["METRICS"], "a") as file:
            file.write('{"lr": 0}\n')


# ---- Turns and rounds ----------------------------------------------------------------------------


def warm_up(jobs):
    """Each works until it has written WARM lines, and is stopped."""
    waiting = list(jobs)
    while waiting:
        time.sleep(0.1)
        for job in list(waiting):
            if job.lines() >= WARM:
                job.send(signal.SIGSTOP)
                waiting.remove(job)


def take_turn(jobs):
    begin = time.time()
    for job in jobs:
        job.send(signal.SIGCONT)
    time.sleep(TURN)
    for job in jobs:
        job.send(signal.SIGSTOP)
    for job in jobs:
        job.note_turn(begin)


def work_until_a_line(jobs_of):
    """A side that has written none since the begin of the round takes some turns more."""
    for jobs in jobs_of.values():
        while any(job.last == job.first for job in jobs):
            take_turn(jobs)


def measure_round(jobs_of, seconds):
    """{side: samples per second} of {side: its jobs}, which end."""
    for jobs in jobs_of.values():
        warm_up(jobs)
    work_until_a_line(jobs_of)
    for jobs in jobs_of.values():
        for job in jobs:
            job.first = job.last
    for _ in range(math.ceil(seconds / TURN)):
        for jobs in jobs_of.values():
            take_turn(jobs)
    work_until_a_line(jobs_of)
    found = {side: sum(job.speed() for job in jobs) for side, jobs in jobs_of.items()}
    end_all()
    return found


def measure(start, names, rounds, seconds):
    """{side: its samples per second in each round}. start(side, seed) returns the jobs of a side;
    names: {side: what the table calls it} of all but ours."""
    found = {side: [] for side in ["ours", *names]}
    for seed in range(rounds):
        jobs_of = {side: start(side, seed) for side in found}
        for side, speed in measure_round(jobs_of, seconds).items():
            found[side].append(speed)
    return found


# ---- Tables and arguments ------------------------------------------------------------------------


def print_row(*cells):
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def print_head(unit):
    print_row("work", "compared with", f"ours, {unit}", f"it, {unit}", "ratio")
    print("|" + "---|" * 5, flush=True)


def spread(values):
    """Median (smallest to largest)."""
    digits = 0 if min(values) > 1000 else 2
    middle = statistics.median(values)
    return f"{middle:,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def print_comparison(work, ours, name, others):
    """A row; the ratio is that of ours to the other, round by round."""
    ratios = [a / b for a, b in zip(ours, others, strict=True)]
    print_row(work, name, spread(ours), spread(others), spread(ratios))


def make_parser(doc, works, seconds=12.0):
    """With the options that all programs with sides have."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=formatter)
    add = parser.add_argument
    add("--works", nargs="+", default=list(works), choices=works, help="all, if not given")
    add("--rounds", type=int, default=5)
    add("--seconds", type=float, default=seconds, help=f"of each side in a round [{seconds:g}]")
    add("--port", type=json.loads, help=argparse.SUPPRESS)  # a run of a port
    return parser


def run(doc, unit, works, names, prepare, start, port, seconds=12.0):
    """A benchmark. works: {name: its settings}; names: see measure(). Before a work
    prepare(folder, settings) makes its data, and start(folder, settings, side, seed) starts a side
    of it. In a run of a port (each rank) it is port(**settings)."""
    args = make_parser(doc, works, seconds).parse_args()
    if args.port is not None:
        port(**args.port)
        return
    print(f"a thread each, {args.rounds} rounds of {args.seconds:g} s\n")
    print_head(unit)
    for work in args.works:
        with workplace() as folder:
            prepare(folder, works[work])
            start_side = functools.partial(start, folder, works[work])
            found = measure(start_side, names, args.rounds, args.seconds)
        for side, name in names.items():
            print_comparison(work, found["ours"], name, found[side])
