"""Every script carries the same lines for distributed training, so that each is complete in one
file.

    python tests/test_shared_block.py --from run_train_quantumgrav_ddp.py

writes the block of one script into all others that carry it, and says which of them changed.

The block reaches from its banner to the end of the file. test_ddp_setup.py has only the functions
and constants of it that it uses.
"""

import argparse
import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BANNER = f"# {'=' * 98}\n# Distributed training. These lines "
SETUP = "test_ddp_setup.py"
SCRIPTS = f"""run_train_quantumgrav_ddp.py train_ddp.py run_dpo_ddp.py run_train_uniref50_ddp.py
    run_train_rebm_ddp.py {SETUP}""".split()


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
    """{name: new text} of the scripts in a folder that have not the block of `source`. Only scripts
    of these names: a user may have copies of his own beside them."""
    block = (folder / source).read_text().partition(BANNER)[2]
    shared = definitions(block[block.index("\n") :])
    changed = {}
    for name in SCRIPTS:
        path = folder / name
        text = path.read_text() if path.exists() else ""
        own, banner, _ = text.partition(BANNER)
        new = own + banner + block
        if name == SETUP:
            new = text
            for function, source in definitions(text).items():
                new = new.replace(source, shared.get(function, source))
        if path.exists() and new != text:
            changed[name] = new
    return changed


def test_all_blocks_are_equal():
    """And no script has a function of that name once more."""
    for name in SCRIPTS:
        text = (ROOT / name).read_text()
        assert text.count(BANNER) == (name != SETUP), name
        names = [node.name for node in ast.parse(text).body if hasattr(node, "name")]
        assert len(names) == len(set(names)), name
        assert name == SETUP or text.endswith("    launch(parse_args, main)\n")
    assert repaired(ROOT, SCRIPTS[0]) == {}


@pytest.mark.parametrize("name", ["run_train_quantumgrav_ddp.py", SETUP])
def test_a_change_is_found_and_repaired(tmp_path, name):
    """The rest of a file stays, and so do the files of a user."""
    own = "def own():\n    return 1\n\n\n"
    shared = "LIMIT = 5\n\n\ndef shared():\n    return 1\n\n\n"
    texts = dict.fromkeys(SCRIPTS, f"{own}{BANNER}\n\n{shared}launch()\n")
    texts[SETUP] = own + shared
    texts["my_run.py"] = texts["run_dpo_ddp.py"].replace("1", "2")
    for script, text in texts.items():
        (tmp_path / script).write_text(text)
    assert repaired(tmp_path, "run_dpo_ddp.py") == {}
    changed = texts[name].replace("shared():\n    return 1", "shared():\n    return 3")
    (tmp_path / name).write_text(changed.replace("LIMIT = 5", "LIMIT = 6"))
    assert repaired(tmp_path, "run_dpo_ddp.py") == {name: texts[name]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--from", dest="source", required=True, help="the script that is right")
    changed = repaired(ROOT, parser.parse_args().source)
    for name, text in changed.items():
        (ROOT / name).write_text(text)
    print(f"changed: {', '.join(changed) or 'none, all blocks are equal'}")
