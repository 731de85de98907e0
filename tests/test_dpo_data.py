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
from helpers import ATOMS, ROOT, write_structures

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
    args = {"train_data": str(path), "val_data": None, "max_length": 500, "skip_bad_data": False}
    args.update(cache_dir=f"{folder}/cache", seed=42, num_orders=4, val_fraction=0.3)
    args = Namespace(**{**args, **options})
    return script.Pairs(script.prepare(args, neighbours=8), args)


def refused(folder, rows, **options):
    with pytest.raises(script.InputError) as caught:
        load(folder, rows, **options)
    return str(caught.value)


def letters_of(ids):
    return "".join(LETTERS[i] for i in ids)


def texts_of(data, number):
    """Both sequences of a pair, and its context."""
    rows = slice(data.pair_ptr[number], data.pair_ptr[number + 1])
    return [letters_of(letters) for letters in data.letters[rows].T]


# --------------------------------------------------------------------------------------------------
# Structures


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
        for text in (
            "left out as HETATM, which as ATOM would be read as X: 2 (A4 SEP, A11 SEP)",
            "left out, with the number of another: 1 (A4 THR)",
            "left out, with an unknown name and few atoms: 1 (A12 CA)",
            "read as X: 1 (A10 SEP)",
            "without all of N, CA, C and O, which are not designed: 4 (A5 LYS, A9 TRP, B1 TYR)",
        ):
            assert text in structure.note


def chain(names, **more):
    return "".join(residue(name, i, **more) for i, name in enumerate(names.split(), start=1))


def at_columns(text, first, words):
    """Every line with these words from a column on, counted from 0."""
    return "".join(f"{line:<{first}.{first}}{words}\n" for line in text.splitlines())


FOUR = chain("ALA CYS ASP GLU")  # ACDE
FREE_TEXT = "data_x\n_struct.title\n;The atoms, as\nATOMS   of\nATOM   text\n;\n"
OTHER_NAMES = "MSE HIE HID HIP HSD HSE HSP CYX CYM ASH GLH LYN"


def as_mmcif(text):
    parsed = gemmi.read_pdb_string(text)
    parsed.setup_entities()
    lines = parsed.make_mmcif_document().as_string().splitlines(keepends=True)
    return FREE_TEXT + "".join(lines[1:])


# a file's content; letters of chain A, or words of the error; words of the note
ODD = {
    "protonation": (chain(OTHER_NAMES), "MHHHHHHCCDEK", ""),
    "UTF-8 mark": ("\ufeff" + FOUR, "ACDE", ""),
    "Windows": (FOUR.replace("\n", "\r\n"), "ACDE", ""),
    "scores": (FOUR + "TER\nmodel 1\nrmsd 0.42\nlabel fa_atr 1.0\n", "ACDE", ""),
    "scores first": ("plddt 0.9\n# Rosetta\n" + FOUR + "#END_POSE 1\n", "ACDE", ""),
    "before 1996": (at_columns(FOUR, 72, "1ABC 123"), "ACDE", ""),
    "short lines": (at_columns(FOUR, 54, ""), "ACDE", ""),
    "mmCIF text": (as_mmcif(FOUR), "ACDE", ""),
    "ligand and water": (
        FOUR + residue("HEM", 5, atoms="FE", record="HETATM") + residue("HOH", 6, atoms="O"),
        "ACDE",
        "",
    ),
    "OT1": (
        FOUR + residue("LYS", 5).replace("  O   LYS", "  OT1 LYS"),
        "ACDEK",
        "with OT1, which is read as O: 1 (A5 LYS)",
    ),
    "NaN": (
        FOUR + residue("LYS", 5).replace("   0.000", "     nan", 1),
        "ACDE-",
        "1 (A5 LYS)",
    ),
    "asterisks": (  # which read as 0
        FOUR + residue("LYS", 5).replace("  19.000", "********", 1),
        "ACDE-",
        "that count as missing, with N-CA, CA-C or C-O not 0.8 to 2.2 Å long: 1 (A5 LYS)",
    ),
    "nanometres": (chain("ALA CYS", scale=0.1), "--", "that count as missing, with N-CA"),
    "two chains of a name": (
        residue("GLY", 7) + "TER\n" + residue("GLY", 7),
        "A7 GLY is in one",
        "",
    ),
    "DNA": (chain("DA DC DG", atoms="P C4 N1"), "no protein residues", ""),
    "cut gz": (gzip.compress(ZOO.encode())[:-20], "ended before the end-of-stream", ""),
    "broken mmCIF": ("data_x\nloop_\n_atom_site.id\n_atom_site.x\n1\n", "Wrong number of", ""),
    "mmCIF without atoms": ("data_x\n_cell.length_a 3\n", "no protein residues", ""),
}


@pytest.mark.parametrize("case", ODD)
def test_odd_structures(case, tmp_path):
    """Each is read, with a note of what is left out or guessed, or is refused in one line."""
    content, expected, note = ODD[case]
    path = tmp_path / "odd.pdb"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    if " " in expected:
        hint = "expected a protein structure in PDB or mmCIF format"
        with pytest.raises(ValueError, match=f"odd.pdb: .*{expected}.*; {hint}"):
            script.read_structure(path)
        return
    structure = script.read_structure(path)
    chain = structure.chains["A"]
    letters = np.where(chain.whole(), np.array(list(LETTERS))[chain.letters], "-")
    assert "".join(letters) == expected
    if note:
        assert structure.note.count("\n") == 0
        assert f"{path}: residues " in structure.note
        assert note in structure.note
    else:
        assert structure.note == ""


# --------------------------------------------------------------------------------------------------
# Pairs


BAD_ROWS = [  # a row with this change, and what is said of it
    ({"pdb_file": "gone.pdb"}, "/gone.pdb: .*No such file"),
    ({"chain_id": "Q"}, "/a.pdb: chain Q: 0 residues .* expected one of A, B that has some"),
    ({"chain_id": "B", "fixed_chains": ["B"]}, "chain B: 4 residues .*, named 2 times"),
    ({"chain_id": "A", "design_chains": ["B"]}, "chain_id A and design_chains B: give one"),
    ({"preferred_seq": "ACD"}, "3 letters; expected 6, one for each .*, as a:A: ACDEFG"),
    ({"preferred_seq": "ACD/EFG"}, "preferred_seq has '/' between chains; expected the letters"),
    ({"preferred_seq": None}, "no preferred_seq"),
    ({"unpreferred_seq": "ACU"}, "unpreferred_seq has 'U' at position 2; expected letters"),
    ({"mutable_positions": [0]}, "are the same at the designed residues"),
    ({"unpreferred_seq": "ACDEFX"}, "are the same at the designed residues"),
    ({"unpreferred_seq": "XCDEFA"}, "have A and X at residue 0, which is not designed; expected"),
    ({"mutable_positions": [6]}, r"mutable residues \[6, 6\]; expected a first .* 0 to 5"),
    ({"mutable_ranges": [4]}, r"mutable_ranges is \[4\]; expected such as \[\[3, 7\]\]"),
    ({"margin": 0.5}, "unknown field 'margin'; expected pdb_file, preferred_seq, .*cluster"),
    ({"cluster": "other"}, "cluster is other, before None; expected the same"),
]


def test_all_problems_are_listed_at_once(tmp_path, caplog):
    write_pdb(tmp_path / "a.pdb", {"A": "ACDEFG", "B": "KLMN"})
    good = row(chosen="ACDEFG", rejected="ACDEFA")
    bad = [{**good, **change} for change, _ in BAD_ROWS]
    rows = [good, *bad, *bad, row("a.pdb", "KLMN", "KLMK", chain_id="B")]
    lines = refused(tmp_path, rows).split("\n  ")
    assert lines[0].startswith("30 problems (--skip_bad_data leaves such rows out):")
    assert re.search("and 10 more", lines[-1])
    for number, (_, text) in enumerate(BAD_ROWS, start=1):
        assert re.search(f"pairs.json: index {number}: .*{text}", lines[number])

    data = load(tmp_path, rows, skip_bad_data=True)
    assert data.name.tolist() == ["a:A:0", "a:B:31"]
    assert "30 rows are left out" in caplog.text
    text = refused(tmp_path, bad[:3], skip_bad_data=True)
    assert re.search(f"no pairs; expected pdb_file.*\n  .*index 0: .*{BAD_ROWS[0][1]}", text)
    text = refused(tmp_path, [good], max_length=5)
    assert "6 residues; expected at most --max_length 5" in text
    assert len(load(tmp_path, [good], max_length=6)) == 1


def test_a_sequence_that_does_not_fit_is_told_what_is_odd(tmp_path):
    """The missing letter is that of a residue that was left out."""
    (tmp_path / "a.pdb").write_text(FOUR + residue("SEP", 5, record="HETATM"))
    text = refused(tmp_path, [row("a.pdb", "ACDES", "ACDEA")])
    assert "expected 4, one for each residue in the file, as a:A: ACDE" in text
    assert "left out as HETATM, which as ATOM would be read as X: 1 (A5 SEP)" in text


def test_forms_of_the_data_file(tmp_path):
    """An array, untidy lines; null is no value; paths are relative to the file."""
    (tmp_path / "deep").mkdir()
    write_pdb(tmp_path / "deep" / "a.pdb", {"A": "ACDEFG"})
    rows = [row("deep/a.pdb", "ACDEFG", "ACDEFA", comment=5, chain_id=None)]
    rows.append(row(str(tmp_path / "deep" / "a.pdb"), "acdefg", "CCDEFG", description="x"))
    lines = [json.dumps(one) for one in rows]
    untidy = "\ufeff\n" + "\r\n\n".join(lines) + "\n \n"
    for text in (json.dumps(rows, indent=2), untidy):
        data = load(tmp_path, text)
        assert texts_of(data, 0) == ["ACDEFG", "ACDEFA"]
        assert texts_of(data, 1) == ["ACDEFG", "CCDEFG"]

    wanted = "for --train_data and --val_data expected a JSON array, or an object per line"
    assert wanted in refused(tmp_path, "[{")
    assert wanted in refused(tmp_path, "pdb_file,preferred_seq\na.pdb,ACD\n")
    assert wanted in refused(tmp_path, json.dumps({"pairs": rows}, indent=2))
    assert "pairs.json: no pairs; expected pdb_file" in refused(tmp_path, "")
    text = refused(tmp_path, lines[0] + "\n{'pdb_file'}\n" + lines[1])
    assert "line 2: \"{'pdb_file'}\"; expected an object with pdb_file" in text


def test_chains_and_positions(tmp_path, caplog):
    """Design chains in the order given, then the fixed ones. X is not designed."""
    write_pdb(tmp_path / "a.pdb", {"A": "ACD-FG", "B": "KlMN", "C": "WWYY"})
    both = {"mutable_positions": [2], "mutable_ranges": [[3, 4], [6, 6]]}
    cases = [  # change, preferred and unpreferred sequence, what is designed
        ({}, "RRRSSSSSWWYY", "TRTSSSSTWWYY", "XXXXXXXX...."),
        ({"mutable_positions": [0, 3, 8]}, "RRRSSSSSWWYY", "TRRSSSSTWWYY", "X.X....X...."),
        (both, "RRXSSSSSWWYY", "RRXTSTSSWWYY", ".X.X.X......"),
        ({"fixed_chains": []}, "RRRSSSSS", "TTTSSSST", "XXXXXXXX"),
    ]
    rows = []
    for change, chosen, rejected, _ in cases:
        chains = {"design_chains": ["B", "A"], "fixed_chains": ["C"]}
        texts = [f"{text[0]}A{text[1:8]}" for text in (chosen, rejected)]  # A: not resolved
        rows.append(row("a.pdb", *texts, **{**chains, **change}))
    rows.append(row("a.pdb", "ACDFG", "ACDFA"))
    data = load(tmp_path, rows)
    for i, (_, chosen, rejected, designed) in enumerate(cases):
        assert texts_of(data, i) == [chosen, rejected]
        signs = np.where(data.designed[data.pair_ptr[i] : data.pair_ptr[i + 1]], "X", ".")
        assert "".join(signs) == designed
        assert data.counts[i] == designed.count("X")
    assert "1 pairs have X in their sequences" in caplog.text
    assert "1 pairs name no chain, and their files have several" in caplog.text
    assert data.backbone.tolist() == [0, 0, 0, 1, 2]  # with the fixed chain, and without
    number, chain = data.numbers[: data.node_ptr[1]].T.tolist()
    assert number == [1, 3, 4, 1, 2, 3, 5, 6, 1, 2, 3, 4]  # the gap of A4 counts
    assert chain == [0] * 3 + [1] * 5 + [2] * 4


def some_rows(folder, count, pairs):
    """Rows for structures of 5 to 31 residues."""
    write_structures(folder, count, pairs, least=5, most=31)
    return json.loads((folder / "pairs.json").read_text())


def test_batches_against_each_structure(tmp_path):
    """In any order and with repeats, a batch holds what was read of each structure."""
    data = load(tmp_path, some_rows(tmp_path, 4, pairs=3))
    data.reference = np.random.default_rng(0).normal(size=(4, data.pair_ptr[-1], 2))
    data.reference = data.reference.astype(np.float32)
    whole = np.array([7, 11, 0, 4, 4, 10, 6, 1])
    own = np.arange(1, 7)
    batch = data[5, whole, own]
    assert batch.share == 1 / 8
    for number, i in enumerate(whole[own]):
        mine = batch.pair == number
        pair = slice(data.pair_ptr[i], data.pair_ptr[i + 1])
        assert batch.letters[:, mine].T.tolist() == data.letters[pair].tolist()
        places = data.decode_places(i, 1)  # step 5 of 4 orders
        assert batch.decode_place[mine].tolist() == places.tolist()
        assert batch.reference[:, mine].T.tolist() == data.reference[1, pair].tolist()
        # the residue's atoms are those of its backbone
        begin, end = data.node_ptr[data.backbone[i] :][:2]
        assert batch.backbones.atoms[batch.node[mine]].tolist() == data.atoms[begin:end].tolist()

    # nobody has neighbours elsewhere
    neighbours = data.backbones(np.array([2, 1]))[0].neighbours
    size = data.node_ptr[3] - data.node_ptr[2]
    assert neighbours[:size].max() == size - 1
    assert neighbours[size:][neighbours[size:] >= 0].min() == size


def test_decoding_orders():
    """The context comes first; the orders are uniform and depend on (pair, number) alone."""
    designed = np.zeros(30, bool)
    designed[5:25] = True
    data = SimpleNamespace(designed=np.tile(designed, 400), pair_ptr=30 * np.arange(401))
    data.row = np.arange(400)
    ranks = np.array([script.Pairs.decode_places(data, number, 0) for number in range(400)])
    assert (np.sort(ranks, axis=1) == np.arange(30)).all()
    assert (ranks[:, ~designed] == np.arange(10)).all()
    assert np.abs(ranks[:, designed].mean(0) - 19.5).max() < 5 * (20**2 / 12 / 400) ** 0.5
    assert np.array_equal(script.Pairs.decode_places(data, 7, 0), ranks[7])
    assert not np.array_equal(script.Pairs.decode_places(data, 7, 1), ranks[7])


def test_work_is_done_once(tmp_path):
    """The cache is taken while nothing has changed. A structure that has changed is read again."""
    rows = some_rows(tmp_path, 2, pairs=2)
    data = load(tmp_path, rows)
    assert load(tmp_path, rows).hash == data.hash
    assert len(list((tmp_path / "cache").iterdir())) == 1
    path = tmp_path / "helix1.pdb"
    path.write_text(path.read_text().replace("   0.1", "   0.2"))
    assert load(tmp_path, rows).hash != data.hash


# --------------------------------------------------------------------------------------------------
# Held out


def held_sizes(sizes, fraction):
    """Numbers of pairs of the groups that are held out, of groups of these sizes."""
    group = np.repeat(np.arange(len(sizes)), sizes)
    args = Namespace(val_data=None, val_fraction=fraction)

    class Groups(script.Pairs):
        def __init__(self):
            self.args = args
            self.group = group
            self.row = group
            self.is_valid = np.zeros(len(group), bool)

    data = Groups()
    data.split()
    assert sorted([*data.train_ids, *data.valid_ids]) == list(range(len(group)))
    held = np.unique(group[data.valid_ids])
    assert not set(held) & set(group[data.train_ids])
    return {int(number): sizes[number] for number in held}


def test_share_held_out():
    assert len(held_sizes([1] * 414, 0.1)) == 42, "the document's 372 and 42"
    taken = sum(held_sizes([500, *[5] * 100], 0.1).values())
    assert taken == 100, "one large structure is no reason for half of the data"
    assert list(held_sizes([60, 50, 70], 0.1).values()) == [50], "all are too large"
    assert list(held_sizes([3] * 50, 0.2)) != list(range(10)), "not in random order"
    with pytest.raises(script.InputError, match="one structure or cluster: give --val_data"):
        held_sizes([9], 0.1)


def test_split_by_structure_and_cluster(tmp_path):
    rows = some_rows(tmp_path, 6, pairs=4)
    packed = gzip.compress((tmp_path / "helix0.pdb").read_bytes())
    (tmp_path / "copy.pdb.gz").write_bytes(packed)
    rows.append({**rows[0], "pdb_file": "copy.pdb.gz"})  # a copy of a file is the same structure
    group = load(tmp_path, rows).group
    assert group[24] == group[0]
    assert len(set(group)) == 6
    # homologous chains in one cluster
    rows = [{**one, "cluster": f"family {i // 8}"} for i, one in enumerate(rows[:24])]
    assert load(tmp_path, rows).group.tolist() == np.repeat([0, 1, 2], 8).tolist()


def test_validation_data(tmp_path, caplog):
    rows = some_rows(tmp_path, 2, pairs=3)
    (tmp_path / "val.json").write_text(json.dumps(rows[3:]))
    data = load(tmp_path, rows[:3], val_data=str(tmp_path / "val.json"))
    data.split()
    assert (data.train_ids.tolist(), data.valid_ids.tolist()) == ([0, 1, 2], [3, 4, 5])
    text = "structures or clusters are in --val_data and in --train_data, too"
    assert text not in caplog.text
    load(tmp_path, rows[:4], val_data=str(tmp_path / "val.json")).split()
    assert f"1 {text}" in caplog.text


def test_shipped_data(tmp_path, caplog):
    """Entries of the PDB with selenomethionines as HETATM, gaps, insertion codes, disorder."""
    folder = ROOT / "data" / "dpo"
    rows = json.loads((folder / "pairs.json").read_text())
    natives = {row["pdb_file"][:4]: row["preferred_seq"] for row in rows}
    assert natives["1EJG"] == "TTCCPSIVARSNFNVCRLPGTPEALCATYTGCIIIPGATCPGDYAN"  # crambin
    assert natives["1A8O"].count("M") == 4

    data = load(tmp_path, [{**row, "pdb_file": f"{folder}/{row['pdb_file']}"} for row in rows])
    assert len(data) == 12 * 13
    (said,) = caplog.messages  # of crambin, which has two residues in one place
    assert said.endswith("residues left out, with the number of another: 1 (A22 SER)")
    number = data.backbone[data.name.tolist().index("1UBI_A:A:72")]
    steps = np.diff(data.atoms[data.node_ptr[number] : data.node_ptr[number + 1], 1], axis=0)
    assert np.linalg.norm(steps, axis=1).tolist() == pytest.approx([3.8] * 75, abs=0.15)
