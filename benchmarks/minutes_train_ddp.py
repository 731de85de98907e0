"""train_ddp.py in minutes.py.

Texts and queries of data/pydocs.jsonl.gz; a fifth of the queries are set aside, with their
documents: half of them, dev, for the evaluations of the script. The student is builtin:bert, the
teacher builtin:lsa; steps are of both phases alike. Rates of both sides were chosen on dev.

it      SentenceTransformerTrainer: its template of distillation (EmbedDistillLoss, cosine), then
        MultipleNegativesRankingLoss (its cached form is the same loss, with one more pass forward).
        Texts of similar length share a step, the C library keeps freed memory, and nothing is
        evaluated on the way
judge   InformationRetrievalEvaluator of sentence-transformers
"""

import gzip
import json
from argparse import Namespace

import bench_train_ddp
import numpy as np
import sides

SCRIPT = "train_ddp.py"
PROBE = (20, 60)  # steps of the short runs
PEER = {"rates": [8e-3, 4e-3]}  # of both phases
BATCH = 128
LENGTH = 48  # tokens
PARTS = {8: "dev", 9: "test"}  # by the last digit of a row's number


def read_pydocs():
    """{part: rows}; no text of one part is in another."""
    with gzip.open(sides.ROOT / "data" / "pydocs.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    parts = {"test": [], "dev": [], "train": []}
    for number, row in enumerate(rows):
        parts[PARTS.get(number % 10, "train")].append(row)
    seen = set()
    for name, rows in parts.items():
        parts[name] = [row for row in rows if not seen & {row["query"], row["positive"]}]
        for row in parts[name]:
            seen |= {row["query"], row["positive"]}
    return parts


def write_collection(folder, rows):
    """In BEIR's layout."""
    (folder / "qrels").mkdir(parents=True)
    corpus = []
    queries = []
    qrels = ["query-id\tcorpus-id\tscore"]
    for number, row in enumerate(rows):
        corpus.append(json.dumps({"_id": f"d{number}", "text": row["positive"]}))
        queries.append(json.dumps({"_id": f"q{number}", "text": row["query"]}))
        qrels.append(f"q{number}\td{number}\t1")
    for name, lines in {"corpus.jsonl": corpus, "queries.jsonl": queries}.items():
        (folder / name).write_text("\n".join(lines) + "\n")
    (folder / "qrels" / "dev.tsv").write_text("\n".join(qrels) + "\n")


def prepare(folder):
    """train.jsonl, dev/ and the student."""
    import train_ddp

    parts = read_pydocs()
    lines = [
        json.dumps({name: row[name] for name in ("query", "positive")}) for row in parts["train"]
    ]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    write_collection(folder / "dev", parts["dev"])
    texts = [f"{row['query']}\n{row['positive']}" for row in parts["train"]]
    args = Namespace(student_max_length=LENGTH, seed=0)
    train_ddp.make_bert(folder / "student", args, texts, layers=1, width=128)


def options(out, steps, seed, seconds):
    return f"""--phase1_data=train.jsonl --phase2_data=train.jsonl --eval_data=dev
        --teacher_model=builtin:lsa --student_model=student --use_projection=False
        --global_batch_size={BATCH} --batch_size={BATCH} --max_steps={steps}
        --phase1_epochs=1000 --phase2_epochs=1000 --phase1_lr=8e-3 --phase2_lr=4e-3
        --false_negative_margin=2 --save_to_artifacts --artifacts_dir={out}/saved"""


def port(out, steps, seed, end, rates):
    """Both phases with the Trainer of sentence-transformers."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import losses

    import train_ddp

    sides.keep_freed_memory()
    student = SentenceTransformer("student", device="cpu")
    student[0].auto_model.pooler.requires_grad_(False)  # nothing uses it
    queries, documents, pairs, texts = bench_train_ddp.read_pairs("train.jsonl")
    vectors = train_ddp.lsa_vectors([("document", text) for text in texts], pairs)
    vectors = vectors[:, : student.get_embedding_dimension()].astype(np.float32)
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-6)
    pull = losses.EmbedDistillLoss(student, distance_metric="cosine")
    infonce = losses.MultipleNegativesRankingLoss(student, scale=50.0)
    phases = [
        ({"sentence": texts, "label": list(vectors)}, pull, texts),
        ({"anchor": queries, "positive": documents}, infonce, pairs),
    ]
    for (data, loss, measured), lr in zip(phases, rates, strict=True):
        bench_train_ddp.train(
            student,
            data,
            loss,
            output_dir=f"{out}/trainer",
            per_device_train_batch_size=BATCH,
            learning_rate=lr,
            max_steps=steps,
            seed=seed,
            batch_sampler=bench_train_ddp.similar_lengths(student, measured, 2 * LENGTH, BATCH),
            use_cpu=True,
        )
    student.save(f"{out}/saved/student", create_model_card=False)


def judge(folder, out, part):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

    rows = read_pydocs()[part]
    (saved,) = (out / "saved").iterdir()
    queries = {str(number): row["query"] for number, row in enumerate(rows)}
    documents = {str(number): row["positive"] for number, row in enumerate(rows)}
    relevant = {number: {number} for number in queries}
    evaluator = InformationRetrievalEvaluator(queries, documents, relevant)
    return {"nDCG@10": evaluator(SentenceTransformer(str(saved), device="cpu"))["cosine_ndcg@10"]}
