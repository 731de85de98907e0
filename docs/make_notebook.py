"""Builds docs/train_ddp_example.ipynb from the cells below, runs it, and writes it.

Run
    python docs/make_notebook.py             run all cells; write the notebook with what they print
    python docs/make_notebook.py --check     run all cells, write nothing; status 1, with the name
                                             of the cell, if a cell raises or if the notebook has
                                             other cells than this file

Needs nbclient, nbformat and ipykernel.
"""

import argparse
import contextlib
import copy
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

NOTEBOOK = Path(__file__).with_name("train_ddp_example.ipynb")
MARK = "MAKE_NOTEBOOK_RUN"  # in the environment of every process that the notebook starts
CELLS = []


def add(make, source, *tags):
    """A cell. Nothing in it depends on where and when it is made."""
    metadata = {"tags": list(tags)} if tags else {}
    CELLS.append(make(source.strip(), id=f"cell-{len(CELLS) + 1}", metadata=metadata))


def text(source):
    add(new_markdown_cell, source)


def code(source):
    add(new_code_cell, source)


def code_same(source):
    """Prints the same on every machine; --check compares that, too."""
    add(new_code_cell, source, "same")


def code_dropped(source):
    """What it shows is large, and is not written."""
    add(new_code_cell, source, "dropped")


# --------------------------------------------------------------------------------------------------
# Cells

text("""
# Training with DDP, by example

A graph network learns to tell how a causal set, a finite partial order, was made: a sprinkling into
spacetime or one of several imitations. `run_train_quantumgrav_ddp.py` trains it on several
processes with DistributedDataParallel (DDP), one process per GPU, or a few on the CPU where there
is none. This notebook checks the machine, makes data, writes a configuration, launches the training
in three ways, reads what it wrote, and stops and resumes a run.

It runs from top to bottom, in a clone of this repository with `requirements-dev.txt` installed, and
writes only into a temporary folder. The data are tiny so that each cell takes seconds; the
[quickstart](../README.md#scripts) trains properly. Everything said here in short is in the [DDP
training guide](DDP_TRAINING_GUIDE.md#17-run_train_quantumgrav_ddppy).

Training processes are started *from* the notebook, not *in* it: DDP needs one process per GPU, and
a cell is one process. To keep to certain GPUs, set `CUDA_VISIBLE_DEVICES=3,4,5` before the notebook
server starts.
""")

code('''
import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock


def find_root():
    """The root of the repository: this folder or one above it."""
    for path in (Path.cwd(), *Path.cwd().parents):
        if (path / "run_train_quantumgrav_ddp.py").exists():
            return path
    raise FileNotFoundError("start this notebook in a clone of the repository")


ROOT = find_root()
sys.path.insert(0, str(ROOT))
''')

code("""
import matplotlib.pyplot as plt
import numpy as np
import torch
from IPython.display import Image

import run_train_quantumgrav_ddp as script

folder = tempfile.TemporaryDirectory(prefix="ddp-example-")  # removed at the end
os.environ["WORK"] = folder.name
WORK = Path(folder.name)

gpus = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
RANKS = min(gpus, 2) if gpus else 2
DEVICE = "auto" if gpus else "cpu"
if not gpus:  # torchrun does so, too; with the same for all launchers sums are rounded alike
    os.environ["OMP_NUM_THREADS"] = "1"

print(f"{RANKS} processes on the {'accelerator' if gpus else 'CPU'}")
""")

text("""
`run` starts a command as a terminal would, from the root of the repository, and returns what it
printed. `$WORK` is the temporary folder. Where a cell fails or is interrupted, the launcher gets
SIGTERM, and ends its processes.
""")

code(r'''
PROGRAMS = {  # of this kernel
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
}
# variables of a batch queue, which are not for our runs
LEFT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMPI_", "PALS_", "PMI_", "SLURM_")


def run(command, stop_at="", status=0):
    """Lines of output, without the time of day. SIGTERM is sent after the first line that holds
    `stop_at`."""
    print(f"$ {command}")
    program, *words = [os.path.expandvars(word) for word in shlex.split(command)]
    process = subprocess.Popen(
        [*PROGRAMS[program], *words],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith(LEFT)},
        start_new_session=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    lines = []
    try:
        for line in process.stdout:
            line = line.rstrip().replace(folder.name, "$WORK")
            lines.append(re.sub(r"(?<=\]) \d{4}-\d\d-\d\d \d\d:\d\d:\d\d INFO:", "", line))
            if stop_at and stop_at in line:
                process.terminate()
                stop_at = ""
        ended = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate()
    if ended != status:
        lines.append(f"exit status {ended}, expected {status}")
        raise RuntimeError("\n".join(lines[-40:]))
    return lines


def show(lines, pattern):
    """Prints the lines in which the regular expression is found; there must be some."""
    found = [line for line in lines if re.search(pattern, line)]
    if not found:
        raise LookupError("\n".join([*lines[-40:], f"no line with {pattern!r}"]))
    print(*found, sep="\n")
''')

text("""
## 1. Check the machine

`test_ddp_setup.py` is the first command on a new machine: one line per check, OK, WARN or FAIL with
what to do, and exit status 1 if a check failed. `--quick` is the environment and one all-reduce;
without it, bandwidths are measured and the speed-up is predicted. Here only the names of the checks
are shown.
""")

code("""
lines = run(f"python test_ddp_setup.py --quick --device {DEVICE}")
for line in lines:
    found = re.match(r"(OK|WARN|FAIL) +([a-z -]+): ", line)
    if found and found[1] == "OK":
        print(f"OK    {found[2]}")
    elif found:
        print(line)
""")

text("""
## 2. What DDP does here

```
a step:    a global batch -> dealt to the ranks -> each rank: forward and backward on its part
                          -> gradients summed over the ranks -> the same update on all ranks
an epoch:  all ranks train -> all ranks validate, each its part -> all have the same metrics: go on or stop
```

**Which rank holds which samples.** An epoch is shuffled and cut into global batches from (seed,
epoch) alone; each batch is then dealt to the ranks. This is the sampler of the script itself: 24
samples, batches of 6. Read by columns, the three ranks hold together exactly what one process
holds, and no sample comes twice in an epoch.
""")  # noqa: E501 (tables have long rows)

code_same("""
options = argparse.Namespace(seed=42, batch_size=6, global_batch_size=6)


def sampler(rank, ranks):
    group = {"get_rank": lambda: rank, "get_world_size": lambda: ranks}
    with mock.patch.multiple(torch.distributed, **group):
        return script.GlobalBatchSampler(np.arange(24), options, state=None)


for epoch in range(2):
    for rank, ranks in [(0, 3), (1, 3), (2, 3), (0, 1)]:
        mine = sampler(rank, ranks)
        mine.set_epoch(epoch)
        batches = [ids.tolist() for ids, whole_batch in mine]
        print(f"epoch {epoch}, rank {rank} of {ranks}:", *batches)
""")

text("""
**Who evaluates, who decides.** All ranks validate and test, each set once: the figures do not
depend on the number of ranks, and no GPU waits for another's validation. The log-probabilities are
summed over the ranks, so that all have the same metrics. Each decides by them (better? stop?), and
so all decide alike. Rank 0 writes the files.

## 3. Make data, write a configuration, launch it

The data are made once, by a tool. `--config` takes YAML or JSON, with sections as here or without;
the command line wins over it.
[configs/config_quantumgrav_ddp.yaml](../configs/config_quantumgrav_ddp.yaml) has the options with a
comment each.
""")

code("""
sets = "--samples 600 --min_size 16 --max_size 32 --split 0.6 0.2 0.2 --workers 1"
lines = run(f"python tools/make_causal_sets.py --out $WORK/sets {sets}")
show(lines, r"to train|cls")

config = {
    "parallel": {"world_size": RANKS, "backend": "auto", "device": DEVICE},
    "data": {"data": str(WORK / "sets")},
    "model": {"hidden_dim": 16, "num_layers": 2, "head_dim": 16, "pooling": ["mean", "sum"]},
    "training": {
        "num_epochs": 20,
        "batch_size": 12,
        "global_batch_size": 24,
        "lr": 1e-2,
        "schedule": "constant",
        "precision": "fp32",
        "log_every": 1,
    },
    "early_stopping": {"stop_metrics": ["loss"], "delta": 0.05, "grace": 2, "patience": 3},
}
(WORK / "ddp_config.json").write_text(json.dumps(config, indent=1))
SCRIPT = "run_train_quantumgrav_ddp.py --config $WORK/ddp_config.json"
""")

text("""
**Option 1, torchrun**, which is what to use on GPUs. It starts one process per GPU and tells each
its rank; `--standalone` takes a free port. The start-up lines come from every rank, all others from
rank 0.
""")

code(r"""
TORCHRUN = f"torchrun --standalone --nproc_per_node={RANKS}"
several = run(f"{TORCHRUN} {SCRIPT} --output_dir $WORK/torchrun")
show(sorted(several), r"Process \d/\d started|Initializing DDP")
show(several, r"ranks, |samples:|Total batch size: |parameters")
without_speeds = [re.sub(" samples_per_s=.*", " ...", line) for line in several]
show(without_speeds, r"step=(5|10|15) ")
""")

text("""
**Option 2, `torch.distributed.launch`**, the older name of the same launcher. Here with one
process, to compare: the batch of a step stays 24, since `global_batch_size` says so, and is made of
two micro-batches of twelve.
""")

code(r"""
LAUNCH = "python -m torch.distributed.launch --standalone --nproc_per_node=1"
one = run(f"{LAUNCH} {SCRIPT} --output_dir $WORK/launch")
show(one, r"Process \d/\d started|Total batch size")
""")

text("""
**Option 3, plain Python**: it starts torchrun, with `--nproc_per_node 3` or, as `world_size` says
so in this configuration, without it. It is used in section 6. On a cluster: [several
machines](DDP_TRAINING_GUIDE.md#3-several-machines), [SLURM and
PBS](DDP_TRAINING_GUIDE.md#4-batch-queues-slurm-and-pbs).

## 4. What the keys mean

| Key | Meaning |
|---|---|
| `parallel.world_size` | processes that plain Python starts; the number of a launcher, or of `--nproc_per_node`, wins |
| `parallel.backend` | `auto`: NCCL on NVIDIA GPUs, XCCL on Intel's, gloo on CPUs |
| `parallel.master_addr`, `parallel.master_port` | where the ranks meet, if neither a launcher nor the environment says it; on one machine a free port is found |
| `training.batch_size` | sets **per GPU** and micro-batch: 64 on 3 GPUs make steps of 192 |
| `training.global_batch_size` | sets per step on any number of GPUs, instead: each rank then makes as many micro-batches as that takes |
| `early_stopping.stop_metrics` | what is watched, such as `loss`, `cls/f1_weighted`, `dim/accuracy`; the first chooses `best.pt` |
| `early_stopping.stop_mode` | `any` or `all` of them must get better, by more than `delta` |
| `early_stopping.patience` | epochs without gain that end the run; the first `grace` epochs do not count |

A wrong key or value is one line and exit status 2 (under a launcher: 1), before any process group
starts.
""")  # noqa: E501 (tables have long rows)

code("""
show(run(f"python {SCRIPT} --training.batchsize 8", status=2), "error")
""")

text("""
## 5. Read what a run wrote

`metrics.jsonl` has every log line at full precision, a JSON object per line; `summary.json` what
came out, with all options; `curves.png` every curve. The loss of two processes and that of one are
the same up to rounding, which training amplifies slowly.
""")

code('''
def read(run_folder, name):
    """{step: value} of a number that a run has logged."""
    values = {}
    for line in (WORK / run_folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if name in row:
            values[row["step"]] = row[name]
    return values


def draw(run_folder, name, label, **style):
    curve = read(run_folder, name)
    axis.plot(curve.keys(), curve.values(), label=f"{name}, {label}", **style)


figure, axis = plt.subplots(figsize=(6, 2.8), dpi=60, layout="constrained")
draw("torchrun", "loss", f"{RANKS} process(es)", color="skyblue", linewidth=4)
draw("torchrun", "val/loss", f"{RANKS} process(es)", color="gold", linewidth=4)
draw("launch", "loss", "1 process", color="navy", linewidth=1)
draw("launch", "val/loss", "1 process", color="firebrick", linewidth=1)
axis.set(xlabel="optimizer step", ylabel="nats per set")
axis.legend(fontsize="small")
plt.show()

steps = (1, 2, 3, 15, 30)
print("step     ", *[f"{step:>10}" for step in steps])
for ranks, run_folder in ((RANKS, "torchrun"), (1, "launch")):
    losses = read(run_folder, "loss")
    print(f"{ranks} rank(s)", *[f"{losses[step]:>10.6f}" for step in steps])
''')

code("""
summary = json.loads((WORK / "torchrun/summary.json").read_text())
for name in ("status", "steps", "world_size", "best", "baselines"):
    print(f"{name:<12}", summary[name])
""")

code_dropped("""
Image(WORK / "torchrun/curves.png", width=700)
""")

text("""
## 6. Stop and resume

SIGTERM (`kill`, a queue's warning), SIGINT (Ctrl-C) and SIGUSR1 are agreed on by all ranks at the
end of a step; then a checkpoint is written and the run stops. The same command goes on from there,
in the middle of an epoch too. The numbers are then those of a run without the stop, here of the one
that torchrun started, on a CPU bit by bit; on GPUs some kernels add in a varying order. (torchrun
ends with 1 after a signal, whatever the statuses of its ranks.)
""")

code("""
command = f"python {SCRIPT} --output_dir $WORK/stopped"
status = 1 if RANKS > 1 else 143
show(run(command, stop_at="Starting training epoch 1", status=status), r"stopped by")
print()
again = run(command)
show(again, r"resuming")

whole = read("torchrun", "loss")
resumed = read("stopped", "loss")
largest = max(abs(whole[step] - resumed[step]) for step in whole)
print(f"{len(whole)} and {len(resumed)} steps; largest difference of a loss: {largest:g}")
whole = script.load_checkpoint(WORK / "torchrun/latest.pt")["model"]
resumed = script.load_checkpoint(WORK / "stopped/latest.pt")["model"]
largest = max((whole[name] - resumed[name]).abs().max().item() for name in whole)
print(f"largest difference of a weight: {largest:g}")
""")

text("""
Give another `--output_dir` for another run, or `--fresh`, which moves the old one aside. On another
number of ranks a run goes on too: the global batch stays, and no sample is repeated or skipped.
`--max_minutes` stops in time for a queue that sends no signal. More:
[resume](DDP_TRAINING_GUIDE.md#9-resume),
[signals](DDP_TRAINING_GUIDE.md#10-signals-exit-statuses-time-limits).

## 7. Early stopping, and the test phase

After each epoch the watched metrics are compared with their best. `best.pt` holds the weights of
the best epoch, and the test phase loads them.
""")

code("""
show(several, r"better model|Stopped early|testing phase")
""")

text("""
`summary.json` has the test set's metrics beside the accuracy of baselines: always the commonest
kind, and logistic regression on seven global statistics. `confusion_cls.png` shows which kind was
taken for which. On so few sets it shows that all works, and little else.
""")

code("""
accuracies = {**summary["baselines"]["cls"], "this network": summary["test"]["cls/accuracy"]}
for name, accuracy in accuracies.items():
    print(f"{name:<20}{accuracy:.3f}")
""")

code_dropped("""
Image(WORK / "torchrun/confusion_cls.png", width=400)
""")

text("""
## 8. Several seeds, and a changed script

One run says little. The run of section 3 had the default seed, 42; here is another one.
`tools/compare_runs.py` makes a table: mean and standard deviation over the seeds.
""")

code(r"""
run(f"{TORCHRUN} {SCRIPT} --seed 1 --output_dir $WORK/seed1")
compare = "python tools/compare_runs.py $WORK/torchrun $WORK/seed1 --metrics cls/accuracy"
print(*run(compare), sep="\n")
""")

text("""
To use another network, metric or loss: [change the
script](DDP_TRAINING_GUIDE.md#19-change-a-script) shows each as a small diff. Here the one for
another metric is applied to a copy of the script.
""")

code(r"""
guide = (ROOT / "docs/DDP_TRAINING_GUIDE.md").read_text().split("**Another metric.**")[1]
diff = re.search("```diff\n(.*?)```", guide, re.DOTALL)[1]
print(diff)

copy = WORK / "changed" / "run_train_quantumgrav_ddp.py"
copy.parent.mkdir()
copy.write_text((ROOT / copy.name).read_text())
subprocess.run(["git", "init", "--quiet"], cwd=copy.parent, check=True)
subprocess.run(["git", "apply", "-"], cwd=copy.parent, input=diff, text=True, check=True)

options = "--num_epochs 1 --stop_metrics cls/balanced_accuracy --output_dir $WORK/metric"
lines = run(f"{TORCHRUN} $WORK/changed/{SCRIPT} {options}")
print(*re.findall(r"val/cls/balanced_accuracy=\S+", "\n".join(lines)))
""")

text("""
## 9. When something fails

| What you see | What to do |
|---|---|
| address already in use | `--standalone`, or `--master_port=29501`; `--nproc_per_node` of the script finds a free port |
| only one GPU is visible | `export CUDA_VISIBLE_DEVICES=3,4,5`, and `nvidia-smi -L` |
| NCCL timeout | the first error of another rank is above it; if a start is slow, `--timeout_minutes 120` |
| NCCL does not start | `NCCL_DEBUG=INFO`, `NCCL_SOCKET_IFNAME=eth0`, or `--backend gloo` |
| hangs at start | see which ranks came (`Process 3/8 started`); `MASTER_ADDR`, firewall; `--timeout_minutes 2` makes it an error |
| out of memory | smaller `batch_size` with the same `global_batch_size`: the steps stay the same; in validation smaller `eval_edges` |
| other results than before | the same seed, ranks and threads (`OMP_NUM_THREADS=1`) give the same bits on a CPU; on GPUs `--deterministic` |
| slow | `data_wait` in the log line above 0.05: `--num_workers 2` |
| "the checkpoint does not fit" | the folder belongs to another run: another `--output_dir`, or `--fresh` |
| `AttributeError: epoch`, `RuntimeError: device_ids`, `KeyError` in `validator.data` | another program, the `TrainerDDP` class of the causal-set package, is running |

All of them at length: [troubleshooting](DDP_TRAINING_GUIDE.md#13-troubleshooting).
""")  # noqa: E501 (tables have long rows)

code("""
folder.cleanup()
""")


# --------------------------------------------------------------------------------------------------
# Building and running


def build():
    """The notebook without outputs."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return new_notebook(metadata=metadata, cells=copy.deepcopy(CELLS))


def name_of(notebook, number):
    """`cell 7 (code, after "1. Check the machine")` of the cell with this index from 0."""
    heading = "the start"
    for cell in notebook.cells[: number + 1]:
        if cell.cell_type == "markdown":
            for found in re.findall(r"^#+ (.*)$", cell.source, re.M):
                heading = found
    return f'cell {number + 1} ({notebook.cells[number].cell_type}, after "{heading}")'


def processes(mark):
    """{process id: command line} of the living processes with this mark in their environment.
    (Linux; elsewhere nothing is found)"""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
            variables = (process / "environ").read_text(errors="replace").split("\0")
            if f"{MARK}={mark}" in variables and state not in "ZX":
                command = (process / "cmdline").read_text(errors="replace")
                found[int(process.name)] = command.replace("\0", " ")
    return found


def end_processes(mark, spared):
    """Kills what is left of a run. Returns the command lines of what did not end by itself within
    5 seconds."""
    deadline = time.monotonic() + 5
    late = {}
    while True:
        left = processes(mark)
        for pid in spared:
            left.pop(pid, None)
        if not left:
            return list(late.values())
        if time.monotonic() > deadline:
            late.update(left)
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def run_cells(client, notebook):
    """Runs the cells up to one that fails. Returns its name and what it raised, or ''."""
    for number, cell in enumerate(notebook.cells):
        begin = time.monotonic()
        try:
            client.execute_cell(cell, number)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            trace = re.sub(r"\x1b\[[\d;]*m", "", str(error))  # no colours
            seconds = time.monotonic() - begin
            return f"{name_of(notebook, number)}, after {seconds:.0f} s: {trace}"
    return ""


def execute(notebook):
    """Runs all cells in a new kernel, as from docs/, and fills in the outputs. Ends all processes
    that the cells have started. RuntimeError names a cell that raises, and what was left running.
    """
    mark = os.urandom(8).hex()
    with tempfile.TemporaryDirectory(prefix="make-notebook-") as folder:
        os.environ["JUPYTER_RUNTIME_DIR"] = folder  # files of the client and of the kernel
        env = {**os.environ, MARK: mark, "TMPDIR": folder, "IPYTHONDIR": folder}
        client = NotebookClient(
            notebook,
            timeout=300,  # seconds per cell
            kernel_name="python3",
            resources={"metadata": {"path": str(NOTEBOOK.parent)}},
            record_timing=False,
            coalesce_streams=True,
            interrupt_on_timeout=True,
        )
        try:
            with client.setup_kernel(env=env):
                kernel = list(processes(mark))
                failed = run_cells(client, notebook)
                # while the kernel lives: its end closes the pipes of its runs
                left = end_processes(mark, kernel)
        finally:
            end_processes(mark, [])
    problems = [failed] if failed else []
    for command in left:
        problems.append(f"left running: {command}")
    if problems:
        raise RuntimeError("\n".join(problems))


def find_difference(made, kept):
    """The first cell of `made` that the written notebook has otherwise, or ''."""
    for number, cell in enumerate(made.cells):
        name = name_of(made, number)
        if number == len(kept.cells):
            return f"{name} is missing"
        other = kept.cells[number]
        for part in ("cell_type", "source", "metadata"):
            if cell[part] != other[part]:
                return f"{name} is another one"
        if "same" in cell.metadata.get("tags", []) and cell.outputs not in ([], other.outputs):
            return f"{name} has another output"
    if len(kept.cells) > len(made.cells):
        return f"{name_of(kept, len(made.cells))} is not in the script"
    return ""


def compare(made, kept):
    difference = find_difference(made, kept)
    if difference:
        hint = "python docs/make_notebook.py writes it anew"
        raise RuntimeError(f"{NOTEBOOK.name}: {difference}; {hint}")


def check():
    kept = nbformat.read(NOTEBOOK, as_version=4)
    notebook = build()
    compare(notebook, kept)
    execute(notebook)
    compare(notebook, kept)  # now also the outputs


def write():
    notebook = build()
    execute(notebook)
    notebook.metadata = build().metadata  # without the kernel's version
    for cell in notebook.cells:
        if "dropped" in cell.metadata.get("tags", []):
            cell.outputs = []
            cell.execution_count = None
    nbformat.validate(notebook)
    nbformat.write(notebook, NOTEBOOK)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    # SystemExit ends the kernel, and what it has started
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if args.check:
            check()
        else:
            write()
    except RuntimeError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
