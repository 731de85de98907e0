"""test_ddp_setup.py: what it says on a sound machine, on broken ones, and with broken features."""

import functools
import json
import os
import re
import socket
import sys
from unittest import mock

import pytest
import torch
from helpers import (
    ROOT,
    call_program,
    environment,
    forkserver,
    free_port,
    on_small_disk,
    parse_arguments,
    rank_variables,
)

import test_ddp_setup as program

PATH = ROOT / "test_ddp_setup.py"


def statuses(output):
    """{check: status}"""
    found = re.findall(r"^(OK|WARN|FAIL) +([A-Za-z ]+): .+$", output, re.M)
    return {name: status for status, name in found}


def failed(output):
    return [name for name, status in statuses(output).items() if status == "FAIL"]


def test_two_processes(tmp_path):
    """Everything, on a sound machine; its results, which benchmarks/gpu.py reads."""
    path = tmp_path / "out.json"
    options = ["--nproc_per_node=2", f"--json={path}", f"--output_dir={tmp_path}/runs"]
    output = call_program(PATH, *options)
    checks = statuses(output)
    assert len(checks) == 15
    for name in ("process group", "threads", "sums", "DDP step", "precision", "failing rank"):
        assert checks[name] == "OK", output
    assert "rank 1 ended on purpose, and the others noticed" in output
    assert "Traceback" not in output
    assert list((tmp_path / "runs").iterdir()) == []

    measured = json.loads(path.read_text())["measured"]
    assert 0 < min(measured["tflop_per_s"].values())
    assert [row["bytes"] for row in measured["all_reduce"]] == program.SIZES
    speedup = 2 * measured["step"]["alone"] / measured["step"]["together"]
    assert f"2 ranks do {speedup:.2f} times the work of one" in output


def test_a_gpu_that_does_not_tell_its_memory():
    """As some of Intel's."""
    module = mock.Mock()
    module.mem_get_info.side_effect = RuntimeError("not supported")
    group = {"get_world_size": lambda: 1, "get_backend": lambda: "xccl"}
    with (
        mock.patch.multiple(program.dist, **group),
        mock.patch.object(program, "gather", lambda value: [value]),
        mock.patch.object(torch, "get_device_module", lambda device: module),
    ):
        status, found = program.check_process_group(None, torch.device("xpu", 0))
    assert status == "OK" and "does not say how much memory" in found


def test_one_process(tmp_path):
    """As on a machine with one GPU, in a shell of srun: it has nothing to exchange. Results that
    cannot be written are a failure."""
    task = {"SLURM_PROCID": 0, "SLURM_NTASKS": 1, "SLURM_LOCALID": 0, "SLURM_STEP_ID": 0}
    options = ["--nproc_per_node=1", f"--json={tmp_path}/none/out.json"]
    output = call_program(PATH, *options, status=1, **task)
    assert len(statuses(output)) == 13
    assert failed(output) == ["json"]


def test_a_broken_environment(tmp_path):
    """All that is wrong is said at once, and no rank is started."""
    with socket.create_server(("", 0)) as server, on_small_disk(tmp_path, 8 << 20):
        port = server.getsockname()[1]
        options = ["--backend=nccl", f"--output_dir={tmp_path}"]
        output = call_program(PATH, *options, status=1, MASTER_PORT=port)
    assert len(statuses(output)) == 7
    assert failed(output) == ["backend", "port", "disk"], output


@pytest.mark.parametrize(("version", "status"), [("2.10.1", "FAIL"), ("2.14.0+cpu", "WARN")])
def test_other_versions_of_torch(monkeypatch, version, status):
    monkeypatch.setattr(torch, "__version__", version)
    assert program.check_versions(None)[0] == status


def test_ranks_that_do_not_meet(monkeypatch, capsys):
    """It is a failed check, and no end without a report."""

    def setup_ddp(args):
        raise program.RunError("no meeting at first:29500")

    monkeypatch.setattr(program, "setup_ddp", setup_ddp)
    monkeypatch.setattr(program, "checks", [])
    monkeypatch.setattr(program.logging, "disable", lambda level: None)
    program.check_ranks(None, 0)
    assert "FAIL  process group: no meeting at first:29500" in capsys.readouterr().out


def test_under_a_launcher(server):
    """Two ranks with Slurm's variables, and twice as many threads as cores: rank 0 speaks."""
    common = {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    common.update(SLURM_NTASKS=2, SLURM_STEP_ID=0, OMP_NUM_THREADS=os.cpu_count())
    variables = [{**common, "SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in (0, 1)]
    server.start(variables, [str(PATH)])
    assert server.wait() == [0, 0], server.text
    first, second = [path.read_text() for path in server.outputs]
    checks = statuses(first)
    assert len(checks) == 14  # all but that of the port
    assert checks["threads"] == "WARN"
    assert "INFO" not in first
    assert statuses(second) == {}


CHANGES = {  # a text of the program, what it becomes; what is then said by which check
    "sums": (
        "    dist.all_reduce(values)\n",
        "    if dist.get_rank() > 0:\n        os.write(2, b'good bye\\n')\n        os._exit(3)\n"
        "    dist.all_reduce(values)\n",
        "good bye",
    ),
    "time": ("TIME_LIMIT = 300", "TIME_LIMIT = 1", "took too long, more than 1 s; is the machine"),
    "failing rank": ("        os._exit(0)  # no error", "        pass  #", "nobody noticed"),
}


@pytest.mark.parametrize("check", CHANGES)
def test_ranks_that_end_badly(tmp_path, check):
    old, new, said = CHANGES[check]
    text = PATH.read_text()
    assert old in text
    broken = tmp_path / PATH.name
    broken.write_text(text.replace(old, new))
    path = tmp_path / "out.json"
    output = call_program(broken, "--nproc_per_node=2", f"--json={path}", status=1)
    assert failed(output) == [check], output
    assert said in output
    assert json.loads(path.read_text())["checks"][-1]["status"] == "FAIL"


def test_a_signal_to_the_first_process(start):
    """It does not leave its ranks alone."""
    job = start([sys.executable, str(PATH), "--nproc_per_node=2"])
    job.wait_for("OK +threads")
    job.process.terminate()
    assert job.wait(60) != 0
    assert job.is_gone(60)


def test_ranks_that_do_not_reach_each_other():
    output = call_program(PATH, status=1, GLOO_SOCKET_IFNAME="none0")
    assert re.search("FAIL  process group: .*none0.*firewall", output)


# --------------------------------------------------------------------------------------------------
# Each check must fail once its feature is broken.


def add_noise_of_rank(optimizer):
    """In place of an update: less than is allowed for rounding."""
    torch.manual_seed(program.dist.get_rank())
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.data.add_(1e-9 * torch.randn_like(parameter))


def always_bf16(args, device):
    return functools.partial(torch.autocast, "cpu", torch.bfloat16), None


BROKEN = [  # check, owner of the feature, its name, what takes its place
    (program.check_DDP_step, program, "wrap_ddp", lambda model, *_: model),
    (program.check_DDP_step, torch.optim.SGD, "step", add_noise_of_rank),
    (program.check_sums, program.dist, "all_reduce", lambda values: None),
    (program.check_precision, program, "choose_precision", always_bf16),
]


def test_checks_fail(tmp_path):
    paths = [tmp_path / "0", tmp_path / "1"]
    ranks = []
    for variables, path in zip(rank_variables(2), paths, strict=True):
        ranks.append(forkserver().Process(target=judge, args=(environment(**variables), path)))
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    found = [json.loads(path.read_text()) for path in paths]
    for feature, first, second in zip(BROKEN, *found, strict=True):
        assert first[0] == second[0] == "OK", feature
        assert "FAIL" in (first[1], second[1]), feature


def judge(variables, path):
    """In a rank: the statuses of each check as it is, and with a feature broken."""
    os.environ.update(variables)
    args = parse_arguments(program, "--device=cpu")
    device = program.setup_ddp(args)
    found = []
    for check, owner, feature, replacement in BROKEN:
        whole, _ = check(args, device)
        program.dist.barrier()
        with mock.patch.object(owner, feature, replacement):
            broken, _ = check(args, device)
        program.dist.barrier()
        found.append((whole, broken))
    path.write_text(json.dumps(found))
    program.cleanup()
