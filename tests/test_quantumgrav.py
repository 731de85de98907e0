"""run_train_quantumgrav_ddp.py: known answers, and what a user sees of a run."""

import copy
import json
import math
import os
import shutil
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from helpers import call_script, parse_arguments, write_causal_sets
from torch import nn

import run_train_quantumgrav_ddp as script

SMALL = "--hidden_dim=16 --head_dim=8 --num_layers=2 --device=cpu".split()
CLASSES = {"cls": list("abcdef"), "dim": list("234")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """240 small causal sets of six kinds, as the tool makes them."""
    out = tmp_path_factory.mktemp("data") / "sets"
    write_causal_sets(out, "--samples=240", "--min_size=8", "--max_size=16")
    return out


arguments = partial(parse_arguments, script)


def load(folder):
    return script.CausalSets(folder, ["cls", "dim"], [0, 1, 2, 3])


# --------------------------------------------------------------------------------------------------
# Network


def dense_network(model, args, batch):
    """What `model`, in float64, makes of a batch, by its formulas, with dense matrices."""
    past = torch.zeros(len(batch.features), len(batch.features), dtype=torch.float64)
    later = torch.repeat_interleave(batch.past_degree.long())
    past[later, batch.past.long()] = 1
    matrices = []
    for matrix in [past, past.T][: model.directions]:
        degree = matrix.sum(1, keepdim=True)
        if args.messages == "mean":
            matrix = matrix / degree.clamp(min=1)
        elif args.messages == "gcn":
            matrix = (matrix + torch.eye(len(matrix))) / ((degree + 1) * (degree.T + 1)).sqrt()
        matrices.append(matrix)

    x = batch.features.double()
    for layer in model.layers:
        parts = [matrix @ x for matrix in matrices]
        if args.messages != "gcn":
            parts.append(x)
        y = layer.norm(layer.linear(torch.cat(parts, dim=1))).relu()
        x = y + layer.skip(x) if args.skip else y

    pooled = []
    for rows in x.split(batch.sizes.tolist()):
        kinds = {"mean": rows.mean(0), "max": rows.amax(0), "sum": rows.sum(0)}
        size = torch.tensor([math.log(len(rows))])
        pooled.append(torch.cat([kinds[name] for name in args.pooling] + [size]))
    x = model.norm(torch.stack(pooled))
    return {task: head(x) for task, head in model.heads.items()}


MODELS = {
    "mean": [],
    "gcn": ["--messages=gcn", "--pooling", "sum", "max"],
    "none": ["--messages=none"],
    "one way": ["--messages=sum", "--bidirectional=no", "--skip=no", "--pooling", "max"],
}


@pytest.mark.parametrize("messages", ["sparse product", "index_add"])  # on CPUs; elsewhere
@pytest.mark.parametrize("name", MODELS)
def test_network_and_gradient_against_dense_matrices(folder, monkeypatch, name, messages):
    """Sets do not see each other. Elements that tie share the gradient of a maximum, as those of
    torch.amax do (without --skip many are 0)."""
    if messages == "index_add":
        monkeypatch.setattr(script, "sparse_matrix", lambda *args: None)
    args = arguments(*SMALL, *MODELS[name])
    torch.manual_seed(0)
    model = script.CausalSetNet(args, CLASSES)
    with torch.no_grad():
        for p in model.parameters():  # norms and biases are not what they start as
            p.add_(0.1 * torch.randn(p.shape))
    dense = copy.deepcopy(model).double()

    batch = load(folder)[np.array([4, 40, 11, 0, 23]), np.arange(5)]
    found = model(batch)
    expected = dense_network(dense, args, batch)
    for task, logits in expected.items():
        assert torch.allclose(found[task].double(), logits, rtol=1e-4, atol=1e-4)
        gradient = torch.randn(logits.shape)
        found[task].backward(gradient, retain_graph=True)
        logits.backward(gradient.double(), retain_graph=True)
    for p, q in zip(model.parameters(), dense.parameters(), strict=True):
        assert torch.allclose(p.grad.double(), q.grad, rtol=1e-3, atol=1e-3)


def test_dropout():
    """Each element by itself, with this probability; the others grow so that the mean stays."""
    torch.manual_seed(1)
    found = script.dropout(torch.ones(401, 501), 0.3)
    kept = (found > 0).double()
    assert torch.allclose(found, (kept / 0.7).float())
    deviation = (0.21 / kept.numel()) ** 0.5
    assert abs(kept.mean() - 0.7) < 5 * deviation
    flat = kept.flatten()
    for shift in (1, 2, 3, 4, 501):
        assert abs((flat[shift:] * flat[:-shift]).mean() - 0.49) < 5 * deviation

    layer = script.MessageLayer(4, 0, arguments(*SMALL, "--messages=none", "--dropout=0.5"))
    x = torch.randn(50, 4)
    assert (layer(x, []) == 0).float().mean() > 0.3
    assert torch.equal(layer.eval()(x, []), layer(x, []))


# --------------------------------------------------------------------------------------------------
# Loss and metrics


def test_shares_of_the_loss_add_up_to_the_mean():
    """With missing labels; and so do their gradients."""
    torch.manual_seed(0)
    labels = torch.randint(-1, 3, (11, 2))
    labels[3:8, 1] = -1  # a whole part may have no label of a task
    logits = {"a": torch.randn(11, 3).double(), "b": torch.randn(11, 4).double()}
    expected = 0.0
    for column, x in enumerate(logits.values()):
        x.requires_grad_()
        expected = expected + F.cross_entropy(x, labels[:, column], ignore_index=-1)
    gradients = torch.autograd.grad(expected, [*logits.values()])

    total = 0.0
    for rows in torch.arange(11).tensor_split(5):
        batch = SimpleNamespace(labels=labels[rows], counts=(labels >= 0).sum(0))
        share = script.share_of_loss({task: x[rows] for task, x in logits.items()}, batch)
        share.backward()
        total += share.item()
    assert total == pytest.approx(expected.item(), abs=1e-12)
    for x, gradient in zip(logits.values(), gradients, strict=True):
        assert torch.allclose(x.grad, gradient, atol=1e-12)


def test_metrics_by_hand():
    """With bins of 1/15: two sets at 0.91, two at 0.95 and 1, two at 0.68 and 0.72, one at 0.6."""
    confidence = np.array([0.91, 0.91, 0.95, 1.0, 0.68, 0.72, 0.6])
    logp = np.log(np.maximum(np.stack([confidence, 1 - confidence], axis=1), 1e-300))
    found = script.classification(logp, np.array([0, 1, 0, 0, 0, 1, 0]))
    gaps = [abs(1 - 2 * 0.91), 2 - 0.95 - 1.0, abs(1 - 0.68 - 0.72), 1 - 0.6]
    assert found["ece"] == pytest.approx(sum(gaps) / 7)
    f1 = 2 * 5 / (7 + 5)  # of the class that is always guessed; the other's is 0
    assert found["f1_macro"] == pytest.approx(f1 / 2)
    assert found["f1_weighted"] == pytest.approx(f1 * 5 / 7)


def test_evaluation_of_two_tasks():
    """The loss is the sum of the tasks' means over the labelled sets; its error that of a mean."""
    rng = np.random.default_rng(3)
    logp = {}
    for task, names in CLASSES.items():
        logits = torch.tensor(2 * rng.normal(size=(40, len(names))))
        logp[task] = logits.log_softmax(1).numpy()
    labels = np.stack([rng.integers(0, 6, 50), rng.integers(-1, 3, 50)], axis=1)
    ids = np.arange(5, 45)
    found = script.evaluate(logp, SimpleNamespace(classes=CLASSES, labels=labels), ids)
    known = labels[ids, 1] >= 0
    first = -logp["cls"][np.arange(40), labels[ids, 0]]
    second = -logp["dim"][known, labels[ids, 1][known]]
    assert found["loss"] == pytest.approx(first.mean() + second.mean())
    assert found["dim/loss"] == pytest.approx(second.mean())
    assert found["dim/accuracy"] == (logp["dim"].argmax(1) == labels[ids, 1])[known].mean()

    samples = rng.integers(0, 40, (4000, 40))  # the error against a bootstrap
    both = np.zeros((40, 2))
    both[known, 0] = second
    both[:, 1] = known
    sums = both[samples].sum(1)
    means = first[samples].mean(1) + sums[:, 0] / sums[:, 1]
    assert found["loss_se"] == pytest.approx(means.std(), rel=0.1)


# --------------------------------------------------------------------------------------------------
# Decisions


PATIENCE = [  # options of early stopping, as in the original; metrics until the epoch that ends it
    ("--stop_metrics loss --patience 2", [[5], [4], [4], [3], [3], [3]]),
    ("--stop_metrics loss --patience 2 --grace 4", [[5], [5], [5], [5], [5], [5]]),
    ("--stop_metrics cls/f1_macro --patience 1 --delta 1", [[1], [3], [6], [7]]),
    ("--stop_metrics cls/f1_macro --patience 2", [[1], [math.nan], [2], [math.nan], [2]]),
    (
        "--stop_metrics loss cls/f1_macro --patience 2",
        [[5, 1], [5, 2], [5, 2], [4, 2], [4, 2], [4, 2]],
    ),
    # one metric that gets better alone keeps its old best value: then 4 is better than 5, too
    (
        "--stop_metrics loss cls/f1_macro --patience 3 --stop_mode all",
        [[5, 1], [3, 1], [4, 1], [4, 2], [3, 2], [2, 2], [1, 2]],
    ),
]


@pytest.mark.parametrize(("options", "epochs"), PATIENCE)
def test_patience(options, epochs):
    args = arguments(*options.split())
    loop = {"step": 0, "validated": 0, "patience": {"best": {}, "waited": 0}}
    for loop["validated"], values in enumerate(epochs, start=1):
        assert not script.is_done(loop, args, 100)
        script.count_patience(loop, dict(zip(args.stop_metrics, values, strict=True)), args)
    assert script.is_done(loop, args, 100)


def test_without_patience_the_steps_end_it():
    loop = {"step": 9, "patience": {"waited": 9}}
    assert not script.is_done(loop, arguments("--patience=0"), 10)
    assert script.is_done(loop, arguments("--patience=0"), 9)


def test_the_best_epoch_needs_no_delta():
    """--delta is for patience: weights that are better by less are better still."""
    loop = {"best": None, "step": 0}
    args = arguments("--delta=0.5", "--stop_metrics", "cls/f1_macro", "loss")
    scores = [(math.nan, False), (0.1, True), (0.2, True), (0.15, False), (math.nan, False)]
    for loop["step"], (score, is_best) in enumerate(scores):
        metrics = {"loss": 1.0, "cls/f1_macro": score}
        assert script.is_best(loop, metrics, args) == is_best
    assert loop["best"] == {"metric": "cls/f1_macro", "value": 0.2, "better": "higher", "step": 2}


def test_a_validation_that_is_no_number_is_never_the_best(group, monkeypatch):
    """No metric fails before the line that says so."""
    labels = np.array([[0], [1], [2], [0]])
    classes = {"cls": list("abc")}
    data = SimpleNamespace(part=lambda name: np.arange(4), labels=labels, classes=classes)
    log = SimpleNamespace(write=lambda row: None)
    monkeypatch.setattr(script, "predict", lambda *args: {"cls": np.full((4, 3), np.nan)})
    with pytest.raises(script.RunError, match="the validation loss is nan: lower --lr"):
        script.validate(None, None, data, None, {"step": 9, "validated": 0}, None, log)


def test_learning_rates():
    def factors(steps, *options):
        args = arguments(*options)
        return [script.lr_factor(args, step, steps) for step in range(steps)]

    fall = [1.0, 0.5 + 0.5 * math.cos(math.pi / 3), 0.5 + 0.5 * math.cos(2 * math.pi / 3)]
    rise = [0.04 + 0.48 * (1 - math.cos(math.pi / 4)), 0.52, 1 - 0.48 * (1 - math.cos(math.pi / 4))]
    assert factors(6, "--warmup=0.5") == pytest.approx(rise + fall)
    assert factors(3, "--schedule=constant") == [1.0] * 3
    for steps in (1, 2, 50):
        for warmup in ("0", "0.3", "0.99"):
            assert all(0 < factor <= 1 for factor in factors(steps, f"--warmup={warmup}"))


# --------------------------------------------------------------------------------------------------
# Data


def test_a_batch_against_its_sets_one_by_one(folder):
    """Any sets in any order, one of them twice."""
    data = load(folder)
    raw = {path.stem: np.load(path) for path in folder.glob("*.npy")}
    ids = [5, 100, 7, 239, 7]
    batch = data[np.array(ids), np.arange(50)]
    first = 0
    pieces = {name: [] for name in ("features", "past", "past_degree", "future", "future_degree")}

    for i in ids:
        nodes = slice(raw["node_ptr"][i], raw["node_ptr"][i + 1])
        edges = slice(raw["edge_ptr"][i], raw["edge_ptr"][i + 1])
        pieces["features"].append(np.log1p(raw["features"][nodes, :4]))
        for name in ("past", "future"):
            pieces[name].append(raw[name][edges] + first)
            pieces[f"{name}_degree"].append(raw[f"{name}_degree"][nodes])
        first += nodes.stop - nodes.start

    for name, expected in pieces.items():
        assert np.allclose(getattr(batch, name), np.concatenate(expected)), name
    assert batch.sizes.tolist() == [len(rows) for rows in pieces["features"]]
    assert np.array_equal(batch.labels, raw["labels"][ids, :2])
    assert batch.counts.tolist() == (raw["labels"][:50, :2] >= 0).sum(0).tolist()


def test_evaluation_in_batches_of_any_size(folder, group):
    """Each set once; no batch costs more than --eval_edges and one set; the same predictions."""
    data = load(folder)
    ids = data.part("train")[::-1].copy()
    model = script.CausalSetNet(arguments(*SMALL), CLASSES)
    seen = []
    model.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    guard = SimpleNamespace(agree=lambda: "")
    results = []
    for edges in (1, 200, 10**6):
        seen.clear()
        args = arguments(f"--eval_edges={edges}")
        results.append(script.predict(model, data, ids, args, torch.device("cpu"), guard))
        costs = [len(batch.features) + len(batch.past) for batch in seen]
        assert max(costs) <= edges + data.cost.max()
        assert sum(costs) == data.cost[ids].sum()
        for task in CLASSES:
            assert np.allclose(results[-1][task], results[0][task], rtol=0, atol=1e-6)


def test_what_the_data_lack(folder, tmp_path):
    with pytest.raises(script.InputError, match="--tasks cls spin.*has cls, dim, manifold"):
        script.CausalSets(folder, ["cls", "spin"], [0])

    copy = shutil.copytree(folder, tmp_path / "copy")
    labels = np.load(copy / "labels.npy")
    labels[np.load(copy / "split.npy") == 1, 1] = -1
    np.save(copy / "labels.npy", labels)
    with pytest.raises(script.InputError, match="no label in the valid part"):
        script.CausalSets(copy, ["cls", "dim"], [0])
    with pytest.raises(script.InputError, match="labels.npy is missing or damaged: remove .*copy"):
        script.check_data(copy)
    assert script.check_data(folder) == load(folder).hash


# --------------------------------------------------------------------------------------------------
# Options


REFUSED = {  # on the command line, or in a file
    "--learning_rat=1": "no option learning_rat: --help lists them",  # nothing is similar
    "--hidden_dim=0": "below 1",
    "--dropout=1": "--dropout 1.0: must be from 0 to below 1",
    "--stop_metrics=dim/loss": "--stop_metrics dim/loss",
    "--config=nowhere.yaml": "nowhere.yaml",
    "--max_grad_norm=-1": "must not be below 0",  # it would turn the gradient round
    "model: {hiden_dim: 3}": "model.hiden_dim: did you mean hidden_dim?",
    "model: [hidden_dim": "c.yaml",
    "- hidden_dim": "lines such as",
    "parallel: {rank: 0}": "the launcher and DDP choose",
}


@pytest.mark.parametrize("words", REFUSED)
def test_options_that_cannot_be(tmp_path, words):
    (tmp_path / "c.yaml").write_text(words)
    option = words if words.startswith("--") else f"--config={tmp_path}/c.yaml"
    with pytest.raises(script.InputError) as caught:
        arguments(option)
    assert REFUSED[words] in str(caught.value) and "\n" not in str(caught.value)


def test_the_time_limit_of_the_environment(monkeypatch):
    monkeypatch.setenv("NCCL_TIMEOUT", "7200")
    assert arguments().timeout_minutes == 120
    assert arguments("--timeout_minutes=5").timeout_minutes == 5
    monkeypatch.setenv("NCCL_TIMEOUT", "2h")
    with pytest.raises(script.InputError, match="NCCL_TIMEOUT=2h .*: must be a number of seconds"):
        arguments()


def test_section_parallel_of_the_original(tmp_path, monkeypatch):
    """master_addr and master_port hold where no launcher has said them."""
    monkeypatch.setenv("MASTER_PORT", "23456")
    parallel = {"world_size": 3, "rank": None, "backend": "gloo", "master_addr": "localhost"}
    parallel.update(master_port="12355", output_device=None, find_unused_parameters=True)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"parallel": parallel}))
    args = arguments("--config", f"{tmp_path}/c.yaml")
    assert (args.nproc_per_node, args.backend, args.find_unused_parameters) == (3, "gloo", True)
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("localhost", "23456")


def test_the_file_may_be_given_in_each_way(tmp_path):
    (tmp_path / "c.yaml").write_text("lr: 0.5")
    path = f"{tmp_path}/c.yaml"
    for words in ([path], ["--config", path], ["--seed=1", f"--config={path}"], [f"config={path}"]):
        assert arguments(*words).lr == 0.5
    assert arguments(f"--config={path}", "--lr=2").lr == 2


def test_a_device_for_each_process(monkeypatch):
    """Three processes on one GPU are refused, unless their launcher shows each a GPU of its own."""
    accelerator = SimpleNamespace(
        device_count=lambda: 1,
        current_accelerator=lambda check_available: torch.device("cuda"),
        set_device_index=lambda index: None,
    )
    monkeypatch.setattr(torch, "accelerator", accelerator)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    args = SimpleNamespace(device="auto")
    gpu = torch.device("cuda", 0)

    assert script.choose_device(args, 2) == gpu
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")  # torchrun shows all GPUs to all
    assert script.choose_device(args, 0) == gpu
    with pytest.raises(script.InputError, match="local rank 2, but 1 devices.*--device cpu"):
        script.choose_device(args, 2)
    assert script.choose_device(SimpleNamespace(device="cpu"), 2) == torch.device("cpu")
    with pytest.raises(script.InputError, match="--device xpu"):
        script.choose_device(SimpleNamespace(device="xpu"), 0)


@pytest.mark.parametrize(("limit", "expected"), [(0, 5.0), (1, 1.0)])
def test_clipping(group, limit, expected):
    """0 means none."""
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=True)
    args = SimpleNamespace(max_minutes=0, max_grad_norm=limit)
    guard = script.StepGuard(args, torch.device("cpu"))
    assert guard.update(optimizer, torch.amp.GradScaler("cpu", enabled=False)) == 5
    assert parameter.norm().item() == pytest.approx(expected)


def test_lines_of_a_run_without_a_checkpoint_go(group, tmp_path):
    """It starts again from step 1, and makes them again."""
    args = SimpleNamespace(output_dir=str(tmp_path), wandb_mode="disabled")
    script.RunLog(args, None).write({"step": 1, "loss": 2.0})
    log = script.RunLog(args, None)
    assert log.size() == 0
    log.write({"step": 1, "loss": 3.0})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": 3.0}\n'


# --------------------------------------------------------------------------------------------------
# Runs


def run(folder, out, *options, status=0):
    """What a run says."""
    options = [f"--data={folder}", f"--output_dir={out}", *SMALL, *options]
    found, text = call_script("run_train_quantumgrav_ddp", *options)
    assert found == status, text[-3000:]
    return text


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    """(folder of a run, its options)"""
    out = tmp_path_factory.mktemp("runs")
    (out / "c.yaml").write_text("optimization: {num_epochs: 20, lr: 1e-2}\nbatch_size: 15\nseed: 0")
    options = ["--config", f"{out}/c.yaml"]
    run(folder, out / "first", *options)
    return out / "first", options


def test_a_run_learns_and_says_so(folder, trained):
    """Better than the commonest class; the figures are those of the predictions."""
    out = trained[0]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["steps"] == 20 * 180 // 15
    baselines = json.loads((folder / "baselines.json").read_text())
    assert summary["baselines"] == {"cls": baselines["cls"]}
    found = summary["test"]
    assert found["cls/accuracy"] > baselines["cls"]["majority"] + 0.1

    predictions = np.load(out / "predictions.npz")
    assert np.array_equal(predictions["ids"], np.flatnonzero(np.load(folder / "split.npy") == 2))
    labels = np.load(folder / "labels.npy")[predictions["ids"], :1]
    assert np.array_equal(predictions["labels"], labels)
    logp = predictions["logp_cls"]
    assert np.allclose(np.exp(logp).sum(1), 1)
    assert found["cls/accuracy"] == (logp.argmax(1) == labels[:, 0]).mean()
    assert found["loss"] == pytest.approx(-logp[np.arange(len(logp)), labels[:, 0]].mean())

    for name in ("curves.png", "confusion_cls.png"):
        assert (out / name).read_bytes()[1:4] == b"PNG"


def test_a_finished_run_given_again_keeps_its_options(folder, trained, tmp_path):
    """With another --lr, the summary keeps the one that it was trained with. The file of the best
    epoch is of another one: a full disk may have kept it from being written."""
    out = shutil.copytree(trained[0], tmp_path / "copy")
    torch.save({**torch.load(out / "best.pt", weights_only=True), "step": 1}, out / "best.pt")
    said = run(folder, out, *trained[1], "--lr=5")
    assert "nothing is left to train" in said
    assert "WARNING" in said and "not of the best epoch" in said
    assert json.loads((out / "summary.json").read_text())["args"]["lr"] == 1e-2


def test_another_network_is_refused(folder, trained):
    """Also where its weights fit."""
    said = run(folder, trained[0], *trained[1], "--messages=sum", status=2)
    assert "--messages: this run was started with mean" in said


def test_a_full_disk_does_not_fail_a_run_that_is_over(folder, tmp_path, caplog):
    args = arguments(f"--data={folder}", f"--output_dir={tmp_path / 'missing'}")
    data = script.CausalSets(folder, ["cls"], [0])
    ids = data.part("test")
    logp = {"cls": np.log(np.full((len(ids), 6), 1 / 6))}
    found = script.report(args, data, ids, logp)
    assert found["test"]["loss"] == pytest.approx(math.log(6))
    assert "no predictions.npz" in caplog.text


def test_a_network_that_learns_nothing_is_a_warning(folder, tmp_path):
    """Also without messages, for several tasks, and with the largest seed."""
    options = f"--num_epochs=1 --lr=0 --messages=none --tasks cls dim --seed={2**32 - 1}".split()
    said = run(folder, tmp_path / "out", *options)
    for task in ("cls", "dim"):
        assert f"WARNING: {task}: the network is worse than what needs no network" in said
    assert (tmp_path / "out" / "confusion_dim.png").exists()
