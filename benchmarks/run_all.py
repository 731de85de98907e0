"""Every program of this folder that measures speed, one after the other: RESULTS.md.

    python benchmarks/run_all.py
    python benchmarks/run_all.py --only dpo rebm

Let nothing else run meanwhile; on two cores it takes about 80 minutes. Where a part fails, its
section shows how, the others run all the same, and the exit status is 1.

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
        "bench_train_ddp.py --rows 600 --teacher 1",
        {
            "^phase.*, default": 2.4,
            "^phase.*, at its best": 1.6,
            "^three epochs.*, default": 2.0,
            "^phase.*the program replaced": 0.97,
        },
    ),
    "uniref50": Part(
        "run_train_uniref50_ddp.py",
        "bench_uniref50.py --rounds 5",
        {"original": 3.5, "the program replaced": 0.9},
    ),
    "dpo": Part(
        "run_dpo_ddp.py",
        "bench_dpo.py --seconds 15",
        {"^100 residues.*port": 6.0, "the program replaced": 0.97},
    ),
    "quantumgrav": Part(
        "run_train_quantumgrav_ddp.py",
        "bench_quantumgrav.py --sizes 32-128 --networks default 1x32",
        {"^32-128 elements, 1x32.*in files": 4.0, "the program replaced": 0.97},
    ),
    "rebm": Part(
        "run_train_rebm_ddp.py",
        "bench_rebm.py",
        {
            "SmallNet.*compiled.*original": 1.4,
            "WideResNet.*compiled.*original": 1.25,
            "ours.*the program replaced": 0.97,
        },
    ),
    "profile": Part("all", "profile_steps.py"),
    "scaling": Part("all", "scaling.py --seconds 21", {"larger accumulation": 0.95}),
}
PACKAGES = ["torch", "numpy", "sentence-transformers", "transformers", "accelerate"]
PACKAGES += ["torch_geometric", "scikit-learn"]
CODE = ["*.py", "configs", "tools", "benchmarks/*.py"]  # what figures depend on


# ---- A part --------------------------------------------------------------------------------------


def machine():
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    cpu = found[1] if found else platform.processor()
    found = {"CPU": f"{cpu}, {len(os.sched_getaffinity(0))} cores", "OS": platform.platform()}
    found["Python"] = platform.python_version()
    for name in PACKAGES:
        found[name] = importlib.metadata.version(name)
    return found


def commit():
    """The last commit that changed the code, and whether there are changes beside it."""
    git = ["git", "-C", sides.ROOT]
    command = [*git, "log", "-1", "--format=%h", "--abbrev=12", "--", *CODE]
    found = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    command = [*git, "status", "--porcelain", "--", *CODE]
    if subprocess.run(command, capture_output=True, text=True).stdout:
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
    found["records"] = []
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder, "records.json")
        words = [sys.executable, *command.split()[1:], f"--json={records}"]
        done = subprocess.run(words, cwd=sides.ROOT, capture_output=True, text=True)
        if records.exists():
            found["records"] = json.loads(records.read_text())
    found["seconds"] = round(time.monotonic() - begin)
    found["status"] = done.returncode
    found["output"] = without_paths(done.stdout)
    if done.returncode != 0:
        found["errors"] = without_paths(done.stderr[-2500:])
    return found


# ---- RESULTS.md ----------------------------------------------------------------------------------


def wanted_ratio(name, work, other):
    for pattern, wanted in PARTS[name].wanted.items():
        if re.search(pattern, f"{work} | {other}"):
            return wanted
    return None


def ratio_rows(name, part):
    """Rows of the first table: one for each work and each side that it is compared with."""
    groups = {}
    for record in part["records"]:
        if "ratio" in record:
            groups.setdefault((record["work"], record["with"]), []).append(record["ratio"])
    rows = []
    for (work, other), ratios in groups.items():
        wanted = wanted_ratio(name, work, other)
        reached = ""
        if wanted is not None:
            reached = "yes" if statistics.median(ratios) >= wanted else "no"
        cells = [PARTS[name].script, other, work, sides.spread(ratios), wanted or "", reached]
        rows.append(f"| {' | '.join(map(str, cells))} | {part['commit']} |")
    return rows


def section(name, part):
    machine = ", ".join(f"{key} {value}" for key, value in part["machine"].items())
    lines = [f"## {name}", "", f"`{part['command']}`", ""]
    text = f"Commit {part['commit']}, {part['date']}, {part['seconds']} s. {machine}"
    # headings of the output stand below that of the section
    lines += [text, "", re.sub("^#", "##", part["output"], flags=re.MULTILINE), ""]
    if part["status"] != 0:
        lines += [f"**Failed, exit status {part['status']}.** Its last messages:", ""]
        lines += ["```", part["errors"], "```", ""]
    return lines


def write(parts, path):
    """RESULTS.json and RESULTS.md."""
    path.with_suffix(".json").write_text(json.dumps({"parts": parts}, indent=1) + "\n")
    parts = {name: parts[name] for name in PARTS if name in parts}
    names = ["script", "compared with", "work", "ratio: median (smallest to largest)"]
    names += ["wanted", "reached", "commit"]
    lines = ["# Results of the benchmarks", "", "`python benchmarks/run_all.py`", ""]
    lines += [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    for name, part in parts.items():
        lines += ratio_rows(name, part)
    lines.append("")
    for name, part in parts.items():
        lines += section(name, part)
    path.write_text("\n".join(lines))


def main():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    text = f"these parts, of {', '.join(PARTS)}"
    parser.add_argument("--only", nargs="*", choices=PARTS, metavar="NAME", help=text)
    args = parser.parse_args()
    path = sides.ROOT / "benchmarks" / "RESULTS.md"
    parts = {}
    names = PARTS
    if args.only is not None:
        parts = json.loads(path.with_suffix(".json").read_text())["parts"]
        names = args.only
    failed = False
    write(parts, path)
    for name in names:
        print(f"{name}: begins at {time.strftime('%H:%M:%S')}", flush=True)
        parts[name] = run_part(name)
        write(parts, path)
        failed = failed or parts[name]["status"] != 0
        print(f"{name}: {parts[name]['seconds']} s, exit status {parts[name]['status']}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
