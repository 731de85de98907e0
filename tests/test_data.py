"""The data path of train_ddp.py: reading, splitting, tokens, teacher vectors, negatives, caches."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ROOT, one_process, run_ranks

import train_ddp


def arguments(folder: Path, *more: str):
    base = f"""--phase1_data={folder}/pairs.jsonl --phase2_data={folder}/pairs.jsonl --cache_dir={folder}/cache
        --teacher_model=builtin:lsa:16 --student_model=builtin:bert:1x32 --student_max_length=24
        --eval_fraction=0.2 --output_dir={folder}/out --device=cpu"""
    return train_ddp.parse_args([*base.split(), *more])


def write_pairs(folder: Path, count: int = 90) -> None:
    with open(folder / "pairs.jsonl", "w") as file:
        for i in range(count):
            row = {"query": f"where is item {i}", "positive": [f"item {i} is in hall {i % 7}", f"see shelf {i}"]}
            file.write(json.dumps(row | {"negatives": [f"nothing about {i}", "nothing"]}) + "\n")
    (folder / "out").mkdir(exist_ok=True)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_pairs(folder)
    return folder, train_ddp.load_data(arguments(folder), one_process())


def test_corpus(corpus):
    """Every text once; nothing held out is trained on; negatives are not positives; 90 queries in all."""
    _, c = corpus
    texts = [c.text(i) for i in range(len(c.kinds))]
    assert len(set(zip(c.kinds.tolist(), texts, strict=True))) == len(texts)
    held = set(c.eval_queries.tolist()) | set(c.eval_documents.tolist())
    trained = set(c.phase1.tolist()) | set(c.queries.tolist()) | set(c.positives.tolist())
    trained |= set(c.negatives[c.negatives >= 0].tolist())
    assert not held & trained
    assert len(set(c.queries.tolist())) + len(c.eval_queries) == 90 and 5 < len(c.eval_queries) < 40
    assert all(texts[q].startswith("where is item") and c.kinds[q] == 0 for q in c.queries)
    for q, d in c.eval_pairs:
        number = re.search(r"\d+$", texts[c.eval_queries[q]]).group()
        assert number in re.findall(r"\d+", texts[c.eval_documents[d]])
    for p, row in zip(c.positives, c.negatives, strict=True):
        assert p not in row


def test_split_does_not_depend_on_order_or_seed(tmp_path):
    for name, lines in (("a", 1), ("b", -1)):
        (tmp_path / name).mkdir()
        write_pairs(tmp_path / name)
        path = tmp_path / name / "pairs.jsonl"
        path.write_text("\n".join(path.read_text().splitlines()[::lines]) + "\n")
    held = []
    for name, seed in (("a", 1), ("b", 2)):
        c = train_ddp.load_data(arguments(tmp_path / name, f"--seed={seed}"), one_process())
        held.append({c.text(i) for i in c.eval_queries})
    assert held[0] == held[1]


BAD = [b'{"query": "no positive"}\n', b"not json\n", b'{"query": "", "positive": "x"}\n', b'["a list"]\n',
       b"\xff\xfe\n", b'{"query": "q", "positive": ["fine", 3]}\n',
       b'{"query": "q", "positive": "p", "negatives": 5}\n']  # fmt: skip


def test_bad_rows_are_all_listed_before_anything_starts(tmp_path):
    write_pairs(tmp_path)
    path = tmp_path / "pairs.jsonl"
    good = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(good[:10] + BAD + good[10:] + [b"broken\n"] * 30))
    with pytest.raises(ValueError) as caught:
        train_ddp.load_data(arguments(tmp_path), one_process())
    text = str(caught.value)
    for number in range(11, 18):
        assert f"line {number}:" in text
    assert "expected" in text and "more" in text and "--skip_bad_data" in text
    assert len(text.splitlines()) < 25
    c = train_ddp.load_data(arguments(tmp_path, "--skip_bad_data"), one_process())
    assert len(set(c.queries.tolist())) + len(c.eval_queries) == 90
    listed = (tmp_path / "out" / "skipped_data.txt").read_text()
    assert len(listed.strip().splitlines()) >= 37 and "line 12:" in listed


def test_texts_parquet_and_missing_files(tmp_path):
    write_pairs(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "pairs.parquet")
    (tmp_path / "texts.txt").write_text("".join(f"a text of {i} words\n\n" for i in range(50)))
    args = arguments(tmp_path, f"--phase2_data={tmp_path}/pairs.parquet", f"--phase1_data={tmp_path}/texts.txt")
    c = train_ddp.load_data(args, one_process())
    assert len(set(c.queries.tolist())) + len(c.eval_queries) == 90
    assert {c.text(i) for i in c.phase1} <= {f"a text of {i} words" for i in range(50)} and len(c.phase1) > 30
    only = arguments(tmp_path, "--skip_phase2", f"--phase1_data={tmp_path}/texts.txt")
    assert len(train_ddp.load_data(only, one_process()).eval_documents) > 0, "texts alone are validated by cosine"
    with pytest.raises(ValueError, match="no such file"):
        train_ddp.load_data(arguments(tmp_path, f"--phase2_data={tmp_path}/gone.jsonl"), one_process())


def load_student(args, corpus):
    name = train_ddp.builtin_model(args, one_process(), corpus, args.student_model)
    return train_ddp.load_student(args, name)


def test_tokens_are_those_of_the_model(corpus):
    folder, c = corpus
    args = arguments(folder)
    student = load_student(args, c)
    tokens = train_ddp.load_tokens(args, one_process(), c, student)
    rows = np.array([0, 5, 17, 40])
    ids, mask = tokens.padded(rows)
    options = {"padding": True, "truncation": True, "max_length": 24, "return_tensors": "pt"}
    theirs = student.tokenizer([c.text(i) for i in rows], **options)
    assert torch.equal(ids, theirs["input_ids"]) and torch.equal(mask, theirs["attention_mask"])
    rows = np.arange(len(c.kinds))
    groups = tokens.groups(rows, torch.device("cpu"))
    places = torch.cat([g[0] for g in groups])
    assert sorted(places.tolist()) == rows.tolist()
    grouped = sum(g[1].numel() for g in groups)
    useful = int(tokens.lengths.sum())
    assert useful / grouped > 0.85 > 0.5, f"{1 - useful / grouped:.0%} of the tokens are padding"


def test_teacher_vectors_are_computed_once(corpus, monkeypatch):
    """A second run loads no teacher; another prompt or length makes new vectors; damage is found."""
    folder, c = corpus
    args, calls = arguments(folder), []
    name = train_ddp.builtin_model(args, one_process(), c, "builtin:lsa:16")
    plain = train_ddp.load_teacher
    monkeypatch.setattr(train_ddp, "load_teacher", lambda *a: calls.append(a) or plain(*a))
    vectors = train_ddp.teacher_vectors(args, one_process(), c, name)
    assert len(calls) == 1 and vectors.shape == (len(c.kinds), 16) and vectors.dtype == np.float16
    norms = np.linalg.norm(vectors.astype(np.float32), axis=1)
    assert np.allclose(norms[norms > 0], 1, atol=2e-3) and (norms == 0).sum() <= 1  # "nothing" has no known word
    teacher = plain(args, name, torch.device("cpu"))
    expected = teacher.encode([c.text(i) for i in range(9)], normalize_embeddings=True)
    assert np.allclose(vectors[:9].astype(np.float32), expected, atol=1e-3)
    again = train_ddp.teacher_vectors(args, one_process(), c, name)
    assert len(calls) == 1 and np.array_equal(vectors, again)
    bert = train_ddp.builtin_model(args, one_process(), c, "builtin:bert:1x32")
    for number, other in enumerate(("", "--teacher_query_prompt=find: ", "--teacher_max_length=7")):
        before = len(calls)
        train_ddp.teacher_vectors(arguments(folder, *other.split("|")[: bool(other)]), one_process(), c, bert)
        assert len(calls) == before + 1, f"{number}: {other}"
    calls.clear()
    path = Path(vectors.filename)
    del vectors, again
    path.write_bytes(path.read_bytes()[:-100])
    train_ddp.teacher_vectors(args, one_process(), c, name)
    assert len(calls) == 1, "a truncated file must be made anew"
    data = bytearray(path.read_bytes())
    data[-50] ^= 1
    path.write_bytes(bytes(data))
    train_ddp.teacher_vectors(arguments(folder, "--verify_data"), one_process(), c, name)
    assert len(calls) == 2, "--verify_data must find a changed bit"


def test_killed_encoding_goes_on(corpus, monkeypatch, tmp_path):
    folder, c = corpus
    monkeypatch.setattr(train_ddp, "BLOCK", 32)
    args = arguments(folder, f"--cache_dir={tmp_path}")
    name = train_ddp.builtin_model(args, one_process(), c, "builtin:lsa:16")
    teacher, encoded = train_ddp.load_teacher(args, name, torch.device("cpu")), []

    class Failing:
        prompts = teacher.prompts

        def encode(self, batch, **options):
            encoded.append(len(batch))
            if len(encoded) == 4:
                raise KeyboardInterrupt
            return teacher.encode(batch, **options)

    monkeypatch.setattr(train_ddp, "load_teacher", lambda *_: Failing())
    with pytest.raises(KeyboardInterrupt):
        train_ddp.teacher_vectors(args, one_process(), c, name)
    blocks = -(-len(c.kinds) // 32)
    train_ddp.teacher_vectors(args, one_process(), c, name)
    assert len(encoded) == 4 + blocks - 3, "the three finished blocks must not be encoded again"


def test_mined_negatives_keep_the_margin(corpus):
    folder, c = corpus
    args = arguments(folder, "--mine_negatives=4", "--mine_margin=0.1")
    name = train_ddp.builtin_model(args, one_process(), c, "builtin:lsa:16")
    vectors = train_ddp.teacher_vectors(args, one_process(), c, name)
    rows = train_ddp.mine_negatives(args, one_process(), c, vectors, name)
    assert rows.shape == (len(c.queries), c.negatives.shape[1] + 4)
    v, mined = vectors.astype(np.float32), rows[:, c.negatives.shape[1] :]
    for q, p, found in zip(c.queries, c.positives, mined, strict=True):
        for d in found[found >= 0]:
            assert c.kinds[d] == 1 and v[q] @ v[d] <= v[q] @ v[p] - 0.1 + 1e-4
    assert not set(mined[mined >= 0].tolist()) & set(c.eval_documents.tolist())


def test_negatives_are_drawn_by_sample():
    """The draw depends on (seed, epoch, item) alone: not on the batch it comes in."""
    table = np.arange(200).reshape(20, 10)
    table[3, 2:] = -1
    whole = train_ddp.draw_negatives(table, np.arange(20), 4, 7, 0)
    for item in (0, 3, 19):
        assert np.array_equal(train_ddp.draw_negatives(table, np.array([item]), 4, 7, 0)[0], whole[item])
    assert set(whole[3].tolist()) == {30, 31, -1}
    assert not np.array_equal(whole, train_ddp.draw_negatives(table, np.arange(20), 4, 7, 1))
    assert all(set(row) <= set(table[i]) and len(set(row)) == 4 for i, row in enumerate(whole) if i != 3)


def test_buckets_hold_equal_lengths_on_all_ranks():
    lengths = np.random.default_rng(0).lognormal(4, 0.7, 4096).astype(int) + 1
    cut = train_ddp.bucket_by_length(lengths, 64, 0)
    sampler = train_ddp.GlobalBatchSampler(4096, 64, 1, 0, one_process(), 32, cut)
    batches = list(sampler.batches())
    assert sorted(np.concatenate(batches).tolist()) == list(range(4096))
    padded = sum(64 * lengths[b].max() for b in batches)
    assert lengths.sum() / padded > 0.85, "padding of length-sorted batches"
    longest = [[lengths[b[r::8]].max() for r in range(8)] for b in batches]
    assert np.median([max(of_ranks) / min(of_ranks) for of_ranks in longest]) < 1.05, "ranks get other lengths"
    order = [lengths[b].max() for b in batches]
    assert order != sorted(order)


def test_pydocs_documents_are_real_and_grouped():
    path = Path(json.__file__)
    found = dict(train_ddp.docstrings(path))
    assert "loads" in found and "Deserialize" in found["loads"]
    assert not any(name.startswith("_") for name in found)


def disagree(ddp, folder: str) -> str:
    """Each rank sees other data."""
    path = Path(folder) / f"rank{ddp.rank}"
    try:
        train_ddp.require_same(ddp, "the training data", str(path).encode())
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_with_other_data_stop(tmp_path):
    assert all("disagree on the training data" in text for text in run_ranks(2, disagree, str(tmp_path)))


def test_missing_hub_is_said_in_seconds(tmp_path):
    """The defaults need a hub. Without one: a sentence with what is missing and what needs no download."""
    env = os.environ | {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://localhost:9", "CUDA_VISIBLE_DEVICES": ""}
    begin = time.monotonic()
    command = [sys.executable, str(ROOT / "train_ddp.py")]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and time.monotonic() - begin < 45  # 10 s on an idle machine
    assert "the model hub cannot be reached" in done.stdout
    assert re.search(r"--phase1_data ms_marco: .*microsoft/ms_marco.*pydocs", done.stdout)


def test_an_array_that_does_not_fit_is_an_error(tmp_path):
    """Also where only its last bytes do not: numpy's own writing to a file loses that error."""
    code = f"""
import pathlib, resource, signal, sys
sys.path.insert(0, {str(ROOT)!r})
import numpy as np, train_ddp
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
path, cut = pathlib.Path({str(tmp_path)!r}, "array.npy"), []
for size in range((1 << 16) - 127, (1 << 16) + 5000, 37):  # a header of 128 bytes comes first
    try:
        train_ddp.write_array(path, np.zeros(size, np.uint8))
        cut.append(size)
    except OSError:
        pass
assert not cut, cut
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-500:]
