"""The data of run_dpo_ddp.py: structures, pairs, batches, what is held out; the entries shipped."""

import collections
import gzip
import json
import re
from argparse import Namespace

import gemmi
import numpy as np
import pytest
import torch
from helpers import ATOMS, ROOT, check_refused, parse_arguments, write_structures

import run_dpo_ddp as script

pytestmark = pytest.mark.usefixtures("group")  # of one rank
LETTERS = "ACDEFGHIKLMNPQRSTVWYX"
NAMES = dict(zip(LETTERS, [*script.RESIDUE_NAMES, "UNK"], strict=True))


def place(chain, number):
    """Where CA is: chains are lines, side by side."""
    return np.array([9.0 * (ord(chain) - 65), 0.0, 3.8 * number])


def residue(name, number, chain="A", atoms="N CA C O", **more):
    """PDB records of a residue; `shift` moves it along x."""
    start = f"{more.get('record', 'ATOM'):<6}{10 * number:5d}"
    end = f"{more.get('alternative', ' ')}{name:>3} {chain}{number:4d}{more.get('code', ' ')}"
    lines = []
    for atom in atoms.split():
        offset = np.array(ATOMS.get(atom, (2, 2, 2))) + [more.get("shift", 0.0), 0, 0]
        x, y, z = place(chain, number) + offset
        where = f"{x:8.3f}{y:8.3f}{z:8.3f}"
        lines.append(f"{start}  {atom:<3}{end}   {where}  1.00  0.00          {atom[0]:>2}\n")
    return "".join(lines)


def write_pdb(path, chains):
    """A PDB file of chains with these letters; '-' is a gap, a small letter lacks its O."""
    text = ""
    for chain, letters in chains.items():
        for number, letter in enumerate(letters, start=1):
            if letter != "-":
                atoms = "N CA C" if letter.islower() else "N CA C O"
                text += residue(NAMES[letter.upper()], number, chain, atoms)
        text += "TER\n"
    path.write_text(text + "END\n")


def row(file="a.pdb", chosen="", rejected="", **more):
    return {"pdb_file": file, "preferred_seq": chosen, "unpreferred_seq": rejected, **more}


def load(folder, rows, *options):
    """The pairs of a data file that holds `rows`, or this text."""
    path = folder / "pairs.json"
    path.write_text(rows if isinstance(rows, str) else json.dumps(rows))
    words = [f"--train_data={path}", f"--cache_dir={folder}/cache", *options]
    args = parse_arguments(script, *words)
    return script.Pairs(script.prepare(args, k=16), args)


def refused(folder, rows, *options):
    with pytest.raises(script.InputError) as caught:
        load(folder, rows, *options)
    return str(caught.value)


def letters_of(ids):
    return "".join(LETTERS[i] for i in ids)


def texts_of(data, number):
    """Both sequences of a pair, and its context."""
    return [letters_of(letters) for letters in data.letters[number].T]


OTHER_NAMES = "MSE HIE HID HIP HSD HSE HSP CYX CYM ASH GLH LYN".split()  # of MD programs, too
ZOO = [
    "MODEL        1\n",
    residue("MET", 1, "W", record="HETATM", atoms="O"),  # a chain of water
    residue("DA", 1, "D", atoms="P C4 N1"),  # and one of DNA
    residue("ALA", 1, alternative="A"),
    residue("ALA", 1, alternative="B", shift=5),
    residue("GLY", 2),
    residue("GLY", 2, code="A", shift=1),
    residue("MSE", 3, record="HETATM"),
    residue("SER", 4, alternative="B", shift=3),  # two residues in one place
    residue("THR", 4, alternative="A"),
    residue("LYS", 5, atoms="N CA C CB"),  # no O
    residue("TRP", 9, atoms="CA CB"),  # after a gap
    residue("SEP", 10),
    residue("CYS", 11, record="HETATM"),
    residue("SEP", 12, record="HETATM"),
    residue("NH2", 13, atoms="N"),  # the end of a chain, no residue
    residue("HOH", 14, record="HETATM", atoms="O"),
    "TER\n",
    *[residue(name, number, "B") for number, name in enumerate(OTHER_NAMES, start=-1)],
    "TER\n",
    residue("ALA", 1, "C", atoms="CA"),
    "TER\n",
    "ENDMDL\nMODEL        2\n",
    residue("VAL", 99),
    "ENDMDL\nEND\n",
]


def test_structure_zoo(tmp_path, caplog):
    """As PDB and mmCIF, in which chains have other names, plain and gz. What is odd is said."""
    caplog.set_level("WARNING")
    parsed = gemmi.read_pdb_string("".join(ZOO))
    parsed.setup_entities()
    texts = {"pdb": "".join(ZOO), "cif": parsed.make_mmcif_document().as_string()}
    for name, text in texts.items():
        (tmp_path / f"zoo.{name}").write_text(text)
        (tmp_path / f"zoo.{name}.gz").write_bytes(gzip.compress(text.encode()))

    digests = set()
    for path in tmp_path.iterdir():
        chains, digest = script.read_structure(str(path), collections.defaultdict(list))
        digests.add(digest)
        letters = {name: letters_of(chain.letters) for name, chain in chains.items()}
        assert letters == {"A": "AGGMSKWX", "B": "MHHHHHHCCDEK", "C": "A"}
        chain = chains["A"]
        assert chain.residue_index.tolist() == [0, 1, 2, 3, 4, 5, 9, 10]  # a gap, an insertion code
        assert chain.labels.tolist() == "A1 A2 A2A A3 A4 A5 A9 A10".split()
        assert chains["B"].residue_index.tolist() == list(range(12))
        missing = np.isnan(chain.coords).any(axis=(1, 2))
        assert missing.tolist() == [False] * 5 + [True, True, False]
        assert np.isnan(chain.coords[5]).all(1).tolist() == [False, False, False, True]
        # the first alternative that occurs, whatever its letter
        for i, (number, shift) in enumerate([(1, 0), (2, 0), (2, 1), (3, 0), (4, 3)]):
            assert chain.coords[i, 1] == pytest.approx(place("A", number) + [shift, 0, 0], abs=2e-3)
    assert len(digests) == 1  # one structure, however it is written

    load(tmp_path, [row("zoo.pdb", "AGGMSKWX", letter + "GGMSKWX") for letter in "CD"])
    first = f"{tmp_path}/pairs.json: index 0"
    assert caplog.messages == [
        "3 residues are HETATM, and left out (as ATOM they would be read), such as zoo.pdb W1 MET",
        "3 residues lack one of N, CA, C and O, and are not designed, such as zoo.pdb A5 LYS",
        "1 residues of unknown names are read as X, such as zoo.pdb A10 SEP",
        f"2 pairs do not see all chains of their file, see fixed_chains, such as {first}",
    ]


# ---- Pairs ---------------------------------------------------------------------------------------

BAD_ROWS = [  # a row with this change, and what is said of it
    ({"pdb_file": "gone.pdb"}, "/gone.pdb: .*No such file.*; expected a PDB or mmCIF file"),
    ({"pdb_file": "cut.pdb.gz"}, "/cut.pdb.gz: .*; expected a PDB or mmCIF file"),
    ({"pdb_file": "het.pdb"}, "/het.pdb: no amino acids as ATOM, with a CA; expected a PDB"),
    ({"chain_id": "Q"}, "chain Q; expected one of A B C"),
    ({"fixed_chains": ["A"]}, "chain A is named twice"),
    ({"chain_id": "A", "design_chains": ["B"]}, "chain_id A and design_chains B: give one"),
    ({"chain_id": "C", "preferred_seq": "A" * 7}, "7 residues; expected at most --max_length 6"),
    ({"preferred_seq": "ACD"}, r"3 letters; expected 6, .* design_chains A \(A has 6, .*: ACDEFG"),
    ({"preferred_seq": "ACD/EFG"}, "has '/' at 3; expected letters of .*, none for residues"),
    ({"preferred_seq": None}, "missing .* 'preferred_seq'"),
    ({"unpreferred_seq": ["A"] * 6}, r"unpreferred_seq is \['A', .*\]; expected <class"),
    ({"mutable_positions": [0]}, "the sequences do not differ at residues that are mutable"),
    ({"unpreferred_seq": "XCDEFA"}, "differ at residue 0, which is X, or not mutable"),
    ({"mutable_positions": [6]}, "mutable residues 6 to 6; expected 0 to 5, or such as A1"),
    ({"weight": -1}, "weight -1, margin 0.0; expected 0 or more"),
]


def test_all_problems_are_listed_at_once(tmp_path, caplog):
    write_pdb(tmp_path / "a.pdb", {"A": "ACDEFG", "B": "KLMN", "C": "ACDEFGH"})
    good = row(chosen="ACDEFG", rejected="ACDEFA")
    bad = [{**good, **change} for change, _ in BAD_ROWS]
    bad[6]["unpreferred_seq"] = "C" * 7
    (tmp_path / "cut.pdb.gz").write_bytes(gzip.compress("".join(ZOO).encode())[:-20])
    (tmp_path / "het.pdb").write_text(residue("CYS", 1, record="HETATM"))
    rows = [good, *bad, *bad, row("a.pdb", "KLMN", "KLMK", chain_id="B")]
    lines = refused(tmp_path, rows, "--max_length=6").split("\n  ")
    assert lines[0] == "30 bad pairs; --skip_bad_data leaves them out:"
    assert re.search("index 20: ", lines[-1])
    for number, (_, text) in enumerate(BAD_ROWS, start=1):
        assert re.search(f"pairs.json: index {number}: .*{text}", lines[number])

    data = load(tmp_path, rows, "--skip_bad_data", "--max_length=6")
    assert data.name == ["a:0", "a:31"]
    assert "30 bad pairs are left out" in caplog.text
    assert "pairs.json: no pairs; see --help\n" in refused(tmp_path, bad[:3], "--skip_bad_data")


def test_files_that_differ_in_names_or_numbers_alone(tmp_path):
    """Not one backbone: the chains are exchanged, or there is a gap. But one group of the split."""
    write_pdb(tmp_path / "a.pdb", {"A": "AC", "B": "DE"})
    text = (tmp_path / "a.pdb").read_text()
    swapped = text.replace(" A  ", " x  ").replace(" B  ", " A  ").replace(" x  ", " B  ")
    (tmp_path / "b.pdb").write_text(swapped)
    (tmp_path / "c.pdb").write_text(text.replace("CYS A   2", "CYS A 102"))
    write_pdb(tmp_path / "d.pdb", {"A": "ACD"})
    sequences = {"a": ["AC", "AW"], "b": ["DE", "DW"], "c": ["AC", "AW"], "d": ["ACD", "AWD"]}
    rows = [row(f"{name}.pdb", *texts, chain_id="A") for name, texts in sequences.items()]
    data = load(tmp_path, rows)
    atoms = [data.atoms[i] for i in data.backbone]
    assert not torch.equal(atoms[0], atoms[1])
    assert torch.equal(atoms[0], atoms[2])
    numbers = [data.residue_index[i].diff().tolist() for i in data.backbone]
    assert numbers == [[1], [1], [101], [1, 1]]
    assert data.group.tolist() == [0, 0, 0, 1]


def test_forms_of_the_data_file(tmp_path):
    """An array, untidy lines; null is no value, nor is an empty list; paths are relative to it."""
    (tmp_path / "deep").mkdir()
    write_pdb(tmp_path / "deep" / "a.pdb", {"A": "ACDEFG"})
    more = {"comment": 5, "id": "x", "chain_id": None, "mutable_positions": []}
    line = json.dumps(row("deep/a.pdb", "acdefg", "CCDEFG", **more))
    for text in (f"[{line},\n{line}]", f"\ufeff\n{line}\r\n\n{line}\n \n"):
        data = load(tmp_path, text)
        assert [texts_of(data, i) for i in (0, 1)] == [["ACDEFG", "CCDEFG"]] * 2
        assert data.designed[0].all()

    refusals = {
        "": "pairs.json: no pairs",
        f"{line}\n{{'pdb_file'}}\n{line}": "line 2: Expecting",
        "[5]": "index 0: 5; expected an object",
    }
    for text, said in refusals.items():
        assert said in refused(tmp_path, text)


def test_chains_and_positions(tmp_path, caplog):
    """Design chains in the order given, then fixed ones. Sequences in another order are named."""
    write_pdb(tmp_path / "a.pdb", {"A": "ACD-FG", "B": "KlMN", "C": "WWYY"})
    both = {"mutable_positions": ["B3"], "mutable_ranges": [[3, "A1"], [6, 6]]}
    cases = [  # change, preferred and unpreferred sequence, what is designed
        ({}, "RRRSSSSSWWYY", "TRTSSSSTWWYY", "XXXXXXXX...."),
        (both, "RRXSSSSSWWYY", "RRXTSTSSWWYY", ".X.X.X......"),
        ({"fixed_chains": []}, "RRRSSSSS", "TTTSSSST", "XXXXXXXX"),
    ]
    rows = []
    for change, chosen, rejected, _ in cases:
        chains = {"design_chains": ["B", "A"], "fixed_chains": ["C"]}
        texts = [f"{text[0]}A{text[1:8]}" for text in (chosen, rejected)]  # A: not resolved
        rows.append(row("a.pdb", *texts, **{**chains, **change}))
    rows.append(row("a.pdb", "ACWWW", "ACWWA"))
    data = load(tmp_path, rows)
    text = "3 sequences may be of other chains, .* such as .*: index 0: 0% of the letters are those"
    assert re.search(text, caplog.text)
    for i, (_, chosen, rejected, designed) in enumerate(cases):
        assert texts_of(data, i) == [chosen, rejected]
        assert "".join(np.where(data.designed[i], "X", ".")) == designed
    assert data.backbone == [0, 0, 1, 2]  # with the fixed chain, and without
    numbers = [0, 2, 3, 0, 1, 2, 4, 5, 0, 1, 2, 3]  # the gap of A4 counts
    assert data.residue_index[0].tolist() == numbers
    assert data.chain_index[0].tolist() == [0] * 3 + [1] * 5 + [2] * 4


def some_rows(folder, count, pairs):
    """Rows for structures of 5 to 31 residues."""
    write_structures(folder, count, pairs, least=5, most=31)
    return json.loads((folder / "pairs.json").read_text())


def test_batches_against_each_structure(tmp_path):
    """In any order, with repeats; the network says of each structure what it says of it alone."""
    pairs = some_rows(tmp_path, 4, pairs=3)
    pairs = [{**one, "weight": i, "margin": i / 2} for i, one in enumerate(pairs)]
    data = load(tmp_path, pairs)
    whole = np.array([7, 11, 0, 4, 4, 10, 6, 1])
    own = np.arange(1, 7)
    batch = data[5, whole, own]
    model = script.ProteinMPNN().requires_grad_(False)
    together = model(batch)
    backbones = {data.backbone[i] for i in whole[own]}
    assert len(batch.atoms) == sum(len(data.atoms[i]) for i in backbones)
    for number, i in enumerate(whole[own]):
        mine = batch.pair == number
        backbone = data.backbone[i]
        assert torch.equal(batch.letters[:, mine].T, data.letters[i].long())
        assert torch.equal(batch.designed[mine] == 1, data.designed[i])
        assert batch.counts[number] == data.designed[i].sum()
        assert batch.weight[number] == i
        assert batch.margin[number] == i / 2
        ranks = script.decode_ranks(data.designed[i], [42, 5, i + 1])
        assert torch.equal(batch.decode_rank[mine], ranks)
        rows = batch.source[mine]
        assert torch.equal(batch.atoms[rows], data.atoms[backbone])
        assert torch.equal(batch.residue_index[rows], data.residue_index[backbone])
        assert torch.equal(batch.chain_index[rows], data.chain_index[backbone])
        alone = model(data[5, whole, own[number : number + 1]])
        assert (together[:, mine] - alone).abs().max() < 5e-5
    assert batch.neighbors.shape[1] == 16
    assert (batch.neighbors < 0).any()


def test_decoding_orders():
    """The context comes first; orders of what is designed are uniform."""
    designed = torch.arange(30) >= 10
    ranks = np.array([script.decode_ranks(designed, [number]) for number in range(400)])
    assert (np.sort(ranks, axis=1) == np.arange(30)).all()
    assert (ranks[:, :10] < 10).all()
    assert np.abs(ranks[:, 10:].mean(0) - 19.5).max() < 5 * (20**2 / 12 / 400) ** 0.5


def test_a_structure_that_has_changed_is_read_again(tmp_path):
    rows = some_rows(tmp_path, 2, pairs=2)
    data = load(tmp_path, rows)
    path = tmp_path / "helix1.pdb"
    path.write_text(path.read_text().replace("   0.1", "   0.2"))
    assert load(tmp_path, rows).hash != data.hash


# ---- Held out ------------------------------------------------------------------------------------


def hold_out(sizes, fraction):
    """Sizes of the groups that are held out, of groups of these sizes, and which they are."""
    group = np.repeat(np.arange(len(sizes)), sizes)
    args = Namespace(val_data=None, val_fraction=fraction)
    data = Namespace(args=args, group=group, is_valid=np.zeros(len(group), bool))
    script.Pairs.split(data)
    assert sorted([*data.train_ids, *data.valid_ids]) == list(range(len(group)))
    held = np.unique(group[data.valid_ids])
    assert not set(held) & set(group[data.train_ids])
    return [sizes[number] for number in held], held.tolist()


def test_share_held_out():
    assert hold_out([1] * 414, 0.1)[0] == [1] * 42, "the document's 372 and 42"
    # one large structure is no reason for half of the data
    assert hold_out([500, *[5] * 100], 0.1)[0] == [5] * 20
    assert hold_out([60, 50, 70], 0.1)[0] == [50], "all are too large"
    assert hold_out([3] * 50, 0.2)[1] != list(range(10)), "not in random order"


def test_one_structure_is_split_by_sequence(tmp_path, caplog):
    """Pairs that share a sequence, directly or by others, stay together."""
    caplog.set_level("INFO")
    write_pdb(tmp_path / "a.pdb", {"A": "ACDEFG"})
    sequences = ["ACDEF" + letter for letter in LETTERS[:20]]
    links = [(0, 1), (2, 3), (4, 5), (6, 7), (1, 8), (9, 10), (8, 2), (11, 5)]
    rows = [row("a.pdb", sequences[a], sequences[b], note=1) for a, b in links]
    data = load(tmp_path, [*rows, row("a.pdb", sequences[7], sequences[6], id=2, note=0)])
    assert data.group.tolist() == [0, 0, 1, 2, 0, 3, 0, 1, 2]
    assert "9 rows have a field 'note', which is not read, such as" in caplog.text
    text = "1 pairs say the opposite of another one, such as .*: index 8 and .*: index 3$"
    assert re.search(text, caplog.text, re.MULTILINE)
    data.split()
    assert data.valid_ids.tolist() == [5] and "held out by their sequences" in caplog.text
    check_refused("linked by shared sequences: give --val_data", load(tmp_path, rows[:1] * 3).split)


def test_split_by_structure_and_cluster(tmp_path):
    rows = some_rows(tmp_path, 6, pairs=4)
    packed = gzip.compress((tmp_path / "helix0.pdb").read_bytes())
    (tmp_path / "copy.pdb.gz").write_bytes(packed)
    rows.append({**rows[0], "pdb_file": "copy.pdb.gz"})  # a copy of a file is the same structure
    group = load(tmp_path, rows).group
    assert group[24] == group[0]
    assert len(set(group)) == 6
    # homologous chains in one cluster, whose name may be a number, also 0
    rows = [{**one, "cluster": i // 8} for i, one in enumerate(rows[:24])]
    assert load(tmp_path, rows).group.tolist() == np.repeat([0, 1, 2], 8).tolist()
    rows[1]["cluster"] = "x"
    said = refused(tmp_path, rows)
    assert "1 bad pairs" in said
    assert "index 1: pairs before on this structure have another cluster, or none" in said


def test_validation_data(tmp_path, caplog):
    """Of structures that are trained on: a warning. Pairs that are trained on: refused."""
    rows = some_rows(tmp_path, 2, pairs=3)
    path = tmp_path / "val.json"
    text = "1 structures or clusters are in --val_data and in --train_data, too: "
    for first, warnings in {3: 0, 4: 1}.items():
        path.write_text(json.dumps(rows[first:]))
        data = load(tmp_path, rows[:first], f"--val_data={path}")
        data.split()
        assert data.train_ids.tolist() == list(range(first))
        assert data.valid_ids.tolist() == list(range(first, 6))
        assert caplog.text.count(text) == len(caplog.messages) == warnings
    path.write_text(json.dumps([{**rows[3], "chain_id": "A"}, rows[5]]))
    said = refused(tmp_path, rows[:4], f"--val_data={path}")
    assert "val.json: index 0: this pair is in --train_data, too; expected others" in said
    assert "1 bad pairs" in said


def test_shipped_data(tmp_path, caplog):
    """Entries of the PDB with selenomethionines as HETATM, gaps, insertion codes, disorder."""
    folder = ROOT / "data" / "dpo"
    rows = json.loads((folder / "pairs.json").read_text())
    data = load(tmp_path, [{**row, "pdb_file": f"{folder}/{row['pdb_file']}"} for row in rows])
    assert len(data.name) == 12 * 13
    assert caplog.messages == []
