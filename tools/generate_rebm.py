"""Let a network of run_train_rebm_ddp.py generate images.

    python tools/generate_rebm.py outputs/rebm_quickstart/best.pt --out digits.png
    python tools/generate_rebm.py outputs/rebm_cifar10/best.pt --steps 32 --step_size 0.2

OOD images of the test part, of the kind that the network was trained with, climb towards a class:
the attack of training, with labels in turn, and most often a longer way (--steps times --step_size)
than the T steps of training went. In fp32, with the averaged weights where a file has them.

Writes a picture, a class in each column (ten classes at most), and with --npz all images: images
(N, C, S, S) uint8 and labels (N,).
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

import run_train_rebm_ddp as script
from run_train_rebm_ddp import InputError, count


def add_network_arguments(parser):
    """What all tools that load a network of a run take."""
    add = parser.add_argument
    add("checkpoint", type=Path, help="best.pt, at_best.pt or latest.pt of a run")
    add("--data", help="folder of the images; default: that of the run")
    text = "OOD images to start from: noise, blobs or a folder; default: those of the run"
    add("--outdist_data", help=text)
    add("--steps", type=count, default=60, help="steps of the way that images are generated on")
    add("--step_size", type=script.positive, help="length of a step; default: that of training")
    add("--batch_size", type=count, default=256, help="images at a time")
    add("--device", default="auto", choices=["auto", "cuda", "xpu", "cpu"], help="auto: the best")


def parse_args(words=None):
    parser = script.Parser(description=__doc__)
    add_network_arguments(parser)
    add = parser.add_argument
    add("--out", type=Path, default=Path("samples.png"), help="picture to write")
    add("--npz", type=Path, help="file to write all images to")
    add("--num_samples", type=count, default=100, help="images to generate")
    args = parser.parse_args(words)
    for path in (args.out, args.npz):
        if path is not None and path.exists():
            parser.error(f"{path} exists: remove it, or give another name")
    if args.out.suffix not in (".png", ".jpg", ".webp"):
        parser.error(f"--out {args.out}: expected a name that ends in .png, .jpg or .webp")
    return args


def load_network(args, device):
    """(network in evaluation mode, the options of its run, its images, OOD images)"""
    torch.backends.cudnn.allow_tf32 = False  # fp32 is meant
    if not script.is_whole(args.checkpoint):
        text = "is missing or damaged: expected best.pt, of stage 1 at_best.pt"
        raise InputError(f"{args.checkpoint} {text}")
    state = script.load_checkpoint(args.checkpoint)
    if state.get("script") != "run_train_rebm_ddp.py":
        raise InputError(f"{args.checkpoint} is no checkpoint of run_train_rebm_ddp.py")
    options = argparse.Namespace(**state["args"])
    inside = script.Images(args.data or options.data)
    if not inside.classes:
        raise InputError(f"{inside.name} has no labels: it can only be OOD images")
    if inside.hash != state["data_hash"].split()[0]:
        text = "is not what the network was trained on: its test part may hold training images"
        print(f"{inside.name} {text}")
    outside = script.load_outside(args.outdist_data or options.outdist_data, inside)

    model = script.make_network(options, len(inside.classes), inside.channels, inside.size)
    script.load_weights(model, args.checkpoint)
    return model.requires_grad_(False).train(False).to(device), options, inside, outside


def generate(model, options, outside, classes, size, device, args):
    """(--num_samples, C, size, size) uint8 images; number i is of class i % classes"""
    gain = script.logsumexp if options.logsumexp_sampling else script.label_logit
    step_size = args.step_size or options.attack_step_size
    climb = script.Attack(model, gain, step_size, options.attack_eps, options.attack_norm)
    starts = outside.part("test")
    numbers = np.arange(args.num_samples)
    made = []
    for first in tqdm(range(0, len(numbers), args.batch_size), desc="generating", disable=None):
        some = numbers[first : first + args.batch_size]
        x = script.picture_batch(outside, starts[some % len(starts)], size, device)
        labels = torch.from_numpy(some % classes).to(device)
        made.append((climb(x, labels, args.steps) * 255).round().byte().cpu())
    return torch.cat(made)


def write_picture(path, images, classes):
    """A class in each column, ten rows at most."""
    from PIL import Image

    columns = min(classes, 10)
    if len(images) < columns:
        raise InputError(f"--num_samples {len(images)}: expected one of each class or more")
    rows = []
    for first in range(0, min(len(images), 10 * classes), classes):
        row = images[first : first + columns]
        if len(row) == columns:
            # a grey line around each
            rows.append(torch.cat([*F.pad(row, (1, 1, 1, 1), value=128)], dim=2))
    picture = torch.cat(rows, dim=1).permute(1, 2, 0).expand(-1, -1, 3).numpy()
    scale = -(-480 // picture.shape[1])  # at least 480 pixels wide
    Image.fromarray(np.kron(picture, np.ones((scale, scale, 1), np.uint8))).save(path)


def main():
    try:
        args = parse_args()
        device = script.choose_device(args, local_rank=0)
        model, options, inside, outside = load_network(args, device)
        classes = len(inside.classes)
        for path in (args.out, args.npz or args.out):
            path.parent.mkdir(parents=True, exist_ok=True)
        images = generate(model, options, outside, classes, inside.size, device, args)
        write_picture(args.out, images, classes)
        if args.npz:
            labels = np.arange(len(images)) % classes
            np.savez_compressed(args.npz, images=images.numpy(), labels=labels)
    except (InputError, OSError) as error:
        print(f"generate_rebm.py: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, InputError) else 1)
    print(f"{args.out}: {len(images):,} images of {classes} classes")


if __name__ == "__main__":
    main()
