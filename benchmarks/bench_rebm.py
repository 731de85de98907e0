"""Training steps of stage 2 of run_train_rebm_ddp.py beside a port of the original's step.

    python benchmarks/bench_rebm.py
    python benchmarks/bench_rebm.py --rounds 1 --seconds 3 --networks SmallNet

Images per second of whole training steps, one process, one thread, fp32 on a CPU, the same network
and the same lengths of the attacks: T = 20 steps on OOD images, 10 on images to classify.

ours         the script, in stage 2
compiled     the same with --compile
original     xuwangyin/DAT fb2ffc7, from a description of it: attacks through the
             DistributedDataParallel wrapper with parameters that require gradients; one more
             forward pass over real, OOD and attacked images for two AUCs by scikit-learn; one joint
             backward pass; weights averaged tensor by tensor; the loss read in each step. The
             network is ours

Batch normalisation is frozen, as in stage 2. To the original's advantage its batches are ready: it
decodes and augments in other processes.
"""

import copy
import functools
import importlib
import itertools
import sys
from typing import NamedTuple

import numpy as np
import sides
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

SCRIPT = "run_train_rebm_ddp.py"
UNIT = "images/s"
NAMES = {"original": "the original's step"}
T = 20
CLF_STEPS = 10
STEP = 0.1
CLF_EPS = 0.5
RATE = 1e-5
DECAY = 0.999
EPOCH = 15  # steps
OPTIONS = f"""--at_epochs=0 --total_epochs=100000 --attack_step_size={STEP} --attack_max_steps={T}
    --indist_attack_clf_max_steps={CLF_STEPS} --indist_attack_clf_step_size={STEP}
    --indist_attack_clf_eps={CLF_EPS} --lr={RATE} --ema={DECAY} --max_grad_norm=5 --log_every=1
    --n_imgs_per_evaluation_log=0"""


class Setting(NamedTuple):
    channels: int
    size: int  # side of the images
    batch: int


SETTINGS = {"SmallNet": Setting(1, 8, 128), "WideResNet28x2": Setting(3, 32, 8)}  # by --model_type


# ---- The port ------------------------------------------------------------------------------------


def climb(model, x, objective, steps, eps):
    """The original's attack: steps of a fixed length (L2), the projection, [0, 1]."""
    z = x.clone()
    for _ in range(steps):
        z = z.clone().detach().requires_grad_(True)
        (gradient,) = torch.autograd.grad(objective(model(z)), [z])
        with torch.no_grad():
            length = gradient.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
            z = z + STEP * gradient / (length + 1e-10)
            z = torch.clamp(x + (z - x).renorm(p=2, dim=0, maxnorm=eps), 0, 1)
    return z.clone().detach()


def mean_auc(real, other):
    """scikit-learn's AUC, averaged over ranks."""
    from sklearn.metrics import roc_auc_score

    truth = np.repeat([1, 0], [len(real), len(other)])
    value = torch.tensor(roc_auc_score(truth, torch.cat([real, other]).numpy()))
    dist.all_reduce(value)
    return value.item()


def of_class(logits, labels):
    return logits[torch.arange(len(logits)), labels]


def make_batches(setting):
    """Four times images to classify, real images, each with labels, and OOD images: ready."""
    rng = np.random.default_rng(1)
    shape = (setting.batch, setting.channels, setting.size, setting.size)
    batches = []
    for _ in range(4):
        images = torch.from_numpy(rng.integers(0, 256, (3, *shape), np.uint8)).float() / 255
        labels = torch.from_numpy(rng.integers(0, 10, (2, setting.batch)))
        batches.append([images[0], labels[0], images[1], labels[1], images[2]])
    return itertools.cycle(batches)


def load_script(*options):
    """The script as a module, and its options."""
    sys.path.insert(0, str(sides.ROOT))
    sys.argv = [f"{sides.ROOT}/{SCRIPT}", *options]
    return importlib.import_module("run_train_rebm_ddp")


def make_network(name):
    """That of the script, with random weights."""
    script = load_script(f"--model_type={name}")
    torch.manual_seed(0)
    setting = SETTINGS[name]
    return script.make_network(script.parse_args(), 10, setting.channels, setting.size)


def begin_with(script, steps):
    """Let stage 2 begin with attacks of so many steps on OOD images, not of none."""
    plain = script.begin_stage

    def begin_stage(args, stage, nets, loop):
        plain(args, stage, nets, loop)
        loop["attack"] = {"T": steps}

    script.begin_stage = begin_stage


def port(network=None, options=()):
    """The original's step with a network, or the script with options."""
    if options:
        script = load_script(*options)
        begin_with(script, T)
        script.launch(script.parse_args, script.main)
        return

    plain = make_network(network).to(memory_format=torch.contiguous_format)
    plain.is_frozen = True
    average = copy.deepcopy(plain)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(plain, broadcast_buffers=False)
    options = {"lr": RATE, "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4}
    optimizer = torch.optim.SGD(model.parameters(), **options)
    batches = make_batches(SETTINGS[network])
    numbers = itertools.count()

    def step():
        x, y, real, real_y, outside = next(batches)
        model.eval()
        fake = climb(model, outside, lambda z: of_class(z, real_y).sum(), T, float("inf"))
        with torch.no_grad():
            logits = model(torch.cat([real, outside, fake]))
            scores = of_class(logits, real_y.repeat(3)).chunk(3)
        for other in scores[1:]:
            mean_auc(scores[0], other)

        model.train()
        logits = torch.cat([model(real), model(fake)]).logsumexp(1)
        truth = torch.cat([torch.ones(len(real)), torch.zeros(len(fake))])
        loss = F.binary_cross_entropy_with_logits(logits, truth)
        attacked = climb(model, x, lambda z: F.cross_entropy(z, y), CLF_STEPS, CLF_EPS)
        loss = loss + F.cross_entropy(model(attacked), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()

        number = next(numbers)
        decay = min(DECAY, (1 + number) / (10 + number))
        pairs = zip(average.state_dict().values(), plain.state_dict().values(), strict=True)
        with torch.no_grad():
            for mean, new in pairs:
                if mean.is_floating_point():
                    mean.copy_(mean * decay + new * (1 - decay))

    sides.repeat(step)


# ---- All sides, in turns -------------------------------------------------------------------------


def prepare(network, folder):
    """Noise to classify, and weights for ours to start from."""
    torch.save(make_network(network).state_dict(), folder / f"{network}.pt")
    setting = SETTINGS[network]
    rng = np.random.default_rng(0)
    arrays = {}
    for part, count in {"train": setting.batch * EPOCH, "val": 20, "test": 20}.items():
        shape = (count, setting.channels, setting.size, setting.size)
        arrays[f"x_{part}"] = rng.integers(0, 256, shape, np.uint8)
        arrays[f"y_{part}"] = np.arange(count) % 10
    np.savez(folder / f"{network}.npz", **arrays)


def start(folder, network, side, seed):
    """The jobs of a side."""
    batch = SETTINGS[network].batch
    if side == "original":
        return [sides.port_job(__file__, side, folder, {"network": network}, batch)]
    options = f"""{sides.COMMON} {OPTIONS} --model_type={network} --batch_size={batch} --seed={seed}
        --data={network}.npz --ckpt_path={network}.pt --output_dir=run-{side}
        --compile={side == "compiled"}"""
    return [sides.port_job(__file__, side, folder, {"options": options.split()}, batch)]


def main():
    parser = sides.make_parser(__doc__)
    names = list(SETTINGS)
    parser.add_argument("--networks", nargs="+", default=names, choices=names)
    args = sides.parse_args(parser, port)
    records = []
    print(f"one thread, {args.rounds} rounds of {args.seconds:g} s\n")
    sides.print_comparison_head(UNIT)
    with sides.workplace() as folder:
        for network in args.networks:
            prepare(network, folder)
            start_side = functools.partial(start, folder, network)
            names = ["ours", "compiled", *NAMES]
            found = sides.speeds(sides.measure(start_side, names, args.rounds, args.seconds))
            setting = SETTINGS[network]
            work = f"{network}, {setting.size} px, batch {setting.batch}, T {T}"
            for side in ("ours", "compiled"):
                records += sides.compare(f"{work}: {side}", UNIT, found, NAMES, side)
    sides.write_json(args.json, records)


if __name__ == "__main__":
    main()
