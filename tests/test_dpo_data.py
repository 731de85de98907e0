"""The data of run_dpo_ddp.py: structures, pairs, batches, what is held out; the entries shipped."""

import gzip
import importlib
import json
import re
from argparse import Namespace
from types import SimpleNamespace

import gemmi
import numpy as np
import pytest
import torch
from helpers import ATOMS, ROOT, mutated_pairs, write_structures

script = importlib.import_module("run_dpo_ddp")
pytestmark = pytest.mark.usefixtures("group")  # of one rank
LETTERS = "ACDEFGHIKLMNPQRSTVWYX"
NAMES = dict(zip(LETTERS, [*script.RESIDUES, "UNK"], strict=True))


def place(chain, number):
    """Where CA is: chains are lines, side by side."""
    return np.array([9.0 * (ord(chain) - 65), 0.0, 3.8 * number])


def residue(name, number, chain="A", atoms="N CA C O", scale=1.0, **more):
    """PDB records of a residue; `shift` moves it along x."""
    start = f"{more.get('record', 'ATOM'):<6}{10 * number:5d}"
    end = f"{more.get('alternative', ' ')}{name:>3} {chain}{number:4d}{more.get('code', ' ')}"
    lines = []
    for atom in atoms.split():
        offset = np.array(ATOMS.get(atom, (2, 2, 2))) + [more.get("shift", 0.0), 0, 0]
        x, y, z = scale * (place(chain, number) + offset)
        where = f"{x:8.3f}{y:8.3f}{z:8.3f}"
        lines.append(f"{start}  {atom:<3}{end}   {where}  1.00  0.00          {atom[0]:>2}\n")
    return "".join(lines)


def write_pdb(path, chains, scale=1.0):
    """A PDB file of chains with these letters; '-' is a gap, a small letter lacks its O."""
    text = ""
    for chain, letters in chains.items():
        for number, letter in enumerate(letters, start=1):
            if letter != "-":
                atoms = "N CA C" if letter.islower() else "N CA C O"
                text += residue(NAMES[letter.upper()], number, chain, atoms, scale)
        text += "TER\n"
    path.write_text(text + "END\n")


def row(file="a.pdb", chosen="", rejected="", **more):
    return {"pdb_file": file, "preferred_seq": chosen, "unpreferred_seq": rejected, **more}


def load(folder, rows, **options):
    """The pairs of a data file that holds `rows`, or this text."""
    path = folder / "pairs.json"
    path.write_text(rows if isinstance(rows, str) else json.dumps(rows))
    names = {"train_data": str(path), "val_data": None, "max_length": 500, "skip_bad_data": False}
    names.update({"seed": 42, "num_workers": 0, **options})
    return script.load_pairs(Namespace(**names), 8)[0]


def refused(folder, rows, **options):
    with pytest.raises(script.InputError) as caught:
        load(folder, rows, **options)
    return str(caught.value)


def letters_of(ids):
    return "".join(LETTERS[i] for i in ids)


# ---- Structures ------------------------------------------------------------------------------


ZOO = "".join(
    [
        "MODEL        1\n",
        residue("MET", 1, "W", record="HETATM", atoms="O"),  # a chain of water
        residue("DA", 1, "D", atoms="P C4 N1"),  # and one of DNA
        residue("ALA", 1, alternative="A"),
        residue("ALA", 1, alternative="B", shift=5),
        residue("GLY", 2),
        residue("GLY", 2, code="A", shift=1),
        residue("GLY", 2, code="B", shift=2),
        residue("MSE", 3, record="HETATM"),
        residue("SEP", 4, record="HETATM", alternative="C"),  # three residues in one place
        residue("SER", 4, alternative="B", shift=3),
        residue("THR", 4, alternative="A"),
        residue("LYS", 5, atoms="N CA C CB"),  # no O
        residue("TRP", 9, atoms="CA CB"),  # after a gap
        residue("SEP", 10),
        residue("SEP", 11, record="HETATM"),  # phosphoserine, as it should and should not be
        residue("CA", 12, atoms="CA"),  # calcium that says it is an atom of a chain
        residue("HOH", 13, record="HETATM", atoms="O"),
        "TER\n",
        residue("TYR", -1, "B"),
        residue("TYR", 0, "B"),
        residue("TYR", 1, "B", atoms="CA"),
        "TER\n",
        residue("ALA", 1, "C", atoms="CA"),
        "TER\n",
        "ENDMDL\nMODEL        2\n",
        residue("VAL", 1, shift=70),
        residue("VAL", 99),
        "ENDMDL\nEND\n",
    ]
)


def test_structure_zoo(tmp_path):
    """As PDB and mmCIF, plain and gz. In mmCIF the names of chains differ from the author's."""
    parsed = gemmi.read_pdb_string(ZOO)
    parsed.setup_entities()
    for name, text in {"pdb": ZOO, "cif": parsed.make_mmcif_document().as_string()}.items():
        (tmp_path / f"zoo.{name}").write_text(text)
        (tmp_path / f"zoo.{name}.gz").write_bytes(gzip.compress(text.encode()))

    for path in tmp_path.iterdir():
        structure = script.read_structure(path)
        letters = {name: letters_of(chain.letters) for name, chain in structure.chains.items()}
        assert letters == {"A": "AGGGMSKWX", "B": "YYY", "C": "A"}
        chain = structure.chains["A"]
        assert chain.numbers.tolist() == [1, 2, 3, 4, 5, 6, 7, 11, 12]
        assert structure.chains["B"].numbers.tolist() == [-1, 0, 1]
        assert chain.whole().tolist() == [True] * 6 + [False, False, True]
        assert np.isnan(chain.coords[6]).all(1).tolist() == [False, False, False, True]
        # the first alternative that occurs, whatever its letter
        for i, (number, shift) in enumerate([(1, 0), (2, 0), (2, 1), (2, 2), (3, 0), (4, 3)]):
            assert chain.coords[i, 1] == pytest.approx(place("A", number) + [shift, 0, 0], abs=2e-3)
        # the modified residue that is a HETATM is left out, and not without a word
        for note, number in zip(structure.notes, [4, 11], strict=True):
            assert f"residue A{number} SEP is left out: it is a HETATM" in note


def test_structures_that_are_refused(tmp_path):
    twice = residue("ALA", 7, "B") + "TER\n" + residue("GLY", 7, "B")  # two chains of one name
    cases = {
        "water.pdb": (residue("HOH", 1, record="HETATM").encode(), "no protein residues"),
        "twice.pdb": (twice.encode(), "residue B7 GLY has two atoms N; expected one"),
        "cut.pdb.gz": (gzip.compress(ZOO.encode())[:-20], "end-of-stream"),
        "broken.cif": (b"data_x\nloop_\n_atom_site.id\n_atom_site.x\n1\n", "Wrong number of"),
        # two that once gave an error without a reason, and formats that are none of the two
        "nothing.cif": (b"data_x\n_cell.length_a 3\n", "no protein residues"),
        "empty.cif": (b"", r"\w+"),
        "binary.bcif": (b"\x83\xa7encoder\0" * 9, "format not supported"),
        "pdbml.xml": (b"<?xml version='1.0'?><PDBx:datablock/>", "format not supported"),
    }
    for name, (content, text) in cases.items():
        (tmp_path / name).write_bytes(content)
        hint = "expected a protein structure in PDB or mmCIF format"
        with pytest.raises(ValueError, match=f"{name}: .*{text}.*; {hint}"):
            script.read_structure(tmp_path / name)


def test_coordinates_that_cannot_be_right_are_missing(tmp_path):
    """A field of asterisks, which reads as 0; nanometres. With file and line."""
    path = tmp_path / "a.pdb"
    write_pdb(path, {"A": "ACDEF"})
    lines = path.read_text().splitlines()
    lines[13] = lines[13][:46] + "********" + lines[13][54:]  # CA of A4
    path.write_text("\n".join(lines))
    structure = script.read_structure(path)
    chain = structure.chains["A"]
    assert letters_of(chain.letters) == "ACDEF"  # it keeps its place in the sequence
    assert chain.whole().tolist() == [True, True, True, False, True]
    (note,) = structure.notes
    assert f"{path}, line 13: residue A4 GLU counts as missing: N-CA, CA-C, C-O" in note

    write_pdb(path, {"A": "ACDEF"}, scale=0.1)
    text = refused(tmp_path, [row("a.pdb", "ACDEF", "ACDEG")])
    assert "chain A: 0 residues with all of N, CA, C and O" in text
    assert "line 1: residue A1 ALA counts as missing" in text


# ---- Pairs -----------------------------------------------------------------------------------


BAD_ROWS = [  # a row with this change, and what is said of it
    ({"pdb_file": "gone.pdb"}, "/gone.pdb: .*No such file"),
    ({"chain_id": "Q"}, "/a.pdb: chain Q: 0 residues .* expected one of A, B that has some"),
    ({"chain_id": "B", "fixed_chains": ["B"]}, "chain B: 4 residues .*, named 2 times"),
    ({"chain_id": "A", "design_chains": ["B"]}, "chain_id A and design_chains B: give one"),
    (
        {"preferred_seq": "ACD"},
        "preferred_seq has 3 letters; expected 6, one for each residue in the file, as a:A",
    ),
    ({"preferred_seq": None}, "no preferred_seq"),
    ({"unpreferred_seq": "ACUEFG"}, "unpreferred_seq has 'U' at position 2; expected letters"),
    ({"mutable_positions": [0]}, "are the same at the designed residues"),
    ({"mutable_positions": [6]}, r"mutable residues \[6, 6\]; expected a first .* 0 to 5"),
    ({"mutable_ranges": [4]}, r"mutable_ranges is \[4\]; expected such as \[\[3, 7\]\]"),
    ({"margin": 0.5}, "unknown field 'margin'; expected pdb_file, preferred_seq, .*cluster"),
    ({"cluster": "other"}, "cluster is other, before None; expected the same"),
]


def test_all_problems_are_listed_at_once(tmp_path):
    write_pdb(tmp_path / "a.pdb", {"A": "ACDEFG", "B": "KLMN"})
    good = row(chosen="ACDEFG", rejected="ACDEFA")
    bad = [{**good, **change} for change, _ in BAD_ROWS]
    rows = [good, *bad, *bad, row("a.pdb", "KLMN", "KLMK", chain_id="B")]
    lines = refused(tmp_path, rows).split("\n  ")
    assert lines[0].startswith("24 problems (--skip_bad_data leaves such rows out): ")
    assert len(lines) == 21
    assert lines[-1] == "... and 4 more"
    for number, (_, text) in enumerate(BAD_ROWS, start=1):
        assert re.search(f"pairs.json: index {number}: .*{text}", lines[number - 1])

    pairs = load(tmp_path, rows, skip_bad_data=True)
    assert [pair.name for pair in pairs.pairs] == ["a:A:0", "a:B:25"]
    text = refused(tmp_path, [good], max_length=5)
    assert "6 residues; expected at most --max_length 5" in text
    assert len(load(tmp_path, [good], max_length=6)) == 1


def test_forms_of_the_data_file(tmp_path):
    """An array, untidy lines; null is no value; paths are relative to the file."""
    (tmp_path / "deep").mkdir()
    write_pdb(tmp_path / "deep" / "a.pdb", {"A": "ACDEFG"})
    rows = [row("deep/a.pdb", "ACDEFG", "ACDEFA", comment=5, chain_id=None)]
    rows.append(row(str(tmp_path / "deep" / "a.pdb"), "acdefg", "CCDEFG", description="x"))
    lines = [json.dumps(one) for one in rows]
    untidy = "\ufeff\n" + "\r\n\n".join(lines) + "\n \n"
    for text in (json.dumps(rows, indent=2), untidy):
        pairs = load(tmp_path, text).pairs
        assert [letters_of(pair.letters[0]) for pair in pairs] == ["ACDEFG", "ACDEFG"]
        assert [letters_of(pair.letters[1]) for pair in pairs] == ["ACDEFA", "CCDEFG"]

    assert "expected a JSON array of objects" in refused(tmp_path, "[{")
    assert "pairs.json: no pairs; expected pdb_file" in refused(tmp_path, "")
    text = refused(tmp_path, lines[0] + "\n{'pdb_file'}\n" + lines[1])
    assert "line 2: \"{'pdb_file'}\"; expected an object with pdb_file" in text


def test_chains_and_positions(tmp_path):
    """Design chains in the order given, then the fixed ones; what is not designed has the
    structure's letter; a residue without coordinates is not there."""
    write_pdb(tmp_path / "a.pdb", {"A": "ACD-FG", "B": "KlMN", "C": "WWYY"})
    both = {"mutable_positions": [2], "mutable_ranges": [[3, 4], [6, 6]]}
    cases = [  # change, preferred and unpreferred sequence, what is designed
        ({}, "RRRSSSSSWWYY", "TTTSSSSTWWYY", "XXXXXXXX...."),
        ({"mutable_positions": [0, 8]}, "RMNACDFSWWYY", "TMNACDFTWWYY", "X......X...."),
        (both, "KRRSCSFGWWYY", "KTTSCSFGWWYY", ".XXX.X......"),
        ({"fixed_chains": []}, "RRRSSSSS", "TTTSSSST", "XXXXXXXX"),
    ]
    rows = []
    for change, *_ in cases:
        chains = {"design_chains": ["B", "A"], "fixed_chains": ["C"]}
        rows.append(row("a.pdb", "RRRRSSSSS", "TTTTSSSST", **{**chains, **change}))
    pairs = load(tmp_path, rows)

    for pair, (_, chosen, rejected, designed) in zip(pairs.pairs, cases, strict=True):
        assert [letters_of(letters) for letters in pair.letters] == [chosen, rejected]
        assert pair.designed.tolist() == [sign == "X" for sign in designed]
    assert pairs.other_letters == 2
    assert len(pairs.backbones) == 2  # with the fixed chain, and without
    number, chain = pairs.backbones[0].place.tolist()
    assert number == [1, 3, 4, 1, 2, 3, 5, 6, 1, 2, 3, 4]  # the gap of A4 counts
    assert chain == [0] * 3 + [1] * 5 + [2] * 4


def some_rows(folder, count, pairs):
    """Rows for structures of 5 to 31 residues."""
    write_structures(folder, count, pairs, least=5, most=31)
    return json.loads((folder / "pairs.json").read_text())


def test_batches_against_each_structure(tmp_path):
    """In any order and with repeats, a batch holds what featurise says of each structure."""
    pairs = load(tmp_path, some_rows(tmp_path, 4, pairs=3))
    ids = np.array([11, 0, 4, 4, 10, 6])
    batch = pairs[ids, np.arange(20), 0]
    assert batch.ids.tolist() == ids.tolist()
    assert batch.share == 1 / 20
    chosen, rejected, rows, ranks, owner = batch.residues
    for number, i in enumerate(ids):
        mine = owner == number
        assert chosen[mine].tolist() == pairs.pairs[i].letters[0].tolist()
        assert rejected[mine].tolist() == pairs.pairs[i].letters[1].tolist()
        assert ranks[mine].tolist() == pairs.ranks(i, 0).tolist()
        # the residue's atoms are those of its backbone
        assert torch.equal(batch.structures.atoms[rows[mine]], pairs.backbones[i // 3].atoms)

    # nobody has neighbours elsewhere
    neighbours = pairs.structures([2, 1]).neighbours
    size = len(pairs.backbones[2].atoms)
    assert neighbours[:size].max() == size - 1
    assert neighbours[size:][neighbours[size:] >= 0].min() == size


def test_decoding_orders():
    """The context comes first; the orders are uniform and depend on (seed, pair, number) alone."""
    designed = np.zeros(30, bool)
    designed[5:25] = True
    data = script.Pairs(Namespace(seed=1), 8)
    data.pairs = [SimpleNamespace(designed=designed)] * 400
    ranks = np.array([data.ranks(number, 0) for number in range(400)])
    assert (np.sort(ranks, axis=1) == np.arange(30)).all()
    assert (ranks[:, ~designed] == np.arange(10)).all()
    assert np.abs(ranks[:, designed].mean(0) - 19.5).max() < 5 * (20**2 / 12 / 400) ** 0.5
    assert np.array_equal(data.ranks(7, 0), ranks[7])
    assert not np.array_equal(data.ranks(7, 1), ranks[7])


# ---- Held out --------------------------------------------------------------------------------


def split(pairs, **options):
    args = Namespace(**{"val_data": None, "val_fraction": 0.3, "seed": 42, **options})
    return script.split_pairs(args, pairs, len(pairs))


def held_sizes(sizes, fraction, seed=0):
    """{group: pairs} held out of groups of these sizes."""
    groups = np.repeat([f"group{i}" for i in range(len(sizes))], sizes).tolist()
    return {name: groups.count(name) for name in script.choose_groups(groups, fraction, seed)}


def test_share_held_out():
    assert len(held_sizes([1] * 414, 0.1)) == 42, "the document's 372 and 42"
    for seed in range(20):
        taken = sum(held_sizes([500, *[5] * 100], 0.1, seed).values())
        assert 100 <= taken < 110, "one large structure is no reason for half of the data"
    assert list(held_sizes([60, 50, 70], 0.1).values()) == [50], "all are too large"
    assert held_sizes([3] * 50, 0.2, seed=0) != held_sizes([3] * 50, 0.2, seed=1)


def test_split_by_structure_and_cluster(tmp_path):
    rows = some_rows(tmp_path, 6, pairs=4)
    (tmp_path / "copy.pdb").write_bytes((tmp_path / "helix0.pdb").read_bytes())
    rows.append({**rows[0], "pdb_file": "copy.pdb"})  # a copy of a file is the same structure
    pairs = load(tmp_path, rows)
    groups = [pair.group for pair in pairs.pairs]
    assert groups[24] == groups[0]
    assert len(set(groups)) == 6
    train, valid = split(pairs)
    assert sorted([*train, *valid]) == list(range(25))
    assert 5 <= len(valid) <= 12
    assert not {groups[i] for i in train} & {groups[i] for i in valid}

    # homologous chains in one cluster: never on both sides
    rows = [{**one, "cluster": f"family {i // 8}"} for i, one in enumerate(rows[:24])]
    clustered = load(tmp_path, rows)
    for seed in range(5):
        train, valid = split(clustered, seed=seed)
        assert len(valid) == 8
        assert len({i // 8 for i in valid}) == 1


def test_one_structure_is_split_by_sequence(tmp_path, caplog):
    """Once that was an error. No held-out sequence is trained on, and it is said."""
    native = "ACDEFGHIKLMN"
    write_pdb(tmp_path / "a.pdb", {"A": native})
    others = [native[:i] + "W" + native[i + 1 :] for i in range(12)]
    rows = [row("a.pdb", native, other) for other in others]
    rows.append(row("a.pdb", others[0], others[1]))
    pairs = load(tmp_path, rows)
    for seed in range(10):
        train, valid = split(pairs, seed=seed)
        assert len(valid) >= 3
        assert len(train) + len(valid) >= 9
        held = {rows[i]["unpreferred_seq"] for i in valid}
        for i in train:
            assert not held & {rows[i]["preferred_seq"], rows[i]["unpreferred_seq"]}
    assert "all pairs are on one structure" in caplog.text
    with pytest.raises(script.InputError, match="give --val_data"):
        split(load(tmp_path, rows[:1]))


def test_validation_data(tmp_path, caplog):
    rows = some_rows(tmp_path, 2, pairs=3)
    (tmp_path / "val.json").write_text(json.dumps(rows[3:]))
    args = Namespace(val_data=str(tmp_path / "val.json"))
    train, valid = script.split_pairs(args, load(tmp_path, rows[:3], **vars(args)), 3)
    assert (train.tolist(), valid.tolist()) == ([0, 1, 2], [3, 4, 5])
    assert "in the training data, too" not in caplog.text
    script.split_pairs(args, load(tmp_path, rows[:4], **vars(args)), 4)
    assert "1 structures or clusters are in --val_data and in the training data, too" in caplog.text


def test_shipped_data(tmp_path):
    """Entries of the PDB with selenomethionines as HETATM, gaps, insertion codes, disorder."""
    folder = ROOT / "data" / "dpo"
    rows = json.loads((folder / "pairs.json").read_text())
    assert rows == mutated_pairs(folder), "not what the rule in tests/helpers.py makes"
    natives = {row["pdb_file"][:4]: row["preferred_seq"] for row in rows}
    assert natives["1EJG"] == "TTCCPSIVARSNFNVCRLPGTPEALCATYTGCIIIPGATCPGDYAN"  # crambin
    assert natives["1A8O"].count("M") == 4

    pairs = load(tmp_path, [{**row, "pdb_file": f"{folder}/{row['pdb_file']}"} for row in rows])
    assert len(pairs) == 12 * 13
    assert pairs.notes == []
    number = [pair.name.startswith("1UBI") for pair in pairs.pairs].index(True) // 12
    steps = pairs.backbones[number].atoms[:, 1].diff(dim=0).norm(dim=1)
    assert steps.tolist() == pytest.approx([3.8] * 75, abs=0.15)
