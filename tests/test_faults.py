"""What happens to long runs: how the run ends, in how many seconds, that it leaves no process
behind, and that the same command afterwards ends, bit for bit, where the undisturbed run does. With
one script; with --all-faults every script x every fault (its table: benchmarks/FAULTS.md)."""

import functools
import math
import os
import re
import signal

import pytest
from helpers import call_script, on_small_disk, refusal
from runs import DROPOUT, SCRIPTS, STOPPED, Task, print_row

REFUSED = {2, -15}  # -15: ended by the launcher


@pytest.fixture(scope="module")
def find_task(server, tmp_path_factory):
    """find_task(script): its Task, the same for all tests of this file."""

    def make_task(name):
        return Task(name, tmp_path_factory.mktemp(name), server, *DROPOUT.get(name, []))

    return functools.cache(make_task)


# Faults: each returns its outcome for the table, and the seconds from the fault to the end.


def limit_in_an_evaluation(task, folder):
    """It counts all the same: else each start would make it again, and never get on."""
    step = task.whole.evaluated[0]
    run = task.run(folder, "--max_minutes=60", faults=[[0, step - 1, "slow evaluation", 60]])
    assert run.summary["status"] == "stopped by time limit"
    assert run.step == step + 1
    assert run.evaluated == [step]
    task.restart(folder)
    return "--max_minutes: it counts, status 0 after the next step; the same bits", run.seconds


def disk_full(task, folder):
    """From step 10 on: step 12 cannot be saved."""
    size = 6 * (task.whole.folder / "latest.pt").stat().st_size + (2 << 20)
    folder.mkdir()
    with on_small_disk(folder, size):
        run = task.run(folder, faults=[[0, 10, "fill", 1 << 14]], statuses={1})
        assert "No space left" in run.text
        assert run.step in (8, 9)  # quantumgrav has an evaluation after step 9
        (folder / "filler").unlink()
        task.restart(folder)
    return "status 1, the checkpoint before is whole; the same bits", run.seconds


def data_changed(task, folder):
    run = task.run(folder, faults=[[0, 11, "signal", signal.SIGTERM]], statuses=STOPPED)
    before = (folder / "latest.pt").read_bytes()
    other = folder.with_name("other")
    other.mkdir()
    changed = Task(task.name, other, task.server, *DROPOUT.get(task.name, []), less=1)
    assert re.search("data_hash.*--fresh", changed.run(folder, statuses=REFUSED).refusal())
    assert (folder / "latest.pt").read_bytes() == before
    task.restart(folder)
    return "one line, status 2, the run is untouched; with the old data the same bits", run.seconds


def nan_on_one_rank(task, folder):
    run = task.run(folder, faults=[[1, 9, "multiply", math.nan], [1, 10, "multiply", 1]])
    assert [row["step"] for row in run.rows if row.get("skipped")] == [10]
    assert [row["step"] for row in run.rows if "lr" in row and "loss" not in row] == [10]
    key = "model_state_dict" if "model_state_dict" in run.state else "model"
    assert all(weight.isfinite().all() for weight in run.state[key].values())
    faults = [[rank, 12, "multiply", math.nan] for rank in (0, 1)]
    run = task.run(folder.with_name("again"), faults=faults, statuses={1})
    assert "10 steps in a row without a finite gradient" in run.text
    assert run.step < 30  # a phase that begins counts anew
    return "once: skipped on all ranks; 10 in a row: one line, status 1", run.seconds


def stuck_rank(task, folder):
    server = task.server
    argv = [*task.argv, "--timeout_minutes=0.1"]
    server.begin(task.name, argv, folder, 2, [[1, 9, "sleep", 3600]])
    server.ranks[0].join(60)
    server.kill()  # as a launcher does
    run = server.end()
    assert run.statuses == [1, -9], run.text[-3000:]
    assert run.seconds < 6 + 10
    assert "imed out" in run.text
    task.restart(folder)
    return "--timeout_minutes 0.1: the others end within 6 + 10 s; the same bits", run.seconds


def started_twice(task, folder):
    """The same command beside a living run, also where its folder has another name."""
    server = task.server
    server.begin(task.name, task.argv, folder, 2, [[0, 9, "signal", signal.SIGSTOP]])
    server.wait_for("step=8 ")
    link = folder.with_name("link")
    link.symlink_to(folder)
    for name in (folder, link):
        argv = [*task.argv, f"--output_dir={name}"]
        said = refusal(call_script(task.name, *argv, status=2))
        assert f"another run is at work in {name}" in said
    os.kill(server.pids[0], signal.SIGCONT)
    assert server.end().statuses == [0, 0]
    task.check_same(folder)
    return "one line, status 2; the first run goes on to the same bits", 0


def other_command(task, folder):
    """Two jobs with one port."""
    task.server.begin(task.name, task.argv, folder, 2, OPTIONS_OF_1="--max_grad_norm=7")
    run = task.server.end()
    said = run.refusal()
    assert re.search("rank . has another max_grad_norm|ranks are of different runs", said)
    assert not (folder / "latest.pt").exists()
    return f"status 2: {said!r}", run.seconds


def signal_while_reading(task, folder):
    """It ends at once, and nothing half-made stays."""
    cache = folder.with_name("cache")
    option = f"--cache_dir={cache}"
    faults = [[0, 0, "signal", signal.SIGTERM]]
    run = task.run(folder, option, faults=faults, statuses={130, 143, 1})
    assert not [path for path in cache.iterdir() if not path.name.startswith("reading")]
    assert [path.name for path in folder.iterdir()] == ["lock"]
    # SIGKILL leaves it; the next run does not take it for whole
    task.run(folder, option, faults=[[0, 0, "signal", signal.SIGKILL]], statuses={-9, 1})
    task.run(folder, option)
    task.check_same(folder)
    return "ends at once, nothing half-made is used", run.seconds


FAST = "run_train_quantumgrav_ddp"
# Each, and the script with which the test command has it.
FAULTS = dict.fromkeys([limit_in_an_evaluation, disk_full, stuck_rank, started_twice], FAST)
FAULTS |= dict.fromkeys([other_command, signal_while_reading], FAST)
FAULTS |= dict.fromkeys([data_changed, nan_on_one_rank], "run_train_uniref50_ddp")


def pytest_generate_tests(metafunc):
    cases = []
    has_all = metafunc.config.getoption("--all-faults")
    for name in SCRIPTS:
        for fault, own in FAULTS.items():
            if has_all or name == own:
                cases.append(pytest.param(name, fault, id=f"{name}-{fault.__name__}"))
    metafunc.parametrize(("name", "fault"), cases)


def test_fault(name, fault, find_task, tmp_path):
    outcome, seconds = fault(find_task(name), tmp_path / "run")
    assert seconds < 30
    print_row(name, fault.__name__.replace("_", " "), outcome, seconds)
