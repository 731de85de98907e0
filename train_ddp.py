"""Distil a large retrieval model, the teacher, into a small one, the student, in two phases.

Phase 1 pulls the student's vectors of single texts to the teacher's. Phase 2 trains on queries with
their documents by a contrastive loss (InfoNCE), and keeps the pull. The teacher reads each text
once, before training. Its vectors stay in --cache_dir for the next run.

    ./run_ddp.sh 2 True --config configs/train_ddp_quickstart.yaml     # minutes, no download
    python train_ddp.py --trust_remote_code            # MS MARCO; the teacher comes with code
    torchrun --nproc_per_node=8 train_ddp.py --use_projection=False --trust_remote_code

--use_projection True adds a head (Linear, GELU, LayerNorm, Linear) to as many dimensions as the
teacher has. False (MRL) adds none: the target is the first part of its vectors, renormalised.

Data (--phase1_data, --phase2_data): FILE.txt (a text a line, for phase 1), .jsonl, .json, .csv,
.tsv or .parquet, each also .gz; ms_marco, or another data set of the hub (NAME or NAME:CONFIG);
pydocs, which is data/pydocs.jsonl.gz. Columns: query, positive (a text or a list) and, if there are
any, negative, negatives, negative_1 ..., group (its rows are held out together). Held out are the
validation rows of MS MARCO, elsewhere --eval_fraction of the queries.

Logged, over all ranks: step, phase, epoch, lr, loss, in phase 2 its parts infonce (nats per query)
and distance (squared), grad_norm (before clipping), skipped (steps whose gradient was not finite),
samples_per_s (texts or queries), data_wait (share of the time). val/...: ndcg@10, mrr@10,
recall@100 (0 to 1, held-out queries against the documents that answer them and
--eval_distractors), teacher_cosine, loss (of phase 1, on held-out texts).

Files in --output_dir: latest.pt, previous.pt, phase1_best.pt, phase2_best.pt, best.pt (of both),
metrics.jsonl, curves.png, summary.json. In --artifacts_dir: SentenceTransformer folders.

Below, "(all ranks)" means that every rank must call a function, in the same order, and "(rank 0)"
that only rank 0 does.
"""

# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch>=2.11,<2.14", "numpy>=2.2,<3", "tqdm>=4.67,<5", "pyyaml>=6.0,<7", "wandb>=0.25,<1",
#     "matplotlib>=3.10,<4", "pandas>=2.2,<4", "sentence-transformers>=6,<7", "datasets>=5,<6",
#     "scikit-learn>=1.7,<2",
# ]
# ///

import argparse
import contextlib
import csv
import ctypes
import errno
import fcntl
import functools
import gzip
import hashlib
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
import zlib
from collections import Counter, defaultdict
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import yaml
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

# --------------------------------------------------------------------------------------------------
# Arguments

BUILTIN = {  # models that the script makes itself
    "teacher_model": r"builtin:(lsa(:[1-9]\d*)?|bert(:[1-9]\d*x[1-9]\d*)?)",
    "student_model": r"builtin:bert(:[1-9]\d*x[1-9]\d*)?",
}


def parse_args():
    parser = Parser(description=__doc__)
    add = parser.add_argument_group("data").add_argument
    add("--phase1_data", default="ms_marco", help="texts of phase 1")
    add("--phase2_data", default="ms_marco", help="queries and documents of phase 2")
    add("--max_samples_phase1", type=COUNT, default=100_000, help="rows read for phase 1")
    add("--max_samples_phase2", type=COUNT, default=500_000, help="rows read for phase 2")
    add("--skip_bad_data", **FLAG, default=False, help="leave out rows that are wrong")
    add("--cache_dir", default="./cache", help="texts, tokens, teacher vectors, of all runs")
    text = "documents that do not answer it, for each query, drawn anew in every step"
    add("--num_negatives", type=number(0, 1000, int), default=7, help=text)

    add = parser.add_argument_group("held-out data").add_argument
    add("--eval_fraction", type=number(0, 0.99), default=0.05, help="of the queries, at most")
    add("--eval_samples", type=COUNT, default=1000, help="rows held out per source, at most")
    text = "other documents to rank, for each document or text that is held out"
    add("--eval_distractors", type=number(0), default=1.0, help=text)
    text = "steps between evaluations; 0: every epoch"
    add("--eval_every", type=number(0, kind=int), default=0, help=text)

    add = parser.add_argument_group("models").add_argument
    default = "infly/inf-retriever-v1-pro"
    add("--teacher_model", default=default, help="hub name, folder, or builtin:lsa[:DIMENSIONS]")
    add("--teacher_batch_size", type=COUNT, default=64, help="texts per forward pass")
    add("--teacher_max_length", type=COUNT, help="tokens; None: the model's own")
    add("--teacher_query_prompt", help="text before queries; None: the model's own")
    add("--teacher_document_prompt", help="text before documents; None: the model's own")
    default = "sentence-transformers/all-mpnet-base-v2"
    add("--student_model", default=default, help="hub name, folder, or builtin:bert[:LAYERSxWIDTH]")
    add("--student_layers", type=COUNT, help="keep so many, evenly spaced; None: all")
    add("--student_max_length", type=COUNT, help="tokens; None: the model's own")
    add("--student_query_prompt", help="text before queries; None: the model's own")
    add("--student_document_prompt", help="text before documents; None: the model's own")
    add("--trust_remote_code", **FLAG, default=False, help="run code that comes with the models")
    add("--use_projection", **FLAG, default=True, help="a head; False: MRL")
    add("--projection_hidden", type=COUNT, default=1536, help="hidden width of the head, if any")

    add = parser.add_argument_group("loss").add_argument
    add("--phase1_l2_weight", type=number(0), default=0.4, help="of the squared distance")
    add("--phase1_cosine_weight", type=number(0), default=0.6, help="of 1 - cosine")
    add("--infonce_weight", type=number(0), default=0.8, help="of InfoNCE")
    add("--phase2_l2_weight", type=number(0), default=0.2, help="of the squared distance")
    add("--temperature", type=number(1e-4), default=0.02, help="divides all scores")
    text = "a document that the teacher scores above positive + margin is no negative; 2: all are"
    add("--false_negative_margin", type=number(-1, 2), default=0.0, help=text)

    add = parser.add_argument_group("optimization").add_argument
    add("--phase1_epochs", type=COUNT, default=1, help="passes over the texts")
    add("--phase2_epochs", type=COUNT, default=3, help="passes over the queries")
    text = "per phase at most; 0: all epochs"
    add("--max_steps", type=number(0, kind=int), default=0, help=text)
    add("--phase1_lr", type=number(0), default=2e-5, help="peak learning rate")
    add("--phase2_lr", type=number(0), default=5e-6, help="peak learning rate")
    text = "of a phase; then straight down to 0"
    add("--warmup_ratio", type=number(0, 1), default=0.1, help=text)
    text = "of matrices; biases, norms and embeddings: 0"
    add("--weight_decay", type=number(0), default=0.01, help=text)
    add("--skip_phase1", **FLAG, default=False, help="start phase 2 from --phase1_weights")
    text = "for --skip_phase1, of a run with this student; None: OUTPUT_DIR/phase1_best.pt"
    add("--phase1_weights", help=text)
    add("--skip_phase2", **FLAG, default=False, help="stop after phase 1")

    add = parser.add_argument_group("artifacts").add_argument
    add("--save_to_artifacts", **FLAG, default=False, help="save a SentenceTransformer at the end")
    add("--artifacts_dir", default="./artifacts", help="folder of the saved students")
    add_common_arguments(parser, output_dir="./checkpoints", batch_size=64)
    args = parse_with_config(parser)

    if args.skip_phase1 and args.skip_phase2:
        parser.error("--skip_phase1 and --skip_phase2 together leave nothing to train")
    if args.phase1_weights and not args.skip_phase1:
        parser.error("--phase1_weights is for --skip_phase1")
    if kind_of(args.phase2_data) == ".txt" and not args.skip_phase2:
        parser.error(f"--phase2_data {args.phase2_data}: needs queries with their documents")
    for option, kinds in BUILTIN.items():
        name = getattr(args, option)
        if name.startswith("builtin:") and not re.fullmatch(kinds, name):
            parser.error(f"--{option} {name}: see --help for what it can be")
    if args.teacher_model.startswith("builtin:lsa") and args.teacher_max_length:
        parser.error("--teacher_max_length: builtin:lsa reads whole texts")
    mode = "projection" if args.use_projection else "mrl"
    args.output_dir = args.output_dir.replace("{mode}", mode)
    return args


# --------------------------------------------------------------------------------------------------
# Data


class Texts(NamedTuple):
    """B texts as tensors, in a few groups of similar length, each padded to its longest."""

    ids: list  # of tokens (n, L) int64 of each group
    masks: list  # (n, L) int64, 0 where there is padding
    order: torch.Tensor  # (B,) place of each text among those of all groups


class TextBatch(NamedTuple):
    """A micro-batch of phase 1."""

    texts: Texts
    targets: torch.Tensor  # (B, D) float16, the teacher's vectors
    total: int  # texts of the whole step, all ranks

    def to(self, device):
        return to_device(self, device)


class PairBatch(NamedTuple):
    """A micro-batch of phase 2. Its B texts are n queries, their n positives, then all their
    negatives."""

    texts: Texts
    targets: torch.Tensor  # (B, D) float16
    numbers: torch.Tensor  # (B,) of the texts in the corpus
    positives: torch.Tensor  # (n, P) numbers of all texts that answer a query, then -1
    pull: torch.Tensor  # (B,) weights of the distances; a step has 0.5 for queries, for documents
    total: int  # queries of the whole step, all ranks

    def to(self, device):
        return to_device(self, device)


def to_device(value, device):
    """A batch with all its tensors on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, list):
        return [to_device(part, device) for part in value]
    if isinstance(value, tuple):
        return type(value)(*[to_device(part, device) for part in value])
    return value


# Into how many groups a batch is cut. With more of them there is less padding. But each group is a
# pass of its own through the network, and a GPU waits until the host has launched it.
GROUPS = {"cpu": 8, "cuda": 2, "xpu": 2}


def lay_out(tokens, rows):
    """The texts with the numbers `rows` (B,), as Texts."""
    by_length = np.argsort(tokens.lengths[rows], kind="stable")
    ids = []
    masks = []
    for part in np.array_split(rows[by_length], min(tokens.groups, len(rows))):
        lengths = tokens.lengths[part]
        places = np.arange(lengths.max())
        mask = places < lengths[:, None]
        source = tokens.offsets[part][:, None] + places
        found = tokens.ids[np.minimum(source, len(tokens.ids) - 1)]
        ids.append(torch.from_numpy(np.where(mask, found, tokens.pad).astype(np.int64)))
        masks.append(torch.from_numpy(mask.astype(np.int64)))
    return Texts(ids, masks, torch.from_numpy(np.argsort(by_length)))


class TextData(Dataset):
    """Phase 1: single texts, queries and documents alike."""

    parts = ["loss"]  # what is logged of a step

    def __init__(self, args, corpus, tokens):
        self.args = args
        self.corpus = corpus
        self.tokens = tokens

    def use(self, vectors, dimensions):
        """The teacher's vectors, of which the student has the first dimensions."""
        self.vectors = vectors
        self.dimensions = dimensions

    def ids(self):
        return self.corpus.phase1

    def cost(self):
        """The number of tokens of each text."""
        return self.tokens.lengths

    def targets(self, rows):
        """(B,) numbers of texts -> (B, D) float16, the teacher's vectors, cut but not normalised"""
        return torch.from_numpy(self.vectors[rows][:, : self.dimensions])

    def __getitem__(self, item):
        """item: the step, the texts of the global batch, and the places of this micro-batch in
        it."""
        _, whole, places = item
        rows = whole[places]
        return TextBatch(lay_out(self.tokens, rows), self.targets(rows), len(whole))


class PairData(TextData):
    """Phase 2: a query, a document that answers it, and some that do not."""

    parts = ["loss", "infonce", "distance"]

    def __init__(self, *args):
        super().__init__(*args)
        available = (self.corpus.negatives >= 0).sum(1)
        self.documents = 1 + np.minimum(available, self.args.num_negatives)  # of each pair

    def ids(self):
        return np.arange(len(self.corpus.pairs))

    def cost(self):
        """The number of tokens of each pair and of as many negatives as it gets."""
        negatives = self.corpus.negatives[:, : self.args.num_negatives]
        cost = self.tokens.lengths[self.corpus.pairs].sum(1)
        return cost + (self.tokens.lengths[negatives] * (negatives >= 0)).sum(1)

    def draw(self, step, place, pair):
        """Draw the negatives of a pair by (seed, step, place). So a step has the same ones on any
        number of ranks, and a rank draws for its own queries only."""
        negatives = self.corpus.negatives[pair]
        negatives = negatives[negatives >= 0]
        if len(negatives) <= self.args.num_negatives:
            return negatives
        # the 1: to numpy (seed, step, 0) is (seed, step), by which an epoch is shuffled
        rng = np.random.default_rng([self.args.seed, step, place, 1])
        return rng.choice(negatives, self.args.num_negatives, replace=False)

    def __getitem__(self, item):
        step, whole, places = item
        ids = whole[places]
        queries, positives = self.corpus.pairs[ids].T
        negatives = [self.draw(step, place, whole[place]) for place in places]
        rows = np.concatenate([queries, positives, *negatives])

        pull = np.full(len(rows), 0.5 / self.documents[whole].sum(), np.float32)
        pull[: len(ids)] = 0.5 / len(whole)
        return PairBatch(
            lay_out(self.tokens, rows),
            self.targets(rows),
            torch.from_numpy(rows),
            torch.from_numpy(self.corpus.positives[ids]),
            torch.from_numpy(pull),
            len(whole),
        )


# --------------------------------------------------------------------------------------------------
# Model


class Student(nn.Module):
    """A SentenceTransformer that reads Texts, and a head."""

    def __init__(self, model):
        super().__init__()
        self.model = model  # a transformer, pooling, and what else it has; the last one: Normalize
        self.head = nn.Sequential()
        self.width = model.get_embedding_dimension()  # without the head
        self.dimensions = self.width

    def add_head(self, hidden, dimensions):
        """Add a head of sentence-transformers' own modules, so that anybody can load it. (The
        original has LayerNorm before GELU, which these modules cannot express.)"""
        from sentence_transformers.sentence_transformer.modules import Dense, LayerNorm, Normalize

        self.head.append(Dense(self.width, hidden, activation_function=nn.GELU()))
        self.head.append(LayerNorm(hidden))
        self.head.append(Dense(hidden, dimensions, activation_function=nn.Identity()))
        self.head.append(Normalize())
        self.dimensions = dimensions

    def forward(self, texts, head=True):
        """Unit vectors (B, D) in float32, in the order in which the texts were asked for."""
        network, pooling, *others = self.model
        if head:
            others += self.head
        states = []
        for ids, mask in zip(texts.ids, texts.masks, strict=True):
            features = network({"input_ids": ids, "attention_mask": mask})
            states.append(features["token_embeddings"].float())

        # bf16 has three digits: enough within the network, not for vectors that are compared
        with torch.autocast(texts.order.device.type, enabled=False):
            pooled = []
            for group, mask in zip(states, texts.masks, strict=True):
                features = pooling({"token_embeddings": group, "attention_mask": mask})
                pooled.append(features["sentence_embedding"])
            features = {"sentence_embedding": torch.cat(pooled).index_select(0, texts.order)}
            for module in others:
                features = module(features)
        return features["sentence_embedding"]


def keep_masks_whole():
    """For speed alone. Transformers leaves out a mask that hides nothing. To look at the mask, the
    host would wait until a GPU has done all that is queued. So this tells it not to look."""
    from transformers import AttentionMaskInterface
    from transformers.masking_utils import eager_mask, sdpa_mask

    def whole(make_mask, *args, **options):
        options.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        return make_mask(*args, **options)

    for name, make_mask in {"sdpa": sdpa_mask, "eager": eager_mask}.items():
        AttentionMaskInterface.register(name, functools.partial(whole, make_mask))


def keep_layers(network, wanted):
    """Keep so many evenly spaced layers of a transformer, the first and the last among them."""
    config = network.config
    depth = config.num_hidden_layers
    if wanted > depth:
        raise InputError(f"--student_layers {wanted}: the student has {depth} layers")
    stacks = []
    for module in network.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == depth:
                stacks.append((module, name, child))
    if not stacks:
        text = f"the student has no list of {depth} layers (ALBERT runs one of them many times)"
        raise InputError(f"--student_layers {wanted}: {text}")

    kept = [int(i * (depth - 1) / max(1, wanted - 1) + 0.5) for i in range(wanted)]
    for module, name, child in stacks:
        setattr(module, name, nn.ModuleList([child[i] for i in kept]))
        for place, i in enumerate(kept):
            for part in child[i].modules():
                if hasattr(part, "layer_idx"):  # its place in the cache of a causal network
                    part.layer_idx = place
    # a list with an entry for each layer, such as layer_types of ModernBERT and Qwen3
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == depth:
            setattr(config, name, [value[i] for i in kept])
    config.num_hidden_layers = wanted
    logging.info(f"The student keeps its layers {kept} of {depth}")


def freeze_unused(student, texts):
    """Freeze what gets no gradient, such as BERT's pooler: DDP would wait for it. (It stays in the
    model, which loads without complaint.)"""
    student(texts).sum().backward()
    unused = []
    for name, parameter in student.named_parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.requires_grad_(False)
            unused.append(name.removeprefix("model."))
    student.zero_grad()
    if unused:
        logging.info(f"Not trained, since they get no gradient: {', '.join(unused)}")


# --------------------------------------------------------------------------------------------------
# Loss


def distance(student, target, l2_weight, cosine_weight):
    """Unit vectors (B, D) -> (B,), the weighted sum of squared distance and 1 - cosine.

    The squares are summed over D. The original (yuancu/distill-for-retrieval) takes their mean,
    which is so small over 3584 dimensions that a weight of 0.4 means nothing."""
    cosine = (student * target).sum(1)
    return l2_weight * (student - target).square().sum(1) + cosine_weight * (1 - cosine)


# torch 2.13 has other names for these
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class GatherRows(torch.autograd.Function):
    """The rows of all ranks (W b, ...), rank by rank. Backward, a rank gets the sum of all ranks'
    gradients for its rows. That is a reduce-scatter, half the work of an all-reduce."""

    @staticmethod
    def forward(ctx, rows):
        gathered = rows.new_empty(dist.get_world_size() * len(rows), *rows.shape[1:])
        all_gather(gathered, rows)
        return gathered

    @staticmethod
    def backward(ctx, gradient):
        own = gradient.new_empty(len(gradient) // dist.get_world_size(), *gradient.shape[1:])
        reduce_scatter(own, gradient.contiguous())
        return own


def gather_rows(rows, most, filler=0):
    """The rows (n, ...) of all ranks, those of each rank filled up to `most`. (all ranks)"""
    filling = rows.new_full((most - len(rows), *rows.shape[1:]), filler)
    rows = torch.cat([rows, filling])
    if dist.get_world_size() == 1:
        return rows
    return GatherRows.apply(rows)


def not_negatives(documents, positives, teacher_scores, limits):
    """Which of the documents (m,) are no negatives of each query, (q, m) bool: its positives (q, P)
    and those that the teacher scores above the query's limit (q,), which may well answer it, too
    (Solatorio 2024)."""
    masked = teacher_scores > limits[:, None]
    for column in positives.unbind(1):
        masked |= documents == column[:, None]
    return masked


def text_loss(args, batch, vectors):
    """What a micro-batch adds to the mean loss of phase 1 over the step."""
    targets = F.normalize(batch.targets.float(), dim=1)
    terms = distance(vectors, targets, args.phase1_l2_weight, args.phase1_cosine_weight)
    return terms.sum() / batch.total


def split_texts(batches, parts):
    """Split what the micro-batches have for their texts into the part of the queries (n, ...) and
    that of the documents (m, ...). The first n documents are the queries' positives."""
    queries = []
    positives = []
    negatives = []
    for batch, part in zip(batches, parts, strict=True):
        n = len(batch.positives)
        queries.append(part[:n])
        positives.append(part[n : 2 * n])
        negatives.append(part[2 * n :])
    return torch.cat(queries), torch.cat(positives + negatives)


def contrast(args, batches, vectors):
    """What this rank adds to InfoNCE (van den Oord et al. 2018) of the step: the cross entropy of
    each query's positive among the documents of the whole step, on all ranks. (all ranks)

    The documents are many, and stay where they are. The queries travel: each rank scores those of
    all ranks against its own documents, by the student and by the teacher. The denominator of a
    query's softmax is then a sum over the ranks: they exchange one number for each query."""
    total = batches[0].total
    parts = len(batches) * dist.get_world_size()
    most = len(batches) * math.ceil(total / parts)  # queries that a rank can have
    queries, documents = split_texts(batches, vectors)
    teacher_queries, teacher_documents = split_texts(batches, [batch.targets for batch in batches])
    _, numbers = split_texts(batches, [batch.numbers for batch in batches])
    answers = torch.cat([batch.positives for batch in batches])
    own = torch.arange(len(queries), device=queries.device)  # each one's positive has its number
    own_rows = dist.get_rank() * most + own  # where they are among all queries

    # all queries (q, ...), and which of this rank's documents are no negatives of them (q, m)
    teacher_queries = F.normalize(gather_rows(teacher_queries, most).float(), dim=1)
    teacher_scores = teacher_queries @ F.normalize(teacher_documents.float(), dim=1).T
    limits = teacher_scores[own_rows, own] + args.false_negative_margin
    limits = gather_rows(limits + 1e-5, most)  # equal scores may differ by rounding
    answers = gather_rows(answers, most, filler=-1)
    masked = not_negatives(numbers, answers, teacher_scores, limits)
    masked.index_put_((own_rows, own), torch.zeros_like(own, dtype=torch.bool))

    scores = gather_rows(queries, most) @ documents.T / args.temperature
    scores = scores.masked_fill(masked, -1e30)  # -inf would make NaN where all are masked
    denominators = scores.logsumexp(1)  # over the documents of this rank ...
    denominators = gather_rows(denominators[None], 1).logsumexp(0)  # ... and of all
    return (denominators[own_rows] - scores[own_rows, own]).sum() / total


def pair_loss(args, batches, vectors):
    """What this rank adds to the mean loss of phase 2 over the step, and to its parts: loss,
    infonce, distance. batches: its micro-batches; vectors: those of their texts. (all ranks)"""
    infonce = contrast(args, batches, vectors)
    targets = F.normalize(torch.cat([batch.targets for batch in batches]).float(), dim=1)
    pull = torch.cat([batch.pull for batch in batches])
    far = (distance(torch.cat(vectors), targets, 1.0, 0.0) * pull).sum()
    loss = args.infonce_weight * infonce + args.phase2_l2_weight * far
    return torch.stack([loss, infonce, far])


# --------------------------------------------------------------------------------------------------
# Evaluation

EVALUATED_TOGETHER = 128  # texts


@torch.no_grad()
def embed(student, data, rows, args, device, head):
    """The student's vectors (B, D) of texts `rows`, without autocast, as a saved student gives
    them; None if the ranks agreed to stop. Batch k goes to rank k % world_size: each text is read
    once, in the same batch on any number of ranks. (all ranks)"""
    by_length = np.argsort(-data.tokens.lengths[rows], kind="stable")
    batches = np.array_split(by_length, math.ceil(len(rows) / EVALUATED_TOGETHER))
    dimensions = student.dimensions if head else student.width
    vectors = torch.zeros(len(rows), dimensions, device=device)
    student.eval()
    for first in range(0, len(batches), dist.get_world_size()):
        if max(gather(wish_to_stop(args))):  # of many distractors it may take long
            return None
        own = first + dist.get_rank()
        if own < len(batches):
            texts = to_device(lay_out(data.tokens, rows[batches[own]]), device)
            vectors[torch.from_numpy(batches[own]).to(device)] = student(texts, head)
    student.train()
    dist.all_reduce(vectors)  # each row is zero on all ranks but one
    return vectors


def ranking_metrics(corpus, vectors):
    """nDCG@10 (Jarvelin and Kekalainen 2002, binary), MRR@10 and recall@100, each the mean over the
    held-out queries; nothing if there are none. vectors: of corpus.eval_texts. (rank 0)

    The place of an answer: after all other documents that have its score or a higher one, and
    after the query's better answers. So one vector for all texts does not look good, and a query's
    answers do not count against each other."""
    count = len(corpus.eval_queries)
    if count == 0:
        return {}
    documents = vectors[count:]
    answers = np.split(
        corpus.eval_pairs[:, 1], np.cumsum(np.bincount(corpus.eval_pairs[:, 0]))[:-1]
    )
    discounts = 1 / np.log2(np.arange(2, 12))
    ndcg = []
    mrr = []
    recall = []
    for start in range(0, count, 64):
        scores = vectors[start : min(start + 64, count)] @ documents.T
        for query, row in enumerate(scores.cpu().numpy(), start):
            own = -np.sort(-row[answers[query]])
            row[answers[query]] = -math.inf
            # equal scores may differ by rounding
            places = np.array([1 + k + (row >= score - 1e-6).sum() for k, score in enumerate(own)])

            ndcg.append(discounts[places[places <= 10] - 1].sum() / discounts[: len(own)].sum())
            mrr.append(1 / places[0] if places[0] <= 10 else 0)
            recall.append((places <= 100).mean())
    metrics = {"ndcg@10": ndcg, "mrr@10": mrr, "recall@100": recall}
    return {name: float(np.mean(values)) for name, values in metrics.items()}


def measure(args, data, vectors, head):
    """Metrics of the student's vectors of the held-out texts. (rank 0)"""
    if not vectors.isfinite().all():
        raise RunError("the student's vectors are no longer finite: --fresh and a lower rate")
    corpus = data.corpus
    metrics = ranking_metrics(corpus, vectors)
    if head:  # without the distractors, which may have been trained on
        rows = corpus.eval_texts[: len(corpus.eval_queries) + corpus.eval_answers]
        found = vectors[: len(rows)]
        target = F.normalize(data.targets(rows).to(found), dim=1)
        weights = (args.phase1_l2_weight, args.phase1_cosine_weight)
        metrics["loss"] = distance(found, target, *weights).cpu().double().mean().item()
        metrics["teacher_cosine"] = (found * target).sum(1).cpu().double().mean().item()
    return metrics


def evaluate(student, data, args, device, head=True):
    """Held-out metrics of the student, with its head or without; None if the ranks agreed to stop.
    All ranks decide by these numbers. So rank 0 computes them: another processor might round
    otherwise. (all ranks)"""
    vectors = embed(student, data, data.corpus.eval_texts, args, device, head)
    if vectors is None:
        return None
    return on_rank0(measure, args, data, vectors, head)


def keep_best(loop, number, metrics, save):
    """Save weights that are the best of their phase, and note them in `loop`, unless a disk is
    full: the note is of what is in the file. (all ranks)"""
    metric = "ndcg@10" if "ndcg@10" in metrics else "teacher_cosine"  # where there are no queries
    value = metrics[metric]
    before = loop["best"]
    values = {name: best["value"] for name, best in before.items()}
    if not value > values.get(f"phase {number}", -math.inf):  # NaN is never better
        return
    best = {"metric": metric, "value": value, "step": loop["step"]}
    loop["best"] = {**before, f"phase {number}": {**best, "metrics": metrics}}
    names = [f"phase{number}_best.pt"]
    if value > max(values.values(), default=-math.inf):
        names.append("best.pt")
    for name in names:
        logging.info(f"Saving {name}, the best so far")
        if not save(name):
            loop["best"] = before
            return


def as_text(metrics):
    return "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())


# --------------------------------------------------------------------------------------------------
# Train


class Phase(NamedTuple):
    number: int
    data: TextData
    sampler: "GlobalBatchSampler"
    steps: int
    lr: float  # its peak


def make_phases(args, corpus, tokens):
    """The phases that are not skipped."""
    phases = []
    for phase, kind in {1: TextData, 2: PairData}.items():
        if getattr(args, f"skip_phase{phase}"):
            continue
        logging.info(f"Phase {phase}:")
        data = kind(args, corpus, tokens)
        sampler = GlobalBatchSampler(data.ids(), args, data.cost())
        epochs = getattr(args, f"phase{phase}_epochs")
        steps = sampler.count_steps(epochs, most=args.max_steps or math.inf)
        lr = getattr(args, f"phase{phase}_lr")
        logging.info(f"  {steps:,} steps, {sampler.steps:,} an epoch, peak rate {lr:g}")
        phases.append(Phase(phase, data, sampler, steps, lr))
    return phases


def lr_factor(args, step, steps):
    """The factor of the peak rate. It rises in a straight line, then falls to 0."""
    rise = int(args.warmup_ratio * steps)
    if step < rise:
        return (step + 1) / (rise + 1)
    return 1 - (step - rise) / max(1, steps - rise)


def make_optimizer(args, model, lr):
    # Weight decay pulls towards zero. That helps matrices. But a bias or a norm's scale needs its
    # size, and the vector of a rare word would fade.
    embeddings = set()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            embeddings.add(id(module.weight))
    decay = []
    no_decay = []
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.ndim > 1 and id(parameter) not in embeddings:
            decay.append(parameter)
        else:
            no_decay.append(parameter)
    groups = [{"params": decay}, {"params": no_decay, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, weight_decay=args.weight_decay, fused=True)


def text_step(args, ddp_model, batches, autocast, scaler, step):
    """Forward and backward of a step of phase 1, micro-batch by micro-batch. Returns this rank's
    share of the loss (1,). (all ranks)"""
    share = torch.zeros(1, device=batches[0].targets.device)
    for micro, batch in enumerate(batches, start=1):
        ddp_model.require_backward_grad_sync = micro == len(batches)
        with autocast():
            vectors = ddp_model(batch.texts)
        loss = text_loss(args, batch, vectors)
        # DDP takes the mean over the ranks, we want the sum
        scaler.scale(loss * dist.get_world_size()).backward()
        share += loss.detach()
    return share


def pair_step(args, ddp_model, batches, autocast, scaler, step):
    """The same of phase 2: shares of PairData.parts (3,).

    The negatives are the documents of the whole step. So with several micro-batches all vectors
    come first, each micro-batch's graph is dropped; then the loss, and its gradient by the vectors;
    then each micro-batch again, with its part of that gradient (Gao et al. 2021). Both times they
    pass through the same function, compiled or not, with the same seed: only so does dropout hit
    the same places. (all ranks)"""
    scale = dist.get_world_size()
    vectors = []
    for batch in batches:
        ddp_model.require_backward_grad_sync = len(batches) == 1
        with autocast():
            found = ddp_model(batch.texts)
        vectors.append(found if len(batches) == 1 else found.detach().requires_grad_())
    shares = pair_loss(args, batches, vectors)
    if len(batches) == 1:
        scaler.scale(shares[0] * scale).backward()
        return shares.detach()

    gradients = torch.autograd.grad(shares[0] * scale, vectors)
    seed_step(args, step)
    for micro, batch in enumerate(batches, start=1):
        ddp_model.require_backward_grad_sync = micro == len(batches)
        with autocast():
            found = ddp_model(batch.texts)
        scaler.scale((found * gradients[micro - 1]).sum()).backward()
    return shares.detach()


def train(args, device, phase, model, ddp_model, state, log, loop):
    """One phase, from where `loop` says that it stands. Returns why training was stopped, or "" if
    the phase has ended. (all ranks)"""
    sampler = phase.sampler
    forward_backward = text_step if phase.number == 1 else pair_step
    eval_every = args.eval_every or sampler.steps
    optimizer = make_optimizer(args, model, phase.lr)
    autocast, scaler = choose_precision(args, device)
    if state:
        restore(state, model=model, optimizer=optimizer, scaler=scaler)
    if loop["phase"] != phase.number:
        loop.update(phase=phase.number, before=loop["step"], validated=0)
    save = functools.partial(save_checkpoint, args=args, log=log, loop=loop, model=model)
    if loop["step"] == 0:
        save("latest.pt", optimizer=optimizer, scaler=scaler, must_succeed=True)
    done = loop["step"] - loop["before"]  # steps of this phase
    sampler.start = done
    batches = make_loader(phase.data, sampler, args, device)

    bar = tqdm(total=phase.steps, initial=done, disable=None if dist.get_rank() == 0 else True)
    meter = Meter(phase.data.parts, args, device)
    reason = ""
    while not reason:
        # Evaluate. All ranks have the same metrics, and so agree on what is best.
        is_due = done % eval_every == 0 or done >= phase.steps
        if is_due and loop["validated"] < done:
            metrics = evaluate(model, phase.data, args, device)
            if metrics is None:  # this evaluation is made again
                reason = max(gather(wish_to_stop(args)))
                save("latest.pt", optimizer=optimizer, scaler=scaler, must_succeed=True)
                break
            loop["validated"] = done
            epoch = (done - 1) // sampler.steps  # that of the last step
            row = {"step": loop["step"], "phase": phase.number, "epoch": epoch}
            log.write({**row, **{f"val/{name}": value for name, value in metrics.items()}})
            keep_best(loop, phase.number, metrics, save)
            meter.start()
        if done >= phase.steps:
            save("latest.pt", optimizer=optimizer, scaler=scaler, must_succeed=True)
            break

        seed_step(args, loop["step"])
        lr = phase.lr * lr_factor(args, done, phase.steps)
        for group in optimizer.param_groups:
            group["lr"] = lr

        # the micro-batches of a step; forward and backward; update
        step_batches = []
        for _ in range(sampler.accumulation):
            step_batches.append(meter.next_batch(batches, device))
        shares = forward_backward(args, ddp_model, step_batches, autocast, scaler, loop["step"])
        norm = update_if_finite(args, optimizer, scaler)
        meter.add(shares, norm)
        loop["step"] += 1
        done += 1
        bar.update()

        # log and save; also before an evaluation, which may be interrupted
        is_due = done % eval_every == 0 or done >= phase.steps
        must_save = done % args.save_every == 0 or is_due
        epoch = (done - 1) // sampler.steps
        row = {"step": loop["step"], "phase": phase.number, "epoch": epoch, "lr": lr}
        reason = meter.meet(log, row, sampler.global_batch, must_save)
        if reason or must_save:
            save("latest.pt", optimizer=optimizer, scaler=scaler, must_succeed=bool(reason))
    bar.close()
    return reason


# --------------------------------------------------------------------------------------------------
# Main


def load_weights(args, model, path):
    """Load the weights of a checkpoint. Returns whether there is a whole one. (all ranks)"""
    state = on_rank0(read_checkpoint, Path(path))
    if state is None:
        return False
    if "data_hash" not in state.get("args", {}):
        raise InputError(f"{path}: expected phase1_best.pt, or another checkpoint of a run")
    trained = state["args"].get("student_model")
    if trained != args.student_model:
        raise InputError(f"{path} was trained with --student_model {trained}")
    if state["args"]["data_hash"].split()[0] != args.data_hash.split()[0]:
        text = f"{path} was trained on other data, or with another split"
        if trained.startswith("builtin:"):
            raise InputError(f"{text}: {trained} makes its words of the data")
        logging.warning(f"{text}: what is held out here may have been trained on")
    logging.info(f"Loading {path}, step {state['loop']['step']}")
    restore(state, model=model)
    return True


def begin_phase2(args, model, step):
    """Load the best weights of phase 1, which has made so many steps. (all ranks)"""
    path = args.phase1_weights or f"{args.output_dir}/phase1_best.pt"
    if load_weights(args, model, path):
        return
    if args.phase1_weights:
        raise InputError(f"--phase1_weights {path}: the file is missing or damaged")
    if args.skip_phase1 and step > 0:
        hint = f"--phase1_weights {args.output_dir}/latest.pt takes the last ones"
        raise InputError(f"{path}, the best weights of phase 1, is missing or damaged: {hint}")
    what = "the untrained student" if args.skip_phase1 else "the last weights"
    logging.warning(f"{path} is missing or damaged: phase 2 starts from {what}")


def save_student(student, path, head):
    """Save as a SentenceTransformer of its own modules, with the head or without. (rank 0)"""
    from safetensors import SafetensorError
    from sentence_transformers import SentenceTransformer

    modules = [*student.model, *student.head] if head else [*student.model]
    options = {"prompts": student.model.prompts, "device": str(student.model.device)}
    model = SentenceTransformer(modules=modules, **options)
    with tempfile.TemporaryDirectory(dir=Path(path).parent, prefix="unfinished-") as folder:
        try:
            model.save(f"{folder}/student", create_model_card=False)
        except SafetensorError as error:  # most likely a full disk
            raise OSError(str(error)) from None
        os.rename(f"{folder}/student", path)  # whole, or not there


def save_artifacts(args, student):
    """The best student, and beside it without the head. Returns their folders. (rank 0)"""
    short = re.sub(r"\W+", "-", args.student_model.rstrip("/").rpartition("/")[2]).strip("-")
    name = f"{args.artifacts_dir}/distilled-{short}-{student.dimensions}d"
    paths = {f"{name}-mrl": True}
    if args.use_projection:
        paths = {f"{name}-base-{student.width}d": False, name: True}
    try:
        os.makedirs(args.artifacts_dir, exist_ok=True)
        for path, head in paths.items():
            if Path(path).exists():  # it may be another run's
                old = Path(path).rename(f"{path}.old-{time.strftime('%Y%m%d-%H%M%S')}")
                logging.info(f"what was in {path} is now in {old}")
            save_student(student, path, head)
            what = "for use" if head else "without the head: not in the teacher's space"
            logging.info(f"Saved {path} ({what})")
    except OSError as error:  # most likely a full disk
        hint = "make room, or give another --artifacts_dir, and the same command again saves it"
        raise RunError(f"no artifact: {error}; {hint}") from None
    return list(paths)


def compare(corpus, loop):
    """Show the best of each phase beside the untrained student and the teacher. Returns the best of
    both phases."""
    if not loop["best"]:
        raise RunError("no best weights could be saved (see the warnings); latest.pt has the last")
    rows = {"untrained student": loop["untrained"]}
    for phase, best in loop["best"].items():
        rows[f"after {phase}"] = best["metrics"]
    rows["teacher"] = loop["teacher"]
    logging.info(f"Held out: {corpus.held_out()}; the best of each phase:")
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


def train_phases(args, device, phases, student, state, log, loop):
    """Returns why training was stopped, or "" if it has ended. (all ranks)"""
    if state is None and not measure_baselines(args, student, phases[0].data, device, loop):
        # an error: a queue that starts the run again and again would never see its end
        reason = max(gather(wish_to_stop(args)))
        raise RunError(f"stopped by {reason} before the first checkpoint: nothing is kept")
    logging.info("Starting distributed training...")
    ddp_model = wrap_ddp(student, args, device)
    for phase in phases:
        if phase.number < loop["phase"]:
            logging.info("Phase 2 has begun before: phase 1 is not made, or made longer")
            continue
        if phase.number == 2 and loop["phase"] < 2:
            begin_phase2(args, student, loop["step"])
            state = None  # what it held was phase 1
        reason = train(args, device, phase, student, ddp_model, state, log, loop)
        if reason:
            return reason
    return ""


def measure_baselines(args, student, data, device, loop):
    """The teacher and the untrained student. Returns whether it was not interrupted. (all ranks)"""
    rows = data.corpus.eval_texts
    teacher = F.normalize(torch.from_numpy(data.vectors[rows]).float(), dim=1)
    loop["teacher"] = on_rank0(ranking_metrics, data.corpus, teacher.to(device))
    logging.info(f"Held out, the teacher: {as_text(loop['teacher'])}")
    # a head with random weights would make the student look worse than it is
    has_queries = len(data.corpus.eval_queries) > 0
    loop["untrained"] = evaluate(student, data, args, device, head=not has_queries)
    if loop["untrained"] is None:
        return False
    logging.info(f"Held out, the untrained student: {as_text(loop['untrained'])}")
    return True


def main(args):
    device = setup_ddp(args)
    logging.info("Preparing data loaders...")
    if "inf-retriever" in args.teacher_model and not args.trust_remote_code:
        # without its code transformers would take it for another, causal model
        text = f"--teacher_model {args.teacher_model} comes with code of its own"
        hint = "look at it, then give --trust_remote_code; without a download: builtin:lsa"
        raise InputError(f"{text}: {hint}")
    if on_rank0(is_without_hub, args):
        os.environ["HF_HUB_OFFLINE"] = "1"
    corpus = Corpus(read_once(prepare_texts, args))
    torch.manual_seed(args.seed)  # the same weights on all ranks
    model = load_student(args, local_model(args, args.student_model, corpus))
    tokens = Tokens(args, corpus, model, device)
    teacher = local_model(args, args.teacher_model, corpus)
    if args.prepare_only:
        logging.info(f"texts and tokens are ready: {args.cache_dir}")
        return 0

    may_change = """phase1_data phase2_data cache_dir phase1_epochs phase2_epochs max_steps
        max_samples_phase1 max_samples_phase2 eval_every skip_phase1 skip_phase2 phase1_weights
        teacher_batch_size save_to_artifacts artifacts_dir""".split()
    key = on_rank0(teacher_key, args, corpus, teacher)
    state = open_run(args, f"{corpus.hash} {tokens.folder.name} {key}", may_change)
    loop = {
        "step": 0,
        "phase": 0,
        "before": 0,  # steps before this phase
        "validated": 0,  # steps of this phase at the last evaluation
        "best": {},  # of each phase
        "untrained": {},
        "teacher": {},
    }
    if state:
        loop = state["loop"]
    if args.skip_phase2 and loop["phase"] == 2:
        text = f"--skip_phase2: {args.output_dir} is in phase 2"
        raise InputError(f"{text}: go on without it, or give --fresh")
    if loop["phase"] == 2 and args.phase1_weights not in (None, state["args"]["phase1_weights"]):
        text = f"--phase1_weights {args.phase1_weights}: phase 2 in {args.output_dir} has begun"
        raise InputError(f"{text} from others: go on without it, or give another --output_dir")

    student = Student(model)
    on_rank0(check_student, args, student, tokens)
    phases = make_phases(args, corpus, tokens)
    vectors = teacher_vectors(args, key, teacher, corpus, student.width, device)
    if vectors is None:
        return exit_status(max(gather(wish_to_stop(args))))
    if args.use_projection:
        torch.manual_seed(args.seed)  # the same head on all ranks
        student.add_head(args.projection_hidden, vectors.dimensions)
    text = f"its vectors have {student.width} dimensions, the teacher's {vectors.dimensions}"
    logging.info(f"The student learns {student.dimensions} of them: {text}")
    for phase in phases:
        phase.data.use(vectors, student.dimensions)
    keep_masks_whole()
    student.to(device).train()  # with dropout, if the student has any
    freeze_unused(student, to_device(lay_out(tokens, corpus.eval_texts[:4]), device))
    trained = sum(p.numel() for p in student.parameters() if p.requires_grad)
    logging.info(f"{trained:,} parameters are trained")

    log = RunLog(args, state)
    with logging_redirect_tqdm():
        reason = train_phases(args, device, phases, student, state, log, loop)
    if reason:
        log.close(f"stopped by {reason}", steps=loop["step"])
        return exit_status(reason)
    logging.info("Training process completed.")
    end_on_signals()
    best = compare(corpus, loop)
    summary = {
        "best": {name: value for name, value in best.items() if name != "metrics"},
        "held_out": corpus.held_out(),
        "baselines": {"untrained": loop["untrained"], "teacher": loop["teacher"]},
        "phases": {name: best["metrics"] for name, best in loop["best"].items()},
    }
    if args.save_to_artifacts:
        path = f"{args.output_dir}/best.pt"
        if not load_weights(args, student, path):
            raise RunError(f"no artifact: {path} is missing or damaged")
        summary["artifacts"] = on_rank0(save_artifacts, args, student)
    log.close("finished", steps=loop["step"], **summary)
    logging.info("Training and evaluation completed successfully!")
    return 0


# --------------------------------------------------------------------------------------------------
# Reading: the user's files and models, once. Training needs only Corpus, Tokens and Vectors

READER = 2  # raise it when you change what is read or kept: else an old cache is used
FILES = [".txt", ".jsonl", ".json", ".csv", ".tsv", ".parquet"]  # each also .gz
PYDOCS = Path(__file__).resolve().parent / "data" / "pydocs.jsonl.gz"
COLUMNS = {  # names that a column may have; the first that is there is read
    "query": ["query", "anchor", "question"],
    "positive": ["positive", "positives", "answer", "document", "passage", "text"],
    "group": ["group"],
}
NEGATIVE = re.compile(r"negatives?(_\d+)?")  # all of these are read
SURROGATE = re.compile("[\ud800-\udfff]")  # Python has these in place of bytes that are not UTF-8


class Row(NamedTuple):
    query: str  # "" where there is none
    right: list  # documents that answer it
    wrong: list  # documents that do not
    group: str  # rows of a group are held out together


def kind_of(name):
    """The ending of a file's name, without .gz."""
    return Path(name.lower().removesuffix(".gz")).suffix


def path_of(name):
    return PYDOCS if name == "pydocs" else Path(name)


def is_remote(name):
    """Whether this is the name of data or of a model on the hub."""
    is_local = name.startswith(("builtin:", ".", "/")) or path_of(name).exists()
    return not is_local and kind_of(path_of(name).name) not in FILES


def read_source(name, split):
    """Yields (where, record or ValueError) for each row of a file or of a data set of the hub."""
    path = path_of(name)
    kind = kind_of(path.name)
    if is_remote(name):
        for row, record in enumerate(read_hub(name, split), start=1):
            yield f"{name} {split} row {row}", record
    elif not path.is_file():
        raise InputError(f"{path} is not a file here")
    elif kind not in FILES:
        raise InputError(f"{path}: its ending must be {' '.join(FILES)}, or one of these with .gz")
    elif kind == ".parquet":
        yield from read_parquet(path)
    elif kind in (".csv", ".tsv"):
        yield from read_csv(path, "\t" if kind == ".tsv" else ",")
    else:
        yield from read_lines(path, kind)


def open_file(name, mode="rt"):
    """Open a file, packed or not, whatever its name says."""
    form = {}
    with open(name, "rb") as file:
        start = file.read(2)
    if start in (b"\xff\xfe", b"\xfe\xff"):
        raise InputError(f"{name} is UTF-16: save it as UTF-8")
    if mode == "rt":
        # -sig: without the mark that spreadsheets write before the first name. surrogateescape:
        # what is not UTF-8 is found in its row. newline: csv finds the ends of its lines itself.
        form = {"encoding": "utf-8-sig", "errors": "surrogateescape", "newline": ""}
    return gzip.open(name, mode, **form) if start == b"\x1f\x8b" else open(name, mode, **form)


def read_parquet(name):
    import pyarrow.parquet

    row = 0
    with open_file(name, "rb") as file:
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches():
            for record in batch.to_pylist():
                row += 1
                yield f"{name} row {row}", record


def read_lines(name, kind):
    """Of .txt each line is a text; of .json and .jsonl each line, or each entry of one list, is a
    record."""
    with open_file(name) as file:
        if kind != ".txt" and file.read(100).lstrip().startswith("["):
            file.seek(0)
            for row, record in enumerate(json.load(file), start=1):
                yield f"{name} row {row}", record
            return
        file.seek(0)
        for line, text in enumerate(file, start=1):
            if not text.strip():
                continue
            try:
                record = {"text": text} if kind == ".txt" else json.loads(text)
            except json.JSONDecodeError as error:
                record = ValueError(f"no JSON: {error.msg}, column {error.colno}")
            yield f"{name} line {line}", record


def read_csv(name, separator):
    """Records of a table. A quote that is not closed would swallow all rows to the end: so that is
    an error. (If another one closes it, `where` names several lines.)"""
    csv.field_size_limit(sys.maxsize)
    columns = []
    end = 0
    with open_file(name) as file:
        reader = csv.reader(file, delimiter=separator, strict=True)
        try:
            for fields in reader:
                start = end + 1
                end = reader.line_num
                where = f"{name} line {start}" if start == end else f"{name} lines {start} to {end}"
                if not any(fields):  # an empty line
                    continue
                if not columns:
                    columns = [field.strip() for field in fields]
                    if len(set(columns)) < len(columns):
                        raise InputError(
                            f"{where}: two columns have one name: {', '.join(columns)}"
                        )
                elif len(fields) != len(columns):
                    text = f"{len(fields)} fields, the header has {len(columns)}"
                    text = f"{text}: put quotes around those with a {separator!r} in them"
                    yield where, ValueError(text)
                else:
                    yield where, dict(zip(columns, fields, strict=True))
        except csv.Error as error:
            text = f"{error}: is a quote not closed? What follows cannot be read"
            raise InputError(f"{name} line {end + 1}: {text}") from None


def read_hub(name, split):
    """The rows of a data set of the hub; those of MS MARCO with the names of COLUMNS."""
    hub = "microsoft/ms_marco:v1.1" if name == "ms_marco" else name
    path, _, config = hub.partition(":")
    try:
        import datasets

        rows = datasets.load_dataset(path, config or None, split=split)
    except Exception as error:  # the library raises a dozen kinds
        reason = " ".join(str(error).split())[:200]
        text = f"{path} is no file here, and not on this machine as a data set of the hub"
        raise InputError(f"{text}; without a download: pydocs, or FILE.jsonl ({reason})") from None
    for row in rows:
        if name == "ms_marco":
            record = {"query": row["query"], "positive": [], "negative": []}
            passages = row["passages"]
            judged = zip(passages["passage_text"], passages["is_selected"], strict=True)
            for text, is_answer in judged:
                record["positive" if is_answer else "negative"].append(text)
            row = record
        yield row


@functools.lru_cache
def find_columns(names, needs_query):
    """{role: the names of a record that are read for it}; a LookupError if one is lacking."""
    columns = {"negative": [name for name in names if NEGATIVE.fullmatch(name)]}
    for role, known in COLUMNS.items():
        columns[role] = [name for name in known if name in names][:1]
    if not columns["positive"] or (needs_query and not columns["query"]):
        wanted = "query and positive" if needs_query else "text"
        raise LookupError(f"found the columns {', '.join(names)}; expected {wanted}")
    if not columns["query"]:
        columns["negative"] = []
    elif "label" in names or "labels" in names:  # not to take wrong answers for right ones
        raise LookupError("found labels; expected wrong answers in the column negative")
    return columns


def texts_of(record, names):
    """The texts of a record in these columns, each of which may have a list of them."""
    texts = []
    for name in names:
        value = record[name]
        values = value if isinstance(value, list) else [value]
        values = ["" if text is None else text for text in values]
        if not all(isinstance(text, str) for text in values):
            raise ValueError(f"{name} is {str(value)[:60]!r}, expected a text or a list of texts")
        if SURROGATE.search("".join(values)):
            raise ValueError(f"{name} is not UTF-8, or has half of a character")
        texts += [text.strip() for text in values]
    return texts


def parse_row(record, columns):
    """A record as a Row. A ValueError says what was found and what was expected."""
    queries = texts_of(record, columns["query"])
    right = texts_of(record, columns["positive"])
    wrong = [text for text in texts_of(record, columns["negative"]) if text]
    if not all(right):
        raise ValueError(f"{columns['positive'][0]} is missing or empty")
    if columns["query"] and (len(queries) != 1 or not queries[0]):
        raise ValueError(f"{columns['query'][0]} is missing or empty, or more than one")
    query = "".join(queries)
    group = query or "".join(right[:1])
    for name in columns["group"]:
        if record[name] not in (None, ""):
            group = str(record[name])
    return Row(query, right, wrong, group)


def read_rows(args, name, split, limit, problems, notes):
    """Read at most `limit` rows of a source. Add a line to `problems` for each that is wrong."""
    needs_query = name == args.phase2_data and not args.skip_phase2
    source = read_source(name, split)
    records = itertools.islice(source, limit)
    rows = []
    unread = set()
    long = []
    try:
        for where, record in tqdm(records, name, disable=None, leave=False):
            try:
                if isinstance(record, ValueError):
                    raise record
                if not isinstance(record, dict):
                    raise ValueError(f"found {str(record)[:60]!r}, expected names with values")
                columns = find_columns(tuple(record), needs_query)
                rows.append(parse_row(record, columns))
            except LookupError as error:
                if kind_of(name) not in (".json", ".jsonl"):  # all rows of a table would say so
                    raise InputError(f"{name}: {error}") from None
                problems.append(f"{where}: {error}")
            except ValueError as error:
                problems.append(f"{where}: {error}")
            else:
                unread.update(set(record).difference(*columns.values()))
                if where.startswith(f"{path_of(name)} lines "):
                    long.append(where)
        if split == "train" and next(source, None) is not None:
            notes.append(f"{name}: {limit:,} rows are read, and it has more: see --max_samples_...")
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise InputError(f"{name} cannot be read, is it whole? {error}") from None
    if not rows and not problems:
        raise InputError(f"{name} has no rows")
    if unread:
        notes.append(f"{name}: these columns are not read: {', '.join(sorted(unread))}")
    if long:
        notes.append(f"{len(long)} rows have line breaks within quotes, such as {long[0]}")
    return rows


def place_of(group):
    """A number from 0 to 1, by a hash: a split by it is the same for any order and any seed."""
    digest = hashlib.sha256(group.encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def choose_held_out(args, rows):
    """The groups of a source to hold out: --eval_fraction of them, --eval_samples rows at most."""
    sizes = Counter(row.group for row in rows)
    held_out = set()
    room = args.eval_samples
    for group in sorted(sizes, key=place_of):
        if place_of(group) < args.eval_fraction and sizes[group] <= room:
            held_out.add(group)
            room -= sizes[group]
    return held_out


def read_sources(args, notes):
    """{name: rows} of the data of both phases, and the groups that are held out.

    The data of a skipped phase are read, too, if they are here: what is held out is then the same
    for both phases, and a later run without the option goes on."""
    limits = {}
    for phase in (1, 2):
        name = getattr(args, f"phase{phase}_data")
        is_skipped = getattr(args, f"skip_phase{phase}")
        if is_skipped and is_remote(name) and args.phase1_data != args.phase2_data:
            continue
        limits[name] = max(limits.get(name, 0), getattr(args, f"max_samples_phase{phase}"))

    sources = {}
    held_out = set()
    problems = []
    for name, limit in limits.items():
        rows = read_rows(args, name, "train", limit, problems, notes)
        if name == "ms_marco":  # it has rows for this purpose
            more = read_rows(args, name, "validation", args.eval_samples, problems, notes)
            held_out.update(row.group for row in more)
            rows += more
        else:
            held_out |= choose_held_out(args, rows)
        sources[name] = rows
        unanswered = sum(row.right == [] for row in rows)
        if unanswered:
            notes.append(f"{name}: {unanswered:,} of {len(rows):,} rows have no right answer")
    if problems:
        text = f"{len(problems)} bad rows"
        if not args.skip_bad_data:
            text = f"{text} (--skip_bad_data goes on without them):"
            raise InputError(text + list_problems(problems))
        notes.append(f"{text} are left out:" + list_problems(problems))
    return sources, held_out


def spread_out(numbers, wanted):
    """So many of the numbers, evenly spaced, or all if there are fewer."""
    wanted = min(wanted, len(numbers))
    return [numbers[i * len(numbers) // wanted] for i in range(wanted)]


def as_table(lists):
    """Lists of numbers as the rows of an array, filled up with -1."""
    table = np.full((len(lists), max(map(len, lists), default=0)), -1, np.int64)
    for row, numbers in zip(table, lists, strict=True):
        row[: len(numbers)] = numbers
    return table


def build_corpus(args, sources, held_out, notes):
    """Number the texts, each distinct one once, and split them: the arrays of a Corpus."""
    known_queries = set()
    for rows in sources.values():
        known_queries.update(row.query for row in rows if row.query)
    numbers = {}  # of each distinct (is it a query, text)

    def number_all(is_query, texts):
        return [numbers.setdefault((is_query, text), len(numbers)) for text in texts]

    phase1 = set()
    pairs = set()  # of a query and a document that answers it
    eval_pairs = set()
    answers = set()  # documents of held-out rows
    held_texts = set()
    right = defaultdict(set)  # of each query: none of these is a negative of it
    wrong = defaultdict(list)
    for phase in (1, 2):
        limit = getattr(args, f"max_samples_phase{phase}")
        for place, row in enumerate(sources.get(getattr(args, f"phase{phase}_data"), [])):
            is_held_out = row.group in held_out
            if place >= limit and not is_held_out:
                continue
            queries = [row.query]
            texts = row.right
            if not row.query:
                # a query among single texts: as a document it would be the best answer to itself
                queries = [text for text in row.right if text in known_queries]
                texts = [text for text in row.right if text not in known_queries]
            documents = number_all(False, texts)
            queries = number_all(True, queries)
            if is_held_out:
                answers.update(documents)
                held_texts.update([row.query, *row.right])
            elif phase == 1:
                phase1.update(documents + queries)
            if row.query:
                right[queries[0]].update(documents)
                if is_held_out or phase == 2:
                    wrong[queries[0]] += number_all(False, row.wrong)
                    into = eval_pairs if is_held_out else pairs
                    into.update((queries[0], document) for document in documents)

    # what is held out is not trained on where it stands in other rows, either, be it as a query or
    # as a document
    held = {number for (_, text), number in numbers.items() if text in held_texts}
    phase1 -= held
    pairs = sorted(pair for pair in pairs if not held.intersection(pair))
    eval_pairs = sorted(eval_pairs)
    check_counts(args, phase1, pairs, eval_pairs, answers)

    positives = []
    negatives = []
    for query, _ in pairs:
        positives.append(sorted(right[query] - held))
        own = dict.fromkeys(wrong[query])  # each once, in order
        negatives.append([text for text in own if text not in right[query] and text not in held])
    both = sum(len(right[query].intersection(wrong[query])) for query in right)
    if both:
        notes.append(f"{both} negatives are left out: they are also positives of their query")

    # the judged negatives of held-out queries first, they are the hardest; then training documents
    eval_queries = sorted({query for query, _ in eval_pairs})
    judged = set()
    for query in eval_queries:
        judged.update(wrong[query])
    documents = {number for (is_query, _), number in numbers.items() if not is_query}
    wanted = round(min(args.eval_distractors * len(answers), len(documents)))
    # a query may have answers in rows that are not held out: those distract from nothing
    others = documents - held
    for query in eval_queries:
        others -= right[query]
    distractors = spread_out(sorted(judged & others), wanted)
    distractors += spread_out(sorted(others - judged), wanted - len(distractors))
    eval_documents = [*sorted(answers), *distractors]
    row_of_query = {query: row for row, query in enumerate(eval_queries)}
    row_of_document = {document: row for row, document in enumerate(eval_documents)}
    matches = [(row_of_query[query], row_of_document[document]) for query, document in eval_pairs]
    encoded = [text.encode() for _, text in numbers]
    return {
        "text": np.frombuffer(b"".join(encoded), np.uint8),
        "offsets": np.cumsum([0, *map(len, encoded)]),
        "is_query": np.array([is_query for is_query, _ in numbers]),
        "phase1": np.array(sorted(phase1), np.int64),
        "pairs": np.array(pairs, np.int64).reshape(-1, 2),
        "positives": as_table(positives),
        "negatives": as_table(negatives),
        "eval_queries": np.array(eval_queries, np.int64),
        "eval_documents": np.array(eval_documents, np.int64),
        "eval_answers": np.array(len(answers)),
        "eval_pairs": np.array(matches, np.int64).reshape(-1, 2),
    }


def check_counts(args, phase1, pairs, eval_pairs, answers):
    """Refuse what would train on nothing, or could not be measured."""
    counts = {"held-out documents": len(answers)}
    if not args.skip_phase1:
        counts["texts for phase 1"] = len(phase1)
    if not args.skip_phase2:
        counts["pairs for phase 2"] = len(pairs)
        counts["held-out queries"] = len({query for query, _ in eval_pairs})
    if 0 in counts.values():
        found = ", ".join(f"{count} {name}" for name, count in counts.items())
        raise InputError(f"{found}; none may be 0: give more data, or another --eval_fraction")


def file_states(path):
    """Path, sizes and dates of a file, or of the files in a folder. They tell a new version."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    states = [file.stat() for file in files if file.is_file()]
    return [str(path.resolve()), [(state.st_size, state.st_ctime_ns) for state in states]]


def prepare_texts(args):
    """The folder of a Corpus, made once, and kept. (rank 0)"""
    names = """phase1_data phase2_data max_samples_phase1 max_samples_phase2 skip_phase1 skip_phase2
        eval_fraction eval_samples eval_distractors skip_bad_data""".split()
    key = [READER, [getattr(args, name) for name in names]]
    for name in (args.phase1_data, args.phase2_data):
        key.append(name if is_remote(name) else file_states(path_of(name)))

    def write(folder):
        notes = []
        sources, held_out = read_sources(args, notes)
        digest = hashlib.sha256()
        for name, array in build_corpus(args, sources, held_out, notes).items():
            np.save(folder / f"{name}.npy", array)
            digest.update(array)
        meta = {"notes": notes, "hash": digest.hexdigest()[:16]}
        (folder / "meta.json").write_text(json.dumps(meta))

    return cached(args.cache_dir, "texts", key, write)


def load_array(path):
    """An array in memory that the ranks of a machine share."""
    return np.asarray(np.load(path, mmap_mode="r"))  # faster than a memmap


class Corpus:
    """What `prepare_texts` has written. Texts are numbered, each distinct one once; a text that is
    a query and a document is two."""

    def __init__(self, folder):
        meta = json.loads((folder / "meta.json").read_text())
        self.hash = meta["hash"]
        for note in meta["notes"]:
            logging.warning(note)
        self.text = load_array(folder / "text.npy")
        # text i is text[offsets[i]:offsets[i + 1]]
        self.offsets = load_array(folder / "offsets.npy")
        self.is_query = load_array(folder / "is_query.npy")  # (N,) or a document
        self.phase1 = load_array(folder / "phase1.npy")  # texts to train on
        self.pairs = load_array(folder / "pairs.npy")  # (n, 2) query, document
        self.positives = load_array(folder / "positives.npy")  # (n, P) all of its query, then -1
        self.negatives = load_array(folder / "negatives.npy")  # (n, K) wrong for its query, then -1
        self.eval_queries = load_array(folder / "eval_queries.npy")
        self.eval_documents = load_array(folder / "eval_documents.npy")  # distractors come last
        self.eval_pairs = load_array(folder / "eval_pairs.npy")  # (m, 2) places in these two lists
        self.eval_answers = int(load_array(folder / "eval_answers.npy"))  # documents held out
        self.eval_texts = np.concatenate([self.eval_queries, self.eval_documents])
        logging.info("Data split complete:")
        logging.info(f"  phase 1:   {len(self.phase1):,} texts")
        logging.info(f"  phase 2:   {len(self.pairs):,} pairs of a query and a document")
        logging.info(f"  held out:  {self.held_out()}")

    def __len__(self):
        return len(self.is_query)

    def texts(self, numbers, prompts=None):
        """With the prompt for queries, or the one for documents, before each."""
        texts = []
        for i in numbers:
            text = self.text[self.offsets[i] : self.offsets[i + 1]].tobytes().decode()
            if prompts:
                text = prompts["query" if self.is_query[i] else "document"] + text
            texts.append(text)
        return texts

    def held_out(self):
        """What the held-out figures are measured on."""
        documents = len(self.eval_documents)
        others = documents - len(np.unique(self.eval_pairs[:, 1]))
        text = f"{len(self.eval_queries):,} queries, {documents:,} documents"
        return f"{text}, of which {others:,} ({others / documents:.0%}) answer none of them"


class Tokens:
    """The student's tokens of all texts: those of text i are ids[offsets[i]:offsets[i + 1]]."""

    def __init__(self, args, corpus, student, device):
        """Made once with the student's tokenizer and prompts. (all ranks)"""
        tokenizer = student.tokenizer
        definition = json.loads(tokenizer.backend_tokenizer.to_str())
        definition.update(truncation=None, padding=None)  # calling a tokenizer changes these
        prompts = [student.prompts["query"], student.prompts["document"]]
        key = [READER, corpus.hash, prompts, student.max_seq_length, definition]

        def write(folder):
            self.write(folder, corpus, student)

        self.folder = read_once(lambda args: cached(args.cache_dir, "tokens", key, write), args)
        self.ids = load_array(self.folder / "ids.npy")
        self.offsets = load_array(self.folder / "offsets.npy")
        self.lengths = np.diff(self.offsets)
        self.pad = tokenizer.pad_token_id
        self.groups = GROUPS[device.type]
        cut = int((self.lengths >= student.max_seq_length).sum())
        text = f"{cut:,} of {len(corpus):,} texts reach that, and are cut if they are longer"
        logging.info(f"The student reads {student.max_seq_length} tokens: {text}")

    def write(self, folder, corpus, student):
        """(rank 0)"""
        pieces = []
        options = {"truncation": True, "max_length": student.max_seq_length}
        for start in tqdm(range(0, len(corpus), 1024), "tokens", disable=None, leave=False):
            numbers = range(start, min(start + 1024, len(corpus)))
            texts = corpus.texts(numbers, student.prompts)
            for ids in student.tokenizer(texts, **options).input_ids:
                pieces.append(np.array(ids, np.int32))
        np.save(folder / "ids.npy", np.concatenate(pieces))
        np.save(folder / "offsets.npy", np.cumsum([0, *map(len, pieces)]))


class Vectors:
    """The teacher's unit vectors of all texts, the longest first, a file for each block of them."""

    def __init__(self, corpus, blocks):
        self.blocks = blocks  # (n, D) float16 each, mapped into memory
        self.size = len(blocks[0])  # n; the last block may have fewer
        self.places = np.argsort(longest_first(corpus))  # of each text
        self.dimensions = blocks[0].shape[1]

    def __getitem__(self, rows):
        """(B,) numbers of texts -> (B, D)"""
        vectors = np.empty((len(rows), self.dimensions), np.float16)
        for i, place in enumerate(self.places[rows]):
            vectors[i] = self.blocks[place // self.size][place % self.size]
        return vectors


def longest_first(corpus):
    """The numbers of all texts, so ordered that a lack of memory shows at once."""
    return np.argsort(-np.diff(corpus.offsets), kind="stable")


def teacher_key(args, corpus, name):
    """A hash of everything that the teacher's vectors depend on, but the device. (rank 0)"""
    settings = [args.teacher_max_length, args.teacher_query_prompt, args.teacher_document_prompt]
    if not name.startswith("builtin:lsa"):
        settings.append(args.trust_remote_code)
    if args.teacher_model.startswith("builtin:"):
        model = Path(name).name  # in it is a hash of what local_model made
    else:
        model = file_states(Path(name)) if Path(name).is_dir() else name
    key = json.dumps([READER, corpus.hash, model, settings])
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def teacher_vectors(args, key, name, corpus, width, device):
    """Vectors; None if the ranks agreed to stop. The student needs `width` dimensions of them.

    The texts are dealt to the ranks in blocks, one file each. A block that is there is not computed
    again: a stopped run goes on, on any number of ranks. (all ranks)"""
    is_lsa = name.startswith("builtin:lsa")
    size = len(corpus) if is_lsa else max(64, math.ceil(len(corpus) / 256))
    starts = range(0, len(corpus), size)
    folder = Path(args.cache_dir) / f"teacher-{key}-{device.type}"
    paths = [folder / f"{start:010}.npy" for start in starts]
    missing = on_rank0(lambda: [i for i, path in enumerate(paths) if not is_array(path)])
    if not missing:
        logging.info("Teacher vectors of an earlier run: no teacher is needed")
    elif is_lsa:
        on_rank0(make_lsa, paths[0], args, corpus)
    elif not encode_blocks(args, name, corpus, width, device, paths, size, missing):
        return None

    dist.barrier()
    vectors = Vectors(corpus, [load_array(path) for path in paths])
    check_dimensions(args, width, vectors.dimensions)
    return vectors


def is_array(path):
    """Whether a file is there, and whole."""
    try:
        np.load(path, mmap_mode="r")
    except (EOFError, OSError, ValueError):  # EOFError: it has no byte
        return False
    return True


def check_dimensions(args, width, dimensions):
    if not args.use_projection and dimensions < width:
        text = f"needs {width} teacher dimensions for this student, there are {dimensions}"
        raise InputError(f"--use_projection False {text}")


def encode_blocks(args, name, corpus, width, device, paths, size, missing):
    """Let the teacher read the missing blocks. Returns False if the ranks agreed to stop.
    (all ranks)"""
    teacher = load_teacher(args, name, device)
    check_dimensions(args, width, teacher.get_embedding_dimension())
    logging.info(f"The teacher reads {len(corpus):,} texts, with the prompts {teacher.prompts}")
    # prompt: the texts have theirs, a model's default would come before it
    options = {"prompt": "", "convert_to_tensor": True, "show_progress_bar": False}
    order = longest_first(corpus)
    own = missing[dist.get_rank() :: dist.get_world_size()]
    turns = math.ceil(len(missing) / dist.get_world_size())
    is_hidden = None if dist.get_rank() == 0 else True
    for turn in tqdm(range(turns), "teacher", disable=is_hidden):
        if max(gather(wish_to_stop(args))):
            return False
        if turn >= len(own):
            continue
        block = own[turn]
        texts = corpus.texts(order[block * size : (block + 1) * size], teacher.prompts)
        vectors = teacher.encode(texts, batch_size=args.teacher_batch_size, **options)
        vectors = F.normalize(vectors.float(), dim=1).cpu().numpy()
        if not np.isfinite(vectors).all():
            raise InputError(f"the teacher's vectors are not finite, near {texts[0][:80]!r}")
        write_block(paths[block], vectors)
    return True


def write_block(path, vectors):
    """Write a file that is there whole or not at all, even if two runs write it."""
    new = path.with_suffix(f".{socket.gethostname()}-{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(new, "wb") as file:
            np.save(file, vectors.astype(np.float16))
        np.load(new, mmap_mode="r")  # a full disk can cut off an array without an error
        os.replace(new, path)
    except (OSError, ValueError) as error:
        new.unlink(missing_ok=True)
        raise InputError(f"{path} cannot be written, see --cache_dir: {error}") from None


# The task in the default teacher's model card; its documents have no prompt.
INFLY_PROMPT = (
    "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: "
)


def is_without_hub(args):
    """Whether the hub is needed and does not answer: its libraries would try for half a minute.
    (rank 0)"""
    from concurrent.futures import ThreadPoolExecutor
    from urllib.error import HTTPError
    from urllib.request import urlopen

    names = {args.teacher_model, args.student_model}
    for phase in (1, 2):
        if not getattr(args, f"skip_phase{phase}"):
            names.add(getattr(args, f"phase{phase}_data"))
    remote = sorted(filter(is_remote, names))
    if not remote or "HF_HUB_OFFLINE" in os.environ:
        return False
    url = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:  # in a thread: to look up a name has no time limit of its own
        ThreadPoolExecutor(1).submit(urlopen, url, timeout=4).result(timeout=5)
    except HTTPError:  # an answer, too: a mirror need not have a page there
        return False
    except Exception:  # no name, no route, no certificate, no time: all mean the same here
        logging.warning(f"no model hub: {', '.join(remote)} must already be on this machine")
        return True
    return False


def local_model(args, name, corpus):
    """The folder of builtin:bert, made if need be; other names as they are. (all ranks)"""
    if not name.startswith("builtin:bert"):
        return name
    key = [READER, corpus.hash, name, args.student_max_length, args.seed]

    def write(folder):
        make_bert(folder, args, name, corpus)

    return str(read_once(lambda args: cached(args.cache_dir, "bert", key, write), args))


def load_model(args, name, what, local, **options):
    """A SentenceTransformer, on the CPU."""
    import transformers
    from sentence_transformers import SentenceTransformer

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()  # every rank has one
    logging.getLogger("sentence_transformers").setLevel(logging.WARNING)
    options["trust_remote_code"] = args.trust_remote_code
    try:
        model = SentenceTransformer(name, device="cpu", **options)
    except (OSError, ValueError) as error:
        text = f"--{what}_model {name} cannot be loaded; without a download: builtin:{local}"
        raise InputError(f"{text} ({str(error).splitlines()[0][:200]})") from None
    config = getattr(getattr(model[0], "model", None), "config", None)
    kinds = getattr(config, "architectures", None) or []
    if any(kind.endswith("ForSequenceClassification") for kind in kinds):
        raise InputError(f"--{what}_model {name} is a cross-encoder: it gives scores, no vectors")
    return model


def set_prompts(model, what, query, document, default=""):
    """Texts before queries and documents: as given, else the model's own, else none."""
    own = model.prompts or {}
    others = [name for name, text in own.items() if text and name not in ("query", "document")]
    if others:
        logging.warning(f"The {what}'s prompts that are not used here: {', '.join(others)}")
    if query is None:
        query = own.get("query") or default
    if document is None:
        document = own.get("document") or ""
    model.prompts = {**own, "query": query, "document": document}


def load_teacher(args, name, device):
    options = {}
    prompt = ""
    if device.type != "cpu":
        options["model_kwargs"] = {"dtype": torch.bfloat16}  # fp16 breaks some large models
    if "inf-retriever" in name:  # of the hub, or a copy in a folder
        options["config_kwargs"] = {"use_cache": False}
        prompt = INFLY_PROMPT
    teacher = load_model(args, name, "teacher", "lsa", **options)
    set_prompts(teacher, "teacher", args.teacher_query_prompt, args.teacher_document_prompt, prompt)
    if args.teacher_max_length:
        if teacher.max_seq_length in (None, math.inf):
            raise InputError(f"--teacher_max_length: {name} has no maximum length")
        teacher.max_seq_length = args.teacher_max_length
    return teacher.to(device).eval()


def load_student(args, name):
    """A SentenceTransformer that ends in Normalize, without a head."""
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

    options = {"model_kwargs": {"dtype": torch.float32}}
    student = load_model(args, name, "student", "bert", **options)
    unfit = ""
    if not hasattr(student[0], "model") or not hasattr(student.tokenizer, "backend_tokenizer"):
        unfit = "no transformer with a fast tokenizer"
    elif len(student) < 2 or not isinstance(student[1], Pooling):
        unfit = "its second module must be Pooling"
    elif student.tokenizer.pad_token_id is None:
        unfit = "its tokenizer has no padding token, which a batch needs"
    elif not any(parameter.requires_grad for parameter in student[0].parameters()):
        unfit = "all its weights are frozen: an adapter (PEFT) must be merged into the model first"
    elif args.student_max_length is None and (student.max_seq_length or math.inf) > 1e6:
        unfit = "it has no maximum length: give --student_max_length"
    if unfit:
        raise InputError(f"--student_model {name}: {unfit}")
    if student.truncate_dim is not None:
        logging.warning(f"The student's truncate_dim {student.truncate_dim} is not used")
        student.truncate_dim = None
    if args.student_layers:
        keep_layers(student[0].model, args.student_layers)
    if args.student_max_length:
        student.max_seq_length = args.student_max_length
    set_prompts(student, "student", args.student_query_prompt, args.student_document_prompt)
    if any(student.prompts.values()) and not student[1].include_prompt:
        hint = "--student_query_prompt= --student_document_prompt= leaves them out"
        raise InputError(f"--student_model {name} pools without its prompts: {hint}")
    if not isinstance(student[-1], Normalize):
        student.append(Normalize())
    return student


@torch.no_grad()
def check_student(args, student, tokens):
    """Refuse now what would fail after hours: in a forward pass, or when it is saved. On the CPU: a
    GPU cannot say what was wrong with an index. (rank 0)"""
    length = min(student.model.max_seq_length, 2048)
    ids = torch.full((1, length), int(tokens.ids.max()))
    where = tempfile.gettempdir()
    try:
        student(Texts([ids], [torch.ones_like(ids)], torch.zeros(1, dtype=torch.int64)))
        if args.save_to_artifacts:
            where = args.artifacts_dir
            os.makedirs(where, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=where) as folder:
            save_student(student, f"{folder}/student", head=False)
    except OSError as error:
        raise InputError(f"the student cannot be saved in {where}: {error}") from None
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        text = f"fails on a text of {length} tokens, the largest of which is {int(ids[0, 0])}"
        hint = "a smaller --student_max_length may help, or its tokenizer is another model's"
        reason = str(error).splitlines()[0][:200]
        raise InputError(f"--student_model {args.student_model} {text}: {reason}; {hint}") from None


def make_lsa(path, args, corpus):
    """builtin:lsa[:DIMENSIONS], a teacher: latent semantic analysis (Deerwester et al. 1990), that
    is TF-IDF and a truncated SVD, of the training texts. Writes its vectors. (rank 0)"""
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer

    logging.info(f"making {args.teacher_model} from the training texts")
    # a query and its document as one text: words that meet across the two share directions
    fitted = ["\n".join(corpus.texts(pair)) for pair in corpus.pairs]
    if not fitted:
        fitted = corpus.texts(corpus.phase1)
    # runs of letters or of digits: array_split and arraySplit2 fall apart
    words = {"token_pattern": r"[^\W\d_]+|\d+", "max_features": 12_000, "dtype": np.float32}
    vectorizer = TfidfVectorizer(**words).fit(fitted)
    vectorizer.idf_ = vectorizer.idf_**1.5  # rare words count more: better on documentation
    wanted = int(args.teacher_model.partition("lsa:")[2] or 384)
    dimensions = min(wanted, len(vectorizer.vocabulary_), len(fitted))
    if dimensions < wanted:
        logging.warning(f"builtin:lsa has {dimensions} dimensions, for more it needs more texts")
    svd = TruncatedSVD(dimensions, n_iter=3, random_state=0)
    svd.fit(vectorizer.transform(fitted))
    prompts = {"query": args.teacher_query_prompt, "document": args.teacher_document_prompt}
    prompts = {name: text or "" for name, text in prompts.items()}
    texts = corpus.texts(longest_first(corpus), prompts)
    vectors = torch.from_numpy(svd.transform(vectorizer.transform(texts)))
    write_block(path, F.normalize(vectors, dim=1).numpy())


def make_bert(folder, args, name, corpus):
    """builtin:bert[:LAYERSxWIDTH], a student: a BERT with random weights, and a tokenizer trained
    on the training texts. (rank 0)"""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    logging.info(f"making {name} from the training texts")
    # BPE: unlike that of WordPiece, the library's trainer makes the same pieces every time
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.BpeTrainer(vocab_size=8000, special_tokens=special, show_progress=False)
    trained = np.union1d(corpus.phase1, corpus.pairs)
    tokenizer.train_from_iterator(corpus.texts(trained), trainer)
    around = [("[CLS]", special.index("[CLS]")), ("[SEP]", special.index("[SEP]"))]
    processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=around)
    tokenizer.post_processor = processor
    length = args.student_max_length or 64
    names = {f"{name[1:-1].lower()}_token": name for name in special}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=length, **names)
    fast.save_pretrained(folder / "bert")

    layers, width = map(int, (name.partition("bert:")[2] or "1x128").split("x"))
    config = BertConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=width,
        num_hidden_layers=layers,
        intermediate_size=2 * width,
        num_attention_heads=1 if width % 32 else width // 32,
        max_position_embeddings=length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(args.seed)
    BertModel(config).save_pretrained(folder / "bert")
    network = Transformer(str(folder / "bert"), max_seq_length=length)
    model = SentenceTransformer(modules=[network, Pooling(width)], device="cpu")
    model.save(str(folder), create_model_card=False)


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
