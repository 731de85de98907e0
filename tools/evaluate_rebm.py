"""Measure a network of run_train_rebm_ddp.py on test images: under strong attacks, and at telling
them from OOD images. (tools/generate_rebm.py measures how it generates.)

    python tools/evaluate_rebm.py outputs/rebm_quickstart/best.pt
    python tools/evaluate_rebm.py outputs/rebm_cifar10/best.pt --radii 0.5 1 --outside data/svhn

clean             accuracy
robust@R          share of the images that are told right at all points that the attack finds in the
                  ball of radius R: up the cross entropy from the image, then from random points
                  towards one wrong class each, the likeliest first (as APGD-T of Croce and Hein
                  2020), --starts in all, of --attack_steps shrinking steps; the best point on the
                  way counts, not the last one
auroc KIND        area under the ROC curve of test images against OOD images, by logsumexp f(x)
adv_auroc KIND    the same where an attack makes the OOD images look real; its radius is twice that
                  of training

In fp32 on one device, with the averaged weights. Writes all figures, and its options, to --out.
To classify images of your own, in Python: classify(checkpoint, paths).
"""

import json
import math
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import numpy as np
import torch
from generate_rebm import add_network_arguments, load_images, load_network, pictures
from tqdm import tqdm

import run_train_rebm_ddp as script
from run_train_rebm_ddp import COUNT, Attack, cross_entropy, label_logit, logsumexp


def classify(checkpoint, paths):
    """Of each picture: its likeliest class, the probability of it, and logsumexp f(x), which is
    high for pictures like those of training."""
    model, state = load_network(Path(checkpoint), torch.device("cpu"))
    channels, size = state["loop"]["shape"]
    found = []
    for path in paths:
        image = script.square(script.open_image(path), channels, size)
        logits = model(script.pixels(torch.from_numpy(image.copy())[None]))[0]
        share, number = logits.softmax(0).max(0)
        found.append((state["loop"]["classes"][number], share.item(), logits.logsumexp(0).item()))
    return found


def parse_args():
    parser = script.Parser(description=__doc__)
    add_network_arguments(parser)
    add = parser.add_argument
    add("--out", type=Path, help="file to write; default: evaluation.json beside the checkpoint")
    add("--images", type=COUNT, default=10_000, help="test images at most")
    length = script.number(1e-6, 1e6)
    text = "radii of robust accuracy; default: that of training"
    add("--radii", type=length, nargs="+", default=[], help=text)
    add("--attack_steps", type=COUNT, default=50, help="steps of each attack")
    add("--starts", type=COUNT, default=5, help="starts of the attack on each image")
    text = "more OOD images to detect: noise, blobs, folders (the test part), ..."
    add("--outside", nargs="*", default=script.GENERATED, help=text)
    add("--ood_images", type=COUNT, default=500, help="OOD images at most, of each kind")
    args = parser.parse_args()
    args.out = args.out or args.checkpoint.with_name("evaluation.json")
    if args.out.exists():
        parser.error(f"{args.out} exists: give another --out")
    return args


def batches(source, ids, device, args):
    """(images (B, C, S, S), labels (B,)), some of `ids` at a time"""
    for first in tqdm(range(0, len(ids), args.batch_size), disable=None):
        some = ids[first : first + args.batch_size]
        labels = torch.from_numpy(source.labels[some]).to(device)
        yield pictures(source, some, device), labels


# ---- Robust accuracy ---------------------------------------------------------------------------


def margin(logits, labels):
    """(B,) the best wrong logit minus the right one: above 0 the image is told wrong."""
    wrong = logits.scatter(1, labels[:, None], -math.inf)
    return wrong.amax(1) - label_logit(logits, labels)


@torch.no_grad()
def best_score(net, gain, eps, norm, x, labels, steps, score, start=None):
    """The highest score(logits, labels) (B,) on the way of an attack up `gain`, from `start` (else
    the images), whose steps shrink along half a cosine."""
    highest = torch.full((len(x),), -math.inf, device=x.device)

    def noting_gain(logits, labels):  # the attack calls it at each point on its way
        highest.copy_(torch.maximum(highest, score(logits.detach(), labels)))
        return gain(logits, labels)

    attack = Attack(net, noting_gain, eps / 2, eps, norm)
    z = x if start is None else start
    for number in range(steps):
        attack.size = eps / 2 * (0.5 + 0.5 * math.cos(math.pi * number / steps))
        z = attack.step(z, x, labels)
    return torch.maximum(highest, score(net(z), labels))


def random_points(x, eps, norm, rng):
    """A random point of the ball about each image: uniform (Linf), or of any length and direction
    (L2)."""
    if norm == "Linf":
        move = torch.rand(x.shape, generator=rng) * 2 - 1
    else:
        move = torch.randn(x.shape, generator=rng)
        length = torch.linalg.vector_norm(move, dim=(1, 2, 3), keepdim=True)
        move = move / length * torch.rand(len(x), 1, 1, 1, generator=rng)
    return script.in_ball(x + eps * move.to(x.device), x, eps, norm)


def towards(target, logits, labels):
    """(B,) the logit of a wrong class minus that of the right one"""
    return label_logit(logits, target) - label_logit(logits, labels)


def survivors(model, x, labels, norm, eps, args, rng):
    """(B,) whether each image is told right wherever the attack looks."""
    logits = model(x)
    alive = margin(logits, labels) < 0
    wrong = logits.scatter(1, labels[:, None], -math.inf)
    ranking = wrong.argsort(1, descending=True)[:, :-1]  # the last one is the right class

    for number in range(args.starts):
        left = alive.nonzero()[:, 0]
        if len(left) == 0:
            break
        start = None
        gain = cross_entropy
        if number > 0:
            start = random_points(x[left], eps, norm, rng)
            gain = partial(towards, ranking[left, (number - 1) % ranking.shape[1]])
        steps = args.attack_steps
        worst = best_score(model, gain, eps, norm, x[left], labels[left], steps, margin, start)
        alive[left] = worst < 0
    return alive


def measure_accuracy(model, options, inside, device, args):
    ids = inside.some("test", args.images)
    norm = options["indist_attack_clf_norm"]
    radii = {f"robust@{eps:g}": eps for eps in args.radii or [options["indist_attack_clf_eps"]]}
    found = dict.fromkeys(["clean", *radii], 0.0)
    rng = torch.Generator().manual_seed(0)  # of the random starts
    for x, labels in batches(inside, ids, device, args):
        found["clean"] += (model(x).argmax(1) == labels).sum().item()
        for name, eps in radii.items():
            alive = survivors(model, x, labels, norm, eps, args, rng)
            found[name] += alive.sum().item()
    return {name: total / len(ids) for name, total in found.items()}


# ---- Detection ---------------------------------------------------------------------------------


def measure_detection(model, options, inside, sources, device, args):
    eps = script.OOD_RADIUS * options["indist_attack_clf_eps"]
    norm = options["indist_attack_clf_norm"]

    def scores(source, most, steps):
        """(n,) logsumexp f(x), the highest on the way of an attack of so many steps"""
        found = []
        for x, _ in batches(source, source.some("test", most), device, args):
            found.append(best_score(model, logsumexp, eps, norm, x, None, steps, logsumexp))
        return torch.cat(found)

    real = scores(inside, args.images, 0)
    found = {}
    for name, source in sources.items():
        found[f"auroc {name}"] = script.auroc(real, scores(source, args.ood_images, 0))
        attacked = scores(source, args.ood_images, args.attack_steps)
        found[f"adv_auroc {name}"] = script.auroc(real, attacked)
    return found


def main():
    try:
        args = parse_args()
        device = script.choose_device(args, local_rank=0)
        model, state = load_network(args.checkpoint, device)
        options = state["args"]
        given = dict(vars(args))
        inside, outside = load_images(args, state)
        sources = {args.outdist_data or options["outdist_data"]: outside}
        for name in args.outside:
            if name not in sources:
                args.outdist_data = name
                _, sources[name] = load_images(args, state)
        args.out.parent.mkdir(parents=True, exist_ok=True)

        found = measure_accuracy(model, options, inside, device, args)
        found.update(measure_detection(model, options, inside, sources, device, args))
        tested = inside.some("test", args.images)
        found["commonest class"] = np.bincount(inside.labels[tested]).max() / len(tested)
        content = {**found, "options": given}
        args.out.write_text(json.dumps(content, indent=1, default=str) + "\n")
    except (script.RunError, OSError) as error:
        print(f"evaluate_rebm.py: {error}", file=sys.stderr)
        sys.exit(2)
    for name, value in found.items():
        print(f"{name:24} {value:.4f}")
    print(f"{args.out}: of {len(tested):,} images")


if __name__ == "__main__":
    main()
