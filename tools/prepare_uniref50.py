"""Prepare protein sequences for run_train_uniref50_ddp.py.

    python tools/prepare_uniref50.py uniref50.fasta.gz input_data/uniref50
    python tools/prepare_uniref50.py proteins.txt data/mine --skip_bad_data --remove_duplicates
    python tools/prepare_uniref50.py --check input_data/uniref50

Reads FASTA, text with a sequence per line, either as .gz, and the original's processed_uniref50.pt
(a list, saved by torch.save, of strings or of dicts with protein_seq, sequence, text or
prot_tokens). UniRef50 is published at
https://ftp.uniprot.org/pub/databases/uniprot/uniref/uniref50/uniref50.fasta.gz

Residues are the 20 letters and X, B, U, Z, O, J, in upper or lower case; a `*` at the end is
dropped. A record with anything else is listed with its line, and nothing is written, unless
--skip_bad_data leaves such records out. The file is read once, piece by piece: the memory that is
needed does not grow with it.

A sequence is held out if its hash, as a share of all hashes, is below --val_ratio. So the split
does not depend on the order or on what else the file holds, and equal sequences are on one side.

Writes a folder:
    train.tokens valid.tokens      uint8: 0 begin, 5 to 30 residues, 2 end, sequence after sequence
    train.offsets valid.offsets    int64: where each sequence begins, and where the last one ends
    skipped_records.txt            what --skip_bad_data left out
    meta.json                      counts, lengths, sizes, checksums; written last
"""

import argparse
import collections
import gzip
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import zlib
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
from tqdm import tqdm

# This file imports no torch, which would take seconds and 200 MB in every worker.
# Tokens as in run_train_uniref50_ddp.py.
RESIDUES = "ACDEFGHIKLMNPQRSTVWYXBUZOJ"
BEGIN = 0
FIRST = 5
END = 2
WRONG = 255

PARTS = ["train", "valid"]
FILES = [f"{part}.{kind}" for part in PARTS for kind in ("tokens", "offsets")]
CHUNK = 4 << 20  # bytes that a worker gets at a time; a longer record comes whole
INLINE = 12  # chunks before workers are started, which takes a second
SHOWN = 20  # problems in an error message
EXPECTED = "expected letters, and * only at the end of a sequence"
KEYS = ["protein_seq", "sequence", "text", "prot_tokens"]  # of the dicts in a .pt file


def letter_table():
    """For bytes.translate: residues in upper case, `*` as it is, all else `?`."""
    table = bytearray(b"?" * 256)
    table[ord("*")] = ord("*")
    for letter in RESIDUES:
        table[ord(letter)] = ord(letter)
        table[ord(letter.lower())] = ord(letter)
    return bytes(table)


def token_table():
    """For bytes.translate: tokens of residues, of `<` (begin) and `>` (end); all else WRONG."""
    table = bytearray([WRONG] * 256)
    table[ord("<")] = BEGIN
    table[ord(">")] = END
    for number, letter in enumerate(RESIDUES):
        table[ord(letter)] = FIRST + number
    return bytes(table)


LETTERS = letter_table()
TOKENS = token_table()


class Problem(Exception):
    """What was found, what was expected, what to do: one line, exit status 2."""


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise Problem(message)


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the docstring as it is, and every default."""


def parse_args(words=None):
    parser = Parser(description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("source", nargs="?", type=Path, help="file to read")
    add("out", nargs="?", type=Path, help="folder to write")
    add("--val_ratio", type=float, default=0.05, help="share of the sequences that is held out")
    add("--skip_bad_data", action="store_true", help="leave out bad records, and list them")
    text = "keep one of equal sequences; takes about 100 bytes of memory for each"
    add("--remove_duplicates", action="store_true", help=text)
    add("--workers", type=int, default=os.cpu_count(), help="processes that encode; 0: none")
    text = "do nothing else than compare this folder with its checksums"
    add("--check", type=Path, metavar="FOLDER", help=text)
    args = parser.parse_args(words)
    if args.check is None and args.out is None:
        parser.error("expected two names: the file to read and the folder to write")
    if not 0 < args.val_ratio < 1:
        parser.error(f"--val_ratio {args.val_ratio}: must be between 0 and 1")
    if args.workers < 0:
        parser.error(f"--workers {args.workers}: must be from 0 on")
    return args


# ---- Reading ---------------------------------------------------------------------------------


class Source:
    """A file of sequences, whose form is known by its content."""

    def __init__(self, path):
        self.path = path
        self.form = "text"  # a sequence per line; fasta; or list: a line for each entry
        self.damage = ""  # of a gz file that ends early
        self.size = 0
        self.digest = hashlib.sha256()
        self.find_form()

    def find_form(self):
        if not self.path.is_file():
            raise Problem(f"{self.path}: no such file")
        with open(self.path, "rb") as file:
            start = file.read(4)
        if start.startswith((b"PK\3\4", b"\x80")):  # zip and pickle: torch.save writes these
            self.form = "list"
            return
        head = next(self.blocks(), b"").lstrip()
        right = "expected FASTA or text, plain or .gz, or a .pt file"
        if not head:
            raise Problem(f"{self.path} is empty; {right}")
        if b"\0" in head:
            raise Problem(f"{self.path} begins with {head[:12]!r}, which is no text; {right}")
        lines = head.split(b"\n", 3)
        if head.startswith(b"@") and len(lines) > 2 and lines[2].startswith(b"+"):
            hint = "make FASTA of it: its lines of qualities would pass for proteins"
            raise Problem(f"{self.path} is FASTQ; {right}: {hint}")
        if b"\n>" in b"\n" + head:
            self.form = "fasta"

    def read(self, size=-1):
        """For GzipFile, too, whose file this object is."""
        data = self.file.read(size)
        self.size += len(data)
        self.digest.update(data)
        return data

    def raw_blocks(self):
        """The content, unzipped."""
        self.size = 0
        self.digest = hashlib.sha256()
        with open(self.path, "rb") as self.file:
            read = self.read
            if self.file.peek(2).startswith(b"\x1f\x8b"):
                read = gzip.GzipFile(fileobj=self).read1
            try:
                while block := read(min(CHUNK, 1 << 17)):
                    yield block
            except EOFError:
                self.damage = "the .gz file ends early: fetch it again"
            except (zlib.error, gzip.BadGzipFile) as error:  # what came before may be wrong, too
                raise Problem(f"{self.path}: damaged .gz file: fetch it again ({error})") from None

    def blocks(self):
        """The same with \\n as the only end of lines, and without a byte-order mark."""
        held = b""
        is_first = True
        for block in self.raw_blocks():
            block = held + block
            held = b""
            if is_first:
                block = block.removeprefix(b"\xef\xbb\xbf")
                is_first = False
            if block.endswith(b"\r"):  # its \n may follow
                block = block[:-1]
                held = b"\r"
            if b"\r" in block:
                block = block.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
            yield block
        yield held.replace(b"\r", b"\n")

    def chunks(self):
        """The content in parts that end where a record ends."""
        mark = b"\n>" if self.form == "fasta" else b"\n"
        parts = self.entries() if self.form == "list" else self.blocks()
        held = bytearray()
        for part in parts:
            held += part
            if len(held) >= CHUNK:
                end = held.rfind(mark) + 1
                if end > 0:
                    yield bytes(memoryview(held)[:end])
                    del held[:end]
        if self.damage:  # the last record is not whole
            del held[held.rfind(mark) + 1 :]
        if held:
            yield bytes(held)

    def entries(self):
        """A line for each entry of a list saved by torch.save."""
        import torch

        for _ in self.raw_blocks():  # for the size and the digest
            pass
        try:
            data = torch.load(self.path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises five kinds
            reason = str(error).splitlines()[0][:120]
            raise Problem(f"{self.path}: expected a whole file of torch.save ({reason})") from None
        if isinstance(data, dict):
            data = data.get("sequences", data.get("data", data))
        if not isinstance(data, list):
            right = "expected a list, or a dict with a list as sequences or data"
            raise Problem(f"{self.path} holds a {type(data).__name__}; {right}")
        # tokens of the original: 0 begin, 1 padding, 2 end are no residues, 3 and 4 are unknown
        letters = np.frombuffer(b"   ??" + RESIDUES.encode() + b"?", np.uint8)
        for entry in data:
            if isinstance(entry, dict):
                known = [
                    entry[key] for key in KEYS if isinstance(entry.get(key), (str, torch.Tensor))
                ]
                entry = known[0] if known else ""
            if isinstance(entry, torch.Tensor):
                numbers = entry.long().flatten().clamp(-1, FIRST + len(RESIDUES))
                entry = letters[numbers.numpy()].tobytes().decode().strip()
            if not isinstance(entry, str):
                entry = ""
            yield entry.replace("\n", "").replace("\r", "").encode("utf-8", "replace") + b"\n"


# ---- Encoding: in the workers ----------------------------------------------------------------


def encode(text, form, val_ratio):
    """Records of `text` as ({part: (tokens, lengths, hashes)}, problems as (line from 0, what),
    lines of text, bytes of text). A few calls per record, none per residue."""
    before = b""
    if form == "fasta":
        before, *records = (b"\n" + text).split(b"\n>")
        bodies = [record.partition(b"\n")[2].translate(LETTERS, b"\n \t") for record in records]
    else:
        records = text.removesuffix(b"\n").split(b"\n")
        bodies = [record.strip().translate(LETTERS) for record in records]
    bodies = [body.removesuffix(b"*") for body in bodies]
    joined = b"<" + b"><".join(bodies) + b">"
    tokens = np.frombuffer(joined.translate(TOKENS), np.uint8)
    lengths = np.array([len(body) for body in bodies], np.int64) + 2
    ends = np.cumsum(lengths)
    digests = [hashlib.blake2b(body, digest_size=8).digest() for body in bodies]
    hashes = np.frombuffer(b"".join(digests), ">u8")

    bad = lengths == 2  # no residues
    bad[np.searchsorted(ends, np.flatnonzero(tokens == WRONG), "right")] = True
    if not bodies:
        return {}, describe(before, [], bad, form), text.count(b"\n"), len(text)
    is_valid = hashes / 2.0**64 < val_ratio
    found = {}
    for part, chosen in [("train", ~is_valid & ~bad), ("valid", is_valid & ~bad)]:
        kept = tokens[np.repeat(chosen, lengths)]
        found[part] = (kept, lengths[chosen], hashes[chosen].astype(np.uint64))
    problems = []
    if bad.any() or before.strip():
        problems = describe(before, records, bad, form)
    return found, problems, text.count(b"\n"), len(text)


def describe(before, records, bad, form):
    """[(line from 0, what is wrong)] of the bad records; before: what precedes the first one."""
    problems = []
    line = before.count(b"\n")
    if before.strip():
        skipped = before[: before.index(before.strip())].count(b"\n")
        problems.append((skipped - 1, f"{before.strip()[:40]!r} before the first '>'"))
    right = (RESIDUES + RESIDUES.lower()).encode()
    if form == "fasta":
        right += b" \t"
    for record, is_bad in zip(records, bad, strict=True):
        body = record.strip()
        if form == "fasta":
            body = record.partition(b"\n")[2]
        # empty lines of a text are fine
        if is_bad and (body or form != "text"):
            wrong = body.rstrip().removesuffix(b"*").translate(None, right)
            place = line
            what = "no residues"
            if wrong.strip(b"\n"):
                # only \n is left before the first wrong character
                first = wrong.lstrip(b"\n").partition(b"\n")[0]
                if form == "fasta":
                    place += 1 + wrong.index(first)
                letters = dict.fromkeys(first.decode("utf-8", "backslashreplace"))
                what = f"{''.join(letters)[:12]!r} among the residues"
            problems.append((place, what))
        line += record.count(b"\n") + 1
    return problems


def start_worker():
    """Ctrl-C is for the parent to handle; where the parent was killed, its workers end, too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def follow():
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def encode_all(source, args):
    """encode() of each chunk, in order, by --workers processes once a file is seen to be long."""
    chunks = source.chunks()
    number = 0
    for chunk in chunks:
        yield encode(chunk, source.form, args.val_ratio)
        number += 1
        if number == INLINE and args.workers > 0:
            break
    waiting = collections.deque()
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(max(1, args.workers), context, start_worker) as pool:
        for chunk in chunks:
            waiting.append(pool.submit(encode, chunk, source.form, args.val_ratio))
            if len(waiting) > args.workers + 2:  # more would only take memory
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


# ---- Writing ---------------------------------------------------------------------------------


class Part:
    """The files of train or valid, as they grow."""

    def __init__(self, folder, name):
        self.files = {kind: open(folder / f"{name}.{kind}", "wb") for kind in ("tokens", "offsets")}
        self.digests = {kind: hashlib.sha256() for kind in self.files}
        self.tokens = 0
        self.sequences = 0
        self.lengths = collections.Counter()  # in residues
        self.letters = np.zeros(len(RESIDUES), np.int64)
        self.write("offsets", np.zeros(1, np.int64))

    def write(self, kind, array):
        self.files[kind].write(array)
        self.digests[kind].update(array)

    def add(self, tokens, lengths):
        self.write("tokens", tokens)
        self.write("offsets", self.tokens + np.cumsum(lengths))
        self.tokens += len(tokens)
        self.sequences += len(lengths)
        self.lengths.update((lengths - 2).tolist())
        counts = np.bincount(tokens, minlength=FIRST + len(RESIDUES))
        self.letters += counts[FIRST:]

    def close(self):
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()


def without_duplicates(tokens, lengths, hashes, seen):
    """The sequences whose hash is not in `seen`, to which theirs are added."""
    chosen = np.zeros(len(hashes), bool)
    for i, number in enumerate(hashes.tolist()):
        chosen[i] = number not in seen
        seen.add(number)
    return tokens[np.repeat(chosen, lengths)], lengths[chosen]


def write_folder(source, folder, args):
    """Write the arrays; the content of meta.json."""
    parts = {name: Part(folder, name) for name in PARTS}
    problems = []
    skipped = 0
    duplicates = 0
    seen = set()
    line = 0 if source.form == "list" else 1
    unit = "index" if source.form == "list" else "line"
    text_bytes = 0
    bar = tqdm(unit="B", unit_scale=True, disable=None)
    with open(folder / "skipped_records.txt", "w", encoding="utf-8") as listing:
        for found, wrong, lines, size in encode_all(source, args):
            for name, (tokens, lengths, hashes) in found.items():
                if args.remove_duplicates:
                    before = len(lengths)
                    tokens, lengths = without_duplicates(tokens, lengths, hashes, seen)
                    duplicates += before - len(lengths)
                parts[name].add(tokens, lengths)
            for place, what in wrong:
                text = f"{unit} {line + place}: {what}"
                listing.write(text + "\n")
                problems = [*problems, text][:SHOWN]
                skipped += 1
            line += lines
            text_bytes += size
            bar.update(size)
        if source.damage:
            text = f"{unit} {line}: {source.damage}"
            listing.write(text + "\n")
            problems = [*problems, text][:SHOWN]
            skipped += 1
    bar.close()
    for part in parts.values():
        part.close()

    if skipped and not args.skip_bad_data:
        if skipped > len(problems):
            problems.append(f"... and {skipped - len(problems)} more")
        text = f"{skipped} bad records, {EXPECTED} (--skip_bad_data leaves them out)"
        raise Problem(f"{source.path}: {text}: {'; '.join(problems)}")
    train, valid = parts.values()
    if train.sequences == 0 or valid.sequences == 0:
        text = f"{train.sequences} sequences to train on, {valid.sequences} held out"
        raise Problem(f"{source.path}: {text}; expected both: more data, or another --val_ratio")
    sizes = {}
    checksums = {}
    for name, part in parts.items():
        for kind, digest in part.digests.items():
            sizes[f"{name}.{kind}"] = (folder / f"{name}.{kind}").stat().st_size
            checksums[f"{name}.{kind}"] = digest.hexdigest()
    return {
        "source": {
            "name": source.path.name,
            "bytes": source.size,
            "text_bytes": text_bytes,
            "sha256": source.digest.hexdigest(),
        },
        "val_ratio": args.val_ratio,
        "skipped": skipped,
        "duplicates": duplicates,
        "train": {"sequences": train.sequences, "residues": train.tokens - 2 * train.sequences},
        "valid": {"sequences": valid.sequences, "residues": valid.tokens - 2 * valid.sequences},
        # of the training part: residues of each kind, sequences of each length in residues
        "letters": train.letters.tolist(),
        "lengths": dict(sorted(train.lengths.items())),
        "bytes": sizes,
        "sha256": checksums,
    }


def prepare(args):
    began = time.monotonic()
    source = Source(args.source)
    if args.out.exists():
        raise Problem(f"{args.out} exists: remove it, or give another folder")
    for old in args.out.parent.glob(f"{args.out.name}.tmp-*"):
        print(f"{old} is left of a run that was killed, or of one that writes now", file=sys.stderr)
    new = args.out.with_name(f"{args.out.name}.tmp-{os.getpid()}")
    try:
        new.mkdir(parents=True)
        meta = write_folder(source, new, args)
        (new / "meta.json").write_text(json.dumps(meta, indent=1))
        try:
            new.rename(args.out)
        except OSError:  # another run was faster, with the same data
            if not (args.out / "meta.json").exists():
                raise
    finally:
        shutil.rmtree(new, ignore_errors=True)
    train, valid = meta["train"], meta["valid"]
    seconds = time.monotonic() - began
    if meta["skipped"]:
        listing = args.out / "skipped_records.txt"
        print(f"left out {meta['skipped']} bad records, listed in {listing}")
    if meta["duplicates"]:
        print(f"left out {meta['duplicates']:,} duplicates")
    mean = (train["residues"] + valid["residues"]) / (train["sequences"] + valid["sequences"])
    print(
        f"{args.out}: {train['sequences']:,} sequences to train on, {valid['sequences']:,} held "
        f"out, {mean:.1f} residues on average; {seconds:.1f} s, "
        f"{meta['source']['text_bytes'] / 1e6 / seconds:.0f} MB/s"
    )


def check(folder):
    """Compare a folder with the checksums in its meta.json."""
    try:
        checksums = json.loads((folder / "meta.json").read_text())["sha256"]
        for name in FILES:
            digest = hashlib.sha256()
            with open(folder / name, "rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
            if digest.hexdigest() != checksums[name]:
                raise Problem(f"{folder / name} is damaged: prepare the data again")
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise Problem(f"{folder} is not whole: prepare the data again ({error})") from None
    print(f"{folder}: as it was written")


def main():
    status = 0
    try:
        args = parse_args()
        if args.check is not None:
            check(args.check)
        else:
            prepare(args)
    except Problem as problem:
        message = problem
        status = 2
    except OSError as error:
        message = f"{error}; prepared data take a byte per residue and 10 per sequence"
        status = 1
    except BrokenProcessPool:
        message = "a worker died, perhaps for lack of memory: give fewer --workers"
        status = 1
    except KeyboardInterrupt:
        message = "interrupted: nothing was written"
        status = 130
    if status:
        print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    main()
