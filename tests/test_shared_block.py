"""Scripts carry the same lines, between banners, so that each is complete in one file.

    python tests/test_shared_block.py --from run_train_quantumgrav_ddp.py

writes the blocks of one script into all others that carry them, and says which of them changed.

A block is known by its first line. test_ddp_setup.py has block A whole, and only single functions
of block B.
"""

import argparse
import ast
import symtable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BANNER = "# " + "=" * 98 + "\n"
SCRIPTS = """train_ddp.py run_dpo_ddp.py run_train_uniref50_ddp.py run_train_quantumgrav_ddp.py
    run_train_rebm_ddp.py test_ddp_setup.py""".split()
KINDS = {  # first words of a block
    "A": "# How a run starts and ends.",
    "B": "# What happens around a step",
}


def split(text):
    """[(kind or None, text)]: the parts of a script between its banners"""
    parts = []
    for part in text.split(BANNER):
        kinds = [kind for kind, start in KINDS.items() if part.startswith(start)]
        parts.append((kinds[0] if kinds else None, part))
    return parts


def blocks(path):
    """{kind: text}"""
    return {kind: part for kind, part in split(path.read_text()) if kind}


def definitions(text):
    """{name: source} of the functions and classes of a text"""
    lines = text.splitlines(keepends=True)
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            first = min([node.lineno, *[mark.lineno for mark in node.decorator_list]])
            found[node.name] = "".join(lines[first - 1 : node.end_lineno])
    return found


def scripts_of(folder):
    """Only those of these names: a user may have copies of his own beside them."""
    return [folder / name for name in SCRIPTS if (folder / name).exists()]


def copied(text, source):
    """The text of a script with the blocks of another, {kind: text}. Where it has no block B, its
    single functions of that block are replaced."""
    parts = split(text)
    kinds = [kind for kind, _ in parts]
    rest = []
    for kind, part in parts:
        if kind is None and "A" in kinds and "B" not in kinds:
            whole = definitions(source.get("B", ""))
            for name, own in definitions(part).items():
                part = part.replace(own, whole.get(name, own))
        rest.append(source.get(kind, part))
    return BANNER.join(rest)


def copy_blocks(path):
    """Write the blocks of a script into those beside it; the names of the ones that changed."""
    source = blocks(path)
    changed = []
    for other in scripts_of(path.parent):
        text = other.read_text()
        new = copied(text, source)
        if new != text:
            other.write_text(new)
            changed.append(other.name)
    return changed


def bound(text):
    """[names that a Python text binds at top level]"""
    symbols = symtable.symtable(text, "script", "exec").get_symbols()
    return {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}


def find_faults(folder):
    """What is wrong with the blocks of the scripts in a folder, in words."""
    faults = []
    first = {}  # of each kind of block: the script that has it first, and its text
    for path in scripts_of(folder):
        own = blocks(path)
        if list(own) != (["A"] if path.name == "test_ddp_setup.py" else ["A", "B"]):
            faults.append(f"{path.name} has the blocks {list(own)}")
        rest = "".join(part for kind, part in split(path.read_text()) if kind is None)
        for kind, text in own.items():
            name, same = first.setdefault(kind, (path.name, text))
            if text != same:
                faults.append(f"block {kind} of {path.name} is not that of {name}")
            twice = bound(text) & bound(rest)
            if twice:
                faults.append(f"{path.name} binds names of block {kind} once more: {twice}")
    if "B" in first:
        whole = definitions(first["B"][1])
        rest = split((folder / "test_ddp_setup.py").read_text())
        for kind, text in rest:
            for name, own in definitions(text).items():
                if kind is None and whole.get(name, own) != own:
                    faults.append(f"{name} of test_ddp_setup.py is not that of block B")
    return faults


def test_all_blocks_are_equal():
    assert len(scripts_of(ROOT)) == len(SCRIPTS)
    assert find_faults(ROOT) == []


def write_folder(folder):
    """Three scripts of a few lines, and a copy that a user has made."""
    plain = "def own():\n    return 0\n\n\n"
    part = {}
    for kind, start in KINDS.items():
        part[kind] = f"{start}\n\n\ndef {kind}():\n    return 1\n\n\n"
    texts = {
        "run_dpo_ddp.py": [plain, part["A"], part["B"], "launch()\n"],
        "run_train_quantumgrav_ddp.py": [plain, part["A"], part["B"], "launch()\n"],
        "test_ddp_setup.py": [f"{plain}def B():\n    return 1\n\n\n", part["A"], "launch()\n"],
        "my_run.py": [plain, part["A"].replace("1", "2"), "launch()\n"],
    }
    for name, parts in texts.items():
        (folder / name).write_text(BANNER.join(parts))


CHANGES = [  # the script and the definition that is changed, the script that is right
    ("run_train_quantumgrav_ddp.py", "B", "run_dpo_ddp.py"),
    ("test_ddp_setup.py", "A", "run_train_quantumgrav_ddp.py"),
    ("test_ddp_setup.py", "B", "run_train_quantumgrav_ddp.py"),
    ("run_train_quantumgrav_ddp.py", "A", "test_ddp_setup.py"),
]


@pytest.mark.parametrize(("name", "kind", "right"), CHANGES)
def test_a_change_is_found_and_repaired(tmp_path, name, kind, right):
    """The rest of a file stays, and so do the files of a user."""
    write_folder(tmp_path)
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert find_faults(tmp_path) == []
    assert copy_blocks(tmp_path / right) == []

    line = f"def {kind}():\n    return "
    (tmp_path / name).write_text(before[name].replace(f"{line}1", f"{line}3"))
    assert len(find_faults(tmp_path)) == 1
    assert copy_blocks(tmp_path / right) == [name]
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before


def test_a_name_that_is_bound_twice(tmp_path):
    write_folder(tmp_path)
    with open(tmp_path / "run_dpo_ddp.py", "a") as file:
        file.write("A = 4\n")
    faults = find_faults(tmp_path)
    assert faults == ["run_dpo_ddp.py binds names of block A once more: {'A'}"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--from", dest="source", required=True, help="the script that is right")
    changed = copy_blocks(ROOT / parser.parse_args().source)
    print(f"changed: {', '.join(changed) or 'none, all blocks are equal'}")
