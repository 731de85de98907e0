"""Every script carries the same DDP block, and what else the scripts promise about their own text.

Checked for each ``*.py`` in the root of the repository (found by glob, none can opt out):
  * one block between the two marker lines, its bytes identical in every script;
  * the block is closed: it reads its own names, builtins and the module imports above it, which
    stand for the same in every script, and no script rebinds a name of the block;
  * each training script uses every top-level name of the block, directly or through another one;
  * outside the block, the same function or class name in two scripts means the same code;
  * section banners in order, and limits on the length of script, docstring, block and functions.

    python tests/test_shared_block.py --from train_ddp.py

writes the block of one script into all the others and says which of them changed.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import os
import re
import symtable
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BEGIN = (
    "# ===== shared DDP block: begin (identical in every script; tests/test_shared_block.py) ====="
)
END = "# ===== shared DDP block: end ====="
CHECKER = "test_ddp_setup.py"  # carries the block, but trains nothing: it need not use all of it
SECTIONS = [
    "Constants",
    "Arguments",
    "Data",
    "Model",
    "Loss",
    "<block>",
    "Evaluate",
    "Train",
    "Main",
]
CHECKER_SECTIONS = ["Constants", "Arguments", "Model", "<block>", "Checks", "Main"]
OPTIONAL = {"Constants"}
CHECKER_OPTIONAL = {"Constants", "Model"}
MAX_SCRIPT, MAX_BLOCK, MAX_DOCSTRING, MAX_FUNCTION, MAX_ENTRY = 2000, 760, 45, 60, 120
LONGER: dict[str, int] = {}  # scripts that may have more lines than MAX_SCRIPT, and why: none
ENTRY_POINTS = ("parse_args", "train", "main")  # these may have MAX_ENTRY lines

# Names that may mean different code in different scripts, each with its reason.
VARIANTS_ON_PURPOSE = {
    "parse_args": "every script has its own options",
    "load_data": "every task has its own data",
    "evaluate": "every task has its own metrics",
    "train": "every task has its own loop",
    "main": "every task builds its own model and data",
    "checkpoint": "every task has its own state",
    "Task": "every task shares other things",
}
STANDARD = {
    "parse_args",
    "load_data",
    "evaluate",
    "train",
    "main",
    "checkpoint",
    "Task",
}  # listed before two scripts exist


def split(text: str) -> tuple[str, str, int]:
    """The block, the script with the block blanked out, and the line of the begin marker."""
    lines = text.split("\n")
    if lines.count(BEGIN) != 1 or lines.count(END) != 1 or lines.index(BEGIN) > lines.index(END):
        found = f"{lines.count(BEGIN)} begin and {lines.count(END)} end markers"
        raise ValueError(f"needs one begin marker and one end marker after it; has {found}")
    begin, end = lines.index(BEGIN), lines.index(END)
    rest = lines[:begin] + [""] * (end - begin + 1) + lines[end + 1 :]
    return "\n".join(lines[begin : end + 1]), "\n".join(rest), begin + 1


def scope(source: str) -> tuple[set[str], set[str]]:
    """The names that ``source`` binds at top level, and the top-level names it reads anywhere."""
    top = symtable.symtable(source, "<source>", "exec")
    binds = {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported()}
    reads, tables = set(), [top]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            if symbol.is_declared_global() or (symbol.is_referenced() and symbol.is_global()):
                reads.add(symbol.get_name())
    reads |= {s.get_name() for s in top.get_symbols() if s.is_referenced()}
    return binds, {name for name in reads if name.isidentifier()}


def imports_above(rest: str, begin: int) -> dict[str, str]:
    """Name -> what it stands for, of the module-level imports above line ``begin``."""
    found = {}
    for statement in ast.parse(rest).body:
        if statement.lineno > begin or isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            continue
        for node in ast.walk(statement):  # also inside a module-level try or if
            for alias in node.names if isinstance(node, (ast.Import, ast.ImportFrom)) else []:
                name = alias.asname or alias.name.split(".")[0]
                module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                found[name] = module + (alias.name if alias.asname or module else name)
    return found


def closed(block: str, rest: str, begin: int) -> list[str]:
    binds, reads = scope(block)
    known = binds | set(dir(builtins)) | set(imports_above(rest, begin))
    known |= {"__name__", "__file__", "__doc__"}
    problems = [f"the block reads {name}, which it does not have" for name in sorted(reads - known)]
    rebound = sorted(binds & scope(rest)[0])
    return problems + [f"{name} of the block is bound outside it, too" for name in rebound]


def unused(block: str, rest: str) -> list[str]:
    """Top-level names of the block that the code outside it does not reach."""
    binds = scope(block)[0]
    reads_of: dict[str, set[str]] = {}
    todo = scope(rest)[1] & binds
    for statement in ast.parse(block).body:
        bound, read = scope(ast.unparse(statement))
        todo |= set() if bound else read & binds  # a bare statement runs at import
        for name in bound:
            reads_of[name] = reads_of.get(name, set()) | (read & binds)
    used = set()
    while todo:
        name = todo.pop()
        used.add(name)
        todo |= reads_of[name] - used
    return [f"{name} of the block is not used" for name in sorted(binds - used)]


def layout(name: str, text: str) -> list[str]:
    """Banners, and the limits on lengths."""
    problems, banners, lines = [], [], text.split("\n")
    for number, line in enumerate(lines, 1):
        banner = re.fullmatch(r"# ---- (\w+) -+", line)
        if line == BEGIN:
            banners.append("<block>")
        elif banner and len(line) == 100:
            banners.append(banner[1])
        elif line.lstrip().startswith("# ----"):
            problems.append(f"line {number} is no banner '# ---- Name ---…' to column 100")
    order = CHECKER_SECTIONS if name == CHECKER else SECTIONS
    optional = CHECKER_OPTIONAL if name == CHECKER else OPTIONAL
    expected = [section for section in order if section in banners or section not in optional]
    if banners != expected:
        problems.append(f"sections are {', '.join(banners)}; should be {', '.join(expected)}")

    tree, block = ast.parse(text), split(text)[0]
    docstring = ast.get_docstring(tree, clean=False)
    if docstring is None:
        problems.append("no docstring")
    sizes = [("the script", len(text.splitlines()), LONGER.get(name, MAX_SCRIPT))]
    sizes.append(("the docstring", (docstring or "").count("\n") + 1, MAX_DOCSTRING))
    sizes.append(("the block", len(block.splitlines()), MAX_BLOCK))
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            limit = MAX_ENTRY if node in tree.body and node.name in ENTRY_POINTS else MAX_FUNCTION
            sizes.append((f"{node.name}()", node.end_lineno - node.lineno + 1, limit))
    return problems + [f"{what} has {n} lines, limit {most}" for what, n, most in sizes if n > most]


def compare(scripts: dict[str, str], variants: dict[str, str]) -> list[str]:
    """What one script alone cannot show: equal blocks, imports, and code under equal names."""
    problems, definitions = [], {}
    parts = {name: split(text) for name, text in scripts.items()}
    first, *others = parts
    read_by_block = scope(parts[first][0])[1]
    for name in others:
        if parts[name][0] != parts[first][0]:
            problems.append(f"{name}: the block differs from that of {first}")
        mine, theirs = (imports_above(*parts[script][1:]) for script in (name, first))
        for used in sorted(read_by_block & set(mine) & set(theirs)):
            if mine[used] != theirs[used]:
                problems.append(f"{name}: {used} is {mine[used]}, but {theirs[used]} in {first}")
    for name, (_, rest, _) in parts.items():
        for node in ast.parse(rest).body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                definitions.setdefault(node.name, {})[name] = ast.dump(node)
    differing = {name for name, codes in definitions.items() if len(set(codes.values())) > 1}
    for name in sorted(differing - set(variants)):
        problems.append(f"{name} means different code in {', '.join(definitions[name])}")
    for name in sorted(set(variants) - differing - STANDARD):
        problems.append(f"VARIANTS_ON_PURPOSE lists {name}, but no two scripts differ in it")
    return problems


def check(scripts: dict[str, str], variants: dict[str, str]) -> list[str]:
    """Every problem of ``scripts`` (file name -> text)."""
    problems = []
    for name, text in scripts.items():
        try:
            block, rest, begin = split(text)
        except ValueError as error:
            return [f"{name}: {error}"]
        found = closed(block, rest, begin) + layout(name, text)
        found += [] if name == CHECKER else unused(block, rest)
        problems += [f"{name}: {problem}" for problem in found]
    return problems + compare(scripts, variants)


def read_scripts(folder: Path) -> dict[str, str]:
    return {path.name: path.read_bytes().decode() for path in sorted(folder.glob("*.py"))}


def copy_block(source: Path) -> list[str]:
    """Write the block of ``source`` into the scripts beside it; the names of those that changed."""
    block = split(source.read_bytes().decode())[0]
    new = {}
    for name, text in read_scripts(source.parent).items():
        try:
            old = split(text)[0]
        except ValueError as error:
            raise ValueError(f"{name}: {error}; nothing was written") from None
        if old != block:
            new[name] = text.replace(old, block)
    for name, text in new.items():
        path = source.parent / name
        temporary = path.with_name(f".{name}.tmp")
        temporary.write_bytes(text.encode())
        temporary.chmod(path.stat().st_mode)
        os.replace(temporary, path)
    return list(new)


# The scripts of this repository.


def test_scripts_are_found():
    assert "train_ddp.py" in read_scripts(ROOT)


@pytest.mark.parametrize("name", sorted(read_scripts(ROOT)))
def test_script(name):
    assert check({name: (ROOT / name).read_bytes().decode()}, {}) == []


def test_scripts_agree():
    assert compare(read_scripts(ROOT), VARIANTS_ON_PURPOSE) == []


# The check itself: a script that passes, and what must be reported once a text in it is replaced.


def banner(name: str) -> str:
    return f"# ---- {name} ".ljust(100, "-")


GOOD_BLOCK = f"""{BEGIN}
LIMIT: int = 3
@dataclasses.dataclass
class Dist:
    size: int = LIMIT
    names: list[str] = dataclasses.field(default_factory=list)
    def double(self) -> "Dist":
        factor = 2
        return type(self)(*[size * factor for size in [self.size]])
def helper(values, *rest, key=lambda pair: pair[0], **options):
    import json as lazy
    try:
        return lazy.dumps([key(v) for v in values if (w := v)] + [w, rest, options, os.sep])
    except ValueError as error:
        return str(error)
def setup(n):
    global LIMIT
    LIMIT = n
    def inner():
        nonlocal n
        n += 1
        return Dist(n, {{k: v for k, v in zip("ab", "cd", strict=True)}})
    return inner() if __name__ else helper([])
{END}"""
GOOD = f'''"""A script."""
from __future__ import annotations
import dataclasses
import os
{banner("Constants")}
{banner("Arguments")}
def parse_args(): return 1
{banner("Data")}
def batches(): return 2
{banner("Model")}
{banner("Loss")}
{GOOD_BLOCK}
{banner("Evaluate")}
{banner("Train")}
{banner("Main")}
def main(): return setup(parse_args())
'''
BROKEN = {  # case: (text in the script, what replaces it, part of the problem that is reported)
    "free name": ("return str(error)", "return missing", "block reads missing,"),
    "local of another function": ("if __name__", "if error", "block reads error,"),
    "lazy import of another function": ("if __name__", "if lazy", "block reads lazy,"),
    "comprehension variable": ("return inner()", "return v", "block reads v,"),
    "global never bound": ("global LIMIT", "global OTHER, LIMIT", "block reads OTHER,"),
    "name from below": ("if __name__", "if main", "block reads main,"),
    "annotation": ("size: int", "size: Size", "block reads Size,"),
    "import missing": ("import os\n", "", "block reads os,"),
    "import of another module": ("import os\n", "import posix as os\n", "os is posix, but os"),
    "rebound": ("def batches()", "def helper()", "helper of the block is bound outside"),
    "unused function": (END, f"def extra(): return extra\n{END}", "extra of the block is not used"),
    "unused constant": ("LIMIT: int", "OTHER = 2\nLIMIT: int", "OTHER of the block is not used"),
    "used by nobody outside": ("return setup(", "return (", "setup of the block is not used"),
    "differing bytes": ("LIMIT: int = 3", "LIMIT: int  = 3", "block differs"),
    "two blocks": (END, f"{END}\n{GOOD_BLOCK}", "has 2 begin and 2 end"),
    "no block": (BEGIN, "# begin", "has 0 begin and 1 end"),
    "marker changed": (END, END + " ", "has 1 begin and 0 end"),
    "same name, other code": ("batches(): return 2", "batches(): return 3", "batches means"),
    "banner missing": (banner("Data"), "", "sections are"),
    "banner too short": (banner("Data"), banner("Data")[:-1], "is no banner"),
    "banner twice": (banner("Data"), banner("Data") + "\n" + banner("Data"), "sections are"),
    "banner out of order": (banner("Train"), banner("Main"), "sections are"),
    "unknown banner": (banner("Data"), banner("Extras"), "sections are"),
    "long function": ("def main():", "def main():" + "\n" * 120, "main() has 121 lines"),
    "long inner function": ("n += 1", "n += 1" + "\n" * 58, "inner() has 62 lines"),
    "long docstring": ("A script.", "A script." + "\n" * 45, "the docstring has 46"),
    "no docstring": ('"""A script."""', "", "no docstring"),
    "long script": ('"""A script."""', '"""A script."""' + "\n" * 2000, "the script has 20"),
    "long block": (END, "\n" * 760 + END, "the block has 7"),
}  # fmt: skip


def test_checker_accepts():
    other = GOOD.replace("parse_args(): return 1", "parse_args(): return 9")
    assert check({"a.py": GOOD, "b.py": other}, VARIANTS_ON_PURPOSE) == []
    machine = GOOD.replace(banner("Data"), "").replace(banner("Loss"), "")
    machine = machine.replace(banner("Train"), "").replace(banner("Evaluate"), banner("Checks"))
    machine = machine.replace("return setup(", "return (")
    assert check({"a.py": GOOD, CHECKER: machine}, VARIANTS_ON_PURPOSE) == []


@pytest.mark.parametrize("case", BROKEN)
def test_checker_catches(case):
    old, new, expected = BROKEN[case]
    assert GOOD.count(old) == 1, "the example must contain the text once"
    problems = check({"a.py": GOOD, "b.py": GOOD.replace(old, new)}, VARIANTS_ON_PURPOSE)
    assert any(problem.startswith("b.py: ") or " b.py" in problem for problem in problems)
    assert expected in "\n".join(problems)


def test_checker_catches_stale_variants():
    problems = check({"a.py": GOOD, "b.py": GOOD}, VARIANTS_ON_PURPOSE | {"batches": "reason"})
    assert problems == ["VARIANTS_ON_PURPOSE lists batches, but no two scripts differ in it"]


def test_copy_block(tmp_path):
    for name in ("a.py", "b.py", "c.py"):
        (tmp_path / name).write_text(GOOD)
    newer = GOOD.replace("n += 1", "n += 2")
    (tmp_path / "b.py").write_text(newer)
    (tmp_path / "c.py").chmod(0o755)
    assert copy_block(tmp_path / "b.py") == ["a.py", "c.py"]
    assert read_scripts(tmp_path) == dict.fromkeys(("a.py", "b.py", "c.py"), newer)
    assert (tmp_path / "c.py").stat().st_mode & 0o777 == 0o755
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.py", "b.py", "c.py"]
    assert copy_block(tmp_path / "b.py") == []

    (tmp_path / "a.py").write_text(GOOD)
    (tmp_path / "c.py").write_text(GOOD + GOOD_BLOCK)
    with pytest.raises(ValueError, match="c.py: needs one begin marker"):
        copy_block(tmp_path / "b.py")
    assert (tmp_path / "a.py").read_text() == GOOD  # nothing written


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--from", dest="source", required=True, help="the script whose block is right"
    )
    source = ROOT / parser.parse_args().source
    if source.parent != ROOT or not source.is_file():
        parser.error(f"no script {source.name} in the root of the repository")
    try:
        changed = copy_block(source)
    except ValueError as error:
        sys.exit(str(error))
    print("\n".join(f"{name}: block replaced" for name in changed) or "all blocks are equal")
