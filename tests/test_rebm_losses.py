"""Attacks, losses, curriculum and what ranks agree on, of run_train_rebm_ddp.py."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import one_process, run_ranks, write_digits

import run_train_rebm_ddp as rebm


def make_task(ddp, folder, *options: str) -> rebm.Task:
    """A small network on 200 digits."""
    if not (folder / "digits.npz").exists():
        write_digits(folder / "digits.npz", 200, 40)
    argv = f"""--indist_dataset=file --indist_ds_dir={folder}/digits.npz --model_type=SmallNet --width=4
        --outdist_max_samples=90 --augm_type_classification=shift --augm_type_generation=none --valid_images=20
        --indist_attack_clf.max_steps=2
        --batch_size=6 --outdist_dataset_ood_detection=blobs --image_log.num_samples=30 --eval_images=40
        --eval_batch_size=16 --eval_steps=4 --eval_restarts=2 --image_log.num_steps=3 --device=cpu --lr=0.05
        --output_dir={folder}""".split()
    args = rebm.parse_args([*argv, *options])
    return rebm.assemble(args, ddp, rebm.load_data(args, ddp))


CASES = list(itertools.product((1, 2), (0, 3), ([], ["--r1reg=0.3", "--norm=layer", "--indist_perturb"])))


def gradients(ddp, folder, total: int) -> list[tuple[dict, float]]:
    """After one step of stage 2 on the global batch, for CASES: gradients by name, and the pooled AUC."""
    found = []
    for accumulation, T, options in CASES:
        task = make_task(ddp, folder, *options)
        model = rebm.wrap_ddp(task.net, ddp)
        streams = {"clf": task.data.train, "real": task.data.train, "outside": task.data.outside}
        samplers = {name: rebm.GlobalBatchSampler(len(images), total, accumulation, 1000 * i, ddp)
                    for i, (name, images) in enumerate(streams.items())}  # fmt: skip
        micro = next(rebm.micro_batches(task, samplers, 3, "dat"))
        guard = SimpleNamespace(scaler=torch.amp.GradScaler("cpu", enabled=False))
        log = SimpleNamespace(sums={}, add=lambda *_, **__: None)
        _, scores = rebm.train_step(task, model, "dat", T, micro, guard, log, total)
        if ddp.world_size > 1:
            rebm.dist.all_reduce(scores)
        grads = {n: p.grad.clone() for n, p in task.model.named_parameters()}
        found.append((grads, float(rebm.pooled_auc(*scores))))
    return found


def test_ranks_have_the_gradients_of_one_process(tmp_path):
    """With and without R1, accumulated or not, T = 0 and above, 2 and 4 ranks: 1e-6, and the same AUC."""
    alone = gradients(one_process(), tmp_path, 24)
    for world_size in (2, 4):
        for found in run_ranks(world_size, gradients, tmp_path, 24):
            for (ours, auc), (theirs, pooled), case in zip(alone, found, CASES, strict=True):
                assert auc == pooled, case
                for name in ours:
                    torch.testing.assert_close(theirs[name], ours[name], rtol=1e-5, atol=1e-6, msg=f"{name}, {case}")


def test_gradients_are_reduced_once_in_a_step(tmp_path, monkeypatch):
    """Only the last of the passes of a step (energy and classification, of two micro-batches) asks for it."""
    asked, plain = [], rebm.sync_gradients
    monkeypatch.setattr(rebm, "sync_gradients", lambda model, last: asked.append(last) or plain(model, last))
    gradients(one_process(), tmp_path, 24)
    assert asked == [not n for accumulation, *_ in CASES for n in range(2 * accumulation - 1, -1, -1)]


def evaluated(ddp, folder) -> dict:
    task = make_task(ddp, folder)
    return rebm.evaluate(task, "test", None, "x", 0)


def test_evaluation_is_the_same_on_any_number_of_ranks(tmp_path):
    alone = evaluated(one_process(), tmp_path)
    assert {"clean", "robust@0.5", "ood_auc noise", "adv_ood_auc blobs", "frechet_pixels"} <= set(alone)
    assert (tmp_path / "samples_x.png").stat().st_size > 500
    for world_size in (2, 4):
        assert run_ranks(world_size, evaluated, tmp_path) == [alone] * world_size


KINDS = {"parameter": "body.2.weight", "gradient": "head.bias", "average": "head.weight", "buffer": "mean"}


def perturbed(ddp, folder) -> list[str]:
    """What is said when one bit of a tensor of each kind differs on rank 1."""
    task, found = make_task(ddp, folder), []
    for p in task.model.parameters():
        p.grad = torch.ones_like(p)
    for kind, name in KINDS.items():
        rebm.compare_ranks(task, 1)  # all is well
        tensor = {"parameter": task.model.state_dict(), "gradient": {name: task.model.head.bias.grad},
                  "average": task.average, "buffer": task.model.state_dict()}[kind][name]  # fmt: skip
        place, kept = (0,) * tensor.ndim, tensor.clone()
        if ddp.rank == 1:
            tensor[place] = torch.nextafter(tensor[place], torch.tensor(9.0))
        try:
            rebm.compare_ranks(task, 7)
        except RuntimeError as error:
            found.append(str(error))
        tensor.copy_(kept)
    return found


def test_monitor_names_the_tensor(tmp_path):
    for texts in run_ranks(2, perturbed, tmp_path):
        for (kind, name), text in zip(KINDS.items(), texts, strict=True):
            assert f"step 7: the {kind} {name} differs from rank 0's on ranks [1]; 1 of" in text


def optimised(ddp, folder, zero: bool) -> tuple[dict, dict]:
    """Weights after three updates; and the optimizer's state in the checkpoint."""
    task = make_task(ddp, folder, f"--zero={zero}", "--optimizer=adamw")
    optimizer = rebm.stage_optimizer(task, "", 0.01)
    guard = rebm.StepGuard(task.args, ddp, optimizer, torch.float32, 0.0)
    for step in range(4):
        for i, p in enumerate(task.model.parameters()):
            p.grad = torch.full_like(p, math.nan if step == 2 else math.sin(i + step))  # one is skipped
        guard.step(torch.ones(()), step, [])
    guard.finish()
    assert isinstance(optimizer, rebm.Zero) == (zero and ddp.world_size > 1)
    task.args.output_dir = str(folder / f"zero_{zero}")
    (folder / f"zero_{zero}").mkdir(exist_ok=True)
    log = SimpleNamespace(final_loss=None, speed=None, wandb_id="", wall=0.0, started=0.0, reset=lambda: None)
    rebm.checkpoint(task, rebm.new_course(), guard, log, 12)
    return task.model.state_dict(), rebm.load_checkpoint(folder / f"zero_{zero}/latest.pt")["optimizer"]


def test_zero_is_the_plain_optimizer(tmp_path):
    (plain, state), _ = run_ranks(2, optimised, tmp_path, False)
    (ours, saved), (other, _) = run_ranks(2, optimised, tmp_path, True)
    for name in plain:
        assert torch.equal(ours[name], plain[name]) and torch.equal(other[name], plain[name]), name
    task = make_task(one_process(), tmp_path, "--optimizer=adamw")
    optimizer = rebm.stage_optimizer(task, "", 0.01)
    optimizer.load_state_dict(saved)  # without ZeRO
    assert optimizer.state_dict()["state"].keys() == state["state"].keys()
    for i, values in optimizer.state_dict()["state"].items():
        assert torch.equal(values["exp_avg"], state["state"][i]["exp_avg"])


def test_attack_stays_in_ball_and_leaves_the_model(tmp_path):
    task = make_task(one_process(), tmp_path, "--norm=batch")
    x, y = task.data.test.batch(np.arange(20)), task.data.test.targets(np.arange(20))
    task.model.train()
    task.model.body[1].eval()
    modes, before = [m.training for m in task.model.modules()], task.model.state_dict()
    before = {n: t.clone() for n, t in before.items()}
    loss = lambda logits: F.cross_entropy(logits, y, reduction="none")  # noqa: E731
    for norm, eps in ("L2", 0.5), ("Linf", 0.1):
        start = rebm.random_start(x, eps, norm, torch.rand(20, 65))
        with rebm.frozen(task.model):
            found = [rebm.pgd(task.net, x, loss, 6, eps / 2, eps, norm, start, loss, bool(decay)) for decay in (0, 1)]
            for z in (start, *found):
                length = (z - x).flatten(1).norm(dim=1) if norm == "L2" else (z - x).abs().amax((1, 2, 3))
                assert length.max() <= eps * (1 + 1e-5) and z.min() >= 0 and z.max() <= 1
                assert length.mean() > 0.1 * eps
            assert loss(task.model(found[0])).mean() > loss(task.model(x)).mean() + 0.01
    assert modes == [m.training for m in task.model.modules()]
    assert all(p.grad is None and p.requires_grad for p in task.model.parameters())
    assert all(torch.equal(t, before[n]) for n, t in task.model.state_dict().items())


def test_tiny_gradients_give_whole_steps():
    """1e-30 of a loss leads where the loss leads; no gradient, nowhere (and to no NaN)."""
    x = torch.full((2, 1, 2, 2), 0.5)
    weight = torch.tensor([[1.0, -2.0, 3.0, 0.5]])
    net = lambda z: (z.flatten(1) * weight).sum(1, keepdim=True)  # noqa: E731
    steps = [rebm.pgd(net, x, lambda v, c=c: v[:, 0] * c, 1, 0.1, 9.0, "L2") for c in (1.0, 1e-30, 0.0)]
    torch.testing.assert_close(steps[0] - x, 0.1 * (weight / weight.norm()).reshape(1, 1, 2, 2).expand(2, -1, -1, -1))
    torch.testing.assert_close(steps[1], steps[0])
    assert torch.equal(steps[2], x)


def test_auc_and_frechet_distance():
    from scipy.linalg import sqrtm
    from sklearn.metrics import roc_auc_score

    draw = torch.Generator().manual_seed(0)
    for levels in (5, 1000):  # with ties and without
        real = torch.randint(levels, (50,), generator=draw).float() + 1
        fake = torch.randint(levels, (70,), generator=draw).float()
        expected = roc_auc_score([1] * 50 + [0] * 70, torch.cat([real, fake]))
        assert rebm.pooled_auc(real, fake).item() == pytest.approx(expected, abs=1e-12)
    a, b = torch.randn(80, 6, generator=draw).double(), torch.randn(90, 6, generator=draw).double() * 1.5 + 0.3
    root = sqrtm(np.cov(a.T) @ np.cov(b.T)).real
    expected = (a.mean(0) - b.mean(0)).square().sum() + np.trace(np.cov(a.T) + np.cov(b.T) - 2 * root)
    assert rebm.frechet(a, b) == pytest.approx(float(expected), rel=1e-6)
    assert rebm.frechet(a, a) == pytest.approx(0, abs=1e-9)


def test_energy_loss_is_the_binary_cross_entropy(tmp_path):
    task = make_task(one_process(), tmp_path, "--r1reg=0.5", "--bce_weight=2")
    names = ("clf", "real", "outside")
    samplers = {n: rebm.GlobalBatchSampler(80, 8, 1, i, one_process()) for i, n in enumerate(names)}
    micro, losses = next(rebm.micro_batches(task, samplers, 0, "dat"))[0], []
    found = rebm.energy_passes(task, task.net, micro, 2, losses.append)
    with rebm.frozen(task.model):
        fake = rebm.pgd(task.net, micro.outside, lambda v: rebm.picked(v, micro.real_y), 2, 0.1, math.inf, "L2")
    score = torch.cat([task.net(micro.real), task.net(fake)]).logsumexp(1)
    bce = F.binary_cross_entropy_with_logits(score, torch.cat([torch.ones(8), torch.zeros(8)]))
    assert found["bce"].mean().item() == pytest.approx(bce.item(), rel=1e-5)
    x = micro.real.clone().requires_grad_(True)
    gradient, = torch.autograd.grad(task.net(x).logsumexp(1).sum(), x)  # fmt: skip
    r1 = 0.5 * gradient.square().sum((1, 2, 3)).mean()
    assert found["r1"].mean().item() == pytest.approx(r1.item(), rel=1e-5)
    assert sum(v.mean() for v in losses).item() == pytest.approx((2 * bce + 0.5 * r1).item(), rel=1e-5)
    assert found["l2_dist_relative"].max() <= 1 + 1e-5


def test_curriculum():
    options = "attack.max_steps=3 AUC_th=0.7 min_imgs_per_threshold=100 stop_after_max_imgs=128".split()
    args = rebm.parse_args(options)
    course = rebm.new_course()
    seen = []
    for auc in (0.9, 0.4, 0.8, 0.7, 0.9, 0.6, 0.9, 0.9, 0.9, 0.9, 0.9):
        rebm.advance(args, course, auc, 64)  # a window of two steps
        seen.append((course.T, rebm.stage_over(args, course, 1000)))
    assert seen == [(0, False), (0, False), (0, False), (1, False), (1, False), (2, False), (2, False), (3, False),
                    (3, False), (3, True), (3, True)]  # fmt: skip
    args, course = rebm.parse_args(["attack.max_steps=2", "samples_per_attack_step=150"]), rebm.new_course()
    assert [rebm.advance(args, course, 0.0, 64) or course.T for _ in range(7)] == [0, 0, 1, 1, 1, 2, 2]


@pytest.mark.parametrize("form", ["ours", "bare", "wrapped", "compiled", "averaged", "original"])
def test_weights_of_every_form_load(tmp_path, form):
    task = make_task(one_process(), tmp_path)
    state = {n: torch.randn_like(t) for n, t in task.model.state_dict().items()}
    saved = {"ours": {"model": dict.fromkeys(state, torch.zeros(1)), "ema": state}, "bare": state,
             "wrapped": {f"module.module.{n}": t for n, t in state.items()},
             "compiled": {"model": {f"module._orig_mod.{n}": t for n, t in state.items()}},
             "averaged": {f"module.base_model.{n}": t for n, t in state.items()} | {"n_averaged": torch.ones(())},
             "original": {"ema_state_dict": {f"module.{n}": t for n, t in state.items()}, "args": {}}}  # fmt: skip
    saved = saved[form]
    torch.save(saved, tmp_path / "weights.pth")
    task.model.load_state_dict(rebm.read_weights(str(tmp_path / "weights.pth")))
    assert all(torch.equal(t, state[n]) for n, t in task.model.state_dict().items())
    wrapped = torch.nn.DataParallel(task.model)  # and ours into others
    found = rebm.read_weights(str(tmp_path / "weights.pth"))
    wrapped.load_state_dict({f"module.{n}": t for n, t in found.items()})


@pytest.mark.parametrize("name, size, parameters", [
    ("WideResNet28x2", 32, 1_467_610), ("WideResNet34x10", 32, 46_160_474), ("ResNet50ImageNet", 64, 23_528_522),
    ("convnext_tiny", 64, None), ("convnext_base", 64, None)])  # fmt: skip
def test_networks(name, size, parameters):
    """Parameters as published (with ten classes); logits of a batch; frozen statistics stay as they are."""
    args = rebm.parse_args([f"model_type={name}"])
    with torch.device("meta" if parameters and parameters > 4e7 else "cpu"):
        model = rebm.EnergyClassifier(args, SimpleNamespace(channels=3, size=size, classes=10), torch.float32, "cpu")
    count = sum(p.numel() for p in model.parameters())
    assert parameters in (None, count), count
    if model.head.weight.is_meta:
        return
    model.frozen = True
    before = {n: t.clone() for n, t in model.train().state_dict().items()}
    logits = model(torch.rand(2, 3, size, size))
    assert logits.shape == (2, 10) and logits.isfinite().all()
    logits.logsumexp(1).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
