"""Turn weights of ESM-2 into weights of run_train_uniref50_ddp.py, and the other way round.

    python tools/esm_uniref50.py esm2_t6_8M_UR50D esm2.pt      # a folder, as transformers saves it
    python run_train_uniref50_ddp.py --start_from esm2.pt --datafile proteins.fasta
    python tools/esm_uniref50.py experiments_ddp/best.pt my_esm2

The folder that the last line writes is read by EsmForMaskedLM, EsmModel and AutoTokenizer of
transformers, and by all that is built on them. The logits of the residues are the same in both
programs; the folder's other tokens (padding, gaps, ...) are never predicted there. ESM-2 has no
token for J: what comes from it begins with J as X, and in a folder J is lost.

Released ESM-2 has token dropout: its embeddings of masked tokens are 0, the others are scaled by
the share that is not masked. Such weights need --token_dropout of the script, at all mask rates,
as DPLM, which goes on from ESM-2, leaves it switched on.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from sample_uniref50 import check_new, load_network
from transformers import EsmConfig, EsmForMaskedLM, EsmTokenizer

import run_train_uniref50_ddp as script
from run_train_uniref50_ddp import BEGIN, END, MASK, RESIDUES, SIZES, InputError, Parser

NAMES = {  # parts of the names of weights: in the script, and in EsmForMaskedLM
    "embed": "esm.embeddings.word_embeddings",
    "blocks": "esm.encoder.layer",
    "norm1": "attention.LayerNorm",
    "qkv": "attention.self.{}",
    "out": "attention.output.dense",
    "norm2": "LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "norm": "esm.encoder.emb_layer_norm_after",
    "dense": "lm_head.dense",
    "dense_norm": "lm_head.layer_norm",
    "head_bias": "lm_head.bias",
}
OF_TOKENS = ("embed.weight", "head_bias")  # a row for each token
VOCABULARY = ["<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPQKNFYMHWCXBUZO.-"]
VOCABULARY += ["<null_1>", "<mask>"]
TOKENS = {BEGIN: 0, END: 2, MASK: 32}  # {token of the script: of ESM-2}
TOKENS |= {RESIDUES.index(x): VOCABULARY.index(x) for x in RESIDUES if x != "J"}
# of EsmConfig: what the script's network cannot change
SETTINGS = {"vocab_size": 33, "position_embedding_type": "rotary", "emb_layer_norm_before": False}
SETTINGS |= {"pad_token_id": 1, "mask_token_id": 32, "layer_norm_eps": 1e-5}


def parse_args():
    parser = Parser(description=__doc__, formatter_class=script.HelpFormatter, allow_abbrev=False)
    parser.add_argument("source", type=Path, help="ESM-2's folder, best.pt, step_N.pt or latest.pt")
    parser.add_argument("out", type=Path, help="file or folder to write")
    args = parser.parse_args()
    check_new(parser, "out", args.out)
    return args


def pair_weights(ours, theirs):
    """Yields (tensor, tensor), views of the same weights in two state_dicts: of a Denoiser, and of
    an EsmForMaskedLM."""
    for name, tensor in ours.items():
        their_name = ".".join(NAMES.get(part, part) for part in name.split("."))
        if "qkv" in name:
            for part, kind in zip(tensor.chunk(3), ["query", "key", "value"], strict=True):
                yield part, theirs[their_name.format(kind)]
        elif name in OF_TOKENS:
            for token, their_token in TOKENS.items():
                yield tensor[token], theirs[their_name][their_token]
        else:
            yield tensor, theirs[their_name]


def make_network(sizes):
    options = argparse.Namespace(**sizes, dropout=0.0, gradient_checkpointing=False)
    return script.Denoiser(options).eval()


def from_esm(folder):
    """(Denoiser with the weights of a folder of ESM-2, its sizes)"""
    try:
        esm, report = EsmForMaskedLM.from_pretrained(folder, output_loading_info=True)
    except Exception as error:  # it holds something else
        raise InputError(f"{folder}: expected ESM-2 as transformers saves it: {error}") from None
    config = esm.config
    expected = {**SETTINGS, "intermediate_size": 4 * config.hidden_size}
    wrong = [name for name, value in expected.items() if (getattr(config, name) or False) != value]
    wrong += [name for name in report["missing_keys"] if "contact_head" not in name]
    if wrong:
        raise InputError(f"{folder}: it is not an ESM-2 with its head: {wrong[0]}")
    sizes = [config.hidden_size, config.num_hidden_layers, config.num_attention_heads]
    sizes = dict(zip(SIZES, [*sizes, bool(config.token_dropout)], strict=True))
    model = make_network(sizes)
    for ours, theirs in pair_weights(model.state_dict(), esm.state_dict()):
        ours.copy_(theirs)
    for name in OF_TOKENS:
        rows = model.state_dict()[name]
        rows[RESIDUES.index("J")] = rows[RESIDUES.index("X")]
    return model, sizes


def to_esm(model, options):
    """EsmForMaskedLM with the weights of a Denoiser."""
    config = EsmConfig(
        **SETTINGS,
        hidden_size=options.hidden_size,
        intermediate_size=4 * options.hidden_size,
        num_hidden_layers=options.n_blocks_prot,
        num_attention_heads=options.n_heads,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=options.max_protein_len + 2,
        token_dropout=options.token_dropout,
    )
    esm = EsmForMaskedLM(config).eval()
    theirs = esm.state_dict()
    theirs["lm_head.bias"].fill_(-1e4)  # tokens that are no residues
    for ours, their_tensor in pair_weights(model.state_dict(), theirs):
        their_tensor.copy_(ours)
    for token in (BEGIN, END, MASK):
        theirs["lm_head.bias"][TOKENS[token]] = -1e4
    return esm


def main():
    args = parse_args()
    if args.source.is_dir():
        model, sizes = from_esm(args.source)
        torch.save({"ema_model": model.state_dict(), "args": sizes}, args.out)
        options = " ".join(f"--{name}={value}" for name, value in sizes.items())
        print(f"{args.out}: J begins as X. Train with --start_from={args.out} {options}")
        return
    model, _, options = load_network(args.source, torch.device("cpu"))
    to_esm(model, options).save_pretrained(args.out)
    (args.out / "vocab.txt").write_text("\n".join(VOCABULARY))
    EsmTokenizer(args.out / "vocab.txt").save_pretrained(args.out)
    print(f"{args.out}: EsmForMaskedLM of transformers; it has no token for J")


if __name__ == "__main__":
    try:
        with torch.no_grad():
            main()
    except (InputError, OSError) as error:
        print(f"esm_uniref50.py: error: {error}", file=sys.stderr)
        sys.exit(2)
