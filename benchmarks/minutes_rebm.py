"""run_train_rebm_ddp.py in minutes.py.

The digits and the settings of the quickstart, one micro-batch a step; ten epochs of stage 1 for
each minute, and stage 2 until the minutes are over.

it      a port of the original's steps, see bench_rebm.py, with the same network, data, optimizers,
        rates and rule for T; nothing is evaluated. Stage 1 is the part of its step that classifies
judge   tools/evaluate_rebm.py on the test digits: accuracy, that under attack, and the AUROC of
        digits against noise that an attack has made digit-like
"""

import copy
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
PROBE = None  # stage 2 has a constant rate
PEER = {}
BATCH = 128
OPTIONS = f"""--at_epochs={{at_epochs}} --total_epochs=100000 --attack_max_steps=40
    --attack_step_size=0.2 --indist_attack_clf_max_steps=7 --indist_attack_clf_step_size=0.125
    --lr=1e-2 --AUC_th=0.7 --max_grad_norm=5 --ema=0.995 --n_imgs_per_evaluation_log=0
    --batch_size={BATCH} --global_batch_size={BATCH}"""
NAMES = ("clean", "robust@0.5", "adv_auroc noise")


def prepare(folder):
    """The script has them."""


def options(out, steps, seed, seconds):
    words = OPTIONS.format(at_epochs=math.ceil(seconds / 6))
    return f"{words} --max_minutes={(seconds - 6) / 60}"


def port(out, steps, seed, end):
    seconds = end - time.time()
    words = [*options(out, 0, seed, seconds).split(), f"--cache_dir={out}/cache", f"--seed={seed}"]
    script = bench_rebm.load_script(*words, "--precision=fp32")
    args = script.parse_args()
    indist = script.Images(script.prepare(args, "digits"))
    outdist = script.Images(script.prepare(args, "noise", indist))
    torch.manual_seed(seed)
    dist.init_process_group("gloo")
    plain = script.make_network(args, len(indist.classes), *indist.shape)
    average = copy.deepcopy(plain)
    model = DistributedDataParallel(plain, broadcast_buffers=False)
    ids = indist.part(script.TRAIN)
    epoch = len(ids) // BATCH
    attack_clf = {"steps": args.indist_attack_clf_max_steps, "eps": args.indist_attack_clf_eps}
    attack_clf["size"] = args.indist_attack_clf_step_size
    T = 0
    aucs = []
    count = 0
    for stage, steps in (("at", args.at_epochs * epoch), ("dat", 10**9)):
        data = script.TrainingData(args, indist, outdist, stage)
        optimizer = script.make_optimizer(args, plain, stage)
        if stage == "dat":
            plain.load_state_dict(average.state_dict())
        for step in range(steps):
            if step % epoch == 0:
                order = np.random.default_rng([seed, step]).permutation(ids)
            own = order[step % epoch * BATCH :][:BATCH]
            batch = data[step, own, np.arange(BATCH)]
            lr = args.lr
            if stage == "at":
                lr = args.at_lr * (0.5 + 0.5 * math.cos(math.pi * step / steps))
            for group in optimizer.param_groups:
                group["lr"] = lr
            x = script.pixels(batch.clf_x)
            y = batch.clf_y
            if stage == "at":
                x = bench_rebm.climb(model, x, lambda z, y=y: F.cross_entropy(z, y), **attack_clf)
                loss = F.cross_entropy(model(x), y)
            else:
                real_x, ood_x = script.pixels(batch.real_x), script.pixels(batch.ood_x)
                parts = [x, y, real_x, batch.real_y, ood_x]
                attack_ood = {"steps": T, "eps": math.inf, "size": args.attack_step_size}
                loss, auc = bench_rebm.original_loss(model, parts, attack_ood, attack_clf)
                aucs = [*aucs, auc][-8:]
                if len(aucs) == 8 and np.mean(aucs) >= args.AUC_th and T < args.attack_max_steps:
                    T += 1
                    aucs = []
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), args.max_grad_norm)
            optimizer.step()
            loss.item()
            bench_rebm.original_average(average, plain, step, args.ema)
            count += 1
            if time.time() >= end - 1:
                break
    state = {"ema_model": average.state_dict(), "args": vars(args), "loop": {"step": count, "T": T}}
    state["data"] = {"classes": indist.classes, "shape": [*indist.shape]}
    torch.save(state, out / "latest.pt")


def judge(folder, out, part):
    path = out / "evaluation.json"
    sides.run_tool("evaluate_rebm.py", out / "latest.pt", f"--out={path}", "--radii=0.5")
    found = json.loads(path.read_text())
    loop = torch.load(out / "latest.pt", weights_only=True)["loop"]
    return {**{name: found[name] for name in NAMES}, "steps": loop["step"], "T": loop["T"]}
