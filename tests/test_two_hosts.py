"""Every training script on two hosts: equal to one host, and what a cut link or a dead host leaves behind.

The hosts are network namespaces of this machine with a cable between them, each with its own address, host name and
/etc/hosts; their file system is shared. Needs root and `ip`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import ROOT
from runs import CLOCKS, RUN_OWN, SCRIPTS, TINY, Run, Server
from runs import apart as states_apart
from test_launch import TORCHRUN, Job, environment

FAST = "run_train_quantumgrav_ddp"  # the script of the normal test command
TIMEOUT = 6.0  # seconds: the time limit of the runs whose link is cut
SLOW = [
    [1, step, "sleep", 0.3] for step in range(20, 60)
]  # FAULTS: time to do something in the middle of a run
pytestmark = pytest.mark.timeout(300)


class Hosts:
    """Two namespaces, `a` and `b`, and a cable between them."""

    def __init__(self, folder: Path):
        self.a, self.b = self.names = [
            f"ddp-{x}-{os.getpid()}" for x in "ab"
        ]  # c10d gives rank 0 to the first name
        self.ports, self.file = itertools.count(29500), folder / "hosts"
        self.net = f"10.{64 + os.getpid() // 256 % 64}.{os.getpid() % 256}"

    @staticmethod
    def ip(*words: str) -> str:
        return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout

    def build(self) -> None:
        for path in Path("/run/netns").glob("ddp-[ab]-*"):  # of a session that was killed
            if not Path("/proc", path.name.rpartition("-")[2]).exists():
                self.remove(path.name)
        lines = [
            "127.0.0.1 localhost",
            *(f"{self.net}.{number} {name}" for number, name in enumerate(self.names, 1)),
        ]
        self.file.write_text("\n".join([*lines, ""]))
        for name in self.names:
            self.ip("netns", "add", name)
        self.ip(
            "link",
            "add",
            "eth0",
            "netns",
            self.a,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            self.b,
        )
        for number, name in enumerate(self.names, 1):
            self.ip("-n", name, "addr", "add", f"{self.net}.{number}/24", "dev", "eth0")
            self.ip("-n", name, "link", "set", "lo", "up")
            self.ip("-n", name, "link", "set", "eth0", "up")

    def cable(self, state: str) -> None:
        """`up`, or `down`: packets are lost, and no end of a connection is told."""
        self.ip("-n", self.b, "link", "set", "eth0", state)

    def on(self, name: str, command: list[str], read_only: Path | None = None) -> list[str]:
        """The command line that runs `command` on a host; `read_only`: a folder that this host can only read."""
        setup = f"hostname {name}; mount --bind {self.file} /etc/hosts"
        if read_only:
            setup += f"; mount --bind {read_only} {read_only}; mount -o remount,bind,ro {read_only}"
        return [
            "ip",
            "netns",
            "exec",
            name,
            "unshare",
            "--uts",
            "sh",
            "-ec",
            f'{setup}; exec "$@"',
            "sh",
            *command,
        ]

    def processes(self, *names: str) -> list[int]:
        return [
            int(pid)
            for name in names or self.names
            for pid in self.ip("netns", "pids", name).split()
        ]

    def kill(self, *names: str) -> None:
        """SIGKILL to everything on these hosts (both), until nothing is left."""
        while pids := self.processes(*names):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def remove(self, *names: str) -> None:
        for name in names or self.names:
            if Path("/run/netns", name).exists():
                self.kill(name)
                self.ip("netns", "del", name)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    if (
        sys.platform != "linux"
        or os.geteuid()
        or not (shutil.which("ip") and shutil.which("unshare"))
    ):
        pytest.skip("two hosts on one machine need Linux, root, ip and unshare")
    hosts = Hosts(tmp_path_factory.mktemp("hosts"))
    try:
        hosts.build()
        yield hosts
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    finally:
        hosts.remove()


@pytest.fixture(scope="module")
def server(hosts):
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="module", params=SCRIPTS)
def script(request, tmp_path_factory):
    """(name, arguments of its tiny run, folder)"""
    if request.param != FAST and not request.config.getoption("--all-faults"):
        pytest.skip("--all-faults")
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, TINY[request.param](folder), folder


@pytest.fixture(scope="module")
def whole(script, server):
    """The undisturbed run: two processes on one host."""
    name, argv, folder = script
    run = server.run(name, argv, folder / "whole", 2)
    assert run.statuses == [0, 0], run.text[-3000:]
    return run


@pytest.fixture
def all_faults(request):
    if not request.config.getoption("--all-faults"):
        pytest.skip("--all-faults")


class Launch:
    """The same torchrun command on both hosts; `-k`: an agent that SIGTERM does not end is killed (guide, 3)."""

    def __init__(
        self,
        hosts: Hosts,
        program: list[str],
        output: Path,
        nodes: str,
        read_only: Path | None,
        env: dict,
    ):
        endpoint = f"--rdzv-endpoint={hosts.a}:{next(hosts.ports)}"
        torchrun = [
            *TORCHRUN,
            f"--nnodes={nodes}",
            "--nproc_per_node=1",
            "--rdzv-backend=c10d",
            endpoint,
        ]
        command = ["timeout", "-k", "2", "250", *torchrun, f"--rdzv-id={output.name}"]
        if ":" in nodes:
            command += ["--max-restarts=3", "--rdzv-conf=last_call_timeout=10"]
        env = environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, **env)
        self.jobs = []
        for name in hosts.names:
            line = hosts.on(name, [*command, *program], read_only if name == hosts.b else None)
            self.jobs.append(Job(line, output.with_name(f"{output.name}-{name}.txt"), env))

    def wait(self, seconds: float = 100.0) -> list[int]:
        return [job.wait(seconds) for job in self.jobs]

    def ended(self) -> bool:
        return any(job.process.poll() is not None for job in self.jobs)

    def ranks(self) -> list[int]:
        """Process ids of the living ranks and of their workers."""
        found = [job.processes().items() for job in self.jobs]
        return [
            pid
            for some in found
            for pid, variables in some
            if any(v.startswith("RANK=") for v in variables)
        ]

    @property
    def text(self) -> str:
        return "\n".join(job.text for job in self.jobs)


@pytest.fixture
def launch(hosts, tmp_path):
    """launch(script, argv, folder, ...): a Launch; with `faults` and traces by way of runs.py."""
    launches = []

    def call(script, argv, folder, nodes="2", faults=None, read_only=None) -> Launch:
        program, env = [str(ROOT / f"{script}.py")], {}
        if faults is not None:
            program = [str(ROOT / "tests" / "runs.py"), script]
            env = {
                "OUTPUT": folder,
                "FAULTS": json.dumps(faults),
                "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
            }
        program += [*argv, f"--output_dir={folder}"]
        output = tmp_path / f"launch{len(launches)}"
        launches.append(Launch(hosts, program, output, nodes, read_only, env))
        return launches[-1]

    yield call
    hosts.cable("up")
    hosts.kill()
    for launch in launches:
        launch.wait(5)


def steps_made(folder: Path, whom: str) -> int:
    """Steps in the trace of a rank, `whom`: "1-of-2"."""
    trace = folder.with_name(f"{folder.name}.trace-{whom}")
    return len(trace.read_text().splitlines()) if trace.exists() else 0


def wait_until(what, seconds: float, launch: Launch) -> float:
    """Seconds until what() is true; AssertionError with all output after `seconds`."""
    begin = time.monotonic()
    while not what():
        assert time.monotonic() - begin < seconds, f"not within {seconds} s:\n{launch.text[-5000:]}"
        time.sleep(0.05)
    return time.monotonic() - begin


def middle_of_training(launch, script, folder: Path, *more: str, nodes: str = "2") -> Launch:
    """A launch of which rank 1 has made 23 of its 36 to 54 steps; one takes 0.3 s now."""
    name, argv, _ = script
    jobs = launch(name, [*argv, *more], folder, nodes, SLOW)
    wait_until(lambda: steps_made(folder, "1-of-2") >= 23 or jobs.ended(), 100, jobs)
    assert not jobs.ended(), jobs.text[-5000:]
    return jobs


def ends_as_undisturbed(launch, script, folder: Path, whole: Run) -> None:
    """The command once more, with the usual time limit: it resumes, and every bit is that of the undisturbed run."""
    name, argv, _ = script
    before = steps_made(folder, "0-of-2")
    assert before < len(whole.losses)
    again = launch(name, argv, folder, faults=[])
    assert again.wait() == [0, 0] and "resuming" in again.text, again.text[-5000:]
    run = Run(folder)
    assert not states_apart(run, whole)
    assert run.losses == whole.losses and run.trained_on() == whole.trained_on()
    assert run.summary["status"] == "finished" and run.summary["world_size"] == 2


def apart(ours, theirs, but: set[str] = frozenset(), path: str = "") -> list[str]:
    """Places where two nested results differ, numbers by more than 1e-5 of their value; `but`: keys left out."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        return [d for k in ours.keys() ^ theirs.keys() | theirs.keys() - but
                for d in apart(ours.get(k), theirs.get(k), but, f"{path}.{k}")]  # fmt: skip
    if isinstance(theirs, list) and isinstance(ours, list) and len(ours) == len(theirs):
        return [d for x, y in zip(ours, theirs, strict=True) for d in apart(x, y, but, path)]
    numbers = isinstance(ours, (int, float)) and isinstance(theirs, (int, float))
    return [] if ours == theirs or numbers and math.isclose(ours, theirs, rel_tol=1e-5) else [path]


def test_two_hosts_equal_one(script, whole, launch, matrix):
    """The same losses and metrics, one summary, and host b could not have written: its output folder is read-only."""
    name, argv, folder = script
    output, begin = folder / "two-hosts", time.monotonic()
    output.mkdir()
    argv = [
        f"--cache_dir={folder}/cache-of-two" if part.startswith("--cache_dir=") else part
        for part in argv
    ]
    jobs = launch(name, argv, output, read_only=output)
    assert jobs.wait() == [0, 0], jobs.text[-3000:]
    run = Run(output)
    assert len(run.rows) == len(whole.rows)
    for ours, theirs in zip(run.rows, whole.rows, strict=True):
        assert not apart(ours, theirs, CLOCKS), f"step {theirs['step']}: {ours} {theirs}"
    assert not apart(run.summary, whole.summary, RUN_OWN), f"{run.summary} {whole.summary}"
    assert run.summary["status"] == "finished" and run.summary["world_size"] == 2
    for rank, job in enumerate(jobs.jobs):
        assert f"[RANK {rank}] " in job.text and f"Process {rank}/2 started" in job.text
        assert job.text.count("Starting distributed training...") == (rank == 0)
    assert not [*output.glob(".*"), *output.glob("*.tmp")]
    matrix(
        name,
        "none: 1 process on each of 2 hosts",
        "losses and metrics of 1 host",
        time.monotonic() - begin,
    )


def test_cut_link(script, whole, hosts, launch, matrix):
    """Nobody says goodbye: the ranks end at their time limit; an agent that waits for a lost store is ended by -k."""
    name, _, folder = script
    target = folder / "cut"
    jobs = middle_of_training(launch, script, target, f"--timeout_minutes={TIMEOUT / 60}")
    assert len(jobs.ranks()) >= 2
    hosts.cable("down")
    seconds = wait_until(lambda: not jobs.ranks(), TIMEOUT + 30, jobs)
    print(f"{name}: ranks ended {seconds:.1f} s after the cut, with a limit of {TIMEOUT:g} s")
    assert seconds > TIMEOUT / 2 and jobs.text.count("ERROR: Traceback") == 2
    wait_until(
        lambda: not hosts.processes(hosts.a), 20, jobs
    )  # it has the store: nobody to wait for
    outlived = bool(hosts.processes(hosts.b))
    jobs.jobs[1].process.terminate()
    wait_until(lambda: not hosts.processes(), 10, jobs)
    statuses = jobs.wait(5)
    assert 0 not in statuses
    hosts.cable("up")
    ends_as_undisturbed(launch, script, target, whole)
    killed = statuses[1] == -signal.SIGKILL
    end = (
        "ended by itself"
        if not outlived
        else "killed by timeout -k"
        if killed
        else "ended by SIGTERM"
    )
    outcome = f"ranks ended, agent of host b {end}; resumed bit-equal"
    matrix(name, f"link cut, limit {TIMEOUT:g} s", outcome, seconds)


def test_dead_host(script, whole, hosts, launch, matrix, all_faults):
    """Everything on host b killed: host a ends within seconds; the same command goes on from the checkpoint."""
    name, _, folder = script
    target = folder / "dead"
    jobs = middle_of_training(launch, script, target)
    hosts.kill(hosts.b)
    seconds = wait_until(lambda: not hosts.processes(), 15, jobs)
    assert jobs.wait(5)[0] == 1
    ends_as_undisturbed(launch, script, target, whole)
    matrix(name, "host b killed", "host a ended with 1, resumed bit-equal", seconds)


def test_elastic(script, whole, hosts, launch, matrix, all_faults):
    """--nnodes=1:2, host b killed: host a restarts alone from the checkpoint, with the same samples in every step."""
    name, _, folder = script
    target = folder / "elastic"
    jobs = middle_of_training(launch, script, target, nodes="1:2")
    begin = time.monotonic()
    hosts.kill(hosts.b)
    assert jobs.jobs[0].wait(150) == 0, jobs.text[-5000:]
    seconds = time.monotonic() - begin
    assert not hosts.processes() and "resuming" in jobs.text
    run, plan, first, second = Run(target), whole.trained_on(), {}, {}
    assert run.summary["status"] == "finished" and run.summary["world_size"] == 1
    for trace in folder.glob("elastic.trace-*"):
        into = first if "of-2" in trace.name else second
        for number, ids in map(json.loads, trace.read_text().splitlines()):
            into.setdefault(number, []).extend(ids)
    start = min(second)
    assert 1 < start <= max(first) + 1 and [*sorted(second)] == [*range(start, max(plan) + 1)]
    for made in {step: first[step] for step in range(1, start)}, second:
        for step, ids in made.items():
            assert sorted(ids) == sorted(plan[step])
    assert run.losses == pytest.approx(whole.losses, rel=1e-4)
    matrix(
        name,
        "host b killed, --nnodes=1:2",
        f"host a alone from step {start}, status 0, same samples",
        seconds,
    )
