"""train_ddp.py and its two tools: known answers, and what a user sees of a run."""

import contextlib
import json
import shutil
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import ROOT, call_program, environment, free_port, import_tool, parse_arguments
from runs import Run
from test_accelerator import META, Copies
from torch.utils._python_dispatch import TorchDispatchMode

import train_ddp as script

SCRIPT = ROOT / "train_ddp.py"
PREPARE = ROOT / "tools" / "prepare_texts.py"
CPU = torch.device("cpu")


arguments = partial(parse_arguments, script)


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
        --global_batch_size=24 --batch_size=8 --log_every=1"""
    return [*data, f"--cache_dir={work}/cache", *common.split(), *options]


def run(*options, status=0):
    """What a run says, and where it ends with an error, that."""
    found, said = call_program(SCRIPT, *options, HF_HUB_OFFLINE=1)
    assert found == status, said[-3000:]
    return said


@pytest.fixture(scope="module")
def trained(work):
    """A run of both phases, with a head; its texts, and its untrained student."""
    options = [f"--output_dir={work}/out", "--save_to_artifacts", f"--artifacts_dir={work}/models"]
    options.append("--student_query_prompt=find: ")
    trained = Run(work / "out", text=run(*small(work, *options)))
    trained.corpus = script.Corpus(next(work.glob("cache/texts-*")))
    trained.student = str(next(work.glob("cache/bert-*")))
    return trained


# --------------------------------------------------------------------------------------------------
# Losses


def unit(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(*shape, generator=generator, dtype=torch.float64), dim=-1)


def test_the_distance_is_a_sum_over_dimensions():
    """|s - t|^2 = 2 (1 - cos) for unit vectors of any size: the weights mean the same for all."""
    for dim in (8, 768):
        s = unit(5, dim, seed=1)
        t = unit(5, dim, seed=2)
        cosine = F.cosine_similarity(s, t)
        assert torch.allclose(script.distance(s, t, 1.0, 0.0), 2 * (1 - cosine))
        assert torch.allclose(script.distance(s, t, 0.4, 0.6), 1.4 * (1 - cosine))


def pair_batch(total, places, targets, negatives=0):
    """Queries `places` of a step, with as many negatives each; all documents differ."""
    n = len(places)
    slots = n + torch.arange(n * (1 + negatives)).view(-1, n).T
    documents = torch.arange(total * (1 + negatives))
    positives = places[:, None] * (1 + negatives)
    return script.PairBatch(
        None, targets, torch.zeros(len(targets)), slots, places, positives, documents, total
    )


def test_infonce_is_multiple_negatives_ranking_loss(group):
    from sentence_transformers.sentence_transformer import losses

    q = unit(6, 16, seed=5).float()
    d = unit(6, 16, seed=6).float()
    theirs = losses.MultipleNegativesRankingLoss(None, scale=50.0)
    expected = theirs.compute_loss_from_embeddings([q, d], None).item()
    vectors = torch.cat([q, d])
    batch = pair_batch(6, torch.arange(6), vectors)
    args = arguments("--infonce_weight=0.5", "--false_negative_margin=2")
    loss, infonce, _ = script.pair_loss(args, [batch], [vectors])
    assert infonce.item() == pytest.approx(expected, rel=1e-5)
    assert loss.item() == pytest.approx(0.5 * expected, rel=1e-5)


def test_what_is_no_negative():
    """Gaps, other positives of the query, and what the teacher scores above the positive."""
    documents = torch.tensor([10, 11, 12, 10, -1, 13])
    positives = torch.tensor([[10, 13], [11, -1]])
    labels = torch.tensor([0, 1])
    scores = torch.tensor([[0.8, 0.9, 0.1, 0.8, 0.0, 0.5], [0.2, 0.7, 0.71, 0.2, 0.0, 0.1]])
    expected = {
        0.0: [[0, 1, 0, 1, 1, 1], [0, 0, 1, 0, 1, 0]],
        0.05: [[0, 1, 0, 1, 1, 1], [0, 0, 0, 0, 1, 0]],
        2.0: [[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 1, 0]],
    }
    for margin, rows in expected.items():
        masked = script.not_negatives(documents, positives, labels, scores, margin)
        assert masked.int().tolist() == rows


def gradient_of_a_step():
    """Of the loss of 7 queries, with two documents each, which are dealt to the ranks."""
    weight = torch.linspace(-1, 1, 30).view(6, 5).double().requires_grad_()
    items = torch.sin(torch.arange(7 * 3 * 6.0)).view(7, 3, 6).double()
    places = torch.arange(7)[dist.get_rank() :: dist.get_world_size()]
    texts = items[places].transpose(0, 1).flatten(0, 1)
    vectors = F.normalize(texts @ weight, dim=1)
    batch = pair_batch(7, places, torch.ones(len(texts), 5), negatives=1)
    args = arguments("--temperature=0.1", "--false_negative_margin=2")
    loss = script.pair_loss(args, [batch], [vectors])[0]
    with mock.patch.object(dist, "all_reduce", None):  # the backward pass is a reduce-scatter
        loss.backward()
    dist.all_reduce(weight.grad)
    return weight.grad


def load_slowly():
    began = time.time()
    time.sleep(0.3)
    return [began, time.time()]


THREE_RANKS = """
import sys
import torch
import torch.distributed as dist
import test_train_ddp
import train_ddp

dist.init_process_group("gloo")
gradient = test_train_ddp.gradient_of_a_step()
times = [None] * 3
dist.all_gather_object(times, train_ddp.load_in_turn(test_train_ddp.load_slowly))
if dist.get_rank() == 0:
    torch.save([gradient, times], sys.argv[1])
dist.destroy_process_group()
"""


def test_three_ranks(tmp_path, server, group):
    """The gradient is that of the whole batch, with unequal shares, too: 3, 2 and 2 queries. And
    they load the teacher one after the other."""
    (tmp_path / "program.py").write_text(THREE_RANKS)
    common = {"WORLD_SIZE": 3, "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    variables = [{**common, "RANK": rank} for rank in range(3)]
    server.start(variables, [str(tmp_path / "program.py"), str(tmp_path / "found.pt")])
    assert server.wait() == [0, 0, 0], server.text
    gradient, times = torch.load(tmp_path / "found.pt")
    assert gradient.abs().max() > 0.01
    assert torch.allclose(gradient, gradient_of_a_step(), rtol=1e-12, atol=1e-14)
    times.sort()
    for one, other in zip(times[:-1], times[1:], strict=True):
        assert one[1] <= other[0]


# --------------------------------------------------------------------------------------------------
# Evaluation


def test_ranking_metrics_against_counting(group):
    documents = torch.eye(12)
    second = 0.9 * documents[1] + documents[2]
    queries = torch.stack([documents[0], second, documents[3] - documents[4]])
    pairs = np.array([[0, 0], [1, 1], [1, 2], [2, 4]])  # found at the places 1, 2, 1, 12
    corpus = SimpleNamespace(eval_queries=[0, 1, 2], eval_pairs=pairs)
    found = script.ranking_metrics(corpus, torch.cat([queries, documents]))
    assert found["ndcg@10"] == pytest.approx(2 / 3)
    assert found["mrr@10"] == pytest.approx(2 / 3)
    assert found["recall@100"] == 1
    found = script.ranking_metrics(corpus, torch.ones(15, 12))
    assert found["mrr@10"] == 0  # one vector for all texts must not look good


def test_the_artifact_has_the_figures_of_the_run(trained):
    """By sentence-transformers' own evaluator, on the model as anybody loads it."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import evaluation

    base, whole = [SentenceTransformer(p, device="cpu") for p in trained.summary["artifacts"]]
    assert base.encode("text").shape == (32,)
    assert whole.encode("text").shape == (16,)
    for module in whole:
        assert type(module).__module__.startswith("sentence_transformers.")

    corpus = trained.corpus
    queries = {str(i): corpus.decode(n) for i, n in enumerate(corpus.eval_queries)}
    documents = {str(i): corpus.decode(n) for i, n in enumerate(corpus.eval_documents)}
    relevant = {}
    for query, document in corpus.eval_pairs.tolist():
        relevant.setdefault(str(query), set()).add(str(document))
    evaluator = evaluation.InformationRetrievalEvaluator(queries, documents, relevant)
    best = trained.summary["best"]["value"]
    assert evaluator(whole)["cosine_ndcg@10"] == pytest.approx(best, abs=2e-3)
    assert best > trained.summary["baselines"]["untrained"]["ndcg@10"] + 0.05


# --------------------------------------------------------------------------------------------------
# Runs


def test_mrl_and_the_teacher_once(work, trained):
    """The target is the first part of the teacher's vectors; those of another run are found."""
    options = [f"--output_dir={work}/mrl", "--use_projection=False", "--skip_phase2"]
    options += ["--student_model=builtin:bert:1x32", "--max_steps=3"]
    said = run(*small(work, *options, "--teacher_model=builtin:bert:1x64"))
    assert "The teacher reads" in said
    assert "the target is the first 32 of 64 dimensions" in said
    said = run(*small(work, *options, "--fresh"), status=2)
    assert "no teacher is needed" in said
    assert "--use_projection False needs 32 teacher dimensions" in said


def test_a_rate_changed_on_resume_is_applied(work, tmp_path, trained):
    options = [f"--output_dir={tmp_path}/out", "--skip_phase2", "--warmup_ratio=0"]
    run(*small(work, *options, "--max_steps=4"))
    said = run(*small(work, *options, "--max_steps=8", "--phase1_lr=1e-4"))
    assert "--phase1_lr 0.0001, it was 0.005" in said
    rates = [row["lr"] for row in Run(tmp_path / "out").rows if "lr" in row]
    assert len(rates) == 8
    assert rates[0] == 5e-3
    assert rates[4] == pytest.approx(0.5e-4)


def test_which_checkpoints_are_the_best():
    loop = {"step": 9, "epoch": 1, "best": {"phase 1": {"value": 0.54}}}
    train = SimpleNamespace(loop=loop, log=mock.Mock())
    assert script.note_metrics(train, 2, {"ndcg@10": float("nan")}) == []
    assert script.note_metrics(train, 2, {"ndcg@10": 0.40}) == ["phase2_best.pt"]
    assert script.note_metrics(train, 2, {"ndcg@10": 0.55}) == ["phase2_best.pt", "best.pt"]


def test_skip_phase1(work, tmp_path, trained, group, caplog):
    """From the checkpoint in the folder, or from the raw student."""
    options = small(work, f"--output_dir={tmp_path}/out", "--skip_phase1", "--max_steps=2")
    (tmp_path / "out").mkdir()
    shutil.copy(trained.folder / "phase1_best.pt", tmp_path / "out")
    assert "Loaded " in run(*options).split("phase=2")[0]
    found = Run(tmp_path / "out")
    assert {row["phase"] for row in found.rows} == {2}
    run(*options, "--phase2_lr=7")  # nothing is left to train
    assert found.summary["args"]["phase2_lr"] == 2e-3

    args = arguments(*options)
    script.load_weights(args, None, "none.pt", "phase 2 starts from the untrained student")
    assert "none.pt is missing or damaged: phase 2 starts from the untrained" in caplog.text
    args.student_model = "another"
    with pytest.raises(script.InputError, match="was trained with --student_model builtin:bert"):
        script.load_weights(args, None, "phase1_best.pt", "")


def test_without_a_hub_it_is_said_in_seconds(tmp_path):
    began = time.monotonic()
    env = environment(HF_HOME=tmp_path, HF_ENDPOINT="http://localhost:9")
    command = [sys.executable, SCRIPT, f"--output_dir={tmp_path}/out", f"--cache_dir={tmp_path}"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert time.monotonic() - began < 45  # 10 s on an idle machine
    assert "no model hub" in done.stdout
    assert "microsoft/ms_marco is not on this machine" in done.stderr
    assert "pydocs" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_the_last_word_warns(caplog):
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
        assert script.compare(mock.Mock(loop=loop))["value"] == max(values)
        said = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert [text.split(":")[0] for text in said] == expected


# --------------------------------------------------------------------------------------------------
# Students


def load(args, corpus, folder, dtype=torch.float32):
    model = script.load_student(args, folder)
    tokens = script.load_tokens(args, corpus, model)
    student = script.Student(model, dtype)
    limits = script.choose_groups(student, tokens, CPU)
    return student, tokens, limits


# whether one pass gives the same vectors: Roberta's positions start behind those of the padding
IN_ONE_PASS = {"MPNet": False, "Roberta": False, "Qwen3": True}


@pytest.mark.parametrize("kind", IN_ONE_PASS)
def test_students(kind, trained, tmp_path, group):
    """In one pass or in several, cut to 3 layers, saved and loaded: the same vectors, or an
    error. A small random network with the tokenizer of another student."""
    import transformers
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    folder = str(tmp_path / "student")
    tokenizer = transformers.AutoTokenizer.from_pretrained(trained.student)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=6,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,  # of Qwen3 alone, as is the next
        head_dim=16,
        max_position_embeddings=64,
        pad_token_id=0,
    )
    transformers.AutoModel.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    pooling = Pooling(32, "lasttoken" if kind == "Qwen3" else "mean")
    modules = [Transformer(folder, max_seq_length=24), pooling]
    SentenceTransformer(modules=modules, device="cpu").save(folder)

    args = arguments("--student_layers=3", f"--cache_dir={tmp_path}", f"--output_dir={tmp_path}")
    student, tokens, _ = load(args, trained.corpus, folder, torch.bfloat16)
    config = student.model[0].model.config
    assert config.num_hidden_layers == 3
    assert len(getattr(config, "layer_types", [1, 2, 3])) == 3
    assert student.in_one_pass == IN_ONE_PASS[kind]
    script.check_saving(args, student, trained.corpus, tokens)


class Casts(TorchDispatchMode):
    """Counts the casts of weights."""

    found = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "_to_copy" in str(function) and isinstance(args[0], torch.nn.Parameter):
            self.found += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture
def step(trained, tmp_path, group, work):
    """A run, as far as a step needs one, and its student."""
    args = arguments(*small(work, f"--output_dir={tmp_path}", f"--cache_dir={tmp_path}"))
    torch.manual_seed(0)
    student, tokens, limits = load(args, trained.corpus, trained.student)
    vectors = unit(len(trained.corpus.kinds), 32).numpy().astype(np.float16)
    data = script.TextData(tokens, vectors, limits, 32)
    return SimpleNamespace(args=args, corpus=trained.corpus, data=data, state=None), student


def test_a_step_of_each_phase_on_the_meta_device(step, monkeypatch):
    """There a tensor made elsewhere, a read value and a test of a tensor's value are errors."""
    run, student = step
    # autocast does not know this device
    monkeypatch.setattr(torch, "autocast", lambda *args, **options: contextlib.nullcontext())
    student.to("meta")
    for phase in (1, 2):
        sampler, data = script.make_sampler(run, phase)
        sampler.set_epoch(0)
        item = next(iter(sampler))
        copies = Copies()
        with copies:
            batch = script.move(data[item], META)
        vectors = student(batch.texts)
        if phase == 1:
            loss = script.text_loss(run.args, batch, vectors)
        else:
            loss = script.pair_loss(run.args, [batch], [vectors])[0]

        loss.backward()
        assert loss.device == META
        assert set(copies.found) == {True}, "the host waits for a copy"


def test_micro_batches_have_the_gradient_of_the_whole_step(step):
    """Negatives come from all of them."""
    run, student = step
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    found = []
    for batch_size in (24, 5):
        run.args.batch_size = batch_size
        sampler, data = script.make_sampler(run, 2)
        sampler.set_epoch(0)
        batches = [data[i] for _, i in zip(range(sampler.accumulation), sampler, strict=False)]
        student.zero_grad()
        parts = script.pair_step(run.args, student, student, batches, scaler, lambda: None)
        gradient = torch.cat([p.grad.flatten() for p in student.parameters() if p.grad is not None])
        found.append((parts, gradient))

    (whole_parts, whole), (parts, gradient) = found
    assert torch.allclose(parts, whole_parts, rtol=1e-5)
    assert (gradient - whole).norm() < 1e-4 * whole.norm()


def test_one_autocast_around_all_groups(step):
    run, student = step
    student.dtype = torch.bfloat16
    student.in_one_pass = False
    student.model[0].model.set_attn_implementation("sdpa")
    casts = []
    for layout in ((64, 0.9), (2, 0.0)):
        texts = script.lay_out(run.data.tokens, np.arange(40), *layout)
        with Casts() as counter:
            student(texts)
        casts.append((len(texts.shapes), counter.found))
    assert casts[0][0] == 1 and casts[1][0] > 5
    assert casts[0][1] == casts[1][1] > 0


def test_a_rank_reads_its_own_teacher_rows(step):
    run, _ = step

    class Counted(np.ndarray):
        rows = 0

        def __getitem__(self, key):
            Counted.rows += len(key[0])
            return np.asarray(self)[key]

    run.data.vectors = run.data.vectors.view(Counted)
    sampler, data = script.make_sampler(run, 2)
    sampler.set_epoch(0)
    batch = data[next(iter(sampler))]
    assert Counted.rows == len(batch.targets) < len(batch.documents)


# --------------------------------------------------------------------------------------------------
# Teacher vectors and negatives


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
    """A stopped run's blocks are not computed again."""
    monkeypatch.setattr(script, "load_teacher", lambda *args: Teacher())
    monkeypatch.setattr(script, "FEWEST_TOGETHER", 32)
    corpus = trained.corpus
    args = arguments(f"--cache_dir={tmp_path}")
    guard = mock.Mock()
    guard.agree.side_effect = ["", "", "SIGTERM"]
    options = [args, corpus, "name", tmp_path / "teacher", CPU, guard]
    assert script.teacher_vectors(*options) is None
    assert Teacher.encoded == 64

    guard.agree = lambda: ""
    vectors = script.teacher_vectors(*options)
    texts = corpus.texts(range(len(corpus.kinds)), Teacher.prompts)
    expected = [[len(t), t.startswith("q: "), 1.0] for t in texts]
    expected = F.normalize(torch.tensor(expected), dim=1).numpy()
    assert vectors.dtype == np.float16
    assert np.allclose(vectors, expected, atol=1e-3)
    assert np.array_equal(script.teacher_vectors(*options), vectors)
    assert Teacher.encoded == len(texts)


def test_negatives_are_drawn_from_those_that_are_there(step):
    run, _ = step
    _, data = script.make_sampler(run, 2)
    negatives = np.arange(1000).reshape(-1, 10)
    negatives[:20, 1:] = -1
    data.corpus = SimpleNamespace(negatives=negatives)
    data.args.num_negatives = 4
    whole = np.array([3, 5, 9, 20, 40])
    drawn = data.draw(whole)
    assert np.array_equal(drawn, data.draw(whole))
    assert [max(row) for row in drawn[:3]] == [30, 50, 90]
    for row, number in zip(drawn[3:], whole[3:], strict=True):
        assert len(set(row) & set(negatives[number])) == 4
    assert not np.array_equal(drawn, data.draw(whole[::-1])[::-1])


# --------------------------------------------------------------------------------------------------
# Texts


def prepare(out, *options, status=0):
    """The texts that the tool has made, or what it says."""
    found, said = call_program(PREPARE, *options, f"--out={out}")
    assert found == status, said
    return script.Corpus(out) if status == 0 else said


def decoded(corpus, numbers):
    return {corpus.decode(number) for number in np.ravel(numbers) if number >= 0}


def test_nothing_held_out_is_trained_on(trained):
    corpus = trained.corpus
    held = decoded(corpus, corpus.eval_queries)
    held |= decoded(corpus, corpus.eval_documents[: corpus.eval_answers])
    used = decoded(corpus, corpus.phase1) | decoded(corpus, corpus.pairs)
    used |= decoded(corpus, corpus.negatives)
    assert not held & used
    assert len(held) > 60
    for query, document in corpus.eval_pairs:
        name = corpus.decode(corpus.eval_queries[query]).split()[3]
        assert f" {name} " in corpus.decode(corpus.eval_documents[document]) + " "
    for pair, right, wrong in zip(corpus.pairs, corpus.positives, corpus.negatives, strict=True):
        assert pair[1] in right
        assert not {*right[right >= 0]} & {*wrong}


def test_the_split(work, tmp_path):
    """The same in any order; what it leaves is trained on; each source has its held-out rows;
    distractors as many as asked for; a group is held out together."""
    options = ["--eval_fraction=0.5", "--eval_samples=20"]
    (tmp_path / "texts.txt").write_text("\n".join(f"text {i}" for i in range(2000)))
    data = [f"--phase1_data={tmp_path}/texts.txt", f"--phase2_data={work}/pairs.jsonl"]
    found = prepare(tmp_path / "a", *data, *options)
    assert len(found.eval_queries) == 20
    assert len(found.pairs) == 2 * 110
    assert found.eval_answers == 20 + 2 * 20
    assert len(found.eval_documents) == 2 * found.eval_answers

    lines = (work / "pairs.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "other.jsonl").write_text("".join(reversed(lines)))
    path = f"--phase2_data={tmp_path}/other.jsonl"
    other = prepare(tmp_path / "b", path, *options, "--eval_distractors=0")
    assert decoded(other, other.eval_queries) == decoded(found, found.eval_queries)
    assert len(other.eval_documents) == 40

    rows = []
    for i in range(200):
        row = {"query": f"query {i}", "positive": f"document {i}", "group": i // 10}
        rows.append(json.dumps(row))
    (tmp_path / "groups.jsonl").write_text("\n".join(rows))
    found = prepare(tmp_path / "c", f"--phase2_data={tmp_path}/groups.jsonl", *options)
    groups = {int(text.split()[1]) // 10 for text in decoded(found, found.eval_queries)}
    assert len(found.eval_queries) == 10 * len(groups) == 20


def test_all_kinds_of_files(work, tmp_path):
    from datasets import Dataset

    rows = [json.loads(line) for line in (work / "pairs.jsonl").read_text().splitlines()]
    Dataset.from_list(rows).to_parquet(str(tmp_path / "pairs.parquet"))
    expected = prepare(tmp_path / "jsonl", f"--phase2_data={work}/pairs.jsonl")
    found = prepare(tmp_path / "parquet", f"--phase2_data={tmp_path}/pairs.parquet")
    assert decoded(found, found.pairs) == decoded(expected, expected.pairs)
    (tmp_path / "texts.txt").write_text("\n\n".join(f"text {i} of some" for i in range(50)))
    found = prepare(tmp_path / "txt", f"--phase1_data={tmp_path}/texts.txt")
    assert len(found.phase1) + found.eval_answers == 50
    assert len(found.pairs) == 0

    # as spreadsheets write it: a byte-order mark, empty cells, a cell of any length
    lines = ["anchor,positive,negatives,hard"]
    lines += [f"query {i},document {i},," for i in range(20)]
    lines.append(f"long,{'word ' * 40_000},wrong,")
    (tmp_path / "pairs.csv").write_text("\r\n".join(lines), encoding="utf-8-sig")
    options = ["--eval_fraction=0.5", "--eval_distractors=inf", f"--out={tmp_path}/csv"]
    status, said = call_program(PREPARE, f"--phase2_data={tmp_path}/pairs.csv", *options)
    assert status == 0
    assert "pairs.csv: these columns are not read: hard" in said
    found = script.Corpus(tmp_path / "csv")
    assert len(found.pairs) + len(found.eval_queries) == 21
    assert len(found.eval_documents) == (found.kinds == 1).sum() == 22


def test_queries_among_the_texts_of_phase_1_are_queries(work, tmp_path):
    """Held out as documents, they would be found before those that answer them."""
    rows = [json.loads(line) for line in (work / "pairs.jsonl").read_text().splitlines()]
    queries = {row["query"] for row in rows}
    (tmp_path / "texts.txt").write_text("\n".join([*queries, "another text"]), encoding="utf-8-sig")
    options = [f"--phase1_data={tmp_path}/texts.txt", f"--phase2_data={work}/pairs.jsonl"]
    found = prepare(tmp_path / "out", *options, "--eval_fraction=0.5")
    assert not decoded(found, found.eval_documents) & queries
    trained = decoded(found, found.phase1)
    assert trained & queries == queries - decoded(found, found.eval_queries)


BAD = [
    b'{"query": "no positive"}',
    b"not json",
    b"\xff\xfe",
    b'{"query": "q", "positive": ["fine", 3]}',
    b'{"query": "half a character \\ud800", "positive": "p"}',
]


def test_bad_rows_are_all_named(work, tmp_path):
    good = (work / "pairs.jsonl").read_bytes().splitlines()
    path = tmp_path / "pairs.jsonl"
    path.write_bytes(b"\n".join(good[:10] + BAD + good[10:] + [b"broken"] * 30))
    said = prepare(tmp_path / "out", f"--phase2_data={path}", status=1)
    for number in range(11, 16):
        assert f"{path} line {number}: " in said
    assert "35 bad rows" in said
    assert "and 15 more" in said
    assert len(said.splitlines()) == 22
    assert not (tmp_path / "out").exists()
    found = prepare(tmp_path / "out", f"--phase2_data={path}", "--skip_bad_data")
    assert len(found.pairs) + 2 * len(found.eval_queries) == 260
    assert len((tmp_path / "out" / "bad_rows.txt").read_text().splitlines()) == 35

    (tmp_path / "empty.txt").write_text("")
    for name, expected in {"gone.jsonl": "No such file", "empty.txt": "give more data"}.items():
        said = prepare(tmp_path / "none", f"--phase1_data={tmp_path}/{name}", status=1)
        assert expected in said
        assert len(said.splitlines()) == 1

    (tmp_path / "pairs.csv").write_text("query,positive\nq,red, hard and rare\nq,\n")
    said = prepare(tmp_path / "none", f"--phase2_data={tmp_path}/pairs.csv", status=1)
    assert "line 2: 1 fields more than the header has" in said
    assert "line 3: found columns ['query'] with content" in said


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


def test_too_few_pairs_are_found_before_phase_1(work, tmp_path):
    few = (work / "pairs.jsonl").read_text().splitlines(keepends=True)[:12]
    (tmp_path / "few.jsonl").write_text("".join(few))
    options = small(work, f"--output_dir={tmp_path}/out", f"--phase2_data={tmp_path}/few.jsonl")
    said = run(*options, "--teacher_model=builtin:lsa:8", "--global_batch_size=64", status=2)
    assert "--batch_size x GPUs: 64 samples a step, must be from" in said
    assert "step=1 " not in said


def test_ms_marco(tmp_path, monkeypatch):
    """Selected passages are positives, the validation split is held out."""

    def load_dataset(path, config, split):
        assert (path, config) == ("microsoft/ms_marco", "v1.1")
        rows = []
        for i in range(6):
            name = f"{split} {i}"
            passages = {
                "is_selected": [0, i % 5],
                "passage_text": [f"{name} wrong", f"{name} right"],
            }
            rows.append({"query": name, "passages": passages})
        return rows

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    tool = import_tool("prepare_texts")
    options = ["--phase2_data=ms_marco", "--eval_samples=3", f"--out={tmp_path}/out"]
    tool.main(parse_arguments(tool, *options))
    found = script.Corpus(tmp_path / "out")
    assert decoded(found, found.eval_queries) == {"validation 1", "validation 2"}
    numbers = range(1, 5)  # nothing is selected for queries 0 and 5
    assert decoded(found, found.pairs[:, 0]) == {f"train {i}" for i in numbers}
    assert decoded(found, found.pairs[:, 1]) == {f"train {i} right" for i in numbers}
    assert decoded(found, found.negatives) == {f"train {i} wrong" for i in numbers}


# --------------------------------------------------------------------------------------------------
# Options


def test_options_that_cannot_be():
    for option in ("--false_negative_margin=-3", "--phase2_data=texts.txt", "--phase1_lr=nan"):
        with pytest.raises(script.InputError, match=option.partition("=")[0]):
            arguments(option)


def test_learning_rates():
    args = arguments("--warmup_ratio=0.25")
    found = [script.lr_factor(args, step, 8) for step in range(8)]
    fall = [1 - i / 6 for i in range(6)]
    assert found == pytest.approx([1 / 3, 2 / 3, *fall])
