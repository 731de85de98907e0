"""The network and the loss of run_dpo_ddp.py: against numbers of the official program, by what they
may and may not depend on, and TRL's own computation."""

import hashlib
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
OFFICIAL = ROOT / "tests" / "golden" / "dpo_official.npz"


def rule_weights():
    """Weights that both programs can make: raw PCG64 numbers, tensors in the order of names."""
    bits = np.random.PCG64(20250101)
    weights = {}
    for name, tensor in sorted(script.ProteinMPNN().state_dict().items()):
        values = (bits.random_raw(tensor.numel()) >> 11) * 2.0**-52 - 1.0  # from -1 to 1
        if "norm" in name and name.endswith("weight"):
            values = 1.0 + 0.2 * values
        elif tensor.ndim == 1:
            values = 0.2 * values
        else:
            largest = 3.0 if name == "W_s.weight" else 2.0
            values = values * largest * (3.0 / tensor.shape[1]) ** 0.5
        weights[name] = torch.from_numpy(values.reshape(tensor.shape)).float()
    return weights


def network(neighbours=48):
    model = script.ProteinMPNN(neighbours)
    model.load_state_dict(rule_weights())
    return model


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
    data = script.Pairs(Namespace(), k)
    data.backbones = [script.featurise(part, k) for part in parts]
    return data.structures(range(len(parts)))


def letters(versions, length, seed=0):
    return torch.randint(0, 20, (versions, length), generator=torch.Generator().manual_seed(seed))


def order(length, seed=0):
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed))


# ---- The network -----------------------------------------------------------------------------


def test_names_and_shapes_are_the_released_ones():
    state = script.ProteinMPNN().state_dict()
    lines = [f"{name} {tuple(value.shape)}" for name, value in sorted(state.items())]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    assert len(lines) == 118
    assert digest[:16] == "b3613e5f0d6411d8", "\n".join(lines)


def summary(gradients):
    """Norm of each gradient, and its product with the weights over theirs, by name."""
    rows = []
    for name, weight in rule_weights().items():
        gradient = gradients[name].double()
        along = (gradient * weight).sum() / weight.double().norm()
        rows.append([gradient.norm().item(), along.item()])
    return np.array(rows)


@pytest.mark.parametrize("name", ["complex", "peptide"])
def test_equals_the_official_program(name):
    """complex: two chains, numbers left out, a residue without O, a part designed; peptide: 20
    residues. Log-probabilities and gradients of the official forward pass, dropout off."""
    frozen = {}
    for key, value in np.load(OFFICIAL).items():
        if key.startswith(name):
            frozen[key.split(".")[1]] = value
    valid = frozen["valid"]

    def resolved(key):
        return frozen[key][valid].astype(int)

    part = as_complex(frozen["coords"][valid], resolved("numbers"), resolved("chains"))
    sequence = torch.from_numpy(resolved("sequence"))[None]
    ranks = torch.from_numpy(resolved("ranks"))
    model = network()
    logits = model(structures(part), sequence, torch.arange(valid.sum()), ranks)
    log_probs = logits.log_softmax(-1)[0]
    difference = log_probs.detach().numpy() - frozen["log_probs"][valid]
    assert np.abs(difference).max() < 1e-5
    assert frozen["log_probs"][valid].std(axis=0).mean() > 0.3, "the frozen numbers say little"

    # a number that every log-probability changes
    weights = torch.linspace(-1.0, 2.0, log_probs.numel()).view(log_probs.shape)
    (log_probs * weights).sum().backward()
    found = summary({name: p.grad for name, p in model.named_parameters()})
    expected = frozen["gradients"]
    assert (np.abs(found - expected) < 1e-4 * expected[:, :1]).all()
    assert expected[:, 0].min() > 0


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
        assert (expected - found).abs().max() < 2e-5


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


# ---- Files of weights ------------------------------------------------------------------------


def test_weights_come_back_as_they_were_written(tmp_path):
    """Also as others write them: after DDP, in half precision."""
    model = network(neighbours=32)
    model.noise_level = 0.1
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
    weights = rule_weights()
    ca_only = {**weights, "features.edge_embedding.weight": torch.zeros(128, 167)}
    ligand = {**weights, "context_encoder_layers.0.W1.weight": torch.zeros(1)}
    for changed, reason in ((ca_only, "128, 167"), (ligand, "context_encoder_layers")):
        torch.save({"num_edges": 32, "model_state_dict": changed}, tmp_path / "other.pt")
        text = f"other.pt: .*{reason}.*; expected num_edges.*not those of CA-only"
        with pytest.raises(script.InputError, match=text):
            script.read_model(tmp_path / "other.pt")


# ---- The loss --------------------------------------------------------------------------------


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
    residues = torch.stack([*sequences, zero, zero, owner])
    counts = designed.view(pairs, -1).sum(1)
    return script.Batch(None, residues, designed, counts, torch.arange(pairs), 1 / whole)


def test_scores_have_no_floor_and_count_what_is_designed():
    logits = torch.zeros(2, 3, 21)
    logits[0, 0, 5] = 60.0  # another letter there is e^-60 as likely, at temperature 0.1 e^-600
    sequences = torch.tensor([[1, 2, 3], [4, 5, 6]])
    batch = batch_of(sequences, torch.tensor([1.0, 0.0, 1.0]))
    found = script.sequence_scores(logits, batch, 0.1).double().sum(0)[:, 0]
    assert found[0].item() == pytest.approx(-600 - math.log(21), rel=1e-9)
    assert found[1].item() == pytest.approx(-2 * math.log(21), rel=1e-7)


def test_sums_are_exact_in_float32():
    """500 residues at temperature 0.1: of thousands of nats the thousandths count."""
    rng = torch.Generator().manual_seed(1)
    logits = 4 * torch.rand(2, 500, 21, generator=rng)
    nudged = logits + 1e-4 * torch.randn(2, 500, 21, generator=rng)
    batch = batch_of(torch.zeros(2, 500, dtype=torch.long), torch.ones(500))
    scores = [script.sequence_scores(some, batch, 0.1) for some in (nudged, logits)]
    found = (scores[0] - scores[1]).sum(0)[:, 0]
    assert found.dtype == torch.float32
    new, old = [(some / 0.1).log_softmax(-1)[..., 0] for some in (nudged, logits)]
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
        found, shown = script.pair_loss(args, logits, batch, torch.zeros(2, 2, 2))
        assert found.item() == pytest.approx((losses + 0.7 * nll).sum().item() / 4, rel=1e-5)
        assert shown[0].item() == pytest.approx(losses.sum().item() / 4, rel=1e-5)
        assert shown[2].item() == pytest.approx(0.3 * ratio.sum().item() / 4, rel=1e-4)
    found, _ = script.warm_start_loss(logits[:1], batch)
    assert found.item() == pytest.approx(nll.sum().item() / 4, rel=1e-5)
