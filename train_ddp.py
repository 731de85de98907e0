"""Distil a large retrieval teacher into a small SentenceTransformer student, in two phases.

Phase 1 pulls the student's vectors of single texts to the teacher's; phase 2 trains on (query, positive,
negatives) with the contrastive InfoNCE loss and keeps the pull. The teacher sees each text once.

Run
    python train_ddp.py                                              one process: GPU, XPU or CPU
    ./run_ddp.sh 2 True --config configs/train_ddp_quickstart.yaml   two processes, no download, minutes
    torchrun --nproc_per_node=8 train_ddp.py --use_projection=False  one node
    torchrun --nproc_per_node=8 --nnodes=2 --node_rank=0 --master_addr=HOST train_ddp.py   node 1 alike

Data (--phase1_data, --phase2_data)
    ms_marco            MS MARCO v1.1 (`datasets`; the default); NAME or NAME:CONFIG of any hub data set
    pydocs              the documentation installed with Python, numpy and torch: real text, no download
    FILE.txt            phase 1: one text per line
    FILE.jsonl|.parquet query, positive (text or list), negatives (list, optional) per row
Held out, with their documents: MS MARCO's validation split; elsewhere --eval_fraction of the queries, by a
hash of the text (pydocs: of the documented object's name).

Modes
    --use_projection=True   student -> Linear-GELU-LayerNorm-Linear -> the teacher's dimensions
    --use_projection=False  MRL: no head; the target is the renormalised leading part of the teacher's vector

Logged metrics (over all ranks; in metrics.jsonl and wandb)
    loss, distance      weighted sum; weighted squared L2 + cosine distance to the teacher, per text or query
    infonce, kl         nats per query, over the documents of the whole optimizer step
    ndcg@10 mrr@10 recall@100   0 to 1: held-out queries against all held-out documents
    samples/s           texts (phase 1) or queries (phase 2) a second
    data_wait, comm     share of the time spent waiting for batches; in all-reduces that nothing hides

Files in --output_dir: latest.pt (resume), best.pt, phase1_best.pt, phase2_best.pt, metrics.jsonl, ...

Differences from the original recipe: the squared distance is summed, not averaged, over dimensions, so that
its weight means something; the negatives are those of the whole step (all ranks and micro-batches, by
gradient caching, Gao et al. 2021), not one query's own 7; the head reads a normalised vector in training
as in the saved model; best is by held-out nDCG@10, not by one rank's training loss; the warm-up is a share
of the steps that there are; the teacher gets its own prompts and code.
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
import importlib
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
from concurrent.futures import ThreadPoolExecutor
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

# ---- Constants -----------------------------------------------------------------------------------

QUERY, DOCUMENT = 0, 1
# The task string of the default teacher's model card; its documents take no prompt.
INFLY_PROMPT = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: "
COLUMNS = {  # column names that are taken for each field, in this order
    "query": ("query", "anchor", "question"),
    "positive": ("positive", "positives", "answer", "document", "passage", "text"),
    "negatives": ("negatives", "negative"),
}
LSA_DIM, LSA_FEATURES = 384, 12_000  # builtin:lsa
BERT_SIZE, BERT_VOCABULARY = "1x128", 8_000  # builtin:bert
BLOCK = 2048  # texts per file while teacher vectors are being computed
# A resumed run must have these arguments as they were.
SAME = (
    "teacher_model teacher_revision teacher_max_length teacher_dim teacher_query_prompt teacher_document_prompt "
    "student_model student_layers student_max_length student_query_prompt student_document_prompt use_projection "
    "projection_hidden phase1_data phase2_data max_samples_phase1 max_samples_phase2 eval_fraction eval_samples "
    "max_chars mine_negatives mine_margin num_negatives matryoshka_dims seed phase1_epochs phase2_epochs"
).split()

# ---- Arguments -----------------------------------------------------------------------------------

def int_list(text: str) -> list[int]:
    """'64,128,256' -> [64, 128, 256]"""
    return [int(part) for part in str(text).split(",") if part]

def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Every option, and the checks that need neither data nor devices."""
    p = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    g = p.add_argument_group("Data").add_argument
    g("--phase1_data", default="ms_marco", help="texts of phase 1")
    g("--phase2_data", default="ms_marco", help="queries, positives and negatives of phase 2")
    g("--max_samples_phase1", type=int, default=100_000, help="rows read for phase 1")
    g("--max_samples_phase2", type=int, default=500_000, help="rows read for phase 2")
    g("--eval_fraction", type=float, default=0.05, help="share of the queries held out for validation")
    g("--eval_samples", type=int, default=1000, help="validation queries at most")
    g("--max_chars", type=int, default=10_000, help="texts are cut to so many characters")
    g("--skip_bad_data", help="leave out bad rows and list them in a file", **FLAG)
    g("--verify_data", help="recompute the checksums of cached arrays", **FLAG)
    g("--cache_dir", default="./cache", help="texts, tokens and teacher vectors, shared by runs and ranks")
    g("--num_negatives", type=int, default=7, help="negatives per query; drawn anew every epoch if there are more")
    g("--mine_negatives", type=int, default=0, help="add so many hard negatives per query by the teacher's vectors")
    g("--mine_margin", type=float, default=0.05, help="a mined negative scores so much below the positive")
    g = p.add_argument_group("Model").add_argument
    g("--teacher_model", default="infly/inf-retriever-v1-pro", help="hub name, folder, or builtin:lsa[:DIM]")
    g("--teacher_revision", help="revision of a hub teacher")
    g("--teacher_max_length", type=int, help="tokens [default: the teacher's own]")
    g("--teacher_dim", type=int, help="use the teacher's first so many dimensions [default: all]")
    g("--teacher_batch_size", type=int, default=64, help="texts per teacher forward pass")
    g("--teacher_query_prompt", help="text before queries [default: the teacher's own]")
    g("--teacher_document_prompt", help="text before documents [default: the teacher's own]")
    g("--trust_remote_code", help="run code that comes with the models (the default teacher needs and gets it)", **FLAG)
    g("--student_model", default="sentence-transformers/all-mpnet-base-v2",
      help="hub name, folder, or builtin:bert[:LAYERSxHIDDEN]")  # fmt: skip
    g("--student_layers", type=int, help="keep so many evenly spaced layers of the student [default: all]")
    g("--student_max_length", type=int, help="tokens [default: the student's own]")
    g("--student_query_prompt", help="text before queries [default: the student's own]")
    g("--student_document_prompt", help="text before documents [default: the student's own]")
    g("--student_dropout", type=float, help="dropout of the student [default: its own]")
    g("--use_projection", type=boolean, default=True, metavar="BOOL", help="head to the teacher's size; False: MRL mode")
    g("--projection_hidden", type=int, default=1536, help="hidden size of the head")
    g = p.add_argument_group("Optimization").add_argument
    g("--batch_size", type=int, default=64, help="texts or queries per GPU and micro-batch")
    g("--phase1_epochs", type=int, default=1, help="epochs of phase 1")
    g("--phase2_epochs", type=int, default=3, help="epochs of phase 2")
    g("--max_steps", type=int, default=0, help="optimizer steps per phase at most (0 = all epochs)")
    g("--phase1_lr", type=float, default=2e-5, help="peak learning rate of phase 1")
    g("--phase2_lr", type=float, default=5e-6, help="peak learning rate of phase 2")
    g("--warmup_ratio", type=float, default=0.1, help="share of a phase's steps that warm up")
    g("--warmup_steps", type=int, help="warm-up steps instead of the ratio")
    g("--lr_schedule", default="linear", choices=("linear", "cosine", "constant"), help="after the warm-up")
    g("--weight_decay", type=float, default=0.01, help="AdamW's; none on biases, norms and embeddings")
    g("--skip_phase1", help="start from phase1_best.pt, or from the raw student", **FLAG)
    g("--phase1_checkpoint", help="what --skip_phase1 starts from [default: OUTPUT_DIR/phase1_best.pt]")
    g("--skip_phase2", help="stop after phase 1", **FLAG)
    g = p.add_argument_group("Loss").add_argument
    g("--phase1_l2_weight", type=float, default=0.4, help="weight of the squared L2 distance")
    g("--phase1_cosine_weight", type=float, default=0.6, help="weight of 1 - cosine")
    g("--infonce_weight", type=float, default=0.8, help="weight of InfoNCE")
    g("--phase2_l2_weight", type=float, default=0.2, help="weight of the squared L2 distance in phase 2")
    g("--kl_weight", type=float, default=0.0, help="weight of KL(teacher's scores || student's scores)")
    g("--temperature", type=float, default=0.02, help="of the similarities, the student's and the teacher's")
    g("--false_negative_margin", type=float, default=0.0,
      help="mask documents that the teacher scores above positive + margin (2 masks none)")  # fmt: skip
    g("--matryoshka_dims", type=int_list, default=[], metavar="D,D", help="also train these leading dimensions")
    g = p.add_argument_group("Evaluation").add_argument
    g("--eval_every", type=int, default=0, help="optimizer steps between evaluations (0 = every epoch)")
    g("--early_stop_patience", type=int, default=0, help="evaluations without gain that end a phase (0 = off)")
    g("--eval_batch_size", type=int, default=64, help="texts per evaluation batch")
    g("--save_to_artifacts", help="save the best student as a SentenceTransformer", **FLAG)
    g("--artifacts_dir", default="./artifacts", help="folder of the saved students")
    add_ddp_arguments(p, output_dir="./checkpoints", wandb_project="train_ddp")
    args = parse_arguments(p, argv)
    for name in ("batch_size", "max_samples_phase1", "max_samples_phase2", "phase1_epochs", "phase2_epochs", "temperature",
                 "eval_samples", "eval_batch_size", "teacher_batch_size", "max_chars"):  # fmt: skip
        if getattr(args, name) <= 0:
            p.error(f"--{name} {getattr(args, name)} must be above 0")
    if args.skip_phase1 and args.skip_phase2:
        p.error("--skip_phase1 and --skip_phase2 together leave nothing to train")
    if args.phase2_data.endswith(".txt") and not args.skip_phase2:
        p.error(f"--phase2_data {args.phase2_data}: phase 2 needs query and positive (.jsonl or .parquet)")
    if not 0 < args.eval_fraction < 1:
        p.error(f"--eval_fraction {args.eval_fraction} must be between 0 and 1")
    if any(d < 1 for d in args.matryoshka_dims):
        p.error(f"--matryoshka_dims {args.matryoshka_dims} must be positive")
    return args

# ---- Data ----------------------------------------------------------------------------------------

class Texts:
    """Distinct texts and their kinds (N,) uint8 (0 query, 1 document), memory-mapped."""

    def __init__(self, folder: Path):
        self.blob, self.offsets, self.kinds = (np.load(folder / f"{n}.npy", mmap_mode="r") for n in ("text", "offsets", "kinds"))

    def __len__(self) -> int:
        return len(self.kinds)

    def __getitem__(self, i: int) -> str:
        return self.blob[self.offsets[i] : self.offsets[i + 1]].tobytes().decode("utf-8")

@dataclass
class Corpus:
    """Texts and what is made of them: memory-mapped arrays of text numbers.

    phase1 (N1,); queries, positives (N2,); negatives (N2, K), -1 where there is none; eval_queries (Q,),
    eval_documents (D,); eval_pairs (P, 2): (place in eval_queries, place in eval_documents) that match."""

    texts: Texts
    key: str
    phase1: np.ndarray
    queries: np.ndarray
    positives: np.ndarray
    negatives: np.ndarray
    eval_queries: np.ndarray
    eval_documents: np.ndarray
    eval_pairs: np.ndarray

@dataclass
class Row:
    """One example as read. `group`: examples that are held out together; held_out: the data set's own split."""

    query: str
    positives: list[str]
    negatives: list[str]
    group: str
    held_out: bool | None = None

def hub_is_reachable() -> bool:
    """Whether the model hub answers in 5 seconds (the libraries' own retries take over a minute)."""
    from urllib.request import urlopen

    answers: list[bool] = []

    def ask() -> None:
        with contextlib.suppress(OSError):
            urlopen(os.environ.get("HF_ENDPOINT", "https://huggingface.co"), timeout=5).close()
            answers.append(True)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(6)  # looking a name up has no time limit of its own
    return bool(answers)

def prepare_hub(args: argparse.Namespace) -> None:
    """Without a hub, make the libraries fail at once. To be called before they are imported."""
    names = (args.teacher_model, args.student_model, args.phase1_data, args.phase2_data)
    remote = [n for n in names if not n.startswith(("builtin:", "pydocs")) and not Path(n).exists()]
    if remote and "HF_HUB_OFFLINE" not in os.environ and not hub_is_reachable():
        os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
        warn(f"the model hub cannot be reached: {', '.join(dict.fromkeys(remote))} must already be on this machine")
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
                f"({str(error)[:120]}); local alternatives: pydocs (needs no download), a .jsonl or .parquet file"
            ) from error
        for i, row in enumerate(itertools.islice(data, limit if split == "train" else 20_000)):
            if name == "ms_marco":
                passages = list(zip(row["passages"]["is_selected"], row["passages"]["passage_text"], strict=True))
                found = {chosen: [text for selected, text in passages if bool(selected) == chosen] for chosen in (True, False)}
                row = {"query": row["query"], "positive": found[True], "negatives": found[False], "held_out": split != "train"}
            if name != "ms_marco" or row["positive"]:  # a query without an answer teaches nothing
                yield f"{name} {split} row {i}", row

def read_file_rows(path: Path) -> Iterator[tuple[str, dict | Exception]]:
    """(place, record) of a .txt, .jsonl or .parquet file; a line that cannot be read comes as its error."""
    if path.suffix == ".parquet":
        import pyarrow.parquet

        batches = pyarrow.parquet.ParquetFile(path).iter_batches()
        yield from ((f"{path} row {i}", row) for i, row in enumerate((r for b in batches for r in b.to_pylist()), 1))
        return
    with open(path, "rb") as file:
        for i, line in enumerate(file, 1):
            try:
                text = line.decode("utf-8").strip()
                found = {"text": text} if path.suffix == ".txt" else json.loads(text or "null")
            except (UnicodeDecodeError, json.JSONDecodeError) as error:
                text, found = "?", error
            if text:
                yield f"{path} line {i}", found

def parse_row(place: str, found: dict | Exception, phase: int) -> Row:
    """A record as a Row. Raises ValueError with the place, what was found and what would be right."""
    want = '{"query": text, "positive": text or [texts], "negatives": [texts]}'
    if not isinstance(found, dict):
        raise ValueError(f"{place}: found {str(found)[:80]!r}, expected one JSON object like {want}")
    fields = {f: next((found[c] for c in names if c in found), None) for f, names in COLUMNS.items()}
    query, groups = fields["query"], {}
    if not (phase == 1 and query is None) and not (isinstance(query, str) and query.strip()):
        raise ValueError(f"{place}: query is {query!r} in columns {sorted(found)[:8]}, expected {want}")
    for name in ("positive", "negatives"):
        value = fields[name]
        groups[name] = [value] if isinstance(value, str) else [] if value is None else value
        if not isinstance(groups[name], list) or not all(isinstance(t, str) and t.strip() for t in groups[name]):
            raise ValueError(f"{place}: {name} is {str(value)[:80]!r}, expected a text or a list of texts, none empty")
    if not groups["positive"]:
        raise ValueError(f"{place}: no positive in columns {sorted(found)[:8]}, expected {want}")
    return Row(query or "", groups["positive"], groups["negatives"], query or groups["positive"][0], found.get("held_out"))

def read_rows(name: str, phase: int, limit: int, problems: list[str]) -> Iterator[Row]:
    """Rows of a data source (see the top of this file); bad ones are described in `problems`."""
    if name == "pydocs":
        yield from (Row(query, [document], [], group) for group, query, document in pydocs_pairs()[:limit])
        return
    is_file = Path(name).suffix in (".txt", ".jsonl", ".parquet")
    if is_file and not Path(name).is_file():
        raise ValueError(f"--phase{phase}_data {name}: no such file")
    source = itertools.islice(read_file_rows(Path(name)), limit) if is_file else read_hub_rows(name, phase, limit)
    for place, found in source:
        try:
            yield parse_row(place, found, phase)
        except ValueError as error:
            problems.append(str(error))

SKIPPED_PARTS = frozenset(  # tests, demonstrations, and what is not documentation
    "test tests testing idlelib tkinter turtledemo lib2to3 ensurepip site-packages dist-packages config __pycache__ "
    "pydoc_data antigravity.py this.py turtle.py conftest.py setup.py".split()
)
SIGNATURE = re.compile(r"\s*[\w.\\]+\([^\n]*\)(\s*->[^\n]*)?\s*(\n|$)")
SENTENCE_END = re.compile(r"(?<!e\.g\.)(?<!i\.e\.)(?<=[.!?:])\s+(?=[^a-z])|\n\s*\n")

def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """(name, docstring) in a source file: of itself, of its public classes and functions, and what it adds to
    functions written in C (numpy's add_newdoc, torch's add_docstr). Nothing is imported."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return  # sources for other versions of Python lie in the library too
    adds = "_docs" in path.name or "newdocs" in path.name
    nodes = [(path.parent.name if path.name == "__init__.py" else path.stem, tree)]
    while nodes:
        name, node = nodes.pop()
        if doc := ast.get_docstring(node, clean=False):
            yield name, doc
        if isinstance(node, (ast.Module, ast.ClassDef)):
            kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            nodes += [(n.name, n) for n in reversed(node.body) if isinstance(n, kinds) and not n.name.startswith("_")]
    for call in (n for n in (ast.walk(tree) if adds else ()) if isinstance(n, ast.Call)):
        words = [w for a in call.args for w in ast.walk(a) if isinstance(w, ast.Constant) and isinstance(w.value, str)]
        names = [a.attr for a in call.args if isinstance(a, ast.Attribute)] + [w.value for w in words if len(w.value) < 60]
        for text in [w.value for w in words if len(w.value) > 200][:1] if names else ():
            yield names[-1], text

@functools.cache
def pydocs_pairs() -> list[tuple[str, str, str]]:
    """(group, query, document) from the documentation of Python, numpy and torch as installed: a docstring's
    first sentence and its rest, in a fixed order, none twice. The group is the documented object's bare name,
    so that torch's log_softmax and torch.nn's LogSoftmax stay on one side of the split."""
    import sysconfig
    from pydoc_data.topics import topics

    roots = [Path(r) for r in (sysconfig.get_path("stdlib"), *np.__path__, *torch.__path__)]
    paths = [p for root in roots for p in sorted(root.rglob("*.py")) if not SKIPPED_PARTS & set(p.relative_to(root).parts)]
    plain = {name: re.sub(r"[*`_]{1,2}(\S[^*`]*)[*`]{1,2}", r"\1", text) for name, text in sorted(topics.items())}
    builtins_ = [(n, o.__doc__) for m in ("builtins", "math", "itertools") for n, o in vars(importlib.import_module(m)).items()]
    entries = [(f"topic {name}", part) for name, text in plain.items() for part in re.split(r"\n\s*\n", text)] + builtins_
    pairs, seen = [], set()
    gc.disable()  # syntax trees are millions of small objects; collecting them doubles the time
    for name, doc in itertools.chain(entries, *map(docstrings, paths)):
        doc = inspect.cleandoc(doc or "")
        while match := SIGNATURE.match(doc):
            doc = doc[match.end() :].lstrip("-\n ")
        if match := SENTENCE_END.search(doc):
            query, document = " ".join(doc[: match.start()].split()), " ".join(doc[match.end() :].split())
            keys = {re.sub(r"\W+", " ", text.lower()).strip() for text in (query, document)}
            if len(document) >= 80 and len(query.split()) >= 2 and not seen & keys:
                seen |= keys
                pairs.append((name.replace("_", "").lower(), query, document))
    gc.enable()
    return pairs

def is_held_out(row: Row, fraction: float) -> bool:
    """By the data set's own split, else by a hash of the row's group: the same for any order, seed and world."""
    if row.held_out is not None:
        return row.held_out
    digest = hashlib.sha256(row.group.strip().encode("utf-8")).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2.0**64

def needed_phases(args: argparse.Namespace) -> list[int]:
    """Phases whose data is read. One source for both is read whole whatever is skipped, so that a later run
    of the other phase finds the same texts and teacher vectors."""
    return [p for p in (1, 2) if args.phase1_data == args.phase2_data or not getattr(args, f"skip_phase{p}")]

def build_corpus(args: argparse.Namespace, folder: Path) -> None:
    """Read and check the data once and write the arrays of Corpus. (rank 0 only)

    Raises ValueError that lists the first 20 bad rows and their number, unless --skip_bad_data."""
    table: dict[tuple[int, str], int] = {}
    phase1, pairs, held_pairs, held_texts, problems = set(), [], set(), set(), []

    def add(kind: int, texts: list[str]) -> list[int]:
        return [table.setdefault((kind, text[: args.max_chars].strip()), len(table)) for text in texts]

    for phase in needed_phases(args):
        name, limit = getattr(args, f"phase{phase}_data"), getattr(args, f"max_samples_phase{phase}")
        for row in read_rows(name, phase, limit, problems):
            query, documents = add(QUERY, [row.query] if row.query else []), add(DOCUMENT, row.positives)
            if is_held_out(row, args.eval_fraction):
                held_pairs.update((q, d) for q in query for d in documents)
                held_texts.update(documents)
            elif phase == 1:
                phase1.update(query + documents)
            else:
                negatives = add(DOCUMENT, row.negatives)
                pairs += [(q, d, [n for n in negatives if n not in documents]) for q in query for d in documents]
    report_problems(args, problems)
    step = max(1, len(held_pairs) // args.eval_samples)
    held_pairs = sorted(held_pairs)[::step][: args.eval_samples]
    held_texts = set() if held_pairs else set(sorted(held_texts)[: args.eval_samples])
    held = {text for pair in held_pairs for text in pair} | held_texts  # also where it stands under another query
    phase1 = sorted(phase1 - held)
    pairs = [(q, d, [t for t in n if t not in held]) for q, d, n in pairs if q not in held and d not in held]
    if (not args.skip_phase1 and not phase1) or (not args.skip_phase2 and not pairs) or not held:
        raise ValueError(
            f"{len(phase1)} texts for phase 1, {len(pairs)} pairs for phase 2, {len(held)} held-out texts: nothing to "
            "train or validate on; give more data, or another --eval_fraction"
        )
    write_corpus(folder, table, phase1, pairs, held_pairs, held_texts)

def report_problems(args: argparse.Namespace, problems: list[str]) -> None:
    """Refuse bad rows, or list them in a file and go on."""
    if problems and not args.skip_bad_data:
        shown = "\n  ".join(problems[:20] + [f"... and {len(problems) - 20} more"] * (len(problems) > 20))
        raise ValueError(f"{len(problems)} bad rows (--skip_bad_data goes on without them):\n  {shown}")
    if problems:
        listing = Path(args.output_dir) / "skipped_data.txt"
        listing.write_text("\n".join(problems) + "\n", encoding="utf-8")
        warn(f"left out {len(problems)} bad rows, listed in {listing}")

def write_corpus(folder: Path, table: dict, phase1: list, pairs: list, held_pairs: list, held_texts: set) -> None:
    """The arrays of Texts and Corpus."""
    queries, documents = sorted({q for q, _ in held_pairs}), sorted({d for _, d in held_pairs} | held_texts)
    places = [(queries.index(q), documents.index(d)) for q, d in held_pairs]
    encoded = [text.encode("utf-8") for _, text in table]
    negatives = np.full((len(pairs), max((len(n) for _, _, n in pairs), default=0)), -1, np.int64)
    for row, (_, _, found) in enumerate(pairs):
        negatives[row, : len(found)] = found
    write_cache(folder, {
        "text": np.frombuffer(b"".join(encoded), np.uint8),
        "offsets": np.cumsum([0, *map(len, encoded)], dtype=np.int64),
        "kinds": np.array([kind for kind, _ in table], np.uint8),
        "phase1": np.array(phase1, np.int64),
        "queries": np.array([q for q, _, _ in pairs], np.int64),
        "positives": np.array([d for _, d, _ in pairs], np.int64),
        "negatives": negatives,
        "eval_queries": np.array(queries, np.int64),
        "eval_documents": np.array(documents, np.int64),
        "eval_pairs": np.array(places, np.int64).reshape(-1, 2),
    })  # fmt: skip

def write_cache(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    """Arrays as .npy files and, last, a manifest of their sizes and checksums. (rank 0 only)"""
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in arrays.items():
        write_array(folder / f"{name}.npy", array)
    sizes = {f"{n}.npy": [(folder / f"{n}.npy").stat().st_size, sha256_of(folder / f"{n}.npy")] for n in arrays}
    atomic_write(folder / "manifest.json", lambda file: file.write(json.dumps(sizes, indent=1).encode()))

def write_array(path: Path, array: np.ndarray) -> None:
    if not atomic_write(path, lambda file: np.save(file, array)):
        raise OSError(f"no room for {path}: free space there or give another --cache_dir")

def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()

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

def cache_folder(args: argparse.Namespace, kind: str, *key) -> Path:
    """The folder of a cached thing, named by a hash of all that went into it."""
    return Path(args.cache_dir) / f"{kind}-{hashlib.sha256(json.dumps([1, *key], default=str).encode()).hexdigest()[:16]}"

def source_key(name: str) -> list:
    """What identifies a data source: a file's path, size and time; for pydocs the installed versions."""
    if name == "pydocs":
        return [name, sys.version, np.__version__, torch.__version__]
    stat = Path(name).stat() if Path(name).is_file() else None
    return [str(Path(name).resolve()), stat.st_size, stat.st_mtime_ns] if stat else [name]

def load_data(args: argparse.Namespace, ddp: DDPContext) -> Corpus:
    """The corpus of this run, built on rank 0 if it is not cached, memory-mapped on all ranks."""
    settings = ("max_samples_phase1", "max_samples_phase2", "eval_fraction", "eval_samples", "max_chars", "skip_bad_data")
    key = [[p, source_key(getattr(args, f"phase{p}_data"))] for p in needed_phases(args)]
    folder = cache_folder(args, "corpus", key, [getattr(args, s) for s in settings])

    def build() -> None:
        if not cache_is_whole(folder, args.verify_data):
            log0(f"reading {args.phase1_data} (phase 1) and {args.phase2_data} (phase 2)")
            build_corpus(args, folder)

    on_rank0(ddp, build)
    manifest = (folder / "manifest.json").read_bytes()
    require_same(ddp, "the training data", manifest)
    names = [f.name for f in dataclasses.fields(Corpus)][2:]
    arrays = {n: np.load(folder / f"{n}.npy", mmap_mode="r") for n in names}
    log0(f"data: {len(arrays['phase1'])} texts in phase 1, {len(arrays['queries'])} queries in phase 2, held out: "
         f"{len(arrays['eval_queries'])} queries, {len(arrays['eval_documents'])} documents")  # fmt: skip
    return Corpus(Texts(folder), hashlib.sha256(manifest).hexdigest(), **arrays)

class Tokens:
    """Token ids of all texts, memory-mapped: those of text i are ids[offsets[i]:offsets[i + 1]]."""

    def __init__(self, folder: Path, pad_id: int):
        self.ids, self.offsets = (np.load(folder / f"{n}.npy", mmap_mode="r") for n in ("ids", "offsets"))
        self.lengths, self.pad_id = np.diff(self.offsets), pad_id

    def padded(self, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids, mask), each (B, L) int64, of texts `rows`, padded on the right to the longest of them."""
        column = np.arange(self.lengths[rows].max())
        mask = column[None, :] < self.lengths[rows][:, None]
        ids = self.ids[np.minimum(self.offsets[rows][:, None] + column, len(self.ids) - 1)]
        return torch.from_numpy(np.where(mask, ids, self.pad_id).astype(np.int64)), torch.from_numpy(mask.astype(np.int64))

    def groups(self, rows: np.ndarray, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """`rows` cut into groups of similar length: (places in rows, ids, mask) on the device. A group ends where
        the next text is 15 % shorter than its longest, but not before 16 texts (64 on an accelerator)."""
        smallest = 16 if device.type == "cpu" else 64
        order = np.argsort(-self.lengths[rows], kind="stable")
        lengths, cuts = self.lengths[rows][order], [0]
        for i in range(smallest, len(order) - smallest // 2):
            if i - cuts[-1] >= smallest and lengths[i] < 0.85 * lengths[cuts[-1]]:
                cuts.append(i)
        parts = [(torch.from_numpy(part), *self.padded(rows[part])) for part in np.split(order, cuts[1:])]
        pin = device.type == "cuda"  # copies from pinned memory do not stop the host
        return [tuple((t.pin_memory() if pin else t).to(device, non_blocking=True) for t in part) for part in parts]

def load_tokens(args: argparse.Namespace, ddp: DDPContext, corpus: Corpus, student) -> Tokens:
    """Tokenise every text once with the student's tokenizer and prompts. (all ranks; cached)"""
    tokenizer, prompts, texts = student.tokenizer, list(student.prompts.values()), corpus.texts
    definition = re.sub(r'"(truncation|padding)":\s*(\{[^}]*\}|null),?', "", tokenizer.backend_tokenizer.to_str())
    folder = cache_folder(args, "tokens", corpus.key, prompts, student.max_seq_length, definition)

    def build() -> None:
        if cache_is_whole(folder, args.verify_data):
            return
        pieces: list[np.ndarray] = []
        for low in tqdm(range(0, len(texts), 1024), "tokenise", disable=not sys.stderr.isatty()):
            batch = [prompts[texts.kinds[i]] + texts[i] for i in range(low, min(low + 1024, len(texts)))]
            ids = tokenizer(batch, truncation=True, max_length=student.max_seq_length)["input_ids"]
            pieces += [np.array(i, np.int32) for i in ids]
        write_cache(folder, {"ids": np.concatenate(pieces), "offsets": np.cumsum([0, *map(len, pieces)], dtype=np.int64)})

    on_rank0(ddp, build)
    return Tokens(folder, tokenizer.pad_token_id or 0)

def model_key(name: str) -> list:
    """What identifies a model folder: names, sizes and both ends of its files. A hub name is itself."""
    key: list = [] if Path(name).is_dir() else [name]
    for path in sorted(p for p in Path(name).rglob("*") if p.is_file() and p.suffix != ".md"):
        with open(path, "rb") as file:
            ends = hashlib.sha256(file.read(1 << 20))
            file.seek(max(0, path.stat().st_size - (1 << 20)))
            ends.update(file.read())
        key.append([str(path.relative_to(name)), path.stat().st_size, ends.hexdigest()])
    return key

def teacher_key(args: argparse.Namespace, corpus: Corpus, name: str) -> list:
    settings = ("teacher_revision", "teacher_max_length", "teacher_dim", "teacher_query_prompt", "teacher_document_prompt")
    return [model_key(name), [getattr(args, s) for s in settings], corpus.key]

def teacher_vectors(args: argparse.Namespace, ddp: DDPContext, corpus: Corpus, name: str) -> np.ndarray:
    """The teacher's unit vectors (N, D) float16 of all texts, memory-mapped. (all ranks)

    Computed once: blocks of the length-sorted texts are dealt to the ranks and written one by one, so that a
    killed run goes on where it was; a complete cache is used without loading the teacher."""
    folder = cache_folder(args, "teacher", teacher_key(args, corpus, name))
    whole = on_rank0(ddp, cache_is_whole, folder, args.verify_data)
    if not whole:
        order = np.argsort(-np.diff(corpus.texts.offsets), kind="stable")  # longest first: out of memory at once
        encode_blocks(args, ddp, corpus.texts, order, name, folder)

        def join() -> None:
            files = [folder / f"block-{b:06d}.npy" for b in range(-(-len(order) // BLOCK))]
            blocks = [np.load(file) for file in files]
            vectors = np.empty((len(order), blocks[0].shape[1]), np.float16)
            vectors[order] = np.concatenate(blocks)
            write_cache(folder, {"vectors": vectors})
            for file in files:
                file.unlink()

        on_rank0(ddp, join)
    vectors = np.load(folder / "vectors.npy", mmap_mode="r")
    log0(f"teacher vectors: {len(vectors)} x {vectors.shape[1]}" + (", cached: no teacher forward pass" if whole else ""))
    return vectors

def encode_blocks(args: argparse.Namespace, ddp: DDPContext, texts: Texts, order: np.ndarray, name: str, folder: Path) -> None:
    """This rank's share of the blocks that are not on disk yet. (all ranks)"""

    def missing() -> list[int]:
        folder.mkdir(parents=True, exist_ok=True)
        return [b for b in range(-(-len(order) // BLOCK)) if not (folder / f"block-{b:06d}.npy").exists()]

    todo = on_rank0(ddp, missing)
    teacher = load_teacher(args, name, ddp.device)
    prompts = list(teacher.prompts.values())
    log0(f"encoding {len(order)} texts with {args.teacher_model}: {len(todo)} blocks of {BLOCK}, prompts {prompts}")
    for block in tqdm(todo[ddp.rank :: ddp.world_size], "teacher", disable=ddp.rank > 0 or not sys.stderr.isatty()):
        rows = order[block * BLOCK : (block + 1) * BLOCK]
        batch = [prompts[texts.kinds[i]] + texts[i] for i in rows]
        options = {"batch_size": args.teacher_batch_size, "convert_to_tensor": True, "show_progress_bar": False}
        vectors = F.normalize(teacher.encode(batch, **options).float()[:, : args.teacher_dim], dim=-1)
        if not torch.isfinite(vectors).all():
            raise ValueError(f"{args.teacher_model} gives non-finite vectors for text {batch[0][:80]!r} or its neighbours")
        write_array(folder / f"block-{block:06d}.npy", vectors.cpu().numpy().astype(np.float16))
        StepGuard.beat = time.monotonic()
        if StepGuard.signal:  # the blocks written so far are the checkpoint
            sys.exit(stop_status(signal.Signals(StepGuard.signal).name))
    barrier(ddp)

def mine_negatives(args: argparse.Namespace, ddp: DDPContext, corpus: Corpus, vectors: np.ndarray, name: str) -> np.ndarray:
    """Negatives (N2, K + mined): after those of the data, the teacher's best documents for each training query
    that score at least --mine_margin below its positive. (all ranks; cached)"""
    if not args.mine_negatives or args.skip_phase2:
        return corpus.negatives
    folder = cache_folder(args, "mined", teacher_key(args, corpus, name), args.mine_negatives, args.mine_margin)
    if not on_rank0(ddp, cache_is_whole, folder, args.verify_data):
        pool = np.unique(np.concatenate([corpus.positives, corpus.negatives[corpus.negatives >= 0]]))
        documents = torch.from_numpy(vectors[pool]).to(ddp.device).float()
        mined = torch.zeros(len(corpus.queries), args.mine_negatives, dtype=torch.int64, device=ddp.device)
        for low in range(ddp.rank * 256, len(mined), ddp.world_size * 256):
            part = slice(low, low + 256)
            query, positive = (torch.from_numpy(vectors[a[part]]).to(ddp.device).float() for a in (corpus.queries, corpus.positives))
            scores = query @ documents.T
            scores[scores > (query * positive).sum(1, keepdim=True) - args.mine_margin] = -math.inf
            best, places = scores.topk(min(args.mine_negatives, len(pool)))
            found = torch.from_numpy(pool).to(ddp.device)[places] + 1  # 0: none
            mined[part, : found.shape[1]] = found.masked_fill(best == -math.inf, 0)
            StepGuard.beat = time.monotonic()
        if ddp.world_size > 1:
            dist.all_reduce(mined)
        on_rank0(ddp, write_cache, folder, {"mined": mined.cpu().numpy() - 1})
    mined = np.load(folder / "mined.npy")
    log0(f"mined {(mined >= 0).sum(1).mean():.1f} hard negatives per query (margin {args.mine_margin})")
    return np.concatenate([corpus.negatives, mined], axis=1)

def draw_negatives(negatives: np.ndarray, items: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
    """`count` of each item's negatives (B, count), -1 where there are fewer, drawn by (seed, epoch, item)."""
    rows = negatives[items]
    if rows.shape[1] > count:
        keys = keyed_uniform(seed, epoch, torch.from_numpy(items), rows.shape[1]).numpy() + 2.0 * (rows < 0)
        rows = np.take_along_axis(rows, np.argsort(keys, axis=1, kind="stable")[:, :count], axis=1)
    return rows

def bucket_by_length(lengths: np.ndarray, global_batch: int, seed: int) -> Callable:
    """A `cut` for GlobalBatchSampler: a window's items sorted by length and cut into batches, the batches
    shuffled. All ranks get the same length in the same step, so that none waits for an unlucky one."""

    def cut(ids: np.ndarray, epoch: int) -> np.ndarray:
        batches = ids[np.argsort(lengths[ids], kind="stable")].reshape(-1, global_batch)
        return batches[np.random.default_rng([seed, epoch, int(ids[0])]).permutation(len(batches))]

    return cut

def prefetch(items: Iterable, device: torch.device) -> Iterator:
    """`items`, made one ahead in a thread so that an accelerator never waits for them; inline on a CPU."""
    if device.type == "cpu":
        yield from items
        return
    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(next, iterator := iter(items), None)
        while (item := ahead.result()) is not None:
            ahead = pool.submit(next, iterator, None)
            yield item

# ---- Model ---------------------------------------------------------------------------------------

def build_lsa_teacher(texts: list[str], dim: int):
    """Latent semantic analysis (Deerwester et al. 1990) as a SentenceTransformer of stock modules.

    TF-IDF and truncated SVD of `texts` by scikit-learn. Both are linear and the last normalisation removes every
    scale, so a text's unit vector is the normalised mean over its words of idf * SVD row: a StaticEmbedding and a
    Normalize. Leading dimensions are the strongest, so slices make sense."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

    word = r"[^\W\d_]+|\d+"  # runs of letters or of digits: array_split and arraySplit2 fall apart
    vectorizer = TfidfVectorizer(token_pattern=word, max_features=LSA_FEATURES, dtype=np.float32).fit(texts)
    vectorizer.idf_ = vectorizer.idf_**1.5  # rare words count more: better on documentation than plain idf
    svd = TruncatedSVD(dim, n_iter=3, random_state=0).fit(vectorizer.transform(texts))
    words = ["[UNK]", *vectorizer.get_feature_names_out().tolist()]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(word), behavior="removed", invert=True)
    weights = np.zeros((len(words), dim), np.float32)  # unknown words count for nothing
    weights[1:] = svd.components_.T * vectorizer.idf_[:, None]
    return SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_weights=weights), Normalize()], device="cpu")

def fit_wordpiece(texts: list[str]):
    """A lower-casing WordPiece tokenizer in BERT's format: the most frequent words of `texts` whole, all others by
    their letters. Unlike the library's trainer it gives the same vocabulary every time."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    normalizer, splitter = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    words = collections.Counter(w for t in texts for w, _ in splitter.pre_tokenize_str(normalizer.normalize_str(t)))
    letters = collections.Counter(itertools.chain.from_iterable(words.elements()))
    letters = sorted(sorted(letters, key=lambda c: (-letters[c], c))[:200])
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{c}" for c in letters)]
    pieces += sorted(words.keys() - set(pieces), key=lambda w: (-words[w], w))[: BERT_VOCABULARY - len(pieces)]
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, splitter
    tokenizer.add_special_tokens(pieces[:5])
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return tokenizer

def build_bert_student(texts: list[str], folder: Path, size: str, max_length: int, seed: int):
    """A randomly initialised BERT without dropout, mean pooling, and a tokenizer trained on `texts`."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertConfig, BertModel, BertTokenizerFast

    (layers, hidden), tokenizer = map(int, size.split("x")), fit_wordpiece(texts)
    config = BertConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=hidden, num_hidden_layers=layers, intermediate_size=2 * hidden,
        num_attention_heads=max(1, hidden // 32), max_position_embeddings=max_length, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        BertModel(config).save_pretrained(folder)
    BertTokenizerFast(tokenizer_object=tokenizer, model_max_length=max_length).save_pretrained(folder)
    return SentenceTransformer(modules=[Transformer(str(folder), max_seq_length=max_length), Pooling(hidden)], device="cpu")

def builtin_model(args: argparse.Namespace, ddp: DDPContext, corpus: Corpus, name: str) -> str:
    """The folder of a builtin:lsa or builtin:bert model fitted on the training texts; other names as they are."""
    kind, _, size = name.removeprefix("builtin:").partition(":")
    if not name.startswith("builtin:"):
        return name
    if not re.fullmatch({"lsa": r"\d*", "bert": r"(\d+x\d+)?"}.get(kind, "-"), size):
        raise ValueError(f"{name!r}: the builtin models are builtin:lsa[:DIM] and builtin:bert[:LAYERSxHIDDEN]")
    length = args.student_max_length or 64
    folder = cache_folder(args, f"builtin-{kind}", corpus.key, size, LSA_DIM, BERT_SIZE, (args.seed, length) if kind == "bert" else 0)
    texts, temporary = corpus.texts, folder.with_name(folder.name + ".tmp")

    def build() -> None:
        if folder.exists():
            return
        log0(f"fitting {name} on the training texts")
        shutil.rmtree(temporary, ignore_errors=True)
        if kind == "lsa":  # a query and its document as one text: words that meet across the two share directions
            joined = [f"{texts[q]}\n{texts[d]}" for q, d in zip(corpus.queries, corpus.positives, strict=True)]
            model = build_lsa_teacher(joined or [texts[i] for i in corpus.phase1], int(size or LSA_DIM))
        else:
            rows = np.unique(np.concatenate([corpus.phase1, corpus.queries, corpus.positives]))
            model = build_bert_student([texts[i] for i in rows], temporary / "bert", size or BERT_SIZE, length, args.seed)
        model.save(str(temporary), create_model_card=False)
        temporary.rename(folder)

    on_rank0(ddp, build)
    return str(folder)

def load_model(name: str, what: str, **options):
    """SentenceTransformer(name) on the CPU, or a ValueError that says what is missing and what needs no hub."""
    import transformers
    from sentence_transformers import SentenceTransformer

    transformers.logging.set_verbosity_error()  # its loading reports and bars, on every rank
    transformers.logging.disable_progress_bar()
    try:
        return SentenceTransformer(name, device="cpu", **options)
    except (OSError, ValueError) as error:
        local = "builtin:lsa" if what == "teacher" else "builtin:bert"
        raise ValueError(
            f"--{what}_model {name}: not a model folder, not on this machine and not fetched from the hub "
            f"({str(error).splitlines()[0][:160]}); give a local folder, or {local}, which needs no download"
        ) from error

def set_prompts(model, query: str | None, document: str | None, default_query: str = "") -> None:
    """Texts before queries and documents: as given, else the model's own, else none."""
    own = model.prompts or {}
    query = own.get("query") or default_query if query is None else query
    model.prompts = {"query": query, "document": own.get("document") or "" if document is None else document}

def load_teacher(args: argparse.Namespace, name: str, device: torch.device):
    """The teacher on `device`, in bfloat16 on accelerators (the default one is unstable in fp16)."""
    options = {"model_kwargs": {"dtype": torch.bfloat16}} if device.type != "cpu" else {}
    infly = name.startswith("infly/")  # its own code, without which it is a different, causal model
    if infly:
        options["config_kwargs"] = {"use_cache": False}
    trust = args.trust_remote_code or infly
    teacher = load_model(name, "teacher", revision=args.teacher_revision, trust_remote_code=trust, **options)
    set_prompts(teacher, args.teacher_query_prompt, args.teacher_document_prompt, INFLY_PROMPT if infly else "")
    if args.teacher_max_length:
        teacher.max_seq_length = args.teacher_max_length
    if (args.teacher_dim or 0) > teacher.get_embedding_dimension():
        raise ValueError(f"--teacher_dim {args.teacher_dim}: {name} has {teacher.get_embedding_dimension()} dimensions")
    return teacher.to(device).eval()

def keep_layers(student, count: int) -> None:
    """Keep `count` evenly spaced layers of the transformer, first and last included (layer reduction)."""
    network, depth = student[0].model, student[0].model.config.num_hidden_layers
    stacks = [(m, n) for m in network.modules() for n, c in m.named_children()
              if isinstance(c, torch.nn.ModuleList) and len(c) == depth]  # fmt: skip
    if not stacks or not 1 <= count <= depth:
        raise ValueError(f"--student_layers {count}: the student has {depth} layers in {len(stacks)} stacks")
    kept = [int(i * (depth - 1) / max(1, count - 1) + 0.5) for i in range(count)]
    for parent, name in stacks:
        setattr(parent, name, torch.nn.ModuleList(getattr(parent, name)[i] for i in kept))
    network.config.num_hidden_layers = count
    log0(f"student keeps layers {kept} of {depth}")

def load_student(args: argparse.Namespace, name: str):
    """The student as a SentenceTransformer that ends in Normalize, without a head."""
    from sentence_transformers.sentence_transformer.modules import Normalize

    dropout = args.student_dropout
    config = {} if dropout is None else {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    options = {"config_kwargs": config, "model_kwargs": {"dtype": torch.float32}}
    student = load_model(name, "student", trust_remote_code=args.trust_remote_code, **options)
    if not hasattr(student[0], "model") or not hasattr(student.tokenizer, "backend_tokenizer"):
        raise ValueError(f"--student_model {name}: its first module is {type(student[0]).__name__}, not a transformer "
                         "with a fast tokenizer")  # fmt: skip
    if args.student_layers:
        keep_layers(student, args.student_layers)
    student.max_seq_length = args.student_max_length or student.max_seq_length
    if student.max_seq_length is None:
        raise ValueError(f"--student_model {name} states no maximum length: give --student_max_length")
    set_prompts(student, args.student_query_prompt, args.student_document_prompt)
    if any(student.prompts.values()) and not getattr(student[1], "include_prompt", True):
        raise ValueError(f"--student_model {name} leaves prompts out of its pooling, which training does not: give "
                         "--student_query_prompt= --student_document_prompt=")  # fmt: skip
    if not isinstance(student[-1], Normalize):
        student.append(Normalize())
    return student

class Student(torch.nn.Module):
    """A SentenceTransformer as one forward pass over groups of texts of similar length."""

    def __init__(self, model, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.model, self.dtype, self.device_type, self.embed = model, dtype, device.type, self.embed_group

    def embed_group(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """ids, mask (B, L) int64 -> unit vectors (B, D) float32. Pooling and head run in float32."""
        with torch.autocast(self.device_type, self.dtype, enabled=self.dtype != torch.float32):
            features = self.model[0]({"input_ids": ids, "attention_mask": mask})
        features["token_embeddings"] = features["token_embeddings"].float()
        for module in list(self.model)[1:]:  # a slice of it would be a new SentenceTransformer
            features = module(features)
        return features["sentence_embedding"]

    def forward(self, groups: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """Groups of (places, ids, mask) -> (B, D), in the order of the texts before grouping."""
        vectors = torch.cat([self.embed(ids, mask) for _, ids, mask in groups])
        return torch.empty_like(vectors).index_copy(0, torch.cat([places for places, _, _ in groups]), vectors)

def build_student(args: argparse.Namespace, ddp: DDPContext, name: str, teacher_dim: int) -> Student:
    """The student with its head (in MRL mode without), initialised from --seed, on the device.

    The head is Linear-GELU-LayerNorm-Linear-Normalize: the original's order, norm before GELU, cannot be said
    in stock modules, and a class of our own would not load elsewhere."""
    from sentence_transformers.sentence_transformer.modules import Dense, LayerNorm, Normalize

    seed_everything(args.seed)
    model, hidden = load_student(args, name), args.projection_hidden
    width = model.get_embedding_dimension()
    if args.use_projection:
        head = [Dense(width, hidden, activation_function=torch.nn.GELU()), LayerNorm(hidden)]
        head += [Dense(hidden, teacher_dim, activation_function=torch.nn.Identity()), Normalize()]
        for module in head:
            model.append(module)
        log0(f"projection mode: student {width} -> {hidden} -> teacher {teacher_dim} dimensions")
    elif teacher_dim < width:
        raise ValueError(f"--use_projection=False needs a teacher with at least the student's {width} dimensions, "
                         f"it has {teacher_dim}")  # fmt: skip
    else:
        log0(f"MRL mode, no projection: the target is the renormalised first {width} of {teacher_dim} teacher dimensions")
    width = model.get_embedding_dimension()
    if any(d > width for d in args.matryoshka_dims):
        raise ValueError(f"--matryoshka_dims {args.matryoshka_dims}: the student's vector has {width} dimensions")
    return Student(model.to(ddp.device), resolve_precision(args.precision, ddp.device), ddp.device)

def freeze_unused(student: Student, tokens: Tokens, device: torch.device) -> None:
    """Drop the pooler and freeze what else gets no gradient, so that DDP need not look for it in every step."""
    ids, mask = tokens.padded(np.arange(min(2, len(tokens.lengths))))
    with torch.random.fork_rng():
        student.embed(ids.to(device), mask.to(device)).sum().backward()
    unused = [name for name, p in student.named_parameters() if p.grad is None]
    if any(".pooler." in name for name in unused):
        student.model[0].model.pooler = None  # sentence-transformers pools the last layer's tokens itself
    for name, parameter in student.named_parameters():
        parameter.requires_grad_(name not in unused)
    student.zero_grad(set_to_none=True)
    if unused:
        log0(f"not trained, since they get no gradient: {', '.join(unused)}")

# ---- Loss ----------------------------------------------------------------------------------------

def distance_loss(student: torch.Tensor, target: torch.Tensor, l2_weight: float, cosine_weight: float) -> torch.Tensor:
    """l2_weight * |s - t|^2 + cosine_weight * (1 - cos(s, t)); s, t (B, D) of unit length -> (B,).

    The squared distance is summed over dimensions: it is 2 (1 - cos) whatever D is."""
    cosine = (student * target).sum(-1)
    return l2_weight * (student - target).square().sum(-1) + cosine_weight * (1 - cosine)

def infonce_loss(query: torch.Tensor, documents: torch.Tensor, labels: torch.Tensor, masked: torch.Tensor,
                 temperature: float) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """-log softmax(q . d / T) at each query's positive (van den Oord et al. 2018), in float32.

    query (B, D), documents (M, D), labels (B,) columns of the positives, masked (B, M) columns left out ->
    losses (B,), logits (B, M)."""
    logits = (query.float() @ documents.float().T / temperature).masked_fill(masked, -math.inf)
    return F.cross_entropy(logits, labels, reduction="none"), logits

def kl_loss(logits: torch.Tensor, teacher_logits: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
    """KL(softmax(teacher_logits) || softmax(logits)) over the columns that are not masked; (B, M) -> (B,)."""
    target = F.log_softmax(teacher_logits.masked_fill(masked, -math.inf), dim=-1)
    return (target.exp() * (target - F.log_softmax(logits, dim=-1))).masked_fill(masked, 0.0).sum(-1)

def false_negatives(ids: torch.Tensor, labels: torch.Tensor, teacher_scores: torch.Tensor, margin: float) -> torch.Tensor:
    """Columns that must not count as negatives (B, M): absent (id -1), the positive's text again, or scored by
    the teacher above the positive + margin (Solatorio 2024). ids (M,), labels (B,), teacher_scores (B, M)."""
    above = teacher_scores > teacher_scores.gather(1, labels[:, None]) + margin
    masked = above | (ids == -1) | (ids == ids[labels][:, None])
    return masked.scatter(1, labels[:, None], False)

class GatherRows(torch.autograd.Function):
    """All ranks' rows (W * B, ...) in rank order; the gradient flows back to every rank's own rows."""

    @staticmethod
    def forward(ctx, rows: torch.Tensor) -> torch.Tensor:
        ctx.size, gathered = len(rows), rows.new_empty(dist.get_world_size() * len(rows), *rows.shape[1:])
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
        gather(gathered, rows.contiguous())
        return gathered

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient[dist.get_rank() * ctx.size :][: ctx.size]

def gather_rows(rows: torch.Tensor, most: int, world_size: int) -> torch.Tensor:
    """Rows of all ranks (W * most, ...), each rank's padded with zeros to `most`; differentiable. (all ranks)"""
    rows = F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, most - len(rows)))
    return GatherRows.apply(rows) if world_size > 1 else rows

# ===== shared DDP block: begin (identical in every script; tests/test_shared_block.py) =====
LAUNCHERS = {  # launcher: its variables for rank, world size, local rank, local world size
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "Open MPI": tuple(f"OMPI_COMM_WORLD_{n}" for n in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
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
        self.error(f"unknown option {key!r}; " + (f"the nearest known one is {near[0]!r}" if near else "see --help"))

def boolean(text: str) -> bool:
    """True, yes, on, 1 or False, no, off, 0, in any case (argparse's type=bool takes 'False' for True)."""
    if str(text).lower() not in ("true", "yes", "on", "1", "false", "no", "off", "0"):
        raise argparse.ArgumentTypeError(f"{text!r} is not one of True, False, yes, no, 1, 0")
    return str(text).lower() in ("true", "yes", "on", "1")

FLAG = {"type": boolean, "nargs": "?", "const": True, "default": False, "metavar": "BOOL"}  # --name or --name=False

def add_ddp_arguments(parser: ArgumentParser, output_dir: str, wandb_project: str) -> None:
    """The options that every script has: batch and step, checkpoints, logging, runtime."""
    g = parser.add_argument_group("Step").add_argument
    g("--global_batch_size", type=int, help="samples per optimizer step; then the number of GPUs changes the speed only")
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
    """A command line with `key=value` and `--key-with-hyphens` brought to argparse's `--key=value`."""
    options, tokens, wants_value = {o: a for a in parser._actions for o in a.option_strings}, [], False
    for token in argv:
        key, equals, value = token.partition("=")
        if token.startswith("--") or (equals and not wants_value and re.fullmatch(r"[A-Za-z_][\w.]*", key)):
            key = "--" + key.removeprefix("--").replace("-", "_")
            if key not in options:
                parser.unknown(key[2:])
            wants_value = not equals and options[key].nargs not in (0, "?")
            tokens.append(key + equals + value)
        else:
            tokens, wants_value = [*tokens, token], False
    return tokens

def read_config(parser: ArgumentParser, path: str) -> list[str]:
    """A YAML or JSON file of (nested) keys as command-line tokens; unknown keys are errors."""
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
        tree = json.loads(text) if path.endswith(".json") else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        parser.error(" ".join(str(error).split()))
    if not isinstance(tree, dict):
        parser.error(f"holds {type(tree).__name__}, not a mapping of option names to values")
    groups = {(g.title or "").lower(): {o for a in g._group_actions for o in a.option_strings} for g in parser._action_groups}
    options, tokens = {o for a in parser._actions for o in a.option_strings}, []

    def walk(node: dict, prefix: str, inside: set[str]) -> None:
        for key, value in node.items():
            # training.batch_size, or batch_size in a section that is named like its group in --help
            name = f"--{key}" if f"--{key}" in inside else f"--{prefix}{key}"
            if name in options and value is not None:
                value = ",".join(map(str, value)) if isinstance(value, list) else value
                tokens.append(f"{name}={json.dumps(value) if isinstance(value, dict) else value}")
            elif name not in options and isinstance(value, dict):
                walk(value, f"{prefix}{key}.", groups.get(str(key).lower(), set()))
            elif name not in options:
                parser.unknown(f"{prefix}{key}")

    walk(tree, "", set())
    return tokens

def parse_arguments(parser: ArgumentParser, argv: list[str] | None = None) -> argparse.Namespace:
    """The command line over a --config file over the defaults. `args.given`: names of what the user set."""
    tokens, args, file_tokens = split_tokens(parser, sys.argv[1:] if argv is None else argv), argparse.Namespace(), []
    configs = [t.partition("=")[2] for t in tokens if t.startswith("--config=")]
    configs += [b for a, b in itertools.pairwise(tokens) if a == "--config"]
    required = [a for a in parser._actions if a.required]
    if configs:
        parser.source = f"{configs[-1]}: "
        file_tokens = read_config(parser, configs[-1])
        for action in required:  # the command line may still bring them
            action.required = False
        parser.parse_args(file_tokens, args)
        parser.source = ""
    for action in required:
        action.required = getattr(args, action.dest, None) is None
    parser.parse_args(tokens, args)
    dests = {o: a.dest for a in parser._actions for o in a.option_strings}
    args.given = sorted({dests[n] for t in [*file_tokens, *tokens] if (n := t.partition("=")[0]) in dests})
    for name in ("accumulation", "save_every", "log_every", "keep_checkpoints", "max_bad_steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)} must be at least 1")
    if args.global_batch_size is not None and (args.global_batch_size < 1 or "accumulation" in args.given):
        parser.error(f"--global_batch_size {args.global_batch_size} must be above 0 and sets --accumulation itself")
    args.changed = {n: getattr(args, n) for n in args.given if getattr(args, n) != parser.get_default(n)}
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

def find_ranks(env: dict[str, str], places: int) -> tuple[int, int, int, int, str]:
    """(rank, world size, local rank, local world size, launcher) from the launcher's variables; `places`:
    processes that this node can take. Raises ValueError for a rank without a world size."""

    def number(name: str) -> int | None:
        if env.get(name) and not env[name].isdigit():
            raise ValueError(f"{name}={env[name]!r} is not a number")
        return int(env[name]) if env.get(name) else None

    for launcher, names in LAUNCHERS.items():
        rank, world, local, local_world = (number(n) for n in names)
        if rank is None:
            continue
        if launcher == "PALS" and world is None:
            world = number("PMI_SIZE")
            if world is None and importlib.util.find_spec("mpi4py"):
                from mpi4py import MPI

                world = MPI.COMM_WORLD.Get_size()
        if launcher == "Hydra" and local is None:  # srun --mpi=pmi2 sets PMI_RANK alone
            local, local_world = number("SLURM_LOCALID"), number("SLURM_NTASKS_PER_NODE")
        if world is None:
            raise ValueError(f"{names[0]}={rank} is set but no world size is: export {names[1]}")
        if rank >= world:
            raise ValueError(f"{names[0]}={rank} is not below {names[1]}={world}")
        if local is None and world > places:
            raise ValueError(f"{names[2]} is not set and {world} ranks do not fit this node's {places}: export {names[2]}")
        local = rank if local is None else local
        return rank, world, local, local_world or min(world, max(places, local + 1)), launcher
    return 0, 1, 0, 1, "python"

def find_master(env: dict[str, str], world_size: int, local_world_size: int) -> tuple[str, str]:
    """(MASTER_ADDR, MASTER_PORT): as set, else the job's first host, else this one if it holds all ranks."""
    job = re.match(r"\d*", env.get("SLURM_JOB_ID") or env.get("PBS_JOBID") or "").group()
    port = env.get("MASTER_PORT") or (str(20000 + int(job) % 20000) if job else "29500")
    if env.get("MASTER_ADDR"):
        return env["MASTER_ADDR"], port
    if env.get("SLURM_JOB_NODELIST"):  # "gpu[03-05,9],login1" -> "gpu03"
        head, _, inside = env["SLURM_JOB_NODELIST"].partition("[")
        return head.split(",")[0] + ("" if "," in head else re.split(r"[-\],]", inside)[0]), port
    if env.get("PBS_NODEFILE"):
        return Path(env["PBS_NODEFILE"]).read_text().split()[0], port
    if world_size > local_world_size:
        raise ValueError(f"{world_size} ranks on several nodes and no MASTER_ADDR: export the first node's address")
    return "localhost", port

def choose_device(name: str, local_rank: int) -> torch.device:
    """The accelerator number `local_rank` (0 where the launcher shows each rank one), or the CPU."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "cpu" or (name == "auto" and (found is None or found.type not in ("cuda", "xpu"))):
        return torch.device("cpu")
    if found is None or name not in ("auto", found.type):
        raise ValueError(f"--device {name}: this machine shows {found.type if found else 'no accelerator'}")
    count = torch.accelerator.device_count()
    if 1 < count <= local_rank:
        raise ValueError(f"local rank {local_rank} has no device, {count} are visible: start at most {count} per node")
    device = torch.device(found.type, local_rank if count > 1 else 0)
    torch.accelerator.set_device_index(device.index)
    return device

def choose_backend(name: str, device: torch.device) -> str:
    """The process group's backend for `device`. Raises ValueError if `name` cannot serve it."""
    serves = {"nccl": "cuda", "xccl": "xpu", "ccl": "xpu", "xpu": "xpu"}
    if serves.get(name, device.type) != device.type:
        raise ValueError(f"--backend {name} serves {serves[name]}, the device is {device.type}: use --backend auto")
    if name == "gloo" or device.type == "cpu":
        return "gloo"
    if device.type == "cuda":
        if not dist.is_nccl_available():
            raise ValueError("this torch was built without NCCL: use --backend gloo")
        return "nccl"
    if dist.is_xccl_available():
        return "xccl"
    if importlib.util.find_spec("oneccl_bindings_for_pytorch"):
        importlib.import_module("oneccl_bindings_for_pytorch")  # registers the backend "ccl"
        return "ccl"
    warn("no xccl in this torch and no oneCCL bindings: falling back to gloo, which is slow")
    return "gloo"

def setup_ddp(args: argparse.Namespace) -> DDPContext:
    """Find this process's rank and device, start its log, signals and the process group. (all ranks)"""
    env = dict(os.environ)
    if args.local_rank is not None:
        env.setdefault("LOCAL_RANK", str(args.local_rank))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    devices = 0 if args.device == "cpu" or not torch.accelerator.is_available() else torch.accelerator.device_count()
    rank, world_size, local_rank, local_world_size, launcher = find_ranks(env, devices or max(cores, 16))
    start_logging(rank)
    device = choose_device(args.device, local_rank)
    ddp = DDPContext(rank, world_size, local_rank, local_world_size, device, choose_backend(args.backend, device), launcher)
    if "OMP_NUM_THREADS" not in env:
        torch.set_num_threads(max(1, cores // local_world_size))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, StepGuard.on_signal)
    log_all(f"Process {rank}/{world_size} started")
    if world_size > 1:
        start_group(args, env, ddp)
        log_all(f"Initialized DDP: rank={rank}, world_size={world_size}, local_rank={local_rank}")
    log_all(f"Using device: {device}")
    return ddp

def start_group(args: argparse.Namespace, env: dict[str, str], ddp: DDPContext) -> None:
    """init_process_group, with the errors that users meet put into words."""
    address, port = find_master(env, ddp.world_size, ddp.local_world_size)
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=port)  # unchanged where they were set
    seconds = 60 * args.ddp_timeout_minutes if args.ddp_timeout_minutes else float(env.get("NCCL_TIMEOUT") or 1800)
    options = {"device_id": ddp.device} if ddp.device.type != "cpu" else {}
    ranks = {"rank": ddp.rank, "world_size": ddp.world_size}
    try:
        dist.init_process_group(ddp.backend, timeout=timedelta(seconds=seconds), **ranks, **options)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" in str(error):
            advice = f"port {port} is already in use on {address}: export MASTER_PORT=<a free port>, or torchrun --standalone"
        else:
            advice = f"rank {ddp.rank} cannot reach rank 0 at {address}:{port}: check MASTER_ADDR, MASTER_PORT, the firewall"
        raise RuntimeError(advice) from error

def cleanup() -> None:
    """Destroy the process group, after all that holds a tensor or the DDP object is gone: with gloo, the
    group's threads otherwise abort the exit of a good run one time in four."""
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()

def launch(main: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Run `main(args)` as this rank, or in --nproc new processes; returns the exit status."""
    if tuple(int(p) for p in torch.__version__.split(".")[:2]) < (2, 10):
        sys.exit(f"torch {torch.__version__} is too old: these scripts need torch 2.10 or newer")
    if args.nproc > 1 and "RANK" not in os.environ:
        return start_processes(main, args)
    try:
        return record(main)(args)
    except Exception:
        LOGGER.error("failed on rank %s\n%s", os.environ.get("RANK", "0"), traceback.format_exc())
        if dist.is_initialized():  # peers may be gone: no waiting for them in destroy or at exit
            sys.stdout.flush()
            os._exit(1)
        return 1
    finally:
        cleanup()

def start_processes(main: Callable, args: argparse.Namespace) -> int:
    """Start --nproc ranks of `main` on this machine; passes signals on to them and their exit status back."""
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
    ranks = {"RANK": local_rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": args.nproc, "LOCAL_WORLD_SIZE": args.nproc}
    os.environ.update({name: str(value) for name, value in ranks.items()})
    sys.exit(launch(main, args))

def start_logging(rank: int) -> None:
    """`[RANK 0] 2025-01-15 14:23:45 INFO: text` on standard output, from this rank."""
    handler, line = logging.StreamHandler(sys.stdout), f"[RANK {rank}] %(asctime)s %(levelname)s: %(message)s"
    handler.setFormatter(logging.Formatter(line, "%Y-%m-%d %H:%M:%S"))
    LOGGER.handlers, LOGGER.propagate, LOGGER.rank = [handler], False, rank
    LOGGER.setLevel(logging.INFO)

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

def reduce_sums(ddp: DDPContext, sums: dict[str, float | torch.Tensor]) -> dict[str, float]:
    """Sums over all ranks in float64, in one collective and one host sync. (all ranks, same keys)"""
    values = [torch.as_tensor(v, dtype=torch.float64, device=ddp.device).reshape(()) for v in sums.values()]
    packed = torch.stack(values)
    if ddp.world_size > 1:
        dist.all_reduce(packed)
    return dict(zip(sums, packed.tolist(), strict=True))

def barrier(ddp: DDPContext) -> None:
    """(all ranks) By an all-reduce: dist.barrier() would choose a device of its own on NCCL."""
    reduce_sums(ddp, {"ranks": 1.0})

def on_rank0(ddp: DDPContext, function: Callable, *args):
    """`function(*args)` on rank 0. Every rank gets its result, or an error if rank 0 got one, so that no rank
    waits for one that has gone. (all ranks)"""
    outcome, error = [None, None], None
    if ddp.rank == 0:
        try:
            outcome = [function(*args), None]
        except Exception as caught:
            error, outcome = caught, [None, f"{type(caught).__name__}: {caught}"]
    if ddp.world_size > 1:
        dist.broadcast_object_list(outcome, src=0, device=ddp.device)
    if outcome[1] is not None:
        raise error or RuntimeError(f"rank 0 failed in {function.__name__}: {outcome[1]}")
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
    """The same on all ranks: initialisation, split. Noise comes from `keyed_uniform`, dropout from seed + rank."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)

def keyed_uniform(seed: int, epoch: int, ids: torch.Tensor, draws: int, stream: int = 0) -> torch.Tensor:
    """Uniform numbers in [0, 1), a function of (seed, epoch, sample id, draw) alone: the same on any number
    of ranks and any device. ids (B,) int64 -> (B, draws) float32. SplitMix64 (Steele et al. 2014)."""

    def mix(x: torch.Tensor) -> torch.Tensor:  # int64 wraps; the masks make the shifts logical
        x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
        x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
        return x ^ ((x >> 31) & 0x1FFFFFFFF)

    golden, state = -0x61C8864680B583EB, torch.zeros((), dtype=torch.int64, device=ids.device)
    for part in (seed, epoch, stream):
        state = mix(state * golden + part + 1)
    rows = mix(mix(ids.long() + state) * golden + 1)[:, None]
    draw = torch.arange(1, draws + 1, device=ids.device)[None, :] * golden
    return ((mix(rows + draw) >> 40) & 0xFFFFFF).float() / 2**24

def resolve_batch(args: argparse.Namespace, world_size: int, kept: int | None = None) -> tuple[int, int]:
    """(global batch, micro-batches per step), said in one line. `kept`: the global batch of the run that is
    resumed, which stays on any number of ranks. Raises ValueError where --global_batch_size does not divide."""
    cell = world_size * args.batch_size
    if args.global_batch_size and args.global_batch_size % cell and not kept:
        product = f"{world_size} ranks x --batch_size {args.batch_size} = {cell}"
        raise ValueError(f"--global_batch_size {args.global_batch_size} is not a multiple of {product}")
    total = kept or args.global_batch_size or cell * args.accumulation
    accumulation = -(-total // cell)
    log0(f"Batch size per GPU: {args.batch_size}, Total batch size: {total}")
    log0(f"global batch {total} = {world_size} ranks x {total / world_size / accumulation:g} x {accumulation} accumulation")
    return total, accumulation

def scaled_lr(lr: float, rule: str, world_size: int) -> float:
    """--lr_scaling of the rate to `world_size` ranks (linear: Goyal et al. 2017; sqrt: Krizhevsky 2014)."""
    factor = {"none": 1, "linear": world_size, "sqrt": world_size**0.5, "conservative": min(world_size, 6)}[rule]
    if factor != 1:
        log0(f"learning rate {lr:g} x {factor:g} ({rule} scaling, {world_size} ranks) = {lr * factor:g}")
    return lr * factor

def lr_at(step: int, total: int, warmup: int, schedule: str) -> float:
    """Factor on the learning rate at 0-based `step`: linear warm-up from above zero to the peak, then constant,
    or linear or cosine decay that would reach zero at step `total`."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, total - warmup)
    return {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 + 0.5 * math.cos(math.pi * done)}[schedule]

class GlobalBatchSampler(DistributedSampler):
    """Batches of an epoch as a function of (seed, epoch) alone, dealt to ranks and micro-batches.

    The shuffled items are cut into global batches (the n mod global_batch left over wait for another epoch);
    each is dealt round-robin to the ranks and cut into micro_steps, so every rank makes the same number of
    micro-steps on any world size. Iterating yields this rank's micro-batches (int64 ids) from global batch
    `start` on. `cut(ids, epoch)` may regroup a window of `window` batches: into as many of the same size
    (length buckets) or, with `varying`, into any number (token budgets). Memory and start-up are O(window)."""

    def __init__(self, n: int, global_batch: int, micro_steps: int, seed: int, ddp: DDPContext, window: int = 1,
                 cut: Callable | None = None, varying: bool = False):  # fmt: skip
        super().__init__(range(n), ddp.world_size, ddp.rank, shuffle=True, seed=seed, drop_last=True)
        if n < global_batch or global_batch < ddp.world_size * micro_steps:
            raise ValueError(f"{n} samples, global batch {global_batch}, {ddp.world_size} ranks x {micro_steps} "
                             "micro-batches: each must be at least the next")  # fmt: skip
        self.n, self.global_batch, self.micro_steps, self.start = n, global_batch, micro_steps, 0
        self.window, self.varying, self.cut = window, varying, cut or (lambda ids, epoch: ids.reshape(-1, global_batch))

    def __len__(self) -> int:  # micro-batches left in the epoch, where `cut` keeps the batch size
        return (self.n // self.global_batch - self.start) * self.micro_steps

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        self.epoch, self.start = epoch, start

    def permuted(self, positions: np.ndarray) -> np.ndarray:
        """Items at `positions` of the epoch's shuffle: a keyed Feistel network with cycle walking (Black and
        Rogaway 2002) instead of torch.randperm, which takes 2 s and 480 MB for 60 M items on every rank."""
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
            walk = items >= self.n
        return items.astype(np.int64)

    def batches(self, start: int = 0) -> Iterator[np.ndarray]:
        """Global batches of the epoch from number `start` on. (the same on all ranks)"""
        usable, stride = self.n // self.global_batch * self.global_batch, self.window * self.global_batch
        skipped = 0 if self.varying else start // self.window
        number = skipped * self.window
        for low in range(skipped * stride, usable, stride):
            for batch in self.cut(self.permuted(np.arange(low, min(low + stride, usable))), self.epoch):
                if number >= start:
                    yield batch
                number += 1

    def deal(self, batch: np.ndarray, rank: int | None = None) -> list[np.ndarray]:
        """The micro-batches of a rank (this one) in a global batch; neighbours of a sorted batch stay together."""
        mine = batch[self.rank if rank is None else rank :: self.num_replicas]
        ends = [len(mine) * micro // self.micro_steps for micro in range(self.micro_steps + 1)]
        return [mine[a:b] for a, b in itertools.pairwise(ends)]

    def __iter__(self) -> Iterator[np.ndarray]:
        for batch in self.batches(self.start):
            yield from self.deal(batch)

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
    # bucket views save a copy of the gradients; buffers are not broadcast: evaluation uses the unwrapped model
    return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True, broadcast_buffers=False)

def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The module itself, without DDP's and torch.compile's wrappers."""
    while isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, DistributedDataParallel) else model._orig_mod
    return model

def sync_gradients(model: torch.nn.Module, last: bool):
    """Context for a micro-batch's forward and backward: gradients are all-reduced in the last one only."""
    wrapped = getattr(model, "_orig_mod", model)
    return contextlib.nullcontext() if last or not isinstance(wrapped, DistributedDataParallel) else wrapped.no_sync()

def resolve_precision(name: str, device: torch.device) -> torch.dtype:
    """torch.float32, bfloat16 or float16 for --precision on `device`."""
    if name == "fp16" and device.type == "cpu":
        raise ValueError("--precision fp16 is many times slower than fp32 on a CPU: use bf16 or fp32")
    if name == "auto":
        has_bf16 = device.type == "xpu" or (device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8)
        name = "bf16" if has_bf16 else "fp32"
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]

class StepGuard:
    """The end of an optimizer step, and what all ranks must agree on there: non-finite numbers, signals, the
    time limit. One all-reduce of three numbers per step, read one step later so that nothing waits for it."""

    signal = 0  # of this process, set by on_signal
    beat = 0.0  # when this process last showed that it is not stuck

    def __init__(self, args: argparse.Namespace, ddp: DDPContext, optimizer: torch.optim.Optimizer, dtype: torch.dtype,
                 started: float):  # fmt: skip
        self.ddp, self.optimizer, self.max_norm = ddp, optimizer, args.max_grad_norm or math.inf
        self.scaler = torch.amp.GradScaler(ddp.device.type, enabled=dtype == torch.float16)
        self.deadline = started + 60 * args.max_minutes if args.max_minutes else math.inf
        self.max_bad, self.bad_in_row, self.bad_steps = args.max_bad_steps, 0, 0
        self.pending, self.event, self.recent = None, None, collections.deque(maxlen=args.max_bad_steps + 1)
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]

    @classmethod
    def on_signal(cls, number: int, _frame) -> None:
        """Ask for a stop at the next step. A process stuck in a collective with a dead peer never gets there:
        unless it shows life again it is ended here, before the launcher's SIGKILL."""

        def watch() -> None:
            while time.monotonic() - cls.beat < 20:
                time.sleep(0.5)
            os._exit(128 + number)

        if not cls.signal:
            cls.signal, cls.beat = number, time.monotonic()
            threading.Thread(target=watch, daemon=True).start()

    def step(self, loss: torch.Tensor, step: int, ids: list) -> tuple[torch.Tensor, str]:
        """Clip, update (skipped on the device if anything is not finite), agree. `ids`: this rank's samples.
        Returns (gradient norm, why to stop or ''). Raises RuntimeError after max_bad_steps. (all ranks)"""
        StepGuard.beat = time.monotonic()
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.max_norm, foreach=True)
        flags = torch.tensor([0.0, StepGuard.signal, StepGuard.beat > self.deadline]).to(self.ddp.device, non_blocking=True)
        flags[0] = ~(torch.isfinite(norm) & torch.isfinite(loss.detach()))
        if self.ddp.world_size > 1:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        if self.scaler.is_enabled():
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:  # fused optimizers skip the update on the device where found_inf is 1
            self.optimizer.grad_scale, self.optimizer.found_inf = None, flags[0]
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        before, event = self.pending, self.event
        self.pending = (step, ids, flags.to("cpu", non_blocking=True))
        if self.ddp.device.type != "cpu":
            self.event = torch.accelerator.current_stream().record_event()
        return norm, self.read(before, event)

    def read(self, pending: tuple | None, event) -> str:
        """What the flags of a step ask for: the same on all ranks."""
        if pending is None:
            return ""
        if event is not None:
            event.synchronize()
        step, ids, flags = pending
        bad, number, late = flags.tolist()
        self.recent.append(f"step {step}: {[int(i) for part in ids for i in part][:64]}")
        self.bad_in_row, self.bad_steps = self.bad_in_row + 1 if bad else 0, self.bad_steps + bool(bad)
        if bad and LOGGER.rank == 0:
            warn(f"non-finite loss or gradient at step {step}: the update was skipped on all ranks")
        if self.bad_in_row >= self.max_bad:
            raise RuntimeError(f"{self.bad_in_row} steps in a row with a non-finite loss or gradient; samples of this rank "
                               "in the last ones: " + "; ".join(list(self.recent)[-3:]))  # fmt: skip
        return signal.Signals(int(number)).name if number else "time limit" if late else ""

    def finish(self) -> str:
        """Read the flags of the last step."""
        before, self.pending = self.pending, None
        return self.read(before, self.event)

def stop_status(reason: str) -> int:
    """Last line and exit status of a run that stopped early, with its checkpoint written."""
    resumes = "requeue me" if reason == "SIGUSR1" else f"stopped by {reason}: the same command goes on from here"
    log0(f"checkpoint written, {resumes}")
    return {"SIGTERM": 143, "SIGINT": 130}.get(reason, 0)

def rng_states(ddp: DDPContext) -> list[dict]:
    """Random state of every rank, for a checkpoint. (all ranks)"""
    state = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if ddp.device.type != "cpu":
        state["device"] = torch.get_device_module(ddp.device).get_rng_state(ddp.device)
    states = [state] * ddp.world_size
    if ddp.world_size > 1:
        dist.all_gather_object(states, state)
    return states

def restore_rng(states: list[dict], ddp: DDPContext, seed: int) -> None:
    """This rank's random state; on another world size a new one from (seed, rank)."""
    if len(states) != ddp.world_size:
        torch.manual_seed(seed + ddp.rank)
        return
    random.setstate(states[ddp.rank]["python"])
    torch.set_rng_state(states[ddp.rank]["torch"])
    if "device" in states[ddp.rank] and ddp.device.type != "cpu":
        torch.get_device_module(ddp.device).set_rng_state(states[ddp.rank]["device"], ddp.device)

def atomic_write(path: Path, write: Callable) -> bool:
    """`write(file)` into a temporary file, fsync, rename. If that fails (disk full) the old file stays whole, a
    warning says so and False is returned. (rank 0 only)"""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch.save turns "no space left" into RuntimeError
        temporary.unlink(missing_ok=True)
        free = shutil.disk_usage(path.parent).free / 1e6
        warn(f"could not write {path} ({str(error).splitlines()[0]}; {free:.0f} MB free): the old file is untouched")
        return False
    return True

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
        os.replace(link, numbered.with_name(name))
    for old in sorted(numbered.parent.glob("step_*.pt"))[:-keep]:
        old.unlink()
    return True

def load_checkpoint(path: str | Path) -> dict:
    """A checkpoint of one GPU or many, on the CPU; `module.` and `_orig_mod.` are stripped from its model's
    names. Raises ValueError that says what is wrong with a damaged file."""
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load does not look at the checksums
            damaged = archive.testzip()
        if damaged:
            raise ValueError(f"checksum of {damaged} is wrong")
        state = torch.load(path, map_location="cpu", weights_only=True)  # noqa: TID251
    except FileNotFoundError:
        raise
    except Exception as error:
        first = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        raise ValueError(f"{path} is damaged or no checkpoint ({first})") from error
    if "model" in state:
        state["model"] = {re.sub(r"^(module\.|_orig_mod\.)+", "", k): v for k, v in state["model"].items()}
    return state

def find_checkpoint(directory: Path) -> str | None:
    """The newest whole checkpoint of a run; damaged ones are named in warnings. (rank 0 only)"""
    files = [directory / "latest.pt", *sorted(directory.glob("step_*.pt"), reverse=True)]
    files = list({path.stat().st_ino: path for path in reversed(files) if path.exists()}.values())[::-1]
    for path in files:
        try:
            load_checkpoint(path)
            return str(path)
        except ValueError as error:
            warn(f"{error}: looking for the one before it")
    if files:
        raise ValueError(f"no whole checkpoint is left in {directory}: restore one, or start anew with --fresh")
    return None

def open_run(args: argparse.Namespace, ddp: DDPContext, same: tuple[str, ...]) -> dict | None:
    """Prepare --output_dir; returns the checkpoint to resume from, or None. (all ranks) Raises ValueError if the
    run found there was made with another value of an argument in `same`."""

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
        old, new = state["args"].get(name), getattr(args, name)
        if old != new:
            raise ValueError(f"{args.output_dir} holds a run with --{name} {old!r}, this one has {new!r}: give another "
                             "--output_dir, or --fresh to move the old run aside")  # fmt: skip
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
        log0(f"torch {torch.__version__}, world size {ddp.world_size}, backend {ddp.backend}, started by {ddp.launcher}, "
             f"{torch.get_num_threads()} CPU threads per rank")  # fmt: skip
        changed = ", ".join(f"{n}={v}" for n, v in args.changed.items())
        log0(f"arguments that differ from the defaults: {changed or 'none'}")
        if ddp.rank == 0:
            path, self.queue = self.folder / "metrics.jsonl", queue.SimpleQueue()
            if path.exists():  # drop records of steps that this run makes again
                rows = [line for line in path.read_text().splitlines() if line.endswith("}")]
                rows = [row + "\n" for row in rows if self.last_step and json.loads(row)["step"] <= self.last_step]
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

            names = {"project": self.args.wandb_project, "name": self.args.wandb_name, "id": self.wandb_id, "mode": mode}
            settings = wandb.Settings(init_timeout=30, silent=True)
            run = wandb.init(**names, resume="allow", dir=str(self.folder), config=vars(self.args), settings=settings)
            while (row := self.queue.get()) is not None:
                run.log(row)
            run.finish()
        except Exception as error:
            warn(f"wandb failed and is off from here on ({str(error)[:200]}); metrics.jsonl has everything")

    def waiting(self, iterator: Iterator):
        """next(iterator), its time counted as waiting for data."""
        begin = time.monotonic()
        item = next(iterator)
        StepGuard.beat = time.monotonic()
        self.waited += StepGuard.beat - begin
        return item

    def add(self, samples: int, **sums: tuple[torch.Tensor, float]) -> None:
        """Add the (sum, count) pairs of a micro-batch of this rank; they stay on the device."""
        self.samples += samples
        for name, (total, count) in sums.items():
            old = self.sums.get(name, (0.0, 0.0))
            self.sums[name] = (old[0] + total.detach().double(), old[1] + count)

    def interval(self, step: int, total: int, epoch: int, model: torch.nn.Module, lr: float, norm: torch.Tensor,
                 **extra) -> None:  # fmt: skip
        """Reduce what was added since the last call and record it. (all ranks) The only host sync of the loop."""
        sums = {f"{n}/{i}": v for n, pair in self.sums.items() for i, v in enumerate(pair)}
        sums = reduce_sums(self.ddp, {**sums, "samples": self.samples, "norm": norm.detach() / self.ddp.world_size})
        seconds = time.monotonic() - self.last
        means = {n: sums[f"{n}/0"] / sums[f"{n}/1"] for n in self.sums}
        speeds = {"samples/s": sums["samples"] / seconds, "data_wait": self.waited / seconds,
                  "comm": exposed_communication(model) * (step - self.last_step) / seconds,
                  "mem_gb": memory_gb(self.ddp.device)}  # fmt: skip
        self.last_step, self.final_loss, self.speed = step, means.get("loss"), speeds["samples/s"]
        numbers = " ".join(f"{n}={v:.6f}" for n, v in means.items())
        log0(f"step={step}/{total} epoch={epoch} {numbers} grad_norm={sums['norm']:.3f} lr={lr:.3e} samples/s={self.speed:.0f} "
             f"data_wait={speeds['data_wait']:.1%} comm={speeds['comm']:.1%} mem_gb={speeds['mem_gb']:.1f}")  # fmt: skip
        self.write({"step": step, "epoch": epoch, **means, "grad_norm": sums["norm"], "lr": lr, **speeds, **extra})
        self.reset()

    def reset(self) -> None:
        """Start an interval (also after an evaluation or a checkpoint, so that speeds are of training alone)."""
        self.last, self.waited, self.samples, self.sums = time.monotonic(), 0.0, 0, {}

    def write(self, row: dict) -> None:
        """One record to metrics.jsonl and wandb. (rank 0 writes)"""
        if self.ddp.rank == 0:
            with open(self.folder / "metrics.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            if self.thread.is_alive():  # not when wandb is off
                self.queue.put(row)

    def close(self, status: str, **fields) -> None:
        """summary.json, curves.png, the end of wandb. (rank 0 writes)"""
        if self.ddp.rank == 0:
            where = {"world_size": self.ddp.world_size, "backend": self.ddp.backend, "device": str(self.ddp.device)}
            summary = {"script": Path(sys.argv[0]).name, "status": status, **fields, **where, "args": vars(self.args),
                       "wall_s": self.wall + time.monotonic() - self.started}  # fmt: skip
            atomic_write(self.folder / "summary.json", lambda file: file.write(json.dumps(summary, indent=1).encode()))
            plot_curves(self.folder)
            self.queue.put(None)
            self.thread.join(timeout=30)

def exposed_communication(model: torch.nn.Module) -> float:
    """Seconds per step of gradient all-reduces that the backward pass does not hide, by DDP's own timers."""
    wrapped = getattr(model, "_orig_mod", model)
    data = wrapped._get_ddp_logging_data() if isinstance(wrapped, DistributedDataParallel) else {}
    hidden = data.get("avg_backward_compute_comm_overlap_time", 0)
    return max(0.0, (data.get("avg_backward_comm_time", 0) - hidden) * 1e-9)

def memory_gb(device: torch.device) -> float:
    """Peak memory of the device's allocator, or of the process on a CPU, in GB."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e9 if sys.platform == "darwin" else 1e6)

def plot_curves(folder: Path) -> None:
    """curves.png: every loss and metric of metrics.jsonl against the step."""
    from matplotlib.figure import Figure

    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    speeds = {"samples/s", "data_wait", "comm", "mem_gb"}
    curves = collections.defaultdict(list)
    for row in rows:
        for name, value in row.items():
            if isinstance(value, float) and name not in speeds:
                curves[name].append((row["step"], value))
    height = -(-len(curves) // 3)
    figure = Figure(figsize=(12, 2.6 * max(1, height)), layout="constrained")
    for place, (name, points) in enumerate(curves.items(), 1):
        axis = figure.add_subplot(height, 3, place, title=name, xlabel="optimizer step")
        axis.plot(*zip(*points, strict=True), marker="." if len(points) < 30 else None, linewidth=1)
    figure.savefig(folder / "curves.png", dpi=110)

# ===== shared DDP block: end =====

# ---- Evaluate ------------------------------------------------------------------------------------

@torch.no_grad()
def embed_rows(args: argparse.Namespace, ddp: DDPContext, student: Student, tokens: Tokens, rows: np.ndarray) -> torch.Tensor:
    """The student's vectors (N, D) of texts `rows`, on every rank, each text embedded once. (all ranks)

    Batches are cut from the length-sorted rows before they are dealt: the same on any number of ranks."""
    order, size = np.argsort(tokens.lengths[rows], kind="stable"), args.eval_batch_size
    vectors = torch.zeros(len(rows), student.model.get_embedding_dimension(), device=ddp.device)
    for low in range(ddp.rank * size, len(rows), ddp.world_size * size):
        places = order[low : low + size]
        ids, mask = tokens.padded(rows[places])
        vectors[torch.from_numpy(places).to(ddp.device)] = student.embed_group(ids.to(ddp.device), mask.to(ddp.device))
        StepGuard.beat = time.monotonic()
    if ddp.world_size > 1:
        dist.all_reduce(vectors)  # every row is zero on all ranks but one
    return vectors

def ranking_metrics(ddp: DDPContext, queries: torch.Tensor, documents: torch.Tensor, pairs: np.ndarray) -> dict[str, float]:
    """nDCG@10 (Jarvelin and Kekalainen 2002, binary), MRR@10 and recall@100 of unit vectors, queries (Q, D) against
    documents (M, D). pairs (P, 2): (query, document) that match. Ties count against us. (all ranks)"""
    relevant, sums = collections.defaultdict(list), torch.zeros(4, dtype=torch.float64)
    for q, d in pairs.tolist():
        relevant[q].append(d)
    for low in range(ddp.rank * 64, len(queries), ddp.world_size * 64):
        for q, scores in enumerate(queries[low : low + 64] @ documents.T, low):
            ranks = (scores[None, :] >= scores[relevant[q]][:, None]).sum(1).sort().values.double().cpu()
            ideal = torch.arange(1.0, 1 + min(10, len(ranks)), dtype=torch.float64)
            gain = [(1 / torch.log2(r + 1)).sum().item() for r in (ranks[ranks <= 10], ideal)]
            found = ranks[ranks <= 10]
            sums += torch.tensor([gain[0] / gain[1], 1 / found[0] if len(found) else 0.0, (ranks <= 100).double().mean(), 1.0])
    total = reduce_sums(ddp, dict(zip(("ndcg@10", "mrr@10", "recall@100", "queries"), sums, strict=True)))
    return {name: value / total["queries"] for name, value in total.items() if name != "queries"}

def targets(vectors: np.ndarray, rows: np.ndarray, dim: int, device: torch.device) -> torch.Tensor:
    """Teacher's vectors (B, dim) float32 of texts `rows`, renormalised after the cut to `dim`."""
    return F.normalize(torch.from_numpy(vectors[rows, :dim]).to(device).float(), dim=-1)

def evaluate(task: Task, teacher: bool = False) -> dict[str, float]:
    """Held-out metrics of the student, or of the teacher's own vectors: the same on any number of ranks. The first
    one decides which student is best. (all ranks)"""
    args, ddp, corpus, student = task.args, task.ddp, task.corpus, task.student
    dim = task.vectors.shape[1] if teacher else student.model.get_embedding_dimension()
    target = targets(task.vectors, corpus.eval_documents, dim, ddp.device)
    student.eval()
    documents = target if teacher else embed_rows(args, ddp, student, task.tokens, corpus.eval_documents)
    metrics = {"teacher_cosine": (documents * target).sum(1).double().mean().item()}
    if len(corpus.eval_pairs):
        rows = corpus.eval_queries
        queries = targets(task.vectors, rows, dim, ddp.device) if teacher else embed_rows(args, ddp, student, task.tokens, rows)
        metrics = ranking_metrics(ddp, queries, documents, corpus.eval_pairs) | metrics
    student.train()
    return metrics

def show_metrics(metrics: dict[str, float], teacher: dict[str, float]) -> str:
    """'ndcg@10=0.4123 (81% of teacher) mrr@10=...'"""
    share = {n: f" ({v / teacher[n]:.0%} of teacher)" for n, v in list(metrics.items())[:1] if teacher.get(n)}
    return " ".join(f"{n}={v:.4f}{share.get(n, '')}" for n, v in metrics.items())

# ---- Train ---------------------------------------------------------------------------------------

@dataclass
class Task:
    """What both phases and the evaluation share."""

    args: argparse.Namespace
    ddp: DDPContext
    log: RunLog
    corpus: Corpus
    tokens: Tokens
    vectors: np.ndarray
    negatives: np.ndarray
    student: Student
    teacher: dict[str, float] = dataclasses.field(default_factory=dict)
    untrained: dict[str, float] = dataclasses.field(default_factory=dict)
    history: list[dict] = dataclasses.field(default_factory=list)

@dataclass
class Phase:
    """Where a phase stands: what a checkpoint must bring back beside the weights."""

    number: int
    first: int = 0  # optimizer steps of the phase before
    step: int = 0  # optimizer steps of this phase
    epoch: int = 0
    position: int = 0  # global batches of this epoch
    best: dict | None = None
    stale: int = 0  # evaluations without gain

def phase1_batches(task: Task, sampler: GlobalBatchSampler, epoch: int) -> Iterator[list]:
    """Per optimizer step, this rank's micro-batches (items, groups, targets), ready on the device."""
    dim, device = task.student.model.get_embedding_dimension(), task.ddp.device
    for batch in sampler.batches(sampler.start):
        dealt = [(items, task.corpus.phase1[items]) for items in sampler.deal(batch)]
        yield [(i, task.tokens.groups(rows, device), targets(task.vectors, rows, dim, device)) for i, rows in dealt]

def phase1_step(task: Task, model: torch.nn.Module, step: list, total: int, scaler) -> torch.Tensor:
    """Forward and backward of an optimizer step of `total` texts over all ranks; returns this rank's loss."""
    args, summed = task.args, torch.zeros((), device=task.ddp.device)
    for number, (items, groups, target) in enumerate(step):
        with sync_gradients(model, number == len(step) - 1):
            vectors, dims = model(groups), [*args.matryoshka_dims, target.shape[1]]
            pairs = [(F.normalize(vectors[:, :d], dim=-1), F.normalize(target[:, :d], dim=-1)) for d in dims]
            losses = [distance_loss(s, t, args.phase1_l2_weight, args.phase1_cosine_weight).sum() for s, t in pairs]
            loss = torch.stack(losses).mean()
            # DDP averages over ranks: times ranks / total, that is the mean over the texts of the whole step
            scaler.scale(loss * (task.ddp.world_size / total)).backward()
        task.log.add(len(items), loss=(loss, len(items)))
        summed += loss.detach()
    return summed

@dataclass
class PairBatch:
    """A phase-2 step as this rank needs it: its micro-batches, and the columns of the step's score matrix.

    micro: (items, groups, targets, negatives (b, K) with -1) each, the texts in the order queries, positives,
    negatives; ids (M,): every rank's positives, then negatives, -1 where there is none; labels (B,): columns of
    this rank's positives; teacher_scores (B, M); most: queries of the largest rank; documents: of all ranks."""

    micro: list
    ids: torch.Tensor
    labels: torch.Tensor
    teacher_scores: torch.Tensor
    most: int
    documents: int

def phase2_batches(task: Task, sampler: GlobalBatchSampler, epoch: int) -> Iterator[PairBatch]:
    """One PairBatch per optimizer step. Every rank knows the plan, so only vectors travel between ranks."""
    args, ddp, corpus = task.args, task.ddp, task.corpus
    dim = task.student.model.get_embedding_dimension()
    for batch in sampler.batches(sampler.start):
        dealt = [np.concatenate(sampler.deal(batch, r)) for r in range(ddp.world_size)]
        drawn = [draw_negatives(task.negatives, items, args.num_negatives, args.seed, epoch) for items in dealt]
        most, mine, own = len(dealt[0]), dealt[ddp.rank], drawn[ddp.rank]
        short = [(0, most - len(items)) for items in dealt]
        positive = [np.pad(corpus.positives[items], s, constant_values=-1) for items, s in zip(dealt, short, strict=True)]
        negative = [np.pad(d, (s, (0, 0)), constant_values=-1) for d, s in zip(drawn, short, strict=True)]
        ids = np.concatenate([np.concatenate(positive), np.concatenate(negative).ravel()])
        columns = targets(task.vectors, np.maximum(ids, 0), dim, ddp.device)
        micro, low = [], 0
        for items in sampler.deal(batch):
            part, low = own[low : low + len(items)], low + len(items)
            rows = np.concatenate([corpus.queries[items], corpus.positives[items], part[part >= 0]])
            groups, target = task.tokens.groups(rows, ddp.device), targets(task.vectors, rows, dim, ddp.device)
            micro.append((items, groups, target, torch.from_numpy(part).to(ddp.device)))
        labels = torch.arange(len(mine), device=ddp.device) + ddp.rank * most
        scores = targets(task.vectors, corpus.queries[mine], dim, ddp.device) @ columns.T
        yield PairBatch(micro, torch.from_numpy(ids).to(ddp.device), labels, scores, most, int((ids >= 0).sum()))

def contrastive_loss(task: Task, batch: PairBatch, vectors: list[torch.Tensor], total: int) -> tuple[torch.Tensor, dict]:
    """Sum over this rank's queries of a step's losses, from the vectors of its micro-batches' texts, and
    {name: (sum, count)}. Divided by `total`, its sum over ranks is the mean over the step. (all ranks)"""
    args, world_size, parts, is_query = task.args, task.ddp.world_size, [], []
    for part, (items, _, _, ids) in zip(vectors, batch.micro, strict=True):
        table = part.new_zeros(*ids.shape, part.shape[1]).masked_scatter((ids >= 0)[..., None], part[2 * len(items) :])
        parts.append((part[: len(items)], part[len(items) : 2 * len(items)], table))  # (b, D), (b, D), (b, K, D)
        is_query.append(torch.arange(len(part), device=part.device) < len(items))
    queries, positives, negatives = (torch.cat(p) for p in zip(*parts, strict=True))
    texts, wanted, is_query = torch.cat(vectors), torch.cat([m[2] for m in batch.micro]), torch.cat(is_query)
    everywhere = [gather_rows(rows, batch.most, world_size) for rows in (positives, negatives)]
    documents = torch.cat([everywhere[0], everywhere[1].flatten(0, 1)])
    masked = false_negatives(batch.ids, batch.labels, batch.teacher_scores, args.false_negative_margin)
    dims, whole, sums = [*args.matryoshka_dims, queries.shape[1]], 0.0, {}
    for dim in dims:
        q, d, s, t = (F.normalize(x[:, :dim], dim=-1) for x in (queries, documents, texts, wanted))
        infonce, logits = infonce_loss(q, d, batch.labels, masked, args.temperature)
        far = distance_loss(s, t, args.phase2_l2_weight, 0.0)
        # queries and documents weigh the same, each as the mean over the whole step
        pull = 0.5 * (far[is_query].sum() + far[~is_query].sum() * (total / batch.documents))
        loss, sums = args.infonce_weight * infonce.sum() + pull, {"infonce": (infonce.sum(), len(q)), "distance": (pull, len(q))}
        if args.kl_weight:
            kl = kl_loss(logits, batch.teacher_scores / args.temperature, masked).sum()
            loss, sums["kl"] = loss + args.kl_weight * kl, (kl, len(q))
        whole = whole + loss / len(dims)
    return whole, {"loss": (whole, len(queries)), **sums}

def phase2_step(task: Task, model: torch.nn.Module, batch: PairBatch, total: int, scaler) -> torch.Tensor:
    """Forward and backward of an optimizer step of `total` queries over all ranks; returns this rank's loss.

    With several micro-batches, their vectors are first computed without a graph, then the loss and its gradient
    by all vectors, then each micro-batch again with its part of that gradient (gradient caching, Gao et al.
    2021): the negatives are those of the whole step on any number of GPUs."""
    scale, device, groups = task.ddp.world_size / total, task.ddp.device, [m[1] for m in batch.micro]
    if len(groups) == 1:
        loss, sums = contrastive_loss(task, batch, [model(groups[0])], total)
        scaler.scale(loss * scale).backward()
    else:
        states, vectors = [], []
        with torch.no_grad():
            for group in groups:
                states.append(rng_state(device))
                vectors.append(unwrap(model)(group))
        loss, sums = contrastive_loss(task, batch, [v.requires_grad_() for v in vectors], total)
        gradients = torch.autograd.grad(loss * scale, vectors)
        for number, (group, gradient) in enumerate(zip(groups, gradients, strict=True)):
            with sync_gradients(model, number == len(groups) - 1):
                rng_state(device, states[number])  # the same dropout as the first time
                scaler.scale((model(group) * gradient).sum()).backward()
    task.log.add(len(batch.labels), **sums)
    return loss.detach()

def rng_state(device: torch.device, new: torch.Tensor | None = None) -> torch.Tensor:
    """The device's random state; sets it if `new` is given."""
    module = torch if device.type == "cpu" else torch.get_device_module(device)
    if new is not None:
        module.set_rng_state(new)
    return module.get_rng_state()

def make_optimizer(args: argparse.Namespace, student: Student, lr: float) -> torch.optim.Optimizer:
    """AdamW, no decay on biases, norms and embeddings. Fused: one kernel that can skip its update on the device."""
    trained = [(p, p.ndim < 2 or "embeddings." in n) for n, p in student.named_parameters() if p.requires_grad]
    groups = [{"params": [p for p, plain in trained if plain], "weight_decay": 0.0}]
    groups += [{"params": [p for p, plain in trained if not plain], "weight_decay": args.weight_decay}]
    return torch.optim.AdamW(groups, lr=lr, fused=True)

def make_sampler(task: Task, phase: int, total: int, micro_steps: int) -> GlobalBatchSampler:
    """Phase 1: windows of 32 length-sorted batches; phase 2: random batches, sorted so that ranks get equal work."""
    corpus, lengths, seed = task.corpus, task.tokens.lengths, task.args.seed
    if phase == 1:
        cut = bucket_by_length(lengths[corpus.phase1], total, seed)
        return GlobalBatchSampler(len(corpus.phase1), total, micro_steps, seed, task.ddp, 32, cut)
    work = lengths[corpus.positives] + (lengths[task.negatives] * (task.negatives >= 0)).sum(1)
    cut = bucket_by_length(work, total, seed)
    return GlobalBatchSampler(len(corpus.queries), total, micro_steps, seed + 1, task.ddp, 1, cut)

def checkpoint(task: Task, phase: Phase, optimizer, guard: StepGuard, total: int, best: bool, done: bool) -> None:
    """Everything needed to go on bit by bit, written by rank 0. (all ranks)"""
    args, log, states = task.args, task.log, rng_states(task.ddp)
    if task.ddp.rank == 0:
        state = {
            "format": 1, "script": "train_ddp.py", "args": vars(args), "world_size": task.ddp.world_size, "global_batch": total,
            "model": task.student.state_dict(), "optimizer": optimizer.state_dict(), "scaler": guard.scaler.state_dict(),
            "phase": dataclasses.asdict(phase), "step": phase.first + phase.step, "epoch": phase.epoch, "done": done,
            "rng": states, "untrained": task.untrained, "history": task.history, "bad_steps": guard.bad_steps,
            "wandb_id": log.wandb_id, "wall_s": log.wall + time.monotonic() - log.started, "speed": (log.final_loss, log.speed),
        }  # fmt: skip
        written = save_checkpoint(args.output_dir, state, state["step"], args.keep_checkpoints, best)
        if best:
            kept = {name: state[name] for name in ("format", "script", "args", "model", "step", "phase")}
            path = Path(args.output_dir) / f"phase{phase.number}_best.pt"
            written &= atomic_write(path, lambda file: torch.save(kept, file))  # noqa: TID251
        if done and not written:
            raise OSError(f"the end of phase {phase.number} could not be saved: free space in {args.output_dir}, run again")
    barrier(task.ddp)
    StepGuard.beat = time.monotonic()
    log.reset()

def judge(task: Task, phase: Phase) -> bool:
    """Evaluate, record, and tell whether this is the best student so far. (all ranks; the same on each)"""
    metrics, step = evaluate(task), phase.first + phase.step
    name = next(iter(metrics))
    better = phase.best is None or metrics[name] > phase.best["value"]
    if better:
        phase.best = {"name": name, "value": metrics[name], "step": step, "metrics": metrics}
    phase.stale = 0 if better else phase.stale + 1
    row = {"step": step, "epoch": phase.epoch, "phase": phase.number, **metrics}
    task.history.append(row)
    task.log.write(row)
    log0(f"phase {phase.number} step {step} held-out: {show_metrics(metrics, task.teacher)}" + " (best so far)" * better)
    task.log.reset()
    return better

def train(task: Task, phase: Phase, state: dict | None, total: int, micro_steps: int) -> str:
    """Train one phase, from `state` if it is this phase's. Returns why it was stopped, or ''. (all ranks)"""
    args, ddp, log, student, number = task.args, task.ddp, task.log, task.student, phase.number
    sampler = make_sampler(task, number, total, micro_steps)
    epochs, lr = getattr(args, f"phase{number}_epochs"), getattr(args, f"phase{number}_lr")
    per_epoch, peak = len(sampler) // micro_steps, scaled_lr(lr, args.lr_scaling, ddp.world_size)
    steps = min(epochs * per_epoch, args.max_steps or math.inf)
    warmup = min(steps, int(args.warmup_ratio * steps) if args.warmup_steps is None else args.warmup_steps)
    optimizer = make_optimizer(args, student, peak)
    guard = StepGuard(args, ddp, optimizer, student.dtype, log.started)
    torch.manual_seed(args.seed + ddp.rank)  # dropout differs between ranks
    if state:
        student.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        guard.scaler.load_state_dict(state["scaler"])
        restore_rng(state["rng"], ddp, args.seed)
        guard.bad_steps = state["bad_steps"]
    model = wrap_ddp(student, ddp)
    log0(f"phase {number}: {sampler.n} {'texts' if number == 1 else 'queries'}, {epochs} epochs x {per_epoch} steps, "
         f"{steps} steps, warm-up {warmup}, peak learning rate {peak:g}, {sampler.n % total} left out per epoch")  # fmt: skip
    sampler.set_epoch(phase.epoch, phase.position)
    require_same(ddp, "the batches", sampler.fingerprint())
    make_batches, run = (phase1_batches, phase1_step) if number == 1 else (phase2_batches, phase2_step)
    bar = tqdm(total=steps, initial=phase.step, desc=f"phase {number}", disable=ddp.rank > 0 or not sys.stderr.isatty())
    student.train()
    reason = ""
    while phase.step < steps and not reason:
        if phase.position == 0 or log.samples == 0:  # an epoch starts, or goes on
            sampler.set_epoch(phase.epoch, phase.position)
            batches = prefetch(make_batches(task, sampler, phase.epoch), ddp.device)
            log.reset()
        for group in optimizer.param_groups:
            group["lr"] = peak * lr_at(phase.step, steps, warmup, args.lr_schedule)
        batch = log.waiting(batches)
        loss = run(task, model, batch, total, guard.scaler)
        items = [m[0] for m in (batch if number == 1 else batch.micro)]
        norm, reason = guard.step(loss, phase.first + phase.step + 1, items)
        phase.step, phase.position = phase.step + 1, phase.position + 1
        bar.update()
        last = phase.step == steps
        if phase.step % args.log_every == 0 or last:
            log.interval(phase.first + phase.step, phase.first + steps, phase.epoch, model, group["lr"], norm, phase=number)
        if phase.position == per_epoch:
            phase.epoch, phase.position = phase.epoch + 1, 0
        due = last or (phase.step % args.eval_every == 0 if args.eval_every else phase.position == 0)
        better = due and not reason and judge(task, phase)
        early = 0 < args.early_stop_patience <= phase.stale
        if reason or due or phase.step % args.save_every == 0:
            checkpoint(task, phase, optimizer, guard, total, better, done=early or (last and not reason))
        if early:
            log0(f"phase {number} stopped early: no gain in {phase.stale} evaluations")
            break
    guard.finish()
    bar.close()
    return reason

def start_weights(task: Task) -> None:
    """Where phase 2 starts: the best student of phase 1. (all ranks)"""
    args, given = task.args, task.args.phase1_checkpoint
    path = Path(given or Path(args.output_dir) / "phase1_best.pt")
    if not path.exists() and args.skip_phase1 and not given:
        warn(f"--skip_phase1 and no {path}: phase 2 starts from the raw student")
        return
    state = load_checkpoint(path)
    for name in ("student_model", "use_projection", "student_layers", "projection_hidden"):
        if state["args"].get(name) != getattr(args, name):
            raise ValueError(f"{path} was trained with --{name} {state['args'].get(name)!r}, not {getattr(args, name)!r}")
    try:
        task.student.load_state_dict(state["model"])
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit this student: {str(error).splitlines()[1].strip()}") from error
    log0(f"phase 2 starts from {path} (step {state['step']})")

# ---- Main ----------------------------------------------------------------------------------------

def save_artifacts(task: Task, best: dict) -> list[str]:
    """Save the student as a SentenceTransformer of stock modules, and beside it the student without the head.

    Raises RuntimeError if encode() of the saved folder differs from the trained forward pass by more than 1e-5.
    (rank 0 only)"""
    from sentence_transformers import SentenceTransformer

    args, model, device = task.args, task.student.model.eval(), task.ddp.device
    short = re.sub(r"\W+", "-", str(args.student_model).rstrip("/").rpartition("/")[2]).strip("-")
    name = f"distilled-{short}-{model.get_embedding_dimension()}d{'' if args.use_projection else '-mrl'}"
    models = {Path(args.artifacts_dir) / name: model}
    if args.use_projection:
        end = [type(module).__name__ for module in model].index("Normalize") + 1
        base = SentenceTransformer(modules=list(model)[:end], prompts=model.prompts, device=str(device))
        models[Path(args.artifacts_dir) / f"{name}-base-{base.get_embedding_dimension()}d"] = base
    rows = np.concatenate([task.corpus.eval_queries[:32], task.corpus.eval_documents[:32]])
    ids, mask = (t.to(device) for t in task.tokens.padded(rows))
    texts = [list(model.prompts.values())[task.corpus.texts.kinds[i]] + task.corpus.texts[i] for i in rows]
    for path, part in models.items():
        temporary = path.with_name(path.name + ".tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        part.save(str(temporary), create_model_card=False)
        (temporary / "README.md").write_text(model_card(task, best, path.name, part), encoding="utf-8")
        loaded = SentenceTransformer(str(temporary), device=str(device))
        encoded = loaded.encode(texts, prompt="", batch_size=8, convert_to_tensor=True, show_progress_bar=False)
        with torch.no_grad():
            gap = (encoded - Student(part, torch.float32, device).embed_group(ids, mask)).abs().max().item()
        if not gap <= 1e-5:
            raise RuntimeError(f"{temporary}: encode() differs from the trained forward pass by {gap:.1e}, limit 1e-5")
        shutil.rmtree(path, ignore_errors=True)
        temporary.rename(path)
        log0(f"saved {path}: {part.get_embedding_dimension()} dimensions, encode() equals the forward pass to {gap:.1e}")
    return [str(path) for path in models]

def model_card(task: Task, best: dict, name: str, model) -> str:
    """README.md of a saved student."""
    import sentence_transformers

    args, names = task.args, list(best["metrics"])
    rows = {"teacher": task.teacher, "student": best["metrics"], "student, untrained": task.untrained}
    table = [f"| {who} | " + " | ".join(f"{m[n]:.4f}" for n in names) + " |" for who, m in rows.items()]
    base = "\nThis is the student without its head: smaller vectors, not comparable with the teacher's; the figures are\n"
    base += "those of the student with the head.\n"
    return "\n".join([
        "---\nlibrary_name: sentence-transformers\npipeline_tag: sentence-similarity\n---",
        f"# {name}\n\n`{args.student_model}` distilled from `{args.teacher_model}` by `train_ddp.py`, "
        f"{'projection' if args.use_projection else 'MRL'} mode, {best['step']} optimizer steps on {args.phase1_data} and "
        f"{args.phase2_data}.\n{'' if model is task.student.model else base}",
        f"Held-out: {len(task.corpus.eval_queries)} queries against {len(task.corpus.eval_documents)} documents.\n",
        f"| | {' | '.join(names)} |\n|---|{'---|' * len(names)}", *table,
        "\n```python\nfrom sentence_transformers import SentenceTransformer\n\nmodel = SentenceTransformer(PATH)",
        'queries, documents = model.encode_query(["..."]), model.encode_document(["..."])\n```\n',
        f"Needs sentence-transformers >= {sentence_transformers.__version__.split('.')[0]}. {model.get_embedding_dimension()} "
        f"dimensions, at most {model.max_seq_length} tokens, prompts {model.prompts}.\n",
    ])  # fmt: skip

def build_task(args: argparse.Namespace, ddp: DDPContext, state: dict | None) -> Task:
    """Data, teacher vectors, tokens and student, each made once and cached. (all ranks)"""
    log = RunLog(args, ddp, state)
    if Path("ddp_config.json").exists() and not args.config:
        log0("ddp_config.json lies here but is not read: give --config ddp_config.json")
    prepare_hub(args)
    corpus = load_data(args, ddp)
    teacher, name = (builtin_model(args, ddp, corpus, n) for n in (args.teacher_model, args.student_model))
    vectors = teacher_vectors(args, ddp, corpus, teacher)
    student = build_student(args, ddp, name, vectors.shape[1])
    tokens = load_tokens(args, ddp, corpus, student.model)
    freeze_unused(student, tokens, ddp.device)
    if args.compile:
        student.embed = torch.compile(student.embed_group, dynamic=True)
    trained = sum(p.numel() for p in student.parameters() if p.requires_grad) / 1e6
    log0(f"student: {trained:.2f} M trained parameters, {student.dtype}, at most {student.model.max_seq_length} tokens")
    task = Task(args, ddp, log, corpus, tokens, vectors, mine_negatives(args, ddp, corpus, vectors, teacher), student)
    task.teacher = evaluate(task, teacher=True)
    log0(f"teacher held-out: {show_metrics(task.teacher, {})}")
    if state:
        task.untrained, task.history = state["untrained"], state["history"]
    else:
        task.untrained = evaluate(task)
        log0(f"untrained student held-out: {show_metrics(task.untrained, task.teacher)}")
        log.write({"step": 0, "epoch": 0, "phase": 0, **task.untrained})
    return task

def main(args: argparse.Namespace) -> int:
    """Both phases, from where the run in --output_dir stands; returns the exit status."""
    ddp = setup_ddp(args)
    state = open_run(args, ddp, SAME)
    phase = Phase(**state["phase"]) if state else None
    complete = phase.number if state and state["done"] else phase.number - 1 if phase else 0  # phases that are over
    finished = complete >= (1 if args.skip_phase2 else 2)
    if finished and not args.save_to_artifacts:
        log0(f"the run in {args.output_dir} is finished ({state['step']} steps, {phase.best['name']} "
             f"{phase.best['value']:.4f}): nothing to do; --fresh starts anew")  # fmt: skip
        return 0
    total, micro_steps = resolve_batch(args, ddp.world_size, state["global_batch"] if state and not state["done"] else None)
    task = build_task(args, ddp, state)
    for number in (1, 2):
        if finished or number <= complete or getattr(args, f"skip_phase{number}"):
            continue
        resumed = state if phase and phase.number == number else None
        phase = phase if resumed else Phase(number, first=phase.first + phase.step if phase else 0)
        if number == 2 and not resumed:
            start_weights(task)
        reason = train(task, phase, resumed, total, micro_steps)
        if reason:
            task.log.close("stopped", steps=phase.first + phase.step, reason=reason)
            return stop_status(reason)
    return finish(task, phase)

def finish(task: Task, phase: Phase) -> int:
    """Table, artifacts and summary of a complete run. (all ranks)"""
    args, best, path = task.args, phase.best, Path(task.args.output_dir) / f"phase{phase.number}_best.pt"
    task.student.load_state_dict(load_checkpoint(path)["model"])
    queries, documents = len(task.corpus.eval_queries), len(task.corpus.eval_documents)
    log0(f"held-out: {queries} queries, {documents} documents; best student of phase {phase.number} at step {best['step']}")
    for who, metrics in (("teacher", task.teacher), ("student", best["metrics"]), ("untrained student", task.untrained)):
        log0(f"  {who:<18}" + "  ".join(f"{n} {metrics[n]:.4f}" for n in best["metrics"]))
    artifacts = on_rank0(task.ddp, save_artifacts, task, best) if args.save_to_artifacts else []
    baselines = {"teacher": task.teacher[best["name"]], "untrained student": task.untrained[best["name"]]}
    chosen = {name: best[name] for name in ("name", "value", "step")}
    task.log.close("finished", steps=phase.first + phase.step, epochs=phase.epoch, samples_per_s=task.log.speed,
                   final_loss=task.log.final_loss, best_metric=chosen, baselines=baselines, checkpoint=str(path),
                   artifacts=artifacts)  # fmt: skip
    log0(f"finished: {args.output_dir}/summary.json, curves.png" + "".join(f", {folder}" for folder in artifacts))
    return 0

if __name__ == "__main__":
    sys.exit(launch(main, parse_args()))
