"""Real text and two small models for train_ddp.py where there is no model hub; it runs this itself.

    python tools/make_builtin_models.py pydocs --out FOLDER
    python tools/make_builtin_models.py lsa --texts CORPUS --size 384 --out FOLDER
    python tools/make_builtin_models.py bert --texts CORPUS --size 1x128 --out FOLDER

pydocs writes pairs.jsonl: the documentation of Python, numpy and torch as installed. A docstring's
first sentence is the query, its rest the document.
lsa is a teacher: latent semantic analysis (Deerwester et al. 1990), that is TF-IDF and a truncated
SVD, fitted on the training texts of CORPUS, a folder of tools/prepare_texts.py.
bert is a student: a BERT with random weights and a WordPiece tokenizer of the training texts.
Both are folders that SentenceTransformer loads.
"""

import argparse
import ast
import collections
import gc
import importlib
import inspect
import json
import re
import shutil
import sys
import sysconfig
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from train_ddp import Corpus

SKIPPED = {  # tests, demonstrations, and what is not documentation
    *["test", "tests", "testing", "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip"],
    *["site-packages", "dist-packages", "config", "__pycache__", "pydoc_data", "antigravity.py"],
    *["this.py", "turtle.py", "conftest.py", "setup.py"],
}
SIGNATURES = re.compile(r"(\s*[\w.\\]+\([^\n]*\)(\s*->[^\n]*)?\s*(\n|$)[-\n ]*)+")
SENTENCE_END = re.compile(r"(?<!e\.g\.)(?<!i\.e\.)(?<=[.!?:])\s+(?=[^a-z])|\n\s*\n")
WORD = r"[^\W\d_]+|\d+"  # runs of letters or of digits: array_split and arraySplit2 fall apart
LSA_WORDS = 12_000
BERT_PIECES = 8_000


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("kind", choices=["pydocs", "lsa", "bert"], help="what to make")
    add("--texts", type=Path, help="folder of tools/prepare_texts.py (lsa, bert)")
    add("--size", help="DIMENSIONS of lsa [384], LAYERSxWIDTH of bert [1x128]")
    add("--length", type=int, default=64, help="tokens that bert reads")
    add("--seed", type=int, default=42, help="of bert's weights")
    add("--out", type=Path, required=True, help="folder to write")
    args = parser.parse_args()
    if args.kind != "pydocs" and args.texts is None:
        parser.error(f"--texts: {args.kind} needs a folder of tools/prepare_texts.py")
    if args.out.exists():
        parser.error(f"--out {args.out} exists: remove it, or give another name")
    return args


def docstrings(name, node):
    """(name, docstring) of a file's syntax tree, and of its public classes and functions."""
    text = ast.get_docstring(node, clean=False)
    if text:
        yield name, text
    if isinstance(node, (ast.Module, ast.ClassDef)):
        for child in node.body:
            is_object = isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            if is_object and not child.name.startswith("_"):
                yield from docstrings(child.name, child)


def added_docstrings(tree):
    """(name, docstring) of what is written in C: the calls of torch's add_docstr and numpy's
    add_newdoc in a file."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        names = [word.attr for word in call.args if isinstance(word, ast.Attribute)]
        texts = []
        for argument in call.args:
            for word in ast.walk(argument):
                value = getattr(word, "value", None)
                if isinstance(value, str) and len(value) < 60:
                    names.append(value)
                elif isinstance(value, str) and len(value) > 200:
                    texts.append(value)

        if names and texts:
            yield names[-1], texts[0]


def documentation():
    """(name, text) of all documentation that is installed."""
    from pydoc_data.topics import topics

    for name, text in sorted(topics.items()):
        plain = re.sub(r"[*`_]{1,2}(\S[^*`]*)[*`]{1,2}", r"\1", text)
        for part in re.split(r"\n\s*\n", plain):
            yield f"topic {name}", part
    for module in ("builtins", "math", "itertools"):
        for name, thing in vars(importlib.import_module(module)).items():
            yield name, thing.__doc__
    for root in map(Path, [sysconfig.get_path("stdlib"), *np.__path__, *torch.__path__]):
        for path in sorted(root.rglob("*.py")):
            if SKIPPED.intersection(path.relative_to(root).parts):
                continue
            try:
                tree = ast.parse(path.read_text(encoding="utf-8"))
            except (SyntaxError, UnicodeDecodeError):
                continue  # sources for other versions of Python lie in the library, too
            name = path.parent.name if path.name == "__init__.py" else path.stem
            yield from docstrings(name, tree)
            if "_docs" in path.name or "newdocs" in path.name:
                yield from added_docstrings(tree)


def make_pydocs(args):
    """A docstring's first sentence and its rest, none twice. The group is the object's bare name:
    torch's log_softmax and LogSoftmax are held out together."""
    seen = set()
    lines = []
    gc.disable()  # syntax trees are millions of small objects; collecting them doubles the time
    for name, text in documentation():
        text = inspect.cleandoc(text or "")
        signatures = SIGNATURES.match(text)
        if signatures:
            text = text[signatures.end() :]
        parts = SENTENCE_END.split(text, maxsplit=1)
        query = " ".join(parts[0].split())
        document = " ".join(parts[-1].split()) if len(parts) > 1 else ""
        keys = {re.sub(r"\W+", " ", part.lower()).strip() for part in (query, document)}
        if len(document) >= 80 and len(query.split()) >= 2 and not seen & keys:
            seen |= keys
            group = name.replace("_", "").lower()
            row = {"query": query, "positive": document, "group": group}
            lines.append(json.dumps(row) + "\n")
    (args.out / "pairs.jsonl").write_text("".join(lines))


def make_lsa(args):
    """TF-IDF and the SVD are linear, so a text's vector is the mean over its words of idf times the
    word's row of the SVD: a table of embeddings, of stock modules."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

    corpus = Corpus(args.texts)
    # a query and its document as one text: words that meet across the two share directions
    texts = [f"{corpus.decode(q)}\n{corpus.decode(d)}" for q, d in corpus.pairs]
    if not texts:
        texts = [corpus.decode(number) for number in corpus.phase1]
    vectorizer = TfidfVectorizer(token_pattern=WORD, max_features=LSA_WORDS, dtype=np.float32)
    vectorizer.fit(texts)
    vectorizer.idf_ = vectorizer.idf_**1.5  # rare words count more: better on documentation
    dimensions = min(int(args.size or 384), len(vectorizer.vocabulary_) - 1)
    svd = TruncatedSVD(dimensions, n_iter=3, random_state=0)
    svd.fit(vectorizer.transform(texts))

    words = ["[UNK]", *vectorizer.get_feature_names_out().tolist()]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(WORD), behavior="removed", invert=True)
    weights = np.zeros((len(words), dimensions), np.float32)  # unknown words count for nothing
    weights[1:] = svd.components_.T * vectorizer.idf_[:, None]
    modules = [StaticEmbedding(tokenizer, embedding_weights=weights), Normalize()]
    model = SentenceTransformer(modules=modules, device="cpu")
    model.save(str(args.out), create_model_card=False)


def make_vocabulary(texts, tokenizer):
    """The most frequent words whole, all others by their letters. (The library's trainer makes
    another vocabulary every time.)"""
    words = collections.Counter()
    for text in texts:
        text = tokenizer.normalizer.normalize_str(text)
        words.update(word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text))

    letters = collections.Counter()
    for word, times in words.items():
        for letter in word:
            letters[letter] += times

    common = sorted(sorted(letters, key=lambda letter: (-letters[letter], letter))[:200])
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *common]
    pieces += [f"##{letter}" for letter in common]
    others = sorted(words.keys() - set(pieces), key=lambda word: (-words[word], word))
    pieces += others[: BERT_PIECES - len(pieces)]
    return {piece: number for number, piece in enumerate(pieces)}


def make_bert(args):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertConfig, BertModel, BertTokenizerFast

    corpus = Corpus(args.texts)
    trained = np.unique(np.concatenate([corpus.phase1, corpus.pairs.ravel()]))
    texts = [corpus.decode(number) for number in trained]
    vocabulary = make_vocabulary(texts, BertTokenizerFast().backend_tokenizer)
    tokenizer = BertTokenizerFast(vocab=vocabulary, model_max_length=args.length)

    layers, width = map(int, (args.size or "1x128").split("x"))
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=width,
        num_hidden_layers=layers,
        intermediate_size=2 * width,
        num_attention_heads=max(1, width // 32),
        max_position_embeddings=args.length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    folder = args.out / "bert"
    torch.manual_seed(args.seed)
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    network = Transformer(str(folder), max_seq_length=args.length)
    model = SentenceTransformer(modules=[network, Pooling(width)], device="cpu")
    model.save(str(args.out), create_model_card=False)


def main(args):
    try:
        args.out.mkdir(parents=True)
        {"pydocs": make_pydocs, "lsa": make_lsa, "bert": make_bert}[args.kind](args)
    except (OSError, ValueError) as error:  # also a wrong --size, or too few texts
        shutil.rmtree(args.out, ignore_errors=True)  # it was not there before
        sys.exit(f"{args.kind} cannot be made (--size {args.size}, --texts {args.texts}): {error}")


if __name__ == "__main__":
    main(parse_args())
