"""run_train_quantumgrav_ddp.py beside a torch_geometric loop as the original program's.

    python benchmarks/bench_quantumgrav.py [--rounds 5] [--sizes 32-128 2048] [--models 1x32 3x64]

Both sides: the same sets, links from past to future as edges, in- and out-degrees as features, the same network with
the same initial weights (checked), batches of 64 sets, one process, one thread, fp32 on a CPU. The network is the
original's: blocks of GCNConv (one way), BatchNorm, ReLU, residual connection, dropout 0.3; mean pooling; linear head.
1x32 is its example, 3x64 a larger one. Times are of whole training steps with their loading, in sets per second. The
rounds alternate: in each, all sides step for --seconds. Ratios are of the same round.

The port is torch_geometric's GCNConv, global_mean_pool and DataLoader in the loop of that program: AdamW with its
defaults (not fused), the loss read by `.item()` in each step. In "files" a set is a file that is read when it is used,
as there (55,000 files of one graph); in "memory" all are in a list, to its advantage. Also to its advantage: no worker
processes, which take more than they give on two cores, no progress bar, no clearing of caches.

Ours is the script's own step: batches from the memory-mapped arrays, the loss divided by the labelled sets of the whole
step, gradient clipping, the guard against non-finite numbers, the fused optimizer.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import run_train_quantumgrav_ddp as script  # noqa: E402

BATCH = 64


class Ours:
    """Steps of the script."""

    def __init__(self, options: list[str]):
        self.args = script.parse_args(options)
        self.ddp = script.DDPContext(0, 1, 0, 1, torch.device("cpu"), "gloo", "python")
        script.LOGGER.rank = 1  # says nothing
        self.data = script.load_data(self.args, self.ddp)
        torch.manual_seed(0)
        count = len(self.data.classes["cls"])
        self.model = script.CausalSetNet(self.args, {"cls": count}, torch.float32, "cpu")
        self.task = script.Task(self.args, self.ddp, self.model, self.data, {"cls": count},
                                self.data.labels[:, :1].copy(), torch.ones(1))  # fmt: skip
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=5e-5, fused=True)
        self.guard = script.StepGuard(self.args, self.ddp, optimizer, torch.float32, time.monotonic())
        sizes = self.data.sizes
        cut = script.bucket_by_tokens(lambda ids: sizes[ids], BATCH, 1, 0)
        self.sampler = script.GlobalBatchSampler(len(sizes), BATCH, 1, 0, self.ddp, 32, cut)

    def steps(self):
        everything, step = np.arange(len(self.data)), itertools.count(1)
        for epoch in itertools.count():
            self.sampler.set_epoch(epoch)
            for batch in self.sampler.batches():
                [(count, mine, graphs, labels)], counts = script.deal_sets(self.task, self.sampler, everything, batch)
                loss = script.weighted_loss(self.model(graphs), labels, self.task.weights / float(counts[0]))
                loss.backward()
                self.guard.step(loss.detach(), next(step), [mine])
                yield count

    def logits(self, ids: np.ndarray) -> torch.Tensor:
        with torch.no_grad():
            return self.model.eval()(self.data.batch(ids))["cls"]


class Port:
    """Steps of torch_geometric's loop."""

    def __init__(self, ours: Ours, folder: Path, files: bool):
        from torch_geometric.data import Data, Dataset
        from torch_geometric.loader import DataLoader
        from torch_geometric.nn import GCNConv, global_mean_pool

        graphs, data = [], ours.data
        for i in range(len(data)):
            batch = data.batch(np.array([i]))
            later = torch.repeat_interleave(torch.arange(len(batch.owner)), batch.past_ptr.diff())
            graphs.append(Data(batch.features, torch.stack([batch.past, later]), y=torch.tensor([data.labels[i, 0]])))
        self.graphs = graphs
        if files:
            for i, graph in enumerate(graphs):
                torch.save(graph, folder / f"data_{i}.pt")  # noqa: TID251

            class Files(Dataset):
                def len(self):
                    return len(data)

                def get(self, i):
                    return torch.load(folder / f"data_{i}.pt", weights_only=False)  # noqa: TID251

            graphs = Files()
        self.loader = DataLoader(graphs, BATCH, shuffle=True, drop_last=True)
        self.pool, blocks = global_mean_pool, []
        for layer in ours.model.layers:
            conv = GCNConv(layer.linear.in_features, layer.linear.out_features)
            conv.lin.weight.data, conv.bias.data = layer.linear.weight.data.clone(), layer.linear.bias.data.clone()
            skip = copy.deepcopy(layer.skip)
            norm = nn.BatchNorm1d(layer.linear.out_features)
            blocks.append(nn.ModuleDict({"conv": conv, "norm": norm, "skip": skip, "dropout": nn.Dropout(0.3)}))
        head = ours.model.heads["cls"][0]  # ours also sees the logarithm of the size: its weight is 0 here
        head.weight.data[:, -1] = 0.0
        self.model = nn.ModuleList([*blocks, nn.Linear(head.in_features - 1, head.out_features)])
        self.model[-1].weight.data = head.weight.data[:, :-1].clone()
        self.model[-1].bias.data = head.bias.data.clone()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=5e-5)

    def forward(self, batch) -> torch.Tensor:
        x = batch.x
        for block in self.model[:-1]:
            x = F.relu(block["norm"](block["conv"](x, batch.edge_index))) + block["skip"](x)
            x = block["dropout"](x)
        return self.model[-1](self.pool(x, batch.batch))

    def steps(self):
        self.model.train()
        while True:
            for batch in self.loader:
                self.optimizer.zero_grad()
                loss = F.cross_entropy(self.forward(batch), batch.y)
                loss.item()
                loss.backward()
                self.optimizer.step()
                yield len(batch.y)

    def logits(self, ids: np.ndarray) -> torch.Tensor:
        from torch_geometric.data import Batch

        self.model.eval()
        with torch.no_grad():
            return self.forward(Batch.from_data_list([self.graphs[i] for i in ids]))


def work(pipe, options: list[str], side: str, folder: Path) -> None:
    """A process of one side: answers requests for seconds of steps with sets per second."""
    torch.set_num_threads(1)
    script.keep_freed_memory()
    ours = Ours(options)
    there = ours if side == "ours" else Port(ours, folder, side == "files")
    ours.model.heads["cls"][0].weight.data[:, -1] = 0.0
    pipe.send((there.logits(np.arange(16)), float(ours.data.edges.mean())))
    ours.model.train()
    steps = there.steps()
    while (seconds := pipe.recv()) is not None:
        count, begin = next(steps), time.perf_counter()
        count = 0
        while time.perf_counter() - begin < seconds or not count:
            count += next(steps)
        pipe.send(count / (time.perf_counter() - begin))


def prepare(options: list[str]) -> None:
    """The arrays, once for all sides."""
    script.LOGGER.rank = 1  # says nothing
    script.prepare_sets(script.parse_args(options))


def spread(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def rounds_of(work: str, other: str, unit: str, mine: list[float], theirs: list[float], ratios: list[float]) -> list:
    """What --json writes of a comparison, in every benchmark alike: a record for each round."""
    rows = zip(mine, theirs, ratios, strict=True)
    return [{"work": work, "with": other, "unit": unit, "ours": a, "other": b, "ratio": r} for a, b, r in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="alternating runs of all sides")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each run (one step at least)")
    parser.add_argument("--sizes", nargs="+", default=["32-128", "2048"], help="elements of a set")
    parser.add_argument("--models", nargs="+", default=["1x32", "3x64"], help="layers x width")
    parser.add_argument("--sets", type=int, default=2000, help="sets (of 1,024 elements or more: 96)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rounds there")
    args = parser.parse_args()
    context, sides, records = multiprocessing.get_context("spawn"), ("ours", "memory", "files"), []
    print(f"batches of {BATCH}, {args.rounds} rounds of {args.seconds:g} s, sets/s\n")
    print("| elements | links | model | ours | port, memory | ratio | port, files | ratio |\n|" + "---|" * 8)
    with tempfile.TemporaryDirectory() as folder:
        for size, model in itertools.product(args.sizes, args.models):
            low, _, high = size.partition("-")
            layers, width = model.split("x")
            options = f"""--cache_dir={folder} --min_size={low} --max_size={high or low} --num_layers={layers}
                --hidden_dim={width} --samples={96 if int(low) >= 1024 else args.sets} --kinds=mink2,mink3
                --features=in_degree,out_degree --feature_scale=raw --gnn_layer_type=gcn --bidirectional=False
                --normalizer_type=batch --dropout=0.3 --pooling=mean --head_dim=0 --device=cpu
                --precision=fp32""".split()
            prepare(options)
            pipes, logits, found = {}, {}, {side: [] for side in sides}
            for side in sides:
                pipes[side], theirs = context.Pipe()
                place = Path(folder) / f"{side}-{size}-{model}"
                place.mkdir()
                context.Process(target=work, args=(theirs, options, side, place), daemon=True).start()
                theirs.close()
                logits[side], links = pipes[side].recv()
            difference = max((logits[side] - logits["ours"]).abs().max().item() for side in sides)
            if not difference < 1e-4 * max(1.0, logits["ours"].abs().max().item()):
                sys.exit(f"the sides differ by {difference:.1e} in a logit")
            for i in range(-1, args.rounds):  # the first round warms up
                for side in sides:
                    pipes[side].send(args.seconds if i >= 0 else 0.0)
                    speed = pipes[side].recv()
                    found[side] += [speed] * (i >= 0)
            for pipe in pipes.values():
                pipe.send(None)
            digits = 0 if statistics.median(found["memory"]) > 100 else 1
            ratios = {s: [a / b for a, b in zip(found["ours"], found[s], strict=True)] for s in sides}
            cells = [size, f"{links:,.0f}", model, spread(found["ours"], digits)]
            for side in sides[1:]:
                cells += [spread(found[side], digits), spread(ratios[side], 1)]
                other = f"torch_geometric's loop, sets in {side}"
                records += rounds_of(f"{size} elements, {model}", other, "sets/s", found["ours"], found[side],
                                     ratios[side])  # fmt: skip
            print(f"| {' | '.join(cells)} |", flush=True)
    if args.json:
        args.json.write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
