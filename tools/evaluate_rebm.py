"""Measure a network of run_train_rebm_ddp.py on test images: under strong attacks, and at telling
them from OOD images. (tools/generate_rebm.py lets it generate.)

    python tools/evaluate_rebm.py outputs/rebm_quickstart/best.pt
    python tools/evaluate_rebm.py outputs/rebm_cifar10/best.pt --radii 0.5 1 --outside svhn.mat
    python tools/evaluate_rebm.py released.pth --model_type WideResNet34x10 \\
        --data cifar-10-batches-py --autoattack

clean             accuracy
cross_entropy     nats an image
ece               expected calibration error, 15 bins (Guo et al. 2017)
robust@R          accuracy that four attacks in the ball of radius R leave, each of --attack_steps
                  steps of R / 4 towards another one of the four likeliest wrong classes
autoattack@R      the same under AutoAttack (Croce and Hein 2020), as robustness is published
auroc KIND        area under the ROC curve of test images against OOD images, by --score: minus the
                  energy, which is logsumexp f(x), or the highest probability (softmax)
fpr95 KIND        share of the OOD images that are taken for real where 95 % of the real ones are
adv_auroc KIND    as auroc, where an attack makes the OOD images look real; its ball is that of
                  training, with twice the radius

In fp32, with the averaged weights. Prints each figure once it is known; writes all to --out.
To classify images of your own, in Python: classify(checkpoint, paths).
"""

import argparse
import json
import math
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import numpy as np
import torch
from generate_rebm import add_network_arguments, load_images, load_network
from sklearn.metrics import roc_curve
from tqdm import tqdm

import run_train_rebm_ddp as script
from run_train_rebm_ddp import COUNT, TEST, HelpFormatter, InputError, Parser, label_logit

TARGETS = 4  # wrong classes that attacks lead to
OOD_RADIUS = 2  # radius of the attack on OOD images, by that of the attack on images to classify


def classify(checkpoint, paths):
    """Of each picture: its likeliest class, the probability of it, and logsumexp f(x), which is
    high for pictures like those of training."""
    args = argparse.Namespace(checkpoint=Path(checkpoint), model_type=None, data=None)
    model, state = load_network(args, torch.device("cpu"))
    found = []
    for path in paths:
        image = script.read_image(Path(path), *state["data"]["shape"])
        logits = model(script.pixels(torch.from_numpy(image.copy())[None]))[0]
        share, number = logits.softmax(0).max(0)
        found.append((state["data"]["classes"][number], share.item(), logits.logsumexp(0).item()))
    return found


def parse_args():
    parser = Parser(description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False)
    add_network_arguments(parser)
    add = parser.add_argument
    add("--out", type=Path, help="file to write, if not evaluation.json beside the checkpoint")
    add("--images", type=COUNT, default=10_000, help="test images at most")
    add("--radii", type=script.number(1e-6, 1e6), nargs="+", help="if not that of training")
    add("--norm", choices=["L2", "Linf"], help="of --radii, if not that of training")
    add("--attack_steps", type=COUNT, default=20, help="steps of each attack")
    add("--autoattack", action="store_true", help="AutoAttack, too: takes long")
    add("--outside", nargs="+", default=[], help="more OOD images to detect, such as blobs")
    add("--ood_images", type=COUNT, default=10_000, help="OOD images at most, of each kind")
    add("--score", default="energy", choices=["energy", "softmax"], help="of what is real")
    args = parser.parse_args()
    args.out = args.out or args.checkpoint.with_name("evaluation.json")
    if args.out.exists():
        raise InputError(f"--out {args.out} exists: expected a new file")
    if args.norm and not args.radii:
        raise InputError(f"--norm {args.norm}: give --radii in this norm")
    return args


def batches(source, most, device, args, name):
    """(images (B, C, S, S), labels (B,)) of the test part, some at a time. name: of the figure"""
    ids = source.some(TEST, most)
    for first in tqdm(range(0, len(ids), args.batch_size), desc=name, disable=None, leave=False):
        own = ids[first : first + args.batch_size]
        x = script.pixels(torch.from_numpy(source.images[own]).to(device))
        yield x, torch.from_numpy(source.labels[own]).to(device)


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


def make_autoattack(model, classes, eps, norm):
    """Functions of images and labels that give attacked images: AutoAttack by its authors' package
    or, where that is not installed, by the parts that torchattacks has, with their numbers of
    steps. Raises InputError."""
    device = next(model.parameters()).device
    try:
        from autoattack import AutoAttack

        whole = AutoAttack(model, norm=norm, eps=eps, seed=0, device=device, verbose=False)
        whole.apgd_targeted.n_target_classes = whole.fab.n_target_classes = min(9, classes - 1)
        if classes < 4:  # its loss is of the four highest logits
            whole.attacks_to_run.remove("apgd-t")
        return [lambda x, labels: whole.run_standard_evaluation(x, labels, bs=len(x))]
    except ImportError:
        pass
    try:
        import torchattacks
    except ImportError:
        text = "pip install --no-deps torchattacks==3.5.1, or github.com/fra31/auto-attack"
        raise InputError(f"--autoattack needs a package: {text}") from None
    options = {"norm": norm, "eps": eps, "seed": 0, "n_restarts": 1}
    targets = {"n_classes": min(classes, 10)}  # nine of them at most
    attacks = [torchattacks.APGD(model, steps=100, loss="ce", **options)]
    if classes > 3:
        attacks.append(torchattacks.APGDT(model, steps=100, **targets, **options))
    fab = torchattacks.FAB(model, steps=100, multi_targeted=True, **targets, **options)
    return [*attacks, fab, torchattacks.Square(model, n_queries=5000, **options)]


def autoattack(model, attacks, x, labels):
    """(B,) whether each image is told right, and so after each attack."""
    alive = model(x).argmax(1) == labels
    for attack in attacks:
        left = alive.nonzero()[:, 0]
        if len(left) > 0:
            z = attack(x[left].contiguous(), labels[left])  # they take no other layout
            with torch.no_grad():
                alive[left] = model(z).argmax(1) == labels[left]
    return alive


def calibration_error(logits, labels, bins=15):
    """The mean over the images of |accuracy - mean confidence| of their bin of confidence ()."""
    confidence, predicted = logits.double().softmax(1).max(1)
    numbers = (confidence * bins).ceil().long().clamp(1, bins) - 1
    surplus = torch.zeros(bins, dtype=torch.float64, device=logits.device)
    surplus.index_add_(0, numbers, (predicted == labels).double() - confidence)
    return surplus.abs().sum() / len(labels)


def false_positive_rate(real, fake):
    """The smallest one at which 95 % of the real images are taken for real ()."""
    truth = np.repeat([1, 0], [len(real), len(fake)])
    scores = torch.cat([real, fake]).cpu().numpy()
    rates, found, _ = roc_curve(truth, scores, drop_intermediate=False)
    return rates[np.argmax(found >= 0.95)]


def measure(model, options, indist, sources, device, args):
    """({name: figure}, {name: its standard error}, {kind: count}). sources: {kind: OOD images}"""
    attacks = {}
    for eps in args.radii if args.autoattack else []:
        attacks[eps] = make_autoattack(model, len(indist.classes), eps, args.norm)
    found = {}
    errors = {}

    def note(name, values):
        """values: the figure (), or those of the images (n,), of which it is the mean"""
        values = torch.as_tensor(values).double()
        found[name] = values.mean().item()
        text = f"{name:24} {found[name]:.4f}"
        if values.ndim == 1:
            errors[name] = values.std().item() / math.sqrt(len(values))
            text += f" +- {errors[name]:.4f}"
        print(text, flush=True)

    def score(logits, labels=None):
        return logits.logsumexp(1) if args.score == "energy" else logits.softmax(1).amax(1)

    made = [(model(x), y) for x, y in batches(indist, args.images, device, args, "clean")]
    logits, labels = map(torch.cat, zip(*made, strict=True))
    note("clean", logits.argmax(1) == labels)
    note("commonest class", labels.bincount().max() / len(labels))
    note("cross_entropy", script.cross_entropy(logits, labels))
    note("ece", calibration_error(logits, labels))
    for eps in args.radii:
        name = f"robust@{eps:g}"
        made = batches(indist, args.images, device, args, name)
        alive = [survivors(model, x, y, args.attack_steps, eps, args.norm) for x, y in made]
        note(name, torch.cat(alive))

    counts = {}
    training_norm = options["indist_attack_clf_norm"]
    eps = OOD_RADIUS * options["indist_attack_clf_eps"]
    for kind, source in sources.items():
        for name, steps in ((f"auroc {kind}", 0), (f"adv_auroc {kind}", args.attack_steps)):
            fake = []
            for x, _ in batches(source, args.ood_images, device, args, name):
                z = script.attack(model, score, x, None, steps, eps / 4, eps, training_norm)
                fake.append(score(model(z)))
            fake = torch.cat(fake)
            note(name, script.auc(score(logits), fake))
            if steps == 0:
                note(f"fpr95 {kind}", false_positive_rate(score(logits), fake))
        counts[kind] = len(fake)

    for eps in attacks:
        name = f"autoattack@{eps:g}"
        made = batches(indist, args.images, device, args, name)
        note(name, torch.cat([autoattack(model, attacks[eps], x, y) for x, y in made]))
    return found, errors, {**counts, "test images": len(labels)}


def main():
    try:
        args = parse_args()
        device = script.choose_device(args, local_rank=0)
        model, state = load_network(args, device)
        if not os.access(args.out.parent, os.W_OK):
            raise InputError(f"--out {args.out}: there is no such folder that can be written to")
        args.radii = args.radii or [state["args"]["indist_attack_clf_eps"]]
        args.norm = args.norm or state["args"]["indist_attack_clf_norm"]
        indist, sources = load_images(args, state, args.outside)
        found, errors, counts = measure(model, state["args"], indist, sources, device, args)
        content = {**found, "standard_errors": errors, "counts": counts, "options": vars(args)}
        args.out.write_text(json.dumps(content, indent=1, default=str))
    except (InputError, OSError) as error:
        print(f"evaluate_rebm.py: error: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"{args.out}: of {', '.join(f'{count:,} {name}' for name, count in counts.items())}")


if __name__ == "__main__":
    main()
