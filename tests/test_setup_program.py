"""test_ddp_setup.py: what it says on a sound machine, on broken ones, and with broken features."""

import json
import os
import re
import socket
import sys
from unittest import mock

import pytest
import torch
from helpers import ROOT, call_program, forkserver, free_port, on_small_disk, parse_arguments

import test_ddp_setup as program

PATH = ROOT / "test_ddp_setup.py"
ENVIRONMENT = list(program.ENVIRONMENT)
RANK_CHECKS = list(program.RANK_CHECKS)


def statuses(output):
    """{check: status}"""
    found = {}
    for status, name in re.findall(r"^(OK|WARN|FAIL) +([A-Za-z -]+): .+$", output, re.M):
        found[name] = status
    return found


def test_two_processes(tmp_path):
    """Everything, on a sound machine: the checks, the measured figures, the predictions."""
    path = tmp_path / "out.json"
    options = ["--nproc_per_node=2", f"--json={path}", f"--output_dir={tmp_path}/runs"]
    status, output = call_program(PATH, *options)
    checks = statuses(output)
    assert status == 0, output
    assert list(checks) == [*ENVIRONMENT, *RANK_CHECKS, "speed-up", "failing rank"]
    for name in [*RANK_CHECKS, "failing rank"]:
        assert checks[name] == "OK", output
    assert list((tmp_path / "runs").iterdir()) == []

    written = json.loads(path.read_text())
    assert {check["name"]: check["status"] for check in written["checks"]} == checks
    measured = written["measured"]
    assert [row["bytes"] for row in measured["all_reduce"]] == program.SIZES
    speed_up = 2 * measured["training"]["alone"] / measured["training"]["exchanging"]
    assert f"2 ranks do {speed_up:.2f} times the work of one, " in output
    predictions = output.split("Predicted speed-up of 2 ranks")[1]
    for name in program.WORKLOADS:
        assert 0 < float(re.search(rf"^  {name} +([\d.]+)$", predictions, re.M)[1]) <= 2


def test_one_process():
    """As on a machine with one GPU: nothing to exchange, and so nothing to predict."""
    status, output = call_program(PATH, "--nproc_per_node=1")
    assert status == 0, output
    assert list(statuses(output)) == [*ENVIRONMENT, *RANK_CHECKS, "end of the ranks"]
    assert "--nproc_per_node 2 or more" in output


def test_a_broken_environment(tmp_path):
    """All that is wrong is said at once, and no rank is started."""
    with socket.socket() as server, on_small_disk(tmp_path, 8 << 20):
        server.bind(("", 0))
        server.listen()
        port = server.getsockname()[1]
        options = ["--backend=nccl", f"--output_dir={tmp_path}"]
        status, output = call_program(PATH, *options, MASTER_PORT=port)
    checks = statuses(output)
    assert status == 1
    assert list(checks) == ENVIRONMENT
    failed = [name for name in checks if checks[name] == "FAIL"]
    assert failed == ["backend", "port", "disk"], output


def test_under_a_launcher(server):
    """Two ranks with Slurm's variables, and twice as many threads as cores: rank 0 speaks."""
    common = {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    common.update(SLURM_NTASKS=2, SLURM_STEP_ID=0, OMP_NUM_THREADS=os.cpu_count())
    variables = [{**common, "SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in (0, 1)]
    server.start(variables, [str(PATH), "--quick"])
    assert server.wait() == [0, 0], server.text
    first, second = [path.read_text() for path in server.outputs]
    checks = statuses(first)
    assert list(checks) == [name for name in [*ENVIRONMENT, *RANK_CHECKS] if name != "port"]
    assert checks["threads"] == "WARN"
    assert "INFO" not in first
    assert statuses(second) == {}


def test_ranks_that_do_not_come():
    alone = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
    options = ["--quick", "--timeout_minutes=0.05"]
    status, output = call_program(PATH, *options, **alone, MASTER_PORT=free_port())
    assert status == 1
    assert re.search("error: no process group: .*firewall", output)


def test_a_rank_that_dies(tmp_path):
    """What the ranks have written is shown."""
    broken = tmp_path / "test_ddp_setup.py"
    death = '    os.write(2, b"good bye")\n    os._exit(3)\n    expected = n *'
    broken.write_text(PATH.read_text().replace("    expected = n *", death))
    status, output = call_program(broken, "--quick", "--nproc_per_node=2")
    assert status == 1
    assert statuses(output)["end of the ranks"] == "FAIL"
    assert "good bye" in output


# --------------------------------------------------------------------------------------------------
# Each check must fail once its feature is broken.


def add_noise_of_rank(optimizer):
    """In place of an update: less than is allowed for rounding."""
    torch.manual_seed(program.dist.get_rank())
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.data.add_(1e-9 * torch.randn_like(parameter))


BROKEN = [  # check, owner of the feature, its name, what takes its place
    ("DDP step", program, "wrap_ddp", lambda model, *_: model),
    ("DDP step", torch.optim.SGD, "step", add_noise_of_rank),
    ("sums", program.dist, "all_reduce", lambda values: None),
    ("precision", program, "choose_precision", lambda *_: torch.bfloat16),
]


def test_checks_fail(tmp_path):
    port = str(free_port())
    ranks = []
    for rank in ("0", "1"):
        environment = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "MASTER_PORT": port}
        process = forkserver().Process(target=judge, args=(environment, tmp_path / rank))
        process.start()
        ranks.append(process)
    for process in ranks:
        process.join(60)
    found = [json.loads((tmp_path / rank).read_text()) for rank in ("0", "1")]
    for feature, first, second in zip(BROKEN, *found, strict=True):
        assert first[0] == second[0] == "OK", feature
        assert "FAIL" in (first[1], second[1]), feature


def judge(environment, path):
    """In a rank: the statuses of each check as it is, and with a feature broken."""
    os.environ.update(environment)
    args = parse_arguments(program, "--quick", "--device=cpu")
    device = program.setup_ddp(args)
    found = []
    for name, owner, feature, replacement in BROKEN:
        check = program.RANK_CHECKS[name]
        whole, _ = check(args, device)
        program.dist.barrier()
        with mock.patch.object(owner, feature, replacement):
            broken, _ = check(args, device)
        program.dist.barrier()
        found.append((whole, broken))
    path.write_text(json.dumps(found))
    program.cleanup()


# --------------------------------------------------------------------------------------------------
# Predictions


def test_prediction():
    """Against the formula by hand. One bucket has nothing to hide behind; many hide well."""
    table = [{"bytes": size, "seconds": size / 1e9} for size in (2**10, program.BUCKET)]
    measured = {"ranks": 2, "device": "cuda", "tflop_per_s": {"bf16": 100}, "all_reduce": table}
    for micro_batches in (1, 4):  # of which the last one exchanges
        step = micro_batches * 0.006  # it takes so long to launch the kernels
        found = program.predict_script(measured, 1e6, 0.001, micro_batches, 6)
        assert found == pytest.approx(2 * step / (step + 4e6 / 1e9))
    seconds = 40 / (program.EFFICIENCY * 100)
    last_bucket = 400e6 / 16 / 1e9
    found = program.predict_script(measured, 100e6, 40, 1, 0)
    assert found == pytest.approx(2 * seconds / (seconds + last_bucket))


def test_workloads_are_those_of_the_scripts():
    """The number of parameters, for the scripts whose network needs no download; and the micro-
    batches of a step."""
    import run_dpo_ddp
    import run_train_uniref50_ddp as uniref50

    with mock.patch.object(sys, "argv", ["script"]), torch.device("meta"):
        args = uniref50.parse_args()
        networks = {"dpo": run_dpo_ddp.ProteinMPNN(), "uniref50": uniref50.Denoiser(args)}
    assert args.accum == program.WORKLOADS["uniref50"][2]
    for name, network in networks.items():
        count = sum(p.numel() for p in network.parameters())
        assert count == pytest.approx(program.WORKLOADS[name][0], rel=0.05)
