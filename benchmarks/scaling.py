"""How the training scripts scale: two processes of one DDP job beside two that know nothing of each
other, which do as much as this machine can do at once.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --scripts train_ddp --rounds 1 --seconds 0.5

The scripts run as they are: main() with real arguments, on small data and networks, one thread per
process, on CPUs. All processes are there from the start. In each round both sides have a turn, one
right after the other, in which each process makes the same number of steps; a turn is over with the
last of them. Work is what the script itself counts to give all ranks equal work: tokens, residues,
elements with their edges, images. A rate is the work of both processes over the time of the turn.

efficiency   rate of DDP over that of the independent processes, of the same round; with the batch
             of a process fixed (weak scaling)
all-reduce   of as many numbers as there are gradients, measured alone. A step has one, whatever the
             accumulation (the micro-batches of a step): its share is that of a step of DDP

Once with the script's own accumulation, where networks as small as these communicate much, and once
with a larger one, where they do not. There the efficiency must reach 0.95, or the exit status is 1.
"""

import importlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import sides
import torch
import torch.distributed as dist

PROCESSES = 2
LIMIT = 0.95  # of the efficiency, with the larger accumulation
COMMON = "--device=cpu --precision=fp32 --save_every=1000000"


# ---- What the scripts are given ------------------------------------------------------------------


def texts(folder):
    """The documentation that comes with Python and packages; a BERT of 4 layers of 256."""
    return f"""--phase1_data=pydocs --phase2_data=pydocs --max_samples_phase1=4000
        --max_samples_phase2=4000 --teacher_model=builtin:lsa:64 --student_model=builtin:bert:4x256
        --student_max_length=48 --eval_samples=20 --skip_phase2 --cache_dir={folder}/cache"""


def proteins(folder):
    """The shipped proteins; the network of the quickstart, half as wide."""
    return f"""--datafile={sides.ROOT}/data/uniref_sample.fasta.gz --cache_dir={folder}/cache
        --max_protein_len=256 --hidden_size=64 --n_blocks_prot=4 --n_heads=4 --cond_dim=64"""


def structures(folder):
    """Pairs of the six shortest of the shipped structures, their sequences as they are and shifted
    three ways; ProteinMPNN at full size."""
    data = sides.ROOT / "data" / "dpo"
    short = ("1EJG", "1LCD", "1ORC", "1A8O", "1UBI", "1A7G")
    rows = []
    for row in json.loads((data / "pairs.json").read_text()):
        if not row["pdb_file"].startswith(short):
            continue
        for shift in (0, 10, 20, 30):
            moved = {"pdb_file": str(data / row["pdb_file"])}
            for name in ("preferred_seq", "unpreferred_seq"):
                moved[name] = row[name][shift:] + row[name][:shift]
            rows.append(moved)
    (folder / "pairs.json").write_text(json.dumps(rows))
    return f"""--train_data={folder}/pairs.json --base_model_name=random --temperature=1
        --num_orders=1"""


def causal_sets(folder):
    """Sets of nearly one size; the default network."""
    options = f"--out={folder}/sets --samples=4000 --min_size=112 --max_size=128"
    run_tool("make_causal_sets.py", f"{options} --split 0.9 0.05 0.05")
    return f"--data={folder}/sets"


def digits(folder):
    """Stage 2 on scikit-learn's digits, from random weights: 16 attack steps on OOD images, 8 on
    those to classify."""
    run_tool("prepare_images.py", f"digits --out={folder}/digits")
    script = importlib.import_module("run_train_rebm_ddp")
    with mock.patch("sys.argv", ["run_train_rebm_ddp.py"]):
        model = script.make_network(script.parse_args(), 10, 1, 8)
    torch.save(model.state_dict(), folder / "start.pt")  # noqa: TID251
    return f"""--data={folder}/digits --stage=dat --ckpt_path={folder}/start.pt
        --attack.max_steps=16 --attack.start_step=16 --attack.step_size=0.2
        --indist_attack_clf.max_steps=8 --n_imgs_per_evaluation_log=0"""


def run_tool(name, options):
    command = [sys.executable, sides.ROOT / "tools" / name, *options.split()]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


class Workload(NamedTuple):
    options: Callable  # folder -> options of the script; it makes their data in the folder
    unit: str  # of the work
    batch: int  # samples per process and micro-batch
    own: int  # the script's own accumulation
    larger: int  # about as large as the samples allow


WORKLOADS = {
    "train_ddp": Workload(texts, "tokens", 64, 1, 10),
    "run_train_uniref50_ddp": Workload(proteins, "residues", 8, 4, 24),
    "run_dpo_ddp": Workload(structures, "residues", 4, 1, 12),
    "run_train_quantumgrav_ddp": Workload(causal_sets, "elements and edges", 64, 1, 24),
    "run_train_rebm_ddp": Workload(digits, "images", 64, 1, 8),
}


# ---- In a process --------------------------------------------------------------------------------


class Meter(sides.Turns):
    """Turns of a number of steps; each is answered with its begin, end and work. The first step is
    in none of them: it says that the process is ready, with the facts that no turn changes."""

    def __init__(self, pipe, script):
        super().__init__(pipe)
        self.script = script
        self.is_ready = False
        self.work = 0.0
        self.parameters = 0
        sides.watch_steps(script, self.step_done)
        self.plain_deal = script.GlobalBatchSampler.__iter__
        self.plain_wrap = script.wrap_ddp
        script.GlobalBatchSampler.__iter__ = lambda sampler: self.deal(sampler)
        script.wrap_ddp = self.wrap

    def deal(self, sampler):
        for ids, batch in self.plain_deal(sampler):
            if sampler.cost is None:
                self.work += len(ids)
            else:
                self.work += float(sampler.cost[ids].sum())
            yield ids, batch

    def wrap(self, model, args, device):
        self.parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        return self.plain_wrap(model, args, device)

    def wait(self):
        super().wait()
        self.work = 0.0

    def step_done(self):
        if not self.is_ready:
            self.is_ready = True
            self.pipe.send({"parameters": self.parameters, "reduction": self.reduction()})
            self.wait()
            return
        self.steps += 1
        if self.steps == self.asked:
            self.pipe.send({"begin": self.begin, "end": time.monotonic(), "work": self.work})
            self.wait()

    def reduction(self):
        """Seconds of an all-reduce of all gradients, the median of some."""
        numbers = torch.zeros(self.parameters)
        seconds = []
        for _ in range(20):
            begin = time.monotonic()
            dist.all_reduce(numbers)
            seconds.append(time.monotonic() - begin)
        return statistics.median(seconds)


def run_rank(pipe, name, options, environment):
    os.environ.update(environment)
    sys.path.insert(0, str(sides.ROOT))
    sys.argv = [f"{name}.py", *options]
    script = importlib.import_module(name)
    Meter(pipe, script)
    script.launch(script.parse_args, script.main)


# ---- Both sides in turns -------------------------------------------------------------------------


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def start_independent(processes, name, options, batch, folder):
    """Two processes; returns their names."""
    names = []
    for number in range(PROCESSES):
        names.append(f"independent-{number}")
        own = [f"--global_batch_size={batch}", f"--output_dir={folder}/{names[-1]}"]
        processes.start(names[-1], run_rank, name, [*options, *own], {})
        processes.hear(names[-1])  # one after the other: the first one fills the cache
    return names


def start_ddp(processes, name, options, batch, folder):
    """Two ranks of a job; returns their names, and what the first one says of itself."""
    environment = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    for variable in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        environment[variable] = str(PROCESSES)
    own = [f"--global_batch_size={batch * PROCESSES}", f"--output_dir={folder}/ddp"]
    names = []
    for rank in range(PROCESSES):
        names.append(f"ddp-{rank}")
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.start(names[-1], run_rank, name, [*options, *own], environment | place)
    facts = [processes.hear(rank) for rank in names]
    return names, facts[0]


def take_turn(processes, names, steps):
    """(work per second of all these processes, seconds of a step)"""
    for name in names:
        processes.send(name, steps)
    reports = [processes.hear(name) for name in names]
    seconds = max(report["end"] for report in reports) - min(report["begin"] for report in reports)
    work = sum(report["work"] for report in reports)
    return work / seconds, seconds / steps


def measure(name, options, accumulation, args, work):
    """Turns of both sides, and what the first rank of the job says of itself."""
    folder = work / f"accumulation-{accumulation}"
    folder.mkdir()
    batch = WORKLOADS[name].batch * accumulation
    with sides.Sides(folder) as processes:
        independent = start_independent(processes, name, options, batch, folder)
        ddp, facts = start_ddp(processes, name, options, batch, folder)
        members = {"independent": independent, "ddp": ddp}
        _, pace = take_turn(processes, independent, 1)
        steps = max(1, round(args.seconds / pace))

        def turn(side):
            return take_turn(processes, members[side], steps)

        return sides.in_rounds(members, args.rounds, turn), facts


def compare_script(name, args):
    """The table of a script. Returns the records, and whether it scales as it should."""
    workload = WORKLOADS[name]
    unit = f"{workload.unit}/s"
    records = []
    print(f"\n## {name}\n")
    names = ["accumulation", f"independent, {unit}", f"DDP, {unit}", "efficiency"]
    sides.print_head(*names, "step, ms", "all-reduce, ms (share)")
    with tempfile.TemporaryDirectory() as work:
        options = f"{workload.options(Path(work))} {COMMON} --batch_size={workload.batch}".split()
        for kind in ("own", "larger"):
            accumulation = getattr(workload, kind)
            turns, facts = measure(name, options, accumulation, args, Path(work))
            ceiling = [rate for rate, _ in turns["independent"]]
            rates = [rate for rate, _ in turns["ddp"]]
            step = statistics.median(seconds for _, seconds in turns["ddp"])
            text = f"{name}, {kind} accumulation"
            rounds = sides.compare(text, "independent processes", unit, rates, ceiling)
            efficiency = sides.ratios(rounds)
            cells = [sides.spread(ceiling, 0), sides.spread(rates, 0), sides.spread(efficiency, 2)]
            share = facts["reduction"] / step
            cells += [f"{1000 * step:,.0f}", f"{1000 * facts['reduction']:.1f} ({share:.1%})"]
            sides.print_row(accumulation, *cells)
            records += rounds
    passed = statistics.median(efficiency) >= LIMIT
    verdict = f"{'reaches' if passed else 'does not reach'} {LIMIT}"
    count = facts["parameters"]
    text = f"{count:,} parameters, {4 * count / 1e6:.1f} MB of gradients"
    print(f"\n{text}, {workload.batch} per process and micro-batch; {verdict}", flush=True)
    return records, passed


def main():
    parser = sides.make_parser(__doc__)
    add = parser.add_argument
    add("--rounds", type=int, default=20, help="turns of each side")
    text = f"which: {', '.join(WORKLOADS)}"
    add(
        "--scripts",
        nargs="+",
        default=list(WORKLOADS),
        choices=WORKLOADS,
        metavar="NAME",
        help=text,
    )
    add("--seconds", type=float, default=4.0, help="of a turn (one step at least)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    sys.path.insert(0, str(sides.ROOT))
    print(f"{os.cpu_count()} cores, {args.rounds} rounds, turns of {args.seconds:g} s", flush=True)
    records = []
    status = 0
    for name in args.scripts:
        found, passed = compare_script(name, args)
        records += found
        sides.write_json(args.json, records)
        if not passed:
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
