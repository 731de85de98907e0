"""Train a robust energy-based image model: one network that classifies under attack, detects and generates.

Dual adversarial training (Yin et al. 2025, arXiv 2510.13872): f(x) are a classifier's logits and also the energies
E(x) = -logsumexp f(x). Stage 1 (at) is adversarial training of the classifier. Stage 2 (dat) adds a binary loss between
real images and out-of-distribution (OOD) images that an attack of T steps has pushed to look real; T grows when the
network tells the two well apart (pooled AUC over all ranks), and the same attack, from the same seeds, then generates.

Run
    python run_train_rebm_ddp.py configs/config_rebm_quickstart.yaml                one process
    torchrun --nproc_per_node=4 run_train_rebm_ddp.py configs/config_rebm_cifar10.yaml attack.max_steps=100    one node
    torchrun --nproc_per_node=8 --nnodes=2 --node_rank=0 --master_addr=HOST run_train_rebm_ddp.py           two nodes
    python run_train_rebm_ddp.py configs/config_rebm_cifar10.yaml use_ddp=False     all GPUs by DataParallel
    python run_train_rebm_ddp.py configs/config_rebm_cifar10.yaml eval_only=True model.ckpt_path=best.pt
Data (torchvision is not needed; pixels in [0, 1], attack radii in the same unit)
    data.indist_dataset     digits (scikit-learn), cifar10 or cifar100 (folder of their python or binary files), folder
                            (train/CLASS/, val/CLASS/), file (.npz: x_train, y_train, x_test, y_test, uint8)
    data.outdist_dataset    noise, blobs (made here), tinyimages (the memmap), folder, file
Logged metrics (over all ranks, in nats; in --output_dir with best.pt, latest.pt, STAGE.pth, samples_STAGE.png)
    loss = bce_weight * bce + clf_weight * clf_loss + r1reg * r1; T: attack steps; auc: real against attacked images
    val, test: clean, robust@R (accuracy in balls of radius R), ood_auc KIND, adv_ood_auc (attacked), frechet_pixels
    ranks: seconds a step of each part (s_*) and samples/s of the fastest, mean and slowest rank
Differences from the original: all ranks evaluate, every item once, under a stronger attack; the AUC is pooled; data are
ordered by epoch and seed; attacks use the bare module; best weights are chosen on images held out of the training set.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import difflib
import gc
import hashlib
import importlib
import io
import itertools
import json
import logging
import math
import os
import pickle
import queue
import re
import resource
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
import zipfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
from tqdm import tqdm

# ---- Constants -----------------------------------------------------------------------------------

STAGES = {"standard": 0, "at": 1, "dat": 2}  # in this order; the number is logged as `phase`
NORMALISATION = {  # mean and deviation of the channels
    "grey": ((0.5,), (0.5,)), "CIFAR": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "ImageNet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))}
AUGMENTATIONS = ("none", "shift", "original", "autoaugment_cutout", "resized_crop", "resize")
GENERATED = ("noise", "blobs")  # kinds of OOD images that need no files
SAME = ("data_key seed stage baseline_epochs at_epochs total_epochs model_type width norm use_convstem normalize_input "
        "use_batchnorm optimizer lr wd at_optimizer at_lr at_wd bce_weight clf_weight r1reg logsumexp ema AUC_th "
        "logsumexp_sampling indist_perturb attack_max_steps attack_step_size attack_eps attack_norm "
        "clf_attack_max_steps clf_attack_step_size clf_attack_eps clf_attack_norm augm_type_classification "
        "augm_type_generation").split()  # what a resumed run keeps
REFUSED = {  # keys of the original that are not taken, by the reason
    "the attack is PGD; the original's adam attack ignored labels, radius and norm": "attack.attack_type attack.lr "
        "indist_attack_clf.attack_type indist_attack_clf.lr image_log.attack_type image_log.lr",
    "a number of steps chosen by the distance that is reported flatters it: give num_steps":
        "image_log.adaptive_steps image_log.sweep_radius image_log.sweep_num_samples",
    "it changed nothing in the original, or says what another option says (compare --help)":
        "attack.fixed_steps indist_attack_clf.fixed_steps indist_attack_clf.start_step image_log.blur_kernel_size "
        "image_log.adaptive_blur image_log.log_fid image_log.data_dir image_log.ood_data_dir image_log.img_extension "
        "image_log.save_dir data.mixed_id model.which_logit model.model_prefix model.drop_path_rate model.model_id "
        "model.head_init_scale model.use_layernorm mixup_alpha mixup_beta use_counterfactuals indist_clean_extra fp16 "
        "indist_train_only tinyimages_loader openimages_augm n_imgs_per_metrics_log n_imgs_per_image_log fixed_lr tags "
        "evaluate_ood_detection clf_indist_weight clf_outdist_weight clf_adv_weight r1_indist_weight "
        "r1_outdist_weight r1_adv_weight wandb_dir wandb_disabled resume_from_state"}

# ---- Arguments -----------------------------------------------------------------------------------

words = re.compile(r"[^,\s]+").findall  # `a,b,c` as a list

def above(low: float, kind: type = float) -> Callable:
    """A parser of numbers above `low`."""
    def number(text: str) -> float:
        if not (value := kind(text)) > low:
            raise argparse.ArgumentTypeError(f"{text} must be above {low}")
        return value
    return number

def radius(text: str) -> float:
    """A float above 0; none, null, inf and YAML's .inf are no limit."""
    return math.inf if text.lower().strip(".") in ("inf", "none", "null", "") else above(0)(text)

def parse_args(argv: list[str] | None = None) -> Namespace:
    """Every option."""
    p = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    some, whole, positive, weight = above(0, int), above(-1, int), above(0), above(-1e-9)
    def section(title: str, prefix: str | None, *options: tuple) -> None:
        """Options (name, type or choices, default, help, other names); those with a prefix are TITLE.NAME, too."""
        add = p.add_argument_group(title).add_argument  # --lr; --num_workers and data.num_workers; attack.max_steps
        for name, kind, default, text, *more in options:
            names = [name, *more] if prefix is None else [f"{prefix}{name}", f"{title}.{name}", *more]
            how = FLAG if kind is bool else {"type": kind} if callable(kind) else {
                "choices": kind, "type": lambda word, kind=kind: {c.lower(): c for c in kind}.get(word.lower(), word)}
            add(*(f"--{n}" for n in names), **how | {"default": default, "help": text})
    def attack(name: str, steps: int, size: float, eps: float) -> list[tuple]:
        return [(name, whole, steps, "steps of the attack" + " at most (T)" * (steps == 50)),
                ("step_size", positive, size, "length of a step"), ("norm", ("L2", "Linf"), "L2", "of step and ball"),
                ("eps", radius, eps, "radius of the ball (inf: none)")]
    section("data", "", ("indist_dataset", ("digits", "cifar10", "cifar100", "folder", "file"), "digits", "to model"),
        ("indist_ds_dir", str, None, "its folder or file"), ("outdist_std_dir", str, None, "that of outdist_dataset"),
        ("outdist_dataset", (*GENERATED, "tinyimages", "folder", "file"), "noise", "OOD images"),
        ("outdist_max_samples", some, 50_000, "OOD images to train on at most", "openimages_max_samples"),
        ("exclude", words, [], "text files of rows of tinyimages that are CIFAR's"),
        ("outdist_dataset_ood_detection", words, "noise,blobs", f"of {', '.join(GENERATED)}, or .npy"),
        ("image_size", some, None, "side in pixels [default: of the data; 256 of folders]"),
        ("num_classes", some, None, "must be that of the data"), ("cache_dir", str, "./cache", "for decoded folders"),
        ("valid_images", some, 1000, "training images held out to choose the best weights by"),
        ("split_seed", int, 0, "of digits' test set and of the images held out"),
        ("num_workers", some, 4, "threads that decode a folder, once, into cache_dir"),
        ("skip_bad_data", bool, False, "leave out images that cannot be read and list them"),
        ("verify_data", bool, False, "compare the checksums of the cache too"),
        ("augm_type_classification", AUGMENTATIONS, "shift", "of images to classify"),
        ("augm_type_generation", AUGMENTATIONS, "none", "of images for the energy, and OOD"))
    section("model", "", ("model_type", MODELS, "SmallNet", "network"), ("width", some, 24, "channels of SmallNet"),
        ("ckpt_path", str, None, "weights to start from, of any stage (averaged ones where a file has them)"),
        ("norm", ("none", "layer", "batch"), "none", "normalisation of SmallNet"),
        ("use_batchnorm", bool, False, "stage 2 goes on with batch statistics, instead of frozen ones"),
        ("use_convstem", bool, True, "ConvNeXt: small convolutions for the patches"),
        ("normalize_input", bool, True, "subtract mean, divide by deviation, inside the model"))
    section("attack", "attack_", *attack("max_steps", 50, 0.1, math.inf), ("start_step", whole, 0, "T at its start"))
    section("indist_attack_clf", "clf_attack_", *attack("max_steps", 10, 0.1, 0.5),
        ("random_start", bool, False, "start from a random point of the ball"))
    section("image_log", "image_", *attack("num_steps", 32, 0.2, math.inf),
        ("num_samples", some, 10_000, "images to generate"), ("fid_weights", str, None, "torch-fidelity's Inception"),
        ("fid_features", str, "pixels", "pixels (8 x 8), inception, or a TorchScript FILE: images to features (B, D)"))
    section("Objective", None, ("bce_weight", weight, 1.0, "of the loss between real and attacked OOD images"),
        ("clf_weight", weight, 1.0, "of the adversarial classification loss in stage 2"),
        ("r1reg", weight, 0.0, "of R1, half the squared gradient norm of the energy at real images"),
        ("logsumexp", bool, True, "energy -logsumexp, not -f_y"), ("track_r1", bool, False, "log R1 where r1reg is 0"),
        ("logsumexp_sampling", bool, False, "attack OOD images by logsumexp, not by f_y"),
        ("indist_perturb", bool, False, "real images are first attacked to look less real"),
        ("indist_perturb_steps", some, 10, "its steps"), ("indist_perturb_eps", positive, 0.5, "its radius"),
        ("AUC_th", weight, 0.8, "T grows where the mean AUC is at least this"),
        ("min_imgs_per_threshold", some, 1000, "real images that the mean is over"),
        ("samples_per_attack_step", whole, 0, "instead: T grows after so many images"),
        ("stop_after_max_imgs", whole, 0, "end after so many images at T = max_steps (0: total_epochs)"))
    section("Stages", None, ("stage", ("at", "dat", "both"), "both", "dat alone starts from model.ckpt_path"),
        ("baseline_epochs", whole, 0, "first train the same network on clean images, to compare with"),
        ("at_epochs", some, 40, "passes over the data in stage 1"), ("total_epochs", some, 100, "in stage 2, at most"),
        *(option for at, kind, rate, decay, schedule, stage in (
            ("at_", "adamw", 2e-3, 1e-2, "cosine", "stage 1 and the baseline"),
            ("", "sgd", 1e-3, 5e-4, "constant", "stage 2"))
          for option in ((f"{at}optimizer", ("sgd", "adam", "adamw"), kind, f"of {stage}"),
                         (f"{at}lr", positive, rate, f"learning rate of {stage}"),
                         (f"{at}wd", weight, decay, f"weight decay of {stage}, not of biases and norms"),
                         (f"{at}lr_schedule", ("constant", "linear", "cosine"), schedule, f"of {stage}"))),
        ("batch_size", some, 128, "images per GPU and micro-batch"), ("ema", weight, 0.999, "decay of the average"),
        ("warmup_steps", whole, 0, "of a stage"), ("use_ema", bool, True, "average the weights, evaluate the averages"),
        ("zero", bool, False, "ZeRO: each rank keeps a part of the optimizer's state"))
    section("Evaluation", None, ("best_by", ("robust", "frechet"), "robust", "what best.pt has the best of"),
        ("n_imgs_per_evaluation_log", whole, 50_000, "images between evaluations (0: at a stage's end)"),
        ("robust_eval", bool, True, "measure robust accuracy too"), ("eval_steps", some, 50, "steps of the attack"),
        ("eval_restarts", some, 5, "its starts: up the loss, then to one wrong class each"),
        ("eval_images", some, 10_000, "images to evaluate at most"), ("eval_batch_size", some, 256, "images at a time"),
        ("radii", lambda text: [*map(radius, words(text))], "", "of robust accuracy [default: indist_attack_clf.eps]"),
        ("ood_detection_logsumexp", bool, True, "score by logsumexp, not by the largest probability"),
        ("ood_eps", positive, 1.0, "radius in which OOD images are attacked to look real"),
        ("keep_samples", bool, False, "keep all generated images, in samples.npz"),
        ("eval_only", bool, False, "evaluate model.ckpt_path on the test set, train nothing"),
        ("monitor_every", whole, 0, "steps between comparisons of all tensors across ranks (0: never)"),
        ("use_ddp", bool, True, "False: one process, all visible GPUs by DataParallel"))
    add_ddp_arguments(p, output_dir="outputs/rebm_ddp", wandb_project="rebm-ddp")
    p.add_argument("--rand_seed", dest="seed", type=int, default=argparse.SUPPRESS, help="= --seed")
    p.add_argument("--ddp_backend", dest="backend", default=argparse.SUPPRESS, help="= --backend")
    for name, said in ((name, f"{name} ({why})") for why, names in REFUSED.items() for name in names.split()):
        p.add_argument(f"--{name}", dest="refused", action="append", type=lambda _, said=said: said,
                       default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    argv = sys.argv[1:] if argv is None else argv
    if argv and "=" not in argv[0] and not argv[0].startswith("-"):  # CONFIG.yaml KEY=VALUE ...
        argv = [f"--config={argv[0]}", *argv[1:]]
    return check_options(p, parse_arguments(p, argv))

def check_options(p: ArgumentParser, args: Namespace) -> Namespace:
    """Ends with one line where options do not fit together."""
    kinds = [k for k in args.outdist_dataset_ood_detection if k not in GENERATED and not k.endswith((".npy", ".npz"))]
    inside, outside, refused = args.indist_dataset, args.outdist_dataset, getattr(args, "refused", [])
    for wrong, message in ((refused, f"not taken: {'; '.join(refused)}"),
            (inside != "digits" and not args.indist_ds_dir, f"--indist_dataset {inside} needs data.indist_ds_dir"),
            (outside not in GENERATED and not args.outdist_std_dir, f"outdist_dataset {outside} needs outdist_std_dir"),
            (args.clf_attack_random_start and args.clf_attack_eps == math.inf, "random_start needs a radius: give eps"),
            (args.exclude and outside != "tinyimages", "--exclude is of --outdist_dataset tinyimages"),
            (kinds, f"--outdist_dataset_ood_detection {','.join(kinds)}: of {', '.join(GENERATED)}, or .npy files"),
            (args.attack_start_step > args.attack_max_steps, "--attack.start_step is above --attack.max_steps"),
            (args.ema >= 1 or args.AUC_th > 1, f"--ema {args.ema}, --AUC_th {args.AUC_th}: from 0 to 1"),
            (not args.ckpt_path and (args.stage == "dat" or args.eval_only),
             "--stage dat and --eval_only start from weights: give --model.ckpt_path"),
            ((args.image_fid_features == "inception") != bool(args.image_fid_weights),
             "--image_log.fid_weights is of --image_log.fid_features inception, which needs it"),
            (args.zero and not args.use_ddp, "--zero needs --use_ddp True")):
        if wrong:
            p.error(message)
    args.radii = [r for r in args.radii or [args.clf_attack_eps] if r < math.inf]  # any image is in a ball without end
    args.stages = ["standard"] * bool(args.baseline_epochs) + {"both": ["at", "dat"]}.get(args.stage, [args.stage])
    return args

# ---- Data ----------------------------------------------------------------------------------------

class Images:
    """N square images, uint8 (N, C, S, S), in memory or mapped; `labels` (N,) int64 or None; `rows` picks some that are
    not `excluded` (ascending): numbers, or a range that goes round, as Tiny Images are too many for a list."""
    def __init__(self, pixels: np.ndarray, labels: np.ndarray | None, device: torch.device,
                 rows: np.ndarray | range | None = None, excluded: np.ndarray | tuple = ()):
        fits = device.type != "cpu" and not isinstance(pixels, np.memmap) and pixels.nbytes < 0.2 * (
            torch.get_device_module(device).get_device_properties(device).total_memory)
        self.home = torch.from_numpy(np.ascontiguousarray(pixels)).to(device) if fits else None
        self.pixels, self.device, self.rows = pixels, device, np.arange(len(pixels)) if rows is None else rows
        self.labels = None if labels is None else torch.from_numpy(np.asarray(labels, np.int64)).to(device)
        self.kept, self.gaps = len(pixels) - len(excluded), np.asarray(excluded, np.int64) - np.arange(len(excluded))
    def __len__(self) -> int:
        return len(self.rows)
    def part(self, ids: np.ndarray | slice) -> Images:
        """The images `ids` of these (of a range: a slice), sharing their memory."""
        other = object.__new__(Images)
        vars(other).update(vars(self), rows=self.rows[ids])
        return other
    def batch(self, ids: np.ndarray) -> Tensor:
        """Images (B, C, S, S) float32 in [0, 1]."""
        rows = (rows.start + rows.step * ids) % self.kept if isinstance(rows := self.rows, range) else rows[ids]
        rows = rows + np.searchsorted(self.gaps, rows, side="right")
        if self.home is None:
            return torch.from_numpy(np.ascontiguousarray(self.pixels[rows])).to(self.device).float() / 255
        return self.home[torch.from_numpy(rows).to(self.device, non_blocking=True)].float() / 255
    def targets(self, ids: np.ndarray) -> Tensor:
        return self.labels[torch.from_numpy(self.rows[ids]).to(self.device, non_blocking=True)]

def read_tiny_images(path: str, exclude: list[str]) -> tuple[np.memmap, np.ndarray]:
    """tiny_images.bin, rows of 32 x 32 x 3 bytes in Fortran order, as (N, 3, 32, 32); the rows that files list."""
    size = Path(path).stat().st_size if Path(path).exists() else 0
    if size % 3072 or size == 0:
        raise ValueError(f"{path}: {size} bytes; expected rows of 3072 bytes, 79,302,017 in the whole file")
    excluded = np.unique(np.concatenate([np.zeros(0, np.int64), *(np.loadtxt(n, np.int64, ndmin=1) for n in exclude)]))
    pixels = np.memmap(path, np.uint8, "r").reshape(-1, 3, 32, 32).transpose(0, 1, 3, 2)
    return pixels, excluded[(excluded >= 0) & (excluded < len(pixels))]

class PlainUnpickler(pickle.Unpickler):
    """Pickles of arrays, lists and dictionaries alone: anything else that a file names is not run."""
    def find_class(self, module: str, name: str):
        if not re.fullmatch(r"numpy(\.[\w.]+)?:(_reconstruct|ndarray|dtype)|_codecs:encode", f"{module}:{name}"):
            raise pickle.UnpicklingError(f"holds a {module}.{name}")
        return super().find_class(module, name)

def read_cifar(folder: str, classes: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """{"train", "test"}: images (N, 3, 32, 32) uint8, labels (N,), of CIFAR's python or binary files; or ValueError."""
    parts = {"train": ["train"], "test": ["test"]} if classes == 100 else {
        "train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}
    places = Path(folder), *sorted(Path(folder).glob(f"cifar-{classes}-*"))
    root = next((place for place in places if any(place.glob(f"{parts['train'][0]}*"))), None)
    if root is None:
        raise ValueError(f"{folder}: no CIFAR-{classes} there; expected what tar xf cifar-{classes}-python.tar.gz or "
                         f"cifar-{classes}-binary.tar.gz makes (https://www.cs.toronto.edu/~kriz/cifar.html)")
    def read(name: str) -> tuple[np.ndarray, np.ndarray]:
        path = root / (f"{name}.bin" if (root / f"{name}.bin").exists() else name)
        try:
            if path.suffix:  # of CIFAR-100 the fine label comes second
                table = np.fromfile(path, np.uint8).reshape(-1, 3073 + (classes == 100))
                pixels, labels = table[:, -3072:], table[:, -3073]
            else:
                table = PlainUnpickler(io.BytesIO(path.read_bytes()), encoding="bytes").load()
                pixels, labels = table[b"data"], table[b"labels" if classes == 10 else b"fine_labels"]
            if (pixels.dtype, *pixels.shape) != (np.uint8, len(labels) or 1, 3072) or {*labels} - {*range(classes)}:
                raise ValueError(f"{pixels.dtype} of shape {pixels.shape}, labels {labels[:9]} ...")
        except Exception as error:  # damaged pickles raise many kinds
            raise ValueError(f"{path}: {error}; expected a file of CIFAR-{classes}") from error
        return pixels.reshape(-1, 3, 32, 32), np.array(labels, np.int64)
    return {part: tuple(map(np.concatenate, zip(*map(read, names), strict=True))) for part, names in parts.items()}

def read_arrays(path: str, labelled: bool) -> dict[str, tuple[np.ndarray, np.ndarray | None]]:
    """{"train", "test"}: images, labels of an .npz; or {"train"} of a .npy (mapped) or x_train. Raises ValueError."""
    wanted, parts = ("x_train", "y_train", "x_test", "y_test")[: 4 if labelled else 1], {}
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
        found = {"x_train": found} if isinstance(found, np.ndarray) else found
        if {*wanted} - {*found}:
            raise ValueError(f"holds {', '.join(found)}")
        found = {name: found[name] for name in wanted}
    except Exception as error:  # also those of zipfile and zlib
        raise ValueError(f"{path}: {error}; expected {', '.join(wanted)}{'' if labelled else ', or a .npy'}") from error
    for part in (name[2:] for name in wanted[::2]):
        x, y = found[f"x_{part}"], found.get(f"y_{part}")
        pixels = x[:, None] if x.ndim == 3 else x if x.ndim != 4 or x.shape[1] in (1, 3) else x.transpose(0, 3, 1, 2)
        shape = pixels.shape if x.dtype == np.uint8 and pixels.ndim == 4 else (0, 0)
        if shape[1] not in (1, 3) or shape[2] != shape[3] or 0 in shape:
            raise ValueError(f"{path}: x_{part}: {x.dtype} of shape {x.shape}; expected uint8 (N, S, S, channels 1, 3)")
        if labelled and (y.shape != x.shape[:1] or y.dtype.kind not in "iu" or y.min() < 0):
            raise ValueError(f"{path}: y_{part} is {y.dtype} of shape {y.shape}, its least value "
                             f"{min(y.flat, default=0)}; expected {len(x)} integers from 0")
        parts[part] = pixels, y
    return parts

def decode_folder(args: Namespace, folder: str, side: int) -> tuple[str, list[str]]:
    """(cache of the images below `folder`, decoded once to squares of `side`; names of classes). (rank 0 only)"""
    from PIL import Image
    kinds, root = {".png", ".jpg", ".jpeg", ".bmp", ".webp"}, Path(folder).resolve()
    paths = sorted(p for p in root.rglob("*") if p.suffix.lower() in kinds)
    if not paths:
        raise ValueError(f"{folder}: no images there; expected {', '.join(sorted(kinds))}, of a class in each folder")
    names, numbers = np.unique([(*p.relative_to(root).parent.parts, "")[0] for p in paths], return_inverse=True)
    key, problems, labels = [[str(p), (found := p.stat()).st_size, found.st_mtime_ns] for p in paths], [], []
    cache = cache_folder(args, "images", key, side, args.skip_bad_data)
    if cache_is_whole(cache, args.verify_data):
        return str(cache), names.tolist()
    def decode(path: Path) -> bytes:
        try:
            with Image.open(path) as image:
                image, scale = image.convert("RGB"), side / min(image.size)
            image = image.resize([max(side, round(n * scale)) for n in image.size], Image.Resampling.BICUBIC)
            left, top = (image.width - side) // 2, (image.height - side) // 2
            return np.asarray(image.crop((left, top, left + side, top + side))).transpose(2, 0, 1).tobytes()
        except Exception as error:  # Pillow raises many kinds
            problems.append(f"{path}: {error}")
            return b""
    cache.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(args.num_workers) as pool, open(cache / "images.bin", "wb") as file:
        for low in tqdm(range(0, len(paths), 256), desc="256 images each", disable=not sys.stderr.isatty()):
            decoded = list(pool.map(decode, paths[low : low + 256]))  # in bounded memory
            file.writelines(decoded)
            labels += [number for number, image in zip(numbers[low:], decoded, strict=False) if image]
    if problems and not (args.skip_bad_data and labels):
        shown = "\n  ".join([*sorted(problems)[:20], f"... and {len(problems) - 20} more"][: len(problems)])
        raise ValueError(f"{len(problems)} bad images of {len(paths)} (--skip_bad_data leaves them out):\n  {shown}")
    write_file(cache / "labels.bin", np.array(labels, np.int64).tobytes())
    write_file(cache / "skipped_data.txt", "\n".join(sorted(problems)).encode())
    sizes = {p.name: [p.stat().st_size, sha256_of(p)] for p in (cache / "images.bin", cache / "labels.bin")}
    write_file(cache / "manifest.json", json.dumps(sizes, indent=1).encode())
    return str(cache), names.tolist()

def make_images(kind: str, count: int, shape: tuple[int, int, int], seed: int) -> np.ndarray:
    """(count, C, S, S) uint8 by (kind, seed, shape) alone: noise, or blobs, noise of 4 x 4 places scaled to size."""
    rng, found = np.random.default_rng([seed, GENERATED.index(kind)]), np.empty((count, *shape), np.uint8)
    for part in np.split(found, range(1000, count, 1000)):  # in bounded memory
        size = part.shape if kind == "noise" else (*part.shape[:2], 4, 4)
        places = torch.from_numpy(rng.integers(0, 256, size, np.uint8)).float()
        part[:] = F.interpolate(places, part.shape[2:], mode="bilinear").round().byte().numpy()
    return found

# What a run trains on and is measured by, Images: `outside` are OOD images to train on, `unseen` others of that kind
# (what samples start from, and to be detected), `others` {name: OOD images of more kinds, to be detected}; size is S.
Data = collections.namedtuple("Data", "train valid test outside unseen others classes channels size")

def load_data(args: Namespace, ddp: DDPContext) -> Data:
    """All images of a run; sets args.data_key. Raises ValueError where sets do not fit together. (all ranks)"""
    kind, place, size, seed = args.indist_dataset, args.indist_ds_dir, args.image_size, args.split_seed
    def read_folder(folder: str) -> tuple[np.memmap, np.ndarray, list[str]]:
        cache, names = on_rank0(ddp, decode_folder, args, folder, side := size * 8 // 7)  # as the usual test transform
        if ddp.rank == 0 and (skipped := Path(cache, "skipped_data.txt").read_text().splitlines()):
            warn(f"left out {len(skipped)} bad images, listed in {cache}/skipped_data.txt")
        pixels = np.memmap(f"{cache}/images.bin", np.uint8, "r").reshape(-1, 3, side, side)
        return pixels, np.fromfile(f"{cache}/labels.bin", np.int64), names
    def read_outside(kind: str, place: str, count: int, seed: int) -> Images:
        rows, excluded = np.arange(count), ()
        if kind in GENERATED:
            pixels = make_images(kind, count, (channels, size, size), seed)
        elif kind == "tinyimages":  # by jumps of a prime number, as the file is sorted by word
            pixels, excluded = read_tiny_images(place, args.exclude)
            rows = range(0, 49_011_353 * (len(pixels) - len(excluded)), 49_011_353)
        else:
            pixels = read_folder(place)[0] if kind == "folder" else read_arrays(place, False)["train"][0]
            rows = shuffled(len(pixels), seed)
        if pixels.shape[1] != channels or pixels.shape[2] < size:
            raise ValueError(f"{place or kind}: images {pixels.shape[1:]}; expected {(channels, size, size)} or larger")
        return Images(pixels, None, ddp.device, rows[:count], excluded)
    if kind == "digits":
        from sklearn.datasets import load_digits
        pixels, labels = load_digits(return_X_y=True)
        pixels = np.round(pixels.reshape(-1, 1, 8, 8) * (255 / 16)).astype(np.uint8)
        test, train = np.split(shuffled(len(pixels), seed), [360])
        found = {"train": (pixels[train], labels[train]), "test": (pixels[test], labels[test])}
    elif kind == "folder":
        size, last = size or 256, "val" if Path(place, "val").is_dir() else "test"
        found = {"train": read_folder(f"{place}/train"), "test": read_folder(f"{place}/{last}")}
    else:
        found = read_arrays(place, True) if kind == "file" else read_cifar(place, int(kind[5:]))
    (pixels, labels, *names), (test_pixels, test_labels, *test_names) = found["train"], found["test"]
    (channels, side), classes = pixels.shape[1:3], int(max(labels.max(), test_labels.max())) + 1
    size, missing = size if kind == "folder" else side, np.setdiff1d(range(min(classes, len(labels) + 1)), labels)
    if args.num_classes not in (None, classes) or args.image_size not in (None, size) or len(missing):
        raise ValueError(f"data.num_classes {args.num_classes}, data.image_size {args.image_size}: the data have "
                         f"{classes} classes (no training images of: {missing[:9]}) and {size} pixels a side")
    if test_pixels.shape[1:] != pixels.shape[1:] or test_names != names:
        raise ValueError(f"{place}: images {test_pixels.shape[1:]} to test, {pixels.shape[1:]} to train on; "
                         "expected the same shape, and folders of the same classes")
    held, more = min(args.valid_images, len(labels) // 5), max(1024, args.image_num_samples)
    valid, train = np.split(shuffled(len(labels), seed + 1), [held])
    inside, test = Images(pixels, labels, ddp.device), Images(test_pixels, test_labels, ddp.device)
    outside = read_outside(args.outdist_dataset, args.outdist_std_dir, args.outdist_max_samples + more, seed)
    reserve = min(more, len(outside) // 5)
    others = {Path(n).stem: read_outside(n, n, 1024, seed + 1000) for n in args.outdist_dataset_ood_detection}
    key = [part[i][:: max(1, len(part[i]) // 1000)].tobytes() for part in found.values() for i in (0, 1)]
    key += outside.batch(np.arange(100) % len(outside)).cpu().numpy(), repr((len(labels), len(outside), held)).encode()
    args.data_key = hashlib.sha256(b"".join(key)).hexdigest()[:16]
    require_same(ddp, "the data", args.data_key.encode())
    log0(f"data: {len(train)} images to train on, {held} to choose by, {len(test)} to test, {channels} x {size} x "
         f"{size}, {classes} classes; OOD: {len(outside) - reserve} ({args.outdist_dataset}), {reserve} for evaluation")
    return Data(inside.part(train), inside.part(valid), test, outside.part(slice(reserve, None)),
                outside.part(slice(reserve)), others, classes, channels, size)

def affine(x: Tensor, *matrix: float) -> Tensor:
    """Nearest pixels at `matrix` (2, 3) times (x, y, 1), coordinates from -1 to 1 about the centre; else black."""
    grid = F.affine_grid(x.new_tensor(matrix).view(2, 3).expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, "nearest", "zeros", False)

def grey(x: Tensor) -> Tensor:
    weights = x.new_tensor([0.299, 0.587, 0.114])[None, :, None, None]
    return (x * weights).sum(1, keepdim=True) if x.shape[1] == 3 else x

def equalize(x: Tensor) -> Tensor:
    """Pillow's histogram equalisation, of each channel of each image."""
    values = (x * 255).round().long().flatten(2)
    counts = values.new_zeros(*values.shape[:2], 256).scatter_add_(2, values, torch.ones_like(values))
    step = (values.shape[2] - counts.gather(2, values.amax(2, keepdim=True))) // 255
    table = ((counts.cumsum(2) - counts + step // 2) // step.clamp(min=1)).clamp(max=255)
    return torch.where(step == 0, values, table.gather(2, values)).reshape(x.shape) / 255

OPERATIONS = {  # of AutoAugment: magnitude 9 (of 0 to 9), whether its sign is random, what it does
    "ShearX": (0.3, True, lambda x, m: affine(x, 1, m, 0, 0, 1, 0)),
    "ShearY": (0.3, True, lambda x, m: affine(x, 1, 0, 0, m, 1, 0)),
    "TranslateX": (150 / 331, True, lambda x, m: affine(x, 1, 0, 2 * m, 0, 1, 0)),
    "TranslateY": (150 / 331, True, lambda x, m: affine(x, 1, 0, 0, 0, 1, 2 * m)),
    "Rotate": (math.pi / 6, True, lambda x, m: affine(x, math.cos(m), -math.sin(m), 0, math.sin(m), math.cos(m), 0)),
    "Color": (0.9, True, lambda x, m: grey(x).lerp(x, 1 + m).clamp(0, 1)),
    "Brightness": (0.9, True, lambda x, m: (x * (1 + m)).clamp(0, 1)),
    "Contrast": (0.9, True, lambda x, m: grey(x).mean((1, 2, 3), keepdim=True).lerp(x, 1 + m).clamp(0, 1)),
    "Sharpness": (0.9, True, lambda x, m: (x - m * F.pad(F.conv2d(  # Pillow's filter SMOOTH, less x
        x, x.new_tensor([[1, 1, 1], [1, -8, 1], [1, 1, 1]]).div(13).expand(x.shape[1], 1, 3, 3), groups=x.shape[1]),
        (1, 1, 1, 1))).clamp(0, 1)),
    "Posterize": (4, False, lambda x, m: ((x * 255).round() / 2 ** round(m)).floor() * 2 ** round(m) / 255),
    "Solarize": (256, False, lambda x, m: torch.where(x * 255 < 256 - m, x, 1 - x)),
    "AutoContrast": (0, False, lambda x, m: torch.where(
        (high := x.amax((2, 3), True)) > (low := x.amin((2, 3), True)), (x - low) / (high - low).clamp(min=1e-6), x)),
    "Equalize": (0, False, lambda x, m: equalize(x)), "Invert": (0, False, lambda x, m: 1 - x)}
# AutoAugment for CIFAR-10 (Cubuk et al. 2019, table 7), two operations each: name, tenths of probability, magnitude
POLICIES = [[(word[:-2], int(word[-2]) / 10, int(word[-1])) for word in pair.split()] for pair in (
    "Invert10 Contrast26|Rotate72 TranslateX39|Sharpness81 Sharpness93|ShearY58 TranslateY79|AutoContrast50 Equalize90|"
    "ShearY27 Posterize37|Color43 Brightness67|Equalize60 Equalize50|Sharpness39 Brightness79|Contrast67 Sharpness65|"
    "Color77 TranslateX58|Brightness96 Color28|Equalize30 AutoContrast40|TranslateY43 Sharpness26|Solarize52 Invert00|"
    "Color99 Equalize60|Equalize20 AutoContrast60|Equalize20 Equalize60|AutoContrast80 Solarize28|Equalize80 Invert10|"
    "Brightness13 Color70|Solarize45 AutoContrast90|TranslateY99 TranslateY79|AutoContrast90 Solarize83|"
    "TranslateY79 AutoContrast90").split("|")]

def auto_augment(x: Tensor, draws: Tensor) -> Tensor:
    """AutoAugment's policy for CIFAR-10, operation by operation on the images that drew it; draws (B, 5) on the CPU."""
    x = x.clone()
    for place, columns in enumerate(([0, 1, 2], [0, 3, 4])):
        groups = collections.defaultdict(list)
        for i, (policy, chance, sign) in enumerate(draws[:, columns].tolist()):
            name, probability, magnitude = POLICIES[int(policy * len(POLICIES))][place]
            if chance < probability:
                most, signed, _ = OPERATIONS[name]
                groups[name, magnitude / 9 * (-most if signed and sign < 0.5 else most)].append(i)
        for (name, amount), members in groups.items():
            ids = torch.tensor(members, device=x.device)
            x[ids] = OPERATIONS[name][2](x[ids], amount)
    return x

def augment(x: Tensor, kind: str, size: int, draws: Tensor) -> Tensor:
    """Images (B, C, H, W) in [0, 1] as (B, C, size, size), by a kind of AUGMENTATIONS; draws (B, 10) on the CPU."""
    if kind == "resized_crop":  # a random part of 8 to 100 % of the area and of sides 3:4 to 4:3, brought to `size`
        area, ratio = 0.08 + 0.92 * draws[:, 0], torch.exp((2 * draws[:, 1] - 1) * math.log(4 / 3))
        sides = torch.stack([(area * ratio).sqrt(), (area / ratio).sqrt()], 1).clamp(max=1)  # width, height
        theta = torch.cat([sides.diag_embed(), ((1 - sides) * (2 * draws[:, 2:4] - 1))[:, :, None]], 2)
        grid = F.affine_grid(theta.to(x.device), [*x.shape[:2], size, size], align_corners=False)
        x = F.grid_sample(x, grid, mode="bilinear", padding_mode="reflection", align_corners=False)
    elif kind == "resize":
        x = x if x.shape[-1] == size else F.interpolate(x, size, mode="bilinear", antialias=True)
    else:  # the usual test transform of a decoded folder
        edge = (x.shape[-1] - size) // 2
        x = x[:, :, edge : edge + size, edge : edge + size]
    if pad := {"shift": max(1, size // 16), "original": size // 8, "autoaugment_cutout": size // 8}.get(kind):
        offset = (draws[:, :2] * (2 * pad + 1)).long().to(x.device)  # moved by up to `pad` pixels, black coming in
        places, each = offset[:, :, None] + torch.arange(size, device=x.device), torch.arange(len(x), device=x.device)
        x = F.pad(x, (pad,) * 4)[each[:, None, None], :, places[:, 0, :, None], places[:, 1, None]].permute(0, 3, 1, 2)
    if kind not in ("none", "shift"):  # for digits, which have no mirror image
        draw = draws[:, 4 if kind.startswith("resize") else 2, None, None, None].to(x.device)
        x = torch.where(draw < 0.5, x.flip(3), x)
    if kind == "autoaugment_cutout":  # and a black square, its centre anywhere (DeVries and Taylor 2017)
        black = (torch.arange(size) + size // 4 - (draws[:, 8:10, None] * size).long()).to(x.device) // (size // 2) == 0
        x = auto_augment(x, draws[:, 3:8]).masked_fill(black[:, None, 0, :, None] & black[:, None, 1, None], 0.0)
    return x

def shuffled(n: int, seed: int) -> np.ndarray:
    """The numbers 0 to n - 1 (n,) int64 in random order, the same anywhere."""
    return keyed_uniform(seed, 0, torch.arange(n), 1)[:, 0].argsort(stable=True).numpy()

def sha256_of(path: Path) -> str:
    return hashlib.sha256(np.memmap(path, np.uint8, "r")).hexdigest()

def cache_is_whole(folder: Path, verify: bool) -> bool:
    """Whether a cache folder is complete. A truncated or changed file is named, and the folder made anew."""
    manifest = folder / "manifest.json"
    for name, (size, checksum) in (json.loads(manifest.read_text()) if manifest.exists() else {}).items():
        found = (folder / name).stat().st_size if (folder / name).exists() else -1
        if found != size or (verify and sha256_of(folder / name) != checksum):
            warn(f"{folder / name} is damaged ({found} bytes, {size} expected): making {folder} anew")
            manifest.unlink()
            return False
    return manifest.exists()

def cache_folder(args: Namespace, kind: str, *key) -> Path:
    """The folder of a cached thing, named by a hash of all that went into it."""
    digest = hashlib.sha256(json.dumps([1, *key], default=str).encode()).hexdigest()
    return Path(args.cache_dir) / f"{kind}-{digest[:16]}"

def write_file(path: Path, content: bytes) -> None:
    """In a folder that is made for it. Raises OSError if that fails. (rank 0 only)"""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not atomic_write(path, lambda file: file.write(content)):
        raise OSError(f"{path} could not be written: free space there or give another folder")

# ---- Model ---------------------------------------------------------------------------------------

def convolution(before: int, after: int, kernel: int = 3, stride: int = 1, bias: bool = False) -> nn.Conv2d:
    return nn.Conv2d(before, after, kernel, stride, kernel // 2, bias=bias)

class WideBlock(nn.Module):
    """Pre-activation residual block of a WideResNet (Zagoruyko and Komodakis 2016)."""
    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(before), convolution(before, after, 3, stride)
        self.bn2, self.conv2 = nn.BatchNorm2d(after), convolution(after, after)
        self.shortcut = None if before == after else convolution(before, after, 1, stride)
    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(x))
        return (x if self.shortcut is None else self.shortcut(y)) + self.conv2(F.relu(self.bn2(self.conv1(y))))

def wide_resnet(depth: int, factor: int) -> tuple[nn.Sequential, int]:
    layers, before = [convolution(3, 16)], 16
    for number, i in itertools.product(range(3), range((depth - 4) // 6)):
        layers.append(WideBlock(before, before := 16 * factor * 2**number, 1 if i or not number else 2))
    return nn.Sequential(*layers, nn.BatchNorm2d(before), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()), before

class Bottleneck(nn.Module):
    """Residual block of a ResNet-50 (He et al. 2016), its inner width `width`."""
    def __init__(self, before: int, width: int, after: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(
            convolution(before, width, 1), nn.BatchNorm2d(width), nn.ReLU(), convolution(width, width, 3, stride),
            nn.BatchNorm2d(width), nn.ReLU(), convolution(width, after, 1), nn.BatchNorm2d(after))
        self.shortcut = nn.Identity() if before == after else nn.Sequential(
            convolution(before, after, 1, stride), nn.BatchNorm2d(after))
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.shortcut(x) + self.body(x))

def resnet50(base_width: int) -> tuple[nn.Sequential, int]:
    layers, before = [convolution(3, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)], 64
    for number, i in ((number, i) for number, count in enumerate((3, 4, 6, 3)) for i in range(count)):
        stride, width = 2 if number and not i else 1, base_width * 2**number
        layers.append(Bottleneck(before, width, before := 256 * 2**number, stride))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), before

class ChannelNorm(nn.LayerNorm):
    """Layer normalisation over the channels of (B, C, H, W)."""
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

class ConvNextBlock(nn.Module):
    """Liu et al. 2022, figure 4, with layer scale."""
    def __init__(self, n: int):
        super().__init__()
        self.mix, self.scale = nn.Conv2d(n, n, 7, padding=3, groups=n), nn.Parameter(torch.full((n,), 1e-6))
        self.mlp = nn.Sequential(nn.LayerNorm(n, 1e-6), nn.Linear(n, 4 * n), nn.GELU(), nn.Linear(4 * n, n))
    def forward(self, x: Tensor) -> Tensor:
        return x + (self.scale * self.mlp(self.mix(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)

def convnext(depth: int, width: int, stem: bool) -> tuple[nn.Sequential, int]:
    """`stem`: small convolutions, which make adversarial training easier (Singh et al. 2023), in place of patches."""
    widths = [3, *{96: [48, 96], 128: [64, 96, 128], 192: [96, 144, 192]}[width]]
    layers = [] if stem else [nn.Conv2d(3, width, 4, 4), ChannelNorm(width, 1e-6)]
    for i, (before, after) in enumerate(itertools.pairwise(widths)) if stem else ():
        layers += [convolution(before, after, 3, 2 if i < 2 else 1, True), ChannelNorm(after, 1e-6), nn.GELU()]
    for number, count in enumerate((3, 3, depth, 3)):
        if number:
            layers += [ChannelNorm(width, 1e-6), nn.Conv2d(width, width := 2 * width, 2, 2)]
        layers += [ConvNextBlock(width) for _ in range(count)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(width, 1e-6)), width

def small_net(channels: int, size: int, width: int, norm: str) -> tuple[nn.Sequential, int]:
    """Pairs of convolutions down to 4 to 8 pixels a side, then 128 features; smooth, for images of 8 to 32 pixels."""
    layers, before = [], channels
    norms = {"none": [], "layer": [lambda count: nn.GroupNorm(1, count)], "batch": [nn.BatchNorm2d]}[norm]
    for stride in (1, 2) if size < 16 else (1, 2, 2):
        after, size = width if stride == 1 else before * 2, -(-size // stride)
        for wide, step in (before, stride), (after, 1):
            layers += [convolution(wide, after, 3, step, True), *(make(after) for make in norms), nn.SiLU()]
        before = after
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(before * size**2, 128), nn.SiLU()), 128

MODELS = {**{f"WideResNet{name}": (wide_resnet, *map(int, name.split("x")))
             for name in "28x2 28x10 28x20 34x10 34x20 40x10 70x16".split()},
    "ResNet50ImageNet": (resnet50, 64), "WideResNet50x2ImageNet": (resnet50, 128), "SmallNet": (small_net,),
    "WideResNet50x4ImageNet": (resnet50, 256), "convnext_tiny": (convnext, 9, 96), "convnext_small": (convnext, 27, 96),
    "convnext_base": (convnext, 27, 128), "convnext_large": (convnext, 27, 192)}

class EnergyClassifier(nn.Module):
    """Logits (B, K) of images (B, C, H, W) in [0, 1]; the energy of an image is -logsumexp of them, or -one of them.
    Normalises its input itself: attack radii are in units of pixels. ValueError where it does not take such images."""
    def __init__(self, args: Namespace, data: Data, dtype: torch.dtype, device_type: str):
        super().__init__()
        (make, *settings), channels, size = MODELS[args.model_type], data.channels, data.size
        if make is not small_net and channels != 3 or size < 8:
            raise ValueError(f"--model.model_type {args.model_type} does not take {channels} x {size} x {size} images: "
                             "expected 3 channels (SmallNet: any) and 8 pixels or more a side")
        more = {small_net: (channels, size, args.width, args.norm), convnext: (args.use_convstem,)}.get(make, ())
        self.body, features = make(*settings, *more)
        self.head, self.frozen = nn.Linear(features, data.classes), False
        self.dtype, self.device_type = dtype, device_type
        values = NORMALISATION["grey" if channels == 1 else "CIFAR" if size <= 64 else "ImageNet"]
        for name, value in zip(("mean", "std") if args.normalize_input else (), values, strict=False):
            self.register_buffer(name, torch.tensor(value)[None, :, None, None])
        for layer in (module for module in self.modules() if isinstance(module, nn.Conv2d)):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.head.bias)
    def forward(self, x: Tensor, exact: bool = False) -> Tensor:
        """Logits, in float32 from the features on (16 bits make ties of them); `exact`: the features in it, too."""
        with torch.autocast(self.device_type, self.dtype, enabled=self.dtype != torch.float32 and not exact):
            features = self.body((x - self.mean) / self.std if hasattr(self, "mean") else x)
        return self.head(features.float())
    def train(self, mode: bool = True) -> EnergyClassifier:
        """Frozen batch normalisation stays in evaluation mode; its weights are trained all the same."""
        super().train(mode)
        for norm in (m for m in self.modules() if self.frozen and isinstance(m, nn.BatchNorm2d)):
            norm.eval()
        return self

def float_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and floating-point buffers (running statistics too), which is what is averaged."""
    return {name: t for name, t in model.state_dict().items() if t.is_floating_point()}

def read_weights(path: str) -> dict[str, Tensor]:
    """Weights of a file of ours (the averaged ones, where it has them), of the original or a bare state_dict, from
    DataParallel, DDP, torch.compile or an averaged model. Raises ValueError where it holds none."""
    state, keys = load_checkpoint(path), ("ema", "model", "ema_state_dict", "model_state_dict", "state_dict")
    state = next((state[key] for key in keys if isinstance(state.get(key), dict) and state[key]), state)
    wrappers = re.compile(r"^((module|_orig_mod|base_model)\.)+")
    found = {wrappers.sub("", n): t for n, t in state.items() if isinstance(t, Tensor) and not n.endswith("n_averaged")}
    if not found:
        raise ValueError(f"{path}: no weights there; expected a checkpoint or a state_dict")
    return found

@torch.no_grad()
def update_ema(average: list[Tensor], parameters: list[Tensor], decay: float, step: int) -> None:
    """average = d * average + (1 - d) * parameters, d = min(decay, (1 + step) / (10 + step)), in a few kernels."""
    torch._foreach_lerp_(average, parameters, 1.0 - min(decay, (1 + step) / (10 + step)))

# ---- Loss ----------------------------------------------------------------------------------------

@contextlib.contextmanager
def frozen(model: nn.Module, weights: dict[str, Tensor] | None = None) -> Iterator[None]:
    """The model in evaluation mode, its parameters without gradient, so that an attack neither keeps nor computes
    anything for them; with `weights` (of `float_tensors`), these in place of its own. Afterwards all is as it was."""
    plan = [(m, "training", False) for m in model.modules()] + [(p, "requires_grad", False) for p in model.parameters()]
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()) if weights else ():
        plan += [(tensor, "data", weights[name])] if name in weights else []
    before = [(thing, name, getattr(thing, name)) for thing, name, _ in plan]
    try:
        for state in plan:
            setattr(*state)
        yield
    finally:
        for state in before:
            setattr(*state)

def into_ball(x: Tensor, centre: Tensor, eps: float, norm: str) -> Tensor:
    """The nearest points to x (B, C, H, W) in the balls about `centre`, then in [0, 1], as the centre is: in both."""
    if eps < math.inf:
        move = x - centre
        x = centre + (move.clamp(-eps, eps) if norm == "Linf" else move * (
            eps / torch.linalg.vector_norm(move, dim=(1, 2, 3), keepdim=True).clamp(min=eps)))
    return x.clamp(0, 1)

def pgd(net: Callable, x: Tensor, gain: Callable, steps: int, size: float, eps: float, norm: str,
        start: Tensor | None = None, score: Callable | None = None, decay: bool = False) -> Tensor:
    """Points (B, C, H, W) in the balls of radius `eps` about x, in [0, 1], to which `steps` steps up the gradient of
    gain(logits) (B,) lead from `start` (x). With `score` (logits -> (B,)) the iterate of the highest score is returned,
    else the last; with `decay` steps shrink to 0 along a cosine. Madry et al. 2018. Call it in `frozen`."""
    z, best, highest = (x if start is None else start).detach(), x, -math.inf
    for step in range(steps + (score is not None)):
        logits = net(z.requires_grad_(step < steps))
        if score is not None:
            found = score(logits.detach())
            best = torch.where((found > highest)[:, None, None, None], z.detach(), best)
            highest = torch.where(found > highest, found, highest)
        if step == steps:
            return best
        # the factor keeps gradients of fp16 above underflow; as the step has a fixed length it changes nothing
        gradient, = torch.autograd.grad(gain(logits).sum() * 1024, z)
        gradient = gradient.float().nan_to_num(0.0, 0.0, 0.0)  # and where it makes them overflow, no step
        if norm == "L2":  # relative to the largest entry: one of 1e-30 is as good as any, only 0 gives no step
            gradient = gradient / gradient.abs().amax((1, 2, 3), keepdim=True).clamp(min=1e-38)
            gradient = gradient / torch.linalg.vector_norm(gradient, dim=(1, 2, 3), keepdim=True).clamp(min=1e-6)
        rate = size * (0.5 + 0.5 * math.cos(math.pi * step / steps)) if decay else size
        z = into_ball(z.detach() + rate * (gradient.sign() if norm == "Linf" else gradient), x, eps, norm)
    return z

def random_start(x: Tensor, eps: float, norm: str, draws: Tensor) -> Tensor:
    """A random point of each ball: uniform (Linf), or any length and direction (L2); draws (B, 1 + CHW) in [0, 1)."""
    move = (2 * draws[:, 1:] - 1).reshape(x.shape)
    if norm == "L2":
        move = torch.erfinv(move.clamp(-0.999999, 0.999999))
        move = move / torch.linalg.vector_norm(move, dim=(1, 2, 3), keepdim=True) * draws[:, 0][:, None, None, None]
    return into_ball(x + eps * move, x, eps, norm)

losses = nn.CrossEntropyLoss(reduction="none")  # logits (B, K), labels (B,) -> (B,)

def picked(logits: Tensor, labels: Tensor) -> Tensor:
    """The logit (B,) of each label."""
    return logits.gather(1, labels[:, None])[:, 0]

def margin(logits: Tensor, labels: Tensor) -> Tensor:
    """(B,) best wrong logit minus the right one: above 0 the image is misclassified."""
    return logits.scatter(1, labels[:, None], -math.inf).amax(1) - picked(logits, labels)

def pooled_auc(real: Tensor, fake: Tensor) -> Tensor:
    """Probability that a score of real (n,) is above one of fake (m,), ties half: the area under the ROC curve."""
    order = fake.sort().values
    below, upto = torch.searchsorted(order, real), torch.searchsorted(order, real, right=True)
    return (below + upto).double().mean() / (2 * len(fake))

def squared_gradient(model: EnergyClassifier, x: Tensor, energy: Callable) -> Tensor:
    """R1 (B,): half the squared norm of the energy's gradient at x, in float32, for backward."""
    x = x.detach().requires_grad_(True)
    gradient, = torch.autograd.grad(energy(model(x, exact=True)).sum(), x, create_graph=True)
    return 0.5 * gradient.square().sum((1, 2, 3))

# Images x (B, C, H, W) with labels y and numbers ids, in `places` of the global batch, to classify; where the
# attack on them starts (or None); in stage 2 as many real images and labels, and OOD images.
Micro = collections.namedtuple("Micro", "places ids x y start real real_y outside")

def attacked(task: Task, x: Tensor, gain: Callable, *settings) -> Tensor:
    """What `pgd` makes of x in training: the model stays as it is, and the time is taken."""
    with frozen(task.model), task.clock("attack"):
        return pgd(task.net, x, gain, *settings)

def likeness(marginal: bool, labels: Tensor) -> Callable:
    """How real images with these labels look to the network, by its logits: logsumexp (of whatever class), or f_y."""
    return (lambda logits: logits.logsumexp(1)) if marginal else (lambda logits: picked(logits, labels))

def energy_passes(task: Task, model: nn.Module, micro: Micro, steps: int, backward: Callable) -> dict[str, Tensor]:
    """Loss between real images and OOD images attacked for `steps` steps, half of it each, and R1: two backward passes,
    so that one graph is alive at a time. Returns per-image values (B,) and the scores of the AUC."""
    args, real, y, found = task.args, micro.real, micro.real_y, {"bce": 0.0}
    energy, gain = likeness(args.logsumexp, y), likeness(args.logsumexp_sampling, y)
    fake = attacked(task, micro.outside, gain, steps, args.attack_step_size, args.attack_eps, args.attack_norm)
    if args.indist_perturb:
        real = attacked(task, real, lambda logits: -picked(logits, y), args.indist_perturb_steps,
                        args.clf_attack_step_size, args.indist_perturb_eps, args.clf_attack_norm)
    for name, x, sign in ("real", real, -1), ("fake", fake, 1):
        logits = model(x)
        bce = 0.5 * F.softplus(sign * energy(logits))
        loss, found["bce"], found[name] = args.bce_weight * bce, found["bce"] + bce.detach(), gain(logits.detach())
        if name == "real" and (args.r1reg or args.track_r1):
            r1 = squared_gradient(task.model, micro.real, energy)
            loss, found["r1"] = loss + args.r1reg * r1 if args.r1reg else loss, r1.detach()
        backward(loss)
    length = torch.linalg.vector_norm(fake - micro.outside, dim=(1, 2, 3)) / (max(steps, 1) * args.attack_step_size)
    return {**found, "l2_dist_relative": length}

# ===== shared DDP block: begin (identical in every script; tests/test_shared_block.py) =====
class ArgumentParser(argparse.ArgumentParser):
    """argparse with one-line errors (exit status 2) that name the nearest known option."""
    source = ""  # "FILE: " while a --config file is being read
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {self.source}{message}\n")
    def unknown(self, key: str) -> NoReturn:
        known, last = [option.lstrip("-") for option in self._option_string_actions], key.rpartition(".")[2]
        near = difflib.get_close_matches(key, known, 1, 0.8) + difflib.get_close_matches(last, known, 1, 0.5)
        self.error(f"unknown option {key!r}; " + (f"the nearest known one is {near[0]!r}" if near else "see --help"))

def boolean(text: str) -> bool:
    """True, yes, on, 1 or False, no, off, 0, in any case (argparse's type=bool takes 'False' for True)."""
    if (value := str(text).lower()) not in ("true", "yes", "on", "1", "false", "no", "off", "0"):
        raise argparse.ArgumentTypeError(f"{text!r} is not one of True, False, yes, no, 1, 0")
    return value in ("true", "yes", "on", "1")

LAUNCHERS = {"torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),  # and the others' names for these
             "Open MPI": tuple(f"OMPI_COMM_WORLD_{n}" for n in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
             "Hydra": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
             "PALS": ("PALS_RANKID", "WORLD_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
             "SLURM": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")}
# Who this process is among the ranks (numbers), where its tensors live (torch.device), and by what it was started.
DDPContext = collections.namedtuple("DDPContext", "rank world_size local_rank local_world_size device backend launcher")
LOGGER = logging.getLogger("ddp")
log_all, warn = LOGGER.info, LOGGER.warning  # from any rank; log0: from rank 0 alone
FLAG = {"type": boolean, "nargs": "?", "const": True, "default": False, "metavar": "BOOL"}  # --name or --name=False

def add_ddp_arguments(parser: ArgumentParser, output_dir: str, wandb_project: str) -> None:
    """The options that every script has: batch and step, checkpoints, logging, runtime."""
    g = parser.add_argument_group("Step").add_argument
    g("--global_batch_size", type=int, help="samples per optimizer step, on any number of GPUs (sets --accumulation)")
    g("--accumulation", type=int, default=1, help="micro-batches per optimizer step")
    g("--lr_scaling", default="none", choices=("none", "linear", "sqrt", "conservative"), help="by the number of ranks")
    g("--max_grad_norm", type=float, default=1.0, help="clip the gradient's norm (0 = no clipping)")
    g("--max_bad_steps", type=int, default=10, help="non-finite steps in a row that end the run")
    g("--precision", default="auto", choices=("auto", "fp32", "bf16", "fp16"), help="auto: bf16 where the GPU has it")
    g("--compile", help="torch.compile the model", **FLAG)
    g("--seed", type=int, default=42, help="one seed for initialisation, split, order and noise")
    g = parser.add_argument_group("Checkpoints").add_argument
    g("--output_dir", default=output_dir, help="checkpoints, metrics, summary; a run found there is resumed")
    g("--fresh", help="start anew; a run in --output_dir is moved aside", **FLAG)
    g("--save_every", type=int, default=500, help="optimizer steps between checkpoints")
    g("--keep_checkpoints", type=int, default=2, help="checkpoints to keep beside best.pt")
    g("--max_minutes", type=float, default=0.0, help="write a checkpoint and stop after so long (0 = no limit)")
    g = parser.add_argument_group("Logging").add_argument
    g("--log_every", type=int, default=10, help="optimizer steps between log lines")
    g("--wandb_mode", default="auto", choices=("auto", "online", "offline", "disabled"), help="auto: online with a key")
    g("--wandb_project", default=wandb_project, help="wandb project")
    g("--wandb_name", help="wandb run name")
    g = parser.add_argument_group("Runtime").add_argument
    g("--config", help="YAML or JSON file of defaults; the command line wins")
    g("--nproc", type=int, default=0, help="start so many processes on this machine (plain python only)")
    g("--device", default="auto", choices=("auto", "cuda", "xpu", "cpu"), help="auto: the accelerator if there is one")
    g("--backend", default="auto", choices=("auto", "nccl", "gloo", "xccl", "ccl", "xpu"), help="auto: by device")
    g("--ddp_timeout_minutes", type=float, help="limit of a collective [default: NCCL_TIMEOUT seconds, else 30]")
    g("--local_rank", type=int, help="set by torch.distributed.launch")

def split_tokens(parser: ArgumentParser, argv: list[str]) -> list[str]:
    """A command line with `key=value`, `--key value` and `--key-with-hyphens` brought to `--key=value`."""
    options, tokens, wants_value = parser._option_string_actions, [], False
    for token in argv:
        key, equals, value = token.partition("=")
        if token.startswith("--") or (equals and not wants_value and re.fullmatch(r"[A-Za-z_][\w.]*", key)):
            key = "--" + key.removeprefix("--").replace("-", "_")
            if key not in options:
                parser.unknown(key[2:])
            token, wants_value = key + equals + value, not equals and options[key].nargs is None
        elif wants_value:
            token, wants_value = f"{tokens.pop()}={token}", False
        tokens.append(token)
    return tokens

def read_config(parser: ArgumentParser, path: str) -> list[str]:
    """A YAML or JSON file as tokens. In a section training: training.batch_size, or batch_size of its --help group."""
    import yaml
    options, tokens, parser.source = parser._option_string_actions, [], f"{path}: "
    try:
        tree = (json.loads if path.endswith(".json") else yaml.safe_load)(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        parser.error(" ".join(str(error).split()))
    if not isinstance(tree, dict):
        parser.error(f"holds {type(tree).__name__}, not a mapping of option names to values")
    groups = {(group.title or "").lower(): group._group_actions for group in parser._action_groups}
    def walk(node: dict, prefix: str, inside: list) -> None:
        for key, value in node.items():
            name = f"--{key}" if options.get(f"--{key}") in inside else f"--{prefix}{key}"
            if name not in options and isinstance(value, dict):
                walk(value, f"{prefix}{key}.", groups.get(str(key).lower(), []))
            elif name not in options:
                parser.unknown(f"{prefix}{key}")
            elif value is not None:
                value = ",".join(map(str, value)) if isinstance(value, list) else value
                tokens.append(f"{name}={json.dumps(value) if isinstance(value, dict) else value}")
    walk(tree, "", [])
    parser.parse_args(tokens)  # wrong values are errors of the file, too
    parser.source = ""
    return tokens

def parse_arguments(parser: ArgumentParser, argv: list[str] | None = None) -> argparse.Namespace:
    """The command line over a --config file over the defaults. `args.given`: names of what the user set."""
    tokens = split_tokens(parser, sys.argv[1:] if argv is None else argv)
    if configs := [token.partition("=")[2] for token in tokens if token.startswith("--config=")]:
        tokens = read_config(parser, configs[-1]) + tokens
    args, options = parser.parse_args(tokens), parser._option_string_actions
    args.given = sorted({options[name].dest for token in tokens if (name := token.partition("=")[0]) in options})
    for name in ("accumulation", "save_every", "log_every", "keep_checkpoints", "max_bad_steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)} must be at least 1")
    if args.global_batch_size is not None and (args.global_batch_size < 1 or "accumulation" in args.given):
        parser.error(f"--global_batch_size {args.global_batch_size}: above 0; it or --accumulation, one of the two")
    if args.global_batch_size and "lr_scaling" in args.given and args.lr_scaling != "none":
        parser.error(f"--lr_scaling {args.lr_scaling}: the fixed --global_batch_size does not grow with the ranks")
    args.changed = {n: getattr(args, n) for n in args.given if getattr(args, n) != parser.get_default(n)}
    return args

def find_ranks(env: dict[str, str], devices: int) -> tuple[int, int, int, int, str]:
    """(rank, world size, local rank, local world size, launcher); `devices`: processes that this node can take."""
    def number(name: str) -> int | None:
        if env.get(name) and not env[name].isdigit():
            raise ValueError(f"{name}={env[name]!r} is not a number")
        return int(env[name]) if env.get(name) else None
    for launcher, names in LAUNCHERS.items():
        rank, world, local, local_world = map(number, names)
        if rank is None:
            continue
        if launcher == "PALS" and world is None and (world := number("PMI_SIZE")) is None:
            with contextlib.suppress(ImportError, RuntimeError):  # no mpi4py; no MPI library for it
                from mpi4py import MPI
                world = MPI.COMM_WORLD.Get_size()
        if launcher == "Hydra" and local is None:  # PALS and srun --mpi=pmi2 set PMI_RANK beside their own variables
            local, local_world = map(number, LAUNCHERS["PALS" if env.get("PALS_LOCAL_RANKID") else "SLURM"][2:])
        if world is None:
            raise ValueError(f"{names[0]}={rank} is set but no world size is: export {names[1]}")
        if rank >= world:
            raise ValueError(f"{names[0]}={rank} is not below {names[1]}={world}")
        if local is None and world > devices:
            raise ValueError(f"{names[2]} is not set and {world} ranks do not fit {devices} places: export {names[2]}")
        local = rank if local is None else local
        return rank, world, local, local_world or min(world, max(devices, local + 1)), launcher
    return 0, 1, 0, 1, "python"

def find_master(env: dict[str, str], world_size: int, local_world_size: int) -> tuple[str, str]:
    """(MASTER_ADDR, MASTER_PORT): as set, else the job's first host, else this one if it holds all ranks."""
    job = re.match(r"\d*", env.get("SLURM_JOB_ID") or env.get("PBS_JOBID") or "").group()
    port = env.get("MASTER_PORT") or (str(20000 + int(job) % 20000) if job else "29500")
    if env.get("MASTER_ADDR"):
        return env["MASTER_ADDR"], port
    if env.get("SLURM_JOB_NODELIST"):  # "gpu[03-05,9]-ib,login1" -> "gpu03-ib"; split at commas in no bracket
        return re.sub(r"\[(\d+)[^\]]*\]", r"\1", re.split(r",(?![^\[]*\])", env["SLURM_JOB_NODELIST"])[0]), port
    if env.get("PBS_NODEFILE"):
        return Path(env["PBS_NODEFILE"]).read_text().split()[0], port
    if world_size > local_world_size:
        raise ValueError(f"{world_size} ranks on several nodes and MASTER_ADDR is not set: export the first one's")
    return "localhost", port

def choose_device(name: str, local_rank: int) -> torch.device:
    """The accelerator number `local_rank` (0 where the launcher shows each rank one), or the CPU."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "cpu" or (name == "auto" and (found is None or found.type not in ("cuda", "xpu"))):
        return torch.device("cpu")
    if found is None or name not in ("auto", found.type):
        raise ValueError(f"--device {name}: this machine shows {found.type if found else 'no accelerator'}")
    if 1 < (count := torch.accelerator.device_count()) <= local_rank:
        raise ValueError(f"local rank {local_rank} has no device: {count} are visible: start at most {count} per node")
    torch.accelerator.set_device_index(index := local_rank if count > 1 else 0)
    return torch.device(found.type, index)

def choose_backend(name: str, device: torch.device) -> str:
    """The process group's backend for `device`. Raises ValueError if `name` cannot serve it."""
    if (serves := {"nccl": "cuda", "xccl": "xpu", "ccl": "xpu", "xpu": "xpu"}.get(name, device.type)) != device.type:
        raise ValueError(f"--backend {name} serves {serves} devices, the device is {device.type}: use --backend auto")
    if name == "gloo" or device.type == "cpu":
        return "gloo"
    if device.type == "cuda" and not dist.is_nccl_available():
        raise ValueError("this torch was built without NCCL: use --backend gloo")
    if device.type == "cuda" or dist.is_xccl_available():
        return "nccl" if device.type == "cuda" else "xccl"
    with contextlib.suppress(ImportError):
        importlib.import_module("oneccl_bindings_for_pytorch")  # registers the backend "ccl"
        return "ccl"
    warn("no xccl in this torch and no oneCCL bindings: falling back to gloo, which is slow")
    return "gloo"

def setup_ddp(args: argparse.Namespace) -> DDPContext:
    """Find this process's rank and device, start its log, signals and the process group. (all ranks)"""
    env = ({} if args.local_rank is None else {"LOCAL_RANK": str(args.local_rank)}) | os.environ
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    devices = 0 if args.device == "cpu" or not torch.accelerator.is_available() else torch.accelerator.device_count()
    rank, world_size, local_rank, local_world_size, launcher = find_ranks(env, devices or max(cores, 16))
    launcher = "--nproc" if getattr(args, "nproc", 0) > 1 else launcher
    start_logging(rank)
    device = choose_device(args.device, local_rank)
    backend = choose_backend(args.backend, device)
    if "OMP_NUM_THREADS" not in env:
        torch.set_num_threads(max(1, cores // local_world_size))
    log_all(f"Process {rank}/{world_size} started")
    if world_size > 1:
        address, port = find_master(env, world_size, local_world_size)
        os.environ.update(MASTER_ADDR=address, MASTER_PORT=port)  # unchanged where they were set
        limit = timedelta(minutes=args.ddp_timeout_minutes or float(env.get("NCCL_TIMEOUT") or 1800) / 60)
        ids = {"rank": rank, "world_size": world_size, "device_id": None if device.type == "cpu" else device}
        try:
            dist.init_process_group(backend, timeout=limit, **ids)
        except dist.DistNetworkError as error:
            advice = f"rank {rank} cannot reach rank 0 at {address}:{port}: check MASTER_ADDR, MASTER_PORT, firewall"
            busy = f"port {port} is already in use on {address}: export MASTER_PORT, or use torchrun --standalone"
            raise RuntimeError(busy if "EADDRINUSE" in str(error) else advice) from error
        log_all(f"Initialized DDP: rank={rank}, world_size={world_size}, local_rank={local_rank}")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):  # not before: no handler runs while init waits
        signal.signal(number, StepGuard.on_signal)
    log_all(f"Using device: {device}")
    return DDPContext(rank, world_size, local_rank, local_world_size, device, backend, launcher)

def cleanup() -> None:  # destroy the process group, once main has returned
    gc.collect()  # while a tensor or the DDP object is alive, gloo's threads abort one good exit in four
    if dist.is_initialized():
        dist.destroy_process_group()

def launch(main: Callable[[argparse.Namespace], int], args: argparse.Namespace, spawned: bool = False) -> int:
    """Run `main(args)` as this rank, or in --nproc new processes (`spawned`: one of them); returns the exit status."""
    try:
        if tuple(int(p) for p in torch.__version__.split(".")[:2]) < (2, 10):
            raise ValueError(f"torch {torch.__version__} is too old: these scripts need torch 2.10 or newer")
        if args.nproc and not spawned:
            _, world_size, _, _, launcher = find_ranks(dict(os.environ), sys.maxsize)
            if world_size > 1 or launcher == "torchrun":
                raise ValueError(f"--nproc {args.nproc}: {launcher} has already started {world_size} ranks: drop it")
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if args.nproc > 1 and not spawned:
        return start_processes(main, args)
    try:
        return record(main)(args)
    except Exception:  # whatever it is: said with its rank and traceback, and a status of 1
        LOGGER.error("failed on rank %s\n%s", os.environ.get("RANK", "0"), traceback.format_exc())
        if dist.is_initialized():  # peers may be gone: no waiting for them in destroy or at exit
            sys.stdout.flush()
            os._exit(1)
        return 1
    finally:
        cleanup()

def start_processes(main: Callable, args: argparse.Namespace) -> int:
    """Start --nproc ranks of `main` on this machine; passes signals on to them and their exit status back."""
    with socket.create_server(("localhost", 0)) as probe:
        os.environ.update({"MASTER_PORT": str(probe.getsockname()[1])} | os.environ | {"MASTER_ADDR": "localhost"})
    context = torch.multiprocessing.spawn(run_process, (main, args), nprocs=args.nproc, join=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda n, _: [os.kill(p.pid, n) for p in context.processes if p.is_alive()])
    try:
        while not context.join(grace_period=5):
            continue
    except torch.multiprocessing.ProcessExitedException as error:
        return error.exit_code if error.exit_code > 0 else 128 - error.exit_code
    return 0

def run_process(local_rank: int, main: Callable, args: argparse.Namespace) -> None:  # of start_processes
    os.environ.update(zip(LAUNCHERS["torchrun"], 2 * (str(local_rank), str(args.nproc)), strict=True))
    sys.exit(launch(main, args, spawned=True))

def start_logging(rank: int) -> None:
    """`[RANK 0] 2025-01-15 14:23:45 INFO: text` on standard output, from this rank."""
    line = logging.Formatter(f"[RANK {rank}] %(asctime)s %(levelname)s: %(message)s", "%Y-%m-%d %H:%M:%S")
    LOGGER.handlers, LOGGER.propagate, LOGGER.rank = [logging.StreamHandler(sys.stdout)], False, rank
    LOGGER.handlers[0].setFormatter(line)
    LOGGER.setLevel(logging.INFO)

def log0(text: str) -> None:  # (rank 0 only)
    if getattr(LOGGER, "rank", 0) == 0:
        LOGGER.info(text)

def reduce_sums(ddp: DDPContext, sums: dict[str, float | torch.Tensor]) -> dict[str, float]:
    """Sums over all ranks in float64, in one collective and one host sync. (all ranks, same keys)"""
    packed = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=ddp.device).squeeze() for v in sums.values()])
    if ddp.world_size > 1:
        dist.all_reduce(packed)
    return dict(zip(sums, packed.tolist(), strict=True))

def barrier(ddp: DDPContext) -> None:  # (all ranks)
    reduce_sums(ddp, {"ranks": 1.0})  # dist.barrier() would choose a device of its own on NCCL

def on_rank0(ddp: DDPContext, function: Callable, *args):
    """`function(*args)` on rank 0; its result, or an error if it raised, on every rank: nobody waits. (all ranks)"""
    outcome, error, StepGuard.beat = [None, None], None, math.inf  # however long rank 0 takes
    try:
        outcome[0] = function(*args) if ddp.rank == 0 else None
    except Exception as caught:
        error, outcome[1] = caught, f"{type(caught).__name__}: {caught}"
    if ddp.world_size > 1:
        dist.broadcast_object_list(outcome, src=0, device=ddp.device)
    StepGuard.beat = time.monotonic()
    if outcome[1] is not None:
        raise error or RuntimeError(f"rank 0 failed in {function.__name__}: {outcome[1]}")
    return outcome[0]

def require_same(ddp: DDPContext, what: str, value: bytes) -> None:
    """Raises RuntimeError on all ranks if `value` differs between ranks. (all ranks)"""
    digest = hashlib.sha256(value).digest()
    if reduce_sums(ddp, {"other": float(on_rank0(ddp, lambda: digest) != digest)})["other"]:
        raise RuntimeError(f"the ranks disagree on {what}: do all nodes see the same files and versions?")

def keyed_uniform(seed: int, epoch: int, ids: torch.Tensor, draws: int, stream: int = 0) -> torch.Tensor:
    """ids (B,) int64 -> (B, draws) float32 in [0, 1) by seed, epoch, id, draw alone: SplitMix64 (Steele et al. 2014)"""
    def mix(x: torch.Tensor) -> torch.Tensor:  # int64 wraps; the masks make the shifts logical
        x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
        x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
        return x ^ ((x >> 31) & 0x1FFFFFFFF)
    golden, state = -0x61C8864680B583EB, torch.zeros((), dtype=torch.int64, device=ids.device)
    for part in (seed, epoch, stream):
        state = mix(state * golden + part + 1)
    rows = mix(mix(ids.long() + state) * golden + 1)[:, None]
    return ((mix(rows + torch.arange(1, draws + 1, device=ids.device) * golden) >> 40) & 0xFFFFFF).float() / 2**24

def resolve_batch(args: argparse.Namespace, world_size: int, kept: int | None = None) -> tuple[int, int]:
    """(global batch, micro-batches per step). `kept`: the resumed run's global batch, which stays on any world size."""
    cell = world_size * args.batch_size
    if kept and args.global_batch_size not in (None, kept):
        raise ValueError(f"--global_batch_size {args.global_batch_size}: this run was started with {kept}")
    total = kept or args.global_batch_size or cell * args.accumulation
    if total % cell and not kept:
        raise ValueError(f"--global_batch_size {total} is not a multiple of {world_size} ranks x --batch_size "
                         f"{args.batch_size} = {cell}")
    micro = total / world_size / (accumulation := -(-total // cell))
    log0(f"Batch size per GPU: {args.batch_size}, Total batch size: {total}")
    log0(f"global batch {total} = {world_size} ranks x {micro:g} x {accumulation} accumulation")
    return total, accumulation

def scaled_lr(lr: float, rule: str, world_size: int) -> float:
    """--lr_scaling of the rate to `world_size` ranks (linear: Goyal et al. 2017; sqrt: Krizhevsky 2014)."""
    factor = {"none": 1, "linear": world_size, "sqrt": world_size**0.5, "conservative": min(world_size, 6)}[rule]
    if factor != 1:
        log0(f"learning rate {lr:g} x {factor:g} ({rule} scaling, {world_size} ranks) = {lr * factor:g}")
    return lr * factor

def lr_at(step: int, total: int, warmup: int, schedule: str) -> float:
    """Factor on the rate at 0-based `step`: warm-up from above zero, then constant or decaying to zero at `total`."""
    done = (step - warmup) / max(1, total - warmup)
    decay = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 + 0.5 * math.cos(math.pi * done)}[schedule]
    return (step + 1) / (warmup + 1) if step < warmup else decay

class GlobalBatchSampler(DistributedSampler):
    """The items, shuffled by (seed, epoch) alone, cut into global batches (what is left over waits for another epoch),
    dealt round-robin to the ranks, cut into micro_steps. Yields this rank's micro-batches (int64 ids) from `start` on.
    `cut(ids, epoch)` may regroup the items of `window` batches into as many: length buckets, token or node budgets."""
    def __init__(self, n: int, global_batch: int, micro_steps: int, seed: int, ddp: DDPContext, window: int = 1,
                 cut: Callable | None = None):
        super().__init__(range(n), ddp.world_size, ddp.rank, shuffle=True, seed=seed, drop_last=True)
        if n < global_batch or global_batch < ddp.world_size * micro_steps:
            raise ValueError(f"{n} samples, global batch {global_batch}, {ddp.world_size} ranks x {micro_steps} "
                             "micro-batches: each must be at least the next")
        self.n, self.global_batch, self.micro_steps, self.start = n, global_batch, micro_steps, 0
        self.window, self.cut = window, cut or (lambda ids, epoch: ids.reshape(-1, global_batch))
    def __len__(self) -> int:  # micro-batches left in the epoch
        return max(0, self.n // self.global_batch - self.start) * self.micro_steps
    def set_epoch(self, epoch: int, start: int = 0) -> None:
        self.epoch, self.start = epoch, start
    def permuted(self, positions: np.ndarray) -> np.ndarray:
        """Items at `positions` of the shuffle, by a Feistel network (randperm: 2 s, 480 MB a rank for 60 M items)."""
        half = max(1, ((self.n - 1).bit_length() + 1) // 2)
        mask, keys = (1 << half) - 1, np.random.SeedSequence([self.seed, self.epoch]).generate_state(8, np.uint64)
        items, walk = positions.astype(np.uint64), np.ones(len(positions), bool)
        while walk.any():
            left, right = items[walk] >> np.uint64(half), items[walk] & np.uint64(mask)
            for key in keys:
                mixed = (right + key) * np.uint64(0x9E3779B97F4A7C15)
                mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
                left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(32))) & np.uint64(mask))
            items[walk] = (left << np.uint64(half)) | right
            walk = items >= self.n  # cycle walking (Black and Rogaway 2002)
        return items.astype(np.int64)
    def batches(self, start: int = 0) -> Iterator[np.ndarray]:
        """Global batches of the epoch from number `start` on. (the same on all ranks)"""
        end, stride = self.n // self.global_batch * self.global_batch, self.window * self.global_batch
        windows = (np.arange(low, min(low + stride, end)) for low in range(start // self.window * stride, end, stride))
        batches = (batch for window in windows for batch in self.cut(self.permuted(window), self.epoch))
        return itertools.islice(batches, start % self.window, None)  # its first window holds batch `start`
    def deal(self, batch: np.ndarray, rank: int | None = None) -> list[np.ndarray]:
        """The micro-batches of a rank (this one) in a global batch; neighbours of a sorted batch stay together."""
        mine = batch[self.rank if rank is None else rank :: self.num_replicas]
        ends = [len(mine) * micro // self.micro_steps for micro in range(self.micro_steps + 1)]
        return [mine[a:b] for a, b in itertools.pairwise(ends)]
    def __iter__(self) -> Iterator[np.ndarray]:
        return itertools.chain.from_iterable(map(self.deal, self.batches(self.start)))
    def fingerprint(self) -> bytes:
        """Hash of the plan's inputs and of its first and last 1,000 batches, for require_same."""
        digest = hashlib.sha256(repr((self.n, self.global_batch, self.seed, self.epoch)).encode())
        for start in {0, max(0, self.n // self.global_batch - 1000)}:
            for batch in itertools.islice(self.batches(start), 1000):
                digest.update(batch.tobytes())
        return digest.digest()

def wrap_ddp(model: torch.nn.Module, ddp: DDPContext) -> torch.nn.Module:
    """DistributedDataParallel; the model itself in a world of one. Every parameter must get a gradient."""
    if ddp.world_size == 1:
        return model
    ids = None if ddp.device.type == "cpu" else [ddp.device.index]
    wrapped = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)  # saves a copy
    wrapped.broadcast_buffers = False  # evaluation uses the unwrapped model; the argument warns from torch 2.13 on
    # the first backward pass fixes the order of 3 ranks' sums: one of zeros, so that a resume does not change it
    zero, wrapped.module = sum((p * 0).sum() for p in model.parameters() if p.requires_grad), torch.nn.Identity()
    wrapped(zero).backward()
    wrapped.module = model
    wrapped.zero_grad(set_to_none=True)
    return wrapped

def unwrap(model: torch.nn.Module) -> torch.nn.Module:  # without DDP's and torch.compile's wrappers
    while isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, DistributedDataParallel) else model._orig_mod
    return model

def sync_gradients(model: torch.nn.Module, last: bool):
    """Context for a micro-batch's forward and backward: gradients are all-reduced in the last one only."""
    wrapped = getattr(model, "_orig_mod", model)
    return contextlib.nullcontext() if last or not isinstance(wrapped, DistributedDataParallel) else wrapped.no_sync()

def resolve_precision(name: str, device: torch.device) -> torch.dtype:  # of --precision
    if name == "fp16" and device.type == "cpu":
        raise ValueError("--precision fp16 is many times slower than fp32 on a CPU: use bf16 or fp32")
    has_bf16 = device.type == "xpu" or device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    auto = torch.bfloat16 if has_bf16 else torch.float32
    return {"auto": auto, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]

class StepGuard:
    """The end of an optimizer step, and what all ranks agree on there: non-finite numbers, signals, the time limit."""
    signal, beat = 0, 0.0  # of this process: the signal it got, and when it last showed that it is not stuck
    def __init__(self, args: argparse.Namespace, ddp: DDPContext, optimizer: torch.optim.Optimizer,
                 dtype: torch.dtype, started: float):
        self.ddp, self.optimizer, self.max_norm = ddp, optimizer, args.max_grad_norm or math.inf
        self.scaler = torch.amp.GradScaler(ddp.device.type, enabled=dtype == torch.float16)
        if not self.scaler.is_enabled() and not optimizer.defaults.get("fused"):
            raise ValueError(f"{type(optimizer).__name__} needs fused=True, or it cannot skip a non-finite update")
        self.deadline = started + 60 * args.max_minutes if args.max_minutes else math.inf
        self.max_bad, self.bad_in_row, self.bad_steps = args.max_bad_steps, 0, 0
        self.pending, self.event, self.recent = None, None, collections.deque(maxlen=min(3, args.max_bad_steps))
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
    @classmethod
    def on_signal(cls, number: int, _frame) -> None:
        """Ask for a stop at the next step; end a process stuck with a dead peer before the launcher's SIGKILL does."""
        def watch() -> None:
            while time.monotonic() - cls.beat < 20.0:
                time.sleep(0.5)
            os._exit(128 + number)
        if not cls.signal:
            cls.signal, cls.beat = number, time.monotonic()
            threading.Thread(target=watch, daemon=True).start()
    def step(self, loss: torch.Tensor, step: int, ids: list) -> tuple[torch.Tensor, str]:
        """Clip, update if all is finite, agree: (gradient norm, why to stop or ''). `ids`: of this rank. (all ranks)"""
        StepGuard.beat = now = time.monotonic()
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.max_norm, foreach=True)
        flags = torch.tensor([0.0, StepGuard.signal, now > self.deadline]).to(self.ddp.device, non_blocking=True)
        # under a scaler a gradient that overflows is routine: it skips by itself
        flags[0] = ~torch.isfinite(loss.detach() if self.scaler.is_enabled() else loss.detach() + norm)
        if self.ddp.world_size > 1:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        if not self.scaler.is_enabled():  # fused optimizers skip the update on the device where found_inf is 1
            self.optimizer.grad_scale, self.optimizer.found_inf = None, flags[0]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        reason = self.finish()  # of the step before: the device is still busy with this one
        self.pending = (step, ids, flags.to("cpu", non_blocking=True))
        self.event = None if self.ddp.device.type == "cpu" else torch.accelerator.current_stream().record_event()
        return norm, reason
    def finish(self) -> str:
        """Read the flags of the last step: why to stop, the same on all ranks; RuntimeError after max_bad_steps."""
        if self.pending is None:
            return ""
        if self.event is not None:
            self.event.synchronize()
        (step, ids, flags), self.pending = self.pending, None
        bad, number, late = flags.tolist()
        self.recent.append((step, ids))
        self.bad_in_row, self.bad_steps = self.bad_in_row + 1 if bad else 0, self.bad_steps + bool(bad)
        if bad and self.ddp.rank == 0:
            warn(f"non-finite loss or gradient at step {step}: the update was skipped on all ranks")
        if self.bad_in_row >= self.max_bad:
            samples = "; ".join(f"step {n}: {[int(i) for part in ids for i in part][:64]}" for n, ids in self.recent)
            raise RuntimeError(f"{self.bad_in_row} steps in a row with a non-finite loss or gradient; "
                               f"samples of this rank in the last ones: {samples}")
        return signal.Signals(int(number)).name if number else "time limit" if late else ""

def stop_status(reason: str) -> int:  # status and last line of a run that stopped early, its checkpoint written
    resumes = "requeue me" if reason == "SIGUSR1" else f"stopped by {reason}: the same command goes on from here"
    log0(f"checkpoint written, {resumes}")
    return {"SIGTERM": 143, "SIGINT": 130}.get(reason, 0)

def rng_states(ddp: DDPContext) -> list[dict]:  # random state of every rank, for a checkpoint (all ranks)
    state = {"cpu": torch.get_rng_state()}
    if ddp.device.type != "cpu":
        state[ddp.device.type] = torch.get_device_module(ddp.device).get_rng_state(ddp.device)
    states = [state] * ddp.world_size
    if ddp.world_size > 1:
        dist.all_gather_object(states, state)
    return states

def restore_rng(states: list[dict], ddp: DDPContext, seed: int) -> None:
    """This rank's random state; on another world size a new one from (seed, rank)."""
    torch.manual_seed(seed + ddp.rank)
    if len(states) == ddp.world_size:
        torch.set_rng_state(states[ddp.rank]["cpu"])
        if ddp.device.type in states[ddp.rank].keys() - {"cpu"}:
            torch.get_device_module(ddp.device).set_rng_state(states[ddp.rank][ddp.device.type], ddp.device)

def atomic_write(path: Path, write: Callable) -> bool:
    """`write(file)` to a temporary file, fsync, rename; False and a warning if that fails (disk full). (rank 0 only)"""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    StepGuard.beat = math.inf  # however long it takes
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        return True
    except (OSError, RuntimeError) as error:  # torch.save turns "no space left" into RuntimeError
        temporary.unlink(missing_ok=True)
        free = shutil.disk_usage(path.parent).free / 1e6
        warn(f"could not write {path} ({str(error).splitlines()[0]}; {free:.0f} MB free): the old file is untouched")
        return False
    finally:
        StepGuard.beat = time.monotonic()

def save_checkpoint(directory: str | Path, state: dict, step: int, keep: int, best: bool = False) -> bool:
    """step_*.pt (the `keep` newest stay), latest.pt and, if asked, best.pt, atomically. (rank 0 only)"""
    numbered = Path(directory) / f"step_{step:08d}.pt"
    if not atomic_write(numbered, lambda file: torch.save(state, file)):  # noqa: TID251
        return False
    for name in ("latest.pt", "best.pt") if best else ("latest.pt",):
        link = numbered.with_name(f".{name}.link")
        link.unlink(missing_ok=True)
        try:
            os.link(numbered, link)
        except OSError:  # a file system without hard links
            shutil.copy(numbered, link)
        link.replace(numbered.with_name(name))
    for old in sorted(numbered.parent.glob("step_*.pt"))[:-keep]:
        old.unlink()
    return True

def load_checkpoint(path: str | Path) -> dict:
    """A checkpoint, on the CPU, its model's names without `module.` and `_orig_mod.`. ValueError if it is damaged."""
    Path(path).stat()  # FileNotFoundError if it is not there
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load does not look at the checksums
            if damaged := archive.testzip():
                raise ValueError(f"checksum of {damaged} is wrong")
        state = torch.load(path, map_location="cpu", weights_only=True)  # noqa: TID251
    except Exception as error:
        first = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        raise ValueError(f"{path} is damaged or no checkpoint ({first})") from error
    return state | {"model": {re.sub(r"^(module\.|_orig_mod\.)+", "", k): v for k, v in state.get("model", {}).items()}}

def find_checkpoint(directory: Path) -> str | None:
    """The newest whole checkpoint of a run; damaged ones are named in warnings. (rank 0 only)"""
    files = sorted(directory.glob("step_*.pt")) + [*directory.glob("latest.pt")]
    for path in reversed(files):
        try:
            load_checkpoint(path)
            return str(path)
        except ValueError as error:
            warn(f"{error}: using the one before it")
    if files:
        raise ValueError(f"no whole checkpoint is left in {directory}: restore one, or give --fresh")

def open_run(args: argparse.Namespace, ddp: DDPContext, same: tuple[str, ...]) -> dict | None:
    """Prepare --output_dir; the checkpoint to resume from, if any: its arguments in `same` must be ours. (all ranks)"""
    folder = Path(args.output_dir)
    def prepare() -> str | None:
        if args.fresh and not restarts and folder.exists() and any(folder.iterdir()):  # torchrun's restarts go on
            aside = folder.rename(folder.with_name(f"{folder.name}.old-{time.strftime('%Y%m%d-%H%M%S')}"))
            log0(f"--fresh: the run in {folder} was moved to {aside}")
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise ValueError(f"--output_dir {folder} is not writable")
        for left in [*folder.glob(".*.tmp"), *folder.glob(".*.link")]:  # of a save that was killed
            left.unlink()
        return find_checkpoint(folder)
    restarts = reduce_sums(ddp, {"n": float(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))})["n"]  # nodes may differ
    if (path := on_rank0(ddp, prepare)) is None:
        return None
    state = load_checkpoint(path)
    for name in same:
        if (old := state["args"].get(name)) != (new := getattr(args, name)):
            raise ValueError(f"{folder} holds a run with {'data' if name == 'data_key' else '--' + name} {old!r}, this "
                             f"one has {new!r}: give another --output_dir, or --fresh to move the old run aside")
    log0(f"resuming {path}: step {state['step']}, epoch {state['epoch']}")
    return state

class RunLog:
    """metrics.jsonl, the log line, wandb, summary.json and curves.png of a run."""
    def __init__(self, args: argparse.Namespace, ddp: DDPContext, resumed: dict | None):
        self.args, self.ddp, self.folder, resumed = args, ddp, Path(args.output_dir), resumed or {}
        self.wandb_id, self.wall = resumed.get("wandb_id") or os.urandom(4).hex(), resumed.get("wall_s", 0.0)
        self.last_step, (self.final_loss, self.speed) = resumed.get("step", 0), resumed.get("speed", (None, None))
        self.started = time.monotonic()
        self.reset()
        log0(f"command: {' '.join(sys.argv)}")
        log0(f"torch {torch.__version__}, world size {ddp.world_size}, backend {ddp.backend}, started by "
             f"{ddp.launcher}, {torch.get_num_threads()} CPU threads per rank")
        changed = ", ".join(f"{n}={v}" for n, v in args.changed.items())
        log0(f"arguments that differ from the defaults: {changed or 'none'}")
        if ddp.rank == 0:
            path, self.queue, self.unwritten = self.folder / "metrics.jsonl", queue.SimpleQueue(), b""
            path.touch()  # and drop records of steps that this run makes again
            rows = [row for row in path.read_text().splitlines(True) if self.last_step and row.endswith("}\n")]
            rows = [row for row in rows if json.loads(row)["step"] <= self.last_step]
            atomic_write(path, lambda file: file.write("".join(rows).encode()))
            self.thread = threading.Thread(target=self.feed_wandb, daemon=True)
            self.thread.start()
    def feed_wandb(self) -> None:
        """wandb in a thread of its own: what it does wrong, or slowly, never reaches the training loop."""
        mode = self.args.wandb_mode
        if mode == "auto":
            netrc = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
            key = os.environ.get("WANDB_API_KEY") or (netrc.exists() and "wandb" in netrc.read_text())
            mode = os.environ.get("WANDB_MODE") or ("online" if key else "disabled")
            log0(f"wandb {mode} (--wandb_mode auto: {'an' if key else 'no'} API key is configured)")
        if mode == "disabled":
            return
        try:
            import wandb
            run = wandb.init(project=self.args.wandb_project, name=self.args.wandb_name, id=self.wandb_id, mode=mode,
                             resume="allow", dir=str(self.folder), config=vars(self.args),
                             settings=wandb.Settings(init_timeout=30, silent=True))
            while (row := self.queue.get()) is not None:
                run.log(row)
            run.finish()
        except Exception as error:
            warn(f"wandb failed and is off; metrics.jsonl has everything ({type(error).__name__}: {str(error)[:200]})")
    def waiting(self, iterator: Iterator):
        """next(iterator), its time counted as waiting for data."""
        begin, item = time.monotonic(), next(iterator)
        StepGuard.beat = time.monotonic()
        self.waited, self.steps = self.waited + StepGuard.beat - begin, self.steps + 1
        return item
    def add(self, samples: int, **sums: tuple[torch.Tensor, float]) -> None:
        """Add the (sum, count) pairs of a micro-batch of this rank; they stay on the device."""
        self.samples += samples
        for name, (total, count) in sums.items():
            old = self.sums.get(name, (0.0, 0.0))
            self.sums[name] = (old[0] + total.detach().double(), old[1] + count)
    def interval(self, step: int, total: int, epoch: int, model: torch.nn.Module, lr: float, norm: torch.Tensor,
                 **extra) -> None:
        """Reduce what was added since the last call and record it. (all ranks) The only host sync of the loop."""
        sums = {f"{n}/{i}": v for n, pair in self.sums.items() for i, v in enumerate(pair)}
        sums = reduce_sums(self.ddp, {**sums, "samples": self.samples, "norm": norm.detach() / self.ddp.world_size})
        seconds, wrapped = time.monotonic() - self.last, getattr(model, "_orig_mod", model)
        means = {n: sums[f"{n}/0"] / sums[f"{n}/1"] for n in self.sums if sums[f"{n}/1"]}  # where there were any
        timers = wrapped._get_ddp_logging_data() if isinstance(wrapped, DistributedDataParallel) else {}  # ns per step
        exposed = timers.get("avg_backward_comm_time", 0) - timers.get("avg_backward_compute_comm_overlap_time", 0)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1000)
        if self.ddp.device.type != "cpu":  # of the device's allocator, not of the process (in kB; macOS: bytes)
            peak = torch.accelerator.max_memory_allocated(self.ddp.device)
        wait, comm = self.waited / seconds, max(0.0, exposed * 1e-9) * self.steps / seconds
        speeds = {"samples/s": sums["samples"] / seconds, "data_wait": wait, "comm": comm, "mem_gb": peak / 1e9}
        self.last_step, self.final_loss, self.speed = step, means.get("loss"), speeds["samples/s"]
        numbers = " ".join(f"{n}={v:.6f}" for n, v in means.items())
        log0(f"step={step}/{total} epoch={epoch} {numbers} grad_norm={sums['norm']:.3f} lr={lr:.3e} samples/s="
             f"{self.speed:.0f} data_wait={wait:.1%} comm={comm:.1%} mem_gb={speeds['mem_gb']:.1f}"
             + "".join(f" {n}={v:.6g}" for n, v in extra.items()))
        self.write({"step": step, "epoch": epoch, **means, "grad_norm": sums["norm"], "lr": lr, **speeds, **extra})
        self.reset()
    def reset(self) -> None:
        """Start an interval (also after an evaluation or a checkpoint, so that speeds are of training alone)."""
        self.last, self.waited, self.steps, self.samples, self.sums = time.monotonic(), 0.0, 0, 0, {}
    def write(self, row: dict) -> None:
        """One record to metrics.jsonl and wandb. (rank 0 writes)"""
        if self.ddp.rank == 0:
            row = {k: None if v != v or v in (math.inf, -math.inf) else v for k, v in row.items()}  # JSON has no NaN
            self.unwritten += (json.dumps(row) + "\n").encode()
            with contextlib.suppress(OSError), open(self.folder / "metrics.jsonl", "ab", buffering=0) as file:
                self.unwritten = self.unwritten[file.write(self.unwritten) :]  # disk full: the rest waits
            if self.thread.is_alive():  # not when wandb is off
                self.queue.put(row)
    def close(self, status: str, **fields) -> None:
        """summary.json, the end of wandb, and every loss and metric against the step in curves.png. (rank 0 writes)"""
        if self.ddp.rank > 0:
            return
        summary = {"script": Path(sys.argv[0]).name, "status": status, **fields, "world_size": self.ddp.world_size,
                   "backend": self.ddp.backend, "device": str(self.ddp.device), "args": vars(self.args),
                   "wall_s": self.wall + time.monotonic() - self.started}
        atomic_write(self.folder / "summary.json", lambda file: file.write(json.dumps(summary, indent=1).encode()))
        self.queue.put(None)
        self.thread.join(timeout=30)
        try:
            from matplotlib.figure import Figure
        except ImportError:
            return warn("no curves.png: pip install matplotlib")
        curves, speeds = collections.defaultdict(list), {"samples/s", "data_wait", "comm", "mem_gb"}
        for row in map(json.loads, re.findall(r".*}\n", (self.folder / "metrics.jsonl").read_text())):  # whole records
            for name in (name for name, value in row.items() if isinstance(value, float) and name not in speeds):
                curves[name].append((row["step"], row[name]))
        rows = max(1, -(-len(curves) // 3))  # margins are given, as finding good ones takes as long as drawing
        figure = Figure((12, 2.6 * rows))
        figure.subplots_adjust(0.06, 0.2 / rows, 0.99, 1 - 0.12 / rows, wspace=0.25, hspace=0.5)
        for place, (name, points) in enumerate(curves.items(), 1):
            axis = figure.add_subplot(rows, 3, place, title=name, xlabel="optimizer step")
            axis.plot(*zip(*points, strict=True), marker="." if len(points) < 30 else None, linewidth=1)
        atomic_write(self.folder / "curves.png", lambda file: figure.savefig(file, dpi=110))
# ===== shared DDP block: end =====

# ---- Evaluate ------------------------------------------------------------------------------------

def in_shares(task: Task, count: int, function: Callable, dtype: torch.dtype = torch.float64) -> Tensor:
    """Rows function(ids) (B, D) for all ids (count, D), in the same batches on any number of ranks. (all ranks)"""
    ddp, size, found = task.ddp, task.args.eval_batch_size, {}
    for ids in np.split(np.arange(count), range(size, count, size))[ddp.rank :: ddp.world_size]:
        found[int(ids[0])], StepGuard.beat = function(ids).to(dtype), time.monotonic()
    some = next(iter(found.values())) if found else function(np.arange(1))  # a rank may have nothing to do
    table = torch.zeros(count, some.shape[1], dtype=dtype, device=ddp.device)
    for first, rows in found.items():
        table[first : first + len(rows)] = rows
    if ddp.world_size > 1:
        dist.all_reduce(table)  # a row is zero on all ranks but one
    return table

def survives(task: Task, x: Tensor, y: Tensor, ids: np.ndarray, eps: float) -> Tensor:
    """Whether each image (B,) is classified rightly at all points that the attack finds: up the cross entropy from the
    image, then from random points to a wrong class each, the likeliest first (as APGD-T, Croce and Hein 2020)."""
    args, norm, logits = task.args, task.args.clf_attack_norm, task.net(x)
    alive, ranking = logits.argmax(1) == y, logits.scatter(1, y[:, None], -math.inf).argsort(1, descending=True)
    def holds(left: Tensor, restart: int) -> Tensor:
        images, labels, start = x[left], y[left], None
        target = ranking[left, (restart - 1) % (logits.shape[1] - 1)]
        if restart:
            draws = keyed_uniform(args.seed, restart, torch.from_numpy(ids)[left.cpu()], 1 + x[0].numel(), 9)
            start = random_start(images, eps, norm, draws.to(x.device))
        def gain(logits: Tensor) -> Tensor:
            return picked(logits, target) - picked(logits, labels) if restart else losses(logits, labels)
        adv = pgd(task.net, images, gain, args.eval_steps, eps / 2, eps, norm, start, lambda z: margin(z, labels), True)
        return margin(task.net(adv), labels) < 0
    for restart in range(args.eval_restarts):
        if len(left := alive.nonzero()[:, 0]):
            alive[left] = holds(left, restart)
    return alive

def accuracy(task: Task, images: Images, count: int) -> dict[str, float]:
    """Of the first `count` images: clean accuracy, cross entropy, robust accuracy at each radius. (all ranks)"""
    radii = task.args.radii if task.args.robust_eval else []
    def measure(ids: np.ndarray) -> Tensor:
        x, y = augment(images.batch(ids), "none", task.data.size, None), images.targets(ids)
        columns = [(logits := task.net(x)).argmax(1) == y, losses(logits, y)]
        return torch.stack([c.float() for c in columns + [survives(task, x, y, ids, eps) for eps in radii]], dim=1)
    found = in_shares(task, min(count, len(images)), measure).mean(0).tolist()
    return dict(zip(["clean", "cross_entropy", *(f"robust@{eps:g}" for eps in radii)], found, strict=True))

def detection(task: Task, images: Images, limit: int) -> dict[str, float]:
    """AUROC of images against each kind of OOD images, as they are and attacked to score high. (all ranks)"""
    args, result = task.args, {}
    def score(logits: Tensor) -> Tensor:
        return logits.logsumexp(1) if args.ood_detection_logsumexp else logits.log_softmax(1).amax(1)
    def scores(source: Images, count: int, steps: int) -> Tensor:
        def attacked(ids: np.ndarray) -> Tensor:
            x = augment(source.batch(ids), "none", task.data.size, None)
            z = pgd(task.net, x, score, steps, args.ood_eps / 10, args.ood_eps, args.clf_attack_norm, None, score)
            return score(task.net(z))[:, None]
        return in_shares(task, min(count, len(source)), attacked)[:, 0]
    inside = scores(images, limit, 0)
    for name, source in (task.data.others | {args.outdist_dataset: task.data.unseen}).items():
        for kind, steps in ("ood_auc", 0), ("adv_ood_auc", 20):
            result[f"{kind} {name}"] = pooled_auc(inside, scores(source, min(1024, limit), steps)).item()
    return result

def generate(task: Task, count: int) -> Tensor:
    """Images (count, C, H, W) uint8 on the CPU: OOD images, pushed up as in training; labels go round. (all ranks)"""
    args, data = task.args, task.data
    def climb(ids: np.ndarray) -> Tensor:
        x = augment(data.unseen.batch(ids % len(data.unseen)), "none", data.size, None)
        gain = likeness(args.logsumexp_sampling, torch.from_numpy(ids % data.classes).to(x.device))
        z = pgd(task.net, x, gain, args.image_num_steps, args.image_step_size, args.image_eps, args.image_norm)
        return (z * 255).round().flatten(1)
    return in_shares(task, count, climb, torch.uint8).cpu().reshape(count, data.channels, data.size, data.size)

def frechet(a: Tensor, b: Tensor) -> float:
    """Frechet distance of two sets of features (n, D) and (m, D), as of normal distributions (Heusel et al. 2017)."""
    means, covariances = zip(*((t.mean(0), torch.cov(t.T)) for t in (a.double(), b.double())), strict=True)
    values, vectors = torch.linalg.eigh(covariances[0])
    root = vectors @ (values.clamp(min=0).sqrt()[:, None] * vectors.T)
    cross = torch.linalg.eigvalsh(root @ covariances[1] @ root).clamp(min=0).sqrt().sum()
    return float((means[0] - means[1]).square().sum() + sum(c.trace() for c in covariances) - 2 * cross)

def feature_network(args: Namespace, device: torch.device) -> tuple[str, Callable]:
    """(name, images (B, C, H, W) in [0, 1] -> features (B, D), of Inception 2048 and 1008 logits): only Inception's
    distance is called fid. Raises ValueError where it cannot be had."""
    kind = args.image_fid_features
    if kind == "pixels":  # means of blocks: 8 x 8 and the channels
        return "frechet_pixels", lambda x: F.adaptive_avg_pool2d(x, min(8, x.shape[-1])).flatten(1)
    try:
        if kind != "inception":
            module = torch.jit.load(kind, map_location=device).eval()
            return f"frechet_{Path(kind).stem}", torch.no_grad()(lambda x: module(x).flatten(1))
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3 as Inception
        net = Inception("inception", ["2048", "logits_unbiased"], args.image_fid_weights).to(device).eval()
    except (ImportError, RuntimeError, ValueError, OSError) as error:
        raise ValueError(f"--image_log.fid_features {kind}: {str(error).splitlines()[0]}; expected pixels, a file of "
                         "TorchScript or inception (pip install torch-fidelity)") from error
    return "fid", lambda x: torch.cat(net((x * 255).round().to(torch.uint8).expand(-1, 3, -1, -1)), dim=1)

def quality(task: Task, samples: Tensor) -> dict[str, float]:
    """How far samples (n, C, H, W) uint8 are from the training images (50,000 at most). (all ranks)"""
    (name, extract), result = feature_network(task.args, task.ddp.device), {}
    real, made = task.data.train.part(slice(50_000)), Images(samples.numpy(), None, task.ddp.device)
    def batch(images: Images, ids: np.ndarray) -> Tensor:
        return augment(images.batch(ids), "none", task.data.size, None)
    a, b = (in_shares(task, len(images), lambda ids, images=images: extract(batch(images, ids)), torch.float32)
            for images in (real, made))
    if name == "fid":  # and exp of the mean divergence of p(y | x) from p(y), in ten parts (Salimans et al. 2016)
        parts = [(p, p.exp().mean(0).clamp(min=1e-12).log()) for p in b[:, 2048:].double().log_softmax(1).chunk(10)]
        result["inception_score"] = float(np.mean([math.exp((p.exp() * (p - m)).sum(1).mean()) for p, m in parts]))
        a, b = a[:, :2048], b[:, :2048]
    return {name: frechet(a, b), **result}

def draw(samples: Tensor, classes: int, path: Path, log: RunLog | None, step: int) -> None:
    """A picture of the first samples, a class in each column; in wandb, too. (rank 0 only)"""
    from matplotlib.image import imsave
    rows = samples[: min(10, len(samples) // classes) * classes].unflatten(0, (-1, classes))[:, :10]
    whole = torch.cat([torch.cat([*F.pad(row, (1, 1, 1, 1), value=128)], dim=2) for row in rows], dim=1)
    whole = whole.permute(1, 2, 0).expand(-1, -1, 3).numpy()
    imsave(path, np.kron(whole, np.ones((-(-480 // whole.shape[1]),) * 2 + (1,), np.uint8)))  # 480 pixels or more wide
    if log is not None and log.thread.is_alive():
        import wandb
        log.queue.put({"step": step, "samples": wandb.Image(str(path))})

def evaluate(task: Task, part: str, log: RunLog | None, name: str, step: int) -> dict[str, float]:
    """All metrics on the "test" images, or fewer on those held out ("valid"), of the averaged weights; a picture.
    The same on any number of ranks. (all ranks)"""
    args, data, begin, folder = task.args, task.data, time.monotonic(), Path(task.args.output_dir)
    images, limit, most = (data.test, args.eval_images, math.inf) if part == "test" else (data.valid, 512, 1000)
    share_statistics(task)
    with frozen(task.model, task.average):
        result = accuracy(task, images, args.eval_images) | detection(task, images, min(limit, args.eval_images))
        samples = generate(task, max(data.classes, min(args.image_num_samples, most)))  # one of each class at least
        result |= quality(task, samples)
    on_rank0(task.ddp, draw, samples, data.classes, folder / f"samples_{name}.png", log, step)
    if part == "test" and args.keep_samples:
        content = io.BytesIO()
        np.savez_compressed(content, images=samples.numpy(), labels=np.arange(len(samples)) % data.classes)
        on_rank0(task.ddp, write_file, folder / "samples.npz", content.getvalue())
    log0(f"{part}, {name}: {' '.join(f'{n}={v:.4f}' for n, v in result.items())} ({time.monotonic() - begin:.0f} s)")
    return result

def share_statistics(task: Task) -> None:
    """Mean over ranks of running statistics, of weights and averages, which each has of its own images. (all ranks)"""
    running = [t for state in (task.model.state_dict(), task.average) for n, t in state.items() if "running_" in n]
    for statistic in running if batch_statistics(task.model) and task.ddp.world_size > 1 else ():
        dist.all_reduce(statistic.div_(task.ddp.world_size))

# ---- Train ---------------------------------------------------------------------------------------

class Clock:
    """Seconds of the parts of a step, which follow each other without a gap; by events on an accelerator."""
    def __init__(self, device: torch.device):
        self.home, self.marks = None if device.type == "cpu" else torch.get_device_module(device), []
        self.mark("other")
    def mark(self, part: str) -> None:  # from here on it is `part`
        event = self.home and self.home.current_stream().record_event(self.home.Event(enable_timing=True))
        self.marks.append((part, event or time.perf_counter()))
    @contextlib.contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        before = self.marks[-1][0]
        self.mark(part)
        yield
        self.mark(before)
    def read(self) -> collections.Counter:
        """Seconds of each part since the last call; waits for the device."""
        self.mark(self.marks[-1][0])
        spent = collections.Counter()
        if self.home:
            self.marks[-1][1].synchronize()
        for (part, begin), (_, end) in itertools.pairwise(self.marks):
            spent[part] += begin.elapsed_time(end) / 1000 if self.home else end - begin
        self.marks = self.marks[-1:]
        return spent

# What training and evaluation share. net: what attacks call, the model, compiled or replicated by DataParallel;
# average: the averaged weights and floating-point buffers, by name.
Task = collections.namedtuple("Task", "args ddp model net average data clock")

def new_course(ranks: int = 1) -> Namespace:
    """Where training stands. stage: place in args.stages; window, pending: AUC of steps at this T, not yet in."""
    return Namespace(step=0, epoch=0, stage=0, stage_step=0, T=0, window=[], images_at_T=0, pending=[], best=None,
                     history=[], results={}, ranks=ranks, owed=False)  # ranks scale learning rates; owed: an evaluation

def advance(args: Namespace, course: Namespace, auc: float, total: int) -> None:
    """Take in the AUC of a step of `total` images: T grows where its mean is enough, or after enough images."""
    need = -(-args.min_imgs_per_threshold // total)
    course.window, course.images_at_T = [*course.window, auc][-need:], course.images_at_T + total
    full = len(course.window) == need and sum(course.window) / need >= args.AUC_th
    if args.samples_per_attack_step:
        full = course.images_at_T >= args.samples_per_attack_step
    if full and course.T < args.attack_max_steps:
        course.T, course.window, course.images_at_T = course.T + 1, [], 0

def stage_over(args: Namespace, course: Namespace, steps: int) -> bool:
    """After all steps of the stage, or stop_after_max_imgs at the largest T."""
    enough = 0 < args.stop_after_max_imgs <= course.images_at_T and course.T == args.attack_max_steps
    return enough or course.stage_step >= steps

class Zero(ZeroRedundancyOptimizer):
    """ZeRO stage 1 (Rajbhandari et al. 2020), which passes StepGuard's order to skip on to the rank's own optimizer."""
    def __setattr__(self, name: str, value) -> None:
        (self.optim if name in ("grad_scale", "found_inf") else super()).__setattr__(name, value)

def stage_optimizer(task: Task, prefix: str, peak: float) -> torch.optim.Optimizer:
    """By the options of a stage (prefix "at_" or ""), fused, so that an update can be skipped on the device."""
    make, more = {"sgd": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
                  "adam": (torch.optim.Adam, {"betas": (0.0, 0.99)}),
                  "adamw": (torch.optim.AdamW, {"betas": (0.9, 0.95)})}[getattr(task.args, f"{prefix}optimizer")]
    more |= {"lr": peak, "weight_decay": getattr(task.args, f"{prefix}wd"), "fused": True}
    groups = [{"params": [p for p in task.model.parameters() if p.ndim > 1]},
              {"params": [p for p in task.model.parameters() if p.ndim < 2], "weight_decay": 0.0}]
    return Zero(groups, make, **more) if task.args.zero and task.ddp.world_size > 1 else make(groups, **more)

def stream(sampler: GlobalBatchSampler, step: int) -> Iterator[tuple[int, np.ndarray]]:
    """(epoch, global batch) of every step from `step` on, without end. (the same on all ranks)"""
    for epoch in itertools.count(step // (per_epoch := sampler.n // sampler.global_batch)):
        sampler.set_epoch(epoch, step % per_epoch)
        yield from ((epoch, batch) for batch in sampler.batches(sampler.start))
        step = 0

def micro_batches(task: Task, samplers: dict[str, GlobalBatchSampler], step: int, stage: str) -> Iterator[list[Micro]]:
    """This rank's micro-batches of each step of a stage, on the device. Draws depend on (seed, epoch, image) alone."""
    args, data, start, more = task.args, task.data, None, (None, None, None)
    def images(source: Images, kind: str, number: int, epoch: int, ids: np.ndarray) -> Tensor:
        draws = keyed_uniform(args.seed, epoch, torch.from_numpy(ids), 10, number)
        return augment(source.batch(ids), kind, data.size, draws)
    for (epoch, clf), *others in zip(*(stream(sampler, step) for sampler in samplers.values()), strict=True):
        micro = []
        for places in samplers["clf"].deal(np.arange(samplers["clf"].global_batch)):
            x = images(data.train, args.augm_type_classification, 1, epoch, ids := clf[places])
            if args.clf_attack_random_start and stage != "standard":
                noise = keyed_uniform(args.seed, epoch, torch.from_numpy(ids), 1 + x[0].numel(), 8).to(x.device)
                start = random_start(x, args.clf_attack_eps, args.clf_attack_norm, noise)
            if stage == "dat":
                real, outside = ((epoch, batch[places]) for epoch, batch in others)
                more = (images(data.train, args.augm_type_generation, 2, *real), data.train.targets(real[1]),
                        images(data.outside, args.augm_type_generation, 3, *outside))
            here = torch.from_numpy(places).to(x.device)
            micro.append(Micro(here, ids, x, data.train.targets(ids), start, *more))
        yield micro

def begin_stage(task: Task, course: Namespace, stage: str) -> None:
    """The weights that a stage starts from; batch normalisation is frozen in stage 2."""
    args, model = task.args, task.model
    model.frozen = stage == "dat" and not args.use_batchnorm
    model.train()
    if course.stage_step:
        return
    if args.ckpt_path and stage == next(s for s in args.stages if s != "standard"):
        model.load_state_dict(read_weights(args.ckpt_path))
        log0(f"weights of {args.ckpt_path}")
    elif stage == "dat":  # goes on from the averages of stage 1
        model.load_state_dict(model.state_dict() | task.average)
    else:
        torch.manual_seed(args.seed)  # the same on all ranks, and for the baseline as for stage 1
        model.load_state_dict(EnergyClassifier(args, task.data, model.dtype, "cpu").state_dict())
    torch._foreach_copy_(list(task.average.values()), list(float_tensors(model).values()))
    course.T = args.attack_start_step

def train_step(task: Task, model: nn.Module, stage: str, T: int, micro: list[Micro], guard: StepGuard, log: RunLog,
               total: int) -> tuple[Tensor, Tensor]:
    """All backward passes of a step; gradients are all-reduced in the last. Returns this rank's part of the loss, and
    the scores (2, total) of its real and attacked images, 0 elsewhere."""
    args, ddp, weight = task.args, task.ddp, task.args.clf_weight if stage == "dat" else 1.0
    summed, scores = torch.zeros((), device=ddp.device), torch.zeros(2, total, device=ddp.device)
    def backward(loss: Tensor) -> None:  # DDP averages over ranks: the mean over the global batch
        loss = loss.sum() * (1 / total)
        summed.add_(loss.detach())
        guard.scaler.scale(loss * ddp.world_size).backward()
    for number, part in enumerate(micro, 1):
        found = {}
        if stage == "dat":
            with sync_gradients(model, False):
                found = energy_passes(task, model, part, T, backward)
            scores[:, part.places] = torch.stack([found.pop("real"), found.pop("fake")])
        with sync_gradients(model, number == len(micro)):
            x = part.x if stage == "standard" else attacked(
                task, part.x, lambda logits, y=part.y: losses(logits, y), args.clf_attack_max_steps,
                args.clf_attack_step_size, args.clf_attack_eps, args.clf_attack_norm, part.start)
            found["clf_loss"] = losses(model(x), part.y)
            backward(found["clf_loss"] * weight)
        log.add(len(part.ids), **{name: (value.detach().sum(), len(part.ids)) for name, value in found.items()})
    log.add(0, loss=(summed, 1 / ddp.world_size))
    return summed, scores

def over_ranks(ddp: DDPContext, mine: Tensor) -> Tensor:
    """Tensors (...) of all ranks as (world size, ...). (all ranks)"""
    table = mine.new_zeros(ddp.world_size, *mine.shape)
    table[ddp.rank] = mine
    if ddp.world_size > 1:
        dist.all_reduce(table)
    return table

def batch_statistics(model: nn.Module) -> bool:
    """Whether running statistics are gathered, which each rank has of its own images."""
    return any(isinstance(m, nn.BatchNorm2d) and m.training for m in model.modules())

def compare_ranks(task: Task, step: int) -> None:
    """Checksums of all gradients, parameters, averages and buffers, across ranks. Raises RuntimeError that names the
    first tensor that differs and the ranks that have other bits than rank 0. (all ranks)"""
    own, parameters = batch_statistics(task.model), dict(task.model.named_parameters())
    named = {f"parameter {n}": p for n, p in parameters.items()}
    named |= {f"gradient {n}": p.grad for n, p in parameters.items() if p.grad is not None}
    named |= {f"average {n}": t for n, t in task.average.items() if n in parameters or not own}
    named |= {f"buffer {n}": t for n, t in task.model.named_buffers() if not own}
    def checksum(t: Tensor) -> Tensor:  # of the bits, and of them times odd numbers: no single change leaves both
        bits = t.detach().flatten().float().view(torch.int32).long()
        return torch.stack([bits.sum(), (bits * (2 * torch.arange(len(bits), device=bits.device) + 1)).sum()])
    table = over_ranks(task.ddp, torch.stack([checksum(t) for t in named.values()]))
    differ = (table != table[0]).any(2).cpu()  # (ranks, tensors)
    if count := int(differ.any(0).sum()):
        first = int(differ.any(0).int().argmax())
        raise RuntimeError(f"step {step}: the {[*named][first]} differs from rank 0's on ranks "
                           f"{differ[:, first].nonzero()[:, 0].tolist()}; {count} of {len(named)} tensors do")

def log_ranks(task: Task, model: nn.Module, log: RunLog, course: Namespace) -> None:
    """Seconds a step of each part, one after the other, on the fastest, mean and slowest rank (comm: of the gradients'
    all-reduce what the backward pass does not hide; comm_hidden: the rest of it). (all ranks)"""
    spent, seconds, inner = task.clock.read(), time.monotonic() - log.last, getattr(model, "_orig_mod", model)
    timers = inner._get_ddp_logging_data() if isinstance(inner, DistributedDataParallel) else {}
    comm, hidden = (timers.get(f"avg_backward_{n}_time", 0) * 1e-9 for n in ("comm", "compute_comm_overlap"))
    parts = {f"s_{n}": spent[n] / log.steps for n in ("data", "attack", "compute", "update", "other")}
    parts["s_comm"] = min(max(0.0, comm - hidden), parts["s_compute"])
    parts["s_compute"] -= parts["s_comm"]
    parts |= {"s_comm_hidden": hidden, "s_step": seconds / log.steps, "samples/s": log.samples / seconds,
              "s_busy": parts["s_data"] + parts["s_attack"] + parts["s_compute"]}
    table = over_ranks(task.ddp, torch.tensor([*parts.values()], dtype=torch.float64, device=task.ddp.device)).cpu()
    columns = dict(zip(parts, table.T, strict=True))
    found = {n: {"min": c.min().item(), "mean": c.mean().item(), "max": c.max().item()} for n, c in columns.items()}
    slowest = int(columns["s_busy"].argmax())
    log.write({"step": course.step, "epoch": course.epoch, "ranks": found, "slowest_rank": slowest})

def checkpoint(task: Task, course: Namespace, guard: StepGuard, log: RunLog, total: int, best: bool = False) -> None:
    """Everything needed to go on bit by bit, written by rank 0. (all ranks)"""
    args, ddp, states, done = task.args, task.ddp, rng_states(task.ddp), course.stage == len(task.args.stages)
    task.clock.read()  # the device has done its work: AUCs that are on their way have come
    course.pending = [float(auc) for auc in course.pending]
    share_statistics(task)
    if isinstance(guard.optimizer, Zero):  # then rank 0 has all of it, as a plain optimizer would
        guard.optimizer.consolidate_state_dict(0)
    state = {"format": 1, "script": "run_train_rebm_ddp.py", "args": vars(args), "world_size": ddp.world_size,
        "global_batch": total, "step": course.step, "epoch": course.epoch, "course": vars(course), "done": done,
        "model": task.model.state_dict(), "ema": task.average, "scaler": guard.scaler.state_dict(),
        "optimizer": guard.optimizer.state_dict() if ddp.rank == 0 else None, "bad_steps": guard.bad_steps,
        "rng": states, "speed": (log.final_loss, log.speed), "wandb_id": log.wandb_id,
        "wall_s": log.wall + time.monotonic() - log.started}
    if not on_rank0(ddp, save_checkpoint, args.output_dir, state, course.step, args.keep_checkpoints, best) and done:
        raise OSError(f"the end of the run could not be saved: free space in {args.output_dir}, run again")
    log.reset(), task.clock.read()  # speeds are of training alone

def measure_stage(task: Task, course: Namespace, log: RunLog, stage: str, over: bool) -> bool:
    """Metrics on the images held out; are they the best of the last stage so far? Where the stage is over, also on the
    test set, which has chosen nothing, and its weights. RuntimeError where stage 1 has learnt nothing. (all ranks)"""
    args, now = task.args, {"step": course.step, "epoch": course.epoch, "phase": STAGES[stage]}
    found, course.owed, less = evaluate(task, "valid", log, stage, course.step), False, args.best_by == "frechet"
    course.history.append(now | {"T": float(course.T)} | {f"val {n}": value for n, value in found.items()})
    log.write(course.history[-1])
    wanted = ("frechet", "fid") if less else "robust" if args.robust_eval and args.radii else "clean"
    name, value = next((f"val {n}", value) for n, value in found.items() if n.startswith(wanted))
    old = course.best or {"name": ""}  # or of another metric
    better = old["name"] != name or (value < old["value"] if less else value > old["value"])
    if better := better and stage == args.stages[-1]:
        course.best = {"name": name, "value": value, "step": course.step}
    if over:
        course.results[stage] = found = evaluate(task, "test", log, stage, course.step)
        log.write(now | {"test": found})
        if stage == "at" and found["clean"] < 1.5 / task.data.classes:
            raise RuntimeError(f"stage 1 ended at an accuracy of {found['clean']:.3f}, which is chance: use "
                               "--at_optimizer adamw, a lower --at_lr or a network with normalisation")
        path, state = Path(args.output_dir, f"{stage}.pth"), task.model.state_dict() | task.average
        on_rank0(task.ddp, atomic_write, path, lambda file: torch.save(state, file))  # noqa: TID251
        vars(course).update(stage=course.stage + 1, stage_step=0, window=[], pending=[], images_at_T=0)
    return better

def train(task: Task, course: Namespace, log: RunLog, state: dict | None, total: int, micro_steps: int) -> str:
    """One stage, from `course` on, and `state` within it. Returns why it was stopped or ''. (all ranks)"""
    args, ddp, data, stage = task.args, task.ddp, task.data, task.args.stages[course.stage]
    epochs = {"standard": args.baseline_epochs, "at": args.at_epochs, "dat": args.total_epochs}[stage]
    prefix, streams = "" if stage == "dat" else "at_", {"clf": data.train, "real": data.train, "outside": data.outside}
    samplers = {name: GlobalBatchSampler(len(images), total, micro_steps, args.seed + 1000 * i, ddp)
                for i, (name, images) in enumerate(streams.items()) if name == "clf" or stage == "dat"}
    steps, schedule = epochs * (per_epoch := len(data.train) // total), getattr(args, f"{prefix}lr_schedule")
    peak = scaled_lr(getattr(args, f"{prefix}lr"), args.lr_scaling, course.ranks)
    begin_stage(task, course, stage)
    model = wrap_ddp(task.net, ddp) if args.use_ddp else task.net
    if isinstance(model, DistributedDataParallel):
        model._set_ddp_runtime_logging_sample_rate(1)
    guard = StepGuard(args, ddp, optimizer := stage_optimizer(task, prefix, peak), task.model.dtype, log.started)
    if state:
        optimizer.load_state_dict(state["optimizer"])
        guard.scaler.load_state_dict(state["scaler"])
        guard.bad_steps = state["bad_steps"]
    for sampler in samplers.values():
        sampler.set_epoch(course.stage_step // per_epoch)
        require_same(ddp, "the batches", sampler.fingerprint())
    log0(f"stage {stage}: {epochs} epochs x {per_epoch} steps, peak learning rate {peak:g}")
    bar = tqdm(total=steps, initial=course.stage_step, disable=ddp.rank > 0 or not sys.stderr.isatty())
    source = micro_batches(task, samplers, course.stage_step, stage)  # made while the device does the step before
    averages, weights = list(task.average.values()), list(float_tensors(unwrap(model)).values())
    cadence, reason = -(-args.n_imgs_per_evaluation_log // total), ""
    log.reset(), task.clock.read()
    while not reason and not stage_over(args, course, steps):
        if course.owed:  # an evaluation; also first of all in a run that was stopped before it
            checkpoint(task, course, guard, log, total, measure_stage(task, course, log, stage, False))
        lr = peak * lr_at(course.stage_step, steps, min(args.warmup_steps, steps), schedule)
        for group in optimizer.param_groups:
            group["lr"] = lr
        task.clock.mark("data")
        micro = log.waiting(source)
        task.clock.mark("compute")
        summed, scores = train_step(task, model, stage, course.T, micro, guard, log, total)
        task.clock.mark("update")
        course.step, course.stage_step = course.step + 1, course.stage_step + 1
        if args.monitor_every and course.step % args.monitor_every == 0:
            compare_ranks(task, course.step)
        norm, reason = guard.step(summed, course.step, [part.ids for part in micro])
        update_ema(averages, weights, args.use_ema * args.ema, course.stage_step - 1)
        task.clock.mark("other")
        course.epoch, extra = course.stage_step // per_epoch, {"phase": STAGES[stage]}
        if stage == "dat":
            if ddp.world_size > 1:
                dist.all_reduce(scores)  # of every image on one rank: the pooled AUC, the same bits anywhere
            course.pending.append(pooled_auc(*scores).to("cpu", non_blocking=True))
            if len(course.pending) > 1:  # taken in a step later, so that nothing waits for it
                if ddp.device.type != "cpu":
                    guard.event.synchronize()
                advance(args, course, auc := float(course.pending.pop(0)), total)
                extra |= {"T": course.T, "auc": auc}
        bar.update()
        over = stage_over(args, course, steps)
        if course.step % args.log_every == 0 or over:
            log_ranks(task, model, log, course)
            log.interval(course.step, course.step - course.stage_step + steps, course.epoch, model, lr, norm, **extra)
            task.clock.read()  # not counted: the time of logging
        course.owed = cadence > 0 and course.stage_step % cadence == 0 and not over
        reason = reason or (guard.finish() if course.owed or over else "")  # a stop comes before an evaluation
        if reason or not course.owed and not over and course.step % args.save_every == 0:
            checkpoint(task, course, guard, log, total)
    if not reason:
        checkpoint(task, course, guard, log, total, measure_stage(task, course, log, stage, True))
    guard.finish(), bar.close()
    return reason

# ---- Main ----------------------------------------------------------------------------------------

def one_process(args: Namespace) -> Namespace:
    """use_ddp=False is one process, whatever has started it: rank 0 goes on alone, the others have nothing to do."""
    if not args.use_ddp:
        args.nproc, found = 0, [[os.environ.pop(n, None) for n in names] for names in LAUNCHERS.values()]
        if any(int(rank or 0) for rank, *_ in found):
            sys.stdout.write("use_ddp=False: rank 0 does it all, this one has nothing to do\n")
            sys.exit(0)
    return args

def assemble(args: Namespace, ddp: DDPContext, data: Data, weights: dict | None = None) -> Task:
    """The model, on the device, with `weights`, in the parallel form that attacks and evaluation call."""
    torch.manual_seed(args.seed)  # the same on all ranks
    dtype = resolve_precision(args.precision, ddp.device)
    model = EnergyClassifier(args, data, dtype, ddp.device.type).to(ddp.device, memory_format=torch.channels_last)
    log0(f"model {args.model_type}: {sum(p.numel() for p in model.parameters()):,} parameters, {model.dtype}")
    if weights:
        model.load_state_dict(weights)
    net = torch.compile(model) if args.compile else model
    if not args.use_ddp:
        net = nn.DataParallel(net)  # on a CPU, or with one GPU, it passes calls on
        log0(f"use_ddp=False: DataParallel over {max(1, len(net.device_ids))} devices")
    average = {name: t.detach().clone() for name, t in float_tensors(model).items()}
    return Task(args, ddp, model, net, average, data, Clock(ddp.device))

def main(args: Namespace) -> int:
    """Train the stages that are asked for, or evaluate. Returns the exit status."""
    ddp, folder = setup_ddp(args), Path(args.output_dir)
    if ddp.world_size > 1:
        log0(f"Initialized DDP with {ddp.world_size} processes")
    torch.set_float32_matmul_precision("high")  # what stays in fp32 runs on tensor cores
    data, _ = load_data(args, ddp), feature_network(args, ddp.device)  # what either lacks is said before training
    if args.eval_only:
        on_rank0(ddp, os.makedirs, folder, 0o777, True)
        task = assemble(args, ddp, data, read_weights(args.ckpt_path))
        found = evaluate(task, "test", None, "weights", 0)
        on_rank0(ddp, write_file, folder / "report.json", json.dumps(found, indent=1).encode())
        return 0
    state = open_run(args, ddp, SAME)
    if state and state["done"]:
        log0(f"the run in {folder} is finished, after {state['step']} steps: --fresh starts anew")
        return 0
    total, micro_steps = resolve_batch(args, ddp.world_size, state and state["global_batch"])
    log, task = RunLog(args, ddp, state), assemble(args, ddp, data, state and state["model"])
    course, reason = Namespace(**vars(new_course(ddp.world_size)) | (state["course"] if state else {})), ""
    if state:
        torch._foreach_copy_(list(task.average.values()), [t.to(ddp.device) for t in state["ema"].values()])
        restore_rng(state["rng"], ddp, args.seed)
    while course.stage < len(args.stages) and not reason:
        reason, state = train(task, course, log, state if course.stage_step else None, total, micro_steps), None
    if reason:
        log.close("stopped", steps=course.step, reason=reason)
        barrier(ddp)  # the first rank to end makes some launchers kill the others
        return stop_status(reason)
    for name in ("", *course.results[args.stages[-1]]):  # a table: metrics on the test set, a stage in each column
        cells = (f"{found[name]:>12.4f}" if name else f"{stage:>12}" for stage, found in course.results.items())
        log0(f"{name:<24}{''.join(cells)}")
    test = course.results.pop(last := args.stages[-1])
    log.close("finished", steps=course.step, epochs=course.epoch, T=course.T, samples_per_s=log.speed, test=test,
              final_loss=log.final_loss, best_metric=course.best, baselines=course.results,
              checkpoint=str(folder / "best.pt"))
    log0(f"finished: {folder}/summary.json, samples_{last}.png")
    return 0

if __name__ == "__main__":
    sys.exit(launch(main, one_process(parse_args())))
