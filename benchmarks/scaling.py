"""Whether a rank's own work in a step grows with the number of ranks, where its batch stays the
same.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --rounds 1 --works run_dpo_ddp

One process takes itself for a rank in the middle of 1, 8, 64 and 512, on a CPU with one thread.
batch: milliseconds in which it makes the batch of a step. step: in which it makes it, and queues
the loss and its gradient (not of texts: also the network, of proteins without attention), on the
meta device, where nothing is computed or sent. Both are medians of the rounds. memory: what the
process has more, in MB, after the first steps of this number of ranks than before them.
"""

import argparse
import contextlib
import ctypes
import functools
import importlib
import json
import logging
import multiprocessing
import os
import random
import statistics
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import sides
import torch
import torch.distributed as dist

RANKS = [1, 8, 64, 512]
SAMPLES = 17_000  # more than 512 ranks take in a step
STEPS = 20  # of each number of ranks in a round
COMMON = "--batch_size=32 --device=cpu --cache_dir=cache"
OPTIONS = {
    "train_ddp": """--phase1_data=pairs.jsonl --phase2_data=pairs.jsonl
        --teacher_model=builtin:lsa --student_model=builtin:bert""",
    "run_train_uniref50_ddp": "--datafile=proteins.txt",
    "run_dpo_ddp": "--train_data=pairs.json --val_fraction=0.02 --base_model_name=random",
    "run_train_quantumgrav_ddp": "--data=sets.npz --split 0.98 0.01 0.01",
    "run_train_rebm_ddp": """--data=images.npz --augm_type_classification=original
        --indist_attack_clf_max_steps=0""",
}


def write_data(script):
    """What its OPTIONS name."""
    here = Path()
    if script == "train_ddp":
        write_texts()
    elif script == "run_train_uniref50_ddp":
        lengths = np.random.default_rng(0).integers(100, 501, SAMPLES + 1000)
        sides.write_proteins(here / "proteins.txt", lengths)
    elif script == "run_dpo_ddp":
        from helpers import write_structures

        write_structures(here, 64, pairs=SAMPLES // 60, least=40, most=40)
    elif script == "run_train_quantumgrav_ddp":
        options = [f"--samples={SAMPLES + 1000}", "--max_size=48", "--out=sets.npz"]
        sides.run_tool("make_causal_sets.py", *options)
    else:
        sides.write_images(here / "images.npz", SAMPLES, (16, 16, 3))


def write_texts():
    """Queries of five words, each with an answer and four wrong ones."""
    draw = random.Random(0)
    words = [f"word{number}" for number in range(2000)]
    texts = [" ".join(draw.choices(words, k=draw.randint(5, 30))) for _ in range(SAMPLES + 2000)]
    with open("pairs.jsonl", "w") as file:
        for text in texts:
            query = " ".join(draw.choices(text.split(), k=5))
            row = {"query": query, "positive": text, "negatives": draw.sample(texts, 4)}
            file.write(json.dumps(row) + "\n")


def load_data(module, args):
    """(data set, ids to train on, cost of each, a function of a batch: the loss), as main() of a
    script has them. (not of train_ddp.py)"""

    def loss_of_batch(batch):
        return module.batch_loss(model(batch), batch)

    def loss_of_pairs(batch):
        reference_logp = module.log_probabilities(model(batch), batch.letters)
        return module.batch_loss(args, model(batch), reference_logp, batch)[0]

    def loss_of_images(batch):
        """A step of stage 2, without attacks."""
        networks = module.Networks(model, model, model, model)
        return module.batch_losses(args, networks, batch, 0)[0].sum()

    if module.__name__ == "run_train_quantumgrav_ddp":
        data = module.CausalSets(module.read_once(module.prepare, args), args)
        model = module.CausalSetNet(args, data.classes).to("meta")
        return data, data.part("train"), data.cost, loss_of_batch

    if module.__name__ == "run_train_uniref50_ddp":
        proteins = module.Proteins(module.read_once(module.prepare, args), args)
        model = module.Denoiser(args).to("meta")
        data = module.NoisyProteins(args, proteins)
        return data, proteins.train, proteins.lengths, loss_of_batch

    if module.__name__ == "run_dpo_ddp":
        model = module.ProteinMPNN().to("meta")
        read = functools.partial(module.prepare, k=model.k_neighbors)
        data = module.Pairs(module.read_once(read, args), args)
        data.split()
        return data, data.train_ids, data.lengths, loss_of_pairs

    images = module.Images(module.prepare(args, args.data))
    others = module.Images(module.prepare(args, args.outdist_data, images))
    model = module.make_network(args, len(images.classes), *images.shape).to("meta")
    data = module.TrainingData(args, images, others, "dat")
    return data, images.part(module.TRAIN), np.ones(len(images.split)), loss_of_images


def load_texts(module, args, device):
    """The same of each phase of train_ddp.py."""

    def loss_of(batch):
        vectors = torch.empty_like(batch.targets, dtype=torch.float32, requires_grad=True)
        if batch.num_queries == 0:
            return module.text_loss(vectors, batch)
        _, gradient = module.pair_loss(args, [batch], vectors.detach())
        return (vectors * gradient).sum()

    folder = module.read_once(module.prepare, args)
    corpus = module.load_corpus(folder, device)
    vectors = module.teacher_vectors(args, folder, corpus, device)
    phases = {}
    for phase, kind in {1: module.TextData, 2: module.PairData}.items():
        data = kind(args, corpus)
        data.vectors = vectors
        phases[f"train_ddp, phase {phase}"] = (data, *data.samples(), loss_of)
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


def no_autocast(*settings, **more):
    return contextlib.nullcontext()


gathered = []  # bytes


def gather_nothing(rows, own):
    gathered.append(rows.nbytes)


def attend_nothing(q, k, v, batch):
    """On a GPU attention is one call. Elsewhere it is a loop, whose time would hide the rest."""
    return q + k + v


def used_memory():
    """Of this process, in MB, without what was freed."""
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def measure(name, module, args, device, rounds, loaded):
    """Prints rows of the table."""
    data, ids, cost, loss_of = loaded
    patches = {
        "all_gather": gather_nothing,
        "reduce_scatter": send_nothing,
        "attend": attend_nothing,
    }
    loaders = {}
    memory = []
    sent = []  # what a rank has of all ranks in a step
    medians = {ranks: [] for ranks in RANKS}  # (batch, step) of each round
    for turn in range(rounds + 1):
        for ranks in RANKS:
            with (
                mock.patch.object(dist, "get_world_size", return_value=ranks),
                mock.patch.object(dist, "get_rank", return_value=ranks // 2),
                mock.patch.object(dist, "all_reduce", send_nothing),
                mock.patch.object(torch, "autocast", no_autocast),  # the meta device has none
                mock.patch.multiple(module, create=True, **patches),
            ):
                before = used_memory()
                if turn == 0:
                    args.global_batch_size = args.batch_size * ranks
                    sampler = module.GlobalBatchSampler(ids, args, cost)
                    loaders[ranks] = module.make_loader(data, sampler, args, device)
                gathered.clear()
                times = [take_step(loaders[ranks], loss_of) for _ in range(STEPS)]
            if turn == 0:  # it warms up
                sent.append(f"{sum(gathered) / STEPS / 1e6:.1f}")
                memory.append(f"{used_memory() - before:.0f}")
            else:
                parts = zip(*times, strict=True)
                medians[ranks].append([statistics.median(part) for part in parts])
    for place, part in enumerate(["batch", "step"]):
        found = [statistics.median(row[place] for row in medians[ranks]) for ranks in RANKS]
        sides.print_row(name, f"{part}, ms", *[f"{value:.1f}" for value in found])
    sides.print_row(name, "memory, MB", *memory)
    if gathered:
        sides.print_row(name, "gathered, MB", *sent)


def measure_script(script, rounds):
    logging.disable()
    torch.set_num_threads(1)
    write_data(script)
    sys.argv = [f"{script}.py", *COMMON.split(), *OPTIONS[script].split()]
    module = importlib.import_module(script)
    args = module.parse_args()
    device = module.setup_ddp(args)
    if script == "train_ddp":
        works = load_texts(module, args, device)
    else:
        works = {script: load_data(module, args)}
    for name, loaded in works.items():
        measure(name, module, args, device, rounds, loaded)
    module.cleanup()


def main():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    add = parser.add_argument
    add("--works", nargs="+", default=list(OPTIONS), choices=OPTIONS, help="all, if not given")
    add("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(f"a thread, {args.rounds} rounds of {STEPS} steps\n")
    sides.print_head("work", "part", *[f"of {ranks}" for ranks in RANKS])
    for script in args.works:
        # a process of its own: else the memory of the one before would count
        with sides.workplace() as folder:
            os.chdir(folder)
            context = multiprocessing.get_context("spawn")
            process = context.Process(target=measure_script, args=(script, args.rounds))
            process.start()
            process.join()
        if process.exitcode != 0:
            sys.exit(f"{script}: exit status {process.exitcode}")


if __name__ == "__main__":
    main()
