"""Distill a large retrieval model, the teacher, into a small one, the student, in two phases.

Phase 1 pulls the student's vectors of single texts to the teacher's. Phase 2 trains on queries with
their documents by a contrastive loss (InfoNCE), and keeps the pull. The teacher reads each text
once, before training. Its vectors stay in --cache_dir for the next run.

    ./run_ddp.sh 2 True --config configs/train_ddp_quickstart.yaml     # minutes, no download
    torchrun --nproc_per_node=8 train_ddp.py --trust_remote_code    # MS MARCO

--use_projection True adds a head (Linear, GELU, LayerNorm, Linear) to as many dimensions as the
teacher has. False (MRL) adds none: the target is the first part of its vectors, renormalized.
What the teacher scores above a query's answer by --false_negative_margin is no negative of it.

Data (--phase1_data, --phase2_data; each one or several): FILE.jsonl, .json, .csv, .tsv, .parquet,
or .txt (a text a line, for phase 1), also .gz; 'FOLDER/*.jsonl'; pydocs (in data/); ms_marco, or
another data set of the hub (NAME or NAME:CONFIG); of SOURCE@1000 so many rows are read. Columns:
query (or question, anchor), positive (or answer, pos, text; a text or a list) and, if there are
any, negative, negatives, negative_1 ..., group (its rows are held out together). Held out are
--eval_fraction of the queries of phase 2; or give --eval_data and --test_data, folders in BEIR's
layout (corpus.jsonl, queries.jsonl, qrels/dev.tsv, test.tsv; to train on, train.tsv) or one of
their qrels files. --teacher_model: of the hub, a folder, builtin:lsa; or a file of its vectors,
.jsonl or .parquet, with columns vector, and query or text.

Logged, over all ranks:
    loss; in phase 2 its parts infonce (nats per query) and pull (squared distance to the teacher)
    val/ndcg@10, val/mrr@10, val/recall@100 of held-out queries; val/asym_ndcg@10, the same with the
    teacher's documents; val/teacher_cosine, of held-out queries and answers; the best is 1
    lr, grad_norm (before clipping), skipped (steps whose gradient was not finite), samples_per_s
    (texts or queries), data_wait (part of the time), peak_gb (of a GPU)
Files in --output_dir: latest.pt, phase1_best.pt, phase2_best.pt, best.pt, step_N.pt, metrics.jsonl;
at the end summary.json, curves.png. The same command, given again, goes on from latest.pt.
"(all ranks)": every rank must call it, in the same order; "(rank 0)": only rank 0 does.
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
import fcntl
import functools
import glob
import hashlib
import itertools
import json
import logging
import math
import os
import re
import signal
import sys
import tempfile
import time
import traceback
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

BATCH_SIZE = 64  # texts, or queries with documents, of a micro-batch, if --batch_size is not given
EVAL_BATCH_SIZE = 128  # texts that a rank reads at a time in an evaluation


def parse_args():
    parser = Parser(description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False)
    add = parser.add_argument_group("data").add_argument
    add("--phase1_data", type=expanded, nargs="+", default=["ms_marco"], help="texts of phase 1")
    add("--phase2_data", type=expanded, nargs="+", default=["ms_marco"], help="queries, documents")
    add("--max_samples_phase1", type=COUNT, default=100_000, help="rows read for phase 1")
    add("--max_samples_phase2", type=COUNT, default=500_000, help="rows read for phase 2")
    add("--num_negatives", type=number(0, 1000, int), default=7, help="per query, drawn anew")

    add = parser.add_argument_group("model").add_argument
    add("--teacher_model", type=expanded, default="infly/inf-retriever-v1-pro", help="see above")
    add("--teacher_batch_size", type=COUNT, default=64, help="texts per forward pass")
    add("--teacher_max_length", type=COUNT, help="tokens; None: the model's own")
    add("--teacher_query_prompt", help="text before queries; None: the model's own")
    add("--teacher_document_prompt", help="text before documents; None: the model's own")
    default = "sentence-transformers/all-mpnet-base-v2"
    add("--student_model", type=expanded, default=default, help="or a folder, or builtin:bert")
    add("--student_max_length", type=COUNT, help="tokens; None: the model's own")
    add("--student_query_prompt", help="text before queries; None: the model's own")
    add("--student_document_prompt", help="text before documents; None: the model's own")
    add("--trust_remote_code", **FLAG, help="run code of the models; the default teacher has some")
    add("--use_projection", **{**FLAG, "default": True}, help="a head; False: MRL")
    add("--projection_hidden", type=COUNT, default=1536, help="hidden width of the head, if any")

    add = parser.add_argument_group("training").add_argument
    add("--infonce_weight", type=number(0), default=0.8, help="of InfoNCE")
    add("--phase2_l2_weight", type=number(0), default=0.2, help="of the pull in phase 2")
    add("--temperature", type=number(1e-4), default=0.02, help="divides all scores")
    add("--false_negative_margin", type=number(-1, 2), default=0.0, help="2: all are negatives")
    add("--phase1_epochs", type=COUNT, default=1, help="passes over the texts")
    add("--phase2_epochs", type=COUNT, default=3, help="passes over the queries")
    add("--max_steps", type=NATURAL, default=0, help="per phase at most; 0: all epochs")
    add("--phase1_lr", type=number(0), default=2e-5, help="peak learning rate")
    add("--phase2_lr", type=number(0), default=5e-6, help="peak learning rate")
    add("--warmup_ratio", type=number(0, 1), default=0.1, help="fraction of a phase; then it falls")
    add("--weight_decay", type=number(0), default=0.01, help="of matrices; embeddings, others: 0")
    add("--skip_phase1", **FLAG, help="start phase 2 from --phase1_weights")
    add("--phase1_weights", type=expanded, help="None: phase1_best.pt, if --output_dir has it")
    add("--skip_phase2", **FLAG, help="stop after phase 1")
    add("--save_to_artifacts", **FLAG, help="save a SentenceTransformer at the end")
    add("--artifacts_dir", type=expanded, default="./artifacts", help="where it is saved")

    add = parser.add_argument_group("evaluation").add_argument
    add("--eval_fraction", type=number(1e-6, 0.99), default=0.05, help="of the queries: held out")
    add("--eval_samples", type=COUNT, default=1000, help="rows held out, at most")
    add("--eval_distractors", type=NATURAL, default=1000, help="other documents to rank, too")
    add("--eval_data", type=expanded, help="evaluate on this collection instead, see above")
    add("--test_data", type=expanded, help="another one, for the best weights at the end")
    add("--eval_every", type=NATURAL, default=0, help="steps between evaluations; 0: every epoch")
    add_common_arguments(parser, output_dir="./checkpoints")
    args = parse_with_config(parser)

    if args.skip_phase1 and args.skip_phase2:
        parser.error("--skip_phase1 and --skip_phase2 together leave nothing to train")
    if args.phase1_weights and not args.skip_phase1:
        parser.error("--phase1_weights is for --skip_phase1")
    weights = Path(args.output_dir) / "phase1_best.pt"
    if args.skip_phase1 and args.fresh and not args.phase1_weights and weights.exists():
        parser.error(f"--fresh moves {weights} aside: give another --output_dir")
    if args.teacher_model == "builtin:lsa" or is_file(args.teacher_model):
        for name in ("max_length", "query_prompt", "document_prompt"):
            if getattr(args, f"teacher_{name}") is not None:
                parser.error(f"--teacher_{name}: {args.teacher_model} is no network, and has none")
    return args


# --------------------------------------------------------------------------------------------------
# Data

BLOCK = 1024  # texts in a file of the teacher's vectors


class Collection(NamedTuple):
    """Queries, and the documents that are ranked for them."""

    queries: np.ndarray  # (Q,) texts
    documents: np.ndarray  # (N,) texts
    # (A, 3) positions in `texts` of a query, and of a document that answers it; grade, from 1 on
    answers: np.ndarray

    @property
    def texts(self):
        return np.concatenate([self.queries, self.documents])


class Corpus(NamedTuple):
    """What `prepare` has written, in memory that the ranks of a machine share. Texts are numbered,
    each distinct one once. (A text that is a query and a document is two.)"""

    hash: str  # of the texts, and of what they are used for
    texts_hash: str
    phase1: np.ndarray  # (n,) texts to train on
    # (n, 4) a query, a document that answers it, where its negatives begin and where they end
    pairs: np.ndarray
    negatives: np.ndarray  # documents that do not answer it, query after query
    held_out: Collection  # of the evaluations
    test: Collection  # of --test_data
    ids: np.ndarray  # the student's tokens: those of text i are ids[offsets[i]:offsets[i + 1]]
    offsets: np.ndarray
    lengths: np.ndarray  # in tokens
    pad: int  # token that fills up
    groups: int  # of a batch, at least. More: less padding, but a GPU waits for the host more often
    teacher: np.ndarray | None = None  # vectors of all texts, if the teacher is no network


class Vectors:
    """The teacher's unit vectors of all texts, in blocks of BLOCK texts, mapped into memory."""

    def __init__(self, name, blocks):
        self.name = name
        self.blocks = blocks
        self.dimensions = blocks[0].shape[1]

    def __getitem__(self, text_ids):
        """(B,) -> (B, D) float16"""
        return np.stack([self.blocks[i // BLOCK][i % BLOCK] for i in text_ids])


class Batch(NamedTuple):
    """B texts, in a few groups of similar length, each padded to its longest. In phase 2 these are
    queries, as many documents that answer them, and then others that do not."""

    ids: list  # of tokens (b, L) int64 of each group
    masks: list  # (b, L) int64, 0 where there is padding
    order: torch.Tensor  # (B,) where each text is among those of all groups
    text_ids: torch.Tensor  # (B,) in the corpus
    targets: torch.Tensor  # (B, D) float16, the teacher's vectors
    total: int = 0  # texts, or queries, of the whole step, all ranks
    num_queries: int = 0  # 0 in phase 1
    documents_per_query: int = 0  # at most

    def to(self, device):
        moved = {}
        for name in ("ids", "masks"):
            moved[name] = [part.to(device, non_blocking=True) for part in getattr(self, name)]
        for name in ("order", "text_ids", "targets"):
            moved[name] = getattr(self, name).to(device, non_blocking=True)
        return self._replace(**moved)


def make_batch(corpus, vectors, text_ids, **counts):
    """The texts `text_ids` (B,) as a Batch, with the teacher's vectors of them."""
    by_length = np.argsort(corpus.lengths[text_ids], kind="stable")
    ids = []
    masks = []
    groups = max(corpus.groups, min(8, len(text_ids) // 256))
    for group_ids in np.array_split(text_ids[by_length], min(groups, len(text_ids))):
        lengths = corpus.lengths[group_ids]
        columns = np.arange(lengths.max())
        mask = columns < lengths[:, None]
        source = np.where(mask, corpus.offsets[group_ids][:, None] + columns, 0)
        filled = np.where(mask, corpus.ids[source], corpus.pad)
        ids.append(torch.from_numpy(filled.astype(np.int64)))
        masks.append(torch.from_numpy(mask.astype(np.int64)))
    order = torch.from_numpy(np.argsort(by_length))
    targets = torch.from_numpy(vectors[text_ids])
    text_ids = torch.from_numpy(text_ids.copy())  # of a mapped array torch would warn
    return Batch(ids, masks, order, text_ids, targets, **counts)


class TextData(Dataset):
    """Phase 1: single texts, all queries and documents of its rows."""

    def __init__(self, args, corpus):
        self.args = args
        self.corpus = corpus
        self.vectors = None  # the teacher's, once it has read the texts

    def samples(self):
        """What an epoch is made of, and the cost of each in tokens."""
        return self.corpus.phase1, self.corpus.lengths

    def __getitem__(self, item):
        """item: what GlobalBatchSampler yields"""
        _, global_ids, positions_in_batch = item
        text_ids = global_ids[positions_in_batch]
        return make_batch(self.corpus, self.vectors, text_ids, total=len(global_ids))


class PairData(TextData):
    """Phase 2: a query, a document that answers it, and some that do not."""

    def __init__(self, args, corpus):
        super().__init__(args, corpus)
        self.queries, self.positives, self.begin, self.end = corpus.pairs.T
        self.available = self.end - self.begin
        self.num_drawn = np.minimum(self.available, args.num_negatives)
        self.documents_per_query = 1 + int(self.num_drawn.max(initial=0))

    def samples(self):
        lengths = self.corpus.lengths
        tokens = np.concatenate([[0], np.cumsum(lengths[self.corpus.negatives])])
        mean = (tokens[self.end] - tokens[self.begin]) / np.maximum(1, self.available)
        cost = mean * self.num_drawn + lengths[self.corpus.pairs[:, :2]].sum(1)
        return np.arange(len(cost)), cost

    def draw(self, step, position, negatives):
        """Some negatives of a query by (seed, step, position): the same on any number of ranks."""
        if len(negatives) <= self.args.num_negatives:
            return negatives
        # numpy ignores zeros at the end: without the 1 position 0 would have an epoch's numbers
        rng = np.random.default_rng([self.args.seed, step, position, 1])
        return rng.choice(negatives, self.args.num_negatives, replace=False)

    def __getitem__(self, item):
        step, global_ids, positions_in_batch = item
        pair_ids = global_ids[positions_in_batch]
        drawn = []
        for position, pair in zip(positions_in_batch, pair_ids, strict=True):
            negatives = self.corpus.negatives[self.begin[pair] : self.end[pair]]
            drawn.append(self.draw(step, position, negatives))
        text_ids = np.concatenate([self.queries[pair_ids], self.positives[pair_ids], *drawn])
        counts = {"num_queries": len(pair_ids), "documents_per_query": self.documents_per_query}
        return make_batch(self.corpus, self.vectors, text_ids, total=len(global_ids), **counts)


# --------------------------------------------------------------------------------------------------
# Model


class Student(nn.Module):
    """A SentenceTransformer that reads a Batch."""

    def __init__(self, model):
        super().__init__()
        self.model = model  # a transformer, pooling, and what else it has; the last one: Normalize

    def forward(self, batch):
        """Unit vectors (B, D) in float32, in the order in which the texts were asked for."""
        network, pooling, *others = self.model
        pooled = []
        for ids, mask in zip(batch.ids, batch.masks, strict=True):
            features = network({"input_ids": ids, "attention_mask": mask})
            # bf16 has three digits: enough within the network, not for vectors that are compared
            states = features["token_embeddings"].float()
            features = pooling({"token_embeddings": states, "attention_mask": mask})
            pooled.append(features["sentence_embedding"])
        features = {"sentence_embedding": torch.cat(pooled).index_select(0, batch.order)}
        with torch.autocast(batch.order.device.type, enabled=False):
            for module in others:
                features = module(features)
        return features["sentence_embedding"]

    def add_head(self, hidden, dimensions):
        """Add a head of sentence-transformers' own modules, so that anybody can load it."""
        from sentence_transformers.sentence_transformer.modules import Dense, LayerNorm, Normalize

        width = self.model.get_embedding_dimension()
        self.model.append(Dense(width, hidden, activation_function=nn.GELU()))
        self.model.append(LayerNorm(hidden))
        self.model.append(Dense(hidden, dimensions, activation_function=nn.Identity()))
        self.model.append(Normalize())


def keep_masks_whole():
    """Transformers leaves out a mask that hides nothing. To look at the mask, the host would wait
    until a GPU has done all that is queued. So this tells it not to look."""
    from transformers import AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    def whole(*args, **options):
        options.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        return sdpa_mask(*args, **options)

    AttentionMaskInterface.register("sdpa", whole)


# --------------------------------------------------------------------------------------------------
# Loss

# as torch names them, from 2.13 on and before
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
LOGGED = {1: ["loss"], 2: ["loss", "infonce", "pull"]}  # of a step of each phase


def pull(vectors, targets):
    """Unit vectors (B, D) -> (B,), the squared distance, summed over D: 2 (1 - cosine)."""
    return (vectors - targets).square().sum(1)


def unit_targets(targets, dimensions):
    """The first dimensions of the teacher's vectors (B, D), again as unit vectors, float32."""
    return F.normalize(targets[:, :dimensions].float(), dim=1)


def text_loss(vectors, batch):
    """What a micro-batch adds to the mean loss of phase 1 over the step."""
    return pull(vectors, unit_targets(batch.targets, vectors.shape[1])).sum() / batch.total


class Gather(torch.autograd.Function):
    """Rows (n, ...) of each of the W ranks -> (W n, ...), those of all. Going back, a rank gets the
    sum of all ranks' gradients by its own rows. (all ranks)"""

    @staticmethod
    def forward(context, rows):
        gathered = rows.new_empty(dist.get_world_size() * len(rows), *rows.shape[1:])
        all_gather(gathered, rows.contiguous())
        return gathered

    @staticmethod
    def backward(context, gradient):
        own = gradient.new_empty(len(gradient) // dist.get_world_size(), *gradient.shape[1:])
        reduce_scatter(own, gradient.contiguous())
        return own


def split_roles(batches, rows):
    """Of rows (B, ...), one for each text of the micro-batches: those of the Q queries, and those
    of the N documents, first the Q that answer them."""
    sizes = []
    for batch in batches:
        num_negatives = len(batch.text_ids) - 2 * batch.num_queries
        sizes += [batch.num_queries, batch.num_queries, num_negatives]
    parts = rows.split(sizes)  # queries, positives and negatives of each micro-batch
    return torch.cat(parts[0::3]), torch.cat(parts[1::3] + parts[2::3])


def pair_loss(args, batches, vectors):
    """This rank's part of the loss of phase 2, of InfoNCE and of the pull (3,): over the ranks they
    add up to those of the step. And the gradient of the step's loss with respect to `vectors` (B,
    D), those of this rank's texts. (all ranks)

    InfoNCE (van den Oord et al. 2018) is the cross entropy of each query's positive among the
    documents of the whole step, on all ranks. Each rank scores its own queries."""
    total = batches[0].total
    dimensions = vectors.shape[1]
    vectors = vectors.detach().requires_grad_()
    queries, own_documents = split_roles(batches, vectors)
    own_targets = torch.cat([batch.targets[:, :dimensions] for batch in batches])
    query_targets, own_document_targets = split_roles(batches, own_targets)
    own_ids = torch.cat([batch.text_ids for batch in batches])
    query_ids, own_document_ids = split_roles(batches, own_ids)

    # The documents of all ranks. Each rank gives as many rows as it can have at most, filled up.
    most_rows = math.ceil(total / dist.get_world_size()) * batches[0].documents_per_query
    filling = (0, most_rows - len(own_document_ids))
    documents = Gather.apply(F.pad(own_documents, (0, 0, *filling)))
    document_targets = Gather.apply(F.pad(own_document_targets, (0, 0, *filling)))
    document_ids = Gather.apply(F.pad(own_document_ids, filling, value=-1))
    # the query whose positive a document is, -1 for all others
    answered = Gather.apply(F.pad(query_ids, (0, most_rows - len(query_ids)), value=-1))
    first = dist.get_rank() * most_rows  # where this rank's documents begin
    positives = torch.arange(first, first + len(queries), device=vectors.device)

    # What is masked is no negative. A document that the teacher finds better than the positive may
    # well answer the query, too (Solatorio 2024). So does its positive in another pair of the step.
    query_targets = unit_targets(query_targets, dimensions)
    teacher_scores = query_targets @ unit_targets(document_targets, dimensions).T
    limits = teacher_scores.gather(1, positives[:, None]) + args.false_negative_margin
    masked = teacher_scores > limits + 1e-5  # equal scores may differ by rounding
    masked |= answered == query_ids[:, None]
    masked |= document_ids == document_ids[positives][:, None]
    masked |= document_ids < 0
    masked = masked.scatter(1, positives[:, None], False)
    scores = (queries @ documents.T / args.temperature).masked_fill(masked, -math.inf)
    infonce = F.cross_entropy(scores, positives, reduction="sum") / total

    # half of the pull is for the queries, half for the documents
    query_pull = pull(queries, query_targets).sum() / total
    document_pull = pull(own_documents, unit_targets(own_document_targets, dimensions)).sum()
    pull_loss = 0.5 * query_pull + 0.5 * document_pull / (document_ids >= 0).sum()
    loss = args.infonce_weight * infonce + args.phase2_l2_weight * pull_loss
    (gradient,) = torch.autograd.grad(loss, vectors)
    return torch.stack([loss, infonce, pull_loss]).detach(), gradient


# --------------------------------------------------------------------------------------------------
# Evaluation


@torch.no_grad()
def evaluate(student, corpus, collection, vectors, device, is_aligned=True):
    """Metrics of a Collection. Each text is read once, without autocast, in the same batch on any
    number of ranks. Rank 0 computes what all ranks decide by: another processor might round
    otherwise. is_aligned: the student's dimensions are those of its targets. (all ranks)"""
    text_ids = collection.texts
    by_length = np.argsort(-corpus.lengths[text_ids], kind="stable")
    batches = np.array_split(by_length, math.ceil(len(text_ids) / EVAL_BATCH_SIZE))
    dimensions = student.model.get_embedding_dimension()
    student_vectors = torch.zeros(len(text_ids), dimensions, device=device)
    student.eval()
    for own in batches[dist.get_rank() :: dist.get_world_size()]:
        batch = make_batch(corpus, vectors, text_ids[own]).to(device)
        student_vectors[torch.from_numpy(own).to(device)] = student(batch)
    student.train()
    dist.all_reduce(student_vectors)  # each row is zero on all ranks but one
    return on_rank0(measure, collection, vectors, student_vectors, is_aligned)


def measure(collection, vectors, student_vectors, is_aligned):
    """Metrics of the student's vectors of a Collection. (rank 0)"""
    metrics = ranking_metrics(collection, student_vectors)
    if not is_aligned:
        return metrics
    targets = torch.from_numpy(vectors[collection.texts]).to(student_vectors)
    targets = unit_targets(targets, student_vectors.shape[1])
    cosine = (student_vectors * targets).sum(1).double().cpu().numpy()
    count = len(collection.queries)
    if count > 0:
        cosine = cosine[np.unique(collection.answers[:, :2])]  # queries, and what answers them
        # the student's queries in an index of the teacher's documents
        mixed = torch.cat([student_vectors[:count], targets[count:]])
        metrics["asym_ndcg@10"] = ranking_metrics(collection, mixed)["ndcg@10"]
    metrics["teacher_cosine"] = float(cosine.mean())
    return metrics


def rank_teacher(collection, vectors, dimensions):
    """What the teacher reaches by the first dimensions of its vectors. (rank 0)"""
    targets = torch.from_numpy(vectors[collection.texts])
    return ranking_metrics(collection, unit_targets(targets, dimensions))


def ranking_metrics(collection, vectors):
    """nDCG@10 (Jarvelin and Kekalainen 2002; a grade is its gain, as in trec_eval), MRR@10 and
    recall@100, each the mean over the queries; nothing if there are none. vectors: of
    collection.texts. (rank 0)

    The rank of an answer is after all other documents that have its score or a higher one, and
    after the query's better answers. So one vector for all texts does not look good."""
    count = len(collection.queries)
    queries, documents, grades = collection.answers.T - [[0], [count], [0]]
    discounts = 1 / np.log2(np.arange(2, 12))
    metrics = defaultdict(list)
    for start in range(0, count, 64):
        scores = vectors[start : min(start + 64, count)] @ vectors[count:].T
        for query, row in enumerate(scores.cpu().numpy(), start):
            is_own = queries == query
            gains = grades[is_own]
            own = row[documents[is_own]]
            row[documents[is_own]] = -math.inf
            by_score = np.lexsort([gains, -own])  # of equal scores the lower grade first
            # equal scores may differ by rounding
            ranks = 1 + (row >= own[by_score, None] - 1e-6).sum(1) + np.arange(len(own))

            top = ranks <= 10
            gain = (gains[by_score][top] * discounts[ranks[top] - 1]).sum()
            ideal = (-np.sort(-gains)[:10] * discounts[: len(gains)]).sum()
            metrics["ndcg@10"].append(gain / ideal)
            metrics["mrr@10"].append(1 / ranks[0] if ranks[0] <= 10 else 0)
            metrics["recall@100"].append((ranks <= 100).mean())
    return {name: float(np.mean(values)) for name, values in metrics.items()}


# --------------------------------------------------------------------------------------------------
# Train


class Phase(NamedTuple):
    number: int
    data: TextData
    sampler: "GlobalBatchSampler"
    steps: int
    lr: float  # its peak


def make_phases(args, corpus, model, device):
    """The phases that are not skipped. Their data have no vectors yet. (all ranks)"""
    phases = []
    # in fp32 a token takes about 48 numbers for each unit of a layer, padding included
    layers = getattr(model[0].model.config, "num_hidden_layers", 12)
    room = room_on_gpu(model, device) / (4 * 48 * model.get_embedding_dimension() * layers)
    for number, kind in {1: TextData, 2: PairData}.items():
        if getattr(args, f"skip_phase{number}"):
            continue
        logging.info(f"Phase {number}:")
        data = kind(args, corpus)
        ids, cost = data.samples()
        sampler = GlobalBatchSampler(ids, args, cost, room)
        epochs = getattr(args, f"phase{number}_epochs")
        steps = min(sampler.steps * epochs, args.max_steps or math.inf)
        logging.info(f"  {steps:,} steps, {sampler.steps:,} an epoch")
        phases.append(Phase(number, data, sampler, steps, getattr(args, f"phase{number}_lr")))
    return phases


def lr_factor(args, step, steps):
    """What the peak rate is multiplied by. It rises in a straight line, then falls to 0."""
    warmup_steps = int(args.warmup_ratio * steps)
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    return 1 - (step - warmup_steps) / max(1, steps - warmup_steps)


def make_optimizer(args, model, lr):
    """Weight decay pulls towards zero. That helps matrices. But a bias or a norm's scale needs its
    size, and the vector of a rare word would fade."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    parameters = [p for p in model.parameters() if p.requires_grad]
    decay = [p for p in parameters if p.ndim > 1 and id(p) not in embeddings]
    no_decay = [p for p in parameters if p.ndim < 2 or id(p) in embeddings]
    groups = [{"params": decay}, {"params": no_decay, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, weight_decay=args.weight_decay, fused=True)


def text_step(ddp_model, batches, autocast):
    """Forward and backward of a step of phase 1. Returns this rank's part of LOGGED. (all ranks)"""
    metrics = torch.zeros(1, device=batches[0].targets.device)
    for micro, batch in enumerate(batches, start=1):
        ddp_model.require_backward_grad_sync = micro == len(batches)
        with autocast():
            vectors = ddp_model(batch)
        loss = text_loss(vectors, batch)
        (loss * dist.get_world_size()).backward()  # DDP takes the mean, we want the sum
        metrics += loss.detach()
    return metrics


def pair_step(args, ddp_model, batches, autocast, step):
    """Forward and backward of a step of phase 2. Returns this rank's part of LOGGED. (all ranks)

    The graphs of several micro-batches are not kept: each is made again for its backward pass (Gao
    et al. 2021), with the same seed, so that dropout hits the same places."""
    is_whole = len(batches) == 1
    vectors = []
    for batch in batches:
        ddp_model.require_backward_grad_sync = is_whole
        with autocast(), torch.set_grad_enabled(is_whole):
            vectors.append(ddp_model(batch))
    metrics, gradient = pair_loss(args, batches, torch.cat(vectors))
    gradient = gradient * dist.get_world_size()  # DDP takes the mean, we want the sum
    gradients = gradient.split([len(batch.text_ids) for batch in batches])
    if not is_whole:
        seed_step(args, step)
    for micro, (batch, micro_gradient) in enumerate(zip(batches, gradients, strict=True), start=1):
        ddp_model.require_backward_grad_sync = micro == len(batches)
        micro_vectors = vectors[0]
        if not is_whole:
            with autocast():
                micro_vectors = ddp_model(batch)
        micro_vectors.backward(micro_gradient)
    return metrics


def train(args, device, phase, student, ddp_model, state, log, loop):
    """One phase, from `loop` on. Returns why it was stopped, "" if it has ended. (all ranks)"""
    sampler = phase.sampler
    optimizer = make_optimizer(args, student, phase.lr)
    autocast = choose_precision(args, device)
    if state:
        student.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        state.clear()  # each rank has a copy: free it
    student.train()
    save = functools.partial(save_checkpoint, args=args, log=log, loop=loop, model=student)
    done = loop["step"] - loop["before"]  # steps of this phase
    sampler.start = done
    batches = make_loader(phase.data, sampler, args, device)

    logging.info(f"Starting distributed training of phase {phase.number}...")
    bar = tqdm(total=phase.steps, initial=done, disable=None if dist.get_rank() == 0 else True)
    meter = Meter(LOGGED[phase.number], args, device)
    reason = ""
    while done < phase.steps and not reason:
        step = loop["step"]
        epoch, position = divmod(done, sampler.steps)
        if position == 0:
            logging.info(f"Starting training epoch {epoch}")
        seed_step(args, step)
        lr = phase.lr * lr_factor(args, done, phase.steps)
        for group in optimizer.param_groups:
            group["lr"] = lr

        # forward and backward of all micro-batches; the last one sums over the ranks
        step_batches = [meter.next_batch(batches, device) for _ in range(sampler.accumulation)]
        if phase.number == 1:
            metrics = text_step(ddp_model, step_batches, autocast)
        else:
            metrics = pair_step(args, ddp_model, step_batches, autocast, step)
        norm = update_if_finite(args, optimizer)
        meter.add(metrics, norm)
        loop["step"] += 1
        done += 1
        bar.update()

        # log, and agree whether to stop
        must_evaluate = done % (args.eval_every or sampler.steps) == 0 or done == phase.steps
        must_save = loop["step"] % args.save_every == 0 or must_evaluate
        log_row = {"step": loop["step"], "phase": phase.number, "epoch": epoch, "lr": lr}
        reason = meter.log_and_agree(log, log_row, sampler.global_batch, must_save)

        # evaluate: all ranks get the same metrics, and so agree on what is best
        if must_evaluate:
            corpus = phase.data.corpus
            val_metrics = evaluate(student, corpus, corpus.held_out, phase.data.vectors, device)
            val_row = {f"val/{name}": value for name, value in val_metrics.items()}
            log.write({"step": loop["step"], "phase": phase.number, "epoch": epoch, **val_row})
            keep_best(loop, phase.number, val_metrics, save)

        # save, with what the evaluation has changed
        if args.keep_every and loop["step"] % args.keep_every == 0:
            save(f"step_{loop['step']}.pt")
        if reason or must_save:
            save("latest.pt", optimizer=optimizer)
            meter.start()  # neither counts as time of steps
    bar.close()
    if not reason and f"phase {phase.number}" not in loop["best"]:
        raise InputError(f"--max_steps {args.max_steps}: {done} are made, and none was evaluated")
    return reason


def keep_best(loop, number, metrics, save):
    """Save weights that are the best of their phase, and those that are the best of both."""
    metric = "ndcg@10" if "ndcg@10" in metrics else "teacher_cosine"  # where there are no queries
    value = metrics[metric]
    for name, found in metrics.items():
        if not math.isfinite(found):
            raise RuntimeError(f"the validation {name} is {found}: a lower --phase{number}_lr?")
    values = {phase: best["value"] for phase, best in loop["best"].items()}
    if value <= values.get(f"phase {number}", -math.inf):
        return
    best = {"metric": metric, "value": value, "step": loop["step"], "metrics": metrics}
    loop["best"][f"phase {number}"] = best
    save(f"phase{number}_best.pt")
    if value > max(values.values(), default=-math.inf):
        save("best.pt")


# --------------------------------------------------------------------------------------------------
# Main

# Options that may differ when a run is resumed, and those that may until phase 2 has begun
FREE_ALWAYS = """phase1_data phase2_data eval_data test_data max_samples_phase1 max_samples_phase2
    phase1_epochs phase2_epochs max_steps eval_every skip_phase1 teacher_batch_size
    save_to_artifacts artifacts_dir""".split()
FREE_UNTIL_PHASE2 = """phase2_lr num_negatives infonce_weight phase2_l2_weight temperature
    false_negative_margin phase1_weights skip_phase2""".split()


def check_paths(args, phase):
    """Refuse a path to nothing before the reading. A name such as a/b may be the hub's. (rank 0)"""
    names = "teacher_model student_model eval_data test_data".split()
    names += ["phase1_weights"] if phase < 2 else []
    for name in names:
        path = getattr(args, name) or "."
        is_name = re.fullmatch(r"[^./][^/]*(/[^/]+)?", path) and not is_file(path)
        if not os.path.exists(path) and not (is_name and name.endswith("model")):
            raise InputError(f"--{name} {path}: there is no such file or folder")


def begin_phase2(args, student, step):
    """Load the best weights of phase 1. step: steps made so far. (all ranks)"""
    path = args.phase1_weights or f"{args.output_dir}/phase1_best.pt"
    if not on_rank0(os.path.exists, path):
        if args.phase1_weights or step > 0:
            raise InputError(f"{path}: there is no such file; expected weights of phase 1")
        logging.warning(f"there is no {path}: phase 2 starts from the student as it is")
        return
    logging.info(f"Loading {path}")
    try:
        state = on_rank0(torch.load, path, "cpu")
        student.load_state_dict(state["model"])
    except Exception as error:  # torch.load raises many kinds
        text = " ".join(str(error).split())[-300:]
        raise InputError(f"{path}: expected phase1_best.pt of such a student; {text}") from None
    if state["args"]["data_hash"] != args.data_hash:
        text = f"{path} is of a run on other data, or with another tokenizer or teacher"
        logging.warning(f"{text}: what is held out here may have been trained on")


def save_artifact(args, model, best):
    """Save the student as a SentenceTransformer, once. Returns its folder. (rank 0)"""
    short = re.sub(r"\W+", "-", Path(args.student_model).name).strip("-")
    mode = "" if args.use_projection else "-mrl"
    name = f"distilled-{short}-{model.get_embedding_dimension()}d{mode}"
    origin = json.dumps({"output_dir": os.path.abspath(args.output_dir), **best}, indent=1)
    for number in itertools.count(1):
        path = Path(args.artifacts_dir) / (name if number == 1 else f"{name}-{number}")
        record = path / "distilled.json"
        if not path.exists():
            model.save(str(path), create_model_card=False)
            record.write_text(origin)
        if record.exists() and record.read_text() == origin:  # else it may be another run's
            break
    logging.info(f"Saved {path} (best: {best['phase']}, step {best['step']})")
    return str(path)


def finish(args, student, loop, baselines, corpus, vectors, device):
    """Show what was reached; test and save the best. Returns figures of the run. (all ranks)"""
    phases = {name: best["metrics"] for name, best in loop["best"].items()}
    name = max(phases, key=lambda name: loop["best"][name]["value"])
    best = {"phase": name, **loop["best"][name]}
    figures = {"best": best, "baselines": baselines, "phases": phases}
    table = {**baselines, **{f"after {name}": metrics for name, metrics in phases.items()}}
    student.load_state_dict(on_rank0(torch.load, f"{args.output_dir}/best.pt", "cpu")["model"])
    if args.test_data:
        figures["test_teacher"] = on_rank0(rank_teacher, corpus.test, vectors, vectors.dimensions)
        figures["test"] = evaluate(student, corpus, corpus.test, vectors, device)
        table["test_teacher"] = figures["test_teacher"]
        table[f"test (best: {name}, step {best['step']})"] = figures["test"]

    logging.info("Held-out figures, the best of each phase:")
    for who, metrics in table.items():
        text = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        who = "before training" if who == "untrained" else who
        logging.info(f"  {who:{max(15, *map(len, table))}}  {text}")
    if best["value"] <= baselines["untrained"].get(best["metric"], -math.inf):
        logging.warning("training did not make the student better: look at the rates and the data")
    if args.save_to_artifacts:
        figures["artifacts"] = [on_rank0(save_artifact, args, student.model, best)]
    return figures


def main(args):
    device = setup_ddp(args)
    if "inf-retriever" in args.teacher_model and not args.trust_remote_code:
        # without it transformers would take the model for another, causal one
        text = "comes with code of its own: look at it, then give --trust_remote_code"
        raise InputError(f"--teacher_model {args.teacher_model} {text}")
    state = open_run(args, FREE_ALWAYS + FREE_UNTIL_PHASE2)
    new_loop = {"step": 0, "phase": 0, "before": 0, "best": {}}  # before: steps before this phase
    loop = state["loop"] if state else new_loop
    for name in FREE_UNTIL_PHASE2:
        if loop["phase"] == 2 and getattr(args, name) != state["args"][name]:
            raise InputError(f"{name} was {state['args'][name]} when phase 2 began: {HINT}")
    on_rank0(check_paths, args, loop["phase"])
    logging.info(f"Preparing data loaders... of {args.phase1_data}, {args.phase2_data}")
    folder = read_once(prepare, args)
    corpus = load_corpus(folder, device)
    if args.prepare_only:
        logging.info(f"The data are read: {args.cache_dir}")
        return 0
    torch.manual_seed(args.seed)  # the same weights on all ranks
    model = load_student(args, folder)
    width = model.get_embedding_dimension()
    phases = make_phases(args, corpus, model, device)
    vectors = teacher_vectors(args, folder, corpus, device)
    if not args.use_projection and vectors.dimensions < width:
        text = f"needs {width} teacher dimensions for this student, there are {vectors.dimensions}"
        raise InputError(f"--use_projection False {text}")

    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)  # slow where each batch has another shape
    keep_masks_whole()
    student = Student(model).to(device)
    # measured without a head: random weights would make the student look worse than it is
    untrained = evaluate(student, corpus, corpus.held_out, vectors, device, not args.use_projection)
    teacher = on_rank0(rank_teacher, corpus.held_out, vectors, vectors.dimensions)
    baselines = {"untrained": untrained, "teacher": teacher}
    if args.use_projection:
        torch.manual_seed(args.seed)  # the same head on all ranks
        student.add_head(args.projection_hidden, vectors.dimensions)
        student.to(device)
    else:
        baselines[f"its first {width}"] = on_rank0(rank_teacher, corpus.held_out, vectors, width)
    dimensions = f"{model.get_embedding_dimension()} of the teacher's {vectors.dimensions}"
    logging.info(f"The student, of {width} dimensions, learns {dimensions}")

    begin_run(args, state, f"{corpus.hash} {vectors.name}")
    log = RunLog(args, state)
    ddp_model = wrap_ddp(student, args, device)
    with logging_redirect_tqdm():
        for phase in phases:
            phase.data.vectors = vectors
            if phase.number < loop["phase"]:
                continue
            if phase.number > loop["phase"]:
                if phase.number == 2:
                    begin_phase2(args, student, loop["step"])
                    state = None  # what it held was phase 1
                loop.update(phase=phase.number, before=loop["step"])
            reason = train(args, device, phase, student, ddp_model, state, log, loop)
            if reason:
                return log.stop(reason, steps=loop["step"])
    logging.info("Training process completed.")
    figures = finish(args, student, loop, baselines, corpus, vectors, device)
    log.close("finished", steps=loop["step"], **figures)
    logging.info("Training and evaluation completed successfully!")
    return 0


# --------------------------------------------------------------------------------------------------
# Reading

# The user's files and models are read once. Training needs only Corpus and Vectors.
READER = 8  # raise it when you change what is read or kept: else an old cache is used
PYDOCS = Path(__file__).resolve().parent / "data" / "pydocs.jsonl.gz"
# what `datasets` calls the kinds of files, by their endings; each also with .gz
FORMATS = dict(jsonl="json", json="json", csv="csv", tsv="csv", parquet="parquet", txt="text")
# "NA" is a text, too; files such as MS MARCO's .tsv have no quoting
OPTIONS = {"csv": {"keep_default_na": False}}
OPTIONS["tsv"] = {"keep_default_na": False, "sep": "\t", "quoting": 3}
# other names of columns; if there are several, the first is read
ALIASES = {"anchor": "query", "question": "query", "answer": "positive", "pos": "positive"}
ALIASES.update(text="positive", neg="negative")
NEGATIVES = re.compile(r"negatives?(_\d+)?")  # columns that are all read
EXPECTED = "expected UTF-8, columns query (or question, anchor) and positive (or answer, pos, text)"
EXPECTED += " in small letters; in a .csv commas between them, and quotes around texts with commas"
EXPECTED += "; in a .tsv tabs between them, none in a text; without a download: pydocs, FILE.jsonl"


class Row(NamedTuple):
    query: str  # "" where there is none
    documents: list  # [(document, grade)], from 1 on if it answers the query, else 0
    group: str  # rows of a group are held out together


def warn(found, text):
    """Say how many were found, and one of them."""
    if found:
        logging.warning(f"{len(found):,} {text}, such as {str(found[0])[:100]}")


def split_limit(source):
    """NAME@1000 -> (NAME, 1000); NAME -> (NAME, inf)"""
    name, _, limit = source.rpartition("@")
    return (name, int(limit)) if name and limit.isdecimal() else (source, math.inf)


def files_of(source):
    """{file: (size, date)} behind the name of data or of a model; empty if it is on the hub."""
    name = split_limit(source)[0]
    name = str(PYDOCS) if name == "pydocs" else name
    if Path(name).parent.name == "qrels":  # with the texts that it judges
        name = str(Path(name).parents[1])
    pattern = glob.escape(name) if os.path.exists(name) else name
    found = glob.glob(pattern) + glob.glob(f"{pattern}/**", recursive=True)
    files = [os.path.abspath(path) for path in sorted(found) if os.path.isfile(path)]
    return {file: (os.path.getsize(file), os.path.getmtime(file)) for file in files}


def read_sources(args, cache_dir):
    """The rows of both phases. Those of a skipped phase are read, too, if they are here: what is
    held out is then the same for both phases, and a later run without the option goes on."""
    sources = {1: args.phase1_data, 2: args.phase2_data}
    limits = {1: args.max_samples_phase1, 2: args.max_samples_phase2}
    read = functools.cache(read_rows)  # the same source in both phases is read once
    rows = {1: [], 2: []}
    for phase in (1, 2):
        for source in sources[phase]:
            if getattr(args, f"skip_phase{phase}") and not files_of(source):
                continue
            name, limit = split_limit(source)
            most = max(limits[phase] for phase in (1, 2) if source in sources[phase])
            needs_query = source in args.phase2_data and not args.skip_phase2
            found = read(name, min(limit, most), needs_query, cache_dir)
            rows[phase] += found[: limits[phase] - len(rows[phase])]
    return rows[1], [row for row in rows[2] if row.query]


def read_rows(name, limit, needs_query, cache_dir):
    """At most `limit` rows of a source."""
    if Path(name).parent.name == "qrels" or os.path.exists(f"{name}/corpus.jsonl"):
        rows = read_beir(name, ["train"])
        logging.info(f"{name}: {min(limit, len(rows)):,} of {len(rows):,} rows are read")
        return rows[:limit]
    sizes = {file: size for file, (size, _) in files_of(name).items()}
    files = [file for file in sizes if sizes[file] > 0] or list(sizes) or [name]
    warn([file for file in sizes if file not in files], "files are empty")
    rows = []
    total = 0
    unread = {}
    breaks = []
    unanswered = []
    for part, table in load_parts(name, files, cache_dir):
        ending = ending_of(files[0] if part == name else part)
        total += len(table)
        if name == "ms_marco":
            table = table.map(from_ms_marco, remove_columns=table.column_names)
        for old, new in ALIASES.items():
            if old in table.column_names and new not in table.column_names:
                table = table.rename_column(old, new)
        unread.update(check_columns(part, table, limit, needs_query))
        for number, record in enumerate(itertools.islice(table, limit - len(rows)), start=1):
            where = f"{part}: row {number}"
            if ending == "txt" and not record["positive"].strip():
                continue  # an empty line
            if ending == "csv" and "\n" in "".join(map(str, record.values())):
                breaks.append(where)
            if "_id" in record and "query" not in record:  # a corpus.jsonl, see read_beir
                record["positive"] = f"{record.get('title') or ''} {record['positive'] or ''}"
            rows.append(parse_row(record, where, ending, unanswered))
    if not rows:
        raise InputError(f"{name} has no rows")
    logging.info(f"{name}: {len(rows):,} of {total:,} rows are read")
    if unread:
        logging.warning(f"{name}: these columns are not read: {', '.join(unread)}")
    warn(breaks, "rows have line breaks within quotes (stray quotes would swallow rows)")
    warn(unanswered, "rows have no answer, or an empty one: of them phase 1 reads the query")
    return rows


def load_parts(name, files, cache_dir):
    """[(name, datasets.Dataset)]: one of all files, or one of each, if their columns differ."""
    try:
        if len(set(map(ending_of, files))) == 1:
            return [(name, load_table(files, cache_dir, EXPECTED))]
    except InputError:
        if len(files) == 1:
            raise
    return [(file, load_table([file], cache_dir, EXPECTED)) for file in files]


def load_table(files, cache_dir, expected):
    """Files of one kind, or a data set of the hub, as a datasets.Dataset."""
    import datasets

    datasets.disable_progress_bars()
    name = files[0]
    ending = ending_of(name)
    if ending in FORMATS and not os.path.isfile(name):
        raise InputError(f"{name}: there is no such file")
    if os.path.isfile(name) and ending not in FORMATS:
        raise InputError(f"{name}: expected an ending of {' '.join(FORMATS)}, each also with .gz")
    source = ("microsoft/ms_marco:v1.1" if name == "ms_marco" else name).split(":")
    options = {}
    if ending in FORMATS:
        source = [FORMATS[ending]]
        options = {"data_files": files, "cache_dir": str(cache_dir), **OPTIONS.get(ending, {})}
    try:
        return datasets.load_dataset(*source, split="train", **options)
    except Exception as error:  # of a dozen kinds; the cause has the row
        reason = " ".join(str(error.__cause__ or error).split())[:300] or "it has no rows"
        rows = " (rows count from 0)" if " row " in reason else ""
        raise InputError(f"{name} cannot be read: {reason}{rows}; {expected}") from None


def ending_of(name):
    return Path(name.lower().removesuffix(".gz")).suffix[1:]


def from_ms_marco(record):
    """A row of MS MARCO with the names that we read."""
    texts = {0: [], 1: []}
    passages = record["passages"]
    for text, is_answer in zip(passages["passage_text"], passages["is_selected"], strict=True):
        texts[is_answer].append(text)
    return {"query": record["query"], "positive": texts[1], "negative": texts[0]}


def check_columns(name, table, limit, needs_query):
    """Refuse what would be read wrong. Returns the columns that are not read, as keys."""
    columns = table.column_names
    has_all = "positive" in columns and ("query" in columns or not needs_query)
    # pandas makes __index_level_0__ where a row has more than the first line
    if not has_all or "__index_level_0__" in columns:
        raise InputError(f"{name}: found the columns {', '.join(columns)}; {EXPECTED}")
    read = [*filter(NEGATIVES.fullmatch, columns), "query", "positive", "group"]
    read += ["title"] if "_id" in columns and "query" not in columns else []
    unread = [column for column in columns if column not in read]
    for column in unread:
        values = set(map(str, table[column][:limit]))
        has_zeros = values & {"0", "0.0", "False"} and len(values) < min(limit, len(table))
        if "query" in columns and (has_zeros or column in ("label", "labels")):
            text = f"{name}: does the column {column} grade the pairs?"
            raise InputError(f"{text} Put wrong answers into the column negative, and leave it out")
    return dict.fromkeys(unread)


def parse_row(record, where, ending, unanswered):
    """A record as a Row. Where an answer is missing or empty is added to `unanswered`."""
    texts = {"query": [], "positive": [], "negative": []}
    for column, value in record.items():
        name = "negative" if NEGATIVES.fullmatch(column) else column
        if name not in texts:
            continue
        for text in value if isinstance(value, list) else [value or ""]:
            is_text = isinstance(text, str)
            if not is_text or (ending in OPTIONS and re.fullmatch(r"(?s)\[.*\]", text)):
                found = f"{column} is {str(value)[:60]!r}"
                raise InputError(f"{where}: {found}, expected a text, or a list in .jsonl")
            texts[name].append(text.strip())

    if not texts["positive"] or "" in texts["positive"]:
        unanswered.append(where)
    if "query" in record and (len(texts["query"]) != 1 or not all(texts["query"])):
        raise InputError(f"{where}: query is missing or empty, or more than one")
    query = "".join(texts["query"])
    documents = [(text, 1) for text in texts["positive"] if text]
    documents += [(text, 0) for text in texts["negative"] if text]
    group = record.get("group")
    if group in (None, ""):  # 0 is a group
        group = query or texts["positive"][:1]
    return Row(query, documents, str(group))


def read_beir(name, splits):
    """A folder in BEIR's layout (Thakur et al. 2021), with the first of `splits` that it has in
    qrels; or a file in its qrels. Returns Rows: the judged queries, then the other documents."""
    path = Path(name)
    if path.parent.name != "qrels":
        files = [path / "qrels" / f"{split}.tsv" for split in splits]
        path = next(filter(Path.exists, files), files[0])
    texts = {"queries": {}, "corpus": {}}  # of each: {name: text}
    grades = defaultdict(dict)  # by the name of the query: two may have one text
    empty = []
    unknown = []
    where = path
    try:
        for kind in texts:
            for where, line in lines_of(path.parents[1] / f"{kind}.jsonl"):
                record = json.loads(line)
                text = f"{record.get('title') or ''} {record['text']}".strip()
                texts[kind][str(record["_id"])] = text
                if not text:
                    empty.append(where)
        for where, line in lines_of(path):
            query, *_, document, grade = line.split()
            if grade == "score":  # the names of the columns
                continue
            document = texts["corpus"].get(document)
            if texts["queries"].get(query) and document:
                grades[query][document] = int(grade)
            else:
                unknown.append(where)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        expected = "corpus.jsonl, queries.jsonl (_id, text) and qrels (query, document, score)"
        raise InputError(f"{where}: {error!r:.200}; expected BEIR's {expected}") from None
    warn(empty, "texts are empty, and left out")
    warn(unknown, "judgments name a query or a document that is not there, or is empty")
    if not grades:
        raise InputError(f"{path}: no judgments of its texts")
    logging.info(f"{path}: {len(grades):,} judged queries, {len(texts['corpus']):,} texts")
    queries = texts["queries"]
    rows = [Row(queries[name], list(own.items()), queries[name]) for name, own in grades.items()]
    others = without({"", *documents_of(rows)}, texts["corpus"].values())
    return rows + [Row("", [(text, 1)], text) for text in others]


def lines_of(path):
    """Yields (where it stands, line) of those that are not blank."""
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f"{path}: line {number}", line


def choose_held_out(args, rows):
    """Groups to hold out, chosen by a hash: the same ones for any order and any seed."""
    sizes = Counter(row.group for row in rows)
    digests = {group: hashlib.sha256(group.encode()).hexdigest() for group in sizes}
    rank_of = {group: int(digest[:16], 16) / 2**64 for group, digest in digests.items()}
    groups = set()
    rows_left = args.eval_samples
    for group in sorted(sizes, key=rank_of.get):
        if rank_of[group] < args.eval_fraction and sizes[group] <= rows_left:
            groups.add(group)
            rows_left -= sizes[group]
    return groups


def without(held, texts):
    """{text: None} of the texts that are not in `held`."""
    return dict.fromkeys(text for text in texts if text not in held)


def documents_of(rows):
    """{document: grade} of rows, in their order."""
    return dict(itertools.chain(*[row.documents for row in rows]))


def grades_of(rows):
    """{query: {document: grade}} of those that answer it, and the same of those that do not."""
    right = defaultdict(dict)
    wrong = defaultdict(dict)
    for row in rows:
        for document, grade in row.documents:
            grades = right if grade > 0 else wrong
            grades[row.query][document] = grade
    return right, wrong


def split_texts(args, rows1, rows2, eval_rows, test_rows):
    """Split the rows of both phases, and number their texts. Returns [(role, text)], and arrays of
    a Corpus. (Dictionaries stand for sets that keep their order.)"""
    right, wrong = grades_of(rows1 + rows2)
    held = {"", *grades_of(eval_rows + test_rows)[0]}  # not their documents: they are for all

    # held out are queries, with all documents that answer them in any row; else single texts
    groups = set()
    queries = {}
    others = {}  # to rank, too: what is wrong for these queries, then documents at large
    if not args.eval_data:
        source = [row for row in rows2 or rows1 if row.query in right]
        groups = choose_held_out(args, source)
        eval_rows = [row for row in source if row.group in groups]
        queries = dict.fromkeys(row.query for row in eval_rows if row.query)
        if queries:
            eval_rows = [Row(query, list(right[query].items()), query) for query in queries]
        held.update(queries, documents_of(eval_rows))
    for query in queries:
        others.update(wrong[query])

    # they are not trained on where they stand in other rows, either
    ids = {}

    def id_of(role, text):
        return ids.setdefault((role, text), len(ids))

    pairs = []
    negatives = []
    both = []
    left_out = []
    for query in dict.fromkeys(row.query for row in rows2):
        own = without(held, right[query]) if query not in held else {}
        if query not in queries:
            left_out += [(query, text) for text in right[query] if text not in own]
        if own:
            both += [(query, text) for text in wrong[query] if text in right[query]]
            own_negatives = without(right[query], without(held, wrong[query]))
            begin = len(negatives)
            negatives += [id_of("document", text) for text in own_negatives]
            end = len(negatives)
            for text in own:
                pairs.append((id_of("query", query), id_of("document", text), begin, end))
            others.update(own)
    warn(both, "negatives are left out: they are also positives of their query")
    warn(left_out, "pairs are left out, since a text of theirs is held out")

    rows1 = [row for row in rows1 if row.group not in groups]
    queries1 = [row.query for row in rows1]
    phase1 = [id_of("query", text) for text in without(held, queries1)]
    phase1 += [id_of("document", text) for text in without(held, documents_of(rows1))]
    arrays = {"phase1": phase1, "pairs": np.reshape(pairs, (-1, 4)), "negatives": negatives}

    if not args.eval_data:
        others = list(without(held, others))[: args.eval_distractors]
        eval_rows.append(Row("", [(text, 0) for text in others], ""))
    for name, rows in {"held_out": eval_rows, "test": test_rows}.items():
        judged = [row for row in rows if row.query and max(dict(row.documents).values()) > 0]
        documents = documents_of(rows)
        index_of = {text: i for i, text in enumerate(documents, start=len(judged))}
        answers = []
        for i, row in enumerate(judged):
            answers += [(i, index_of[text], grade) for text, grade in row.documents if grade > 0]
        arrays[f"{name}_queries"] = [id_of("query", row.query) for row in judged]
        arrays[f"{name}_documents"] = [id_of("document", text) for text in documents]
        arrays[f"{name}_answers"] = np.reshape(answers, (-1, 3))

    needed = ["held_out_documents"]
    needed += [] if args.skip_phase1 else ["phase1"]
    needed += [] if args.skip_phase2 else ["pairs", "held_out_queries"]
    counts = {name: len(arrays[name]) for name in needed}
    if 0 in counts.values():
        raise InputError(f"{counts}; none may be 0: give more data, or another --eval_fraction")
    return list(ids), {name: np.array(values, np.int64) for name, values in arrays.items()}


def tokenize(student, texts):
    """The fields of a Corpus with the student's tokens of all texts. (rank 0)"""
    pieces = []
    most = student.max_seq_length
    for start in tqdm(range(0, len(texts), 1024), "tokens", disable=None, leave=False):
        part = texts[start : start + 1024]
        found = student.tokenizer(part, truncation=True, max_length=most).input_ids
        pieces += [np.array(ids, np.int32) for ids in found]
    lengths = np.array([len(ids) for ids in pieces])
    full = [texts[i] for i in np.flatnonzero(lengths == most)]
    warn(full, f"texts fill the student's {most} tokens: what is beyond is not read")
    offsets = np.cumsum(lengths) - lengths
    return {"ids": np.concatenate(pieces), "offsets": offsets, "lengths": lengths}


def load_corpus(folder, device):
    fields = json.loads((folder / "meta.json").read_text())
    fields["groups"] = 8 if device.type == "cpu" else 1
    files = folder.glob("*.npy")  # asarray: a memmap is slower
    arrays = {path.stem: np.asarray(np.load(path, mmap_mode="r")) for path in files}
    for kind in ("held_out", "test"):
        fields[kind] = Collection(*[arrays.pop(f"{kind}_{name}") for name in Collection._fields])
    corpus = Corpus(**fields, **arrays)
    queries, documents, answers = map(len, corpus.held_out)
    logging.info("Data split complete:")
    logging.info(f"  training: {len(corpus.phase1):,} texts, {len(corpus.pairs):,} pairs")
    logging.info(f"  held out: {queries:,} queries, {documents:,} documents, {answers:,} answers")
    return corpus


def load_model(args, kind, folder, **options):
    """The teacher or the student, a SentenceTransformer, on the CPU. folder: of builtin ones."""
    import transformers
    from sentence_transformers import SentenceTransformer

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # else it warns at every fork
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()  # every rank has one
    logging.getLogger("sentence_transformers").setLevel(logging.WARNING)
    name = getattr(args, f"{kind}_model")
    source = str(folder / kind) if name == "builtin:bert" else name
    options.update(device="cpu", trust_remote_code=args.trust_remote_code)
    try:
        model = SentenceTransformer(source, **options)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        hint = "without a download: builtin:lsa teaches builtin:bert"
        raise InputError(f"--{kind}_model {name} cannot be loaded; {hint} ({reason})") from None
    others = {role for role, text in model.prompts.items() if text} - {"query", "document"}
    warn(list(others), f"prompts of the {kind} are not used")
    for role in ("query", "document"):
        given = getattr(args, f"{kind}_{role}_prompt")
        own = model.prompts.get(role) or ""
        model.prompts[role] = own if given is None else given
    length = getattr(args, f"{kind}_max_length")
    if length:
        model.max_seq_length = length
    return model


def with_prompts(model, texts):
    return [model.prompts[role] + text for role, text in texts]


def load_student(args, folder):
    """A SentenceTransformer that ends in Normalize, without a head."""
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling

    student = load_model(args, "student", folder, model_kwargs={"dtype": torch.float32})
    name = f"--student_model {args.student_model}"
    if len(student) < 2 or not isinstance(student[1], Pooling):
        raise InputError(f"{name}: expected a transformer, then Pooling")
    if (student.max_seq_length or math.inf) > 1e6:
        raise InputError(f"{name} has no maximum length: give --student_max_length")
    most = getattr(student[0].model.config, "max_position_embeddings", math.inf)
    if student.max_seq_length > most:
        raise InputError(f"{name} reads at most {most} tokens, not {student.max_seq_length}")
    if any(student.prompts.values()) and not student[1].include_prompt:
        hint = "--student_query_prompt= --student_document_prompt= leaves them out"
        raise InputError(f"{name} pools without its prompts: {hint}")
    experts = [p for p, _ in student.named_parameters() if re.search(r"\.experts\.\w+\.", p)]
    if experts and dist.get_world_size() > 1:
        raise InputError(f"{name} has experts, which a batch may leave out: use one process")
    if student.truncate_dim is not None:
        logging.warning(f"The student's truncate_dim {student.truncate_dim} is not used")
        student.truncate_dim = None
    if args.use_projection and any(isinstance(module, Dense) for module in student):
        logging.warning(f"{name} gets a second, random head; --use_projection=False trains its own")
    if not isinstance(student[-1], Normalize):
        student.append(Normalize())
    for name, parameter in student.named_parameters():
        if ".pooler." in name:  # BERT's own, which we do not use: DDP would wait for its gradient
            parameter.requires_grad_(False)
    return student


def teacher_vectors(args, folder, corpus, device):
    """The teacher's Vectors of all texts. Blocks of them are dealt to the ranks, a file each. One
    that is there is not computed again, also by another number of ranks. (all ranks)"""
    starts = range(0, len(corpus.lengths), BLOCK)
    if corpus.teacher is not None:
        return Vectors("given", np.split(corpus.teacher, starts[1:]))
    names = """teacher_model teacher_max_length teacher_query_prompt teacher_document_prompt
        trust_remote_code""".split()
    key = [7, [getattr(args, name) for name in names], corpus.texts_hash]  # 7: as READER, of this
    key.append(on_rank0(files_of, args.teacher_model))
    name = f"teacher-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}"
    folder_of_vectors = Path(args.cache_dir) / f"{name}-{device.type}"
    blocks = [folder_of_vectors / f"{start:010}.npy" for start in starts]
    missing = on_rank0(lambda: [i for i, path in enumerate(blocks) if not path.exists()])
    if missing:
        teacher = load_teacher(args, folder, device)
        texts = with_prompts(teacher, json.loads((folder / "texts.json").read_text()))
        folder_of_vectors.mkdir(exist_ok=True)
    own = missing[dist.get_rank() :: dist.get_world_size()]
    for i in tqdm(own, "teacher", disable=None if dist.get_rank() == 0 else True):
        part = texts[i * BLOCK : (i + 1) * BLOCK]
        # prompt: the texts have theirs, a model's default would come before it
        options = {"prompt": "", "convert_to_tensor": True, "show_progress_bar": False}
        vectors = teacher.encode(part, batch_size=args.teacher_batch_size, **options)
        vectors = F.normalize(vectors.float(), dim=1).cpu().numpy()
        if not np.isfinite(vectors).all():
            raise InputError(f"the teacher's vectors are not finite, near {part[0][:80]!r}")
        new = blocks[i].with_suffix(f".{os.getpid()}.npy")
        np.save(new, vectors.astype(np.float16))
        new.replace(blocks[i])  # which is never half written
    dist.barrier()
    return Vectors(name, [np.asarray(np.load(path, mmap_mode="r")) for path in blocks])


def load_teacher(args, folder, device):
    options = {}
    if device.type != "cpu":
        options["model_kwargs"] = {"dtype": torch.bfloat16}  # fp16 breaks some large models
    if "inf-retriever" in args.teacher_model:
        # the task in its model card; its documents have no prompt
        task = "Given a web search query, retrieve relevant passages that answer the query"
        prompts = {"query": f"Instruct: {task}\nQuery: "}
        options.update(config_kwargs={"use_cache": False}, prompts=prompts)
    teacher = load_model(args, "teacher", folder, **options)
    if type(teacher[0]).__name__ == "Router":
        text = "has other networks for queries and documents: give its vectors as a file"
        raise InputError(f"--teacher_model {args.teacher_model} {text}")
    if teacher.similarity_fn_name != "cosine":
        text = f"The teacher compares by {teacher.similarity_fn_name}, the student by the cosine"
        logging.warning(f"{text}: how long vectors are is lost")
    text = f"at most {teacher.max_seq_length} tokens of each, prompts {teacher.prompts}"
    logging.info(f"The teacher reads all texts, {text}")
    return teacher.to(device).eval()


def is_file(teacher_model):
    return Path(teacher_model).suffix in (".jsonl", ".parquet")


def unit_vectors(vectors, texts):
    """(n, D) -> (n, D) float16, as unit vectors; where there is none, 0, which is said."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    nothing = [texts[i][1] for i in np.flatnonzero(norms == 0)]
    warn(nothing, "texts have the vector 0 from the teacher")
    # those that were rounded to float16 before stay as they are
    norms[(np.abs(norms - 1) < 1e-3) | (norms == 0)] = 1
    return (vectors / norms).astype(np.float16)


def read_vectors(path, texts, cache_dir):
    """A teacher's unit vectors (n, D) of texts [(role, text)], from a file. (rank 0)"""
    expected = "expected the columns vector, and query or text"
    table = load_table([path], cache_dir, expected).with_format("numpy")
    rows = {}
    for role, column in {"query": "query", "document": "text"}.items():
        if column in table.column_names:
            for row, text in enumerate(table[column]):
                rows.setdefault((role, str(text or "").strip()), row)
    if not rows or "vector" not in table.column_names:
        raise InputError(f"{path}: found the columns {', '.join(table.column_names)}; {expected}")
    dimensions = np.size(table[0]["vector"])
    vectors = np.empty((len(texts), dimensions), np.float32)
    for i, (role, text) in enumerate(texts):
        row = rows.get((role, text))
        if row is None:
            raise InputError(f"{path}: no row has the {role} {text[:80]!r}")
        vector = np.asarray(table[row]["vector"], np.float32)
        if vector.shape != (dimensions,) or not np.isfinite(vector).all():
            found = f"{vector.size} numbers, {np.isfinite(vector).sum()} finite"
            raise InputError(f"{path}: row {row + 1}: vector has {found}; expected {dimensions}")
        vectors[i] = vector
    return unit_vectors(vectors, texts)


def lsa_vectors(texts, fitted):
    """The builtin teacher's unit vectors (n, D): TF-IDF and a truncated SVD. (rank 0)"""
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer

    logging.info("making builtin:lsa from the training texts")
    words = r"[^\W\d_]+|\d+"  # array_split and arraySplit2 fall apart
    # sublinear_tf: as scikit-learn advises for this, words count by the logarithm of how many
    options = {"max_features": 12_000, "sublinear_tf": True, "dtype": np.float32}
    tfidf = TfidfVectorizer(token_pattern=words, **options).fit(fitted)
    matrix = tfidf.transform(fitted)  # (texts, words)
    svd = TruncatedSVD(min(384, *matrix.shape), n_iter=3, random_state=0).fit(matrix)
    return unit_vectors(svd.transform(tfidf.transform([text for _, text in texts])), texts)


def make_bert(folder, args, texts, layers=1, width=128):
    """The builtin student: a small BERT with random weights; a tokenizer of the texts. (rank 0)"""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    logging.info("making builtin:bert from the training texts")
    # BPE: unlike that of WordPiece, the library's trainer makes the same pieces every time
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    options = {"special_tokens": ["[PAD]", "[UNK]"], "show_progress": False}
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=8000, **options))
    length = args.student_max_length or 64
    options = {"pad_token": "[PAD]", "unk_token": "[UNK]", "model_max_length": length}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options).save_pretrained(folder)
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}
    sizes.update(vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=length)
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(**sizes, num_attention_heads=max(1, width // 32), **dropout)
    torch.manual_seed(args.seed)
    BertModel(config).save_pretrained(folder)  # SentenceTransformer adds the mean of its vectors


def prepare(args):
    """The folder with the texts, the fields of a Corpus, and the builtin models. (rank 0)"""
    names = """phase1_data phase2_data max_samples_phase1 max_samples_phase2 skip_phase1 skip_phase2
        eval_fraction eval_samples eval_distractors eval_data test_data teacher_model student_model
        student_max_length student_query_prompt student_document_prompt seed""".split()
    key = [READER, [getattr(args, name) for name in names]]
    sources = [*args.phase1_data, *args.phase2_data, args.teacher_model, args.student_model]
    sources += filter(None, (args.eval_data, args.test_data))
    key += [files_of(source) for source in sources]

    def write(folder):
        rows1, rows2 = read_sources(args, folder.parent / "tables")
        eval_rows = args.eval_data and read_beir(args.eval_data, ["dev", "validation", "test"])
        test_rows = args.test_data and read_beir(args.test_data, ["test"])
        texts, arrays = split_texts(args, rows1, rows2, eval_rows or [], test_rows or [])
        (folder / "texts.json").write_text(json.dumps(texts))
        fitted = [f"{texts[i][1]}\n{texts[j][1]}" for i, j, _, _ in arrays["pairs"]]
        fitted = fitted or [texts[i][1] for i in arrays["phase1"]]
        if args.teacher_model == "builtin:lsa":
            arrays["teacher"] = lsa_vectors(texts, fitted)
        elif is_file(args.teacher_model):
            arrays["teacher"] = read_vectors(args.teacher_model, texts, folder.parent / "tables")
        if args.student_model == "builtin:bert":
            make_bert(folder / "student", args, fitted)

        student = load_student(args, folder)
        arrays.update(tokenize(student, with_prompts(student, texts)))
        digest = hashlib.sha256((folder / "texts.json").read_bytes())
        texts_hash = digest.hexdigest()
        for name, array in arrays.items():
            np.save(folder / f"{name}.npy", array)
            digest.update(array)
        pad = student.tokenizer.pad_token_id or 0
        meta = {"hash": digest.hexdigest()[:16], "texts_hash": texts_hash, "pad": pad}
        (folder / "meta.json").write_text(json.dumps(meta))

    return cached(args.cache_dir, "texts", key, write)


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
