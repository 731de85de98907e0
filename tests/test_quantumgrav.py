"""run_train_quantumgrav_ddp.py: known answers, and what a user sees of a run."""

import copy
import math
import os
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import call_script, parse_arguments
from runs import Run

import run_train_quantumgrav_ddp as script

SMALL = "--hidden_dim=16 --head_dim=8 --num_layers=2 --device=cpu".split()
CLASSES = {"cls": list("abcdef"), "dim": list("234")}
CPU = torch.device("cpu")

arguments = partial(parse_arguments, script)


@pytest.fixture(scope="module")
def data(causal_sets):
    return load(causal_sets, "--tasks", "cls", "dim")


def load(path, *options):
    args = arguments(f"--data={path}", f"--cache_dir={path.parent}/cache", *options)
    return script.CausalSets(script.prepare(args), args)


def with_matrices(model, args, order):
    """The logits of one set, in float64: sums over neighbors are products with its links."""
    x = torch.from_numpy(script.describe(order)["features"][:, :4]).double().log1p()
    links = torch.from_numpy(script.links_of(order)).double()
    for layer in model.layers:
        parts = [x]
        if args.messages != "none":
            parts = [links.T @ x, links @ x, x]
        if args.messages == "mean":
            parts[0] = parts[0] / links.sum(0).clamp(min=1)[:, None]
            parts[1] = parts[1] / links.sum(1).clamp(min=1)[:, None]
        x = layer.norm(layer.linear(torch.cat(parts, dim=1))).relu() + layer.skip(x)
    size = torch.tensor([math.log(len(x))])
    pooled = model.norm(torch.cat([x.mean(0), x.amax(0), x.sum(0), size]))
    return [head(pooled) for head in model.heads]


@pytest.mark.parametrize("messages", ["mean", "sum", "none"])
def test_network_and_gradient_set_by_set(causal_sets, data, messages):
    """Of a batch of any sets in any order, one of them twice. Elements that tie share the gradient
    of a maximum, as those of torch.amax do."""
    args = arguments(*SMALL, f"--messages={messages}")
    torch.manual_seed(0)
    model = script.CausalSetNet(args, CLASSES)
    with torch.no_grad():
        for p in model.parameters():  # norms and biases are not what they start as
            p.add_(0.1 * torch.randn(p.shape))
    plain = copy.deepcopy(model).double()

    raw = np.load(causal_sets)
    ids = np.array([5, 100, 7, 239, 7])
    found = model(data.make_batch(ids, ids))
    for row, i in enumerate(ids):
        n = raw["atomcount"][i]
        order = raw["adjacency_matrix"][i, :n, :n].astype(bool)
        for task, logits in zip(CLASSES, with_matrices(plain, args, order), strict=True):
            assert torch.allclose(found[task][row].double(), logits, rtol=1e-4, atol=1e-4)
            gradient = torch.randn(logits.shape)
            found[task][row].backward(gradient, retain_graph=True)
            logits.backward(gradient.double(), retain_graph=True)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(p.grad.double(), q.grad, rtol=1e-3, atol=1e-3)


def test_shares_of_the_loss_add_up_to_the_mean():
    labels = torch.randint(-1, 3, (11, 2))
    labels[3:8, 1] = -1  # a whole part may have no label of a task
    logits = [torch.randn(11, k) for k in (3, 4)]
    losses = [F.cross_entropy(logits[i], labels[:, i], ignore_index=-1) for i in range(2)]
    total = 0.0
    for rows in torch.arange(11).tensor_split(5):
        batch = SimpleNamespace(labels=labels[rows], counts=(labels >= 0).sum(0))
        total += script.batch_loss({"a": logits[0][rows], "b": logits[1][rows]}, batch)
    assert total.item() == pytest.approx(sum(losses).item(), abs=1e-5)


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


def test_evaluation(data, group):
    """Each set once, without dropout. The loss is the sum of the tasks' means over the sets that
    have a label."""
    ids = data.part("train")[::-1].copy()
    labels = torch.from_numpy(data.labels[ids])
    assert (labels[:, 1] < 0).any()
    model = script.CausalSetNet(arguments(*SMALL, "--dropout=0.5"), CLASSES)
    whole = data.make_batch(ids, ids)
    outputs = model.eval()(whole)
    assert not torch.allclose(model.train()(whole)["cls"], outputs["cls"])
    seen = []
    model.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0].sizes)))
    metrics, logp = script.evaluate(model, data, ids, arguments("--batch_size=7"), CPU)
    assert model.training
    assert max(seen) <= script.EVAL_BATCH_SIZE and sum(seen) == len(ids)
    losses = []
    for (task, output), own in zip(outputs.items(), labels.T, strict=True):
        assert np.allclose(logp[task], output.log_softmax(1).detach(), rtol=0, atol=1e-5)
        losses.append(F.cross_entropy(output, own, ignore_index=-1).item())
    assert metrics["loss"] == pytest.approx(sum(losses), abs=1e-5)
    assert metrics["dim/loss"] == pytest.approx(losses[1], abs=1e-5)


PATIENCE = {  # options of early stopping, as in the original; metrics until the epoch that ends it
    "loss --patience 2": [[5], [4], [4], [3], [3], [3]],
    "loss --patience 2 --grace 4": [[5], [5], [5], [5], [5], [5]],
    "cls/f1_macro --patience 1 --delta 1": [[1], [3], [6], [7]],
    "loss cls/f1_macro --patience 2": [[5, 1], [6, 2], [5, 2], [5, 2]],
    # one metric that gets better alone keeps its old best value: then 4 is better than 5, too
    "loss cls/f1_macro --patience 2 --stop_mode all": [[5, 1], [3, 1], [4, 2], [3, 2], [2, 2]],
}


@pytest.mark.parametrize(("options", "epochs"), PATIENCE.items())
def test_patience(options, epochs):
    """The best epoch needs no --delta: weights that are better by less are better still."""
    args = arguments("--stop_metrics", *options.split())
    loop = {"best_values": {}, "best": {}, "waited": 0}
    for loop["step"], values in enumerate(epochs):
        assert not script.is_stopped_early(loop, args)
        metrics = dict(zip(args.stop_metrics, values, strict=True))
        script.count_waiting(loop, metrics, loop["step"], args)
        script.is_best(loop, metrics, args)
    assert script.is_stopped_early(loop, args)
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
        with pytest.raises(script.InputError, match="--split"):
            script.split_sets(first, shares, 0)


@pytest.mark.parametrize("part", ["train", "valid", "test"])
def test_a_part_without_a_label_or_a_class(causal_sets, data, tmp_path, caplog, part):
    """The first is refused before training, the other is said."""
    arrays = dict(np.load(causal_sets))
    arrays["cls"][data.part(part)] = "mink2"
    arrays["dim"][data.part(part)] = -1
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(script.InputError, match=f"dim.* {part}"):
        load(tmp_path / "a.npz", "--tasks", "cls", "dim")
    assert f"5 of the 6 classes of cls are not in {part}" in caplog.text


def test_baselines(causal_sets):
    data = load(causal_sets, "--tasks", "cls", "dim", "manifold")
    found = script.measure_baselines(data)
    for column, task in enumerate(data.classes):
        labels = data.labels[:, column]
        seen = labels[(labels >= 0) & (data.split == 0)]
        tested = labels[(labels >= 0) & (data.split == 2)]
        assert found[task]["majority"] == np.mean(tested == np.bincount(seen).argmax())
    assert found["cls"]["logistic regression"] > 0.3
    assert found["dim"]["Myrheim-Meyer"] > 0.5

    # where nothing is known of dimensions but their names, and of one class nothing can be learnt
    data.classes["dim"] = ["two", "three", "four"]
    data.labels = np.where(data.split[:, None] == 0, 1, data.labels)
    assert [*script.measure_baselines(data)["dim"]] == ["majority"]


def test_tasks_and_metrics_that_are_refused():
    with pytest.raises(script.InputError, match="--tasks: one is given twice"):
        arguments("--tasks", "cls", "cls")
    with pytest.raises(script.InputError, match="--stop_metrics: one is given twice"):
        arguments("--stop_metrics", "loss", "loss")  # with --stop_mode all none would be a gain
    with pytest.raises(script.InputError, match="--stop_metrics dim/loss"):
        arguments("--stop_metrics=dim/loss")


def test_section_parallel_of_the_original(tmp_path, monkeypatch):
    """world_size, master_addr and master_port hold where no launcher has said them."""
    monkeypatch.setenv("MASTER_PORT", "23456")
    monkeypatch.setenv("MASTER_ADDR", "")  # some shells export empty ones
    text = "parallel: {world_size: 3, backend: gloo, master_addr: localhost, master_port: '12355'}"
    (tmp_path / "c.yaml").write_text(text)
    args = arguments("--config", f"{tmp_path}/c.yaml")
    assert (args.nproc_per_node, args.backend) == (3, "gloo")
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("localhost", "23456")


# --------------------------------------------------------------------------------------------------
# Runs


def run(path, out, *options, **more):
    """What a run says."""
    folders = [f"--data={path}", f"--output_dir={out}", f"--cache_dir={path.parent}/cache"]
    return call_script("run_train_quantumgrav_ddp", *folders, *SMALL, *options, **more)


def test_a_run_learns_and_says_so(causal_sets, tmp_path):
    """Better than the commonest class; the figures are those of the predictions."""
    out = tmp_path / "out"
    run(causal_sets, out, "--num_epochs=10", "--lr=1e-2", "--batch_size=15", "--seed=0")
    summary = Run(out).summary
    data = load(causal_sets)
    assert summary["baselines"] == script.measure_baselines(data)
    found = summary["test"]
    assert found["cls/accuracy"] > summary["baselines"]["cls"]["majority"] + 0.1

    predictions = np.load(out / "predictions.npz")
    ids = data.part("test")
    labels = data.labels[ids, 0]
    assert np.array_equal(predictions["ids"], ids)
    assert np.array_equal(predictions["labels"][:, 0], labels)
    logp = predictions["logp_cls"]
    assert np.allclose(np.exp(logp).sum(1), 1)
    assert found["cls/accuracy"] == (logp.argmax(1) == labels).mean()
    assert found["loss"] == pytest.approx(-logp[np.arange(len(logp)), labels].mean())


def test_early_stopping_and_a_network_that_learns_nothing(causal_sets, tmp_path):
    """The run is finished, with its test and a warning; also without messages, for several tasks,
    and with the largest seed."""
    options = f"--messages=none --tasks cls dim --seed={2**32} --lr=0 --num_epochs=9".split()
    said = run(causal_sets, tmp_path / "out", *options, "--patience=2", "--grace=1")
    assert "no gain in 2 epochs" in said
    for task in ("cls", "dim"):
        assert f"WARNING: {task}: the network is worse than what needs no network" in said
        assert (tmp_path / "out" / f"confusion_{task}.png").exists()
    summary = Run(tmp_path / "out").summary
    assert summary["steps"] == 3 * (180 // 64) and summary["best"]["step"] == 180 // 64


def test_a_validation_loss_that_is_no_number_ends_the_run(causal_sets, tmp_path):
    said = run(causal_sets, tmp_path / "out", "--lr=1e30", status=1)
    assert "RuntimeError: the validation loss is nan" in said
    assert not (tmp_path / "out" / "best.pt").exists()


def test_confusion_of_a_class_that_looks_like_a_formula(tmp_path):
    labels = np.zeros((9, 1), np.int64)
    sets = SimpleNamespace(classes={"cls": ["$\\fracx$", "b"]}, labels=labels)
    args = arguments(f"--output_dir={tmp_path}")
    script.save_predictions(args, sets, labels[:, 0], {"cls": np.zeros((9, 2))})
    assert (tmp_path / "confusion_cls.png").exists()
