"""Every side-by-side of this folder, the profile of the steps and the scaling, one after the other: RESULTS.md.

    python benchmarks/run_all.py [--only NAME ...] [--out benchmarks/RESULTS.md] [--quick]

Let nothing else run meanwhile; on two cores it takes 60 to 85 minutes. Each part is a program of its own with a time
limit. Where one fails its section shows how, the others run all the same, and the exit status is 1. The file is written
anew after each part, so that an interruption loses no more than the part that is running. --only replaces these
sections of the file and keeps the others: a section that comes from other scripts or configs, settings or another
machine than the head of the file says so. --quick: one round of the smallest settings, to see that everything works;
its figures say nothing, and go to RESULTS_quick.md.

Ratios are how many times faster the script is than what it is compared with, of both sides in the same round, of which
the median, the smallest and the largest are shown. What was wanted of a ratio was set before the script was written.
"""

from __future__ import annotations

import argparse
import hashlib
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
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parent.parent


class Part(NamedTuple):
    script: str  # of the repository, which it is about
    command: str  # program of this folder and its options
    quick: str  # the same with the smallest settings
    minutes: float  # limit
    wanted: tuple = ()  # (pattern of work and other side, ratio)
    records: bool = True  # whether the program takes --json


PARTS = {
    "train_ddp": Part(
        "train_ddp.py", "bench_train_ddp.py --rounds 3 --rows 1000 --teacher",
        "bench_train_ddp.py --rounds 1 --rows 300 --batch 8", 45,
        (("^phase.*, default", 2.4), ("^phase.*, at its best", 1.6), ("^three epochs.*, default", 2.0),
         ("^phase.*the program replaced", 0.97))),
    "uniref50": Part(
        "run_train_uniref50_ddp.py", "bench_uniref50.py --rounds 5 --steps 3",
        "bench_uniref50.py --rounds 1 --steps 1 --batch 2 --accum 1 --sequences 400", 15,
        (("original", 3.5), ("the program replaced", 0.9))),
    "dpo": Part(
        "run_dpo_ddp.py", "bench_dpo.py --rounds 5 --seconds 2",
        "bench_dpo.py --rounds 1 --seconds 0.1 --lengths 20 --batch 1", 15,
        (("^100 residues.*port", 6.0), ("the program replaced", 0.97))),
    "quantumgrav": Part(
        "run_train_quantumgrav_ddp.py", "bench_quantumgrav.py --rounds 5 --seconds 2",
        "bench_quantumgrav.py --rounds 1 --seconds 0.1 --sizes 32-64 --networks 1x32 --sets 200", 20,
        (("^32-128 elements, 1x32.*in files", 4.0),)),
    "rebm": Part(
        "run_train_rebm_ddp.py", "bench_rebm.py --rounds 5",
        "bench_rebm.py --rounds 1 --seconds 0.1 --settings SmallNet,8,16,2 --sides replaced original", 15,
        (("SmallNet.*compiled.*original", 1.4), ("WideResNet.*compiled.*original", 1.25),
         ("ours.*the program replaced", 0.97))),
    "profile": Part(
        "all", "profile_steps.py", "profile_steps.py --steps 2 --scripts run_train_quantumgrav_ddp", 15),
    "scaling": Part(
        "all", "scaling.py --limit 55", "scaling.py --scripts train_ddp --procs 1 2 --rounds 1 --seconds 1", 57,
        records=False),
}  # fmt: skip
PACKAGES = "torch numpy sentence-transformers transformers accelerate torch_geometric scikit-learn torchattacks".split()


# ---- Where it runs ----
def git(*command: str) -> str:
    found = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip() if not found.returncode else "unknown"


def code_hash(*patterns: str) -> str:
    """Of the files, whatever git says of them."""
    found = hashlib.sha256()
    for path in sorted(p for pattern in patterns for p in ROOT.glob(pattern)):
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


def machine() -> dict[str, str]:
    cpu, system = platform.processor(), platform.system()
    with suppress(OSError):
        cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[1]
    with suppress(OSError):
        system = re.search(r'PRETTY_NAME="(.*)"', Path("/etc/os-release").read_text())[1]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    found = {
        "CPU": f"{cpu}, {len(os.sched_getaffinity(0))} cores, {torch.backends.cpu.get_cpu_capability()}",
        "memory": f"{memory:.0f} GiB", "OS": f"{system}, {platform.system()} {platform.release().partition('-')[0]}",
        "Python": platform.python_version(),
    }  # fmt: skip
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def matmul_gflops() -> float:
    """GFLOP/s of a large fp32 matrix product on one thread, the median of 40."""
    torch.set_num_threads(1)
    a, seconds = torch.randn(1024, 1024), []
    for _ in range(45):
        begin = time.perf_counter()
        a @ a
        seconds.append(time.perf_counter() - begin)
    return 2 * 1024**3 / statistics.median(seconds[5:]) / 1e9


def busy() -> float:
    """Share of the CPUs' time in the next second that other programs take (nan where the system does not tell)."""
    def read() -> list[int]:
        return [int(n) for n in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]

    with suppress(OSError):
        before = read()
        time.sleep(1)
        spent = [b - a for a, b in zip(before, read(), strict=True)]
        return 1 - (spent[3] + spent[4]) / max(1, sum(spent))
    return float("nan")


def identity(args: argparse.Namespace, out: Path) -> dict:
    changed = [line for line in git("status", "--porcelain").splitlines() if not line.endswith(out.name)]
    return {
        "machine": machine(), "commit": git("rev-parse", "HEAD")[:12], "code": code_hash("*.py", "configs/*.yaml"),
        "clean": not changed,
        "quick": args.quick, "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), "gflops": [],
    }  # fmt: skip


# ---- A part ----
def stop(job: subprocess.Popen) -> None:
    """End a program and what it has started: torchrun needs SIGTERM, and up to 30 s, to end its ranks."""
    with suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGTERM)
        for _ in range(400):
            job.poll()
            os.killpg(job.pid, 0)
            time.sleep(0.1)
        os.killpg(job.pid, signal.SIGKILL)
    job.wait()


def run_part(name: str, args: argparse.Namespace, facts: dict) -> str:
    """Runs a part, fills in its `facts`, returns the text of its section. An interruption (SystemExit) passes through
    once the part's programs are gone."""
    part, begin = PARTS[name], time.monotonic()
    words = shlex.split(part.quick if args.quick else part.command)
    env = {"OMP_NUM_THREADS": "1"} if name == "rebm" else {}
    shown = " ".join([*(f"{n}={v}" for n, v in env.items()), "python", f"benchmarks/{words[0]}", *words[1:]])
    facts |= {"command": shown, "program": code_hash(f"benchmarks/{words[0]}"), "busy": busy(),
              "gflops": [matmul_gflops()], "status": "interrupted", "records": []}  # fmt: skip
    with tempfile.TemporaryDirectory() as work:
        texts, records = [Path(work, n) for n in ("stdout", "stderr")], Path(work, "records.json")
        command = [sys.executable, ROOT / "benchmarks" / words[0], *words[1:]]
        command += [f"--json={records}"] if part.records else []
        with open(texts[0], "w") as out, open(texts[1], "w") as errors:
            job = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"TMPDIR": work} | env, stdout=out,
                                   stderr=errors, start_new_session=True)  # fmt: skip
            try:
                facts["status"] = job.wait(60 * (args.minutes or part.minutes))
            except subprocess.TimeoutExpired:
                facts["status"] = f"not done after {args.minutes or part.minutes:g} minutes"
            finally:
                stop(job)
        found, failure = (path.read_text().strip() for path in texts)
        if facts["status"] == 0 and part.records:
            facts["records"] = json.loads(records.read_text())
    facts |= {"seconds": time.monotonic() - begin, "gflops": [*facts["gflops"], matmul_gflops()]}
    text = re.sub("^#", "##", f"{found}\n" if found else "", flags=re.M)  # headings below that of the section
    if facts["status"] != 0:
        status = facts["status"] if isinstance(facts["status"], str) else f"exit status {facts['status']}"
        text += f"\n**Failed: {status}.** Its last messages:\n\n```\n{failure[-2500:]}\n```\n"
    return text.replace(str(ROOT), ".").replace(sys.executable, "python")


# ---- The file ----
def spread(values: list[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.2f} (one round)"
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def floor(script: str, work: str, groups: dict, profile: list[dict]) -> str:
    """What bounds a ratio that is below what was wanted."""
    bare = next((ratios for (other, _), ratios in groups.items() if other == work.rpartition(":")[0] + ": floor"), None)
    if bare:
        return f"no; the bare passes, not compiled: {spread(bare)}"
    lines = []
    for run in profile:
        if run["run"].startswith(script.removesuffix(".py")):
            top = sorted(run["shares"].items(), key=lambda row: -row[1])[:3]
            lines.append(f"{run['run']}: " + ", ".join(f"{kind} {share:.0f} %" for kind, share in top))
    return "no; of the time of a step, " + "; ".join(lines) if lines else "no; see the part profile"


def summary(sections: dict) -> list[str]:
    """Rows of the first table."""
    rows, profile = [], sections["profile"][0]["records"] if "profile" in sections else []
    for name, part in PARTS.items():
        facts = sections[name][0] if name in sections else {"status": "not run yet"}
        if facts["status"] == "not run yet":
            rows.append(f"| {part.script} | part {name} is not run yet | | | | |")
        elif facts["status"] != 0:
            rows.append(f"| {part.script} | **part {name} failed: {facts['status']}** | | | | |")
        if facts["status"] != 0:
            continue
        groups: dict[tuple, list[float]] = {}
        for record in facts["records"] if name != "profile" else ():
            groups.setdefault((record["work"], record["with"]), []).append(record["ratio"])
        for (work, other), ratios in groups.items():
            if work.endswith(": floor"):
                continue
            wanted = next((w for pattern, w in part.wanted if re.search(pattern, f"{work} | {other}")), None)
            reached = "yes" if wanted is None or statistics.median(ratios) >= wanted else ""
            reached = reached or floor(part.script, work, groups, profile)
            mark = " (not of this head: see the section)" if facts["differs"] else ""
            rows.append(f"| {part.script} | {other} | {work} | {spread(ratios)}{mark} "
                        f"| {wanted or ''} | {reached if wanted else ''} |")  # fmt: skip
    return rows


def render(head: dict, sections: dict) -> str:
    """The file. sections: {name: (facts, text)}."""
    lines = ["# Results of the benchmarks\n", f"`python benchmarks/run_all.py{' --quick' * head['quick']}`\n"]
    if head["quick"]:
        lines += ["**Made with --quick, to see that everything works: these figures say nothing about speed.**\n"]
    lines += ["| | |\n|---|---|", *(f"| {name} | {value} |" for name, value in head["machine"].items())]
    speed = " at the start, {:.0f} at the end".format(*head["gflops"][-1:]) if head["gflops"][1:] else ""
    lines += [f"| speed | {head['gflops'][0]:.0f} GFLOP/s in fp32 matrix products on one thread{speed} |"]
    lines += [f"| commit | {head['commit']}, {'' if head['clean'] else 'with changes that are in no commit, '}"
              f"code {head['code']} |", f"| date | {head['date']} |\n"]  # fmt: skip
    lines += ["| script | compared with | work | ratio: median (min to max) | wanted | reached |\n|" + "---|" * 6]
    lines += [*summary(sections), ""]
    lines += ["| part | command | its code | seconds | exit status | GFLOP/s before, after | busy before |\n|"
              + "---|" * 7]
    for name, (facts, _) in sections.items():
        speeds = ", ".join(f"{g:.0f}" for g in facts["gflops"])
        lines += [f"| {name} | `{facts['command']}` | {facts['program']} | {facts['seconds']:.0f} "
                  f"| {facts['status']} | {speeds} "
                  f"| {facts['busy']:.0%} |"]  # fmt: skip
    lines += ["", "busy before: what other programs took of the CPUs in the second before the part.\n"]
    speeds = [speed for facts, _ in sections.values() for speed in facts["gflops"]]
    if min(speeds) < 0.9 * max(speeds) or any(facts["busy"] > 0.1 for facts, _ in sections.values()):
        lines += ["**The machine was not idle, or not always as fast: these ratios are less certain than their "
                  "spread.**\n"]  # fmt: skip
    for name, (facts, text) in sections.items():
        lines += [f"## {name}\n\n`{facts['command']}`\n"]
        if facts["differs"]:
            lines += [f"**{facts['differs']}**\n"]
        packed = json.dumps(facts).replace("<", "\\u003c").replace(">", "\\u003e")
        lines += [text.rstrip("\n"), f"\n<!-- facts {packed} -->\n"]
    packed = json.dumps(head).replace("<", "\\u003c").replace(">", "\\u003e")
    return "\n".join(lines) + f"<!-- head {packed} -->\n"


def read_file(path: Path) -> tuple[dict, dict]:
    """(head, sections) as render got them. ValueError where it is no such file."""
    text = path.read_text()
    head = re.search(r"^<!-- head (\{.*\}) -->$", text, re.M)
    if not head:
        raise ValueError(f"{path} is not a file of this program, or is cut off: run it without --only")
    sections = {}
    for name in PARTS:
        pattern = rf"^## {name}\n\n`[^\n]*`\n\n(.*?)\n+<!-- facts ([^\n]*) -->$"
        found = re.search(pattern, text, re.M | re.S)
        if found:
            facts = json.loads(found[2])
            sections[name] = (facts, found[1].removeprefix(f"**{facts['differs']}**\n\n"))
    return json.loads(head[1]), sections


def differs(head: dict, now: dict) -> str:
    """How a section made now differs from the head of the file, in a sentence; or ''."""
    found = []
    if head["code"] != now["code"]:
        found.append(f"from other code (commit {now['commit']}, code {now['code']})")
    found += [f"with {name} {now['machine'].get(name)}" for name in {**head["machine"], **now["machine"]}
              if head["machine"].get(name) != now["machine"].get(name)]  # fmt: skip
    found += [f"{'with' if now['quick'] else 'without'} --quick"] if head["quick"] != now["quick"] else []
    return f"Not of the head of this file: made {', '.join(found)}, on {now['date']}." if found else ""


def write(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    temporary.replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="NAME", help=f"parts: {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, help="file to write (default: RESULTS.md in this folder)")
    parser.add_argument("--quick", action="store_true", help="one round, smallest settings")
    parser.add_argument("--minutes", type=float, default=0.0, help="limit of each part (default: its own)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    out = args.out or ROOT / "benchmarks" / f"RESULTS{'_quick' * args.quick}.md"
    now = identity(args, out)
    head, sections = now, {}
    if args.only and out.exists():
        try:
            head, sections = read_file(out)
        except ValueError as error:
            parser.error(str(error))
    head["gflops"] = head["gflops"] or [matmul_gflops()]
    begin, failed = time.monotonic(), []
    for name in args.only or PARTS:
        facts = {"differs": differs(head, now), "seconds": 0.0}
        print(f"{name}: begins after {time.monotonic() - begin:.0f} s", flush=True)
        text = run_part(name, args, facts)
        sections[name] = (facts, text)
        sections = {n: sections[n] for n in PARTS if n in sections}
        if not args.only:
            head["gflops"] = [head["gflops"][0], facts["gflops"][-1]]
        write(out, render(head, sections))
        failed += [name] * (facts["status"] != 0)
        print(f"{name}: {facts['seconds']:.0f} s, exit status {facts['status']}", flush=True)
    print(f"{time.monotonic() - begin:.0f} s in all: {out}" + f"; failed: {', '.join(failed)}" * bool(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
