"""What happens to long runs, done to every script: how the run ends, in how many seconds, that it
leaves no process behind, and that the same command afterwards ends, bit for bit, where the
undisturbed run does.

The test command has most faults with one script. This has every script x every fault, and writes
the table, also of the faults of two other files:

    python -m pytest --dist worksteal tests/test_contract.py tests/test_faults.py
        tests/test_two_hosts.py --all-faults --matrix FILE
"""

import json
import re
import shutil
import signal
import socket
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import call_script, on_small_disk, write_causal_sets, write_digits
from runs import DROPOUT, SCRIPTS, Run, Server, Task, assert_same_end


@pytest.fixture(scope="module")
def find_task(server, tmp_path_factory):
    """find_task(script): its Task, the same for all tests of this file."""
    tasks = {}

    def find(name):
        if name not in tasks:
            folder = tmp_path_factory.mktemp(name)
            tasks[name] = Task(name, folder, server, *DROPOUT.get(name, []))
        return tasks[name]

    return find


class Case:
    """A script, the folder of its run, and what is asserted of all runs."""

    def __init__(self, task, folder):
        self.task = task
        self.folder = folder / "run"
        self.seconds = 0.0  # from the fault to the end

    def run(self, *faults, more=(), statuses=(0,), within=30):
        """A run with faults, of which all ranks end with one of `statuses`, `within` so many
        seconds of the last fault."""
        run = self.task.run(self.folder, *more, faults=faults, statuses=statuses)
        assert run.seconds < within, run.text[-3000:]
        self.seconds = max(self.seconds, run.seconds)
        return run

    def check_same(self):
        run = Run(self.folder)
        assert_same_end(run, self.task.whole)
        assert run.figures == self.task.whole.figures

    def restart(self):
        """The same command, nothing in its way."""
        run = self.task.run(self.folder)
        assert "resuming" in run.text, run.text[-3000:]
        self.check_same()

    def copy_task(self):
        """(the same task, path of its data): a copy, which may be damaged."""
        folder = self.folder.with_name("own")
        folder.mkdir()
        name = self.task.name
        return Task(name, folder, self.task.server, *DROPOUT.get(name, [])), folder / DATA[name]


# --------------------------------------------------------------------------------------------------
# Data

DATA = {
    "train_ddp": "pairs.jsonl",
    "run_train_uniref50_ddp": "proteins.fasta",
    "run_dpo_ddp": "pairs.json",
    "run_train_quantumgrav_ddp": "sets",
    "run_train_rebm_ddp": "digits",
}


def change(path):
    """Other data of the same form."""
    if path.name == "sets":
        shutil.rmtree(path)
        options = "--samples=300 --min_size=10 --max_size=20 --seed=1".split()
        write_causal_sets(path, *options)
    elif path.name == "digits":
        shutil.rmtree(path)
        write_digits(path, 450, 60, "--valid=19")
    elif path.name == "pairs.json":
        rows = json.loads(path.read_text())
        path.write_text(json.dumps(rows[:-1]))
    else:  # a sequence of a FASTA file has two lines
        lines = path.read_text().splitlines()
        path.write_text("\n".join(lines[:-2]) + "\n")


def damage(path):
    """A row in the middle is damaged; returns what must be said of it."""
    if path.is_dir():
        name = {"sets": "features.npy", "digits": "images.npy"}[path.name]
        array = np.load(path / name)
        array[200] += 1
        np.save(path / name, array)
        return rf"{path.name}/{name} is .*: remove .*"
    if path.name == "pairs.json":
        rows = json.loads(path.read_text())
        rows[40]["preferred_seq"] += "A"
        path.write_text(json.dumps(rows))
        return r"pairs.json: index 40: preferred_seq has \d+ letters; expected \d+"

    lines = path.read_text().splitlines()
    lines[200 - 1] = "#1"
    path.write_text("\n".join(lines) + "\n")
    # of FASTA the line where the record begins
    number = 199 if path.suffix == ".fasta" else 200
    return rf"{path.name}.*?line {number}: "


# --------------------------------------------------------------------------------------------------
# Faults: each returns its outcome for the table


def wall_clock_limit(case):
    run = case.run([0, 9, "sleep", 3], more=["--max_minutes=0.05"])
    assert run.summary["status"] == "stopped by time limit"
    case.restart()
    return "--max_minutes: checkpoint, status 0; the same bits after a restart"


def disk_full(case):
    size = 6 * (case.task.whole.folder / "latest.pt").stat().st_size + (2 << 20)
    case.folder.mkdir()

    with on_small_disk(case.folder, size):
        # full from 9 to 15 and from 17 on: step 12's checkpoint is not written, step 16's is
        faults = [[0, 9, "fill", 0], [0, 15, "free", 0], [0, 17, "fill", 0]]
        run = case.run(*faults, [1, 22, "signal", signal.SIGKILL], statuses={-9, 1})
        assert "no latest.pt at step 12, the run goes on: " in run.text
        assert "No space left" in run.text
        assert run.state["step"] == 16
        assert run.rows, "each line is whole"

        (case.folder / "filler").unlink()
        case.task.run(case.folder)
        assert_same_end(Run(case.folder), case.task.whole)  # rows of some steps are lost

    outcome = "a warning, the old checkpoint is whole, training goes on"
    return f"{outcome}; killed meanwhile: the same bits after a restart"


def data_changed(case):
    case.run([0, 11, "signal", signal.SIGTERM], statuses={143})
    before = (case.folder / "latest.pt").read_bytes()

    changed, path = case.copy_task()
    change(path)
    said = changed.run(case.folder, statuses={2, -15}).refusal()
    assert "latest.pt was trained on other data: --fresh moves" in said
    assert (case.folder / "latest.pt").read_bytes() == before

    case.restart()
    outcome = "an error that says so, status 2, the run is untouched"
    return f"{outcome}; with the old data the same bits"


def damaged_row(case):
    damaged, path = case.copy_task()
    expected = damage(path)
    run = damaged.run(case.folder, statuses={2, -15})
    said = run.refusal()
    lines = [line.strip() for line in run.text.splitlines() if re.search(expected, line)]
    assert len(lines) == 1, run.text[-3000:]
    assert not list(case.folder.glob("*.pt"))
    found = said if re.search(expected, said) else lines[0]
    return f"status 2 before training: {found.replace(f'{damaged.folder}/', '')!r}"


def nan_on_one_rank(case):
    run = case.run([1, 9, "nan", 0], [1, 10, "sound", 0], within=100)
    assert [row["step"] for row in run.rows if row.get("skipped")] == [10]
    assert [row["step"] for row in run.rows if "lr" in row and "loss" not in row] == [10]
    assert all(weight.isfinite().all() for weight in run.state["model"].values())

    case.folder = case.folder.with_name("again")
    run = case.run([1, 12, "nan", 0], more=["--max_bad_steps=3"], statuses={1})
    assert "3 steps in a row without a finite gradient" in run.text
    assert "Traceback" not in run.text
    assert 4 <= run.state["step"] <= 12
    case.restart()
    outcome = "skipped on all ranks; 3 in a row: one line, status 1"
    return f"once: {outcome}; the same bits after a restart"


def stuck_rank(case):
    server = case.task.server
    argv = [*case.task.argv, "--timeout_minutes=0.1"]
    server.begin(case.task.name, argv, case.folder, 2, [[1, 9, "sleep", 3600]])
    deadline = time.monotonic() + 60
    while Path(f"/proc/{server.pids[0]}").exists():
        assert time.monotonic() < deadline, server.text[-3000:]
        time.sleep(0.05)

    server.kill()  # as a launcher does
    run = server.end()
    case.seconds = run.seconds
    assert run.statuses == [1, -9]
    assert run.seconds < 6 + 10
    assert "[RANK 0]" in run.text
    assert "imed out" in run.text
    case.restart()
    outcome = "--timeout_minutes 0.1: the others end within 6 + 10 s, status 1"
    return f"{outcome}; the same bits after a restart"


def slow_rank(case):
    case.run([1, 9, "sleep", 2], [0, 13, "sleep", 1], within=100)
    case.check_same()
    return "the others wait, status 0, the same bits"


def out_of_memory(case):
    run = case.run([1, 9, "memory", 64], statuses={1})
    assert re.search(r"\[RANK 1\] .* ERROR: Traceback", run.text)
    assert "allocate memory" in run.text
    case.restart()
    return "rlimit on rank 1: status 1 with its number; the same bits after a restart"


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
    with socket.socket() as silent:  # accepts and never answers
        silent.bind(("localhost", 0))
        silent.listen(100)
        variables = {
            "WANDB_API_KEY": "0" * 40,
            "WANDB_BASE_URL": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "WANDB_SILENT": "true",
            "WANDB_INIT_TIMEOUT": 10,
            "HOME": case.folder.parent,
        }

        server = case.task.server
        argv = [*case.task.argv, "--wandb_mode=online"]
        server.begin(case.task.name, argv, case.folder, 2, **variables)
        server.wait_for("completed successfully!")
        begin = time.monotonic()
        run = server.end()
        case.seconds = time.monotonic() - begin

    assert run.statuses == [0, 0]
    assert case.seconds < 15
    assert "wandb is off, metrics.jsonl goes on" in run.text
    case.check_same()
    return "status 0, training does not wait, the same bits (seconds: at the exit)"


def read_only_folder(case):
    case.folder.mkdir()
    with on_small_disk(case.folder, "1m,ro"):
        run = case.run(statuses={2, -15}, within=60)
    assert "is not writable" in run.refusal()
    assert "step=1 " not in run.text

    (case.folder / "meta.json").write_text("{}")  # as in a folder of data, which --fresh would move
    run = case.run(more=["--fresh"], statuses={2, -15}, within=60)
    assert "holds data, not a run" in run.refusal()
    (case.folder / "meta.json").unlink()
    return "status 2 before training, says so"


def launcher_killed(case):
    """It alone: nobody ends the ranks, they see that they have another parent."""
    launcher = Server()
    launcher.begin(case.task.name, case.task.argv, case.folder, 2, [[0, 9, "wait", 0]])
    launcher.wait_for("step=9 ")

    launcher.server.kill()
    launcher.server.join()
    begin = time.monotonic()
    Path(f"{case.folder}.go").touch()
    assert launcher.are_gone(30), launcher.text[-3000:]

    case.seconds = time.monotonic() - begin
    assert "stopped by death of the launcher" in launcher.text
    launcher.folder.cleanup()
    assert 9 <= Run(case.folder).state["step"] <= 12
    case.restart()
    return "by SIGKILL: the ranks save and end; the same bits after a restart"


def started_twice(case):
    """The same command beside a living run."""
    server = case.task.server
    server.begin(case.task.name, case.task.argv, case.folder, 2, [[0, 9, "wait", 0]])
    server.wait_for("step=9 ")
    begin = time.monotonic()
    status, text = call_script(case.task.name, *case.task.argv, f"--output_dir={case.folder}")
    case.seconds = time.monotonic() - begin
    Path(f"{case.folder}.go").touch()

    assert status == 2
    assert text.count(": error: ") == 1
    assert f"another run is at work in {case.folder}" in text
    assert "Traceback" not in text
    assert server.end().statuses == [0, 0]
    case.check_same()
    return "one line, status 2; the first run goes on to the same bits"


FAST = "run_train_quantumgrav_ddp"
# each fault, and the script with which the test command has it, if any
FAULTS = {
    wall_clock_limit: FAST,
    disk_full: FAST,
    data_changed: "run_train_uniref50_ddp",
    damaged_row: "run_dpo_ddp",
    nan_on_one_rank: "run_train_uniref50_ddp",
    stuck_rank: FAST,
    slow_rank: None,  # behind --all-faults only
    out_of_memory: FAST,
    clock_set_back: None,
    wandb_without_network: FAST,
    read_only_folder: "run_dpo_ddp",
    launcher_killed: FAST,
    started_twice: FAST,
}


def pytest_generate_tests(metafunc):
    if "fault" in metafunc.fixturenames:
        cases = []
        for name in SCRIPTS:
            for fault, own in FAULTS.items():
                if name == own or metafunc.config.getoption("--all-faults"):
                    cases.append(pytest.param(name, fault, id=f"{name}-{fault.__name__}"))
        metafunc.parametrize(("name", "fault"), cases)


def test_fault(name, fault, find_task, matrix, tmp_path):
    case = Case(find_task(name), tmp_path)
    outcome = fault(case)
    matrix(name, fault.__name__.replace("_", " "), outcome, case.seconds)
