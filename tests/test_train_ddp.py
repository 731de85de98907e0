"""train_ddp.py: known answers, and what a user sees of a run. (What it reads: test_texts.py.)"""

import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import ROOT, call_script, environment, on_small_disk, parse_arguments, rank_variables
from runs import Run
from test_accelerator import META, Copies

import train_ddp as script

CPU = torch.device("cpu")

arguments = partial(parse_arguments, script)
run = partial(call_script, "train_ddp", HF_HUB_OFFLINE=1)  # what a run says


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with queries, two documents each, and negatives, of which one is among all rows'."""
    folder = tmp_path_factory.mktemp("work")
    lines = []
    for i in range(130):
        place = f"item {i} of house {i % 13}"
        hall = f"{place} is in hall {i % 7}" + " indeed" * (i % 9)
        row = {"query": f"where is {place}", "positive": [hall, f"see shelf {i} for {place}"]}
        row["negatives"] = [f"nothing is known about room {i * 7 % 130}", "nothing"]
        lines.append(json.dumps(row) + "\n")
    (folder / "pairs.jsonl").write_text("".join(lines))
    return folder


def small(work, *options):
    """Options of a run of seconds."""
    data = [f"--phase{phase}_data={work}/pairs.jsonl" for phase in (1, 2)]
    common = """--teacher_model=builtin:lsa:16 --student_model=builtin:bert:2x32 --device=cpu
        --student_max_length=24 --projection_hidden=32 --eval_fraction=0.3 --phase1_epochs=3
        --phase2_epochs=3 --phase1_lr=5e-3 --phase2_lr=2e-3 --num_negatives=1
        --global_batch_size=24 --batch_size=8 --log_every=1 --student_query_prompt=find:"""
    return [*data, f"--cache_dir={work}/cache", *common.split(), *options]


@pytest.fixture(scope="module")
def trained(work):
    """A run of both phases, with a head; its texts, and the folder of its untrained student."""
    options = [f"--output_dir={work}/out", "--save_to_artifacts", f"--artifacts_dir={work}/models"]
    trained = Run(work / "out", text=run(*small(work, *options)))
    trained.corpus = script.Corpus(next(work.glob("cache/texts-*")))
    trained.student = str(next(work.glob("cache/bert-*")))
    return trained


@pytest.fixture
def step(trained, work, tmp_path, group):
    """What a step needs: args, a student, and the data of both phases with some vectors."""
    args = arguments(*small(work, f"--output_dir={tmp_path}"))
    torch.manual_seed(0)
    model = script.load_student(args, trained.student)
    tokens = script.Tokens(args, trained.corpus, model, CPU)
    phases = script.make_phases(args, trained.corpus, tokens)
    for phase in phases:
        phase.data.use(unit(len(trained.corpus), 32).numpy().astype(np.float16), 32)
    return SimpleNamespace(args=args, student=script.Student(model), phases=phases)


def unit(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(*shape, generator=generator, dtype=torch.float64), dim=-1)


# --------------------------------------------------------------------------------------------------
# Losses


def test_the_distance_is_a_sum_over_dimensions():
    """|s - t|^2 = 2 (1 - cos) for unit vectors of any size: the weights mean the same for all."""
    for dim in (8, 768):
        s = unit(5, dim, seed=1)
        t = unit(5, dim, seed=2)
        cosine = F.cosine_similarity(s, t)
        assert torch.allclose(script.distance(s, t, 1.0, 0.0), 2 * (1 - cosine))
        assert torch.allclose(script.distance(s, t, 0.4, 0.6), 1.4 * (1 - cosine))


def test_infonce_is_multiple_negatives_ranking_loss(group):
    from sentence_transformers.sentence_transformer import losses

    q = unit(6, 16, seed=5).float()
    d = unit(6, 16, seed=6).float()
    theirs = losses.MultipleNegativesRankingLoss(None, scale=50.0)
    expected = theirs.compute_loss_from_embeddings([q, d], None).item()
    vectors = torch.cat([q, d])
    numbers = torch.arange(12)
    batch = script.PairBatch(None, vectors, numbers, numbers[6:, None], torch.ones(12), 6)
    args = arguments("--infonce_weight=0.5", "--false_negative_margin=2")
    loss, infonce, far = script.pair_loss(args, [batch], [vectors])
    assert infonce.item() == pytest.approx(expected, rel=1e-5)
    assert loss.item() == pytest.approx(0.5 * expected, rel=1e-5)
    assert far.item() == pytest.approx(0, abs=1e-10)


QUERIES = 7  # of a step; query q is answered by the documents 10 + q and 20 + q
ANSWERS = torch.tensor([[10 + q, 20 + q] for q in range(QUERIES)])
# what each brings: its positive, an answer to the next query, one that is nobody's
DOCUMENTS = torch.tensor([[10 + q, 20 + (q + 1) % QUERIES, 30 + q] for q in range(QUERIES)])


def tensors_of_a_step():
    """Weights of a network; texts and targets (QUERIES, 4, ...) of the queries, each with its
    documents."""
    weight = torch.linspace(-1, 1, 30).view(6, 5).double().requires_grad_()
    texts = torch.sin(torch.arange(QUERIES * 4 * 6.0)).view(QUERIES, 4, 6).double()
    targets = torch.cos(torch.arange(QUERIES * 4 * 5.0) ** 2).view(QUERIES, 4, 5)
    return weight, texts, targets


def expected_step(margin):
    """(loss and its parts, gradient) of the whole step, as the equations are written."""
    weight, texts, targets = tensors_of_a_step()
    vectors = F.normalize(texts @ weight, dim=2)
    targets = F.normalize(targets, dim=2)
    scores = vectors[:, 0] @ vectors[:, 1:].flatten(0, 1).T / 0.1
    teacher = targets[:, 0] @ targets[:, 1:].flatten(0, 1).T
    masked = torch.zeros_like(scores, dtype=torch.bool)
    for q in range(QUERIES):
        for k, number in enumerate(DOCUMENTS.flatten()):
            is_false = number in ANSWERS[q] or teacher[q, k] > teacher[q, 3 * q] + margin
            masked[q, k] = is_false and k != 3 * q
    infonce = F.cross_entropy(scores.masked_fill(masked, -1e9), 3 * torch.arange(QUERIES))
    squares = (vectors - targets).square().sum(2)
    far = 0.5 * squares[:, 0].mean() + 0.5 * squares[:, 1:].mean()
    loss = 0.8 * infonce + 0.2 * far
    return torch.stack([loss, infonce, far]).detach(), *torch.autograd.grad(loss, weight)


def found_step(margin):
    """The same, summed over the ranks, to whom the queries are dealt in micro-batches of two."""
    weight, texts, targets = tensors_of_a_step()
    args = arguments("--batch_size=2", f"--global_batch_size={QUERIES}", "--temperature=0.1")
    args.false_negative_margin = margin
    batches = []
    vectors = []
    sampler = script.GlobalBatchSampler(np.arange(QUERIES), args)
    for (_, whole, places), _ in zip(sampler, range(sampler.accumulation), strict=False):
        ids = torch.from_numpy(whole[places])
        n = len(ids)
        order = [0] * n + [1] * n + [2, 3] * n
        rows = torch.cat([ids, ids, ids.repeat_interleave(2)])
        numbers = torch.cat([ids, DOCUMENTS[ids, 0], DOCUMENTS[ids, 1:].flatten()])
        pull = torch.full((4 * n,), 0.5 / (3 * QUERIES))
        pull[:n] = 0.5 / QUERIES
        own = targets[rows, order]
        batches.append(script.PairBatch(None, own, numbers, ANSWERS[ids], pull, QUERIES))
        vectors.append(F.normalize(texts[rows, order] @ weight, dim=1))

    shares = script.pair_loss(args, batches, vectors)
    with mock.patch.object(dist, "all_reduce", None):  # the backward pass is a reduce-scatter
        shares[0].backward()
    shares = shares.detach()
    dist.all_reduce(shares)
    dist.all_reduce(weight.grad)
    return shares, weight.grad


THREE_RANKS = """
import sys
import torch
import torch.distributed as dist
import test_train_ddp

dist.init_process_group("gloo")
found = test_train_ddp.found_step(0.0)
if dist.get_rank() == 0:
    torch.save(found, sys.argv[1])
dist.destroy_process_group()
"""


@pytest.mark.parametrize("margin", [2.0, 0.5, 0.0])
def test_the_loss_of_a_step(group, margin):
    """In micro-batches; a query's other answers, and what the teacher finds better than its
    positive, are no negatives."""
    for found, expected in zip(found_step(margin), expected_step(margin), strict=True):
        assert expected.abs().max() > 0.01
        assert torch.allclose(found, expected, rtol=1e-6, atol=1e-8)


def test_three_ranks(tmp_path, server):
    """The gradient is that of the whole step, with unequal shares, too: 2, 2 and 3 queries."""
    (tmp_path / "program.py").write_text(THREE_RANKS)
    server.start(rank_variables(3), [str(tmp_path / "program.py"), str(tmp_path / "found.pt")])
    assert server.wait() == [0, 0, 0], server.text
    found = torch.load(tmp_path / "found.pt")
    for value, expected in zip(found, expected_step(0.0), strict=True):
        assert torch.allclose(value, expected, rtol=1e-6, atol=1e-8)


# --------------------------------------------------------------------------------------------------
# Steps


def take_step(phase):
    """The micro-batches of the first step of a phase."""
    items = itertools.islice(phase.sampler, phase.sampler.accumulation)
    return [phase.data[item] for item in items]


def batches_of(step, batch_size):
    """Those of phase 2."""
    step.args.batch_size = batch_size
    data = step.phases[1].data
    sampler = script.GlobalBatchSampler(data.ids(), step.args, data.cost())
    return take_step(step.phases[1]._replace(sampler=sampler))


def gradient(step, batches, forward_backward=None):
    """(shares, gradient) of a step of phase 2; without the function that of a plain one, which
    keeps the graphs of all micro-batches."""
    student = step.student.train()
    student.zero_grad()
    script.seed_step(step.args, 7)
    if forward_backward is None:
        shares = script.pair_loss(step.args, batches, [student(batch.texts) for batch in batches])
        shares[0].backward()
    else:
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        common = (student, batches, contextlib.nullcontext, scaler, 7)
        shares = forward_backward(step.args, *common)
    found = [p.grad.flatten() for p in student.parameters() if p.grad is not None]
    return shares.detach(), torch.cat(found)


def assert_close(found, expected):
    assert torch.allclose(found[0], expected[0], rtol=1e-5)
    assert (found[1] - expected[1]).norm() < 1e-4 * expected[1].norm()


def test_micro_batches_have_the_gradient_of_the_whole_step(step):
    """Negatives come from all of them."""
    whole, parts = [batches_of(step, size) for size in (24, 5)]
    assert (len(whole), len(parts)) == (1, 5)
    for pull in script.split_texts(parts, [batch.pull for batch in parts]):
        assert pull.sum() == pytest.approx(0.5)  # of all queries, and of all documents
    assert_close(gradient(step, parts, script.pair_step), gradient(step, whole))


@pytest.mark.parametrize("is_compiled", [False, True])
def test_micro_batches_with_dropout(step, is_compiled, request):
    """The second pass drops what the first one has dropped."""
    if is_compiled and not request.config.getoption("--all-faults"):
        pytest.skip("slow: --all-faults")
    for module in step.student.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.2
    if is_compiled:
        step.student.compile(backend="aot_eager")
    batches = batches_of(step, 8)
    assert_close(gradient(step, batches, script.pair_step), gradient(step, batches))
    other = gradient(step, batches)
    step.args.seed = 1
    assert not torch.allclose(gradient(step, batches)[0], other[0], rtol=1e-5)


def test_a_step_of_each_phase_on_the_meta_device(step, monkeypatch):
    """There a tensor made elsewhere, a read value and a test of a tensor's value are errors."""
    # autocast does not know this device
    monkeypatch.setattr(torch, "autocast", lambda *args, **options: contextlib.nullcontext())
    script.keep_masks_whole()
    step.student.to("meta")
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for phase, function in zip(step.phases, (script.text_step, script.pair_step), strict=True):
        copies = Copies()
        with copies:
            batches = [batch.to(META) for batch in take_step(phase)]
        assert len(batches) == 3
        shares = function(step.args, step.student, batches, contextlib.nullcontext, scaler, 0)
        assert shares.device == META
        assert len(shares) == len(phase.data.parts)
        assert set(copies.found) == {True}, "the host waits for a copy"


def test_vectors_of_texts(step):
    """One by one or in groups, where they need little padding, they are the same; compared in full
    precision, whatever the network has."""
    seen = []
    step.student.add_head(32, 16)
    step.student.head[0].register_forward_hook(
        lambda module, inputs, output: seen.append(output["sentence_embedding"].dtype)
    )
    tokens = step.phases[0].data.tokens
    rows = np.arange(40)
    texts = script.lay_out(tokens, rows)
    assert len(texts.ids) == tokens.groups == 8
    padded = sum(ids.numel() for ids in texts.ids)
    assert tokens.lengths[rows].sum() <= padded < 0.9 * 40 * tokens.lengths[rows].max()
    with torch.no_grad():
        expected = step.student.eval()(texts)
        alone = [step.student(script.lay_out(tokens, rows[i : i + 1])) for i in range(40)]
        with torch.autocast("cpu", torch.bfloat16):
            found = step.student(texts)
    assert torch.allclose(torch.cat(alone), expected, atol=1e-5)
    assert {found.dtype, *seen} == {torch.float32}
    assert 0 < (found - expected).norm() < 0.1 * expected.norm()


def test_a_rank_reads_its_own_teacher_rows(step, monkeypatch):
    """And sends no documents to others, only what it has of queries."""
    read = []
    sent = []
    gather_rows = script.gather_rows
    data = step.phases[1].data
    vectors = data.vectors

    class Counted:
        def __getitem__(self, rows):
            read.extend(rows)
            return vectors[rows]

    def send(rows, *more, **options):
        sent.append(len(rows))
        return gather_rows(rows, *more, **options)

    monkeypatch.setattr(script, "gather_rows", send)
    data.use(Counted(), 32)
    batch = data[0, np.arange(24), np.arange(0, 24, 2)]
    assert len(batch.positives) == 12
    assert len(read) == len(batch.numbers) == 12 * 3
    batch = batch._replace(total=12)
    script.pair_loss(step.args, [batch], [step.student(batch.texts)])
    assert max(sent) == 12


def test_negatives(step):
    """From those that are there, by (seed, step, place): on any number of ranks the same."""
    data = step.phases[1].data
    negatives = np.arange(1000).reshape(-1, 10)
    negatives[:20, 1:] = -1
    data.corpus = SimpleNamespace(negatives=negatives)
    data.args.num_negatives = 4
    assert data.draw(0, 0, 3).tolist() == [30]
    drawn = data.draw(5, 2, 40)
    assert len(set(drawn) & set(negatives[40])) == 4
    assert np.array_equal(drawn, data.draw(5, 2, 40))
    others = [data.draw(6, 2, 40), data.draw(5, 3, 40)]
    data.args.seed = 1
    others.append(data.draw(5, 2, 40))
    assert all(set(other) != set(drawn) for other in others)
    order = np.random.default_rng([1, 5]).choice(negatives[40], 4, replace=False)
    assert set(data.draw(5, 0, 40)) != set(order), "one stream for two things"


def test_learning_rates():
    args = arguments("--warmup_ratio=0.25")
    found = [script.lr_factor(args, step, 8) for step in range(8)]
    fall = [1 - i / 6 for i in range(6)]
    assert found == pytest.approx([1 / 3, 2 / 3, *fall])
    assert script.lr_factor(arguments("--warmup_ratio=0"), 0, 8) == 1


def test_embeddings_do_not_decay_under_any_name():
    model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 3))
    decay, no_decay = script.make_optimizer(arguments(), model, 1e-3).param_groups
    assert [p.shape for p in decay["params"]] == [(3, 4)] and decay["weight_decay"] > 0
    assert len(no_decay["params"]) == 2 and no_decay["weight_decay"] == 0


# --------------------------------------------------------------------------------------------------
# Evaluation


def rank(queries, documents, answers):
    """Metrics of queries with these answers each."""
    pairs = [(query, document) for query, own in enumerate(answers) for document in own]
    corpus = SimpleNamespace(eval_queries=np.arange(len(queries)), eval_pairs=np.array(pairs))
    return script.ranking_metrics(corpus, torch.cat([queries, documents]))


def test_ranking_metrics_against_counting():
    """One vector for all texts must not look good; a query's answers do not count against it."""
    documents = torch.eye(12)
    d = documents
    third = 1 / np.log2(3)
    cases = [  # vector of a query, its answers, nDCG@10, MRR@10, recall@100
        (d[0], [0], 1, 1, 1),
        (0.9 * d[1] + d[2], [1, 2], 1, 1, 1),
        (0.9 * d[1] + d[2], [1], third, 1 / 2, 1),
        (0.9 * d[1] + d[2], [1, 5], third / (1 + third), 1 / 2, 1),
        (d[3] - d[4], [4], 0, 0, 1),  # at place 12
        (d[0] + d[1], [0, 1], 1, 1, 1),  # they tie
        (d[0] + d[1], [0], third, 1 / 2, 1),  # with another document
        (torch.ones(12), [0], 0, 0, 1),
    ]
    for query, own, *expected in cases:
        found = rank(query[None], documents, [own])
        assert [*found.values()] == pytest.approx(expected), (query, own)
    found = rank(torch.stack([d[0], d[3] - d[4]]), documents, [[0], [4]])
    assert found["ndcg@10"] == 0.5
    assert rank(torch.ones(1, 12), torch.ones(200, 12), [[7]])["recall@100"] == 0
    assert script.ranking_metrics(SimpleNamespace(eval_queries=[]), documents) == {}


def test_the_artifact(trained, work, group):
    """As anybody loads it: the vectors of the forward pass, and by sentence-transformers' own
    evaluator the figures of the run. Queries have two answers each."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import evaluation

    base, whole = [SentenceTransformer(p, device="cpu") for p in trained.summary["artifacts"]]
    assert "base-32d (without the head" in trained.text
    for module in whole:
        assert type(module).__module__.startswith("sentence_transformers.")

    corpus = trained.corpus
    args = arguments(*small(work))
    model = script.load_student(args, trained.student)
    student = script.Student(model)
    student.add_head(args.projection_hidden, 16)
    student.load_state_dict(torch.load(trained.folder / "best.pt")["model"])
    rows = np.concatenate([corpus.eval_queries[:20], corpus.eval_documents[:20]])
    texts = script.lay_out(script.Tokens(args, corpus, model, CPU), rows)
    for artifact, head in ((whole, True), (base, False)):
        with torch.no_grad():
            expected = student.eval()(texts, head).numpy()
        found = artifact.encode(corpus.texts(rows[:20]), prompt_name="query")
        assert np.allclose(found, expected[:20], atol=1e-5)
        found = artifact.encode(corpus.texts(rows[20:]))
        assert np.allclose(found, expected[20:], atol=1e-5)

    texts_of = [{}, {}]  # {number as a text: text} of queries and of documents
    for texts, rows in zip(texts_of, (corpus.eval_queries, corpus.eval_documents), strict=True):
        texts.update({str(i): text for i, text in enumerate(corpus.texts(rows))})
    relevant = {}
    for query, document in corpus.eval_pairs.tolist():
        relevant.setdefault(str(query), set()).add(str(document))
    assert len(relevant) > 20
    evaluator = evaluation.InformationRetrievalEvaluator(
        *texts_of, relevant, query_prompt_name="query"
    )
    found = evaluator(whole)
    summary = trained.summary
    best = max(summary["phases"].values(), key=lambda metrics: metrics["ndcg@10"])
    assert best["ndcg@10"] == summary["best"]["value"]
    for name in ("ndcg@10", "mrr@10"):
        assert found[f"cosine_{name}"] == pytest.approx(best[name], abs=1e-3)
    assert best["ndcg@10"] > summary["baselines"]["untrained"]["ndcg@10"] + 0.05


def test_a_full_disk_at_the_end(step, tmp_path):
    """It costs no more than the artifact."""
    step.args.artifacts_dir = str(tmp_path / "disk")
    (tmp_path / "disk").mkdir()
    with on_small_disk(tmp_path / "disk", "8k"):
        with pytest.raises(script.RunError, match="no artifact: .*No space.* the same command"):
            script.save_artifacts(step.args, step.student)


def test_where_no_artifact_can_be_written(step):
    """That is said before the teacher reads."""
    step.args.save_to_artifacts = True
    step.args.artifacts_dir = "/proc/nothing"
    with pytest.raises(script.InputError, match="cannot be saved in /proc/nothing: "):
        script.check_student(step.args, step.student, step.phases[0].data.tokens)


def test_which_checkpoints_are_the_best():
    """What could not be saved is not noted."""
    saved = []

    def save(name):
        saved.append(name)
        return True

    loop = {"step": 9, "best": {"phase 1": {"value": 0.54}}}
    for value in (float("nan"), 0.40, 0.55):
        script.keep_best(loop, 2, {"ndcg@10": value}, save)
    assert saved == ["phase2_best.pt", "phase2_best.pt", "best.pt"]
    for lost in ("phase2_best.pt", "best.pt"):
        script.keep_best(loop, 2, {"ndcg@10": 0.60}, lambda name, lost=lost: name != lost)
        assert loop["best"]["phase 2"]["value"] == 0.55


def test_the_last_word_warns(trained, caplog):
    """Values of the untrained student and of both phases, and what is said of them."""
    cases = {
        (0.53, 0.54, 0.40): ["phase 2 made the student worse"],
        (0.56, 0.54, 0.55): ["training did not make the student better"],
        (0.53, 0.54, 0.55): [],
    }
    for (untrained, *values), expected in cases.items():
        loop = {"best": {}, "untrained": {"ndcg@10": untrained}, "teacher": {}}
        for phase, value in enumerate(values, start=1):
            loop["best"][f"phase {phase}"] = {"metric": "ndcg@10", "value": value, "metrics": {}}
        caplog.clear()
        assert script.compare(trained.corpus, loop)["value"] == max(values)
        said = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert [text.split(":")[0] for text in said] == expected
    with pytest.raises(script.RunError, match="no best weights could be saved"):
        script.compare(trained.corpus, {"best": {}})


# --------------------------------------------------------------------------------------------------
# Runs


def test_mrl(work, trained):
    """The target is the first part of the teacher's vectors; those of another run are found."""
    options = [f"--output_dir={work}/mrl", "--use_projection=False", "--skip_phase2"]
    options += ["--student_model=builtin:bert:1x32", "--max_steps=3"]
    said = run(*small(work, *options, "--teacher_model=builtin:bert:1x64"))
    assert "The teacher reads" in said
    assert "learns 32 of them: its vectors have 32 dimensions, the teacher's 64" in said
    said = run(*small(work, *options, "--fresh"), status=2)
    assert "no teacher is needed" in said
    assert "--use_projection False needs 32 teacher dimensions" in said


def test_skip_phase1(work, tmp_path, trained, step, caplog):
    """From weights of any run, from those in the folder, or from the raw student."""
    path = trained.folder / "phase1_best.pt"
    options = small(work, f"--output_dir={tmp_path}/out", "--skip_phase1", "--max_steps=2")
    said = run(*options, f"--phase1_weights={path}").split("phase=2")[0]
    assert f"Loading {path}" in said
    assert {row["phase"] for row in Run(tmp_path / "out").rows} == {2}
    assert "has begun from others" in run(*options, "--phase1_weights=b.pt", status=2)

    step.student.add_head(32, 16)
    args = arguments(*options)
    state = torch.load(path)
    args.data_hash = state["args"]["data_hash"]
    script.begin_phase2(args, step.student, 0)
    assert "phase 2 starts from the untrained student" in caplog.text
    with pytest.raises(script.InputError, match=f"phase1_weights {tmp_path}/out/latest.pt takes"):
        script.begin_phase2(args, step.student, 9)  # of phase 1, not evaluated yet
    args.output_dir = str(trained.folder)
    script.begin_phase2(args, step.student, 9)
    expected = state["model"]
    assert all(value.equal(expected[key]) for key, value in step.student.state_dict().items())
    args.data_hash = "other data"
    with pytest.raises(script.InputError, match="on other data, .* makes its words of the data"):
        script.begin_phase2(args, step.student, 9)
    args.student_model = "another"
    with pytest.raises(script.InputError, match="was trained with --student_model builtin:bert"):
        script.begin_phase2(args, step.student, 9)
    torch.save({"a": 1}, tmp_path / "a.pt")
    args.phase1_weights = f"{tmp_path}/a.pt"
    with pytest.raises(script.InputError, match="a.pt: expected phase1_best.pt, or another"):
        script.begin_phase2(args, step.student, 9)
    args.phase1_weights = "nowhere.pt"
    with pytest.raises(script.InputError, match="--phase1_weights nowhere.pt: the file is missing"):
        script.begin_phase2(args, step.student, 9)


def test_phases_one_after_the_other(work, tmp_path):
    """Where both runs are given the data of both, they have one split, and the second goes on.
    Artifacts that are there are kept."""
    rows = [json.loads(line) for line in (work / "pairs.jsonl").read_text().splitlines()]
    (tmp_path / "texts.txt").write_text("\n".join(row["positive"][0] for row in rows))
    options = small(work, f"--output_dir={tmp_path}/out", f"--phase1_data={tmp_path}/texts.txt")
    options += ["--max_steps=2", "--save_to_artifacts", f"--artifacts_dir={tmp_path}/models"]
    run(*options, "--skip_phase2")
    said = run(*options)
    assert "resuming" in said and "at step 2" in said
    assert "step=4 phase=2 " in said
    assert len([*tmp_path.glob("models/*.old-*")]) == len([*tmp_path.glob("models/*")]) / 2 == 2
    (tmp_path / "out" / "best.pt").unlink()  # the last weights are not saved in its place
    assert f"error: no artifact: {tmp_path}/out/best.pt is missing" in run(*options, status=1)
    assert len([*tmp_path.glob("models/*")]) == 4


def test_few_pairs(work, tmp_path, group, caplog):
    """Too few are refused before phase 1. The teacher has no more dimensions than texts."""
    few = (work / "pairs.jsonl").read_text().splitlines(keepends=True)[:12]
    (tmp_path / "few.jsonl").write_text("".join(few))
    options = small(work, f"--output_dir={tmp_path}/out", f"--phase2_data={tmp_path}/few.jsonl")
    options += ["--global_batch_size=64", f"--cache_dir={tmp_path}/cache"]
    said = run(*options, status=2)
    assert "64 samples a step: must be from 8 (ranks x micro-batches) to " in said
    assert "making builtin:lsa" not in said

    args = arguments(*options, f"--phase1_data={tmp_path}/few.jsonl", "--teacher_model=builtin:lsa")
    corpus = script.Corpus(script.prepare_texts(args))
    assert 4 < len(corpus.pairs) < 24
    vectors = script.teacher_vectors(args, "key", "builtin:lsa", corpus, 8, CPU)
    assert vectors.dimensions == len(corpus.pairs)
    assert f"builtin:lsa has {len(corpus.pairs)} dimensions" in caplog.text


def test_without_a_hub_it_is_said_in_seconds(tmp_path):
    began = time.monotonic()
    env = environment(HF_HOME=tmp_path, HF_ENDPOINT="http://localhost:9")
    command = [sys.executable, ROOT / "train_ddp.py", f"--output_dir={tmp_path}/out"]
    command.append("--trust_remote_code")
    command.append(f"--cache_dir={tmp_path}/cache")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert time.monotonic() - began < 45  # 10 s on an idle machine
    assert "no model hub" in done.stdout
    assert "microsoft/ms_marco is no file here, and not on this machine" in done.stderr
    assert "pydocs" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


# --------------------------------------------------------------------------------------------------
# Teacher vectors


class Teacher:
    prompts = {"query": "q: ", "document": ""}
    encoded = 0

    def get_embedding_dimension(self):
        return 3

    def encode(self, texts, *, prompt, **options):
        assert prompt == ""
        Teacher.encoded += len(texts)
        return torch.tensor([[len(t), t.startswith("q: "), 1.0] for t in texts])


def test_teacher_vectors_are_computed_once(trained, tmp_path, group, monkeypatch):
    """A stopped run's blocks are not computed again, whichever they are: with other ranks they are
    not the first ones."""
    monkeypatch.setattr(script, "load_teacher", lambda *args: Teacher())
    corpus = trained.corpus
    args = arguments(f"--cache_dir={tmp_path}")
    wishes = mock.Mock(side_effect=["", "", "SIGTERM"])
    monkeypatch.setattr(script, "wish_to_stop", wishes)
    options = [args, "key", "name", corpus, 3, CPU]
    assert script.teacher_vectors(*options) is None
    assert Teacher.encoded == 2 * 64

    monkeypatch.setattr(script, "wish_to_stop", lambda args: "")
    vectors = script.teacher_vectors(*options)
    assert Teacher.encoded == len(corpus)
    texts = corpus.texts(range(len(corpus)), Teacher.prompts)
    expected = [[len(t), t.startswith("q: "), 1.0] for t in texts]
    expected = F.normalize(torch.tensor(expected), dim=1).numpy()
    found = vectors[np.arange(len(corpus))]
    assert found.dtype == np.float16
    assert np.allclose(found, expected, atol=1e-3)

    for number, size in enumerate([300, 0], start=1):  # a full disk, or a program; a crash
        os.truncate(tmp_path / "teacher-key-cpu" / f"{64:010}.npy", size)
        assert np.array_equal(script.teacher_vectors(*options)[np.arange(len(corpus))], found)
        assert Teacher.encoded == len(corpus) + 64 * number


def test_what_teacher_vectors_depend_on(trained):
    """Without its own code a teacher may be another network."""
    keys = set()
    for options in ([], ["--trust_remote_code"], ["--teacher_query_prompt=q"]):
        keys.add(script.teacher_key(arguments(*options), trained.corpus, "name"))
    assert len(keys) == 3
    # a folder that the script has made is known by its name, wherever and whenever it was made
    bert = [arguments("--teacher_model=builtin:bert"), trained.corpus]
    other = script.teacher_key(*bert, f"/elsewhere/{Path(trained.student).name}")
    assert script.teacher_key(*bert, trained.student) == other


# --------------------------------------------------------------------------------------------------
# Students


def save_network(folder, trained, kind, pooling="mean", limit=64, spare=0, **config):
    """A small random network with the tokenizer of another student."""
    import transformers
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    tokenizer = transformers.AutoTokenizer.from_pretrained(trained.student)
    tokenizer.model_max_length = limit
    if kind == "GPT2":
        tokenizer.pad_token = config.pop("pad_token", None)
    sizes = {
        "vocab_size": len(tokenizer) + spare,
        "hidden_size": 32,
        "num_hidden_layers": 6,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "max_position_embeddings": 66,
        "pad_token_id": 0,
        **config,
    }
    for name in [name for name, value in sizes.items() if value is None]:
        del sizes[name]
    network = transformers.AutoModel.from_config(getattr(transformers, f"{kind}Config")(**sizes))
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    modules = [Transformer(str(folder)), Pooling(32, pooling)]
    more = {"prompts": {"passage": "p: "}, "truncate_dim": 8}
    model = SentenceTransformer(modules=modules, device="cpu", **more)
    model.save(str(folder), create_model_card=False)
    return str(folder)


CAUSAL = {"num_key_value_heads": 1, "head_dim": 16}
SAVED = {  # kind of network: its pooling, more of its configuration
    "MPNet": ("mean", {}),
    "Roberta": ("mean", {}),
    "DistilBert": ("cls", {"hidden_dim": 64}),
    "Electra": ("mean", {"embedding_size": 32}),
    "ModernBert": ("mean", {}),
    "Albert": ("mean", {"embedding_size": 32}),
    "DebertaV2": ("mean", {}),
    "Qwen3": ("lasttoken", CAUSAL),
    "Gemma3Text": ("mean", CAUSAL),
    "GPT2": ("lasttoken", {"pad_token": "[PAD]"}),
}


@pytest.mark.parametrize("kind", SAVED)
def test_students(kind, trained, tmp_path, group, caplog):
    """Cut to 3 layers, in groups of texts of similar length, saved and loaded: the same vectors."""
    from sentence_transformers import SentenceTransformer

    pooling, config = SAVED[kind]
    folder = save_network(tmp_path / "student", trained, kind, pooling, **config)
    options = [f"--cache_dir={tmp_path}", f"--student_model={folder}", "--student_query_prompt=q:"]
    if kind != "Albert":
        options.append("--student_layers=3")
    args = arguments(*options)
    model = script.load_student(args, folder)
    assert "prompts that are not used here: passage" in caplog.text
    assert "truncate_dim 8 is not used" in caplog.text
    config = model[0].model.config
    assert config.num_hidden_layers == (6 if kind == "Albert" else 3)
    assert len(getattr(config, "layer_types", None) or "abc") == 3
    places = {getattr(part, "layer_idx", None) for part in model.modules()}
    assert places <= {None, 0, 1, 2}
    student = script.Student(model).eval()
    tokens = script.Tokens(args, trained.corpus, model, CPU)
    script.check_student(args, student, tokens)
    rows = np.arange(0, len(trained.corpus), 15)
    script.save_student(student, tmp_path / "saved", head=True)
    saved = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert saved.prompts["passage"] == "p: "
    with torch.no_grad():
        found = student(script.lay_out(tokens, rows)).numpy()
    expected = saved.encode(trained.corpus.texts(rows, model.prompts), prompt="")
    assert np.allclose(found, expected, atol=1e-5)
    assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)


def with_head_for_scores(folder):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["architectures"] = ["BertForSequenceClassification"]
    path.write_text(json.dumps(config))


UNFIT = {  # kind of network, more of it, options, what is said
    "no limit": ("Roberta", {"limit": int(1e30)}, [], "fails on a text of 66 tokens, "),
    "no length": (
        "T5",
        {"limit": int(1e30), "max_position_embeddings": None},
        [],
        "it has no maximum length",
    ),
    "no padding token": ("GPT2", {}, [], "its tokenizer has no padding token"),
    "tokens": ("Bert", {"spare": -50}, [], "its tokenizer is another model's"),
    "layers": ("Bert", {}, ["--student_layers=7"], "the student has 6 layers"),
    "one layer": ("Albert", {"embedding_size": 32}, ["--student_layers=3"], "no list of 6 layers"),
    "longer": ("Bert", {}, ["--student_max_length=90"], "fails on a text of 90 tokens, "),
    "scores": ("Bert", {}, [], "is a cross-encoder"),
    "frozen": ("Bert", {}, [], "all its weights are frozen"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_students_that_are_refused(case, trained, tmp_path, group, monkeypatch):
    """In one line, before the teacher reads."""
    kind, more, options, said = UNFIT[case]
    folder = save_network(tmp_path / "student", trained, kind, **more)
    args = arguments(f"--cache_dir={tmp_path}", f"--student_model={folder}", *options)
    if case == "scores":
        with_head_for_scores(tmp_path / "student")
        with pytest.raises(script.InputError, match=said):
            script.load_teacher(args, folder, CPU)
    if case == "frozen":  # as an adapter's network is when it is loaded
        model = script.load_model(args, folder, "student", "").requires_grad_(False)
        monkeypatch.setattr(script, "load_model", lambda *args, **options: model)
    with pytest.raises(script.InputError, match=said) as caught:
        model = script.load_student(args, folder)
        tokens = script.Tokens(args, trained.corpus, model, CPU)
        script.check_student(args, script.Student(model), tokens)
    assert f"--student_model {folder}" in str(caught.value) or case in ("layers", "one layer")
    assert "\n" not in str(caught.value)


def test_a_teacher_with_code_of_its_own(tmp_path):
    options = [f"--cache_dir={tmp_path}", "--phase1_data=pydocs", "--phase2_data=pydocs"]
    assert "then give --trust_remote_code" in run(*options, "--device=cpu", status=2)


# --------------------------------------------------------------------------------------------------
# Options


@pytest.mark.parametrize(
    "words",
    [
        "--false_negative_margin=-3",
        "--phase2_data=texts.txt.gz",
        "--phase1_lr=nan",
        "--student_model=builtin:lsa",
        "--teacher_model=builtin:bert:0x8",
        "--phase1_weights=a.pt",
        "--skip_phase1 --skip_phase2",
        "--teacher_max_length=9 --teacher_model=builtin:lsa",
    ],
)
def test_options_that_cannot_be(words):
    with pytest.raises(script.InputError, match=words.partition("=")[0].split()[0]):
        arguments(*words.split())
