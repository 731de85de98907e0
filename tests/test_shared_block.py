"""Every script is complete in one file, and so carries the same lines for distributed training.

    python tests/test_shared_block.py --from run_train_quantumgrav_ddp.py

writes the block of one script into all others that carry it, and says which of them changed. The
block reaches from its banner to the end of the file; test_ddp_setup.py has of it what it uses.
"""

import argparse
import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEADER = re.compile(r"^# /// script\n((?:#.*\n)+?)# ///$", re.MULTILINE)
# The package that an import comes with, where it has another name.
PACKAGES = {"PIL": "pillow", "pyarrow": "datasets", "sklearn": "scikit-learn", "yaml": "pyyaml"}
WITH_STUDENTS = "safetensors sentence_transformers tokenizers transformers".split()
PACKAGES |= {**dict.fromkeys(WITH_STUDENTS, "sentence-transformers"), "fsspec": "torch"}
BANNER = f"# {'=' * 98}\n# Distributed training. These lines "
SETUP = "test_ddp_setup.py"
SCRIPTS = sorted(path.name for path in ROOT.glob("*.py") if path.name != SETUP)


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
    texts = read_scripts()
    for name, text in texts.items():
        assert text.count(BANNER) == (name != SETUP), name
    assert repaired(texts, SCRIPTS[0]) == {}


@pytest.mark.parametrize("name", [*SCRIPTS, SETUP])
def test_a_script_names_the_packages_that_it_imports(name):
    """All of them (PEP 723, as `uv run` reads them), with the versions of requirements.txt."""
    text = (ROOT / name).read_text()
    header = HEADER.search(text)[1].replace("\n# ", "\n").removeprefix("# ")
    named = ast.literal_eval(header.partition("dependencies = ")[2])
    known = (ROOT / "requirements.txt").read_text() + (ROOT / "requirements-dev.txt").read_text()
    assert set(named) <= {line.split()[0] for line in known.splitlines() if line}

    modules = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            modules.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module.partition(".")[0])
    needed = {PACKAGES.get(module, module) for module in modules - sys.stdlib_module_names}
    if ".savefig(" in text:
        needed.add("matplotlib")  # which draws for pandas and scikit-learn
    assert {re.match(r"[\w-]+", requirement)[0] for requirement in named} == needed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--from", dest="source", required=True, help="the script that is right")
    changed = repaired(read_scripts(), parser.parse_args().source)
    for name, text in changed.items():
        (ROOT / name).write_text(text)
    print(f"changed: {', '.join(changed) or 'none, all blocks are equal'}")
