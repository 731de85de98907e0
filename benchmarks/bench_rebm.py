"""Training steps of stage 2 of run_train_rebm_ddp.py beside the program that it replaces and beside
a port of the original's step.

    python benchmarks/bench_rebm.py
    python benchmarks/bench_rebm.py --rounds 1 --steps 3 --settings SmallNet,8,16,2

Images per second of whole training steps, one process, one thread, fp32 on a CPU, the same network
and the same lengths of the attacks: T steps on OOD images, 10 on images to classify.

ours         the script, for an epoch of stage 2
compiled     the same with --compile
replaced     the program that it replaces (commit e7785a5), which makes an epoch of stage 1 before
original     xuwangyin/DAT fb2ffc7, from a description of it: attacks through the
             DistributedDataParallel wrapper with parameters that require gradients; one more
             forward pass over real, OOD and attacked images for two AUCs by scikit-learn; one joint
             backward pass; weights averaged tensor by tensor; the loss read in each step. The
             network is ours

Batch normalisation is frozen, as in stage 2. To the original's advantage its batches are ready: it
decodes and augments in other processes.
"""

import copy
import itertools
import sys

import numpy as np
import sides
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

SCRIPT = "run_train_rebm_ddp.py"
UNIT = "images/s"
NAMES = {"replaced": sides.REPLACED, "original": "the original's step"}
CLF_STEPS = 10
STEP = 0.1
CLF_EPS = 0.5
RATE = 1e-5
DECAY = 0.999
HELD_OUT = 20  # images to validate on, and to test on: what is not measured shall be short
OPTIONS = f"""--total_epochs=1 --AUC_th=1 --attack.step_size={STEP}
    --indist_attack_clf.max_steps={CLF_STEPS} --indist_attack_clf.step_size={STEP}
    --indist_attack_clf.eps={CLF_EPS} --lr={RATE} --ema={DECAY} --max_grad_norm=5 --log_every=1
    --augm_type_classification=shift --n_imgs_per_evaluation_log=0 --eval_steps=1
    --eval_images={HELD_OUT}"""
REPLACED_OPTIONS = f"""--stage=both --at_epochs=1 --indist_dataset=file --eval_restarts=1
    --valid_images={HELD_OUT} --image_log.num_samples={HELD_OUT} --image_log.num_steps=1"""


class Setting:
    """model.model_type, side of the images, batch, T"""

    def __init__(self, text):
        self.model, *numbers = text.split(",")
        self.size, self.batch, self.T = map(int, numbers)
        self.channels = 1 if self.model == "SmallNet" and self.size < 28 else 3
        self.name = f"{self.model}, {self.size} px, batch {self.batch}, T {self.T}"
        self.options = f"""--model_type={self.model} --batch_size={self.batch}
            --attack.max_steps={self.T} --attack.start_step={self.T}"""


# ---- The port ------------------------------------------------------------------------------------


def climb(model, x, objective, steps, eps):
    """The original's attack: steps of a fixed length (L2), the projection, [0, 1]."""
    z = x.clone()
    for _ in range(steps):
        z = z.clone().detach().requires_grad_(True)
        (gradient,) = torch.autograd.grad(objective(model(z)), [z])
        with torch.no_grad():
            length = gradient.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
            z = z + STEP * gradient / (length + 1e-10)
            z = torch.clamp(x + (z - x).renorm(p=2, dim=0, maxnorm=eps), 0, 1)
    return z.clone().detach()


def mean_auc(real, other):
    """scikit-learn's AUC, averaged over ranks."""
    from sklearn.metrics import roc_auc_score

    truth = np.repeat([1, 0], [len(real), len(other)])
    value = torch.tensor(roc_auc_score(truth, torch.cat([real, other]).numpy()))
    dist.all_reduce(value)
    return value.item()


def of_class(logits, labels):
    return logits[torch.arange(len(logits)), labels]


def make_batches(setting):
    """Four times images to classify, real images, each with labels, and OOD images: ready."""
    rng = np.random.default_rng(1)
    shape = (setting.batch, setting.channels, setting.size, setting.size)
    batches = []
    for _ in range(4):
        images = torch.from_numpy(rng.integers(0, 256, (3, *shape), np.uint8)).float() / 255
        labels = torch.from_numpy(rng.integers(0, 10, (2, setting.batch)))
        batches.append([images[0], labels[0], images[1], labels[1], images[2]])
    return itertools.cycle(batches)


def make_network(setting):
    """That of the script, with random weights."""
    sys.path.insert(0, str(sides.ROOT))
    sys.argv = [SCRIPT, *setting.options.split()]
    import run_train_rebm_ddp as script

    torch.manual_seed(0)
    return script.make_network(script.parse_args(), 10, setting.channels, setting.size)


def port(setting, seconds):
    """Images per second."""
    setting = Setting(setting)
    plain = make_network(setting).to(memory_format=torch.contiguous_format).train()
    plain.frozen = True
    average = copy.deepcopy(plain)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(plain, broadcast_buffers=False)
    options = {"lr": RATE, "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4}
    optimizer = torch.optim.SGD(model.parameters(), **options)
    batches = make_batches(setting)
    numbers = itertools.count()

    def step():
        x, y, real, real_y, outside = next(batches)
        model.eval()
        steps = setting.T
        fake = climb(model, outside, lambda z: of_class(z, real_y).sum(), steps, float("inf"))
        with torch.no_grad():
            logits = model(torch.cat([real, outside, fake]))
            scores = of_class(logits, real_y.repeat(3)).chunk(3)
        for other in scores[1:]:
            mean_auc(scores[0], other)

        model.train()
        logits = torch.cat([model(real), model(fake)]).logsumexp(1)
        truth = torch.cat([torch.ones(len(real)), torch.zeros(len(fake))])
        loss = F.binary_cross_entropy_with_logits(logits, truth)
        attacked = climb(model, x, lambda z: F.cross_entropy(z, y), CLF_STEPS, CLF_EPS)
        loss = loss + F.cross_entropy(model(attacked), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()

        number = next(numbers)
        decay = min(DECAY, (1 + number) / (10 + number))
        pairs = zip(average.state_dict().values(), plain.state_dict().values(), strict=True)
        with torch.no_grad():
            for mean, new in pairs:
                if mean.is_floating_point():
                    mean.copy_(mean * decay + new * (1 - decay))

    return setting.batch * sides.steps_per_second(step, seconds)


# ---- All sides, in turns -------------------------------------------------------------------------


def prepare(setting, steps, folder):
    """Noisy images for so many steps an epoch, as each side reads them, and weights for ours."""
    torch.save(make_network(setting).state_dict(), folder / f"{setting.name}.pt")
    rng = np.random.default_rng(0)
    arrays = {}
    for part, count in (("train", setting.batch * steps + HELD_OUT), ("test", HELD_OUT)):
        shape = (count, setting.channels, setting.size, setting.size)
        labels = np.arange(count) % 10
        brightness = (25 * labels).astype(np.uint8)  # or stage 1 would end: it would learn nothing
        arrays[f"x_{part}"] = brightness[:, None, None, None] + rng.integers(0, 25, shape, np.uint8)
        arrays[f"y_{part}"] = labels
    path = folder / f"{setting.name}.npz"
    np.savez(path, **arrays)
    out = f"--out={folder / setting.name}"
    sides.run_tool("prepare_images.py", "arrays", path, f"--valid={HELD_OUT}", out)


def run_side(side, folder, text, seconds):
    """Images per second."""
    if side == "original":
        return sides.run_port(__file__, folder, {"setting": text, "seconds": seconds})
    setting = Setting(text)
    options = f"{OPTIONS} {setting.options}"
    data = folder / setting.name
    if side == "replaced":
        options = [*f"{options} {REPLACED_OPTIONS}".split(), f"--indist_ds_dir={data}.npz"]
    else:
        options = [*options.split(), f"--data={data}", f"--compile={side == 'compiled'}"]
        options += ["--stage=dat", f"--ckpt_path={data}.pt"]
    rows = sides.run_script(SCRIPT, side, folder, options)
    rows = [row for row in rows if "T" in row]  # of stage 2
    return sides.steady(sides.speeds_of(rows, "samples_per_s", "samples/s"))


def main():
    parser = sides.make_parser(__doc__)
    add = parser.add_argument
    add("--steps", type=int, default=15, help="of a turn of a script")
    add("--seconds", type=float, default=8.0, help="of a turn of the original")
    default = ["SmallNet,8,128,20", "WideResNet28x2,32,8,20"]
    add("--settings", nargs="+", default=default, help=Setting.__doc__)
    args = sides.parse_args(parser, port)
    records = []
    print(f"one thread, {args.rounds} rounds of {args.steps} steps\n")
    sides.print_comparison_head(UNIT)
    with sides.workplace() as folder:
        for text in args.settings:
            setting = Setting(text)
            prepare(setting, args.steps, folder)

            def turn(side, text=text):
                return run_side(side, folder, text, args.seconds)

            found = sides.in_rounds(["ours", "compiled", *NAMES], args.rounds, turn)
            for side in ("ours", "compiled"):
                records += sides.compare(f"{setting.name}: {side}", UNIT, found, NAMES, side)
    sides.write_json(args.json, records)


if __name__ == "__main__":
    main()
