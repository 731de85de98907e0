"""train_ddp.py: known answers, and what a user sees of a run. (What it reads: test_texts.py.)

python tests/test_train_ddp.py OUT    a rank, which writes its losses into the file OUT
"""

import contextlib
import itertools
import json
import re
import sys
from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pandas
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from helpers import call_script, check_refused, parse_arguments, rank_variables, run_here
from runs import COMMON, TINY, Run, differences
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Router, Transformer
from sklearn.metrics import ndcg_score
from test_accelerator import META, Copies

import train_ddp as script

arguments = partial(parse_arguments, script)
run = partial(call_script, "train_ddp", HF_HUB_OFFLINE=1)  # what a run says


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """Of a run of seconds."""
    own = """--student_max_length=16 --eval_fraction=0.3 --phase1_epochs=3 --phase1_lr=5e-3
        --phase2_lr=2e-3 --num_negatives=1 --batch_size=8 --student_query_prompt=find:"""
    return [*COMMON, *TINY["train_ddp"](tmp_path_factory.mktemp("work")), *own.split()]


@pytest.fixture(scope="module")
def trained(options, tmp_path_factory):
    """A run of both phases, with a head; its texts, and the folder of its untrained student."""
    folder = tmp_path_factory.mktemp("trained")
    run(*options, f"--cache_dir={folder}/cache", f"--output_dir={folder}/out")
    trained = Run(folder / "out")
    (trained.read,) = folder.glob("cache/texts-*")  # the folder with texts and builtin models
    trained.corpus = script.load_corpus(trained.read, torch.device("cpu"))
    trained.roles_and_texts = json.loads((trained.read / "texts.json").read_text())
    trained.texts = [text for _, text in trained.roles_and_texts]
    return trained


@pytest.fixture
def step(request, trained, options, tmp_path, group):
    """Args (its parameter: --batch_size), a student, the data of both phases with some vectors."""
    size = getattr(request, "param", 8)
    args = arguments(*options, f"--batch_size={size}", f"--output_dir={tmp_path}")
    torch.manual_seed(0)
    student = script.Student(script.load_student(args, trained.read))
    phases = script.make_phases(args, trained.corpus, student.model, torch.device("cpu"))
    for phase in phases:
        phase.data.vectors = teacher_vectors(trained.texts)
    return SimpleNamespace(args=args, student=student, phases=phases)


def teacher_vectors(texts):
    """Random ones, longer than those of the student."""
    vectors = torch.randn(len(texts), 160, generator=torch.Generator().manual_seed(0))
    return F.normalize(vectors, dim=1).numpy().astype(np.float16)


# ---- Losses --------------------------------------------------------------------------------------

# Pairs of a step: the first two are of one query, the next two have one document. Each has two
# documents that do not answer it, of which one is the positive of another pair.
PAIRS = torch.tensor([[1, 11], [1, 12], [2, 13], [3, 13], [4, 14], [5, 15], [6, 16]])
QUERIES = len(PAIRS)
WRONG = torch.tensor([[20 + q, int(PAIRS[(q + 4) % QUERIES, 1])] for q in range(QUERIES)])
DOCUMENTS = torch.cat([PAIRS[:, 1:], WRONG], dim=1)


def tensors_of_a_step():
    """Weights of a network; texts and targets (QUERIES, 4, ...): of queries and their documents."""
    weight = torch.linspace(-1, 1, 30).view(6, 5).double().requires_grad_()
    texts = torch.sin(torch.arange(QUERIES * 4 * 6.0)).view(QUERIES, 4, 6).double()
    targets = torch.cos(torch.arange(QUERIES * 4 * 5.0) ** 2).view(QUERIES, 4, 5)
    return weight, texts, targets


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
    """The same by pair_loss, summed over the ranks."""
    weight, texts, targets = tensors_of_a_step()
    args = arguments("--temperature=0.5", f"--false_negative_margin={margin}")
    batches = []
    vectors = []
    for ids in torch.arange(QUERIES)[dist.get_rank() :: dist.get_world_size()].split(2):
        n = len(ids)
        order = [0] * n + [1] * n + [2, 3] * n
        rows = torch.cat([ids, ids, ids.repeat_interleave(2)])
        numbers = torch.cat([*PAIRS[ids].T, WRONG[ids].flatten()])
        batches.append(script.Batch([], [], None, numbers, targets[rows, order], QUERIES, n, 3))
        vectors.append(F.normalize(texts[rows, order] @ weight, dim=1))
    vectors = torch.cat(vectors)
    shares, gradient = script.pair_loss(args, batches, vectors.detach())
    vectors.backward(gradient)
    for share in (shares, weight.grad):
        dist.all_reduce(share)
    return shares, weight.grad


def test_the_loss_of_phase_2(tmp_path, server):
    """On three ranks with unequal shares, in micro-batches. Better answers are no negatives."""
    server.start(rank_variables(3), [__file__, str(tmp_path / "found.pt")])
    assert server.wait() == [0, 0, 0], server.text
    all_found = torch.load(tmp_path / "found.pt")
    all_expected = [*expected_pairs(2.0), *expected_pairs(0.0)]
    for found, expected in zip(all_found, all_expected, strict=True):
        assert expected.abs().max() > 0.01
        assert torch.allclose(found.double(), expected, rtol=1e-6, atol=1e-8)


# ---- Steps ---------------------------------------------------------------------------------------


def take_step(phase):
    """The micro-batches of the first step of a phase."""
    items = itertools.islice(phase.sampler, phase.sampler.accumulation)
    return [phase.data[item] for item in items]


def gradient(student):
    found = torch.cat([p.grad.flatten() for p in student.parameters() if p.grad is not None])
    student.zero_grad()
    return found


def test_the_loss_of_phase_1(step):
    """In micro-batches. The target is the first part of the teacher's vectors."""
    student = step.student
    batches = take_step(step.phases[0])
    vectors = torch.cat([student(batch) for batch in batches])
    targets = torch.cat([batch.targets for batch in batches]).float()
    targets = F.normalize(targets[:, : vectors.shape[1]], dim=1)
    loss = 2 - 2 * (vectors * targets).sum(1).mean()
    loss.backward()
    expected = gradient(student)
    share = script.text_step(student, batches, contextlib.nullcontext)
    assert share.item() == pytest.approx(loss.item(), rel=1e-5)
    assert (gradient(student) - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize("step", [24, 5], indirect=True)
def test_micro_batches_with_dropout(step):
    """As in a plain step, which keeps all graphs: the second pass drops what the first dropped."""
    student = step.student.train()
    for module in student.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.2

    batches = take_step(step.phases[1])
    assert len(batches) == {24: 1, 5: 5}[step.args.batch_size]
    script.seed_step(step.args, 7)
    vectors = torch.cat([student(batch) for batch in batches])
    expected_shares, by_vectors = script.pair_loss(step.args, batches, vectors.detach())
    vectors.backward(by_vectors)
    expected = gradient(student)
    script.seed_step(step.args, 7)
    shares = script.pair_step(step.args, student, batches, contextlib.nullcontext, 7)
    assert torch.allclose(shares, expected_shares, rtol=1e-5)
    assert (gradient(student) - expected).norm() < 1e-4 * expected.norm()


def test_a_step_of_each_phase_on_the_meta_device(step, monkeypatch):
    """There a tensor made elsewhere, a read value and a test of a tensor's value are errors."""
    # autocast does not know this device
    monkeypatch.setattr(torch, "autocast", lambda *args, **options: contextlib.nullcontext())
    script.keep_masks_whole()
    step.student.to("meta")
    functions = [script.text_step, lambda *rest: script.pair_step(step.args, *rest, 0)]
    for phase, function in zip(step.phases, functions, strict=True):
        copies = Copies()
        with copies:
            batches = [batch.to(META) for batch in take_step(phase)]
        assert len(batches) > 1
        shares = function(step.student, batches, contextlib.nullcontext)
        assert shares.device == META
        assert set(copies.found) == {True}, "the host waits for a copy"


def test_vectors_are_compared_in_full_precision(step):
    """Whatever the network has."""
    seen = []
    model = step.student.model
    step.student.add_head(32, 16)
    model[-4].register_forward_hook(lambda *call: seen.append(call[2]["sentence_embedding"].dtype))
    batch = take_step(step.phases[0])[0]
    with torch.no_grad():
        expected = step.student.eval()(batch)
        with torch.autocast("cpu", torch.bfloat16):
            found = step.student(batch)
    assert {found.dtype, *seen} == {torch.float32}
    assert 0 < (found - expected).norm() < 0.1 * expected.norm()


def test_negatives(step):
    """Drawn from those that are there, by (seed, step, place): anew in each step."""
    data = step.phases[1].data
    data.args.num_negatives = 4
    assert data.draw(0, 0, [7]) == [7]
    own = np.arange(1, 11)
    drawn = [data.draw(5, 2, own), data.draw(6, 2, own), data.draw(5, 3, own)]
    data.args.seed = 1
    drawn.append(data.draw(5, 2, own))
    assert all(len(set(found) & set(own)) == 4 for found in drawn)
    assert len({tuple(sorted(own)) for own in drawn}) == 4


def test_learning_rates():
    args = arguments("--warmup_ratio=0.25")
    found = [script.lr_factor(args, step, 8) for step in range(8)]
    assert found == pytest.approx([1 / 3, 2 / 3, *[1 - i / 6 for i in range(6)]])


# ---- Evaluation ----------------------------------------------------------------------------------


def test_ranking_metrics_against_counting():
    """One vector for all texts must not look good; a query's answers do not count against it."""
    d = torch.eye(120)  # vectors of documents
    third = 1 / np.log2(3)
    cases = [  # vector of a query, its answers, nDCG@10, MRR@10, recall@100
        (0.9 * d[1] + d[2], [1, 2], 1, 1, 1),
        (0.9 * d[1] + d[2], [1, 5], third / (1 + third), 1 / 2, 1 / 2),
        (d[0] + d[1], [0, 1], 1, 1, 1),  # they tie
        (d[0] + d[1], [0], third, 1 / 2, 1),  # with another document
        (d[:50].sum(0), [0], 0, 0, 1),  # with 49
        (torch.ones(120), [0], 0, 0, 0),
    ]
    for query, own, *expected in cases:
        answers = np.array([[0, 1 + document, 1] for document in own])
        corpus = SimpleNamespace(queries=[0], answers=answers)
        found = script.ranking_metrics(corpus, torch.cat([query[None], d]))
        assert [*found.values()] == pytest.approx(expected), (query, own)


def write_beir(folder):
    """130 queries of three halls; of each, a document has grade 2, another 1, some 0. Untidy."""
    (folder / "qrels").mkdir(parents=True)
    documents = [{"_id": "none", "text": " "}]
    queries = []
    grades = {"train": [], "dev": ["query-id\tcorpus-id\tscore"], "test": []}
    for i in range(130):
        place = f"item {i} of house {i % 13}"
        documents.append({"_id": f"d{i}", "title": place, "text": f"is in hall {i % 7}"})
        documents.append({"_id": f"e{i}", "text": f"see shelf {i} for {place}"})
        queries.append({"_id": i, "text": f"where is {place}"})
        split = ["train", "train", "train", "dev", "test"][i % 5]
        judged = {f"d{i * 7 % 130}": 0, f"d{i}": 2, f"e{i}": 1}
        grades[split] += [f"{i}\t{document}\t{grade}" for document, grade in judged.items()]
    grades["test"] = [line.replace("\t", " Q0 ", 1) for line in grades["test"]]  # as TREC writes
    grades["test"] += ["3 Q0 gone 1", "4 Q0 none 1", "again Q0 d5 1"]
    queries.append({"_id": "again", "text": queries[4]["text"]})  # two queries of one text
    for name, rows in {"corpus": documents, "queries": queries}.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for split, lines in grades.items():
        (folder / "qrels" / f"{split}.tsv").write_text("\n".join(lines) + "\n")


def test_a_collection_in_the_layout_of_beir(options, tmp_path):
    """Trained on one split, chosen by another, tested by the third; nDCG by scikit-learn's."""
    write_beir(tmp_path / "beir")
    assert len(script.files_of(f"{tmp_path}/beir/qrels/dev.tsv")) == 5  # its texts, too
    words = [f"--{name}_data={tmp_path}/beir" for name in ("phase1", "phase2", "eval", "test")]
    words += [f"--cache_dir={tmp_path}/cache", f"--artifacts_dir={tmp_path}/models"]
    said = run(*options, *words, f"--output_dir={tmp_path}/out", "--save_to_artifacts")
    assert "1 texts are empty, and left out" in said
    assert "2 judgments name a query or a document that is not there, or is empty" in said
    assert f"{tmp_path}/beir/qrels/test.tsv: 27 judged queries" in said
    assert re.search(r"  before training .*\n.*  test \(best: phase \d, step \d+\) ", said, re.S)
    (read,) = tmp_path.glob("cache/texts-*")
    corpus = script.load_corpus(read, torch.device("cpu"))
    texts = [text for _, text in json.loads((read / "texts.json").read_text())]
    trained_on = {texts[i] for i in [*corpus.phase1, *corpus.pairs[:, 0]]}
    evaluated = {texts[i] for part in (corpus.held_out, corpus.test) for i in part.queries}
    assert len(evaluated) == 52 and not evaluated & trained_on
    assert len(corpus.pairs) == 2 * 78 and len(corpus.phase1) == 78 + 2 * 130

    summary = Run(tmp_path / "out").summary
    student = SentenceTransformer(summary["artifacts"][0], device="cpu")
    for module in student:  # anybody can load it
        assert type(module).__module__.startswith("sentence_transformers.")
    found = [(corpus.held_out, summary["best"]["metrics"]), (corpus.test, summary["test"])]
    for part, metrics in found:
        queries = student.encode([texts[i] for i in part.queries], prompt_name="query")
        documents = student.encode([texts[i] for i in part.documents], prompt_name="document")
        grades = np.zeros((len(queries), len(documents)))
        for query, document, grade in part.answers:
            grades[query, document - len(queries)] = grade
        assert set(grades.flat) == {0, 1, 2}
        expected = ndcg_score(grades, queries @ documents.T, k=10)
        assert metrics["ndcg@10"] == pytest.approx(expected, abs=1e-6)


def test_which_checkpoints_are_the_best():
    """A figure that is not finite ends the run, and takes no weights."""
    saved = []
    loop = {"step": 9, "best": {"phase 1": {"value": 0.54}}}
    for value in (0.40, 0.55, 0.55):
        script.keep_best(loop, 2, {"ndcg@10": value}, saved.append)
    assert saved == ["phase2_best.pt", "phase2_best.pt", "best.pt"]
    with pytest.raises(RuntimeError, match="validation teacher_cosine is nan: a lower --phase2"):
        script.keep_best(loop, 2, {"ndcg@10": 0.6, "teacher_cosine": float("nan")}, saved.append)
    assert loop["best"]["phase 2"]["value"] == 0.55


# ---- Runs ----------------------------------------------------------------------------------------


def test_mrl(options, trained, tmp_path):
    """The target is the first part of the teacher's vectors, which another student's run finds."""
    teacher = save_network(tmp_path / "teacher", trained, "Bert", width=64, truncate=None)
    student = save_network(tmp_path / "student", trained, "Bert")
    own = [f"--teacher_model={teacher}", "--use_projection=False", "--skip_phase2"]
    own += [f"--output_dir={tmp_path}/mrl", "--max_steps=3", "--phase1_lr=0"]
    said = run(*options, *own, f"--student_model={student}")
    assert "The teacher reads" in said
    assert "The student, of 32 dimensions, learns 32 of the teacher's 64" in said
    assert re.search(r"  teacher  .*\n.*  its first 32 ", said)
    full = (trained.corpus.lengths == 16).sum()
    assert f"{full} texts fill the student's 16 tokens: what is beyond is not read" in said
    assert "training did not make the student better" in said
    said = run(*options, *own, "--fresh", status=2)
    assert "The teacher reads" not in said
    assert "--use_projection False needs 128 teacher dimensions" in said


def test_begin_phase2(trained, step, caplog):
    """From weights of any run, or from the raw student."""
    path = trained.folder / "phase1_best.pt"
    expected = torch.load(path)["model"]
    *_, last_bias = expected.values()
    step.student.add_head(32, len(last_bias))
    step.args.data_hash = "other data"
    script.begin_phase2(step.args, step.student, 0)
    assert "phase 2 starts from the student as it is" in caplog.text
    with pytest.raises(script.InputError, match="there is no such file; expected weights"):
        script.begin_phase2(step.args, step.student, 9)  # of phase 1, not evaluated yet

    step.args.phase1_weights = str(path)
    script.begin_phase2(step.args, step.student, 0)
    assert "what is held out here may have been trained on" in caplog.text
    assert not differences(expected, step.student.state_dict())
    step.args.phase1_weights = __file__
    check_refused("expected phase1_best.pt", script.begin_phase2, step.args, step.student, 0)


def test_phases_one_after_the_other(options, trained, tmp_path):
    """Phase 1 is kept; options of phase 2 are free until it has begun. The split is one."""
    (tmp_path / "texts.txt").write_text("\n\n".join(trained.texts))
    options = [*options, f"--output_dir={tmp_path}/out", f"--phase1_data={tmp_path}/texts.txt"]
    options += ["--max_steps=2", "--save_to_artifacts", f"--artifacts_dir={tmp_path}/models"]

    run(*options, "--skip_phase2")
    said = run(*options, "--skip_phase1", "--phase2_lr=1e-4", "--num_negatives=0")
    assert "resuming" in said and "at step 2" in said
    assert f"Loading {tmp_path}/out/phase1_best.pt" in said
    assert "may have been trained on" not in said
    assert "step=4 phase=2 " in said
    (path,) = tmp_path.glob("models/*")  # phase 2 has not made it better
    assert f"Saved {path} (best: phase 1, step 2)" in said


REFUSED_EARLY = {  # options; what is said, before the teacher reads, which takes hours
    "--phase1_weights=a.pt": "--phase1_weights is for --skip_phase1",
    "--skip_phase1 --skip_phase2": "--skip_phase2 together leave nothing to train",
    "--teacher_query_prompt=q:": "--teacher_query_prompt: builtin:lsa is no network",
    "--max_samples_phase2=12 --global_batch_size=64": "must be from 8 .* to 10",
    "--teacher_model=./gone": "--teacher_model ./gone: there is no such file or folder",
    "--teacher_model=gone.parquet": "--teacher_model gone.parquet: there is no such file",
    "--skip_phase1 --phase1_weights=gone.pt": "--phase1_weights gone.pt: there is no such file",
    "--output_dir=OLD --skip_phase1 --fresh": "--fresh moves .*/phase1_best.pt aside",
    "--output_dir=OLD --phase1_lr=1": "phase1_lr is 1.0, and .* has a run with 0.005",
    "--output_dir=OLD --phase2_lr=1": "phase2_lr was 0.002 when phase 2 began",
    f"--teacher_model={arguments().teacher_model}": "code of its own: .* --trust_remote_code",
}


@pytest.mark.parametrize("more", REFUSED_EARLY)
def test_refused_before_the_teacher_reads(more, options, trained, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "teacher_vectors", lambda *args: pytest.fail("the teacher reads"))
    words = [*options, f"--output_dir={tmp_path}"]
    words += more.replace("OLD", str(trained.folder)).split()

    def start():
        arguments(*words)  # which refuses some
        run_here(script, *words)

    check_refused(REFUSED_EARLY[more], start)


def test_teacher_vectors_are_computed_once(trained, tmp_path, group, monkeypatch):
    """A stopped run's blocks are not computed again, also where they are not the first ones."""

    def encode(texts, *, prompt, **options):
        assert prompt == ""
        return torch.tensor([[len(t), t.startswith("q: "), 1.0] for t in texts])

    teacher = mock.Mock(prompts={"query": "q: ", "document": ""}, encode=mock.Mock(wraps=encode))
    monkeypatch.setattr(script, "load_teacher", lambda *args: teacher)
    monkeypatch.setattr(script, "BLOCK", 64)
    args = arguments(f"--cache_dir={tmp_path}", "--teacher_model=name")
    options = [args, trained.read, trained.corpus._replace(teacher=None), torch.device("cpu")]
    every = np.arange(len(trained.texts))
    found = script.teacher_vectors(*options)[every]
    texts = script.with_prompts(teacher, trained.roles_and_texts)
    expected = F.normalize(encode(texts, prompt=""), dim=1).numpy()
    assert found.dtype == np.float16
    assert np.allclose(found, expected, atol=1e-3)

    (folder,) = tmp_path.iterdir()
    for number in (0, 2):
        (folder / f"{64 * number:010}.npy").unlink()
    teacher.encode.reset_mock()
    assert np.array_equal(script.teacher_vectors(*options)[every], found)
    assert teacher.encode.call_count == 2

    # without its own code, or with another prompt, a teacher has other vectors
    for name, value in {"trust_remote_code": True, "teacher_query_prompt": "x"}.items():
        setattr(args, name, value)
        script.teacher_vectors(*options)
    assert len([*tmp_path.iterdir()]) == 3


def test_vectors_of_a_file(options, trained, tmp_path):
    """Those of another run: the same weights, bit by bit. What is wrong is named with its row."""
    vectors = np.load(trained.read / "teacher.npy").astype(np.float32)
    rows = []
    for (role, text), vector in zip(trained.roles_and_texts, vectors, strict=True):
        rows.append({"query" if role == "query" else "text": text, "vector": vector})
    path = f"{tmp_path}/vectors.parquet"
    pandas.DataFrame(rows).to_parquet(path)
    own = [f"--cache_dir={tmp_path}/cache", f"--teacher_model={path}"]
    run(*options, *own, f"--output_dir={tmp_path}/out")
    states = [torch.load(folder / "best.pt") for folder in (trained.folder, tmp_path / "out")]
    assert not differences(states[0]["model"], states[1]["model"])

    def check_file(said):
        pandas.DataFrame(rows).to_parquet(path)
        check_refused(said, script.read_vectors, path, trained.roles_and_texts, tmp_path / "read")

    rows[7]["vector"] = vectors[7] * np.nan
    check_file("row 8: vector has .* numbers, 0 finite")
    role, text = trained.roles_and_texts[0]
    del rows[0]
    check_file(f"no row has the {role} '{text}'")


def save_network(folder, trained, kind, pooling="mean", limit=64, width=32, truncate=8, **config):
    """A small random network with the tokenizer of another student."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(trained.read / "student")
    tokenizer.model_max_length = limit
    sizes = {"hidden_size": width, "intermediate_size": 64, "num_hidden_layers": 3, **config}
    sizes.update(vocab_size=len(tokenizer), pad_token_id=0, num_attention_heads=2)
    sizes["max_position_embeddings"] = limit + 2
    network = transformers.AutoModel.from_config(getattr(transformers, f"{kind}Config")(**sizes))
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    modules = [Transformer(str(folder)), Pooling(width, pooling)]
    more = {"prompts": {"passage": "p: "}, "truncate_dim": truncate}
    model = SentenceTransformer(modules=modules, device="cpu", **more)
    model.save(str(folder), create_model_card=False)
    return str(folder)


SAVED = {  # kind of network: its pooling and sizes
    "MPNet": {},
    "DistilBert": {"pooling": "cls", "hidden_dim": 64},
    "ModernBert": {},
    "Qwen3": {"pooling": "lasttoken", "num_key_value_heads": 1, "head_dim": 16},
}


@pytest.mark.parametrize("kind", SAVED)
def test_students(kind, trained, tmp_path, group, caplog):
    """Trained in groups of texts of similar length, saved and loaded: the same vectors."""
    folder = save_network(tmp_path / "student", trained, kind, **SAVED[kind])
    options = [f"--student_model={folder}", "--student_query_prompt=q:", "--student_max_length=24"]
    args = arguments(*options, f"--artifacts_dir={tmp_path}")
    model = script.load_student(args, tmp_path)
    assert "1 prompts of the student are not used, such as passage" in caplog.text
    assert "truncate_dim 8 is not used" in caplog.text
    student = script.Student(model).train()
    student.add_head(16, 12)
    texts = script.with_prompts(model, trained.roles_and_texts[::15])
    corpus = trained.corpus._replace(**script.tokenize(model, texts))
    batch = script.make_batch(corpus, teacher_vectors(texts), np.arange(len(texts)))
    best = {"phase": "phase 1", "step": 9}
    path = script.save_artifact(args, model, best)
    assert script.save_artifact(args, model, best) == path  # the same command again: no copy
    assert script.save_artifact(args, model, {**best, "step": 10}) == f"{path}-2"
    saved = SentenceTransformer(path, device="cpu")
    assert saved.prompts["passage"] == "p: "
    with torch.no_grad():
        found = student.eval()(batch).numpy()
    assert np.allclose(found, saved.encode(texts, prompt=""), atol=1e-5)


def test_models_that_are_refused(trained, tmp_path, group, monkeypatch, caplog):
    """In one line, before the teacher reads. A teacher of another similarity is only said."""
    folder = save_network(tmp_path / "plain", trained, "Bert")
    args = arguments(f"--student_model={folder}", f"--teacher_model={folder}")
    load_student = partial(script.load_student, args, tmp_path)
    load_teacher = partial(script.load_teacher, args, tmp_path, torch.device("cpu"))
    args.student_max_length = 100
    check_refused("plain reads at most 66 tokens, not 100", load_student)

    args.student_max_length = None
    args.student_query_prompt = "q:"
    model = SentenceTransformer(folder, device="cpu", similarity_fn_name="dot")
    model[1].include_prompt = False
    model.save(folder)
    check_refused("plain pools without its prompts", load_student)
    load_teacher()
    assert "The teacher compares by dot, the student by the cosine" in caplog.text
    routes = Router.for_query_document(list(model), list(model))
    SentenceTransformer(modules=[routes], device="cpu").save(folder + "routes")
    args.teacher_model = folder + "routes"
    check_refused("has other networks for queries and documents", load_teacher)

    args.student_model = save_network(tmp_path / "endless", trained, "T5", limit=10**30)
    check_refused("endless has no maximum length", load_student)
    config = {"num_layers": 2, "num_sparse_encoder_layers": 1, "num_experts": 2, "d_model": 32}
    args.student_model = save_network(tmp_path / "own", trained, "SwitchTransformers", **config)
    load_student()
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    check_refused("own has experts, which a batch may", load_student)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found = [*found_pairs(2.0), *found_pairs(0.0)]
    if dist.get_rank() == 0:
        torch.save(found, sys.argv[1])
    dist.destroy_process_group()
