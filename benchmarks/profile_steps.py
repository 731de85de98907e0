"""Where the time of a training step goes, for each script.

    python benchmarks/profile_steps.py
    python benchmarks/profile_steps.py --scripts run_dpo_ddp --steps 5

One process, one thread, fp32, on a CPU; main() with the configuration of the script's quickstart.
After --warm steps the time of --steps steps is measured without torch.profiler, then that of as
many more with it: what the profiler costs is the difference of both columns of steps/s.

Shares are of the time of the profiled steps and add up to 100 %:

data         until the next batch is there
optimizer    clipping, the fused update, and how the ranks agree to go on
operators    all else that PyTorch computes, forward and backward, by kind, each with the time that
             it spends itself. overhead: views, memory, random numbers, the bookkeeping of autograd
python       the rest

Of run_train_rebm_ddp.py the share of its attacks, too.
"""

import importlib
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import bench_rebm
import sides
import torch

TEXTS = f"""--config={sides.ROOT}/configs/train_ddp_quickstart.yaml --global_batch_size=64
    --max_samples_phase1=4000 --max_samples_phase2=4000"""
DIGITS = f"--config={sides.ROOT}/configs/config_rebm_quickstart.yaml"
RUNS = {  # the script and what it does: its options
    "train_ddp, phase 1": f"{TEXTS} --skip_phase2",
    "train_ddp, phase 2": f"{TEXTS} --skip_phase1",
    "run_train_uniref50_ddp": f"""--config={sides.ROOT}/configs/config_uniref50_quickstart.yaml
        --datafile={sides.ROOT}/data/ribosomal_families.fasta.gz""",
    "run_dpo_ddp": f"""--config={sides.ROOT}/configs/run_dpo_ddp_quickstart.yaml
        --train_data={sides.ROOT}/data/dpo/pairs_charge.json
        --val_data={sides.ROOT}/data/dpo/pairs_charge_val.json
        --base_model_dir={sides.ROOT}/data/dpo --cache_dir=cache --num_orders=1 --batch_size=4""",
    "run_train_quantumgrav_ddp": f"""--data=sets.npz
        --config={sides.ROOT}/configs/config_quantumgrav_quickstart.yaml --cache_dir=cache""",
    "run_train_rebm_ddp, stage 1": f"{DIGITS} --total_epochs=0",
    "run_train_rebm_ddp, stage 2": f"""{DIGITS} --at_epochs=0 --attack_max_steps=10
        --ckpt_path=run-stage-1/latest.pt""",  # of the run before
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


def mark(owner, name, label):
    """Let the profiler see when a method runs. label: a text, or a function of its object."""
    plain = getattr(owner, name)

    def marked(this, *args):
        text = label(this) if callable(label) else label
        with torch.profiler.record_function(text):
            return plain(this, *args)

    setattr(owner, name, marked)


def port(script, options, warm, steps, answer):
    """Runs main() of a script, which ends after so many steps; writes the file `answer`."""
    sys.path.insert(0, str(sides.ROOT))
    sys.argv = [f"{script}.py", *options]
    module = importlib.import_module(script)
    mark(torch.utils.data.dataloader._BaseDataLoaderIter, "__next__", "region: data")
    mark(module, "update_if_finite", "region: optimizer")
    mark(module.Meter, "meet", "region: optimizer")
    mark(module.Meter, "add", "region: optimizer")
    if script == "run_train_rebm_ddp":

        def which(attack):
            is_on_class = attack.gain is module.cross_entropy
            return f"part: attack on {'images to classify' if is_on_class else 'OOD images'}"

        mark(module.Attack, "__call__", which)
        bench_rebm.begin_with(module, 10)
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    plain = module.Meter.add
    begins = []  # of steps: a step is from update to update here
    found = {}

    def end_step(this, *args):
        result = plain(this, *args)
        begins.append(time.perf_counter())
        if len(begins) == warm + steps:
            found["seconds"] = begins[-1] - begins[warm - 1]
            profiler.start()
            begins[-1] = time.perf_counter()
        elif len(begins) == warm + 2 * steps:
            profiler.stop()
            found["profiled"] = begins[-1] - begins[warm + steps - 1]
            found.update(add_up(profiler.events()))
            Path(answer).write_text(json.dumps(found))
            os.kill(os.getpid(), signal.SIGUSR1)  # the run saves its weights and ends
        return result

    module.Meter.add = end_step
    module.launch(module.parse_args, module.main)


def add_up(events):
    """Of all operators [[kind, name, calls, seconds], ...], and {part: seconds}."""
    sums = {}
    parts = {}
    for event in events:
        name = event.name
        if name.startswith("part: "):
            seconds = 1e-6 * event.cpu_time_total
            parts[name[6:]] = parts.get(name[6:], 0.0) + seconds
            continue
        if name.startswith("region: "):
            name = "python"
        row = sums.setdefault((kind_of(event), name), [0, 0.0])
        row[0] += 1
        row[1] += 1e-6 * event.self_cpu_time_total
    return {"operators": [[*key, *row] for key, row in sums.items()], "parts": parts}


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


# ---- All runs and the tables ---------------------------------------------------------------------


def profile(name, folder, args):
    script, _, stage = name.partition(", ")
    out = f"run-{stage.replace(' ', '-') or script}"
    answer = folder / "answer.json"
    options = [*RUNS[name].split(), *sides.COMMON.split(), f"--output_dir={out}"]
    settings = {"script": script, "options": options, "answer": str(answer)}
    settings.update(warm=args.warm, steps=args.steps)
    sides.port_job(__file__, "profile", folder, settings, 1).wait()
    return json.loads(answer.read_text())


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


def prepare(script, folder):
    if script == "run_train_quantumgrav_ddp":
        sides.run_tool("make_causal_sets.py", "--samples=3000", f"--out={folder}/sets.npz")


def main():
    scripts = list(dict.fromkeys(name.partition(", ")[0] for name in RUNS))
    parser = sides.make_parser(__doc__)
    add = parser.add_argument
    text = f"which: {', '.join(scripts)}"
    add("--scripts", nargs="+", default=scripts, choices=scripts, metavar="NAME", help=text)
    add("--steps", type=int, default=10, help="steps that are measured, and again profiled")
    add("--warm", type=int, default=3, help="steps before them")
    args = sides.parse_args(parser, port)
    print(f"1 process x 1 thread, {args.steps} steps after {args.warm}; per cent of their time\n")
    sides.print_head("run", "steps/s", "profiled", *COLUMNS)
    results = {}
    with sides.workplace() as folder:
        for script in args.scripts:
            prepare(script, folder)
            for name in RUNS:
                if name.partition(", ")[0] != script:
                    continue
                found = profile(name, folder, args)
                results[name] = found
                speeds = [args.steps / found[key] for key in ("seconds", "profiled")]
                cells = [f"{speed:.2f}" for speed in speeds]
                cells += [f"{share:.1f}" for share in shares(found).values()]
                sides.print_row(name, *cells)
    print()
    for name, found in results.items():
        for part, seconds in found["parts"].items():
            print(f"{name}: {part} {seconds / found['profiled']:.1%}")
    print()
    sides.print_head("run", "counts as", "operator", "calls per step", "ms per step", "share")
    records = []
    for name, found in results.items():
        print_operators(name, found, args.steps)
        speed = args.steps / found["seconds"]
        records.append({"run": name, "steps_per_s": speed, "shares": shares(found)})
    sides.write_json(args.json, records)


if __name__ == "__main__":
    main()
