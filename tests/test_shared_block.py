"""Every script carries the same lines for distributed training, so that each is complete in one
file.

    python tests/test_shared_block.py --from run_train_quantumgrav_ddp.py

writes the block of one script into all others that carry it, and says which of them changed.

The block reaches from its banner to the end of the file. test_ddp_setup.py has only the functions
and constants of it that it uses. Scripts that have the older blocks A and B are compared with each
other.
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
    "block": "# Distributed training. These lines ",
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
    """{name: source} of the functions, classes and constants of a text"""
    lines = text.splitlines(keepends=True)
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign):
            found[ast.unparse(node.targets[0])] = "".join(lines[node.lineno - 1 : node.end_lineno])
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = "".join(lines[node.lineno - 1 : node.end_lineno])
    return found


def repaired(folder, source):
    """{name: new text} of the scripts in a folder that have not the blocks of `source`. Only
    scripts of these names: a user may have copies of his own beside them."""
    blocks = dict(split((folder / source).read_text()))
    shared = definitions(blocks.get("block", ""))
    changed = {}
    for name in SCRIPTS:
        path = folder / name
        text = path.read_text() if path.exists() else ""
        parts = []
        for kind, part in split(text):
            if kind is None and name == SETUP:
                for function, own in definitions(part).items():
                    part = part.replace(own, shared.get(function, own))
            parts.append(blocks.get(kind, part) if kind else part)
        if BANNER.join(parts) != text:
            changed[name] = BANNER.join(parts)
    return changed


def test_all_blocks_are_equal():
    """And no script has a function of that name once more."""
    for name in SCRIPTS:
        text = (ROOT / name).read_text()
        kinds = [kind for kind, _ in split(text) if kind]
        if name != SETUP:
            assert kinds in (["block"], ["A", "B"]), name
        names = [node.name for node in ast.parse(text).body if hasattr(node, "name")]
        assert len(names) == len(set(names)), name
        assert "block" not in kinds or text.endswith("    launch(parse_args, main)\n")
        if "block" in kinds or "A" in kinds:
            assert repaired(ROOT, name) == {}


CHANGES = [  # the script and the function that is changed, the script that is right
    ("run_train_quantumgrav_ddp.py", "run_dpo_ddp.py"),
    ("test_ddp_setup.py", "run_train_quantumgrav_ddp.py"),
]


@pytest.mark.parametrize(("name", "right"), CHANGES)
def test_a_change_is_found_and_repaired(tmp_path, name, right):
    """The rest of a file stays, and so do the files of a user."""
    own = "def own():\n    return 1\n\n\n"
    shared = "def shared():\n    return 1\n\n\n"
    block = f"{BANNER}{KINDS['block']}\n\nLIMIT = 5\n\n\n{shared}"
    texts = {
        "run_dpo_ddp.py": f"{own}{block}launch()\n",
        "run_train_quantumgrav_ddp.py": f"{own}{block}launch()\n",
        "test_ddp_setup.py": f"{own}LIMIT = 5\n{shared}launch()\n",
        "my_run.py": f"{own}{block.replace('1', '2')}launch()\n",
    }
    for script, text in texts.items():
        (tmp_path / script).write_text(text)
    assert repaired(tmp_path, right) == {}

    text = texts[name].replace("shared():\n    return 1", "shared():\n    return 3")
    (tmp_path / name).write_text(text.replace("LIMIT = 5", "LIMIT = 6"))
    assert repaired(tmp_path, right) == {name: texts[name]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--from", dest="source", required=True, help="the script that is right")
    changed = repaired(ROOT, parser.parse_args().source)
    for name, text in changed.items():
        (ROOT / name).write_text(text)
    print(f"changed: {', '.join(changed) or 'none, all blocks are equal'}")
