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
from helpers import (
    ROOT,
    call_program,
    parse_arguments,
    write_causal_sets,
    write_structures,
)
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
        allowed = {"restore", "wrap_ddp", "save", "validate", "evaluate", "measure"}
        allowed |= {"save_checkpoint", "gather"}
        allowed |= {"find_reference", "save_network", "start_stage"}
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

    def counted_train(*args):  # may be called once for each phase
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
# Scripts


def quantumgrav(script, folder, options):
    """(model, batch, loss function)"""
    files = [f"--data={folder}.npz", f"--cache_dir={folder}.cache"]
    args = parse_arguments(script, *files, "--tasks", "cls", "dim", *options)
    data = script.CausalSets(script.prepare(args), args)
    batch = data[0, data.part("train")[:8], np.arange(8)]
    return script.CausalSetNet(args, data.classes), batch, script.share_of_loss


def dpo(script, folder, options):
    """The same: the network takes the parts of a batch."""
    files = [f"--train_data={folder}/pairs.json", f"--cache_dir={folder}/cache"]
    args = parse_arguments(script, *files, *options)
    data = script.Pairs(script.prepare(args, neighbours=48), args)
    model = script.ProteinMPNN()

    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, batch):
            return model(*batch.inputs())

    def loss(logits, batch):
        return script.share_of_loss(args, logits, batch)[0]

    ids = np.arange(8)
    return Step(), data[0, ids, ids], loss


def make_structures(folder):
    folder.mkdir()
    write_structures(folder, 4, pairs=7, least=8, most=20)


def uniref50(script, folder, options):
    small = "--hidden_size=32 --n_blocks_prot=2 --n_heads=2 --cond_dim=8 --max_protein_len=48"
    args = parse_arguments(script, *small.split(), *options)
    args.datafile = str(folder.with_suffix(".txt"))
    args.val_ratio = 0.2
    args.cache_dir = f"{folder}.cache"
    proteins = script.Proteins(script.prepare(args), "train", args.max_protein_len)
    data = script.NoisyProteins(proteins, args.seed)
    ids = np.arange(6)
    return script.Denoiser(args), data[0, ids, ids], script.share_of_loss


def make_proteins(folder):
    lines = []
    for i in range(150):
        lines.append("MKVLAYDEFGHIKLMNPQRSTVWY"[i % 7 :] * (1 + i % 4))
    texts = folder.with_suffix(".txt")
    texts.write_text("\n".join(lines))


def rebm(script, folder, options):
    """The passes of a step of stage 2, with attacks of two steps, as one module."""
    args = parse_arguments(script, "--width=4", f"--cache_dir={folder}.cache", *options)
    inside = script.prepare(args, f"{folder}.npz")
    outside = script.Images(script.prepare(args, "blobs", inside))
    inside = script.Images(inside)
    data = script.TrainingData(args, inside, outside, "dat")

    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = script.make_network(args, 10, *inside.shape)
            self.twin = copy.deepcopy(self.model).requires_grad_(False).eval()

        def forward(self, batch):
            losses = []

            def backward(values):
                losses.append(values.sum())
                return losses[-1].detach()

            on_outside = script.Attack(self.twin, script.label_logit, 0.1, 1.0)
            nets = SimpleNamespace(ddp_model=self.model)
            _, scores = script.real_or_fake_step(nets, on_outside, batch, 2, backward)
            script.pairs_in_order(*scores)
            on_class = script.Attack(self.twin, script.cross_entropy, 0.1, 0.5, "Linf")
            x = on_class(script.pixels(batch.x), batch.y, 2)
            backward(script.cross_entropy(self.model(x), batch.y))
            return sum(losses)

    return Step(), data[0, inside.part("train"), np.arange(8)], lambda loss, batch: loss


def make_images(folder):
    images = np.random.default_rng(0).integers(0, 56, (100, 32, 32, 3), np.uint8)
    labels = np.arange(100) % 2
    images[labels == 1, 16:] += 200  # something to learn in seven steps
    parts = {"x_train": images[:62], "y_train": labels[:62]}
    parts.update(x_test=images[62:], y_test=labels[62:])
    np.savez(f"{folder}.npz", **parts)


def make_causal_sets(folder):
    write_causal_sets(f"{folder}.npz", "--samples=60", "--min_size=6", "--max_size=10")


def make_pairs(folder):
    folder.mkdir()
    rows = []
    for i in range(60):
        rows.append({"query": f"what is number {i}", "positive": f"number {i} is {i} times one"})
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))


MAKE_DATA = {
    "train_ddp": make_pairs,
    "run_train_quantumgrav_ddp": make_causal_sets,
    "run_dpo_ddp": make_structures,
    "run_train_uniref50_ddp": make_proteins,
    "run_train_rebm_ddp": make_images,
}
# how a step is made, and the options of each (test_train_ddp.py has that of train_ddp)
STEPS = {
    "run_train_quantumgrav_ddp": (
        quantumgrav,
        ["", "--messages=sum --dropout=0.1", "--messages=none --hidden_dim=16"],
    ),
    "run_dpo_ddp": (
        dpo,
        ["", "--loss_type=ipo --sft_weight=0.1", "--label_smoothing=0.1 --temperature=1"],
    ),
    "run_train_uniref50_ddp": (
        uniref50,
        ["", "--gradient_checkpointing"],
    ),
    "run_train_rebm_ddp": (
        rebm,
        [
            "",
            "--model_type=WideResNet28x2 --augm_type_generation=original",
            "--norm=layer --augm_type_classification=original",
        ],
    ),
}
# options of a run of seven steps; of train_ddp: three of each phase
SEVEN_STEPS = {
    "train_ddp": """--phase1_data={0}/rows.jsonl --phase2_data={0}/rows.jsonl --cache_dir={0}/cache
        --teacher_model=builtin:lsa:8 --student_model=builtin:bert:1x32 --projection_hidden=16
        --batch_size=4 --global_batch_size=8 --max_steps=3 --eval_samples=4""",
    "run_train_quantumgrav_ddp": """--data={0}.npz --cache_dir={0}.cache --num_epochs=1
        --batch_size=6""",
    "run_dpo_ddp": """--train_data={0}/pairs.json --cache_dir={0}/cache --base_model_name=random
        --val_fraction=0.25 --num_epochs=1 --batch_size=3""",
    "run_train_uniref50_ddp": """--datafile={0}.txt --cache_dir={0}.cache --val_ratio=0.2
        --n_iters=7 --batch_size=3 --accum=2 --hidden_size=32 --n_blocks_prot=2 --n_heads=2
        --cond_dim=8 --max_protein_len=48 --dropout=0.1""",
    "run_train_rebm_ddp": """--data={0}.npz --cache_dir={0}.cache --at_epochs=1 --total_epochs=1
        --batch_size=8 --AUC_th=0 --at_lr=1e-2 --attack_max_steps=2 --min_imgs_per_threshold=16
        --width=4 --n_imgs_per_evaluation_log=0""",
}
# What is read in it: only what a Meter reads where the ranks meet, after step 1, and at the three
# log lines; of train_ddp after step 1 and 3 of each phase.
MEETINGS = {
    "meet: tolist": 4,
    "meet: __bool__": 4,  # are too many steps bad?
    "meet: _local_scalar_dense": 4,  # of the same
}
READS = {
    "run_train_quantumgrav_ddp": MEETINGS,
    "train_ddp": MEETINGS,
    "run_train_uniref50_ddp": MEETINGS,
    "run_dpo_ddp": MEETINGS,
    "run_train_rebm_ddp": {
        **{name: 2 * count for name, count in MEETINGS.items()},
        "state: tolist": 2,  # T grows twice, after each two steps
    },
}


@pytest.fixture(scope="module", params=MAKE_DATA)
def prepared(request, tmp_path_factory):
    """(script's name, folder of its data)"""
    folder = tmp_path_factory.mktemp(request.param) / "data"
    MAKE_DATA[request.param](folder)
    return request.param, folder


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
    scaler = torch.amp.GradScaler("cuda", enabled=False)
    kept = [buffer.clone() for buffer in model.buffers()]
    norm = script.update_if_finite(args, model, kept, optimizer, scaler)
    meter = script.Meter(["loss"], args, META)
    meter.add(loss.detach().reshape(1), norm)
    assert meter.sums.device == META
    assert loss.device == norm.device == meter.bad_in_row.device == META
    return copies.found


def count_in_program(name, folder, tmp_path, *more):
    """What count_reads() finds in a run of a script."""
    out = tmp_path / "reads.json"
    options = [*SEVEN_STEPS[name].format(folder).split(), *more]
    options += ["--log_every=3", f"--output_dir={tmp_path}/run", "--device=cpu"]
    status, text = call_program(__file__, ROOT / f"{name}.py", out, *options)
    assert status == 0, text
    return json.loads(out.read_text())


def test_a_step_on_the_meta_device(prepared, monkeypatch):
    name, folder = prepared
    if name not in STEPS:
        pytest.skip("in another file")
    script = importlib.import_module(name)
    make_step, cases = STEPS[name]
    # it knows no such device
    monkeypatch.setattr(torch, "autocast", lambda *args, **options: contextlib.nullcontext())
    for options in cases:
        model, batch, loss_function = make_step(script, folder, options.split())
        copies = step_on_meta(script, model.train(), batch, loss_function)
        assert copies == {True: count_tensors(batch)}, "the host waits for a copy"


def test_steps_read_nothing(prepared, tmp_path):
    """Seven steps, logged at 3, 6 and 7."""
    name, folder = prepared
    found = count_in_program(name, folder, tmp_path)
    assert found == READS[name]


def test_compiled_steps_of_uniref50(tmp_path):
    """Each step has other numbers of tokens, and all use the programs of the first two."""
    make_proteins(tmp_path / "data")
    name = "run_train_uniref50_ddp"
    found = count_in_program(name, tmp_path / "data", tmp_path, "--compile")
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


def test_the_counter_counts():
    x = torch.ones(4, requires_grad=True)
    x.sum().backward()
    mask = torch.tensor([True, False, True, True])
    for name, step in BAD_STEPS.items():
        reads = Reads(SimpleNamespace(__file__=__file__))
        with reads.counted():
            step(x, mask)
        assert sum(reads.found.values()) > 0, name

    reads = Reads(SimpleNamespace(__file__=__file__))
    reads.on_device = {x.data_ptr()}
    with reads.counted():
        x.detach().cpu().numpy()
        with pytest.raises(TypeError, match=r"cpu\(\) must come first"):
            x.detach().numpy()

    reads = Reads(SimpleNamespace(__file__=__file__))
    with reads.counted():
        torch.where(mask, x, 0.0).sum().backward()
        x.index_select(0, torch.tensor([1, 2]))
        x[np.array([1, 2])]
        torch.nn.utils.clip_grad_norm_([x], 1.0)
    assert not reads.found


if __name__ == "__main__":
    program, out, *sys.argv[1:] = sys.argv[1:]
    sys.path.insert(0, str(Path(program).parent))
    reads = count_reads(importlib.import_module(Path(program).stem))
    Path(out).write_text(json.dumps(reads))
