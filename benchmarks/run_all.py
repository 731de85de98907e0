"""Every program of this folder that measures speed, one after the other: RESULTS.md.

    python benchmarks/run_all.py
    python benchmarks/run_all.py --only dpo rebm
    python benchmarks/run_all.py --quick          # the smallest settings, into RESULTS_quick.md

Let nothing else run meanwhile; on two cores it takes 60 to 85 minutes. Each part is a program with
a time limit. Where one fails, its section shows how, the others run all the same, and the exit
status is 1. The files are written anew after each part.

RESULTS.json has all that was measured; RESULTS.md is made from it alone (--only without a name
makes it again). --only replaces these sections and keeps the others: a section from another commit,
or another machine, than the head of the file says so.

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
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import sides
import torch


class Part(NamedTuple):
    script: str  # that it is about
    command: str  # program of this folder and its options
    quick: str  # the same with the smallest settings
    minutes: int  # limit
    wanted: dict = {}  # pattern of "work | compared with": smallest ratio


PARTS = {
    "train_ddp": Part(
        "train_ddp.py",
        "bench_train_ddp.py --rounds 3 --rows 1000 --teacher",
        "bench_train_ddp.py --rounds 1 --rows 300 --batch 8",
        45,
        {
            "^phase.*, default": 2.4,
            "^phase.*, at its best": 1.6,
            "^three epochs.*, default": 2.0,
            "^phase.*the program replaced": 0.97,
        },
    ),
    "uniref50": Part(
        "run_train_uniref50_ddp.py",
        "bench_uniref50.py --rounds 5 --steps 3",
        "bench_uniref50.py --rounds 1 --steps 1 --batch 2 --accum 1 --sequences 400",
        15,
        {"original": 3.5, "the program replaced": 0.9},
    ),
    "dpo": Part(
        "run_dpo_ddp.py",
        "bench_dpo.py --rounds 5 --seconds 2",
        "bench_dpo.py --rounds 1 --seconds 0.1 --lengths 20 --batch 1",
        15,
        {"^100 residues.*port": 6.0, "the program replaced": 0.97},
    ),
    "quantumgrav": Part(
        "run_train_quantumgrav_ddp.py",
        "bench_quantumgrav.py --rounds 5 --seconds 2",
        "bench_quantumgrav.py --rounds 1 --seconds 0.1 --sizes 32-64 --networks 1x32 --sets 200",
        20,
        {"^32-128 elements, 1x32.*in files": 4.0},
    ),
    "rebm": Part(
        "run_train_rebm_ddp.py",
        "bench_rebm.py --rounds 5",
        "bench_rebm.py --rounds 1 --seconds 0.1 --settings SmallNet,8,16,2"
        " --sides replaced original",
        15,
        {
            "SmallNet.*compiled.*original": 1.4,
            "WideResNet.*compiled.*original": 1.25,
            "ours.*the program replaced": 0.97,
        },
    ),
    "profile": Part(
        "all",
        "profile_steps.py",
        "profile_steps.py --steps 2 --scripts run_train_quantumgrav_ddp",
        15,
    ),
    "scaling": Part(
        "all",
        "scaling.py",
        "scaling.py --scripts run_train_quantumgrav_ddp --rounds 1 --seconds 0.5",
        57,
        {"larger accumulation": 0.95},
    ),
}
PACKAGES = ["torch", "numpy", "sentence-transformers", "transformers", "accelerate"]
PACKAGES += ["torch_geometric", "scikit-learn"]
CODE = ["*.py", "configs", "tools", "benchmarks/*.py"]  # what figures depend on


# ---- Where it runs -------------------------------------------------------------------------------


def first_match(pattern, path):
    """What the pattern's brackets hold in a file; "" where there is none."""
    try:
        found = re.search(pattern, Path(path).read_text())
    except OSError:
        return ""
    return found[1] if found else ""


def machine():
    cpu = first_match(r"model name\s*: (.*)", "/proc/cpuinfo") or platform.processor()
    system = first_match(r'PRETTY_NAME="(.*)"', "/etc/os-release") or platform.system()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    capability = torch.backends.cpu.get_cpu_capability()
    found = {
        "CPU": f"{cpu}, {len(os.sched_getaffinity(0))} cores, {capability}",
        "memory": f"{memory:.0f} GiB",
        "OS": f"{system}, {platform.system()} {platform.release().partition('-')[0]}",
        "Python": platform.python_version(),
    }
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
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


def identity():
    """What makes figures comparable."""
    date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return {"machine": machine(), "commit": commit(), "date": date}


# ---- A part --------------------------------------------------------------------------------------


def stop(job):
    """End a program and what it has started: torchrun needs up to 30 s to end its ranks."""
    if job.poll() is None:
        job.terminate()
        try:
            job.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()


def without_paths(text):
    """The output of a program without the places of this machine."""
    text = text.replace(f"{sides.ROOT}/", "").replace(sys.executable, "python")
    return text.strip()


def run_part(name, quick):
    """Runs a part; returns what RESULTS.json says of it."""
    part = PARTS[name]
    words = shlex.split(part.quick if quick else part.command)
    shown = f"python benchmarks/{' '.join(words)}"
    result = {**identity(), "command": shown, "records": []}
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as work:
        paths = {kind: Path(work, kind) for kind in ("output", "errors", "records")}
        program = sides.ROOT / "benchmarks" / words[0]
        command = [sys.executable, program, *words[1:], f"--json={paths['records']}"]
        with open(paths["output"], "w") as output, open(paths["errors"], "w") as errors:
            job = subprocess.Popen(
                command,
                cwd=sides.ROOT,
                env=os.environ | {"TMPDIR": work},
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
            try:
                result["status"] = job.wait(60 * part.minutes)
            except subprocess.TimeoutExpired:
                result["status"] = f"not done after {part.minutes} minutes"
            finally:
                stop(job)
        result["seconds"] = round(time.monotonic() - begin)
        result["output"] = without_paths(paths["output"].read_text())
        if result["status"] != 0:
            result["errors"] = without_paths(paths["errors"].read_text()[-2500:])
        if paths["records"].exists():
            result["records"] = json.loads(paths["records"].read_text())
    return result


# ---- RESULTS.md ----------------------------------------------------------------------------------


def differences(head, part):
    """In which way a section is not of the head of the file; "" where it is."""
    found = []
    if part["commit"] != head["commit"]:
        found.append(f"commit {part['commit']}")
    for name, value in part["machine"].items():
        if value != head["machine"].get(name):
            found.append(f"{name} {value}")
    if not found:
        return ""
    return f"Not as the head of this file says: {', '.join(found)}, {part['date']}."


def wanted_ratio(name, work, other):
    for pattern, wanted in PARTS[name].wanted.items():
        if re.search(pattern, f"{work} | {other}"):
            return wanted
    return None


def ratio_rows(name, part, head):
    """Rows of the first table: one for each work and each side that it is compared with."""
    script = PARTS[name].script
    rows = []
    if part["status"] != 0:
        rows.append(f"| {script} | **part {name} failed: {part['status']}** | | | | |")
    groups = {}
    for record in part["records"]:
        if "ratio" in record:
            groups.setdefault((record["work"], record["with"]), []).append(record["ratio"])
    mark = " *" if differences(head, part) else ""
    for (work, other), ratios in groups.items():
        wanted = wanted_ratio(name, work, other)
        median = statistics.median(ratios)
        reached = ""
        if wanted is not None:
            reached = "yes" if median >= wanted else "no"
        cells = [script, other, work, f"{sides.spread(ratios, 2)}{mark}", wanted or "", reached]
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return rows


def section(name, part, head):
    lines = [f"## {name}", "", f"`{part['command']}`", ""]
    note = differences(head, part)
    if note:
        lines += [f"**{note}**", ""]
    # headings of the output stand below that of the section
    lines += [re.sub("^#", "##", part["output"], flags=re.MULTILINE), ""]
    if part["status"] != 0:
        lines += [f"**Failed: {part['status']}.** Its last messages:", ""]
        lines += ["```", part["errors"], "```", ""]
    return lines


def render(results):
    """The text of RESULTS.md."""
    head = results["head"]
    parts = {name: results["parts"][name] for name in PARTS if name in results["parts"]}
    lines = ["# Results of the benchmarks", "", f"`{head['command']}`", ""]
    if "--quick" in head["command"]:
        text = "Made to see that everything works: these figures say nothing about speed."
        lines += [f"**{text}**", ""]
    lines += ["| | |", "|---|---|"]
    for name, value in {**head["machine"], "commit": head["commit"], "date": head["date"]}.items():
        lines.append(f"| {name} | {value} |")
    names = ["script", "compared with", "work", "ratio: median (smallest to largest)"]
    names += ["wanted", "reached"]
    lines += ["", f"| {' | '.join(names)} |", "|---|---|---|---|---|---|"]
    for name, part in parts.items():
        lines += ratio_rows(name, part, head)
    lines += ["", "\\* of another commit or machine than the head of this file: see the section"]
    lines += ["", "| part | seconds | exit status |", "|---|---|---|"]
    for name, part in parts.items():
        lines.append(f"| [{name}](#{name}) | {part['seconds']} | {part['status']} |")
    lines.append("")
    for name, part in parts.items():
        lines += section(name, part, head)
    return "\n".join(lines)


def write(results, path):
    """Both files."""
    path.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    path.write_text(render(results))


def main():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    add = parser.add_argument
    text = f"these parts, of {', '.join(PARTS)}"
    add("--only", nargs="*", choices=PARTS, metavar="NAME", help=text)
    add("--quick", action="store_true", help="the smallest settings")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    path = sides.ROOT / "benchmarks" / ("RESULTS_quick.md" if args.quick else "RESULTS.md")
    old = path.with_suffix(".json")
    command = "python benchmarks/run_all.py" + " --quick" * args.quick
    results = {"head": {"command": command, **identity()}, "parts": {}}
    if args.only is not None and old.exists():
        results = json.loads(old.read_text())
    names = list(PARTS) if args.only is None else args.only
    failed = []
    for name in names:
        print(f"{name}: begins at {time.strftime('%H:%M:%S')}", flush=True)
        part = run_part(name, args.quick)
        results["parts"][name] = part
        write(results, path)
        if part["status"] != 0:
            failed.append(name)
        print(f"{name}: {part['seconds']} s, exit status {part['status']}", flush=True)
    write(results, path)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
