"""Fine-tune ProteinMPNN on preferences: of two sequences for one backbone, the preferred one becomes the likelier.

Direct preference optimisation (DPO, Rafailov et al. 2023) of an inverse-folding network (Dauparas et al. 2022): its
log-probabilities of both sequences, less those of the frozen reference that it starts from, are compared.

Run
    ./scripts/run_dpo_ddp_local.sh 4 --train_data pairs.json --output_dir outputs/dpo_ddp    GPUs of this machine
    torchrun --nproc_per_node=4 run_dpo_ddp.py --train_data pairs.json --output_dir outputs/dpo_ddp     one node
    torchrun --nproc_per_node=8 --nnodes=2 --node_rank=0 --master_addr=HOST run_dpo_ddp.py --train_data pairs.json
    mpiexec -n 24 -ppn 12 python run_dpo_ddp.py --train_data pairs.json       (qsub scripts/run_dpo_ddp_aurora.sh)
    python run_dpo_ddp.py --config configs/run_dpo_ddp_quickstart.yaml       one process, no weights needed
    python run_dpo_ddp.py --score_only --train_data pairs.json --checkpoint best_model.pt --out scores.csv
    python run_dpo_ddp.py --sample 8 --pdb_file complex.cif --design_chains B --checkpoint best_model.pt
Data
    --train_data   JSON array or lines: pdb_file, preferred_seq, unpreferred_seq; chain_id, or design_chains and
                   fixed_chains; mutable_positions or mutable_ranges (0-based, or residue numbers such as B42A); weight,
                   margin, residue_weights. PDB or mmCIF, also .gz; paths are relative to the data file.
    --scores       instead: pdb_file, sequences, scores; pairs are made where the scores differ
    Held out: --val_data, or whole structures. --batch_size: pairs per GPU on average, of similar length.
Logged metrics (over all ranks; in metrics.jsonl and wandb)
    loss, val loss          of --loss_type; ln 2 at the start (sigmoid)
    rewards/chosen, /rejected, /margins, /accuracies: beta (log p - log p of the reference) in nats, the difference of
                            the two, and the share of pairs where it is above 0
    likelihood_accuracy     share of the pairs whose chosen sequence is the likelier one
    log_ratio, recovery, perplexity, entropy: of the chosen, per designed residue, in nats; samples/s: pairs a second
Files in --output_dir: best_model.pt, latest_model.pt, checkpoint_epoch_N.pt, reference_model.pt (ProteinMPNN's own
format), latest.pt (resume), best.pt, split.json, metrics.jsonl, structures.csv, summary.json, curves.png

Differences from the original: no dropout; log-probabilities without a floor, over what is designed alone; random
decoding orders; structures are parsed and encoded once; the reference is computed once. --temperature is 0.1 as there.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import difflib
import functools
import gc
import hashlib
import importlib
import io
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, NoReturn

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

ALPHABET = "ACDEFGHIKLMNPQRSTVWYX"  # ids 0 to 20 in ProteinMPNN's order; X is unknown
UNKNOWN = 20
WEIGHTS = "https://github.com/dauparas/ProteinMPNN (vanilla_model_weights, soluble_model_weights)"
SAME = ("data_key beta temperature loss_type label_smoothing reference_free sft_weight diversity_lambda decoding_order "
        "num_orders base_key freeze_encoder sft_epochs optimizer ema seed").split()  # what a resumed run must have kept

# ---- Arguments -----------------------------------------------------------------------------------

def parse_args(argv: list[str] | None = None) -> Namespace:
    """Every option, and the checks that need neither data nor devices."""
    p = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    g = p.add_argument_group("Data").add_argument
    g("--train_data", help="preference pairs, JSON or JSON lines [default: data/input/test_data_real.json]")
    g("--val_data", help="pairs to validate on [default: --val_fraction of the training pairs]")
    g("--scores", help="instead of --train_data: scored sequences, JSON or JSON lines")
    g("--score_gap", type=float, default=0.0, help="least difference of scores that makes a pair")
    g("--score_margin", type=float, default=0.0, help="margin of such a pair per unit of difference, nats")
    g("--pairs_per_backbone", type=int, default=16, help="such pairs of a backbone at most")
    g("--val_fraction", type=float, default=0.1, help="share of the pairs held out, by whole structures")
    g("--max_length", type=int, default=500, help="residues designed at most")
    g("--mutable_positions", nargs="+", help="designed positions, for every pair: 0-based, or residues such as B42A")
    g("--mutable_ranges", nargs="+", help="inclusive ranges of them, such as 6-17 or B6-B17")
    g("--cache_dir", default="./cache", help="where parsed structures are kept")
    g("--skip_bad_data", help="leave out bad pairs and list them", **FLAG)
    g("--verify_data", help="compare the checksums of the cache too", **FLAG)
    g = p.add_argument_group("Model").add_argument
    g("--base_model_name", default="v_48_020", help="weights to start from: NAME.pt in --base_model_dir; or random")
    g("--base_model_dir", default="data/input/BioMPNN/soluble_model_weights", help="folder of the weights")
    g("--base_model_config_dir", help=argparse.SUPPRESS)
    g("--freeze_encoder", help="train the decoder alone; encode once (25 kB per residue and rank)", **FLAG)
    g = p.add_argument_group("Preference").add_argument
    g("--beta", type=float, default=0.1, help="weight of the log-ratio")
    g("--temperature", type=float, default=0.1, help="of the probabilities that are compared; 1: the network's own")
    g("--loss_type", default="sigmoid", choices=("sigmoid", "ipo", "hinge", "robust"), help="form of the loss")
    g("--label_smoothing", type=float, default=0.0, help="assumed share of wrong labels (sigmoid, robust)")
    g("--reference_free", help="compare the network's log-probabilities alone", **FLAG)
    g("--sft_weight", type=float, default=0.0, help="of the chosen's cross entropy per residue, in the loss")
    g("--diversity_lambda", type=float, default=0.0, help="of the expected distance of two samples, in the loss")
    g("--decoding_order", default="random", choices=("random", "left_to_right"), help="of the designed residues")
    g("--num_orders", type=int, default=4, help="random orders of a pair; an epoch takes the next one")
    g = p.add_argument_group("Training").add_argument
    g("--num_epochs", type=int, default=10, help="passes over the pairs")
    g("--batch_size", type=int, default=1, help="pairs per GPU and micro-batch, on average")
    g("--lr", "--learning_rate", type=float, default=3e-7, help="peak learning rate")
    g("--warmup_steps", type=int, default=0, help="optimizer steps of warm-up")
    g("--schedule", default="constant", choices=("constant", "linear", "cosine"), help="after the warm-up")
    g("--optimizer", default="Adam", choices=("Adam", "AdamW"), help="how weight decay counts")
    g("--weight_decay", type=float, default=0.0, help="none on biases and norms")
    g("--ema", type=float, default=0.0, help="decay of averaged weights, which are validated and saved (0: none)")
    g("--early_stop_patience", type=int, default=0, help="epochs without a better val loss that end the run (0: off)")
    g("--sft_epochs", type=int, default=0, help="first: passes of maximum likelihood on the chosen sequences")
    g("--sft_lr", type=float, default=1e-3, help="their peak learning rate (cosine)")
    g("--eval_batch_size", type=int, default=16, help="pairs per evaluation batch")
    g("--eval_orders", type=int, default=1, help="decoding orders that validation averages over")
    g("--no_cuda", help="= --device cpu", **FLAG)
    g = p.add_argument_group("Modes").add_argument
    g("--score_only", help="do not train: a CSV row per pair of --train_data", **FLAG)
    g("--sample", type=int, default=0, help="do not train: draw so many sequences for --pdb_file")
    g("--sample_temperature", type=float, default=0.1, help="of --sample")
    g("--pdb_file", help="structure of --sample")
    g("--design_chains", nargs="+", help="chains to design, of --sample [default: the first]")
    g("--fixed_chains", nargs="+", help="chains that are context, of --sample [default: none]")
    g("--fixed_positions", nargs="+", help="residues that keep their letter, of --sample: 0-based, or such as B42A")
    g("--checkpoint", help="weights of a mode [default: OUTPUT_DIR/best_model.pt, else the base model]")
    g("--out", help="file of a mode [default: OUTPUT_DIR/scores.csv or designs.fasta]")
    add_ddp_arguments(p, output_dir="outputs/dpo_ddp", wandb_project="dpo-proteinmpnn")
    args = parse_arguments(p, argv)
    args.train_data = args.train_data or (None if args.scores else "data/input/test_data_real.json")
    above_0 = ("beta temperature num_orders num_epochs batch_size lr sft_lr eval_batch_size eval_orders max_length "
               "pairs_per_backbone").split()
    from_0 = ("score_gap score_margin sft_weight diversity_lambda warmup_steps weight_decay early_stop_patience "
              "sft_epochs sample sample_temperature val_fraction ema label_smoothing").split()
    sampling = ("pdb_file", "design_chains", "fixed_chains", "fixed_positions", "sample_temperature")
    refused = {
        "not taken: --base_model_config_dir (the weights say the sizes)": "base_model_config_dir" in args.given,
        **{f"--{n} {getattr(args, n)} must be above 0": getattr(args, n) <= 0 for n in above_0},
        **{f"--{n} {getattr(args, n)} must not be negative": getattr(args, n) < 0 for n in from_0},
        "--val_fraction and --ema must be below 1, --label_smoothing below 0.5":
            max(args.val_fraction, args.ema, 2 * args.label_smoothing) >= 1,
        "give one of --train_data and --scores": bool(args.train_data) == bool(args.scores) and not args.sample,
        "--score_only and --sample: one of the two": args.score_only and args.sample > 0,
        "--sample needs --pdb_file": args.sample > 0 and not args.pdb_file,
        f"--{', --'.join(sampling)} belong to --sample": not args.sample and bool({*sampling} & {*args.given}),
        "--checkpoint and --out belong to --score_only and --sample":
            not (args.score_only or args.sample) and bool(args.checkpoint or args.out),
        f"--checkpoint {args.checkpoint}: no such file": bool(args.checkpoint) and not Path(args.checkpoint).is_file(),
        "--loss_type ipo, hinge have no --label_smoothing": args.label_smoothing and args.loss_type in ("ipo", "hinge"),
        f"--no_cuda and --device {args.device}: one of the two": args.no_cuda and args.device not in ("auto", "cpu"),
    }  # fmt: skip
    for message in (m for m, wrong in refused.items() if wrong):
        p.error(message)
    args.device = "cpu" if args.no_cuda else args.device
    if args.decoding_order != "random":
        args.num_orders = args.eval_orders = 1
    return args

# ---- Data ----------------------------------------------------------------------------------------

COUNTS = {"parsed": 0}  # structure files that this process has read
BACKBONE = ("N", "CA", "C", "O")
RESIDUES = "ALA CYS ASP GLU PHE GLY HIS ILE LYS LEU MET ASN PRO GLN ARG SER THR VAL TRP TYR MSE".split()
LETTERS = dict(zip(RESIDUES, ALPHABET[:20] + "M", strict=True))  # selenomethionine is read as methionine
PREFERENCE = ("preferred_seq", "unpreferred_seq")
PER_RESIDUE = {"chosen": np.uint8, "rejected": np.uint8, "designed": np.bool_, "weights": np.float32}
PER_PAIR = {"backbone": np.int64, "weight": np.float32, "margin": np.float32}

class Chain(NamedTuple):
    """A protein chain of L residues, in the order of the file; or several, one after the other."""
    letters: str  # X where a residue is none of the 20
    coords: np.ndarray  # (L, 4, 3) float32: N, CA, C, O in angstrom, NaN where missing
    numbers: np.ndarray  # (L,) int64: of the file, one more for every insertion code up to there
    labels: list[str]  # chain, number, insertion code: B42, B42A
    chain_index: np.ndarray  # (L,) int64
    @property
    def valid(self) -> np.ndarray:
        """(L,) bool: all four atoms are there."""
        return np.isfinite(self.coords).all((1, 2))

def read_structure(path: str | Path) -> dict[str, Chain]:
    """The chains of a PDB or mmCIF file, plain or gz, by the names that they have in the PDB; one without protein is
    empty. First model, first alternative of each atom, ATOM records and selenomethionine. A residue that is none of the
    20 counts where it has three of the backbone's atoms. Raises ValueError with file, chain and residue."""
    import gemmi
    try:
        model = gemmi.read_structure(str(path), format=gemmi.CoorFormat.Detect)[0]
    except (RuntimeError, ValueError, IndexError, OSError, EOFError) as error:
        found = " ".join(str(error).split()) if Path(path).is_file() else "no such file"
        raise ValueError(f"{path}: {found}; expected a structure in PDB or mmCIF format, plain or whole gz") from error
    COUNTS["parsed"] += 1
    chains = {chain.name: read_chain(path, chain) for chain in model}
    if not any(chain.letters for chain in chains.values()):
        raise ValueError(f"{path}: no protein residues in chains {', '.join(chains) or '(none)'}; expected ATOM "
                         "records of amino acids (of HETATM records only MSE is read)")
    return chains

def read_chain(path: str | Path, chain) -> Chain:
    """A gemmi chain. Raises ValueError where an atom of a residue occurs twice."""
    residues = {}  # (number, insertion code): name, atoms
    for residue in (r for r in chain if r.het_flag != "H" or r.name == "MSE"):
        _, atoms = residues.setdefault((residue.seqid.num, residue.seqid.icode.strip()), (residue.name, {}))
        for atom in residue:
            first = atoms.setdefault(atom.name, atom) if atom.name in BACKBONE else atom
            if first is not atom and not first.has_altloc() and not atom.has_altloc():
                raise ValueError(f"{path}: chain {chain.name}: residue {chain.name}{residue.seqid} has two atoms "
                                 f"{atom.name}; expected one, or alternatives (do two chains have this name?)")
    kept = {key: found for key, found in residues.items() if found[0] in LETTERS or len(found[1]) >= 3}
    numbers, missing = np.array([number for number, _ in kept], np.int64), [math.nan] * 3
    coords = [[atoms[n].pos.tolist() if n in atoms else missing for n in BACKBONE] for _, atoms in kept.values()]
    return Chain("".join(LETTERS.get(name, "X") for name, _ in kept.values()),
                 np.array(coords, np.float32).reshape(-1, 4, 3),
                 numbers + np.cumsum(np.diff(numbers, prepend=numbers[:1] - 1) == 0),
                 [f"{chain.name}{number}{code}" for number, code in kept], np.zeros_like(numbers))

def join_chains(path: str | Path, chains: dict[str, Chain], names: tuple[str, ...]) -> Chain:
    """Those named. ValueError with file and chain where one is absent, has no whole residue, or comes twice."""
    for name in names:
        complete = chains[name].valid.sum() if name in chains else 0
        if not complete or names.count(name) > 1:
            raise ValueError(f"{path}: chain {name}: {complete} residues with all of N, CA, C and O, named "
                             f"{names.count(name)} times; expected one of {', '.join(chains)} that has some, once")
    letters, coords, numbers, labels, _ = zip(*(chains[name] for name in names), strict=True)
    index = np.repeat(np.arange(len(names)), [*map(len, letters)])
    return Chain("".join(letters), np.concatenate(coords), np.concatenate(numbers), sum(labels, []), index)

def mutable_mask(positions: list | None, ranges: list | None, labels: list[str]) -> np.ndarray:
    """(len(labels),) bool: positions and inclusive ranges, [first, last] or 6-17, B42-B50, of 0-based numbers or labels
    such as B42A; all where neither is given. Raises ValueError."""
    mask, times = np.full(len(labels), positions is None and ranges is None), collections.Counter(labels)
    where = {label: i for i, label in enumerate(labels) if times[label] == 1} | {str(i): i for i in range(len(labels))}
    for ends in [[residue, residue] for residue in positions or []] + [*(ranges or [])]:
        if isinstance(ends, str):  # a residue's number may be negative
            ends = re.sub(r"(\d[A-Za-z]?)-", r"\1 ", ends, count=1).split()
        places = [where.get(str(residue), -1) for residue in ends]
        if len(places) != 2 or not 0 <= places[0] <= places[1]:
            raise ValueError(f"residues {'-'.join(dict.fromkeys(map(str, ends)))}; expected one, or a first and a last "
                             f"one, from 0 to {len(labels) - 1} or {labels[0]} to {labels[-1]}")
        mask[places[0] : places[1] + 1] = True
    return mask

def split_places(values: str | list[str] | None) -> list[str] | None:
    """`3 4 5` or `B42 B42A`, also with commas, as a list; None stays."""
    return values and " ".join([values] if isinstance(values, str) else values).replace(",", " ").split()

FIELDS = {  # of the data files, with an example of each
    "pdb_file": "1UBI.pdb", "preferred_seq": "ACD", "unpreferred_seq": "ACE", "sequences": ["ACD"], "scores": [0.5],
    "chain_id": "B", "design_chains": ["B", "A"], "fixed_chains": ["C"], "weight": 1.0, "margin": 0.5,
    "residue_weights": [1.0, 0.5], "mutable_positions": [3, "B42A"], "mutable_ranges": [[3, "B42A"]]}

def fits(value, example) -> bool:
    """Whether `value` is a text, a finite number, or a list of what the example is a list of."""
    if isinstance(example, list):
        return isinstance(value, list) and all(any(fits(part, one) for one in example) for part in value)
    if isinstance(example, str):
        return isinstance(value, str) and value != ""
    return type(value) in (int, float) and abs(value) < 1e30

def check_fields(row, scored: bool) -> list[str]:
    """What is wrong with the fields of a row of a data file."""
    known = [name for name in FIELDS if name not in ((*PREFERENCE, "margin") if scored else ("sequences", "scores"))]
    if not isinstance(row, dict):
        return [f"{row!r:.80}; expected an object with {', '.join(known[:3])}"]
    problems = [f"no {name}" for name in known[:3] if name not in row]
    problems += [f"unknown field {name!r}; expected {', '.join(known)}" for name in row if name not in known]
    return problems + [f"{name} is {value!r:.80}; expected such as {json.dumps(FIELDS[name])}"
                       for name, value in row.items() if name in known and not fits(value, FIELDS[name])]

def read_data_file(path: str) -> list[tuple[str, str, object]]:
    """(place, path of its structure, row) of a JSON array, or of an object per line, told apart by content; without
    fields that say nothing. Raises ValueError where the array is none. A line that is no JSON is a str."""
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
        array = text.lstrip().startswith("[")
        rows, found = json.loads(text) if array else map(str.strip, text.split("\n")), []
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}: {error}; expected a JSON array of objects, or an object per line") from error
    for number, row in enumerate(rows, not array):
        with contextlib.suppress(ValueError):
            row = row if array else json.loads(row)
        if isinstance(row, dict):
            row = {n: value for n, value in row.items() if value is not None and n not in ("description", "comment")}
        structure = Path(path).parent / str(row.get("pdb_file", "") if isinstance(row, dict) else "")
        if array or row != "":
            found.append((f"{path}: {'index' if array else 'line'} {number}", os.path.abspath(structure), row))
    return found

def pairs_by_score(scores: np.ndarray, kinds: np.ndarray, least: float, most: int) -> list[tuple[int, int]]:
    """(better, worse) of sequences with `scores` (n,), at least `least` apart, that are not of the same kind (n,): at
    most `most`, largest differences first, but each sequence once before any is there twice, and so on."""
    gaps = scores[:, None] - scores
    pairs = np.argwhere((gaps > 0) & (gaps >= least - 1e-9) & (kinds[:, None] != kinds))
    pairs = pairs[np.argsort(-gaps[tuple(pairs.T)], kind="stable")]
    taken, used = [*range(len(pairs))] if len(pairs) <= most else [], np.zeros(len(scores))
    while len(taken) < min(most, len(pairs)):
        often = np.square(used[pairs]).sum(1)
        often[taken] = math.inf
        taken.append(often.argmin())
        used[pairs[taken[-1]]] += 1
    return [*map(tuple, pairs[sorted(taken)].tolist())]

def to_ids(letters: str) -> np.ndarray:
    """(n,) uint8 of letters of the alphabet."""
    return np.frombuffer(letters.encode().translate(bytes.maketrans(ALPHABET.encode(), bytes(range(21)))), np.uint8)

class Collector:
    """Takes in the rows of data files. Each structure is read once, however many pairs it has."""
    def __init__(self, args: Namespace):
        self.args, self.other_letters, self.names = args, 0, []
        self.numbers = collections.defaultdict(itertools.count().__next__)  # of the backbones that are used, by key
        self.pairs: list[tuple] = []  # PER_RESIDUE, then PER_PAIR, of each
        self.read = functools.cache(read_structure)
        self.join = functools.cache(lambda path, *names: join_chains(path, self.read(path), sum(names, ())))
    def backbone(self, path: str, row: dict) -> tuple[tuple, Chain, int, np.ndarray]:
        """A row's backbone: its key (file, design chains, fixed chains), itself, how many residues its design chains
        have, which come first, and (L,) bool, those that are mutable. Raises ValueError."""
        chains, args = self.read(path), self.args
        design = row.get("design_chains") or [row.get("chain_id") or next(n for n in chains if chains[n].letters)]
        if "chain_id" in row and design != [row["chain_id"]]:
            raise ValueError(f"chain_id {row['chain_id']} and design_chains {', '.join(design)}: one of the two")
        key = path, tuple(design), tuple(row.get("fixed_chains", ()))
        backbone = self.join(*key)
        count, mutable = (backbone.chain_index < len(design)).sum(), np.zeros(len(backbone.letters), bool)
        given = split_places(args.mutable_positions), split_places(args.mutable_ranges)
        given = given if any(given) else (row.get("mutable_positions"), row.get("mutable_ranges"))
        mutable[:count] = mutable_mask(*given, backbone.labels[:count])
        return key, backbone, count, mutable
    def add(self, path: str, number: str, row: dict) -> None:
        """Take in row `number`; or nothing of it: raises ValueError with all that is wrong."""
        (key, backbone, count, mutable), args = self.backbone(path, row), self.args
        designed, native, chains = mutable & backbone.valid, to_ids(backbone.letters), "+".join(key[1])
        scored = "sequences" in row
        texts = dict(enumerate(row["sequences"])) if scored else {name: row[name] for name in PREFERENCE}
        texts = {f"sequence {name}" if scored else name: text.upper() for name, text in texts.items()}
        scores, weight = np.float64(row["scores"] if scored else [1, 0]), row.get("weight", 1)
        weights = np.float32(row.get("residue_weights", [1] * count))
        problems = [f"{name} has {len(text)} letters; expected {count}, the residues of chain {chains}"
                    for name, text in texts.items() if len(text) != count]
        problems += [f"{name} has {found[0]!r} at position {found.start()}; expected letters of {ALPHABET}"
                     for name, text in texts.items() if (found := re.search(f"[^{ALPHABET}]", text))]
        if count > args.max_length:
            problems.append(f"{count} residues in design chains {chains}; expected --max_length {args.max_length}")
        if not designed.any():
            problems.append("no residue is both mutable and resolved")
        elif weight <= 0 or len(weights) != count or weights.min() < 0 or not weights[designed[:count]].any():
            problems.append(f"weight {weight}, {len(weights)} residue_weights; expected a weight above 0, {count} "
                            "residue_weights from 0 up, above 0 for a residue that is designed")
        if len(scores) != len(texts) or not texts:
            problems.append(f"{len(texts)} sequences, {len(scores)} scores; expected as many, and some")
        if problems:
            raise ValueError(*problems)
        ids = np.stack([np.append(to_ids(text), native[count:]) for text in texts.values()])
        kinds = np.unique(ids[:, designed], axis=0, return_inverse=True)[1].ravel()
        if not scored and kinds[0] == kinds[1]:
            same = "differ only where nothing is designed" if (ids[0] != ids[1]).any() else "are identical"
            raise ValueError(f"{' and '.join(texts)} {same}; expected a difference at a designed residue")
        self.other_letters += bool((ids != native)[:, ~mutable & backbone.valid].any())
        ids, weights = np.where(designed, ids, native), np.append(weights, np.zeros(len(native) - count))
        for i, j in pairs_by_score(scores, kinds, args.score_gap, args.pairs_per_backbone) if scored else [(0, 1)]:
            margin = (scores[i] - scores[j]) * args.score_margin if scored else row.get("margin", 0.0)
            self.pairs.append((ids[i], ids[j], designed, weights, self.numbers[key], weight, margin))
            self.names.append(f"{Path(path).name.split('.')[0]}:{chains}:{number}" + f":{i}>{j}" * scored)
    def write(self, folder: Path, k: int, counts: list[int]) -> None:
        """PER_RESIDUE and PER_PAIR of all pairs, features of the backbones, files and hashes of the structures as .npy
        files and, last, a manifest of their sizes and checksums. Raises OSError."""
        columns = dict(zip((*PER_RESIDUE, *PER_PAIR), zip(*self.pairs, strict=True), strict=True))
        digests = [sha256_of(Path(path)) for path, *_ in self.numbers]
        files = {digest: os.path.relpath(path) for digest, (path, *_) in zip(digests, self.numbers, strict=True)}
        backbones = [self.join(*key) for key in tqdm(self.numbers, "featurise", disable=not sys.stderr.isatty())]
        features = [featurise(b.coords, b.valid, b.numbers, b.chain_index, k) for b in backbones]
        groups = {digest: i for i, digest in enumerate(files)}
        arrays = {name: np.concatenate(columns[name], dtype=kind) for name, kind in PER_RESIDUE.items()} | {
            **{name: np.array(columns[name], kind) for name, kind in PER_PAIR.items()},
            **{name: np.concatenate([found[name] for found in features]) for name in features[0]},
            "group": np.array([groups[digest] for digest in digests])[[*columns["backbone"]]],
            "offsets": np.cumsum([0, *(len(found.letters) for found in backbones)]), "names": np.array(self.names),
            "files": np.array([*files.values()]), "digests": np.array([*files]), "counts": np.array(counts)}
        sizes = {}
        for name, array in arrays.items():
            np.save(content := io.BytesIO(), array)  # numpy itself would not notice that a disk is full
            write_file(folder / f"{name}.npy", content.getbuffer())
            sizes[f"{name}.npy"] = [len(content.getbuffer()), sha256_of(folder / f"{name}.npy")]
        write_file(folder / "manifest.json", json.dumps(sizes, indent=1).encode())

def prepare_pairs(args: Namespace) -> str:
    """The cache folder of this run's pairs, filled unless it is whole: named by all that it is made of, so that no
    structure is read where nothing has changed. ValueError with all problems, unless bad rows may be left out."""
    names = [name for name in (args.scores or args.train_data, args.val_data) if name]
    rows, *others = map(read_data_file, names)
    train, rows, key = len(rows), sum(others, rows), [sha256_of(Path(name)) for name in names]
    for path in sorted({path for _, path, _ in rows}):
        key.append((path, os.path.isfile(path) and (os.path.getsize(path), os.path.getmtime(path))))
    settings = ("neighbours max_length mutable_positions mutable_ranges skip_bad_data score_gap score_margin "
                "pairs_per_backbone").split()
    folder = cache_folder(args, "dpo", key, bool(args.scores), [getattr(args, name) for name in settings])
    if cache_is_whole(folder, args.verify_data):
        return str(folder)
    collector, wrong, kept = Collector(args), [], 0
    for number, (place, path, row) in enumerate(tqdm(rows, "check pairs", disable=not sys.stderr.isatty())):
        scored = bool(args.scores and number < train or isinstance(row, dict) and "sequences" in row)
        try:
            if found := check_fields(row, scored):
                raise ValueError(*found)
            collector.add(path, place.split()[-1], row)
        except ValueError as error:
            wrong.append((place, error.args))
        kept = len(collector.pairs) if number < train else kept
    problems = [f"{place}: {what}" for place, found in wrong for what in found]
    if problems and not args.skip_bad_data:
        shown = "\n  ".join(problems[:20] + [f"... and {len(problems) - 20} more"] * (len(problems) > 20))
        raise ValueError(f"{len(wrong)} bad rows of {len(rows)} (--skip_bad_data goes on without them):\n  {shown}")
    if not kept or args.val_data and kept == len(collector.pairs):
        raise ValueError(f"{kept} pairs to train on, {len(collector.pairs) - kept} in --val_data, {len(wrong)} of "
                         f"{len(rows)} rows left out; expected some" + " (a smaller --score_gap?)" * bool(args.scores))
    if collector.other_letters:
        warn(f"{collector.other_letters} rows have other letters where nothing is mutable: the structure's count there")
    write_file(folder / "skipped_data.txt", "".join(f"{line}\n" for line in problems).encode())
    collector.write(folder, args.neighbours, [kept, len(wrong)])
    return str(folder)

class PreferenceBatch(NamedTuple):
    """P pairs on G backbones of at most L residues, with padding."""
    items: np.ndarray  # (P,) int64: numbers of the pairs
    geometry: Geometry
    owner: Tensor  # (P,) int64: number of the pair's backbone in `geometry`
    chosen: Tensor  # (P, L) int64: letters; the structure's where nothing is designed
    rejected: Tensor  # (P, L) int64
    designed: Tensor  # (P, L) bool: mutable and resolved
    weights: Tensor  # (P, L) float32, per residue
    weight: Tensor  # (P,) float32
    margin: Tensor  # (P,) float32
    encoded: tuple[Tensor, Tensor] | None = None  # of a frozen encoder

def moved(value, device: torch.device):
    """A tensor, or a named tuple with tensors, on the device. Copies from pinned memory do not stop the host."""
    if isinstance(value, Tensor):
        pin = device.type == "cuda" and value.device.type == "cpu"
        return (value.pin_memory() if pin else value).to(device, non_blocking=True)
    return type(value)(*(moved(part, device) for part in value)) if isinstance(value, tuple) else value

def flat_rows(starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Places (R, L) in a flat array of R stretches, 0 where padded, and (R, L) bool, whether they are not."""
    place = np.arange(lengths.max())
    inside = place < lengths[:, None]
    return np.where(inside, starts[:, None] + place, 0), inside

class Pairs:
    """A cache folder, memory-mapped: N pairs on backbones that are featurised."""
    def __init__(self, folder: Path):
        self.arrays = {p.stem: np.asarray(np.load(p, mmap_mode="r")) for p in folder.glob("*.npy")}
        self.names, self.files, self.digests = (self.arrays[name].tolist() for name in ("names", "files", "digests"))
        self.train, self.skipped = self.arrays["counts"].tolist()  # the first pairs are to train on; bad rows
        self.offsets, self.backbone, self.group = (self.arrays[name] for name in ("offsets", "backbone", "group"))
        self.lengths = np.diff(self.offsets)[self.backbone]  # (N,) residues of all chains
        self.starts = np.cumsum(self.lengths) - self.lengths
    def __len__(self) -> int:
        return len(self.backbone)
    def geometry(self, backbones: np.ndarray) -> Geometry:
        """Of backbones (G,), on the host; K is the largest number of neighbours."""
        rows, inside = flat_rows(self.offsets[backbones], np.diff(self.offsets)[backbones])
        neighbours = np.where(inside[:, :, None], self.arrays["neighbours"][rows], -1)
        neighbours = neighbours[:, :, : (neighbours >= 0).sum(-1).max()].astype(np.int64)
        others = [self.arrays[name][rows] for name in ("atoms", "numbers", "chain_index")]
        found = neighbours.clip(0), neighbours >= 0, *others, self.arrays["valid"][rows] & inside
        return Geometry(*map(torch.from_numpy, found))
    def collate(self, ids: np.ndarray) -> PreferenceBatch:
        """The pairs `ids` (P,), on the host."""
        backbones, owner = np.unique(self.backbone[ids], return_inverse=True)
        rows, inside = flat_rows(self.starts[ids], self.lengths[ids])
        arrays = [self.arrays[name][rows] * inside for name in PER_RESIDUE]
        arrays += [self.arrays[name][ids] for name in ("weight", "margin")]
        owner, chosen, rejected, *others = map(torch.from_numpy, (owner, *arrays))
        return PreferenceBatch(ids, self.geometry(backbones), owner, chosen.long(), rejected.long(), *others)

def load_pairs(args: Namespace, ddp: DDPContext) -> Pairs:
    """The pairs of --train_data or --scores, then those of --val_data. Sets args.data_key. (all ranks)"""
    folder = Path(on_rank0(ddp, prepare_pairs, args))
    if not (folder / "manifest.json").exists():
        raise ValueError(f"rank 0 wrote {folder}, but it is not here: --cache_dir must be shared by the nodes")
    manifest, pairs = json.loads((folder / "manifest.json").read_text()), Pairs(folder)
    if pairs.skipped and ddp.rank == 0:
        warn(f"left out {pairs.skipped} bad rows, listed in {folder / 'skipped_data.txt'}")
    content = [pairs.train, pairs.digests, *(manifest[f"{name}.npy"] for name in (*PER_RESIDUE, *PER_PAIR))]
    args.data_key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
    require_same(ddp, "the training data", args.data_key.encode())
    return pairs

def held_out(pairs: Pairs, fraction: float, seed: int) -> np.ndarray:
    """(structure files,) bool: in the order of a seeded hash of their content, until they have `fraction` of the pairs;
    one that would make it twice that is passed over. Raises ValueError where there is one structure alone."""
    sizes, held = np.bincount(pairs.group), np.zeros(len(pairs.files), bool)
    order = sorted(range(len(held)), key=lambda i: hashlib.sha256(f"{seed} {pairs.digests[i]}".encode()).digest())
    if len(order) < 2:
        raise ValueError(f"all pairs are on {pairs.files[0]}, and whole structures are held out: give --val_data")
    for i in order:
        taken, wanted = sizes[held].sum(), fraction * len(pairs)
        held[i] = taken < wanted - 1e-6 and taken + sizes[i] <= 2 * wanted + 1 and held.sum() < len(order) - 1
    held[min(order, key=lambda i: sizes[i])] |= not held.any()
    return held

def split_pairs(args: Namespace, ddp: DDPContext, pairs: Pairs) -> tuple[np.ndarray, np.ndarray]:
    """Ids of the pairs to train and to validate on, kept in split.json. (all ranks)"""
    last = np.arange(len(pairs)) >= pairs.train
    apart = last if args.val_data else held_out(pairs, args.val_fraction, args.seed)[pairs.group]
    train, valid = np.flatnonzero(~apart), np.flatnonzero(apart)
    if ddp.rank == 0 and (both := np.intersect1d(pairs.group[train], pairs.group[valid])).size:
        warn(f"{both.size} structures are in --val_data and in the training data, {pairs.files[both[0]]} for one")
    require_same(ddp, "the split", apart.tobytes())
    split = {name: [pairs.names[i] for i in ids] for name, ids in (("train", train), ("valid", valid))}
    on_rank0(ddp, write_file, Path(args.output_dir) / "split.json", json.dumps(split, indent=1).encode())
    log0(f"Loaded {len(train)} training and {len(valid)} validation pairs")
    return train, valid

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

# ---- Model ---------------------------------------------------------------------------------------

WIDTH, SCALE, RADIAL = 128, 30.0, 16  # hidden size, what a sum of messages is divided by, functions per distance
ORDERS, DRAWS = 11, 12  # streams of keyed_uniform: decoding orders, residues of designs
PAIRS = [[int(atom) for atom in pair] for pair in (  # N CA C O CB are 0 to 4; of a residue, of its neighbour
    "11 00 22 33 44 10 12 13 14 02 03 04 42 43 32 01 21 31 41 20 30 40 24 34 23".split())]

def featurise(coords: np.ndarray, valid: np.ndarray, numbers: np.ndarray, chain_index: np.ndarray,
              k: int) -> dict[str, np.ndarray]:
    """What the model needs of a structure, as in Geometry, from coords (L, 4, 3) N CA C O in Angstrom: neighbours
    (L, k) int32 are the k nearest valid residues by CA, itself first, then -1."""
    places, atoms = np.flatnonzero(valid), np.zeros((len(valid), 5, 3), np.float32)
    neighbours, kept = np.full((len(valid), k), -1, np.int32), min(k, len(places))
    n, ca, c = (coords[places, atom] for atom in range(3))
    cb = -0.58273431 * np.cross(ca - n, c - ca) + 0.56802827 * (ca - n) - 0.54067466 * (c - ca) + ca
    atoms[places] = np.concatenate([coords[places], cb[:, None]], axis=1)
    for low in range(0, len(places), 256):  # of a long complex not all pairs at once
        rows = np.arange(low, min(low + 256, len(places)))
        squared = np.square(ca[rows, None] - ca).sum(-1)
        squared[rows - low, rows] = -1.0
        neighbours[places[rows], :kept] = places[squared.argsort(axis=1, kind="stable")[:, :kept]]
    return dict(neighbours=neighbours, atoms=atoms, numbers=numbers, chain_index=chain_index, valid=valid)

class Geometry(NamedTuple):
    """G structures of L residues with padding, as featurise gives them."""
    neighbours: Tensor  # (G, L, K) int64, 0 where there is none
    near: Tensor  # (G, L, K) bool, whether there is one
    atoms: Tensor  # (G, L, 5, 3) float32, Angstrom: N, CA, C, O, and CB where glycine has none
    numbers: Tensor  # (G, L) int64, of the residues in their chain
    chain_index: Tensor  # (G, L) int64
    valid: Tensor  # (G, L) bool, whether there is a residue with coordinates

class Layer(nn.Module):
    """A layer of messages from neighbours, each made of `inputs` vectors. `edges`: it also updates the edges."""
    def __init__(self, inputs: int, edges: bool):
        super().__init__()
        self.W1, self.W2, self.W3 = nn.Linear(inputs * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.dense = nn.ModuleDict({"W_in": nn.Linear(WIDTH, 4 * WIDTH), "W_out": nn.Linear(4 * WIDTH, WIDTH)})
        if edges:
            self.W11, self.W12, self.W13 = nn.Linear(3 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.norm3 = nn.LayerNorm(WIDTH)
    def forward(self, h: Tensor | float, x: Tensor, near: Tensor) -> Tensor:
        """Nodes h (..., D) after the messages of their neighbours near (..., K), of which W1 made x (..., K, D)."""
        near = near.to(x.dtype)
        summed = (near.unsqueeze(-2) @ F.gelu(self.W2(F.gelu(x)))).squeeze(-2)
        message = F.linear(summed, self.W3.weight) + near.sum(-1, keepdim=True) * self.W3.bias  # W3 is linear
        h = self.norm1(h + message / SCALE)
        return self.norm2(h + self.dense["W_out"](F.gelu(self.dense["W_in"](h))))

def keep_freed_memory() -> None:
    """Make glibc keep the memory of freed tensors for the next ones: fetching it can be half of a CPU's step."""
    import ctypes
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 2**31 - 1), mallopt(-1, 2**31 - 1)  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD

def joined(linear: nn.Linear, h: Tensor | None, edges: Tensor, index: Tensor) -> Tensor:
    """linear([h_i, edge_ij, h_j]) (G, L, K, D) of nodes h (G, L, D), zero if None, edges (G, L, K, D) and the rows j,
    index (G * L * K,), of the flat nodes. The nodes' parts are computed per node, then gathered."""
    own, edge, other = linear.weight.split(WIDTH, dim=1)
    if h is None:
        return F.linear(edges, edge, linear.bias)
    x = F.linear(edges, edge) + F.linear(h, own, linear.bias).unsqueeze(2)
    x += F.linear(h, other).flatten(0, 1).index_select(0, index).view(edges.shape)
    return x

class ProteinMPNN(nn.Module):
    """Inverse folding (Dauparas et al. 2022): the released weights fit, and give what their own program computes
    without dropout and noise. But a missing residue is nobody's neighbour, so that padding changes nothing."""
    def __init__(self, neighbours: int = 48, dtype: torch.dtype = torch.float32, device_type: str = "cpu"):
        super().__init__()
        self.neighbours, self.dtype, self.device_type = neighbours, dtype, device_type
        self.noise_level = 0.0  # of the coordinates it was trained on, Angstrom, as its file says
        self.features = nn.ModuleDict({
            "embeddings": nn.ModuleDict({"linear": nn.Linear(66, RADIAL)}), "norm_edges": nn.LayerNorm(WIDTH),
            "edge_embedding": nn.Linear(RADIAL + 25 * RADIAL, WIDTH, bias=False)})
        self.W_e, self.W_s = nn.Linear(WIDTH, WIDTH), nn.Embedding(len(ALPHABET), WIDTH)
        self.encoder_layers = nn.ModuleList(Layer(3, edges=True) for _ in range(3))
        self.decoder_layers = nn.ModuleList(Layer(4, edges=False) for _ in range(3))
        self.W_out = nn.Linear(WIDTH, len(ALPHABET))
        self.register_buffer("pairs", torch.tensor(PAIRS), persistent=False)
        for matrix in (p for p in self.parameters() if p.dim() > 1):
            nn.init.xavier_uniform_(matrix)
    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device_type, self.dtype, enabled=self.dtype != torch.float32)
    def first_edges(self, geometry: Geometry, index: Tensor, k: int) -> Tensor:
        """Edges (G, L, K, D) from the distances between the atoms of both residues, as RADIAL Gaussians of each, and
        from their places in the chain. index (G * L * K,): rows of the neighbours."""
        position, embedding = self.features["embeddings"]["linear"], self.features["edge_embedding"].weight
        (number, length), (own, other) = geometry.valid.shape, self.pairs.T
        atoms = geometry.atoms.flatten(0, 1)
        x = atoms.index_select(1, own).unsqueeze(1) - atoms.index_select(1, other)[index].view(-1, k, len(own), 3)
        x = x.square_().sum(-1).add_(1e-6).sqrt_().view(-1, len(own), 1)
        x = x - torch.linspace(2.0, 22.0, RADIAL, device=x.device)
        # the clamp keeps out denormal numbers, with which a CPU's matrix product takes 200 times as long
        x = x.mul_(RADIAL / 20.0).square_().clamp_(max=50.0).neg_().exp_().view(len(index), -1)
        numbers, chains = (t.flatten()[index].view(number, length, k) for t in (geometry.numbers, geometry.chain_index))
        relative = (geometry.numbers.unsqueeze(2) - numbers + 32).clamp(0, 64)  # 65: another chain
        relative = torch.where(geometry.chain_index.unsqueeze(2) == chains, relative, 65)
        table = F.linear(position.weight.T + position.bias, embedding[:, :RADIAL])
        x = torch.addmm(F.embedding(relative.flatten(), table), x, embedding[:, RADIAL:].T)
        return self.W_e(self.features["norm_edges"](x)).view(number, length, k, WIDTH)
    def encode(self, geometry: Geometry) -> tuple[Tensor, Tensor]:
        """Nodes (G, L, D) and edges (G, L, K, D) of the structures, whatever their sequences; K at most L."""
        (number, length), k = geometry.valid.shape, min(geometry.near.shape[1:])
        first = torch.arange(number, device=geometry.valid.device)[:, None, None] * length
        index, near = (geometry.neighbours[:, :, :k] + first).flatten(), geometry.near[:, :, :k]
        with self.autocast():
            h, edges = None, self.first_edges(geometry, index, k)
            for layer in self.encoder_layers:
                h = layer(0.0 if h is None else h, joined(layer.W1, h, edges, index), near)
                x = F.gelu(layer.W12(F.gelu(joined(layer.W11, h, edges, index))))
                edges = layer.norm3(edges + layer.W13(x))
        return h, edges
    def forward(self, geometry: Geometry, owner: Tensor, sequences: Tensor, ranks: Tensor,
                encoded: tuple[Tensor, Tensor] | None = None, tables: list[Tensor] | None = None) -> Tensor:
        """Logits (S, L, 21) float32 of sequences (S, L), each on the structure owner (S,); `encoded`: what encode made
        of the structures, if it is known. A residue sees the letters of those with lower ranks (S, L). What each layer
        makes of a residue (S, L, D) for those that see its letter is appended to `tables`."""
        nodes, edges = encoded or self.encode(geometry)
        (number, length), k = sequences.shape, edges.shape[2]
        near, neighbours = geometry.near[:, :, :k][owner], geometry.neighbours[:, :, :k][owner]
        visible = ranks.gather(1, neighbours.flatten(1)).view(neighbours.shape) < ranks.unsqueeze(-1)
        first = torch.arange(number, device=owner.device) * length  # rows of the sequences, then of the structures
        first = torch.where(visible, first[:, None, None], (number + owner)[:, None, None] * length)
        index = (neighbours + first).flatten()
        with self.autocast():
            h, letters = nodes[owner], self.W_s(sequences)
            for layer in self.decoder_layers:
                own, edge, letter, other = layer.W1.weight.split(WIDTH, dim=1)
                seen = F.linear(letters, letter) + F.linear(h, other)
                if tables is not None:
                    tables.append(seen)
                table = torch.cat([seen.flatten(0, 1), F.linear(nodes, other).flatten(0, 1)])
                x = F.linear(edges, edge).index_select(0, owner)
                x += table.index_select(0, index).view(x.shape)
                x += F.linear(h, own, layer.W1.bias).unsqueeze(2)
                h = layer(h, x, near)
            return self.W_out(h).float()

def decoding_ranks(designed: Tensor, valid: Tensor, seed: int, ids: Tensor, draw: int, how: str) -> Tensor:
    """designed, valid (S, L) bool -> (S, L) int64, the place of each residue in the decoding order: context, designed
    ones, those without coordinates. how: "left_to_right" or "random", a function of (seed, id, draw, position)."""
    keys = torch.arange(designed.shape[1], device=designed.device).expand(designed.shape)
    if how == "random":
        keys = (keyed_uniform(seed, draw, ids, designed.shape[1], ORDERS) * 2**24).long()
    keys = torch.where(valid, keys + designed * 2**32, 2**33)
    return keys.argsort(dim=1, stable=True).argsort(dim=1)

def read_model(path: str | Path) -> ProteinMPNN:
    """The network in a ProteinMPNN file (vanilla, soluble), fp32 on the CPU. ValueError where it is something else."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)  # noqa: TID251  not a training checkpoint
        weights = {re.sub(r"^(module\.|_orig_mod\.)+", "", n): v.float() for n, v in found["model_state_dict"].items()}
        edges, k = weights.get("features.edge_embedding.weight", torch.zeros(1)), found.get("num_edges")
        foreign = {"context_encoder_layers.": "a LigandMPNN model, which needs ligand atoms",
                   "features.node_embedding.": "a label-membrane model, which needs labels"}
        refused = ["a CA-only model, which sees no backbone but CA"] * (edges.shape[-1] == 167)
        refused += [why for start, why in foreign.items() if any(name.startswith(start) for name in weights)]
        refused += [f"num_edges is {k}, not a number of neighbours"] * (not isinstance(k, int) or k < 1)
        if refused:
            raise ValueError(refused[0])
        model = ProteinMPNN(k)
        model.noise_level = float(found.get("noise_level") or 0.0)
        model.load_state_dict(weights)
    except Exception as error:  # torch raises six kinds
        raise ValueError(f"{path}: {' '.join(str(error).split())[:500]} ({type(error).__name__}); expected num_edges, "
                         "noise_level, model_state_dict of a full-backbone ProteinMPNN such as v_48_020.pt") from error
    return model

@torch.no_grad()
def design(model: ProteinMPNN, geometry: Geometry, native: Tensor, designed: Tensor, count: int, temperature: float,
           seed: int, batch: int) -> tuple[Tensor, Tensor]:
    """`count` sequences (count, L) int64 for a structure (G = 1), and the mean negative log-probability (count,) of
    their designed residues at temperature 1. Where designed (L,) is False they are as native (L,); X is never drawn.
    Each has its own decoding order and depends on (seed, its number) alone; `batch` are drawn at once."""
    (nodes, edges), device = model.encode(geometry), native.device
    neighbours, near = geometry.neighbours[0, :, : edges.shape[2]], geometry.near[0, :, : edges.shape[2]]
    context, steps = int((geometry.valid[0] & ~designed).sum()), int(designed.sum())
    sequences, scores, layers = native.repeat(count, 1), torch.zeros(count, device=device), []
    with model.autocast():
        for layer in model.decoder_layers:  # with its products that no letter changes
            own, edge, letter, other = layer.W1.weight.split(WIDTH, dim=1)
            layers.append((layer, own, letter, other, F.linear(edges[0], edge), F.linear(nodes[0], other)))
    for low in range(0, count, batch):
        ids = torch.arange(low, min(low + batch, count), device=device)
        rows, found, tables = torch.arange(len(ids), device=device), sequences[low : low + batch], []
        ranks = decoding_ranks(designed.expand(found.shape), geometry.valid.expand(found.shape), seed, ids, 0, "random")
        order, draws = ranks.argsort(dim=1), keyed_uniform(seed, 0, ids, len(native), DRAWS)
        model(geometry, torch.zeros_like(ids), found, ranks, (nodes, edges), tables)  # for the context
        for step, at in enumerate(order[:, context : context + steps].T, context):
            h, around, starts = nodes[0, at], neighbours[at], []
            visible = ranks.gather(1, around).unsqueeze(-1) < step
            with model.autocast():
                for (layer, own, _, _, between, unseen), seen in zip(layers, tables, strict=True):
                    starts.append(h)
                    x = between[at] + torch.where(visible, seen[rows[:, None], around], unseen[around])
                    h = layer(h, x + F.linear(h, own, layer.W1.bias).unsqueeze(1), near[at])
                logits = model.W_out(h).float()
                p = (logits[:, :UNKNOWN].double() / max(temperature, 1e-6)).softmax(-1).cumsum(-1)
                drawn = torch.searchsorted(p, draws[rows, at, None].double() * p[:, -1:], right=True).squeeze(-1)
                for (_, _, letter, other, _, _), seen, h in zip(layers, tables, starts, strict=True):
                    seen[rows, at] = F.linear(model.W_s(drawn), letter) + F.linear(h, other)
            scores[ids] -= logits.log_softmax(-1)[rows, drawn] / steps
            found[rows, at] = drawn
    return sequences, scores

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

# ---- Loss ----------------------------------------------------------------------------------------

def sequence_logps(logits: Tensor, sequences: Tensor, weights: Tensor, temperature: float) -> Tensor:
    """log p of sequences (S, L) summed over residues with `weights` (S, L), nats, (S,) float64. logits (S, L, 21)."""
    logp = F.log_softmax(logits / temperature, dim=-1).gather(-1, sequences[..., None])[..., 0]
    return (logp * weights).double().sum(1)

def preference_loss(h: Tensor, residues: Tensor, margin: Tensor, args: Namespace) -> Tensor:
    """Loss of each pair (P,), from h (P,) = log-ratio of the chosen over the rejected, less that of the reference.
    sigmoid: -log s(beta h) (Rafailov et al. 2023), with label smoothing e (1 - e) and e of both signs (Mitchell 2023);
    robust: the unbiased form of that (Chowdhury et al. 2024); hinge: relu(1 - beta h) (Zhao et al. 2023); ipo:
    (h / residues - 1 / (2 beta))^2 (Azar et al. 2023). `margin` (P,): what beta h must exceed (Touvron et al. 2023)."""
    z, e = args.beta * h - margin, args.label_smoothing
    if args.loss_type == "ipo":
        return (z / residues - 0.5).square() / args.beta**2
    if args.loss_type == "hinge":
        return F.relu(1 - z)
    right, wrong = -F.logsigmoid(z), -F.logsigmoid(-z)
    return (1 - e) * right + e * wrong if args.loss_type == "sigmoid" else ((1 - e) * right - e * wrong) / (1 - 2 * e)

def diversity(logits: Tensor, designed: Tensor, temperature: float) -> Tensor:
    """Expected share (S,) of designed residues at which two samples differ, 1 - sum_a p(a)^2 (Simpson 1949)."""
    p = F.softmax(logits / temperature, dim=-1)
    return ((1 - p.square().sum(-1)) * designed).sum(1) / designed.sum(1)

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

EVAL_DRAW, SFT_DRAW = 1000, 2000  # numbers of decoding orders, apart from those of training
COLUMNS = ("chosen", "rejected", "nll", "recovered", "entropy", "residues")  # of score_pairs

def pair_logits(model: nn.Module, batch: PreferenceBatch, draw: int, args: Namespace, both: bool = True) -> tuple:
    """Logits (S, L, 21) of a batch's chosen sequences, then (`both`) of its rejected ones, in decoding order number
    `draw` of each pair, the same for its two sequences; and log p of its sequences at --temperature (P, 2)."""
    ids, times = torch.from_numpy(batch.items).to(batch.chosen.device), 2 if both else 1
    ranks = decoding_ranks(batch.designed, batch.geometry.valid[batch.owner], args.seed, ids, draw, args.decoding_order)
    sequences = torch.cat([batch.chosen, batch.rejected][:times])
    logits = model(batch.geometry, batch.owner.repeat(times), sequences, ranks.repeat(times, 1), batch.encoded)
    weights = (batch.designed * batch.weights).repeat(times, 1)
    return logits, sequence_logps(logits, sequences, weights, args.temperature).view(times, -1).T

@torch.no_grad()
def score_pairs(task: Task, ids: np.ndarray, draws: list[int] | None = None) -> Tensor:
    """COLUMNS of the pairs `ids` under the model, means over decoding orders `draws` (else those of validation), (N, 6)
    float64 on the host: log p of both sequences at --temperature; of the chosen, its cross entropy at temperature 1,
    residues that are the likeliest, entropy, summed over designed residues; their number. (all ranks)"""
    draws = draws or range(EVAL_DRAW, EVAL_DRAW + task.args.eval_orders)
    args, ddp, size = task.args, task.ddp, task.args.eval_batch_size
    table = torch.zeros(len(ids), len(COLUMNS), dtype=torch.float64)
    order = np.lexsort((ids, task.pairs.backbone[ids], task.pairs.lengths[ids]))  # pairs of a backbone together
    for low in range(ddp.rank * size, len(ids), ddp.world_size * size):
        places = order[low : low + size]
        batch = task.collate(ids[places])
        for draw in draws:
            logits, logps = pair_logits(task.model, batch, draw, args)
            logp = F.log_softmax(logits[: len(places)], dim=-1)
            values = (-logp.gather(-1, batch.chosen[..., None])[..., 0], logp.argmax(-1) == batch.chosen,
                      -(logp.exp() * logp).sum(-1), batch.designed)
            sums = [(v * batch.designed).double().sum(1) for v in values]
            table[torch.from_numpy(places)] += torch.column_stack([logps, *sums]).cpu() / len(draws)
        StepGuard.beat = time.monotonic()
    if ddp.world_size > 1:
        table = table.to(ddp.device)
        dist.all_reduce(table)  # every row is zero on all ranks but one
    return table.cpu()

def pair_table(task: Task, ids: np.ndarray, reference: Tensor) -> dict[str, np.ndarray]:
    """What is known of each pair, {name: (N,) float64}: COLUMNS, rewards, margins, losses. `reference` (N, 2)."""
    table = score_pairs(task, ids)
    rewards = task.args.beta * (table[:, :2] - reference)
    found = dict(zip(COLUMNS, table.T, strict=True))
    margin = torch.from_numpy(task.pairs.arrays["margin"][ids].astype(np.float64))
    loss = preference_loss((rewards[:, 0] - rewards[:, 1]) / task.args.beta, found["residues"], margin, task.args)
    found |= {"reference_chosen": reference[:, 0], "reference_rejected": reference[:, 1], "loss": loss,
              "reward_chosen": rewards[:, 0], "reward_rejected": rewards[:, 1], "margin": rewards[:, 0] - rewards[:, 1]}
    return {name: values.numpy() for name, values in found.items()}

def summarise(table: dict[str, np.ndarray], beta: float) -> dict[str, float]:
    """Metrics of a pair_table: means over pairs; recovery, perplexity, entropy and log-ratio over designed residues."""
    t, residues = table, table["residues"].sum()
    found = {"loss": t["loss"].mean(),
             "rewards/accuracies": (t["margin"] > 0).mean(), "rewards/margins": t["margin"].mean(),
             "rewards/chosen": t["reward_chosen"].mean(), "rewards/rejected": t["reward_rejected"].mean(),
             "likelihood_accuracy": (t["chosen"] > t["rejected"]).mean(),
             "log_ratio": t["reward_chosen"].sum() / beta / residues, "recovery": t["recovered"].sum() / residues,
             "perplexity": np.exp(t["nll"].sum() / residues), "entropy": t["entropy"].sum() / residues}
    return {name: float(value) for name, value in found.items()}

def evaluate(task: Task) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Metrics of the validation pairs, and their pair_table; the same on any number of ranks. (all ranks)"""
    with averaged_weights(task.model, task.average) if task.args.ema else contextlib.nullcontext():
        table = pair_table(task, task.val_ids, task.reference[task.val_ids, 0])
    return summarise(table, task.args.beta), table

def report_structures(task: Task, table: dict[str, np.ndarray]) -> None:
    """structures.csv and the log: a row per structure file of the validation pairs, of their pair_table. (all ranks)"""
    group, rows = task.pairs.group[task.val_ids], []
    for number in np.unique(group):
        found = summarise({name: values[group == number] for name, values in table.items()}, task.args.beta)
        found = {name: f"{value:.6f}" for name, value in found.items()}
        rows.append({"structure": task.pairs.files[number], "pairs": (group == number).sum(), **found})
        log0("  " + " ".join(f"{name}={value}" for name, value in rows[-1].items()))
    on_rank0(task.ddp, write_file, Path(task.args.output_dir) / "structures.csv", csv_of(rows))

def csv_of(rows: list[dict]) -> bytes:
    """`rows` as CSV, with their names."""
    cells = [list(rows[0]), *(row.values() for row in rows)]
    return "".join(",".join(f'"{c}"' if "," in str(c) else str(c) for c in row) + "\n" for row in cells).encode()

# ---- Train ---------------------------------------------------------------------------------------

@dataclass
class Task:
    """What the stages, the evaluation and the modes share."""
    args: Namespace
    ddp: DDPContext
    model: ProteinMPNN
    pairs: Pairs
    train_ids: np.ndarray | None  # None: nothing is trained
    val_ids: np.ndarray
    average: list[Tensor] = field(default_factory=list)  # EMA of the parameters
    encoded: dict[int, tuple] | None = None  # what the frozen encoder makes of each backbone, on the host
    reference: Tensor | None = None  # (pairs, orders, 2) float64: log p of both sequences; order 0 for validation
    history: list[dict] = field(default_factory=list)
    def collate(self, ids: np.ndarray) -> PreferenceBatch:
        """The pairs `ids`, on the device, with the frozen encoder's output."""
        batch = moved(self.pairs.collate(ids), self.ddp.device)
        if self.encoded is None:
            return batch
        backbones, shape = np.unique(self.pairs.backbone[ids]), batch.geometry.near.shape
        nodes, edges = torch.zeros(*shape[:2], WIDTH), torch.zeros(*shape, WIDTH)
        for row, number in enumerate(backbones.tolist()):
            if number not in self.encoded:
                with torch.no_grad():
                    found = self.model.encode(moved(self.pairs.geometry(backbones[row : row + 1]), self.ddp.device))
                self.encoded[number] = [x[0].float().cpu() for x in found]
            length, k = self.encoded[number][1].shape[:2]
            nodes[row, :length], edges[row, :length, :k] = self.encoded[number]
        return batch._replace(encoded=(moved(nodes, self.ddp.device), moved(edges, self.ddp.device)))

@dataclass
class Stage:
    """Where a stage stands: what a checkpoint must bring back beside the weights."""
    name: str  # sft: maximum likelihood on the chosen sequences; dpo
    first: int = 0  # optimizer steps of the stage before
    step: int = 0  # optimizer steps of this stage
    epoch: int = 0
    best: dict | None = None
    peak: float = 0.0  # learning rate
    loss: float = 0.0  # sum over this epoch's pairs, at a checkpoint
    owed: bool = False  # the epoch's validation has yet to be made

def make_step(task: Task, sampler: GlobalBatchSampler, epoch: int, batch: np.ndarray) -> tuple[list[tuple], int]:
    """This rank's part of a global batch (places in task.train_ids), and how many pairs that has. For each micro-batch:
    itself, its pairs (0: it stands in where this rank has none), their log p of the reference (P, 2) float64."""
    lengths, ranks, micro = task.pairs.lengths[task.train_ids[batch]], task.ddp.world_size, []
    # a block for each rank, as its pairs share backbones; of as many residues, as batches are sorted by length
    ends = np.searchsorted(lengths.cumsum() - lengths / 2, lengths.sum() * np.arange(1, ranks) / ranks)
    ends = np.minimum(ends, len(batch) - min(sampler.micro_steps, len(batch) // ranks) * np.arange(ranks - 1, 0, -1))
    for part in np.array_split(np.split(batch, ends)[task.ddp.rank], sampler.micro_steps):
        ids = task.train_ids[part if len(part) else batch[:1]]
        reference = None if task.reference is None else task.reference[ids, epoch % task.args.num_orders]
        micro.append((task.collate(ids), len(part), moved(reference, task.ddp.device)))
    return micro, len(batch)

def stage_loss(task: Task, model: nn.Module, stage: Stage, batch: PreferenceBatch, reference: Tensor) -> tuple:
    """Sum over a micro-batch's pairs of the stage's loss, and {name: (P,)} to log."""
    args, dpo = task.args, stage.name == "dpo"
    draw = stage.epoch % args.num_orders if dpo else SFT_DRAW + stage.epoch
    logits, logps = pair_logits(model, batch, draw, args, both=dpo)
    nll, residues = 0.0, batch.designed.sum(1)
    if not dpo or args.sft_weight:
        nll = -sequence_logps(logits[: len(residues)], batch.chosen, batch.designed.float(), 1.0) / residues
    if not dpo:
        return (batch.weight * nll).sum(), {"loss": nll}
    rewards = args.beta * (logps - reference)
    margins = rewards[:, 0] - rewards[:, 1]
    losses = preference_loss(margins / args.beta, residues, batch.margin, args)
    whole = batch.weight * losses + args.sft_weight * nll
    if args.diversity_lambda:
        shares = diversity(logits, batch.designed.repeat(2, 1), args.temperature)
        whole = whole - args.diversity_lambda * shares.view(2, -1).mean(0)
    return whole.sum(), {"loss": losses, "rewards/accuracies": (margins > 0).double(), "rewards/margins": margins}

def stage_step(task: Task, model, stage: Stage, micro: list[tuple], pairs: int, log: RunLog, scaler) -> tuple:
    """Forward and backward of an optimizer step; this rank's parts of the whole loss and of the preference loss."""
    whole, shown = (torch.zeros((), dtype=torch.float64, device=task.ddp.device) for _ in range(2))
    for number, (batch, count, reference) in enumerate(micro, 1):
        with sync_gradients(model, number == len(micro)):
            loss, values = stage_loss(task, model, stage, batch, reference)
            # DDP averages over ranks: times ranks / pairs, that is the mean over the pairs of the whole step
            scaler.scale(loss * (bool(count) * task.ddp.world_size / pairs)).backward()
        if count:
            log.add(count, **{name: (value.sum(), count) for name, value in values.items()})
            shown += values["loss"].detach().sum()
            whole += loss.detach()
    return whole, shown

def check_start(task: Task, micro: list[tuple], loss: Tensor, pairs: int) -> None:
    """RuntimeError unless the first loss is that of equal networks (ln 2, sigmoid), as these still are. (all ranks)"""
    equal = [preference_loss(torch.zeros_like(batch.margin), batch.designed.sum(1), batch.margin, task.args)[:count]
             for batch, count, _ in micro]
    sums = {"found": loss / pairs, "expected": torch.cat(equal).double().sum() / pairs}
    found, expected = reduce_sums(task.ddp, sums).values()
    if not abs(found - expected) <= (1e-4 if task.model.dtype == torch.float32 else 0.05) * max(1.0, expected):
        raise RuntimeError(f"the first loss is {found:.6f}, that of equal networks is {expected:.6f}: network and "
                           "reference differ before training (weights, precision, decoding order?)")
    log0(f"first loss {found:.6f}, as it must be where network and reference are equal ({expected:.6f})")

def save_official(task: Task, name: str) -> None:
    """The model, averaged where that is asked for, as ProteinMPNN's own tools load it, and read_model. (rank 0 only)"""
    model = unwrap(task.model)
    with averaged_weights(model, task.average) if task.args.ema else contextlib.nullcontext():
        weights = {n: v.detach().to("cpu", torch.float32, copy=True) for n, v in model.state_dict().items()}
    state = {"num_edges": model.neighbours, "noise_level": model.noise_level, "model_state_dict": weights}
    atomic_write(Path(task.args.output_dir) / name, lambda file: torch.save(state, file))  # noqa: TID251

def checkpoint(task: Task, stage: Stage, optimizer, guard: StepGuard, log: RunLog, total: int, best: bool, done: bool):
    """Everything needed to go on bit by bit, written by rank 0. (all ranks)"""
    args, ddp, states = task.args, task.ddp, rng_states(task.ddp)
    StepGuard.beat = math.inf  # however long rank 0 takes
    if ddp.rank == 0:
        state = {
            "format": 1, "script": "run_dpo_ddp.py", "args": vars(args), "world_size": ddp.world_size, "done": done,
            "global_batch": total, "model": task.model.state_dict(), "ema": task.average, "reference": task.reference,
            "optimizer": optimizer.state_dict(), "scaler": guard.scaler.state_dict(), "rng": states,
            "stage": vars(stage), "step": stage.first + stage.step, "epoch": stage.epoch, "history": task.history,
            "bad_steps": guard.bad_steps, "speed": (log.final_loss, log.speed), "wandb_id": log.wandb_id,
            "wall_s": log.wall + time.monotonic() - log.started}
        if not save_checkpoint(args.output_dir, state, state["step"], args.keep_checkpoints, best) and done:
            raise OSError(f"the end of the run could not be saved: free space in {args.output_dir}, run again")
    barrier(ddp)
    StepGuard.beat = time.monotonic()
    log.reset()

def finish_epoch(task: Task, stage: Stage, log: RunLog, mean: float, epochs: int) -> bool:
    """Validate after an epoch of training loss `mean`, and say so. True if it is the best so far. (all ranks)"""
    if stage.name == "sft":
        log0(f"warm start, epoch {stage.epoch}/{epochs}: {mean:.4f} nats per residue")
        return False
    metrics, _ = evaluate(task)
    value, step = metrics["loss"], stage.first + stage.step
    better = stage.best is None or value < stage.best["value"]
    if better:
        stage.best = {"name": "val loss", "value": value, "step": step}
    task.history.append({"step": step, "epoch": stage.epoch, **{f"val {n}": v for n, v in metrics.items()}})
    log.write(task.history[-1])
    log0(f"Epoch {stage.epoch} Summary:")
    log0(f"  Train Loss: {mean:.4f}")
    log0(f"  Val Loss:   {value:.4f}" + " (best so far)" * better)
    log0("  " + " ".join(f"{n}={v:.4f}" for n, v in metrics.items()))
    return better

def train(task: Task, stage: Stage, log: RunLog, state: dict | None, total: int, micro_steps: int) -> str:
    """Train a stage, from `state` if it is this stage's. Returns why it was stopped, or ''. (all ranks)"""
    args, ddp, dpo = task.args, task.ddp, stage.name == "dpo"
    lengths, backbone = task.pairs.lengths[task.train_ids], task.pairs.backbone[task.train_ids]
    lengths = lengths + backbone / (backbone.max() + 1.0)  # pairs of a backbone together: it is encoded once
    cut = bucket_by_tokens(lambda ids: lengths[ids], total, max(1, total // args.batch_size), args.seed)
    sampler = GlobalBatchSampler(len(lengths), total, micro_steps, args.seed + (not dpo), ddp, 8, cut)
    per_epoch, epochs = len(sampler) // micro_steps, args.num_epochs if dpo else args.sft_epochs
    steps = epochs * per_epoch
    stage.peak = stage.peak or scaled_lr(args.lr if dpo else args.sft_lr, args.lr_scaling, ddp.world_size)
    warmup, schedule = (args.warmup_steps, args.schedule) if dpo else (min(50, steps // 10), "cosine")
    trained = [p for p in task.model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if p.ndim > 1]},
              {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0}]
    optimizer = getattr(torch.optim, args.optimizer)(groups, lr=stage.peak, weight_decay=args.weight_decay, fused=True)
    guard = StepGuard(args, ddp, optimizer, task.model.dtype, log.started)  # a fused optimizer can skip on the device
    task.average = task.average or [p.detach().clone() for p in task.model.parameters()]
    if state:
        optimizer.load_state_dict(state["optimizer"])
        guard.scaler.load_state_dict(state["scaler"])
        restore_rng(state["rng"], ddp, args.seed)
        task.model.load_state_dict(state["model"])
        task.average = [t.to(ddp.device) for t in state["ema"]]
        guard.bad_steps, task.history, task.reference = state["bad_steps"], state["history"], state["reference"]
    model = wrap_ddp(torch.compile(task.model, dynamic=True) if args.compile else task.model, ddp)
    log0(f"{stage.name}: {len(lengths)} pairs, {epochs} epochs x {per_epoch} steps, peak learning rate {stage.peak:g}")
    require_same(ddp, "the batches", sampler.fingerprint())
    reason, early, batches = "", False, None
    shown = torch.tensor(stage.loss * (ddp.rank == 0), dtype=torch.float64, device=ddp.device)  # this rank's part of it
    log.reset()
    while not reason:
        if stage.owed:  # also first of all in a run that was stopped before it
            mean, shown = stage.loss / (per_epoch * total), torch.zeros_like(shown)
            stage.epoch, stage.loss, stage.owed = stage.epoch + 1, 0.0, False
            better = finish_epoch(task, stage, log, mean, epochs)
            early = dpo and 0 < args.early_stop_patience * per_epoch <= stage.first + stage.step - stage.best["step"]
            checkpoint(task, stage, optimizer, guard, log, total, better, done=dpo and (early or stage.step >= steps))
            if dpo and ddp.rank == 0:
                for name in (f"checkpoint_epoch_{stage.epoch}.pt", "latest_model.pt", *["best_model.pt"] * better):
                    save_official(task, name)
        if early or stage.step >= steps:
            break
        position = stage.step % per_epoch
        if position == 0 or batches is None:  # an epoch starts, or goes on after a restart
            sampler.set_epoch(stage.epoch)
            batches = (make_step(task, sampler, stage.epoch, batch) for batch in sampler.batches(position))
            if dpo:
                log0(f"Epoch {stage.epoch + 1}/{epochs}")
            bar = tqdm(total=per_epoch, initial=position, desc="Training" if dpo else "Warm start",
                       disable=ddp.rank > 0 or not sys.stderr.isatty())
        for group in optimizer.param_groups:
            group["lr"] = stage.peak * lr_at(stage.step, steps, warmup, schedule)
        micro, count = log.waiting(batches)
        loss, part = stage_step(task, model, stage, micro, count, log, guard.scaler)
        if dpo and stage.step == 0 and not args.reference_free:
            check_start(task, micro, part, count)
        shown += part
        norm, reason = guard.step(loss, stage.first + stage.step + 1, [b.items[:n] for b, n, _ in micro])
        if args.ema:
            update_ema(task.average, list(task.model.parameters()), args.ema, stage.step)
        stage.step += 1
        step, last = stage.first + stage.step, stage.step == steps
        bar.update()
        if stage.step % args.log_every == 0 or last:
            log.interval(step, stage.first + steps, stage.epoch, model, group["lr"], norm, phase=1 + dpo)
            bar.set_postfix(loss=log.final_loss, refresh=False)
        stage.owed = position + 1 == per_epoch
        if stage.owed:  # a stop comes before it, as it may take longer than there is time
            bar.close()
            reason = reason or guard.finish()
        save = reason or not stage.owed and stage.step % args.save_every == 0
        if save or stage.owed:
            stage.loss = reduce_sums(ddp, {"loss": shown})["loss"]
        if save:
            checkpoint(task, stage, optimizer, guard, log, total, best=False, done=False)
    if early:
        log0(f"stopped early: no better val loss in {args.early_stop_patience} epochs")
    guard.finish()
    return reason

def start_preferences(task: Task, log: RunLog) -> None:
    """Score all pairs under the model as it stands, the reference. (all ranks)"""
    task.average = [p.detach().clone() for p in task.model.parameters()]
    if task.ddp.rank == 0:
        save_official(task, "reference_model.pt")
    task.reference = torch.zeros(len(task.pairs), task.args.num_orders, 2, dtype=torch.float64)
    if not task.args.reference_free:
        for draw in range(task.args.num_orders):
            task.reference[task.train_ids, draw] = score_pairs(task, task.train_ids, [draw])[:, :2]
        task.reference[task.val_ids, 0] = score_pairs(task, task.val_ids)[:, :2]
    metrics, _ = evaluate(task)
    task.history.append({"step": 0, "epoch": 0, **{f"val {n}": v for n, v in metrics.items()}})
    log.write(task.history[-1])
    log0("before training: " + " ".join(f"{n}={v:.4f}" for n, v in metrics.items()))

# ---- Main ----------------------------------------------------------------------------------------

def load_network(args: Namespace, ddp: DDPContext, *files: Path) -> tuple[ProteinMPNN, str]:
    """The network in the first of `files` and the base weights that is there, on the device; its name. (all ranks)"""
    torch.manual_seed(args.seed)  # the same on all ranks
    base = Path(args.base_model_dir) / f"{args.base_model_name}.pt"
    name = next((str(path) for path in (*files, base) if path.exists()), args.base_model_name)
    if name == args.base_model_name != "random":
        raise ValueError(f"{base}: no such file. The weights are published at {WEIGHTS}: give their folder as "
                         "--base_model_dir; or --base_model_name random with --sft_epochs 20 to start without")
    model = ProteinMPNN() if name == "random" else read_model(name)
    model.dtype, model.device_type = resolve_precision(args.precision, ddp.device), ddp.device.type
    for module in (model.features, model.W_e, model.encoder_layers) if args.freeze_encoder else ():
        module.requires_grad_(False)
    weights = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
    args.neighbours, args.base_key = model.neighbours, hashlib.sha256(weights).hexdigest()[:16]
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    log0(f"{name}: {trained:,} trained parameters, {model.neighbours} neighbours, {model.dtype}")
    return model.to(ddp.device), name

def write_scores(task: Task, base: str, policy: Path) -> int:
    """--score_only: log-probabilities, rewards and margin of each pair as CSV. `base` is the reference. (all ranks)"""
    args, ddp, ids = task.args, task.ddp, task.val_ids
    reference, neighbours = score_pairs(task, ids)[:, :2] * (not args.reference_free), args.neighbours
    task.model, name = load_network(args, ddp, policy)
    if args.neighbours != neighbours:
        raise ValueError(f"{name} has {args.neighbours} neighbours; expected {neighbours}, as {base} has")
    table, path = pair_table(task, ids, reference), Path(args.out or Path(args.output_dir) / "scores.csv")
    rows = [{"pair": task.pairs.names[i], **{n: f"{values[i]:.6f}" for n, values in table.items()}} for i in ids]
    on_rank0(ddp, write_file, path, csv_of(rows))
    metrics = " ".join(f"{n}={value:.4f}" for n, value in summarise(table, args.beta).items())
    log0(f"{len(rows)} pairs, {name} against {base}: {metrics}; {path}")
    return 0

def write_designs(args: Namespace, ddp: DDPContext, model: ProteinMPNN, weights: str) -> int:
    """--sample: N sequences for --pdb_file as FASTA, after its own one; '/' between chains. (one process)"""
    if ddp.world_size > 1:
        raise ValueError("--sample works in one process: start it with python, without torchrun or mpiexec")
    row = {n: split_places(getattr(args, n)) for n in ("design_chains", "fixed_chains") if getattr(args, n)}
    (_, names, _), backbone, count, designed = Collector(args).backbone(args.pdb_file, row)
    designed[:count] &= ~mutable_mask(split_places(args.fixed_positions) or [], None, backbone.labels[:count])
    designed &= backbone.valid
    if not designed.any():
        raise ValueError(f"{args.pdb_file}: nothing is designed: all residues are fixed or lack atoms")
    arrays = featurise(backbone.coords, backbone.valid, backbone.numbers, backbone.chain_index, model.neighbours)
    neighbours, *others = (torch.from_numpy(array)[None] for array in arrays.values())
    geometry = Geometry(neighbours.long().clamp(min=0), neighbours >= 0, *others)
    native, free = torch.from_numpy(to_ids(backbone.letters).astype(np.int64)), torch.from_numpy(designed)
    inputs = [moved(value, ddp.device) for value in (geometry, native, free)]
    found = design(model, *inputs, args.sample, args.sample_temperature, args.seed, args.eval_batch_size)
    drawn, scores = (x.cpu() for x in found)
    stem = Path(args.pdb_file).name.split(".")[0]
    headers = [f"{stem} designed_chains={','.join(names)} designed_residues={designed.sum()} model={weights}"]
    for i, (ids, score) in enumerate(zip(drawn, scores.tolist(), strict=True)):
        recovery = (ids == native)[free].double().mean()
        headers.append(f"{stem}_{i} T={args.sample_temperature:g} seed={args.seed} {score=:.4f} {recovery=:.4f}")
    text, ends = "", np.searchsorted(backbone.chain_index, range(len(names) + 1))
    for header, ids in zip(headers, [native, *drawn], strict=True):
        letters = "".join(ALPHABET[i] for i in ids)
        text += f">{header}\n{'/'.join(letters[a:b] for a, b in itertools.pairwise(ends))}\n"
    path = Path(args.out or Path(args.output_dir) / "designs.fasta")
    write_file(path, text.encode())
    log0(f"{args.sample} sequences, mean score {scores.mean():.4f} nats per residue: {path}")
    return 0

def main(args: Namespace) -> int:
    """Train, both stages, from where the run in --output_dir stands; or score, or sample. Returns the exit status."""
    ddp = setup_ddp(args)
    if args.score_only or args.sample:  # nothing to save: signals end it at once
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
    keep_freed_memory()
    torch.set_float32_matmul_precision("high")  # what stays in fp32 runs on tensor cores
    policy = Path(args.checkpoint or Path(args.output_dir) / "best_model.pt")  # its reference lies beside it
    files = [policy] * (args.sample > 0) + [policy.with_name("reference_model.pt")] * args.score_only
    model, name = load_network(args, ddp, *files)
    if args.sample:
        return write_designs(args, ddp, model, name)
    pairs = load_pairs(args, ddp)
    if args.score_only:
        return write_scores(Task(args, ddp, model, pairs, None, np.arange(len(pairs))), name, policy)
    state = open_run(args, ddp, SAME)
    if state and state["done"] and args.num_epochs == state["args"]["num_epochs"]:
        log0(f"the run in {args.output_dir} is finished, after {state['step']} steps: --fresh starts anew")
        return 0
    total, micro_steps = resolve_batch(args, ddp.world_size, state["global_batch"] if state else None)
    log = RunLog(args, ddp, state)
    task = Task(args, ddp, model, pairs, *split_pairs(args, ddp, pairs), encoded={} if args.freeze_encoder else None)
    log0(f"beta {args.beta:g}, temperature {args.temperature:g}, learning rate {args.lr:g}")
    stage, reason = Stage(**state["stage"]) if state else Stage("sft" if args.sft_epochs else "dpo"), ""
    if stage.name == "sft":
        reason = train(task, stage, log, state, total, micro_steps)
        stage, state = stage if reason else Stage("dpo", first=stage.step), None
    if not reason:
        if not state:
            start_preferences(task, log)
        reason = train(task, stage, log, state, total, micro_steps)
    if reason:
        log.close("stopped", steps=stage.first + stage.step, reason=reason)
        barrier(ddp)  # the first rank to end makes some launchers kill the others
        return stop_status(reason)
    best = load_checkpoint(Path(args.output_dir) / "best.pt")
    model.load_state_dict(best["model"])
    task.average = [tensor.to(ddp.device) for tensor in best["ema"]]
    if ddp.rank == 0:  # also where a run was killed between its checkpoint and this file
        save_official(task, "best_model.pt")
    metrics, table = evaluate(task)
    log0(f"validation pairs by structure, at step {best['step']} (best val loss):")
    report_structures(task, table)
    log.close("finished", steps=stage.first + stage.step, epochs=stage.epoch, samples_per_s=log.speed,
              final_loss=log.final_loss, best_metric=stage.best, metrics=metrics,
              baselines={f"{n} before training": v for n, v in task.history[0].items() if n.startswith("val")},
              checkpoint=str(Path(args.output_dir) / "best_model.pt"))
    log0(f"Training complete! Best validation loss: {stage.best['value']:.4f}. Models saved to: {args.output_dir}")
    log0(f"finished: {args.output_dir}/summary.json, curves.png, best_model.pt")
    return 0

if __name__ == "__main__":
    sys.exit(launch(main, parse_args()))
