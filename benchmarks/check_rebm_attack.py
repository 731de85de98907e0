"""Is the robust accuracy of tools/evaluate_rebm.py right? Against an independent library, on the
same network and images.

    OMP_NUM_THREADS=1 python benchmarks/check_rebm_attack.py outputs/rebm_quickstart/best.pt
    OMP_NUM_THREADS=1 python benchmarks/check_rebm_attack.py outputs/rebm_quickstart/best.pt --fast

The other side is torchattacks, with the parts of the standard AutoAttack (Croce and Hein 2020) and
its numbers of steps (torchattacks.AutoAttack itself takes 10 instead of 100): APGD up the cross
entropy, targeted APGD and targeted FAB at all wrong classes, and Square with 5,000 queries, each on
the images that are left; --fast leaves out the last two, which take most of the time and seldom
find more. Shown: robust accuracy of both and of the worst of both, seconds of CPU time, and how far
points lie from the images. It ends with status 1 where ours is more than --tolerance above theirs,
or a point of our attack lies outside of its ball or of [0, 1].

torchattacks is installed by pip, without its dependencies (torchvision is only on its list), into
--folder, an environment of its own that only this program looks into.
"""

import argparse
import importlib
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
script = importlib.import_module("run_train_rebm_ddp")
evaluate = importlib.import_module("evaluate_rebm")
generate = importlib.import_module("generate_rebm")

VERSION = "3.5.1"


class Points:
    """The farthest point of an attack from its image, and the farthest outside of [0, 1]."""

    def __init__(self, norm):
        self.norm = norm
        self.far = 0.0
        self.outside = 0.0

    def add(self, x, points):
        move = (points - x).detach().double().flatten(1)
        length = move.norm(dim=1) if self.norm == "L2" else move.abs().amax(1)
        self.far = max(self.far, length.max().item())
        self.outside = max(self.outside, -points.min().item(), points.max().item() - 1)


def library(folder):
    """torchattacks, from `folder`, which is behind all that Python has: nothing is replaced."""
    if not (folder / "torchattacks").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        package = f"torchattacks=={VERSION}"
        subprocess.run([*command, "--target", str(folder), package], check=True)
    sys.path.append(str(folder))
    return importlib.import_module("torchattacks")


def watch_our_attack(points):
    plain = script.Attack.step

    def step(attack, z, x, labels, size):
        found, logits = plain(attack, z, x, labels, size)
        points.add(x, found)
        return found, logits

    script.Attack.step = step


def by_library(torchattacks, model, x, y, options, norm, eps, classes, points):
    """Whether each image (B,) is told right at all points that torchattacks finds."""
    common = {"norm": norm, "eps": eps, "seed": 0, "n_restarts": 1}
    steps = options.steps
    attacks = [torchattacks.APGD(model, steps=steps, loss="ce", **common)]
    attacks.append(torchattacks.APGDT(model, steps=steps, n_classes=classes, **common))
    if not options.fast:
        targets = {"n_classes": classes, "multi_targeted": True}
        attacks.append(torchattacks.FAB(model, steps=steps, **targets, **common))
        attacks.append(torchattacks.Square(model, n_queries=5000, **common))
    with torch.no_grad():
        alive = model(x).argmax(1) == y
    for attack in attacks:
        left = alive.nonzero()[:, 0]
        if len(left):
            found = attack(x[left], y[left]).detach()
            points.add(x[left], found)
            with torch.no_grad():
                alive[left] = model(found).argmax(1) == y[left]
        print(f"  {type(attack).__name__:<8}{int(alive.sum())} left", flush=True)
    return alive


def parse_args():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    add = parser.add_argument
    add("checkpoint", type=Path, help="best.pt of a run")
    add("--data", help="folder of the images; default: that of the run")
    add("--images", type=int, default=360, help="test images, the first ones")
    add("--batch", type=int, default=360, help="images at a time")
    add("--fast", action="store_true", help="APGD alone, up the cross entropy and targeted")
    add("--steps", type=int, default=100, help="of torchattacks' APGD and FAB")
    add("--eps", type=float, help="radius; default: that of training")
    add("--tolerance", type=float, default=0.02, help="ours may be so much above theirs")
    folder = Path("cache") / f"torchattacks-{VERSION}"
    add("--folder", type=Path, default=folder, help="its environment")
    return parser.parse_args()


def main():
    options = parse_args()
    torchattacks = library(options.folder)
    words = SimpleNamespace(checkpoint=options.checkpoint, data=options.data, outdist_data="noise")
    device = torch.device("cpu")
    model, of_run, inside, _ = generate.load_network(words, device)
    norm = of_run.indist_attack_clf_norm
    eps = options.eps or of_run.indist_attack_clf_eps
    defaults = SimpleNamespace(starts=5, attack_steps=50)
    points = {"ours": Points(norm), "torchattacks": Points(norm)}
    watch_our_attack(points["ours"])
    alive = {name: [] for name in points}
    seconds = dict.fromkeys(points, 0.0)
    rng = torch.Generator().manual_seed(0)
    clean = 0
    ids = inside.part("test")[: options.images]
    for first in range(0, len(ids), options.batch):
        some = ids[first : first + options.batch]
        x = script.picture_batch(inside, some, inside.size, device)
        y = torch.from_numpy(inside.labels[some])
        with torch.no_grad():
            clean += int((model(x).argmax(1) == y).sum())
        begin = time.process_time()
        alive["ours"].append(evaluate.survivors(model, x, y, of_run, eps, defaults, rng))
        middle = time.process_time()
        classes = len(inside.classes)
        found = by_library(
            torchattacks, model, x, y, options, norm, eps, classes, points["torchattacks"]
        )
        alive["torchattacks"].append(found)
        seconds["ours"] += middle - begin
        seconds["torchattacks"] += time.process_time() - middle

    found = {name: torch.cat(parts) for name, parts in alive.items()}
    worst = found["ours"] & found["torchattacks"]
    print(f"{len(ids)} test images, {norm} radius {eps:g}; torchattacks {VERSION}")
    print(f"clean                {clean / len(ids):.4f}")
    for name, rows in found.items():
        missed = int((rows & ~worst).sum())
        print(
            f"robust, {name:<13}{rows.double().mean():.4f}  {seconds[name]:6.1f} s CPU  "
            f"{missed} images that only the other one finds; farthest point "
            f"{points[name].far:.6f}, beyond [0, 1] {points[name].outside:.1e}"
        )
    print(f"robust, worst        {worst.double().mean():.4f}")
    above = np.subtract(*[rows.double().mean().item() for rows in found.values()])
    if points["ours"].far > eps * (1 + 1e-5) or points["ours"].outside > 0:
        sys.exit("the evaluation attack has left its ball or [0, 1]")
    if above > options.tolerance:
        sys.exit(f"ours is {above:.4f} above torchattacks', more than {options.tolerance:g}")


if __name__ == "__main__":
    main()
