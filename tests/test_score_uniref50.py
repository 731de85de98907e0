"""tools/score_uniref50.py: networks with a known law have known scores; and what a user meets."""

import hashlib
import re
from argparse import Namespace

import numpy as np
import pandas
import pytest
import torch
from helpers import call_script, import_tool
from runs import Task

import run_train_uniref50_ddp as script

tool = import_tool("score_uniref50")

LETTERS = "ACDEFGHIKLMNPQRSTVWYXBUZOJ"
START = np.random.default_rng(0).dirichlet(np.ones(20))  # a Markov chain over the 20 residues
STEP = np.random.default_rng(1).dirichlet(np.ones(20), 20)
ARGS = dict(seed=0, draws=8, mask_rate=None, orders=None, batch_size=7, device="cpu")


def encode(text):
    return np.array([26, *map(LETTERS.index, text), 27], np.uint8)


TEXTS = {"a": "ACDEFGH", "b": "KLMNPQRSTVWY", "c": "AAAACCGGHHAK", "d": "WYW"}
CHAINS = {name: encode(text) for name, text in TEXTS.items()}
each_chain = pytest.mark.parametrize("tokens", CHAINS.values(), ids=TEXTS.values())


def chain(batch):
    """The chain's exact law of each residue, given those that are seen, as logits in float64."""
    assert len(batch.lengths) <= ARGS["batch_size"]
    logits = torch.zeros(len(batch.noisy), 26, dtype=torch.float64)
    lengths = batch.lengths.tolist()
    for noisy, rows in zip(batch.noisy.split(lengths), logits.split(lengths), strict=True):
        seen = np.array([np.eye(20)[t] if t < 20 else np.ones(20) for t in noisy[1:-1]])
        before = [START * seen[0]]
        after = [np.ones(20)]
        for i in range(1, len(seen)):
            before.append(before[-1] @ STEP * seen[i])
            after.append(STEP @ (after[-1] * seen[-i]))
        law = np.pad(np.array(before) * np.array(after[::-1]), ((0, 0), (0, 6)))
        rows[1:-1] = torch.from_numpy(law + 1e-300).log()
    return logits


def score(network, tokens, **options):
    return tool.score(Namespace(**{**ARGS, **options}), network, tokens)


@each_chain
def test_exact_law(tokens):
    """In any order the chain rule gives -log p, the bound on average. Value by value the bound is
    the loss that training minimizes."""
    steps = np.log(STEP[tokens[1:-2], tokens[2:-1]]).sum()
    nats = -(np.log(START[tokens[1]]) + steps) / (len(tokens) - 2)
    assert score(chain, tokens, orders=5) == pytest.approx(np.full(5, nats), rel=1e-12)
    bound = score(chain, tokens, draws=600)
    error = bound.std() / 600**0.5
    assert abs(bound.mean() - nats) < 4 * error < 0.4

    generator = np.random.default_rng([0, *tokens])
    values = score(chain, tokens)
    for value, rate in zip(values, script.draw_mask_rates(8, generator), strict=True):
        batch = script.make_batch([tokens], [rate], [generator], len(tokens) - 2)
        assert value == pytest.approx(script.batch_loss(chain(batch), batch).item())


@each_chain
def test_fixed_mask_rate(tokens):
    """Of a network that knows only frequencies it is their cross entropy."""
    logits = torch.linspace(0, 3, 26, dtype=torch.float64)
    counts = set()

    def frequencies(batch):
        for noisy in batch.noisy.split(batch.lengths.tolist()):
            counts.add((noisy == script.MASK).sum().item())
        return logits.expand(len(batch.noisy), -1)

    nats = score(frequencies, tokens, mask_rate=0.3, draws=1000)
    assert counts == {{7: 3, 12: 4, 3: 1}[len(tokens) - 2]}
    surprise = -logits.log_softmax(0).numpy()[tokens[1:-1]]
    assert abs(nats.mean() - surprise.mean()) < 4 * nats.std() / 1000**0.5


def test_masked_marginals(tmp_path):
    """Of the chain in closed form; each position is masked once."""
    expected = {"b,L2W": 0.0, "b,L2C:Y12A": 0.0, "a,A1C": 0.0, "a,A1G": 0.0}
    for row in expected:
        name, mutant = row.split(",")
        tokens = CHAINS[name]
        for change in mutant.split(":"):
            position = int(change[1:-1])
            left = START if position == 1 else STEP[tokens[position - 1]]
            right = np.ones(20) if tokens[position + 1] == 27 else STEP[:, tokens[position + 1]]
            logp = np.log(left * right)
            expected[row] += logp[LETTERS.index(change[-1])] - logp[LETTERS.index(change[0])]
    masked = []

    def listen(batch):
        masked.extend(batch.positions[batch.noisy == script.MASK].tolist())
        return chain(batch)

    (tmp_path / "x.csv").write_text("\n".join(["name,mutant", *expected]))
    args = Namespace(**ARGS, variants=tmp_path / "x.csv")
    table = tool.score_variants(args, listen, CHAINS)
    assert table["score"].tolist() == pytest.approx([*expected.values()], rel=1e-12)
    assert sorted(masked) == [1, 2, 12]


def test_report(capsys):
    """Of all residues: the standard error is that of a ratio. The same of the frequencies."""
    nats = np.array([[1.0, 3.0, 2.0], [2.0, 2.1, 2.2], [0.0, 0.5, 0.7], [4.0, 3.0, 3.0]])
    lengths = np.array([7, 12, 12, 3])
    counts = np.arange(26) * 10
    table = tool.report(CHAINS, nats, counts)
    assert table["name"].tolist() == [*"abcd"] and table["residues"].tolist() == [7, 12, 12, 3]
    expected = np.array([nats.mean(1), nats.std(1, ddof=1) / 3**0.5]).T
    assert table[["nats_per_residue", "se"]].to_numpy() == pytest.approx(expected)

    said = capsys.readouterr().out
    surprise = -np.log((counts + 0.5) / (counts + 0.5).sum())
    unigram = np.array([surprise[tokens[1:-1]].sum() for tokens in CHAINS.values()])
    for name, values in {"network": nats.mean(1) * lengths, "frequencies": unigram}.items():
        mean = values.sum() / 34
        error = np.linalg.norm(values - mean * lengths) * (4 / 3) ** 0.5 / 34
        pattern = rf"^{name} +(.*) \+- (.*) nats per residue, perplexity (.*), (.*) bits$"
        figures = [float(text) for text in re.search(pattern, said, re.M).groups()]
        assert figures == pytest.approx([mean, error, np.exp(mean), mean / np.log(2)], abs=1e-4)

    tool.report({"a": CHAINS["a"]}, nats[:1, :1], counts)
    assert "1.0000 +- nan nats" in capsys.readouterr().out


@pytest.fixture(scope="module")
def trained(tmp_path_factory, server):
    """A folder with proteins.fasta, best.pt of a tiny run on them, and x, the first 8 of them. The
    network knows 46 residues; protein_4 and protein_5 have more."""
    folder = tmp_path_factory.mktemp("score")
    task = Task("run_train_uniref50_ddp", folder, server)
    task.run(folder, "--n_iters=20", "--num_workers=0", ranks=1)
    lines = (folder / "proteins.fasta").read_text().splitlines(keepends=True)
    (folder / "x").write_text("".join(lines[:16]))
    (folder / "y").write_text("".join(lines[16:30] + lines[:16]))
    return folder


def call(folder, file, *options, **more):
    words = [folder / "best.pt", folder / file, "--device=cpu", *options]
    return call_script("tools/score_uniref50", *words, **more)


@pytest.mark.parametrize("option", ["--draws=4", "--orders=2", "--mask_rate=0.15"])
def test_scores(trained, tmp_path, option):
    """The batch size, and other records, change nothing; the seed does."""
    assert "8 of 8 sequences; 2 are cut to 46" in call(trained, "x", option, f"--out={tmp_path}/a")
    call(trained, "y", option, "--batch_size=1", f"--out={tmp_path}/b")
    call(trained, "x", option, "--seed=1", f"--out={tmp_path}/c")
    a, b, c = [pandas.read_csv(tmp_path / name) for name in "abc"]
    assert a["residues"].max() == 46
    pandas.testing.assert_frame_equal(a, b[7:].reset_index(drop=True), atol=3e-6)
    assert (a["nats_per_residue"] != c["nats_per_residue"]).all()


def test_held_out(trained, tmp_path):
    said = call(trained, "proteins.fasta", "--held_out", f"--out={tmp_path}/x")
    lines = (trained / "proteins.fasta").read_text().split()
    expected = []
    for name, sequence in zip(lines[::2], lines[1::2], strict=True):
        digest = hashlib.blake2b(sequence.encode(), digest_size=8).digest()
        if int.from_bytes(digest, "big") / 2**64 < 0.05:
            expected.append(name[1:])
    assert pandas.read_csv(tmp_path / "x")["name"].tolist() == expected
    assert f"{len(expected)} of 800 sequences" in said


@pytest.mark.parametrize("block", [None, 1])
def test_embeddings(trained, tmp_path, block):
    options = [] if block is None else [f"--block={block}"]
    call(trained, "x", f"--embeddings={tmp_path}/x.npz", *options)
    found = np.load(tmp_path / "x.npz")
    model, *_ = tool.load_network(trained / "best.pt", "cpu")
    lines = (trained / "x").read_text().split()
    assert [f">{name}" for name in found["names"]] == lines[::2]
    assert found["embeddings"].dtype == np.float32
    for embedding, sequence in zip(found["embeddings"], lines[1::2], strict=True):
        tokens = encode(sequence)[: 48 if len(sequence) <= 46 else 47]
        batch = script.make_batch([tokens], [0.0], [np.random.default_rng(0)], 1)
        hidden = model.hidden(batch, block)[tokens < 26]
        assert embedding == pytest.approx(hidden.mean(0).detach().numpy(), abs=1e-5)


def test_variants(trained, tmp_path):
    """The rows with all their columns as they are, and the score."""
    (trained / "one").write_text(">a\nACDEF\n")
    (tmp_path / "x.csv").write_text("id,note,mutant\n007,NA,A1C:F5K\n1e3,,C2C\n")
    call(trained, "one", f"--variants={tmp_path}/x.csv", f"--out={tmp_path}/out")
    first, second, third = (tmp_path / "out").read_text().splitlines()
    assert (first, third) == ("id,note,mutant,score", "1e3,,C2C,0.000000")
    assert re.fullmatch(r"007,NA,A1C:F5K,-?\d+\.\d{6}", second)


TABLES = {  # of variants of CHAINS, and what is said of them
    "name,mutant\na,C2K\na,A2C\n": "line 3: 'A2C': .* 'a' has C2",
    "name,mutant\nd,W1K:C4K\n": "line 2: 'C4K': .* 'd' has nothing",
    "name,mutant\na,C2K:C2F\n": "line 2: 'C2F': .* 'a' has nothing",
    "name,mutant\na,p.C2K\n": "line 2: 'p.C2K': expected such as A42G",
    "name,mutant\na,C2K\n\na,C2K\n": "line 3: '': .* '' has nothing",
    "a,C2K\na,D3K\n": "expected CSV with mutant and name: 'name'",
    "name,mutant\na,C2\udcff": "expected CSV .*: 'utf-8' codec can't decode",
}


@pytest.mark.parametrize("text", TABLES)
def test_wrong_tables(tmp_path, text):
    (tmp_path / "x").write_text(text, errors="surrogateescape")
    with pytest.raises(script.InputError, match=f"^{tmp_path}/x: {TABLES[text]}"):
        tool.score_variants(Namespace(variants=tmp_path / "x"), None, CHAINS)


WRONG = {  # files and options, and what is said of them
    "bad": "bad: line 3 >b: '-' among the residues",
    "twice": "twice: line 3 >a: an earlier record has this name",
    "ok --held_out": "expected proteins, and with --held_out some that are held out",
    "ok --variants=bad.csv": "bad.csv: expected CSV with mutant and name: Error tokenizing data",
    "ok --embeddings=new.npz --block=3": "--block is for --embeddings, up to 2 here",
    "ok --block=1": "--block is for --embeddings, up to 2 here",
    "ok --orders=2 --mask_rate=0.5": "not allowed with argument",
    "ok --out=ok": "ok: expected a new file, in a folder that is there",
}


def test_wrong_uses(trained, tmp_path):
    """One line, and nothing is written."""
    files = {"ok": ">a\nAC\n", "bad": ">a\nAC\n>b x\nA-C\n", "twice": ">a\nAC\n>a\nAD\n"}
    for name, text in {**files, "bad.csv": "mutant\nA1C\nA1C,1\n"}.items():
        (tmp_path / name).write_text(text)
    for words, reason in WRONG.items():
        words = f"{tmp_path}/{words} --out={tmp_path}/new".replace(
            "=bad.csv", f"={tmp_path}/bad.csv"
        )
        said = call(trained, *words.split(), status=2)
        assert said.startswith("score_uniref50.py: ") and said.count("\n") == 1 and reason in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad", "bad.csv", "ok", "twice"]
