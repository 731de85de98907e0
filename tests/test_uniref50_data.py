"""How run_train_uniref50_ddp.py reads a file."""

import bz2
import gzip
import hashlib
import io
import itertools
import lzma
import math
import random
import re
import textwrap

import numpy as np
import pytest
import torch
from helpers import parse_arguments, run_here
from runs import COMMON, TINY, Run

import run_train_uniref50_ddp as script

LETTERS = script.RESIDUES
RATIO = 0.2


def some_sequences(count, seed=0):
    """The first has all letters; X B U Z O J are as rare as they are in proteins."""
    draw = random.Random(seed)
    found = ["".join(draw.choices(LETTERS[:20], k=draw.randint(1, 150))) for _ in range(count)]
    return [LETTERS, *found[1:]]


def fasta(sequences, width=60):
    records = [f"n=3 >x\n{textwrap.fill(sequence, width)}\n" for sequence in sequences]
    return "".join(f">UniRef50_{number} {record}" for number, record in enumerate(records))


def is_valid(sequence):
    digest = hashlib.blake2b(sequence.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64 < RATIO


def prepare(source, *options):
    """(sequences, counts of residues) of a file, read without the script's code"""
    words = [f"--datafile={source}", f"--val_ratio={RATIO}", f"--cache_dir={source}.cache"]
    args = parse_arguments(script, *words, *options)
    folder = script.prepare(args)
    script.Proteins(folder, args)  # says what is left out

    tokens = (folder / "tokens").read_bytes()
    arrays = np.load(folder / "arrays.npz")
    offsets = arrays["offsets"].tolist()
    assert offsets[0] == 0 and offsets[-1] == len(tokens)
    rows = [tokens[start:end] for start, end in itertools.pairwise(offsets)]
    assert all(row[0] == script.BEGIN and row[-1] == script.END for row in rows)
    sequences = ["".join(LETTERS[token] for token in row[1:-1]) for row in rows]
    assert arrays["parts"].tolist() == [int(is_valid(s)) for s in sequences]
    return sequences, arrays["residue_counts"]


def saved(content):
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


SEQUENCES = some_sequences(150)
PLAIN = fasta(SEQUENCES).encode()
STOPS = re.sub(r"\n(?=>|\Z)", "*\n", fasta(SEQUENCES, 7).lower())  # at the end of each sequence
WINDOWS = ("\ufeff\n\n" + STOPS).replace("\n", "\r\n \r\n").encode()
NAMES = itertools.cycle(["protein_seq", "sequence", "text"])
FORMS = {  # the same sequences: {name of the file: its bytes}
    "plain": PLAIN,
    "windows.fasta": WINDOWS.replace(b"n=3", b"\xe4 \x85 \x1c"),
    "two_parts": gzip.compress(PLAIN[:99]) + gzip.compress(PLAIN[99:]) + bytes(100),
    "fasta.bz2": bz2.compress(PLAIN),
    "fasta": lzma.compress(PLAIN),
    "aligned.a3m.gz": gzip.compress(re.sub(rb"(?<=\n)([A-Z])", rb"-.\1", PLAIN)),
    "aligned.a2m": re.sub(rb"(?<=\n)([A-Z])", rb"..\1-", PLAIN),
    "table.csv": b"id,sequence,x\n" + b"".join(b"a,%s,1\n" % s.encode() for s in SEQUENCES),
    "rows.jsonl": b"".join(b'{"text": "%s"}\n' % s.lower().encode() for s in SEQUENCES),
    "lines.txt": "*\r\n\r\n".join(SEQUENCES).encode(),
    "texts.pt": saved({"data": SEQUENCES}),
    "sequences.pt": saved({"sequences": [{next(NAMES): s[:9] + "\n" + s[9:]} for s in SEQUENCES]}),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form(tmp_path, name):
    """No letter is deleted (the original's tokenizer dropped X B U Z O J)."""
    (tmp_path / name).write_bytes(FORMS[name])
    found, counts = prepare(tmp_path / name)
    assert found == SEQUENCES
    for part in (0, 1):
        text = "".join(s for s in SEQUENCES if is_valid(s) == part)
        assert counts[part].tolist() == [text.count(letter) for letter in LETTERS]


def test_bad_records_are_listed_with_their_lines(tmp_path, caplog):
    damage = {  # a bad record, and what is said
        ">a\nMKV\nM-K.\nAAA\n": "'-.' among the residues",
        ">empty\n": "no residues",
        ">b\nMK*\nMKV\n": "'*' among the residues",
        ">umlaut\nMKV\nMKä\n": "'ä' among the residues",
    }
    good = some_sequences(60, seed=2)
    text = "\n \n"
    problems = []
    for record, what in [*damage.items()] * 6:
        problems.append(f"x: line {text.count(chr(10)) + 1} {record.split()[0]}: {what}")
        text += record
    (tmp_path / "x").write_text(text + fasta(good))
    with pytest.raises(script.InputError) as caught:
        prepare(tmp_path / "x")
    lines = "\n  ".join(problems[:20])
    assert re.match(r"24 bad records \(expected FASTA.*\), such as:\n  ", str(caught.value))
    assert str(caught.value).endswith(lines)
    assert prepare(tmp_path / "x", "--skip_bad_data")[0] == good
    assert f"24 bad records are left out, such as:\n  {lines}" in caplog.text


def test_bad_entries_of_lists(tmp_path, caplog):
    """Also what pandas puts where a text is missing, whose letters would pass as residues."""
    good = some_sequences(60, seed=3)
    bad = ["", 5, None, math.nan, {"protein_seq": None}, {"name": "MKV"}]
    torch.save([*bad, "MK-V", *good], tmp_path / "x.pt")
    assert prepare(tmp_path / "x.pt", "--skip_bad_data")[0] == good
    for number in range(6):
        assert f"\n  x.pt: entry {number}: no residues" in caplog.text
    assert "\n  x.pt: entry 6: '-' among the residues" in caplog.text


def test_nucleic_acids_among_proteins_are_left_out(tmp_path, caplog):
    """Peptides of few kinds of residues are not: they are short, or have another letter."""
    good = [*some_sequences(60, seed=3), 20 * "G", 20 * "AG" + "S"]
    (tmp_path / "x").write_text(">rna\n" + 7 * "acU" + "\n" + fasta(good) + ">n\n" + 21 * "N")
    assert prepare(tmp_path / "x")[0] == good
    said = "2 records of A C G T U N alone are left out as DNA or RNA, such as x: line 1 >rna"
    assert said in caplog.text


WORDS_OF_TEXT = "some of our own words would be read as residues because each letter is one "
HOSTILE = {  # name: bytes, and a part of what is said
    "dna.fasta": (b">c\nACCATGTAGATTACAGATCATG\n" * 50, "expected proteins; 0% .* 50 records DNA"),
    "words.txt": (WORDS_OF_TEXT.replace(" ", "\n").encode(), "[12].% of the letters are X B"),
    "banner.fasta": (b"; release 2024_01\n>a\nMKV\n", "line 2: found >; expected it from line 1"),
    "damaged.parquet": (b"PAR1", "cannot be read: "),
    "headless.csv": (b"a,MKV\nb,MKK\n", "found the columns a, MKV; expected protein_seq"),
    "equal.fasta": (b">a\nMKV\n" * 9, "9 to train on, 0 held out, 0 to test, 0 in two"),
    "cut.fasta.gz": (gzip.compress(PLAIN)[:999], "cannot be read: "),
    "pickle.pt": (b"cos\nsystem\n(S'true'\ntR.", "cannot be read: "),
    "weights.pt": (saved({"model": torch.zeros(3)}), "expected a list, or a dict"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files(tmp_path, name):
    """One line, and nothing is kept of them. Only bad records can be left out."""
    data, what = HOSTILE[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(script.InputError, match=what) as caught:
        prepare(tmp_path / name, "--skip_bad_data")
    assert "\n" not in str(caught.value)
    assert not [*tmp_path.glob("*.cache/*")]


def test_files_to_validate_and_test_on(tmp_path, caplog):
    """They are not trained on, wherever else they stand; the test is made once, with the best."""
    options = TINY["run_train_uniref50_ddp"](tmp_path)
    records = (tmp_path / "proteins.fasta").read_text().split(">")[1:]
    for name, part in {"valid": records[:30], "test": [*records[25:60], "odd\nACDEFG\n"]}.items():
        (tmp_path / name).write_text("".join(f">{record}" for record in part))
    files = [f"--valid_file={tmp_path}/valid", f"--test_file={tmp_path}/test"]
    options = [*COMMON, *options, *files, f"--output_dir={tmp_path}/run", "--num_workers=0"]
    caplog.set_level("INFO")
    run_here(script, *options, "--n_iters=20")

    assert "65 sequences are left out, which are in the test or the validation" in caplog.text
    assert "740 sequences to train on, 25 held out, of which 25 are validated on" in caplog.text
    summary = Run(tmp_path / "run").summary
    assert summary["test"]["nelbo"] > 0 and summary["test"]["nelbo"] != summary["best"]["value"]
    assert summary["baselines"].keys() == {"unigram", "test_unigram"}
