"""Every program of this folder that measures speed, one after the other: RESULTS.md.

    python benchmarks/run_all.py
    python benchmarks/run_all.py --only dpo rebm

Let nothing else run meanwhile; on two cores it takes about two hours and 12 GB. Where a part
fails, its section shows how, the others run all the same, and the exit status is 1.

RESULTS.json has all that was measured; RESULTS.md is made from it alone (--only without a name
makes it again). Both are written anew after each part; --only keeps the other parts. Each part says
of which commit and machine it is.

A ratio says how many times faster the script is than what it is compared with, both in the same
round: the median, the smallest and the largest. What was wanted of a ratio was set before the
script was written.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import sides


class Part(NamedTuple):
    script: str  # that it is about
    command: str  # program of this folder and its options
    wanted: dict = {}  # pattern of "work | compared with": smallest ratio


PARTS = {
    "train_ddp": Part(
        "train_ddp.py",
        "bench_train_ddp.py --teacher --rounds 3",
        {
            "^phase.*, default": 2.4,
            "^phase.*, at its best": 1.4,
            "^three epochs.*, default": 2.0,
        },
    ),
    "uniref50": Part(
        "run_train_uniref50_ddp.py",
        "bench_uniref50.py",
        {"original": 3.5},
    ),
    "dpo": Part(
        "run_dpo_ddp.py",
        "bench_dpo.py",
        # on AMD; on Intel 6.0, where denormal numbers cost the port more
        {"^100 residues.*port": 5.0},
    ),
    "quantumgrav": Part(
        "run_train_quantumgrav_ddp.py",
        "bench_quantumgrav.py",
        {"default.*in files": 1.9, "1x32.*in files": 2.7},
    ),
    "rebm": Part(
        "run_train_rebm_ddp.py",
        "bench_rebm.py",
        {
            "SmallNet.*compiled.*original": 1.4,
            "WideResNet.*compiled.*original": 1.25,
        },
    ),
    "profile": Part("all", "profile_steps.py"),
    "scaling": Part("all", "scaling.py --rounds 3", {"larger accumulation": 0.95}),
    "ranks": Part("all", "scaling.py --ranks", {"step": 0.67}),
}
PACKAGES = ["torch", "numpy", "sentence-transformers", "transformers", "accelerate"]
PACKAGES += ["torch_geometric", "scikit-learn"]
CODE = ["*.py", "configs", "tools", "benchmarks/*.py"]  # what figures depend on
RESULTS = sides.ROOT / "benchmarks" / "RESULTS.json"


# ---- A part --------------------------------------------------------------------------------------


def machine():
    name = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    cpu = name[1] if name else platform.processor()
    found = {"CPU": f"{cpu}, {len(os.sched_getaffinity(0))} cores", "OS": platform.platform()}
    found["Python"] = platform.python_version()
    for package in PACKAGES:
        found[package] = importlib.metadata.version(package)
    return found


def output_of(*command):
    done = subprocess.run(command, cwd=sides.ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit():
    """The last commit that changed the code, and whether there are changes beside it."""
    found = output_of("git", "log", "-1", "--format=%h", "--abbrev=12", "--", *CODE)
    if output_of("git", "status", "--porcelain", "--", *CODE):
        found += " with changes"
    return found


def without_paths(text):
    """The output of a program without the places of this machine."""
    return text.replace(f"{sides.ROOT}/", "").replace(sys.executable, "python").strip()


def run_part(name):
    """Runs a part; returns what RESULTS.json says of it."""
    command = f"python benchmarks/{PARTS[name].command}"
    date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())

    found = {"machine": machine(), "commit": commit(), "date": date, "command": command}
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder, "records.json")
        words = [sys.executable, *command.split()[1:], f"--json={records}"]
        options = {"cwd": sides.ROOT, "preexec_fn": sides.end_with_parent}
        done = subprocess.run(words, **options, capture_output=True, text=True)
        found["records"] = json.loads(records.read_text()) if records.exists() else []

    found["seconds"] = round(time.monotonic() - begin)
    found["status"] = done.returncode
    found["output"] = without_paths(done.stdout)
    found["errors"] = without_paths(done.stderr[-2500:]) if done.returncode else ""
    return found


# ---- RESULTS.md ----------------------------------------------------------------------------------


def ratio_rows(name, part):
    """Rows of the first table: one for each work and each side that it is compared with."""
    groups = {}
    for record in part["records"]:
        if "ratio" in record:
            groups.setdefault((record["work"], record["with"]), []).append(record["ratio"])
    rows = []
    for (work, other), ratios in groups.items():
        wanted = ""
        reached = ""
        for pattern, ratio in PARTS[name].wanted.items():
            if re.search(pattern, f"{work} | {other}"):
                wanted = ratio
                reached = "yes" if statistics.median(ratios) >= ratio else "no"
                break
        cells = [PARTS[name].script, other, work, sides.spread(ratios), wanted, reached]
        rows.append(f"| {' | '.join(map(str, cells))} | {part['commit']} |")
    return rows


def section(name, part):
    machine = ", ".join(f"{key} {value}" for key, value in part["machine"].items())
    text = f"Commit {part['commit']}, {part['date']}, {part['seconds']} s. {machine}"
    lines = [f"## {name}", "", f"`{part['command']}`", "", text, "", part["output"], ""]
    if part["status"] != 0:
        lines += [f"**Failed, exit status {part['status']}.** Its last messages:", ""]
        lines += ["```", part["errors"], "```", ""]
    return lines


def write(parts):
    """RESULTS.json and RESULTS.md."""
    RESULTS.write_text(json.dumps({"parts": parts}, indent=1) + "\n")
    parts = {name: parts[name] for name in PARTS if name in parts}
    names = ["script", "compared with", "work", "ratio: median (smallest to largest)"]
    names += ["wanted", "reached", "commit"]
    text = "Each part names its commit; its command is that commit's."
    lines = ["# Results of the benchmarks", "", f"`python benchmarks/run_all.py`. {text}", ""]
    lines += [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    for name, part in parts.items():
        lines += ratio_rows(name, part)
    lines.append("")
    for name, part in parts.items():
        lines += section(name, part)
    RESULTS.with_suffix(".md").write_text("\n".join(lines))


def main():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    text = f"these parts, of {', '.join(PARTS)}"
    parser.add_argument("--only", nargs="*", choices=PARTS, metavar="NAME", help=text)
    args = parser.parse_args()

    parts = {}
    names = PARTS
    if args.only is not None:
        parts = json.loads(RESULTS.read_text())["parts"]
        names = args.only
    failed = False
    write(parts)
    for name in names:
        print(f"{name}: begins at {time.strftime('%H:%M:%S')}", flush=True)
        parts[name] = run_part(name)
        write(parts)
        failed = failed or parts[name]["status"] != 0
        print(f"{name}: {parts[name]['seconds']} s, exit status {parts[name]['status']}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
