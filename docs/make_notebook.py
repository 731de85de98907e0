"""The cells of docs/train_ddp_example.ipynb, and the program that makes the notebook: builds it, runs it, writes it.

Run
    python docs/make_notebook.py             run all cells and write the notebook with what they print
    python docs/make_notebook.py --check     run all cells, write nothing; status 1, with the cell's name, where a cell
                                             raises or the written notebook has other cells than this file

Cells tagged `same` print the same on every machine, which --check compares too; the outputs of cells tagged `dropped`
are not written (large, or with times in them). Needs nbclient, nbformat and ipykernel.
"""

from __future__ import annotations

import argparse
import contextlib
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
CELLS: list[tuple[str, str, list[str]]] = []  # (type, source, tags)


def text(source: str) -> None:
    CELLS.append(("markdown", source.strip(), []))


def code(source: str, *tags: str) -> None:
    CELLS.append(("code", source.strip(), list(tags)))


# ---- Cells ---------------------------------------------------------------------------------------

text("""
# Training with DDP, by example

A graph network learns to tell what made a causal set, a finite partial order: a sprinkling into spacetime or one of
several imitations. `run_train_quantumgrav_ddp.py` trains it on several processes with DistributedDataParallel (DDP),
one process per GPU, or a few on the CPU where there is none. This notebook checks the machine, writes a
configuration, launches the training in three ways, reads what it wrote, and stops and resumes a run.

It runs from top to bottom, in a clone of this repository with `requirements-dev.txt` installed, and writes only into
a temporary folder. The data are tiny so that each cell takes seconds; the
[quickstart](../README.md#scripts) trains properly. Everything said here in short is in the
[DDP training guide](DDP_TRAINING_GUIDE.md).

Training processes are started *from* the notebook, not *in* it: DDP needs one process per GPU, and a cell is one
process. To keep to certain GPUs, set `CUDA_VISIBLE_DEVICES=3,4,5` before the notebook server starts.
""")

code('''
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = next(p for p in (Path.cwd(), *Path.cwd().parents) if (p / "run_train_quantumgrav_ddp.py").exists())
sys.path.insert(0, str(ROOT))
''')

code('''
import matplotlib.pyplot as plt
import torch
from IPython.display import Image

import run_train_quantumgrav_ddp as script

folder = tempfile.TemporaryDirectory(prefix="ddp-example-")  # removed at the end
os.environ["WORK"] = folder.name
WORK = Path(folder.name)

gpus = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
RANKS = min(gpus, 2) if gpus else 2
DEVICE = "" if gpus else " --device cpu"
if not gpus:  # so does torchrun; with the same for all launchers sums are rounded alike
    os.environ["OMP_NUM_THREADS"] = "1"

print(f"{RANKS} processes on the {'accelerator' if gpus else 'CPU'}")
''')

text("""
`run` starts a command as a terminal would, from the root of the repository, and returns what it printed. `$WORK` is the
temporary folder. Where a cell fails or is interrupted, the launcher gets SIGTERM, and ends its processes.
""")

code('''
PROGRAMS = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}  # of this kernel
LAUNCHED = {name for names in script.LAUNCHERS.values() for name in names}  # left by a batch queue: not for our runs

def run(command: str, stop_at: str = "", status: int = 0) -> list[str]:
    """Lines of output, without the time of day. SIGTERM is sent after the first line that holds `stop_at`."""
    command += DEVICE
    print(f"$ {command}")
    program, *words = [os.path.expandvars(word) for word in shlex.split(command)]
    env = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    process = subprocess.Popen([*PROGRAMS[program], *words], cwd=ROOT, env=env, start_new_session=True, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    lines = []
    try:
        for line in process.stdout:
            line = line.rstrip().replace(folder.name, "$WORK")
            lines.append(re.sub(r"(?<=\\]) \\d{4}-\\d\\d-\\d\\d \\d\\d:\\d\\d:\\d\\d INFO:", "", line))
            if stop_at and stop_at in line:
                process.terminate()
                stop_at = ""
        ended = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate()
    if ended != status:
        raise RuntimeError("\\n".join([*lines[-40:], f"exit status {ended}, expected {status}"]))
    return lines

def show(lines: list[str], pattern: str) -> None:
    """The lines in which the regular expression is found; there must be some."""
    found = [line for line in lines if re.search(pattern, line)]
    if not found:
        raise LookupError("\\n".join([*lines[-40:], f"no line with {pattern!r}"]))
    print(*found, sep="\\n")
''')

text("""
## 1. Check the machine

`test_ddp_setup.py` is the first command on a new machine: one line per check, OK, WARN or FAIL with what to do, and
exit status 1 if a check failed. `--quick` is the environment and one all-reduce; without it, bandwidths are measured
and the speed-up is predicted. Here only the names of the checks are shown.
""")

code('''
lines = run("python test_ddp_setup.py --quick")
for line in lines:
    if found := re.match(r"(OK|WARN|FAIL) +([a-z -]+): ", line):
        print(f"{found[1]:<6}{found[2]}" if found[1] == "OK" else line)
''')

text("""
## 2. What DDP does here

```
a step:    a global batch -> dealt to the ranks -> each rank: forward and backward on its part
                          -> gradients averaged over the ranks -> the same update on all ranks
an epoch:  all ranks train -> all ranks validate, each its part -> rank 0 decides -> one broadcast: go on or stop
```

**Which rank holds which samples.** An epoch is shuffled and cut into global batches from (seed, epoch) alone; each
batch is then dealt to the ranks. This is the sampler of the script itself: 24 samples, batches of 6. Read by columns,
the three ranks hold together exactly what one process holds, and no sample comes twice in an epoch.
""")

code('''
def samplers(ranks: int) -> list:
    contexts = [script.DDPContext(r, ranks, r, ranks, torch.device("cpu"), "gloo", "notebook") for r in range(ranks)]
    return [script.GlobalBatchSampler(24, 6, 1, 42, context) for context in contexts]

for epoch in range(2):
    for ranks in (3, 1):
        for rank, sampler in enumerate(samplers(ranks)):
            sampler.set_epoch(epoch)
            print(f"epoch {epoch}, rank {rank} of {ranks}:", *([int(i) for i in batch] for batch in sampler))
''', "same")

text("""
**Who evaluates, who decides.** All ranks validate and test, each set once: the figures do not depend on the number of
ranks, and no GPU waits for another's validation. *Rank 0 decides* (better? stop? not finite?) and one broadcast tells
all, so that the ranks cannot part. This is all of it:
""")

code('''
print(inspect.getsource(script.decide))
''', "same")

text("""
## 3. Write a configuration, launch it

`--config` takes YAML or JSON, nested as here or flat; the command line wins over it.
[configs/config_quantumgrav_ddp.yaml](../configs/config_quantumgrav_ddp.yaml) has every key with a comment.
""")

code('''
config = {
    "parallel": {"world_size": RANKS, "backend": "auto"},
    "data": {"samples": 600, "min_size": 16, "max_size": 32, "split": [0.6, 0.2, 0.2], "n_processes": 1,
             "output": str(WORK / "cache")},
    "model": {"hidden_dim": 16, "num_layers": 2, "head_dim": 16, "activation_type": "gelu",
              "pooling_layers": ["mean", "sum"]},
    "training": {"num_epochs": 20, "batch_size": 12, "optimizer_kwargs": {"lr": 1e-2},
                 "lr_scheduler_type": "ConstantLR"},
    "validation": {"batch_size": 40},
    "early_stopping": {"mode": "any", "patience": 3, "tasks": {
        "cls": {"metric": "loss", "mode": "min", "delta": 0.05, "grace_period": 2, "init_best_score": 10.0}}},
    "global_batch_size": 24, "lr_scaling": "none", "precision": "fp32", "log_every": 1, "wandb_mode": "disabled",
}
(WORK / "ddp_config.json").write_text(json.dumps(config, indent=1))
SCRIPT = "run_train_quantumgrav_ddp.py --config $WORK/ddp_config.json"
''')

text("""
**Option 1, torchrun**, which is what to use on GPUs. It starts one process per GPU and tells each its rank;
`--standalone` takes a free port. The start-up lines come from every rank, all others from rank 0.
""")

code('''
several = run(f"torchrun --standalone --nproc_per_node={RANKS} {SCRIPT} --output_dir $WORK/torchrun")
show(sorted(several), r"Process \\d/\\d started|Initialized DDP|Using device")
show(several, r"global batch|samples:|Total batch size: |parameters")
show([re.sub(" samples/s=.*", " ...", line) for line in several], r"step=(5|10|15)/")  # speeds follow
''')

text("""
**Option 2, `torch.distributed.launch`**, the older name of the same launcher. Here with one process, to compare: the
batch of a step stays 24, since `global_batch_size` says so, and is made of two micro-batches of twelve.
""")

code('''
one = run(f"python -m torch.distributed.launch --standalone --nproc_per_node=1 {SCRIPT} --output_dir $WORK/launch")
show(one, r"Process \\d/\\d started|global batch")
''')

text("""
**Option 3, multiprocessing**: plain Python starts the processes, with `--nproc 3` or, as `world_size` says so in this
configuration, without it. It is used in section 6. On a cluster:
[several machines](DDP_TRAINING_GUIDE.md#3-several-machines),
[SLURM and PBS](DDP_TRAINING_GUIDE.md#4-batch-queues-slurm-and-pbs).

## 4. What the keys mean

| Key | Meaning |
|---|---|
| `parallel.world_size` | processes that plain Python starts; under torchrun its own number wins |
| `parallel.backend` | `auto`: NCCL on NVIDIA GPUs, XCCL on Intel's, gloo on CPUs |
| `parallel.master_addr`, `parallel.master_port` | where the ranks meet, if neither a launcher nor the environment says it; on one machine a free port is found |
| `training.batch_size` | sets **per GPU** and micro-batch: 64 on 3 GPUs make steps of 192 |
| `global_batch_size` | sets per step on any number of GPUs, instead; the accumulation follows: ranks x batch size x accumulation. A multiple of ranks x batch size |
| `lr_scaling` | factor on the rate where the batch grows with N ranks: `none` 1, `linear` N, `sqrt` √N, `conservative` N up to 6; not with a fixed `global_batch_size` |
| `early_stopping.tasks` | for each task that is watched: `metric` (loss, accuracy, f1_macro, f1_weighted, ece), `mode` (min, max), `delta` by which it must get better, `grace_period` in epochs, `init_best_score` to beat |
| `early_stopping.mode` | `any` or `all` of these tasks must get better |
| `early_stopping.patience` | epochs without gain, once all grace periods are over, that end the run |

A wrong key or value is one line and exit status 2, before any process group starts. `parse_args` is what reads the
command line:
""")  # noqa: E501 (tables have long rows)

code('''
sys.argv[0] = "run_train_quantumgrav_ddp.py"  # the name in messages
try:
    script.parse_args(["--config", str(WORK / "ddp_config.json"), "--training.batchsize", "8"])
except SystemExit as end:
    print("exit status", end.code)
''')

text("""
## 5. Read what a run wrote

`metrics.jsonl` has every log line at full precision, a JSON object per line; `summary.json` what came out, with all
arguments; `curves.png` every curve. The loss of two processes and that of one are the same up to rounding, which
training amplifies slowly.
""")

code('''
def read(run_folder: str) -> tuple[dict, dict]:
    """({step: training loss}, {step: validation loss}) of a run."""
    rows = [json.loads(line) for line in (WORK / run_folder / "metrics.jsonl").read_text().splitlines()]
    return tuple({row["step"]: row[name] for row in rows if name in row} for name in ("loss", "val loss"))

figure, axis = plt.subplots(figsize=(6, 2.8), dpi=60, layout="constrained")
for name, label, width, colors in (("torchrun", f"{RANKS} process(es)", 4, ("skyblue", "gold")),
                                   ("launch", "1 process", 1, ("navy", "firebrick"))):
    for curve, part, color in zip(read(name), ("training", "validation"), colors, strict=True):
        axis.plot(curve.keys(), curve.values(), color, linewidth=width, label=f"{part}, {label}")
axis.set(xlabel="optimizer step", ylabel="nats per set")
axis.legend(fontsize="small")
plt.show()

a, b = read("torchrun")[0], read("launch")[0]
steps = (1, 2, 3, 15, 30)
print("step     ", *(f"{step:>10}" for step in steps))
for ranks, losses in ((RANKS, a), (1, b)):
    print(f"{ranks} rank(s)", *(f"{losses[step]:>10.6f}" for step in steps))
''')

code('''
summary = json.loads((WORK / "torchrun/summary.json").read_text())
for name in ("status", "steps", "epochs", "world_size", "backend", "best_metric", "baselines"):
    print(f"{name:<12}", summary[name])
''')

code('''
Image(WORK / "torchrun/curves.png", width=700)
''', "dropped")

text("""
## 6. Stop and resume

SIGTERM (`kill`, a queue's warning), SIGINT (Ctrl-C) and SIGUSR1 are agreed on by all ranks at the end of a step; then a
checkpoint is written and the run stops. The same command goes on from there, in the middle of an epoch too. The numbers
are then those of a run without the stop, here of the one that torchrun started, on a CPU bit by bit; on GPUs some
kernels add in a varying order.
""")

code('''
command = f"python {SCRIPT} --nproc {RANKS} --output_dir $WORK/stopped"
show(run(command, stop_at="Starting training epoch 1", status=143), r"checkpoint written")
print()
again = run(command)
show(again, r"resuming")

a, b = read("torchrun")[0], read("stopped")[0]
print(f"{len(a)} and {len(b)} steps; largest difference of a loss: {max(abs(a[s] - b[s]) for s in a):g}")
a, b = (script.load_checkpoint(WORK / name / "final_model.pt")["model"] for name in ("torchrun", "stopped"))
print(f"largest difference of a weight: {max((a[n] - b[n]).abs().max().item() for n in a):g}")
''')

text("""
Give another `--output_dir` for another run, or `--fresh`, which moves the old one aside. On another number of ranks a
run goes on too: the global batch stays, and no sample is repeated or skipped. `--max_minutes` stops in time for a
queue that sends no signal. More: [resume](DDP_TRAINING_GUIDE.md#10-resume),
[signals](DDP_TRAINING_GUIDE.md#11-signals-exit-statuses-requeue-time-limits).

## 7. Early stopping, and the test phase

After each epoch rank 0 compares the watched metrics with their best; `patience left` counts down. `best.pt` holds the
weights of the best epoch, and the test phase loads them.
""")

code('''
show(several, r"early stopping|better model|stopped early|testing phase|best model found")
''')

text("""
`report.json` has the test set's metrics beside baselines (always the most frequent kind; logistic regression on seven
global statistics), by size, and who was taken for whom. On so few sets it shows that all works, and little else.
""")

code('''
report = json.loads((WORK / "torchrun/report.json").read_text())
names = report["classes"]["cls"]
print(f"{report['sets']} test sets{'':<11}loss  accuracy  f1_weighted")
for name, row in {**report["baselines"]["cls"], "this network": report["test"]["cls"]}.items():
    print(f"{name:<20}{row['loss']:>8.3f}{row['accuracy']:>10.3f}{row['f1_weighted']:>13.3f}")
print("\\ntrue \\\\ found", *(f"{name:>11}" for name in names))
for name, row in zip(names, report["test"]["cls"]["confusion"], strict=True):
    print(f"{name:<12}", *(f"{count:>11}" for count in row))
''')

text("""
## 8. When something fails

| What you see | What to do |
|---|---|
| address already in use | `--standalone`, or `--master_port=29501`; `--nproc` finds a free port |
| only one GPU is visible | `export CUDA_VISIBLE_DEVICES=3,4,5`, and `nvidia-smi -L` |
| NCCL timeout | the first error of another rank is above it; if a start is slow, `--ddp_timeout_minutes 120` |
| NCCL does not start | `NCCL_DEBUG=INFO`, `NCCL_SOCKET_IFNAME=eth0`, or `--backend gloo` |
| hangs at start | see which ranks came (`Process 3/8 started`); `MASTER_ADDR`, firewall; `--ddp_timeout_minutes 2` makes it an error |
| out of memory | smaller `batch_size` with the same `global_batch_size`: the steps stay the same |
| other results than before | the same seed, ranks and threads (`OMP_NUM_THREADS=1`) give the same bits on a CPU; on GPUs the last digits vary |
| slow | `data_wait` and `comm` in the log line say whether it is the disk or the network |
| "holds a run with --…, this one has …" | the folder belongs to another run: another `--output_dir`, or `--fresh` |
| `AttributeError: epoch`, `RuntimeError: device_ids`, `KeyError` in `validator.data` | another program, the `TrainerDDP` class of the causal-set package, is running |

All of them at length: [troubleshooting](DDP_TRAINING_GUIDE.md#14-troubleshooting).
""")  # noqa: E501 (tables have long rows)

code('''
folder.cleanup()
''')


# ---- Building and running ------------------------------------------------------------------------

def build() -> nbformat.NotebookNode:
    """The notebook without outputs. Nothing in it depends on where and when it is made."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = new_notebook(metadata={"kernelspec": kernel, "language_info": {"name": "python"}})
    for number, (kind, source, tags) in enumerate(CELLS, 1):
        new = {"code": new_code_cell, "markdown": new_markdown_cell}[kind]
        notebook.cells.append(new(source, id=f"cell-{number}", metadata={"tags": tags} if tags else {}))
    return notebook


def name_of(notebook: nbformat.NotebookNode, number: int) -> str:
    """`cell 7 (code, after "1. Check the machine")` of the cell with this index from 0."""
    above = "\n".join(cell.source for cell in notebook.cells[: number + 1] if cell.cell_type == "markdown")
    heading = (re.findall(r"^#+ (.*)$", above, re.M) or ["the start"])[-1]
    return f'cell {number + 1} ({notebook.cells[number].cell_type}, after "{heading}")'


def processes(mark: str) -> dict[int, str]:
    """{process id: command line} of what lives with this mark in its environment. (Linux; else nothing is found)"""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            dead = (process / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
            if not dead and f"{MARK}={mark}" in (process / "environ").read_text(errors="replace").split("\0"):
                found[int(process.name)] = (process / "cmdline").read_text(errors="replace").replace("\0", " ")
    return found


def end_processes(mark: str, spared: set[int]) -> list[str]:
    """Kills what is left of a run; returns the command lines of what had not ended by itself within seconds."""
    deadline, commands = time.monotonic() + 5, []
    while left := {pid: command for pid, command in processes(mark).items() if pid not in spared}:
        if time.monotonic() > deadline:
            commands = commands or list(left.values())
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    return commands


def execute(notebook: nbformat.NotebookNode, timeout: int = 300) -> None:
    """Runs all cells in a new kernel, as from docs/; fills in the outputs. RuntimeError names the cell that raises, and
    says which processes were left running, all of which are ended."""
    mark, failed, left = os.urandom(8).hex(), None, []
    with tempfile.TemporaryDirectory(prefix="make-notebook-") as folder:
        # of the kernel: its files, its history, and what the cells write
        env = os.environ | {MARK: mark, "TMPDIR": folder, "IPYTHONDIR": folder, "JUPYTER_RUNTIME_DIR": folder}
        os.environ["JUPYTER_RUNTIME_DIR"] = folder  # of the client: the connection file
        client = NotebookClient(
            notebook, timeout=timeout, kernel_name="python3", resources={"metadata": {"path": str(NOTEBOOK.parent)}},
            record_timing=False, coalesce_streams=True, interrupt_on_timeout=True,
        )  # fmt: skip
        try:
            with client.setup_kernel(env=env):
                kernel = {*processes(mark)}
                for number, cell in enumerate(notebook.cells):
                    begin = time.monotonic()
                    try:
                        client.execute_cell(cell, number)
                    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
                        trace = re.sub(r"\x1b\[[\d;]*m", "", str(error))  # no colours
                        failed = f"{name_of(notebook, number)}, after {time.monotonic() - begin:.0f} s: {trace}"
                        break
                left = end_processes(mark, kernel)  # while the kernel lives: its end closes the pipes of its runs
        finally:
            end_processes(mark, set())
    if failed or left:
        raise RuntimeError("\n".join(filter(None, [failed, *(f"left running: {command}" for command in left)])))


def keep(notebook: nbformat.NotebookNode) -> None:
    """Drops what is not to be written: outputs of cells tagged so, metadata of the run."""
    notebook.metadata = build().metadata  # the kernel's version is in it
    for cell in notebook.cells:
        if cell.cell_type == "code" and "dropped" in cell.metadata.get("tags", []):
            cell.outputs, cell.execution_count = [], None


def differing(made: nbformat.NotebookNode, kept: nbformat.NotebookNode) -> str:
    """The first cell of `made` that the written notebook has otherwise, or ''. Outputs count where tagged `same`."""
    for number, cell in enumerate(made.cells):
        other = kept.cells[number] if number < len(kept.cells) else {}
        if [cell.get(n) for n in ("cell_type", "source", "metadata")] != [
            other.get(n) for n in ("cell_type", "source", "metadata")
        ]:
            return f"{name_of(made, number)} is another one"
        if cell.get("outputs") and "same" in cell.metadata.get("tags", []) and cell.outputs != other.outputs:
            return f"{name_of(made, number)} has another output"
    more = len(kept.cells) - len(made.cells)
    return f"{name_of(kept, len(made.cells))} and what follows, {more} cells, are not in the script" if more > 0 else ""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 where the notebook is not right")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which ends the kernel and what it has started
    notebook, fault = build(), ""
    if args.check:
        kept = nbformat.read(NOTEBOOK, as_version=4)
        fault = differing(notebook, kept)
    try:
        if not fault:
            execute(notebook)
            fault = differing(notebook, kept) if args.check else ""
    except RuntimeError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if fault:
        sys.stderr.write(f"{NOTEBOOK.name}: {fault}; python docs/make_notebook.py writes it anew\n")
        return 1
    if not args.check:
        keep(notebook)
        nbformat.validate(notebook)
        nbformat.write(notebook, NOTEBOOK)
    return 0


if __name__ == "__main__":
    sys.exit(main())
