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
    return tool.score(Namespace(**{**ARGS, **options}), network, tokens)


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
    table = tool.score_variants(Namespace(**ARGS, variants=tmp_path / "x.csv"), listen, PROTEINS)
    assert table.pop("score").tolist() == pytest.approx([*rows.values()], rel=1e-12)
    assert table.to_csv(index=False).split() == ["id,name,mutant", *rows]
    assert sorted(masked) == [1, 2, 12]


def test_report(capsys):
    """Of all residues: the standard error is that of a ratio. The same of the frequencies."""
    nats = np.array([[1.0, 3.0, 2.0], [2.0, 2.1, 2.2], [0.0, 0.5, 0.7]])
    lengths = np.array([7, 12, 10])
    counts = np.arange(26) * 10
    table = tool.report(PROTEINS, nats, counts)
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
    tool.report({"a": PROTEINS["a"]}, nats[:1, :1], counts)
    assert "network      1.0000 nats per residue, perp" in capsys.readouterr().out


@pytest.fixture(scope="module")
def trained(tmp_path_factory, server):
    """A folder with best.pt of a tiny run on proteins.fasta; x, its first 8; y.csv, a bad one and 7
    more ahead of them. The network knows 46 residues; protein_4 and protein_5 have more."""
    folder = tmp_path_factory.mktemp("score")
    Task("run_train_uniref50_ddp", folder, server).run(folder, "--n_iters=20", ranks=1)
    lines = (folder / "proteins.fasta").read_text().splitlines(keepends=True)
    (folder / "x").write_text("".join(lines[:16]))
    records = "".join(lines[16:30] + lines[:16]).split(">")[1:]
    rows = [record.replace("\n", ",", 1) for record in records]
    (folder / "y.csv").write_text("id,sequence\nodd,A-C\n" + "".join(rows))
    return folder


def call(folder, file, *options, **more):
    words = [folder / "best.pt", folder / file, "--device=cpu", *options]
    return call_script("tools/score_uniref50", *words, **more)


@pytest.mark.parametrize("option", ["--draws=4", "--orders=2", "--mask_rate=0.15"])
def test_scores(trained, tmp_path, option):
    """The batch size and other records change nothing; the seed does."""
    said = call(trained, "x", option, f"--out={tmp_path}/a")
    assert "2 longer than 46 residues, and cut, such as protein_4" in said
    said = call(trained, "y.csv", option, "--batch_size=1", f"--out={tmp_path}/b")
    assert f"1 bad records are left out, such as {trained}/y.csv: entry 0 >odd: '-' among" in said
    call(trained, "x", option, "--seed=1", f"--out={tmp_path}/c")
    a, b, c = [pandas.read_csv(tmp_path / name) for name in "abc"]
    pandas.testing.assert_frame_equal(a, b[7:].reset_index(drop=True), atol=3e-6)
    assert (a["nats_per_residue"] != c["nats_per_residue"]).all()


@pytest.mark.parametrize("block", [None, 1])
def test_embeddings_of_held_out_sequences(trained, tmp_path, block):
    option = "--seed=0" if block is None else f"--block={block}"
    call(trained, "proteins.fasta", "--held_out", f"--embeddings={tmp_path}/x.npz", option)
    model, *_ = tool.load_network(trained / "best.pt", "cpu")
    lines = (trained / "proteins.fasta").read_text().split()
    expected = {}
    for name, sequence in zip(lines[::2], lines[1::2], strict=True):
        digest = hashlib.blake2b(sequence.encode(), digest_size=8).digest()
        if int.from_bytes(digest, "big") / 2**64 < 0.05:
            tokens = encode(sequence)[: 48 if len(sequence) <= 46 else 47]
            batch = script.make_batch([tokens], [0.0], [np.random.default_rng(0)], 1)
            expected[name[1:]] = model.hidden(batch, block)[tokens < 26].mean(0).detach().numpy()
    found = np.load(tmp_path / "x.npz")
    assert found["names"].tolist() == [*expected] and found["embeddings"].dtype == np.float32
    assert found["embeddings"] == pytest.approx(np.array([*expected.values()]), abs=1e-5)


def test_variants_of_one_sequence(trained, tmp_path):
    """Which needs no name; but a name is not ignored."""
    (trained / "one").write_text(">a\nACDEF\n")
    (tmp_path / "x.csv").write_text("name,mutant\nb,C2C\n")
    said = call(trained, "one", f"--variants={tmp_path}/x.csv", f"--out={tmp_path}/out", status=2)
    assert f"line 2: no sequence named 'b' in {trained}/one; it begins with ['a']" in said
    (tmp_path / "x.csv").write_text("mutant\nC2C\n")
    call(trained, "one", f"--variants={tmp_path}/x.csv", f"--out={tmp_path}/out")
    assert (tmp_path / "out").read_text() == "mutant,score\nC2C,0.000000\n"


WRONG = {  # more of FILE, or options, or the table of --variants; and what is said
    ">a\nAD\n": "x: two records are named a",
    "name,mutant\na,C2K\na,A2C\n": "x.csv: line 3: 'A2C': expected .*, once; 'a' has C2 here",
    "name,mutant\na,C2K:C2F\n": "x.csv: line 2: 'C2F': expected .*, once; 'a' has C2 here",
    "name,mutant\na,M171A\n": "x.csv: line 2: 'M171A': .*; 'a' has residues 1 to 3 here",
    "a,C2K\na,D3K\n": "x.csv: found the columns a, C2K; expected mutant, name, and no score",
    "name,mutant\na,C2K\na,C2K,1\n": "Error tokenizing data",
    "name,mutant,score\na,C2K,1\n": "x.csv: found the columns name, mutant, score; expected",
    "--held_out": "expected proteins, and with --held_out some that are held out",
    "--embeddings=new.npz --block=3": "--block is for --embeddings, up to 2 here",
    "--orders=2 --mask_rate=0.5": ".* not allowed with argument",
    "--out=.": "--out . exists: expected a new file",
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_uses(trained, tmp_path, text):
    """One line, and nothing is written."""
    (tmp_path / "x").write_text(">a\nACD\n>b\nAC\n" + (text if text[0] == ">" else ""))
    (tmp_path / "x.csv").write_text(text)
    options = text.split() if text[0] == "-" else [f"--variants={tmp_path}/x.csv"]
    said = call(trained, tmp_path / "x", f"--out={tmp_path}/new", *options, status=2)
    *others, line = said.splitlines()
    assert re.match(f"score_uniref50.py: error: .*{WRONG[text]}", line) and len(others) < 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x", "x.csv"]
