"""How run_train_uniref50_ddp.py reads a file; tools/sample_uniref50.py: the law of its samples."""

import argparse
import bz2
import contextlib
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
from helpers import call_script, import_tool, parse_arguments
from runs import Task
from scipy.special import softmax
from scipy.stats import chisquare, entropy

import run_train_uniref50_ddp as script

sampler = import_tool("sample_uniref50")

LETTERS = "ACDEFGHIKLMNPQRSTVWYXBUZOJ"
BEGIN, END, MASK = 26, 27, 28
RATIO = 0.2


# ---- Reading -------------------------------------------------------------------------------------


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
    assert all(row[0] == BEGIN and row[-1] == END for row in rows)
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
    assert not [*tmp_path.glob("*.cache/unfinished-*")]


def test_bad_records_are_listed_with_their_lines(tmp_path, caplog):
    damage = {  # a bad record, and what is said
        ">a\nMKV\nM-K.\nAAA\n": "'-.' among the residues",
        ">empty\n": "no residues",
        ">b\nMK*\nMKV\n": "'*' among the residues",
        ">umlaut\nMKV\nMKä\n": "'ä' among the residues",
        ">twice\nMKV>d\n": "'>' among the residues",
    }
    good = some_sequences(60, seed=2)
    text = "\n \n"
    problems = []
    for record, what in [*damage.items()] * 5:
        problems.append(f"x: line {text.count(chr(10)) + 1} {record.split()[0]}: {what}")
        text += record
    (tmp_path / "x").write_text(text + fasta(good))
    with pytest.raises(script.InputError) as caught:
        prepare(tmp_path / "x")
    lines = "\n  ".join(problems[:20])
    assert re.match(r"25 bad records \(expected FASTA.*\), such as:\n  ", str(caught.value))
    assert str(caught.value).endswith(lines)
    assert prepare(tmp_path / "x", "--skip_bad_data")[0] == good
    assert f"25 bad records are left out, such as:\n  {lines}" in caplog.text


def test_bad_entries_of_lists_and_lines(tmp_path, caplog):
    """Also what pandas puts where a text is missing, whose letters would pass as residues."""
    good = some_sequences(60, seed=3)
    bad = ["", 5, None, math.nan, {"protein_seq": None}, {"name": "MKV"}]
    torch.save([*bad, "MK-V", *good], tmp_path / "x.pt")
    assert prepare(tmp_path / "x.pt", "--skip_bad_data")[0] == good
    for number in range(6):
        assert f"\n  x.pt: entry {number}: no residues" in caplog.text
    assert "\n  x.pt: entry 6: '-' among the residues" in caplog.text
    (tmp_path / "x").write_text("\n".join(["ALBU\tMKV", *good]))
    assert prepare(tmp_path / "x", "--skip_bad_data")[0] == good
    assert "\n  x: line 1: '\\t' among the residues" in caplog.text


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
    "utf16.txt": (fasta(SEQUENCES).encode("utf-16"), "0 to train on, 0 held out"),
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


# ---- Sampling: the predictor is an oracle, so the law of the samples must be the oracle's --------

WORDS = np.indices([3] * 4).reshape(4, -1).T  # all of four residues out of three kinds
TOKENS = LETTERS + "<>?"  # BEGIN, END, MASK
LAW = softmax(np.random.default_rng(0).normal(0, 0.7, 81))  # any law


def oracle(batch):
    """Predicts the residues of words with this law, from all that is seen."""
    tokens, of_sample = np.unique(batch.noisy.view(-1, 6), axis=0, return_inverse=True)
    tokens = tokens[:, None, 1:-1]
    chances = ((tokens == MASK) | (tokens == WORDS)).all(2) * LAW  # (kinds of samples, words)
    logits = np.full((len(chances), 6, 26), -np.inf)
    logits[:, [0, -1]] = 0  # of BEGIN and END, where nothing is hidden
    with np.errstate(divide="ignore"):
        for kind in range(3):
            logits[:, 1:-1, kind] = np.log(chances @ (WORDS == kind))
    return torch.from_numpy(logits[of_sample.ravel()]).flatten(0, 1)


def draw(predict, texts, method="rigorous", steps=0):
    templates = [np.array([*map(TOKENS.index, f"<{text}>")], np.uint8) for text in texts]
    return sampler.draw(predict, templates, torch.device("cpu"), method, steps, [3, 0])


def agrees(samples, law):
    """A chi-square test of how often each word was drawn."""
    words = np.stack(samples)[:, 1:-1].astype(np.int64)
    found = np.bincount(words @ [27, 9, 3, 1], minlength=81)
    possible = law > 0
    assert words.max() < 3 and not found[~possible].any()
    return chisquare(found[possible], law[possible] * found.sum()).pvalue > 1e-4


def test_rigorous_samples_have_the_law_of_the_model():
    """Filling in follows the conditional law. If all appear in a single step, that is another."""
    assert agrees(draw(oracle, ["????"] * 3000), LAW)
    assert not agrees(draw(oracle, ["????"] * 3000, steps=1), LAW)
    law = LAW * (WORDS[:, 1] == 1) * (WORDS[:, 3] == 2)
    assert agrees(draw(oracle, ["?C?D"] * 4000), law / law.sum())


def test_simple_shows_the_surest_first():
    """A part of each sequence in each step, in the last one all. What is shown never changes."""
    seen = []

    def predict(batch):
        seen.append(batch.noisy.clone())
        logits = torch.zeros(len(batch.noisy), 26)
        logits[batch.positions <= 10, 4] = 99.0  # it is sure of the first ten residues
        return logits

    drawn = draw(predict, [30 * "?", "KK" + 20 * "?"] * 10, "simple", steps=6)
    seen.append(torch.from_numpy(np.concatenate(drawn)))
    for before, after in itertools.pairwise(seen):
        assert ((after == before) | (before == MASK)).all()
    for k, tokens in enumerate(seen):
        left = [int((part == MASK).sum()) for part in tokens.split([32, 24] * 10)]
        assert left == [round(n * math.cos(math.pi / 2 * k / 6)) for n in [30, 20] * 10]
    sure = [part[1:11] for part in seen[3].split([32, 24] * 10)[::2]]
    assert (torch.cat(sure) != MASK).double().mean() > 0.45  # at random 0.29


@pytest.mark.parametrize("all_letters", [False, True])
def test_only_possible_residues_are_drawn(all_letters):
    """Those that the data lack never, X and U on request. The chances have this temperature."""
    counts = np.array([5] * 19 + [0, 4, 0, 3, 0, 0, 0])
    known = (counts > 0) & (all_letters | (np.arange(26) < 20))
    logits = torch.linspace(0, 9, 26, dtype=torch.float64)
    law = softmax(logits.numpy()[known] / 0.5)

    def model(batch):
        return logits.float().expand(len(batch.noisy), -1)

    predict = sampler.make_predict(model, counts, all_letters, 0.5, contextlib.nullcontext, "cpu")
    for method in ("rigorous", "simple"):
        found = np.concatenate(draw(predict, [50 * "?"] * 40, method, 1))
        kinds = np.bincount(found[found < 26], minlength=26)
        assert kinds[known].sum() == 2000
        assert chisquare(kinds[known], law * 2000).pvalue > 1e-4
    batch = script.make_batch([np.array([MASK], np.uint8)], [0.0], [np.random.default_rng(0)], 1)
    logp = sampler.draw_tokens(predict, batch, batch.noisy)[1]
    assert logp.dtype == torch.float64  # rare ones are drawn, too


# ---- The tool ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory, server):
    """A folder with proteins.fasta and run/, a tiny run on them."""
    folder = tmp_path_factory.mktemp("sample")
    task = Task("run_train_uniref50_ddp", folder, server, "--sampling_method=simple")
    task.run(folder / "run", "--n_iters=20", "--num_workers=0", ranks=1)
    return folder


def sample(trained, out, options):
    """([(header, sequence)] of the file that the tool writes, what it says)"""
    words = f"{trained}/run/best.pt --device=cpu --out={out} {options}"
    said = call_script("tools/sample_uniref50", *words.split())
    records = [record.partition("\n") for record in out.read_text().split(">")[1:]]
    return [(header, body.replace("\n", "")) for header, _, body in records], said


def test_samples(trained, tmp_path):
    """The same again with the same options; with others: other ones."""
    found = []
    for i, more in enumerate(["", "", "--seed=1", "--steps=4", "--method=rigorous"]):
        options = f"--count=6 --length=30 --batch_size=3 {more}"
        records, _ = sample(trained, tmp_path / f"{i}", options)
        method = "rigorous" if "method" in more else "simple"  # that of the run
        seed = int("seed" in more)
        for number, (header, body) in enumerate(records):
            assert header == f"sample_{number} method={method} seed={seed} length=30"
            assert len(body) == 30 and set(body) <= set("ACDEFG")  # those of the data
        found.append([body for _, body in records])
        assert len(set(found[i])) == 6  # no two batches are alike
        assert (found[i] == found[0]) == (i < 2)


def test_samples_are_compared(trained, tmp_path):
    """With the first 2,000 of each part: by hash, or of a file each."""
    text = (trained / "proteins.fasta").read_text()
    (tmp_path / "a").write_text(">odd\nM-K\n" + 3 * text)
    (tmp_path / "b").write_text("".join(text.splitlines(True)[:200]))  # not counted in a
    for files, count in {"a": "2,000.*1..", f"a {tmp_path}/b": "1,700.*100"}.items():
        records, said = sample(trained, tmp_path / count, f"--count=9 --compare {tmp_path}/{files}")
        assert len({len(body) for _, body in records}) > 3
        assert f"1 bad records are left out, such as {tmp_path}/a: line 1 >odd: '-' among" in said
        counts = rf"9 sequences, of step \d+\n{count} held out"
        assert re.search(rf"{counts}\n1mer_js +\d.*\n1mer_js, held out +\d", said)


def test_lengths_of_samples_and_of_gaps(tmp_path):
    args = argparse.Namespace(infill=None, length=0, num_samples=4000, seed=0)
    templates, _ = sampler.make_templates(args, 46, {3: 10, 7: 20, 46: 70})
    found = np.bincount([len(template) - 2 for template in templates])
    assert chisquare(found[[3, 7, 46]], [400, 800, 2800]).pvalue > 1e-4
    with pytest.raises(script.InputError, match="longer than 46 residues: give --length"):
        sampler.make_templates(args, 46, {})

    args.infill = tmp_path / "x"
    args.infill.write_text("k?{2-6}C?{3}x?{1-4}D?*\n")
    templates, _ = sampler.make_templates(args, 18, {})
    texts = ["".join(np.array([*TOKENS])[template]) for template in templates]
    gaps = [re.fullmatch(r"<K(\?{2,6})C\?{3}X(\?{1,4})D\?>", text).groups() for text in texts]
    _, found = np.unique(np.char.str_len(gaps), axis=0, return_counts=True)
    assert len(found) == 20 and chisquare(found).pvalue > 1e-4
    bad = "?{40-20} ?{ ?{a-b} ?{-3} ?{0-4} ?{0} ?{3-} ?{3 ?{2}{3} ?{9999999999}".split()
    reasons = dict.fromkeys(bad, "expected gaps such as")
    reasons.update(dict.fromkeys(["?{17}", "??{1-16}", "?{1-9999}"], "knows at most 18"))
    reasons.update({"*?J-": r"'\*-' among the residues", "KV": "no `[?]`"})
    for gap, reason in reasons.items():
        args.infill.write_text(f">a\n?{{1-18}}\n>b c\nM{gap}K\n")
        with pytest.raises(script.InputError, match=f"x: line 3 >b: .*{reason}"):
            sampler.make_templates(args, 18, {})


def test_filling_in(trained, tmp_path):
    name = "UniRef50_A0A5A9P0L4_motif_site_1"  # stays whole
    (tmp_path / "motif.fasta").write_text(f">{name} a motif\nACD???\nFGHI*\n>n\nk?{{2\n-2}}\n")
    records, _ = sample(trained, tmp_path / "out", f"--infill={tmp_path}/motif.fasta --count=2")
    found = [f"{header.split()[0]} {body}" for header, body in records]
    expected = [f"{name}/1 ACD...FGHI", f"{name}/2 ACD...FGHI", "n/1 K..", "n/2 K.."]
    assert all(map(re.fullmatch, expected, found)) and len(found) == 4


def test_wrong_uses_of_the_sampler(trained, tmp_path):
    (tmp_path / "full.fasta").write_text(">a\nMKV\n")
    best = f"{trained}/run/best.pt"
    state = torch.load(best)
    state["args"]["valid_file"] = "own.fasta"
    torch.save(state, tmp_path / "own.pt")
    cases = {
        f"{best} --infill={tmp_path}/full.fasta --length=5": "not allowed with argument",
        f"{best} --length=47": "knows at most 46 residues",
        f"{best} --compare={tmp_path}/full.fasta": "expected proteins, and some that are held out",
        f"{tmp_path}/own.pt --compare={tmp_path}/full.fasta": "run's own.fasta as the second file",
        f"{best} --out=/no/such/folder/x": "there is no such folder",
        f"{best} --out={tmp_path}/full.fasta": "full.fasta exists: expected a new file",
        f"{tmp_path}/full.fasta": "expected best.pt, step_N.pt or latest.pt of",
    }
    for words, reason in cases.items():
        argv = f"--device=cpu --out={tmp_path}/x {words}".split()
        *_, last = call_script("tools/sample_uniref50", *argv, status=2).splitlines()
        assert last.startswith("sample_uniref50.py: error: ") and reason in last
    assert not (tmp_path / "x").exists()


def test_metrics_by_hand():
    """Words within sequences. Likeness without gaps, at the best place, over the longer length."""
    p = np.array([5, 3, 0, 0]) / 8  # of AA AC CA CC
    q = np.array([7, 2, 2, 1]) / 12
    expected = entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2  # Jensen-Shannon
    texts = (["AAAAC", "AAC", "AAC"], ["ACAC", "CCAA", "AAAAAAA"])
    assert sampler.divergence(*texts, 2) == pytest.approx(expected)
    assert math.isnan(sampler.divergence(["CAAAAC"], ["A"], 2))  # which has no pairs
    held_out = ["ACDEFGHIKL", "YYYYVV", "WWWW", "TT", "ACDEFGHIKA"]
    for text, expected in {"ACDEFGHIKL": 1, "DEFGH": 0.5, "MMACDEFGHIKL": 10 / 12}.items():
        assert sampler.nearest([text, text], held_out) == pytest.approx(expected)
    long = 3 * "ACDEFGHIKL"  # degenerate is more than a quarter of one residue, or six in a row
    cases = {"ACDEACDE": False, "ACDEACDA": True, long + "MMMMM": False, long + "MMMMMM": True}
    assert {text: sampler.is_degenerate(text) for text in cases} == cases
    train = held_out[::2]  # as are the three that stand beside three samples
    found = sampler.compare(["ACDMNMNIKL", "YYYY", "YYYY"], train, held_out, 0)
    expected = {"nearest": (0.6 + 8 / 6) / 3, "nearest, training": 0.2, "nearest, held out": 0.6}
    expected |= {"nearest, training, held out": 1, "3mer_js, held out": 0, "uniqueness": 2 / 3}
    expected |= {"degenerate": 2 / 3, "degenerate, held out": 1 / 3}
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    copies = sampler.compare(train + train, train, held_out, 0)
    assert copies["nearest, training"] == 1 and copies["3mer_js"] == pytest.approx(0)
