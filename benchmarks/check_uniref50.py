"""Is run_train_uniref50_ddp.py right? Train it on sequences whose probabilities are known exactly.

    python benchmarks/check_uniref50.py --nproc 1 --steps 5000
    python benchmarks/check_uniref50.py --steps 50 --sequences 2000 --samples 20       # a trial

A Markov chain over the 20 residues makes the sequences, so the entropy of the held-out ones is a
sum. Shown: the held-out bound beside it, which it must come close to and not cross; neighbours in
samples of the rigorous and of the simple sampler beside the chain (chi-square of transitions).
"""

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path

import numpy as np
import sides

sys.path.insert(0, str(sides.ROOT))
import run_train_uniref50_ddp as script

SCRIPT = "run_train_uniref50_ddp.py"
VAL_RATIO = 0.05


def markov_source():
    """A strongly structured, ergodic chain: its stationary law (20,), its transitions (20, 20)."""
    weights = np.exp(1.8 * np.random.default_rng(0).standard_normal((20, 20)))
    weights /= weights.sum(0)  # no residue is rare
    transition = weights / weights.sum(1, keepdims=True)
    balance = np.vstack([transition.T - np.eye(20), np.ones(20)])
    return np.linalg.lstsq(balance, np.eye(21)[20], rcond=None)[0], transition


def markov_sequences(count, source):
    """Sequences (numbers 0 to 19) of the chain, with lengths uniform in 24 to 64."""
    generator = np.random.default_rng(1)
    lengths = generator.integers(24, 65, count)
    rows = np.zeros((count, 64), np.int64)
    rows[:, 0] = (generator.random((count, 1)) >= source[0].cumsum()[:-1]).sum(1)
    for t in range(1, 64):
        laws = source[1].cumsum(1)[rows[:, t - 1], :-1]
        rows[:, t] = (generator.random((count, 1)) >= laws).sum(1)
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def nats(sequences, source):
    """-log p per residue, given the lengths, exactly; and its standard error over sequences."""
    totals = []
    for sequence in sequences:
        steps = np.log(source[1][sequence[:-1], sequence[1:]]).sum()
        totals.append(-math.log(source[0][sequence[0]]) - steps)
    lengths = np.array([len(sequence) for sequence in sequences])
    mean = sum(totals) / lengths.sum()
    return mean, math.sqrt(((np.array(totals) - mean * lengths) ** 2).sum()) / lengths.sum()


def chi_square(sequences, transition):
    """Of the transitions counted beside the chain's: chi-square, its degrees of freedom (in each
    row, cells that expect fewer than 5 are one)."""
    counts = np.zeros((20, 20))
    for sequence in sequences:
        np.add.at(counts, (sequence[:-1], sequence[1:]), 1)
    expected = counts.sum(1, keepdims=True) * transition
    statistic = 0.0
    freedom = 0
    for found, wanted in zip(counts, expected, strict=True):
        rare = wanted < 5
        found = np.append(found[~rare], found[rare].sum())
        wanted = np.append(wanted[~rare], wanted[rare].sum())
        statistic += float(((found - wanted) ** 2 / np.maximum(wanted, 1e-12)).sum())
        freedom += len(wanted) - 1
    return statistic, freedom


def write_fasta(path, sequences):
    letters = np.frombuffer(sides.RESIDUES.encode(), np.uint8)
    lines = []
    for number, sequence in enumerate(sequences):
        lines.append(f">{number}\n{letters[sequence].tobytes().decode()}\n")
    path.write_text("".join(lines))


def read_fasta(path):
    records = path.read_text().split(">")[1:]
    texts = [record.partition("\n")[2].replace("\n", "") for record in records]
    return [np.array([sides.RESIDUES.index(letter) for letter in text]) for text in texts]


def train(args, work):
    """The best held-out metrics of a run on chain.fasta, into the folder `run-chain`."""
    options = f"""--datafile=chain.fasta --val_ratio={VAL_RATIO} --hidden_size=64
        --n_blocks_prot=3 --n_heads=4 --cond_dim=32 --max_protein_len=68 --dropout=0
        --global_batch_size=48 --batch_size={48 // args.nproc} --n_iters={args.steps} --epochs=1000
        --lr=4e-3 --warmup=100 --ema=0.999 --log_every=100 --eval_freq={args.steps}
        --eval_sequences=100000"""
    sides.script_job(SCRIPT, "chain", work, options, processes=args.nproc).wait()
    return json.loads((work / "run-chain" / "summary.json").read_text())["val"]


def is_held_out(sequence):
    tokens = (script.FIRST + sequence).astype(np.uint8).tobytes()
    return script.is_held_out(tokens, VAL_RATIO)


def main():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    add = parser.add_argument
    add("--sequences", type=int, default=60_000, help="sequences of the chain")
    add("--steps", type=int, default=4000, help="optimizer steps")
    add("--samples", type=int, default=500, help="sequences drawn by each sampler")
    add("--nproc", type=int, default=2, help="processes, one thread each")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        source = markov_source()
        sequences = markov_sequences(args.sequences, source)
        write_fasta(work / "chain.fasta", sequences)
        found = train(args, work)
        unseen = [sequence for sequence in sequences if is_held_out(sequence)]
        exact, error = nats(unseen, source)
        rate = -(source[0][:, None] * source[1] * np.log(source[1])).sum()
        print(f"entropy rate of the chain {rate:.4f} nats per residue")
        print(f"{len(unseen)} held-out sequences: exactly {exact:.4f} (+- {error:.4f})")
        above = found["nelbo"] / exact - 1
        print(f"held-out bound {found['nelbo']:.4f} +- {found['nelbo_se']:.4f}, {above:+.2%}")
        print(f"unigram {found['unigram']:.4f}")

        drawn = {"held-out sequences": unseen[: args.samples]}
        for method in ("rigorous", "simple"):
            steps = 0 if method == "rigorous" else 16
            options = f"""{work}/run-chain/best.pt --count={args.samples} --steps={steps}
                --method={method} --out={work}/{method}.fasta --batch_size=64 --device=cpu"""
            sides.run_tool("sample_uniref50.py", *options.split())
            drawn[method] = read_fasta(work / f"{method}.fasta")
        for name, group in drawn.items():
            statistic, freedom = chi_square(group, source[1])
            print(f"{len(group)} {name}:")
            print(f"    chi-square of transitions {statistic:.0f}, degrees of freedom {freedom}")
            print(f"    {nats(group, source)[0]:.4f} nats per residue by the chain")


if __name__ == "__main__":
    main()
