"""Training steps of run_dpo_ddp.py beside a port of the step of the program that its document
describes.

    python benchmarks/bench_dpo.py
    python benchmarks/bench_dpo.py --rounds 1 --seconds 3 --lengths 20

Pairs per second: the same pairs and structures, batches of one pair, fp32 on a CPU, one process and
one thread each. The structures are bundles of helices, written as PDB files; each has one pair, the
worst case for a program that encodes a structure once for all its sequences.

ours       the script. What is done once per run is not measured: parsing, features, the scores of
           the reference
port       what the original program did. In each step the PDB file is parsed and made into tensors,
           of which some are never used. Four full forward passes, policy and frozen reference on
           both sequences: 25 distance matrices [L, L], the order mask by an einsum of one-hot
           matrices, concatenations [L, K, 384] and [L, K, 512]; dropout 0.1 in the policy. Logits
           over the temperature 0.1, log(p + 1e-20), left-to-right order, Adam, the loss read by
           `.item()` three times. To its advantage: the parser is a few lines of slicing where that
           program had a general one (14 ms for 106 residues), there is no progress bar, and both
           sequences share one parse. Its radial functions are often denormal numbers, whose
           products take a CPU many times as long; ours avoids them. --flush_denormal takes that
           away from the port
"""

import copy
import functools
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import sides
import torch
import torch.nn.functional as F

SCRIPT = "run_dpo_ddp.py"
UNIT = "pairs/s"
NAMES = {"port": "port of the original"}
ALPHABET = "ACDEFGHIKLMNPQRSTVWYX"
RESIDUES = "ALA CYS ASP GLU PHE GLY HIS ILE LYS LEU MET ASN PRO GLN ARG SER THR VAL TRP TYR".split()
ATOMS = ["N", "CA", "C", "O"]
ATOM_PAIRS = """N-N C-C O-O CB-CB CA-N CA-C CA-O CA-CB N-C N-O N-CB CB-C CB-O O-C N-CA C-CA O-CA
    CB-CA C-N O-N CB-N C-CB O-CB C-O""".split()  # beside CA-CA
HELIX = np.array(  # an ideal alpha helix: each atom's distance from the axis, degrees, height
    [[1.55, -27.6, -0.87], [2.28, 0.0, 0.0], [1.66, 26.2, 1.09], [2.0, 23.1, 2.29]]
)
BETA = 0.1
TEMPERATURE = 0.1
RATE = 3e-7
OPTIONS = f"""--base_model_name=random --lr={RATE} --beta={BETA} --temperature={TEMPERATURE}
    --num_orders=1 --num_epochs=100000 --log_every=1 --batch_size=1 --cache_dir=cache
    --val_fraction=0.02"""


# ---- Structures ----------------------------------------------------------------------------------


def build_backbone(length, draw):
    """N, CA, C and O (L, 4, 3): helices of 20 residues side by side, up and down in turn."""
    radius, angle, height = HELIX.T
    helix, place = np.divmod(np.arange(length)[:, None], 20)
    turn = np.radians(angle + 100 * place)
    rise = height + 1.5 * place
    is_down = helix % 2 == 1
    x = radius * np.cos(turn) + 10 * (helix % 4)
    y = np.where(is_down, -1, 1) * radius * np.sin(turn) + 10 * (helix // 4)
    z = np.where(is_down, 30 - rise, rise)
    return np.stack([x, y, z], axis=2) + draw.normal(0, 0.02, (length, 4, 3))


def write_pdb(path, coords, sequence):
    lines = []
    for number, (residue, letter) in enumerate(zip(coords, sequence, strict=True), start=1):
        name = RESIDUES[ALPHABET.index(letter)]
        for atom, (x, y, z) in zip(ATOMS, residue, strict=True):
            lines.append(
                f"ATOM  {len(lines) + 1:5d}  {atom:<3s} {name} A{number:4d}    "
                f"{x:8.3f}{y:8.3f}{z:8.3f}  1.00  0.00           {atom[0]}\n"
            )
    path.write_text("".join(lines) + "END\n")


def make_pairs(length, count, folder):
    """A file of pairs, each of a structure of its own: random residues, preferred to the same with
    about a tenth replaced. Returns its path."""
    draw = np.random.default_rng(length)
    letters = np.array(list(ALPHABET))
    rows = []
    for i in range(count):
        ids = draw.integers(0, 20, length)
        others = (ids + draw.integers(1, 20, length)) % 20
        is_other = draw.random(length) < 0.1
        is_other[0] = True  # at least one
        path = folder / f"chain{length}_{i}.pdb"
        row = {"pdb_file": str(path), "preferred_seq": "".join(letters[ids])}
        row["unpreferred_seq"] = "".join(letters[np.where(is_other, others, ids)])
        rows.append(row)
        write_pdb(path, build_backbone(length, draw), row["preferred_seq"])
    path = folder / f"pairs{length}.json"
    path.write_text(json.dumps(rows))
    return path


# ---- The port: data ------------------------------------------------------------------------------


def port_parse(path):
    """Coordinates of N, CA, C and O as nested lists, and the sequence, of the file's one chain."""
    atoms = {}
    residues = {}
    for line in Path(path).read_text().splitlines():
        if line[:4] == "ATOM":
            number = int(line[22:26])
            xyz = [float(line[30:38]), float(line[38:46]), float(line[46:54])]
            atoms.setdefault(number, {})[line[12:16].strip()] = xyz
            residues[number] = line[17:20]
    coords = {}
    for name in ATOMS:
        coords[name] = [atoms[number][name] for number in sorted(atoms)]
    letters = [ALPHABET[RESIDUES.index(residues[number])] for number in sorted(residues)]
    return coords, "".join(letters)


def port_tensors(path):
    """A batch of one structure, with the position-specific arrays that nothing uses."""
    coords, sequence = port_parse(path)
    x = np.stack([np.array(coords[name]) for name in ATOMS], axis=1)[None]
    mask = np.isfinite(x.sum((2, 3))).astype(np.float32)
    x[np.isnan(x)] = 0.0
    length = x.shape[1]
    ones = np.ones((1, length), np.float32)
    found = {"X": torch.from_numpy(x).float(), "mask": torch.from_numpy(mask)}
    found["S"] = port_ids(sequence)
    found["designed"] = torch.from_numpy(ones)
    found["index"] = torch.arange(length)[None]
    found["chain"] = torch.from_numpy(ones).long()
    for i in range(4):
        found[f"unused{i}"] = torch.from_numpy(np.zeros((1, length, 21), np.float32))
    return found


def port_ids(sequence):
    return torch.tensor([[ALPHABET.index(letter) for letter in sequence]])


# ---- The port: model -----------------------------------------------------------------------------


def at_neighbours(nodes, index):
    """Nodes [B, L, C] at index [B, L, K] -> [B, L, K, C]."""
    flat = index.flatten(1).unsqueeze(-1).expand(-1, -1, nodes.shape[-1])
    return nodes.gather(1, flat).view(*index.shape, -1)


def beside(h, around):
    """Each node [B, L, C] in front of what is known of each of its neighbours [B, L, K, D]."""
    return torch.cat([h.unsqueeze(2).expand(-1, -1, around.shape[2], -1), around], -1)


def port_layer(layer, h, around, mask, attend=None):
    """What a layer of the decoder does, and the first half of one of the encoder."""
    message = layer.W3(F.gelu(layer.W2(F.gelu(layer.W1(beside(h, around))))))
    if attend is not None:
        message = attend.unsqueeze(-1) * message
    h = layer.norm1(h + F.dropout(message.sum(-2) / 30, 0.1, layer.training))
    dense = layer.dense.W_out(F.gelu(layer.dense.W_in(h)))
    h = layer.norm2(h + F.dropout(dense, 0.1, layer.training))
    return mask.unsqueeze(-1) * h


def port_encoder_layer(layer, h, edges, index, mask, attend):
    h = port_layer(layer, h, torch.cat([edges, at_neighbours(h, index)], -1), mask, attend)
    x = beside(h, torch.cat([edges, at_neighbours(h, index)], -1))
    message = layer.W13(F.gelu(layer.W12(F.gelu(layer.W11(x)))))
    return h, layer.norm3(edges + F.dropout(message, 0.1, layer.training))


def radial(distances):
    centres = torch.linspace(2.0, 22.0, 16).view(1, 1, 1, -1)
    return torch.exp(-(((distances.unsqueeze(-1) - centres) / 1.25) ** 2))


def port_features(features, data):
    """Of the edges from each residue to its 48 nearest: their features, whose they are."""
    mask = data["mask"]
    n, ca, c, o = data["X"].unbind(2)
    cross = torch.cross(ca - n, c - ca, dim=-1)
    cb = -0.58273431 * cross + 0.56802827 * (ca - n) - 0.54067466 * (c - ca) + ca
    atoms = {"N": n, "CA": ca, "C": c, "O": o, "CB": cb}
    both = mask.unsqueeze(1) * mask.unsqueeze(2)
    all_ca = both * torch.sqrt(((ca.unsqueeze(1) - ca.unsqueeze(2)) ** 2).sum(3) + 1e-6)
    all_ca = all_ca + (1.0 - both) * all_ca.amax(-1, keepdim=True)
    nearest, index = torch.topk(all_ca, min(48, mask.shape[1]), dim=-1, largest=False)
    parts = [radial(nearest)]
    for pair in ATOM_PAIRS:
        a, b = pair.split("-")
        difference = atoms[a].unsqueeze(2) - atoms[b].unsqueeze(1)
        distance = torch.sqrt((difference**2).sum(-1) + 1e-6)  # [B, L, L]
        parts.append(radial(distance.gather(2, index)))
    number = data["index"]
    chain = data["chain"]
    offset = (number.unsqueeze(2) - number.unsqueeze(1)).gather(2, index)
    same = (chain.unsqueeze(2) == chain.unsqueeze(1)).long().gather(2, index)
    place = torch.clip(offset + 32, 0, 64) * same + (1 - same) * 65
    position = features.embeddings["linear"](F.one_hot(place, 66).float())
    edges = torch.cat([position, torch.cat(parts, -1)], -1)
    return features.norm_edges(features.edge_embedding(edges)), index


def port_forward(model, data, sequence):
    """Logits [B, L, 21]. model: the network of ours, whose parts have ProteinMPNN's names."""
    mask = data["mask"]
    edges, index = port_features(model.features, data)
    edges = model.W_e(edges)
    h = torch.zeros(*mask.shape, 128)
    attend = mask.unsqueeze(-1) * at_neighbours(mask.unsqueeze(-1), index).squeeze(-1)
    for layer in model.encoder_layers:
        h, edges = port_encoder_layer(layer, h, edges, index, mask, attend)

    letters = model.W_s(sequence)
    known = torch.cat([edges, at_neighbours(letters, index)], -1)
    unknown = torch.cat([edges, at_neighbours(torch.zeros_like(letters), index)], -1)
    unknown = torch.cat([unknown, at_neighbours(h, index)], -1)
    length = mask.shape[1]
    order = torch.arange(length)[None]
    steps = F.one_hot(order, length).float()
    lower = 1 - torch.triu(torch.ones(length, length))
    before = torch.einsum("ij,biq,bjp->bqp", lower, steps, steps).gather(2, index).unsqueeze(-1)
    valid = mask.view(*mask.shape, 1, 1)
    seen = valid * before
    unknown = valid * (1.0 - before) * unknown
    for layer in model.decoder_layers:
        around = seen * torch.cat([known, at_neighbours(h, index)], -1) + unknown
        h = port_layer(layer, h, around, mask)
    return model.W_out(h)


# ---- The port: step ------------------------------------------------------------------------------


def port_log_probability(model, data, sequence):
    logits = port_forward(model, data, sequence)
    p = (logits / TEMPERATURE).softmax(-1).gather(-1, sequence.unsqueeze(-1)).squeeze(-1)
    return (torch.log(p + 1e-20) * data["mask"] * data["designed"]).sum(-1)


def port_step(row, policy, reference, optimizer):
    data = port_tensors(row["pdb_file"])
    sequences = [port_ids(row["preferred_seq"]), port_ids(row["unpreferred_seq"])]
    optimizer.zero_grad()
    new = [port_log_probability(policy, data, ids) for ids in sequences]
    with torch.no_grad():
        old = [port_log_probability(reference, data, ids) for ids in sequences]
    margin = BETA * ((new[0] - old[0]) - (new[1] - old[1]))
    loss = -F.logsigmoid(margin).mean()
    loss.backward()
    optimizer.step()
    for _ in range(3):  # for its sum, its bar and its average
        loss.item()


def port(pairs, flush_denormal):
    sys.path.insert(0, str(sides.ROOT))
    import run_dpo_ddp as script

    torch.set_flush_denormal(flush_denormal)
    torch.manual_seed(42)
    policy = script.ProteinMPNN()
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    optimizer = torch.optim.Adam(policy.parameters(), lr=RATE)
    rows = itertools.cycle(json.loads(Path(pairs).read_text()))
    sides.repeat(lambda: port_step(next(rows), policy, reference, optimizer))


# ---- All sides, in turns -------------------------------------------------------------------------


def start(folder, pairs, flush_denormal, side, seed):
    """The jobs of a side."""
    if side == "port":
        settings = {"pairs": str(pairs), "flush_denormal": flush_denormal}
        return [sides.port_job(__file__, side, folder, settings, 1)]
    options = f"{OPTIONS} --train_data={pairs} --seed={seed}".split()
    return [sides.script_job(SCRIPT, side, folder, options, 1)]


def main():
    parser = sides.make_parser(__doc__, seconds=15.0)
    add = parser.add_argument
    add("--lengths", type=int, nargs="+", default=[20, 100, 300], help="residues")
    add("--flush_denormal", action="store_true", help="the port rounds them to zero")
    args = sides.parse_args(parser, port)

    records = []
    print(f"1 process x 1 thread, {args.rounds} rounds of {args.seconds:g} s\n")
    sides.print_comparison_head(UNIT)
    with sides.workplace() as folder:
        for length in args.lengths:
            # so many that hardly an epoch ends meanwhile: validation is hardly measured
            pairs = make_pairs(length, max(64, 20000 // length), folder)
            start_side = functools.partial(start, folder, pairs, args.flush_denormal)
            names = ["ours", *NAMES]
            found = sides.speeds(sides.measure(start_side, names, args.rounds, args.seconds))
            records += sides.compare(f"{length} residues, batch 1", UNIT, found, NAMES)
    sides.write_json(args.json, records)


if __name__ == "__main__":
    main()
