"""Measure a network of run_train_rebm_ddp.py on test images: under strong attacks, and at telling
them from OOD images. (tools/generate_rebm.py lets it generate.)

    python tools/evaluate_rebm.py outputs/rebm_quickstart/best.pt
    python tools/evaluate_rebm.py outputs/rebm_cifar10/best.pt --radii 0.5 1 --outside data/svhn

clean             accuracy
robust@R          share of the images that are told right, also at the ends of four attacks in the
                  ball of radius R: each raises the logit of a wrong class, the likeliest first,
                  over that of the right one, in --attack_steps steps of a quarter of the radius
auroc KIND        area under the ROC curve of test images against OOD images, by logsumexp f(x)
adv_auroc KIND    the same where an attack makes the OOD images look real; its radius is twice that
                  of training

In fp32 on one device, with the averaged weights. Writes all figures, and its options, to --out.
To classify images of your own, in Python: classify(checkpoint, paths).
"""

import json
import math
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import numpy as np
import torch
from generate_rebm import add_network_arguments, load_images, load_network, pictures
from tqdm import tqdm

import run_train_rebm_ddp as script
from run_train_rebm_ddp import COUNT, TEST, HelpFormatter, InputError, Parser, label_logit

TARGETS = 4  # wrong classes that attacks lead to
OOD_RADIUS = 2  # radius of the attack on OOD images, by that of the attack on images to classify


def classify(checkpoint, paths):
    """Of each picture: its likeliest class, the probability of it, and logsumexp f(x), which is
    high for pictures like those of training."""
    model, state = load_network(Path(checkpoint), torch.device("cpu"))
    channels, size = state["loop"]["shape"]
    found = []
    for path in paths:
        image = script.read_image(Path(path), channels, size)
        logits = model(script.pixels(torch.from_numpy(image.copy())[None]))[0]
        share, number = logits.softmax(0).max(0)
        found.append((state["loop"]["classes"][number], share.item(), logits.logsumexp(0).item()))
    return found


def parse_args():
    parser = Parser(description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False)
    add_network_arguments(parser)
    add = parser.add_argument
    add("--out", type=Path, help="file to write, if not evaluation.json beside the checkpoint")
    add("--images", type=COUNT, default=10_000, help="test images at most")
    text = "radii of robust accuracy, if not that of training"
    add("--radii", type=script.number(1e-6, 1e6), nargs="+", default=[], help=text)
    add("--attack_steps", type=COUNT, default=20, help="steps of each attack")
    text = "more OOD images to detect: noise, blobs, folders (the test part, or 15 percent), ..."
    add("--outside", nargs="*", default=script.SYNTHETIC, help=text)
    add("--ood_images", type=COUNT, default=500, help="OOD images at most, of each kind")
    args = parser.parse_args()
    args.out = args.out or args.checkpoint.with_name("evaluation.json")
    if args.out.exists():
        raise InputError(f"{args.out} exists: give another --out")
    return args


def batches(source, most, device, args):
    """(images (B, C, S, S), labels (B,)) of the test part, some at a time"""
    ids = source.some(TEST, most)
    for first in tqdm(range(0, len(ids), args.batch_size), disable=None):
        own = ids[first : first + args.batch_size]
        yield pictures(source, own, device), torch.from_numpy(source.labels[own]).to(device)


@torch.no_grad()
def survivors(model, x, labels, steps, eps, norm):
    """(B,) whether each image is told right, and so at the end of each attack."""
    logits = model(x)
    alive = logits.argmax(1) == labels
    wrong = logits.scatter(1, labels[:, None], -math.inf)
    ranking = wrong.argsort(1, descending=True)[:, :-1]  # the last one is the right class
    for number in range(min(TARGETS, ranking.shape[1])):
        left = alive.nonzero()[:, 0]
        target = ranking[left, number]

        def lead(logits, labels, target=target):
            return label_logit(logits, target) - label_logit(logits, labels)

        z = script.attack(model, lead, x[left], labels[left], steps, eps / 4, eps, norm)
        alive[left] = model(z).argmax(1) == labels[left]
    return alive


def measure(model, options, indist, sources, device, args):
    """{name: figure}. sources: {kind: OOD images}"""
    norm = options["indist_attack_clf_norm"]
    usual = options["indist_attack_clf_eps"]
    radii = {f"robust@{eps:g}": eps for eps in args.radii or [usual]}
    right = {name: [] for name in ["clean", *radii]}
    real = []
    for x, labels in batches(indist, args.images, device, args):
        logits = model(x)
        real.append(logits.logsumexp(1))
        right["clean"].append(logits.argmax(1) == labels)
        for name, eps in radii.items():
            right[name].append(survivors(model, x, labels, args.attack_steps, eps, norm))
    found = {name: torch.cat(parts).double().mean().item() for name, parts in right.items()}

    def logsumexp(logits, labels):
        return logits.logsumexp(1)

    eps = OOD_RADIUS * usual
    for kind, source in sources.items():
        for name, steps in (("auroc", 0), ("adv_auroc", args.attack_steps)):
            fake = []
            for x, _ in batches(source, args.ood_images, device, args):
                z = script.attack(model, logsumexp, x, None, steps, eps / 4, eps, norm)
                fake.append(model(z).logsumexp(1))
            found[f"{name} {kind}"] = script.auc(torch.cat(real), torch.cat(fake)).item()
    return found


def main():
    try:
        args = parse_args()
        device = script.choose_device(args, local_rank=0)
        model, state = load_network(args.checkpoint, device)
        options = state["args"]
        given = dict(vars(args))
        indist, outdist = load_images(args, state)
        sources = {args.outdist_data or options["outdist_data"]: outdist}
        for name in args.outside:
            if name not in sources:
                args.outdist_data = name
                _, sources[name] = load_images(args, state)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        found = measure(model, options, indist, sources, device, args)
        tested = indist.labels[indist.some(TEST, args.images)]
        found["commonest class"] = np.bincount(tested).max() / len(tested)
        args.out.write_text(json.dumps({**found, "options": given}, indent=1, default=str))
    except (InputError, OSError) as error:
        print(f"evaluate_rebm.py: {error}", file=sys.stderr)
        sys.exit(2)
    for name, value in found.items():
        print(f"{name:24} {value:.4f}")
    print(f"{args.out}: of {len(tested):,} images")


if __name__ == "__main__":
    main()
