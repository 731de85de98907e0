"""Let a network of run_train_rebm_ddp.py generate images.

    python tools/generate_rebm.py outputs/rebm_quickstart/best.pt --out digits.png
    python tools/generate_rebm.py outputs/rebm_cifar10/best.pt --steps 32 --step_size 0.2

OOD images of the test part, of the kind that the network was trained with, climb towards a class:
the attack of training, with labels in turn, and most often a longer way (--steps times --step_size)
than the T steps of training went. In fp32, with the averaged weights.

Writes a picture, a class in each column (ten classes at most), and with --npz all images: images
(N, C, S, S) uint8 and labels (N,). Programs that measure FID want other files, to be made of these.
"""

import argparse
import math
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from tqdm import tqdm

import run_train_rebm_ddp as script
from run_train_rebm_ddp import COUNT, TEST, HelpFormatter, InputError, Parser, expanded


def add_network_arguments(parser):
    """What all tools that load a network of a run take."""
    add = parser.add_argument
    add("checkpoint", type=Path, help="best.pt, at_best.pt, step_N.pt or latest.pt of a run")
    add("--data", type=expanded, help="images, if not those of the run")
    add("--outdist_data", type=expanded, help="OOD images, if not those of the run")
    add("--cache_dir", type=expanded, help="where what is read is kept, if not where the run did")
    add("--batch_size", type=COUNT, default=256, help="images at a time")
    add("--device", default="auto", choices=["auto", "cuda", "xpu", "cpu"], help="auto: the best")


def parse_args():
    parser = Parser(description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False)
    add_network_arguments(parser)
    add = parser.add_argument
    add("--out", type=Path, default=Path("samples.png"), help="picture to write")
    add("--npz", type=Path, help="file to write all images to")
    add("--num_samples", type=COUNT, default=100, help="images to generate")
    add("--steps", type=COUNT, default=60, help="steps of the way that they are generated on")
    length = script.number(1e-6, 1e6)
    add("--step_size", type=length, help="length of a step, if not that of training")
    args = parser.parse_args()

    for path in (args.out, args.npz):
        if path and path.exists():
            raise InputError(f"{path} exists: remove it, or give another name")
    if args.out.suffix not in (".png", ".jpg", ".webp"):
        raise InputError(f"--out {args.out}: expected a name that ends in .png, .jpg or .webp")
    return args


def load_network(checkpoint, device):
    """(network in evaluation mode, the checkpoint). InputError where that is of another script."""
    torch.backends.cudnn.allow_tf32 = False  # fp32 is meant
    try:
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises many kinds
        raise InputError(f"{checkpoint}: {' '.join(str(error).split())[:200]}") from None
    if state.get("script") != "run_train_rebm_ddp.py":
        raise InputError(
            f"{checkpoint}: expected best.pt, step_N.pt or latest.pt of run_train_rebm_ddp.py"
        )
    options = argparse.Namespace(**state["args"])
    model = script.make_network(options, len(state["loop"]["classes"]), *state["loop"]["shape"])
    script.read_weights(checkpoint, model)
    loop = state["loop"]
    print(f"{checkpoint}: of step {loop['step']}, stage {loop['phase']}, T = {loop['T']}")
    return model.requires_grad_(False).eval().to(device), state


def load_images(args, state):
    """(images, OOD images) of the run, or those that are given."""
    options = argparse.Namespace(**state["args"])
    options.cache_dir = args.cache_dir or options.cache_dir
    channels, options.size = state["loop"]["shape"]
    options.grey = channels == 1
    name = args.data or options.data
    indist = script.Images(script.prepare(options, name))
    if [*indist.shape] != state["loop"]["shape"] or indist.classes != state["loop"]["classes"]:
        text = f"{indist.shape} pixels, classes {', '.join(indist.classes)}"
        raise InputError(f"{name}: these images have {text}: not the network's")
    if indist.hash != options.data_hash.split()[0]:
        print(f"warning: {name}: other images than the run's, which may have trained on some")
    outdist = script.prepare(options, args.outdist_data or options.outdist_data, indist)
    return indist, script.Images(outdist)


def pictures(source, ids, device):
    return script.pixels(torch.from_numpy(source.images[ids]).to(device))


def generate(model, state, outdist, device, args):
    """(--num_samples, C, S, S) uint8 images; number i is of class i % classes"""
    step_size = args.step_size or state["args"]["attack_step_size"]
    starts = outdist.part(TEST)
    classes = len(state["loop"]["classes"])
    period = math.lcm(len(starts), classes)  # after which a start would get the same class again
    made = []
    for first in tqdm(range(0, args.num_samples, args.batch_size), desc="generating", disable=None):
        some = np.arange(first, min(first + args.batch_size, args.num_samples))
        x = pictures(outdist, starts[(some + some // period) % len(starts)], device)
        labels = torch.from_numpy(some % classes).to(device)
        z = script.attack(model, script.label_logit, x, labels, args.steps, step_size)
        made.append((z * 255).round().byte().cpu())
    return torch.cat(made)


def write_picture(path, images, classes):
    """A class in each column, ten classes and 20 rows at most. Returns how many images it shows."""
    columns = min(classes, 10)
    rows = min(len(images) // classes, 20)
    grid = images[: rows * classes].unflatten(0, (rows, classes))[:, :columns]
    grid = F.pad(grid, (1, 1, 1, 1), value=128)  # a grey line around each
    _, _, channels, height, width = grid.shape
    grid = grid.permute(0, 3, 1, 4, 2).reshape(rows * height, columns * width, channels)
    picture = Image.fromarray(grid.expand(-1, -1, 3).numpy())
    scale = math.ceil(480 / picture.width)  # at least 480 pixels wide
    size = (scale * picture.width, scale * picture.height)
    picture.resize(size, Image.Resampling.NEAREST).save(path)
    return rows * columns


def main():
    try:
        args = parse_args()
        device = script.choose_device(args, local_rank=0)
        model, state = load_network(args.checkpoint, device)
        _, outdist = load_images(args, state)
        classes = len(state["loop"]["classes"])
        if args.num_samples < classes:
            raise InputError(f"--num_samples: expected {classes} or more, one of each class")

        for path in (args.out, args.npz or args.out):
            path.parent.mkdir(parents=True, exist_ok=True)
        images = generate(model, state, outdist, device, args)
        shown = write_picture(args.out, images, classes)
        if args.npz:
            labels = np.arange(len(images)) % classes
            with open(args.npz, "wb") as file:  # numpy would give a name another ending
                np.savez_compressed(file, images=images.numpy(), labels=labels)
    except (InputError, OSError) as error:
        print(f"generate_rebm.py: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"{args.out}: {shown} of {len(images):,} images, {classes} classes")


if __name__ == "__main__":
    main()
