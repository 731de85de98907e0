"""Distil a large retrieval model, the teacher, into a small one, the student, in two phases.

Phase 1 pulls the student's vectors of single texts to the teacher's. Phase 2 trains on queries with
their documents by a contrastive loss (InfoNCE), and keeps the pull. The teacher reads each text
once, before training. Its vectors stay in --cache_dir for the next run.

    python train_ddp.py                                                # one GPU, or CPU
    ./run_ddp.sh 2 True --config configs/train_ddp_quickstart.yaml     # minutes, no download
    torchrun --nproc_per_node=8 train_ddp.py --use_projection=False
    torchrun --nproc_per_node=8 --nnodes=2 --node_rank=0 --master_addr=HOST train_ddp.py

Modes: --use_projection True adds a head (Linear, GELU, LayerNorm, Linear) to as many dimensions as
the teacher has. False (MRL): none; the target is the first part of its vectors, renormalised.

Data (--phase1_data, --phase2_data): ms_marco (v1.1) or another data set of the hub (NAME or
NAME:CONFIG); pydocs, the documentation installed with Python, numpy and torch, without a download;
FILE.txt, one text a line, for phase 1; FILE.jsonl, .csv or .parquet with query, positive (a text or
a list of texts) and, if there are any, negatives. Held out are the validation rows of MS MARCO,
elsewhere --eval_fraction of the queries; rows that share a column `group` stay together.

Logged, over all ranks: step, phase, epoch, lr, loss, grad_norm (before clipping), skipped (steps
whose gradient was not finite), samples_per_s (texts in phase 1, queries in phase 2), data_wait
(share of the time); in phase 2 the parts of the loss: infonce (nats per query) and distance.
val/...: ndcg@10, mrr@10, recall@100 (from 0 to 1, held-out queries against --eval_distractors and
the documents that answer them), teacher_cosine, loss (that of phase 1, on held-out texts).

Files in --output_dir: latest.pt, previous.pt, phase1_best.pt, phase2_best.pt, best.pt (of both),
metrics.jsonl, curves.png, summary.json. In --artifacts_dir: SentenceTransformer folders.

Unlike the original (yuancu/distill-for-retrieval) the squared distance is summed over dimensions,
not averaged; a query's negatives are the documents of the whole step, on all ranks; the head reads
normalised vectors, in training as in the artifact; the warm-up is a share of the steps there are.
"""

import argparse
import contextlib
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
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import zipfile
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
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from tqdm import tqdm

# --------------------------------------------------------------------------------------------------
# Arguments


LIMITS = {  # of options, from and to
    "num_negatives": (0, 1000),
    "eval_fraction": (0, 0.99),
    "eval_distractors": (0, math.inf),
    "phase1_lr": (0, math.inf),
    "phase2_lr": (0, math.inf),
    "temperature": (1e-4, math.inf),
    "warmup_ratio": (0, 1),
    "false_negative_margin": (-1, 2),
}


def parse_args():
    parser = Parser(description=__doc__)
    add = parser.add_argument_group("data").add_argument
    add("--phase1_data", default="ms_marco", help="texts of phase 1")
    add("--phase2_data", default="ms_marco", help="queries and documents of phase 2")
    add("--max_samples_phase1", type=count, default=100_000, help="rows read for phase 1")
    add("--max_samples_phase2", type=count, default=500_000, help="rows read for phase 2")
    add("--skip_bad_data", **FLAG, default=False, help="leave out rows that are wrong")
    add("--cache_dir", default="./cache", help="texts, tokens, teacher vectors, of all runs")
    add("--num_negatives", type=int, default=7, help="per query, drawn anew every epoch")

    add = parser.add_argument_group("held-out data").add_argument
    add("--eval_fraction", type=float, default=0.05, help="of the queries, that may be held out")
    add("--eval_samples", type=count, default=1000, help="held out per source, at most")
    text = "documents that answer no held-out query, for each one that does"
    add("--eval_distractors", type=float, default=1.0, help=text)
    add("--eval_every", type=int, default=0, help="steps between evaluations; 0: every epoch")

    add = parser.add_argument_group("models").add_argument
    default = "infly/inf-retriever-v1-pro"
    add("--teacher_model", default=default, help="hub name, folder, or builtin:lsa[:DIMENSIONS]")
    add("--teacher_batch_size", type=count, default=64, help="texts per forward pass")
    add("--teacher_max_length", type=count, help="tokens; None: the model's own")
    add("--teacher_query_prompt", help="text before queries; None: the model's own")
    add("--teacher_document_prompt", help="text before documents; None: the model's own")
    default = "sentence-transformers/all-mpnet-base-v2"
    add("--student_model", default=default, help="the same, or builtin:bert[:LAYERSxWIDTH]")
    add("--student_layers", type=count, help="keep so many, evenly spaced; None: all")
    add("--student_max_length", type=count, help="tokens; None: the model's own")
    add("--student_query_prompt", help="text before queries; None: the model's own")
    add("--student_document_prompt", help="text before documents; None: the model's own")
    add("--trust_remote_code", **FLAG, default=False, help="run code that comes with the models")
    add("--use_projection", **FLAG, default=True, help="a head; False: MRL")
    add("--projection_hidden", type=count, default=1536, help="hidden width of the head")

    add = parser.add_argument_group("loss").add_argument
    add("--phase1_l2_weight", type=float, default=0.4, help="of the squared distance")
    add("--phase1_cosine_weight", type=float, default=0.6, help="of 1 - cosine")
    add("--infonce_weight", type=float, default=0.8, help="of InfoNCE")
    add("--phase2_l2_weight", type=float, default=0.2, help="of the squared distance")
    add("--temperature", type=float, default=0.02, help="divides all scores")
    text = "a document that the teacher scores above positive + margin is no negative; 2: all are"
    add("--false_negative_margin", type=float, default=0.0, help=text)

    add = parser.add_argument_group("optimization").add_argument
    add("--phase1_epochs", type=count, default=1, help="passes over the texts")
    add("--phase2_epochs", type=count, default=3, help="passes over the queries")
    add("--max_steps", type=int, default=0, help="per phase at most; 0: all epochs")
    add("--phase1_lr", type=float, default=2e-5, help="peak learning rate")
    add("--phase2_lr", type=float, default=5e-6, help="peak learning rate")
    add("--warmup_ratio", type=float, default=0.1, help="of a phase; then straight down to 0")
    add("--weight_decay", type=float, default=0.01, help="none on biases, norms, embeddings")
    text = "start from OUTPUT_DIR/phase1_best.pt, or from the raw student if there is none; if "
    text += "phase 1 had other data: a new OUTPUT_DIR, with a copy of that file in it"
    add("--skip_phase1", **FLAG, default=False, help=text)
    add("--skip_phase2", **FLAG, default=False, help="stop after phase 1")

    add = parser.add_argument_group("artifacts").add_argument
    add("--save_to_artifacts", **FLAG, default=False, help="save a SentenceTransformer at the end")
    add("--artifacts_dir", default="./artifacts", help="folder of the saved students")
    add_common_arguments(parser, output_dir="./checkpoints", batch_size=64)
    args = parse_with_config(parser)

    if args.skip_phase1 and args.skip_phase2:
        parser.error("--skip_phase1 and --skip_phase2 together leave nothing to train")
    if args.phase2_data.endswith(".txt") and not args.skip_phase2:
        parser.error(f"--phase2_data {args.phase2_data}: needs queries with their documents")
    for name, (least, most) in LIMITS.items():
        value = getattr(args, name)
        if not least <= value <= most:
            parser.error(f"--{name} {value}: must be from {least} to {most}")
    mode = "projection" if args.use_projection else "mrl"
    args.output_dir = args.output_dir.replace("{mode}", mode)
    return args


# --------------------------------------------------------------------------------------------------
# Data


def cache_folder(args, kind, *key):
    """The folder of something that is made once, named by a hash of all that went into it."""
    digest = hashlib.sha256(json.dumps([FORMAT, *key]).encode()).hexdigest()
    return Path(args.cache_dir) / f"{kind}-{digest[:16]}"


def make_once(folder, make, *args):
    """Let rank 0 call make(folder, *args), unless the folder is there. It is complete or not there.
    (all ranks)"""

    def make_missing():
        if folder.exists():
            return
        new = folder.with_name(f"{folder.name}.tmp")
        try:
            shutil.rmtree(new, ignore_errors=True)
            make(new, *args)
            new.rename(folder)
        except (OSError, ValueError) as error:
            raise InputError(f"{folder} cannot be written, see --cache_dir: {error}") from None

    on_rank0(make_missing)
    if not folder.exists():
        raise InputError(f"rank 0 has {folder}, this machine has not: all must see --cache_dir")


def write_arrays(folder, arrays):
    folder.mkdir(parents=True)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
        load_array(folder, name)  # notices if a full disk has cut the file; np.save does not


def load_array(folder, name):
    """Mapped into memory, which the ranks of a machine share."""
    return np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r"))


def run_tool(folder, name, *options):
    """Let a file of tools/ make a folder."""
    tool = Path(__file__).parent / "tools" / name
    options = [*options, f"--out={folder}"]
    logging.info(shlex.join(["python", f"tools/{name}", *options]))
    done = subprocess.run([sys.executable, str(tool), *options], stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise InputError(done.stderr.strip())


def source_key(name):
    """A hash of a file with data; a name on the hub as it is."""
    if not Path(name).is_file():
        return name
    digest = hashlib.sha256()
    with open(name, "rb") as file:
        for part in iter(lambda: file.read(2**20), b""):
            digest.update(part)
    return digest.hexdigest()


class Corpus:
    """The arrays of tools/prepare_texts.py."""

    def __init__(self, folder):
        self.folder = folder
        names = ["text", "offsets", "kinds", "phase1", "pairs", "positives", "negatives"]
        for name in [*names, "eval_queries", "eval_documents", "eval_pairs"]:
            setattr(self, name, load_array(folder, name))
        self.eval_answers = int(load_array(folder, "eval_answers"))
        self.eval_texts = np.concatenate([self.eval_queries, self.eval_documents])

    def decode(self, number):
        start, end = self.offsets[number : number + 2]
        return self.text[start:end].tobytes().decode()

    def texts(self, numbers, prompts):
        """With the prompt for queries, or the one for documents, before each."""
        before = [prompts["query"], prompts["document"]]
        return [before[self.kinds[number]] + self.decode(number) for number in numbers]

    def held_out(self):
        """What the held-out figures are measured on."""
        documents = len(self.eval_documents)
        others = documents - len(set(self.eval_pairs[:, 1].tolist()))
        text = f"{len(self.eval_queries):,} queries, {documents:,} documents"
        return f"{text}, of which {others:,} ({others / documents:.0%}) answer none of them"


def load_corpus(args):
    """Made once by tools/prepare_texts.py. (all ranks)"""
    names = "max_samples_phase1 max_samples_phase2 eval_fraction eval_samples eval_distractors"
    options = [f"--{name}={getattr(args, name)}" for name in names.split()]
    if args.skip_bad_data:
        options.append("--skip_bad_data")
    key = [*options]
    for phase in (1, 2):
        name = getattr(args, f"phase{phase}_data")
        # the data of a skipped phase are read, too, if they are here: what is held out is then the
        # same for both phases, and a later run without the option goes on
        is_here = on_rank0(Path(name).is_file) or args.phase1_data == args.phase2_data
        if getattr(args, f"skip_phase{phase}") and not is_here:
            continue
        if name == "pydocs":
            versions = [sys.version, np.__version__, torch.__version__]
            versions = on_rank0(list, versions)  # another machine may have others
            folder = cache_folder(args, "pydocs", versions)
            make_once(folder, run_tool, "make_builtin_models.py", "pydocs")
            name = f"{folder}/pairs.jsonl"
        options.append(f"--phase{phase}_data={name}")
        key.append([phase, on_rank0(source_key, name)])

    folder = cache_folder(args, "texts", key)
    make_once(folder, run_tool, "prepare_texts.py", *options)
    corpus = Corpus(folder)
    bad_rows = (folder / "bad_rows.txt").read_text().count("\n")
    if bad_rows > 0:
        logging.warning(f"left out {bad_rows} bad rows, listed in {folder}/bad_rows.txt")
    logging.info("Data split complete:")
    logging.info(f"  phase 1:   {len(corpus.phase1):,} texts")
    logging.info(f"  phase 2:   {len(corpus.pairs):,} pairs of a query and a document")
    logging.info(f"  held out:  {corpus.held_out()}")
    return corpus


class Tokens(NamedTuple):
    """The student's tokens of all texts: those of text i are ids[offsets[i]:offsets[i + 1]]."""

    folder: Path
    ids: np.ndarray
    offsets: np.ndarray
    lengths: np.ndarray
    pad: int


def load_tokens(args, corpus, student):
    """Made once with the student's tokenizer and prompts. (all ranks)"""
    tokenizer = student.tokenizer
    length = student.max_seq_length
    definition = json.loads(tokenizer.backend_tokenizer.to_str())
    definition.update(truncation=None, padding=None)  # calling a tokenizer changes these
    key = [corpus.folder.name, student.prompts, length, definition]
    folder = cache_folder(args, "tokens", *key)

    def tokenize(folder):
        pieces = []
        starts = range(0, len(corpus.kinds), 1024)
        for start in tqdm(starts, "tokens", disable=not sys.stderr.isatty()):
            numbers = range(start, min(start + 1024, len(corpus.kinds)))
            texts = corpus.texts(numbers, student.prompts)
            for ids in tokenizer(texts, truncation=True, max_length=length)["input_ids"]:
                pieces.append(np.array(ids, np.int32))
        offsets = np.cumsum([0, *map(len, pieces)])
        write_arrays(folder, {"ids": np.concatenate(pieces), "offsets": offsets})

    make_once(folder, tokenize)
    offsets = load_array(folder, "offsets")
    ids = load_array(folder, "ids")
    return Tokens(folder, ids, offsets, np.diff(offsets), tokenizer.pad_token_id or 0)


def model_key(name):
    """What tells a model from others: its name on the hub, or the files of its folder."""
    if not Path(name).is_dir():
        return name
    key = []
    for path in sorted(Path(name).rglob("*")):
        if path.is_file() and path.suffix != ".md":
            size = path.stat().st_size
            with open(path, "rb") as file:  # both ends of it: such files are large
                digest = hashlib.sha256(file.read(2**20))
                file.seek(max(0, size - 2**20))
                digest.update(file.read())
            key.append([str(path.relative_to(name)), size, digest.hexdigest()])
    return key


FEWEST_TOGETHER = 64  # texts that a rank encodes between two looks at the clock and at signals
MOST_TOGETHER = 512
AS_TENSOR = {"convert_to_tensor": True, "show_progress_bar": False}  # for SentenceTransformer


def teacher_vectors(args, corpus, name, folder, device, guard):
    """The teacher's unit vectors of all texts (N, D), mapped; None if the ranks agreed to stop.

    Blocks of texts of similar length are dealt to the ranks, which write them into one file and
    note what is done: what a stopped run has computed is not computed again. (all ranks)"""
    count = len(corpus.kinds)
    # of few texts few at a time: no rank shall wait long for the last block of another
    together = min(MOST_TOGETHER, max(FEWEST_TOGETHER, count // 64))
    done = np.zeros(math.ceil(count / together), np.uint8)
    if on_rank0(folder.exists):
        done = on_rank0(load_array, folder, "done")
    missing = np.flatnonzero(done == 0)
    if len(missing) == 0:
        logging.info("Teacher vectors of an earlier run: no teacher is needed")
        return load_array(folder, "vectors")

    teacher = load_in_turn(load_teacher, args, name, device)
    shape = (count, teacher.get_embedding_dimension())
    logging.info(f"The teacher reads {shape[0]:,} texts, with the prompts {teacher.prompts}")
    make_once(folder, write_arrays, {"vectors": np.zeros(shape, np.float16), "done": done})
    # prompt: the texts have theirs, a model's default would come before it
    options = {"batch_size": args.teacher_batch_size, "prompt": "", **AS_TENSOR}
    longest_first = np.argsort(-np.diff(corpus.offsets), kind="stable")  # no memory: at once
    rank = dist.get_rank()
    own = missing[rank :: dist.get_world_size()]
    turns = range(math.ceil(len(missing) / dist.get_world_size()))
    for turn in tqdm(turns, "teacher", disable=rank > 0 or not sys.stderr.isatty()):
        if guard.agree():
            return None
        if turn < len(own):
            first = own[turn] * together
            rows = longest_first[first : first + together]
            vectors = teacher.encode(corpus.texts(rows, teacher.prompts), **options)
            vectors = F.normalize(vectors.float(), dim=1).cpu().numpy()
            if not np.isfinite(vectors).all():
                text = corpus.decode(rows[0])[:80]
                raise InputError(f"the teacher's vectors are not finite, near the text {text!r}")
            write_rows(folder / "vectors.npy", rows, vectors.astype(np.float16))
            write_rows(folder / "done.npy", own[turn : turn + 1], np.ones(1, np.uint8))
    dist.barrier()
    return load_array(folder, "vectors")


def write_rows(path, numbers, rows):
    """Overwrite some rows of an .npy file. (Not through a memory map: on a network file system the
    ranks of several machines would overwrite each other's neighbours.)"""
    begin = np.load(path, mmap_mode="r").offset
    try:
        with open(path, "r+b") as file:
            for number, row in zip(numbers, rows, strict=True):
                file.seek(begin + int(number) * row.nbytes)
                file.write(row.tobytes())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error}") from None


def load_in_turn(load, *args):
    """load(*args), by one rank of a machine after the other: the memory of a machine holds one copy
    of a large model on its way to the GPUs, not eight. (all ranks)"""
    _, _, local_rank = find_ranks() or (0, 1, 0)
    model = None
    # as many turns on all machines, however many ranks each has: all ranks meet at each barrier
    for turn in range(dist.get_world_size()):
        if turn == local_rank:
            model = load(*args)
        dist.barrier()
    return model


class Texts(NamedTuple):
    """Texts for a forward pass, longest first, in groups of similar length that lie one after the
    other; within a group all are padded to the longest."""

    ids: torch.Tensor  # (T,) int64 tokens
    mask: torch.Tensor  # (T,) int64, 0 where there is padding
    positions: torch.Tensor  # (T,) int64 place of a token in its text
    order: torch.Tensor  # (B,) int64 which of these texts is the first, the second, ... asked for
    shapes: list  # of (texts, length) for each group

    def groups(self, tensor):
        """The parts of a tensor (T, ...) that belong to each group, (texts, length, ...)."""
        parts = tensor.split([texts * length for texts, length in self.shapes])
        pairs = zip(parts, self.shapes, strict=True)
        return [part.view(*shape, *part.shape[1:]) for part, shape in pairs]


def lay_out(tokens, rows, least, waste):
    """Texts `rows` (B,), in groups of at least so many, with at most this share of padding."""
    by_length = np.argsort(-tokens.lengths[rows], kind="stable")
    lengths = tokens.lengths[rows][by_length]
    cuts = [0]
    for i in range(least, len(rows) - least // 2):
        if i - cuts[-1] >= least and lengths[i] < (1 - waste) * lengths[cuts[-1]]:
            cuts.append(i)
    sizes = np.diff([*cuts, len(rows)])

    # of each token, with the padding: its text, its place in it, and where it is among all tokens
    padded = np.repeat(lengths[cuts], sizes)
    text = np.repeat(np.arange(len(rows)), padded)
    positions = np.arange(len(text)) - (np.cumsum(padded) - padded)[text]
    mask = positions < lengths[text]
    source = tokens.offsets[rows][by_length][text] + positions
    ids = tokens.ids[np.minimum(source, len(tokens.ids) - 1)]
    arrays = [np.where(mask, ids, tokens.pad), mask, positions, np.argsort(by_length)]
    tensors = [torch.from_numpy(array.astype(np.int64)) for array in arrays]
    return Texts(*tensors, list(zip(sizes.tolist(), lengths[cuts].tolist(), strict=True)))


class TextBatch(NamedTuple):
    """A micro-batch of phase 1."""

    texts: Texts
    targets: torch.Tensor  # (B, D) float16, the teacher's vectors
    total: int  # texts of the whole step, all ranks


class PairBatch(NamedTuple):
    """A micro-batch of phase 2: n queries, their positives, and their negatives, as B texts in this
    order. The documents of the whole step, all ranks, are numbered through: those of its first
    query (its positive, then its K negatives), those of its second, and so on. That makes M = total
    (1 + K)."""

    texts: Texts
    targets: torch.Tensor  # (B, D) float16
    pull: torch.Tensor  # (B,) weight of a text's distance: of all queries and all documents 0.5
    slots: torch.Tensor  # (n, 1 + K) each query's documents among the B texts; a gap has any
    places: torch.Tensor  # (n,) the numbers of these queries among those of the step
    positives: torch.Tensor  # (n, P) all positive texts of the queries, then -1
    documents: torch.Tensor  # (M,) the text of each document, -1: a gap
    total: int  # queries of the whole step, all ranks


def move(batch, device):
    """A batch with all its tensors on the device."""
    moved = []
    for part in batch:
        if isinstance(part, Texts):
            part = move(part, device)
        elif isinstance(part, torch.Tensor):
            part = part.to(device, non_blocking=True)
        moved.append(part)
    return type(batch)(*moved)


class TextData(Dataset):
    """Phase 1: item (ids, whole) is a micro-batch of texts, and the global batch it is part of."""

    def __init__(self, tokens, vectors, limits, dimensions):
        self.tokens = tokens
        self.vectors = vectors
        self.limits = limits  # of groups, for lay_out
        self.dimensions = dimensions  # of the teacher's vectors that the student has, too

    def __getitem__(self, item):
        ids, whole = item
        return TextBatch(self.lay_out(ids), self.targets(ids), len(whole))

    def lay_out(self, rows):
        return lay_out(self.tokens, rows, *self.limits)

    def targets(self, rows):
        return torch.from_numpy(self.vectors[rows, : self.dimensions])


class PairData(Dataset):
    """Phase 2: item (ids, whole) is a micro-batch of pairs, and the global batch it is part of."""

    def __init__(self, args, corpus, data):
        self.args = args
        self.corpus = corpus
        self.data = data

    def draw(self, whole):
        """--num_negatives of each pair's negatives (total, K), -1 where there are fewer; as the
        batches are new in every epoch, so are the draws."""
        negatives = self.corpus.negatives[whole]
        wanted = self.args.num_negatives
        if negatives.shape[1] > wanted:
            rng = np.random.default_rng([self.args.seed, *whole[:8]])
            keys = rng.random(negatives.shape) + (negatives < 0)
            chosen = np.argsort(keys, axis=1)[:, :wanted]
            negatives = np.take_along_axis(negatives, chosen, axis=1)
        return negatives

    def __getitem__(self, item):
        ids, whole = item
        pairs = self.corpus.pairs
        n = len(ids)
        # all ranks draw the same for the whole step, and so know its documents
        documents = np.concatenate([pairs[whole, 1:], self.draw(whole)], axis=1)
        places = np.flatnonzero(np.isin(whole, ids))  # they stand there in the same order
        negatives = documents[places, 1:]
        is_there = negatives >= 0

        # the texts of this micro-batch, and where each query finds its documents among them
        rows = np.concatenate([pairs[ids, 0], pairs[ids, 1], negatives[is_there]])
        slots = np.zeros((n, documents.shape[1]), np.int64)
        slots[:, 0] = np.arange(n, 2 * n)
        slots[:, 1:][is_there] = np.arange(2 * n, len(rows))
        pull = np.full(len(rows), 0.5 / (documents >= 0).sum(), np.float32)
        pull[:n] = 0.5 / len(whole)
        arrays = [pull, slots, places, self.corpus.positives[ids], documents.ravel()]
        tensors = [torch.from_numpy(array) for array in arrays]
        texts = self.data.lay_out(rows)
        return PairBatch(texts, self.data.targets(rows), *tensors, len(whole))


# --------------------------------------------------------------------------------------------------
# Model

# The task in the default teacher's model card; its documents have no prompt.
INFLY_PROMPT = (
    "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: "
)


def find_hub(args):
    """Whether the hub is needed and cannot be reached: its libraries would try for minutes.
    (rank 0)"""
    from concurrent.futures import ThreadPoolExecutor, wait
    from urllib.error import HTTPError
    from urllib.request import urlopen

    names = {args.teacher_model, args.student_model, args.phase1_data, args.phase2_data}
    remote = []
    for name in sorted(names):
        # a missing ./model or texts.txt is no name of the hub, either
        is_local = name.startswith(("builtin:", "pydocs", ".", "/"))
        is_file = name.endswith((".txt", ".jsonl", ".json", ".csv", ".parquet"))
        if not (is_local or is_file or Path(name).exists()):
            remote.append(name)
    if not remote or "HF_HUB_OFFLINE" in os.environ:
        return False
    url = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    answer = ThreadPoolExecutor(1).submit(urlopen, url, timeout=4)
    wait([answer], timeout=5)  # to look up a name has no time limit of its own
    # a mirror need not have a page there: an error over HTTP is an answer, too
    if answer.done() and isinstance(answer.exception(), HTTPError | None):
        return False
    logging.warning(f"no model hub: {', '.join(remote)} must already be on this machine")
    return True


def local_model(args, name, corpus):
    """The folder of a model builtin:..., made if need be; other names as they are. (all ranks)"""
    if not name.startswith("builtin:"):
        return name
    _, kind, *size = name.split(":")
    options = [kind, f"--texts={corpus.folder}"]
    if size:
        options.append(f"--size={size[0]}")
    if kind == "bert":
        options += [f"--length={args.student_max_length or 64}", f"--seed={args.seed}"]
    folder = cache_folder(args, kind, corpus.folder.name, options[2:])
    make_once(folder, run_tool, "make_builtin_models.py", *options)
    return str(folder)


def load_model(name, what, local, **options):
    """A SentenceTransformer, on the CPU."""
    import transformers
    from sentence_transformers import SentenceTransformer

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()  # every rank has one
    try:
        return SentenceTransformer(name, device="cpu", **options)
    except (OSError, ValueError) as error:
        text = f"--{what}_model {name} cannot be loaded; without a download: builtin:{local}"
        raise InputError(f"{text} ({str(error).splitlines()[0][:200]})") from None


def set_prompts(model, query, document, default=""):
    """Texts before queries and documents: as given, else the model's own, else none."""
    own = model.prompts or {}
    if query is None:
        query = own.get("query") or default
    if document is None:
        document = own.get("document") or ""
    model.prompts = {"query": query, "document": document}


def load_teacher(args, name, device):
    options = {"trust_remote_code": args.trust_remote_code}
    prompt = ""
    if device.type != "cpu":
        options["model_kwargs"] = {"dtype": torch.bfloat16}  # fp16 breaks some large models
    if name.startswith("infly/"):  # without its own code it would be another, causal model
        options["trust_remote_code"] = True
        options["config_kwargs"] = {"use_cache": False}
        prompt = INFLY_PROMPT
    teacher = load_model(name, "teacher", "lsa", **options)
    set_prompts(teacher, args.teacher_query_prompt, args.teacher_document_prompt, prompt)
    if args.teacher_max_length:
        if teacher.max_seq_length == math.inf:
            raise InputError(f"--teacher_max_length: {name} has no maximum length")
        teacher.max_seq_length = args.teacher_max_length
    return teacher.to(device).eval()


def load_student(args, name):
    """A SentenceTransformer that ends in Normalize, without a head."""
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

    options = {"trust_remote_code": args.trust_remote_code}
    options["model_kwargs"] = {"dtype": torch.float32}
    student = load_model(name, "student", "bert", **options)
    if not hasattr(student[0], "model") or not hasattr(student.tokenizer, "backend_tokenizer"):
        raise InputError(f"--student_model {name}: no transformer with a fast tokenizer")
    if len(student) < 2 or not isinstance(student[1], Pooling):
        raise InputError(f"--student_model {name}: its second module must be Pooling")
    if args.student_layers:
        keep_layers(student[0].model, args.student_layers)
    if args.student_max_length:
        student.max_seq_length = args.student_max_length
    if student.max_seq_length is None:
        raise InputError(f"--student_model {name} has no maximum length: --student_max_length")
    set_prompts(student, args.student_query_prompt, args.student_document_prompt)
    if any(student.prompts.values()) and not student[1].include_prompt:
        hint = "--student_query_prompt= --student_document_prompt= leaves them out"
        raise InputError(f"--student_model {name} pools without its prompts: {hint}")
    if not isinstance(student[-1], Normalize):
        student.append(Normalize())
    return student


def keep_layers(network, wanted):
    """Keep so many evenly spaced layers of a transformer, the first and the last among them."""
    config = network.config
    depth = config.num_hidden_layers
    stacks = []
    for module in network.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == depth:
                stacks.append((module, name, child))
    if not stacks or wanted > depth:
        raise InputError(f"--student_layers {wanted}: the student has {depth} layers")
    kept = [int(i * (depth - 1) / max(1, wanted - 1) + 0.5) for i in range(wanted)]
    for module, name, child in stacks:
        setattr(module, name, nn.ModuleList([child[i] for i in kept]))
    # a list with an entry for each layer, such as layer_types of ModernBERT and Qwen3
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == depth:
            setattr(config, name, [value[i] for i in kept])
    config.num_hidden_layers = wanted
    logging.info(f"The student keeps its layers {kept} of {depth}")


class Student(nn.Module):
    """A SentenceTransformer that reads Texts, and a head."""

    def __init__(self, model, dtype):
        super().__init__()
        self.model = model
        self.head = nn.Sequential()
        self.dtype = dtype  # of autocast
        self.in_one_pass = False
        self.width = model.get_embedding_dimension()  # without the head
        self.dimensions = self.width

    def add_head(self, hidden, dimensions):
        """The original has the norm before GELU, which sentence-transformers has no modules for."""
        from sentence_transformers.sentence_transformer.modules import Dense, LayerNorm, Normalize

        self.head.append(Dense(self.width, hidden, activation_function=nn.GELU()))
        self.head.append(LayerNorm(hidden))
        self.head.append(Dense(hidden, dimensions, activation_function=nn.Identity()))
        self.head.append(Normalize())
        self.dimensions = dimensions

    def forward(self, texts, head=True, full_precision=False):
        """Unit vectors (B, D) in float32, in the order in which the texts were asked for.
        full_precision: without autocast, as a saved student is used."""
        network, pooling, *others = self.model
        dtype = torch.float32 if full_precision else self.dtype
        masks = texts.groups(texts.mask)
        # one autocast around all groups: it makes copies of all weights, and keeps them to its end
        with torch.autocast(texts.ids.device.type, dtype, enabled=dtype != torch.float32):
            if self.in_one_pass:
                tokens = {"input_ids": texts.ids[None], "position_ids": texts.positions[None]}
                output = network.model(**tokens, texts=texts)
                states = texts.groups(output.last_hidden_state[0].float())
            else:
                states = []
                for ids, mask in zip(texts.groups(texts.ids), masks, strict=True):
                    features = network({"input_ids": ids, "attention_mask": mask})
                    states.append(features["token_embeddings"].float())
        pooled = []
        for group, mask in zip(states, masks, strict=True):
            features = pooling({"token_embeddings": group, "attention_mask": mask})
            pooled.append(features["sentence_embedding"])
        features = {"sentence_embedding": torch.cat(pooled).index_select(0, texts.order)}
        for module in others:
            features = module(features)
        if head:
            features = self.head(features)
        return features["sentence_embedding"]


def attend(module, query, key, value, mask, scaling=None, dropout=0.0, **options):
    """Attention, for transformers' models, within each of the texts that lie one after the other in
    query, key and value (1, H, T, D): group by group. Returns (1, T, H, D)."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    texts = options["texts"]
    causal = getattr(module, "is_causal", False)
    parts = [texts.groups(tensor[0].transpose(0, 1)) for tensor in (query, key, value)]
    outputs = []
    for *group, mask in zip(*parts, texts.groups(texts.mask), strict=True):
        # where tokens see only those before them, padding behind them changes nothing
        seen = None if causal else mask[:, None, None].bool()
        group = [tensor.transpose(1, 2) for tensor in group]
        output, _ = sdpa_attention_forward(module, *group, seen, dropout, scaling, is_causal=causal)
        outputs.append(output.flatten(0, 1))
    return torch.cat(outputs)[None], None


@torch.no_grad()
def choose_groups(student, tokens, device):
    """Let the student read all groups in one pass, with attention group by group, if it gives the
    same vectors in that way. Else it makes a pass for each group, as all models can. Returns what
    groups it should get: (texts in a group at least, share of padding in it at most)."""
    from transformers import AttentionInterface

    network = student.model[0].model
    rows = np.unique(np.linspace(0, len(tokens.lengths) - 1, 16, dtype=np.int64))
    rows = np.concatenate([rows, np.argsort(tokens.lengths)[-8:]])  # and the longest
    texts = move(lay_out(tokens, rows, 1, 0.02), device)
    student.eval()
    if getattr(network, "_supports_attention_backend", False):
        expected = student(texts, head=False, full_precision=True)
        own_attention = network.config._attn_implementation
        AttentionInterface.register("within_texts", attend)
        network.set_attn_implementation("within_texts")
        student.in_one_pass = True
        try:
            found = student(texts, head=False, full_precision=True)
            student.in_one_pass = (found - expected).abs().max().item() < 1e-4
        except (RuntimeError, TypeError, ValueError):  # it takes no positions, or hands on no texts
            student.in_one_pass = False
        if not student.in_one_pass:
            network.set_attn_implementation(own_attention)
    student.train()
    logging.info(f"The student reads a batch in one pass: {student.in_one_pass}")
    if device.type != "cpu":
        return 32, 0.15  # every group costs the time of many small kernels
    return (1, 0.02) if student.in_one_pass else (16, 0.15)


def freeze_unused(student, texts):
    """Freeze what gets no gradient, such as BERT's pooler: DDP would wait for it. (It stays in the
    model, which loads without complaint.)"""
    student(texts).sum().backward()
    unused = []
    for name, parameter in student.named_parameters():
        if parameter.grad is None:
            parameter.requires_grad_(False)
            unused.append(name.removeprefix("model."))
    student.zero_grad()
    if unused:
        logging.info(f"Not trained, since they get no gradient: {', '.join(unused)}")


# --------------------------------------------------------------------------------------------------
# Loss


def distance(student, target, l2_weight, cosine_weight):
    """Of unit vectors (B, D): squared distance, summed over D, and 1 - cosine, weighted -> (B,)."""
    cosine = (student * target).sum(1)
    return l2_weight * (student - target).square().sum(1) + cosine_weight * (1 - cosine)


def not_negatives(documents, positives, labels, teacher_scores, margin):
    """Documents that are no negatives of a query (n, M): gaps, other positives of it, and those for
    which the teacher's score is above that for the positive by more than the margin (Solatorio
    2024). The positive itself is never among them."""
    limit = teacher_scores.gather(1, labels[:, None]) + margin
    masked = (teacher_scores > limit) | (documents == -1)
    for column in positives.unbind(1):
        masked |= documents == column[:, None]
    return masked.scatter(1, labels[:, None], False)


class GatherRows(torch.autograd.Function):
    """The rows of all ranks (W b, ...), rank by rank. Each rank gets the sum of what the ranks have
    as the gradient of its rows: that is a reduce-scatter, half of the work of an all-reduce."""

    @staticmethod
    def forward(ctx, rows):
        gathered = rows.new_empty(dist.get_world_size() * len(rows), *rows.shape[1:])
        dist.all_gather_into_tensor(gathered, rows.contiguous())
        return gathered

    @staticmethod
    def backward(ctx, gradient):
        own = gradient.new_empty(len(gradient) // dist.get_world_size(), *gradient.shape[1:])
        dist.reduce_scatter_tensor(own, gradient.contiguous())
        return own


def gather(rows, most, filler=0):
    """The rows (n, ...) of all ranks, rank by rank, each rank's filled up to `most`. (all ranks)"""
    filling = rows.new_full((most - len(rows), *rows.shape[1:]), filler)
    rows = torch.cat([rows, filling])
    if dist.get_world_size() == 1:
        return rows
    return GatherRows.apply(rows)


def split_texts(batches, vectors):
    """Vectors of the batches' texts -> queries (n, D), their documents (n, 1 + K, D)."""
    queries = []
    documents = []
    for batch, part in zip(batches, vectors, strict=True):
        n, k = batch.slots.shape
        queries.append(part[:n])
        documents.append(part.index_select(0, batch.slots.flatten()).view(n, k, -1))
    return torch.cat(queries), torch.cat(documents)


def text_loss(args, batch, vectors):
    """What a micro-batch adds to the mean loss of phase 1 over the step."""
    targets = F.normalize(batch.targets.float(), dim=1)
    terms = distance(vectors, targets, args.phase1_l2_weight, args.phase1_cosine_weight)
    return terms.sum() / batch.total


def pair_loss(args, batches, vectors):
    """What this rank adds to the mean loss of phase 2 over the step, and to its parts: loss,
    infonce, distance. batches: its micro-batches; vectors: those of their texts. (all ranks)"""
    first = batches[0]
    total = first.total
    places = torch.cat([batch.places for batch in batches])
    positives = torch.cat([batch.positives for batch in batches])
    pull = torch.cat([batch.pull for batch in batches])
    targets = [batch.targets for batch in batches]

    # a query's documents are those of all ranks, in the order of the step's queries
    most = len(batches) * math.ceil(total / (len(batches) * dist.get_world_size()))
    order = gather(places, most, filler=total).argsort()[:total]
    queries, documents = split_texts(batches, vectors)
    documents = gather(documents, most).index_select(0, order).flatten(0, 1)
    teacher_queries, teacher_documents = split_texts(batches, targets)
    teacher_documents = gather(teacher_documents, most).index_select(0, order).flatten(0, 1)

    labels = places * (len(documents) // total)  # the positives' numbers
    scores = F.normalize(teacher_queries.float(), dim=1)
    scores = scores @ F.normalize(teacher_documents.float(), dim=1).T
    margin = args.false_negative_margin
    masked = not_negatives(first.documents, positives, labels, scores, margin)
    logits = queries @ documents.T / args.temperature
    logits = logits.masked_fill(masked, -math.inf)
    contrast = F.cross_entropy(logits, labels, reduction="none").sum() / total
    targets = F.normalize(torch.cat(targets).float(), dim=1)
    terms = distance(torch.cat(vectors), targets, args.phase2_l2_weight, 0.0)
    far = (terms * pull).sum()
    return torch.stack([args.infonce_weight * contrast + far, contrast, far])


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

EVALUATED_TOGETHER = 64  # texts


@torch.no_grad()
def embed(run, rows, head):
    """The student's vectors of texts `rows` (B, D), or None if the ranks agreed to stop. Batch k
    goes to rank k % world_size: the batches are the same on any number of ranks. (all ranks)"""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    student = run.student
    by_length = np.argsort(-run.data.tokens.lengths[rows], kind="stable")
    starts = range(0, len(rows), EVALUATED_TOGETHER)
    batches = [by_length[start : start + EVALUATED_TOGETHER] for start in starts]
    dimensions = student.dimensions if head else student.width
    vectors = torch.zeros(len(rows), dimensions, device=run.device)
    student.eval()
    for first in range(0, len(batches), world_size):
        if run.guard.agree():  # here and not once at the end: an evaluation may take long
            return None
        if first + rank < len(batches):
            part = batches[first + rank]
            texts = move(run.data.lay_out(rows[part]), run.device)
            vectors[torch.from_numpy(part).to(run.device)] = student(texts, head)
    student.train()
    dist.all_reduce(vectors)  # each row is zero on all ranks but one
    return vectors


def ranking_metrics(corpus, vectors):
    """nDCG@10 (Jarvelin and Kekalainen 2002, binary), MRR@10 and recall@100, each the mean over the
    held-out queries; nothing if there are none. vectors: of corpus.eval_texts. (all ranks)"""
    pairs = corpus.eval_pairs
    if len(pairs) == 0:
        return {}
    queries = vectors[: len(corpus.eval_queries)]
    documents = vectors[len(queries) :]

    # the place of each pair's document in the ranking for its query; ties count against us, or one
    # vector for all texts would look good
    found = torch.zeros(len(pairs), dtype=torch.float64, device=vectors.device)
    on_device = torch.from_numpy(pairs.copy()).to(vectors.device)
    for start in range(512 * dist.get_rank(), len(pairs), 512 * dist.get_world_size()):
        query, document = on_device[start : start + 512].T
        scores = queries.index_select(0, query) @ documents.T
        own = scores.gather(1, document[:, None])
        found[start : start + 512] = (scores >= own).sum(1)
    dist.all_reduce(found)
    places = found.cpu().numpy()

    query = pairs[:, 0]
    answers = np.bincount(query)
    discounts = 1 / np.log2(np.arange(2, 12))
    gains = np.where(places <= 10, 1 / np.log2(places + 1), 0)
    ideal = np.cumsum(discounts)[np.minimum(answers, 10) - 1]
    first = np.full(len(answers), np.inf)
    np.minimum.at(first, query, places)
    return {
        "ndcg@10": float((np.bincount(query, gains) / ideal).mean()),
        "mrr@10": float(np.where(first <= 10, 1 / first, 0).mean()),
        "recall@100": float((np.bincount(query, places <= 100) / answers).mean()),
    }


def evaluate(run, head=True):
    """Held-out metrics of the student, with its head or without; None if the ranks agreed to stop.
    (all ranks)"""
    corpus = run.corpus
    vectors = embed(run, corpus.eval_texts, head)
    if vectors is None:
        return None
    if not vectors.isfinite().all():
        raise RunError("the student's vectors are no longer finite: lower the learning rate")
    metrics = ranking_metrics(corpus, vectors)
    if head:  # without the distractors, which may have been trained on
        rows = corpus.eval_texts[: len(corpus.eval_queries) + corpus.eval_answers]
        found = vectors[: len(rows)]
        target = F.normalize(run.data.targets(rows).to(run.device).float(), dim=1)
        weights = (run.args.phase1_l2_weight, run.args.phase1_cosine_weight)
        metrics["loss"] = distance(found, target, *weights).double().mean().item()
        metrics["teacher_cosine"] = (found * target).sum(1).double().mean().item()
    # rank 0's for all, who decide by them: another processor might round differently
    return on_rank0(dict, metrics)


def evaluate_baselines(run):
    """The teacher and the untrained student. (all ranks)"""
    loop = run.loop
    vectors = torch.from_numpy(run.data.vectors[run.corpus.eval_texts]).to(run.device)
    loop["teacher"] = ranking_metrics(run.corpus, F.normalize(vectors.float(), dim=1))
    logging.info(f"Held out, the teacher: {as_text(loop['teacher'])}")
    # a head with random weights would make the student look worse than it is
    loop["untrained"] = evaluate(run, head=len(run.corpus.eval_queries) == 0) or {}
    logging.info(f"Held out, the untrained student: {as_text(loop['untrained'])}")


def as_text(metrics):
    return "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())


# --------------------------------------------------------------------------------------------------
# Train


def lr_factor(args, step, steps):
    """What the peak rate is multiplied by: a straight rise from above 0, then a straight fall."""
    rise = int(args.warmup_ratio * steps)
    if step < rise:
        return (step + 1) / (rise + 1)
    return 1 - (step - rise) / max(1, steps - rise)


def make_optimizer(args, model, lr):
    decay = []
    no_decay = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            if parameter.ndim > 1 and "embeddings." not in name:
                decay.append(parameter)
            else:
                no_decay.append(parameter)
    groups = [
        {"params": decay, "weight_decay": args.weight_decay},
        {"params": no_decay, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, fused=True)


def without_sync(ddp_model, needed):
    """Gradients are added up over the ranks in the last micro-batch only."""
    if needed or dist.get_world_size() == 1:
        return contextlib.nullcontext()
    return ddp_model.no_sync()


def text_step(args, ddp_model, batches, scaler):
    """Forward and backward of a step of phase 1; its part of the loss (1,)."""
    parts = 0.0
    for number, batch in enumerate(batches, start=1):
        with without_sync(ddp_model, number == len(batches)):
            loss = text_loss(args, batch, ddp_model(batch.texts)).reshape(1)
            # DDP takes the mean over the ranks, we want the sum
            scaler.scale(loss.sum() * dist.get_world_size()).backward()
        parts = parts + loss.detach()
    return parts


def pair_step(args, ddp_model, student, batches, scaler, reseed):
    """The same of phase 2, (3,). The negatives are those of the whole step. So with several
    micro-batches all vectors come first, without a graph; then the loss and its gradient by the
    vectors; then each micro-batch again, with its part of that gradient (Gao et al. 2021)."""
    scale = dist.get_world_size()
    if len(batches) == 1:
        parts = pair_loss(args, batches, [ddp_model(batches[0].texts)])
        scaler.scale(parts[0] * scale).backward()
        return parts.detach()
    with torch.no_grad():
        vectors = [student(batch.texts) for batch in batches]
    parts = pair_loss(args, batches, [vector.requires_grad_() for vector in vectors])
    gradients = torch.autograd.grad(parts[0] * scale, vectors)
    reseed()  # the same dropout again
    for number, batch in enumerate(batches):
        with without_sync(ddp_model, number == len(batches) - 1):
            loss = (ddp_model(batch.texts) * gradients[number]).sum()
            scaler.scale(loss).backward()
    return parts.detach()


class Run(NamedTuple):
    """What both phases and the evaluation share."""

    args: argparse.Namespace
    device: torch.device
    corpus: Corpus
    data: TextData
    student: Student
    ddp_model: nn.Module
    guard: StepGuard
    log: RunLog
    state: dict  # the checkpoint to go on from, or None
    loop: dict  # where training stands: it is saved with the weights


PARTS = {1: ["loss"], 2: ["loss", "infonce", "distance"]}


def make_sampler(run, phase):
    """The sampler of a phase, and its data."""
    args = run.args
    corpus = run.corpus
    lengths = run.data.tokens.lengths
    if phase == 1:
        return GlobalBatchSampler(corpus.phase1, args, run.state, lengths), run.data
    some = corpus.negatives[:, : args.num_negatives]
    cost = lengths[corpus.pairs].sum(1) + (lengths[some] * (some >= 0)).sum(1)
    sampler = GlobalBatchSampler(np.arange(len(corpus.pairs)), args, run.state, cost)
    return sampler, PairData(args, corpus, run.data)


def note_metrics(run, phase, metrics):
    """Log held-out metrics; the names of the checkpoints of which these weights are the best."""
    loop = run.loop
    row = {"step": loop["step"], "phase": phase, "epoch": loop["epoch"]}
    run.log.write({**row, **{f"val/{name}": value for name, value in metrics.items()}})
    metric = "ndcg@10" if "ndcg@10" in metrics else "teacher_cosine"  # where there are no queries
    value = metrics[metric]
    before = {name: best["value"] for name, best in loop["best"].items()}
    files = []
    if value > before.get(f"phase {phase}", -math.inf):  # NaN is never better
        files.append(f"phase{phase}_best.pt")
        if value > max(before.values(), default=-math.inf):
            files.append("best.pt")
        best = {"metric": metric, "value": value, "better": "higher", "step": loop["step"]}
        loop["best"][f"phase {phase}"] = {**best, "metrics": metrics}
    return files


def train(run, phase):
    """One phase, from where it stands. (all ranks)"""
    args = run.args
    device = run.device
    guard = run.guard
    loop = run.loop
    log = run.log
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    if loop["phase"] != phase:
        loop.update(phase=phase, first=loop["step"], validated=0)
    sampler, data = make_sampler(run, phase)
    loop["global_batch"] = sampler.global_batch
    steps = getattr(args, f"phase{phase}_epochs") * sampler.steps
    if args.max_steps > 0:
        steps = min(steps, args.max_steps)
    eval_every = args.eval_every or sampler.steps
    # The host prepares the next batch while a GPU computes this one; if data_wait says that it
    # takes longer: --num_workers.
    loader = DataLoader(
        data,
        batch_size=None,  # our sampler makes whole batches
        sampler=sampler,
        num_workers=args.num_workers,
        persistent_workers=args.num_workers > 0,
        pin_memory=device.type != "cpu",
        worker_init_fn=ignore_signals,
    )
    peak = getattr(args, f"phase{phase}_lr")
    optimizer = make_optimizer(args, run.student, peak)
    scaler = torch.amp.GradScaler(device.type, enabled=run.student.dtype == torch.float16)
    generator = default_generator(device)
    if run.state and run.state["phase"] == phase:
        restore(run.state, run.student, optimizer, scaler)
    logging.info(f"Phase {phase}: {steps:,} steps, {sampler.steps:,} an epoch, peak rate {peak:g}")

    def save(name):
        content = {"script": SCRIPT, "format": FORMAT, "args": vars(args)}
        content.update(loop, wandb_id=log.wandb_id, log_size=log.size())
        content["model"] = run.student.state_dict()
        if name == "latest.pt":  # the best weights are not trained on
            content["optimizer"] = optimizer.state_dict()
            content["scaler"] = scaler.state_dict()
        on_rank0(save_checkpoint, Path(args.output_dir), name, content)

    def reseed():
        # Dropout depends on (seed, step, rank) alone, so a resumed run draws the same. (The factors
        # keep steps below 1,000,003 and ranks below 4,099 apart.)
        generator.manual_seed((args.seed * 1_000_003 + loop["step"]) * 4099 + rank)

    done = loop["step"] - loop["first"]
    hide = rank > 0 or not sys.stderr.isatty()
    bar = tqdm(total=steps, initial=done, desc=f"phase {phase}", disable=hide)
    batches = None
    began = time.monotonic()
    since = done
    data_wait = 0.0
    # parts of the loss, gradient norm, steps; none of skipped steps
    sums = torch.zeros(len(PARTS[phase]) + 2, device=device)
    while not guard.reason:
        done = loop["step"] - loop["first"]  # steps of this phase
        epoch, position = divmod(done, sampler.steps)
        loop["epoch"] = epoch

        # evaluate; all ranks have the same metrics, and so agree on what is best
        due = done > 0 and (done % eval_every == 0 or done >= steps)
        if due and loop["validated"] < done:
            paused = time.monotonic()
            metrics = evaluate(run)
            if metrics is None:  # the ranks stop: this step's checkpoint was made before
                break
            loop["validated"] = done
            for name in note_metrics(run, phase, metrics):
                logging.info(f"Saving {name}, the best so far")
                save(name)
            if done >= steps:
                save("latest.pt")  # the same command, given again, then knows it
            began += time.monotonic() - paused
        if done >= steps:
            break

        if position == 0 or batches is None:
            sampler.set_epoch(epoch, start=position)
            batches = iter(loader)
        reseed()
        lr = peak * lr_factor(args, done, steps)
        for group in optimizer.param_groups:
            group["lr"] = lr

        # the micro-batches of a step; forward and backward
        asked = time.monotonic()
        step_batches = []
        for _ in range(sampler.accumulation):
            step_batches.append(move(next(batches), device))
        data_wait += time.monotonic() - asked
        if phase == 1:
            parts = text_step(args, run.ddp_model, step_batches, scaler)
        else:
            parts = pair_step(args, run.ddp_model, run.student, step_batches, scaler, reseed)

        # update, unless the gradient is not finite; then the step counts in no mean, either
        norm = guard.update(optimizer, scaler)
        values = torch.cat([parts, norm.reshape(1), torch.ones_like(norm).reshape(1)])
        sums += torch.where(norm.isfinite(), values, 0.0)
        done += 1
        loop["step"] += 1
        bar.update()

        # once in a while: log. Here the host waits for the GPU. (all ranks)
        if done % args.log_every == 0 or done == steps:
            *part_sums, norm_sum, good = sum_over_ranks(sums)
            seconds = time.monotonic() - began
            made = done - since
            row = {"step": loop["step"], "phase": phase, "epoch": epoch, "lr": lr}
            row["skipped"] = made - good / world_size
            if good > 0:
                for name, part in zip(PARTS[phase], part_sums, strict=True):
                    row[name] = part * world_size / good  # each rank has a share of it ...
                row["grad_norm"] = norm_sum / good  # ... and all of the norm
            row["samples_per_s"] = made * sampler.global_batch / seconds
            row["data_wait"] = data_wait / seconds
            log.write(row)
            began = time.monotonic()
            since = done
            data_wait = 0.0
            sums.zero_()

        # save; also before an evaluation, which may be long and may be interrupted (all ranks)
        reason = guard.agree()
        if reason or done % args.save_every == 0 or done % eval_every == 0 or done == steps:
            save("latest.pt")
    bar.close()


def load_weights(args, student, name, otherwise):
    """Those of a checkpoint of this run, or a warning about what is used otherwise. (all ranks)"""
    path = Path(args.output_dir) / name
    if not on_rank0(is_whole, path):
        logging.warning(f"{path} is missing or damaged: {otherwise}")
        return
    state = load_checkpoint(path)
    trained = state["args"]["student_model"]
    if name == "phase1_best.pt" and trained != args.student_model:
        raise InputError(f"{path} was trained with --student_model {trained}")
    try:
        student.load_state_dict(state["model"])
    except (KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{path} does not fit this student: {reason}") from None
    logging.info(f"Loaded {path}, step {state['step']}")


# --------------------------------------------------------------------------------------------------
# Main


def save_student(args, student, head, path, corpus, tokens):
    """Save as a SentenceTransformer of its own modules, with the head or without; load it, and
    compare what it gives with the forward pass. (rank 0)"""
    from sentence_transformers import SentenceTransformer

    prompts = student.model.prompts
    device = student.model.device
    options = {"device": str(device), "trust_remote_code": args.trust_remote_code}
    modules = [*student.model, *student.head] if head else [*student.model]
    new = f"{path}.tmp"
    shutil.rmtree(new, ignore_errors=True)
    model = SentenceTransformer(modules=modules, prompts=prompts, **options)
    model.save(new, create_model_card=False)

    loaded = SentenceTransformer(new, **options)
    rows = np.unique(np.linspace(0, len(corpus.kinds) - 1, 64, dtype=np.int64))
    found = loaded.encode(corpus.texts(rows, prompts), batch_size=8, prompt="", **AS_TENSOR)
    student.eval()
    with torch.no_grad():
        texts = move(lay_out(tokens, rows, 16, 0.15), device)
        expected = student(texts, head, full_precision=True)
    student.train()
    gap = (found.float() - expected).abs().max().item()
    limit = 1e-2 if args.precision == "tf32" else 1e-5  # other shapes are rounded in another way
    if not gap <= limit:
        raise RunError(f"saved and loaded, the student gives vectors that are {gap:.1e} apart")
    shutil.rmtree(path, ignore_errors=True)
    os.rename(new, path)  # complete and compared, or not there
    logging.info(f"Saved {path}: loaded, it gives the same vectors to {gap:.1e}")


def check_saving(args, student, corpus, tokens):
    """Better known now than after hours: can the student be saved and loaded? (rank 0)"""
    with tempfile.TemporaryDirectory(dir=args.output_dir, prefix="check-") as folder:
        save_student(args, student, True, f"{folder}/student", corpus, tokens)


def save_artifacts(run):
    """The best student as a SentenceTransformer, and beside it without the head. (rank 0)"""
    args = run.args
    student = run.student
    short = re.sub(r"\W+", "-", args.student_model.rstrip("/").rpartition("/")[2]).strip("-")
    name = f"{args.artifacts_dir}/distilled-{short}-{student.dimensions}d"
    paths = {f"{name}-mrl": True}
    if args.use_projection:
        paths = {f"{name}-base-{student.width}d": False, name: True}
    for path, head in paths.items():
        if Path(path).exists():  # it may be another run's
            old = Path(path).rename(f"{path}.old-{time.strftime('%Y%m%d-%H%M%S')}")
            logging.info(f"what was in {path} is now in {old}")
        save_student(args, student, head, path, run.corpus, run.data.tokens)
    return list(paths)


def compare(run):
    """The last word: the best of each phase beside the untrained student and the teacher. Returns
    the best of both phases. (all ranks)"""
    loop = run.loop
    rows = {"untrained student": loop["untrained"]}
    for phase, best in loop["best"].items():
        rows[f"after {phase}"] = best["metrics"]
    rows["teacher"] = loop["teacher"]
    logging.info(f"Held out: {run.corpus.held_out()}; the best of each phase:")
    for who, metrics in rows.items():
        logging.info(f"  {who:18} {as_text(metrics)}")

    best = max(loop["best"].values(), key=lambda record: record["value"])
    last = loop["best"].get("phase 2", best)
    if last["value"] < best["value"]:
        logging.warning("phase 2 made the student worse: that of phase 1 is kept")
    if best["value"] <= loop["untrained"].get(best["metric"], -math.inf):
        hint = "look at --phase1_lr, --phase2_lr, the epochs, the data, and the teacher's figures"
        logging.warning(f"training did not make the student better: {hint}")
    return best


def prepare(args, device):
    """Data, models, teacher vectors and the run's folder, as a Run; if the ranks agreed to stop,
    the reason. (all ranks)"""
    if on_rank0(find_hub, args):
        os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    corpus = load_corpus(args)
    teacher_name = local_model(args, args.teacher_model, corpus)
    student_name = local_model(args, args.student_model, corpus)
    torch.manual_seed(args.seed)  # the same weights on all ranks
    model = load_student(args, student_name)
    tokens = load_tokens(args, corpus, model)
    settings = [args.teacher_max_length, args.teacher_query_prompt, args.teacher_document_prompt]
    key = [corpus.folder.name, on_rank0(model_key, teacher_name), settings]
    folder = cache_folder(args, "teacher", *key)
    data_hash = f"{corpus.folder.name} {tokens.folder.name} {folder.name}"
    state = open_run(args, data_hash)
    if state and state["phase"] == 2 and args.skip_phase2:
        text = f"--skip_phase2: {args.output_dir} is in phase 2"
        raise InputError(f"{text}: go on without it, or give --fresh")

    # the student as it will be saved, before the teacher reads for hours
    student = Student(model.to(device), choose_precision(args, device))
    limits = choose_groups(student, tokens, device)
    on_rank0(check_saving, args, student, corpus, tokens)
    guard = StepGuard(args, device)
    vectors = teacher_vectors(args, corpus, teacher_name, folder, device, guard)
    if vectors is None:
        return guard.reason
    width = student.width
    dimensions = vectors.shape[1]
    if args.use_projection:
        torch.manual_seed(args.seed)  # the same head on all ranks
        student.add_head(args.projection_hidden, dimensions)
        student.to(device)
        logging.info(f"With a head from {width} to the teacher's {dimensions} dimensions")
    elif dimensions < width:
        text = f"needs {width} teacher dimensions for this student, there are {dimensions}"
        raise InputError(f"--use_projection False {text}")
    else:
        logging.info(f"No head: the target is the first {width} of {dimensions} dimensions")
    data = TextData(tokens, vectors, limits, student.dimensions)
    freeze_unused(student, move(data.lay_out(np.arange(min(4, len(tokens.lengths)))), device))
    trained = sum(p.numel() for p in student.parameters() if p.requires_grad)
    logging.info(f"{trained:,} parameters are trained")
    loop = {
        "step": 0,
        "phase": 0,
        "first": 0,  # steps before this phase
        "epoch": 0,
        "validated": 0,  # steps of this phase at the last evaluation
        "best": {},  # of each phase
        "untrained": {},
        "teacher": {},
        "global_batch": 0,
        "data_hash": data_hash,
    }
    if state:
        loop = {name: state[name] for name in loop}
    log = RunLog(args, state)
    ddp_model = wrap_ddp(student, args, device)
    return Run(args, device, corpus, data, student, ddp_model, guard, log, state, loop)


def main(args):
    device = setup_ddp(args)
    # On Hopper GPUs torch prefers cuDNN's attention, which plans anew for each new shape: a step of
    # batches of varying lengths took 856 ms in bf16, and 47 ms in fp32, which cuDNN does not take.
    torch.backends.cuda.enable_cudnn_sdp(False)
    logging.info("Preparing data loaders...")
    run = prepare(args, device)
    if isinstance(run, str):
        return exit_status(run)
    loop = run.loop
    guard = run.guard
    log = run.log
    if not args.skip_phase2:
        make_sampler(run, 2)  # too few pairs: better known now than after phase 1
    if run.state is None:
        evaluate_baselines(run)

    logging.info("Starting distributed training...")
    if not args.skip_phase1 and loop["phase"] < 2:
        train(run, 1)
    if not args.skip_phase2 and not guard.reason:
        if loop["phase"] < 2:
            what = "the untrained student" if args.skip_phase1 else "the last weights"
            load_weights(args, run.student, "phase1_best.pt", f"phase 2 starts from {what}")
        train(run, 2)
    summary = {}
    if not guard.reason:
        logging.info("Training process completed.")
        best = compare(run)
        summary["best"] = {key: value for key, value in best.items() if key != "metrics"}
        summary["held_out"] = run.corpus.held_out()
        summary["baselines"] = {"untrained": loop["untrained"], "teacher": loop["teacher"]}
        summary["phases"] = {name: best["metrics"] for name, best in loop["best"].items()}
        if args.save_to_artifacts:
            load_weights(args, run.student, "best.pt", "the last weights are saved")
            summary["artifacts"] = on_rank0(save_artifacts, run)
    if run.state and loop["step"] == run.state["step"]:
        logging.info("nothing was left to train; the options are those of then")
        log.args = argparse.Namespace(**run.state["args"])
    status = f"stopped by {guard.reason}" if guard.reason else "finished"
    log.close(status=status, steps=loop["step"], **summary)
    if not guard.reason:
        logging.info("Training and evaluation completed successfully!")
    return exit_status(guard.reason)


if __name__ == "__main__":
    launch(parse_args, main)
