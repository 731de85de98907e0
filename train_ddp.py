"""Distil a large retrieval teacher into a small SentenceTransformer student, in two phases.

Phase 1 pulls the student's vectors of single texts to the teacher's; phase 2 trains on (query, positive, negatives)
with the contrastive InfoNCE loss and keeps the pull. The teacher sees each text once.

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
    Held out, with their documents: MS MARCO's validation split; elsewhere --eval_fraction of the queries, by a hash.
--use_projection=True: student -> Linear-GELU-LayerNorm-Linear -> the teacher's dimensions
--use_projection=False: MRL, no head; the target is the renormalised leading part of the teacher's vector
Logged metrics (over all ranks; in metrics.jsonl and wandb)
    loss, distance      weighted sum; weighted squared L2 + cosine distance to the teacher, per text or query
    infonce, kl         nats per query, over the documents of the whole optimizer step
    ndcg@10 mrr@10 recall@100   0 to 1: held-out queries against all held-out documents
    samples/s           texts (phase 1) or queries (phase 2) a second
    data_wait, comm     share of the time spent waiting for batches; in all-reduces that nothing hides
Files in --output_dir: latest.pt (resume), best.pt, phase1_best.pt, phase2_best.pt, metrics.jsonl, ...

Differences from the original recipe: the squared distance is summed, not averaged, over dimensions; the negatives are
those of the whole step (all ranks and micro-batches, Gao et al. 2021), not one query's own 7; the head reads a
normalised vector, as in the saved model; best is by held-out nDCG@10; the warm-up is a share of the steps there are.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
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
BLOCK = 2048  # texts per file at most while teacher vectors are being computed
# A resumed run must have these arguments as they were.
SAME = ("teacher_model teacher_revision teacher_max_length teacher_dim teacher_query_prompt teacher_document_prompt "
        "student_model student_layers student_max_length student_query_prompt student_document_prompt use_projection "
        "projection_hidden phase1_data phase2_data max_samples_phase1 max_samples_phase2 eval_fraction eval_samples "
        "max_chars mine_negatives mine_margin num_negatives matryoshka_dims seed phase1_epochs phase2_epochs "
        "max_steps").split()

# ---- Arguments -----------------------------------------------------------------------------------

def int_list(text: str) -> list[int]:
    """'64,128,256' -> [64, 128, 256]"""
    return [int(part) for part in str(text).split(",") if part]

def parse_args(argv: list[str] | None = None) -> Namespace:
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
    g("--teacher_dim", type=int, help="use the teacher's first so many dimensions [default: all]")
    g("--teacher_batch_size", type=int, default=64, help="texts per teacher forward pass")
    g("--trust_remote_code", help="run code that comes with the models (the default teacher needs and gets it)", **FLAG)
    g("--student_model", default="sentence-transformers/all-mpnet-base-v2", help="name, folder or builtin:bert[:LxH]")
    g("--student_layers", type=int, help="keep so many evenly spaced layers of the student [default: all]")
    for who in ("teacher", "student"):
        g(f"--{who}_max_length", type=int, help=f"tokens [default: the {who}'s own]")
        g(f"--{who}_query_prompt", help=f"text before queries [default: the {who}'s own]")
        g(f"--{who}_document_prompt", help=f"text before documents [default: the {who}'s own]")
    g("--student_dropout", type=float, help="dropout of the student [default: its own]")
    g("--use_projection", type=boolean, default=True, metavar="BOOL", help="head to the teacher's size; False: MRL")
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
    g("--false_negative_margin", type=float, default=0.0, help="mask what scores above positive + margin (2: nothing)")
    g("--matryoshka_dims", type=int_list, default=[], metavar="D,D", help="also train these leading dimensions")
    g = p.add_argument_group("Evaluation").add_argument
    g("--eval_every", type=int, default=0, help="optimizer steps between evaluations (0 = every epoch)")
    g("--early_stop_patience", type=int, default=0, help="evaluations without gain that end a phase (0 = off)")
    g("--eval_batch_size", type=int, default=64, help="texts per evaluation batch")
    g("--save_to_artifacts", help="save the best student as a SentenceTransformer", **FLAG)
    g("--artifacts_dir", default="./artifacts", help="folder of the saved students")
    add_ddp_arguments(p, output_dir="./checkpoints", wandb_project="train_ddp")
    args = parse_arguments(p, argv)
    above_0 = ("batch_size max_samples_phase1 max_samples_phase2 phase1_epochs phase2_epochs temperature eval_samples "
               "eval_batch_size teacher_batch_size max_chars").split()
    refused = {
        **{f"--{name} {getattr(args, name)} must be above 0": getattr(args, name) <= 0 for name in above_0},
        "--skip_phase1 and --skip_phase2 together leave nothing to train": args.skip_phase1 and args.skip_phase2,
        f"--phase2_data {args.phase2_data}: phase 2 needs query and positive (.jsonl or .parquet)":
            args.phase2_data.endswith(".txt") and not args.skip_phase2,
        f"--eval_fraction {args.eval_fraction} must be between 0 and 1": not 0 < args.eval_fraction < 1,
        f"--matryoshka_dims {args.matryoshka_dims} must be positive": any(d < 1 for d in args.matryoshka_dims)}
    for message in (m for m, wrong in refused.items() if wrong):
        p.error(message)
    args.output_dir = args.output_dir.replace("{mode}", "projection" if args.use_projection else "mrl")
    return args

# ---- Data ----------------------------------------------------------------------------------------

class Corpus:
    """Distinct texts and arrays of their numbers, memory-mapped: kinds (N,), QUERY or DOCUMENT; phase1 (N1,); queries,
    positives (N2,); negatives (N2, K), -1: none; eval_queries (Q,), eval_documents (D,); eval_pairs (P, 2): places."""
    def __init__(self, folder: Path):
        self.key = hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()
        self.bytes, self.offsets, self.kinds = load_arrays(folder, "text offsets kinds")
        self.phase1, self.queries, self.positives = load_arrays(folder, "phase1 queries positives")
        self.negatives, self.eval_pairs = load_arrays(folder, "negatives eval_pairs")
        self.eval_queries, self.eval_documents = load_arrays(folder, "eval_queries eval_documents")
    def text(self, i: int) -> str:
        return self.bytes[self.offsets[i] : self.offsets[i + 1]].tobytes().decode("utf-8")

class Row(NamedTuple):  # one example as read
    query: str  # "" where there is none (phase 1)
    positives: list[str]
    negatives: list[str]
    group: str  # examples that are held out together
    held_out: bool | None = None  # the data set's own split

def prepare_hub(args: Namespace) -> None:
    """Before they are imported: make the hub's libraries fail at once without it, not retry for over a minute."""
    from urllib.request import urlopen
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    names = dict.fromkeys((args.teacher_model, args.student_model, args.phase1_data, args.phase2_data))
    remote = [n for n in names if not n.startswith(("builtin:", "pydocs")) and not Path(n).exists()]
    answers = []
    def ask() -> None:
        with contextlib.suppress(OSError):
            answers.append(urlopen(os.environ.get("HF_ENDPOINT", "https://huggingface.co"), timeout=5).close())
    if remote and "HF_HUB_OFFLINE" not in os.environ:
        (thread := threading.Thread(target=ask, daemon=True)).start()
        thread.join(6)  # looking a name up has no time limit of its own
        if answers:
            return
        os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
        warn(f"the model hub cannot be reached: {', '.join(remote)} must already be on this machine")

def read_hub_rows(name: str, phase: int, limit: int) -> Iterator[tuple[str, dict]]:
    """(place, record) of a hub data set; MS MARCO v1.1 is brought to query, positive, negatives."""
    from datasets import load_dataset
    marco = name == "ms_marco"
    path, _, config = ("microsoft/ms_marco:v1.1" if marco else name).partition(":")
    for split in ("train", "validation") if marco else ("train",):
        try:
            data = load_dataset(path, config or None, split=split)
        except Exception as error:  # the library raises a dozen kinds
            raise ValueError(f"--phase{phase}_data {name}: {path!r} is not on this machine and could not be fetched "
                             f"({str(error)[:120]}); without a download: pydocs, a .jsonl or .parquet file") from error
        for i, row in enumerate(itertools.islice(data, limit if split == "train" else 20_000)):
            if marco:
                passages = list(zip(row["passages"]["is_selected"], row["passages"]["passage_text"], strict=True))
                good, bad = ([text for chosen, text in passages if bool(chosen) == kind] for kind in (True, False))
                row = {"query": row["query"], "positive": good, "negatives": bad, "held_out": split != "train"}
            if not marco or good:  # a query without an answer teaches nothing
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
    query = fields.pop("query")
    if not (phase == 1 and query is None) and not (isinstance(query, str) and query.strip()):
        raise ValueError(f"{place}: query is {query!r} in columns {sorted(found)[:8]}, expected {want}")
    for name, value in fields.items():
        fields[name] = texts = [value] if isinstance(value, str) else [] if value is None else value
        if not isinstance(texts, list) or not all(isinstance(t, str) and t.strip() for t in texts):
            raise ValueError(f"{place}: {name} is {str(value)[:80]!r}, expected a text or a list of texts, none empty")
    if not fields["positive"]:
        raise ValueError(f"{place}: no positive in columns {sorted(found)[:8]}, expected {want}")
    return Row(query or "", *fields.values(), query or fields["positive"][0], found.get("held_out"))

def read_rows(name: str, phase: int, limit: int, problems: list[str]) -> Iterator[Row]:
    """Rows of a data source (see the top of this file); bad ones are described in `problems`."""
    if name == "pydocs":
        yield from pydocs_rows()[:limit]
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

SKIPPED_PARTS = set(  # tests, demonstrations, and what is not documentation
    "test tests testing idlelib tkinter turtledemo lib2to3 ensurepip site-packages dist-packages config __pycache__ "
    "pydoc_data antigravity.py this.py turtle.py conftest.py setup.py".split())
SIGNATURE = re.compile(r"\s*[\w.\\]+\([^\n]*\)(\s*->[^\n]*)?\s*(\n|$)")
SENTENCE_END = re.compile(r"(?<!e\.g\.)(?<!i\.e\.)(?<=[.!?:])\s+(?=[^a-z])|\n\s*\n")

def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """(name, docstring) of a source file, its public classes and functions, and what it adds to those written in C."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return  # sources for other versions of Python lie in the library too
    nodes = [(path.parent.name if path.name == "__init__.py" else path.stem, tree)]
    while nodes:
        name, node = nodes.pop()
        if doc := ast.get_docstring(node, clean=False):
            yield name, doc
        if isinstance(node, (ast.Module, ast.ClassDef)):
            kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            nodes += [(n.name, n) for n in reversed(node.body) if isinstance(n, kinds) and not n.name.startswith("_")]
    adds = "_docs" in path.name or "newdocs" in path.name  # torch's add_docstr, numpy's add_newdoc
    for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call)) if adds else ():
        words = [w.value for a in call.args for w in ast.walk(a) if isinstance(getattr(w, "value", None), str)]
        names = [a.attr for a in call.args if isinstance(a, ast.Attribute)] + [w for w in words if len(w) < 60]
        texts = [w for w in words if len(w) > 200]
        if names and texts:
            yield names[-1], texts[0]

@functools.cache
def pydocs_rows() -> list[Row]:
    """The documentation of Python, numpy and torch as installed: a docstring's first sentence (the query) and its rest,
    none twice. The group is the object's bare name: torch's log_softmax and LogSoftmax are split alike."""
    import sysconfig
    from pydoc_data.topics import topics
    roots = [Path(r) for r in (sysconfig.get_path("stdlib"), *np.__path__, *torch.__path__)]
    paths = [p for r in roots for p in sorted(r.rglob("*.py")) if not SKIPPED_PARTS & set(p.relative_to(r).parts)]
    plain = {name: re.sub(r"[*`_]{1,2}(\S[^*`]*)[*`]{1,2}", r"\1", text) for name, text in sorted(topics.items())}
    entries = [(f"topic {name}", part) for name, text in plain.items() for part in re.split(r"\n\s*\n", text)]
    for module in map(importlib.import_module, ("builtins", "math", "itertools")):
        entries += [(name, thing.__doc__) for name, thing in vars(module).items()]
    rows, seen = [], set()
    gc.disable()  # syntax trees are millions of small objects; collecting them doubles the time
    for name, doc in itertools.chain(entries, *map(docstrings, paths)):
        doc = inspect.cleandoc(doc or "")
        while match := SIGNATURE.match(doc):
            doc = doc[match.end() :].lstrip("-\n ")
        query, document = (" ".join(part.split()) for part in [*SENTENCE_END.split(doc, maxsplit=1), ""][:2])
        keys = {re.sub(r"\W+", " ", text.lower()).strip() for text in (query, document)}
        if len(document) >= 80 and len(query.split()) >= 2 and not seen & keys:
            seen |= keys
            rows.append(Row(query, [document], [], name.replace("_", "").lower()))
    gc.enable()
    return rows

def needed_phases(args: Namespace) -> list[int]:
    """Phases whose data is read: where both have the same, both, so that a later run of the other finds its vectors."""
    both = args.phase1_data == args.phase2_data and not args.phase2_data.endswith(".txt")  # phase 1 alone reads .txt
    return [p for p in (1, 2) if both or not getattr(args, f"skip_phase{p}")]

def build_corpus(args: Namespace) -> dict[str, np.ndarray]:
    """Read and check the data once: the arrays of Corpus. Bad rows are an error, or left out. (rank 0 only)"""
    log0(f"reading {args.phase1_data} (phase 1) and {args.phase2_data} (phase 2)")
    table: dict[tuple[int, str], int] = {}
    phase1, pairs, held_pairs, held_texts, problems = set(), [], set(), set(), []
    def add(kind: int, texts: list[str]) -> list[int]:
        return [table.setdefault((kind, text[: args.max_chars].strip()), len(table)) for text in texts]
    for phase in needed_phases(args):
        name, limit = getattr(args, f"phase{phase}_data"), getattr(args, f"max_samples_phase{phase}")
        for row in read_rows(name, phase, limit, problems):
            query, documents = add(QUERY, [row.query] if row.query else []), add(DOCUMENT, row.positives)
            # by the data set's own split, else by a hash: the same for any order, seed and number of ranks
            share = int.from_bytes(hashlib.sha256(row.group.strip().encode("utf-8")).digest()[:8], "big") / 2.0**64
            if share < args.eval_fraction if row.held_out is None else row.held_out:
                held_pairs.update(itertools.product(query, documents))
                held_texts.update(documents)
            elif phase == 1:
                phase1.update(query + documents)
            else:
                negatives = [n for n in add(DOCUMENT, row.negatives) if n not in documents]
                pairs += [(q, d, negatives) for q in query for d in documents]
    problems = list(dict.fromkeys(problems))  # one source for both phases is read twice
    if problems and not args.skip_bad_data:
        shown = "\n  ".join(problems[:20] + [f"... and {len(problems) - 20} more"] * (len(problems) > 20))
        raise ValueError(f"{len(problems)} bad rows (--skip_bad_data goes on without them):\n  {shown}")
    if problems:
        listing = Path(args.output_dir) / "skipped_data.txt"
        listing.write_text("\n".join(problems) + "\n", encoding="utf-8")
        warn(f"left out {len(problems)} bad rows, listed in {listing}")
    held_pairs = sorted(held_pairs)[:: max(1, len(held_pairs) // args.eval_samples)][: args.eval_samples]
    held_texts = set() if held_pairs else set(sorted(held_texts)[: args.eval_samples])
    held = held_texts.union(*held_pairs)  # also where it stands under another query
    phase1 = sorted(phase1 - held)
    pairs = [(q, d, [t for t in n if t not in held]) for q, d, n in pairs if q not in held and d not in held]
    if (not args.skip_phase1 and not phase1) or (not args.skip_phase2 and not pairs) or not held:
        found = f"{len(phase1)} texts for phase 1, {len(pairs)} pairs for phase 2, {len(held)} held-out texts"
        raise ValueError(f"nothing to train or validate on: {found}; give more data, or another --eval_fraction")
    encoded = [text.encode("utf-8") for _, text in table]
    negatives = np.full((len(pairs), max((len(n) for _, _, n in pairs), default=0)), -1, np.int64)
    for row, (_, _, found) in enumerate(pairs):
        negatives[row, : len(found)] = found
    queries, documents = sorted({q for q, _ in held_pairs}), sorted({d for _, d in held_pairs} | held_texts)
    lists = {"phase1": phase1, "queries": [pair[0] for pair in pairs], "positives": [pair[1] for pair in pairs],
             "eval_queries": queries, "eval_documents": documents, "offsets": np.cumsum([0, *map(len, encoded)]),
             "eval_pairs": np.reshape([(queries.index(q), documents.index(d)) for q, d in held_pairs], (-1, 2))}
    return {name: np.array(numbers, np.int64) for name, numbers in lists.items()} | {
        "negatives": negatives, "kinds": np.array([kind for kind, _ in table], np.uint8),
        "text": np.frombuffer(b"".join(encoded), np.uint8)}

def write_cache(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    """Arrays as .npy files and, last, a manifest of their sizes and checksums. (rank 0 only)"""
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in arrays.items():
        write_array(folder / f"{name}.npy", array)
    sizes = {f"{n}.npy": [(folder / f"{n}.npy").stat().st_size, sha256_of(folder / f"{n}.npy")] for n in arrays}
    atomic_write(folder / "manifest.json", lambda file: file.write(json.dumps(sizes, indent=1).encode()))

def write_array(path: Path, array: np.ndarray) -> None:
    if not atomic_write(path, lambda file: np.save(Namespace(write=file.write), array)):  # a file's own errors are lost
        raise OSError(f"no room for {path}: free space there or give another --cache_dir")

def sha256_of(path: Path) -> str:
    return hashlib.sha256(np.memmap(path, np.uint8, "r")).hexdigest()

def load_arrays(folder: Path, names: str) -> list[np.ndarray]:
    """Arrays of write_cache, memory-mapped."""
    return [np.load(folder / f"{name}.npy", mmap_mode="r") for name in names.split()]

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

def source_key(name: str) -> list:
    """What identifies a data source: a file's path, size and time; for pydocs the installed versions."""
    if Path(name).is_file():
        return [str(Path(name).resolve()), Path(name).stat().st_size, Path(name).stat().st_mtime_ns]
    return [name, sys.version, np.__version__, torch.__version__] if name == "pydocs" else [name]

def cached(args: Namespace, ddp: DDPContext, folder: Path, make: Callable[[], dict[str, np.ndarray]]) -> None:
    """Let rank 0 fill a cache folder with the arrays that `make` returns, unless it is complete. (all ranks)"""
    def build() -> bool | None:
        return cache_is_whole(folder, args.verify_data) or write_cache(folder, make())
    on_rank0(ddp, build)

def load_data(args: Namespace, ddp: DDPContext) -> Corpus:
    """The corpus of this run, built on rank 0 if it is not cached, memory-mapped on all ranks. Sets args.data_key."""
    settings = "max_samples_phase1 max_samples_phase2 eval_fraction eval_samples max_chars skip_bad_data".split()
    sources = [[p, source_key(getattr(args, f"phase{p}_data"))] for p in needed_phases(args)]
    folder = cache_folder(args, "corpus", sources, [getattr(args, s) for s in settings])
    cached(args, ddp, folder, functools.partial(build_corpus, args))
    corpus = Corpus(folder)
    args.data_key = corpus.key[:16]
    require_same(ddp, "the training data", corpus.key.encode())
    log0(f"data: {len(corpus.phase1)} texts in phase 1, {len(corpus.queries)} queries in phase 2, held out: "
         f"{len(corpus.eval_queries)} queries, {len(corpus.eval_documents)} documents")
    return corpus

class Tokens:
    """Token ids of all texts, memory-mapped: those of text i are ids[offsets[i]:offsets[i + 1]]."""
    def __init__(self, folder: Path, pad_id: int):
        self.ids, self.offsets = load_arrays(folder, "ids offsets")
        self.lengths, self.pad_id = np.diff(self.offsets), pad_id
    def padded(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """(ids, mask), each (B, L) int64, of texts `rows`, padded on the right to the longest of them."""
        column = np.arange(self.lengths[rows].max())
        mask = column < self.lengths[rows][:, None]
        ids = self.ids[np.minimum(self.offsets[rows][:, None] + column, len(self.ids) - 1)]
        return tuple(torch.from_numpy(a.astype(np.int64)) for a in (np.where(mask, ids, self.pad_id), mask))
    def groups(self, rows: np.ndarray, device: torch.device) -> list[tuple[Tensor, Tensor, Tensor]]:
        """`rows` in groups of similar length (at most 15 % shorter): (places in rows, ids, mask) on the device."""
        smallest = 16 if device.type == "cpu" else 64
        order = np.argsort(-self.lengths[rows], kind="stable")
        lengths, cuts = self.lengths[rows][order], [0]
        for i in range(smallest, len(order) - smallest // 2):
            if i - cuts[-1] >= smallest and lengths[i] < 0.85 * lengths[cuts[-1]]:
                cuts.append(i)
        parts = [(torch.from_numpy(part), *self.padded(rows[part])) for part in np.split(order, cuts[1:])]
        pin = device.type == "cuda"  # copies from pinned memory do not stop the host
        return [tuple((t.pin_memory() if pin else t).to(device, non_blocking=True) for t in part) for part in parts]

def load_tokens(args: Namespace, ddp: DDPContext, corpus: Corpus, student) -> Tokens:
    """Tokenise every text once with the student's tokenizer and prompts. (all ranks; cached)"""
    tokenizer, prompts, count = student.tokenizer, list(student.prompts.values()), len(corpus.kinds)
    definition = re.sub(r'"(truncation|padding)":\s*(\{[^}]*\}|null),?', "", tokenizer.backend_tokenizer.to_str())
    folder = cache_folder(args, "tokens", corpus.key, prompts, student.max_seq_length, definition)
    def tokenise() -> dict[str, np.ndarray]:
        pieces: list[np.ndarray] = []
        for low in tqdm(range(0, count, 1024), "tokenise", disable=not sys.stderr.isatty()):
            batch = [prompts[corpus.kinds[i]] + corpus.text(i) for i in range(low, min(low + 1024, count))]
            ids = tokenizer(batch, truncation=True, max_length=student.max_seq_length)["input_ids"]
            pieces += [np.array(i, np.int32) for i in ids]
        return {"ids": np.concatenate(pieces), "offsets": np.cumsum([0, *map(len, pieces)], dtype=np.int64)}
    cached(args, ddp, folder, tokenise)
    return Tokens(folder, tokenizer.pad_token_id or 0)

def model_key(name: str) -> list:
    """What identifies a model folder: names, sizes and both ends (1 MiB) of its files. A hub name is itself."""
    key: list = [] if Path(name).is_dir() else [name]
    for path in sorted(p for p in Path(name).rglob("*") if p.is_file() and p.suffix != ".md"):
        data = np.memmap(path, np.uint8, "r") if path.stat().st_size else b""
        ends = hashlib.sha256(bytes(data[: 1 << 20]) + bytes(data[-(1 << 20) :])).hexdigest()
        key.append([str(path.relative_to(name)), len(data), ends])
    return key

def teacher_key(args: Namespace, corpus: Corpus, name: str) -> list:
    settings = "revision max_length dim query_prompt document_prompt".split()
    return [model_key(name), [getattr(args, f"teacher_{s}") for s in settings], corpus.key]

def teacher_vectors(args: Namespace, ddp: DDPContext, corpus: Corpus, name: str) -> np.ndarray:
    """The teacher's unit vectors (N, D) float16 of all texts, memory-mapped, computed once. (all ranks) Blocks of the
    length-sorted texts are dealt to the ranks and written one by one, so that a killed run goes on where it was."""
    folder = cache_folder(args, "teacher", teacher_key(args, corpus, name))
    block = min(BLOCK, max(64, len(corpus.kinds) // 4096 * 64))  # of few texts too: no rank waits long for another
    files = [folder / f"block-{block}-{b:06d}.npy" for b in range(-(-len(corpus.kinds) // block))]
    order = np.argsort(-np.diff(corpus.offsets), kind="stable")  # longest first: out of memory at once
    def missing() -> list[int] | None:
        if cache_is_whole(folder, args.verify_data):
            return None
        folder.mkdir(parents=True, exist_ok=True)
        return [b for b, file in enumerate(files) if not file.exists()]
    def join() -> None:
        blocks = np.concatenate([np.load(file) for file in files])
        write_cache(folder, {"vectors": blocks[np.argsort(order)]})
        for file in files:
            file.unlink()
    todo = on_rank0(ddp, missing)
    if todo is not None:
        teacher = load_teacher(args, name, ddp.device)
        prompts, options = list(teacher.prompts.values()), {"convert_to_tensor": True, "show_progress_bar": False}
        log0(f"encoding with {args.teacher_model}: {len(todo)} blocks of {block} texts, prompts {prompts}")
        bar = tqdm(todo[ddp.rank :: ddp.world_size], "teacher", disable=ddp.rank > 0 or not sys.stderr.isatty())
        for rows, file in ((order[b * block : (b + 1) * block], files[b]) for b in bar):
            batch = [prompts[corpus.kinds[i]] + corpus.text(i) for i in rows]
            vectors = teacher.encode(batch, batch_size=args.teacher_batch_size, **options).float()
            vectors = F.normalize(vectors[:, : args.teacher_dim], dim=-1)
            if not torch.isfinite(vectors).all():
                raise ValueError(f"{args.teacher_model}: non-finite vectors of {batch[0][:80]!r} or its neighbours")
            write_array(file, vectors.cpu().numpy().astype(np.float16))
            StepGuard.beat = time.monotonic()
            if StepGuard.signal:  # the blocks written so far are the checkpoint
                sys.exit(stop_status(signal.Signals(StepGuard.signal).name))
        barrier(ddp)
        on_rank0(ddp, join)
    (vectors,) = load_arrays(folder, "vectors")
    log0(f"teacher vectors: {len(vectors)} x {vectors.shape[1]}" + ", cached: no teacher forward pass" * (todo is None))
    return vectors

def mine_negatives(args: Namespace, ddp: DDPContext, corpus: Corpus, vectors: np.ndarray, name: str) -> np.ndarray:
    """Negatives (N2, K + mined): those of the data, then mined by the teacher's scores. (all ranks; cached)"""
    if not args.mine_negatives or args.skip_phase2:
        return corpus.negatives
    folder = cache_folder(args, "mined", teacher_key(args, corpus, name), args.mine_negatives, args.mine_margin)
    def load(numbers: np.ndarray) -> Tensor:
        return torch.from_numpy(vectors[numbers]).to(ddp.device).float()
    if not on_rank0(ddp, cache_is_whole, folder, args.verify_data):
        pool = np.unique(np.concatenate([corpus.positives, corpus.negatives[corpus.negatives >= 0]]))
        mined = torch.zeros(len(corpus.queries), args.mine_negatives, dtype=torch.int64, device=ddp.device)
        documents, numbers = load(pool), torch.from_numpy(pool).to(ddp.device)
        for low in range(ddp.rank * 256, len(mined), ddp.world_size * 256):
            part = slice(low, low + 256)
            query, positive = load(corpus.queries[part]), load(corpus.positives[part])
            scores = query @ documents.T
            scores[scores > (query * positive).sum(1, keepdim=True) - args.mine_margin] = -math.inf
            best, places = scores.topk(min(args.mine_negatives, len(pool)))
            mined[part, : best.shape[1]] = (numbers[places] + 1).masked_fill(best == -math.inf, 0)  # 0: none
            StepGuard.beat = time.monotonic()
        if ddp.world_size > 1:
            dist.all_reduce(mined)
        on_rank0(ddp, write_cache, folder, {"mined": mined.cpu().numpy() - 1})
    (mined,) = load_arrays(folder, "mined")
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
    """A `cut` for GlobalBatchSampler: batches of similar length, shuffled, so that no rank waits for an unlucky one."""
    def cut(ids: np.ndarray, epoch: int) -> np.ndarray:
        batches = ids[np.argsort(lengths[ids], kind="stable")].reshape(-1, global_batch)
        return np.random.default_rng([seed, epoch, int(ids[0])]).permutation(batches)
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
    """Latent semantic analysis (Deerwester et al. 1990), TF-IDF and truncated SVD of `texts`, as a SentenceTransformer
    of stock modules: both are linear, so a text's vector is the normalised mean over its words of idf * SVD row."""
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
    modules = [StaticEmbedding(tokenizer, embedding_weights=weights), Normalize()]
    return SentenceTransformer(modules=modules, device="cpu")

def build_bert_student(texts: list[str], folder: Path, size: str, max_length: int, seed: int):
    """A randomly initialised BERT, mean pooling, and a WordPiece tokenizer of `texts`: their most frequent words whole,
    all others by their letters (the library's trainer makes another vocabulary every time)."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, BertTokenizerFast
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
    layers, hidden = map(int, size.split("x"))
    config = BertConfig(vocab_size=tokenizer.get_vocab_size(), hidden_size=hidden, num_hidden_layers=layers,
                        intermediate_size=2 * hidden, num_attention_heads=max(1, hidden // 32),
                        max_position_embeddings=max_length, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        BertModel(config).save_pretrained(folder)
    BertTokenizerFast(tokenizer_object=tokenizer, model_max_length=max_length).save_pretrained(folder)
    network = Transformer(str(folder), max_seq_length=max_length)
    return SentenceTransformer(modules=[network, Pooling(hidden)], device="cpu")

def builtin_model(args: Namespace, ddp: DDPContext, corpus: Corpus, name: str) -> str:
    """The folder of a builtin:lsa or builtin:bert model fitted on the training texts; other names as they are."""
    if not name.startswith("builtin:"):
        return name
    kind, _, size = name.removeprefix("builtin:").partition(":")
    if not re.fullmatch({"lsa": r"\d*", "bert": r"(\d+x\d+)?"}.get(kind, "-"), size):
        raise ValueError(f"{name!r}: the builtin models are builtin:lsa[:DIM] and builtin:bert[:LAYERSxHIDDEN]")
    length = args.student_max_length or 64
    own = (args.seed, length) if kind == "bert" else 0
    folder = cache_folder(args, f"builtin-{kind}", corpus.key, size, LSA_DIM, BERT_SIZE, own)
    text, temporary = corpus.text, folder.with_name(folder.name + ".tmp")
    def build() -> None:
        if folder.exists():
            return
        log0(f"fitting {name} on the training texts")
        shutil.rmtree(temporary, ignore_errors=True)
        if kind == "lsa":  # a query and its document as one text: words that meet across the two share directions
            joined = [f"{text(q)}\n{text(d)}" for q, d in zip(corpus.queries, corpus.positives, strict=True)]
            model = build_lsa_teacher(joined or [text(i) for i in corpus.phase1], int(size or LSA_DIM))
        else:
            found = [text(i) for i in np.unique(np.concatenate([corpus.phase1, corpus.queries, corpus.positives]))]
            model = build_bert_student(found, temporary / "bert", size or BERT_SIZE, length, args.seed)
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
        raise ValueError(f"--{what}_model {name}: not a model folder, not on this machine and not fetched from the hub "
                         f"({str(error).splitlines()[0][:160]}); without a download: a folder, {local}") from error

def set_prompts(model, query: str | None, document: str | None, default_query: str = "") -> None:
    """Texts before queries and documents: as given, else the model's own, else none."""
    own = model.prompts or {}
    query = own.get("query") or default_query if query is None else query
    model.prompts = {"query": query, "document": own.get("document") or "" if document is None else document}

def load_teacher(args: Namespace, name: str, device: torch.device):
    """The teacher on `device`, in bfloat16 on accelerators (the default one is unstable in fp16)."""
    infly = name.startswith("infly/")  # its own code, without which it is a different, causal model
    options = {"trust_remote_code": args.trust_remote_code or infly, "revision": args.teacher_revision}
    options |= {"model_kwargs": {"dtype": torch.bfloat16}} if device.type != "cpu" else {}
    options |= {"config_kwargs": {"use_cache": False}} if infly else {}
    teacher = load_model(name, "teacher", **options)
    set_prompts(teacher, args.teacher_query_prompt, args.teacher_document_prompt, INFLY_PROMPT if infly else "")
    if args.teacher_max_length:
        if teacher.max_seq_length == math.inf:
            raise ValueError(f"--teacher_max_length: {name} has no maximum length")
        teacher.max_seq_length = args.teacher_max_length
    if (args.teacher_dim or 0) > teacher.get_embedding_dimension():
        raise ValueError(f"--teacher_dim {args.teacher_dim}: {name} has {teacher.get_embedding_dimension()} dimensions")
    return teacher.to(device).eval()

def keep_layers(student, count: int) -> None:
    """Keep `count` evenly spaced layers of the transformer, first and last included (layer reduction)."""
    network, depth = student[0].model, student[0].model.config.num_hidden_layers
    stacks = [(m, n) for m in network.modules() for n, c in m.named_children()
              if isinstance(c, torch.nn.ModuleList) and len(c) == depth]
    if not stacks or not 1 <= count <= depth:
        raise ValueError(f"--student_layers {count}: the student has {depth} layers in {len(stacks)} stacks")
    kept = [int(i * (depth - 1) / max(1, count - 1) + 0.5) for i in range(count)]
    for parent, name in stacks:
        setattr(parent, name, torch.nn.ModuleList(getattr(parent, name)[i] for i in kept))
    network.config.num_hidden_layers = count
    log0(f"student keeps layers {kept} of {depth}")

def load_student(args: Namespace, name: str):
    """The student as a SentenceTransformer that ends in Normalize, without a head."""
    from sentence_transformers.sentence_transformer.modules import Normalize
    dropout = args.student_dropout
    config = {} if dropout is None else {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    options = {"config_kwargs": config, "model_kwargs": {"dtype": torch.float32}}
    student = load_model(name, "student", trust_remote_code=args.trust_remote_code, **options)
    if not hasattr(student[0], "model") or not hasattr(student.tokenizer, "backend_tokenizer"):
        raise ValueError(f"--student_model {name}: {type(student[0]).__name__} is no transformer with a fast tokenizer")
    if args.student_layers:
        keep_layers(student, args.student_layers)
    student.max_seq_length = args.student_max_length or student.max_seq_length
    if student.max_seq_length is None:
        raise ValueError(f"--student_model {name} states no maximum length: give --student_max_length")
    set_prompts(student, args.student_query_prompt, args.student_document_prompt)
    if any(student.prompts.values()) and not getattr(student[1], "include_prompt", True):
        raise ValueError(f"--student_model {name} pools without its prompts: give --student_query_prompt= "
                         "--student_document_prompt=")
    if not isinstance(student[-1], Normalize):
        student.append(Normalize())
    return student

class Student(torch.nn.Module):
    """A SentenceTransformer as one forward pass over groups of texts of similar length."""
    def __init__(self, model, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.model, self.dtype, self.device_type, self.embed = model, dtype, device.type, self.embed_group
    def embed_group(self, ids: Tensor, mask: Tensor) -> Tensor:
        """ids, mask (B, L) int64 -> unit vectors (B, D) float32. Pooling and head run in float32."""
        with torch.autocast(self.device_type, self.dtype, enabled=self.dtype != torch.float32):
            features = self.model[0]({"input_ids": ids, "attention_mask": mask})
        features["token_embeddings"] = features["token_embeddings"].float()
        for module in list(self.model)[1:]:  # a slice of it would be a new SentenceTransformer
            features = module(features)
        return features["sentence_embedding"]
    def forward(self, groups: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
        """Groups of (places, ids, mask) -> (B, D), in the order of the texts before grouping."""
        vectors = torch.cat([self.embed(ids, mask) for _, ids, mask in groups])
        return torch.empty_like(vectors).index_copy(0, torch.cat([places for places, _, _ in groups]), vectors)

def build_student(args: Namespace, ddp: DDPContext, name: str, teacher_dim: int) -> Student:
    """The student with its head, if any, on the device. Stock modules cannot say the original's norm before GELU."""
    from sentence_transformers.sentence_transformer.modules import Dense, LayerNorm, Normalize
    torch.manual_seed(args.seed)  # the same on all ranks, unlike dropout's
    model, hidden = load_student(args, name), args.projection_hidden
    width = model.get_embedding_dimension()
    if args.use_projection:
        model.extend([Dense(width, hidden, activation_function=torch.nn.GELU()), LayerNorm(hidden),
                      Dense(hidden, teacher_dim, activation_function=torch.nn.Identity()), Normalize()])
        log0(f"projection mode: student {width} -> {hidden} -> teacher {teacher_dim} dimensions")
    elif teacher_dim < width:
        raise ValueError(f"--use_projection=False needs {width} teacher dimensions for this student, not {teacher_dim}")
    else:
        log0(f"MRL mode, no projection: the target is the first {width} of {teacher_dim} teacher dimensions")
    width = model.get_embedding_dimension()
    if any(d > width for d in args.matryoshka_dims):
        raise ValueError(f"--matryoshka_dims {args.matryoshka_dims}: the student's vector has {width} dimensions")
    return Student(model.to(ddp.device), resolve_precision(args.precision, ddp.device), ddp.device)

def freeze_unused(student: Student, tokens: Tokens, device: torch.device) -> None:
    """Freeze what gets no gradient (BERT's pooler), so that DDP need not look for it in every step. It stays in the
    model, so that the saved one loads without complaint."""
    ids, mask = tokens.padded(np.arange(min(2, len(tokens.lengths))))
    with torch.random.fork_rng():
        student.embed(ids.to(device), mask.to(device)).sum().backward()
    unused = [name for name, p in student.named_parameters() if p.grad is None]
    for name, parameter in student.named_parameters():
        parameter.requires_grad_(name not in unused)
    student.zero_grad(set_to_none=True)
    if unused:
        log0(f"not trained, since they get no gradient: {', '.join(unused)}")

def keep_freed_memory() -> None:
    """Make glibc keep the memory of freed tensors for the next ones: fetching it can be half of a CPU's step."""
    import ctypes
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 2**31 - 1), mallopt(-1, 2**31 - 1)  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD

# ---- Loss ----------------------------------------------------------------------------------------

def distance_loss(student: Tensor, target: Tensor, l2_weight: float, cosine_weight: float) -> Tensor:
    """l2_weight * |s - t|^2 (summed over D) + cosine_weight * (1 - cos(s, t)); s, t (B, D) of unit length -> (B,)."""
    cosine = (student * target).sum(-1)
    return l2_weight * (student - target).square().sum(-1) + cosine_weight * (1 - cosine)

def infonce_loss(query: Tensor, documents: Tensor, labels: Tensor, masked: Tensor, temperature: float) -> tuple:
    """-log softmax(q . d / T) at each query's positive (van den Oord et al. 2018), in float32. query (B, D), documents
    (M, D), labels (B,) columns of the positives, masked (B, M) columns left out -> losses (B,), logits (B, M)."""
    logits = (query.float() @ documents.float().T / temperature).masked_fill(masked, -math.inf)
    return F.cross_entropy(logits, labels, reduction="none"), logits

def kl_loss(logits: Tensor, teacher_logits: Tensor, masked: Tensor) -> Tensor:
    """KL(softmax(teacher_logits) || softmax(logits)) over the columns that are not masked; (B, M) -> (B,)."""
    target = F.log_softmax(teacher_logits.masked_fill(masked, -math.inf), dim=-1)
    return (target.exp() * (target - F.log_softmax(logits, dim=-1))).masked_fill(masked, 0.0).sum(-1)

def false_negatives(ids: Tensor, labels: Tensor, teacher_scores: Tensor, margin: float) -> Tensor:
    """Columns that must not count as negatives (B, M): absent (id -1), the positive's text again, or scored by
    the teacher above the positive + margin (Solatorio 2024). ids (M,), labels (B,), teacher_scores (B, M)."""
    above = teacher_scores > teacher_scores.gather(1, labels[:, None]) + margin
    return (above | (ids == -1) | (ids == ids[labels][:, None])).scatter(1, labels[:, None], False)

class GatherRows(torch.autograd.Function):
    """All ranks' rows (W * B, ...) in rank order; the gradient flows back to every rank's own rows."""
    @staticmethod
    def forward(ctx, rows: Tensor) -> Tensor:
        ctx.size, gathered = len(rows), rows.new_empty(dist.get_world_size() * len(rows), *rows.shape[1:])
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
        gather(gathered, rows.contiguous())
        return gathered
    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient[dist.get_rank() * ctx.size :][: ctx.size]

def gather_rows(rows: Tensor, most: int, world_size: int) -> Tensor:
    """Rows of all ranks (W * most, ...), each rank's padded with zeros to `most`; differentiable. (all ranks)"""
    rows = F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, most - len(rows)))
    return GatherRows.apply(rows) if world_size > 1 else rows

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

@torch.no_grad()
def embed_rows(task: Task, rows: np.ndarray) -> Tensor:
    """The student's vectors (N, D) of texts `rows` on every rank, in the same batches on any number. (all ranks)"""
    ddp, student, size = task.ddp, task.student, task.args.eval_batch_size
    order = np.argsort(task.tokens.lengths[rows], kind="stable")
    vectors = torch.zeros(len(rows), student.model.get_embedding_dimension(), device=ddp.device)
    for low in range(ddp.rank * size, len(rows), ddp.world_size * size):
        places = order[low : low + size]
        ids, mask = task.tokens.padded(rows[places])
        vectors[torch.from_numpy(places).to(ddp.device)] = student.embed_group(ids.to(ddp.device), mask.to(ddp.device))
        StepGuard.beat = time.monotonic()
    if ddp.world_size > 1:
        dist.all_reduce(vectors)  # every row is zero on all ranks but one
    return vectors

def ranking_metrics(ddp: DDPContext, queries: Tensor, documents: Tensor, pairs: np.ndarray) -> dict[str, float]:
    """nDCG@10 (Jarvelin and Kekalainen 2002, binary), MRR@10 and recall@100 of unit vectors, queries (Q, D) against
    documents (M, D). pairs (P, 2): (query, document) that match. Ties count against us. (all ranks)"""
    sums, relevant = torch.zeros(4, dtype=torch.float64), [pairs[pairs[:, 0] == q, 1] for q in range(len(queries))]
    for low in range(ddp.rank * 64, len(queries), ddp.world_size * 64):
        for q, scores in enumerate(queries[low : low + 64] @ documents.T, low):
            ranks = (scores[None, :] >= scores[relevant[q].tolist()][:, None]).sum(1).sort().values.double().cpu()
            found, ideal = ranks[ranks <= 10], torch.arange(1.0, 1 + min(10, len(ranks)), dtype=torch.float64)
            gain, most = ((1 / torch.log2(r + 1)).sum() for r in (found, ideal))
            recall = (ranks <= 100).double().mean()
            sums += torch.tensor([gain / most, 1 / found[0] if len(found) else 0.0, recall, 1.0])
    total = reduce_sums(ddp, dict(zip(("ndcg@10", "mrr@10", "recall@100", "queries"), sums, strict=True)))
    count = total.pop("queries")
    return {name: value / count for name, value in total.items()}

def targets(vectors: np.ndarray, rows: np.ndarray, dim: int, device: torch.device) -> Tensor:
    """Teacher's vectors (B, dim) float32 of texts `rows`, renormalised after the cut to `dim`."""
    return F.normalize(torch.from_numpy(vectors[rows, :dim]).to(device).float(), dim=-1)

def evaluate(task: Task, teacher: bool = False) -> dict[str, float]:
    """Held-out metrics of the student or of the teacher's own vectors; the first decides what is best. (all ranks)"""
    corpus, student = task.corpus, task.student.eval()
    dim = task.vectors.shape[1] if teacher else student.model.get_embedding_dimension()
    wanted = functools.partial(targets, task.vectors, dim=dim, device=task.ddp.device)
    embed = wanted if teacher else functools.partial(embed_rows, task)
    documents = embed(rows=corpus.eval_documents)
    metrics = {"teacher_cosine": (documents * wanted(rows=corpus.eval_documents)).sum(1).double().mean().item()}
    if len(corpus.eval_pairs):
        queries = embed(rows=corpus.eval_queries)
        metrics = ranking_metrics(task.ddp, queries, documents, corpus.eval_pairs) | metrics
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
    args: Namespace
    ddp: DDPContext
    log: RunLog
    corpus: Corpus
    tokens: Tokens
    vectors: np.ndarray  # (N, D) float16: the teacher's, of all texts
    negatives: np.ndarray  # (N2, K): those of the data and the mined ones
    student: Student
    teacher: dict[str, float] = field(default_factory=dict)  # held-out metrics
    untrained: dict[str, float] = field(default_factory=dict)
    history: list[dict] = field(default_factory=list)

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
    peak: float = 0.0  # learning rate
    owed: bool = False  # the evaluation after this step has yet to be made

def phase1_batches(task: Task, sampler: GlobalBatchSampler, epoch: int) -> Iterator[list]:
    """Per optimizer step, this rank's micro-batches (items, groups, targets), ready on the device."""
    dim, device = task.student.model.get_embedding_dimension(), task.ddp.device
    for batch in sampler.batches(sampler.start):
        dealt = [(items, task.corpus.phase1[items]) for items in sampler.deal(batch)]
        yield [(i, task.tokens.groups(rows, device), targets(task.vectors, rows, dim, device)) for i, rows in dealt]

def phase1_step(task: Task, model: torch.nn.Module, step: list, total: int, scaler) -> Tensor:
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

class PairBatch(NamedTuple):
    """A phase-2 step as this rank needs it: its micro-batches, and the columns of the step's score matrix."""
    micro: list  # of (items, groups, targets, negatives (b, K) with -1); the texts: queries, positives, negatives
    ids: Tensor  # (M,): every rank's positives, then negatives, -1 where there is none
    labels: Tensor  # (B,): columns of this rank's positives
    teacher_scores: Tensor  # (B, M)
    most: int  # queries of the largest rank
    documents: int  # of all ranks

def phase2_batches(task: Task, sampler: GlobalBatchSampler, epoch: int) -> Iterator[PairBatch]:
    """One PairBatch per optimizer step. Every rank knows the plan, so only vectors travel between ranks."""
    args, ddp, corpus = task.args, task.ddp, task.corpus
    dim = task.student.model.get_embedding_dimension()
    wanted = functools.partial(targets, task.vectors, dim=dim, device=ddp.device)
    for batch in sampler.batches(sampler.start):
        dealt = [np.concatenate(sampler.deal(batch, r)) for r in range(ddp.world_size)]
        drawn = [draw_negatives(task.negatives, items, args.num_negatives, args.seed, epoch) for items in dealt]
        most, mine, own = len(dealt[0]), dealt[ddp.rank], drawn[ddp.rank]
        positives = [corpus.positives[items][:, None] for items in dealt]  # padded, as the negatives, to `most` rows
        parts = [np.pad(p, ((0, most - len(p)), (0, 0)), constant_values=-1).ravel() for p in positives + drawn]
        ids, micro, low = np.concatenate(parts), [], 0
        for items in sampler.deal(batch):
            part, low = own[low : low + len(items)], low + len(items)
            rows = np.concatenate([corpus.queries[items], corpus.positives[items], part[part >= 0]])
            part = torch.from_numpy(part).to(ddp.device)
            micro.append((items, task.tokens.groups(rows, ddp.device), wanted(rows=rows), part))
        labels = torch.arange(len(mine), device=ddp.device) + ddp.rank * most
        scores = wanted(rows=corpus.queries[mine]) @ wanted(rows=np.maximum(ids, 0)).T
        yield PairBatch(micro, torch.from_numpy(ids).to(ddp.device), labels, scores, most, int((ids >= 0).sum()))

def contrastive_loss(task: Task, batch: PairBatch, vectors: list[Tensor], total: int) -> tuple[Tensor, dict]:
    """Sum over this rank's queries of a step's losses, from the vectors of its micro-batches' texts, and
    {name: (sum, count)}. Divided by `total`, its sum over ranks is the mean over the step. (all ranks)"""
    args, parts, is_query = task.args, [], []
    for part, (items, _, _, ids) in zip(vectors, batch.micro, strict=True):
        b, table = len(items), part.new_zeros(*ids.shape, part.shape[1])
        table = table.masked_scatter((ids >= 0)[..., None], part[2 * b :])
        parts.append((part[:b], part[b : 2 * b], table))  # (b, D), (b, D), (b, K, D)
        is_query.append(torch.arange(len(part), device=part.device) < b)
    queries, positives, negatives = (torch.cat(p) for p in zip(*parts, strict=True))
    texts, wanted, is_query = torch.cat(vectors), torch.cat([m[2] for m in batch.micro]), torch.cat(is_query)
    positives, negatives = (gather_rows(rows, batch.most, task.ddp.world_size) for rows in (positives, negatives))
    documents = torch.cat([positives, negatives.flatten(0, 1)])
    masked = false_negatives(batch.ids, batch.labels, batch.teacher_scores, args.false_negative_margin)
    dims, whole, sums = [*args.matryoshka_dims, queries.shape[1]], 0.0, {}
    for dim in dims:
        q, d, s, t = (F.normalize(x[:, :dim], dim=-1) for x in (queries, documents, texts, wanted))
        infonce, logits = infonce_loss(q, d, batch.labels, masked, args.temperature)
        far = distance_loss(s, t, args.phase2_l2_weight, 0.0)
        # queries and documents weigh the same, each as the mean over the whole step
        pull = 0.5 * (far[is_query].sum() + far[~is_query].sum() * (total / batch.documents))
        sums = {"infonce": infonce.sum(), "distance": pull}
        loss = args.infonce_weight * sums["infonce"] + pull
        if args.kl_weight:
            sums["kl"] = kl_loss(logits, batch.teacher_scores / args.temperature, masked).sum()
            loss = loss + args.kl_weight * sums["kl"]
        whole = whole + loss / len(dims)
    return whole, {name: (value, len(queries)) for name, value in {"loss": whole, **sums}.items()}

def phase2_step(task: Task, model: torch.nn.Module, batch: PairBatch, total: int, scaler) -> Tensor:
    """As phase1_step, for `total` queries. With several micro-batches, all vectors come first without a graph, then the
    loss and its gradient by them, then each micro-batch again with its part (gradient caching, Gao et al. 2021)."""
    scale, device, groups = task.ddp.world_size / total, task.ddp.device, [m[1] for m in batch.micro]
    if len(groups) == 1:
        loss, sums = contrastive_loss(task, batch, [model(groups[0])], total)
        scaler.scale(loss * scale).backward()
    else:
        devices = [] if device.type == "cpu" else [device]
        # fork_rng turns the random state back afterwards: the second pass has the same dropout
        with torch.no_grad(), torch.random.fork_rng(devices, device_type=device.type):
            vectors = [unwrap(model)(group) for group in groups]
        loss, sums = contrastive_loss(task, batch, [v.requires_grad_() for v in vectors], total)
        gradients = torch.autograd.grad(loss * scale, vectors)
        for number, (group, gradient) in enumerate(zip(groups, gradients, strict=True), 1):
            with sync_gradients(model, number == len(groups)):
                scaler.scale((model(group) * gradient).sum()).backward()
    task.log.add(len(batch.labels), **sums)
    return loss.detach()

def checkpoint(task: Task, phase: Phase, optimizer, guard: StepGuard, total: int, best: bool, done: bool) -> None:
    """Everything needed to go on bit by bit, written by rank 0. (all ranks)"""
    args, ddp, log, states = task.args, task.ddp, task.log, rng_states(task.ddp)
    StepGuard.beat = math.inf  # however long rank 0 takes
    if ddp.rank == 0:
        state = {
            "format": 1, "script": "train_ddp.py", "args": vars(args), "world_size": ddp.world_size,
            "global_batch": total, "model": task.student.state_dict(), "optimizer": optimizer.state_dict(),
            "scaler": guard.scaler.state_dict(), "phase": vars(phase), "step": phase.first + phase.step,
            "epoch": phase.epoch, "done": done, "rng": states, "untrained": task.untrained, "history": task.history,
            "bad_steps": guard.bad_steps, "wandb_id": log.wandb_id, "speed": (log.final_loss, log.speed),
            "wall_s": log.wall + time.monotonic() - log.started}
        written = save_checkpoint(args.output_dir, state, state["step"], args.keep_checkpoints, best)
        if best:
            kept = {name: state[name] for name in ("format", "script", "args", "model", "step", "phase")}
            path = Path(args.output_dir) / f"phase{phase.number}_best.pt"
            written &= atomic_write(path, lambda file: torch.save(kept, file))  # noqa: TID251
        if done and not written:
            raise OSError(f"phase {phase.number}'s end could not be saved: free space in {args.output_dir}, run again")
    barrier(ddp)
    StepGuard.beat = time.monotonic()
    log.reset()

def train(task: Task, phase: Phase, state: dict | None, total: int, micro_steps: int) -> str:
    """Train one phase, from `state` if it is this phase's. Returns why it was stopped, or ''. (all ranks)"""
    args, ddp, log, student, number = task.args, task.ddp, task.log, task.student, phase.number
    # phase 1: windows of 32 length-sorted batches; phase 2: random batches, sorted so that ranks get equal work
    lengths, window = task.tokens.lengths, 32 if number == 1 else 1
    work = lengths[task.corpus.phase1 if number == 1 else task.corpus.positives]
    if number == 2:
        work = work + (lengths[task.negatives] * (task.negatives >= 0)).sum(1)
    cut, seed = bucket_by_length(work, total, args.seed), args.seed + number - 1
    sampler = GlobalBatchSampler(len(work), total, micro_steps, seed, ddp, window, cut)
    epochs, lr = getattr(args, f"phase{number}_epochs"), getattr(args, f"phase{number}_lr")
    per_epoch = len(sampler) // micro_steps
    peak = phase.peak = phase.peak or scaled_lr(lr, args.lr_scaling, ddp.world_size)  # stays on other world sizes
    steps = min(epochs * per_epoch, args.max_steps or math.inf)
    warmup = min(steps, int(args.warmup_ratio * steps) if args.warmup_steps is None else args.warmup_steps)
    # no decay on biases, norms and embeddings; fused: one kernel that can skip its update on the device
    trained = [(p, p.ndim < 2 or "embeddings." in n) for n, p in student.named_parameters() if p.requires_grad]
    groups = [{"params": [p for p, plain in trained if plain == kind], "weight_decay": decay}
              for kind, decay in ((True, 0.0), (False, args.weight_decay))]
    optimizer = torch.optim.AdamW(groups, lr=peak, fused=True)
    guard = StepGuard(args, ddp, optimizer, student.dtype, log.started)
    torch.manual_seed(args.seed + ddp.rank)  # dropout differs between ranks
    if state:
        student.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        guard.scaler.load_state_dict(state["scaler"])
        restore_rng(state["rng"], ddp, args.seed)
        guard.bad_steps = state["bad_steps"]
    model = wrap_ddp(student, ddp)
    phases = {1: (phase1_batches, phase1_step, "texts"), 2: (phase2_batches, phase2_step, "queries")}
    make_batches, run, what = phases[number]
    log0(f"phase {number}: {sampler.n} {what}, {epochs} epochs x {per_epoch} steps, {steps} steps, warm-up {warmup}, "
         f"peak learning rate {peak:g}, {sampler.n % total} left out per epoch")
    sampler.set_epoch(phase.epoch, phase.position)
    require_same(ddp, "the batches", sampler.fingerprint())
    bar = tqdm(total=steps, initial=phase.step, desc=f"phase {number}", disable=ddp.rank > 0 or not sys.stderr.isatty())
    student.train()
    reason, batches = "", None
    while not reason:
        if phase.owed:  # also first of all in a run that was stopped before it
            metrics, step = evaluate(task), phase.first + phase.step
            name, value = next(iter(metrics.items()))
            better = phase.best is None or value > phase.best["value"]
            if better:
                phase.best = {"name": name, "value": value, "step": step, "metrics": metrics}
            phase.stale, phase.owed = 0 if better else phase.stale + 1, False
            task.history.append({"step": step, "epoch": phase.epoch, "phase": number, **metrics})
            log.write(task.history[-1])
            shown = show_metrics(metrics, task.teacher) + " (best so far)" * better
            log0(f"phase {number} step {step} held-out: {shown}")
            log.reset()
            early = 0 < args.early_stop_patience <= phase.stale
            checkpoint(task, phase, optimizer, guard, total, better, done=early or phase.step >= steps)
            if early:
                log0(f"phase {number} stopped early: no gain in {phase.stale} evaluations")
                break
        if phase.step >= steps:
            break
        if phase.position == 0 or batches is None:  # an epoch starts, or goes on after a restart
            sampler.set_epoch(phase.epoch, phase.position)
            batches = prefetch(make_batches(task, sampler, phase.epoch), ddp.device)
            log.reset()
        for group in optimizer.param_groups:
            group["lr"] = peak * lr_at(phase.step, steps, warmup, args.lr_schedule)
        batch = log.waiting(batches)
        loss = run(task, model, batch, total, guard.scaler)
        items = [m[0] for m in (batch if number == 1 else batch.micro)]
        step = phase.first + phase.step + 1  # of the run
        norm, reason = guard.step(loss, step, items)
        phase.step, phase.position = phase.step + 1, phase.position + 1
        bar.update()
        last = phase.step == steps
        if phase.step % args.log_every == 0 or last:
            log.interval(step, phase.first + steps, phase.epoch, model, group["lr"], norm, phase=number)
        if phase.position == per_epoch:
            phase.epoch, phase.position = phase.epoch + 1, 0
        phase.owed = last or (phase.step % args.eval_every == 0 if args.eval_every else phase.position == 0)
        if phase.owed:  # a stop comes before it, as it may take longer than there is time
            reason = reason or guard.finish()
        if reason or not phase.owed and phase.step % args.save_every == 0:
            checkpoint(task, phase, optimizer, guard, total, best=False, done=False)
    guard.finish()
    bar.close()
    return reason

def start_weights(task: Task) -> None:
    """Where phase 2 starts: the best student of phase 1. (all ranks)"""
    args, given = task.args, task.args.phase1_checkpoint
    path = Path(given or Path(args.output_dir) / "phase1_best.pt")
    if not path.exists() and args.skip_phase1 and not given:
        return warn(f"--skip_phase1 and no {path}: phase 2 starts from the raw student")
    state = load_checkpoint(path)
    for name in ("student_model", "use_projection", "student_layers", "projection_hidden"):
        if (old := state["args"].get(name)) != getattr(args, name):
            raise ValueError(f"{path} was trained with --{name} {old!r}, not {getattr(args, name)!r}")
    task.student.load_state_dict(state["model"])  # a RuntimeError names what does not fit
    log0(f"phase 2 starts from {path} (step {state['step']})")

# ---- Main ----------------------------------------------------------------------------------------

def save_artifacts(task: Task, best: dict, table: dict[str, dict]) -> list[str]:
    """Save the student as a SentenceTransformer of stock modules, and beside it without the head. (rank 0 only)"""
    from sentence_transformers import SentenceTransformer
    args, corpus, model, device = task.args, task.corpus, task.student.model.eval(), task.ddp.device
    short = re.sub(r"\W+", "-", str(args.student_model).rstrip("/").rpartition("/")[2]).strip("-")
    name = f"distilled-{short}-{model.get_embedding_dimension()}d{'' if args.use_projection else '-mrl'}"
    models = {Path(args.artifacts_dir) / name: model}
    if args.use_projection:
        end = [type(module).__name__ for module in model].index("Normalize") + 1
        base = SentenceTransformer(modules=list(model)[:end], prompts=model.prompts, device=str(device))
        models[Path(args.artifacts_dir) / f"{name}-base-{base.get_embedding_dimension()}d"] = base
    rows = np.concatenate([corpus.eval_queries[:32], corpus.eval_documents[:32]])
    ids, mask = (t.to(device) for t in task.tokens.padded(rows))
    texts = [list(model.prompts.values())[corpus.kinds[i]] + corpus.text(i) for i in rows]
    for path, part in models.items():
        temporary, dim = path.with_name(path.name + ".tmp"), part.get_embedding_dimension()
        shutil.rmtree(temporary, ignore_errors=True)
        part.save(str(temporary), create_model_card=False)
        (temporary / "README.md").write_text(model_card(task, best, table, path.name, part), encoding="utf-8")
        loaded = SentenceTransformer(str(temporary), device=str(device))
        encoded = loaded.encode(texts, prompt="", batch_size=8, convert_to_tensor=True, show_progress_bar=False)
        with torch.no_grad():
            gap = (encoded - Student(part, torch.float32, device).embed_group(ids, mask)).abs().max().item()
        if not gap <= 1e-5:
            raise RuntimeError(f"{temporary}: encode() differs from the trained forward pass by {gap:.1e}, limit 1e-5")
        shutil.rmtree(path, ignore_errors=True)
        temporary.rename(path)
        log0(f"saved {path}: {dim} dimensions, encode() equals the forward pass to {gap:.1e}")
    return [str(path) for path in models]

def model_card(task: Task, best: dict, table: dict[str, dict], name: str, model) -> str:
    """README.md of a saved student."""
    args, corpus, names = task.args, task.corpus, list(best["metrics"])
    base = "\nThis is the student without its head; the figures are with it.\n" * (model is not task.student.model)
    return "\n".join([
        "---\nlibrary_name: sentence-transformers\npipeline_tag: sentence-similarity\n---",
        f"# {name}\n\n`{args.student_model}` distilled from `{args.teacher_model}` by `train_ddp.py`:",
        f"{best['step']} steps, {args.phase1_data}, {args.phase2_data}, --use_projection {args.use_projection}\n{base}",
        f"Held-out: {len(corpus.eval_queries)} queries against {len(corpus.eval_documents)} documents.\n",
        f"| | {' | '.join(names)} |\n|---|{'---|' * len(names)}",
        *(f"| {who} | {' | '.join(f'{metrics[n]:.4f}' for n in names)} |" for who, metrics in table.items()),
        "\n```python\nfrom sentence_transformers import SentenceTransformer\n\nmodel = SentenceTransformer(PATH)",
        'queries, documents = model.encode_query(["..."]), model.encode_document(["..."])\n```\n',
        f"{model.get_embedding_dimension()} dimensions, {model.max_seq_length} tokens, prompts {model.prompts}.\n"])

def main(args: Namespace) -> int:
    """Both phases, from where the run in --output_dir stands; returns the exit status."""
    ddp = setup_ddp(args)
    state = open_run(args, ddp, SAME)
    phase = Phase(**state["phase"]) if state else None
    if phase and phase.number == 2 and not state["done"] and args.skip_phase2:
        raise ValueError(f"{args.output_dir} holds a run in phase 2: go on without --skip_phase2, or give --fresh")
    complete = phase.number if state and state["done"] else phase.number - 1 if phase else 0  # phases that are over
    finished = complete >= (1 if args.skip_phase2 else 2)
    if finished and not args.save_to_artifacts:
        log0(f"the run in {args.output_dir} is finished, after {state['step']} steps: --fresh starts anew")
        return 0
    kept = state["global_batch"] if state and not state["done"] else None
    total, micro_steps = resolve_batch(args, ddp.world_size, kept)
    # data, teacher vectors, tokens and student, each made once and cached
    log = RunLog(args, ddp, state)
    if Path("ddp_config.json").exists() and not args.config:
        log0("ddp_config.json lies here but is not read: give --config ddp_config.json")
    prepare_hub(args)
    corpus = load_data(args, ddp)
    if state and (old := state["args"].get("data_key", args.data_key)) != args.data_key:
        raise ValueError(f"{args.output_dir} holds a run with data {old!r}, this one has {args.data_key!r}: give "
                         "another --output_dir, or --fresh to move the old run aside")
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
    keep_freed_memory()  # not before: what the data took goes back
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
            barrier(ddp)  # the first rank to end makes some launchers kill the others
            return stop_status(reason)
    best, path = phase.best, Path(args.output_dir) / f"phase{phase.number}_best.pt"
    task.student.load_state_dict(load_checkpoint(path)["model"])
    rows = {"teacher": task.teacher, "student": best["metrics"], "untrained student": task.untrained}
    log0(f"held-out: {len(corpus.eval_queries)} queries, best student of phase {phase.number} (step {best['step']})")
    for who, metrics in rows.items():
        log0(f"  {who:<18}" + "  ".join(f"{n} {metrics[n]:.4f}" for n in best["metrics"]))
    artifacts = on_rank0(ddp, save_artifacts, task, best, rows) if args.save_to_artifacts else []
    task.log.close("finished", steps=phase.first + phase.step, epochs=phase.epoch, samples_per_s=task.log.speed,
                   final_loss=task.log.final_loss, best_metric={n: best[n] for n in ("name", "value", "step")},
                   baselines={who: rows[who][best["name"]] for who in ("teacher", "untrained student")},
                   checkpoint=str(path), artifacts=artifacts)
    log0(f"finished: {args.output_dir}/summary.json, curves.png" + "".join(f", {folder}" for folder in artifacts))
    return 0

if __name__ == "__main__":
    sys.exit(launch(main, parse_args()))
