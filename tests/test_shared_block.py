"""Every script carries the same lines for distributed training, between two banners.

    python tests/test_shared_block.py --from train_ddp.py

writes the block of one script into all the others, and says which of them changed.
"""

import argparse
import symtable
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BANNER = "# " + "=" * 98 + "\n"


def split(path):
    """(what comes before the block of a script, the block, what comes after it)"""
    parts = path.read_text().split(BANNER)
    if len(parts) != 3:
        raise ValueError(f"{path.name} has {len(parts) - 1} banners, expected two")
    return parts


def find_scripts(folder):
    return [path for path in sorted(folder.glob("*.py")) if BANNER in path.read_text()]


def copy_block(source):
    """Write the block of `source` into the scripts beside it; the names of those that changed."""
    block = split(source)[1]
    new = {}
    for path in find_scripts(source.parent):
        before, old, after = split(path)
        if old != block:
            new[path] = BANNER.join([before, block, after])
    for path, text in new.items():
        path.write_text(text)
    return [path.name for path in new]


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
    texts = {}
    for number, name in enumerate(["a.py", "b.py", "c.py"]):
        texts[name] = f"name = '{name}'\n{BANNER}block = {number // 2}\n{BANNER}print(block)\n"
    texts["other.py"] = "block = 3\n"
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    assert copy_block(tmp_path / "c.py") == ["a.py", "b.py"]
    for name, text in texts.items():
        assert (tmp_path / name).read_text() == text.replace("block = 0", "block = 1")
    assert copy_block(tmp_path / "c.py") == []

    (tmp_path / "a.py").write_text(texts["a.py"])
    (tmp_path / "b.py").write_text(texts["b.py"] + BANNER)
    with pytest.raises(ValueError, match="b.py has 3 banners, expected two"):
        copy_block(tmp_path / "c.py")
    assert (tmp_path / "a.py").read_text() == texts["a.py"]  # nothing is written


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--from", dest="source", required=True, help="the script that is right")
    source = ROOT / parser.parse_args().source
    if source not in find_scripts(ROOT):
        parser.error(f"{source.name} is no script with a block in {ROOT}")
    try:
        changed = copy_block(source)
    except ValueError as error:
        sys.exit(str(error))
    print(f"changed: {', '.join(changed) or 'none, all blocks are equal'}")
