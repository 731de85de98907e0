"""run_dpo_ddp.py and its tools as a user calls them: how a run starts and ends, errors."""

import collections
import json
import math
import re
import shutil

import pandas
import pytest
import torch
from helpers import ROOT, call_script, check_refusal, import_tool, run_here, write_structures
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
    """One rank, in this process."""
    words = f"""--train_data={data}/pairs.json --cache_dir={out}.cache --output_dir={out}
        --base_model_name=random --batch_size=4 --num_epochs=1 --log_every=1
        --val_fraction=0.2 --device=cpu"""
    run_here(script, *words.split(), *options)


@pytest.fixture(scope="module")
def trained(data):
    options = ["--num_epochs=4", "--lr=1e-3", "--temperature=1"]
    run(data, data / "trained", *options, "--sft_weight=0.5")
    return data / "trained"


def test_a_run_starts_at_the_known_loss(trained):
    """Network and reference are one: ln 2, and all pairs are ties. (IPO: test_dpo_model.py.)"""
    before, first = Run(trained).rows[:2]
    assert before["val/loss"] == pytest.approx(math.log(2), rel=1e-5)
    assert before["val/rewards/accuracies"] == 0.5
    assert first["loss"] == pytest.approx(math.log(2), rel=1e-5)


def test_a_resumed_run_is_not_its_own_reference(data, trained, tmp_path):
    """The reference is in the checkpoint, whatever the file of weights has become."""
    weights = tmp_path / "w.pt"
    shutil.copy(trained / "best_model.pt", weights)
    options = ["--base_model_name=w", f"--base_model_dir={tmp_path}", "--lr=1e-3"]
    run(data, tmp_path / "out", *options)
    before = Run(tmp_path / "out").state
    state = torch.load(weights, weights_only=True)
    state["model_state_dict"]["W_out.bias"][3] += 1
    torch.save(state, weights)

    run(data, tmp_path / "out", *options, "--num_epochs=2", f"--cache_dir={tmp_path}/other")
    after = Run(tmp_path / "out").state
    assert not differences(after["reference"], before["reference"])
    assert differences(after["reference"], after["model_state_dict"])


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
    said = call_script("tools/score_dpo", best, "--out", out)
    assert "beta 0.1, temperature 1, 4 pairs" in said
    table = pandas.read_csv(out, index_col="pair")
    summary = Run(trained).summary
    assert list(table.index) == summary["held_out"]
    for name, value in summary["validation"].items():
        assert table[name].mean() == pytest.approx(value, abs=1e-5)
        before = summary["baselines"]["before"][name]
        assert re.search(rf"^{name} +{value:.4f} +{before:.4f}$", said, re.MULTILINE)

    words = [RELEASED, data / "pairs.json", f"--reference={RELEASED}", f"--out={tmp_path}/new.csv"]
    assert "beta 0.1, temperature 0.1, 20 pairs" in call_script("tools/score_dpo", *words)


@pytest.fixture(scope="module")
def folder(data, trained):
    """best.pt, other.pt of other pairs, and tables that are wrong; the data are there, too."""
    state = torch.load(trained / "best_model.pt", weights_only=True)
    torch.save(state, data / "best.pt")
    state["args"]["data_hash"] = "another"
    torch.save(state, data / "other.pt")
    own = text_of(script.read_structure(f"{data}/helix0.pdb", {})[0]["A"])
    tables = {
        "no_score": "",
        "bad_score": ",ddg\nhelix0.pdb,AC,n/a",
        "no_list": f",design_chains\nhelix0.pdb,{own},A",
        "one": f",ddg\nhelix0.pdb,{own},1",
    }
    for name, text in tables.items():
        (data / f"{name}.csv").write_text(f"pdb_file,sequence{text}")
    return data


SCORE = "score_dpo --out=new"
DESIGN = f"design_dpo --out=new {RELEASED}"
TWO = f"{ROOT}/data/dpo/7CTH_HL.pdb.gz"
WRONG = {  # a tool and its words; what is said. Once random weights were compared with random ones
    f"{SCORE} other.pt": "the pairs have changed since",
    f"{SCORE} {RELEASED} --reference={RELEASED}": "give the pairs, or",
    f"{SCORE} {RELEASED} pairs.json": "give --reference",
    f"{SCORE} best.pt --out=other.pt": "other.pt exists: expected a new file",
    "score_dpo --out=new/x best.pt": "--out new/x: there is no such folder",
    f"{SCORE} best.pt gone.json": "gone.json: there is no such file",
    f"{SCORE} best.pt pairs.json --score=ddg": "--score ddg: expected sequences, as a .csv",
    f"{SCORE} {RELEASED} no_score.csv --score=ddg": "sequence; expected pdb_file, sequence, ddg",
    f"{SCORE} {RELEASED} bad_score.csv --score=ddg": "line 2: ddg is 'n/a'; expected a finite",
    f"{SCORE} {RELEASED} no_list.csv": r'line 2: .* is A; expected a list, such as \["A"\]',
    "design_dpo --out=new lost.pt helix0.pdb": "lost.pt: there is no such file",
    f"{DESIGN} helix0.pdb --omit={script.ALPHABET}": "expected letters of .*, not all",
    f"{DESIGN} helix0.pdb --bias B=1": "--bias B=1: expected such as K=0.5, with a letter of ACD",
    f"{DESIGN} helix0.pdb --mutable_ranges A6-7": "helix0.pdb: range A6-7; expected such as A6-A17",
    f"{DESIGN} helix0.pdb --mutable_ranges 5": "range 5; expected such as A6-A17, or 5-16",
    f"{DESIGN} {TWO} --design_chains H L --tied H L": "7CTH.*H of 127, L of 109. with the",
    "make_dpo_pairs --out=new one.csv --score=ddg": "no pairs: of 1 sequences no two on a backbone",
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
    call_script("tools/design_dpo", trained / "best_model.pt", TWO, *options)

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
    call_script("tools/make_dpo_pairs", tmp_path / "designs.csv", "--score=charge", "--out", pairs)
    net_charge = import_tool("make_dpo_pairs").net_charge
    assert net_charge("kRDa") == 1
    made = [json.loads(line) for line in pairs.read_text().splitlines()]
    assert made
    for pair in made:
        assert net_charge(pair["preferred_seq"]) > net_charge(pair["unpreferred_seq"])
        assert pair["mutable_ranges"] == [[first + 4, first + 11]]


def test_a_second_round(data, trained, tmp_path):
    """Its reference is still that of the first; before training its scores are those that score_dpo
    gives the network that it starts from. (The commands of the guide: test_guide.py.)"""
    reference = f"--reference={RELEASED}"
    start = [f"--base_model_dir={trained}", "--base_model_name=best_model", "--temperature=1"]
    run(data, tmp_path / "second", *start, reference)
    out = tmp_path / "scores.csv"
    call_script("tools/score_dpo", trained / "best_model.pt", reference, "--out", out)
    table = pandas.read_csv(out)
    for name, value in Run(tmp_path / "second").summary["baselines"]["before"].items():
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
    lines = ["pdb_file,sequence,score,design_chains,cluster,comment,weight"]
    for text, score in zip([*texts, texts[1].lower()], [0.1, 0.8, 0.5, 0.45, 0.7, 1], strict=True):
        lines.append(f'{data}/helix0.pdb,{text},{score},"[""A""]",x,{score},2')
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
        said = call_script("tools/make_dpo_pairs", table, more, "--out", out, *option.split())
        assert "columns that are not used: comment, weight\n" in said
        assert re.search(f"1 lines have a sequence again: .* such as {more}: line 3\n", said)
        count = len(expected)
        assert f"6 sequences: {count} in pairs, {6 - count} in none, such as {table}: line" in said
        assert f"1 lines have no score, such as {table}: line 8\n" in said
        found = []
        for pair in map(json.loads, out.read_text().splitlines()):
            assert pair["cluster"] == "x" and pair["design_chains"] == ["A"]
            assert "weight" not in pair
            found += [texts.index(pair[name]) for name in ("preferred_seq", "unpreferred_seq")]
        assert found == expected
