"""run_train_uniref50_ddp.py: known answers, and what a user sees of a run."""

import contextlib
import json
import math
import re
import tracemalloc
from functools import partial
from itertools import islice
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import call_script, import_tool, parse_arguments, write_proteins
from scipy.special import softmax
from scipy.stats import bootstrap, chisquare
from torch import nn

import run_train_uniref50_ddp as script

sampler = import_tool("sample_uniref50")

SMALL = "--hidden_size=32 --n_blocks_prot=2 --n_heads=2 --cond_dim=16 --max_protein_len=64".split()

arguments = partial(parse_arguments, script)


def network(*options):
    """A small network with random weights everywhere: at first its blocks do nothing."""
    torch.manual_seed(0)
    model = script.Denoiser(arguments(*SMALL, "--dropout=0", *options))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


def random_sequences(lengths):
    """Token arrays of these lengths, BEGIN and END included."""
    generator = np.random.default_rng(0)
    found = []
    for length in lengths:
        residues = generator.integers(script.FIRST, script.FIRST + script.KINDS, length - 2)
        found.append(np.array([script.BEGIN, *residues, script.END], np.uint8))
    return found


def batch_of(sequences):
    """A Batch of token arrays, with 40 % of the residues hidden."""
    generator = np.random.default_rng(0)
    hide = []
    for tokens in sequences:
        hide.append(script.is_residue(tokens) & (generator.random(len(tokens)) < 0.4))
    shares = np.full(len(sequences), 0.4)
    return script.make_batch(sequences, hide, shares, 1 / shares, 1)


def as_rank(rank, world_size):
    """This process is one of several ranks, without a process group."""
    replaced = {
        "get_rank": lambda group=None: rank,
        "get_world_size": lambda group=None: world_size,
    }
    return mock.patch.multiple(dist, **replaced)


def write_folder(folder, lengths):
    """A training part with sequences of these lengths in tokens."""
    np.concatenate(random_sequences(lengths)).tofile(folder / "train.tokens")
    np.cumsum([0, *lengths], dtype=np.int64).tofile(folder / "train.offsets")
    return script.Proteins(folder, "train", 512)


def lengths_of_uniref50(count):
    """Log-normal, with the mean of UniRef50, 286 residues."""
    draws = np.random.default_rng(0).lognormal(math.log(286) - 0.32, 0.8, count)
    return np.clip(draws, 20, 4000).astype(np.int64) + 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """proteins.fasta and cache/, which has what was read of it."""
    folder = tmp_path_factory.mktemp("uniref")
    write_proteins(folder / "proteins.fasta", 300)
    read(folder)
    return folder


def read(folder, *options):
    """(arguments, folder of the tokens) of proteins.fasta"""
    words = [f"--datafile={folder}/proteins.fasta", f"--cache_dir={folder}/cache"]
    args = arguments(*words, "--val_ratio=0.2", "--device=cpu", *options)
    return args, script.prepare(args)


# --------------------------------------------------------------------------------------------------
# Steps


def deal(proteins, *options, rank=0, world_size=1):
    """(step, ids of the step, places of this rank) of the micro-batches of an epoch."""
    with as_rank(rank, world_size):
        ids = np.arange(len(proteins))
        sampler = script.GlobalBatchSampler(ids, arguments(*options), cost=proteins)
        return list(islice(sampler, sampler.steps * sampler.accumulation))


@pytest.mark.parametrize("batch", [16, 256])
def test_every_step_is_a_random_sample(tmp_path, batch):
    """The spread of a step's mean length falls as one over the root of the batch: no step is made
    of sequences of similar length."""
    lengths = lengths_of_uniref50(40_000)
    proteins = write_folder(tmp_path, lengths)
    steps = deal(proteins, f"--global_batch_size={batch}", f"--batch_size={batch}")
    cropped = np.minimum(lengths, 512)
    means = np.array([cropped[whole].mean() for _, whole, _ in steps])
    expected = cropped.std() / math.sqrt(batch)
    assert means.std() == pytest.approx(expected, rel=5 / math.sqrt(2 * len(steps)))
    used = np.concatenate([whole for _, whole, _ in steps])
    assert len(set(used.tolist())) == len(used) == len(steps) * batch


def test_ranks_have_equal_work(tmp_path):
    lengths = lengths_of_uniref50(3000)
    proteins = write_folder(tmp_path, lengths)
    options = ["--global_batch_size=384", "--batch_size=16"]
    tokens = np.zeros((3, 7))  # of the ranks, in each step
    for rank in range(3):
        for step, whole, places in deal(proteins, *options, rank=rank, world_size=3):
            tokens[rank, step] += np.minimum(lengths[whole[places]], 512).sum()
    assert (tokens.max(0) < 1.06 * tokens.mean(0)).all()


def test_hidden_residues_times_and_weights(tmp_path):
    """Hidden with probability (1 - eps) t; the weight is 1 / t; times are spread evenly."""
    proteins = write_folder(tmp_path, np.full(600, 402))
    data = script.NoisyProteins(proteins, seed=42)
    whole = np.arange(600)
    batch = data[3, whole, whole]
    assert not torch.equal(data[4, whole, whole].noisy, batch.noisy)  # another step, another noise

    times = -torch.expm1(-batch.sigma.double()) / 0.999
    assert torch.allclose(times.sort().values.diff(), torch.tensor(0.999 / 600).double(), rtol=1e-2)
    owner = batch.owner[batch.hidden].long()
    assert torch.allclose(batch.weights.double(), 1 / times[owner], rtol=1e-4)
    share = 0.999 * times
    error = (owner.bincount(minlength=600) / 400 - share) / (share * (1 - share) / 400).sqrt()
    assert abs(error.mean()) < 0.2 and 0.9 < error.std() < 1.1

    expected = torch.tensor(proteins.tokens)
    assert torch.equal(batch.targets + script.FIRST, expected[batch.hidden].long())
    expected[batch.hidden] = script.MASK
    assert torch.equal(batch.noisy, expected)


def test_short_sequences_are_not_hidden_less(tmp_path):
    """The global batch comes sorted by length: its times must not."""
    proteins = write_folder(tmp_path, np.arange(20, 420))
    whole = np.arange(400)
    data = script.NoisyProteins(proteins, seed=42)
    sums = [np.corrcoef(whole, data[step, whole, whole].sigma)[0, 1] for step in range(30)]
    assert abs(np.mean(sums)) < 4 / math.sqrt(30 * 400)


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_noise_of_a_place_is_the_same_on_any_number_of_ranks(tmp_path, world_size):
    proteins = write_folder(tmp_path, lengths_of_uniref50(100))
    data = script.NoisyProteins(proteins, seed=42)
    whole = np.arange(100)
    one = data[7, whole, whole]
    rows = one.noisy.split(one.lengths)
    for rank in range(world_size):
        places = whole[rank::world_size]
        part = data[7, whole, places]
        assert part.count == one.count
        assert torch.equal(part.noisy, torch.cat([rows[place] for place in places]))
        assert torch.equal(part.sigma, one.sigma[places])


def test_crops(tmp_path):
    """From a random place, both ends included; BEGIN and END are no residues."""
    proteins = write_folder(tmp_path, np.array([30, 110]))
    proteins.most = 40
    rows = np.tile([0, 1], 2000)
    starts, ends, residues = proteins.crops(rows, np.random.default_rng(0).random(4000))
    assert (ends - starts).tolist() == [30, 40] * 2000
    assert (residues[::2] == 28).all() and (starts[::2] == 0).all()
    starts = starts[1::2] - 30
    assert set(starts.tolist()) == set(range(71))
    expected = 40 - (starts == 0) - (starts == 70)
    assert np.array_equal(residues[1::2], expected)


def test_sixty_million_sequences_take_little_memory(tmp_path):
    """Sparse files of that size: of each sequence a rank holds its number, and its place in the
    epoch's order, 4 bytes each."""
    count = 60_000_000
    for name, size in (("tokens", 17_000_000_000), ("offsets", 8 * count + 8)):
        with open(tmp_path / f"train.{name}", "wb") as file:
            file.truncate(size)
    tracemalloc.start()
    with as_rank(0, 1):
        proteins = script.Proteins(tmp_path, "train", 512)
        ids = np.arange(count, dtype=np.int32)
        args = arguments("--global_batch_size=64")
        step, whole, places = next(iter(script.GlobalBatchSampler(ids, args, cost=proteins)))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(whole.tolist())) == 64 and step == 0
    assert most < 500e6


# --------------------------------------------------------------------------------------------------
# Network


@torch.no_grad()
def test_a_sequence_does_not_see_its_neighbours():
    """Other residues and noise levels of the other sequences change nothing."""
    model = network()
    batch = batch_of(random_sequences([12, 40, 21, 9]))
    logits = model(batch)
    owner = batch.owner[batch.hidden]
    for number in range(4):
        others = (batch.owner != number) & script.is_residue(batch.noisy)
        noisy = torch.where(others, script.FIRST, batch.noisy)
        sigma = batch.sigma + (torch.arange(4) != number)
        changed = model(batch._replace(noisy=noisy, sigma=sigma))
        assert torch.allclose(changed[owner == number], logits[owner == number], atol=1e-5)
        assert not torch.allclose(changed[owner != number], logits[owner != number], atol=0.1)


def test_the_default_network():
    """66,724,096 parameters of the original and 27 more rows of the vocabulary, twice; uniform over
    the residues before training."""
    with torch.device("meta"):
        model = script.Denoiser(arguments())
    assert sum(p.numel() for p in model.parameters()) == 66_724_096 + 2 * 27 * 768
    logits = script.Denoiser(arguments(*SMALL))(batch_of(random_sequences([9, 30])))
    assert torch.equal(logits, torch.zeros(len(logits), 26)) and len(logits) > 5


def test_rotary_embedding():
    """Pairs of numbers turned by position x frequency (Su et al.)."""
    x = torch.randn(40, 2, 16)
    angles = script.angles_of(torch.arange(40), 8)
    assert torch.allclose(angles, torch.arange(40)[:, None] * 1e4 ** (-torch.arange(8) / 8))
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., 0::2], x[..., 1::2]
    expected = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1)
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]
    assert torch.allclose(script.rotate(x, turns), expected.flatten(-2), atol=1e-5)


@torch.no_grad()
def test_dropout():
    """In training alone."""
    batch = batch_of(random_sequences([20, 30]))
    model = network("--dropout=0.5")
    assert torch.equal(model(batch), model(batch))
    model.train()
    assert not torch.equal(model(batch), model(batch))


@torch.no_grad()
def test_the_network_sees_the_noise_level():
    model = network()
    batch = batch_of(random_sequences([20, 30]))
    other = model(batch._replace(sigma=batch.sigma + torch.tensor([0.0, 2.0])))
    changed = (other != model(batch)).any(1)
    assert torch.equal(changed, batch.owner[batch.hidden] == 1)


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


def test_averaged_weights():
    model = network()
    average = network()
    for parameter in average.parameters():
        parameter.data.zero_()
    script.update_average(average, model, 0.75)
    for ours, theirs in zip(average.parameters(), model.parameters(), strict=True):
        assert torch.allclose(ours, 0.25 * theirs)


def test_no_weight_decay_on_biases_norms_and_embeddings():
    model = network()
    decayed, _ = script.make_optimizer(arguments(), model).param_groups  # which, the contract shows
    decayed = {id(p) for p in decayed["params"]}
    for name, p in model.named_parameters():
        assert (id(p) in decayed) == (p.ndim == 2 and not name.startswith("embed")), name


# --------------------------------------------------------------------------------------------------
# Loss


def test_the_loss_is_the_score_entropy_of_sedd(tmp_path):
    """Of the absorbing graph, as its published code has it, weighted by sigma', with scores that
    are probabilities times 1 / (e^sigma - 1)."""
    proteins = write_folder(tmp_path, lengths_of_uniref50(40))
    data = script.NoisyProteins(proteins, seed=42)
    whole = np.arange(40)
    batch = data[1, whole, whole]
    logits = torch.randn(len(batch.hidden), 26, dtype=torch.float64)
    ours = script.share_of_loss(logits, batch._replace(weights=batch.weights.double()))

    times = -torch.expm1(-batch.sigma.double()) / 0.999
    times = times[batch.owner[batch.hidden].long()]
    sigma = -torch.log1p(-0.999 * times)
    slope = 0.999 / (1 - 0.999 * times)
    ratio = 1 / sigma.expm1()
    score = logits.log_softmax(1) + ratio.log()[:, None]  # logarithm of the ratios
    positive = score.exp().sum(1)
    negative = ratio * score.gather(1, batch.targets[:, None])[:, 0]
    constant = ratio * (ratio.log() - 1)
    theirs = slope * (positive - negative + constant)
    assert float(theirs.sum() / batch.count) == pytest.approx(float(ours), rel=4e-7)


# --------------------------------------------------------------------------------------------------
# Evaluation


def test_standard_error():
    """Of a ratio of sums, beside that of resampled sequences."""
    generator = np.random.default_rng(0)
    residues = generator.integers(20, 60, 500).astype(float)
    nats = residues * generator.normal(2.0, 0.3, 500)

    def ratio(nats, residues, axis):
        return nats.sum(axis) / residues.sum(axis)

    mean, error = script.mean_and_error(nats, residues)
    assert mean == pytest.approx(ratio(nats, residues, 0))
    found = bootstrap((nats, residues), ratio, paired=True, n_resamples=600, rng=generator)
    assert error == pytest.approx(found.standard_error, rel=0.15)


def measured(folder, model, *options):
    args, tokens = read(folder, "--eval_sequences=40", "--max_protein_len=62", *options)
    data = script.Data(tokens, args)
    return script.evaluate(model, data, args, contextlib.nullcontext, torch.device("cpu")), data


def test_evaluation_of_known_predictions(folder, group):
    """A network that knows nothing needs log 26 nats, one that knows the shares the unigram."""
    metrics, data = measured(folder, script.Denoiser(arguments(*SMALL)).eval())
    assert metrics["nelbo"] == pytest.approx(math.log(26), rel=1e-6)
    assert metrics["perplexity"] == pytest.approx(26, rel=1e-5)
    assert metrics["below_unigram"] == pytest.approx(metrics["unigram"] - math.log(26))
    letters = np.array(data.letters) + 0.5
    shares = letters / letters.sum()
    assert metrics["unigram"] == pytest.approx(-(shares * np.log(shares)).sum(), rel=0.03)

    def unigram(batch):
        return torch.from_numpy(np.log(shares)).float().expand(len(batch.hidden), -1)

    metrics, _ = measured(folder, unigram, "--eval_draws=40")
    assert metrics["nelbo"] == pytest.approx(metrics["unigram"], rel=2e-2)
    assert abs(metrics["below_unigram"]) < 4 * metrics["below_unigram_se"]


def test_a_diverged_bound_overflows_nothing():
    table = np.ones((4, 4))
    table[:, 2:4] = 1e6
    metrics = script.summarize(table)
    assert metrics["nelbo"] == 1e6 and math.isfinite(metrics["perplexity"])
    table[2, 2] = math.nan
    assert math.isnan(script.summarize(table)["nelbo"])


# --------------------------------------------------------------------------------------------------
# Sampling: the predictor is an oracle, so the law of the samples must be the oracle's

WORDS = np.indices([3] * 4).reshape(4, -1).T  # all of four residues out of three kinds
LAW = softmax(np.random.default_rng(0).normal(0, 0.7, 81))  # any law


class Oracle:
    """Predicts the hidden residues of words with this law, from all that is seen."""

    def __init__(self):
        self.calls = []

    def __call__(self, batch):
        self.calls.append(batch._replace(noisy=batch.noisy.clone()))
        tokens = batch.noisy.view(-1, 6).numpy()[:, None, 1:-1]
        fits = (tokens == script.MASK) | (tokens == WORDS + script.FIRST)
        chances = fits.all(2) * LAW  # (samples, words)
        logits = np.full((len(chances), 6, 26), -np.inf)
        with np.errstate(divide="ignore"):
            for kind in range(3):
                logits[:, 1:-1, kind] = np.log(chances @ (WORDS == kind))
        return torch.from_numpy(logits).flatten(0, 1)[batch.hidden]


def template(text):
    """BEGIN, residues or MASK (?), END."""
    letters = {letter: script.FIRST + i for i, letter in enumerate(script.RESIDUES)}
    letters["?"] = script.MASK
    return np.array([script.BEGIN, *[letters[letter] for letter in text], script.END], np.uint8)


def draw(predict, texts, method="rigorous", steps=0):
    templates = [template(text) for text in texts]
    device = torch.device("cpu")
    return sampler.draw_sequences(predict, templates, range(len(texts)), device, method, steps, 3)


def counts(samples):
    """How often each word was drawn."""
    words = np.stack(samples)[:, 1:-1].astype(np.int64) - script.FIRST
    assert words.min() >= 0 and words.max() < 3
    return np.bincount(words @ [27, 9, 3, 1], minlength=81)


def agrees(found, law):
    """A chi-square test."""
    possible = law > 0
    assert not found[~possible].any()
    return chisquare(found[possible], law[possible] * found.sum()).pvalue > 1e-4


@pytest.mark.parametrize("steps", [0, 150])
def test_rigorous_samples_have_the_law_of_the_model(steps):
    assert agrees(counts(draw(Oracle(), ["????"] * 6000, steps=steps)), LAW)


def test_filling_in_follows_the_conditional_law():
    found = counts(draw(Oracle(), ["?C?D"] * 4000))
    law = LAW * (WORDS[:, 1] == 1) * (WORDS[:, 3] == 2)
    assert agrees(found, law / law.sum())


@pytest.mark.parametrize(
    ("steps", "expected"), [(0, [4 / 5, 3 / 5, 2 / 5, 1 / 5]), (4, [1, 0.75, 0.5, 0.25])]
)
def test_the_network_is_shown_the_share_that_is_hidden(steps, expected):
    """One by one, it is the share at which the next residue appears: of four, the largest of four
    uniform numbers, which is 4/5 on average, and so on. On a grid it is that of the step."""
    oracle = Oracle()
    draw(oracle, ["????"] * 3000, steps=steps)
    shares = [-torch.expm1(-batch.sigma.double()) / 0.999 for batch in oracle.calls]
    assert [float(x.mean()) for x in shares] == pytest.approx(expected, abs=0.02)
    hidden = [float((b.noisy == script.MASK).sum()) / 12_000 for b in oracle.calls]
    assert hidden == pytest.approx([1, 0.75, 0.5, 0.25], abs=0.02)


def test_simple_never_changes_what_it_showed():
    calls = []

    def predict(batch):
        calls.append(batch.noisy.view(20, 32).clone())
        return torch.zeros(len(batch.hidden), 26)

    draw(predict, ["?" * 30] * 20, "simple", steps=6)
    before = calls[0]
    for k, noisy in enumerate(calls):
        hidden = round(30 * math.cos(math.pi / 2 * k / 6))
        assert set((noisy == script.MASK).sum(1).tolist()) == {hidden}
        assert ((noisy == before) | (before == script.MASK)).all()
        before = noisy


def test_residues_that_the_data_lack_are_never_drawn():
    """Nor with a network that likes them."""
    letters = [5] * 20 + [0, 0, 3, 0, 0, 0]

    def model(batch):
        return torch.linspace(0, 9, 26).expand(len(batch.hidden), -1)

    predict = sampler.make_predict(model, letters, 1.0, torch.device("cpu"))
    found = np.concatenate(draw(predict, ["?" * 50] * 40))
    kinds = set((found[script.is_residue(found)] - script.FIRST).tolist())
    assert script.RESIDUES.index("U") in kinds
    assert kinds <= {kind for kind, number in enumerate(letters) if number > 0}


def test_rare_residues_are_drawn():
    """Of probabilities that float32 would lose."""
    p = torch.zeros(26, dtype=torch.float64)
    p[0] = 1 - 2.0**-30
    p[1] = 2.0**-30
    u = torch.tensor([1 - 2.0**-31, 1 - 2.0**-29], dtype=torch.float64)
    found = sampler.draw_residues(p.log().expand(2, -1), u)
    assert found.tolist() == [script.FIRST + 1, script.FIRST]


def test_lengths_are_those_of_the_training_data():
    lengths = sampler.draw_lengths({30: 500, 100: 300, 700: 200}, 4000, 1, 510)
    values, found = np.unique(lengths, return_counts=True)
    assert values.tolist() == [30, 100, 510]
    assert agrees(found, np.array([0.5, 0.3, 0.2]))


# --------------------------------------------------------------------------------------------------
# Learning rate, batch


@pytest.mark.parametrize(
    ("option", "gpus", "lr", "warmup"),
    [
        ("", 1, 5e-5, 5000),
        ("", 2, 1e-4, 10_000),
        ("", 4, 2e-4, 20_000),
        ("", 8, 4e-4, 40_000),
        ("--lr_scaling=conservative", 8, 3e-4, 30_000),
        ("--lr_scaling=none", 4, 5e-5, 5000),
        ("--global_batch_size=64", 4, 5e-5, 5000),
    ],
)
def test_the_scaling_table_of_the_document(option, gpus, lr, warmup):
    """Rate and warm-up grow with the GPUs, unless the batch does not, or an option says so."""
    args = arguments(*option.split())
    factor = script.gpu_factor(args, gpus)
    assert args.lr * factor == pytest.approx(lr)
    assert script.warmup_steps(args, factor, 500_000) == warmup


def test_learning_rate():
    """A straight rise, then half a cosine; a long warm-up is cut."""
    rates = [script.lr_factor(step, 1000, 100) for step in (49, 100, 550, 999)]
    assert rates == pytest.approx([0.5, 1, 0.505, 0.01], abs=6e-3)
    assert script.warmup_steps(arguments(), 8, 925) == 92


# --------------------------------------------------------------------------------------------------
# A user's runs

RUN = """--accum=1 --batch_size=8 --lr=5e-3 --warmup=2 --log_every=1 --eval_sequences=10
    --val_ratio=0.2 --device=cpu""".split()


def run(folder, output, *options, program="run_train_uniref50_ddp", status=0):
    """Output of a run on the CPU that must end with `status`."""
    words = [f"--datafile={folder}/proteins.fasta", f"--cache_dir={folder}/cache"]
    words += [f"--output_dir={output}", *SMALL, *RUN, *options]
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


def test_few_steps_are_said(folder, tmp_path):
    """But not if --n_iters asks for them."""
    said = run(folder, tmp_path / "run", "--n_iters=2", "--epochs=1")
    assert re.search(r"WARNING: only \d+ optimizer steps \(\d+ samples, 8 a step, 1 epochs\)", said)
    assert "WARNING: only" not in run(folder, tmp_path / "run", "--n_iters=3")


def test_a_changed_option_is_refused(folder, tmp_path):
    """But not the number of steps. A run keeps its batch."""
    output = tmp_path / "run"
    run(folder, output, "--n_iters=3")
    run(folder, output, "--n_iters=5", "--batch_size=4")
    state = torch.load(output / "latest.pt", weights_only=True)
    assert state["args"]["global_batch_size"] == 8 and state["loop"]["step"] == 5
    for option, old in {"--accum=2": 1, "--global_batch_size=16": 8, "--n_heads=4": 2}.items():
        said = run(folder, output, "--n_iters=9", option, status=2)
        assert f"has a run with {old}" in said


def test_names_of_the_original(tmp_path):
    """The later one counts, on a command line and in a file."""
    (tmp_path / "c.yaml").write_text(
        "work_dir: a\ntraining: {log_freq: 7}\neval: {batch_size: 3}\n"
    )
    args = arguments(f"--config={tmp_path}/c.yaml", "--output_dir=b")
    assert (args.output_dir, args.log_every, args.eval_batch_size) == ("b", 7, 3)
    assert arguments("--log_every=3", "--log_freq=5", "--work_dir=c").log_every == 5


def test_weights_are_a_state_dict(folder, tmp_path):
    run(folder, tmp_path / "run", "--n_iters=3")
    state = torch.load(tmp_path / "run/best.pt", weights_only=True)
    model = network()
    model.load_state_dict(state["average"])
    model.load_state_dict(state["model"])


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
        assert "the held-out bound of step 4 is nan: --fresh and a lower --lr" in said
        assert not (output / "best.pt").exists()
    run(folder, output, "--n_iters=4")
    assert (output / "best.pt").exists()


def test_a_file_is_read_once(folder, tmp_path):
    words = [f"--datafile={folder}/proteins.fasta", f"--cache_dir={tmp_path}/cache"]
    made = []
    for _ in range(2):
        status, text = call_script("run_train_uniref50_ddp", *words, "--prepare_only")
        assert status == 0 and "held out" in text, text
        made.append({path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")})
    assert made[0] == made[1]
    for path, reason in {
        tmp_path / "none": "no such file. UniRef50 is at",
        tmp_path: "a folder",
    }.items():
        status, text = call_script("run_train_uniref50_ddp", f"--datafile={path}", "--device=cpu")
        assert status == 2 and reason in text, text


def test_wrong_options():
    for option in ("--hidden_size=30", "--dropout=1", "--lr=-1", "--max_memory_per_gpu=85"):
        with pytest.raises(script.InputError, match=option[:4]):
            arguments(option)
