"""How large is each file, beside its aim? A report, not a limit: a longer plain file beats a short
dense one.

    python tests/form.py

Lines are counted as `ruff format` writes them at 100 columns.
"""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BANNER = "# " + "=" * 98  # around the lines that every script has
AIMS = {
    "the shared block": 500,
    "train_ddp.py": 1250,
    "run_dpo_ddp.py": 1300,
    "run_train_uniref50_ddp.py": 1150,
    "run_train_quantumgrav_ddp.py": 1050,
    "run_train_rebm_ddp.py": 1250,
    "test_ddp_setup.py": 850,
    "run_ddp.sh": 50,
    "run_train_uniref50_ddp.sh": 90,
    "README.md": 180,
    "docs/DDP_TRAINING_GUIDE.md": 350,
    "tests/*.py": 5000,
    "benchmarks/*.py": 1800,
}
EACH_TOOL = 200
EACH_LAUNCHER = 60


def formatted(path):
    """The text of a file; of a Python file as `ruff format` writes it at 100 columns."""
    if path.suffix != ".py":
        return path.read_text()
    command = [sys.executable, "-m", "ruff", "format", "--isolated", "--line-length=100"]
    command += ["--stdin-filename", path.name, "-"]
    done = subprocess.run(command, input=path.read_text(), capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"ruff cannot format {path.relative_to(ROOT)}: {done.stderr.strip()}")
    return done.stdout


def is_option(node):
    """Whether a node of the syntax tree is a call such as add("--lr", ...)."""
    if not isinstance(node, ast.Call) or not node.args:
        return False
    first = node.args[0]
    return isinstance(first, ast.Constant) and str(first.value).startswith("--")


def describe(text):
    """(longest function, its lines, options) of a Python text."""
    longest = ""
    most = 0
    options = 0
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            lines = node.end_lineno - node.lineno + 1
            if lines > most:
                longest = node.name
                most = lines
        if is_option(node):
            options += 1
    return longest, most, options


def show(name, aim, lines, function="", length="", options=""):
    print(f"{name:32} {lines:>6} {aim:>6}   {function:32} {length:>5} {options:>7}")


def show_python(name, aim, text):
    show(name, aim, len(text.splitlines()), *describe(text))


def main():
    show("file", "aim", "lines", "longest function", "lines", "options")
    for path in sorted(ROOT.glob("*.py")):
        text = formatted(path)
        show_python(path.name, AIMS.get(path.name, ""), text)
        if text.count(BANNER) == 2:
            show_python("  of it the shared block", AIMS["the shared block"], text.split(BANNER)[1])
    for path in sorted(ROOT.glob("tools/*.py")):
        show_python(f"tools/{path.name}", EACH_TOOL, formatted(path))
    for path in [*sorted(ROOT.glob("*.sh")), *sorted(ROOT.glob("scripts/*.sh"))]:
        name = str(path.relative_to(ROOT))
        show(name, AIMS.get(name, EACH_LAUNCHER), len(path.read_text().splitlines()))
    for name in ("README.md", "docs/DDP_TRAINING_GUIDE.md"):
        show(name, AIMS[name], len((ROOT / name).read_text().splitlines()))
    for pattern in ("tests/*.py", "benchmarks/*.py"):
        lines = 0
        for path in ROOT.glob(pattern):
            lines += len(formatted(path).splitlines())
        show(pattern, AIMS[pattern], lines)


if __name__ == "__main__":
    main()
