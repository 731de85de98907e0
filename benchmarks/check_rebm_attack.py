"""Is the robust accuracy of tools/evaluate_rebm.py right? Against an independent library, on the
same network and images.

    pip install --no-deps torchattacks==3.5.1              # torchvision is only on its list
    OMP_NUM_THREADS=1 python benchmarks/check_rebm_attack.py outputs/rebm_quickstart/best.pt

The other side is torchattacks, with the parts of the standard AutoAttack (Croce and Hein 2020) and
its numbers of steps (torchattacks.AutoAttack itself takes 10 instead of 100): APGD up the cross
entropy, targeted APGD and targeted FAB at all wrong classes, and Square with 5,000 queries, each on
the images that are left. It ends with status 1 where ours is more than 0.01 above theirs.
"""

import argparse
import importlib
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import sides
import torch

STEPS = 100
QUERIES = 5000
TOLERANCE = 0.01


def by_tool(checkpoint, count):
    """What tools/evaluate_rebm.py says of `count` test images."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "evaluation.json")
        options = [f"--images={count}", "--ood_images=1", "--device=cpu"]
        options.append("--outside")  # no others
        sides.run_tool("evaluate_rebm.py", checkpoint, f"--out={out}", *options)
        return json.loads(out.read_text())


def by_library(model, x, y, classes, norm, eps):
    """Accuracy at all points that torchattacks finds."""
    import torchattacks

    common = {"norm": norm, "eps": eps, "seed": 0, "n_restarts": 1}
    targets = {"n_classes": classes, "multi_targeted": True}
    attacks = [
        torchattacks.APGD(model, steps=STEPS, loss="ce", **common),
        torchattacks.APGDT(model, steps=STEPS, n_classes=classes, **common),
        torchattacks.FAB(model, steps=STEPS, **targets, **common),
        torchattacks.Square(model, n_queries=QUERIES, **common),
    ]
    with torch.no_grad():
        alive = model(x).argmax(1) == y
    for attack in attacks:
        left = alive.nonzero()[:, 0]
        if len(left):
            found = attack(x[left], y[left]).detach()
            with torch.no_grad():
                alive[left] = model(found).argmax(1) == y[left]
        print(f"{type(attack).__name__:<8}{int(alive.sum())} left", flush=True)
    return alive.double().mean().item()


def main():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("checkpoint", type=Path, help="best.pt of a run")
    parser.add_argument("--images", type=int, default=360, help="test images at most")
    args = parser.parse_args()

    sys.path.insert(0, str(sides.ROOT / "tools"))
    tool = importlib.import_module("generate_rebm")
    device = torch.device("cpu")
    model, state = tool.load_network(args.checkpoint, device)
    words = SimpleNamespace(data=None, outdist_data=None, cache_dir=None)
    images, _ = tool.load_images(words, state)
    norm = state["args"]["indist_attack_clf_norm"]
    eps = state["args"]["indist_attack_clf_eps"]
    ids = images.some(tool.TEST, args.images)
    x = tool.pictures(images, ids, device)
    y = torch.from_numpy(images.labels[ids])

    theirs = by_library(model, x, y, len(images.classes), norm, eps)
    found = by_tool(args.checkpoint, args.images)
    ours = found[f"robust@{eps:g}"]
    print(f"{len(ids)} test images, {norm} radius {eps:g}")
    print(f"clean {found['clean']:.4f}; robust: ours {ours:.4f}, torchattacks {theirs:.4f}")
    if ours > theirs + TOLERANCE:
        sys.exit(f"ours is {ours - theirs:.4f} above, more than {TOLERANCE:g}")


if __name__ == "__main__":
    main()
