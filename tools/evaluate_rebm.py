"""Measure a network of run_train_rebm_ddp.py on test images: under strong attacks, at telling them
from OOD images, and at generating.

    python tools/evaluate_rebm.py outputs/rebm_quickstart/best.pt
    python tools/evaluate_rebm.py outputs/rebm_cifar10/best.pt --radii 0.5 1 --outside data/svhn
    python tools/evaluate_rebm.py outputs/rebm_quickstart/best.pt --num_samples 0      no images

clean             accuracy
robust@R          share of the images that are told right at all points that the attack finds in the
                  ball of radius R: up the cross entropy from the image, then from random points
                  towards one wrong class each, the likeliest first (as APGD-T of Croce and Hein
                  2020), --starts in all, of --attack_steps shrinking steps; the best point on the
                  way counts, not the last one
auroc KIND        area under the ROC curve of test images against OOD images, by logsumexp f(x)
adv_auroc KIND    the same where an attack of radius --ood_eps makes the OOD images look real
frechet_pixels    Frechet distance (Heusel et al. 2017) of generated images from training images,
                  of the means of 8 x 8 blocks of pixels. As far are real test images from them:
                  frechet_pixels real. For FID, which needs the weights of an Inception network,
                  give the images of tools/generate_rebm.py --npz to a program that measures it

In fp32 on one device, with the averaged weights. Writes all figures, and its options, to --out.
"""

import json
import math
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np
import torch
import torch.nn.functional as F
from generate_rebm import add_network_arguments, generate, load_network
from tqdm import tqdm

import run_train_rebm_ddp as script
from run_train_rebm_ddp import Attack, InputError, best_score, count, cross_entropy, margin


def parse_args(words=None):
    parser = script.Parser(description=__doc__)
    add_network_arguments(parser)
    add = parser.add_argument
    add("--out", type=Path, help="file to write; default: evaluation.json beside the checkpoint")
    add("--images", type=count, default=10_000, help="test images at most")
    text = "radii of robust accuracy; default: that of training"
    add("--radii", type=script.positive, nargs="+", default=[], help=text)
    add("--attack_steps", type=count, default=50, help="steps of each attack")
    add("--starts", type=count, default=5, help="starts of the attack on each image")
    text = "more OOD images to detect: noise, blobs or folders"
    add("--outside", nargs="*", default=script.GENERATED, help=text)
    add("--ood_images", type=count, default=1024, help="OOD images at most, of each kind")
    add("--num_samples", type=int, default=1000, help="images to generate; 0: none")
    args = parser.parse_args(words)
    args.out = args.out or args.checkpoint.with_name("evaluation.json")
    if args.num_samples == 1:
        parser.error("--num_samples 1: a Frechet distance needs two or more; 0: none")
    return args


def batches(source, ids, size, device, args):
    """(numbers, images (B, C, S, S)), some of `ids` at a time"""
    for first in tqdm(range(0, len(ids), args.batch_size), disable=None):
        some = ids[first : first + args.batch_size]
        yield some, script.picture_batch(source, some, size, device)


# ---- Robust accuracy ---------------------------------------------------------------------------


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
    return script.label_logit(logits, target) - script.label_logit(logits, labels)


def survivors(model, x, labels, options, eps, args, rng):
    """(B,) whether each image is told right wherever the attack looks."""
    norm = options.indist_attack_clf_norm
    with torch.no_grad():
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
        attack = Attack(model, gain, eps / 2, eps, norm)
        worst = best_score(attack, x[left], labels[left], args.attack_steps, margin, start)
        alive[left] = worst < 0
    return alive


def measure_accuracy(model, options, inside, device, args):
    ids = inside.some("test", args.images)
    radii = dict.fromkeys(args.radii or [options.indist_attack_clf_eps])  # each once
    names = ["clean", *[f"robust@{eps:g}" for eps in radii], "cross_entropy"]
    found = dict.fromkeys(names, 0.0)
    rng = torch.Generator().manual_seed(0)  # of the random starts
    for some, x in batches(inside, ids, inside.size, device, args):
        labels = torch.from_numpy(inside.labels[some]).to(device)
        with torch.no_grad():
            logits = model(x)
        found["clean"] += (logits.argmax(1) == labels).sum().item()
        found["cross_entropy"] += cross_entropy(logits, labels).sum().item()
        for eps in radii:
            alive = survivors(model, x, labels, options, eps, args, rng)
            found[f"robust@{eps:g}"] += alive.sum().item()
    return {name: total / len(ids) for name, total in found.items()}


# ---- Detection ---------------------------------------------------------------------------------


def measure_detection(model, options, inside, sources, device, args):
    eps = options.ood_eps
    attack = Attack(model, script.logsumexp, eps / 2, eps, options.indist_attack_clf_norm)

    def scores(source, ids, steps):
        """(n,) logsumexp f(x), the highest on the way of an attack of so many steps"""
        found = []
        for _, x in batches(source, ids, inside.size, device, args):
            found.append(best_score(attack, x, None, steps, script.logsumexp))
        return torch.cat(found)

    real = scores(inside, inside.some("test", args.images), 0)
    found = {}
    for name, source in sources.items():
        ids = source.some("test", args.ood_images)
        found[f"auroc {name}"] = script.auroc(real, scores(source, ids, 0))
        attacked = scores(source, ids, args.attack_steps)
        found[f"adv_auroc {name}"] = script.auroc(real, attacked)
    return found


# ---- Generation --------------------------------------------------------------------------------


def frechet(a, b):
    """Frechet distance of features (n, D) and (m, D), as of normal distributions."""
    a = a.double()
    b = b.double()
    of_a = torch.cov(a.T)
    of_b = torch.cov(b.T)
    values, vectors = torch.linalg.eigh(of_a)
    root = vectors @ (values.clamp(min=0).sqrt()[:, None] * vectors.T)
    cross = torch.linalg.eigvalsh(root @ of_b @ root).clamp(min=0).sqrt().sum()
    means = (a.mean(0) - b.mean(0)).square().sum()
    return float(means + of_a.trace() + of_b.trace() - 2 * cross)


def block_means(source, ids, size, device, args):
    """(n, D) means of 8 x 8 blocks of pixels"""
    found = []
    for _, x in batches(source, ids, size, device, args):
        found.append(F.adaptive_avg_pool2d(x, min(8, size)).flatten(1))
    return torch.cat(found)


def measure_generation(model, options, inside, outside, device, args):
    size = inside.size
    made = generate(model, options, outside, len(inside.classes), size, device, args)
    source = SimpleNamespace(images=made.numpy())
    generated = block_means(source, np.arange(len(made)), size, device, args)
    real = block_means(inside, inside.some("train", 50_000), size, device, args)
    tested = block_means(inside, inside.some("test", 50_000), size, device, args)
    return {
        "frechet_pixels": frechet(real, generated),
        "frechet_pixels real": frechet(real, tested),
    }


def main():
    try:
        args = parse_args()
        device = script.choose_device(args, local_rank=0)
        model, options, inside, outside = load_network(args, device)
        sources = {outside.name: outside}
        for name in args.outside:
            if name not in sources:
                sources[name] = script.load_outside(name, inside)
        args.out.parent.mkdir(parents=True, exist_ok=True)

        found = measure_accuracy(model, options, inside, device, args)
        found.update(measure_detection(model, options, inside, sources, device, args))
        if args.num_samples > 0:
            found.update(measure_generation(model, options, inside, outside, device, args))
        tested = inside.some("test", args.images)
        found["commonest class"] = np.bincount(inside.labels[tested]).max() / len(tested)
        content = {**found, "options": vars(args)}
        args.out.write_text(json.dumps(content, indent=1, default=str) + "\n")
    except (InputError, OSError) as error:
        print(f"evaluate_rebm.py: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, InputError) else 1)
    for name, value in found.items():
        print(f"{name:24} {value:.4f}")
    print(args.out)


if __name__ == "__main__":
    main()
