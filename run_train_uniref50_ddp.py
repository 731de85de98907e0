"""Train a discrete-diffusion language model of proteins on UniRef50, and sample sequences from it.

Residues are masked (or replaced) at a random rate; a transformer predicts the originals. The weighted cross entropy
bounds the likelihood (SEDD, Lou et al. 2024; MDLM, Sahoo et al. 2024).

Run
    python run_train_uniref50_ddp.py --prepare uniref50.fasta.gz ./input_data/uniref50       once: FASTA to arrays
    ./run_train_uniref50_ddp.sh --datafile ./input_data/uniref50                             all GPUs of this machine
    python run_train_uniref50_ddp.py --config configs/config_uniref50_quickstart.yaml        one process
    torchrun --nproc_per_node=8 run_train_uniref50_ddp.py --datafile ./input_data/uniref50   one node
    torchrun --nproc_per_node=8 --nnodes=2 --node_rank=0 --master_addr=HOST run_train_uniref50_ddp.py   node 1 alike
    python run_train_uniref50_ddp.py --sample 16 --checkpoint experiments_ddp/best.pt --out samples.fasta
Data (--datafile)
    FOLDER      of --prepare: flat uint8 tokens and int64 offsets, memory-mapped, shared by the ranks of a node
    FILE        FASTA, text (one sequence per line), either as .gz, or processed_uniref50.pt: prepared into --cache_dir
    Validation: the sequences whose hash is below --val_ratio, the same for any order, seed and number of ranks
Logged metrics (over all ranks; in metrics.jsonl and wandb)
    loss                nats per residue of the training bound (with --use_curriculum: of easier times than the bound)
    nelbo bits perplexity   held-out bound per residue, EMA weights, fixed noise; nelbo_se: its standard error
    ce@0.15 sample_*    cross entropy where 15 % is hidden (nats); samples against training data (nats, shares)
    samples/s tokens/s  sequences, real residues a second; padding: share of the tokens computed for nothing
    mfu                 model FLOPs a second over the matrix-product rate measured on this device
    data_wait, comm     share of the time spent waiting for batches; in all-reduces that nothing hides
Files in --output_dir: latest.pt (resume), best.pt, metrics.jsonl, samples/*.fasta, summary.json, curves.png
Differences from the original recipe: loss per real residue instead of per padded position, BOS and EOS, no residue
deleted, a noise schedule that ends fully masked, validation without curriculum, all times in optimizer updates.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import difflib
import errno
import functools
import gc
import gzip
import hashlib
import importlib
import itertools
import json
import logging
import math
import multiprocessing
import os
import queue
import re
import resource
import shutil
import signal
import socket
import sys
import threading
import time
import timeit
import traceback
import zipfile
import zlib
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
from tqdm import tqdm

# ---- Constants -----------------------------------------------------------------------------------

BOS, PAD, EOS, MASK = 0, 1, 2, 36  # <s> <pad> </s>, the absorbing state; 3 <unk>, 4 and 31 to 35 are never used
RESIDUES = "ACDEFGHIKLMNPQRSTVWYXBUZOJ"  # ids 5 to 30, the last six as they stand in UniRef: unknown or rare
FIRST, LAST, STATES = 5, 30, 26  # ids of the residues, their number
RATES = (0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95)  # hidden shares at which validation reports the cross entropy
PUBLISHED = "https://ftp.uniprot.org/pub/databases/uniprot/uniref/uniref50/uniref50.fasta.gz"
MODEL = ("max_protein_len hidden_size cond_dim n_blocks_prot n_heads time_conditioning graph_type loss noise_type "
         "sigma_min sigma_max noise_eps").split()  # what a checkpoint's weights mean
SAME = [*MODEL, *"data_key max_samples optimizer ema seed".split()]  # what a resumed run must have kept
REFUSED = {  # keys of the original's YAML that do nothing here, and why
    "model.name model.type model.length": "one architecture: give its sizes, and data.max_protein_len",
    "model.n_blocks_lig model.esm_dim model.molformer_dim data.max_ligand_len data.vocab_size_ligand "
    "data.use_structure training.task graph.file graph.report_all": "proteins alone: no ligands, no structures",
    "model.device ngpus": "each rank takes its own device; --gpus of the launcher, or torchrun, sets their number",
    "model.scale_by_sigma training.weight": "scores are relative to the noise, which also gives the weight of a time",
    "tokens data.vocab_size_protein": "the vocabulary is fixed: ids 0 to 35 and the mask, 36",
    "defaults hydra.run.dir": "Hydra is not used: work_dir is the output folder",
    "training.snapshot_freq_for_preemption": "every checkpoint can be resumed: training.snapshot_freq",
    "training.quick_gen_freq monitoring.sample_frequency": "samples are drawn at every evaluation: training.eval_freq",
    "training.force_reprocess": "a changed file is prepared again",
    "data.train data.valid data.train_ratio": "data.datafile names the data, data.val_ratio the share held out",
    "sampling.noise_removal": "the last sampling step always leaves no mask",
    "eval.perplexity eval.perplexity_batch_size": "perplexity is always reported: eval.batch_size",
    "memory.mixed_precision": "--precision fp32 or bf16 says it",
    "monitoring.log_gradients monitoring.log_weights": "the gradient's norm is always logged, histograms never",
    "ddp.find_unused_parameters ddp.broadcast_buffers ddp.gradient_as_bucket_view ddp.static_graph":
        "every parameter gets a gradient and no buffer changes: DDP is set for that",
}

# ---- Arguments -----------------------------------------------------------------------------------

def parse_args(argv: list[str] | None = None) -> Namespace:
    """Every option, and the checks that need neither data nor devices."""
    p = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    def section(title: str) -> Callable:  # of options with two names each: --lr and, as in YAML, optim.lr
        add = p.add_argument_group(title).add_argument
        return lambda name, *more, **kw: add(*(f"--{n}" for n in (name, f"{title.lower()}.{name}", *more)), **kw)
    g = section("Data")
    g("datafile", default="./input_data/processed_uniref50.pt", help="prepared folder, or FASTA, text, .pt")
    g("cache_dir", default="./cache", help="where a file is prepared")
    g("val_ratio", type=float, default=0.05, help="share of the sequences held out, by their hash (when preparing)")
    g("max_protein_len", type=int, default=512, help="tokens of a row, BOS and EOS among them; longer ones are cropped")
    g("skip_bad_data", help="leave out damaged records and list them (when preparing)", **FLAG)
    g("verify_data", help="read the prepared arrays through before training", **FLAG)
    g = section("Model")
    g("hidden_size", type=int, default=768, help="width")
    g("n_blocks_prot", type=int, default=8, help="transformer blocks")
    g("n_heads", type=int, default=12, help="attention heads")
    g("cond_dim", type=int, default=256, help="width of the noise embedding")
    g("dropout", type=float, default=0.1, help="after attention and MLP")
    g("time_conditioning", help="False: the network does not see the noise level (absorb)", **FLAG | {"default": True})
    g = section("Diffusion")
    g("graph_type", "graph.type", default="absorb", choices=("absorb", "uniform"), help="masked, or replaced, residues")
    g("loss", default="nelbo", choices=("nelbo", "score_entropy"), help="softmax over residues, or free scores")
    g("noise_type", "noise.type", default="loglinear", choices=("loglinear", "cosine", "geometric"), help="schedule")
    g("sigma_min", "noise.sigma_min", type=float, default=1e-4, help="total noise at time 0 (cosine, geometric)")
    g("sigma_max", "noise.sigma_max", type=float, default=20.0, help="total noise at time 1 (cosine, geometric)")
    g("noise_eps", "noise.eps", type=float, default=1e-3, help="share not masked at time 1 (loglinear)")
    g = section("Curriculum")
    g("use_curriculum", "curriculum.enabled", help="early times first; the loss is no bound meanwhile", **FLAG)
    g("preschool_time", type=int, default=10_000, help="optimizer steps until all times are equal")
    g("difficulty_ramp", default="linear", choices=("linear", "exponential", "cosine"), help="how they become so")
    g("bias_strength", type=float, default=2.0, help="time = u^(1 + strength * what is left of the ramp)")
    g = section("Training")
    g("batch_size", type=int, default=16, help="rows of max_protein_len tokens per GPU, shared by short sequences")
    g("n_iters", "lr_schedule.max_steps", type=int, default=500_000, help="optimizer steps at most")
    g("epochs", type=int, default=50, help="passes over the data at most")
    g("max_samples", type=int, default=50_000_000, help="sequences of the training split at most")
    g("num_workers", type=int, default=4, help="threads that make batches ahead (0: none)")
    g("ema", type=float, default=0.9995, help="decay of the averaged weights that are validated and sampled")
    g("snapshot_sampling", help="draw samples at every evaluation", **FLAG | {"default": True})
    g("eval_freq", type=int, default=2000, help="optimizer steps between evaluations")
    for name, dest in ("accum", "accumulation"), ("log_freq", "log_every"), ("snapshot_freq", "save_every"):
        g(name, dest=dest, type=int, default=argparse.SUPPRESS, help=f"= --{dest}")
    p.add_argument("--training.seed", dest="seed", type=int, default=argparse.SUPPRESS, help="= --seed")
    g = section("Optim")
    g("optimizer", default="AdamW", choices=("AdamW", "Adam", "Muon"), help="Muon: for matrices, AdamW for the rest")
    g("lr", type=float, default=5e-5, help="peak learning rate on one GPU (see --lr_scaling)")
    g("warmup", "lr_schedule.warmup_steps", type=int, default=5000, help="warm-up on one GPU, in optimizer steps")
    g("min_lr_ratio", "lr_schedule.min_lr_ratio", type=float, default=0.01, help="last learning rate over the peak")
    g("schedule", "lr_schedule.type", default="cosine", help="after the warm-up",
      choices=("cosine", "linear", "constant", "cosine_with_warmup"))
    g("weight_decay", type=float, default=0.01, help="none on biases, norms and embeddings")
    g("beta1", type=float, default=0.9, help="Adam's, and Muon's momentum of 0.95 aside")
    g("beta2", type=float, default=0.999, help="Adam's")
    g("adam_eps", "optim.eps", type=float, default=1e-8, help="Adam's")
    g("grad_clip", dest="max_grad_norm", type=float, default=argparse.SUPPRESS, help="= --max_grad_norm")
    g = section("Memory")
    g("gradient_checkpointing", help="compute activations twice instead of keeping them", **FLAG)
    g("max_memory_per_gpu", type=float, default=0.85, help="share of a GPU's memory that a rank may take")
    g = section("Eval")
    g("eval_batch_size", "eval.batch_size", type=int, default=16, help="sequences per evaluation or sampling batch")
    g("eval_sequences", type=int, default=2000, help="held-out sequences that are validated on")
    g("eval_draws", type=int, default=2, help="noise draws of each for the bound")
    g = section("Sampling")
    g("sampling_method", "method", default="rigorous", choices=("rigorous", "simple"), help="exact, or fast")
    g("predictor", choices=("first_hitting", "analytic"), help="rigorous: which [default: first_hitting if absorb]")
    g("steps", default=100, type=int, help="sampling steps (analytic and simple)")
    g("sample", type=int, default=0, help="do not train: draw so many sequences from --checkpoint into --out")
    g("samples_per_eval", type=int, default=16, help="sequences drawn at an evaluation")
    g("sample_length", type=int, default=0, help="residues of a sample (0: lengths as in the training data)")
    g("infill", help="FASTA whose '?' are to be filled in, instead of sampling from nothing")
    g("temperature", type=float, default=1.0, help="of the network's predictions (1: exact)")
    g("top_p", type=float, default=1.0, help="sample from the likeliest residues of so much probability (1: exact)")
    g("checkpoint", help="weights for --sample [default: OUTPUT_DIR/best.pt]")
    g("out", help="file of --sample [default: OUTPUT_DIR/samples.fasta]")
    g("prepare", nargs=2, metavar=("IN", "OUT"), help="do not train: read IN, write the folder OUT")
    for said in (f"{name} ({why})" for names, why in REFUSED.items() for name in names.split()):
        p.add_argument(f"--{said.split()[0]}", dest="refused", action="append", type=lambda _, said=said: said,
                       default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    add_ddp_arguments(p, output_dir="./experiments_ddp", wandb_project="uniref50-sedd-ddp")
    p.add_argument("--work_dir", dest="output_dir", default=argparse.SUPPRESS, help="= --output_dir")
    p.set_defaults(accumulation=4, lr_scaling="linear", log_every=100, save_every=2000, seed=42, max_grad_norm=1.0)
    args = parse_arguments(p, argv)
    above_0 = ("batch_size n_iters epochs max_samples eval_freq hidden_size n_blocks_prot n_heads cond_dim lr "
               "sigma_min eval_batch_size eval_sequences eval_draws steps samples_per_eval preschool_time").split()
    up_to_1, rates = ("val_ratio", "top_p", "max_memory_per_gpu", "noise_eps"), ("dropout", "ema")
    from_0, uniform = ("temperature", "sample", "sample_length", "num_workers"), args.graph_type == "uniform"
    refused = {
        "not taken: " + "; ".join(getattr(args, "refused", ())): hasattr(args, "refused"),
        **{f"--{n} {getattr(args, n)} must be above 0": getattr(args, n) <= 0 for n in [*above_0, *up_to_1]},
        **{f"--{n} {getattr(args, n)} must be at most 1": getattr(args, n) > 1 for n in up_to_1},
        **{f"--{n} {getattr(args, n)} must be from 0 to below 1": not 0 <= getattr(args, n) < 1 for n in rates},
        f"--hidden_size {args.hidden_size} must be {args.n_heads} heads times an even number":
            args.hidden_size % max(2, 2 * args.n_heads) != 0,
        f"--max_protein_len {args.max_protein_len} must be at least 8": args.max_protein_len < 8,
        f"--cond_dim {args.cond_dim} must be even": args.cond_dim % 2 > 0,
        **{f"--{n} {getattr(args, n)} must not be negative": getattr(args, n) < 0 for n in from_0},
        f"--sigma_max {args.sigma_max} must be above --sigma_min {args.sigma_min}": args.sigma_max <= args.sigma_min,
        "--graph_type uniform needs --time_conditioning: replaced residues do not show":
            uniform and not args.time_conditioning,
        "--graph_type uniform has the analytic sampler only":
            uniform and (args.sampling_method == "simple" or args.predictor == "first_hitting"),
        "--graph_type uniform with --loss score_entropy has no sampler: --snapshot_sampling=False":
            uniform and args.loss == "score_entropy" and args.snapshot_sampling,
        "--infill, --checkpoint and --out belong to --sample": not args.sample and bool(
            args.infill or args.checkpoint or args.out),
        "--sample and --prepare: one of the two": bool(args.sample and args.prepare)}
    for message in (m for m, wrong in refused.items() if wrong):
        p.error(message)
    args.lr_scaling = "none" if args.global_batch_size else args.lr_scaling  # as the batch, it does not grow
    args.schedule = args.schedule.removesuffix("_with_warmup")
    return args

# ---- Data ----------------------------------------------------------------------------------------

CHUNK_BYTES = 4 << 20  # what a worker gets at a time; a longer record comes whole
INLINE_CHUNKS = 24  # before workers are started, which takes some seconds: they import this file
SPLITS = ("train", "valid")
UPPER = bytes(ord(chr(c).upper()) if chr(c).upper() in RESIDUES + "*" else ord("?") for c in range(256))
TO_TOKENS = bytes(("<.>.." + RESIDUES).find(chr(c)) % 256 for c in range(256))  # '<': BOS, '>': EOS, '?': 255

class Source:
    """What --prepare reads, known by content: FASTA, text with a sequence per line (both also gz), torch.save's."""
    def __init__(self, name: str):
        """Raises ValueError where there is no such file or its content is none of these."""
        self.name, self.damage, self.form = name, "", "text"  # or fasta, or list: a line for each of its entries
        if not Path(name).is_file():
            raise ValueError(f"{name}: no such file; expected FASTA, text with a sequence per line, or .pt")
        head = next(self.blocks(1 << 16), b"")
        if head.startswith((b"PK\3\4", b"\x80")):  # zip, pickle
            self.form = "list"
        elif not head.strip() or b"\0" in head and not head.strip().startswith(b">"):
            raise ValueError(f"{name}: found {head[:16]!r}; expected FASTA or text, plain or whole gz, or a torch file")
        elif b"\n>" in b"\n" + head:
            self.form = "fasta"
    def read(self, size: int) -> bytes:
        data = self.file.read(size)
        self.digest.update(data)
        self.size, StepGuard.beat = self.size + len(data), time.monotonic()
        return data
    def blocks(self, most: int) -> Iterator[bytes]:
        """The content, unzipped; sets `size`, `digest`, and `damage` of gz data that end early. ValueError: corrupt."""
        self.size, self.digest = 0, hashlib.sha256()
        try:
            with open(self.name, "rb") as self.file:
                read = gzip.GzipFile(fileobj=self).read1 if self.file.peek(2).startswith(b"\x1f\x8b") else self.read
                yield from iter(lambda: read(most), b"")
        except EOFError as error:
            self.damage = f"the gz data are truncated ({error}): fetch the file again"
        except (zlib.error, gzip.BadGzipFile) as error:  # what came before may be wrong too
            raise ValueError(f"{self.name}: the gz data are corrupt ({error}): fetch the file again") from error
    def chunks(self) -> Iterator[bytes]:
        """The content in parts that end where a record ends."""
        held, mark = bytearray(), b"\n>" if self.form == "fasta" else b"\n"
        for block in self.entries() if self.form == "list" else self.blocks(min(CHUNK_BYTES, 1 << 17)):
            held += block
            if len(held) >= CHUNK_BYTES and (end := held.rfind(mark) + 1):
                yield bytes(memoryview(held)[:end])
                del held[:end]
        if self.damage:
            del held[held.rfind(mark) + 1 :]  # a record that is not whole
        if held:
            yield bytes(held)
    def entries(self) -> Iterator[bytes]:
        """A line for each entry of the list in a torch file: str, or dict with one or with ids. ValueError: no list."""
        collections.deque(self.blocks(CHUNK_BYTES), 0)  # for the file's size and digest
        try:
            data = torch.load(self.name, map_location="cpu", weights_only=True)  # noqa: TID251  not a checkpoint
        except Exception as error:  # torch raises five kinds
            raise ValueError(f"{self.name}: {str(error).splitlines()[0][:120]}; expected a list in a whole file that "
                             "loads with weights_only=True") from error
        if isinstance(data, dict):
            data = data.get("sequences", data.get("data", f"a dict of {sorted(map(str, data))[:8]}"))
        if not isinstance(data, list):
            raise ValueError(f"{self.name}: {data!r:.200}; expected a list, or a dict with one as sequences or data")
        keys = ("protein_seq", "sequence", "text", "prot_tokens")
        letters = np.frombuffer(b"   ??" + RESIDUES.encode() + b"?", np.uint8)  # of ids; spaces: BOS, PAD and EOS
        for entry in data:
            if isinstance(entry, dict):
                entry = next((entry[key] for key in keys if isinstance(entry.get(key), (str, Tensor))), "")
            if isinstance(entry, Tensor):
                entry = letters[entry.long().flatten().clamp(-1, LAST + 1).numpy()].tobytes().decode().strip()
            yield (entry.replace("\n", "") if isinstance(entry, str) else "").encode("utf-8", "replace") + b"\n"

def encode_chunk(data: bytes, form: str, val_ratio: float) -> tuple[list[tuple], list[tuple[int, str]], int, int]:
    """The records in `data`, split by their hash: tokens, lengths with BOS and EOS, counts of letters (26,) per split;
    (line from 0, what is wrong) of the others; lines and bytes. A few calls per record, none per residue."""
    lines, size, before = np.count_nonzero(np.frombuffer(data, np.uint8) == ord("\n")), len(data), b""
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n").rstrip(b"\r")
    if form == "fasta":
        before, *records = (b"\n" + data).split(b"\n>")
        bodies = [text.partition(b"\n")[2].translate(UPPER, b"\n \t").removesuffix(b"*") for text in records]
    else:
        records = data.removesuffix(b"\n").split(b"\n")
        bodies = [text.strip().translate(UPPER).removesuffix(b"*") for text in records]
    tokens = np.frombuffer((b"<" + b"><".join(bodies) + b">").translate(TO_TOKENS), np.uint8)
    lengths = np.array([*map(len, bodies)], np.int64) + 2
    offsets = np.append(0, np.cumsum(lengths))
    hashes = np.frombuffer(b"".join(hashlib.blake2b(body, digest_size=8).digest() for body in bodies), ">u8")
    group = np.where(lengths == 2, 2, hashes / 2.0**64 < val_ratio)  # 0 train, 1 valid, 2 left out
    group[np.searchsorted(offsets, np.flatnonzero(tokens > LAST), "right") - 1] = 2
    problems = list(describe(before, records, group, form)) if (group == 2).any() or before.strip() else []
    parts, splits = ([], [], []), []
    for a, b in itertools.pairwise(np.flatnonzero(np.diff(group, prepend=-1, append=-1))):  # runs that go the same way
        parts[group[a]].append(tokens[offsets[a] : offsets[b]])
    for kind in range(2):
        kept = b"".join(parts[kind])
        pairs = np.frombuffer(kept + b"\0" * (len(kept) % 2), np.uint16)  # as bincount widens what it counts to int64
        counts = np.bincount(pairs, minlength=1 << 16).reshape(256, 256)
        splits.append((kept, lengths[group == kind], (counts.sum(0) + counts.sum(1))[FIRST : LAST + 1]))
    return splits, problems, lines, size

def describe(before: bytes, records: list[bytes], group: np.ndarray, form: str) -> Iterator[tuple[int, str]]:
    """(line in the chunk, what is wrong) of the records in group 2. `before`: what stands before the first header."""
    line, fasta, good = before.count(b"\n"), form == "fasta", (RESIDUES + RESIDUES.lower()).encode()
    right = "expected letters, and '*' only at a sequence's end"
    right += ", in a str or as protein_seq, sequence, text or prot_tokens of a dict" * (form == "list")
    if text := before.strip():
        yield before[: before.index(text)].count(b"\n") - 1, f"{text[:40]!r} before the first '>'; expected a header"
    for entry, bad in zip(records, group == 2, strict=True):
        body = entry.partition(b"\n")[2] if fasta else entry.strip()
        if bad and (body or form != "text"):  # empty lines of a text are fine
            wrong = body.rstrip().removesuffix(b"*").translate(None, good + b" \t" * fasta)
            first = wrong.lstrip(b"\n").partition(b"\n")[0]  # line with a wrong character
            found = "".join(dict.fromkeys(first.decode("utf-8", "backslashreplace")))[:12]
            what = f"{found!r} among the residues" if found else "no residues"
            yield line + (1 + wrong.index(first) if fasta and found else 0), f"{what}; {right}"
        line += entry.count(b"\n") + 1

def follow_parent() -> None:
    """A worker's start: Ctrl-C is its parent's to handle, and it ends where its parent was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True).start()

def run_ahead(pool, function: Callable, items: Iterable, count: int) -> Iterator:
    """function(item) of each item, in order, up to `count` of them ahead of the reader in `pool`."""
    ahead = collections.deque()
    for item in items:
        ahead.append(pool.submit(function, item))
        if len(ahead) > count:
            yield ahead.popleft().result()
    yield from (task.result() for task in ahead)

def encode_all(reader: Source, val_ratio: float, workers: int) -> Iterator[tuple]:
    """encode_chunk of each chunk, in order; in this process (`workers` 0 or 1), or all but the first in `workers`."""
    chunks, encode = reader.chunks(), functools.partial(encode_chunk, form=reader.form, val_ratio=val_ratio)
    yield from map(encode, itertools.islice(chunks, INLINE_CHUNKS if workers > 1 else None))
    if first := list(itertools.islice(chunks, 1)):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        with ProcessPoolExecutor(workers, context, follow_parent) as pool:
            yield from run_ahead(pool, encode, itertools.chain(first, chunks), workers + 2)

def prepare(source: str, folder: str, args: Namespace) -> None:
    """Read `source` (see Source) once, with --num_workers processes beside this one, and write the folder that Proteins
    opens. --skip_bad_data lists damaged records in skipped_records.txt. Raises ValueError for them or an empty split,
    OSError where the disk is full; `folder` then is as it was. (rank 0 only)"""
    start, reader, folder = time.monotonic(), Source(source), Path(folder).resolve()
    if folder.exists() and not (folder / "manifest.json").exists() and (folder.is_file() or any(folder.iterdir())):
        raise ValueError(f"{folder} holds something else than prepared data: give another folder")
    for old in folder.parent.glob(f".{folder.name}.*.tmp"):
        warn(f"{old} is left of a run that was killed: delete it, unless another run is writing it now")
    temporary, replaced = (folder.with_name(f".{folder.name}.{os.urandom(4).hex()}.{kind}") for kind in ("tmp", "old"))
    try:
        temporary.mkdir(parents=True)
        manifest = write_splits(reader, temporary, args)
        (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1))
        for path in temporary.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        if folder.exists():
            folder.rename(replaced)
        temporary.rename(folder)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            error.strerror += f" in {folder.parent}: prepared data take a byte per residue and 10 per sequence"
        raise
    finally:
        if replaced.exists() and not folder.exists():
            replaced.rename(folder)
        for path in (temporary, replaced):
            shutil.rmtree(path, ignore_errors=True)
    if manifest["skipped"]:
        warn(f"left out {manifest['skipped']} damaged records, listed in {folder / 'skipped_records.txt'}")
    train, valid = (manifest["splits"][split]["sequences"] for split in SPLITS)
    seconds = time.monotonic() - start
    log0(f"prepared {folder}: {train} sequences to train on, {valid} held out, lengths {manifest['min_length']} to "
         f"{manifest['max_length']}, mean {manifest['mean_length']:.1f}; {seconds:.1f} s, "
         f"{manifest['source']['text_bytes'] / 1e6 / seconds:.1f} MB/s, {(train + valid) / seconds:.0f} sequences/s")

def write_splits(reader: Source, folder: Path, args: Namespace) -> dict:
    """Write tokens, offsets and skipped_records.txt; the manifest of them. Raises ValueError as prepare."""
    sizes, text, skipped, (unit, line) = [0, 0], 0, 0, ("index", 0) if reader.form == "list" else ("line", 1)
    letters, lengths = np.zeros((2, STATES), np.int64), [collections.Counter(), collections.Counter()]
    with contextlib.ExitStack() as stack:
        files = [[stack.enter_context(open(folder / f"{s}.{k}", "wb")) for k in ("tokens", "offsets")] for s in SPLITS]
        listing = stack.enter_context(open(folder / "skipped_records.txt", "w+", encoding="utf-8"))
        for _, offsets in files:
            offsets.write(np.zeros(1, np.int64))
        for splits, problems, lines, size in encode_all(reader, args.val_ratio, args.num_workers):
            for i, (tokens, counts, found) in enumerate(splits):
                files[i][0].write(tokens)
                files[i][1].write(sizes[i] + np.cumsum(counts, dtype=np.int64))
                lengths[i].update((counts - 2).tolist())
                sizes[i] += len(tokens)
                letters[i] += found
            listing.writelines(f"{unit} {line + n}: {what}\n" for n, what in problems)
            skipped, line, text = skipped + len(problems), line + lines, text + size
        listing.write(f"line {line}: {reader.damage}\n" * bool(reader.damage))
        skipped += bool(reader.damage)
        listing.seek(0)
        if skipped and not args.skip_bad_data:
            shown = "  ".join(["", *itertools.islice(listing, 20)]) + f"  ... and {skipped - 20} more" * (skipped > 20)
            raise ValueError(f"{reader.name}: {skipped} damaged records (--skip_bad_data leaves them out):\n{shown}")
    number = [counter.total() for counter in lengths]
    if not all(number):
        raise ValueError(f"{reader.name}: {number[0]} sequences to train on, {number[1]} held out; expected some of "
                         "both: give more, or another --val_ratio")
    splits = {split: {"sequences": number[i], "residues": sizes[i] - 2 * number[i], "letters": letters[i].tolist(),
                      "lengths": dict(sorted(lengths[i].items())),
                      "bytes": {"tokens": sizes[i], "offsets": 8 * number[i] + 8}} for i, split in enumerate(SPLITS)}
    source = {"name": Path(reader.name).name, "bytes": reader.size, "sha256": reader.digest.hexdigest()}
    return {"format": 1, "val_ratio": args.val_ratio, "source": source | {"text_bytes": text}, "skipped": skipped,
            "splits": splits, "min_length": min(map(min, lengths)), "mean_length": sum(sizes) / sum(number) - 2,
            "max_length": max(map(max, lengths))}

class Proteins:
    """One split of a prepared folder, memory-mapped, so open at once. `part`: what the `manifest` says of it."""
    def __init__(self, folder: str | Path, split: str, verify: bool = False):
        """`verify`: read all of it. Raises ValueError with file, found and expected where it is damaged."""
        try:
            self.manifest = json.loads((Path(folder) / "manifest.json").read_text())
            self.part = self.manifest["splits"][split]
            paths = {kind: Path(folder) / f"{split}.{kind}" for kind in self.part["bytes"]}
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"{folder}: no prepared data ({error}): make them with --prepare IN {folder}") from error
        for path, right in zip(paths.values(), self.part["bytes"].values(), strict=True):
            if (found := path.stat().st_size if path.exists() else "no") != right:
                raise ValueError(f"{path}: {found} bytes, {right} expected: prepare the data again")
        self.tokens = np.asarray(np.memmap(paths["tokens"], np.uint8, "r"))
        self.offsets = np.asarray(np.memmap(paths["offsets"], np.int64, "r"))
        for low in range(0, len(self) if verify else 0, 1 << 16):
            ends = self.offsets[low : low + (1 << 16) + 1]
            marks = np.flatnonzero(~is_residue(self.tokens[ends[0] : ends[-1]])) + ends[0]
            whole = np.array_equal(marks, np.stack([ends[:-1], ends[1:] - 1], 1).ravel()) and (np.diff(ends) >= 3).all()
            if not whole or self.tokens[marks[::2]].any() or (self.tokens[marks[1::2]] != EOS).any():
                raise ValueError(f"{folder}: {split} sequences {low} to {low + len(ends) - 2} are damaged, expected "
                                 f"{BOS}, ids {FIRST} to {LAST}, {EOS} in each: prepare the data again")
    def __len__(self) -> int:
        return len(self.offsets) - 1
    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """Tokens of the given sequences (B,) int64, with BOS and EOS."""
        return self.offsets[rows + 1] - self.offsets[rows]
    def rows(self, rows: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
        """Tokens start to start + length of sequences, (B, longest) uint8, padded. IndexError where there are none."""
        if min(rows.min(), start.min(), length.min()) < 0 or (start + length > self.lengths(rows)).any():
            raise IndexError("tokens outside of their sequence")
        inside = np.arange(length.max()) < length[:, None]
        places = np.where(inside, (self.offsets[rows] + start)[:, None] + np.arange(length.max()), 0)
        return np.where(inside, self.tokens[places], np.uint8(PAD))
    def crops(self, rows: np.ndarray, most: int, seed: int, epoch: int) -> tuple[np.ndarray, ...]:
        """(start, length, residues), each (B,) int64, of what is taken: all, or `most` tokens from a random place."""
        whole = self.lengths(rows)
        length = np.minimum(whole, most)
        place = keyed_uniform(seed, epoch, torch.from_numpy(rows), 1, stream=1)[:, 0].double().numpy()
        start = (place * (whole - length + 1)).astype(np.int64)
        return start, length, length - (start == 0) - (start + length == whole)  # BOS and EOS stand at the ends
    def some(self, most: int) -> list[np.ndarray]:
        """Residues, without BOS and EOS, of up to `most` sequences, evenly spaced."""
        rows = np.linspace(0, len(self) - 1, min(len(self), most)).astype(np.int64)
        return [self.tokens[self.offsets[i] + 1 : self.offsets[i + 1] - 1] for i in rows]

def load_data(args: Namespace, ddp: DDPContext) -> tuple[Proteins, Proteins]:
    """Training and validation split of --datafile, prepared by rank 0 if it is no folder. (all ranks)"""
    path = folder = Path(args.datafile)
    if not path.exists():
        raise ValueError(f"--datafile {path}: no such file or folder. UniRef50 is published at {PUBLISHED}; then"
                         "\n  python run_train_uniref50_ddp.py --prepare uniref50.fasta.gz ./input_data/uniref50\n"
                         "and --datafile ./input_data/uniref50")
    if not path.is_dir():
        key = [1, str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns, args.val_ratio, args.skip_bad_data]
        folder = Path(args.cache_dir) / f"uniref50-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}"
        if not on_rank0(ddp, (folder / "manifest.json").exists):
            on_rank0(ddp, prepare, args.datafile, folder, args)
    train, valid = (Proteins(folder, split, args.verify_data) for split in SPLITS)
    if "val_ratio" in args.given and train.manifest["val_ratio"] != args.val_ratio:
        raise ValueError(f"--val_ratio {args.val_ratio}: {folder} was prepared with {train.manifest['val_ratio']}")
    args.data_key = hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()[:16]
    require_same(ddp, "the training data", args.data_key.encode())
    log0(f"data: {len(train)} sequences to train on, {len(valid)} held out")
    return train, valid

def bucket_by_tokens(lengths: Callable, mean_items: int, least: int, seed: int) -> Callable:
    """A `cut` for GlobalBatchSampler: batches of similar lengths(ids), nearly equal numbers of tokens with padding, in
    random order, `mean_items` items on average and never fewer than `least`."""
    def cut(ids: np.ndarray, epoch: int) -> list[np.ndarray]:
        sizes, count = lengths(ids), len(ids) // mean_items
        order = np.argsort(sizes, kind="stable")
        sizes = padded = sizes[order]
        for _ in range(3):  # as padding depends on the cut
            total = np.cumsum(padded)
            ends = np.searchsorted(total, total[-1] * np.arange(1, count) / count) + 1
            ends = np.minimum(ends, len(ids) - least * np.arange(count - 1, 0, -1))  # longest last: few in a batch
            edges = np.r_[0, ends, len(ids)]
            padded = np.repeat(sizes[edges[1:] - 1], np.diff(edges))
        batches = np.split(ids[order], ends)
        return [batches[i] for i in np.random.default_rng([seed, epoch, int(ids[0])]).permutation(count)]
    return cut

def deal_step(task: Task, sampler: GlobalBatchSampler, epoch: int, planned: tuple[int, np.ndarray]) -> tuple:
    """A step, the `planned` (number, sequences) of an epoch: this rank's micro-batches, of (sequences (B,), the same,
    tokens (B, L) int64 and places (B,) of their times in [0, 1) on the device, whether PAD occurs); residues and FLOPs
    of all ranks. The times are spread evenly, by shift and order alike on all (low-discrepancy, Kingma et al. 2021)."""
    args, device, (number, batch) = task.args, task.ddp.device, planned
    generator, micro = np.random.default_rng([args.seed, epoch, number]), []
    places = (generator.permutation(len(batch)) + generator.random()) / len(batch) % 1.0
    start, length, residues = task.train_set.crops(batch, args.max_protein_len, args.seed, epoch)
    for part in sampler.deal(np.arange(len(batch))):
        rows = task.train_set.rows(batch[part], start[part], length[part])
        tensors = [torch.from_numpy(array) for array in (batch[part], rows, places[part].astype(np.float32))]
        if device.type == "cuda":  # copies from pinned memory do not stop the host
            tensors = [tensor.pin_memory() for tensor in tensors]
        ids, tokens, spread = (tensor.to(device, non_blocking=True) for tensor in tensors)  # one byte per residue
        padded = bool((rows[:, -1] == PAD).any())  # without it the attention needs no mask, which may be faster
        micro.append((batch[part], ids, tokens.long(), spread, padded))
    return micro, int(residues.sum()), float(np.dot(task.model.flops, (length.sum(), (length**2).sum())))

# ---- Model ---------------------------------------------------------------------------------------

class Block(nn.Module):
    """Transformer block with adaptive layer norm (DiT, Peebles and Xie 2023): the identity at initialisation."""
    def __init__(self, width: int, heads: int, cond_dim: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.adapt = nn.Linear(cond_dim, 6 * width)
    def forward(self, x: Tensor, cond: Tensor, turns: Tensor, mask: Tensor | None) -> Tensor:
        """x (B, L, D), cond (B, C), turns (L, D / heads / 2, 2), mask (B, 1, 1, L): True where a key counts."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adapt(cond)[:, None].chunk(6, dim=-1)
        h = torch.addcmul(shift1, self.norm1(x), 1 + scale1)  # one pass over memory instead of two
        # q and k (2, B, heads, L, D / heads), v (1, ...); split, as indexing fills three gradients with zeros
        qk, v = self.qkv(h).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).split((2, 1))
        h = F.scaled_dot_product_attention(*rotate(qk, turns).unbind(0), v.squeeze(0), attn_mask=mask)
        x = torch.addcmul(x, gate1, self.drop(self.out(h.transpose(1, 2).flatten(2))))
        h = torch.addcmul(shift2, self.norm2(x), 1 + scale2)
        return torch.addcmul(x, gate2, self.drop(self.down(F.gelu(self.up(h)))))
    def drop(self, x: Tensor) -> Tensor:
        """Dropout. A CPU's generator is slow: one number there makes the 16 bits of four elements."""
        if not self.training or not self.dropout or x.device.type != "cpu":
            return F.dropout(x, self.dropout, self.training)
        bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
        keep = bits[: x.numel()].view(x.shape) >= round(65536 * self.dropout) - 32768
        return x * keep.to(x.dtype).mul_(1 / (1 - self.dropout))

def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021): pairs of x (..., L, E) turned by (cos, sin), turns (L, E / 2, 2)."""
    pairs = x.float().unflatten(-1, (-1, 2))
    if x.device.type == "cpu" and not torch.compiler.is_compiling():  # as complex numbers: one pass over memory
        pairs = torch.view_as_complex(pairs) * torch.view_as_complex(turns)
        return torch.view_as_real(pairs).flatten(-2).to(x.dtype)
    (a, b), (cos, sin) = pairs.unbind(-1), turns.unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2).to(x.dtype)

def keep_freed_memory() -> None:
    """Make glibc keep the memory of freed tensors for the next ones: fetching it can be half of a CPU's step."""
    import ctypes
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 2**31 - 1), mallopt(-1, 2**31 - 1)  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD

class Denoiser(nn.Module):
    """Logits of the original residues of noised sequences; the encoder of SEDD (Lou et al. 2024)."""
    def __init__(self, args: Namespace, dtype: torch.dtype):
        super().__init__()
        width, cond, self.waves = args.hidden_size, args.cond_dim, args.cond_dim // 2
        self.dtype, self.timed, self.recompute = dtype, args.time_conditioning, args.gradient_checkpointing
        self.embed = nn.Embedding(MASK + 1, width)
        self.noise_mlp = nn.Sequential(nn.Linear(cond, cond), nn.SiLU(), nn.Linear(cond, cond), nn.SiLU())
        blocks = (Block(width, args.n_heads, cond, args.dropout) for _ in range(args.n_blocks_prot))
        self.blocks, self.norm = nn.ModuleList(blocks), nn.LayerNorm(width, bias=False)
        self.adapt, self.head = nn.Linear(cond, 2 * width), nn.Linear(width, MASK + 1, bias=False)
        for name, parameter in self.named_parameters():  # at first blocks do nothing, all residues are equally likely
            if "adapt" in name or "head" in name:
                nn.init.zeros_(parameter)
        size = width // args.n_heads
        angles = torch.outer(torch.arange(args.max_protein_len), 1e4 ** (-torch.arange(0, size, 2) / size))
        self.register_buffer("turns", torch.stack([angles.cos(), angles.sin()], dim=-1), persistent=False)
        # FLOPs forward and backward per token, and per pair of tokens of a sequence; conditioning is once per sequence
        self.flops = 6.0 * width * (12 * width * args.n_blocks_prot + MASK + 1), 12.0 * width * args.n_blocks_prot
    def forward(self, tokens: Tensor, sigma: Tensor, padded: bool = True) -> Tensor:
        """tokens (B, L) int64, with PAD if `padded`, sigma (B,) -> logits (B, L, 37) float32, -inf but for residues."""
        with torch.autocast(tokens.device.type, self.dtype, enabled=self.dtype != torch.float32):
            frequencies = torch.exp(torch.arange(self.waves, device=sigma.device) * (-math.log(1e4) / self.waves))
            angles = (sigma if self.timed else torch.zeros_like(sigma))[:, None] * frequencies
            cond = self.noise_mlp(torch.cat([angles.cos(), angles.sin()], dim=-1))
            x, mask = self.embed(tokens), (tokens != PAD)[:, None, None, :] if padded else None
            turns = self.turns[: tokens.shape[1]]
            for block in self.blocks:
                if self.recompute and torch.is_grad_enabled():
                    x = torch.utils.checkpoint.checkpoint(block, x, cond, turns, mask, use_reentrant=False)
                else:
                    x = block(x, cond, turns, mask)
            shift, scale = self.adapt(cond)[:, None].chunk(2, dim=-1)
            logits = self.head(self.norm(x) * (1 + scale) + shift)
        return F.pad(logits[..., FIRST : LAST + 1].float(), (FIRST, MASK - LAST), value=-math.inf)

def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """The rate of a large matrix product here, FLOPs a second: what mfu is measured against."""
    size = 1024 if device.type == "cpu" else 8192
    a = torch.ones(size, size, device=device, dtype=dtype)  # random numbers would move the state of dropout
    return 2 * size**3 / min(timeit.repeat(lambda: (a @ a)[0, 0].item(), number=1, repeat=4))

@torch.no_grad()
def update_ema(average: list[Tensor], parameters: list[Tensor], decay: float, step: int) -> None:
    """average = d * average + (1 - d) * parameters, d = min(decay, (1 + step) / (10 + step)), in a few kernels."""
    torch._foreach_lerp_(average, parameters, 1.0 - min(decay, (1 + step) / (10 + step)))

@contextlib.contextmanager
def averaged_weights(model: nn.Module, average: list[Tensor]) -> Iterator[None]:
    """The model in evaluation mode with the averaged weights."""
    parameters, training = [p.data for p in model.parameters()], model.training
    kept = [p.clone() for p in parameters]
    try:
        torch._foreach_copy_(parameters, average)
        yield model.eval()
    finally:
        torch._foreach_copy_(parameters, kept)
        model.train(training)

class Muon(torch.optim.AdamW):
    """AdamW, and for the groups with muon=True the orthogonalised momentum of Jordan et al. (2024), in AdamW's size of
    update, so that rate and decay mean the same (Liu et al. 2025). A non-finite step is skipped on the device."""
    @torch.no_grad()
    def step(self, closure=None) -> None:
        groups, bad = self.param_groups, self.found_inf
        self.param_groups = [g for g in groups if not g["muon"]]
        super().step(closure)
        self.param_groups = groups
        for group, p in ((g, p) for g in groups if g["muon"] for p in g["params"]):
            if not self.state[p]:
                self.state[p].update(momentum=torch.zeros_like(p), step=torch.zeros(()))  # AdamW asks for a step
            momentum = self.state[p]["momentum"]
            rate, gradient = group["lr"] * (1 - bad), torch.where(bad > 0, 0.0, p.grad)
            momentum.copy_(torch.where(bad > 0, momentum, 0.95 * momentum + gradient))
            x = 0.95 * momentum + gradient
            x = (x.mT if len(p) > p.shape[1] else x) / (x.norm() + 1e-7)
            for _ in range(5):  # Newton-Schulz steps to the nearest semi-orthogonal matrix, roughly
                square = x @ x.mT
                x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
            p.mul_(1 - rate * group["weight_decay"])
            p.sub_((x.mT if len(p) > p.shape[1] else x) * (0.2 * max(p.shape) ** 0.5 * rate))

def make_optimizer(model: nn.Module, args: Namespace, lr: float) -> torch.optim.Optimizer:
    """Fused, so that a non-finite update can be skipped on the device. No decay on biases, norms and embeddings."""
    groups = [{"weight_decay": 0.0, "muon": False}, {"muon": False}, {"muon": True}]
    for name, p in model.named_parameters():
        hidden = args.optimizer == "Muon" and name.startswith("blocks.") and "adapt" not in name
        groups[0 if p.ndim < 2 or "embed" in name else 1 + hidden].setdefault("params", []).append(p)
    kind = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam, "Muon": Muon}[args.optimizer]
    return kind([g for g in groups if "params" in g], lr=lr, betas=(args.beta1, args.beta2), eps=args.adam_eps,
                weight_decay=args.weight_decay, fused=True)

# ---- Loss ----------------------------------------------------------------------------------------

class Noise(collections.namedtuple("Noise", "kind low high eps")):
    """A noise schedule: a residue keeps its letter until time t in [0, 1] with probability exp(-sigma(t)). loglinear:
    all but `eps` are hidden at time 1; cosine, geometric: sigma(0) is `low`, sigma(1) `high`."""
    def at(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Total noise sigma at times t, and its slope d sigma / d t."""
        if self.kind == "loglinear":
            return -torch.log1p(-(1 - self.eps) * t), (1 - self.eps) / (1 - (1 - self.eps) * t)
        if self.kind == "cosine":
            span, angle = self.high - self.low, math.pi * t
            return self.low + span * (1 - torch.cos(angle)) / 2, span * torch.sin(angle) * math.pi / 2
        sigma = self.low ** (1 - t) * self.high**t
        return sigma, sigma * math.log(self.high / self.low)
    def sigma(self, t: Tensor) -> Tensor:
        return self.at(t)[0]
    def hidden(self, t: Tensor) -> Tensor:
        """Share of the residues that time t has masked (absorb) or drawn anew (uniform)."""
        return -torch.expm1(-self.sigma(t))
    def sigma_of(self, share: Tensor) -> Tensor:
        """Total noise where `share` of the residues is hidden, at most that of time 1."""
        top = self.sigma(torch.ones_like(share))
        return torch.minimum(-torch.log1p(-share.clamp(max=1 - 1e-7)), top)

def noised(tokens: Tensor, share: Tensor, draws: Tensor, graph: str, letters: Tensor | None = None) -> Tensor:
    """Residues hidden with probability `share` (B,): masked (absorb: q(x_t | x_0) = e^-sigma x_0 + (1 - e^-sigma) MASK)
    or drawn anew from all residues (uniform). tokens, and draws and letters in [0, 1), (B, L)."""
    hide = (draws < share[:, None]) & is_residue(tokens)
    if graph == "absorb":
        return tokens.masked_fill(hide, MASK)
    return torch.where(hide, FIRST + (letters * STATES).long().clamp(max=STATES - 1), tokens)

def is_residue(tokens: Tensor) -> Tensor:
    return (tokens >= FIRST) & (tokens <= LAST)

def cross_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    """-log softmax(logits) at the residues of tokens, (B, L), nats; what stands elsewhere does not count."""
    target = torch.where(is_residue(tokens), tokens, FIRST)
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view_as(tokens)

def nelbo_loss(logits: Tensor, tokens: Tensor, noisy: Tensor, sigma: Tensor, slope: Tensor) -> Tensor:
    """The absorbing graph's bound with a softmax over residues (SUBS, Sahoo et al. 2024, eq. 10), per position (B, L):
    sigma' / (e^sigma - 1) times the cross entropy of the masked. logits (B, L, 37), sigma and its slope (B,)."""
    return torch.where(noisy == MASK, cross_entropy(logits, tokens) * (slope / torch.expm1(sigma))[:, None], 0.0)

def log_scores(logits: Tensor, noisy: Tensor, sigma: Tensor, graph: str, loss: str) -> Tensor:
    """log of the ratios p_t(y) / p_t(x_t) at residues y, (B, L, 26). score_entropy: exp(logits); nelbo: q(y | x_0) over
    q(x_t | x_0), its mean over softmax(logits) = p(x_0 | x_t), absorb: p(y). absorb: times r = 1 / (e^sigma - 1)."""
    logits = logits[..., FIRST : LAST + 1]
    if graph == "absorb":
        return (logits.log_softmax(-1) if loss == "nelbo" else logits) - torch.log(torch.expm1(sigma))[:, None, None]
    if loss == "score_entropy":
        return logits
    p, keep = logits.softmax(-1), torch.exp(-sigma)[:, None, None]
    other = (1 - keep) / STATES  # q(y | x_0) for y != x_0
    here = p.gather(-1, (noisy - FIRST).clamp(0, STATES - 1)[..., None])
    return torch.log(here * other / (other + keep) + (1 - here) + p * keep / other)

def score_entropy_loss(scores: Tensor, tokens: Tensor, noisy: Tensor, sigma: Tensor, slope: Tensor, graph) -> Tensor:
    """Score entropy (Lou et al. 2024, eq. 8 with K(a) = a log a - a), per position (B, L), nats. scores: log_scores."""
    target = (tokens - FIRST).clamp(0, STATES - 1)[..., None]
    if graph == "absorb":
        log_r = -torch.log(torch.expm1(sigma))[:, None]
        value = scores.exp().sum(-1) - log_r.exp() * (scores.gather(-1, target)[..., 0] - log_r + 1)
        return torch.where(noisy == MASK, value * slope[:, None], 0.0)
    keep = torch.exp(-sigma)[:, None, None]
    other, original = (1 - keep) / STATES, torch.zeros_like(scores).scatter(-1, target, 1.0)
    here = (noisy - FIRST).clamp(0, STATES - 1)[..., None]
    ratio = (other + keep * original) / (other + keep * original.gather(-1, here))  # q(y | x_0) / q(x_t | x_0)
    value = (scores.exp() - ratio * (scores - ratio.log() + 1)).scatter(-1, here, 0.0).sum(-1) / STATES
    return torch.where(is_residue(tokens), value * slope[:, None], 0.0)

def diffusion_loss(task: Task, model, ids: Tensor, tokens: Tensor, times: Tensor, key: tuple, padded=True) -> Tensor:
    """The training bound per position (B, L), nats, of tokens (B, L) at `times` (B,), with noise by `key` (seed, epoch)
    and `ids` (B,): its sum over positions bounds -log p in expectation over time."""
    graph, loss, (sigma, slope) = task.args.graph_type, task.args.loss, task.noise.at(times)
    draw = functools.partial(keyed_uniform, *key, ids, tokens.shape[1])
    noisy = noised(tokens, task.noise.hidden(times), draw(2), graph, draw(3) if graph == "uniform" else None)
    logits = model(noisy, sigma, padded)
    if graph == "absorb" and loss == "nelbo":
        return nelbo_loss(logits, tokens, noisy, sigma, slope)
    scores = log_scores(logits, noisy, sigma, graph, loss)
    return score_entropy_loss(scores, tokens, noisy, sigma, slope, graph)

def training_times(places: Tensor, step: int, args: Namespace) -> Tensor:
    """Times (B,) in (0, 1] of `places` in [0, 1); with the curriculum early ones first: u^(1 + strength * rest)."""
    u = 1e-3 + (1 - 1e-3) * places  # no weight above 1 / 0.001
    if not args.use_curriculum or step >= args.preschool_time:
        return u
    done = step / args.preschool_time
    rest = {"linear": 1 - done, "exponential": math.exp(-3 * done), "cosine": 0.5 + 0.5 * math.cos(math.pi * done)}
    return u ** (1 + args.bias_strength * rest[args.difficulty_ramp])

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

def hide_exactly(tokens: Tensor, share: Tensor, draws: Tensor) -> Tensor:
    """tokens (B, L) with ceil(share * n) of each row's n residues masked: those with the smallest draws (B, L)."""
    free = is_residue(tokens)
    rank = draws.masked_fill(~free, 2.0).argsort(dim=1, stable=True).argsort(dim=1, stable=True)
    return tokens.masked_fill(free & (rank < torch.ceil(share * free.sum(1))[:, None]), MASK)

def bound(task: Task, ids: Tensor, tokens: Tensor, draw: int) -> Tensor:
    """Draw `draw` of the bound on -log p of sequences `ids` (B,), float64 nats. absorb: n / k times the cross entropy
    of k hidden residues, k uniform in 1 to n: an order-agnostic model's bound (Uria et al. 2014; Hoogeboom et al. 2022)
    and the diffusion's, with less noise. uniform: score entropy over time, and time 1's divergence from uniform."""
    place = 1 - (ids.double() * 0.6180339887498949 + draw / task.args.eval_draws) % 1.0  # in (0, 1], even over them
    count = is_residue(tokens).sum(1)
    if task.args.graph_type == "absorb":
        noisy = hide_exactly(tokens, place.float(), keyed_uniform(0, draw, ids, tokens.shape[1], stream=2))
        hidden = noisy == MASK
        logits = task.model(noisy, task.noise.sigma_of(hidden.sum(1) / count))
        return torch.where(hidden, cross_entropy(logits, tokens), 0.0).double().sum(1) * count / hidden.sum(1)
    value = diffusion_loss(task, task.model, ids, tokens, place.float(), (0, draw))
    keep = math.exp(-float(task.noise.sigma(torch.ones(()))))
    other = (1 - keep) / STATES
    gap = (other + keep) * math.log(STATES * (other + keep)) + (STATES - 1) * other * math.log(STATES * other)
    return value.double().sum(1) + gap * count

def ratio(gram: np.ndarray, *weights: float) -> tuple[float, float]:
    """(sum of weights . row) / (sum of the last column) and its standard error, from gram = sum of row^T row over
    sequences. Rows are (1, ..., n): the first entry counts sequences, the last residues."""
    w, n = np.array(weights, np.float64), len(gram) - 1
    mean = gram[0] @ w / gram[0, n]
    w[n] -= mean
    return float(mean), float(math.sqrt(max(0.0, w @ gram @ w)) / gram[0, n])

@torch.no_grad()
def evaluate(task: Task) -> dict[str, float]:
    """Held-out metrics, nats per residue; fixed noise, each sequence once: the same on any world size. (all ranks)"""
    args, ddp, proteins, size = task.args, task.ddp, task.valid_set, task.args.eval_batch_size
    absorb = args.graph_type == "absorb"
    rows = np.linspace(0, len(proteins) - 1, min(len(proteins), args.eval_sequences)).astype(np.int64)
    rows = rows[np.argsort(proteins.lengths(rows), kind="stable")]  # batches of similar length
    shares = np.array(task.train_set.part["letters"]) + 0.5
    unigram = F.pad(torch.from_numpy(-np.log(shares / shares.sum())), (FIRST, MASK - LAST)).to(ddp.device)
    gram, entropies = unigram.new_zeros(4, 4), unigram.new_zeros(len(RATES), 2)
    for items in np.split(rows, range(size, len(rows), size))[ddp.rank :: ddp.world_size]:
        start, length, _ = proteins.crops(items, args.max_protein_len, 0, 0)
        tokens = torch.from_numpy(proteins.rows(items, start, length)).to(ddp.device).long()
        ids = torch.from_numpy(items).to(ddp.device)
        nats = torch.stack([bound(task, ids, tokens, d) for d in range(args.eval_draws)]).mean(0)
        count = is_residue(tokens).double().sum(1)
        row = torch.stack([torch.ones_like(nats), nats, unigram[tokens].sum(1), count], dim=1)
        gram += row.T @ row
        draws, letters = (keyed_uniform(0, 1000, ids, tokens.shape[1], stream=s) for s in (2, 3))
        for i, rate in enumerate(RATES if absorb or args.loss == "nelbo" else ()):  # else there is no p(x_0 | x_t)
            share = torch.full_like(nats, rate, dtype=torch.float32)
            noisy = hide_exactly(tokens, share, draws) if absorb else noised(tokens, share, draws, "uniform", letters)
            hidden = noisy == MASK if absorb else (draws < share[:, None]) & is_residue(tokens)
            found = torch.where(hidden, cross_entropy(task.model(noisy, task.noise.sigma_of(share)), tokens), 0.0)
            entropies[i] += torch.stack([found.double().sum(), hidden.double().sum()])
        StepGuard.beat = time.monotonic()
    sums = list(reduce_sums(ddp, dict(enumerate([*gram.flatten(), *entropies.flatten()]))).values())
    gram, entropies = np.reshape(sums[:16], (4, 4)), np.reshape(sums[16:], (-1, 2))
    (nelbo, error), (gain, gain_error) = ratio(gram, 0, 1, 0, 0), ratio(gram, 0, -1, 1, 0)
    metrics = {"nelbo": nelbo, "nelbo_se": error, "bits": nelbo / math.log(2), "perplexity": math.exp(nelbo),
               "unigram": ratio(gram, 0, 0, 1, 0)[0], "below_unigram": gain, "below_unigram_se": gain_error}
    return metrics | {f"ce@{r:g}": float(s / n) for r, (s, n) in zip(RATES, entropies, strict=True) if n}

TIMES, TOKENS, START, LENGTHS, ORDER = range(9001, 9006)  # streams of keyed_uniform, apart from those of training
SHUFFLE = 4.5  # random part of the simple sampler's order: as in MaskGIT it falls to 0 over the steps
# Samplers take predict(x (B, L) int64, sigma (B,) float32) -> logits (B, L, 37), -inf for all but residues, whose
# softmax is p(x0 | x); `free` (B, L): where x is to be drawn; `sigma` (steps + 1,) float64: noise at times 1 to 0.

def sample_uniform(seed: int, ids: Tensor, draws: int, stream: int, step: int = 0) -> Tensor:
    """(B, draws) float64 in [0, 1), a function of (seed, sample id, stream, step, draw) alone, so that neither batch,
    padding nor rank changes a sample. Of 48 bits, as 24 act as a lower temperature (Zheng et al. 2024)."""
    high, low = keyed_uniform(seed, step, ids, 2 * draws, stream).double().unflatten(1, (draws, 2)).unbind(2)
    return high + low / 2**24

def residue_probabilities(logits: Tensor, args: Namespace) -> Tensor:
    """logits (..., 37) -> (..., 26) float64, after --temperature, --top_p (Holtzman et al. 2020); need not sum to 1."""
    logits = logits[..., FIRST : LAST + 1].double()
    p = ((logits - logits.amax(-1, keepdim=True)) / max(args.temperature, 1e-300)).softmax(-1)  # 0: the most probable
    if args.top_p < 1:
        ranked, order = p.sort(dim=-1, descending=True, stable=True)
        tail = ranked.cumsum(-1) - ranked >= args.top_p * ranked.sum(-1, keepdim=True)
        p = torch.zeros_like(p).scatter(-1, order, ranked.masked_fill(tail, 0.0))
    return p

def categorical(p: Tensor, u: Tensor) -> Tensor:
    """Residue ids (...) drawn from p (..., 26) float64 by inverse CDF at u (...); LAST + 1 where p is not finite."""
    cdf = p.cumsum(-1)
    return FIRST + torch.searchsorted(cdf, u[..., None] * cdf[..., -1:], right=True).squeeze(-1)

def unmask(predict, x: Tensor, free: Tensor, ids: Tensor, sigma: Tensor, args: Namespace, grid: bool = True) -> Tensor:
    """Exact samplers of the absorbing graph. As a position stays masked from a mask rate m to m' < m with probability
    m' / m, it is revealed at a rate uniform on [0, m(1)], drawn first. first_hitting (Zheng et al. 2024) then makes a
    network call per rate. analytic (Lou et al. 2024, Tweedie) reveals what falls between two times of the grid
    together, independently, from the network's view at the earlier one; a step without any costs no call."""
    x, draws = x.clone(), sample_uniform(args.seed, ids, x.shape[1], TOKENS)
    rates = -torch.expm1(-sigma[0]) * sample_uniform(args.seed, ids, x.shape[1], TIMES)
    step_of = torch.searchsorted(torch.expm1(-sigma[1:-1]), -rates)  # minus the mask rate after each step but the last
    if not grid:
        step_of = rates.masked_fill(~free, -1.0).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    for k in step_of[free].unique().tolist():
        StepGuard.beat, chosen = time.monotonic(), free & (step_of == k)
        now = sigma[k].expand(len(x)) if grid else -torch.log1p(-rates.masked_fill(~chosen, 0.0).amax(1))
        p = residue_probabilities(predict(x, now.float())[chosen], args)
        x[chosen] = categorical(p, draws[chosen])
    return x

def uniform_posterior(p: Tensor, now: Tensor, keep_t: Tensor, keep_s: Tensor) -> Tensor:
    """p(x_s | x_t) (..., N) of the uniform graph from p (..., N) = p(x0 | x_t), now (...) = x_t, for s < t: a letter is
    kept to time t with probability a_t, else replaced by one of N, so q(x_t | x_s) = a [x_t = x_s] + (1 - a) / N with
    a = a_t / a_s, and by Bayes p(x_s = y | x_t) = q(x_t | y) (a_s w(y) + (1 - a_s) / N sum w), w = p / q(x_t | x0)."""
    same = torch.zeros_like(p).scatter(-1, now[..., None], 1.0)
    w = p / (keep_t * same + (1 - keep_t) / STATES)
    forward = keep_t / keep_s * same + (1 - keep_t / keep_s) / STATES
    return forward * (keep_s * w + (1 - keep_s) / STATES * w.sum(-1, keepdim=True))

def analytic_uniform(predict: Callable, x: Tensor, free: Tensor, ids: Tensor, sigma: Tensor, args: Namespace) -> Tensor:
    """Tweedie tau-leaping of the uniform graph: free positions start as random residues, and each step of the grid
    draws them all from p(x_s | x_t). The network reads given positions as noisy ones: infilling is approximate."""
    draw = functools.partial(sample_uniform, args.seed, ids, x.shape[1])
    x, keep = torch.where(free, FIRST + (draw(START) * STATES).long(), x), torch.exp(-sigma)
    keep[-1] = 1.0  # the last step ends at the data, also where the schedule leaves some noise at 0
    for k in range(args.steps):
        StepGuard.beat = time.monotonic()
        p = residue_probabilities(predict(x, sigma[k].float().expand(len(x))), args)
        p = uniform_posterior(p, (x - FIRST).clamp(0, STATES - 1), keep[k], keep[k + 1])
        x = torch.where(free, categorical(p, draw(TOKENS, k)), x)
    return x

def simple(predict: Callable, x: Tensor, free: Tensor, ids: Tensor, sigma: Tensor, args: Namespace) -> Tensor:
    """Confidence-ordered unmasking (MaskGIT, Chang et al. 2022) in --steps steps, an approximation: each step draws a
    candidate for every masked position and keeps the most probable ones, so many that cos(pi/2 k/steps) of the free
    positions are masked after step k. Gumbel noise on the order keeps letters varied; the law is not the model's."""
    count, steps, draw = free.sum(1), args.steps, functools.partial(sample_uniform, args.seed, ids, x.shape[1])
    shown, rate = torch.zeros_like(count), -torch.expm1(-sigma[0])
    for k in range(steps):
        goal = (count * (1 - math.cos(math.pi / 2 * (k + 1) / steps))).round().long()
        if torch.equal(goal, shown):
            continue
        StepGuard.beat = time.monotonic()
        logits = predict(x, -torch.log1p(-rate * math.cos(math.pi / 2 * k / steps)).float().expand(len(x)))
        token = categorical(residue_probabilities(logits, args), draw(TOKENS, k))
        # by the model's own probability: at temperature 0 the tempered one is 1 everywhere
        sure = logits.double().log_softmax(-1).gather(-1, token[..., None]).squeeze(-1)
        sure += -torch.log(-torch.log(draw(ORDER, k).clamp_min(1e-300))) * SHUFFLE * (1 - (k + 1) / steps)  # Gumbel
        place = sure.masked_fill(~free, -math.inf).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        chosen = free & (place < (goal - shown)[:, None])
        x, free, shown = torch.where(chosen, token, x), free & ~chosen, goal
    return x

SAMPLERS = {("absorb", "first_hitting"): functools.partial(unmask, grid=False), ("absorb", "simple"): simple,
            ("absorb", "analytic"): unmask, ("uniform", "analytic"): analytic_uniform}

@torch.no_grad()
def sample(predict: Callable, templates: list[np.ndarray], noise: Noise, args: Namespace, ddp: DDPContext) -> list:
    """Residue ids (uint8, without BOS and EOS) for each template (BOS, residues, MASK where to draw, EOS): each rank
    draws every W-th, all get all. Raises RuntimeError if the logits are not finite. (all ranks)"""
    exact = args.predictor or ("first_hitting" if args.graph_type == "absorb" else "analytic")
    sampler = SAMPLERS[args.graph_type, "simple" if args.sampling_method == "simple" else exact]
    sigma, done = noise.sigma(torch.linspace(1, 0, args.steps + 1, dtype=torch.float64)).to(ddp.device), {}
    mine = sorted(range(ddp.rank, len(templates), ddp.world_size), key=lambda i: len(templates[i]))  # little padding
    for low in range(0, len(mine), args.eval_batch_size):
        ids = mine[low : low + args.eval_batch_size]
        x = nn.utils.rnn.pad_sequence([torch.from_numpy(templates[i]).long() for i in ids], True, PAD).to(ddp.device)
        found = sampler(predict, x, x == MASK, torch.tensor(ids, device=ddp.device), sigma, args)
        if not is_residue(found[x == MASK]).all():
            raise RuntimeError(f"sampling: the network's logits are not finite (samples {ids[:10]})")
        found = found.cpu().numpy().astype(np.uint8)
        done |= {i: row[1 : len(templates[i]) - 1] for i, row in zip(ids, found, strict=True)}
    parts = [done] * ddp.world_size
    if ddp.world_size > 1:
        dist.all_gather_object(parts, done)
    return [parts[i % ddp.world_size][i] for i in range(len(templates))]

def draw_templates(count: int, lengths: dict[int, int], args: Namespace) -> list[np.ndarray]:
    """`count` templates of --sample_length, or of lengths drawn, by (seed, number), from {residues: count} and cut."""
    values, counts = (np.array(part) for part in zip(*sorted(lengths.items()), strict=True))
    u, cdf = sample_uniform(args.seed, torch.arange(count), 1, LENGTHS)[:, 0].numpy(), np.cumsum(counts)
    drawn = values[np.searchsorted(cdf, u * cdf[-1], side="right")].clip(max=args.max_protein_len - 2)
    return [np.r_[BOS, np.full(args.sample_length or n, MASK), EOS].astype(np.uint8) for n in drawn]

def infill_templates(path: str | Path, count: int) -> tuple[list[np.ndarray], list[str]]:
    """`count` templates, and names, of each record of a FASTA file (or .gz), '?' to be drawn. ValueError: bad ones."""
    with (gzip.open if str(path).endswith(".gz") else open)(path, "rt", encoding="ascii", errors="replace") as file:
        before, *entries = ("\n" + file.read()).split("\n>")
    if before.strip() or not entries:
        raise ValueError(f"{path}: expected FASTA, with a '>' as its first character")
    ids, templates, names = dict(zip(RESIDUES + "?", [*range(FIRST, LAST + 1), MASK], strict=True)), [], []
    for number, entry in enumerate(entries, 1):
        header, _, text = entry.partition("\n")
        name, text = (header.split() or [f"record_{number}"])[0], "".join(text.split()).upper()
        if set(text) - set(ids) or "?" not in text:
            raise ValueError(f"{path}: record {number} ({name}) has {sorted(set(text) - set(ids))[:5]} and "
                             f"{text.count('?')} '?'; expected residues and at least one '?' to fill in")
        templates += [np.array([BOS, *map(ids.get, text), EOS], dtype=np.uint8)] * count
        names += [f"{name}/{i}" for i in range(1, count + 1)]
    return templates, names

def write_fasta(path: Path, samples: list[np.ndarray], header: str, names: list[str] | None = None) -> None:
    """Records `>name header length=n`, 80 residues a line, written atomically; OSError if that fails. (rank 0 only)"""
    letters, lines = np.frombuffer(RESIDUES.encode(), np.uint8), []
    for name, ids in zip(names or [f"sample_{i}" for i in range(len(samples))], samples, strict=True):
        text = letters[ids - FIRST].tobytes().decode()
        lines += [f">{name} {header} length={len(ids)}", *(text[i : i + 80] for i in range(0, len(text), 80))]
    path.parent.mkdir(parents=True, exist_ok=True)
    if not atomic_write(path, lambda file: file.write("".join(f"{line}\n" for line in lines).encode())):
        raise OSError(f"{path} could not be written")

def best_identity(samples: list[np.ndarray], reference: list[np.ndarray], device: torch.device) -> np.ndarray:
    """(S,) float64: matches / length of the shorter, best over the reference and all offsets without gaps (by FFT)."""
    def spectra(group: list[np.ndarray]) -> Tensor:  # (frequencies, G, 26)
        ids = nn.utils.rnn.pad_sequence([torch.from_numpy(s.astype(np.int64)) for s in group], True, LAST + 1)
        places = F.one_hot(ids.to(device) - FIRST, STATES + 1)[..., :STATES].float()
        return torch.fft.rfft(places, n, dim=1).transpose(0, 1)
    best, reference = np.zeros(len(samples)), sorted(reference, key=len)
    for low, start in itertools.product(range(0, len(samples), 64), range(0, len(reference), 64)):
        group, others = samples[low : low + 64], reference[start : start + 64]
        n = 1 << (max(map(len, group)) + len(others[-1]) - 2).bit_length()  # both lengths fit: no wrapping round
        product = spectra(group) @ spectra(others).conj().transpose(1, 2)
        matches = torch.fft.irfft(product, n, dim=0).amax(0).round().double().cpu().numpy()
        shorter = np.minimum.outer([len(s) for s in group], [len(s) for s in others])
        best[low : low + 64] = np.maximum(best[low : low + 64], (matches / shorter).max(1))
    return best

def sample_metrics(samples: list[np.ndarray], reference: list[np.ndarray], device: torch.device) -> dict[str, float]:
    """Samples against training sequences (uint8 ids of residues, no BOS or EOS): divergences of residues and k-mers in
    nats (KL: half a count more of each residue in the reference), Wasserstein distance of lengths in residues, share
    of residues in runs of 4 or more, share of distinct samples, best ungapped identity with a training sequence."""
    def kmers(letters: np.ndarray, k: int) -> np.ndarray:  # counts (26**k,), of k-mers within the sequences
        words = np.lib.stride_tricks.sliding_window_view(letters, k)
        return np.bincount(words[(words >= 0).all(1)] @ STATES ** np.arange(k)[::-1], minlength=STATES**k)
    def divergence(p: np.ndarray, q: np.ndarray) -> float:  # Kullback-Leibler, of laws
        return float((p[p > 0] * np.log(p[p > 0] / q[p > 0])).sum())
    letters = [np.concatenate([np.r_[s.astype(np.int64) - FIRST, -1, -1] for s in group])
               for group in (samples, reference)]
    one = [kmers(part, 1) for part in letters]
    metrics = {"residue_kl": divergence(one[0] / one[0].sum(), (one[1] + 0.5) / (one[1] + 0.5).sum())}
    for name, k in ("residue_js", 1), ("2mer_js", 2), ("3mer_js", 3):
        counts = [kmers(part, k) for part in letters]
        if all(c.any() for c in counts):  # none in shorter sequences
            p, q = (c / c.sum() for c in counts)  # of few k-mers they scatter, which adds to the divergence
            metrics[name] = (divergence(p, (p + q) / 2) + divergence(q, (p + q) / 2)) / 2
    lengths = [np.sort([len(s) for s in group]) for group in (samples, reference)]
    grid = np.unique(np.concatenate(lengths))
    shares = [np.searchsorted(part, grid[:-1], side="right") / len(part) for part in lengths]
    metrics["length_wasserstein"] = float((np.abs(shares[0] - shares[1]) * np.diff(grid)).sum())
    runs = np.diff(np.flatnonzero(np.diff(letters[0], prepend=-1)))  # the marks between sequences make runs of 2
    metrics["repeats"] = float(runs[runs >= 4].sum() / one[0].sum())
    metrics["uniqueness"] = len({s.tobytes() for s in samples}) / len(samples)
    identity = best_identity(samples, reference, device)
    return metrics | {"identity_mean": float(identity.mean()), "identity_max": float(identity.max())}

# ---- Train ---------------------------------------------------------------------------------------

# What training, evaluation and sampling share. average: EMA of the parameters; lengths: {residues: training sequences}.
Task = collections.namedtuple("Task", "args ddp model noise average lengths train_set valid_set", defaults=(None, None))

@dataclass
class Progress:
    """Where training stands: what a checkpoint must bring back beside the weights."""
    step: int = 0
    epoch: int = 0
    best: dict | None = None
    peak: float = 0.0  # learning rate
    warmup: int = 0
    history: list[dict] = field(default_factory=list)  # of the metrics
    owed: bool = False  # the evaluation after this step has yet to be made
    def plan(self, args: Namespace, ddp: DDPContext, steps: int) -> None:
        """Peak learning rate and warm-up of a new run on this many ranks (they stay on others)."""
        self.peak = scaled_lr(args.lr, args.lr_scaling, ddp.world_size)
        self.warmup = round(args.warmup * self.peak / args.lr)  # the original scales both
        if self.warmup > steps // 2:
            warn(f"a warm-up of {self.warmup} steps is too long for a run of {steps}: it takes {steps // 10}")
            self.warmup = steps // 10
    def rate(self, args: Namespace, steps: int) -> float:
        """Learning rate of this step: down to min_lr_ratio of the peak at the end."""
        factor, low = lr_at(self.step, steps, self.warmup, args.schedule), args.min_lr_ratio
        return self.peak * (factor if self.step < self.warmup else low + (1 - low) * factor)

def conservative(args: Namespace, world_size: int) -> None:
    """--lr_scaling conservative from 8 GPUs on: a batch of 12 and 0.8 of the memory, unless they are given."""
    for name, value in (("batch_size", 12), ("max_memory_per_gpu", 0.8)) if world_size >= 8 else ():
        if args.lr_scaling == "conservative" and name not in args.given:
            setattr(args, name, value)
            log0(f"conservative scaling from 8 GPUs on: {name} {value}")

def checkpoint(task: Task, progress: Progress, guard: StepGuard, log, total: int, best: bool, done: bool) -> None:
    """Everything needed to go on bit by bit, written by rank 0. (all ranks)"""
    args, ddp, states = task.args, task.ddp, rng_states(task.ddp)
    def write() -> None:
        state = {
            "format": 1, "script": "run_train_uniref50_ddp.py", "args": vars(args), "world_size": ddp.world_size,
            "global_batch": total, "step": progress.step, "epoch": progress.epoch, "progress": vars(progress),
            "model": task.model.state_dict(), "ema": task.average, "lengths": task.lengths, "rng": states,
            "optimizer": guard.optimizer.state_dict(), "scaler": guard.scaler.state_dict(), "wandb_id": log.wandb_id,
            "bad_steps": guard.bad_steps, "done": done, "speed": (log.final_loss, log.speed),
            "wall_s": log.wall + time.monotonic() - log.started}
        if not save_checkpoint(args.output_dir, state, progress.step, args.keep_checkpoints, best) and done:
            raise OSError(f"the end of the run could not be saved: free space in {args.output_dir}, run again")
    on_rank0(ddp, write)
    log.reset()

def show(metrics: dict[str, float]) -> str:
    return " ".join(f"{n}={v:.4f}" for n, v in metrics.items())

def validate(task: Task, progress: Progress, log: RunLog) -> bool:
    """Evaluate, draw samples, record both. True if the bound is the best so far. (all ranks)"""
    args, metrics, place = task.args, evaluate(task), {"step": progress.step, "epoch": progress.epoch}
    if better := progress.best is None or metrics["nelbo"] < progress.best["value"]:
        progress.best = {"name": "nelbo", "value": metrics["nelbo"], "step": progress.step, "metrics": metrics}
    progress.history.append(place | metrics)
    log.write(place | metrics)
    log0(f"step {progress.step} held-out: {show(metrics)}" + " (best so far)" * better)
    if args.snapshot_sampling:
        path = Path(args.output_dir) / "samples" / f"step_{progress.step:08d}.fasta"
        templates = draw_templates(args.samples_per_eval, task.lengths, args)
        samples = sample(task.model, templates, task.noise, args, task.ddp)
        on_rank0(task.ddp, write_fasta, path, samples, f"step={progress.step} method={args.sampling_method}")
        found = on_rank0(task.ddp, sample_metrics, samples, task.train_set.some(500), task.ddp.device)
        log.write(place | {f"sample_{n}": v for n, v in found.items()})
        log0(f"step {progress.step} samples: {show(found)}")
    log.reset()
    return better

def train(task: Task, log: RunLog, state: dict | None, total: int, micro_steps: int) -> tuple[str, Progress]:
    """Train from where `state` stands. Returns (why it was stopped or '', progress). (all ranks)"""
    args, ddp, progress = task.args, task.ddp, Progress(**state["progress"]) if state else Progress()
    most, count = args.max_protein_len, min(len(task.train_set), args.max_samples)
    mean = sum(min(n + 2, most) * c for n, c in task.lengths.items()) / sum(task.lengths.values())
    items = max(total, int(total * most / mean))  # sequences that fill `total` rows of tokens
    window = max(64, -(-4096 // items))  # batches among which lengths are sorted: under 5 % padding
    cut = bucket_by_tokens(lambda ids: np.minimum(task.train_set.lengths(ids), most), items, total, args.seed)
    sampler = GlobalBatchSampler(count, items, micro_steps, args.seed, ddp, window, cut)
    per_epoch = len(sampler) // micro_steps
    steps = min(args.epochs * per_epoch, args.n_iters)
    if not progress.peak:
        progress.plan(args, ddp, steps)
    optimizer = make_optimizer(task.model, args, progress.peak)
    guard = StepGuard(args, ddp, optimizer, task.model.dtype, log.started)
    torch.manual_seed(args.seed + ddp.rank)  # dropout differs between ranks
    if state:
        optimizer.load_state_dict(state["optimizer"])
        guard.scaler.load_state_dict(state["scaler"])
        restore_rng(state["rng"], ddp, args.seed)
        task.model.load_state_dict(state["model"])
        torch._foreach_copy_(task.average, [t.to(ddp.device) for t in state["ema"]])
        guard.bad_steps = state["bad_steps"]
    model = wrap_ddp(torch.compile(task.model, dynamic=True) if args.compile else task.model, ddp)
    peak = peak_flops(ddp.device, task.model.dtype) * ddp.world_size
    log0(f"{total} rows of {most} tokens hold {items} sequences on average; {args.epochs} epochs x {per_epoch} steps, "
         f"{steps} steps, warm-up {progress.warmup}, peak learning rate {progress.peak:g}")
    progress.epoch, position = divmod(progress.step, per_epoch)
    sampler.set_epoch(progress.epoch, position)
    require_same(ddp, "the batches", sampler.fingerprint())
    bar = tqdm(total=steps, initial=progress.step, disable=ddp.rank > 0 or not sys.stderr.isatty())
    pool = ThreadPoolExecutor(max(1, args.num_workers))
    log.reset()
    reason, batches, residues, flops = "", None, 0, 0.0
    while not reason:
        if progress.owed:  # also first of all in a run that was stopped before it
            with averaged_weights(task.model, task.average):
                progress.owed, better = False, validate(task, progress, log)
            checkpoint(task, progress, guard, log, total, better, done=progress.step >= steps)
        if progress.step >= steps:
            break
        if position == 0 or batches is None:  # an epoch starts, or goes on after a restart
            sampler.set_epoch(progress.epoch, position)
            make = functools.partial(deal_step, task, sampler, progress.epoch)
            plan = enumerate(sampler.batches(position), position)
            batches = run_ahead(pool, make, plan, args.num_workers) if args.num_workers else map(make, plan)
        for group in optimizer.param_groups:
            group["lr"] = progress.rate(args, steps)
        micro, step_residues, step_flops = log.waiting(batches)
        summed = torch.zeros((), device=ddp.device)  # this rank's part of the loss
        for number, (rows, ids, tokens, places, padded) in enumerate(micro, 1):
            with sync_gradients(model, number == len(micro)):
                times, key = training_times(places, progress.step, args), (args.seed, progress.epoch)
                loss = diffusion_loss(task, model, ids, tokens, times, key, padded).sum()
                # DDP averages over ranks: times ranks / residues, that is the mean over the residues of the whole step
                guard.scaler.scale(loss * (ddp.world_size / step_residues)).backward()
            log.add(len(rows), loss=(loss, is_residue(tokens).sum()), padding=((tokens == PAD).sum(), tokens.numel()))
            summed += loss.detach()
        norm, reason = guard.step(summed, progress.step + 1, [m[0] for m in micro])
        update_ema(task.average, list(unwrap(model).parameters()), args.ema, progress.step)
        progress.step += 1
        kept = log.steps > 1  # sums are of the steps since the last record, evaluation or checkpoint
        residues, flops = residues * kept + step_residues, flops * kept + step_flops
        bar.update()
        last = progress.step == steps
        if progress.step % args.log_every == 0 or last:
            seconds = time.monotonic() - log.last
            extra = {"tokens/s": residues / seconds, "mfu": flops / seconds / peak}
            if ddp.device.type == "cuda":
                with contextlib.suppress(Exception):  # nvidia-ml-py, a driver, permission: not needed to train
                    extra["gpu_util"] = torch.cuda.utilization(ddp.device) / 100
            log.interval(progress.step, steps, progress.epoch, model, group["lr"], norm, **extra)
        progress.epoch, position = divmod(progress.step, per_epoch)
        progress.owed = last or progress.step % args.eval_freq == 0
        if progress.owed:  # a stop comes before it, as it may take longer than there is time
            reason = reason or guard.finish()
        if reason or not progress.owed and progress.step % args.save_every == 0:
            checkpoint(task, progress, guard, log, total, best=False, done=False)
    guard.finish()
    bar.close()
    pool.shutdown(cancel_futures=True)
    return reason, progress

# ---- Main ----------------------------------------------------------------------------------------

def build_task(args: Namespace, ddp: DDPContext, lengths: dict[int, int], *data: Proteins) -> Task:
    """The model, on the device, its noise and its `data`: the training and the validation split."""
    torch.manual_seed(args.seed)  # the same on all ranks
    model = Denoiser(args, resolve_precision(args.precision, ddp.device)).to(ddp.device)
    noise = Noise(args.noise_type, args.sigma_min, args.sigma_max, args.noise_eps)
    terminal = float(noise.hidden(torch.ones(())))
    if terminal < 0.99 and ddp.rank == 0:
        warn(f"the noise schedule hides only {terminal:.1%} of the residues at its end, but samples start from nothing,"
             " which the network never sees: use noise.type loglinear, or a larger noise.sigma_max")
    log0(f"model: {sum(p.numel() for p in model.parameters()):,} parameters, {model.dtype}")
    return Task(args, ddp, model, noise, [p.detach().clone() for p in model.parameters()], lengths, *data)

def write_samples(args: Namespace, ddp: DDPContext) -> int:
    """--sample: N sequences, or N fillings of each record of --infill, by the weights of --checkpoint. (all ranks)"""
    path = Path(args.checkpoint or Path(args.output_dir) / "best.pt")
    if not path.exists():
        raise ValueError(f"--checkpoint {path}: no such file; give the best.pt or latest.pt of a training run")
    state = load_checkpoint(path)
    if state.get("script") != "run_train_uniref50_ddp.py":
        raise ValueError(f"--checkpoint {path} was written by {state.get('script')}, not by run_train_uniref50_ddp.py")
    for name in MODEL:
        setattr(args, name, state["args"][name])
    kinds = {args.sampling_method, args.predictor, args.loss}  # the graph is known from the checkpoint alone
    if args.graph_type == "uniform" and kinds & {"simple", "first_hitting", "score_entropy"}:
        raise ValueError("the uniform graph has the analytic sampler only, and none after --loss score_entropy")
    task = build_task(args, ddp, state["lengths"])
    log0(f"weights of {path}: step {state['step']}")
    drawn = draw_templates(args.sample, task.lengths, args), None
    templates, names = infill_templates(args.infill, args.sample) if args.infill else drawn
    if (longest := max(map(len, templates)) - 2) > args.max_protein_len - 2:
        raise ValueError(f"samples of {longest} residues: the model was trained on at most {args.max_protein_len - 2}")
    begin = time.monotonic()
    with averaged_weights(task.model, [t.to(ddp.device) for t in state["ema"]]):
        samples = sample(task.model, templates, task.noise, args, ddp)
    path = Path(args.out or Path(args.output_dir) / "samples.fasta")
    log0(f"{len(samples)} samples in {time.monotonic() - begin:.1f} s ({args.sampling_method}): {path}")
    on_rank0(ddp, write_fasta, path, samples, f"method={args.sampling_method} seed={args.seed}", names)
    if "datafile" in args.given:
        log0(show(on_rank0(ddp, sample_metrics, samples, load_data(args, ddp)[0].some(2000), ddp.device)))
    return 0

def main(args: Namespace) -> int:
    """Train; or prepare data, or sample. Returns the exit status."""
    ddp = setup_ddp(args)
    if args.prepare or args.sample:  # nothing to save: signals end it at once
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
    if args.prepare:
        on_rank0(ddp, prepare, *args.prepare, args)
        return 0
    conservative(args, ddp.world_size)
    if ddp.device.type != "cpu":
        torch.get_device_module(ddp.device).set_per_process_memory_fraction(args.max_memory_per_gpu, ddp.device)
    keep_freed_memory()
    torch.set_float32_matmul_precision("high")  # what stays in fp32 runs on tensor cores
    if args.sample:
        return write_samples(args, ddp)
    train_set, valid_set = load_data(args, ddp)
    state = open_run(args, ddp, SAME)
    if state and state["done"] and all(getattr(args, n) == state["args"][n] for n in ("n_iters", "epochs")):
        log0(f"the run in {args.output_dir} is finished, after {state['step']} steps: --fresh starts anew")
        return 0
    total, micro_steps = resolve_batch(args, ddp.world_size, state["global_batch"] if state else None)
    log = RunLog(args, ddp, state)
    task = build_task(args, ddp, {int(n): c for n, c in train_set.part["lengths"].items()}, train_set, valid_set)
    reason, progress = train(task, log, state, total, micro_steps)
    if reason:
        log.close("stopped", steps=progress.step, reason=reason)
        barrier(ddp)  # the first rank to end makes some launchers kill the others
        return stop_status(reason)
    best, metrics, path = progress.best, progress.best["metrics"], Path(args.output_dir) / "best.pt"
    log0("held-out bound of step {step}: {nelbo:.4f} +- {nelbo_se:.4f} nats per residue, {below_unigram:.4f} +- "
         "{below_unigram_se:.4f} below the unigram's {unigram:.4f}".format(**best, **metrics))
    log.close("finished", steps=progress.step, epochs=progress.epoch, samples_per_s=log.speed,
              final_loss=log.final_loss, best_metric={n: best[n] for n in ("name", "value", "step")},
              baselines={"unigram": metrics["unigram"]}, checkpoint=str(path))
    log0(f"finished: {args.output_dir}/summary.json, curves.png, samples/")
    return 0

if __name__ == "__main__":
    sys.exit(launch(main, parse_args()))
