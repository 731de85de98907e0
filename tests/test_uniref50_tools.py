"""How run_train_uniref50_ddp.py reads a file; tools/sample_uniref50.py, as a user meets it."""

import bz2
import gzip
import hashlib
import io
import itertools
import json
import lzma
import random
import re
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import call_script, import_tool, parse_arguments
from runs import Task
from scipy.stats import entropy

import run_train_uniref50_ddp as script

sampler = import_tool("sample_uniref50")

LETTERS = "ACDEFGHIKLMNPQRSTVWYXBUZOJ"
RATIO = 0.2


# --------------------------------------------------------------------------------------------------
# Reading


def some_sequences(count, seed=0, longest=150):
    draw = random.Random(seed)
    return ["".join(draw.choices(LETTERS, k=draw.randint(1, longest))) for _ in range(count)]


def fasta(sequences, width=60):
    lines = []
    for number, sequence in enumerate(sequences):
        lines.append(f">UniRef50_{number} n=3 >x")
        for start in range(0, len(sequence), width):
            lines.append(sequence[start : start + width])
    return "\n".join(lines) + "\n"


def is_valid(sequence):
    tokens = bytes(5 + LETTERS.index(letter) for letter in sequence)
    digest = hashlib.blake2b(tokens, digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64 < RATIO


def split_of(sequences):
    valid = [sequence for sequence in sequences if is_valid(sequence)]
    return {"train": [s for s in sequences if not is_valid(s)], "valid": valid}


def prepare(source, *options):
    """({part: sequences}, meta.json, and what was left out) of what is kept of a file, read without
    the script's code"""
    words = [f"--datafile={source}", f"--val_ratio={RATIO}", f"--cache_dir={source}.cache"]
    folder = script.prepare(parse_arguments(script, *words, *options))
    found = {}
    for part in ("train", "valid"):
        tokens = (folder / f"{part}.tokens").read_bytes()
        offsets = np.fromfile(folder / f"{part}.offsets", np.int64).tolist()
        assert offsets[0] == 0 and offsets[-1] == len(tokens)
        rows = [tokens[start:end] for start, end in itertools.pairwise(offsets)]
        assert all(row[0] == 0 and row[-1] == 2 for row in rows)
        found[part] = ["".join(LETTERS[i - 5] for i in row[1:-1]) for row in rows]
    meta = json.loads((folder / "meta.json").read_text())
    return found, {**meta, "bad": (folder / "skipped.txt").read_text().splitlines()}


def saved(content, **options):
    file = io.BytesIO()
    torch.save(content, file, **options)
    return file.getvalue()


def forms_of(sequences):
    """The same sequences in every form."""
    plain = fasta(sequences)
    text = "\n".join(sequences)
    half = len(plain) // 2
    stops = re.sub(r"\n(?=>|\Z)", "*\n", fasta(sequences, 10**6))
    halves = gzip.compress(plain[:half].encode()) + gzip.compress(plain[half:].encode())
    return {
        "fasta": plain.encode(),
        "lower case, narrow": fasta(sequences, 7).lower().encode(),
        "stops, blank lines": ("\n\n" + stops.replace("\n", "\n \n")).encode(),
        "titles in latin-1": plain.encode().replace(b"n=3", b"\xe4 \x85 \x1c"),
        "Windows": plain.replace("\n", "\r\n").encode(),
        "old Mac": plain.replace("\n", "\r").encode(),
        "byte-order mark": b"\xef\xbb\xbf" + plain.encode(),
        "gz in two parts": halves + bytes(100),
        "bz2": bz2.compress(plain.encode()),
        "xz": lzma.compress(plain.encode()),
        "text": text.encode(),
        "text, gz, Windows": gzip.compress(text.replace("\n", "*\r\n\r\n").encode()),
        "list": saved(sequences),
        "list, old": saved(sequences, _use_new_zipfile_serialization=False),
        "protein_seq": saved([{"protein_seq": s, "length": 1} for s in sequences]),
        "sequence": saved([{"sequence": s[:9] + "\n" + s[9:]} for s in sequences]),
        "data": saved({"data": [{"text": s} for s in sequences]}),
    }


SEQUENCES = some_sequences(150)
FORMS = forms_of(SEQUENCES)


@pytest.mark.parametrize("form", FORMS)
def test_every_form(tmp_path, form):
    """No letter is deleted (the original's tokenizer dropped X B U Z O J)."""
    path = tmp_path / "file"  # a name that says nothing
    path.write_bytes(FORMS[form])
    found, meta = prepare(path)
    train = split_of(SEQUENCES)["train"]
    assert found == split_of(SEQUENCES)
    assert meta["letters"] == ["".join(train).count(letter) for letter in LETTERS]
    lengths = [len(sequence) for sequence in train]
    assert meta["lengths"] == {str(n): lengths.count(n) for n in sorted(set(lengths))}
    assert [other.name for other in (tmp_path / "file.cache").glob("unfinished-*")] == []


# a bad record, and what is said
DAMAGE = [
    (">a\nMKV\nM-K.\nAAA\n", "'-.' among the residues"),
    (">empty\n", "no residues"),
    (">stop alone\n*\n", "no residues"),
    (">b\nMK*\nMKV\n", "'*' among the residues"),
    (">c\nMKV**\n", "'*' among the residues"),
    (">umlaut\nMKV\nMKä\n", "'ä' among the residues"),
    (">two in a line\nMKV>d\n", "'>' among the residues"),
    (">binary\nMK\1V\n", "'\\x01' among the residues"),
]


def test_bad_records_are_listed_with_their_lines(tmp_path):
    good = some_sequences(66, seed=2)
    text = "\n \n"
    problems = []
    for number, record in enumerate(re.split("(?=\n>)", "\n" + fasta(good))[1:]):
        text += record.strip() + "\n"
        if number < 30:
            bad, what = DAMAGE[number % len(DAMAGE)]
            problems.append(f"line {text.count(chr(10)) + 1} {bad.splitlines()[0]}: {what}")
            text += bad

    (tmp_path / "x").write_text(text)
    with pytest.raises(script.InputError) as caught:
        prepare(tmp_path / "x")
    first, *lines = str(caught.value).split("\n  ")
    assert "30 records are not proteins; expected FASTA" in first
    assert lines == problems[:20]
    found, meta = prepare(tmp_path / "x", "--skip_bad_data")
    assert found == split_of(good) and meta["bad"] == problems


def test_bad_entries_of_lists(tmp_path):
    good = some_sequences(60, seed=3)
    torch.save([*good[:30], "", 5, {"name": "MKV"}, "MK-V", *good[30:]], tmp_path / "x")
    keys = "has no protein_seq, sequence or text"
    said = [
        "entry 30: no residues",
        "entry 31 is no text, but int: no residues",
        f"entry 32 {keys}: no residues",
    ]
    said.append("entry 33: '-' among the residues")
    found, meta = prepare(tmp_path / "x", "--skip_bad_data")
    assert found == split_of(good) and meta["bad"] == said


def nucleotides(letters):
    draw = random.Random(1)
    return "".join(f">c{i}\n{''.join(draw.choices(letters, k=200))}\n" for i in range(50))


FASTQ = "".join(f"@r{i}\n" + 3 * "ACGTACGTAA\n" + "+\n" + 3 * "IIIIIIIIII\n" for i in range(60))
PLAIN = fasta(some_sequences(3000, seed=4)).encode()
PACKED = gzip.compress(PLAIN)
HOSTILE = {
    "dna": (nucleotides("ACGT").encode(), "it is DNA or RNA: 100% of its letters"),
    "pir": (b">P1;CRAB\nalpha crystallin\nMKVLLAG*\n", "it is PIR .>P1;CRAB., whose second lines"),
    "fastq": (FASTQ.encode(), "it is FASTQ"),
    "header": (b"Sequence\r\nMKV\nMKL\n", "'Sequence', a header, before the first sequence"),
    "another header": (b"aaseq\nMKV\nMKL\n", "'aaseq', a header, before the first sequence"),
    "nul": (PLAIN.replace(b"_9 ", b"_9\0 "), r"a NUL byte on line \d\d"),
    "empty": (b" \n\n", "it is empty"),
    "words": (b"\n \nsome words\n>a\nMKV\n", "'some words' before the first '>'"),
    "one": (b">a\nMKV\n", "1 proteins to train on, 0 held out, 0 bad ones; expected more"),
    "zip": (b"PK\3\4" + bytes(100), "expected one that torch.save has written .unpack"),
    "weights": (saved({"model": torch.zeros(3)}), "expected a list"),
    "zst": (b"(\xb5/\xfd" + bytes(9), "zst"),
    "cut": (PACKED[: len(PACKED) // 2], "cannot be read to its end, expected a whole file: "),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files(tmp_path, name):
    """Nothing is kept of them. Only bad records can be left out, and these are bad files."""
    data, what = HOSTILE[name]
    (tmp_path / name).write_bytes(data)
    for options in ([], ["--skip_bad_data"]):
        with pytest.raises(script.InputError, match=what):
            prepare(tmp_path / name, *options)
    assert not [*tmp_path.glob("*.cache/*")]


def test_want_of_memory_is_no_fault_of_the_file(tmp_path, monkeypatch):
    (tmp_path / "x").write_bytes(PLAIN)
    monkeypatch.setattr(script, "open_text", mock.Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        prepare(tmp_path / "x")


# --------------------------------------------------------------------------------------------------
# Sampling


@pytest.fixture(scope="module")
def trained(tmp_path_factory, server):
    """A folder with proteins.fasta and run/, a tiny run on them."""
    folder = tmp_path_factory.mktemp("sample")
    task = Task("run_train_uniref50_ddp", folder, server, "--sampling_method=simple")
    task.run(folder / "run")
    return folder


def sample(trained, out, options):
    """[(header, sequence)] of the file that the tool writes."""
    words = f"{trained}/run/best.pt --device=cpu --out={out} {options}"
    sampler.main(words.split())
    found = [record.partition("\n") for record in out.read_text().split(">")[1:]]
    return [(header, body.replace("\n", "")) for header, _, body in found]


def test_samples(trained, tmp_path, capsys):
    """Of the lengths of the data. They depend on seed and number, not on the batch."""
    found = []
    for i, options in enumerate(
        ["--batch_size=2", "", "--seed=1", "--temperature=0.1", "--method=simple --steps=4"]
    ):
        method = "" if "simple" in options else "--method=rigorous"
        records = sample(trained, tmp_path / f"{i}", f"--count=6 {method} {options}")
        for header, body in records:
            assert 20 <= len(body) <= 60 and set(body) <= set("ACDEFG")  # those of the data
            assert f"length={len(body)}" in header
        found.append([body for _, body in records])
        assert len(found[i]) == 6
        assert i == 0 or (found[i] == found[0]) == (i == 1)
    sample(trained, tmp_path / "short", f"--length=9 --count=2 --compare={trained}/proteins.fasta")
    said = capsys.readouterr().out
    for metric in ("1mer_js", "3mer_js", "uniqueness", "nearest", "nearest, shuffled"):
        assert re.search(rf"^{metric} +\d", said, re.MULTILINE)
    assert "method=simple" in (tmp_path / "short").read_text()  # that of the run


def test_filling_in(trained, tmp_path):
    text = ">m a motif\nACD???\nFGHI*\n>n\nk?\n"
    (tmp_path / "motif.fasta").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    records = sample(trained, tmp_path / "out", f"--infill={tmp_path}/motif.fasta --count=3")
    assert [header.split()[0] for header, _ in records] == "m/1 m/2 m/3 n/1 n/2 n/3".split()
    for _, body in records[:3]:
        assert body[:3] == "ACD" and body[6:] == "FGHI" and "?" not in body
    assert all(body[0] == "K" and len(body) == 2 for _, body in records[3:])


def test_wrong_uses_of_the_sampler(trained, tmp_path):
    (tmp_path / "wrong.fasta").write_text(">a\nM?K\n>bad one\nM*?J-\n")
    (tmp_path / "full.fasta").write_text(">a\nMKV\n")
    (tmp_path / "words.fasta").write_text("MKV\n>a\nM?\n")
    (tmp_path / "long.fasta").write_text(f">a\n{'M' * 70}?\n")
    torch.save({"script": "other.py"}, tmp_path / "other.pt")
    cases = {
        f"--infill={tmp_path}/wrong.fasta": "line 3 >bad one: '\\*-' among the residues",
        f"--infill={tmp_path}/full.fasta": "line 1 >a has no `\\?`",
        f"--infill={tmp_path}/words.fasta": "'MKV' before the first '>'",
        f"--infill={tmp_path}/long.fasta": "a has 71 residues; the network knows at most 46",
        f"--infill={tmp_path}/full.fasta --length=5": "give one of the two",
        "--infill=x": "there is no such file",
        "--length=47": "knows at most 46 residues",
        f"--compare={tmp_path}/full.fasta": "expected proteins, and some that are held out",
        "--compare=x": "there is no such file",
        "--temperature=0": "must be from 1e-06",
        "--out=/no/such/folder/x": "there is no folder",
        f"--out={tmp_path}/full.fasta": "exists: give another",
    }

    for options, reason in cases.items():
        with pytest.raises(sampler.InputError, match=reason):
            sample(trained, tmp_path / "x", options)
    with pytest.raises(sampler.InputError, match="expected best.pt or latest.pt of"):
        sampler.main([f"{tmp_path}/other.pt", "--device=cpu", f"--out={tmp_path}/x"])
    words = [tmp_path / "none.pt", "--device=cpu"]
    text = call_script("tools/sample_uniref50", *words, status=2)
    assert "there is no such file" in text and text.count("\n") == 1
    assert not (tmp_path / "x").exists()


def js(p, q):
    """The Jensen-Shannon divergence in nats."""
    p = np.array(p) / sum(p)
    q = np.array(q) / sum(q)
    return entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2


def test_metrics_by_hand():
    found = sampler.word_metrics(["AAAAC", "AAC", "AAC"], ["ACAC", "CCAA", "AAAAAAA"])
    # residues: A 8, C 3 against A 11, C 4
    assert found["1mer_js"] == pytest.approx(js([8, 3], [11, 4]))
    # AA AC CA CC within sequences
    assert found["2mer_js"] == pytest.approx(js([5, 3, 0, 0], [7, 2, 2, 1]))
    # AAA AAC ACA CAC CCA CAA
    assert found["3mer_js"] == pytest.approx(js([2, 3, 0, 0, 0, 0], [5, 0, 1, 1, 1, 1]))
    assert found["uniqueness"] == pytest.approx(2 / 3)

    found = sampler.word_metrics(["CAAAAC", "AAAACCCCCC", "AAA"], ["A"])  # which has no pairs
    assert "2mer_js" not in found


def test_likeness_by_hand():
    """Without gaps, at the best place, over the longer length."""
    held_out = ["ACDEFGHIKL", "WWWW"]
    assert sampler.likeness("ACDEFGHIKL", held_out) == 1
    assert sampler.likeness("DEFGH", held_out) == 0.5
    assert sampler.likeness("MMACDEFGHIKL", held_out) == pytest.approx(10 / 12)
    found = sampler.compare(["ACDMMMMIKL", "YYYY"], ["ACD"], held_out, 0)
    assert found["nearest"] == pytest.approx(0.6 / 2)
    assert found["nearest, held out"] == 0  # not to themselves


def test_more_samples_begin_with_the_same_lengths():
    few, many = [sampler.draw_lengths({"5": 1, "9": 2, "30": 1}, n, 0, 20) for n in (6, 60)]
    assert few.tolist() == many[:6].tolist()
    assert set(many) == {5, 9, 20}
