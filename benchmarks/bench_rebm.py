"""Training steps of stage 2 of run_train_rebm_ddp.py beside a port of the original's step.

    python benchmarks/bench_rebm.py
    python benchmarks/bench_rebm.py --rounds 1 --seconds 3 --works SmallNet
    python benchmarks/bench_rebm.py --rounds 1 --works few --sides original --beside FOLDER
    python benchmarks/bench_rebm.py --device cuda --precision bf16 --works WideResNet34x10

Images per second of whole training steps, one process, the same network, layout and precision, the
same lengths of the attacks: T = 20 steps on OOD images, 10 on images to classify.

compiled     ours with --compile
original     xuwangyin/DAT fb2ffc7, from a description of it: attacks through the
             DistributedDataParallel wrapper with parameters that require gradients; one more
             forward pass over real, OOD and attacked images for two AUCs by scikit-learn; one joint
             backward pass; weights averaged tensor by tensor; the loss read in each step. The
             network is ours
fast         the same with torch.compile

Batch normalization is frozen, as in stage 2. To the original's advantage its batches are ready, on
the device: it decodes and augments in other processes.
"""

import argparse
import copy
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
NAMES = {
    "compiled": "ours with --compile",
    "original": "the original's step",
    "fast": "the original's step, compiled",
}
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
    --n_imgs_per_evaluation_log=0 --ckpt_path=start.pt --data=noise.npz"""


class Setting(NamedTuple):
    model: str  # --model_type
    channels: int
    size: int  # side of the images
    batch: int


WORKS = {
    "SmallNet": Setting("SmallNet", 1, 8, 128),
    "few": Setting("WideResNet28x2", 3, 16, 4),  # a round in a minute, without compiled sides
    "WideResNet28x2": Setting("WideResNet28x2", 3, 32, 8),
    "WideResNet34x10": Setting("WideResNet34x10", 3, 32, 128),  # for GPUs
}


def sized(setting):
    if sides.chosen.small and setting.channels == 3:
        return Setting("WideResNet28x2", 3, 32, 2)
    return setting


def climb(model, x, objective, steps, eps, size):
    """The original's attack: steps of a fixed length (L2), the projection, [0, 1]."""
    z = x.clone()
    for _ in range(steps):
        z = z.clone().detach().requires_grad_(True)
        (gradient,) = torch.autograd.grad(objective(model(z)), [z])
        with torch.no_grad():
            length = gradient.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
            z = z + size * gradient / (length + 1e-10)
            z = torch.clamp(x + (z - x).renorm(p=2, dim=0, maxnorm=eps), 0, 1)
    return z.clone().detach()


def mean_auc(real, other):
    """scikit-learn's AUC, averaged over ranks."""
    from sklearn.metrics import roc_auc_score

    truth = np.repeat([1, 0], [len(real), len(other)])
    scores = torch.cat([real, other]).float().cpu().numpy()
    value = torch.tensor(roc_auc_score(truth, scores))
    dist.all_reduce(value)
    return value.item()


def of_class(logits, labels):
    return logits.gather(1, labels[:, None])[:, 0]


def original_loss(model, batch, attack_ood, attack_clf):
    """(loss of stage 2, AUC of real against attacked images). The attacks are {"steps", "eps",
    "size"} of `climb`."""
    x, y, real, real_y, outside = batch
    fake = climb(model, outside, lambda z: of_class(z, real_y).sum(), **attack_ood)
    with torch.no_grad():
        logits = model(torch.cat([real, outside, fake]))
        scores = of_class(logits, real_y.repeat(3)).chunk(3)
    _, auc = [mean_auc(scores[0], other) for other in scores[1:]]

    logits = torch.cat([model(real), model(fake)]).logsumexp(1)
    truth = torch.zeros_like(logits)
    truth[: len(real)] = 1
    loss = F.binary_cross_entropy_with_logits(logits, truth)
    attacked = climb(model, x, lambda z: F.cross_entropy(z, y), **attack_clf)
    return loss + F.cross_entropy(model(attacked), y), auc


@torch.no_grad()
def original_average(average, model, step, most=DECAY):
    """The averaged weights, tensor by tensor."""
    decay = min(most, (1 + step) / (10 + step))
    for mean, new in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
        if mean.is_floating_point():
            mean.copy_(mean * decay + new * (1 - decay))


def make_batches(setting, seed, device):
    """Four times images to classify, real images, each with labels, and OOD images: ready."""
    rng = np.random.default_rng(seed)
    shape = (setting.batch, setting.channels, setting.size, setting.size)
    batches = []
    for _ in range(4):
        images = torch.from_numpy(rng.integers(0, 256, (3, *shape), np.uint8)).float() / 255
        labels = torch.from_numpy(rng.integers(0, 10, (2, setting.batch)))
        parts = [images[0], labels[0], images[1], labels[1], images[2]]
        batches.append([part.to(device) for part in parts])
    return itertools.cycle(batches)


def load_script(*options):
    """The script as a module, and its options."""
    sys.argv = [f"{sides.ROOT}/{SCRIPT}", *options]
    return importlib.import_module("run_train_rebm_ddp")


def make_network(setting):
    """That of the script, with random weights, in its layout."""
    script = load_script(f"--model_type={setting.model}")
    torch.manual_seed(0)
    model = script.make_network(script.parse_args(), 10, setting.channels, setting.size)
    return model.to(memory_format=torch.channels_last) if setting.size >= 16 else model


def train_ours(options):
    """Stage 2 of the script; it begins with attacks of T steps on OOD images, not of none."""
    script = load_script(*options)
    plain = script.train

    def train(*args):
        args[-1]["T"] = T  # of loop
        return plain(*args)

    script.train = train
    script.launch(script.parse_args, script.main)


def port(setting=None, seed=0, options=None, compiled=False, device="cpu", precision="fp32"):
    """The script with options; without them the original's step."""
    if options:
        train_ours(options)
        return
    setting = Setting(*setting)
    plain = make_network(setting).to(device)
    average = copy.deepcopy(plain)
    script = load_script()
    args = argparse.Namespace(precision=precision)
    autocast = script.choose_precision(args, torch.device(device))
    dist.init_process_group("gloo")
    model = torch.compile(plain) if compiled else plain
    model = DistributedDataParallel(model, broadcast_buffers=False)
    options = {"lr": RATE, "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4}
    optimizer = torch.optim.SGD(model.parameters(), **options)
    batches = make_batches(setting, seed, device)
    model.eval()  # so that batch normalization is frozen
    attack_ood = {"steps": T, "eps": float("inf"), "size": STEP}
    attack_clf = {"steps": CLF_STEPS, "eps": CLF_EPS, "size": STEP}
    for number in itertools.count():
        with autocast():
            loss, _ = original_loss(model, next(batches), attack_ood, attack_clf)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()
        original_average(average, plain, number)
        sides.note_step()


# ---- All sides, in turns -------------------------------------------------------------------------


def prepare(folder, setting):
    """Noise to classify, and weights for ours to start from."""
    setting = sized(setting)
    torch.save(make_network(setting).state_dict(), folder / "start.pt")
    shape = (setting.channels, setting.size, setting.size)
    sides.write_images(folder / "noise.npz", setting.batch * EPOCH, shape)


def start(folder, setting, side, seed):
    setting = sized(setting)
    settings = {"setting": setting, "seed": seed, "compiled": side == "fast"}
    if side not in ("original", "fast"):
        options = f"""{sides.common()} {OPTIONS} --model_type={setting.model} --seed={seed}
            --batch_size={setting.batch} --output_dir=run-{side} --cache_dir=cache-{side}
            --compile={side == "compiled"}"""
        settings = {"options": options.split()}
    return sides.port_job(__file__, side, folder, settings, setting.batch)


if __name__ == "__main__":
    sides.run(__doc__, UNIT, WORKS, NAMES, prepare, start, port)
