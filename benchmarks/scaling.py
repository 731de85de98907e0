"""How the training scripts scale: two processes of one DDP job beside two that know nothing of each
other, which do as much as this machine can do at once.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --scripts train_ddp --rounds 1

All processes train on small data and networks, on CPUs, with one thread each, and the batch of a
process is the same on both sides (weak scaling). Both sides are started together. Then they work in
turns of a few seconds: while one side works, the processes of the other one are stopped (SIGSTOP).
So both see the same moods of a shared machine. The ratio is the efficiency of DDP.

Once with the script's own accumulation (the micro-batches of a step), where networks as small as
these communicate much, and once with a larger one, where they do not. There the efficiency should
reach 0.95.

Below the table are the two parts of what is lost. DDP takes processor time of its own, to copy and
add gradients. And it lets a rank wait for the other one: then its share of busy time falls.
"""

import contextlib
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import bench_dpo
import sides

PROCESSES = 2
TURN = 3.0  # seconds
UNIT = "samples/s"
DIGITS = """--data=digits --indist_attack_clf.max_steps=8 --n_imgs_per_evaluation_log=0
    --eval_images=64"""


class Workload(NamedTuple):
    options: str
    batch: int  # samples per process and micro-batch
    own: int  # the script's own accumulation
    larger: int  # about as large as the samples allow


WORKLOADS = {
    # the documentation of Python; a BERT of 4 layers of 256
    "train_ddp": Workload(
        """--phase1_data=pydocs --phase2_data=pydocs --max_samples_phase1=4000
        --max_samples_phase2=4000 --teacher_model=builtin:lsa:64 --student_model=builtin:bert:4x256
        --student_max_length=48 --eval_samples=20 --eval_every=1000000 --skip_phase2
        --phase1_epochs=1000""",
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
    ),
    # structures of 64 residues; ProteinMPNN at full size
    "run_dpo_ddp": Workload(
        """--train_data=pairs64.json --base_model_name=random --temperature=1 --num_orders=1
        --val_fraction=0.02 --num_epochs=100000""",
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
        bench_dpo.make_pairs(64, 480, folder)
    elif name == "run_train_quantumgrav_ddp":
        options = "--samples=40000 --min_size=112 --max_size=128 --split 0.98 0.01 0.01".split()
        sides.run_tool("make_causal_sets.py", f"--out={folder}/sets", *options)
    elif name == "run_train_rebm_ddp":
        sides.run_tool("prepare_images.py", "digits", f"--out={folder}/digits")
        options = f"{DIGITS} --stage=at --at_epochs=1".split()
        sides.run_script(f"{name}.py", "start", folder, options)


class Job:
    """A training run, of one process or of several. Its clock runs while it works."""

    def __init__(self, name, out, folder, options, processes, batch):
        self.metrics = folder / out / "metrics.jsonl"
        self.log = folder / f"{out}.log"
        self.batch = batch * processes  # samples of a step
        self.clock = 0.0
        self.last = None  # (clock, steps that were made) at the last step of a turn
        self.first = None  # that at the begin of the round
        self.at_begin = None  # (clock, processor seconds) then
        self.processes = []
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, sides.ROOT / f"{name}.py", *sides.COMMON.split(), *options]
        command.append(f"--global_batch_size={self.batch}")
        for rank in range(processes):
            env = os.environ | sides.ENVIRONMENT
            if processes > 1:
                env.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes))
                env.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
            with open(self.log, "a") as file:
                process = subprocess.Popen(
                    [*command, f"--output_dir={self.metrics.parent}"],
                    cwd=folder,
                    env=env,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            self.processes.append(process)

    def send(self, number):
        for process in self.processes:
            process.send_signal(number)

    def steps(self):
        """That are logged. If a process has ended, this program ends, too."""
        for process in self.processes:
            if process.poll() is not None:
                sys.exit(f"{self.log.name} ends with\n{self.log.read_text()[-3000:]}")
        return self.metrics.read_text().count('"lr"') if self.metrics.exists() else 0

    def begin_round(self):
        self.first = self.last
        self.at_begin = (self.clock, self.processor_seconds())

    def processor_seconds(self):
        """That all threads of its processes have used since they started (Linux)."""
        ticks = 0
        for process in self.processes:
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])  # in the program and in the kernel
        return ticks / os.sysconf("SC_CLK_TCK")

    def note_turn(self, begin):
        """After a turn that began then."""
        steps = self.steps()
        logged_at = self.metrics.stat().st_mtime
        if logged_at > begin:
            self.last = (self.clock + logged_at - begin, steps)
        self.clock += time.time() - begin

    def speed(self):
        """Samples per second of this round."""
        clock, steps = self.first
        last_clock, last_steps = self.last
        return (last_steps - steps) * self.batch / (last_clock - clock)

    def busy(self):
        """The share of this round in which a process of it was working, 0 to 1."""
        clock, seconds = self.at_begin
        whole = (self.clock - clock) * len(self.processes)
        return (self.processor_seconds() - seconds) / whole


def take_turn(jobs):
    begin = time.time()
    for job in jobs:
        job.send(signal.SIGCONT)
    time.sleep(TURN)
    for job in jobs:
        job.send(signal.SIGSTOP)
    for job in jobs:
        job.note_turn(begin)


@contextlib.contextmanager
def started(name, kind, options, batch, folder):
    """{side: its jobs}, stopped, after their first steps."""
    ddp = Job(name, f"{name}-{kind}-ddp", folder, options, PROCESSES, batch)
    independent = []
    for number in range(PROCESSES):
        independent.append(Job(name, f"{name}-{kind}-{number}", folder, options, 1, batch))
    jobs = [ddp, *independent]
    try:
        while min(job.steps() for job in jobs) < 2:
            time.sleep(0.2)
        for job in jobs:
            job.send(signal.SIGSTOP)
        while not all(job.last for job in jobs):
            take_turn([ddp])
            take_turn(independent)
        yield {"ddp": [ddp], "independent": independent}
    finally:
        for job in jobs:
            job.send(signal.SIGKILL)
            for process in job.processes:
                process.wait()


def measure(name, args, folder):
    """Rows of the first table for a script. Returns the records, and rows of the second table."""
    workload = WORKLOADS[name]
    options = workload.options.split() + [f"--batch_size={workload.batch}", "--log_every=1"]
    prepare(name, options, folder)
    records = []
    rows = []
    for kind in ("own", "larger"):
        accumulation = getattr(workload, kind)
        found = {"ddp": [], "independent": []}
        busy = {"ddp": [], "independent": []}
        costs = []
        with started(name, kind, options, workload.batch * accumulation, folder) as jobs:
            for _ in range(args.rounds):
                for job in [*jobs["ddp"], *jobs["independent"]]:
                    job.begin_round()
                for _ in range(math.ceil(args.seconds / TURN)):
                    for side in jobs.values():
                        take_turn(side)
                for side in found:
                    found[side].append(sum(job.speed() for job in jobs[side]))
                    busy[side].append(statistics.mean(job.busy() for job in jobs[side]))
                cost = {side: busy[side][-1] / found[side][-1] for side in found}
                costs.append(cost["ddp"] / cost["independent"])
        work = f"{name}, {kind} accumulation ({accumulation})"
        others = {"independent": "independent processes"}
        records += sides.compare(work, UNIT, found, others, "ddp")
        rows.append([work, *map(sides.spread, [*busy.values(), costs])])
        records.append({"work": work, "busy": busy, "processor_time": costs})
    return records, rows


def main():
    parser = sides.make_parser(__doc__)
    add = parser.add_argument
    text = f"which: {', '.join(WORKLOADS)}"
    names = list(WORKLOADS)
    add("--scripts", nargs="+", default=names, choices=names, metavar="NAME", help=text)
    add("--seconds", type=float, default=30.0, help="that each side works in a round")
    args = parser.parse_args()
    turns = f"{args.rounds} rounds of {args.seconds:g} s each, in turns of {TURN:g} s"
    print(f"{PROCESSES} processes x 1 thread, {turns}\n")
    sides.print_comparison_head(UNIT)
    records = []
    rows = []
    with sides.workplace() as folder:
        for name in args.scripts:
            new_records, new_rows = measure(name, args, folder)
            records += new_records
            rows += new_rows
    print()
    names = ["busy with DDP", "busy alone", "processor time a sample, DDP / alone"]
    sides.print_head("work", *names)
    for row in rows:
        sides.print_row(*row)
    sides.write_json(args.json, records)


if __name__ == "__main__":
    main()
