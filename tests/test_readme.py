"""README.md, the guide, configs/ and docstrings against what is there: scripts, options, files and
links.

Every command that they show is parsed by the script that it runs, as its launcher or wrapper would
start it. Commands of tools/ go through the tool's parser.
"""

import importlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from unittest import mock

import pytest
import yaml
from helpers import ROOT, import_tool

README = ROOT / "README.md"
GUIDE = ROOT / "docs" / "DDP_TRAINING_GUIDE.md"
RESULTS = ROOT / "docs" / "RESULTS.md"
MIGRATION = ROOT / "docs" / "MIGRATION.md"
NOTEBOOK = ROOT / "docs" / "quantumgrav_example.ipynb"
SCRIPTS = sorted(path.name for path in ROOT.glob("*.py"))
TOOLS = sorted(f"tools/{path.name}" for path in ROOT.glob("tools/*.py"))
WRAPPERS = sorted([*ROOT.glob("*.sh"), *ROOT.glob("scripts/run_*.sh")])
CONFIGS = sorted(f"configs/{path.name}" for path in ROOT.glob("configs/*") if path.is_file())
DOCUMENTS = [README, GUIDE, RESULTS, *WRAPPERS, *[ROOT / name for name in CONFIGS + SCRIPTS]]

# Files and folders of users that commands name.
USER_PATHS = """ddp_config.json texts.txt pairs.jsonl pairs.json scored.json swapped.json
    check.json""".split()
# What looks like a file of the repository in running text.
OURS = (
    r"(?:configs|scripts|tools|docs|tests|benchmarks|data(?!/causal_sets))/[\w./-]+|"
    r"[\w-]+\.(?:py|sh|toml|md)|requirements[\w-]*\.txt|\.ci/run"
)

# --------------------------------------------------------------------------------------------------
# Commands in documents

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


# wrappers that start torchrun on this machine
LOCAL = {
    "run_ddp.sh": ROOT / "run_ddp.sh",
    "run_train_uniref50_ddp.sh": ROOT / "run_train_uniref50_ddp.sh",
    "run_dpo_ddp_local.sh": ROOT / "scripts" / "run_dpo_ddp_local.sh",
}


def after_wrapper(name, words):
    """(script, its arguments) that a wrapper gives to torchrun, where there are 64 GPUs."""
    with tempfile.TemporaryDirectory() as folder:
        for program, text in {"torchrun": 'printf "%s\\n" "$@"', "python": "echo 64"}.items():
            path = Path(folder, program)
            path.write_text(f"#!/bin/sh\n{text}\n")
            path.chmod(0o755)
        command = ["bash", LOCAL[name], *words]
        env = {"PATH": f"{folder}:/usr/bin:/bin"}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    place = [number for number, line in enumerate(lines) if line.endswith(".py")][0]
    return Path(lines[place]).name, lines[place + 1 :]


def find_program(words):
    """(words before, script, tool or wrapper, its arguments) of a command; else None."""
    for place, word in enumerate(words):
        before = words[:place]
        rest = words[place + 1 :]
        name = Path(word).name
        if name in LOCAL:
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
    """The commands of a document, a config, a wrapper or a docstring that run a script or a tool,
    one line each."""
    text = path.read_text()
    lines = []
    if path.suffix == ".md":
        for block in fenced(path, "bash"):
            for words in split_commands(block):
                lines.append(shlex.join(words))
        for row in re.findall(r"^\|.*$", text, re.M):
            lines += re.findall(rf"`({START} [^`]+)`", row)
    elif path.suffix == ".yaml":
        lines = re.findall(rf"^# +(?:[A-Z][\w, ]+: )?({START} .*)$", text, re.M)
    elif path.suffix == ".sh":
        lines = re.findall(rf"^#   ({START} [^\[\n]*)$", text, re.M)  # usage lines have brackets
    else:
        docstring = text.split('"""')[1]
        lines = re.findall(rf"^ {{4}}({START} .*)$", docstring, re.M)
    lines = dict.fromkeys(lines)  # each once
    return [line for line in lines if find_program(split_commands(line)[0])]


def parse(line):
    """The arguments that a command gives to the script or the tool that it runs."""
    (words,) = split_commands(line)
    _, program, arguments = find_program(words)
    if program in LOCAL:
        program, arguments = after_wrapper(program, arguments)
    assert program in SCRIPTS + TOOLS, f"no {program}"
    name = Path(program).stem
    module = import_tool(name) if program in TOOLS else importlib.import_module(name)
    arguments = [argument.replace("$seed", "0") for argument in arguments]
    with mock.patch.object(sys, "argv", [program, *arguments]):
        return module.parse_args()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder of a user: configs, data, files of his own, and what the cell in the guide
    writes."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (tmp_path / "data").symlink_to(ROOT / "data")
    for name in ("uniref50.fasta.gz", "motifs.fasta"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    for block in fenced(GUIDE, "python"):
        if "ddp_config.json" in block:
            exec(block, {})
    assert (tmp_path / "ddp_config.json").exists()
    return tmp_path


def list_commands():
    """A case for each command of each document."""
    cases = []
    for path in DOCUMENTS:
        for line in commands_of(path):
            cases.append(pytest.param(line, id=f"{path.name}: {line}"))
    return cases


def test_commands_are_found():
    assert len(commands_of(README)) >= 10
    assert len(commands_of(GUIDE)) >= 35
    for path in DOCUMENTS[3:]:
        assert commands_of(path), f"{path.name} shows no command"


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

DEFAULTS = {
    "teacher_model": "infly/inf-retriever-v1-pro",
    "student_model": "sentence-transformers/all-mpnet-base-v2",
    "use_projection": True,
    "batch_size": 64,
    "phase1_epochs": 1,
    "phase2_epochs": 3,
    "phase1_lr": 2e-5,
    "phase2_lr": 5e-6,
    "output_dir": "./checkpoints",
    "max_samples_phase1": 100_000,
    "max_samples_phase2": 500_000,
    "skip_phase1": False,
    "skip_phase2": False,
    "save_to_artifacts": False,
    "artifacts_dir": "./artifacts",
}
UNIREF50_DEFAULTS = {
    "batch_size": 16,
    "accum": 4,
    "log_every": 100,
    "lr": 5e-5,
    "warmup": 5000,
    "gradient_checkpointing": False,
    "max_memory_per_gpu": 0.85,
    "lr_scaling": "linear",
    "fresh": False,
    "wandb_project": None,
    "wandb_name": None,
    "sampling_method": "rigorous",
    "seed": 42,
}
TORCHRUN = "torchrun --nproc_per_node=8"
NODES = "--nnodes=2 --node_rank={} --master_addr=MASTER_IP --master_port=29500"
UNIREF50 = "./run_train_uniref50_ddp.sh"
DOCUMENTED = {
    "python train_ddp.py": {},
    "./run_ddp.sh 8 True": {},
    "./run_ddp.sh 8 False": {"use_projection": False},
    f"{TORCHRUN} train_ddp.py --use_projection=False": {"use_projection": False},
    "torchrun --nproc_per_node=4 train_ddp.py --batch_size=128": {"batch_size": 128},
    f"{TORCHRUN} train_ddp.py --skip_phase1": {"skip_phase1": True},
    f"{TORCHRUN} train_ddp.py --phase1_lr=3e-5 --phase2_lr=1e-5": {
        "phase1_lr": 3e-5,
        "phase2_lr": 1e-5,
    },
    f"{TORCHRUN} train_ddp.py --save_to_artifacts --artifacts_dir=./my_models": {
        "save_to_artifacts": True,
        "artifacts_dir": "./my_models",
    },
    f"{TORCHRUN} --master_port=29501 train_ddp.py": {},
    f"{TORCHRUN} {NODES.format(1)} train_ddp.py": {},
    UNIREF50: {},
    f"{UNIREF50} --fresh --project my_ddp_experiment --name ddp_test_20250918": {
        "fresh": True,
        "wandb_project": "my_ddp_experiment",
        "wandb_name": "ddp_test_20250918",
    },
    f"{UNIREF50} --method simple": {"sampling_method": "simple"},
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
    args = vars(parse(line))
    defaults = UNIREF50_DEFAULTS if UNIREF50 in line else DEFAULTS
    expected = {**defaults, **DOCUMENTED[line]}
    assert {name: args[name] for name in expected} == expected


def test_default_config_is_the_defaults(folder):
    """configs/train_ddp.yaml changes nothing, begins with every documented option, and leaves room
    for a global batch."""
    command = "python train_ddp.py --config configs/train_ddp.yaml"
    keys = yaml.safe_load((ROOT / "configs" / "train_ddp.yaml").read_text())
    without = vars(parse("python train_ddp.py"))
    args = vars(parse(command))
    assert {name: args[name] for name in keys} == {name: without[name] for name in keys}
    assert list(keys)[: len(DEFAULTS)] == list(DEFAULTS)
    assert parse(f"{command} --global_batch_size=512").global_batch_size == 512


# --------------------------------------------------------------------------------------------------
# Configs and texts


@pytest.mark.parametrize("config", CONFIGS)
def test_config(config, folder):
    """Its first line runs it, the second says what to expect, and every key is explained."""
    lines = (ROOT / config).read_text().splitlines()
    assert lines[0].startswith("# Run: ")
    assert lines[1].startswith("# Expected: ")
    assert f"--config {config}" in lines[0]
    assert parse(lines[0].removeprefix("# Run: ")).config == config
    for line in lines:
        is_key = re.match(r"\s*[\w.]+:\s*[^\s#]", line)
        if is_key:
            assert re.search(r"\s# \S", line), f"no comment: {line}"


def test_table_lists_what_exists():
    """A row for each script; the README or the guide names each config."""
    rows = re.findall(r"^\| `([\w.]+\.py)` \|(.*)\|$", README.read_text(), re.M)
    assert sorted(script for script, _ in rows) == SCRIPTS
    for script, row in rows:
        cells = [cell.strip() for cell in row.split("|")]
        assert len(cells) == 3 and all(cells), f"the row of {script} has other columns"
    shown = README.read_text() + GUIDE.read_text()
    assert [name for name in CONFIGS if name not in shown] == []


def test_readme_is_short():
    """Two commands that need nothing but Python, and the loop as it stands in a script."""
    text = README.read_text()
    assert len(text.splitlines()) <= 115
    train, test = fenced(README, "bash")[:2]
    environment = "python3 -m venv .venv && . .venv/bin/activate && pip install -r"
    quickstart = "./run_ddp.sh 2 True --config configs/train_ddp_quickstart.yaml"
    assert train == f"{environment} requirements.txt && {quickstart}\n"
    assert test == f"{environment} requirements-dev.txt && python -m pytest\n"
    (loop,) = fenced(README, "python")
    assert textwrap.indent(loop, " " * 8) in (ROOT / "run_train_quantumgrav_ddp.py").read_text()


@pytest.mark.parametrize("path", [README, GUIDE, RESULTS], ids=lambda path: path.name)
def test_paths(path):
    """Files of the repository that the text names are there."""
    for name in re.findall(rf"`(?:python |\./)?({OURS})(?: [^`\n]*)?`", path.read_text()):
        assert (ROOT / name).exists(), f"no {name}"


def slugs(path):
    """The anchors of a document's headings."""
    found = []
    for heading in re.findall(r"^#+ (.*)$", path.read_text(), re.M):
        found.append(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-"))
    return found


@pytest.mark.parametrize(
    "path", [README, GUIDE, RESULTS, MIGRATION, NOTEBOOK], ids=lambda path: path.name
)
def test_links(path):
    """Those inside the repository lead to files and headings that are there."""
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        goal = path.parent / file if file else path
        assert goal.exists(), f"dead link {target}"
        if anchor:
            assert anchor in slugs(goal), f"no heading for {target}"
