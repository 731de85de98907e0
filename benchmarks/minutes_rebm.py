"""run_train_rebm_ddp.py in minutes.py.

The digits and the settings of the quickstart, one micro-batch a step; ten epochs of stage 1,
and stage 2 until the minutes are over.

it      a port of the original's steps, see bench_rebm.py, with the same network, data, optimizers,
        rates and rule for T; nothing is evaluated. Stage 1 is the part of its step that classifies
judge   tools/evaluate_rebm.py on the test digits: accuracy, that under attack, and the AUROC of
        digits against noise that an attack has made digit-like
"""

import copy
import itertools
import json
import math
import time

import bench_rebm
import numpy as np
import sides
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

SCRIPT = "run_train_rebm_ddp.py"
PROBE = None  # the rate of stage 2 is constant
PEER = {}
BATCH = 128
SAVE_EVERY = 10  # steps
OPTIONS = f"""--at_epochs=10 --total_epochs=100000 --attack_max_steps=40 --attack_step_size=0.2
    --indist_attack_clf_max_steps=7 --indist_attack_clf_step_size=0.125 --lr=1e-2 --AUC_th=0.7
    --max_grad_norm=5 --ema=0.995 --n_imgs_per_evaluation_log=0 --batch_size={BATCH}
    --global_batch_size={BATCH}"""
WINDOW = 8  # steps of the mean AUC: 1,000 images
NAMES = ("clean", "robust@0.5", "adv_auroc noise")


def prepare(folder):
    """The script has them."""


def options(out, steps, seed, seconds):
    return f"{OPTIONS} --save_every={SAVE_EVERY} --max_minutes={seconds / 60}"


def draw_batches(script, args, indist, outdist, stage):
    """For ever, the batches of a stage."""
    data = script.TrainingData(args, indist, outdist, stage)
    ids = indist.part(script.TRAIN)
    step = 0
    while True:
        order = np.random.default_rng([args.seed, step]).permutation(ids)
        for own in np.split(order[: len(ids) // BATCH * BATCH], len(ids) // BATCH):
            yield data[step, own, np.arange(BATCH)]
            step += 1


def port(out, steps, seed, end):
    words = [*OPTIONS.split(), f"--cache_dir={out}/cache", f"--seed={seed}", "--precision=fp32"]
    script = bench_rebm.load_script(*words)
    args = script.parse_args()
    indist = script.Images(script.prepare(args, "digits"))
    outdist = script.Images(script.prepare(args, "noise", indist))
    data = {"classes": indist.classes, "shape": [*indist.shape]}
    torch.manual_seed(seed)
    dist.init_process_group("gloo")
    plain = script.make_network(args, len(indist.classes), *indist.shape)
    average = copy.deepcopy(plain)
    model = DistributedDataParallel(plain, broadcast_buffers=False)
    attack_clf = {"steps": args.indist_attack_clf_max_steps, "eps": args.indist_attack_clf_eps}
    attack_clf["size"] = args.indist_attack_clf_step_size
    attack_ood = {"steps": 0, "eps": math.inf, "size": args.attack_step_size}

    def update(optimizer, lr, loss, step):
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), args.max_grad_norm)
        optimizer.step()
        loss.item()
        bench_rebm.original_average(average, plain, step, args.ema)

    batches = draw_batches(script, args, indist, outdist, "at")
    optimizer = script.make_optimizer(args, plain, "at")
    at_steps = args.at_epochs * (len(indist.part(script.TRAIN)) // BATCH)
    for step in range(at_steps):
        batch = next(batches)
        x = script.pixels(batch.clf_x)
        y = batch.clf_y
        x = bench_rebm.climb(model, x, lambda z, y=y: F.cross_entropy(z, y), **attack_clf)
        lr = args.at_lr * (0.5 + 0.5 * math.cos(math.pi * step / at_steps))
        update(optimizer, lr, F.cross_entropy(model(x), y), step)

    plain.load_state_dict(average.state_dict())
    batches = draw_batches(script, args, indist, outdist, "dat")
    optimizer = script.make_optimizer(args, plain, "dat")
    aucs = []
    for step in itertools.count():
        batch = next(batches)
        images = [script.pixels(own) for own in (batch.clf_x, batch.real_x, batch.ood_x)]
        parts = [images[0], batch.clf_y, images[1], batch.real_y, images[2]]
        loss, auc = bench_rebm.original_loss(model, parts, attack_ood, attack_clf)
        update(optimizer, args.lr, loss, step)
        aucs = [*aucs[1 - WINDOW :], auc]
        is_easy = len(aucs) == WINDOW and np.mean(aucs) >= args.AUC_th
        if is_easy and attack_ood["steps"] < args.attack_max_steps:
            attack_ood["steps"] += 1
            aucs = []
        if step % SAVE_EVERY == 0:
            loop = {"step": at_steps + step + 1, "T": attack_ood["steps"]}
            state = {"script": SCRIPT, "args": vars(args), "loop": loop, "data": data}
            torch.save({**state, "ema_model": average.state_dict()}, out / "new.tmp")
            (out / "new.tmp").replace(out / "latest.pt")
        if time.time() > end:
            return


def judge(folder, out, part):
    path = out / "evaluation.json"
    sides.run_tool(
        "evaluate_rebm.py", out / "latest.pt", f"--out={path}", "--radii=0.5", "--ood_images=500"
    )
    found = json.loads(path.read_text())
    loop = torch.load(out / "latest.pt", weights_only=True)["loop"]
    return {**{name: found[name] for name in NAMES}, "steps": loop["step"], "T": loop["T"]}
