"""The network of run_dpo_ddp.py: against numbers of the official program, and by what it may and may not depend on."""

from __future__ import annotations

import importlib
import math
import platform
import resource
from argparse import Namespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT, run_ranks
from torch.utils.flop_counter import FlopCounterMode

script = importlib.import_module("run_dpo_ddp")
OFFICIAL = ROOT / "tests" / "golden" / "dpo_official.npz"


def expected_shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes of the released files."""
    linear = {"W2": (128, 128), "W3": (128, 128), "dense.W_in": (512, 128), "dense.W_out": (128, 512)}
    linear |= {"norm1": (128,), "norm2": (128,)}
    encoder = linear | {"W1": (128, 384), "W11": (128, 384), "W12": (128, 128), "W13": (128, 128), "norm3": (128,)}
    modules = {"features.embeddings.linear": (16, 66), "features.norm_edges": (128,), "W_e": (128, 128)}
    modules |= {"W_out": (21, 128)}
    for i in range(3):
        modules |= {f"encoder_layers.{i}.{name}": shape for name, shape in encoder.items()}
        modules |= {f"decoder_layers.{i}.{name}": shape for name, shape in (linear | {"W1": (128, 512)}).items()}
    shapes = {f"{name}.weight": shape for name, shape in modules.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in modules.items()}
    return shapes | {"features.edge_embedding.weight": (128, 416), "W_s.weight": (21, 128)}


def rule_weights() -> dict[str, torch.Tensor]:
    """Weights that both programs can make: raw PCG64 numbers, tensors in the order of their names."""
    bits, weights = np.random.PCG64(20250101), {}
    for name, shape in sorted(expected_shapes().items()):
        values = (bits.random_raw(math.prod(shape)) >> 11) * 2.0**-52 - 1.0  # from -1 to 1
        if "norm" in name and name.endswith("weight"):
            values = 1.0 + 0.2 * values
        elif len(shape) == 1:
            values = 0.2 * values
        else:
            values = values * (3.0 if name == "W_s.weight" else 2.0) * (3.0 / shape[1]) ** 0.5
        weights[name] = torch.from_numpy(values.reshape(shape)).float()
    return weights


def network(neighbours: int = 48, dtype: torch.dtype = torch.float32):
    model = script.ProteinMPNN(neighbours, dtype)
    model.load_state_dict(rule_weights())
    return model


def backbone(length: int, seed: int = 0, chains: int = 1, missing: tuple[int, ...] = ()):
    """(coords, valid, numbers, chains) of random coils that start near each other."""
    draw = np.random.default_rng(seed)
    step = draw.normal(size=(5, length, 3))
    step /= np.linalg.norm(step, axis=-1, keepdims=True)
    chain = np.arange(length) * chains // length
    ca = np.cumsum(3.8 * step[0], axis=0)
    for i in range(1, chains):
        ca[chain == i] += 6.0 * step[4, i] - ca[chain == i][0]
    n, c = ca + 1.46 * step[1], ca + 1.52 * step[2]
    coords = np.stack([n, ca, c, c + 1.23 * step[3]], axis=1).astype(np.float32)
    valid = ~np.isin(np.arange(length), missing)
    coords[~valid] = 0.0
    first = np.searchsorted(chain, chain)  # of its chain
    return coords, valid, np.arange(length) - first + 7, chain


def geometry(*structures, k: int = 48, length: int = 0):
    """Structures as a padded batch."""
    found = [script.featurise(*structure, k) for structure in structures]
    length = max([length, *(len(structure[1]) for structure in structures)])

    def padded(name: str) -> torch.Tensor:
        fill = -1 if name == "neighbours" else 0
        rows = [np.pad(f[name], [(0, length - len(f[name]))] + [(0, 0)] * (f[name].ndim - 1), constant_values=fill)
                for f in found]  # fmt: skip
        return torch.from_numpy(np.stack(rows))

    near = padded("neighbours").long()
    others = {name: padded(name) for name in found[0] if name != "neighbours"}
    return script.Geometry(neighbours=near.clamp(min=0), near=near >= 0, **others)


def letters(count: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 20, (count, length), generator=torch.Generator().manual_seed(seed))


def orders(count: int, length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(length, generator=generator) for _ in range(count)])


def owners(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def test_names_and_shapes_are_the_released_ones():
    state = script.ProteinMPNN().state_dict()
    assert {name: tuple(value.shape) for name, value in state.items()} == expected_shapes()
    assert len(state) == 118 and sum(value.numel() for value in state.values()) == 1_660_485


def probe(log_probs: torch.Tensor) -> torch.Tensor:
    """A number that every log-probability (L, 21) changes, to differentiate."""
    return (log_probs * torch.linspace(-1.0, 2.0, log_probs.numel()).view(log_probs.shape)).sum()


def summary(gradients: dict[str, torch.Tensor]) -> np.ndarray:
    """Norm of each gradient, and its product with the weights over theirs, in the order of the names."""
    weights = rule_weights()
    pairs = [(gradients[name].double(), weights[name].double()) for name in sorted(weights)]
    return np.array([(g.norm().item(), ((g * w).sum() / w.norm()).item()) for g, w in pairs])


@pytest.mark.parametrize("name", ["complex", "peptide"])
def test_equals_the_official_program(name):
    """complex: two chains, numbers left out in one of them, a residue without O, a part designed; peptide: 20 residues.
    Log-probabilities of the official forward pass, dropout off, weights of rule_weights(), and its gradients."""
    frozen = {key.split(".")[1]: value for key, value in np.load(OFFICIAL).items() if key.startswith(name)}
    structure = (frozen["coords"], frozen["valid"], frozen["numbers"].astype(int), frozen["chains"].astype(int))
    sequence, ranks = (torch.from_numpy(frozen[key].astype(np.int64))[None] for key in ("sequence", "ranks"))
    model, valid = network(), frozen["valid"]
    logits = model(geometry(structure), owners(0), sequence, ranks)
    log_probs = logits.log_softmax(-1)[0][torch.from_numpy(valid)]
    difference = log_probs.detach().numpy() - frozen["log_probs"][valid]
    assert logits.dtype == torch.float32 and np.abs(difference).max() < 1e-5
    assert frozen["log_probs"][valid].std(axis=0).mean() > 0.3, "the frozen numbers say little"
    probe(log_probs).backward()
    found, expected = summary({n: p.grad for n, p in model.named_parameters()}), frozen["gradients"]
    assert (np.abs(found - expected) < 1e-4 * expected[:, :1]).all() and expected[:, 0].min() > 0


def test_padded_equals_single_at_every_length():
    model, worst = network(), {}
    for lengths in (range(low, low + 14) for low in range(5, 201, 14)):
        k = 48 if lengths[0] < 48 else 4  # beyond, fewer neighbours cost less time
        structures = [backbone(n, seed=n, missing=(2,) if n % 3 == 0 else ()) for n in lengths]
        sequences = [letters(1, n, seed=n) for n in lengths]
        ranks = [orders(1, n, seed=n) for n in lengths]
        most = max(lengths) + 3
        batch = [torch.cat([F.pad(x, (0, most - x.shape[1])) for x in xs]) for xs in (sequences, ranks)]
        with torch.no_grad():
            together = model(geometry(*structures, k=k, length=most), torch.arange(len(lengths)), *batch)
            for i, n in enumerate(lengths):
                alone = model(geometry(structures[i], k=k), owners(0), sequences[i], ranks[i])
                worst[n] = (alone[0] - together[i, :n]).abs().max().item()
    assert sorted(worst) == list(range(5, 201)) and max(worst.values()) < 2e-5, worst


def test_a_residue_sees_only_what_was_decoded_before_it():
    model, structure, ranks = network(), geometry(backbone(36, seed=1)), orders(1, 36)
    sequence = letters(1, 36)
    changed = sequence.repeat(36, 1)
    changed.diagonal().add_(1).remainder_(20)
    with torch.no_grad():
        before = model(structure, owners(0), sequence, ranks)
        after = model(structure, torch.zeros(36, dtype=torch.long), changed, ranks.expand(36, -1))
    moved = (after - before).abs().amax(-1)  # [j, i]: of i's logits when the letter of j changes
    later = ranks[0][None, :] > ranks[0][:, None]
    assert moved[~later].max() < 1e-6 and moved[later].min() > 1e-5  # all 36 are neighbours


def test_context_is_seen_and_never_depends_on_the_design():
    model, structure = network(), geometry(backbone(40, seed=2, chains=2))
    designed = (torch.arange(40) < 20)[None]
    ranks = script.decoding_ranks(designed, structure.valid, 3, torch.tensor([8]), 0, "random")
    sequences = letters(1, 40).repeat(3, 1)
    sequences[1, :20] = (sequences[1, :20] + 1) % 20  # another design
    sequences[2, 20:] = (sequences[2, 20:] + 1) % 20  # another context
    with torch.no_grad():
        base, design, context = model(structure, owners(0, 0, 0), sequences, ranks.expand(3, -1))
    assert (design - base)[20:].abs().max() < 1e-6 < 1e-3 < (design - base)[:20].abs().max()
    assert (context - base)[:20].abs().amax(-1).min() > 1e-4


def test_chain_order_is_irrelevant():
    coords, valid, numbers, chains = backbone(60, seed=3, chains=3, missing=(11,))
    turned = np.concatenate([np.flatnonzero(chains == i) for i in (2, 0, 1)])
    names = np.array([5, 9, 1])[chains]
    model, sequence, ranks = network(), letters(1, 60), orders(1, 60)
    with torch.no_grad():
        one = model(geometry((coords, valid, numbers, chains)), owners(0), sequence, ranks)
        other = geometry((coords[turned], valid[turned], numbers[turned], names[turned]))
        two = model(other, owners(0), sequence[:, turned], ranks[:, turned])
    assert (one[:, turned] - two).abs().max() < 1e-5
    merged = geometry((coords, valid, numbers, chains * 0))  # while one chain is not three
    with torch.no_grad():
        assert (model(merged, owners(0), sequence, ranks) - one).abs().max() > 1e-2


def test_structures_are_shared_by_their_sequences():
    """owner says which structure; encoded spares the encoder."""
    model = network()
    structures = [backbone(n, seed=n) for n in (30, 22)]
    batch, owner = geometry(*structures), owners(1, 0, 1, 1, 0)
    sequences, ranks = letters(5, 30), orders(5, 30)
    with torch.no_grad():
        together = model(batch, owner, sequences, ranks)
        nodes, edges = model.encode(batch)
        frozen = model(batch, owner, sequences, ranks, encoded=(nodes, edges))
        other = model(batch, owner, sequences, ranks, encoded=(nodes + 1, edges))
        for i, one in enumerate(owner.tolist()):
            n = len(structures[one][1])
            alone = model(geometry(structures[one]), owners(0), *(x[i : i + 1, :n] for x in (sequences, ranks)))
            assert (together[i, :n] - alone[0]).abs().max() < 1e-5
    assert torch.equal(together, frozen) and not torch.equal(together, other)
    assert (together[0] - together[1]).abs().max() > 0.1


def test_gradients_reach_every_tensor():
    model = network()
    logits = model(geometry(backbone(30), backbone(26, seed=1)), owners(0, 0, 1), letters(3, 30), orders(3, 30))
    logits.log_softmax(-1).square().sum().backward()
    silent = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not silent


def test_work_is_done_once():
    """Products of a training step on two sequences of one structure, per edge, in units of 128 x 128: forward 3.1 + 1
    (edges), 3 x 5 (encoder), 3 (decoder, per structure), 2 x 3 (per sequence); backward twice that less one side of
    the first. As written in the paper it is 4 x 52 forward and 2 x 104 backward."""
    model, length = network(), 50
    batch, sequences, ranks = geometry(backbone(length)), letters(2, length), orders(2, length)
    with FlopCounterMode(display=False) as counter:
        model(batch, owners(0, 0), sequences, ranks).sum().backward()
    units = counter.get_total_flops() / (2 * 128 * 128 * length * 48)
    assert 70 < units < 86 + 4, units  # 81 and the nodes


def test_no_denormal_numbers(monkeypatch):
    """Gaussians of far distances would be some: products of them take many times as long on a CPU."""
    seen, product = [], torch.addmm
    monkeypatch.setattr(torch, "addmm", lambda *tensors: seen.append(tensors[1]) or product(*tensors))
    network().encode(geometry(backbone(50)))
    (gaussians,) = seen
    assert gaussians.shape[1] == 400 and 1e-30 < gaussians.min() < 1e-20


def page_faults(ctx, keep: bool) -> int:
    """Of ten tensors of 40 MB, one after another, after fifteen others."""
    if keep:
        script.keep_freed_memory()
    for i in range(25):
        if i == 15:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(10 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it does something with glibc alone")
def test_freed_memory_is_kept():
    (kept,), (given_back,) = (run_ranks(1, page_faults, keep) for keep in (True, False))
    assert kept < 0.3 * given_back, (kept, given_back)  # none, or that of one or two, against all ten


def test_bf16_is_close_and_gives_float32():
    batch, sequences, ranks = geometry(backbone(50)), letters(2, 50), orders(2, 50)
    with torch.no_grad():
        exact = network()(batch, owners(0, 0), sequences, ranks)
        rounded = network(dtype=torch.bfloat16)(batch, owners(0, 0), sequences, ranks)
    assert rounded.dtype == torch.float32 and not torch.equal(exact, rounded)
    assert (exact - rounded).abs().mean() < 0.05 * exact.std()


def test_neighbours():
    coords, valid, numbers, chains = backbone(20, seed=4, chains=2, missing=(3, 12))
    coords[7] = coords[6]  # two residues at one place: each is its own first neighbour
    found = script.featurise(coords, valid, numbers, chains, 18)
    neighbours, between = found["neighbours"], np.linalg.norm(coords[:, None, 1] - coords[None, :, 1], axis=-1)
    assert neighbours.shape == (20, 18) and neighbours.dtype == np.int32 and (neighbours[~valid] == -1).all()
    for i in np.flatnonzero(valid):
        row = neighbours[i]
        assert row[0] == i and set(row) == set(np.flatnonzero(valid)) and (np.diff(between[i, row]) >= 0).all()
    few = script.featurise(coords, valid, numbers, chains, 48)["neighbours"]
    assert (few[valid][:, :18] == neighbours[valid]).all() and (few[:, 18:] == -1).all()
    none = script.featurise(coords, valid & False, numbers, chains, 18)["neighbours"]
    assert (none == -1).all()


def test_neighbours_of_a_long_structure():
    coords, *others = backbone(600, seed=5)  # which is done in parts
    between = np.square(coords[:, None, 1] - coords[None, :, 1]).sum(-1)
    nearest = between.argsort(axis=1, kind="stable")[:, :10]
    assert (np.sort(script.featurise(coords, *others, 10)["neighbours"]) == np.sort(nearest)).all()


def test_coordinates_may_move_and_missing_ones_may_be_anything():
    coords, valid, numbers, chains = backbone(25, seed=8, missing=(4,))
    axes = np.array([[0, 0, 1], [1, 0, 0], [0, 1, 0]], np.float32)
    turn = np.array([[0.6, 0.8, 0], [-0.8, 0.6, 0], [0, 0, 1]], np.float32) @ axes
    other = coords.copy()
    other[4] = 3.0
    model, found = network(), []
    for x in (coords, coords @ turn + 20, other, coords * np.array([1, 1, -1], np.float32)):
        structure = geometry((x, valid, numbers, chains))
        with torch.no_grad():
            found.append(model(structure, owners(0), letters(1, 25), orders(1, 25))[0, valid])
    moved, filled, mirrored = ((logits - found[0]).abs().max().item() for logits in found[1:])
    assert moved < 1e-3 and filled == 0 and mirrored > 1e-2


def test_decoding_ranks():
    designed = torch.zeros(400, 30, dtype=torch.bool)
    designed[:, 5:25] = True
    valid = torch.ones_like(designed)
    valid[:, [2, 28]] = False
    ids = torch.arange(400)
    ranks = script.decoding_ranks(designed, valid, 1, ids, 0, "random")
    assert ranks.dtype == torch.int64 and (ranks.sort(dim=1).values == torch.arange(30)).all()
    assert set(ranks[:, 5:25].unique().tolist()) == set(range(8, 28)) and (ranks[:, [2, 28]] >= 28).all()
    mean = ranks[:, 5:25].double().mean(0)  # every position comes early as often as late
    assert (mean - 17.5).abs().max() < 5 * (20**2 / 12 / 400) ** 0.5
    assert ranks[:, 5:25].unique(dim=0).shape[0] == 400
    wide, wider = (F.pad(x, (0, 9)) for x in (designed, valid))
    padded = script.decoding_ranks(wide[7:9], wider[7:9], 1, ids[7:9], 0, "random")[:, :30]
    kept = valid[0]
    assert torch.equal(padded[:, kept], ranks[7:9][:, kept])  # neither padding nor the batch matters
    for changed in ((2, ids, 0), (1, ids + 400, 0), (1, ids, 1)):
        assert not torch.equal(script.decoding_ranks(designed, valid, *changed, "random"), ranks)
    straight = script.decoding_ranks(designed[:1], valid[:1], 1, ids[:1], 0, "left_to_right")[0]
    assert straight[5:25].tolist() == list(range(8, 28)) and straight[[0, 1, 3, 4]].tolist() == [0, 1, 2, 3]


def official(**changes) -> dict:
    return {"num_edges": 32, "noise_level": 0.2, "model_state_dict": rule_weights()} | changes


def test_weights_come_back_as_they_were_written(tmp_path):
    """Of the average, where there is one; the model keeps its own."""
    model = network(neighbours=32)
    model.noise_level = 0.1
    own, average = [p.detach().clone() for p in model.parameters()], [p.detach() + 1 for p in model.parameters()]
    for ema, expected in ((0.0, own), (0.9, average)):
        args = Namespace(ema=ema, output_dir=str(tmp_path))
        script.save_official(Namespace(model=model, args=args, average=average), "w.pt")
        found = torch.load(tmp_path / "w.pt", weights_only=True)
        assert found.keys() == {"num_edges", "noise_level", "model_state_dict"}
        read = script.read_model(tmp_path / "w.pt")
        assert (read.neighbours, read.noise_level) == (32, 0.1)
        assert all(map(torch.equal, read.parameters(), expected)) and all(map(torch.equal, model.parameters(), own))


@pytest.mark.parametrize("change", ["prefix", "half", "no noise", "more keys"])
def test_weights_in_other_writings(tmp_path, change):
    weights, extra = rule_weights(), {}
    if change == "prefix":
        weights = {f"module.{name}": value for name, value in weights.items()}
    elif change == "half":
        weights = {name: value.half() for name, value in weights.items()}
    found = official(model_state_dict=weights, **extra)
    if change == "no noise":
        del found["noise_level"]
    elif change == "more keys":
        found |= {"epoch": 3, "step": 100, "optimizer_state_dict": {"state": {}}}
    torch.save(found, tmp_path / "w.pt")
    model = script.read_model(tmp_path / "w.pt")
    assert model.neighbours == 32 and model.noise_level == (0.0 if change == "no noise" else 0.2)
    difference = [(value - rule_weights()[name]).abs().max() for name, value in model.state_dict().items()]
    assert max(difference) < 2e-3 and {p.dtype for p in model.parameters()} == {torch.float32}


def without(name: str) -> dict:
    return {key: value for key, value in rule_weights().items() if key != name}


REFUSED = {
    "CA-only": (dict(model_state_dict=rule_weights() | {
        "features.edge_embedding.weight": torch.zeros(128, 167), "features.node_embedding.weight": torch.zeros(128, 3),
        "features.norm_nodes.weight": torch.zeros(128), "features.norm_nodes.bias": torch.zeros(128),
        "W_v.weight": torch.zeros(128, 128), "W_v.bias": torch.zeros(128)}), "CA-only"),
    "ligand": (dict(atom_context_num=25, model_state_dict=rule_weights() | {
        "context_encoder_layers.0.W1.weight": torch.zeros(128, 384), "features.y_nodes.weight": torch.zeros(128, 128),
        "W_v.weight": torch.zeros(128, 128)}), "LigandMPNN"),
    "membrane": (dict(model_state_dict=rule_weights() | {
        "features.node_embedding.weight": torch.zeros(128, 3), "W_v.weight": torch.zeros(128, 128)}), "membrane"),
    "missing": (dict(model_state_dict=without("decoder_layers.2.W3.bias")), "Missing.*decoder_layers.2.W3.bias"),
    "shape": (dict(model_state_dict=rule_weights() | {"W_s.weight": torch.zeros(22, 128)}), r"W_s.weight.*22, 128"),
    "unknown": (dict(model_state_dict=rule_weights() | {"W_x.bias": torch.zeros(3)}), "Unexpected.*W_x.bias"),
    "edges": (dict(num_edges=None), "num_edges is None"),
    "no edges": (dict(num_edges=0), "num_edges is 0"),
    "empty": (dict(model_state_dict={}), "Missing"),
    "state": (dict(model_state_dict=None), "model_state_dict"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_other_weights_are_refused_with_the_reason(tmp_path, name):
    change, reason = REFUSED[name]
    torch.save(official(**change), tmp_path / "other.pt")
    with pytest.raises(ValueError, match=f"other.pt.*{reason}"):
        script.read_model(tmp_path / "other.pt")


def test_files_that_are_no_weights_are_refused(tmp_path):
    whole = tmp_path / "whole.pt"
    torch.save(official(), whole)
    (tmp_path / "text.pt").write_text("<html>not found</html>")
    (tmp_path / "cut.pt").write_bytes(whole.read_bytes()[:100_000])
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save(official(comment=print), tmp_path / "code.pt")
    for name in ("text", "cut", "list", "code", "absent"):
        with pytest.raises(ValueError, match=f"{name}.pt: .*; expected num_edges, .* full-backbone ProteinMPNN"):
            script.read_model(tmp_path / f"{name}.pt")


def designs(count: int = 6, temperature: float = 1.0, seed: int = 5, batch: int = 4):
    """Two chains of 14 and a half-missing residue, of the second chain all but the last four are designed."""
    structure = geometry(backbone(28, seed=6, chains=2, missing=(16,)))
    designed = torch.zeros(28, dtype=torch.bool)
    designed[14:24] = True
    designed[16] = False
    native = letters(1, 28, seed=9)[0]
    native[2] = script.UNKNOWN
    model = network()
    return model, structure, native, designed, script.design(
        model, structure, native, designed, count, temperature, seed, batch)  # fmt: skip


def test_designs_score_as_the_forward_pass_says():
    model, structure, native, designed, (sequences, scores) = designs()
    assert sequences.shape == (6, 28) and sequences.dtype == torch.int64 and scores.shape == (6,)
    free = designed.expand(6, -1)
    ranks = script.decoding_ranks(free, structure.valid.expand(6, -1), 5, torch.arange(6), 0, "random")
    with torch.no_grad():
        logits = model(structure, torch.zeros(6, dtype=torch.long), sequences, ranks)
    expected = logits.log_softmax(-1).gather(-1, sequences.unsqueeze(-1)).squeeze(-1)
    assert (scores + expected[:, designed].mean(1)).abs().max() < 1e-4
    assert torch.equal(sequences[:, ~designed], native.expand(6, -1)[:, ~designed])  # X of the context too
    assert ranks.unique(dim=0).shape[0] == 6 and sequences.unique(dim=0).shape[0] == 6


def test_designs_depend_on_seed_and_number_alone():
    sequences, scores = designs()[-1]
    for batch in (1, 6):
        again = designs(batch=batch)[-1]
        assert torch.equal(again[0], sequences) and (again[1] - scores).abs().max() < 1e-5
    assert torch.equal(designs(count=2)[-1][0], sequences[:2])
    assert not torch.equal(designs(seed=6)[-1][0], sequences)


@pytest.mark.parametrize("temperature", [1e-5, 0.5, 3.0])
def test_designs_follow_the_temperature(temperature):
    """Letters of one designed residue: as often as the softmax says, averaged over the orders of its context."""
    model, structure, count = network(), geometry(backbone(8, seed=7)), 400
    native, free = letters(1, 8)[0], (torch.arange(8) == 4).expand(count, -1)
    drawn = script.design(model, structure, native, free[0], count, temperature, 1, count)[0][:, 4]
    ranks = script.decoding_ranks(free, structure.valid.expand_as(free), 1, torch.arange(count), 0, "random")
    with torch.no_grad():
        logits = model(structure, torch.zeros(count, dtype=torch.long), native.expand(count, -1), ranks)[:, 4, :20]
    if temperature < 1e-3:
        return torch.testing.assert_close(drawn, logits.argmax(-1))
    p = (logits.double() / temperature).softmax(-1)
    off = (drawn.bincount(minlength=20) - p.sum(0)) / (p * (1 - p)).sum(0).sqrt().clamp(min=0.3)
    assert off.abs().max() < 4.5 and p.mean(0).max() < 0.9


def test_x_is_never_drawn():
    sequences = designs(count=40, temperature=20.0, batch=40)[-1][0][:, 14:24]
    assert set(sequences[:, [0, 1, 3, 4, 5, 6, 7, 8, 9]].unique().tolist()) == set(range(20))
