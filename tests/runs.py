"""Tiny runs of every training script, whose steps are written down, and with faults on request.

    python tests/runs.py SCRIPT OPTION ...    one rank of such a run, also under torchrun

In its environment: OUTPUT, the output folder; FAULTS, [[rank, step, name in DO, number], ...], what
happens after a step (0: while the data are read); OPTIONS_OF_1, more options of rank 1 alone.
"""

import importlib
import json
import os
import shutil
import signal
import sys
import time
from functools import cached_property, partial
from pathlib import Path

import helpers
import torch
from helpers import ROOT, Ranks, rank_variables, refusal
from matplotlib.figure import Figure

SCRIPTS = sorted(path.stem for path in ROOT.glob("*.py") if path.stem != "test_ddp_setup")
RUNS = str(Path(__file__).resolve())
COMMON = """--global_batch_size=24 --log_every=1 --save_every=4 --keep_every=7 --device=cpu
    --wandb_mode=disabled --precision=fp32""".split()

# ---- Arguments of runs of a few seconds ----------------------------------------------------------
# Each writes its data into the folder: with `less`, other data of the same form.


def tiny_train_ddp(folder, less=0):
    """130 queries with two documents each; of three negatives two are drawn. Both phases."""
    with open(folder / "pairs.jsonl", "w") as file:
        for i in range(130 - less):
            place = f"item {i} of house {i % 13}"
            hall = f"{place} is in hall {i % 7}" + " indeed" * (i % 9)
            row = {"query": f"where is {place}", "positive": [hall, f"see shelf {i} for {place}"]}
            row["negatives"] = [f"nothing is known about room {i * 7 % 130}", "nothing", "no idea"]
            file.write(json.dumps(row) + "\n")
    return f"""--phase1_data={folder}/pairs.jsonl --phase2_data={folder}/pairs.jsonl
        --cache_dir={folder}/cache --teacher_model=builtin:lsa
        --student_model=builtin:bert --student_max_length=24 --projection_hidden=32
        --eval_fraction=0.2 --batch_size=6 --phase1_epochs=1 --phase2_epochs=3 --phase1_lr=3e-4
        --phase2_lr=1e-3 --num_negatives=2 --temperature=0.1""".split()


def tiny_run_train_uniref50_ddp(folder, less=0):
    """800 sequences of simple structure; averaged weights are evaluated on the way."""
    helpers.write_proteins(folder / "proteins.fasta", 800 - less)
    return f"""--datafile={folder}/proteins.fasta --cache_dir={folder}/cache --hidden_size=16
        --n_blocks_prot=2 --n_heads=2 --max_protein_len=48 --dropout=0 --batch_size=6
        --n_iters=45 --lr=0.02 --warmup=10 --ema=0.9 --optimizer=muon --val_ratio=0.05
        --eval_freq=20 --eval_sequences=30 --eval_batch_size=3 --eval_draws=1
        --num_workers=1""".split()


def tiny_run_dpo_ddp(folder, less=0):
    """80 pairs on generated helices; an evaluation after each ten steps."""
    helpers.write_structures(folder, 10, pairs=8 - less, least=8, most=12)
    return f"""--train_data={folder}/pairs.json --cache_dir={folder}/cache --base_model_name=random
        --val_fraction=0.25 --num_epochs=4 --lr=5e-4 --temperature=1
        --global_batch_size=6 --batch_size=2 --num_workers=1""".split()


def tiny_run_train_quantumgrav_ddp(folder, less=0):
    """300 small sets of 6 kinds; two tasks and a target; an evaluation after each nine steps."""
    words = f"--samples={300 - less} --min_size=14 --max_size=20 --workers=1"
    helpers.import_tool("make_causal_sets").main([f"--out={folder}/sets.npz", *words.split()])
    return f"""--data={folder}/sets.npz --cache_dir={folder}/cache --tasks cls dim
        --targets atomcount --class_weights=balanced --hidden_dim=16 --head_dim=16 --num_layers=2
        --num_epochs=5 --batch_size=6 --lr=5e-3 --num_workers=1 --timeout_minutes=2""".split()


def tiny_run_train_rebm_ddp(folder, less=0):
    """450 digits, an epoch and two of the stages; validations on the way."""
    helpers.write_digits(folder / "digits.npz", 450 - less, 60)
    return f"""--data={folder}/digits.npz --cache_dir={folder}/cache --attack.max_steps=2
        --attack.step_size=0.3 --indist_attack_clf.max_steps=1
        --indist_attack_clf.step_size=0.1 --indist_attack_clf.eps=0.15 --at_epochs=1
        --total_epochs=2 --at_optimizer=adamw --at_lr=1e-2 --optimizer=adamw --lr=3e-3
        --AUC_th=0.6 --min_imgs_per_threshold=100 --ema=0.9 --batch_size=6
        --n_imgs_per_evaluation_log=400 --num_workers=1""".split()


TINY = {name: globals()[f"tiny_{name}"] for name in SCRIPTS}
# Added where the number of processes is the same: each draws its own.
DROPOUT = dict.fromkeys(["run_train_quantumgrav_ddp", "run_train_uniref50_ddp"], ["--dropout=0.1"])

# ---- Faults --------------------------------------------------------------------------------------

PLAIN_BACKWARD = torch.Tensor.backward


def let_time_pass(minutes):
    """As if this process had started so long ago."""
    sys.modules[Path(sys.argv[0]).stem].START -= 60 * minutes


def in_next_evaluation(do, number):
    """do(number) as soon as the next evaluation of this process has begun."""
    script = sys.modules[Path(sys.argv[0]).stem]
    plain = script.evaluate

    def evaluate(*args, **options):
        script.evaluate = plain
        do(number)
        return plain(*args, **options)

    script.evaluate = evaluate


def multiply_losses(number):
    """From now on those of this rank, as they come to backward()."""
    torch.Tensor.backward = lambda loss, *more: PLAIN_BACKWARD(loss * number, *more)


def fill_disk(number):
    """Where the output folder is, so many bytes are left: enough for rows, not for a checkpoint."""
    folder = os.environ["OUTPUT"]
    Path(folder, "filler").write_bytes(bytes(shutil.disk_usage(folder).free - number))


DO = {
    "signal": signal.raise_signal,
    "evaluation": partial(in_next_evaluation, signal.raise_signal),
    "slow evaluation": partial(in_next_evaluation, let_time_pass),
    "sleep": time.sleep,
    "multiply": multiply_losses,  # also by NaN
    "fill": fill_disk,
}


def after_step(step, ids):
    """Write down what this rank was trained on, then do the FAULTS after this step."""
    rank = int(os.environ["RANK"])
    output = os.environ["OUTPUT"]
    if step > 0:
        with open(f"{output}.trace-{rank}-of-{os.environ['WORLD_SIZE']}", "a") as trace:
            trace.write(json.dumps([step, ids]) + "\n")
    for its_rank, its_step, name, number in json.loads(os.environ["FAULTS"]):
        if its_rank == rank and its_step == step:
            Path(f"{output}.fault").write_text(str(time.monotonic()))
            DO[name](number)


def run_script(script, argv):
    """One rank. Listens to the sampler, and to what each rank calls once after each step."""
    rank = os.environ["RANK"]
    sys.argv = [f"{script}.py", *argv, *os.environ.get(f"OPTIONS_OF_{rank}", "").split()]
    Figure.savefig = lambda *args, **options: None  # drawing takes a third of such a run
    # anew: the script takes the time, its parent and its name from the process that it starts in
    sys.modules.pop(script, None)
    module = importlib.import_module(script)
    deal = module.GlobalBatchSampler.__iter__
    agree = module.Meter.log_and_agree
    cached = module.cached
    dealt = {}  # {step of the phase: ids}; workers ask for it before its time

    def listen(sampler):
        dealt.clear()  # of the phase before
        for step, whole, positions in deal(sampler):
            dealt.setdefault(step, []).extend(whole[positions].tolist())
            yield step, whole, positions

    def tell_and_agree(meter, log, row, *more):
        after_step(row["step"], dealt.pop(min(dealt)))
        return agree(meter, log, row, *more)

    def tell_of_reading(cache_dir, name, key, write):
        def write_and_tell(folder):
            write(folder)
            after_step(0, [])

        return cached(cache_dir, name, key, write_and_tell)

    module.GlobalBatchSampler.__iter__ = listen
    module.Meter.log_and_agree = tell_and_agree
    module.cached = tell_of_reading
    module.launch(module.parse_args, module.main)


# ---- Runs ----------------------------------------------------------------------------------------

STOPPED = {1}  # statuses after SIGTERM
NOT_COMPARED = {"wandb_id", "args", "log_size", "data_hash"}  # in a checkpoint
MACHINE = {"samples_per_s", "data_wait", "peak_gb"}  # in metrics.jsonl
RUN_OWN = {"args", "seconds", "peak_gb"}  # in summary.json


class Run:
    """What an ended run has left."""

    def __init__(self, folder, statuses=(), text="", seconds=0.0):
        self.folder = folder
        self.statuses = list(statuses)
        self.text = text  # of all ranks
        self.seconds = seconds  # from the last fault, or the start, to the end of the last rank

    @property
    def state(self):
        return torch.load(self.folder / "latest.pt", weights_only=True)

    @property
    def step(self):
        """Of its checkpoint."""
        return self.state["loop"]["step"]

    @property
    def kept(self):
        """The files of --keep_every."""
        return sorted(path.name for path in self.folder.glob("step_*.pt"))

    @property
    def rows(self):
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    @property
    def figures(self):
        """The rows without what depends on the machine."""
        return [{**row, **dict.fromkeys(MACHINE, 0)} for row in self.rows]

    @property
    def losses(self):
        return [row["loss"] for row in self.rows if "loss" in row]

    @property
    def evaluated(self):
        """Steps after which held-out figures were recorded."""
        return sorted({row["step"] for row in self.rows if row["step"] and "lr" not in row})

    @property
    def summary(self):
        return json.loads((self.folder / "summary.json").read_text())

    def trained_on(self, world_size="*"):
        """{step: ids over all ranks}; of a step that was made twice the last time counts."""
        steps = {}
        for trace in sorted(self.folder.parent.glob(f"{self.folder.name}.trace-*-of-{world_size}")):
            own = dict(map(json.loads, trace.read_text().splitlines()))
            for step, ids in own.items():
                steps.setdefault(step, []).extend(ids)
        return steps

    def refusal(self):
        """The one line of a run that cannot work."""
        assert set(self.statuses) <= {2, -15}, self.text[-3000:]  # -15: ended by the launcher
        return refusal(self.text)


def differences(a, b, path=""):
    """Places where two nested states differ in a bit."""
    found = []
    if isinstance(a, torch.Tensor):
        if a.dtype != b.dtype or not torch.equal(a, b):
            found.append(path)
    elif isinstance(a, dict):
        for key in a.keys() | b.keys():
            found += differences(a.get(key), b.get(key), f"{path}.{key}")
    elif isinstance(a, (list, tuple)) and len(a) == len(b):
        for place, (x, y) in enumerate(zip(a, b, strict=True)):
            found += differences(x, y, f"{path}[{place}]")
    elif a != b:
        found.append(path)
    return found


def print_row(script, fault, outcome, seconds):
    """A line of benchmarks/FAULTS.md."""
    print(f"| {script}.py | {fault} | {outcome} | {seconds:.1f} |")


class Server(Ranks):
    """Runs scripts, one at a time."""

    def begin(self, script, argv, folder, world_size, faults=(), **env):
        """end() comes next."""
        more = {"FAULTS": json.dumps(faults), "OUTPUT": folder, **env}
        self.run_folder = folder
        self.fault = Path(f"{folder}.fault")
        self.fault.unlink(missing_ok=True)
        self.began_at = time.monotonic()
        argv = [RUNS, script, *argv, f"--output_dir={folder}"]
        self.start(rank_variables(world_size, **more), argv)

    def end(self):
        """The Run."""
        statuses = self.wait()
        begin = float(self.fault.read_text()) if self.fault.exists() else self.began_at
        return Run(self.run_folder, statuses, self.text, self.ended_at - begin)

    def run(self, *job):
        self.begin(*job)
        return self.end()


class Task:
    """A script with the data and the arguments of its tiny run."""

    def __init__(self, name, folder, server, *more, less=0):
        self.name = name
        self.folder = folder
        self.server = server
        self.argv = [*COMMON, *TINY[name](folder, less), *more]

    def run(self, folder, *more, ranks=2, faults=(), statuses=(0,)):
        run = self.server.run(self.name, [*self.argv, *more], folder, ranks, faults)
        assert set(run.statuses) <= set(statuses), f"{run.statuses}\n{run.text[-3000:]}"
        return run

    def check_same(self, folder, whole=None):
        """It has ended as one that nothing happened to: the same bits, samples and rows."""
        run = Run(folder)
        whole = whole or self.whole
        assert run.kept == whole.kept != []
        for name in ["latest.pt", *whole.kept]:
            states = [torch.load(own / name, weights_only=True) for own in (folder, whole.folder)]
            for state in states:
                state.update(dict.fromkeys(NOT_COMPARED))
                for group in state.get("optimizer", {}).get("param_groups", []):
                    del group["lr"]  # set anew in each step: may be of the options
            assert not differences(*states), name
        assert run.trained_on() == whole.trained_on()
        assert run.figures == whole.figures
        own = dict.fromkeys(RUN_OWN)
        assert {**run.summary, **own} == {**whole.summary, **own}

    def restart(self, folder):
        """The same command once more, nothing in its way."""
        run = self.run(folder)
        assert "resuming" in run.text, run.text[-3000:]
        self.check_same(folder)
        return run

    @cached_property
    def whole(self):
        """The run that nothing happens to, on two processes."""
        return self.run(self.folder / "whole")


if __name__ == "__main__":
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        os.environ["FAULTS"] = "[]"  # they are of the first attempt
    run_script(sys.argv[1], sys.argv[2:])
