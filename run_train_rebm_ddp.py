"""Train a robust energy-based model of images: one network that classifies under attack, tells
images from what is no image of their kind, and generates them.

Dual adversarial training (Yin et al. 2025, arXiv 2510.13872). The logits f(x) of a classifier are
also an energy, E(x) = -logsumexp f(x). Stage 1 (at) is adversarial training of the classifier.
Stage 2 (dat) adds a loss that tells real images from out-of-distribution (OOD) images that an
attack of T steps has made look real. T grows when the network tells them apart too easily.

    python run_train_rebm_ddp.py configs/config_rebm_quickstart.yaml     # digits, no download
    torchrun --nproc_per_node=4 run_train_rebm_ddp.py configs/config_rebm_cifar10.yaml
    python run_train_rebm_ddp.py --data photos --size 64                 # photos/train/CLASS/*.jpg

Data (--data, --outdist_data): a folder with train/CLASS/..., perhaps val/ and test/ (if only one,
it is the test), or with the classes alone; an .npz of arrays of 0 to 255, x_train (N, S, S), (N, S,
S, 3) or (N, 3, S, S), y_train (-1: no label), perhaps x_val, x_test; CIFAR's folder; SVHN's .mat;
an .npy of OOD images; or a data set of the hub. Attacks see pixels in [0, 1].

Logged, over all ranks:
    loss (nats an image), in stage 2 also its parts: clf_loss, and bce (binary cross entropy)
    T; auc, of real against attacked OOD images
    val/STAGE/clean and robust (accuracy of averaged weights on held-out images, without and under
    attack), cross_entropy (nats)
    phase (1 at, 2 dat), epoch, lr, grad_norm (before clipping), skipped (steps whose gradient was
    not finite), samples_per_s, data_wait (part of the time), peak_gb (of a GPU)
Files in --output_dir: at_best.pt (stage 1), best.pt (the last stage), latest.pt, metrics.jsonl,
samples-STEP.png (stage 2); at the end summary.json, curves.png. The same command resumes the run.
"(all ranks)": every rank must call it, in the same order; "(rank 0)": only rank 0 does.
"""

# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch>=2.11,<2.14", "numpy>=2.2,<3", "tqdm>=4.67,<5", "pyyaml>=6.0,<7", "wandb>=0.25,<1",
#     "matplotlib>=3.10,<4", "pandas>=2.2,<4", "scikit-learn>=1.7,<2", "datasets>=5,<6",
#     "pillow>=12,<14", "scipy>=1.15,<2",
# ]
# ///

import argparse
import copy
import fcntl
import functools
import hashlib
import itertools
import json
import logging
import math
import os
import pickle
import re
import signal
import sys
import tempfile
import time
import traceback
import unicodedata
from datetime import timedelta
from multiprocessing.pool import ThreadPool
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import yaml
from PIL import Image, ImageOps
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

# --------------------------------------------------------------------------------------------------
# Arguments

BATCH_SIZE = 128  # images of a micro-batch, if --batch_size is not given
EVAL_BATCH_SIZE = 32  # images that a rank validates at a time

# names of the original that cannot be taken as they are (the others: docs/MIGRATION.md)
RENAMED = {"indist_dataset": "data", "outdist_dataset": "outdist_data", "image_size": "size"}
RENAMED.update(fp16="precision", use_ema="ema", wandb_disabled="wandb_mode")
RENAMED.update(n_imgs_per_metrics_log="log_every, in steps,")


def parse_args():
    parser = Parser(description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False)
    add = parser.add_argument_group("data").add_argument
    add("--data", type=expanded, default="digits", help="images: see above; digits need no file")
    add("--outdist_data", type=expanded, default="noise", help="OOD images; or noise, or blobs")
    add("--size", type=NATURAL, default=0, help="pixels a side; 0: an array's own, files 32")
    add("--grey", **FLAG, help="make all images grey")
    kinds = ["none", "shift", "original"]
    add("--augm_type_classification", default="shift", choices=kinds, help="of images to classify")
    add("--augm_type_generation", default="none", choices=kinds, help="of real and OOD images")

    add = parser.add_argument_group("model").add_argument
    add("--model_type", default="SmallNet", choices=MODELS, help="network")
    add("--ckpt_path", "--model_ckpt_path", type=expanded, help="weights to start from")

    length = number(1e-6, 1e6)
    add = parser.add_argument_group("attack, on OOD images, in L2").add_argument
    add("--attack_max_steps", type=NATURAL, default=50, help="T at most")
    add("--attack_step_size", type=length, default=0.1, help="length of a step")
    add("--AUC_th", type=number(0, 1), default=0.8, help="T grows when the mean AUC reaches this")
    add("--min_imgs_per_threshold", type=COUNT, default=1000, help="real images of the mean AUC")

    add = parser.add_argument_group("indist_attack_clf, on images to classify").add_argument
    add("--indist_attack_clf_max_steps", type=NATURAL, default=10, help="0: standard training")
    add("--indist_attack_clf_step_size", type=length, default=0.1, help="length of a step")
    add("--indist_attack_clf_eps", type=length, default=0.5, help="radius of the ball")
    add("--indist_attack_clf_norm", default="L2", choices=["L2", "Linf"], help="of step and ball")

    add = parser.add_argument_group("training").add_argument
    add("--at_epochs", type=NATURAL, default=40, help="of stage 1; 0: stage 2 from --ckpt_path")
    add("--total_epochs", type=NATURAL, default=100, help="of stage 2; 0: stage 1 only")
    add("--at_optimizer", default="adamw", choices=OPTIMIZERS, help="of stage 1")
    add("--optimizer", default="sgd", choices=OPTIMIZERS, help="of stage 2")
    add("--at_lr", type=number(0), default=2e-3, help="peak learning rate of stage 1, a cosine")
    add("--lr", type=number(0), default=1e-3, help="learning rate of stage 2, constant")
    add("--wd", type=number(0), default=5e-4, help="weight decay of matrices; biases and norms: 0")
    add("--ema", type=number(0, 1), default=0.999, help="decay of averaged weights; 0: no average")
    add("--use_ddp", **{**FLAG, "default": True}, help="False: only one process, on one GPU")

    add = parser.add_argument_group("evaluation").add_argument
    add("--n_imgs_per_evaluation_log", type=NATURAL, default=50_000, help="images; 0: once a stage")

    add_common_arguments(parser, output_dir="outputs/rebm")
    hidden = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}  # the original's names
    add("--ddp_backend", dest="backend", **hidden)
    add("--rand_seed", dest="seed", type=number(0, 2**32, int), **hidden)
    sys.argv[1:] = as_options(sys.argv[1:], parser)  # which torchrun reads, too
    try:
        args = parse_with_config(parser)
    except InputError as error:
        hints = [f"{old} is {new} here" for old, new in RENAMED.items() if f"{old}=" in str(error)]
        raise InputError("; ".join([str(error), *hints])) from None
    if args.at_epochs == 0 and not (args.ckpt_path and args.total_epochs):
        parser.error("--at_epochs 0: give --total_epochs of stage 2, and --ckpt_path to start from")
    if args.indist_attack_clf_norm == "Linf" and args.indist_attack_clf_eps >= 0.5:
        parser.error("--indist_attack_clf_eps >= 0.5 in Linf makes any image grey; 0.03 is usual")
    return args


def as_options(words, parser):
    """The original's words: A.yaml as --config=A.yaml, model.ckpt_path=B as --model_ckpt_path=B."""
    options = []
    for word in words:
        key, equals, value = word.partition("=")
        section, dot, name = key.removeprefix("--").rpartition(".")
        if equals and (dot or not word.startswith("-")):
            word = config_words({name: value}, parser, f"--{section}_" if section else "--")[0]
        elif word.endswith((".yaml", ".yml")) and not equals and options[-1:] != ["--config"]:
            word = f"--config={word}"
        options.append(word)
    return options


# --------------------------------------------------------------------------------------------------
# Data

PHASES = {"at": 1, "dat": 2}  # numbers of the stages, in the log
TRAIN, VALID, TEST, UNUSED = range(4)  # parts of the data


class Batch(NamedTuple):
    """A micro-batch of B images to classify; in stage 2 also B real and B OOD images, of which the
    energy learns. Images are (B, C, S, S) uint8, labels (B,) int64."""

    positions: torch.Tensor  # (B,) int64, in the global batch
    clf_x: torch.Tensor  # to classify
    clf_y: torch.Tensor
    real_x: torch.Tensor | None = None
    real_y: torch.Tensor | None = None
    ood_x: torch.Tensor | None = None

    def to(self, device):
        return Batch(*[field.to(device, non_blocking=True) for field in self if field is not None])


class Images:
    """The images of a folder that `prepare` made, in memory that the ranks of a machine share."""

    def __init__(self, folder):
        # (N, C, S, S) uint8. It stays mapped as an array, which is faster than np.memmap
        self.images = np.asarray(np.load(folder / "images.npy", mmap_mode="r"))
        self.shape = self.images.shape[1:3]  # (channels, pixels a side)
        rows = np.load(folder / "rows.npz")
        self.labels = rows["labels"]  # (N,) int64
        self.split = rows["split"]  # (N,) TRAIN, VALID, TEST or UNUSED
        self.digests = rows["digests"]  # (N,) uint64, equal for equal images
        self.classes = rows["classes"].tolist()  # names; [] where images have no labels
        content = [repr([self.shape, self.classes]).encode(), self.labels, self.split, self.digests]
        self.hash = hashlib.sha256(b"".join(map(bytes, content))).hexdigest()[:12]

    def part(self, part):
        """The numbers of the images of a part: TRAIN, VALID or TEST."""
        return np.flatnonzero(self.split == part)

    def some(self, part, most):
        """`most` of them, drawn at random (the first ones would be of one class), in order."""
        return np.sort(np.random.default_rng(0).permutation(self.part(part))[:most])


def augment(image, kind, rng):
    """A copy (C, S, S), shifted along both axes (the rim becomes black). The original shifts twice
    as far as "shift", and mirrors some."""
    if kind == "none":
        return image
    channels, image_size, _ = image.shape
    most = max(1, image_size // (16 if kind == "shift" else 8))
    across, down = rng.integers(0, 2 * most + 1, 2)
    wide = np.zeros((channels, image_size + 2 * most, image_size + 2 * most), np.uint8)
    wide[:, most:-most, most:-most] = image
    image = wide[:, down : down + image_size, across : across + image_size]
    return image[:, :, ::-1] if kind == "original" and rng.random() < 0.5 else image


class TrainingData(Dataset):
    """Micro-batches. What is drawn depends on (seed, stage, step, position), not on the ranks."""

    def __init__(self, args, indist, outdist, stage):
        self.args = args
        self.indist = indist
        self.outdist = outdist
        self.phase = PHASES[stage]
        self.real_ids = indist.part(TRAIN)
        self.ood_ids = outdist.part(TRAIN)

    def __getitem__(self, item):
        step, global_ids, positions_in_batch = item  # the step is that of this stage
        rows = [self.draw(step, position, global_ids[position]) for position in positions_in_batch]
        return Batch(*[torch.from_numpy(np.stack(column)) for column in zip(*rows, strict=True)])

    def draw(self, step, position, i):
        """What a Batch has at this position, where image i is to be classified."""
        rng = np.random.default_rng([self.args.seed, self.phase, step, position])
        clf_x = augment(self.indist.images[i], self.args.augm_type_classification, rng)
        if self.phase == PHASES["at"]:
            return position, clf_x, self.indist.labels[i]
        real = rng.choice(self.real_ids)
        ood = rng.choice(self.ood_ids)
        real_x = augment(self.indist.images[real], self.args.augm_type_generation, rng)
        ood_x = augment(self.outdist.images[ood], self.args.augm_type_generation, rng)
        return position, clf_x, self.indist.labels[i], real_x, self.indist.labels[real], ood_x


def pixels(images):
    """uint8 as float32 in [0, 1], laid out as convolutions read fastest, channels last."""
    return images.float().div(255).contiguous(memory_format=torch.channels_last)


# --------------------------------------------------------------------------------------------------
# Model


class Network(nn.Module):
    """Logits f(x) (B, K) of images x (B, C, S, S) in [0, 1]. Subclasses add `features` and `fc`."""

    def __init__(self, channels):
        super().__init__()
        # CIFAR's, to the digits of the original, whose weights give the same logits then
        mean = [0.4913997551666284, 0.48215855929893703, 0.4465309133731618]
        deviation = [0.24703225141799082, 0.24348516474564, 0.26158783926049628]
        if channels == 1:
            mean = deviation = [0.5]
        self.register_buffer("mean", torch.tensor(mean)[:, None, None], persistent=False)
        self.register_buffer("deviation", torch.tensor(deviation)[:, None, None], persistent=False)

    def forward(self, x):
        features = self.features((x - self.mean) / self.deviation).float()
        with torch.autocast(x.device.type, enabled=False):  # 16 bits would make ties of logits
            return self.fc(features)


class SmallNet(Network):
    """Pairs of convolutions, all but the first halve the image. Smooth, without maxima or ReLUs."""

    def __init__(self, num_classes, channels, image_size):
        super().__init__(channels)
        layers = []
        widths = [channels, 24, 24, 48, 48, 96, 96][: 5 if image_size < 16 else 7]
        for before, after in itertools.pairwise(widths):
            stride = 2 if channels < before < after else 1
            layers += [nn.Conv2d(before, after, 3, stride, 1), nn.GroupNorm(1, after), nn.SiLU()]
            image_size = math.ceil(image_size / stride)
        if image_size > 4:  # to 4 x 4; the gradient of nn.AdaptiveAvgPool2d differs from run to run
            stride = image_size // 4
            layers.append(nn.AvgPool2d(image_size - 3 * stride, stride))
        layers += [nn.Flatten(), nn.Linear(after * min(image_size, 4) ** 2, 128), nn.SiLU()]
        self.features = nn.Sequential(*layers)
        self.fc = nn.Linear(128, num_classes)


class WideBlock(nn.Module):
    """Pre-activation residual block (Zagoruyko and Komodakis 2016), with its parameters' names."""

    def __init__(self, before, after, stride):
        super().__init__()
        self.bn1 = nn.BatchNorm2d(before)
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.convShortcut = None
        if before != after:
            self.convShortcut = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x):
        y = F.relu(self.bn1(x))
        shortcut = x if self.convShortcut is None else self.convShortcut(y)
        y = self.conv1(y)
        return shortcut + self.conv2(F.relu(self.bn2(y)))


class WideResNet(Network):
    def __init__(self, depth, factor, num_classes, channels):
        super().__init__(channels)
        self.conv1 = nn.Conv2d(channels, 16, 3, 1, 1, bias=False)
        before = 16
        for number, stride in ((1, 1), (2, 2), (3, 2)):
            after = 8 * factor * 2**number
            blocks = [WideBlock(before, after, stride)]
            blocks += [WideBlock(after, after, 1) for _ in range((depth - 4) // 6 - 1)]
            self.add_module(f"block{number}", nn.ModuleDict({"layer": nn.Sequential(*blocks)}))
            before = after
        self.bn1 = nn.BatchNorm2d(before)
        self.fc = nn.Linear(before, num_classes)

    def features(self, x):
        x = self.conv1(x)
        for group in (self.block1, self.block2, self.block3):
            x = group["layer"](x)
        return F.relu(self.bn1(x)).mean((2, 3))


# depths and factors of networks; SmallNet has those of a WideResNet that takes as much memory
WIDE_SIZES = [(28, 2), (28, 10), (28, 20), (34, 10), (34, 20), (40, 10), (70, 16)]
MODELS = {"SmallNet": (10, 1.5), **{f"WideResNet{d}x{k}": (d, k) for d, k in WIDE_SIZES}}


def make_network(args, num_classes, channels, image_size):
    """A network with random weights, for so many classes of images (B, C, S, S)."""
    if args.model_type == "SmallNet":
        model = SmallNet(num_classes, channels, image_size)
    else:
        model = WideResNet(*MODELS[args.model_type], num_classes, channels)
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    nn.init.zeros_(model.fc.bias)
    return model


class Networks(NamedTuple):
    model: nn.Module  # is trained
    ema_model: nn.Module  # has the averaged weights: for validation, and to be used
    frozen: nn.Module  # for attacks: the model's weights, without gradients and DDP's hooks
    ddp_model: nn.Module  # the model within DDP


EXPECTED = "expected best.pt, step_N.pt or latest.pt of run_train_rebm_ddp.py"


def load_file(path):
    """The dict that torch.save wrote. Raises InputError."""
    if not Path(path).is_file():
        reason = "is a folder" if Path(path).is_dir() else "there is no such file"
        raise InputError(f"{path}: {reason}")
    try:
        return dict(torch.load(path, map_location="cpu", weights_only=True))
    except Exception:  # torch.load raises many kinds, and advises to run what code the file has
        raise InputError(f"{path}: no tensors by name can be read; {EXPECTED}") from None


def read_weights(path, model, classes=None):
    """{name: tensor}, which the model now has: the averaged weights of a checkpoint, ours (old
    ones, too) or the original's, or a state_dict; names may have prefixes of wrappers. classes:
    what its outputs have to be, where the file says it. (rank 0)"""
    state = load_file(path)
    known = state.get("data", state.get("loop", {})).get("classes", classes)
    keys = "ema_model average model ema_state_dict model_state_dict state_dict".split()
    state = next((state[key] for key in keys if key in state), state)
    prefix = r"^((module|_orig_mod|base_model)\.)+"
    found = {re.sub(prefix, "", name): tensor for name, tensor in state.items()}
    found.pop("n_averaged", None)  # a counter of torch.optim.swa_utils
    try:
        differences = model.load_state_dict(found, strict=False)
        wrong = differences.missing_keys + differences.unexpected_keys
    except RuntimeError as error:  # a line for each other shape
        wrong = str(error).splitlines()[1:]
    if wrong:
        text = f"{len(wrong)} weights do not fit, such as {', '.join(map(str.strip, wrong[:3]))}"
        raise InputError(f"{path}: {text}; expected weights of this --model_type")
    if classes and known != classes:
        text = f"its classes are {', '.join(known)}; here {', '.join(classes)}"
        raise InputError(f"{path}: {text}; y_train of an .npz may have these names")
    return found


# --------------------------------------------------------------------------------------------------
# Loss

LOGGED = {"at": ["loss"], "dat": ["loss", "clf_loss", "bce", "auc"]}
cross_entropy = functools.partial(F.cross_entropy, reduction="none")  # (B,)


def label_logit(logits, labels):
    """f_y(x) (B,)"""
    return logits.gather(1, labels[:, None])[:, 0]


@torch.no_grad()
def attack(model, gain, x, labels, steps, step_size, eps=math.inf, norm="L2"):
    """Projected gradient ascent (Madry et al. 2018) on gain(logits, labels) (B,), within [0, 1] and
    the balls of radius eps about the images x (B, C, S, S). It starts at the images themselves, not
    at random points. Each step has the length `step_size`, however long the gradient is."""
    z = x
    for _ in range(steps):
        z = z.detach().requires_grad_()
        with torch.enable_grad():
            total = gain(model(z), labels).sum()
        (gradient,) = torch.autograd.grad(total, z)
        if norm == "Linf":
            z = z + step_size * gradient.sign()
            move = (z - x).clamp(-eps, eps)
        else:
            # its largest entry becomes 1 first: the squares of a gradient of 1e-30 would be 0
            largest = gradient.abs().amax((1, 2, 3), keepdim=True)
            z = z + step_size * F.normalize(gradient / largest.clamp(min=1e-38), dim=(1, 2, 3))
            move = (z - x).renorm(2, 0, eps)
        z = (x + move).clamp(0, 1)  # nearer to x, if it changes anything: still in the ball
    return z


def auc(real, fake):
    """Area () under the ROC curve: how often a real score (n,) is above a fake (m,); ties half."""
    fake = fake.sort().values
    lower = torch.searchsorted(fake, real)  # how many fake images have a lower score
    lower_or_equal = torch.searchsorted(fake, real, right=True)
    return (lower + lower_or_equal).sum().double() / (2 * len(real) * len(fake))


def batch_losses(args, networks, batch, T):
    """Sums over a micro-batch. In stage 1 (1,): of the cross entropies of attacked images. In stage
    2 (2,), with that of the binary cross entropies, a half each, of real images and of OOD images
    that T steps of an attack have moved towards the labels y of the real ones. And f_y (2, B) of
    both, of which the AUC is; in stage 1 zeros."""
    names = ("max_steps", "step_size", "eps", "norm")
    ball = [getattr(args, f"indist_attack_clf_{name}") for name in names]
    x = attack(networks.frozen, cross_entropy, pixels(batch.clf_x), batch.clf_y, *ball)
    if batch.ood_x is None:
        clf_loss = cross_entropy(networks.ddp_model(x), batch.clf_y).sum()
        return clf_loss[None], torch.zeros(2, len(x), device=x.device)
    ood_x = pixels(batch.ood_x)
    fake = attack(networks.frozen, label_logit, ood_x, batch.real_y, T, args.attack_step_size)
    # One pass for all, since nothing mixes the images of a batch: batch normalization is frozen.
    logits = networks.ddp_model(torch.cat([x, pixels(batch.real_x), fake]))
    clf_logits, real_logits, fake_logits = logits.chunk(3)
    bce = F.softplus(-real_logits.logsumexp(1)) + F.softplus(fake_logits.logsumexp(1))
    scores = [label_logit(part.detach(), batch.real_y) for part in (real_logits, fake_logits)]
    clf_loss = cross_entropy(clf_logits, batch.clf_y).sum()
    return torch.stack([clf_loss, bce.sum() / 2]), torch.stack(scores)


# --------------------------------------------------------------------------------------------------
# Evaluation

EVAL_IMAGES = 1000  # held-out images at most
EVAL_STEPS = 20  # of the attack on them


@torch.no_grad()
def evaluate(args, model, indist, device):
    """Metrics on held-out images, each counted once, without autocast or compile. (all ranks)"""
    ids = indist.some(VALID, EVAL_IMAGES)
    eps = args.indist_attack_clf_eps
    norm = args.indist_attack_clf_norm
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    batches = np.array_split(ids, math.ceil(len(ids) / EVAL_BATCH_SIZE))
    for own in batches[dist.get_rank() :: dist.get_world_size()]:
        x = pixels(torch.from_numpy(indist.images[own]).to(device))
        y = torch.from_numpy(indist.labels[own]).to(device)
        logits = model(x)
        attacked = model(attack(model, cross_entropy, x, y, EVAL_STEPS, eps / 4, eps, norm))
        is_right = logits.argmax(1) == y
        stays_right = is_right & (attacked.argmax(1) == y)
        sums += torch.stack([is_right.sum(), stays_right.sum(), cross_entropy(logits, y).sum()])

    dist.all_reduce(sums)
    clean, robust, loss = (sums / len(ids)).tolist()
    return {"clean": clean, "robust": robust, "cross_entropy": loss}


def draw_samples(args, path, model, indist, outdist, device):
    """A picture of OOD images that an attack moves towards the class of their column. (rank 0)"""
    columns = min(10, len(indist.classes))
    ids = np.resize(outdist.some(VALID, 10 * columns), 10 * columns)
    labels = torch.arange(columns, device=device)
    rows = []
    for own in np.split(ids, 10):
        x = pixels(torch.from_numpy(outdist.images[own]).to(device))
        steps = args.attack_max_steps
        rows.append(attack(model, label_logit, x, labels, steps, args.attack_step_size))
    rows = (255 * torch.stack(rows)).round().byte().permute(0, 3, 1, 4, 2)
    picture = rows.flatten(2, 3).flatten(0, 1).expand(-1, -1, 3)  # height, width, color
    Image.fromarray(picture.contiguous().cpu().numpy()).save(path)


def note_best(loop, stage, metrics, T):
    """Whether these weights are the best of the stage so far; loop["best"] says so then."""
    # Networks that have seen longer attacks generate better images, and are hardly less robust: so
    # T counts first. Then accuracy under attack, which is 0 where training had none.
    rank = [T, metrics["robust"], metrics["clean"]]
    if stage in loop["best"] and rank < loop["best"][stage]["rank"]:
        return False
    best = {"metric": f"{stage}/robust", "value": metrics["robust"], "step": loop["step"]}
    loop["best"][stage] = {**best, "rank": rank, "T": T, "metrics": metrics}
    return True


# --------------------------------------------------------------------------------------------------
# Train

OPTIMIZERS = {"sgd": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True})}  # the original's
OPTIMIZERS["adamw"] = (torch.optim.AdamW, {"betas": (0.9, 0.95)})


def make_optimizer(args, model, stage):
    kind, settings = OPTIMIZERS[args.at_optimizer if stage == "at" else args.optimizer]
    # Weight decay pulls towards zero. That helps matrices; a bias or a norm's scale needs its size.
    decay = [p for p in model.parameters() if p.ndim > 1]
    no_decay = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": args.wd}, {"params": no_decay, "weight_decay": 0.0}]
    optimizer = kind(groups, fused=True, **settings)
    if kind is torch.optim.SGD:
        for p in model.parameters():  # torch would leave them undefined if it skips the first step
            optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
    return optimizer


def image_bytes(args, stage, image_size):
    """What an image takes of a GPU in fp32: a block has about 8 tensors of its width; in stage 2
    there are two more images for each."""
    depth, factor = MODELS[args.model_type]
    blocks = (depth - 4) / 6 * 1.75  # 1 + 1/2 + 1/4: the blocks after them
    return 4 * 8 * blocks * 16 * factor * image_size**2 * (3 if stage == "dat" else 1)


def update_ema(args, networks, step):
    """ema_model = d ema_model + (1 - d) model; d rises from 0.1, so that the start is forgotten."""
    d = min(args.ema, (1 + step) / (10 + step))
    # also the statistics of batch normalization; but not its count of batches, a whole number
    means = [x for x in networks.ema_model.state_dict().values() if x.is_floating_point()]
    weights = [x for x in networks.model.state_dict().values() if x.is_floating_point()]
    torch._foreach_lerp_(means, weights, 1 - d)


def update_frozen(networks):
    """Weights of the frozen network that are in bf16 do not share the memory of the model's."""
    pairs = zip(networks.frozen.parameters(), networks.model.parameters(), strict=True)
    for rounded, weight in pairs:
        if rounded.dtype != weight.dtype:
            rounded.copy_(weight.detach())


def train(args, device, stage, data, networks, autocast, state, log, loop):
    """One stage, from where `loop` says that it stands. state: the checkpoint to go on from, None
    for a new run. Returns why training was stopped, "" if the stage has ended. (all ranks)"""
    world_size = dist.get_world_size()
    indist, outdist = data
    model, ema_model, _, ddp_model = networks
    room = room_on_gpu(model, device) / image_bytes(args, stage, indist.shape[1])
    sampler = GlobalBatchSampler(indist.part(TRAIN), args, np.ones(len(indist.split)), room)
    steps = sampler.steps * (args.at_epochs if stage == "at" else args.total_epochs)
    eval_every = math.ceil(args.n_imgs_per_evaluation_log / sampler.global_batch) or steps
    window = math.ceil(args.min_imgs_per_threshold / sampler.global_batch)
    logging.info(f"  stage {stage}: {steps:,} steps, {sampler.steps:,} an epoch")
    optimizer = make_optimizer(args, model, stage)
    if loop["stage"] == stage:
        model.load_state_dict(state["model"])
        ema_model.load_state_dict(state["ema_model"])
        optimizer.load_state_dict(state["optimizer"])
        state.clear()  # each rank has a copy: free it
    else:
        if loop["stage"] == "at":  # stage 2 starts from the best weights of stage 1
            model.load_state_dict(on_rank0(read_weights, f"{args.output_dir}/at_best.pt", model))
        ema_model.load_state_dict(model.state_dict())
        loop.update(stage=stage, stage_step=0)
    update_frozen(networks)
    # in stage 2 batch normalization keeps stage 1's statistics, without those of OOD images
    model.train(stage == "at")
    about = {"classes": indist.classes, "shape": [*indist.shape]}  # for whoever loads the weights
    save = functools.partial(save_checkpoint, args=args, log=log, loop=loop, data=about)
    sampler.start = loop["stage_step"]
    batches = make_loader(TrainingData(args, indist, outdist, stage), sampler, args, device)

    statistics = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    bar = tqdm(total=steps, initial=sampler.start, disable=None if dist.get_rank() == 0 else True)
    meter = Meter(LOGGED[stage], args, device)
    reason = ""
    while loop["stage_step"] < steps and not reason:
        step = loop["stage_step"]
        epoch, position = divmod(step, sampler.steps)
        if position == 0:
            logging.info(f"Starting training epoch {epoch}")
        seed_step(args, loop["step"])
        cosine = 0.5 + 0.5 * math.cos(math.pi * step / steps)
        lr = args.at_lr * cosine if stage == "at" else args.lr
        for group in optimizer.param_groups:
            group["lr"] = lr

        # forward and backward, micro-batch by micro-batch; the last one sums over the ranks
        T = loop["T"]
        step_sums = torch.zeros(1 if stage == "at" else 2, device=device)
        scores = torch.zeros(2, sampler.global_batch, device=device)
        old_statistics = [buffer.clone() for buffer in statistics]
        for micro in range(1, sampler.accumulation + 1):
            batch = meter.next_batch(batches, device)
            ddp_model.require_backward_grad_sync = micro == sampler.accumulation
            with autocast():
                losses, scores[:, batch.positions] = batch_losses(args, networks, batch, T)
            losses = losses / sampler.global_batch
            (losses.sum() * world_size).backward()  # DDP takes the mean, we want the sum
            step_sums += losses.detach()
        norm = update_if_finite(args, optimizer)
        for buffer, old in zip(statistics, old_statistics, strict=True):
            buffer.copy_(torch.where(norm.isfinite(), buffer, old))  # as if a skipped step were not
        update_frozen(networks)
        update_ema(args, networks, step)
        metrics = step_sums.sum()[None]
        log_row = {"step": loop["step"] + 1, "phase": PHASES[stage], "epoch": epoch, "lr": lr}
        if stage == "dat":
            log_row["T"] = T
            dist.all_reduce(scores)  # of an image they are zero on all ranks but its own
            step_auc = auc(*scores)
            # all ranks have the same AUC, and the meter sums over the ranks
            metrics = torch.cat([metrics, step_sums, step_auc.float()[None] / world_size])
            # T grows when the mean AUC of the last `window` steps, all with this T, is high enough.
            # (A skipped step has NaN: not high enough.) To read the AUC the host waits here.
            aucs = [*loop["aucs"], torch.where(norm.isfinite(), step_auc, math.nan).item()]
            loop["aucs"] = aucs[-window:]
            is_easy = len(aucs) >= window and np.mean(loop["aucs"]) >= args.AUC_th
            if is_easy and T < args.attack_max_steps:
                loop.update(T=T + 1, aucs=[])
        meter.add(metrics, norm)
        loop["step"] += 1
        loop["stage_step"] += 1
        bar.update()

        # log, and agree whether to stop
        must_evaluate = (step + 1) % eval_every == 0 or step + 1 == steps
        must_save = loop["step"] % args.save_every == 0 or must_evaluate
        reason = meter.log_and_agree(log, log_row, sampler.global_batch, must_save)

        # evaluate: all ranks get the same metrics, and so agree on what is best
        if must_evaluate:
            val_metrics = evaluate(args, ema_model, indist, device)
            loss = val_metrics["cross_entropy"]
            if not math.isfinite(loss):
                raise RuntimeError(f"the validation cross_entropy is {loss}: a lower --at_lr/--lr?")
            val_row = {"step": loop["step"], "phase": PHASES[stage], "epoch": epoch}
            log.write(val_row | {f"val/{stage}/{name}": x for name, x in val_metrics.items()})
            if stage == "dat":
                path = f"{args.output_dir}/samples-{loop['step']}.png"
                on_rank0(draw_samples, args, path, ema_model, indist, outdist, device)
            if note_best(loop, stage, val_metrics, T):
                logging.info(f"Saving checkpoint for model at step {loop['step']}")
                if stage == "at":
                    save("at_best.pt", ema_model=ema_model)
                save("best.pt", ema_model=ema_model)

        # save, with what the evaluation has changed
        if args.keep_every and loop["step"] % args.keep_every == 0:
            save(f"step_{loop['step']}.pt", ema_model=ema_model)
        if reason or must_save:
            save("latest.pt", model=model, ema_model=ema_model, optimizer=optimizer)
            meter.start()  # neither counts as time of steps
    bar.close()
    if not reason and stage not in loop["best"]:
        raise InputError(f"no step of stage {stage} was evaluated: give more epochs")
    return reason


# --------------------------------------------------------------------------------------------------
# Main


def start_networks(args, device, indist, state):
    """The Networks, and a function that makes the context of a forward pass. (all ranks)"""
    torch.manual_seed(args.seed)  # the same weights on all ranks
    model = make_network(args, len(indist.classes), *indist.shape).to(device)
    # Convolutions are faster with channels last, except those of small images on a CPU. The layout
    # must not depend on the device: a resumed run's optimizer has that of the run before.
    if indist.shape[1] >= 16:
        model.to(memory_format=torch.channels_last)
    if args.ckpt_path and state is None:
        model.load_state_dict(on_rank0(read_weights, args.ckpt_path, model, indist.classes))
    has_batch_norm = any(isinstance(layer, nn.BatchNorm2d) for layer in model.modules())
    is_left = args.at_epochs > 0 and not (state and state["loop"]["stage"] == "dat")  # stage 1
    if has_batch_norm and is_left and dist.get_world_size() > 1:
        if device.type == "cpu" or args.backend == "gloo":
            text = "batch normalization over several processes takes GPUs, and not --backend gloo"
            raise InputError(f"--model_type {args.model_type}: in stage 1 {text}")
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    logging.info(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    ema_model = copy.deepcopy(model).requires_grad_(False).eval()
    frozen = copy.deepcopy(ema_model)
    frozen.load_state_dict(model.state_dict(), assign=True)
    autocast = choose_precision(args, device)
    with autocast():  # it would round frozen weights anew in each step of an attack
        for layer in frozen.modules():
            if isinstance(layer, nn.Conv2d) and torch.is_autocast_enabled(device.type):
                layer.to(torch.bfloat16)
    if args.compile:
        frozen = torch.compile(frozen)
    return Networks(model, ema_model, frozen, wrap_ddp(model, args, device)), autocast


def main(args):
    device = setup_ddp(args)
    free_on_resume = "data outdist_data at_epochs total_epochs n_imgs_per_evaluation_log use_ddp"
    state = open_run(args, free_on_resume.split())
    world_size = dist.get_world_size()
    if not args.use_ddp and world_size > 1:
        raise InputError(f"--use_ddp False is one process, {world_size} were started")
    logging.info("Preparing data loaders...")
    indist = Images(read_once(functools.partial(prepare, name=args.data), args))
    like = functools.partial(prepare, name=args.outdist_data, indist=indist)
    outdist = Images(read_once(like, args))
    data = (indist, outdist)
    size = " x ".join(map(str, indist.images.shape[1:]))
    logging.info(f"  {len(indist.classes)} classes, images of {size}")
    for part, use in ((TRAIN, "train"), (VALID, "validate"), (TEST, "test")):
        counts = f"{len(indist.part(part)):,} images, and {len(outdist.part(part)):,} OOD images"
        logging.info(f"  to {use} on: {counts}")
    if args.prepare_only:
        logging.info(f"The data are read: {args.cache_dir}")
        return 0

    begin_run(args, state, f"{indist.hash} {outdist.hash}")
    # stage_step: steps of this stage; aucs: of the last steps with this T; best: of each stage
    new_loop = {"step": 0, "stage": "", "stage_step": 0, "T": 0, "aucs": [], "best": {}}
    loop = state["loop"] if state else new_loop
    if loop.keys() != new_loop.keys():
        raise InputError(f"{args.output_dir} has a run of an earlier version: {HINT}")
    if loop["stage"] == "dat" and args.total_epochs == 0:
        raise InputError("--total_epochs 0: stage 2 has begun, give as many or more")
    torch.backends.cudnn.benchmark = not args.deterministic  # it pays: shapes stay the same
    networks, autocast = start_networks(args, device, indist, state)
    logging.info(f"Initialized DDP with {world_size} processes")
    counts = np.bincount(indist.labels[indist.some(VALID, EVAL_IMAGES)])
    commonest = float(counts.max() / counts.sum())  # accuracy of always guessing it

    log = RunLog(args, state)
    logging.info("Starting distributed training...")
    with logging_redirect_tqdm():
        for stage, epochs in {"at": args.at_epochs, "dat": args.total_epochs}.items():
            if epochs == 0 or [stage, loop["stage"]] == ["at", "dat"]:
                continue
            reason = train(args, device, stage, data, networks, autocast, state, log, loop)
            if reason:
                return log.stop(reason, steps=loop["step"], stages=loop["best"])
            best = loop["best"][stage]
            figures = {**best["metrics"], "T": best["T"], "commonest class": commonest}
            text = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
            logging.info(f"held out, stage {stage}: {text}")

    baselines = {"commonest class": {"clean": commonest}}
    log.close("finished", steps=loop["step"], best=best, stages=loop["best"], baselines=baselines)
    logging.info("tools/evaluate_rebm.py of the repository measures best.pt on the test set")
    logging.info("Training and evaluation completed successfully!")
    return 0


# --------------------------------------------------------------------------------------------------
# Reading
#
# An image has a row (file, class, part): what read_image opens; or None; TRAIN, VALID or TEST.

SYNTHETIC = ["noise", "blobs"]  # OOD images that need no files
PART_NAMES = {"train": TRAIN, "val": VALID, "valid": VALID, "validation": VALID, "test": TEST}
CIFAR = ["batches.meta", "meta"]  # beside its files
READER = 6  # raise it when you change what is read or kept: else an old cache is used


def find_images(name, shape):
    """(rows of what `name` names, not opened yet; its version, which changes as files change)"""
    path = Path(name)
    if name == "digits":
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        images = np.round(images.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
        parts = np.full(len(images), TRAIN)
        parts[np.random.default_rng(0).permutation(len(images))[:360]] = TEST
        return list(zip(images, labels.tolist(), parts.tolist(), strict=True)), []
    if name in SYNTHETIC and shape:
        return list(draw_images(name, shape)), []
    if not path.exists():
        return find_on_hub(name)
    metas = [*path.glob("*meta"), *path.glob("*/*meta")]
    if path.is_file():
        rows = list(find_in_arrays(path))
        files = [path]
    elif cifar := [meta for meta in metas if meta.name in CIFAR and meta.is_file()]:
        rows = list(find_in_pickles(cifar[0]))
        files = sorted(cifar[0].parent.iterdir())
    else:
        rows = list(find_in_folder(path))
        files = [*path.glob("*/val_annotations.txt"), *[file for file, _, _ in rows]]
    stats = [file.stat() for file in files]
    return rows, [[*map(str, files)], [(stat.st_size, stat.st_mtime_ns) for stat in stats]]


def draw_images(kind, shape):
    """Yields rows that need no files: noise; or blobs, which are noise of 4 x 4 scaled up."""
    channels, image_size = shape
    rng = np.random.default_rng(SYNTHETIC.index(kind))
    side = image_size if kind == "noise" else 4
    for part, count in ((TRAIN, 20_000), (VALID, EVAL_IMAGES), (TEST, 10_000)):
        images = torch.from_numpy(rng.integers(0, 256, (count, channels, side, side), np.uint8))
        if kind == "blobs":
            images = F.interpolate(images.float(), image_size, mode="bilinear").round().byte()
        for image in images.permute(0, 2, 3, 1).numpy():
            yield image, None, part


def warn(found, text):
    """Logs how many were found, and one of them, if it has a name."""
    if found:
        example = f", such as {found[0]}" if isinstance(found[0], (str, Path)) else ""
        logging.warning(f"{len(found):,} {text}{example}")


def find_parts(root):
    """{name of a folder: its part} of train/, val/, test/, or seg_train/, training_set/, ... A
    folder of that name which has no folders is a class, where it is beside others."""
    folders = [path for path in root.iterdir() if path.is_dir() and path.name[0] not in "._"]
    parts = {}
    has_classes = False
    for path in folders:
        words = r"(?:.*[^a-z])?(train|val|test)(?:ing|id|idation|set|data)?(?:[^a-z].*)?"
        if word := re.fullmatch(words, path.name.lower()):
            parts[path.name] = PART_NAMES[word[1]]
            has_classes |= any(child.is_dir() for child in path.iterdir())
    return parts if has_classes or len(parts) == len(folders) else {}


def find_in_folder(root):
    """Yields rows of ROOT/train/CLASS/..., with val and test beside it, if they are there. Or of
    ROOT/CLASS/... In Tiny ImageNet's folders images/ a file has the classes of val/."""
    parts = find_parts(root)
    classes = {}
    for path in root.glob("*/val_annotations.txt"):
        classes = dict(line.split("\t")[:2] for line in path.read_text().splitlines())
    kinds = Image.registered_extensions()
    unread = []
    has_images = {}  # by class
    for path in files_below(root):
        folders = [*path.relative_to(root).parts[:-1], None, None]  # None: there is no folder
        part = parts.get(folders.pop(0)) if parts else TRAIN
        name = folders[0] and unicodedata.normalize("NFC", folders[0])
        if classes and folders[:2] == ["images", None]:
            name = classes.get(path.name)
        is_image = path.name[0] != "." and kinds.get(path.suffix.lower()) in Image.OPEN
        if part is not None:
            has_images[name] = is_image or has_images.get(name, False)
        if is_image and part is not None:
            yield path, name, part
        else:
            unread.append(path)
    for name in has_images:
        if name and not has_images[name]:
            logging.warning(f"{root}: class {name} has no images")
    warn(unread, f"files or folders of {root} are not read as images")


def files_below(folder):
    """Yields all files; of hidden folders only the folder; FOLDER/(empty) of an empty one."""
    for path in sorted(folder.iterdir()) or [folder / "(empty)"]:
        if path.is_dir() and path.name[0] != ".":
            yield from files_below(path)
        else:
            yield path


def find_in_arrays(path):
    """Yields rows of an .npz with x_train, y_train, ... (Keras) or train_images, train_labels, ...
    (MedMNIST); of an .npy, one array of images; of the .mat that SVHN's authors ship. Images are
    uint8 (N, S, S), (N, S, S, C) or (N, C, S, S)."""
    try:
        if path.suffix == ".mat":
            from scipy.io import loadmat

            content = loadmat(path)
            arrays = {"x_train": content["X"].transpose(3, 0, 1, 2), "y_train": content["y"]}
        else:
            arrays = np.load(path)
            arrays = dict(arrays if path.suffix == ".npz" else {"x_train": arrays})
    except Exception as error:  # those of zipfile and zlib, too
        expected = "expected an .npz file of arrays, an .npy of images, or SVHN's .mat"
        raise InputError(f"{path}: {error!r:.200}; {expected}") from None
    for name, part in PART_NAMES.items():
        for x, y in ((f"x_{name}", f"y_{name}"), (f"{name}_images", f"{name}_labels")):
            if x not in arrays:
                continue
            images = arrays.pop(x)
            if images.ndim == 4 and images.shape[1] in (1, 3):
                images = images.transpose(0, 2, 3, 1)
            if images.dtype != np.uint8 or images.ndim not in (3, 4):
                text = f"{x} is {images.dtype} {images.shape}; expected uint8, 0 to 255"
                raise InputError(f"{path}: {text}, (N, S, S) or (N, S, S, 3)")
            if images.max(initial=0) < 2:
                raise InputError(f"{path}: {x} has no pixel above 1; expected 0 to 255")
            labels = arrays.pop(y, np.full(len(images), -1)).ravel()
            if labels.dtype.kind not in "iuU" or len(labels) != len(images):
                text = f"{y} is {labels.dtype} ({len(labels)},)"
                raise InputError(f"{path}: {text}; expected {len(images)} whole numbers, or names")
            unknown = labels == "" if labels.dtype.kind == "U" else labels < 0
            classes = np.where(unknown, None, labels).tolist()
            yield from zip(images, classes, [part] * len(images), strict=True)
    warn(list(arrays), f"arrays of {path} are not read")


class ArrayUnpickler(pickle.Unpickler):
    """Loads arrays and plain values. Anything else in a pickle might run code: it is refused."""

    def find_class(self, module, name):
        known = {"_reconstruct": np.zeros(0).__reduce__()[0], "ndarray": np.ndarray}
        known["dtype"] = lambda kind, *flags: np.dtype(kind)
        if module.startswith("numpy") and name in known:
            return known[name]
        raise pickle.UnpicklingError(f"{module}.{name} is refused")


def find_in_pickles(meta):
    """Yields rows of CIFAR-10 or CIFAR-100 as its authors ship it; their test set is the test."""
    names = ["meta", "train", "test"]
    kind = "fine_label"
    if meta.name == "batches.meta":
        names = [meta.name, *[f"data_batch_{number}" for number in range(1, 6)], "test_batch"]
        kind = "label"
    for path in [meta.with_name(name) for name in names]:
        try:
            with open(path, "rb") as file:
                content = ArrayUnpickler(file, encoding="latin1").load()
            if path == meta:
                known = content[f"{kind}_names"]
                continue
            images = content["data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
            classes = [known[label] for label in content[f"{kind}s"]]
        except (pickle.UnpicklingError, EOFError, LookupError, ValueError) as error:
            raise InputError(f"{path}: {error}; expected it as CIFAR's authors ship it") from None
        part = TEST if path.name.startswith("test") else TRAIN
        yield from zip(images, classes, [part] * len(images), strict=True)


def find_on_hub(name):
    """(rows, version) of the first column of images, and the first of labels."""
    import datasets

    try:
        tables = datasets.load_dataset(*name.split(":"))
    except Exception as error:  # no network, no such name, and many more
        text = f"there is no such folder or file; the hub: {' '.join(str(error).split())[:200]}"
        raise InputError(f"{name}: {text}") from None
    warn([split for split in tables if split not in PART_NAMES], f"splits of {name} are not read")
    rows = []
    for split in [split for split in PART_NAMES if split in tables]:
        table = tables[split]
        kinds = {type(kind): column for column, kind in reversed(table.features.items())}
        image = kinds.get(datasets.Image)
        label = kinds.get(datasets.ClassLabel)
        logging.info(f"{name}, {split}: {image} and {label} are read, of {list(table.features)}")
        if image is None:
            raise InputError(f"{name} has no column of images, but {list(table.features)}")
        classes = [None] * len(table)
        if label:  # some keep those of the test secret: -1
            known = [*table.features[label].names, None]
            classes = [known[number] for number in table[label]]
        column = table[image]
        rows += [((column, i), own, PART_NAMES[split]) for i, own in enumerate(classes)]
    return rows, [table._fingerprint for table in tables.values()]


def read_image(file, channels, image_size):
    """(C, S, S) uint8: the middle of an image, upright; what is transparent becomes white.
    file: a path, an array (S, S) or (S, S, C), or a place in a column of the hub."""
    if isinstance(file, np.ndarray):
        image = Image.fromarray(np.ascontiguousarray(file.squeeze()))
    elif isinstance(file, tuple):
        column, i = file
        image = column[i]
    else:
        image = Image.open(file)
    if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":  # of which MPO has copies
        raise ValueError(f"{image.n_frames} pictures in a file")
    if image.mode[0] in "IF":  # convert would clip their pixels at 255
        raise ValueError(f"mode {image.mode}: expected 8 bits a channel")
    image = ImageOps.exif_transpose(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image.convert("L" if channels == 1 else "RGB")
    image = ImageOps.fit(image, (image_size, image_size), Image.Resampling.BICUBIC)
    return np.asarray(image).reshape(image_size, image_size, channels).transpose(2, 0, 1)


def write_images(name, rows, shape, indist, only_test, folder):
    """Write images.npy (N, C, S, S) uint8; and rows.npz: labels, split and digests (N,), classes.
    indist: the images to classify, None if these are it. (rank 0)"""
    files, names, parts = zip(*rows, strict=True)
    known = [file if isinstance(file, Path) else f"image {i}" for i, file in enumerate(files)]
    array_shape = (len(rows), shape[0], shape[1], shape[1])
    images = np.lib.format.open_memmap(folder / "images.npy", "w+", np.uint8, array_shape)
    with open(folder / "images.npy", "r+") as file:  # mapped, a full disk would kill this process
        os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
    bad = []

    def read(i):
        try:
            images[i] = read_image(files[i], *shape)
        except Exception as error:  # Pillow raises many kinds
            bad.append(f"{known[i]}: {' '.join(str(error).split())}")
        return hashlib.blake2b(images[i].tobytes(), digest_size=8).digest()

    with ThreadPool() as pool:
        done = pool.imap(read, range(len(rows)), chunksize=64)
        digests = list(tqdm(done, total=len(rows), desc="reading", disable=None, leave=False))
    digests = np.frombuffer(b"".join(digests), np.uint64)
    if bad:
        said = "\n  ".join(sorted(bad)[:20])
        raise InputError(f"{name}: {len(bad)} images cannot be read:\n  {said}")

    names = names if indist is None else ["OOD images"] * len(rows)
    classes, labels = np.unique(names, return_inverse=True)
    classes = classes.astype(str).tolist()
    if indist is None and len(classes) < 2:
        raise InputError(f"{name} has one class, {classes[0]}; two are needed: see --help")

    # where none are held out, some to train on are; or all, if only the test is asked for
    split = np.array(parts, np.uint8)
    if only_test and set(split) == {TRAIN}:
        split[:] = TEST
    if TEST not in split:  # a single part beside train is the test
        split[split == VALID] = TEST
    rng = np.random.default_rng(0)
    for part, share, most in ((TEST, 0.15, 10_000), (VALID, 0.07, EVAL_IMAGES)):
        if part not in split:
            train = rng.permutation(np.flatnonzero(split == TRAIN))
            split[train[: min(most, round(share * len(train)))]] = part

    # no image of one part may equal one of another, nor an OOD image one to classify
    seen = np.zeros(0, np.uint64) if indist is None else indist.digests
    for part in (TEST, VALID, TRAIN):
        own = split == part
        split[own & np.isin(digests, seen)] = UNUSED
        seen = np.concatenate([seen, digests[own]])
    copies = [known[i] for i in np.flatnonzero(split == UNUSED)]
    warn(copies, f"images of {name} equal held-out ones, or those to classify: left out")
    uses = {TEST: "test"} if only_test else {TRAIN: "train", VALID: "validate", TEST: "test"}
    for part, use in uses.items():
        lost = [classes[i] for i in np.setdiff1d(range(len(classes)), labels[split == part])]
        if lost and (part == TRAIN or len(lost) == len(classes)):
            raise InputError(f"{name}: nothing to {use} on of {', '.join(lost[:20])}")
        warn(lost, f"of {len(classes)} classes of {name} have nothing to {use} on")
    classes = classes if indist is None else []
    np.savez(folder / "rows.npz", labels=labels, split=split, digests=digests, classes=classes)


def prepare(args, name, indist=None, only_test=False):
    """The folder with the images that `name` names, read once, and again if its files change.
    indist: the images to classify, if these are OOD images, which get the same shape. only_test:
    images without parts are all for the test. (rank 0)"""
    try:
        rows, version = find_images(name, indist and indist.shape)
    except OSError as error:  # a folder that may not be read, a link that leads nowhere
        raise InputError(f"{name}: {error}") from None
    if indist is None:
        loose = [file for file, own, _ in rows if own is None]
        warn(loose, f"images of {name} have no class, or one that is not known: left out")
        rows = [row for row in rows if row[1] is not None]
    if not rows:
        text = "no images there, or no classes"
        raise InputError(f"{name}: {text}; expected train/CLASS/..., or x_train and y_train")

    first = rows[0][0]
    image_size, _, *colors = first.shape if isinstance(first, np.ndarray) else (32, 32, 3)
    channels = 1 if args.grey or colors in ([], [1]) else 3
    shape = indist.shape if indist else (channels, args.size or image_size)
    key = [READER, name, indist and indist.hash, shape, len(rows), version, only_test]
    write = functools.partial(write_images, name, rows, shape, indist, only_test)
    return cached(args.cache_dir, "images", key, write)


# ==================================================================================================
# Distributed training. These lines are the same in every script: read them once.

START = time.monotonic()
SCRIPT = Path(sys.argv[0]).name
sys.stderr = sys.stderr or open(os.devnull, "w")  # where it is closed

# In these a launcher tells a process its rank, the number of ranks, and its rank on this machine.
LAUNCHERS = [
    ["RANK", "WORLD_SIZE", "LOCAL_RANK"],  # torchrun
    ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"],  # Open MPI
    ["PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID"],  # PALS (Aurora) ...
    ["PALS_RANKID", "WORLD_SIZE", "PALS_LOCAL_RANKID"],  # ... where the job exports WORLD_SIZE
    ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"],  # MPICH, Intel MPI
    ["FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"],  # flux run
    ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_ID"],  # srun (sbatch: no step)
    ["RANK", "WORLD_SIZE", "RANK"],  # by hand, on one machine
]

# options that may differ when a run is resumed; with others it would be another run
FREE_ON_RESUME = """config output_dir cache_dir fresh batch_size num_workers compile deterministic
    save_every keep_every max_minutes log_every wandb_mode nproc_per_node device backend
    timeout_minutes""".split()

STOP_SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
# nohup ignores SIGHUP; but where torchrun sends it, to end its ranks, they have to save
if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN or "TORCHELASTIC_RUN_ID" in os.environ:
    STOP_SIGNALS.append(signal.SIGHUP)
HINT = "give the same again, another --output_dir, or --fresh, which moves the old run aside"
stop_signal = ""  # name of the last signal that asked this process to stop
folder_lock = None  # the file that rank 0 keeps open, and so locked, as long as it lives


class InputError(Exception):
    """What the user gave cannot work: one line, no traceback, status 2."""


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """--help with the docstring as it stands and the default of every option."""


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise InputError(message)  # so that one rank says it, not all


def number(least, most=math.inf, kind=float):
    """The type of options that are numbers within limits."""

    def parse(text):
        value = kind(text)
        if not least <= value <= most or value == math.inf:
            raise argparse.ArgumentTypeError(f"{text}: must be from {least} to {most}")
        return value

    parse.__name__ = "number"  # in argparse's own messages
    return parse


def boolean(text):
    if text.lower() not in ("true", "yes", "1", "false", "no", "0"):
        raise argparse.ArgumentTypeError(f"{text} is neither True nor False")
    return text.lower() in ("true", "yes", "1")


def expanded(text):
    """The type of options that are paths: ~/ and $SCRATCH mean the same in a config file."""
    path = os.path.expanduser(os.path.expandvars(text))
    if "$" in path:
        raise argparse.ArgumentTypeError(f"{text}: there is no such variable")
    if Path(path).is_fifo():  # each rank would read a part of it
        raise argparse.ArgumentTypeError(f"{text} is a pipe: give a file")
    return path


COUNT = number(1, kind=int)
NATURAL = number(0, kind=int)
# an option that may be given as --compile, --compile=True, --compile no
FLAG = {"type": boolean, "nargs": "?", "const": True, "default": False, "metavar": "BOOL"}


def add_common_arguments(parser, output_dir, precision="auto"):
    add = parser.add_argument_group("the same in every script").add_argument
    add("--config", type=expanded, help="YAML file of options; the command line wins")
    add("--output_dir", type=expanded, default=output_dir, help="a run found there is resumed")
    add("--cache_dir", type=expanded, default="cache", help="where what is read once is kept")
    add("--prepare_only", **FLAG, help="read the data into --cache_dir, no more")
    add("--fresh", **FLAG, help="start anew; the old run is moved aside")
    add("--seed", type=number(0, 2**32, int), default=42, help="of all that is random")
    add("--batch_size", type=NATURAL, default=0, help=f"micro-batch; 0: {BATCH_SIZE}, or what fits")
    add("--global_batch_size", type=NATURAL, default=0, help="of a step; 0: batch_size x GPUs")
    add("--num_workers", type=NATURAL, default=0, help="processes that make batches")
    add("--max_grad_norm", type=number(0), default=1.0, help="clip the gradient; 0: do not")
    choices = ["auto", "fp32", "tf32", "bf16"]
    add("--precision", default=precision, choices=choices, help="auto: bf16 on GPUs, else fp32")
    add("--deterministic", **FLAG, help="bit-identical repeats on GPUs, too; slower")
    add("--compile", **FLAG, help="torch.compile the model for training")
    add("--save_every", type=COUNT, default=500, help="steps between saves of latest.pt")
    add("--keep_every", type=NATURAL, default=0, help="steps between kept step_N.pt; 0: none")
    add("--max_minutes", type=number(0), default=0, help="then save and stop; 0: no limit")
    add("--log_every", type=COUNT, default=10, help="steps between log lines")
    add("--wandb_mode", default="disabled", choices=["online", "offline", "disabled"], help="wandb")
    add("--nproc_per_node", type=COUNT, default=1, help="processes to start, if no launcher did")
    add("--device", default="auto", choices=["auto", "cuda", "xpu", "cpu"], help="auto: GPU or CPU")
    choices = ["auto", "nccl", "gloo", "xccl", "ccl", "xpu"]
    add("--backend", default="auto", choices=choices, help="auto (also ccl, xpu): by the device")
    minutes = float(os.environ.get("NCCL_TIMEOUT") or 1800) / 60  # many guides export it
    add("--timeout_minutes", type=number(0.01), default=minutes, help="limit of one collective")
    # torch.distributed.launch gives it, but also sets RANK: ignore it
    add("--local_rank", "--local-rank", type=lambda text: None, help=argparse.SUPPRESS)


def parse_with_config(parser):
    """Options of the command line; else of the --config file; else the defaults."""
    args = parser.parse_args()
    if args.config is None:
        return args
    try:
        content = yaml.load(Path(args.config).read_text(encoding="utf-8-sig"), UniqueKeyLoader)
        if not isinstance(content, dict):
            raise InputError("expected lines such as batch_size: 32")
        words = config_words(content, parser)
        names = [word.partition("=")[0] for word in words if word[:2] == "--"]
        names += [word[:8] for word in sys.argv if word.partition("=")[0] == "--config"]
        if len(set(names)) < len(names):  # in two sections, or files
            raise InputError(f"{max(names, key=names.count)} is given twice")
        parser.parse_args(words)
    except (OSError, ValueError, yaml.YAMLError, InputError) as error:
        raise InputError(f"--config {args.config}: {' '.join(str(error).split())}") from None
    return parser.parse_args([*words, *sys.argv[1:]])  # of two values the later one counts


class UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a key that is given twice, of which yaml would take the last one."""

    def construct_mapping(self, node, deep=False):
        keys = [str(key.value) for key, _ in node.value]
        if len(set(keys)) < len(keys):
            raise InputError(f"{max(keys, key=keys.count)} is given twice")
        return super().construct_mapping(node, deep)


def config_words(content, parser, prefix="--"):
    """A YAML file as a command line. A section only groups options, unless their names begin with
    it: where there are options --attack_..., attack: {lr: 1} is --attack_lr, never --lr."""
    options = parser._option_string_actions
    words = []
    for key, value in content.items():
        name = prefix + str(key).removeprefix(prefix[2:])  # --attack_lr, of lr and of attack_lr
        if isinstance(value, dict):
            is_prefix = any(option.startswith(f"{name}_") for option in options)
            words += config_words(value, parser, f"{name}_" if is_prefix else prefix)
        elif isinstance(value, list):
            words += [name, *map(str, value)]
        elif value is not None:  # left empty: the default
            words.append(f"{name}={value}")
    return words


def find_ranks():
    """(rank, number of ranks, rank on this machine), from the launcher"""
    for names in LAUNCHERS:
        values = [os.environ.get(name) for name in names]
        if all(values):
            return [int(value) for value in values[:3]]
    return 0, 1, 0


def setup_ddp(args):
    """Start the log, choose the device, join the process group; returns the device. (all ranks)"""
    # plain python is a group of one: the code below has one path only
    rank, world_size, local_rank = find_ranks()
    form = f"[RANK {rank}] %(asctime)s %(levelname)s: %(message)s"
    logging.basicConfig(format=form, level=logging.INFO, stream=sys.stdout)
    logging.raiseExceptions = False  # if nobody reads the log any more, train on
    logging.info(f"Process {rank}/{world_size} started")
    # once it has freed a block this large, glibc keeps freed memory for what is made next: faster
    torch.empty(2**25 - 2**13, dtype=torch.uint8)
    device = choose_device(args, local_rank)
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS repeats nothing
        torch.use_deterministic_algorithms(True)

    default_backend = dist.get_default_backend_for_device(device)
    backend = default_backend if args.backend in ("auto", "ccl", "xpu") else args.backend
    if backend not in (default_backend, "gloo"):
        raise InputError(f"--backend {backend} is not for {device.type}")
    options = {"timeout": timedelta(minutes=args.timeout_minutes)}
    if device.type != "cpu":
        # Python objects, such as a checkpoint, go from rank to rank without the GPU's memory
        backend = f"cpu:gloo,{device.type}:{backend}"
        options["device_id"] = device
    if not os.environ.get("MASTER_ADDR"):
        if rank != local_rank:  # there are ranks elsewhere
            raise InputError("several machines: export MASTER_ADDR, the name of the first one")
        os.environ["MASTER_ADDR"] = "localhost"
    if not os.environ.get("MASTER_PORT"):
        os.environ["MASTER_PORT"] = "29500" if world_size > 1 else "0"  # 0: any free one
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    logging.info(f"Initializing DDP for rank {rank}... at {address}")
    # Python's own handler would not run while torch waits for the other ranks
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # if another program listens on the port, torch would wait for ever
    signal.alarm(math.ceil(60 * args.timeout_minutes) + 3)
    dist.init_process_group(backend, rank=rank, world_size=world_size, **options)
    signal.alarm(0)
    ranks_on_host = gather(os.uname().nodename).count(os.uname().nodename)
    is_bound = len(os.sched_getaffinity(0)) < os.cpu_count()
    if "OMP_NUM_THREADS" not in os.environ and not is_bound:  # else each rank takes all cores
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks_on_host))
    if rank > 0:
        logging.getLogger().setLevel(logging.ERROR)  # from here on others log errors only
    logging.info(f"{world_size} ranks, {backend} on {device}, torch {torch.__version__}")
    return device


def choose_device(args, local_rank):
    """A GPU for this rank, or the CPU where there is none."""
    device_type = getattr(torch.accelerator.current_accelerator(True), "type", "cpu")
    if args.device not in ("auto", "cpu", device_type):
        raise InputError(f"--device {args.device}: this torch finds only {device_type} here")
    if args.device == "cpu" or device_type not in ("cuda", "xpu"):
        return torch.device("cpu")

    # torchrun shows all GPUs to all ranks; mpiexec and srun may show each rank its own one
    count = torch.accelerator.device_count()
    if count > 1 and local_rank >= count:
        raise InputError(f"{count} GPUs here, and a rank {local_rank}: start fewer processes")
    device = torch.device(device_type, local_rank % count)
    torch.accelerator.set_device_index(device.index)
    return device


def on_signal(number, frame):
    global stop_signal
    stop_signal = signal.Signals(number).name  # training ends its step first, and saves


def cleanup():
    gather(None)  # rank 0 may still write, and some launchers kill it when another rank has ended
    dist.destroy_process_group()


def launch(parse_args, main):
    """Run main(args) as this rank, or become torchrun to start --nproc_per_node ranks."""
    rank, world_size, _ = find_ranks()
    try:
        args = parse_args()
        if args.nproc_per_node > 1 and world_size == 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
            become_torchrun(args.nproc_per_node)
        status = main(args)
        cleanup()
    except InputError as error:
        if rank > 0:  # rank 0 says it for all, if it has the same error, and the launcher ends us
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(3)
        sys.stderr.write(f"{SCRIPT}: error: {error}\n")
        status = 2
    except (Exception, KeyboardInterrupt):
        traceback.print_exc()
        status = 1
    logging.shutdown()  # flushes standard output, and ignores that it may be closed
    os._exit(status)  # at once: a cleanup would wait for other ranks, which may wait for this one


def become_torchrun(processes):
    """Go on as torchrun, which hands all signals to the ranks, and gives them time to save."""
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "120")  # seconds
    # torchrun would set 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // processes)))
    signals = ",".join(stop.name for stop in STOP_SIGNALS)
    options = ["--standalone", f"--nproc_per_node={processes}", f"--signals-to-handle={signals}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *options, "--local-addr=127.0.0.1"]
    os.execv(sys.executable, [*torchrun, *sys.argv])


def gather(value):
    """[value of rank 0, value of rank 1, ...] on every rank. (all ranks)"""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_rank0(function, *args, group=None):
    """What function(*args) returns, or raises, on rank 0: on all ranks. (all ranks)"""
    outcome = [None, None]  # result, error
    if dist.get_rank() == 0:
        try:
            outcome[0] = function(*args)
        except Exception as error:  # not every error can be sent to the ranks, but its text can
            is_ours = isinstance(error, InputError)
            outcome[1] = error if is_ours else RuntimeError(traceback.format_exc())
    dist.broadcast_object_list(outcome, group=group)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def cached(cache_dir, name, key, write):
    """The folder of what write(folder) makes, once for each key: whole, or not at all. (rank 0)"""
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    folder = Path(cache_dir) / f"{name}-{digest}"
    if os.path.exists(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = tempfile.TemporaryDirectory(dir=folder.parent, prefix="unfinished-")
    except OSError as error:
        raise InputError(f"--cache_dir {cache_dir} is not writable: {error}") from None
    with unfinished:
        new = Path(unfinished.name) / "data"
        new.mkdir()
        write(new)
        if not folder.exists():  # else another run was faster
            new.rename(folder)
    return folder


def read_once(prepare, args):
    """The folder that prepare(args) returns on rank 0, however long it takes. (all ranks)"""
    if dist.get_rank() == 0:  # a signal raises KeyboardInterrupt: what is half written is removed
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # a group of its own: a collective of the default one fails after --timeout_minutes
    reading_group = dist.new_group(backend="gloo", timeout=timedelta(days=30))
    folder = on_rank0(prepare, args, group=reading_group)
    if not os.access(folder, os.R_OK | os.X_OK):
        raise InputError(f"{folder} cannot be read here: all ranks must see --cache_dir")
    return folder


class GlobalBatchSampler(DistributedSampler):
    """Which samples each step is made of. They depend on (seed, epoch) alone, and so neither on the
    number of ranks nor on a restart.

    Yields for each micro-batch of this rank, from step `start` on: the step; the ids of the whole
    global batch; the positions in it of this rank's samples (seed random draws by them).

    cost[id] is the work that a sample makes, such as its length. The global batch is a random one.
    In it samples of similar cost share a micro-batch, and all micro-batches of all ranks are of
    equal work. room: the largest sum of costs that fits a GPU; 0: there is none."""

    def __init__(self, ids, args, cost, room=0):
        super().__init__(ids, seed=args.seed)
        self.ids = ids
        self.cost = cost
        self.global_batch = args.global_batch_size
        self.steps = len(ids) // self.global_batch  # an epoch leaves out the few that are left over
        self.start = 0
        ranks = self.num_replicas
        self.accumulation = math.ceil(self.global_batch / ((args.batch_size or BATCH_SIZE) * ranks))
        if args.batch_size == 0 and room > 0:  # if they are large, a GPU waits for the host less
            work = cost[ids].mean() * self.global_batch / ranks
            most = cost[ids].max()
            fewest = math.ceil(work / max(room - 2 * most, most))  # see cut_by_work
            self.accumulation = max(1, min(fewest, self.global_batch // ranks))
        parts = ranks * self.accumulation
        if not parts <= self.global_batch <= len(ids):
            limits = f"{parts} (ranks x micro-batches) to {len(ids)} (to train on)"
            raise InputError(f"--global_batch_size {self.global_batch}: must be from {limits}")
        each = self.global_batch / parts
        text = f"{each:g} per GPU x {ranks} GPUs x {self.accumulation} micro-batches"
        logging.info(f"  Total batch size: {self.global_batch:,} ({text})")

    def __iter__(self):
        for step in itertools.count(self.start):
            epoch, position = divmod(step, self.steps)
            if position == 0 or step == self.start:
                order = np.random.default_rng([self.seed, epoch]).permutation(self.ids)
            global_ids = order[position * self.global_batch : (position + 1) * self.global_batch]
            global_ids = global_ids[np.argsort(self.cost[global_ids], kind="stable")]
            cuts = cut_by_work(self.cost[global_ids], self.accumulation, self.num_replicas)
            for positions in np.split(np.arange(len(global_ids)), cuts):
                yield step, global_ids, positions[self.rank :: self.num_replicas]


def cut_by_work(cost, micro_batches, ranks):
    """Where to cut samples of rising cost (n,) for micro-batches of equal work, each with one for
    every rank. A rank that takes every ranks-th has too much by less than twice the largest."""
    total = np.cumsum(cost)
    number = np.arange(1, micro_batches)
    cuts = np.rint(np.searchsorted(total, total[-1] * number / micro_batches, "right") / ranks)
    cuts = np.maximum.accumulate(np.maximum(cuts - number, 0)) + number  # at least one for a rank
    return np.minimum(ranks * cuts.astype(int), len(cost) - ranks * number[::-1])


def room_on_gpu(model, device):
    """Bytes of a GPU for the activations of a micro-batch of this rank; 0 on a CPU. (all ranks)"""
    if device.type == "cpu":
        return 0
    properties = torch.get_device_module(device).get_device_properties(device)
    gpus = gather((os.uname().nodename, str(properties.uuid), properties.total_memory))
    memory = min(gpu[-1] / gpus.count(gpu) for gpu in gpus)  # some ranks may share a GPU
    # weights, gradient, optimizer, averaged weights and a copy in bf16 take 24 bytes a parameter
    return max(1, 0.7 * memory - 24 * sum(p.numel() for p in model.parameters()))


def make_loader(dataset, sampler, args, device):
    """An endless iterator over micro-batches. The host makes the next one while a GPU computes; if
    that takes longer than the GPU needs (data_wait is high), give --num_workers."""
    loader = DataLoader(
        dataset,
        batch_size=None,  # the sampler makes whole batches
        sampler=sampler,
        num_workers=args.num_workers,
        # forked workers share the dataset's memory; others would each be sent a copy
        multiprocessing_context="fork" if args.num_workers > 0 else None,
        pin_memory=device.type != "cpu",
        worker_init_fn=start_worker,
    )
    if args.num_workers > 0:
        # A fork while a thread of gloo holds Python's lock would hang (before Python 3.12: cpython
        # issue 112275). It does for a moment after each collective.
        time.sleep(0.2)
    return iter(loader)


def start_worker(worker):
    """Called in each worker of a loader."""
    # a launcher sends its signals to the workers, too, but their rank needs them to end its step
    for stop in STOP_SIGNALS:
        signal.signal(stop, signal.SIG_IGN)
    # Send batches through a pipe. Torch's own way, a file in shared memory for each tensor, is slow
    # for small ones, and hangs where /dev/shm is full.
    ForkingPickler.register(torch.Tensor, lambda tensor: (torch.from_numpy, (tensor.numpy(),)))


def choose_precision(args, device):
    """A function that makes the context of a forward pass: torch.autocast for bf16."""
    precision = args.precision
    if precision == "auto":
        has_bf16 = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
        precision = "bf16" if device.type != "cpu" and has_bf16 else "fp32"
        logging.info(f"  Precision: {precision}")
    # cuDNN rounds to TF32 unless told otherwise
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    return functools.partial(torch.autocast, device.type, torch.bfloat16, precision == "bf16")


def wrap_ddp(model, args, device):
    compiled = torch.compile(model) if args.compile else model
    torch._dynamo.config.optimize_ddp = False  # to split it at DDP's buckets fails if shapes vary
    if dist.get_world_size() == 1:  # nothing to add up
        return compiled
    ddp_model = DistributedDataParallel(compiled, gradient_as_bucket_view=True)
    ddp_model.broadcast_buffers = False  # they are alike. (Torch 2.13 renames the argument.)
    # After its first backward pass DDP reorders the gradients, and sums over three or more ranks
    # change in the last bit. So make that pass now, through nn.Identity, with a loss of 0.
    network = ddp_model.module
    ddp_model.module = nn.Identity()
    zero = sum((p * 0).sum() for p in model.parameters() if p.requires_grad)
    ddp_model(zero).backward()
    ddp_model.module = network
    ddp_model.zero_grad()
    return ddp_model


def seed_step(args, step):
    """Dropout depends on (seed, step, rank) alone: there is no random state to be saved."""
    seed = (args.seed * 1_000_003 + step) * 4099 + dist.get_rank()
    torch.default_generator.manual_seed(seed)  # torch.manual_seed asks all kinds of devices: slow
    if torch.accelerator.is_available():
        torch.get_device_module().manual_seed(seed)


def update_if_finite(args, optimizer):
    """Clip, and step if the gradient is finite. Returns its norm. With a fused optimizer nothing is
    read from the device, so that the host can go on and queue the next step."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = nn.utils.clip_grad_norm_(parameters, args.max_grad_norm or math.inf)
    # All ranks have the same gradients by now: a NaN of one is on every rank, and all skip alike.
    if optimizer.defaults.get("fused"):
        optimizer.found_inf = (~norm.isfinite()).float()  # 1: step() changes nothing
        optimizer.step()
    elif norm.isfinite():  # the host waits for the device here, which costs speed
        optimizer.step()
    optimizer.zero_grad()
    return norm


class Meter:
    """Sums what the steps give, on the device.

    To read a number the host waits for the GPU, and then the GPU for the host. So a step reads
    nothing. About once a second, and for every log line, the ranks meet: they read their sums, and
    agree whether to stop."""

    def __init__(self, names, args, device):
        self.names = names  # of metrics (n,): the sum over the ranks is that of the step
        self.args = args
        # of the steps whose gradient was finite: their metrics, its norm, and how many they are
        self.sums = torch.zeros(len(names) + 2, device=device)
        self.bad_in_row = torch.zeros((), device=device)
        self.every = 1  # steps from one meeting to the next
        self.start()

    def start(self):
        self.sums.zero_()
        self.steps = 0
        self.data_wait = 0.0
        self.began = time.monotonic()

    def next_batch(self, batches, device):
        asked = time.monotonic()
        batch = next(batches).to(device)
        self.data_wait += time.monotonic() - asked
        return batch

    def add(self, metrics, norm):
        values = torch.cat([metrics, norm.reshape(1), torch.ones_like(norm).reshape(1)])
        is_finite = norm.isfinite()
        self.sums += torch.where(is_finite, values, 0.0)
        self.bad_in_row = torch.where(is_finite, 0.0, self.bad_in_row + 1)
        self.steps += 1

    def log_and_agree(self, log, row, samples_per_step, now=False):
        """Agree whether to stop. Every --log_every steps, or now, write `row`, to which this adds
        the means and the speed. Returns why to stop, "" if training goes on. (all ranks)"""
        must_log = now or row["step"] % self.args.log_every == 0
        if not must_log and self.steps % self.every > 0:
            return ""
        sums = self.sums.tolist()  # waits for the device
        seconds = time.monotonic() - self.began
        is_late = 0 < 60 * self.args.max_minutes < time.monotonic() - START
        wish = "time limit" if is_late else stop_signal  # "": go on
        everyone = gather([sums, seconds, self.data_wait, wish])
        all_sums, all_seconds, all_waits, wishes = zip(*everyone, strict=True)
        # the next meeting is in about a second, by the clock of rank 0: after the same step for all
        self.every = max(1, int(self.steps / all_seconds[0]))
        reason = max(wishes)
        if not must_log and not reason:
            return ""

        *_, norm, good = sums  # the same on all ranks
        if self.bad_in_row >= 10:
            raise RuntimeError("10 steps in a row without a finite gradient: a lower rate?")
        if good > 0:
            for name, total in zip(self.names, np.sum(all_sums, axis=0), strict=False):
                row[name] = total / good
            row["grad_norm"] = norm / good
        row["skipped"] = self.steps - good
        row["samples_per_s"] = self.steps * samples_per_step / all_seconds[0]
        row["data_wait"] = max(all_waits) / all_seconds[0]
        if self.sums.device.type != "cpu":
            row["peak_gb"] = torch.accelerator.max_memory_allocated() / 1e9  # of rank 0
        log.write(row)
        self.start()
        return reason


def save_checkpoint(name, args, log, loop, **contents):
    """Write OUTPUT_DIR/name. Modules and optimizers in `contents` give their state. (rank 0)"""
    if dist.get_rank() > 0:
        return
    state = {"script": SCRIPT, "args": vars(args), "loop": loop}
    state.update(wandb_id=log.wandb_id, log_size=log.path.stat().st_size)
    for key, value in contents.items():
        state[key] = value.state_dict() if hasattr(value, "state_dict") else value
    new = Path(args.output_dir) / "new.tmp"
    with open(new, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(new.with_name(name))  # which is never half written


def lock_folder(folder):
    """Only one run works in a folder. (rank 0)"""
    global folder_lock
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder_lock = open(folder / "lock", "a")
        fcntl.lockf(folder_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"another run is at work in {folder}: give another --output_dir") from None
    except OSError as error:
        raise InputError(f"--output_dir {folder} is not writable: {error}") from None


def find_checkpoint(args):
    """The state to go on from; None for a new run. (rank 0)"""
    folder = Path(args.output_dir)
    latest = folder / "latest.pt"
    summary = folder / "summary.json"  # of a run that has ended
    if args.fresh and (latest.exists() or summary.exists()):
        moved = folder.rename(f"{folder}.old-{time.strftime('%Y%m%d-%H%M%S')}")
        logging.info(f"--fresh: what {folder} had is now in {moved}")
        lock_folder(folder)
    if latest.exists():
        return torch.load(latest, map_location="cpu", weights_only=True)
    if summary.exists():
        raise InputError(f"{folder} holds a run without its latest.pt: --fresh moves it aside")
    return None


def open_run(args, free_on_resume):
    """Before anything long: lock --output_dir, which only rank 0 needs to see, settle the batch and
    compare options. Returns the state to go on from, None for a new run. (all ranks)"""
    if args.prepare_only:
        return None
    restarts = [os.environ.get(f"{name}_RESTART_COUNT", "0") for name in ("TORCHELASTIC", "SLURM")]
    args.fresh = args.fresh and restarts == ["0", "0"]  # a launcher that restarts gives it again
    on_rank0(lock_folder, Path(args.output_dir))
    state = None if args.fresh else on_rank0(find_checkpoint, args)
    if state and state.get("script") != SCRIPT:
        raise InputError(f"{args.output_dir} holds a run of {state.get('script')}: {HINT}")
    if args.global_batch_size == 0:
        args.batch_size = args.batch_size or BATCH_SIZE
        args.global_batch_size = args.batch_size * getattr(args, "accum", 1) * dist.get_world_size()
        if state:  # a resumed run keeps its own, on any number of ranks
            args.global_batch_size = state["args"]["global_batch_size"]
            logging.info(f"the run keeps its --global_batch_size {args.global_batch_size}")
    for rank, theirs in enumerate(gather(vars(args))):
        different = [name for name in theirs if theirs[name] != vars(args).get(name)]
        if different:
            text = f"rank {rank} has another {' and '.join(different)}"
            raise InputError(f"{text}: are there two jobs on one MASTER_PORT?")
    saved = state["args"] if state else vars(args)
    for name, value in vars(args).items():
        if value != saved.get(name) and name not in [*FREE_ON_RESUME, *free_on_resume]:
            text = f"{name} is {value}, and {args.output_dir} has a run with {saved.get(name)}"
            raise InputError(f"{text}: {HINT}")
    where = f" at step {state['loop']['step']}" if state else ""
    logging.info(f"{'resuming' if state else 'a new run in'} {args.output_dir}{where}")
    return state


def begin_run(args, state, data_hash):
    """Once all is read. From here on a signal ends the run after a step. (all ranks)"""
    args.data_hash = data_hash
    if len(set(gather(data_hash))) > 1:
        raise InputError("the ranks have read different data: all must see one --cache_dir")
    if state and state["args"]["data_hash"] != data_hash:
        raise InputError(f"{args.output_dir} has a run on other data (data_hash): {HINT}")
    if args.fresh:  # the data are good: move the old run aside
        on_rank0(find_checkpoint, args)
    for stop in STOP_SIGNALS:
        signal.signal(stop, on_signal)


class RunLog:
    """The log line, metrics.jsonl and wandb; at the end summary.json, curves.png. (all ranks)"""

    def __init__(self, args, state):
        self.args = args
        self.path = Path(args.output_dir) / "metrics.jsonl"
        self.wandb_id = state["wandb_id"] if state else os.urandom(4).hex()
        self.wandb = None
        self.trained = (state["loop"]["step"], state["args"]) if state else (-1, {})
        if dist.get_rank() > 0:
            return
        # steps after the checkpoint (without one: all) are made again: remove their lines
        self.path.touch()
        os.truncate(self.path, min(state["log_size"], self.path.stat().st_size) if state else 0)
        self.path.with_name("summary.json").unlink(missing_ok=True)  # of a run that had ended
        if args.wandb_mode != "disabled":
            import wandb

            # Only an online run can be resumed: of an offline one `wandb sync` would overwrite what
            # was sent before. So there each start has an id of its own, in one group.
            online = {"id": self.wandb_id, "resume": "allow"} if args.wandb_mode == "online" else {}
            project = os.environ.get("WANDB_PROJECT", Path(SCRIPT).stem)
            options = {"group": self.wandb_id, "mode": args.wandb_mode, "config": vars(args)}
            self.wandb = wandb.init(project=project, **options, **online)

    def write(self, row):
        logging.info(" ".join(f"{name}={value:.6g}" for name, value in row.items()))
        if dist.get_rank() > 0:
            return
        with open(self.path, "a") as file:
            file.write(json.dumps(row) + "\n")
        if self.wandb:
            self.wandb.log(row, step=row["step"])

    def close(self, status, **summary):
        """status: "finished", or why the run was stopped"""
        if dist.get_rank() > 0:
            return
        steps, options = self.trained
        if summary["steps"] > steps:  # else it keeps the options with which the steps were made
            options = vars(self.args)
        summary.update(status=status, script=SCRIPT, args=options, torch=torch.__version__)
        summary.update(world_size=dist.get_world_size(), seconds=round(time.monotonic() - START, 1))
        if torch.accelerator.is_available():
            summary["peak_gb"] = torch.accelerator.max_memory_allocated() / 1e9
        self.path.with_name("summary.json").write_text(json.dumps(summary, indent=1))
        self.draw()
        if self.wandb:
            self.wandb.finish()

    def stop(self, reason, **summary):
        """Returns the exit status: a time limit, and the SIGUSR1 of a batch queue, are planned."""
        self.close(f"stopped by {reason}", **summary)
        logging.info(f"stopped by {reason}: the same command (without --fresh) goes on")
        return 0 if reason in ("time limit", "SIGUSR1") else 1

    def draw(self):
        """curves.png: a panel for each column of metrics.jsonl that changes, or has one value"""
        import pandas

        rows = pandas.read_json(self.path, lines=True)
        if len(rows) > 0:  # a run that is stopped at once has none
            rows = rows.set_index("step").drop(columns=["phase", "epoch"], errors="ignore")
            rows = rows.loc[:, (rows.nunique() > 1) | (rows.count() == 1)]
            size = (8, 2 * len(rows.columns))
            axes = rows.interpolate("index", limit_area="inside").plot(subplots=True, figsize=size)
            rows.plot(subplots=True, ax=axes, style=".", markersize=5, legend=False)  # as measured
            axes[0].figure.savefig(self.path.with_name("curves.png"), bbox_inches="tight")


if __name__ == "__main__":
    launch(parse_args, main)
