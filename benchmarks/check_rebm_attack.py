"""Is run_train_rebm_ddp.py's robust accuracy right? Against an independent library, on the same network and images.

    OMP_NUM_THREADS=1 python benchmarks/check_rebm_attack.py CONFIG.yaml WEIGHTS [--images 360 --fast] [KEY=VALUE ...]

WEIGHTS is at.pth or dat.pth of a run of CONFIG.yaml. The other side is torchattacks, with the parts of the standard
AutoAttack (Croce and Hein 2020) and its numbers of steps (torchattacks.AutoAttack itself takes 10 instead of 100): APGD
up the cross entropy, targeted APGD and targeted FAB at all wrong classes, and Square with 5,000 queries, each on the
images that are left; --fast leaves out the last two, which take most of the time and seldom find more. Shown: robust
accuracy of both and of the worst of both, seconds of CPU time, and how far their points lie from the images. It ends
with status 1 where ours is more than --tolerance above theirs, or one of our points lies outside of its ball or [0, 1].

torchattacks is installed by pip, without its dependencies (torchvision is only on its list), into --folder, an
environment of its own that only this program looks into.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import run_train_rebm_ddp as rebm

VERSION = "3.5.1"


class Points:
    """The farthest point of an attack from its image, and the farthest coordinate outside of [0, 1]."""

    def __init__(self, norm: str):
        self.norm, self.far, self.outside = norm, 0.0, -math.inf

    def add(self, x: Tensor, adv: Tensor) -> None:
        move = (adv - x).detach().double().flatten(1)
        length = move.norm(dim=1) if self.norm == "L2" else move.abs().amax(1)
        self.far = max(self.far, length.max().item())
        self.outside = max(self.outside, -adv.min().item(), adv.max().item() - 1)


def library(folder: Path):
    """torchattacks, from `folder`, which is behind all that Python has: nothing of ours is replaced."""
    if not (folder / "torchattacks").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*command, f"torchattacks=={VERSION}"], check=True)
    sys.path.append(str(folder))
    import torchattacks

    return torchattacks


def watched(points: Points):
    """The script's attack, which shows `points` all that it returns."""
    attack = rebm.pgd

    def pgd(net, x: Tensor, *more, **options) -> Tensor:
        adv = attack(net, x, *more, **options)
        points.add(x, adv)
        return adv

    return pgd


def by_library(torchattacks, model, x: Tensor, y: Tensor, options, args, classes: int, points: Points) -> Tensor:
    """Whether each image (B,) is classified rightly at all points that torchattacks finds."""
    common = {"norm": args.clf_attack_norm, "eps": args.clf_attack_eps, "seed": 0, "n_restarts": 1}
    attacks = [torchattacks.APGD(model, steps=options.steps, loss="ce", **common),
               torchattacks.APGDT(model, steps=options.steps, n_classes=classes, **common)]  # fmt: skip
    if not options.fast:
        attacks += [torchattacks.FAB(model, steps=options.steps, n_classes=classes, multi_targeted=True, **common),
                    torchattacks.Square(model, n_queries=5000, **common)]  # fmt: skip
    with torch.no_grad():
        alive = model(x).argmax(1) == y
    for attack in attacks:
        left = alive.nonzero()[:, 0]
        if len(left):
            adv = attack(x[left], y[left]).detach()
            points.add(x[left], adv)
            with torch.no_grad():
                alive[left] = model(adv).argmax(1) == y[left]
        print(f"  {type(attack).__name__:<8}{int(alive.sum())} left", flush=True)
    return alive


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("config")
    p.add_argument("weights")
    p.add_argument("--images", type=int, default=360, help="test images, the first ones")
    p.add_argument("--batch", type=int, default=360, help="images at a time")
    p.add_argument("--fast", action="store_true", help="APGD alone, up the cross entropy and targeted")
    p.add_argument("--steps", type=int, default=100, help="of torchattacks' APGD and FAB")
    p.add_argument("--tolerance", type=float, default=0.02, help="ours may be so much above theirs")
    p.add_argument("--folder", type=Path, default=Path("cache") / f"torchattacks-{VERSION}", help="its environment")
    options, more = p.parse_known_args()
    torchattacks = library(options.folder)
    rebm.start_logging(0)
    args = rebm.parse_args([options.config, *more])
    ddp = rebm.DDPContext(0, 1, 0, 1, rebm.choose_device(args.device, 0), "gloo", "python")
    data = rebm.load_data(args, ddp)
    task = rebm.assemble(args, ddp, data)
    task.model.load_state_dict(rebm.read_weights(options.weights))
    task.model.eval()
    count, eps, norm = min(options.images, len(data.test)), args.clf_attack_eps, args.clf_attack_norm
    points = {"ours": Points(norm), "torchattacks": Points(norm)}
    alive, seconds = {name: [] for name in points}, dict.fromkeys(points, 0.0)
    rebm.pgd = watched(points["ours"])
    clean = 0
    with rebm.frozen(task.model):
        for ids in np.split(np.arange(count), range(options.batch, count, options.batch)):
            x, y = rebm.augment(data.test.batch(ids), "none", data.size, None), data.test.targets(ids)
            with torch.no_grad():
                clean += int((task.model(x).argmax(1) == y).sum())
            for name in points:
                begin = time.process_time()
                alive[name].append(
                    rebm.survives(task, x, y, ids, eps) if name == "ours" else
                    by_library(torchattacks, task.model, x, y, options, args, data.classes, points[name]))  # fmt: skip
                seconds[name] += time.process_time() - begin
    found = {name: torch.cat(parts) for name, parts in alive.items()}
    worst = found["ours"] & found["torchattacks"]
    print(f"{count} test images, {norm} radius {eps:g}; ours: {args.eval_restarts} starts of {args.eval_steps} steps; "
          f"torchattacks {VERSION}{', APGD alone' if options.fast else ''}; torch {torch.__version__}, "
          f"{torch.get_num_threads()} threads\nclean                {clean / count:.4f}")  # fmt: skip
    for name, rows in found.items():
        print(f"robust, {name:<13}{rows.double().mean():.4f}  {seconds[name]:6.1f} s CPU  {int((rows & ~worst).sum())} "
              f"images that only the other one finds; farthest point {points[name].far:.6f}, "
              f"beyond [0, 1] {max(0.0, points[name].outside):.1e}")  # fmt: skip
    print(f"robust, worst        {worst.double().mean():.4f}")
    above = (found["ours"].double().mean() - found["torchattacks"].double().mean()).item()
    if points["ours"].far > eps * (1 + 1e-5) or points["ours"].outside > 0:
        sys.exit("the evaluation attack has left its ball or [0, 1]")
    if above > options.tolerance:
        sys.exit(f"ours is {above:.4f} above torchattacks', more than {options.tolerance:g}")


if __name__ == "__main__":
    main()
