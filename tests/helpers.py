"""run_ranks: a function in N gloo processes, forked from a server that has torch imported (0.1 s each)."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pickle
import random
import runpy
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np

import test_ddp_setup

ROOT = Path(__file__).resolve().parents[1]
PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "torch.nn.parallel", "pytest"]
PRELOAD += ["train_ddp", "run_train_uniref50_ddp", "run_dpo_ddp", "run_train_quantumgrav_ddp"]
PRELOAD += ["run_train_rebm_ddp", "helpers"]


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


def one_process() -> test_ddp_setup.DDPContext:
    """The context of a world of one on the CPU."""
    return test_ddp_setup.DDPContext(0, 1, 0, 1, test_ddp_setup.torch.device("cpu"), "gloo", "python")


def run_rank(pipe, rank: int, world_size: int, port: int, work: bytes) -> None:
    """One process of run_ranks; sends (result, None) or (None, (class name, traceback))."""
    for name in [n for names in test_ddp_setup.LAUNCHERS.values() for n in names]:
        os.environ.pop(name, None)
    ranks = dict(RANK=rank, WORLD_SIZE=world_size, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=world_size)
    ranks |= dict(MASTER_ADDR="localhost", MASTER_PORT=port, OMP_NUM_THREADS=1)
    os.environ.update({name: str(value) for name, value in ranks.items()})
    test_ddp_setup.torch.set_num_threads(1)
    answer = (None, ("SystemExit", "ended without a result"))
    try:
        function, args = pickle.loads(work)
        answer = (function(test_ddp_setup.setup_ddp(runtime_args()), *args), None)
    except BaseException as error:
        answer = (None, (type(error).__name__, traceback.format_exc()))
    pipe.send_bytes(pickle.dumps(answer))
    if answer[1]:
        os._exit(1)  # no waiting for peers, which may be stuck
    del answer
    test_ddp_setup.cleanup()


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


def run_program(argv: list[str], env: dict[str, str], output: str) -> None:
    """A forked process becomes `python argv`, and writes into `output`."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1), os.dup2(file, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.environ.clear(), os.environ.update(env)
    sys.argv, status = argv, 0
    test_ddp_setup.torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    multiprocessing.set_start_method("fork", force=True)  # of its workers: as in a real process
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:  # a forked process must not return into the server
        traceback.print_exc()
        status = 1
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(status)


def call_script(script: str, *argv: str, seconds: float = 100.0, **env: str) -> tuple[int, str]:
    """(exit status, output) of `python {script}.py argv` on the CPU, without the seconds of its imports."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | env
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "output")
        program = [str(ROOT / f"{script}.py"), *map(str, argv)]
        process = forkserver().Process(target=run_program, args=(program, env, str(output)))
        process.start()
        process.join(seconds)
        late = process.is_alive()
        process.kill()
        text = output.read_text() if output.exists() else ""
        assert not late, f"still running after {seconds} s:\n{text[-3000:]}"
        return process.exitcode, text


def write_proteins(path: Path, count: int) -> None:
    """FASTA of `count` sequences of 20 to 60 residues: six letters, each followed mostly by one of two."""
    draw = random.Random(5)
    with open(path, "w") as file:
        for i in range(count):
            letters = [draw.randrange(6)]
            while len(letters) < 20 + i * 7 % 41:
                letters.append((letters[-1] * 3 + draw.choice((1, 1, 4))) % 6)
            file.write(f">protein_{i}\n{''.join('ACDEFGHIKLMNPQRSTVWY'[n] for n in letters)}\n")


def write_digits(folder: Path, train: int, test: int, *options: str) -> None:
    """What `python tools/prepare_images.py arrays` makes of scikit-learn's first digits (8 x 8)."""
    from sklearn.datasets import load_digits

    tools = str(ROOT / "tools")
    if tools not in sys.path:
        sys.path.insert(0, tools)
    import prepare_images

    path = folder.with_suffix(".npz")
    images, labels = load_digits(return_X_y=True)
    images, ends = (images.reshape(-1, 8, 8) * 15).astype(np.uint8), (train, train + test)
    (x_train, x_test, _), (y_train, y_test, _) = np.split(images, ends), np.split(labels, ends)
    np.savez(path, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    prepare_images.main(["arrays", str(path), f"--out={folder}", *options])


def write_structures(folder: Path, count: int, pairs: int = 6, least: int = 18, most: int = 40) -> None:
    """`count` generated helices of `least` to `most` residues as PDB files, and pairs.json: for each, `pairs` pairs of
    its own sequence, of few kinds of residues, and one where a third of it is replaced by others."""
    names = "ALA CYS ASP GLU PHE GLY HIS ILE LYS LEU MET ASN PRO GLN ARG SER THR VAL TRP TYR".split()
    rng, rows = np.random.default_rng(0), []
    for number in range(count):
        length = int(rng.integers(least, most + 1))
        own, lines = rng.choice([0, 3, 9, 14, 17], length), []
        turn = np.arange(length) * 1.745
        ca = np.c_[2.3 * np.cos(turn), 2.3 * np.sin(turn), 1.5 * np.arange(length)] + rng.normal(0, 0.2, (length, 3))
        for i in range(length):
            for atom, *off in ("N", -1.2, 0.5, -0.4), ("CA", 0, 0, 0), ("C", 1.1, 0.6, 0.7), ("O", 1.5, 1.7, 0.8):
                x, y, z = ca[i] + off
                lines.append(f"ATOM  {len(lines) + 1:5d}  {atom:<3} {names[own[i]]} A{i + 1:4d}    "
                             f"{x:8.3f}{y:8.3f}{z:8.3f}  1.00  0.00           {atom[0]}")  # fmt: skip
        (folder / f"helix{number}.pdb").write_text("\n".join([*lines, "END"]) + "\n")
        for _ in range(pairs):
            other = own.copy()
            places = rng.choice(length, length // 3, replace=False)
            other[places] = rng.choice([1, 6, 10, 12, 18], len(places))
            texts = ["".join("ACDEFGHIKLMNPQRSTVWY"[k] for k in ids) for ids in (own, other)]
            rows.append({"pdb_file": f"helix{number}.pdb", "preferred_seq": texts[0], "unpreferred_seq": texts[1]})
    (folder / "pairs.json").write_text(json.dumps(rows))


def write_causal_sets(folder: Path, *options: str) -> None:
    """What `python tools/make_causal_sets.py --out FOLDER OPTIONS` writes."""
    tools = str(ROOT / "tools")
    if tools not in sys.path:
        sys.path.insert(0, tools)
    import make_causal_sets

    args = make_causal_sets.parse_args([f"--out={folder}", "--workers=1", *options])
    make_causal_sets.make_folder(args)


def mutated_pairs(folder: Path) -> list[dict]:
    """The rule of data/dpo/pairs.json, 12 pairs for each structure in `folder`: the chains' own sequence is preferred
    to itself with the letters of 15 to 25 % of its residues moved one on, in random order, among these residues."""
    import run_dpo_ddp

    rows, several = [], {"4ZHL": (["U"], ["P"]), "7CTH": (["H", "L"], [])}  # chains to design, chains that are fixed
    for path in sorted(folder.glob("*.pdb.gz")):
        chains = run_dpo_ddp.read_structure(path).chains
        design, fixed = several.get(path.name[:4], (list(chains), []))
        own = "".join(chains[name].letters for name in design)
        names = {"design_chains": design, "fixed_chains": fixed} if path.name[:4] in several else {}
        for number in range(12):
            draw = random.Random(f"{path.name[:4]} {number}")
            share, order = 0.15 + 0.1 * draw.random(), sorted(range(len(own)), key=lambda i: draw.random())
            moved, letters = order[: round(share * len(own))], list(own)
            for place, source in zip(moved, moved[1:] + moved[:1], strict=True):
                letters[place] = own[source]
            texts = {"preferred_seq": own, "unpreferred_seq": "".join(letters)}
            rows.append({"pdb_file": path.name} | texts | names)
    return rows
