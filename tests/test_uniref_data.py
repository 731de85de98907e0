"""The data path of run_train_uniref50_ddp.py: --prepare, the prepared folder, the shipped sample."""

from __future__ import annotations

import collections
import gzip
import hashlib
import importlib.util
import itertools
import json
import os
import random
import re
import resource
import signal
import time
import tracemalloc
import zlib
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ROOT, forkserver

import run_train_uniref50_ddp as uniref

LETTERS = "ACDEFGHIKLMNPQRSTVWYXBUZOJ"
RATIO = 0.2


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    """Waiting for the disk is most of the time of a small prepare. Workers start with the third chunk."""
    monkeypatch.setattr(uniref.os, "fsync", lambda file: None)
    monkeypatch.setattr(uniref, "INLINE_CHUNKS", 2)


def some_sequences(count: int, seed: int = 0, longest: int = 150) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices(LETTERS, k=draw.randint(1, longest))) for _ in range(count)]


def fasta(sequences: list[str], width: int = 60) -> str:
    wrapped = [[s[i : i + width] for i in range(0, len(s), width)] for s in sequences]
    return "".join(f">UniRef50_{i} n=3 >x\n" + "\n".join(lines) + "\n" for i, lines in enumerate(wrapped))


def is_valid(sequence: str) -> bool:
    digest = hashlib.blake2b(sequence.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64 < RATIO


def prepare(source: Path | str, folder: Path, workers: int = 0, skip_bad: bool = False) -> None:
    args = Namespace(val_ratio=RATIO, num_workers=workers, skip_bad_data=skip_bad)
    uniref.prepare(str(source), str(folder), args)


def read_back(folder: Path) -> dict[str, list[str]]:
    """The sequences of each split, read without the code under test."""
    found = {}
    for split in ("train", "valid"):
        tokens = (folder / f"{split}.tokens").read_bytes()
        offsets = np.fromfile(folder / f"{split}.offsets", np.int64).tolist()
        assert offsets[0] == 0 and offsets[-1] == len(tokens)
        rows = [tokens[a:b] for a, b in itertools.pairwise(offsets)]
        assert all(row[0] == 0 and row[-1] == 2 for row in rows)
        found[split] = ["".join(LETTERS[i - 5] for i in row[1:-1]) for row in rows]
    return found


def split_of(sequences: list[str]) -> dict[str, list[str]]:
    valid = [s for s in sequences if is_valid(s)]
    return {"train": [s for s in sequences if not is_valid(s)], "valid": valid}


def write_forms(folder: Path, sequences: list[str]) -> list[Path]:
    """The same sequences in every form, under names that say nothing."""
    plain, text = fasta(sequences), "\n".join(sequences)
    ids = [[5 + LETTERS.index(letter) for letter in s] for s in sequences]
    rows = torch.full((len(ids), 160), 1)
    for row, found in zip(rows, ids, strict=True):
        row[: len(found)] = torch.tensor(found)
    untidy = "\r\n \r\n" + fasta(sequences, 7).lower().replace("\n", " *\r\n\r\n")
    untidy = re.sub(r" \*\r\n\r\n(?!>|\Z)", "\r\n", untidy).rstrip()  # a stop at the end of each, none inside
    half = len(plain) // 2
    forms = [plain, untidy, fasta(sequences, 10**6), gzip.compress(plain.encode()), text,
             gzip.compress(plain[:half].encode()) + gzip.compress(plain[half:].encode()) + bytes(100),
             "\n\n" + text.lower().replace("\n", "*\r\n\r\n") + " \n", gzip.compress(text.encode())]  # fmt: skip
    lists = [
        sequences,
        [{"protein_seq": s, "length": 1} for s in sequences],
        [{"sequence": s[:9] + "\n" + s[9:]} for s in sequences],
        {"data": [{"text": s} for s in sequences]},
        {"sequences": [{"prot_tokens": row} for row in rows]},
    ]
    paths = [folder / f"form{i}.dat" for i in range(len(forms + lists))]
    for path, form in zip(paths, forms, strict=False):
        path.write_bytes(form if isinstance(form, bytes) else form.encode())
    for path, data in zip(paths[len(forms) :], lists, strict=True):
        torch.save(data, path)
    return paths


def test_every_form_chunk_size_and_number_of_workers(tmp_path, monkeypatch):
    """FASTA, gz, text and torch files of the same sequences give the same arrays; the manifest describes them."""
    forkserver()  # with torch imported: workers start at once
    sequences = some_sequences(150)
    submitted = collections.Counter()

    class Counting(uniref.ProcessPoolExecutor):
        def submit(self, *args, **kwargs):
            submitted[path.name] += 1
            return super().submit(*args, **kwargs)

    monkeypatch.setattr(uniref, "ProcessPoolExecutor", Counting)
    expected = split_of(sequences)
    for number, path in enumerate(write_forms(tmp_path, sequences)):
        some = [(1, 0), (5000, 1), (1000, 2)] if number in (0, 5, 6, 10) else []  # plain, gz, text, a list
        for chunk, workers in [(97, 0), (4 << 20, 2), *some]:
            monkeypatch.setattr(uniref, "CHUNK_BYTES", chunk)
            prepare(path, tmp_path / "out", workers)
            assert read_back(tmp_path / "out") == expected, f"{path}, chunk {chunk}, {workers} workers"
        manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
        source, data = manifest["source"], path.read_bytes()
        assert (source["bytes"], source["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
        assert (source["name"], manifest["skipped"], manifest["val_ratio"]) == (path.name, 0, RATIO)
        for split, kept in expected.items():
            found = manifest["splits"][split]
            assert found["sequences"] == len(kept) and found["residues"] == sum(map(len, kept))
            assert found["letters"] == ["".join(kept).count(letter) for letter in LETTERS]
            assert found["lengths"] == {str(k): v for k, v in sorted(collections.Counter(map(len, kept)).items())}
            files = {kind: (tmp_path / "out" / f"{split}.{kind}").stat().st_size for kind in ("tokens", "offsets")}
            assert found["bytes"] == files
        lengths = [len(s) for s in sequences]
        assert (manifest["min_length"], manifest["max_length"]) == (min(lengths), max(lengths))
        assert manifest["mean_length"] == pytest.approx(np.mean(lengths))
    assert all(submitted[f"form{number}.dat"] > 3 for number in (0, 5, 6, 10)), "the workers got nothing to do"
    assert not list(tmp_path.glob(".out*"))


def test_split_is_by_hash_alone(tmp_path):
    sequences = some_sequences(400, seed=1)
    for order in (sequences, sequences[::-1], sorted(sequences)[100:]):
        (tmp_path / "x").write_text(fasta([s.lower() for s in order]))
        prepare(tmp_path / "x", tmp_path / "out")
        assert read_back(tmp_path / "out") == split_of(order)
    assert 40 < len(split_of(sequences)["valid"]) < 120


def test_no_letter_is_deleted(tmp_path):
    """The original's tokenizer dropped X B U Z O J, which splices chains."""
    (tmp_path / "x").write_text("".join(f">\nMA{letter}K\nxbuzoj{letter.lower()}*\n" for letter in LETTERS))
    prepare(tmp_path / "x", tmp_path / "out")
    found = read_back(tmp_path / "out")
    assert sorted(found["train"] + found["valid"]) == sorted(f"MA{letter}KXBUZOJ{letter}" for letter in LETTERS)


DAMAGE = [  # a damaged record, the line of it (from 0) that is at fault, what is said
    (">a\nMKV\nM-K.\nAAA\n", 2, "'-.' among the residues"),
    (">empty\n", 0, "no residues"),
    (">blank\n\n  \n", 0, "no residues"),
    (">stop alone\n*\n", 0, "no residues"),
    (">b\nMK*\nMKV\n", 1, "'*' among the residues"),
    (">c\nMKV**\n", 1, "'*' among the residues"),
    (">digits\n1 MKV\n4 AAA\n", 1, "'1' among the residues"),
    (">umlaut\nMKV\nMKä\n", 2, "'ä' among the residues"),
    (">two in a line\nMKV>d\n", 1, "'>' among the residues"),
    (">binary\nMK\0V\nMK\1V\n", 1, r"'\x00' among the residues"),
    (">old line end\nMK\rV\n", 1, r"'\r' among the residues"),
]


@pytest.fixture(scope="module")
def damaged(tmp_path_factory) -> tuple[Path, list[str], list[str]]:
    """A FASTA file with 3 of each kind of DAMAGE among good records; its problems; its good sequences."""
    good = some_sequences(66, seed=2)
    text, problems, kinds = "\n \n", [], DAMAGE * 3
    for number, record in enumerate(re.split("(?=\n>)", "\n" + fasta(good))[1:]):
        text += record[1:] + "\n"
        if number % 2 == 0:
            bad, line, what = kinds[number // 2]
            problems.append(f"line {text.count(chr(10)) + line + 1}: {what}")
            text += bad
    path = tmp_path_factory.mktemp("damaged") / "x"
    path.write_bytes(text.encode())
    return path, problems, good


@pytest.mark.parametrize("chunk, workers", [(100, 0), (4 << 20, 0), (700, 2)])
def test_damaged_records_are_listed_with_their_lines(damaged, tmp_path, monkeypatch, chunk, workers):
    forkserver()
    path, problems, good = damaged
    monkeypatch.setattr(uniref, "CHUNK_BYTES", chunk)
    with pytest.raises(ValueError) as caught:
        prepare(path, tmp_path / "out", workers)
    first, *lines = str(caught.value).splitlines()
    assert str(path) in first and f"{len(problems)} damaged records" in first and "--skip_bad_data" in first
    assert len(lines) == 21 and lines[20].strip() == f"... and {len(problems) - 20} more"
    for line, expected in zip(lines[:20], problems, strict=False):
        assert line.strip().startswith(expected) and "; expected" in line
    assert not list(tmp_path.iterdir())
    prepare(path, tmp_path / "out", workers, skip_bad=True)
    assert read_back(tmp_path / "out") == split_of(good)
    listed = (tmp_path / "out" / "skipped_records.txt").read_text().splitlines()
    assert len(listed) == len(problems)
    assert all(line.startswith(expected) for line, expected in zip(listed, problems, strict=True))
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["skipped"] == len(problems)


def test_damage_in_text_and_lists(tmp_path, monkeypatch):
    monkeypatch.setattr(uniref, "CHUNK_BYTES", 30)
    good = some_sequences(60, seed=3)
    (tmp_path / "x").write_text("\n".join([*good[:30], "", "MKV LLA", " ", "*", "MK>V", *good[30:], "MK1"]))
    ids = [{"prot_tokens": torch.tensor(row)} for row in ([5, 300, 6], [5, 6, 3, 1], [5, 1, 6])]
    torch.save([*good[:30], "", 5, {"name": "MKV"}, "MK-V", *ids[:2], *good[30:], ids[2]], tmp_path / "y")
    in_text = {32: "' ' among", 34: "no residues", 35: "'>' among", 66: "'1' among"}
    in_list = dict.fromkeys((30, 31, 32), "no residues") | {33: "'-' among", 34: "'?'", 35: "'?'", 66: "' ' among"}
    for name, place, problems in (("x", "line", in_text), ("y", "index", in_list)):
        with pytest.raises(ValueError) as caught:
            prepare(tmp_path / name, tmp_path / "out")
        lines = [line.strip() for line in str(caught.value).splitlines()[1:]]
        assert len(lines) == len(problems)
        for line, (number, what) in zip(lines, problems.items(), strict=True):
            assert line.startswith(f"{place} {number}: {what}"), line
        prepare(tmp_path / name, tmp_path / "out", skip_bad=True)
        assert read_back(tmp_path / "out") == split_of(good)


def test_text_before_the_first_header(tmp_path):
    good = some_sequences(60, seed=3)
    (tmp_path / "x").write_text("\n \nsome words\nmore\n" + fasta(good))
    with pytest.raises(ValueError, match=r"1 damaged records.*\n  line 3: b'some words\\nmore' before the first '>'"):
        prepare(tmp_path / "x", tmp_path / "out")
    prepare(tmp_path / "x", tmp_path / "out", skip_bad=True)
    assert read_back(tmp_path / "out") == split_of(good)


def test_damaged_gz(tmp_path):
    """Truncated: with skip_bad the whole records stay. Corrupt: always an error, what came before may be wrong too."""
    sequences = some_sequences(3000, seed=4)
    packed = gzip.compress(fasta(sequences).encode())
    (tmp_path / "short").write_bytes(data := packed[: len(packed) * 2 // 3])
    with pytest.raises(ValueError, match=r"--skip_bad_data.*\n  line \d+: the gz data are truncated"):
        prepare(tmp_path / "short", tmp_path / "out")
    prepare(tmp_path / "short", tmp_path / "out", skip_bad=True)
    found = read_back(tmp_path / "out")
    count = zlib.decompressobj(31).decompress(data).decode().count("\n>")  # the last is not whole
    assert found == split_of(sequences[:count]) and 1000 < count < 2500
    (listed,) = (tmp_path / "out" / "skipped_records.txt").read_text().splitlines()
    assert listed.startswith(f"line {fasta(sequences[:count]).count(chr(10)) + 1}: ")
    flipped = bytearray(packed)
    flipped[len(packed) // 2] ^= 255
    broken = {"flipped": bytes(flipped), "crc": packed[:-8] + bytes(8), "followed": packed + b"something"}
    for name, data in (broken | {"head": packed[:10] + b"\xff" * 100}).items():
        (tmp_path / name).write_bytes(data)
        for skip_bad in (False, True):
            with pytest.raises(ValueError, match="the gz data are corrupt"):
                prepare(tmp_path / name, tmp_path / "new", skip_bad=skip_bad)
        assert not (tmp_path / "new").exists()


def test_bad_sources_and_folders(tmp_path):
    (tmp_path / "x").write_text(fasta(some_sequences(100)))
    (tmp_path / "empty").write_text(" \n\n")
    (tmp_path / "image").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    (tmp_path / "pickle").write_bytes(b"PK\3\4" + bytes(100))
    torch.save({"model": torch.zeros(3)}, tmp_path / "weights")
    (tmp_path / "one").write_text(">a\nMKV\n")
    cases = {"gone": "no such file", "empty": "expected FASTA", "image": "PNG.*expected FASTA"}
    cases |= {"pickle": "expected a list", "weights": "'model'.*expected a list", "one": "expected some of both"}
    for name, what in cases.items():
        with pytest.raises(ValueError, match=f"{name}: .*{what}"):
            prepare(tmp_path / name, tmp_path / "out")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.txt").write_text("precious")
    with pytest.raises(ValueError, match="something else"):
        prepare(tmp_path / "x", tmp_path / "thesis")
    assert (tmp_path / "thesis" / "chapter1.txt").read_text() == "precious"
    prepare(tmp_path / "x", tmp_path / "new" / "deep" / "out")
    assert not list(tmp_path.glob(".*"))


def killed(source: str, folder: str, note: str) -> None:
    """prepare with two workers, killed after 10 of some 40 chunks; writes the ids of its workers to `note`."""
    import multiprocessing

    uniref.CHUNK_BYTES, uniref.INLINE_CHUNKS, chunks = 2000, 2, uniref.Source.chunks

    def dying(self):
        for number, chunk in enumerate(chunks(self)):
            if number == 10:
                Path(note).write_text(" ".join(str(child.pid) for child in multiprocessing.active_children()))
                time.sleep(1)  # they are idle now: nothing tells them that nobody reads their results
                os.kill(os.getpid(), signal.SIGKILL)
            yield chunk

    uniref.Source.chunks = dying
    prepare(source, Path(folder), workers=2)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_run_that_fails_or_is_killed_leaves_the_old_folder(tmp_path, monkeypatch, caplog):
    old, new = some_sequences(300, seed=5), some_sequences(900, seed=6)
    (tmp_path / "old").write_text(fasta(old))
    (tmp_path / "new").write_text(fasta(new))
    prepare(tmp_path / "old", tmp_path / "out")

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    def check() -> None:
        assert read_back(tmp_path / "out") == split_of(old)
        assert len(uniref.Proteins(tmp_path / "out", "train", verify=True)) == len(split_of(old)["train"])

    with monkeypatch.context() as patch:
        patch.setattr(uniref.os, "fsync", stop)  # all is written but the last step
        with pytest.raises(KeyboardInterrupt):
            prepare(tmp_path / "new", tmp_path / "out")
    check()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # no file grows beyond: like a full disk
    try:
        with pytest.raises(OSError, match="a byte per residue and 10 per sequence"):
            prepare(tmp_path / "new", tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    check()
    with monkeypatch.context() as patch:
        rename = Path.rename
        patch.setattr(Path, "rename", lambda a, b: stop() if a.suffix == ".tmp" else rename(a, b))
        with pytest.raises(KeyboardInterrupt):
            prepare(tmp_path / "new", tmp_path / "out")
    check()
    assert not list(tmp_path.glob(".out*"))
    process = forkserver().Process(target=killed, args=[str(tmp_path / name) for name in ("new", "out", "note")])
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    check()
    (left,) = tmp_path.glob(".out*")
    with pytest.raises(ValueError, match="no prepared data"):
        uniref.Proteins(left, "train")
    workers = [int(pid) for pid in (tmp_path / "note").read_text().split()]
    deadline = time.monotonic() + 10
    while (left_over := [pid for pid in workers if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left_over:
        os.kill(pid, signal.SIGKILL)
    assert len(workers) == 2 and not left_over, "workers outlive their parent"
    prepare(tmp_path / "new", tmp_path / "out")
    assert str(left) in caplog.text and read_back(tmp_path / "out") == split_of(new)


def test_records_longer_than_a_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr(uniref, "CHUNK_BYTES", 256)
    sequences = some_sequences(40, seed=7)
    for place in (0, 20, 39):
        sequences[place] = "".join(random.Random(place).choices(LETTERS, k=20_000))
    (tmp_path / "a").write_text(fasta(sequences))
    (tmp_path / "b").write_bytes(gzip.compress("\n".join(sequences).encode()))
    for name in "ab":
        prepare(tmp_path / name, tmp_path / "out")
        assert read_back(tmp_path / "out") == split_of(sequences)


def test_memory_does_not_grow_with_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(uniref, "CHUNK_BYTES", 1 << 16)
    block = fasta(some_sequences(500, seed=8, longest=1000)).encode()
    peaks = {}
    for times in (2, 40):
        (tmp_path / f"{times}").write_bytes(gzip.compress(block * times, 1))
        tracemalloc.start()
        prepare(tmp_path / f"{times}", tmp_path / "out")
        peaks[times] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peaks[40] < 1.2 * peaks[2] and peaks[40] < len(block) * 40 / 4, peaks


def test_chunks_are_not_read_far_ahead_of_the_writer():
    taken = []

    def items():
        for i in range(100):
            taken.append(i)
            yield i

    with ThreadPoolExecutor(2) as pool:
        for number, result in enumerate(uniref.run_ahead(pool, str, items(), 5)):
            assert result == str(number) and len(taken) <= number + 7
    assert number == 99


def test_proteins(tmp_path):
    sequences = some_sequences(300, seed=10)
    (tmp_path / "x").write_text("\n".join(sequences))
    prepare(tmp_path / "x", tmp_path / "out")
    for split, kept in split_of(sequences).items():
        proteins, draw = uniref.Proteins(tmp_path / "out", split, verify=True), np.random.default_rng(0)
        rows = draw.integers(0, len(kept), 50)
        lengths = proteins.lengths(rows)
        assert len(proteins) == len(kept) and lengths.dtype == np.int64
        assert lengths.tolist() == [len(kept[i]) + 2 for i in rows]
        start = draw.integers(0, lengths)
        length = draw.integers(0, lengths - start + 1)
        found = proteins.rows(rows, start, length)
        assert found.dtype == np.uint8 and found.shape == (50, length.max())
        for row, i, a, n in zip(found, rows, start, length, strict=True):
            tokens = [0, *(5 + LETTERS.index(letter) for letter in kept[i]), 2][a : a + n]
            assert row.tolist() == tokens + [1] * (len(row) - n)
        for a, n in ((-1, 2), (0, int(lengths[0]) + 1), (int(lengths[0]) - 1, 2)):
            with pytest.raises(IndexError):
                proteins.rows(rows[:1], np.array([a]), np.array([n]))
    tokens, offsets = tmp_path / "out" / "train.tokens", tmp_path / "out" / "train.offsets"
    whole, ends = tokens.read_bytes(), np.fromfile(offsets, np.int64)
    tokens.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=rf"train.tokens: {len(whole) - 1} bytes, {len(whole)} expected"):
        uniref.Proteins(tmp_path / "out", "train")
    swapped = [whole[1::-1] + whole[2:], whole[:-2] + whole[:-3:-1]]  # BOS or EOS is not where it must be
    changed = ((5, 31), (5, 4), (5, 0), (0, 5), (len(whole) - 1, 7))
    for data in swapped + [whole[:place] + bytes([value]) + whole[place + 1 :] for place, value in changed]:
        tokens.write_bytes(data)
        uniref.Proteins(tmp_path / "out", "train")
        with pytest.raises(ValueError, match="train sequences 0 to .* damaged"):
            uniref.Proteins(tmp_path / "out", "train", verify=True)
    tokens.write_bytes(whole)
    for place, value in (
        (0, 1),
        (3, ends[2]),
        (3, ends[4]),
        (4, 10**12),
        (4, -5),
        (7, ends[7] + 1),
        (-1, ends[-1] + 5),
        (-1, ends[-1] - 1),
    ):
        wrong = ends.copy()
        wrong[place] = value
        wrong.tofile(offsets)
        with pytest.raises(ValueError, match="train sequences 0 to .* damaged"):
            uniref.Proteins(tmp_path / "out", "train", verify=True)
    tokens.unlink()
    with pytest.raises(ValueError, match="train.tokens: no bytes"):
        uniref.Proteins(tmp_path / "out", "train")
    with pytest.raises(ValueError, match="--prepare"):
        uniref.Proteins(tmp_path, "train")


def test_sixty_million_sequences_open_at_once(tmp_path):
    """Sparse files of that size: nothing of them is read or copied."""
    count, size = 60_000_000, 17_000_000_000
    part = {"bytes": {"tokens": size, "offsets": 8 * count + 8}}
    (tmp_path / "manifest.json").write_text(json.dumps({"splits": {"train": part}}))
    for kind in ("tokens", "offsets"):
        (tmp_path / f"train.{kind}").touch()
        os.truncate(tmp_path / f"train.{kind}", part["bytes"][kind])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    proteins = uniref.Proteins(tmp_path, "train")
    assert len(proteins) == count and proteins.lengths(np.array([0, count - 1])).tolist() == [0, 0]
    assert tracemalloc.get_traced_memory()[1] < 1e5
    tracemalloc.stop()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # kB


def z_score(counts: np.ndarray, expected: np.ndarray, lost: int) -> float:
    """Chi-square of counts against what is expected, where that is at least 5, as a standard normal deviate."""
    enough = expected >= 5
    freedom = enough.sum() - lost
    return float((((counts - expected)[enough] ** 2 / expected[enough]).sum() - freedom) / np.sqrt(2 * freedom))


def test_known_source_of_the_check():
    """benchmarks/check_uniref50.py: its exact log-probabilities sum to one, its sequences follow its transitions."""
    spec = importlib.util.spec_from_file_location("check_uniref50", ROOT / "benchmarks" / "check_uniref50.py")
    check = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check)
    initial, transition = source = check.markov_source(3)
    assert np.allclose(initial @ transition, initial) and np.isclose(initial.sum(), 1) and initial.min() > 0.01
    every = [np.array(s) for s in itertools.product(range(20), repeat=3)]
    totals = [-3 * check.nats([s], source)[0] for s in every]
    assert np.isclose(np.exp(totals).sum(), 1)
    sequences = check.markov_sequences(3000, source, 1)
    assert {len(s) for s in sequences} == set(range(24, 65))
    statistic, freedom, distance = check.chi_square(sequences, transition)
    assert abs(statistic - freedom) < 5 * (2 * freedom) ** 0.5 and distance < 0.02
    assert check.chi_square(sequences, np.roll(transition, 1, axis=1))[0] > 100 * freedom
    rate = -(initial[:, None] * transition * np.log(transition)).sum()
    exact, error = check.nats(sequences, source)
    unigram = -(initial * np.log(initial)).sum()
    assert rate < exact < rate + 0.05 and error < 0.01 and unigram > rate + 0.7


def test_shipped_sample(tmp_path):
    path, readme = ROOT / "data" / "uniref_sample.fasta.gz", (ROOT / "data" / "README.md").read_text()
    assert path.stat().st_size < 100_000 and hashlib.sha256(path.read_bytes()).hexdigest() in readme
    prepare(path, tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    count, residues = (sum(part[key] for part in manifest["splits"].values()) for key in ("sequences", "residues"))
    assert f"{count} protein sequences" in readme and f"{residues:,} residues" in readme
    assert manifest["min_length"] >= 40 and manifest["max_length"] <= 600
    assert all(manifest["splits"]["train"]["letters"][:20]) and not any(manifest["splits"]["train"]["letters"][20:])
