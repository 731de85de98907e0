"""Is run_train_uniref50_ddp.py right? Train it on sequences whose probabilities are known exactly.

    python benchmarks/check_uniref50.py [--sequences 60000] [--steps 4000] [--samples 500] [--nproc 2]

A first-order Markov chain over the 20 residues makes the sequences, so that the entropy of the held-out ones is a sum.
Shown: the held-out bound (NELBO) against it, which it must approach and not cross; pairs of neighbours in samples of
the exact and of the approximate sampler against the chain (chi-square of transitions); and the control, in which the
residues of every sequence are shuffled: there is nothing to learn but the residues' shares (the unigram entropy).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
LETTERS = "ACDEFGHIKLMNPQRSTVWY"


def markov_source(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A strongly structured, ergodic chain: (initial law (20,), its stationary one; transition (20, 20)), float64."""
    weights = np.exp(1.8 * np.random.default_rng(seed).standard_normal((20, 20)))
    weights /= weights.sum(0)  # no residue is rare
    transition = weights / weights.sum(1, keepdims=True)
    balance = np.vstack([transition.T - np.eye(20), np.ones(20)])
    return np.linalg.lstsq(balance, np.eye(21)[20], rcond=None)[0], transition


def markov_sequences(count: int, source: tuple[np.ndarray, np.ndarray], seed: int) -> list[np.ndarray]:
    """`count` sequences (numbers 0 to 19) with lengths uniform in 24..64."""
    generator = np.random.default_rng(seed)
    rows, lengths = np.zeros((count, 64), np.int64), generator.integers(24, 65, count)
    rows[:, 0] = (generator.random((count, 1)) >= source[0].cumsum()[:-1]).sum(1)
    for t in range(1, 64):
        rows[:, t] = (generator.random((count, 1)) >= source[1].cumsum(1)[rows[:, t - 1], :-1]).sum(1)
    return [row[:n] for row, n in zip(rows, lengths, strict=True)]


def nats(sequences: list[np.ndarray], source: tuple[np.ndarray, np.ndarray]) -> tuple[float, float]:
    """-log p per residue of sequences given their lengths, exactly, and its standard error over sequences."""
    totals = [-math.log(source[0][s[0]]) - np.log(source[1][s[:-1], s[1:]]).sum() for s in sequences]
    lengths = np.array([len(s) for s in sequences])
    mean = sum(totals) / lengths.sum()
    return mean, math.sqrt(((np.array(totals) - mean * lengths) ** 2).sum()) / lengths.sum()


def chi_square(sequences: list[np.ndarray], transition: np.ndarray) -> tuple[float, int, float]:
    """Of the transitions counted in `sequences` against the chain's: chi-square, its degrees of freedom (in each row,
    cells with fewer than 5 expected are one), and the total variation distance of the laws of pairs."""
    counts = np.zeros((20, 20))
    for s in sequences:
        inside = (s[:-1] >= 0) & (s[1:] >= 0)  # -1: one of the six letters that the chain never makes
        np.add.at(counts, (s[:-1][inside], s[1:][inside]), 1)
    expected, statistic, freedom = counts.sum(1, keepdims=True) * transition, 0.0, 0
    for found, wanted in zip(counts, expected, strict=True):
        rare = wanted < 5
        found, wanted = (np.r_[row[~rare], row[rare].sum()] for row in (found, wanted))
        statistic += float(((found - wanted) ** 2 / np.maximum(wanted, 1e-12)).sum())
        freedom += len(wanted) - 1
    return statistic, freedom, float(abs(counts - expected).sum() / counts.sum() / 2)


def write_fasta(path: Path, sequences: list[np.ndarray]) -> None:
    letters = np.frombuffer(LETTERS.encode(), np.uint8)
    path.write_text("".join(f">{i}\n{letters[s].tobytes().decode()}\n" for i, s in enumerate(sequences)))


def read_fasta(path: Path) -> list[np.ndarray]:
    records = [r.partition("\n")[2].replace("\n", "") for r in path.read_text().split(">")[1:]]
    return [np.array([LETTERS.find(c) for c in record]) for record in records]


def run(work: Path, nproc: int, *options: str) -> None:
    command = [sys.executable, str(ROOT / "run_train_uniref50_ddp.py"), f"--nproc={nproc}", f"--cache_dir={work}/cache"]
    done = subprocess.run([*command, "--device=cpu", *options], env=os.environ | {"OMP_NUM_THREADS": "1"},
                          capture_output=True, text=True)  # fmt: skip
    if done.returncode:
        sys.exit(f"{' '.join(command)} {' '.join(options)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def train(args: argparse.Namespace, work: Path, name: str) -> dict:
    """The best held-out metrics of a run on `name`.fasta."""
    run(work, args.nproc, f"--datafile={work}/{name}.fasta", f"--output_dir={work}/{name}",
        f"--hidden_size={args.width}", "--n_blocks_prot=3", "--n_heads=4", "--cond_dim=32", "--max_protein_len=68",
        "--dropout=0", "--global_batch_size=32", f"--batch_size={32 // args.nproc}", f"--n_iters={args.steps}",
        "--lr=4e-3", "--warmup=100", "--ema=0.999", "--log_freq=100", f"--eval_freq={args.steps}",
        "--eval_sequences=100000", "--snapshot_sampling=False", "--num_workers=0", "--wandb_mode=disabled")  # fmt: skip
    rows = [json.loads(line) for line in (work / name / "metrics.jsonl").read_text().splitlines()]
    return min((row for row in rows if "nelbo" in row), key=lambda row: row["nelbo"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=60_000, help="sequences of the chain")
    parser.add_argument("--steps", type=int, default=4000, help="optimizer steps of both runs")
    parser.add_argument("--width", type=int, default=64, help="of the network")
    parser.add_argument("--samples", type=int, default=500, help="sequences drawn by each sampler")
    parser.add_argument("--nproc", type=int, default=2, help="processes, one thread each")
    parser.add_argument("--seed", type=int, default=0, help="of the chain and its sequences")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work, source = Path(folder), markov_source(args.seed)
        sequences = markov_sequences(args.sequences, source, args.seed + 1)
        write_fasta(work / "chain.fasta", sequences)
        shuffled, draw = [], random.Random(args.seed)
        for s in sequences:
            shuffled.append(np.array(draw.sample(s.tolist(), len(s))))
        write_fasta(work / "shuffled.fasta", shuffled)
        found = train(args, work, "chain")
        (valid,) = work.glob("cache/uniref50-*/valid.tokens")
        tokens = np.fromfile(valid, np.uint8).astype(np.int64)
        held_out = [part[:-1] - 5 for part in np.split(tokens, np.flatnonzero(tokens == 0))[1:]]
        held_out = [part[1:] for part in held_out]
        exact, error = nats(held_out, source)
        rate = -(source[0][:, None] * source[1] * np.log(source[1])).sum()
        print(f"entropy rate of the chain {rate:.4f} nats; {len(held_out)} held-out sequences: exactly {exact:.4f} "
              f"(+- {error:.4f} over sequences) nats per residue")  # fmt: skip
        print(f"held-out NELBO {found['nelbo']:.4f} +- {found['nelbo_se']:.4f}, {found['nelbo'] / exact - 1:+.2%}; "
              f"unigram {found['unigram']:.4f}")  # fmt: skip
        for method in ("rigorous", "simple"):
            run(work, args.nproc, f"--sample={args.samples}", f"--checkpoint={work}/chain/best.pt", "--steps=16",
                f"--method={method}", f"--out={work}/{method}.fasta", "--eval_batch_size=64")  # fmt: skip
        drawn = {name: read_fasta(work / f"{name}.fasta") for name in ("rigorous", "simple")}
        for name, group in {"held-out sequences": held_out[: args.samples], **drawn}.items():
            statistic, freedom, distance = chi_square(group, source[1])
            print(f"{len(group)} {name}: chi-square of transitions {statistic:.0f}, {freedom} degrees of freedom; "
                  f"total variation {distance:.4f}; {nats_of(group, source):.4f} nats per residue by the chain")
        control = train(args, work, "shuffled")
        print(f"residues shuffled inside every sequence: NELBO {control['nelbo']:.4f} +- {control['nelbo_se']:.4f}, "
              f"below the unigram by {control['below_unigram']:.4f} +- {control['below_unigram_se']:.4f}")  # fmt: skip


def nats_of(group: list[np.ndarray], source: tuple[np.ndarray, np.ndarray]) -> float:
    """-log p per residue under the chain of the sequences that it can make."""
    return nats([s for s in group if (s >= 0).all()], source)[0]


if __name__ == "__main__":
    main()
