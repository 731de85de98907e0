"""tools/prepare_uniref50.py and tools/sample_uniref50.py, as a user meets them."""

import contextlib
import gzip
import hashlib
import io
import itertools
import json
import random
import re
import resource
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ROOT, call_script, import_tool, write_proteins

tool = import_tool("prepare_uniref50")
sampler = import_tool("sample_uniref50")

LETTERS = "ACDEFGHIKLMNPQRSTVWYXBUZOJ"
RATIO = 0.2


# --------------------------------------------------------------------------------------------------
# prepare


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
    digest = hashlib.blake2b(sequence.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64 < RATIO


def split_of(sequences):
    valid = [sequence for sequence in sequences if is_valid(sequence)]
    return {"train": [s for s in sequences if not is_valid(s)], "valid": valid}


def prepare(source, folder, *options):
    """What the tool has written, read without its code."""
    words = [str(source), str(folder), f"--val_ratio={RATIO}", *options]
    tool.prepare(tool.parse_args(words))
    found = {}
    for part in ("train", "valid"):
        tokens = (folder / f"{part}.tokens").read_bytes()
        offsets = np.fromfile(folder / f"{part}.offsets", np.int64).tolist()
        assert offsets[0] == 0 and offsets[-1] == len(tokens)
        rows = [tokens[start:end] for start, end in itertools.pairwise(offsets)]
        assert all(row[0] == 0 and row[-1] == 2 for row in rows)
        found[part] = ["".join(LETTERS[i - 5] for i in row[1:-1]) for row in rows]
    return found


def forms_of(sequences):
    """The same sequences in every form: {what: bytes, or what torch.save gets}"""
    plain = fasta(sequences)
    text = "\n".join(sequences)

    half = len(plain) // 2
    stops = re.sub(r"\n(?=>|\Z)", "*\n", fasta(sequences, 10**6))
    return {
        "fasta": plain.encode(),
        "lower case, narrow": fasta(sequences, 7).lower().encode(),
        "stops, blank lines": ("\n\n" + stops.replace("\n", "\n \n")).encode(),
        "Windows": plain.replace("\n", "\r\n").encode(),
        "old Mac": plain.replace("\n", "\r").encode(),
        "byte-order mark": b"\xef\xbb\xbf" + plain.encode(),
        "gz": gzip.compress(plain.encode()),
        "gz in two parts": gzip.compress(plain[:half].encode())
        + gzip.compress(plain[half:].encode())
        + bytes(100),
        "text": text.encode(),
        "text, gz, Windows": gzip.compress(text.replace("\n", "*\r\n\r\n").encode()),
        "list": sequences,
        "protein_seq": [{"protein_seq": s, "length": 1} for s in sequences],
        "sequence": [{"sequence": s[:9] + "\n" + s[9:]} for s in sequences],
        "data": {"data": [{"text": s} for s in sequences]},
        "a dict of strings": {"sequences": sequences},
    }


SEQUENCES = some_sequences(150)
FORMS = forms_of(SEQUENCES)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_and_chunk_size(tmp_path, monkeypatch, form):
    """FASTA, gz, text and torch files of the same sequences give the same arrays. No letter is
    deleted (the original's tokenizer dropped X B U Z O J)."""
    path = tmp_path / "file"  # a name that says nothing
    if isinstance(FORMS[form], bytes):
        path.write_bytes(FORMS[form])
    else:
        torch.save(FORMS[form], path)
    for chunk in (97, 4 << 20):
        monkeypatch.setattr(tool, "CHUNK", chunk)
        monkeypatch.setattr(tool, "BLOCK", chunk)
        folder = tmp_path / f"out{chunk}"
        assert prepare(path, folder) == split_of(SEQUENCES), chunk

    meta = json.loads((folder / "meta.json").read_text())
    for name, size in meta["bytes"].items():
        data = (folder / name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (size, meta["sha256"][name])
    train = split_of(SEQUENCES)["train"]
    assert meta["train"] == {"sequences": len(train), "residues": sum(map(len, train))}
    assert meta["letters"] == ["".join(train).count(letter) for letter in LETTERS]
    lengths = [len(sequence) for sequence in train]
    assert meta["lengths"] == {str(n): lengths.count(n) for n in sorted(set(lengths))}
    assert not [*tmp_path.glob("*.tmp-*")]


def test_duplicates(tmp_path, monkeypatch, capsys):
    """Across the parts of a file that several processes read."""
    monkeypatch.setattr(tool, "SMALL", 0)
    monkeypatch.setattr(tool, "CHUNK", 20_000)
    monkeypatch.setattr(tool, "BLOCK", 20_000)
    sequences = some_sequences(3000, seed=1)
    (tmp_path / "x").write_text(fasta([*sequences, *reversed(sequences), *sequences[:50]]))
    found = prepare(tmp_path / "x", tmp_path / "out", "--remove_duplicates", "--workers=2")
    once = [*dict.fromkeys(sequences)]
    assert found == split_of(once)
    assert f"duplicates left out: {6050 - len(once):,}\n" in capsys.readouterr().out


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


@pytest.mark.parametrize("chunk", [100, 4 << 20])
def test_bad_records_are_listed_with_their_lines(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(tool, "CHUNK", chunk)
    monkeypatch.setattr(tool, "BLOCK", chunk)
    good = some_sequences(66, seed=2)
    text = "\n \n"
    problems = []
    for number, record in enumerate(re.split("(?=\n>)", "\n" + fasta(good))[1:]):
        text += record.strip() + "\n"
        if number < 30:
            bad, what = DAMAGE[number % len(DAMAGE)]
            problems.append(f"line {text.count(chr(10)) + 1}: {what}")
            text += bad

    (tmp_path / "x").write_text(text)
    with pytest.raises(tool.Problem) as caught:
        prepare(tmp_path / "x", tmp_path / "out")
    said = str(caught.value)
    assert "x: bad records: 30; expected letters" in said and "--skip_bad_data" in said
    assert "\n" not in said and said.endswith("; ".join([*problems[:20], "... and 10 more"]))
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert prepare(tmp_path / "x", tmp_path / "out", "--skip_bad_data") == split_of(good)
    listed = (tmp_path / "out/skipped_records.txt").read_text().split("\n")
    assert listed == [*problems, ""]
    assert json.loads((tmp_path / "out/meta.json").read_text())["skipped"] == 30


@pytest.mark.parametrize("form", ["text", "list"])
def test_bad_entries_of_text_and_lists(tmp_path, form):
    good = some_sequences(60, seed=3)
    if form == "text":
        bad = ["", "MKV LLA", " ", "*", "MK>V"]  # empty lines are not bad
        (tmp_path / "x").write_text("\n".join([*good[:30], *bad, *good[30:]]))
        said = ["line 32: ' ' among", "line 34: no residues", "line 35: '>' among"]
    else:
        torch.save([*good[:30], "", 5, {"name": "MKV"}, "MK-V", *good[30:]], tmp_path / "x")
        said = [f"index {number}: no residues" for number in (30, 31, 32)]
        said.append("index 33: '-' among")
    with pytest.raises(tool.Problem) as caught:
        prepare(tmp_path / "x", tmp_path / "out")
    assert f"bad records: {len(said)};" in str(caught.value)
    assert all(problem in str(caught.value) for problem in said)
    assert prepare(tmp_path / "x", tmp_path / "out", "--skip_bad_data") == split_of(good)


FASTQ = "@read1\nACGTACGT\n+\nIIIIFFFF\n@read2\nACGT\n+read2\nFFFF\n"
PACKED = gzip.compress(fasta(some_sequences(3000, seed=4)).encode())
HALF = len(PACKED) // 2
GZ = "damaged .gz file: fetch it again"
WEIGHTS = io.BytesIO()
torch.save({"model": torch.zeros(3)}, WEIGHTS)
HOSTILE = {
    "fastq": (FASTQ.encode(), "is FASTQ, whose qualities would pass for proteins; expected FASTA"),
    "empty": (b" \n\n", "is empty; expected FASTA or text"),
    "image": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "PNG.*; expected FASTA"),
    "utf16": (">a\nMKV\n".encode("utf-16"), "; expected FASTA"),
    "zip": (b"PK\3\4" + bytes(100), "expected a whole file of torch.save"),
    "weights": (WEIGHTS.getvalue(), "expected a list"),
    "one": (b">a\nMKV\n", "held out [01]; expected both"),
    "words": (b"\n \nsome words\n>a\nMKV\n", "b'some words' before its first '>'"),
    "cut": (PACKED[:HALF], GZ),
    "flipped": (PACKED[:HALF] + bytes([PACKED[HALF] ^ 255]) + PACKED[HALF + 1 :], GZ),
    "crc": (PACKED[:-8] + bytes(8), GZ),
    "more": (PACKED + b"words", GZ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files(tmp_path, name):
    """Errors that --skip_bad_data does not change; nothing is written."""
    data, what = HOSTILE[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(tool.Problem, match=f"{name}.*{what}"):
        prepare(tmp_path / name, tmp_path / "out", "--skip_bad_data")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_wrong_calls(tmp_path):
    """Nothing is written; a user sees one line and status 2."""
    (tmp_path / "x").write_text(fasta(some_sequences(50)))
    (tmp_path / "there").mkdir()
    (tmp_path / "there/thesis.txt").write_text("precious")
    cases = {
        ("gone", "out"): "gone: no such file",
        ("x", "there"): "there exists: remove it, or give another folder",
        ("x", "out", "--val_ratio=2"): "must be between 0 and 1",
    }
    for (source, out, *options), reason in cases.items():
        with pytest.raises(tool.Problem, match=reason):
            prepare(tmp_path / source, tmp_path / out, *options)
    status, text = call_script("tools/prepare_uniref50", tmp_path / "x")
    assert status == 2 and "required: out" in text and text.count("\n") == 1
    assert (tmp_path / "there/thesis.txt").read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there", "x"]


def test_a_full_disk(tmp_path):
    (tmp_path / "x").write_text(fasta(some_sequences(900)))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # no file grows beyond
    try:
        with pytest.raises(OSError):
            prepare(tmp_path / "x", tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def memory_of(pids):
    """Megabytes that these processes take together."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += int(re.search(r"^Pss: +(\d+)", rollup, re.MULTILINE)[1])
    return total / 1024


def test_killed_and_started_again(tmp_path, start):
    """No worker and no folder are left, and the second run names what is. It takes less than 300 MB
    for a file of 90 MB, all processes together."""
    block = fasta(some_sequences(4000, seed=8, longest=1000))
    (tmp_path / "x").write_bytes(gzip.compress((block * 45).encode(), 1))
    program = ROOT / "tools/prepare_uniref50.py"
    command = [sys.executable, program, tmp_path / "x", tmp_path / "out", "--workers=2"]
    killed = start(command)
    while not any(path.stat().st_size for path in tmp_path.glob("out.tmp-*/train.tokens")):
        assert killed.process.poll() is None, killed.text
        time.sleep(0.05)
    killed.process.kill()
    assert killed.is_gone(10)  # nothing tells the workers that nobody reads their results
    (left,) = tmp_path.glob("out.tmp-*")
    assert not (tmp_path / "out").exists()

    job = start(command)
    most = 0
    while job.process.poll() is None:
        most = max(most, memory_of(job.processes()))
        time.sleep(0.05)
    assert job.wait() == 0 and f"{left} is left of a run that was killed" in job.text
    assert (tmp_path / "out/meta.json").exists()
    assert 100 < most < 300


# --------------------------------------------------------------------------------------------------
# sample


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with data/ and run/, six steps on it."""
    folder = tmp_path_factory.mktemp("sample")
    write_proteins(folder / "proteins.fasta", 300)
    prepare(folder / "proteins.fasta", folder / "data")
    options = f"""--datafile={folder}/data --output_dir={folder}/run --hidden_size=32 --n_heads=2
        --n_blocks_prot=2 --cond_dim=16 --max_protein_len=64 --batch_size=8 --accum=1 --n_iters=6
        --lr=5e-3 --warmup=2 --eval_sequences=10 --samples_per_eval=0 --device=cpu"""
    status, text = call_script("run_train_uniref50_ddp", *options.split())
    assert status == 0, text
    return folder


def sample(trained, out, options):
    """[(header, sequence)] of the file that the tool writes."""
    words = f"{trained}/run/best.pt --device=cpu --out={out} {options}"
    sampler.run(sampler.parse_args(words.split()))
    found = [record.partition("\n") for record in out.read_text().split(">")[1:]]
    return [(header, body.replace("\n", "")) for header, _, body in found]


def test_samples(trained, tmp_path, capsys):
    """Of the lengths of the data. They depend on seed and number, not on the batch."""
    found = []
    for i, options in enumerate(
        ["--batch_size=2", "", "--seed=1", "--temperature=0.1", "--method=simple --steps=4"]
    ):
        records = sample(trained, tmp_path / f"{i}", f"--count=6 {options}")
        for header, body in records:
            assert 20 <= len(body) <= 60 and set(body) <= set(LETTERS)
            assert f"length={len(body)}" in header
        found.append([body for _, body in records])
        assert len(found[i]) == 6
        assert i == 0 or (found[i] == found[0]) == (i == 1)
    sample(trained, tmp_path / "short", f"--length=9 --count=2 --compare={trained}/data")
    said = capsys.readouterr().out
    for metric in ("1mer_js", "3mer_js", "repeats", "uniqueness"):
        assert re.search(rf"^{metric} +\d", said, re.MULTILINE)


def test_filling_in(trained, tmp_path):
    (tmp_path / "motif.fasta").write_text(">m a motif\nACD???\nFGHI\n>n\nk?\n")
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
        f"--infill={tmp_path}/wrong.fasta": "bad has '\\*-'; expected residues and `\\?`",
        f"--infill={tmp_path}/full.fasta": "a has no `\\?`",
        f"--infill={tmp_path}/words.fasta": "with `>` as its first character",
        f"--infill={tmp_path}/long.fasta": "a has 71 residues; the network knows at most 62",
        "--infill=x --length=5": "give one of the two",
        "--infill=x": "no such file",
        "--length=63": "trained on at most 62 residues",
        f"--compare={tmp_path}": "no folder of tools/prepare_uniref50.py",
        "--temperature=0": "must be above 0",
        "--out=/no/such/folder/x": "there is no folder",
        f"--out={tmp_path}/full.fasta": "exists: give another",
    }

    for options, reason in cases.items():
        with pytest.raises(sampler.InputError, match=reason):
            sample(trained, tmp_path / "x", options)
    with pytest.raises(sampler.InputError, match="no checkpoint"):
        sampler.run(sampler.parse_args([f"{tmp_path}/other.pt", "--device=cpu"]))
    status, text = call_script("tools/sample_uniref50", tmp_path / "none.pt", "--device=cpu")
    assert status == 2 and "is missing" in text and text.count("\n") == 1
    assert not (tmp_path / "x").exists()


def js(p, q):
    """The Jensen-Shannon divergence in nats."""
    p = np.array(p) / sum(p)
    q = np.array(q) / sum(q)
    total = 0.0
    for law in (p, q):
        inside = law > 0
        total += (law[inside] * np.log(law[inside] / ((p + q) / 2)[inside])).sum() / 2
    return total


def test_metrics_by_hand():
    found = sampler.compare(["AAAAC", "AAC", "AAC"], ["ACAC", "CCAA", "AAAAAAA"])
    # residues: A 8, C 3 against A 11, C 4
    assert found["1mer_js"] == pytest.approx(js([8, 3], [11, 4]))
    # AA AC CA CC within sequences
    assert found["2mer_js"] == pytest.approx(js([5, 3, 0, 0], [7, 2, 2, 1]))
    # AAA AAC ACA CAC CCA CAA
    assert found["3mer_js"] == pytest.approx(js([2, 3, 0, 0, 0, 0], [5, 0, 1, 1, 1, 1]))
    assert found["repeats"] == pytest.approx(4 / 11)
    assert found["uniqueness"] == pytest.approx(2 / 3)

    found = sampler.compare(["CAAAAC", "AAAACCCCCC", "AAA"], ["A"])  # which has no pairs
    assert found["repeats"] == pytest.approx(14 / 19) and "2mer_js" not in found
