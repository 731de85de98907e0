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
QUICK = [*ENVIRONMENT, *program.RANK_CHECKS, "end of the ranks"]
FULL = [*ENVIRONMENT, *program.FULL_RANK_CHECKS, "speed-up", "end of the ranks", "failing rank"]


def run(*options, program=ROOT / "test_ddp_setup.py", **environment):
    """(exit status, output, {check: (status, what was found)})"""
    status, output = call_program(program, *options, **environment)
    return status, output, parse(output)


def parse(output):
    found = {}
    for line in output.splitlines():
        match = LINE.fullmatch(line)
        if match:
            found[match[2]] = (match[1], match[3])
    return found


def test_two_processes(tmp_path):
    """Everything, on a sound machine: the checks, the tables, --json; nothing stays behind."""
    path = tmp_path / "out.json"
    status, output, checks = run(f"--json={path}", "--nproc_per_node=2", TMPDIR=str(tmp_path))
    assert status == 0, output
    assert list(checks) == FULL
    for name in [*program.FULL_RANK_CHECKS, "end of the ranks", "failing rank"]:
        assert checks[name][0] == "OK", output
    assert not list(tmp_path.glob("ddp-check-*"))

    written = json.loads(path.read_text())
    assert [check["name"] for check in written["checks"]] == FULL
    measured = written["measured"]
    assert measured["ranks"] == 2
    assert [row["bytes"] for row in measured["all_reduce"]] == program.MESSAGES
    assert measured["training"]["exchanging"] > 0
    table = output.split("Predicted speed-up")[1].splitlines()
    rows = [line.split() for line in table[2 : 2 + len(program.RANKS)]]
    assert [int(row[0]) for row in rows] == program.RANKS
    for row in rows:
        assert len(row) == 1 + len(program.WORKLOADS)
        assert all(0 < float(speed_up) <= int(row[0]) for speed_up in row[1:])


def test_one_process(tmp_path):
    """As on a machine with one GPU: nothing to exchange, and so nothing to predict."""
    path = tmp_path / "out.json"
    status, output, checks = run(f"--json={path}", "--nproc_per_node=1")
    assert status == 0, output
    assert list(checks) == [*ENVIRONMENT, *program.FULL_RANK_CHECKS, "end of the ranks"]
    assert json.loads(path.read_text())["measured"]["all_reduce"] == []
    assert "--nproc_per_node 2 or more" in output


def test_backend_that_is_not_there():
    status, output, checks = run("--backend=nccl")
    assert status == 1
    assert list(checks) == ENVIRONMENT  # no rank was started
    assert checks["backend"][0] == "FAIL"
    assert "--backend gloo" in checks["backend"][1]


def test_port_that_is_taken_and_full_disk(tmp_path):
    with socket.socket() as server, on_small_disk(tmp_path, 8 << 20):
        server.bind(("", 0))
        server.listen()
        port = str(server.getsockname()[1])
        options = ["--quick", f"--output_dir={tmp_path}"]
        status, output, checks = run(*options, MASTER_PORT=port)
        assert list(tmp_path.iterdir()) == []
    assert status == 1
    assert list(checks) == QUICK
    failed = [name for name, (state, _) in checks.items() if state == "FAIL"]
    assert failed == ["port", "disk"], output
    assert port in checks["port"][1]
    assert f"export MASTER_PORT={port}" not in checks["port"][1]  # another one is proposed


def test_under_a_launcher(server):
    """Two ranks with Slurm's variables: rank 0 speaks."""
    common = {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    common.update(SLURM_NTASKS=2, SLURM_STEP_ID=0)
    variables = [{**common, "SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in (0, 1)]
    server.start(variables, [str(ROOT / "test_ddp_setup.py"), "--quick"])
    assert server.wait() == [0, 0], server.text
    outputs = [path.read_text() for path in server.outputs]
    expected = [name for name in ENVIRONMENT if name != "port"]
    assert list(parse(outputs[0])) == [*expected, *program.RANK_CHECKS]
    assert parse(outputs[1]) == {}


def test_ranks_that_do_not_come():
    alone = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
    options = ["--quick", "--timeout_minutes=0.05"]
    status, output, checks = run(*options, **alone, MASTER_PORT=str(free_port()))
    assert status == 1
    assert checks["process group"][0] == "FAIL", output
    assert "firewall" in checks["process group"][1]


def test_a_rank_that_dies(tmp_path):
    """The last lines of the ranks are shown."""
    text = (ROOT / "test_ddp_setup.py").read_text()
    broken = tmp_path / "test_ddp_setup.py"
    broken.write_text(text.replace("    large = torch", "    os._exit(3)\n    large = torch"))
    status, output, checks = run("--quick", program=broken)
    assert status == 1
    assert checks["end of the ranks"][0] == "FAIL"
    assert "after the check 'process group'" in output
    assert "exitcode" in output  # torchrun's summary


def test_wrong_options(tmp_path):
    for option, words in {"--nproc=2": "no option nproc", "--nproc_per_node=-1": "below 0"}.items():
        status, output, checks = run(option)
        assert status == 2
        assert len(output.splitlines()) == 1
        assert words in output


# --------------------------------------------------------------------------------------------------
# Each check must fail once its feature is broken.


def add_noise_of_rank(guard, optimizer, scaler):
    """In place of an update."""
    torch.manual_seed(program.dist.get_rank())
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.data.add_(torch.randn_like(parameter))


BROKEN = {  # what is broken: (check, owner of the feature, its name, what takes its place)
    "gradients are not averaged": ("DDP step", program, "wrap_ddp", lambda model, *_: model),
    "ranks go apart": ("DDP step", program.StepGuard, "update", add_noise_of_rank),
    "no update": ("DDP step", program.StepGuard, "update", lambda *_: None),
    "all_reduce does nothing": ("sums", program.dist, "all_reduce", lambda values: None),
    "sum_over_ranks does nothing": ("sums", program, "sum_over_ranks", lambda x: x.tolist()),
    "products are rounded": ("precision", program, "choose_precision", lambda *_: torch.bfloat16),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_check_fails(what, tmp_path):
    port = str(free_port())
    ranks = []
    for rank in ("0", "1"):
        environment = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "MASTER_PORT": port}
        ranks.append(forkserver().Process(target=judge, args=(what, environment, tmp_path / rank)))
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    whole = []
    broken = []
    for rank in ("0", "1"):
        statuses = json.loads((tmp_path / rank).read_text())
        whole.append(statuses[0])
        broken.append(statuses[1])
    assert whole == ["OK", "OK"]
    assert "FAIL" in broken


def judge(what, environment, path):
    """In a rank: the statuses of a check as it is, and with the feature broken."""
    os.environ.update(environment)
    sys.argv = ["test_ddp_setup.py", "--quick", "--device=cpu"]
    args = program.parse_args()
    device = program.setup_ddp(args)
    name, owner, feature, replacement = BROKEN[what]
    check = program.FULL_RANK_CHECKS[name]
    statuses = [check(args, device)[0]]
    program.dist.barrier()
    with mock.patch.object(owner, feature, replacement):
        statuses.append(check(args, device)[0])
    program.dist.barrier()
    path.write_text(json.dumps(statuses))
    program.cleanup()


def test_prediction():
    """Against the formula by hand. One bucket has nothing to hide behind; many hide well."""
    table = [{"bytes": size, "seconds": size / 1e9} for size in (2**10, 2**20, 2**30)]
    measured = {"ranks": 2, "device": "cuda", "tflop_per_s": {"bf16": 100}, "all_reduce": table}
    one_bucket = program.Workload(1e6, 0.001, 1, 6)
    for ranks in program.RANKS:
        exposed = 2 * (ranks - 1) / ranks * 4e6 / 1e9
        expected = ranks * 0.006 / (0.006 + exposed)
        assert program.predict(measured, one_bucket, ranks) == pytest.approx(expected)
        four = program.Workload(1e6, 0.001, 4, 6)  # micro-batches, of which the last one exchanges
        expected = ranks * 0.024 / (0.024 + exposed)
        assert program.predict(measured, four, ranks) == pytest.approx(expected)
    fast = [{**row, "seconds": row["seconds"] / 1e3} for row in table]
    many = program.Workload(100e6, 4, 1, 0)
    speed_up = program.predict({**measured, "all_reduce": fast}, many, 16)
    assert speed_up == pytest.approx(16, rel=0.01)


def test_workloads_are_those_of_the_scripts():
    """The number of parameters, for the scripts whose network needs no download."""
    import run_dpo_ddp
    import run_train_uniref50_ddp as uniref50

    with mock.patch.object(sys, "argv", ["script"]), torch.device("meta"):
        args = uniref50.parse_args()
        networks = {"dpo": run_dpo_ddp.ProteinMPNN(), "uniref50": uniref50.Denoiser(args)}
    assert args.accum == program.WORKLOADS["uniref50"].micro_batches
    for name, network in networks.items():
        count = sum(p.numel() for p in network.parameters())
        assert count == pytest.approx(program.WORKLOADS[name].parameters, rel=0.05)
