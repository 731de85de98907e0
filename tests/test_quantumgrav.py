"""run_train_quantumgrav_ddp.py: known answers, and what a user sees of a run."""

import copy
import math
import os
import shutil
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import call_script, check_refused, parse_arguments
from runs import Run
from sklearn.metrics import confusion_matrix, r2_score
from sklearn.utils.class_weight import compute_class_weight

import run_train_quantumgrav_ddp as script

SMALL = "--hidden_dim=16 --head_dim=8 --num_layers=2 --device=cpu".split()
OUTPUTS = "--tasks cls dim --targets atomcount".split()
CLASSES = {"cls": list("abcdef"), "dim": list("234"), "atomcount": []}

arguments = partial(parse_arguments, script)


@pytest.fixture(scope="module")
def data(causal_sets):
    return load(causal_sets, *OUTPUTS)


def load(path, *options):
    args = arguments(f"--data={path}", f"--cache_dir={path.parent}/cache", *options)
    return script.CausalSets(script.prepare(args), args)


def with_matrices(model, args, order, x, numbers):
    """The outputs for one set, in float64: sums over neighbors are products with its links."""
    steps = order.astype(int)
    links = torch.from_numpy(order & (steps @ steps == 0)).double()
    for layer in model.layers:
        parts = [x]
        if args.messages != "none":
            parts = [links.T @ x, links @ x, x]
        if args.messages == "mean":
            parts[0] = parts[0] / links.sum(0).clamp(min=1)[:, None]
            parts[1] = parts[1] / links.sum(1).clamp(min=1)[:, None]
        x = layer.norm(layer.linear(torch.cat(parts, dim=1))).relu() + layer.skip(x)
    pooled = model.norm(torch.cat([x.mean(0), x.amax(0)]))
    return [head(torch.cat([pooled, numbers])) for head in model.heads]


@pytest.mark.parametrize("messages", ["mean", "sum", "none"])
def test_network_and_gradient_set_by_set(causal_sets, data, messages):
    """Sets in any order, one twice. Features are noise: of ties a maximum's gradient is shared."""
    args = arguments(*SMALL, f"--messages={messages}")
    torch.manual_seed(0)
    model = script.CausalSetNet(args, CLASSES)
    with torch.no_grad():
        for p in model.parameters():  # norms and biases are not what they start as
            p.add_(0.1 * torch.randn(p.shape))
    plain = copy.deepcopy(model).double()

    raw = np.load(causal_sets)
    ids = np.array([5, 100, 7, 239, 7])
    batch = data.make_batch(ids, ids)
    batch = batch._replace(features=torch.randn(batch.features.shape))
    found = model(batch)
    parts = batch.features.double().split(batch.sizes.tolist())
    for row, i in enumerate(ids):
        n = raw["atomcount"][i]
        order = raw["adjacency_matrix"][i, :n, :n].astype(bool)
        logs = np.log1p(script.describe({"adjacency_matrix": order})["statistics"])
        mean, scale = [data.facts[name][len(CLASSES) :] for name in ("means", "scales")]
        numbers = torch.from_numpy((logs - mean) / scale)
        outputs = with_matrices(plain, args, order, parts[row], numbers)
        for task, logits in zip(CLASSES, outputs, strict=True):
            assert torch.allclose(found[task][row].double(), logits, rtol=1e-4, atol=1e-4)
            gradient = torch.randn(logits.shape)
            found[task][row].backward(gradient, retain_graph=True)
            logits.backward(gradient.double(), retain_graph=True)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(p.grad.double(), q.grad, rtol=1e-3, atol=1e-3)


def test_losses_of_micro_batches_add_up_to_the_mean():
    """Of a task with class weights, one without, and a target."""
    labels = torch.randint(0, 3, (11, 3)).float()
    known = torch.rand(11, 3) < 0.8
    known[3:8, 1] = False  # a whole part may have no label of a task
    class_weights = [torch.tensor([0.5, 1.0, 3.0]), torch.ones(4)]
    weights = known.float()
    weights[:, 0] *= class_weights[0][labels[:, 0].long()]
    outputs = [torch.randn(11, k) for k in (3, 4, 1)]
    total = 0.0
    for rows in torch.arange(11).tensor_split(5):
        parts = {"labels": labels[rows], "weights": weights[rows], "totals": weights.sum(0)}
        part = {i: output[rows] for i, output in enumerate(outputs)}
        total += script.batch_loss(part, SimpleNamespace(**parts)).item()

    expected = ((outputs[2][:, 0] - labels[:, 2])[known[:, 2]] ** 2).mean().item()
    for i, weight in enumerate(class_weights):
        rows = known[:, i]
        expected += F.cross_entropy(outputs[i][rows], labels[rows, i].long(), weight).item()
    assert total == pytest.approx(expected, abs=1e-5)


def test_class_weights(causal_sets, data):
    """n / (K n_c), of what is trained on; the others count 1."""
    expected = data.weights.copy()
    for i in range(2):
        train = np.flatnonzero((data.split == 0) & (data.weights[:, i] > 0))
        labels = data.labels[train, i]
        shares = compute_class_weight("balanced", classes=np.unique(labels), y=labels)
        expected[train, i] = shares[labels.astype(int)]
    balanced = load(causal_sets, *OUTPUTS, "--class_weights=balanced")
    assert np.allclose(balanced.weights, expected)


def test_metrics_by_hand():
    """With bins of 1/15: two sets at 0.91, two at 0.95 and 1, one at 0.6."""
    confidence = np.array([0.91, 0.91, 0.95, 1.0, 0.6])
    logp = np.log(np.maximum(np.stack([confidence, 1 - confidence], axis=1), 1e-300))
    found = script.classification(logp, np.array([0, 1, 0, 0, 0]))
    gaps = [abs(1 - 2 * 0.91), 2 - 0.95 - 1.0, 1 - 0.6]
    assert found["ece"] == pytest.approx(sum(gaps) / 5)
    f1 = 2 * 4 / (5 + 4)  # of the class that is always guessed; the other's is 0
    assert found["f1_macro"] == pytest.approx(f1 / 2)
    assert found["f1_weighted"] == pytest.approx(f1 * 4 / 5)
    values = np.array([1.0, 2.0, 6.0])
    found = script.regression(values, np.array([2.0, 2.0, 3.0]), 2.0)
    expected = [10 / 3 / 4, 4 / 3, math.sqrt(10 / 3), r2_score([2.0, 2.0, 3.0], values)]
    assert list(found.values()) == pytest.approx(expected)


def test_evaluation(data, group):
    """Each set once, without dropout. The loss is the sum of the tasks' means over known labels."""
    ids = data.part("train")[::-1].copy()
    labels = torch.from_numpy(data.labels[ids])
    model = script.CausalSetNet(arguments(*SMALL, "--dropout=0.5"), CLASSES)
    outputs = model.eval()(data.make_batch(ids, ids))
    metrics, found = script.evaluate(model.train(), data, ids, torch.device("cpu"))
    assert model.training

    losses = []
    for task, own in zip(["cls", "dim"], labels.nan_to_num(nan=-1).long().T, strict=False):
        assert np.allclose(found[task], outputs[task].log_softmax(1).detach(), rtol=0, atol=1e-5)
        losses.append(F.cross_entropy(outputs[task], own, ignore_index=-1).item())
        assert metrics[f"{task}/loss"] == pytest.approx(losses[-1], abs=1e-5)
    sizes = labels[:, 2].numpy()
    values = outputs["atomcount"][:, 0].detach().numpy() * sizes.std() + sizes.mean()
    assert np.allclose(found["atomcount"], values, rtol=1e-5)
    losses.append(np.square((values - sizes) / sizes.std()).mean())
    assert metrics["loss"] == pytest.approx(sum(losses), abs=1e-5)


PATIENCE = {  # options of early stopping, as in the original; metrics until the epoch that ends it
    "loss --patience 2": [[5], [4], [4], [3], [3], [3]],
    "loss --patience 2 --grace 4": [[5], [5], [5], [5], [5], [5]],
    "cls/f1_macro --patience 1 --delta 1": [[1], [3], [6], [7]],
    "loss cls/f1_macro --patience 2": [[5, 1], [6, 2], [5, 2], [5, 2]],
    # one metric that gets better alone keeps its old best value: then 4 is better than 5, too
    "loss cls/f1_macro --patience 2 --stop_mode all": [[5, 1], [3, 1], [4, 2], [3, 2], [2, 2]],
    "loss loss --patience 1 --stop_mode all": [[5, 5], [4, 4], [4, 4]],  # twice is once
}


@pytest.mark.parametrize(("options", "epochs"), PATIENCE.items())
def test_patience(options, epochs):
    """The best epoch needs no --delta: weights that are better by less are better still."""
    args = arguments("--warmup=0", "--stop_metrics", *options.split())
    loop = {"best_values": {}, "best": {}, "waited": 0}
    for loop["step"], values in enumerate(epochs):
        assert not 0 < args.patience <= loop["waited"]
        metrics = dict(zip(args.stop_metrics, values, strict=True))
        script.count_waiting(loop, metrics, loop["step"], args)
        script.note_best(loop, metrics, args)
    assert 0 < args.patience <= loop["waited"]
    values = [row[0] for row in epochs]
    best = min(values) if args.stop_metrics[0] == "loss" else max(values)
    assert loop["best"]["step"] == values.index(best)


def test_learning_rates():
    def factors(steps, warmup):
        args = arguments(f"--warmup={warmup}")
        return [script.lr_factor(args, step, steps) for step in range(steps)]

    rise = [0.04 + 0.48 * (1 - math.cos(math.pi * i / 3)) for i in range(3)]
    fall = [0.5 + 0.5 * math.cos(math.pi * i / 3) for i in range(3)]
    assert factors(6, 0.5) == pytest.approx(rise + fall)
    assert factors(3, 0) == pytest.approx(fall)
    assert factors(3, 1) == pytest.approx(rise)


def test_the_split():
    """In exactly these shares, rounded; by --split_seed."""
    first = np.arange(101)
    split = script.split_sets(first, [0.75, 0.1, 0.15], 0)
    assert np.bincount(split).tolist() == [76, 10, 15]
    assert not np.array_equal(split, script.split_sets(first, [0.75, 0.1, 0.15], 1))
    for shares in ([0.9, 0.1, 0.1], [0.98, 0.015, 0.005]):
        check_refused("--split", script.split_sets, first, shares, 0)


@pytest.mark.parametrize("part", ["train", "valid", "test"])
def test_a_part_without_a_label_or_a_class(causal_sets, data, tmp_path, caplog, part):
    """The first is refused before training, the other is said."""
    caplog.set_level("INFO")
    arrays = dict(np.load(causal_sets))
    arrays["dim"][data.part(part)] = -1
    arrays["cls"][data.part(part)[1:]] = "mink2"
    arrays["cls"][data.part(part)[0]] = "mink3"
    np.savez(tmp_path / "a.npz", **arrays)
    check_refused(f"dim.* {part}", load, tmp_path / "a.npz", "--tasks", "cls", "dim")
    count = len(data.part(part)) - 1
    assert f"{part}, cls: destroyed 0, layered 0, mink2 {count}, mink3 1, mink4 0," in caplog.text


def test_baselines(causal_sets):
    data = load(causal_sets, "--tasks", "cls", "--targets", "atomcount", "dim")
    found = script.measure_baselines(data)
    for column, output in enumerate(data.classes):
        labels = data.labels[:, column]
        seen = labels[~np.isnan(labels) & (data.split == 0)]
        tested = labels[~np.isnan(labels) & (data.split == 2)]
        if output == "cls":
            commonest = np.bincount(seen.astype(int)).argmax()
            assert found[output]["commonest"] == np.mean(tested == commonest)
        else:
            rmse = np.sqrt(np.square(tested - seen.mean()).mean())
            assert found[output]["mean"] == pytest.approx(rmse)
    assert min(found["cls"]["logistic regression"], found["cls"]["boosting"]) > 0.3
    assert max(found["atomcount"]["ridge regression"], found["atomcount"]["boosting"]) < 1

    # as many related pairs as Meyer says
    dims = np.nan_to_num(data.labels[:, 2], nan=2)
    data.raw_statistics = np.full(data.raw_statistics.shape, 1000.0)
    data.raw_statistics[:, 1] = np.interp(dims, [2, 3, 4], [1 / 2, 8 / 35, 1 / 10]) * 1000 * 999 / 2
    assert script.measure_baselines(data)["dim"]["Myrheim-Meyer"] < 1e-6


def test_tasks_and_metrics_that_are_refused():
    for words in (["--tasks", "cls", "cls"], ["--tasks", "cls", "--targets", "cls"]):
        check_refused("--tasks and --targets: one is given twice", arguments, *words)
    check_refused("--stop_metrics dim/loss", arguments, "--stop_metrics=dim/loss")
    assert arguments().tasks == ["cls"] and arguments("--targets", "dim").tasks == []


def test_section_parallel_of_the_original(tmp_path, monkeypatch):
    """It holds where no launcher has said anything; a key without a value says nothing."""
    monkeypatch.setenv("MASTER_PORT", "23456")
    monkeypatch.setenv("MASTER_ADDR", "")  # some shells export empty ones
    text = "world_size: 3, rank: null, backend: gloo, output_device: null, master_addr: localhost"
    text = f"parallel: {{{text}, master_port: '12355', find_unused_parameters: false}}"
    (tmp_path / "c.yaml").write_text(text)
    args = arguments("--config", f"{tmp_path}/c.yaml")
    assert (args.nproc_per_node, args.backend) == (3, "gloo")
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("localhost", "23456")


def run(path, out, *options, **more):
    """What a run says."""
    folders = [f"--data={path}", f"--output_dir={out}", f"--cache_dir={path.parent}/cache"]
    return call_script("run_train_quantumgrav_ddp", *folders, *SMALL, *options, **more)


def test_a_run_learns_and_says_so(causal_sets, tmp_path):
    """Better than the commonest class, and than the mean of a number: how many related pairs a set
    has, which two of three sets do not say. The figures are those of the predictions."""
    out = tmp_path / "out"
    arrays = dict(np.load(causal_sets))
    related = arrays["adjacency_matrix"].sum((1, 2))
    related = np.where(np.arange(240) % 3 > 0, np.nan, related)
    np.savez(tmp_path / "a.npz", related=related, **arrays)
    outputs = ["--tasks=cls", "--targets=related"]
    options = ["--num_epochs=30", "--lr=1e-2", "--batch_size=15", "--stop_metrics=related/rmse"]
    run(tmp_path / "a.npz", out, *outputs, *options)
    summary = Run(out).summary
    data = load(tmp_path / "a.npz", *outputs)
    baselines = summary["baselines"]
    assert baselines == script.measure_baselines(data)
    found = summary["test"]
    assert found["cls/accuracy"] > baselines["cls"]["commonest"] + 0.1
    assert found["related/rmse"] < 0.5 * baselines["related"]["mean"]

    predictions = np.load(out / "predictions.npz")
    ids = data.part("test")
    labels = data.labels[ids, 0].astype(int)
    guess = predictions["logp_cls"].argmax(1)
    assert found["cls/accuracy"] == (guess == labels).mean()
    matrix = confusion_matrix(labels, guess, labels=range(6)).tolist()
    assert summary["classes"]["cls"]["confusion"] == matrix


def test_start_from(causal_sets, tmp_path):
    """Weights, and the means and scales of their data, but for heads of other outputs. A resumed
    run needs the file no more."""
    run(causal_sets, tmp_path / "first", "--tasks=cls", "--targets=dim", "--num_epochs=2")
    first = torch.load(shutil.copy(tmp_path / "first" / "best.pt", tmp_path), weights_only=True)

    arrays = {name: array[:120] for name, array in np.load(causal_sets).items()}
    np.savez(tmp_path / "a.npz", **arrays)
    outputs = ["--tasks=cls", "--targets", "atomcount", "dim"]
    options = [*outputs, f"--start_from={tmp_path}/best.pt", "--lr=1e-12", "--num_epochs=1"]
    said = run(tmp_path / "a.npz", tmp_path / "out", *options, "--hidden_dim=8", status=2)
    assert "best.pt: it needs --hidden_dim 16" in said
    run(tmp_path / "a.npz", tmp_path / "out", *options)
    (tmp_path / "best.pt").unlink()
    run(tmp_path / "a.npz", tmp_path / "out", *options, "--num_epochs=2")

    state = Run(tmp_path / "out").state
    assert state["loop"]["step"] == 2
    data = load(tmp_path / "a.npz", *outputs)
    for name in ("means", "scales"):
        cls, dim, *numbers = first["data"][name]
        assert state["data"][name] == [cls, data.facts[name][1], dim, *numbers]
    for name, theirs in first["model"].items():
        own = state["model"][name.replace("heads.1.", "heads.2.")]
        assert torch.allclose(own, theirs, atol=1e-9)


def test_early_stopping_and_a_network_that_learns_nothing(causal_sets, tmp_path):
    """It is finished, with a test and a warning; without messages, two tasks, the largest seed."""
    options = f"--messages=none --tasks cls dim --seed={2**32} --lr=0 --num_epochs=9".split()
    said = run(causal_sets, tmp_path / "out", *options, "--patience=2", "--grace=1")
    for task in ("cls", "dim"):
        assert f"WARNING: {task}: the network is worse than what needs no network" in said
    summary = Run(tmp_path / "out").summary
    assert summary["steps"] == 3 * (180 // 64) and summary["best"]["step"] == 180 // 64
