"""run_dpo_ddp.py and its tools as a user calls them: how a run starts and ends, its precision, what
is done once, errors."""

import csv
import importlib
import json
import logging
import math
import sys
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import ROOT, import_tool, parse_arguments, write_structures
from torch.utils._python_dispatch import TorchDispatchMode

script = importlib.import_module("run_dpo_ddp")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Five structures with four pairs each."""
    folder = tmp_path_factory.mktemp("dpo")
    write_structures(folder, 5, pairs=4, least=8, most=24)
    return folder


def run(data, out, *options):
    """One rank, in this process; the rows of metrics.jsonl."""
    words = [f"--train_data={data}/pairs.json", f"--output_dir={out}", "--base_model_name=random"]
    words += ["--batch_size=4", "--num_epochs=1", "--num_orders=2", "--log_every=1", "--device=cpu"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["run_dpo_ddp.py", *words, *options])
        patch.setattr(script, "draw_curves", lambda path: None)
        patch.setattr(script, "SCRIPT", "run_dpo_ddp.py")  # pytest is at work here
        try:
            script.main(script.parse_args())
        finally:
            script.cleanup()
            logging.getLogger().handlers.clear()
    return rows_of(out)


def rows_of(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def first_loss(rows):
    """Of the preferences."""
    return [row["loss"] for row in rows if row.get("phase") == 2][0]


@pytest.fixture(scope="module")
def trained(data):
    """A run with a warm start."""
    options = ["--sft_epochs=3", "--num_epochs=2", "--lr=1e-3", "--temperature=1"]
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


# ---- How a run starts ------------------------------------------------------------------------


def test_a_run_starts_at_the_known_loss(data, trained, tmp_path):
    """Network and reference are one: ln 2, or 1 / (2 beta)^2 with IPO. IEEE products are the
    default."""
    run(data, tmp_path, "--loss_type=ipo")
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.backends.cudnn.allow_tf32 is False
    assert first_loss(rows_of(trained)) == pytest.approx(math.log(2), rel=1e-6)
    assert first_loss(rows_of(tmp_path)) == pytest.approx(25.0, rel=1e-4)
    for folder, expected in {trained: math.log(2), tmp_path: 25.0}.items():
        before = json.loads((folder / "summary.json").read_text())["baselines"]["before"]
        assert before["loss"] == pytest.approx(expected, rel=1e-9)
        assert before["rewards/margins"] == 0


def test_a_difference_between_network_and_reference_is_found(data, tmp_path, monkeypatch):
    """Dropout, as in the original, in the step alone: the run must not start."""
    plain = script.ProteinMPNN.encode

    def with_dropout(model, structures):
        nodes, edges = plain(model, structures)
        return torch.nn.functional.dropout(nodes, 0.1, torch.is_grad_enabled()), edges

    monkeypatch.setattr(script.ProteinMPNN, "encode", with_dropout)
    with pytest.raises(script.RunError, match="network and reference differ before training"):
        run(data, tmp_path / "out")


class Rounded(TorchDispatchMode):
    """What matrix products read has so many bits only, as on a GPU in TF32 (10) or bf16 (7)."""

    def __init__(self, bits):
        super().__init__()
        self.drop = 23 - bits
        self.times = 0

    def round(self, x):
        if not isinstance(x, torch.Tensor) or x.dtype != torch.float32:
            return x
        half = 1 << (self.drop - 1)
        return ((x.contiguous().view(torch.int32) + half) >> self.drop << self.drop).view(x.dtype)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in ("mm", "addmm", "bmm"):
            self.times += 1
            args = [self.round(x) for x in args]
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("bits", [10, 7])
def test_rounded_products_pass_the_check_or_are_refused(data, tmp_path, bits):
    """A device that rounds although IEEE products are asked for: no run with a wrong reference."""
    with Rounded(bits) as mode:
        try:
            rows = run(data, tmp_path / "out")
        except script.RunError as error:
            assert "network and reference differ" in str(error)
            assert not (tmp_path / "out" / "best.pt").exists()
        else:
            assert abs(first_loss(rows) - math.log(2)) < 1e-4
    assert mode.times > 100


# ---- What a run does -------------------------------------------------------------------------


def test_what_is_done_once(data, tmp_path):
    """Structures are read once. The reference pass encodes them once, whatever the number of
    decoding orders."""
    encode = script.ProteinMPNN.encode
    counts = []
    for orders in (1, 3):
        read = mock.patch.object(script, "read_structure", wraps=script.read_structure)
        counted = {"autospec": True, "side_effect": encode}
        encoded = mock.patch.object(script.ProteinMPNN, "encode", **counted)
        with read as reads, encoded as encodings:
            run(data, tmp_path / str(orders), f"--num_orders={orders}", "--num_epochs=2")
        assert reads.call_count == 5
        counts.append(encodings.call_count)
    assert counts[0] == counts[1]


def test_a_nan_in_validation_ends_the_run(data, tmp_path, monkeypatch):
    """It once stayed the best for ever."""
    plain = script.summarise
    monkeypatch.setattr(script, "summarise", lambda *args: {**plain(*args), "loss": math.nan})
    with pytest.raises(script.RunError, match="the validation loss of epoch 1 is nan"):
        run(data, tmp_path / "out")
    assert not (tmp_path / "out" / "best.pt").exists()


def test_log_lines_of_the_document(data, tmp_path, caplog):
    """And the warning of a run that did not make the network better."""
    caplog.set_level(logging.INFO)
    run(data, tmp_path / "out", "--backend=ccl", "--lr=0")
    for line in (
        "Initialized DDP: rank=0, world_size=1, local_rank=0",
        "Using device: cpu",
        "Loaded 16 training and 4 validation pairs",
        "Batch size per GPU: 4, Total batch size: 4",
        "Epoch 1/1",
        "Epoch 1 Summary:",
        "  Train Loss: 0.",
        "  Val Loss:   0.",
        "training did not make the network better",
    ):
        assert any(said.startswith(line) for said in caplog.messages), line


# ---- Errors ----------------------------------------------------------------------------------


def test_missing_weights(data, tmp_path):
    text = "v_48_020.pt: no such file; the weights are published at"
    with pytest.raises(script.InputError, match=text):
        run(data, tmp_path / "out", "--base_model_name=v_48_020")


def test_two_names_of_the_learning_rate(tmp_path):
    """In a file and on the command line, which wins."""
    path = tmp_path / "options.yaml"
    path.write_text("learning_rate: 0.5")
    for words, rate in (([], 0.5), (["--lr=2"], 2.0), (["learning_rate=3"], 3.0)):
        assert parse_arguments(script, f"--config={path}", *words).lr == rate


def test_another_split_is_refused_on_resume(data, trained):
    """Structures would be on the other side."""
    with pytest.raises(script.InputError, match="was trained on other data"):
        run(data, trained, "--val_fraction=0.4")


# ---- Tools -----------------------------------------------------------------------------------


def text_of(chain):
    return "".join(script.ALPHABET[i] for i in chain.letters)


def test_scores_are_those_of_the_run(data, trained, tmp_path, tool):
    """At the run's own beta and temperature; log-probabilities at temperature 1. Says whether it
    found best.pt or best_model.pt."""

    def scores(name, found, *options):
        """{pair: {column: number}}"""
        out = tmp_path / f"{name}.csv"
        options = [data / "pairs.json", "--out", out, "--device=cpu", *options]
        assert f"{trained}/{name}: {found}" in tool("score_dpo", trained / name, *options)
        rows = csv.DictReader(out.read_text().splitlines())
        return {row.pop("pair"): {key: float(row[key]) for key in row} for row in rows}

    held = scores("best.pt", "checkpoint of a run", "--split", trained / "split.json")
    cold = scores("best_model.pt", "a network in ProteinMPNN's own format", "--temperature=0.1")
    assert list(held) == json.loads((trained / "split.json").read_text())["valid"]
    assert len(cold) == 20
    best = json.loads((trained / "summary.json").read_text())["validation"]
    margins = np.array([row["margin"] for row in held.values()])
    assert margins.mean() == pytest.approx(best["rewards/margins"], abs=1e-4)
    assert (margins > 0).mean() == best["rewards/accuracies"]
    assert abs(margins).min() > 1e-3, "network and reference are one"

    for name, row in held.items():
        reward = 0.1 * (row["logp_chosen"] - row["reference_chosen"])
        assert row["reward_chosen"] == pytest.approx(reward, abs=2e-6)
        assert cold[name]["logp_chosen"] == pytest.approx(row["logp_chosen"], abs=1e-4)
        assert cold[name]["reward_chosen"] != row["reward_chosen"]


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
    fixed positions keep their letters; recovery and perplexity beside the reference's."""
    (path,) = (ROOT / "data" / "dpo").glob("7CTH*")
    chains = script.read_structure(path).chains
    first = len(chains["L"].letters)
    out = tmp_path / "designs.fasta"
    options = ["--design_chains", "L", "H", "--mutable_ranges", f"{first + 4}-{first + 11}"]
    options += ["--fixed_positions", first + 6, "--num_samples=3", "--temperature=2", "--out", out]
    said = tool("design_dpo", trained / "best.pt", path, *options)
    assert "network    recovery" in said
    assert "reference  recovery" in said

    lines = out.read_text().splitlines()
    own = lines[1]
    assert own == f"{text_of(chains['L'])}/{text_of(chains['H'])}"
    drawn = lines[3::2]
    assert len(set(drawn)) == 3
    designed = [first + i for i in (5, 6, 8, 9, 10, 11, 12)]  # after the '/', without the fixed one
    for header, letters in zip(lines[2::2], drawn, strict=True):
        changed = {i for i in range(len(own)) if own[i] != letters[i]}
        assert len(letters) == len(own)
        assert changed <= set(designed)
        recovery = 1 - len(changed) / len(designed)
        assert f"recovery={recovery:.4f}" in header


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

    scored["sequences"][1] = "W"
    (tmp_path / "bad.json").write_text(json.dumps([scored]))
    out = tmp_path / "bad_pairs.json"
    errors = tool("make_dpo_pairs", tmp_path / "bad.json", "--out", out, status=2)
    assert "sequence 1 has 1 letters; expected" in errors
    assert not out.exists()
