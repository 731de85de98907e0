"""How the training scripts scale: two processes of one DDP job beside two that know nothing of each
other, which do as much as this machine can do at once.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --rounds 1 --seconds 3 --scripts run_dpo_ddp

All processes train on small data and networks, on CPUs, with one thread each, and the batch of a
process is the same on both sides (weak scaling). The ratio is the efficiency of DDP.

Once with the script's own accumulation (the micro-batches of a step), where networks as small as
these communicate much, and once with a larger one, where they do not. There the efficiency should
reach 0.95.

Below the table are the two parts of what is lost. DDP takes processor time of its own, to copy and
add gradients. And it lets a rank wait for the other one: then its share of busy time falls.

    python benchmarks/scaling.py --ranks

Whether a rank's own work in a step grows with the number of ranks, where its batch stays the same:
one process takes itself for a rank in the middle of 1, 8, 64 and 512. Measured are milliseconds in
which it makes the batch of a step; step: and queues the loss and its gradient (not of texts: also
the network, of proteins without attention), on the meta device, where nothing is computed or sent.
The ratio, time of one rank by time of one of many, should not be below 0.67 for a step. Memory is
that of the process beyond that of the first number of ranks, in MB.
"""

import contextlib
import functools
import importlib
import itertools
import json
import logging
import random
import resource
import statistics
import sys
import time
from typing import NamedTuple
from unittest import mock

import bench_dpo
import numpy as np
import sides
import torch
import torch.distributed as dist

PROCESSES = 2
UNIT = "samples/s"
SIDES = ["ddp", "independent"]
DIGITS = "--data=digits --cache_dir=cache --n_imgs_per_evaluation_log=0"

RANKS = [1, 8, 64, 512]
SAMPLES = 17_000  # more than 512 ranks take in a step
RESIDUES = "ACDEFGHIKLMNPQRSTVWY"
STEPS = 20  # of each number of ranks in a round
RANK_OPTIONS = {  # FOLDER is that of the data
    "train_ddp": """--phase1_data=FOLDER/pairs.jsonl --phase2_data=FOLDER/pairs.jsonl
        --teacher_model=builtin:lsa:64 --student_model=builtin:bert:1x64""",
    "run_train_uniref50_ddp": "--datafile=FOLDER/proteins.txt",
    "run_dpo_ddp": "--train_data=FOLDER/pairs.json --val_fraction=0.02 --num_orders=1",
    "run_train_quantumgrav_ddp": "--data=FOLDER/sets.npz --split 0.98 0.01 0.01",
    "run_train_rebm_ddp": "--data=FOLDER/images.npz --augm_type_classification=original",
}


class Workload(NamedTuple):
    options: str
    batch: int  # samples per process and micro-batch
    own: int  # the script's own accumulation
    larger: int  # about as large as the samples allow


WORKLOADS = {
    # the documentation of Python; a BERT of 4 layers of 256
    "train_ddp": Workload(
        """--phase1_data=pydocs --phase2_data=pydocs --max_samples_phase1=4000
        --max_samples_phase2=4000 --teacher_model=builtin:lsa:64 --student_model=builtin:bert:4x256
        --student_max_length=48 --eval_samples=20 --eval_every=1000000 --skip_phase2
        --phase1_epochs=1000""",
        batch=64,
        own=1,
        larger=5,
    ),
    # the shipped proteins; the network of the quickstart with a block more
    "run_train_uniref50_ddp": Workload(
        f"""--datafile={sides.ROOT}/data/ribosomal_families.fasta.gz --max_protein_len=144
        --hidden_size=64 --n_blocks_prot=4 --n_heads=4 --cond_dim=64 --epochs=100000""",
        batch=16,
        own=4,
        larger=24,
    ),
    # structures of 64 residues; ProteinMPNN at full size
    "run_dpo_ddp": Workload(
        """--train_data=pairs64.json --cache_dir=cache --base_model_name=random --temperature=1
        --num_orders=1 --val_fraction=0.02 --num_epochs=100000""",
        batch=4,
        own=1,
        larger=6,
    ),
    # sets of nearly one size; the default network
    "run_train_quantumgrav_ddp": Workload(
        "--data=sets.npz --cache_dir=cache --split 0.98 0.01 0.01 --num_epochs=100000",
        batch=64,
        own=1,
        larger=24,
    ),
    # stage 2 on scikit-learn's digits; all steps of attacks on the images to classify, because the
    # number of those on OOD images grows
    "run_train_rebm_ddp": Workload(
        f"""{DIGITS} --ckpt_path=run-start/latest.pt --indist_attack_clf_max_steps=24
        --attack_max_steps=0 --at_epochs=0 --total_epochs=100000""",
        batch=64,
        own=1,
        larger=8,
    ),
}


def prepare(name, folder):
    """What the options of a script name."""
    if name == "run_dpo_ddp":
        bench_dpo.make_pairs(64, 480, folder)
    elif name == "run_train_quantumgrav_ddp":
        options = "--samples=40000 --min_size=112 --max_size=128".split()
        sides.run_tool("make_causal_sets.py", f"--out={folder}/sets.npz", *options)
    elif name == "run_train_rebm_ddp":
        options = f"{DIGITS} --at_epochs=1 --total_epochs=0".split()
        sides.script_job(f"{name}.py", "start", folder, options, 1).wait()


def start(folder, name, accumulation, side, seed):
    """The jobs of a side."""
    workload = WORKLOADS[name]
    batch = workload.batch * accumulation
    options = f"{workload.options} --batch_size={workload.batch} --log_every=1 --seed={seed}"

    def job(out, processes):
        samples = batch * processes  # of a step
        own = [*options.split(), f"--global_batch_size={samples}"]
        return sides.script_job(f"{name}.py", out, folder, own, samples, processes)

    if side == "independent":
        return [job(f"alone-{number}", 1) for number in range(PROCESSES)]
    ddp = job("ddp", PROCESSES)
    sides.warm_up([ddp])  # alone: what is cached is then there for the others
    return [ddp]


def measure(name, args, folder):
    """Rows of the first table for a script. Returns the records, and rows of the second table."""
    prepare(name, folder)
    records = []
    rows = []
    for kind in ("own", "larger"):
        accumulation = getattr(WORKLOADS[name], kind)
        start_side = functools.partial(start, folder, name, accumulation)
        measured = sides.measure(start_side, SIDES, args.rounds, args.seconds)
        found = sides.speeds(measured)
        work = f"{name}, {kind} accumulation ({accumulation})"
        others = {"independent": "independent processes"}
        records += sides.compare(work, UNIT, found, others, "ddp")

        busy = {}
        for side in SIDES:
            busy[side] = [statistics.mean(job.busy for job in jobs[side]) for jobs in measured]
        costs = []  # of a sample, in processor time
        for i in range(args.rounds):
            cost = {side: busy[side][i] / found[side][i] for side in SIDES}
            costs.append(cost["ddp"] / cost["independent"])
        rows.append([work, *map(sides.spread, [*busy.values(), costs])])
        records.append({"work": work, "busy": busy, "processor_time": costs})
    return records, rows


# ---- The work of one of many ranks ---------------------------------------------------------------


def write_rank_data(folder):
    """Queries of five words, each with an answer and four wrong ones; proteins of 100 to 500
    residues; pairs on 64 structures; causal sets; images."""
    draw = random.Random(0)

    def protein(length):
        return "".join(draw.choices(RESIDUES, k=length))

    words = [f"word{number}" for number in range(2000)]
    texts = [" ".join(draw.choices(words, k=draw.randint(5, 30))) for _ in range(SAMPLES + 2000)]
    with open(folder / "pairs.jsonl", "w") as file:
        for text in texts:
            query = " ".join(draw.choices(text.split(), k=5))
            row = {"query": query, "positive": text, "negatives": draw.sample(texts, 4)}
            file.write(json.dumps(row) + "\n")
    proteins = [protein(draw.randint(100, 500)) for _ in range(SAMPLES + 1000)]
    (folder / "proteins.txt").write_text("\n".join(proteins))
    rows = []
    structures = json.loads(bench_dpo.make_pairs(40, 64, folder).read_text())
    for number in range(SAMPLES + 1000):
        sequences = {"preferred_seq": protein(40), "unpreferred_seq": protein(40)}
        rows.append({**structures[number % 64], **sequences})
    (folder / "pairs.json").write_text(json.dumps(rows))
    options = f"--samples={SAMPLES + 1000} --max_size=48 --out={folder}/sets.npz"
    sides.run_tool("make_causal_sets.py", *options.split())
    images = np.random.default_rng(0).integers(0, 256, (SAMPLES + 100, 16, 16, 3), np.uint8)
    arrays = {}
    for part, of_part in {
        "train": slice(100, None),
        "val": slice(50),
        "test": slice(50, 100),
    }.items():
        arrays[f"x_{part}"] = images[of_part]
        arrays[f"y_{part}"] = np.arange(len(images[of_part])) % 10
    np.savez(folder / "images.npz", **arrays)


def load_data(module, args, device):
    """{name: (data set, ids to train on, cost of each, a function of a batch: the loss)} as main()
    of the script has them."""
    if module.__name__ == "run_train_quantumgrav_ddp":
        data = module.CausalSets(module.read_once(module.prepare, args), args)
        model = module.CausalSetNet(args, data.classes).to("meta")

        def loss_of_sets(batch):
            return module.share_of_loss(model(batch), batch)

        return {module.__name__: (data, data.part("train"), data.cost, loss_of_sets)}

    if module.__name__ == "run_train_uniref50_ddp":
        proteins = module.Data(module.read_once(module.prepare, args), args).train
        model = module.Denoiser(args).to("meta")

        def loss_of_proteins(batch):
            return module.share_of_loss(model(batch), batch)

        data = module.NoisyProteins(proteins, args.seed)
        return {module.__name__: (data, np.arange(len(proteins)), proteins, loss_of_proteins)}

    if module.__name__ == "run_dpo_ddp":
        model = module.ProteinMPNN().to("meta")
        read = functools.partial(module.prepare, neighbours=model.neighbours)
        data = module.Pairs(module.read_once(read, args), args)
        data.split()
        data.reference = np.zeros((1, len(data.letters), 2), np.float32)

        def loss_of_pairs(batch):
            # the meta device has no autocast
            with mock.patch.object(torch, "autocast", return_value=contextlib.nullcontext()):
                return module.share_of_loss(args, model(*batch.inputs()), batch)[0]

        return {module.__name__: (data, data.train_ids, data.lengths, loss_of_pairs)}

    if module.__name__ == "run_train_rebm_ddp":
        images, others = module.load_data(args)
        model = module.make_network(args, len(images.classes), *images.shape).to("meta")

        def loss_of_images(batch):
            """The three passes of stage 2, without attacks."""
            is_real = module.real_or_fake(model(module.pixels(batch.real)), True)
            is_fake = module.real_or_fake(model(module.pixels(batch.outside)), False)
            clf_loss = module.cross_entropy(model(module.pixels(batch.x)), batch.y)
            return (is_real + is_fake + clf_loss).sum()

        data = module.TrainingData(args, images, others, "dat")
        return {module.__name__: (data, images.part("train"), None, loss_of_images)}

    def loss_of_texts(batch):
        vectors = torch.empty_like(batch.targets, dtype=torch.float32, requires_grad=True)
        if hasattr(batch, "pull"):
            return module.pair_loss(args, [batch], [vectors])[0]
        return module.text_loss(args, batch, vectors)

    corpus = module.Corpus(module.read_once(module.prepare_texts, args))
    student = module.load_student(args, module.local_model(args, args.student_model, corpus))
    tokens = module.Tokens(args, corpus, student)
    key = module.teacher_key(args, corpus, args.teacher_model, device)
    vectors = module.teacher_vectors(args, key, args.teacher_model, corpus, 64, device)
    found = {}
    for phase, kind in {1: module.TextData, 2: module.PairData}.items():
        data = kind(args, corpus, tokens)
        data.use(vectors, vectors.dimensions)
        found[f"train_ddp, phase {phase}"] = (data, data.ids(), data.cost(), loss_of_texts)
    return found


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


def measure_ranks(script, rounds, folder):
    """Prints rows of the table; returns the records."""
    options = f"{RANK_OPTIONS[script]} --batch_size=32 --device=cpu --cache_dir=FOLDER/cache"
    sys.argv = [f"{script}.py", *options.replace("FOLDER", str(folder)).split()]
    module = importlib.import_module(script)
    args = module.parse_args()
    device = module.setup_ddp(args)
    records = []
    patches = {"all_gather": send_nothing, "reduce_scatter": send_nothing, "attend": attend_nothing}
    for name, (data, ids, cost, loss_of) in load_data(module, args, device).items():
        found = {"batch": {ranks: [] for ranks in RANKS}, "step": {ranks: [] for ranks in RANKS}}
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
                    for part, values in zip(found, zip(*times, strict=True), strict=True):
                        found[part][ranks].append(statistics.median(values))
        for part, ranks in itertools.product(found, RANKS[1:]):
            work = f"{name}, {ranks} ranks: {part} (+{memory[ranks] - memory[1]} MB)"
            records += sides.compare(work, "ms", found[part], {1: "1 rank"}, ranks)
    module.cleanup()
    return records


# ---- Both ----------------------------------------------------------------------------------------


def main():
    parser = sides.make_parser(__doc__)
    names = list(WORKLOADS)
    text = f"which: {', '.join(names)}"
    add = parser.add_argument
    add("--scripts", nargs="+", default=names, choices=names, metavar="NAME", help=text)
    add("--ranks", action="store_true", help="the work of one of many ranks")
    args = parser.parse_args()
    if args.ranks:
        print(f"1 thread, {args.rounds} rounds of {STEPS} steps, the median of each\n")
        sides.print_comparison_head("ms")
        sys.path.insert(0, str(sides.ROOT))
        logging.disable()
        torch.set_num_threads(1)
        records = []
        with sides.workplace() as folder:
            write_rank_data(folder)
            for script in args.scripts:
                records += measure_ranks(script, args.rounds, folder)
        sides.write_json(args.json, records)
        return

    turns = f"{args.rounds} rounds of {args.seconds:g} s each, in turns of {sides.TURN:g} s"
    print(f"{PROCESSES} processes x 1 thread, {turns}\n")
    sides.print_comparison_head(UNIT)
    records = []
    rows = []
    with sides.workplace() as folder:
        for name in args.scripts:
            new_records, new_rows = measure(name, args, folder)
            records += new_records
            rows += new_rows
    print()
    names = ["busy with DDP", "busy alone", "processor time a sample, DDP / alone"]
    sides.print_head("work", *names)
    for row in rows:
        sides.print_row(*row)
    sides.write_json(args.json, records)


if __name__ == "__main__":
    main()
