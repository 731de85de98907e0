"""Scripts carry the same lines, between banners, so that each is complete in one file.

    python tests/test_shared_block.py --from run_train_quantumgrav_ddp.py

writes the blocks of one script into all others that carry them, and says which of them changed.

A block is known by its first line. test_ddp_setup.py has block A whole, and only single functions
of block B.
"""

import argparse
import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BANNER = "# " + "=" * 98 + "\n"
SETUP = "test_ddp_setup.py"
SCRIPTS = f"""run_train_quantumgrav_ddp.py train_ddp.py run_dpo_ddp.py run_train_uniref50_ddp.py
    run_train_rebm_ddp.py {SETUP}""".split()
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


def definitions(text):
    """{name: source} of the functions and classes of a text"""
    lines = text.splitlines(keepends=True)
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            first = min([node.lineno, *[mark.lineno for mark in node.decorator_list]])
            found[node.name] = "".join(lines[first - 1 : node.end_lineno])
    return found


def repaired(folder, source):
    """{name: new text} of the scripts in a folder that have not the blocks of `source`. Only
    scripts of these names: a user may have copies of his own beside them."""
    blocks = dict(split((folder / source).read_text()))
    functions = definitions(blocks.get("B", ""))
    changed = {}
    for name in SCRIPTS:
        path = folder / name
        text = path.read_text() if path.exists() else ""
        parts = []
        for kind, part in split(text):
            if kind is None and name == SETUP:
                for function, own in definitions(part).items():
                    part = part.replace(own, functions.get(function, own))
            parts.append(blocks.get(kind, part) if kind else part)
        if BANNER.join(parts) != text:
            changed[name] = BANNER.join(parts)
    return changed


def test_all_blocks_are_equal():
    """And no script has a function of that name once more."""
    for name in SCRIPTS:
        text = (ROOT / name).read_text()
        kinds = [kind for kind, _ in split(text) if kind]
        assert kinds == (["A"] if name == SETUP else ["A", "B"]), name
        names = [node.name for node in ast.parse(text).body if hasattr(node, "name")]
        assert len(names) == len(set(names)), name
    assert list(repaired(ROOT, SCRIPTS[0])) == []


CHANGES = [  # the script and the function that is changed, the script that is right
    ("run_train_quantumgrav_ddp.py", "B", "run_dpo_ddp.py"),
    ("test_ddp_setup.py", "A", "run_train_quantumgrav_ddp.py"),
    ("test_ddp_setup.py", "B", "run_train_quantumgrav_ddp.py"),
    ("run_train_quantumgrav_ddp.py", "A", "test_ddp_setup.py"),
]


@pytest.mark.parametrize(("name", "kind", "right"), CHANGES)
def test_a_change_is_found_and_repaired(tmp_path, name, kind, right):
    """The rest of a file stays, and so do the files of a user."""
    function = "def {}():\n    return 1\n\n\n"
    own = function.format("own")
    a, b = [f"{start}\n\n\n{function.format(kind)}" for kind, start in KINDS.items()]
    texts = {
        "run_dpo_ddp.py": [own, a, b, "launch()\n"],
        "run_train_quantumgrav_ddp.py": [own, a, b, "launch()\n"],
        "test_ddp_setup.py": [own + function.format("B"), a, "launch()\n"],
        "my_run.py": [own, a.replace("1", "2"), "launch()\n"],
    }
    for script, parts in texts.items():
        (tmp_path / script).write_text(BANNER.join(parts))
    assert repaired(tmp_path, right) == {}

    text = (tmp_path / name).read_text()
    line = f"def {kind}():\n    return "
    (tmp_path / name).write_text(text.replace(f"{line}1", f"{line}3"))
    assert repaired(tmp_path, right) == {name: text}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--from", dest="source", required=True, help="the script that is right")
    changed = repaired(ROOT, parser.parse_args().source)
    for name, text in changed.items():
        (ROOT / name).write_text(text)
    print(f"changed: {', '.join(changed) or 'none, all blocks are equal'}")
