"""Every training script on two hosts, of which one goes on alone when the link between them is cut.

The hosts are network namespaces of this machine with a cable between them, each with its own
address, host name and /etc/hosts. They share the file system, but host b sees an empty folder in
place of the output folder, which the script needs on the first host alone. Needs root and `ip`."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest
from helpers import ROOT, TORCHRUN, Job, environment
from runs import RUNS, SCRIPTS, Run, Task, print_row

TIMEOUT = 12  # seconds: --timeout_minutes
# FAULTS: time to cut the link in the middle of a run
SLOW = [[1, step, "sleep", 0.3] for step in range(20, 60)]

pytestmark = pytest.mark.timeout(300)


def ip(command):
    subprocess.run(["ip", *command.split()], check=True, capture_output=True, text=True)


class Hosts:
    """Two namespaces, `a` and `b`, and a cable between them."""

    def __init__(self, folder):
        number = os.getpid()
        self.a = f"ddp-a-{number}"  # torchrun's rank 0 goes to the first name
        self.b = f"ddp-b-{number}"
        self.addresses = {self.a: "10.64.0.1", self.b: "10.64.0.2"}
        self.names = folder / "hosts"
        lines = [f"{address} {name}\n" for name, address in self.addresses.items()]
        self.names.write_text("".join(["127.0.0.1 localhost\n", *lines]))
        self.jobs = []

    def build(self):
        for name in self.addresses:
            ip(f"netns add {name}")
        ip(f"link add eth0 netns {self.a} type veth peer name eth0 netns {self.b}")
        for name, address in self.addresses.items():
            ip(f"-n {name} addr add {address}/24 dev eth0")
            ip(f"-n {name} link set lo up")
            ip(f"-n {name} link set eth0 up")

    def remove(self):
        for job in self.jobs:
            job.end()
        for name in self.addresses:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def start(self, name, command, folder, env):
        """A Job on a host."""
        setup = f"hostname {name}; mount --bind {self.names} /etc/hosts"
        if name == self.b:
            setup += f"; mount -t tmpfs -o ro tmpfs {folder}"
        isolated = ["ip", "netns", "exec", name, "unshare", "--uts"]
        shell = [*isolated, "sh", "-ec", f'{setup}; exec "$@"', "sh", *command]
        self.jobs.append(Job(shell, folder.with_name(f"{name}.txt"), env))
        return self.jobs[-1]


@pytest.fixture
def hosts(tmp_path):
    if sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("two hosts on one machine need Linux, root and ip")
    hosts = Hosts(tmp_path)
    try:
        hosts.build()
        yield hosts
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    finally:
        hosts.remove()


def pytest_generate_tests(metafunc):
    """The normal test command has none of them."""
    names = SCRIPTS if metafunc.config.getoption("--all-faults") else []
    metafunc.parametrize("name", names)


def test_cut_link(name, hosts, server, tmp_path):
    """Nobody says goodbye: the ranks end at their time limit. Host b's agent waits for a lost
    store, and is ended by -k. Host a goes on alone from the checkpoint, with the same samples."""
    task = Task(name, tmp_path, server)
    output = tmp_path / "cut"
    output.mkdir()
    command = f"""timeout -k 2 250 {" ".join(TORCHRUN)} --nnodes=1:2 --nproc_per_node=1
        --rdzv-backend=c10d --rdzv-id=1 --rdzv-endpoint={hosts.a}:29500
        --max-restarts=3 --rdzv-conf=last_call_timeout=10""".split()
    command += [RUNS, name, *task.argv, f"--output_dir={output}"]
    command.append(f"--timeout_minutes={TIMEOUT / 60}")
    env = environment(
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1,
        OUTPUT=output,
        FAULTS=json.dumps(SLOW),
        PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}",
    )
    a = hosts.start(hosts.a, command, output, env)
    b = hosts.start(hosts.b, command, output, env)
    a.wait_for("step=23 ")
    # packets are lost, and no end of a connection is told
    ip(f"-n {hosts.b} link set eth0 down")
    begin = time.monotonic()
    while any("RANK=1" in variables for variables in b.processes().values()):
        assert time.monotonic() - begin < TIMEOUT + 30
        time.sleep(0.05)
    seconds = time.monotonic() - begin
    assert seconds > TIMEOUT / 2
    b.process.terminate()
    assert b.wait(10) != 0
    assert b.is_gone()
    assert a.wait(150) == 0, a.text[-5000:]
    assert a.is_gone()
    assert "resuming" in a.text

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
    outcome = f"the ranks end; host a alone from step {start}, status 0, same samples"
    print_row(name, f"link cut, limit {TIMEOUT} s, --nnodes=1:2", outcome, seconds)
