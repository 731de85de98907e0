"""Tiny runs of every training script, in ranks forked from a process that has the imports behind it (0.1 s each),
with faults on request: what test_contract.py and test_faults.py start.
"""

from __future__ import annotations

import gc
import importlib
import json
import math
import multiprocessing
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from helpers import (
    ROOT,
    forkserver,
    free_port,
    write_causal_sets,
    write_digits,
    write_proteins,
    write_structures,
)
from matplotlib.figure import Figure
from torch.nn.parallel import DistributedDataParallel

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
        --eval_fraction=0.2 --global_batch_size=24 --batch_size=4 --phase1_epochs=1 --phase2_epochs=4 --phase1_lr=3e-3
        --phase2_lr=1e-3 --mine_negatives=3 --num_negatives=2 --log_every=1 --save_every=4 --wandb_mode=disabled
        --device=cpu --precision=fp32""".split()


def tiny_run_train_uniref50_ddp(folder: Path) -> list[str]:
    """800 sequences of simple structure, two epochs, the averaged weights evaluated and sampled on the way."""
    write_proteins(folder / "proteins.fasta", 800)
    return f"""--datafile={folder}/proteins.fasta --cache_dir={folder}/cache --hidden_size=16 --n_blocks_prot=2
        --n_heads=2 --cond_dim=8 --max_protein_len=48 --dropout=0 --global_batch_size=24 --batch_size=4 --n_iters=45
        --lr=0.02 --warmup=10 --ema=0.9 --log_every=1 --save_every=4 --eval_freq=20 --eval_sequences=30
        --eval_batch_size=3 --eval_draws=1
        --samples_per_eval=3 --num_workers=1 --wandb_mode=disabled --device=cpu
        --precision=fp32""".split()


def tiny_run_dpo_ddp(folder: Path) -> list[str]:
    """80 pairs on generated helices: two epochs of warm start, then two of preferences."""
    write_structures(folder, 10, pairs=8, least=8, most=12)
    return f"""--train_data={folder}/pairs.json --base_model_name=random --val_fraction=0.25
        --sft_epochs=2 --sft_lr=1e-3 --num_epochs=2 --lr=5e-4 --temperature=1 --num_orders=2 --global_batch_size=6
        --batch_size=1 --eval_batch_size=2 --num_workers=1 --log_every=1 --save_every=4 --wandb_mode=disabled
        --device=cpu --precision=fp32""".split()


def tiny_run_train_quantumgrav_ddp(folder: Path) -> list[str]:
    """300 small sets of 6 kinds, two tasks, 5 epochs of nine steps; evaluations of 7 batches."""
    write_causal_sets(folder / "sets", "--samples=300", "--min_size=10", "--max_size=20")
    return f"""--data={folder}/sets --tasks cls dim --hidden_dim=16 --head_dim=16 --num_layers=2
        --num_epochs=5 --global_batch_size=24 --batch_size=4 --lr=5e-3 --eval_edges=150
        --num_workers=1 --log_every=1 --save_every=4 --wandb_mode=disabled --device=cpu
        --precision=fp32""".split()


def tiny_run_train_rebm_ddp(folder: Path) -> list[str]:
    """450 digits, an epoch and two of the stages, all smooth; R1, averaged weights, validations on the way."""
    write_digits(folder / "digits", 450, 60, "--valid=18")
    return f"""--data={folder}/digits --width=4
        --attack.max_steps=2 --attack.step_size=0.3 --indist_attack_clf.max_steps=1 --indist_attack_clf.step_size=0.1
        --indist_attack_clf.eps=0.15 --at_epochs=1 --total_epochs=2 --at_optimizer=adamw --at_lr=1e-2
        --optimizer=adamw --lr=3e-3 --r1reg=0.01 --AUC_th=0.6 --min_imgs_per_threshold=100 --ema=0.9
        --global_batch_size=24 --batch_size=4 --eval_steps=2 --eval_images=40 --eval_batch_size=16
        --n_imgs_per_evaluation_log=600 --monitor_every=20 --num_workers=1 --log_every=1 --save_every=4
        --wandb_mode=disabled --device=cpu --precision=fp32""".split()


TINY = {
    "train_ddp": tiny_train_ddp, "run_train_uniref50_ddp": tiny_run_train_uniref50_ddp,
    "run_dpo_ddp": tiny_run_dpo_ddp, "run_train_quantumgrav_ddp": tiny_run_train_quantumgrav_ddp,
    "run_train_rebm_ddp": tiny_run_train_rebm_ddp,
}  # fmt: skip
# What is drawn on each rank differs between numbers of ranks: added where that does not matter.
DROPOUT = {
    "run_train_quantumgrav_ddp": ["--dropout=0.1"], "run_train_uniref50_ddp": ["--dropout=0.1"],
}  # fmt: skip


NOT_COMPARED = {"wandb_id", "args", "log_size", "data_hash"}  # in a checkpoint
CLOCKS = {"samples_per_s", "residues_per_s", "data_wait"}  # in metrics.jsonl
RUN_OWN = {"args", "seconds"}  # in summary.json


def stopped(reason: str) -> str:
    """What a run says that was told to stop."""
    return f"stopped by {reason}: the same command goes on from the checkpoint"


def nan_loss(number: float) -> None:
    """From now on the losses of this rank are NaN, as they come to backward()."""
    torch.Tensor.backward = lambda loss, *more, **options: PLAIN_BACKWARD(
        loss * math.nan, *more, **options
    )


def sound_loss(number: float) -> None:
    torch.Tensor.backward = PLAIN_BACKWARD


def no_memory(megabytes: float) -> None:
    """The address space of this process may not grow by more than this; then it asks for more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + int(megabytes * 1e6)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    torch.ones(int(megabytes * 1e6))  # 4 bytes each


def clock_back(seconds: float) -> None:
    """The wall clock, not the monotonic one, is set back."""
    plain = time.time
    time.time = lambda: plain() - seconds


def fill_disk(number: float) -> None:
    """No byte is left where the output folder is."""
    with open(Path(os.environ["OUTPUT"]) / "filler", "wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                continue


def free_disk(number: float) -> None:
    (Path(os.environ["OUTPUT"]) / "filler").unlink()


def signal_in_evaluation(number: float) -> None:
    """This process gets the signal as soon as an evaluation has begun."""
    plain = torch.nn.Module.eval

    def begin(model):
        torch.nn.Module.eval = plain
        os.kill(os.getpid(), int(number))
        return plain(model)

    torch.nn.Module.eval = begin


def flip_bit(number: float) -> None:
    """One weight of this rank's network is another from now on."""
    for model in [
        thing for thing in gc.get_objects() if isinstance(thing, DistributedDataParallel)
    ]:
        weight = next(model.parameters()).data.view(-1)
        weight[0] = torch.nextafter(weight[0], torch.tensor(9.0))


PLAIN_BACKWARD = torch.Tensor.backward
DO: dict[str, Callable] = {
    "signal": lambda number: os.kill(os.getpid(), int(number)), "sleep": time.sleep, "nan": nan_loss,
    "sound": sound_loss, "memory": no_memory, "clock": clock_back, "fill": fill_disk, "free": free_disk,
    "evaluation": signal_in_evaluation, "flip": flip_bit,
}  # fmt: skip


def after_step(number: int, ids: list[int]) -> None:
    """Write down what this rank was trained on in the step, then do the FAULTS after it."""
    rank, output = int(os.environ["RANK"]), os.environ["OUTPUT"]
    with open(f"{output}.trace-{rank}-of-{os.environ['WORLD_SIZE']}", "a") as trace:
        trace.write(json.dumps([number, ids]) + "\n")
    for which, when, what, argument in json.loads(os.environ["FAULTS"]):
        if [which, when] == [rank, number]:
            Path(f"{output}.fault").write_text(str(time.monotonic()))
            DO[what](argument)


def run_script(script: str, argv: list[str]) -> int:
    """One rank of `script`, its steps traced. FAULTS: [[rank, step, name in DO, argument], ...], after that step.
    Nothing is drawn, which takes a third of such a run: curves.png is an empty file.
    With PICTURES in the environment all is drawn."""
    sys.argv = [f"{script}.py", *argv]
    if "PICTURES" not in os.environ:
        Figure.savefig = lambda figure, file, **options: None
    # The script is imported anew, as it takes the time, its parent and its name from the process
    # that it starts in. Nothing in a step is replaced: the sampler is listened to, and every rank
    # calls RunLog.write once after each step, before the ranks agree on a stop.
    sys.modules.pop(script, None)
    module = importlib.import_module(script)
    deal = module.GlobalBatchSampler.__iter__
    write = module.RunLog.write
    dealt: dict[int, list[int]] = {}  # {step: ids}; workers ask for it before its time

    def listen(sampler):
        first = sampler.epoch * sampler.steps + sampler.start
        for number, (ids, whole) in enumerate(deal(sampler)):
            step = first + number // sampler.accumulation + 1
            dealt.setdefault(step, []).extend(ids.tolist())
            yield ids, whole

    def write_and_tell(log, row):
        write(log, row)
        if "lr" in row:  # of a step, and not of an evaluation
            # train_ddp's second phase counts its steps from 1 again
            after_step(row["step"], dealt.pop(min(dealt)))

    module.GlobalBatchSampler.__iter__ = listen
    module.RunLog.write = write_and_tell
    try:
        module.launch(module.parse_args, module.main)
    except SystemExit as end:
        return end.code
    raise AssertionError("launch() ends the process")


def run_rank(env: dict, script: str, argv: list[str], output: str) -> None:
    file, status = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1
    os.dup2(file, 1), os.dup2(file, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.environ.update(env)
    multiprocessing.set_start_method("fork", force=True)  # of its workers: as in a real process
    try:
        status = run_script(script, argv)
    except BaseException:  # a forked rank must not return into the server
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(status)


def serve(pipe) -> None:
    """Forks ranks for each request [(env, script, argv, output), ...]; answers their process ids, then how each ended:
    (exit status, when by the monotonic clock)."""
    import matplotlib.font_manager  # noqa: F401
    import sentence_transformers  # noqa: F401
    import sklearn.decomposition  # noqa: F401
    import sklearn.metrics  # noqa: F401

    torch.set_num_threads(1)
    while (request := pipe.recv()) is not None:
        pids, ends = [], {}
        for work in request:
            pids.append(os.fork())
            if pids[-1] == 0:
                os.setsid()  # what a rank leaves behind is found by its session
                run_rank(*work)
        pipe.send(pids)
        while len(ends) < len(pids):
            pid, status = os.wait()
            ends[pid] = (os.waitstatus_to_exitcode(status), time.monotonic())
            if ends[pid][0] == 2:  # a launcher, too, sees this after a while, and ends the others
                time.sleep(0.5)
                for other in set(pids) - set(ends):
                    os.kill(other, signal.SIGTERM)
        pipe.send([ends[pid] for pid in pids])


def survivors(pids: list[int], folder: Path) -> list[str]:
    """Living processes of the sessions of these (ended) ranks, or with their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, session = (process / "stat").read_text().rpartition(")")[2].split()[:4]
            started = f"OUTPUT={folder}" in (process / "environ").read_text(errors="replace").split(
                "\0"
            )
            if (int(session) in pids or started) and state not in "ZX":
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


class Server:
    """Starts ranks; one request at a time."""

    def __init__(self):
        self.pipe, theirs = forkserver().Pipe()
        # ranks have children, which a daemon may not have
        self.process = forkserver().Process(target=serve, args=(theirs,))
        self.process.start()

    def start(
        self,
        script: str,
        argv: list[str],
        folder: Path,
        world_size: int,
        faults=(),
        attempt=0,
        **env,
    ) -> None:
        """A job of `world_size` ranks; wait() comes next."""
        works, port = [], free_port()
        for rank in range(world_size):
            own = {
                "RANK": rank,
                "WORLD_SIZE": world_size,
                "LOCAL_RANK": rank,
                "LOCAL_WORLD_SIZE": world_size,
            }
            own |= {
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": 1,
                "CUDA_VISIBLE_DEVICES": "",
            }
            own |= {"FAULTS": json.dumps(faults), "OUTPUT": folder} | env
            output = f"{folder}.rank{rank}-{attempt}.txt"
            works.append(
                (
                    {k: str(v) for k, v in own.items()},
                    script,
                    [*argv, f"--output_dir={folder}"],
                    output,
                )
            )
        self.pipe.send(works)
        self.folder, self.outputs, self.begin = (
            folder,
            [Path(work[3]) for work in works],
            time.monotonic(),
        )
        self.pids = self.pipe.recv()

    def wait(self, seconds: float = 100.0) -> Run:
        """The job at its end; AssertionError with its output if it goes on longer than that."""
        if late := not self.pipe.poll(seconds):
            for pid in self.pids:
                os.kill(pid, 9)
        ends, text = self.pipe.recv(), "\n".join(path.read_text() for path in self.outputs)
        assert not late, f"still running after {seconds} s:\n{text[-3000:]}"
        deadline = time.monotonic() + 10  # wandb's own process looks for us now and then
        while (left := survivors(self.pids, self.folder)) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not left, left
        return Run(
            self.folder,
            [status for status, _ in ends],
            text,
            self.begin,
            max(when for _, when in ends),
        )

    def run(self, *job, seconds: float = 100.0, **more) -> Run:
        self.start(*job, **more)
        return self.wait(seconds)

    def close(self) -> None:
        self.pipe.send(None)
        self.process.join(5)
        self.process.kill()


class Run:
    """A finished run: exit statuses, output of every rank, its folder."""

    def __init__(
        self, folder: Path, statuses=(), text: str = "", begin: float = 0.0, end: float = 0.0
    ):
        self.folder, self.statuses, self.text, self.begin, self.end = (
            folder,
            list(statuses),
            text,
            begin,
            end,
        )

    @property
    def seconds(self) -> float:
        """From the (last) fault to the end of the last rank; without a fault from the start."""
        mark = Path(f"{self.folder}.fault")
        return self.end - (float(mark.read_text()) if mark.exists() else self.begin)

    @property
    def rows(self) -> list[dict]:
        return [
            json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()
        ]

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.rows if "loss" in row]

    @property
    def summary(self) -> dict:
        return json.loads((self.folder / "summary.json").read_text())

    @property
    def evaluated(self) -> list[int]:
        """Steps after which held-out figures were recorded."""
        return sorted(
            {row["step"] for row in self.rows if row["step"] and "samples_per_s" not in row}
        )

    def trained_on(self) -> dict[int, list[int]]:
        """{step: ids over all ranks}; of a step that was made twice (after a kill) the last time counts."""
        steps: dict[int, list[int]] = {}
        for trace in sorted(self.folder.parent.glob(f"{self.folder.name}.trace-*")):
            mine = {number: ids for number, ids in map(json.loads, trace.read_text().splitlines())}
            for number, ids in mine.items():
                steps.setdefault(number, []).extend(ids)
        return steps


def state_of(run: Run) -> dict:
    return torch.load(run.folder / "latest.pt", weights_only=True)


def differences(a, b, path: str = "") -> list[str]:
    """Places where two nested states differ in a bit."""
    if isinstance(a, torch.Tensor):
        return [] if a.dtype == b.dtype and torch.equal(a, b) else [path]
    if isinstance(a, dict):
        return [
            d for k in a.keys() | b.keys() for d in differences(a.get(k), b.get(k), f"{path}.{k}")
        ]
    if isinstance(a, (list, tuple)) and len(a) == len(b):
        return [
            d
            for i, (x, y) in enumerate(zip(a, b, strict=True))
            for d in differences(x, y, f"{path}[{i}]")
        ]
    return [] if a == b else [path]


def apart(ours: Run, theirs: Run) -> list[str]:
    """Places where the checkpoints of two runs differ, without what is of one run alone. (A learning
    rate is set anew in each step: after the last it may be that of the options.)"""
    states = [state_of(ours), state_of(theirs)]
    for state in states:
        for group in state["optimizer"]["param_groups"]:
            group.pop("lr")
    kept = states[1].keys() - NOT_COMPARED
    return [place for key in kept for place in differences(states[0][key], states[1][key], key)]


if __name__ == "__main__":  # torchrun runs.py SCRIPT OPTIONS...: FAULTS are of the first attempt
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        os.environ["FAULTS"] = "[]"
    sys.exit(run_script(sys.argv[1], sys.argv[2:]))
