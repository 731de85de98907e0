"""Training steps of run_train_quantumgrav_ddp.py beside the program that it replaces and beside
torch_geometric's loop.

    python benchmarks/bench_quantumgrav.py
    python benchmarks/bench_quantumgrav.py --rounds 1 --sizes 32-64 --networks 1x32

Sets per second, of whole training steps with their loading: batches of 64 sets, one process, one
thread, fp32 on a CPU, the same sets.

ours         the script, for --seconds with its start; the time of validations does not count
replaced     the program that it replaces (commit e7785a5), likewise
in files     torch_geometric's GCNConv, pooling and DataLoader in the loop of the original program
             (ssciwr/QuantumGrav): AdamW with its defaults, the loss read in each step. A set is a
             file that is read when it is needed, as there
in memory    the same, to its advantage with all sets in a list

The loop of the original has some advantages more: no worker processes (they take more than they
give on two cores), no gradient clipping, no progress bar. Its network has the tensors of ours: it
takes them over by name.

Networks. default: that of the script. 1x32 and 3x64 (layers x width): as the original's, GCN from
past to future, residual connections, dropout 0.3, mean pooling, in- and out-degrees as features;
LayerNorm in place of its BatchNorm, and the head of the script.
"""

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
COMMON = f"--batch_size={BATCH} --num_epochs=100000"
LARGE = 1024  # elements: such a set takes a second to make
GCN = "--bidirectional=False --dropout=0.3 --pooling=mean"
GCN_OURS = f"{GCN} --messages=gcn --features 0 1"
GCN_REPLACED = f"{GCN} --gnn_layer_type=gcn --features=in_degree,out_degree"
NETWORKS = {  # options of ours, of the program replaced
    "default": ("", ""),
    "1x32": (
        f"{GCN_OURS} --num_layers=1 --hidden_dim=32",
        f"{GCN_REPLACED} --num_layers=1 --hidden_dim=32",
    ),
    "3x64": (GCN_OURS, GCN_REPLACED),
}
NAMES = {  # side: what the table calls it
    "replaced": sides.REPLACED,
    "files": "torch_geometric's loop, sets in files",
    "memory": "torch_geometric's loop, sets in memory",
}


# ---- The port ------------------------------------------------------------------------------------


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


def make_graphs(sets):
    """The training sets as torch_geometric's."""
    from torch_geometric.data import Data

    graphs = []
    for i in sets.part("train"):
        one = sets[np.array([i]), np.array([i])]
        later = torch.arange(len(one.features)).repeat_interleave(one.past_degree)
        edges = torch.stack([one.past.long(), later])
        graphs.append(Data(one.features, edges, y=one.labels[:, 0]))
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


def port(side, data, network, seconds):
    """Steps per second."""
    from torch_geometric.loader import DataLoader

    sys.path.insert(0, str(sides.ROOT))
    sys.argv = [SCRIPT, *NETWORKS[network][0].split()]
    import run_train_quantumgrav_ddp as script

    args = script.parse_args()
    sets = script.CausalSets(Path(data), args.tasks, args.features)
    model = PortNet(args, len(sets.classes["cls"]))
    weights = script.CausalSetNet(args, sets.classes).state_dict()
    # GCNConv keeps its matrix in a module of its own
    names = [name.replace("linear.weight", "linear.lin.weight") for name in weights]
    model.load_state_dict(dict(zip(names, weights.values(), strict=True)))
    graphs = make_graphs(sets)
    if side == "files":
        graphs = in_files(graphs, Path("files"))
    loader = DataLoader(graphs, BATCH, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=5e-5)
    batches = endless(loader)

    def step():
        batch = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch), batch.y)
        loss.item()
        loss.backward()
        optimizer.step()

    return sides.steps_per_second(step, seconds)


def endless(loader):
    while True:
        yield from loader


# ---- All sides, in turns -------------------------------------------------------------------------


def make_sets(size, samples, folder):
    """Causal sets, as each side reads them. Returns the mean number of links of a set."""
    low, _, high = size.partition("-")
    if int(low) >= LARGE:
        samples = min(samples, 160)
    out = folder / f"sets-{size}"
    options = [f"--out={out}", f"--samples={samples}", f"--min_size={low}"]
    options += [f"--max_size={high or low}", *"--kinds mink2 mink3 --split 0.9 0.05 0.05".split()]
    sides.run_tool("make_causal_sets.py", *options)
    arrays = {path.stem: np.load(path) for path in out.glob("*.npy")}
    nodes = arrays["node_ptr"]
    place = np.arange(nodes[-1]) - np.repeat(nodes[:-1], np.diff(nodes))  # in the set
    later = np.repeat(place, arrays["past_degree"])
    links = {"node_ptr": nodes, "edge_ptr": arrays["edge_ptr"]}
    links["edge_index"] = np.stack([arrays["past"], later])
    np.savez(f"{out}.npz", y_cls=arrays["labels"][:, 0], **links)
    return np.diff(arrays["edge_ptr"]).mean()


def run_side(side, folder, size, network, seconds):
    """Sets per second."""
    data = folder / f"sets-{size}"
    if side in ("files", "memory"):
        settings = {"side": side, "data": str(data), "network": network, "seconds": seconds / 2}
        return BATCH * sides.run_port(__file__, folder, settings)
    ours, replaced = NETWORKS[network]
    is_large = int(size.partition("-")[0]) >= LARGE
    options = f"{COMMON} --max_minutes={seconds / 60} --log_every={2 if is_large else 10} "
    if side == "ours":
        options += f"--data={data} {ours}"
    else:
        options += f"--files={data}.npz --cache_dir={folder}/cache --split=0.9,0.05,0.05 {replaced}"
    rows = sides.run_script(SCRIPT, side, folder, options.split())
    return sides.steady(sides.speeds_of(rows, "samples_per_s", "samples/s"))


def main():
    parser = sides.make_parser(__doc__)
    add = parser.add_argument
    add("--seconds", type=float, default=20.0, help="of a turn")
    add("--sizes", nargs="+", default=["32-128", "2048"], help="elements of a set")
    add("--networks", nargs="+", default=list(NETWORKS), choices=NETWORKS, help="see above")
    add("--sets", type=int, default=4000, help="sets (of 1,024 elements or more: 160 at most)")
    args = sides.parse_args(parser, port)
    records = []
    notes = []
    print(f"batches of {BATCH}, {args.rounds} rounds of {args.seconds:g} s\n")
    sides.print_comparison_head(UNIT)
    with sides.workplace() as folder:
        for size in args.sizes:
            links = make_sets(size, args.sets, folder)
            notes.append(f"{size} elements: {links:,.0f} links on average")
            for network in args.networks:
                others = NAMES
                if network == "default":
                    others = {"replaced": sides.REPLACED}

                def turn(side, size=size, network=network):
                    return run_side(side, folder, size, network, args.seconds)

                found = sides.in_rounds(["ours", *others], args.rounds, turn)
                work = f"{size} elements, {network}"
                records += sides.compare(work, UNIT, found, others)
    print("\n" + "\n".join(notes))
    sides.write_json(args.json, records)


if __name__ == "__main__":
    main()
