"""What every test starts from: one thread, no variables of launchers, wandb or the hub."""

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
    from helpers import import_tool

    path = tmp_path_factory.mktemp("data") / "sets.npz"
    words = f"--out={path} --samples=240 --min_size=8 --max_size=16 --workers=1"
    import_tool("make_causal_sets").main(words.split())
    return path


@pytest.fixture
def start(tmp_path, monkeypatch):
    """start(command, **environment): a Job."""
    from helpers import Job

    monkeypatch.chdir(tmp_path)
    jobs = []

    def call(command, **variables):
        jobs.append(Job(command, **variables))
        return jobs[-1]

    yield call
    for job in jobs:
        job.end()


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
