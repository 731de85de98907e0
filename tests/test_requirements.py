"""Each script names the packages that it needs (PEP 723), as `uv run SCRIPT.py` reads them."""

import ast
import re
import sys

import pytest
from helpers import ROOT
from runs import SCRIPTS

HEADER = re.compile(r"^# /// script\n((?:#.*\n)+?)# ///$", re.MULTILINE)
PACKAGES = {  # the package that an import comes with, where it has another name
    "PIL": "pillow",
    "pyarrow": "datasets",
    "safetensors": "sentence-transformers",
    "sentence_transformers": "sentence-transformers",
    "sklearn": "scikit-learn",
    "tokenizers": "sentence-transformers",
    "transformers": "sentence-transformers",
    "yaml": "pyyaml",
    "fsspec": "torch",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_names_what_it_imports(name):
    """All of it, with the versions of requirements.txt."""
    text = (ROOT / f"{name}.py").read_text()
    header = HEADER.search(text).group(1).replace("\n# ", "\n").removeprefix("# ")
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
    assert {re.match(r"[\w-]+", requirement).group() for requirement in named} == needed
