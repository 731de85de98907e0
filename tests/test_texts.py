"""What train_ddp.py reads: files, odd ones, MS MARCO; and what it holds out."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from datasets import Dataset
from helpers import check_refused, parse_arguments

import train_ddp as script

COUNT = 40
PAIRS = {(f"query {i}", f"document {i}") for i in range(COUNT)}
WRONG = {(f"query {i}", f"other {i}") for i in range(COUNT)}


def read(*words):
    """The split of what is read, with its texts: paths of both phases, then options."""
    paths = [path for path in words if isinstance(path, Path)]
    options = [word for word in words if word not in paths]
    phases = ["--phase1_data", *map(str, paths), "--phase2_data", *map(str, paths)]
    args = parse_arguments(script, *phases, "--eval_fraction=0.3", *options)
    rows = script.read_sources(args, paths[0].parent / "tables")
    texts, arrays = script.split_texts(args, *rows, [], [])
    return SimpleNamespace(texts=[text for _, text in texts], **arrays)


def decoded(found, numbers):
    return {found.texts[number] for number in np.ravel(numbers)}


def held_out(found):
    """Texts: queries, the documents that answer them, distractors."""
    texts = np.concatenate([found.held_out_queries, found.held_out_documents])
    queries = decoded(found, found.held_out_queries)
    answers = decoded(found, texts[found.held_out_answers[:, 1]])
    return queries, answers, decoded(found, found.held_out_documents) - answers


def pairs_of(found):
    """{(query, a document that answers it)}, held out or not"""
    texts = np.concatenate([found.held_out_queries, found.held_out_documents])
    pairs = [*found.pairs[:, :2], *texts[found.held_out_answers[:, :2]]]
    return {(found.texts[query], found.texts[document]) for query, document in pairs}


def wrong_of(found):
    """{(query, a document that does not answer it)} of those that are trained on"""
    wrong = set()
    for query, _, begin, end in found.pairs:
        wrong |= {(found.texts[query], found.texts[i]) for i in found.negatives[begin:end]}
    return wrong


def records(**more):
    rows = []
    for i in range(COUNT):
        row = {"query": f"query {i}", "positive": f"document {i}", "negative": f"other {i}"}
        rows.append({**row, **more})
    return rows


def lines(rows):
    return "\n".join(map(json.dumps, rows)) + "\n"


def table(rows, separator=","):
    cells = [list(rows[0]), *[map(str, row.values()) for row in rows]]
    return "".join(separator.join(row) + "\n" for row in cells)


def replaced(old, new):
    """A table with other words; row i is in line i + 2."""
    return table(records()).replace(old, new)


IN_LISTS = [
    {"query": row["query"], "positive": [row["positive"]], "negatives": [row["negative"]]}
    for row in records()
]
READ = {  # file: its content
    "a.jsonl": lines(records()),
    "A.CSV.gz": gzip.compress(table(records()).encode()),
    "lists.jsonl": lines([*IN_LISTS, {"query": "q", "positive": []}]),
    "quotes.tsv": table(records(), "\t").replace("document 1", '"document 1'),  # they are texts
    "numbered.csv": replaced("other", ",other").replace("negative", "negative_1,negative_2"),
    "names.csv": replaced("query,positive", "anchor,answer"),
    # numbers of rows are no grades
    "unread.jsonl": lines([{**row, "hard": "x", "id": i} for i, row in enumerate(records())]),
    "blank.csv": table(records()) + "q, ,\n",
    "breaks.csv": table(records()) + '"query\n0",document 0,\n',
}
SAID = {  # of some of them
    "lists.jsonl": "an empty one: of them phase 1 reads the query, such as {}: row 41",
    "blank.csv": "an empty one: of them phase 1 reads the query, such as {}: row 41",
    "unread.jsonl": "these columns are not read: hard, id",
    "breaks.csv": "line breaks within quotes (stray quotes would swallow rows), such as {}: row 41",
}


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.mark.parametrize("name", READ)
def test_files_that_are_read(name, tmp_path, caplog):
    """The same pairs and negatives."""
    path = tmp_path / name
    write(path, READ[name])
    found = read(path)
    pairs = {(query, document.strip('"')) for query, document in pairs_of(found)}
    assert pairs - {("query\n0", "document 0")} == PAIRS
    trained = decoded(found, found.pairs[:, 0])
    assert len(trained) > 20
    assert wrong_of(found) == {(query, other) for query, other in WRONG if query in trained}
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == (name in SAID), warnings
    assert SAID.get(name, "").format(path) in "".join(warnings)


def test_several_files(tmp_path, caplog):
    """Some with negatives, some without. Rows above the limit are said, and a missing file."""
    caplog.set_level("INFO")
    for part in (0, 1):
        rows = [dict(list(row.items())[: 3 - part]) for row in records()[part::2]]
        write(tmp_path / f"shard{part}.jsonl", lines(rows))
    write(tmp_path / "shard2.jsonl", "")
    found = read(tmp_path / "shard*.jsonl", "--max_samples_phase1=20", "--max_samples_phase2=30")
    assert "shard*.jsonl: 30 of 40 rows are read" in caplog.text
    assert len(pairs_of(found)) == 30
    assert len(found.phase1) <= 3 * 20
    both = [tmp_path / "shard0.jsonl@12", tmp_path / "shard1.jsonl"]
    assert len(pairs_of(read(*both))) == 32
    assert len(pairs_of(read(*both, "--max_samples_phase2=15"))) == 15
    assert pairs_of(read(tmp_path / "shard1.jsonl", tmp_path / "shard0.jsonl")) == PAIRS
    check_refused(f"{tmp_path}/gone.csv: there is no such file", read, tmp_path / "gone.csv")


def test_ms_marco(tmp_path, monkeypatch):
    """Selected passages are positives. And without the hub."""
    rows = []
    for i in range(60):
        texts = [f"wrong {i}", f"right {i}"]
        passages = {"passage_text": texts, "is_selected": [0, int(i % 5 > 0)]}
        rows.append({"query": f"query {i}", "passages": passages})
    load = mock.Mock(return_value=Dataset.from_list(rows))
    monkeypatch.setattr("datasets.load_dataset", load)
    options = ["--phase1_data=ms_marco", "--phase2_data=ms_marco"]
    found = read(tmp_path / "a", *options)
    load.assert_called_once_with("microsoft/ms_marco", "v1.1", split="train")
    numbers = [i for i in range(60) if i % 5 > 0]  # nothing is selected for the others
    assert pairs_of(found) == {(f"query {i}", f"right {i}") for i in numbers}
    assert len(wrong_of(found)) == len(found.pairs)
    assert wrong_of(found) <= {(f"query {i}", f"wrong {i}") for i in numbers}

    load.side_effect = ConnectionError("no route")
    check_refused("ms_marco cannot.*no route.*download: pydocs", read, tmp_path / "a", *options)


REFUSED = {  # file: its content, and a part of what is said of it
    "a.xlsx": ("x", "expected an ending of jsonl json"),
    "quote.csv": (replaced("10,document", '10,"document'), "inside string starting at row 11"),
    "commas.csv": (replaced("document", "red, document"), "columns query .*; in a .csv commas"),
    "semicolon.csv": (table(records(), ";"), "columns query;positive;negative.*csv commas"),
    "cp1252.csv": (replaced("query 1", "caf\xe9").encode("cp1252"), "'utf-8' codec"),
    "ragged.csv": (table(records()) + "a,b,c,d\n", "in line 42, saw 4; .*quotes around texts with"),
    "none.jsonl": (lines(records(query=None)), "row 1: query is missing or empty"),
    "number.jsonl": (lines(records(positive=3)), "row 1: positive is '3', expected a text"),
    "graded.csv": (table([*records(score=0), *records(score=1)]), "the column score grade"),
    "lists.csv": (replaced("document 10", '"[""a"", ""b""]"'), "row 11: positive is .*list in .js"),
    "cut.jsonl.gz": (gzip.compress(lines(records()).encode())[:-30], "ended before"),
    "empty.jsonl": ("", "cannot be read: it has no rows"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_are_refused(name, tmp_path):
    """By name, with the line and what would be right."""
    content, said = REFUSED[name]
    write(tmp_path / name, content)
    check_refused(f"{tmp_path}/{name}.*{said}", read, tmp_path / name)


def test_nothing_held_out_is_trained_on(tmp_path, caplog):
    """All answers of a query are held out, in rows of other groups, too; nor are they trained on
    where they answer other queries. What is left out is counted."""
    rows = []
    for i in range(130):
        for part in ("document", "second"):
            row = {"query": f"query {i}", "positive": f"{part} {i}", "group": f"{part} {i}"}
            rows.append({**row, "negatives": [f"document {i * 14 % 130}", "nothing"]})
        rows.append({"query": f"again {i}", "positive": f"second {i}"})
        rows.append({"query": f"document {i}", "positive": f"query {i}"})
    write(tmp_path / "a.jsonl", lines(rows))
    found = read(tmp_path / "a.jsonl")
    queries, answers, distractors = held_out(found)
    used = decoded(found, found.phase1) | decoded(found, found.pairs[:, :2])
    used |= decoded(found, found.negatives)
    assert len(queries | answers) > 60 and len(used) > 150
    assert not (queries | answers) & used
    assert len(found.held_out_documents) == len(answers | distractors)
    for text in queries:
        kind, number = text.split()
        if kind == "query":
            assert {f"document {number}", f"second {number}"} <= answers
    assert not pairs_of(found) & wrong_of(found)
    left_out = 4 * 130 - len(pairs_of(found))
    assert left_out > 20
    assert f"{left_out} pairs are left out, since a text of theirs is held out" in caplog.text


def two_answers(rows_of_a_group):
    """Rows of 130 queries with two documents each; of two wrong ones one is that of all."""
    rows = []
    for i in range(130):
        row = {"query": f"query {i}", "positive": [f"document {i}", f"second {i}"]}
        row["negatives"] = [f"document {i * 7 % 130}", "nothing"]
        rows.append({**row, "group": i // rows_of_a_group})
    return rows


def test_the_split(tmp_path):
    """The same in any order, with so many distractors; a group is held out together."""
    options = ["--eval_fraction=0.5", "--eval_samples=20", "--eval_distractors=30"]
    write(tmp_path / "a.jsonl", lines(two_answers(1)))
    write(tmp_path / "a.txt", "\n".join(f"text {i}" for i in range(2000)))
    found = read(tmp_path / "a.jsonl", *options, f"--phase1_data={tmp_path}/a.txt")
    queries, answers, distractors = held_out(found)
    assert [len(queries), len(answers), len(distractors)] == [20, 40, 30]
    assert "nothing" in distractors
    assert len(found.pairs) == 2 * 110
    assert len(found.negatives) <= 2 * 110  # not anew for each answer of a query
    assert len(found.phase1) == 2000

    write(tmp_path / "other.jsonl", lines(reversed(two_answers(1))))
    other = read(tmp_path / "other.jsonl", *options, "--eval_distractors=0")
    assert held_out(other)[0] == queries
    assert len(other.held_out_documents) == 40

    # phase 1 does not see other texts of held-out groups, either
    write(tmp_path / "groups.jsonl", lines(two_answers(10)))
    write(tmp_path / "pages.jsonl", lines([{"text": f"page {i}", "group": i} for i in range(13)]))
    found = read(tmp_path / "groups.jsonl", *options, f"--phase1_data={tmp_path}/pages.jsonl")
    groups = {int(text.split()[1]) // 10 for text in held_out(found)[0]}
    assert len(found.held_out_queries) == 10 * len(groups) == 20
    assert len(found.phase1) == 13 - 2

    # a file of a collection in BEIR's layout: its texts begin with their titles
    pages = [{"_id": f"{i}", "title": f"page {i}", "text": "empty"} for i in range(9)]
    write(tmp_path / "corpus.jsonl", lines([*pages, {"_id": "9", "title": "page 9", "text": ""}]))
    found = read(tmp_path / "a.jsonl", *options, f"--phase1_data={tmp_path}/corpus.jsonl")
    assert decoded(found, found.phase1) == {"page 9", *[f"page {i} empty" for i in range(9)]}

    write(tmp_path / "one.jsonl", lines(records()[:1]))  # nothing to measure by
    check_refused("none may be 0", read, tmp_path / "one.jsonl")
