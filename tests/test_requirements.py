"""Each script names the packages that it needs (PEP 723), as `uv run SCRIPT.py` reads them."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEADER = re.compile(r"^# /// script\n((?:#.*\n)+?)# ///$", re.MULTILINE)
SCRIPTS = [path for path in sorted(ROOT.glob("*.py")) if HEADER.search(path.read_text())]
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


def split(requirement):
    """(package, versions)"""
    name = re.match(r"[\w-]+", requirement).group()
    return name, requirement.removeprefix(name)


def requirements_of(script):
    """{package: versions} of its header"""
    lines = HEADER.search(script.read_text()).group(1).splitlines()
    header = "".join(line[2:] for line in lines)
    return dict(map(split, ast.literal_eval(header.partition("dependencies = ")[2])))


def imports_of(script):
    """The packages that it imports, anywhere, apart from Python's own."""
    names = set()
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.partition(".")[0])
    return {PACKAGES.get(name, name) for name in names - sys.stdlib_module_names}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_names_what_it_imports(script):
    assert set(requirements_of(script)) == imports_of(script)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_versions_are_those_of_requirements(script):
    known = {}
    for name in ("requirements.txt", "requirements-dev.txt"):
        lines = (ROOT / name).read_text().splitlines()
        known.update(split(line.split()[0]) for line in lines if line[0].isalpha())
    for package, versions in requirements_of(script).items():
        assert known[package] == versions
