"""Where the time of a training step goes, for each script.

    python benchmarks/profile_steps.py
    python benchmarks/profile_steps.py --scripts run_dpo_ddp --steps 5

One process, one thread, fp32, on a CPU; main() with the configuration of the script's quickstart.
After --warm steps the time of --steps steps is measured without torch.profiler, then that of as
many more with it: what the profiler costs is the difference of both columns of steps/s. Where a run
fails, the others go on, and the exit status is 1.

Shares are of the time of the profiled steps and add up to 100 %:

data         until the next batch is there
optimizer    clipping, the fused update, the agreement on the step (StepGuard)
operators    all else that PyTorch computes, forward and backward, by kind, each with the time that
             it spends itself. overhead: views, memory, random numbers, the bookkeeping of autograd
python       the rest
"""

import importlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import sides
import torch

COMMON = "--device=cpu --precision=fp32 --log_every=5 --save_every=1000000"
TEXTS = """--config=configs/train_ddp_quickstart.yaml --global_batch_size=64
    --max_samples_phase1=4000 --max_samples_phase2=4000 --cache_dir={work}/cache"""
DIGITS = "--config=configs/config_rebm_quickstart.yaml --data={work}/digits"
RUNS = {  # the script and what it does: its options beside COMMON
    "train_ddp, phase 1": f"{TEXTS} --skip_phase2",
    "train_ddp, phase 2": f"{TEXTS} --skip_phase1",
    "run_train_uniref50_ddp": """--config=configs/config_uniref50_quickstart.yaml
        --cache_dir={work}/cache""",
    "run_dpo_ddp": "--config=configs/run_dpo_ddp_quickstart.yaml --sft_epochs=0 --num_orders=1",
    "run_train_quantumgrav_ddp": """--config=configs/config_quantumgrav_quickstart.yaml
        --data={work}/sets""",
    "run_train_rebm_ddp, stage 1": f"{DIGITS} --stage=at",
    "run_train_rebm_ddp, stage 2": f"""{DIGITS} --stage=dat --attack.start_step=10
        --ckpt_path={{work}}/stage_1/latest.pt""",  # of the run before
}
TOOLS = {  # what must be run before a script
    "run_train_quantumgrav_ddp": "make_causal_sets.py --samples=3000 --out={work}/sets",
    "run_train_rebm_ddp": "prepare_images.py digits --out={work}/digits",
}
KINDS = {  # of operators: a part of their names; the first that fits
    "attention": "attention",
    "convolutions": "conv",
    "overhead": r"view|stride|empty|detach|resize|::select$|::slice$|squeeze|transpose|permute"
    r"|reshape|expand|narrow|split|chunk|unbind|alias|lift_fresh|result_type|::t$|item"
    r"|_local_scalar|rand|bernoulli|uniform_|::normal_",
    "matrix products": r"mm|mv|::dot|linear|matmul|einsum",
    "normalisation": r"(layer|batch|group)_norm",
    "copies, indexing": r"copy|clone|contiguous|_to$|::to$|index|gather|scatter|embedding|select_b"
    r"|slice_b|sort|fill|zero|ones|full|cat|stack|pad|repeat|searchsorted|nonzero|roll|flip|arange",
    "element-wise, sums": "",
}
COLUMNS = ["data", *KINDS, "optimizer", "python"]


# ---- One run, in a process of its own ------------------------------------------------------------


def mark(owner, name, region):
    """Let the profiler see when a function runs."""
    plain = getattr(owner, name)

    def marked(*args):
        with torch.profiler.record_function(f"region: {region}"):
            return plain(*args)

    setattr(owner, name, marked)


class Recorder:
    """Counts the steps of a script; sends what it found, and has the script stop."""

    def __init__(self, pipe, script, warm, steps):
        self.pipe = pipe
        self.script = script
        self.warm = warm
        self.steps = steps
        self.done = 0
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        self.attacks = {}
        mark(torch.utils.data.dataloader._BaseDataLoaderIter, "__next__", "data")
        mark(script.StepGuard, "update", "optimizer")
        mark(script.StepGuard, "agree", "optimizer")
        if hasattr(script, "Attack"):
            self.time_attacks()
        sides.watch_steps(script, self.step_done)

    def time_attacks(self):
        plain = self.script.Attack.__call__

        def timed(attack, *args):
            begin = time.perf_counter()
            result = plain(attack, *args)
            on_class = attack.gain is self.script.cross_entropy
            kind = "attack on images to classify" if on_class else "attack on OOD images"
            taken = time.perf_counter() - begin
            self.attacks[kind] = self.attacks.get(kind, 0.0) + taken
            return result

        self.script.Attack.__call__ = timed

    def step_done(self):
        self.done += 1
        now = time.perf_counter()
        if self.done == self.warm:
            self.attacks.clear()
            self.begin = now
        elif self.done == self.warm + self.steps:
            self.seconds = now - self.begin
            self.parts = {kind: taken / self.seconds for kind, taken in self.attacks.items()}
            self.profiler.start()
            self.begin = time.perf_counter()
        elif self.done == self.warm + 2 * self.steps:
            profiled = now - self.begin
            self.profiler.stop()
            found = {"seconds": self.seconds, "profiled": profiled, "parts": self.parts}
            self.pipe.send({**found, "operators": add_up(self.profiler.events())})
            self.script.stop_signal = signal.SIGTERM  # the run saves its weights and ends


def add_up(events):
    """[[kind, name, calls, seconds], ...] of all operators."""
    sums = {}
    for event in events:
        name = event.name
        if name.startswith("region: "):
            name = "python"
        row = sums.setdefault((kind_of(event), name), [0, 0.0])
        row[0] += 1
        row[1] += 1e-6 * event.self_cpu_time_total
    return [[*key, *row] for key, row in sums.items()]


def kind_of(event):
    """data or optimizer for what happens there, whatever it is; else one of KINDS."""
    above = event
    while above is not None:
        if above.name.startswith("region: "):
            return above.name.removeprefix("region: ")
        above = above.cpu_parent
    if "::" in event.name and not event.name.startswith("autograd::"):
        for kind, pattern in KINDS.items():
            if re.search(pattern, event.name):
                return kind
    return "overhead"  # nodes of autograd: what they compute is in operators below them


def run(pipe, script, options, warm, steps):
    sys.path.insert(0, str(sides.ROOT))
    sys.argv = [f"{script}.py", *options]
    module = importlib.import_module(script)
    Recorder(pipe, module, warm, steps)
    module.launch(module.parse_args, module.main)


# ---- All runs and the tables ---------------------------------------------------------------------


def profile(name, work, args):
    script, _, place = name.partition(", ")
    place = place.replace(" ", "_") or "run"
    options = f"{RUNS[name]} {COMMON} --output_dir={{work}}/{place}".format(work=work).split()
    with sides.Sides(work) as processes:
        processes.start(place, run, script, options, args.warm, args.steps)
        found = processes.hear(place)
        processes.wait(place)  # until its weights are there
    return found


def shares(found):
    """Per cent of the time, by column."""
    sums = dict.fromkeys(COLUMNS, 0.0)
    for kind, _, _, seconds in found["operators"]:
        sums[kind] += 100 * seconds / found["profiled"]
    sums["python"] = 100 - sum(sums.values())
    return sums


def print_operators(name, found, steps):
    """The five that take most, by step."""
    rows = sorted(found["operators"], key=lambda row: -row[3])
    for kind, operator, calls, seconds in rows[:5]:
        share = f"{seconds / found['profiled']:.1%}"
        cells = [kind, operator, f"{calls / steps:,.1f}", f"{1000 * seconds / steps:.3f}", share]
        sides.print_row(name, *cells)


def main():
    scripts = list(dict.fromkeys(name.partition(", ")[0] for name in RUNS))
    parser = sides.make_parser(__doc__)
    add = parser.add_argument
    text = f"which: {', '.join(scripts)}"
    add("--scripts", nargs="+", default=scripts, choices=scripts, metavar="NAME", help=text)
    add("--steps", type=int, default=10, help="steps that are measured, and again profiled")
    add("--warm", type=int, default=3, help="steps before them")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.chdir(sides.ROOT)
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    print(f"1 process x 1 thread, {args.steps} steps after {args.warm}; per cent of their time\n")
    sides.print_head("run", "steps/s", "profiled", *COLUMNS)
    results = {}
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for script in args.scripts:
            work = Path(folder, script)
            work.mkdir()
            if script in TOOLS:
                tool, *options = TOOLS[script].format(work=work).split()
                command = [sys.executable, sides.ROOT / "tools" / tool, *options]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            for name in RUNS:
                if name.partition(", ")[0] != script:
                    continue
                try:
                    found = profile(name, work, args)
                except sides.SideEnded as error:  # the others go on
                    print(error, file=sys.stderr)
                    sides.print_row(name, "failed", *[""] * (len(COLUMNS) + 1))
                    failed = True
                    continue
                results[name] = found
                speeds = [args.steps / found[key] for key in ("seconds", "profiled")]
                cells = [f"{speed:.2f}" for speed in speeds]
                cells += [f"{share:.1f}" for share in shares(found).values()]
                sides.print_row(name, *cells)
    print()
    for name, found in results.items():
        if found["parts"]:
            parts = [f"{part} {share:.1%}" for part, share in found["parts"].items()]
            rest = 1 - sum(found["parts"].values())
            print(f"{name}: {', '.join(parts)}, training passes and all else {rest:.1%}")
    print()
    sides.print_head("run", "counts as", "operator", "calls per step", "ms per step", "share")
    for name, found in results.items():
        print_operators(name, found, args.steps)
    records = []
    for name, found in results.items():
        speed = args.steps / found["seconds"]
        records.append({"run": name, "steps_per_s": speed, "shares": shares(found)})
    sides.write_json(args.json, records)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
