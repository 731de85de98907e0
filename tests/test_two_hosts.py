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
from helpers import ROOT, TORCHRUN, Job
from runs import RUNS, SCRIPTS, Run, Task, print_row

TIMEOUT = 12  # seconds: --timeout_minutes
A = f"ddp-a-{os.getpid()}"  # torchrun's rank 0 goes to the first name
B = f"ddp-b-{os.getpid()}"
ADDRESSES = {A: "10.64.0.1", B: "10.64.0.2"}
# FAULTS: time to cut the link in the middle of a run
SLOW = [[1, step, "sleep", 0.3] for step in range(20, 60)]

pytestmark = pytest.mark.timeout(300)


def ip(command):
    subprocess.run(["ip", *command.split()], check=True, capture_output=True, text=True)


@pytest.fixture
def start_on(tmp_path):
    """start_on(host, command, folder, **environment): a Job on one of two hosts with a cable."""
    if sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("two hosts on one machine need Linux, root and ip")
    jobs = []
    names = tmp_path / "hosts"
    lines = [f"{address} {name}\n" for name, address in ADDRESSES.items()]
    names.write_text("".join(["127.0.0.1 localhost\n", *lines]))

    def call(host, command, folder, **variables):
        setup = f"hostname {host}; mount --bind {names} /etc/hosts"
        if host == B:
            setup += f"; mount -t tmpfs -o ro tmpfs {folder}"
        isolated = ["ip", "netns", "exec", host, "unshare", "--uts"]
        shell = [*isolated, "sh", "-ec", f'{setup}; exec "$@"', "sh", *command]
        jobs.append(Job(shell, **variables))
        return jobs[-1]

    try:
        for host in ADDRESSES:
            ip(f"netns add {host}")
        ip(f"link add eth0 netns {A} type veth peer name eth0 netns {B}")
        for host, address in ADDRESSES.items():
            ip(f"-n {host} addr add {address}/24 dev eth0")
            ip(f"-n {host} link set lo up")
            ip(f"-n {host} link set eth0 up")
        yield call
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    finally:
        for job in jobs:
            job.end()
        for host in ADDRESSES:
            subprocess.run(["ip", "netns", "del", host], capture_output=True)


def pytest_generate_tests(metafunc):
    """The normal test command has none of them."""
    names = SCRIPTS if metafunc.config.getoption("--all-faults") else []
    metafunc.parametrize("name", names)


def test_cut_link(name, start_on, server, tmp_path):
    """Nobody says goodbye: the ranks end at their time limit. Host b's agent waits for a lost
    store, and is ended by -k. Host a goes on alone from the checkpoint, with the same samples."""
    task = Task(name, tmp_path, server)
    output = tmp_path / "cut"
    output.mkdir()
    command = f"""timeout -k 2 250 {" ".join(TORCHRUN)} --nnodes=1:2 --nproc_per_node=1
        --rdzv-backend=c10d --rdzv-id=1 --rdzv-endpoint={A}:29500
        --max-restarts=3 --rdzv-conf=last_call_timeout=10""".split()
    command += [RUNS, name, *task.argv, f"--output_dir={output}"]
    command.append(f"--timeout_minutes={TIMEOUT / 60}")
    variables = {"OUTPUT": output, "FAULTS": json.dumps(SLOW), "PYTHONPATH": f"{ROOT}:{ROOT}/tests"}
    variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = 1
    a = start_on(A, command, output, **variables)
    b = start_on(B, command, output, **variables)
    a.wait_for("step=23 ")
    # packets are lost, and no end of a connection is told
    ip(f"-n {B} link set eth0 down")
    begin = time.monotonic()
    while any("RANK=1" in variables for variables in b.processes().values()):
        assert time.monotonic() - begin < TIMEOUT + 30
        time.sleep(0.05)
    seconds = time.monotonic() - begin
    assert seconds > TIMEOUT / 2
    b.ranks[0].terminate()
    assert b.wait(10) != 0
    assert a.wait(150) == 0, a.text[-5000:]
    assert "resuming" in a.text

    run = Run(output)
    whole = task.whole
    assert run.summary["status"] == "finished"
    assert run.summary["world_size"] == 1
    first = run.trained_on(world_size=2)
    second = run.trained_on(world_size=1)
    start = min(second)
    assert 1 < start <= max(first) + 1
    made = {step: sorted(ids) for step, ids in [*first.items(), *second.items()]}
    assert made == {step: sorted(ids) for step, ids in whole.trained_on().items()}
    assert run.losses == pytest.approx(whole.losses, rel=1e-4)
    outcome = f"the ranks end; host a alone from step {start}, status 0, same samples"
    print_row(name, f"link cut, limit {TIMEOUT} s, --nnodes=1:2", outcome, seconds)
