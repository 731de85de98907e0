"""What every training script must do, on 1, 2 and 3 processes: a script joins by existing and by an entry in TINY.

Ranks are forked from one process that has the imports behind it, so a run costs little more than its steps.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ROOT, forkserver, free_port, write_digits, write_proteins, write_structures

SCRIPTS = sorted(path.stem for path in ROOT.glob("*.py") if path.stem != "test_ddp_setup")


def tiny_train_ddp(folder: Path) -> list[str]:
    """Arguments of a run of seconds on 260 generated pairs: both phases, several epochs, mined negatives."""
    with open(folder / "pairs.jsonl", "w") as file:
        for i in range(260):
            words = f"thing {i} in room {i % 7} of house {i % 13}"
            color = f"tone {i * 37 % 101} and keeper {i % 11}"
            positive = f"{words} has the color {color}" + " indeed" * (i % 9)
            row = {"query": f"what is the color of {words}", "positive": positive}
            file.write(json.dumps(row) + "\n")
    return f"""--phase1_data={folder}/pairs.jsonl --phase2_data={folder}/pairs.jsonl --cache_dir={folder}/cache
        --teacher_model=builtin:lsa:32 --student_model=builtin:bert:1x32 --student_max_length=24 --projection_hidden=32
        --eval_fraction=0.2 --global_batch_size=24 --batch_size=4 --phase1_epochs=4 --phase2_epochs=7 --phase1_lr=3e-3
        --phase2_lr=1e-3 --mine_negatives=3 --num_negatives=2 --log_every=1 --save_every=4 --wandb_mode=disabled
        --device=cpu --precision=fp32""".split()


def tiny_run_train_uniref50_ddp(folder: Path) -> list[str]:
    """800 sequences of simple structure, three epochs, the averaged weights evaluated and sampled on the way."""
    write_proteins(folder / "proteins.fasta", 800)
    return f"""--datafile={folder}/proteins.fasta --cache_dir={folder}/cache --hidden_size=16 --n_blocks_prot=2
        --n_heads=2 --cond_dim=8 --max_protein_len=48 --dropout=0 --global_batch_size=24 --batch_size=4 --n_iters=70
        --lr=0.02 --warmup=10 --ema=0.9 --log_freq=1 --snapshot_freq=4 --eval_freq=35 --eval_sequences=30 --eval_draws=1
        --samples_per_eval=3 --sample_length=10 --num_workers=1 --wandb_mode=disabled --device=cpu
        --precision=fp32""".split()


def tiny_run_dpo_ddp(folder: Path) -> list[str]:
    """60 pairs on generated helices: three epochs of warm start, then six of preferences, with averaged weights."""
    write_structures(folder, 10, pairs=8, least=8, most=12)
    return f"""--train_data={folder}/pairs.json --cache_dir={folder}/cache --base_model_name=random --val_fraction=0.25
        --sft_epochs=3 --sft_lr=1e-3 --num_epochs=6 --lr=5e-4 --temperature=1 --num_orders=2 --global_batch_size=6
        --batch_size=1 --ema=0.5 --log_every=1 --save_every=8 --wandb_mode=disabled --device=cpu
        --precision=fp32""".split()


def tiny_run_train_quantumgrav_ddp(folder: Path) -> list[str]:
    """300 small sets of six kinds, two tasks, eight epochs; no kinks (ReLU, maxima), at which a rounding can show."""
    return f"""--cache_dir={folder}/cache --samples=300 --min_size=10 --max_size=20 --num_workers=1
        --active_tasks=cls,dim --hidden_dim=16 --head_dim=0 --num_layers=2 --activation_type=gelu --pooling=mean,sum
        --num_epochs=8 --global_batch_size=24 --batch_size=4 --lr=5e-3 --log_every=1 --save_every=4
        --wandb_mode=disabled --device=cpu --precision=fp32""".split()


def tiny_run_train_rebm_ddp(folder: Path) -> list[str]:
    """450 digits, two epochs of each stage, smooth all through; random starts of the attack, R1, averaged weights."""
    write_digits(folder / "digits.npz", 450, 60)
    return f"""--indist_dataset=file --indist_ds_dir={folder}/digits.npz --model_type=SmallNet --width=4
        --augm_type_classification=shift --augm_type_generation=none --outdist_max_samples=300 --valid_images=18
        --attack.max_steps=2 --attack.step_size=0.3 --indist_attack_clf.max_steps=1 --indist_attack_clf.step_size=0.1
        --indist_attack_clf.eps=0.15 --indist_attack_clf.random_start --image_log.num_steps=3
        --image_log.num_samples=20 --at_epochs=2 --total_epochs=2 --at_optimizer=adamw --at_lr=1e-2 --optimizer=adamw
        --lr=3e-3 --r1reg=0.01 --AUC_th=0.6 --min_imgs_per_threshold=100 --ema=0.9 --global_batch_size=24
        --batch_size=4 --eval_steps=2 --eval_restarts=2 --eval_images=40 --outdist_dataset_ood_detection=noise
        --n_imgs_per_evaluation_log=600 --monitor_every=20 --log_every=1 --save_every=4 --wandb_mode=disabled
        --device=cpu --precision=fp32""".split()


TINY = {
    "train_ddp": tiny_train_ddp, "run_train_uniref50_ddp": tiny_run_train_uniref50_ddp,
    "run_dpo_ddp": tiny_run_dpo_ddp, "run_train_quantumgrav_ddp": tiny_run_train_quantumgrav_ddp,
    "run_train_rebm_ddp": tiny_run_train_rebm_ddp,
}  # fmt: skip


def run_rank(env: dict, script: str, argv: list[str], output: str) -> None:
    """One rank of `script`, with its steps traced and, where `env` asks for it, itself killed at a step."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1), os.dup2(file, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.environ.update(env)
    sys.argv, status = [f"{script}.py", *argv], 1
    module = importlib.import_module(script)
    plain = module.StepGuard.step

    def step(guard, loss, number, ids):
        result = plain(guard, loss, number, ids)
        with open(env["TRACE"], "a") as trace:  # what this rank was trained on
            trace.write(json.dumps([number, [int(i) for part in ids for i in part]]) + "\n")
        if env.get("STOP") and env["STOP"].split(":")[:2] == [env["RANK"], str(number)]:
            os.kill(os.getpid(), int(env["STOP"].split(":")[2]))
        return result

    module.StepGuard.step = step
    try:
        status = module.launch(module.main, module.parse_args(argv))
    except BaseException:  # a forked rank must not return into the server
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(status)


def serve(pipe) -> None:
    """Forks ranks for each request [(env, script, argv, output), ...] and answers their exit statuses."""
    import matplotlib.figure  # noqa: F401
    import sentence_transformers  # noqa: F401
    import sklearn.decomposition  # noqa: F401

    torch.set_num_threads(1)
    while (request := pipe.recv()) is not None:
        pids = []
        for work in request:
            pids.append(os.fork())
            if pids[-1] == 0:
                run_rank(*work)
        pipe.send([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])


class Run:
    """A finished run: exit statuses, output of every rank, its folder."""

    def __init__(self, folder: Path, statuses: list[int], outputs: list[str]):
        self.folder, self.statuses, self.text = folder, statuses, "\n".join(outputs)

    @property
    def rows(self) -> list[dict]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.rows if "loss" in row]

    @property
    def summary(self) -> dict:
        return json.loads((self.folder / "summary.json").read_text())

    def trained_on(self) -> dict[int, list[int]]:
        """{step: ids over all ranks}; of a step that was made twice (after a kill) the last time counts."""
        steps: dict[int, list[int]] = {}
        for trace in sorted(self.folder.parent.glob(f"{self.folder.name}.trace-*")):
            mine = {number: ids for number, ids in map(json.loads, trace.read_text().splitlines())}
            for number, ids in mine.items():
                steps.setdefault(number, []).extend(ids)
        return steps


@pytest.fixture(scope="module")
def start():
    """start(script, argv, folder, world_size, stop="rank:step:signal"): a Run."""
    ours, theirs = forkserver().Pipe()
    server = forkserver().Process(target=serve, args=(theirs,), daemon=True)
    server.start()

    def call(script: str, argv: list[str], folder: Path, world_size: int, stop: str = "", attempt: int = 0) -> Run:
        ranks, port = [], free_port()
        for rank in range(world_size):
            env = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
            env |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "OMP_NUM_THREADS": 1, "CUDA_VISIBLE_DEVICES": ""}
            env |= {"STOP": stop, "TRACE": f"{folder}.trace-{rank}-of-{world_size}"}
            output = f"{folder}.rank{rank}-{attempt}.txt"
            ranks.append(({k: str(v) for k, v in env.items()}, script, [*argv, f"--output_dir={folder}"], output))
        ours.send(ranks)
        if not ours.poll(100):
            pytest.fail("still running after 100 s:\n" + "\n".join(Path(r[3]).read_text()[-1500:] for r in ranks))
        return Run(folder, ours.recv(), [Path(r[3]).read_text() for r in ranks])

    yield call
    ours.send(None)
    server.join(5)
    server.kill()


@pytest.fixture(scope="module", params=SCRIPTS)
def script(request, tmp_path_factory):
    """(name, arguments of its tiny run, folder)"""
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, TINY[request.param](folder), folder


@pytest.fixture(scope="module")
def whole(script, start):
    """The undisturbed run on two processes."""
    name, argv, folder = script
    run = start(name, argv, folder / "whole", 2)
    assert run.statuses == [0, 0], run.text[-3000:]
    return run


def state_of(run: Run) -> dict:
    return torch.load(run.folder / "latest.pt", weights_only=True)


def differences(a, b, path: str = "") -> list[str]:
    """Places where two nested states differ in a bit."""
    if isinstance(a, torch.Tensor):
        return [] if a.dtype == b.dtype and torch.equal(a, b) else [path]
    if isinstance(a, dict):
        return [d for k in a.keys() | b.keys() for d in differences(a.get(k), b.get(k), f"{path}.{k}")]
    if isinstance(a, (list, tuple)) and len(a) == len(b):
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{path}[{i}]")]
    return [] if a == b else [path]


def test_every_script_has_a_tiny_run():
    assert set(SCRIPTS) == set(TINY), "a training script without an entry in TINY, or an entry without its script"


def test_two_processes_train(whole):
    """Steps are made, weights move, the loss falls, one rank writes, the summary is complete."""
    state, losses = state_of(whole), whole.losses
    phases = [[r["loss"] for r in whole.rows if "loss" in r and r.get("phase") == p] for p in (None, 1, 2)]
    assert any(phases)
    assert whole.summary["status"] == "finished" and whole.summary["steps"] == len(losses) > 50
    for part in filter(None, phases):
        assert sum(part[-5:]) < 0.9 * sum(part[:5])
    assert all(torch.isfinite(t).all() for t in state["model"].values() if t.is_floating_point())
    assert not any(name.startswith(("module.", "_orig_mod.")) for name in state["model"])
    keys = "script status steps epochs wall_s world_size backend device samples_per_s final_loss best_metric baselines"
    assert set((keys + " checkpoint args").split()) <= set(whole.summary)
    assert set(whole.summary["best_metric"]) == {"name", "value", "step"}
    left = [p.name for p in whole.folder.iterdir() if p.name.startswith(".")]
    assert not left, "temporary files of more than one writer"
    assert whole.text.count("finished:") == 1 and whole.text.count("command:") == 1
    for rank in (0, 1):
        assert f"Initialized DDP: rank={rank}, world_size=2, local_rank={rank}" in whole.text


@pytest.mark.parametrize("world_size", [1, 3])
def test_number_of_processes_changes_nothing(script, whole, start, world_size):
    """The same global batch on 1, 2 and 3 processes: losses and metrics agree, all steps, both phases."""
    name, argv, folder = script
    run = start(name, argv, folder / f"world{world_size}", world_size)
    assert run.statuses == [0] * world_size, run.text[-3000:]
    assert len(run.rows) == len(whole.rows)
    for ours, theirs in zip(run.rows, whole.rows, strict=True):
        for key in ("loss", "infonce", "distance", "ndcg@10", "mrr@10", "nelbo", "ce@0.5", "unigram", "grad_norm",
                    "bce", "auc", "val robust@0.15", "val frechet_pixels", "val adv_ood_auc noise",
                    "val loss", "val rewards/margins", "val cls/accuracy", "val dim/f1_macro"):  # fmt: skip
            if key in theirs:
                tolerance = 1e-5 if theirs["step"] <= 50 or key == "loss" else 1e-3
                assert ours[key] == pytest.approx(theirs[key], rel=tolerance, abs=1e-7), (theirs["step"], key)
    assert sorted(run.trained_on().items()) != []
    for step, ids in whole.trained_on().items():
        assert sorted(run.trained_on()[step]) == sorted(ids), f"step {step} was made of other samples"


def test_what_is_held_out_is_never_trained_on(whole):
    """Counted over all ranks and steps, where a script keeps the numbers of its split."""
    if not (whole.folder / "split.npz").exists():
        pytest.skip("this script keeps names, or splits by content")
    parts = np.load(whole.folder / "split.npz")
    trained = {i for ids in whole.trained_on().values() for i in ids}
    assert trained and trained <= {*parts["train"].tolist()}
    assert not trained & {*parts["valid"].tolist(), *parts["test"].tolist()}


@pytest.mark.parametrize("stop, statuses", [("1:9:9", {-9, 1}), ("0:15:15", {143}), ("1:61:9", {-9, 1})])
def test_stopped_and_restarted_equals_undisturbed(script, whole, start, stop, statuses):
    """A rank killed, or told to stop, at a step in the middle: after the restart every bit is the same."""
    name, argv, folder = script
    target = folder / f"stopped-{stop.replace(':', '-')}"
    broken = start(name, argv, target, 2, stop)
    assert set(broken.statuses) <= statuses, broken.text[-3000:]
    if "143" in map(str, broken.statuses):
        assert "checkpoint written, stopped by SIGTERM" in broken.text
    run = start(name, argv, target, 2, attempt=1)
    assert run.statuses == [0, 0] and "resuming" in run.text, run.text[-3000:]
    ours, theirs = state_of(run), state_of(whole)
    for key in theirs.keys() - {"wall_s", "speed", "wandb_id", "args"}:
        assert not differences(ours[key], theirs[key], key)
    assert run.losses == whole.losses
    assert run.trained_on() == whole.trained_on()


def test_resumed_on_another_world_size(script, whole, start):
    """Stopped on two processes, resumed on three: the same samples, none twice, none left out."""
    name, argv, folder = script
    target = folder / "moved"
    assert set(start(name, argv, target, 2, "0:11:15").statuses) == {143}
    half = max(Run(target, [], []).trained_on())
    run = start(name, argv, target, 3, attempt=1)
    assert run.statuses == [0, 0, 0], run.text[-3000:]
    first, second, plan = {}, {}, whole.trained_on()
    for trace in folder.glob("moved.trace-*"):
        into = first if "of-2" in trace.name else second
        for number, ids in map(json.loads, trace.read_text().splitlines()):
            into.setdefault(number, []).extend(ids)
    assert max(first) == half and min(second) == half + 1 and len(first) + len(second) == len(plan)
    for step, ids in {**first, **second}.items():
        assert sorted(ids) == sorted(plan[step]) and len(set(ids)) == len(ids)
    assert run.losses == pytest.approx(whole.losses, rel=1e-4)


def test_finished_run_says_so(script, whole, start):
    name, argv, _ = script
    before = (whole.folder / "latest.pt").read_bytes()
    run = start(name, argv, whole.folder, 2, attempt=1)
    assert run.statuses == [0, 0] and "is finished" in run.text
    assert (whole.folder / "latest.pt").read_bytes() == before


@pytest.mark.parametrize("name", SCRIPTS)
def test_bad_arguments_and_help_start_nothing(name, capsys):
    module = importlib.import_module(name)
    for argv, status in (["--no_such_option=1"], 2), (["--batch_size=many"], 2), (["--help"], 0):
        with pytest.raises(SystemExit) as caught:
            module.parse_args(argv)
        output = capsys.readouterr()
        assert caught.value.code == status and not module.dist.is_initialized()
        assert len(output.err.strip().splitlines()) == (1 if status else 0)
        assert not status or argv[0][2:].partition("=")[0] in output.err
