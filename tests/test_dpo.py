"""run_dpo_ddp.py and its tools as a user calls them: how a run starts and ends, errors."""

import collections
import json
import math
import re
import shutil

import pandas
import pytest
import torch
from helpers import (
    ROOT,
    call_script,
    check_refusal,
    import_tool,
    run_here,
    write_structures,
)
from runs import Run, differences
from test_dpo_model import RELEASED, official_network

import run_dpo_ddp as script


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


def tool(name, *options, **more):
    return call_script(f"tools/{name}", *options, **more)


@pytest.mark.parametrize(("kind", "expected"), [("sigmoid", math.log(2)), ("ipo", 25.0)])
def test_a_run_starts_at_the_known_loss(kind, expected, data, tmp_path):
    """Network and reference are one: ln 2, or 1 / (2 beta)^2 with IPO; all pairs are ties."""
    options = [f"--loss_type={kind}", "--batch_size=2", "--global_batch_size=4"]
    rows = run(data, tmp_path / "out", *options)
    assert torch.get_float32_matmul_precision() == "highest"
    assert rows[0]["val/loss"] == pytest.approx(expected, rel=1e-5)
    assert rows[0]["val/rewards/accuracies"] == 0.5
    assert [row["epoch"] for row in rows] == [0] * 6
    assert rows[1]["loss"] == pytest.approx(expected, rel=1e-5 if kind == "sigmoid" else 1e-4)


def test_a_resumed_run_is_not_its_own_reference(data, trained, tmp_path):
    """The reference is in the checkpoint, whatever the file of weights has become."""
    weights = tmp_path / "w.pt"
    shutil.copy(trained / "best_model.pt", weights)
    options = ["--base_model_name=w", f"--base_model_dir={tmp_path}", "--lr=1e-3", "--num_epochs=2"]
    first = run(data, tmp_path / "first", *options)
    run(data, tmp_path / "stopped", *options, "--num_epochs=1")
    state = torch.load(weights, weights_only=True)
    state["model_state_dict"]["W_out.bias"][3] += 1
    torch.save(state, weights)
    resumed = run(data, tmp_path / "stopped", *options, f"--cache_dir={tmp_path}/other")
    assert [row.get("loss") for row in resumed] == [row.get("loss") for row in first]
    assert resumed[-1]["val/loss"] == first[-1]["val/loss"] < math.log(2)
    states = [Run(tmp_path / name).state for name in ("first", "stopped")]
    assert not differences(*[state["reference"] for state in states])
    assert differences(states[0]["reference"], states[0]["model_state_dict"])


def test_a_nan_in_validation_ends_the_run(data, tmp_path, monkeypatch):
    """It once stayed the best for ever."""
    losses = iter([0.7, math.nan])
    monkeypatch.setattr(script, "evaluate", lambda *args: {"loss": next(losses)})
    with pytest.raises(RuntimeError, match="the validation loss is nan"):
        run(data, tmp_path / "out")
    assert not (tmp_path / "out" / "best_model.pt").exists()


def text_of(chain):
    return "".join(script.ALPHABET[i] for i in chain.letters)


def test_scores_are_those_of_the_run(data, trained, tmp_path):
    """Of what it held out, at its own temperature. The official program, too, reads its network."""
    best = trained / "best_model.pt"
    assert official_network(best).W_out.bias.equal(script.read_model(best).W_out.bias)
    out = tmp_path / "scores.csv"
    said = tool("score_dpo", best, "--out", out)
    assert "beta 0.1, temperature 1, 4 pairs" in said
    table = pandas.read_csv(out, index_col="pair")
    summary = Run(trained).summary
    assert list(table.index) == summary["held_out"]
    for name, value in summary["validation"].items():
        assert table[name].mean() == pytest.approx(value, abs=1e-5)
        before = summary["baselines"]["before"][name]
        assert re.search(rf"^{name} +{value:.4f} +{before:.4f}$", said, re.MULTILINE)

    out.unlink()
    words = [RELEASED, data / "pairs.json", f"--reference={RELEASED}"]
    assert "temperature 0.1, 20 pairs" in tool("score_dpo", *words, "--out", out)
    assert (pandas.read_csv(out)["rewards/margins"] == 0).all()


@pytest.fixture(scope="module")
def folder(data, trained):
    """best.pt, other.pt of other pairs, and tables that are wrong; the data are there, too."""
    state = torch.load(trained / "best_model.pt", weights_only=True)
    torch.save(state, data / "best.pt")
    state["args"]["data_hash"] = "another"
    torch.save(state, data / "other.pt")
    own = text_of(script.read_structure(f"{data}/helix0.pdb", {})[0]["A"])
    tables = ["", ",ddg\nhelix0.pdb,AC,n/a", ",ddg\nhelix0.pdb,AC,1"]
    tables += [f",ddg,design_chains\nhelix0.pdb,{own},1,A", f",ddg\nhelix0.pdb,{own},1"]
    for number, text in enumerate(tables):
        (data / f"{number}.csv").write_text(f"pdb_file,sequence{text}")
    return data


SCORE = "score_dpo --out=new"
DESIGN = f"design_dpo --out=new {RELEASED}"
PAIRS = "make_dpo_pairs --out=new"
TWO = f"{ROOT}/data/dpo/7CTH_HL.pdb.gz"
WRONG = {  # a tool and its words; what is said. Once random weights were compared with random ones
    f"{SCORE} other.pt": "the pairs have changed since",
    f"{SCORE} {RELEASED} --reference={RELEASED}": "give the pairs, or",
    f"{SCORE} {RELEASED} pairs.json": "give --reference",
    f"{SCORE} best.pt --out=other.pt": "other.pt exists: expected a new file",
    "score_dpo --out=new/x best.pt": "--out new/x: there is no such folder",
    f"{SCORE} best.pt pairs.json --reference=gone.pt": "gone.pt: there is no such file",
    f"{SCORE} best.pt pairs.json --score=ddg": "--score ddg: expected sequences, as a .csv",
    f"{SCORE} {RELEASED} 0.csv --score=ddg": "sequence; expected pdb_file, sequence, ddg",
    f"{SCORE} {RELEASED} 1.csv --score=ddg": "line 2: ddg is 'n/a'; expected a finite number",
    f"{SCORE} {RELEASED} 2.csv --score=ddg": "line 2: sequence has 2 letters",
    f"{SCORE} {RELEASED} 3.csv --score=ddg": r'line 2: .* is A; expected a list, such as \["A"\]',
    "design_dpo --out=new lost.pt helix0.pdb": "lost.pt: there is no such file",
    f"{DESIGN} helix0.pdb --omit=AB": "--omit AB: expected letters of ACD",
    f"{DESIGN} helix0.pdb --omit={script.ALPHABET}": "expected letters of .*, not all",
    f"{DESIGN} helix0.pdb --bias B=1": "--bias B=1: expected such as K=0.5, with a letter of ACD",
    f"{DESIGN} helix0.pdb --mutable_positions A99": "helix0.pdb: mutable residues A99 to .* as A1",
    f"{DESIGN} helix0.pdb --mutable_ranges A6-7": "helix0.pdb: range A6-7; expected such as A6-A17",
    f"{DESIGN} helix0.pdb --mutable_ranges 5": "range 5; expected such as A6-A17, or 5-16",
    f"{DESIGN} helix0.pdb --tied A B": r"--tied A B; expected equally long design chains \(A of 22",
    f"{DESIGN} {TWO} --design_chains H L --tied H L": "7CTH.*H of 127, L of 109. with the",
    f"{PAIRS} 2.csv --score=charge": "line 2: sequence has 2 letters; expected",
    f"{PAIRS} 0.csv --score=ddg": "sequence; expected pdb_file, sequence, ddg",
    f"{PAIRS} 1.csv --score=ddg": "line 2: ddg is 'n/a'; expected a finite number",
    f"{PAIRS} 4.csv --score=ddg": "no pairs: of 1 sequences no two on a backbone have scores that",
}


@pytest.mark.parametrize("words", WRONG)
def test_tools_refuse(words, folder, monkeypatch):
    monkeypatch.chdir(folder)
    check_refusal(words, WRONG[words])


def test_from_designs_to_pairs(trained, tmp_path):
    """FASTA with the structure's own sequence first, '/' between chains in the order asked for."""
    chains, _ = script.read_structure(TWO, collections.defaultdict(list))
    first = len(chains["L"].letters)
    out = tmp_path / "designs.fasta"
    options = ["--design_chains", "L", "H", "--mutable_ranges", f"{first + 4}-{first + 11}"]
    options += ["--num_samples=4", "--temperature=2", "--out", out]
    said = tool("design_dpo", trained / "best_model.pt", TWO, *options)
    for who in ("network", "reference"):
        text = r" +recovery [\d.]+, charge_per_100 [-\d.]+, perplexity [\d.]+, "
        assert re.search(rf"^{who}{text}perplexity_reference [\d.]+$", said, re.MULTILINE)

    lines = out.read_text().splitlines()
    own = lines[1]
    assert own == f"{text_of(chains['L'])}/{text_of(chains['H'])}"
    drawn = lines[3::2]
    assert len(set(drawn)) == 4
    designed = [first + i for i in range(5, 13)]  # after the '/'
    for header, letters in zip(lines[2::2], drawn, strict=True):
        changed = {i for i in range(len(own)) if own[i] != letters[i]}
        assert len(letters) == len(own)
        assert changed <= set(designed)
        recovery = 1 - len(changed) / len(designed)
        assert f"recovery={recovery:.4f}" in header

    pairs = tmp_path / "pairs.json"
    tool("make_dpo_pairs", tmp_path / "designs.csv", "--score=charge", "--out", pairs)
    net_charge = import_tool("make_dpo_pairs").net_charge
    assert net_charge("kRDa") == 1
    made = [json.loads(line) for line in pairs.read_text().splitlines()]
    for pair in made:
        assert net_charge(pair["preferred_seq"]) > net_charge(pair["unpreferred_seq"])
        assert pair["mutable_ranges"] == [[first + 4, first + 11]]
    scores = tmp_path / "scores.csv"
    tool("score_dpo", trained / "latest.pt", pairs, "--out", scores)
    assert len(pandas.read_csv(scores)) == len(made) > 0


def test_a_second_round(trained, tmp_path, monkeypatch):
    """The commands of the guide. Its reference is still that of the first; before training its
    scores are those that score_dpo gives the network that it starts from."""
    monkeypatch.chdir(tmp_path)
    for name in ("data", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    guide = (ROOT / "docs" / "DDP_TRAINING_GUIDE.md").read_text()
    commands = guide.split("# a second round, after the quickstart\n")[1].split("```")[0]
    commands = commands.replace("outputs/dpo_quickstart", str(trained))
    draw, make_pairs, train = [command.split() for command in commands.splitlines()]
    draw += ["--num_samples=8"]
    train += ["--num_epochs=1", "--eval_orders=1"]
    for _, name, *words in (draw, make_pairs, train):
        call_script(name.removesuffix(".py"), *words)

    second = Run(tmp_path / "outputs" / "dpo_round2")
    first = torch.load(trained / "best_model.pt", weights_only=True)
    first["args"]["temperature"] = second.summary["args"]["temperature"]
    torch.save(first, tmp_path / "first.pt")
    words = ["first.pt", second.summary["args"]["val_data"], f"--reference={RELEASED}"]
    tool("score_dpo", *words, "--orders=1")
    table = pandas.read_csv("scores.csv", index_col="pair")
    assert list(table.index) == second.summary["held_out"]
    for name, value in second.summary["baselines"]["before"].items():
        assert table[name].mean() == pytest.approx(value, rel=2e-6, abs=1e-6), name
    assert abs(table["rewards/margins"]).min() > 0


def test_letters_are_drawn_as_often_as_the_softmax_says():
    design = import_tool("design_dpo")
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(1, 21, generator=generator).expand(20_000, -1)
    bias = torch.tensor([1.0, -math.inf, *[0.0] * 18])
    drawn = design.draw(logits, bias, 0.5, generator).bincount(minlength=20) / 20_000
    assert (drawn - ((logits[0, :20] + bias) / 0.5).softmax(-1)).abs().max() < 0.02
    assert drawn[1] == 0
    assert (design.draw(logits, bias, 0, generator) == (logits[0, :20] + bias).argmax()).all()


def test_pairs_of_scored_sequences(data, tmp_path):
    """The best with the worst, and so on. Lines that differ in a field are scored apart; a sequence
    that is there twice has its mean score. What is in no pair, or has no score, is counted."""
    own = text_of(script.read_structure(f"{data}/helix0.pdb", {})[0]["A"])
    texts = [own[:i] + "W" + own[i + 1 :] for i in range(5)]
    lines = ["pdb_file,sequence,score,design_chains,cluster,note,description,comment,weight,margin"]
    for text, score in zip([*texts, texts[1].lower()], [0.1, 0.8, 0.5, 0.45, 0.7, 1], strict=True):
        lines.append(f'{data}/helix0.pdb,{text},{score},"[""A""]",x,y,{score},{score},{score},2')
    lines.append(f"{data}/helix0.pdb,{own},0.3,,x")  # its other fields are missing
    lines.append("gone.pdb,W,NA")
    table = tmp_path / "scored.csv"
    more = tmp_path / "more.csv"
    more.write_text(f"{lines[0]}\n\n{lines.pop(6)}\n\n")
    table.write_text("\n".join(lines))

    cases = {"": [1, 0, 4, 3], "--lower_is_better": [0, 1, 3, 4]}
    cases.update({"--score_gap=0.5": [1, 0], "--pairs_per_backbone=1": [1, 0]})
    for option, expected in cases.items():
        out = tmp_path / f"{option}.json"
        said = tool("make_dpo_pairs", table, more, "--out", out, *option.split())
        assert "columns that are not used: comment, description, margin, note, weight\n" in said
        assert re.search(f"1 lines have a sequence again: .* such as {more}: line 3\n", said)
        count = len(expected)
        assert f"6 sequences: {count} in pairs, {6 - count} in none, such as {table}: line" in said
        found = []
        assert f"1 lines have no score, such as {table}: line 8\n" in said
        for pair in map(json.loads, out.read_text().splitlines()):
            assert pair["cluster"] == "x" and pair["design_chains"] == ["A"]
            assert not pair.keys() & {"weight", "margin"}
            found += [texts.index(pair[name]) for name in ("preferred_seq", "unpreferred_seq")]
        assert found == expected
