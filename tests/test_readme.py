"""Every command that a document, a config, a wrapper or a docstring shows is parsed by its program,
as its launcher or wrapper would start it. Links and the files that are named exist."""

import importlib
import re
import subprocess
import textwrap
from pathlib import Path
from unittest import mock

import pytest
from helpers import ROOT, import_tool
from test_wrappers import LOCAL

README = ROOT / "README.md"
GUIDE = ROOT / "docs" / "DDP_TRAINING_GUIDE.md"
WRAPPERS = {Path(name).name: ROOT / name for name in LOCAL}  # those that start torchrun here
TEXTS = [README, *ROOT.glob("docs/*.md"), ROOT / "docs" / "quantumgrav_example.ipynb"]
DOCUMENTS = [README, GUIDE, *ROOT.glob("configs/*.yaml"), *ROOT.glob("*.sh")]
DOCUMENTS += [*ROOT.glob("scripts/run_*.sh"), *ROOT.glob("*.py"), *ROOT.glob("tools/*.py")]

# Files of users that commands name.
USER_PATHS = "ddp_config.json texts.txt pairs.jsonl pairs.json swapped.json check.json".split()
# Commands that users of the original scripts have.
DOCUMENTED = """
./run_ddp.sh 8 False
torchrun --master_port=29501 train_ddp.py --use_projection=False --batch_size=128
torchrun --nnodes=2 --node_rank=1 --master_addr=IP train_ddp.py --skip_phase1 --phase2_lr=1e-5
torchrun train_ddp.py --save_to_artifacts --artifacts_dir=./my_models
./run_train_uniref50_ddp.sh -w out -s 7 --fresh --project mine -n first --method simple
"""
# What looks like a file of the repository in running text.
OURS = (
    r"(?:configs|scripts|tools|docs|tests|benchmarks|data(?!/causal_sets))/[\w./-]+|"
    r"[\w-]+\.(?:py|sh|toml|md)|requirements[\w-]*\.txt|\.ci/run"
)
# A command: variables, a launcher or a wrapper, and words up to what ends it.
COMMAND = (
    r"(?<![\w./-])((?:[A-Z_]+=\S+ )*"
    r"(?:python|torchrun|mpirun|mpiexec|srun|flux|sbatch|qsub|\./[\w/]+\.sh) [^\n`;&|#[('\"]+)"
)


def find_program(words):
    """(words before, script, tool or wrapper, its arguments) of a command; else None."""
    for place, word in enumerate(words):
        before = words[:place]
        rest = words[place + 1 :]
        name = Path(word).name
        if name in WRAPPERS:
            return before, name, rest
        if re.fullmatch(r"(\./)?\w+\.py|tools/\w+\.py", word):  # not tests/ and benchmarks/
            return before, word.removeprefix("./"), rest
    return None


def commands_of(path):
    """Those that run a script or a tool, each once."""
    text = path.read_text()
    if path.suffix == ".py":
        text = text.split('"""')[1]
    elif path.suffix == ".sh":
        text = text.partition("\nset -e")[0]
    found = re.findall(COMMAND, re.sub(r"\\+\n", " ", text))
    return [line for line in dict.fromkeys(found) if find_program(line.split())]


def list_commands():
    cases = DOCUMENTED.strip().splitlines()
    for path in DOCUMENTS:
        cases += [pytest.param(line, id=f"{path.name}: {line}") for line in commands_of(path)]
    assert len(cases) > 100
    return cases


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A user's working folder; and stand-ins: python finds 64 GPUs, torchrun prints its words."""
    for name in ("configs", "data"):
        (tmp_path / name).symlink_to(ROOT / name)
    for program, text in {"torchrun": 'printf "%s\\n" "$@"', "python": "echo 64"}.items():
        (tmp_path / program).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    cells = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.M | re.S)
    exec(next(cell for cell in cells if "ddp_config.json" in cell), {})


def after_wrapper(path, words):
    """(script, its arguments) that a wrapper gives to torchrun."""
    done = subprocess.run(["bash", path, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    place = [line.endswith(".py") for line in lines].index(True)
    return Path(lines[place]).name, lines[place + 1 :]


@pytest.mark.parametrize("line", list_commands())
def test_command(line, folder):
    """The script takes the options, torchrun takes its own, and the files are there."""
    from torch.distributed.run import get_args_parser

    words = line.replace("$seed", "0").split()
    before, program, arguments = find_program(words)
    if "torchrun" in before:
        options = before[before.index("torchrun") + 1 :]
        get_args_parser().parse_args([*options, "script.py"])

    if program in WRAPPERS:
        program, arguments = after_wrapper(WRAPPERS[program], arguments)
    name = Path(program).stem
    module = import_tool(name) if program.startswith("tools/") else importlib.import_module(name)
    with mock.patch("sys.argv", [program, *arguments]):
        module.parse_args()

    for word in words:
        value = word.rpartition("=")[2]
        if re.match(r"(\.?\.?/|\w+/)?\w[\w./-]*\.(ya?ml|json|jsonl|txt|sh|py)$", value):
            assert value in USER_PATHS or (ROOT / value).exists(), f"no {value} in the repository"


def test_loop():
    """The lines that the README shows stand in the script."""
    lines = re.search(r"^```python\n(.*?)^```$", README.read_text(), re.M | re.S)[1]
    script = (ROOT / "run_train_quantumgrav_ddp.py").read_text()
    assert textwrap.indent(lines, 8 * " ") in script


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_files_that_a_text_names(path):
    """Those of the repository are there, and so is what a link leads to."""
    text = path.read_text()
    names = re.findall(rf"`(?:python |\./)?({OURS})(?: [^`\n]*)?`", text)
    if path.name == "MIGRATION.md":  # it names files of the original repositories
        names = []
    assert [name for name in names if not (ROOT / name).exists()] == []
    links = re.findall(r"\]\(([^)\s#]+)[^)\s]*\)", text)
    assert [link for link in links if "://" not in link and not (path.parent / link).exists()] == []
