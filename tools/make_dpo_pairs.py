"""Make preference pairs for run_dpo_ddp.py of scored sequences.

    python tools/make_dpo_pairs.py designs_*.csv --score charge --out pairs.json
    python tools/make_dpo_pairs.py ddg.csv --lower_is_better --score_gap 0.5 --out pairs.json

CSV, such as tools/design_dpo.py writes: columns pdb_file, sequence, and score or another one that
--score names; without a score (empty, NA, nan) a line is left out. --score charge is K + R - D - E,
if no column has this name. Columns named as fields of the pairs (see class Row in run_dpo_ddp.py;
not weight and margin) are fields, lists in JSON's form; lines that agree in all of them belong
together, in whatever file.

Of a backbone's sequences the best and the worst make a pair, then the second best and the second
worst, and so on, each sequence once. A sequence that is there several times is taken once, with the
mean of its scores. Every pair is checked as the training checks it, but for its length and cluster,
and written as a line. Scores of other columns, or signs, need a call each, with --out in the same
folder, and then: cat a.json b.json > pairs.json
"""

import argparse
import collections
import dataclasses
import functools
import json
import math
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np
import pandas
import torch

import run_dpo_ddp as script
from run_dpo_ddp import HelpFormatter, InputError, Parser

OF_PAIRS = ["preferred_seq", "unpreferred_seq", "weight", "margin"]
FIELDS = [field.name for field in dataclasses.fields(script.Row) if field.name not in OF_PAIRS]
LISTS = ["design_chains", "fixed_chains", "mutable_positions", "mutable_ranges"]


def parse_args():
    parser = Parser(description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("data", nargs="+", help="CSV files")
    add("--out", default="pairs.json", help="file to write")
    add("--score", default="score", help="the column that has the scores; or charge")
    add("--lower_is_better", action="store_true", help="the lower score is preferred")
    add("--score_gap", type=script.number(0), default=0.0, help="least difference in a pair")
    add("--pairs_per_backbone", type=script.COUNT, help="pairs at most; None: all")
    return parser.parse_args()


def call(run, parse_args):
    """run(parse_args()); what is wrong with the input becomes one line, and status 2."""
    try:
        run(parse_args())
    except (InputError, OSError, ValueError) as error:  # ValueError: of structures, and of pandas
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        sys.exit(2)


def check_new(path):
    """Raises InputError unless a file can be made there."""
    if Path(path).exists():
        raise InputError(f"--out {path} exists: expected a new file")
    if not Path(path).parent.is_dir():
        raise InputError(f"--out {path}: there is no such folder")


def net_charge(sequence):
    """At pH 7, without the ends: K and R have one, D and E one less."""
    return sum("KR".count(letter) - "DE".count(letter) for letter in sequence.upper())


@functools.cache
def read_structure(path):
    """The chains of a file, read once. Prints what is odd about them. Raises ValueError."""
    notes = collections.defaultdict(list)
    chains, _ = script.read_structure(path, notes)
    for text, found in notes.items():
        print(f"{len(found)} {text}, such as {found[0]}")
    return chains


def read_table(path, score=None):
    """The lines of a CSV file, all text, each with a name that says where it stands; and the scores
    of these lines, if a column is named: NaN where there is none. Raises InputError."""
    options = {"keep_default_na": False, "skip_blank_lines": False, "encoding": "utf-8-sig"}
    table = pandas.read_csv(path, dtype=str, **options)
    table = table.fillna("")  # at the end of lines that are too short
    table.index = [f"{path}: line {line}" for line in range(2, len(table) + 2)]
    table = table[(table != "").any(axis=1)].copy()
    needed = ["pdb_file", "sequence"] + ([] if score in (None, "charge") else [score])
    if not set(needed) <= set(table.columns):
        expected = f"expected {', '.join(needed)}, separated by commas"
        raise InputError(f"{path}: found the columns {', '.join(table.columns)}; {expected}")
    table["sequence"] = table["sequence"].str.upper()
    unused = set(table.columns) - {*FIELDS, *needed, score}
    if unused:
        print(f"{path}: columns that are not used: {', '.join(sorted(unused))}")
    if not score:
        return table, None

    if score not in table:  # charge
        table[score] = table["sequence"].map(net_charge).astype(str)
    scores = pandas.to_numeric(table[score], errors="coerce")
    is_missing = table[score].str.strip().str.lower().isin(["", "na", "nan"])
    is_bad = ~np.isfinite(scores) & ~is_missing
    if is_bad.any():
        found = f"{score} is {table[score][is_bad.idxmax()]!r}"
        raise InputError(f"{is_bad.idxmax()}: {found}; expected a finite number, NA or nothing")
    if is_missing.any():
        print(f"{is_missing.sum():,} lines have no {score}, such as {is_missing.idxmax()}")
    return table, scores


class Backbone:
    """The chains that the fields of a Row name, those to design first: L residues, of which the
    network sees the N that have all atoms. Raises TypeError and ValueError."""

    def __init__(self, fields):
        row = script.Row(**fields, preferred_seq="", unpreferred_seq="")
        chains = read_structure(row.pdb_file)
        joined, self.chain_index, self.design = script.join_chains(row, chains)
        unseen = chains.keys() - {*self.design, *row.fixed_chains}
        if unseen:
            print(f"{row.pdb_file}: chain {' '.join(sorted(unseen))} is not seen, see fixed_chains")
        self.length = np.count_nonzero(self.chain_index < len(self.design))
        self.native = joined.letters  # (L,) of the structure
        self.is_whole = np.isfinite(joined.coords).all(axis=(1, 2))  # (L,)
        mutable = script.choose_mutable(row, joined.labels[: self.length], len(self.native))
        self.is_designed = self.is_whole & mutable  # (L,)
        if not self.is_designed.any():
            raise ValueError("no residue to design has N, CA, C and O")
        self.designed = torch.from_numpy(self.is_designed[self.is_whole])  # (N,)
        arrays = joined.coords, joined.residue_index, self.chain_index
        self.arrays = [array[self.is_whole] for array in arrays]

    def features(self, model):
        """What a model wants of the backbone, where it is."""
        k = min(model.k_neighbors, len(self.designed))
        features = script.featurize(*self.arrays, k).items()
        device = model.W_out.weight.device
        return argparse.Namespace(**{name: tensor.to(device) for name, tensor in features})


def read_backbones(path, table):
    """[(fields, Backbone, lines, letters)] of a table: the fields of a Row, with pdb_file as an
    absolute path, the lines of the table that have them, and their letters (S, N). Raises
    InputError."""
    columns = [column for column in FIELDS if column in table]
    found = []
    for values, part in table.groupby(columns, sort=False):
        fields = {key: value for key, value in zip(columns, values, strict=True) if value}
        where = part.index[0]
        try:
            for key in fields.keys() & set(LISTS):
                if not fields[key].startswith("["):
                    raise ValueError(f'{key} is {fields[key]}; expected a list, such as ["A"]')
                fields[key] = json.loads(fields[key])
            structure = Path(path).parent.resolve() / fields.get("pdb_file", "")
            fields["pdb_file"] = os.path.abspath(structure)
            backbone = Backbone(fields)

            chains = {"chains": read_structure(fields["pdb_file"]), "design": backbone.design}
            letters = np.tile(backbone.native, (len(part), 1))
            for own, where in zip(letters, part.index, strict=True):
                text = part["sequence"][where]
                own[: backbone.length] = script.read_letters("sequence", text, **chains)
        except (TypeError, ValueError) as error:
            raise InputError(f"{where}: {error}") from None
        letters = torch.from_numpy(letters[:, backbone.is_whole]).long()
        found.append((fields, backbone, part, letters))
    return found


def choose_pairs(table, args):
    """[(the better line, the worse line)] by their names: the best with the worst, and so on."""
    scores = table["value"].sort_values(ascending=args.lower_is_better, kind="stable")
    pairs = []
    for rank in range(min(len(table) // 2, args.pairs_per_backbone or len(table))):
        gap = abs(scores.iloc[rank] - scores.iloc[-1 - rank])
        if gap > 0 and gap >= args.score_gap - 1e-9:  # else 0.9 - 0.4 would be less than 0.5
            pairs.append((scores.index[rank], scores.index[-1 - rank]))
    return pairs


def make_pair(fields, sequences, better, worse, args):
    """The fields of a pair of two lines. Raises InputError."""
    fields = {**fields, "preferred_seq": sequences[better], "unpreferred_seq": sequences[worse]}
    try:
        chains = read_structure(fields["pdb_file"])
        script.read_pair(script.Row(**fields), chains, max_length=math.inf)
    except (TypeError, ValueError) as error:
        raise InputError(f"{better}, and {worse}: {error}") from None
    fields["pdb_file"] = os.path.relpath(fields["pdb_file"], Path(args.out).resolve().parent)
    return fields


def run(args):
    check_new(args.out)
    made = []
    unpaired = {}  # names of lines
    repeated = []
    parts = collections.defaultdict(list)  # {fields: what each file has of them}
    for path in args.data:
        table, scores = read_table(path, args.score)
        table = table.assign(value=scores).dropna(subset="value")
        for fields, _, part, _ in read_backbones(path, table):
            parts[json.dumps(fields, sort_keys=True)].append(part)

    for fields, of_files in parts.items():
        part = pandas.concat(of_files)
        means = part.groupby("sequence")["value"].transform("mean")
        is_repeated = part.duplicated("sequence")
        repeated += list(part.index[is_repeated])
        part = part.assign(value=means)[~is_repeated]
        unpaired.update(dict.fromkeys(part.index))
        for better, worse in choose_pairs(part, args):
            made.append(make_pair(json.loads(fields), part["sequence"], better, worse, args))
            del unpaired[better], unpaired[worse]
    if not made:
        text = f"no two on a backbone have scores that differ, by {args.score_gap:g} or more"
        raise InputError(f"no pairs: of {len(unpaired)} sequences {text}")

    Path(args.out).write_text("".join(f"{json.dumps(pair)}\n" for pair in made))
    if repeated:
        text = "lines have a sequence again: it is taken once, with its mean score"
        print(f"{len(repeated):,} {text}, such as {repeated[0]}")
    count = f"{2 * len(made) + len(unpaired):,} sequences: {2 * len(made):,} in pairs"
    example = f", such as {next(iter(unpaired))}" if unpaired else ""
    print(f"{count}, {len(unpaired):,} in none{example}")
    print(f"{args.out}: {len(made):,} pairs")


if __name__ == "__main__":
    call(run, parse_args)
