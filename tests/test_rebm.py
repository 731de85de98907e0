"""run_train_rebm_ddp.py: known answers, and what a user sees of a run. How it reads images:
test_rebm_images.py. Its tools: test_rebm_tools.py."""

import copy
import re
import shutil
from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT, call_script, parse_arguments, run_here, write_digits
from runs import Run, differences

import run_train_rebm_ddp as script

CPU = torch.device("cpu")
SMALL = """--width=4 attack.max_steps=2 attack.step_size=0.3 indist_attack_clf.max_steps=1
    --at_epochs=2 --total_epochs=2 --at_lr=1e-2 --optimizer=adamw --lr=3e-3 --AUC_th=0.6 --ema=0.9
    --min_imgs_per_threshold=48 --global_batch_size=24 --batch_size=12 --log_every=1
    --n_imgs_per_evaluation_log=0 --device=cpu""".split()

arguments = partial(parse_arguments, script)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    path = tmp_path_factory.mktemp("rebm") / "digits.npz"
    write_digits(path, 200, 40)
    return path


def small(digits, *options):
    """The options of a run of a second: 14 steps of each stage."""
    return [f"--data={digits}", f"--cache_dir={digits.parent}/cache", *SMALL, *options]


def small_network(*options, classes=10):
    args = arguments("--width=4", *options)
    torch.manual_seed(0)
    return args, script.make_network(args, classes, 1, 8)


def read_digits(digits, *options):
    """(arguments, images, OOD images)"""
    args = arguments(*small(digits, *options))
    folder = script.prepare(args, args.data)
    outside = script.prepare(args, args.outdist_data, folder)
    return args, script.Images(folder), script.Images(outside)


# --------------------------------------------------------------------------------------------------
# Networks

NETWORKS = {  # parameters as published
    "WideResNet28x2": 1_467_610,
    "WideResNet28x10": 36_479_194,
    "WideResNet34x10": 46_160_474,
    "WideResNet70x16": 266_796_506,
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_are_the_published_ones(name):
    args = arguments(f"model.model_type={name}")
    with torch.device("meta"):
        model = script.make_network(args, 10, 3, 32)
    assert sum(p.numel() for p in model.parameters()) == NETWORKS[name]
    assert model(torch.zeros(2, 3, 32, 32, device="meta")).shape == (2, 10)


def plain_wide_resnet(weights, x, depth, factor):
    """Zagoruyko and Komodakis' network, written down as a function of its weights by name."""

    def norm(x, name):
        names = ("running_mean", "running_var", "weight", "bias")
        return F.relu(F.batch_norm(x, *[weights[f"{name}.{part}"] for part in names]))

    mean = torch.tensor([0.4913997551666284, 0.48215855929893703, 0.4465309133731618])
    deviation = torch.tensor([0.24703225141799082, 0.24348516474564, 0.26158783926049628])
    x = (x - mean.view(3, 1, 1)) / deviation.view(3, 1, 1)
    x = F.conv2d(x, weights["conv1.weight"], padding=1)
    for group in (1, 2, 3):
        for number in range((depth - 4) // 6):
            name = f"block{group}.layer.{number}"
            stride = 2 if group > 1 and number == 0 else 1
            y = norm(x, f"{name}.bn1")
            if f"{name}.convShortcut.weight" in weights:
                x = F.conv2d(y, weights[f"{name}.convShortcut.weight"], stride=stride)
            y = F.conv2d(y, weights[f"{name}.conv1.weight"], stride=stride, padding=1)
            y = norm(y, f"{name}.bn2")
            x = x + F.conv2d(y, weights[f"{name}.conv2.weight"], padding=1)
    x = F.avg_pool2d(norm(x, "bn1"), 8).flatten(1)
    return F.linear(x, weights["fc.weight"], weights["fc.bias"])


def test_wide_resnet_is_that_of_its_authors():
    torch.manual_seed(0)
    model = script.make_network(arguments("model_type=WideResNet28x2"), 10, 3, 32).eval()
    for name, tensor in model.state_dict().items():
        if "running" in name or "bn" in name and tensor.is_floating_point():
            tensor.copy_(torch.rand_like(tensor) + 0.5)
    x = torch.rand(4, 3, 32, 32)
    with torch.no_grad():
        expected = plain_wide_resnet(model.state_dict(), x, 28, 2)
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)


def test_batch_normalisation_that_is_frozen():
    """Its statistics stay, its weights get gradients; also what GPUs get in its place."""
    _, model = small_network("--norm=batch")
    model.is_frozen = True
    before = {name: t.clone() for name, t in model.train().state_dict().items()}
    model(torch.rand(6, 1, 8, 8)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert not differences(before, model.state_dict())
    model.is_frozen = False
    model.train()(torch.rand(6, 1, 8, 8))
    assert differences(before, model.state_dict())
    other = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    other.is_frozen = True
    assert [layer.training for layer in script.batch_norms(other.train())] == [False] * 4
    script.load_weights(other, before, "x")


@pytest.mark.parametrize("backend, has_them", [("auto", True), ("gloo", False)])
def test_batch_normalisation_on_gpus(backend, has_them):
    """Over all ranks, except with gloo, which cannot do what that needs."""
    inside = SimpleNamespace(classes=["a", "b"], shape=(1, 8))
    args = arguments("--width=4", "--norm=batch", f"--backend={backend}")
    model = script.start_network(args, torch.device("meta"), inside, None)
    found = {isinstance(layer, torch.nn.SyncBatchNorm) for layer in script.batch_norms(model)}
    assert found == {has_them}


def test_weights_load_by_name():
    """With the prefixes of wrappers, and from the files of the original."""
    _, model = small_network("--norm=batch")
    state = {name: torch.randn(t.shape).to(t.dtype) for name, t in model.state_dict().items()}
    averaged = {f"module.module.{name}": tensor for name, tensor in state.items()}
    forms = {
        "plain": state,
        "compiled": {"model": {f"module._orig_mod.{name}": t for name, t in state.items()}},
        "ours": {"script": "run_train_rebm_ddp.py", "model": {}, "average": state},
        "original": {"ema_state_dict": {"module.n_averaged": torch.ones(()), **averaged}},
    }
    for form, content in forms.items():
        _, model = small_network("--norm=batch")
        script.load_weights(model, content, "weights.pth")
        assert not differences(state, model.state_dict()), form


def test_weights_of_another_network(tmp_path, digits):
    """Names and shapes are said, before training; also where all shapes fit in order."""
    _, model = small_network()
    _, wide = small_network("--width=8")
    other = {f"net.{i}": tensor for i, tensor in enumerate(model.state_dict().values())}
    wrong = {
        r'Missing key.*"fc.bias".* Unexpected key.*"net.0"': other,
        r"size mismatch for features.0.weight: .*\[8, 1, 3, 3\]": wide.state_dict(),
    }
    for message, content in wrong.items():
        with pytest.raises(script.InputError, match=message):
            script.load_weights(model, content, "x.pth")
    with pytest.raises(script.InputError, match="expected a checkpoint or a state_dict"):
        script.load_weights(model, {"model": [torch.zeros(1)]}, "x.pth")

    path = tmp_path / "weights.pth"
    options = small(digits, "at_epochs=0", f"ckpt_path={path}", f"--output_dir={tmp_path}/out")
    torch.save(other, path)
    assert "does not fit this network" in call_script("run_train_rebm_ddp", *options, status=2)
    for damage in (lambda: path.write_bytes(b"no file of torch"), path.unlink):
        damage()
        text = call_script("run_train_rebm_ddp", *options, status=2)
        assert text.count(": error: ") == 1
        assert "weights.pth is missing or damaged" in text


# --------------------------------------------------------------------------------------------------
# Attacks and losses


def test_an_attack_stays_in_its_ball_and_leaves_the_network(group):
    args, model = small_network("--norm=batch")
    model.train()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    net = script.Networks(args, CPU, model).twin
    x = torch.rand(20, 1, 8, 8)
    y = torch.arange(20) % 10
    for norm, eps in (("L2", 0.5), ("Linf", 0.1)):
        attack = script.Attack(net, script.cross_entropy, eps / 2, eps, norm)
        z = attack(x, y, 6)
        move = (z - x).flatten(1)
        length = move.norm(dim=1) if norm == "L2" else move.abs().amax(1)
        assert 0.3 * eps < length.max() <= eps * (1 + 1e-5)
        assert z.min() >= 0 and z.max() <= 1
        assert (
            script.cross_entropy(net(z), y).mean() > script.cross_entropy(net(x), y).mean() + 0.01
        )
    assert model.training and all(p.requires_grad and p.grad is None for p in model.parameters())
    assert not differences(before, model.state_dict())


def test_the_attacked_network_has_the_trained_weights(group):
    """And buffers, whatever becomes of them."""
    args, model = small_network("--norm=batch")
    nets = script.Networks(args, CPU, model)
    x = torch.rand(8, 1, 8, 8)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for tensor in script.tensors(model):
        tensor.data += 0.5
    assert torch.equal(nets.twin(x), model.eval()(x))
    _, other = small_network("--norm=batch")
    model.load_state_dict(other.state_dict())
    assert torch.equal(nets.twin(x), model.eval()(x))
    assert not torch.equal(nets.average(x), nets.twin(x))


def test_a_tiny_gradient_makes_a_whole_step():
    """1e-30 of a loss leads where the loss leads; no gradient nowhere, and to no NaN."""
    x = torch.full((2, 1, 2, 2), 0.5)
    weight = torch.tensor([[1.0, -2.0, 3.0, 0.5]])
    found = []
    for factor in (1.0, 1e-30, 0.0):

        def gain(logits, labels, factor=factor):
            return logits[:, 0] * factor

        def net(z):
            return (z.flatten(1) * weight).sum(1, keepdim=True)

        found.append(script.Attack(net, gain, 0.1, 9.0)(x, None, 1))
    expected = 0.1 * (weight / weight.norm()).view(1, 1, 2, 2).expand(2, -1, -1, -1)
    torch.testing.assert_close(found[0] - x, expected)
    torch.testing.assert_close(found[1], found[0])
    assert torch.equal(found[2], x)


def test_the_compiled_step_is_the_plain_one(monkeypatch):
    """With a backend that is quick. (Behind --all-faults, in test_contract.py: with the usual.)"""
    compiler = partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", compiler)
    _, model = small_network("--norm=layer")
    net = model.requires_grad_(False).eval()
    x = torch.rand(16, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    y = torch.arange(16) % 10
    plain = script.Attack(net, script.cross_entropy, 0.1, 0.5)
    compiled = script.Attack(net, script.cross_entropy, 0.1, 0.5, compiled=True)
    torch.testing.assert_close(compiled(x, y, 4), plain(x, y, 4), rtol=0, atol=2e-6)


def test_low_precision_leaves_logits_in_fp32():
    """16 bits would make ties of logits."""
    _, model = small_network("--norm=layer")
    x = torch.rand(64, 1, 8, 8)
    exact = model(x)
    args = arguments("precision=bf16")
    model.context, _ = script.choose_precision(args, CPU)
    logits = model(x)
    assert not torch.equal(logits, exact)
    torch.testing.assert_close(logits, exact, rtol=0.05, atol=0.05)
    assert len(logits[:, 0].unique()) == 64


def test_the_energy_loss_is_the_binary_cross_entropy(group):
    """Of real and attacked images, one half each; the scores are the labels' logits."""
    args, model = small_network()
    nets = script.Networks(args, CPU, model)
    attack = script.Attack(nets.twin, script.label_logit, 0.1)
    rng = torch.Generator().manual_seed(0)
    real, outside = torch.randint(0, 256, (2, 8, 1, 8, 8), generator=rng).byte()
    y = torch.arange(8) % 10
    batch = script.Batch(torch.arange(8), None, None, real, y, outside)

    def backward(losses):
        losses.mean().backward()
        return losses.detach().mean()

    loss, scores = script.real_or_fake_step(nets, attack, batch, 2, backward)
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    x = script.pixels(real)
    fake = attack(script.pixels(outside), y, 2)
    logits = torch.cat([model(x), model(fake)])
    truth = torch.cat([torch.ones(8), torch.zeros(8)])
    expected = F.binary_cross_entropy_with_logits(logits.logsumexp(1), truth)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for ours, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter.grad, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(scores.flatten(), logits.gather(1, y.repeat(2)[:, None])[:, 0])


def test_the_pooled_auc():
    """scikit-learn's, with ties and without."""
    from sklearn.metrics import roc_auc_score

    for levels in (5, 1000):
        rng = torch.Generator().manual_seed(levels)
        real = torch.randint(levels, (50,), generator=rng).float() + 1
        fake = torch.randint(levels, (70,), generator=rng).float()
        expected = roc_auc_score([1] * 50 + [0] * 70, torch.cat([real, fake]))
        assert script.auroc(real, fake) == pytest.approx(expected, abs=1e-12)


def test_the_length_of_the_attack():
    """A window of two steps, read one step late; the step whose result comes with a new T counts
    for neither."""
    args = arguments("attack.max_steps=2", "AUC_th=0.7", "min_imgs_per_threshold=6")
    length = script.AttackLength(args, 4, {})
    seen = []
    for auc in (0.9, 0.4, 0.8, 0.6, 0.9, 0.9, 0.9, 0.9, 0.9):
        length.grow(torch.tensor(round(auc * 32)))
        seen.append(length.steps)
    #  0.9, 0.4 are too few; 0.4, 0.8 too; 0.8, 0.6 are enough, which the fifth step finds
    assert seen == [0, 0, 0, 0, 1, 1, 1, 2, 2]
    # after a step that was skipped T waits until it has left the window
    length = script.AttackLength(args, 4, {})
    seen = []
    for count in (30, script.SKIPPED, 30, 30, 30):
        length.grow(torch.tensor(count))
        seen.append(length.steps)
    assert seen == [0, 0, 0, 0, 1]
    before = {"T": 1, "window": [3, 4]}
    assert script.AttackLength(args, 4, before).state() == before


def test_sgd_starts_without_momentum(group):
    """PyTorch's makes its buffers in the first step; where that is skipped they hold anything."""
    args, model = small_network("--optimizer=sgd")
    optimizer = script.make_optimizer(args, model, "dat")
    for parameter in model.parameters():
        assert not optimizer.state[parameter]["momentum_buffer"].any()


def test_the_average_of_the_weights():
    """d = min(decay, (1 + n) / (10 + n)), running statistics included, counters not."""
    _, model = small_network("--norm=batch")
    average = copy.deepcopy(model)
    before = average.state_dict()["features.1.running_var"].clone()
    for tensor in script.tensors(model):
        tensor.data += 1
    script.update_average(average, model, 0.999, 5)
    found = average.state_dict()["features.1.running_var"] - before
    torch.testing.assert_close(found, torch.full_like(found, 1 - 6 / 15))
    script.update_average(average, model, 0.0, 5)
    assert not differences(average.state_dict(), model.state_dict())


# --------------------------------------------------------------------------------------------------
# Batches


def test_draws_are_of_the_place(digits):
    """A rank draws for its own images alone, and what it draws does not depend on who else does."""
    args, inside, outside = read_digits(digits, "augm_type_generation=original")
    data = script.TrainingData(args, inside, outside, "dat")
    whole = inside.part("train")[:24]
    batch = data[5, whole, np.arange(24)]
    part = data[5, whole, np.array([3, 20])]
    for own, all_of_them in zip(part, batch, strict=True):
        assert torch.equal(own, all_of_them[[3, 20]])
    later = data[6, whole, np.arange(24)]
    for name in ("x", "real", "real_y", "outside"):
        assert not torch.equal(getattr(batch, name), getattr(later, name))
    # real images are drawn anew, from the training part
    args.augm_type_generation = "none"
    batch = data[5, whole, np.arange(24)]
    assert not torch.equal(batch.real_y, batch.y)
    for source, found in ((inside, batch.real), (outside, batch.outside)):
        shown = {image.tobytes() for image in source.images[source.part("train")]}
        assert {image.numpy().tobytes() for image in found} <= shown


# --------------------------------------------------------------------------------------------------
# Runs


def test_one_process(digits, tmp_path, server):
    """Is warned that a launcher started no more; use_ddp=False refuses several."""
    options = small(digits, "total_epochs=0")
    run = server.run("run_train_rebm_ddp", options, tmp_path / "one", 1)
    assert run.statuses == [0], run.text[-3000:]
    assert run.text.count("WARNING: DDP with one process only") == 1
    options.append("--use_ddp=False")
    refused = server.run("run_train_rebm_ddp", options, tmp_path / "two", 2).refusal()
    assert "use_ddp False is one process, 2 were started" in refused


def test_batch_normalisation_is_said(digits, tmp_path, server):
    """On CPUs each rank normalises by its own images; but all ranks have one network. A skipped
    step leaves the statistics as they were."""
    options = small(digits, "--norm=batch")
    bad = [[0, 1, "nan", 9], [0, 3, "sound", 0]]  # from step 2 to step 3
    one_stage = [*options, "--total_epochs=0"]
    run = server.run("run_train_rebm_ddp", one_stage, tmp_path / "out", 2, bad)
    assert run.statuses == [0, 0], run.text[-3000:]
    assert run.state["model"]["features.1.num_batches_tracked"] == run.step - 2
    run = server.run("run_train_rebm_ddp", options, tmp_path / "out", 2)
    assert run.statuses == [0, 0], run.text[-3000:]
    said = "batch normalisation: stage 1 depends on the number of ranks"
    assert run.text.count(said) == 1
    first = torch.load(run.folder / "at_best.pt", weights_only=True)["model"]
    assert first["features.1.running_mean"].any()
    # frozen in stage 2
    last = run.state["model"]
    assert not torch.equal(first["features.1.weight"], last["features.1.weight"])


def test_validation_is_in_fp32(digits, tmp_path, group):
    """Also where training is in bf16."""
    out = tmp_path / "out"
    options = small(digits, "precision=bf16", "total_epochs=0", f"output_dir={out}")
    call_script("run_train_rebm_ddp", *options)
    args, *data = read_digits(digits)
    _, model = small_network()
    script.load_weights(model, script.read_checkpoint(out / "best.pt"), "best.pt")
    row = Run(out).rows[-1]
    for name, value in script.evaluate(model.eval(), data, args, CPU).items():
        assert row[f"val/at/{name}"] == pytest.approx(value, rel=1e-5), name


def test_a_run_that_learns_nothing(digits, tmp_path):
    """Is warned after stage 1, and after stage 2: the attacks are too short to generate, too."""
    options = ["--at_lr=1e-9", "--lr=0", "attack.max_steps=60", f"--output_dir={tmp_path}/out"]
    text = call_script("run_train_rebm_ddp", *small(digits, *options))
    for stage in ("at", "dat"):
        assert f"WARNING: stage {stage} is not better than the commonest class" in text
    best = Run(tmp_path / "out").summary["best"]
    assert f"T is {best['T']} of 60, generated images will be noise" in text
    assert re.search(r"few images to validate on: accuracies are only within 0\.\d+", text)


# --------------------------------------------------------------------------------------------------
# Options


def test_the_commands_of_the_original():
    """CONFIG.yaml KEY=VALUE, dots, and the names of its sections."""
    config = str(ROOT / "configs/config_rebm_cifar10.yaml")
    args = arguments(config, "use_ddp=False", "attack.max_steps=100", "ddp_backend=gloo")
    assert args.lr == 1e-3  # of the file
    assert (args.use_ddp, args.attack_max_steps, args.backend) == (False, 100, "gloo")
    args = arguments("attack.step_size=1e-1", "--indist_attack_clf.eps", "0.25", "model.norm=layer")
    assert (args.attack_step_size, args.indist_attack_clf_eps, args.norm) == (0.1, 0.25, "layer")


def test_options_that_cannot_be():
    refused = {
        "lr=-1": "must be from 0",
        "at_epochs=0": "give --ckpt_path",
        "indist_attack_clf.eps=inf": "must be from 1e-06 to 1000000",
        "attack.steps=4": "unrecognized arguments: attack.steps=4",
        "image_shape=2x8": "expected 1 or 3 channels",
        "indist_attack_clf.norm=Linf": "eps 0.5: with Linf it must be below 0.5",
        "fresh=True output_dir=a/b ckpt_path=a/b/at_best.pt": "--fresh moves --ckpt_path a/b/at_",
    }
    for options, message in refused.items():
        with pytest.raises(script.InputError, match=message):
            arguments(*options.split())
    with pytest.raises(script.InputError, match="at most 64 pixels a side, these have 1024"):
        script.make_network(arguments("--image_shape=3x1024"), 10, 3, 1024)


def test_stages_of_a_resumed_run(digits, tmp_path):
    """Stage 1 alone, then stage 2 from its best weights; a stage that was begun has to stay."""
    out = tmp_path / "out"

    def call(*options, status=0):
        words = [f"--output_dir={out}", *options]
        return call_script("run_train_rebm_ddp", *small(digits, *words), status=status)

    call("total_epochs=0")
    best = script.read_checkpoint(out / "at_best.pt")["model"]
    assert not differences(best, script.read_checkpoint(out / "best.pt")["model"])
    text = call("at_epochs=0", f"ckpt_path={out}/best.pt", status=2)
    assert "ckpt_path is " in text and "has a run with None" in text
    given = [f"ckpt_path={out}/best.pt", f"--output_dir={tmp_path}/given"]
    call("total_epochs=0", *given)
    text = call("at_epochs=0", *given, status=2)
    assert "is in stage 1, which must not have 0 epochs" in text
    assert "missing or damaged" not in call("ddp_backend=gloo", "total_epochs=1")
    text = call("at_epochs=3", status=2)
    assert "stage 2: --at_epochs may change only in stage 1" in text
    text = call("total_epochs=0", status=2)
    assert "is in stage 2, which must not have 0 epochs" in text

    shutil.copy(out / "best.pt", out / "latest.pt")
    text = call("total_epochs=1", status=2)
    assert "the checkpoint has no average: is it a copy of best.pt?" in text
    state = script.read_checkpoint(out / "best.pt")
    state["loop"]["classes"] = ["0", "2", "1"]
    torch.save(state, tmp_path / "other.pt")
    text = call("at_epochs=0", f"ckpt_path={tmp_path}/other.pt", "--fresh", status=2)
    assert "other.pt has the classes 0 2 1, and the data 0 1" in text


def test_a_run_whose_best_is_nowhere(digits, tmp_path, monkeypatch, caplog):
    """Where no best.pt could be saved, all is trained, but the run has not ended well."""
    save = script.save_checkpoint

    def save_no_best(name, *args, **parts):
        return "best" not in name and save(name, *args, **parts)

    monkeypatch.setattr(script, "save_checkpoint", save_no_best)
    with pytest.raises(script.RunError, match="no best.pt could be saved"):
        run_here(script, *small(digits, f"--output_dir={tmp_path}/out"))
    assert "stage 2 starts from the last weights" in caplog.text


def test_the_best_weights(monkeypatch):
    """Those of the longest attack, then of the highest accuracy; as they are in the file."""
    args = arguments()
    loop = {"step": 1, "best": {}}
    metrics = {"clean": 0.9, "cross_entropy": 1.0}

    def keep(robust, T, is_saved=True):
        save = mock.Mock(return_value=is_saved)
        monkeypatch.setattr(script, "save_checkpoint", save)
        script.keep_best(args, "dat", None, {**metrics, "robust": robust}, T, None, loop)
        return loop["best"].get("dat", {}).get("value")

    found = [keep(*of) for of in ((0.9, 3, False), (0.6, 3), (0.5, 3), (0.7, 3, False), (0.4, 5))]
    assert found == [None, 0.6, 0.6, 0.6, 0.4]
    assert loop["best"]["dat"]["T"] == 5
