"""Every script carries the same lines for distributed training, between two banners.

    python tests/test_shared_block.py --from train_ddp.py

writes the block of one script into all the others, and says which of them changed.
"""

import argparse
import ast
import os
import symtable
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BANNER = "# " + "=" * 98


def read_scripts(folder):
    return {path.name: path.read_bytes().decode() for path in sorted(folder.glob("*.py"))}


def split(text):
    """(the block with its banners, the script without it)"""
    lines = text.split("\n")
    places = [number for number, line in enumerate(lines) if line == BANNER]
    if len(places) != 2:
        raise ValueError(f"needs two banners around the shared block, has {len(places)}")
    begin, end = places
    return "\n".join(lines[begin : end + 1]), "\n".join(lines[:begin] + lines[end + 1 :])


def scope(source):
    """The names that `source` binds at top level, and the top-level names it reads anywhere."""
    top = symtable.symtable(source, "<source>", "exec")
    binds = set()
    reads = set()
    for symbol in top.get_symbols():
        if symbol.is_assigned() or symbol.is_imported():
            binds.add(symbol.get_name())
        if symbol.is_referenced():
            reads.add(symbol.get_name())
    tables = top.get_children()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            if symbol.is_declared_global() or (symbol.is_referenced() and symbol.is_global()):
                reads.add(symbol.get_name())
    return binds, reads


def unused(block, rest):
    """Top-level names of the block that the code outside it does not reach, directly or not."""
    binds = scope(block)[0]
    reads_of = {name: set() for name in binds}
    for statement in ast.parse(block).body:
        bound, read = scope(ast.unparse(statement))
        for name in bound:
            reads_of[name] |= read & binds

    used = set()
    todo = scope(rest)[1] & binds
    while todo:
        name = todo.pop()
        used.add(name)
        todo |= reads_of[name] - used
    return binds - used


def check(scripts):
    """Every problem of scripts that have a block, {name: text}. (ruff finds names that a script
    lacks.)"""
    problems = []
    first, *_ = scripts
    right = split(scripts[first])[0]
    for name, text in scripts.items():
        block, rest = split(text)
        if block != right:
            problems.append(f"{name}: the block differs from that of {first}")
        for rebound in sorted(scope(block)[0] & scope(rest)[0]):
            problems.append(f"{name}: {rebound} of the block is bound outside it, too")
        if name != "test_ddp_setup.py":  # which trains nothing, and need not use all of it
            for idle in sorted(unused(block, rest)):
                problems.append(f"{name}: {idle} of the block is not used")
    return problems


def copy_block(source):
    """Write the block of `source` into the scripts beside it; the names of those that changed."""
    block = split(source.read_bytes().decode())[0]
    new = {}
    for name, text in read_scripts(source.parent).items():
        if BANNER not in text.split("\n"):
            continue
        try:
            old = split(text)[0]
        except ValueError as error:
            raise ValueError(f"{name}: {error}; nothing was written") from None
        if old != block:
            new[name] = text.replace(old, block)
    for name, text in new.items():
        path = source.parent / name
        temporary = path.with_name(f".{name}.tmp")
        temporary.write_bytes(text.encode())
        temporary.chmod(path.stat().st_mode)
        os.replace(temporary, path)
    return list(new)


def test_scripts():
    scripts = read_scripts(ROOT)
    assert len(scripts) == 6
    assert check(scripts) == []


# The check itself: a script that passes, and what is reported once a text in it is replaced.
GOOD = f'''"""A script."""
{BANNER}
LIMIT = 3
class Dist:
    size: int = LIMIT
def helper(values):
    return [Dist() for value in values]
def setup(n):
    global LIMIT
    LIMIT = n
    return helper([])
{BANNER}
def main(): return setup(1)
'''
BROKEN = {  # text in the script: what replaces it, and part of the problem that is reported
    "def main()": ("def helper(): pass\ndef main()", "helper of the block is bound outside"),
    "LIMIT = 3": ("OTHER = 2\nLIMIT = 3", "OTHER of the block is not used"),
    "return setup(1)": ("return 1", "setup of the block is not used"),
    "return helper([])": ("return 2", "Dist of the block is not used"),
    "global LIMIT": ("global  LIMIT", "the block differs"),
}


@pytest.mark.parametrize("old", BROKEN)
def test_the_check_catches(old):
    new, expected = BROKEN[old]
    assert check({"a.py": GOOD, "b.py": GOOD}) == []
    problems = check({"a.py": GOOD, "b.py": GOOD.replace(old, new)})
    assert any(problem.startswith("b.py: ") and expected in problem for problem in problems)


def test_copy_block(tmp_path):
    newer = GOOD.replace("LIMIT = n", "LIMIT = n + 1")
    for name, text in {"a.py": GOOD, "b.py": newer, "c.py": GOOD, "d.py": "old = 1\n"}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "c.py").chmod(0o755)
    assert copy_block(tmp_path / "b.py") == ["a.py", "c.py"]
    expected = {"a.py": newer, "b.py": newer, "c.py": newer, "d.py": "old = 1\n"}
    assert read_scripts(tmp_path) == expected and len(list(tmp_path.iterdir())) == 4
    assert (tmp_path / "c.py").stat().st_mode & 0o777 == 0o755
    assert copy_block(tmp_path / "b.py") == []

    (tmp_path / "a.py").write_text(GOOD)
    (tmp_path / "c.py").write_text(GOOD + BANNER + "\n")
    with pytest.raises(ValueError, match="c.py: needs two banners"):
        copy_block(tmp_path / "b.py")
    assert (tmp_path / "a.py").read_text() == GOOD  # nothing is written


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--from", dest="source", required=True, help="the script that is right")
    source = ROOT / parser.parse_args().source
    if source.parent != ROOT or not source.is_file():
        parser.error(f"no script {source.name} in the root of the repository")
    try:
        changed = copy_block(source)
    except ValueError as error:
        sys.exit(str(error))
    for name in changed:
        print(f"{name}: block replaced")
    if not changed:
        print("all blocks are equal")
