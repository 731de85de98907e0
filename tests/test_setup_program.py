"""test_ddp_setup.py: what it says on a sound machine, on broken ones, and with broken features."""

import json
import os
import re
import shutil
import types
from unittest import mock

import pytest
import torch
from helpers import ROOT, call_program, environment, forkserver, parse_arguments, rank_variables
from torch.nn.parallel import DistributedDataParallel

import test_ddp_setup as program

PATH = ROOT / "test_ddp_setup.py"
NAMES = ["versions", "devices", "shared memory", "sums", "DDP step", "precision"]
NAMES += ["all reduce", "speedup"]  # between ranks
CPU = torch.device("cpu")


def statuses(output):
    """{check: status}"""
    found = re.findall(r"^(OK|WARN|FAIL) +([A-Za-z ]+): .+$", output, re.M)
    return {name: status for status, name in found}


def test_two_processes(tmp_path):
    """Everything, on a sound machine; its results, which benchmarks/gpu.py reads."""
    path = tmp_path / "out.json"
    output = call_program(PATH, "--nproc_per_node=2", f"--json={path}")
    checks = statuses(output)
    assert list(checks) == NAMES
    for name in ("versions", "sums", "DDP step", "precision", "all reduce"):
        assert checks[name] == "OK", output

    results = json.loads(path.read_text())
    assert {check["name"]: check["status"] for check in results["checks"]} == checks
    measured = results["measured"]
    assert [row["bytes"] for row in measured["all_reduce"]] == program.SIZES
    speedup = 2 * measured["step"]["alone"] / measured["step"]["together"]
    assert f"2 ranks do {speedup:.2f} times the work of one" in output


def test_options_that_cannot_work():
    """One line, before anything is checked or started."""
    for option in ("--json=none/out.json", f"--json={ROOT}", "--nproc=2"):
        output = call_program(PATH, option, status=2)
        assert re.fullmatch(r"test_ddp_setup.py: error: .+\n", output)


@pytest.mark.parametrize("n", [1, 2])
def test_under_slurm(server, n):
    """Rank 0 speaks. One rank, as on a machine with one GPU, has nothing to exchange."""
    common = {"SLURM_NTASKS": n, "SLURM_STEP_ID": 0}
    common["MASTER_PORT"] = rank_variables(n)[0]["MASTER_PORT"]
    variables = [{**common, "SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in range(n)]
    server.start(variables, [str(PATH), "--nproc_per_node=1"])
    assert server.wait() == [0] * n, server.text
    first, *others = [statuses(path.read_text()) for path in server.outputs]
    assert list(first) == (NAMES if n == 2 else NAMES[:-2])
    assert not any(others)


CHANGES = {  # what is done after the sum of all ranks; statuses of the ranks, what is said
    "    if dist.get_rank() > 0:\n        os._exit(3)\n": ([1, 3], "RuntimeError: "),
    "    values += dist.get_rank()\n": ([1, 1], "FAIL  sums: rank 1: 1 + ... + 2 is 4, not 3;"),
}


@pytest.mark.parametrize("change", CHANGES, ids=["dies", "is wrong"])
def test_a_rank_that(change, server, tmp_path):
    """Without a launcher that would end the others; and what another rank finds is reported."""
    expected, said = CHANGES[change]
    all_reduce = "    dist.all_reduce(values)\n"
    text = PATH.read_text()
    assert all_reduce in text
    broken = tmp_path / PATH.name
    broken.write_text(text.replace(all_reduce, all_reduce + change))
    server.start(rank_variables(2), [str(broken)])
    assert server.wait() == expected, server.text
    assert said in server.text


def test_ranks_that_do_not_reach_each_other():
    output = call_program(PATH, status=1, GLOO_SOCKET_IFNAME="none0")
    assert "Unable to find address for: none0" in output
    assert statuses(output) == {}


def test_warnings(group, monkeypatch):
    """Other versions, little shared memory, GPUs that are hidden, in use, or do not tell."""
    for version, status in [("2.10.1", "FAIL"), ("2.11.0", "OK"), ("2.14.0+cpu", "WARN")]:
        monkeypatch.setattr(torch, "__version__", version)
        assert program.check_versions(None, CPU)[0] == status
    for free, status in [(2e9, "OK"), (64e6, "WARN")]:
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: mock.Mock(free=free))
        assert program.check_shared_memory(None, CPU)[0] == status
    args = types.SimpleNamespace(device="auto")
    for driver, status in [(None, "OK"), ("/usr/bin/nvidia-smi", "WARN")]:
        monkeypatch.setattr(shutil, "which", lambda name, driver=driver: driver)
        assert program.check_devices(args, CPU)[0] == status

    module = mock.Mock()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    gpu = torch.device("xpu", 0)
    for free, status in [(9e9, "OK"), (2e9, "WARN")]:
        module.mem_get_info.return_value = (free, 10e9)
        assert program.check_devices(args, gpu)[0] == status
    module.mem_get_info.side_effect = RuntimeError("not supported")  # some of Intel's
    assert "does not say" in program.check_devices(args, gpu)[1]


# --------------------------------------------------------------------------------------------------
# Each check must fail once its feature is broken.


def all_wrong_alike(model):
    return DistributedDataParallel(model.append(torch.nn.Tanh()))


def add_noise_of_rank(optimizer):
    """In place of an update: less than is allowed for rounding."""
    torch.manual_seed(program.dist.get_rank())
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.data.add_(1e-9 * torch.randn_like(parameter))


def judge(variables):
    """In a rank: each check as it is, and with a feature broken."""
    os.environ.update(variables)
    program.setup_ddp(parse_arguments(program, "--device=cpu"))
    replace = mock.patch.object
    broken = [
        (program.check_versions, replace(torch, "__version__", f"2.12.{program.dist.get_rank()}")),
        (program.check_sums, replace(program.dist, "all_reduce")),
        (program.check_DDP_step, replace(program, "DistributedDataParallel", lambda model: model)),
        (program.check_DDP_step, replace(program, "DistributedDataParallel", all_wrong_alike)),
        (program.check_DDP_step, replace(torch.optim.SGD, "step", add_noise_of_rank)),
        (program.check_precision, torch.autocast("cpu", torch.bfloat16)),
    ]
    for check, without_feature in broken:
        status, _ = check(None, CPU)
        assert program.gather(status) == ["OK", "OK"], check
        with without_feature:
            status, _ = check(None, CPU)
        assert "FAIL" in program.gather(status), (check, without_feature)
    program.cleanup()


def test_checks_fail():
    variables = rank_variables(2)
    ranks = [forkserver().Process(target=judge, args=[environment(**own)]) for own in variables]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0, 0]
