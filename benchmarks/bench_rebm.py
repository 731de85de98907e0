"""Images per second of a stage-2 step against a port of the original's step, and against the floor of its passes.

    OMP_NUM_THREADS=1 python benchmarks/bench_rebm.py [--settings MODEL,SIZE,BATCH,T ...] [--sides ...]

original   the step of xuwangyin/DAT fb2ffc7, from a description of it: attacks through the DistributedDataParallel
           wrapper with parameters that require gradients; an extra forward pass over real, OOD and attacked OOD images
           for two AUCs by scikit-learn; one joint backward pass; weights averaged tensor by tensor; .item() each step
ours       the script's step, with its batches, gradient clipping, guard and averages
compiled   the same with --compile True
floor      the T + 10 forward and input-backward passes of the attacks and three forward and backward passes, alone,
           with the script's memory format, not compiled

Same network, batch, attack steps, threads and precision (fp32), one process, on a CPU; batch normalisation is frozen,
as in stage 2. Before that both attacks are compared: they must find the same points. To the original's advantage: its
batches are ready (it decodes and augments with PIL in other processes). The sides are processes that are all there from
the start and take turns; ratios are of CPU time, which other programs of the machine disturb least. --profile SIDE
shows the operators of a side instead.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import itertools
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import run_train_rebm_ddp as rebm

SIDES = ("original", "ours", "compiled", "floor")
CLF_STEPS, STEP, CLF_STEP, CLF_EPS, RATE, DECAY = 10, 0.1, 0.1, 0.5, 1e-5, 0.999


def assembled(options, compile_it: bool = False) -> rebm.Task:
    """The script's task on images of random pixels."""
    args = rebm.parse_args([
        f"model_type={options.model}", f"attack.max_steps={options.T}", f"attack.step_size={STEP}",
        f"indist_attack_clf.max_steps={CLF_STEPS}", f"indist_attack_clf.step_size={CLF_STEP}", f"ema={DECAY}",
        f"indist_attack_clf.eps={CLF_EPS}", f"batch_size={options.batch}", f"lr={RATE}", "max_grad_norm=5",
        "device=cpu", "precision=fp32", "augm_type_classification=shift", f"compile={compile_it}"])  # fmt: skip
    draw, channels = np.random.default_rng(0), 1 if options.model == "SmallNet" and options.size < 28 else 3
    pixels = draw.integers(0, 256, (8 * options.batch, channels, options.size, options.size), np.uint8)
    ddp = rebm.DDPContext(0, 1, 0, 1, torch.device("cpu"), "gloo", "python")
    images = rebm.Images(pixels, draw.integers(0, 10, len(pixels)), ddp.device)
    task = rebm.assemble(args, ddp, rebm.Data(images, images, images, images, images, {}, 10, channels, options.size))
    rebm.begin_stage(task, rebm.new_course(), "dat")
    return task


def ours(options, compile_it: bool = False) -> Callable[[int], None]:
    task = assembled(options, compile_it)
    args, ddp = task.args, task.ddp
    samplers = {name: rebm.GlobalBatchSampler(len(task.data.train), options.batch, 1, i, ddp)
                for i, name in enumerate(("clf", "real", "outside"))}  # fmt: skip
    guard = rebm.StepGuard(args, ddp, rebm.stage_optimizer(task, "", RATE), torch.float32, 0.0)
    log = SimpleNamespace(sums={}, add=lambda *_, **__: None)
    source = rebm.micro_batches(task, samplers, 0, "dat")

    def step(number: int) -> None:
        micro = next(source)
        total, scores = rebm.train_step(task, task.net, "dat", options.T, micro, guard, log, options.batch)
        guard.step(total, number, [part.ids for part in micro])
        rebm.update_ema(list(task.average.values()), list(rebm.float_tensors(task.model).values()), DECAY, number)
        float(rebm.pooled_auc(*scores))

    return step


def compiled(options) -> Callable[[int], None]:
    return ours(options, True)


def climb(model, x: Tensor, objective: Callable, steps: int, size: float, eps: float) -> Tensor:
    """The original's attack: steps of a fixed length (L2) up the objective, the projection, [0, 1]."""
    z = x.clone()
    for _ in range(steps):
        z = z.clone().detach().requires_grad_(True)
        (gradient,) = torch.autograd.grad(objective(model(z)), [z])
        with torch.no_grad():
            length = gradient.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
            z = z + size * gradient / (length + 1e-10)
            z = torch.clamp(x + (z - x).renorm(p=2, dim=0, maxnorm=eps), 0, 1)
    return z.clone().detach()


def mean_auc(real: Tensor, other: Tensor) -> float:
    """scikit-learn's AUC, averaged over ranks."""
    from sklearn.metrics import roc_auc_score

    truth = np.repeat([1, 0], [len(real), len(other)])
    value = torch.tensor(roc_auc_score(truth, torch.cat([real, other]).numpy()))
    dist.all_reduce(value)
    return value.item()


def original(options) -> Callable[[int], None]:
    data = (task := assembled(options)).data
    plain = task.model.to(memory_format=torch.contiguous_format)
    with tempfile.NamedTemporaryFile(delete=False) as file:
        dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{file.name}")
    named = inspect.signature(DistributedDataParallel).parameters  # torch 2.13 has renamed it
    model = DistributedDataParallel(plain, **{n: False for n in ("forward_sync_buffers",) if n in named}
                                    or {"broadcast_buffers": False})  # fmt: skip
    average = copy.deepcopy(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, nesterov=True, weight_decay=5e-4)
    draw = np.random.default_rng(1)
    batches = []
    for _ in range(4):
        ids = draw.integers(0, len(data.train), (3, options.batch))
        batches.append([t for i in ids for t in (data.train.batch(i), data.train.targets(i))])
    ready = itertools.cycle(batches)

    def picked(logits: Tensor, labels: Tensor) -> Tensor:
        return logits[torch.arange(len(logits)), labels]

    def step(number: int) -> None:
        x, y, real, real_y, outside, _ = next(ready)
        model.eval()
        fake = climb(model, outside, lambda v: picked(v, real_y).sum(), options.T, STEP, float("inf"))
        with torch.no_grad():
            scores = picked(model(torch.cat([real, outside, fake])), real_y.repeat(3)).chunk(3)
        for other in scores[1:]:
            mean_auc(scores[0], other)
        model.train()
        logits = torch.cat([model(real), model(fake)]).logsumexp(1)
        truth = torch.cat([torch.ones(len(real)), torch.zeros(len(fake))])
        loss = F.binary_cross_entropy_with_logits(logits, truth)
        adv = climb(model, x, lambda v: F.cross_entropy(v, y), CLF_STEPS, CLF_STEP, CLF_EPS)
        loss = loss + F.cross_entropy(model(adv), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()
        decay = min(DECAY, (1 + number) / (10 + number))
        with torch.no_grad():
            for mine, new in zip(average.state_dict().values(), plain.state_dict().values(), strict=True):
                if mine.is_floating_point():
                    mine.copy_(mine * decay + new * (1 - decay))

    return step


def floor(options) -> Callable[[int], None]:
    task = assembled(options)
    x = task.data.train.batch(np.arange(options.batch))

    def step(_number: int) -> None:
        with rebm.frozen(task.model):
            for _ in range(options.T + CLF_STEPS):
                z = x.detach().requires_grad_(True)
                torch.autograd.grad(task.model(z).sum(), z)
        for _ in range(3):
            task.model(x).sum().backward()
        for p in task.model.parameters():
            p.grad = None

    return step


def compare(options) -> float:
    """The largest difference between points of the two attacks after a few steps, from the same images on the same
    network; the step of the second attack leaves the ball. (More steps multiply rounding errors at ReLUs.)"""
    task = assembled(options)
    x, y = task.data.train.batch(np.arange(options.batch)), task.data.train.targets(np.arange(options.batch))
    with rebm.frozen(task.model):
        pairs = [(climb(task.model, x, lambda v: rebm.picked(v, y).sum(), 2, STEP, float("inf")),
                  rebm.pgd(task.model, x, lambda v: rebm.picked(v, y), 2, STEP, float("inf"), "L2")),
                 (climb(task.model, x, lambda v: F.cross_entropy(v, y), 1, 2 * CLF_EPS, CLF_EPS),
                  rebm.pgd(task.model, x, lambda v: F.cross_entropy(v, y, reduction="none"), 1, 2 * CLF_EPS, CLF_EPS,
                           "L2"))]  # fmt: skip
    return max((a - b).abs().max().item() for a, b in pairs)


def serve(pipe, side: str, options) -> None:
    """A process of one side: when asked, seconds of the clock and of the CPU per step."""
    torch.manual_seed(0)
    rebm.LOGGER.rank = 1  # says nothing
    step, number = globals()[side](options), 1
    step(number)
    pipe.send("ready")
    while pipe.recv():
        begin, first = (time.perf_counter(), time.process_time()), number
        while number == first or time.process_time() - begin[1] < options.seconds:
            step(number := number + 1)
        spent = time.perf_counter() - begin[0], time.process_time() - begin[1]
        pipe.send([seconds / (number - first) for seconds in spent])
    if dist.is_initialized():
        dist.destroy_process_group()


def profile(side: str, options) -> None:
    """Where the time of a side goes, by operator."""
    step = globals()[side](options)
    step(1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        step(2)
    print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=45))


def rounds_of(work: str, other: str, unit: str, mine: list[float], theirs: list[float], ratios: list[float]) -> list:
    """What --json writes of a comparison, in every benchmark alike: a record for each round."""
    rows = zip(mine, theirs, ratios, strict=True)
    return [{"work": work, "with": other, "unit": unit, "ours": a, "other": b, "ratio": r} for a, b, r in rows]


def measure(sides: list[str], options) -> list[dict]:
    """Rows of the table for one setting. Returns the rounds."""
    if not (difference := compare(options)) < 1e-5:
        sys.exit(f"the two attacks differ by {difference:.1e} in a pixel")
    context, pipes, found = multiprocessing.get_context("spawn"), {}, {side: [] for side in sides}
    for side in sides:
        pipes[side], theirs = context.Pipe()
        context.Process(target=serve, args=(theirs, side, options), daemon=True).start()
        theirs.close()
        pipes[side].recv()
    for side in sides * options.rounds:
        pipes[side].send(True)
        found[side].append(pipes[side].recv())
    for pipe in pipes.values():
        pipe.send(False)
    records, speeds = [], {side: [options.batch / cpu for _, cpu in values] for side, values in found.items()}
    for side, values in found.items():
        wall, cpu = ([options.batch / v[i] for v in values] for i in (0, 1))
        ratios = [theirs[1] / mine[1] for mine, theirs in zip(values, found[sides[0]], strict=True)]
        print(f"| {options.model}, {options.size} px, batch {options.batch}, T {options.T} | {side} "
              f"| {statistics.median(wall):.1f} | {statistics.median(cpu):.1f} ({min(cpu):.1f} to {max(cpu):.1f}) "
              f"| {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |", flush=True)  # fmt: skip
        if side != sides[0]:
            name = f"{options.model}, {options.size} px, batch {options.batch}, T {options.T}: {side}"
            records += rounds_of(name, sides[0], "images per CPU second", speeds[side], speeds[sides[0]], ratios)
    return records


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--settings", nargs="+", default=["SmallNet,8,128,20", "WideResNet28x2,32,8,20"],
                   help="model.model_type, side of the images, batch, attack steps on OOD images (T)")  # fmt: skip
    p.add_argument("--seconds", type=float, default=2.0, help="of a turn, on the CPU (one step at least)")
    p.add_argument("--rounds", type=int, default=5, help="turns of each side; medians count")
    p.add_argument("--sides", nargs="+", default=["original", "ours", "compiled", "floor"], choices=SIDES)
    p.add_argument("--profile", choices=SIDES)
    p.add_argument("--json", type=Path, metavar="FILE", help="also write the rounds there")
    options = p.parse_args()
    rebm.LOGGER.rank, records = 1, []  # says nothing
    if not options.profile:
        print(f"{torch.get_num_threads()} threads, {options.rounds} turns of {options.seconds:g} s, torch "
              f"{torch.__version__}\n\n| setting | side | images/s | images per CPU second (range) "
              f"| x {options.sides[0]} (range) |\n|" + "---|" * 5, flush=True)  # fmt: skip
    for setting in options.settings:
        options.model, *numbers = setting.split(",")
        options.size, options.batch, options.T = map(int, numbers)
        if options.profile:
            profile(options.profile, options)
        else:
            records += measure(options.sides, options)
    if options.json:
        options.json.write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
