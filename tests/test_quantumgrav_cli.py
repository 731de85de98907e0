"""run_train_quantumgrav_ddp.py as a user calls it: options, configs, several runs, launchers, and what a run writes."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from helpers import ROOT, free_port

script = importlib.import_module("run_train_quantumgrav_ddp")
SCRIPT, SEED_CONFIG = str(ROOT / "run_train_quantumgrav_ddp.py"), ROOT / "configs" / "config_quantumgrav_ddp.yaml"


def refused(capsys, *argv: str) -> str:
    """The one line of error, at exit status 2."""
    with pytest.raises(SystemExit) as caught:
        script.parse_args(list(argv))
    said = capsys.readouterr()
    assert caught.value.code == 2 and not said.out and said.err.count("\n") == 1, said
    return said.err


def config(path: Path, text) -> str:
    path.write_text(text if isinstance(text, str) else yaml.safe_dump(text))
    return f"--config={path}"


# ---- Options -----------------------------------------------------------------------------------------


def leaves(tree: dict, prefix: str = "") -> dict:
    """{dotted key: value}; what is a value of its own though it is a mapping stays one."""
    found = {}
    for key, value in tree.items():
        whole = isinstance(value, dict) and key not in ("tasks", "task_weights")
        found |= leaves(value, f"{prefix}{key}.") if whole else {f"{prefix}{key}": value}
    return found


OTHER = {  # a value that differs, where it is a word or a list
    "name": "mine", "parallel.backend": "gloo", "data.kinds": ["mink2", "kr"], "data.output": "elsewhere",
    "data.split": [0.5, 0.25, 0.25], "data.subset": 0.5, "data.graph": "order", "data.features": ["past_size"],
    "data.feature_scale": "raw", "model.gnn_layer_type": "gcn", "model.normalizer_type": "batch",
    "model.activation_type": "gelu", "model.dropout": 0.5, "model.pooling_layers": ["max"], "model.kernel": "dense",
    "model.active_tasks": ["dim"], "model.task_weights": {"cls": 2.0}, "training.device": "cpu",
    "training.path": "there", "training.optimizer_type": "SGD", "training.lr_scheduler_type": "StepLR",
    "early_stopping.mode": "all",
    "early_stopping.tasks": {}, "runs.seeds": [4, 5], "parallel.master_addr": "host", "parallel.master_port": 2345,
    "data.files": ["a.zarr"], "runs.sweep": "lr=1e-3,3e-4", "data.max_size": 48,
}  # fmt: skip


def full_config() -> dict:
    """The seed's config with the keys that are commented out in it."""
    text = SEED_CONFIG.read_text(encoding="utf-8")
    return yaml.safe_load(re.sub(r"^  # (files|master_addr|master_port|sweep):", r"  \1:", text, flags=re.M))


def test_every_key_of_the_config_has_an_effect(tmp_path):
    """Known, and changed it changes the arguments; the values in the file are those that its comments say."""
    tree = leaves(full_config())
    assert len(tree) >= 60
    def arguments(values: dict) -> dict:
        nested: dict = {}
        for key, value in values.items():
            *sections, last = key.split(".")
            place = nested
            for section in sections:
                place = place.setdefault(section, {})
            place[last] = value
        read = vars(script.parse_args([config(tmp_path / "c.yaml", nested)]))
        return {n: v for n, v in read.items() if n not in ("config", "given", "changed", "command", "runs")}
    for key, value in tree.items():
        if key == "model.type":  # one choice, which the original names
            continue
        number = isinstance(value, (int, float)) or (isinstance(value, str) and value[:1].isdigit())
        other = OTHER[key] if key in OTHER else (not value) if isinstance(value, bool) else float(value) * 2
        other = int(other) if number and isinstance(value, int) and key not in OTHER and other == int(other) else other
        other = 3 if other == 0 and value == 0 and not isinstance(value, bool) else other
        assert arguments({key: other}) != arguments({key: value}), key
    plain, read = script.parse_args([]), script.parse_args([f"--config={SEED_CONFIG}"])
    same = {n for n in vars(plain) if getattr(plain, n) == getattr(read, n)}
    differ = {"world_size", "patience", "stop_tasks", "task_weights", "wandb_name"}
    assert {*vars(plain)} - same == differ | {"config", "given", "changed", "command"}
    assert read.world_size == 3 and read.lr == 1e-3 and read.lr_scheduler == "onecycle" and read.patience == 12


def test_every_option_is_read():
    """By the code that follows the arguments: what is accepted has an effect."""
    tree = ast.parse(Path(SCRIPT).read_text(encoding="utf-8"))
    skip = {"parse_args", "check_values"}
    body = [node for node in tree.body if getattr(node, "name", "") not in skip]
    read = {node.attr for part in body for node in ast.walk(part) if isinstance(node, ast.Attribute)}
    texts = {getattr(node, "value", None) for part in body for node in ast.walk(part) if isinstance(node, ast.Constant)}
    read |= {text for text in texts if isinstance(text, str)}  # getattr(args, name) for names in a list
    known = {*vars(script.parse_args([]))} - {"type", "config", "runs", "given", "command"}
    assert not known - read


@pytest.mark.parametrize("name", sorted(n for names in script.REFUSED for n in names.split()))
def test_refused_key_says_why(name, tmp_path, capsys):
    reason = next(why for names, why in script.REFUSED.items() if name in names.split())
    *sections, last = name.split(".")
    tree: dict = {last: 1}
    for section in reversed(sections):
        tree = {section: tree}
    assert f"{name} ({reason})" in refused(capsys, config(tmp_path / "c.yaml", tree))


def test_keys_of_the_original_are_taken_or_refused(tmp_path, capsys):
    """Its schema, but for its classes: no key is unknown, and all that can do nothing are named at once."""
    text = """
parallel: {world_size: 3, rank: 0, master_addr: localhost, master_port: "12355", output_device: null, backend: gloo,
  find_unused_parameters: False}
training: {seed: 1, device: cpu, path: there, num_epochs: 3, batch_size: 64, optimizer_type: AdamW, optimizer_args: [1],
  optimizer_kwargs: {lr: !!float "1e-3", weight_decay: 5e-5}, num_workers: 4, drop_last: True, checkpoint_at: 20,
  lr_scheduler_type: StepLR, lr_scheduler_args: [1], lr_scheduler_kwargs: {step_size: 3, gamma: 0.5}, pin_memory: True,
  prefetch_factor: 8, shuffle: True, persistent_workers: True}
data: {files: [a.zarr], output: there, reader: r, pre_transform: t, transform: t, pre_filter: f, validate_data: True,
  n_processes: 2, chunksize: 5, shuffle: True, subset: 0.5, split: [0.8, 0.1, 0.1]}
validation: {batch_size: 8, num_workers: 2, pin_memory: True, drop_last: False, prefetch_factor: 2, shuffle: False,
  validator: 1}
testing: {batch_size: 8, num_workers: 2, pin_memory: True, drop_last: False, prefetch_factor: 2, shuffle: False,
  tester: 1}
criterion: loss
apply_model: f
log_level: INFO
name: run
early_stopping: {mode: any, patience: 5, tasks: {cls: {metric: f1_weighted, mode: max, delta: 0.01, grace_period: 8,
  init_best_score: 0.0}}}
"""
    said = refused(capsys, config(tmp_path / "c.yaml", text))
    for key in ("parallel.rank", "training.drop_last", "data.reader", "testing.tester", "criterion", "log_level"):
        assert key in said, key
    tree = yaml.safe_load(text)
    for key in (n for names in script.REFUSED for n in names.split()):
        section, _, last = key.rpartition(".")
        (tree[section] if section else tree).pop(last, None)
    read = script.parse_args([config(tmp_path / "d.yaml", tree)])
    assert (read.world_size, read.master_port, read.lr, read.weight_decay, read.gamma) == (3, 12355, 1e-3, 5e-5, 0.5)
    assert (read.output_dir, read.cache_dir, read.num_workers, read.verify_data) == ("there", "there", 4, True)
    assert (read.seed, read.device, read.eval_batch_size, read.files) == (1, "cpu", 8, ["a.zarr"])


@pytest.mark.parametrize("tag", ["!pyobject torch.nn.ReLU", "!sweep {values: [1, 2]}", "!range {start: 1, stop: 3}",
                                 "!!python/object/apply:os.system [ls]"])  # fmt: skip
def test_tags_are_refused(tag, tmp_path, capsys):
    said = refused(capsys, config(tmp_path / "c.yaml", f"model:\n  type: GNNModel\n  hidden_dim: {tag}\n"))
    assert "c.yaml" in said and "line 3" in said
    if not tag.startswith("!!"):
        assert f"the tag {tag.split()[0]} is not taken" in said and "--sweep" in said
        assert "run whatever the file names" in said and "relu, AdamW" in said


def test_config_errors_and_strings(tmp_path, capsys):
    read = script.parse_args([config(tmp_path / "c.yaml", "training:\n  optimizer_kwargs:\n    lr: 1e-4\n")])
    assert read.lr == 1e-4
    tagged = script.parse_args([config(tmp_path / "c.yaml", 'training:\n  lr: !!float "3e-4"\n'), "--seed=3"])
    assert tagged.lr == 3e-4 and tagged.seed == 3
    said = refused(capsys, config(tmp_path / "c.yaml", "training:\n  batch_sise: 4\n"))
    assert "training.batch_sise" in said and "'training.batch_size'" in said and "c.yaml" in said
    assert "'hidden_dim'" in refused(capsys, "--hiden_dim=3") and "'num_layers'" in refused(capsys, "num_layer=3")
    assert "hidden_dim" in refused(capsys, config(tmp_path / "c.yaml", "model:\n  hidden_dim: wide\n"))



@pytest.mark.parametrize("option, text", [
    ("--lr=0", "--lr 0.0 must be above 0"), ("--hidden_dim=0", "must be above 0"), ("--samples=0", "above 0"),
    ("--num_layers=-1", "must not be negative"), ("--patience=-1", "not be negative"), ("--dropout=1", "below 1"),
    ("--dropout=-0.1", "not be negative"), ("--subset=1.5", "at most 1"), ("--pct_start=0", "between 0 and 1"),
    ("--pct_start=1", "between 0 and 1"), ("--destroyed_share=1.1", "at most 1"), ("--kinds=mink2,mink5", "mink4"),
    ("--kinds=mink2,mink2", "each once"), ("--kinds=", "some of"), ("--features=degree", "in_degree"),
    ("--pooling=min", "mean, max, sum"), ("--max_size=8", "--min_size"), ("--max_size=40000", "32767"),
    ("--split=0.5,0.5", "three shares"), ("--split=0.8,0.1,0.2", "make 1"), ("--split=0.9,0.1,0", "above 0"),
    ("--split=a,b,c", "floats"), ("--seeds=1,x", "integers"), ("--active_tasks=", "none"), ("--gamma=0", "above 0"),
    ("--task_weights=[1]", "JSON object"), ("--stop_tasks=f1", "stop_tasks"), ("--normalizer_type=group", "choose"),
    ("--lr_scheduler=cyclic", "choose"), ("--type=GPSModel", "GNNModel"), ("--sweep=hiden_dim=3,4", "hidden_dim"),
    ("--sweep=lr=0,1", "above 0"),
    pytest.param("--sweep=lr", "lr"),
    pytest.param("--lr=nan", "--lr"), pytest.param("--split=0.8,nan,0.1", "split"),
    pytest.param("--seeds=1,1", "--seeds"),
])  # fmt: skip
def test_values_that_cannot_be(option, text, capsys):
    assert text in refused(capsys, option)


def test_rules_of_early_stopping_are_checked(capsys):
    whole = {"metric": "f1_macro", "mode": "max", "delta": 0.01, "grace_period": 2, "init_best_score": 0.0}
    given = {"cls": whole}
    assert script.parse_args([f"--stop_tasks={json.dumps(given)}"]).stop_tasks == given
    wrong = [{n: v for n, v in whole.items() if n != name} for name in whole]
    wrong += [whole | change for change in ({"metric": "auc"}, {"mode": "up"}, {"delta": "small"}, {"min_delta": 1})]
    for rule in wrong:
        said = refused(capsys, f"--stop_tasks={json.dumps({'cls': rule})}")
        assert "early_stopping.tasks cls" in said and "needs metric (of loss, accuracy, f1_macro" in said


@pytest.mark.parametrize("change", [{"delta": -0.5}, {"grace_period": -1}])
def test_rules_below_0_are_refused(change, capsys):
    rule = {"metric": "f1_macro", "mode": "max", "delta": 0.01, "grace_period": 2, "init_best_score": 0.0} | change
    assert "early_stopping.tasks" in refused(capsys, f"--stop_tasks={json.dumps({'cls': rule})}")


# ---- Several runs ------------------------------------------------------------------------------------


def test_plan_of_several_runs():
    """Names, groups and arguments; what is asked for on the command line holds for each."""
    assert script.parse_args([]).runs == []
    plan = script.parse_args(["--seeds=0,1", "--ablation", "--output_dir=out", "--lr=0.5", "hidden_dim=7"]).runs
    assert [(name, group) for name, group, _ in plan] == [
        ("seed0", "this network"), ("seed1", "this network"),
        ("no_messages_seed0", "no_messages"), ("no_messages_seed1", "no_messages")]  # fmt: skip
    rows = [(a.seed, a.gnn_layer_type, a.output_dir, a.lr, a.hidden_dim, a.runs, a.seeds) for *_, a in plan]
    assert rows == [(seed, kind, f"out/{name}", 0.5, 7, [], []) for (name, *_), (kind, seed) in zip(
        plan, [("mean", 0), ("mean", 1), ("none", 0), ("none", 1)], strict=True)]  # fmt: skip
    plan = script.parse_args(["--sweep=lr=1e-3,3e-4; training.batch_size=8, 16", "--seeds=5,6"]).runs
    assert plan[0][:2] == ("lr=1e-3_training.batch_size=8_seed5", "lr=1e-3_training.batch_size=8") and len(plan) == 8
    assert [(a.lr, a.batch_size, a.seed) for *_, a in plan] == [
        (lr, size, seed) for lr in (1e-3, 3e-4) for size in (8, 16) for seed in (5, 6)]  # fmt: skip
    assert [name for name, *_ in script.parse_args(["--ablation"]).runs] == ["messages", "no_messages"]


def test_runs_of_a_config_file(tmp_path):
    """Also where the file asks for them, and its folder is that of the file."""
    text = "training: {path: out, num_epochs: 3}\nruns: {seeds: [1, 2], ablation: True}\n"
    plan = script.parse_args([config(tmp_path / "c.yaml", text)]).runs
    assert [(a.seed, a.gnn_layer_type, a.num_epochs, Path(a.output_dir).parent.name) for *_, a in plan] == [
        (1, "mean", 3, "out"), (2, "mean", 3, "out"), (1, "none", 3, "out"), (2, "none", 3, "out")]  # fmt: skip



@pytest.mark.parametrize("option, name, value", [
    pytest.param("--seeds=7", "seed", 7), pytest.param("--sweep=lr=0.5", "lr", 0.5)])
def test_one_seed_or_one_point_is_a_run_too(option, name, value):
    args = script.parse_args([option])
    (args,) = [run for *_, run in args.runs] or [args]
    assert getattr(args, name) == value


# ---- Training ----------------------------------------------------------------------------------------

SMALL = """--samples=120 --min_size=10 --max_size=16 --num_workers=1 --num_epochs=2 --hidden_dim=8 --head_dim=8
    --num_layers=1 --batch_size=8 --lr=1e-2 --log_every=1 --wandb_mode=disabled --device=cpu""".split()
FILES = ["best.pt", "confusion_cls.png", "curves.png", "final_model.pt", "latest.pt", "metrics.jsonl",
         "predictions.npz", "report.json", "split.npz", "summary.json"]  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """Filled by whatever comes first."""
    folder = tmp_path_factory.mktemp("cache")
    script.prepare_sets(script.parse_args([*SMALL, f"--cache_dir={folder}"]))
    return folder


@pytest.fixture
def run(cache, capsys, monkeypatch):
    """run(folder, options): what plain python does, in this process and without pictures. Returns its output."""
    save = lambda figure, to, **more: to.write(b".") if hasattr(to, "write") else Path(to).write_text(".")  # noqa: E731
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", save)
    monkeypatch.setattr(script, "atexit", Namespace(register=lambda function: None))

    def call(folder: Path, *options: str, status: int = 0) -> str:
        argv = [*SMALL, f"--cache_dir={cache}", f"--output_dir={folder}", *options]
        found = script.launch(script.main, script.place_ranks(script.parse_args(argv)))
        said = capsys.readouterr().out
        assert found == status, said
        return said

    return call


def start(command: list[str], cache: Path, folder: Path, *options: str) -> str:
    """Output of a launcher's job that must end well."""
    env = {n: v for n, v in os.environ.items() if n not in ("MASTER_ADDR", "MASTER_PORT")}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "Agg"}
    argv = [*command, SCRIPT, *SMALL, f"--cache_dir={cache}", f"--output_dir={folder}", *options]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def check_ranks(text: str, world_size: int, launcher: str) -> None:
    """The seed's lines that every rank says once."""
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    for rank in range(world_size):
        lines = [f"Process {rank}/{world_size} started", f"Cleaning up rank {rank}...",
                 f"Process {rank} cleanup completed"]  # fmt: skip
        lines += [f"Initializing DDP for rank {rank}..."] * ("is finished, after" not in text)
        for line in lines:
            assert len(re.findall(rf"^\[RANK {rank}\] {stamp} INFO: {re.escape(line)}$", text, re.M)) == 1, line
    assert f"Process {world_size}/" not in text
    if "is finished, after" not in text:
        assert f"world size {world_size}, backend gloo, started by {launcher}," in text


def check_story(text: str) -> None:
    """The lines of rank 0 on two epochs of three processes: each once, in the order of the seed."""
    story = """Preparing data loaders...
Data split complete:
  Training samples:   96
  Validation samples: 12
  Test samples:       12
  Total batch size:   24 (8 per GPU × 3 GPUs)
Starting distributed training...
Starting training epoch 0
Found better model at epoch 0.
Saving checkpoint for model at epoch 0
Starting training epoch 1
Saving checkpoint for model at epoch 1
Training process completed.
Starting testing phase...
Training and testing completed successfully!
Cleaning up rank 0..."""
    places = []
    for line in story.splitlines():
        found = list(re.finditer(rf"^\[RANK (\d)\] .* INFO: {re.escape(line)}$", text, re.M))
        assert [match[1] for match in found] == ["0"], line
        places.append(found[0].start())
    assert places == sorted(places)
    assert len(re.findall(r"INFO: Validation: loss=\d+\.\d{3} ± \d+\.\d{3} ", text)) == 2


def check_files(folder: Path, world_size: int, steps: int, epochs: int = 2) -> dict:
    """Those of the seed and of the docstring, whole; the report."""
    assert {*FILES} <= {path.name for path in folder.iterdir()}
    assert all((folder / name).stat().st_size > 0 for name in FILES)
    summary, report = (json.loads((folder / f"{name}.json").read_text()) for name in ("summary", "report"))
    assert (summary["status"], summary["world_size"], summary["epochs"]) == ("finished", world_size, epochs)
    assert summary["steps"] == steps and summary["checkpoint"] == str(folder / "best.pt")
    assert {*summary["baselines"]} == {"cls: majority", "cls: logistic regression"}
    split, kept = np.load(folder / "split.npz"), np.load(folder / "predictions.npz")
    assert np.array_equal(kept["ids"], split["test"]) and kept["logp"].shape == (12, 6)
    accuracy = (kept["logp"].argmax(1) == kept["labels"][:, 0]).mean()
    assert report["test"]["cls"]["accuracy"] == accuracy and report["sets"] == 12
    assert np.array(report["test"]["cls"]["confusion"]).sum() == 12
    assert np.allclose(np.exp(kept["logp"]).sum(1), 1)
    assert sum(row["sets"] for row in report["sizes"]["cls"]) == 12
    weights = torch.load(folder / "final_model.pt", weights_only=True)["model"]
    assert all(not name.startswith("module.") for name in weights) and len(weights) > 4
    return report


@pytest.mark.timeout(300)  # 15 s on two free cores
def test_launchers(cache, tmp_path):
    """Plain python starts as many as the config says, which is the seed's own form; torch.distributed.launch, which
    adds --local-rank=N, starts as many as it says, and goes on with the first's run on another number of ranks."""
    folder, setting = tmp_path / "run", config(tmp_path / "c.yaml", "parallel: {world_size: 3, backend: gloo}\n")
    text = start([sys.executable], cache, folder, setting)
    check_ranks(text, 3, "--nproc")
    check_story(text)
    report = check_files(folder, 3, 2 * 96 // 24)
    confusion = (folder / "confusion_cls.png").read_bytes()
    assert confusion[1:4] == b"PNG" and (folder / "curves.png").read_bytes()[1:4] == b"PNG"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {"loss", "nodes/s", "samples/s"} <= {*rows[0]}
    assert {"val loss", "val loss_se", *(f"val cls/{n}" for n in script.METRICS[1:])} <= {*rows[-1]}

    launch = [sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node=2", f"--master-port={free_port()}"]
    text = start(launch, cache, folder, setting, "--num_epochs=3")
    check_ranks(text, 2, "torchrun")
    assert "Starting training epoch 2" in text and "Starting training epoch 1" not in text
    assert "global batch 24 = 2 ranks x 6 x 2 accumulation" in text
    assert check_files(folder, 2, 3 * 96 // 24, epochs=3) != report


def test_several_runs(tmp_path, run):
    """Runs in folders of their own and a table of them. With more runs asked for, those there are found finished; the
    same command finds them all finished."""
    text = run(tmp_path / "run", "--seeds=0,1")
    assert "run 2 of 2: seed1" in text and text.count("Starting testing phase...") == 2
    assert text.count("Training and testing completed successfully!") == 1
    several = ["--seeds=0,1", "--ablation"]
    text += run(tmp_path / "run", *several)
    names = ["seed0", "seed1", "no_messages_seed0", "no_messages_seed1"]
    reports = {name: check_files(tmp_path / "run" / name, 1, 24) for name in names}
    assert len({(tmp_path / "run" / name / "split.npz").read_bytes() for name in names}) == 1  # no seed changes it
    table = (tmp_path / "run" / "results.csv").read_text()
    rows = [row.split(",") for row in table.splitlines()]
    assert rows[0] == ["run", "group", "task", "loss", "accuracy", "f1_macro", "f1_weighted", "ece"]
    groups = ["this network", "this network", "no_messages", "no_messages"]
    assert [row[:3] for row in rows[1:]] == [[*pair, "cls"] for pair in zip(names, groups, strict=True)]
    for row in rows[1:]:
        assert float(row[4]) == pytest.approx(reports[row[0]]["test"]["cls"]["accuracy"], abs=1e-6)
    assert len({row[3] for row in rows[1:]}) == 4  # other weights
    both = [reports[f"seed{n}"]["test"]["cls"]["accuracy"] for n in (0, 1)]
    said = f"this network             {np.mean(both):.4f} ± {np.std(both, ddof=1):.4f} (deviation of 2 seeds)"
    assert text.count(said) == 2 and "  no messages " in text and "  logistic regression " in text
    assert text.count("is finished, after") == 2 and "run 4 of 4: no_messages_seed1" in text
    again = run(tmp_path / "run", *several)
    assert again.count("is finished, after") == 4 and "Starting training epoch" not in again
    assert (tmp_path / "run" / "results.csv").read_text() == table


def test_one_process_trains_stops_early_and_says_so_again(run, tmp_path):
    """A metric that cannot be met: patience 1 after two checks of grace, 3 of 50 epochs. The rerun says finished."""
    rule = {"metric": "accuracy", "mode": "max", "delta": 0, "grace_period": 2, "init_best_score": 2}
    options = ["--num_epochs=50", f"--stop_tasks={json.dumps({'cls': rule})}", "--patience=1", "--checkpoint_at=1"]
    text = run(tmp_path / "run", *options)
    assert "stopped early, after epoch 2" in text and "Starting training epoch 3" not in text
    assert "early stopping: cls=" in text and "patience left 0" in text
    assert "Training process completed." in text and "Starting testing phase..." in text
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["epochs"], summary["steps"]) == ("finished", 3, 36)
    assert summary["best_metric"]["name"] == "val cls/accuracy"
    kept = sorted(path.name for path in (tmp_path / "run").glob("checkpoint_epoch_*.pt"))
    assert kept == ["checkpoint_epoch_1.pt", "checkpoint_epoch_2.pt", "checkpoint_epoch_3.pt"]
    weights = [torch.load(tmp_path / "run" / name, weights_only=True)["model"] for name in kept]
    last = torch.load(tmp_path / "run" / "final_model.pt", weights_only=True)["model"]
    assert all(torch.equal(weights[2][n], last[n]) for n in last)
    assert any(not torch.equal(weights[0][n], weights[1][n]) for n in last)
    report = (tmp_path / "run" / "report.json").stat().st_mtime_ns
    again = run(tmp_path / "run", *options)
    assert "is finished, after 36 steps" in again and (tmp_path / "run" / "report.json").stat().st_mtime_ns == report
    (tmp_path / "run" / "report.json").unlink()  # killed in the test phase: only that is made again
    again = run(tmp_path / "run", *options)
    assert "Starting training epoch" not in again and (tmp_path / "run" / "report.json").exists()


def test_shuffled_labels(run, tmp_path, monkeypatch):
    """The same labels of sets, those of all tasks together, in other places; the data keep theirs."""
    tasks, plain = {}, script.test
    monkeypatch.setattr(script, "test", lambda task, parts: tasks.setdefault(task.args.shuffle_labels, (task, parts))
                        and plain(task, parts))  # fmt: skip
    run(tmp_path / "a", "--num_epochs=1", "--active_tasks=cls,manifold")
    run(tmp_path / "b", "--num_epochs=1", "--active_tasks=cls,manifold", "--shuffle_labels")
    (task, parts), (other, _) = tasks[False], tasks[True]
    true, found = task.labels, other.labels
    assert sorted(map(tuple, true)) == sorted(map(tuple, found))
    for ids in parts.values():
        assert (true[ids, 0] == found[ids, 0]).mean() < 0.6
    assert 0.05 < (true[:, 0] == found[:, 0]).mean() < 0.35
    assert np.array_equal(task.data.labels, other.data.labels)


def test_what_a_resumed_run_must_have_kept(run, tmp_path):
    """Another network, split or data in the folder of a run are refused, by the first option that differs."""
    run(tmp_path / "run", "--num_epochs=1", "--hidden_dim=4")
    cases = {"--hidden_dim=5": "--hidden_dim 4, this one has 5", "--split_seed=3": "--split_seed", "--data_seed=1":
             "holds a run with data ", "--shuffle_labels": "--shuffle_labels", "--seed=1": "--seed 42"}  # fmt: skip
    for option, text in cases.items():
        said = run(tmp_path / "run", "--num_epochs=1", "--hidden_dim=4", option, status=1)
        assert text in said and "ValueError" in said, option
    more = run(tmp_path / "run", "--num_epochs=2", "--hidden_dim=4")
    assert "resuming" in more and "Starting training epoch 1" in more and "Starting training epoch 0" not in more
    state = script.load_checkpoint(tmp_path / "run/latest.pt")
    state["standing"]["peak"] = 0.25  # scaled by the ranks that the run began on: it stays, however often it is resumed
    torch.save(state, tmp_path / "run/latest.pt")
    assert "peak learning rate 0.25" in run(tmp_path / "run", "--num_epochs=3", "--hidden_dim=4")


def test_a_split_without_labels_of_a_task_is_an_error(run, tmp_path):
    """No sprinkling is among those to validate on: the dimension cannot be judged there."""
    kinds = ["mink2", "mink3", *["kr", "layered", "percolation", "destroyed"]]
    seed = next(n for n in range(99) if all(i % 6 > 1 for i in script.shuffled(24, n)[20:22]))
    options = ["--samples=24", f"--kinds={','.join(kinds)}", "--active_tasks=cls,dim", f"--split_seed={seed}"]
    said = run(tmp_path / "run", *options, status=1)
    assert "ValueError: no set of the valid split has a label" in said and "--split" in said


def test_place_of_rank_0(monkeypatch):
    """parallel.master_addr and master_port hold where nobody has said them; a launcher's ranks are no --nproc."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    argv = ["--parallel.master_addr=one", "--master_port=12355", "--world_size=3"]
    args = script.place_ranks(script.parse_args(argv))
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], args.nproc) == ("one", "12355", 3)
    monkeypatch.setenv("MASTER_ADDR", "two")
    for names in script.LAUNCHERS.values():
        monkeypatch.setenv(names[0], "0")
        args = script.place_ranks(script.parse_args(argv))
        assert args.nproc == 0 and os.environ["MASTER_ADDR"] == "two"
        monkeypatch.delenv(names[0])
    assert script.place_ranks(script.parse_args([*argv, "--nproc=2"])).nproc == 2
