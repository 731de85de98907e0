"""Train a robust energy-based model of images: one network that classifies under attack, tells
images from what is no image of its kind, and generates them.

Dual adversarial training (Yin et al. 2025, arXiv 2510.13872). The logits f(x) of a classifier are
also an energy, E(x) = -logsumexp f(x). Stage 1 (at) is adversarial training of the classifier.
Stage 2 (dat) adds a loss that tells real images from out-of-distribution (OOD) images that an
attack of T steps has made look real. T grows when the network tells them apart too easily.

    python tools/prepare_images.py digits                # once: data/digits, no download
    python run_train_rebm_ddp.py configs/config_rebm_quickstart.yaml
    torchrun --nproc_per_node=4 run_train_rebm_ddp.py configs/config_rebm_cifar10.yaml
    python run_train_rebm_ddp.py configs/config_rebm_cifar10.yaml attack.max_steps=100 use_ddp=False

use_ddp=False is one process that uses all GPUs of the machine by DataParallel. After training:
tools/evaluate_rebm.py (strong attacks, OOD detection, Frechet distance), tools/generate_rebm.py.

Data: folders of tools/prepare_images.py. Pixels are in [0, 1], and so are the lengths of attacks.

Logged, over all ranks: step, phase (1 at, 2 dat), epoch, lr, loss (its parts clf_loss, cross
entropy in nats, bce and r1 by image), grad_norm (before clipping), skipped (steps whose gradient
was not finite), samples_per_s, data_wait (share of the time); in stage 2 T (steps of the attack)
and auc (real against attacked OOD images, all ranks pooled). val/STAGE/..., of the averaged weights
on held-out images: clean and robust (accuracy without and under attack), cross_entropy, auroc and
adv_auroc (images against OOD images, which adv_auroc attacks).

Files in --output_dir: at_best.pt (stage 1), best.pt, latest.pt, previous.pt, metrics.jsonl,
curves.png, summary.json.

Unlike the original (xuwangyin/DAT) stage 1 is included; all ranks validate; the AUC is pooled;
weight decay leaves out biases and norms; the best weights are chosen on images held out of the
training set; real images for the energy are drawn anew in each step.
"""

import argparse
import contextlib
import copy
import ctypes
import difflib
import fcntl
import gc
import hashlib
import json
import logging
import math
import os
import queue
import re
import signal
import sys
import threading
import time
import traceback
import zipfile
from collections import deque
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import yaml
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from tqdm import tqdm

PHASES = {"at": 1, "dat": 2}  # numbers of the stages in the log
GENERATED = ["noise", "blobs"]  # OOD images that need no files

# --------------------------------------------------------------------------------------------------
# Arguments


def parse_args():
    parser = Parser(description=__doc__)
    add = parser.add_argument_group("data").add_argument
    add("--data", default="data/digits", help="folder of tools/prepare_images.py")
    add("--outdist_data", default="noise", help="OOD images: such a folder, noise or blobs")
    kinds = ["none", "shift", "original", "autoaugment_cutout", "resized_crop", "resize"]
    add("--augm_type_classification", default="shift", choices=kinds, help="of images to classify")
    add("--augm_type_generation", default="none", choices=kinds, help="of real and OOD images")

    add = parser.add_argument_group("model").add_argument
    add("--model_type", default="SmallNet", choices=[*MODELS], help="network")
    add("--width", type=count, default=24, help="channels of SmallNet")
    add("--norm", default="none", choices=["none", "layer", "batch"], help="of SmallNet")
    add("--use_convstem", **FLAG, default=True, help="ConvNeXt: convolutions, not patches")
    add("--normalize_input", **FLAG, default=True, help="subtract mean, divide by deviation")
    add("--ckpt_path", help="weights to start from: a checkpoint or a state_dict")

    norms = ["L2", "Linf"]
    add = parser.add_argument_group("attack, on OOD images").add_argument
    add("--attack_max_steps", type=int, default=50, help="steps T at most")
    add("--attack_start_step", type=int, default=0, help="T at the start of stage 2")
    add("--attack_step_size", type=positive, default=0.1, help="length of a step")
    add("--attack_eps", type=positive, default=math.inf, help="radius of the ball; inf: none")
    add("--attack_norm", default="L2", choices=norms, help="of step and ball")

    add = parser.add_argument_group("indist_attack_clf, on images to classify").add_argument
    text = "steps; 0: standard training, to compare with"
    add("--indist_attack_clf_max_steps", type=int, default=10, help=text)
    add("--indist_attack_clf_step_size", type=positive, default=0.1, help="length of a step")
    add("--indist_attack_clf_eps", type=positive, default=0.5, help="radius of the ball")
    add("--indist_attack_clf_norm", default="L2", choices=norms, help="of step and ball")

    add = parser.add_argument_group("objective").add_argument
    add("--r1reg", type=float, default=0.0, help="weight of R1, the energy's squared gradient")
    add("--logsumexp", **FLAG, default=True, help="energy -logsumexp f(x); False: -f_y(x)")
    add("--logsumexp_sampling", **FLAG, default=False, help="attack by it; False: by f_y(x)")
    add("--AUC_th", type=float, default=0.8, help="T grows when the mean AUC is at least this")
    add("--min_imgs_per_threshold", type=count, default=1000, help="real images that it is over")

    add = parser.add_argument_group("stages").add_argument
    text = "both: at, then dat; dat alone starts from --ckpt_path"
    add("--stage", default="both", choices=["both", *PHASES], help=text)
    kinds = [*OPTIMIZERS]
    add("--at_epochs", type=count, default=40, help="passes over the images in stage 1")
    add("--at_optimizer", default="adamw", choices=kinds, help="of stage 1")
    add("--at_lr", type=positive, default=2e-3, help="peak of stage 1; half a cosine down to 0")
    add("--at_wd", type=float, default=1e-2, help="weight decay of stage 1, of matrices")
    add("--total_epochs", type=count, default=100, help="passes over the images in stage 2")
    add("--optimizer", default="sgd", choices=kinds, help="of stage 2")
    add("--lr", type=positive, default=1e-3, help="learning rate of stage 2, constant")
    add("--wd", type=float, default=5e-4, help="weight decay of stage 2, of matrices")
    add("--ema", type=float, default=0.999, help="decay of the averaged weights; 0: no average")
    add("--zero", **FLAG, default=False, help="each rank keeps a part of the optimizer's state")

    add = parser.add_argument_group("validation").add_argument
    text = "images between validations; 0: only at the end of a stage"
    add("--n_imgs_per_evaluation_log", type=int, default=50_000, help=text)
    add("--eval_images", type=count, default=1000, help="held-out images, and OOD images, at most")
    add("--eval_steps", type=count, default=20, help="steps of the attack on them")
    add("--ood_eps", type=positive, default=1.0, help="radius of the attack on OOD images")
    add("--eval_batch_size", type=count, default=256, help="images at a time")

    add = parser.add_argument_group("ranks").add_argument
    add("--use_ddp", **FLAG, default=True, help="False: one process, all GPUs by DataParallel")
    add("--ddp_backend", help="as --backend")
    add("--monitor_every", type=int, default=0, help="compare the ranks every N steps; 0: never")
    add("--log_ranks", **FLAG, default=False, help="log loss, data_wait, memory of each rank")

    add_common_arguments(parser, output_dir="outputs/rebm", batch_size=128)
    args = parse_with_config(parser)
    if args.ddp_backend:
        args.backend = args.ddp_backend
    if args.stage == "dat" and not args.ckpt_path:
        parser.error("--stage dat starts from the weights of stage 1: give --ckpt_path")
    if args.indist_attack_clf_eps == math.inf:
        parser.error("--indist_attack_clf_eps inf: a ball without end holds images of all classes")
    if not args.use_ddp and (args.zero or args.compile):
        parser.error("--use_ddp False takes no --zero and no --compile")
    at_most = {"ema": 1, "AUC_th": 1, "attack_start_step": args.attack_max_steps}
    at_least_0 = ["attack_max_steps", "indist_attack_clf_max_steps", "r1reg", "at_wd", "wd"]
    at_least_0 += ["n_imgs_per_evaluation_log", "monitor_every"]
    for name in [*at_least_0, *at_most]:
        value = getattr(args, name)
        most = at_most.get(name, math.inf)
        if not 0 <= value <= most:
            parser.error(f"--{name} {value}: must be from 0 to {most}")
    return args


def positive(text):
    """The type of options that are numbers above 0."""
    if not float(text) > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return float(text)


# --------------------------------------------------------------------------------------------------
# Data


VERIFIED = 2**28  # bytes; longer files are not read at the start, only their size is compared


class Images:
    """A folder of tools/prepare_images.py, mapped into memory that the ranks of a node share."""

    def __init__(self, name, or_else=""):
        folder = Path(name)
        if not (folder / "meta.json").exists():
            example = "python tools/prepare_images.py digits makes data/digits"
            text = f"{folder} is not there: give a folder of images{or_else}; {example}"
            if folder.exists():
                text = f"{folder} is not prepared: python tools/prepare_images.py --help shows how"
            raise InputError(text)
        text = (folder / "meta.json").read_text()
        hint = f"remove {folder} and prepare it anew"
        try:
            meta = json.loads(text)
            files = meta["files"]
        except (ValueError, KeyError):
            expected = "expected a folder of tools/prepare_images.py"
            raise InputError(
                f"{folder}/meta.json is damaged or another tool's: {expected}"
            ) from None
        for file, (size, written) in files.items():
            path = folder / file
            is_same = path.exists() and path.stat().st_size == size
            if is_same and size <= VERIFIED:
                is_same = hashlib.sha256(path.read_bytes()).hexdigest() == written
            if not is_same:
                raise InputError(f"{path} is missing or damaged: {hint}")

        self.name = str(name)
        self.hash = hashlib.sha256(text.encode()).hexdigest()[:12]
        self.classes = meta["classes"]  # names; [] where images have no labels
        self.size = meta["size"]  # pixels a side, after the augmentation
        # images (N, C, side, side) uint8; a side may be longer than `size`, for random crops
        # (asarray: np.memmap itself is slower, and a plain view of it is still mapped)
        self.images = np.asarray(np.load(folder / "images.npy", mmap_mode="r"))
        self.labels = np.load(folder / "labels.npy")  # (N,) int64
        self.split = np.load(folder / "split.npy")  # (N,) uint8
        self.channels = self.images.shape[1]

    def part(self, name):
        """Numbers of the images to train on, to validate on or to test on."""
        return np.flatnonzero(self.split == ["train", "valid", "test"].index(name))

    def some(self, name, most):
        """At most so many of them, from all places: files lie in the order of their classes."""
        ids = self.part(name)
        if len(ids) <= most:
            return ids
        return np.sort(np.random.default_rng(0).choice(ids, most, replace=False))


class GeneratedImages(Images):
    """OOD images that need no files: noise, or blobs, which are noise of 4 x 4 places scaled up."""

    def __init__(self, kind, channels, size):
        self.name = kind
        self.hash = kind
        self.channels = channels
        most = 2**29 // (channels * size * size)  # half a gigabyte of each part
        counts = [min(count, most) for count in (20_000, 1024, 10_000)]  # train, valid, test
        self.images = np.empty((sum(counts), channels, size, size), np.uint8)
        self.split = np.repeat([0, 1, 2], counts)
        rng = np.random.default_rng(GENERATED.index(kind))
        side = size if kind == "noise" else 4
        for first in range(0, len(self.images), 1000):  # a few at a time: they are floats here
            rows = self.images[first : first + 1000]
            places = rng.integers(0, 256, (len(rows), channels, side, side), np.uint8)
            scaled = F.interpolate(torch.from_numpy(places).float(), size, mode="bilinear")
            rows[:] = scaled.round().byte().numpy()


def load_outside(name, inside):
    """OOD images that the network of the images `inside` can read."""
    if name in GENERATED:
        return GeneratedImages(name, inside.channels, inside.size)
    outside = Images(name, or_else=f", or {' or '.join(GENERATED)}")
    if outside.hash == inside.hash:
        raise InputError(f"{name} has the images to classify: OOD images must be others")
    if (outside.channels, outside.size) != (inside.channels, inside.size):
        text = f"{name} has {outside.channels} channels and {outside.size} pixels a side"
        expected = f"{inside.channels} and {inside.size}, as {inside.name} has"
        raise InputError(f"{text}: expected {expected}")
    return outside


def load_data(args):
    """(images, OOD images), the same on all ranks. (all ranks)"""
    inside = Images(args.data)
    if not inside.classes:
        raise InputError(f"{args.data} has no labels: it can only be --outdist_data")
    kinds = [args.augm_type_classification, args.augm_type_generation]
    if inside.channels != 3 and "autoaugment_cutout" in kinds:
        raise InputError(f"autoaugment_cutout is of colour images, {args.data} has grey ones")
    outside = load_outside(args.outdist_data, inside)
    for images in (inside, outside):
        if images.hash != on_rank0(str, images.hash):
            raise InputError(f"{images.name} is not the same here as on rank 0")
    return inside, outside


# AutoAugment's policy for CIFAR-10 (Cubuk et al. 2019, table 7): in each line two operations, with
# their probability and their magnitude, from 0 to 9 (0, too, where there is none).
POLICIES = [
    (("Invert", 0.1, 0), ("Contrast", 0.2, 6)),
    (("Rotate", 0.7, 2), ("TranslateX", 0.3, 9)),
    (("Sharpness", 0.8, 1), ("Sharpness", 0.9, 3)),
    (("ShearY", 0.5, 8), ("TranslateY", 0.7, 9)),
    (("AutoContrast", 0.5, 0), ("Equalize", 0.9, 0)),
    (("ShearY", 0.2, 7), ("Posterize", 0.3, 7)),
    (("Color", 0.4, 3), ("Brightness", 0.6, 7)),
    (("Equalize", 0.6, 0), ("Equalize", 0.5, 0)),
    (("Sharpness", 0.3, 9), ("Brightness", 0.7, 9)),
    (("Contrast", 0.6, 7), ("Sharpness", 0.6, 5)),
    (("Color", 0.7, 7), ("TranslateX", 0.5, 8)),
    (("Brightness", 0.9, 6), ("Color", 0.2, 8)),
    (("Equalize", 0.3, 0), ("AutoContrast", 0.4, 0)),
    (("TranslateY", 0.4, 3), ("Sharpness", 0.2, 6)),
    (("Solarize", 0.5, 2), ("Invert", 0.0, 0)),
    (("Color", 0.9, 9), ("Equalize", 0.6, 0)),
    (("Equalize", 0.2, 0), ("AutoContrast", 0.6, 0)),
    (("Equalize", 0.2, 0), ("Equalize", 0.6, 0)),
    (("AutoContrast", 0.8, 0), ("Solarize", 0.2, 8)),
    (("Equalize", 0.8, 0), ("Invert", 0.1, 0)),
    (("Brightness", 0.1, 3), ("Color", 0.7, 0)),
    (("Solarize", 0.4, 5), ("AutoContrast", 0.9, 0)),
    (("TranslateY", 0.9, 9), ("TranslateY", 0.7, 9)),
    (("AutoContrast", 0.9, 0), ("Solarize", 0.8, 3)),
    (("TranslateY", 0.7, 9), ("AutoContrast", 0.9, 0)),
]


def auto_augment(image, policy, chances, signs):
    """One pair of POLICIES on a Pillow image, as in the authors' program: nearest pixels, black
    where there is none, shears from the upper left corner. chances, signs (2,): from 0 to 1."""
    from PIL import Image, ImageEnhance, ImageOps

    for (name, probability, magnitude), chance, draw in zip(policy, chances, signs, strict=True):
        if chance >= probability:
            continue
        share = magnitude / 9
        signed = -share if draw < 0.5 else share
        pixels = 150 / 331 * signed * image.width
        moves = {  # as matrices
            "ShearY": [1, 0, 0, 0.3 * signed, 1, 0],
            "TranslateX": [1, 0, pixels, 0, 1, 0],
            "TranslateY": [1, 0, 0, 0, 1, pixels],
        }
        if name in moves:
            image = image.transform(image.size, Image.Transform.AFFINE, moves[name])
        elif name == "Rotate":
            image = image.rotate(30 * signed)
        elif name == "Posterize":
            image = ImageOps.posterize(image, 8 - round(4 * share))
        elif name == "Solarize":
            image = ImageOps.solarize(image, round(256 * (1 - share)))
        elif name in ("Invert", "Equalize", "AutoContrast"):
            image = getattr(ImageOps, name.lower())(image)
        else:  # Color, Contrast, Brightness, Sharpness
            image = getattr(ImageEnhance, name)(image).enhance(1 + 0.9 * signed)
    return image


def centre(images, size):
    """(..., side, side) cut to (..., size, size)"""
    edge = (images.shape[-1] - size) // 2
    return images[..., edge : edge + size, edge : edge + size]


def shifted(image, pad, draws):
    """(C, H, W), moved by up to `pad` pixels along both axes; black comes in. draws (2,)"""
    across, down = (draws * (2 * pad + 1)).astype(int)
    channels, height, width = image.shape
    wide = np.zeros((channels, height + 2 * pad, width + 2 * pad), image.dtype)
    wide[:, pad:-pad, pad:-pad] = image
    return wide[:, down : down + height, across : across + width]


def resized(image, size, draws=None):
    """(C, side, side) brought to (C, size, size); with draws (4,) a part of it: 8 to 100 % of the
    area, 3:4 to 4:3. This is torchvision's RandomResizedCrop, but that sides which do not fit are
    cut and not drawn again."""
    from PIL import Image

    box = None
    if draws is not None:
        side = image.shape[1]
        area = 0.08 + 0.92 * draws[0]
        ratio = (4 / 3) ** (2 * draws[1] - 1)
        width = min(1, math.sqrt(area * ratio)) * side
        height = min(1, math.sqrt(area / ratio)) * side
        left = (side - width) * draws[2]
        top = (side - height) * draws[3]
        box = (left, top, left + width, top + height)
    small = [Image.fromarray(c).resize((size, size), Image.Resampling.BILINEAR, box) for c in image]
    return np.stack([np.asarray(channel) for channel in small])


def augment(image, kind, size, draws):
    """(C, side, side) uint8 to (C, size, size) uint8. The draws (12,), from 0 to 1, decide all."""
    if kind == "none":
        return centre(image, size)
    if kind == "shift":  # for digits, which have no mirror image
        return shifted(centre(image, size), max(1, size // 16), draws[:2])

    if kind == "resized_crop":
        image = resized(image, size, draws[:4])
    elif kind == "resize":
        image = resized(image, size)
    else:  # original, autoaugment_cutout
        image = shifted(centre(image, size), max(1, size // 8), draws[:2])
    if draws[4] < 0.5:
        image = image[:, :, ::-1]
    if kind == "autoaugment_cutout":
        from PIL import Image

        policy = POLICIES[int(draws[5] * len(POLICIES))]
        picture = Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0)))
        picture = auto_augment(picture, policy, draws[6:8], draws[8:10])
        image = np.array(picture).transpose(2, 0, 1)
        # a black square of half the side, its centre anywhere (DeVries and Taylor 2017)
        down, across = (draws[10:12] * size).astype(int)
        half = size // 4
        image[:, max(0, down - half) : down + half, max(0, across - half) : across + half] = 0
    return image


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


class TrainingData(Dataset):
    """Item (ids, whole) is a micro-batch, and the global batch that it is part of."""

    def __init__(self, args, inside, outside, stage):
        self.args = args
        self.inside = inside
        self.outside = outside
        self.stage = stage
        self.real_ids = inside.part("train")
        self.outside_ids = outside.part("train")

    def __getitem__(self, item):
        ids, whole = item
        # All draws are those of the global batch, of which this micro-batch takes its part: so they
        # do not depend on the number of ranks. No two global batches begin alike.
        rng = np.random.default_rng([self.args.seed, PHASES[self.stage], *whole[:8]])
        place_of = {number: place for place, number in enumerate(whole.tolist())}
        places = np.array([place_of[number] for number in ids.tolist()])

        def pictures(source, numbers, kind):
            draws = rng.random((len(whole), 12))[places]
            rows = zip(numbers, draws, strict=True)
            size = self.inside.size
            parts = [augment(source.images[number], kind, size, row) for number, row in rows]
            return torch.from_numpy(np.stack(parts))

        x = pictures(self.inside, ids, self.args.augm_type_classification)
        y = torch.from_numpy(self.inside.labels[ids])
        if self.stage == "at":
            return Batch(torch.from_numpy(places), x, y)

        real_ids = rng.choice(self.real_ids, len(whole))[places]
        real = pictures(self.inside, real_ids, self.args.augm_type_generation)
        real_y = torch.from_numpy(self.inside.labels[real_ids])
        outside_ids = rng.choice(self.outside_ids, len(whole))[places]
        outside = pictures(self.outside, outside_ids, self.args.augm_type_generation)
        return Batch(torch.from_numpy(places), x, y, real, real_y, outside)


def pixels(images):
    """uint8 as float32 in [0, 1], laid out as convolutions read fastest, channels last."""
    return images.float().div(255).contiguous(memory_format=torch.channels_last)


# --------------------------------------------------------------------------------------------------
# Model
#
# Parameters have the names, and the order, that timm gives them (the WideResNet: its authors'), so
# that published weights fit.

MEAN_AND_DEVIATION = {  # of each channel
    "none": ([0.0], [1.0]),
    "grey": ([0.5], [0.5]),
    "CIFAR": ([0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]),
    "ImageNet": ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
}


class Network(nn.Module):
    """Logits f(x) (B, K) of images x (B, C, S, S) in [0, 1]. It normalises them with buffers that
    make_network gives it."""

    frozen = False  # whether batch normalisation keeps its statistics
    dtype = torch.float32  # of the features; bf16 and fp16 by autocast

    def forward(self, x, exact=False):
        """exact: in fp32 also where training is not."""
        x = (x - self.mean) / self.deviation
        if exact or self.dtype == torch.float32:
            return self.fc(self.features(x))
        with torch.autocast(x.device.type, self.dtype):
            features = self.features(x)
        return self.fc(features.float())  # 16 bits would make ties of logits

    def train(self, mode=True):
        """Frozen batch normalisation stays in evaluation mode; its weights are trained."""
        super().train(mode)
        for layer in batch_norms(self):
            layer.train(mode and not self.frozen)
        return self


def batch_norms(model):
    return [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]


def conv3x3(before, after, stride=1, bias=False):
    return nn.Conv2d(before, after, 3, stride, 1, bias=bias)


class SmallNet(Network):
    """Pairs of convolutions down to 4 to 8 pixels a side, then 128 features. Smooth, without
    maxima or ReLUs; for images of 8 to 32 pixels."""

    def __init__(self, classes, channels, size, width, norm):
        super().__init__()
        layers = []
        before = channels
        for stride in (1, 2) if size < 16 else (1, 2, 2):
            after = width if stride == 1 else before * 2
            size = math.ceil(size / stride)
            for inputs, step in ((before, stride), (after, 1)):
                layers.append(conv3x3(inputs, after, step, bias=True))
                if norm == "layer":
                    layers.append(nn.GroupNorm(1, after))
                elif norm == "batch":
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


def residual_blocks(kind, blocks, before, after, stride, *settings):
    """Blocks one after the other, of which the first changes width and size."""
    layers = [kind(before, after, stride, *settings)]
    layers += [kind(after, after, 1, *settings) for _ in range(blocks - 1)]
    return nn.Sequential(*layers)


class WideResNet(Network):
    def __init__(self, classes, depth, factor):
        super().__init__()
        self.conv1 = conv3x3(3, 16)
        before = 16
        for number, stride in ((1, 1), (2, 2), (3, 2)):
            after = 8 * factor * 2**number
            group = nn.Sequential()
            group.layer = residual_blocks(WideBlock, (depth - 4) // 6, before, after, stride)
            self.add_module(f"block{number}", group)
            before = after
        self.bn1 = nn.BatchNorm2d(before)
        self.fc = nn.Linear(before, classes)

    def features(self, x):
        x = self.block3(self.block2(self.block1(self.conv1(x))))
        return F.relu(self.bn1(x)).mean((2, 3))


class Bottleneck(nn.Module):
    """Residual block of ResNet-50 (He et al. 2016), of inner width after * base_width / 256."""

    def __init__(self, before, after, stride, base_width):
        super().__init__()
        width = after * base_width // 256
        self.conv1 = nn.Conv2d(before, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = conv3x3(width, width, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, after, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(after)
        self.downsample = nn.Identity()
        if before != after:
            shortcut = nn.Conv2d(before, after, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(after))

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.downsample(x) + self.bn3(self.conv3(y)))


class ResNet50(Network):
    """base_width 64; 128 and 256 make the "wide" ones."""

    def __init__(self, classes, base_width):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = residual_blocks(Bottleneck, 3, 64, 256, 1, base_width)
        self.layer2 = residual_blocks(Bottleneck, 4, 256, 512, 2, base_width)
        self.layer3 = residual_blocks(Bottleneck, 6, 512, 1024, 2, base_width)
        self.layer4 = residual_blocks(Bottleneck, 3, 1024, 2048, 2, base_width)
        self.fc = nn.Linear(2048, classes)

    def features(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        return self.layer4(self.layer3(self.layer2(self.layer1(x)))).mean((2, 3))


class ChannelNorm(nn.LayerNorm):
    """Layer normalisation over the channels of (B, C, H, W)."""

    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNextBlock(nn.Module):
    """Liu et al. 2022, figure 4, with layer scale."""

    def __init__(self, width):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), 1e-6))
        self.conv_dw = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, 1e-6)
        self.mlp = nn.Sequential()
        self.mlp.fc1 = nn.Linear(width, 4 * width)
        self.mlp.act = nn.GELU()
        self.mlp.fc2 = nn.Linear(4 * width, width)

    def forward(self, x):
        y = self.mlp(self.norm(self.conv_dw(x).permute(0, 2, 3, 1)))
        return x + (self.gamma * y).permute(0, 3, 1, 2)


# The stem of small convolutions, by the width that follows; it makes adversarial training easier
# (Singh et al. 2023).
STEMS = {96: [3, 48, 96], 128: [3, 64, 96, 128], 192: [3, 96, 144, 192]}


class ConvNext(Network):
    def __init__(self, classes, depth, width, use_convstem):
        super().__init__()
        layers = []
        if use_convstem:
            channels = STEMS[width]
            for number, after in enumerate(channels[1:]):
                stride = 2 if number < 2 else 1
                layers.append(conv3x3(channels[number], after, stride, bias=True))
                layers += [ChannelNorm(after, 1e-6), nn.GELU()]
        else:
            layers += [nn.Conv2d(3, width, 4, 4), ChannelNorm(width, 1e-6)]
        self.stem = nn.Sequential(*layers)
        self.stages = nn.Sequential()
        for number, blocks in enumerate((3, 3, depth, 3)):
            stage = nn.Sequential()
            stage.downsample = nn.Identity()
            if number > 0:
                smaller = nn.Conv2d(width, 2 * width, 2, 2)
                stage.downsample = nn.Sequential(ChannelNorm(width, 1e-6), smaller)
                width = 2 * width
            stage.blocks = nn.Sequential(*[ConvNextBlock(width) for _ in range(blocks)])
            self.stages.append(stage)
        self.head = nn.Module()
        self.head.norm = nn.LayerNorm(width, 1e-6)
        self.head.fc = nn.Linear(width, classes)

    def features(self, x):
        return self.head.norm(self.stages(self.stem(x)).mean((2, 3)))

    @property
    def fc(self):
        return self.head.fc


MODELS = {  # what makes each network, and with which settings
    "SmallNet": (SmallNet,),
    "WideResNet28x2": (WideResNet, 28, 2),
    "WideResNet28x10": (WideResNet, 28, 10),
    "WideResNet28x20": (WideResNet, 28, 20),
    "WideResNet34x10": (WideResNet, 34, 10),
    "WideResNet34x20": (WideResNet, 34, 20),
    "WideResNet40x10": (WideResNet, 40, 10),
    "WideResNet70x16": (WideResNet, 70, 16),
    "ResNet50ImageNet": (ResNet50, 64),
    "WideResNet50x2ImageNet": (ResNet50, 128),
    "WideResNet50x4ImageNet": (ResNet50, 256),
    "convnext_tiny": (ConvNext, 9, 96),
    "convnext_small": (ConvNext, 27, 96),
    "convnext_base": (ConvNext, 27, 128),
    "convnext_large": (ConvNext, 27, 192),
}


def make_network(args, classes, channels, size):
    """A network with random weights, for images of this shape."""
    kind, *settings = MODELS[args.model_type]
    if kind is SmallNet:
        settings = [channels, size, args.width, args.norm]
    elif channels != 3:
        raise InputError(f"--model_type {args.model_type} takes colour images: give SmallNet")
    elif kind is ConvNext and size < 32:
        raise InputError(f"--model_type {args.model_type} takes 32 pixels a side or more")
    if kind is ConvNext:
        settings.append(args.use_convstem)
    model = kind(classes, *settings)

    statistics = "CIFAR" if size <= 64 else "ImageNet"
    if channels == 1:
        statistics = "grey"
    if not args.normalize_input:
        statistics = "none"
    for name, values in zip(("mean", "deviation"), MEAN_AND_DEVIATION[statistics], strict=True):
        model.register_buffer(name, torch.tensor(values)[:, None, None], persistent=False)
    # channels last: convolutions read it faster, except those of small images on a CPU
    is_faster = size >= 16 or args.compile or torch.accelerator.is_available()
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if is_faster and layer.weight.shape[1] > 1:  # of one channel both layouts are the same
                layer.to(memory_format=torch.channels_last)
    nn.init.zeros_(model.fc.bias)
    return model


def load_weights(model, path):
    """The averaged weights of a checkpoint of ours, those of the original's files, or a state_dict:
    by name; where names are others, by position, since networks that are built in the same order
    have the same shapes in the same order."""
    try:
        state = load_checkpoint(path)
    except Exception as error:  # torch.load raises many kinds
        reason = str(error).splitlines()[0]
        raise InputError(f"{path} is missing, damaged, or no file of weights: {reason}") from None
    for key in ("average", "model", "ema_state_dict", "model_state_dict", "state_dict"):
        if key in state:
            state = state[key]
            break
    found = {}
    for name, tensor in state.items():
        name = re.sub(r"^((module|_orig_mod|base_model)\.)+", "", name)  # prefixes of wrappers
        if name != "n_averaged":  # a counter of torch.optim.swa_utils
            found[name] = tensor

    wanted = model.state_dict()
    hint = "give the --model_type and the options that these weights were trained with"
    if len(found) != len(wanted):
        text = f"{path} has {len(found)} tensors, this network {len(wanted)}"
        raise InputError(f"{text}: {hint}")
    if found.keys() != wanted.keys():
        logging.info(f"{path} has other names: its tensors are taken in their order")
        found = dict(zip(wanted, found.values(), strict=True))
    for name, tensor in found.items():
        if tensor.shape != wanted[name].shape:
            shapes = f"{[*tensor.shape]}, expected {[*wanted[name].shape]}"
            raise InputError(f"{path} has {name} of shape {shapes}: {hint}")
    model.load_state_dict(found)


def tensors(model):
    """Parameters, and buffers that are no counters."""
    found = [*model.parameters(), *model.buffers()]
    return [tensor for tensor in found if tensor.is_floating_point()]


class Twin:
    """The network as attacks see it: in evaluation mode, its weights without gradient, and in the
    dtype of its features. (Autocast would convert frozen weights anew in every forward pass.) What
    need not be converted stands in the same memory as in the network."""

    def __init__(self, model):
        self.model = copy.deepcopy(model).requires_grad_(False).train(False)
        for layer in self.model.modules():
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                layer.to(model.dtype)
        self.model.fc.float()

        self.converted = []
        for mine, theirs in zip(tensors(self.model), tensors(model), strict=True):
            if mine.dtype == theirs.dtype:
                mine.data = theirs.data
            else:
                self.converted.append((mine, theirs))

    @torch.no_grad()
    def refresh(self):
        """Take over the weights after an update."""
        for mine, theirs in self.converted:
            mine.copy_(theirs)


# --------------------------------------------------------------------------------------------------
# Loss


def cross_entropy(logits, labels):
    return F.cross_entropy(logits, labels, reduction="none")


def label_logit(logits, labels):
    """f_y(x) (B,)"""
    return logits.gather(1, labels[:, None])[:, 0]


def logsumexp(logits, labels):
    return logits.logsumexp(1)


def in_ball(x, centre, eps, norm):
    """The nearest points to x in the balls of radius eps about `centre`; then in [0, 1], where the
    centres are: that leaves no ball."""
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
    """Projected gradient ascent (Madry et al. 2018) on gain(logits, labels) (B,), in the balls of
    radius eps about the images and in [0, 1]. Steps have the same length whatever the gradient."""

    def __init__(self, net, gain, size, eps, norm, compiled=False):
        self.net = net
        self.gain = gain
        self.size = size
        self.eps = eps
        self.norm = norm
        if compiled:  # a step is one graph; so the number of steps may change
            self.step = torch.compile(self.step, fullgraph=True, dynamic=False)

    @torch.no_grad()
    def __call__(self, x, labels, steps):
        """The points (B, C, H, W) after so many steps from the images x."""
        z = x
        for _ in range(steps):
            z, _ = self.step(z, x, labels, self.size)
        return z

    def step(self, z, x, labels, size):
        """The next points, and the logits of these ones."""

        def total_gain(z):
            logits = self.net(z)
            # fp16 would round small gradients to 0: hence the factor. Where it makes them too large
            # for fp16, they are no numbers, and the image stays where it is.
            return (self.gain(logits, labels) * 1024).sum(), logits

        if torch.compiler.is_compiling():  # it can trace this way, and not the other
            gradient, logits = torch.func.grad(total_gain, has_aux=True)(z)
        else:
            with torch.enable_grad():
                start = z.detach().requires_grad_()
                total, logits = total_gain(start)
            (gradient,) = torch.autograd.grad(total, start)
            logits = logits.detach()
        gradient = gradient.float().nan_to_num(0.0, 0.0, 0.0)
        if self.norm == "Linf":
            move = gradient.sign()
        else:
            # first by the largest entry: a gradient of 1e-30 leads as well as any, only 0 nowhere
            largest = gradient.abs().amax((1, 2, 3), keepdim=True)
            gradient = gradient / largest.clamp(min=1e-38)
            length = torch.linalg.vector_norm(gradient, dim=(1, 2, 3), keepdim=True)
            move = gradient / length.clamp(min=1e-6)
        return in_ball(z + size * move, x, self.eps, self.norm), logits


def squared_gradient(model, x, energy, labels):
    """R1 (B,): half the squared norm of the energy's gradient at x, in fp32, for backward()."""
    x = x.detach().requires_grad_()
    total = energy(model(x, exact=True), labels).sum()
    (gradient,) = torch.autograd.grad(total, x, create_graph=True)
    return 0.5 * gradient.square().sum((1, 2, 3))


def pairs_in_order(real, fake):
    """Twice the number of pairs in which the score of real (n,) is above that of fake (m,), where
    ties count half: by 2 n m it is the area under the ROC curve. As an integer it is exact."""
    order = fake.sort().values
    real = real.contiguous()
    below = torch.searchsorted(order, real)
    up_to = torch.searchsorted(order, real, right=True)
    return (below + up_to).sum()


# ==================================================================================================
# Distributed training. These lines are the same in every script: read them once.
# "(all ranks)": every rank must call this, in the same order. "(rank 0)": only rank 0 calls it.

START = time.monotonic()
PARENT = os.getppid()
SCRIPT = Path(sys.argv[0]).name
FORMAT = 3  # of checkpoints

# In these variables launchers tell a process its rank, the number of ranks, and its rank on this
# machine.
RANK_VARIABLES = [
    ["RANK", "WORLD_SIZE", "LOCAL_RANK"],  # torchrun
    ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"],  # Open MPI
    ["PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID"],  # PALS (Aurora) ...
    ["PALS_RANKID", "WORLD_SIZE", "PALS_LOCAL_RANKID"],  # ... where the job exports WORLD_SIZE
    ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"],  # MPICH, Intel MPI
    ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"],  # srun
    ["RANK", "WORLD_SIZE", "RANK"],  # by hand, on one machine
]

stop_signal = 0  # the last signal that this process got
folder_lock = None  # the file that rank 0 keeps open, and so locked, as long as it lives


class RunError(Exception):
    """The run cannot go on: one line that says why, no traceback, exit status 1."""


class InputError(RunError):
    """What the user gave cannot work: also one line, exit status 2."""


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """--help with the docstring as it stands and the default of every option."""


class Parser(argparse.ArgumentParser):
    source = "command line"  # or the file that is being read

    def __init__(self, description):
        super().__init__(description=description, formatter_class=HelpFormatter, allow_abbrev=False)

    def error(self, message):
        raise InputError(f"{self.source}: {message}")


def boolean(text):
    if text.lower() in ("true", "yes", "1"):
        return True
    if text.lower() in ("false", "no", "0"):
        return False
    raise argparse.ArgumentTypeError(f"{text} is neither True nor False")


def count(text):
    """The type of options that are whole numbers from 1 on."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return int(text)


def default_timeout(parser):
    """Minutes. Many documents set NCCL_TIMEOUT, which neither NCCL nor PyTorch reads."""
    seconds = os.environ.get("NCCL_TIMEOUT", "1800")
    if not seconds.isdecimal() or int(seconds) == 0:
        parser.error(f"NCCL_TIMEOUT={seconds} in the environment: must be a number of seconds")
    return int(seconds) / 60


# an option that may be given as --compile, --compile=True, --compile no
FLAG = {"type": boolean, "nargs": "?", "const": True, "metavar": "BOOL"}


def add_common_arguments(parser, output_dir, batch_size, precision="auto"):
    add = parser.add_argument_group("the same in every script").add_argument
    add("--config", help="YAML or JSON file of options; the command line wins")
    add("--output_dir", default=output_dir, help="a run found there is resumed")
    add("--fresh", **FLAG, default=False, help="start anew; the old run is moved aside")
    add("--seed", type=int, default=42, help="of initialisation, order and dropout")
    add("--batch_size", type=count, default=batch_size, help="samples per GPU and micro-batch")
    add("--global_batch_size", type=int, default=0, help="samples per step; 0: batch_size x GPUs")
    add("--num_workers", type=int, default=0, help="processes per rank that prepare batches")
    add("--max_grad_norm", type=float, default=1.0, help="clip the gradient; 0: do not")
    add("--max_bad_steps", type=count, default=10, help="non-finite steps in a row that end a run")
    kinds = ["auto", "fp32", "tf32", "bf16", "fp16"]
    add("--precision", default=precision, choices=kinds, help="auto: bf16 on GPUs")
    add("--deterministic", **FLAG, default=False, help="bit-identical repeats on GPUs, too; slower")
    add("--compile", **FLAG, default=False, help="torch.compile the model for training")
    text = "for a step that uses only some of the parameters; slower"
    add("--find_unused_parameters", **FLAG, default=False, help=text)
    add("--save_every", type=count, default=500, help="steps between checkpoints")
    add("--max_minutes", type=float, default=0, help="then save and stop; 0: no limit")
    add("--log_every", type=count, default=10, help="steps between log lines")
    add("--wandb_mode", default="disabled", choices=["online", "offline", "disabled"], help="wandb")
    add("--nproc_per_node", type=count, default=1, help="processes to start, if no launcher did")
    add("--device", default="auto", choices=["auto", "cuda", "xpu", "cpu"], help="auto: the best")
    add("--backend", default="auto", help="nccl, gloo, xccl; auto: by the device")
    text = "limit of one collective; NCCL_TIMEOUT in the environment sets it, too, in seconds"
    add("--timeout_minutes", type=float, default=default_timeout(parser), help=text)
    add("--local_rank", help=argparse.SUPPRESS)  # of torch.distributed.launch, which also sets RANK


def parse_with_config(parser):
    """Options of the command line; else of the --config file; else the defaults."""
    words = sys.argv[1:]
    # the file may come first, without --config
    if words and "=" not in words[0] and words[0].endswith((".yaml", ".yml", ".json")):
        words = [f"--config={words[0]}", *words[1:]]
    words = as_options(parser, words)
    args = parser.parse_args(words)
    if args.config:
        parser.source = args.config
        try:
            content = yaml.safe_load(Path(args.config).read_text()) or {}
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            parser.error(" ".join(str(error).split()))  # YAML's own errors have several lines
        if not isinstance(content, dict):
            parser.error("must be made of lines such as lr: 0.001")
        args = parser.parse_args(as_options(parser, config_words(content)))
        parser.source = "command line"
        args = parser.parse_args(words, args)  # on top of what the file said
    for name in ("global_batch_size", "num_workers", "max_grad_norm", "max_minutes"):
        if not getattr(args, name) >= 0:
            parser.error(f"--{name} {getattr(args, name)}: must not be below 0")
    if not args.timeout_minutes > 0:
        parser.error(f"--timeout_minutes {args.timeout_minutes}: must be above 0")
    if not 0 <= args.seed < 2**32:
        parser.error(f"--seed {args.seed}: must be from 0 to below {2**32:,}")
    return args


def config_words(content, prefix="--"):
    """A YAML file as a command line; a key in a section becomes --section.key."""
    words = []
    for key, value in content.items():
        if isinstance(value, dict):
            words += config_words(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            words += [f"{prefix}{key}", *map(str, value)]
        elif value is not None:
            words.append(f"{prefix}{key}={value}")
    return words


def as_options(parser, words):
    """key=value becomes --key=value. --section.key becomes --section_key if that is an option, else
    --key: then the section only groups options."""
    known = [*vars(parser.parse_args([])), "help"]  # the names of all options
    options = []
    for word in words:
        key, equals, value = word.partition("=")
        if word.startswith("--") or (equals and key.replace(".", "_").isidentifier()):
            parts = key.removeprefix("--").replace("-", "_").split(".")
            names = ["_".join(parts[start:]) for start in range(len(parts))]
            found = [name for name in names if name in known]
            if not found:
                near = difflib.get_close_matches(names[0], known, n=1, cutoff=0.7)
                near += difflib.get_close_matches(parts[-1], known, n=1, cutoff=0.7)
                hint = f"did you mean {near[0]}?" if near else "--help lists them"
                parser.error(f"there is no option {'.'.join(parts)}: {hint}")
            key = f"--{found[0]}"
        options.append(key + equals + value)
    return options


def find_ranks():
    """(rank, world size, local rank) from the launcher that started us, None without one."""
    incomplete = None
    for names in RANK_VARIABLES:
        # inside sbatch, but without srun, Slurm sets these for a single plain process, too
        if "SLURM_PROCID" in names and "SLURM_STEP_ID" not in os.environ:
            continue
        missing = [name for name in names if name not in os.environ]
        if not missing:
            return [int(os.environ[name]) for name in names]
        if names[0] in os.environ:
            incomplete = f"{names[0]} is set, but not {missing[0]}: use torchrun, or export it"
    if incomplete:
        raise InputError(incomplete)
    return None


class LogHandler(logging.StreamHandler):
    def emit(self, record):
        with tqdm.external_write_mode(self.stream):  # takes the progress bar away and puts it back
            super().emit(record)


def setup_ddp(args):
    """Start the log, choose the device, join the process group; returns the device. (all ranks)"""
    # plain python is a group of one: the code below has one path only
    rank, world_size, local_rank = find_ranks() or (0, 1, 0)
    if "MASTER_ADDR" not in os.environ and rank != local_rank:  # there are ranks elsewhere
        raise InputError("several machines, but no MASTER_ADDR: export the name of the first one")
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500" if world_size > 1 else "0")  # 0: any free one

    logging.basicConfig(
        format=f"[RANK {rank}] %(asctime)s %(levelname)s: %(message)s",
        level=logging.INFO,
        datefmt="%Y-%m-%d %H:%M:%S",
        handlers=[LogHandler(sys.stdout)],
    )
    logging.info(f"Process {rank}/{world_size} started")
    if args.nproc_per_node not in (1, world_size):
        logging.info(f"  --nproc_per_node {args.nproc_per_node} is ignored: a launcher started it")
    device = choose_device(args, local_rank)
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        on_this_machine = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        torch.set_num_threads(max(1, torch.get_num_threads() // on_this_machine))
    keep_freed_memory()
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS repeats nothing
        torch.use_deterministic_algorithms(True)

    logging.info(f"Initializing DDP for rank {rank}...")
    backend = args.backend
    if backend == "auto":
        backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(
        backend,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=args.timeout_minutes),
        device_id=None if device.type == "cpu" else device,
    )
    dist.barrier()  # a rank that refuses the data must not leave while another still connects
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, on_signal)
    if rank > 0:
        logging.getLogger().setLevel(logging.ERROR)  # from here on others log errors only
    logging.info(f"{world_size} ranks, {backend} on {device}, torch {torch.__version__}")
    return device


def keep_freed_memory():
    """Let the C library keep the memory of freed tensors for the next ones: fetching it from the
    system again and again can take a sixth of a step on CPUs."""
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        mallopt = ctypes.CDLL(None).mallopt
        if mallopt(-3, 2**30):  # M_MMAP_THRESHOLD; 0: too high for an older glibc
            mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def choose_device(args, local_rank):
    """The accelerator of this rank, or the CPU where there is none."""
    device = torch.device("cpu")
    kind = torch.accelerator.current_accelerator(check_available=True)
    if args.device != "cpu" and kind is not None and kind.type in ("cuda", "xpu"):
        devices = torch.accelerator.device_count()
        # torchrun shows all devices to all ranks; other launchers may show each rank its own one
        masks = "CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES ZE_AFFINITY_MASK"
        masked = any(name in os.environ for name in masks.split())
        if devices == 1 and masked and "TORCHELASTIC_RUN_ID" not in os.environ:
            local_rank = 0
        if local_rank >= devices:
            text = f"local rank {local_rank}, but {devices} devices on this machine"
            raise InputError(f"{text}: start at most {devices} processes, or give --device cpu")
        device = torch.device(kind.type, local_rank)
        torch.accelerator.set_device_index(local_rank)
    if args.device not in ("auto", device.type):
        raise InputError(f"--device {args.device}: this machine has {device.type}")
    return device


def on_signal(number, frame):
    global stop_signal
    stop_signal = number  # no more than that: training ends its step first, and agrees to stop


def ignore_signals(worker):
    """For the workers of a DataLoader. A launcher's signal reaches them, too. They ignore it: their
    rank still needs them, and they end when it ends."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def cleanup():
    gc.collect()  # gloo may abort where a tensor of the group outlives it
    if dist.is_initialized():  # not after --help
        dist.destroy_process_group()


def launch(parse_args, main):
    """Run main(args) as this rank, or hand over to torchrun to start --nproc_per_node ranks."""

    @record  # torchrun's summary then shows the traceback of the rank that failed first
    def run():
        try:
            args = parse_args()
            if args.nproc_per_node > 1 and find_ranks() is None:
                hand_over_to_torchrun(args.nproc_per_node)
            return main(args)
        except RunError as error:
            refuse(error)

    try:
        status = run()
    except Exception as error:  # whatever it is, the other ranks are waiting for this one
        logging.error(traceback.format_exc())
        if "by peer" in str(error):  # Connection reset by peer, Connection closed by peer
            logging.error("another rank has died; the same command, given again, goes on")
        os._exit(1)  # at once, with no cleanup that waits for others: the launcher ends them
    cleanup()
    sys.stdout.flush()
    os._exit(status or 0)  # sys.exit would wait for a wandb that hangs


def hand_over_to_torchrun(processes):
    """Become torchrun, with the same script and options, as run_ddp.sh starts it."""
    where = ["--standalone"]  # on any free port
    if "MASTER_ADDR" in os.environ or "MASTER_PORT" in os.environ:
        where = [f"--master_addr={os.environ.get('MASTER_ADDR', 'localhost')}"]
        where.append(f"--master_port={os.environ.get('MASTER_PORT', '29500')}")
    threads = max(1, torch.get_num_threads() // processes)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # torchrun would say 1
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "120")  # its option is new in 2.13
    options = [f"--nproc_per_node={processes}"]
    options.append("--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
    torchrun = [sys.executable, "-m", "torch.distributed.run", *where, *options]
    os.execv(sys.executable, [*torchrun, *sys.argv])


def refuse(error):
    """Say why the run cannot go on, and end. Usually all ranks fail for the same reason, and one
    line is enough. Rank 0 writes it and exits. The others wait, and the launcher ends them. A rank
    that still lives after three seconds failed alone, and writes its own line."""
    is_rank0 = all(os.environ.get(names[0], "0") == "0" for names in RANK_VARIABLES)
    if not is_rank0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher's must end it now
        time.sleep(3)
    sys.stderr.write(f"{SCRIPT}: error: {error}\n")
    os._exit(2 if isinstance(error, InputError) else 1)


def sum_over_ranks(values):
    """Each element of a tensor summed over the ranks, as floats. It waits for the device. (all
    ranks)"""
    rows = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, values)
    columns = zip(*torch.stack(rows).tolist(), strict=True)
    return [math.fsum(column) for column in columns]  # in Python: some devices have no float64


def on_rank0(function, *args):
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
    dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


class GlobalBatchSampler(DistributedSampler):
    """Shuffles by (seed, epoch) alone, cuts the order into global batches, and deals each to the
    micro-batches of the ranks. The samples of a step depend neither on the number of ranks nor on
    a restart.

    Yields (ids of a micro-batch of this rank, ids of the whole global batch). cost[id] is the work
    that a sample makes, such as its length. The global batch stays a random sample; within it, ids
    of similar cost share a micro-batch, where they need little padding, and all ranks get equal
    work."""

    def __init__(self, ids, args, state, cost=None):
        super().__init__(ids, seed=args.seed, drop_last=True)
        world_size = self.num_replicas
        self.ids = ids
        self.cost = cost
        self.start = 0
        self.global_batch = args.global_batch_size or args.batch_size * world_size
        if state:  # a resumed run keeps its global batch, on any number of ranks
            self.global_batch = state["global_batch"]
            if args.global_batch_size not in (0, self.global_batch):
                text = f"this run was started with {self.global_batch}"
                raise InputError(f"--global_batch_size {args.global_batch_size}: {text}")
        self.accumulation = math.ceil(self.global_batch / (args.batch_size * world_size))
        parts = world_size * self.accumulation
        self.steps = len(ids) // self.global_batch  # an epoch leaves out the few that are left over
        if not parts <= self.global_batch <= len(ids):
            named = "--global_batch_size, or --batch_size x GPUs"
            limits = f"{parts} (ranks x micro-batches) to {len(ids)} (to train on)"
            raise InputError(f"{named}: {self.global_batch} samples a step, must be from {limits}")
        each = f"{self.global_batch / parts:g} per GPU × {world_size} GPUs"
        if self.accumulation > 1:
            each += f" × {self.accumulation} micro-batches"
        logging.info(f"  Total batch size:   {self.global_batch:,} ({each})")

    def set_epoch(self, epoch, start=0):
        self.epoch = epoch
        self.start = start

    def __len__(self):
        return (self.steps - self.start) * self.accumulation

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(len(self.ids), generator=generator, dtype=torch.int32).numpy()
        for step in range(self.start, self.steps):
            first = step * self.global_batch
            batch = self.ids[order[first : first + self.global_batch]]
            if self.cost is not None:
                batch = batch[np.argsort(self.cost[batch], kind="stable")]
            for part in np.array_split(batch, self.accumulation):
                yield part[self.owners(len(part)) == self.rank], batch

    def owners(self, count):
        """The rank of each of `count` samples: 0 1 2 2 1 0 0 1 2 ... They are sorted by cost, and
        so no rank always gets the costliest."""
        ranks = np.arange(self.num_replicas)
        return np.resize(np.concatenate([ranks, ranks[::-1]]), count)


def choose_precision(args, device):
    """The dtype for torch.autocast; float32: no autocast."""
    name = args.precision
    if name == "auto":
        name = "fp32" if device.type == "cpu" else "bf16"
    # cuDNN rounds to TF32 unless told otherwise. These are the older of PyTorch's two switches:
    # torch.compile may fail once the newer one, fp32_precision, was used.
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = name == "tf32"
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name, torch.float32)


def wrap_ddp(model, args, device):
    if args.compile:
        model = torch.compile(model)
    if dist.get_world_size() == 1:
        return model  # nothing to add up, and DDP would take its time for it
    wrapped = DistributedDataParallel(
        model,
        device_ids=None if device.type == "cpu" else [device.index],
        find_unused_parameters=args.find_unused_parameters,
        gradient_as_bucket_view=True,
    )
    # buffers are the same on all ranks, or each rank's own. As an attribute, since torch 2.13 has
    # another name for the argument
    wrapped.broadcast_buffers = False
    # DDP regroups its buckets of gradients after the first backward pass. That changes the order of
    # sums over three or more ranks, and a resumed run would differ in the last bit. So make that
    # pass now. It needs no network, only a loss that depends on every parameter: 0 x their sum.
    wrapped.module = nn.Identity()
    wrapped(sum((p * 0).sum() for p in model.parameters() if p.requires_grad)).backward()
    wrapped.module = model
    wrapped.zero_grad()
    return wrapped


def default_generator(device):
    """What dropout on this device draws from. (torch.manual_seed seeds all devices, slowly.)"""
    if device.type == "cpu":
        return torch.default_generator
    return torch.get_device_module(device).default_generators[device.index]


class StepGuard:
    """Skips updates that are not finite, and lets the ranks agree to stop.

    To read a number from a GPU the host waits until the GPU has done all that is queued, and then
    the GPU waits for the host. So a step reads nothing: its flags are copied to the host while the
    next step is queued, and are read one step late."""

    def __init__(self, args, device):
        self.args = args
        self.deadline = START + 60 * (args.max_minutes or math.inf)
        self.launched = find_ranks() is not None
        self.bad_in_row = torch.zeros((), device=device)
        self.flags = None  # of the call before, on their way to the host
        self.arrived = None  # event: they are there
        self.reason = ""

    def update(self, optimizer, scaler):
        """Clip and step. Returns the gradient's norm, on the device."""
        if not optimizer.defaults.get("fused"):
            raise InputError("only an optimizer with fused=True can skip a step without a wait")
        scaler.unscale_(optimizer)
        parameters = []
        for group in optimizer.param_groups:
            parameters += group["params"]
        limit = self.args.max_grad_norm if self.args.max_grad_norm > 0 else math.inf
        norm = nn.utils.clip_grad_norm_(parameters, limit)
        # DDP has summed the gradients: a NaN of one rank is on every rank, and all skip alike.
        bad = norm.isfinite().logical_not().float()
        optimizer.found_inf = bad  # where this is 1 fused optimizers leave weights and state alone
        optimizer.step()
        scaler.update()
        optimizer.zero_grad()
        self.bad_in_row = (self.bad_in_row + bad) * bad  # back to 0 after a good step
        return norm

    def agree(self):
        """Why to stop, or "": what any rank knew at the call before. (all ranks)"""
        if self.flags is not None:
            if self.arrived is not None:
                self.arrived.synchronize()
            bad, number, late, orphaned = self.flags.tolist()
            if bad >= self.args.max_bad_steps:
                text = f"{bad:.0f} steps in a row without a finite gradient"
                raise RunError(f"{text}: lower --lr, or look for such numbers in the data")
            if number > 0:
                self.reason = signal.Signals(int(number)).name
            elif late > 0:
                self.reason = "time limit"
            elif orphaned > 0:
                self.reason = "death of the launcher"

        # full_like is computed on the device; torch.tensor would be a copy to it, which waits
        number = torch.full_like(self.bad_in_row, stop_signal)
        late = torch.full_like(self.bad_in_row, time.monotonic() > self.deadline)
        # a rank whose launcher was killed gets another parent, and nobody would ever end it
        is_orphan = self.launched and os.getppid() != PARENT
        orphaned = torch.full_like(self.bad_in_row, is_orphan)
        flags = torch.stack([self.bad_in_row, number, late, orphaned])
        if dist.get_world_size() > 1:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        self.flags = flags.to("cpu", non_blocking=True)
        if flags.device.type != "cpu":
            self.arrived = torch.accelerator.current_stream().record_event()
        return self.reason


def exit_status(reason):
    """For a reason to stop; "" means finished. A time limit and a queue's SIGUSR1 are planned."""
    if reason:
        logging.info(f"stopped by {reason}: the same command goes on from the checkpoint")
    statuses = {"": 0, "time limit": 0, "SIGUSR1": 0, "SIGINT": 130, "SIGTERM": 143}
    return statuses.get(reason, 1)


def save_checkpoint(folder, name, state):
    """Write folder/name whole or not at all; the latest.pt before becomes previous.pt. (rank 0)"""
    new = folder / "new.tmp"
    try:
        with open(new, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        if name == "latest.pt" and (folder / name).exists():
            os.replace(folder / name, folder / "previous.pt")
        os.replace(new, folder / name)
    except (OSError, RuntimeError) as error:  # most likely a full disk; the next may succeed
        new.unlink(missing_ok=True)
        reason = str(error).splitlines()[0]
        logging.warning(f"no {name} at step {state['step']}, the run goes on: {reason}")


def is_whole(path):
    """Whether a checkpoint can be read, and its checksums are right, which torch.load ignores."""
    try:
        load_checkpoint(path)
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except Exception:  # missing, cut short, or a flipped bit, which raises errors of many kinds
        return False


def load_checkpoint(path):
    return torch.load(path, map_location="cpu", weights_only=True)


def prepare_folder(folder, fresh):
    """Lock the folder; the newest whole checkpoint in it, or None. (rank 0)"""
    global folder_lock
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder_lock = open(f"{folder}.lock", "w")  # beside it, since --fresh moves the folder
        # until this process ends (flock would be inherited by the workers, which may live longer)
        fcntl.lockf(folder_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"another run is at work in {folder}: give another --output_dir") from None
    except OSError as error:  # some network file systems have no locks
        logging.warning(f"{folder} cannot be locked ({error}): start no second run in it")

    if (folder / "meta.json").exists():
        raise InputError(f"{folder} holds data, not a run: give another --output_dir")
    first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    try:
        if fresh and first_start and folder.exists():
            old = folder.rename(f"{folder}.old-{time.strftime('%Y%m%d-%H%M%S')}")
            logging.info(f"the run in {folder} is now in {old}")
        folder.mkdir(exist_ok=True)
        (folder / "new.tmp").touch()  # can we write here? better known now than after hours
        (folder / "new.tmp").unlink()
    except OSError as error:
        raise InputError(f"{folder} is not writable: {error}") from None

    latest = folder / "latest.pt"
    previous = folder / "previous.pt"
    if is_whole(latest):
        return latest
    if is_whole(previous):
        if latest.exists():
            logging.warning(f"{latest} is damaged: trying the one before it")
            latest.rename(folder / "damaged.pt")  # or the next save would put it over previous.pt
        return previous
    if latest.exists() or previous.exists():
        raise InputError(f"no checkpoint in {folder} is whole: --fresh moves the folder aside")
    return None


def open_run(args, data_hash):
    """The checkpoint to go on from, or None for a new run. (all ranks)"""
    path = on_rank0(prepare_folder, Path(args.output_dir), args.fresh)
    if path is None:
        logging.info(f"a new run in {args.output_dir}")
        return None
    state = load_checkpoint(path) if path.exists() else {}
    if state.get("step") != on_rank0(state.get, "step"):
        raise InputError(f"{path} is not that of rank 0: all machines must see --output_dir")
    hint = "--fresh moves the old run aside, --output_dir names another folder"
    for what, now in {"script": SCRIPT, "format": FORMAT}.items():
        if state.get(what) != now:
            raise InputError(f"{path} has {what} {state.get(what)}, not {now}: {hint}")
    if state["data_hash"] != data_hash:
        raise InputError(f"{path} was trained on other data: {hint}")
    if state["args"]["seed"] != args.seed:  # the order of the epoch would change
        raise InputError(f"--seed: this run was started with {state['args']['seed']}; {hint}")
    logging.info(f"resuming {path} at step {state['step']}")
    for name, value in vars(args).items():
        if value != state["args"].get(name):
            logging.info(f"  --{name} {value}, it was {state['args'].get(name)}")
    return state


def restore(state, model, optimizer, scaler):
    # keep the saved momenta, but take today's options, such as --weight_decay
    options = optimizer.state_dict()["param_groups"]
    try:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict({**state["optimizer"], "param_groups": options})
        scaler.load_state_dict(state["scaler"])
    except (KeyError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:120]
        hint = "give the options it had; or --fresh, which moves the old run aside"
        raise InputError(f"the checkpoint does not fit: {hint} ({reason} ...)") from None


class RunLog:
    """The log line, metrics.jsonl and wandb; at the end summary.json and curves.png. (rank 0)"""

    def __init__(self, args, state):
        self.args = args
        self.folder = Path(args.output_dir)
        self.path = self.folder / "metrics.jsonl"
        # steps after the checkpoint (without one: all) are made again: remove their lines
        kept = state["log_size"] if state else 0
        if dist.get_rank() == 0 and self.size() > kept:
            os.truncate(self.path, kept)
        self.wandb_id = state["wandb_id"] if state else os.urandom(4).hex()
        self.rows = queue.SimpleQueue()
        self.thread = threading.Thread(target=self.feed_wandb, daemon=True)
        if dist.get_rank() == 0 and args.wandb_mode != "disabled":
            self.thread.start()

    def size(self):
        """Bytes of metrics.jsonl, to be kept in a checkpoint."""
        return self.path.stat().st_size if self.path.exists() else 0

    def feed_wandb(self):
        """In a thread of its own: what wandb does wrong, or slowly, never reaches training."""
        try:
            import wandb

            options = {"mode": self.args.wandb_mode, "config": vars(self.args), "id": self.wandb_id}
            project = os.environ.get("WANDB_PROJECT", Path(SCRIPT).stem)
            run = wandb.init(project=project, resume="allow", **options)
            for row in iter(self.rows.get, None):  # until there is a None in the queue
                run.log(row, step=row["step"])
            run.finish()
        except Exception as error:
            logging.warning(f"wandb is off, metrics.jsonl goes on: {error}")

    def write(self, row):
        logging.info(" ".join(f"{name}={value:.6g}" for name, value in row.items()))
        if dist.get_rank() > 0:
            return
        row = {name: value for name, value in row.items() if math.isfinite(value)}  # NaN: no JSON
        size = self.size()
        try:
            with open(self.path, "a") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            logging.warning(f"metrics.jsonl lacks step {row['step']}: {error}")
            if self.path.exists():
                os.truncate(self.path, size)  # a full disk may have taken half of the line
        if self.thread.is_alive():
            self.rows.put(row)

    def close(self, **summary):
        if dist.get_rank() > 0:
            return
        seconds = round(time.monotonic() - START, 1)
        summary.update(script=SCRIPT, seconds=seconds, world_size=dist.get_world_size())
        summary.update(torch=torch.__version__, args=vars(self.args))
        try:
            (self.folder / "summary.json").write_text(json.dumps(summary, indent=1))
            if self.path.exists():
                draw_curves(self.path)
        except Exception as error:  # no matplotlib, no disk: no reason to fail a run that is over
            logging.warning(f"no summary.json or no curves.png: {error}")
        if self.thread.is_alive():
            self.rows.put(None)
            self.thread.join(timeout=30)


def draw_curves(path):
    """curves.png: each number of metrics.jsonl against the step. (rank 0)"""
    from matplotlib.figure import Figure

    curves = {}
    for line in open(path):
        row = json.loads(line)
        step = row.pop("step")
        for name, value in row.items():
            curves.setdefault(name, []).append((step, value))
    figure = Figure((12, 1 + len(curves)), layout="constrained")
    for number, (name, points) in enumerate(curves.items(), start=1):
        axis = figure.add_subplot(math.ceil(len(curves) / 3), 3, number, title=name)
        axis.plot(*zip(*points, strict=True), linewidth=1)
    figure.savefig(path.with_name("curves.png"), dpi=110)


# End of the lines that every script has.
# ==================================================================================================


# --------------------------------------------------------------------------------------------------
# Evaluation


def margin(logits, labels):
    """(B,) the best wrong logit minus the right one: above 0 the image is told wrong."""
    wrong = logits.scatter(1, labels[:, None], -math.inf)
    return wrong.amax(1) - label_logit(logits, labels)


@torch.no_grad()
def best_score(attack, x, labels, steps, score, start=None):
    """The highest score(logits, labels) (B,) on the way of an attack from `start` (the images),
    whose steps shrink along half a cosine."""
    z = x if start is None else start
    highest = torch.full((len(x),), -math.inf, device=x.device)
    for number in range(steps):
        size = attack.size * (0.5 + 0.5 * math.cos(math.pi * number / steps))
        z, logits = attack.step(z, x, labels, size)
        highest = torch.maximum(highest, score(logits, labels))
    return torch.maximum(highest, score(attack.net(z), labels))


def auroc(real, fake):
    return pairs_in_order(real, fake).item() / (2 * len(real) * len(fake))


def picture_batch(source, ids, size, device):
    return pixels(torch.from_numpy(centre(source.images[ids], size)).to(device))


@torch.no_grad()
def evaluate(run):
    """Metrics of the averaged weights on held-out images, in fp32 without torch.compile, whatever
    training uses; None if the ranks agreed to stop. (all ranks)"""
    args = run.args
    model = run.average
    eps = args.indist_attack_clf_eps
    norm = args.indist_attack_clf_norm
    on_class = Attack(model, cross_entropy, eps / 2, eps, norm)
    on_energy = Attack(model, logsumexp, args.ood_eps / 4, args.ood_eps, norm)
    rank = dist.get_rank()
    world_size = dist.get_world_size()

    tables = []
    for source in (run.inside, run.outside):
        ids = source.some("valid", args.eval_images)
        table = torch.zeros(len(ids), 4, device=run.device)
        # batch k goes to rank k % world_size: the same batches on any world size
        for number, first in enumerate(range(0, len(ids), args.eval_batch_size)):
            # here and not once at the end: an evaluation may take long
            if number % world_size == 0 and run.guard.agree():
                return None
            if number % world_size != rank:
                continue
            rows = slice(first, first + args.eval_batch_size)
            x = picture_batch(source, ids[rows], run.inside.size, run.device)
            logits = model(x)
            table[rows, 0] = logsumexp(logits, None)
            if source is run.outside:
                table[rows, 1] = best_score(on_energy, x, None, args.eval_steps, logsumexp)
                continue
            y = torch.from_numpy(source.labels[ids[rows]]).to(run.device)
            table[rows, 1] = (logits.argmax(1) == y).float()
            table[rows, 2] = (best_score(on_class, x, y, args.eval_steps, margin) < 0).float()
            table[rows, 3] = cross_entropy(logits, y)
        if world_size > 1:
            dist.all_reduce(table)  # each row is zero on all ranks but one
        tables.append(table.cpu().double())

    images, others = tables
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


OPTIMIZERS = {  # with the original's settings
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"betas": (0.0, 0.99)}),
    "adamw": (torch.optim.AdamW, {"betas": (0.9, 0.95)}),
}


class Zero(ZeroRedundancyOptimizer):
    """ZeRO stage 1 (Rajbhandari et al. 2020): each rank updates a part of the weights."""

    def step(self):
        self.optim.found_inf = self.found_inf  # by which StepGuard skips a step
        super().step()

    def state_dict(self):
        """On rank 0 all of it, as a plain optimizer's; on others the options. (all ranks)"""
        self.consolidate_state_dict(0)
        if dist.get_rank() == 0:
            return super().state_dict()
        return torch.optim.Optimizer.state_dict(self)


def make_optimizer(args, model, stage):
    name = args.optimizer if stage == "dat" else args.at_optimizer
    weight_decay = args.wd if stage == "dat" else args.at_wd
    kind, settings = OPTIMIZERS[name]
    options = {**settings, "lr": 1.0, "fused": True}  # the rate is set anew in each step
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    if args.zero and dist.get_world_size() > 1:
        optimizer = Zero(groups, kind, **options)
    else:
        optimizer = kind(groups, **options)
    if name == "sgd":
        # PyTorch makes these buffers in the first step, and if that step is skipped, leaves in them
        # whatever was in the memory. With zeros the first step is the same.
        own = getattr(optimizer, "optim", optimizer)  # of Zero: that of this rank's part
        for group in own.param_groups:
            for parameter in group["params"]:
                own.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


class AttackLength:
    """T, the steps of the attack on OOD images. It grows by one when the mean AUC of the last steps
    of this T, as many as have --min_imgs_per_threshold images, is at least --AUC_th.

    The mean is read only where T could grow: not before there are enough steps, and never at the
    largest T. It is read one step late, so that the device has done that step already."""

    def __init__(self, args, global_batch, device, saved):
        self.args = args
        self.steps = saved.get("T", args.attack_start_step)
        needed = math.ceil(args.min_imgs_per_threshold / global_batch)
        window = torch.tensor(saved.get("window", []), dtype=torch.int64, device=device)
        self.window = deque(window, maxlen=needed)  # pairs_in_order of the last steps of this T
        self.most = needed * 2 * global_batch**2  # what their sum can be
        self.ask()

    def state(self):
        return {"T": self.steps, "window": [int(pairs) for pairs in self.window]}

    def ask(self):
        """Send the sum of the window to the host, if T could grow now."""
        self.total = None
        is_full = len(self.window) == self.window.maxlen
        if is_full and self.steps < self.args.attack_max_steps:
            total = torch.stack([*self.window]).sum()
            self.total = total.to("cpu", non_blocking=True)
            if total.device.type != "cpu":
                self.arrived = torch.accelerator.current_stream().record_event()

    def grow(self, pairs):
        """Take in the pairs_in_order of a step, the same on all ranks. (all ranks)"""
        if self.total is not None:
            if pairs.device.type != "cpu":
                self.arrived.synchronize()
            if self.total.item() / self.most >= self.args.AUC_th:
                self.steps += 1
                self.total = None
                self.window.clear()  # and without this step, which had the T before
                return
        self.window.append(pairs)
        self.ask()


@torch.no_grad()
def update_average(average, model, decay, step):
    """average = d average + (1 - d) weights; d rises from 0.1, so that the start is forgotten."""
    d = min(decay, (1 + step) / (10 + step))
    torch._foreach_lerp_(tensors(average), tensors(model), 1 - d)


def share_statistics(model):
    """Batch normalisation in training mode has the statistics of its rank's images: take the mean
    over the ranks, in every step, so that all ranks have the same network. (all ranks)"""
    running = []
    for layer in batch_norms(model):
        if layer.training:
            running += [layer.running_mean, layer.running_var]
    if running and dist.get_world_size() > 1:
        flat = torch.cat(running) / dist.get_world_size()
        dist.all_reduce(flat)
        torch._foreach_copy_(running, [*flat.split([len(tensor) for tensor in running])])


def compare_ranks(model, average, step):
    """End the run if any tensor is not the same on all ranks, and name it. (all ranks)"""
    named = {f"parameter {name}": p for name, p in model.named_parameters()}
    named.update({f"gradient of {name}": p.grad for name, p in model.named_parameters()})
    named.update({f"buffer {name}": buffer for name, buffer in model.named_buffers()})
    named.update({f"average of {name}": p for name, p in average.named_parameters()})
    hashes = {}
    for name, tensor in named.items():
        content = tensor.detach().cpu().numpy().tobytes()
        hashes[name] = hashlib.sha256(content).hexdigest()

    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, hashes)
    for name in hashes:
        ranks = [rank for rank, theirs in enumerate(found) if theirs[name] != found[0][name]]
        if ranks:
            text = f"differs from rank 0's on the ranks {ranks}"
            raise RunError(f"step {step}: the {name} {text}: a fault of a device or of the network")


def rank_metrics(device, loss, data_wait):
    """{name/rankN: value} of every rank. (all ranks)"""
    own = {"loss": loss, "data_wait": data_wait, "memory_gb": 0.0}
    if device.type != "cpu":
        own["memory_gb"] = torch.accelerator.max_memory_allocated(device) / 2**30
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    row = {}
    for rank, values in enumerate(found):
        for name, value in values.items():
            row[f"{name}/rank{rank}"] = value
    return row


def without_sync(ddp_model, needed):
    """Gradients are added up over the ranks in the last backward pass of a step only."""
    if needed or dist.get_world_size() == 1:
        return contextlib.nullcontext()
    return ddp_model.no_sync()


class Run:
    """What the stages share: data, network, attacks, and the folder of the run. (all ranks)"""

    def __init__(self, args, device):
        self.args = args
        self.device = device
        logging.info("Preparing data loaders...")
        inside, outside = load_data(args)
        self.inside = inside
        self.outside = outside
        for name in ("train", "valid", "test"):
            counts = f"{len(inside.part(name)):,} images, {len(outside.part(name)):,} OOD"
            logging.info(f"  {name}: {counts}")
        labels = inside.labels[inside.some("valid", args.eval_images)]
        self.commonest = float(np.bincount(labels).max() / len(labels))  # accuracy of guessing it

        data_hash = f"{inside.hash} {outside.hash}"
        self.state = open_run(args, data_hash)  # the checkpoint to go on from, or None
        kept = ["stage", "model_type", "norm", "normalize_input", "optimizer", "at_optimizer"]
        for name in kept:  # weights, or momenta, that fit, but mean something else
            if self.state and self.state["args"][name] != getattr(args, name):
                raise InputError(f"--{name}: this run was started with {self.state['args'][name]}")
        self.loop = {  # where training stands: it is saved with the weights
            "step": 0,
            "stage": "",
            "first": 0,  # steps before this stage
            "epoch": 0,
            "validated": 0,  # steps of this stage at the last validation
            "best": {},  # of each stage
            "attack": {},  # state of AttackLength
            "global_batch": 0,
            "data_hash": data_hash,
        }
        if self.state:
            self.loop = {name: self.state[name] for name in self.loop}

        torch.backends.cudnn.benchmark = not args.deterministic  # it pays: shapes stay the same
        default_generator(torch.device("cpu")).manual_seed(args.seed)  # the same on all ranks
        self.model = make_network(args, len(inside.classes), inside.channels, inside.size)
        if args.ckpt_path and self.state is None:
            load_weights(self.model, args.ckpt_path)
        self.model.to(device)
        logging.info(f"{sum(p.numel() for p in self.model.parameters()):,} parameters")

        # its weights are averages of the model's; in fp32, as it is evaluated
        self.average = copy.deepcopy(self.model).requires_grad_(False).train(False)
        self.model.dtype = choose_precision(args, device)
        self.twin = Twin(self.model)
        net = self.twin.model
        if args.use_ddp:
            logging.info(f"Initialized DDP with {dist.get_world_size()} processes")
            self.ddp_model = wrap_ddp(self.model, args, device)
        else:
            net = nn.DataParallel(net)
            self.ddp_model = nn.DataParallel(self.model)
            devices = max(1, len(net.device_ids))
            logging.info(f"use_ddp=False: DataParallel over {devices} devices")
        options = [args.indist_attack_clf_step_size, args.indist_attack_clf_eps]
        options += [args.indist_attack_clf_norm, args.compile]
        self.on_class = Attack(net, cross_entropy, *options)
        gain = logsumexp if args.logsumexp_sampling else label_logit
        options = [args.attack_step_size, args.attack_eps, args.attack_norm, args.compile]
        self.on_outside = Attack(net, gain, *options)
        self.guard = StepGuard(args, device)
        self.log = RunLog(args, self.state)


def energy_passes(run, batch, steps, backward):
    """The loss that tells real images from OOD images attacked for `steps` steps. Each half has its
    own backward pass: then only one graph is in memory. Returns bce (B,), r1 (B,) by image, the
    loss (), and the scores (2, B) of real and attacked images."""
    args = run.args
    energy = logsumexp if args.logsumexp else label_logit
    real = pixels(batch.real)
    fake = run.on_outside(pixels(batch.outside), batch.real_y, steps)
    bce = 0.0
    loss = 0.0
    r1 = torch.zeros(len(real), device=real.device)
    scores = []
    for x, sign in ((real, -1), (fake, 1)):
        logits = run.ddp_model(x)
        # binary cross entropy with the label real (or not), mean over both halves
        losses = 0.5 * F.softplus(sign * energy(logits, batch.real_y))
        bce = bce + losses.detach()
        if x is real and args.r1reg > 0:
            squares = squared_gradient(run.model, real, energy, batch.real_y)
            losses = losses + args.r1reg * squares
            r1 = squares.detach()
        loss = loss + backward(losses)
        scores.append(run.on_outside.gain(logits.detach(), batch.real_y))
    return bce, r1, loss, torch.stack(scores)


def start_stage(run, stage):
    """The weights that a stage starts from. (all ranks)"""
    loop = run.loop
    if stage == "dat" and loop["stage"] == "at":
        path = Path(run.args.output_dir) / "at_best.pt"
        if on_rank0(is_whole, path):
            load_weights(run.model, path)
        else:  # the disk may have been full; in memory the averages of the last step are whole
            logging.warning(f"{path} is missing or damaged: stage dat starts from the last weights")
            run.model.load_state_dict(run.average.state_dict())
    loop.update(stage=stage, first=loop["step"], validated=0, attack={})
    run.average.load_state_dict(run.model.state_dict())


def note_metrics(run, stage, metrics):
    """Log held-out metrics; whether these weights are the best of the stage."""
    loop = run.loop
    row = {"step": loop["step"], "epoch": loop["epoch"]}
    for name, value in metrics.items():
        row[f"val/{stage}/{name}"] = value
    run.log.write(row)
    if not math.isfinite(metrics["cross_entropy"]):
        text = f"the validation loss after step {loop['step']} is {metrics['cross_entropy']}"
        raise RunError(f"{text}: lower the learning rate")
    # training without attacks does not make a network robust: it is chosen by its clean accuracy
    metric = "robust" if run.args.indist_attack_clf_max_steps > 0 else "clean"
    value = metrics[metric]
    # of two that are as good the later one, which has seen a longer attack
    if stage in loop["best"] and value < loop["best"][stage]["value"]:
        return False
    best = {"metric": f"{stage}/{metric}", "value": value, "better": "higher"}
    loop["best"][stage] = {**best, "step": loop["step"], "metrics": metrics}
    return True


def train(run, stage):
    """One stage, from where it stands. (all ranks)"""
    args = run.args
    device = run.device
    model = run.model
    ddp_model = run.ddp_model
    guard = run.guard
    loop = run.loop
    world_size = dist.get_world_size()
    resumed = run.state is not None and run.state["stage"] == stage
    if loop["stage"] != stage:
        start_stage(run, stage)
    # batch normalisation keeps stage 1's statistics: those of OOD images would harm the energy
    model.frozen = stage == "dat"
    model.train()

    sampler = GlobalBatchSampler(run.inside.part("train"), args, run.state)
    global_batch = sampler.global_batch
    loop["global_batch"] = global_batch
    steps = sampler.steps * (args.total_epochs if stage == "dat" else args.at_epochs)
    eval_every = math.ceil(args.n_imgs_per_evaluation_log / global_batch) or steps
    # The host prepares the next batch while a GPU computes this one; if data_wait says that it
    # takes longer: --num_workers.
    loader = DataLoader(
        TrainingData(args, run.inside, run.outside, stage),
        batch_size=None,  # our sampler makes whole batches
        sampler=sampler,
        num_workers=args.num_workers,
        persistent_workers=args.num_workers > 0,
        pin_memory=device.type != "cpu",
        worker_init_fn=ignore_signals,
    )

    optimizer = make_optimizer(args, model, stage)
    scaler = torch.amp.GradScaler(device.type, enabled=model.dtype == torch.float16)
    if resumed:
        restore(run.state, model, optimizer, scaler)
        run.average.load_state_dict(run.state["average"])
    run.twin.refresh()
    length = AttackLength(args, global_batch, device, loop["attack"])
    logging.info(f"Stage {stage}: {steps:,} steps, {sampler.steps:,} an epoch")

    def save(name):
        content = {"script": SCRIPT, "format": FORMAT, "args": vars(args)}
        content.update(loop, wandb_id=run.log.wandb_id, log_size=run.log.size())
        content["model"] = run.average.state_dict()  # the best weights are averages
        if name == "latest.pt":
            content["attack"] = length.state()
            content["model"] = model.state_dict()
            content["average"] = run.average.state_dict()
            content["optimizer"] = optimizer.state_dict()
            content["scaler"] = scaler.state_dict()
        on_rank0(save_checkpoint, Path(args.output_dir), name, content)

    def backward(losses):
        """losses (B,): their part of the mean over the global batch."""
        total = losses.sum() / global_batch
        # DDP takes the mean over the ranks, we want the sum
        scaler.scale(total * world_size).backward()
        return total.detach()

    done = loop["step"] - loop["first"]  # steps of this stage
    hide = dist.get_rank() > 0 or not sys.stderr.isatty()
    bar = tqdm(total=steps, initial=done, desc=f"stage {stage}", disable=hide)
    batches = None
    began = time.monotonic()
    since = done
    data_wait = 0.0
    names = ["loss"]
    if stage == "dat":
        names += ["clf_loss", "bce", "r1", "auc"]
    names.append("grad_norm")
    sums = torch.zeros(len(names) + 1, device=device)  # of these, and of 1; none of skipped steps
    while not guard.reason:
        epoch, position = divmod(done, sampler.steps)
        loop["epoch"] = epoch

        # validate; all ranks have the same metrics, and so agree on what is best
        due = done > 0 and (done % eval_every == 0 or done >= steps)
        if due and loop["validated"] < done:
            paused = time.monotonic()
            metrics = evaluate(run)
            if metrics is None:  # the ranks stop: this step's checkpoint was made before
                break
            loop["validated"] = done
            if note_metrics(run, stage, metrics):
                save("at_best.pt" if args.stage == "both" and stage == "at" else "best.pt")
            if done >= steps:
                save("latest.pt")  # the same command, given again, then knows it
            began += time.monotonic() - paused
        if done >= steps:
            break

        if position == 0 or batches is None:
            sampler.set_epoch(epoch, start=position)
            batches = iter(loader)
        lr = args.lr
        if stage == "at":
            lr = args.at_lr * (0.5 + 0.5 * math.cos(math.pi * done / steps))
        for group in optimizer.param_groups:
            group["lr"] = lr

        # forward and backward, micro-batch by micro-batch; each rank has a share of the means
        T = length.steps
        shares = torch.zeros(4 if stage == "dat" else 1, device=device)
        scores = torch.zeros(2, global_batch, device=device)
        for micro in range(1, sampler.accumulation + 1):
            asked = time.monotonic()
            batch = next(batches).to(device)
            data_wait += time.monotonic() - asked
            if stage == "dat":
                with without_sync(ddp_model, False):
                    bce, r1, energy_loss, pair = energy_passes(run, batch, T, backward)
                scores[:, batch.places] = pair
            x = run.on_class(pixels(batch.x), batch.y, args.indist_attack_clf_max_steps)
            with without_sync(ddp_model, micro == sampler.accumulation):
                loss = backward(cross_entropy(ddp_model(x), batch.y))
            found = [loss]
            if stage == "dat":
                of_images = torch.stack([bce, r1]).sum(1) / global_batch
                found = [loss + energy_loss, loss, *of_images]
            shares += torch.stack(found)
        share_statistics(model)
        if args.monitor_every and (done + 1) % args.monitor_every == 0:
            compare_ranks(model, run.average, loop["step"] + 1)

        # update, unless the gradient is not finite; then the step counts in no mean, either
        norm = guard.update(optimizer, scaler)
        update_average(run.average, model, args.ema, done)
        run.twin.refresh()
        values = list(shares * world_size)
        if stage == "dat":
            if world_size > 1:
                dist.all_reduce(scores)  # each image's is zero on all ranks but one
            pairs = pairs_in_order(scores[0], scores[1])
            pairs = torch.where(norm.isfinite(), pairs, 0)  # skipped: T must not grow by it
            length.grow(pairs)
            values.append(pairs / (2 * global_batch**2))
        values += [norm, torch.ones_like(norm)]
        sums += torch.where(norm.isfinite(), torch.stack(values), 0.0)
        done += 1
        loop["step"] += 1
        bar.update()

        # once in a while: log. Here the host waits for the GPU. (all ranks)
        if done % args.log_every == 0 or done == steps:
            *totals, good = sum_over_ranks(sums)
            seconds = time.monotonic() - began
            made = done - since
            row = {"step": loop["step"], "phase": PHASES[stage], "epoch": epoch, "lr": lr}
            row["skipped"] = made - good / world_size
            if good > 0:
                for name, total in zip(names, totals, strict=True):
                    row[name] = total / good
            if stage == "dat":
                row["T"] = T
            row["samples_per_s"] = made * global_batch / seconds
            row["data_wait"] = data_wait / seconds
            if args.log_ranks:
                own_loss = sums[0].item() / max(1, sums[-1].item())
                row.update(rank_metrics(device, own_loss, row["data_wait"]))
            run.log.write(row)
            began = time.monotonic()
            since = done
            data_wait = 0.0
            sums.zero_()

        # save; also before a validation, which may be long and may be interrupted (all ranks)
        reason = guard.agree()
        if reason or done % args.save_every == 0 or done % eval_every == 0 or done == steps:
            save("latest.pt")
    bar.close()


# --------------------------------------------------------------------------------------------------
# Main


def report(run, stages):
    """Log the best of each stage on held-out images, beside what needs no network. Returns what
    summary.json says of it."""
    best = run.loop["best"]
    for stage in stages:
        metrics = best[stage]["metrics"]
        text = " ".join(f"{name}={value:.4f}" for name, value in metrics.items())
        logging.info(f"Held out, the best of stage {stage}: {text}")
    logging.info(f"Held out, the commonest class: clean={run.commonest:.4f}")
    if metrics["clean"] <= run.commonest:
        logging.warning("the network is not better than the commonest class: lower the rates")
    if stage == "dat" and metrics["adv_auroc"] <= 0.5:
        text = "attacked OOD images look more real than images do"
        logging.warning(f"{text}: train longer, or raise --attack.max_steps")
    return {
        "baselines": {"commonest class": {"clean": run.commonest}},
        "stages": {stage: best[stage]["metrics"] for stage in stages},
        "best": {key: value for key, value in best[stage].items() if key != "metrics"},
    }


def main(args):
    device = setup_ddp(args)
    world_size = dist.get_world_size()
    if not args.use_ddp and world_size > 1:
        text = f"--use_ddp False is one process, {world_size} were started"
        raise InputError(f"{text}: start it with python, it uses all GPUs by DataParallel")
    if args.use_ddp and world_size == 1 and (device.type != "cpu" or find_ranks()):
        logging.warning("DDP with one process only: use_ddp=False, or torchrun with more of them")
    run = Run(args, device)
    loop = run.loop
    guard = run.guard
    stages = ["at", "dat"] if args.stage == "both" else [args.stage]
    logging.info("Starting distributed training...")
    for stage in stages:
        if guard.reason or (stage == "at" and loop["stage"] == "dat"):
            continue
        train(run, stage)
        # adversarial training from scratch may stay where it began: then stage 2 has no use
        if stage == "at" and not guard.reason:
            clean = loop["best"]["at"]["metrics"]["clean"]
            if clean <= run.commonest:
                text = f"stage at ended at an accuracy of {clean:.3f}, that of the commonest class"
                hint = "give --fresh and another --at_lr, --at_optimizer adamw, or a --norm"
                raise RunError(f"{text}: {hint}")

    summary = {"status": f"stopped by {guard.reason}"}
    if not guard.reason:
        logging.info("Training process completed.")
        summary = {"status": "finished", **report(run, stages)}
    if run.state and loop["step"] == run.state["step"]:
        logging.info("nothing was left to train; the options are those of then")
        run.log.args = argparse.Namespace(**run.state["args"])
    run.log.close(steps=loop["step"], **summary)
    if not guard.reason:
        path = f"{args.output_dir}/best.pt"
        logging.info(f"python tools/evaluate_rebm.py {path} measures it on the test set")
        logging.info("Training and validation completed successfully!")
    return exit_status(guard.reason)


if __name__ == "__main__":
    launch(parse_args, main)
