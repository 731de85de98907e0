"""Every training script on two hosts: equal to one host, and what a cut link or a dead host leaves.

The hosts are network namespaces of this machine with a cable between them, each with its own
address, host name and /etc/hosts. They share the file system, but host b sees an empty folder in
place of the output folder, which the script needs on the first host alone. Needs root and `ip`.
"""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from helpers import ROOT, TORCHRUN, Job, environment, kill_all
from runs import RUNS, SCRIPTS, Run, Task, assert_same_end

TIMEOUT = 12  # seconds: the time limit of the runs whose link is cut
# FAULTS: time to do something in the middle of a run
SLOW = [[1, step, "sleep", 0.3] for step in range(20, 60)]

pytestmark = pytest.mark.timeout(300)

# --------------------------------------------------------------------------------------------------
# Hosts


def ip(command):
    done = subprocess.run(["ip", *command.split()], check=True, capture_output=True, text=True)
    return done.stdout


def processes(*hosts):
    found = []
    for name in hosts:
        found += map(int, ip(f"netns pids {name}").split())
    return found


class Hosts:
    """Two namespaces, `a` and `b`, and a cable between them."""

    def __init__(self, folder):
        number = os.getpid()
        self.a = f"ddp-a-{number}"  # torchrun's rank 0 goes to the first name
        self.b = f"ddp-b-{number}"
        self.both = [self.a, self.b]
        self.ports = itertools.count(29500)
        self.net = f"10.{64 + number // 256 % 64}.{number % 256}"
        self.names = folder / "hosts"
        addresses = f"{self.net}.1 {self.a}\n{self.net}.2 {self.b}\n"
        self.names.write_text(f"127.0.0.1 localhost\n{addresses}")

    def build(self):
        for name in self.both:
            ip(f"netns add {name}")
        ip(f"link add eth0 netns {self.a} type veth peer name eth0 netns {self.b}")
        for number, name in enumerate(self.both, 1):
            ip(f"-n {name} addr add {self.net}.{number}/24 dev eth0")
            ip(f"-n {name} link set lo up")
            ip(f"-n {name} link set eth0 up")

    def remove(self):
        for name in self.both:
            if Path("/run/netns", name).exists():
                kill_all(partial(processes, name))
                ip(f"netns del {name}")

    def cable(self, state):
        """`up`, or `down`: packets are lost, and no end of a connection is told."""
        ip(f"-n {self.b} link set eth0 {state}")

    def on(self, name, command, folder):
        """The command line that runs `command` on a host."""
        setup = f"hostname {name}; mount --bind {self.names} /etc/hosts"
        if name == self.b:
            setup += f"; mount -t tmpfs -o ro tmpfs {folder}"
        isolated = ["ip", "netns", "exec", name, "unshare", "--uts"]
        return [*isolated, "sh", "-ec", f'{setup}; exec "$@"', "sh", *command]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    if sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("two hosts on one machine need Linux, root and ip")
    hosts = Hosts(tmp_path_factory.mktemp("hosts"))
    try:
        hosts.build()
        yield hosts
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    finally:
        hosts.remove()


# --------------------------------------------------------------------------------------------------
# Runs


@pytest.fixture(scope="module")
def task(request, tmp_path_factory, hosts, server):
    return Task(request.param, tmp_path_factory.mktemp(request.param), server)


class Launch:
    """The same torchrun command on both hosts, a Job each."""

    def __init__(self, hosts, task, output, more, nodes, faults):
        output.mkdir(exist_ok=True)
        port = next(hosts.ports)
        # -k: an agent that SIGTERM does not end is killed (guide, 3)
        command = f"""timeout -k 2 250 {" ".join(TORCHRUN)} --nnodes={nodes} --nproc_per_node=1
            --rdzv-backend=c10d --rdzv-id={port} --rdzv-endpoint={hosts.a}:{port}""".split()
        if ":" in nodes:
            command += ["--max-restarts=3", "--rdzv-conf=last_call_timeout=10"]
        command += [RUNS, task.name, *task.argv, *more, f"--output_dir={output}"]
        env = environment(
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1,
            OUTPUT=output,
            FAULTS=json.dumps(faults),
            PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}",
        )
        self.jobs = []
        for name in hosts.both:
            text = output.with_name(f"{output.name}-{port}-{name}.txt")
            self.jobs.append(Job(hosts.on(name, command, output), text, env))

    @property
    def text(self):
        return "\n".join(job.text for job in self.jobs)

    def wait(self, seconds=100.0):
        return [job.wait(seconds) for job in self.jobs]

    def wait_until(self, is_true, seconds):
        """Seconds until is_true()."""
        begin = time.monotonic()
        while not is_true():
            assert time.monotonic() - begin < seconds, self.text[-5000:]
            time.sleep(0.05)
        return time.monotonic() - begin

    def ranks(self):
        """The variables of each living rank, and of each of their workers."""
        found = [variables for job in self.jobs for variables in job.processes().values()]
        return [own for own in found if any(word.startswith("RANK=") for word in own)]


@pytest.fixture
def launch(hosts):
    """launch(task, output, *more): a Launch."""
    launches = []

    def call(task, output, *more, nodes="2", faults=()):
        launches.append(Launch(hosts, task, output, more, nodes, faults))
        return launches[-1]

    yield call
    hosts.cable("up")
    kill_all(partial(processes, *hosts.both))
    for launch in launches:
        launch.wait(5)


def check_restart(launch, task, output):
    """The command once more, with the usual time limit: every bit is that of one host."""
    again = launch(task, output)
    assert again.wait() == [0, 0], again.text[-5000:]
    assert "resuming" in again.text
    run = Run(output)
    assert_same_end(run, task.whole)
    assert run.figures == task.whole.figures
    assert run.summary["world_size"] == 2


# --------------------------------------------------------------------------------------------------
# Tests


def pytest_generate_tests(metafunc):
    """The normal test command has none of them."""
    names = SCRIPTS if metafunc.config.getoption("--all-faults") else []
    metafunc.parametrize("task", names, indirect=True, scope="module")


def test_cut_link(task, hosts, launch, matrix):
    """Nobody says goodbye: the ranks end at their time limit; an agent that waits for a lost store
    is ended by -k. What two hosts then make of the checkpoint is what one host makes."""
    output = task.folder / "cut"
    jobs = launch(task, output, f"--timeout_minutes={TIMEOUT / 60}", faults=SLOW)
    jobs.jobs[0].wait_for("step=23 ")
    assert len(jobs.ranks()) >= 2
    hosts.cable("down")
    seconds = jobs.wait_until(lambda: not jobs.ranks(), TIMEOUT + 30)
    assert seconds > TIMEOUT / 2
    # host a has the store, and nobody to wait for
    jobs.wait_until(lambda: not processes(hosts.a), 20)
    is_left = bool(processes(hosts.b))
    jobs.jobs[1].process.terminate()
    jobs.wait_until(lambda: not processes(*hosts.both), 10)
    statuses = jobs.wait(5)
    assert 0 not in statuses

    hosts.cable("up")
    check_restart(launch, task, output)
    end = "ended by itself"
    if is_left:
        end = "killed by timeout -k" if statuses[1] == -signal.SIGKILL else "ended by SIGTERM"
    outcome = f"ranks ended, agent of host b {end}; resumed bit-equal"
    matrix(task.name, f"link cut, limit {TIMEOUT} s", outcome, seconds)


def test_elastic(task, hosts, launch, matrix):
    """--nnodes=1:2: host a restarts alone from the checkpoint, with the same samples."""
    output = task.folder / "elastic"
    jobs = launch(task, output, nodes="1:2", faults=SLOW)
    jobs.jobs[0].wait_for("step=23 ")
    begin = time.monotonic()
    kill_all(partial(processes, hosts.b))
    assert jobs.jobs[0].wait(150) == 0, jobs.text[-5000:]
    seconds = time.monotonic() - begin
    assert not processes(*hosts.both)
    assert "resuming" in jobs.text

    run = Run(output)
    whole = task.whole
    assert run.summary["status"] == "finished"
    assert run.summary["world_size"] == 1
    first = run.trained_on(world_size=2)
    second = run.trained_on(world_size=1)
    start = min(second)
    assert 1 < start <= max(first) + 1
    assert sorted(second) == list(range(start, max(whole.trained_on()) + 1))
    for step, ids in whole.trained_on().items():
        assert sorted((second if step >= start else first)[step]) == sorted(ids)
    assert run.losses == pytest.approx(whole.losses, rel=1e-4)
    outcome = f"host a alone from step {start}, status 0, same samples"
    matrix(task.name, "host b killed, --nnodes=1:2", outcome, seconds)
