"""run_dpo_ddp.py and its tools as a user calls them: how a run starts and ends, its precision, what
is done once, errors."""

import csv
import importlib
import json
import logging
import math
import sys
from collections import Counter
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import ROOT, call_script, import_tool, write_structures
from torch.utils._python_dispatch import TorchDispatchMode

script = importlib.import_module("run_dpo_ddp")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Five structures with four pairs each."""
    folder = tmp_path_factory.mktemp("dpo")
    write_structures(folder, 5, pairs=4, least=8, most=24)
    return folder


def words_of(data, out, *options):
    words = [f"--train_data={data}/pairs.json", f"--output_dir={out}", "--base_model_name=random"]
    words += ["--batch_size=4", "--num_epochs=1", "--num_orders=2", "--log_every=1", "--device=cpu"]
    return [*words, *options]


def run(data, out, *options):
    """One rank, in this process; the rows of metrics.jsonl."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["run_dpo_ddp.py", *words_of(data, out, *options)])
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
def plain(data):
    """A run with the default options, as few as it has."""
    run(data, data / "plain")
    return data / "plain"


@pytest.fixture(scope="module")
def trained(data):
    """A run with a warm start."""
    options = ["--sft_epochs=3", "--num_epochs=2", "--lr=1e-3", "--temperature=1"]
    run(data, data / "trained", *options, "--label_smoothing=0.1", "--sft_weight=0.5")
    return data / "trained"


@pytest.fixture
def tool(monkeypatch, capsys):
    """tool(name, *options): exit status, output, errors of a tool."""

    def call(name, *options):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, options)])
        status = 0
        try:
            import_tool(name).main()
        except SystemExit as error:
            status = error.code
        return status, *capsys.readouterr()

    return call


# ---- How a run starts ------------------------------------------------------------------------


def test_a_run_starts_at_the_known_loss(data, plain, trained, tmp_path):
    """Network and reference are one: ln 2, or 1 / (2 beta)^2 with IPO. IEEE products are the
    default."""
    run(data, tmp_path, "--loss_type=ipo")
    for folder, expected in {plain: math.log(2), trained: math.log(2), tmp_path: 25.0}.items():
        rows = rows_of(folder)
        assert first_loss(rows) == pytest.approx(expected, rel=1e-6 if expected < 1 else 1e-4)
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["baselines"]["before"]["loss"] == pytest.approx(expected, rel=1e-9)
        assert summary["baselines"]["before"]["rewards/margins"] == 0
        assert summary["args"]["precision"] == "fp32"
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.backends.cudnn.allow_tf32 is False


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


def test_bf16_warns(data, tmp_path, caplog):
    rows = run(data, tmp_path / "out", "--precision=bf16")
    assert "rounding may be larger than what is learned" in caplog.text
    assert all(math.isfinite(row["loss"]) for row in rows if "loss" in row)


# ---- What a run does -------------------------------------------------------------------------


class Wide(TorchDispatchMode):
    """Counts what gives float64, which some devices do not have, except in `HOST`."""

    HOST = {"summarise", "evaluate", "sum_over_ranks", "write_split", "save"}

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float64:
            names = set()
            frame = sys._getframe()
            while frame is not None:
                names.add(frame.f_code.co_name)
                frame = frame.f_back
            if not names & self.HOST:
                self.found[str(function)] += 1
        return result


def test_what_is_done_once(data, tmp_path, monkeypatch):
    """Structures are read once, and encoded once by the reference pass, whatever the number of
    decoding orders; no step and no evaluation uses float64 on the device."""
    calls = Counter()
    read = script.read_structure
    encode = script.ProteinMPNN.encode
    score_reference = script.score_reference

    def counted_read(path):
        calls["read"] += 1
        return read(path)

    def counted_encode(model, structures):
        calls["encoded residues"] += len(structures.atoms)
        return encode(model, structures)

    def counted_reference(run):
        before = calls["encoded residues"]
        found = score_reference(run)
        calls["reference"] = calls["encoded residues"] - before
        return found

    monkeypatch.setattr(script, "read_structure", counted_read)
    monkeypatch.setattr(script.ProteinMPNN, "encode", counted_encode)
    monkeypatch.setattr(script, "score_reference", counted_reference)
    with Wide() as wide:
        run(data, tmp_path / "out", "--num_orders=3", "--num_epochs=3", "--eval_batch_size=4")
    lengths = {}
    for row in json.loads((data / "pairs.json").read_text()):
        lengths[row["pdb_file"]] = len(row["preferred_seq"])
    assert calls["read"] == 5 and calls["reference"] == sum(lengths.values())
    assert not wide.found, wide.found


def test_a_nan_in_validation_ends_the_run(data, tmp_path, monkeypatch):
    """It once stayed the best for ever."""
    plain = script.summarise
    made = []

    def summarise(*args):
        made.append(1)
        metrics = plain(*args)
        return {**metrics, "loss": math.nan} if len(made) == 2 else metrics  # 1: before training

    monkeypatch.setattr(script, "summarise", summarise)
    with pytest.raises(script.RunError, match="the validation loss of epoch 1 is nan"):
        run(data, tmp_path / "out")
    assert not (tmp_path / "out" / "best.pt").exists()


def test_files_load_in_the_official_format(trained):
    models = {}
    for name in ("reference", "best", "latest"):
        models[name] = script.read_model(trained / f"{name}_model.pt").state_dict()
    for kind in ("best", "latest"):
        state = torch.load(trained / f"{kind}.pt", weights_only=True)
        assert all(torch.equal(value, models[kind][n]) for n, value in state["model"].items())
    assert not torch.equal(models["reference"]["W_out.bias"], models["latest"]["W_out.bias"])
    split = json.loads((trained / "split.json").read_text())
    assert len(split["train"]) == 16 and len(split["valid"]) == 4


def test_log_lines_of_the_document(data, tmp_path):
    """And the warning of a run that did not make the network better."""
    words = words_of(data, tmp_path / "out", "--backend=ccl", "--lr=0")
    status, text = call_script("run_dpo_ddp", *words)
    assert status == 0, text
    for line in (
        "Initialized DDP: rank=0, world_size=1, local_rank=0",
        "Using device: cpu",
        "Loaded 16 training and 4 validation pairs",
        "Batch size per GPU: 4, Total batch size: 4",
        "Epoch 1/1",
        "Epoch 1 Summary:",
        "  Train Loss: 0.",
        "  Val Loss:   0.",
    ):
        assert f"INFO: {line}" in text, line
    assert "WARNING: training did not make the network better" in text
    speeds = [row["samples_per_s"] for row in rows_of(tmp_path / "out") if "samples_per_s" in row]
    assert all(speed > 0 and f"samples_per_s={speed:.6g}" in text for speed in speeds)


# ---- Errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--base_model_name=v_48_020"], "v_48_020.pt: no such file; the weights are published at"),
        (["--temperature=0"], "--temperature 0.0: must be a finite number above 0"),
        (["--loss_type=ipo", "--label_smoothing=0.1"], "--loss_type ipo has none"),
    ],
)
def test_wrong_calls(data, tmp_path, options, text):
    status, said = call_script("run_dpo_ddp", *words_of(data, tmp_path / "out", *options))
    assert status == 2 and text in said and "Traceback" not in said
    assert said.count(": error: ") == 1


def test_two_names_of_the_learning_rate(tmp_path):
    """In a file and on the command line, which wins."""
    path = tmp_path / "options.yaml"
    path.write_text("learning_rate: 0.5")
    for words, rate in (([], 0.5), (["--lr=2"], 2.0), (["learning_rate=3"], 3.0)):
        with mock.patch.object(sys, "argv", ["script", f"--config={path}", *words]):
            assert script.parse_args().lr == rate


def test_another_split_is_refused_on_resume(data, plain):
    """Structures would be on the other side."""
    with pytest.raises(script.InputError, match="was trained on other data"):
        run(data, plain, "--val_fraction=0.4")


# ---- Tools -----------------------------------------------------------------------------------


def test_scores_are_those_of_the_run(data, trained, tmp_path, tool):
    """At the run's own beta and temperature; log-probabilities at temperature 1. Says whether it
    found best.pt or best_model.pt."""

    def scores(name, found, *options):
        """{pair: {column: number}}"""
        out = tmp_path / f"{name}.csv"
        options = [data / "pairs.json", "--out", out, "--device=cpu", *options]
        status, said, errors = tool("score_dpo", trained / name, *options)
        assert status == 0, errors
        assert f"{trained}/{name}: {found}" in said
        rows = csv.DictReader(out.read_text().splitlines())
        return {row.pop("pair"): {key: float(row[key]) for key in row} for row in rows}

    held = scores("best.pt", "checkpoint of a run", "--split", trained / "split.json")
    cold = scores("best_model.pt", "ProteinMPNN's own format", "--temperature=0.1")
    split = json.loads((trained / "split.json").read_text())
    assert list(held) == split["valid"] and len(cold) == 20
    best = json.loads((trained / "summary.json").read_text())["validation"]
    margins = np.array([row["margin"] for row in held.values()])
    assert margins.mean() == pytest.approx(best["rewards/margins"], abs=1e-4)
    assert (margins > 0).mean() == best["rewards/accuracies"]

    for name, row in held.items():
        reward = 0.1 * (row["logp_chosen"] - row["reference_chosen"])
        assert row["reward_chosen"] == pytest.approx(reward, abs=2e-6)
        assert cold[name]["logp_chosen"] == pytest.approx(row["logp_chosen"], abs=1e-4)
        assert cold[name]["reward_chosen"] != row["reward_chosen"]


def test_no_checkpoint_is_an_error(data, trained, tmp_path, tool):
    """Once random weights were compared with random ones, status 0."""
    damaged = bytearray((trained / "best.pt").read_bytes())
    damaged[len(damaged) // 2] ^= 255
    (tmp_path / "damaged.pt").write_bytes(damaged)
    for call in (
        ("score_dpo", tmp_path / "gone.pt", data / "pairs.json"),
        ("design_dpo", tmp_path / "gone.pt", data / "helix0.pdb"),
        ("score_dpo", trained / "best.pt", data / "pairs.json", "--reference=gone.pt"),
        ("score_dpo", tmp_path / "damaged.pt", data / "pairs.json"),
    ):
        status, _, errors = tool(*call, "--out", tmp_path / "out.txt")
        assert status == 2 and errors.count("\n") == 1 and "expected" in errors
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
    status, said, errors = tool("design_dpo", trained / "best.pt", path, *options)
    assert status == 0, errors
    assert "network    recovery" in said and "reference  recovery" in said
    records = [record.partition("\n") for record in out.read_text().split(">")[1:]]
    own = records[0][2].strip()
    assert own == f"{text_of(chains['L'])}/{text_of(chains['H'])}" and len(records) == 4
    designed = [first + i for i in (5, 6, 8, 9, 10, 11, 12)]  # after the '/', without the fixed one
    for header, _, text in records[1:]:
        letters = text.strip()
        changed = {i for i in range(len(own)) if own[i] != letters[i]}
        assert len(letters) == len(own) and changed and changed <= set(designed)
        values = dict(word.split("=") for word in header.split()[1:])
        recovery = np.mean([letters[i] == own[i] for i in designed])
        assert float(values["recovery"]) == pytest.approx(recovery, abs=1e-4)
    assert len({text for _, _, text in records[1:]}) == 3


def text_of(chain):
    return "".join(script.ALPHABET[i] for i in chain.letters)


def test_designs_are_scored_as_the_forward_pass_says():
    """decode() goes residue by residue; the network, given the letters, says the same."""
    from test_dpo_model import backbone, network, structures

    design = import_tool("design_dpo")
    model, found = network(), structures(backbone(28, seed=6, chains=2))
    designed = torch.arange(28) >= 12
    generator = torch.Generator().manual_seed(1)
    orders = []
    for _ in range(3):
        shuffled = 12 + torch.randperm(16, generator=generator)
        orders.append(torch.cat([torch.arange(12), shuffled]))
    native = torch.randint(0, 21, (28,), generator=generator)
    with torch.no_grad():
        inputs = (found, native, designed, torch.stack(orders))
        letters, logp = design.decode(model, *inputs, 1.0, generator)
        for number, order in enumerate(orders):
            rank = order.argsort()
            logits = model(found, letters[number : number + 1], torch.arange(28), rank)[0]
            expected = logits.log_softmax(-1).gather(-1, letters[number][:, None])[:, 0]
            assert (expected - logp[number]).abs().max() < 1e-4
    assert torch.equal(letters[:, :12], native[:12].expand(3, -1))
    assert letters[:, 12:].max() < 20  # X is never drawn
    # letters as often as the softmax says
    logits = torch.randn(1, 21, generator=generator).expand(20_000, -1)
    drawn = design.draw(logits, 0.5, generator).bincount(minlength=20) / 20_000
    assert (drawn - (logits[0, :20] / 0.5).softmax(-1)).abs().max() < 0.02
    assert (design.draw(logits, 0, generator) == logits[0, :20].argmax()).all()


def test_a_collapse_is_warned_about(data, trained, tmp_path, tool):
    state = torch.load(trained / "best_model.pt", weights_only=True)
    state["model_state_dict"]["W_out.bias"][3] += 100  # E everywhere
    torch.save(state, tmp_path / "collapsed.pt")
    out = tmp_path / "out.fasta"
    _, said, _ = tool("design_dpo", tmp_path / "collapsed.pt", data / "helix0.pdb", "--out", out)
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
    row = {"pdb_file": f"{data}/helix0.pdb", "chain_id": "A", "cluster": "x"}
    scored = {**row, "sequences": texts, "scores": [1.0, 3.0, 2.0]}
    (tmp_path / "scored.json").write_text(json.dumps([scored]))
    lines = ["pdb_file,sequence,score,chain_id,cluster"]
    for text, score in zip(texts, [-1.0, -3.0, -2.0], strict=True):
        lines.append(f"{data}/helix0.pdb,{text},{score},A,x")
    (tmp_path / "scored.csv").write_text("\n".join(lines))

    def make(source, name, *options):
        out = tmp_path / name
        status, _, errors = tool("make_dpo_pairs", tmp_path / source, "--out", out, *options)
        assert status == 0, errors
        return json.loads(out.read_text())

    made = make("scored.json", "one.json")
    pairs = [(pair["preferred_seq"], pair["unpreferred_seq"]) for pair in made]
    assert pairs == [(texts[1], texts[0]), (texts[1], texts[2]), (texts[2], texts[0])]
    assert all(pair["cluster"] == "x" and pair["chain_id"] == "A" for pair in made)
    assert made == make("scored.csv", "two.json", "--lower_is_better")
    for pair, swapped in zip(made, make("one.json", "swapped.json", "--swap"), strict=True):
        assert swapped["preferred_seq"] == pair["unpreferred_seq"]
        assert swapped["unpreferred_seq"] == pair["preferred_seq"]

    scored["sequences"][1] = "W"
    (tmp_path / "bad.json").write_text(json.dumps([scored]))
    out = tmp_path / "bad_pairs.json"
    status, _, errors = tool("make_dpo_pairs", tmp_path / "bad.json", "--out", out)
    assert status == 2 and "sequence 1 has 1 letters; expected" in errors and not out.exists()
