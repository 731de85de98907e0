"""train_ddp.py: known answers, and what a user sees of a run. (What it reads: test_texts.py.)"""

import contextlib
import itertools
import json
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import ROOT, call_script, parse_arguments, rank_variables
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
    common = """--teacher_model=builtin:lsa --student_model=builtin:bert --device=cpu
        --student_max_length=24 --projection_hidden=32 --eval_fraction=0.3 --phase1_epochs=3
        --phase2_epochs=3 --phase1_lr=5e-3 --phase2_lr=2e-3 --num_negatives=1
        --global_batch_size=24 --batch_size=8 --log_every=1 --student_query_prompt=find:"""
    return [*data, f"--cache_dir={work}/cache", *common.split(), *options]


@pytest.fixture(scope="module")
def trained(work):
    """A run of both phases, with a head; its texts, and the folder of its untrained student."""
    options = [f"--output_dir={work}/out", "--save_to_artifacts", f"--artifacts_dir={work}/models"]
    trained = Run(work / "out", text=run(*small(work, *options)))
    trained.read = next(work.glob("cache/texts-*"))  # the folder with texts and builtin models
    trained.corpus = script.load_corpus(trained.read)
    trained.texts = json.loads((trained.read / "texts.json").read_text())
    return trained


@pytest.fixture
def step(trained, work, tmp_path, group):
    """What a step needs: args, a student, and the data of both phases with some vectors."""
    args = arguments(*small(work, f"--output_dir={tmp_path}"))
    torch.manual_seed(0)
    model = script.load_student(args, trained.read)
    vectors = Vectors(len(trained.texts), 128)
    phases = script.make_phases(args, trained.corpus, vectors)
    return SimpleNamespace(args=args, student=script.Student(model), phases=phases)


class Vectors:
    """Random unit vectors; it counts what is read."""

    def __init__(self, count, dimensions):
        self.rows = unit(count, dimensions).numpy().astype(np.float16)
        self.dimensions = dimensions
        self.read = []

    def __getitem__(self, rows):
        self.read.extend(rows)
        return self.rows[rows]


def unit(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(*shape, generator=generator, dtype=torch.float64), dim=-1)


# --------------------------------------------------------------------------------------------------
# Losses


def test_infonce_is_multiple_negatives_ranking_loss(group):
    from sentence_transformers.sentence_transformer import losses

    q = unit(6, 16, seed=5).float()
    d = unit(6, 16, seed=6).float()
    theirs = losses.MultipleNegativesRankingLoss(None, scale=50.0)
    expected = theirs.compute_loss_from_embeddings([q, d], None).item()
    vectors = torch.cat([q, d])
    batch = script.Batch([], [], None, torch.arange(12), vectors, 6, 6, 2)
    args = arguments("--infonce_weight=0.5", "--false_negative_margin=2")
    (loss, infonce, far), _ = script.pair_loss(args, [batch], vectors)
    assert infonce.item() == pytest.approx(expected, rel=1e-5)
    assert loss.item() == pytest.approx(0.5 * expected, rel=1e-5)
    assert far.item() == pytest.approx(0, abs=1e-10)


# Pairs of a step: the first two are of one query, the next two have one document. Each has two
# documents that do not answer it, of which one is the positive of another pair.
PAIRS = torch.tensor([[1, 11], [1, 12], [2, 13], [3, 13], [4, 14], [5, 15], [6, 16]])
QUERIES = len(PAIRS)
WRONG = torch.tensor([[20 + q, int(PAIRS[(q + 4) % QUERIES, 1])] for q in range(QUERIES)])
DOCUMENTS = torch.cat([PAIRS[:, 1:], WRONG], dim=1)


def tensors_of_a_step():
    """Weights of a network; texts and targets (QUERIES, 4, ...) of the queries, each with its
    documents."""
    weight = torch.linspace(-1, 1, 30).view(6, 5).double().requires_grad_()
    texts = torch.sin(torch.arange(QUERIES * 4 * 6.0)).view(QUERIES, 4, 6).double()
    targets = torch.cos(torch.arange(QUERIES * 4 * 5.0) ** 2).view(QUERIES, 4, 5)
    return weight, texts, targets


def expected_texts():
    """(loss, gradient) of a step of phase 1 on these texts, as the equations are written. Of the
    teacher's vectors, which are longer, the first dimensions are the target."""
    weight, texts, targets = tensors_of_a_step()
    weight = weight.detach()[:, :4].requires_grad_()
    vectors = F.normalize(texts @ weight, dim=2)
    targets = F.normalize(targets[..., :4], dim=2)
    squares = (vectors - targets).square().sum(2)
    loss = (0.4 * squares + 0.6 * (1 - (vectors * targets).sum(2))).mean()
    return loss.detach()[None], *torch.autograd.grad(loss, weight)


def found_texts():
    """The same by text_step, summed over the ranks."""
    weight, texts, targets = tensors_of_a_step()
    model = torch.nn.Linear(6, 4, bias=False, dtype=torch.float64)
    model.weight.data = weight.detach()[:, :4].T.clone()
    model.register_forward_pre_hook(lambda module, batches: batches[0].order)  # the texts
    model.register_forward_hook(lambda module, batches, found: F.normalize(found, dim=1))
    args = arguments("--batch_size=2", f"--global_batch_size={4 * QUERIES}")
    batches = []
    for whole, places in deal(args, 4 * QUERIES):
        rows = torch.from_numpy(whole[places])
        own = [tensor.flatten(0, 1)[rows] for tensor in (texts, targets)]
        batches.append(script.Batch([], [], own[0], None, own[1], total=4 * QUERIES))
    share = script.text_step(args, model, batches, contextlib.nullcontext, 0)
    gradient = model.weight.grad.T / dist.get_world_size()  # DDP takes the mean
    return summed(share, gradient)


def deal(args, count):
    """(the global batch, places in it) of each micro-batch of this rank in a step"""
    sampler = script.GlobalBatchSampler(np.arange(count), args, np.ones(count))
    return [item[1:] for item in itertools.islice(sampler, sampler.accumulation)]


def summed(*tensors):
    for tensor in tensors:
        dist.all_reduce(tensor)
    return tensors


def expected_pairs(margin):
    """(loss and its parts, gradient) of a step of phase 2, as the equations are written."""
    weight, texts, targets = tensors_of_a_step()
    vectors = F.normalize(texts @ weight, dim=2)
    targets = F.normalize(targets, dim=2)
    scores = vectors[:, 0] @ vectors[:, 1:].flatten(0, 1).T / 0.5
    teacher = targets[:, 0] @ targets[:, 1:].flatten(0, 1).T
    masked = torch.zeros_like(scores, dtype=torch.bool)
    for q in range(QUERIES):
        for k, number in enumerate(DOCUMENTS.flatten()):
            pair, place = divmod(k, 3)
            is_other = place == 0 and PAIRS[pair, 0] == PAIRS[q, 0]  # answers it in another pair
            is_better = teacher[q, k] > teacher[q, 3 * q] + margin
            masked[q, k] = (is_other or number == PAIRS[q, 1] or is_better) and k != 3 * q
    infonce = F.cross_entropy(scores.masked_fill(masked, -1e9), 3 * torch.arange(QUERIES))
    squares = (vectors - targets).square().sum(2)
    far = 0.5 * squares[:, 0].mean() + 0.5 * squares[:, 1:].mean()
    loss = 0.8 * infonce + 0.2 * far
    return torch.stack([loss, infonce, far]).detach(), *torch.autograd.grad(loss, weight)


def found_pairs(margin):
    """The same, summed over the ranks, to whom the pairs are dealt in micro-batches of two."""
    weight, texts, targets = tensors_of_a_step()
    args = arguments("--batch_size=2", f"--global_batch_size={QUERIES}", "--temperature=0.5")
    args.false_negative_margin = margin
    batches = []
    vectors = []
    for whole, places in deal(args, QUERIES):
        ids = torch.from_numpy(whole[places])
        n = len(ids)
        order = [0] * n + [1] * n + [2, 3] * n
        rows = torch.cat([ids, ids, ids.repeat_interleave(2)])
        numbers = torch.cat([*PAIRS[ids].T, WRONG[ids].flatten()])
        batches.append(script.Batch([], [], None, numbers, targets[rows, order], QUERIES, n, 4))
        vectors.append(F.normalize(texts[rows, order] @ weight, dim=1))

    vectors = torch.cat(vectors)
    shares, gradient = script.pair_loss(args, batches, vectors.detach())
    vectors.backward(gradient)
    return summed(shares, weight.grad)


THREE_RANKS = """
import sys
import torch
import torch.distributed as dist
import test_train_ddp

dist.init_process_group("gloo")
found = [*test_train_ddp.found_texts(), *test_train_ddp.found_pairs(0.0)]
if dist.get_rank() == 0:
    torch.save(found, sys.argv[1])
dist.destroy_process_group()
"""


@pytest.mark.parametrize("margin", [2.0, 0.0])
def test_the_losses_of_a_step(group, margin):
    """In micro-batches; a query's other answers, and what the teacher finds better than its
    positive, are no negatives."""
    check([*found_texts(), *found_pairs(margin)], margin)


def check(found, margin):
    for value, expected in zip(found, [*expected_texts(), *expected_pairs(margin)], strict=True):
        assert expected.abs().max() > 0.01
        assert torch.allclose(value.double(), expected, rtol=1e-6, atol=1e-8)


def test_three_ranks(tmp_path, server):
    """The gradient is that of the whole step, with unequal shares, too: 2, 2 and 3 queries."""
    (tmp_path / "program.py").write_text(THREE_RANKS)
    server.start(rank_variables(3), [str(tmp_path / "program.py"), str(tmp_path / "found.pt")])
    assert server.wait() == [0, 0, 0], server.text
    check(torch.load(tmp_path / "found.pt"), 0.0)


# --------------------------------------------------------------------------------------------------
# Steps


def take_step(phase):
    """The micro-batches of the first step of a phase."""
    items = itertools.islice(phase.sampler, phase.sampler.accumulation)
    return [phase.data[item] for item in items]


def batches_of(step, batch_size):
    """Those of phase 2."""
    step.args.batch_size = batch_size
    ids, cost = step.phases[1].data.samples()
    sampler = script.GlobalBatchSampler(ids, step.args, cost)
    return take_step(step.phases[1]._replace(sampler=sampler))


def gradient(step, batches, forward_backward=None):
    """(shares, gradient) of a step of phase 2; without the function that of a plain one, which
    keeps the graphs of all micro-batches."""
    student = step.student.train()
    student.zero_grad()
    script.seed_step(step.args, 7)
    if forward_backward is None:
        vectors = torch.cat([student(batch) for batch in batches])
        shares, gradient = script.pair_loss(step.args, batches, vectors.detach())
        vectors.backward(gradient)
    else:
        shares = forward_backward(step.args, student, batches, contextlib.nullcontext, 7)
    found = [p.grad.flatten() for p in student.parameters() if p.grad is not None]
    return shares.detach(), torch.cat(found)


def assert_close(found, expected):
    assert torch.allclose(found[0], expected[0], rtol=1e-5)
    assert (found[1] - expected[1]).norm() < 1e-4 * expected[1].norm()


def test_micro_batches_have_the_gradient_of_the_whole_step(step):
    """Negatives come from all of them."""
    whole, parts = [batches_of(step, size) for size in (24, 5)]
    assert (len(whole), len(parts)) == (1, 5)
    assert_close(gradient(step, parts, script.pair_step), gradient(step, whole))


def test_micro_batches_with_dropout(step):
    """The second pass drops what the first one has dropped."""
    for module in step.student.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.2
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
    for phase, function in zip(step.phases, (script.text_step, script.pair_step), strict=True):
        copies = Copies()
        with copies:
            batches = [batch.to(META) for batch in take_step(phase)]
        assert len(batches) == 3
        shares = function(step.args, step.student, batches, contextlib.nullcontext, 0)
        assert shares.device == META
        assert len(shares) == len(phase.data.parts)
        assert set(copies.found) == {True}, "the host waits for a copy"


def test_vectors_of_texts(step):
    """One by one or in groups, where they need little padding, they are the same; compared in full
    precision, whatever the network has."""
    seen = []
    model = step.student.model
    script.add_head(model, 32, 16)
    model[-4].register_forward_hook(
        lambda module, inputs, output: seen.append(output["sentence_embedding"].dtype)
    )
    data = step.phases[0].data
    rows = np.arange(0, 520, 13)

    def batch_of(rows):
        return script.make_batch(data.corpus, data.vectors, rows)

    texts = batch_of(rows)
    assert len(texts.ids) == script.GROUPS
    padded = sum(ids.numel() for ids in texts.ids)
    lengths = data.corpus.lengths[rows]
    assert lengths.sum() <= padded < 0.9 * 40 * lengths.max()
    with torch.no_grad():
        expected = step.student.eval()(texts)
        alone = [step.student(batch_of(rows[i : i + 1])) for i in range(40)]
        with torch.autocast("cpu", torch.bfloat16):
            found = step.student(texts)
    assert torch.allclose(torch.cat(alone), expected, atol=1e-5)
    assert {found.dtype, *seen} == {torch.float32}
    assert 0 < (found - expected).norm() < 0.1 * expected.norm()


def test_a_rank_reads_its_own_teacher_rows(step):
    data = step.phases[1].data
    batch = data[0, np.arange(24), np.arange(0, 24, 2)]
    assert (batch.n, batch.total, batch.per_query) == (12, 24, 3)
    assert len(data.vectors.read) == len(batch.rows) == 12 * 3


def test_negatives(step):
    """From those that are there, by (seed, step, place): on any number of ranks the same."""
    data = step.phases[1].data
    negatives = np.arange(1000)
    data.corpus = SimpleNamespace(negatives=negatives, negatives_ptr=np.array([0, 1, 11, 1000]))
    data.args.num_negatives = 4
    assert data.draw(0, 0, 0).tolist() == [0]
    drawn = data.draw(5, 2, 1)
    assert len(set(drawn) & set(range(1, 11))) == 4
    assert np.array_equal(drawn, data.draw(5, 2, 1))
    others = [data.draw(6, 2, 1), data.draw(5, 3, 1)]
    data.args.seed = 1
    others.append(data.draw(5, 2, 1))
    assert all(set(other) != set(drawn) for other in others)
    order = np.random.default_rng([1, 5]).choice(negatives[1:11], 4, replace=False)
    assert set(data.draw(5, 0, 1)) != set(order), "one stream for two things"


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
    count = len(queries)
    pairs = [(query, count + document) for query, own in enumerate(answers) for document in own]
    corpus = SimpleNamespace(eval_counts=[count], eval_pairs=np.array(pairs))
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
    corpus = SimpleNamespace(eval_counts=[0], eval_pairs=np.empty((0, 2)))
    assert script.ranking_metrics(corpus, documents) == {}


def test_the_artifact(trained):
    """As anybody loads it: by sentence-transformers' own evaluator the figures of the run. Queries
    have two answers each. (Its vectors: test_students.)"""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import evaluation

    (path,) = trained.summary["artifacts"]
    whole = SentenceTransformer(path, device="cpu")
    for module in whole:
        assert type(module).__module__.startswith("sentence_transformers.")

    corpus = trained.corpus
    queries, answers, distractors = np.split(corpus.eval_texts, np.cumsum(corpus.eval_counts)[:2])
    texts_of = [{}, {}]  # {number as a text: text} of queries and of documents
    for texts, rows in zip(texts_of, (queries, [*answers, *distractors]), strict=True):
        texts.update({str(i): trained.texts[row] for i, row in enumerate(rows)})
    relevant = {}
    for query, place in corpus.eval_pairs.tolist():
        relevant.setdefault(str(query), set()).add(str(place - len(queries)))
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


def test_which_checkpoints_are_the_best():
    """A figure that is not finite ends the run, and takes no weights."""
    saved = []
    loop = {"step": 9, "best": {"phase 1": {"value": 0.54}}}
    for value in (0.40, 0.55, 0.55):
        script.keep_best(loop, 2, {"ndcg@10": value}, saved.append)
    assert saved == ["phase2_best.pt", "phase2_best.pt", "best.pt"]
    with pytest.raises(RuntimeError, match="held-out figures are"):
        script.keep_best(loop, 2, {"ndcg@10": 0.6, "teacher_cosine": float("nan")}, saved.append)
    assert loop["best"]["phase 2"]["value"] == 0.55


def test_the_last_word_warns(caplog):
    best = {"metric": "ndcg@10", "value": 0.55, "metrics": {"ndcg@10": 0.55}}
    for untrained, is_warned in [(0.56, True), (0.53, False)]:
        caplog.clear()
        baselines = {"untrained": {"ndcg@10": untrained}, "teacher": {}}
        summary = script.finish(arguments(), None, {"best": {"phase 1": best}}, baselines)
        assert summary["best"] == best
        assert ("did not make the student better" in caplog.text) == is_warned


# --------------------------------------------------------------------------------------------------
# Runs


def test_mrl(work, trained, tmp_path):
    """The target is the first part of the teacher's vectors. Those of another run are found, also
    by another student."""
    teacher = save_network(tmp_path / "teacher", trained, "Bert", width=64, truncate=None)
    student = save_network(tmp_path / "student", trained, "Bert")
    options = [f"--teacher_model={teacher}", "--use_projection=False", "--skip_phase2"]
    options += [f"--output_dir={tmp_path}/mrl", "--max_steps=3"]
    said = run(*small(work, *options, f"--student_model={student}"))
    assert "The teacher reads" in said
    assert "The student, of 32 dimensions, learns 32 of the teacher's 64" in said
    said = run(*small(work, *options, "--fresh"), status=2)
    assert "The teacher reads" not in said
    assert "--use_projection False needs 128 teacher dimensions" in said


def test_skip_phase1(work, tmp_path, trained, step, caplog):
    """From weights of any run, from those in the folder, or from the raw student."""
    path = trained.folder / "phase1_best.pt"
    options = small(work, f"--output_dir={tmp_path}/out", "--skip_phase1", "--max_steps=2")
    said = run(*options, f"--phase1_weights={path}").split("phase=2")[0]
    assert f"Loading {path}" in said
    assert "held out here may have been" not in said
    assert {row["phase"] for row in Run(tmp_path / "out").rows} == {2}
    said = run(*options, "--phase1_weights=b.pt", status=2)
    assert f"phase1_weights was {path} when phase 2 began" in said

    state = torch.load(path)
    dimensions = len(state["model"][dense_bias(state)])
    script.add_head(step.student.model, 32, dimensions)
    args = arguments(*options)
    args.data_hash = "other data"
    script.begin_phase2(args, step.student, 0)
    assert "phase 2 starts from the untrained student" in caplog.text
    with pytest.raises(script.InputError, match="there are no such weights of phase 1"):
        script.begin_phase2(args, step.student, 9)  # of phase 1, not evaluated yet
    args.output_dir = str(trained.folder)
    script.begin_phase2(args, step.student, 9)
    assert "what is held out here may have been trained on" in caplog.text
    expected = state["model"]
    assert all(value.equal(expected[key]) for key, value in step.student.state_dict().items())


def dense_bias(state):
    """The name of the last bias, that of the head's second layer."""
    return [name for name in state["model"] if name.endswith("linear.bias")][-1]


def test_phases_one_after_the_other(work, tmp_path):
    """Options of phase 2 are free until it has begun, and phase 1 is kept. Where both runs are
    given the data of both, they have one split. Artifacts that are there are kept."""
    rows = [json.loads(line) for line in (work / "pairs.jsonl").read_text().splitlines()]
    (tmp_path / "texts.txt").write_text("\n".join(row["positive"][0] for row in rows))
    options = small(work, f"--output_dir={tmp_path}/out", f"--phase1_data={tmp_path}/texts.txt")
    options += ["--max_steps=2", "--save_to_artifacts", f"--artifacts_dir={tmp_path}/models"]
    run(*options, "--skip_phase2")
    more = ["--skip_phase1", "--phase2_lr=1e-4", "--num_negatives=0"]
    said = run(*options, *more, "--fresh", status=2)
    assert "--fresh moves" in said and "phase1_best.pt aside" in said
    said = run(*options, *more)
    assert "resuming" in said and "at step 2" in said
    assert f"Loading {tmp_path}/out/phase1_best.pt" in said
    assert "step=4 phase=2 " in said
    assert len([*tmp_path.glob("models/*.old-*")]) == len([*tmp_path.glob("models/*")]) / 2 == 1
    said = run(*options, "--skip_phase1", status=2)
    assert "phase2_lr was 0.0001 when phase 2 began" in said
    assert "skip_phase2 was False" in run(*options, *more[1:], "--skip_phase2", status=2)


def test_few_pairs(work, tmp_path):
    """Too few are refused before phase 1."""
    few = (work / "pairs.jsonl").read_text().splitlines(keepends=True)[:12]
    (tmp_path / "few.jsonl").write_text("".join(few))
    options = small(work, f"--output_dir={tmp_path}/out", f"--phase2_data={tmp_path}/few.jsonl")
    said = run(*options, "--global_batch_size=64", f"--cache_dir={tmp_path}/cache", status=2)
    assert f"--phase1_data {work}/pairs.jsonl, --phase2_data {tmp_path}/few.jsonl" in said
    assert "--global_batch_size 64: must be from 8 (ranks x micro-batches) to " in said
    assert "step=1 " not in said


# --------------------------------------------------------------------------------------------------
# Teachers


def test_lsa_is_a_truncated_svd_of_tfidf(tmp_path):
    """The vectors of scikit-learn's own pipeline."""
    from sentence_transformers import SentenceTransformer
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.pipeline import make_pipeline

    texts = [f"word{i % 17} and_other{i % 5} Third {i}" for i in range(60)]
    script.make_lsa(tmp_path / "lsa", texts)
    found = SentenceTransformer(str(tmp_path / "lsa"), device="cpu").encode(texts)
    tfidf = TfidfVectorizer(token_pattern=r"[^\W\d_]+|\d+", dtype=np.float32).fit(texts)
    tfidf.idf_ = tfidf.idf_**1.5
    svd = TruncatedSVD(min(60, len(tfidf.vocabulary_)), n_iter=3, random_state=0)
    expected = make_pipeline(tfidf, svd.fit(tfidf.transform(texts))).transform(texts)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    assert np.allclose(found, expected, atol=1e-4)


class Teacher:
    prompts = {"query": "q: ", "document": ""}
    encoded = 0

    def encode(self, texts, *, prompt, **options):
        assert prompt == ""
        Teacher.encoded += len(texts)
        return torch.tensor([[len(t), t.startswith("q: "), 1.0] for t in texts])


def test_teacher_vectors_are_computed_once(trained, tmp_path, group, monkeypatch):
    """A stopped run's blocks are not computed again, whichever they are: with other ranks they are
    not the first ones."""
    monkeypatch.setattr(script, "load_teacher", lambda *args: Teacher())
    monkeypatch.setattr(script, "BLOCK", 64)
    texts = trained.texts
    args = arguments(f"--cache_dir={tmp_path}", "--teacher_model=name")
    options = [args, trained.read, trained.corpus, CPU]
    vectors = script.teacher_vectors(*options)
    assert Teacher.encoded == len(texts)
    texts = script.with_prompts(Teacher, texts, trained.corpus.num_queries)
    expected = [[len(t), t.startswith("q: "), 1.0] for t in texts]
    expected = F.normalize(torch.tensor(expected), dim=1).numpy()
    found = vectors[np.arange(len(texts))]
    assert found.dtype == np.float16
    assert np.allclose(found, expected, atol=1e-3)

    (folder,) = tmp_path.iterdir()
    assert folder.name == f"{vectors.name}-cpu"
    for number in (0, 2):
        (folder / f"{64 * number:010}.npy").unlink()
    assert np.array_equal(script.teacher_vectors(*options)[np.arange(len(texts))], found)
    assert Teacher.encoded == len(texts) + 2 * 64

    # without its own code, or with another prompt, a teacher has other vectors
    for name, value in {"trust_remote_code": True, "teacher_query_prompt": "x"}.items():
        setattr(args, name, value)
        script.teacher_vectors(*options)
    assert len([*tmp_path.iterdir()]) == 3


# --------------------------------------------------------------------------------------------------
# Students


def save_network(folder, trained, kind, pooling="mean", limit=64, width=32, truncate=8, **config):
    """A small random network with the tokenizer of another student."""
    import transformers
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    tokenizer = transformers.AutoTokenizer.from_pretrained(trained.read / "student")
    tokenizer.model_max_length = limit
    if kind == "GPT2":
        tokenizer.pad_token = config.pop("pad_token", None)
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "num_hidden_layers": 3,
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
    modules = [Transformer(str(folder)), Pooling(width, pooling)]
    more = {"prompts": {"passage": "p: "}, "truncate_dim": truncate}
    model = SentenceTransformer(modules=modules, device="cpu", **more)
    model.save(str(folder), create_model_card=False)
    return str(folder)


SAVED = {  # kind of network: its pooling, more of its configuration
    "MPNet": ("mean", {}),
    "DistilBert": ("cls", {"hidden_dim": 64}),
    "ModernBert": ("mean", {}),
    "DebertaV2": ("mean", {}),
    "Qwen3": ("lasttoken", {"num_key_value_heads": 1, "head_dim": 16}),
    "GPT2": ("lasttoken", {"pad_token": "[PAD]"}),
}


@pytest.mark.parametrize("kind", SAVED)
def test_students(kind, trained, tmp_path, group, caplog):
    """Trained in groups of texts of similar length, saved and loaded: the same vectors."""
    from sentence_transformers import SentenceTransformer

    pooling, config = SAVED[kind]
    folder = save_network(tmp_path / "student", trained, kind, pooling, **config)
    options = [f"--student_model={folder}", "--student_query_prompt=q:", "--student_max_length=24"]
    args = arguments(*options, f"--artifacts_dir={tmp_path}")
    model = script.load_student(args, tmp_path)
    assert "1 prompts of the student are not used, such as passage" in caplog.text
    assert "truncate_dim 8 is not used" in caplog.text
    script.add_head(model, 16, 12)
    student = script.Student(model).train()
    texts = trained.texts[::15]
    num_queries = sum(number % 15 == 0 for number in range(trained.corpus.num_queries))
    fields = script.tokenize(model, script.with_prompts(model, texts, num_queries))
    corpus = trained.corpus._replace(**fields)
    batch = script.make_batch(corpus, Vectors(len(texts), 4), np.arange(len(texts)))
    script.check_gradients(args, student, batch)
    path = script.save_artifact(args, model)
    saved = SentenceTransformer(path, device="cpu")
    assert saved.prompts["passage"] == "p: "
    with torch.no_grad():
        found = student.eval()(batch).numpy()
    expected = saved.encode(script.with_prompts(model, texts, num_queries), prompt="")
    assert np.allclose(found, expected, atol=1e-5)
    assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)


def test_texts_that_are_cut_are_counted(trained, group, caplog):
    model = script.load_student(arguments("--student_model=builtin:bert"), trained.read)
    model.max_seq_length = 5
    fields = script.tokenize(model, ["where is", "where is item 3 of house 7 in hall 5"])
    assert fields["lengths"].tolist()[1] == 5
    assert "1 texts fill the student's 5 tokens: what is beyond is not read" in caplog.text


UNFIT = {  # kind of network, more of it, what is said
    "no maximum": (
        "T5",
        {"limit": int(1e30), "max_position_embeddings": None},
        "it has no maximum length|has no maximum length",
    ),
    "without prompts": ("Bert", {}, "pools without its prompts"),
    "a branch": ("Bert", {}, "no gradient reaches 1 of its parameters: 0.model.spare"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_students_that_are_refused(case, trained, tmp_path, group):
    """In one line, before the teacher reads, or before the first step."""
    kind, more, said = UNFIT[case]
    folder = save_network(tmp_path / "student", trained, kind, **more)
    args = arguments(f"--student_model={folder}", "--student_query_prompt=q:")
    if case == "without prompts":
        (config,) = (tmp_path / "student").glob("*Pooling/config.json")
        config.write_text(
            config.read_text().replace('"include_prompt": true', '"include_prompt": false')
        )
    with pytest.raises(script.InputError, match=said) as caught:
        model = script.load_student(args, tmp_path)
        model[0].model.spare = torch.nn.Parameter(torch.zeros(2))
        corpus = trained.corpus
        batch = script.make_batch(corpus, Vectors(len(trained.texts), 4), corpus.eval_texts[:4])
        script.check_gradients(args, script.Student(model), batch)
    assert f"--student_model {folder}" in str(caught.value)
    assert "\n" not in str(caught.value)


def run_guide(title, folder, monkeypatch, **replaced):
    """Run the lines of the guide that follow `title`."""
    text = (ROOT / "docs" / "DDP_TRAINING_GUIDE.md").read_text().partition(title)[2]
    lines = text.partition("```python\n")[2].partition("```")[0]
    for old, new in replaced.items():
        lines = lines.replace(old, new)
    monkeypatch.chdir(folder)
    exec(lines, {})


def test_a_student_of_some_layers(trained, tmp_path, monkeypatch):
    network = save_network(tmp_path / "six", trained, "Bert", num_hidden_layers=6)
    name = "sentence-transformers/all-MiniLM-L6-v2"
    run_guide("A student of some layers", tmp_path, monkeypatch, **{name: network})
    six = script.load_student(arguments(f"--student_model={network}"), tmp_path)
    three = script.load_student(arguments(f"--student_model={tmp_path}/my_student"), tmp_path)
    all_layers = six[0].model.encoder.layer
    layers = three[0].model.encoder.layer
    assert len(layers) == three[0].model.config.num_hidden_layers == 3
    for own, place in zip(layers, (0, 3, 5), strict=True):
        for ours, theirs in zip(own.parameters(), all_layers[place].parameters(), strict=True):
            assert ours.equal(theirs)


def test_rows_of_a_beir_folder(tmp_path, monkeypatch):
    (tmp_path / "qrels").mkdir()
    documents = [{"_id": f"d{i}", "title": "t", "text": f"document {i}"} for i in range(4)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(map(json.dumps, documents)))
    (tmp_path / "queries.jsonl").write_text('{"_id": "q", "text": "query"}')
    judged = "query-id\tcorpus-id\tscore\nq\td1\t1\nq\td2\t0\nq\td3\t2\n"
    (tmp_path / "qrels" / "train.tsv").write_text(judged)
    run_guide("A BEIR folder", tmp_path, monkeypatch)
    row = json.loads((tmp_path / "pairs.jsonl").read_text())
    assert row["positive"] == ["t document 1", "t document 3"]
    assert row["negative"] == ["t document 2"]


def test_a_teacher_with_code_of_its_own(tmp_path):
    options = [f"--cache_dir={tmp_path}", "--phase1_data=pydocs", "--phase2_data=pydocs"]
    assert "then give --trust_remote_code" in run(*options, "--device=cpu", status=2)


# --------------------------------------------------------------------------------------------------
# Options


@pytest.mark.parametrize(
    "words",
    [
        "--phase1_weights=a.pt",
        "--skip_phase1 --skip_phase2",
        "--teacher_max_length=9 --teacher_model=builtin:lsa",
        "--eval_fraction=0",
    ],
)
def test_options_that_cannot_be(words):
    with pytest.raises(script.InputError, match=words.partition("=")[0].split()[0]):
        arguments(*words.split())
