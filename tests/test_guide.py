"""The fenced commands and snippets of docs/DDP_TRAINING_GUIDE.md and README.md run, section by
section, in their order, on something tiny; and the changes of scripts that the guide shows.

A command runs as one process, whatever starts it: launchers have tests of their own, and what they
are told is parsed in test_readme.py, as are the commands for several machines or a queue."""

import gzip
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from helpers import ROOT, call_script, write_digits, write_proteins
from PIL import Image
from runs import Run
from test_readme import GUIDE, README, WRAPPERS, after_wrapper, find_program
from test_readme import folder as stand_ins  # noqa: F401

import train_ddp

GUIDE_TEXT = GUIDE.read_text()
SCRIPT = "run_train_quantumgrav_ddp.py"
# Options that come after those that are shown.
TINY = {
    "train_ddp.py": """--device=cpu --nproc_per_node=1 --max_steps=2 --max_samples_phase1=60
        --max_samples_phase2=60 --batch_size=8 --global_batch_size=8 --eval_fraction=0.3
        --projection_hidden=16 --student_max_length=16 --student_query_prompt=find:""",
    "run_train_uniref50_ddp.py": """--device=cpu --n_iters=4 --warmup=2 --eval_freq=2
        --hidden_size=16 --n_blocks_prot=1 --n_heads=2 --batch_size=8 --global_batch_size=8""",
    "run_dpo_ddp.py": "--device=cpu --num_epochs=1 --eval_orders=1 --batch_size=2",
    SCRIPT: "--device=cpu --num_epochs=1 --hidden_dim=8 --head_dim=8 --num_layers=1",
    "run_train_rebm_ddp.py": """--device=cpu --data=digits.npz --at_epochs=1 --total_epochs=1
        --attack_max_steps=1 --indist_attack_clf_max_steps=1""",
    "tools/score_uniref50.py": "--device=cpu",
    "tools/sample_uniref50.py": "--device=cpu --num_samples=2 --steps=4",
    "tools/score_dpo.py": "--device=cpu --orders=1",
    "tools/design_dpo.py": "--device=cpu --num_samples=3",
    "tools/make_causal_sets.py": "--num_samples=120 --min_size=8 --max_size=12 --workers=1",
    "tools/predict_causal_sets.py": "--device=cpu",
    "tools/evaluate_rebm.py": "--device=cpu --images=2 --attack_steps=2 --ood_images=4",
    "tools/generate_rebm.py": "--device=cpu --num_samples=10 --steps=2",
}
# Of the loop over seeds one.
REPLACED = {"for seed in 0 1 2; do\n": "", " || break\ndone": "", "$seed": "0"}
if importlib.util.find_spec("torchattacks") is None:  # it would pull in old packages
    REPLACED[" --autoattack"] = ""
WRITTEN = {
    "14": ["my_student", "my_hybrid", "outputs/phase2/best.pt", "outputs/more/best.pt"],
    "15": ["scores.csv", "held_out.csv", "samples.fasta", "filled.fasta", "outputs/family/best.pt"],
    "16": ["scores.csv", "variants_scored.csv", "swapped.csv", "outputs/dpo_round2/best_model.pt"],
    "17": ["test.csv", "predictions.csv", "outputs/more/best.pt"],
    "18": ["outputs/images/evaluation.json", "samples.png", "led.png", "outputs/stage2/best.pt"],
}
# After the lines that make my_hybrid.
HYBRID = """
hybrid = SentenceTransformer("my_hybrid")
texts = ["what is a lattice", "item 5"]
assert abs(hybrid.encode_query(texts) - model.encode_query(texts)).max() < 1e-6
assert abs(hybrid.encode_document(texts) - teacher.encode_document(texts)).max() < 1e-6
assert len(SentenceTransformer("my_student")[0].model.encoder.layer) == 3
"""


def fenced():
    """{section: its blocks [(language, text)]}"""
    found = {}
    for section in re.split("^## ", GUIDE_TEXT, flags=re.M)[1:]:
        blocks = re.findall(r"^```(bash|python)\n(.*?)^```$", section, re.M | re.S)
        title = section.partition("\n")[0]
        if blocks and title not in ("3. Several machines", "4. Batch queues: SLURM and PBS"):
            found[title] = blocks
    quickstart = re.findall(r"^```bash\n(.*?)^```$", README.read_text(), re.M | re.S)[0]
    without_installation = quickstart.rpartition("&& ")[2]
    found["2. Launchers on one machine"].insert(0, ("bash", without_installation))
    return found


def write_texts(folder):
    """Two models, texts, pairs, and a collection in the layout of BEIR."""
    texts = [f"item {i} is in hall {i % 7}" for i in range(60)]
    options = SimpleNamespace(student_max_length=None, seed=0)
    for name, layers in {"my_teacher": 1, "sentence-transformers/all-MiniLM-L6-v2": 6}.items():
        train_ddp.make_bert(folder / name, options, texts, layers, width=384)
    (folder / "texts.txt").write_text("\n".join(texts))
    rows = [{"query": f"where is item {i}", "positive": text} for i, text in enumerate(texts)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "scifact" / "qrels").mkdir(parents=True)
    (folder / "scifact/qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\n0\t0\t1\n1\t1\t2\n")
    for name in ("corpus", "queries"):
        rows = [{"_id": str(i), "text": f"a {name} of item {i}"} for i in range(4)]
        (folder / "scifact" / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))


@pytest.fixture
def user(stand_ins, tmp_path):  # noqa: F811
    """A working folder with a user's files, and few of the repository's data."""
    (tmp_path / "data").unlink()
    shutil.copytree(ROOT / "data" / "dpo", tmp_path / "data" / "dpo")
    rows = json.loads((ROOT / "data" / "dpo" / "pairs_charge.json").read_text())
    for name, structure in {"pairs_charge": "1EJG", "pairs_charge_val": "1LCD"}.items():
        lines = [json.dumps(row) for row in rows if row["pdb_file"].startswith(structure)][:2]
        few = "[\n" + ",\n".join(lines) + "\n]\n"
        (tmp_path / "data" / "dpo" / f"{name}.json").write_text(few)
    lines = [f"data/dpo/{row['pdb_file']},{row['preferred_seq']},{len(row)}" for row in rows[:5]]
    (tmp_path / "variants.csv").write_text("\n".join(["pdb_file,sequence,ddg", *lines]))

    name = "data/ribosomal_families.fasta.gz"
    with gzip.open(ROOT / name, "rt") as whole, gzip.open(tmp_path / name, "wt") as part:
        part.write(">".join(whole.read().split(">")[:80]))
    for name in ("proteins", "family"):
        write_proteins(tmp_path / f"{name}.fasta", 40)
    (tmp_path / "protein.fasta").write_text(">one\nMKVLA\n")
    (tmp_path / "DMS.csv").write_text("mutant,DMS_score\nM1A,0.1\nK2C:V3D,0.5\nL4A,0.9\n")
    (tmp_path / "motifs.fasta").write_text("MK??{2-4}LA\n")

    write_digits(tmp_path / "digits.npz", 160, 40)
    for name in ("new.png", "other.jpg"):
        Image.new("L", (8, 8), 99).save(tmp_path / name)
    return tmp_path


def run_command(line, done):
    """Not again, if it differs by its launcher alone from one that was run."""
    asked = subprocess.run(["bash", "-c", f"printf '%s\n' {line}"], capture_output=True, text=True)
    found = find_program(asked.stdout.splitlines())
    if found is None:
        assert "python" not in line, "a program that is neither a script nor a tool"
        subprocess.run(["bash", "-c", line], check=True)
        return
    _, program, arguments = found
    if program in WRAPPERS:
        program, arguments = after_wrapper(WRAPPERS[program], arguments)
    if program == "train_ddp.py" and not {"--config", "--teacher_model"} & {*arguments}:
        arguments += ["--config", "configs/train_ddp_quickstart.yaml"]  # in place of a hub's
    if (program, *arguments) not in done:
        call_script(program.removesuffix(".py"), *arguments, *TINY.get(program, "").split())
    done.add((program, *arguments))


@pytest.mark.parametrize(("title", "blocks"), fenced().items(), ids=fenced())
def test_section(title, blocks, user):
    if title == "14. train_ddp.py":
        write_texts(user)

    done = set()
    for language, text in blocks:
        if language == "bash":
            subprocess.run(["bash", "-n", "-c", text], check=True)
            for old, new in REPLACED.items():
                text = text.replace(old, new)
            for line in text.splitlines():
                run_command(line, done)
        elif "import optuna" not in text:  # it has a test of its own
            more = HYBRID if "my_hybrid" in text else ""
            (user / "snippet.py").write_text(text + more)
            call_script(user / "snippet")
    for name in WRITTEN.get(title[:2], []):
        assert (user / name).exists(), name


def test_changes(causal_sets, tmp_path, monkeypatch):
    """Those that are shown, a diff and a line, fit, and it trains."""
    monkeypatch.chdir(tmp_path)
    diff = re.search(r"^```diff\n(.*?)^```$", GUIDE_TEXT, re.M | re.S)[1]
    optimizer = re.search(r"`(return torch\.optim.*)`", GUIDE_TEXT)[1]
    script = tmp_path / SCRIPT
    shutil.copy(ROOT / SCRIPT, script)
    # a repository of its own, or git may look for one in the folders above
    subprocess.run(["git", "init", "--quiet"], check=True)
    subprocess.run(["git", "apply", "-"], input=diff, text=True, check=True)
    text, count = re.subn(r"return torch\.optim\..*", optimizer, script.read_text())
    assert count == 1
    script.write_text(text)
    argv = f"--data={causal_sets} --batch_size=12 --output_dir=run {TINY[SCRIPT]}"
    call_script(script.with_suffix(""), *argv.split())


def test_a_search(causal_sets, tmp_path, start):
    """Of two trials the first is pruned, which stops its run."""
    optuna = pytest.importorskip("optuna")
    (shown,) = re.findall(r"^```python\n([^`]*^import optuna\n.*?)^```$", GUIDE_TEXT, re.M | re.S)
    shutil.copy(ROOT / SCRIPT, tmp_path)
    changes = {
        "python run": f"{sys.executable} run",
        "--nproc_per_node=2 --num_epochs=15": f"--data={causal_sets} {TINY[SCRIPT]}",
        '"num_layers", 2, 4': '"num_epochs", *[(999, 999), (1, 1)][trial.number]',
        "MedianPruner(n_warmup_steps=5)": "ThresholdPruner(upper=-1, n_warmup_steps=3)",
        "n_trials=30": "n_trials=2",
    }
    for old, new in changes.items():
        assert shown.count(old) == 1
        shown = shown.replace(old, new)
    (tmp_path / "search.py").write_text(shown)
    job = start([sys.executable, "search.py"])
    assert job.wait() == 0, job.text[-3000:]
    study = optuna.load_study(study_name="search", storage=f"sqlite:///{tmp_path}/search.db")
    assert [trial.state.name for trial in study.trials] == ["PRUNED", "COMPLETE"]
    pruned, complete = [Run(tmp_path / "outputs" / f"trial{i}").summary for i in (0, 1)]
    assert pruned["status"].startswith("stopped by SIGTERM")
    assert study.best_value == complete["best"]["value"]
