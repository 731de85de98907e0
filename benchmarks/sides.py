"""What the benchmarks share: sides that take turns, and what is made of their speeds.

A side is one of the programs that are compared: `ours`, or another one, such as a port of another
program's step; with --beside, also the same script in another checkout. In a round all sides are
started, with one thread a process. Then they work in turns of a few seconds: while one side works,
the processes of the others are stopped (SIGSTOP). So all see the same moods of a shared machine. A
round ends when each side has worked for --seconds; a ratio is of speeds of the same round. The next
round starts all sides anew, with another seed: the spread of the rounds then also has what differs
between runs of the same program.

On a GPU the sides of a round follow one another, each started and measured alone: of a stopped side
the GPU would go on with what is queued, and processes that load data would go on, too. There a
process has as many threads as it takes, for what feeds the GPU, and a script two processes that
load data. The memory is what a side has taken of the GPU, as nvidia-smi sees it.

Each side writes a line into its metrics.jsonl after every so many steps, when the device has done
them. Its speed in a round is the number of steps by the time that it worked, from the last line
before the first turn to the last one in the round: a step that was stopped in the middle counts as
long as it worked.
"""

import argparse
import contextlib
import ctypes
import functools
import itertools
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
import torch

ROOT = Path(__file__).resolve().parents[1]
TURN = 3.0  # seconds
WARM = 2  # lines that a side writes before it is measured
COUNTED = '"lr"'  # what is in the line of a step, and in no other
RESIDUES = "ACDEFGHIKLMNPQRSTVWY"

sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # the scripts, and helpers.py
running = []  # jobs
counter = itertools.count(1)  # of the steps of a port
# options of run() that a side asks for
chosen = argparse.Namespace(device="cpu", precision="fp32", beside=None, small=False, options="")


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
        self.amount = amount  # samples of a step
        self.clock = 0.0
        self.last = None  # (clock, step) at the last line
        self.first = None  # that at the begin of the round
        variables = {"METRICS": str(self.metrics)}
        if chosen.device == "cpu":
            variables["OMP_NUM_THREADS"] = "1"
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

    def steps(self):
        """Those that it has written a line of. If a process has ended, this program ends, too."""
        if any(process.poll() is not None for process in self.processes):
            self.fail()
        if not self.metrics.exists():
            return []
        *lines, _ = self.metrics.read_text().split("\n")  # the last one may not be whole
        return [json.loads(line)["step"] for line in lines if COUNTED in line]

    def warm_up(self):
        """It works until it has written WARM lines, and is stopped."""
        while len(self.steps()) < WARM:
            time.sleep(0.1)
        self.send(signal.SIGSTOP)

    def take_turn(self):
        begin = time.time()
        self.send(signal.SIGCONT)
        time.sleep(TURN)
        self.send(signal.SIGSTOP)
        step = self.steps()[-1]
        written_at = self.metrics.stat().st_mtime
        if written_at > begin:
            self.last = (self.clock + written_at - begin, step)
        self.clock += time.time() - begin

    def work_until_a_line(self):
        """If it has written none since the begin of the round, it takes some turns more."""
        while self.last == self.first:
            self.take_turn()

    def speed(self):
        """Samples per second in the round."""
        clock, step = self.first
        last_clock, last_step = self.last
        return (last_step - step) * self.amount / (last_clock - clock)


def common():
    """Options of every training script."""
    where = f"--device={chosen.device} --precision={chosen.precision}"
    if chosen.device != "cpu":
        where += " --num_workers=2"
    return f"{where} --wandb_mode=disabled --save_every=1000000 {chosen.options}"


def home(name):
    """The checkout that a side is of."""
    return chosen.beside if name == "beside" else ROOT


def script_job(script, name, folder, options, amount=1, processes=1):
    """A new run of a training script. `folder` is that of workplace()."""
    out = folder / f"run-{name}"
    command = [home(name) / script, *common().split(), f"--output_dir={out}", *options.split()]
    if name == "beside":
        command.append("--cache_dir=cache-beside")  # another version may keep data in another form
    return Job(command, out, amount, processes)


def port_job(file, name, folder, settings, amount, processes=1):
    """port(device, precision, **settings) of the program `file` of this folder."""
    settings = {"device": chosen.device, "precision": chosen.precision, **settings}
    command = [home(name) / "benchmarks" / Path(file).name, f"--port={json.dumps(settings)}"]
    return Job(command, folder / f"run-{name}", amount, processes)


def end_all():
    for job in running:
        for process in job.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what loads its data
            process.wait()
    running.clear()


# ---- In a port -----------------------------------------------------------------------------------


def keep_freed_memory():
    """For a port at its best: the C library keeps what was freed for the next step."""
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(-3, 2**25)
    mallopt(-3, 2**30)
    mallopt(-1, 2**31 - 1)


def note_step(every=1):
    """After each step. It waits for a GPU, and writes a line, after every so many. (each rank)"""
    step = next(counter)
    if step % every == 0 and os.environ["RANK"] == "0":
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        with open(os.environ["METRICS"], "a") as file:
            file.write(json.dumps({"step": step, "lr": 0}) + "\n")


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
    return [job.speed() for job in jobs]


def memory_taken():
    """GB of the GPU, by all programs."""
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 1e9


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
    add("--sides", nargs="*", default=list(names), choices=names, help="beside ours; all")
    add("--beside", type=Path, metavar="FOLDER", help="one more side: ours in this checkout")
    add("--options", default="", help="more options of ours, such as --options=--compile")
    add("--device", default="cpu", choices=["cpu", "cuda"])
    add("--precision", default="fp32", choices=["fp32", "tf32", "bf16"])
    add("--small", action="store_true", help="few data, to test this program")
    add("--rounds", type=int, default=5)
    add("--seconds", type=float, default=seconds, help=f"of each side in a round [{seconds:g}]")
    add("--port", type=json.loads, help=argparse.SUPPRESS)  # a run of a port
    args = parser.parse_args(namespace=chosen)
    if args.port is not None:
        port(**args.port)
        return
    names = {side: names[side] for side in args.sides}
    if args.beside:
        args.beside = args.beside.resolve()
        names["beside"] = f"ours in {args.beside.name}"

    is_cpu = args.device == "cpu"
    place = "a CPU, a thread each" if is_cpu else torch.cuda.get_device_name()
    times = f"{args.rounds} rounds of {args.seconds:g} s"
    print(f"{place}, {args.precision}, {times} {args.options}\n")
    head = ["work", "compared with", f"ours, {unit}", f"it, {unit}", "ratio"]
    print_head(*head, *([] if is_cpu else ["GB, ours and it"]))
    together = ["ours", *names]
    groups = [together] if is_cpu else [[side] for side in together]
    idle = 0 if is_cpu else memory_taken()
    for work in args.works:
        with workplace() as folder:
            prepare(folder, works[work])
            start_side = functools.partial(start, folder, works[work])
            rounds = []
            for seed in range(args.rounds):
                speeds = []
                memory = []  # of each side, in the last round
                for group in groups:
                    jobs = [start_side(side, seed) for side in group]
                    speeds += measure_round(jobs, args.seconds)
                    if not is_cpu:
                        memory.append(memory_taken() - idle)
                    end_all()
                rounds.append(speeds)
        ours, *others = zip(*rounds, strict=True)
        for i, (name, speeds) in enumerate(zip(names.values(), others, strict=True), start=1):
            ratios = [a / b for a, b in zip(ours, speeds, strict=True)]
            row = [work, name, spread(ours), spread(speeds), spread(ratios)]
            print_row(*row, *([] if is_cpu else [f"{memory[0]:.1f}, {memory[i]:.1f}"]))
