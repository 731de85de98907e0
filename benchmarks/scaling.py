"""How the five training scripts scale: processes of one machine, measured, and GPUs, predicted.

    python benchmarks/scaling.py [--scripts train_ddp run_dpo_ddp ...] [--procs 1 2 4] [--rounds 5] [--seconds 4]

The scripts run as they are: main() with real arguments, on small data and networks, one thread per process, on CPUs.
All sides are processes that are there from the start and take turns, as speeds of a shared machine drift; ratios are
of turns of the same round, a median with the smallest and the largest. A turn is some seconds of optimizer steps;
what waits is stopped at the end of a step. Validation and checkpoints are not counted. Two kinds of sides:

N independent   N processes at once, each with a world of its own: what N processes of this machine can do at most
N DDP           one job of N ranks

Each process of a side makes the same number of steps in a turn, and the turn is over with the last of them: work that
is dealt out equally cannot be done sooner. Work is what the batches really hold (tokens, residues, elements, images;
padding does not count). A rate is the work of all over the time of the turn.

weak scaling    the batch of a process is fixed; efficiency is DDP's rate over that of as many independent processes.
                Once with the script's own accumulation; once with A, the least from there on of which the computed
                communication is under 3 % of a step and a step takes four seconds (or as many of the samples as
                there are): cores of a shared machine are not equally fast at any moment, and each step waits for
                the slower. There 2 processes must reach 0.95, or the exit status is 1; as single turns of a shared
                machine differ by tens of per cent, these two sides have six turns in a round, in neighbouring
                pairs, and the interval that holds the true median in 95 of 100 cases is shown. Beside it the same
                with the speeds of the processes added up, as if a faster one could take over from a slower
strong scaling  the global batch is fixed (--global_batch_size); its ceiling: the rate of N independent over one's
breakdown       where the milliseconds of a step of DDP go
prediction      of GPUs, by a formula from counted parameters and operations; nothing of it was measured on GPUs

--slow_rank MS delays the last rank of each DDP job before the end of every step: the efficiency must fall by as much.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import math
import multiprocessing
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
PROTEINS = ROOT / "data/uniref_sample.fasta.gz"
LIMIT = 0.95  # efficiency of 2 processes
SHARE = 0.03  # of a step, of computed communication, at A
STEP = 4.0  # seconds of a step at A
PAIRS = 6  # turns in a round of the sides that must pass
COUNTED = 16  # micro-batches of which the operations are counted
START = 240.0  # seconds at most until all processes of a side have made their first step
COMMON = "--wandb_mode=disabled --device=cpu --precision=fp32 --save_every=1000000"
PLAIN = "\n# " + 98 * "=" + "\n"  # in the scripts whose train() is one loop over a DataLoader


class Workload(NamedTuple):
    """A script, the unit of its work, its batch per process, its own accumulation, further options, the work of each
    of the items that a step names."""

    script: str
    unit: str
    batch: int
    accumulation: int
    options: Callable[[Path], str]
    work: Callable[[object], np.ndarray]


def retrieval(folder: Path) -> str:
    """Sentences of Python's own documentation, each with the next one; a BERT of 4 layers of 256."""
    from pydoc_data.topics import topics

    sentences = [" ".join(s.split()) for text in topics.values() for s in text.split(". ") if len(s) > 40]
    with open(folder / "pairs.jsonl", "w") as file:
        for query, positive in zip(sentences[::2], sentences[1::2], strict=False):
            file.write(json.dumps({"query": query, "positive": positive}) + "\n")
    return f"""--phase1_data={folder}/pairs.jsonl --phase2_data={folder}/pairs.jsonl --teacher_model=builtin:lsa:64
        --student_model=builtin:bert:4x256 --student_max_length=48 --eval_samples=20 --eval_every=100000000
        --phase1_epochs=100000 --phase2_epochs=100000 --cache_dir={folder}/cache"""


def proteins(folder: Path) -> str:
    """The shipped proteins; the network of the quickstart, half as wide."""
    return f"""--datafile={PROTEINS} --max_protein_len=256 --hidden_size=64 --n_blocks_prot=4
        --n_heads=4 --cond_dim=64 --n_iters=100000000 --epochs=1000000 --eval_freq=100000000 --num_workers=1
        --cache_dir={folder}/cache"""


def structures(folder: Path) -> str:
    """Pairs of the six shortest shipped structures, their sequences shifted four ways; ProteinMPNN at full size."""
    short, data = ("1EJG", "1LCD", "1ORC", "1A8O", "1UBI", "1A7G"), ROOT / "data/dpo"
    rows = [row for row in json.loads((data / "pairs.json").read_text()) if row["pdb_file"].startswith(short)]
    rows = [{name: str(data / value) if name == "pdb_file" else value[k:] + value[:k] for name, value in row.items()}
            for row in rows for k in (0, 10, 20, 30)]  # fmt: skip
    (folder / "pairs.json").write_text(json.dumps(rows))
    return f"""--train_data={folder}/pairs.json --base_model_name=random --temperature=1 --num_orders=1
        --val_fraction=0.1 --num_epochs=1000000"""


def causal_sets(folder: Path) -> str:
    """Sets of nearly one size, as the work per element grows with it; the default network."""
    tool = [sys.executable, ROOT / "tools/make_causal_sets.py", f"--out={folder}/sets", "--samples=4000"]
    options = "--min_size=112 --max_size=128 --split 0.9 0.05 0.05".split()
    subprocess.run([*tool, *options], check=True, stdout=subprocess.DEVNULL)
    return f"--data={folder}/sets --num_epochs=1000000"


def digits(folder: Path) -> str:
    """Stage 2 on scikit-learn's digits, from random weights: 16 attack steps on OOD images, 8 on those to classify."""
    import torch

    tool = [sys.executable, ROOT / "tools/prepare_images.py", "digits", f"--out={folder}/digits"]
    subprocess.run(tool, check=True, stdout=subprocess.DEVNULL)
    rebm = importlib.import_module("run_train_rebm_ddp")
    torch.save(rebm.make_network(defaults(rebm), 10, 1, 8).state_dict(), folder / "start.pt")
    return f"""--data={folder}/digits --stage=dat --model.ckpt_path={folder}/start.pt --attack.max_steps=16
        --attack.start_step=16 --attack.step_size=0.2 --indist_attack_clf.max_steps=8
        --total_epochs=1000000 --n_imgs_per_evaluation_log=0"""


def texts_of(task) -> np.ndarray:
    return task.run.data.tokens.lengths


def pairs_of(task) -> np.ndarray:
    lengths, pairs = task.run.data.tokens.lengths, task.run.corpus.pairs
    assert not task.run.negatives.shape[1]  # which ones a step draws is not known here
    return lengths[pairs].sum(1)


def proteins_of(task) -> np.ndarray:
    proteins = task.data[0]
    return np.minimum(proteins.lengths(np.arange(len(proteins))), proteins.most)


WORKLOADS = {
    "train_ddp": Workload("train_ddp", "tokens", 64, 1, lambda f: retrieval(f) + " --skip_phase2", texts_of),
    "train_ddp_phase2": Workload("train_ddp", "tokens", 32, 1, lambda f: retrieval(f) + " --skip_phase1", pairs_of),
    "run_train_uniref50_ddp": Workload("run_train_uniref50_ddp", "residues", 8, 4, proteins, proteins_of),
    "run_dpo_ddp": Workload("run_dpo_ddp", "residues", 4, 1, structures, lambda task: np.floor(task.run.data.cost)),
    "run_train_quantumgrav_ddp": Workload("run_train_quantumgrav_ddp", "elements", 64, 1, causal_sets,
                                          lambda task: task.data.sizes),
    "run_train_rebm_ddp": Workload("run_train_rebm_ddp", "images", 64, 1, digits,
                                   lambda task: np.ones(len(task.run.inside.images))),
}  # fmt: skip
DEFAULT = [name for name in WORKLOADS if name != "train_ddp_phase2"]


def is_plain(script: str) -> bool:
    return PLAIN in (ROOT / f"{script}.py").read_text()


# ---- In a rank -----------------------------------------------------------------------------------


class Meter:
    """Lets the steps of this process wait for their turn, and measures them."""

    def __init__(self, pipe, module, workload: Workload, delay: float):
        self.pipe, self.module, self.workload, self.delay = pipe, module, workload, delay
        self.task = self.model = self.work = None
        self.aside = 0.0  # seconds of this turn that do not count
        self.waited = self.asked = 0.0
        self.turn: dict = {}
        self.hook()

    def hook(self) -> None:
        module = self.module
        for name in ("evaluate", "checkpoint"):
            setattr(module, name, self.not_counted(getattr(module, name)))
        self.plain_train, module.train = module.train, self.train
        self.plain_wrap, module.wrap_ddp = module.wrap_ddp, self.wrap
        self.plain_step, self.plain_waiting = module.StepGuard.step, module.RunLog.waiting
        module.StepGuard.step = lambda guard, loss, number, ids: self.step(guard, loss, number, ids)
        module.RunLog.waiting = lambda log, source: self.waiting(log, source)

    def now(self) -> float:
        return time.monotonic() - self.aside

    def not_counted(self, function: Callable) -> Callable:
        def called(*args, **options):
            begin, aside = time.monotonic(), self.aside
            try:
                return function(*args, **options)
            finally:
                self.aside = aside + time.monotonic() - begin  # once, where one calls another

        return called

    def train(self, task, *more):
        self.task = task
        return self.plain_train(task, *more)

    def wrap(self, model, ddp):
        model = self.plain_wrap(model, ddp)
        if ddp.world_size > 1:
            model._set_ddp_runtime_logging_sample_rate(1)
            self.model = model
        return model

    def waiting(self, log, source):
        begin = self.now()
        item = self.plain_waiting(log, source)
        self.asked = self.now()
        self.waited = self.asked - begin
        return item

    def step(self, guard, loss, number, ids):
        """The script's own step, then, where a turn ends, its report and the wait for the next one."""
        if self.delay:
            time.sleep(self.delay)
        begin = self.now()
        result = self.plain_step(guard, loss, number, ids)
        self.end_of_step(begin, guard.parameters, ids)
        return result

    def end_of_step(self, begin, parameters, ids) -> None:
        end, turn = self.now(), self.turn
        if self.work is None:
            self.work = np.asarray(self.workload.work(self.task), float)
            self.pipe.send({"parameters": sum(p.numel() for p in parameters), "work": self.work})
            self.next_turn()
            return
        timers = self.model._get_ddp_logging_data() if self.model else {}  # of the step before
        overlap, comm = (timers.get(f"backward_{n}_time", 0) / 1e9 for n in ("compute_comm_overlap", "comm"))
        turn["ends"].append(end)
        turn["work"].append(sum(float(self.work[np.asarray(part, int)].sum()) for part in ids))
        turn["parts"].append([self.waited, begin - self.asked, comm, overlap, end - begin])
        turn["cpu"] = time.process_time() - self.cpu
        if len(turn["ends"]) >= turn["steps"]:
            if self.counter:
                self.counter.__exit__(None, None, None)
                turn["operations"], turn["flops"] = self.counter.operations, self.counter.flops
            self.pipe.send(turn)
            self.next_turn()

    def next_turn(self) -> None:
        try:
            steps, count = self.pipe.recv()
        except EOFError:  # the driver is gone
            os._exit(1)
        self.aside, self.counter = 0.0, None
        if count:
            self.counter = counter()
            self.counter.__enter__()
        self.cpu = time.process_time()
        self.turn = {"steps": steps, "begin": time.monotonic(), "ends": [], "work": [], "parts": []}


class PlainMeter(Meter):
    """The same for the scripts whose train() is one loop over a DataLoader."""

    def hook(self) -> None:
        import torch

        module = self.module
        module.PARENT = os.getppid()  # the fork server, which imported the module, has another one
        self.begin, self.first, self.parameters, self.ids = None, None, None, []
        for name in ("validate", "evaluate", "on_rank0"):  # the last: a checkpoint
            if hasattr(module, name):
                setattr(module, name, self.not_counted(getattr(module, name)))
        self.plain_train, module.train = module.train, self.train
        self.plain_wrap, module.wrap_ddp = module.wrap_ddp, self.wrap
        self.plain_deal = module.GlobalBatchSampler.__iter__
        module.GlobalBatchSampler.__iter__ = lambda sampler: self.deal(sampler)
        loader = torch.utils.data.dataloader._BaseDataLoaderIter
        self.plain_next, loader.__next__ = loader.__next__, lambda batches: self.next(batches)
        self.plain_update, self.plain_agree = module.StepGuard.update, module.StepGuard.agree
        module.StepGuard.update = lambda guard, optimizer, scaler: self.update(guard, optimizer, scaler)
        module.StepGuard.agree = lambda guard: self.agree(guard)

    def train(self, *args):
        self.task = SimpleNamespace(**inspect.signature(self.plain_train).bind(*args).arguments)
        return self.plain_train(*args)

    def wrap(self, model, args, device):
        model = self.plain_wrap(model, args, device)
        if int(os.environ["WORLD_SIZE"]) > 1:
            model._set_ddp_runtime_logging_sample_rate(1)
            self.model = model
        return model

    def deal(self, sampler):
        for ids, batch in self.plain_deal(sampler):
            self.ids.append(ids)
            yield ids, batch

    def next(self, batches):
        begin = self.now()
        batch = self.plain_next(batches)
        if self.first is None:  # micro-batch of this step
            self.first, self.waited = begin, 0.0
        self.waited += self.now() - begin
        self.asked = self.first + self.waited  # as if they had all been waited for at once
        return batch

    def update(self, guard, optimizer, scaler):
        if self.delay:
            time.sleep(self.delay)
        self.begin = self.now()
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return self.plain_update(guard, optimizer, scaler)

    def agree(self, guard):
        reason = self.plain_agree(guard)
        if self.begin is not None:  # else it is called by a validation
            begin, ids = self.begin, self.ids
            self.begin, self.first, self.ids = None, None, []
            self.end_of_step(begin, self.parameters, ids)
        return reason


def counter():
    """A mode that counts the operations that are called, and their FLOPs, backward passes included."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry

    class Counter(TorchDispatchMode):
        operations, flops = 0, 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            self.operations += 1
            if found := flop_registry.get(function._overloadpacket):
                self.flops += found(*args, **(kwargs or {}), out_val=out)
            return out

    return Counter()


def run_rank(pipe, name: str, env: dict[str, str], argv: list[str], delay: float, output: str) -> None:
    """A process of a side: the script's main() until it is killed."""
    os.setsid()  # what it starts is killed with it
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1), os.dup2(file, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.environ.update(env)
    workload, status = WORKLOADS[name], 1
    sys.argv = [f"{workload.script}.py", *argv]
    try:
        module = importlib.import_module(workload.script)
        if is_plain(workload.script):
            PlainMeter(pipe, module, workload, delay)
            module.launch(module.parse_args, module.main)
        else:
            Meter(pipe, module, workload, delay)
            status = module.launch(module.main, module.parse_args(argv))
    except BaseException:  # a forked process must not return into the forkserver; its log has the traceback
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(status or 1)  # it was not to end at all


def reduce_rank(pipe, env: dict[str, str], count: int, seconds: float) -> None:
    """A rank that all-reduces `count` float32 numbers in DDP's buckets: the median time of one such reduction."""
    os.setsid()
    os.environ.update(env)
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    buckets = [torch.zeros(n) for n in bucket_sizes(count)]
    found = []
    for _ in range(3 + max(5, int(200 * seconds / (1 + count / 1e5)))):
        begin = time.perf_counter()
        for handle in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
            handle.wait()
        found.append(time.perf_counter() - begin)
    pipe.send(statistics.median(found[3:]))
    signal.pause()


def bucket_sizes(count: int) -> list[int]:
    """Elements of DDP's gradient buckets, in the order of their reduction: 1 MiB, then 25 MiB each."""
    first, size = (1 << 20) // 4, (25 << 20) // 4
    rest = max(0, count - first)
    return [min(count, first)] + [min(size, rest - low) for low in range(0, rest, size)]


# ---- Sides ---------------------------------------------------------------------------------------


class Failure(RuntimeError):
    """A process ended, or took too long; what it wrote last."""


class Side:
    """Processes of a script: `ranks` worlds of one, or one world. Turns gather in `turns`."""

    def __init__(self, bench: Bench, kind: str, ranks: int, accumulation: int):
        self.kind, self.ranks, self.accumulation = kind, ranks, accumulation
        self.bench, self.name = bench, f"{ranks} {kind}, A {accumulation}"
        self.turns: list[dict | None] = []
        self.pace = 0.0  # seconds of a step
        self.files = [bench.folder / f"{self.name.replace(', ', '-').replace(' ', '-')}.{i}.txt" for i in range(ranks)]
        batch, world = bench.workload.batch, ranks if kind == "DDP" else 1
        argv = f"{bench.options} --batch_size={batch} --global_batch_size={batch * world * accumulation}".split()
        port, works = free_port(), []
        for rank, file in enumerate(self.files):
            env = rank_variables(rank, world, port) if world > 1 else rank_variables(0, 1, 0)  # port 0: any free one
            output = file.with_suffix("" if world > 1 else f".{rank}")
            late = bench.delay if world > 1 and rank == world - 1 else 0.0
            works.append((bench.name, env, [*argv, f"--output_dir={output}"], late, str(file)))
        self.pipes = [bench.start(run_rank, *work) for work in works]

    def hear(self, seconds: float) -> list:
        """What each process sends next."""
        return listen(self.pipes, seconds, self.name, self.files)

    def turn(self, seconds: float, record: bool = True) -> dict:
        """One turn: the same number of steps for each process."""
        asked = max(1, round(seconds / self.pace)) if self.pace else 2
        for pipe in self.pipes:
            pipe.send((asked, False))
        reports = self.hear(20 * seconds + 60)
        steps = sum(len(r["ends"]) for r in reports)
        self.pace = sum(r["ends"][-1] - r["begin"] for r in reports) / steps
        cpu = sum(r["cpu"] for r in reports) / sum(sum(r["work"]) for r in reports)
        turn = {"rate": rate_of(reports), "speeds": speeds_of(reports), "cpu": cpu, "step": self.pace, "ranks": reports}
        if record:
            self.turns.append(turn)
        return turn

    def count(self) -> tuple[float, float]:
        """Operations of a step, and FLOPs per unit of work, counted over a few steps of each process."""
        steps = max(2, COUNTED // self.accumulation)
        for pipe in self.pipes:
            pipe.send((steps, True))
        reports = self.hear(60 + 20 * steps * self.pace)
        flops, work = (sum(np.sum(r[name]) for r in reports) for name in ("flops", "work"))
        return statistics.mean(r["operations"] for r in reports) / steps, float(flops / work)


def rate_of(reports: list[dict]) -> float:
    """Work of all processes a second, from the first one's begin to the last one's end."""
    seconds = max(r["ends"][-1] for r in reports) - min(r["begin"] for r in reports)
    return sum(sum(r["work"]) for r in reports) / seconds


def speeds_of(reports: list[dict]) -> float:
    """Sum of the speeds of all processes in the time in which all of them were at it."""
    begin, end = max(r["begin"] for r in reports), min(r["ends"][-1] for r in reports)
    done = 0.0
    for r in reports:
        total = np.cumsum([0.0, *r["work"]])
        done += float(np.diff(np.interp([begin, end], [r["begin"], *r["ends"]], total))[0])
    return done / (end - begin)


def listen(pipes: list, seconds: float, name: str, files: list[Path]) -> list:
    """One message of each process; Failure where one ends before, or `seconds` are over."""
    found, deadline = {}, time.monotonic() + seconds
    while len(found) < len(pipes):
        ready = wait([p for i, p in enumerate(pipes) if i not in found], max(0.0, deadline - time.monotonic()))
        try:
            if not ready:
                raise EOFError
            found.update({pipes.index(pipe): pipe.recv() for pipe in ready})
        except (EOFError, OSError) as error:
            what = "a process ended" if ready else f"no answer in {seconds:.0f} s"
            texts = "\n".join(file.read_text()[-1500:] for file in files if file.exists())
            raise Failure(f"{name}: {what}\n{texts}") from error
    return [found[i] for i in range(len(pipes))]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def rank_variables(rank: int, world: int, port: int) -> dict[str, str]:
    values = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world, "OMP_NUM_THREADS": 1}
    values |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "CUDA_VISIBLE_DEVICES": ""}
    return {name: str(value) for name, value in values.items()}


class Bench:
    """The sides of one workload. As a context: at its end all processes are killed."""

    def __init__(self, name: str, folder: Path, delay: float):
        self.name, self.workload, self.folder, self.delay = name, WORKLOADS[name], folder, delay
        self.processes: list = []
        self.sides: dict[tuple, Side] = {}
        self.options = f"{self.workload.options(folder)} {COMMON}"
        if is_plain(self.workload.script):
            self.options += " --timeout_minutes=120"
        else:
            self.options += f" --ddp_timeout_minutes=120 --cache_dir={folder}/cache"

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *error) -> None:
        for process in self.processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:  # it has ended, or not yet made its group
                process.kill()
        for process in self.processes:
            process.join(10)

    def start(self, target: Callable, *args):
        """A new process of the fork server; our end of its pipe."""
        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(theirs, *args))  # may have children
        process.start()
        theirs.close()
        self.processes.append(process)
        return ours

    def side(self, kind: str, ranks: int, accumulation: int) -> Side:
        """The side, started if it is new. One process is one process: no DDP."""
        key = ("independent" if ranks == 1 else kind, ranks, accumulation)
        if key not in self.sides:
            self.sides[key] = Side(self, *key)
        return self.sides[key]

    def reduction(self, count: int, ranks: int) -> float:
        """Measured seconds of an all-reduce of `count` float32 numbers between `ranks` processes."""
        port = free_port()
        before = len(self.processes)
        pipes = [self.start(reduce_rank, rank_variables(rank, ranks, port), count, 1.0) for rank in range(ranks)]
        found = max(listen(pipes, 120.0, f"all-reduce between {ranks}", []))
        for process in self.processes[before:]:
            process.kill()
        return found


# ---- Measurement ---------------------------------------------------------------------------------


def least_accumulation(compute: float, reduction: float, share: float) -> int:
    """The least A with reduction / (A x compute + reduction) below `share`."""
    return max(1, math.floor(reduction * (1 - share) / (share * compute)) + 1)


def measure(name: str, folder: Path, options) -> dict:
    """All turns of a workload, and what they were planned from."""
    workload, several = WORKLOADS[name], [n for n in options.procs if n > 1]
    with Bench(name, folder, options.slow_rank / 1000) as bench:
        own = workload.accumulation
        one = bench.side("independent", 1, own)
        (first,) = one.hear(START)  # it also makes the caches
        one.turn(1.0, record=False)
        reductions = {n: bench.reduction(first["parameters"], n) for n in several}
        gate = 2 if 2 in several else several[0] if several else 0
        A = own
        if gate:
            pair = bench.side("independent", gate, own)
            pair.hear(START)
            pair.turn(1.0, record=False)
            micro = pair.turn(options.seconds / 2, record=False)["step"] / own
            A = max(own, least_accumulation(micro, reductions[gate], SHARE), math.ceil(STEP / micro))
            A = min(A, int(0.8 * len(first["work"])) // (gate * workload.batch))  # some of the samples are held out
        strong = math.lcm(*options.procs) * own  # micro-batches of the global batch
        old = set(bench.sides.values())
        order = [bench.side("independent", 1, strong)] if several else []
        for n in options.procs:
            if n > 1:
                order.append(bench.side("DDP", n, strong // n))
            for a in (own, A) if n == gate else (own,):
                order += [bench.side("independent", n, a), bench.side("DDP", n, a)][: 1 if n == 1 else 2]
        order = list(dict.fromkeys(order))
        for side in [s for s in order if s not in old]:
            side.hear(START)
        for side in order:  # warm-up; a step of each has told the pace of its job
            side.turn(1.0, record=False), side.turn(1.0, record=False)
        pair = [side for side in order if side.ranks == gate and side.accumulation == A]
        for number in range(options.rounds):
            forth = 1 if number % 2 else -1
            for side in [s for s in order if s not in pair][::forth]:
                side.turn(options.seconds / 2)
            for side in (pair + pair[::-1]) * (PAIRS // 2):
                side.turn(options.seconds)
        operations, flops = one.count()
        ratio = bench.side("DDP", gate, A).count()[1] / bench.side("independent", gate, A).count()[1] if gate else None
    return {
        "name": name, "unit": workload.unit, "own": own, "A": A, "gate": gate, "strong": strong,
        "parameters": first["parameters"], "items": first["work"].tolist(), "reductions": reductions,
        "micro": micro if gate else None, "sides": {key: side.turns for key, side in bench.sides.items()},
        "flops_per_work": flops, "operations": operations / own, "flops_ratio": ratio,
    }  # fmt: skip


def paired(found: dict, side: tuple, base: tuple, what: str = "rate") -> list[float]:
    """Rates of `side` over those of `base`, turn by turn, sorted."""
    ours, theirs = found["sides"][side], found["sides"][base]  # some sides have several turns in a round
    turns = max(len(ours), len(theirs))
    return sorted(ours[i * len(ours) // turns][what] / theirs[i * len(theirs) // turns][what] for i in range(turns))


def ratios(found: dict, side: tuple, base: tuple, what: str = "rate") -> tuple[float, float, float]:
    """Median, smallest and largest of paired()."""
    values = paired(found, side, base, what)
    return statistics.median(values), values[0], values[-1]


def interval(values: list[float]) -> str:
    """What holds the true median in at least 95 of 100 cases, by ranks of the sorted values (sign test)."""
    low, below = 0, 0.5 ** len(values)  # the chance that no more than `low` values are below the median
    while below + math.comb(len(values), low + 1) * 0.5 ** len(values) <= 0.025:
        low += 1
        below += math.comb(len(values), low) * 0.5 ** len(values)
    return f"{values[low]:.2f} to {values[-1 - low]:.2f}" if below <= 0.025 else "too few turns"


def middle(found: dict, side: tuple, what: str = "rate") -> float:
    return statistics.median(turn[what] for turn in found["sides"][side])


def balance_of(turns: list[dict]) -> float:
    """Work of the mean rank over that of the rank that has most, summed over steps."""
    work = np.concatenate([np.array([r["work"] for r in turn["ranks"]]) for turn in turns], axis=1)  # (ranks, steps)
    return float(work.mean(0).sum() / work.max(0).sum())


def span(values: tuple[float, float, float]) -> str:
    return "{:.2f} ({:.2f} to {:.2f})".format(*values)


def table(head: str, rows: list[str]) -> None:
    print(f"\n| {head} |\n|{'---|' * (head.count('|') + 1)}")
    print("\n".join(f"| {row} |" for row in rows), flush=True)


def key(kind: str, ranks: int, accumulation: int) -> tuple:
    return ("independent" if ranks == 1 else kind, ranks, accumulation)


def report(found: dict, options) -> bool:
    """The tables of a workload; whether the efficiency of 2 processes at A is high enough."""
    own, A, gate, unit, good = found["own"], found["A"], found["gate"], found["unit"], True
    several = [n for n in options.procs if n > 1]
    size = 4 * found["parameters"]
    print(f"\n## {found['name']}\n\n{found['parameters']:,} parameters, {size / 1e6:.1f} MB of gradients, "
          f"{WORKLOADS[found['name']].batch} per process and micro-batch")  # fmt: skip
    if not several:
        print(f"{middle(found, key('', 1, own)):,.0f} {unit}/s in one process")
        return True
    for n, seconds in found["reductions"].items():
        bus = 2 * (n - 1) / n * size / seconds / 1e9
        at = [f"{seconds / (a * found['micro'] * n / gate + seconds):.1%} at A {a}" for a in sorted({own, A})]
        print(f"all-reduce between {n}: measured {1000 * seconds:.2f} ms = 2 ({n} - 1) / {n} x {size / 1e6:.1f} MB / "
              f"{bus:.2f} GB/s; computed share of a step {', '.join(at)}"
              + ("" if n == gate else f" (micro-batches {n / gate:g} times as long as with {gate}: cores are shared)"
                 if n > (os.cpu_count() or 1) else ""))  # fmt: skip
    rows = []
    for n in several:
        for a in dict.fromkeys((own, A) if n == gate else (own,)):
            value = ratios(found, key("DDP", n, a), key("independent", n, a))
            verdict = ""
            if n == 2 and a == A:
                good = value[0] >= LIMIT
                within = interval(paired(found, key("DDP", n, a), key("independent", n, a)))
                verdict = f"{'PASS' if good else 'FAIL'} (at least {LIMIT}); 95 % interval {within}"
            even = balance_of(found["sides"][key("DDP", n, a)])
            rates = [f"{middle(found, key(k, n, a)):,.0f}" for k in ("independent", "DDP")]
            cpu, *_ = ratios(found, key("DDP", n, a), key("independent", n, a), "cpu")
            added = span(ratios(found, key("DDP", n, a), key("independent", n, a), "speeds"))
            rows.append(f"{n} | {a}{' = A' * (a == A)} | {' | '.join(rates)} | {span(value)} | {added} | {cpu:.2f} | "
                        f"{even:.3f} | {verdict}")
    table(f"weak scaling: processes | accumulation | independent, {unit}/s | DDP, {unit}/s | efficiency | of added "
          "speeds | CPU time per unit, DDP / independent | balance: mean / largest work of a rank | ", rows)
    print(f"\nFLOPs per unit of work over some steps of {gate} ranks at A, DDP / independent: "
          f"{found['flops_ratio']:.2f} (not 1: batches differ, or what pairs share is computed on several ranks)")
    rows, base = [], key("DDP", 1, found["strong"])
    for n in options.procs:
        side = key("DDP", n, found["strong"] // n)
        up = ratios(found, side, base)
        top = ratios(found, key("independent", n, own), key("independent", 1, own)) if 1 in options.procs else None
        ceiling = span(top) if top else "-"
        rows.append(f"{n} | {found['strong'] // n} | {middle(found, side):,.0f} | {span(up)} | {ceiling} | "
                    + (f"{up[0] / top[0]:.2f}" if top else "-"))  # fmt: skip
    table(f"strong scaling, {found['strong']} micro-batches a step: processes | accumulation | {unit}/s | speed-up | "
          "ceiling: as many independent / one | share of it", rows)  # fmt: skip
    rows = []
    for a in dict.fromkeys((own, A)):
        rows.append(breakdown([t for t in found["sides"][key("DDP", gate, a)]], a))
    table(f"a step of {gate} ranks, ms: accumulation | whole | forward + backward | communication | hidden behind "
          "backward | exposed | waiting for data | clip, flags, optimizer | rest", rows)  # fmt: skip
    return good


def breakdown(turns: list[dict], accumulation: int) -> str:
    """Means over the steps of all ranks and turns."""
    reports = [r for turn in turns for r in turn["ranks"]]
    steps = sum(len(r["ends"]) for r in reports)
    whole = sum(r["ends"][-1] - r["begin"] for r in reports) / steps
    wait_, busy, comm, overlap, end = np.array([p for r in reports for p in r["parts"]]).mean(0)
    exposed = max(0.0, comm - overlap)
    values = whole, busy - exposed, comm, overlap, exposed, wait_, end, whole - wait_ - busy - end
    return f"{accumulation} | " + " | ".join(f"{1000 * v:.1f}" for v in values)


# ---- Prediction ----------------------------------------------------------------------------------

# Assumptions, of H100 GPUs
TFLOPS = {"transformer": 300.0, "other": 110.0}  # achieved by matrix products in bf16; by the other networks
LAUNCH = 5e-6  # seconds of an operation at least: its launch by the host
BUS, HALF = 370e9, 36 * 2**20  # bytes a second of an all-reduce within a node (ring); size that reaches half of it
NICS = {"one 200 Gb/s": 25e9, "eight 400 Gb/s": 400e9}  # bytes a second out of a node, of two nodes of 8
NIC_HALF = 4 * 2**20
BUSY = 0.03  # of the time of all-reduces that backward hides: what they take from its kernels
MEMORY = 2.5e12  # bytes a second; the optimizer moves 28 per parameter
DISK = 1e9  # bytes a second of a checkpoint: weights and two moments
CLAIMS = {  # speed-ups that the documents of the original programs expect
    "train_ddp": {4: "3.8", 8: "7 to 7.5"}, "run_train_uniref50_ddp": {4: "3.2", 8: "5.5"}, "run_dpo_ddp": {4: "3.3"},
    "run_train_rebm_ddp": {4: "3.5", 8: "7"},
}  # fmt: skip


class Full(NamedTuple):
    """A script at its defaults, for a GPU."""

    parameters: int
    counted: str  # how
    batch: int
    accumulation: int
    flops: float  # of a micro-batch, forward and backward
    operations: float  # of a micro-batch
    speed: str  # in TFLOPS
    save_every: int
    deal: Callable[[int], tuple]  # number of ranks -> sampler, lengths of its items
    lengths: str  # where they are from


def sampler_of(module, lengths: np.ndarray, ranks: int, batch: int, micro: int, items: float, window: Callable,
               cut: Callable) -> tuple:
    """The script's sampler for `ranks`; `items` per row of the batch; window and cut for a global batch."""
    total = ranks * batch * micro
    count, context = int(total * items), module.DDPContext(0, ranks, 0, ranks, None, "gloo", "python")
    return module.GlobalBatchSampler(len(lengths), count, micro, 0, context, window(count), cut(count, total)), lengths


class Dealt:
    """A sampler of the scripts whose train() is one loop, asked for the batches of all ranks: that of `ranks` for items
    of these lengths. groups: which items of a rank's batch are padded to the same length; without it nothing is."""

    def __init__(self, module, args, lengths: np.ndarray, ranks: int, groups: Callable | None = None):
        world = {"get_world_size": lambda: ranks, "get_rank": lambda: 0}
        with mock.patch.multiple("torch.distributed", **world):
            self.sampler = module.GlobalBatchSampler(np.arange(len(lengths)), args, None, lengths)
        self.groups = groups or (lambda mine: np.split(mine, len(mine)))

    def batches(self):
        for _, batch in self.sampler:
            yield batch

    def deal(self, batch: np.ndarray, rank: int) -> list[np.ndarray]:
        return self.groups(batch[rank :: self.sampler.num_replicas])


def defaults(module):
    """Arguments of a script whose train() is one loop."""
    with mock.patch("sys.argv", [module.__file__]):
        return module.parse_args()


def full_train_ddp(module, found: dict) -> Full:
    """all-mpnet-base-v2 and the head to 3,584 dimensions, on texts as MS MARCO has them, in phase 1. Operations are
    counted on the meta device: on CPUs the script parts a batch into more groups, with more operations, than on GPUs."""
    import torch
    from transformers import MPNetConfig, MPNetModel

    args = defaults(module)
    with torch.device("meta"):
        model = MPNetModel(MPNetConfig(vocab_size=30527, max_position_embeddings=514), add_pooling_layer=False)
        head = [torch.nn.Linear(768, args.projection_hidden), torch.nn.GELU(), torch.nn.LayerNorm(args.projection_hidden)]
        head = torch.nn.Sequential(*head, torch.nn.Linear(args.projection_hidden, 3584))
        ids = torch.zeros(args.batch_size, 80, dtype=torch.long)
        with counter() as counted:
            states = model(input_ids=ids).last_hidden_state
            vectors = torch.nn.functional.normalize(head(states.mean(1)), dim=1)
            module.distance(vectors, torch.zeros_like(vectors), 1.0, 1.0).sum().backward()
    lengths = np.random.default_rng(0).lognormal(math.log(75), 0.45, 400_000).clip(5, 384).astype(np.int64)
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    flops = 6 * linear * lengths.mean() + 12 * 768 * 12 * (lengths.astype(float) ** 2).mean()

    tokens = SimpleNamespace(lengths=lengths, offsets=np.zeros_like(lengths), ids=np.zeros(1, np.int32), pad=0)

    def groups(mine: np.ndarray) -> list[np.ndarray]:
        shapes = module.lay_out(tokens, mine, *module.LAYOUTS["padded"]["cuda"]).shapes  # as the script reads an MPNet
        return np.split(mine[np.argsort(-lengths[mine], kind="stable")], np.cumsum([n for n, _ in shapes])[:-1])

    def deal(ranks: int) -> tuple:
        return Dealt(module, args, lengths, ranks, groups), lengths

    count = sum(p.numel() for part in (model, head) for p in part.parameters())
    return Full(count, "MPNetModel of transformers on the meta device, head by its sizes", args.batch_size, 1,
                args.batch_size * flops, counted.operations, "transformer", args.save_every, deal,
                "lognormal, median 75 tokens, sigma 0.45, at most 384")  # fmt: skip


def full_run_train_uniref50_ddp(module, found: dict) -> Full:
    import gzip

    import torch

    args = defaults(module)
    with torch.device("meta"):
        model = module.Denoiser(args)
    sizes, most = [], args.max_protein_len
    for record in gzip.open(PROTEINS, "rt").read().split(">")[1:]:
        sizes.append(len("".join(record.split("\n")[1:])) + 2)
    lengths = np.random.default_rng(0).choice(np.minimum(sizes, most), 400_000)
    blocks = 12 * args.n_blocks_prot * args.hidden_size
    each = 6 * (blocks * args.hidden_size + module.VOCABULARY * args.hidden_size) * lengths.mean()
    flops = args.batch_size * (each + blocks * (lengths.astype(float) ** 2).mean())

    def deal(ranks: int) -> tuple:
        return Dealt(module, args, lengths, ranks), lengths

    return Full(sum(p.numel() for p in model.parameters()), "the script's network on the meta device", args.batch_size,
                args.accum, flops, 2 * found["operations"], "transformer", args.save_every, deal,
                "of the shipped proteins, drawn again and again")  # fmt: skip


def full_run_dpo_ddp(module, found: dict) -> Full:
    args = defaults(module)
    lengths = np.random.default_rng(0).choice(np.array(found["items"], np.int64), 100_000)

    def deal(ranks: int) -> tuple:
        return Dealt(module, args, lengths, ranks), lengths

    return Full(found["parameters"], "the network that was measured", args.batch_size, 1,
                args.batch_size * lengths.mean() * found["flops_per_work"], found["operations"], "other",
                args.save_every, deal, "of the pairs that were measured, drawn again and again")  # fmt: skip


def full_run_train_quantumgrav_ddp(module, found: dict) -> Full:
    args = defaults(module)
    lengths = np.random.default_rng(0).integers(32, 64 + 1, 200_000)  # defaults of tools/make_causal_sets.py

    def deal(ranks: int) -> tuple:
        return Dealt(module, args, lengths, ranks), lengths

    return Full(found["parameters"], "the network that was measured", args.batch_size, 1,
                args.batch_size * lengths.mean() * found["flops_per_work"], found["operations"], "other",
                args.save_every, deal, "evenly spread, as the generated sets are")  # fmt: skip


def full_run_train_rebm_ddp(module, found: dict) -> Full:
    """WideResNet-34-10, 16 CIFAR images a GPU, 50 attack steps on OOD images, 10 on those to classify."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    args = defaults(module)
    args.model_type = "WideResNet34x10"
    args.batch_size = 16
    with torch.device("meta"):
        model = module.make_network(args, 10, 3, 32)
        with FlopCounterMode(display=False) as counted:
            model(torch.empty(16, 3, 32, 32))
    steps = args.attack_max_steps + args.indist_attack_clf_max_steps
    passes = 2 * steps + 9  # a step goes forward and to the input; three passes for the gradient of the weights
    lengths = np.ones(50_000, np.int64)

    def deal(ranks: int) -> tuple:
        return Dealt(module, args, lengths, ranks), lengths

    return Full(sum(p.numel() for p in model.parameters()), "the script's network on the meta device", 16, 1,
                counted.get_total_flops() * passes, passes * 4 * 34, "other", args.save_every, deal,
                "equal")  # fmt: skip


def planned_balance(full: Full, ranks: int, steps: int = 300) -> float:
    """Efficiency that unequal work of the ranks leaves, by the script's own plan of batches: real work per padded
    element of the slowest rank of each step, over the same of one rank."""
    rates = []
    for n in (1, ranks):
        sampler, lengths = full.deal(n)
        work = cost = 0.0
        for _, batch in zip(range(steps), sampler.batches(), strict=False):
            parts = [[lengths[part] for part in sampler.deal(batch, rank)] for rank in range(n)]
            cost += n * max(sum(len(m) * m.max(initial=0) for m in mine) for mine in parts)
            work += lengths[batch].sum()
        rates.append(work / cost)
    return rates[1] / rates[0]


def reduce_seconds(size: float, ranks: int, nic: float | None) -> float:
    """An all-reduce of a bucket of `size` bytes: 2 (n - 1) / n x size / B(size) within a node, then between two."""
    node = min(ranks, 8)
    seconds = 2 * (node - 1) / node * (size + HALF) / BUS
    return seconds + (size + NIC_HALF) / nic if nic else seconds  # 2 (2 - 1) / 2 = 1


def predict(name: str, found: dict) -> tuple[str, list[str]]:
    """Parameters and step of one GPU, and rows of the table."""
    full = globals()[f"full_{name}"](importlib.import_module(name), found)
    micro = max(full.flops / (TFLOPS[full.speed] * 1e12), full.operations * LAUNCH)
    update, saving = 28 * full.parameters / MEMORY, 12 * full.parameters / DISK / full.save_every
    one, backward = full.accumulation * micro + update, micro * 2 / 3
    sizes, rows = [4 * n for n in bucket_sizes(full.parameters)], []
    for ranks, nic in (4, None), (8, None), (16, "one 200 Gb/s"), (16, "eight 400 Gb/s"):
        done = ready = busy = 0.0
        for size in sizes:  # a bucket goes when its gradients are there and the one before it is through
            ready += backward * size / sum(sizes)
            seconds = reduce_seconds(size, ranks, NICS.get(nic))
            done, busy = max(done, ready) + seconds, busy + seconds
        exposed = max(0.0, done - backward)
        communication = one / (one + exposed + BUSY * min(busy, backward))
        straggler, serial = planned_balance(full, ranks), 1.0
        place = f"2 nodes, {nic} each" if nic else "1 node"
        claim = CLAIMS.get(name, {}).get(ranks, "-")
        rows.append(f"{name} | {ranks}, {place} | {communication:.3f} | {straggler:.3f} | {serial:.1f} | "
                    f"{ranks * communication * straggler * serial:.1f} | {claim}")  # fmt: skip
    bound = "operations launched" if full.operations * LAUNCH >= micro else "FLOPs"
    said = (f"{name}: {full.parameters / 1e6:.2f} M parameters ({full.counted}), {full.accumulation} micro-batches of "
            f"{full.batch}, {full.flops / 1e9:,.0f} GFLOP and {full.operations:.0f} operations each: "
            f"{1000 * micro:.1f} ms ({bound}); checkpoints {saving / (one + saving):.1%} of the time; "
            f"lengths {full.lengths}")  # fmt: skip
    return said, rows


def show_predictions(results: list[dict]) -> None:
    print(f"""
## Prediction for GPUs

Predicted, not measured. Fixed batch per GPU, against one GPU: speed-up = GPUs x communication x straggler x serial.
communication   t / (t + exposed + {BUSY} x hidden all-reduces), t = accumulation x micro-batch + optimizer; micro-batch
                = max(FLOPs / speed, operations x {LAUNCH * 1e6:g} us); two thirds of it are backward. Buckets of 1 MiB,
                then 25 MiB, one after the other, each when its gradients are there: 2 (n - 1) / n x bytes / B, B = bus
                x bytes / (bytes + half). Exposed: what goes on after backward. Only the last micro-batch communicates
straggler       real work per padded element of the slowest rank, over that of one GPU, in the script's plan of batches
serial          1: rank 0 alone writes checkpoints and nothing else, every --save_every steps, as one GPU does (their
                share of the time is below); evaluation is on all ranks
Assumed: H100, {TFLOPS["transformer"]:g} TFLOP/s achieved by transformers in bf16, {TFLOPS["other"]:g} by the others;
bus {BUS / 1e9:g} GB/s within a node, half of it at {HALF >> 20} MiB; two nodes with {" or ".join(NICS)} NICs each,
half of that at {NIC_HALF >> 20} MiB; memory {MEMORY / 1e12:g} TB/s; checkpoints (weights, two moments) at
{DISK / 1e9:g} GB/s; gradients in fp32; batches are never waited for.
""")
    rows = []
    for found in results:
        if found["name"] != "train_ddp_phase2":
            said, more = predict(found["name"], found)
            rows += more
            print(f"- {said}")
    table("script | GPUs | communication | straggler | serial | predicted speed-up | expected by the original's "
          "documents", rows)  # fmt: skip


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--scripts", nargs="+", default=DEFAULT, choices=WORKLOADS, metavar="NAME",
                   help=f"of {', '.join(WORKLOADS)}")  # fmt: skip
    p.add_argument("--procs", nargs="+", type=int, default=[1, 2, 4], help="numbers of processes")
    p.add_argument("--rounds", type=int, default=5, help="turns of each side; those that must pass have six in each")
    p.add_argument("--seconds", type=float, default=4.0, help="of a turn of the two that must pass; others: half")
    p.add_argument("--limit", type=float, default=30.0, help="minutes after which all is killed")
    p.add_argument("--slow_rank", type=float, default=0.0, metavar="MS", help="see above")
    p.add_argument("--json", metavar="FILE", help="write all turns")
    options = p.parse_args()
    options.procs = sorted(set(options.procs))
    if options.procs[0] < 1 or options.rounds < 1 or options.seconds <= 0:
        p.error("--procs and --rounds must be at least 1, --seconds above 0")
    preload = ["torch", "torch.distributed", "torch._dynamo", "torch.nn.parallel"]
    preload += dict.fromkeys(WORKLOADS[name].script for name in options.scripts)
    if any(name.startswith("train_ddp") for name in options.scripts):
        preload += ["sentence_transformers"]
    sys.path.insert(0, str(ROOT))
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ.update(PYTHONPATH=os.pathsep.join(paths), OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    multiprocessing.get_context("forkserver").set_forkserver_preload(preload)
    # semaphores of the killed processes (tqdm has some) are cleaned up at the end, without a word
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker"]))
    ensure_running()
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(f"not done after {options.limit:g} minutes (--limit)"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.alarm(max(1, int(60 * options.limit)))
    begin, good, raw, results = time.monotonic(), True, [], []
    print(f"{os.cpu_count()} cores, {options.rounds} rounds, turns of {options.seconds:g} and "
          f"{options.seconds / 2:g} s, load {os.getloadavg()[0]:.1f} before the start", flush=True)  # fmt: skip
    for name in options.scripts:
        with tempfile.TemporaryDirectory() as folder:
            found = measure(name, Path(folder), options)
        good &= report(found, options)
        results.append(found)
        raw.append(found | {"sides": [{"side": side, "turns": turns} for side, turns in found["sides"].items()]})
        if options.json:
            Path(options.json).write_text(json.dumps(raw))
    show_predictions(results)
    print(f"\n{(time.monotonic() - begin) / 60:.1f} minutes")
    return 0 if good else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failure as error:
        sys.exit(str(error))
