"""Let a network of run_train_rebm_ddp.py generate images, or change yours.

    python tools/generate_rebm.py outputs/rebm_quickstart/best.pt --out digits.png
    python tools/generate_rebm.py outputs/rebm_cifar10/best.pt --steps 32 --step_size 0.2 \\
        --num_samples 50000 --folder samples
    python tools/generate_rebm.py best.pt --images my/*.png --to cat dog --radius 2

OOD images of the test part climb towards the classes in turn by the attack of training, most often
a longer way (--attack_steps times --step_size). Or each of --images climbs towards all classes, one
after the other, within a ball: what would have to be different for the network to see another class
(Augustin et al. 2020)? In fp32, with the averaged weights.

Writes a picture, a class in each column (ten classes and 20 rows at most), and with --folder each
image as a PNG, numbered in this order, as `python -m pytorch_fid` reads them to measure FID.
"""

import argparse
import math
import sys
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from tqdm import tqdm

import run_train_rebm_ddp as script
from run_train_rebm_ddp import COUNT, TEST, HelpFormatter, InputError, Parser, expanded


def add_network_arguments(parser):
    """What all tools that load a network of a run take."""
    add = parser.add_argument
    add("checkpoint", type=Path, help="best.pt, step_N.pt or latest.pt of a run; or weights")
    add("--model_type", choices=script.MODELS, help="of weights, which need --data, too")
    add("--data", type=expanded, help="images, if not the run's; without parts all are the test")
    add("--outdist_data", type=expanded, help="OOD images, if not those of the run")
    add("--cache_dir", type=expanded, help="where what is read is kept, if not where the run did")
    add("--batch_size", type=COUNT, default=256, help="images per forward pass")
    add("--device", default="auto", choices=["auto", "cuda", "xpu", "cpu"], help="auto: the best")


def parse_args():
    parser = Parser(description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False)
    add_network_arguments(parser)
    add = parser.add_argument
    add("--out", type=Path, default=Path("samples.png"), help="picture to write")
    add("--folder", type=Path, help="folder to write each image to, 000000.png, ...")
    add("--num_samples", type=COUNT, default=100, help="images to generate, if not of --images")
    add("--images", nargs="+", type=Path, help="start from these")
    add("--to", nargs="+", help="classes to climb towards, or any: up logsumexp f(x); else all")
    add("--attack_steps", "--steps", type=COUNT, default=60, help="steps of the attack")
    length = script.number(1e-6, 1e6)
    add("--step_size", type=length, help="of a step; else that of training, or radius / 10")
    add("--radius", type=length, default=math.inf, help="of the balls that they stay in, L2")
    args = parser.parse_args()

    if args.out.exists():
        raise InputError(f"--out {args.out} exists: expected a new file")
    if args.folder and args.folder.exists():
        raise InputError(f"--folder {args.folder} exists: expected a new folder")
    if args.to and "any" in args.to and len(args.to) > 1:
        raise InputError("--to any: expected no class beside it")
    if args.out.suffix not in (".png", ".jpg", ".webp"):
        raise InputError(f"--out {args.out}: expected a name that ends in .png, .jpg or .webp")
    return args


def load_state(args):
    """A checkpoint of a run. Of weights alone: the defaults of the script, and the classes and the
    shape of --data. Raises InputError."""
    state = script.load_file(args.checkpoint)
    if state.get("script") == "run_train_rebm_ddp.py":
        state.setdefault("data", state["loop"])  # where earlier versions had it
        print(f"{args.checkpoint}: of step {state['loop']['step']}, T = {state['loop']['T']}")
        return state
    if "script" in state or not (args.model_type and args.data):
        found = f"{args.checkpoint}: it is of {state.get('script', 'another program')}"
        raise InputError(f"{found}; {script.EXPECTED}; or weights, --model_type and --data")
    words = [f"--model_type={args.model_type}", f"--data={args.data}"]
    with mock.patch.object(sys, "argv", [script.__file__, *words]):
        options = script.parse_args()
    options.cache_dir = args.cache_dir or options.cache_dir
    images = script.Images(script.prepare(options, args.data, only_test=True))
    data = {"classes": images.classes, "shape": [*images.shape]}
    return {"args": vars(options), "data": data}


def load_network(args, device):
    """(network in evaluation mode, the checkpoint, see load_state)"""
    torch.backends.cudnn.allow_tf32 = False  # fp32 is meant
    state = load_state(args)
    data = state["data"]
    options = argparse.Namespace(**state["args"])
    model = script.make_network(options, len(data["classes"]), *data["shape"])
    script.read_weights(args.checkpoint, model)
    return model.requires_grad_(False).eval().to(device), state


def load_images(args, state, outside=()):
    """(images, {kind: OOD images}): those of the run, or given ones, without parts all to test."""
    options = argparse.Namespace(**state["args"])
    options.cache_dir = args.cache_dir or options.cache_dir
    channels, options.size = state["data"]["shape"]
    options.grey = channels == 1
    name = args.data or options.data
    indist = script.Images(script.prepare(options, name, None, bool(args.data)))
    classes = state["data"]["classes"]
    if indist.shape[0] != channels or indist.classes != classes:
        text = f"{indist.shape[0]} channels, classes {', '.join(indist.classes)}"
        expected = f"{channels}, {', '.join(classes)}; y_train of an .npz may have these names"
        raise InputError(f"{name}: {text}; expected the network's, {expected}")
    known = state["args"].get("data_hash")
    if known and indist.hash != known.split()[0]:
        print(f"warning: {name}: not the images of the run, which may have trained on some")
    sources = {}
    for kind in [args.outdist_data or options.outdist_data, *outside]:
        is_given = kind != options.outdist_data
        sources[kind] = script.Images(script.prepare(options, kind, indist, is_given))
    return indist, sources


def choose_starts(args, state, outdist=None):
    """(images (N, C, S, S) uint8, the class (N,) that each is to climb to, number of classes)"""
    names = state["data"]["classes"]
    for name in args.to or []:
        if name not in [*names, "any"]:
            raise InputError(f"--to {name}: expected any, or some of {', '.join(names)}")
    chosen = np.array([names.index(name) for name in args.to or names if name != "any"] or [0])
    if args.images:
        images = [script.read_image(path, *state["data"]["shape"]) for path in args.images]
        return np.repeat(images, len(chosen), 0), np.tile(chosen, len(images)), len(chosen)
    if args.num_samples < len(chosen):
        raise InputError(f"--num_samples: expected {len(chosen)} or more, one of each class")
    ids = outdist.part(TEST)
    period = math.lcm(len(ids), len(chosen))  # after which a start would get the same class again
    number = np.arange(args.num_samples)
    ids = ids[(number + number // period) % len(ids)]
    return outdist.images[ids], chosen[number % len(chosen)], len(chosen)


def generate(model, starts, labels, args, step_size):
    """Images (N, C, S, S) uint8, climbed from `starts` towards `labels`; and whether each is told
    that class then (N,)."""
    device = next(model.parameters()).device

    def gain(logits, labels):
        return logits.logsumexp(1) if args.to == ["any"] else script.label_logit(logits, labels)

    made = []
    reached = []
    for first in tqdm(range(0, len(starts), args.batch_size), desc="generating", disable=None):
        own = slice(first, first + args.batch_size)
        x = script.pixels(torch.from_numpy(starts[own]).to(device))
        y = torch.from_numpy(labels[own]).to(device)
        z = script.attack(model, gain, x, y, args.attack_steps, step_size, args.radius)
        made.append((z * 255).round().byte().cpu())
        reached.append(model(z).argmax(1) == y)
    return torch.cat(made), torch.cat(reached)


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
    ImageOps.scale(picture, scale, Image.Resampling.NEAREST).save(path)
    return rows * columns


def main():
    try:
        args = parse_args()
        device = script.choose_device(args, local_rank=0)
        model, state = load_network(args, device)
        sources = {} if args.images else load_images(args, state)[1]
        starts, labels, classes = choose_starts(args, state, *sources.values())
        usual = args.radius / 10 if args.radius < math.inf else state["args"]["attack_step_size"]
        images, reached = generate(model, starts, labels, args, args.step_size or usual)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        shown = write_picture(args.out, images, classes)
        if args.folder:
            args.folder.mkdir(parents=True)
            for number, image in enumerate(images.permute(0, 2, 3, 1).expand(-1, -1, -1, 3)):
                Image.fromarray(image.numpy()).save(args.folder / f"{number:06}.png")
    except (InputError, OSError, ValueError) as error:  # ValueError: a picture of 16 bits
        print(f"generate_rebm.py: error: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"{args.out}: {shown} of {len(images):,} images, {classes} classes")
    if args.to != ["any"]:
        print(f"told the class that they were led to: {reached.sum():,} of {len(images):,}")


if __name__ == "__main__":
    main()
