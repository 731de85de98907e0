"""The data of run_dpo_ddp.py: structures, pairs, batches, what is held out; the entries shipped."""

import gzip
import importlib
import json
import re
from argparse import Namespace
from unittest import mock

import gemmi
import numpy as np
import pytest
import torch
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
    args.update(cache_dir=f"{folder}/cache", seed=42, val_fraction=0.3)
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
    return [letters_of(letters) for letters in data.letters[number].T]


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
        residue("SER", 4, alternative="B", shift=3),  # two residues in one place
        residue("THR", 4, alternative="A"),
        residue("LYS", 5, atoms="N CA C CB"),  # no O
        residue("TRP", 9, atoms="CA CB"),  # after a gap
        residue("SEP", 10),
        residue("SEP", 11, record="HETATM"),  # phosphoserine, as it should and should not be
        residue("NH2", 12, atoms="N"),  # the end of a chain, no residue
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

    digests = set()
    for path in tmp_path.iterdir():
        structure = script.read_structure(str(path))
        digests.add(structure.digest)
        letters = {name: letters_of(chain.letters) for name, chain in structure.chains.items()}
        assert letters == {"A": "AGGGMSKWX", "B": "YYY", "C": "A"}
        chain = structure.chains["A"]
        assert chain.numbers.tolist() == [0, 1, 2, 3, 4, 5, 6, 10, 11]  # a gap, insertion codes
        assert structure.chains["B"].numbers.tolist() == [0, 1, 2]
        missing = np.isnan(chain.coords).any(axis=(1, 2))
        assert missing.tolist() == [False] * 6 + [True, True, False]
        assert np.isnan(chain.coords[6]).all(1).tolist() == [False, False, False, True]
        # the first alternative that occurs, whatever its letter
        for i, (number, shift) in enumerate([(1, 0), (2, 0), (2, 1), (2, 2), (3, 0), (4, 3)]):
            assert chain.coords[i, 1] == pytest.approx(place("A", number) + [shift, 0, 0], abs=2e-3)
    assert len(digests) == 1  # one structure, however it is written


def chain(names, **more):
    return "".join(residue(name, i, **more) for i, name in enumerate(names.split(), start=1))


FOUR = chain("ALA CYS ASP GLU")  # ACDE
FREE_TEXT = "data_x\n_struct.title\n;The atoms, as\nATOMS   of\nATOM   text\n;\n"
OTHER_NAMES = "MSE HIE HID HIP HSD HSE HSP CYX CYM ASH GLH LYN"


def as_mmcif(text):
    parsed = gemmi.read_pdb_string(text)
    parsed.setup_entities()
    lines = parsed.make_mmcif_document().as_string().splitlines(keepends=True)
    return FREE_TEXT + "".join(lines[1:])


# a file's content; letters of chain A, or words of the error
ODD = {
    "protonation": (chain(OTHER_NAMES), "MHHHHHHCCDEK"),
    "Windows": (FOUR.replace("\n", "\r\n"), "ACDE"),
    "scores": (FOUR + "TER\nrmsd 0.42\nlabel fa_atr 1.0\n", "ACDE"),
    "mmCIF text": (as_mmcif(FOUR), "ACDE"),
    "ligand and water": (
        FOUR + residue("HEM", 5, atoms="FE", record="HETATM") + residue("HOH", 6, atoms="O"),
        "ACDE",
    ),
    "NaN": (FOUR + residue("LYS", 5).replace("   0.000", "     nan", 1), "ACDE-"),
    "cysteine as HETATM": (residue("CYS", 1, record="HETATM"), "1 residues are HETATM, and left"),
    "DNA": (chain("DA DC DG", atoms="P C4 N1"), "no others"),
    "text": ("hello\n", "wrong format of coordinate file"),
    "empty": ("", "fread failed"),
    "broken mmCIF": ("data_x\nloop_\n_atom_site.id\n_atom_site.x\n1\n", "Wrong number of"),
}


@pytest.mark.parametrize("case", ODD)
def test_odd_structures(case, tmp_path):
    """Each is read, or refused in one line that says what would be right."""
    content, expected = ODD[case]
    path = tmp_path / "odd.pdb"
    path.write_text(content, newline="")
    if " " in expected:
        hint = "expected a PDB or mmCIF file with protein"
        with pytest.raises(ValueError, match=f"odd.pdb: .*{expected}.*; {hint}") as caught:
            script.read_structure(str(path))
        assert "\n" not in str(caught.value)
        return
    chain = script.read_structure(str(path)).chains["A"]
    whole = np.isfinite(chain.coords).all(axis=(1, 2))
    assert "".join(np.where(whole, list(letters_of(chain.letters)), "-")) == expected


def test_a_cut_file(tmp_path):
    path = tmp_path / "cut.pdb.gz"
    path.write_bytes(gzip.compress(ZOO.encode())[:-20])
    with pytest.raises(ValueError, match="cut.pdb.gz: .*; expected a PDB or mmCIF file"):
        script.read_structure(str(path))


# --------------------------------------------------------------------------------------------------
# Pairs


BAD_ROWS = [  # a row with this change, and what is said of it
    ({"pdb_file": "gone.pdb"}, "/gone.pdb: No such file or directory; expected a PDB|gone.pdb"),
    ({"chain_id": "Q"}, "chain Q; expected one of A, B, once"),
    ({"chain_id": "A", "design_chains": ["B"]}, "chain_id A and design_chains B: give one"),
    ({"preferred_seq": "ACD"}, "preferred_seq has 3 letters; expected 6, one for each .*: ACDEFG"),
    ({"preferred_seq": "ACD/EFG"}, "preferred_seq has '/' at 3; expected letters of ACDE"),
    ({"preferred_seq": None}, "missing .* 'preferred_seq'"),
    ({"unpreferred_seq": ["A"] * 6}, r"unpreferred_seq is \['A', .*\]; expected <class"),
    ({"mutable_positions": [0]}, "are the same at the designed residues"),
    ({"unpreferred_seq": "ACDEFX"}, "are the same at the designed residues"),
    ({"unpreferred_seq": "XCDEFA"}, "differ at residue 0, which is X, or not mutable; expected"),
    ({"mutable_positions": [6]}, "mutable residues 6 to 6; expected 0 to 5"),
    ({"mutable_positions": ["A5"]}, "'<=' not supported between .* 'int' and 'str'"),
    ({"margin": 0.5}, "unexpected keyword argument 'margin'"),
]


def test_all_problems_are_listed_at_once(tmp_path, caplog):
    write_pdb(tmp_path / "a.pdb", {"A": "ACDEFG", "B": "KLMN"})
    good = row(chosen="ACDEFG", rejected="ACDEFA")
    bad = [{**good, **change} for change, _ in BAD_ROWS]
    rows = [good, *bad, *bad, row("a.pdb", "KLMN", "KLMK", chain_id="B")]
    lines = refused(tmp_path, rows).split("\n  ")
    assert lines[0] == "26 bad pairs; --skip_bad_data leaves such rows out:"
    assert re.search("and 6 more", lines[-1])
    for number, (_, text) in enumerate(BAD_ROWS, start=1):
        assert re.search(f"pairs.json: index {number}: .*{text}", lines[number])

    data = load(tmp_path, rows, skip_bad_data=True)
    assert data.name == ["a:0", "a:27"]
    assert "26 rows are left out" in caplog.text
    text = refused(tmp_path, bad[:3], skip_bad_data=True)
    assert re.search(f"no pairs; .*\n  .*index 0: .*{BAD_ROWS[0][1]}", text)
    text = refused(tmp_path, [good], max_length=5)
    assert "6 residues; expected at most --max_length 5" in text
    assert len(load(tmp_path, [good], max_length=6).name) == 1


def test_what_is_read_is_said(tmp_path, caplog):
    """Once for each kind, with a count and an example: residues read as X, left out, not whole. A
    standard residue as HETATM is left out, and nothing else is said of it."""
    text = residue("CYS", 5, record="HETATM") + residue("SEP", 6) + residue("SEP", 7)
    (tmp_path / "a.pdb").write_text(FOUR + text + residue("LYS", 8, atoms="N CA C"))
    sequences = [f"ACD{letter}XXK" for letter in "EWYW"]
    rows = [row("a.pdb", sequences[0], text) for text in sequences[1:]]
    load(tmp_path, rows)
    assert caplog.messages == [
        "1 residues are HETATM, and left out (as ATOM they would be read), such as a.pdb A5 CYS",
        "2 residues of unknown names are read as X, such as a.pdb A6 SEP",
        "1 residues lack one of N, CA, C and O, and are not designed, such as a.pdb A8 LYS",
    ]


def test_sequences_in_another_order_of_the_chains(tmp_path, caplog):
    """They have the right length. Designs of a third of the residues are none of these."""
    chains = {"A": "ACDEFGHIKL" * 2, "B": "MNPQRSTVWYMN"}
    write_pdb(tmp_path / "a.pdb", chains)
    design = {"design_chains": ["A", "B"]}
    swapped = chains["B"] + chains["A"]
    rows = [row("a.pdb", swapped[:-1] + letter, swapped, **design) for letter in "WY"]
    load(tmp_path, rows)
    (said,) = caplog.messages
    assert re.search("pairs.json: index 0: [0-9]% of the letters are those of the struct", said)
    assert said.endswith("as in the order B, A of the chains: 97%")
    caplog.clear()
    load(tmp_path, [row("a.pdb", "W" * 32, "W" * 31 + "Y", **design)])
    assert caplog.messages[0].endswith("of the structure; expected 30 % or more")
    caplog.clear()
    right = chains["A"] + "W" * 12
    load(tmp_path, [row("a.pdb", right, right[:-1] + "Y", **design)])
    assert caplog.messages == []


def test_files_that_differ_in_names_or_numbers_alone(tmp_path):
    """Not one backbone: the chains are exchanged, or there is a gap. But one group of the split."""
    two = residue("ALA", 1) + residue("CYS", 2)
    other = residue("ASP", 1, "B") + residue("GLU", 2, "B")
    (tmp_path / "a.pdb").write_text(two + "TER\n" + other)
    lines = []
    for line in (two + "TER\n" + other).splitlines():
        name = {"A": "B", "B": "A"}.get(line[21:22], "")
        lines.append(line[:21] + name + line[22:])
    (tmp_path / "b.pdb").write_text("\n".join(lines) + "\n")
    gap = two.replace("CYS A   2", "CYS A 102")
    (tmp_path / "c.pdb").write_text(gap + "TER\n" + other)
    rows = [row(f"{file}.pdb", "AC", "AW", chain_id="A") for file in "abc"]
    rows[1].update(preferred_seq="DE", unpreferred_seq="DW")
    data = load(tmp_path, rows)
    atoms = [data.atoms[i] for i in data.backbone]
    assert not torch.equal(atoms[0], atoms[1])
    assert torch.equal(atoms[0], atoms[2])
    numbers = [data.numbers[i][:, 0].diff().tolist() for i in data.backbone]
    assert numbers == [[1], [1], [101]]
    assert len(set(data.group)) == 1


def test_forms_of_the_data_file(tmp_path):
    """An array, untidy lines; null is no value, nor is an empty list; paths are relative to it."""
    (tmp_path / "deep").mkdir()
    write_pdb(tmp_path / "deep" / "a.pdb", {"A": "ACDEFG"})
    rows = [row("deep/a.pdb", "ACDEFG", "ACDEFA", comment=5, chain_id=None, mutable_positions=[])]
    rows.append(row(str(tmp_path / "deep" / "a.pdb"), "acdefg", "CCDEFG", description="x"))
    lines = [json.dumps(one) for one in rows]
    untidy = "\ufeff\n" + "\r\n\n".join(lines) + "\n \n"
    for text in (json.dumps(rows, indent=2), untidy):
        data = load(tmp_path, text)
        assert texts_of(data, 0) == ["ACDEFG", "ACDEFA"]
        assert texts_of(data, 1) == ["ACDEFG", "CCDEFG"]
        assert data.designed[0].all()

    wanted = "expected a JSON array, or an object per line, in UTF-8"
    assert wanted in refused(tmp_path, "[{")
    assert wanted in refused(tmp_path, "pdb_file,preferred_seq\na.pdb,ACD\n")
    assert wanted in refused(tmp_path, json.dumps({"pairs": rows}, indent=2))
    assert "pairs.json: no pairs" in refused(tmp_path, "")
    assert "line 2: Expecting" in refused(tmp_path, f"{lines[0]}\n{{'pdb_file'}}\n{lines[1]}")
    assert "index 0: 5; expected an object" in refused(tmp_path, "[5]")


def test_chains_and_positions(tmp_path):
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
        assert "".join(np.where(data.designed[i], "X", ".")) == designed
    assert data.backbone == [0, 0, 0, 1, 2]  # with the fixed chain, and without
    number, chain = data.numbers[0].T.tolist()
    assert number == [0, 2, 3, 0, 1, 2, 4, 5, 0, 1, 2, 3]  # the gap of A4 counts
    assert chain == [0] * 3 + [1] * 5 + [2] * 4


def some_rows(folder, count, pairs):
    """Rows for structures of 5 to 31 residues."""
    write_structures(folder, count, pairs, least=5, most=31)
    return json.loads((folder / "pairs.json").read_text())


def test_batches_against_each_structure(tmp_path):
    """In any order and with repeats, a batch holds what was read of each structure."""
    data = load(tmp_path, some_rows(tmp_path, 4, pairs=3))
    whole = np.array([7, 11, 0, 4, 4, 10, 6, 1])
    own = np.arange(1, 7)
    batch = data[5, whole, own]
    assert batch.share == 1 / 8
    first = 0
    for number, i in enumerate(whole[own]):
        mine = batch.pair == number
        backbone = data.backbone[i]
        assert torch.equal(batch.letters[:, mine].T, data.letters[i].long())
        assert torch.equal(batch.designed[mine] == 1, data.designed[i])
        assert batch.counts[number] == data.designed[i].sum()
        places = script.decode_places(data.designed[i], [42, 5, i + 1])
        assert torch.equal(batch.decode_place[mine], places)
        assert torch.equal(batch.atoms[mine], data.atoms[backbone])
        assert torch.equal(batch.numbers[mine], data.numbers[backbone])
        # nobody has neighbours elsewhere
        neighbours = batch.neighbours[mine]
        inside = torch.where(neighbours < 0, -1, neighbours - first)
        assert torch.equal(inside, data.neighbours[backbone][:, : inside.shape[1]])
        first += len(neighbours)
    assert batch.neighbours.shape[1] == 8


def test_decoding_orders():
    """The context comes first; orders are uniform, those of the context, too. Each step has its
    own, and each validation the same."""
    designed = torch.zeros(30, dtype=bool)
    designed[5:25] = True
    ranks = np.array([script.decode_places(designed, [number]) for number in range(400)])
    assert (np.sort(ranks, axis=1) == np.arange(30)).all()
    fixed = ranks[:, ~designed.numpy()]
    assert fixed.max() == 9
    assert np.abs(fixed.mean(0) - 4.5).max() < 5 * (10**2 / 12 / 400) ** 0.5
    others = ranks[:, designed.numpy()]
    assert np.abs(others.mean(0) - 19.5).max() < 5 * (20**2 / 12 / 400) ** 0.5
    assert np.array_equal(script.decode_places(designed, [7]), ranks[7])


def test_orders_of_steps_and_validations(tmp_path):
    data = load(tmp_path, some_rows(tmp_path, 2, pairs=2))
    ids = np.array([0])
    steps = [data[step, ids, ids].decode_place.tolist() for step in (3, 4, 3)]
    assert steps[0] == steps[2] != steps[1]
    one, other = [data.batch(ids, total).decode_place.tolist() for total in (1, 2)]
    assert one == other != steps[0]


def test_work_is_done_once(tmp_path):
    """Each structure is read once, and not again while nothing has changed."""
    rows = some_rows(tmp_path, 2, pairs=2)
    with mock.patch.object(script, "read_structure", wraps=script.read_structure) as readings:
        data = load(tmp_path, rows)
        assert load(tmp_path, rows).hash == data.hash
    assert readings.call_count == 2
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
    # homologous chains in one cluster, whose name may be a number, also 0
    for name in ("family {}".format, int):
        rows = [{**one, "cluster": name(i // 8)} for i, one in enumerate(rows[:24])]
        assert load(tmp_path, rows).group.tolist() == np.repeat([0, 1, 2], 8).tolist()


def test_a_structure_is_in_one_cluster(tmp_path):
    rows = some_rows(tmp_path, 2, pairs=2)
    rows[1]["cluster"] = rows[2]["cluster"] = rows[3]["cluster"] = "x"
    said = refused(tmp_path, rows)
    assert "index 1: pairs before on this structure have another cluster, or none" in said
    assert "1 bad pairs" in said


def test_validation_data(tmp_path, caplog):
    """Of structures that are trained on: a warning. Pairs that are trained on: refused."""
    rows = some_rows(tmp_path, 2, pairs=3)
    val_data = str(tmp_path / "val.json")
    (tmp_path / "val.json").write_text(json.dumps(rows[3:]))
    data = load(tmp_path, rows[:3], val_data=val_data)
    data.split()
    assert (data.train_ids.tolist(), data.valid_ids.tolist()) == ([0, 1, 2], [3, 4, 5])
    text = "structures or clusters are in --val_data and in --train_data, too"
    assert text not in caplog.text
    (tmp_path / "val.json").write_text(json.dumps(rows[4:]))
    load(tmp_path, rows[:4], val_data=val_data).split()
    assert f"1 {text}" in caplog.text
    (tmp_path / "val.json").write_text(json.dumps([{**rows[3], "chain_id": "A"}, rows[5]]))
    said = refused(tmp_path, rows[:4], val_data=val_data)
    assert "val.json: index 0: this pair is in --train_data, too; expected others" in said
    assert "1 bad pairs" in said


def test_shipped_data(tmp_path, caplog):
    """Entries of the PDB with selenomethionines as HETATM, gaps, insertion codes, disorder."""
    folder = ROOT / "data" / "dpo"
    rows = json.loads((folder / "pairs.json").read_text())
    natives = {row["pdb_file"][:4]: row["preferred_seq"] for row in rows}
    assert natives["1EJG"] == "TTCCPSIVARSNFNVCRLPGTPEALCATYTGCIIIPGATCPGDYAN"  # crambin
    assert natives["1A8O"].count("M") == 4

    data = load(tmp_path, [{**row, "pdb_file": f"{folder}/{row['pdb_file']}"} for row in rows])
    assert len(data.name) == 12 * 13
    assert caplog.messages == []
    atoms = data.atoms[data.backbone[data.name.index("1UBI_A:72")]]
    steps = atoms[:, 1].diff(dim=0).norm(dim=1)
    assert steps.tolist() == pytest.approx([3.8] * 75, abs=0.15)
