"""Let a network of run_train_rebm_ddp.py generate images.

    python tools/generate_rebm.py outputs/rebm_quickstart/best.pt --out digits.png
    python tools/generate_rebm.py outputs/rebm_cifar10/best.pt --steps 32 --step_size 0.2

OOD images of the test part, of the kind that the network was trained with, climb towards a class:
the attack of training, with labels in turn, and most often a longer way (--steps times --step_size)
than the T steps of training went. In fp32, with the averaged weights.

Writes a picture, a class in each column (ten classes at most), and with --npz all images: images
(N, C, S, S) uint8 and labels (N,), for a program that measures FID with an Inception network.
Prints how far they are from training images: frechet_pixels, the Frechet distance (Heusel et al.
2017) of the means of pixels over a grid of 8 x 8 blocks; beside it that of as many real test
images, and OOD images. With few --num_samples it is large for all three.
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
from run_train_rebm_ddp import COUNT, InputError

SCRIPT = "run_train_rebm_ddp.py"


def add_network_arguments(parser):
    """What all tools that load a network of a run take."""
    add = parser.add_argument
    add("checkpoint", type=Path, help="best.pt, at_best.pt or latest.pt of a run")
    add("--data", help="images; default: those of the run")
    add("--outdist_data", help="OOD images; default: those of the run")
    add("--cache_dir", help="where images that are read are kept; default: that of the run")
    add("--batch_size", type=COUNT, default=256, help="images at a time")
    add("--device", default="auto", choices=["auto", "cuda", "xpu", "cpu"], help="auto: the best")


def parse_args():
    parser = script.Parser(description=__doc__)
    add_network_arguments(parser)
    add = parser.add_argument
    add("--out", type=Path, default=Path("samples.png"), help="picture to write")
    add("--npz", type=Path, help="file to write all images to")
    add("--num_samples", type=COUNT, default=100, help="images to generate")
    add("--steps", type=COUNT, default=60, help="steps of the way that they are generated on")
    length = script.number(1e-6, 1e6)
    add("--step_size", type=length, help="length of a step; default: that of training")
    args = parser.parse_args()
    for path in (args.out, args.npz):
        if path is not None and path.exists():
            parser.error(f"{path} exists: remove it, or give another name")
    if args.out.suffix not in (".png", ".jpg", ".webp"):
        parser.error(f"--out {args.out}: expected a name that ends in .png, .jpg or .webp")
    return args


def load_network(checkpoint, device):
    """(network in evaluation mode, the checkpoint)"""
    torch.backends.cudnn.allow_tf32 = False  # fp32 is meant
    if not checkpoint.is_file():
        raise InputError(f"{checkpoint}: there is no such file")
    state = script.read_checkpoint(checkpoint)
    if not isinstance(state, dict) or state.get("script") != SCRIPT:
        raise InputError(f"{checkpoint}: expected best.pt or latest.pt of {SCRIPT}")
    options = argparse.Namespace(**state["args"])
    loop = state["loop"]
    model = script.make_network(options, len(loop["classes"]), *loop["shape"])
    script.load_weights(model, state, checkpoint)
    return model.requires_grad_(False).eval().to(device), state


def load_images(args, state):
    """(images, OOD images) of the run, or those that are given."""
    options = argparse.Namespace(**state["args"])
    options.cache_dir = args.cache_dir or options.cache_dir
    options.image_shape = state["loop"]["shape"]
    name = args.data or options.data
    folder = script.prepare(options, name)
    inside = script.Images(folder)
    if [*inside.shape] != state["loop"]["shape"] or inside.classes != state["loop"]["classes"]:
        text = f"{inside.shape} pixels, classes {', '.join(inside.classes)}"
        raise InputError(f"{name}: these images have {text}: not the network's")

    if inside.hash != options.data_hash.split()[0]:
        text = "are not those of the run: what it was trained on may be among the test images"
        print(f"warning: {name}: these images {text}")
    outside = script.prepare(options, args.outdist_data or options.outdist_data, folder)
    return inside, script.Images(outside)


def generate(model, state, outside, device, args):
    """(--num_samples, C, S, S) uint8 images; number i is of class i % classes"""
    size = args.step_size or state["args"]["attack_step_size"]
    climb = script.Attack(model, script.label_logit, size)
    starts = outside.part("test")
    numbers = np.arange(args.num_samples)
    classes = len(state["loop"]["classes"])
    period = math.lcm(len(starts), classes)  # after which a start would get the same class again
    made = []
    for first in tqdm(range(0, len(numbers), args.batch_size), desc="generating", disable=None):
        some = numbers[first : first + args.batch_size]
        x = pictures(outside, starts[(some + some // period) % len(starts)], device)
        labels = torch.from_numpy(some % classes).to(device)
        made.append((climb(x, labels, args.steps) * 255).round().byte().cpu())
    return torch.cat(made)


def pictures(source, ids, device):
    return script.pixels(torch.from_numpy(source.images[ids]).to(device))


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


def block_means(images):
    """(n, C, S, S) uint8 -> (n, D): means of pixels in [0, 1] over a grid of 8 x 8 blocks"""
    size = min(8, images.shape[2])
    parts = [F.adaptive_avg_pool2d(part.float() / 255, size) for part in images.split(1000)]
    return torch.cat(parts).flatten(1)


def measure_distance(made, inside, outside):
    """{name: Frechet distance from training images} of generated images, of test images, and of
    OOD images, from which the generated ones come. Says so if they have not come far. The distance
    is larger for fewer images: so of all three there are as many, if there are."""
    sides = {"frechet_pixels": made}
    for name, source in {"real": inside, "OOD": outside}.items():
        images = source.images[source.some("test", len(made))]
        sides[f"frechet_pixels {name}"] = torch.from_numpy(images)

    train = block_means(torch.from_numpy(inside.images[inside.some("train", 50_000)]))
    found = {}
    for name, images in sides.items():
        found[name] = frechet(train, block_means(images))
    if found["frechet_pixels"] > 0.5 * found["frechet_pixels OOD"]:
        text = "the generated images are still near the OOD images that they started from"
        print(f"warning: {text}: give more --steps, or train longer (T must grow)")
    return found


def write_picture(path, images, classes):
    """A class in each column, ten classes and 20 rows at most. Returns how many images it shows."""
    columns = min(classes, 10)
    rows = min(len(images) // classes, 20)
    lines = []
    for first in range(0, rows * classes, classes):
        # a grey line around each
        line = F.pad(images[first : first + columns], (1, 1, 1, 1), value=128)
        lines.append(torch.cat([*line], dim=2))

    picture = torch.cat(lines, dim=1).permute(1, 2, 0).expand(-1, -1, 3).numpy()
    scale = -(-480 // picture.shape[1])  # at least 480 pixels wide
    Image.fromarray(np.kron(picture, np.ones((scale, scale, 1), np.uint8))).save(path)
    return rows * columns


def main():
    try:
        args = parse_args()
        device = script.choose_device(args, local_rank=0)
        model, state = load_network(args.checkpoint, device)
        inside, outside = load_images(args, state)
        classes = len(inside.classes)
        if args.num_samples < classes:
            text = f"expected one of each of the {classes} classes or more"
            raise InputError(f"--num_samples {args.num_samples}: {text}")

        for path in (args.out, args.npz or args.out):
            path.parent.mkdir(parents=True, exist_ok=True)
        images = generate(model, state, outside, device, args)
        shown = write_picture(args.out, images, classes)
        if args.npz:
            labels = np.arange(len(images)) % classes
            with open(args.npz, "wb") as file:  # numpy would give a name another ending
                np.savez_compressed(file, images=images.numpy(), labels=labels)
        found = {}
        if len(images) > 1:
            found = measure_distance(images, inside, outside)
    except (script.RunError, OSError) as error:
        print(f"generate_rebm.py: {error}", file=sys.stderr)
        sys.exit(2)
    for name, value in found.items():
        print(f"{name:24} {value:.4f}")
    print(f"{args.out}: {shown} of {len(images):,} images, {classes} classes")


if __name__ == "__main__":
    main()
