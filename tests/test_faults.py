"""What happens to long runs, done to every script: how the run ends, in how many seconds, that it
leaves no process behind, and that the same command afterwards ends, bit for bit, where the
undisturbed run does.

The test command has most faults with one script. This has every script x every fault, and writes
the table, also of the faults of two other files:

    python -m pytest --dist worksteal tests/test_contract.py tests/test_faults.py
        tests/test_two_hosts.py --all-faults --matrix FILE
"""

import contextlib
import functools
import json
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT, TWO_RANKS, Job, call_script, environment, on_small_disk, refusal
from runs import COMMON, DROPOUT, RUNS, SCRIPTS, Run, Task, assert_same_end


def make_task(name, folder, server):
    return Task(name, folder, server, *DROPOUT.get(name, []))


@pytest.fixture(scope="module")
def find_task(server, tmp_path_factory):
    """find_task(script): its Task, the same for all tests of this file."""
    return functools.cache(lambda name: make_task(name, tmp_path_factory.mktemp(name), server))


class Case:
    """A script, the folder of its run, and what is asserted of all runs."""

    def __init__(self, task, folder):
        self.task = task
        self.server = task.server
        self.folder = folder / "run"
        self.seconds = 0.0  # from the fault to the end

    def run(self, *faults, more=(), statuses=(0,), within=30):
        """A run with faults, of which all ranks end with one of `statuses`, `within` so many
        seconds of the last fault."""
        run = self.task.run(self.folder, *more, faults=faults, statuses=statuses)
        assert "Traceback" not in run.text, run.text[-3000:]
        assert run.seconds < within, run.text[-3000:]
        self.seconds = max(self.seconds, run.seconds)
        return run

    def begin(self, *faults, more=(), **env):
        """A run that goes on beside the test; self.server.end() comes next."""
        argv = [*self.task.argv, *more]
        self.server.begin(self.task.name, argv, self.folder, 2, faults, **env)

    def refusal(self, *more):
        """The one error of one process that cannot work."""
        begin = time.monotonic()
        text = call_script(self.task.name, *self.task.argv, *more, status=2)
        self.seconds = max(self.seconds, time.monotonic() - begin)
        return refusal(text)

    def job(self, command, **env):
        """A Job, with the imports of a real interpreter."""
        return Job(command, self.folder.with_name("job.txt"), environment(**env))

    def check_same(self, figures=True):
        """As the run that nothing happened to. (A full disk takes some rows.)"""
        run = Run(self.folder)
        assert_same_end(run, self.task.whole)
        assert not figures or run.figures == self.task.whole.figures

    def restart(self, figures=True):
        """The same command, nothing in its way."""
        run = self.task.run(self.folder)
        assert "resuming" in run.text, run.text[-3000:]
        self.check_same(figures)

    @contextlib.contextmanager
    def small_disk(self):
        """The run's folder has room for the files of a run, and for some more."""
        size = 6 * (self.task.whole.folder / "latest.pt").stat().st_size + (2 << 20)
        self.folder.mkdir(exist_ok=True)
        with on_small_disk(self.folder, size):
            yield

    def copy_task(self):
        """(the same task, path of its data): a copy, which may be damaged."""
        folder = self.folder.with_name("own")
        folder.mkdir()
        task = make_task(self.task.name, folder, self.server)
        return task, Path(task.argv[len(COMMON)].partition("=")[2])  # of its first own option


# --------------------------------------------------------------------------------------------------
# Data


def change(path):
    """Other data of the same form: without the last row."""
    if path.suffix == ".npz":
        arrays = dict(np.load(path))
        for name in arrays.keys() - {"x_test", "y_test"}:
            arrays[name] = arrays[name][:-1]
        np.savez(path, **arrays)
    elif path.suffix == ".json":
        rows = json.loads(path.read_text())
        path.write_text(json.dumps(rows[:-1]))
    else:  # a sequence of a FASTA file has two lines
        lines = path.read_text().splitlines()
        path.write_text("\n".join(lines[:-2]) + "\n")


# --------------------------------------------------------------------------------------------------
# Faults: each returns its outcome for the table


def wall_clock_limit(case):
    run = case.run([0, 9, "sleep", 3], more=["--max_minutes=0.05"])
    assert run.summary["status"] == "stopped by time limit"
    case.restart()
    return "--max_minutes: checkpoint, status 0; the same bits after a restart"


def disk_full(case):
    with case.small_disk():
        # full from 9 to 15 and from 17 on: step 12's checkpoint is not written, step 16's is
        faults = [[0, 9, "fill", 0], [0, 15, "free", 0], [0, 17, "fill", 0]]
        run = case.run(*faults, [1, 22, "signal", signal.SIGKILL], statuses={-9, 1})
        assert re.search("no latest.pt at step 12 .is the disk full. .*the run goes on", run.text)
        assert "No space left" in run.text
        assert run.step == 16
        assert run.rows, "each line is whole"

        (case.folder / "filler").unlink()
        case.restart(figures=False)

    outcome = "a warning, the old checkpoint is whole, training goes on"
    return f"{outcome}; killed meanwhile: the same bits after a restart"


def disk_full_in_an_evaluation(case):
    """The checkpoint before it is not written, and then the run is to stop."""
    with case.small_disk():
        step = case.task.whole.evaluated[0]
        faults = [[0, step - 1, "fill", 0], [1, step - 1, "evaluation", signal.SIGTERM]]
        run = case.run(*faults, statuses={1})
        assert re.search("error: no latest.pt at step .* .is the disk full", run.text)
        (case.folder / "filler").unlink()
        case.restart(figures=False)
    return "status 1; the same bits after a restart"


def data_changed(case):
    case.run([0, 11, "signal", signal.SIGTERM], statuses={143})
    before = (case.folder / "latest.pt").read_bytes()

    changed, path = case.copy_task()
    change(path)
    said = changed.run(case.folder, statuses={2, -15}).refusal()
    assert re.search("data.*--fresh", said)
    assert (case.folder / "latest.pt").read_bytes() == before

    case.restart()
    outcome = "an error that says so, status 2, the run is untouched"
    return f"{outcome}; with the old data the same bits"


def damaged_row(case):
    """Of the pairs of run_dpo_ddp.py. (Data of the others: their own tests.)"""
    damaged, path = case.copy_task()
    rows = json.loads(path.read_text())
    rows[40]["preferred_seq"] += "A"
    path.write_text(json.dumps(rows))
    run = damaged.run(case.folder, statuses={2, -15})
    run.refusal()
    said = re.findall(r"pairs.json: index 40: preferred_seq has \d+ letters; .*", run.text)
    assert len(said) == 1, run.text[-3000:]
    assert not list(case.folder.glob("*.pt"))
    return f"status 2 before training: {said[0]!r}"


def nan_on_one_rank(case):
    run = case.run([1, 9, "nan", 9], [1, 10, "sound", 0], within=100)
    assert [row["step"] for row in run.rows if row.get("skipped")] == [10]
    assert [row["step"] for row in run.rows if "lr" in row and "loss" not in row] == [10]
    assert all(weight.isfinite().all() for weight in run.state["model"].values())

    case.folder = case.folder.with_name("again")
    run = case.run([0, 12, "nan", 3], [1, 12, "nan", 3], statuses={1})
    assert "3 steps in a row without a finite gradient" in run.text
    assert 4 <= run.step <= 12
    case.restart()
    outcome = "skipped on all ranks; 3 in a row: one line, status 1"
    return f"once: {outcome}; the same bits after a restart"


def stuck_rank(case):
    server = case.server
    case.begin([1, 9, "sleep", 3600], more=["--timeout_minutes=0.1"])
    server.ranks[0].join(60)
    server.kill()  # as a launcher does
    run = server.end()
    case.seconds = run.seconds
    assert run.statuses == [1, -9], run.text[-3000:]
    assert run.seconds < 6 + 10
    assert "[RANK 0]" in run.text
    assert "imed out" in run.text
    case.restart()
    outcome = "--timeout_minutes 0.1: the others end within 6 + 10 s, status 1"
    return f"{outcome}; the same bits after a restart"


def out_of_memory(case):
    run = case.run([1, 9, "memory", 64], statuses={1})
    (said,) = re.findall(r"\[RANK 1\] .* ERROR: (.*)", run.text)
    assert "allocate memory" in said
    assert "--batch_size" in said
    assert "--global_batch_size" in said
    case.restart()
    outcome = "rlimit on rank 1: one line that says which options to change, status 1"
    return f"{outcome}; the same bits after a restart"


def clock_set_back(case):
    begin = time.monotonic()
    faults = [[0, 9, "clock", 7200], [1, 9, "clock", 7200]]
    run = case.run(*faults, more=["--max_minutes=30"], within=100)
    assert 0 < run.summary["seconds"] < time.monotonic() - begin
    for row in run.rows:
        if "lr" in row:
            assert row["samples_per_s"] > 0
            assert 0 <= row["data_wait"] <= 1
    case.check_same()
    return "two hours back: times stay positive, no early stop, the same bits"


def wandb_without_network(case):
    # accepts and never answers
    with socket.create_server(("localhost", 0), backlog=100) as silent:
        variables = {
            "WANDB_API_KEY": "0" * 40,
            "WANDB_BASE_URL": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "WANDB_SILENT": "true",
            "WANDB_INIT_TIMEOUT": 10,
            "HOME": case.folder.parent,
        }

        case.begin(more=["--wandb_mode=online"], **variables)
        case.server.wait_for("completed successfully!")
        begin = time.monotonic()
        run = case.server.end()
        case.seconds = time.monotonic() - begin

    assert run.statuses == [0, 0]
    assert case.seconds < 15
    assert "wandb is off, metrics.jsonl goes on" in run.text
    case.check_same()
    return "status 0, training does not wait, the same bits (seconds: at the exit)"


def launcher_killed(case):
    """It alone: nobody ends the ranks, they see that they have another parent."""
    case.folder.mkdir()
    command = [*TWO_RANKS, RUNS, case.task.name, *case.task.argv, f"--output_dir={case.folder}"]
    variables = {"FAULTS": '[[0, 9, "wait", 0]]', "OUTPUT": case.folder, "PYTHONPATH": ROOT}
    variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = 1  # as the wrappers have it
    with case.job(command, **variables) as job:
        job.wait_for("step=8 ")
        job.process.kill()
        job.wait()
        begin = time.monotonic()
        Path(f"{case.folder}.go").touch()
        assert job.is_gone(30), job.text[-3000:]
        case.seconds = time.monotonic() - begin
    assert re.search("stopped by death of (the launcher|torchrun)", job.text)
    assert 9 <= Run(case.folder).step <= 12
    case.restart()
    return "by SIGKILL: the ranks save and end; the same bits after a restart"


def started_twice(case):
    """The same command beside a living run, also where its folder has another name."""
    case.begin([0, 9, "wait", 0])
    case.server.wait_for("step=8 ")
    names = [case.folder, case.folder.with_name("link"), case.folder.with_name("mount")]
    names[1].symlink_to(case.folder)
    names[2].mkdir()
    is_mounted = subprocess.run(["mount", "--bind", names[0], names[2]]).returncode == 0
    try:
        for name in names[: 2 + is_mounted]:
            said = case.refusal(f"--output_dir={name}")
            assert f"another run is at work in {name}" in said
    finally:
        if is_mounted:
            subprocess.run(["umount", names[2]], check=True)

    Path(f"{case.folder}.go").touch()
    assert case.server.end().statuses == [0, 0]
    case.check_same()
    return "one line, status 2; the first run goes on to the same bits"


def disk_takes_nothing(case):
    """Neither the first checkpoint, nor, in another run, the last one."""
    case.folder.mkdir()
    with on_small_disk(case.folder, "8k"):
        run = case.run(statuses={1, 2, -15}, within=60)
        assert not list(case.folder.glob("*.pt"))
    said = {line for line in run.text.splitlines() if "error: " in line}
    assert len(said) == 1, run.text
    assert "no latest.pt at step 0" in said.pop()
    assert "step=1 " not in run.text

    last = case.task.whole.step
    with case.small_disk():
        run = case.run([0, last - 1, "fill", 0], statuses={1, 2, -15}, within=60)
    assert f"no latest.pt at step {last}" in run.text
    assert "completed successfully!" not in run.text
    return "the first one: one line before training; the last one: status not 0"


def disk_full_at_end(case):
    with case.small_disk():
        run = case.run([0, 44, "fill at end", 0], within=100)
        assert "completed successfully!" in run.text
        assert "No space left" in run.text
        (case.folder / "filler").unlink()
        assert run.step == case.task.whole.step
    return "after the last checkpoint: a warning, status 0"


def stuck_worker(case):
    more = ["--num_workers=1", "--timeout_minutes=0.1"]
    run = case.run([0, 9, "workers", 0], more=more, statuses={1})
    assert re.search(r"\[RANK 0\] .* ERROR: .*--num_workers", run.text)
    case.folder.with_name("run.stuck").unlink()
    case.restart()
    return "--timeout_minutes 0.1: one line, status 1, no process left; the same bits"


def other_command(case):
    """Two jobs with one port."""
    case.begin(OPTIONS_OF_1="--seed=7")
    said = case.server.end().refusal()
    assert "ranks are of different runs: seed is 42 here, and 7 on rank 1" in said
    assert not case.folder.exists()
    return f"status 2: {said!r}"


def signal_while_reading(case):
    """It ends at once. Nothing half-made stays: after SIGKILL until the next run."""
    cache = case.folder.with_name("cache")
    more = [f"--cache_dir={cache}"]

    def unfinished():
        return [path for path in cache.iterdir() if path.name.startswith("unfinished")]

    run = case.run([0, 0, "signal", signal.SIGTERM], more=more, statuses={130, 143, 1})
    assert run.statuses[0] in (130, 143)
    assert not list(cache.iterdir())
    assert not case.folder.exists()

    case.run([0, 0, "signal", signal.SIGKILL], more=more, statuses={-9, 1})
    assert len(unfinished()) == 1
    case.run(more=more, within=100)
    assert not unfinished()
    case.check_same()
    return "ends at once, nothing half-made is kept; SIGKILL: the next run removes it"


# --------------------------------------------------------------------------------------------------
# What a shell or a container leaves behind: seen by a real interpreter from its start


def run_in_shell(case, setup, *more, folder=None, **variables):
    """The exit status and output of one process, started in a shell after `setup`. It has trained;
    or it has said in one line why not. No process is left."""
    folder = folder or case.folder
    script = str(ROOT / f"{case.task.name}.py")
    command = [sys.executable, script, *case.task.argv, "--timeout_minutes=0.1", *more]
    shell = ["sh", "-ec", f'{setup}\nexec "$@"', "sh", *command, f"--output_dir={folder}"]
    begin = time.monotonic()
    with case.job(shell, **variables) as job:
        status = job.wait(100)
        case.seconds = max(case.seconds, time.monotonic() - begin)
        assert job.is_gone(), job.text[-3000:]
    text = job.text.partition("Exception ignored in: ")[0]  # which torch's loader may write
    assert "Traceback" not in text, text[-5000:]
    if status == 0:
        assert Run(folder).summary["status"] == "finished"
        return "trains, status 0"
    said = re.findall("(?:error|ERROR): (.*)", text)
    assert len(said) == 1, text[-5000:]
    return f"status {status}, one line: {said[0]!r}"


def full_shared_memory(case):
    mount = "mount -t tmpfs -o size=64k tmpfs /dev/shm"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a file system")
    inside = f'unshare -m sh -ec \'{mount}; exec "$@"\' sh "$@"; exit $?'
    outcome = run_in_shell(case, inside, "--num_workers=2")
    assert outcome == "trains, status 0"
    return outcome


def long_tmpdir(case):
    folder = case.folder.with_name("very-long-name-" * 9)
    folder.mkdir()
    outcome = run_in_shell(case, "", TMPDIR=folder)
    assert outcome == "trains, status 0"
    return outcome


def few_files(case):
    outcomes = []
    for limit in (64, 48, 40):
        case.folder = case.folder.with_name(f"limit{limit}")
        outcome = run_in_shell(case, f"ulimit -n {limit}", "--num_workers=2")
        outcomes.append(f"{limit}: {outcome}")
    return "; ".join(outcomes)


def ascii_locale(case):
    """The config's comments and the folder's name are in German."""
    config = case.folder.with_name("größe.yaml")
    config.write_text("# die Größe\nsave_every: 5\n", encoding="utf-8")
    folder = case.folder.with_name("Läufe")
    locale = {"LC_ALL": "POSIX", "PYTHONUTF8": 0, "PYTHONIOENCODING": "ascii"}
    outcome = run_in_shell(case, "", f"--config={config}", folder=folder, **locale)
    assert outcome == "trains, status 0"
    return outcome


FAST = "run_train_quantumgrav_ddp"
# each fault, and the script with which the test command has it, if any
FAULTS = {
    wall_clock_limit: FAST,
    disk_full: FAST,
    disk_full_in_an_evaluation: FAST,
    data_changed: "run_train_uniref50_ddp",
    damaged_row: "run_dpo_ddp",
    nan_on_one_rank: "run_train_uniref50_ddp",
    stuck_rank: FAST,
    out_of_memory: FAST,
    clock_set_back: None,  # behind --all-faults only
    wandb_without_network: FAST,
    launcher_killed: FAST,
    started_twice: FAST,
    disk_takes_nothing: FAST,
    disk_full_at_end: FAST,
    stuck_worker: None,
    other_command: FAST,
    signal_while_reading: FAST,
    full_shared_memory: None,
    long_tmpdir: None,
    few_files: None,
    ascii_locale: None,
}


def pytest_generate_tests(metafunc):
    if "fault" in metafunc.fixturenames:
        cases = []
        has_all = metafunc.config.getoption("--all-faults")
        for name in SCRIPTS:
            for fault, own in FAULTS.items():
                # damaged_row knows the data of one script
                if name == own or (has_all and fault is not damaged_row):
                    cases.append(pytest.param(name, fault, id=f"{name}-{fault.__name__}"))
        metafunc.parametrize(("name", "fault"), cases)


def test_fault(name, fault, find_task, matrix, tmp_path):
    case = Case(find_task(name), tmp_path)
    outcome = fault(case)
    matrix(name, fault.__name__.replace("_", " "), outcome, case.seconds)
