"""Scores and designs of tools/: against the official program, and what is refused."""

import re
import sys
from pathlib import Path

import gemmi
import numpy as np
import pandas
import pytest
import torch
from helpers import ROOT, call_script, import_tool, parse_arguments
from scipy.stats import spearmanr
from test_dpo_model import RELEASED, official_network

import run_dpo_ddp as script

LETTERS = np.array(list(script.ALPHABET))
CHAINS = "--design_chains A B --fixed_chains C"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """trimer.pdb: crambin, 46 residues, three times; changed.pt: the released weights, changed."""
    folder = tmp_path_factory.mktemp("tools")
    structure = gemmi.read_structure(f"{ROOT}/data/dpo/1EJG_A.pdb.gz")
    structure.remove_alternative_conformations()
    for name, shift in {"B": 14, "C": 28}.items():
        chain = structure[0]["A"].clone()
        chain.name = name
        for residue in chain:
            for atom in residue:
                atom.pos += gemmi.Position(shift, 3, 0)
        structure[0].add_chain(chain)
    structure.write_pdb(str(folder / "trimer.pdb"))
    state = torch.load(RELEASED, weights_only=True)
    state["model_state_dict"]["W_out.weight"] *= 1.2
    torch.save(state, folder / "changed.pt")
    return folder


def official_inputs(folder, tied=()):
    """The official program, and what its `tied_featurize` makes of A and B, with C fixed."""
    program = sys.modules[type(official_network(RELEASED)).__module__]
    entry = program.parse_PDB(str(folder / "trimer.pdb"))[0]
    positions = {"trimer": [dict.fromkeys(tied, [i + 1]) for i in range(46)]} if tied else None
    chains = {"trimer": (["A", "B"], ["C"])}
    return program, program.tied_featurize([entry], "cpu", chains, tied_positions_dict=positions)


@torch.no_grad()
def test_sequences_are_scored_as_the_official_program_scores_them(folder, tmp_path):
    """Its --score_only, in the same decoding orders; X does not count. Beside the reference."""
    rng = np.random.default_rng(0)
    own = script.read_structure(f"{folder}/trimer.pdb").chains["A"].letters
    mutable = np.array([*range(5, 30), *range(60, 80)])
    sequences = np.tile([*own, *own], (6, 1))
    for sequence in sequences:
        sequence[rng.choice(mutable, 12)] = rng.integers(0, 20, 12)
    sequences[5, 7] = script.UNKNOWN
    table = pandas.DataFrame({"sequence": ["".join(LETTERS[own]) for own in sequences]})
    fields = [f"{folder}/trimer.pdb", '["A", "B"]', '["C"]', "[[5, 29], [60, 79]]"]
    table[["pdb_file", "design_chains", "fixed_chains", "mutable_ranges"]] = fields
    table["ddg"] = ["0.3", "-1", "", "0.3", "2", "1.5"]  # rho is of those with a number
    table.to_csv(folder / "variants.csv", index=False)
    out = tmp_path / "scores.csv"
    words = [RELEASED, folder / "variants.csv", f"--reference={folder}/changed.pt", "--orders=2"]
    said = call_script("tools/score_dpo", *words, "--score=ddg", "--out", out)
    found = pandas.read_csv(out, dtype={"ddg": str}, keep_default_na=False)
    assert (tmp_path / found["pdb_file"][0]).resolve() == folder / "trimer.pdb"
    assert found[table.columns[2:]].equals(table[table.columns[2:]])

    program, given = official_inputs(folder)
    whole = [given[i] for i in (0, 1, 2, 4, 12, 5)]  # X, S, mask, chain_M, residue_idx, chains
    expected = {}
    for who, path in {"network": RELEASED, "reference": folder / "changed.pt"}.items():
        network = official_network(path)
        scores = expected[f"{who}_logp_per_residue"] = np.zeros((6, 2))
        for line, number in np.ndindex(6, 2):
            whole[1][0, :92] = torch.from_numpy(sequences[line])
            designed = torch.isin(torch.arange(138), torch.from_numpy(mutable))
            order = script.decode_ranks(designed, number).argsort()[None]
            logp = network(*whole, None, use_input_decoding_order=True, decoding_order=order)
            counted = designed & (whole[1] != script.UNKNOWN)
            scores[line, number] = -program._scores(whole[1], logp, counted.float())
    expected["difference"] = np.subtract(*expected.values())
    some = [0, 1, 3, 4, 5]
    for name, scores in expected.items():
        assert np.abs(found[name] - scores.mean(1)).max() < 3e-5
        assert np.abs(found[f"{name}_error"] - np.abs(scores[:, 0] - scores[:, 1]) / 2).max() < 3e-5
        rho = spearmanr(found[name][some], found["ddg"][some].astype(float)).statistic
        error = (1 - rho**2) * np.sqrt((1 + rho**2 / 2) / 2)
        numbers = re.search(rf"^{name} +(.*)", said, re.MULTILINE)[1].split()
        close = pytest.approx([scores.mean(), rho, error], abs=1e-4)
        assert [float(number) for number in numbers] == close
    assert "with ddg, of 5 sequences" in said


@torch.no_grad()
@pytest.mark.parametrize("tied", [[], ["A", "B"]])
def test_letters_are_drawn_as_the_official_program_draws_them(tied, folder, monkeypatch):
    """From the same probabilities, in the same order, after the same letters: as `sample`, or
    `tied_sample`. Another sequence is drawn beside it."""
    design = import_tool("design_dpo")
    words = f"{RELEASED} {folder}/trimer.pdb {CHAINS} --omit=MC --bias K=0.5 e=-0.7".split()
    args = parse_arguments(design, *words)
    args.tied = tied
    target = design.Target(args, args.pdb_file[0], 48, "cpu")
    bias = design.read_bias(args)
    ranks = torch.stack([script.decode_ranks(target.designed, seed) for seed in (3, 4)])
    orders = design.order_tied(ranks, target.members)
    seen = []
    draw = design.draw
    monkeypatch.setattr(design, "draw", lambda *given: seen.append(given[0][0]) or draw(*given))
    native = torch.from_numpy(target.native).long()
    inputs = (design.Namespace(**target.features), native, target.designed, orders, target.members)
    generator = torch.Generator().manual_seed(1)
    drawn = design.decode(script.read_model(RELEASED), *inputs, bias, 0.7, generator)[0]
    assert torch.equal(drawn[:46], drawn[46:92]) == bool(tied)

    order = orders[0]
    letters = iter(drawn[[at for at in order if target.members[at].min() == at]])
    monkeypatch.setattr(torch, "multinomial", lambda probs, count: next(letters).view(1, 1))
    _, given = official_inputs(folder, tied)
    names = {"X": 0, "chain_encoding_all": 5, "residue_idx": 12, "mask": 2, "chain_M_pos": 10}
    names.update(omit_AA_mask=11, bias_by_res=18, S_true=1, chain_mask=4)
    more = {name: given[i] for name, i in names.items()}
    if tied:
        more.update(tied_pos=given[14][0], tied_beta=given[19])
    more["bias_AAs_np"] = np.where(LETTERS == "K", 0.5, np.where(LETTERS == "E", -0.7, 0.0))
    more["omit_AAs_np"] = np.isin(LETTERS, ["M", "C", "X"]).astype(np.float32)
    official = official_network(RELEASED)
    sampler = official.tied_sample if tied else official.sample
    found = sampler(randn=ranks[:1] + 1.0, temperature=0.7, **more)
    assert torch.equal(found["decoding_order"][0], order)
    assert torch.equal(found["S"][0], drawn)
    last = [target.designed[at] and target.members[at].max() == at for at in order]
    ours = ((torch.stack(seen)[:, :20] + bias) / 0.7).softmax(-1)
    # float32: ours are 1e-6 from those in float64, the official ones 2e-5
    assert (found["probs"][0, order, :20] - ours)[last].abs().max() < 3e-5


def test_several_structures_with_positions_of_the_file(tmp_path):
    """Each is drawn as if it were alone. Omitted letters are never drawn."""
    paths = [f"{ROOT}/data/dpo/{name}.pdb.gz" for name in ("1ORC_A", "1UBI_A")]
    options = ["--temperature=5", "--omit=cDEFHIKLMNPQRSTVWY", "--mutable_positions"]
    words = [RELEASED, *paths, *options, "A40", "--mutable_ranges", "A5-A9"]
    said = call_script("tools/design_dpo", *words, "--out", tmp_path / "both")
    words = [RELEASED, paths[1], *options, "39", "--mutable_ranges", "4-8"]
    alone = call_script("tools/design_dpo", *words, "--out", tmp_path / "alone")
    texts = [(tmp_path / f"{name}.fasta").read_text() for name in ("both", "alone")]
    assert texts[0].endswith(texts[1]) and len(texts[0].splitlines()) == 36
    assert alone.splitlines()[:2] == said.splitlines()[2:4]

    table = pandas.read_csv(tmp_path / "both.csv")
    assert table["mutable_ranges"].tolist() == ["[[2, 6]]"] * 8 + ["[[4, 8]]"] * 8
    assert table["mutable_positions"].tolist() == ["[37]"] * 8 + ["[39]"] * 8
    own = texts[1].splitlines()[1]
    for sequence in table["sequence"][8:]:
        assert set(sequence[4:9]) <= set("AG") and sequence[9:39] == own[9:39]
    labels = import_tool("design_dpo").number_residues(paths[0], ["A"])
    assert labels["A56B"] == 55  # with an insertion code


# what is given, and a part of the line that is said
DESIGNS = {
    "--omit=AB": "--omit AB: expected letters of ACD",
    f"--omit={script.ALPHABET}": "expected letters of .*, not all of them",
    "--bias B=1": "--bias B=1: expected such as K=0.5, with a letter of ACD",
    "--bias K=much": "--bias K=much: expected such as K=0.5",
    "--mutable_positions A47": "trimer.pdb: position A47; expected .* A1 to A46, or indices",
    "--mutable_ranges A6-17": "position A6-17; expected .* as a range A6-A17 or 5-16",
    "--mutable_ranges 5-46": "trimer.pdb: mutable residues 5 to 46; expected 0 to 45",
    "--design_chains Z": "trimer.pdb: chain Z; expected one of A, B, C",
    "--tied A B": "--tied A B; expected design chains: A",
    f"{CHAINS} --mutable_positions B2 --tied A B": "expected the same residues to design",
    f"{ROOT}/data/dpo/7CTH_HL.pdb.gz --design_chains H L --tied H L": "L .109 residues.; expected",
}
HEAD = "pdb_file,sequence,ddg,design_chains\ntrimer.pdb"
TABLES = {
    "pdb_file,ddg": "no column sequence; it has pdb_file, ddg",
    "pdb_file,sequence": "no column ddg; it has",
    f"{HEAD},OWN,1,\ntrimer.pdb,OWN,n/a,": "line 3: ddg is no finite number",
    f"{HEAD},OWN,1,\ntrimer.pdb,OWNA,1,": "line 3: sequence has 47 letters; expected 46",
    f"{HEAD},OWN,1,A": r'line 2: .* expected lists in JSON.s form, such as \["A"\]',
    f'{HEAD},OWN,1,"[""Z""]"': "line 2: chain Z; expected one of A, B, C",
    "": "No columns to parse",
}
CASES = [("design_dpo", f"trimer.pdb {words}", text) for words, text in DESIGNS.items()]
CASES += [("score_dpo", content, text) for content, text in TABLES.items()]
CASES += [("score_dpo", "pairs.json", "--score ddg: expected sequences, as a .csv file")]


@pytest.mark.parametrize(("name", "given", "text"), CASES)
def test_what_is_wrong_is_said_in_a_line(name, given, text, folder, monkeypatch, capsys):
    """With status 2, and nothing is written."""
    monkeypatch.chdir(folder)
    if name == "design_dpo" and ".gz" in given:
        given = given.removeprefix("trimer.pdb ")
    if name == "score_dpo":
        own = LETTERS[script.read_structure("trimer.pdb").chains["A"].letters]
        Path("bad.csv").write_text(given.replace("OWN", "".join(own)))
        given = f"{'pairs.json' if given == 'pairs.json' else 'bad.csv'} --score=ddg"
    tool = import_tool(name)
    monkeypatch.setattr(sys, "argv", [name, str(RELEASED), *given.split(), "--out=new"])
    with pytest.raises(SystemExit, match="2"):
        tool.call(tool.run, tool.parse_args)
    assert re.fullmatch(f"{name}: error: .*{text}.*\n", capsys.readouterr().err)
    assert not list(folder.glob("new*"))
