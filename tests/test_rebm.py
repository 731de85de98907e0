"""run_train_rebm_ddp.py: known answers, and what a user sees of a run. Its tools:
test_rebm_tools.py."""

import json
import math
import re
import signal
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT, call_script, import_tool, parse_arguments, write_digits
from PIL import Image
from runs import differences

import run_train_rebm_ddp as script

CPU = torch.device("cpu")
SMALL = """--width=4 --attack.max_steps=2 --attack.step_size=0.3 --indist_attack_clf.max_steps=1
    --at_epochs=2 --total_epochs=2 --at_lr=1e-2 --optimizer=adamw --lr=3e-3 --AUC_th=0.6 --ema=0.9
    --min_imgs_per_threshold=48 --global_batch_size=24 --batch_size=12 --eval_steps=2 --log_every=1
    --n_imgs_per_evaluation_log=0 --device=cpu""".split()


arguments = partial(parse_arguments, script)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rebm") / "digits"
    write_digits(folder, 200, 40, "--valid=20")
    return folder


def small(digits, *options):
    """The options of a run of a second: 14 steps of each stage."""
    return [f"--data={digits}", *SMALL, *options]


def small_network(*options, classes=10):
    args = arguments("--width=4", *options)
    torch.manual_seed(0)
    return args, script.make_network(args, classes, 1, 8)


# --------------------------------------------------------------------------------------------------
# Networks


NETWORKS = {  # parameters as published, and some of timm's names
    "WideResNet28x2": (10, 1_467_610, "block1.layer.0.convShortcut.weight block3.layer.3.bn2.bias"),
    "WideResNet34x10": (10, 46_160_474, "conv1.weight bn1.running_mean fc.weight"),
    "ResNet50ImageNet": (1000, 25_557_032, "layer1.0.downsample.1.bias layer4.2.bn3.running_var"),
    "convnext_tiny": (1000, 28_589_128, "stem.1.bias stages.0.blocks.0.gamma head.norm.weight"),
    "convnext_large": (1000, 197_767_336, "stages.2.blocks.26.conv_dw.bias"),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_are_the_published_ones(name):
    classes, expected, names = NETWORKS[name]
    args = arguments(f"model.model_type={name}", "use_convstem=False")
    with torch.device("meta"):
        model = script.make_network(args, classes, 3, 64)
    assert sum(p.numel() for p in model.parameters()) == expected
    assert {*names.split()} <= {*model.state_dict()}
    assert model(torch.zeros(2, 3, 64, 64, device="meta")).shape == (2, classes)


def test_batch_normalisation_that_is_frozen():
    """Its statistics stay, its weights get gradients."""
    _, model = small_network("--norm=batch")
    model.frozen = True
    before = {name: t.clone() for name, t in model.train().state_dict().items()}
    model(torch.rand(6, 1, 8, 8)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert not differences(before, model.state_dict())
    model.frozen = False
    model.train()(torch.rand(6, 1, 8, 8))
    assert differences(before, model.state_dict())


def test_weights_load_by_name_or_by_position(tmp_path):
    """Those in the original's format have other names, in the same order."""
    _, model = small_network("--norm=batch")
    state = {name: torch.randn(t.shape).to(t.dtype) for name, t in model.state_dict().items()}
    other = {f"net.{i}": t for i, t in enumerate(state.values())}
    forms = {
        "plain": {"n_averaged": torch.ones(()), **other},
        "compiled": {"model": {f"module._orig_mod.{name}": t for name, t in state.items()}},
        "ours": {"script": "run_train_rebm_ddp.py", "model": {}, "average": state},
        "original": {
            "ema_state_dict": {f"module.base_model.{name}": t for name, t in other.items()}
        },
    }
    for form, content in forms.items():
        _, model = small_network("--norm=batch")
        torch.save(content, tmp_path / "weights.pth")
        script.load_weights(model, tmp_path / "weights.pth")
        assert not differences(state, model.state_dict()), form


def test_wrong_weights(tmp_path, digits):
    """Another script's, those of another width, no weights: said in a line, before training."""
    _, model = small_network()
    _, wide = small_network("--width=8")
    path = tmp_path / "weights.pth"
    wrong = {
        "has 1 tensors, this network": {"model": {"weight": torch.ones(3)}},
        "features.0.weight of shape [8, 1, 3, 3], expected [4,": wide.state_dict(),
    }
    for message, content in wrong.items():
        torch.save(content, path)
        with pytest.raises(script.InputError, match=re.escape(message)):
            script.load_weights(model, path)
    path.write_bytes(b"no file of torch")
    with pytest.raises(script.InputError, match="no file of weights"):
        script.load_weights(model, path)
    options = small(digits, "--stage=dat", f"--ckpt_path={path}", f"--output_dir={tmp_path}/out")
    status, text = call_script("run_train_rebm_ddp", *options)
    assert status == 2
    assert "step=" not in text
    assert text.count(": error: ") == 1


# --------------------------------------------------------------------------------------------------
# Attacks and losses


def test_an_attack_stays_in_its_ball_and_leaves_the_network():
    _, model = small_network("--norm=batch")
    model.train()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    twin = script.Twin(model)
    x = torch.rand(20, 1, 8, 8)
    y = torch.arange(20) % 10
    for norm, eps in (("L2", 0.5), ("Linf", 0.1)):
        attack = script.Attack(twin.model, script.cross_entropy, eps / 2, eps, norm)
        z = attack(x, y, 6)
        move = (z - x).flatten(1)
        length = move.norm(dim=1) if norm == "L2" else move.abs().amax(1)
        assert 0.3 * eps < length.max() <= eps * (1 + 1e-5)
        assert z.min() >= 0 and z.max() <= 1
        plain = script.cross_entropy(twin.model(x), y).mean()
        assert script.cross_entropy(twin.model(z), y).mean() > plain + 0.01
    assert model.training and all(p.requires_grad and p.grad is None for p in model.parameters())
    assert not differences(before, model.state_dict())


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

        found.append(script.Attack(net, gain, 0.1, 9.0, "L2")(x, None, 1))
    expected = 0.1 * (weight / weight.norm()).view(1, 1, 2, 2).expand(2, -1, -1, -1)
    torch.testing.assert_close(found[0] - x, expected)
    torch.testing.assert_close(found[1], found[0])
    assert torch.equal(found[2], x)


def test_the_compiled_step_is_the_plain_one():
    _, model = small_network("--norm=layer")
    net = script.Twin(model).model
    x = torch.rand(16, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    y = torch.arange(16) % 10
    plain = script.Attack(net, script.cross_entropy, 0.1, 0.5, "L2")
    compiled = script.Attack(net, script.cross_entropy, 0.1, 0.5, "L2", compiled=True)
    torch.testing.assert_close(compiled(x, y, 4), plain(x, y, 4), rtol=0, atol=2e-6)


def test_the_twin_of_a_network_in_bf16():
    """Its weights are those of the network, converted once a step."""
    _, model = small_network("--norm=layer")
    model.dtype = torch.bfloat16
    twin = script.Twin(model)
    assert twin.model.features[0].weight.dtype == torch.bfloat16
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))
    twin.refresh()
    for mine, theirs in zip(twin.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs.to(mine.dtype))


def test_the_energy_loss_is_the_binary_cross_entropy():
    args, model = small_network("--r1reg=0.5")
    twin = script.Twin(model)
    attack = script.Attack(twin.model, script.label_logit, 0.1, math.inf, "L2")
    run = SimpleNamespace(args=args, model=model, ddp_model=model)
    run.on_outside = attack
    rng = torch.Generator().manual_seed(0)
    real, outside = torch.randint(0, 256, (2, 8, 1, 8, 8), generator=rng).byte()
    y = torch.arange(8) % 10
    batch = script.Batch(torch.arange(8), None, None, real, y, outside)
    losses = []

    def backward(loss):
        losses.append(loss.detach().mean())
        return losses[-1]

    bce, r1, loss, scores = script.energy_passes(run, batch, 2, backward)
    x = script.pixels(real)
    fake = attack(script.pixels(outside), y, 2)
    logits = torch.cat([model(x), model(fake)])
    truth = torch.cat([torch.ones(8), torch.zeros(8)])
    expected = F.binary_cross_entropy_with_logits(logits.logsumexp(1), truth)
    assert bce.mean().item() == pytest.approx(expected.item(), rel=1e-5)
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).logsumexp(1).sum(), x)
    squares = 0.5 * gradient.square().sum((1, 2, 3))
    torch.testing.assert_close(r1, squares, rtol=1e-4, atol=1e-6)
    expected = expected + 0.5 * squares.mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
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
    """A window of two steps, read one step late and only where T could grow; the step whose result
    comes with a new T counts for neither."""
    args = arguments("attack.max_steps=2", "AUC_th=0.7", "min_imgs_per_threshold=6")
    length = script.AttackLength(args, 4, CPU, {})
    seen = []
    reads = []
    for auc in (0.9, 0.4, 0.8, 0.6, 0.9, 0.9, 0.9, 0.9, 0.9):
        reads.append(length.total is not None)
        length.grow(torch.tensor(round(auc * 32)))
        seen.append(length.steps)
    #  0.9, 0.4 are too few; 0.4, 0.8 too; 0.8, 0.6 are enough, which the fifth step finds
    assert seen == [0, 0, 0, 0, 1, 1, 1, 2, 2]
    assert reads == [False, False, True, True, True, False, False, True, False]
    before = {"T": 1, "window": [3, 4]}
    again = script.AttackLength(args, 4, CPU, before)
    assert again.state() == before and again.total == 7


def test_sgd_starts_without_momentum(group):
    """PyTorch's makes its buffers in the first step; where that is skipped they hold anything."""
    args, model = small_network("--optimizer=sgd")
    optimizer = script.make_optimizer(args, model, "dat")
    for parameter in model.parameters():
        assert not optimizer.state[parameter]["momentum_buffer"].any()


def test_the_average_of_the_weights(group):
    """d = min(decay, (1 + n) / (10 + n)), running statistics included, counters not."""
    _, model = small_network("--norm=batch")
    average = script.copy.deepcopy(model)
    before = average.state_dict()["features.1.running_var"].clone()
    for tensor in script.tensors(model):
        tensor.data += 1
    script.update_average(average, model, 0.999, 5)
    found = average.state_dict()["features.1.running_var"] - before
    torch.testing.assert_close(found, torch.full_like(found, 1 - 6 / 15))
    script.update_average(average, model, 0.0, 5)
    assert not differences(average.state_dict(), model.state_dict())


# --------------------------------------------------------------------------------------------------
# Data


def test_augmentations():
    """Other draws make another image; and known answers."""
    rng = np.random.default_rng(0)
    image = rng.integers(1, 256, (3, 32, 32), np.uint8)
    for kind in ["none", "shift", "original", "autoaugment_cutout", "resized_crop", "resize"]:
        first, second = [script.augment(image, kind, 28, draws) for draws in rng.random((2, 12))]
        assert first.shape == (3, 28, 28)
        assert np.array_equal(first, second) == (kind == "none")
    cut = script.augment(image, "autoaugment_cutout", 28, rng.random(12))
    assert (cut == 0).mean() > 0.06
    picture = Image.fromarray(image.transpose(1, 2, 0))
    for policy in script.POLICIES:
        made = script.auto_augment(picture, policy, [-1, -1], [0.9, 0.1])
        assert not np.array_equal(made, picture)

    dot = np.zeros((1, 16, 16), np.uint8)
    dot[0, 8, 8] = 255
    ahead = script.augment(dot, "shift", 16, np.full(12, 0.99))
    assert ahead[0, 7, 7] == 255  # up to a sixteenth of the side
    flipped = script.augment(dot, "original", 16, np.array([0.5, 0.5, 0, 0, 0.1, *[0] * 7]))
    assert flipped[0, 8, 7] == 255
    whole = script.augment(dot, "resized_crop", 16, np.array([1, 0.5, 0, 0, 0.9, *[0] * 7]))
    assert np.array_equal(whole, dot)


def test_real_images_are_drawn_anew_from_the_training_part(digits):
    args = arguments(f"--data={digits}")
    inside = script.Images(digits)
    outside = script.GeneratedImages("blobs", 1, 8)
    data = script.TrainingData(args, inside, outside, "dat")
    ids = inside.part("train")[:24]
    batch = data[ids, ids]
    assert not torch.equal(batch.real_y, batch.y)
    shown = {image.tobytes() for image in inside.images[inside.part("train")]}
    assert {image.numpy().tobytes() for image in batch.real} <= shown


def test_some_images_are_of_all_classes(digits):
    """Files lie in the order of their classes."""
    images = script.Images(digits)
    part = images.part("train")
    images.labels[part] = np.sort(images.labels[part])
    some = images.some("train", len(part) // 4)
    assert len(some) == len(part) // 4 and np.isin(some, part).all()
    assert set(images.labels[some]) == set(images.labels[part])
    assert images.some("train", len(part)).tolist() == part.tolist()


# --------------------------------------------------------------------------------------------------
# Runs


def test_one_process(digits, tmp_path, server):
    """DataParallel gives the losses of DDP, of which one process is warned."""
    options = small(digits, "--stage=at")
    ddp = server.run("run_train_rebm_ddp", options, tmp_path / "ddp", 1)
    assert ddp.text.count("WARNING: DDP with one process only") == 1
    options.append("use_ddp=False")
    parallel = server.run("run_train_rebm_ddp", options, tmp_path / "parallel", 1)
    assert "DataParallel over 1 devices" in parallel.text
    assert len(ddp.losses) == 14
    assert ddp.losses == parallel.losses


def test_zero_is_the_plain_optimizer(digits, tmp_path, server):
    """Bit by bit, after a stop too; its checkpoint is that of a plain optimizer."""
    options = small(digits)
    plain = server.run("run_train_rebm_ddp", [*options, "--log_ranks"], tmp_path / "plain", 2)
    options.append("--zero=True")
    faults = [[0, 8, "signal", signal.SIGTERM]]
    stopped = server.run("run_train_rebm_ddp", options, tmp_path / "zero", 2, faults)
    assert set(stopped.statuses) == {143}, stopped.text[-3000:]
    zero = server.run("run_train_rebm_ddp", options, tmp_path / "zero", 2)
    assert zero.statuses == [0, 0], zero.text[-3000:]
    ours = zero.state
    expected = plain.state
    for key in ("model", "average"):
        assert not differences(ours[key], expected[key])
    assert not differences(ours["optimizer"]["state"], expected["optimizer"]["state"])
    assert zero.losses == plain.losses

    # of the plain run: figures of each rank
    row = [row for row in plain.rows if "loss" in row][-1]
    assert (row["loss/rank0"] + row["loss/rank1"]) / 2 == pytest.approx(row["loss"], rel=1e-5)
    assert {"data_wait/rank1", "memory_gb/rank0"} <= row.keys()


def test_the_monitor_names_the_tensor(digits, tmp_path, server):
    """And finds nothing before that: all ranks have the same statistics of batches, too."""
    options = small(digits, "--norm=batch", "--monitor_every=5", "--stage=at")
    faults = [[1, 7, "flip", 0]]
    run = server.run("run_train_rebm_ddp", options, tmp_path / "out", 2, faults)
    assert set(run.statuses) <= {1, -15}
    expected = "step 10: the parameter features.0.weight differs from rank 0's on the ranks [1]"
    assert expected in run.text
    assert "Traceback" not in run.text


def test_validation_is_in_fp32(digits, tmp_path, group):
    """Also where training is in bf16."""
    out = tmp_path / "out"
    options = small(digits, "--precision=bf16", "--stage=at", f"--output_dir={out}")
    status, text = call_script("run_train_rebm_ddp", *options)
    assert status == 0, text[-3000:]
    _, model = small_network()
    script.load_weights(model, out / "best.pt")
    run = SimpleNamespace(args=arguments(*options), average=model, device=CPU)
    run.inside = script.Images(digits)
    run.outside = script.GeneratedImages("noise", 1, 8)
    run.guard = SimpleNamespace(agree=lambda: "")
    lines = (out / "metrics.jsonl").read_text().splitlines()
    row = json.loads(lines[-1])
    for name, value in script.evaluate(run).items():
        assert row[f"val/at/{name}"] == pytest.approx(value, rel=1e-5), name


def test_a_run_that_learns_nothing_ends(digits, tmp_path):
    options = small(digits, "--at_lr=1e-9", f"--output_dir={tmp_path}/out")
    status, text = call_script("run_train_rebm_ddp", *options)
    assert status == 1 and "that of the commonest class" in text.splitlines()[-1]


# --------------------------------------------------------------------------------------------------
# Options


def test_the_commands_of_the_original():
    """CONFIG.yaml KEY=VALUE, dots, and the names of its sections."""
    config = str(ROOT / "configs/config_rebm_cifar10.yaml")
    args = arguments(config, "use_ddp=False", "attack.max_steps=100", "ddp_backend=gloo")
    assert args.lr == 1e-3  # of the file
    assert (args.use_ddp, args.attack_max_steps, args.backend) == (False, 100, "gloo")
    args = arguments("attack.step_size=1e-1", "attack.eps=inf", "indist_attack_clf.eps=0.25")
    assert (args.attack_step_size, args.attack_eps) == (0.1, math.inf)
    assert args.indist_attack_clf_eps == 0.25


def test_options_that_cannot_be():
    refused = {
        "lr=-1": "-1 is not above 0",
        "attack.start_step=60": "must be from 0 to 50",
        "stage=dat": "give --ckpt_path",
        "indist_attack_clf.eps=inf": "a ball without end",
        "use_ddp=False zero=True": "--use_ddp False takes no --zero",
    }
    for options, message in refused.items():
        with pytest.raises(script.InputError, match=message):
            arguments(*options.split())


def test_data_that_do_not_fit(digits, tmp_path, group):
    np.savez(tmp_path / "a.npz", x_train=np.zeros((40, 8, 8, 3), np.uint8))
    colour = tmp_path / "colour"
    import_tool("prepare_images").main(["arrays", f"{tmp_path}/a.npz", f"--out={colour}"])
    wrong = {
        "has no labels": [f"--data={colour}"],
        "has 3 channels and 8 pixels a side: expected 1 and 8": [f"--outdist_data={colour}"],
        "autoaugment_cutout is of colour": ["--augm_type_classification=autoaugment_cutout"],
    }
    for message, options in wrong.items():
        with pytest.raises(script.InputError, match=message):
            script.load_data(arguments(f"--data={digits}", *options))
    with pytest.raises(script.InputError, match="takes colour images: give SmallNet"):
        script.make_network(arguments("model_type=convnext_tiny"), 10, 1, 8)
