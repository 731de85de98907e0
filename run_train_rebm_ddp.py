"""Train a robust energy-based model of images: one network that classifies under attack, tells
images from what is no image of their kind, and generates them.

Dual adversarial training (Yin et al. 2025, arXiv 2510.13872). The logits f(x) of a classifier are
also an energy, E(x) = -logsumexp f(x). Stage 1 (at) is adversarial training of the classifier.
Stage 2 (dat) adds a loss that tells real images from out-of-distribution (OOD) images that an
attack of T steps has made look real. T grows when the network tells them apart too easily.

    python run_train_rebm_ddp.py configs/config_rebm_quickstart.yaml     # digits, no download
    torchrun --nproc_per_node=4 run_train_rebm_ddp.py configs/config_rebm_cifar10.yaml
    python run_train_rebm_ddp.py --data photos --image_shape 3x64        # photos/train/CLASS/*.jpg
    python run_train_rebm_ddp.py configs/config_rebm_cifar10.yaml attack.max_steps=100 use_ddp=False

Data (--data, --outdist_data): a folder with train/CLASS/..., perhaps val/ and test/, or with the
classes alone; an .npz file of uint8 arrays (N, S, S) or (N, S, S, 3), x_train with labels y_train,
perhaps x_val and x_test; or a data set of the hub. Lengths of attacks are in the unit of pixels,
which are in [0, 1]. Afterwards, in the repository: tools/evaluate_rebm.py, tools/generate_rebm.py.

Logged, over all ranks: step, phase (1 at, 2 dat), epoch, lr, loss (its parts: clf_loss, cross
entropy in nats, and bce, binary cross entropy), grad_norm (before clipping), skipped (steps whose
gradient was not finite), samples_per_s, data_wait (share of the time); in stage 2 T, and auc (real
against attacked OOD images, by f_y(x) for the label y that the attack raises). val/STAGE/..., of
the averaged weights on held-out images: clean and robust (accuracy without and under attack),
cross_entropy, auroc and adv_auroc (images against OOD images, which adv_auroc attacks, by
logsumexp f(x), because a new image has no label).

Files in --output_dir: at_best.pt (stage 1), best.pt (of the last stage), latest.pt, previous.pt,
metrics.jsonl, curves.png, summary.json. The same command, given again, goes on from latest.pt.
"(all ranks)" means that every rank must call a function, in the same order, and "(rank 0)" that
only rank 0 does.
"""

# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch>=2.11,<2.14", "numpy>=2.2,<3", "tqdm>=4.67,<5", "pyyaml>=6.0,<7", "wandb>=0.25,<1",
#     "matplotlib>=3.10,<4", "pandas>=2.2,<4", "scikit-learn>=1.7,<2", "datasets>=5,<6",
#     "pillow>=12,<14",
# ]
# ///

import argparse
import contextlib
import copy
import ctypes
import errno
import fcntl
import functools
import hashlib
import io
import itertools
import json
import logging
import math
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import zipfile
from collections import deque
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

PHASES = {"at": 1, "dat": 2}  # numbers of the stages, in the log
GENERATED = ["noise", "blobs"]  # OOD images that need no files

# --------------------------------------------------------------------------------------------------
# Arguments


def parse_args():
    parser = Parser(description=__doc__)
    add = parser.add_argument_group("data").add_argument
    text = "folder with train/CLASS/... and test/, .npz of arrays, name on the hub, or digits"
    add("--data", default="digits", help=text)
    add("--outdist_data", default="noise", help="OOD images: likewise, or noise, or blobs")
    text = "channels and pixels a side, as 3x64; auto: as arrays have them, 3x32 of files"
    add("--image_shape", type=image_shape, default="auto", help=text)
    add("--cache_dir", default="cache", help="where what is read once is kept")
    add("--skip_bad_data", **FLAG, default=False, help="leave out damaged images, and list them")
    kinds = ["none", "shift", "original"]
    text = "of images to classify; original: shift twice as far, and mirror"
    add("--augm_type_classification", default="shift", choices=kinds, help=text)
    add("--augm_type_generation", default="none", choices=kinds, help="of real and OOD images")

    add = parser.add_argument_group("model").add_argument
    add("--model_type", default="SmallNet", choices=MODELS, help="network")
    add("--width", type=COUNT, default=24, help="channels of SmallNet")
    add("--norm", default="none", choices=["none", "layer", "batch"], help="of SmallNet")
    add("--ckpt_path", help="weights to start from: a checkpoint or a state_dict")

    length = number(1e-6, 1e6)
    steps = number(0, kind=int)
    add = parser.add_argument_group("attack, on OOD images, in L2").add_argument
    add("--attack_max_steps", type=steps, default=50, help="T at most")
    add("--attack_step_size", type=length, default=0.1, help="length of a step")
    add("--AUC_th", type=number(0, 1), default=0.8, help="mean AUC at which T grows")
    add("--min_imgs_per_threshold", type=COUNT, default=1000, help="real images it is over")

    add = parser.add_argument_group("indist_attack_clf, on images to classify").add_argument
    text = "steps; 0: standard training, to compare with"
    add("--indist_attack_clf_max_steps", type=steps, default=10, help=text)
    add("--indist_attack_clf_step_size", type=length, default=0.1, help="length of a step")
    add("--indist_attack_clf_eps", type=length, default=0.5, help="radius of the ball")
    kinds = ["L2", "Linf"]
    add("--indist_attack_clf_norm", default="L2", choices=kinds, help="of step and ball")

    add = parser.add_argument_group("optimization").add_argument
    text = "of stage 1; 0: stage 2 starts from --ckpt_path"
    add("--at_epochs", type=steps, default=40, help=text)
    add("--total_epochs", type=steps, default=100, help="of stage 2; 0: stage 1 only")
    add("--at_optimizer", default="adamw", choices=OPTIMIZERS, help="of stage 1")
    add("--at_lr", type=number(0), default=2e-3, help="peak of stage 1; half a cosine down to 0")
    add("--optimizer", default="sgd", choices=OPTIMIZERS, help="of stage 2")
    add("--lr", type=number(0), default=1e-3, help="learning rate of stage 2, constant")
    add("--wd", type=number(0), default=5e-4, help="weight decay of matrices; biases, norms: 0")
    add("--ema", type=number(0, 1), default=0.999, help="decay of averaged weights; 0: no average")
    text = "images between validations; 0: only at the end of a stage"
    add("--n_imgs_per_evaluation_log", type=steps, default=50_000, help=text)
    add("--use_ddp", **FLAG, default=True, help="False: only one process, on one GPU")

    add_common_arguments(parser, output_dir="outputs/rebm", batch_size=128)
    hidden = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    add("--ddp_backend", dest="backend", **hidden)  # the original's name of it
    # the lines at the end of this file parse sys.argv, and hand it to torchrun
    sys.argv[1:] = as_options(sys.argv[1:], parser._option_string_actions)
    args = parse_with_config(parser)
    if args.at_epochs == 0 and not args.ckpt_path:
        parser.error("--at_epochs 0: stage 2 starts from weights of stage 1, give --ckpt_path")
    if args.indist_attack_clf_norm == "Linf" and args.indist_attack_clf_eps >= 0.5:
        text = "with Linf it must be below 0.5, which turns any image grey; 8/255 is 0.0314"
        parser.error(f"--indist_attack_clf_eps {args.indist_attack_clf_eps}: {text}")
    own_folder = Path(args.output_dir).resolve()
    if args.fresh and args.ckpt_path and own_folder in Path(args.ckpt_path).resolve().parents:
        parser.error(f"--fresh moves --ckpt_path {args.ckpt_path} away: give another --output_dir")
    if args.at_epochs == 0 and args.total_epochs == 0:
        parser.error("--at_epochs 0 --total_epochs 0: nothing to train")
    return args


def image_shape(text):
    """3x64 as [3, 64], auto as None"""
    if text == "auto":
        return None
    match = re.fullmatch(r"([13])x([1-9]\d*)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text}: expected 1 or 3 channels and a side, as 3x64")
    return [int(match[1]), int(match[2])]


# --------------------------------------------------------------------------------------------------
# Data


class Batch(NamedTuple):
    """A micro-batch of B images to classify; in stage 2 also B real and B OOD images."""

    places: torch.Tensor  # (B,) int64, in the global batch
    x: torch.Tensor  # (B, C, S, S) uint8, to classify
    y: torch.Tensor  # (B,) int64
    real: torch.Tensor | None = None  # (B, C, S, S) uint8
    real_y: torch.Tensor | None = None  # (B,) int64
    outside: torch.Tensor | None = None  # (B, C, S, S) uint8

    def to(self, device):
        tensors = [tensor for tensor in self if tensor is not None]
        return Batch(*[tensor.to(device, non_blocking=True) for tensor in tensors])


class Images:
    """What `prepare` has written, mapped into memory that the ranks of a node share."""

    def __init__(self, folder):
        meta = json.loads((folder / "meta.json").read_text())
        self.classes = meta["classes"]  # names; [] where images have no labels
        self.hash = meta["hash"]
        for note in meta["notes"]:
            logging.warning(note)
        # (N, C, S, S) uint8. np.asarray: still mapped, and faster than np.memmap itself
        self.images = np.asarray(np.load(folder / "images.npy", mmap_mode="r"))
        self.labels = np.load(folder / "labels.npy")  # (N,) int64
        self.split = np.load(folder / "split.npy")  # (N,) uint8
        self.shape = self.images.shape[1:3]  # (channels, pixels a side)

    def part(self, name):
        """Numbers of the images to train on, to validate on or to test on."""
        return np.flatnonzero(self.split == ["train", "valid", "test"].index(name))

    def some(self, name, most):
        """At most so many of them, from all places: files lie in the order of their classes."""
        ids = self.part(name)
        if len(ids) <= most:
            return ids
        return np.sort(np.random.default_rng(0).choice(ids, most, replace=False))


def augment(image, kind, rng):
    """(C, S, S) uint8, moved along both axes, where black comes in, and perhaps mirrored."""
    if kind == "none":
        return image
    size = image.shape[1]
    most = max(1, size // 16 if kind == "shift" else size // 8)
    across, down = rng.integers(0, 2 * most + 1, 2)
    wide = np.zeros((len(image), size + 2 * most, size + 2 * most), np.uint8)
    wide[:, most : most + size, most : most + size] = image
    image = wide[:, down : down + size, across : across + size]
    if kind == "original" and rng.random() < 0.5:
        image = image[:, :, ::-1]
    return image


class TrainingData(Dataset):
    def __init__(self, args, inside, outside, stage):
        self.args = args
        self.inside = inside
        self.outside = outside
        self.phase = PHASES[stage]
        self.real_ids = inside.part("train")
        self.outside_ids = outside.part("train")

    def __getitem__(self, item):
        """item: (step, whole, places), the images of the global batch, and which of them are in
        this micro-batch. Random draws depend on (seed, stage, step, place) alone, and so not on the
        number of ranks."""
        step, whole, places = item
        seeds = [[self.args.seed, self.phase, step, place] for place in places]
        rngs = [np.random.default_rng(seed) for seed in seeds]
        x = self.pictures(self.inside, whole[places], self.args.augm_type_classification, rngs)
        y = torch.from_numpy(self.inside.labels[whole[places]])
        batch = Batch(torch.from_numpy(places), x, y)
        if self.phase == 1:
            return batch

        real_ids = np.array([rng.choice(self.real_ids) for rng in rngs])
        outside_ids = np.array([rng.choice(self.outside_ids) for rng in rngs])
        kind = self.args.augm_type_generation
        return batch._replace(
            real=self.pictures(self.inside, real_ids, kind, rngs),
            real_y=torch.from_numpy(self.inside.labels[real_ids]),
            outside=self.pictures(self.outside, outside_ids, kind, rngs),
        )

    def pictures(self, source, ids, kind, rngs):
        parts = [augment(source.images[i], kind, rng) for i, rng in zip(ids, rngs, strict=True)]
        return torch.from_numpy(np.stack(parts))


def pixels(images):
    """uint8 as float32 in [0, 1], laid out as convolutions read fastest, channels last."""
    return images.float().div(255).contiguous(memory_format=torch.channels_last)


# --------------------------------------------------------------------------------------------------
# Model. Parameters of the WideResNet have the names that its authors gave them.


class Network(nn.Module):
    """Logits f(x) (B, K) of images x (B, C, S, S) in [0, 1]. A subclass has `features`, which makes
    vectors (B, D) of images, and `fc`, a linear layer. make_network adds `mean` and `deviation` of
    each channel, by which images are normalised first."""

    is_frozen = False  # whether batch normalisation keeps its statistics
    context = contextlib.nullcontext  # training in 16 bits puts autocast here

    def forward(self, x):
        with self.context():
            features = self.features((x - self.mean) / self.deviation)
        return self.fc(features.float())  # 16 bits would make ties of logits

    def train(self, mode=True):
        """Frozen batch normalisation stays in evaluation mode; its weights are trained."""
        super().train(mode)
        for layer in batch_norms(self):
            layer.train(mode and not self.is_frozen)
        return self


def batch_norms(model):
    return [
        layer for layer in model.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)
    ]


def conv3x3(before, after, stride=1, bias=False):
    return nn.Conv2d(before, after, 3, stride, 1, bias=bias)


class SmallNet(Network):
    """Two or three pairs of convolutions, all but the first halve the image; then 128 features. It
    is smooth, without maxima or ReLUs. Its linear layer grows with the image: hence the limit."""

    def __init__(self, args, classes, channels, size):
        super().__init__()
        if size > 64:
            text = f"SmallNet takes images of at most 64 pixels a side, these have {size}"
            raise InputError(f"{text}: --image_shape {channels}x64, or another --model_type")
        layers = []
        before = channels
        for stride in (1, 2) if size < 16 else (1, 2, 2):
            after = args.width if stride == 1 else before * 2
            size = math.ceil(size / stride)
            for inputs, step in ((before, stride), (after, 1)):
                layers.append(conv3x3(inputs, after, step, bias=True))
                if args.norm == "layer":
                    layers.append(nn.GroupNorm(1, after))
                elif args.norm == "batch":
                    layers.append(nn.BatchNorm2d(after))
                layers.append(nn.SiLU())
            before = after
        layers += [nn.Flatten(), nn.Linear(before * size**2, 128), nn.SiLU()]
        self.features = nn.Sequential(*layers)
        self.fc = nn.Linear(128, classes)


class WideBlock(nn.Module):
    """Pre-activation residual block (Zagoruyko and Komodakis 2016)."""

    def __init__(self, before, after, stride):
        super().__init__()
        self.bn1 = nn.BatchNorm2d(before)
        self.conv1 = conv3x3(before, after, stride)
        self.bn2 = nn.BatchNorm2d(after)
        self.conv2 = conv3x3(after, after)
        self.convShortcut = None
        if before != after:
            self.convShortcut = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x):
        y = F.relu(self.bn1(x))
        shortcut = x if self.convShortcut is None else self.convShortcut(y)
        y = self.conv1(y)
        return shortcut + self.conv2(F.relu(self.bn2(y)))


class WideResNet(Network):
    def __init__(self, args, classes, channels, size):
        super().__init__()
        depth, factor = map(int, re.findall(r"\d+", args.model_type))
        self.conv1 = conv3x3(channels, 16)
        before = 16
        for number, stride in ((1, 1), (2, 2), (3, 2)):
            after = 8 * factor * 2**number
            group = nn.Module()
            group.layer = nn.Sequential(WideBlock(before, after, stride))
            for _ in range((depth - 4) // 6 - 1):
                group.layer.append(WideBlock(after, after, 1))
            self.add_module(f"block{number}", group)
            before = after
        self.bn1 = nn.BatchNorm2d(before)
        self.fc = nn.Linear(before, classes)

    def features(self, x):
        x = self.conv1(x)
        for group in (self.block1, self.block2, self.block3):
            x = group.layer(x)
        return F.relu(self.bn1(x)).mean((2, 3))


MODELS = {"SmallNet": SmallNet}
for depth_and_factor in "28x2 28x10 28x20 34x10 34x20 40x10 70x16".split():
    MODELS[f"WideResNet{depth_and_factor}"] = WideResNet


def make_network(args, classes, channels, size):
    """A network with random weights, for images (B, channels, size, size)."""
    model = MODELS[args.model_type](args, classes, channels, size)
    # CIFAR's, to the digits of the original, whose weights give the same logits then
    mean = torch.tensor([0.4913997551666284, 0.48215855929893703, 0.4465309133731618])
    deviation = torch.tensor([0.24703225141799082, 0.24348516474564, 0.26158783926049628])
    if channels != 3:
        mean = torch.tensor([0.5])
        deviation = torch.tensor([0.5])
    model.register_buffer("mean", mean[:, None, None], persistent=False)
    model.register_buffer("deviation", deviation[:, None, None], persistent=False)

    # Convolutions are faster with channels last, except those of small images on a CPU. The layout
    # must not depend on the device: a resumed run's optimizer has that of the run before.
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if size >= 16 and layer.weight.shape[1] > 1:  # of one channel both layouts are the same
                layer.to(memory_format=torch.channels_last)
    nn.init.zeros_(model.fc.bias)
    return model


# --------------------------------------------------------------------------------------------------
# Loss


def cross_entropy(logits, labels):
    return F.cross_entropy(logits, labels, reduction="none")


def label_logit(logits, labels):
    """f_y(x) (B,)"""
    return logits.gather(1, labels[:, None])[:, 0]


def logsumexp(logits, labels):
    """-E(x) (B,)"""
    return logits.logsumexp(1)


def in_ball(x, centre, eps, norm):
    """The points of the balls of radius eps about `centre` (B, C, S, S) that are nearest to x, with
    pixels clamped to [0, 1]. The centres are in [0, 1], so that clamping leaves no ball."""
    if eps < math.inf:
        move = x - centre
        if norm == "Linf":
            move = move.clamp(-eps, eps)
        else:
            length = torch.linalg.vector_norm(move, dim=(1, 2, 3), keepdim=True)
            move = move * (eps / length.clamp(min=eps))
        x = centre + move
    return x.clamp(0, 1)


class Attack:
    """Projected gradient ascent (Madry et al. 2018) on gain(logits, labels) (B,), within [0, 1] and
    the balls of radius eps about the images. It starts at the image itself, not at a random point.
    Each step has the length `size`, however long the gradient is."""

    def __init__(self, net, gain, size, eps=math.inf, norm="L2", compiled=False):
        self.net = net
        self.gain = gain
        self.size = size
        self.eps = eps
        self.norm = norm
        if compiled:  # a step is one graph; so the number of steps may change
            self.step = torch.compile(self.step, fullgraph=True, dynamic=False)

    @torch.no_grad()
    def __call__(self, x, labels, steps):
        """The points (B, C, S, S) after so many steps from the images x."""
        z = x
        for _ in range(steps):
            z = self.step(z, x, labels)
        return z

    def total_gain(self, z, labels):
        # fp16 would round small gradients to 0: hence the factor
        return 1024 * self.gain(self.net(z), labels).sum()

    def step(self, z, x, labels):
        """The next points after z, in the balls about x."""
        if torch.compiler.is_compiling():  # the compiler knows only this way
            gradient = torch.func.grad(self.total_gain)(z, labels)
        else:  # twice as fast where nothing is compiled
            z = z.detach().requires_grad_()
            with torch.enable_grad():
                total = self.total_gain(z, labels)
            (gradient,) = torch.autograd.grad(total, z)
        gradient = gradient.nan_to_num(0.0, 0.0, 0.0)  # entries that fp16 cannot hold
        if self.norm == "Linf":
            move = gradient.sign()
        else:
            # first by the largest entry, so that even a gradient of 1e-30 gives a direction
            largest = gradient.abs().amax((1, 2, 3), keepdim=True)
            gradient = gradient / largest.clamp(min=1e-38)
            length = torch.linalg.vector_norm(gradient, dim=(1, 2, 3), keepdim=True)
            move = gradient / length.clamp(min=1e-6)
        return in_ball(z + self.size * move, x, self.eps, self.norm)


def real_or_fake(logits, is_real):
    """(B,) binary cross entropy of whether images are real, by logsumexp f(x). Real and attacked
    images count one half each."""
    sign = -1 if is_real else 1
    return 0.5 * F.softplus(sign * logits.logsumexp(1))


def pairs_in_order(real, fake):
    """The area under the ROC curve is pairs_in_order / (2 n m) for scores of n real and m fake
    images. It is the share of pairs in which the real one has the higher score, and ties count
    half. Here each pair counts 2, and a tie 1: the sum is an integer, and so exact."""
    order = fake.sort().values
    real = real.contiguous()
    below = torch.searchsorted(order, real)
    up_to = torch.searchsorted(order, real, right=True)
    return (below + up_to).sum()


# --------------------------------------------------------------------------------------------------
# Evaluation

EVAL_IMAGES = 1000  # held-out images, and OOD images, at most
EVAL_STEPS = 20  # of the attack on them
OOD_RADIUS = 2  # radius of the attack on OOD images, by that of the attack on images to classify


def auroc(real, fake):
    return pairs_in_order(real, fake).item() / (2 * len(real) * len(fake))


def measure_images(net, args, x, y):
    """(B, 4) of images: logsumexp f(x); is it told right, is it so under attack; cross entropy."""
    eps = args.indist_attack_clf_eps
    attack = Attack(net, cross_entropy, eps / 4, eps, args.indist_attack_clf_norm)
    logits = net(x)
    attacked = net(attack(x, y, EVAL_STEPS))
    is_right = logits.argmax(1) == y
    stays_right = is_right & (attacked.argmax(1) == y)
    columns = [logits.logsumexp(1), is_right, stays_right, cross_entropy(logits, y)]
    return torch.stack(columns, 1)


def measure_outside(net, args, x, y):
    """(B, 2) of OOD images: logsumexp f(x), and that after an attack which raises it."""
    eps = OOD_RADIUS * args.indist_attack_clf_eps
    attack = Attack(net, logsumexp, eps / 4, eps, args.indist_attack_clf_norm)
    columns = [net(x).logsumexp(1), net(attack(x, None, EVAL_STEPS)).logsumexp(1)]
    return torch.stack(columns, 1)


@torch.no_grad()
def measure(function, columns, net, source, args, device):
    """A row of function(net, args, x, y) for each held-out image, of EVAL_IMAGES at most; None if a
    rank has to stop. Batch k goes to rank k % world_size: each counts once. (all ranks)"""
    world_size = dist.get_world_size()
    ids = source.some("valid", EVAL_IMAGES)
    table = torch.zeros(len(ids), columns, device=device)
    for number, first in enumerate(range(0, len(ids), args.batch_size)):
        # here and not once at the end: attacks on many images take minutes
        if number % world_size == 0 and max(gather(wish_to_stop(args))):
            return None
        if number % world_size == dist.get_rank():
            rows = slice(first, first + args.batch_size)
            x = pixels(torch.from_numpy(source.images[ids[rows]]).to(device))
            y = torch.from_numpy(source.labels[ids[rows]]).to(device)
            table[rows] = function(net, args, x, y)

    dist.all_reduce(table)  # each row is zero on all ranks but one
    return table.cpu().double()


def evaluate(net, data, args, device):
    """Metrics of the averaged weights on held-out images and OOD images, without autocast or
    torch.compile; None if a rank has to stop. (all ranks)"""
    images = measure(measure_images, 4, net, data[0], args, device)
    if images is None:
        return None
    others = measure(measure_outside, 2, net, data[1], args, device)
    if others is None:
        return None

    _, clean, robust, loss = images.mean(0).tolist()
    return {
        "clean": clean,
        "robust": robust,
        "cross_entropy": loss,
        "auroc": auroc(images[:, 0], others[:, 0]),
        "adv_auroc": auroc(images[:, 0], others[:, 1]),
    }


# --------------------------------------------------------------------------------------------------
# Train


def train(args, device, stage, data, nets, state, log, loop):
    """One stage. loop: where training stands; it goes on from there. state: the checkpoint that has
    the weights and the optimizer of there; None where the stage begins. Returns why training was
    stopped, or "" if the stage has ended. (all ranks)"""
    world_size = dist.get_world_size()
    phase = PHASES[stage]
    model = nets.model
    ddp_model = nets.ddp_model
    sampler = GlobalBatchSampler(data[0].part("train"), args)
    steps = sampler.count_steps(args.at_epochs if stage == "at" else args.total_epochs)
    eval_every = math.ceil(args.n_imgs_per_evaluation_log / sampler.global_batch) or steps
    optimizer = make_optimizer(args, model, stage)
    model.context, scaler = choose_precision(args, device)
    nets.twin.context = model.context
    parts = {"model": model, "average": nets.average, "optimizer": optimizer, "scaler": scaler}
    if state:
        restore(state, **parts)
    if loop["phase"] != phase:
        begin_stage(args, stage, nets, loop)
    # batch normalisation keeps stage 1's statistics: those of OOD images would harm the energy
    model.is_frozen = stage == "dat"
    model.train()
    attack = functools.partial(Attack, nets.twin, compiled=args.compile)
    ball = [args.indist_attack_clf_eps, args.indist_attack_clf_norm]
    on_class = attack(cross_entropy, args.indist_attack_clf_step_size, *ball)
    on_outside = attack(label_logit, args.attack_step_size)
    length = AttackLength(args, sampler.global_batch, loop["attack"])

    def save(must_succeed=False):  # latest.pt
        loop["attack"] = length.state()
        save_checkpoint("latest.pt", args, log, loop, must_succeed, **parts)

    def backward(losses):
        """losses (B,): their part of the mean over the global batch."""
        loss = losses.sum() / sampler.global_batch
        scaler.scale(loss * world_size).backward()  # DDP takes the mean over ranks, we want the sum
        return loss.detach()

    if loop["step"] == 0:
        save(must_succeed=True)
    done = loop["step"] - loop["before"]  # steps of this stage
    sampler.start = done
    batches = make_loader(TrainingData(args, *data, stage), sampler, args, device)
    bar = tqdm(total=steps, initial=done, disable=None if dist.get_rank() == 0 else True)
    meter = Meter(["loss"] if stage == "at" else ["loss", "clf_loss", "bce", "auc"], args, device)
    reason = ""
    while not reason:
        epoch = done // sampler.steps

        # Validate. All ranks have the same metrics, and so agree on what is best.
        is_due = done % eval_every == 0 or done >= steps
        if is_due and loop["validated"] < done:
            metrics = evaluate(nets.average, data, args, device)
            if metrics is None:  # this validation is made again
                reason = max(gather(wish_to_stop(args)))
                save(must_succeed=True)
                break
            loop["validated"] = done
            row = {f"val/{stage}/{name}": value for name, value in metrics.items()}
            log.write({"step": loop["step"], "phase": phase, "epoch": loop["epoch"], **row})
            keep_best(args, stage, nets.average, metrics, length.steps, log, loop)
            meter.start()
        if done >= steps:
            save(must_succeed=stage == "dat" or args.total_epochs == 0)
            break

        seed_step(args, loop["step"])
        kept = [buffer.clone() for buffer in model.buffers()]  # a bad step must not change them
        lr = args.lr
        if stage == "at":
            lr = args.at_lr * (0.5 + 0.5 * math.cos(math.pi * done / steps))
        for group in optimizer.param_groups:
            group["lr"] = lr

        # forward and backward, micro-batch by micro-batch; the last pass adds up over the ranks
        T = length.steps
        clf_loss = torch.zeros((), device=device)
        bce = torch.zeros((), device=device)
        scores = torch.zeros(2, sampler.global_batch, device=device)
        for micro in range(1, sampler.accumulation + 1):
            batch = meter.next_batch(batches, device)
            ddp_model.require_backward_grad_sync = False  # the last pass sends all gradients
            if stage == "dat":
                loss, own = real_or_fake_step(nets, on_outside, batch, T, backward)
                bce += loss
                scores[:, batch.places] = own
            x = on_class(pixels(batch.x), batch.y, args.indist_attack_clf_max_steps)
            ddp_model.require_backward_grad_sync = micro == sampler.accumulation
            clf_loss += backward(cross_entropy(ddp_model(x), batch.y))
        share_statistics(model)
        norm = update_if_finite(args, optimizer, scaler)
        for buffer, old in zip(model.buffers(), kept, strict=True):
            buffer.copy_(torch.where(norm.isfinite(), buffer, old))
        update_average(nets.average, model, args.ema, done)

        shares = [clf_loss]
        row = {"step": loop["step"] + 1, "phase": phase, "epoch": epoch, "lr": lr}
        if stage == "dat":
            row["T"] = T
            dist.all_reduce(scores)  # each image's are zero on all ranks but one
            pairs = pairs_in_order(*scores)
            auc = pairs / (2 * sampler.global_batch**2)
            # each rank knows the whole auc, and Meter adds up what the ranks give
            shares = [clf_loss + bce, clf_loss, bce, auc / world_size]
            length.grow(torch.where(norm.isfinite(), pairs, SKIPPED))
        meter.add(torch.stack(shares), norm)
        loop["step"] += 1
        loop["epoch"] = epoch
        done += 1
        bar.update()

        # log and save; also before a validation, which may be interrupted
        is_due = done % eval_every == 0 or done >= steps
        must_save = done % args.save_every == 0 or is_due
        reason = meter.meet(log, row, sampler.global_batch, must_save)
        if reason or must_save:
            save(must_succeed=bool(reason))
    bar.close()
    return reason


def real_or_fake_step(nets, on_outside, batch, steps, backward):
    """The loss of the energy on real images, and on OOD images after `steps` steps of the attack,
    which raises f_y for the labels y of the real ones. Each has its own backward pass, so that only
    one graph is in memory. Returns the loss, and f_y (2, B) of both."""
    fake = on_outside(pixels(batch.outside), batch.real_y, steps)
    loss = 0.0
    scores = []
    for x, is_real in ((pixels(batch.real), True), (fake, False)):
        logits = nets.ddp_model(x)
        loss += backward(real_or_fake(logits, is_real))
        scores.append(label_logit(logits.detach(), batch.real_y))
    return loss, torch.stack(scores)


def keep_best(args, stage, average, metrics, T, log, loop):
    """Save the averaged weights if they are the best of this stage. (all ranks)"""
    if not math.isfinite(metrics["cross_entropy"]):
        text = f"the validation loss after step {loop['step']} is {metrics['cross_entropy']}"
        raise RunError(f"{text}: --fresh and a lower learning rate")

    # training without attacks makes no network robust: then its clean accuracy chooses
    name = "robust" if args.indist_attack_clf_max_steps > 0 else "clean"
    value = metrics[name]
    before = loop["best"]
    best = before.get(stage)
    # Networks that have seen longer attacks generate better images, and are hardly less robust. So
    # T counts first; and of two that are as good, the later one is taken.
    if best and (T, value) < (best["T"], best["value"]):
        return

    best = {"metric": f"{stage}/{name}", "value": value, "step": loop["step"]}
    loop["best"] = {**before, stage: {**best, "T": T, "metrics": metrics}}
    names = ["at_best.pt", "best.pt"] if stage == "at" else ["best.pt"]
    if not all(save_checkpoint(name, args, log, loop, model=average) for name in names):
        loop["best"] = before


OPTIMIZERS = {  # with the original's settings
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"betas": (0.0, 0.99)}),
    "adamw": (torch.optim.AdamW, {"betas": (0.9, 0.95)}),
}


def make_optimizer(args, model, stage):
    kind, settings = OPTIMIZERS[args.at_optimizer if stage == "at" else args.optimizer]
    # Weight decay pulls towards zero. That helps matrices; a bias or a norm's scale needs its size.
    decay = [p for p in model.parameters() if p.ndim > 1]
    no_decay = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": args.wd}, {"params": no_decay, "weight_decay": 0.0}]
    optimizer = kind(groups, lr=args.lr, fused=True, **settings)
    if "momentum" in settings:
        # PyTorch makes these buffers in the first step, and if that step is skipped, leaves in them
        # whatever was in the memory. With zeros the first step is the same.
        for parameter in model.parameters():
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def begin_stage(args, stage, nets, loop):
    """Stage 2 starts from the best weights of stage 1, if this run had one. (all ranks)"""
    if stage == "dat" and loop["phase"] == PHASES["at"]:
        path = Path(args.output_dir) / "at_best.pt"
        state = on_rank0(read_checkpoint, path)
        if state is None:  # the disk may have been full
            logging.warning(f"{path} is missing or damaged: stage 2 starts from the last weights")
            state = {"model": nets.average.state_dict()}
        nets.model.load_state_dict(state["model"])
    nets.average.load_state_dict(nets.model.state_dict())
    loop.update(phase=PHASES[stage], before=loop["step"], validated=0, attack={})


SKIPPED = -1  # in place of the pairs_in_order of a step that was skipped


class AttackLength:
    """T, the steps of the attack on OOD images. It grows by one when the mean AUC of the last steps
    with this T, as many as have --min_imgs_per_threshold images, is at least --AUC_th, and none of
    them was skipped. The AUC of a step is read while the next one is made: by then the device has
    it, and nobody waits."""

    def __init__(self, args, global_batch, saved):
        self.args = args
        self.steps = saved.get("T", 0)
        self.pairs = 2 * global_batch**2  # pairs_in_order where the AUC is 1
        needed = math.ceil(args.min_imgs_per_threshold / global_batch)
        window = torch.tensor(saved.get("window", []), dtype=torch.int64)
        self.window = deque(window, maxlen=needed)  # pairs_in_order of the last steps with this T
        self.arrived = None  # event: the window is on the host

    def state(self):
        if self.arrived is not None:
            self.arrived.synchronize()
        window = torch.stack([*self.window]).tolist() if self.window else []
        return {"T": self.steps, "window": window}

    def grow(self, pairs):
        """Take in the pairs_in_order () of a step, the same on all ranks."""
        is_full = len(self.window) == self.window.maxlen
        if is_full and self.steps < self.args.attack_max_steps:
            window = self.state()["window"]
            mean = sum(window) / (len(window) * self.pairs)
            if SKIPPED not in window and mean >= self.args.AUC_th:
                self.steps += 1
                self.window.clear()
                return  # this step still had the T before
        self.window.append(pairs.to("cpu", non_blocking=True))
        if pairs.device.type != "cpu":
            self.arrived = torch.accelerator.current_stream().record_event()


def tensors(model):
    """Parameters, and buffers that are no counters."""
    found = [*model.parameters(), *model.buffers()]
    return [tensor for tensor in found if tensor.is_floating_point()]


@torch.no_grad()
def update_average(average, model, decay, step):
    """average = d average + (1 - d) weights; d rises from 0.1, so that the start is forgotten."""
    d = min(decay, (1 + step) / (10 + step))
    torch._foreach_lerp_(tensors(average), tensors(model), 1 - d)


def share_statistics(model):
    """Batch normalisation has the statistics of its rank's images, unless it is SyncBatchNorm: take
    the mean over the ranks, in every step, so that all have the same network. (all ranks)"""
    running = []
    for layer in batch_norms(model):
        if layer.training and not isinstance(layer, nn.SyncBatchNorm):
            running += [layer.running_mean, layer.running_var]
    if running and dist.get_world_size() > 1:
        flat = torch.cat(running) / dist.get_world_size()
        dist.all_reduce(flat)
        torch._foreach_copy_(running, flat.split([len(tensor) for tensor in running]))


# --------------------------------------------------------------------------------------------------
# Main


def load_data(args):
    """(images, OOD images of the same shape), each read once. (all ranks)"""
    folder = read_once(functools.partial(prepare, name=args.data), args)
    like = functools.partial(prepare, name=args.outdist_data, inside=folder)
    data = Images(folder), Images(read_once(like, args))
    for part in ("train", "valid", "test"):
        counts = [len(images.part(part)) for images in data]
        logging.info(f"  {part}: {counts[0]:,} images, {counts[1]:,} OOD")
    labels = data[0].labels[data[0].split != UNUSED]
    counts = np.bincount(labels, minlength=len(data[0].classes))
    texts = [f"{name} {count:,}" for name, count in zip(data[0].classes, counts, strict=True)]
    logging.info(f"  classes: {', '.join(texts[:20])}")
    count = len(data[0].some("valid", EVAL_IMAGES))
    if count < 200:
        error = 1 / math.sqrt(count)  # two standard errors of a share of 1/2
        logging.warning(f"few images to validate on: accuracies are only within {error:.2f}")
    return data


def start_network(args, device, inside, state):
    """The network of this run, on the device. (all ranks)"""
    torch.manual_seed(args.seed)  # the same weights on all ranks
    model = make_network(args, len(inside.classes), *inside.shape)
    if args.ckpt_path and state is None:
        weights = on_rank0(read_checkpoint, Path(args.ckpt_path))
        if weights is None:
            raise InputError(f"--ckpt_path {args.ckpt_path} is missing or damaged")
        known = inside.classes
        if isinstance(weights, dict) and "loop" in weights:
            known = weights["loop"].get("classes", known)
        if known != inside.classes:
            text = f"{args.ckpt_path} has the classes {' '.join(known)}"
            raise InputError(f"{text}, and the data {' '.join(inside.classes)}")
        load_weights(model, weights, args.ckpt_path)

    if args.model_type != "SmallNet":
        logging.info(f"{args.model_type} has its own width and norm, without --width and --norm")
    if batch_norms(model) and args.at_epochs > 0:
        text = "stage 1 depends on the number of ranks and on --batch_size"
        logging.warning(f"batch normalisation: {text}")
        if device.type != "cpu" and args.backend != "gloo":  # gloo cannot do what that needs
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    logging.info(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    return model.to(device)


class Networks:
    """One network in the forms that training needs. (all ranks)"""

    def __init__(self, args, device, model):
        self.model = model  # the weights that are trained
        # averages of these weights: they are validated, and kept in best.pt
        self.average = copy.deepcopy(model).requires_grad_(False).eval()
        # The weights that are trained, for attacks: the same memory, but in evaluation mode, and
        # no gradients of weights.
        self.twin = copy.deepcopy(self.average)
        for mine, own in zip(tensors(self.twin), tensors(model), strict=True):
            mine.data = own.data
        self.ddp_model = wrap_ddp(model, args, device)
        logging.info(f"Initialized DDP with {dist.get_world_size()} processes")


def load_weights(model, state, path):
    """Take the averaged weights of a checkpoint of ours, those of the original's files, or a
    state_dict. The names must be those of the network, apart from prefixes of wrappers."""
    for key in ("average", "model", "ema_state_dict", "model_state_dict", "state_dict"):
        if isinstance(state, dict) and key in state:
            state = state[key]
            break
    if not isinstance(state, dict):
        raise InputError(f"{path} has no weights by name: expected a checkpoint or a state_dict")

    found = {}
    for name, tensor in state.items():
        found[re.sub(r"^((module|_orig_mod|base_model)\.)+", "", name)] = tensor
    found.pop("n_averaged", None)  # a counter of torch.optim.swa_utils
    try:
        model.load_state_dict(found)
    except RuntimeError as error:  # it lists what is missing, and what is too much
        text = f"{path} does not fit this network: give the --model_type and the options of then"
        raise InputError(f"{text}: {' '.join(str(error).split())[:1000]}") from None


def report(args, stage, loop, commonest):
    """The best of a stage on held-out images, beside what needs no network. commonest: the accuracy
    of always guessing the commonest class."""
    best = loop["best"].get(stage)
    if best is None:  # no weights could be saved, which was said
        return
    text = " ".join(f"{name}={value:.4f}" for name, value in best["metrics"].items())
    logging.info(f"Held out, the best of stage {stage}: {text} T={best['T']}")
    logging.info(f"Held out, the commonest class: clean={commonest:.4f}")

    if best["metrics"]["clean"] <= commonest:
        text = f"stage {stage} is not better than the commonest class"
        logging.warning(f"{text}: --fresh and another learning rate, optimizer or --norm")
    if stage == "dat" and best["T"] < args.attack_max_steps / 2:
        text = f"T is {best['T']} of {args.attack_max_steps}, generated images will be noise"
        logging.warning(f"{text}: more --total_epochs, or a lower --min_imgs_per_threshold")


def main(args):
    device = setup_ddp(args)
    world_size = dist.get_world_size()
    if not args.use_ddp and world_size > 1:
        raise InputError(f"--use_ddp False is one process, {world_size} were started")
    is_alone = args.use_ddp and world_size == 1
    if is_alone and (find_ranks() or torch.accelerator.device_count() > 1):
        logging.warning("DDP with one process only: torchrun --nproc_per_node=N starts N of them")
    logging.info("Preparing data loaders...")
    inside, outside = load_data(args)
    if args.prepare_only:
        logging.info(f"the images are read: {args.cache_dir}")
        return 0

    may_change = """data outdist_data image_shape cache_dir at_epochs total_epochs
        n_imgs_per_evaluation_log use_ddp""".split()
    state = open_run(args, f"{inside.hash} {outside.hash}", may_change)
    epochs = {"at": args.at_epochs, "dat": args.total_epochs}
    loop = {
        "step": 0,
        "phase": 0,
        "before": 0,  # steps before this stage
        "epoch": 0,
        "validated": 0,  # steps of this stage at the last validation
        "attack": {},  # state of AttackLength
        "best": {},  # of each stage
        "classes": inside.classes,  # for whoever loads the weights
        "shape": [*inside.shape],
    }
    if state:
        loop = state["loop"]
        stage = "at" if loop["phase"] == PHASES["at"] else "dat"
        text = f"{args.output_dir} is in stage {loop['phase']}"
        if epochs[stage] == 0:
            raise InputError(f"{text}, which must not have 0 epochs")
        if stage == "dat" and args.at_epochs != state["args"]["at_epochs"]:
            raise InputError(f"{text}: --at_epochs may change only in stage 1")
    torch.backends.cudnn.benchmark = not args.deterministic  # it pays: shapes stay the same
    nets = Networks(args, device, start_network(args, device, inside, state))
    labels = inside.labels[inside.some("valid", EVAL_IMAGES)]
    commonest = float(np.bincount(labels).max() / len(labels))  # accuracy of guessing it

    log = RunLog(args, state)
    logging.info("Starting distributed training...")
    reason = ""
    with logging_redirect_tqdm():
        for stage, phase in PHASES.items():
            if epochs[stage] == 0 or phase < loop["phase"] or reason:
                continue
            own_state = state if phase == loop["phase"] else None
            reason = train(args, device, stage, (inside, outside), nets, own_state, log, loop)
            if not reason:
                report(args, stage, loop, commonest)
    if reason:
        log.close(f"stopped by {reason}", steps=loop["step"])
        return exit_status(reason)
    logging.info("Training process completed.")
    end_on_signals()
    best = loop["best"].get("dat") or loop["best"].get("at")
    if best is None:
        raise RunError("no best.pt could be saved (see the warnings); latest.pt has the weights")
    summary = {"steps": loop["step"], "best": best, "stages": loop["best"]}
    log.close("finished", **summary, baselines={"commonest class": {"clean": commonest}})
    path = f"{args.output_dir}/best.pt"
    logging.info(f"tools/evaluate_rebm.py of the repository measures {path} on the test set")
    logging.info("Training and validation completed successfully!")
    return 0


# --------------------------------------------------------------------------------------------------
# Reading: the user's words and files. Training needs only what `write_images` leaves

TRAIN, VALID, TEST, UNUSED = range(4)  # in split.npy
PARTS = {"train": TRAIN, "training": TRAIN, "val": VALID, "valid": VALID, "validation": VALID}
PARTS.update({"test": TEST, "testing": TEST})
READER = 3  # raise it when you change what is read or kept: else an old cache is used


class Found:
    """What there is to read."""

    def __init__(self):
        self.files = []  # what open_image takes
        self.names = []  # the class of each; "" where there is none
        self.parts = []  # TRAIN, VALID or TEST of each
        self.classes = set()  # also those without images
        self.version = []  # changes where the content does
        self.left_out = {}  # {why: [what, ...]}
        self.bad = []  # what is wrong with others

    def add(self, file, name, part):
        self.files.append(file)
        self.names.append(name)
        self.parts.append(part)

    def note_version(self, path, stat):
        self.version.append([str(path), stat.st_size, stat.st_ctime_ns])

    def leave_out(self, why, what):
        self.left_out.setdefault(why, []).append(what)

    def what(self, i):
        return self.files[i] if isinstance(self.files[i], Path) else f"image {i}"


def find_images(name, shape):
    """What `name` names. Image files are not opened yet."""
    found = Found()
    path = Path(name)
    if name in ("digits", *GENERATED) and path.exists():
        logging.warning(f"{name} is a built-in set: for the file or folder here say ./{name}")
    if name == "digits":
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        test = np.random.default_rng(0).permutation(len(images))[:360]
        images = np.round(images.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
        for i, label in enumerate(labels):
            found.add(images[i], str(label), TEST if i in test else TRAIN)
    elif name in GENERATED:
        draw_images(name, shape, found)
    elif path.is_dir():
        find_in_folder(path, found)
    elif path.exists():
        found.note_version(path, path.stat())
        find_in_arrays(path, found)
    else:
        find_on_hub(name, found)
    found.classes.update(set(found.names) - {""})
    if not found.files:
        text = "no images there; expected files in train/CLASS/, or an array x_train"
        raise InputError(f"{name}: {text}" + list_problems(found.bad))
    return found


def draw_images(kind, shape, found):
    """OOD images that need no files: noise, or blobs, which are noise of 4 x 4 places scaled up."""
    channels, size = shape
    most = 2**28 // (channels * size * size)
    rng = np.random.default_rng(GENERATED.index(kind))
    side = size if kind == "noise" else 4
    for part, count in ((TRAIN, 20_000), (VALID, EVAL_IMAGES), (TEST, 10_000)):
        images = rng.integers(0, 256, (min(count, most), channels, side, side), np.uint8)
        if kind == "blobs":
            scaled = F.interpolate(torch.from_numpy(images).float(), size, mode="bilinear")
            images = scaled.round().byte().numpy()
        for image in images.transpose(0, 2, 3, 1):
            found.add(image, "", part)


def find_in_folder(root, found):
    """ROOT/train/CLASS/..., ROOT/val or ROOT/valid, ROOT/test; or ROOT/CLASS/..."""
    folders = {}
    others = []
    for path in sorted(root.iterdir()):
        if path.name.lower() in PARTS and path.is_dir():
            folders[path] = PARTS[path.name.lower()]
        else:
            others.append(path)
    if not folders:
        walk(root, "", TRAIN, found)
        return
    parts = list(folders.values())
    if TRAIN not in parts or len(set(parts)) < len(parts):
        names = ", ".join(folder.name for folder in folders)
        raise InputError(f"{root} has {names}: expected train, perhaps val and test, one of each")
    for path in others:
        found.leave_out("files or folders beside train are not read", path)
    for folder, part in folders.items():
        walk(folder, "", part, found)


def walk(folder, name, part, found, above=()):
    """All images below a folder, of the class `name`; at the top, "", a folder is a class."""
    real = os.path.realpath(folder)
    if real in above:
        found.leave_out("links lead to a folder that they are in", folder)
        return
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        path = Path(entry.path)
        if entry.name.startswith((".", "__")):  # .ipynb_checkpoints, __MACOSX
            found.leave_out("hidden files or folders are not read", path)
        elif entry.is_dir():
            found.classes.add(name or entry.name)
            walk(path, name or entry.name, part, found, (*above, real))
        elif not entry.is_file():
            found.bad.append(f"{path}: a link that leads nowhere, or neither a file nor a folder")
        elif Image.registered_extensions().get(path.suffix.lower()) in Image.OPEN:
            found.add(path, name, part)
            found.note_version(path, entry.stat())
        else:
            found.leave_out("files have no ending of an image", path)


def find_in_arrays(path, found):
    """Arrays x_train, y_train, x_test, y_test, as Keras names them, or train_images, train_labels,
    as MedMNIST does; images are uint8 (N, S, S), (N, S, S, C) or (N, C, S, S)."""
    try:
        arrays = dict(np.load(path))
    except Exception as error:  # those of zipfile and zlib, too
        raise InputError(f"{path}: {error}: expected an .npz file of arrays") from None
    for x in list(arrays):
        part = PARTS.get(x.removeprefix("x_").removesuffix("_images"))
        if part is None:
            continue
        images = arrays.pop(x)
        labels = arrays.pop(x.replace("x_", "y_").replace("images", "labels"), None)
        if images.ndim == 4 and images.shape[1] in (1, 3):
            images = images.transpose(0, 2, 3, 1)
        is_square = images.ndim in (3, 4) and images.shape[1] == images.shape[2]
        if images.dtype != np.uint8 or not is_square or images.shape[3:] not in ((), (1,), (3,)):
            text = f"{x} is {images.dtype} {images.shape}"
            raise InputError(f"{path}: {text}; expected uint8 (N, S, S) or (N, S, S, C)")
        names = [""] * len(images)
        if labels is not None:
            if labels.dtype.kind == "f":
                if not np.array_equal(labels, labels.round()):  # NaN is not equal to itself
                    raise InputError(f"{path}: labels of {x}: expected whole numbers, or names")
                labels = labels.astype(np.int64)
            names = [str(label) for label in labels.ravel().tolist()]
        if len(names) != len(images):
            raise InputError(f"{path}: {x} has {len(images)} images, and {len(names)} labels")
        for image, name in zip(images, names, strict=True):
            found.add(image, name, part)
    for name in arrays:
        found.leave_out("arrays are not read", name)


def find_on_hub(name, found):
    if not {"HF_ENDPOINT", "HTTPS_PROXY", "https_proxy"} & os.environ.keys():
        try:
            socket.create_connection(("huggingface.co", 443), timeout=5).close()
        except OSError:
            os.environ["HF_HUB_OFFLINE"] = "1"  # else its library tries for half a minute
    import datasets

    try:
        tables = datasets.load_dataset(name)
    except Exception as error:  # no network, no such name, and many more
        reason = " ".join(str(error).split())[:200]
        text = f"{name}: no such folder or file here, and not on the hub, or no way to it"
        raise InputError(f"{text}; without a download: digits ({reason})") from None
    for split, table in tables.items():
        if split not in PARTS:
            found.leave_out("splits are not read", split)
            continue
        kinds = table.features
        images = [key for key, kind in kinds.items() if isinstance(kind, datasets.Image)]
        labels = [key for key, kind in kinds.items() if isinstance(kind, datasets.ClassLabel)]
        if not images:
            raise InputError(f"{name} has no column of images, but {', '.join(kinds)}")
        found.version.append(table._fingerprint)
        column = table.cast_column(images[0], datasets.Image(decode=False))[images[0]]
        numbers = table[labels[0]] if labels else [None] * len(table)
        for i, number in enumerate(numbers):
            if labels and number in (None, -1):  # some keep the labels of the test part secret
                found.leave_out("images without a label are not read", f"{split} {i}")
                continue
            own = kinds[labels[0]].names[number] if labels else ""
            found.add((column, i), own, PARTS[split])


def open_image(file):
    """A Pillow image of a path, an array (S, S) or (S, S, C), or a row of a data set of the hub."""
    if isinstance(file, np.ndarray):
        return Image.fromarray(np.ascontiguousarray(file.squeeze()))
    if isinstance(file, tuple):
        column, i = file
        row = column[i]
        file = io.BytesIO(row["bytes"]) if row["bytes"] else row["path"]
    image = Image.open(file)
    if image.mode[0] in "IF":  # convert would clip their pixels at 255
        raise ValueError(f"mode {image.mode}: expected 8 bits a channel")
    return image


def square(image, channels, size):
    """(channels, size, size) uint8: the middle of an image, upright; what is transparent becomes
    white."""
    image = ImageOps.exif_transpose(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image.convert("L" if channels == 1 else "RGB")
    if image.size != (size, size):
        image = ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC)
    return np.asarray(image).reshape(size, size, channels).transpose(2, 0, 1)


def read_images(found, images, digests):
    """Fill `images` and their `digests` (N,) uint64. Returns numbers of those that are bad."""
    bad = []

    def read(i):
        try:
            image = open_image(found.files[i])
            if getattr(image, "is_animated", False):
                found.leave_out("files have several pictures, the first is read", found.what(i))
            images[i] = square(image, *images.shape[1:3])
            digest = hashlib.blake2b(images[i].tobytes(), digest_size=8).digest()
            digests[i] = int.from_bytes(digest, "little")
        except Exception as error:  # Pillow raises many kinds
            found.bad.append(f"{found.what(i)}: {' '.join(str(error).split())}")
            bad.append(i)

    with ThreadPool() as pool:
        done = pool.imap_unordered(read, range(len(images)), chunksize=64)
        for _ in tqdm(done, total=len(images), desc="reading", disable=None, leave=False):
            pass
    found.bad.sort()
    return bad


def hold_out(parts, labels):
    """Change `parts` (N,) where there are no images to test or to validate on: some of those to
    train on become them, of each class the same share. A single part beside train is the test."""
    if TEST not in parts:
        parts[parts == VALID] = TEST
    rng = np.random.default_rng(0)
    for part, share, most in ((TEST, 0.15, 10_000), (VALID, 0.07, EVAL_IMAGES)):
        if part in parts:
            continue
        train = np.flatnonzero(parts == TRAIN)
        share = min(share, most / max(1, len(train)))
        for label in np.unique(labels[train]):
            own = rng.permutation(train[labels[train] == label])
            parts[own[: round(share * len(own))]] = part


def leave_out_copies(parts, digests, seen):
    """Leave out images of one part that equal images of another: those to test on stay first, then
    those to validate on. `seen`: digests of other images that none may equal. Returns how many are
    left out."""
    count = 0
    for part in (TEST, VALID, TRAIN):
        own = np.flatnonzero(parts == part)
        copies = own[np.isin(digests[own], seen)]
        parts[copies] = UNUSED
        seen = np.concatenate([seen, digests[own]])
        count += len(copies)
    return count


def in_two_classes(digests, labels):
    """Numbers of images that equal an image of another class."""
    order = np.lexsort([labels, digests])
    first = order[:-1]
    second = order[1:]
    is_equal = digests[first] == digests[second]
    return second[is_equal & (labels[first] != labels[second])]


def check_parts(name, parts, labels, classes, notes):
    """Add to the notes which classes are not tested; InputError where training or a whole part
    lacks."""
    names = classes or ["OOD images"]
    for part, what in ((TRAIN, "train"), (VALID, "validate"), (TEST, "test")):
        counts = np.bincount(labels[parts == part], minlength=len(names))
        lost = [names[i] for i in np.flatnonzero(counts == 0)]
        text = f"{name}: nothing to {what} on of {len(lost)} of {len(names)} classes:"
        if lost:
            notes.append(text + list_problems(lost))
        if lost and (part == TRAIN or len(lost) == len(names)):
            raise InputError("; ".join(notes))


def write_images(folder, args, name, found, shape, inside):
    """Write images.npy (N, C, S, S) uint8, labels.npy (N,) int64, split.npy (N,) uint8, digests.npy
    (N,) uint64, meta.json. (rank 0)"""
    shape = (len(found.files), shape[0], shape[1], shape[1])
    images = np.lib.format.open_memmap(folder / "images.npy", "w+", np.uint8, shape)
    with open(folder / "images.npy", "r+") as file:  # mapped, a full disk would kill this process
        os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
    digests = np.zeros(len(images), np.uint64)
    parts = np.array(found.parts, np.uint8)
    unread = read_images(found, images, digests)
    parts[unread] = UNUSED
    notes = []
    for why, what in found.left_out.items():
        notes.append(f"{name}: {len(what)} {why}, such as {what[0]}")
    if found.bad:
        text = f"{name}: {len(found.bad)} images are bad (--skip_bad_data leaves them out):"
        notes.append(text + list_problems(found.bad))
        if not args.skip_bad_data:
            raise InputError(notes[-1])

    classes = []
    labels = np.zeros(len(images), np.int64)
    others = np.zeros(0, np.uint64)
    if inside is None:
        classes = sorted(found.classes, key=lambda own: (len(own) if own.isdigit() else 0, own))
        numbers = {own: number for number, own in enumerate(classes)}
        labels = np.array([numbers.get(own, -1) for own in found.names])
        loose = np.flatnonzero(labels < 0)
        if len(classes) < 2:
            text = f"{name} has {len(classes)} classes: {' '.join(classes)}"
            raise InputError(f"{text}; expected two or more, as train/CLASS/ or in y_train")
        if len(loose) > 0:
            text = f"{name}: {len(loose)} images have no class, such as {found.what(loose[0])}"
            raise InputError(f"{text}: expected train/CLASS/...")
        whole = np.flatnonzero(parts != UNUSED)
        doubted = whole[in_two_classes(digests[whole], labels[whole])]
        if len(doubted) > 0:
            text = f"{len(doubted)} images equal an image of another class"
            notes.append(f"{name}: {text}, such as {found.what(doubted[0])}")
    else:
        others = np.load(inside / "digests.npy")
    hold_out(parts, labels)
    copies = leave_out_copies(parts, digests, others)
    if copies > 0:
        notes.append(f"{name}: {copies} images equal held-out ones, or those to classify: left out")
    check_parts(name, parts, labels, classes, notes)

    digest = hashlib.sha256(images)
    digest.update(json.dumps(classes).encode())
    for file, array in {"labels": labels, "split": parts, "digests": digests}.items():
        np.save(folder / f"{file}.npy", array)
        digest.update(array)
    meta = {"classes": classes, "notes": notes, "hash": digest.hexdigest()[:12]}
    (folder / "meta.json").write_text(json.dumps(meta))


def prepare(args, name, inside=None):
    """The folder with the images that `name` names, read once, and kept. inside: the folder of the
    images to classify, of which OOD images have the shape. What there is to read is listed at every
    start: so a changed folder is noticed. (rank 0)"""
    shape = args.image_shape
    if inside is not None:
        shape = np.load(inside / "images.npy", mmap_mode="r").shape[1:3]
    try:
        found = find_images(name, shape or [3, 32])
    except OSError as error:  # a folder that may not be read
        raise InputError(f"{name}: {error}") from None
    first = found.files[0]
    if shape is None and isinstance(first, np.ndarray):
        shape = [first.shape[2] if first.ndim == 3 else 1, len(first)]
    elif shape is None:
        shape = [3, 32]
    key = [READER, name, inside and inside.name, args.skip_bad_data, list(shape), len(found.files)]

    def write(folder):
        write_images(folder, args, name, found, shape, inside)

    return cached(args.cache_dir, "images", key + found.version + found.bad, write)


def as_options(words, known):
    """The original's words as options: CONFIG.yaml is --config=CONFIG.yaml, lr=1 is --lr=1,
    attack.max_steps=9 is --attack_max_steps=9, and model.norm=layer is --norm=layer. `known`: all
    options by name, as the parser has them."""
    options = []
    is_value = False  # of the option before it, as in `--output_dir lr=1`
    for word in words:
        if is_value:
            options.append(word)
            is_value = False
            continue
        key, equals, value = word.partition("=")
        section, _, name = key.removeprefix("--").rpartition(".")
        if not options and not equals and key.endswith((".yaml", ".yml", ".json")):
            word = f"--config={word}"
        elif equals or key.startswith("--"):
            for option in (f"--{name}", f"--{section}_{name}"):
                if option in known:
                    word = option + equals + value
        options.append(word)
        is_value = word in known and known[word].nargs is None
    return options


# ==================================================================================================
# How a run starts and ends. These lines are the same in every script: read them once.

START = time.monotonic()
PARENT = os.getppid()
SCRIPT = Path(sys.argv[0]).name

# In these variables a launcher tells a process its rank, the number of ranks, and its rank on this
# machine. A launcher is there if all of its variables are.
LAUNCHERS = [
    ["RANK", "WORLD_SIZE", "LOCAL_RANK"],  # torchrun
    ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"],  # Open MPI
    ["PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID"],  # PALS (Aurora) ...
    ["PALS_RANKID", "WORLD_SIZE", "PALS_LOCAL_RANKID"],  # ... where the job exports WORLD_SIZE
    ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"],  # MPICH, Intel MPI
    ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_ID"],  # srun (sbatch: no step)
    ["RANK", "WORLD_SIZE", "RANK"],  # by hand, on one machine
]

MEETING_MINUTES = 2  # in which all ranks must have come; of many ranks see start_watchdog
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
stop_signal = ""  # name of the last signal that asked this process to stop

# words of errors that need no traceback, and what to do
HINTS = {
    " by peer": "another rank has died: the same command, given again, goes on",
    " allocate ": "half the --batch_size, with the same --global_batch_size, needs less memory",
    "Too many open files": "raise the limit: ulimit -n 4096",
    "No space left": "a disk is full",
    "DataLoader ": "--num_workers 0 needs no worker",  # that was killed, or timed out
    "Duplicate GPU": "two ranks have the same GPU: start fewer, or give --backend gloo",
}


class RunError(Exception):
    """The run cannot go on: one line that says why, no traceback."""

    status = 1


class InputError(RunError):
    """What the user gave cannot work."""

    status = 2


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """--help with the docstring as it stands and the default of every option."""


class Parser(argparse.ArgumentParser):
    def __init__(self, description):
        super().__init__(description=description, formatter_class=HelpFormatter, allow_abbrev=False)

    def parse_args(self, words=None):
        words = sys.argv[1:] if words is None else words
        # ~/ is the home folder, also after "=", where no shell sees to it, and in a config file
        home = os.path.expanduser("~/")
        words = [re.sub("(^|=)~/", rf"\1{home}", word, count=1) for word in words]
        return super().parse_args(words)

    def error(self, message):
        raise InputError(message)  # so that one rank says it, not all


def number(least, most=math.inf, kind=float):
    """The type of options that are numbers within limits."""

    def parse(text):
        value = kind(text)
        if not least <= value <= most or value == math.inf:
            raise argparse.ArgumentTypeError(f"{text}: must be from {least} to {most}")
        return value

    parse.__name__ = "number"  # for argparse's own messages
    return parse


def boolean(text):
    if text.lower() in ("true", "yes", "1"):
        return True
    if text.lower() in ("false", "no", "0"):
        return False
    raise argparse.ArgumentTypeError(f"{text} is neither True nor False")


COUNT = number(1, kind=int)
# an option that may be given as --compile, --compile=True, --compile no
FLAG = {"type": boolean, "nargs": "?", "const": True, "metavar": "BOOL"}


def add_common_arguments(parser, output_dir, batch_size, precision="auto"):
    add = parser.add_argument_group("the same in every script").add_argument
    add("--config", help="YAML or JSON file of options; the command line wins")
    add("--output_dir", default=output_dir, help="a run found there is resumed")
    add("--prepare_only", **FLAG, default=False, help="read the data into --cache_dir, no more")
    add("--fresh", **FLAG, default=False, help="start anew; the old run is moved aside")
    add("--seed", type=number(0, 2**32, int), default=42, help="of all that is random")
    add("--batch_size", type=COUNT, default=batch_size, help="samples per GPU and micro-batch")
    text = "samples per step, on any number of GPUs; 0: by batch_size and the GPUs"
    add("--global_batch_size", type=number(0, kind=int), default=0, help=text)
    add("--num_workers", type=number(0, kind=int), default=0, help="processes that make batches")
    add("--max_grad_norm", type=number(0), default=1.0, help="clip the gradient; 0: do not")
    kinds = ["auto", "fp32", "tf32", "bf16", "fp16"]
    add("--precision", default=precision, choices=kinds, help="auto: bf16 on GPUs that have it")
    add("--deterministic", **FLAG, default=False, help="bit-identical repeats on GPUs, too; slower")
    add("--compile", **FLAG, default=False, help="torch.compile the model for training")
    add("--save_every", type=COUNT, default=500, help="steps between checkpoints")
    add("--max_minutes", type=number(0), default=0, help="then save and stop; 0: no limit")
    add("--log_every", type=COUNT, default=10, help="steps between log lines")
    add("--wandb_mode", default="disabled", choices=["online", "offline", "disabled"], help="wandb")
    add("--nproc_per_node", type=COUNT, default=1, help="processes to start, if no launcher did")
    kinds = ["auto", "cuda", "xpu", "cpu"]
    add("--device", default="auto", choices=kinds, help="auto: GPUs where there are any")
    kinds = ["auto", "nccl", "gloo", "xccl", "ccl", "xpu"]
    add("--backend", default="auto", choices=kinds, help="auto (also ccl, xpu): by the device")
    seconds = os.environ.get("NCCL_TIMEOUT") or "1800"  # many guides export it
    if not seconds.isdigit() or int(seconds) == 0:
        parser.error(f"NCCL_TIMEOUT={seconds}: expected a number of seconds")
    minutes = int(seconds) / 60
    limit = number(0.01, 1e6)
    add("--timeout_minutes", type=limit, default=minutes, help="limit of one collective")
    # torch.distributed.launch gives it, but also sets RANK
    add("--local_rank", "--local-rank", help=argparse.SUPPRESS)


def parse_with_config(parser):
    """Options of the command line; else of the --config file; else the defaults."""
    args = parser.parse_args()
    path = args.config
    if path is None:
        return args

    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        # JSON may hold tabs, which YAML refuses
        content = json.loads(text) if path.endswith(".json") else yaml.safe_load(text)
        if not isinstance(content, dict):
            raise InputError("expected lines such as batch_size: 32")
        words = config_words(content, parser)
        parser.parse_args(words)
    except (OSError, ValueError, yaml.YAMLError, InputError) as error:
        raise InputError(f"--config {path}: {' '.join(str(error).split())}") from None
    return parser.parse_args([*words, *sys.argv[1:]])  # of two values the later one counts


def config_words(content, parser, section=""):
    """A YAML file as a command line. In a section, attack: {eps: 1} is --attack_eps if the script
    has such an option, and --eps if not: then the section only groups options."""
    words = []
    for key, value in content.items():
        name = f"--{section}_{key}"
        if name not in parser._option_string_actions:
            name = f"--{key}"
        if isinstance(value, dict):
            words += config_words(value, parser, key)
        elif isinstance(value, list):
            words += [name, *map(str, value)]
        elif value is not None:
            words.append(f"{name}={value}")
        elif name not in parser._option_string_actions:  # no value: the default
            raise InputError(f"{key}: there is no option {name}")
    return words


def find_ranks():
    """(rank, world size, local rank) from the launcher; None without one."""
    for names in LAUNCHERS:
        values = [os.environ.get(name) for name in names]
        if not all(values):  # some shells keep empty ones
            continue
        if not all(value.isdigit() for value in values[:3]) or int(values[0]) >= int(values[1]):
            text = " ".join(f"{name}={os.environ[name]}" for name in names[:3])
            raise InputError(f"{text}: expected a rank below the number of ranks, from a launcher")
        return tuple(map(int, values[:3]))
    if os.environ.get("RANK") or os.environ.get("PALS_RANKID"):
        raise InputError("this process has a rank, but no world size: export WORLD_SIZE")
    return None


def setup_ddp(args):
    """Start the log, choose the device, join the process group; returns the device. (all ranks)"""
    # plain python is a group of one: the code below has one path only
    rank, world_size, local_rank = find_ranks() or (0, 1, 0)
    form = f"[RANK {rank}] %(asctime)s %(levelname)s: %(message)s"
    clock = "%Y-%m-%d %H:%M:%S"
    logging.basicConfig(format=form, datefmt=clock, level=logging.INFO, stream=sys.stdout)
    logging.info(f"Process {rank}/{world_size} started")
    device = choose_device(args, local_rank)
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS repeats nothing
        torch.use_deterministic_algorithms(True)

    backend = args.backend
    if backend in ("auto", "ccl", "xpu"):
        backend = dist.get_default_backend_for_device(device)
    fitting = {"cpu": ["gloo"], "cuda": ["nccl", "gloo"], "xpu": ["xccl"]}
    if backend not in fitting[device.type] or not dist.is_backend_available(backend):
        raise InputError(f"--backend {backend} is not for {device.type}, or not in this torch")
    if device.type != "cpu":
        # Python objects, such as a checkpoint, go from rank to rank without the GPU's memory
        backend = f"cpu:gloo,{device.type}:{backend}"
    if not os.environ.get("MASTER_ADDR"):
        if rank != local_rank:  # there are ranks elsewhere
            raise InputError("several machines: export MASTER_ADDR, the name of the first one")
        os.environ["MASTER_ADDR"] = "localhost"
    if not os.environ.get("MASTER_PORT"):
        os.environ["MASTER_PORT"] = "29500" if world_size > 1 else "0"  # 0: any free one

    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"

    logging.info(f"Initializing DDP for rank {rank}...")
    handle_signals(signal.SIG_DFL)  # Python's own would not run before all ranks have come
    watchdog = start_watchdog(rank, world_size, place)
    try:
        wait = timedelta(minutes=args.timeout_minutes)
        gpu = None if device.type == "cpu" else device
        ranks = {"rank": rank, "world_size": world_size}
        dist.init_process_group(backend, timeout=wait, device_id=gpu, **ranks)
    except (dist.DistNetworkError, ValueError) as error:
        text = str(error).splitlines()[0]
        if "EADDRINUSE" in text:
            text = "the port is in use, export another MASTER_PORT"
        raise RunError(f"no meeting at {place}: {text}") from None
    watchdog.cancel()
    compare_ranks(args)

    # Launchers other than torchrun may leave all cores of a machine to each of its ranks.
    here = gather(socket.gethostname()).count(socket.gethostname())
    is_bound = len(os.sched_getaffinity(0)) < os.cpu_count()
    if not os.environ.get("OMP_NUM_THREADS") and not is_bound:
        torch.set_num_threads(max(1, torch.get_num_threads() // here))
    # glibc would give freed memory back to the system, and fetch it again in the next step: up to a
    # tenth of a step on CPUs. Keep it. (An older glibc takes only the first of both limits.)
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(-3, 2**25)  # M_MMAP_THRESHOLD, in bytes
    mallopt(-3, 2**30)
    mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    if rank > 0:
        logging.getLogger().setLevel(logging.ERROR)  # from here on others log errors only
    logging.info(f"{world_size} ranks, {backend} on {device}, torch {torch.__version__}")
    return device


def choose_device(args, local_rank):
    """A GPU for this rank, or the CPU where there is none."""
    kind = getattr(torch.accelerator.current_accelerator(check_available=True), "type", "cpu")
    if args.device not in ("auto", "cpu", kind):
        text = f"torch {torch.__version__} finds only {kind} here"
        raise InputError(f"--device {args.device}: {text}")
    if args.device == "cpu" or kind not in ("cuda", "xpu"):
        return torch.device("cpu")

    # torchrun shows all GPUs to all ranks; mpiexec and srun may show each rank its own one
    count = torch.accelerator.device_count()
    if count > 1 and local_rank >= count:
        raise InputError(f"{count} GPUs here, and a rank {local_rank}: start fewer processes")
    device = torch.device(kind, local_rank % count)
    torch.accelerator.set_device_index(device.index)
    return device


def start_watchdog(rank, world_size, place):
    """Ends this process if it is not cancelled in time. Torch would wait as long as for a slow
    rank, and for ever where another program listens on the port."""
    # many machines that read Python and torch from one file system need minutes for it
    minutes = MEETING_MINUTES + world_size // 64

    def give_up():
        text = f"{world_size} ranks did not meet at {place} in {minutes} minutes"
        sys.stderr.write(f"{SCRIPT}: error: {text}: are all of them started, and for this place?\n")
        os._exit(RunError.status)

    # rank 0, if there is one, says it for all
    seconds = 60 * minutes
    watchdog = threading.Timer(seconds if rank == 0 else seconds + 3, give_up)
    watchdog.daemon = True
    watchdog.start()
    return watchdog


def compare_ranks(args):
    """Refuse a group whose ranks were not started with the same command: a port that two jobs have
    chosen, or an old file on one machine. (all ranks)"""
    own = {"script": SCRIPT, **vars(args)}
    for rank, theirs in enumerate(gather(own)):
        for name in sorted((own.keys() | theirs.keys()) - {"local_rank"}):
            if theirs.get(name) != own.get(name):
                text = f"{name} is {own.get(name)} here, and {theirs.get(name)} on rank {rank}"
                raise InputError(f"the ranks are of different runs: {text}")


def handle_signals(handler):
    for stop in STOP_SIGNALS:
        # Under nohup a process ignores SIGHUP, and goes on doing so. But where torchrun sends it,
        # to end its ranks, they have to save.
        if signal.getsignal(stop) != signal.SIG_IGN or "TORCHELASTIC_RUN_ID" in os.environ:
            signal.signal(stop, handler)


def end_on_signals():
    """From here on a signal ends the process at once: there is nothing to save. (all ranks)"""
    handle_signals(signal.default_int_handler if dist.get_rank() == 0 else signal.SIG_DFL)


def on_signal(number, frame):
    global stop_signal
    stop_signal = signal.Signals(number).name  # training ends its step first, and agrees to stop


def cleanup():
    if dist.is_initialized():
        dist.destroy_process_group()


def launch(parse_args, main):
    """Run main(args) as this rank, or become torchrun to start --nproc_per_node ranks."""
    sys.stdout.reconfigure(errors="backslashreplace")  # an ASCII terminal is no reason to fail
    rank = 0
    try:
        rank, world_size, _ = find_ranks() or (0, 1, 0)
        args = parse_args()
        is_alone = world_size == 1 and "TORCHELASTIC_RUN_ID" not in os.environ
        if args.nproc_per_node > 1 and is_alone:
            become_torchrun(args.nproc_per_node)
        status = main(args)
        cleanup()
    except RunError as error:
        # Mostly all ranks have the same error. So rank 0 says it, and the others wait until their
        # launcher ends them. If it does not within three seconds, rank 0 may have no error.
        if rank > 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(3)
        sys.stderr.write(f"{SCRIPT}: error: {error}\n")
        status = error.status
    except KeyboardInterrupt:
        sys.stderr.write(f"{SCRIPT}: stopped before training or after it; nothing is lost\n")
        status = 130
    except Exception as error:
        explain(error)
        status = 1
    for worker in multiprocessing.active_children():  # one that is stuck would outlive us
        worker.kill()
    sys.stdout.flush()
    os._exit(status)  # at once: a cleanup would wait for other ranks, which may wait for this one


def explain(error):
    """One line for an error that users meet, with what to do; for others the traceback."""
    lines = f"{type(error).__name__}: {error}".splitlines()
    for words, hint in HINTS.items():
        for line in lines:
            if words in line:
                logging.error(f"{hint} ({line.strip()[:200]})")
                return
    logging.error(traceback.format_exc())


def become_torchrun(processes):
    """Go on as torchrun with the same script and options. Unlike by default it hands SIGUSR1 to the
    ranks, and gives them time to save."""
    # any free port of this machine, which may not know its own name
    where = ["--standalone", "--local-addr=127.0.0.1"]
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "120")  # seconds
    names = [stop.name for stop in STOP_SIGNALS if signal.getsignal(stop) != signal.SIG_IGN]
    threads = max(1, torch.get_num_threads() // processes)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # torchrun would say 1
    options = [f"--nproc_per_node={processes}", f"--signals-to-handle={','.join(names)}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *where, *options]
    os.execv(sys.executable, [*torchrun, *sys.argv])


def gather(value):
    """[value of rank 0, value of rank 1, ...] on every rank. (all ranks)"""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_rank0(function, *args, group=None):
    """function(*args), called on rank 0 alone: what it returns, or raises, on all ranks, so that
    nobody waits for a rank 0 that has failed. (all ranks)"""
    outcome = [None, None]  # result, error
    if dist.get_rank() == 0:
        try:
            outcome[0] = function(*args)
        except RunError as error:
            outcome[1] = error
        except Exception:  # not every error can be sent to the other ranks, but its text can
            outcome[1] = RuntimeError(traceback.format_exc())
    dist.broadcast_object_list(outcome, group=group)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


# ==================================================================================================
# What happens around a step: batches, precision, update, log, checkpoints. Also the same lines in
# every training script.

MAX_BAD_STEPS = 10  # in a row, then the run ends
# options that a resumed run may be given anew; with others it would be another run
MAY_CHANGE = """config output_dir skip_bad_data fresh batch_size num_workers compile deterministic
    save_every max_minutes log_every wandb_mode nproc_per_node device backend timeout_minutes
    local_rank""".split()

folder_lock = None  # the file that rank 0 keeps open, and so locked, as long as it lives


def list_problems(problems):
    """Of many at most 20, and a count."""
    more = [f"... and {len(problems) - 20} more"] if len(problems) > 20 else []
    return "\n  ".join(["", *problems[:20], *more])


def file_sizes(folder):
    """{path: bytes} of the files in a folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


def is_whole(folder):
    """Whether a folder of the cache still has what was written. Programs that tidy up take files
    out of old folders."""
    try:
        written = json.loads((folder / "sizes.json").read_text())
    except (OSError, ValueError):
        return False
    return written.items() <= file_sizes(folder).items()


def cached(cache_dir, name, key, write):
    """The folder of what write(folder) makes, once for each key. It is there whole, or not at all.
    Runs that share the cache do not touch each other's. (rank 0)"""
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    folder = Path(cache_dir) / f"{name}-{digest}"
    if is_whole(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.exists():
            logging.warning(f"{folder} is damaged, and made again")
            shutil.rmtree(folder)
        place = tempfile.TemporaryDirectory(dir=folder.parent, prefix="unfinished-")
    except OSError as error:
        raise InputError(f"--cache_dir {cache_dir} is not writable: {error}") from None
    for old in folder.parent.glob("unfinished-*"):
        with contextlib.suppress(OSError):  # another run is at work in it, and has it locked
            with open(old / "lock", "r+") as file:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(old)
    with place, lock_file(Path(place.name) / "lock"):
        new = Path(place.name) / "data"
        new.mkdir()
        write(new)
        for file in new.glob("*.npy"):
            np.load(file, mmap_mode="r")  # a full disk can cut off an array without an error
        (new / "sizes.json").write_text(json.dumps(file_sizes(new)))
        try:
            new.rename(folder)
        except OSError:  # another run was faster, with the same data
            if not folder.exists():
                raise
    return folder


def read_once(prepare, args):
    """The folder that prepare(args) returns on rank 0, however long it takes. (all ranks)"""
    end_on_signals()
    gather(None)  # all are there: to make a group waits as long as its limit says
    patient = dist.new_group(backend="gloo", timeout=timedelta(days=30))
    folder = on_rank0(prepare, args, group=patient)
    gather(None)  # all have it
    dist.destroy_process_group(patient)  # or its connections would stay
    for _ in range(60):  # a network file system may show a new folder late
        if folder.exists():
            return folder
        time.sleep(1)
    raise InputError(f"rank 0 has {folder}, this machine has not: all must see --cache_dir")


class GlobalBatchSampler(DistributedSampler):
    """Which samples each step is made of. They depend on (seed, epoch) alone, and so neither on the
    number of ranks nor on a restart.

    Yields for each micro-batch of this rank: the step, the ids of the whole global batch, and the
    places in it that are this rank's, from step `start` on. (Random draws that depend on the seed,
    the step and the place do not depend on the number of ranks.) cost[id] is the work that a sample
    makes, such as its length: the global batch stays a random sample; within it samples of similar
    cost share a micro-batch, where they need little padding, and all ranks get equal work."""

    def __init__(self, ids, args, cost=None):
        super().__init__(ids, seed=args.seed)
        self.ids = ids
        self.cost = np.zeros(ids.max() + 1) if cost is None else cost
        self.global_batch = args.global_batch_size
        self.steps = len(ids) // self.global_batch  # an epoch leaves out the few that are left over
        self.start = 0
        self.accumulation = math.ceil(self.global_batch / (args.batch_size * self.num_replicas))
        parts = self.num_replicas * self.accumulation
        if not parts <= self.global_batch <= len(ids):
            limits = f"{parts} (ranks x micro-batches) to {len(ids)} (to train on)"
            hint = "see --global_batch_size and --batch_size"
            raise InputError(f"{self.global_batch} samples a step: must be from {limits}; {hint}")
        each = f"{self.global_batch / parts:g} per GPU x {self.num_replicas} GPUs"
        logging.info(f"  Total batch size: {self.global_batch:,} ({each} x {self.accumulation})")

    def count_steps(self, epochs, most=math.inf):
        """Optimizer steps of a run; a warning if they are few."""
        steps = min(epochs * self.steps, most)
        if steps < 100:
            text = f"{len(self.ids)} samples, {self.global_batch} a step, {epochs} epochs"
            logging.warning(f"only {steps} optimizer steps ({text}): few networks learn in so few")
        return steps

    def __iter__(self):
        for step in itertools.count(self.start):
            epoch, position = divmod(step, self.steps)
            if position == 0 or step == self.start:
                order = np.random.default_rng([self.seed, epoch]).permutation(self.ids)
            whole = order[position * self.global_batch : (position + 1) * self.global_batch]
            whole = whole[np.argsort(self.cost[whole], kind="stable")]
            for places in np.array_split(np.arange(len(whole)), self.accumulation):
                # dealt to and fro, 0 1 2 2 1 0 0 1 ..., or the last rank would get the costliest
                turn = np.arange(len(places)) % (2 * self.num_replicas)
                mine = np.minimum(turn, 2 * self.num_replicas - 1 - turn) == self.rank
                yield step, whole, places[mine]


def make_loader(dataset, sampler, args, device):
    """An endless iterator over micro-batches. The host makes the next one while a GPU computes; if
    that takes longer than the GPU needs (data_wait is high), give --num_workers."""
    if args.num_workers > 0:
        # After a collective a thread of gloo holds a lock of Python for a moment. A worker that is
        # forked in this moment waits for it for ever (before Python 3.12: cpython issue 112275).
        time.sleep(0.2)
    loader = DataLoader(
        dataset,
        batch_size=None,  # the sampler makes whole batches
        sampler=sampler,
        num_workers=args.num_workers,
        # forked workers share the dataset's memory; others would each be sent a copy
        multiprocessing_context="fork" if args.num_workers > 0 else None,
        timeout=60 * args.timeout_minutes if args.num_workers > 0 else 0,  # a worker that is stuck
        pin_memory=device.type != "cpu",
        worker_init_fn=start_worker,
    )
    return iter(loader)


def start_worker(worker):
    """Called in each worker of a loader."""
    # A launcher sends its signals to the workers, too, but their rank still needs them.
    for stop in STOP_SIGNALS:
        signal.signal(stop, signal.SIG_IGN)
    # Send batches through a pipe. Torch's own way, a file in shared memory for each tensor, is slow
    # for small ones, and it fails where /dev/shm is full, or the path of TMPDIR is long.
    ForkingPickler.register(torch.Tensor, lambda tensor: (torch.from_numpy, (tensor.numpy(),)))


def choose_precision(args, device):
    """(a function that makes the context of a forward pass, gradient scaler of fp16)"""
    name = args.precision
    if name == "auto":
        has_bf16 = device.type == "xpu" or (
            device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        )
        name = "bf16" if has_bf16 else "fp32"
        logging.info(f"--precision {name}")
    # cuDNN rounds to TF32 unless told otherwise
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = name == "tf32"
    torch.backends.cuda.enable_cudnn_sdp(False)  # this attention is slow where shapes vary
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name, torch.float32)
    is_low = dtype != torch.float32
    autocast = functools.partial(torch.autocast, device.type, dtype, enabled=is_low)
    return autocast, torch.amp.GradScaler(device.type, enabled=name == "fp16")


def wrap_ddp(model, args, device):
    compiled = model
    if args.compile:
        compiled = torch.compile(model)
        # do not split it at DDP's buckets: that takes long, and fails where shapes vary
        torch._dynamo.config.optimize_ddp = False
    if dist.get_world_size() == 1:  # nothing to add up
        return compiled
    wrapped = DistributedDataParallel(
        compiled,
        device_ids=None if device.type == "cpu" else [device.index],
        gradient_as_bucket_view=True,
    )
    # Buffers are alike on all ranks, or each rank's own. (Torch 2.13 renames the argument.)
    wrapped.broadcast_buffers = False
    # DDP puts the gradients in another order after its first backward pass. Sums over three and
    # more ranks then differ in the last bit: a run that was started again would differ from one
    # that was not. So make that pass now. It needs no batch: in place of the network stands one
    # that returns its input, and the loss is 0 x the sum of all parameters.
    network = wrapped.module
    wrapped.module = nn.Identity()
    zero = sum((p * 0).sum() for p in model.parameters() if p.requires_grad)
    wrapped(zero).backward()
    wrapped.module = network
    wrapped.zero_grad()
    return wrapped


def seed_step(args, step):
    """Dropout depends on (seed, step, rank) alone: there is no random state to be saved. (The
    factors keep steps below 1,000,003 and ranks below 4,099 apart.)"""
    torch.manual_seed((args.seed * 1_000_003 + step) * 4099 + dist.get_rank())


def update_if_finite(args, optimizer, scaler):
    """Clip, and step if the gradient is finite. Returns its norm. With a fused optimizer nothing is
    read from the device, so that the host can go on and queue the next step."""
    scaler.unscale_(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = nn.utils.clip_grad_norm_(parameters, args.max_grad_norm or math.inf)
    # All ranks have the same gradients by now: a NaN of one is on every rank, and all skip alike.
    if optimizer.defaults.get("fused"):
        optimizer.found_inf = (~norm.isfinite()).float()  # 1: it changes nothing
        optimizer.step()
    elif norm.isfinite():  # the host waits for the device here, which costs speed
        optimizer.step()
    scaler.update()
    optimizer.zero_grad()
    return norm


class Meter:
    """Sums what the steps give, on the device.

    To read a number from a GPU the host waits until the GPU has done all that is queued, and then
    the GPU waits for the host. So a step reads nothing. About once a second, and for every log
    line, the ranks meet: they read their sums, and agree whether to stop."""

    def __init__(self, names, args, device):
        self.names = names  # of numbers of which each rank has a share
        self.args = args
        self.sums = torch.zeros(len(names) + 2, device=device)  # and the norm, and 1, of good steps
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

    def add(self, shares, norm):
        """shares: (len(names),) of a step"""
        values = torch.cat([shares, norm.reshape(1), torch.ones_like(norm).reshape(1)])
        self.sums += torch.where(norm.isfinite(), values, 0.0)
        self.bad_in_row = torch.where(norm.isfinite(), 0.0, self.bad_in_row + 1)
        self.steps += 1

    def meet(self, log, row, samples, now=False):
        """Meet about once a second, at every log line, or now. Agree whether to stop. At a log
        line write `row`, to which this adds the means, and the speed; a step has so many samples.
        Returns why to stop, or "". (all ranks)"""
        must_log = row["step"] % self.args.log_every == 0 or now
        if not must_log and self.steps % self.every > 0:
            return ""
        sums = self.sums.tolist()  # waits for the device
        seconds = time.monotonic() - self.began
        own = {"sums": sums, "seconds": seconds, "data_wait": self.data_wait}
        own["wish"] = wish_to_stop(self.args)
        everyone = gather(own)
        if self.bad_in_row >= MAX_BAD_STEPS:
            text = f"{MAX_BAD_STEPS} steps in a row without a finite gradient"
            hint = "--fresh and a lower learning rate, or look for such numbers in the data"
            raise RunError(f"{text}: {hint}")
        # the next meeting is in about a second, by the clock of rank 0: after the same step for all
        seconds = everyone[0]["seconds"]
        self.every = max(1, int(self.steps / seconds))
        reason = max(theirs["wish"] for theirs in everyone)  # of any rank that has one
        if not must_log and not reason:
            return ""

        *_, norm, good = sums  # the same on all ranks
        row["skipped"] = self.steps - good
        if good > 0:
            shares = np.sum([theirs["sums"] for theirs in everyone], axis=0)
            for name, share in zip(self.names, shares, strict=False):
                row[name] = share / good
            row["grad_norm"] = norm / good
        row["samples_per_s"] = self.steps * samples / seconds
        row["data_wait"] = max(theirs["data_wait"] for theirs in everyone) / seconds
        log.write(row)
        self.start()
        return reason


def wish_to_stop(args):
    """Why this rank would stop; "" if it would go on."""
    if "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != PARENT:
        return "death of torchrun"  # nobody else would ever end this process
    if 0 < 60 * args.max_minutes < time.monotonic() - START:
        return "time limit"
    return stop_signal


def exit_status(reason):
    """For a reason to stop. A time limit, and the SIGUSR1 of a batch queue, are planned."""
    logging.info(f"stopped by {reason}: the same command (without --fresh) goes on")
    return {"time limit": 0, "SIGUSR1": 0, "SIGINT": 130, "SIGTERM": 143}.get(reason, 1)


def save_checkpoint(name, args, log, loop, must_succeed=False, **parts):
    """Write OUTPUT_DIR/name: options, where training stands, the state of `parts`. A run goes on
    without a save that fails, since the next may succeed; the first and the last one must.
    Returns whether it succeeded. (all ranks)"""

    def write():
        state = {"script": SCRIPT, "args": vars(args), "loop": loop}
        state.update(wandb_id=log.wandb_id, log_size=log.size())
        for key, part in parts.items():
            state[key] = part.state_dict()
            state[f"class of {key}"] = type(part).__name__
        folder = Path(args.output_dir)
        try:
            with open(folder / "new.tmp", "wb") as file:
                torch.save(state, file)
                file.flush()
                sync_to_disk(file)
            if name == "latest.pt" and (folder / name).exists():
                os.replace(folder / name, folder / "previous.pt")
            os.replace(folder / "new.tmp", folder / name)  # whole, or as it was
        except (OSError, RuntimeError) as error:  # most likely a full disk
            if "DataLoader worker" in str(error):  # its end can interrupt us anywhere
                raise
            with contextlib.suppress(OSError):
                (folder / "new.tmp").unlink()
            reason = f"is the disk full? {str(error).splitlines()[0]}"
            text = f"no {name} at step {loop['step']} ({reason})"
            if must_succeed:
                raise RunError(text) from None
            logging.warning(f"{text}; the run goes on")
            return False
        return True

    return on_rank0(write)


def restore(state, **parts):
    """Give `parts` what save_checkpoint has kept of them. Returns where training stands."""
    for name, part in parts.items():
        if name not in state:
            raise InputError(f"the checkpoint has no {name}: is it a copy of best.pt?")
        before = state[f"class of {name}"]
        if before != type(part).__name__:
            text = f"this {name} is {type(part).__name__}, that of the checkpoint {before}"
            raise InputError(f"{text}: --fresh moves the old run aside")
        try:
            part.load_state_dict(state[name])
        except (RuntimeError, ValueError) as error:
            raise InputError(f"the checkpoint does not fit this {name}: {error}") from None
    loop = state["loop"]
    state.clear()  # each rank has a copy: free it
    return loop


def sync_to_disk(file):
    try:
        os.fsync(file.fileno())
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that have no such call
            raise


def read_checkpoint(path):
    """Its content; None if it is missing or damaged. (rank 0)"""
    try:
        # torch.load does not look at the checksums
        if zipfile.ZipFile(path).testzip() is None:
            return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        return None
    except (PermissionError, pickle.UnpicklingError) as error:  # not for want of some bytes
        raise InputError(f"{path} cannot be read: {error}") from None
    except Exception as error:  # cut short, or a flipped bit, which raises errors of many kinds
        logging.warning(str(error))
    logging.warning(f"{path} is damaged")
    return None


def lock_file(path):
    """The file, open, and locked until it is closed. Raises BlockingIOError where another process
    has it."""
    file = open(path, "a")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:  # some network file systems have no locks
        logging.warning(f"{path} cannot be locked ({error}): start no second run there")
    return file


def lock_folder(folder):
    """Only one run works in a folder, by whatever name and on whatever mount. (rank 0)"""
    global folder_lock
    folder.mkdir(parents=True, exist_ok=True)
    try:
        folder_lock = lock_file(folder / "lock")
    except BlockingIOError:
        raise InputError(f"another run is at work in {folder}: give another --output_dir") from None


def find_checkpoint(folder, fresh):
    """The state to go on from; None for a new run. (rank 0)"""
    try:
        lock_folder(folder)
        counts = [os.environ.get(f"{name}_RESTART_COUNT") for name in ("TORCHELASTIC", "SLURM")]
        is_restart = any(count not in (None, "", "0") for count in counts)
        checkpoints = []  # what a run, of whichever script, would write over
        for pattern in ("latest.pt", "previous.pt", "*best.pt", "*_model.pt"):
            checkpoints += folder.glob(pattern)
        is_run = checkpoints or (folder / "metrics.jsonl").exists()
        if fresh and is_run and is_restart:
            logging.warning(f"--fresh: this is a restart, and goes on with what {folder} has")
        elif fresh and is_run:
            old = folder.rename(f"{folder}.old-{time.strftime('%Y%m%d-%H%M%S')}")
            logging.info(f"--fresh: what {folder} had is now in {old}")
            checkpoints = []
            lock_folder(folder)
        (folder / "metrics.jsonl").touch()
    except OSError as error:
        raise InputError(f"--output_dir {folder} is not writable: {error}") from None

    latest = folder / "latest.pt"
    previous = folder / "previous.pt"
    state = read_checkpoint(latest)
    if state is None:
        state = read_checkpoint(previous)
        if state is not None:
            with contextlib.suppress(FileNotFoundError):  # a kill within a save leaves none
                # or the next save would put it over previous.pt
                latest.replace(folder / "damaged.pt")
        elif checkpoints:
            raise InputError(f"no checkpoint in {folder} is whole: --fresh moves it aside")
    if state and state.get("loop", {}).get("best") and folder / "best.pt" not in checkpoints:
        logging.warning(f"{folder}/best.pt is gone, and comes back only if training gets better")
    return state


def open_run(args, data_hash, may_change):
    """Lock --output_dir, and find the state to go on from, None for a new run. Only rank 0 must see
    the folder. From here on signals are noted, and end the run after a step. (all ranks)"""
    state = on_rank0(find_checkpoint, Path(args.output_dir), args.fresh)
    hint = "give the same again, another --output_dir, or --fresh, which moves the old run aside"
    if state and state.get("script") != SCRIPT:
        raise InputError(f"{args.output_dir} holds a run of {state.get('script')}: {hint}")
    if args.global_batch_size == 0:
        args.global_batch_size = args.batch_size * dist.get_world_size()
        if state:  # a resumed run keeps its own, on any number of ranks
            args.global_batch_size = state["args"]["global_batch_size"]
    args.data_hash = data_hash
    compare_ranks(args)
    handle_signals(on_signal)  # from here on there is something to save
    if state is None:
        logging.info(f"a new run in {args.output_dir}")
        return None

    for name, value in vars(args).items():
        before = state["args"].get(name)
        if value == before or name in MAY_CHANGE:
            continue
        text = f"{name} is {value}, and {args.output_dir} has a run with {before}"
        if name == "data_hash":
            text = f"the data are not those of the run in {args.output_dir}"
        if name not in may_change:
            raise InputError(f"{text}: {hint}")
        logging.info(text)
    logging.info(f"resuming {args.output_dir} at step {state['loop']['step']}")
    return state


class RunLog:
    """The log line, metrics.jsonl and wandb; at the end summary.json and curves.png. (all ranks, of
    which rank 0 writes)"""

    def __init__(self, args, state):
        self.args = args
        self.path = Path(args.output_dir) / "metrics.jsonl"
        self.wandb_id = state["wandb_id"] if state else os.urandom(4).hex()
        self.wandb = None
        if dist.get_rank() > 0:
            return
        # steps after the checkpoint (without one: all) are made again: remove their lines
        size = state["log_size"] if state else 0
        kept = self.path.read_bytes()[:size]
        os.truncate(self.path, kept.rfind(b"\n") + 1)  # whole lines
        if len(kept) < size:
            logging.warning(f"{self.path} has been cut: rows before the checkpoint are lost")
        self.path.with_name("summary.json").unlink(missing_ok=True)  # of a run that had ended
        if args.wandb_mode != "disabled":
            try:
                self.wandb = self.start_wandb()
            except Exception as error:  # no network, no login: no reason to stop
                logging.warning(f"wandb is off, metrics.jsonl goes on: {error}")

    def start_wandb(self):
        import wandb

        sys.stdin = open(os.devnull)  # so that it never asks for a key among the log lines
        os.environ.setdefault("WANDB_INIT_TIMEOUT", "30")  # seconds
        # An offline run cannot be resumed: `wandb sync` of the second folder would overwrite what
        # the first has sent. So each start has an id of its own, in one group.
        is_online = self.args.wandb_mode == "online"
        return wandb.init(
            project=os.environ.get("WANDB_PROJECT", Path(SCRIPT).stem),
            mode=self.args.wandb_mode,
            id=self.wandb_id if is_online else None,
            resume="allow" if is_online else None,
            group=self.wandb_id,
            config=vars(self.args),
        )

    def size(self):
        """Bytes of metrics.jsonl, to be kept in a checkpoint."""
        return self.path.stat().st_size

    def write(self, row):
        logging.info(" ".join(f"{name}={value:.6g}" for name, value in row.items()))
        if dist.get_rank() > 0:
            return
        row = {name: value for name, value in row.items() if math.isfinite(value)}  # NaN: no JSON
        size = self.size() if self.path.exists() else 0
        try:
            with open(self.path, "a") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            logging.warning(f"metrics.jsonl lacks step {row['step']}: {error}")
            with contextlib.suppress(OSError):
                os.truncate(self.path, size)  # a full disk may have taken half of the line
        if self.wandb:
            try:
                self.wandb.log(row, step=row["step"])
            except Exception as error:
                logging.warning(f"wandb is off, metrics.jsonl goes on: {error}")
                self.wandb = None

    def close(self, status, **summary):
        """status: "finished", or why the run was stopped"""
        if dist.get_rank() > 0:
            return
        seconds = round(time.monotonic() - START, 1)
        summary.update(status=status, script=SCRIPT, seconds=seconds, args=vars(self.args))
        summary.update(world_size=dist.get_world_size(), torch=torch.__version__)
        try:
            self.path.with_name("summary.json").write_text(json.dumps(summary, indent=1))
            if self.size() > 0:  # a run that is stopped at once has no rows
                self.draw()
        except (ImportError, OSError, ValueError, KeyError) as error:  # the run itself is over
            logging.warning(f"no summary.json or no curves.png: {error}")
        if self.wandb:  # without a network its end would wait for ever
            finish = threading.Thread(target=self.wandb.finish, daemon=True)
            finish.start()
            finish.join(30)
            if finish.is_alive():
                folder = Path(self.wandb.dir).parent
                logging.warning(f"wandb lacks the last rows, send them: wandb sync {folder}")

    def draw(self):
        """curves.png: a panel for each column of metrics.jsonl"""
        import pandas
        from matplotlib import pyplot

        rows = pandas.read_json(self.path, lines=True).set_index("step")
        rows = rows.drop(columns=["epoch", "phase"], errors="ignore")
        lines = math.ceil(len(rows.columns) / 3)
        figure, axes = pyplot.subplots(lines, 3, squeeze=False, figsize=(12, 3 * lines))
        for axis, name in zip(axes.flat, rows.columns, strict=False):
            rows[name].dropna().plot(ax=axis, title=name, marker=".")
        figure.tight_layout()
        figure.savefig(self.path.with_name("curves.png"))


# End of the lines that every script has.
# ==================================================================================================


if __name__ == "__main__":
    launch(parse_args, main)
