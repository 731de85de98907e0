"""run_train_uniref50_ddp.py: known answers, and what a user sees of a run."""

import json
import math
import os
import shutil
import tracemalloc
from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import call_script, parse_arguments, write_proteins
from torch import nn

import run_train_uniref50_ddp as script

SMALL = "--hidden_size=32 --n_blocks_prot=2 --n_heads=2 --cond_dim=16 --max_protein_len=40".split()


arguments = partial(parse_arguments, script)


def network(*options):
    """A small network with random weights everywhere: at first its blocks do nothing."""
    torch.manual_seed(0)
    model = script.Denoiser(arguments(*SMALL, "--dropout=0", *options))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


def batch_of(sequences, share=0.4, seed=0):
    """A Batch of token arrays, with random residues hidden."""
    generator = np.random.default_rng(seed)
    hide = []
    for tokens in sequences:
        hide.append(script.is_residue(tokens) & (generator.random(len(tokens)) < share))
    shares = np.full(len(sequences), share)
    return script.make_batch(sequences, hide, shares, 1 / shares, 1)


def random_sequences(lengths, seed=0):
    generator = np.random.default_rng(seed)
    found = []
    for length in lengths:
        residues = generator.integers(script.FIRST, script.FIRST + script.KINDS, length - 2)
        found.append(np.array([script.BEGIN, *residues, script.END], np.uint8))
    return found


def as_rank(rank, world_size):
    """This process is one of several ranks, without a process group."""
    replaced = {
        "get_rank": lambda group=None: rank,
        "get_world_size": lambda group=None: world_size,
    }
    return mock.patch.multiple(dist, **replaced)


def write_folder(folder, lengths):
    """A training part with sequences of these lengths in tokens."""
    folder.mkdir(exist_ok=True)
    np.concatenate(random_sequences(lengths)).tofile(folder / "train.tokens")
    np.cumsum([0, *lengths], dtype=np.int64).tofile(folder / "train.offsets")
    return script.Proteins(folder, "train", 512)


def lengths_of_uniref50(count, seed=0):
    """Log-normal, with the mean of UniRef50, 286 residues."""
    draws = np.random.default_rng(seed).lognormal(math.log(286) - 0.32, 0.8, count)
    return np.clip(draws, 20, 4000).astype(np.int64) + 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """proteins.fasta and data/, prepared from it."""
    folder = tmp_path_factory.mktemp("uniref")
    write_proteins(folder / "proteins.fasta", 300)
    status, text = call_script(
        "tools/prepare_uniref50", folder / "proteins.fasta", folder / "data", "--val_ratio=0.2"
    )
    assert status == 0, text
    return folder


# --------------------------------------------------------------------------------------------------
# Steps


def steps_of(proteins, *options, rank=0, world_size=1, epoch=0):
    """[(ids of this rank, whole)] of an epoch, a step each."""
    args = arguments(*options)
    with as_rank(rank, world_size):
        sampler = script.StepSampler(args, proteins, None)
        sampler.set_epoch(epoch)
        found = {}
        for ids, whole, step in sampler:
            found.setdefault(step - epoch * sampler.steps, ([], whole))[0].append(ids)
    return [(np.concatenate(ids), whole) for ids, whole in found.values()]


def test_every_step_is_a_random_sample(tmp_path):
    """The spread of a step's mean length falls as one over the root of the batch: no step is made
    of sequences of similar length."""
    lengths = lengths_of_uniref50(40_000)
    proteins = write_folder(tmp_path / "data", lengths)
    cropped = np.minimum(lengths, 512)
    for batch in (16, 64, 256):
        steps = steps_of(proteins, f"--global_batch_size={batch}", "--batch_size=16")
        means = np.array([cropped[whole].mean() for _, whole in steps])
        expected = cropped.std() / math.sqrt(batch)
        assert means.std() == pytest.approx(expected, rel=5 / math.sqrt(2 * len(steps)))
        used = np.concatenate([whole for _, whole in steps])
        assert len(set(used.tolist())) == len(used) == len(steps) * batch


@pytest.mark.parametrize("world_size", [3, 8])
def test_ranks_share_a_step_and_have_equal_work(tmp_path, world_size):
    lengths = lengths_of_uniref50(3000)
    proteins = write_folder(tmp_path / "data", lengths)
    options = ["--global_batch_size=384", "--batch_size=16"]
    alone = steps_of(proteins, *options)
    ranks = [steps_of(proteins, *options, rank=r, world_size=world_size) for r in range(world_size)]
    for step, (_, whole) in enumerate(alone):
        parts = [found[step][0] for found in ranks]
        assert sorted(np.concatenate(parts).tolist()) == sorted(whole.tolist())
        tokens = [np.minimum(lengths[part], 512).sum() for part in parts]
        assert max(tokens) < 1.06 * np.mean(tokens)
    assert not np.array_equal(alone[0][1], steps_of(proteins, *options, epoch=1)[0][1])


def test_hidden_residues_times_and_weights(tmp_path):
    """Hidden with probability (1 - eps) t; the weight is 1 / t; times are spread evenly."""
    proteins = write_folder(tmp_path / "data", np.full(600, 402))
    data = script.NoisySequences(arguments(), proteins)
    whole = np.arange(600)
    batch = data[whole, whole, 3]
    assert not torch.equal(data[whole, whole, 4].noisy, batch.noisy)  # another step, another noise
    times = -torch.expm1(-batch.sigma.double()) / 0.999
    assert torch.allclose(times.sort().values.diff(), torch.tensor(0.999 / 600).double(), rtol=1e-2)
    hidden = torch.zeros(600).index_add(
        0, batch.owner[batch.hidden].long(), torch.ones(len(batch.hidden))
    )
    share = 0.999 * times
    error = (hidden / 400 - share) / (share * (1 - share) / 400).sqrt()
    assert abs(error.mean()) < 0.2 and 0.9 < error.std() < 1.1
    owner = batch.owner[batch.hidden].long()
    assert torch.allclose(batch.weights.double(), 1 / times[owner], rtol=1e-4)
    original = proteins.tokens[batch.hidden.numpy()]
    assert np.array_equal(batch.targets.numpy() + script.FIRST, original)
    assert (batch.noisy[batch.hidden] == script.MASK).all()
    kept = torch.ones(len(batch.noisy), dtype=torch.bool)
    kept[batch.hidden] = False
    assert np.array_equal(batch.noisy[kept].numpy(), proteins.tokens[kept.numpy()])


def test_crops(tmp_path):
    """From a random place, both ends included; BEGIN and END are no residues."""
    proteins = write_folder(tmp_path / "data", np.array([30, 110]))
    proteins.most = 40
    rows = np.tile([0, 1], 2000)
    crops, residues = proteins.crops(rows, np.random.default_rng(0).random(4000))
    starts = np.array([crop.ctypes.data - proteins.tokens.ctypes.data for crop in crops])
    assert [len(crop) for crop in crops] == [30, 40] * 2000
    assert (residues[::2] == 28).all() and (starts[::2] == 0).all()
    starts = starts[1::2] - 30
    assert set(starts.tolist()) == set(range(71))
    expected = 40 - (starts == 0) - (starts == 70)
    assert np.array_equal(residues[1::2], expected)


def test_an_epoch_of_sixty_million_sequences_starts_at_once(tmp_path):
    """Sparse files of that size: no array has an entry for each sequence, beside torch's shuffled
    order of 240 MB, which is not counted here."""
    count = 60_000_000
    for name, size in (("tokens", 17_000_000_000), ("offsets", 8 * count + 8)):
        with open(tmp_path / f"train.{name}", "wb") as file:
            file.truncate(size)
    tracemalloc.start()
    with as_rank(0, 1):
        proteins = script.Proteins(tmp_path, "train", 512)
        ids, whole, step = next(iter(script.StepSampler(arguments(), proteins, None)))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(whole.tolist())) == 64 and step == 0
    assert most < 20e6


# --------------------------------------------------------------------------------------------------
# Network


@torch.no_grad()
def test_a_sequence_does_not_see_its_neighbours():
    model = network()
    sequences = random_sequences([12, 40, 21, 9])
    together = batch_of(sequences)
    logits = model(together)
    owner = together.owner[together.hidden]
    starts = together.starts.long()
    for number in range(4):
        places = together.hidden[owner == number] - starts[number]
        noisy = together.noisy[starts[number] : starts[number + 1]]
        alone = batch_of([noisy.numpy()], 0.0001)._replace(
            noisy=noisy, hidden=places, sigma=together.sigma[number : number + 1]
        )
        assert torch.allclose(model(alone), logits[owner == number], atol=1e-5)


@torch.no_grad()
def test_time_conditioning():
    batch = batch_of(random_sequences([20, 30]))
    other = batch._replace(sigma=batch.sigma + 2)
    for flag in (True, False):
        model = network(f"--time_conditioning={flag}")
        assert torch.equal(model(batch), model(other)) != flag


def test_the_default_network():
    """66,724,096 parameters of the original and 27 more rows of the vocabulary, twice; uniform over
    the residues before training."""
    with torch.device("meta"):
        model = script.Denoiser(arguments())
    assert sum(p.numel() for p in model.parameters()) == 66_724_096 + 2 * 27 * 768
    logits = script.Denoiser(arguments(*SMALL))(batch_of(random_sequences([9, 30])))
    assert torch.equal(logits, torch.zeros(len(logits), 26)) and len(logits) > 5


def test_gradient_checkpointing_changes_no_gradient():
    """Each block is computed once forward, and once again for the backward pass."""
    gradients = []
    for flag in ("False", "True"):
        model = network(f"--gradient_checkpointing={flag}").train()
        batch = batch_of(random_sequences([20, 30]))
        script.share_of_loss(model(batch), batch).backward()
        gradients.append([p.grad for p in model.parameters()])
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7)
    calls = []
    model.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    script.share_of_loss(model(batch), batch).backward()
    assert len(calls) == 2


def test_rotary_embedding():
    """Products of rotated queries and keys depend on their distance alone; the angles are those of
    Su et al.; the form for GPUs gives the same."""
    model = network()
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(16, generator=generator)
    k = torch.randn(16, generator=generator)
    turned = [script.rotate(vector.repeat(40, 1), model.turns) for vector in (q, k)]
    products = turned[0] @ turned[1].T
    for distance in (0, 3, 11):
        line = products.diagonal(distance)
        assert torch.allclose(line, line[0].expand_as(line), atol=1e-4)
    angle = 5 * 1e4 ** (-2 * torch.arange(8) / 16)
    expected = q[::2] * angle.cos() - q[1::2] * angle.sin()
    assert torch.allclose(turned[0][5, ::2], expected, atol=1e-5)
    with mock.patch.object(torch.compiler, "is_compiling", lambda: True):
        compiled = script.rotate(q.repeat(40, 1), model.turns)
    assert torch.allclose(compiled, turned[0], atol=1e-5)


def test_dropout():
    """Share, scale and gradient; none in evaluation."""
    torch.manual_seed(0)
    x = torch.randn(2000, 32, requires_grad=True)
    y = script.dropout(x, 0.3, training=True)
    kept = y != 0
    assert abs(kept.float().mean() - 0.7) < 5 * math.sqrt(0.21 / x.numel())
    assert torch.allclose(y[kept], x[kept] / 0.7)
    y.sum().backward()
    assert torch.allclose(x.grad, kept / 0.7)
    assert torch.equal(script.dropout(x, 0.3, training=False), x)


def test_averaged_weights():
    model = network().train()
    kept = [p.detach().clone() for p in model.parameters()]
    with script.averaged_weights(model, [torch.zeros_like(p) for p in kept]):
        assert not model.training
        assert all((p == 0).all() for p in model.parameters())
    assert model.training
    assert all(torch.equal(a, b) for a, b in zip(kept, model.parameters(), strict=True))


def test_no_weight_decay_on_biases_norms_and_embeddings():
    model = network()
    optimizer = script.make_optimizer(arguments("--weight_decay=0.1"), model)
    decayed = set()
    for group in optimizer.param_groups:
        if group["weight_decay"] > 0:
            decayed.update(id(p) for p in group["params"])
    for name, p in model.named_parameters():
        assert (id(p) in decayed) == (p.ndim == 2 and not name.startswith("embed")), name


# --------------------------------------------------------------------------------------------------
# Loss


def official_score_entropy(score, sigma, noisy, clean):
    """SEDD's loss of the absorbing graph, per position, as in its published code: score (n, 37) is
    the logarithm of the ratios, 36 the mask."""
    masked = noisy == 36
    esigm1 = sigma.expm1()
    ratio = 1 / esigm1[masked]
    other = clean[masked]
    negative = ratio * score[masked].gather(-1, other[:, None]).squeeze(-1)
    positive = score[masked][:, :-1].exp().sum(-1)
    constant = ratio * (ratio.log() - 1)
    entropy = torch.zeros(len(noisy), dtype=torch.float64)
    entropy[masked] = positive - negative + constant
    return entropy


def test_the_loss_is_the_score_entropy_of_sedd(tmp_path):
    """With scores that are probabilities times 1 / (e^sigma - 1), weighted by sigma'."""
    proteins = write_folder(tmp_path / "data", lengths_of_uniref50(40))
    data = script.NoisySequences(arguments(), proteins)
    whole = np.arange(40)
    batch = data[whole, whole, 1]
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(batch.hidden), 26, generator=generator).double()
    ours = script.share_of_loss(logits, batch._replace(weights=batch.weights.double()))

    times = -torch.expm1(-batch.sigma.double()) / 0.999
    sigma = -torch.log1p(-0.999 * times)[batch.owner.long()]
    slope = (0.999 / (1 - 0.999 * times))[batch.owner.long()]
    score = torch.full((len(batch.noisy), 37), -math.inf, dtype=torch.float64)
    inside = slice(script.FIRST, script.FIRST + 26)
    score[batch.hidden, inside] = logits.log_softmax(1) - sigma[batch.hidden].expm1().log()[:, None]
    clean = batch.noisy.long()
    clean[batch.hidden] = batch.targets + script.FIRST
    theirs = slope * official_score_entropy(score, sigma, batch.noisy.long(), clean)
    assert float(theirs.sum() / batch.count) == pytest.approx(float(ours), rel=4e-7)


# --------------------------------------------------------------------------------------------------
# Evaluation


def test_standard_error():
    """Of a ratio of sums, beside that of resampled sequences."""
    generator = np.random.default_rng(0)
    residues = generator.integers(20, 60, 500).astype(float)
    nats = residues * generator.normal(2.0, 0.3, 500)
    mean, error = script.mean_and_error(nats, residues)
    assert mean == pytest.approx(nats.sum() / residues.sum())
    draws = []
    for _ in range(600):
        rows = generator.integers(0, 500, 500)
        draws.append(nats[rows].sum() / residues[rows].sum())
    assert error == pytest.approx(np.std(draws), rel=0.15)


def measured(folder, model, *options):
    args = arguments("--eval_sequences=40", "--device=cpu", "--max_protein_len=62", *options)
    proteins = script.Proteins(folder / "data", "valid", args.max_protein_len)
    meta = json.loads((folder / "data/meta.json").read_text())
    guard = SimpleNamespace(agree=lambda: "")
    return script.measure(args, torch.device("cpu"), model, proteins, meta, guard), meta


def test_evaluation_of_known_predictions(folder, group):
    """A network that knows nothing needs log 26 nats, one that knows the shares the unigram."""
    untrained = script.Denoiser(arguments(*SMALL, "--max_protein_len=62")).eval()
    metrics, meta = measured(folder, untrained)
    for name in ("nelbo", "ce@0.15", "ce@0.5", "ce@0.85"):
        assert metrics[name] == pytest.approx(math.log(26), rel=1e-6)
    assert metrics["bits"] == pytest.approx(math.log2(26), rel=1e-6)
    assert metrics["perplexity"] == pytest.approx(26, rel=1e-5)
    assert metrics["below_unigram"] == pytest.approx(metrics["unigram"] - math.log(26))
    letters = np.array(meta["letters"]) + 0.5
    shares = letters / letters.sum()
    assert metrics["unigram"] == pytest.approx(-(shares * np.log(shares)).sum(), rel=0.03)

    def unigram(batch):
        return torch.from_numpy(np.log(shares)).float().expand(len(batch.hidden), -1)

    metrics, _ = measured(folder, unigram, "--eval_draws=40")
    assert metrics["nelbo"] == pytest.approx(metrics["unigram"], rel=2e-2)
    assert abs(metrics["below_unigram"]) < 4 * metrics["below_unigram_se"]


def test_a_diverged_bound_overflows_nothing():
    table = np.ones((4, 7))
    table[:, 2:4] = 1e6
    metrics = script.summarize(table)
    assert metrics["nelbo"] == 1e6 and math.isfinite(metrics["perplexity"])
    table[2, 2] = math.nan
    assert math.isnan(script.summarize(table)["nelbo"])


# --------------------------------------------------------------------------------------------------
# Sampling: the predictors are oracles, so the law of the samples must be the oracle's


class Chain:
    """A Markov chain over three residues. It predicts hidden residues exactly, from all that is
    seen (forward-backward), in sequences of one length."""

    def __init__(self):
        self.start = np.array([0.5, 0.3, 0.2])
        self.step = np.array([[0.75, 0.2, 0.05], [0.1, 0.8, 0.1], [0.3, 0.05, 0.65]])
        self.calls = []

    def __call__(self, batch):
        self.calls.append(batch._replace(noisy=batch.noisy.clone()))
        tokens = batch.noisy.view(-1, batch.lengths[0]).numpy()
        kinds = np.arange(3) + script.FIRST
        seen = np.where(script.is_residue(tokens)[..., None], tokens[..., None] == kinds, 1.0)
        before = np.ones_like(seen)
        after = np.ones_like(seen)
        before[:, 1] = self.start
        for place in range(2, tokens.shape[1]):
            before[:, place] = (before[:, place - 1] * seen[:, place - 1]) @ self.step
        for place in range(tokens.shape[1] - 2, 0, -1):
            after[:, place] = (after[:, place + 1] * seen[:, place + 1]) @ self.step.T
        logits = np.full((*tokens.shape, 26), -np.inf)
        with np.errstate(divide="ignore"):
            logits[..., :3] = np.log(before * seen * after)
        return torch.from_numpy(logits.reshape(-1, 26))[batch.hidden].float()

    def law(self, length):
        """(3 ** length,), the first residue the slowest."""
        law = self.start
        for _ in range(length - 1):
            law = law[..., None] * self.step
        return law.ravel()


def template(text):
    """BEGIN, residues or MASK (?), END."""
    letters = {letter: script.FIRST + i for i, letter in enumerate(script.RESIDUES)}
    letters["?"] = script.MASK
    return np.array([script.BEGIN, *[letters[letter] for letter in text], script.END], np.uint8)


def draw(predict, texts, method="rigorous", steps=0, seed=3, first=0):
    templates = [template(text) for text in texts]
    numbers = range(first, first + len(texts))
    device = torch.device("cpu")
    return script.draw_sequences(predict, templates, numbers, device, method, steps, seed)


def counts(samples, places):
    words = np.stack(samples)[:, 1:-1].astype(np.int64)[:, places] - script.FIRST
    assert words.min() >= 0 and words.max() < 3
    return np.bincount(words @ 3 ** np.arange(len(places))[::-1], minlength=3 ** len(places))


def excess(found, law):
    """Chi-square, in standard deviations above its mean; cells that expect below 5 are one."""
    expected = law * found.sum()
    rare = expected < 5
    found = np.append(found[~rare], found[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    inside = expected > 0
    freedom = inside.sum() - 1
    square = ((found - expected)[inside] ** 2 / expected[inside]).sum()
    return (square - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize(("steps", "calls"), [(0, 4), (150, 150)])
def test_rigorous_samples_have_the_law_of_the_model(steps, calls):
    chain = Chain()
    found = counts(draw(chain, ["????"] * 6000, steps=steps), [0, 1, 2, 3])
    assert excess(found, chain.law(4)) < 4
    assert len(chain.calls) <= calls
    # the same test sees a sampler that draws all residues by themselves
    assert excess(counts(draw(chain, ["????"] * 6000, steps=1), [0, 1, 2, 3]), chain.law(4)) > 50


def test_filling_in_follows_the_conditional_law():
    chain = Chain()
    law = chain.law(5).reshape([3] * 5)[1, :, :, 2, :]
    found = counts(draw(chain, ["C??D?"] * 4000), [1, 2, 4])
    assert excess(found, (law / law.sum()).ravel()) < 4


@pytest.mark.parametrize(
    ("steps", "expected"), [(0, [5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]), (4, [1, 0.75, 0.5, 0.25])]
)
def test_the_network_is_shown_the_share_that_is_hidden(steps, expected):
    """One by one, it is the share at which the next residue appears: of five, the largest of five
    uniform numbers, which is 5/6 on average, and so on. On a grid it is that of the step."""
    chain = Chain()
    draw(chain, ["?????"] * 3000, steps=steps)
    shares = [-torch.expm1(-batch.sigma.double()) / 0.999 for batch in chain.calls]
    assert [float(x.mean()) for x in shares] == pytest.approx(expected, abs=0.02)
    hidden = [(b.noisy == script.MASK).double().sum() / 15_000 for b in chain.calls]
    expected = expected if steps else [1, 0.8, 0.6, 0.4, 0.2]
    assert [float(x) for x in hidden] == pytest.approx(expected, abs=0.02)


def test_simple_never_changes_what_it_showed():
    """Its law is another one: the exact sampler's total variation is 0.03 with as many samples."""
    chain = Chain()
    found = counts(draw(chain, ["????"] * 6000, "simple"), [0, 1, 2, 3])
    assert 0.1 < np.abs(found / found.sum() - chain.law(4)).sum() / 2 < 0.6
    chain = Chain()
    draw(chain, ["?" * 30] * 20, "simple", steps=6)
    before = torch.full((20, 32), script.MASK)
    for k, batch in enumerate(chain.calls):
        noisy = batch.noisy.view(20, 32)
        hidden = round(30 * math.cos(math.pi / 2 * k / 6))
        assert set((noisy == script.MASK).sum(1).tolist()) == {hidden}
        assert ((noisy == before) | (before == script.MASK)).all()
        before = noisy


@pytest.mark.parametrize("method", ["rigorous", "simple"])
@pytest.mark.parametrize("steps", [0, 7])
def test_a_sample_depends_on_its_number_alone(method, steps):
    """Not on its batch; given residues stay."""
    model = network()
    texts = ["????????", "A?CA??C?D??", "???", "CC????????A", "AC?"]
    together = draw(model, texts, method, steps)
    for number, text in enumerate(texts):
        given = template(text)
        fixed = given != script.MASK
        assert np.array_equal(together[number][fixed], given[fixed])
        assert script.is_residue(together[number][1:-1]).all()
        if method == "rigorous" or steps > 0:
            (alone,) = draw(model, [text], method, steps, first=number)
            assert np.array_equal(alone, together[number])
    assert not np.array_equal(draw(model, texts, method, steps, seed=4)[0], together[0])


def test_rare_residues_are_drawn():
    """Of probabilities that float32 would lose."""
    p = torch.zeros(26, dtype=torch.float64)
    p[0] = 1 - 2.0**-30
    p[1] = 2.0**-30
    u = torch.tensor([1 - 2.0**-31, 1 - 2.0**-29], dtype=torch.float64)
    found = script.draw_residues(p.log().expand(2, -1), u)
    assert found.tolist() == [script.FIRST + 1, script.FIRST]


def test_lengths_are_those_of_the_training_data():
    lengths = script.draw_lengths({30: 500, 100: 300, 700: 200}, 4000, 1, 510)
    values, found = np.unique(lengths, return_counts=True)
    assert values.tolist() == [30, 100, 510]
    assert excess(found, np.array([0.5, 0.3, 0.2])) < 4


# --------------------------------------------------------------------------------------------------
# Learning rate, batch


@pytest.mark.parametrize(
    ("gpus", "lr", "warmup"),
    [(1, 5e-5, 5000), (2, 1e-4, 10_000), (4, 2e-4, 20_000), (8, 4e-4, 40_000)],
)
def test_the_scaling_table_of_the_document(tmp_path, gpus, lr, warmup):
    """64 sequences a step and GPU; rate and warm-up by the number of GPUs."""
    args = arguments()
    factor = script.gpu_factor(args, gpus)
    assert args.lr * factor == pytest.approx(lr)
    assert script.warmup_steps(args, factor, 500_000) == warmup
    with as_rank(0, gpus):
        proteins = write_folder(tmp_path / "data", np.full(1000, 30))
        assert script.StepSampler(args, proteins, None).global_batch == 64 * gpus
    rates = [script.lr_factor(step, 500_000, warmup) for step in (0, warmup, 499_999)]
    assert rates[0] < 1e-3 and rates[1] == 1 and rates[2] == pytest.approx(0.01, abs=1e-4)


def test_other_scaling_rules():
    assert script.gpu_factor(arguments("--lr_scaling=conservative"), 8) == 6
    assert script.gpu_factor(arguments("--lr_scaling=none"), 4) == 1
    assert script.gpu_factor(arguments("--global_batch_size=64"), 4) == 1
    assert script.warmup_steps(arguments(), 8, 925) == 92  # a long warm-up is cut


# --------------------------------------------------------------------------------------------------
# A user's runs

RUN = """--hidden_size=32 --n_blocks_prot=2 --n_heads=2 --cond_dim=16 --max_protein_len=64 --accum=1
    --batch_size=8 --lr=5e-3 --warmup=2 --log_every=1 --eval_sequences=10 --samples_per_eval=2
    --device=cpu""".split()


def run(folder, output, *options, program="run_train_uniref50_ddp", status=0):
    """Output of a run on the CPU that must end with `status`."""
    words = [f"--datafile={folder}/data", f"--output_dir={output}", *RUN, *options]
    found, text = call_script(program, *words)
    assert found == status, text[-3000:]
    return text


def rows_of(output, name):
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if name in row]


def test_a_run_stopped_before_its_first_evaluation_goes_on_with_fewer_steps(folder, tmp_path):
    """It makes that evaluation then, instead of a TypeError."""
    run(folder, tmp_path / "run", "--n_iters=50", "--eval_freq=50", "--max_minutes=1e-6")
    done = rows_of(tmp_path / "run", "loss")[-1]["step"]
    assert done < 50 and not rows_of(tmp_path / "run", "val/nelbo")
    run(folder, tmp_path / "run", "--n_iters=1", "--eval_freq=50")
    assert [row["step"] for row in rows_of(tmp_path / "run", "val/nelbo")] == [done]
    assert json.loads((tmp_path / "run/summary.json").read_text())["best"]["step"] == done
    assert (tmp_path / f"run/samples/step_{done:08d}.fasta").read_text().count(">") == 2


def test_a_changed_option_is_applied_or_refused(folder, tmp_path):
    """Rate and betas are those of now; what would be ignored, or change a step, is refused."""
    output = tmp_path / "run"
    run(folder, output, "--n_iters=3")
    run(folder, output, "--n_iters=5", "--lr=1e-3", "--beta2=0.9")
    assert rows_of(output, "lr")[-1]["lr"] == 1e-3 * script.lr_factor(4, 5, 2)
    groups = torch.load(output / "latest.pt", weights_only=True)["optimizer"]["param_groups"]
    assert all(group["betas"] == (0.9, 0.9) for group in groups)
    for option, old in {"--accum=2": 1, "--global_batch_size=16": 8, "--n_heads=4": 2}.items():
        said = run(folder, output, "--n_iters=9", option, status=2)
        assert f"this run was started with {old}" in said


NAN_EVALUATION = """
import run_train_uniref50_ddp as script
script.SCRIPT = "run_train_uniref50_ddp.py"
plain = script.summarize
script.summarize = lambda table: plain(table * float("nan"))
script.launch(script.parse_args, script.main)
"""


def test_a_first_evaluation_that_is_nan_is_never_best(folder, tmp_path):
    """The run says so and ends, also when it is started again; then, mended, it goes on."""
    (tmp_path / "nan.py").write_text(NAN_EVALUATION)
    output = tmp_path / "run"
    for _ in range(2):
        said = run(folder, output, "--n_iters=4", program=tmp_path / "nan", status=1)
        assert "the held-out bound of step 4 is nan: lower --lr" in said
        assert "Traceback" not in said and not (output / "best.pt").exists()
    run(folder, output, "--n_iters=4")
    assert (output / "best.pt").exists()


def test_data(folder, tmp_path):
    """A file is prepared once; a folder that is missing or not whole is refused."""
    words = [f"--datafile={folder}/proteins.fasta", f"--cache_dir={tmp_path}/cache"]
    for is_first in (True, False):
        status, text = call_script("run_train_uniref50_ddp", *words, "--prepare_only")
        assert status == 0 and ("held out" in text) == is_first, text
    assert len([*(tmp_path / "cache").iterdir()]) == 1

    copy = shutil.copytree(folder / "data", tmp_path / "data")
    with open(copy / "train.tokens", "ab") as file:
        file.write(b"x")
    for path, reason in {tmp_path / "none": "uniref50.fasta.gz; then", copy: "again"}.items():
        status, text = call_script("run_train_uniref50_ddp", f"--datafile={path}", "--device=cpu")
        assert status == 2 and reason in text, text


WRONG = {
    "--hidden_size=30": "must be 12 heads times an even number",
    "--max_memory_per_gpu=85": "is not between 0 and 1",
    "noise.type=cosine": "no option noise.type",  # the original has it
}


@pytest.mark.parametrize("option", WRONG)
def test_wrong_options(option):
    with pytest.raises(script.InputError, match="command line: ") as caught:
        arguments(option)
    assert WRONG[option] in str(caught.value)


def test_names_of_the_original():
    with mock.patch.dict(os.environ):
        args = arguments("--log_freq=7", "--wandb_project=proteins", "--wandb_name=first")
        assert (os.environ["WANDB_PROJECT"], os.environ["WANDB_NAME"]) == ("proteins", "first")
    assert args.log_every == 7
