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
from urllib.error import HTTPError

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import ROOT, call_program, environment, free_port, parse_arguments
from test_accelerator import META, Copies
from torch.utils._python_dispatch import TorchDispatchMode

import train_ddp as script

SCRIPT = ROOT / "train_ddp.py"
PREPARE = ROOT / "tools" / "prepare_texts.py"
CPU = torch.device("cpu")


arguments = partial(parse_arguments, script)


def write_pairs(path, rows=130):
    """Queries with two documents each, and negatives, of which one is among all rows'."""
    lines = []
    for i in range(rows):
        place = f"item {i} of house {i % 13}"
        positive = [
            f"{place} is in hall {i % 7}" + " indeed" * (i % 9),
            f"see shelf {i} for {place}",
        ]
        row = {"query": f"where is {place}", "positive": positive}
        row["negatives"] = [f"nothing is known about room {i * 7 % rows}", "nothing"]
        lines.append(json.dumps(row) + "\n")
    path.write_text("".join(lines))


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    write_pairs(folder / "pairs.jsonl")
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
    """Both phases, with a head; (what it says, its folder)."""
    options = [f"--output_dir={work}/out", "--save_to_artifacts", f"--artifacts_dir={work}/models"]
    return run(*small(work, *options)), work / "out"


@pytest.fixture(scope="module")
def corpus(work, trained):
    folders = [*work.glob("cache/texts-*")]
    return script.Corpus(folders[0])


@pytest.fixture(scope="module")
def student_folder(work, trained):
    """The BERT of 2 layers; other tests make others in the same cache."""
    for path in work.glob("cache/bert-*/**/config.json"):
        if json.loads(path.read_text()).get("num_hidden_layers") == 2:
            return str(next(folder for folder in path.parents if folder.name.startswith("bert-")))


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
    losses = pytest.importorskip("sentence_transformers.sentence_transformer").losses
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
import json, sys
import torch
import torch.distributed as dist
import test_train_ddp
import train_ddp

dist.init_process_group("gloo")
gradient = test_train_ddp.gradient_of_a_step()
times = train_ddp.load_in_turn(test_train_ddp.load_slowly)
open(f"{sys.argv[1]}/times-{dist.get_rank()}.json", "w").write(json.dumps(times))
if dist.get_rank() == 0:
    torch.save(gradient, f"{sys.argv[1]}/gradient.pt")
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def three_ranks(tmp_path_factory, server):
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "program.py").write_text(THREE_RANKS)
    common = {"WORLD_SIZE": 3, "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    variables = [{**common, "RANK": rank} for rank in range(3)]
    server.start(variables, [str(folder / "program.py"), str(folder)])
    assert server.wait() == [0, 0, 0], server.text
    return folder


def test_the_gradient_over_ranks_is_that_of_the_whole_batch(three_ranks, group):
    """With unequal shares, too."""
    found = torch.load(three_ranks / "gradient.pt")
    assert found.abs().max() > 0.01
    assert torch.allclose(found, gradient_of_a_step(), rtol=1e-12, atol=1e-14)


def test_ranks_load_the_teacher_one_after_the_other(three_ranks):
    times = sorted(json.loads(path.read_text()) for path in three_ranks.glob("times-*.json"))
    assert len(times) == 3
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


def test_the_artifact_has_the_figures_of_the_run(trained, corpus, work):
    """By sentence-transformers' own evaluator, on the model as anybody loads it."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import evaluation

    summary = json.loads((trained[1] / "summary.json").read_text())
    model = SentenceTransformer(summary["artifacts"][-1], device="cpu")
    assert model.encode("text").shape == (16,)
    queries = {str(i): corpus.decode(n) for i, n in enumerate(corpus.eval_queries)}
    documents = {str(i): corpus.decode(n) for i, n in enumerate(corpus.eval_documents)}
    relevant = {}
    for query, document in corpus.eval_pairs.tolist():
        relevant.setdefault(str(query), set()).add(str(document))
    evaluator = evaluation.InformationRetrievalEvaluator(queries, documents, relevant)
    found = evaluator(model)
    best = summary["best"]
    assert best["metric"] == "ndcg@10" and best["better"] == "higher"
    assert found["cosine_ndcg@10"] == pytest.approx(best["value"], abs=2e-3)
    base = SentenceTransformer(summary["artifacts"][0], device="cpu")
    assert base.encode("text").shape == (32,)
    types = [type(module).__module__.split(".")[0] for module in model]
    assert set(types) == {"sentence_transformers"}


# --------------------------------------------------------------------------------------------------
# Runs


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_learns_and_says_so(trained):
    said, folder = trained
    summary = json.loads((folder / "summary.json").read_text())
    rows = rows_of(folder)
    for phase in (1, 2):
        losses = [row["loss"] for row in rows if "loss" in row and row["phase"] == phase]
        assert len(losses) > 9 and sum(losses[-4:]) < sum(losses[:4])
        path = folder / f"phase{phase}_best.pt"
        values = [r["val/ndcg@10"] for r in rows if "val/ndcg@10" in r and r["phase"] == phase]
        kept = torch.load(path, weights_only=True)["best"][f"phase {phase}"]
        assert len(values) == 3 and kept["value"] == max(values)
        assert summary["phases"][f"phase {phase}"]["ndcg@10"] == max(values)
    best = summary["best"]
    assert set(best) == {"metric", "value", "better", "step"}
    values = {row["step"]: row["val/ndcg@10"] for row in rows if "val/ndcg@10" in row}
    assert best["value"] == max(values.values()) == values[best["step"]]
    assert torch.load(folder / "best.pt", weights_only=True)["step"] == best["step"]
    assert best["value"] > summary["baselines"]["untrained"]["ndcg@10"] + 0.05
    assert "reads a batch in one pass: True" in said
    for text in ("untrained student", "after phase 1", "after phase 2", "teacher  "):
        assert said.count(f"  {text}") == 1
    assert "(50%) answer none of them" in said
    assert not [*folder.glob("*.tmp"), *folder.glob("check*")]


def test_mrl_and_the_teacher_once(work, trained):
    """The target is the first part of the teacher's vectors; those of another run are found."""
    options = [f"--output_dir={work}/mrl", "--use_projection=False", "--skip_phase2"]
    options += ["--student_model=builtin:bert:1x32", "--max_steps=3"]
    more = ["--teacher_model=builtin:bert:1x64", "--save_to_artifacts"]
    said = run(*small(work, *options, *more, f"--artifacts_dir={work}/models"))
    assert "The teacher reads" in said
    assert "the target is the first 32 of 64 dimensions" in said
    assert (work / "models" / "distilled-builtin-bert-1x32-32d-mrl" / "modules.json").exists()
    said = run(*small(work, *options, "--fresh"), status=2)
    assert "The teacher reads" not in said and "no teacher is needed" in said
    assert "--use_projection False needs 32 teacher dimensions" in said


def test_a_rate_changed_on_resume_is_applied(work, tmp_path, trained):
    options = [f"--output_dir={tmp_path}/out", "--skip_phase2", "--warmup_ratio=0"]
    run(*small(work, *options, "--max_steps=4"))
    said = run(*small(work, *options, "--max_steps=8", "--phase1_lr=1e-4"))
    assert "--phase1_lr 0.0001, it was 0.005" in said
    rows = [row for row in rows_of(tmp_path / "out") if "lr" in row]
    assert [row["step"] for row in rows] == [*range(1, 9)]
    assert rows[0]["lr"] == 5e-3 and rows[4]["lr"] == pytest.approx(0.5e-4)

    run(*small(work, *options, "--max_steps=8", "--phase1_lr=7"))  # nothing is left to train
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["args"]["phase1_lr"] == 1e-4
    said = run(*small(work, *options, "--teacher_query_prompt=find: "), status=2)
    assert "was trained on other data" in said and "--fresh" in said


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
    shutil.copy(trained[1] / "phase1_best.pt", tmp_path / "out")
    said = run(*options)
    assert "out/phase1_best.pt, step" in said and "WARNING" not in said.split("phase=2")[0]
    assert {row["phase"] for row in rows_of(tmp_path / "out")} == {2}
    args = arguments(*options)
    with pytest.raises(script.InputError, match="does not fit this student: Error"):
        script.load_weights(args, torch.nn.Linear(2, 2), "phase1_best.pt", "")
    with pytest.raises(script.InputError, match="was trained with --student_model builtin:bert"):
        script.load_weights(arguments(*options, "--student_model=x"), None, "phase1_best.pt", "")
    script.load_weights(args, None, "none.pt", "phase 2 starts from the untrained student")
    assert "none.pt is missing or damaged: phase 2 starts from the untrained" in caplog.text


def test_without_a_hub_it_is_said_in_seconds(tmp_path):
    began = time.monotonic()
    env = environment(HF_HOME=tmp_path, HF_ENDPOINT="http://localhost:9")
    env.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, SCRIPT, f"--output_dir={tmp_path}/out", f"--cache_dir={tmp_path}"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and time.monotonic() - began < 45  # 10 s on an idle machine
    assert "no model hub" in done.stdout
    assert "--phase2_data ms_marco: microsoft/ms_marco" in done.stderr and "pydocs" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_hub_that_refuses_its_front_page_is_a_hub(monkeypatch):
    refuse = mock.Mock(side_effect=HTTPError("http://mirror", 403, "Forbidden", {}, None))
    monkeypatch.setattr("urllib.request.urlopen", refuse)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert script.find_hub(arguments()) is False
    refuse.side_effect = OSError
    assert script.find_hub(arguments()) is True


def test_the_last_word_warns(caplog):
    """Values of both phases and of the untrained student, and what is said of them."""
    cases = [
        (0.54, 0.40, 0.53, ["phase 2 made the student worse"]),
        (0.54, 0.55, 0.56, ["training did not make the student better"]),
        (0.54, 0.55, 0.53, []),
    ]
    for first, second, untrained, expected in cases:
        caplog.clear()
        best = {}
        for phase, value in {"phase 1": first, "phase 2": second}.items():
            metrics = {"ndcg@10": value}
            best[phase] = {"metric": "ndcg@10", "value": value, "metrics": metrics}
        loop = {"best": best, "untrained": {"ndcg@10": untrained}, "teacher": {"ndcg@10": 0.6}}
        run = SimpleNamespace(corpus=SimpleNamespace(held_out=lambda: "1 query"), loop=loop)
        assert script.compare(run)["value"] == max(first, second)
        said = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert [text.split(":")[0] for text in said] == expected


# --------------------------------------------------------------------------------------------------
# Students


def make_student(folder, kind, target):
    """A small random network with the tokenizer of the student in `folder`."""
    import transformers
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    common = {"vocab_size": len(tokenizer), "hidden_size": 32, "num_hidden_layers": 6}
    common.update(intermediate_size=64, num_attention_heads=2, max_position_embeddings=64)
    common.update(pad_token_id=0, bos_token_id=2, eos_token_id=3)
    more = {
        "MPNet": {},
        "Roberta": {},
        "ModernBert": {"cls_token_id": 2, "sep_token_id": 3, "global_attn_every_n_layers": 3},
        "Qwen3": {"num_key_value_heads": 1, "head_dim": 16},
    }
    config = getattr(transformers, f"{kind}Config")(**common, **more[kind])
    network = transformers.AutoModel.from_config(config)
    network.save_pretrained(target)
    tokenizer.save_pretrained(target)
    pooling = Pooling(32, "lasttoken" if kind == "Qwen3" else "mean")
    modules = [Transformer(target, max_seq_length=24), pooling]
    SentenceTransformer(modules=modules, device="cpu").save(target)


# Roberta's positions start behind those of the padding: it would give other vectors
IN_ONE_PASS = {"MPNet": False, "Roberta": False, "ModernBert": True, "Qwen3": True}


def load(args, corpus, folder, dtype=torch.float32):
    model = script.load_student(args, folder)
    tokens = script.load_tokens(args, corpus, model)
    student = script.Student(model, dtype)
    limits = script.choose_groups(student, tokens, CPU)
    return student, tokens, limits


@pytest.mark.parametrize("kind", IN_ONE_PASS)
def test_students(kind, corpus, student_folder, tmp_path, group):
    """In one pass or in several, cut to 3 layers, saved and loaded: the same vectors, or an
    error."""
    make_student(student_folder, kind, str(tmp_path / "student"))
    options = ["--student_max_length=24", "--student_layers=3"]
    args = arguments(*options, f"--cache_dir={tmp_path}", f"--output_dir={tmp_path}")
    dtype = torch.bfloat16 if kind == "Roberta" else torch.float32
    student, tokens, _ = load(args, corpus, str(tmp_path / "student"), dtype)
    config = student.model[0].model.config
    assert config.num_hidden_layers == 3
    assert len(getattr(config, "layer_types", [1, 2, 3])) == 3
    assert student.in_one_pass == IN_ONE_PASS[kind]
    script.check_saving(args, student, corpus, tokens)


def test_laid_out_tokens_are_the_tokenizers(corpus, student_folder, tmp_path, group):
    args = arguments("--student_max_length=24", f"--cache_dir={tmp_path}")
    args.student_query_prompt = "find: "
    student, tokens, _ = load(args, corpus, student_folder)
    rows = np.random.default_rng(0).permutation(len(corpus.kinds))[:90]
    texts = script.lay_out(tokens, rows, 4, 0.1)
    lines = []
    parts = [texts.groups(tensor) for tensor in (texts.ids, texts.mask, texts.positions)]
    for ids, mask, positions in zip(*parts, strict=True):
        assert (positions == torch.arange(ids.shape[1])).all()
        lines += [line[there.bool()].tolist() for line, there in zip(ids, mask, strict=True)]
    found = [lines[place] for place in texts.order]
    written = corpus.texts(rows, student.model.prompts)
    assert sum(text.startswith("find: ") for text in written) == (corpus.kinds[rows] == 0).sum()
    assert found == student.model.tokenizer(written, truncation=True, max_length=24)["input_ids"]
    assert 0.9 < texts.mask.float().mean() < 1


class Casts(TorchDispatchMode):
    """Counts the casts of weights."""

    found = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "_to_copy" in str(function) and isinstance(args[0], torch.nn.Parameter):
            self.found += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture
def step(corpus, student_folder, tmp_path, group, work):
    """A run, as far as a step needs one, and its student."""
    options = small(work, f"--output_dir={tmp_path}", f"--cache_dir={tmp_path}")
    args = arguments(*options)
    torch.manual_seed(0)
    student, tokens, limits = load(args, corpus, student_folder)
    vectors = unit(len(corpus.kinds), 32).numpy().astype(np.float16)
    data = script.TextData(tokens, vectors, limits, 32)
    run = SimpleNamespace(args=args, corpus=corpus, data=data, state=None)
    return run, student


def test_a_step_of_each_phase_on_the_meta_device(step, monkeypatch):
    """There a tensor made elsewhere, a read value and a test of a tensor's value are errors."""
    run, student = step
    autocast = lambda device, *more, **options: contextlib.nullcontext()  # noqa: E731
    monkeypatch.setattr(torch, "autocast", autocast)  # which does not know this device
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
    for batch_size in (24, 8, 5):
        run.args.batch_size = batch_size
        sampler, data = script.make_sampler(run, 2)
        sampler.set_epoch(0)
        batches = [data[i] for _, i in zip(range(sampler.accumulation), sampler, strict=False)]
        student.zero_grad()
        parts = script.pair_step(run.args, student, student, batches, scaler, lambda: None)
        gradient = torch.cat([p.grad.flatten() for p in student.parameters() if p.grad is not None])
        found.append((parts, gradient))
    for parts, gradient in found[1:]:
        assert torch.allclose(parts, found[0][0], rtol=1e-5)
        assert (gradient - found[0][1]).norm() < 1e-4 * found[0][1].norm()


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
    fails = False

    def get_embedding_dimension(self):
        return 3

    def encode(self, texts, *, prompt, **options):
        assert prompt == ""
        if Teacher.fails:
            raise KeyboardInterrupt
        Teacher.encoded += len(texts)
        return torch.tensor([[len(t), t.startswith("q: "), 1.0] for t in texts])


def test_teacher_vectors_are_computed_once(corpus, tmp_path, group, monkeypatch):
    """A stopped run's blocks are not computed again."""
    monkeypatch.setattr(script, "load_teacher", lambda *args: Teacher())
    monkeypatch.setattr(script, "ENCODED_TOGETHER", 32)
    args = arguments(f"--cache_dir={tmp_path}")
    folder = tmp_path / "teacher"
    answers = ["", "", "SIGTERM"]
    guard = SimpleNamespace(agree=lambda: answers.pop(0))

    def compute():
        return script.teacher_vectors(args, corpus, "name", folder, CPU, guard)

    assert compute() is None and Teacher.encoded == 64
    guard.agree = lambda: ""
    vectors = compute()
    assert Teacher.encoded == len(corpus.kinds)
    Teacher.fails = True
    assert np.array_equal(compute(), vectors)
    texts = corpus.texts(range(len(corpus.kinds)), Teacher.prompts)
    expected = [[len(t), t.startswith("q: "), 1.0] for t in texts]
    expected = F.normalize(torch.tensor(expected), dim=1).numpy()
    assert vectors.dtype == np.float16 and np.allclose(vectors, expected, atol=1e-3)


def test_negatives_are_drawn_from_those_that_are_there(step):
    run, _ = step
    _, data = script.make_sampler(run, 2)
    negatives = np.arange(1000).reshape(-1, 10)
    negatives[3, 1:] = -1
    data.corpus = SimpleNamespace(negatives=negatives)
    data.args.num_negatives = 4
    whole = np.array([3, 5, 9, 20, 40])
    drawn = data.draw(whole)
    assert np.array_equal(drawn, data.draw(whole))
    assert sorted(drawn[0]) == [-1, -1, -1, 30]
    for row, number in zip(drawn[1:], whole[1:], strict=True):
        assert len({*row}) == 4 and {*row} <= {*negatives[number]}
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


def test_nothing_held_out_is_trained_on(corpus):
    held = decoded(corpus, corpus.eval_queries)
    held |= decoded(corpus, corpus.eval_documents[: corpus.eval_answers])
    trained = decoded(corpus, corpus.phase1) | decoded(corpus, corpus.pairs)
    trained |= decoded(corpus, corpus.negatives)
    assert not held & trained and len(held) > 60
    texts = list(map(corpus.decode, range(len(corpus.kinds))))
    assert len({*zip(texts, corpus.kinds.tolist(), strict=True)}) == len(texts)
    for query, document in corpus.eval_pairs:
        name = corpus.decode(corpus.eval_queries[query]).split()[3]
        assert f" {name} " in corpus.decode(corpus.eval_documents[document]) + " "
    for pair, right, wrong in zip(corpus.pairs, corpus.positives, corpus.negatives, strict=True):
        assert pair[1] in right and not {*right[right >= 0]} & {*wrong}


def test_the_split(work, tmp_path):
    """The same in any order; what it leaves is trained on; distractors as many as asked for."""
    options = ["--eval_fraction=0.5", "--eval_samples=20"]
    found = prepare(tmp_path / "a", f"--phase2_data={work}/pairs.jsonl", *options)
    assert len(found.eval_queries) == 20 and len(found.pairs) == 2 * 110
    assert len(found.eval_documents) == 2 * found.eval_answers == 80
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
    assert len(found.phase1) + found.eval_answers == 50 and len(found.pairs) == 0

    # as spreadsheets write it: a byte-order mark, empty cells, a cell of any length
    lines = ["anchor,positive,negatives"]
    lines += [f"query {i},document {i}," for i in range(20)]
    lines.append(f"long,{'word ' * 40_000},wrong")
    (tmp_path / "pairs.csv").write_text("\n".join(lines), encoding="utf-8-sig")
    options = ["--eval_fraction=0.5", "--eval_distractors=inf"]
    found = prepare(tmp_path / "csv", f"--phase2_data={tmp_path}/pairs.csv", *options)
    assert len(found.pairs) + len(found.eval_queries) == 21
    assert len(found.eval_documents) == (found.kinds == 1).sum() == 22


def test_each_source_has_its_held_out_rows(work, tmp_path):
    (tmp_path / "texts.txt").write_text("\n".join(f"text {i}" for i in range(2000)))
    data = [f"--phase1_data={tmp_path}/texts.txt", f"--phase2_data={work}/pairs.jsonl"]
    found = prepare(tmp_path / "out", *data, "--eval_fraction=0.5", "--eval_samples=20")
    assert len(found.eval_queries) == 20 and found.eval_answers == 20 + 2 * 20


def test_queries_among_the_texts_of_phase_1_are_queries(work, tmp_path):
    """Held out as documents, they would be found before those that answer them."""
    rows = [json.loads(line) for line in (work / "pairs.jsonl").read_text().splitlines()]
    texts = [text for row in rows for text in [row["query"], *row["positive"]]]
    (tmp_path / "texts.txt").write_text("\n".join(texts), encoding="utf-8-sig")
    options = [f"--phase1_data={tmp_path}/texts.txt", f"--phase2_data={work}/pairs.jsonl"]
    found = prepare(tmp_path / "out", *options, "--eval_fraction=0.5")
    queries = {row["query"] for row in rows}
    assert not decoded(found, found.eval_documents) & queries
    trained = decoded(found, found.phase1)
    assert trained & queries == queries - decoded(found, found.eval_queries)


BAD = [
    b'{"query": "no positive"}',
    b"not json",
    b'{"query": "", "positive": "x"}',
    b'["a list"]',
    b"\xff\xfe",
    b'{"query": "q", "positive": ["fine", 3]}',
    b'{"query": "q", "positive": "p", "negatives": 5}',
    b'{"query": "half a character \\ud800", "positive": "p"}',
]


def test_bad_rows_are_all_named(work, tmp_path):
    good = (work / "pairs.jsonl").read_bytes().splitlines()
    path = tmp_path / "pairs.jsonl"
    path.write_bytes(b"\n".join(good[:10] + BAD + good[10:] + [b"broken"] * 30))
    said = prepare(tmp_path / "out", f"--phase2_data={path}", status=1)
    for number in range(11, 19):
        assert f"{path} line {number}: " in said
    assert "38 bad rows" in said and "and 18 more" in said and "--skip_bad_data" in said
    assert len(said.splitlines()) == 22 and not (tmp_path / "out").exists()
    found = prepare(tmp_path / "out", f"--phase2_data={path}", "--skip_bad_data")
    assert len(found.pairs) + 2 * len(found.eval_queries) == 260
    assert len((tmp_path / "out" / "bad_rows.txt").read_text().splitlines()) == 38
    said = prepare(tmp_path / "none", "--phase2_data=nowhere.jsonl", status=1)
    assert said == "--phase2_data nowhere.jsonl: no such file\n"
    (tmp_path / "empty.txt").write_text("")
    said = prepare(tmp_path / "none", f"--phase1_data={tmp_path}/empty.txt", status=1)
    assert "empty.txt: there are no rows" in said


def test_columns_that_are_not_read_are_named(tmp_path):
    rows = [f"query {i},text {i},other {i}" for i in range(40)]
    (tmp_path / "pairs.csv").write_text("\n".join(["query,positive,hard_negatives", *rows]))
    command = [sys.executable, PREPARE, "--phase2_data=pairs.csv", "--eval_fraction=0.2"]
    done = subprocess.run([*command, "--out=out"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0
    assert "pairs.csv: these columns are not read: hard_negatives" in done.stdout


def test_ms_marco_rows():
    sys.path.insert(0, str(ROOT / "tools"))
    import prepare_texts as tool

    passages = {"is_selected": [0, 1, 0], "passage_text": ["a", "b", "c"]}
    found = tool.from_ms_marco({"query": "q", "passages": passages})
    row = tool.parse_row(3, found, 2, True)
    assert row == tool.Row(3, "q", ["b"], ["a", "c"], "q", True)


# --------------------------------------------------------------------------------------------------
# Options


REFUSED = {
    "--false_negative_margin=-3": "--false_negative_margin -3.0: must be from -1",
    "--eval_fraction=1": "--eval_fraction 1.0: must be from 0 to 0.99",
    "--phase2_data=texts.txt": "--phase2_data texts.txt",
    "--phase1_lr=nan": "--phase1_lr nan",
    "--student_layer=3": "did you mean student_layers?",
}


@pytest.mark.parametrize("option", REFUSED)
def test_options_that_cannot_be(option):
    with pytest.raises(script.InputError) as caught:
        arguments(option)
    assert REFUSED[option] in str(caught.value) and "\n" not in str(caught.value)


def test_each_mode_has_a_folder_of_its_own():
    quickstart = str(ROOT / "configs" / "train_ddp_quickstart.yaml")
    folders = {arguments(quickstart, f"--use_projection={v}").output_dir for v in ("True", "no")}
    assert len(folders) == 2


def test_learning_rates():
    args = arguments("--warmup_ratio=0.25")
    found = [script.lr_factor(args, step, 8) for step in range(8)]
    fall = [1 - i / 6 for i in range(6)]
    assert found == pytest.approx([1 / 3, 2 / 3, *fall])
