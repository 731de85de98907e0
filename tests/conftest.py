"""What every test starts from: one thread, no launcher's variables, the script's log back in place."""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # helpers, also with --import-mode=importlib

LAUNCHER_PREFIXES = ("OMPI_", "PMI_", "PMIX_", "MPI_LOCAL", "PALS_", "SLURM_", "PBS_", "TORCHELASTIC_")
LAUNCHER_NAMES = (
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT NCCL_TIMEOUT WANDB_MODE WANDB_API_KEY".split()
)


def pytest_addoption(parser):
    parser.addoption("--all-faults", action="store_true", help="every script x every fault, and all two-host runs")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in list(os.environ):
        if name in LAUNCHER_NAMES or name.startswith(LAUNCHER_PREFIXES):
            monkeypatch.delenv(name)
    logger = logging.getLogger("ddp")
    handlers, propagate, level = logger.handlers, logger.propagate, logger.level
    logger.rank = 0
    signals = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    yield
    logger.handlers, logger.propagate = handlers, propagate
    logger.setLevel(level)
    for number, handler in signals.items():
        signal.signal(number, handler)
