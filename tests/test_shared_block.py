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

ROOT = Path(__file__).resolve().parents[1]
BANNER = f"# {'=' * 98}\n# Distributed training. These lines "
SETUP = "test_ddp_setup.py"
SCRIPTS = """run_train_quantumgrav_ddp.py train_ddp.py run_dpo_ddp.py run_train_uniref50_ddp.py
    run_train_rebm_ddp.py""".split()


def definitions(text):
    """{name: source} of the functions, classes and constants of a text"""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign):
            found[ast.unparse(node.targets[0])] = ast.get_source_segment(text, node)
        elif hasattr(node, "name"):
            found[node.name] = ast.get_source_segment(text, node)
    return found


def repaired(texts, source):
    """{name: new text} of the scripts that have not the block of `source`."""
    block = texts[source].partition(BANNER)[2]
    shared = definitions(block[block.index("\n") :])
    changed = {}
    for name, text in texts.items():
        new = text.partition(BANNER)[0] + BANNER + block
        if name == SETUP:
            new = text
            for function, own in definitions(text).items():
                new = new.replace(own, shared.get(function, own))
        if new != text:
            changed[name] = new
    return changed


def read_scripts():
    return {name: (ROOT / name).read_text() for name in [*SCRIPTS, SETUP]}


def test_all_blocks_are_equal():
    """And no script has a function of that name once more."""
    texts = read_scripts()
    for name, text in texts.items():
        assert text.count(BANNER) == (name != SETUP), name
        names = [node.name for node in ast.parse(text).body if hasattr(node, "name")]
        assert len(names) == len(set(names)), name
        assert name == SETUP or text.endswith("    launch(parse_args, main)\n")
    assert repaired(texts, SCRIPTS[0]) == {}


def test_a_change_is_found_and_repaired():
    texts = read_scripts()
    for name in (SCRIPTS[1], SETUP):
        other = texts[name].replace("time.sleep(3)", "time.sleep(4)")
        assert other != texts[name]
        assert repaired({**texts, name: other}, SCRIPTS[0]) == {name: texts[name]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--from", dest="source", required=True, help="the script that is right")
    changed = repaired(read_scripts(), parser.parse_args().source)
    for name, text in changed.items():
        (ROOT / name).write_text(text)
    print(f"changed: {', '.join(changed) or 'none, all blocks are equal'}")
