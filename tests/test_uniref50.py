"""run_train_uniref50_ddp.py: known answers, and what a user sees of a run."""

import contextlib
import itertools
import math
from functools import partial
from itertools import islice
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import check_refused, parse_arguments, run_here, write_proteins
from scipy.stats import chisquare, sem
from torch import nn

import run_train_uniref50_ddp as script

SMALL = "--hidden_size=32 --n_blocks_prot=2 --n_heads=2 --max_protein_len=64 --dropout=0".split()

arguments = partial(parse_arguments, script)


def network():
    """A small network with random weights everywhere: at first its logits are 0."""
    torch.manual_seed(0)
    model = script.Denoiser(arguments(*SMALL))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """300 sequences of 20 to 60 residues: proteins.fasta, and cache/ with what was read of it."""
    folder = tmp_path_factory.mktemp("uniref")
    write_proteins(folder / "proteins.fasta", 300)
    read(folder)
    return folder


def read(folder, *options):
    """(arguments, Proteins) of proteins.fasta"""
    args = arguments(*options_of(folder, *options))
    return args, script.Proteins(script.prepare(args), args)


def evaluate(model, proteins, rows, args):
    return script.evaluate(args, model, proteins, rows, contextlib.nullcontext, torch.device("cpu"))


def test_steps_are_random_samples(group):
    """No step is made of sequences of similar length: their means are as spread as of any 64."""
    draws = np.random.default_rng(0).lognormal(math.log(286) - 0.32, 0.8, 20_000)
    lengths = draws.clip(20, 510).astype(int)
    args = arguments("--global_batch_size=64", "--batch_size=64")
    sampler = script.GlobalBatchSampler(np.arange(len(lengths)), args, lengths)
    steps = list(islice(sampler, sampler.steps))
    means = np.array([lengths[whole].mean() for _, whole, _ in steps])
    expected = lengths.std() / math.sqrt(64)
    assert means.std() == pytest.approx(expected, rel=5 / math.sqrt(2 * len(steps)))
    ids = np.concatenate([whole for _, whole, _ in steps])
    assert len(set(ids.tolist())) == len(ids) == len(steps) * 64


@pytest.mark.parametrize("ranks", [1, 8, 64])
def test_micro_batches_have_equal_work(ranks):
    """The largest has hardly more work than the smallest; each id once, one for each rank."""
    draw = np.random.default_rng(ranks)
    lengths = draw.lognormal(math.log(286) - 0.32, 0.8, 512 * ranks).clip(20, 510).astype(int)
    lengths.sort()
    largest = np.append(lengths[:-1], 10**9)
    for cost, spread in [(lengths, 1.25), (largest, math.inf), (np.ones(512 * ranks), 1)]:
        parts = np.split(np.arange(len(cost)), script.cut_by_work(cost, 8, ranks))
        assert np.concatenate(parts).tolist() == list(range(len(cost)))
        assert len(parts) == 8 and min(map(len, parts)) >= ranks
        work = []
        for part in parts:
            work += [cost[part[rank::ranks]].sum() for rank in range(ranks)]
        assert max(work) <= spread * min(work)
        assert max(work) <= np.mean(work) + 2 * cost.max()
    for samples in (16, 17, 23):  # no more than the ranks of all parts need
        cost = 10.0 ** np.arange(samples)
        assert min(map(len, np.split(cost, script.cut_by_work(cost, 8, 2)))) >= 2


def test_hidden_residues_and_weights(folder):
    """k of n, each equally often, with weight n / k; k / n is spread evenly over a step."""
    args, proteins = read(folder)
    data = script.NoisyProteins(args, proteins)
    rows = proteins.lengths.argsort()  # also where the global batch comes sorted
    residues = torch.from_numpy(proteins.lengths[rows])
    pieces = np.split(proteins.tokens, proteins.offsets[1:-1])
    clean = torch.from_numpy(np.concatenate([pieces[row] for row in rows])).long()
    owner = torch.arange(300).repeat_interleave(residues + 2)
    correlations = []
    middles = []
    for step in range(30):
        batch = data[step, rows, np.arange(300)]
        assert batch.lengths.tolist() == (residues + 2).tolist()
        assert batch.step_residues == residues.sum()
        assert torch.equal(batch.starts[owner] + batch.positions, torch.arange(len(clean)).int())
        hidden = batch.noisy == script.MASK
        assert torch.equal(batch.noisy[~hidden].long(), clean[~hidden])
        assert torch.equal(batch.targets, clean.where(hidden, -100))
        assert (clean[hidden] < script.NUM_RESIDUES).all()  # neither BEGIN nor END

        counts = owner[hidden].bincount(minlength=300)
        shares = counts / residues
        assert torch.allclose(batch.loss_weights, torch.where(hidden, 1 / shares[owner], 0.0))
        above = (shares.sort().values - torch.arange(1, 301) / 300).abs()
        assert above.max() < 1 / 16 and counts.min() > 0  # rounded up to 1 / n
        correlations.append(np.corrcoef(residues, shares)[0, 1])
        sums = torch.zeros(300).index_add_(0, owner, batch.loss_weights * batch.positions)
        middles.append((2 * sums / residues / (residues + 1)).mean())
    assert abs(np.mean(correlations)) < 4 / math.sqrt(30 * 300)
    assert np.mean(middles) == pytest.approx(1, abs=0.02)


def test_no_two_random_streams_are_one(folder, group):
    """Those of the sampler's epochs, of a step, of its positions, and of an evaluation."""
    args, proteins = read(folder)
    args.seed = 0
    args.global_batch_size = 6
    data = script.NoisyProteins(args, proteins)
    with mock.patch.object(np.random, "default_rng", wraps=np.random.default_rng) as made:
        next(iter(script.GlobalBatchSampler(np.arange(6), args, np.ones(6))))
        for step in range(3):
            data[step, np.arange(6), np.arange(6)]
        args.eval_draws = 1
        evaluate(lambda batch: torch.zeros(len(batch.noisy), 26), proteins, np.arange(6), args)
    firsts = {np.random.default_rng(*call.args).random() for call in made.call_args_list}
    assert len(firsts) == 1 + 3 * (1 + 6) + 1 + 6


def test_crops():
    """Of a long sequence 40 residues from any place on, with BEGIN or END where they reach it."""
    parts = {"tokens": np.arange(140), "offsets": np.array([0, 30, 140]), "lengths": [28, 40]}
    crop = partial(script.Proteins.crop, SimpleNamespace(**parts))
    generator = np.random.default_rng(0)
    assert crop(0, generator).tolist() == list(range(30))
    starts = np.zeros(69)  # of 108 residues 68 are left out
    for _ in range(4000):
        tokens = crop(1, generator)
        residues = tokens[(tokens > 30) & (tokens < 139)]
        first = residues[0] - 31
        expected = list(range(first + 31 - (first == 0), first + 71 + (first == 68)))
        assert len(residues) == 40 and tokens.tolist() == expected
        starts[first] += 1
    assert starts.min() > 0 and chisquare(starts).pvalue > 1e-4


@torch.no_grad()
def test_parameters():
    """Only matrices decay, and Muon takes those of the blocks."""
    with torch.device("meta"):
        model = script.Denoiser(arguments())
    assert sum(p.numel() for p in model.parameters()) == 57_321_248
    model = network()
    for kind in ("adamw", "muon"):
        args = arguments(f"--optimizer={kind}")
        found = {}
        for group in script.make_optimizer(args, model, None).param_groups:
            for p in group["params"]:
                found[p] = (group["weight_decay"], "muon" in group)
        for name, p in model.named_parameters():
            is_matrix = p.ndim == 2
            in_block = name.startswith("blocks.")
            expected = (0.01 if is_matrix else 0, kind == "muon" and is_matrix and in_block)
            assert found.pop(p) == expected, name
        assert not found


def test_muon():
    """The steps of torch.optim.Muon, which computes in bf16; a bad gradient changes nothing."""
    x = torch.randn(3, 6, 10, dtype=torch.float64)
    left, values, right = torch.linalg.svd(x, full_matrices=False)
    values = values / values.norm(dim=1, keepdim=True)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    expected = left @ torch.diag_embed(values) @ right
    assert torch.allclose(script.orthogonalize(x), expected)
    assert torch.allclose(script.orthogonalize(x.mT), expected.mT)

    models = [network(), network()]
    args = arguments("--optimizer=muon", "--lr=0.01", "--weight_decay=0.1")
    ours = script.make_optimizer(args, models[0], contextlib.nullcontext)
    matrices = [p for p in models[1].blocks.parameters() if p.ndim == 2]
    options = {"lr": 0.01, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    theirs = torch.optim.Muon(matrices, **options)
    before = [p.clone() for p in matrices]
    for bad in (0, 0, math.nan, 0, math.inf):
        for p, q in zip(*[model.parameters() for model in models], strict=True):
            q.grad = torch.randn_like(q)
            p.grad = q.grad + bad
        script.update_if_finite(args, ours)
        if bad == 0:
            nn.utils.clip_grad_norm_(models[1].parameters(), args.max_grad_norm)
            theirs.step()
    own = [p for p in models[0].blocks.parameters() if p.ndim == 2]
    for p, q, old in zip(own, matrices, before, strict=True):
        assert (p - q).norm() < 0.03 * (q - old).norm()


def test_the_loss_is_the_score_entropy_of_sedd():
    """Averaged over the masks of four residues. SEDD's: of the absorbing graph, weighted by sigma',
    with scores that are probabilities times 1 / (e^sigma - 1), and averaged over all times."""
    tokens = np.array([script.BEGIN, 3, 1, 4, 1, script.END], np.uint8)
    batch = script.make_batch([tokens], [1.0], [np.random.default_rng(0)], 4)
    nodes, node_weights = np.polynomial.legendre.leggauss(20)
    times = torch.from_numpy(nodes + 1) / 2
    sigma = -torch.log1p(-times)
    slope = 1 / (1 - times)
    ratio = (1 / sigma.expm1())[:, None]
    ours = 0.0
    theirs = 0.0
    for size in (1, 2, 3, 4):
        for mask in itertools.combinations(range(1, 5), size):
            logits = torch.randn(6, 26, dtype=torch.float64)
            hidden = torch.zeros(6, dtype=torch.bool)
            hidden[list(mask)] = True
            targets = batch.targets.where(hidden, -100)
            part = batch._replace(targets=targets, loss_weights=hidden.double() * 4 / size)
            ours += script.batch_loss(logits, part) / math.comb(4, size) / 4

            # (time, residue, kind)
            score = logits[hidden].log_softmax(1) + ratio.log()[..., None]
            positive = score.exp().sum(2)
            negative = ratio * score[:, range(size), targets[hidden]]
            entropy = (positive - negative + ratio * (ratio.log() - 1)).sum(1) / 4  # per residue
            chance = times**size * (1 - times) ** (4 - size)
            theirs += (chance * slope * entropy) @ torch.from_numpy(node_weights) / 2
    assert float(ours) == pytest.approx(float(theirs), rel=1e-9)


def test_metrics_by_hand():
    """Of sequences of one length the standard error is that of a mean."""
    nats = np.array([[1.0, 2.0, 6.0]])
    error = script.summarize(10 * nats, np.full((1, 3), 0.5), np.full(3, 10))["nelbo_se"]
    assert error == pytest.approx(sem(nats[0]))

    # two draws for a sequence of 1 residue, and for one of 3, of which 2 or 3 are masked
    nats = np.array([[1.0, 9.0], [3.0, 5.0]])
    found = script.summarize(nats, np.array([[0.5, 0.5], [0.5, 0.9]]), np.array([1, 3]))
    expected = {"nelbo": 9 / 4, "bits": 9 / 4 / math.log(2), "perplexity": math.exp(9 / 4)}
    expected["nelbo_se"] = math.sqrt(2 * (0.25**2 + 0.25**2)) / 4  # 0.25 below and above the mean
    expected |= {"ce_50": 9 / 3, "ce_85": (1 + 3 + 5) / (1 + 1 + 3)}
    assert found == pytest.approx(expected)


def test_cross_entropy_by_mask_rate(folder, group):
    """Of a network that is surer the less is masked."""
    args, proteins = read(folder, "--eval_draws=40")

    def sure(batch):
        """The masked residue has a probability of 1 - rate / 2."""
        owner = torch.arange(len(batch.lengths)).repeat_interleave(batch.starts.diff())
        share = torch.zeros(len(batch.lengths)).index_add_(0, owner, (batch.targets >= 0).float())
        rate = (share / (batch.starts.diff() - 2))[owner]
        p = 1 - rate / 2
        logits = ((1 - p) / 25).log()[:, None].repeat(1, 26)
        logits[torch.arange(len(p)), batch.targets.clamp(min=0)] = p.log()
        return logits

    found = evaluate(sure, proteins, proteins.valid, args)
    for name, low, high in [("ce_15", 0, 0.3), ("ce_50", 0.3, 0.7), ("ce_85", 0.7, 1)]:
        nodes = np.linspace(low, high, 1001) + 0.5 / 40  # rates are rounded up to 1 / n
        assert found[name] == pytest.approx(-np.log(1 - nodes / 2).mean(), rel=0.04)


def test_evaluation_of_known_predictions(folder, group):
    """A network that knows nothing needs log 26 nats; the unigram, beside it."""
    args, proteins = read(folder, "--max_protein_len=62")
    rows = proteins.valid
    metrics = evaluate(script.Denoiser(arguments(*SMALL)).eval(), proteins, rows, args)
    assert metrics["perplexity"] == pytest.approx(26, rel=1e-5)

    pieces = np.split(proteins.tokens, proteins.offsets[1:-1])
    counts = np.array([np.bincount(piece, minlength=28)[:26] for piece in pieces])
    shares = counts[proteins.train].sum(0) + 0.5
    logp = np.log(shares / shares.sum())
    found = counts[rows].sum(0)
    expected = -(found @ logp) / found.sum()
    assert proteins.unigram_nats(script.VALID) == pytest.approx(expected, rel=1e-9)


def test_learning_rate():
    """A straight rise, then half a cosine. It grows with the GPUs, if the batch does."""
    args = SimpleNamespace(warmup=50, gpu_factor=2)
    rates = [script.lr_factor(args, step, 1000) for step in (0, 49, 100, 550, 999)]
    assert rates == pytest.approx([1 / 101, 0.5, 1, 0.505, 0.01], abs=6e-3)
    factors = {"": 8, "--lr_scaling=conservative": 6, "--lr_scaling=none": 1}
    for option, factor in {**factors, "--global_batch_size=64": 1}.items():
        args = arguments(*option.split())
        assert [script.gpu_factor(args, gpus) for gpus in (1, 8)] == [1, factor]


def test_a_wandb_project_without_wandb(folder, caplog):
    run_here(script, *options_of(folder, "--wandb_project=p"), "--prepare_only")
    assert "nothing is sent to wandb" in caplog.text


def test_names_of_the_original(tmp_path):
    (tmp_path / "c.yaml").write_text("work_dir: a\neval: {batch_size: 3}\n")
    args = arguments(f"--config={tmp_path}/c.yaml", "--log_every=3", "--log_freq=5")
    assert (args.output_dir, args.log_every, args.eval_batch_size) == ("a", 5, 3)


def test_wrong_options():
    # numbers of a head: no whole number, 12, and 4; limits of types; a folder
    options = "--hidden_size=30 --hidden_size=144 --hidden_size=48 --dropout=1 --eval_sequences=1"
    for option in f"{options} --max_memory_per_gpu=85 --datafile=.".split():
        with pytest.raises(script.InputError, match=option[:4]):
            script.prepare(arguments(option))


def options_of(folder, *options):
    own = """--accum=1 --batch_size=8 --lr=5e-3 --warmup=2 --log_every=1 --eval_sequences=10
        --val_ratio=0.2 --device=cpu""".split()
    words = [f"--datafile={folder}/proteins.fasta", f"--cache_dir={folder}/cache"]
    return [*words, *SMALL, *own, *options]


def test_a_run_learns_and_says_so(tmp_path, server):
    """Proteins of one kind of residue each: what is seen tells what is hidden."""
    lines = [kind * length for kind in "DEFH" for length in range(10, 60)]
    (tmp_path / "proteins.fasta").write_text("\n".join(lines))
    options = options_of(tmp_path, "--n_iters=60", "--eval_freq=30", "--ema=0.9")
    ended = server.run("run_train_uniref50_ddp", options, tmp_path / "run", 1)
    assert "best at step 60" in ended.text and "WARNING" not in ended.text
    assert ended.summary["best"]["value"] < ended.summary["baselines"]["unigram"] - 0.5


def test_a_resumed_run_keeps_batch_and_rate_on_any_number_of_gpus(folder, tmp_path, server):
    """A step has batch_size x accum sequences on a GPU. A long warm-up takes half the steps."""
    starts = {2: "--n_iters=3 --batch_size=4 --accum=2", 1: "--n_iters=7"}
    rates = []
    for ranks, more in starts.items():
        options = options_of(folder, *more.split(), "--warmup=5000")
        ended = server.run("run_train_uniref50_ddp", options, tmp_path / "run", ranks)
        assert set(ended.statuses) == {0}, ended.text
        options = ended.summary["args"]
        assert (options["gpu_factor"], options["global_batch_size"]) == (2, 16)
        rates.append([row["lr"] for row in ended.rows if "lr" in row])
    assert "the run keeps its --global_batch_size 16" in ended.text
    for found, first, steps in [(rates[0], 0, 3), (rates[1], 3, 7)]:
        half = SimpleNamespace(warmup=steps // 2, gpu_factor=1)
        expected = [0.01 * script.lr_factor(half, step, steps) for step in range(first, steps)]
        assert found[first:] == pytest.approx(expected)


def test_a_run_without_a_best_network(folder, tmp_path, monkeypatch):
    """A first evaluation that is NaN ends it, also when started again; then, mended, it goes on."""
    options = options_of(folder, f"--output_dir={tmp_path}/run", "--n_iters=4")
    plain = script.summarize
    monkeypatch.setattr(script, "summarize", lambda nats, *rest: plain(nats * math.nan, *rest))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the validation nelbo is nan: a lower --lr?"):
            run_here(script, *options)
        assert not (tmp_path / "run" / "best.pt").exists()
    monkeypatch.setattr(script, "summarize", plain)
    run_here(script, *options, "--max_minutes=1e-6")
    check_refused("--n_iters 1", run_here, script, *options, "--n_iters=1")
    run_here(script, *options)
    assert (tmp_path / "run" / "best.pt").exists()
