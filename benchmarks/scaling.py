"""How the training scripts scale: two processes of one DDP job beside two that know nothing of each
other, which do as much as this machine can do at once.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --rounds 1 --seconds 3 --works run_dpo_ddp

All processes train on small data and networks, on CPUs, with one thread each, and the batch of a
process is the same on both sides (weak scaling). The ratio is the efficiency of DDP. Once with the
script's own accumulation (the micro-batches of a step), where networks as small as these
communicate much, and once with a larger one, where they do not. There it should reach 0.95.

    python benchmarks/scaling.py --ranks

Whether a rank's own work in a step grows with the number of ranks, where its batch stays the same:
one process takes itself for a rank in the middle of 1, 8, 64 and 512. Measured are milliseconds in
which it makes the batch of a step; step: and queues the loss and its gradient (not of texts: also
the network, of proteins without attention), on the meta device, where nothing is computed or sent.
The ratio is the time of one of many ranks by that of one; it should not be above 1.5 for a step.
Memory is that of the process beyond that of the first number of ranks, in MB.
"""

import contextlib
import functools
import importlib
import json
import logging
import os
import random
import resource
import statistics
import sys
import time
from typing import NamedTuple
from unittest import mock

import numpy as np
import sides
import torch
import torch.distributed as dist

PROCESSES = 2
UNIT = "samples/s"
NAMES = {"independent": "independent processes"}
RANKS = [1, 8, 64, 512]
SAMPLES = 17_000  # more than 512 ranks take in a step
STEPS = 20  # of each number of ranks in a round


class Workload(NamedTuple):
    data: str  # options
    small: str  # more options, for two processes: of a network that is small, and never finished
    batch: int  # samples per process and micro-batch, then
    own: int  # the script's own accumulation
    larger: int  # a larger one


WORKLOADS = {
    "train_ddp": Workload(
        """--phase1_data=pairs.jsonl --phase2_data=pairs.jsonl --teacher_model=builtin:lsa:64
        --student_model=builtin:bert:1x64""",
        """--student_model=builtin:bert:4x256 --student_max_length=48 --eval_samples=20
        --eval_every=1000000 --skip_phase2 --phase1_epochs=1000""",
        batch=64,
        own=1,
        larger=5,
    ),
    "run_train_uniref50_ddp": Workload(
        "--datafile=proteins.txt",
        """--max_protein_len=144 --hidden_size=64 --n_blocks_prot=4 --n_heads=4 --cond_dim=64
        --epochs=100000""",
        batch=16,
        own=4,
        larger=24,
    ),
    "run_dpo_ddp": Workload(  # ProteinMPNN at full size
        """--train_data=pairs.json --val_fraction=0.02 --num_orders=1
        --base_model_name=random""",
        "--temperature=1 --num_epochs=100000",
        batch=4,
        own=1,
        larger=6,
    ),
    "run_train_quantumgrav_ddp": Workload(
        "--data=sets.npz --split 0.98 0.01 0.01",
        "--num_epochs=100000",
        batch=64,
        own=1,
        larger=24,
    ),
    "run_train_rebm_ddp": Workload(
        "--data=images.npz --augm_type_classification=original",
        """--at_epochs=1000 --total_epochs=0 --indist_attack_clf_max_steps=24
        --n_imgs_per_evaluation_log=0""",
        batch=64,
        own=1,
        larger=8,
    ),
}


def write_texts(folder):
    """Queries of five words, each with an answer and four wrong ones."""
    draw = random.Random(0)
    words = [f"word{number}" for number in range(2000)]
    texts = [" ".join(draw.choices(words, k=draw.randint(5, 30))) for _ in range(SAMPLES + 2000)]
    with open(folder / "pairs.jsonl", "w") as file:
        for text in texts:
            query = " ".join(draw.choices(text.split(), k=5))
            row = {"query": query, "positive": text, "negatives": draw.sample(texts, 4)}
            file.write(json.dumps(row) + "\n")


def write_proteins(folder):
    lengths = np.random.default_rng(0).integers(100, 501, SAMPLES + 1000)
    sides.write_proteins(folder / "proteins.txt", lengths)


def write_pairs(folder):
    """On 64 structures."""
    draw = np.random.default_rng(0)
    structures = sides.write_pairs(40, 64, folder)
    rows = []
    for number in range(SAMPLES + 1000):
        other = sides.random_protein(draw, 40)
        rows.append({**structures[number % 64], "unpreferred_seq": other})
    (folder / "pairs.json").write_text(json.dumps(rows))


def write_sets(folder):
    options = [f"--samples={SAMPLES + 1000}", "--max_size=48", f"--out={folder}/sets.npz"]
    sides.run_tool("make_causal_sets.py", *options)


def write_images(folder):
    sides.write_images(folder / "images.npz", SAMPLES, (16, 16, 3))


WRITERS = [write_texts, write_proteins, write_pairs, write_sets, write_images]


# ---- Two processes -------------------------------------------------------------------------------


def start(folder, name, accumulation, side, seed):
    """The jobs of a side."""
    workload = WORKLOADS[name]
    options = f"""{workload.data} {workload.small} --cache_dir=cache --log_every=1 --seed={seed}
        --batch_size={workload.batch}"""

    def job(out, processes):
        samples = workload.batch * accumulation * processes  # of a step
        own = f"{options} --global_batch_size={samples}"
        return sides.script_job(f"{name}.py", out, folder, own, samples, processes)

    if side == "independent":
        return [job(f"alone-{number}", 1) for number in range(PROCESSES)]
    ddp = job("ddp", PROCESSES)
    sides.warm_up([ddp])  # alone: what is cached is then there for the others
    return [ddp]


def measure(name, args, folder):
    """Prints rows of the table."""
    for kind in ("own", "larger"):
        accumulation = getattr(WORKLOADS[name], kind)
        start_side = functools.partial(start, folder, name, accumulation)
        found = sides.measure(start_side, NAMES, args.rounds, args.seconds)
        work = f"{name}, {kind} accumulation ({accumulation})"
        for side, others in NAMES.items():
            sides.print_comparison(work, found["ours"], others, found[side])


# ---- The work of one of many ranks ---------------------------------------------------------------


def load_data(module, args, device):
    """(data set, ids to train on, cost of each, a function of a batch: the loss), as main() of a
    script has them. (not of train_ddp.py)"""

    def loss_of(batch):
        return module.share_of_loss(model(batch), batch)

    def loss_of_pairs(batch):
        # the meta device has no autocast
        with mock.patch.object(torch, "autocast", return_value=contextlib.nullcontext()):
            return module.share_of_loss(args, model(*batch.inputs()), batch)[0]

    def loss_of_images(batch):
        """The three passes of stage 2, without attacks."""
        is_real = module.real_or_fake(model(module.pixels(batch.real)), True)
        is_fake = module.real_or_fake(model(module.pixels(batch.outside)), False)
        clf_loss = module.cross_entropy(model(module.pixels(batch.x)), batch.y)
        return (is_real + is_fake + clf_loss).sum()

    if module.__name__ == "run_train_quantumgrav_ddp":
        data = module.CausalSets(module.read_once(module.prepare, args), args)
        model = module.CausalSetNet(args, data.classes).to("meta")
        return data, data.part("train"), data.cost, loss_of

    if module.__name__ == "run_train_uniref50_ddp":
        proteins = module.Data(module.read_once(module.prepare, args), args).train
        model = module.Denoiser(args).to("meta")
        data = module.NoisyProteins(proteins, args.seed)
        return data, np.arange(len(proteins)), proteins, loss_of

    if module.__name__ == "run_dpo_ddp":
        model = module.ProteinMPNN().to("meta")
        read = functools.partial(module.prepare, neighbours=model.neighbours)
        data = module.Pairs(module.read_once(read, args), args)
        data.split()
        data.reference = np.zeros((1, len(data.letters), 2), np.float32)
        return data, data.train_ids, data.lengths, loss_of_pairs

    images, others = module.load_data(args)
    model = module.make_network(args, len(images.classes), *images.shape).to("meta")
    data = module.TrainingData(args, images, others, "dat")
    return data, images.part("train"), None, loss_of_images


def load_texts(module, args, device):
    """The same of each phase of train_ddp.py."""

    def loss_of(batch):
        vectors = torch.empty_like(batch.targets, dtype=torch.float32, requires_grad=True)
        if hasattr(batch, "pull"):
            return module.pair_loss(args, [batch], [vectors])[0]
        return module.text_loss(args, batch, vectors)

    corpus = module.Corpus(module.read_once(module.prepare_texts, args))
    student = module.load_student(args, module.local_model(args, args.student_model, corpus))
    tokens = module.Tokens(args, corpus, student, device)
    key = module.teacher_key(args, corpus, args.teacher_model, device)
    vectors = module.teacher_vectors(args, key, args.teacher_model, corpus, 64, device)
    phases = {}
    for phase, kind in {1: module.TextData, 2: module.PairData}.items():
        data = kind(args, corpus, tokens)
        data.use(vectors, vectors.dimensions)
        phases[f"train_ddp, phase {phase}"] = (data, data.ids(), data.cost(), loss_of)
    return phases


def take_step(batches, loss_of):
    """Milliseconds in which the host makes a batch, and those of the whole step."""
    begin = time.perf_counter()
    batch = next(batches)
    made = time.perf_counter() - begin
    loss_of(batch.to("meta")).backward()
    return 1000 * made, 1000 * (time.perf_counter() - begin)


def send_nothing(*tensors):
    pass


def attend_nothing(q, k, v, turns, starts, lengths):
    """On a GPU attention is one call. Elsewhere it is a loop, whose time would hide the rest."""
    return (q + k + v).flatten(1)


def measure_ranks(script, rounds):
    """Prints rows of the table."""
    options = f"{WORKLOADS[script].data} --batch_size=32 --device=cpu --cache_dir=cache"
    sys.argv = [f"{script}.py", *options.split()]
    module = importlib.import_module(script)
    args = module.parse_args()
    device = module.setup_ddp(args)
    patches = {"all_gather": send_nothing, "reduce_scatter": send_nothing, "attend": attend_nothing}
    if script == "train_ddp":
        loaded = load_texts(module, args, device)
    else:
        loaded = {script: load_data(module, args, device)}
    for name, (data, ids, cost, loss_of) in loaded.items():
        made = {ranks: [] for ranks in RANKS}  # milliseconds of the batch in each round
        whole = {ranks: [] for ranks in RANKS}  # and of the step
        loaders = {}
        memory = {}
        for turn in range(rounds + 1):
            for ranks in RANKS:
                with (
                    mock.patch.object(dist, "get_world_size", return_value=ranks),
                    mock.patch.object(dist, "get_rank", return_value=ranks // 2),
                    mock.patch.multiple(module, create=True, **patches),
                ):
                    if turn == 0:
                        args.global_batch_size = args.batch_size * ranks
                        sampler = module.GlobalBatchSampler(ids, args, cost)
                        loaders[ranks] = module.make_loader(data, sampler, args, device)
                    times = [take_step(loaders[ranks], loss_of) for _ in range(STEPS)]
                if turn == 0:  # it warms up
                    memory[ranks] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
                else:
                    made[ranks].append(statistics.median(batch for batch, _ in times))
                    whole[ranks].append(statistics.median(step for _, step in times))
        for part, found in {"batch": made, "step": whole}.items():
            for ranks in RANKS[1:]:
                work = f"{name}, {ranks} ranks: {part} (+{memory[ranks] - memory[1]} MB)"
                sides.print_comparison(work, found[ranks], "1 rank", found[1])
    module.cleanup()


# ---- Both ----------------------------------------------------------------------------------------


def main():
    parser = sides.make_parser(__doc__, WORKLOADS)
    parser.add_argument("--ranks", action="store_true", help="the work of one of many ranks")
    args = parser.parse_args()
    if args.ranks:
        print(f"1 thread, {args.rounds} rounds of {STEPS} steps, the median of each\n")
        sides.print_head("ms")
        sys.path.insert(0, str(sides.ROOT))
        logging.disable()
        torch.set_num_threads(1)
    else:
        print(f"a thread each, {args.rounds} rounds of {args.seconds:g} s\n")
        sides.print_head(UNIT)
    with sides.workplace() as folder:
        os.chdir(folder)
        for script, write in zip(WORKLOADS, WRITERS, strict=True):
            if script in args.works:
                write(folder)
                if args.ranks:
                    measure_ranks(script, args.rounds)
                else:
                    measure(script, args, folder)


if __name__ == "__main__":
    main()
