"""What the benchmarks of this folder share: sides that take turns, and what is made of their rates.

A side is one of the programs that are compared. Either it is a process that is there from the start
and makes training steps when it is asked to (Sides, and Turns in the process), or it is a run under
torchrun (torchrun). All sides have a turn in each round, in an order that rotates (in_rounds).
Ratios are of turns of the same round, as the speed of a shared machine drifts.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
REPLACED_COMMIT = "e7785a5"
REPLACED = f"the program replaced ({REPLACED_COMMIT})"
ENDLESS = 1_000_000  # steps of an epoch in which nobody waits for its end


# ---- Processes -----------------------------------------------------------------------------------


class SideEnded(SystemExit):
    """A side has ended that was to go on; with what it printed last."""


class Sides:
    """Processes that wait to be asked. What they print goes to files in `folder`."""

    def __init__(self, folder):
        # at their end they do not clean up, which Python would tell the user
        os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")
        self.folder = folder
        self.pipes = {}
        self.processes = {}

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for pipe in self.pipes.values():
            with contextlib.suppress(OSError):  # it has ended
                pipe.send(None)
        for process in self.processes.values():
            process.join(5)
            process.kill()
            process.join()

    def start(self, name, function, *args):
        """A new process, which calls function(pipe, *args)."""
        context = multiprocessing.get_context("spawn")
        self.pipes[name], theirs = context.Pipe()
        output = self.folder / f"{name}.txt"
        process = context.Process(target=in_process, args=(output, function, theirs, *args))
        process.start()
        self.processes[name] = process
        theirs.close()

    def send(self, name, message):
        with contextlib.suppress(OSError):  # it has ended: hear() says so
            self.pipes[name].send(message)

    def hear(self, name):
        """What a side sends next."""
        try:
            return self.pipes[name].recv()
        except (EOFError, OSError):
            text = (self.folder / f"{name}.txt").read_text()
            raise SideEnded(f"{name} ended:\n{text[-2500:]}") from None

    def wait(self, name):
        """Until the process has ended."""
        self.processes[name].join()

    def ask(self, name, message):
        self.send(name, message)
        return self.hear(name)


def in_process(output, function, *args):
    file = open(output, "w")
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    function(*args)


class Turns:
    """In a side's process: it steps in its turns only, and answers each with steps per second. A
    turn is asked for by its seconds."""

    def __init__(self, pipe):
        self.pipe = pipe

    def wait(self):
        try:
            self.asked = self.pipe.recv()
        except EOFError:  # nobody is there to ask again
            self.asked = None
        if self.asked is None:
            os._exit(0)
        self.steps = 0
        self.begin = time.monotonic()

    def step_done(self):
        self.steps += 1
        taken = time.monotonic() - self.begin
        if taken >= self.asked:
            self.pipe.send(self.steps / taken)
            self.wait()


def watch_steps(script, step_done):
    """Call step_done() after each training step of a script that is run in this process. Its epochs
    follow one another as if they were one: no validation or checkpoint falls into a turn."""
    plain_init = script.GlobalBatchSampler.__init__
    plain_deal = script.GlobalBatchSampler.__iter__
    plain_update = script.StepGuard.update
    plain_agree = script.StepGuard.agree
    updated = False

    def init(sampler, *args):
        plain_init(sampler, *args)
        sampler.steps_of_epoch = sampler.steps
        sampler.steps = ENDLESS

    def deal(sampler):
        while True:
            sampler.steps = sampler.steps_of_epoch
            batches = list(plain_deal(sampler))
            sampler.steps = ENDLESS
            yield from batches
            sampler.epoch += 1

    def update(guard, optimizer, scaler):
        nonlocal updated
        updated = True
        return plain_update(guard, optimizer, scaler)

    def agree(guard):  # it ends a step; what comes before training may call it, too
        nonlocal updated
        reason = plain_agree(guard)
        if updated:
            updated = False
            step_done()
        return reason

    script.GlobalBatchSampler.__init__ = init
    script.GlobalBatchSampler.__iter__ = deal
    script.StepGuard.update = update
    script.StepGuard.agree = agree


# ---- Runs ----------------------------------------------------------------------------------------


def torchrun(processes, threads, command, log, folder):
    """Run a command in `folder`, its output in `log`. Returns its seconds; ends this program where
    it fails."""
    environment = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    environment["HF_HUB_OFFLINE"] = "1"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher.append(f"--nproc_per_node={processes}")
    begin = time.monotonic()
    with open(log, "w") as file:
        job = subprocess.Popen(
            [*launcher, *map(str, command)],
            env=os.environ | environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=folder,
        )
        try:
            status = job.wait()
        finally:  # where this program is ended, its processes end, too
            job.terminate()
            job.wait()
    if status != 0:
        words = log.read_text().partition("] failed (exitcode: ")[0]  # of the ranks, not torchrun's
        sys.exit(f"exit status {status}: {log.name} ends with\n{words[-3000:]}")
    return time.monotonic() - begin


@contextlib.contextmanager
def workplace():
    """A folder, removed at the end, with the program replaced in its folder `worktree`."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    git = ["git", "-C", ROOT, "worktree"]
    with tempfile.TemporaryDirectory() as name:
        old = Path(name) / "worktree"
        subprocess.run([*git, "add", "--quiet", "--detach", old, REPLACED_COMMIT], check=True)
        try:
            yield Path(name)
        finally:
            subprocess.run([*git, "remove", "--force", old], check=True)


# ---- Rounds, ratios, tables ----------------------------------------------------------------------


def make_parser(doc):
    """With the option that all programs of this folder have."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=formatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rounds there")
    return parser


def in_rounds(sides, rounds, turn, warm_up=True):
    """{side: what turn(side) returned in each round}. A round before them warms up."""
    sides = list(sides)
    found = {side: [] for side in sides}
    for number in range(-1 if warm_up else 0, rounds):
        first = number % len(sides)
        for side in sides[first:] + sides[:first]:
            result = turn(side)
            if number >= 0:
                found[side].append(result)
    return found


def check_same(side, numbers, ours):
    """The sides must be the same network before it says anything that one is faster."""
    difference = np.abs(numbers - ours).max()
    if not difference < 1e-4 * max(1.0, np.abs(ours).max()):
        sys.exit(f"{side} is not the same network as ours: outputs differ by {difference:.1e}")


def measure(names, folder, args, run_side, *rest):
    """{side: steps per second, in each round}. run_side(pipe, name, *rest), in a process of its
    own, sends some outputs of its network, then steps in its Turns."""
    with Sides(folder) as processes:
        ours = None
        for name in names:
            processes.start(name, run_side, name, *rest)
            outputs = processes.hear(name)  # before the next one starts: ours writes the weights
            if ours is None:
                ours = outputs
            check_same(name, outputs, ours)
        found = in_rounds(names, args.rounds, lambda name: processes.ask(name, args.seconds))
    return {name: np.array(speeds) for name, speeds in found.items()}


def compare(work, other, unit, mine, theirs):
    """A record for each round, of the same form in all benchmarks. ratio: how many times faster."""
    records = []
    for a, b in zip(mine, theirs, strict=True):
        ratio = b / a if unit == "seconds" else a / b
        record = {"work": work, "with": other, "unit": unit}
        records.append({**record, "ours": float(a), "other": float(b), "ratio": float(ratio)})
    return records


def ratios(records):
    return [record["ratio"] for record in records]


def spread(values, digits):
    """Median (smallest to largest)."""
    middle = statistics.median(values)
    return f"{middle:,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def print_row(*cells):
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def print_head(*cells):
    print_row(*cells)
    print("|" + "---|" * len(cells), flush=True)


def write_json(path, records):
    if path is not None:
        path.write_text(json.dumps(records, indent=1))
