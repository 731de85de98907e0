"""What several test files use: processes that have their imports behind them, and small data."""

import contextlib
import importlib.util
import json
import logging
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
TWO_RANKS = [*TORCHRUN, "--standalone", "--nproc_per_node=2"]
os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "120")  # as the wrappers have it

# ---- Processes -----------------------------------------------------------------------------------


@cache
def forkserver():
    """Starts processes in 0.1 s, with preload.py imported; itself once for all tests."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preload"])
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    with mock.patch.dict(os.environ, variables):
        multiprocessing.forkserver.ensure_running()
    return context


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def rank_variables(count, **more):
    """The environment variables of each of `count` ranks on this machine."""
    more.update(WORLD_SIZE=count, MASTER_ADDR="localhost", MASTER_PORT=free_port())
    return [{**more, "RANK": rank, "LOCAL_RANK": rank} for rank in range(count)]


def run_program(argv, env, output):
    """A forked process becomes `python argv`, or a command, and writes into the file `output`."""
    os.setsid()  # what it leaves behind is found by its session
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if not argv[0].endswith(".py"):
        os.execvpe(argv[0], argv, env)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = argv
    sys.path.insert(0, str(Path(argv[0]).parent))
    torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    multiprocessing.set_start_method("fork", force=True)  # of its workers: as in a real process

    spec = importlib.util.spec_from_file_location("__main__", argv[0])
    program = importlib.util.module_from_spec(spec)
    program.__spec__ = None  # as in a real process; spawned workers then find the file
    sys.modules["__main__"] = program
    spec.loader.exec_module(program)


def call_script(script, *argv, status=0, seconds=200.0, **changes):
    """The output of `python {script}.py argv` on the CPU, which must end with `status`."""
    program = Ranks()
    program.start([changes], [str(ROOT / f"{script}.py"), *map(str, argv)])
    assert program.wait(seconds) == [status], program.text[-3000:]
    return program.text


def run_here(script, *argv):
    """main() of a script, in this process: a test may have replaced parts of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script.RunLog, "draw", lambda log: None)
        patch.setattr(script, "SCRIPT", f"{script.__name__}.py")  # pytest is at work here
        try:
            script.main(parse_arguments(script, *argv))
        finally:
            script.cleanup()
            logging.getLogger().handlers.clear()


def refusal(text):
    """The one line of processes that cannot work. (On a busy machine each rank may say it.)"""
    assert "Traceback" not in text, text[-3000:]
    said = {line for line in text.splitlines() if ": error: " in line}
    assert len(said) == 1, text[-3000:]
    return said.pop().partition(": error: ")[2]


def check_refused(said, call, *args, **options):
    """The call raises the InputError of a script, which says so."""
    with pytest.raises(Exception, match=said) as caught:
        call(*args, **options)
    assert caught.typename == "InputError"


def check_refusal(words, said):
    """A tool and its words, in this folder: it says so, and nothing is written."""
    name, *argv = words.split()
    before = set(os.listdir())
    line = refusal(call_script(f"tools/{name}", *argv, status=2))
    assert re.search(said, line), line
    assert set(os.listdir()) == before


def parse_arguments(script, *options):
    """What a script makes of its command line."""
    with mock.patch.object(sys, "argv", ["script", *options]):
        return script.parse_args()


def environment(**changes):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "Agg"}
    return {**env, **{name: str(value) for name, value in changes.items()}}


class Ranks:
    """The ranks of one job at a time, or a launcher."""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory()
        self.ranks = []

    def start(self, variables, argv):
        """The program or command, for each dictionary of environment variables; wait() is next."""
        self.ranks = []
        self.outputs = []
        value = os.urandom(8).hex()
        self.mark = f"LAUNCH_TEST_JOB={value}"
        for number, own in enumerate(variables):
            output = Path(self.folder.name, f"{value}-{number}")
            arguments = (argv, environment(**own, LAUNCH_TEST_JOB=value), str(output))
            self.ranks.append(forkserver().Process(target=run_program, args=arguments))
            self.outputs.append(output)
        for rank in self.ranks:
            rank.start()
        self.pids = [rank.pid for rank in self.ranks]

    @property
    def text(self):
        return "".join(output.read_text() for output in self.outputs if output.exists())

    def wait_for(self, pattern, seconds=200.0):
        """Until the output has the pattern."""
        deadline = time.monotonic() + seconds
        while not re.search(pattern, self.text):
            has_ended = all(rank.exitcode is not None for rank in self.ranks)
            if has_ended or time.monotonic() > deadline:
                pytest.fail(f"no {pattern!r}:\n{self.text[-3000:]}")
            time.sleep(0.05)

    def kill(self):
        for rank in self.ranks:
            rank.kill()

    def wait(self, seconds=400.0):
        """The exit statuses. No process may be left."""
        deadline = time.monotonic() + seconds
        running = list(self.ranks)
        while running and time.monotonic() < deadline:
            multiprocessing.connection.wait([rank.sentinel for rank in running], 1)
            running = [rank for rank in self.ranks if rank.exitcode is None]
            if running and 2 in [rank.exitcode for rank in self.ranks]:
                time.sleep(0.5)  # a launcher, too, sees this after a while, and ends the others
                for rank in running:
                    rank.terminate()
        self.ended_at = time.monotonic()
        self.kill()
        assert not running, f"still running after {seconds} s:\n{self.text[-3000:]}"
        deadline = time.monotonic() + 5
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not self.processes()
        return [rank.exitcode for rank in self.ranks]

    def processes(self):
        """{id: environment} of the living. Ranks and their workers are found by their sessions. A
        launcher gives each rank its own: but what is no fork has the mark in its environment."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                variables = (process / "environ").read_text(errors="replace").split("\0")
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                is_ours = int(fields[3]) in self.pids or self.mark in variables
                if fields[0] not in "ZX" and is_ours:
                    found[int(process.name)] = variables
        return found


class Job(Ranks):
    """A started command."""

    def __init__(self, command, **variables):
        super().__init__()
        self.start([variables], command)

    def wait(self, seconds=400.0):
        """The exit status."""
        return super().wait(seconds)[0]

    def end(self):
        """SIGKILL to its processes, until there is none."""
        while self.processes():
            for pid in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)


@contextlib.contextmanager
def on_small_disk(folder, size):
    """The folder is a file system of `size` bytes. Skips the test where none may be mounted."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"needs the right to mount a file system ({done.stderr.strip()})")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def import_tool(name):
    """A program of tools/ as a module."""
    tools = str(ROOT / "tools")
    if tools not in sys.path:
        sys.path.insert(0, tools)
    return __import__(name)


# ---- Data ----------------------------------------------------------------------------------------


def write_proteins(path, count):
    """FASTA of sequences of 20 to 60 residues: six letters, each followed mostly by one of two."""
    draw = random.Random(5)
    with open(path, "w") as file:
        for i in range(count):
            letters = [draw.randrange(6)]
            while len(letters) < 20 + i * 7 % 41:
                letters.append((letters[-1] * 3 + draw.choice((1, 1, 4))) % 6)
            sequence = "".join("ACDEFGHIKLMNPQRSTVWY"[n] for n in letters)
            file.write(f">protein_{i}\n{sequence}\n")


def write_digits(path, train, test):
    """scikit-learn's first digits (8 x 8), as an .npz file."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8) * 15).astype(np.uint8)
    first = {"x_train": images[:train], "y_train": labels[:train]}
    rest = {"x_test": images[train:][:test], "y_test": labels[train:][:test]}
    np.savez(path, **first, **rest)


RESIDUES = {"A": "ALA", "E": "GLU", "L": "LEU", "R": "ARG", "V": "VAL"}
ATOMS = {"N": (-1.2, 0.5, -0.4), "CA": (0, 0, 0), "C": (1.1, 0.6, 0.7), "O": (1.5, 1.7, 0.8)}


def write_structures(folder, count, pairs=6, least=18, most=40):
    """PDB files of `count` helices; pairs.json: `pairs` of each, its own and a changed sequence."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(count):
        length = int(rng.integers(least, most + 1))
        own = rng.choice(list(RESIDUES), length)

        turn = np.arange(length) * 1.745
        ca = np.c_[2.3 * np.cos(turn), 2.3 * np.sin(turn), 1.5 * np.arange(length)]
        ca += rng.normal(0, 0.2, (length, 3))
        lines = []
        for i in range(length):
            for atom, offset in ATOMS.items():
                x, y, z = ca[i] + offset
                name = f"{len(lines) + 1:5d}  {atom:<3} {RESIDUES[own[i]]} A{i + 1:4d}"
                place = f"{x:8.3f}{y:8.3f}{z:8.3f}"
                lines.append(f"ATOM  {name}    {place}  1.00  0.00           {atom[0]}")
        (folder / f"helix{number}.pdb").write_text("\n".join([*lines, "END"]) + "\n")

        for _ in range(pairs):
            other = own.copy()
            places = rng.choice(length, length // 3, replace=False)
            other[places] = rng.choice(list("CHMPW"), len(places))
            row = {"pdb_file": f"helix{number}.pdb", "preferred_seq": "".join(own)}
            rows.append({**row, "unpreferred_seq": "".join(other)})
    (folder / "pairs.json").write_text(json.dumps(rows))
