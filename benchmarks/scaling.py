"""How the training scripts scale: two processes of one DDP job beside two that know nothing of each
other, which do as much as this machine can do at once.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --scripts train_ddp --rounds 1

The scripts run for --seconds with their start, on small data and networks, one thread per process,
on CPUs, with the batch of a process fixed (weak scaling). The independent processes start together.
Speeds are medians of the middle half of a run, in which both are at work. The ratio is the
efficiency of DDP.

Once with the script's own accumulation (the micro-batches of a step), where networks as small as
these communicate much, and once with a larger one, where they do not. There the efficiency should
reach 0.95.
"""

import statistics
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import bench_dpo
import sides

PROCESSES = 2
UNIT = "samples/s (uniref50: residues/s)"
DIGITS = """--data=digits --indist_attack_clf.max_steps=8 --n_imgs_per_evaluation_log=0
    --eval_images=64"""


class Workload(NamedTuple):
    options: str
    batch: int  # samples per process and micro-batch
    own: int  # the script's own accumulation
    larger: int  # about as large as the samples allow
    speed: str = "samples_per_s"  # its name in metrics.jsonl


WORKLOADS = {
    # the documentation of Python; a BERT of 4 layers of 256
    "train_ddp": Workload(
        """--phase1_data=pydocs --phase2_data=pydocs --max_samples_phase1=4000
        --max_samples_phase2=4000 --teacher_model=builtin:lsa:64 --student_model=builtin:bert:4x256
        --student_max_length=48 --eval_samples=20 --skip_phase2 --phase1_epochs=1000""",
        batch=64,
        own=1,
        larger=5,
    ),
    # the shipped proteins; the network of the quickstart, half as wide
    "run_train_uniref50_ddp": Workload(
        f"""--datafile={sides.ROOT}/data/uniref_sample.fasta.gz --max_protein_len=256
        --hidden_size=64 --n_blocks_prot=4 --n_heads=4 --cond_dim=64 --epochs=100000""",
        batch=8,
        own=4,
        larger=24,
        speed="residues_per_s",
    ),
    # structures of 64 residues; ProteinMPNN at full size
    "run_dpo_ddp": Workload(
        """--train_data=pairs64.json --base_model_name=random --temperature=1 --num_orders=1
        --num_epochs=100000""",
        batch=4,
        own=1,
        larger=6,
    ),
    # sets of nearly one size; the default network
    "run_train_quantumgrav_ddp": Workload(
        "--data=sets --num_epochs=100000", batch=64, own=1, larger=24
    ),
    # stage 2 on scikit-learn's digits
    "run_train_rebm_ddp": Workload(
        f"""{DIGITS} --stage=dat --ckpt_path=run-start/latest.pt --attack.max_steps=16
        --attack.start_step=16 --attack.step_size=0.2 --total_epochs=100000""",
        batch=64,
        own=1,
        larger=8,
    ),
}


def prepare(name, options, folder):
    """What the options of a script name, and the caches of those that have some."""
    if name in ("train_ddp", "run_train_uniref50_ddp"):
        sides.run_script(f"{name}.py", "first", folder, [*options, "--max_minutes=1"])
    elif name == "run_dpo_ddp":
        bench_dpo.make_pairs(64, 240, folder)
    elif name == "run_train_quantumgrav_ddp":
        options = "--samples=12000 --min_size=112 --max_size=128 --split 0.9 0.05 0.05".split()
        sides.run_tool("make_causal_sets.py", f"--out={folder}/sets", *options)
    elif name == "run_train_rebm_ddp":
        sides.run_tool("prepare_images.py", "digits", f"--out={folder}/digits")
        options = f"{DIGITS} --stage=at --at_epochs=1".split()
        sides.run_script(f"{name}.py", "start", folder, options)


def run_side(side, folder, name, options, batch):
    """Samples per second, where a process has `batch` of them in each step."""
    workload = WORKLOADS[name]

    def speed(run, processes):
        words = [*options, f"--global_batch_size={batch * processes}"]
        rows = sides.run_script(f"{name}.py", run, folder, words, processes)
        speeds = sides.speeds_of(rows, workload.speed)
        quarter = len(speeds) // 4
        return statistics.median(speeds[quarter : len(speeds) - quarter])

    if side == "ddp":
        return speed("ddp", PROCESSES)
    with ThreadPoolExecutor(PROCESSES) as pool:
        names = [f"independent-{number}" for number in range(PROCESSES)]
        return sum(pool.map(speed, names, [1] * PROCESSES))


def measure(name, args, folder):
    """Rows of the table for a script. Returns the records."""
    workload = WORKLOADS[name]
    options = workload.options.split() + [f"--batch_size={workload.batch}", "--log_every=1"]
    prepare(name, options, folder)
    options.append(f"--max_minutes={args.seconds / 60}")
    records = []
    for kind in ("own", "larger"):
        accumulation = getattr(workload, kind)
        batch = workload.batch * accumulation

        def turn(side, batch=batch):
            return run_side(side, folder, name, options, batch)

        found = sides.in_rounds(["ddp", "independent"], args.rounds, turn)
        work = f"{name}, {kind} accumulation ({accumulation})"
        others = {"independent": "independent processes"}
        records += sides.compare(work, UNIT, found, others, "ddp")
    return records


def main():
    parser = sides.make_parser(__doc__)
    add = parser.add_argument
    text = f"which: {', '.join(WORKLOADS)}"
    names = list(WORKLOADS)
    add("--scripts", nargs="+", default=names, choices=names, metavar="NAME", help=text)
    add("--seconds", type=float, default=30.0, help="of a run")
    args = parser.parse_args()
    print(f"{PROCESSES} processes x 1 thread, {args.rounds} rounds of {args.seconds:g} s\n")
    sides.print_comparison_head(UNIT)
    records = []
    with sides.workplace() as folder:
        for name in args.scripts:
            records += measure(name, args, folder)
    sides.write_json(args.json, records)


if __name__ == "__main__":
    main()
