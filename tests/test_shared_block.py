"""Every script carries the same lines for distributed training, between two banners.

    python tests/test_shared_block.py --from train_ddp.py

writes the block of one script into all the others, and says which of them changed.
"""

import argparse
import symtable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BANNER = "# " + "=" * 98 + "\n"


def split(path):
    """(what comes before the block of a script, the block, what comes after it)"""
    parts = path.read_text().split(BANNER)
    assert len(parts) == 3, f"{path.name} has {len(parts) - 1} banners, expected two"
    return parts


def find_scripts(folder):
    return [path for path in sorted(folder.glob("*.py")) if BANNER in path.read_text()]


def copy_block(source):
    """Write the block of `source` into the scripts beside it; the names of those that changed."""
    block = split(source)[1]
    changed = []
    for path in find_scripts(source.parent):
        before, old, after = split(path)
        if old != block:
            path.write_text(BANNER.join([before, block, after]))
            changed.append(path.name)
    return changed


def bound(text):
    """The names that a Python text binds at top level."""
    symbols = symtable.symtable(text, "script", "exec").get_symbols()
    return {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}


def test_all_blocks_are_equal():
    scripts = find_scripts(ROOT)
    assert len(scripts) == 6
    block = split(scripts[0])[1]
    for path in scripts:
        before, own, after = split(path)
        assert own == block, f"{path.name} has another block than {scripts[0].name}"
        assert not bound(block) & bound(before + after), f"{path.name} binds its names once more"


def test_copy_block(tmp_path):
    (tmp_path / "other.py").write_text("block = 3\n")
    for name, number in {"a": 0, "b": 0, "c": 1}.items():
        text = f"name = '{name}'\n{BANNER}block = {number}\n{BANNER}print(block)\n"
        (tmp_path / f"{name}.py").write_text(text)
    assert copy_block(tmp_path / "c.py") == ["a.py", "b.py"]
    for name in "abc":
        text = f"name = '{name}'\n{BANNER}block = 1\n{BANNER}print(block)\n"
        assert (tmp_path / f"{name}.py").read_text() == text
    assert (tmp_path / "other.py").read_text() == "block = 3\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--from", dest="source", required=True, help="the script that is right")
    changed = copy_block(ROOT / parser.parse_args().source)
    print(f"changed: {', '.join(changed) or 'none, all blocks are equal'}")
