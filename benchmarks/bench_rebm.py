"""Training steps of stage 2 of run_train_rebm_ddp.py beside the program that it replaces and beside
a port of the original's step.

    python benchmarks/bench_rebm.py
    python benchmarks/bench_rebm.py --rounds 1 --seconds 0.1 --settings SmallNet,8,16,2

Images per second of whole training steps, one process, one thread, fp32 on a CPU, the same network
with the same initial weights (logits are compared), the same lengths of the attacks: T steps on OOD
images, 10 on images to classify. Each side is a process. In each round all sides step for
--seconds, one right after the other; ratios are of the same round.

ours         train() of the script, without validations and checkpoints
compiled     the same with --compile
replaced     the step of the program that it replaces (commit e7785a5), with its batches
original     xuwangyin/DAT fb2ffc7, from a description of it: attacks through the
             DistributedDataParallel wrapper with parameters that require gradients; one more
             forward pass over real, OOD and attacked images for two AUCs by scikit-learn; one joint
             backward pass; weights averaged tensor by tensor; the loss read in each step

Batch normalisation is frozen, as in stage 2. To the original's advantage its batches are ready: it
decodes and augments in other processes.
"""

import copy
import itertools
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import sides
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

SIDES = ["ours", "compiled", "replaced", "original"]
OTHERS = {"replaced": sides.REPLACED, "original": "the original's step"}
CLF_STEPS = 10
STEP = 0.1
CLF_EPS = 0.5
RATE = 1e-5
DECAY = 0.999
IMAGES = 2000


class Setting:
    """model.model_type, side of the images, batch, T"""

    def __init__(self, text):
        self.model, *numbers = text.split(",")
        self.size, self.batch, self.T = map(int, numbers)
        self.name = f"{self.model}, {self.size} px, batch {self.batch}, T {self.T}"
        self.options = f"""--model_type={self.model}
            --attack.max_steps={self.T} --attack.start_step={self.T} --attack.step_size={STEP}
            --indist_attack_clf.max_steps={CLF_STEPS}
            --indist_attack_clf.step_size={STEP} --indist_attack_clf.eps={CLF_EPS} --lr={RATE}
            --ema={DECAY} --batch_size={self.batch} --max_grad_norm=5 --device=cpu --precision=fp32
            --augm_type_classification=shift --save_every=1000000000""".split()

    def images(self):
        """(images (N, C, S, S) uint8, labels (N,))"""
        channels = 1 if self.model == "SmallNet" and self.size < 28 else 3
        rng = np.random.default_rng(0)
        shape = (IMAGES, channels, self.size, self.size)
        return rng.integers(0, 256, shape, np.uint8), np.arange(IMAGES) % 10


# ---- The sides, each in a process of its own -----------------------------------------------------


class Ours:
    def __init__(self, setting, work, compiled=False):
        sys.path.insert(0, str(sides.ROOT))
        out = work / ("compiled" if compiled else "ours")
        sys.argv = ["run_train_rebm_ddp.py", *setting.options, f"--data={work}/images"]
        sys.argv += ["--stage=dat", "--ckpt_path=none", f"--output_dir={out}", "--AUC_th=1"]
        sys.argv += ["--total_epochs=1000000", "--n_imgs_per_evaluation_log=0"]
        sys.argv += [f"--compile={compiled}"]
        import run_train_rebm_ddp as script

        self.script = script
        args = script.parse_args()
        args.ckpt_path = None
        device = script.setup_ddp(args)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.run = script.Run(args, device)
        self.model = self.run.model

    def train(self, turns):
        sides.watch_steps(self.script, turns.step_done)
        self.run.loop["stage"] = "dat"  # with these weights, and with no average of them yet
        self.script.train(self.run, "dat")


class Replaced:
    """The old script, its dense parts called as its train() calls them."""

    def __init__(self, setting, work):
        sys.path.insert(0, str(work.parent / "worktree"))
        import run_train_rebm_ddp as script

        self.script = script
        script.LOGGER.rank = 1  # says nothing
        self.setting = setting
        args = script.parse_args(setting.options)
        pixels, labels = setting.images()
        self.ddp = script.DDPContext(0, 1, 0, 1, torch.device("cpu"), "gloo", "python")
        images = script.Images(pixels, labels, self.ddp.device)
        parts = [images] * 5
        data = script.Data(*parts, {}, 10, pixels.shape[1], setting.size)
        self.task = script.assemble(args, self.ddp, data)
        self.model = self.task.model

    def train(self, turns):
        script, task, batch = self.script, self.task, self.setting.batch
        script.begin_stage(task, script.new_course(), "dat")
        samplers = {}
        for number, name in enumerate(("clf", "real", "outside")):
            count = len(task.data.train)
            samplers[name] = script.GlobalBatchSampler(count, batch, 1, number, self.ddp)
        optimizer = script.stage_optimizer(task, "", RATE)
        guard = script.StepGuard(task.args, self.ddp, optimizer, torch.float32, 0.0)
        log = SimpleNamespace(sums={}, add=lambda *_, **__: None)
        source = script.micro_batches(task, samplers, 0, "dat")
        averages = list(task.average.values())
        weights = list(script.float_tensors(task.model).values())
        for number in itertools.count():
            micro = next(source)
            T = self.setting.T
            loss, scores = script.train_step(task, task.net, "dat", T, micro, guard, log, batch)
            guard.step(loss, number, [part.ids for part in micro])
            script.update_ema(averages, weights, DECAY, number)
            float(script.pooled_auc(*scores))
            turns.step_done()


def climb(model, x, objective, steps, size, eps):
    """The original's attack: steps of a fixed length (L2), the projection, [0, 1]."""
    z = x.clone()
    for _ in range(steps):
        z = z.clone().detach().requires_grad_(True)
        (gradient,) = torch.autograd.grad(objective(model(z)), [z])
        with torch.no_grad():
            length = gradient.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
            z = z + size * gradient / (length + 1e-10)
            z = torch.clamp(x + (z - x).renorm(p=2, dim=0, maxnorm=eps), 0, 1)
    return z.clone().detach()


def mean_auc(real, other):
    """scikit-learn's AUC, averaged over ranks."""
    from sklearn.metrics import roc_auc_score

    truth = np.repeat([1, 0], [len(real), len(other)])
    value = torch.tensor(roc_auc_score(truth, torch.cat([real, other]).numpy()))
    dist.all_reduce(value)
    return value.item()


class Original:
    def __init__(self, setting, work):
        sys.path.insert(0, str(sides.ROOT))
        sys.argv = ["run_train_rebm_ddp.py", *setting.options]
        import run_train_rebm_ddp as script

        self.setting = setting
        self.images, self.labels = setting.images()
        channels = self.images.shape[1]
        model = script.make_network(script.parse_args(), 10, channels, setting.size)
        self.model = model.to(memory_format=torch.contiguous_format)
        self.model.frozen = True
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def batches(self):
        """Four batches of real images, labels, OOD images, and images to classify, ready."""
        rng = np.random.default_rng(1)
        ready = []
        for _ in range(4):
            parts = []
            for ids in rng.integers(0, IMAGES, (3, self.setting.batch)):
                parts.append(torch.from_numpy(self.images[ids]).float() / 255)
                parts.append(torch.from_numpy(self.labels[ids]))
            ready.append(parts)
        return itertools.cycle(ready)

    def train(self, turns):
        plain = self.model.train()
        average = copy.deepcopy(plain)
        model = DistributedDataParallel(plain, broadcast_buffers=False)
        options = {"lr": RATE, "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4}
        optimizer = torch.optim.SGD(model.parameters(), **options)

        def picked(logits, labels):
            return logits[torch.arange(len(logits)), labels]

        for number, (x, y, real, real_y, outside, _) in enumerate(self.batches()):
            model.eval()
            steps = self.setting.T
            fake = climb(
                model, outside, lambda v, y=real_y: picked(v, y).sum(), steps, STEP, float("inf")
            )
            with torch.no_grad():
                logits = model(torch.cat([real, outside, fake]))
                scores = picked(logits, real_y.repeat(3)).chunk(3)
            for other in scores[1:]:
                mean_auc(scores[0], other)
            model.train()
            logits = torch.cat([model(real), model(fake)]).logsumexp(1)
            truth = torch.cat([torch.ones(len(real)), torch.zeros(len(fake))])
            loss = F.binary_cross_entropy_with_logits(logits, truth)
            adv = climb(model, x, lambda v, y=y: F.cross_entropy(v, y), CLF_STEPS, STEP, CLF_EPS)
            loss = loss + F.cross_entropy(model(adv), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()
            decay = min(DECAY, (1 + number) / (10 + number))
            pairs = zip(average.state_dict().values(), plain.state_dict().values(), strict=True)
            with torch.no_grad():
                for mine, new in pairs:
                    if mine.is_floating_point():
                        mine.copy_(mine * decay + new * (1 - decay))
            turns.step_done()


def run_side(pipe, side, setting, work):
    """A process: sends logits, then trains whenever it is asked to."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    kinds = {"replaced": Replaced, "original": Original}
    if side in kinds:
        there = kinds[side](setting, work)
    else:
        there = Ours(setting, work, side == "compiled")
    path = work / "weights.pt"
    if side == "ours":
        torch.save(there.model.state_dict(), path)  # noqa: TID251
    weights = torch.load(path)  # noqa: TID251
    # the program replaced has other names, in the same order, and keeps its two constants
    names = [name for name in there.model.state_dict() if name not in ("mean", "std")]
    state = dict(zip(names, weights.values(), strict=True))
    there.model.load_state_dict(state, strict=side != "replaced")
    images, _ = setting.images()
    there.model.eval()
    with torch.no_grad():
        pipe.send(there.model(torch.from_numpy(images[:16]).float() / 255).numpy())
    there.model.train()
    turns = sides.Turns(pipe)
    turns.wait()
    there.train(turns)


# ---- All sides, in turns -------------------------------------------------------------------------


def make_images(setting, work):
    images, labels = setting.images()
    held = {"x_test": images[:100], "y_test": labels[:100]}
    np.savez(work / "images.npz", x_train=images, y_train=labels, **held)
    tool = sides.ROOT / "tools" / "prepare_images.py"
    command = [sys.executable, tool, "arrays", work / "images.npz", f"--out={work}/images"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def parse_args():
    parser = sides.make_parser(__doc__)
    add = parser.add_argument
    add("--rounds", type=int, default=5, help="turns of each side")
    add("--seconds", type=float, default=3.0, help="of a turn (one step at least)")
    default = ["SmallNet,8,128,20", "WideResNet28x2,32,8,20"]
    add("--settings", nargs="+", type=Setting, default=[*map(Setting, default)], help="see above")
    add("--sides", nargs="+", default=SIDES[1:], choices=SIDES[1:], help="beside ours")
    return parser.parse_args()


def main():
    args = parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    records = []
    print(f"one thread, {args.rounds} rounds of {args.seconds:g} s, images/s\n")
    others = ["beside the original", "beside the program replaced"]
    sides.print_head("setting", "side", "images/s", *others)
    with sides.workplace() as folder:
        for number, setting in enumerate(args.settings):
            work = folder / str(number)
            work.mkdir()
            make_images(setting, work)
            names = ["ours", *args.sides]
            found = sides.measure(names, work, args, run_side, setting, work)
            for side in names:
                mine = setting.batch * found[side]
                cells = []
                for other in ("original", "replaced"):
                    if other not in found or side not in ("ours", "compiled"):
                        cells.append("")
                        continue
                    text = f"{setting.name}: {side}"
                    theirs = setting.batch * found[other]
                    rounds = sides.compare(text, OTHERS[other], "images/s", mine, theirs)
                    cells.append(sides.spread(sides.ratios(rounds), 2))
                    records += rounds
                sides.print_row(setting.name, side, sides.spread(mine, 1), *cells)
    sides.write_json(args.json, records)


if __name__ == "__main__":
    main()
