"""test_ddp_setup.py: what it says on a sound machine, on broken ones, and with broken features."""

import json
import os
import re
import socket
import sys
from unittest import mock

import pytest
import torch
from helpers import ROOT, call_program, forkserver, free_port, on_small_disk

import test_ddp_setup as program

LINE = re.compile(r"(OK|WARN|FAIL) {1,4}([A-Za-z -]+): (.+)")
ENVIRONMENT = list(program.ENVIRONMENT)
RANK_CHECKS = list(program.RANK_CHECKS)


def run(*options, path=ROOT / "test_ddp_setup.py", **environment):
    """(exit status, output, {check: status})"""
    status, output = call_program(path, *options, seconds=250, **environment)
    return status, output, parse(output)


def parse(output):
    checks = {}
    for line in output.splitlines():
        match = LINE.fullmatch(line)
        if match:
            checks[match[2]] = match[1]
    return checks


def test_two_processes(tmp_path):
    """Everything, on a sound machine: the checks, the measured figures, the predictions."""
    path = tmp_path / "out.json"
    options = [f"--json={path}", f"--output_dir={tmp_path}/runs"]
    status, output, checks = run("--nproc_per_node=2", *options)
    assert status == 0, output
    rank_checks = [*RANK_CHECKS, "speed-up", "end of the ranks", "failing rank"]
    assert list(checks) == [*ENVIRONMENT, *rank_checks]
    for name in {*rank_checks} - {"speed-up"}:
        assert checks[name] == "OK", output
    assert list((tmp_path / "runs").iterdir()) == []

    written = json.loads(path.read_text())
    assert {check["name"]: check["status"] for check in written["checks"]} == checks
    measured = written["measured"]
    assert measured["ranks"] == 2
    assert [row["bytes"] for row in measured["all_reduce"]] == program.SIZES
    training = measured["training"]
    speed_up = 2 * training["alone"] / training["exchanging"]
    assert f"2 ranks do {speed_up:.2f} times the work of one, " in output

    rows = output.split("Predicted speed-up")[1].splitlines()[2 : 2 + len(program.RANKS)]
    for ranks, row in zip(program.RANKS, rows, strict=True):
        first, *speed_ups = map(float, row.split())
        assert first == ranks
        assert len(speed_ups) == len(program.WORKLOADS)
        assert all(0 < speed_up <= ranks for speed_up in speed_ups)


def test_one_process():
    """As on a machine with one GPU: nothing to exchange, and so nothing to predict."""
    status, output, checks = run("--nproc_per_node=1")
    assert status == 0, output
    assert list(checks) == [*ENVIRONMENT, *RANK_CHECKS, "end of the ranks"]
    assert "TFLOP/s" in output
    assert "--nproc_per_node 2 or more" in output


def test_a_broken_environment(tmp_path):
    """All that is wrong is said at once, and no rank is started."""
    with socket.socket() as server, on_small_disk(tmp_path, 8 << 20):
        server.bind(("", 0))
        server.listen()
        port = server.getsockname()[1]
        options = ["--backend=nccl", f"--output_dir={tmp_path}"]
        status, output, checks = run(*options, MASTER_PORT=port)
        assert list(tmp_path.iterdir()) == []
    assert status == 1
    assert list(checks) == ENVIRONMENT
    failed = [name for name, its_status in checks.items() if its_status == "FAIL"]
    assert failed == ["backend", "port", "disk"], output
    for words in ("give --backend gloo", f"{port} on localhost: ", "give another --output_dir"):
        assert words in output


def test_under_a_launcher(server):
    """Two ranks with Slurm's variables, and twice as many threads as cores: rank 0 speaks."""
    common = {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    common.update(SLURM_NTASKS=2, SLURM_STEP_ID=0, OMP_NUM_THREADS=os.cpu_count())
    variables = [{**common, "SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in (0, 1)]
    server.start(variables, [str(ROOT / "test_ddp_setup.py"), "--quick"])
    assert server.wait() == [0, 0], server.text
    outputs = [path.read_text() for path in server.outputs]
    expected = [name for name in ENVIRONMENT if name != "port"]
    assert list(parse(outputs[0])) == [*expected, *RANK_CHECKS]
    assert parse(outputs[0])["threads"] == "WARN"
    assert "INFO" not in outputs[0]
    assert parse(outputs[1]) == {}


def test_ranks_that_do_not_come():
    alone = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
    options = ["--quick", "--timeout_minutes=0.05"]
    status, output, checks = run(*options, **alone, MASTER_PORT=free_port())
    assert status == 1
    assert checks["process group"] == "FAIL", output
    assert "firewall" in output


def test_a_rank_that_dies(tmp_path):
    """The last lines of the ranks are shown."""
    text = (ROOT / "test_ddp_setup.py").read_text()
    broken = tmp_path / "test_ddp_setup.py"
    death = '    print("good bye", flush=True)\n    os._exit(3)\n    expected = n *'
    broken.write_text(text.replace("    expected = n *", death))
    status, output, checks = run("--quick", "--nproc_per_node=2", path=broken)
    assert status == 1
    assert checks["end of the ranks"] == "FAIL"
    assert "their last lines are these:\n" in output
    assert "    good bye\n" in output


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
    for number, feature in enumerate(BROKEN):
        both = [statuses[number] for statuses in found]
        assert [whole for whole, _ in both] == ["OK", "OK"], feature
        assert "FAIL" in [broken for _, broken in both], feature


def judge(environment, path):
    """In a rank: the statuses of each check as it is, and with a feature broken."""
    os.environ.update(environment)
    with mock.patch.object(sys, "argv", ["test_ddp_setup.py", "--quick", "--device=cpu"]):
        args = program.parse_args()
    device = program.setup_ddp(args)
    statuses = []
    for name, owner, feature, replacement in BROKEN:
        check = program.RANK_CHECKS[name]
        whole, _ = check(args, device)
        program.dist.barrier()
        with mock.patch.object(owner, feature, replacement):
            broken, _ = check(args, device)
        program.dist.barrier()
        statuses.append((whole, broken))
    path.write_text(json.dumps(statuses))
    program.cleanup()


# --------------------------------------------------------------------------------------------------
# Predictions


def test_prediction():
    """Against the formula by hand. One bucket has nothing to hide behind; many hide well."""
    table = [{"bytes": size, "seconds": size / 1e9} for size in (2**10, program.BUCKET)]
    measured = {"ranks": 2, "device": "cuda", "tflop_per_s": {"bf16": 100}, "all_reduce": table}
    for ranks in program.RANKS:
        exposed = 2 * (ranks - 1) / ranks * 4e6 / 1e9
        for micro_batches in (1, 4):  # of which the last one exchanges
            step = micro_batches * 0.006
            found = program.predict(measured, ranks, 1e6, 0.001, micro_batches, 6)
            assert found == pytest.approx(ranks * step / (step + exposed))
    for row in table:
        row["seconds"] /= 1000
    assert program.predict(measured, 16, 100e6, 4, 1, 0) == pytest.approx(16, rel=0.01)


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
