"""What train_ddp.py reads: files of all kinds, odd ones, the hub; and what it holds out."""

import gzip
import json
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from helpers import parse_arguments

import train_ddp as script

COUNT = 40
QUERIES = [f"query {i}" for i in range(COUNT)]
PAIRS = {(f"query {i}", f"document {i}") for i in range(COUNT)}
WRONG = {(f"query {i}", f"other {i}") for i in range(COUNT)}


def arguments(path, *options):
    """Of a run whose phases both read the file; of a .txt only the first can."""
    phases = [f"--phase1_data={path}", f"--phase2_data={path}"]
    if ".txt" in path.name:
        phases = [f"--phase1_data={path}", "--skip_phase2"]
    common = [f"--cache_dir={path.parent}/cache", "--eval_fraction=0.3"]
    return parse_arguments(script, *phases, *common, *options)


def read(path, *options):
    return script.Corpus(script.prepare_texts(arguments(path, *options)))


def decoded(corpus, numbers):
    return set(corpus.texts([number for number in np.ravel(numbers) if number >= 0]))


def pairs_of(corpus):
    """{(query, a document that answers it)}, held out or not"""
    pairs = {tuple(corpus.texts(pair)) for pair in corpus.pairs}
    for query, document in corpus.eval_pairs:
        pairs.add(
            tuple(corpus.texts([corpus.eval_queries[query], corpus.eval_documents[document]]))
        )
    return pairs


def wrong_of(corpus):
    """{(query, a document that does not answer it)} of those that are trained on"""
    return {
        tuple(corpus.texts([query, document]))
        for (query, _), row in zip(corpus.pairs, corpus.negatives, strict=True)
        for document in row[row >= 0]
    }


# --------------------------------------------------------------------------------------------------
# Files that are read


def records(**more):
    rows = []
    for i in range(COUNT):
        row = {"query": f"query {i}", "positive": f"document {i}", "negative": f"other {i}"}
        rows.append({**row, **more})
    return rows


def in_lists():
    rows = []
    for row in records():
        rows.append({"query": row["query"], "positive": [row["positive"]]})
        rows[-1]["negatives"] = [row["negative"]]
    return rows


def lines(rows):
    return "\n".join(map(json.dumps, rows)) + "\n"


def table(rows, separator=",", end="\n"):
    cells = [list(rows[0]), *[[str(cell) for cell in row.values()] for row in rows]]
    return "".join(separator.join(row) + end for row in cells)


def parquet(rows):
    def write(path):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)

    return write


def packed(content):
    return gzip.compress(content.encode())


def replaced(old, new, **more):
    """A table with other words; row i is in line i + 2."""
    text = table(records()).replace(old, new)
    for old, new in more.items():
        text = text.replace(old, new)
    return text


def odd(**values):
    """Lines of which the eleventh has other values."""
    rows = records()
    rows[10].update(values)
    return lines(rows)


READ = {  # file: its content
    "a.jsonl": lines(records()),
    "list.json": json.dumps(records(), indent=1),
    "a.csv": table(records()),
    "a.csv.gz": packed(table(records())),
    "A.CSV": table(records()),
    "packed.csv": packed(table(records())),
    "a.tsv": table(records(), "\t"),
    "a.parquet": parquet(records()),
    "lists.parquet": parquet(in_lists()),
    "lists.jsonl": lines([*in_lists(), {"query": "q", "positive": []}]),
    "spreadsheet.csv": "\ufeff" + table(records(), end="\r\n"),
    "old.csv": table(records(), end="\r"),
    "empty_lines.csv": table(records(), end="\n\n"),
    "mark.jsonl": "\ufeff" + lines(records()),
    "numbered.csv": replaced("other", ",other", negative="negative_1,negative_2"),
    "names.csv": replaced("query,positive", "anchor,answer"),
    "unread.csv": table(records(hard="x", id="7")),
    "breaks.csv": table(records()) + '"query\n0",document 0,\n',
}
SAID = {  # of some of them
    "lists.jsonl": "1 of 41 rows have no right answer",
    "unread.csv": "these columns are not read: hard, id",
    "breaks.csv": "1 rows have line breaks within quotes, such as {} lines 42 to 43",
}


def write(path, content):
    if callable(content):
        content(path)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content, encoding="utf-8", newline="")


@pytest.mark.parametrize("name", READ)
def test_files_that_are_read(name, tmp_path, caplog, monkeypatch):
    """The same pairs and negatives, without `datasets`."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    path = tmp_path / name
    write(path, READ[name])
    corpus = read(path)
    assert pairs_of(corpus) - {("query\n0", "document 0")} == PAIRS
    found = wrong_of(corpus)
    assert found == {(query, other) for query, other in WRONG if query in {q for q, _ in found}}
    assert len(corpus.pairs) > 20 and len(found) >= COUNT - len(corpus.eval_queries)
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == (name in SAID)
    assert SAID.get(name, "").format(path) in "".join(warnings)


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_texts_for_phase_1(name, tmp_path):
    content = "\n\n".join(QUERIES)
    write(tmp_path / name, packed(content) if name.endswith("gz") else content)
    corpus = read(tmp_path / name)
    assert set(corpus.texts(range(len(corpus)))) == set(QUERIES)
    assert len(corpus.phase1) + corpus.eval_answers == COUNT
    assert len(corpus.pairs) == 0


def test_long_texts_are_whole(tmp_path):
    """Also those that begin alike."""
    long = "word " * 40_000
    rows = [*records(), *[{"query": f"long {i}", "positive": f"{long}{i}"} for i in range(3)]]
    write(tmp_path / "a.jsonl", lines(rows))
    corpus = read(tmp_path / "a.jsonl")
    texts = corpus.texts(range(len(corpus)))
    assert sum(text.startswith(long) for text in texts) == 3
    assert len(set(texts)) == len(texts)


# --------------------------------------------------------------------------------------------------
# Files that are refused


REFUSED = {  # file: its content, and a part of what is said of it
    "gone.csv": (None, "is not a file here"),
    "a.xlsx": ("x", ": its ending must be .txt .jsonl"),
    "utf16.csv": (table(records()).encode("utf-16"), "is UTF-16"),
    "latin1.csv": (replaced("document 10", "ö").encode("latin-1"), "line 12: positive is not"),
    "half.jsonl": (odd(query="\ud83d"), "line 11: query is not UTF-8, or has half of a character"),
    "quote.csv": (replaced("10,document", '10,"document'), "line 12: .*is a quote not closed"),
    "twice.csv": (replaced("query", "negative"), "line 1: two columns have one name: negative"),
    "comma.csv": (replaced("document 10", "red, hard"), "line 12: 4 fields, the header has 3"),
    "columns.csv": (replaced("positive", "right"), ": found the columns query, right, negative"),
    "texts.jsonl": (lines([{"text": "t"}] * 9), "line 9: found the columns text; expected query"),
    "blank.jsonl": (odd(positive=" "), "line 11: positive is missing or empty"),
    "none.jsonl": (odd(query=None), "line 11: query is missing or empty"),
    "number.jsonl": (odd(positive=["a", 3]), "line 11: positive is .*, expected a text or a list"),
    "label.csv": (table(records(label=1)), ": found labels; expected wrong answers in the column"),
    "broken.jsonl": (lines(records())[:-20], "line 40: no JSON"),
    "broken.json": (json.dumps(records())[:-20], "cannot be read"),
    "list.jsonl": ("[1, 2]", "row 2: found '2', expected names with values"),
    "cut.jsonl.gz": (packed(lines(records()))[:-30], "cannot be read"),
    "text.parquet": (table(records()), "cannot be read"),
    "empty.csv": ("", "empty.csv has no rows"),
    "header.csv": ("query,positive\n", "header.csv has no rows"),
    "one.jsonl": (lines(records()[:1]), "none may be 0"),  # nothing to measure by
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_are_refused(name, tmp_path):
    """By name, with the line and what would be right; nothing is kept."""
    path = tmp_path / name
    content, said = REFUSED[name]
    if content is not None:
        write(path, content)
    with pytest.raises(script.InputError, match=said) as caught:
        read(path)
    assert name == "one.jsonl" or str(path) in str(caught.value)
    assert not list(tmp_path.glob("cache/*"))


BAD = [b'{"query": "no positive"}', b"not json", b"\xff\xfe", b"7"]


def test_bad_rows_are_all_named(tmp_path, caplog):
    path = tmp_path / "a.jsonl"
    good = lines(records()).encode().splitlines()
    path.write_bytes(b"\n".join(good[:10] + BAD + good[10:] + [b"broken"] * 30))
    with pytest.raises(script.InputError) as caught:
        read(path)
    said = str(caught.value).splitlines()
    assert len(said) == 1 + 20 + 1
    assert "34 bad rows" in said[0] and "--skip_bad_data" in said[0]
    assert "and 14 more" in said[-1]
    for number, line in enumerate(said[1:5], start=11):
        assert f"{path} line {number}: " in line
    corpus = read(path, "--skip_bad_data")
    assert pairs_of(corpus) == PAIRS
    assert "34 bad rows are left out" in caplog.text


# --------------------------------------------------------------------------------------------------
# What is held out


def two_answers(**more):
    """Rows of 130 queries with two documents each; of two wrong ones one is that of all."""
    rows = []
    for i in range(130):
        row = {"query": f"query {i}", "positive": [f"document {i}", f"second {i}"]}
        row["negatives"] = [f"document {i * 7 % 130}", "nothing"]
        rows.append({**row, **{name: function(i) for name, function in more.items()}})
    return rows


def test_nothing_held_out_is_trained_on(tmp_path):
    """Also where it stands in other rows, or a query stands there as a document."""
    again = [{"query": f"again {i}", "positive": f"second {i}"} for i in range(130)]
    turned = [{"query": f"document {i}", "positive": f"query {i}"} for i in range(130)]
    write(tmp_path / "a.jsonl", lines([*two_answers(), *again, *turned]))
    corpus = read(tmp_path / "a.jsonl")
    held = decoded(corpus, corpus.eval_queries)
    held |= decoded(corpus, corpus.eval_documents[: corpus.eval_answers])
    used = decoded(corpus, corpus.phase1) | decoded(corpus, corpus.pairs)
    used |= decoded(corpus, corpus.negatives)
    assert len(held) > 60 and len(used) > 150
    assert not held & used
    for pair, right, wrong in zip(corpus.pairs, corpus.positives, corpus.negatives, strict=True):
        assert pair[1] in right
        assert not {*right[right >= 0]} & {*wrong}


def test_negatives_that_are_positives(tmp_path, caplog):
    """Of the same query, there or in another row: they are counted."""
    rows = records()
    rows[3]["negative"] = "document 3"
    rows.append({"query": "query 4", "positive": "other 4", "negative": "x"})
    write(tmp_path / "a.jsonl", lines(rows))
    read(tmp_path / "a.jsonl")
    assert "2 negatives are left out: they are also positives of their query" in caplog.text


def test_the_split(tmp_path):
    """The same in any order; each source has its held-out rows; distractors as many as asked for;
    a group is held out together."""
    options = ["--eval_fraction=0.5", "--eval_samples=20"]
    write(tmp_path / "a.jsonl", lines(two_answers()))
    write(tmp_path / "a.txt", "\n".join(f"text {i}" for i in range(2000)))
    found = read(tmp_path / "a.jsonl", *options, f"--phase1_data={tmp_path}/a.txt")
    assert len(found.eval_queries) == 20
    assert found.eval_answers == 20 + 2 * 20
    assert len(found.eval_documents) == 2 * found.eval_answers
    assert len(found.pairs) == 2 * 110

    write(tmp_path / "other.jsonl", lines(reversed(two_answers())))
    other = read(tmp_path / "other.jsonl", *options, "--eval_distractors=0")
    assert decoded(other, other.eval_queries) == decoded(found, found.eval_queries)
    assert len(other.eval_documents) == 40
    every = read(tmp_path / "other.jsonl", *options, "--eval_distractors=1e9")
    assert len(every.eval_documents) == (~every.is_query).sum()

    write(tmp_path / "groups.jsonl", lines(two_answers(group=lambda i: i // 10)))
    found = read(tmp_path / "groups.jsonl", *options)
    groups = {int(text.split()[1]) // 10 for text in decoded(found, found.eval_queries)}
    assert len(found.eval_queries) == 10 * len(groups) == 20


def test_queries_among_the_texts_of_phase_1_are_queries(tmp_path):
    """Held out as documents, they would be found before those that answer them."""
    write(tmp_path / "a.jsonl", lines(records()))
    write(tmp_path / "a.txt", "\n".join([*QUERIES, "another text"]))
    found = read(tmp_path / "a.jsonl", f"--phase1_data={tmp_path}/a.txt")
    queries = set(QUERIES)
    assert not decoded(found, found.eval_documents) & queries
    held = decoded(found, found.eval_queries)
    assert held
    assert decoded(found, found.phase1) & queries == queries - held


def test_texts_beside_a_query_in_a_list_are_documents(tmp_path):
    rows = [{"text": [query, f"beside {query}"]} for query in QUERIES]
    write(tmp_path / "a.jsonl", lines(records()))
    write(tmp_path / "lists.jsonl", lines(rows))
    found = read(tmp_path / "a.jsonl", f"--phase1_data={tmp_path}/lists.jsonl")
    beside = {text for text in found.texts(range(len(found))) if text.startswith("beside")}
    assert beside == {f"beside {query}" for query in QUERIES}
    assert not decoded(found, found.eval_documents) & set(QUERIES)
    assert pairs_of(found) == PAIRS


def test_ms_marco(tmp_path, monkeypatch):
    """Selected passages are positives, the validation rows are held out."""

    def load_dataset(path, config, split):
        assert (path, config) == ("microsoft/ms_marco", "v1.1")
        rows = []
        for i in range(6):
            name = f"{split} {i}"
            passages = {"passage_text": [f"{name} wrong", f"{name} right"]}
            passages["is_selected"] = [0, int(i % 5 > 0)]
            rows.append({"query": name, "passages": passages})
        return rows

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    found = read(tmp_path / "a", "--phase1_data=ms_marco", "--phase2_data=ms_marco")
    assert decoded(found, found.eval_queries) == {f"validation {i}" for i in range(1, 5)}
    numbers = range(1, 5)  # nothing is selected for queries 0 and 5
    assert {tuple(found.texts(pair)) for pair in found.pairs} == {
        (f"train {i}", f"train {i} right") for i in numbers
    }
    assert decoded(found, found.negatives) == {f"train {i} wrong" for i in numbers}


def test_a_path_in_another_form(tmp_path, monkeypatch, caplog):
    """Rows with line breaks are said, however the path is written."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "breaks.csv", READ["breaks.csv"])
    phases = ["--phase1_data=./breaks.csv", "--phase2_data=./breaks.csv"]
    script.prepare_texts(parse_arguments(script, *phases, "--eval_fraction=0.3"))
    notes = json.loads(next(tmp_path.glob("cache/*/meta.json")).read_text())["notes"]
    assert notes == ["1 rows have line breaks within quotes, such as breaks.csv lines 42 to 43"]


def test_an_answer_is_no_distractor(tmp_path):
    """A query may have answers in a row that is held out and in others: here in two groups."""
    rows = []
    for i in range(60):
        for part in ("a", "b"):
            row = {"query": f"query {i}", "positive": f"document {i} {part}"}
            rows.append({**row, "group": f"group {i} {part}"})
    write(tmp_path / "a.jsonl", lines(rows))
    found = read(tmp_path / "a.jsonl", "--eval_distractors=1e9")
    assert len(found.eval_pairs) < len(found.eval_documents)
    documents = decoded(found, found.eval_documents)
    answers = {document for _, document in pairs_of(found)}
    for query in decoded(found, found.eval_queries):
        number = query.split()[1]
        shown = {text for text in documents if text.split()[1] == number}
        assert len(shown) == 1 or shown <= answers
    held = {text.split()[1] for text in decoded(found, found.eval_queries)}
    of_held = [text for text in documents if text.split()[1] in held]
    assert len(of_held) == len(found.eval_pairs)


def test_rows_without_answers(tmp_path):
    """Nothing of them can be held out."""
    write(tmp_path / "a.jsonl", lines([{"query": q, "positive": []} for q in QUERIES]))
    with pytest.raises(script.InputError, match="0 held-out documents"):
        read(tmp_path / "a.jsonl", "--skip_phase2")


def test_rows_above_the_limit_are_said(tmp_path, caplog):
    write(tmp_path / "a.jsonl", lines(records()))
    read(tmp_path / "a.jsonl", "--max_samples_phase1=30", "--max_samples_phase2=30")
    assert "a.jsonl: 30 rows are read, and it has more: see --max_samples" in caplog.text
    caplog.clear()
    read(tmp_path / "a.jsonl", "--max_samples_phase1=40", "--max_samples_phase2=40")
    assert "it has more" not in caplog.text
