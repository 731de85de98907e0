"""What would fail, or wait, on an accelerator is found without one.

On the meta device a tensor that was made elsewhere, an .item() and a test of a tensor's value are
errors. A real run on the CPU counts what an accelerator would make the host wait for. One entry in
CASES for each script.

    python tests/test_accelerator.py SCRIPT OUT OPTION ...    such a run, counted into the file OUT
"""

import contextlib
import importlib
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[1]
META = torch.device("meta")


# --------------------------------------------------------------------------------------------------
# Counting


class Copies(TorchDispatchMode):
    """Counts copies to another device, by whether the host waits for them."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function.overloadpacket is torch.ops.aten._to_copy and "device" in kwargs:
            self.found[bool(kwargs.get("non_blocking"))] += 1
        return function(*args, **kwargs)


def has_mask(index):
    """Whether an index is, or holds, a tensor of booleans: its number of rows must be read."""
    parts = index if isinstance(index, (tuple, list)) else [index]
    return any(getattr(part, "dtype", None) is torch.bool for part in parts)


class Reads:
    """Where the host read a tensor, {"function: what": times}, from two sides: the functions that
    Python calls (Python), and the operations that these end in (Operations)."""

    METHODS = {"item", "tolist", "numpy", "cpu", "nonzero", "masked_select", "unique", "equal"}
    METHODS |= {"__bool__", "__float__", "__int__", "__index__", "__array__"}
    OPERATIONS = {"_local_scalar_dense", "nonzero", "masked_select", "masked_scatter_backward"}
    OPERATIONS |= {"_unique2", "unique_dim", "equal", "is_nonzero"}

    def __init__(self, script):
        self.file = script.__file__
        self.found = Counter()

    def note(self, what):
        functions = []
        frame = sys._getframe()
        while frame is not None:
            if "torch/utils/data/" in frame.f_code.co_filename:  # the loader draws a seed: host's
                return
            if frame.f_code.co_filename == self.file:
                functions.append(frame.f_code.co_name)
            frame = frame.f_back
        # what is not part of every step may wait: the start, checkpoints, validation
        allowed = {"restore", "wrap_ddp", "save", "validate", "evaluate"}
        if functions and not allowed & set(functions):
            self.found[f"{functions[0]}: {what}"] += 1

    @contextlib.contextmanager
    def counted(self):
        with Operations(self), Python(self):
            yield


class Operations(TorchDispatchMode):
    def __init__(self, reads):
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in Reads.OPERATIONS:
            self.reads.note(name)
        if name in ("index", "index_put", "index_put_", "_index_put_impl_") and has_mask(args[1]):
            self.reads.note(f"{name} by booleans")
        return function(*args, **(kwargs or {}))


class Python(TorchFunctionMode):
    def __init__(self, reads):
        super().__init__()
        self.reads = reads

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in Reads.METHODS:
            self.reads.note(name)
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            self.reads.note("repeat_interleave without output_size")
        return function(*args, **kwargs)


def count_reads(script):
    """Run main() of a script, and count what train() reads, in a world of one."""
    reads = Reads(script)
    train = script.train

    def counted_train(*args):  # may be called once for each phase
        with reads.counted():
            return train(*args)

    script.train = counted_train
    try:
        script.main(script.parse_args())
    finally:
        script.cleanup()
    return reads.found


# --------------------------------------------------------------------------------------------------
# Scripts


def quantumgrav(script, folder, options):
    """(model, batch, loss function)"""
    with mock.patch.object(sys, "argv", ["script", "--tasks", "cls", "dim", *options]):
        args = script.parse_args()
    data = script.CausalSets(folder, args.tasks, args.features)
    ids = data.part("train")[:8]
    return script.CausalSetNet(args, data.classes), data[ids, ids], script.share_of_loss


def make_causal_sets(folder):
    options = "--samples=60 --min_size=6 --max_size=10 --workers=1".split()
    program = str(ROOT / "tools" / "make_causal_sets.py")
    command = [sys.executable, program, f"--out={folder}", *options]
    subprocess.run(command, check=True, capture_output=True)


# script: how its data are made, how its step is made, the options of each case
CASES = {
    "run_train_quantumgrav_ddp": (
        make_causal_sets,
        quantumgrav,
        {
            "defaults": [],
            "gcn": ["--messages=gcn", "--dropout=0.1"],
            "sum": ["--messages=sum", "--bidirectional=no", "--skip=no"],
            "none": ["--messages=none"],
        },
    ),
}


@pytest.fixture(scope="module", params=CASES)
def prepared(request, tmp_path_factory):
    """(script's name, folder of its data)"""
    folder = tmp_path_factory.mktemp(request.param) / "data"
    CASES[request.param][0](folder)
    return request.param, folder


def step_on_meta(script, model, batch, loss_function):
    """Copy, forward, loss, backward, clip and update, with every tensor on the meta device."""
    copies = Copies()
    with copies:
        batch = batch.to(META)
    model = model.to(META)
    loss = loss_function(model(batch), batch)
    loss.backward()
    # fused optimizers do not know this device: one that does nothing stands for them
    optimizer = SimpleNamespace(
        defaults={"fused": True},
        param_groups=[{"params": list(model.parameters())}],
        step=lambda: None,
        zero_grad=lambda: None,
    )
    guard = script.StepGuard(SimpleNamespace(max_minutes=0, max_grad_norm=1.0), META)
    norm = guard.update(optimizer, torch.amp.GradScaler("cuda", enabled=False))
    assert loss.device == norm.device == guard.bad_in_row.device == META
    return copies.found


def test_a_step_on_the_meta_device(prepared):
    name, folder = prepared
    script = importlib.import_module(name)
    for options in CASES[name][2].values():
        model, batch, loss_function = CASES[name][1](script, folder, options)
        copies = step_on_meta(script, model.train(), batch, loss_function)
        assert copies == {True: len(batch)}, "the host waits for a copy"


def test_steps_read_nothing(prepared, tmp_path):
    """Seven steps, logged at 3, 6 and 7. Signals are read once a step, but one step late."""
    name, folder = prepared
    options = [f"--data={folder}", f"--output_dir={tmp_path}/run", "--num_epochs=1"]
    options += ["--batch_size=6", "--log_every=3", "--device=cpu"]
    command = [sys.executable, __file__, str(ROOT / f"{name}.py"), str(tmp_path / "reads.json")]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "reads.json").read_text())
    assert found == {"agree: tolist": 6, "sum_over_ranks: tolist": 3}


def test_steps_of_both_phases_read_nothing(tmp_path):
    """train_ddp.py: three steps of each phase, logged at 2 and 3, with two micro-batches each."""
    rows = []
    for i in range(60):
        rows.append({"query": f"what is number {i}", "positive": f"number {i} is {i} times one"})
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = f"""--phase1_data={tmp_path}/rows.jsonl --phase2_data={tmp_path}/rows.jsonl
        --teacher_model=builtin:lsa:8 --student_model=builtin:bert:1x32 --projection_hidden=16
        --batch_size=4 --global_batch_size=8 --max_steps=3 --log_every=2 --eval_samples=4
        --cache_dir={tmp_path}/cache --output_dir={tmp_path}/run --device=cpu"""
    command = [sys.executable, __file__, str(ROOT / "train_ddp.py"), str(tmp_path / "reads.json")]
    done = subprocess.run([*command, *options.split()], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "reads.json").read_text())
    assert found == {"agree: tolist": 6, "sum_over_ranks: tolist": 4}


BAD_STEPS = {
    "item": lambda x, mask: x.sum().item(),
    "float": lambda x, mask: float(x.sum()),
    "tolist": lambda x, mask: x.tolist(),
    "numpy": lambda x, mask: x.detach().numpy(),
    "if": lambda x, mask: bool((x > 0).all()),
    "mask": lambda x, mask: x[mask],
    "masked write": lambda x, mask: x.detach().index_put_([mask], torch.zeros(())),
    "nonzero": lambda x, mask: torch.nonzero(mask),
    "repeat": lambda x, mask: x.repeat_interleave(torch.ones(4, dtype=torch.int64)),
    "clip": lambda x, mask: torch.nn.utils.clip_grad_norm_([x], 1.0, error_if_nonfinite=True),
}


@pytest.mark.parametrize("case", BAD_STEPS)
def test_the_counter_counts(case):
    """Also what is below Python: clip_grad_norm_ with error_if_nonfinite reads the norm."""
    x = torch.ones(4, requires_grad=True)
    x.sum().backward()
    mask = torch.tensor([True, False, True, True])
    reads = Reads(SimpleNamespace(__file__=__file__))
    with reads.counted():
        BAD_STEPS[case](x, mask)
    assert sum(reads.found.values()) > 0
    before = reads.found.copy()
    with reads.counted():
        torch.where(mask, x, 0.0).sum().backward()
        x.index_select(0, torch.tensor([1, 2]))
        x[np.array([1, 2])]
        torch.nn.utils.clip_grad_norm_([x], 1.0)
    assert reads.found == before


if __name__ == "__main__":
    program, out, *sys.argv[1:] = sys.argv[1:]
    sys.path.insert(0, str(Path(program).parent))
    reads = count_reads(importlib.import_module(Path(program).stem))
    Path(out).write_text(json.dumps(reads))
