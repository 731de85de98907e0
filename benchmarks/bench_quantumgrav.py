"""Training steps of run_train_quantumgrav_ddp.py beside the program that it replaces and beside
torch_geometric's loop.

    python benchmarks/bench_quantumgrav.py
    python benchmarks/bench_quantumgrav.py --rounds 1 --seconds 3 --sets 3000 --networks 1x32

Sets per second, of whole training steps with their loading: batches of 64 sets of 32 to 128
elements, one process, one thread, fp32 on a CPU, the same sets.

ours         the script
replaced     the program that it replaces (commit e7785a5)
in files     torch_geometric's GCNConv, pooling and DataLoader in the loop of the original program
             (ssciwr/QuantumGrav): AdamW with its defaults, the loss read in each step. A set is a
             file that is read when it is needed, as there
in memory    the same, to its advantage with all sets in a list

The loop of the original has some advantages more: no validation and no checkpoint after an epoch,
no worker processes (they take more than they give on two cores), no gradient clipping, no progress
bar.

Networks. default: that of the script. 1x32: one layer of width 32; as the original's, GCN from past
to future, a residual connection, dropout 0.3, mean pooling, in- and out-degrees as features;
LayerNorm in place of its BatchNorm, and the head of the script.
"""

import functools
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
SPLIT = ["0.98", "0.01", "0.01"]  # little to validate on: what is not training shall be short
WIDTH = 32
HEAD = 64  # of the script
CLASSES = 2
GCN = f"--bidirectional=False --dropout=0.3 --pooling=mean --num_layers=1 --hidden_dim={WIDTH}"
NETWORKS = {  # options of ours, of the program replaced
    "default": ("", ""),
    "1x32": (
        f"{GCN} --messages=gcn --features 0 1",
        f"{GCN} --gnn_layer_type=gcn --features=in_degree,out_degree",
    ),
}
NAMES = {  # side: what the table calls it
    "replaced": sides.REPLACED,
    "files": "torch_geometric's loop, sets in files",
    "memory": "torch_geometric's loop, sets in memory",
}


# ---- The port ------------------------------------------------------------------------------------


class PortNet(nn.Module):
    """The network of the script for torch_geometric's batches."""

    def __init__(self):
        super().__init__()
        from torch_geometric.nn import GCNConv, global_mean_pool

        self.conv = GCNConv(2, WIDTH)
        self.norm1 = nn.LayerNorm(WIDTH)
        self.skip = nn.Linear(2, WIDTH, bias=False)
        self.dropout = nn.Dropout(0.3)
        self.pool = global_mean_pool
        self.norm2 = nn.LayerNorm(WIDTH + 1)  # and the logarithm of the size
        hidden = nn.Linear(WIDTH + 1, HEAD)
        self.head = nn.Sequential(hidden, nn.ReLU(), nn.Linear(HEAD, CLASSES))

    def forward(self, batch):
        y = F.relu(self.norm1(self.conv(batch.x, batch.edge_index)))
        x = self.dropout(y + self.skip(batch.x))
        sizes = batch.ptr.diff().log()[:, None]
        return self.head(self.norm2(torch.cat([self.pool(x, batch.batch), sizes], dim=1)))


def make_graphs(data, count):
    """The first sets of an npz file as torch_geometric's."""
    from torch_geometric.data import Data

    arrays = np.load(data)
    node_ptr = arrays["node_ptr"]
    edge_ptr = arrays["edge_ptr"]
    links = torch.from_numpy(arrays["edge_index"]).long()
    labels = torch.from_numpy(arrays["y_cls"]).long()
    graphs = []
    for i in range(count):
        edges = links[:, edge_ptr[i] : edge_ptr[i + 1]].clone()
        size = int(node_ptr[i + 1] - node_ptr[i])
        earlier, later = edges
        degrees = [later.bincount(minlength=size), earlier.bincount(minlength=size)]
        graphs.append(Data(torch.stack(degrees, 1).float(), edges, y=labels[i : i + 1]))
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


def port(side, data, count):
    from torch_geometric.loader import DataLoader

    torch.manual_seed(0)
    model = PortNet()
    graphs = make_graphs(data, count)
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
    """Causal sets, as each side reads them. Returns the mean number of links of a set."""
    out = folder / "sets"
    options = [f"--out={out}", f"--samples={count}", "--min_size=32", "--max_size=128"]
    sides.run_tool("make_causal_sets.py", *options, "--kinds", "mink2", "mink3", "--split", *SPLIT)
    arrays = {path.stem: np.load(path) for path in out.glob("*.npy")}
    nodes = arrays["node_ptr"]
    place = np.arange(nodes[-1]) - np.repeat(nodes[:-1], np.diff(nodes))  # in the set
    later = np.repeat(place, arrays["past_degree"])
    links = {"node_ptr": nodes, "edge_ptr": arrays["edge_ptr"]}
    links["edge_index"] = np.stack([arrays["past"], later])
    np.savez(f"{out}.npz", y_cls=arrays["labels"][:, 0], **links)
    return np.diff(arrays["edge_ptr"]).mean()


def start(folder, network, count, side, seed):
    """The jobs of a side."""
    data = folder / "sets"
    if side in ("files", "memory"):
        settings = {"side": side, "data": f"{data}.npz", "count": min(count, 4000)}
        return [sides.port_job(__file__, side, folder, settings, BATCH)]
    ours, replaced = NETWORKS[network]
    if side == "ours":
        options = f"--data={data} {ours}"
    else:
        options = f"--files={data}.npz --cache_dir={folder}/cache {replaced}"
        options += f" --split={','.join(SPLIT)}"
    options = f"{COMMON} --seed={seed} {options}".split()
    return [sides.script_job(SCRIPT, side, folder, options, BATCH * LOG_EVERY)]


def main():
    parser = sides.make_parser(__doc__)
    add = parser.add_argument
    add("--networks", nargs="+", default=list(NETWORKS), choices=NETWORKS, help="see above")
    add("--sets", type=int, default=40_000, help="how many are made (torch_geometric: 4,000)")
    args = sides.parse_args(parser, port)
    records = []
    print(f"batches of {BATCH}, {args.rounds} rounds of {args.seconds:g} s\n")
    sides.print_comparison_head(UNIT)
    with sides.workplace() as folder:
        links = make_sets(args.sets, folder)
        for network in args.networks:
            others = NAMES
            if network == "default":
                others = {"replaced": sides.REPLACED}
            start_side = functools.partial(start, folder, network, args.sets)
            names = ["ours", *others]
            found = sides.speeds(sides.measure(start_side, names, args.rounds, args.seconds))
            records += sides.compare(f"32-128 elements, {network}", UNIT, found, others)
    print(f"\n32-128 elements: {links:,.0f} links on average")
    sides.write_json(args.json, records)


if __name__ == "__main__":
    main()
