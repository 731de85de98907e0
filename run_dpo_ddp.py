"""Fine-tune ProteinMPNN on preferences: of two sequences for a backbone, the preferred one becomes
the likelier.

Direct preference optimisation (DPO, Rafailov et al. 2023) of an inverse-folding network (Dauparas
et al. 2022), compared with the frozen network that it starts from, the reference.

    torchrun --nproc_per_node=4 run_dpo_ddp.py --train_data pairs.json --output_dir outputs/dpo_ddp
    ./scripts/run_dpo_ddp_local.sh 4 --train_data pairs.json      # the same, with logs in files
    mpiexec -n 24 -ppn 12 python run_dpo_ddp.py --train_data pairs.json --backend ccl
    qsub scripts/run_dpo_ddp_aurora.sh                            # Aurora (PBS)
    python run_dpo_ddp.py --config configs/run_dpo_ddp_quickstart.yaml      # no weights needed

Before: tools/make_dpo_pairs.py makes pairs of scored sequences. After: tools/score_dpo.py compares
networks on pairs, tools/design_dpo.py draws sequences.

Data (--train_data): a JSON array, or an object per line, with pdb_file (PDB or mmCIF, also .gz; the
path is relative to the data file), preferred_seq, unpreferred_seq (a letter for each residue in the
file, none for one that it lacks), and if needed
    chain_id, or design_chains and fixed_chains    the sequences are the design chains, one after
                the other; fixed chains are context. Without: the first chain with protein
    mutable_positions, mutable_ranges    what is designed of them, from 0 on, ends included
    cluster     pairs of a cluster, such as homologous chains, are held out together
Held out are whole structures or clusters, or the pairs of --val_data.

Logged, over all ranks: step, phase (1: warm start, 2: preferences), epoch (from 0, those of the
warm start first), lr, loss (nats per residue in the warm start, then DPO's, ln 2 at the start),
rewards/accuracies (share of the pairs with a margin above 0), rewards/margins (reward of the
preferred less that of the unpreferred; a reward is beta times the log-ratio to the reference, in
nats), grad_norm (before clipping), skipped (steps whose gradient was not finite), samples_per_s
(pairs), data_wait (share of the time). After each epoch of preferences val/...: these,
likelihood_accuracy (the preferred is the likelier), and of the preferred sequence log_ratio,
recovery, perplexity, entropy, per designed residue.

Files in --output_dir: best_model.pt, latest_model.pt, reference_model.pt (ProteinMPNN's own format:
its tools load them), latest.pt, previous.pt, best.pt, split.json, metrics.jsonl, curves.png,
summary.json.

Unlike the original (architvasan/DPO_InvFold) network and reference are without dropout, and so
equal at the start; only what is designed counts; decoding orders are random; the reference is
computed once. Matrix products are IEEE fp32 on GPUs, too: at temperature 0.1 the rounding of bf16
is larger than what is learned.
"""

import argparse
import contextlib
import ctypes
import difflib
import fcntl
import gc
import gzip
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
import zlib
from collections import Counter
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


def parse_args():
    parser = Parser(description=__doc__)
    add = parser.add_argument_group("data").add_argument
    add("--train_data", default="data/input/test_data_real.json", help="preference pairs")
    add("--val_data", help="pairs to validate on; None: a part of the training pairs")
    add("--val_fraction", type=float, default=0.1, help="that part: share of the pairs")
    add("--max_length", type=count, default=500, help="residues designed at most")
    add("--skip_bad_data", **FLAG, default=False, help="leave out rows that are wrong, list them")

    add = parser.add_argument_group("model").add_argument
    add("--base_model_name", default="v_48_020", help="NAME.pt in --base_model_dir; or random")
    default = "data/input/BioMPNN/soluble_model_weights"
    add("--base_model_dir", default=default, help="folder of the weights to start from")
    add("--base_model_config_dir", help="of the original; not read")

    add = parser.add_argument_group("preferences").add_argument
    add("--beta", type=float, default=0.1, help="weight of the log-ratio")
    add("--temperature", type=float, default=0.1, help="of the probabilities; 1: the network's own")
    add("--loss_type", default="sigmoid", choices=["sigmoid", "ipo"], help="form of the loss")
    add("--label_smoothing", type=float, default=0.0, help="share of wrong labels (sigmoid)")
    add("--sft_weight", type=float, default=0.0, help="of the preferred sequence's cross entropy")
    add("--num_orders", type=count, default=4, help="decoding orders of a pair; one for each epoch")

    add = parser.add_argument_group("optimization").add_argument
    add("--num_epochs", type=count, default=10, help="passes over the pairs")
    add("--lr", "--learning_rate", type=float, default=3e-7, help="peak learning rate")
    add("--weight_decay", type=float, default=0.0, help="of matrices; biases and norms: 0")
    add("--warmup_steps", type=int, default=0, help="steps in which the rate rises")
    add("--sft_epochs", type=int, default=0, help="before: of maximum likelihood (warm start)")
    add("--sft_lr", type=float, default=1e-3, help="peak learning rate of the warm start (cosine)")
    add("--eval_batch_size", type=count, default=16, help="pairs per forward pass in evaluations")
    add("--no_cuda", **FLAG, default=False, help="as --device cpu")

    add_common_arguments(parser, output_dir="outputs/dpo_ddp", batch_size=1, precision="fp32")
    parser.set_defaults(learning_rate=None)  # so that a file may name it so, too
    args = parse_with_config(parser)

    del args.learning_rate
    if args.no_cuda:
        args.device = "cpu"
    if args.backend in ("ccl", "xpu"):  # the seeds' names; PyTorch has its own: xccl
        args.backend = "auto"
    for name in ("beta", "temperature"):
        if not 0 < getattr(args, name) < math.inf:
            parser.error(f"--{name} {getattr(args, name)}: must be a finite number above 0")
    for name in ("lr", "sft_lr", "weight_decay", "sft_weight", "warmup_steps", "sft_epochs"):
        if not 0 <= getattr(args, name) < math.inf:
            parser.error(f"--{name} {getattr(args, name)}: must be a finite number from 0 on")
    if not 0 < args.val_fraction < 1:
        parser.error(f"--val_fraction {args.val_fraction}: must be between 0 and 1")
    if not 0 <= args.label_smoothing < 0.5:
        parser.error(f"--label_smoothing {args.label_smoothing}: must be from 0 to below 0.5")
    if args.label_smoothing > 0 and args.loss_type == "ipo":
        parser.error("--label_smoothing: --loss_type ipo has none")
    return args


# --------------------------------------------------------------------------------------------------
# Data

ALPHABET = "ACDEFGHIKLMNPQRSTVWYX"  # letters 0 to 20 in ProteinMPNN's order; X is unknown
UNKNOWN = 20
BACKBONE = ["N", "CA", "C", "O"]
RESIDUES = """ALA CYS ASP GLU PHE GLY HIS ILE LYS LEU MET ASN PRO GLN ARG SER THR VAL TRP
    TYR""".split()
LETTERS = {name: letter for letter, name in enumerate(RESIDUES)}
LETTERS["MSE"] = LETTERS["MET"]  # selenomethionine is read as methionine
EVALUATION = 1_000_000  # number of the decoding order that evaluations use
FIELDS = {  # of the data, with an example of each
    "pdb_file": "1UBI.pdb",
    "preferred_seq": "ACD",
    "unpreferred_seq": "ACE",
    "chain_id": "B",
    "design_chains": ["B", "A"],
    "fixed_chains": ["C"],
    "mutable_positions": [0, 3],
    "mutable_ranges": [[3, 7]],
    "cluster": "kinases",
}
REQUIRED = ["pdb_file", "preferred_seq", "unpreferred_seq"]


class Chain(NamedTuple):
    """L residues of a protein chain, in the order of the file; or of several chains."""

    letters: np.ndarray  # (L,) uint8
    coords: np.ndarray  # (L, 4, 3) float32: N, CA, C, O in Angstrom, NaN where missing
    numbers: np.ndarray  # (L,) int64: the file's, and one more for each insertion code before

    def whole(self):
        """(L,) bool: which residues have all four atoms."""
        return np.isfinite(self.coords).all(axis=(1, 2))


class Structure(NamedTuple):
    chains: dict  # {name: Chain}, those with protein
    digest: str  # of the file's content
    notes: list  # what is odd in it, as lines


def read_structure(path):
    """A PDB or mmCIF file, plain or gz, as a Structure, with the chains' names in the PDB.

    As ProteinMPNN reads it: the first model, the first alternative of each atom, ATOM records and
    selenomethionine. A residue that is none of the 20 counts if it has three of the backbone's
    atoms. Raises ValueError."""
    import gemmi

    odd = []
    chains = {}
    try:
        content = Path(path).read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        if content.startswith(b"\x1f\x8b"):
            content = gzip.decompress(content)
        if b"\0" in content[:4096] or content.lstrip().startswith(b"<"):
            raise ValueError("format not supported (BinaryCIF, MMTF or PDBML, it seems)")
        structure = gemmi.read_structure_string(content, format=gemmi.CoorFormat.Detect)
        model = structure[0] if len(structure) > 0 else []
        for chain in model:
            found = read_chain(chain, odd)
            if len(found.letters) > 0:
                chains[chain.name] = found
        if not chains:
            raise ValueError("no protein residues (of HETATM records only MSE is read)")
    except (OSError, EOFError, RuntimeError, ValueError, zlib.error) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        expected = "expected a protein structure in PDB or mmCIF format, plain or whole gz"
        raise ValueError(f"{path}: {reason}; {expected}") from None

    lines = atom_lines(content) if odd else {}
    notes = [f"{path}, line {lines.get(str(atom), '?')}: {text}" for atom, text in odd]
    return Structure(chains, digest, notes)


def atom_lines(content):
    """{serial number of an atom: its line in a file}"""
    lines = {}
    for line, text in enumerate(content.decode(errors="replace").splitlines(), start=1):
        if text.startswith(("ATOM", "HETATM")):
            lines.setdefault(text[6:11].strip(), line)  # PDB
            lines.setdefault(text.split()[1], line)  # mmCIF
    return lines


def read_chain(chain, odd):
    """A gemmi chain as a Chain. What is odd about a residue is added to `odd`: (serial number of
    its first atom, text). Raises ValueError where an atom occurs twice."""
    letters = []
    coords = []
    numbers = []
    labels = []  # for messages: (serial number, text)
    places = set()  # numbers with insertion codes
    once = set()  # atoms that are no alternatives
    shift = 0
    for residue in chain:
        atoms = [residue.find_atom(name, "*") for name in BACKBONE]  # the first alternatives
        label = (residue[0].serial, f"residue {chain.name}{residue.seqid} {residue.name}")
        if residue.het_flag == "H" and residue.name != "MSE":
            if None not in atoms[:3]:
                text = "is left out: it is a HETATM; as an ATOM it would be read as X"
                odd.append((label[0], f"{label[1]} {text}"))
            continue
        if residue.name not in LETTERS and atoms.count(None) > 1:
            continue

        place = str(residue.seqid)
        for atom in residue:
            if atom.name in BACKBONE and not atom.has_altloc():
                if (place, atom.name) in once:
                    text = f"has two atoms {atom.name}; expected one, or alternatives"
                    raise ValueError(f"{label[1]} {text} (do two chains have this name?)")
                once.add((place, atom.name))
        if place in places:
            continue  # of alternative residues in one place the first counts
        places.add(place)

        if numbers and residue.seqid.num + shift == numbers[-1]:  # an insertion code: A42, A42A
            shift += 1
        letters.append(LETTERS.get(residue.name, UNKNOWN))
        coords.append([atom.pos.tolist() if atom else [math.nan] * 3 for atom in atoms])
        numbers.append(residue.seqid.num + shift)
        labels.append(label)

    # A field full of asterisks reads as 0, and coordinates may be in nanometres. So a residue whose
    # bonds cannot be right counts as missing.
    coords = np.array(coords, np.float32).reshape(-1, 4, 3)
    bonds = np.linalg.norm(np.diff(coords, axis=1), axis=2)  # NaN where an atom is missing
    wrong = ((bonds < 0.8) | (bonds > 2.2)).any(axis=1)
    for row in np.flatnonzero(wrong):
        lengths = ", ".join(f"{bond:.3g}" for bond in bonds[row])
        text = f"N-CA, CA-C, C-O are {lengths} Å long, expected 0.8 to 2.2"
        odd.append((labels[row][0], f"{labels[row][1]} counts as missing: {text}"))
    coords[wrong] = math.nan
    return Chain(np.array(letters, np.uint8), coords, np.array(numbers, np.int64))


def try_structure(path):
    """read_structure for a process of its own: the Structure, or the error's text."""
    try:
        return read_structure(path)
    except ValueError as error:
        return str(error)


def read_structures(paths, workers):
    """{path: Structure, or what is wrong with it}. The files are shared out over the ranks, and
    each rank's over its `workers`. (all ranks)"""
    mine = paths[dist.get_rank() :: dist.get_world_size()]
    # a DataLoader's workers end with their rank, whatever ends it
    options = {"num_workers": workers, "worker_init_fn": ignore_signals}
    found = DataLoader(mine, batch_size=None, collate_fn=try_structure, **options)

    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, dict(zip(mine, found, strict=True)))
    structures = {}
    for part in parts:
        structures.update(part)
    return structures


def read_rows(path):
    """[(place, path of its structure, row)] of a JSON array, or of an object per line, told apart
    by content. Fields that are null are left out. A line that is no JSON stays a text. (rank 0)"""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        is_array = text.lstrip().startswith("[")
        rows = json.loads(text) if is_array else text.split("\n")
    except (ValueError, OSError) as error:
        expected = "expected a JSON array of objects, or an object per line"
        raise InputError(f"{path}: {error}; {expected}") from None

    found = []
    for number, row in enumerate(rows):
        place = f"{path}: index {number}"
        if not is_array:
            place = f"{path}: line {number + 1}"
            if not row.strip():
                continue
            with contextlib.suppress(ValueError):
                row = json.loads(row)
        structure = ""
        if isinstance(row, dict):
            row = {name: value for name, value in row.items() if value is not None}
            if "pdb_file" in row:
                structure = os.path.abspath(Path(path).parent / str(row["pdb_file"]))
        found.append((place, structure, row))
    return found


def fits(value, example):
    """Whether a value is a text, a whole or any finite number, or a list, as the example is."""
    if isinstance(example, list):
        return isinstance(value, list) and all(fits(part, example[0]) for part in value)
    if isinstance(example, float):
        return type(value) in (int, float) and abs(value) < math.inf
    return type(value) is type(example) and value != ""


def check_fields(row, fields, required):
    """Raises ValueError with what is wrong with the fields of a row."""
    if not isinstance(row, dict):
        raise ValueError(f"{row!r:.80}; expected an object with {', '.join(required)}")
    missing = [name for name in required if name not in row]
    if missing:
        raise ValueError(f"no {', '.join(missing)}")

    for name, value in row.items():
        if name in ("description", "comment"):
            continue
        if name not in fields:
            raise ValueError(f"unknown field {name!r}; expected {', '.join(fields)}")
        if not fits(value, fields[name]):
            example = json.dumps(fields[name])
            raise ValueError(f"{name} is {value!r:.80}; expected such as {example}")


class Complex(NamedTuple):
    """Chains, one after the other: those that are designed first."""

    chain: Chain  # all of them as one, L residues
    index: np.ndarray  # (L,) int64: number of the residue's chain
    designed: np.ndarray  # (L,) bool: in a design chain, mutable, and resolved
    length: int  # residues of the design chains
    name: str  # file and design chains: 1UBI:B+A


def join_chains(path, structure, row):
    """The Complex that a row of the data means. structure: as try_structure gives it. Raises
    ValueError."""
    if isinstance(structure, str):
        raise ValueError(structure)
    chains = structure.chains
    design = row.get("design_chains") or [row.get("chain_id", next(iter(chains)))]
    if "chain_id" in row and design != [row["chain_id"]]:
        text = f"chain_id {row['chain_id']} and design_chains {', '.join(design)}"
        raise ValueError(f"{text}: give one of the two")
    names = [*design, *row.get("fixed_chains", [])]

    for name in names:
        whole = chains[name].whole().sum() if name in chains else 0
        if whole == 0 or names.count(name) > 1:
            found = f"{whole} residues with all of N, CA, C and O, named {names.count(name)} times"
            hint = f"expected one of {', '.join(chains)} that has some, once"
            notes = "".join(f" ({note})" for note in structure.notes[:1])
            raise ValueError(f"{path}: chain {name}: {found}; {hint}{notes}")

    parts = [chains[name] for name in names]
    joined = Chain(*[np.concatenate(arrays) for arrays in zip(*parts, strict=True)])
    index = np.repeat(np.arange(len(names)), [len(part.letters) for part in parts])
    length = np.count_nonzero(index < len(design))
    designed = joined.whole() & (index < len(design)) & choose_mutable(row, length, len(index))
    if not designed.any():
        raise ValueError("no residue is both mutable and resolved")
    name = f"{Path(path).name.split('.')[0]}:{'+'.join(design)}"
    return Complex(joined, index, designed, length, name)


def choose_mutable(row, length, total):
    """(total,) bool: the row's mutable positions and ranges among the first `length` residues; all
    where it has neither. Raises ValueError."""
    ranges = [[place, place] for place in row.get("mutable_positions", [])]
    ranges += row.get("mutable_ranges", [])
    mutable = np.full(total, "mutable_positions" not in row and "mutable_ranges" not in row)
    for ends in ranges:
        if len(ends) != 2 or not 0 <= ends[0] <= ends[1] < length:
            hint = f"expected a first and a last residue from 0 to {length - 1}"
            raise ValueError(f"mutable residues {ends}; {hint}")
        mutable[ends[0] : ends[1] + 1] = True
    return mutable


def read_letters(row, found, max_length):
    """Letters (2, L) of a row whose fields are right, for a Complex of L residues; in fixed chains
    the structure's. Raises ValueError."""
    length = found.length
    if length > max_length:
        raise ValueError(f"{length} residues; expected at most --max_length {max_length}")

    letters = np.stack([found.chain.letters, found.chain.letters])
    for number, name in enumerate(["preferred_seq", "unpreferred_seq"]):
        text = row[name].upper()
        other = re.search(f"[^{ALPHABET}]", text)
        if len(text) != length:
            expected = f"expected {length}, one for each residue in the file, as {found.name}"
            raise ValueError(f"{name} has {len(text)} letters; {expected}")
        if other:
            where = f"{other[0]!r} at position {other.start()}"
            raise ValueError(f"{name} has {where}; expected letters of {ALPHABET}")
        letters[number, :length] = [ALPHABET.index(letter) for letter in text]

    if (letters[0] == letters[1])[found.designed].all():
        raise ValueError("preferred_seq and unpreferred_seq are the same at the designed residues")
    return letters


class Structures(NamedTuple):
    """Backbones of different lengths, not padded but laid one after the other: N residues that
    have all atoms, as the network wants them."""

    neighbours: torch.Tensor  # (N, K) int64: rows of the nearest residues, -1 where there are few
    atoms: torch.Tensor  # (N, 5, 3) float32: N, CA, C, O, and CB where glycine has none
    place: torch.Tensor  # (2, N) int64: number of the residue, and of its chain

    def to(self, device):
        return Structures(*[tensor.to(device, non_blocking=True) for tensor in self])


def featurise(found, k):
    """The residues of a Complex that have all atoms, as Structures. To spare memory their
    neighbours, the k nearest by CA and itself first, are int32."""
    whole = found.chain.whole()
    coords = found.chain.coords[whole]
    n, ca, c, _ = np.moveaxis(coords, 1, 0)
    normal = np.cross(ca - n, c - ca)
    cb = -0.58273431 * normal + 0.56802827 * (ca - n) - 0.54067466 * (c - ca) + ca
    atoms = np.concatenate([coords, cb[:, None]], axis=1).astype(np.float32)

    neighbours = np.full((len(ca), k), -1, np.int32)
    kept = min(k, len(ca))
    for row in range(len(ca)):
        squared = np.square(ca[row] - ca).sum(axis=1)
        squared[row] = -1.0  # itself first, whoever else is at its place
        neighbours[row, :kept] = squared.argsort(kind="stable")[:kept]
    place = np.stack([found.chain.numbers, found.index]).astype(np.int64)[:, whole]
    return Structures(*[torch.from_numpy(array) for array in (neighbours, atoms, place)])


class Pair(NamedTuple):
    """Two sequences for the L resolved residues of a backbone."""

    name: str
    backbone: int
    letters: np.ndarray  # (2, L) uint8: preferred, unpreferred; the structure's in the context
    designed: np.ndarray  # (L,) bool
    group: str  # held out together: a cluster, or a structure


class Batch(NamedTuple):
    """P pairs, with M residues in all. Few tensors, since each is a copy to the device."""

    structures: Structures
    # (5, M) int64: letters of the preferred and of the unpreferred sequence, row of the residue in
    # `structures`, place in the decoding order of its pair, number of its pair in the batch
    residues: torch.Tensor
    designed: torch.Tensor  # (M,) float32: 1 or 0
    counts: torch.Tensor  # (P,) float32: designed residues
    ids: torch.Tensor  # (P,) int64
    share: float  # 1 / pairs of the global batch: what a pair counts in the loss

    def to(self, device):
        tensors = [tensor.to(device, non_blocking=True) for tensor in self[1:5]]
        return Batch(self.structures.to(device), *tensors, self.share)


class Pairs(Dataset):
    """N pairs on backbones that are featurised."""

    def __init__(self, args, k):
        """args: max_length, seed; k: neighbours of the network."""
        self.args = args
        self.k = k
        self.pairs = []
        self.backbones = []
        self.numbers = {}  # of the backbones, by path and chains
        self.clusters = {}  # of each file, by its digest
        self.problems = []  # what is wrong with the data, as lines
        self.notes = []  # what is odd, as lines
        self.other_letters = 0  # pairs with other letters where nothing is designed

    def add(self, place, path, row, structure):
        """Take in a row of the data, or note what is wrong with it."""
        try:
            check_fields(row, FIELDS, REQUIRED)
            found = join_chains(path, structure, row)
            letters = read_letters(row, found, self.args.max_length)
            cluster = self.clusters.setdefault(structure.digest, row.get("cluster"))
            if cluster != row.get("cluster"):
                text = "expected the same for all pairs on a structure"
                raise ValueError(f"cluster is {row.get('cluster')}, before {cluster}; {text}")
        except ValueError as error:
            self.problems.append(f"{place}: {error}")
            return

        key = (path, found.name, *row.get("fixed_chains", []))
        if key not in self.numbers:
            self.numbers[key] = len(self.backbones)
            self.backbones.append(featurise(found, self.k))
            self.notes += [note for note in structure.notes if note not in self.notes]

        whole = found.chain.whole()
        native = found.chain.letters
        if ((letters != native) & whole & ~found.designed).any():
            self.other_letters += 1
        letters = np.where(found.designed, letters, native)
        pair = Pair(
            name=f"{found.name}:{place.split()[-1]}",
            backbone=self.numbers[key],
            letters=letters[:, whole],
            designed=found.designed[whole],
            group=str(row.get("cluster") or structure.digest),
        )
        self.pairs.append(pair)

    def cost(self):
        """(N,) time and memory of each pair; those of one backbone are next to each other."""
        lengths = np.array([len(pair.designed) for pair in self.pairs])
        return lengths + self.backbones_of(range(len(self))) / (len(self.backbones) + 1)

    def backbones_of(self, ids):
        """(len(ids),) int64: numbers of the backbones of pairs."""
        return np.array([self.pairs[number].backbone for number in ids], np.int64)

    def ranks(self, number, order):
        """(L,) int64: the place of each residue of a pair in decoding order number `order`, a
        function of the seed, the pair and that number. The context comes first."""
        designed = self.pairs[number].designed
        ranks = np.cumsum(~designed) - 1
        generator = np.random.default_rng([self.args.seed, number, order])
        shuffled = generator.permutation(np.count_nonzero(designed))
        ranks[designed] = np.count_nonzero(~designed) + shuffled
        return ranks

    def structures(self, numbers):
        """Backbones, one after the other."""
        found = [self.backbones[number] for number in numbers]
        k = min(self.k, max(len(backbone.atoms) for backbone in found))
        first = 0
        neighbours = []
        for backbone in found:
            part = backbone.neighbours[:, :k].long()
            neighbours.append(torch.where(part < 0, -1, part + first))
            first += len(part)
        atoms = torch.cat([backbone.atoms for backbone in found])
        place = torch.cat([backbone.place for backbone in found], dim=1)
        return Structures(torch.cat(neighbours), atoms, place)

    def __getitem__(self, item):
        """item: (ids of a micro-batch, those of the global batch, number of the decoding order)"""
        ids, whole, order = item
        some = [self.pairs[number] for number in ids]
        numbers = np.unique(self.backbones_of(ids))
        sizes = [len(self.backbones[number].atoms) for number in numbers]
        first = dict(zip(numbers, np.cumsum(sizes) - sizes, strict=True))
        residues = []
        for place, (number, pair) in enumerate(zip(ids, some, strict=True)):
            row = first[pair.backbone] + np.arange(len(pair.designed))
            of_pair = np.full(len(row), place)
            residues.append(np.stack([*pair.letters, row, self.ranks(number, order), of_pair]))

        designed = np.concatenate([pair.designed for pair in some])
        counts = np.array([np.count_nonzero(pair.designed) for pair in some], np.float32)
        return Batch(
            self.structures(numbers),
            torch.from_numpy(np.concatenate(residues, axis=1)),
            torch.from_numpy(designed.astype(np.float32)),
            torch.from_numpy(counts),
            torch.from_numpy(np.asarray(ids, np.int64)),
            1 / len(whole),
        )

    def __len__(self):
        return len(self.pairs)


def load_pairs(args, k):
    """The pairs of --train_data, then those of --val_data, and how many are of the former. Raises
    InputError with all that is wrong. (all ranks)"""
    pairs = Pairs(args, k)
    counts = {}  # pairs of each file
    for name in filter(None, [args.train_data, args.val_data]):
        before = len(pairs)
        rows = on_rank0(read_rows, name)
        paths = {path for _, path, _ in rows if path}
        logging.info(f"Reading {len(paths)} structures (more processes do it: --num_workers)")
        structures = read_structures(sorted(paths), args.num_workers)
        for place, path, row in rows:
            pairs.add(place, path, row, structures.get(path))
        counts[name] = len(pairs) - before

    if pairs.problems and not args.skip_bad_data:
        refuse_rows(pairs.problems)
    for name, number in counts.items():
        if number == 0:
            raise InputError(f"{name}: no pairs; expected {', '.join(REQUIRED)} in each row")
    left_out = [f"left out: {problem}" for problem in pairs.problems]
    for note in first_lines(left_out + pairs.notes):
        logging.warning(note)
    if pairs.other_letters > 0:
        text = "pairs have other letters where nothing is designed: the structure's count there"
        logging.warning(f"{pairs.other_letters} {text}")
    return pairs, counts[args.train_data]


def first_lines(lines):
    """At most 20, and the number of the others."""
    if len(lines) <= 20:
        return lines
    return [*lines[:20], f"... and {len(lines) - 20} more"]


def refuse_rows(problems):
    """Raises InputError."""
    text = "\n  ".join(first_lines(problems))
    raise InputError(f"{len(problems)} problems (--skip_bad_data leaves such rows out): {text}")


def choose_groups(groups, fraction, seed):
    """Those of `groups`, one for each pair, to hold out: in the order of a seeded hash of their
    names, until they have `fraction` of all pairs; one that would make it twice that is passed
    over."""
    wanted = fraction * len(groups)
    sizes = Counter(groups)

    def key(group):
        return hashlib.sha256(f"{seed} {group}".encode()).digest()

    held = set()
    taken = 0
    for group in sorted(sizes, key=key):
        few = taken < wanted - 1e-6 and taken + sizes[group] <= 2 * wanted + 1
        if few and len(held) < len(sizes) - 1:
            held.add(group)
            taken += sizes[group]
    return held or {min(sorted(sizes, key=key), key=sizes.get)}


def split_pairs(args, pairs, trained):
    """Ids of the pairs to train on, and of those to validate on. trained: how many come from
    --train_data. (rank 0)"""
    ids = np.arange(len(pairs))
    groups = [pair.group for pair in pairs.pairs]
    if args.val_data:
        both = set(groups[:trained]) & set(groups[trained:])
        if both:
            text = "structures or clusters are in --val_data and in the training data, too"
            logging.warning(f"{len(both)} {text}")
        return ids[:trained], ids[trained:]

    others = groups
    if len(set(groups)) == 1:
        text = "all pairs are on one structure or cluster: sequences are held out instead"
        logging.warning(f"{text}; the validation tells nothing about other structures")
        others = [pair.letters[0].tobytes() for pair in pairs.pairs]
        groups = [pair.letters[1].tobytes() for pair in pairs.pairs]
        if len(set(groups)) == 1:
            groups = others
    if len(set(groups)) == 1:
        raise InputError("all pairs are the same: nothing can be held out; give --val_data")

    held = choose_groups(groups, args.val_fraction, args.seed)
    valid = np.array([group in held for group in groups])
    train = np.array([group not in held for group in others]) & ~valid
    left_out = len(pairs) - train.sum() - valid.sum()
    if left_out > 0:
        text = "pairs have a held-out sequence on their other side and are left out"
        logging.warning(f"{left_out} {text}")
    if not train.any():
        raise InputError("no pair is left to train on; give --val_data")
    return ids[train], ids[valid]


def hash_pairs(pairs, train_ids, valid_ids):
    """Of all that training depends on."""
    digest = hashlib.sha256()
    for backbone in pairs.backbones:
        digest.update(backbone.atoms.numpy().tobytes() + backbone.place.numpy().tobytes())
    for pair in pairs.pairs:
        digest.update(f"{pair.backbone} {pair.group}".encode())
        digest.update(pair.letters.tobytes() + pair.designed.tobytes())
    digest.update(train_ids.tobytes() + b"|" + valid_ids.tobytes())
    return digest.hexdigest()[:16]


# --------------------------------------------------------------------------------------------------
# Model

WIDTH = 128
SCALE = 30.0  # what a sum of messages is divided by
RADIAL = 16  # Gaussians for a distance
# Distances between atoms of a residue and atoms of its neighbour; N, CA, C, O, CB are 0 to 4.
DISTANCES = """11 00 22 33 44 10 12 13 14 02 03 04 42 43 32 01 21 31 41 20 30 40 24 34 23""".split()


class Layer(nn.Module):
    """A layer of messages from neighbours, each made of `inputs` vectors. The names are those of
    the released weights. edges: it also updates the edges."""

    def __init__(self, inputs, edges):
        super().__init__()
        self.W1 = nn.Linear(inputs * WIDTH, WIDTH)
        self.W2 = nn.Linear(WIDTH, WIDTH)
        self.W3 = nn.Linear(WIDTH, WIDTH)
        self.norm1 = nn.LayerNorm(WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.dense = nn.ModuleDict({"W_in": wide, "W_out": nn.Linear(4 * WIDTH, WIDTH)})
        if edges:
            self.W11 = nn.Linear(inputs * WIDTH, WIDTH)
            self.W12 = nn.Linear(WIDTH, WIDTH)
            self.W13 = nn.Linear(WIDTH, WIDTH)
            self.norm3 = nn.LayerNorm(WIDTH)

    def forward(self, h, x, near):
        """Nodes h (..., D) after the messages of their neighbours: x (..., K, D) is what W1 made,
        near (..., K) is 1 where there is a neighbour, else 0."""
        near = near.to(x.dtype)
        # W3 is linear, and so it is applied to the sum instead of each message
        total = (near.unsqueeze(-2) @ F.gelu(self.W2(F.gelu(x)))).squeeze(-2)
        message = F.linear(total, self.W3.weight) + near.sum(-1, keepdim=True) * self.W3.bias
        h = self.norm1(h + message / SCALE)
        return self.norm2(h + self.dense["W_out"](F.gelu(self.dense["W_in"](h))))

    def update_edges(self, h, edges, rows):
        x = F.gelu(self.W12(F.gelu(join_linear(self.W11, h, edges, rows))))
        return self.norm3(edges + self.W13(x))


def join_linear(linear, h, edges, rows):
    """linear([h_i, edge_ij, h_j]) (N, K, D) of nodes h (N, D), None if they are zero, and edges
    (N, K, D); rows (N K,): the neighbours j. The nodes' parts are computed once per node, then
    fetched. (Sums are in place here: these are the largest tensors.)"""
    own, edge, other = linear.weight.split(WIDTH, dim=1)
    if h is None:
        return F.linear(edges, edge, linear.bias)
    x = F.linear(edges, edge)
    x += F.linear(h, own, linear.bias).unsqueeze(1)
    x += F.linear(h, other).index_select(0, rows).view(edges.shape)
    return x


class ProteinMPNN(nn.Module):
    """Inverse folding: the released weights fit, and give what the official program computes
    without dropout and noise. Only a missing residue is nobody's neighbour here."""

    def __init__(self, neighbours=48, noise_level=0.0):
        super().__init__()
        self.neighbours = neighbours
        self.noise_level = noise_level  # of the coordinates that it was trained on, Angstrom
        self.dtype = torch.float32  # of matrix products, see choose_precision
        self.features = nn.ModuleDict()
        self.features["embeddings"] = nn.ModuleDict({"linear": nn.Linear(66, RADIAL)})
        inputs = RADIAL + len(DISTANCES) * RADIAL
        self.features["edge_embedding"] = nn.Linear(inputs, WIDTH, bias=False)
        self.features["norm_edges"] = nn.LayerNorm(WIDTH)
        self.W_e = nn.Linear(WIDTH, WIDTH)
        self.W_s = nn.Embedding(len(ALPHABET), WIDTH)
        self.encoder_layers = nn.ModuleList([Layer(3, edges=True) for _ in range(3)])
        self.decoder_layers = nn.ModuleList([Layer(4, edges=False) for _ in range(3)])
        self.W_out = nn.Linear(WIDTH, len(ALPHABET))

        own = torch.tensor([int(pair[0]) for pair in DISTANCES])
        other = torch.tensor([int(pair[1]) for pair in DISTANCES])
        self.register_buffer("own_atoms", own, persistent=False)
        self.register_buffer("other_atoms", other, persistent=False)
        self.register_buffer("centres", torch.linspace(2.0, 22.0, RADIAL), persistent=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.xavier_uniform_(parameter)

    def autocast(self):
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.centres.device.type, self.dtype)

    def first_edges(self, structures, rows):
        """Edges (N, K, D) from distances between atoms, each as RADIAL Gaussians, and from the
        residues' places in the chain. rows (N K,): the neighbours."""
        residues, k = structures.neighbours.shape
        own = self.own_atoms
        other = self.other_atoms
        atoms = structures.atoms
        there = atoms.index_select(1, other).index_select(0, rows).view(residues, k, len(other), 3)
        x = atoms.index_select(1, own).unsqueeze(1) - there
        x = x.square_().sum(-1).add_(1e-6).sqrt_().view(-1, len(own), 1) - self.centres
        # the clamp keeps out denormal numbers, with which a CPU's matrix product takes 200 times as
        # long
        x = x.mul_(RADIAL / 20.0).square_().clamp_(max=50.0).neg_().exp_().view(len(rows), -1)

        number, chain = structures.place
        apart = number.unsqueeze(1) - number.index_select(0, rows).view(residues, k)
        same = chain.unsqueeze(1) == chain.index_select(0, rows).view(residues, k)
        offset = torch.where(same, (apart + 32).clamp(0, 64), 65)
        position = self.features["embeddings"]["linear"]
        weight = self.features["edge_embedding"].weight
        table = F.linear(position.weight.T + position.bias, weight[:, :RADIAL])
        x = torch.addmm(F.embedding(offset.flatten(), table), x, weight[:, RADIAL:].T)
        return self.W_e(self.features["norm_edges"](x)).view(residues, k, WIDTH)

    def encode(self, structures):
        """Nodes (N, D) and edges (N, K, D) of the structures, whatever their sequences."""
        near = structures.neighbours >= 0
        rows = structures.neighbours.clamp(min=0).flatten()
        with self.autocast():
            edges = self.first_edges(structures, rows)
            h = None
            for layer in self.encoder_layers:
                x = join_linear(layer.W1, h, edges, rows)
                h = layer(0.0 if h is None else h, x, near)
                edges = layer.update_edges(h, edges, rows)
        return h, edges

    def forward(self, structures, letters, row, rank, encoded=None):
        """Logits (C, M, 21) float32 of letters (C, M): C versions of sequences with M residues, of
        which residue m is row[m] of the structures. A residue sees the letters of those neighbours
        with a lower rank (M,). encoded: what `encode` has made of the structures."""
        nodes, edges = encoded or self.encode(structures)
        versions, residues = letters.shape
        neighbours = structures.neighbours.index_select(0, row)
        near = neighbours >= 0
        neighbours = neighbours.clamp(min=0)
        # sequences lie as their structures do: the same step leads from a residue to a neighbour
        step = torch.arange(residues, device=row.device) - row
        in_sequence = torch.where(near, neighbours + step[:, None], 0)
        seen = rank.index_select(0, in_sequence.flatten()).view(near.shape) < rank[:, None]
        # rows of a table with what neighbours of each version say, and then those without a letter
        version = torch.arange(versions, device=row.device)[:, None, None] * residues
        rows = torch.where(seen, in_sequence + version, versions * residues + neighbours).flatten()

        # from here on the versions lie one after the other
        row = row.repeat(versions)
        near = near.repeat(versions, 1)
        with self.autocast():
            h = nodes.index_select(0, row)
            embedded = self.W_s(letters.flatten())
            for layer in self.decoder_layers:
                own, edge, letter, other = layer.W1.weight.split(WIDTH, dim=1)
                with_letter = F.linear(embedded, letter) + F.linear(h, other)
                table = torch.cat([with_letter, F.linear(nodes, other)])
                x = F.linear(edges, edge).index_select(0, row)
                x += table.index_select(0, rows).view(x.shape)
                x += F.linear(h, own, layer.W1.bias).unsqueeze(1)
                h = layer(h, x, near)
        # in fp32: bf16 would round the logits, too
        return self.W_out(h.float()).view(versions, residues, -1)


def read_model(path):
    """The network in a file of ProteinMPNN (vanilla, soluble), fp32, on the CPU. Raises
    InputError."""
    expected = "expected num_edges, model_state_dict of ProteinMPNN (vanilla or soluble weights, "
    expected += "not those of CA-only, LigandMPNN or membrane models)"
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
        weights = {}
        for name, value in found["model_state_dict"].items():
            weights[re.sub(r"^(module\.|_orig_mod\.)+", "", name)] = value.float()

        model = ProteinMPNN(int(found["num_edges"]), float(found.get("noise_level") or 0.0))
        model.load_state_dict(weights)
    except Exception as error:  # torch raises six kinds
        reason = " ".join(str(error).split())[:500]
        raise InputError(f"{path}: {reason} ({type(error).__name__}); {expected}") from None
    return model


def official(model):
    """The network as ProteinMPNN's own tools load it, and read_model."""
    weights = {name: value.detach().cpu() for name, value in model.state_dict().items()}
    content = {"num_edges": model.neighbours, "noise_level": model.noise_level}
    return {**content, "model_state_dict": weights}


# --------------------------------------------------------------------------------------------------
# Loss


def log_probabilities(logits, letters):
    """log p (C, M) of letters (C, M), from logits (C, M, 21)."""
    return F.log_softmax(logits, dim=-1).gather(-1, letters.unsqueeze(-1)).squeeze(-1)


def sum_by_pair(values, batch):
    """(C, M) -> (C, P)"""
    sums = values.new_zeros(values.shape[0], len(batch.ids))
    return sums.index_add(1, batch.residues[4], values)


def sequence_scores(logits, batch, temperature):
    """log p of both sequences at a temperature, summed over the designed residues: (2, C, P), two
    numbers that belong together. No floor: the gradient reaches unlikely letters, too.

    At temperature 0.1 a sequence's log-probability is thousands of nats, and what is learned is a
    thousandth of one. float32 cannot hold that, and some devices have no float64. So the whole
    256ths, whose sum is exact, are summed apart from the rest, which is small."""
    logp = log_probabilities(logits / temperature, batch.residues[:2]) * batch.designed
    whole = (logp.detach() * 256).round() / 256
    return torch.stack([sum_by_pair(whole, batch), sum_by_pair(logp - whole, batch)])


def preference_loss(args, ratio, counts):
    """Loss (P,) of pairs. ratio (P,): log-ratio of the preferred sequence to the reference, less
    that of the unpreferred one. counts (P,): designed residues.

    sigmoid: -log s(beta ratio), with label smoothing e both signs, weighted 1 - e and e (Rafailov
    et al. 2023, Mitchell 2023). ipo: (ratio / counts - 1 / (2 beta))^2 (Azar et al. 2023)."""
    z = args.beta * ratio
    if args.loss_type == "ipo":
        return (z / counts - 0.5).square() / args.beta**2
    smoothing = args.label_smoothing
    return -(1 - smoothing) * F.logsigmoid(z) - smoothing * F.logsigmoid(-z)


def cross_entropy(logits, batch):
    """(P,) of the preferred sequence, nats per designed residue."""
    logp = log_probabilities(logits[:1], batch.residues[:1]) * batch.designed
    return -sum_by_pair(logp, batch)[0] / batch.counts


def pair_loss(args, logits, batch, reference):
    """What a micro-batch adds to the loss of the global batch; and (3,) to its logged preference
    loss, accuracy and margin. reference (2, 2, P): scores of both sequences.

    Why not the mean over the micro-batch? Ranks may have different numbers of pairs, and a mean of
    such means is not the mean. So each pair is divided by the pairs of the whole global batch, and
    the shares are summed: over micro-batches by backward(), over ranks by DDP, which takes their
    mean, times the number of ranks (see `train`)."""
    scores = sequence_scores(logits, batch, args.temperature)
    ratios = (scores - reference).sum(0)  # the large parts first, without rounding
    ratio = ratios[0] - ratios[1]
    losses = preference_loss(args, ratio, batch.counts)
    objective = losses
    if args.sft_weight > 0:
        objective = losses + args.sft_weight * cross_entropy(logits, batch)
    shown = torch.stack([losses.sum(), (ratio > 0).sum(), args.beta * ratio.sum()])
    return objective.sum() * batch.share, shown.detach() * batch.share


def warm_start_loss(logits, batch):
    """The same of the warm start: cross entropy of the preferred sequence."""
    loss = cross_entropy(logits, batch).sum() * batch.share
    zero = torch.zeros_like(loss)
    return loss, torch.stack([loss.detach(), zero, zero])


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

SCORES = 4  # the first columns of a table: sequence_scores of both sequences


class Stopped(Exception):
    """The ranks agreed to stop within an evaluation: the last checkpoint was made before it."""


class Run(NamedTuple):
    """What training and evaluation share."""

    args: argparse.Namespace
    device: torch.device
    data: Pairs
    train_ids: np.ndarray
    valid_ids: np.ndarray
    model: ProteinMPNN
    guard: StepGuard
    log: RunLog


@torch.no_grad()
def score(run, ids, orders):
    """A table (len(orders), len(ids), SCORES + 3) float32, on the device: table_rows of the pairs
    `ids` in each of the decoding orders. Each pair is scored by one rank, whatever the number of
    ranks. Raises Stopped. (all ranks)"""
    size = run.args.eval_batch_size
    # pairs of one backbone are next to each other: a batch encodes it once, and for all orders
    places = np.argsort(run.data.backbones_of(ids), kind="stable")
    table = torch.zeros(len(orders), len(ids), SCORES + 3, device=run.device)
    run.model.eval()
    for first in range(0, len(ids), size * dist.get_world_size()):
        if run.guard.agree():  # here and not once at the end: this may take long
            raise Stopped
        start = first + size * dist.get_rank()
        part = places[start : start + size]
        if len(part) == 0:
            continue

        rows = torch.from_numpy(part).to(run.device)
        encoded = None
        for number, order in enumerate(orders):
            batch = run.data[ids[part], ids, order].to(run.device)
            if encoded is None:
                encoded = run.model.encode(batch.structures)
            inputs = (batch.structures, batch.residues[:2], *batch.residues[2:4])
            logits = run.model(*inputs, encoded)
            table[number, rows] = table_rows(logits, batch, run.args.temperature)

    run.model.train()
    dist.all_reduce(table)  # each row is zero on all ranks but one
    return table


def table_rows(logits, batch, temperature):
    """(P, SCORES + 3) of a batch: sequence_scores; cross entropy, hits and entropy of the preferred
    sequence, summed over its designed residues."""
    scores = sequence_scores(logits, batch, temperature)
    letters = batch.residues[0]
    logp = F.log_softmax(logits[0], dim=-1)
    own = logp.gather(-1, letters.unsqueeze(-1)).squeeze(-1)
    hits = logp.argmax(-1) == letters
    entropy = -(logp.exp() * logp).sum(-1)
    sums = sum_by_pair(torch.stack([-own, hits, entropy]) * batch.designed, batch)
    return torch.cat([scores.flatten(0, 1), sums]).T


def summarise(run, table, reference):
    """Metrics of the validation pairs, from the table (N, SCORES + 3) of the network and the
    reference's scores (N, SCORES), float64 on the host. Means are over pairs, or over designed
    residues."""
    own = table[:, :SCORES].view(-1, 2, 2).sum(1)
    ratios = (table[:, :SCORES] - reference).view(-1, 2, 2).sum(1)
    ratio = ratios[:, 0] - ratios[:, 1]
    counts = [np.count_nonzero(run.data.pairs[number].designed) for number in run.valid_ids]
    entropy, hits, spread = (table[:, SCORES:].sum(0) / sum(counts)).tolist()
    beta = run.args.beta

    metrics = {
        "loss": preference_loss(run.args, ratio, torch.tensor(counts)).mean(),
        "rewards/accuracies": (ratio > 0).double().mean(),
        "rewards/margins": beta * ratio.mean(),
        "rewards/chosen": beta * ratios[:, 0].mean(),
        "rewards/rejected": beta * ratios[:, 1].mean(),
        "likelihood_accuracy": (own[:, 0] > own[:, 1]).double().mean(),
        "log_ratio": ratios[:, 0].sum() / sum(counts),
        "recovery": hits,
        "perplexity": math.exp(min(entropy, 700)),
        "entropy": spread,
    }
    return {name: float(value) for name, value in metrics.items()}


def evaluate(run, reference):
    """Metrics of the validation pairs. reference (N, SCORES): of all pairs in the order of
    evaluations. Raises Stopped. (all ranks)"""
    table = score(run, run.valid_ids, [EVALUATION])[0].cpu().double()
    own = reference[torch.from_numpy(run.valid_ids).to(run.device)].cpu().double()
    # by rank 0 for all, who decide by it: another processor might round differently
    return on_rank0(summarise, run, table, own)


def as_text(metrics):
    return " ".join(f"{name}={value:.4f}" for name, value in metrics.items())


# --------------------------------------------------------------------------------------------------
# Train


class PairSampler(GlobalBatchSampler):
    """Says also in which decoding order an epoch takes its pairs, which workers need to know."""

    order = 0

    def __iter__(self):
        for ids, whole in super().__iter__():
            yield ids, whole, self.order


def warm_start_factor(step, steps):
    """What the warm start's peak rate is multiplied by: a rise of at most 50 steps, then half a
    cosine."""
    rise = min(50, steps // 10)
    if step < rise:
        return (step + 1) / (rise + 1)
    return 0.5 + 0.5 * math.cos(math.pi * (step - rise) / max(1, steps - rise))


def make_optimizer(args, model):
    decay = [p for p in model.parameters() if p.ndim > 1]
    no_decay = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": decay, "weight_decay": args.weight_decay},
        {"params": no_decay, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=args.lr, fused=True)


def score_reference(run):
    """(num_orders + 1, N, SCORES) of the network as it stands, which from now on is the reference:
    of the training pairs in each decoding order, and last of the validation pairs in the order of
    evaluations. Raises Stopped. (all ranks)"""
    logging.info("Scoring all pairs with the reference ...")
    orders = range(run.args.num_orders)
    reference = torch.zeros(len(orders) + 1, len(run.data), SCORES, device=run.device)
    train_rows = torch.from_numpy(run.train_ids).to(run.device)
    valid_rows = torch.from_numpy(run.valid_ids).to(run.device)
    reference[:-1, train_rows] = score(run, run.train_ids, orders)[..., :SCORES]
    reference[-1, valid_rows] = score(run, run.valid_ids, [EVALUATION])[0, :, :SCORES]
    return reference


def check_start(run, found):
    """The first loss of the preferences must be that of equal networks. Rounding hides that where
    matrix products are not IEEE fp32. Raises RunError."""
    args = run.args
    expected = 1 / (2 * args.beta) ** 2 if args.loss_type == "ipo" else math.log(2)
    text = f"the first loss is {found:.6f}, that of equal networks is {expected:.6f}"

    precision = torch.get_float32_matmul_precision()
    if run.model.dtype != torch.float32 or precision != "highest":
        hint = "rounding may be larger than what is learned: compare a run with --precision fp32"
        logging.warning(f"{text}; --precision {args.precision}: {hint}")
    elif not abs(found - expected) <= 1e-4 * max(1.0, expected):
        hint = "network and reference differ before training (weights, decoding order, hardware?)"
        raise RunError(f"{text}: {hint}")
    else:
        logging.info(f"{text}, as it must be")


def validate(run, reference, loop, train_loss):
    """Metrics of the validation pairs, logged. Raises Stopped. (all ranks)"""
    metrics = evaluate(run, reference[-1])
    epoch = loop["validated"] + 1
    logging.info(f"Epoch {epoch} Summary:")
    logging.info(f"  Train Loss: {train_loss:.4f}")
    logging.info(f"  Val Loss:   {metrics['loss']:.4f}")
    row = {f"val/{name}": value for name, value in metrics.items()}
    run.log.write({"step": loop["step"], **row})
    if not math.isfinite(metrics["loss"]):
        raise RunError(f"the validation loss of epoch {epoch} is {metrics['loss']}: lower --lr")
    return metrics


def train(run, state, loop):
    """loop: where training stands, all that it must know to go on beside the weights. Raises
    Stopped. (all ranks)"""
    args = run.args
    device = run.device
    data = run.data
    model = run.model
    guard = run.guard
    log = run.log
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    sampler = PairSampler(run.train_ids, args, state, data.cost())
    total = sampler.global_batch
    logging.info(f"Batch size per GPU: {args.batch_size}, Total batch size: {total}")
    warm_steps = args.sft_epochs * sampler.steps
    steps = warm_steps + args.num_epochs * sampler.steps
    # Even without workers this keeps a GPU busy, since nothing in a step waits for the GPU. While
    # it computes a step the host prepares the next batch and queues its copy, which does not wait
    # either: the memory is pinned. If preparing takes longer (data_wait is high): --num_workers.
    loader = DataLoader(
        data,
        batch_size=None,  # our sampler makes whole batches
        sampler=sampler,
        num_workers=args.num_workers,
        persistent_workers=args.num_workers > 0,
        pin_memory=device.type != "cpu",
        worker_init_fn=ignore_signals,
    )
    optimizer = make_optimizer(args, model)
    scaler = torch.amp.GradScaler(device.type, enabled=model.dtype == torch.float16)
    ddp_model = wrap_ddp(model, args, device)
    reference = None  # scores of all pairs, once the warm start is over
    epoch_sums = torch.zeros(2, device=device)  # this rank's share: loss, steps
    if state:
        restore(state, model, optimizer, scaler)
        if state["reference"] is not None:
            reference = state["reference"].to(device)
        if rank == 0:
            epoch_sums += torch.tensor(state["epoch_sums"], device=device)
        if loop["validated"] >= args.num_epochs:
            logging.info("nothing is left to train; the options are those of then")
            log.args = argparse.Namespace(**state["args"])

    def save(name):
        content = {"script": SCRIPT, "format": FORMAT, "data_hash": data.hash, "args": vars(args)}
        content.update(loop, wandb_id=log.wandb_id, log_size=log.size(), global_batch=total)
        content["base_hash"] = data.base_hash
        content.update(epoch_sums=sum_over_ranks(epoch_sums), reference=reference)
        content.update(neighbours=model.neighbours, noise_level=model.noise_level)
        content["model"] = model.state_dict()
        content["optimizer"] = optimizer.state_dict()
        content["scaler"] = scaler.state_dict()
        on_rank0(save_checkpoint, Path(args.output_dir), name, content)

    def save_official(name):
        content = {**official(model), "step": loop["step"]}
        on_rank0(save_checkpoint, Path(args.output_dir), name, content)

    logging.info("Starting distributed training...")
    bar = tqdm(total=steps, initial=loop["step"], disable=rank > 0 or not sys.stderr.isatty())
    batches = None
    began = time.monotonic()
    since = loop["step"]
    data_wait = 0.0
    # loss, accuracy, margin, gradient norm, steps; none of skipped steps
    sums = torch.zeros(5, device=device)
    while not guard.reason:
        step = loop["step"]
        epoch, position = divmod(step, sampler.steps)
        phase = 1 if step < warm_steps else 2

        # after the warm start, or at once: the network as it stands becomes the reference
        if phase == 2 and reference is None:
            reference = score_reference(run)
            loop["before"] = evaluate(run, reference[-1])
            logging.info(f"before training: {as_text(loop['before'])}")
            optimizer.state.clear()  # the momenta of the warm start point elsewhere
            save_official("reference_model.pt")
            save("latest.pt")
            began = time.monotonic()

        # after every epoch of preferences: validate; all ranks have the same metrics, and so agree
        if epoch - args.sft_epochs > loop["validated"]:
            paused = time.monotonic()
            loss_sum, made = sum_over_ranks(epoch_sums)
            metrics = validate(run, reference, loop, loss_sum / max(1, made))
            loop["validated"] = epoch - args.sft_epochs
            epoch_sums.zero_()
            if loop["best"] is None or metrics["loss"] < loop["best"]["value"]:
                best = {"metric": "loss", "value": metrics["loss"], "better": "lower"}
                loop["best"] = {**best, "step": step, "metrics": metrics}
                save("best.pt")
                save_official("best_model.pt")
            save_official("latest_model.pt")
            if step >= steps:
                save("latest.pt")  # the same command, given again, then knows that all is done
            began += time.monotonic() - paused
        if step >= steps:
            break

        # the decoding order of this epoch: the reference was scored in --num_orders of them
        order = (epoch - args.sft_epochs) % args.num_orders
        if phase == 1:
            order = EVALUATION + 1 + epoch  # the warm start needs no reference: any other one
        if position == 0 or batches is None:
            if phase == 1:
                logging.info(f"Warm start, epoch {epoch + 1}/{args.sft_epochs}")
            else:
                logging.info(f"Epoch {epoch - args.sft_epochs + 1}/{args.num_epochs}")
            sampler.order = order
            sampler.set_epoch(epoch, start=position)
            batches = iter(loader)
        if phase == 1:
            lr = args.sft_lr * warm_start_factor(step, warm_steps)
        else:
            lr = args.lr * min(1.0, (step - warm_steps + 1) / (args.warmup_steps + 1))
        for group in optimizer.param_groups:
            group["lr"] = lr

        # forward and backward, micro-batch by micro-batch
        step_shown = torch.zeros(3, device=device)
        for micro in range(1, sampler.accumulation + 1):
            asked = time.monotonic()
            batch = next(batches).to(device)
            data_wait += time.monotonic() - asked
            # gradients are added up over the ranks in the last micro-batch only
            sync = contextlib.nullcontext()
            if world_size > 1 and micro < sampler.accumulation:
                sync = ddp_model.no_sync()
            letters = batch.residues[:phase]  # the warm start reads the preferred sequence alone
            with sync:
                logits = ddp_model(batch.structures, letters, *batch.residues[2:4])
                if phase == 1:
                    loss, shown = warm_start_loss(logits, batch)
                else:
                    own = reference[order].index_select(0, batch.ids).T.reshape(2, 2, -1)
                    loss, shown = pair_loss(args, logits, batch, own)
                scaler.scale(loss * world_size).backward()  # DDP takes the mean, we want the sum
            step_shown += shown
        if step == warm_steps:
            check_start(run, sum_over_ranks(step_shown)[0])

        # update, unless the gradient is not finite; then the step counts in no mean, either
        norm = guard.update(optimizer, scaler)
        values = torch.cat([step_shown, torch.stack([norm, torch.ones_like(norm)])])
        values = torch.where(norm.isfinite(), values, 0.0)
        sums += values
        if phase == 2:
            epoch_sums += torch.stack([values[0], values[4] / world_size])
        step += 1
        loop["step"] = step
        bar.update()

        # once in a while: log. Here the host waits for the GPU. (all ranks)
        if step % args.log_every == 0 or step in (warm_steps, steps):
            loss, accuracy, margin, norm, good = sum_over_ranks(sums)
            seconds = time.monotonic() - began
            made = step - since
            row = {"step": step, "phase": phase, "epoch": epoch, "lr": lr}
            row["skipped"] = made - good / world_size
            if good > 0:
                row["loss"] = loss * world_size / good  # each rank has a share of it ...
                if phase == 2:
                    row["rewards/accuracies"] = accuracy * world_size / good
                    row["rewards/margins"] = margin * world_size / good
                row["grad_norm"] = norm / good  # ... and all of the norm
            row["samples_per_s"] = made * total / seconds
            row["data_wait"] = data_wait / seconds
            log.write(row)
            began = time.monotonic()
            since = step
            data_wait = 0.0
            sums.zero_()

        # save; also before an evaluation, which may be long and may be interrupted (all ranks)
        reason = guard.agree()
        if reason or step % args.save_every == 0 or step % sampler.steps == 0:
            save("latest.pt")
    bar.close()


# --------------------------------------------------------------------------------------------------
# Main

# what the reference's scores, or the best epoch, depend on
KEPT = "temperature beta loss_type label_smoothing num_orders sft_epochs precision".split()


def load_network(args):
    """The network to start from. (all ranks; DDP then gives all of them the weights of rank 0)"""
    if args.base_model_name == "random":
        torch.manual_seed(args.seed)
        return ProteinMPNN()
    path = Path(args.base_model_dir) / f"{args.base_model_name}.pt"
    if not path.exists():
        text = "the weights are published at https://github.com/dauparas/ProteinMPNN"
        hint = "give --base_model_dir; without weights: --base_model_name random --sft_epochs 2"
        raise InputError(f"{path}: no such file; {text}; {hint}")
    return read_model(path)


def hash_weights(model):
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()[:16]


def write_split(folder, data, train_ids, valid_ids):
    """split.json, and bad_rows.txt if rows were left out. (rank 0)"""
    names = np.array([pair.name for pair in data.pairs])
    split = {"train": names[train_ids].tolist(), "valid": names[valid_ids].tolist()}
    try:
        (folder / "split.json").write_text(json.dumps(split, indent=1))
        if data.problems:
            (folder / "bad_rows.txt").write_text("\n".join(data.problems) + "\n")
    except OSError as error:
        logging.warning(f"no split.json or no bad_rows.txt: {error}")


def report(loop):
    """The last word: the best epoch beside the network before."""
    before = loop["before"]
    best = loop["best"]
    for who, metrics in {"before": before, "after": best["metrics"]}.items():
        logging.info(f"validation, {who:7} {as_text(metrics)}")
    if not best["value"] < before["loss"]:
        text = f"val loss {best['value']:.4f}, before {before['loss']:.4f}"
        hint = "look at --lr, the number of pairs, and whether the pairs say the same"
        logging.warning(f"training did not make the network better ({text}): {hint}")


def main(args):
    device = setup_ddp(args)
    rank, world_size, local_rank = find_ranks() or (0, 1, 0)
    logging.info(f"Initialized DDP: rank={rank}, world_size={world_size}, local_rank={local_rank}")
    logging.info(f"Using device: {device}")
    model = load_network(args)
    number = sum(p.numel() for p in model.parameters())
    noise = f"noise {model.noise_level:g} Å, {model.neighbours} neighbours"
    logging.info(f"{args.base_model_name}: {number:,} parameters, {noise}")
    data, trained = load_pairs(args, model.neighbours)
    train_ids, valid_ids = on_rank0(split_pairs, args, data, trained)
    data.hash = hash_pairs(data, train_ids, valid_ids)
    data.base_hash = hash_weights(model)
    logging.info(f"Loaded {len(train_ids)} training and {len(valid_ids)} validation pairs")
    state = open_run(args, data.hash)
    if state:
        for name in KEPT:
            if state["args"][name] != getattr(args, name):
                raise InputError(f"--{name}: this run was started with {state['args'][name]}")
        if state["base_hash"] != data.base_hash:
            raise InputError("this run was started from other weights: --fresh starts anew")
    on_rank0(write_split, Path(args.output_dir), data, train_ids, valid_ids)

    model.dtype = choose_precision(args, device)
    guard = StepGuard(args, device)
    log = RunLog(args, state)
    model.to(device)
    run = Run(args, device, data, train_ids, valid_ids, model, guard, log)
    loop = {
        "step": 0,
        "validated": 0,  # epochs of preferences
        "best": None,
        "before": None,  # metrics before the preferences
    }
    if state:
        loop = {name: state[name] for name in loop}
    with contextlib.suppress(Stopped):
        train(run, state, loop)

    summary = {}
    if not guard.reason:
        report(loop)
        best = {name: value for name, value in loop["best"].items() if name != "metrics"}
        summary = {"best": best, "validation": loop["best"]["metrics"]}
        summary["baselines"] = {"before": loop["before"]}
    status = f"stopped by {guard.reason}" if guard.reason else "finished"
    log.close(status=status, steps=loop["step"], **summary)
    if not guard.reason:
        logging.info("Training and evaluation completed successfully!")
    return exit_status(guard.reason)


if __name__ == "__main__":
    launch(parse_args, main)
