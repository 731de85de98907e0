"""Where the time of a training step goes, for each script: a real run with the real arguments of its quickstart.

    python benchmarks/profile_steps.py [--scripts NAME ...] [--steps 10] [--warm 3]
    python benchmarks/profile_steps.py --scripts run_dpo_ddp --operators      # every operator of a script

One process, one thread, fp32, on a CPU. A run starts as a user starts it; from the step after the first --warm on,
torch.profiler records --steps steps, then the run is told to stop as by SIGTERM. Another run without the profiler takes
the same steps: what the profiler costs is the difference between both columns of steps/s. Phase 1 and 2 of train_ddp.py
and stages 1 and 2 of run_train_rebm_ddp.py are runs of their own (stage 2 starts from what stage 1 has left). Two
tables: shares of the time, and the most expensive operators. Where a run fails the exit status is 1.

Shares are of the wall time of the recorded steps and add up to 100 %. data: all that happens until the next batch is
there, whatever it is (RunLog.waiting, or the DataLoader). optimizer: all of the gradient clipping, the agreement on
the step, the fused update (StepGuard) and the averaged weights. The rest of the step is divided by operators, by the
time that each spends itself. bookkeeping: views, allocation, random numbers, autograd's own work. python: what is
outside operators.
The profiler adds a little to each operator, so that bookkeeping and python are rather less than shown. Evaluations and
checkpoints that fall between the steps are left out, with their time.
"""

from __future__ import annotations

import argparse
import collections
import functools
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMON = "--device=cpu --precision=fp32 --wandb_mode=disabled --log_every=5 --save_every=1000000"
RUNS = {  # name: script, its arguments beside COMMON
    "train_ddp, phase 1": ("train_ddp", """--config=configs/train_ddp_quickstart.yaml --global_batch_size=64
        --phase1_epochs=99 --max_samples_phase1=4000 --max_samples_phase2=4000 --save_to_artifacts=False
        --cache_dir={work}/cache --skip_phase2"""),
    "train_ddp, phase 2": ("train_ddp", """--config=configs/train_ddp_quickstart.yaml --global_batch_size=64
        --phase2_epochs=99 --max_samples_phase1=4000 --max_samples_phase2=4000 --save_to_artifacts=False
        --cache_dir={work}/cache --skip_phase1"""),
    "run_train_uniref50_ddp": ("run_train_uniref50_ddp", """--config=configs/config_uniref50_quickstart.yaml
        --eval_freq=1000000 --n_iters=100000 --epochs=100000"""),
    "run_dpo_ddp": ("run_dpo_ddp", """--config=configs/run_dpo_ddp_quickstart.yaml --sft_epochs=0
        --num_epochs=9999 --num_orders=1"""),
    "run_train_quantumgrav_ddp": ("run_train_quantumgrav_ddp", """--config configs/config_quantumgrav_quickstart.yaml
        --data={work}/sets --num_epochs=9999"""),
    "run_train_rebm_ddp, stage 1": ("run_train_rebm_ddp", """--config configs/config_rebm_quickstart.yaml
        --data={work}/digits --stage=at --at_epochs=9999"""),
    "run_train_rebm_ddp, stage 2": ("run_train_rebm_ddp", """--config configs/config_rebm_quickstart.yaml
        --data={work}/digits --stage=dat --total_epochs=9999 --attack.start_step=10
        --model.ckpt_path={work}/stage_1-1/latest.pt"""),
}  # fmt: skip
REGIONS = {"data": ("waiting",), "optimizer": ("step", "update_ema"), "pause": (
    "evaluate", "measure", "checkpoint", "validate", "finish_epoch", "end_epoch", "measure_stage", "save_official",
    "save_weights")}  # fmt: skip
PLAIN = "\n# " + 98 * "=" + "\n"  # in the scripts whose train() is one loop over a DataLoader
TOOLS = {  # what must be run before a script
    "run_train_quantumgrav_ddp": "make_causal_sets.py --samples=3000 --out={work}/sets",
    "run_train_rebm_ddp": "prepare_images.py digits --out={work}/digits"}  # fmt: skip
OPERATORS = {  # category: what its operators are called, after aten::
    "matrix products": r"(add)?mm|(badd)?bmm|add(bmm|mv|r)|mv|dot|linear|matmul|einsum|ger|outer|_addmm_activation",
    "attention": r".*(scaled_dot_product|_attention).*",
    "convolutions": r".*conv.*",
    "normalisation": r".*(layer|batch|group|instance)_norm.*",
    "softmax, cross entropy": r".*(softmax|cross_entropy|nll_loss|logsumexp).*",
    "copies, indexing, sparse": r""".*(copy|clone|contiguous|index|gather|scatter|embedding|sparse|coalesce|csr).*|to
        |.*(sort|fill|_backward|pad|repeat|unique|searchsorted|nonzero|roll|flip).*|zero_|cat|stack|topk|take.*|tril
        |triu|(new_)?(zeros|ones|full)(_like)?|arange|linspace|bincount|cumsum|tensor|scalar_tensor""",
    "bookkeeping": r""".*(view|as_strided|size|stride|empty|detach|resize|set_|unbind|rand|bernoulli|uniform|normal_).*
        |.*(item|_local_scalar|lift|alias|result_type|resolve_|broadcast_|unsafe_|is_).*|t|transpose|permute|reshape
        |flatten|unflatten|expand(_as)?|(un)?squeeze_?|select|slice|narrow|split(_with_sizes)?|chunk|numpy_T|unfold
        |diagonal|swapaxes|movedim|adjoint|mT|real|imag""",
    "element-wise, sums": ".*",
}  # fmt: skip
OPERATORS = {name: re.compile(pattern, re.VERBOSE) for name, pattern in OPERATORS.items()}
SHARES = [*list(OPERATORS)[:6], "element-wise, sums", "optimizer", "data", "bookkeeping", "python"]


# ---- One run, in a process of its own ----
def category(event) -> str:
    """Of an operator that is in none of REGIONS."""
    above = event
    while above is not None:
        if re.search("sparse|^SparseProduct", above.name):  # the latter is a Function of run_train_quantumgrav_ddp.py
            return "copies, indexing, sparse"  # and all below it: a product with a sparse matrix is an aten::addmm, too
        above = above.cpu_parent
    if not event.name.startswith("aten::"):
        return "bookkeeping"  # autograd's nodes: what they do is done by operators below them
    name = event.name.removeprefix("aten::")
    if name.endswith("_backward") and not re.search("select|slice|index|embedding|scatter|gather|unfold|pad", name):
        name = name.removesuffix("_backward").removesuffix("_data").removesuffix("_backward")
    return next(kind for kind, pattern in OPERATORS.items() if pattern.fullmatch(name))


def region(event) -> str:
    """The outermost of REGIONS that an event is in (or is), or ''."""
    found = ""
    while event is not None:
        if event.name.startswith("region: "):
            found = event.name.removeprefix("region: ")
        event = event.cpu_parent
    return found


def record(script: str, argv: list[str], warm: int, steps: int, profiled: bool) -> dict:
    """Runs `script`. {seconds: wall time of the steps, operators: {name: [category, calls, seconds]}}."""
    import torch

    sys.path.insert(0, str(ROOT))
    sys.argv = [f"{script}.py", *argv]
    module = importlib.import_module(script)
    plain_form = PLAIN in Path(module.__file__).read_text()
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    seen = {"entries": 0, "begin": 0.0, "seconds": 0.0, "depth": 0, "attack": 0.0}

    def timed(owner, name: str, kind: str) -> None:
        plain = getattr(owner, name)

        @functools.wraps(plain)
        def wrapper(*args, **options):
            if kind == "data":
                boundary()
            seen["depth"] += kind == "pause"
            begin = time.perf_counter()
            with torch.profiler.record_function(f"region: {kind}"):
                result = plain(*args, **options)
            seen["depth"] -= kind == "pause"
            if kind == "pause" and not seen["depth"]:
                seen["begin"] += time.perf_counter() - begin  # as if it had taken no time
            return result

        setattr(owner, name, wrapper)

    def boundary() -> None:
        """A step ends, the next one begins."""
        seen["entries"] += 1
        if seen["entries"] == warm + 1:
            if profiled:
                profiler.start()
            seen["begin"] = time.perf_counter()
        elif seen["entries"] == warm + steps + 1:
            seen["seconds"] = time.perf_counter() - seen["begin"]
            if profiled:
                profiler.stop()
            if plain_form:
                module.stop_signal = signal.SIGTERM  # the run stops after this step or the next
            else:
                module.StepGuard.signal = signal.SIGTERM

    if hasattr(module, "Attack"):  # the clock of the attacks of a step
        attack = module.Attack.__call__

        def attacked(*args):
            begin = time.perf_counter()
            try:
                return attack(*args)
            finally:
                if seen["begin"] and not seen["seconds"]:  # of the recorded steps
                    seen["attack"] += time.perf_counter() - begin

        module.Attack.__call__ = attacked
    if plain_form:
        timed(torch.utils.data.dataloader._BaseDataLoaderIter, "__next__", "data")
        timed(module.StepGuard, "update", "optimizer")
        timed(module.StepGuard, "agree", "optimizer")
        timed(module, "on_rank0", "pause")  # a checkpoint
    else:
        timed(module.RunLog, "waiting", "data")
        timed(module.StepGuard, "step", "optimizer")
    for kind in ("optimizer", "pause"):
        for name in REGIONS[kind]:
            if hasattr(module, name):
                timed(module, name, kind)
    if plain_form:
        status = module.main(module.parse_args())  # not launch(), which ends the process
        module.cleanup()
    else:
        status = module.launch(module.main, module.parse_args(argv))
    if status != 128 + signal.SIGTERM or not seen["seconds"]:
        sys.exit(f"{script}: exit status {status} before {warm + steps} steps were done")
    found: dict[tuple, list] = collections.defaultdict(lambda: [0, 0.0])
    events = profiler.events() if profiled else []
    here = next((e.thread for e in events if e.name == "region: data"), None)
    for event in events:
        inside = region(event) if event.thread == here else "other thread"
        if inside in ("pause", "other thread"):
            continue
        name = event.name if not event.name.startswith("region: ") else f"(python in {inside})"
        row = found[inside or category(event), name]
        row[0], row[1] = row[0] + 1, row[1] + event.self_cpu_time_total * 1e-6
    return {"seconds": seen["seconds"], "attack": seen["attack"], "operators": [[*key, *row] for key, row in found.items()]}


# ---- All runs and the tables ----
def start(args: argparse.Namespace, name: str, work: Path, profiled: bool) -> dict:
    script, argv = RUNS[name]
    result, log = work / "result.json", work / "log.txt"
    place = name.rpartition(", ")[2].replace(" ", "_")
    argv = [*argv.format(work=work).split(), *COMMON.split()]
    if PLAIN not in (ROOT / f"{script}.py").read_text() or script == "run_train_uniref50_ddp":
        argv.append(f"--cache_dir={work}/cache")
    if script in TOOLS:
        tool, *options = TOOLS[script].format(work=work).split()
        if not Path(options[-1].removeprefix("--out=")).exists():
            subprocess.run([sys.executable, ROOT / "tools" / tool, *options], check=True, stdout=subprocess.DEVNULL)
    argv.append(f"--output_dir={work}/{place}-{int(profiled)}")
    command = [sys.executable, __file__, "--role=run", f"--name={name}", f"--result={result}", f"--warm={args.warm}"]
    command += [f"--steps={args.steps}", f"--profiled={int(profiled)}", "--", *argv]
    env = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    with open(log, "w") as file:
        job = subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT)
        try:
            status = job.wait()
        finally:  # where this program is ended, its process ends too
            job.terminate()
            job.wait()
    if status:
        raise RuntimeError(f"{name}: exit status {status}\n" + "\n".join(log.read_text().splitlines()[-15:]))
    return json.loads(result.read_text())


def shares(found: dict) -> dict[str, float]:
    """Per cent of the wall time, by category; python is what remains."""
    sums = dict.fromkeys(SHARES, 0.0)
    for kind, _, _, seconds in found["operators"]:
        sums[kind] += 100 * seconds / found["seconds"]
    sums["python"] = 100 - sum(sums.values())
    return sums


def operator_rows(found: dict, steps: int, count: int | None) -> list[str]:
    rows = sorted(found["operators"], key=lambda row: -row[3])[:count]
    return [f"| {kind} | {name} | {calls / steps:,.1f} | {1e3 * seconds / steps:.3f} "
            f"| {seconds / found['seconds']:.1%} |" for kind, name, calls, seconds in rows]  # fmt: skip


def main() -> int:
    scripts = list(dict.fromkeys(script for script, _ in RUNS.values()))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scripts", nargs="+", default=scripts, choices=scripts, metavar="NAME",
                        help=f"which ({', '.join(scripts)})")  # fmt: skip
    parser.add_argument("--steps", type=int, default=10, help="steps that are recorded")
    parser.add_argument("--warm", type=int, default=3, help="steps before them")
    parser.add_argument("--operators", action="store_true", help="all operators, instead of five for each script")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the shares there")
    parser.add_argument("--role", default="all", choices=("all", "run"), help=argparse.SUPPRESS)
    parser.add_argument("--name", choices=RUNS, help=argparse.SUPPRESS)
    parser.add_argument("--profiled", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("argv", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role == "run":
        found = record(RUNS[args.name][0], args.argv, args.warm, args.steps, bool(args.profiled))
        args.result.write_text(json.dumps(found))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    names = [name for name, (script, _) in RUNS.items() if script in args.scripts]
    tables, records, failed = {}, [], 0
    print(f"1 process x 1 thread, {args.steps} steps after {args.warm}; per cent of the wall time of a step\n")
    print(f"| run | steps/s | profiled | {' | '.join(SHARES)} |\n|{'---|' * (3 + len(SHARES))}", flush=True)
    with tempfile.TemporaryDirectory() as work:
        for name in names:
            place = Path(work, RUNS[name][0])  # runs of a script share its cache
            place.mkdir(exist_ok=True)
            speeds = []
            try:
                for profiled in (False, True):
                    found = start(args, name, place, profiled)
                    speeds.append(args.steps / found["seconds"])
            except RuntimeError as error:  # the others go on
                failed = 1
                print(f"| {name} | failed {'| ' * (2 + len(SHARES))}", flush=True)
                print(error, file=sys.stderr)
                continue
            parts = shares(found)
            tables[name] = operator_rows(found, args.steps, None if args.operators else 5)
            if found["attack"]:
                share = min(1.0, found["attack"] / found["seconds"])
                tables[name].append(f"| all | attacks, whatever they are made of | | | {share:.1%} |")
            records.append({"run": name, "steps_per_s": speeds[0], "profiled": speeds[1], "shares": parts})
            cells = [f"{speed:.2f}" for speed in speeds] + [f"{part:.1f}" for part in parts.values()]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)
    print(f"\n| run | counts as | operator | calls per step | ms per step | share |\n|{'---|' * 6}")
    for name, rows in tables.items():
        print("\n".join(f"| {name} {row}" for row in rows))
    if args.json:
        args.json.write_text(json.dumps(records, indent=1))
    return failed


if __name__ == "__main__":
    sys.exit(main())
