"""run_ranks: a function in N gloo processes, forked from a server that has torch imported (0.1 s each)."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import pickle
import random
import socket
import time
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path

import train_ddp

ROOT = Path(__file__).resolve().parents[1]
PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "torch.nn.parallel", "pytest"]
PRELOAD += ["train_ddp", "run_train_uniref50_ddp", "helpers"]


class RankError(RuntimeError):
    """A rank failed; `rank`, `kind` (name of the exception's class) and its traceback."""

    def __init__(self, rank: int, kind: str, text: str):
        super().__init__(f"rank {rank}: {text}")
        self.rank, self.kind = rank, kind


@cache
def forkserver():
    """The context; its server is started once per session. It must find our modules: PYTHONPATH."""
    from multiprocessing.forkserver import ensure_running

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "OMP_NUM_THREADS")}
    paths = [str(ROOT), str(ROOT / "tests"), *filter(None, [before["PYTHONPATH"]])]
    os.environ.update(PYTHONPATH=os.pathsep.join(paths), OMP_NUM_THREADS="1")
    try:
        ensure_running()
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return context


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def runtime_args(**changes) -> argparse.Namespace:
    """What setup_ddp reads of the arguments."""
    values = dict(device="cpu", backend="auto", local_rank=None, ddp_timeout_minutes=0.5)
    return argparse.Namespace(**values | changes)


def one_process() -> train_ddp.DDPContext:
    """The context of a world of one on the CPU."""
    return train_ddp.DDPContext(0, 1, 0, 1, train_ddp.torch.device("cpu"), "gloo", "python")


def run_rank(pipe, rank: int, world_size: int, port: int, work: bytes) -> None:
    """One process of run_ranks; sends (result, None) or (None, (class name, traceback))."""
    for name in [n for names in train_ddp.LAUNCHERS.values() for n in names]:
        os.environ.pop(name, None)
    ranks = dict(RANK=rank, WORLD_SIZE=world_size, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=world_size)
    ranks |= dict(MASTER_ADDR="localhost", MASTER_PORT=port, OMP_NUM_THREADS=1)
    os.environ.update({name: str(value) for name, value in ranks.items()})
    train_ddp.torch.set_num_threads(1)
    answer = (None, ("SystemExit", "ended without a result"))
    try:
        function, args = pickle.loads(work)
        answer = (function(train_ddp.setup_ddp(runtime_args()), *args), None)
    except BaseException as error:
        answer = (None, (type(error).__name__, traceback.format_exc()))
    pipe.send_bytes(pickle.dumps(answer))
    if answer[1]:
        os._exit(1)  # no waiting for peers, which may be stuck
    del answer
    train_ddp.cleanup()


def run_ranks(world_size: int, function: Callable, *args, timeout: float = 60.0) -> list:
    """[function(ctx, *args) of rank 0, of rank 1, ...], each in a gloo process with one thread.

    `function` is a module-level one; ctx is what setup_ddp returns. The first rank that raises ends the
    others and its error is raised here as RankError; so does a rank that dies or `timeout` in seconds.
    """
    context, port, work = forkserver(), free_port(), pickle.dumps((function, args))
    pipes, processes = [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=run_rank, args=(theirs, rank, world_size, port, work), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    results, deadline = {}, time.monotonic() + timeout
    try:
        while len(results) < world_size:
            open_pipes = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
            ready = wait(open_pipes, max(0.0, deadline - time.monotonic()))
            if not ready:
                late = sorted(set(range(world_size)) - set(results))
                raise RankError(late[0], "TimeoutError", f"no result after {timeout} s from ranks {late}")
            for pipe in ready:
                rank = pipes.index(pipe)
                try:
                    results[rank], error = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    processes[rank].join(5)
                    error = ("EOFError", f"died with exit code {processes[rank].exitcode}")
                if error:
                    raise RankError(rank, *error)
        for rank, process in enumerate(processes):
            process.join(max(0.1, deadline - time.monotonic()))
            if process.exitcode != 0:
                raise RankError(rank, "SystemExit", f"exit code {process.exitcode} after its result")
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()
    return [results[rank] for rank in range(world_size)]


def write_proteins(path: Path, count: int) -> None:
    """FASTA of `count` sequences of 20 to 60 residues: six letters, each followed mostly by one of two."""
    draw = random.Random(5)
    with open(path, "w") as file:
        for i in range(count):
            letters = [draw.randrange(6)]
            while len(letters) < 20 + i * 7 % 41:
                letters.append((letters[-1] * 3 + draw.choice((1, 1, 4))) % 6)
            file.write(f">protein_{i}\n{''.join('ACDEFGHIKLMNPQRSTVWY'[n] for n in letters)}\n")
