"""What would fail, or wait, on an accelerator is found without one. On the meta device a tensor
made elsewhere and a test of a value are errors; a run on the CPU counts what would wait."""

import contextlib
import copy
import functools
import importlib
import itertools
import time
import traceback
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import parse_arguments, run_here
from runs import COMMON, TINY
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import run_train_quantumgrav_ddp as script

META = torch.device("meta")


class Copies(TorchDispatchMode):
    """Counts copies to another device, by whether the host goes on meanwhile."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function.overloadpacket is torch.ops.aten._to_copy and "device" in kwargs:
            self.found[bool(kwargs.get("non_blocking"))] += 1
        return function(*args, **kwargs)


# How a step of a script is made: (model, batch, its loss)


def quantumgrav(script, args):
    data = script.CausalSets(script.prepare(args), args)
    batch = data.make_batch(data.part("train")[:8], data.part("train")[:8])
    model = script.CausalSetNet(args, data.classes)
    return model, batch, lambda model, batch: script.batch_loss(model(batch), batch)


def dpo(script, args):
    data = script.Pairs(script.prepare(args, k=48), args)
    model = script.ProteinMPNN()
    reference = copy.deepcopy(model).requires_grad_(False)

    def loss(models, batch):
        logits, reference_logits = [model(batch) for model in models]
        reference_logp = script.log_probabilities(reference_logits, batch.letters)
        return script.batch_loss(args, logits, reference_logp, batch)[0]

    return torch.nn.ModuleList([model, reference]), data[0, np.arange(8), np.arange(8)], loss


def uniref50(script, args):
    proteins = script.Proteins(script.prepare(args), args)
    batch = script.NoisyProteins(args, proteins)[0, proteins.train[:6], np.arange(6)]
    model = script.Denoiser(args)
    return model, batch, lambda model, batch: script.batch_loss(model(batch), batch)


def rebm(script, args):
    """A step of stage 2, with attacks of two steps."""
    indist = script.Images(script.prepare(args, args.data))
    outdist = script.Images(script.prepare(args, "blobs", indist))
    data = script.TrainingData(args, indist, outdist, "dat")
    batch = data[0, indist.part(script.TRAIN), np.arange(8)]
    model = script.make_network(args, 10, *indist.shape)
    frozen = copy.deepcopy(model).requires_grad_(False)

    def loss(models, batch):
        model, frozen = models
        networks = script.Networks(model, model, frozen, model)
        sums, scores = script.batch_losses(args, networks, batch, 2)
        script.auc(*scores)
        return sums.sum()

    return torch.nn.ModuleList([model, frozen]), batch, loss


# options of each (test_train_ddp.py has the step of train_ddp)
STEPS = {
    quantumgrav: ["", "--messages=sum --dropout=0.1", "--messages=none"],
    dpo: ["", "--loss_type=ipo --sft_weight=0.1 --temperature=1"],
    uniref50: ["", "--gradient_checkpointing"],
    rebm: [
        "--augm_type_classification=original",
        "--model_type=WideResNet28x2 --indist_attack_clf_norm=Linf --indist_attack_clf_eps=0.1",
    ],
}


@pytest.mark.parametrize("make_step", STEPS)
def test_a_step_on_the_meta_device(make_step, tmp_path, monkeypatch):
    """Forward, backward, clip, update and meter; without autocast, which does not know it."""
    (name,) = [name for name in TINY if make_step.__name__ in name]
    script = importlib.import_module(name)
    files = TINY[name](tmp_path)
    monkeypatch.setattr(torch, "autocast", lambda *args, **options: contextlib.nullcontext())
    for options in STEPS[make_step]:
        args = parse_arguments(script, *files, *options.split())
        model, batch, loss_function = make_step(script, args)
        copies = Copies()
        with copies:
            on_meta = batch.to(META)
        assert set(copies.found) == {True}, "the host waits for a copy"
        tensors = [leaf for leaf in tree_leaves(on_meta) if isinstance(leaf, torch.Tensor)]
        model.to(META).train()
        loss = loss_function(model, on_meta)
        loss.backward()
        # fused optimizers do not know this device: one that does nothing stands for them
        groups = [{"params": list(model.parameters())}]
        optimizer = mock.Mock(defaults={"fused": True}, param_groups=groups)
        norm = script.update_if_finite(args, optimizer)
        meter = script.Meter(["loss"], args, META)
        meter.add(loss.detach().reshape(1), norm)
        for tensor in (*tensors, loss, norm, meter.sums, meter.bad_in_row):
            assert tensor.device == META


class Operations(TorchDispatchMode):
    """Notes those for which the host waits, and those that do not give the same bits each time."""

    WAIT = {"_local_scalar_dense", "nonzero", "masked_select", "masked_scatter_backward"}
    WAIT |= {"_unique2", "unique_dim", "equal", "is_nonzero"}

    # for which torch.use_deterministic_algorithms is an error on a GPU (of its documentation)
    DIFFER = """_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward avg_pool3d_backward
        adaptive_max_pool2d_backward fractional_max_pool2d_backward max_pool3d_with_indices_backward
        max_unpool2d max_unpool3d upsample_linear1d_backward upsample_bilinear2d_backward
        upsample_bicubic2d_backward upsample_trilinear3d_backward reflection_pad1d_backward
        reflection_pad2d_backward reflection_pad3d_backward replication_pad1d_backward
        replication_pad2d_backward replication_pad3d_backward nll_loss2d _ctc_loss_backward
        grid_sampler_2d_backward grid_sampler_3d_backward _cdist_backward median kthvalue histc
        put_ _histogramdd_bin_edges""".split()

    def __init__(self, note):
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            # of a mask the number of rows must be read
            waits = any(index is not None and index.dtype == torch.bool for index in args[1])
        elif name == "repeat_interleave":
            waits = kwargs.get("output_size") is None
        else:
            waits = name in self.WAIT or name in self.DIFFER
        if waits:
            self.note(name)
        return function(*args, **kwargs)


@contextlib.contextmanager
def counted_reads(file, found):
    """Adds to found["function: what"] for the functions in a file."""
    # what is not part of every step may wait (the start, checkpoints, validation), and so may what
    # works on the CPU: it makes the next batch, and sends what is no tensor
    allowed = {"make_loader", "wrap_ddp", "evaluate", "measure", "save_checkpoint"}
    allowed |= {"__getitem__", "gather"}

    def note(what):
        stack = [frame.f_code for frame, _ in traceback.walk_stack(None)]
        functions = [code.co_name for code in stack if code.co_filename == file]
        if functions and not allowed & set(functions):
            found[f"{functions[0]}: {what}"] += 1

    def noted(name):
        plain = getattr(torch.Tensor, name)

        def method(*args, **options):
            note(name)
            return plain(*args, **options)

        return method

    # no operations, where a tensor is on the CPU
    methods = {name: noted(name) for name in ("tolist", "numpy", "cpu", "__array__")}
    with Operations(note), mock.patch.multiple(torch.Tensor, **methods):
        yield


# Options of a run of few steps; how often ranks meet in it: after step 1, and at log lines; at how
# many of these lines they ask whether steps are bad (each of two phases has its first step).
LARGE = "--batch_size=72 --global_batch_size=72"
SHORT_RUNS = {
    "train_ddp": ("--max_steps=3 --log_every=3 --max_samples_phase2=120", 4, 2),
    "run_train_quantumgrav_ddp": ("--num_epochs=1 --log_every=3", 4, 3),
    "run_dpo_ddp": ("--num_epochs=1 --log_every=5", 3, 2),
    "run_train_uniref50_ddp": ("--n_iters=7 --log_every=3 --dropout=0.1", 4, 3),
    "run_train_rebm_ddp": (f"--total_epochs=1 --log_every=3 {LARGE}", 6, 5),
}


def run_short(script, folder, *more):
    name = script.__name__
    options = [*COMMON, *TINY[name](folder), "--save_every=100", *SHORT_RUNS[name][0].split()]
    run_here(script, *options, "--num_workers=0", f"--output_dir={folder}/run", *more)


@pytest.mark.parametrize("name", TINY)
def test_steps_read_nothing(name, tmp_path, monkeypatch):
    """Only a Meter does, where the ranks meet. And a GPU can repeat the steps to the bit."""
    script = importlib.import_module(name)
    train = script.train
    found = Counter()

    def counted_train(*args):  # called for each phase
        with counted_reads(script.__file__, found):
            return train(*args)

    monkeypatch.setattr(script, "train", counted_train)
    clock = itertools.count()  # no meeting because of the time
    monkeypatch.setattr(script, "time", mock.Mock(wraps=time, monotonic=lambda: next(clock) / 1e6))
    run_short(script, tmp_path)
    _, meetings, lines = SHORT_RUNS[name]
    expected = {"log_and_agree: tolist": meetings, "log_and_agree: _local_scalar_dense": lines}
    if name == "run_train_rebm_ddp":  # the AUC in each step of stage 2
        expected["train: _local_scalar_dense"] = 5
        expected.update({"draw_samples: cpu": 1, "draw_samples: numpy": 1})  # an evaluation
    assert found == expected


def test_compiled_steps_of_uniref50(tmp_path, monkeypatch):
    """All use the programs of the first two. What sees a sequence's length is no part of them."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    limits = {"recompile_limit": 3, "fail_on_recompile_limit_hit": True}  # one for evaluations
    with torch._dynamo.config.patch(**limits):
        run_short(importlib.import_module("run_train_uniref50_ddp"), tmp_path, "--compile")
    breaks = torch._dynamo.utils.counters["graph_break"]
    assert any("function attend" in reason for reason in breaks)


GPUS = {  # (host, GPU, gigabytes) of the ranks; the bytes for each, without weights
    (("a", 0, 80), ("a", 1, 34)): 0.7 * 34e9,  # the same on all ranks
    (("a", 0, 80), ("a", 0, 80)): 0.7 * 40e9,  # one GPU for two ranks
    (("a", 0, 80), ("b", 0, 80)): 0.7 * 80e9,
}


@pytest.mark.parametrize("gpus", GPUS)
def test_the_memory_of_a_rank(monkeypatch, gpus):
    everyone = [(host, str(gpu), gigabytes * 10**9) for host, gpu, gigabytes in gpus]
    monkeypatch.setattr(torch, "get_device_module", mock.Mock())
    monkeypatch.setattr(script, "gather", lambda own: everyone)
    model = torch.nn.Linear(10_000, 10_000, bias=False)
    room = script.room_on_gpu(model, torch.device("cuda"))
    assert room == pytest.approx(GPUS[gpus] - 2.4e9)
    assert script.room_on_gpu(model, torch.device("cpu")) == 0


MICRO_BATCHES = [  # --batch_size, room on a GPU, how many of 4096 samples on two ranks
    (0, 0, 32),  # a CPU: 64 at a time
    (0, 1e9, 1),
    (0, 6_000, 76),
    (0, 100, 1367),  # a GPU that is too small: as little as one sample
    (16, 1e9, 128),
]


@pytest.mark.parametrize(("batch_size", "room", "expected"), MICRO_BATCHES)
def test_micro_batches_fit_a_gpu(monkeypatch, batch_size, room, expected):
    """The work of the largest micro-batch is nearly what there is room for."""
    cost = np.random.default_rng(0).permutation(np.tile(np.arange(100, 300), 50))  # mean 199.5
    args = parse_arguments(script, f"--batch_size={batch_size}", "--global_batch_size=4096")
    monkeypatch.setattr(script.dist, "get_world_size", lambda group=None: 2)
    sizes = []
    for rank in range(2):
        monkeypatch.setattr(script.dist, "get_rank", lambda group=None, rank=rank: rank)
        sampler = script.GlobalBatchSampler(np.arange(len(cost)), args, cost, room)
        assert sampler.accumulation == expected
        for _, ids, positions in itertools.islice(sampler, 2 * sampler.accumulation):
            sizes.append(cost[ids[positions]].sum())
    if room == 6_000:
        assert 0.5 * room < max(sizes) <= room
    args.global_batch_size = 1
    with pytest.raises(script.InputError, match="--global_batch_size 1: must be from 2 "):
        script.GlobalBatchSampler(np.arange(len(cost)), args, cost, room)


def test_the_log_has_the_memory_of_a_gpu(monkeypatch, group):
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda: 5 * 10**9)
    meter = script.Meter(["loss"], parse_arguments(script), torch.device("cpu"))
    rows = []
    for device in ("cpu", "cuda"):
        meter.sums = mock.Mock(device=torch.device(device), tolist=lambda: [3.0, 1.0, 1.0])
        meter.log_and_agree(mock.Mock(write=rows.append), {"step": 10}, 64)
    assert "peak_gb" not in rows[0] and rows[1]["peak_gb"] == 5


def test_dropout_is_seeded_on_the_accelerator(monkeypatch):
    """As on the CPU: by seed, step and rank."""
    seeds = []
    monkeypatch.setattr(torch, "get_device_module", lambda: mock.Mock(manual_seed=seeds.append))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    draws = []
    for step, rank in [(3, 0), (3, 1), (4, 0), (3, 0)]:
        monkeypatch.setattr(script.dist, "get_rank", lambda rank=rank: rank)
        script.seed_step(SimpleNamespace(seed=0), step)
        draws.append(torch.rand(1).item())
    for found in (seeds, draws):
        assert len(set(found)) == 3 and found[0] == found[3]


WAITS = [
    lambda x: x.sum().item(),
    lambda x: x.detach().numpy(),
    lambda x: x[x > 0],
    lambda x: x.detach().index_put_([x > 0], torch.zeros(())),
    lambda x: x.repeat_interleave(torch.ones(4, dtype=torch.int64)),
    lambda x: torch.nn.functional.adaptive_avg_pool2d(x.expand(1, 1, 4, 4), 2).sum().backward(),
    # what is below Python: it reads the norm
    lambda x: torch.nn.utils.clip_grad_norm_([x], 1.0, error_if_nonfinite=True),
]
GOES_ON = [
    lambda x: torch.where(x > 0, x, 0.0).sum().backward(),
    lambda x: x[np.array([1, 2])],
    lambda x: torch.nn.utils.clip_grad_norm_([x], 1.0),
]


@pytest.mark.parametrize("step", WAITS + GOES_ON)
def test_what_is_counted(step):
    x = torch.ones(4, requires_grad=True)
    x.sum().backward()
    found = Counter()
    with counted_reads(__file__, found):
        step(x)
    assert bool(found) == (step in WAITS)
