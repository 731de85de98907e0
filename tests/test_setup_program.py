"""test_ddp_setup.py: what it says on a sound machine, on broken ones, and with broken features."""

import json
import re
from unittest import mock

import torch
from helpers import ROOT, call_script, rank_variables
from torch.nn.parallel import DistributedDataParallel

import test_ddp_setup as program

PATH = ROOT / "test_ddp_setup.py"
NAMES = ["versions", "devices", "shared memory", "sums", "DDP step", "precision"]
EXCHANGES = ["all reduce", "speedup"]  # between ranks
CPU = torch.device("cpu")


def statuses(output):
    """{check: status}"""
    found = re.findall(r"^(OK|WARN|FAIL) +([A-Za-z ]+): .+$", output, re.M)
    return {name: status for status, name in found}


def test_two_processes(tmp_path):
    """Everything, on a sound machine; its results, which benchmarks/gpu.py reads."""
    path = tmp_path / "out.json"
    output = call_script("test_ddp_setup", "--nproc_per_node=2", f"--json={path}")
    checks = statuses(output)
    assert list(checks) == NAMES + EXCHANGES
    for name in ("versions", "sums", "DDP step", "precision", "all reduce"):
        assert checks[name] == "OK", output
    results = json.loads(path.read_text())
    assert {check["name"]: check["status"] for check in results["checks"]} == checks
    assert [row["bytes"] for row in results["measured"]["all_reduce"]] == program.SIZES


def test_one_process():
    """As on a machine with one GPU: there is nothing to exchange."""
    assert list(statuses(call_script("test_ddp_setup", "--nproc_per_node=1"))) == NAMES
    output = call_script("test_ddp_setup", "--json=none/out.json", status=2)
    assert re.fullmatch(r"test_ddp_setup.py: error: .+\n", output)


def test_a_sum_that_is_wrong(server, tmp_path):
    """On one rank: it is reported, and all ranks end with status 1."""
    all_reduce = "    dist.all_reduce(values)\n"
    text = PATH.read_text().replace(all_reduce, f"{all_reduce}    values += dist.get_rank()\n")
    (tmp_path / PATH.name).write_text(text)
    server.start(rank_variables(2), [str(tmp_path / PATH.name)])
    assert server.wait() == [1, 1], server.text
    assert server.text.count("FAIL  sums: rank 1: 1 + ... + 2 is 4, not 3;") == 1


def test_other_versions(group, monkeypatch):
    for version, status in [("2.10.1", "FAIL"), ("2.11.0", "OK"), ("2.14.0+cpu", "WARN")]:
        monkeypatch.setattr(torch, "__version__", version)
        assert program.check_versions(None, CPU)[0] == status


def all_wrong_alike(model):
    return DistributedDataParallel(model.append(torch.nn.Tanh()))


def add_noise_of_rank(optimizer):
    """In place of an update: less than is allowed for rounding."""
    torch.manual_seed(program.dist.get_rank())
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.data.add_(1e-9 * torch.randn_like(parameter))


def judge():
    """In a rank: each check fails once its feature is broken, and before it does not."""
    program.setup_ddp(program.parse_args())
    replace = mock.patch.object
    broken = [
        (program.check_versions, replace(torch, "__version__", f"2.12.{program.dist.get_rank()}")),
        (program.check_DDP_step, replace(program, "DistributedDataParallel", lambda model: model)),
        (program.check_DDP_step, replace(program, "DistributedDataParallel", all_wrong_alike)),
        (program.check_DDP_step, replace(torch.optim.SGD, "step", add_noise_of_rank)),
        (program.check_precision, torch.autocast("cpu", torch.bfloat16)),
    ]
    for check, without_feature in broken:
        assert program.gather(check(None, CPU)[0]) == ["OK", "OK"], check
        with without_feature:
            assert "FAIL" in program.gather(check(None, CPU)[0]), (check, without_feature)
    program.cleanup()


def test_checks_fail(server):
    server.start(rank_variables(2), [__file__, "--device=cpu"])
    assert server.wait() == [0, 0], server.text


if __name__ == "__main__":
    judge()
