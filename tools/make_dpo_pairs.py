"""Make preference pairs for run_dpo_ddp.py of scored sequences.

    python tools/make_dpo_pairs.py designs_*.csv --score charge --out pairs.json
    python tools/make_dpo_pairs.py ddg.csv --lower_is_better --score_gap 0.5 --out pairs.json

CSV, such as tools/design_dpo.py writes: columns pdb_file, sequence, and score or another one that
--score names. Columns named as fields of the pairs (see class Row in run_dpo_ddp.py) are fields,
lists in JSON's form; lines that agree in all of them are scored together. --score charge is
K + R - D - E, if no column has this name.

Of a backbone's sequences the best and the worst make a pair, then the second best and the second
worst, and so on. With --lower_is_better the other way round: a network that was trained on such a
control must do worse than chance on the true pairs. Every pair is checked as the training checks
it, but for its --max_length.
"""

import dataclasses
import functools
import json
import math
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import pandas
from score_dpo import call, check_new

import run_dpo_ddp as script
from run_dpo_ddp import InputError

FIELDS = [field.name for field in dataclasses.fields(script.Row) if not field.name.endswith("_seq")]
LISTS = ["design_chains", "fixed_chains", "mutable_positions", "mutable_ranges"]


def parse_args():
    parser = script.Parser(description=__doc__, formatter_class=script.HelpFormatter)
    add = parser.add_argument
    add("data", nargs="+", help="CSV files")
    add("--out", default="pairs.json", help="file to write")
    add("--score", default="score", help="the column that has the scores; or charge")
    add("--lower_is_better", action="store_true", help="the lower score is preferred")
    gap = script.number(0)
    add("--score_gap", type=gap, default=0.0, help="least difference of the scores of a pair")
    add("--pairs_per_backbone", type=script.COUNT, default=16, help="pairs at most")
    return parser.parse_args()


def net_charge(sequence):
    """At pH 7, without the ends: K and R have one, D and E one less."""
    sequence = sequence.upper()
    return sum(sequence.count(letter) for letter in "KR") - sum(map(sequence.count, "DE"))


def read_table(path, score):
    """The table of a CSV file, with a column "value" of numbers. Raises InputError."""
    table = pandas.read_csv(path, dtype=str, keep_default_na=False, encoding="utf-8-sig")
    if score == "charge" and score not in table and "sequence" in table:
        table[score] = table["sequence"].map(net_charge)
    for name in ("pdb_file", "sequence", score):
        if name not in table:
            raise InputError(f"{path}: no column {name}; it has {', '.join(table.columns)}")
    unused = set(table.columns) - {*FIELDS, "sequence", score}
    if unused:
        print(f"{path}: columns that are not used: {', '.join(sorted(unused))}")
    table["value"] = pandas.to_numeric(table[score], errors="coerce")
    for line, value in enumerate(table["value"], 2):
        if not math.isfinite(value):
            raise InputError(f"{path}: line {line}: {score} is no finite number")
    return table


def choose_pairs(table, args):
    """[(better sequence, worse sequence)]: the best with the worst, and so on, each once."""
    table = table.sort_values("value", ascending=args.lower_is_better, kind="stable")
    scores = table["value"].to_list()
    sequences = table["sequence"].to_list()
    pairs = []
    for place in range(min(len(table) // 2, args.pairs_per_backbone)):
        gap = abs(scores[place] - scores[-1 - place])
        if gap > 0 and gap >= args.score_gap - 1e-9:  # else 0.9 - 0.4 would be less than 0.5
            pairs.append((sequences[place], sequences[-1 - place]))
    return pairs


def run(args):
    check_new(args.out)
    read = functools.cache(script.read_structure)  # each file once
    folder = Path(args.out).resolve().parent
    made = []
    for name in args.data:
        table = read_table(name, args.score)
        columns = [column for column in FIELDS if column in table]
        for values, part in table.groupby(columns, sort=False):
            try:
                fields = {key: value for key, value in zip(columns, values, strict=True) if value}
                for key in fields.keys() & set(LISTS):
                    fields[key] = json.loads(fields[key])
                path = os.path.abspath(Path(name).parent / fields.get("pdb_file", ""))
                for better, worse in choose_pairs(part, args):
                    fields.update(preferred_seq=better, unpreferred_seq=worse)
                    script.read_pair(script.Row(**fields), read(path).chains, max_length=math.inf)
                    made.append({**fields, "pdb_file": os.path.relpath(path, folder)})
            except (TypeError, ValueError) as error:
                raise InputError(f"{name}: line {part.index[0] + 2}: {error}") from None
    if not made:
        raise InputError(f"no pairs: expected sequences with scores {args.score_gap:g} apart")
    lines = ",\n".join(json.dumps(pair) for pair in made)
    Path(args.out).write_text(f"[\n{lines}\n]\n")
    print(f"{args.out}: {len(made):,} pairs")


if __name__ == "__main__":
    call(run, parse_args)
