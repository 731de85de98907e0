"""tools/esm_uniref50.py: weights of ESM-2, both ways; the script's --start_from and its files."""

from argparse import Namespace
from functools import partial

import numpy as np
import pytest
import torch
from helpers import call_script, import_tool, run_here
from runs import COMMON, TINY, Run
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM, EsmConfig, EsmForMaskedLM

import run_train_uniref50_ddp as script

tool = import_tool("esm_uniref50")
convert = partial(call_script, "tools/esm_uniref50")


def esm2(width, layers, heads, token_dropout):
    """With random weights everywhere; other settings as released ones have them."""
    torch.manual_seed(0)
    options = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    options |= {"intermediate_size": 4 * width, "token_dropout": token_dropout}
    options |= {"position_embedding_type": "rotary", "layer_norm_eps": 1e-5}
    options |= {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32}
    model = EsmForMaskedLM(EsmConfig(**options)).eval()
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def a_batch():
    """Three sequences, of which 20, 50 and 90 % are masked; no J."""
    generator = np.random.default_rng(0)
    sequences = []
    for length in (5, 28, 101):
        residues = generator.integers(25, size=length)
        sequences.append(np.array([script.BEGIN, *residues, script.END], np.uint8))
    return script.make_batch(sequences, [0.2, 0.5, 0.9], [generator] * 3, 1)


@torch.no_grad()
def check_same(ours, theirs):
    """Logits of residues and hidden states of packed sequences, and of each by itself."""
    batch = a_batch()
    lengths = batch.lengths.tolist()
    logits = ours(batch)[:, :25].split(lengths)
    first = ours.hidden(batch, 1).split(lengths)
    last = ours.hidden(batch).split(lengths)
    chances = []  # of all residues together
    for i, noisy in enumerate(batch.noisy.split(lengths)):
        tokens = torch.tensor([[tool.TOKENS[token] for token in noisy.tolist()]])
        found = theirs(tokens, output_hidden_states=True)
        residues = [tool.TOKENS[token] for token in range(25)]
        assert torch.allclose(logits[i], found.logits[0][:, residues], atol=1e-5)
        chances.append(found.logits[0].softmax(1)[:, residues].sum(1).min())
        assert torch.allclose(first[i], found.hidden_states[1][0], atol=1e-5)
        assert torch.allclose(last[i], found.hidden_states[-1][0], atol=1e-5)
    return min(chances)


@pytest.mark.parametrize("sizes", [(64, 3, 4, True), (48, 2, 6, False), (320, 6, 20, True)])
def test_weights_of_esm2(tmp_path, sizes):
    theirs = esm2(*sizes)
    theirs.save_pretrained(tmp_path / "esm2")
    said = convert(tmp_path / "esm2", tmp_path / "start.pt")
    options = "--hidden_size={} --n_blocks_prot={} --n_heads={} --token_dropout={}"
    assert "J begins as X" in said and options.format(*sizes) in said

    state = torch.load(tmp_path / "start.pt", weights_only=True)
    ours = tool.make_network(state["args"])
    ours.load_state_dict(state["ema_model"])
    check_same(ours, theirs)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(folder, options) of a tiny run of 20 steps, in folder/run"""
    folder = tmp_path_factory.mktemp("trained")
    options = [*COMMON, *TINY["run_train_uniref50_ddp"](folder), "--num_workers=0"]
    run_here(script, *options, "--n_iters=20", f"--output_dir={folder}/run")
    return folder, options


def test_a_trained_network_as_esm2(trained, tmp_path):
    """transformers reads what is written, sequences, too."""
    convert(trained[0] / "run" / "best.pt", tmp_path / "esm2")
    theirs = EsmForMaskedLM.from_pretrained(tmp_path / "esm2").eval()
    state = torch.load(trained[0] / "run" / "best.pt", weights_only=True)
    ours = script.Denoiser(Namespace(**state["args"])).eval()
    ours.load_state_dict(state["ema_model"])
    assert check_same(ours, theirs) > 0.9999
    tokens = AutoTokenizer.from_pretrained(tmp_path / "esm2")("MKVX")["input_ids"]
    expected = [script.BEGIN, *map(script.RESIDUES.index, "MKVX"), script.END]
    assert tokens == [tool.TOKENS[token] for token in expected]


def test_start_from(trained, tmp_path):
    """Model and average begin with the averaged weights. A resumed run needs them no more."""
    folder, options = trained
    weights = tmp_path / "start.pt"
    weights.write_bytes((folder / "run" / "best.pt").read_bytes())
    options = [*options, f"--start_from={weights}", f"--output_dir={tmp_path}/run", "--lr=1e-12"]
    run_here(script, *options, "--n_iters=1")
    weights.unlink()
    run_here(script, *options, "--n_iters=2")
    found = Run(tmp_path / "run").summary
    before = Run(folder / "run").summary
    assert found["best"]["value"] == pytest.approx(before["best"]["value"], rel=1e-5)
    assert found["steps"] == 2 and len(found["args"]["start_hash"]) == 12


def test_weights_that_do_not_fit(trained, tmp_path):
    folder, options = trained
    best = folder / "run" / "best.pt"
    state = torch.load(best, weights_only=True)
    state["average"] = state.pop("ema_model")  # as earlier versions had it
    torch.save(state, tmp_path / "old.pt")
    cases = {
        f"--start_from={best} --hidden_size=32": "its network needs --hidden_size=16 --n_bl",
        f"--start_from={tmp_path}/old.pt": r"expected best.pt .* \(KeyError\('ema_model'\)\)",
    }
    for words, reason in cases.items():
        with pytest.raises(script.InputError, match=reason):
            run_here(script, *options, *words.split(), f"--output_dir={tmp_path}/run")

    config = BertConfig(hidden_size=16, num_attention_heads=2)
    BertForMaskedLM(config).save_pretrained(tmp_path / "bert")
    cases = {
        (tmp_path / "bert", tmp_path / "x"): "bert: it is not an ESM-2 with its head: vocab_size",
        (tmp_path / "old.pt", tmp_path / "x"): "old.pt: KeyError; expected best.pt, step_N.pt",
        (best, tmp_path / "bert"): "bert exists: expected a new file",
    }
    for words, reason in cases.items():
        *_, last = convert(*words, status=2).splitlines()
        assert reason in last and not (tmp_path / "x").exists()


def test_files_to_validate_and_test_on(tmp_path, caplog):
    """They are not trained on, wherever else they stand; the test is made once, with the best."""
    options = TINY["run_train_uniref50_ddp"](tmp_path)
    records = (tmp_path / "proteins.fasta").read_text().split(">")[1:]
    for name, part in {"valid": records[:30], "test": [*records[25:60], "odd\nACDEFG\n"]}.items():
        (tmp_path / name).write_text("".join(f">{record}" for record in part))
    files = [f"--valid_file={tmp_path}/valid", f"--test_file={tmp_path}/test"]
    options = [*COMMON, *options, *files, f"--output_dir={tmp_path}/run", "--num_workers=0"]
    run_here(script, *options, "--n_iters=20")
    assert "65 sequences are left out, which are in the test or the validation" in caplog.text
    assert "740 sequences to train on, 25 held out, of which 25 are validated on" in caplog.text
    summary = Run(tmp_path / "run").summary
    assert summary["test"]["nelbo"] > 0 and summary["test"]["nelbo"] != summary["best"]["value"]
    assert summary["baselines"].keys() == {"unigram", "test_unigram"}
