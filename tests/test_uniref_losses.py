"""Losses, noise, model and batches of run_train_uniref50_ddp.py against closed forms."""

from __future__ import annotations

import importlib
import json
import math
import sys

import numpy as np
import pytest
import torch
import yaml
from helpers import ROOT

script = importlib.import_module("run_train_uniref50_ddp")
FIRST, LAST, MASK, PAD, STATES = script.FIRST, script.LAST, script.MASK, script.PAD, script.STATES
SCHEDULES = [("loglinear", 1e-4, 20.0, 1e-3), ("cosine", 1e-4, 20.0, 1e-3), ("geometric", 1e-4, 20.0, 1e-3)]
SMALL = "--hidden_size=32 --n_blocks_prot=2 --n_heads=2 --cond_dim=16 --max_protein_len=40 --dropout=0".split()


def arguments(*extra: str):
    return script.parse_args([*SMALL, *extra])


def model(*extra: str, seed: int = 0):
    """A small network with random weights everywhere: at initialisation its blocks do nothing."""
    torch.manual_seed(seed)
    network = script.Denoiser(arguments(*extra), torch.float32)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return network.eval()


def proteins(count: int, length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST, LAST + 1, (count, length), generator=generator)


def random_logits(shape, seed: int = 1) -> torch.Tensor:
    logits = torch.randn(*shape, MASK + 1, generator=torch.Generator().manual_seed(seed))
    allowed = torch.full((MASK + 1,), -math.inf)
    allowed[FIRST : LAST + 1] = 0.0
    return (2 * logits + allowed).double()


@pytest.mark.parametrize("kind, low, high, eps", SCHEDULES)
def test_noise_schedules(kind, low, high, eps):
    """Slope is the derivative of sigma; ends are where they should be."""
    noise = script.Noise(kind, low, high, eps)
    t = torch.linspace(0.01, 0.99, 50, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(noise.sigma(t).sum(), t)
    assert torch.allclose(slope, noise.at(t)[1], rtol=1e-9)
    start, end = (float(noise.sigma(torch.tensor(x, dtype=torch.float64))) for x in (0.0, 1.0))
    if kind == "loglinear":
        hidden = noise.hidden(t)
        assert torch.allclose(hidden, (1 - eps) * t) and start == 0 and end == pytest.approx(-math.log(eps))
    else:
        assert start == pytest.approx(low) and end == pytest.approx(high)
    early = t[noise.hidden(t) < 0.999]
    assert len(early) > 10 and torch.allclose(noise.sigma_of(noise.hidden(early)), noise.sigma(early), rtol=1e-6)
    assert float(noise.sigma_of(torch.tensor(1.0))) <= end * (1 + 1e-4)


@pytest.mark.parametrize("graph", ["absorb", "uniform"])
@pytest.mark.parametrize("share", [0.1, 0.6, 0.999])
def test_forward_transitions(graph, share):
    """How often a residue becomes what, against q(x_t | x_0); special tokens stay."""
    tokens = torch.full((400, 252), FIRST + 3)
    tokens[:, 0], tokens[:, -1] = script.BOS, PAD
    ids = torch.arange(400)
    draws, letters = (script.keyed_uniform(5, 1, ids, 252, stream=s) for s in (2, 3))
    noisy = script.noised(tokens, torch.full((400,), share), draws, graph, letters)
    assert (noisy[:, 0] == script.BOS).all() and (noisy[:, -1] == PAD).all()
    n = 400 * 250
    counts = torch.bincount(noisy[:, 1:-1].flatten(), minlength=MASK + 1) / n
    expected = torch.zeros(MASK + 1)
    if graph == "absorb":
        expected[FIRST + 3], expected[MASK] = 1 - share, share
    else:
        expected[FIRST : LAST + 1] = share / STATES
        expected[FIRST + 3] += 1 - share
    spread = (expected * (1 - expected) / n).sqrt()
    assert ((counts - expected).abs() <= 4.5 * spread + 1e-12).all()


@pytest.mark.parametrize("kind, low, high, eps", SCHEDULES)
def test_score_entropy_equals_nelbo(kind, low, high, eps):
    """With scores of a softmax times r, the score entropy of the absorbing graph is the weighted cross entropy."""
    tokens, noise = proteins(6, 30), script.Noise(kind, low, high, eps)
    t = torch.linspace(0.05, 0.95, 6, dtype=torch.float64)
    sigma, slope = noise.at(t)
    noisy = script.noised(tokens, noise.hidden(t), torch.rand(6, 30), "absorb")
    logits = random_logits((6, 30))
    scores = script.log_scores(logits, noisy, sigma, "absorb", "nelbo")
    entropy = script.score_entropy_loss(scores, tokens, noisy, sigma, slope, "absorb")
    nelbo = script.nelbo_loss(logits, tokens, noisy, sigma, slope)
    assert (noisy == MASK).any() and torch.allclose(entropy, nelbo, rtol=1e-6, atol=1e-9)
    assert (nelbo[noisy != MASK] == 0).all()
    by_hand = -logits.log_softmax(-1)[2][torch.arange(30), tokens[2]] * (slope[2] / (math.exp(sigma[2]) - 1))
    assert torch.allclose(nelbo[2][noisy[2] == MASK], by_hand[noisy[2] == MASK])
    free = script.log_scores(logits + 1, noisy, sigma, "absorb", "score_entropy")
    assert not torch.allclose(free, script.log_scores(logits, noisy, sigma, "absorb", "score_entropy"))


def test_uniform_scores_and_loss():
    """With p(x_0 | x_t) a point at the truth the scores are the exact ratios, and the score entropy is zero."""
    tokens = proteins(4, 25)
    t = torch.tensor([0.1, 0.4, 0.7, 0.95], dtype=torch.float64)
    noise = script.Noise("loglinear", 0, 0, 1e-3)
    sigma, slope = noise.at(t)
    noisy = script.noised(tokens, noise.hidden(t), torch.rand(4, 25), "uniform", torch.rand(4, 25))
    logits = torch.full((4, 25, MASK + 1), -math.inf, dtype=torch.float64)
    logits[..., FIRST : LAST + 1] = -60.0
    logits.scatter_(-1, tokens[..., None], 0.0)
    scores = script.log_scores(logits, noisy, sigma, "uniform", "nelbo")
    keep = torch.exp(-sigma)[:, None, None]
    q = (1 - keep) / STATES + keep * torch.nn.functional.one_hot(tokens - FIRST, STATES)
    here = q.gather(-1, (noisy - FIRST)[..., None])
    others = torch.ones_like(q).scatter(-1, (noisy - FIRST)[..., None], 0.0).bool()
    assert torch.allclose(scores[others], (q / here).log()[others], atol=1e-9)
    loss = script.score_entropy_loss(scores, tokens, noisy, sigma, slope, "uniform")
    assert loss.abs().max() < 1e-9
    wrong = script.score_entropy_loss(scores + 0.3, tokens, noisy, sigma, slope, "uniform")
    ratio = (q / here).masked_fill(~others, 0.0)
    expected = slope[:, None] * (ratio * (math.exp(0.3) - 1 - 0.3)).sum(-1) / STATES  # r (e^d - 1 - d) each
    assert torch.allclose(wrong, expected, rtol=1e-6)


def test_padding_changes_no_logit():
    """A sequence alone, in a padded batch, and with more padding: the same logits to 1e-5; also with its neighbours."""
    network, tokens = model(), torch.full((3, 30), PAD)
    rows = [proteins(1, n, seed=n)[0] for n in (12, 21, 30)]
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    sigma = torch.tensor([0.5, 1.5, 3.0])
    with torch.no_grad():
        together = network(tokens, sigma)
        for i, row in enumerate(rows):
            alone = network(row[None], sigma[i : i + 1], padded=False)
            assert torch.allclose(together[i, : len(row), FIRST : LAST + 1], alone[0][:, FIRST : LAST + 1], atol=1e-5)
    assert torch.isinf(together[..., [0, 1, 2, 3, 4, 31, 35, 36]]).all()


def test_time_conditioning():
    tokens, low, high = proteins(2, 20), torch.full((2,), 0.1), torch.full((2,), 4.0)
    with torch.no_grad():
        timed, blind = model(), model("--time_conditioning=False")
        assert not torch.allclose(timed(tokens, low)[..., 5:31], timed(tokens, high)[..., 5:31])
        assert torch.equal(blind(tokens, low), blind(tokens, high))


def test_default_model_is_the_documented_one():
    """66,724,096 parameters; uniform over residues and blocks that do nothing at initialisation."""
    args = script.parse_args([])
    with torch.device("meta"):
        network = script.Denoiser(args, torch.float32)
    assert sum(p.numel() for p in network.parameters()) == 66_724_096
    torch.manual_seed(0)
    small = script.Denoiser(arguments(), torch.float32)
    p = small(proteins(1, 9), torch.ones(1)).softmax(-1)[0, 0, FIRST : LAST + 1]
    assert torch.allclose(p, torch.full((STATES,), 1 / STATES))


def test_gradient_checkpointing_changes_no_gradient():
    gradients = []
    for extra in ("--gradient_checkpointing=False", "--gradient_checkpointing=True"):
        network = model(extra).train()
        network(proteins(2, 20), torch.tensor([0.5, 2.0]))[..., FIRST:31].square().mean().backward()
        gradients.append([p.grad for p in network.parameters()])
        assert all(g is not None for g in gradients[-1])
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(*gradients, strict=True))
    calls = []
    network = model("--gradient_checkpointing=True").train()
    network.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    network(proteins(1, 9), torch.ones(1))[..., FIRST:31].sum().backward()
    assert len(calls) == 2  # once forward, once again for the backward pass


def test_curriculum_touches_training_times_only():
    places = (torch.arange(1000) + 0.5) / 1000
    plain, early = arguments(), arguments("--use_curriculum", "--preschool_time=100")
    even = script.training_times(places, 0, plain)
    assert even.min() >= 1e-3 and even.max() <= 1 and even.mean() == pytest.approx(0.5, abs=1e-2)
    means = [script.training_times(places, step, early).mean().item() for step in (0, 50, 99)]
    assert means[0] < 0.3 < means[1] < means[2] < 0.5
    assert torch.equal(script.training_times(places, 100, early), even)
    for ramp in ("exponential", "cosine"):
        args = arguments("--use_curriculum", "--preschool_time=100", f"--difficulty_ramp={ramp}")
        assert script.training_times(places, 10, args).mean() < 0.35


def test_hide_exactly():
    tokens = proteins(5, 30)
    tokens[:, 0], tokens[0, 20:] = script.BOS, PAD
    draws = torch.rand(5, 30)
    for share in (0.001, 0.3, 1.0):
        noisy = script.hide_exactly(tokens, torch.full((5,), share), draws)
        free = script.is_residue(tokens)
        assert (noisy == MASK).sum(1).tolist() == [math.ceil(share * n) for n in free.sum(1).tolist()]
        assert (noisy[~free] == tokens[~free]).all()


def test_ratio_is_the_delta_method():
    rng = np.random.default_rng(0)
    n = rng.integers(20, 60, 500).astype(float)
    x = n * rng.normal(2.0, 0.3, 500)
    rows = np.stack([np.ones(500), x, n], axis=1)
    mean, error = script.ratio(rows.T @ rows, 0, 1, 0)
    assert mean == pytest.approx(x.sum() / n.sum())
    draws = [(lambda i: x[i].sum() / n[i].sum())(rng.integers(0, 500, 500)) for _ in range(600)]
    assert error == pytest.approx(np.std(draws), rel=0.15)


def test_muon_step():
    """Orthogonalised momentum of AdamW's size for hidden matrices, AdamW for the rest; a non-finite step is skipped."""
    args = arguments("--optimizer=Muon", "--lr=0.1", "--weight_decay=0.0")
    network = model()
    optimizer = script.make_optimizer(network, args, 0.1)
    matrices = [p for g in optimizer.param_groups if g["muon"] for p in g["params"]]
    assert len(matrices) == 4 * 2 and all(p.ndim == 2 for p in matrices)
    before = [p.detach().clone() for p in network.parameters()]
    for p in network.parameters():
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    kept = [p.grad.clone() for p in network.parameters()]
    network.head.weight.grad[0, 0] = math.nan
    optimizer.grad_scale, optimizer.found_inf = None, torch.ones(())
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True))
    for p, gradient in zip(network.parameters(), kept, strict=True):
        p.grad = gradient
    optimizer.found_inf = torch.zeros(())
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True))
    old = before[[id(p) for p in network.parameters()].index(id(matrices[0]))]
    update = (old - matrices[0].detach()) / (0.1 * 0.2 * max(old.shape) ** 0.5)
    values = torch.linalg.svdvals(update)
    assert values.min() > 0.6 and values.max() < 1.3
    restored = script.make_optimizer(network, args, 0.1)
    restored.load_state_dict(optimizer.state_dict())
    assert all(torch.equal(restored.state[p]["momentum"], optimizer.state[p]["momentum"]) for p in matrices)


def test_no_decay_on_biases_norms_embeddings():
    network, args = model(), arguments("--weight_decay=0.1")
    optimizer = script.make_optimizer(network, args, 1e-3)
    decayed = {id(p) for g in optimizer.param_groups if g["weight_decay"] for p in g["params"]}
    for name, p in network.named_parameters():
        assert (id(p) in decayed) == (p.ndim == 2 and not name.startswith("embed")), name


def test_ema():
    average, weights = [torch.zeros(3)], [torch.ones(3)]
    script.update_ema(average, weights, 0.9, 0)
    assert torch.allclose(average[0], torch.full((3,), 0.9))  # (1 + 0) / (10 + 0) = 0.1 at first
    script.update_ema(average, weights, 0.9, 1000)
    assert torch.allclose(average[0], torch.full((3,), 0.91))
    network = model()
    kept = [p.detach().clone() for p in network.parameters()]
    network.train()
    with script.averaged_weights(network, [torch.zeros_like(p) for p in kept]):
        assert not network.training and all((p == 0).all() for p in network.parameters())
    assert network.training and all(torch.equal(a, b) for a, b in zip(kept, network.parameters(), strict=True))


@pytest.mark.parametrize("gpus, lr, warmup", [(1, 5e-5, 5000), (2, 1e-4, 10_000), (4, 2e-4, 20_000), (8, 4e-4, 40_000)])
def test_scaling_table_of_the_document(gpus, lr, warmup):
    """The document's table: batch 64 per GPU, rate and warm-up by the number of GPUs."""
    args, ddp = script.parse_args([]), script.DDPContext(0, gpus, 0, gpus, torch.device("cpu"), "gloo", "test")
    assert script.resolve_batch(args, gpus)[0] == 64 * gpus
    progress = script.Progress()
    progress.plan(args, ddp, 500_000)
    assert (progress.peak, progress.warmup) == (pytest.approx(lr), warmup)
    factors = []
    for step in (0, warmup - 1, warmup, 499_999):
        progress.step = step
        factors.append(progress.rate(args, 500_000) / progress.peak)
    assert factors[0] < 1e-3 and factors[2] == 1 and factors[1] == pytest.approx(1, abs=1e-3)
    assert factors[3] == pytest.approx(0.01, abs=1e-4)


def test_conservative_scaling_of_the_document():
    """From 8 GPUs on: 6 times the rate and the warm-up, batch 12, 0.8 of the memory; given values stay."""
    args = script.parse_args(["--lr_scaling=conservative"])
    ddp = script.DDPContext(0, 8, 0, 8, torch.device("cpu"), "gloo", "test")
    script.conservative(args, 8)
    progress = script.Progress()
    progress.plan(args, ddp, 500_000)
    assert (progress.peak, progress.warmup) == (pytest.approx(3e-4), 30_000)
    assert (args.batch_size, args.max_memory_per_gpu) == (12, 0.8)
    assert script.resolve_batch(args, 8)[0] == 384
    given = script.parse_args(["--lr_scaling=conservative", "--batch_size=20"])
    script.conservative(given, 8)
    assert given.batch_size == 20
    few = script.parse_args(["--lr_scaling=conservative"])
    script.conservative(few, 4)
    assert few.batch_size == 16


def test_long_warmup_is_cut():
    args, progress = script.parse_args([]), script.Progress()
    ddp = script.DDPContext(0, 8, 0, 8, torch.device("cpu"), "gloo", "test")
    progress.plan(args, ddp, 925)
    assert progress.warmup == 92


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_token_budget(world_size):
    """Batches of nearly equal tokens, little padding, every sequence once, the same plan for any number of ranks."""
    rng = np.random.default_rng(1)
    lengths = np.clip(np.exp(rng.normal(5.45, 0.65, 20_000)), 30, 3000).astype(int)
    most, rows = 512, 24
    mean = np.minimum(lengths, most).mean()
    items = int(rows * most / mean)
    cut = script.bucket_by_tokens(lambda ids: np.minimum(lengths[ids], most), items, rows, 7)
    cpu, ranks = torch.device("cpu"), range(world_size)
    contexts = [script.DDPContext(r, world_size, r, world_size, cpu, "gloo", "t") for r in ranks]
    samplers = [script.GlobalBatchSampler(20_000, items, 2, 7, c, -(-4096 // items), cut) for c in contexts]
    plan = list(samplers[0].batches())
    assert len(plan) == 20_000 // items
    used = np.concatenate(plan)
    assert len(set(used.tolist())) == len(used) == len(plan) * items
    budget, padded, real = rows * most, 0, 0
    for batch in plan:
        assert len(batch) >= rows
        for sampler in samplers:
            for cell in sampler.deal(batch):
                inside = np.minimum(lengths[cell], most)
                padded += inside.max() * len(cell)
                real += inside.sum()
                assert inside.max() * len(cell) <= 1.12 * budget / (2 * world_size) + most
    assert 1 - real / padded < 0.05
    sizes = np.array([np.minimum(lengths[b], most).sum() for b in plan])
    assert sizes.std() / sizes.mean() < 0.05


def write_config(path, text):
    path.write_text(text)
    return str(path)


def test_config_has_every_key_of_the_original(tmp_path):
    """Each key of the original's YAML is an option or is refused with a reason; numbers may be strings to YAML."""
    original = """
work_dir: ./runs
model: {name: medium, type: ddit, hidden_size: 768, cond_dim: 256, length: 512, n_blocks_prot: 8, n_blocks_lig: 8,
  n_heads: 12, scale_by_sigma: True, dropout: 0.1, esm_dim: 640, molformer_dim: 768, device: "cuda:0"}
ngpus: 1
tokens: 36
training: {batch_size: 16, accum: 4, epochs: 50, max_samples: 50000000, num_workers: 4, seed: 42,
  force_reprocess: False, n_iters: 500000, snapshot_freq: 2000, log_freq: 100, eval_freq: 2000,
  snapshot_freq_for_preemption: 2000,
  weight: standard, snapshot_sampling: True, ema: 0.9995, task: protein_only, quick_gen_freq: 200}
data: {train: uniref50, valid: uniref50, cache_dir: data, train_ratio: 0.95, val_ratio: 0.05, max_protein_len: 512,
  max_ligand_len: 128, use_structure: False, vocab_size_ligand: 2364, vocab_size_protein: 36}
graph: {type: absorb, file: data, report_all: False}
noise: {type: cosine, sigma_min: 1e-4, sigma_max: 0.8, eps: 0.02}
sampling: {predictor: analytic, steps: 100, noise_removal: True}
eval: {batch_size: 16, perplexity: True, perplexity_batch_size: 8}
optim: {weight_decay: 0.01, optimizer: AdamW, lr: !!float "5e-5", beta1: 0.9, beta2: 0.999, eps: 1e-8, warmup: 5000,
  grad_clip: 1.0}
lr_schedule: {type: cosine_with_warmup, warmup_steps: 5000, max_steps: 500000, min_lr_ratio: 0.01}
curriculum: {enabled: True, preschool_time: 10000, difficulty_ramp: linear}
memory: {gradient_checkpointing: False, mixed_precision: True, max_memory_per_gpu: 0.85}
monitoring: {log_gradients: False, log_weights: False, sample_frequency: 2000}
ddp: {find_unused_parameters: False, broadcast_buffers: True, gradient_as_bucket_view: True, static_graph: False}
hydra: {run: {dir: exp_local}}
"""
    tree = yaml.safe_load(original.replace("vocab_size_ligand: 2364, ", ""))
    keys = [(section, key) for section, values in tree.items()
            for key in (values if isinstance(values, dict) else [None])]  # fmt: skip
    refused = {name for names in script.REFUSED for name in names.split()}
    plain = vars(script.parse_args([]))
    different = {"optimizer": "Adam", "type": None, "predictor": "analytic", "difficulty_ramp": "cosine"}
    for section, key in keys:
        name = section if key is None else f"{section}.{key}" if section != "hydra" else "hydra.run.dir"
        value = tree[section] if key is None else tree[section][key]
        if name in refused:
            continue
        number = not isinstance(value, (str, bool)) or str(value)[0].isdigit()
        changed = {"graph.type": "uniform", "noise.type": "geometric", "lr_schedule.type": "linear"}.get(name)
        changed = changed or different.get(key) or ("other" if not number else None)
        if isinstance(value, bool):
            changed = not value
        elif changed is None:
            changed = value // 2 if isinstance(value, int) else float(value) * 0.5
        nested = {section: changed} if key is None else {section: {key: changed}}
        path = write_config(tmp_path / "one.yaml", yaml.safe_dump(nested))
        read = vars(script.parse_args(["--config", path]))
        if isinstance(value, bool):
            nested = {section: {key: value}}
            plain = vars(script.parse_args(["--config", write_config(tmp_path / "two.yaml", yaml.safe_dump(nested))]))
        assert any(read[n] != plain[n] for n in plain if n not in ("config", "given", "changed")), name
    assert {f"{s}.{k}" if k else s for s, k in keys if s not in ("hydra", "defaults")} - refused


@pytest.mark.parametrize("name", sorted(n for names in script.REFUSED for n in names.split()))
def test_refused_key_says_why(name, tmp_path, capsys):
    tree: dict = {}
    node = tree
    *sections, last = name.split(".")
    for section in sections:
        node = node.setdefault(section, {})
    node[last] = 1
    with pytest.raises(SystemExit) as caught:
        script.parse_args(["--config", write_config(tmp_path / "c.yaml", yaml.safe_dump(tree))])
    reason = next(why for names, why in script.REFUSED.items() if name in names.split())
    error = capsys.readouterr().err
    assert caught.value.code == 2 and f"{name} ({reason})" in error and len(error.splitlines()) == 1


def test_config_errors_and_strings(tmp_path, capsys):
    read = script.parse_args(["--config", write_config(tmp_path / "c.yaml", "optim:\n  lr: 1e-4\n  warmup: 10000\n")])
    assert read.lr == 1e-4 and read.warmup == 10_000
    tagged = script.parse_args(["--config", write_config(tmp_path / "t.yaml", 'optim:\n  lr: !!float "3e-4"\n')])
    assert tagged.lr == 3e-4
    with pytest.raises(SystemExit):
        script.parse_args(["--config", write_config(tmp_path / "u.yaml", "training:\n  batch_sise: 4\n")])
    error = capsys.readouterr().err
    assert "training.batch_sise" in error and "batch_size" in error and "u.yaml" in error
    with pytest.raises(SystemExit):
        script.parse_args(["--config", write_config(tmp_path / "w.yaml", "memory:\n  max_memory_per_gpu: lots\n")])
    assert "max_memory_per_gpu" in capsys.readouterr().err


def test_both_names_of_an_option():
    assert script.parse_args(["optim.lr=1e-3"]).lr == script.parse_args(["--lr", "1e-3"]).lr == 1e-3
    assert script.parse_args(["training.accum=2"]).accumulation == 2
    assert script.parse_args(["--method=simple"]).sampling_method == "simple"
    assert script.parse_args(["--work_dir=x"]).output_dir == "x"
    assert script.parse_args(["--global_batch_size=64"]).lr_scaling == "none"


def test_weak_noise_is_warned_about(capfd):
    ddp = script.DDPContext(0, 1, 0, 1, torch.device("cpu"), "gloo", "test")
    script.start_logging(0)
    script.build_task(arguments("--noise.type=cosine", "--noise.sigma_max=0.8"), ddp, {20: 1})
    assert "55.1%" in capfd.readouterr().out
    script.build_task(arguments(), ddp, {20: 1})
    assert "noise schedule" not in capfd.readouterr().out


def test_json_of_the_manifest_is_plain():
    json.dumps(script.RATES)
    assert sys.modules["run_train_uniref50_ddp"].__file__ == str(ROOT / "run_train_uniref50_ddp.py")


def test_rotary_embedding():
    """Products of rotated queries and keys depend on their distance alone; the rotation is by the standard angles."""
    network = model()
    q, k = torch.randn(16), torch.randn(16)
    rotated = [script.rotate(v.repeat(40, 1), network.turns) for v in (q, k)]
    products = rotated[0] @ rotated[1].T
    for distance in (0, 3, 11):
        line = products.diagonal(distance)
        assert torch.allclose(line, line[0].expand_as(line), atol=1e-4)
    angle = 5 * 1e4 ** (-2 * torch.arange(8) / 16)
    expected = q[::2] * angle.cos() - q[1::2] * angle.sin()
    assert torch.allclose(rotated[0][5, ::2], expected, atol=1e-5)
    compiled = torch.compile(script.rotate, backend="eager")  # the form for GPUs
    assert torch.allclose(compiled(q.repeat(40, 1), network.turns), rotated[0], atol=1e-5)


def test_dropout():
    """Share, scale and gradient of the CPU's own dropout; none in evaluation; another mask every time."""
    block = script.Block(32, 2, 16, 0.3).train()
    x = torch.randn(50, 40, 32, requires_grad=True)
    y = block.drop(x)
    kept = y != 0
    assert abs(kept.float().mean() - 0.7) < 5 * (0.21 / x.numel()) ** 0.5
    assert torch.allclose(y[kept], x[kept] / 0.7)
    y.sum().backward()
    assert torch.allclose(x.grad, kept / 0.7)
    assert not torch.equal(kept, block.drop(x) != 0)
    columns = kept.float().reshape(-1, 4).mean(0)  # the four elements of one random number
    assert (columns - 0.7).abs().max() < 0.02
    pairs = torch.corrcoef(kept.float().reshape(-1, 4).T) - torch.eye(4)
    assert pairs.abs().max() < 0.03
    assert torch.equal(block.eval().drop(x), x)


@pytest.mark.parametrize("options, said", [
    (["--graph_type=uniform", "--loss=score_entropy"], "has no sampler"),
    (["--infill=motifs.fasta"], "belong to --sample"),
    (["--out=samples.fasta"], "belong to --sample"),
    (["--checkpoint=best.pt"], "belong to --sample"),
    (["--sample=2", "--prepare", "in.fasta", "out"], "one of the two"),
    (["--sample=2", "--sample_length=-1"], "must not be negative"),
])  # fmt: skip
def test_options_without_effect_are_refused(options, said, capsys):
    with pytest.raises(SystemExit) as caught:
        script.parse_args(options)
    error = capsys.readouterr().err
    assert caught.value.code == 2 and said in error and len(error.splitlines()) == 1
