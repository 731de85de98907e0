"""Training steps of run_train_quantumgrav_ddp.py beside torch_geometric's loop.

    python benchmarks/bench_quantumgrav.py
    python benchmarks/bench_quantumgrav.py --rounds 1 --seconds 3 --sets 3000 --networks 1x32

Sets per second, of whole training steps with their loading: batches of 64 sets of 32 to 128
elements, one process, one thread, fp32 on a CPU, the same sets and the same network.

ours         the script
in files     torch_geometric's layers, pooling and DataLoader in the loop of the original program
             (ssciwr/QuantumGrav): AdamW with its defaults, the loss read in each step. A set is a
             file that is read when it is needed, as there
in memory    the same, to its advantage with all sets in a list

The loop of the original has some advantages more: no validation and no checkpoint after an epoch,
no worker processes (they take more than they give on two cores), no gradient clipping, no progress
bar.

Networks. default: that of the script. 1x32: one layer of width 32 with dropout 0.3, in- and
out-degrees as features.
"""

import functools
import itertools
import sys
from pathlib import Path

import numpy as np
import sides
import torch
import torch.nn.functional as F
from torch import nn

SCRIPT = "run_train_quantumgrav_ddp.py"
BATCH = 64
UNIT = "sets/s"
LOG_EVERY = 10
COMMON = f"--batch_size={BATCH} --num_epochs=100000 --log_every={LOG_EVERY}"
SPLIT = "--split 0.98 0.01 0.01"  # little to validate on: what is not training shall be short
CLASSES = 2
PORT_SETS = 4000
FEATURES = "in_degree out_degree past_height future_height".split()
NETWORKS = {
    "default": {"features": FEATURES, "hidden_dim": 64, "num_layers": 3, "dropout": 0.0},
    "1x32": {"features": FEATURES[:2], "hidden_dim": 32, "num_layers": 1, "dropout": 0.3},
}
HEAD = 64  # of the script
NAMES = {  # side: what the table calls it
    "files": "torch_geometric's loop, sets in files",
    "memory": "torch_geometric's loop, sets in memory",
}


# ---- The port ------------------------------------------------------------------------------------


class PortLayer(nn.Module):
    def __init__(self, inputs, width, dropout):
        super().__init__()
        from torch_geometric.nn import SimpleConv

        self.neighbours = SimpleConv(aggr="mean")
        self.linear = nn.Linear(3 * inputs, width)
        self.norm = nn.LayerNorm(width)
        self.skip = nn.Identity()
        if inputs != width:
            self.skip = nn.Linear(inputs, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, edges):
        parts = [self.neighbours(x, edges), self.neighbours(x, edges.flip(0)), x]
        y = F.relu(self.norm(self.linear(torch.cat(parts, dim=1))))
        return self.dropout(y + self.skip(x))


class PortNet(nn.Module):
    """The network of the script for torch_geometric's batches. Its weights have the same names."""

    def __init__(self, features, hidden_dim, num_layers, dropout):
        super().__init__()
        widths = [len(features)] + [hidden_dim] * (num_layers - 1)
        self.layers = nn.ModuleList([PortLayer(width, hidden_dim, dropout) for width in widths])
        pooled = 3 * hidden_dim + 1  # and the logarithm of the size
        self.norm = nn.LayerNorm(pooled)
        head = nn.Sequential(nn.Linear(pooled, HEAD), nn.ReLU(), nn.Linear(HEAD, CLASSES))
        self.heads = nn.ModuleList([head])

    def forward(self, batch):
        from torch_geometric.nn import global_add_pool, global_max_pool, global_mean_pool

        x = batch.x
        for layer in self.layers:
            x = layer(x, batch.edge_index)
        pooled = [pool(x, batch.batch) for pool in (global_mean_pool, global_max_pool)]
        pooled += [global_add_pool(x, batch.batch), batch.ptr.diff().log()[:, None]]
        return self.heads[0](self.norm(torch.cat(pooled, dim=1)))


def make_graphs(path, features):
    """The sets of a file of make_sets() as torch_geometric's."""
    from torch_geometric.data import Data

    graphs = []
    for columns, edges, label in torch.load(path):
        # of the script's features these are the first
        graphs.append(Data(columns[:, : len(features)].log1p(), edges, y=label))
    return graphs


def in_files(graphs, folder):
    """The graphs as a data set that reads a file for each."""
    from torch_geometric.data import Dataset

    folder.mkdir(exist_ok=True)
    for i, graph in enumerate(graphs):
        torch.save(graph, folder / f"data_{i}.pt")

    class Files(Dataset):
        def len(self):
            return len(graphs)

        def get(self, i):
            return torch.load(folder / f"data_{i}.pt", weights_only=False)

    return Files()


def endless(loader):
    while True:
        yield from loader


def port(side, data, network):
    from torch_geometric.loader import DataLoader

    torch.manual_seed(0)
    model = PortNet(**network)
    graphs = make_graphs(data, network["features"])
    if side == "files":
        graphs = in_files(graphs, Path("files"))
    batches = endless(DataLoader(graphs, BATCH, shuffle=True, drop_last=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=5e-5)

    def step():
        batch = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch), batch.y)
        loss.item()
        loss.backward()
        optimizer.step()

    sides.repeat(step)


# ---- All sides, in turns -------------------------------------------------------------------------


def make_sets(count, folder):
    """Causal sets: sets.npz, and the first of them for the port: sets.pt. Returns their mean number
    of links."""
    options = [f"--out={folder}/sets.npz", f"--samples={count}", "--min_size=32", "--max_size=128"]
    sides.run_tool("make_causal_sets.py", *options, "--kinds", "mink2", "mink3")
    sys.path.insert(0, str(sides.ROOT))
    import run_train_quantumgrav_ddp as script

    sets = []
    found = script.read_sets(folder / "sets.npz", ["cls"], [])
    for _, values in itertools.islice(found, PORT_SETS):
        described = script.describe(script.order_of(values))
        degree = described["features"][:, script.FEATURES.index("in_degree")].astype(int)
        future = np.repeat(np.arange(len(degree)), degree)
        edges = torch.from_numpy(np.stack([described["past"], future]).astype(np.int64))
        label = torch.tensor([["mink2", "mink3"].index(values["cls"])])
        sets.append((torch.from_numpy(described["features"]), edges, label))
    torch.save(sets, folder / "sets.pt")
    return np.mean([edges.shape[1] for _, edges, _ in sets])


def start(folder, network, side, seed):
    """The jobs of a side."""
    if side in NAMES:
        settings = {"side": side, "data": f"{folder}/sets.pt", "network": NETWORKS[network]}
        return [sides.port_job(__file__, side, folder, settings, BATCH)]
    options = f"{COMMON} {SPLIT} --seed={seed} --data={folder}/sets.npz --cache_dir={folder}/cache"
    options = options.split()
    for name, value in NETWORKS[network].items():
        values = value if isinstance(value, list) else [value]
        options += [f"--{name}", *map(str, values)]
    job = sides.script_job(SCRIPT, side, folder, options, BATCH * LOG_EVERY)
    if not (folder / "cache").exists():
        sides.warm_up([job])  # alone: it reads the sets
    return [job]


def main():
    parser = sides.make_parser(__doc__)
    add = parser.add_argument
    add("--networks", nargs="+", default=list(NETWORKS), choices=NETWORKS, help="see above")
    text = f"how many are made (torch_geometric: {PORT_SETS:,} at most)"
    add("--sets", type=int, default=20_000, help=text)
    args = sides.parse_args(parser, port)
    records = []
    print(f"batches of {BATCH}, {args.rounds} rounds of {args.seconds:g} s\n")
    sides.print_comparison_head(UNIT)
    with sides.workplace() as folder:
        links = make_sets(args.sets, folder)
        for network in args.networks:
            start_side = functools.partial(start, folder, network)
            names = ["ours", *NAMES]
            found = sides.speeds(sides.measure(start_side, names, args.rounds, args.seconds))
            records += sides.compare(f"32-128 elements, {network}", UNIT, found, NAMES)
    print(f"\n32-128 elements: {links:,.0f} links on average")
    sides.write_json(args.json, records)


if __name__ == "__main__":
    main()
