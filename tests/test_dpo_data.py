"""The data path of run_dpo_ddp.py: structures, pairs, their cache, the split, the shipped entries."""

from __future__ import annotations

import gzip
import importlib
import json
import os
import random
import re
import resource
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import gemmi
import numpy as np
import pytest
import torch
from helpers import ROOT, mutated_pairs, one_process, run_ranks

script = importlib.import_module("run_dpo_ddp")
LETTERS = "ACDEFGHIKLMNPQRSTVWYX"
NAMES = dict(zip(LETTERS, script.RESIDUES[:20] + ["UNK"], strict=True))
ARGS = dict(train_data=None, val_data=None, scores=None, score_gap=0.0, score_margin=0.0, pairs_per_backbone=16)
ARGS |= dict(val_fraction=0.1, max_length=500, mutable_positions=None, mutable_ranges=None, skip_bad_data=False)
ARGS |= dict(verify_data=False, neighbours=8, seed=42)


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(script.os, "fsync", lambda file: None)


def place(chain: str, number: int) -> np.ndarray:
    """Where CA is: a coil along z, chains side by side."""
    turn = 1.745 * number
    return np.array([2.3 * np.cos(turn) + 9.0 * (ord(chain[0]) - 65), 2.3 * np.sin(turn), 1.5 * number])


def residue(name: str, number: int, chain: str = "A", code: str = " ", alternative: str = " ", record: str = "ATOM",
            atoms: str = "N CA C O", shift: float = 0.0) -> str:  # fmt: skip
    """PDB records of a residue; `shift` moves it along x."""
    offsets, lines = {"N": (-1.2, 0.5, -0.4), "CA": (0, 0, 0), "C": (1.1, 0.6, 0.7), "O": (1.5, 1.7, 0.8)}, []
    for atom in atoms.split():
        x, y, z = place(chain, number) + offsets.get(atom, (2, 2, 2)) + np.array([shift, 0, 0])
        lines.append(f"{record:<6}{1:5d}  {atom:<3}{alternative}{name:>3} {chain}{number:4d}{code}   "
                     f"{x:8.3f}{y:8.3f}{z:8.3f}  1.00  0.00          {atom[0]:>2}\n")  # fmt: skip
    return "".join(lines)


def write_pdb(path: Path, chains: dict[str, str], first: int = 1) -> Path:
    """A PDB file of chains with these letters; '-' is a gap."""
    text = ""
    for chain, letters in chains.items():
        text += "".join(residue(NAMES[c], first + i, chain) for i, c in enumerate(letters) if c != "-") + "TER\n"
    path.write_text(text + "END\n")
    return path


def make_args(folder: Path, rows, name: str = "pairs.json", **changes) -> Namespace:
    """Arguments of a run whose data file holds `rows`, or that text."""
    (folder / name).write_text(rows if isinstance(rows, str) else json.dumps(rows))
    values = ARGS | {"train_data": str(folder / name), "cache_dir": str(folder / "cache")}
    return Namespace(**values | {"output_dir": str(folder / "out")} | changes)


def load(args: Namespace):
    return script.load_pairs(args, one_process())


def problems_of(args: Namespace) -> list[str]:
    """What is listed, without the file's name."""
    with pytest.raises(ValueError) as caught:
        load(args)
    return [line.strip().removeprefix(f"{args.train_data}: ") for line in str(caught.value).splitlines()[1:]]


def row(file: str = "a.pdb", chosen: str = "", rejected: str = "", **more) -> dict:
    return {"pdb_file": file, "preferred_seq": chosen, "unpreferred_seq": rejected} | more


def tensors_of(batch) -> list[torch.Tensor]:
    return [*batch[2:9], *batch.geometry]


def letters_of(ids: torch.Tensor) -> str:
    return "".join(LETTERS[i] for i in ids)


# structures


ZOO = "".join([
    "MODEL        1\n",
    residue("MET", 1, "W", record="HETATM", atoms="O"),  # a chain of water
    residue("DA", 1, "D", atoms="P C4 N1"),  # and one of DNA
    residue("ALA", 1, alternative="A"), residue("ALA", 1, alternative="B", shift=5),
    residue("GLY", 2), residue("GLY", 2, code="A", shift=1), residue("GLY", 2, code="B", shift=2),
    residue("MSE", 3, record="HETATM"),
    residue("SER", 4, alternative="B", shift=3), residue("THR", 4, alternative="A"),  # two residues in one place
    residue("LYS", 5, atoms="N CA C CB"),  # no O
    residue("TRP", 9, atoms="CA CB"),  # after a gap
    residue("SEP", 10), residue("SEP", 11, record="HETATM"),  # phosphoserine, as it should and should not be
    residue("CA", 12, atoms="CA"),  # calcium that says it is an atom of a chain
    residue("HOH", 13, record="HETATM", atoms="O"), "TER\n",
    residue("TYR", -1, "B"), residue("TYR", 0, "B"), residue("TYR", 1, "B", atoms="CA"), "TER\n",
    residue("ALA", 1, "C", atoms="CA"), "TER\n",
    "ENDMDL\nMODEL        2\n", residue("VAL", 1, shift=70), residue("VAL", 99), "ENDMDL\nEND\n",
])  # fmt: skip


def zoo_files(folder: Path) -> list[Path]:
    """ZOO as PDB and mmCIF, plain and gz. In mmCIF the names of chains and residues differ from the author's."""
    (folder / "zoo.pdb").write_text(ZOO)
    structure = gemmi.read_pdb_string(ZOO)
    structure.setup_entities()
    text = structure.make_mmcif_document().as_string()
    assert " Axp " in text or "Axp\n" in text, "the label names must not be the author's"
    (folder / "zoo.cif").write_text(text)
    for name in ("zoo.pdb", "zoo.cif"):
        (folder / f"{name}.gz").write_bytes(gzip.compress((folder / name).read_bytes()))
    return [folder / name for name in ("zoo.pdb", "zoo.cif", "zoo.pdb.gz", "zoo.cif.gz")]


def test_structure_zoo(tmp_path):
    for path in zoo_files(tmp_path):
        chains = script.read_structure(path)
        assert {name: chain.letters for name, chain in chains.items()} == {
            "W": "", "D": "", "A": "AGGGMSKWX", "B": "YYY", "C": "A"}  # fmt: skip
        a, b = chains["A"], chains["B"]
        assert a.labels == "A1 A2 A2A A2B A3 A4 A5 A9 A10".split() and b.labels == ["B-1", "B0", "B1"]
        assert a.numbers.tolist() == [1, 2, 3, 4, 5, 6, 7, 11, 12] and b.numbers.tolist() == [-1, 0, 1]
        assert a.coords.dtype == np.float32 and a.coords.shape == (9, 4, 3)
        assert a.valid.tolist() == [True] * 6 + [False, False, True] and b.valid.tolist() == [True, True, False]
        shifts = [0, 0, 1, 2, 0, 3]  # the first alternative that occurs, whatever its letter
        for i, (number, shift) in enumerate(zip([1, 2, 2, 2, 3, 4], shifts, strict=True)):
            assert a.coords[i, 1] == pytest.approx(place("A", number) + [shift, 0, 0], abs=2e-3)
        assert a.coords[0, 3] == pytest.approx(place("A", 1) + [1.5, 1.7, 0.8], abs=2e-3)
        assert np.isnan(a.coords[6]).all(1).tolist() == [False, False, False, True]
        assert np.isnan(a.coords[7]).all(1).tolist() == [True, False, True, True]


def test_structures_that_are_refused(tmp_path):
    (tmp_path / "water.pdb").write_text(residue("HOH", 1, record="HETATM") + residue("DA", 1, "D", atoms="P") + "END\n")
    (tmp_path / "text.pdb").write_text("nothing of the kind\n" * 9)
    (tmp_path / "short.pdb.gz").write_bytes(gzip.compress(random.Random(0).randbytes(9999).hex().encode())[:5000])
    (tmp_path / "broken.cif").write_text("data_x\nloop_\n_atom_site.id\n_atom_site.Cartn_x\n1\n")
    (tmp_path / "twice.pdb").write_text(residue("ALA", 7, "B") + "TER\n" + residue("GLY", 7, "B") + "END\n")
    expected = {
        "gone.pdb": "no such file; expected a structure in PDB or mmCIF",
        "water.pdb": r"no protein residues in chains .*A.*D; expected ATOM records .*MSE",
        "text.pdb": "expected",
        "short.pdb.gz": "expected a structure .* whole gz",
        "broken.cif": "expected a structure in PDB or mmCIF",
        "twice.pdb": r"chain B: residue B7 has two atoms N; expected one",
    }
    for name, what in expected.items():
        with pytest.raises(ValueError, match=f"{name}: .*{what}"):
            script.read_structure(tmp_path / name)


def test_chains_that_are_refused(tmp_path):
    path = zoo_files(tmp_path)[0]
    chains = script.read_structure(path)
    none, some = "0 residues with all of N, CA, C and O, named 1 times", "7 residues with all .*, named 2 times"
    expected = "; expected one of W, D, A, B, C that has some, once"
    for names, what in {"Q": none, "W": none, "C": none, "AA": some}.items():
        what = f"zoo.pdb: chain {names[0]}: {what}{expected}"
        with pytest.raises(ValueError, match=what):
            script.join_chains(path, chains, list(names))
    joined = script.join_chains(path, chains, ["B", "A"])
    assert joined.letters == "YYYAGGGMSKWX" and joined.chain_index.tolist() == [0] * 3 + [1] * 9
    args = make_args(tmp_path, [row("zoo.pdb", "AGGGMSKWA", "AGGGMSKWC")])
    assert letters_of(load(args).collate(np.array([0])).chosen[0]) == "AGGGMSKWA"  # the first chain with protein


def test_real_entries():
    """Selenomethionines as HETATM, gaps, insertion codes, disorder in entries of the PDB."""
    found = {}
    for path in sorted((ROOT / "data" / "dpo").glob("*.gz")):
        found |= {f"{path.name[:4]}{name}": chain for name, chain in script.read_structure(path).items()}
    assert len(found) == 15 and all(chain.valid.all() for chain in found.values())
    assert found["1A8OA"].letters[0] == "M" and found["1A8OA"].letters.count("M") == 4
    assert found["1EJGA"].letters == "TTCCPSIVARSNFNVCRLPGTPEALCATYTGCIIIPGATCPGDYAN"  # crambin
    gaps = np.diff(found["2XHEB"].numbers)
    assert sorted(gaps[gaps > 1]) == [15, 27] or (gaps > 1).sum() == 2
    codes = [label for label in found["4ZHLU"].labels if label[-1].isalpha()]
    assert len(codes) > 10 and (np.diff(found["4ZHLU"].numbers) == 1).sum() >= 245
    bonds = np.linalg.norm(np.diff(found["1UBIA"].coords[:, 1], axis=0), axis=1)
    assert bonds == pytest.approx(3.8, abs=0.15)


# pairs


def test_all_problems_are_listed_at_once(tmp_path):
    write_pdb(tmp_path / "a.pdb", {"A": "ACDEFG", "B": "KLMN"})
    good, b = row(chosen="ACDEFG", rejected="ACDEFA"), row(chosen="KLMN", rejected="KLMK")
    bad = [
        (row("gone.pdb", "A", "C"), r"/gone.pdb: no such file; expected a structure"),
        (good | {"chain_id": "Q"}, r"/a.pdb: chain Q: 0 residues .* expected one of A, B that has some"),
        (good | {"preferred_seq": "ACD"}, r"preferred_seq has 3 letters; expected 6, the residues of chain A"),
        (good | {"design_chains": ["B", "A"]}, r"preferred_seq has 6 letters; expected 10, the residues of chain B\+A"),
        (good | {"unpreferred_seq": "ACUEFG"}, r"unpreferred_seq has 'U' at position 2; expected letters of ACDE"),
        (good | {"unpreferred_seq": "ACDEFG"}, r"preferred_seq and unpreferred_seq are identical"),
        (good | {"mutable_positions": [0]}, r"preferred_seq and unpreferred_seq differ only where nothing is designed"),
        (good | {"mutable_positions": [6]}, r"residues 6; expected one, .* from 0 to 5 or A1 to A6"),
        (good | {"mutable_positions": ["A7"]}, r"residues A7; expected one, .* from 0 to 5 or A1 to A6"),
        (good | {"mutable_positions": []}, r"no residue is both mutable and resolved"),
        (good | {"mutable_ranges": [["A4", "A2"]]}, r"residues A4-A2; expected one, or a first and a last"),
        (good | {"mutable_ranges": [[1, 2, 3]]}, r"residues 1-2-3; expected one, or a first and a last"),
        (good | {"mutable_ranges": [4]}, r'mutable_ranges is \[4\]; expected such as \[\[3, "B42A"\]\]'),
        (good | {"weight": float("nan")}, r"weight is nan; expected such as 1.0"),
        (good | {"weight": 0}, r"weight 0, .* expected a weight above 0"),
        (good | {"margin": True}, r"margin is True; expected such as 0.5"),
        (good | {"residue_weights": [1.0] * 5}, r"weight 1, 5 residue_weights; .* 6 residue_weights"),
        (good | {"residue_weights": [1, 1, 1, 1, 1, -1]}, r"weight 1, 6 residue_weights; .* from 0 up"),
        (good | {"residue_weights": [0] * 6}, r"weight 1, 6 residue_weights; .* above 0 for a residue"),
        (good | {"chain_id": "A", "design_chains": ["B"]}, r"chain_id A and design_chains B: one of the two"),
        (b | {"design_chains": ["B"], "fixed_chains": ["B"]}, r"/a.pdb: chain B: 4 residues .*, named 2 times"),
        (good | {"pdb_file": 5}, r'pdb_file is 5; expected such as "1UBI.pdb"'),
        (good | {"design_chains": "AB"}, r"design_chains is 'AB'; expected such as \["),
        (good | {"prefered_seq": "A"}, r"unknown field 'prefered_seq'; expected pdb_file, preferred_seq, "),
        (good | {"scores": [1]}, r"unknown field 'scores'; expected pdb_file, "),
        ({"pdb_file": "a.pdb"}, r"no preferred_seq"),
        ([1, 2], r"\[1, 2\]; expected an object with pdb_file, preferred_seq, unpreferred_seq"),
    ]  # fmt: skip
    rows = [good, *(found for found, _ in bad), b | {"chain_id": "B"}]
    lines = problems_of(make_args(tmp_path, rows))
    assert len(lines) == 21 and lines[-1] == f"... and {len(bad) + 2 - 20} more"  # two of the rows have two
    args = make_args(tmp_path, rows, skip_bad_data=True)
    pairs = load(args)
    assert len(pairs) == 2 and pairs.skipped == len(bad) and pairs.names == ["a:A:0", f"a:B:{len(bad) + 1}"]
    (listing,) = (tmp_path / "cache").glob("dpo-*/skipped_data.txt")
    listed = [line.removeprefix(f"{args.train_data}: ") for line in listing.read_text().splitlines()]
    for number, (_, what) in enumerate(bad, 1):
        of_row = [line for line in listed if line.startswith(f"index {number}: ")]
        assert len(of_row) == 1 + (number in (4, 26)), (number, of_row)
        assert re.match(rf"index {number}: {'.*' * what.startswith('/')}{what}", of_row[0])
    assert lines[:20] == listed[:20]
    assert len(problems_of(make_args(tmp_path, [good | {"mutable_ranges": [[0, 9]]}], max_length=5))) == 1
    assert problems_of(make_args(tmp_path, [good], max_length=5)) == [
        "index 0: 6 residues in design chains A; expected --max_length 5"]  # fmt: skip
    load(make_args(tmp_path, [good], max_length=6))


def test_forms_of_the_data_file(tmp_path, caplog):
    """An array, lines, untidy lines; null is no value; paths are relative to the file; damaged files are named."""
    (tmp_path / "deep").mkdir()
    write_pdb(tmp_path / "deep" / "a.pdb", {"A": "ACDEFG"})
    rows = [row("deep/a.pdb", "ACDEFG", "ACDEFA", comment=5, chain_id=None), row("deep/a.pdb", "acdefg", "CCDEFG")]
    rows.append(row(str(tmp_path / "deep" / "a.pdb"), "ACDEFG", "AAAAAA", description="x"))
    lines = [json.dumps(r) for r in rows]
    untidy = "\ufeff\n" + "\r\n\n".join(lines) + "\n \n"
    for text in (json.dumps(rows, indent=2), "\n".join(lines), untidy):
        batch = load(make_args(tmp_path, text)).collate(np.arange(3))
        assert [letters_of(ids) for ids in batch.rejected] == ["ACDEFA", "CCDEFG", "AAAAAA"]
    for text, what in {"[{]": r"pairs.json: .*line 1.*; expected a JSON array", "\n": "0 pairs to train on",
                       "[]": "0 pairs to train on"}.items():  # fmt: skip
        with pytest.raises(ValueError, match=what):
            load(make_args(tmp_path, text))
    broken = lines[0] + "\n{'pdb_file'}\n" + lines[1]
    (problem,) = problems_of(make_args(tmp_path, broken))
    assert problem.startswith("line 2: \"{'pdb_file'}\"; expected an object with pdb_file")
    (tmp_path / "latin.json").write_bytes(b'[{"pdb_file": "\xe9"}]')
    for name, what in {"latin.json": "latin.json: .*utf-8", "gone.json": "gone.json: .*No such file"}.items():
        with pytest.raises(ValueError, match=what):
            load(Namespace(**vars(make_args(tmp_path, "")) | {"train_data": str(tmp_path / name)}))


def test_chains_positions_and_weights(tmp_path, caplog):
    """Design chains in the order given, then the fixed ones; whatever is not designed has the structure's letter."""
    chains = {"A": "ACD-FG", "B": "KLMN", "C": "WWYY"}
    write_pdb(tmp_path / "a.pdb", chains)
    write_pdb(tmp_path / "b.pdb", dict(reversed(chains.items())))
    text = (tmp_path / "a.pdb").read_text().replace(residue("LEU", 2, "B"), residue("LEU", 2, "B", atoms="N CA C"))
    for name, found in (("a.pdb", text), ("b.pdb", (tmp_path / "b.pdb").read_text())):
        (tmp_path / name).write_text(found.replace(residue("LEU", 2, "B"), residue("LEU", 2, "B", atoms="N CA C")))
    common = dict(design_chains=["B", "A"], fixed_chains=["C"], weight=2.5, margin=-0.5)
    common |= dict(residue_weights=[0.5 * i for i in range(9)])
    rows = [
        row(name, "RRRRSSSSS", "TTTTSSSST", **common | more)
        for name in ("a.pdb", "b.pdb")
        for more in ({}, {"mutable_positions": [0, "A6"]}, {"mutable_ranges": [["B3", "A1"], [6, 6]]},
                     {"mutable_positions": [0], "mutable_ranges": [[8, 8]]}, {"fixed_chains": []})
    ]  # fmt: skip
    pairs = load(make_args(tmp_path, rows))
    assert "10 rows have other letters" not in caplog.text and "6 rows have other letters" in caplog.text
    assert pairs.lengths.tolist() == [13, 13, 13, 13, 9] * 2
    batch = pairs.collate(np.arange(10))
    chosen, rejected = ([letters_of(ids)[:n] for ids, n in zip(t, pairs.lengths, strict=True)] for t in batch[3:5])
    assert chosen == ["RLRRSSSSSWWYY", "RLMNACDFSWWYY", "KLRRSCSFGWWYY", "RLMNACDFSWWYY", "RLRRSSSSS"] * 2
    assert rejected == ["TLTTSSSSTWWYY", "TLMNACDFTWWYY", "KLTTSCSFGWWYY", "TLMNACDFTWWYY", "TLTTSSSST"] * 2
    designed = ["".join(".X"[d] for d in line) for line in batch.designed.tolist()]
    assert designed == ["X.XXXXXXX....", "X.......X....", "..XXX.X......", "X.......X....", "X.XXXXXXX...."] * 2
    assert batch.weights[0].tolist() == [0.5 * i for i in range(9)] + [0.0] * 4
    assert batch.weight.tolist() == [2.5] * 10 and batch.margin.tolist() == [-0.5] * 10
    # the order of chains in the file is irrelevant: the same features, but for the file's number
    first, second = (pairs.collate(np.arange(5) + start) for start in (0, 5))
    assert all(map(torch.equal, tensors_of(first), tensors_of(second)))
    geometry = pairs.geometry(pairs.backbone[:1])
    chain = torch.tensor([0] * 4 + [1] * 5 + [2] * 4)
    assert geometry.valid[0].tolist() == [True, False] + [True] * 11
    assert torch.equal(geometry.chain_index[0], chain)
    assert geometry.numbers[0].tolist() == [1, 2, 3, 4, 1, 2, 3, 5, 6, 1, 2, 3, 4], "the gap of A4 counts"
    # the command line's positions are for every pair
    for more, expected in {("mutable_positions", ("0", "A6")): "X.......X....", ("mutable_ranges", ("B3-A1,6-6",)):
                           "..XXX.X......", ("mutable_positions", "0 8"): "X.......X...."}.items():  # fmt: skip
        batch = load(make_args(tmp_path, rows, **{more[0]: more[1]})).collate(np.arange(10))
        assert {"".join(".X"[d] for d in line)[:13] for line in batch.designed.tolist()} == {expected}
    for text in ("6", "6-7-8", "A-"):
        assert problems_of(make_args(tmp_path, rows[:1], mutable_ranges=[text]))


def test_pairs_by_score():
    scores, kinds = np.array([0.1, 0.9, 0.5, 0.5, 0.7]), np.array([0, 1, 2, 3, 3])  # the last two are one sequence
    assert script.pairs_by_score(scores, kinds, 0.0, 99) == [
        (1, 0), (4, 0), (1, 2), (1, 3), (2, 0), (3, 0), (1, 4), (4, 2)]  # fmt: skip
    assert script.pairs_by_score(scores, kinds, 0.4, 99) == [(1, 0), (4, 0), (1, 2), (1, 3), (2, 0), (3, 0)]
    assert script.pairs_by_score(scores, kinds, 0.0, 2) == [(1, 0), (4, 2)]
    assert script.pairs_by_score(scores, kinds, 0.0, 3) == [(1, 0), (1, 3), (4, 2)]
    assert script.pairs_by_score(scores[:1], kinds[:1], 0.0, 3) == []
    draw = np.random.default_rng(0)
    for count, most in ((40, 20), (40, 100), (31, 300)):
        scores = draw.normal(size=count)
        found = script.pairs_by_score(scores, np.arange(count), 0.0, most)
        used = np.bincount(np.ravel(found), minlength=count)
        assert len(set(found)) == most and np.ptp(used) <= 1 + (2 * most % count > 0)
        assert all(scores[i] > scores[j] for i, j in found)


def test_scored_sequences(tmp_path):
    write_pdb(tmp_path / "a.pdb", {"A": "ACDEFG"})
    write_pdb(tmp_path / "b.pdb", {"B": "KLMN"})
    texts = ["ACDEFG", "CCDEFG", "ACDEFC", "ACDEFC"]
    rows = [
        {"pdb_file": "a.pdb", "sequences": texts, "scores": [1, 3.0, 2.0, 0.5], "mutable_ranges": [["A5", "A6"]]},
        {"pdb_file": "b.pdb", "sequences": ["KLMN", "KLMK"], "scores": [0.0, 9.5], "chain_id": "B", "weight": 3},
    ]
    args = make_args(tmp_path, "\n".join(map(json.dumps, rows)), scores=str(tmp_path / "pairs.json"), train_data=None)
    args.score_gap, args.score_margin = 0.6, 0.1
    pairs = load(args)
    # 0 and 1 are one sequence where something is designed, and so are 2 and 3
    assert pairs.names == ["a:A:1:1>3", "a:A:1:1>2", "a:A:1:2>0", "b:B:2:1>0"]
    batch = pairs.collate(np.arange(4))
    assert batch.margin.tolist() == pytest.approx([0.25, 0.1, 0.1, 0.95]) and batch.weight.tolist() == [1, 1, 1, 3]
    assert [letters_of(ids) for ids in batch.chosen[:3]] == ["ACDEFG", "ACDEFG", "ACDEFC"]
    args.pairs_per_backbone = 1
    assert load(args).names == ["a:A:1:1>3", "b:B:2:1>0"]
    args.score_gap = 10.0
    with pytest.raises(ValueError, match="0 pairs to train on.*score_gap"):
        load(args)
    bad = [
        rows[0] | {"scores": [1, 2]},
        rows[0] | {"scores": [1, 2, 3, float("inf")]},
        rows[0] | {"sequences": ["A"] * 4},
        rows[0] | {"sequences": [], "scores": []},
        row("a.pdb", "ACDEFG", "ACDEFC"),
    ]
    (tmp_path / "bad.json").write_text(json.dumps(bad))
    args.scores = args.train_data = str(tmp_path / "bad.json")
    lines = problems_of(args)
    expected = ["index 0: 4 sequences, 2 scores", "index 1: scores is [1, 2, 3, inf]; expected such as [0.5]", *[
        f"index 2: sequence {i} has 1 letters; expected 6" for i in range(4)], "index 3: 0 sequences, 0 scores",
        "index 4: no sequences", "index 4: no scores", "index 4: unknown field 'preferred_seq'"]  # fmt: skip
    assert all(line.startswith(what) for line, what in zip(lines, expected, strict=False)) and len(lines) == 11


# cache and batches


def some_pairs(folder: Path, sizes: list[int], pairs: int = 3) -> list[dict]:
    """Structures 0.pdb, 1.pdb, ... of so many residues and rows for them."""
    draw, rows = random.Random(0), []
    for number, size in enumerate(sizes):
        native = "".join(draw.choices(LETTERS[:20], k=size))
        write_pdb(folder / f"{number}.pdb", {"A": native})
        rows += [row(f"{number}.pdb", native, native[:i] + "X" + native[i + 1 :]) for i in range(pairs)]
    return rows


def test_second_start_reads_no_structure(tmp_path, caplog):
    rows = some_pairs(tmp_path, [12, 20])
    (tmp_path / "copy.pdb").write_bytes((tmp_path / "0.pdb").read_bytes())
    rows.append(rows[0] | {"pdb_file": "copy.pdb"})
    args = make_args(tmp_path, rows)
    parsed, featurised, featurise = [], [], script.featurise

    def counted(run) -> tuple[int, int]:
        before, before_features = script.COUNTS["parsed"], len(featurised)
        run()
        return script.COUNTS["parsed"] - before, len(featurised) - before_features

    script.featurise = lambda *of: (featurised.append(1), featurise(*of))[1]
    try:
        assert counted(lambda: parsed.append(load(args))) == (3, 3), "each file is to be read once"
        assert counted(lambda: parsed.append(load(args))) == (0, 0)
        batches = [pairs.collate(np.arange(7)) for pairs in parsed]
        assert all(map(torch.equal, tensors_of(batches[0]), tensors_of(batches[1])))
        key = args.data_key
        assert parsed[0].group.tolist() == [0, 0, 0, 1, 1, 1, 0], "copies of a file are one structure"
        (folder,) = (tmp_path / "cache").iterdir()
        # damage: found by size, or by checksum if asked for
        data = (folder / "atoms.npy").read_bytes()
        (folder / "atoms.npy").write_bytes(data[:-4])
        assert counted(lambda: load(args)) == (3, 3) and f"{folder / 'atoms.npy'} is damaged" in caplog.text
        assert (folder / "atoms.npy").read_bytes() == data
        (folder / "chosen.npy").write_bytes((folder / "chosen.npy").read_bytes()[:-1] + b"\7")
        assert counted(lambda: load(args)) == (0, 0)
        args.verify_data = True
        assert counted(lambda: load(args)) == (3, 3) and counted(lambda: load(args)) == (0, 0) and args.data_key == key
        # whatever goes into it
        for other in (
            dict(neighbours=5),
            dict(max_length=400),
            dict(mutable_positions=["0 1 2"]),
            dict(skip_bad_data=True),
        ):
            assert counted(lambda other=other: load(Namespace(**vars(args) | other))) == (3, 3), other
        os.utime(tmp_path / "0.pdb", ns=(5, 5))
        assert counted(lambda: load(args)) == (3, 3) and args.data_key == key
        make_args(tmp_path, rows[1:])
        assert counted(lambda: load(args)) == (3, 3) and args.data_key != key
    finally:
        script.featurise = featurise


def test_a_build_that_fails_leaves_nothing(tmp_path, monkeypatch):
    args = make_args(tmp_path, some_pairs(tmp_path, [60, 60]))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (6_000, 300):  # the disk is full at the atoms, and earlier
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            with pytest.raises(OSError, match="cache/dpo-.* could not be written: free"):
                load(args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        (folder,) = (tmp_path / "cache").iterdir()
        left = [path.name for path in folder.iterdir()]
        assert "manifest.json" not in left and not [name for name in left if name.endswith(".tmp")]
    before, plain = script.COUNTS["parsed"], script.os.replace

    def killed(temporary, path):
        if path.name == "manifest.json":  # all is written but the last step
            raise KeyboardInterrupt
        plain(temporary, path)

    monkeypatch.setattr(script.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        load(args)
    monkeypatch.setattr(script.os, "replace", plain)
    assert len(load(args)) == 6 and script.COUNTS["parsed"] == before + 4, "what was left is made anew"
    load(args)
    assert script.COUNTS["parsed"] == before + 4


def test_batches_against_each_structure(tmp_path):
    """Padded, in any order and with repeats, a batch holds what featurise says of each structure."""
    sizes = [5, 31, 12, 5]
    pairs = load(make_args(tmp_path, some_pairs(tmp_path, sizes)))
    chains = [script.read_structure(tmp_path / f"{i}.pdb")["A"] for i in range(4)]
    for ids in ([0], [11, 0, 4, 4, 10, 6], [9, 0, 1], list(range(12))):
        ids = np.array(ids)
        batch = pairs.collate(ids)
        geometry, used = batch.geometry, np.unique(ids // 3)
        length, k = max(sizes[i] for i in used), min(8, max(sizes[i] for i in used))
        assert batch.items.tolist() == ids.tolist() and batch.items.dtype == np.int64
        assert used[batch.owner.numpy()].tolist() == (ids // 3).tolist()
        assert geometry.near.shape == (len(used), length, k) and batch.chosen.shape == (len(ids), length)
        kinds = [torch.int64, torch.bool, torch.float32, torch.int64, torch.int64, torch.bool]
        assert [t.dtype for t in geometry] == kinds and geometry.atoms.shape == (len(used), length, 5, 3)
        assert [t.dtype for t in batch[2:9]] == [torch.int64] * 3 + [torch.bool] + [torch.float32] * 3
        for g, i in enumerate(used):
            chain, n = chains[i], sizes[i]
            found = script.featurise(chain.coords, chain.valid, chain.numbers, chain.chain_index, 8)
            m = min(n, k)
            assert np.array_equal(geometry.neighbours[g, :n, :m], found["neighbours"][:, :m])
            for name in ("atoms", "numbers", "chain_index", "valid"):
                assert np.array_equal(getattr(geometry, name)[g, :n], found[name])
            assert geometry.near[g, :n, :m].all() and geometry.near[g].sum() == n * m
            assert geometry.valid[g].sum() == n and not geometry.neighbours[g][~geometry.near[g]].any()
        for p, i in enumerate(ids):
            n = sizes[i // 3]
            assert letters_of(batch.chosen[p, :n]) == chains[i // 3].letters
            assert (batch.rejected[p] != batch.chosen[p]).nonzero().ravel().tolist() == [i % 3]
            assert batch.designed[p].sum() == n == batch.weights[p].sum()
    assert pairs.lengths.tolist() == np.repeat(sizes, 3).tolist()
    moved = script.moved(batch, torch.device("meta"))
    assert all(t.device.type == "meta" for t in tensors_of(moved)) and moved.items is batch.items
    assert type(moved.geometry) is script.Geometry


# split


def fake_pairs(sizes: list[int]) -> SimpleNamespace:
    """Pairs of so many structures, of so many pairs each."""
    names = [f"{i}.pdb" for i in range(len(sizes))]
    group = np.repeat(np.arange(len(sizes)), sizes)
    return SimpleNamespace(group=group, files=names, digests=[f"digest{i}" for i in range(len(sizes))],
                           __len__=lambda self: len(group))  # fmt: skip


def held_share(sizes: list[int], fraction: float, seed: int = 0) -> tuple[int, set[str]]:
    """Pairs and structures that are held out."""
    found = fake_pairs(sizes)

    class Counted(SimpleNamespace):
        def __len__(self):
            return len(self.group)

    held = script.held_out(Counted(**vars(found)), fraction, seed)
    return int(np.array(sizes)[held].sum()), {found.digests[i] for i in np.flatnonzero(held)}


def test_share_held_out():
    assert held_share([1] * 414, 0.1)[0] == 42, "the document's 372 and 42"
    assert held_share([12] * 10, 0.1)[0] == 12 and held_share([12] * 13, 0.3)[0] == 48
    for seed in range(20):
        count, _ = held_share([500, *[5] * 100], 0.1, seed)
        assert 100 <= count < 110, "one large structure is no reason for half of the data"
        assert held_share([50, 1], 0.1, seed)[0] == 1 and held_share([50, 50], 0.9, seed)[0] == 50
        assert held_share([60, 50, 70], 0.1, seed)[0] == 50, "the smallest one, where each is too large"
    sets = [held_share([3] * 50, 0.2, seed)[1] for seed in (0, 0, 1)]
    assert sets[0] == sets[1] != sets[2] and len(sets[0] | sets[2]) > 12


def both_splits(ddp, values: dict) -> list:
    """The split, on one of several ranks."""
    args = Namespace(**values)
    pairs = script.load_pairs(args, ddp)
    train, valid = script.split_pairs(args, ddp, pairs)
    return [train.tolist(), valid.tolist(), args.data_key, script.COUNTS["parsed"] > 0]


def test_split_by_structure(tmp_path, caplog):
    caplog.set_level("INFO", logger="ddp")
    rows = some_pairs(tmp_path, [8, 9, 10, 11, 12, 13], pairs=4)
    args = make_args(tmp_path, rows, val_fraction=0.3)
    pairs = load(args)
    train, valid = script.split_pairs(args, one_process(), pairs)
    assert "Loaded 16 training and 8 validation pairs" in [record.message for record in caplog.records]
    assert sorted([*train, *valid]) == list(range(24)) and not set(pairs.group[train]) & set(pairs.group[valid])
    saved = json.loads((tmp_path / "out" / "split.json").read_text())
    assert saved == {"train": [pairs.names[i] for i in train], "valid": [pairs.names[i] for i in valid]}
    held = {rows[i]["pdb_file"] for i in valid}
    # whatever the order of the rows, the names of the files and the number of ranks
    for i in range(6):
        (tmp_path / f"{i}.pdb").rename(tmp_path / f"other{i}.pdb")
    mixed = random.Random(1).sample([r | {"pdb_file": f"other{r['pdb_file']}"} for r in rows], 24)
    args = make_args(tmp_path, mixed, val_fraction=0.3)
    first, second = run_ranks(2, both_splits, vars(args))
    assert first[:3] == second[:3] and (first[3], second[3]) == (True, False), "rank 0 alone reads structures"
    assert {mixed[i]["pdb_file"] for i in first[1]} == {f"other{name}" for name in held}
    again = script.split_pairs(args, one_process(), load(args))
    assert [part.tolist() for part in again] == first[:2]
    # another seed holds out others, for some seed
    others = set()
    for args.seed in range(5):
        others |= {mixed[i]["pdb_file"] for i in script.split_pairs(args, one_process(), load(args))[1]}
    assert len(others) > 2


def test_validation_data(tmp_path, caplog):
    rows = some_pairs(tmp_path, [8, 9])
    (tmp_path / "val.json").write_text(json.dumps(rows[3:]))
    args = make_args(tmp_path, rows[:3], val_data=str(tmp_path / "val.json"))
    train, valid = script.split_pairs(args, one_process(), load(args))
    assert (train.tolist(), valid.tolist()) == ([0, 1, 2], [3, 4, 5]) and "structures are in" not in caplog.text
    args = make_args(tmp_path, rows[:4], val_data=str(tmp_path / "val.json"))
    script.split_pairs(args, one_process(), load(args))
    assert "1 structures are in --val_data and in the training data" in caplog.text
    args = make_args(tmp_path, rows[:3])
    with pytest.raises(ValueError, match="all pairs are on .*0.pdb, .* give --val_data"):
        script.split_pairs(args, one_process(), load(args))
    (tmp_path / "val.json").write_text(json.dumps([rows[3] | {"preferred_seq": "A"}]))
    args = make_args(tmp_path, rows[:3], val_data=str(tmp_path / "val.json"))
    with pytest.raises(ValueError, match=r"val.json: index 0: preferred_seq has 1 letters"):
        load(args)
    args.skip_bad_data = True
    with pytest.raises(ValueError, match="3 pairs to train on, 0 in --val_data, 1 of 4 rows left out"):
        load(args)


# what is shipped


def test_shipped_data(tmp_path):
    folder, readme = ROOT / "data" / "dpo", (ROOT / "data" / "README.md").read_text()
    rows = json.loads((folder / "pairs.json").read_text())
    assert rows == mutated_pairs(folder), "pairs.json is not what the rule in tests/helpers.py makes"
    entries = sorted(path.name for path in folder.glob("*.gz"))
    assert sum(path.stat().st_size for path in folder.iterdir()) < 250_000
    assert sorted({r["pdb_file"] for r in rows}) == entries and len(entries) == 13 and len(rows) == 12 * 13
    assert all(f"| {name[:4]} |" in readme for name in entries)
    pairs = load(make_args(tmp_path, "", train_data=str(folder / "pairs.json"), neighbours=48))
    batch = pairs.collate(np.arange(len(pairs)))
    changed = (batch.chosen != batch.rejected).sum(1) / batch.designed.sum(1)
    assert 0.08 <= changed.min() and changed.max() <= 0.25 and 0.15 < changed.mean() < 0.2
    for one, other in zip(batch.chosen, batch.rejected, strict=True):
        assert torch.equal(one.bincount(minlength=21), other.bincount(minlength=21)), "the same composition"


def dealt(lengths: np.ndarray, world_size: int) -> list[list[np.ndarray]]:
    """The micro-batches of each rank, two to a step, of a batch of pairs of these lengths; stand-ins left out."""
    found = []
    for rank in range(world_size):
        ddp, ids = one_process()._replace(rank=rank, world_size=world_size), np.arange(len(lengths))
        sampler = SimpleNamespace(micro_steps=2)
        task = SimpleNamespace(ddp=ddp, train_ids=ids, reference=None, collate=lambda ids: ids,
                               pairs=SimpleNamespace(lengths=lengths))  # fmt: skip
        micro, total = script.make_step(task, sampler, 0, ids)
        assert total == len(lengths) and all(len(ids) == max(count, 1) for ids, count, _ in micro)
        found.append([ids[:count] for ids, count, _ in micro])
    assert np.concatenate(sum(found, [])).tolist() == list(range(len(lengths)))
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_a_rank_gets_pairs_of_the_same_backbones(world_size):
    """12 structures of 4 pairs each: hardly a backbone is encoded by more than one rank."""
    backbone = np.repeat(np.arange(12), 4)
    found = dealt(np.full(48, 50), world_size)
    assert sum(len(np.unique(backbone[np.concatenate(micro)])) for micro in found) < 12 + world_size


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_ranks_get_as_many_residues(world_size):
    """Pairs of a batch are sorted by length: of equal counts the last rank would have half as much again."""
    lengths = np.repeat(np.arange(40, 160, 10), 8)
    loads = [lengths[np.concatenate(micro)].sum() for micro in dealt(lengths, world_size)]
    assert max(loads) - np.mean(loads) <= lengths.max() / 2 + 1, loads


@pytest.mark.parametrize("lengths", [[60, 78, 131, 131], [10, 10, 10, 900], [5, 300, 300, 300, 300, 300, 300, 301]])
def test_every_rank_has_a_pair(lengths):
    """Also where the short ones have fewer residues than a long one; every micro-batch, if there are enough."""
    counts = [[len(ids) for ids in micro] for micro in dealt(np.array(lengths), 4)]
    assert all(max(micro) for micro in counts) and (len(lengths) < 8 or all(min(micro) for micro in counts)), counts


def test_fewer_pairs_than_ranks():
    assert sorted(len(np.concatenate(micro)) for micro in dealt(np.array([50, 60]), 4)) == [0, 0, 1, 1]
