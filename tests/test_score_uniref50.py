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
MOST_TOKENS = 60  # of a network call
START = np.random.default_rng(0).dirichlet(np.ones(20))  # a Markov chain over the 20 residues
STEP = np.random.default_rng(1).dirichlet(np.ones(20), 20)


def encode(text):
    return np.array([26, *map(LETTERS.index, text), 27], np.uint8)


CHAINS = [encode(text) for text in ("ACDEFGH", "KLMNPQRSTVWY", "AAAACCGGHHAK", "WYW")]


def chain(batch):
    """The chain's exact law of each residue, given those that are seen, as logits in float64."""
    assert len(batch.noisy) <= MOST_TOKENS
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


def nats_of_chain(tokens):
    """Per residue."""
    steps = np.log(STEP[tokens[1:-2], tokens[2:-1]]).sum()
    return -(np.log(START[tokens[1]]) + steps) / (len(tokens) - 2)


def outputs(network, changes=None, **options):
    """Of the network for CHAINS."""
    args = dict(seed=0, draws=8, mask_rate=None, orders=None, variants=None, embeddings=None)
    inputs = tool.make_inputs(Namespace(**{**args, **options}), CHAINS, changes)
    return tool.outputs_of(network, CHAINS, inputs, MOST_TOKENS, torch.device("cpu"))


def test_chain_rule_in_any_order_is_the_law():
    nats = tool.score_sequences(outputs(chain, orders=5), CHAINS, 5)
    for tokens, values in zip(CHAINS, nats, strict=True):
        assert values == pytest.approx(np.full(5, nats_of_chain(tokens)), rel=1e-12)


def test_bound():
    """Of an exact law its mean is -log p. With as many draws as residues each number of masks
    occurs once. Value by value it is the loss that training minimizes."""
    nats = tool.score_sequences(outputs(chain, draws=600), CHAINS, 600)
    errors = nats.std(1) / 600**0.5
    distances = abs(nats.mean(1) - [nats_of_chain(tokens) for tokens in CHAINS])
    assert (distances < 4 * errors).all() and (errors < 0.1).all()
    counts = [len(wanted) for index, wanted, _ in outputs(chain, draws=7) if index == 0]
    assert sorted(counts) == [1, 2, 3, 4, 5, 6, 7]

    nats = tool.score_sequences(outputs(chain), CHAINS, 8)
    for tokens, values in zip(CHAINS, nats, strict=True):
        generator = np.random.default_rng([0, *tokens])
        for value, rate in zip(values, script.draw_mask_rates(8, generator), strict=True):
            batch = script.make_batch([tokens], [rate], [generator], len(tokens) - 2)
            assert value == pytest.approx(script.batch_loss(chain(batch), batch).item())


def test_fixed_mask_rate():
    """Of a network that knows only frequencies it is their cross entropy."""
    logits = torch.linspace(0, 3, 26, dtype=torch.float64)

    def frequencies(batch):
        return logits.expand(len(batch.noisy), -1)

    found = [*outputs(frequencies, mask_rate=0.3, draws=1000)]
    counts = {(index, len(wanted)) for index, wanted, _ in found}
    assert counts == {(0, 3), (1, 4), (2, 4), (3, 1)}  # 0.3 of 7, 12, 12 and 3
    for tokens, values in zip(CHAINS, tool.score_sequences(found, CHAINS, 1000), strict=True):
        surprise = -logits.log_softmax(0).numpy()[tokens[1:-1]]
        assert abs(values.mean() - surprise.mean()) < 4 * values.std() / 1000**0.5


def test_masked_marginals(tmp_path):
    """Of the chain in closed form; each position is masked once."""
    expected = {"second,L2W": 0.0, "second,L2C:Y12A": 0.0, "first,A1C": 0.0, "first,A1G": 0.0}
    for row in expected:
        name, mutant = row.split(",")
        tokens = CHAINS[["first", "second"].index(name)]
        for change in mutant.split(":"):
            position = int(change[1:-1])
            left = START if position == 1 else STEP[tokens[position - 1]]
            right = np.ones(20) if tokens[position + 1] == 27 else STEP[:, tokens[position + 1]]
            logp = np.log(left * right)
            expected[row] += logp[LETTERS.index(change[-1])] - logp[LETTERS.index(change[0])]
    (tmp_path / "x.csv").write_text("\n".join(["name,mutant", *expected]))
    table, changes = tool.read_variants(tmp_path / "x.csv", ["first", "second", "c", "d"], CHAINS)
    found = [*outputs(chain, changes, variants="x.csv")]
    assert sorted((index, *wanted) for index, wanted, _ in found) == [(0, 1), (1, 2), (1, 12)]
    scores = tool.score_variants(found, changes, len(table))
    assert scores == pytest.approx([*expected.values()], rel=1e-12)


def test_report(tmp_path, capsys):
    """Of all residues: the standard error is that of a ratio. The same of the frequencies."""
    nats = np.array([[1.0, 3.0, 2.0], [2.0, 2.1, 2.2], [0.0, 0.5, 0.7], [4.0, 3.0, 3.0]])
    lengths = np.array([7, 12, 12, 3])
    counts = np.arange(26) * 10
    tool.report(Namespace(out=tmp_path / "x"), [*"abca"], CHAINS, nats, counts)
    table = pandas.read_csv(tmp_path / "x")
    assert table["name"].tolist() == [*"abca"] and table["residues"].tolist() == [7, 12, 12, 3]
    expected = np.array([nats.mean(1), nats.std(1, ddof=1) / 3**0.5]).T
    assert table[["nats_per_residue", "se"]].to_numpy() == pytest.approx(expected, abs=1e-6)

    said = capsys.readouterr().out
    assert "4 sequences, 34 residues" in said
    surprise = -np.log((counts + 0.5) / (counts + 0.5).sum())
    unigram = np.array([surprise[tokens[1:-1]].sum() for tokens in CHAINS])
    for name, values in {"network": nats.mean(1) * lengths, "frequencies": unigram}.items():
        mean = values.sum() / 34
        error = np.linalg.norm(values - mean * lengths) * (4 / 3) ** 0.5 / 34
        pattern = rf"^{name} +(.*) \+- (.*) nats per residue, perplexity (.*), (.*) bits$"
        figures = [float(text) for text in re.search(pattern, said, re.M).groups()]
        assert figures == pytest.approx([mean, error, np.exp(mean), mean / np.log(2)], abs=1e-4)

    tool.report(Namespace(out=tmp_path / "y"), ["a"], CHAINS[:1], nats[:1, :1], counts)
    assert (tmp_path / "y").read_text().endswith("\na,7,1.000000,\n")
    assert "1.0000 +- nan nats" in capsys.readouterr().out


TABLES = {  # of variants of a = ACDEF and b = AC, and what is said of them
    "name,mutant\na,C2K\na,A2C\n": "line 3: A2C: residue 2 of a is C",
    "name,mutant\nb,A1K:C3K\n": "line 2: C3K: residue 3 of b is not there, but 1 to 2 are",
    "name,mutant\nb,A0K\n": "line 2: A0K: residue 0 of b is not there, but 1 to 2 are",
    "name,mutant\na,C2K:C2F\n": "line 2: C2F: residue 2 of a is K",
    "name,mutant\na,p.C2K\n": "line 2: 'p.C2K': expected residue, position, new residue",
    "name,mutant\na,C2K\n\nc,C2K\n": "line 3: no sequence is named ''",
    "a,C2K\na,D3K\n": "line 1: expected mutant and name among the columns, .* found a, C2K",
    "name,mutant,score\na,C2K,1\n": "line 1: expected .* and no score; found name, mutant, score",
    "name,mutant\na,C2K\na,C2K,1\n": "expected CSV: Error tokenizing data",
    "name,mutant\na,C2\udcff": "expected CSV: 'utf-8' codec can't decode",
    "": "expected CSV: No columns to parse",
}


@pytest.mark.parametrize("text", TABLES)
def test_wrong_tables(tmp_path, text):
    path = tmp_path / "x.csv"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(script.InputError, match=f"^{path}: {TABLES[text]}") as caught:
        tool.read_variants(path, ["a", "b"], [encode("ACDEF"), encode("AC")])
    assert "\n" not in str(caught.value)


# --------------------------------------------------------------------------------------------------
# The tool


@pytest.fixture(scope="module")
def trained(tmp_path_factory, server):
    """A folder with proteins.fasta, best.pt of a tiny run on them, and x, the first 8 of them."""
    folder = tmp_path_factory.mktemp("score")
    task = Task("run_train_uniref50_ddp", folder, server)
    task.run(folder, "--n_iters=20", "--num_workers=0", ranks=1)
    (folder / "x").write_text(fasta([*records(folder).items()][:8]))
    return folder


def records(folder):
    """{name: sequence}. The network knows 46 residues; protein_4 and protein_5 have more."""
    lines = (folder / "proteins.fasta").read_text().split()
    return dict(zip([line[1:] for line in lines[::2]], lines[1::2], strict=True))


def fasta(pairs):
    return "".join(f">{name} x\n{sequence}\n" for name, sequence in pairs)


def call(folder, file, *options, **more):
    words = [folder / "best.pt", file, "--device=cpu", *options]
    return call_script("tools/score_uniref50", *words, **more)


@pytest.mark.parametrize("option", ["--draws=4", "--orders=2", "--mask_rate=0.15"])
def test_scores(trained, tmp_path, option):
    """The batch size, other records and their order change nothing."""
    said = call(trained, trained / "x", option, f"--out={tmp_path}/a")
    assert "2 sequences have more than 46 residues, such as protein_4: the first 46 are" in said
    table = pandas.read_csv(tmp_path / "a")
    lengths = [min(46, len(sequence)) for sequence in records(trained).values()]
    assert table["residues"].tolist() == lengths[:8]

    (tmp_path / "y").write_text(fasta([*records(trained).items()][20::-1]))
    call(trained, tmp_path / "y", option, "--batch_size=1", f"--out={tmp_path}/b")
    other = pandas.read_csv(tmp_path / "b")[::-1].reset_index(drop=True)[:8]
    pandas.testing.assert_frame_equal(table, other, atol=3e-6)
    call(trained, trained / "x", option, "--seed=1", f"--out={tmp_path}/c")
    other = pandas.read_csv(tmp_path / "c")
    assert (table["nats_per_residue"] != other["nats_per_residue"]).all()


def test_held_out(trained, tmp_path):
    said = call(trained, trained / "proteins.fasta", "--held_out", f"--out={tmp_path}/x")
    expected = []
    for name, sequence in records(trained).items():
        digest = hashlib.blake2b(sequence.encode(), digest_size=8).digest()
        if int.from_bytes(digest, "big") / 2**64 < 0.05:
            expected.append(name)
    assert pandas.read_csv(tmp_path / "x")["name"].tolist() == expected
    assert f"{len(expected)} of 800 sequences are held out" in said


@pytest.mark.parametrize("block", [None, 1])
def test_embeddings(trained, tmp_path, block):
    """Each is what the network gives for the sequence alone."""
    options = [] if block is None else [f"--block={block}"]
    call(trained, trained / "x", f"--embeddings={tmp_path}/x.npz", *options)
    found = np.load(tmp_path / "x.npz")
    assert found["names"].tolist() == [*records(trained)][:8]
    assert found["embeddings"].dtype == np.float32
    model, *_ = tool.load_network(trained / "best.pt", "cpu")
    sequences = [*records(trained).values()][:8]
    for embedding, sequence in zip(found["embeddings"], sequences, strict=True):
        tokens = encode(sequence) if len(sequence) <= 46 else encode(sequence)[:47]
        batch = script.make_batch([tokens], [0.0], [np.random.default_rng(0)], 1)
        hidden = model.hidden(batch, block)[tokens < 26]
        assert embedding == pytest.approx(hidden.mean(0).detach().numpy(), abs=1e-5)


def test_variants(trained, tmp_path):
    """The rows with all their columns as they are, and the score."""
    (tmp_path / "x").write_text(">a\nACDEF\n")
    (tmp_path / "x.csv").write_text("id,note,mutant\n007,NA,A1C:F5K\n1e3,,C2C\n")
    call(trained, tmp_path / "x", f"--variants={tmp_path}/x.csv", f"--out={tmp_path}/out")
    first, second, third = (tmp_path / "out").read_text().splitlines()
    assert (first, third) == ("id,note,mutant,score", "1e3,,C2C,0.000000")
    assert re.fullmatch(r"007,NA,A1C:F5K,-?\d+\.\d{6}", second)


def test_wrong_uses(trained, tmp_path):
    """One line, and nothing is written."""
    files = {"ok": ">a\nAC\n", "bad": ">a\nAC\n>b x\nA-C\n", "twice": ">a\nAC\n>a\nAD\n"}
    for name, text in {**files, "v.csv": "name,mutant\na,C9K\n"}.items():
        (tmp_path / name).write_text(text)
    cases = {
        "bad": "bad: line 3 >b: '-' among the residues",
        "none": "none: cannot be read",
        "ok --held_out": "expected proteins, and with --held_out some that are held out",
        f"ok --variants={tmp_path}/v.csv": "v.csv: line 2: C9K: residue 9 of a is not there",
        f"twice --variants={tmp_path}/v.csv": "two sequences are named a",
        f"ok --embeddings={tmp_path}/new --block=3": "--block 3: the network has 2 blocks",
        "ok --orders=2 --mask_rate=0.5": "not allowed with argument",
        f"ok --out={tmp_path}/ok": "ok: expected a new file, in a folder that is there",
        f"ok --embeddings={tmp_path}/no/x": "no/x: expected a new file",
    }
    for words, reason in cases.items():
        file, *options = words.split()
        said = call(trained, tmp_path / file, f"--out={tmp_path}/new", *options, status=2)
        assert said.startswith("score_uniref50.py: ") and said.count("\n") == 1 and reason in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad", "ok", "twice", "v.csv"]
