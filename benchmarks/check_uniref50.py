"""Is run_train_uniref50_ddp.py right? Train it on sequences whose probabilities are known exactly.

    python benchmarks/check_uniref50.py --nproc 1 --steps 5000
    python benchmarks/check_uniref50.py --steps 50 --sequences 2000 --samples 20       # a trial

A Markov chain over the 20 residues makes the sequences, so the entropy of the held-out ones is a
sum: the bound must come close to it and not cross it. Cross entropies by mask rate, and scores of
held-out sequences (chain rule, one order) and of substitutions in them (masked marginals) stand
beside those of the chain's exact law. In real sequences, and in samples of the rigorous and of the
simple sampler, neighbours are counted: chi-square beside the chain.
"""

import argparse
import json
import math

import numpy as np
import pandas
import sides

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
    """-log p per residue, given the lengths, exactly."""
    total = 0.0
    for sequence in sequences:
        steps = np.log(source[1][sequence[:-1], sequence[1:]]).sum()
        total -= math.log(source[0][sequence[0]]) + steps
    return total / sum(map(len, sequences))


def exact_logp(sequence, masked, source):
    """(n, 20): log of the law of each masked residue, given those that are shown."""
    seen = np.eye(20)[sequence]
    seen[masked] = 1
    forward = [source[0] * seen[0]]
    backward = [np.ones(20)]
    for own in seen[1:]:
        forward.append(forward[-1] @ source[1] * own)
        forward[-1] /= forward[-1].sum()
    for own in seen[:0:-1]:
        backward.append(source[1] @ (backward[-1] * own))
        backward[-1] /= backward[-1].sum()
    law = np.array(forward) * np.array(backward[::-1])
    with np.errstate(divide="ignore"):
        return np.log(law / law.sum(1, keepdims=True))


def exact_metrics(sequences, source, script):
    """What the exact law has in place of the network's metrics."""
    generator = np.random.default_rng(2)
    rates = script.draw_mask_rates(len(sequences), generator)
    bound = []
    for sequence, rate in zip(sequences, rates, strict=True):
        masked = generator.permutation(len(sequence))[: math.ceil(rate * len(sequence))]
        logp = exact_logp(sequence, masked, source)[masked, sequence[masked]]
        bound.append(-logp.mean() * len(sequence))
    return script.summarize(np.array([bound]), rates[None], np.array([*map(len, sequences)]))


def check_scores(work, sequences, source):
    """Lay the tool's scores of sequences, and of a substitution in each, beside the exact ones."""
    generator = np.random.default_rng(3)
    changes = []
    substitutions = []
    for i, sequence in enumerate(sequences):
        position = generator.integers(len(sequence))
        new = (sequence[position] + generator.integers(1, 20)) % 20
        logp = exact_logp(sequence, position, source)[position]
        changes.append(logp[new] - logp[sequence[position]])
        old = sides.RESIDUES[sequence[position]]
        mutant = f"{old}{position + 1}{sides.RESIDUES[new]}"
        substitutions.append({"name": f"s{i}", "mutant": mutant})

    pandas.DataFrame(substitutions).to_csv(work / "table.csv", index=False)
    exact = [nats([sequence], source) for sequence in sequences]
    variants = f"--variants={work}/table.csv"
    jobs = [("nats_per_residue", exact, "--orders=1"), ("score", changes, variants)]
    for name, exact, option in jobs:
        files = [work / "run-chain" / "best.pt", work / "unseen.fasta", f"--out={work}/{name}"]
        sides.run_tool("score_uniref50.py", *files, option)
        both = pandas.DataFrame({"exact": exact, "found": pandas.read_csv(work / name)[name]})
        error = (both.found - both.exact).std()
        rank = both.corr("spearman").exact.found
        print(
            f"{name} of {len(both)}: {both.mean().round(4).to_dict()}, rank correlation {rank:.4f}"
        )
        print(f"  standard deviation {both.exact.std():.4f}, of the difference {error:.4f}")


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


def train(args, work):
    """The summary of a run on chain.txt, into the folder `run-chain`."""
    options = f"""--datafile=chain.txt --val_ratio={VAL_RATIO} --hidden_size=64
        --n_blocks_prot=3 --n_heads=4 --max_protein_len=68 --dropout=0
        --global_batch_size=48 --batch_size={48 // args.nproc} --n_iters={args.steps} --epochs=1000
        --warmup=100 --ema=0.999 --eval_freq={args.steps} --eval_sequences=100000 {args.options}"""
    job = sides.script_job(
        "run_train_uniref50_ddp.py", "chain", work, options, processes=args.nproc
    )
    job.wait()
    return json.loads((work / "run-chain" / "summary.json").read_text())


def main():
    import run_train_uniref50_ddp as script

    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--sequences", type=int, default=60_000, help="sequences of the chain")
    add("--steps", type=int, default=4000, help="optimizer steps")
    add("--samples", type=int, default=500, help="sequences drawn by each sampler")
    add("--options", default="--lr=4e-3", help="more of the script: --optimizer=muon ...")
    add("--nproc", type=int, default=2, help="processes, one thread each")
    args = parser.parse_args()
    source = markov_source()
    sequences = markov_sequences(args.sequences, source)
    letters = np.array([*sides.RESIDUES])
    with sides.workplace() as work:
        lines = ["".join(letters[sequence]) for sequence in sequences]
        (work / "chain.txt").write_text("\n".join(lines))
        found = train(args, work)
        tokens = [sequence.astype(np.uint8) for sequence in sequences]
        unseen = [own for own in tokens if script.is_held_out(own.tobytes(), VAL_RATIO)]
        unigram = found["baselines"]["unigram"]
        print(f"true entropy {nats(unseen, source):.4f}, by frequencies {unigram:.4f}")
        exact = exact_metrics(unseen, source, script)
        for name, value in found["best"]["val"].items():
            print(f"held out: {name} {value:.4f}, of the exact law {exact[name]:.4f}")
        scored = unseen[: args.samples]
        records = [f">s{i}\n{''.join(letters[sequence])}\n" for i, sequence in enumerate(scored)]
        (work / "unseen.fasta").write_text("".join(records))
        check_scores(work, scored, source)

        drawn = {"real": unseen[: args.samples], "rigorous": [], "simple": []}
        for method, steps in {"rigorous": 0, "simple": 16}.items():
            path = work / f"{method}.fasta"
            options = f"""{work}/run-chain/best.pt --num_samples={args.samples} --steps={steps}
                --method={method} --out={path} --batch_size=64 --device=cpu"""
            sides.run_tool("sample_uniref50.py", *options.split())
            for _, text in script.read_records(path):
                tokens, _ = script.encode(text)
                drawn[method].append(np.frombuffer(tokens, np.uint8))
    for name, group in drawn.items():
        statistic, freedom = chi_square(group, source[1])
        print(f"{name}: chi-square {statistic:.0f}, degrees of freedom {freedom}")


if __name__ == "__main__":
    main()
