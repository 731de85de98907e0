"""Training steps of run_train_quantumgrav_ddp.py beside torch_geometric's loop.

    python benchmarks/bench_quantumgrav.py
    python benchmarks/bench_quantumgrav.py --rounds 1 --seconds 3 --works 1x32
    python benchmarks/bench_quantumgrav.py --device cuda --precision bf16

Sets per second, of whole training steps with their loading: batches of 64 sets of 32 to 128
elements, one process, the same sets and the same network.

ours         the script. Where an epoch ends, its validation and its checkpoint are measured, too
in memory    torch_geometric's layers, pooling and DataLoader in the loop of the original program
             (ssciwr/QuantumGrav) at its best: all sets in a list, AdamW fused, no loss read, the C
             library keeps all memory that was freed. On a GPU four more processes make the
             batches, in pinned memory (on two cores they take more than they give)
ready        as in memory, but batches are made only once, and stay on the device: what the loop
             takes without its loader. No training would have the same batches in each epoch

The loop has some advantages more: no validation and no checkpoint after an epoch, no gradient
clipping, no progress bar.

Networks. default: that of the script. 1x32: one layer of width 32 with dropout 0.3.
"""

import argparse
import importlib.util
import itertools
import sys

import numpy as np
import sides
import torch
import torch.nn.functional as F
from torch import nn

UNIT = "sets/s"
BATCH = 64
LOG_EVERY = 10
FEATURES, STATISTICS, HEAD = 6, 19, 128  # of the script
PORT_SETS = 4000  # at most
WORKS = {
    "default": {"hidden_dim": 64, "num_layers": 3, "dropout": 0.0},
    "1x32": {"hidden_dim": 32, "num_layers": 1, "dropout": 0.3},
}
NAMES = {
    "memory": "torch_geometric's loop, sets in memory",
    "ready": "torch_geometric's loop, batches ready",
}
OPTIONS = f"""--batch_size={BATCH} --num_epochs=100000 --log_every={LOG_EVERY} --data=sets.npz
    --cache_dir=cache --split 0.98 0.01 0.01"""  # little to validate on: it is measured, too


class PortLayer(nn.Module):
    def __init__(self, inputs, width, dropout):
        super().__init__()
        from torch_geometric.nn import SimpleConv

        self.neighbors = SimpleConv(aggr="mean")
        self.linear = nn.Linear(3 * inputs, width)
        self.norm = nn.LayerNorm(width)
        self.skip = nn.Identity()
        if inputs != width:
            self.skip = nn.Linear(inputs, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, edges):
        parts = [self.neighbors(x, edges), self.neighbors(x, edges.flip(0)), x]
        y = F.relu(self.norm(self.linear(torch.cat(parts, dim=1))))
        return self.dropout(y + self.skip(x))


class PortNet(nn.Module):
    """The network of the script for torch_geometric's batches."""

    def __init__(self, hidden_dim, num_layers, dropout, classes=2):
        super().__init__()
        widths = [FEATURES] + [hidden_dim] * (num_layers - 1)
        self.layers = nn.ModuleList([PortLayer(width, hidden_dim, dropout) for width in widths])
        self.norm = nn.LayerNorm(2 * hidden_dim)
        hidden = nn.Linear(2 * hidden_dim + STATISTICS, HEAD)
        self.head = nn.Sequential(hidden, nn.ReLU(), nn.Linear(HEAD, classes))

    def forward(self, batch):
        from torch_geometric.nn import global_max_pool, global_mean_pool

        x = batch.x
        for layer in self.layers:
            x = layer(x, batch.edge_index)
        # without their number it would be read from a GPU
        pools = [global_mean_pool, global_max_pool]
        pooled = torch.cat([pool(x, batch.batch, len(batch.numbers)) for pool in pools], dim=1)
        return self.head(torch.cat([self.norm(pooled), batch.numbers], dim=1))


def port(side, network, seed, device, precision):
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader

    import run_train_quantumgrav_ddp as script

    graphs = []
    for x, edges, numbers, label in torch.load("sets.pt"):
        graphs.append(Data(x, edges, y=label, numbers=numbers))

    torch.manual_seed(seed)
    sides.keep_freed_memory()
    model = PortNet(**network).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=5e-5, fused=True)
    args = argparse.Namespace(precision=precision)
    autocast = script.choose_precision(args, torch.device(device))
    options = {"pin_memory": device == "cuda"}
    if side == "memory" and device == "cuda":
        options.update(num_workers=4, persistent_workers=True)
    loader = DataLoader(graphs, BATCH, shuffle=True, drop_last=True, **options)
    if side == "ready":
        loader = [batch.to(device) for batch in loader]
    while True:
        for batch in loader:
            if side != "ready":
                batch = batch.to(device, non_blocking=True)
            optimizer.zero_grad()
            with autocast():
                loss = F.cross_entropy(model(batch), batch.y)
            loss.backward()
            optimizer.step()
            sides.note_step(LOG_EVERY)


def prepare(folder, network):
    """Causal sets: sets.npz, and the first of them for the port: sets.pt."""
    import run_train_quantumgrav_ddp as script

    if importlib.util.find_spec("torch_geometric") is None:
        sys.exit("torch_geometric is not here: pip install torch_geometric")
    count = 1000 if sides.chosen.small else 20_000
    options = [f"--out={folder}/sets.npz", f"--samples={count}", "--min_size=32", "--max_size=128"]
    sides.run_tool("make_causal_sets.py", *options, "--kinds", "mink2", "mink3")
    sets = []
    units = script.list_units(folder / "sets.npz", ("cls",))
    found = itertools.chain.from_iterable(script.read_unit(unit, ("cls",)) for unit in units)
    for _, values in itertools.islice(found, PORT_SETS):
        described = script.describe(values)
        x = torch.from_numpy(described["features"]).log1p()
        degree = described["features"][:, script.FEATURES.index("in_degree")].astype(int)
        future = np.repeat(np.arange(len(degree)), degree)
        edges = torch.from_numpy(np.stack([described["past"], future]).astype(np.int64))
        numbers = torch.from_numpy(described["statistics"]).float().log1p()[None]
        label = torch.tensor([["mink2", "mink3"].index(values["cls"])])
        sets.append((x, edges, numbers, label))
    torch.save(sets, folder / "sets.pt")


def start(folder, network, side, seed):
    if side in NAMES:
        settings = {"side": side, "network": network, "seed": seed}
        return sides.port_job(__file__, side, folder, settings, BATCH)
    options = f"{OPTIONS} --seed={seed}"
    for name, value in network.items():
        options += f" --{name} {value}"
    script = "run_train_quantumgrav_ddp.py"
    return sides.script_job(script, side, folder, options, BATCH)


if __name__ == "__main__":
    sides.run(__doc__, UNIT, WORKS, NAMES, prepare, start, port)
