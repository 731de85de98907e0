"""Make preference pairs for run_dpo_ddp.py of scored sequences.

    python tools/make_dpo_pairs.py scored.json --out pairs.json
    python tools/make_dpo_pairs.py ddg.csv --out pairs.json --lower_is_better --score_gap 0.5
    python tools/make_dpo_pairs.py designs_*.csv --score charge --out pairs.json
    python tools/make_dpo_pairs.py pairs.json --out swapped.json --swap     # a control

JSON: an array, or an object per line, with pdb_file, sequences and scores (as many), and other
fields of the pairs if needed: see run_dpo_ddp.py --help. CSV, such as tools/design_dpo.py writes:
columns pdb_file, sequence, and score or another one that --score names. Columns named as fields are
fields (chains and positions apart by spaces); lines that agree in all of them are scored together.
--score charge is K + R - D - E, if no column has this name.

Of a backbone's sequences the pairs with the largest differences of the score are taken, but each
sequence once before any is taken twice. Sequences that are the same where something is designed
make no pair. Every pair is checked as the training checks it, but for its --max_length and cluster.

--swap turns pairs round: a network that was trained on them must do worse than chance on the true
ones.
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

SCORED = {**script.FIELDS, "sequences": ["ACD"]}


def parse_args():
    parser = script.Parser(description=__doc__)
    add = parser.add_argument
    add("data", nargs="+", help="JSON, JSON lines or CSV files")
    add("--out", default="pairs.json", help="file to write")
    add("--score", default="score", help="column of a CSV file that has the scores; or charge")
    add("--lower_is_better", action="store_true", help="the lower score is preferred")
    gap = script.number(0)
    add("--score_gap", type=gap, default=0.0, help="least difference of the scores of a pair")
    add("--pairs_per_backbone", type=script.COUNT, default=16, help="pairs of a row at most")
    add("--swap", action="store_true", help="turn round what is preferred")
    add("--skip_bad_data", action="store_true", help="leave out rows that are wrong, list them")
    args = parser.parse_args()

    if not Path(args.out).parent.is_dir():
        parser.error(f"--out {args.out}: there is no folder {Path(args.out).parent}")
    if Path(args.out).exists():
        parser.error(f"{args.out} exists: give another --out")
    return args


def net_charge(sequence):
    """At pH 7, without the ends: K and R have one, D and E one less."""
    sequence = sequence.upper()
    return sum(sequence.count(letter) for letter in "KR") - sum(map(sequence.count, "DE"))


def field_of(name, text):
    """The value of a field that a CSV file gives as a text."""
    if name in ("design_chains", "fixed_chains"):
        return text.split()
    if name == "mutable_positions":
        return [int(place) for place in text.split()]
    if name == "mutable_ranges":
        return [[int(end) for end in ends.split("-")] for ends in text.split()]
    return text


def read_csv(path, score, problems):
    """The same as read_rows gives, of a CSV file: a row for all lines that belong together. Adds
    lines without a number to `problems`."""
    rows = {}
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        columns = reader.fieldnames or []
        is_charge = score == "charge" and score not in columns
        missing = {"pdb_file", "sequence", score} - {*columns, "charge"}
        if missing:
            raise InputError(f"{path}: no column {', '.join(sorted(missing))}")
        others = sorted(set(columns) - {*script.FIELDS, "sequence", score})
        if others:
            print(f"{path}: columns that are not used: {', '.join(others)}")

        for line in reader:
            place = f"{path}: line {reader.line_num}"
            fields = {}
            try:
                for name in script.FIELDS:
                    if line.get(name):
                        fields[name] = field_of(name, line[name])
                sequence = line["sequence"] or ""
                value = net_charge(sequence) if is_charge else float(line[score])
            except (TypeError, ValueError) as error:
                problems.append(f"{place}: {error}; expected numbers")
                continue
            structure = os.path.abspath(Path(path).parent / fields.get("pdb_file", ""))
            new = (len(rows), place, structure, {**fields, "sequences": [], "scores": []})
            *_, row = rows.setdefault(json.dumps(fields), new)
            row["sequences"].append(sequence)
            row["scores"].append(value)
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


def pairs_of(args, row, path, read):
    """The pairs of a row with scores, as rows for the training. Raises ValueError."""
    if isinstance(row, dict) and "preferred_seq" in row:
        return [row]  # it is a pair already

    scores = row.pop("scores", None) if isinstance(row, dict) else None
    script.check_fields(row, SCORED, ["pdb_file", "sequences"])
    structure = read(path)
    found = script.join_chains(path, structure, row)
    texts = [text.upper() for text in row.pop("sequences")]
    if not isinstance(scores, list) or len(texts) != len(scores) or not texts:
        raise ValueError(f"{len(texts)} sequences; expected a list of as many scores, not 0")
    if not all(type(value) in (int, float) and math.isfinite(value) for value in scores):
        raise ValueError(f"scores are {scores!r:.80}; expected finite numbers")
    letters = []
    for number, text in enumerate(texts):
        letters.append(script.read_letters(f"sequence {number}", text, found, structure.note))

    scores = np.array(scores, np.float64)
    if args.lower_is_better:
        scores = -scores
    letters = np.stack(letters)[:, found.designed[: found.length]]
    kinds = np.unique(letters, axis=0, return_inverse=True)[1].ravel()
    made = []
    for better, worse in choose_pairs(scores, kinds, args.score_gap, args.pairs_per_backbone):
        made.append({**row, "preferred_seq": texts[better], "unpreferred_seq": texts[worse]})
    return made


def make_pairs(args):
    """The rows to write, what is wrong, and what else must be said."""
    rows = []
    problems = []
    for name in args.data:
        if name.lower().endswith(".csv"):
            try:
                rows += read_csv(name, args.score, problems)
            except UnicodeDecodeError as error:
                raise InputError(f"{name}: {error}; expected UTF-8") from None
        else:
            rows += script.read_rows(name)

    folder = Path(args.out).resolve().parent
    read = functools.cache(script.read_structure)  # each file once
    made = []
    notes = {}  # as keys: each once
    for _, place, path, row in tqdm(rows, unit=" rows", disable=None):
        try:
            pairs = pairs_of(args, row, path, read)
            for pair in pairs:
                script.check_fields(pair, script.FIELDS, script.REQUIRED)
                structure = read(path)
                script.read_pair(path, pair, structure, math.inf)
                if structure.note:
                    notes[structure.note] = None
        except ValueError as error:
            problems.append(f"{place}: {error}")
            continue
        file = os.path.relpath(path, folder)
        made += [{**pair, "pdb_file": file} for pair in pairs]
    return made, problems, list(notes)


def run(args):
    made, problems, notes = make_pairs(args)
    if problems and not args.skip_bad_data:
        text = f"{len(problems)} problems (--skip_bad_data leaves such rows out):"
        raise InputError(text + script.list_problems(problems))
    for text in [*notes, *[f"left out: {problem}" for problem in problems]]:
        print(text)
    if not made:
        hint = f"expected sequences that differ, with scores {args.score_gap:g} or more apart"
        raise InputError(f"{' '.join(args.data)}: no pairs; {hint}")

    if args.swap:
        for pair in made:
            preferred = pair["preferred_seq"]
            pair["preferred_seq"] = pair["unpreferred_seq"]
            pair["unpreferred_seq"] = preferred
    lines = ",\n".join(json.dumps(pair) for pair in made)
    Path(args.out).write_text(f"[\n{lines}\n]\n")
    print(f"{args.out}: {len(made):,} pairs")


def main():
    try:
        run(parse_args())
    except (InputError, OSError, ValueError, csv.Error) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
