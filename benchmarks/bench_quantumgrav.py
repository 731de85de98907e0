"""Training steps of run_train_quantumgrav_ddp.py beside the program that it replaces and beside
torch_geometric's loop.

    python benchmarks/bench_quantumgrav.py
    python benchmarks/bench_quantumgrav.py --rounds 1 --seconds 0.1 --sizes 32-64 --networks 1x32

Sets per second, of whole training steps with their loading: batches of 64 sets, one process, one
thread, fp32 on a CPU. All sides train the same network with the same initial weights on the same
sets (their logits are compared). Each side is a process. In each round all sides step for
--seconds, one right after the other; ratios are of the same round.

ours         train() of the script, in one long epoch: validations and checkpoints, which come
             after epochs, are not counted
replaced     train() of the program that it replaces (commit e7785a5), likewise
in files     torch_geometric's GCNConv, pooling and DataLoader in the loop of the original program
             (ssciwr/QuantumGrav): AdamW with its defaults, the loss read in each step. A set is a
             file that is read when it is needed, as there
in memory    the same, to its advantage with all sets in a list

The loop of the original has some advantages more: no worker processes (they take more than they
give on two cores), no gradient clipping, no progress bar.

Networks. default: that of the script. 1x32 and 3x64 (layers x width): as the original's, GCN from
past to future, residual connections, dropout 0.3, mean pooling, in- and out-degrees as features;
LayerNorm in place of its BatchNorm, and the head of the script.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import sides
import torch
import torch.nn.functional as F
from torch import nn

BATCH = 64
COMPARED = 16  # sets of which the logits are compared

# of ours, of the program replaced
COMMON = """--device=cpu --precision=fp32 --wandb_mode=disabled --log_every=10 --save_every=1000000
    --num_epochs=1000"""
GCN_OURS = "--messages gcn --bidirectional False --dropout 0.3 --pooling mean --features 0 1"
GCN_REPLACED = """--gnn_layer_type=gcn --bidirectional=False --dropout=0.3 --pooling=mean
    --features=in_degree,out_degree"""
NETWORKS = {
    "default": ("", ""),
    "1x32": (
        f"{GCN_OURS} --num_layers 1 --hidden_dim 32",
        f"{GCN_REPLACED} --num_layers=1 --hidden_dim=32",
    ),
    "3x64": (GCN_OURS, GCN_REPLACED),
}
OTHERS = {  # side: what the table calls it
    "replaced": sides.REPLACED,
    "files": "torch_geometric's loop, sets in files",
    "memory": "torch_geometric's loop, sets in memory",
}


# ---- The sides, each in a process of its own -----------------------------------------------------


def load_script(data, work, network):
    """The script, and its arguments."""
    sys.path.insert(0, str(sides.ROOT))
    sys.argv = ["run_train_quantumgrav_ddp.py", f"--data={data}", f"--output_dir={work}/ours"]
    sys.argv += f"--batch_size={BATCH} {COMMON} {NETWORKS[network][0]}".split()
    import run_train_quantumgrav_ddp as script

    return script, script.parse_args()


class Ours:
    def __init__(self, data, work, network):
        self.script, self.args = load_script(data, work, network)
        self.device = self.script.setup_ddp(self.args)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.data = self.script.CausalSets(data, self.args.tasks, self.args.features)
        torch.manual_seed(0)
        self.model = self.script.CausalSetNet(self.args, self.data.classes)

    def logits(self, ids):
        return self.model(self.data[ids, ids])["cls"]

    def train(self, turns):
        sides.watch_steps(self.script, turns.step_done)
        Path(self.args.output_dir).mkdir()
        guard = self.script.StepGuard(self.args, self.device)
        log = self.script.RunLog(self.args, None)
        self.script.train(self.args, self.device, self.data, self.model, None, guard, log)


class Replaced:
    def __init__(self, data, work, network):
        self.folder = data
        sys.path.insert(0, str(work.parent / "worktree"))
        words = [f"--output_dir={work}/replaced"]
        words += f"--batch_size={BATCH} {COMMON} {NETWORKS[network][1]}".split()
        import run_train_quantumgrav_ddp as script

        self.script = script
        self.args = script.parse_args(words)
        self.ddp = script.setup_ddp(self.args)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        script.keep_freed_memory()
        torch.set_float32_matmul_precision("high")  # as its main
        convert(data, work / "converted")
        self.data = script.CausalSets(work / "converted", self.args, self.ddp.device)
        classes = {"cls": len(self.data.classes["cls"])}
        self.model = script.CausalSetNet(self.args, classes, torch.float32, "cpu")
        self.task = script.Task(
            self.args,
            self.ddp,
            self.model,
            self.data,
            classes,
            self.data.labels[:, :1].copy(),
            torch.ones(1),
        )

    def logits(self, ids):
        return self.model(self.data.batch(ids))["cls"]

    def train(self, turns):
        script = self.script
        plain_step = script.StepGuard.step

        def step(guard, loss, number, ids):
            result = plain_step(guard, loss, number, ids)
            turns.step_done()
            return result

        script.StepGuard.step = step
        Path(self.args.output_dir).mkdir()
        log = script.RunLog(self.args, self.ddp, None)
        parts = {"train": long_epoch(self.folder), "valid": training_sets(self.folder)}
        script.train(self.task, log, None, parts, BATCH, 1, time.monotonic())


class PortNet(nn.Module):
    """The network of the script for torch_geometric's batches, its parts under the same names."""

    def __init__(self, args, classes):
        super().__init__()
        from torch_geometric.nn import GCNConv, global_mean_pool

        self.pool = global_mean_pool
        self.layers = nn.ModuleList()
        width = args.hidden_dim
        inputs = len(args.features)
        for _ in range(args.num_layers):
            same = inputs == width
            parts = {
                "linear": GCNConv(inputs, width),
                "norm": nn.LayerNorm(width),
                "skip": nn.Identity() if same else nn.Linear(inputs, width, bias=False),
                "dropout": nn.Dropout(args.dropout),
            }
            self.layers.append(nn.ModuleDict(parts))
            inputs = width
        self.norm = nn.LayerNorm(width + 1)  # and the logarithm of the size
        output = nn.Linear(args.head_dim, classes)
        head = nn.Sequential(nn.Linear(width + 1, args.head_dim), nn.ReLU(), output)
        self.heads = nn.ModuleDict({"cls": head})

    def forward(self, batch):
        x = batch.x
        for layer in self.layers:
            y = F.relu(layer["norm"](layer["linear"](x, batch.edge_index)))
            x = layer["dropout"](y + layer["skip"](x))
        sizes = batch.ptr.diff().log()[:, None]
        x = self.norm(torch.cat([self.pool(x, batch.batch), sizes], dim=1))
        return self.heads["cls"](x)


class Port:
    def __init__(self, data, work, network, in_files):
        from torch_geometric.data import Data, Dataset
        from torch_geometric.loader import DataLoader

        script, args = load_script(data, work, network)
        sets = script.CausalSets(data, args.tasks, args.features)
        self.graphs = []
        for i in range(len(sets.sizes)):
            ids = np.array([i])
            one = sets[ids, ids]
            later = torch.arange(len(one.features)).repeat_interleave(one.past_degree)
            edges = torch.stack([one.past.long(), later])
            self.graphs.append(Data(one.features, edges, y=one.labels[:, 0]))

        train = [self.graphs[i] for i in training_sets(data)]
        if in_files:
            folder = work / "files"
            folder.mkdir()
            for i, graph in enumerate(train):
                torch.save(graph, folder / f"data_{i}.pt")  # noqa: TID251
            count = len(train)

            class Files(Dataset):
                def len(self):
                    return count

                def get(self, i):
                    return torch.load(folder / f"data_{i}.pt", weights_only=False)  # noqa: TID251

            train = Files()
        self.loader = DataLoader(train, BATCH, shuffle=True, drop_last=True)
        self.model = PortNet(args, len(sets.classes["cls"]))

    def logits(self, ids):
        from torch_geometric.data import Batch

        return self.model(Batch.from_data_list([self.graphs[i] for i in ids]))

    def train(self, turns):
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=5e-5)
        while True:
            for batch in self.loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(self.model(batch), batch.y)
                loss.item()
                loss.backward()
                optimizer.step()
                turns.step_done()


def training_sets(data):
    return np.flatnonzero(np.load(data / "split.npy") == 0)


def long_epoch(data):
    """The training sets again and again, so that no step is the last of an epoch."""
    return np.resize(training_sets(data), 4_000_000)


def convert(data, folder):
    """The folder of tools/make_causal_sets.py as the program replaced keeps its sets."""
    arrays = {path.stem: np.load(path) for path in data.glob("*.npy")}
    found = {
        "sizes": np.diff(arrays["node_ptr"]),
        "edges": np.diff(arrays["edge_ptr"]),
        "labels": arrays["labels"],
        "statistics": arrays["statistics"],
        "features": arrays["features"],
        "past_count": arrays["past_degree"].astype(np.int32),
        "future_count": arrays["future_degree"].astype(np.int32),
        "past": arrays["past"],
        "future": arrays["future"],
    }
    folder.mkdir()
    for name, array in found.items():
        array.tofile(folder / f"{name}.bin")
    meta = {"heads": ["cls", "dim", "manifold"], "names": {}, "skipped": 0}
    (folder / "meta.json").write_text(json.dumps(meta))


def run_side(pipe, side, data, work, network):
    """A process: sends the logits of some sets, then trains whenever it is asked to."""
    torch.set_num_threads(1)
    if side == "ours":
        there = Ours(data, work, network)
        torch.save(there.model.state_dict(), work / "weights.pt")  # noqa: TID251
    else:
        weights = torch.load(work / "weights.pt")  # noqa: TID251
        if side == "replaced":
            there = Replaced(data, work, network)
        else:
            there = Port(data, work, network, side == "files")
            # GCNConv keeps its matrix in a module of its own
            names = [name.replace("linear.weight", "linear.lin.weight") for name in weights]
            weights = dict(zip(names, weights.values(), strict=True))
        there.model.load_state_dict(weights)
    there.model.eval()
    with torch.no_grad():
        logits = there.logits(np.arange(COMPARED))
    there.model.train()
    pipe.send(logits.numpy())
    turns = sides.Turns(pipe)
    turns.wait()
    there.train(turns)


# ---- All sides, in turns -------------------------------------------------------------------------


def make_sets(size, samples, folder):
    """Returns the mean number of links of a set."""
    low, _, high = size.partition("-")
    if int(low) >= 1024:
        samples = min(samples, 160)  # they take a second each
    command = [sys.executable, sides.ROOT / "tools" / "make_causal_sets.py", f"--out={folder}"]
    command += [f"--samples={samples}", f"--min_size={low}", f"--max_size={high or low}"]
    command += "--kinds mink2 mink3 --split 0.9 0.05 0.05".split()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return np.diff(np.load(folder / "edge_ptr.npy")).mean()


def parse_args():
    parser = sides.make_parser(__doc__)
    add = parser.add_argument
    add("--rounds", type=int, default=5, help="turns of each side")
    add("--seconds", type=float, default=3.0, help="of a turn (one step at least)")
    add("--sizes", nargs="+", default=["32-128", "2048"], help="elements of a set")
    add("--networks", nargs="+", default=list(NETWORKS), choices=NETWORKS, help="see above")
    add("--sets", type=int, default=2000, help="sets (of 1,024 elements or more: 160 at most)")
    return parser.parse_args()


def main():
    args = parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    records = []
    print(f"batches of {BATCH}, {args.rounds} rounds of {args.seconds:g} s, sets/s\n")
    sides.print_head("elements", "links", "network", "compared with", "ours", "it", "ratio")
    with sides.workplace() as folder:
        for size in args.sizes:
            data = folder / f"sets-{size}"
            links = make_sets(size, args.sets, data)
            for network in args.networks:
                names = ["ours", "replaced"]
                if network != "default":
                    names += ["files", "memory"]
                work = folder / f"{size}-{network}"
                work.mkdir()
                found = sides.measure(names, work, args, run_side, data, work, network)
                mine = BATCH * found["ours"]
                for name in names[1:]:
                    theirs = BATCH * found[name]
                    text = f"{size} elements, {network}"
                    rounds = sides.compare(text, OTHERS[name], "sets/s", mine, theirs)
                    cells = [size, f"{links:,.0f}", network, OTHERS[name]]
                    cells += [sides.spread(mine, 0), sides.spread(theirs, 0)]
                    sides.print_row(*cells, sides.spread(sides.ratios(rounds), 2))
                    records += rounds
    sides.write_json(args.json, records)


if __name__ == "__main__":
    main()
