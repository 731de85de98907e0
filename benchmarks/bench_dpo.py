"""Training steps of run_dpo_ddp.py beside the program that it replaces and beside a port of the
step of the program that its document describes.

    python benchmarks/bench_dpo.py
    python benchmarks/bench_dpo.py --rounds 1 --seconds 0.1 --lengths 20 --batch 1

Pairs per second. All sides: the same random weights, pairs, structures and number of threads (1),
fp32 on a CPU, one process each. The structures are chains of helices and coils, written as PDB
files; each has one pair, the worst case for a program that encodes a structure once for all its
sequences. In each round all sides step for --seconds; ratios are of the same round.

ours       the script's own step, from the pairs in memory to the update
replaced   the same of the program that it replaces (commit e7785a5), from its mapped arrays
port       what the original program did. Batches of one pair. In each step the PDB file is parsed
           and made into tensors, of which some are never used. Four full forward passes, policy and
           frozen reference on both sequences: 25 distance matrices [L, L], the order mask by an
           einsum of one-hot matrices, concatenations [L, K, 384] and [L, K, 512]; dropout 0.1 in
           the policy. Logits over the temperature 0.1, log(p + 1e-20), left-to-right order, Adam,
           the loss read by `.item()` three times. To its advantage: the parser is a few lines of
           slicing where that program had a general one (14 ms for 106 residues), there is no
           progress bar, and both sequences share one parse. Its radial functions are often denormal
           numbers, whose products take a CPU many times as long; ours avoids them.
           --flush_denormal takes that away on all sides

What is done once per run is not in these times and is given below the table.
"""

import argparse
import json
import logging
import math
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import sides
import torch
import torch.nn.functional as F
from torch import Tensor, nn

ALPHABET = "ACDEFGHIKLMNPQRSTVWYX"
NAMES = "ALA CYS ASP GLU PHE GLY HIS ILE LYS LEU MET ASN PRO GLN ARG SER THR VAL TRP TYR".split()
BETA = 0.1
TEMPERATURE = 0.1
RATE = 3e-7


class Pair(NamedTuple):
    file: Path
    chosen: str
    rejected: str


# ---- Structures ----
def place(
    a: np.ndarray, b: np.ndarray, c: np.ndarray, bond: float, angle: float, torsion: float
) -> np.ndarray:
    """The atom at `bond` from c, with angle b-c-x and torsion a-b-c-x in degrees."""
    angle = math.radians(angle)
    torsion = math.radians(torsion)
    x = (c - b) / np.linalg.norm(c - b)
    z = np.cross(b - a, x)
    z /= np.linalg.norm(z)
    turned = -math.cos(angle) * x + math.sin(angle) * (
        math.cos(torsion) * np.cross(z, x) + math.sin(torsion) * z
    )
    return c + bond * turned


def build_backbone(length: int, draw: np.random.Generator) -> np.ndarray:
    """N, CA, C and O (L, 4, 3): helices of 8 to 14 residues with coils of 3 to 6 between them."""
    torsions = []
    helix = True
    while len(torsions) < length:
        count = int(draw.integers(8, 15) if helix else draw.integers(3, 7))
        centre = np.array([-60.0, -45.0] if helix else [-90.0, 130.0])
        torsions += list(centre + draw.normal(size=(count, 2)) * (3 if helix else 35))
        helix = not helix

    n = np.zeros(3)
    ca = np.array([1.46, 0.0, 0.0])
    atoms = [n, ca, place(np.array([0.0, 1.0, 0.0]), n, ca, 1.52, 111.0, -60.0)]
    for (_, psi), (phi, _) in zip(torsions[: length - 1], torsions[1:length], strict=True):
        for bond, angle, torsion in ((1.33, 116.6, psi), (1.46, 121.7, 180.0), (1.52, 111.0, phi)):
            atoms.append(place(*atoms[-3:], bond, angle, torsion))
    trace = np.array(atoms).reshape(length, 3, 3)
    ends = [psi for _, psi in torsions[:length]]
    oxygen = [place(*row, 1.23, 120.4, psi + 180.0) for row, psi in zip(trace, ends, strict=True)]
    return np.concatenate([trace, np.array(oxygen)[:, None]], axis=1)


def write_pdb(path: Path, coords: np.ndarray, sequence: str) -> None:
    with open(path, "w") as file:
        serial = 0
        for i, (residue, letter) in enumerate(zip(coords, sequence, strict=True), 1):
            for name, (x, y, z) in zip(("N", "CA", "C", "O"), residue, strict=True):
                serial += 1
                file.write(
                    f"ATOM  {serial:5d}  {name:<3s} {NAMES[ALPHABET.index(letter)]} A{i:4d}    "
                    f"{x:8.3f}{y:8.3f}{z:8.3f}  1.00  0.00           {name[0]}\n"
                )
        file.write("END\n")


def letters_of(ids: np.ndarray) -> str:
    return "".join(ALPHABET[i] for i in ids)


def ids_of(letters: str) -> Tensor:
    """A batch of one sequence [1, L]."""
    return torch.tensor([[ALPHABET.index(a) for a in letters]])


def make_pairs(folder: Path, length: int, count: int, seed: int) -> list[Pair]:
    """`count` structures with a pair each: random residues against the same, a tenth replaced."""
    draw = np.random.default_rng((seed, length))
    pairs = []
    for i in range(count):
        chosen = draw.integers(0, 20, length)
        other = (chosen + draw.integers(1, 20, length)) % 20
        rejected = np.where(draw.random(length) < 0.1, other, chosen)
        rejected[0] = other[0]  # at least one
        file = folder / f"chain{length}_{i}.pdb"
        pairs.append(Pair(file, letters_of(chosen), letters_of(rejected)))
        write_pdb(file, build_backbone(length, draw), letters_of(chosen))
    return pairs


# ---- The port: data ----
def port_parse(path: Path) -> dict:
    """Coordinates of N, CA, C and O as nested lists, and the sequence, of the file's one chain."""
    atoms = {}
    sequence = {}
    for line in path.read_text().splitlines():
        if line[:4] == "ATOM":
            number = int(line[22:26])
            name = line[12:16].strip()
            atoms.setdefault(number, {})[name] = [float(line[k : k + 8]) for k in (30, 38, 46)]
            sequence.setdefault(number, line[17:20])
    coords = {}
    for name in ("N", "CA", "C", "O"):
        coords[name] = [atoms[n][name] for n in sorted(atoms)]
    return {
        "coords": coords,
        "seq": "".join(ALPHABET[NAMES.index(sequence[n])] for n in sorted(sequence)),
    }


def port_tensors(entry: dict) -> dict[str, Tensor]:
    """Batch of one structure, with the position-specific arrays that nothing uses."""
    x = np.stack([np.array(entry["coords"][name]) for name in ("N", "CA", "C", "O")], 1)[None]
    mask = np.isfinite(x.sum((2, 3))).astype(np.float32)
    x[np.isnan(x)] = 0.0
    length = x.shape[1]
    native = np.array([[ALPHABET.index(letter) for letter in entry["seq"]]])
    ones = np.ones((1, length), np.float32)
    unused = {
        f"unused{i}": torch.from_numpy(np.zeros((1, length, 21), np.float32)) for i in range(4)
    }
    return unused | {
        "X": torch.from_numpy(x).float(),
        "mask": torch.from_numpy(mask),
        "S": torch.from_numpy(native),
        "designed": torch.from_numpy(ones), "index": torch.arange(length)[None],
        "chain": torch.from_numpy(ones).long(),
    }  # fmt: skip


# ---- The port: model ----
def at_neighbours(nodes: Tensor, index: Tensor) -> Tensor:
    """Nodes [B, L, C] at index [B, L, K] -> [B, L, K, C]."""
    flat = index.flatten(1).unsqueeze(-1).expand(-1, -1, nodes.shape[-1])
    return nodes.gather(1, flat).view(*index.shape, -1)


class PortDense(nn.Module):
    def __init__(self):
        super().__init__()
        self.W_in = nn.Linear(128, 512)
        self.W_out = nn.Linear(512, 128)

    def forward(self, h: Tensor) -> Tensor:
        return self.W_out(F.gelu(self.W_in(h)))


class PortLayer(nn.Module):
    """A decoder layer on `width` numbers per neighbour."""

    def __init__(self, width: int):
        super().__init__()
        self.W1 = nn.Linear(128 + width, 128)
        self.W2 = nn.Linear(128, 128)
        self.W3 = nn.Linear(128, 128)
        self.norm1 = nn.LayerNorm(128)
        self.norm2 = nn.LayerNorm(128)
        self.dense = PortDense()
        self.dropout = nn.Dropout(0.1)

    def forward(
        self, h: Tensor, around: Tensor, mask: Tensor, attend: Tensor | None = None
    ) -> Tensor:
        x = torch.cat([h.unsqueeze(2).expand(-1, -1, around.shape[2], -1), around], -1)
        message = self.W3(F.gelu(self.W2(F.gelu(self.W1(x)))))
        if attend is not None:
            message = attend.unsqueeze(-1) * message
        h = self.norm1(h + self.dropout(message.sum(-2) / 30))
        h = self.norm2(h + self.dropout(self.dense(h)))
        return mask.unsqueeze(-1) * h


class PortEncoderLayer(PortLayer):
    """Also updates the edges."""

    def __init__(self):
        super().__init__(256)
        self.W11 = nn.Linear(384, 128)
        self.W12 = nn.Linear(128, 128)
        self.W13 = nn.Linear(128, 128)
        self.norm3 = nn.LayerNorm(128)

    def encode(
        self, h: Tensor, edges: Tensor, index: Tensor, mask: Tensor, attend: Tensor
    ) -> tuple[Tensor, Tensor]:
        h = self(h, torch.cat([edges, at_neighbours(h, index)], -1), mask, attend)
        x = torch.cat([edges, at_neighbours(h, index)], -1)
        x = torch.cat([h.unsqueeze(2).expand(-1, -1, x.shape[2], -1), x], -1)
        message = self.W13(F.gelu(self.W12(F.gelu(self.W11(x)))))
        return h, self.norm3(edges + self.dropout(message))


class PortFeatures(nn.Module):
    PAIRS = (
        "N-N C-C O-O CB-CB CA-N CA-C CA-O CA-CB N-C N-O N-CB CB-C CB-O O-C "
        "N-CA C-CA O-CA CB-CA C-N O-N CB-N C-CB O-CB "
        "C-O"
    ).split()

    def __init__(self):
        super().__init__()
        self.embeddings = nn.ModuleDict({"linear": nn.Linear(66, 16)})
        self.edge_embedding = nn.Linear(416, 128, bias=False)
        self.norm_edges = nn.LayerNorm(128)

    def radial(self, distances: Tensor) -> Tensor:
        centres = torch.linspace(2.0, 22.0, 16).view(1, 1, 1, -1)
        return torch.exp(-(((distances.unsqueeze(-1) - centres) / 1.25) ** 2))

    def forward(
        self, x: Tensor, mask: Tensor, number: Tensor, chain: Tensor
    ) -> tuple[Tensor, Tensor]:
        n, ca, c, o = x.unbind(2)
        cross = torch.cross(ca - n, c - ca, dim=-1)
        cb = -0.58273431 * cross + 0.56802827 * (ca - n) - 0.54067466 * (c - ca) + ca
        atoms = {"N": n, "CA": ca, "C": c, "O": o, "CB": cb}
        both = mask.unsqueeze(1) * mask.unsqueeze(2)
        all_ca = both * torch.sqrt(((ca.unsqueeze(1) - ca.unsqueeze(2)) ** 2).sum(3) + 1e-6)
        all_ca = all_ca + (1.0 - both) * all_ca.amax(-1, keepdim=True)
        nearest, index = torch.topk(all_ca, min(48, x.shape[1]), dim=-1, largest=False)
        parts = [self.radial(nearest)]
        for a, b in (pair.split("-") for pair in self.PAIRS):
            between = torch.sqrt(
                ((atoms[a].unsqueeze(2) - atoms[b].unsqueeze(1)) ** 2).sum(-1) + 1e-6
            )  # [B, L, L]
            parts.append(self.radial(between.gather(2, index)))
        offset = (number.unsqueeze(2) - number.unsqueeze(1)).gather(2, index)
        same = (chain.unsqueeze(2) == chain.unsqueeze(1)).long().gather(2, index)
        place = torch.clip(offset + 32, 0, 64) * same + (1 - same) * 65
        position = self.embeddings["linear"](F.one_hot(place, 66).float())
        edges = torch.cat([position, torch.cat(parts, -1)], -1)
        return self.norm_edges(self.edge_embedding(edges)), index


class PortMPNN(nn.Module):
    """Structure, sequence, decoding order -> logits [B, L, 21]."""

    def __init__(self):
        super().__init__()
        self.features = PortFeatures()
        self.W_e = nn.Linear(128, 128)
        self.W_s = nn.Embedding(21, 128)
        self.encoder_layers = nn.ModuleList(PortEncoderLayer() for _ in range(3))
        self.decoder_layers = nn.ModuleList(PortLayer(384) for _ in range(3))
        self.W_out = nn.Linear(128, 21)

    def forward(self, data: dict[str, Tensor], sequence: Tensor, order: Tensor) -> Tensor:
        """Logits [B, L, 21]."""
        mask = data["mask"]
        edges, index = self.features(data["X"], mask, data["index"], data["chain"])
        edges = self.W_e(edges)
        h = torch.zeros(*mask.shape, 128)
        attend = mask.unsqueeze(-1) * at_neighbours(mask.unsqueeze(-1), index).squeeze(-1)
        for layer in self.encoder_layers:
            h, edges = layer.encode(h, edges, index, mask, attend)

        letters = self.W_s(sequence)
        known = torch.cat([edges, at_neighbours(letters, index)], -1)
        unknown = torch.cat([edges, at_neighbours(torch.zeros_like(letters), index)], -1)
        unknown = torch.cat([unknown, at_neighbours(h, index)], -1)
        length = mask.shape[1]
        steps = F.one_hot(order, length).float()
        lower = 1 - torch.triu(torch.ones(length, length))
        before = torch.einsum("ij,biq,bjp->bqp", lower, steps, steps).gather(2, index).unsqueeze(-1)
        valid = mask.view(*mask.shape, 1, 1)
        seen = valid * before
        unknown = valid * (1.0 - before) * unknown
        for layer in self.decoder_layers:
            h = layer(h, seen * torch.cat([known, at_neighbours(h, index)], -1) + unknown, mask)
        return self.W_out(h)


# ---- The port: step ----
class Port:
    """Policy, frozen reference, optimizer."""

    def __init__(self, weights: dict[str, Tensor]):
        self.policy = PortMPNN()
        self.reference = PortMPNN()
        for model in (self.policy, self.reference):
            model.load_state_dict(weights)
        self.policy.train()
        self.reference.eval().requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=RATE)

    def log_probability(
        self, model: nn.Module, data: dict[str, Tensor], sequence: Tensor
    ) -> Tensor:
        logits = model(data, sequence, torch.arange(sequence.shape[1])[None])
        p = (logits / TEMPERATURE).softmax(-1).gather(-1, sequence.unsqueeze(-1)).squeeze(-1)
        return (torch.log(p + 1e-20) * data["mask"] * data["designed"]).sum(-1)

    def logits(self, pair: Pair) -> Tensor:
        """Of the chosen sequence (L, 21), dropout off."""
        data = port_tensors(port_parse(pair.file))
        sequence = ids_of(pair.chosen)
        with torch.no_grad():
            return self.reference(data, sequence, torch.arange(len(pair.chosen))[None])[0]

    def step(self, pair: Pair) -> float:
        data = port_tensors(port_parse(pair.file))
        sequences = [ids_of(pair.chosen), ids_of(pair.rejected)]
        self.optimizer.zero_grad()
        policy = [self.log_probability(self.policy, data, ids) for ids in sequences]
        with torch.no_grad():
            reference = [self.log_probability(self.reference, data, ids) for ids in sequences]
        margin = BETA * ((policy[0] - reference[0]) - (policy[1] - reference[1]))
        loss = -F.logsigmoid(margin).mean()
        loss.backward()
        self.optimizer.step()
        return sum(loss.item() for _ in range(3)) / 3  # for its sum, its bar and its average


# ---- Ours, and the program replaced ----
def write_data(pairs: list[Pair], folder: Path) -> Path:
    rows = []
    for pair in pairs:
        row = {"pdb_file": str(pair.file), "preferred_seq": pair.chosen}
        rows.append({**row, "unpreferred_seq": pair.rejected})
    path = folder / f"pairs{len(pairs[0].chosen)}.json"
    path.write_text(json.dumps(rows))
    return path


def options_of(data: Path, folder: Path) -> list[str]:
    return f"""--train_data={data} --base_model_name=random --output_dir={folder}/out --device=cpu
        --precision=fp32 --wandb_mode=disabled --lr={RATE} --beta={BETA} --eval_batch_size=1
        --temperature={TEMPERATURE} --decoding_order=left_to_right""".split()


class Ours:
    """The script's model, data and step. `once`: seconds per pair of what is done once."""

    def __init__(self, pairs: list[Pair], folder: Path):
        import run_dpo_ddp as script

        self.script = script
        sys.argv = ["run_dpo_ddp.py", *options_of(write_data(pairs, folder), folder)]
        self.args = script.parse_args()
        if not torch.distributed.is_initialized():
            logging.disable(logging.INFO)
            script.setup_ddp(self.args)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        torch.manual_seed(self.args.seed)
        self.model = script.ProteinMPNN()
        begin = time.monotonic()
        self.data, _ = script.load_pairs(self.args, self.model.neighbours)
        self.once = {"parsing and features": (time.monotonic() - begin) / len(pairs)}
        device = torch.device("cpu")
        self.guard = script.StepGuard(self.args, device)
        self.optimizer = script.make_optimizer(self.args, self.model)
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)
        ids = np.arange(len(pairs))
        common = (self.data, ids, ids, self.model, self.guard, None)
        run = script.Run(self.args, device, *common)
        begin = time.monotonic()
        self.reference = script.score_reference(run)[0]
        # training and validation pairs are the same here, each scored once
        self.once["reference"] = (time.monotonic() - begin) / len(pairs) / 2

    def forward(self, batch) -> Tensor:
        residues = batch.residues
        return self.model(batch.structures, residues[:2], residues[2], residues[3])

    def logits(self) -> Tensor:
        """Of the first pair's chosen sequence (L, 21)."""
        ids = np.array([0])
        with torch.no_grad():
            return self.forward(self.data[ids, ids, 0])[0]

    def step(self, ids: np.ndarray) -> None:
        batch = self.data[ids, ids, 0]
        own = self.reference.index_select(0, batch.ids).T.reshape(2, 2, -1)
        loss, _ = self.script.pair_loss(self.args, self.forward(batch), batch, own)
        self.scaler.scale(loss).backward()
        self.guard.update(self.optimizer, self.scaler)
        self.guard.agree()


class Replaced:
    """The same of the program replaced."""

    def __init__(self, pairs: list[Pair], folder: Path):
        import run_dpo_ddp as script

        self.script = script
        words = options_of(write_data(pairs, folder), folder)
        args = script.parse_args([*words, f"--cache_dir={folder}/cache"])
        ddp = script.DDPContext(0, 1, 0, 1, torch.device("cpu"), "gloo", "python")
        script.keep_freed_memory()
        torch.manual_seed(args.seed)
        model = script.ProteinMPNN()
        args.neighbours = model.neighbours
        begin = time.monotonic()
        ids = np.arange(len(pairs))
        data = script.load_pairs(args, ddp)
        self.once = {"parsing and features": (time.monotonic() - begin) / len(pairs)}
        self.task = script.Task(args, ddp, model, data, ids, ids[:0])
        begin = time.monotonic()
        self.task.reference = script.score_pairs(self.task, ids, [0])[:, None, :2]
        self.once["reference"] = (time.monotonic() - begin) / len(pairs)
        optimizer = torch.optim.Adam(model.parameters(), lr=RATE, fused=True)
        self.guard = script.StepGuard(args, ddp, optimizer, torch.float32, time.monotonic())
        self.stage = script.Stage("dpo")
        self.log = SimpleNamespace(add=lambda *counts, **sums: None)

    def logits(self) -> Tensor:
        task = self.task
        with torch.no_grad():
            found = self.script.pair_logits(task.model, task.collate(np.array([0])), 0, task.args)
        return found[0][0]

    def step(self, ids: np.ndarray) -> None:
        task = self.task
        micro = [(task.collate(ids), len(ids), task.reference[ids, 0])]
        common = (len(ids), self.log, self.guard.scaler)
        loss, _ = self.script.stage_step(task, task.model, self.stage, micro, *common)
        self.guard.step(loss, 1, [ids])


class PortSide:
    def __init__(self, pairs: list[Pair], folder: Path):
        import run_dpo_ddp as script

        torch.manual_seed(42)
        self.port = Port(script.ProteinMPNN().state_dict())
        self.pairs = pairs
        self.once = {}

    def logits(self) -> Tensor:
        return self.port.logits(self.pairs[0])

    def step(self, ids: np.ndarray) -> None:
        for number in ids:
            self.port.step(self.pairs[number])


# ---- Comparison ----
SIDES = {"ours": Ours, "replaced": Replaced, "port": PortSide}
OTHERS = {"replaced": sides.REPLACED, "port": "port of the original"}


def run_side(pipe, side: str, args: argparse.Namespace, folder: Path, program: Path) -> None:
    """A process of its own for each side, as memory is handled differently. Answers [length] by
    outputs of the network and notes, [pairs per step, seconds] by a speed."""
    sys.path.insert(0, str(program))
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(args.flush_denormal)
    while True:
        request = pipe.recv()
        if request is None:
            return
        if len(request) == 1:
            pairs = make_pairs(folder, request[0], max(args.batch), args.seed)
            there = SIDES[side](pairs, folder)
            pipe.send((there.logits().log_softmax(-1).numpy(), there.once))
            continue
        size, seconds = request
        begin = time.monotonic()
        number = 0
        while number < 2 or time.monotonic() - begin < seconds:
            there.step((np.arange(size) + number * size) % len(pairs))
            number += 1
        pipe.send(number * size / (time.monotonic() - begin))


def compare(args: argparse.Namespace, folder: Path, processes: sides.Sides) -> list[dict]:
    """All sides in turns; prints the table. Returns the rounds."""
    for side in SIDES:
        (folder / side).mkdir()
        program = folder / "worktree" if side == "replaced" else sides.ROOT
        processes.start(side, run_side, side, args, folder / side, program)

    def turn(run):
        side, size = run
        return processes.ask(side, [size, args.seconds])

    notes = []
    records = []
    print(f"1 process x {args.threads} thread, {args.rounds} rounds of {args.seconds:g} s each\n")
    cells = ["residues", "batch of ours", "compared with", "ours, pairs/s", "it, pairs/s", "ratio"]
    sides.print_head(*cells)
    for length in args.lengths:
        answers = {side: processes.ask(side, [length]) for side in SIDES}
        outputs, once = answers["ours"]
        for side in OTHERS:
            sides.check_same(side, answers[side][0], outputs)
        # the port takes one pair at a time, whatever the batch of the others
        runs = [("port", 1)]
        for size in args.batch:
            runs += [("ours", size), ("replaced", size)]
        found = sides.in_rounds(runs, args.rounds, turn)
        for size in args.batch:
            mine = found["ours", size]
            for side, title in OTHERS.items():
                theirs = found[side, 1 if side == "port" else size]
                name = f"{length} residues, batch {size}"
                rounds = sides.compare(name, title, "pairs/s", mine, theirs)
                cells = [sides.spread(mine, 2), sides.spread(theirs, 2)]
                cells.append(sides.spread(sides.ratios(rounds), 2))
                sides.print_row(length, size, title, *cells)
                records += rounds
        costs = ", ".join(f"{name} {1e3 * seconds:.0f} ms" for name, seconds in once.items())
        notes.append(f"{length} residues: once per pair: {costs}")
    print("\n" + "\n".join(notes))
    return records


def main() -> None:
    parser = sides.make_parser(__doc__)
    add = parser.add_argument
    add("--rounds", type=int, default=5, help="turns of each side")
    add("--seconds", type=float, default=4.0, help="of a turn (two steps at least)")
    add("--lengths", type=int, nargs="+", default=[20, 100, 300], help="residues")
    add("--batch", type=int, nargs="+", default=[1, 8], help="pairs per step of ours")
    add("--threads", type=int, default=1, help="CPU threads of all sides")
    add("--flush_denormal", action="store_true", help="all sides: round them to zero")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    with sides.workplace() as folder, sides.Sides(folder) as processes:
        records = compare(args, folder, processes)
    sides.write_json(args.json, records)


if __name__ == "__main__":
    main()
