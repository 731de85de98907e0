"""What would fail, or wait, on an accelerator is found without one.

On the meta device a tensor that was made elsewhere, an .item() and a test of a tensor's value are
errors. A real run on the CPU counts what an accelerator would make the host wait for.

    python tests/test_accelerator.py SCRIPT OUT OPTION ...    such a run, counted into the file OUT
"""

import contextlib
import copy
import importlib
import itertools
import json
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import ROOT, call_program, parse_arguments
from runs import COMMON, TINY
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

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
        self.on_device = set()  # addresses of weights, as if they were not on the CPU

    def note(self, what):
        functions = []
        frame = sys._getframe()
        while frame is not None:
            if "torch/utils/data/" in frame.f_code.co_filename:  # the loader draws a seed: host's
                return
            if frame.f_code.co_filename == self.file:
                functions.append(frame.f_code.co_name)
            frame = frame.f_back
        # what is not part of every step may wait: the start, checkpoints, validation; and what is
        # no tensor travels on the CPU
        allowed = {"wrap_ddp", "evaluate", "measure", "save_checkpoint", "gather"}
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
        if name in ("numpy", "__array__") and args[0].data_ptr() in self.reads.on_device:
            raise TypeError("a GPU's tensor has no numpy(): cpu() must come first")
        if name == "cpu":
            return function(*args, **kwargs).clone()  # at another address, as from a GPU
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            self.reads.note("repeat_interleave without output_size")
        return function(*args, **kwargs)


def count_reads(script):
    """Run main() of a script, and count what train() reads, in a world of one."""
    reads = Reads(script)
    train = script.train

    def counted_train(*args):  # called for each phase
        for module in args:
            if isinstance(module, torch.nn.Module):
                reads.on_device |= {tensor.data_ptr() for tensor in module.state_dict().values()}
        with reads.counted():
            return train(*args)

    script.train = counted_train
    clock = itertools.count()  # no meeting because of the time: of the first step, and of lines
    functions = {**vars(time), "monotonic": lambda: next(clock) / 1e6}
    script.time = SimpleNamespace(**functions)
    args = script.parse_args()
    if args.compile:
        script.train = train  # the counters would switch the compiler off
        compile_twice(script)
    script.main(args)
    script.cleanup()
    reads.found["graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return +reads.found  # without what is 0


def compile_twice(script):
    """The first two steps compile, with a backend that needs no compiler; later ones may not."""
    compile_module = torch.nn.Module.compile
    update = script.update_if_finite
    made = []

    def compile_quickly(module, **more):
        compile_module(module, backend="aot_eager", **more)

    def count_steps(*args):
        made.append(1)
        if len(made) == 2:
            torch.compiler.set_stance("fail_on_recompile")
        if len(made) == 7:  # the evaluation without gradients has a program of its own
            torch.compiler.set_stance("default")
        return update(*args)

    torch.nn.Module.compile = compile_quickly
    script.update_if_finite = count_steps


# --------------------------------------------------------------------------------------------------
# How a step of a script is made: (model, batch, loss function)


def quantumgrav(script, args):
    data = script.CausalSets(script.prepare(args), args)
    batch = data[0, data.part("train")[:8], np.arange(8)]
    return script.CausalSetNet(args, data.classes), batch, script.share_of_loss


def dpo(script, args):
    """Both networks, of which one is trained, as one module."""
    data = script.Pairs(script.prepare(args, neighbours=48), args)

    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = script.ProteinMPNN()
            self.reference = copy.deepcopy(self.model).requires_grad_(False)

        def forward(self, batch):
            return self.model(*batch[:5]), self.reference(*batch[:5])

    def loss(logits, batch):
        return script.share_of_loss(args, *logits, batch)[0]

    ids = np.arange(8)
    return Step(), data[0, ids, ids], loss


def uniref50(script, args):
    proteins = script.Proteins(script.prepare(args), args)
    data = script.NoisyProteins(proteins, args.seed)
    batch = data[0, proteins.train[:6], np.arange(6)]
    return script.Denoiser(args), batch, script.share_of_loss


def rebm(script, args):
    """The passes of a step of stage 2, with attacks of two steps, as one module."""
    indist = script.Images(script.prepare(args, args.data))
    outdist = script.Images(script.prepare(args, "blobs", indist))
    data = script.TrainingData(args, indist, outdist, "dat")

    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = script.make_network(args, 10, *indist.shape)
            self.twin = copy.deepcopy(self.model).requires_grad_(False).eval()

        def forward(self, batch):
            sums, scores = script.sums_of_losses(args, self.model, self.twin, batch, 2)
            script.auc(*scores)
            return sums.sum()

    return Step(), data[0, indist.part(script.TRAIN), np.arange(8)], lambda loss, batch: loss


# options of each (test_train_ddp.py has the step of train_ddp)
STEPS = {
    quantumgrav: ["", "--messages=sum --dropout=0.1", "--messages=none"],
    dpo: ["", "--loss_type=ipo --sft_weight=0.1 --temperature=1"],
    uniref50: ["", "--gradient_checkpointing"],
    rebm: [
        "",
        "--model_type=WideResNet28x2 --augm_type_classification=original",
        "--indist_attack_clf_norm=Linf --indist_attack_clf_eps=0.1",
    ],
}
# Options of a run of few steps; how often ranks meet in it: after step 1, and at log lines.
LARGE = "--batch_size=72 --global_batch_size=72"
SHORT_RUNS = {
    "train_ddp": ("--max_steps=3 --log_every=3 --max_samples_phase2=120", 4),  # two phases
    "run_train_quantumgrav_ddp": ("--num_epochs=1 --log_every=3", 4),
    "run_dpo_ddp": ("--num_epochs=1 --log_every=5", 3),
    "run_train_uniref50_ddp": ("--n_iters=7 --log_every=3 --dropout=0.1", 4),
    "run_train_rebm_ddp": (f"--total_epochs=1 --log_every=3 {LARGE}", 6),
}


def count_tensors(batch):
    """In a batch, and in the batches that are part of it."""
    if isinstance(batch, torch.Tensor):
        return 1
    return sum(map(count_tensors, batch)) if isinstance(batch, tuple) else 0


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
    args = SimpleNamespace(max_minutes=0, max_grad_norm=1.0)
    norm = script.update_if_finite(args, optimizer)
    meter = script.Meter(["loss"], args, META)
    meter.add(loss.detach().reshape(1), norm)
    assert meter.sums.device == META
    assert loss.device == norm.device == meter.bad_in_row.device == META
    return copies.found


def count_in_program(name, folder, *more):
    """What count_reads() finds in a run of a script."""
    out = folder / "reads.json"
    options = [*COMMON, *TINY[name](folder), "--save_every=100", *SHORT_RUNS[name][0].split()]
    options += [*more, f"--output_dir={folder}/run"]
    call_program(__file__, ROOT / f"{name}.py", out, *options)
    return json.loads(out.read_text())


@pytest.mark.parametrize("make_step", STEPS)
def test_a_step_on_the_meta_device(make_step, tmp_path, monkeypatch):
    (name,) = [name for name in TINY if make_step.__name__ in name]
    script = importlib.import_module(name)
    files = TINY[name](tmp_path)
    # it knows no such device
    monkeypatch.setattr(torch, "autocast", lambda *args, **options: contextlib.nullcontext())
    for options in STEPS[make_step]:
        args = parse_arguments(script, *files, *options.split())
        model, batch, loss_function = make_step(script, args)
        copies = step_on_meta(script, model.train(), batch, loss_function)
        assert copies == {True: count_tensors(batch)}, "the host waits for a copy"


@pytest.mark.parametrize("name", TINY)
def test_steps_read_nothing(name, tmp_path):
    """Only a Meter does, where the ranks meet: its sums, and whether too many steps are bad."""
    found = count_in_program(name, tmp_path)
    expected = {}
    if name == "run_train_rebm_ddp":  # the AUC in each step of stage 2
        expected = {"train: item": 5, "train: _local_scalar_dense": 5}
    times = SHORT_RUNS[name][1]
    # whether steps are bad is asked at a log line; train_ddp has two phases
    lines = times - (2 if name == "train_ddp" else 1)
    expected["log_and_agree: tolist"] = times
    expected["log_and_agree: __bool__"] = lines
    expected["log_and_agree: _local_scalar_dense"] = lines
    assert found == expected


def test_compiled_steps_of_uniref50(tmp_path):
    """Each step has other numbers of tokens, and all use the programs of the first two."""
    found = count_in_program("run_train_uniref50_ddp", tmp_path, "--compile")
    assert found["graphs"] > 0


BAD_STEPS = {
    "item": lambda x, mask: x.sum().item(),
    "numpy": lambda x, mask: x.detach().numpy(),
    "if": lambda x, mask: bool((x > 0).all()),
    "mask": lambda x, mask: x[mask],
    "masked write": lambda x, mask: x.detach().index_put_([mask], torch.zeros(())),
    "repeat": lambda x, mask: x.repeat_interleave(torch.ones(4, dtype=torch.int64)),
    # what is below Python: it reads the norm
    "clip": lambda x, mask: torch.nn.utils.clip_grad_norm_([x], 1.0, error_if_nonfinite=True),
}
GOOD_STEPS = {
    "where": lambda x, mask: torch.where(mask, x, 0.0).sum().backward(),
    "select": lambda x, mask: x.index_select(0, torch.tensor([1, 2])),
    "numbers": lambda x, mask: x[np.array([1, 2])],
    "norm": lambda x, mask: torch.nn.utils.clip_grad_norm_([x], 1.0),
}


@pytest.mark.parametrize("name", [*BAD_STEPS, *GOOD_STEPS])
def test_the_counter_counts(name):
    x = torch.ones(4, requires_grad=True)
    x.sum().backward()
    reads = Reads(SimpleNamespace(__file__=__file__))
    with reads.counted():
        {**BAD_STEPS, **GOOD_STEPS}[name](x, torch.tensor([True, False, True, True]))
    assert bool(reads.found) == (name in BAD_STEPS)


def test_a_weight_that_becomes_numpy_without_a_copy():
    x = torch.ones(4)
    reads = Reads(SimpleNamespace(__file__=__file__))
    reads.on_device = {x.data_ptr()}
    with reads.counted():
        x.cpu().numpy()
        with pytest.raises(TypeError, match=r"cpu\(\) must come first"):
            x.numpy()


if __name__ == "__main__":
    program, out, *sys.argv[1:] = sys.argv[1:]
    sys.path.insert(0, str(Path(program).parent))
    reads = count_reads(importlib.import_module(Path(program).stem))
    Path(out).write_text(json.dumps(reads))
