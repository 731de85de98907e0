"""Every command that a document, a config, a wrapper or a docstring shows is parsed by the program
that it runs, as its launcher or wrapper would start it. Links and the files that are named exist.
"""

import importlib
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from unittest import mock

import pytest
from helpers import ROOT, import_tool
from test_wrappers import LOCAL

README = ROOT / "README.md"
GUIDE = ROOT / "docs" / "DDP_TRAINING_GUIDE.md"
SCRIPTS = sorted(path.name for path in ROOT.glob("*.py"))
TOOLS = sorted(f"tools/{path.name}" for path in ROOT.glob("tools/*.py"))
CONFIGS = sorted(f"configs/{path.name}" for path in ROOT.glob("configs/*") if path.is_file())
WRAPPERS = {Path(name).name: ROOT / name for name in LOCAL}  # those that start torchrun here
TEXTS = [README, *ROOT.glob("docs/*.md"), ROOT / "docs" / "quantumgrav_example.ipynb"]
DOCUMENTS = [README, GUIDE, *ROOT.glob("*.sh"), *ROOT.glob("scripts/run_*.sh")]
DOCUMENTS += [*[ROOT / name for name in CONFIGS + SCRIPTS]]

# Files and folders of users that commands name.
USER_PATHS = """ddp_config.json texts.txt pairs.jsonl pairs.json scored.json swapped.json
    check.json""".split()
# What looks like a file of the repository in running text.
OURS = (
    r"(?:configs|scripts|tools|docs|tests|benchmarks|data(?!/causal_sets))/[\w./-]+|"
    r"[\w-]+\.(?:py|sh|toml|md)|requirements[\w-]*\.txt|\.ci/run"
)
START = r"(?:[A-Z_]+=\S+ )*(?:python|torchrun|mpiexec|sbatch|qsub|\./[\w/]+\.sh)"  # of a command


def fenced(path, language):
    """The code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(), re.M | re.S)


def split_commands(block):
    """The commands of a block of bash, each as a list of words, without comments."""
    commands = []
    for line in block.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
        lexer.whitespace_split = True
        words = []
        for word in [*lexer, ";"]:
            if not set(word) <= set(";&|"):
                words.append(word)
            elif words:
                commands.append(words)
                words = []
    return commands


def find_program(words):
    """(words before, script, tool or wrapper, its arguments) of a command; else None."""
    for place, word in enumerate(words):
        before = words[:place]
        rest = words[place + 1 :]
        name = Path(word).name
        if name in WRAPPERS:
            return before, name, rest
        if name == "run_dpo_ddp_aurora.sh":
            return before, "run_dpo_ddp.py", ["--config=configs/run_dpo_ddp.yaml"]
        if name == "run_ddp_slurm.sh":
            if rest and rest[0].endswith(".py"):
                return before, rest[0], rest[1:]
            return before, "train_ddp.py", rest
        if re.fullmatch(r"(\./)?\w+\.py|tools/\w+\.py", word):  # not tests/ and benchmarks/
            return before, word.removeprefix("./"), rest
    return None


def commands_of(path):
    """The commands that run a script or a tool, one line each."""
    text = path.read_text()
    if path.suffix == ".md":
        lines = re.findall(rf"^\|.*`({START} [^`]+)`", text, re.M)
        for block in fenced(path, "bash"):
            lines += map(shlex.join, split_commands(block))
    elif path.suffix == ".yaml":
        lines = re.findall(rf"^# +(?:[A-Z][\w, ]+: )?({START} .*)$", text, re.M)
    elif path.suffix == ".sh":
        lines = re.findall(rf"^#   ({START} [^\[\n]*)$", text, re.M)  # usage lines have brackets
    else:
        docstring = text.split('"""')[1]
        lines = re.findall(rf"^ {{4}}({START} .*)$", docstring, re.M)
    lines = dict.fromkeys(lines)  # each once
    return [line for line in lines if find_program(split_commands(line)[0])]


def list_commands():
    """A case for each command of each document."""
    cases = []
    for path in DOCUMENTS:
        found = commands_of(path)
        assert found, f"{path.name} shows no command"
        cases += [pytest.param(line, id=f"{path.name}: {line}") for line in found]
    assert len(cases) > 80
    return cases


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder of a user: configs, data, files of his own, what the cell in the guide
    writes; and on PATH stand-ins: python finds 64 GPUs, torchrun prints its words."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (tmp_path / "data").symlink_to(ROOT / "data")
    for name in ("uniref50.fasta.gz", "motifs.fasta"):
        (tmp_path / name).touch()
    for program, text in {"torchrun": 'printf "%s\\n" "$@"', "python": "echo 64"}.items():
        (tmp_path / program).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    (cell,) = [block for block in fenced(GUIDE, "python") if "ddp_config.json" in block]
    exec(cell, {})
    return tmp_path


def after_wrapper(path, words):
    """(script, its arguments) that a wrapper gives to torchrun."""
    done = subprocess.run(["bash", path, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    place = [line.endswith(".py") for line in lines].index(True)
    return Path(lines[place]).name, lines[place + 1 :]


def parse(line):
    """The arguments that a command gives to the script or the tool that it runs."""
    (words,) = split_commands(line)
    _, program, arguments = find_program(words)
    if program in WRAPPERS:
        program, arguments = after_wrapper(WRAPPERS[program], arguments)
    assert program in SCRIPTS + TOOLS, f"no {program}"
    name = Path(program).stem
    module = import_tool(name) if program in TOOLS else importlib.import_module(name)
    arguments = [argument.replace("$seed", "0") for argument in arguments]
    with mock.patch.object(sys, "argv", [program, *arguments]):
        return module.parse_args()


@pytest.mark.parametrize("line", list_commands())
def test_command(line, folder):
    """The script takes the options, torchrun takes its own, and the files are there."""
    from torch.distributed.run import get_args_parser

    parse(line)
    (words,) = split_commands(line)
    before = find_program(words)[0]
    if "torchrun" in before:
        options = before[before.index("torchrun") + 1 :]
        get_args_parser().parse_args([*options, "script.py"])
    for word in words:
        value = word.rpartition("=")[2]
        if re.match(r"(\.?\.?/|\w+/)?\w[\w./-]*\.(ya?ml|json|jsonl|txt|sh|py)$", value):
            assert value in USER_PATHS or (ROOT / value).exists(), f"no {value} in the repository"


# --------------------------------------------------------------------------------------------------
# Commands and configs that users of the original scripts have, and what they must give

TORCHRUN = "torchrun --nproc_per_node=8"
NODES = "--nnodes=2 --node_rank=1 --master_addr=MASTER_IP --master_port=29500"
UNIREF50 = "./run_train_uniref50_ddp.sh"
DOCUMENTED = {  # what differs from the plain command of that script
    "./run_ddp.sh 8 True": {},
    "./run_ddp.sh 8 False": {"use_projection": False},
    f"{TORCHRUN} --master_port=29501 train_ddp.py --use_projection=False --batch_size=128": {
        "use_projection": False,
        "batch_size": 128,
    },
    f"{TORCHRUN} {NODES} train_ddp.py --skip_phase1 --phase1_lr=3e-5 --phase2_lr=1e-5": {
        "skip_phase1": True,
        "phase1_lr": 3e-5,
        "phase2_lr": 1e-5,
    },
    f"{TORCHRUN} train_ddp.py --save_to_artifacts --artifacts_dir=./my_models": {
        "save_to_artifacts": True,
        "artifacts_dir": "./my_models",
    },
    f"{UNIREF50} --fresh --project my_ddp_experiment --method simple": {
        "fresh": True,
        "wandb_project": "my_ddp_experiment",
        "sampling_method": "simple",
    },
    f"{UNIREF50} --config configs/my_ddp_config.yaml": {
        "batch_size": 12,
        "lr": 3e-4,
        "warmup": 30_000,
        "max_memory_per_gpu": 0.8,
        "gradient_checkpointing": True,
        "num_workers": 6,
        "log_every": 200,
    },
}
# the files of the document in one
UNIREF50_YAML = """
training: {batch_size: 12, accum: 4, num_workers: 6, log_freq: 200}
optim:
  lr: !!float "3e-4"
  warmup: 30000
memory:
  max_memory_per_gpu: 0.8
  gradient_checkpointing: True
"""


@pytest.mark.parametrize("line", DOCUMENTED)
def test_documented_command(line, folder):
    Path("configs/my_ddp_config.yaml").write_text(UNIREF50_YAML)
    plain = vars(parse(UNIREF50 if UNIREF50 in line else "python train_ddp.py"))
    expected = {**plain, **DOCUMENTED[line]}
    found = vars(parse(line))
    expected["config"] = found["config"]
    assert found == expected


def test_default_config(folder):
    """configs/train_ddp.yaml changes nothing, and leaves room for a global batch."""
    command = "python train_ddp.py --config configs/train_ddp.yaml"
    without = vars(parse("python train_ddp.py"))
    assert vars(parse(command)) == {**without, "config": "configs/train_ddp.yaml"}
    assert parse(f"{command} --global_batch_size=512").global_batch_size == 512


def test_loop():
    """The lines that the README shows stand in the script."""
    (lines,) = fenced(README, "python")
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
