"""sample_uniref50.py, score_uniref50.py and esm_uniref50.py of tools/: known laws, and users."""

import argparse
import contextlib
import itertools
import math
import os
import re
import shutil
from argparse import Namespace

import numpy as np
import pandas
import pytest
import torch
from helpers import call_script, check_refusal, check_refused, import_tool, run_here
from runs import Run, Task
from scipy.special import softmax
from scipy.stats import chisquare, entropy
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM, EsmConfig, EsmForMaskedLM

import run_train_uniref50_ddp as script
from run_train_uniref50_ddp import MASK

esm = import_tool("esm_uniref50")
sampler = import_tool("sample_uniref50")
scorer = import_tool("score_uniref50")

LETTERS = script.RESIDUES


@pytest.fixture(scope="module")
def task(tmp_path_factory, server):
    """Whose folder has proteins.fasta and run/, a tiny run on them; x, the first 8 of
    them; y.csv, a bad one and 7 more ahead of these. The network knows 46 residues; protein_4 and
    protein_5 have more."""
    folder = tmp_path_factory.mktemp("tools")
    task = Task("run_train_uniref50_ddp", folder, server, "--sampling_method=simple")
    task.run(folder / "run", "--n_iters=20", "--num_workers=0", ranks=1)
    lines = (folder / "proteins.fasta").read_text().splitlines(keepends=True)
    (folder / "x").write_text("".join(lines[:16]))
    records = "".join(lines[16:30] + lines[:16]).split(">")[1:]
    rows = [record.replace("\n", ",", 1) for record in records]
    (folder / "y.csv").write_text("id,sequence\nodd,A-C\n" + "".join(rows))
    return task


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


def sample(task, out, options):
    """([(header, sequence)] of the file that the tool writes, what it says)"""
    words = f"{task.folder}/run/best.pt --device=cpu --out={out} {options}"
    said = call_script("tools/sample_uniref50", *words.split())
    records = [record.partition("\n") for record in out.read_text().split(">")[1:]]
    return [(header, body.replace("\n", "")) for header, _, body in records], said


def test_samples(task, tmp_path):
    """The same again with the same options; with others: other ones."""
    found = []
    for i, more in enumerate(["", "", "--seed=1", "--steps=4", "--method=rigorous"]):
        options = f"--count=6 --length=30 --batch_size=3 {more}"
        records, _ = sample(task, tmp_path / f"{i}", options)
        method = "rigorous" if "method" in more else "simple"  # that of the run
        seed = int("seed" in more)
        for number, (header, body) in enumerate(records):
            assert header == f"sample_{number} method={method} seed={seed} length=30"
            assert len(body) == 30 and set(body) <= set("ACDEFG")  # those of the data
        found.append([body for _, body in records])
        assert len(set(found[i])) == 6  # no two batches are alike
        assert (found[i] == found[0]) == (i < 2)


def test_samples_are_compared(task, tmp_path):
    """With the first 2,000 of each part: by hash, or of a file each."""
    text = (task.folder / "proteins.fasta").read_text()
    (tmp_path / "a").write_text(">odd\nM-K\n" + 3 * text)
    (tmp_path / "b").write_text("".join(text.splitlines(True)[:200]))  # not counted in a
    for files, count in {"a": "2,000.*1..", f"a {tmp_path}/b": "1,700.*100"}.items():
        _, said = sample(task, tmp_path / count, f"--count=9 --compare {tmp_path}/{files}")
        assert f"1 bad records are left out, such as {tmp_path}/a: line 1 >odd: '-' among" in said
        counts = rf"9 sequences, of step \d+\n{count} held out"
        assert re.search(rf"{counts}\n1mer_js +\d.*\n1mer_js, held out +\d", said)


def test_lengths_of_samples_and_of_gaps(tmp_path):
    args = argparse.Namespace(infill=None, length=0, num_samples=4000, seed=0)
    templates, _ = sampler.make_templates(args, 46, {3: 10, 7: 20, 46: 70})
    found = np.bincount([len(template) - 2 for template in templates])
    assert chisquare(found[[3, 7, 46]], [400, 800, 2800]).pvalue > 1e-4
    check_refused("longer than 46 residues: give --length", sampler.make_templates, args, 46, {})

    args.infill = tmp_path / "x"
    args.infill.write_text(">motif_1 of mine\nk?{2\n-6}C?{3}\nx?{1-4}D?*\n")
    templates, names = sampler.make_templates(args, 18, {})
    assert names[:2] == ["motif_1/1", "motif_1/2"]
    texts = ["".join(np.array([*TOKENS])[template]) for template in templates]
    gaps = [re.fullmatch(r"<K(\?{2,6})C\?{3}X(\?{1,4})D\?>", text).groups() for text in texts]
    _, found = np.unique(np.char.str_len(gaps), axis=0, return_counts=True)
    assert len(found) == 20 and chisquare(found).pvalue > 1e-4
    reasons = dict.fromkeys(["?{4-2}", "?{a-b}", "?{0}"], "expected gaps such as")
    reasons |= {"?{17}": "knows at most 18", "??{1-16}": "knows at most 18"}
    reasons |= {"*?J-": r"'\*-' among the residues", "KV": "no `[?]`"}
    for gap, reason in reasons.items():
        args.infill.write_text(f">a\n?{{1-18}}\n>b c\nM{gap}K\n")
        check_refused(f"x: line 3 >b: .*{reason}", sampler.make_templates, args, 18, {})


def test_metrics_by_hand():
    """Words within sequences. Likeness without gaps, at the best place, over the longer length."""
    p = np.array([5, 3, 0, 0]) / 8  # of AA AC CA CC
    q = np.array([7, 2, 2, 1]) / 12
    expected = entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2  # Jensen-Shannon
    texts = (["AAAAC", "AAC", "AAC"], ["ACAC", "CCAA", "AAAAAAA"])
    assert sampler.divergence(*texts, 2) == pytest.approx(expected)
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


# ---- Scores: networks with a known law have known scores -----------------------------------------

ALPHA = np.random.default_rng(0).gamma(1.0, size=26)  # what the urn of `urn_law` holds at first
ARGS = dict(seed=0, draws=8, mask_rate=None, orders=None, batch_size=7, device="cpu")


def encode(text):
    return np.array([26, *map(LETTERS.index, text), 27], np.uint8)


PROTEINS = {"a": encode("ACDEFGH"), "b": encode("KLMNPQRSTVWY"), "c": encode("AAWYAABJJA")}


def urn_law(noisy):
    """(tokens, 26): the law of each residue, given those that are seen: residue i minus i comes out
    of an urn, into which two of its kind go back. It is exact for residues in any order."""
    seen = np.flatnonzero(noisy < 26)
    urn = ALPHA + np.bincount((noisy[seen] - seen) % 26, minlength=26)
    return urn[(np.arange(26) - np.arange(len(noisy))[:, None]) % 26] / urn.sum()


def network(batch):
    assert len(batch.lengths) <= ARGS["batch_size"]
    sequences = batch.noisy.long().split(batch.lengths.tolist())
    return torch.cat([torch.from_numpy(urn_law(noisy.numpy())).log() for noisy in sequences])


def score(tokens, **options):
    return scorer.score(Namespace(**{**ARGS, **options}), network, tokens)


@pytest.mark.parametrize("tokens", PROTEINS.values(), ids=PROTEINS)
def test_exact_law(tokens):
    """In any order the chain rule gives -log p; the bound does on average, and value by value it is
    the loss that training minimizes. --mask_rate: the loss at this rate."""
    nats = 0.0
    for i in range(1, len(tokens) - 1):
        noisy = np.where(np.arange(len(tokens)) < i, tokens.astype(int), script.MASK)
        nats -= np.log(urn_law(noisy)[i, tokens[i]]) / (len(tokens) - 2)
    assert score(tokens, orders=5) == pytest.approx(np.full(5, nats), rel=1e-12)
    bound = score(tokens, draws=600)
    assert abs(bound.mean() - nats) < 4 * bound.std() / 600**0.5 < 0.4

    for mask_rate in (None, 0.3):
        values = score(tokens, mask_rate=mask_rate)
        generator = np.random.default_rng([0, len(tokens)])
        for value, rate in zip(values, script.draw_mask_rates(8, generator), strict=True):
            batch = script.make_batch([tokens], [mask_rate or rate], [generator], len(tokens) - 2)
            assert value == pytest.approx(script.batch_loss(network(batch), batch).item())


def test_masked_marginals(tmp_path):
    """In closed form, each position masked once; other columns stay as they are."""
    rows = {"007,b,L2W": 0.0, "1e3,b,L2C:Y12A": 0.0, "NA,a,A1C": 0.0, ",a,A1G": 0.0}
    for row in rows:
        _, name, mutant = row.split(",")
        for change in mutant.split(":"):
            noisy = PROTEINS[name].astype(int)
            noisy[int(change[1:-1])] = script.MASK
            logp = np.log(urn_law(noisy)[int(change[1:-1])])
            rows[row] += logp[LETTERS.index(change[-1])] - logp[LETTERS.index(change[0])]
    rows |= {"0,b,": 0.0, "1,c,WT": 0.0}  # nothing changes
    masked = []

    def listen(batch):
        masked.extend(batch.positions[batch.noisy == script.MASK].tolist())
        return network(batch)

    (tmp_path / "x.csv").write_text("\n".join(["id,name,mutant", *rows]))
    table = scorer.score_variants(Namespace(**ARGS, variants=tmp_path / "x.csv"), listen, PROTEINS)
    assert table.pop("score").tolist() == pytest.approx([*rows.values()], rel=1e-12)
    assert table.to_csv(index=False).split() == ["id,name,mutant", *rows]
    assert sorted(masked) == [1, 2, 12]


def test_report(capsys):
    """Of all residues: the standard error is that of a ratio. The same of the frequencies."""
    nats = np.array([[1.0, 3.0, 2.0], [2.0, 2.1, 2.2], [0.0, 0.5, 0.7]])
    lengths = np.array([7, 12, 10])
    counts = np.arange(26) * 10
    table = scorer.report(PROTEINS, nats, counts)
    assert table["name"].tolist() == [*"abc"] and table["residues"].tolist() == [*lengths]
    expected = np.array([nats.mean(1), nats.std(1, ddof=1) / 3**0.5]).T
    assert table[["nats_per_residue", "se"]].to_numpy() == pytest.approx(expected)

    surprise = -np.log((counts + 0.5) / (counts + 0.5).sum())
    unigram = np.array([surprise[tokens[1:-1]].sum() for tokens in PROTEINS.values()])
    lines = capsys.readouterr().out.splitlines()
    for line, values in zip(lines, [nats.mean(1) * lengths, unigram], strict=True):
        mean = values.sum() / 29
        error = np.linalg.norm(values - mean * lengths) * (3 / 2) ** 0.5 / 29
        found = [float(text) for text in re.findall(r"\d+\.\d+", line)]
        assert found == pytest.approx([mean, error, np.exp(mean), mean / np.log(2)], abs=1e-4)


def call(task, file, *options):
    words = [task.folder / "run/best.pt", task.folder / file, "--device=cpu", *options]
    return call_script("tools/score_uniref50", *words)


@pytest.mark.parametrize("option", ["--draws=4", "--orders=2", "--mask_rate=0.15"])
def test_scores(task, tmp_path, option):
    """The batch size and other records change nothing; the seed does."""
    said = call(task, "x", option, f"--out={tmp_path}/a")
    assert "2 longer than 46 residues, and cut, such as protein_4" in said
    said = call(task, "y.csv", option, "--batch_size=1", f"--out={tmp_path}/b")
    assert f"1 bad records are left out, such as {task.folder}/y.csv: entry 0 >odd: '-'" in said
    call(task, "x", option, "--seed=1", f"--out={tmp_path}/c")
    a, b, c = [pandas.read_csv(tmp_path / name) for name in "abc"]
    pandas.testing.assert_frame_equal(a, b[7:].reset_index(drop=True), atol=3e-6)
    assert (a["nats_per_residue"] != c["nats_per_residue"]).all()


def test_embeddings_of_held_out_sequences(task, tmp_path):
    options = ["--held_out", "--block=1", f"--embeddings={tmp_path}/x.npz"]
    call(task, "proteins.fasta", *options)
    model, *_ = scorer.load_network(task.folder / "run/best.pt", "cpu")
    lines = (task.folder / "proteins.fasta").read_text().split()
    expected = {}
    for name, sequence in zip(lines[::2], lines[1::2], strict=True):
        tokens = encode(sequence)
        if script.is_held_out(tokens[1:-1].tobytes(), 0.05):
            tokens = tokens[: 48 if len(sequence) <= 46 else 47]
            batch = script.make_batch([tokens], [0.0], [np.random.default_rng(0)], 1)
            expected[name[1:]] = model.hidden(batch, 1)[tokens < 26].mean(0).detach().numpy()
    found = np.load(tmp_path / "x.npz")
    assert found["names"].tolist() == [*expected] and found["embeddings"].dtype == np.float32
    assert found["embeddings"] == pytest.approx(np.array([*expected.values()]), abs=1e-5)


# ---- Weights of ESM-2, both ways ----------------------------------------------------------------


@torch.no_grad()
def check_same(ours, theirs):
    """Logits of residues and hidden states of packed sequences, and of each by itself."""
    generator = np.random.default_rng(0)
    texts = ["".join(generator.choice([*LETTERS[:25]], size)) for size in (5, 28, 101)]  # no J
    batch = script.make_batch([*map(encode, texts)], [0.2, 0.5, 0.9], [generator] * 3, 1)
    lengths = batch.lengths.tolist()
    logits = ours(batch)[:, :25].split(lengths)
    first = ours.hidden(batch, 1).split(lengths)
    last = ours.hidden(batch).split(lengths)
    chances = []  # of all residues together
    for i, noisy in enumerate(batch.noisy.split(lengths)):
        tokens = torch.tensor([[esm.TOKENS[token] for token in noisy.tolist()]])
        found = theirs(tokens, output_hidden_states=True)
        residues = [esm.TOKENS[token] for token in range(25)]
        assert torch.allclose(logits[i], found.logits[0][:, residues], atol=1e-5)
        chances.append(found.logits[0].softmax(1)[:, residues].sum(1).min())
        assert torch.allclose(first[i], found.hidden_states[1][0], atol=1e-5)
        assert torch.allclose(last[i], found.hidden_states[-1][0], atol=1e-5)
    return min(chances)


@pytest.mark.parametrize("sizes", [(64, 3, 4, True), (48, 2, 6, False), (320, 6, 20, True)])
def test_weights_of_esm2(tmp_path, sizes):
    """Random ones everywhere; other settings as released ones have them."""
    torch.manual_seed(0)
    width, layers, heads, token_dropout = sizes
    options = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    options |= {"intermediate_size": 4 * width, "token_dropout": token_dropout}
    options |= {"position_embedding_type": "rotary", "layer_norm_eps": 1e-5}
    options |= {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32}
    theirs = EsmForMaskedLM(EsmConfig(**options)).eval()
    for parameter in theirs.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)

    theirs.save_pretrained(tmp_path / "esm2")
    said = call_script("tools/esm_uniref50", tmp_path / "esm2", tmp_path / "start.pt")
    needed = "--hidden_size={} --n_blocks_prot={} --n_heads={} --token_dropout={}"
    assert needed.format(*sizes) in said

    state = torch.load(tmp_path / "start.pt", weights_only=True)
    ours = esm.make_network(state["args"])
    ours.load_state_dict(state["ema_model"])
    check_same(ours, theirs)


def test_a_trained_network_as_esm2(task, tmp_path):
    """transformers reads what is written, sequences, too."""
    call_script("tools/esm_uniref50", task.folder / "run/best.pt", tmp_path / "esm2")
    theirs = EsmForMaskedLM.from_pretrained(tmp_path / "esm2").eval()
    ours, *_ = scorer.load_network(task.folder / "run/best.pt", "cpu")
    assert check_same(ours, theirs) > 0.9999
    tokens = AutoTokenizer.from_pretrained(tmp_path / "esm2")("MKVX")["input_ids"]
    expected = [script.BEGIN, *map(script.RESIDUES.index, "MKVX"), script.END]
    assert tokens == [esm.TOKENS[token] for token in expected]


def test_start_from(task, tmp_path):
    """Model and average begin with the averaged weights. A resumed run needs them no more."""
    weights = shutil.copy(task.folder / "run/best.pt", tmp_path)
    more = [f"--start_from={weights}", f"--output_dir={tmp_path}/run", "--lr=1e-12"]
    run_here(script, *task.argv, *more, "--num_workers=0", "--n_iters=1")
    os.remove(weights)
    run_here(script, *task.argv, *more, "--num_workers=0", "--n_iters=2")
    found = Run(tmp_path / "run").summary
    before = Run(task.folder / "run").summary
    assert found["best"]["value"] == pytest.approx(before["best"]["value"], rel=1e-5)
    assert found["steps"] == 2 and len(found["args"]["start_hash"]) == 12


@pytest.fixture(scope="module")
def folder(task):
    """best.pt, and weights that do not fit; a file of two sequences."""
    folder = task.folder / "wrong"
    folder.mkdir()
    shutil.copy(task.folder / "run/best.pt", folder)
    (folder / "two").write_text(TWO)
    state = torch.load(folder / "best.pt")
    torch.save({**state, "args": {**state["args"], "valid_file": "own"}}, folder / "own.pt")
    state["average"] = state.pop("ema_model")  # as earlier versions had it
    torch.save(state, folder / "old.pt")
    config = BertConfig(hidden_size=16, num_attention_heads=2)
    BertForMaskedLM(config).save_pretrained(folder / "bert")
    return folder


TWO = ">a\nACD\n>b\nAC\n"
SAMPLE = "sample_uniref50 --out=new best.pt"
SCORE = "score_uniref50 --out=new best.pt"
WRONG = {  # a tool and its words; what is said
    f"{SAMPLE} --infill=two --length=5": "not allowed with argument",
    f"{SAMPLE} --length=47": "knows at most 46 residues",
    f"{SAMPLE} --compare=two": "expected proteins, and some that are held out",
    f"{SAMPLE} --out=/no/such/folder/x": "there is no such folder",
    f"{SAMPLE} --out=two": "two exists: expected a new file",
    "sample_uniref50 own.pt --compare=two": "run's own as the second file",
    "sample_uniref50 two": "expected best.pt, step_N.pt or latest.pt of",
    f"{SCORE} two --held_out": "expected proteins, and with --held_out some that are held out",
    f"{SCORE} two --embeddings=x.npz --block=3": "--block is for --embeddings, up to 2 here",
    "esm_uniref50 bert new": "bert: it is not an ESM-2 with its head: vocab_size",
    "esm_uniref50 best.pt bert": "bert exists: expected a new file",
    "train --start_from=best.pt --hidden_size=32": "its network needs --hidden_size=16 --n_bl",
    "train --start_from=old.pt": r"expected best.pt .* \(KeyError\('ema_model'\)\)",
}
WRONG_FILES = {  # FILE, or the table of --variants: what is said of it
    f"{TWO}>a\nAD\n": "x: two records are named a",
    "name,mutant\na,C2K\na,A2C\n": "x: line 3: 'A2C': expected .*, once; 'a' has C2 here",
    "name,mutant\na,C2K:C2F\n": "x: line 2: 'C2F': expected .*, once; 'a' has C2 here",
    "name,mutant\nc,C2C\n": "x: line 2: no sequence named 'c' in two; it begins with",
    "name,mutant\na,M171A\n": "x: line 2: 'M171A': .*; 'a' has residues 1 to 3 here",
    "a,C2K\na,D3K\n": "x: found the columns a, C2K; expected mutant, name, and no score",
    "name,mutant\na,C2K\na,C2K,1\n": "Error tokenizing data",
    "name,mutant,score\na,C2K,1\n": "x: found the columns name, mutant, score; expected",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_uses(words, task, folder, monkeypatch):
    monkeypatch.chdir(folder)
    if words.startswith("train"):
        with pytest.raises(script.InputError, match=WRONG[words]):
            run_here(script, *task.argv, *words.split()[1:], f"--output_dir={folder}/run")
    else:
        check_refusal(words, WRONG[words])


@pytest.mark.parametrize("text", WRONG_FILES)
def test_wrong_files(text, folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "x").write_text(text)
    check_refusal(f"{SCORE} {'x' if text[0] == '>' else 'two --variants=x'}", WRONG_FILES[text])
