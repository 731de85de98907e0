"""The losses of train_ddp.py against closed forms and public libraries, and their gradients across ranks."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import run_ranks

import train_ddp


def unit(*shape: int, seed: int = 0) -> torch.Tensor:
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64), dim=-1)


@pytest.mark.parametrize("dim", [8, 768])
def test_distance_is_a_sum_over_dimensions(dim):
    """|s - t|^2 = 2 (1 - cos) for unit vectors of any size: the weights mean the same for every D."""
    s, t = unit(5, dim, seed=1), unit(5, dim, seed=2)
    cosine = F.cosine_similarity(s, t)
    assert torch.allclose(train_ddp.distance_loss(s, t, 1.0, 0.0), 2 * (1 - cosine))
    assert torch.allclose(train_ddp.distance_loss(s, t, 0.4, 0.6), 1.4 * (1 - cosine))
    assert torch.allclose(train_ddp.distance_loss(s, s, 0.4, 0.6), torch.zeros(5, dtype=torch.float64), atol=1e-12)


def test_infonce_against_its_definition():
    q, d = unit(4, 16, seed=3).float(), unit(10, 16, seed=4).float()
    labels, masked = torch.tensor([0, 1, 2, 3]), torch.zeros(4, 10, dtype=torch.bool)
    masked[0, 5] = masked[2, 9] = True
    losses, logits = train_ddp.infonce_loss(q, d, labels, masked, 0.02)
    for i in range(4):
        kept = [j for j in range(10) if not masked[i, j]]
        scores = torch.stack([q[i] @ d[j] / 0.02 for j in kept])
        assert losses[i].item() == pytest.approx((torch.logsumexp(scores, 0) - scores[kept.index(i)]).item(), rel=1e-5)
    assert logits[0, 5] == -math.inf


def test_infonce_is_multiple_negatives_ranking_loss():
    """The same number as sentence-transformers' loss on the same vectors (scale 1 / temperature)."""
    losses = pytest.importorskip("sentence_transformers.sentence_transformer").losses
    q, d = unit(6, 16, seed=5).float(), unit(6, 16, seed=6).float()
    theirs = losses.MultipleNegativesRankingLoss(None, scale=50.0).compute_loss_from_embeddings([q, d], None)
    ours, _ = train_ddp.infonce_loss(q, d, torch.arange(6), torch.zeros(6, 6, dtype=torch.bool), 0.02)
    assert ours.mean().item() == pytest.approx(theirs.item(), rel=1e-5)


def test_kl_against_torch():
    logits = torch.randn(3, 7, requires_grad=True, dtype=torch.float64)
    teacher, masked = torch.randn(3, 7, dtype=torch.float64), torch.zeros(3, 7, dtype=torch.bool)
    masked[1, 4:] = True
    ours = train_ddp.kl_loss(logits.masked_fill(masked, -math.inf), teacher, masked)
    for i, kept in enumerate((7, 4, 7)):
        log_p, log_q = (F.log_softmax(x[i, :kept], -1) for x in (logits, teacher))
        assert ours[i].item() == pytest.approx(F.kl_div(log_p, log_q, reduction="sum", log_target=True).item())
    ours.sum().backward()
    assert torch.isfinite(logits.grad).all() and (logits.grad[1, 4:] == 0).all()


def test_false_negatives():
    """Absent columns, the positive's text again and what the teacher scores higher are masked; the label is not."""
    ids = torch.tensor([10, 11, 12, 10, -1, 13])
    scores = torch.tensor([[0.8, 0.9, 0.1, 0.8, 0.0, 0.5], [0.2, 0.7, 0.71, 0.2, 0.0, 0.1]])
    labels = torch.tensor([0, 1])
    masked = train_ddp.false_negatives(ids, labels, scores, 0.0)
    assert masked.tolist() == [[False, True, False, True, True, False], [False, False, True, False, True, False]]
    assert train_ddp.false_negatives(ids, labels, scores, 0.05)[1, 2].item() is False
    assert train_ddp.false_negatives(ids, labels, scores, 2.0)[0].tolist() == [False, False, False, True, True, False]


def gathered_gradient(ddp, weight: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
    """Gradient of the mean InfoNCE over all ranks' items by a shared weight, as phase 2 makes it."""
    weight = weight.clone().requires_grad_()
    mine = items[ddp.rank :: ddp.world_size]
    most = -(-len(items) // ddp.world_size)
    vectors = F.normalize(mine @ weight, dim=-1)
    documents = train_ddp.gather_rows(vectors[:, 1], most, ddp.world_size)
    labels = torch.arange(len(mine)) + ddp.rank * most
    masked = documents.detach().square().sum(-1)[None] == 0
    logits = (vectors[:, 0] @ documents.T / 0.1).masked_fill(masked, -math.inf)
    (F.cross_entropy(logits, labels, reduction="sum") * ddp.world_size / len(items)).backward()
    if ddp.world_size > 1:
        train_ddp.dist.all_reduce(weight.grad)
    return weight.grad / ddp.world_size


@pytest.mark.parametrize("world_size", [2, 3])
def test_gather_is_differentiable_across_ranks(world_size):
    """The gradient over several ranks, also with unequal shares, is the one of the whole batch on one."""
    weight, items = torch.randn(6, 5, dtype=torch.float64), torch.randn(7, 2, 6, dtype=torch.float64)
    alone = run_ranks(1, gathered_gradient, weight, items)[0]
    for gradient in run_ranks(world_size, gathered_gradient, weight, items):
        assert torch.allclose(gradient, alone, rtol=1e-12, atol=1e-14)


def test_ranking_metrics_against_hand_counted():
    from helpers import one_process

    documents = torch.eye(12)
    queries = torch.stack([documents[0], 0.9 * documents[1] + documents[2], documents[3] - documents[4]])
    pairs = train_ddp.np.array([[0, 0], [1, 1], [1, 2], [2, 4]])
    metrics = train_ddp.ranking_metrics(one_process(), queries, documents, pairs)
    # query 0: rank 1; query 1: ranks 1 and 2; query 2: rank 12 of 12
    assert metrics["ndcg@10"] == pytest.approx((1 + 1 + 0) / 3)
    assert metrics["mrr@10"] == pytest.approx((1 + 1 + 0) / 3)
    assert metrics["recall@100"] == pytest.approx(1.0)
    ties = train_ddp.ranking_metrics(one_process(), torch.ones(1, 12), torch.ones(12, 12), train_ddp.np.array([[0, 5]]))
    assert ties["ndcg@10"] == 0.0, "a model that gives one vector to all texts must not look good"
