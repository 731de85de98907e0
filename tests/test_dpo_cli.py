"""run_dpo_ddp.py as a user calls it: its modes, a frozen encoder, what an epoch costs, and the keys of its config."""

from __future__ import annotations

import csv
import gc
import importlib
import json
import tracemalloc
from argparse import Namespace
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from helpers import ROOT, write_structures

script = importlib.import_module("run_dpo_ddp")
CONFIG = ROOT / "configs" / "run_dpo_ddp.yaml"


@pytest.fixture(scope="module")
def patch():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script.os, "fsync", lambda file: None)
        yield patch


@pytest.fixture(scope="module")
def data(tmp_path_factory, patch) -> Path:
    folder = tmp_path_factory.mktemp("dpo")
    write_structures(folder, 5, pairs=4, least=8, most=20)
    return folder


def call(folder: Path, *options: str, kind: type[Namespace] = Namespace) -> None:
    """One process, in this one, with arguments of this kind."""
    argv = [f"--train_data={folder}/pairs.json", f"--cache_dir={folder}/cache", "--base_model_name=random",
            "--batch_size=4", "--temperature=1", "--lr=1e-3", "--wandb_mode=disabled", "--device=cpu"]  # fmt: skip
    assert script.launch(script.main, kind(**vars(script.parse_args([*argv, *options])))) == 0


class Recorded(Namespace):
    """Arguments that know which of them were read."""

    read: set[str] = set()

    def __getattribute__(self, name: str):
        Recorded.read.add(name)
        return super().__getattribute__(name)


def fasta(path: Path) -> list[tuple[str, str]]:
    records = [record.partition("\n") for record in path.read_text().split(">")[1:]]
    return [(header, body.replace("\n", "")) for header, _, body in records]


# modes


@pytest.fixture(scope="module")
def trained(data) -> Path:
    """The output of a run with a warm start and averaged weights."""
    call(data, f"--output_dir={data}/out", "--sft_epochs=2", "--num_epochs=2", "--num_orders=2", "--ema=0.5",
         kind=Recorded)  # fmt: skip
    return data / "out"


def test_scores_are_those_of_the_run(data, trained):
    """Of every pair, each column; on the validation pairs they give what the run says of its best weights."""
    call(data, "--score_only", f"--checkpoint={trained}/best_model.pt", f"--out={data}/scores.csv")
    rows = {row.pop("pair"): row for row in csv.DictReader(open(data / "scores.csv"))}
    split, said = (json.loads((trained / f"{name}.json").read_text()) for name in ("split", "summary"))
    assert sorted(rows) == sorted(split["train"] + split["valid"]) and len(rows) == 20
    names = "chosen rejected nll recovered entropy residues reference_chosen reference_rejected loss".split()
    names += ["reward_chosen", "reward_rejected", "margin"]
    assert all(list(row) == names and np.isfinite([*map(float, row.values())]).all() for row in rows.values())
    table = {name: np.array([float(rows[pair][name]) for pair in split["valid"]]) for name in names}
    assert script.summarise(table, 0.1) == pytest.approx(said["metrics"], abs=2e-6)
    assert said["metrics"]["loss"] == pytest.approx(said["best_metric"]["value"]) and abs(table["margin"]).min() > 1e-3


def test_designs(data, trained):
    """As FASTA with scores: the structure's own sequence, then drawn ones, with its letters at fixed positions."""
    options = (f"--pdb_file={data}/helix0.pdb", "--fixed_positions", "0", "A3", "--sample_temperature=3")
    call(data, "--sample=5", "--eval_batch_size=2", *options, f"--checkpoint={trained}/best_model.pt",
         f"--out={data}/new/designs.fasta")  # fmt: skip
    (title, own), *drawn = fasta(data / "new" / "designs.fasta")
    assert own == script.read_structure(data / "helix0.pdb")["A"].letters and len(drawn) == 5
    designed = [i for i in range(len(own)) if i not in (0, 2)]
    assert f"designed_residues={len(designed)} model={trained}/best_model.pt" in title
    for number, (header, letters) in enumerate(drawn):
        said = dict(word.split("=") for word in header.split()[1:])
        assert header.split()[0] == f"helix0_{number}" and 0 < float(said["score"]) < 10
        recovery = np.mean([letters[i] == own[i] for i in designed])
        assert float(said["recovery"]) == pytest.approx(recovery, abs=1e-4) and len(letters) == len(own)
        assert (letters[0], letters[2]) == (own[0], own[2]) and "X" not in letters
    assert all(len({letters[i] for _, letters in drawn}) > 1 for i in designed)
    call(data, "--sample=1", *options, f"--output_dir={data}/empty")  # no checkpoint: the base model
    assert fasta(data / "empty" / "designs.fasta")[0][0].endswith("model=random")


def test_designs_of_two_chains(data, trained):
    """In the order asked for, '/' between them; a checkpoint needs no base weights."""
    (path,) = (ROOT / "data" / "dpo").glob("7CTH*")
    call(data, "--sample=1", f"--pdb_file={path}", "--design_chains", "L", "H", "--mutable_ranges", "H5-H12",
         f"--checkpoint={trained}/best_model.pt", f"--out={data}/two.fasta", "--base_model_name=none")  # fmt: skip
    (_, own), (_, drawn) = fasta(data / "two.fasta")
    chains = script.read_structure(path)
    assert own == f"{chains['L'].letters}/{chains['H'].letters}" and len(drawn) == len(own)
    moved = {i - len(chains["L"].letters) - 1 for i in range(len(own)) if own[i] != drawn[i]}
    places = [chains["H"].labels.index(label) for label in ("H5", "H12")]
    assert moved and moved <= set(range(places[0], places[1] + 1))


# a frozen encoder


def test_frozen_encoder(data, monkeypatch):
    """The same start; its weights stay as they are, it is run once for each structure, and the decoder is trained."""
    plain, calls, starts = script.ProteinMPNN.encode, Counter(), []
    monkeypatch.setattr(script.RunLog, "close", lambda *a, **k: None)  # no time for curves
    monkeypatch.setattr(script.ProteinMPNN, "encode", lambda *a: (calls.update([len(starts)]), plain(*a))[1])
    for option in "--freeze_encoder=False", "--freeze_encoder":
        call(data, option, f"--output_dir={data}/{option}", "--num_epochs=2", "--num_orders=1", "--log_every=1")
        rows = map(json.loads, (data / option / "metrics.jsonl").read_text().splitlines())
        starts.append([row.get("loss", row.get("val loss")) for row in rows][:2])
    assert starts[0] == pytest.approx(starts[1], abs=1e-6) and calls[1] == 5 and calls[0] > 10
    files = [data / "--freeze_encoder" / f"{name}_model.pt" for name in ("reference", "latest")]
    before, after = (script.read_model(file).state_dict() for file in files)
    for name, value in before.items():
        encoder = name.startswith(("features.", "W_e.", "encoder_layers."))
        assert torch.equal(value, after[name]) == encoder, name


# what an epoch costs


@pytest.fixture(scope="module")
def epochs(data, tmp_path_factory, patch) -> list[dict[str, int]]:
    """What there is, and what was called so far, after each of 5 epochs; then of a second run with the same cache."""
    found, calls = [], Counter()

    def counted(owner, name: str) -> None:
        plain = getattr(owner, name)
        patch.setattr(owner, name, lambda *a, **k: (calls.update([name]), plain(*a, **k))[1])

    def measured(task, *others):
        better = finish_epoch(task, *others)
        gc.collect()
        tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
        sizes = {"encoded": len(task.encoded or ()), "parsed": script.COUNTS["parsed"], "tensors": tensors}
        found.append({**calls, **sizes, "bytes": tracemalloc.get_traced_memory()[0]})
        if len(found) == 1:  # tracing is slow, and what the first epoch leaves may stay
            tracemalloc.start()
        if len(found) == 5:
            tracemalloc.stop()
        return better

    finish_epoch = script.finish_epoch
    with pytest.MonkeyPatch.context() as patch:
        counted(script, "score_pairs"), counted(script.ProteinMPNN, "encode"), counted(script, "featurise")
        patch.setattr(script, "finish_epoch", measured)
        patch.setattr(script.RunLog, "close", lambda *a, **k: None)  # no time for curves
        cache, before = f"--cache_dir={tmp_path_factory.mktemp('cache')}", script.COUNTS["parsed"]
        call(data, f"--output_dir={data}/first", "--num_epochs=5", "--num_orders=2", cache, kind=Recorded)
        assert script.COUNTS["parsed"] - before == calls["featurise"] == 5
        call(data, f"--output_dir={data}/second", "--num_epochs=1", "--num_orders=2", cache)
    return found


def test_nothing_grows_with_the_epochs(epochs):
    """Tensors, Python's memory; runs of the encoder and of the scoring, of which the reference's come first."""
    *first, second = epochs
    assert len(first) == 5
    for name in ("score_pairs", "encode"):
        assert len(set(np.diff([row[name] for row in first]))) == 1, name
    assert first[0]["score_pairs"] == 2 + 1 + 1 + 1  # both orders of training, validation; its metrics, twice
    assert first[1]["score_pairs"] - first[0]["score_pairs"] == 1
    for name in ("tensors", "encoded", "parsed", "featurise"):
        assert max(row[name] for row in first) <= first[1][name], (name, [row[name] for row in first])
    grown = np.diff([row["bytes"] for row in first[1:]])
    assert grown.max() < 20_000, grown  # a record of metrics, and what the log holds for the plot
    assert second["parsed"] == first[0]["parsed"] and second["featurise"] == first[0]["featurise"]


# configuration


def test_every_key_of_the_config_is_read(trained, epochs):
    """The file has each key of the training script, at its default, and runs read them all: none is taken and then
    ignored. What their values do is in the other tests."""
    keys = yaml.safe_load(CONFIG.read_text())
    plain, read = (vars(script.parse_args(argv)) for argv in ([], [f"--config={CONFIG}"]))
    assert all(read[name] == value for name, value in plain.items() if name not in ("given", "changed", "config"))
    elsewhere = {"wandb_project", "ddp_timeout_minutes"}  # of wandb and of several ranks: tests/test_block.py
    elsewhere |= {"no_cuda"}  # it is another name of device
    assert set(keys) - Recorded.read == elsewhere
    assert script.parse_args(["--no_cuda"]).device == "cpu"
    modes = {"sample", "score_only", "sample_temperature", "pdb_file", "design_chains", "fixed_chains", "checkpoint"}
    modes |= {"fixed_positions", "out", "base_model_config_dir"}
    runtime = {"config", "fresh", "given", "changed", "local_rank", "nproc", "wandb_name"}
    assert set(plain) - set(keys) == modes | runtime
