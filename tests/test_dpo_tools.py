"""Scores of sequences and designs of tools/ against the official program."""

import collections
import re
import sys
from unittest import mock

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
        move = gemmi.Transform(gemmi.Mat33(), gemmi.Vec3(shift, 3, 0))
        chain = structure[0].add_chain(structure[0]["A"])
        chain.name = name
        chain.whole().transform_pos_and_adp(move)
    structure.write_pdb(str(folder / "trimer.pdb"))
    state = torch.load(RELEASED, weights_only=True)
    state["model_state_dict"]["W_out.weight"] *= 1.2
    torch.save(state, folder / "changed.pt")
    return folder


def official_inputs(folder, tied=()):
    """What the official program makes of A and B to design, and C fixed."""
    program = sys.modules[type(official_network(RELEASED)).__module__]
    entry = program.parse_PDB(str(folder / "trimer.pdb"))[0]
    positions = {"trimer": [dict.fromkeys(tied, [i + 1]) for i in range(46)]} if tied else None
    chains = {"trimer": (["A", "B"], ["C"])}
    return program, program.tied_featurize([entry], "cpu", chains, tied_positions_dict=positions)


@torch.no_grad()
def test_sequences_are_scored_as_the_official_program_scores_them(folder, tmp_path):
    """Its --score_only, in the same decoding orders; X does not count. Beside the reference."""
    rng = np.random.default_rng(0)
    own = script.read_structure(f"{folder}/trimer.pdb", {})[0]["A"].letters
    mutable = np.array([*range(5, 30), *range(60, 80)])
    sequences = np.tile([*own, *own], (6, 1))
    sequences[:, mutable[::4]] = rng.integers(0, 20, (6, 12))
    sequences[5, 7] = script.UNKNOWN
    table = pandas.DataFrame({"sequence": ["".join(LETTERS[own]) for own in sequences]})
    fields = [f"{folder}/trimer.pdb", '["A", "B"]', '["C"]', "[[5, 29], [60, 79]]"]
    table[["pdb_file", "design_chains", "fixed_chains", "mutable_ranges"]] = fields
    table["ddg"] = [0.3, -1, np.nan, 0.3, 2, 1.5]  # rho is of those with a number
    table.to_csv(folder / "variants.csv", index=False)
    words = [RELEASED, folder / "variants.csv", f"--reference={folder}/changed.pt", "--orders=2"]
    said = call_script("tools/score_dpo", *words, "--score=ddg", f"--out={tmp_path}/scores.csv")
    found = pandas.read_csv(tmp_path / "scores.csv")
    assert (tmp_path / found["pdb_file"][0]).resolve() == folder / "trimer.pdb"
    pandas.testing.assert_frame_equal(found[table.columns].iloc[:, 2:], table.iloc[:, 2:])

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
    for name, scores in expected.items():
        assert np.abs(found[name] - scores.mean(1)).max() < 3e-5
        assert np.abs(found[f"{name}_error"] - np.abs(scores[:, 0] - scores[:, 1]) / 2).max() < 3e-5
        rho = spearmanr(found[name], found["ddg"], nan_policy="omit").statistic
        error = (1 - rho**2) * np.sqrt((1 + rho**2 / 2) / 2)
        numbers = re.search(rf"^{name} +(.*)", said, re.MULTILINE)[1].split()
        assert np.allclose(np.array(numbers, float), [scores.mean(), rho, error], atol=1e-4)
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
    target = design.Target(args, args.pdb_file[0])
    bias = design.read_bias(args)
    ranks = torch.stack([script.decode_ranks(target.designed, seed) for seed in (3, 4)])
    seen = []
    draw = design.draw
    monkeypatch.setattr(design, "draw", lambda *given: seen.append(given[0][0]) or draw(*given))
    network = script.read_model(RELEASED)
    native = torch.from_numpy(target.native).long()
    inputs = (target.features(network), native, target.designed, target.members, ranks, bias)
    generator = torch.Generator().manual_seed(1)
    drawn, decode_rank = design.decode(network, *inputs, 0.7, generator)
    encode = mock.Mock(side_effect=network.encode)
    monkeypatch.setattr(network, "encode", encode)
    together = design.score_sequences(network, target, drawn, decode_rank)
    encode.assert_called_once()  # the backbone of both
    monkeypatch.setattr(import_tool("score_dpo"), "BATCH_RESIDUES", 1)  # each alone
    alone = design.score_sequences(network, target, drawn, decode_rank)
    assert (together - alone).abs().max() < 1e-5
    drawn, decode_rank = drawn[0], decode_rank[0]
    assert torch.equal(drawn[:46], drawn[46:92]) == bool(tied)

    order = decode_rank.argsort()
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
    assert set(table["mutable_ranges"]) == {'[["A5", "A9"]]'}
    assert set(table["mutable_positions"]) == {'["A40"]'}
    assert set("".join(sequence[4:9] for sequence in table["sequence"][8:])) == set("AG")

    structure = gemmi.read_structure(paths[0])
    structure[0]["A"][1].het_flag = "H"  # such a residue is left out
    structure.write_pdb(f"{tmp_path}/odd.pdb")
    chains, _ = script.read_structure(f"{tmp_path}/odd.pdb", collections.defaultdict(list))
    labels = chains["A"].labels.tolist()
    assert "A4" not in labels and labels.index("A56B") == 54  # B: an insertion code
