"""Samplers of run_train_uniref50_ddp.py against exact laws, and its sample metrics against hand-computed values.

The predictors are oracles: their p(x0 | x_t) is exact, so a sampler's law must be the oracle's own.
"""

from __future__ import annotations

import gzip
import itertools
import math
from argparse import Namespace

import numpy as np
import pytest
import torch
from helpers import one_process, run_ranks, write_proteins

import run_train_uniref50_ddp as script

BOS, PAD, EOS, MASK, FIRST, LAST = 0, 1, 2, 36, 5, 30
N = LAST - FIRST + 1


def loglinear(t: torch.Tensor) -> torch.Tensor:
    return -torch.log1p(-(1 - 1e-3) * t)


def poor(t: torch.Tensor) -> torch.Tensor:
    """At most 55 % masked, and 1 % at the end."""
    return 0.01 + 0.79 * (1 - torch.cos(math.pi * t)) / 2


def how(**changes) -> Namespace:
    """The script's arguments that say how to sample."""
    values = dict(seed=3, steps=100, temperature=1.0, top_p=1.0, graph_type="absorb", sampling_method="rigorous")
    return Namespace(**values | dict(predictor=None, eval_batch_size=100_000) | changes)


class Chain:
    """A first-order Markov chain over the first len(start) residues. predict: p(x0 | x_t) by forward-backward, where a
    residue at x_t is certain (absorb) or was kept with probability exp(-sigma), else drawn from 26 (uniform)."""

    def __init__(self, start, step, graph: str = "absorb"):
        self.start, self.step = (torch.from_numpy(np.array(p, float)) for p in (start, step))
        self.graph, self.calls = graph, []

    def predict(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.int64 and sigma.dtype == torch.float32 and sigma.shape == x.shape[:1]
        self.calls.append((x.clone(), sigma.clone()))
        letters = FIRST + torch.arange(len(self.start))
        keep = torch.ones(len(x)) if self.graph == "absorb" else torch.exp(-sigma)
        keep = keep.double()[:, None, None]
        seen = keep * (x[..., None] == letters) + (1 - keep) / N
        seen = torch.where(((x >= FIRST) & (x <= LAST))[..., None], seen, 1.0)
        before, after = torch.ones_like(seen), torch.ones_like(seen)
        before[:, 1] = self.start
        for j in range(2, x.shape[1]):
            before[:, j] = (before[:, j - 1] * seen[:, j - 1]) @ self.step
        for j in range(x.shape[1] - 2, 0, -1):
            after[:, j] = (after[:, j + 1] * seen[:, j + 1]) @ self.step.T
        p = before * seen * after
        logits = torch.full((*x.shape, 37), -math.inf)
        logits[..., FIRST : FIRST + len(self.start)] = (p / p.sum(-1, keepdim=True)).log().float()
        return logits

    def law(self, length: int) -> np.ndarray:
        """(A**length,) probability of each sequence, the first letter the slowest."""
        p, start, step = [], self.start.numpy(), self.step.numpy()
        for word in itertools.product(range(len(start)), repeat=length):
            p.append(start[word[0]] * math.prod(step[a, b] for a, b in itertools.pairwise(word)))
        return np.array(p)


def sticky(graph: str = "absorb") -> Chain:
    """Neighbours depend on each other strongly, letters and places differ."""
    return Chain([0.5, 0.3, 0.2], [[0.75, 0.2, 0.05], [0.1, 0.8, 0.1], [0.3, 0.05, 0.65]], graph)


def empty(count: int, length: int) -> list[np.ndarray]:
    return [np.array([BOS] + [MASK] * length + [EOS], dtype=np.uint8)] * count


def template(text: str) -> np.ndarray:
    ids = {letter: FIRST + i for i, letter in enumerate(script.RESIDUES)} | {"?": MASK}
    return np.array([BOS, *(ids[c] for c in text), EOS], dtype=np.uint8)


def residues(text: str) -> np.ndarray:
    return template(text)[1:-1]


def draw(chain, templates, method=None, batch_size=100_000, ddp=None, sigma=loglinear, **changes) -> list[np.ndarray]:
    """Samples of a Chain, or of a function predict; by default by the exact method of its graph."""
    predict, graph = getattr(chain, "predict", chain), getattr(chain, "graph", "absorb")
    method = {"sampling_method": "simple"} if method == "simple" else {"predictor": method}
    args = how(**{"graph_type": graph, "eval_batch_size": batch_size} | method | changes)
    return script.sample(predict, templates, Namespace(sigma=sigma), args, ddp or one_process())


def counts(samples: list[np.ndarray], letters: int) -> np.ndarray:
    words = np.stack(samples).astype(np.int64) - FIRST
    assert words.min() >= 0 and words.max() < letters
    weights = letters ** np.arange(words.shape[1])[::-1]
    return np.bincount(words @ weights, minlength=letters ** words.shape[1])


def excess(found: np.ndarray, law: np.ndarray) -> float:
    """Chi-square of the counts, cells that expect below 5 joined, in standard deviations above its mean: agreement is
    below 4."""
    expected = law * found.sum()
    rare = expected < 5
    found, expected = (np.r_[values[~rare], values[rare].sum()][: None if rare.any() else -1]
                       for values in (found, expected))
    degrees = len(found) - 1
    return (((found - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * degrees)


# ---- Laws ----


@pytest.mark.parametrize("method, count, calls", [("first_hitting", 8000, 4), ("analytic", 4000, 150)])
def test_exact_samplers_give_the_law_of_whole_sequences(method, count, calls):
    chain = sticky()
    assert excess(counts(draw(chain, empty(count, 4), method, steps=150), 3), chain.law(4)) < 4
    assert len(chain.calls) == calls
    # the same count does see a sampler that draws positions independently
    assert excess(counts(draw(chain, empty(count, 4), "analytic", steps=1), 3), chain.law(4)) > 50


def test_exact_samplers_on_independent_letters_need_one_step():
    p = np.array([0.6, 0.25, 0.1, 0.05])
    chain = Chain(p, [p] * 4)
    for method in ("first_hitting", "analytic"):
        found = np.bincount(np.concatenate(draw(chain, empty(600, 20), method, steps=1)) - FIRST, minlength=4)
        assert excess(found, p) < 4


def test_analytic_uniform_gives_the_law_of_whole_sequences():
    chain = sticky("uniform")
    assert excess(counts(draw(chain, empty(2500, 4), steps=60), 3), chain.law(4)) < 4
    assert all(x[0, 0] == BOS and x[0, -1] == EOS for x, _ in chain.calls)
    assert excess(counts(draw(chain, empty(2500, 4), steps=1), 3), chain.law(4)) > 20


@pytest.mark.parametrize("steps", [1, 3])
def test_analytic_uniform_is_exact_for_one_position_at_any_number_of_steps(steps):
    chain = Chain([0.5, 0.3, 0.2], [[1 / 3] * 3] * 3, "uniform")
    assert excess(counts(draw(chain, empty(20_000, 1), steps=steps), 3), chain.law(1)) < 4
    start = chain.calls[0][0][:, 1]
    assert excess(np.bincount(start - FIRST, minlength=N), np.full(N, 1 / N)) < 4


def test_uniform_posterior_is_bayes_rule_over_all_x0():
    """By matrices: q(x_s | x_t, x0) = Q(x_s -> x_t) Q(x0 -> x_s) / Q(x0 -> x_t), mixed over p(x0)."""
    a_t, a_s = torch.tensor(0.3, dtype=torch.float64), torch.tensor(0.7, dtype=torch.float64)
    eye = torch.eye(N, dtype=torch.float64)
    to_s, to_t, between = (a * eye + (1 - a) / N for a in (a_s, a_t, a_t / a_s))
    p = torch.rand(4, N, generator=torch.Generator().manual_seed(0), dtype=torch.float64).softmax(-1)
    now = torch.tensor([0, 3, 25, 3])
    wanted = torch.stack([
        sum(p[i, x0] * between[:, x_t] * to_s[x0] / to_t[x0, x_t] for x0 in range(N)) for i, x_t in enumerate(now)
    ])
    assert torch.allclose(script.uniform_posterior(p, now, a_t, a_s), wanted, atol=1e-14)
    assert torch.allclose(wanted.sum(-1), torch.ones(4, dtype=torch.float64))


def test_simple_is_an_approximation_and_its_distance_is_known(record_property):
    """Total variation from the law of sequences: beyond the sampling error that the exact sampler shows."""
    chain, distance = sticky(), {}
    for method in ("simple", "first_hitting"):
        found = counts(draw(chain, empty(8000, 4), method, steps=4), 3)
        distance[method] = np.abs(found / found.sum() - chain.law(4)).sum() / 2
        record_property(f"total_variation_{method}", round(float(distance[method]), 4))
    assert distance["first_hitting"] < 0.04 and 0.1 < distance["simple"] < 0.6


# ---- Times and calls ----


@pytest.mark.parametrize("sigma", [loglinear, poor])
def test_first_hitting_times(sigma):
    """The largest of n rates uniform on [0, m(1)] has mean n / (n + 1) of it; they fall; sigma is -log(1 - m)."""
    chain = sticky()
    draw(chain, empty(4000, 5), "first_hitting", sigma=sigma)
    most = -torch.expm1(-sigma(torch.ones((), dtype=torch.float64)))
    rates = -torch.expm1(-torch.stack([now.double() for _, now in chain.calls])) / most
    assert (rates.diff(dim=0) <= 0).all()
    assert rates.mean(1).tolist() == pytest.approx([5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6], abs=0.015)
    masked = torch.stack([(x == MASK).sum(1) for x, _ in chain.calls])
    assert (masked == torch.arange(5, 0, -1)[:, None]).all()
    places = (chain.calls[1][0] != MASK)[:, 1:6].double().mean(0)  # any of the five is first
    assert places.tolist() == pytest.approx([0.2] * 5, abs=0.025)


def test_analytic_calls_the_network_only_where_something_is_revealed():
    chain = sticky()
    (one,) = draw(chain, empty(1, 3), "analytic", steps=1000)
    assert len(one) == 3 and len(chain.calls) <= 3
    chain.calls.clear()
    draw(chain, empty(3000, 4), "analytic", steps=8)
    times = torch.linspace(1, 0, 9, dtype=torch.float64)
    assert torch.allclose(torch.stack([sigma[0] for _, sigma in chain.calls]), loglinear(times[:-1]).float())
    masked = [(x == MASK).double().sum().item() / 12_000 for x, _ in chain.calls]
    assert masked == pytest.approx(times[:-1].tolist(), abs=0.02)  # loglinear: the share masked is the time


def test_analytic_reveals_all_where_the_schedule_ends_above_zero():
    for method, calls in (("first_hitting", 6), ("analytic", 4), ("simple", 3)):
        chain = sticky()
        assert all(s.max() <= FIRST + 2 for s in draw(chain, empty(100, 6), method, steps=4, sigma=poor))
        assert len(chain.calls) == calls  # none after the last step
    found = counts(draw(Chain([0.9, 0.1], [[0.5, 0.5]] * 2, "uniform"), empty(4000, 1), steps=4, sigma=poor), 2)
    assert excess(found, np.array([0.9, 0.1])) < 4


def test_simple_follows_its_schedule_and_never_changes_what_it_showed():
    chain = sticky()
    draw(chain, empty(40, 30), "simple", steps=6)
    shares = [math.cos(math.pi / 2 * k / 6) for k in range(6)]
    for (x, sigma), share in zip(chain.calls, shares, strict=True):
        assert ((x == MASK).sum(1) == 30 - round(30 * (1 - share))).all()
        assert torch.allclose(-torch.expm1(-sigma), torch.tensor(share * (1 - 1e-3)))
    for (old, _), (new, _) in itertools.pairwise(chain.calls):
        assert (new == old)[old != MASK].all()
    chain.calls.clear()
    draw(chain, empty(3, 2), "simple", steps=50)
    assert len(chain.calls) == 2  # steps that show nothing are free


def test_simple_shows_the_most_confident_first(monkeypatch):
    monkeypatch.setattr(script, "SHUFFLE", 0.0)

    def predict(x, sigma):  # position j is sure with probability rising in j
        logits = torch.full((*x.shape, 37), -math.inf)
        logits[..., FIRST] = torch.arange(x.shape[1]).float()
        logits[..., FIRST + 1] = 0.0
        seen.append((x[0] == MASK).nonzero()[:, 0].tolist())
        return logits

    for temperature in (0.0, 1e-3):  # candidates are certain, confidence must not be
        seen = []
        draw(predict, empty(2, 6), "simple", steps=3, temperature=temperature)
        assert seen == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5], [1, 2, 3]]


# ---- Temperature, top-p, numerics ----


@pytest.mark.parametrize("method", ["first_hitting", "analytic", "simple"])
def test_temperature_zero_is_the_most_probable(method):
    p = [0.3, 0.45, 0.25]
    chain = Chain(p, [p] * 3)
    for temperature in (0.0, 1e-4):
        assert (np.stack(draw(chain, empty(50, 4), method, temperature=temperature)) == FIRST + 1).all()
    assert (np.stack(draw(chain, empty(50, 4), method, temperature=1.0)) != FIRST + 1).any()


def test_temperature_is_a_power_of_the_law():
    p = np.array([0.6, 0.25, 0.1, 0.05])
    chain = Chain(p, [p] * 4)
    for temperature in (0.5, 2.0):
        found = np.bincount(np.concatenate(draw(chain, empty(500, 20), temperature=temperature)) - FIRST, minlength=4)
        assert excess(found, p ** (1 / temperature) / (p ** (1 / temperature)).sum()) < 4


def test_probabilities_are_float64():
    logits = torch.full((2, 37), -math.inf)
    logits[:, FIRST : LAST + 1] = torch.linspace(-30, 3, N)
    p = script.residue_probabilities(logits, how())
    assert p.dtype == torch.float64 and p.sum(-1).tolist() == pytest.approx([1.0, 1.0], abs=1e-14)
    assert (p[0, 0] / p[0, -1]).item() == pytest.approx(math.exp(-33), rel=1e-6)


def test_top_p_leaves_the_tail_out_and_keeps_the_ratios():
    p = np.array([0.1, 0.5, 0.05, 0.35])
    chain = Chain(p, [p] * 4)
    for top_p, kept in ((0.8, [1, 3]), (0.9, [0, 1, 3]), (0.4, [1]), (1.0, [0, 1, 2, 3])):
        found = np.bincount(np.concatenate(draw(chain, empty(500, 20), top_p=top_p)) - FIRST, minlength=4)
        assert np.flatnonzero(found).tolist() == kept
        if len(kept) > 1:
            assert excess(found[kept], p[kept] / p[kept].sum()) < 4


def test_categorical_at_the_ends_and_in_the_tail():
    p = torch.zeros(3, N, dtype=torch.float64)
    p[:, 2], p[:, 9] = 0.25, 0.75
    u = torch.tensor([0.0, 0.25, 1 - 2.0**-48], dtype=torch.float64)
    assert script.categorical(p, u).tolist() == [FIRST + 2, FIRST + 9, FIRST + 9]
    rare = torch.tensor([[1 - 2.0**-30, 2.0**-30] + [0.0] * (N - 2)], dtype=torch.float64)  # float32 would lose it
    u = torch.tensor([1 - 2.0**-31], dtype=torch.float64)
    assert script.categorical(rare, u).tolist() == [FIRST + 1]


def test_uniforms_are_fine_and_keyed():
    u = script.sample_uniform(5, torch.arange(200), 300, 7)
    assert u.dtype == torch.float64 and 0 <= u.min() and u.max() < 1
    assert len(u.unique()) == u.numel()  # of 60,000 draws of 24 bits about 100 would be equal
    assert torch.equal(u * 2**48, (u * 2**48).floor()) and ((u * 2**24) % 1).std() > 0.28
    assert excess(np.histogram(u, 50, (0, 1))[0], np.full(50, 0.02)) < 4
    assert torch.equal(script.sample_uniform(5, torch.tensor([17, 3]), 40, 7), u[[17, 3], :40])
    others = [script.sample_uniform(*key) for key in ((6, torch.arange(200), 300, 7), (5, torch.arange(200), 300, 8),
                                                     (5, torch.arange(200), 300, 7, 1))]
    assert all(abs(np.corrcoef(u.flatten(), other.flatten())[0, 1]) < 0.02 for other in others)


@pytest.mark.parametrize("graph", ["absorb", "uniform"])
def test_logits_that_are_not_finite_are_an_error(graph):
    def predict(x, sigma):
        assert x.max() <= MASK  # an embedding of 37 rows can be looked up
        return torch.full((*x.shape, 37), -math.inf).index_fill(-1, torch.arange(FIRST, LAST + 1), math.nan)

    for method in [method for of, method in script.SAMPLERS if of == graph]:
        for temperature in (0.0, 1.0):
            with pytest.raises(RuntimeError, match="not finite"):
                draw(predict, empty(2, 3), method, graph_type=graph, temperature=temperature)


# ---- Independence of batch, padding and ranks ----


METHODS = [("absorb", "first_hitting"), ("absorb", "analytic"), ("absorb", "simple"), ("uniform", "analytic")]


def mixed() -> list[np.ndarray]:
    return [template("?" * n) for n in (9, 3, 14, 3, 1, 11, 6)] + [template("A??C?"), template("CC????????A")]


@pytest.mark.parametrize("graph, method", METHODS)
def test_samples_do_not_depend_on_batch_and_padding(graph, method):
    alone = draw(sticky(graph), mixed(), method, batch_size=1, steps=7)
    assert [len(s) for s in alone] == [len(t) - 2 for t in mixed()]
    assert all(s.dtype == np.uint8 for s in alone)
    for batch_size in (2, 4, 100):
        chain = sticky(graph)
        together = draw(chain, mixed(), method, batch_size=batch_size, steps=7)
        assert all(np.array_equal(a, b) for a, b in zip(alone, together, strict=True))
        assert max(len(x) for x, _ in chain.calls) == min(batch_size, 9)
    assert len({s.tobytes() for s in draw(sticky(graph), empty(20, 12), method, steps=7)}) > 12  # ids differ
    other = draw(sticky(graph), mixed(), method, steps=7, seed=4)
    assert not all(np.array_equal(a, b) for a, b in zip(alone, other, strict=True))


def test_batches_are_of_similar_length():
    chain = sticky()
    draw(chain, [template("?" * n) for n in (20, 2, 19, 3, 18, 4)], batch_size=3)
    assert {x.shape for x, _ in chain.calls} == {(3, 6), (3, 22)}


def samples_of_rank(ddp) -> tuple[list[list[np.ndarray]], list[int]]:
    chains = [sticky(graph) for graph, _ in METHODS]
    done = [draw(chain, mixed(), method, batch_size=2, ddp=ddp, steps=7)
            for chain, (_, method) in zip(chains, METHODS, strict=True)]
    return done, sorted({x[0, 1:].tolist().count(MASK) for x, _ in chains[0].calls})


@pytest.mark.parametrize("world_size", [2, 3])
def test_samples_do_not_depend_on_the_number_of_ranks(world_size):
    wanted = [draw(sticky(graph), mixed(), method, steps=7) for graph, method in METHODS]
    results = run_ranks(world_size, samples_of_rank)
    for done, _ in results:
        for a, b in zip(wanted, done, strict=True):
            assert all(np.array_equal(s, t) for s, t in zip(a, b, strict=True))
    assert any(seen != results[0][1] for _, seen in results[1:])  # not each rank drew everything


# ---- Templates, infilling, FASTA ----


@pytest.mark.parametrize("graph, method", METHODS)
def test_given_positions_never_change(graph, method):
    given = [template(text) for text in ("A?CA??C?D??", "A?CCDAACDAC")] * 20  # some rows are done before others
    wanted, chain = torch.from_numpy(np.stack(given).astype(np.int64)), sticky(graph)
    found = np.stack(draw(chain, given, method, steps=9, temperature=2.0))
    fixed = (wanted != MASK).numpy()
    assert (found == wanted[:, 1:-1].numpy())[fixed[:, 1:-1]].all()
    assert FIRST <= found.min() and found.max() <= LAST
    for x, _ in chain.calls:  # nor on the way, the ends included
        assert (x == wanted).numpy()[fixed].all()


def test_infilling_follows_the_conditional_law():
    chain = sticky()
    law = chain.law(5).reshape([3] * 5)[1, :, :, 2, :]
    found = np.stack(draw(chain, [template("C??D?")] * 6000, "first_hitting")) - FIRST
    found = np.bincount(found[:, [1, 2, 4]].astype(np.int64) @ [9, 3, 1], minlength=27)
    assert excess(found, (law / law.sum()).flatten()) < 4


def test_lengths_are_drawn_from_the_histogram():
    lengths = {30: 500, 100: 300, 700: 150, 2000: 50}
    args = Namespace(max_protein_len=512, sample_length=0, seed=1)
    found = [len(t) - 2 for t in script.draw_templates(4000, lengths, args)]
    values, seen = np.unique(found, return_counts=True)
    assert values.tolist() == [30, 100, 510] and excess(seen, np.array([0.5, 0.3, 0.2])) < 4
    assert found[:7] == [len(t) - 2 for t in script.draw_templates(7, lengths, args)]
    args.seed = 2
    assert found != [len(t) - 2 for t in script.draw_templates(4000, lengths, args)]
    args.sample_length = 600
    assert [len(t) for t in script.draw_templates(2, lengths, args)] == [602, 602]  # asked for: not cut
    args.sample_length = 4
    (one,) = script.draw_templates(1, lengths, args)
    assert one.dtype == np.uint8 and one.tolist() == [BOS, MASK, MASK, MASK, MASK, EOS]


@pytest.mark.parametrize("zipped", [False, True])
def test_infill_templates(tmp_path, zipped):
    text = ">one a motif\nMK??\n?w\n\n>two\r\nX?\r\n"
    path = tmp_path / ("in.fa.gz" if zipped else "in.fa")
    path.write_bytes(gzip.compress(text.encode()) if zipped else text.encode())
    templates, names = script.infill_templates(path, 2)
    assert names == ["one/1", "one/2", "two/1", "two/2"]
    assert [t.tolist() for t in templates] == [template("MK???W").tolist()] * 2 + [template("X?").tolist()] * 2
    assert all(t.dtype == np.uint8 for t in templates)


@pytest.mark.parametrize("text, message", [
    (">a\nM?K\n>bad one\nM*?J-\n", r"record 2 \(bad\) has \['\*', '-'\] and 1 '\?'"),
    (">a\nMKV\n", r"record 1 \(a\) has \[\] and 0 '\?'"),
    ("", "expected FASTA"),
    (">a\n\xe9?\n", r"record 1 \(a\)"),
])
def test_infill_errors_name_file_and_record(tmp_path, text, message):
    path = tmp_path / "motifs.fasta"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=f"motifs.fasta: .*{message}"):
        script.infill_templates(path, 1)


def test_text_before_the_first_header_is_an_error(tmp_path):
    """It belongs to no record, so it must not become part of one."""
    (tmp_path / "motifs.fasta").write_text("MKV\n>a\nM?\n")
    with pytest.raises(ValueError, match="motifs.fasta"):
        script.infill_templates(tmp_path / "motifs.fasta", 1)


def test_fasta_reads_back(tmp_path):
    samples = [residues(script.RESIDUES * 5), residues("MKV"), residues("W" * 80)]
    path = tmp_path / "out.fasta"
    script.write_fasta(path, samples, "step=7 seed=3")
    text = path.read_text()
    assert text.startswith(">sample_0 step=7 seed=3 length=130\n" + (script.RESIDUES * 5)[:80] + "\n")
    bodies = ["".join(record.split("\n")[1:]) for record in text.split(">")[1:]]
    assert bodies == [script.RESIDUES * 5, "MKV", "W" * 80] and max(map(len, text.split("\n"))) == 80
    script.write_fasta(path, samples[:2], "x", ["one/1", "one/2"])
    assert ">one/2 x length=3\n" in path.read_text()


# ---- Metrics ----


def random_sequences(count: int, seed: int, low: int = 5, high: int = 60, letters: int = 20) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(FIRST, FIRST + letters, rng.integers(low, high)).astype(np.uint8) for _ in range(count)]


def kl(p, q) -> float:
    return sum(x * math.log(x / y) for x, y in zip(p, q, strict=True) if x)


def js(p, q) -> float:
    middle = [(x + y) / 2 for x, y in zip(p, q, strict=True)]
    return (kl(p, middle) + kl(q, middle)) / 2


def metrics_of(samples, reference) -> dict[str, float]:
    return script.sample_metrics(samples, reference, torch.device("cpu"))


def test_metrics_by_hand():
    samples = [residues(s) for s in ("AAAAC", "AAC", "AAC")]
    reference = [residues(s) for s in ("ACAC", "CCAA", "AAAAAAA")]
    found = metrics_of(samples, reference)
    # residues: A 8, C 3 against A 11, C 4 (and half a count each of 26 in KL)
    p, q, r = (8 / 11, 3 / 11), (11 / 15, 4 / 15), (11.5 / 28, 4.5 / 28)
    assert found["residue_kl"] == pytest.approx(kl(p, r))
    assert found["residue_js"] == pytest.approx(js(p, q))
    # 2-mers AA AC CA CC within sequences: 5 3 0 0 of 8 against 7 2 2 1 of 12 (1 + 6, 2, 1 + 1, 1)
    assert found["2mer_js"] == pytest.approx(js((5 / 8, 3 / 8, 0, 0), (7 / 12, 2 / 12, 2 / 12, 1 / 12)))
    # 3-mers AAA AAC ACA CAC CCA CAA: 2 3 0 0 0 0 against 5 0 1 1 1 1
    assert found["3mer_js"] == pytest.approx(js((0.4, 0.6, 0, 0, 0, 0), (5 / 9, 0, 1 / 9, 1 / 9, 1 / 9, 1 / 9)))
    # lengths 5 3 3 against 4 4 7: sorted pairs differ by 1, 1, 2
    assert found["length_wasserstein"] == pytest.approx(4 / 3)
    assert found["repeats"] == pytest.approx(4 / 11)
    assert found["uniqueness"] == pytest.approx(2 / 3)
    assert found["identity_mean"] == pytest.approx((4 / 5 + 2 / 3 + 2 / 3) / 3)
    assert found["identity_max"] == pytest.approx(4 / 5)
    assert all(isinstance(value, float) for value in found.values())


def test_a_sample_of_the_reference_scores_zero():
    reference = random_sequences(50, 1)
    found = metrics_of(reference, reference)
    for name in ("residue_js", "2mer_js", "3mer_js", "length_wasserstein"):
        assert found[name] == pytest.approx(0.0, abs=1e-12)
    assert found["identity_mean"] == found["identity_max"] == found["uniqueness"] == 1.0
    apart = metrics_of([residues("AAAA")], [residues("CCCC")])
    assert apart["residue_js"] == pytest.approx(math.log(2)) and apart["identity_max"] == 0.0


def test_metrics_against_scipy():
    distance = pytest.importorskip("scipy.spatial.distance")
    stats = pytest.importorskip("scipy.stats")
    samples, reference = random_sequences(40, 2, letters=26), random_sequences(30, 3, 10, 90, letters=12)
    found = metrics_of(samples, reference)
    mono, other = (np.bincount(np.concatenate(s) - FIRST, minlength=26) for s in (samples, reference))
    assert found["residue_js"] == pytest.approx(distance.jensenshannon(mono, other) ** 2)
    assert found["residue_kl"] == pytest.approx(stats.entropy(mono, other + 0.5))
    for k in (2, 3):
        a, b = ({}, {})
        for counted, sequences in ((a, samples), (b, reference)):
            for s in sequences:
                for i in range(len(s) - k + 1):
                    counted[s[i : i + k].tobytes()] = counted.get(s[i : i + k].tobytes(), 0) + 1
        words = sorted(a | b)
        wanted = distance.jensenshannon([a.get(w, 0) for w in words], [b.get(w, 0) for w in words]) ** 2
        assert found[f"{k}mer_js"] == pytest.approx(wanted)
    lengths = [[len(s) for s in sequences] for sequences in (samples, reference)]
    assert found["length_wasserstein"] == pytest.approx(stats.wasserstein_distance(*lengths))


def test_repeats_are_runs_of_four_within_a_sequence():
    texts = {"CAA AAC": 0, "CAAA AC": 0, "CAAAA": 4, "AAAACCCCCC D": 10, "AAA": 0}
    for text, repeated in texts.items():
        samples = [residues(part) for part in text.split()]
        found = metrics_of(samples, [residues("ACD")])["repeats"]
        assert found == pytest.approx(repeated / len(text.replace(" ", "")))


def test_metrics_of_sequences_too_short_for_kmers():
    found = metrics_of([residues("A"), residues("C")], [residues("AC")])
    assert "2mer_js" not in found and "3mer_js" not in found and found["residue_js"] == pytest.approx(0.0)


def test_identity_against_a_loop():
    samples = random_sequences(66, 5, 1, 20, letters=4)  # more than one chunk of each
    reference = random_sequences(66, 6, 1, 40, letters=4)
    wanted = []
    for a in samples:
        best = 0.0
        for b in reference:
            for shift in range(-len(a) + 1, len(b)):
                x, y = a[max(0, -shift) :], b[max(0, shift) :]
                n = min(len(x), len(y))
                best = max(best, (x[:n] == y[:n]).sum() / min(len(a), len(b)))
        wanted.append(best)
    assert script.best_identity(samples, reference, torch.device("cpu")).tolist() == pytest.approx(wanted)
    assert script.best_identity([residues("WA")], [residues("AW")], torch.device("cpu")) == 0.5  # not in a circle
    copied = np.r_[reference[10], residues("WW")]
    assert metrics_of([copied], reference)["identity_max"] == 1.0


# ---- Whole runs of it ----


SMALL = "--hidden_size=32 --n_blocks_prot=2 --n_heads=2 --cond_dim=16 --max_protein_len=40".split()


@pytest.mark.parametrize("loss, option, allowed", [
    ("nelbo", "--predictor=analytic", True),
    ("nelbo", "--method=simple", False),
    ("nelbo", "--predictor=first_hitting", False),
    ("score_entropy", "--predictor=analytic", False),
])
def test_samplers_of_a_uniform_checkpoint(tmp_path, loss, option, allowed):
    """That the graph is uniform is known from the checkpoint alone, not from the command line of --sample."""
    trained = script.parse_args([*SMALL, "--graph_type=uniform", f"--loss={loss}", "--snapshot_sampling=False"])
    task = script.build_task(trained, one_process(), {8: 1})
    state = {"script": "run_train_uniref50_ddp.py", "args": {name: getattr(trained, name) for name in script.MODEL}}
    torch.save(state | {"step": 3, "lengths": task.lengths, "ema": task.average}, tmp_path / "best.pt")
    out = tmp_path / "samples.fasta"
    args = script.parse_args(["--sample=2", f"--checkpoint={tmp_path}/best.pt", f"--out={out}", "--steps=2", option])
    if allowed:
        assert script.write_samples(args, one_process()) == 0
        assert out.read_text().count(">") == 2
    else:
        with pytest.raises(ValueError, match="the uniform graph has the analytic sampler only, and none after --loss"):
            script.write_samples(args, one_process())
        assert not out.exists()


def validated(ddp, folder: str) -> tuple[int, dict]:
    """How often this rank compared samples with the training data in an evaluation, and the record of them."""
    calls, records, plain = [], [], script.sample_metrics
    script.sample_metrics = lambda *given: calls.append(given) or plain(*given)
    args = script.parse_args([*SMALL, f"--output_dir={folder}", "--samples_per_eval=3", "--eval_sequences=5"])
    task = script.build_task(args, ddp, {8: 1}, *(script.Proteins(f"{folder}/data", split) for split in script.SPLITS))
    script.validate(task, script.Progress(step=4), Namespace(write=records.append, reset=list))
    return len(calls), records[-1]


def test_rank_0_alone_compares_the_samples(tmp_path):
    write_proteins(tmp_path / "proteins.fasta", 60)
    args = Namespace(val_ratio=0.2, num_workers=0, skip_bad_data=False)
    script.prepare(f"{tmp_path}/proteins.fasta", f"{tmp_path}/data", args)
    (calls, record), (others, same) = run_ranks(2, validated, str(tmp_path))
    assert (calls, others) == (1, 0) and record == same and record["sample_residue_js"] > 0
    assert (tmp_path / "samples" / "step_00000004.fasta").read_text().count(">") == 3
