"""The data of run_dpo_ddp.py: structures, pairs, batches, what is held out; the entries shipped."""

import contextlib
import gzip
import importlib
import json
import random
import re
from argparse import Namespace
from types import SimpleNamespace

import gemmi
import numpy as np
import pytest
import torch
from helpers import ROOT, mutated_pairs

script = importlib.import_module("run_dpo_ddp")
LETTERS = "ACDEFGHIKLMNPQRSTVWYX"
NAMES = dict(zip(LETTERS, [*script.RESIDUES, "UNK"], strict=True))
ATOMS = {"N": (-1.2, 0.5, -0.4), "CA": (0, 0, 0), "C": (1.1, 0.6, 0.7), "O": (1.5, 1.7, 0.8)}


def place(chain, number):
    """Where CA is: a coil along z, chains side by side."""
    turn = 1.745 * number
    x = 2.3 * np.cos(turn) + 9.0 * (ord(chain) - 65)
    return np.array([x, 2.3 * np.sin(turn), 1.5 * number])


def residue(name, number, chain="A", **more):
    """PDB records of a residue; `shift` moves it along x."""
    record = more.get("record", "ATOM")
    code = more.get("code", " ")
    alternative = more.get("alternative", " ")
    shift = more.get("shift", 0.0)
    lines = []
    for serial, atom in enumerate(more.get("atoms", "N CA C O").split(), start=10 * number):
        x, y, z = place(chain, number) + ATOMS.get(atom, (2, 2, 2)) + np.array([shift, 0, 0])
        lines.append(
            f"{record:<6}{serial:5d}  {atom:<3}{alternative}{name:>3} {chain}{number:4d}{code}   "
            f"{x:8.3f}{y:8.3f}{z:8.3f}  1.00  0.00          {atom[0]:>2}\n"
        )
    return "".join(lines)


def write_pdb(path, chains, first=1):
    """A PDB file of chains with these letters; '-' is a gap."""
    text = ""
    for chain, letters in chains.items():
        for i, letter in enumerate(letters):
            if letter != "-":
                text += residue(NAMES[letter], first + i, chain)
        text += "TER\n"
    path.write_text(text + "END\n")


def row(file="a.pdb", chosen="", rejected="", **more):
    return {"pdb_file": file, "preferred_seq": chosen, "unpreferred_seq": rejected, **more}


@contextlib.contextmanager
def one_rank():
    """What asks the process group works without one."""

    def gather(parts, mine):
        parts[0] = mine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "on_rank0", lambda function, *args: function(*args))
        patch.setattr(script.dist, "get_rank", lambda: 0)
        patch.setattr(script.dist, "get_world_size", lambda: 1)
        patch.setattr(script.dist, "all_gather_object", gather)
        yield


def load(folder, rows, **options):
    """The pairs of a data file that holds `rows`, or this text, as one rank reads it."""
    path = folder / "pairs.json"
    path.write_text(rows if isinstance(rows, str) else json.dumps(rows))
    names = {"train_data": str(path), "val_data": None, "max_length": 500, "skip_bad_data": False}
    names.update({"seed": 42, "num_workers": 0, **options})
    with one_rank():
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


def zoo_files(folder):
    """ZOO as PDB and mmCIF, plain and gz. In mmCIF the names of chains differ from the author's."""
    (folder / "zoo.pdb").write_text(ZOO)
    structure = gemmi.read_pdb_string(ZOO)
    structure.setup_entities()
    (folder / "zoo.cif").write_text(structure.make_mmcif_document().as_string())
    for name in ("zoo.pdb", "zoo.cif"):
        (folder / f"{name}.gz").write_bytes(gzip.compress((folder / name).read_bytes()))
    return [folder / name for name in ("zoo.pdb", "zoo.cif", "zoo.pdb.gz", "zoo.cif.gz")]


def test_structure_zoo(tmp_path):
    for path in zoo_files(tmp_path):
        structure = script.read_structure(path)
        letters = {name: letters_of(chain.letters) for name, chain in structure.chains.items()}
        assert letters == {"A": "AGGGMSKWX", "B": "YYY", "C": "A"}
        a, b = structure.chains["A"], structure.chains["B"]
        assert a.numbers.tolist() == [1, 2, 3, 4, 5, 6, 7, 11, 12]
        assert b.numbers.tolist() == [-1, 0, 1]
        assert a.whole().tolist() == [True] * 6 + [False, False, True]
        shifts = [0, 0, 1, 2, 0, 3]  # the first alternative that occurs, whatever its letter
        for i, (number, shift) in enumerate(zip([1, 2, 2, 2, 3, 4], shifts, strict=True)):
            assert a.coords[i, 1] == pytest.approx(place("A", number) + [shift, 0, 0], abs=2e-3)
        assert np.isnan(a.coords[6]).all(1).tolist() == [False, False, False, True]
        # the modified residue that is a HETATM is left out, and not without a word
        for note, number in zip(structure.notes, [4, 11], strict=True):
            assert f"residue A{number} SEP is left out: it is a HETATM" in note


def test_structures_that_are_refused(tmp_path):
    water = residue("HOH", 1, record="HETATM") + residue("DA", 1, "D", atoms="P")
    (tmp_path / "water.pdb").write_text(water + "END\n")
    noise = random.Random(0).randbytes(9999).hex().encode()
    (tmp_path / "short.pdb.gz").write_bytes(gzip.compress(noise)[:5000])
    (tmp_path / "broken.cif").write_text("data_x\nloop_\n_atom_site.id\n_atom_site.Cartn_x\n1\n")
    # two that once gave an error without a reason
    (tmp_path / "nothing.cif").write_text("data_x\n_cell.length_a 3\n")
    (tmp_path / "empty.cif").write_text("")
    # formats that are none of the two
    (tmp_path / "binary.bcif").write_bytes(b"\x83\xa7encoder\0" * 9)
    (tmp_path / "xml.xml").write_text("<?xml version='1.0'?><PDBx:datablock/>")
    twice = residue("ALA", 7, "B") + "TER\n" + residue("GLY", 7, "B") + "END\n"
    (tmp_path / "twice.pdb").write_text(twice)  # two chains of one name
    expected = {
        "gone.pdb": "No such file",
        "twice.pdb": "residue B7 GLY has two atoms N; expected one",
        "water.pdb": "no protein residues",
        "short.pdb.gz": r"\w+",
        "broken.cif": "Wrong number of values in loop",
        "nothing.cif": "no protein residues",
        "empty.cif": r"\w+",
        "binary.bcif": "format not supported",
        "xml.xml": "format not supported",
    }
    for name, text in expected.items():
        hint = "expected a protein structure in PDB or mmCIF format"
        with pytest.raises(ValueError, match=f"{name}: .*{text}.*; {hint}"):
            script.read_structure(tmp_path / name)


def spoil(folder, change):
    """A chain of five residues whose lines are changed; (Chain, notes)."""
    write_pdb(folder / "a.pdb", {"A": "ACDEF"})
    lines = (folder / "a.pdb").read_text().splitlines()
    lines = [change(number, line) for number, line in enumerate(lines, start=1)]
    (folder / "a.pdb").write_text("\n".join(lines))
    structure = script.read_structure(folder / "a.pdb")
    return structure.chains["A"], structure.notes


def test_coordinates_that_cannot_be_right_are_missing(tmp_path):
    """A field of asterisks, which reads as 0; nanometres; all zeros. With file and line."""

    def asterisks(number, line):
        return line[:46] + "********" + line[54:] if number == 14 else line  # CA of A4

    chain, notes = spoil(tmp_path, asterisks)
    assert letters_of(chain.letters) == "ACDEF"  # it keeps its place in the sequence
    assert chain.whole().tolist() == [True, True, True, False, True]
    (note,) = notes
    assert f"{tmp_path}/a.pdb, line 13: residue A4 GLU counts as missing: N-CA, CA-C, C-O" in note
    assert "long, expected 0.8 to 2.2" in note

    for factor in (0.1, 10, 0):

        def scaled(number, line, factor=factor):
            if not line.startswith("ATOM"):
                return line
            numbers = [factor * float(line[start : start + 8]) for start in (30, 38, 46)]
            return line[:30] + "".join(f"{number:8.3f}" for number in numbers) + line[54:]

        chain, notes = spoil(tmp_path, scaled)
        assert not chain.whole().any() and len(notes) == 5
        text = refused(tmp_path, [row("a.pdb", "ACDEF", "ACDEG")])
        assert "chain A: 0 residues with all of N, CA, C and O" in text
        assert "line 1: residue A1 ALA counts as missing" in text


def test_workers_read_structures(tmp_path):
    paths = []
    for number in range(9):
        paths.append(tmp_path / f"{number}.pdb")
        write_pdb(paths[-1], {"A": "ACDEF"[: 1 + number % 5]})
    paths[7].unlink()
    with one_rank():
        found = script.read_structures(paths, 2)
    assert list(found) == paths and "No such file" in found.pop(paths[7])
    for path, structure in found.items():
        assert letters_of(structure.chains["A"].letters) == "ACDEF"[: 1 + int(path.stem) % 5]


def test_real_entries():
    """Selenomethionines as HETATM, gaps, insertion codes, disorder in entries of the PDB."""
    found = {}
    for path in sorted((ROOT / "data" / "dpo").glob("*.gz")):
        structure = script.read_structure(path)
        assert structure.notes == []
        for name, chain in structure.chains.items():
            found[path.name[:4] + name] = chain
    assert len(found) == 15 and all(chain.whole().all() for chain in found.values())
    letters = letters_of(found["1A8OA"].letters)
    assert letters[0] == "M" and letters.count("M") == 4
    crambin = "TTCCPSIVARSNFNVCRLPGTPEALCATYTGCIIIPGATCPGDYAN"
    assert letters_of(found["1EJGA"].letters) == crambin
    assert (np.diff(found["2XHEB"].numbers) > 1).sum() == 2
    assert (np.diff(found["4ZHLU"].numbers) == 1).sum() >= 245  # with insertion codes
    steps = np.linalg.norm(np.diff(found["1UBIA"].coords[:, 1], axis=0), axis=1)
    assert steps == pytest.approx(3.8, abs=0.15)


# ---- Pairs -----------------------------------------------------------------------------------


def test_all_problems_are_listed_at_once(tmp_path):
    write_pdb(tmp_path / "a.pdb", {"A": "ACDEFG", "B": "KLMN"})
    good = row(chosen="ACDEFG", rejected="ACDEFA")
    changes = [
        ({"pdb_file": "gone.pdb"}, "/gone.pdb: .*No such file"),
        ({"chain_id": "Q"}, "/a.pdb: chain Q: 0 residues .* expected one of A, B that has some"),
        ({"preferred_seq": "ACD"}, "preferred_seq has 3 letters; expected 6, as a:A"),
        ({"unpreferred_seq": "ACUEFG"}, "unpreferred_seq has 'U' at position 2; expected lett"),
        ({"unpreferred_seq": "ACDEFG"}, "preferred_seq and unpreferred_seq are the same"),
        ({"mutable_positions": [0]}, "are the same at the designed residues"),
        ({"mutable_positions": [6]}, r"mutable residues \[6, 6\]; expected a first .* 0 to 5"),
        ({"mutable_positions": ["A3"]}, r"mutable_positions is \['A3'\]; expected such as \[0, 3"),
        ({"mutable_positions": []}, "no residue is both mutable and resolved"),
        ({"mutable_ranges": [[4, 2]]}, r"mutable residues \[4, 2\]; expected a first and a last"),
        ({"mutable_ranges": [4]}, r"mutable_ranges is \[4\]; expected such as \[\[3, 7\]\]"),
        ({"margin": 0.5}, "unknown field 'margin'; expected pdb_file, preferred_seq, .*cluster"),
        ({"chain_id": "A", "design_chains": ["B"]}, "chain_id A and design_chains B: give one"),
        ({"chain_id": "B", "fixed_chains": ["B"]}, "chain B: 4 residues .*, named 2 times"),
        ({"pdb_file": 5}, 'pdb_file is 5; expected such as "1UBI.pdb"'),
        ({"design_chains": "A"}, "design_chains is 'A'; expected such as"),
        ({"unpreferred_seq": None}, "no unpreferred_seq"),
        ({"cluster": 5}, 'cluster is 5; expected such as "kinases"'),
        ({"cluster": "other"}, "cluster is other, before None; expected the same"),
    ]
    bad = [(good | change, text) for change, text in changes]
    bad.append(({"pdb_file": "a.pdb"}, "no preferred_seq, unpreferred_seq"))
    bad.append(([1, 2], r"\[1, 2\]; expected an object with pdb_file, preferred_seq, unpref"))
    rows = [good, *(found for found, _ in bad), row("a.pdb", "KLMN", "KLMK", chain_id="B")]
    lines = refused(tmp_path, rows).split("\n  ")
    assert lines[0].startswith("21 problems (--skip_bad_data leaves such rows out): ")
    assert len(lines) == 21 and lines[-1] == "... and 1 more"
    pairs = load(tmp_path, rows, skip_bad_data=True)
    assert [pair.name for pair in pairs.pairs] == ["a:A:0", "a:B:22"]
    assert lines[0].endswith(pairs.problems[0]) and pairs.problems[1:20] == lines[1:-1]
    for number, (_, text) in enumerate(bad, start=1):
        (line,) = [line for line in pairs.problems if f"index {number}: " in line]
        assert re.search(f"pairs.json: index {number}: .*{text}", line)
    text = refused(tmp_path, [good], max_length=5)
    assert "6 residues; expected at most --max_length 5" in text
    assert len(load(tmp_path, [good], max_length=6)) == 1


def test_forms_of_the_data_file(tmp_path):
    """An array, lines, untidy lines; null is no value; paths are relative to the file."""
    (tmp_path / "deep").mkdir()
    write_pdb(tmp_path / "deep" / "a.pdb", {"A": "ACDEFG"})
    rows = [row("deep/a.pdb", "ACDEFG", "ACDEFA", comment=5, chain_id=None)]
    rows.append(row("deep/a.pdb", "acdefg", "CCDEFG"))
    rows.append(row(str(tmp_path / "deep" / "a.pdb"), "ACDEFG", "AAAAAA", description="x"))
    lines = [json.dumps(one) for one in rows]
    untidy = "\ufeff\n" + "\r\n\n".join(lines) + "\n \n"
    for text in (json.dumps(rows, indent=2), "\n".join(lines), untidy):
        pairs = load(tmp_path, text).pairs
        assert [letters_of(pair.letters[1]) for pair in pairs] == ["ACDEFA", "CCDEFG", "AAAAAA"]

    assert "expected a JSON array of objects" in refused(tmp_path, "[{]")
    for empty in ("", "\n", "[]"):  # which once gave a traceback
        assert "pairs.json: no pairs; expected pdb_file, preferred_seq" in refused(tmp_path, empty)
    text = refused(tmp_path, lines[0] + "\n{'pdb_file'}\n" + lines[1])
    assert "line 2: \"{'pdb_file'}\"; expected an object with pdb_file" in text
    assert "No such file" in refused(tmp_path, rows, train_data=str(tmp_path / "gone.json"))


def test_chains_and_positions(tmp_path):
    """Design chains in the order given, then the fixed ones; what is not designed has the
    structure's letter; a residue without coordinates is not there."""
    write_pdb(tmp_path / "a.pdb", {"A": "ACD-FG", "B": "KLMN", "C": "WWYY"})
    text = (tmp_path / "a.pdb").read_text().split("\n")
    gone = [line for line in text if line[12:16] == " O  " and line[21:26] == "B   2"]
    text.remove(gone[0])
    (tmp_path / "a.pdb").write_text("\n".join(text))
    common = {"design_chains": ["B", "A"], "fixed_chains": ["C"]}
    both = {"mutable_positions": [2], "mutable_ranges": [[3, 4], [6, 6]]}
    cases = [  # change, preferred and unpreferred sequence, what is designed
        ({}, "RRRSSSSSWWYY", "TTTSSSSTWWYY", "XXXXXXXX...."),
        ({"mutable_positions": [0, 8]}, "RMNACDFSWWYY", "TMNACDFTWWYY", "X......X...."),
        (both, "KRRSCSFGWWYY", "KTTSCSFGWWYY", ".XXX.X......"),
        ({"fixed_chains": []}, "RRRSSSSS", "TTTSSSST", "XXXXXXXX"),
    ]
    rows = []
    for change, *_ in cases:
        rows.append(row("a.pdb", "RRRRSSSSS", "TTTTSSSST", **{**common, **change}))
    pairs = load(tmp_path, rows)
    for pair, (_, chosen, rejected, designed) in zip(pairs.pairs, cases, strict=True):
        assert [letters_of(letters) for letters in pair.letters] == [chosen, rejected]
        assert pair.designed.tolist() == [sign == "X" for sign in designed]
    assert pairs.other_letters == 2
    backbone = pairs.backbones[0]
    numbers = " ".join(map(str, backbone.place[0].tolist()))
    assert numbers == "1 3 4 1 2 3 5 6 1 2 3 4"  # the gap of A4 counts
    assert backbone.place[1].tolist() == [0] * 3 + [1] * 5 + [2] * 4
    assert len(pairs.backbones) == 2  # with the fixed chain, and without


def some_rows(folder, sizes, pairs=3, **more):
    """Structures 0.pdb, 1.pdb, ... of so many residues and rows for them."""
    draw = random.Random(0)
    rows = []
    for number, size in enumerate(sizes):
        native = "".join(draw.choices(LETTERS[:20], k=size))
        write_pdb(folder / f"{number}.pdb", {"A": native})
        for i in range(pairs):
            rows.append(row(f"{number}.pdb", native, native[:i] + "X" + native[i + 1 :], **more))
    return rows


def test_batches_against_each_structure(tmp_path):
    """In any order and with repeats, a batch holds what featurise says of each structure."""
    sizes = [5, 31, 12, 5]
    pairs = load(tmp_path, some_rows(tmp_path, sizes))
    for ids in ([0], [11, 0, 4, 4, 10, 6], list(range(12))):
        ids = np.array(ids)
        batch = pairs[ids, np.arange(20), 0]
        used = np.unique(ids // 3)
        atoms = [pairs.backbones[number].atoms for number in used]
        assert torch.equal(batch.structures.atoms, torch.cat(atoms))
        assert batch.structures.neighbours.shape[1] == min(8, max(sizes[i] for i in used))
        assert batch.ids.tolist() == ids.tolist() and batch.share == 1 / 20
        chosen, rejected, rows, ranks, owner = batch.residues
        for number, i in enumerate(ids):
            mine = owner == number
            size = sizes[i // 3]
            assert int(mine.sum()) == size
            assert letters_of(rejected[mine])[i % 3] == "X"
            assert (chosen[mine] != rejected[mine]).sum() == 1
            assert sorted(ranks[mine].tolist()) == list(range(size))
            # the residue's atoms are those of its backbone
            found = batch.structures.atoms[rows[mine]]
            assert torch.equal(found, pairs.backbones[i // 3].atoms)
    neighbours = pairs.structures([0, 1]).neighbours
    # nobody has neighbours elsewhere
    assert neighbours[:5].max() == 4 and neighbours[5:].min() == 5
    assert (neighbours[:5, 5:] == -1).all()
    # copies to the device are few; once there were about 15
    moved = batch.to(torch.device("meta"))
    tensors = [*moved.structures, *moved[1:-1]]
    assert len(tensors) == 7 and all(tensor.device.type == "meta" for tensor in tensors)


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
    assert not np.array_equal(ranks[7], ranks[8])


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
        assert list(held_sizes([60, 50, 70], 0.1, seed).values()) == [50], "all are too large"
    sets = [held_sizes([3] * 50, 0.2, seed) for seed in (0, 0, 1)]
    assert sets[0] == sets[1] != sets[2]


def test_split_by_structure_and_cluster(tmp_path):
    rows = some_rows(tmp_path, [8, 9, 10, 11, 12, 13], pairs=4)
    (tmp_path / "copy.pdb").write_bytes((tmp_path / "0.pdb").read_bytes())
    rows.append(rows[0] | {"pdb_file": "copy.pdb"})  # a copy of a file is the same structure
    pairs = load(tmp_path, rows)
    groups = [pair.group for pair in pairs.pairs]
    assert groups[24] == groups[0] and len(set(groups)) == 6
    train, valid = split(pairs)
    assert sorted([*train, *valid]) == list(range(25)) and 5 <= len(valid) <= 12
    assert not {groups[i] for i in train} & {groups[i] for i in valid}
    # homologous chains in one cluster: never on both sides
    rows = [one | {"cluster": f"family {i // 8}"} for i, one in enumerate(rows[:24])]
    clustered = load(tmp_path, rows)
    for seed in range(5):
        train, valid = split(clustered, seed=seed)
        assert len(valid) == 8 and len({i // 8 for i in valid}) == 1


def test_one_structure_is_split_by_sequence(tmp_path, caplog):
    """Once that was an error. No held-out sequence is trained on, and it is said."""
    native = "ACDEFGHIKLMN"
    write_pdb(tmp_path / "a.pdb", {"A": native})
    others = [native[:i] + "W" + native[i + 1 :] for i in range(12)]
    rows = [row("a.pdb", native, other) for other in others]
    rows.append(row("a.pdb", others[0], others[1]))
    train, valid = split(load(tmp_path, rows))
    assert "all pairs are on one structure" in caplog.text and len(valid) >= 3
    held = {rows[i]["unpreferred_seq"] for i in valid}
    for i in train:
        assert not held & {rows[i]["preferred_seq"], rows[i]["unpreferred_seq"]}
    assert 9 <= len(train) + len(valid) <= 13
    with pytest.raises(script.InputError, match="give --val_data"):
        split(load(tmp_path, rows[:1]))


def test_validation_data(tmp_path, caplog):
    rows = some_rows(tmp_path, [8, 9])
    (tmp_path / "val.json").write_text(json.dumps(rows[3:]))
    options = {"val_data": str(tmp_path / "val.json")}
    args = Namespace(**options)
    train, valid = script.split_pairs(args, load(tmp_path, rows[:3], **options), 3)
    assert (train.tolist(), valid.tolist()) == ([0, 1, 2], [3, 4, 5])
    assert "in the training data, too" not in caplog.text
    script.split_pairs(args, load(tmp_path, rows[:4], **options), 4)
    assert "1 structures or clusters are in --val_data and in the training data, too" in caplog.text
    (tmp_path / "val.json").write_text(json.dumps([rows[3] | {"preferred_seq": "A"}]))
    text = refused(tmp_path, rows[:3], **options)
    assert "val.json: index 0: preferred_seq has 1 letters" in text
    assert "val.json: no pairs" in refused(tmp_path, rows[:3], skip_bad_data=True, **options)


# ---- What is shipped -------------------------------------------------------------------------


def test_shipped_data(tmp_path):
    folder = ROOT / "data" / "dpo"
    readme = (ROOT / "data" / "README.md").read_text()
    rows = json.loads((folder / "pairs.json").read_text())
    assert rows == mutated_pairs(folder), "not what the rule in tests/helpers.py makes"
    entries = sorted(path.name for path in folder.glob("*.gz"))
    assert sum(path.stat().st_size for path in folder.iterdir()) < 250_000
    assert sorted({one["pdb_file"] for one in rows}) == entries and len(entries) == 13
    assert all(f"| {name[:4]} |" in readme for name in entries)
    rows = [one | {"pdb_file": str(folder / one["pdb_file"])} for one in rows]
    assert len(load(tmp_path, rows)) == 12 * 13
