"""Options, configs and modes of run_train_rebm_ddp.py, as a user types them."""

from __future__ import annotations

import json
import statistics

import pytest
from helpers import ROOT, call_script, write_digits

import run_train_rebm_ddp as rebm

CONFIGS = sorted((ROOT / "configs").glob("config_rebm_*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_configs(path):
    """Each parses, as a first word too, and dotted keys win over it."""
    args = rebm.parse_args([str(path), "attack.max_steps=7", "use_ddp=False", "attack.eps=.inf"])
    assert args.config == str(path) and args.attack_max_steps == 7 and args.use_ddp is False
    assert path.stem in path.read_text().splitlines()[0]


def test_the_original_keys():
    args = rebm.parse_args("rand_seed=3 ddp_backend=gloo attack.step_size=1e-1 indist_attack_clf.eps=None".split())
    assert (args.seed, args.backend, args.attack_step_size, args.clf_attack_eps) == (3, "gloo", 0.1, float("inf"))


def test_features_that_cannot_be_had_are_said_before_training(tmp_path, capsys):
    args = rebm.parse_args([f"--output_dir={tmp_path}/out", "--image_log.fid_features=no.pt", "--device=cpu"])
    assert rebm.launch(rebm.main, args) == 1
    assert "fid_features no.pt" in capsys.readouterr().out and not (tmp_path / "out").exists()


def test_a_ball_without_end_has_no_robust_accuracy():
    assert rebm.parse_args(["indist_attack_clf.eps=inf"]).radii == []
    assert rebm.parse_args(["radii=0.5,inf"]).radii == [0.5]


@pytest.mark.parametrize("argv, message", [
    ("fixed_lr=True", "fixed_lr (it changed nothing"), ("attack.attack_type=adam", "attack is PGD"),
    ("clf_adv_weight=1", "another option"), ("n_imgs_per_image_log=5", "another option"), ("lr=-1", "above 0"),
    ("attack.max_step=5", "nearest known one is 'attack.max_steps'"), ("stage=dat", "model.ckpt_path"),
    ("model.model_type=resnet", "choose from 'WideResNet28x2'"), ("data.indist_dataset=cifar10", "indist_ds_dir"),
    ("attack.start_step=60", "above"), ("image_log.fid_features=inception", "fid_weights"), ("radii=0", "above 0"),
    ("data.exclude=a.txt", "tinyimages"),
    ("indist_attack_clf.random_start=True indist_attack_clf.eps=inf", "needs a radius")])  # fmt: skip
def test_refused(argv, message, capsys):
    with pytest.raises(SystemExit) as caught:
        rebm.parse_args(argv.split())
    error = capsys.readouterr().err
    assert caught.value.code == 2 and message in error and len(error.strip().splitlines()) == 1


def test_one_process_by_data_parallel(tmp_path):
    """use_ddp=False under a launcher: rank 0 alone, with the weights of a plain run; other ranks end at once; then
    eval_only gives the figures of the run's end, and a resumed run says that it is finished."""
    write_digits(tmp_path / "digits.npz", 120, 30)
    base = f"""data.indist_dataset=file data.indist_ds_dir={tmp_path}/digits.npz model.model_type=SmallNet width=4
        augm_type_classification=shift augm_type_generation=none valid_images=20 outdist_max_samples=60 at_epochs=1
        total_epochs=1 attack.max_steps=1 indist_attack_clf.max_steps=1 at_optimizer=adamw at_lr=1e-2 batch_size=10
        eval_images=30 eval_steps=2 eval_restarts=1 image_log.num_samples=20 image_log.num_steps=2 device=cpu seed=1
        outdist_dataset_ood_detection=noise wandb_mode=disabled log_every=2 keep_samples=True""".split()
    def call(rank: int, *more: str) -> str:
        env = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
        status, text = call_script("run_train_rebm_ddp", *base, *more, **env)
        assert status == 0, text[-3000:]
        return text
    out = tmp_path / "out"
    text = call(0, "use_ddp=False", f"output_dir={out}")
    assert "DataParallel over 1 devices" in text and "finished:" in text
    assert "nothing to do" in call(1, "use_ddp=False", f"output_dir={out}")
    summary = json.loads((out / "summary.json").read_text())
    assert set(summary["baselines"]) == {"at"} and (out / "samples_dat.png").exists() and (out / "samples.npz").exists()
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    timed = [row["ranks"] for row in rows if "ranks" in row]
    made = []  # what the parts of a step make of the step; a pause of the machine between two of them leaves a gap
    for row in timed:
        parts = [row[f"s_{name}"]["mean"] for name in ("data", "attack", "compute", "update", "other", "comm")]
        made.append(sum(parts) / row["s_step"]["mean"])
        assert all(part > 0 for part in parts[:5])
    assert len(made) == 10 and statistics.median(made) > 0.95 and max(made) < 1.001
    call(0, "use_ddp=False", "eval_only=True", f"model.ckpt_path={out}/dat.pth", f"output_dir={tmp_path}/eval")
    again = json.loads((tmp_path / "eval" / "report.json").read_text())
    assert again == pytest.approx(summary["test"], rel=1e-6)
