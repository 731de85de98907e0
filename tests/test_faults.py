"""What happens to long runs: how the run ends, in how many seconds, that it leaves no process
behind, and that the same command afterwards ends, bit for bit, where the undisturbed run does.

The test command has most faults with one script; --all-faults has every script x every fault.
"""

import functools
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT, Job, call_script, environment, on_small_disk, refusal
from runs import COMMON, DROPOUT, SCRIPTS, Run, Task, assert_same_end


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
        self.seconds = 0.0  # from the (last) fault to the end

    def run(self, *faults, more=(), statuses=(0,), within=30):
        """All ranks end with one of `statuses`, `within` so many seconds."""
        run = self.task.run(self.folder, *more, faults=faults, statuses=statuses)
        assert run.seconds < within, run.text[-3000:]
        self.seconds = max(self.seconds, run.seconds)
        return run

    def begin(self, *faults, more=(), **env):
        """A run that goes on beside the test; self.server.end() comes next."""
        argv = [*self.task.argv, *more]
        self.server.begin(self.task.name, argv, self.folder, 2, faults, **env)

    def check_same(self):
        """As the run that nothing happened to."""
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

STOPPED = {1}  # statuses after SIGTERM


def wall_clock_limit(case):
    run = case.run([0, 9, "sleep", 3], more=["--max_minutes=0.05"])
    assert run.summary["status"] == "stopped by time limit"
    case.restart()
    return "--max_minutes: checkpoint, status 0; the same bits after a restart"


def limit_in_an_evaluation(case):
    """It counts all the same: else each start would make it again, and never get on."""
    step = case.task.whole.evaluated[0]
    faults = [[rank, step - 1, "slow evaluation", 4] for rank in (0, 1)]
    run = case.run(*faults, more=["--max_minutes=0.05"])
    assert run.step == step + 1
    assert run.evaluated == [step]
    case.restart()
    return "--max_minutes: it counts, status 0 after the next step; the same bits after a restart"


def disk_full(case):
    """From step 10 on: step 12 cannot be saved."""
    size = 6 * (case.task.whole.folder / "latest.pt").stat().st_size + (2 << 20)
    case.folder.mkdir()
    with on_small_disk(case.folder, size):
        run = case.run([0, 10, "fill", 1 << 14], statuses={1})
        assert "No space left" in run.text
        assert run.step in (8, 9)  # quantumgrav has an evaluation after step 9
        (case.folder / "filler").unlink()
        case.restart()
    return "status 1, the checkpoint before is whole; the same bits after a restart"


def disk_takes_nothing(case):
    case.folder.mkdir()
    with on_small_disk(case.folder, "8k"):
        run = case.run(statuses={1}, within=60)
        assert not list(case.folder.glob("*.pt"))
    assert "No space left" in run.text
    return "status 1"


def data_changed(case):
    case.run([0, 11, "signal", signal.SIGTERM], statuses=STOPPED)
    before = (case.folder / "latest.pt").read_bytes()

    changed, path = case.copy_task()
    change(path)
    said = changed.run(case.folder, statuses={2, -15}).refusal()
    assert re.search("data.*--fresh", said)
    assert (case.folder / "latest.pt").read_bytes() == before

    case.restart()
    return "one line, status 2, the run is untouched; with the old data the same bits"


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
    run = case.run([1, 9, "nan", 0], [1, 10, "sound", 0], within=100)
    assert [row["step"] for row in run.rows if row.get("skipped")] == [10]
    assert [row["step"] for row in run.rows if "lr" in row and "loss" not in row] == [10]
    key = "model_state_dict" if "model_state_dict" in run.state else "model"
    assert all(weight.isfinite().all() for weight in run.state[key].values())

    case.folder = case.folder.with_name("again")
    run = case.run([0, 12, "nan", 0], [1, 12, "nan", 0], statuses={1})
    assert "10 steps in a row without a finite gradient" in run.text
    assert run.step < 30  # a phase that begins counts anew
    return "once: skipped on all ranks; 10 in a row: one line, status 1"


def stuck_rank(case):
    server = case.server
    case.begin([1, 9, "sleep", 3600], more=["--timeout_minutes=0.1"])
    server.ranks[0].join(60)
    server.kill()  # as a launcher does
    run = server.end()
    case.seconds = run.seconds
    assert run.statuses == [1, -9], run.text[-3000:]
    assert run.seconds < 6 + 10
    assert "imed out" in run.text
    case.restart()
    return "--timeout_minutes 0.1: the others end within 6 + 10 s; the same bits after a restart"


def started_twice(case):
    """The same command beside a living run, also where its folder has another name."""
    case.begin([0, 9, "wait", 0])
    case.server.wait_for("step=8 ")
    link = case.folder.with_name("link")
    link.symlink_to(case.folder)
    for name in (case.folder, link):
        argv = [*case.task.argv, f"--output_dir={name}"]
        said = refusal(call_script(case.task.name, *argv, status=2))
        assert f"another run is at work in {name}" in said
    Path(f"{case.folder}.go").touch()
    assert case.server.end().statuses == [0, 0]
    case.check_same()
    return "one line, status 2; the first run goes on to the same bits"


def other_command(case):
    """Two jobs with one port."""
    case.begin(OPTIONS_OF_1="--max_grad_norm=7")
    said = case.server.end().refusal()
    assert re.search("rank . has another max_grad_norm|ranks are of different runs", said)
    assert not (case.folder / "latest.pt").exists()
    return f"status 2: {said!r}"


def signal_while_reading(case):
    """It ends at once, and nothing half-made stays."""
    cache = case.folder.with_name("cache")
    more = [f"--cache_dir={cache}"]
    case.run([0, 0, "signal", signal.SIGTERM], more=more, statuses={130, 143, 1})
    assert not list(cache.iterdir())
    assert not case.folder.exists()

    # SIGKILL leaves it; the next run does not take it for whole
    case.run([0, 0, "signal", signal.SIGKILL], more=more, statuses={-9, 1})
    case.run(more=more, within=100)
    case.check_same()
    return "ends at once, nothing half-made is used"


def full_shared_memory(case):
    mount = "mount -t tmpfs -o size=64k tmpfs /dev/shm"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a file system")
    script = str(ROOT / f"{case.task.name}.py")
    command = [sys.executable, script, *case.task.argv, "--num_workers=2"]
    shell = ["unshare", "-m", "sh", "-ec", f'{mount}; exec "$@"', "sh", *command]
    shell.append(f"--output_dir={case.folder}")
    with Job(shell, case.folder.with_name("job.txt"), environment()) as job:
        assert job.wait(100) == 0, job.text[-3000:]
    assert Run(case.folder).summary["status"] == "finished"
    return "trains, status 0"


FAST = "run_train_quantumgrav_ddp"
# each fault, and the script with which the test command has it, if any
FAULTS = {
    wall_clock_limit: FAST,
    limit_in_an_evaluation: FAST,
    disk_full: FAST,
    disk_takes_nothing: FAST,
    data_changed: "run_train_uniref50_ddp",
    damaged_row: "run_dpo_ddp",
    nan_on_one_rank: "run_train_uniref50_ddp",
    stuck_rank: FAST,
    started_twice: FAST,
    other_command: FAST,
    signal_while_reading: FAST,
    full_shared_memory: None,  # behind --all-faults only
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
