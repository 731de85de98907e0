"""Make preference pairs for run_dpo_ddp.py of scored sequences.

    python tools/make_dpo_pairs.py scored.json --out pairs.json
    python tools/make_dpo_pairs.py ddg.csv --out pairs.json --lower_is_better --score_gap 0.5
    python tools/make_dpo_pairs.py pairs.json --out swapped.json --swap     # a control

scored.json: a JSON array, or an object per line, with pdb_file, sequences and scores (as many), and
other fields of the pairs if needed, such as design_chains or cluster: see run_dpo_ddp.py --help.
A CSV file has the columns pdb_file, sequence and score; its other columns, such as chain_id or
cluster, are fields, too, and lines that agree in all of them are scored together.

Of a backbone's sequences the pairs with the largest differences of the score are taken, but each
sequence once before any is taken twice. Sequences that are the same where something is designed
make no pair. Every pair is checked as the training checks it, but for its --max_length.

--swap turns pairs round. A network that was trained on such pairs must do worse than chance on the
true ones: if it does not, the measurement is wrong.
"""

import csv
import functools
import json
import math
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np
from tqdm import tqdm

import run_dpo_ddp as script
from run_dpo_ddp import InputError

SCORED = {**script.FIELDS, "sequences": ["ACD"], "scores": [0.5]}


def parse_args():
    parser = script.Parser(description=__doc__)
    add = parser.add_argument
    add("data", help="JSON, JSON lines or CSV")
    add("--out", default="pairs.json", help="file to write")
    add("--lower_is_better", action="store_true", help="the lower score is preferred")
    add("--score_gap", type=float, default=0.0, help="least difference of the scores of a pair")
    add("--pairs_per_backbone", type=script.count, default=16, help="pairs of a row at most")
    add("--swap", action="store_true", help="turn round what is preferred")
    add("--skip_bad_data", action="store_true", help="leave out rows that are wrong, list them")
    args = parser.parse_args()
    args.max_length = math.inf  # the training has a limit
    if Path(args.out).exists():
        parser.error(f"{args.out} exists: give another --out")
    return args


def read_csv(path):
    """The same as read_rows gives, of a CSV file: a row for all lines that belong together."""
    rows = {}
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        missing = {"pdb_file", "sequence", "score"} - set(reader.fieldnames or [])
        if missing:
            raise InputError(f"{path}: no column {', '.join(sorted(missing))}")

        for line in reader:
            place = f"{path}: line {reader.line_num}"
            sequence = line.pop("sequence")
            score = line.pop("score")
            fields = {name: value for name, value in line.items() if value}
            for name in {"design_chains", "fixed_chains"} & set(fields):
                fields[name] = fields[name].split()
            structure = os.path.abspath(Path(path).parent / fields.get("pdb_file", ""))
            new = (place, structure, {**fields, "sequences": [], "scores": []})
            _, _, row = rows.setdefault(json.dumps(fields), new)
            row["sequences"].append(sequence)
            try:
                row["scores"].append(float(score))
            except (TypeError, ValueError):
                raise InputError(f"{place}: score is {score!r}; expected a number") from None
    return list(rows.values())


def choose_pairs(scores, kinds, least, most):
    """[(better, worse)] of sequences with `scores` (n,), at least `least` apart and not of the same
    kind (n,): at most `most`, the largest differences first, but each sequence once before any is
    there twice, and so on."""
    gaps = scores[:, None] - scores
    is_pair = (gaps > 0) & (gaps >= least - 1e-9) & (kinds[:, None] != kinds)
    pairs = np.argwhere(is_pair)
    pairs = pairs[np.argsort(-gaps[is_pair], kind="stable")]

    taken = []
    used = np.zeros(len(scores))
    while len(taken) < min(most, len(pairs)):
        often = np.square(used[pairs]).sum(axis=1)
        often[taken] = np.inf
        best = often.argmin()  # the first of the least: that with the largest difference
        used[pairs[best]] += 1
        taken.append(best)
    return pairs[sorted(taken)].tolist()


def pairs_of(args, row, path, structure):
    """The pairs of a row with scores, as rows for the training. Raises ValueError."""
    if isinstance(row, dict) and "preferred_seq" in row:
        return [row]  # it is a pair already

    script.check_fields(row, SCORED, ["pdb_file", "sequences", "scores"])
    found = script.join_chains(path, structure, row)
    texts = [text.upper() for text in row.pop("sequences")]
    scores = np.array(row.pop("scores"), np.float64)
    if len(texts) != len(scores) or not texts:
        raise ValueError(f"{len(texts)} sequences, {len(scores)} scores; expected as many, not 0")
    for number, text in enumerate(texts):
        if len(text) != found.length:
            hint = f"expected {found.length}, as {found.name}"
            raise ValueError(f"sequence {number} has {len(text)} letters; {hint}")

    if args.lower_is_better:
        scores = -scores
    designed = found.designed[: found.length]
    letters = np.array([list(text) for text in texts])[:, designed]
    kinds = np.unique(letters, axis=0, return_inverse=True)[1].ravel()
    made = []
    for better, worse in choose_pairs(scores, kinds, args.score_gap, args.pairs_per_backbone):
        made.append({**row, "preferred_seq": texts[better], "unpreferred_seq": texts[worse]})
    return made


def make_pairs(args):
    """The rows to write, and what is wrong."""
    rows = read_csv(args.data) if args.data.endswith(".csv") else script.read_rows(args.data)
    folder = Path(args.out).resolve().parent
    read = functools.cache(script.try_structure)  # each file once
    checker = script.Pairs(args, k=1)
    made = []
    for place, path, row in tqdm(rows, unit=" rows", disable=None):
        try:
            pairs = pairs_of(args, row, path, read(path))
        except ValueError as error:
            checker.problems.append(f"{place}: {error}")
            continue

        for pair in pairs:
            before = len(checker)
            checker.add(place, path, pair, read(path))
            if len(checker) > before:
                made.append({**pair, "pdb_file": os.path.relpath(path, folder)})
    return made, checker.problems


def swap(pair):
    better = pair["preferred_seq"]
    worse = pair["unpreferred_seq"]
    return {**pair, "preferred_seq": worse, "unpreferred_seq": better}


def main():
    try:
        args = parse_args()
        made, problems = make_pairs(args)
        if problems and not args.skip_bad_data:
            script.refuse_rows(problems)
        for problem in problems:
            print(f"left out: {problem}")

        if not made:
            hint = f"expected sequences that differ, with scores {args.score_gap:g} or more apart"
            raise InputError(f"{args.data}: no pairs; {hint}")
        if args.swap:
            made = [swap(pair) for pair in made]
        lines = ",\n".join(json.dumps(pair) for pair in made)
        Path(args.out).write_text(f"[\n{lines}\n]\n")
    except (InputError, OSError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"{args.out}: {len(made):,} pairs")


if __name__ == "__main__":
    main()
