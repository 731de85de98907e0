"""What every test starts from: one thread, no variables of launchers, wandb or the hub. And the
table of faults, which tests tell their rows to."""

import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # helpers, also with --import-mode=importlib
os.environ.setdefault("OMP_NUM_THREADS", "1")  # now: torch reads it when it is imported

PREFIXES = "OMPI_ PMI_ PMIX_ MPI_LOCAL PALS_ SLURM_ PBS_ TORCHELASTIC_ WANDB_".split()
NAMES = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT NCCL_TIMEOUT".split()
NAMES += "HF_ENDPOINT HF_HUB_OFFLINE HF_DATASETS_OFFLINE TRANSFORMERS_OFFLINE".split()


def forget_variables():
    """Those of the environment that change what is tested."""
    for name in list(os.environ):
        if name in NAMES or name.startswith(tuple(PREFIXES)):
            del os.environ[name]


forget_variables()  # now: before the hub's libraries are imported, or a fixture starts a process

# A shell lets what it starts in the background ignore SIGINT, and nohup SIGHUP. What we start is to
# notice them, and it starts with the default where this process has a handler.
for stop in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(stop) == signal.SIG_IGN:
        signal.signal(stop, lambda number, frame: None)


def pytest_addoption(parser):
    text = "every script x every fault, and all runs on two hosts"
    parser.addoption("--all-faults", action="store_true", help=text)
    parser.addoption("--matrix", metavar="FILE", help="write the table of faults to FILE")


HEAD = """# Every script x every fault

`python -m pytest --dist worksteal tests/test_contract.py tests/test_faults.py
tests/test_two_hosts.py --all-faults --matrix FILE` writes this table; here on {cores} CPU cores
with torch {torch}, gloo, Linux, as root. Seconds are from the (last) fault to the end of the last
rank, or of the whole run where it goes on. In every row no process is left; "the same bits" means
that, after a restart where the run has ended, weights, optimizer, losses, and the samples of every
step are those of the run that nothing happened to.

Not tested here, for want of the machines: faults of GPUs and of their networks (NCCL, xccl; a
device that is lost), file systems over a network (stale handles), the signals of a real batch queue
(sent by hand here).

"""
ROWS = []  # of the session: script, fault, outcome, seconds


@pytest.fixture
def matrix(record_property):
    """matrix(script, fault, outcome, seconds): a row of the table, kept with the test that runs."""

    def record(script, fault, outcome, seconds):
        record_property("fault", (f"{script}.py", fault, outcome, round(seconds, 1)))

    return record


def pytest_runtest_logreport(report):
    """Rows travel with the report of their test. A failed test is a row, too."""
    if report.when == "teardown":
        for name, value in report.user_properties:
            if name == "fault":
                ROWS.append(tuple(value))
    if report.failed:
        ROWS.append((report.nodeid, report.when, "FAILED", round(report.duration, 1)))


def pytest_terminal_summary(config):
    if not config.getoption("--matrix"):
        return
    import torch

    text = HEAD.format(cores=os.cpu_count(), torch=torch.__version__)
    for row in [("script", "fault", "outcome", "seconds"), ("---",) * 4, *sorted(ROWS)]:
        cells = [str(cell).replace("|", "/") for cell in row]
        text += f"| {' | '.join(cells)} |\n"
    Path(config.getoption("--matrix")).write_text(text)


@pytest.fixture(scope="module")
def server():
    """Starts ranks, which have their imports behind them."""
    from runs import Server

    server = Server()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def causal_sets(tmp_path_factory):
    """A file of 240 small causal sets of six kinds, as the tool makes them."""
    from helpers import write_causal_sets

    path = tmp_path_factory.mktemp("data") / "sets.npz"
    write_causal_sets(path, "--samples=240", "--min_size=8", "--max_size=16")
    return path


@pytest.fixture
def start(tmp_path):
    """start(command, **environment): a Job."""
    from helpers import Job, environment

    with contextlib.ExitStack() as jobs:

        def call(command, **variables):
            job = Job(command, tmp_path / "job.txt", environment(**variables))
            return jobs.enter_context(job)

        yield call


@pytest.fixture
def group():
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def clean_process():
    forget_variables()  # that an earlier test left
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)
