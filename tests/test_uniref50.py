"""run_train_uniref50_ddp.py: known answers, and what a user sees of a run."""

import contextlib
import itertools
import math
import tracemalloc
from functools import partial
from itertools import islice
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import call_script, import_tool, parse_arguments, run_here, write_proteins
from runs import Run
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
    count = len(sequences)
    return script.make_batch(sequences, np.full(count, 0.4), range(count), 1)


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


def test_hidden_residues_and_weights(tmp_path):
    """k of n residues are hidden, each of them equally often, with weight n / k; k / n is spread
    evenly over a step, also where the global batch comes sorted by length."""
    residues = torch.arange(20, 420)
    proteins = write_folder(tmp_path, residues.numpy() + 2)
    data = script.NoisyProteins(proteins, seed=42)
    rows = np.arange(400)
    correlations = []
    for step in range(30):
        batch = data[step, rows, rows]
        owner = batch.owner[batch.hidden].long()
        counts = owner.bincount(minlength=400)
        shares = counts / residues
        assert torch.allclose(batch.weights, 1 / shares[owner])
        above = (shares.sort().values - torch.arange(1, 401) / 400).abs()
        assert above.max() < 1 / 20 and counts.min() > 0  # rounded up to 1 / n
        correlations.append(np.corrcoef(rows, shares)[0, 1])
        expected = torch.tensor(proteins.tokens)
        assert torch.equal(batch.targets + script.FIRST, expected[batch.hidden].long())
        expected[batch.hidden] = script.MASK
        assert torch.equal(batch.noisy, expected)
    assert abs(np.mean(correlations)) < 4 / math.sqrt(30 * 400)


def test_no_two_random_streams_are_one(tmp_path):
    """Those of the sampler's epochs, of a step, and of its places."""
    proteins = write_folder(tmp_path, np.full(6, 40))
    with mock.patch.object(np.random, "default_rng", wraps=np.random.default_rng) as made:
        deal(proteins, "--global_batch_size=6", "--batch_size=6")
        for step in range(3):
            script.NoisyProteins(proteins, seed=42)[step, np.arange(6), np.arange(6)]
    firsts = {np.random.default_rng(*call.args).random() for call in made.call_args_list}
    assert len(firsts) == 1 + 3 * (1 + 6)


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
    """Other residues and noise levels of the other sequences change nothing for it."""
    model = network()
    batch = batch_of(random_sequences([12, 40, 21, 9]))
    logits = model(batch)
    owner = batch.owner[batch.hidden]
    for number in range(4):
        others = (batch.owner != number) & script.is_residue(batch.noisy)
        noisy = torch.where(others, script.FIRST, batch.noisy)
        noisy[others.nonzero()[::2]] = script.MASK
        changed = model(batch._replace(noisy=noisy))
        assert torch.allclose(changed[owner == number], logits[owner == number], atol=1e-5)
        assert not torch.allclose(changed[owner != number], logits[owner != number], atol=0.1)


@torch.no_grad()
def test_the_last_block_computes_hidden_residues_alone():
    """Their logits are those of a network that computes all residues."""
    model = network()
    batch = batch_of(random_sequences([12, 40, 21, 9]))
    rows = []
    model.head.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    model.blocks[-1].up.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    logits = model(batch)
    hidden = len(batch.hidden)
    assert rows == [hidden, hidden]

    asked = torch.arange(len(batch.noisy))  # all tokens are asked for
    of_all = model(batch._replace(hidden=asked, numbers=batch.lengths))
    assert torch.allclose(logits, of_all[batch.hidden], atol=1e-4)


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


def test_the_network_is_told_the_noise_level():
    """sigma, where a share 1 - exp(-sigma) of a sequence is hidden; 99.9 % if all is."""
    sequences = random_sequences([22, 42, 12])
    batch = script.make_batch(sequences, [0.25, 0.5, 1.0], range(3), 1)
    model = network()
    seen = []
    model.noise_mlp.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model(batch)
    angles = script.angles_of(-torch.log1p(-torch.tensor([0.25, 0.5, 0.999])), 8)
    expected = torch.cat([angles.cos(), angles.sin()], dim=1)
    assert torch.allclose(seen[0], expected, atol=1e-3)


@pytest.mark.parametrize("flag", [False, True])
def test_gradient_checkpointing(flag):
    """Each block is computed once forward, and once again for the backward pass."""
    model = network(f"--gradient_checkpointing={flag}").train()
    calls = []
    model.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    batch = batch_of(random_sequences([20, 30]))
    script.share_of_loss(model(batch), batch).backward()
    assert len(calls) == 1 + flag


def test_no_weight_decay_on_biases_norms_and_embeddings():
    model = network()
    decayed, _ = script.make_optimizer(arguments(), model).param_groups  # which, the contract shows
    decayed = {id(p) for p in decayed["params"]}
    for name, p in model.named_parameters():
        assert (id(p) in decayed) == (p.ndim == 2 and not name.startswith("embed")), name


# --------------------------------------------------------------------------------------------------
# Loss


def test_the_loss_is_the_score_entropy_of_sedd():
    """Averaged over the masks of four residues, each with any prediction. SEDD's: of the absorbing
    graph, as its published code has it, weighted by sigma', with scores that are probabilities
    times 1 / (e^sigma - 1), and averaged over all times."""
    batch = script.make_batch(random_sequences([6]), [1.0], [0], 4)
    nodes, node_weights = np.polynomial.legendre.leggauss(20)
    times = torch.from_numpy(nodes + 1) / 2
    sigma = -torch.log1p(-times)
    slope = 1 / (1 - times)
    ratio = (1 / sigma.expm1())[:, None]
    ours = 0.0
    theirs = 0.0
    for size in (1, 2, 3, 4):
        for mask in itertools.combinations(range(4), size):
            logits = torch.randn(size, 26, dtype=torch.float64)
            targets = batch.targets[batch.hidden.argsort()][list(mask)]
            part = batch._replace(
                targets=targets, weights=torch.full((size,), 4 / size, dtype=torch.float64)
            )
            ours += script.share_of_loss(logits, part) / math.comb(4, size) / 4

            score = logits.log_softmax(1) + ratio.log()[..., None]  # (time, residue, kind)
            positive = score.exp().sum(2)
            negative = ratio * score[:, range(size), targets]
            entropy = (positive - negative + ratio * (ratio.log() - 1)).sum(1) / 4  # per residue
            chance = times**size * (1 - times) ** (4 - size)
            theirs += (chance * slope * entropy) @ torch.from_numpy(node_weights) / 2
    assert float(ours) == pytest.approx(float(theirs), rel=1e-9)


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
    nats = np.full((4, 2), 7e6)
    rest = (random_sequences([9] * 4), np.full(4, 7), [5] * 26)
    metrics = script.summarize(nats, *rest)
    assert metrics["nelbo"] == 1e6 and math.isfinite(metrics["perplexity"])
    nats[2, 1] = math.nan
    assert math.isnan(script.summarize(nats, *rest)["nelbo"])


# --------------------------------------------------------------------------------------------------
# Sampling: the predictor is an oracle, so the law of the samples must be the oracle's

WORDS = np.indices([3] * 4).reshape(4, -1).T  # all of four residues out of three kinds
LAW = softmax(np.random.default_rng(0).normal(0, 0.7, 81))  # any law


def oracle(batch):
    """Predicts the hidden residues of words with this law, from all that is seen."""
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
    assert agrees(counts(draw(oracle, ["????"] * 6000, steps=steps)), LAW)


def test_filling_in_follows_the_conditional_law():
    found = counts(draw(oracle, ["?C?D"] * 4000))
    law = LAW * (WORDS[:, 1] == 1) * (WORDS[:, 3] == 2)
    assert agrees(found, law / law.sum())


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

    predict = sampler.make_predict(model, letters, 1.0, contextlib.nullcontext, torch.device("cpu"))
    found = np.concatenate(draw(predict, ["?" * 50] * 40))
    kinds = set((found[script.is_residue(found)] - script.FIRST).tolist())
    assert script.RESIDUES.index("U") in kinds and all(letters[kind] > 0 for kind in kinds)


def test_rare_residues_are_drawn():
    """Of probabilities that float32 would lose."""
    p = torch.zeros(26, dtype=torch.float64)
    p[0] = 1 - 2.0**-30
    p[1] = 2.0**-30
    u = torch.tensor([1 - 2.0**-31, 1 - 2.0**-29], dtype=torch.float64)
    found = sampler.draw_residues(p.log().expand(2, -1), u)
    assert found.tolist() == [script.FIRST + 1, script.FIRST]


# --------------------------------------------------------------------------------------------------
# Learning rate, batch


@pytest.mark.parametrize(
    ("option", "gpus", "lr", "warmup"),
    [
        ("", 1, 5e-5, 5000),
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


def options_of(folder, output, *options):
    words = [f"--datafile={folder}/proteins.fasta", f"--cache_dir={folder}/cache"]
    return [*words, f"--output_dir={output}", *SMALL, *RUN, *options]


def run(folder, output, *options):
    """Output of a run on the CPU."""
    return call_script("run_train_uniref50_ddp", *options_of(folder, output, *options))


def rows_of(output, name):
    return [row for row in Run(output).rows if name in row]


def test_a_run_stopped_before_its_first_evaluation_goes_on_with_fewer_steps(folder, tmp_path):
    """It makes that evaluation then, instead of a TypeError."""
    run(folder, tmp_path / "run", "--n_iters=50", "--eval_freq=50", "--max_minutes=1e-6")
    done = rows_of(tmp_path / "run", "loss")[-1]["step"]
    assert done < 50 and not rows_of(tmp_path / "run", "val/nelbo")
    run(folder, tmp_path / "run", "--n_iters=1", "--eval_freq=50")
    assert [row["step"] for row in rows_of(tmp_path / "run", "val/nelbo")] == [done]
    assert Run(tmp_path / "run").summary["best"]["step"] == done


def test_a_resumed_run_keeps_its_batch(folder, tmp_path):
    """Its number of steps may change, which is said."""
    output = tmp_path / "run"
    run(folder, output, "--n_iters=3")
    said = run(folder, output, "--n_iters=5", "--batch_size=4", "--accum=2", "--eval_batch_size=3")
    assert "the learning rate is that of a run of 5 steps, not of 3: it jumps" in said
    state = torch.load(output / "latest.pt", weights_only=True)
    assert state["args"]["global_batch_size"] == 8 and state["loop"]["step"] == 5


def test_names_of_the_original(tmp_path):
    """The later one counts, on a command line and in a file."""
    text = "work_dir: a\ntraining: {log_freq: 7}\neval: {batch_size: 3}\n"
    (tmp_path / "c.yaml").write_text(text)
    args = arguments(f"--config={tmp_path}/c.yaml", "--output_dir=b")
    assert (args.output_dir, args.log_every, args.eval_batch_size) == ("b", 7, 3)
    assert arguments("--log_every=3", "--log_freq=5", "--work_dir=c").log_every == 5


def test_a_first_evaluation_that_is_nan_is_never_best(folder, tmp_path, monkeypatch):
    """The run says so and ends, also when it is started again; then, mended, it goes on."""
    options = options_of(folder, tmp_path / "run", "--n_iters=4", "--num_workers=0")
    plain = script.summarize
    monkeypatch.setattr(script, "summarize", lambda nats, *rest: plain(nats * math.nan, *rest))
    said = "the held-out bound of step 4 is nan: --fresh and a lower --lr"
    for _ in range(2):
        with pytest.raises(script.RunError, match=said):
            run_here(script, *options)
        assert not (tmp_path / "run" / "best.pt").exists()
    monkeypatch.setattr(script, "summarize", plain)
    run_here(script, *options)
    assert (tmp_path / "run" / "best.pt").exists()


def test_the_record_is_not_newer_than_best_pt(folder, tmp_path, monkeypatch, caplog):
    """Where best.pt cannot be saved, a later one may be; the last one must."""
    plain = torch.save

    def save(state, file):
        if state["loop"]["best"].get("step") == 2 and "optimizer" not in state:
            raise OSError("No space left")
        plain(state, file)

    monkeypatch.setattr(torch, "save", save)
    more = ["--eval_freq=2", "--num_workers=0"]
    run_here(script, *options_of(folder, tmp_path / "run", "--n_iters=4", *more))
    said = "no best.pt at step 2 (is the disk full? No space left); the run goes on"
    assert said in caplog.text
    best = torch.load(tmp_path / "run/best.pt", weights_only=True)["loop"]["best"]
    assert best == Run(tmp_path / "run").summary["best"]
    assert best["value"] == rows_of(tmp_path / "run", "val/nelbo")[1]["val/nelbo"]
    with pytest.raises(script.RunError):
        run_here(script, *options_of(folder, tmp_path / "last", "--n_iters=2", *more))


def test_no_file(tmp_path):
    for name, reason in (("x", "no such file. UniRef50 is at"), (".", "folder")):
        with pytest.raises(script.InputError, match=reason):
            script.prepare(arguments(f"--datafile={tmp_path}/{name}"))


def test_wrong_options(monkeypatch):
    # numbers of a head: no whole number, 12, 320
    options = "--hidden_size=30 --hidden_size=144 --hidden_size=3840 --dropout=1 --lr=-1"
    for option in f"{options} --max_memory_per_gpu=85 --eval_sequences=1".split():
        with pytest.raises(script.InputError, match=option[:4]):
            arguments(option)
    monkeypatch.setattr(script, "setup_ddp", lambda args: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", mock.Mock())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(script.InputError, match="--precision fp16: .* only fp32"):
        script.main(arguments("--precision=fp16"))
