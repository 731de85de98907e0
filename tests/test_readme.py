"""README.md, docs/ and configs/ against what is there: scripts, configs, paths, and every command.

A command is parsed by the parser of the script that it runs, after launchers and wrappers are taken off. In
commands a placeholder must be one of PLACEHOLDERS. Commands of tools/ go through the tool's own parser.
"""

from __future__ import annotations

import importlib
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))  # where the tools find each other
README, GUIDE = ROOT / "README.md", ROOT / "docs" / "DDP_TRAINING_GUIDE.md"
SCRIPTS = sorted(p.name for p in ROOT.glob("*.py"))
TOOLS = sorted(f"tools/{p.name}" for p in ROOT.glob("tools/*.py"))
BANNER = "# " + "=" * 98  # around the shared block: parse_args() of such a script reads sys.argv
CONFIGS = sorted(f"configs/{p.name}" for p in ROOT.glob("configs/*") if p.is_file())
MOST_LINES = 200
PLACEHOLDERS = {"HOST0", "HOST", "MASTER_IP", "ADDRESS", "B42A"}  # the last: a residue
# What looks like a file of the repository in running text.
OURS = (
    r"(?:configs|scripts|tools|docs|tests|benchmarks|data(?!/causal_sets))/[\w./-]+|"
    r"[\w-]+\.(?:py|sh|toml|md)|requirements[\w-]*\.txt|\.ci/run"
)
NAMES_SECTION = "## 20. Names in older documents"
# Files and folders of users that commands name; they are not part of the repository.
USER_PATHS = set("./my_teacher ./my_student ./my_models ddp_config.json texts.txt pairs.jsonl check.json".split())
USER_PATHS |= set("configs/my_ddp_config.yaml pairs.json best_model.pt scores.csv complex.cif scored.json".split())
USER_PATHS |= set("swapped.json outputs/dpo_ddp/split.json outputs/dpo_swapped/split.json".split())
DEFAULTS = {  # the options that users of train_ddp.py know by name, and their defaults
    "teacher_model": "infly/inf-retriever-v1-pro", "student_model": "sentence-transformers/all-mpnet-base-v2",
    "use_projection": True, "batch_size": 64, "phase1_epochs": 1, "phase2_epochs": 3, "phase1_lr": 2e-5,
    "phase2_lr": 5e-6, "output_dir": "./checkpoints", "max_samples_phase1": 100_000, "max_samples_phase2": 500_000,
    "skip_phase1": False, "skip_phase2": False, "save_to_artifacts": False, "artifacts_dir": "./artifacts",
}  # fmt: skip
TWO_NODES = (
    "torchrun --nproc_per_node=8 --nnodes=2 --node_rank={} --master_addr=MASTER_IP --master_port=29500 train_ddp.py"
)
DOCUMENTED = [  # commands that users of the original train_ddp.py have, word for word, and what they must give
    ("python train_ddp.py", {}),
    ("./run_ddp.sh 8 True", {"use_projection": True}),
    ("torchrun --nproc_per_node=8 train_ddp.py", {}),
    ("./run_ddp.sh 8 False", {"use_projection": False}),
    ("torchrun --nproc_per_node=8 train_ddp.py --use_projection=False", {"use_projection": False}),
    ("torchrun --nproc_per_node=4 train_ddp.py --batch_size=128", {"batch_size": 128}),
    ("torchrun --nproc_per_node=8 train_ddp.py --skip_phase1", {"skip_phase1": True}),
    (
        "torchrun --nproc_per_node=8 train_ddp.py --use_projection=False --phase1_lr=3e-5 --phase2_lr=1e-5",
        {"use_projection": False, "phase1_lr": 3e-5, "phase2_lr": 1e-5},
    ),
    (
        "torchrun --nproc_per_node=8 train_ddp.py --save_to_artifacts --artifacts_dir=./my_models",
        {"save_to_artifacts": True, "artifacts_dir": "./my_models"},
    ),
    ("torchrun --nproc_per_node=8 train_ddp.py --batch_size=32", {"batch_size": 32}),
    ("torchrun --nproc_per_node=8 --master_port=29501 train_ddp.py", {}),
    (TWO_NODES.format(0), {}),
    (TWO_NODES.format(1), {}),
]

UNIREF_FLAGS = {  # flags of run_train_uniref50_ddp.sh: options of the script
    "-w": "output_dir", "--work-dir": "output_dir", "-c": "config", "--config": "config",
    "-d": "datafile", "--datafile": "datafile", "-p": "wandb_project", "--project": "wandb_project",
    "-n": "wandb_name", "--name": "wandb_name", "-s": "seed", "--seed": "seed",
    "-m": "sampling_method", "--method": "sampling_method",
}  # fmt: skip

UNIREF_YAML = [  # what users of the original run_train_uniref50_ddp.py write into their config, and what it must give
    (
        'training:\n  batch_size: 16\n  accum: 4\noptim:\n  lr: !!float "1e-4"\n  warmup: 10000\n',
        {"lr": 1e-4, "warmup": 10_000},
    ),
    (
        'training:\n  batch_size: 12\n  accum: 4\noptim:\n  lr: !!float "3e-4"\n  warmup: 30000\n'
        "memory:\n  max_memory_per_gpu: 0.8\n",
        {"batch_size": 12, "lr": 3e-4, "warmup": 30_000, "max_memory_per_gpu": 0.8},
    ),
    (
        "training:\n  batch_size: 8\nmemory:\n  gradient_checkpointing: True\n",
        {"batch_size": 8, "gradient_checkpointing": True},
    ),
    ("training:\n  num_workers: 6\n  log_freq: 200\n", {"num_workers": 6, "log_every": 200}),
]
UNIREF_DEFAULTS = {
    "batch_size": 16, "accum": 4, "log_every": 100, "lr": 5e-5, "warmup": 5000,
    "gradient_checkpointing": False, "max_memory_per_gpu": 0.85, "lr_scaling": "linear", "fresh": False,
    "wandb_project": None, "wandb_name": None, "sampling_method": "rigorous", "seed": 42,
}  # fmt: skip
UNIREF_DOCUMENTED = [
    ("./run_train_uniref50_ddp.sh", {}),
    ("./run_train_uniref50_ddp.sh --config configs/my_ddp_config.yaml", UNIREF_YAML[0][1]),
    (
        "./run_train_uniref50_ddp.sh --fresh --project my_ddp_experiment --name ddp_test_20250918",
        {"fresh": True, "wandb_project": "my_ddp_experiment", "wandb_name": "ddp_test_20250918"},
    ),
    ("./run_train_uniref50_ddp.sh --method simple", {"sampling_method": "simple"}),
]


def fenced(path: Path, language: str) -> list[str]:
    """The code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(encoding="utf-8"), re.M | re.S)


def split_commands(block: str) -> Iterator[list[str]]:
    """The commands of a block of bash as words; comments and redirections removed."""
    for line in block.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set(";&|"):
                if words:
                    yield words
                words = []
            elif word in ("bash", "sh", "-c") or not re.fullmatch(r"\d?>{1,2}.*", word):
                words.append(word)


def run_of(words: list[str]) -> tuple[list[str], str, list[str]] | None:
    """(launcher's words, script, its arguments) of a command that runs a script, else None."""
    if "-c" in words[:-1] and words[0] != "python" and not any(Path(w).name in SCRIPTS for w in words):
        for inner in split_commands(words[words.index("-c") + 1]):
            if found := run_of(inner):
                return words[: words.index("-c")] + found[0], *found[1:]
        return None
    for place, word in enumerate(words):
        before, rest = words[:place], words[place + 1 :]
        if Path(word).name == "run_ddp_slurm.sh":
            script = rest.pop(0) if rest and rest[0].endswith(".py") else "train_ddp.py"
            return before, script, rest
        if Path(word).name == "run_train_uniref50_ddp.sh":
            return before, "run_train_uniref50_ddp.py", uniref_options(rest)
        if Path(word).name == "run_dpo_ddp_aurora.sh":
            return before, "run_dpo_ddp.py", ["--config=configs/run_dpo_ddp.yaml"]
        if Path(word).name == "run_dpo_ddp_local.sh":
            return before, "run_dpo_ddp.py", rest[rest[:1] != [] and rest[0].isdigit() :]
        if Path(word).name == "run_ddp.sh":
            values = []
            while rest and len(values) < 2 and "=" not in rest[0] and not rest[0].startswith("--"):
                values.append(rest.pop(0))
            assert not values or values[0].isdigit(), f"run_ddp.sh {values}: a number of processes comes first"
            return before, "train_ddp.py", [f"--use_projection={v}" for v in values[1:]] + rest
        if word in TOOLS:
            return before, word, rest
        if word.endswith(".py"):  # tests/ and benchmarks/ have parsers of their own
            return None if "/" in word.removeprefix("./") else (before, Path(word).name, rest)
    return None


def uniref_options(words: list[str]) -> list[str]:
    """What run_train_uniref50_ddp.sh gives to the script for its own arguments (a run that is not resumed)."""
    options, words = [], list(words)
    while words and (word := words.pop(0)) != "--":
        name, equals, value = word.partition("=")
        if own := UNIREF_FLAGS.get(name):
            options.append(f"--{own}={value if equals else words.pop(0)}")
        elif name == "--gpus":
            assert (value if equals else words.pop(0)).isdigit(), f"--gpus takes a number: {word}"
        elif name != "--yes":
            options.append(word)
    if not any(option.startswith("--config=") for option in options):
        options.insert(0, "--config=configs/config_uniref50_ddp.yaml")
    return options + words


def commands_of(path: Path) -> list[str]:
    """The commands of a document, a wrapper or a script that run one of our scripts, as one line each."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        lines = [shlex.join(w) for block in fenced(path, "bash") for w in split_commands(block)]
        for row in re.findall(r"^\|.*$", text, re.M):
            lines += re.findall(r"`((?:python|torchrun|\./[\w/]+\.sh) [^`]+)`", row)
    elif path.suffix == ".sh":
        # examples; usage lines have brackets
        lines = re.findall(r"^# +((?:[A-Z_]+=\S+ )*(?:\./(?:scripts/)?run_\S+\.sh|sbatch|qsub) [^\[\n]*)$", text, re.M)
    elif path.suffix == ".yaml":
        lines = re.findall(r"^# *(?:Run: )?((?:\./(?:scripts/)?run_|torchrun |python ).*)$", text, re.M)
    else:
        docstring = importlib.import_module(path.stem).__doc__
        if BANNER in text:
            return re.findall(r"^ {4}((?:python|torchrun|mpiexec) .*)$", docstring, re.M)
        run = re.search(r"^Run\n((?: +.*\n)+)", docstring, re.M)
        lines = [re.split(r"\s{2,}", line.strip())[0] for line in run[1].splitlines()] if run else []
    return [line for line in dict.fromkeys(lines) if run_of(next(split_commands(line), [""]))]


WRAPPERS = sorted([*ROOT.glob("*.sh"), *ROOT.glob("scripts/*.sh")])
DOCUMENTS = [README, GUIDE, *(ROOT / c for c in CONFIGS), *WRAPPERS, *(ROOT / s for s in SCRIPTS)]
COMMANDS = [pytest.param(line, id=f"{p.name}: {line}") for p in DOCUMENTS for line in commands_of(p)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder of a user: the configs of the repository and what the guide's notebook cell writes."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (tmp_path / "configs/my_ddp_config.yaml").write_text(UNIREF_YAML[0][0])
    (tmp_path / "best_model.pt").touch()  # run_dpo_ddp.py looks for it before it starts
    monkeypatch.chdir(tmp_path)
    for block in fenced(GUIDE, "python"):
        if "ddp_config.json" in block:
            exec(block, {})
    assert (tmp_path / "ddp_config.json").exists()
    return tmp_path


def parse(line: str, capsys):
    """The arguments that a command line gives to the script it runs."""
    (words,) = split_commands(line)
    _, script, arguments = run_of(words)
    assert script in SCRIPTS + TOOLS, f"no script {script}: {line}"
    arguments = [argument.rstrip("\\").replace("$seed", "0") for argument in arguments]
    module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    try:
        if BANNER in (ROOT / script).read_text(encoding="utf-8"):
            return parse_sys_argv(module, [script, *arguments])
        return module.parse_args(arguments)
    except SystemExit:
        pytest.fail(f"{line}\n{capsys.readouterr().err}")


def parse_sys_argv(script, words: list[str]):
    """The arguments of a script whose parse_args() takes none, and which raises its own error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words)
        try:
            return script.parse_args()
        except script.InputError as error:
            pytest.fail(f"{words}\n{error}")


def test_commands_are_found():
    """The extraction sees the documents: what it does not see, it cannot check."""
    assert len(commands_of(README)) >= 10 and len(commands_of(GUIDE)) >= 40
    for path in DOCUMENTS:
        if path.suffix in (".yaml", ".sh") or path.name in ("train_ddp.py", "run_train_quantumgrav_ddp.py"):
            assert commands_of(path), f"{path.name} shows no command"


@pytest.mark.parametrize("line", COMMANDS)
def test_command_parses(line, folder, capsys):
    parse(line, capsys)
    (words,) = split_commands(line)
    for word in words:
        value = word.rpartition("=")[2]
        name = value.partition(":")[0]
        assert not re.search(r"[<>]|@@|\.\.\.|…", word), f"placeholder {word!r} in: {line}"
        if re.fullmatch(r"[A-Z][A-Z0-9_]+", name) and not word.startswith("NCCL_DEBUG="):
            assert name in PLACEHOLDERS | {"MASTER_ADDR", "MASTER_PORT"}, f"unknown placeholder {name} in: {line}"
        if re.match(r"(\.?\.?/|\w+/)?\w[\w./-]*\.(ya?ml|json|jsonl|txt|sh|py)$", value):
            assert value in USER_PATHS or (ROOT / value).exists(), f"no {value} in the repository: {line}"


@pytest.mark.parametrize("line", COMMANDS)
def test_launcher_flags(line):
    """torchrun's own parser takes what stands before the script."""
    from torch.distributed.run import get_args_parser

    (words,) = split_commands(line)
    before, _, _ = run_of(words)
    if "torchrun" in before and "sbatch" not in before:
        get_args_parser().parse_args([*before[before.index("torchrun") + 1 :], "script.py"])


@pytest.mark.parametrize(("line", "expected"), DOCUMENTED)
def test_documented_command(line, expected, folder, capsys):
    args = vars(parse(line, capsys))
    assert {name: args[name] for name in DEFAULTS} == DEFAULTS | expected


@pytest.mark.parametrize(("line", "expected"), UNIREF_DOCUMENTED)
def test_documented_command_of_uniref50(line, expected, folder, capsys):
    args = vars(parse(line, capsys))
    wanted = UNIREF_DEFAULTS | expected
    assert {name: args[name] for name in wanted} == wanted


@pytest.mark.parametrize(("text", "expected"), UNIREF_YAML)
def test_documented_yaml_of_uniref50(text, expected, folder, capsys):
    Path("configs/my_ddp_config.yaml").write_text(text)
    args = vars(parse("./run_train_uniref50_ddp.sh --config configs/my_ddp_config.yaml", capsys))
    wanted = UNIREF_DEFAULTS | expected
    assert {name: args[name] for name in wanted} == wanted


@pytest.mark.parametrize("config", CONFIGS)
def test_config(config, folder, capsys):
    """Loads through the script of its launch line, which names it; an expected result; every key explained."""
    lines = (ROOT / config).read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# Run: ") and f"--config {config}" in lines[0]
    assert lines[1].startswith("# Expected: ")
    args = parse(lines[0].removeprefix("# Run: "), capsys)
    assert args.config == config
    for line in lines:
        assert not re.match(r"\s*[\w.]+:\s*[^\s#]", line) or re.search(r"\s# \S", line), f"no comment: {line}"


def test_default_config_is_the_defaults(folder):
    """configs/train_ddp.yaml changes nothing, has every documented option, and leaves room for a global batch."""
    train_ddp = importlib.import_module("train_ddp")
    keys = yaml.safe_load((ROOT / "configs/train_ddp.yaml").read_text(encoding="utf-8"))
    given = ["train_ddp.py", "--config", "configs/train_ddp.yaml"]
    plain, read = (vars(parse_sys_argv(train_ddp, words)) for words in (["train_ddp.py"], given))
    assert {name: plain[name] for name in DEFAULTS} == DEFAULTS
    assert {name: read[name] for name in keys} == {name: plain[name] for name in keys}
    assert list(keys)[: len(DEFAULTS)] == list(DEFAULTS)
    assert parse_sys_argv(train_ddp, [*given, "--global_batch_size=512"]).global_batch_size == 512


def test_table_lists_what_exists():
    """One row or more per script and exactly one per config, nothing else."""
    rows = re.findall(r"^\| (`[\w.]+\.py`) \|(.*)$", README.read_text(encoding="utf-8"), re.M)
    assert sorted({script.strip("`") for script, _ in rows}) == SCRIPTS
    cells = [row.split("|") for _, row in rows]
    assert sorted(c for row in cells for c in re.findall(r"`([^`]+)`", row[1])) == CONFIGS
    for (script, _), row in zip(rows, cells, strict=True):
        assert len(row) == 5 and all(cell.strip() for cell in row[:4]), f"empty cell in the row of {script}"
        for config in re.findall(r"`([^`]+)`", row[1]):
            assert config in row[2], f"the command of {config} does not name it"


def test_readme_has_a_section_per_script():
    sections = re.findall(r"^## (.*)$", README.read_text(encoding="utf-8"), re.M)
    assert set(SCRIPTS) <= set(sections)


def test_readme_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


def test_first_commands():
    """Two commands that need nothing but Python: one trains, one tests."""
    first, second = fenced(README, "bash")[:2]
    start = "python3 -m venv .venv && . .venv/bin/activate && pip install -r {} && {}\n"
    assert first == start.format("requirements.txt", "./run_ddp.sh 2 True --config configs/train_ddp_quickstart.yaml")
    assert second == start.format("requirements-dev.txt", "python -m pytest")


@pytest.mark.parametrize("path", [README, GUIDE], ids=lambda p: p.name)
def test_paths_and_links(path):
    """Files that the text names exist, and links point at files and headings that exist."""
    text = path.read_text(encoding="utf-8")
    body, _, rest = text.partition(NAMES_SECTION)
    assert rest or path == README
    names, heading, after = rest.partition("\n## ")
    body += heading + after
    body += "".join(row.split("|", 2)[2] for row in names.splitlines(keepends=True) if row.startswith("|"))  # our names
    for line in body.splitlines():
        for name in re.findall(rf"`(?:python |\./)?({OURS})(?: [^`]*)?`", line):
            assert (ROOT / name).exists(), f"{path.name}: no {name}: {line}"
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, anchor = target.partition("#")
        goal = (path.parent / file) if file else path
        assert goal.exists(), f"{path.name}: dead link {target}"
        headings = re.findall(r"^#+ (.*)$", goal.read_text(encoding="utf-8") if anchor else "", re.M)
        slugs = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
        assert not anchor or anchor in slugs, f"{path.name}: no heading for {target}"


@pytest.mark.parametrize("path", [README, GUIDE], ids=lambda p: p.name)
def test_nothing_is_announced_as_to_come(path):
    assert "(comes with" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", [README, GUIDE, *(ROOT / c for c in CONFIGS)], ids=lambda p: p.name)
def test_every_figure_is_filled_in(path):
    assert re.findall(r"@@\w+@@", path.read_text(encoding="utf-8")) == []
