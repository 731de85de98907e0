"""Is the robust accuracy of tools/evaluate_rebm.py right? Against an independent library, on the
same network and images.

    OMP_NUM_THREADS=1 python benchmarks/check_rebm_attack.py outputs/rebm_quickstart/best.pt
    OMP_NUM_THREADS=1 python benchmarks/check_rebm_attack.py outputs/rebm_quickstart/best.pt --fast

The other side is torchattacks, with the parts of the standard AutoAttack (Croce and Hein 2020) and
its numbers of steps (torchattacks.AutoAttack itself takes 10 instead of 100): APGD up the cross
entropy, targeted APGD and targeted FAB at all wrong classes, and Square with 5,000 queries, each on
the images that are left; --fast leaves out the last two, which take most of the time and seldom
find more. It ends with status 1 where ours is more than --tolerance above theirs.

torchattacks is installed by pip, without its dependencies (torchvision is only on its list), into
cache/, where only this program looks for it.
"""

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch

ROOT = Path(__file__).resolve().parents[1]
VERSION = "3.5.1"
STEPS = 100
QUERIES = 5000


def load_library():
    """torchattacks, from a folder behind all that Python has: nothing is replaced."""
    folder = Path("cache") / f"torchattacks-{VERSION}"
    if not (folder / "torchattacks").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        package = f"torchattacks=={VERSION}"
        subprocess.run([*command, "--target", folder, package], check=True)
    sys.path.append(str(folder))
    return importlib.import_module("torchattacks")


def by_tool(checkpoint, count):
    """What tools/evaluate_rebm.py says of `count` test images."""
    tool = ROOT / "tools" / "evaluate_rebm.py"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "evaluation.json")
        options = [f"--images={count}", f"--out={out}", "--num_samples=0", "--ood_images=1"]
        command = [sys.executable, tool, checkpoint, *options, "--device=cpu"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.loads(out.read_text())


def by_library(model, x, y, classes, norm, eps, is_fast):
    """Accuracy at all points that torchattacks finds."""
    library = load_library()
    common = {"norm": norm, "eps": eps, "seed": 0, "n_restarts": 1}
    attacks = [library.APGD(model, steps=STEPS, loss="ce", **common)]
    attacks.append(library.APGDT(model, steps=STEPS, n_classes=classes, **common))
    if not is_fast:
        targets = {"n_classes": classes, "multi_targeted": True}
        attacks.append(library.FAB(model, steps=STEPS, **targets, **common))
        attacks.append(library.Square(model, n_queries=QUERIES, **common))
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
    add = parser.add_argument
    add("checkpoint", type=Path, help="best.pt of a run")
    add("--images", type=int, default=360, help="test images at most")
    add("--fast", action="store_true", help="APGD alone, up the cross entropy and targeted")
    add("--tolerance", type=float, default=0.01, help="ours may be so much above theirs")
    args = parser.parse_args()

    sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
    script = importlib.import_module("run_train_rebm_ddp")
    generate = importlib.import_module("generate_rebm")
    words = SimpleNamespace(checkpoint=args.checkpoint, data=None, outdist_data="noise")
    model, options, images, _ = generate.load_network(words, torch.device("cpu"))
    norm = options.indist_attack_clf_norm
    eps = options.indist_attack_clf_eps
    ids = images.some("test", args.images)
    x = script.picture_batch(images, ids, images.size, torch.device("cpu"))
    y = torch.from_numpy(images.labels[ids])

    theirs = by_library(model, x, y, len(images.classes), norm, eps, args.fast)
    found = by_tool(args.checkpoint, args.images)
    ours = found[f"robust@{eps:g}"]
    print(f"{len(ids)} test images, {norm} radius {eps:g}; torchattacks {VERSION}")
    print(f"clean {found['clean']:.4f}; robust: ours {ours:.4f}, torchattacks {theirs:.4f}")
    if ours > theirs + args.tolerance:
        sys.exit(f"ours is {ours - theirs:.4f} above, more than {args.tolerance:g}")


if __name__ == "__main__":
    main()
