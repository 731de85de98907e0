"""The losses of run_dpo_ddp.py: closed forms, TRL's own computation on the same numbers, and how a run starts."""

from __future__ import annotations

import collections
import importlib
import json
import math
from argparse import Namespace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import write_structures

script = importlib.import_module("run_dpo_ddp")
KINDS = [("sigmoid", 0.0), ("sigmoid", 0.2), ("hinge", 0.0), ("ipo", 0.0), ("robust", 0.2)]


def settings(kind: str, smoothing: float, beta: float = 0.3) -> Namespace:
    return Namespace(loss_type=kind, label_smoothing=smoothing, beta=beta)


def loss_of(h, kind: str, smoothing: float, residues=10.0, margin=0.0, beta: float = 0.3) -> torch.Tensor:
    h = torch.as_tensor(h, dtype=torch.float64)
    residues, margin = torch.full_like(h, residues), torch.full_like(h, margin)
    return script.preference_loss(h, residues, margin, settings(kind, smoothing, beta))


@pytest.mark.parametrize("kind, smoothing", KINDS)
def test_equal_networks_have_the_known_loss(kind, smoothing):
    """h = 0: ln 2 for the logistic forms, 1 for the hinge, 1 / (2 beta)^2 for IPO."""
    expected = {"sigmoid": math.log(2), "robust": math.log(2), "hinge": 1.0, "ipo": 1 / (4 * 0.3**2)}[kind]
    assert loss_of(0.0, kind, smoothing).item() == pytest.approx(expected, abs=1e-12)


def test_closed_forms():
    h, beta, e, m = 1.7, 0.3, 0.2, 0.25
    s = lambda z: 1 / (1 + math.exp(-z))  # noqa: E731
    z = beta * h - m
    assert loss_of(h, "sigmoid", 0.0, margin=m).item() == pytest.approx(-math.log(s(z)))
    smooth = -(1 - e) * math.log(s(z)) - e * math.log(s(-z))
    assert loss_of(h, "sigmoid", e, margin=m).item() == pytest.approx(smooth)
    robust = (-(1 - e) * math.log(s(z)) + e * math.log(s(-z))) / (1 - 2 * e)
    assert loss_of(h, "robust", e, margin=m).item() == pytest.approx(robust)
    assert loss_of(h, "hinge", 0.0, margin=m).item() == pytest.approx(1 - z)
    assert loss_of(99.0, "hinge", 0.0).item() == 0
    ipo = ((h - m / beta) / 4 - 1 / (2 * beta)) ** 2
    assert loss_of(h, "ipo", 0.0, residues=4, margin=m).item() == pytest.approx(ipo)


def test_gradient_at_the_start_is_half_of_beta():
    h = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    loss_of_h = script.preference_loss(h, torch.ones(1), torch.zeros(1), settings("sigmoid", 0.0))
    loss_of_h.sum().backward()
    assert h.grad.item() == pytest.approx(-0.3 / 2)


@pytest.mark.parametrize("kind, smoothing", [(k, e) for k, e in KINDS if k != "sigmoid" or not e])
def test_as_trl_computes_it(kind, smoothing):
    """TRL's DPOTrainer._compute_loss, fed a model that gives fixed log-probabilities."""
    dpo_trainer = pytest.importorskip("trl.trainer.dpo_trainer", reason="TRL is in requirements-dev.txt")
    rng = torch.Generator().manual_seed(0)
    pairs, length = 6, 9
    logps = -3 * torch.rand(2 * pairs, length, generator=rng, dtype=torch.float64)
    reference = -3 * torch.rand(2 * pairs, length, generator=rng, dtype=torch.float64)
    outputs = SimpleNamespace(log_probs=logps, entropy=logps, mean_logits=logps, is_top1=logps > -1)

    class Model:
        training = False

        def __call__(self, **inputs):
            return outputs

    summed = reference.sum(1).chunk(2)
    trainer = SimpleNamespace(
        model=Model(), accelerator=SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x, gather=lambda x: x),
        aux_loss_enabled=False, ld_alpha=None, precompute_ref_logps=True, f_divergence_type="reverse_kl", beta=0.3,
        loss_types=[kind], loss_weights=[1.0], label_smoothing=smoothing, use_weighting=False, _total_train_tokens=0,
        _metrics=collections.defaultdict(lambda: collections.defaultdict(list)), args=SimpleNamespace(),
    )  # fmt: skip
    # TRL's masks have a column more than the log-probabilities of what follows: the first token has no prediction
    mask = torch.ones(2 * pairs, length + 1, dtype=torch.long)
    inputs = {"input_ids": mask, "attention_mask": mask, "completion_mask": mask,
              "ref_chosen_logps": summed[0], "ref_rejected_logps": summed[1]}  # fmt: skip
    theirs = dpo_trainer.DPOTrainer._compute_loss(trainer, trainer.model, inputs, False)
    chosen, rejected = (logps - reference).sum(1).chunk(2)
    residues = length + 1.0  # what TRL divides by in IPO: all of the completion mask
    ours = loss_of(chosen - rejected, kind, smoothing, residues=residues).mean()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-9)
    margins = trainer._metrics["eval"]["rewards/margins"]
    assert margins == [pytest.approx(0.3 * (chosen - rejected).mean().item())]


def test_sequence_logps_has_no_floor_and_counts_weights_alone():
    logits = torch.zeros(2, 3, 21)
    logits[0, 0, 5] = 60.0  # another letter there is e^-60 as likely, at temperature 0.1 e^-600
    sequences, weights = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.5, 0.0]])
    found = script.sequence_logps(logits, sequences, weights, 0.1)
    assert found[0].item() == pytest.approx(-600 - 2 * math.log(21), rel=1e-6)
    assert found[1].item() == pytest.approx(-0.5 * math.log(21), rel=1e-6)


def test_diversity_is_the_expected_difference_of_two_samples():
    logits = torch.full((1, 3, 21), -1e9)
    logits[0, 0, 3] = 0.0  # certain
    logits[0, 1, :4] = 0.0  # four letters alike
    logits[0, 2, :21] = 0.0  # not designed
    designed = torch.tensor([[True, True, False]])
    assert script.diversity(logits, designed, 1.0).item() == pytest.approx((0 + 0.75) / 2)
    free = torch.randn(1, 3, 21, requires_grad=True)
    script.diversity(free, designed, 1.0).sum().backward()
    assert free.grad[0, :2].abs().sum() > 0 and free.grad[0, 2].abs().sum() == 0


def run(folder, *options: str) -> list[dict]:
    """One process, in this one; the records of metrics.jsonl."""
    argv = [f"--train_data={folder}/pairs.json", f"--cache_dir={folder}/cache", f"--output_dir={folder}/out",
            "--base_model_name=random", "--batch_size=4", "--num_epochs=1", "--num_orders=1", "--log_every=1",
            "--wandb_mode=disabled", "--device=cpu", "--fresh", *options]  # fmt: skip
    assert script.launch(script.main, script.parse_args(argv)) == 0
    return [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dpo")
    write_structures(folder, 4, pairs=4, least=8, most=24)
    return folder


@pytest.mark.parametrize("options, expected", [
    ((), math.log(2)), (("--temperature=1",), math.log(2)), (("--loss_type=hinge",), 1.0),
    (("--loss_type=ipo",), 25.0), (("--decoding_order=left_to_right", "--freeze_encoder"), math.log(2)),
])  # fmt: skip
def test_a_run_starts_at_the_known_loss(data, options, expected):
    """Network and reference are one: before training to the last bit, in the first step to rounding."""
    rows = run(data, *options)
    assert rows[0]["val loss"] == pytest.approx(expected, abs=1e-9) and rows[0]["val rewards/margins"] == 0
    first = next(row["loss"] for row in rows if "loss" in row)
    assert first == pytest.approx(expected, abs=1e-6 if not options or "--temperature=1" in options else 1e-4)


def test_margins_and_early_stop(data):
    """IPO with margins: (margin / (residues beta) + 1 / (2 beta))^2, which does not fall at a rate of nothing."""
    rows = [row | {"margin": 0.5} for row in json.loads((data / "pairs.json").read_text())]
    (data / "margins.json").write_text(json.dumps(rows))
    options = "--num_epochs=5", "--early_stop_patience=2", "--lr=1e-30"
    found = run(data, f"--train_data={data}/margins.json", "--loss_type=ipo", *options)
    losses = [row["val loss"] for row in found if "val loss" in row]
    (held,) = {row["pdb_file"] for row in rows if row["pdb_file"][:-4] == json.loads(
        (data / "out" / "split.json").read_text())["valid"][0].split(":")[0]}  # fmt: skip
    residues = next(len(row["preferred_seq"]) for row in rows if row["pdb_file"] == held)
    assert losses == [pytest.approx((0.5 / (residues * 0.1) + 5) ** 2, rel=1e-6)] * 4  # the start, the best, two more


def test_a_difference_between_network_and_reference_is_found(data, monkeypatch, capfd):
    """Dropout, as in the original, in the step alone: the run must not start."""
    plain = script.ProteinMPNN.encode

    def with_dropout(self, geometry):
        nodes, edges = plain(self, geometry)
        return torch.nn.functional.dropout(nodes, 0.1, torch.is_grad_enabled()), edges

    monkeypatch.setattr(script.ProteinMPNN, "encode", with_dropout)
    argv = [f"--train_data={data}/pairs.json", f"--cache_dir={data}/cache", f"--output_dir={data}/dropout",
            "--base_model_name=random", "--batch_size=6", "--wandb_mode=disabled", "--device=cpu"]  # fmt: skip
    assert script.launch(script.main, script.parse_args(argv)) == 1
    assert "network and reference differ before training" in capfd.readouterr().out


def test_weights_and_terms_reach_the_loss(data):
    """A pair's weight, the cross entropy and the diversity term change the gradient, not the preference loss shown."""
    plain = run(data, "--temperature=1")
    for option in "--sft_weight=1", "--diversity_lambda=5":
        other = run(data, "--temperature=1", option)
        steps = [[row for row in rows if "loss" in row] for rows in (plain, other)]
        assert steps[0][0]["loss"] == pytest.approx(steps[1][0]["loss"], abs=1e-7)
        assert steps[0][0]["grad_norm"] != pytest.approx(steps[1][0]["grad_norm"], rel=1e-3)


def test_reference_free_compares_the_network_alone(data):
    rows = run(data, "--reference_free", "--temperature=1")
    assert rows[0]["val loss"] != pytest.approx(math.log(2), abs=1e-4)
    assert np.isfinite(rows[0]["val loss"])
