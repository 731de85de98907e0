"""What the benchmarks share: sides that take turns, and what is made of their speeds.

A side is one of the programs that are compared: ours, or a port of the step of another program. In
a round all sides are started, with one thread a process. Then they work
in turns of a few seconds: while one side works, the processes of the others are stopped (SIGSTOP).
So all see the same moods of a shared machine. A round ends when each side has worked for --seconds;
a ratio is of speeds of the same round. The next round starts all sides anew, with another seed:
the spread of the rounds then also has what differs between runs of the same program.

Each side writes a line into its metrics.jsonl after a step, or after every so many. Its speed in a
round is the number of lines by the time that it worked, from the last line before the first turn to
the last one in the round: a step that was stopped in the middle counts as long as it worked.
"""

import argparse
import contextlib
import ctypes
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

ROOT = Path(__file__).resolve().parents[1]
COMMON = "--device=cpu --precision=fp32 --wandb_mode=disabled --save_every=1000000"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
TURN = 3.0  # seconds
WARM = 2  # lines that a side writes before it is measured
COUNTED = '"lr"'  # what is in the line of a step, and in no other

running = []  # jobs


# ---- Runs ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def workplace():
    """A folder for the runs. At the end they end, and it is removed."""
    with tempfile.TemporaryDirectory() as name:
        try:
            yield Path(name)
        finally:
            end_all()


def run_tool(name, *options):
    command = [sys.executable, ROOT / "tools" / name, *map(str, options)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


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
        self.at_begin = None  # (clock, processor seconds) then
        self.speed = None  # samples per second in the round
        self.busy = None  # the share of the round in which a process was working, 0 to 1
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
            for rank in range(processes):
                env.update(RANK=str(rank), LOCAL_RANK=str(rank))
                process = subprocess.Popen(
                    [sys.executable, *map(str, command)],
                    cwd=out.parent,
                    env=env,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    preexec_fn=end_with_parent,
                )
                self.processes.append(process)

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

    def rows(self):
        lines = self.metrics.read_text().splitlines() if self.metrics.exists() else []
        return [json.loads(line) for line in lines if COUNTED in line]

    def lines(self):
        """How many there are. If a process has ended, this program ends, too."""
        for process in self.processes:
            if process.poll() is not None:
                self.fail()
        return self.metrics.read_text().count(COUNTED) if self.metrics.exists() else 0

    def processor_seconds(self):
        """That all threads of its processes have used since they started (Linux)."""
        ticks = 0
        for process in self.processes:
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])  # in the program and in the kernel
        return ticks / os.sysconf("SC_CLK_TCK")

    def note_turn(self, begin):
        """After a turn that began then."""
        lines = self.lines()
        written_at = self.metrics.stat().st_mtime
        if written_at > begin:
            self.last = (self.clock + written_at - begin, lines)
        self.clock += time.time() - begin

    def begin_round(self):
        self.first = self.last
        self.at_begin = (self.clock, self.processor_seconds())

    def end_round(self):
        clock, lines = self.first
        last_clock, last_lines = self.last
        self.speed = (last_lines - lines) * self.amount / (last_clock - clock)

        clock, seconds = self.at_begin
        worked = (self.clock - clock) * len(self.processes)
        self.busy = (self.processor_seconds() - seconds) / worked


def script_job(script, side, folder, options, amount=1, processes=1):
    """A new run of a training script. `folder` is that of workplace()."""
    out = folder / f"run-{side}"
    command = [ROOT / script, *COMMON.split(), f"--output_dir={out}", *options]
    return Job(command, out, amount, processes)


def port_job(file, side, folder, settings, amount, processes=1):
    """port(**settings) of the program `file` of this folder."""
    command = [Path(file).resolve(), f"--port={json.dumps(settings)}"]
    return Job(command, folder / f"run-{side}", amount, processes)


def end_all():
    for job in running:
        job.send(signal.SIGKILL)
        for process in job.processes:
            process.wait()
    running.clear()


# ---- In a run of a port --------------------------------------------------------------------------


def note_step():
    """After each step of a port. (each rank)"""
    if os.environ["RANK"] == "0":
        with open(os.environ["METRICS"], "a") as file:
            file.write('{"lr": 0}\n')


def repeat(step):
    """A port's training, until this process is killed."""
    while True:
        step()
        note_step()


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
    for side in jobs_of.values():
        while any(job.last == job.first for job in side):
            take_turn(side)


def measure_round(jobs_of, seconds):
    """jobs_of: {side: its jobs}. At the end they have been measured, and have ended."""
    jobs = []
    for side in jobs_of.values():
        jobs += side
    warm_up(jobs)
    work_until_a_line(jobs_of)
    for job in jobs:
        job.begin_round()
    for _ in range(math.ceil(seconds / TURN)):
        for side in jobs_of.values():
            take_turn(side)
    work_until_a_line(jobs_of)
    for job in jobs:
        job.end_round()
    end_all()


def measure(start, names, rounds, seconds):
    """start(side, seed) starts one of the sides `names` and returns its jobs. Returns for each
    round {side: its jobs}, which have ended."""
    measured = []
    for seed in range(rounds):
        jobs_of = {side: start(side, seed) for side in names}
        measure_round(jobs_of, seconds)
        measured.append(jobs_of)
    return measured


def speeds(measured):
    """{side: its samples per second in each round}"""
    found = {}
    for side in measured[0]:
        found[side] = [sum(job.speed for job in jobs_of[side]) for jobs_of in measured]
    return found


# ---- Arguments, ratios, tables -------------------------------------------------------------------


def make_parser(doc, seconds=12.0):
    """With the options that all programs of this folder have."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=formatter)
    parser.add_argument("--rounds", type=int, default=5)
    text = f"that each side works in a round [{seconds:g}]"
    parser.add_argument("--seconds", type=float, default=seconds, help=text)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rounds there")
    parser.add_argument("--port", type=json.loads, help=argparse.SUPPRESS)  # a run of a port
    return parser


def parse_args(parser, port):
    """The arguments; in a run of a port (each rank) this program ends here."""
    args = parser.parse_args()
    if args.port:
        port(**args.port)
        sys.stdout.flush()
        os._exit(0)  # while DDP's objects live, gloo's threads abort some processes that end well
    return args


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
    speeds(). Returns a record for each round. ratio: how many times faster ours is."""
    records = []
    for side, name in names.items():
        rounds = []
        for ours, other in zip(found[mine], found[side], strict=True):
            ratio = other / ours if unit in ("seconds", "ms") else ours / other
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
