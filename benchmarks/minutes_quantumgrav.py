"""run_train_quantumgrav_ddp.py in minutes.py.

The sets, the split, the network and the settings of the quickstart. Steps are epochs.

it      torch_geometric's loop with the same network, optimizer and rates. Its batches are made only
        once, before the first epoch, as no training could have them; the C library keeps freed
        memory, nothing is evaluated before the test. The sets are read as the script reads them
judge   scikit-learn, on the test sets
"""

import sys

import bench_quantumgrav
import numpy as np
import sides
import torch
import torch.nn.functional as F

SCRIPT = "run_train_quantumgrav_ddp.py"
PROBE = (1, 4)
PEER = {}
BATCH = 32


def prepare(folder):
    sides.run_tool("make_causal_sets.py", f"--out={folder}/sets.npz")


def options(out, steps, seed, seconds):
    return f"--data=sets.npz --num_epochs={steps} --batch_size={BATCH}"


def read_graphs(args):
    """{part: sets as torch_geometric has them}; the number of classes, the ids to test on"""
    from torch_geometric.data import Data

    import run_train_quantumgrav_ddp as script

    data = script.CausalSets(script.prepare(args), args)
    graphs = {}
    for part in ("train", "test"):
        graphs[part] = []
        for i in data.part(part):
            batch = data.make_batch([i], np.array([i]))
            future = torch.arange(len(batch.features)).repeat_interleave(batch.past_ptr.diff())
            edges = torch.stack([batch.past, future])
            label = torch.tensor([int(data.labels[i, 0])])
            graphs[part].append(Data(batch.features, edges, y=label, numbers=batch.statistics))
    (classes,) = data.classes.values()
    return graphs, len(classes), data.labels[data.part("test")]


def port(out, steps, seed, end):
    from torch_geometric.loader import DataLoader

    import run_train_quantumgrav_ddp as script

    sides.keep_freed_memory()
    sys.argv = [SCRIPT, *options(out, steps, seed, 0).split(), f"--cache_dir={out}/cache"]
    args = script.parse_args()
    graphs, classes, labels = read_graphs(args)
    torch.manual_seed(seed)
    model = bench_quantumgrav.PortNet(args.hidden_dim, args.num_layers, args.dropout, classes)
    optimizer = script.make_optimizer(args, model)
    batches = list(DataLoader(graphs["train"], BATCH, shuffle=True, drop_last=True))
    total = steps * len(batches)
    step = 0
    while step < total:
        for number in torch.randperm(len(batches)).tolist():
            batch = batches[number]
            for group in optimizer.param_groups:
                group["lr"] = args.lr * script.lr_factor(args, step, total)
            optimizer.zero_grad()
            F.cross_entropy(model(batch), batch.y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
    model.eval()
    with torch.no_grad():
        logits = [model(batch) for batch in DataLoader(graphs["test"], 256)]
    logp = torch.cat(logits).double().log_softmax(1).numpy()
    np.savez(out / "predictions.npz", logp_cls=logp, labels=labels)


def judge(folder, out, part):
    from sklearn.metrics import accuracy_score, log_loss

    found = np.load(out / "predictions.npz")
    labels = found["labels"][:, 0].astype(int)
    logp = found["logp_cls"]
    loss = log_loss(labels, np.exp(logp), labels=range(logp.shape[1]))
    return {"accuracy": accuracy_score(labels, logp.argmax(1)), "cross entropy": loss}
