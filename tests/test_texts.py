"""What train_ddp.py reads: files of all kinds, odd ones, the hub; and what it holds out."""

import gzip
import json
from types import SimpleNamespace

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
    """The split of what is read, with its texts."""
    args = arguments(path, *options)
    rows = script.read_sources(args, path.parent / "tables")
    texts, num_queries, arrays = script.split_texts(args, *rows)
    return SimpleNamespace(texts=texts, num_queries=num_queries, **arrays)


def decoded(found, numbers):
    return {found.texts[number] for number in np.ravel(numbers)}


def held_out(found):
    """Texts: queries, the documents that answer them, distractors."""
    parts = np.split(found.eval_texts, np.cumsum(found.eval_counts)[:2])
    return [decoded(found, part) for part in parts]


def pairs_of(found):
    """{(query, a document that answers it)}, held out or not"""
    pairs = [*found.pairs, *found.eval_texts[found.eval_pairs]]
    return {(found.texts[query], found.texts[document]) for query, document in pairs}


def wrong_of(found):
    """{(query, a document that does not answer it)} of those that are trained on"""
    wrong = set()
    for query in range(found.num_queries):
        begin, end = found.negatives_ptr[query : query + 2]
        wrong |= {(found.texts[query], found.texts[i]) for i in found.negatives[begin:end]}
    return wrong


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


def parquet(path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(in_lists()), path)


def packed(content):
    return gzip.compress(content.encode())


def replaced(old, new):
    """A table with other words; row i is in line i + 2."""
    return table(records()).replace(old, new)


def odd(**values):
    """Lines of which the eleventh has other values."""
    rows = records()
    rows[10].update(values)
    return lines(rows)


READ = {  # file: its content
    "a.jsonl": lines(records()),
    "list.json": json.dumps(records(), indent=1),
    "A.CSV": table(records()),
    "a.csv.gz": packed(table(records())),
    "a.tsv": table(records(), "\t"),
    "lists.parquet": parquet,
    "lists.jsonl": lines([*in_lists(), {"query": "q", "positive": []}]),
    "arrays.jsonl.gz": packed(lines([list(row.values()) for row in records()])),
    "spreadsheet.csv": "\ufeff" + table(records(), end="\r\n"),
    "numbered.csv": replaced("other", ",other").replace("negative", "negative_1,negative_2"),
    "names.csv": replaced("query,positive", "anchor,answer"),
    "unread.csv": table(records(hard="x", id="7")),
    "breaks.csv": table(records()) + '"query\n0",document 0,\n',
}
SAID = {  # of some of them
    "lists.jsonl": "1 rows have no answer, such as {} row 41",
    "unread.csv": "these columns are not read: hard, id",
    "breaks.csv": "1 rows have line breaks within quotes (stray quotes would swallow rows), such "
    "as {} row 41",
}


def write(path, content):
    if callable(content):
        content(path)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content, encoding="utf-8", newline="")


@pytest.mark.parametrize("name", READ)
def test_files_that_are_read(name, tmp_path, caplog):
    """The same pairs and negatives."""
    path = tmp_path / name
    write(path, READ[name])
    corpus = read(path)
    assert pairs_of(corpus) - {("query\n0", "document 0")} == PAIRS
    found = wrong_of(corpus)
    assert found == {(query, other) for query, other in WRONG if query in {q for q, _ in found}}
    assert len(corpus.pairs) > 20 and len(found) >= COUNT - corpus.eval_counts[0]
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == (name in SAID), warnings
    assert SAID.get(name, "").format(path) in "".join(warnings)


def test_several_files(tmp_path):
    for part in (0, 1):
        write(tmp_path / f"shard{part}.jsonl", lines(records()[part::2]))
    assert pairs_of(read(tmp_path / "shard*.jsonl")) == PAIRS


def test_texts_for_phase_1(tmp_path):
    write(tmp_path / "a.txt.gz", packed("\n\n".join(QUERIES)))
    found = read(tmp_path / "a.txt.gz")
    assert set(found.texts) == set(QUERIES)
    assert len(found.phase1) + found.eval_counts[1] == COUNT
    assert len(found.pairs) == 0


def test_quotes_of_a_tsv_are_texts(tmp_path):
    """As MS MARCO's files want: else two stray quotes would swallow the rows between them."""
    write(tmp_path / "a.tsv", table(records(), "\t").replace("document 1", '"document 1'))
    found = read(tmp_path / "a.tsv")
    assert len(pairs_of(found)) == COUNT
    assert ("query 1", '"document 1') in pairs_of(found)


# --------------------------------------------------------------------------------------------------
# Files that are refused


REFUSED = {  # file: its content, and a part of what is said of it
    "gone.csv": (None, "there is no such file"),
    "a.xlsx": ("x", ": expected an ending of jsonl json"),
    "quote.csv": (replaced("10,document", '10,"document'), "inside string starting at row 11"),
    "commas.csv": (replaced("document", "red, document"), "expected query and positive, in a .csv"),
    "semicolon.csv": (table(records(), ";"), "columns .'query;positive;negative.*separated by c"),
    "texts.jsonl": (lines([{"text": "t"}] * 9), "found the columns .'positive'.; expected query"),
    "blank.jsonl": (odd(positive=" "), "row 11: positive is missing or empty"),
    "none.jsonl": (odd(query=None), "row 11: query is missing or empty"),
    "number.jsonl": (odd(positive=["a", 3]), "row 11: positive is .*, expected a text"),
    "label.csv": (table(records(label=1)), "does the column label grade the pairs?"),
    "graded.csv": (table([*records(score=0), *records(score=1)]), "the column score grade"),
    "lists.csv": (replaced("document 10", '"[""a"", ""b""]"'), "row 11: positive is .*list in .js"),
    "array.jsonl": (lines([["a", "b"], ["c"]]), r"row 2: found \[.c.\], expected \[query, pos"),
    "half.jsonl": (odd(query="\ud83d"), "cannot be read: .*surrogate.* row 10 .rows count from 0"),
    "cut.jsonl.gz": (packed(lines(records()))[:-30], "cannot be read: .*ended before"),
    "plain.jsonl.gz": (lines(records()), "cannot be read: Not a gzipped file"),
    "empty.jsonl": ("", "empty.jsonl cannot be read: it has no rows"),
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


def test_numbers_of_rows_are_no_grades(tmp_path, caplog):
    rows = [{**row, "id": i} for i, row in enumerate(records())]
    write(tmp_path / "a.jsonl", lines(rows))
    assert pairs_of(read(tmp_path / "a.jsonl")) == PAIRS
    assert "these columns are not read: id" in caplog.text


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


def test_nothing_held_out_is_trained_on(tmp_path, caplog):
    """Also where it stands in other rows, or a query stands there as a document; that is said."""
    again = [{"query": f"again {i}", "positive": f"second {i}"} for i in range(130)]
    turned = [{"query": f"document {i}", "positive": f"query {i}"} for i in range(130)]
    write(tmp_path / "a.jsonl", lines([*two_answers(), *again, *turned]))
    found = read(tmp_path / "a.jsonl")
    queries, answers, distractors = held_out(found)
    used = decoded(found, found.phase1) | decoded(found, found.pairs)
    used |= decoded(found, found.negatives)
    assert len(queries | answers) > 60 and len(used) > 150
    assert not (queries | answers) & used
    assert not answers & distractors
    assert not pairs_of(found) & wrong_of(found)
    left_out = 4 * 130 - len(pairs_of(found))
    assert left_out > 20
    assert f"{left_out} pairs are left out, since a text of theirs is held out" in caplog.text


def test_answers_in_other_rows_are_held_out(tmp_path):
    """Of a held-out query, in other groups, too."""
    rows = []
    for i in range(60):
        for part in ("a", "b"):
            row = {"query": f"query {i}", "positive": f"document {i} {part}"}
            rows.append({**row, "group": f"group {i} {part}"})
    write(tmp_path / "a.jsonl", lines(rows))
    found = read(tmp_path / "a.jsonl")
    queries, answers, _ = held_out(found)
    numbers = {text.split()[1] for text in queries}
    assert answers == {f"document {i} {part}" for i in numbers for part in "ab"}
    assert len(found.eval_pairs) == 2 * len(queries)


def test_negatives_that_are_positives(tmp_path, caplog):
    """Of the same query, there or in another row: they are counted."""
    rows = records()
    rows[3]["negative"] = "document 3"
    rows.append({"query": "query 4", "positive": "other 4", "negative": "x"})
    write(tmp_path / "a.jsonl", lines(rows))
    read(tmp_path / "a.jsonl", "--eval_fraction=0.1")
    assert "2 negatives are left out: they are also positives of their query" in caplog.text


def test_the_split(tmp_path):
    """The same in any order; distractors as many as asked for, those first that are said to be
    wrong; a group is held out together; texts of phase 1 are not held out if there are queries."""
    options = ["--eval_fraction=0.5", "--eval_samples=20", "--eval_distractors=30"]
    write(tmp_path / "a.jsonl", lines(two_answers()))
    write(tmp_path / "a.txt", "\n".join(f"text {i}" for i in range(2000)))
    found = read(tmp_path / "a.jsonl", *options, f"--phase1_data={tmp_path}/a.txt")
    assert found.eval_counts.tolist() == [20, 40, 30]
    queries, _, distractors = held_out(found)
    assert "nothing" in distractors
    assert len(found.pairs) == 2 * 110
    assert len(found.phase1) == 2000

    write(tmp_path / "other.jsonl", lines(reversed(two_answers())))
    other = read(tmp_path / "other.jsonl", *options, "--eval_distractors=0")
    assert held_out(other)[0] == queries
    assert other.eval_counts.tolist() == [20, 40, 0]

    write(tmp_path / "groups.jsonl", lines(two_answers(group=lambda i: i // 10)))
    found = read(tmp_path / "groups.jsonl", *options)
    groups = {int(text.split()[1]) // 10 for text in held_out(found)[0]}
    assert found.eval_counts[0] == 10 * len(groups) == 20
    # nor does phase 1 see other texts of these groups
    pages = [{"text": f"page {i}", "group": i} for i in range(13)]
    write(tmp_path / "pages.jsonl", lines(pages))
    found = read(tmp_path / "groups.jsonl", *options, f"--phase1_data={tmp_path}/pages.jsonl")
    assert len(found.phase1) == 13 - 2


def test_a_query_with_many_answers(tmp_path):
    """What is kept grows with the rows, not with their square."""
    rows = records()
    for i in range(3000):
        rows.append({"query": "sports", "positive": f"news {i}", "negative": f"other {i}"})
    write(tmp_path / "a.jsonl", lines(rows))
    found = read(tmp_path / "a.jsonl", "--eval_samples=20")
    assert len(found.pairs) > 3000
    arrays = [value for value in vars(found).values() if isinstance(value, np.ndarray)]
    assert sum(map(len, arrays)) < 6 * len(rows)


def test_ms_marco(tmp_path, monkeypatch):
    """Selected passages are positives. Its training rows are split as others are."""
    from datasets import Dataset

    def load_dataset(path, config, split):
        assert (path, config, split) == ("microsoft/ms_marco", "v1.1", "train")
        rows = []
        for i in range(60):
            passages = {"passage_text": [f"wrong {i}", f"right {i}"]}
            passages["is_selected"] = [0, int(i % 5 > 0)]
            rows.append({"query": f"query {i}", "passages": passages})
        return Dataset.from_list(rows)

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    found = read(tmp_path / "a", "--phase1_data=ms_marco", "--phase2_data=ms_marco")
    numbers = [i for i in range(60) if i % 5 > 0]  # nothing is selected for the others
    assert pairs_of(found) == {(f"query {i}", f"right {i}") for i in numbers}
    assert 5 < found.eval_counts[0] < 30
    wrong = wrong_of(found)
    assert len(wrong) == len(found.pairs)
    assert wrong <= {(f"query {i}", f"wrong {i}") for i in numbers}


def test_without_the_hub(tmp_path, monkeypatch):
    def load_dataset(*args, **options):
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    with pytest.raises(script.InputError, match="ms_marco cannot.*no route.*download: pydocs"):
        read(tmp_path / "a", "--phase1_data=ms_marco", "--phase2_data=ms_marco")


def test_rows_above_the_limit_are_said(tmp_path, caplog):
    caplog.set_level("INFO")
    write(tmp_path / "a.jsonl", lines(records()))
    found = read(tmp_path / "a.jsonl", "--max_samples_phase1=20", "--max_samples_phase2=30")
    assert "a.jsonl: 30 of 40 rows are read" in caplog.text
    assert len(pairs_of(found)) == 30
    assert len(found.phase1) <= 2 * 20
