"""The network, the losses, the metrics and the decisions of run_train_quantumgrav_ddp.py."""

from __future__ import annotations

import importlib
import math
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import one_process, run_ranks
from torch import nn

script = importlib.import_module("run_train_quantumgrav_ddp")
CPU, TASKS = torch.device("cpu"), {"cls": 7, "dim": 3}


def arguments(folder, *options: str):
    data = "--kinds=mink2,mink3,mink4,percolation,layered,kr,destroyed --samples=42 --min_size=3 --max_size=14"
    model = "--hidden_dim=8 --head_dim=6 --num_layers=2 --active_tasks=cls,dim --num_workers=1"
    return script.parse_args([*data.split(), *model.split(), f"--cache_dir={folder}", *options])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A cache with the links and the orders of 42 sets."""
    path = tmp_path_factory.mktemp("sets")
    for graph in ("links", "order"):
        script.prepare_sets(arguments(path, f"--graph={graph}"))
    return path


def load(args) -> script.CausalSets:
    return script.CausalSets(Path(script.prepare_sets(args)), args, CPU)


def network(args, seed: int = 0, tasks: dict | None = None) -> script.CausalSetNet:
    """With norms and biases that are not what they start as."""
    torch.manual_seed(seed)
    model = script.CausalSetNet(args, tasks or TASKS, torch.float32, "cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape))
        for b in (b for b in model.buffers() if b.is_floating_point()):
            b.add_(torch.rand(b.shape))
    return model


def relabelled(batch: script.Batch, order: torch.Tensor) -> script.Batch:
    """The batch with its elements, set by set, in another order; built from the list of its edges."""
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))  # where each went
    n = len(order)
    edges = torch.zeros(n, n, dtype=torch.bool)
    edges[batch.past, torch.repeat_interleave(torch.arange(n), batch.past_ptr.diff())] = True
    edges = edges[order][:, order]
    (earlier, later), (past_of, past) = edges.nonzero().T, edges.T.nonzero().T
    pointers = [F.pad(torch.bincount(rows, minlength=n).cumsum(0), (1, 0)) for rows in (past_of, earlier)]
    assert torch.equal(batch.owner[order], batch.owner)
    found = (t.to(batch.past.dtype) for t in (pointers[0], past, pointers[1], later))
    return script.Batch(batch.features[order], batch.owner, batch.ptr, *found, batch.longest)


# ---- Messages ----------------------------------------------------------------------------------------

MODELS = {
    "mean": (), "sum": ("--gnn_layer_type=sum",), "gcn": ("--gnn_layer_type=gcn",),
    "one way": ("--bidirectional=False",), "gcn one way": ("--gnn_layer_type=gcn", "--bidirectional=False"),
    "none": ("--gnn_layer_type=none",), "order": ("--graph=order",),
    "batch": ("--normalizer_type=batch", "--activation_type=gelu"),
    "plain": ("--normalizer_type=none", "--with_skip=False", "--activation_type=tanh", "--head_dim=0"),
    "max": ("--pooling=max", "--activation_type=silu"),
    "no layer": ("--num_layers=0", "--feature_scale=raw", "--features=past_size,in_degree,future_size"),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_set_is_judged_by_itself_and_by_its_order(folder, name):
    """Alone as in a batch of any others, and whatever its elements are called."""
    args = arguments(folder, *MODELS[name])
    data, model = load(args), network(args).eval()
    ids = np.array([4, 40, 11, 0, 23, 4])
    batch = data.batch(ids)
    whole = model(batch)
    assert {task: tuple(x.shape) for task, x in whole.items()} == {"cls": (6, 7), "dim": (6, 3)}
    for row, number in enumerate(ids):
        alone = model(data.batch(np.array([number])))
        assert all(torch.allclose(alone[task][0], whole[task][row], atol=1e-5, rtol=1e-5) for task in TASKS)
    assert not torch.allclose(whole["cls"][0], whole["cls"][1], atol=1e-3)  # and it does look at them
    rng = np.random.default_rng(1)
    moved = torch.from_numpy(np.concatenate([rng.permutation(b - a) + a for a, b in zip(
        batch.ptr[:-1].numpy(), batch.ptr[1:].numpy(), strict=True)]))  # fmt: skip
    other = model(relabelled(batch, moved))
    assert all(torch.allclose(other[task], whole[task], atol=1e-5, rtol=1e-5) for task in TASKS)
    same = model(relabelled(batch, torch.arange(len(moved))))  # of the test itself
    assert all(torch.equal(same[task], whole[task]) for task in TASKS)


def reversed_batch(batch: script.Batch) -> script.Batch:
    """Past and future exchanged."""
    swap = (batch.future_ptr, batch.future, batch.past_ptr, batch.past)
    return batch._replace(**dict(zip(("past_ptr", "past", "future_ptr", "future"), swap, strict=True)))


def test_messages_have_a_direction(folder):
    """Of the past and of the future the network hears apart; of one way it hears the past; without messages neither."""
    for options, knows in (((), True), (("--bidirectional=False",), True), (("--gnn_layer_type=none",), False)):
        args = arguments(folder, *options)
        batch, model = load(args).batch(np.arange(5)), network(args).eval()
        found, other = model(batch)["cls"], model(reversed_batch(batch))["cls"]
        assert torch.allclose(found, other, atol=1e-6) != knows
    args = arguments(folder)
    model, deaf = network(args).eval(), batch._replace(future=batch.future[:0], future_ptr=batch.future_ptr * 0)
    assert not torch.allclose(model(batch)["cls"], model(deaf)["cls"], atol=1e-3)  # the future is heard
    lone = batch._replace(past=batch.past[:0], past_ptr=batch.past_ptr * 0)
    args = arguments(folder, "--bidirectional=False")
    only_future = batch._replace(future=batch.future[:0], future_ptr=batch.future_ptr * 0)
    model = network(args).eval()
    assert torch.equal(model(batch)["cls"], model(only_future)["cls"])
    assert not torch.allclose(model(batch)["cls"], model(lone)["cls"])


@pytest.mark.parametrize("graph", ["links", "order"])
@pytest.mark.parametrize("kind", ["mean", "sum", "gcn", "gcn one way", "mean one way"])
def test_three_kernels_one_result(folder, monkeypatch, graph, kind):
    """Sparse products, index_add and padded dense products: logits and all gradients to 1e-5."""
    args = arguments(folder, f"--graph={graph}", f"--gnn_layer_type={kind.split()[0]}",
                     f"--bidirectional={'one way' not in kind}")  # fmt: skip
    data, plain, used = load(args), script.Messages.__init__, []
    labels, batch = torch.from_numpy(data.labels[:9, :2]), data.batch(np.arange(9))
    results, most = {}, (batch.ptr.diff()).max()
    for kernel in ("sparse", "index_add", "dense"):
        def init(self, batch, kind, _, kernel=kernel):
            plain(self, batch, kind, kernel)
            used.append(self.kernel)

        monkeypatch.setattr(script.Messages, "__init__", init)
        model, inputs = network(args), batch.features.clone().requires_grad_()
        found = model(batch._replace(features=inputs))
        script.weighted_loss(found, labels, torch.tensor([1.0, 2.0])).backward()
        gradients = [p.grad for p in model.parameters()] + [inputs.grad]
        results[kernel] = [*found.values(), *gradients]
    assert used == ["sparse", "index_add", "dense"] and batch.longest == most
    for kernel in ("index_add", "dense"):
        for a, b in zip(results["sparse"], results[kernel], strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-5 * float(a.detach().abs().max())), kernel


@pytest.mark.parametrize("kind", ["mean", "sum", "gcn"])
def test_sets_without_relations(folder, tmp_path, kind):
    """Single elements, and a batch without an edge."""
    args = arguments(tmp_path, "--min_size=1", "--max_size=3", f"--gnn_layer_type={kind}")
    data, model = load(args), network(args).eval()
    bare = np.flatnonzero(data.edges == 0)
    assert data.sizes.min() == 1 and len(bare) > 5 and data.edges.max() > 0
    for kernel in ("sparse", "dense"):
        model.kernel = kernel
        alone, among = model(data.batch(bare))["cls"], model(data.batch(np.arange(42)))["cls"]
        assert torch.allclose(alone, among[bare], atol=1e-5) and alone.isfinite().all()


def test_the_kernel_option_is_used(folder):
    for option, expected in (("auto", "sparse"), ("sparse", "sparse"), ("dense", "dense")):
        assert network(arguments(folder, f"--kernel={option}")).kernel == expected


@pytest.mark.parametrize("kind", ["mean", "sum", "gcn"])
def test_messages_against_dense_matrices(folder, kind):
    """Mean and sum over the neighbours alone; gcn as in Kipf and Welling's equation, by degrees to the same side."""
    args = arguments(folder, "--graph=links")
    batch = load(args).batch(np.arange(6))
    n, x = len(batch.owner), torch.randn(len(batch.owner), 5)
    matrix = torch.zeros(n, n)
    matrix[torch.repeat_interleave(torch.arange(n), batch.past_ptr.diff()), batch.past] = 1
    for way, a in (("past", matrix), ("future", matrix.T)):
        degree = a.sum(1, keepdim=True)
        scale = (degree + 1) ** -0.5
        expected = {"sum": a @ x, "mean": a @ x / degree.clamp(min=1), "gcn": scale * (a + torch.eye(n)) @ (scale * x)}
        for kernel in ("sparse", "dense", "index_add"):
            assert torch.allclose(script.Messages(batch, kind, kernel).mix(x, way), expected[kind], atol=1e-5)


def test_gcn_one_way_is_that_of_torch_geometric(folder):
    conv = pytest.importorskip("torch_geometric.nn").GCNConv(4, 8)
    args = arguments(folder, "--gnn_layer_type=gcn", "--bidirectional=False", "--normalizer_type=none",
                     "--with_skip=False")  # fmt: skip
    layer, batch = script.MessageLayer(4, args), load(args).batch(np.arange(12))
    layer.linear.weight.data, layer.linear.bias.data = conv.lin.weight.data, torch.randn(8)
    conv.bias.data = layer.linear.bias.data
    later = torch.repeat_interleave(torch.arange(len(batch.owner)), batch.past_ptr.diff())
    expected = F.relu(conv(batch.features, torch.stack([batch.past, later])))
    assert torch.allclose(layer(batch.features, script.Messages(batch, "gcn", "sparse")), expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["mean", "sum", "gcn"])
def test_gradient_of_the_sparse_product(folder, kind):
    """The given transpose is that of the product, in both directions; against finite differences."""
    batch = load(arguments(folder)).batch(np.arange(3))
    messages = script.Messages(batch, kind, "sparse")
    x = torch.randn(len(batch.owner), 3, dtype=torch.float64, requires_grad=True)
    for way in ("past", "future"):
        given = (messages.own[way], *messages.edges[way])
        given = [t.double() if t is not None and t.is_floating_point() else t for t in given]
        assert torch.autograd.gradcheck(lambda x, given=given: script.SparseProduct.apply(x, *given), x)


@pytest.mark.parametrize("kind", ["mean", "sum", "gcn", "none"])
def test_bfloat16(folder, monkeypatch, kind):
    """By every kernel logits in float32, near those of float32, and gradients for all."""
    args, plain = arguments(folder, f"--gnn_layer_type={kind}"), script.Messages.__init__
    model, data = network(args), load(args)
    batch, expected = data.batch(np.arange(6)), model(data.batch(np.arange(6)))["cls"].detach()
    for kernel in ("sparse", "index_add", "dense"):
        def init(self, batch, kind, _, kernel=kernel):
            plain(self, batch, kind, kernel)

        monkeypatch.setattr(script.Messages, "__init__", init)
        model.dtype = torch.bfloat16
        found = model(batch)["cls"]
        model.zero_grad()
        found.square().sum().backward()
        assert found.dtype == torch.float32 and not torch.equal(found, expected)
        assert torch.allclose(found, expected, rtol=0.05, atol=0.05 * float(expected.abs().max())), kernel
        assert all(p.grad.isfinite().all() for n, p in model.named_parameters() if "heads.dim" not in n)


def test_pooling_against_a_loop(folder):
    """Means, maxima, sums in the order asked for, and the logarithm of the size."""
    batch = load(arguments(folder)).batch(np.array([8, 1, 30, 17]))
    x = torch.randn(len(batch.owner), 5) - 2  # maxima below 0 too
    rows = [x[a:b] for a, b in zip(batch.ptr[:-1], batch.ptr[1:], strict=True)]
    each = {"mean": lambda r: r.mean(0), "max": lambda r: r.max(0).values, "sum": lambda r: r.sum(0)}
    for kinds in (["mean"], ["max"], ["sum"], ["sum", "max"], ["mean", "max", "sum"]):
        sizes = [torch.tensor([math.log(len(row))]) for row in rows]
        expected = [torch.cat([*(each[k](row) for k in kinds), size]) for row, size in zip(rows, sizes, strict=True)]
        assert torch.allclose(script.Messages(batch, "mean", "sparse").pool(x, kinds), torch.stack(expected), atol=1e-5)


# ---- Network -----------------------------------------------------------------------------------------


def test_every_parameter_gets_a_gradient(folder):
    """Of the active tasks alone, also where no set of a batch has a label of one: DDP needs no search for others."""
    for name, options in MODELS.items():
        args = arguments(folder, *options)
        data, model = load(args), network(args)
        names = [n for n, _ in model.named_parameters() if n.startswith("heads.")]
        assert {n.split(".")[1] for n in names} == {"cls", "dim"}
        labels = torch.from_numpy(data.labels[3:7, :2])
        assert (labels[:, 1] == -1).all() and (labels[:, 0] >= 0).all()
        loss = script.weighted_loss(model(data.batch(np.arange(3, 7))), labels, torch.ones(2))
        loss.backward()
        assert torch.isfinite(loss) and all(p.grad is not None for p in model.parameters()), name
        zero = [p.grad.abs().max() == 0 for n, p in model.named_parameters() if n.startswith("heads.dim")]
        assert all(zero) and model.heads["cls"][-1].weight.grad.abs().max() > 0
    one = script.CausalSetNet(arguments(folder, "--active_tasks=dim"), {"dim": 3}, torch.float32, "cpu")
    assert {*one.heads} == {"dim"} and not any("cls" in n for n, _ in one.named_parameters())


def test_options_of_the_network(folder):
    """Each changes what is built."""
    built = {name: network(arguments(folder, *options)) for name, options in MODELS.items()}
    kinds = {name: {type(m) for m in model.modules()} for name, model in built.items()}
    assert nn.LayerNorm in kinds["mean"] and nn.BatchNorm1d not in kinds["mean"] and nn.BatchNorm1d in kinds["batch"]
    assert not {nn.LayerNorm, nn.BatchNorm1d} & kinds["plain"] and nn.Tanh in kinds["plain"]
    assert nn.GELU in kinds["batch"] and nn.SiLU in kinds["max"]
    widths = {name: [layer.linear.in_features for layer in model.layers] for name, model in built.items()}
    assert widths["mean"] == [12, 24] and widths["one way"] == [8, 16] and widths["none"] == [4, 8]
    assert widths["gcn"] == [8, 16] and widths["gcn one way"] == [4, 8] and widths["no layer"] == []
    assert built["mean"].heads["cls"][0].in_features == 25 and built["max"].heads["cls"][0].in_features == 9
    assert len(built["mean"].heads["cls"]) == 3 and len(built["plain"].heads["cls"]) == 1
    assert built["mean"].layers[0].skip is not None and built["plain"].layers[0].skip is None
    dropping = network(arguments(folder, "--dropout=0.5"))
    batch = load(arguments(folder)).batch(np.arange(4))
    assert not torch.equal(dropping(batch)["cls"], dropping(batch)["cls"])
    assert torch.equal(dropping.eval()(batch)["cls"], dropping(batch)["cls"])


def test_dropout(folder):
    """Of this share of the elements, each by itself; the others grow so that the mean stays."""
    args = arguments(folder, "--dropout=0.3", "--num_layers=1", "--hidden_dim=64", "--activation_type=tanh")
    batch, model = load(args).batch(np.arange(42)), network(args)
    layer, messages = model.layers[0], script.Messages(batch, "mean", "sparse")
    whole = layer.eval()(batch.features, messages)
    torch.manual_seed(1)
    found = layer.train()(batch.features, messages)
    kept = found != 0
    assert torch.allclose(found[kept], whole[kept] / 0.7, rtol=1e-5) and not torch.equal(
        kept, layer(batch.features, messages) != 0)  # fmt: skip
    flat = kept.flatten().double()
    error = (0.21 / len(flat)) ** 0.5
    assert abs(flat.mean() - 0.7) < 5 * error
    for shift in (1, 2, 3, 4, 64):
        assert abs((flat[shift:] * flat[:-shift]).mean() - 0.49) < 5 * error


def test_residual_connections(folder):
    """The layer's input, by a matrix of its own where the widths differ, is added after the activation."""
    args = arguments(folder)
    batch, model = load(args).batch(np.arange(4)), network(args)
    messages, x = script.Messages(batch, "mean", "sparse"), batch.features
    for layer in model.layers:
        skip, layer.skip = layer.skip, None
        bare = layer(x, messages)
        layer.skip = skip
        assert torch.allclose(layer(x, messages), bare + skip(x), atol=1e-6)
        x = layer(x, messages)


def test_weighted_loss_against_a_loop():
    """Over the sets that have a label; in nats; times the weight of the task."""
    torch.manual_seed(0)
    logits = {"a": torch.randn(6, 3), "b": torch.randn(6, 2)}
    labels, weights = torch.tensor([[0, 1], [2, -1], [-1, 0], [1, -1], [-1, -1], [2, 1]]), torch.tensor([0.5, 2.0])
    expected = 0.0
    for column, x in enumerate(logits.values()):
        for row in range(6):
            if labels[row, column] >= 0:
                expected -= weights[column] * (x[row].exp() / x[row].exp().sum())[labels[row, column]].log()
    assert torch.allclose(script.weighted_loss(logits, labels, weights), expected)


# ---- Evaluation --------------------------------------------------------------------------------------


def test_classification_against_scikit_learn():
    """Also of classes that are never true, never found, or neither."""
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    for classes, true in ((3, (0, 1, 2)), (5, (0, 1, 3)), (2, (1,))):
        logits = rng.normal(size=(60, classes)) * 2
        logits[:, classes - 1] -= 20 * (classes == 5)  # never found
        labels = rng.choice(true, 60)
        logp = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        found, guess = script.classification(logp, labels), logp.argmax(1)
        assert found["accuracy"] == pytest.approx(metrics.accuracy_score(labels, guess), abs=1e-12)
        for kind in ("macro", "weighted"):
            expected = metrics.f1_score(labels, guess, average=kind, zero_division=0)
            assert found[f"f1_{kind}"] == pytest.approx(expected, abs=1e-12)
        assert found["loss"] == pytest.approx(metrics.log_loss(labels, np.exp(logp), labels=range(classes)), abs=1e-9)
        expected = metrics.confusion_matrix(labels, guess, labels=range(classes))
        assert found["confusion"] == expected.tolist()
        confidence, error = np.exp(logp.max(1)), 0.0
        for low in range(15):
            inside = (confidence >= low / 15) & ((confidence < (low + 1) / 15) | (low == 14))
            if inside.any():
                error += inside.sum() / 60 * abs((guess == labels)[inside].mean() - confidence[inside].mean())
        assert found["ece"] == pytest.approx(error, abs=1e-12) and found["ece"] > 0.01


def task_of(ddp, args, data=None) -> script.Task:
    data = data or script.CausalSets(Path(script.prepare_sets(args)), args, CPU)
    classes = {name: len(data.classes[name]) for name in args.active_tasks}
    labels = np.stack([data.labels[:, data.heads.index(name)] for name in classes], axis=1)
    weights = torch.tensor([1.0, 0.5])[: len(classes)]
    return script.Task(args, ddp, network(args, tasks=classes), data, classes, labels, weights)


def evaluate_on_ranks(ddp, folder: str) -> list[tuple[dict, np.ndarray]]:
    """Metrics of splits of several sizes, in batches of 4 and all at once."""
    calls, plain, found = [], torch.distributed.all_reduce, []
    torch.distributed.all_reduce = lambda *args, **more: calls.append(1) or plain(*args, **more)
    for size in (4, 256):
        task = task_of(ddp, arguments(folder, f"--eval_batch_size={size}"))
        found += [script.evaluate(task, np.arange(count)[::-1]) for count in (42, 37, 5, 3)]
    assert task.model.training and len(calls) == 8 * (ddp.world_size > 1)
    return found


def test_metrics_are_the_same_on_any_number_of_ranks(folder):
    """To the last bit, each set once, by one collective; and equal to those of every set by itself."""
    (alone,) = run_ranks(1, evaluate_on_ranks, str(folder))
    for world_size in (2, 3, 5):
        for rank in run_ranks(world_size, evaluate_on_ranks, str(folder)):
            for (metrics, table), (expected, whole) in zip(rank, alone, strict=True):
                assert metrics == expected and np.array_equal(table, whole)
    task = task_of(one_process(), arguments(folder))
    model, losses = task.model.eval(), []
    for number in range(42):
        logits = [x[0].double().log_softmax(0).detach() for x in model(task.data.batch(np.array([number]))).values()]
        losses.append([-x[y].item() if y >= 0 else math.nan for x, y in zip(logits, task.labels[number], strict=True)])
    expected, (metrics, _) = np.nanmean(losses, axis=0), alone[0]
    assert metrics["cls"]["loss"] == pytest.approx(expected[0], abs=1e-5)
    assert metrics["dim"]["loss"] == pytest.approx(expected[1], abs=1e-5)
    assert metrics["loss"] == pytest.approx(expected[0] + 0.5 * expected[1], abs=1e-5)
    assert metrics["loss_se"] > 0 and sum(map(sum, metrics["dim"]["confusion"])) == 18  # labelled ones only


def buffers_on_ranks(ddp, folder: str) -> list[torch.Tensor]:
    task = task_of(ddp, arguments(folder, "--normalizer_type=batch"))
    for b in task.model.buffers():
        b.fill_(ddp.rank + 1)
    script.evaluate(task, np.arange(20))
    return [b.clone() for b in task.model.buffers()]


def test_statistics_of_batch_normalisation_are_averaged(folder):
    a, b = run_ranks(2, buffers_on_ranks, str(folder))
    assert len(a) == 6
    for x, y in zip(a, b, strict=True):
        if x.is_floating_point():
            assert torch.equal(x, y) and (x == 1.5).all()


def test_baselines(folder):
    """The commonest class of the training sets; the nearest dimension; logistic regression, better than both."""
    pytest.importorskip("sklearn")
    options = ("--kinds=mink2,mink3,mink4,kr", "--samples=160", "--min_size=30", "--max_size=40")
    task = task_of(one_process(), arguments(folder, *options))
    ids = np.random.default_rng(0).permutation(160)
    parts = {"train": ids[:100], "test": ids[100:]}
    found, labels = script.baselines(task, parts), task.labels[parts["test"]]
    common = np.bincount(task.labels[parts["train"], 0]).argmax()
    assert found["cls"]["majority"]["accuracy"] == (labels[:, 0] == common).mean()
    assert {*found["cls"]} == {"majority", "logistic regression"}
    assert {*found["dim"]} == {"majority", "Myrheim-Meyer", "logistic regression"}
    known = labels[:, 1] >= 0
    fractions = [script.ordering_fraction(script.Generated(task.args)[i][0]) for i in parts["test"][known]]
    guess = np.clip(script.myrheim_meyer(np.array(fractions)).round(), 2, 4) - 2
    assert found["dim"]["Myrheim-Meyer"]["accuracy"] == (guess == labels[known, 1]).mean() > 0.8
    assert found["cls"]["logistic regression"]["accuracy"] > 0.7 > found["cls"]["majority"]["accuracy"]


def test_table_by_size(folder):
    task = task_of(one_process(), arguments(folder))
    ids = np.arange(42)
    _, logp = script.evaluate(task, ids)
    for name, rows in script.by_size(task, ids, logp).items():
        column, start = list(TASKS).index(name), 7 * (name == "dim")
        known = task.labels[:, column] >= 0
        right = logp[:, start : start + TASKS[name]].argmax(1) == task.labels[:, column]
        assert sum(row["sets"] for row in rows) == known.sum() and 3 <= len(rows) <= 4
        for row in rows:
            low, high = map(int, row["sizes"].split(" to "))
            inside = known & (task.data.sizes >= low) & (task.data.sizes <= high)
            assert row["sets"] == inside.sum() and row["accuracy"] == pytest.approx(right[inside].mean())


# ---- Early stopping ----------------------------------------------------------------------------------


def rule(mode: str = "max", delta: float = 0.0, grace: int = 0, start: float = 0.0, metric: str = "accuracy") -> dict:
    return {"metric": metric, "mode": mode, "delta": delta, "grace_period": grace, "init_best_score": start}


NAN = math.nan
SEQUENCES = {  # rules, how, patience, values of each epoch: which epochs are better, the epoch that stops (-1: none)
    "patience": ({"a": rule()}, "any", 2, [[1], [2], [2], [1]], [0, 1], 3),
    "a gain renews it": ({"a": rule()}, "any", 2, [[1], [0], [2], [0], [0]], [0, 2], 4),
    "min": ({"a": rule("min", start=9)}, "any", 2, [[8], [8.5], [7], [7], [7]], [0, 2], 4),
    "delta is exceeded": ({"a": rule(delta=0.5)}, "any", 3, [[0.5], [0.75], [1.25], [1.5]], [1, 3], -1),
    "delta, min": ({"a": rule("min", 0.5, start=4)}, "any", 2, [[3.5], [3.25], [2.75], [2.5]], [1, 3], -1),
    "first score": ({"a": rule(start=5)}, "any", 2, [[4], [4.5]], [], 1),
    "grace": ({"a": rule(grace=3)}, "any", 2, [[1], [0], [0], [0], [0]], [0], 4),
    "grace of all": ({"a": rule(grace=1), "b": rule(grace=3)}, "any", 1, [[0, 0]] * 4, [], 3),
    "any": ({"a": rule(), "b": rule("min", start=9)}, "any", 2, [[1, 8], [0, 7], [0, 7], [0, 8]], [0, 1], 3),
    "all": ({"a": rule(), "b": rule()}, "all", 2, [[1, 1], [2, 1], [2, 1]], [0], 2),
    # alone better at epoch 1 and 2, a keeps its best of 1: both are better at epoch 3, although a has fallen to 2
    "all, the old best stays": ({"a": rule(), "b": rule()}, "all", 3, [[1, 1], [5, 1], [9, 1], [2, 2]], [0, 3], -1),
    "any, own best": ({"a": rule(), "b": rule()}, "any", 2, [[1, 1], [5, 0], [4, 2], [5, 2], [5, 1]], [0, 1, 2], 4),
    "not a number": ({"a": rule()}, "any", 2, [[1], [NAN], [NAN]], [0], 2),
    "not a number, min": ({"a": rule("min", start=9)}, "any", 3, [[NAN], [8], [NAN], [8], [8]], [1], 4),
    "patience 0": ({"a": rule()}, "any", 0, [[1]], [0], 0),
    "patience 1": ({"a": rule()}, "any", 1, [[1], [1]], [0], 1),
}  # fmt: skip


@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize("restarted", [False, True])
def test_scripted_sequences(name, restarted):
    """Also with the state written and read back after each epoch."""
    rules, how, patience, values, better, last = SEQUENCES[name]
    stopping, found, end = script.EarlyStopping(rules, how, patience), [], -1
    for epoch, row in enumerate(values):
        assert end == -1, "the sequence goes on after its end"
        if restarted:
            kept = {n: vars(stopping)[n] for n in ("left", "best", "grace")}
            stopping = script.EarlyStopping(rules, how, patience)
            vars(stopping).update(kept)
        stop, whole = stopping.check(dict(zip(rules, row, strict=True)))
        found += [epoch] * whole
        end = epoch if stop else -1
    assert (found, end) == (better, last)


def decisions(ddp, name: str) -> list[tuple[bool, bool]]:
    """What each rank is told, where the metrics of the others say the contrary."""
    rules, how, patience, values, *_ = SEQUENCES[name]
    args = Namespace(stop_tasks=rules, stop_mode=how, patience=patience, check_finite=False)
    task, standing, found = Namespace(args=args, ddp=ddp), script.Standing(), []
    for epoch, row in enumerate(values):
        standing.epoch = epoch + 1
        sign = 1 if ddp.rank == 0 else -1
        metrics = {n: {"accuracy": sign * value} for n, value in zip(rules, row, strict=True)}
        found.append(script.decide(task, standing, metrics | {"loss": sign * 0.5}))
        standing.best = {"value": 0.5} if found[-1][1] else standing.best
        if found[-1][0]:
            break
    return found


def losses_on_ranks(ddp, losses: list[float], finite: bool, metric: float) -> list:
    """Without tasks to watch the loss decides; at the end an error, if there is one."""
    rules = {"a": rule()} if metric else {}
    args = Namespace(stop_tasks=rules, stop_mode="any", patience=3, check_finite=finite)
    task, standing, found = Namespace(args=args, ddp=ddp), script.Standing(), []
    for epoch, loss in enumerate(losses):
        standing.epoch = epoch + 1
        loss = loss if ddp.rank == 0 else 0.5
        try:
            found.append(script.decide(task, standing, {"loss": loss, "a": {"accuracy": metric if epoch else 1.0}}))
        except RuntimeError as error:
            return [*found, str(error)]
        standing.best = {"value": loss} if found[-1][1] else standing.best
    return found


def decide_on_ranks(ddp, names: list[str]) -> list:
    return [*(decisions(ddp, name) for name in names), losses_on_ranks(ddp, [2.0, 3.0, 1.0, NAN], True, 0.0)]


def test_rank_0_decides_for_all():
    """All ranks stop at its epoch, whatever their own metrics are; what is not finite is an error on all."""
    names = ["patience", "grace", "all", "min", "delta, min", "patience 0"]
    ranks = run_ranks(3, decide_on_ranks, names)
    assert ranks[1][:-1] == ranks[0][:-1] == ranks[2][:-1]
    for name, found in zip(names, ranks[0], strict=False):
        *_, values, better, last = SEQUENCES[name]
        assert [stop for stop, _ in found] == [epoch == last for epoch in range(len(values))], name
        kept = [epoch for epoch, (_, whole) in enumerate(found) if whole]
        assert kept == sorted({0, *better}), name  # the first weights are kept in any case
    for *found, error in (rank[-1] for rank in ranks):
        assert found == [(False, True), (False, False), (False, True)]
        assert "after epoch 3" in error and "not finite" in error


def test_what_is_not_finite():
    """The loss or a watched metric ends the run; with --check_finite False it is never better."""
    alone = one_process()
    for losses, metric in (([1.0, NAN], 0.0), ([1.0, math.inf], 0.0), ([1.0, 0.5], NAN)):
        assert "not finite" in losses_on_ranks(alone, losses, True, metric)[-1]
        assert losses_on_ranks(alone, losses, False, metric)[-1] == (False, False)
    assert losses_on_ranks(alone, [0.5, 0.25], True, 0.0) == [(False, True)] * 2


def test_a_first_loss_that_is_no_number_is_not_the_best_for_ever():
    assert losses_on_ranks(one_process(), [NAN, 1.0], False, 0.0) == [(False, True), (False, True)]


# ---- Learning rates ----------------------------------------------------------------------------------


def rates(options: list[str], steps: int, per_epoch: int, losses: list[float] | None = None) -> list[float]:
    args, standing, found = script.parse_args(options), script.Standing(), []
    for step in range(steps):
        standing.step = step
        found.append(script.rate_factor(args, standing, steps, per_epoch))
        if losses and (step + 1) % per_epoch == 0:
            script.plateau(args, standing, losses[step // per_epoch])
    return found


def torch_rates(make, steps: int, per_epoch: int, losses: list[float] | None = None) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule, found = make(optimizer), []
    for step in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if (step + 1) % per_epoch == 0:
            schedule.step(*([losses[step // per_epoch]] if losses else [])) if step + 1 < steps else None
    return found


@pytest.mark.parametrize("steps, start", [(50, 0.3), (7, 0.3), (40, 0.05), (9, 0.9), (100, 0.5)])
def test_onecycle_is_that_of_torch(steps, start):
    found = rates([f"--pct_start={start}"], steps, 1)
    make = lambda o: torch.optim.lr_scheduler.OneCycleLR(  # noqa: E731
        o, 1.0, total_steps=steps, pct_start=start, div_factor=25, final_div_factor=1e4)  # fmt: skip
    assert found == pytest.approx(torch_rates(make, steps, 1), rel=1e-6, abs=1e-9)


def test_onecycle_of_very_short_runs():
    for steps in (1, 2, 3):
        assert all(4e-6 <= f <= 1 for f in rates([], steps, 1))


def test_step_and_plateau_are_those_of_torch():
    losses = [1.0, 0.9, 0.89995, 0.9, 0.91, 0.8, 0.85, 0.85, 0.85, 0.85, 0.85, 0.7, NAN, 0.71, 0.72, 0.73]
    for patience in (0, 1, 2):
        make = lambda o, p=patience: torch.optim.lr_scheduler.ReduceLROnPlateau(  # noqa: E731
            o, factor=0.5, patience=p, threshold=1e-4, threshold_mode="rel", eps=0)  # fmt: skip
        options = ["--lr_scheduler=ReduceLROnPlateau", "--gamma=0.5", f"--lr_patience={patience}"]
        found = rates(options, 32, 2, losses)
        assert found == pytest.approx(torch_rates(make, 32, 2, losses)) and min(found) < 0.5
    make = lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.2)  # noqa: E731
    found = rates(["--lr_scheduler=StepLR", "--step_size=3", "--gamma=0.2"], 40, 4)
    assert found == pytest.approx(torch_rates(make, 40, 4)) and len({*found}) == 4


def test_cosine_linear_and_constant():
    for name, shape in (("cosine", lambda x: 0.5 + 0.5 * math.cos(math.pi * x)), ("linear", lambda x: 1 - x),
                        ("constant", lambda x: 1.0)):  # fmt: skip
        for warmup in (0, 4):
            rising = [(step + 1) / (warmup + 1) for step in range(warmup)]
            expected = rising + [shape(step / (20 - warmup)) for step in range(20 - warmup)]
            assert rates([f"--lr_scheduler={name}", f"--warmup_steps={warmup}"], 20, 5) == pytest.approx(expected)
        assert all(0 < f <= 1 for f in rates([f"--lr_scheduler={name}", "--warmup_steps=99"], 20, 5))
