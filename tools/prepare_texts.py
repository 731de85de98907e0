"""Read, check and split texts for train_ddp.py, which runs this tool itself when it must.

    python tools/prepare_texts.py --phase1_data texts.txt --phase2_data pairs.jsonl --out FOLDER

Sources: FILE.txt, one text a line (phase 1); FILE.jsonl, .csv or .parquet with query, positive (a
text or a list of texts) and, if there are any, negatives; NAME or NAME:CONFIG of a data set of the
hub; ms_marco, which is MS MARCO v1.1.

Every row is checked first, and all that are wrong are listed: file, line, what was found. Held out
are the validation rows of MS MARCO, elsewhere --eval_fraction of the queries by a hash: the split
is the same for any order of the rows. Rows that share a column `group` stay together.

Writes arrays into --out. Texts are numbered, each distinct one once:
    text, offsets      UTF-8: text i is text[offsets[i]:offsets[i + 1]]
    kinds              0: a query, 1: a document
    phase1             texts to train on
    pairs              (N, 2) query, document
    positives          (N, P) all documents of a pair's query, then -1
    negatives          (N, K) documents that are wrong for a pair's query, then -1
    eval_queries, eval_documents    held-out texts; behind the held-out documents, distractors
    eval_answers       how many documents are held out; they come first
    eval_pairs         (M, 2) places in these two lists: which document answers which query
"""

import argparse
import collections
import csv
import hashlib
import itertools
import json
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--phase1_data", default="", help="texts; none: nothing is read for phase 1")
    add("--phase2_data", default="", help="queries and documents; none: nothing for phase 2")
    add("--max_samples_phase1", type=int, default=100_000, help="rows read for phase 1")
    add("--max_samples_phase2", type=int, default=500_000, help="rows read for phase 2")
    add("--eval_fraction", type=float, default=0.05, help="of the queries, that may be held out")
    add("--eval_samples", type=int, default=1000, help="held out per source, at most")
    text = "documents that answer no held-out query, for each one that does"
    add("--eval_distractors", type=float, default=1.0, help=text)
    add("--skip_bad_data", action="store_true", help="leave out rows that are wrong")
    add("--out", type=Path, required=True, help="folder to write")
    return parser.parse_args()


QUERY = 0  # the two kinds of texts
DOCUMENT = 1
MAX_CHARACTERS = 10_000  # texts are cut there: no student reads more
COLUMNS = {  # names that a field may have, in the order in which they are looked for
    "query": ["query", "anchor", "question"],
    "positives": ["positive", "positives", "answer", "document", "passage", "text"],
    "negatives": ["negatives", "negative"],
}
WANTED = '{"query": text, "positive": text or [texts], "negatives": [texts]}'
FILES = (".txt", ".jsonl", ".json", ".csv", ".parquet")  # .json: lines of it, too


class Row(NamedTuple):
    number: int  # as read, from 0 on
    query: str  # "" where there is none
    positives: list
    negatives: list
    group: str  # rows of a group are held out together
    held_out: bool | None  # by the data set's own split, if it has one


def read_file(path):
    """(place, record) for each row of a file; of JSON the line."""
    if path.suffix == ".parquet":
        from pyarrow.parquet import ParquetFile

        batches = ParquetFile(path).iter_batches()
        rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
        for number, found in enumerate(rows, start=1):
            yield f"{path} row {number}", found
        return

    # newline: csv finds the ends of its lines itself; -sig: without the mark that spreadsheets
    # write before the first name; surrogateescape: what is not UTF-8 is found in its row
    with open(path, newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
        if path.suffix == ".csv":
            csv.field_size_limit(sys.maxsize)
            reader = csv.DictReader(file)
            for found in reader:
                yield f"{path} line {reader.line_num}", found
            return
        for number, line in enumerate(file, start=1):
            text = line.strip()
            if text:
                yield f"{path} line {number}", {"text": text} if path.suffix == ".txt" else text


def read_hub(name, split, limit):
    """(place, record) for so many rows of a data set of the hub."""
    from datasets import load_dataset

    path, _, config = name.partition(":")
    try:
        rows = load_dataset(path, config or None, split=split)
    except Exception as error:  # the library raises a dozen kinds
        text = f"{path} is not on this machine and could not be fetched"
        raise ValueError(f"{text}; without a download: pydocs, or FILE.jsonl ({error})") from None
    for number, found in enumerate(itertools.islice(rows, limit)):
        yield f"{name} {split} row {number}", found


def read_ms_marco(split, limit):
    """Its passages as positives (those that were selected as an answer) and negatives."""
    for place, found in read_hub("microsoft/ms_marco:v1.1", split, limit):
        record = {"query": found["query"], "positive": [], "negatives": []}
        passages = found["passages"]
        for selected, text in zip(passages["is_selected"], passages["passage_text"], strict=True):
            record["positive" if selected else "negatives"].append(text)
        yield place, record


def as_texts(name, value):
    """A text or a list of texts as a list."""
    texts = [value] if isinstance(value, str) else value
    are_texts = isinstance(texts, list) and all(isinstance(text, str) for text in texts)
    if not are_texts or not all(text.strip() for text in texts):
        expected = "expected a text or a list of texts, none empty"
        raise ValueError(f"{name} is {str(value)[:80]!r}, {expected}")
    "".join(texts).encode()  # also a ValueError: bytes of another encoding, half of a character
    return texts


def parse_row(number, found, needs_query, held_out):
    """A record as a Row. A ValueError says what was found and what was expected."""
    if not isinstance(found, dict):
        raise ValueError(f"found {str(found)[:80]!r}, expected {WANTED}")
    if None in found:  # of csv
        more = len(found[None])
        raise ValueError(f"{more} fields more than the header has: put quotes around commas")
    fields = {}
    for field, names in COLUMNS.items():
        values = [found[name] for name in names if found.get(name) not in (None, "")]
        fields[field] = as_texts(field, values[0]) if values else []

    queries, positives, negatives = fields.values()
    if not positives or (needs_query and len(queries) != 1):
        filled = sorted(name for name, value in found.items() if value)
        raise ValueError(f"found columns {filled[:8]} with content, expected {WANTED}")
    query = queries[0] if queries else ""
    group = found.get("group")
    if group is None:
        group = query or positives[0]
    return Row(number, query, positives, negatives, str(group), held_out)


def read_rows(name, limit, args, problems):
    """The rows of a source, and to `problems` a line for each that is wrong."""
    if Path(name).suffix in FILES:
        records = itertools.islice(read_file(Path(name)), limit)
    elif name == "ms_marco":
        held_out_rows = read_ms_marco("validation", args.eval_samples)
        records = itertools.chain(read_ms_marco("train", limit), held_out_rows)
    else:
        records = read_hub(name, "train", limit)

    rows = []
    columns = set()
    for number, (place, found) in enumerate(records):
        held_out = None
        if name == "ms_marco":
            held_out = " validation " in place
            if not found["positive"]:  # a query without an answer teaches nothing
                continue
        try:
            if isinstance(found, str):
                found = json.loads(found)
            rows.append(parse_row(number, found, name == args.phase2_data, held_out))
            columns.update(found)
        except ValueError as error:
            problems.append(f"{place}: {error}")
    others = columns.difference(["group"], *COLUMNS.values())
    if others:
        print(f"{name}: these columns are not read: {', '.join(sorted(map(str, others)))}")
    return rows


def read_sources(args):
    """{name: rows} of the sources, and lines about the bad rows."""
    limits = {args.phase1_data: args.max_samples_phase1}
    also = limits.get(args.phase2_data, 0)  # where both phases have the same source
    limits[args.phase2_data] = max(args.max_samples_phase2, also)
    limits.pop("", None)

    problems = []
    sources = {}
    for name, limit in limits.items():
        try:
            sources[name] = read_rows(name, limit, args, problems)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    if problems and not args.skip_bad_data:
        lines = problems[:20]
        if len(problems) > 20:
            lines.append(f"... and {len(problems) - 20} more")
        head = f"{len(problems)} bad rows (--skip_bad_data goes on without them):"
        raise ValueError("\n  ".join([head, *lines]))
    return sources, problems


def place_of(group):
    """A number from 0 to 1, by a hash: a split by it is the same for any order and any seed."""
    digest = hashlib.sha256(group.strip().encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def choose_held_out(rows, args):
    """The groups to hold out: up to --eval_samples rows of a source. The rest is trained on."""
    sizes = collections.Counter()
    for row in rows:
        may_be = row.held_out
        if may_be is None:
            may_be = place_of(row.group) < args.eval_fraction
        if may_be:
            sizes[row.group] += 1

    held_out = set()
    room = args.eval_samples
    for group in sorted(sizes, key=place_of):
        if sizes[group] <= room:
            held_out.add(group)
            room -= sizes[group]
    return held_out


def spread_out(numbers, wanted):
    """So many of the numbers, evenly spaced; all where there are not so many."""
    wanted = min(wanted, len(numbers))
    return [numbers[i * len(numbers) // wanted] for i in range(wanted)]


def as_table(lists):
    """Lists of numbers as the rows of an array, filled up with -1."""
    table = np.full((len(lists), max(map(len, lists), default=0)), -1, np.int64)
    for row, numbers in zip(table, lists, strict=True):
        row[: len(numbers)] = numbers
    return table


def build_corpus(args, sources):
    """Split the data, number the texts: the arrays."""
    held_out = set()
    known_queries = set()
    for rows in sources.values():
        held_out |= choose_held_out(rows, args)
        known_queries.update(row.query.strip() for row in rows)

    numbers = {}  # of each distinct (kind, text)

    def number_of(kind, text):
        return numbers.setdefault((kind, text[:MAX_CHARACTERS].strip()), len(numbers))

    phase1 = set()
    pairs = {}  # {(query, document): its negatives}
    eval_pairs = {}
    answers = set()  # held-out documents
    for phase in (1, 2):
        limit = getattr(args, f"max_samples_phase{phase}")
        for row in sources.get(getattr(args, f"phase{phase}_data"), []):
            is_held_out = row.group in held_out
            if row.number >= limit and not is_held_out:
                continue
            if not row.query and row.positives[0].strip() in known_queries:
                # among the documents it would be the best answer to itself
                row = row._replace(query=row.positives[0], positives=[])
            documents = [number_of(DOCUMENT, text) for text in row.positives]
            queries = [number_of(QUERY, row.query)] if row.query else []
            if is_held_out:
                answers.update(documents)
            elif phase == 1:
                phase1.update(documents + queries)
                continue
            if queries:
                negatives = [number_of(DOCUMENT, text) for text in row.negatives]
                into = eval_pairs if is_held_out else pairs
                for document in documents:
                    into.setdefault((queries[0], document), []).extend(negatives)

    # what is held out is not trained on where it stands in other rows, either
    held = answers.union(*eval_pairs)
    phase1 -= held
    pairs = {pair: found for pair, found in sorted(pairs.items()) if not held.intersection(pair)}
    if not held or (args.phase1_data and not phase1) or (args.phase2_data and not pairs):
        found = f"{len(phase1)} texts for phase 1, {len(pairs)} pairs for phase 2"
        hint = "give more data, or another --eval_fraction"
        raise ValueError(f"{found}, {len(held)} held-out texts; none may be 0: {hint}")

    positives = {}  # of each query: none of them is a negative of it
    for query, document in pairs:
        positives.setdefault(query, []).append(document)
    negatives = []
    for (query, _), found in pairs.items():
        wrong = [number for number in dict.fromkeys(found) if number not in positives[query]]
        negatives.append([number for number in wrong if number not in held])

    # the judged negatives of held-out queries first, they are the hardest; then training documents
    judged = set(itertools.chain(*eval_pairs.values())) - held
    documents = {number for (kind, _), number in numbers.items() if kind == DOCUMENT}
    wanted = round(min(args.eval_distractors * len(answers), len(documents)))  # also of inf
    distractors = spread_out(sorted(judged), wanted)
    others = sorted(documents - judged - held)
    distractors += spread_out(others, wanted - len(distractors))

    eval_queries = sorted({query for query, _ in eval_pairs})
    eval_documents = [*sorted(answers), *distractors]
    row_of_query = {number: row for row, number in enumerate(eval_queries)}
    row_of_document = {number: row for row, number in enumerate(eval_documents)}
    matches = [(row_of_query[query], row_of_document[document]) for query, document in eval_pairs]
    encoded = [text.encode() for _, text in numbers]
    return {
        "text": np.frombuffer(b"".join(encoded), np.uint8),
        "offsets": np.cumsum([0, *map(len, encoded)]),
        "kinds": np.array([kind for kind, _ in numbers], np.uint8),
        "phase1": np.array(sorted(phase1), np.int64),
        "pairs": np.array([*pairs], np.int64).reshape(-1, 2),
        "positives": as_table([positives[query] for query, _ in pairs]),
        "negatives": as_table(negatives),
        "eval_queries": np.array(eval_queries, np.int64),
        "eval_documents": np.array(eval_documents, np.int64),
        "eval_answers": np.array(len(answers)),
        "eval_pairs": np.array(sorted(matches), np.int64).reshape(-1, 2),
    }


def main(args):
    try:
        sources, problems = read_sources(args)
        arrays = build_corpus(args, sources)
        args.out.mkdir(parents=True)
        for name, array in arrays.items():
            np.save(args.out / f"{name}.npy", array)
            # fails where a full disk has cut the file, which np.save does not
            np.load(args.out / f"{name}.npy", mmap_mode="r")
        (args.out / "bad_rows.txt").write_text("".join(f"{line}\n" for line in problems))
    except (OSError, ValueError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(parse_args())
