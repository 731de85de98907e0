"""Distil a large retrieval teacher into a small SentenceTransformer student, in two phases.

Phase 1 pulls the student's vectors of single texts to the teacher's; phase 2 trains on (query, positive,
negatives) with the contrastive InfoNCE loss, and keeps the pull. The teacher runs once over each text.

Run
    python train_ddp.py                                              one process: GPU, XPU or CPU
    ./run_ddp.sh 2 True --config configs/train_ddp_quickstart.yaml   two processes, no download, minutes
    torchrun --nproc_per_node=8 train_ddp.py --use_projection=False  one node
    torchrun --nproc_per_node=8 --nnodes=2 --node_rank=0 --master_addr=HOST train_ddp.py     (1 on node 2)

Data (--phase1_data, --phase2_data)
    ms_marco            MS MARCO v1.1 (`datasets`; the default); `name` or `name:config` of any hub data set
    pydocs              the documentation installed with Python, numpy and torch: real text, no download
    FILE.txt            phase 1: one text per line
    FILE.jsonl|.parquet query, positive (text or list), negatives (list, optional), per row
A part of the queries (--eval_fraction, by a hash of the text), with their documents, is held out; for
pydocs and MS MARCO it is split by documented object and by the data set's own validation split.

Modes
    --use_projection=True   student -> Linear-GELU-LayerNorm-Linear -> the teacher's dimensions
    --use_projection=False  MRL: no head; the target is the renormalised head of the teacher's vector

Logged metrics (means over all ranks; in metrics.jsonl, wandb)
    loss                weighted sum of the terms below, per text (phase 1) or per query (phase 2)
    distance            weighted squared L2 and cosine distance to the teacher's vectors
    infonce, kl         nats per query, over the documents of the whole optimizer step
    ndcg@10 mrr@10 recall@100, each 0 to 1: held-out queries against all held-out documents
    samples/s           texts (phase 1) or queries (phase 2) a second over all ranks
    data_wait, comm     share of the time spent waiting for batches; in all-reduces not hidden by compute

Files in --output_dir: latest.pt (resume), phase1_best.pt, phase2_best.pt, metrics.jsonl, summary.json, curves.png.

Differences from the original recipe: the squared distance is summed, not averaged, over dimensions, so
that its weight means something; negatives come from the whole step (all ranks and micro-batches, by
gradient caching, Gao et al. 2021) instead of one query's own 7; the head is normalised before it as in
the saved model; best is by held-out nDCG@10 instead of one rank's training loss; warm-up is a ratio of
the steps that there are.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import dataclasses
import difflib
import functools
import gc
import hashlib
import inspect
import itertools
import json
import logging
import math
import os
import queue
import random
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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
from tqdm import tqdm

# ---- Constants -------------------------------------------------------------------------------------

QUERY, DOCUMENT = 0, 1
DEFAULT_TEACHER = "infly/inf-retriever-v1-pro"
# The task string of the default teacher's model card; its documents take no prompt.
DEFAULT_TEACHER_PROMPT = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: "
PROJECTION_HIDDEN = 1536
LSA_DIM, LSA_FEATURES = 256, 30_000  # builtin:lsa
BERT_SIZE, BERT_VOCABULARY = "2x256", 8_000  # builtin:bert
BLOCK = 2048  # texts per file while teacher vectors are being computed
COLUMNS = {  # column names that are taken for each field, in this order
    "query": ("query", "anchor", "question"),
    "positive": ("positive", "positives", "answer", "document", "passage", "text"),
    "negatives": ("negatives", "negative"),
}
# Arguments that make another run of it: a resumed run must have them as they were.
SAME = (
    "teacher_model", "student_model", "use_projection", "phase1_data", "phase2_data", "max_samples_phase1",
    "max_samples_phase2", "eval_fraction", "eval_samples", "student_layers", "student_max_length",
    "teacher_max_length", "teacher_dim", "teacher_query_prompt", "teacher_document_prompt",
    "student_query_prompt", "student_document_prompt", "projection_hidden", "mine_negatives", "mine_margin",
    "num_negatives", "matryoshka_dims", "seed", "phase1_epochs", "phase2_epochs",
)  # fmt: skip

# ---- Arguments -------------------------------------------------------------------------------------


def int_list(text: str) -> list[int]:
    """'64,128,256' -> [64, 128, 256]"""
    return [int(part) for part in str(text).split(",") if part]


def build_parser() -> ArgumentParser:
    """Every option, its default and its help."""
    p = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    flag = dict(type=boolean, nargs="?", const=True, metavar="BOOL")
    g = p.add_argument_group("Data")
    g.add_argument("--phase1_data", default="ms_marco", help="texts of phase 1")
    g.add_argument("--phase2_data", default="ms_marco", help="queries, positives and negatives of phase 2")
    g.add_argument("--max_samples_phase1", type=int, default=100_000, help="rows read for phase 1")
    g.add_argument("--max_samples_phase2", type=int, default=500_000, help="rows read for phase 2")
    g.add_argument("--eval_fraction", type=float, default=0.05, help="share of the queries held out for validation")
    g.add_argument("--eval_samples", type=int, default=1000, help="validation queries at most")
    g.add_argument("--max_chars", type=int, default=10_000, help="texts are cut to so many characters")
    g.add_argument("--skip_bad_data", default=False, help="leave out bad rows and list them in a file", **flag)
    g.add_argument("--verify_data", default=False, help="recompute the checksums of cached arrays", **flag)
    g.add_argument("--cache_dir", default="./cache", help="tokens and teacher vectors, shared by runs and ranks")
    g.add_argument("--num_negatives", type=int, default=7, help="negatives per query, drawn anew every epoch if there are more")
    g.add_argument("--mine_negatives", type=int, default=0, help="add so many hard negatives per query from the teacher's vectors")
    g.add_argument("--mine_margin", type=float, default=0.05, help="a mined negative scores at least this much below the positive")
    g = p.add_argument_group("Model")
    g.add_argument("--teacher_model", default=DEFAULT_TEACHER, help="hub name, folder, or builtin:lsa[:DIM]")
    g.add_argument("--teacher_revision", help="revision of a hub teacher")
    g.add_argument("--teacher_max_length", type=int, help="tokens [default: the teacher's own]")
    g.add_argument("--teacher_dim", type=int, help="use the teacher's first so many dimensions")
    g.add_argument("--teacher_batch_size", type=int, default=64, help="texts per teacher forward pass")
    g.add_argument("--teacher_query_prompt", help="text before queries [default: the teacher's own]")
    g.add_argument("--teacher_document_prompt", help="text before documents [default: the teacher's own]")
    g.add_argument("--trust_remote_code", default=False, help="run code from the models' repositories (always on for the default teacher, which needs it)", **flag)
    g.add_argument("--student_model", default="sentence-transformers/all-mpnet-base-v2", help="hub name, folder, or builtin:bert[:LAYERSxHIDDEN]")
    g.add_argument("--student_layers", type=int, help="keep so many evenly spaced layers of the student")
    g.add_argument("--student_max_length", type=int, help="tokens [default: the student's own]")
    g.add_argument("--student_query_prompt", help="text before queries [default: the student's own]")
    g.add_argument("--student_document_prompt", help="text before documents [default: the student's own]")
    g.add_argument("--student_dropout", type=float, help="dropout of the student [default: its own]")
    g.add_argument("--use_projection", type=boolean, default=True, metavar="BOOL", help="project to the teacher's dimensions; False: MRL mode")
    g.add_argument("--projection_hidden", type=int, default=PROJECTION_HIDDEN, help="hidden size of the head")
    g = p.add_argument_group("Optimization")
    g.add_argument("--batch_size", type=int, default=64, help="texts or queries per GPU and micro-batch")
    g.add_argument("--phase1_epochs", type=int, default=1, help="epochs of phase 1")
    g.add_argument("--phase2_epochs", type=int, default=3, help="epochs of phase 2")
    g.add_argument("--max_steps", type=int, default=0, help="optimizer steps per phase at most (0 = all epochs)")
    g.add_argument("--phase1_lr", type=float, default=2e-5, help="peak learning rate of phase 1")
    g.add_argument("--phase2_lr", type=float, default=5e-6, help="peak learning rate of phase 2")
    g.add_argument("--warmup_ratio", type=float, default=0.1, help="share of a phase's steps that warm up")
    g.add_argument("--warmup_steps", type=int, help="warm-up steps instead of the ratio")
    g.add_argument("--lr_schedule", default="linear", choices=("linear", "cosine", "constant"), help="after the warm-up")
    g.add_argument("--weight_decay", type=float, default=0.01, help="AdamW's; none for biases, norms and embeddings")
    g.add_argument("--adam_beta2", type=float, default=0.999, help="AdamW's second beta")
    g.add_argument("--skip_phase1", default=False, help="start from phase1_best.pt, or from the raw student", **flag)
    g.add_argument("--phase1_checkpoint", help="where phase 2 starts with --skip_phase1 [default: OUTPUT_DIR/phase1_best.pt]")
    g.add_argument("--skip_phase2", default=False, help="stop after phase 1", **flag)
    g = p.add_argument_group("Loss")
    g.add_argument("--phase1_l2_weight", type=float, default=0.4, help="weight of the squared L2 distance")
    g.add_argument("--phase1_cosine_weight", type=float, default=0.6, help="weight of 1 - cosine")
    g.add_argument("--infonce_weight", type=float, default=0.8, help="weight of InfoNCE")
    g.add_argument("--phase2_l2_weight", type=float, default=0.2, help="weight of the squared L2 distance in phase 2")
    g.add_argument("--kl_weight", type=float, default=0.0, help="weight of KL(teacher's scores || student's scores)")
    g.add_argument("--temperature", type=float, default=0.02, help="of the similarities, student and teacher")
    g.add_argument("--negatives", default="step", choices=("step", "rank"), help="InfoNCE over the documents of the whole step (all ranks), or of this rank")
    g.add_argument("--false_negative_margin", type=float, default=0.0, help="mask documents that the teacher scores above positive + margin; < -1 masks none")
    g.add_argument("--matryoshka_dims", type=int_list, default=[], metavar="D,D", help="also train these leading dimensions")
    g = p.add_argument_group("Evaluation")
    g.add_argument("--eval_every", type=int, default=0, help="optimizer steps between evaluations (0 = every epoch)")
    g.add_argument("--early_stop_patience", type=int, default=0, help="evaluations without gain before a phase ends (0 = off)")
    g.add_argument("--eval_batch_size", type=int, default=64, help="texts per evaluation batch")
    g.add_argument("--save_to_artifacts", default=False, help="save the best student as a SentenceTransformer", **flag)
    g.add_argument("--artifacts_dir", default="./artifacts", help="folder of the saved students")
    add_ddp_arguments(p, output_dir="./checkpoints", wandb_project="train_ddp")
    return p


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Arguments, with the checks that need neither data nor devices."""
    parser = build_parser()
    args = parse_arguments(parser, argv)
    positive = ("batch_size", "max_samples_phase1", "max_samples_phase2", "phase1_epochs", "phase2_epochs", "temperature", "eval_samples", "eval_batch_size", "teacher_batch_size", "max_chars")
    for name in positive:
        if getattr(args, name) <= 0:
            parser.error(f"--{name} {getattr(args, name)} must be above 0")
    if args.skip_phase1 and args.skip_phase2:
        parser.error("--skip_phase1 and --skip_phase2 together leave nothing to train")
    if args.phase2_data.endswith(".txt") and not args.skip_phase2:
        parser.error(f"--phase2_data {args.phase2_data}: phase 2 needs query and positive (.jsonl or .parquet)")
    if not 0 < args.eval_fraction < 1:
        parser.error(f"--eval_fraction {args.eval_fraction} must be between 0 and 1")
    if any(d < 1 for d in args.matryoshka_dims):
        parser.error(f"--matryoshka_dims {args.matryoshka_dims} must be positive")
    return args


# ---- Data ------------------------------------------------------------------------------------------


class Texts:
    """Distinct (kind, text) pairs: kinds (N,) uint8 (0 query, 1 document) and texts, memory-mapped."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.blob = np.load(folder / "text.npy", mmap_mode="r")
        self.offsets = np.load(folder / "text_offsets.npy", mmap_mode="r")
        self.kinds = np.load(folder / "kinds.npy", mmap_mode="r")

    def __len__(self) -> int:
        return len(self.kinds)

    def __getitem__(self, i: int) -> str:
        return self.blob[self.offsets[i] : self.offsets[i + 1]].tobytes().decode("utf-8")


@dataclass
class Corpus:
    """Texts and what is made of them; every array holds rows of `texts`, memory-mapped.

    phase1 (N1,); queries (N2,), positives (N2,), negatives (N2, K) padded with -1; eval_queries (Q,),
    eval_documents (D,), eval_pairs (P, 2): rows (query number, document number) that are relevant.
    """

    texts: Texts
    phase1: np.ndarray
    queries: np.ndarray
    positives: np.ndarray
    negatives: np.ndarray
    eval_queries: np.ndarray
    eval_documents: np.ndarray
    eval_pairs: np.ndarray
    key: str


class TextTable:
    """Collects distinct texts while rows are read."""

    def __init__(self, max_chars: int):
        self.rows: dict[tuple[int, str], int] = {}
        self.max_chars = max_chars

    def add(self, kind: int, text: str) -> int:
        return self.rows.setdefault((kind, text[: self.max_chars].strip()), len(self.rows))


@dataclass
class Row:
    """One training or validation example as read. `group`: examples that must not be split."""

    query: str
    positives: list[str]
    negatives: list[str]
    group: str
    held_out: bool | None = None


class BadData(ValueError):
    """A row that cannot be used: where it is, what was found, what would be right."""


def hub_is_reachable() -> bool:
    """Whether the model hub answers within 5 seconds (retries inside the libraries take over a minute)."""
    import urllib.error
    import urllib.request

    answer = []

    def ask() -> None:
        try:
            urllib.request.urlopen(os.environ.get("HF_ENDPOINT", "https://huggingface.co"), timeout=5)
            answer.append(True)
        except urllib.error.HTTPError:
            answer.append(True)
        except OSError:
            answer.append(False)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(6)
    return bool(answer and answer[0])


def prepare_hub(args: argparse.Namespace) -> None:
    """Without a hub, make the libraries fail at once instead of retrying. Called before they are imported."""
    names = [args.teacher_model, args.student_model, args.phase1_data, args.phase2_data]
    local = ("builtin:", "pydocs")
    needs_hub = any(not n.startswith(local) and not Path(n).exists() for n in names)
    if needs_hub and "HF_HUB_OFFLINE" not in os.environ and not hub_is_reachable():
        os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
        warn("the model hub cannot be reached: only models and data that are already on this machine can be used")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")


def read_hub_rows(name: str, phase: int, limit: int) -> Iterator[tuple[str, dict]]:
    """(place, record) of a hub data set; MS MARCO v1.1 is brought to query, positive, negatives."""
    from datasets import load_dataset

    path, _, config = ("microsoft/ms_marco:v1.1" if name == "ms_marco" else name).partition(":")
    for split in ("train", "validation") if name == "ms_marco" else ("train",):
        try:
            data = load_dataset(path, config or None, split=split)
        except Exception as error:  # the library raises a dozen kinds
            raise ValueError(
                f"--phase{phase}_data {name}: the data set {path!r} is not on this machine and could not be fetched "
                f"({type(error).__name__}: {str(error)[:120]}); local alternatives: pydocs (needs no download), a .jsonl or .parquet file"
            ) from error
        for i, row in enumerate(itertools.islice(data, limit if split == "train" else 20_000)):
            if name == "ms_marco":
                picked = list(zip(row["passages"]["is_selected"], row["passages"]["passage_text"], strict=True))
                row = {"query": row["query"], "positive": [t for s, t in picked if s], "negatives": [t for s, t in picked if not s], "held_out": split == "validation"}
                if not row["positive"]:
                    continue  # no judged answer: nothing to learn from
            yield f"{name} {split} row {i}", row


def read_file_rows(path: Path) -> Iterator[tuple[str, dict]]:
    """(place, record) of a .txt, .jsonl or .parquet file."""
    if path.suffix == ".parquet":
        import pyarrow.parquet

        rows = (r for batch in pyarrow.parquet.ParquetFile(path).iter_batches() for r in batch.to_pylist())
        yield from ((f"{path} row {i}", r) for i, r in enumerate(rows, 1))
        return
    with open(path, "rb") as file:
        for i, line in enumerate(file, 1):
            place = f"{path} line {i}"
            try:
                text = line.decode("utf-8").strip()
                record_ = {"text": text} if path.suffix == ".txt" else json.loads(text) if text else None
            except (UnicodeDecodeError, json.JSONDecodeError) as error:
                record_ = error
            if record_ is not None and (path.suffix != ".txt" or text):
                yield place, record_


def parse_row(place: str, found: dict | Exception, phase: int) -> Row:
    """A record as a Row. Raises BadData naming the place, what was found and what would be right."""
    want = '{"query": text, "positive": text or [texts], "negatives": [texts]}'
    if isinstance(found, Exception) or not isinstance(found, dict):
        raise BadData(f"{place}: found {str(found)[:80]!r}, expected one JSON object like {want}")
    fields = {f: next((found[c] for c in names if c in found), None) for f, names in COLUMNS.items()}
    for name in ("positive", "negatives"):
        fields[name] = [fields[name]] if isinstance(fields[name], str) else [] if fields[name] is None else fields[name]
    single = phase == 1 and fields["query"] is None  # a text alone
    if not single and (not isinstance(fields["query"], str) or not fields["query"].strip()):
        raise BadData(f"{place}: query is {fields['query']!r} in columns {sorted(found)[:8]}, expected a text like {want}")
    for name in ("positive", "negatives"):
        if not isinstance(fields[name], list) or not all(isinstance(t, str) and t.strip() for t in fields[name]):
            raise BadData(f"{place}: {name} is {str(fields[name])[:80]}, expected a text or a list of texts, none empty")
    if not fields["positive"]:
        raise BadData(f"{place}: no positive in columns {sorted(found)[:8]}, expected {want}")
    group = fields["query"] or fields["positive"][0]
    return Row(fields["query"] or "", fields["positive"], fields["negatives"], group, found.get("held_out"))


def read_rows(name: str, phase: int, limit: int, problems: list[str]) -> Iterator[Row]:
    """Rows of a data source (see the top of this file); bad ones are described in `problems`."""
    if name == "pydocs":
        yield from (Row(query, [document], [], group) for group, query, document in itertools.islice(pydocs_pairs(), limit))
        return
    path = Path(name)
    if path.suffix in (".txt", ".jsonl", ".parquet"):
        if not path.is_file():
            raise ValueError(f"--phase{phase}_data {name}: no such file")
        source = itertools.islice(read_file_rows(path), limit)
    else:
        source = read_hub_rows(name, phase, limit)
    for place, found in source:
        try:
            yield parse_row(place, found, phase)
        except BadData as error:
            problems.append(str(error))


SKIPPED_PARTS = frozenset(  # tests, demonstrations, and what has side effects
    "test tests testing idlelib tkinter turtledemo lib2to3 ensurepip site-packages dist-packages config __pycache__ "
    "pydoc_data antigravity.py this.py turtle.py conftest.py setup.py".split()
)
C_MODULES = (  # written in C: their docstrings are read from the loaded modules
    "array binascii builtins bz2 cmath collections datetime decimal functools gc hashlib io itertools lzma marshal math "
    "mmap operator os pickle random re select socket sqlite3 ssl struct sys time types unicodedata weakref zlib numpy "
    "numpy.fft numpy.lib.stride_tricks numpy.linalg numpy.ma numpy.polynomial numpy.random numpy.char numpy.strings "
    "torch torch.autograd torch.cuda torch.distributions torch.fft torch.jit torch.linalg torch.nested torch.nn "
    "torch.nn.functional torch.nn.init torch.optim torch.optim.lr_scheduler torch.signal.windows torch.sparse "
    "torch.special torch.utils.data"
).split()
SIGNATURE = re.compile(r"\s*[\w.\\]+\([^\n]*\)(\s*->[^\n]*)?\s*(\n|$)")
SENTENCE_END = re.compile(r"(?<!e\.g\.)(?<!i\.e\.)(?<=[.!?:])\s+(?=[^a-z])|\n\s*\n")


def docstrings_of_source(path: Path) -> Iterator[tuple[str, str]]:
    """(name, docstring) of a source file and its public classes and functions; nothing is imported."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return  # sources for other versions of Python lie in the library too
    pending: list[tuple[str, ast.AST]] = [(path.parent.name if path.name == "__init__.py" else path.stem, tree)]
    while pending:
        name, node = pending.pop()
        if doc := ast.get_docstring(node, clean=False):
            yield name, doc
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            public = [n for n in node.body if isinstance(n, kinds) and not n.name.startswith("_")]
            pending.extend((n.name, n) for n in reversed(public))


def docstrings_of_object(space: object) -> Iterator[tuple[str, str]]:
    """(name, docstring) of the public members of a module or class and of its classes' members."""
    for name, member in sorted(inspect.getmembers_static(space)):
        doc = None if name.startswith("_") else getattr(member, "__doc__", None)
        if isinstance(doc, str) and (callable(member) or inspect.isdatadescriptor(member)):
            yield name, doc
        if inspect.isclass(member) and inspect.ismodule(space) and not name.startswith("_"):
            yield from docstrings_of_object(member)


def installed_documentation() -> Iterator[tuple[str, str]]:
    """(name, docstring) of Python, numpy and torch as installed, and the paragraphs of help("topics")."""
    import importlib
    import sysconfig
    from pydoc_data.topics import topics

    for name in C_MODULES:
        yield from docstrings_of_object(importlib.import_module(name))
    yield from docstrings_of_object(torch.Tensor)
    for name, text in sorted(topics.items()):
        plain = re.sub(r"[*`_]{1,2}(\S[^*`]*)[*`]{1,2}", r"\1", text)
        yield from ((f"topic {name}", paragraph) for paragraph in re.split(r"\n\s*\n", plain))
    for root in (sysconfig.get_path("stdlib"), *np.__path__, *torch.__path__):
        for path in sorted(Path(root).rglob("*.py")):
            if not SKIPPED_PARTS.intersection(path.relative_to(root).parts):
                yield from docstrings_of_source(path)


@functools.cache
def pydocs_pairs() -> list[tuple[str, str, str]]:
    """(group, query, document): first sentence of a docstring and its rest, in a fixed order, none twice.

    The group is the object's bare name: log_softmax of torch and LogSoftmax of torch.nn stay together."""
    pairs, seen = [], set()
    gc.disable()  # syntax trees are millions of small objects; collecting them doubles the time
    for name, doc in installed_documentation():
        doc = inspect.cleandoc(doc)
        while match := SIGNATURE.match(doc):
            doc = doc[match.end() :].lstrip("-\n ")
        if not (match := SENTENCE_END.search(doc)):
            continue
        query, document = " ".join(doc[: match.start()].split()), " ".join(doc[match.end() :].split())
        keys = {re.sub(r"\W+", " ", text.lower()).strip() for text in (query, document)}
        if len(document) >= 80 and len(query.split()) >= 2 and not seen & keys:
            seen |= keys
            pairs.append((name.replace("_", "").lower(), query, document))
    gc.enable()
    return pairs



def is_held_out(row: Row, fraction: float) -> bool:
    """By the data set's own split, else by a hash of the row's group: the same for any order and seed."""
    if row.held_out is not None:
        return row.held_out
    digest = hashlib.sha256(row.group.strip().encode("utf-8")).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2.0**64


def build_corpus(args: argparse.Namespace, folder: Path) -> None:
    """Read and check the data of both phases once; write the Corpus arrays to `folder`. (rank 0 only)

    Raises ValueError that lists the first 20 bad rows and their number, unless --skip_bad_data.
    """
    table, problems = TextTable(args.max_chars), []
    phase1, pairs, held_pairs = [], [], []
    held_texts: set[int] = set()
    for phase in needed_sources(args):
        name, limit = getattr(args, f"phase{phase}_data"), getattr(args, f"max_samples_phase{phase}")
        for row in read_rows(name, phase, limit, problems):
            held_out = is_held_out(row, args.eval_fraction)
            query = table.add(QUERY, row.query) if row.query else None
            documents = [table.add(DOCUMENT, t) for t in row.positives]
            if phase == 1 and held_out:
                held_texts.update(documents)
            if phase == 1 and not held_out:
                phase1 += ([] if query is None else [query]) + documents
            elif held_out and query is not None:
                held_pairs += [(query, d) for d in documents]
            elif phase == 2:
                negatives = [table.add(DOCUMENT, t) for t in row.negatives]
                pairs += [(query, d, [n for n in negatives if n != d]) for d in documents]
    report_problems(args, problems)
    held_pairs = sorted(set(held_pairs))[:: max(1, len(set(held_pairs)) // args.eval_samples)][: args.eval_samples]
    held_texts = set() if held_pairs else set(sorted(held_texts)[: args.eval_samples])
    held = {t for pair in held_pairs for t in pair} | held_texts  # also where it stands under another query
    phase1 = sorted(set(phase1) - held)
    pairs = [(q, d, n) for q, d, n in pairs if d not in held and q not in held]
    if (not args.skip_phase1 and not phase1) or (not args.skip_phase2 and not pairs) or not held:
        raise ValueError(
            f"{len(phase1)} texts for phase 1, {len(pairs)} pairs for phase 2, {len(held_pairs)} held-out pairs, {len(held_texts)} held-out texts: nothing to "
            "train or validate on; give more data, another --eval_fraction, or data with queries"
        )
    write_corpus(folder, table, phase1, pairs, held_pairs, held_texts)


def needed_sources(args: argparse.Namespace) -> list[int]:
    """Phases whose data is read. One source for both is read whole whatever is skipped, so that a later run
    of the other phase finds the same texts and teacher vectors."""
    return [p for p in (1, 2) if args.phase1_data == args.phase2_data or not getattr(args, f"skip_phase{p}")]


def report_problems(args: argparse.Namespace, problems: list[str]) -> None:
    """Refuse bad rows, or list them in a file and go on."""
    if not problems:
        return
    shown = "\n  ".join(problems[:20])
    if not args.skip_bad_data:
        more = f"\n  ... and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise ValueError(f"{len(problems)} bad rows (--skip_bad_data goes on without them):\n  {shown}{more}")
    listing = Path(args.output_dir) / "skipped_data.txt"
    listing.write_text("\n".join(problems) + "\n", encoding="utf-8")
    warn(f"left out {len(problems)} bad rows, listed in {listing}")


def write_corpus(folder: Path, table: TextTable, phase1: list, pairs: list, held_pairs: list, held_texts: set) -> None:
    """The arrays of Corpus and Texts as .npy files."""
    queries, documents = sorted({q for q, _ in held_pairs}), sorted({d for _, d in held_pairs} | held_texts)
    place = {t: i for i, t in enumerate(queries)} | {t: i for i, t in enumerate(documents)}
    encoded = [text.encode("utf-8") for _, text in table.rows]
    width = max((len(n) for _, _, n in pairs), default=0)
    negatives = np.full((len(pairs), width), -1, np.int64)
    for row, (_, _, found) in enumerate(pairs):
        negatives[row, : len(found)] = found
    arrays = {
        "text": np.frombuffer(b"".join(encoded), np.uint8),
        "text_offsets": np.concatenate([[0], np.cumsum([len(t) for t in encoded], dtype=np.int64)]),
        "kinds": np.array([kind for kind, _ in table.rows], np.uint8),
        "phase1": np.array(phase1, np.int64),
        "queries": np.array([q for q, _, _ in pairs], np.int64),
        "positives": np.array([d for _, d, _ in pairs], np.int64),
        "negatives": negatives,
        "eval_queries": np.array(queries, np.int64),
        "eval_documents": np.array(documents, np.int64),
        "eval_pairs": np.array([(place[q], place[d]) for q, d in held_pairs], np.int64).reshape(-1, 2),
    }
    write_cache(folder, arrays)


def write_cache(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    """Arrays as .npy files and a manifest of their sizes and checksums, written last. (rank 0 only)"""
    folder.mkdir(parents=True, exist_ok=True)
    manifest = {}
    for name, array in arrays.items():
        path = folder / f"{name}.npy"
        if not atomic_write(path, lambda file, array=array: np.save(file, array)):
            raise OSError(f"no room for {path}: free space there or give another --cache_dir")
        manifest[path.name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    atomic_write(folder / "manifest.json", lambda file: file.write(json.dumps(manifest, indent=1).encode()))


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cache_is_whole(folder: Path, verify: bool) -> bool:
    """Whether a cache folder is complete; a truncated or changed file is named and the folder made anew."""
    manifest = folder / "manifest.json"
    if not manifest.exists():
        return False
    for name, found in json.loads(manifest.read_text()).items():
        path = folder / name
        size = path.stat().st_size if path.exists() else -1
        if size != found["bytes"] or (verify and sha256_of(path) != found["sha256"]):
            warn(f"{path} is damaged ({size} bytes, {found['bytes']} expected): making {folder} anew")
            manifest.unlink()
            return False
    return True


def cache_folder(args: argparse.Namespace, kind: str, *key) -> Path:
    """The folder of a cached thing, named by a hash of all that went into it."""
    digest = hashlib.sha256(json.dumps([kind, 1, *key], default=str).encode()).hexdigest()[:16]
    return Path(args.cache_dir) / f"{kind}-{digest}"


def source_key(name: str) -> list:
    """What identifies a data source: a file's name, size and time; for pydocs the installed versions."""
    if name == "pydocs":
        return [name, sys.version, np.__version__, torch.__version__]
    if Path(name).is_file():
        stat = Path(name).stat()
        return [str(Path(name).resolve()), stat.st_size, stat.st_mtime_ns]
    return [name]


def load_data(args: argparse.Namespace, ddp: DDPContext) -> Corpus:
    """The corpus of this run, built on rank 0 if it is not cached, memory-mapped on all ranks."""
    settings = ("max_samples_phase1", "max_samples_phase2", "eval_fraction", "eval_samples", "max_chars", "skip_bad_data")
    key = [needed_sources(args), source_key(args.phase1_data), source_key(args.phase2_data), *(getattr(args, s) for s in settings)]
    folder = cache_folder(args, "corpus", *key)

    def build() -> None:
        if not cache_is_whole(folder, args.verify_data):
            log0(f"reading {args.phase1_data} (phase 1) and {args.phase2_data} (phase 2)")
            build_corpus(args, folder)

    on_rank0(ddp, build)
    names = [f.name for f in dataclasses.fields(Corpus) if f.name not in ("texts", "key")]
    arrays = {n: np.load(folder / f"{n}.npy", mmap_mode="r") for n in names}
    manifest = (folder / "manifest.json").read_bytes()
    require_same(ddp, "the training data", manifest)
    corpus = Corpus(Texts(folder), **arrays, key=hashlib.sha256(manifest).hexdigest())
    log0(f"data: {len(corpus.phase1)} texts in phase 1, {len(corpus.queries)} queries in phase 2, held out: {len(corpus.eval_queries)} queries, {len(corpus.eval_documents)} documents")
    return corpus


class Tokens:
    """Token ids of all texts, memory-mapped: text i is ids[offsets[i]:offsets[i + 1]]."""

    def __init__(self, folder: Path, pad_id: int):
        self.ids = np.load(folder / "ids.npy", mmap_mode="r")
        self.offsets = np.load(folder / "offsets.npy", mmap_mode="r")
        self.lengths = np.diff(self.offsets)
        self.pad_id = pad_id

    def padded(self, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids, mask) (B, L) int64 of texts `rows`, padded on the right to the longest of them."""
        lengths = self.lengths[rows]
        column = np.arange(lengths.max())
        mask = column[None, :] < lengths[:, None]
        ids = self.ids[np.minimum(self.offsets[rows][:, None] + column, len(self.ids) - 1)]
        return torch.from_numpy(np.where(mask, ids, self.pad_id).astype(np.int64)), torch.from_numpy(mask.astype(np.int64))

    def groups(self, rows: np.ndarray, smallest: int) -> list[tuple[np.ndarray, torch.Tensor, torch.Tensor]]:
        """`rows` cut into groups of similar length: (places in rows, ids, mask). A group is closed when
        the next text is 15 % shorter than its longest, and holds at least `smallest` texts."""
        order = np.argsort(-self.lengths[rows], kind="stable")
        lengths, cuts = self.lengths[rows][order], [0]
        for i in range(smallest, len(order) - smallest // 2):
            if i - cuts[-1] >= smallest and lengths[i] < 0.85 * lengths[cuts[-1]]:
                cuts.append(i)
        return [(part, *self.padded(rows[part])) for part in np.split(order, cuts[1:])]


def load_tokens(args: argparse.Namespace, ddp: DDPContext, corpus: Corpus, student) -> Tokens:
    """Tokenise every text once with the student's tokenizer and prompts; cached, memory-mapped."""
    tokenizer, prompts = student.tokenizer, student_prompts(args, student)
    folder = cache_folder(args, "tokens", corpus.key, prompts, student.max_seq_length, tokenizer_key(tokenizer))

    def build() -> None:
        if cache_is_whole(folder, args.verify_data):
            return
        texts, pieces, lengths = corpus.texts, [], []
        for low in tqdm(range(0, len(texts), 1024), "tokenise", disable=not sys.stderr.isatty()):
            batch = [prompts[texts.kinds[i]] + texts[i] for i in range(low, min(low + 1024, len(texts)))]
            for ids in tokenizer(batch, truncation=True, max_length=student.max_seq_length)["input_ids"]:
                pieces.append(np.array(ids, np.int32))
                lengths.append(len(ids))
        write_cache(folder, {"ids": np.concatenate(pieces), "offsets": np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])})

    on_rank0(ddp, build)
    return Tokens(folder, tokenizer.pad_token_id or 0)


def tokenizer_key(tokenizer) -> str:
    """Hash of a tokenizer's whole definition."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(re.sub(r'"(truncation|padding)":\s*(\{[^}]*\}|null),?', "", text).encode()).hexdigest()


def folder_key(name: str) -> list:
    """What identifies a model folder: names, sizes and the ends of its files. A hub name is itself."""
    if not Path(name).is_dir():
        return [name]
    key = []
    for path in sorted(p for p in Path(name).rglob("*") if p.is_file() and p.suffix != ".md"):
        with open(path, "rb") as file:
            head = file.read(1 << 20)
            file.seek(max(0, path.stat().st_size - (1 << 20)))
            key.append([str(path.relative_to(name)), path.stat().st_size, hashlib.sha256(head + file.read()).hexdigest()])
    return key


def teacher_vectors(args: argparse.Namespace, ddp: DDPContext, corpus: Corpus, name: str) -> np.ndarray:
    """The teacher's unit vectors (N, D) float16 of all texts, memory-mapped.

    Computed once: blocks of the length-sorted texts are dealt to the ranks and written one by one, so
    that a killed run goes on where it was; a complete cache is used without loading the teacher.
    """
    key = [folder_key(name), args.teacher_revision, args.teacher_max_length, args.teacher_query_prompt, args.teacher_document_prompt, args.teacher_dim, corpus.key]
    folder = cache_folder(args, "teacher", *key)
    whole = on_rank0(ddp, cache_is_whole, folder, args.verify_data)
    if not whole:
        encode_blocks(args, ddp, corpus, name, folder)

        def join() -> None:
            blocks = [np.load(folder / f"block-{b:06d}.npy") for b in range(-(-len(corpus.texts) // BLOCK))]
            vectors = np.empty((len(corpus.texts), blocks[0].shape[1]), np.float16)
            vectors[length_order(corpus.texts)] = np.concatenate(blocks)
            write_cache(folder, {"vectors": vectors})
            for path in folder.glob("block-*.npy"):
                path.unlink()

        on_rank0(ddp, join)
    vectors = np.load(folder / "vectors.npy", mmap_mode="r")
    log0(f"teacher vectors: {vectors.shape[0]} x {vectors.shape[1]} in {folder}" + (" (cached, no teacher forward pass)" if whole else ""))
    return vectors


def length_order(texts: Texts) -> np.ndarray:
    """Rows from the longest to the shortest text: equal lengths together, an out-of-memory first."""
    return np.argsort(-np.diff(texts.offsets), kind="stable")


def encode_blocks(args: argparse.Namespace, ddp: DDPContext, corpus: Corpus, name: str, folder: Path) -> None:
    """This rank's share of the blocks that are not on disk yet. (all ranks)"""
    on_rank0(ddp, lambda: folder.mkdir(parents=True, exist_ok=True))
    order, texts = length_order(corpus.texts), corpus.texts
    todo = [b for b in range(-(-len(order) // BLOCK)) if not (folder / f"block-{b:06d}.npy").exists()]
    todo = on_rank0(ddp, lambda: todo)
    teacher = load_teacher(args, name, ddp.device)
    prompts = teacher_prompts(args, teacher, name)
    log0(f"encoding {len(order)} texts with {args.teacher_model} ({len(todo)} blocks of {BLOCK} to do), prompts {prompts}")
    for block in tqdm(todo[ddp.rank :: ddp.world_size], "teacher", disable=ddp.rank > 0 or not sys.stderr.isatty()):
        rows = order[block * BLOCK : (block + 1) * BLOCK]
        batch = [prompts[texts.kinds[i]] + texts[i] for i in rows]
        with torch.inference_mode():
            vectors = teacher.encode(batch, batch_size=args.teacher_batch_size, convert_to_tensor=True, show_progress_bar=False)
        vectors = F.normalize(vectors.float(), dim=-1)
        if not torch.isfinite(vectors).all():
            raise ValueError(f"{args.teacher_model} gives non-finite vectors for texts {rows[:3].tolist()}...: is its precision right?")
        if args.teacher_dim:
            vectors = F.normalize(vectors[:, : args.teacher_dim], dim=-1)
        path, array = folder / f"block-{block:06d}.npy", vectors.cpu().numpy().astype(np.float16)
        if not atomic_write(path, lambda file, array=array: np.save(file, array)):
            raise OSError(f"no room for {path}: free space there or give another --cache_dir")
        if StepGuard.signal:
            sys.exit(stop_status(signal.Signals(StepGuard.signal).name))
        StepGuard.beat = time.monotonic()
    barrier(ddp)


def mine_negatives(args: argparse.Namespace, ddp: DDPContext, corpus: Corpus, vectors: np.ndarray) -> np.ndarray:
    """Negatives (N2, K + mined): the teacher's best documents for each training query that score at least
    --mine_margin below its positive, after those that came with the data. Cached."""
    if not args.mine_negatives or args.skip_phase2:
        return corpus.negatives
    count, (n, dim) = args.mine_negatives, (len(corpus.queries), vectors.shape[1])
    folder = cache_folder(args, "mined", corpus.key, folder_key(str(args.teacher_model)), count, args.mine_margin, dim, args.teacher_query_prompt, args.teacher_max_length)
    if not on_rank0(ddp, cache_is_whole, folder, args.verify_data):
        pool = np.unique(np.concatenate([corpus.positives, corpus.negatives[corpus.negatives >= 0]]))
        documents = torch.from_numpy(vectors[pool]).to(ddp.device, torch.float32)
        mined = torch.full((n, count), -1, dtype=torch.int64)
        for low in range(ddp.rank * 256, n, ddp.world_size * 256):
            rows = slice(low, low + 256)
            q = torch.from_numpy(vectors[corpus.queries[rows]]).to(ddp.device, torch.float32)
            p = torch.from_numpy(vectors[corpus.positives[rows]]).to(ddp.device, torch.float32)
            scores = q @ documents.T
            scores[scores > (q * p).sum(1, keepdim=True) - args.mine_margin] = -math.inf
            best, places = scores.topk(min(count, len(pool)))
            found = torch.from_numpy(pool)[places.cpu()]
            mined[rows, : found.shape[1]] = found.masked_fill(best.cpu() == -math.inf, -1)
            StepGuard.beat = time.monotonic()
        mined = mined.to(ddp.device) + 1
        if ddp.world_size > 1:
            dist.all_reduce(mined, op=dist.ReduceOp.MAX)
        on_rank0(ddp, write_cache, folder, {"mined": (mined - 1).cpu().numpy()})
    mined = np.load(folder / "mined.npy")
    log0(f"mined {(mined >= 0).sum(1).mean():.1f} hard negatives per query (margin {args.mine_margin})")
    return np.concatenate([corpus.negatives, mined], axis=1)


def draw_negatives(negatives: np.ndarray, items: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
    """`count` of each item's negatives (B, count), -1 where there are fewer: the first ones if they fit, else
    drawn by (seed, epoch, item), so that the choice does not depend on the number of ranks."""
    rows = negatives[items]
    if rows.shape[1] > count:
        keys = keyed_uniform(seed, epoch, torch.from_numpy(items), rows.shape[1]).numpy() + (rows < 0) * 2.0
        rows = np.take_along_axis(rows, np.argsort(keys, axis=1, kind="stable")[:, :count], axis=1)
    return rows


def bucket_by_length(lengths: np.ndarray, global_batch: int, seed: int) -> Callable:
    """A `cut` for GlobalBatchSampler: a window's items sorted by length and cut into batches, the batches
    shuffled. All ranks get the same length in the same step, so no rank waits for an unlucky one."""

    def cut(ids: np.ndarray, epoch: int) -> np.ndarray:
        batches = ids[np.argsort(lengths[ids], kind="stable")].reshape(-1, global_batch)
        return batches[np.random.default_rng([seed, epoch, int(ids[0])]).permutation(len(batches))]

    return cut


def prefetch(items: Iterable, device: torch.device) -> Iterator:
    """Items made two ahead in a thread, so that an accelerator never waits for them; inline on a CPU."""
    if device.type == "cpu":
        yield from items
        return
    ready, end = queue.Queue(maxsize=2), object()

    def work() -> None:
        try:
            for item in items:
                ready.put(item)
            ready.put(end)
        except BaseException as error:  # raised again in the training loop
            ready.put(error)

    threading.Thread(target=work, daemon=True).start()
    while (item := ready.get()) is not end:
        if isinstance(item, BaseException):
            raise item
        yield item


# ---- Model -----------------------------------------------------------------------------------------


WORD = r"[^\W\d_]+|\d+"  # runs of letters or of digits: array_split and arraySplit2 fall apart


def build_lsa_teacher(texts: list[str], dim: int, max_features: int = LSA_FEATURES):
    """Latent semantic analysis (Deerwester et al. 1990) as a SentenceTransformer of stock modules.

    TF-IDF and truncated SVD of `texts` by scikit-learn. Both are linear and the last normalisation removes
    every scale, so a text's unit vector is the normalised mean over its words of idf * SVD row: a
    StaticEmbedding and a Normalize. Leading dimensions are the strongest, so slices make sense."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

    vectorizer = TfidfVectorizer(token_pattern=WORD, max_features=max_features, dtype=np.float32).fit(texts)
    vectorizer.idf_ = vectorizer.idf_**1.5  # rarer words count more: +0.02 nDCG@10 on documentation
    svd = TruncatedSVD(dim, n_iter=3, random_state=0).fit(vectorizer.transform(texts))
    words = vectorizer.get_feature_names_out().tolist()
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["[UNK]", *words])}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(WORD), behavior="removed", invert=True)
    weights = np.zeros((1 + len(words), dim), np.float32)  # unknown words count for nothing
    weights[1:] = svd.components_.T * vectorizer.idf_[:, None]
    modules = [StaticEmbedding(tokenizer, embedding_weights=weights), Normalize()]
    return SentenceTransformer(modules=modules, device="cpu")


def train_wordpiece(texts: list[str], vocab_size: int):
    """A lower-casing WordPiece tokenizer in BERT's format; the same for the same texts.

    The trainer numbers continuation letters (##a) in a hash map's random order and breaks ties by number, so
    they are handed to it, sorted, as if they were special."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    special, normalizer = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], normalizers.BertNormalizer(lowercase=True)
    counts = collections.Counter(letter for text in texts for letter in normalizer.normalize_str(text))
    letters = sorted(c for c, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:200] if not c.isspace())
    first = [*special, *letters, *(f"##{c}" for c in letters)]
    trained = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    trained.normalizer, trained.pre_tokenizer = normalizer, pre_tokenizers.BertPreTokenizer()
    options = dict(special_tokens=first, limit_alphabet=200, show_progress=False)
    trained.train_from_iterator(texts, trainers.WordPieceTrainer(vocab_size=vocab_size, **options))
    tokenizer = Tokenizer(models.WordPiece(trained.get_vocab(), unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(special)
    cls, sep = (tokenizer.token_to_id(token) for token in ("[CLS]", "[SEP]"))
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", sep), ("[CLS]", cls))
    return tokenizer


def build_bert_student(texts: list[str], folder: Path, layers: int, hidden: int, max_length: int, seed: int):
    """A randomly initialised BERT without dropout, mean pooling, and a tokenizer trained on `texts`."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertConfig, BertModel, BertTokenizerFast

    tokenizer = train_wordpiece(texts, BERT_VOCABULARY)
    config = BertConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=hidden, num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // 32), intermediate_size=4 * hidden, max_position_embeddings=max_length,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    BertTokenizerFast(tokenizer_object=tokenizer, model_max_length=max_length).save_pretrained(folder)
    options = dict(model_kwargs={"add_pooling_layer": False})
    transformer = Transformer(str(folder), max_seq_length=max_length, **options)
    return SentenceTransformer(modules=[transformer, Pooling(hidden)], device="cpu")



def builtin_model(args: argparse.Namespace, ddp: DDPContext, corpus: Corpus, name: str) -> str:
    """The folder of a builtin:lsa or builtin:bert model fitted on the training texts; other names as given."""
    if not name.startswith("builtin:"):
        return name
    kind, _, size = name.removeprefix("builtin:").partition(":")
    form = {"lsa": r"\d+", "bert": r"\d+x\d+"}.get(kind)
    if form is None or (size and not re.fullmatch(form, size)):
        raise ValueError(f"{name!r}: the builtin models are builtin:lsa[:DIM] and builtin:bert[:LAYERSxHIDDEN]")
    folder = cache_folder(args, f"builtin-{kind}", corpus.key, size, args.seed if kind == "bert" else 0, args.student_max_length if kind == "bert" else 0)

    def build() -> None:
        if (folder / "modules.json").exists():
            return
        log0(f"fitting {name} on the training texts")
        texts, temporary = corpus.texts, folder.with_name(folder.name + ".tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        if kind == "lsa":  # a query and its document as one text: words that meet across the two share directions
            fitted = [f"{texts[q]} {texts[d]}" for q, d in zip(corpus.queries, corpus.positives, strict=True)] or [texts[i] for i in corpus.phase1]
            model = build_lsa_teacher(fitted, int(size or LSA_DIM))
        else:
            rows = np.unique(np.concatenate([corpus.phase1, corpus.queries, corpus.positives]))
            layers, hidden = (int(n) for n in (size or BERT_SIZE).split("x"))
            model = build_bert_student([texts[i] for i in rows], temporary / "bert", layers, hidden, args.student_max_length or 128, args.seed)
        model.save(str(temporary), create_model_card=False)
        temporary.rename(folder)

    on_rank0(ddp, build)
    return str(folder)


def load_sentence_transformer(name: str, what: str, **options):
    """SentenceTransformer(name), or a ValueError that says what is missing and what works without a hub."""
    from sentence_transformers import SentenceTransformer

    try:
        return SentenceTransformer(name, device="cpu", **options)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--{what}_model {name}: not a folder, not in the hub's cache and could not be fetched ({str(error).splitlines()[0][:160]}); "
            f"give a local folder, or --{what}_model {'builtin:lsa' if what == 'teacher' else 'builtin:bert'}, which needs no download"
        ) from error


def load_teacher(args: argparse.Namespace, name: str, device: torch.device):
    """The teacher in evaluation mode on `device`: bfloat16 on accelerators (fp16 is unstable for the default one)."""
    model_kwargs = {"dtype": torch.bfloat16} if device.type != "cpu" else {}
    options = {"trust_remote_code": True} if args.trust_remote_code or name.startswith("infly/") else {}
    if name.startswith("infly/"):  # its own modelling code keeps a cache of keys that nobody reads
        options["config_kwargs"] = {"use_cache": False}
    teacher = load_sentence_transformer(name, "teacher", revision=args.teacher_revision, model_kwargs=model_kwargs, **options)
    if args.teacher_max_length:
        teacher.max_seq_length = args.teacher_max_length
    dim = teacher.get_embedding_dimension()
    if args.teacher_dim and args.teacher_dim > dim:
        raise ValueError(f"--teacher_dim {args.teacher_dim}: {name} has {dim} dimensions")
    return teacher.to(device).eval()


def teacher_prompts(args: argparse.Namespace, teacher, name: str) -> list[str]:
    """[before queries, before documents]: as given, else the teacher's own."""
    own = teacher.prompts or {}
    query = own.get("query") or (DEFAULT_TEACHER_PROMPT if name.startswith("infly/") else "")
    document = own.get("document") or own.get("passage") or ""
    given = (args.teacher_query_prompt, args.teacher_document_prompt)
    return [query if given[0] is None else given[0], document if given[1] is None else given[1]]


def student_prompts(args: argparse.Namespace, student) -> list[str]:
    """[before queries, before documents]: as given, else the student's own."""
    own = student.prompts or {}
    given = (args.student_query_prompt, args.student_document_prompt)
    return [own.get("query") or "" if given[0] is None else given[0], own.get("document") or "" if given[1] is None else given[1]]


def keep_layers(student, count: int) -> None:
    """Keep `count` evenly spaced layers of the transformer, first and last included (layer reduction)."""
    network, depth = student[0].model, student[0].model.config.num_hidden_layers
    if not 1 <= count <= depth:
        raise ValueError(f"--student_layers {count}: the student has {depth} layers")
    stacks = [(m, n) for m in network.modules() for n, c in m.named_children() if isinstance(c, torch.nn.ModuleList) and len(c) == depth]
    if not stacks:
        raise ValueError("--student_layers: no stack of layers was found in this student")
    kept = [int(i * (depth - 1) / max(1, count - 1) + 0.5) for i in range(count)]
    for parent, name in stacks:
        setattr(parent, name, torch.nn.ModuleList(getattr(parent, name)[i] for i in kept))
    network.config.num_hidden_layers = count
    log0(f"student keeps layers {kept} of {depth}")


def load_student(args: argparse.Namespace, name: str):
    """The student as a SentenceTransformer whose last module normalises (no head yet)."""
    from sentence_transformers.sentence_transformer.modules import Normalize

    config = {} if args.student_dropout is None else {"hidden_dropout_prob": args.student_dropout, "attention_probs_dropout_prob": args.student_dropout}
    student = load_sentence_transformer(name, "student", trust_remote_code=args.trust_remote_code, config_kwargs=config, model_kwargs={"dtype": torch.float32})
    if not hasattr(student[0], "model") or student.tokenizer is None:
        raise ValueError(f"--student_model {name}: its first module is {type(student[0]).__name__}, not a transformer")
    if args.student_layers:
        keep_layers(student, args.student_layers)
    if args.student_max_length:
        student.max_seq_length = args.student_max_length
    if student.max_seq_length is None:
        raise ValueError(f"--student_model {name} states no maximum length: give --student_max_length")
    student.prompts = dict(zip(("query", "document"), student_prompts(args, student), strict=True))
    if any(student.prompts.values()) and not getattr(student[1], "include_prompt", True):
        raise ValueError(f"--student_model {name} pools without the prompt's tokens, which is not supported: give --student_query_prompt '' --student_document_prompt ''")
    if not isinstance(student[-1], Normalize):
        student.append(Normalize())
    return student


def add_projection(student, hidden: int, dim: int) -> None:
    """Append Linear-GELU-LayerNorm-Linear-Normalize, all stock modules, after the student's own Normalize.

    The original's Linear-LayerNorm-GELU cannot be said in stock modules, and a class of our own would
    not load elsewhere."""
    from sentence_transformers.sentence_transformer.modules import Dense, LayerNorm, Normalize

    width = student.get_embedding_dimension()
    student.append(Dense(width, hidden, activation_function=torch.nn.GELU()))
    student.append(LayerNorm(hidden))
    student.append(Dense(hidden, dim, activation_function=torch.nn.Identity()))
    student.append(Normalize())


class Student(torch.nn.Module):
    """A SentenceTransformer as one forward pass over groups of equally long texts."""

    def __init__(self, model, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.model, self.dtype, self.device_type = model, dtype, device.type
        self.embed = self.embed_group

    def embed_group(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """ids, mask (B, L) int64 -> unit vectors (B, D) float32. Pooling and head run in float32."""
        with torch.autocast(self.device_type, self.dtype, enabled=self.dtype != torch.float32):
            features = self.model[0]({"input_ids": ids, "attention_mask": mask})
        features["token_embeddings"] = features["token_embeddings"].float()
        for module in list(self.model)[1:]:  # a slice would build a SentenceTransformer
            features = module(features)
        return features["sentence_embedding"]

    def forward(self, groups: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """Groups of (places, ids, mask) -> (B, D), in the order of the texts before grouping."""
        places = torch.cat([place for place, _, _ in groups])
        vectors = torch.cat([self.embed(ids, mask) for _, ids, mask in groups])
        return torch.empty_like(vectors).index_copy(0, places, vectors)


def freeze_unused(student: Student, tokens: Tokens) -> None:
    """Drop the pooler and freeze what else gets no gradient, so that DDP need not search for it each step."""
    ids, mask = tokens.padded(np.arange(min(2, len(tokens.lengths))))
    device = next(student.parameters()).device
    with torch.random.fork_rng(devices=[]):
        student.embed(ids.to(device), mask.to(device)).sum().backward()
    unused = [name for name, p in student.named_parameters() if p.grad is None]
    network = student.model[0].model
    if getattr(network, "pooler", None) is not None and any(".pooler." in name for name in unused):
        network.pooler = None  # mean or CLS pooling of sentence-transformers never reads it
    for name, parameter in student.named_parameters():
        parameter.requires_grad_(name not in unused)
    student.zero_grad(set_to_none=True)
    if unused:
        log0(f"not trained, since they get no gradient: {', '.join(unused)}")


def build_student(args: argparse.Namespace, ddp: DDPContext, name: str, teacher_dim: int, dtype: torch.dtype) -> Student:
    """The student with its head (or without, in MRL mode), from --seed, on the device."""
    seed_everything(args.seed)
    model = load_student(args, name)
    width = model.get_embedding_dimension()
    if args.use_projection:
        add_projection(model, args.projection_hidden, teacher_dim)
        log0(f"projection mode: student {width} -> {args.projection_hidden} -> teacher {teacher_dim} dimensions")
    else:
        if teacher_dim < width:
            raise ValueError(f"--use_projection=False needs a teacher with at least the student's {width} dimensions, it has {teacher_dim}")
        log0(f"MRL mode, no projection: the target is the renormalised first {width} of the teacher's {teacher_dim} dimensions")
    too_big = [d for d in args.matryoshka_dims if d > model.get_embedding_dimension()]
    if too_big:
        raise ValueError(f"--matryoshka_dims {too_big}: the student's vector has {model.get_embedding_dimension()} dimensions")
    return Student(model.to(ddp.device), dtype, ddp.device)


# ---- Loss ------------------------------------------------------------------------------------------


def distance_loss(student: torch.Tensor, target: torch.Tensor, l2_weight: float, cosine_weight: float) -> torch.Tensor:
    """l2_weight * |s - t|^2 + cosine_weight * (1 - cos(s, t)) per row; s, t (B, D) of unit length -> (B,).

    The squared distance is summed over dimensions: for unit vectors it is 2 (1 - cos), for any D.
    """
    cosine = (student * target).sum(-1)
    return l2_weight * (student - target).square().sum(-1) + cosine_weight * (1 - cosine)


def infonce_loss(query: torch.Tensor, documents: torch.Tensor, labels: torch.Tensor, masked: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """-log softmax(q . d / T) at the query's positive (van den Oord et al. 2018), in float32.

    query (B, D), documents (M, D), labels (B,) columns of the positives, masked (B, M) bool: columns left
    out. Returns the losses (B,) and the logits (B, M)."""
    with torch.autocast(query.device.type, enabled=False):  # at T = 0.02, bfloat16 would round logits to 0.2
        logits = (query.float() @ documents.float().T / temperature).masked_fill(masked, -math.inf)
    return F.cross_entropy(logits, labels, reduction="none"), logits


def kl_loss(logits: torch.Tensor, teacher_logits: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
    """KL(softmax(teacher_logits) || softmax(logits)) per query over the columns that are not masked -> (B,)."""
    target = F.log_softmax(teacher_logits.masked_fill(masked, -math.inf), dim=-1)
    both = (target.exp() * (target - F.log_softmax(logits, dim=-1))).masked_fill(masked, 0.0)
    return both.sum(-1)


def false_negatives(ids: torch.Tensor, labels: torch.Tensor, teacher_scores: torch.Tensor, margin: float) -> torch.Tensor:
    """Columns that must not count as negatives (B, M) bool: absent (id -1), the positive's text again, or
    scored by the teacher above the positive + margin (Solatorio 2024). ids (M,), labels (B,)."""
    positive = teacher_scores.gather(1, labels[:, None])
    masked = (ids == -1) | (ids == ids[labels][:, None])
    if margin >= -1:
        masked = masked | (teacher_scores > positive + margin)
    return masked.scatter(1, labels[:, None], False)


class GatherRows(torch.autograd.Function):
    """All ranks' rows (W * B, D), in rank order; the gradient flows back to every rank's own rows."""

    @staticmethod
    def forward(ctx, rows: torch.Tensor) -> torch.Tensor:
        ctx.size = len(rows)
        gathered = rows.new_empty(dist.get_world_size() * len(rows), *rows.shape[1:])
        dist.all_gather_into_tensor(gathered, rows.contiguous())
        return gathered

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient[dist.get_rank() * ctx.size :][: ctx.size]


def gather_rows(rows: torch.Tensor, most: int, ddp: DDPContext) -> torch.Tensor:
    """Rows of all ranks (W * most, ...), each rank's padded with zeros to `most` rows; differentiable."""
    rows = F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, most - len(rows)))
    return GatherRows.apply(rows) if ddp.world_size > 1 else rows


# ===== shared DDP block: begin (identical in every script; tests/test_shared_block.py) =====
LAUNCHERS = {  # launcher: its variables for rank, world size, local rank, local world size
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "Hydra": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "PALS": ("PALS_RANKID", "WORLD_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    "SLURM": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
}
LOGGER = logging.getLogger("ddp")


class ArgumentParser(argparse.ArgumentParser):
    """argparse with one-line errors (exit status 2) that name the nearest known option."""

    source = ""  # "FILE: " while a --config file is being read

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {self.source}{message}\n")

    def unknown(self, key: str) -> NoReturn:
        known = [o.lstrip("-") for a in self._actions for o in a.option_strings]
        near = difflib.get_close_matches(key.rpartition(".")[2], known, 1, 0.5)
        hint = f"; the nearest known one is {near[0]!r}" if near else "; see --help"
        self.error(f"unknown option {key!r}{hint}")


def boolean(text: str) -> bool:
    """'True', 'yes', '1', ... or 'False', 'no', '0', ... (argparse's type=bool takes 'False' for True)."""
    values = {"true": True, "yes": True, "on": True, "1": True}
    values.update({"false": False, "no": False, "off": False, "0": False})
    if str(text).lower() not in values:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of True, False, yes, no, 1, 0")
    return values[str(text).lower()]


def add_ddp_arguments(parser: ArgumentParser, output_dir: str, wandb_project: str) -> None:
    """The options that every script has: batch and step, checkpoints, logging, runtime."""
    g = parser.add_argument_group("Step")
    flag = dict(type=boolean, nargs="?", const=True, metavar="BOOL")
    g.add_argument("--global_batch_size", type=int, help="samples per optimizer step over all ranks (instead of ranks x --batch_size x --accumulation); the number of GPUs then changes the speed only")
    g.add_argument("--accumulation", type=int, default=1, help="micro-batches per optimizer step")
    g.add_argument("--lr_scaling", default="none", choices=("none", "linear", "sqrt", "conservative"), help="multiply the learning rate by the number of ranks, its root, or at most 6")
    g.add_argument("--max_grad_norm", type=float, default=1.0, help="clip the gradient's norm; 0 = no clipping")
    g.add_argument("--max_bad_steps", type=int, default=10, help="stop after so many steps in a row with a non-finite loss or gradient")
    g.add_argument("--precision", default="auto", choices=("auto", "fp32", "bf16", "fp16"), help="auto: bf16 where the accelerator has it, else fp32")
    g.add_argument("--compile", default=False, help="torch.compile the model", **flag)
    g.add_argument("--seed", type=int, default=42, help="one seed for initialisation, split, order and noise")
    g = parser.add_argument_group("Checkpoints")
    g.add_argument("--output_dir", default=output_dir, help="checkpoints, metrics and summary; a run found there is resumed")
    g.add_argument("--fresh", default=False, help="start anew; a run in --output_dir is moved aside", **flag)
    g.add_argument("--save_every", type=int, default=500, help="optimizer steps between checkpoints")
    g.add_argument("--keep_checkpoints", type=int, default=2, help="how many checkpoints to keep beside best.pt")
    g.add_argument("--max_minutes", type=float, default=0.0, help="write a checkpoint and stop after so long (0 = no limit)")
    g = parser.add_argument_group("Logging")
    g.add_argument("--log_every", type=int, default=10, help="optimizer steps between log lines")
    g.add_argument("--wandb_mode", default="auto", choices=("auto", "online", "offline", "disabled"), help="auto: online if an API key is configured")
    g.add_argument("--wandb_project", default=wandb_project, help="wandb project")
    g.add_argument("--wandb_name", help="wandb run name")
    g = parser.add_argument_group("Runtime")
    g.add_argument("--config", help="YAML or JSON file of defaults; the command line wins")
    g.add_argument("--nproc", type=int, default=0, help="start so many processes on this machine (plain python only)")
    g.add_argument("--device", default="auto", choices=("auto", "cuda", "xpu", "cpu"), help="auto: the accelerator if there is one")
    g.add_argument("--backend", default="auto", choices=("auto", "nccl", "gloo", "xccl", "ccl", "xpu"), help="auto: by device")
    g.add_argument("--ddp_timeout_minutes", type=float, help="limit of one collective (default 30, or NCCL_TIMEOUT in seconds)")
    g.add_argument("--local_rank", type=int, help="set by torch.distributed.launch")


def split_tokens(parser: ArgumentParser, argv: list[str]) -> list[str]:
    """Command line with `key=value` and `--key-with-hyphens` brought to argparse's `--key=value`."""
    options = {o: a for a in parser._actions for o in a.option_strings}
    tokens, wants_value = [], False
    for token in argv:
        key, equals, value = token.partition("=")
        if token.startswith("--"):
            key = "--" + key[2:].replace("-", "_")
            if key not in options:
                parser.unknown(key[2:])
            wants_value = not equals and options[key].nargs not in (0, "?")
            tokens.append(key + equals + value)
        elif equals and not wants_value and re.fullmatch(r"[A-Za-z_][\w.]*", key):
            if "--" + key not in options:
                parser.unknown(key)
            tokens.append(f"--{key}={value}")
        else:
            tokens.append(token)
            wants_value = False
    return tokens


def read_config(parser: ArgumentParser, path: str) -> list[str]:
    """A YAML or JSON file of (nested) keys as command-line tokens; unknown keys are errors."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        if path.endswith(".json"):
            tree = json.loads(text)
        else:
            import yaml

            tree = yaml.safe_load(text)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    except Exception as error:  # yaml.YAMLError is known only after the lazy import
        parser.error(" ".join(str(error).split()))
    if not isinstance(tree, dict):
        parser.error(f"holds {type(tree).__name__}, not a mapping of option names to values")
    options = {o for a in parser._actions for o in a.option_strings}
    groups = {(g.title or "").lower(): {o for a in g._group_actions for o in a.option_strings} for g in parser._action_groups}
    tokens: list[str] = []

    def walk(node: dict, prefix: str, inside: set[str]) -> None:
        for key, value in node.items():
            name = f"--{prefix}{key}"
            if name not in options and f"--{key}" in inside:
                name = f"--{key}"  # a section named like the group in --help
            if name in options:
                if isinstance(value, list):
                    value = ",".join(map(str, value))
                if value is not None:
                    tokens.append(f"{name}={json.dumps(value) if isinstance(value, dict) else value}")
            elif isinstance(value, dict):
                walk(value, f"{prefix}{key}.", groups.get(str(key).lower(), set()))
            else:
                parser.unknown(f"{prefix}{key}")

    walk(tree, "", set())
    return tokens


def parse_arguments(parser: ArgumentParser, argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line over a --config file over the defaults. `args.given`: what the user set."""
    tokens = split_tokens(parser, sys.argv[1:] if argv is None else argv)
    args = argparse.Namespace()
    configs = [t.partition("=")[2] for t in tokens if t.startswith("--config=")]
    configs += [b for a, b in itertools.pairwise(tokens) if a == "--config"]
    if configs:
        parser.source = f"{configs[-1]}: "
        config_tokens = read_config(parser, configs[-1])
        required = [a for a in parser._actions if a.required]
        for action in required:  # the command line may still bring them
            action.required = False
        parser.parse_args(config_tokens, args)
        for action in required:
            action.required = getattr(args, action.dest, None) is None
        tokens_given = config_tokens + tokens
        parser.source = ""
    else:
        tokens_given = tokens
    parser.parse_args(tokens, args)
    dests = {o: a.dest for a in parser._actions for o in a.option_strings}
    args.given = sorted({dests[t.partition("=")[0]] for t in tokens_given if t.partition("=")[0] in dests})
    for name in ("accumulation", "save_every", "log_every", "keep_checkpoints", "max_bad_steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)} must be at least 1")
    if args.global_batch_size and "accumulation" in args.given:
        parser.error("--global_batch_size sets the accumulation; give one of the two")
    return args


@dataclass(frozen=True)
class DDPContext:
    """Who this process is among the ranks, and where its tensors live."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    backend: str
    launcher: str


def find_ranks(env: dict[str, str], devices: int) -> tuple[int, int, int, int, str]:
    """(rank, world size, local rank, local world size, launcher) from the launcher's variables.

    `devices`: processes that this node can take. Raises ValueError for a rank without a world size.
    """

    def number(name: str) -> int | None:
        if not env.get(name):
            return None
        if not env[name].isdigit():
            raise ValueError(f"{name}={env[name]!r} is not a number")
        return int(env[name])

    for launcher, names in LAUNCHERS.items():
        rank, world, local, local_world = (number(n) for n in names)
        if rank is None:
            continue
        if launcher == "PALS" and world is None:
            world = number("PMI_SIZE") or mpi_world_size()
        if world is None:
            raise ValueError(f"{names[0]}={rank} is set but no world size is ({names[1]}): export {names[1]}")
        if rank >= world:
            raise ValueError(f"{names[0]}={rank} is not below {names[1]}={world}")
        if local is None:
            if world > devices:
                raise ValueError(f"{names[2]} is not set and {world} ranks do not fit the {devices} places of this node: export {names[2]}")
            local = rank
        return rank, world, local, local_world or min(world, max(devices, local + 1)), launcher
    return 0, 1, 0, 1, "python"


def mpi_world_size() -> int | None:
    try:
        from mpi4py import MPI
    except ImportError:
        return None
    return MPI.COMM_WORLD.Get_size()


def find_master(env: dict[str, str], world_size: int, local_world_size: int) -> tuple[str, str]:
    """(MASTER_ADDR, MASTER_PORT): as set, else the job's first host, else this one if it holds all ranks."""
    job = re.sub(r"\D.*", "", env.get("SLURM_JOB_ID") or env.get("PBS_JOBID") or "")
    port = env.get("MASTER_PORT") or (str(20000 + int(job) % 20000) if job else "29500")
    if env.get("MASTER_ADDR"):
        return env["MASTER_ADDR"], port
    if env.get("SLURM_JOB_NODELIST"):  # "gpu[03-05,9],login1" -> "gpu03"
        head, bracket, inside = env["SLURM_JOB_NODELIST"].split(",")[0].partition("[")
        return head + re.split(r"[-\],]", inside)[0] if bracket else head, port
    if env.get("PBS_NODEFILE"):
        return Path(env["PBS_NODEFILE"]).read_text().split()[0], port
    if world_size > local_world_size:
        raise ValueError(f"{world_size} ranks on several nodes and MASTER_ADDR is not set: export the first node's address")
    return "localhost", port


def choose_device(name: str, local_rank: int) -> torch.device:
    """The accelerator number `local_rank` (0 where the launcher shows each rank one), or the CPU."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "cpu" or (name == "auto" and (found is None or found.type not in ("cuda", "xpu"))):
        return torch.device("cpu")
    if found is None or name not in ("auto", found.type):
        raise ValueError(f"--device {name}: this machine shows {found.type if found else 'no accelerator'}")
    count = torch.accelerator.device_count()
    if count > 1 and local_rank >= count:
        raise ValueError(f"local rank {local_rank} has no device: {count} are visible; start at most {count} ranks per node")
    device = torch.device(found.type, local_rank if count > 1 else 0)
    torch.accelerator.set_device_index(device.index)
    return device


def choose_backend(name: str, device: torch.device) -> str:
    """The process group's backend for `device`. Raises ValueError if `name` cannot serve it."""
    if name in ("ccl", "xpu", "xccl") or (name == "auto" and device.type == "xpu"):
        if device.type != "xpu":
            raise ValueError(f"--backend {name} serves Intel XPUs, the device is {device.type}: use --backend auto")
        if dist.is_xccl_available():
            return "xccl"
        try:
            import oneccl_bindings_for_pytorch  # noqa: F401  (registers the backend "ccl")
        except ImportError:
            warn("no xccl in this torch and no oneCCL bindings: falling back to gloo, which is slow")
            return "gloo"
        return "ccl"
    backend = {"cuda": "nccl", "cpu": "gloo"}[device.type] if name == "auto" and device.type != "xpu" else name
    if backend == "nccl" and device.type != "cuda":
        raise ValueError(f"--backend nccl serves NVIDIA GPUs, the device is {device.type}: use --backend gloo")
    if backend == "nccl" and not dist.is_nccl_available():
        raise ValueError("--backend nccl: this torch was built without NCCL; use --backend gloo")
    return backend


def setup_ddp(args: argparse.Namespace) -> DDPContext:
    """Find this process's rank and device, start the process group, the log, the signals. (all ranks)"""
    started = torch.accelerator.device_count() if torch.accelerator.is_available() and args.device != "cpu" else 0
    env = dict(os.environ)
    if args.local_rank is not None:
        env.setdefault("LOCAL_RANK", str(args.local_rank))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    rank, world_size, local_rank, local_world_size, launcher = find_ranks(env, started or max(cores, 16))
    start_logging(rank)
    device = choose_device(args.device, local_rank)
    backend = choose_backend(args.backend, device)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, cores // local_world_size))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, StepGuard.on_signal)
    log_all(f"Process {rank}/{world_size} started")
    if world_size > 1:
        start_group(args, env, rank, world_size, local_world_size, device, backend)
        log_all(f"Initialized DDP: rank={rank}, world_size={world_size}, local_rank={local_rank}")
    log_all(f"Using device: {device}")
    return DDPContext(rank, world_size, local_rank, local_world_size, device, backend, launcher)


def start_group(args, env, rank, world_size, local_world_size, device, backend) -> None:
    """init_process_group with the errors a user meets put into words."""
    address, port = find_master(env, world_size, local_world_size)
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=port)  # as they were, where they were set
    seconds = float(os.environ.get("NCCL_TIMEOUT", 1800))
    if args.ddp_timeout_minutes:
        seconds = 60 * args.ddp_timeout_minutes
    try:
        dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timedelta(seconds=seconds), device_id=device if device.type in ("cuda", "xpu") else None)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" in str(error) or "in use" in str(error):
            raise RuntimeError(f"port {port} is already in use on {address}: export MASTER_PORT=<a free port>, or use torchrun --standalone") from error
        raise RuntimeError(f"rank {rank} cannot reach rank 0 at {address}:{port}: check MASTER_ADDR, MASTER_PORT and the firewall ({error})") from error


def cleanup() -> None:
    """Destroy the process group. Only after everything that holds a tensor or the DDP object is gone:
    with gloo the group's threads otherwise abort the interpreter's exit one time in four."""
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def launch(main: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Run `main(args)` as this rank, or in --nproc new processes; returns the exit status."""
    if tuple(int(p) for p in torch.__version__.split(".")[:2]) < (2, 10):
        print(f"torch {torch.__version__} is too old: these scripts need torch 2.10 or newer", file=sys.stderr)  # noqa: T201
        return 2
    if args.nproc > 1 and "RANK" not in os.environ:
        return start_processes(main, args)
    try:
        return record(main)(args)
    except Exception:
        LOGGER.error("failed on rank %s\n%s", os.environ.get("RANK", "0"), traceback.format_exc())
        sys.stdout.flush()
        if dist.is_initialized():  # no waiting for peers in destroy or at exit: the launcher ends them
            os._exit(1)
        return 1
    finally:
        cleanup()


def start_processes(main: Callable, args: argparse.Namespace) -> int:
    """Start --nproc ranks of `main` on this machine and pass signals and the exit status on."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(probe.getsockname()[1]))
    context = torch.multiprocessing.spawn(run_process, (main, args), nprocs=args.nproc, join=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda n, _: [os.kill(pid, n) for pid in context.pids()])
    try:
        while not context.join(grace_period=5):
            continue
    except torch.multiprocessing.ProcessExitedException as error:
        return error.exit_code if error.exit_code > 0 else 128 - error.exit_code
    return 0


def run_process(local_rank: int, main: Callable, args: argparse.Namespace) -> None:
    """One process of start_processes."""
    ranks = dict(RANK=local_rank, WORLD_SIZE=args.nproc, LOCAL_RANK=local_rank, LOCAL_WORLD_SIZE=args.nproc)
    os.environ.update({k: str(v) for k, v in ranks.items()})
    sys.exit(launch(main, args))


def start_logging(rank: int) -> None:
    """`[RANK 0] 2025-01-15 14:23:45 INFO: text` on standard output, from this rank."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter(f"[RANK {rank}] %(asctime)s %(levelname)s: %(message)s", "%Y-%m-%d %H:%M:%S"))
    LOGGER.handlers, LOGGER.propagate = [handler], False
    LOGGER.setLevel(logging.INFO)
    LOGGER.rank = rank


def log0(text: str) -> None:
    """(rank 0 only)"""
    if getattr(LOGGER, "rank", 0) == 0:
        LOGGER.info(text)


def log_all(text: str) -> None:
    """(all ranks: start-up lines)"""
    LOGGER.info(text)


def warn(text: str) -> None:
    """(any rank)"""
    LOGGER.warning(text)


def barrier(ddp: DDPContext) -> None:
    """(all ranks) An all-reduce, since dist.barrier() would pick a device of its own on NCCL."""
    reduce_sums(ddp, {"barrier": 0.0})


def reduce_sums(ddp: DDPContext, sums: dict[str, float | torch.Tensor]) -> dict[str, float]:
    """Sums over all ranks in float64, in one collective. (all ranks, same keys) One host sync."""
    values = [torch.as_tensor(v, dtype=torch.float64, device=ddp.device).reshape(()) for v in sums.values()]
    packed = torch.stack(values)
    if ddp.world_size > 1:
        dist.all_reduce(packed)
    return dict(zip(sums, packed.tolist(), strict=True))


def on_rank0(ddp: DDPContext, function: Callable, *args):
    """`function(*args)` on rank 0; every rank gets its result, or an error if rank 0 got one, so that no
    rank waits for one that has gone. (all ranks)"""
    outcome, error = [None, None], None
    if ddp.rank == 0:
        try:
            outcome = [function(*args), None]
        except Exception as caught:
            error, outcome = caught, [None, f"{type(caught).__name__}: {caught}"]
    if ddp.world_size > 1:
        dist.broadcast_object_list(outcome, src=0, device=ddp.device)
    if error is not None:
        raise error
    if outcome[1] is not None:
        raise RuntimeError(f"rank 0 failed in {function.__name__}: {outcome[1]}")
    return outcome[0]


def require_same(ddp: DDPContext, what: str, value: bytes) -> None:
    """Raises RuntimeError on all ranks if `value` differs between ranks. (all ranks)"""
    number = int.from_bytes(hashlib.sha256(value).digest()[:7], "big")
    both = torch.tensor([number, -number], dtype=torch.int64, device=ddp.device)
    if ddp.world_size > 1:
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
    if both[0].item() != -both[1].item():
        raise RuntimeError(f"the ranks disagree on {what}: do all nodes see the same files and versions?")


def seed_everything(seed: int) -> None:
    """Same seed on all ranks (initialisation, split). Training noise comes from `keyed_uniform`."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def keyed_uniform(seed: int, epoch: int, ids: torch.Tensor, draws: int, stream: int = 0) -> torch.Tensor:
    """Uniform numbers in [0, 1), a function of (seed, epoch, sample id, draw) alone: the same on any number
    of ranks and any device. ids (B,) int64 -> (B, draws) float32. SplitMix64 (Steele et al. 2014)."""

    def mix(x: torch.Tensor) -> torch.Tensor:  # int64 wraps; masks make the shifts logical
        x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
        x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
        return x ^ ((x >> 31) & 0x1FFFFFFFF)

    golden = -0x61C8864680B583EB
    key = torch.tensor([seed, epoch, stream], dtype=torch.int64, device=ids.device)
    state = torch.zeros((), dtype=torch.int64, device=ids.device)
    for part in key:
        state = mix(state * golden + part + 1)
    rows = mix(mix(ids.long() + state) * golden + 1)[:, None]
    draw = torch.arange(1, draws + 1, device=ids.device)[None, :] * golden
    return ((mix(rows + draw) >> 40) & 0xFFFFFF).float() / 2**24


def resolve_batch(args: argparse.Namespace, world_size: int, kept: int | None = None) -> tuple[int, int]:
    """(global batch, micro-batches per step), said in one line. `kept`: the global batch of the run that is
    resumed, which stays on any number of ranks. Raises ValueError where --global_batch_size does not divide."""
    cell = world_size * args.batch_size
    if args.global_batch_size:
        if args.global_batch_size % cell:
            raise ValueError(f"--global_batch_size {args.global_batch_size} is not a multiple of {world_size} ranks x --batch_size {args.batch_size} = {cell}")
        accumulation = args.global_batch_size // cell
    else:
        accumulation = args.accumulation
    total = kept or cell * accumulation
    accumulation = -(-total // cell)
    log0(f"Batch size per GPU: {args.batch_size}, Total batch size: {total}")
    log0(f"global batch {total} = {world_size} ranks x {total / world_size / accumulation:g} x {accumulation} accumulation")
    return total, accumulation


def scaled_lr(lr: float, rule: str, world_size: int) -> float:
    """--lr_scaling: the rate for `world_size` ranks (linear: Goyal et al. 2017; sqrt: Krizhevsky 2014)."""
    factor = {"none": 1, "linear": world_size, "sqrt": math.sqrt(world_size), "conservative": min(world_size, 6)}[rule]
    if factor != 1:
        log0(f"learning rate {lr:g} x {factor:g} ({rule} scaling, {world_size} ranks) = {lr * factor:g}")
    return lr * factor


def lr_at(step: int, total: int, warmup: int, schedule: str) -> float:
    """Factor on the learning rate for 0-based `step`: linear warm-up that starts above zero, then constant,
    linear or cosine decay that reaches zero after the last step."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, total - warmup)
    return {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 + 0.5 * math.cos(math.pi * done)}[schedule]


class GlobalBatchSampler(DistributedSampler):
    """Batches of an epoch as a function of (seed, epoch) alone, dealt to ranks and micro-batches.

    The items, shuffled, are cut into global batches of `global_batch` (the n mod global_batch left over
    wait for another epoch); batch number p is dealt round-robin to world_size x micro_steps cells, so
    every rank makes the same number of micro-steps on any world size. Iterating yields this rank's
    micro-batches (int64 ids) from global batch `start` on. `cut(ids, epoch)` may regroup a window of
    `window` batches into a list of batches (length buckets; with `varying`, any number of them: token
    budgets). Memory and start are O(window).
    """

    def __init__(self, n: int, global_batch: int, micro_steps: int, seed: int, ddp: DDPContext, window: int = 1, cut: Callable | None = None, varying: bool = False):
        super().__init__(range(n), ddp.world_size, ddp.rank, shuffle=True, seed=seed, drop_last=True)
        cells = ddp.world_size * micro_steps
        if n < global_batch or global_batch < cells:
            raise ValueError(f"{n} samples, global batch {global_batch}, {ddp.world_size} ranks x {micro_steps} micro-batches: each needs to be at least the next")
        self.n, self.global_batch, self.micro_steps, self.start = n, global_batch, micro_steps, 0
        self.window, self.varying, self.cut = window, varying, cut or (lambda ids, epoch: ids.reshape(-1, global_batch))

    def __len__(self) -> int:  # exact where `cut` keeps the batch size
        return (self.n // self.global_batch - self.start) * self.micro_steps

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        self.epoch, self.start = epoch, start

    def permuted(self, positions: np.ndarray) -> np.ndarray:
        """Items at `positions` of the epoch's shuffle: a keyed Feistel network with cycle walking (Black and
        Rogaway 2002) instead of torch.randperm, which takes 2 s and 480 MB for 60 M items on every rank."""
        half = max(1, (max(self.n - 1, 1).bit_length() + 1) // 2)
        mask, keys = np.uint64((1 << half) - 1), np.random.SeedSequence([self.seed, self.epoch]).generate_state(8, np.uint64)
        items, walk = positions.astype(np.uint64), np.ones(len(positions), bool)
        while walk.any():
            left, right = items[walk] >> np.uint64(half), items[walk] & mask
            for key in keys:
                mixed = (right + key) * np.uint64(0x9E3779B97F4A7C15)
                mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
                left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(32))) & mask)
            items[walk] = (left << np.uint64(half)) | right
            walk = items >= self.n
        return items.astype(np.int64)

    def batches(self, start: int = 0) -> Iterator[np.ndarray]:
        """Global batches of the epoch from number `start` on. (same on all ranks)"""
        usable, stride = self.n // self.global_batch * self.global_batch, self.window * self.global_batch
        skipped = 0 if self.varying else start // self.window
        seen = skipped * self.window
        for low in range(skipped * stride, usable, stride):
            for batch in self.cut(self.permuted(np.arange(low, min(low + stride, usable))), self.epoch):
                if seen >= start:
                    yield batch
                seen += 1

    def deal(self, batch: np.ndarray, rank: int | None = None) -> list[np.ndarray]:
        """The micro-batches of a rank (this one) in a global batch; neighbours of a sorted batch stay together."""
        mine = batch[self.rank if rank is None else rank :: self.num_replicas]
        ends = [len(mine) * micro // self.micro_steps for micro in range(self.micro_steps + 1)]
        return [mine[a:b] for a, b in itertools.pairwise(ends)]

    def __iter__(self) -> Iterator[np.ndarray]:
        for batch in self.batches(self.start):
            yield from self.deal(batch)

    def fingerprint(self) -> bytes:
        """Hash of the plan's inputs and its first and last 1,000 batches, for require_same."""
        count = self.n // self.global_batch
        digest = hashlib.sha256(repr((self.n, self.global_batch, self.seed, self.epoch)).encode())
        for start in {0, max(0, count - 1000)}:
            for batch in itertools.islice(self.batches(start), 1000):
                digest.update(batch.tobytes())
        return digest.digest()


def wrap_ddp(model: torch.nn.Module, ddp: DDPContext) -> torch.nn.Module:
    """DistributedDataParallel; the model itself in a world of one. Every parameter must get a gradient."""
    if ddp.world_size == 1:
        return model
    device_ids = None if ddp.device.type == "cpu" else [ddp.device.index]
    # bucket views save a copy of the gradients; nothing here has buffers that must follow rank 0
    return DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True, broadcast_buffers=False)


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The module itself, without DDP's and torch.compile's wrappers."""
    while True:
        inner = getattr(model, "_orig_mod", None) or (model.module if isinstance(model, DistributedDataParallel) else None)
        if inner is None:
            return model
        model = inner


def sync_gradients(model: torch.nn.Module, last: bool):
    """Context of a micro-batch's forward and backward: gradients are all-reduced in the last one only."""
    wrapped = getattr(model, "_orig_mod", model)
    return contextlib.nullcontext() if last or not isinstance(wrapped, DistributedDataParallel) else wrapped.no_sync()


def resolve_precision(name: str, device: torch.device) -> torch.dtype:
    """torch.float32, bfloat16 or float16 for --precision on `device`."""
    if name == "fp16" and device.type == "cpu":
        raise ValueError("--precision fp16 is 30 times slower than fp32 on a CPU: use bf16 or fp32")
    if name == "auto":
        has_bf16 = device.type == "xpu" or (device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False))
        name = "bf16" if has_bf16 else "fp32"
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


class StepGuard:
    """The end of an optimizer step, and what all ranks must agree on there: non-finite numbers, signals,
    the time limit. One 3-number all-reduce per step, read one step later so that nothing waits for it."""

    signal = 0  # of this process, set by on_signal
    beat = 0.0  # when the process last showed that it is not stuck

    def __init__(self, args: argparse.Namespace, ddp: DDPContext, optimizer: torch.optim.Optimizer, dtype: torch.dtype, started: float):
        self.ddp, self.optimizer, self.max_norm = ddp, optimizer, args.max_grad_norm or math.inf
        self.scaler = torch.amp.GradScaler(ddp.device.type, enabled=dtype == torch.float16)
        self.deadline = started + 60 * args.max_minutes if args.max_minutes else math.inf
        self.max_bad, self.bad_in_row, self.bad_steps = args.max_bad_steps, 0, 0
        self.pending, self.recent = None, collections.deque(maxlen=args.max_bad_steps + 1)
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]

    @classmethod
    def on_signal(cls, number: int, _frame) -> None:
        """Ask for a stop at the next step. A process stuck in a collective with a dead peer would never get
        there: unless it shows life again it is ended here, long before the launcher's SIGKILL."""
        if not cls.signal:
            cls.beat = time.monotonic()
            threading.Thread(target=cls.watch, args=(number,), daemon=True).start()
        cls.signal = number

    @classmethod
    def watch(cls, number: int, patience: float = 20.0) -> None:
        while time.monotonic() - cls.beat < patience:
            time.sleep(0.5)
        os._exit(128 + number)

    def step(self, loss: torch.Tensor, step: int, ids: list) -> tuple[torch.Tensor, str]:
        """Clip, update (skipped on the device if anything is not finite), agree. `ids`: the samples of the
        step. Returns (gradient norm, why to stop or ''). Raises RuntimeError after max_bad_steps. (all ranks)"""
        StepGuard.beat = time.monotonic()
        self.scaler.unscale_(self.optimizer) if self.scaler.is_enabled() else None
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.max_norm, foreach=True)
        bad = ~(torch.isfinite(norm) & torch.isfinite(loss.detach()))
        local = torch.tensor([0.0, float(StepGuard.signal), float(time.monotonic() > self.deadline)])
        flags = local.to(self.ddp.device, non_blocking=True)
        flags[0] = bad
        if self.ddp.world_size > 1:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        if self.scaler.is_enabled():
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:  # fused optimizers skip the update on the device where found_inf is 1
            self.optimizer.grad_scale, self.optimizer.found_inf = None, flags[0]
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.recent.append((step, ids))
        before, self.pending = self.pending, flags.to("cpu", non_blocking=True)
        self.event, event = (torch.accelerator.current_stream().record_event() if flags.device.type != "cpu" else None), getattr(self, "event", None)
        if event is not None:
            event.synchronize()
        return norm, self.decide(before)

    def decide(self, flags: torch.Tensor | None) -> str:
        """What the flags of a step ask for. (same on all ranks)"""
        bad, number, late = (0.0, 0.0, 0.0) if flags is None else flags.tolist()
        self.bad_in_row = self.bad_in_row + 1 if bad else 0
        self.bad_steps += bool(bad)
        if bad:
            log0(f"WARNING: non-finite loss or gradient at step {self.recent[-2][0] if len(self.recent) > 1 else self.recent[-1][0]}: the update was skipped")
        if self.bad_in_row >= self.max_bad:
            seen = "; ".join(f"step {s}: {[int(x) for part in ids for x in part][:64]}" for s, ids in list(self.recent)[-4:])
            raise RuntimeError(f"{self.bad_in_row} steps in a row with a non-finite loss or gradient; samples of this rank: {seen}")
        return signal.Signals(int(number)).name if number else "time limit" if late else ""

    def finish(self) -> str:
        """Read the last step's flags (end of a phase)."""
        before, self.pending = self.pending, None
        if self.ddp.device.type != "cpu":
            torch.accelerator.synchronize()
        return self.decide(before)


def stop_status(reason: str) -> int:
    """Exit status of a run that stopped early, and its last line. (rank 0 speaks)"""
    if reason == "SIGUSR1":
        log0("checkpoint written, requeue me")
    else:
        log0(f"checkpoint written, stopped by {reason}: run the same command to go on")
    return {"SIGTERM": 143, "SIGINT": 130}.get(reason, 0)


def rng_states(ddp: DDPContext) -> list[dict]:
    """Random state of every rank, for a checkpoint. (all ranks)"""
    state = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if ddp.device.type != "cpu":
        state["device"] = torch.get_device_module(ddp.device).get_rng_state(ddp.device)
    states = [state]
    if ddp.world_size > 1:
        states = [None] * ddp.world_size
        dist.all_gather_object(states, state)
    return states


def restore_rng(states: list[dict], ddp: DDPContext, seed: int) -> None:
    """This rank's random state; on another world size a new one from (seed, rank)."""
    if len(states) != ddp.world_size:
        torch.manual_seed(seed + ddp.rank)
        return
    state = states[ddp.rank]
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "device" in state and ddp.device.type != "cpu":
        torch.get_device_module(ddp.device).set_rng_state(state["device"], ddp.device)


def atomic_write(path: Path, write: Callable) -> bool:
    """`write(file)` into a temporary file, fsync, rename. On failure (disk full) the old file stays whole, a
    warning says so and False is returned. (rank 0 only)"""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        return True
    except (OSError, RuntimeError) as error:  # torch.save turns ENOSPC into RuntimeError
        temporary.unlink(missing_ok=True)
        free = shutil.disk_usage(path.parent).free / 1e6
        warn(f"could not write {path} ({str(error).splitlines()[0]}; {free:.0f} MB free): the file before it is untouched")
        return False


def save_checkpoint(directory: str | Path, state: dict, step: int, keep: int, best: bool = False) -> bool:
    """latest.pt (and best.pt), atomically; the `keep` newest stay as step_*.pt. (rank 0 only)"""
    directory = Path(directory)
    numbered = directory / f"step_{step:08d}.pt"
    written = atomic_write(numbered, lambda file: torch.save(state, file))  # noqa: TID251
    if not written:
        return False
    for name in ["latest.pt"] + ["best.pt"] * best:
        link = directory / f".{name}.link"
        link.unlink(missing_ok=True)
        try:
            os.link(numbered, link)
        except OSError:  # a file system without hard links
            shutil.copy(numbered, link)
        os.replace(link, directory / name)
    for old in sorted(directory.glob("step_*.pt"))[:-keep]:
        old.unlink()
    return True


def load_checkpoint(path: str | Path) -> dict:
    """A checkpoint on the CPU, from one GPU or many: `module.` and `_orig_mod.` are stripped from the names
    of its model. Raises ValueError that says what is wrong with a damaged file."""
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load does not look at the checksums
            damaged = archive.testzip()
        if damaged:
            raise ValueError(f"checksum of {damaged} is wrong")
        state = torch.load(path, map_location="cpu", weights_only=True)  # noqa: TID251
    except FileNotFoundError:
        raise
    except Exception as error:
        raise ValueError(f"{path} is damaged or no checkpoint ({type(error).__name__}: {str(error).splitlines()[0][:200]})") from error
    if "model" in state:
        state["model"] = {re.sub(r"^(module\.|_orig_mod\.)+", "", k): v for k, v in state["model"].items()}
    return state


def find_checkpoint(directory: str | Path) -> str | None:
    """The newest whole checkpoint of a run; damaged ones are named in warnings. (rank 0 only)"""
    directory = Path(directory)
    candidates = [directory / "latest.pt", *sorted(directory.glob("step_*.pt"), reverse=True)]
    problems, seen = [], set()
    for path in candidates:
        if not path.exists() or path.stat().st_ino in seen:
            continue
        seen.add(path.stat().st_ino)
        try:
            load_checkpoint(path)
            return str(path)
        except ValueError as error:
            problems.append(str(error))
            warn(f"{error}: using the one before it")
    if problems:
        raise ValueError(f"no whole checkpoint is left in {directory}: {'; '.join(problems)}; use --fresh to start anew")
    return None


def open_run(args: argparse.Namespace, ddp: DDPContext, same: tuple[str, ...]) -> dict | None:
    """Prepare --output_dir and return the checkpoint to resume from, or None. (all ranks)

    Raises ValueError if the run found there was made with another value of an argument in `same`.
    """

    def prepare() -> str | None:
        folder = Path(args.output_dir)
        if args.fresh and folder.exists() and any(folder.iterdir()):
            aside = folder.with_name(f"{folder.name}.old-{time.strftime('%Y%m%d-%H%M%S')}")
            folder.rename(aside)
            log0(f"--fresh: the run in {folder} was moved to {aside}")
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise ValueError(f"--output_dir {folder} is not writable")
        return find_checkpoint(folder)

    path = on_rank0(ddp, prepare)
    if path is None:
        return None
    state = load_checkpoint(path)
    for name in same:
        old, new = state["args"].get(name), json.loads(json.dumps(getattr(args, name)))
        if old != new:
            raise ValueError(f"{args.output_dir} holds a run with --{name} {old!r}, this one has {new!r}: give another --output_dir, or --fresh to move the old run aside")
    log0(f"resuming {path}: step {state['step']}, epoch {state['epoch']}")
    return state


class RunLog:
    """metrics.jsonl, the log line, wandb, summary.json and curves.png of a run."""

    def __init__(self, args: argparse.Namespace, ddp: DDPContext, defaults: argparse.ArgumentParser, resumed: dict | None):
        self.args, self.ddp, self.folder = args, ddp, Path(args.output_dir)
        self.started = self.last = time.monotonic()
        self.waited, self.samples, self.sums, self.bar = 0.0, 0, {}, None
        self.wandb_id = (resumed or {}).get("wandb_id") or os.urandom(4).hex()
        self.wall = (resumed or {}).get("wall_s", 0.0)
        self.last_step = (resumed or {}).get("step", 0)
        self.final_loss, self.samples_per_s = (resumed or {}).get("speed", (None, None))
        log0(f"command: {' '.join(sys.argv)}")
        log0(f"torch {torch.__version__}, world size {ddp.world_size}, backend {ddp.backend}, started by {ddp.launcher}, {torch.get_num_threads()} CPU threads per rank")
        log0("arguments that differ from the defaults: " + (", ".join(f"{n}={getattr(args, n)}" for n in args.given if getattr(args, n) != defaults.get_default(n)) or "none"))
        if ddp.rank == 0:
            self.keep_until((resumed or {}).get("step", 0))
            self.queue = queue.SimpleQueue()
            self.thread = threading.Thread(target=self.feed_wandb, daemon=True)
            self.thread.start()

    def keep_until(self, step: int) -> None:
        """Drop records of steps that the resumed run makes again."""
        path = self.folder / "metrics.jsonl"
        if path.exists():
            lines = [line for line in path.read_text().splitlines() if line.endswith("}") and json.loads(line)["step"] <= step]
            atomic_write(path, lambda file: file.write("".join(line + "\n" for line in lines if step).encode()))

    def feed_wandb(self) -> None:
        """wandb in a thread of its own: what it does wrong, or slowly, never reaches the training loop."""
        mode = self.args.wandb_mode
        try:
            if mode == "auto":
                netrc_file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
                key = os.environ.get("WANDB_API_KEY") or (netrc_file.exists() and "wandb" in netrc_file.read_text())
                mode = os.environ.get("WANDB_MODE") or ("online" if key else "disabled")
                log0(f"wandb {mode} (--wandb_mode auto: {'an' if key else 'no'} API key is configured)")
            if mode == "disabled":
                return
            import wandb

            run = wandb.init(project=self.args.wandb_project, name=self.args.wandb_name, id=self.wandb_id, resume="allow", mode=mode, dir=str(self.folder), config=vars(self.args), settings=wandb.Settings(init_timeout=30, silent=True))
            while (row := self.queue.get()) is not None:
                run.log(row)
            run.finish()
        except Exception as error:
            warn(f"wandb failed and is off for the rest of the run ({type(error).__name__}: {str(error)[:200]}); metrics.jsonl has everything")

    def waiting(self, iterator: Iterator):
        """next(iterator), its time counted as waiting for data."""
        begin = time.monotonic()
        try:
            return next(iterator)
        finally:
            self.waited += time.monotonic() - begin
            StepGuard.beat = time.monotonic()

    def add(self, samples: int, **sums: tuple[torch.Tensor, float]) -> None:
        """Add (sum, count) pairs of this rank's micro-batch; stays on the device."""
        self.samples += samples
        for name, (total, count) in sums.items():
            old = self.sums.get(name, (0.0, 0.0))
            self.sums[name] = (old[0] + total.detach().double(), old[1] + count)

    def interval(self, step: int, total: int, epoch: int, model: torch.nn.Module, lr: float, norm: torch.Tensor, **extra) -> dict:
        """Reduce what was added since the last call, log it, return the record. (all ranks) One host sync."""
        flat = {f"{n}/{i}": v for n, pair in self.sums.items() for i, v in enumerate(pair)}
        flat = reduce_sums(self.ddp, {**flat, "samples": float(self.samples), "norm": norm.detach() / self.ddp.world_size})
        seconds, waited = time.monotonic() - self.last, self.waited
        means = {n: flat[f"{n}/0"] / max(flat[f"{n}/1"], 1e-12) for n in self.sums}
        comm = communication_share(model, seconds / max(1, step - self.last_step))
        self.last_step, self.final_loss, self.samples_per_s = step, means.get("loss"), flat["samples"] / seconds
        record_ = {"step": step, "epoch": epoch, **means, "grad_norm": flat["norm"], "lr": lr, "samples/s": flat["samples"] / seconds, "data_wait": waited / seconds, "comm": comm, "mem_gb": memory_gb(self.ddp.device), **extra}
        numbers = " ".join(f"{n}={v:.6f}" for n, v in means.items())
        log0(f"step={step}/{total} epoch={epoch} {numbers} grad_norm={flat['norm']:.3f} lr={lr:.3e} samples/s={flat['samples'] / seconds:.0f} data_wait={waited / seconds:.1%} comm={comm:.1%} mem_gb={record_['mem_gb']:.1f}")
        self.write(record_)
        self.reset()
        return record_

    def reset(self) -> None:
        """Start a new interval (after evaluation or a checkpoint, so that speeds are of training alone)."""
        self.last, self.waited, self.samples, self.sums = time.monotonic(), 0.0, 0, {}

    def write(self, row: dict) -> None:
        """One record to metrics.jsonl and wandb. (rank 0 writes)"""
        if self.ddp.rank == 0:
            with open(self.folder / "metrics.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            if self.thread.is_alive():
                self.queue.put(dict(row))

    def close(self, status: str, **fields) -> None:
        """summary.json, curves.png, end of wandb. (rank 0 only)"""
        if self.ddp.rank:
            return
        summary = {"script": Path(sys.argv[0]).name, "status": status, **fields, "wall_s": self.wall + time.monotonic() - self.started, "world_size": self.ddp.world_size, "backend": self.ddp.backend, "device": str(self.ddp.device), "args": vars(self.args)}
        atomic_write(self.folder / "summary.json", lambda file: file.write((json.dumps(summary, indent=1) + "\n").encode()))
        plot_curves(self.folder)
        self.queue.put(None)
        self.thread.join(timeout=30)


def communication_share(model: torch.nn.Module, step_seconds: float) -> float:
    """Share of a step spent in gradient all-reduces that the backward pass does not hide (DDP's own timers)."""
    wrapped = getattr(model, "_orig_mod", model)
    if not isinstance(wrapped, DistributedDataParallel):
        return 0.0
    data = wrapped._get_ddp_logging_data()
    exposed = data.get("avg_backward_comm_time", 0) - data.get("avg_backward_compute_comm_overlap_time", 0)
    return min(1.0, max(0.0, exposed * 1e-9 / max(step_seconds, 1e-9)))


def memory_gb(device: torch.device) -> float:
    """Peak memory of the device's allocator, or of the process on a CPU, in GB."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e9 if sys.platform == "darwin" else 1e6)


def plot_curves(folder: Path) -> None:
    """curves.png: every loss and metric of metrics.jsonl against the step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with open(folder / "metrics.jsonl", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    plain = {"step", "epoch", "samples/s", "data_wait", "comm", "mem_gb"}
    names = [n for n in dict.fromkeys(k for r in rows for k, v in r.items() if isinstance(v, float)) if n not in plain]
    if not names:
        return
    figure, axes = pyplot.subplots(-(-len(names) // 3), min(3, len(names)), figsize=(12, 2.6 * -(-len(names) // 3)), squeeze=False, layout="constrained")
    for axis, name in zip(axes.flat, names, strict=False):
        points = [(r["step"], r[name]) for r in rows if isinstance(r.get(name), float)]
        axis.plot(*zip(*points, strict=True), marker="." if len(points) < 30 else None, linewidth=1)
        axis.set(title=name, xlabel="optimizer step")
    for axis in axes.flat[len(names) :]:
        axis.remove()
    figure.savefig(folder / "curves.png", dpi=110)
    pyplot.close(figure)


# ===== shared DDP block: end =====


# ---- Evaluate --------------------------------------------------------------------------------------


@torch.no_grad()
def embed_rows(args: argparse.Namespace, ddp: DDPContext, student: Student, tokens: Tokens, rows: np.ndarray) -> torch.Tensor:
    """The student's vectors (N, D) of texts `rows`, on every rank; each text is embedded once. (all ranks)

    Batches are cut from the length-sorted rows before they are dealt, so the result does not depend on
    the number of ranks."""
    order = np.argsort(tokens.lengths[rows], kind="stable")
    size, width = args.eval_batch_size, student.model.get_embedding_dimension()
    vectors = torch.zeros(len(rows), width, device=ddp.device)
    for low in range(ddp.rank * size, len(rows), ddp.world_size * size):
        places = order[low : low + size]
        ids, mask = tokens.padded(rows[places])
        vectors[torch.from_numpy(places).to(ddp.device)] = student.embed_group(ids.to(ddp.device), mask.to(ddp.device))
        StepGuard.beat = time.monotonic()
    if ddp.world_size > 1:
        dist.all_reduce(vectors)  # every row is zero on all ranks but one
    return vectors


def ranking_metrics(ddp: DDPContext, queries: torch.Tensor, documents: torch.Tensor, pairs: np.ndarray) -> dict[str, float]:
    """nDCG@10, MRR@10 and recall@100 of unit vectors queries (Q, D) against documents (M, D), binary
    relevance (Jarvelin and Kekalainen 2002). pairs (P, 2): relevant (query, document) numbers. (all ranks)"""
    sums = torch.zeros(4, dtype=torch.float64)
    relevant: dict[int, list[int]] = collections.defaultdict(list)
    for q, d in pairs.tolist():
        relevant[q].append(d)
    for low in range(ddp.rank * 64, len(queries), ddp.world_size * 64):
        scores = queries[low : low + 64] @ documents.T
        for q, row in enumerate(scores, low):
            mine = torch.tensor(relevant[q], device=row.device)
            # ties count against us: rank = 1 + documents that score at least as high
            ranks = ((row[None, :] >= row[mine][:, None]).sum(1)).sort().values.double().cpu()
            gain, ideal = 1 / torch.log2(ranks + 1), 1 / torch.log2(torch.arange(2.0, 2 + min(10, len(mine))))
            best = ranks[0].item()
            sums += torch.tensor([(gain[ranks <= 10].sum() / ideal.sum()).item(), (best <= 10) / best, (ranks <= 100).double().mean().item(), 1.0])
    total = reduce_sums(ddp, dict(zip(("ndcg@10", "mrr@10", "recall@100", "n"), sums, strict=True)))
    return {name: value / total["n"] for name, value in total.items() if name != "n"}


def target_vectors(vectors: np.ndarray, rows: np.ndarray, dim: int, device: torch.device) -> torch.Tensor:
    """Teacher's vectors (B, dim) float32 of texts `rows`, renormalised after the cut to `dim`."""
    return F.normalize(torch.from_numpy(vectors[rows, :dim]).to(device, torch.float32), dim=-1)


def evaluate(args: argparse.Namespace, ddp: DDPContext, student: Student, corpus: Corpus, tokens: Tokens, vectors: np.ndarray) -> dict[str, float]:
    """Held-out metrics of the unwrapped student: the same on any number of ranks. (all ranks)"""
    training = student.training
    student.eval()
    documents = embed_rows(args, ddp, student, tokens, corpus.eval_documents)
    target = target_vectors(vectors, corpus.eval_documents, documents.shape[1], ddp.device)
    metrics = {"teacher_cosine": (documents * target).sum(1).mean(dtype=torch.float64).item()}
    if len(corpus.eval_pairs):
        queries = embed_rows(args, ddp, student, tokens, corpus.eval_queries)
        metrics = ranking_metrics(ddp, queries, documents, corpus.eval_pairs) | metrics
    student.train(training)
    return metrics


def evaluate_teacher(ddp: DDPContext, corpus: Corpus, vectors: np.ndarray) -> dict[str, float]:
    """The teacher's own figures on the same queries and documents, from its cached vectors. (all ranks)"""
    if not len(corpus.eval_pairs):
        return {"teacher_cosine": 1.0}
    queries, documents = (target_vectors(vectors, rows, vectors.shape[1], ddp.device) for rows in (corpus.eval_queries, corpus.eval_documents))
    return ranking_metrics(ddp, queries, documents, corpus.eval_pairs) | {"teacher_cosine": 1.0}


def show_metrics(metrics: dict[str, float], teacher: dict[str, float]) -> str:
    """'ndcg@10=0.412 (81% of teacher) mrr@10=...'"""
    main = next(iter(metrics))
    share = f" ({metrics[main] / teacher[main]:.0%} of teacher)" if teacher.get(main) else ""
    return " ".join(f"{n}={v:.4f}{share if n == main else ''}" for n, v in metrics.items())


# ---- Train -----------------------------------------------------------------------------------------


@dataclass
class Task:
    """What both phases and the evaluation share."""

    args: argparse.Namespace
    ddp: DDPContext
    corpus: Corpus
    tokens: Tokens
    vectors: np.ndarray
    negatives: np.ndarray
    student: Student
    log: RunLog
    teacher: dict[str, float]
    untrained: dict[str, float]
    history: list[dict]

    def to_device(self, groups: list) -> list:
        """Groups of (places, ids, mask) on the device; copies from pinned memory do not block."""
        pin = self.ddp.device.type == "cuda"
        tensors = [(torch.from_numpy(np.asarray(a)) if not torch.is_tensor(a) else a for a in group) for group in groups]
        return [tuple((t.pin_memory() if pin else t).to(self.ddp.device, non_blocking=True) for t in group) for group in tensors]


def phase1_batches(task: Task, sampler: GlobalBatchSampler) -> Iterator[list]:
    """One list of (items, groups, targets) micro-batches per optimizer step, ahead of the step."""
    dim, smallest = task.student.model.get_embedding_dimension(), 16 if task.ddp.device.type == "cpu" else 64
    for batch in sampler.batches(sampler.start):
        step = []
        for items in sampler.deal(batch):
            rows = task.corpus.phase1[items]
            groups = task.to_device(task.tokens.groups(rows, smallest))
            step.append((items, groups, target_vectors(task.vectors, rows, dim, task.ddp.device)))
        yield step


def phase1_step(task: Task, model: torch.nn.Module, step: list, total: int, scaler) -> torch.Tensor:
    """Forward and backward of one optimizer step of `total` texts over all ranks; returns this rank's loss."""
    args, whole = task.args, 0.0
    dims = [*task.args.matryoshka_dims, step[0][2].shape[1]]
    for number, (items, groups, target) in enumerate(step):
        with sync_gradients(model, number == len(step) - 1):
            vectors = model(groups)
            pairs = [(F.normalize(vectors[:, :d], dim=-1), F.normalize(target[:, :d], dim=-1)) for d in dims]
            loss = sum(distance_loss(s, t, args.phase1_l2_weight, args.phase1_cosine_weight).sum() for s, t in pairs) / len(dims)
            # DDP averages over ranks; times ranks / total makes it the mean over the texts of all ranks
            scaler.scale(loss * task.ddp.world_size / total).backward()
        task.log.add(len(items), loss=(loss, len(items)))
        whole = whole + loss.detach()
    return whole


@dataclass
class PairBatch:
    """This rank's micro-batches of a phase-2 step and the documents of the whole step.

    A micro-batch's texts are in the order queries, positives, negatives that exist.
    ids (M,): text of every column of the score matrix, -1 where there is none; labels (B,): columns of
    this rank's positives; teacher_scores (B, M); most: queries of the largest rank; documents: positives
    and negatives over all ranks. micro: (items, groups, targets, negatives (b, K) with -1) each."""

    micro: list
    ids: torch.Tensor
    labels: torch.Tensor
    teacher_scores: torch.Tensor
    most: int
    documents: int


def phase2_batches(task: Task, sampler: GlobalBatchSampler, epoch: int) -> Iterator[PairBatch]:
    """One PairBatch per optimizer step, ahead of the step. Every rank knows the whole step's texts."""
    args, ddp, corpus = task.args, task.ddp, task.corpus
    dim, smallest = task.student.model.get_embedding_dimension(), 16 if ddp.device.type == "cpu" else 64
    for batch in sampler.batches(sampler.start):
        ranks = range(ddp.world_size) if args.negatives == "step" else [ddp.rank]
        dealt = {r: np.concatenate(sampler.deal(batch, r)) for r in range(ddp.world_size)}
        most = -(-len(batch) // ddp.world_size)
        drawn = {r: draw_negatives(task.negatives, dealt[r], args.num_negatives, args.seed, epoch) for r in dealt}
        positive = np.stack([np.pad(corpus.positives[dealt[r]], (0, most - len(dealt[r])), constant_values=-1) for r in ranks])
        negative = np.stack([np.pad(drawn[r], ((0, most - len(dealt[r])), (0, 0)), constant_values=-1) for r in ranks])
        ids = np.concatenate([positive.ravel(), negative.ravel()])
        mine = target_vectors(task.vectors, corpus.queries[dealt[ddp.rank]], dim, ddp.device)
        columns = target_vectors(task.vectors, np.maximum(ids, 0), dim, ddp.device)
        micro, low = [], 0
        for items in sampler.deal(batch):
            own = drawn[ddp.rank][low : low + len(items)]
            low += len(items)
            rows = np.concatenate([corpus.queries[items], corpus.positives[items], own[own >= 0]])
            target = target_vectors(task.vectors, rows, dim, ddp.device)
            micro.append((items, task.to_device(task.tokens.groups(rows, smallest)), target, torch.from_numpy(own).to(ddp.device)))
        start = list(ranks).index(ddp.rank) * most
        labels = torch.arange(start, start + len(dealt[ddp.rank]), device=ddp.device)
        documents = len(batch) + sum(int((d >= 0).sum()) for d in drawn.values())
        yield PairBatch(micro, torch.from_numpy(ids).to(ddp.device), labels, mine @ columns.T, most, documents)


def split_texts(vectors: torch.Tensor, size: int, negatives: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Vectors of a micro-batch's texts -> queries (b, D), positives (b, D), negatives (b, K, D), zero where
    there is none."""
    table = vectors.new_zeros(*negatives.shape, vectors.shape[-1])
    table = table.masked_scatter((negatives >= 0)[..., None], vectors[2 * size :])
    return vectors[:size], vectors[size : 2 * size], table


def contrastive_loss(task: Task, batch: PairBatch, vectors: list[torch.Tensor], total: int) -> tuple[torch.Tensor, dict]:
    """Loss of this rank's queries of a step from the vectors of its micro-batches' texts, as sums; (loss to
    backpropagate, {name: (sum, count)}). DDP's average over ranks makes it the mean over the step."""
    args, ddp = task.args, task.ddp
    parts = [split_texts(v, len(m[0]), m[3]) for v, m in zip(vectors, batch.micro, strict=True)]
    queries, positives, negatives = (torch.cat(p) for p in zip(*parts, strict=True))
    targets = torch.cat([m[2] for m in batch.micro])
    spread = gather_rows if args.negatives == "step" else lambda rows, most, _: F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, most - len(rows)))
    documents = torch.cat([spread(positives, batch.most, ddp), spread(negatives, batch.most, ddp).flatten(0, 1)])
    masked = false_negatives(batch.ids, batch.labels, batch.teacher_scores, args.false_negative_margin)
    whole, sums = 0.0, {}
    dims = [*args.matryoshka_dims, queries.shape[1]]
    for dim in dims:
        q, d = (F.normalize(x[:, :dim], dim=-1) for x in (queries, documents))
        infonce, logits = infonce_loss(q, d, batch.labels, masked, args.temperature)
        kl = kl_loss(logits, batch.teacher_scores / args.temperature, masked) if args.kl_weight else torch.zeros_like(infonce)
        far = distance_loss(F.normalize(torch.cat(vectors)[:, :dim], dim=-1), F.normalize(targets[:, :dim], dim=-1), args.phase2_l2_weight, 0.0)
        is_query = torch.cat([torch.arange(len(m[2]), device=far.device) < len(m[0]) for m in batch.micro])
        # queries and documents weigh the same, each the mean over the whole step
        pull = 0.5 * (far[is_query].sum() / total + far[~is_query].sum() / batch.documents) * total
        whole = whole + (args.infonce_weight * infonce.sum() + args.kl_weight * kl.sum() + pull) / len(dims)
        sums = {"infonce": (infonce.sum(), len(q)), "distance": (pull, len(q))}
        sums |= {"kl": (kl.sum(), len(q))} if args.kl_weight else {}
    return whole * ddp.world_size / total, {"loss": (whole, len(queries)), **sums}


def phase2_step(task: Task, model: torch.nn.Module, batch: PairBatch, total: int, scaler) -> torch.Tensor:
    """Forward and backward of one optimizer step of `total` queries over all ranks.

    With several micro-batches their vectors are first computed without a graph, the loss and its gradient
    by the vectors from all of them, then each is run again with its part of that gradient (gradient
    caching, Gao et al. 2021): the negatives are those of the whole step on any number of GPUs."""
    count, student = sum(len(m[0]) for m in batch.micro), unwrap(model)
    if len(batch.micro) == 1:
        loss, sums = contrastive_loss(task, batch, [model(batch.micro[0][1])], total)
        scaler.scale(loss).backward()
    else:
        states, vectors = [], []
        with torch.no_grad():
            for _, groups, _, _ in batch.micro:
                states.append(rng_state(task.ddp.device))
                vectors.append(student(groups))
        vectors = [v.requires_grad_() for v in vectors]
        loss, sums = contrastive_loss(task, batch, vectors, total)
        gradients = torch.autograd.grad(loss, vectors)
        after = rng_state(task.ddp.device)
        for number, ((_, groups, _, _), gradient) in enumerate(zip(batch.micro, gradients, strict=True)):
            with sync_gradients(model, number == len(batch.micro) - 1):
                set_rng_state(states[number], task.ddp.device)  # the same dropout as the first time
                scaler.scale((model(groups) * gradient).sum()).backward()
        set_rng_state(after, task.ddp.device)
    task.log.add(count, **sums)
    return loss


def rng_state(device: torch.device) -> torch.Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def set_rng_state(state: torch.Tensor, device: torch.device) -> None:
    torch.set_rng_state(state) if device.type == "cpu" else torch.get_device_module(device).set_rng_state(state, device)


def make_optimizer(args: argparse.Namespace, student: Student, lr: float) -> torch.optim.Optimizer:
    """AdamW; no decay for biases, norms and embedding tables. Fused: one kernel, and it can skip on the device."""
    trained = {n: p for n, p in student.named_parameters() if p.requires_grad}
    no_decay = [p for n, p in trained.items() if p.ndim < 2 or "embeddings." in n]
    decay = [p for n, p in trained.items() if not (p.ndim < 2 or "embeddings." in n)]
    groups = [{"params": decay, "weight_decay": args.weight_decay}, {"params": no_decay, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, args.adam_beta2), fused=True)


def make_sampler(task: Task, phase: int, total: int, micro_steps: int) -> GlobalBatchSampler:
    """Phase 1: windows of length-sorted texts; phase 2: random batches, sorted so that ranks get equal work."""
    args, corpus, lengths = task.args, task.corpus, task.tokens.lengths
    if phase == 1:
        cut = bucket_by_length(lengths[corpus.phase1], total, args.seed)
        return GlobalBatchSampler(len(corpus.phase1), total, micro_steps, args.seed + 1, task.ddp, window=32, cut=cut)
    work = lengths[corpus.positives] + np.where(task.negatives >= 0, lengths[np.maximum(task.negatives, 0)], 0).sum(1)
    return GlobalBatchSampler(len(corpus.queries), total, micro_steps, args.seed + 2, task.ddp, cut=lambda ids, _: [ids[np.argsort(work[ids], kind="stable")]])


@dataclass
class Phase:
    """Where a phase stands: all that a checkpoint must bring back."""

    number: int
    step: int = 0  # optimizer steps of this phase
    first: int = 0  # optimizer steps of the phases before
    epoch: int = 0
    position: int = 0  # global batches of this epoch
    best: dict | None = None
    stale: int = 0  # evaluations without gain


def checkpoint(task: Task, phase: Phase, optimizer, guard: StepGuard, total: int, best: bool, done: bool = False) -> None:
    """Everything needed to go on bit by bit, written by rank 0. (all ranks)"""
    states = rng_states(task.ddp)
    if task.ddp.rank == 0:
        state = {
            "format": 1, "script": "train_ddp.py", "args": vars(task.args), "world_size": task.ddp.world_size,
            "model": unwrap(task.student).state_dict(), "optimizer": optimizer.state_dict(), "scaler": guard.scaler.state_dict(),
            "phase": dataclasses.asdict(phase), "step": phase.first + phase.step, "epoch": phase.epoch, "done": done, "global_batch": total,
            "rng": states, "untrained": task.untrained, "history": task.history, "bad_steps": guard.bad_steps,
            "wandb_id": task.log.wandb_id, "speed": (task.log.final_loss, task.log.samples_per_s), "wall_s": task.log.wall + time.monotonic() - task.log.started,
        }  # fmt: skip
        save_checkpoint(task.args.output_dir, state, state["step"], task.args.keep_checkpoints, best)
        if best:
            kept = {k: state[k] for k in ("format", "script", "args", "model", "step", "phase")}
            atomic_write(Path(task.args.output_dir) / f"phase{phase.number}_best.pt", lambda file: torch.save(kept, file))  # noqa: TID251
    barrier(task.ddp)
    StepGuard.beat = time.monotonic()
    task.log.reset()


def judge(task: Task, phase: Phase) -> bool:
    """Evaluate, log, update phase.best from numbers that all ranks share; whether it is the best. (all ranks)"""
    metrics = evaluate(task.args, task.ddp, task.student, task.corpus, task.tokens, task.vectors)
    name, step = next(iter(metrics)), phase.first + phase.step
    better = phase.best is None or metrics[name] > phase.best["value"]
    if better:
        phase.best, phase.stale = {"name": name, "value": metrics[name], "step": step, "metrics": metrics}, 0
    else:
        phase.stale += 1
    log0(f"phase {phase.number} step {step} held-out: {show_metrics(metrics, task.teacher)}{' (best so far)' if better else ''}")
    task.history.append({"step": step, "phase": phase.number, **metrics})
    task.log.write({"step": step, "epoch": phase.epoch, "phase": phase.number, **metrics})
    task.log.reset()
    return better


def resume_phase(task: Task, phase: Phase, state: dict, optimizer, guard: StepGuard) -> None:
    """Put a checkpoint's state back. (all ranks)"""
    unwrap(task.student).load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    if guard.scaler.is_enabled() and state["scaler"]:
        guard.scaler.load_state_dict(state["scaler"])
    restore_rng(state["rng"], task.ddp, task.args.seed)
    guard.bad_steps = state["bad_steps"]


def train(task: Task, phase: Phase, state: dict | None, total: int, micro_steps: int) -> str:
    """Train one phase, from `state` if it is this phase's. Returns why it stopped early, or ''. (all ranks)"""
    args, ddp, log = task.args, task.ddp, task.log
    sampler = make_sampler(task, phase.number, total, micro_steps)
    epochs, peak = getattr(args, f"phase{phase.number}_epochs"), scaled_lr(getattr(args, f"phase{phase.number}_lr"), args.lr_scaling, ddp.world_size)
    per_epoch = len(sampler) // micro_steps
    steps = min(epochs * per_epoch, args.max_steps or math.inf)
    warmup = min(args.warmup_steps, steps) if args.warmup_steps is not None else int(args.warmup_ratio * steps)
    optimizer = make_optimizer(args, task.student, peak)
    guard = StepGuard(args, ddp, optimizer, task.student.dtype, log.started)
    if state:
        resume_phase(task, phase, state, optimizer, guard)
    model = wrap_ddp(task.student, ddp)
    if not state:
        torch.manual_seed(args.seed + ddp.rank)  # dropout differs between ranks
    log0(f"phase {phase.number}: {sampler.n} {'texts' if phase.number == 1 else 'queries'}, {epochs} epochs x {per_epoch} steps, {steps} steps, warm-up {warmup}, peak learning rate {peak:g}, {sampler.n - per_epoch * total} left out per epoch")
    sampler.set_epoch(phase.epoch, phase.position)
    require_same(ddp, "the batches", sampler.fingerprint())
    student = task.student
    student.train()
    bar = tqdm(total=steps, initial=phase.step, desc=f"phase {phase.number}", disable=ddp.rank > 0 or not sys.stderr.isatty())
    reason = ""
    while phase.step < steps and not reason:
        sampler.set_epoch(phase.epoch, phase.position)
        batches = phase1_batches(task, sampler) if phase.number == 1 else phase2_batches(task, sampler, phase.epoch)
        batches = prefetch(batches, ddp.device)
        log.reset()
        while phase.position < per_epoch and phase.step < steps and not reason:
            batch = log.waiting(batches)
            lr = peak * lr_at(phase.step, steps, warmup, args.lr_schedule)
            for group in optimizer.param_groups:
                group["lr"] = lr
            run = phase1_step if phase.number == 1 else phase2_step
            loss = run(task, model, batch, total, guard.scaler)
            items = [m[0] for m in (batch if phase.number == 1 else batch.micro)]
            norm, reason = guard.step(loss, phase.first + phase.step + 1, items)
            phase.step, phase.position = phase.step + 1, phase.position + 1
            bar.update()
            step = phase.first + phase.step
            if phase.step % args.log_every == 0 or phase.step == steps:
                log.interval(step, phase.first + steps, phase.epoch, model, lr, norm, phase=phase.number)
            if phase.position == per_epoch:  # the epoch's end belongs to the next one
                phase.epoch, phase.position = phase.epoch + 1, 0
            due = phase.step % args.eval_every == 0 if args.eval_every else phase.position == 0
            better = (due or phase.step == steps) and not reason and judge(task, phase)
            if args.early_stop_patience and phase.stale >= args.early_stop_patience:
                reason = "early stop"
            if reason or better or due or phase.step % args.save_every == 0 or phase.step == steps:
                checkpoint(task, phase, optimizer, guard, total, better, done=phase.step == steps or reason == "early stop")
            if phase.position == 0:
                break
    guard.finish()
    bar.close()
    if reason == "early stop":
        log0(f"phase {phase.number} stopped early: no gain in {phase.stale} evaluations")
    return "" if reason == "early stop" else reason


def start_weights(task: Task, phase: int) -> None:
    """Load the best student of phase 1 where phase 2 starts. (all ranks)"""
    path = Path(task.args.phase1_checkpoint or Path(task.args.output_dir) / "phase1_best.pt")
    if not path.exists():
        if task.args.phase1_checkpoint:
            raise ValueError(f"--phase1_checkpoint {path}: no such file")
        if not task.args.skip_phase1:
            raise RuntimeError(f"{path} of this run's phase 1 is gone")
        warn(f"--skip_phase1 and no {path}: phase 2 starts from the raw student")
        return
    state = load_checkpoint(path)
    for name in ("student_model", "use_projection", "student_layers", "projection_hidden"):
        if state["args"].get(name) != getattr(task.args, name):
            raise ValueError(f"{path} was trained with --{name} {state['args'].get(name)!r}, this run has {getattr(task.args, name)!r}")
    try:
        unwrap(task.student).load_state_dict(state["model"])
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit this student: {str(error).splitlines()[1].strip()}") from error
    log0(f"phase {phase} starts from {path} (step {state['step']})")


# ---- Main ------------------------------------------------------------------------------------------


def save_artifacts(task: Task, best: dict) -> list[str]:
    """Save the student as a SentenceTransformer of stock modules, and its base-dimension part beside it.

    Raises RuntimeError if what `encode` of the saved folder gives differs from the trained forward pass by
    more than 1e-5. (rank 0 only)"""
    from sentence_transformers import SentenceTransformer

    args, student = task.args, task.student.eval()
    dim, width = student.model.get_embedding_dimension(), student.model[0].get_embedding_dimension()
    short = re.sub(r"\W+", "-", str(args.student_model).rstrip("/").rpartition("/")[2]).strip("-")
    folder = Path(args.artifacts_dir) / f"distilled-{short}-{dim}d{'' if args.use_projection else '-mrl'}"
    models = {folder: student.model}
    if args.use_projection:
        cut = next(i for i, m in enumerate(student.model) if type(m).__name__ == "Normalize") + 1
        models[folder.with_name(f"{folder.name}-base-{width}d")] = SentenceTransformer(modules=list(student.model)[:cut], prompts=student.model.prompts, device=str(task.ddp.device))
    rows = np.concatenate([task.corpus.eval_queries[:32], task.corpus.eval_documents[:32]])
    texts = [(task.corpus.texts.kinds[i], task.corpus.texts[i]) for i in rows]
    prompts = student_prompts(args, student.model)
    for path, model in models.items():
        temporary = path.with_name(path.name + ".tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        model.save(str(temporary), create_model_card=False)
        (temporary / "README.md").write_text(model_card(task, best, path.name, model), encoding="utf-8")
        loaded = SentenceTransformer(str(temporary), device=str(task.ddp.device))
        encoded = loaded.encode([prompts[k] + t for k, t in texts], batch_size=8, convert_to_tensor=True, show_progress_bar=False)
        ids, mask = task.tokens.padded(rows)
        with torch.no_grad():
            trained = Student(model, torch.float32, task.ddp.device).embed_group(ids.to(task.ddp.device), mask.to(task.ddp.device))
        gap = (encoded - trained).abs().max().item()
        if not gap <= 1e-5:
            raise RuntimeError(f"{temporary}: encode() differs from the trained forward pass by {gap:.1e} (limit 1e-5); nothing was put in its place")
        shutil.rmtree(path, ignore_errors=True)
        temporary.rename(path)
        log0(f"saved {path} ({model.get_embedding_dimension()} dimensions, encode() equals the trained forward pass to {gap:.1e})")
    return [str(p) for p in models]


def model_card(task: Task, best: dict, name: str, model) -> str:
    """README.md of a saved student."""
    import sentence_transformers

    args = task.args
    rows = [("teacher", task.teacher), ("student", best["metrics"]), ("student, untrained", task.untrained)]
    header = list(best["metrics"])
    table = "\n".join(f"| {who} | " + " | ".join(f"{m.get(c, float('nan')):.4f}" for c in header) + " |" for who, m in rows)
    note = "" if model is task.student.model else "\nThis is the student without its projection head: smaller vectors, not comparable with the teacher's; the figures are those of the student with the head.\n"
    return (
        "---\nlibrary_name: sentence-transformers\npipeline_tag: sentence-similarity\ntags: [sentence-transformers, distillation]\n---\n"
        f"# {name}\n\nDistilled from `{args.teacher_model}` into `{args.student_model}` by `train_ddp.py` "
        f"({'projection' if args.use_projection else 'MRL'} mode, {best['step']} optimizer steps, data {args.phase1_data} / {args.phase2_data}).\n{note}\n"
        f"Held-out: {len(task.corpus.eval_queries)} queries against {len(task.corpus.eval_documents)} documents.\n\n"
        f"| | {' | '.join(header)} |\n|---|{'---|' * len(header)}\n{table}\n\n"
        f"```python\nfrom sentence_transformers import SentenceTransformer\n\nmodel = SentenceTransformer(PATH)  # sentence-transformers >= {sentence_transformers.__version__.split('.')[0]}\n"
        "queries = model.encode_query([...])\ndocuments = model.encode_document([...])\n```\n\n"
        f"Dimensions {model.get_embedding_dimension()}, maximum length {model.max_seq_length} tokens, prompts {model.prompts}.\n"
    )


def final_table(task: Task, best: dict) -> None:
    """Held-out student / teacher / untrained student, on the log."""
    rows = [("teacher", task.teacher), ("student", best["metrics"]), ("untrained student", task.untrained)]
    log0(f"held-out: {len(task.corpus.eval_queries)} queries, {len(task.corpus.eval_documents)} documents, best at step {best['step']}")
    for who, metrics in rows:
        log0(f"  {who:<18}" + "  ".join(f"{n} {metrics[n]:.4f}" for n in best["metrics"] if n in metrics))


def build_task(args: argparse.Namespace, ddp: DDPContext, state: dict | None) -> Task:
    """Data, teacher vectors and student, each made once and cached. (all ranks)"""
    log = RunLog(args, ddp, build_parser(), state)
    if Path("ddp_config.json").exists() and not args.config:
        log0("ddp_config.json lies here but is not read: give --config ddp_config.json")
    prepare_hub(args)
    corpus = load_data(args, ddp)
    teacher_name, student_name = (builtin_model(args, ddp, corpus, n) for n in (args.teacher_model, args.student_model))
    vectors = teacher_vectors(args, ddp, corpus, teacher_name)
    student = build_student(args, ddp, student_name, vectors.shape[1], resolve_precision(args.precision, ddp.device))
    tokens = load_tokens(args, ddp, corpus, student.model)
    freeze_unused(student, tokens)
    if args.compile:
        student.embed = torch.compile(student.embed_group, dynamic=True)
    log0(f"student: {sum(p.numel() for p in student.parameters() if p.requires_grad) / 1e6:.2f} M trained parameters, {student.dtype}, max length {student.model.max_seq_length}")
    task = Task(args, ddp, corpus, tokens, vectors, mine_negatives(args, ddp, corpus, vectors), student, log, evaluate_teacher(ddp, corpus, vectors), {}, [])
    log0(f"teacher held-out: {show_metrics(task.teacher, {})}")
    if state:
        task.untrained, task.history = state["untrained"], state["history"]
    else:
        task.untrained = evaluate(args, ddp, student, corpus, tokens, vectors)
        log0(f"untrained student held-out: {show_metrics(task.untrained, task.teacher)}")
        log.write({"step": 0, "epoch": 0, "phase": 0, **task.untrained})
    return task


def main(args: argparse.Namespace) -> int:
    """Both phases, from where --output_dir stands; returns the exit status."""
    ddp = setup_ddp(args)
    state = open_run(args, ddp, SAME)
    last = 1 if args.skip_phase2 else 2
    finished = state is not None and state["done"] and state["phase"]["number"] >= last
    if finished and not args.save_to_artifacts:
        log0(f"the run in {args.output_dir} is finished ({state['step']} steps, best {state['phase']['best']['name']} {state['phase']['best']['value']:.4f}): nothing to do; --fresh starts anew")
        return 0
    total, micro_steps = resolve_batch(args, ddp.world_size, state["global_batch"] if state else None)
    task = build_task(args, ddp, state)
    phase = Phase(**state["phase"]) if state else None
    for number in (1, 2):
        if getattr(args, f"skip_phase{number}") or finished or (phase and (phase.number, bool(state and state["done"])) >= (number, True)):
            continue
        mine = state if state and phase.number == number else None
        if mine is None:
            phase = Phase(number, first=phase.first + phase.step if phase else 0)
            if number == 2:
                start_weights(task, number)
        reason = train(task, phase, mine, total, micro_steps)
        if reason:
            task.log.close("stopped", steps=phase.first + phase.step, reason=reason)
            return stop_status(reason)
    return finish(task, phase)


def finish(task: Task, phase: Phase) -> int:
    """Table, artifact, summary of a complete run. (all ranks)"""
    args, best = task.args, phase.best
    unwrap(task.student).load_state_dict(load_checkpoint(Path(args.output_dir) / f"phase{phase.number}_best.pt")["model"])
    final_table(task, best)
    artifacts = on_rank0(task.ddp, save_artifacts, task, best) if args.save_to_artifacts else []
    steps = phase.first + phase.step
    baselines = {"teacher": task.teacher[best["name"]], "untrained student": task.untrained[best["name"]]}
    task.log.close(
        "finished", steps=steps, epochs=phase.epoch, final_loss=task.log.final_loss, samples_per_s=task.log.samples_per_s,
        best_metric={k: best[k] for k in ("name", "value", "step")}, baselines=baselines,
        checkpoint=str(Path(args.output_dir) / f"phase{phase.number}_best.pt"), artifacts=artifacts,
    )  # fmt: skip
    log0(f"finished: {args.output_dir}/summary.json, curves.png" + "".join(f", {a}" for a in artifacts))
    return 0


if __name__ == "__main__":
    sys.exit(launch(main, parse_args()))
