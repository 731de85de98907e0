"""Prepare protein sequences for run_train_uniref50_ddp.py.

    python tools/prepare_uniref50.py uniref50.fasta.gz input_data/uniref50
    python tools/prepare_uniref50.py proteins.txt data/mine --skip_bad_data --remove_duplicates

Reads FASTA, text with a sequence per line, either as .gz, and the original's processed_uniref50.pt
(a list, saved by torch.save, of strings or of dicts with protein_seq, sequence or text). UniRef50:
https://ftp.uniprot.org/pub/databases/uniprot/uniref/uniref50/uniref50.fasta.gz

Residues are the 20 letters and X, B, U, Z, O, J, in upper or lower case; a `*` at the end is
dropped. A record with anything else is listed with the line where it begins, and nothing is
written, unless --skip_bad_data leaves such records out. The file is read piece by piece: the memory
that is needed does not grow with it, but by about 100 bytes for each bad record.

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
RESIDUES = b"ACDEFGHIKLMNPQRSTVWYXBUZOJ"
BEGIN = 0
FIRST = 5
END = 2
WRONG = 255

PARTS = ["train", "valid"]
KINDS = ["tokens", "offsets"]  # of files
BLOCK = 128 << 10  # bytes that are read at a time
CHUNK = 4 << 20  # bytes that a worker gets at a time; a longer record comes whole
SMALL = 16 << 20  # bytes of a file that needs no workers, whose start takes a second
SHOWN = 20  # problems in an error message

# for bytes.translate: to upper case; to tokens, where \n stands between sequences
UPPER = bytes.maketrans(RESIDUES.lower(), RESIDUES)
numbers = np.full(256, WRONG, np.uint8)
numbers[ord("\n")] = BEGIN
numbers[list(RESIDUES)] = np.arange(FIRST, FIRST + len(RESIDUES))
TOKENS = numbers.tobytes()


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
    add("source", type=Path, help="file to read")
    add("out", type=Path, help="folder to write")
    add("--val_ratio", type=float, default=0.05, help="share of the sequences that is held out")
    add("--skip_bad_data", action="store_true", help="leave out bad records, and list them")
    text = "keep one of equal sequences; takes about 100 bytes of memory for each"
    add("--remove_duplicates", action="store_true", help=text)
    add("--workers", type=int, default=os.cpu_count(), help="processes that encode; 0: none")
    args = parser.parse_args(words)
    if not 0 < args.val_ratio < 1:
        parser.error(f"--val_ratio {args.val_ratio}: must be between 0 and 1")
    return args


# ---- Reading ---------------------------------------------------------------------------------


def find_form(path):
    """By the content: fasta; text, a sequence per line; or list, of torch.save."""
    if not path.exists():
        raise Problem(f"{path}: no such file")
    if not path.is_file():
        raise Problem(f"{path} is a folder; expected a file")
    with open(path, "rb") as file:
        start = file.read(4)
    if start.startswith((b"PK\3\4", b"\x80")):  # zip and pickle: torch.save writes these
        return "list"

    head = next(read_blocks(path), b"").lstrip()
    if not head or b"\0" in head:
        found = f"begins with {head[:12]!r}" if head else "is empty"
        raise Problem(f"{path} {found}; expected FASTA or text, plain or .gz, or a .pt file")
    lines = head.split(b"\n", 3)
    if head.startswith(b"@") and len(lines) > 2 and lines[2].startswith(b"+"):
        raise Problem(f"{path} is FASTQ, whose qualities would pass for proteins; expected FASTA")
    if head.startswith(b">"):
        return "fasta"
    if b"\n>" in head:
        raise Problem(f"{path} has {lines[0][:40]!r} before its first '>': remove it")
    return "text"


def read_blocks(path):
    """The content, unzipped, with \\n as the only end of lines, without a byte-order mark."""
    with open(path, "rb") as file:
        opened = gzip.open if file.read(2) == b"\x1f\x8b" else open
    with opened(path, "rb") as file:
        try:
            if file.read(3) != b"\xef\xbb\xbf":
                file.seek(0)
            block = file.read(BLOCK)
            while block:
                if block.endswith(b"\r"):
                    block += file.read(1)  # its \n may follow
                if b"\r" in block:
                    block = block.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
                yield block
                block = file.read(BLOCK)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise Problem(f"{path}: damaged .gz file: fetch it again ({error})") from None


def read_list(path):
    """A line for each entry of a list saved by torch.save."""
    import torch

    try:
        data = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises five kinds
        reason = str(error).splitlines()[0][:120]
        raise Problem(f"{path}: expected a whole file of torch.save ({reason})") from None
    if isinstance(data, dict):
        data = data.get("sequences", data.get("data"))
    if not isinstance(data, list):
        raise Problem(f"{path}: expected a list, or a dict with a list as sequences or data")
    for entry in data:
        if isinstance(entry, dict):
            found = [entry[key] for key in ("protein_seq", "sequence", "text") if key in entry]
            entry = found[0] if found else ""
        text = entry if isinstance(entry, str) else ""
        yield text.replace("\n", "").encode("utf-8", "replace") + b"\n"


def read_chunks(path, form):
    """The content in parts that end where a record ends."""
    mark = b"\n>" if form == "fasta" else b"\n"
    held = bytearray()
    for block in read_list(path) if form == "list" else read_blocks(path):
        held += block
        if len(held) >= CHUNK:
            end = held.rfind(mark) + 1
            if end > 0:
                yield bytes(memoryview(held)[:end])
                del held[:end]
    if held:
        yield bytes(held)


# ---- Encoding: in the workers ----------------------------------------------------------------


def encode(text, form, val_ratio):
    """Records of `text` as ({part: (tokens, lengths, hashes)}, problems as (line from 0, what),
    lines of text, bytes of text). A few calls per record, none per residue."""
    line = 0
    if form == "fasta":
        blank, *records = (b"\n" + text).split(b"\n>")
        line = blank.count(b"\n")
        bodies = [record.partition(b"\n")[2].translate(UPPER, b"\n \t") for record in records]
    else:
        records = text.removesuffix(b"\n").split(b"\n")
        bodies = [record.strip().translate(UPPER) for record in records]
    if not bodies:  # blank lines before the first record
        return {}, [], text.count(b"\n"), len(text)

    bodies = [body.removesuffix(b"*") for body in bodies]
    lengths = np.array([len(body) for body in bodies]) + 2
    ends = np.cumsum(lengths)
    joined = b"\n" + b"\n\n".join(bodies) + b"\n"
    tokens = np.frombuffer(joined.translate(TOKENS), np.uint8).copy()
    tokens[ends - 1] = END
    digests = [hashlib.blake2b(body, digest_size=8).digest() for body in bodies]
    hashes = np.frombuffer(b"".join(digests), ">u8").astype(np.uint64)

    bad = lengths == 2  # no residues
    bad[np.searchsorted(ends, np.flatnonzero(tokens == WRONG), "right")] = True
    is_valid = hashes / 2.0**64 < val_ratio
    found = {}
    for part, chosen in [("train", ~is_valid & ~bad), ("valid", is_valid & ~bad)]:
        found[part] = (tokens[np.repeat(chosen, lengths)], lengths[chosen], hashes[chosen])

    problems = []
    if bad.any():
        for record, body, is_bad in zip(records, bodies, bad, strict=True):
            is_empty_line = form == "text" and not record.strip()
            if is_bad and not is_empty_line:
                wrong = body.translate(None, RESIDUES).decode("utf-8", "backslashreplace")
                what = f"{wrong[:12]!r} among the residues" if wrong else "no residues"
                problems.append((line, what))
            line += record.count(b"\n") + 1
    return found, problems, text.count(b"\n"), len(text)


def start_worker():
    """Ctrl-C is for the parent to handle; where the parent was killed, its workers end, too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def follow():
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def encode_all(args, form):
    """encode() of each chunk, in order, by --workers processes."""
    chunks = read_chunks(args.source, form)
    if args.workers == 0 or args.source.stat().st_size < SMALL:
        for chunk in chunks:
            yield encode(chunk, form, args.val_ratio)
        return
    waiting = collections.deque()
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(args.workers, context, start_worker) as pool:
        for chunk in chunks:
            waiting.append(pool.submit(encode, chunk, form, args.val_ratio))
            if len(waiting) > args.workers + 2:  # more would only take memory
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


# ---- Writing ---------------------------------------------------------------------------------


def without_duplicates(tokens, lengths, hashes, seen):
    """The sequences whose hash is not in `seen`, to which theirs are added."""
    chosen = np.zeros(len(hashes), bool)
    for i, number in enumerate(hashes.tolist()):
        chosen[i] = number not in seen
        seen.add(number)
    return tokens[np.repeat(chosen, lengths)], lengths[chosen]


def write_arrays(folder, form, args):
    """Write the arrays. Returns {part: {residues: sequences}}, the residues of each kind in the
    training part, the number of duplicates, bad records."""
    files = {}
    for part in PARTS:
        for kind in KINDS:
            files[part, kind] = open(folder / f"{part}.{kind}", "wb")
        files[part, "offsets"].write(bytes(8))  # the first sequence begins at 0
    lengths_of = {part: collections.Counter() for part in PARTS}
    size_of = dict.fromkeys(PARTS, 0)  # in tokens
    letters = np.zeros(len(RESIDUES), np.int64)

    bad = []
    duplicates = 0
    seen = set()
    line = 0 if form == "list" else 1
    unit = "index" if form == "list" else "line"
    bar = tqdm(unit="B", unit_scale=True, disable=None, leave=False)
    for found, problems, lines, size in encode_all(args, form):
        for part, (tokens, lengths, hashes) in found.items():
            if args.remove_duplicates:
                duplicates += len(lengths)
                tokens, lengths = without_duplicates(tokens, lengths, hashes, seen)
                duplicates -= len(lengths)
            files[part, "tokens"].write(tokens)
            files[part, "offsets"].write(size_of[part] + np.cumsum(lengths))
            size_of[part] += len(tokens)
            lengths_of[part].update((lengths - 2).tolist())
            if part == "train":
                letters += np.bincount(tokens, minlength=FIRST + len(RESIDUES))[FIRST:]

        for place, what in problems:
            bad.append(f"{unit} {line + place}: {what}")
        line += lines
        bar.update(size)

    bar.close()
    for file in files.values():
        file.close()
    return lengths_of, letters, duplicates, bad


def write_folder(folder, form, args):
    """Write all files but meta.json, whose content is returned."""
    lengths_of, letters, duplicates, bad = write_arrays(folder, form, args)
    if bad and not args.skip_bad_data:
        text = "expected letters, and * only at the end of a sequence"
        text = f"bad records: {len(bad)}; {text} (--skip_bad_data leaves them out)"
        shown = "; ".join(bad[:SHOWN])
        if len(bad) > SHOWN:
            shown += f"; ... and {len(bad) - SHOWN} more"
        raise Problem(f"{args.source}: {text}: {shown}")
    listing = "".join(f"{text}\n" for text in bad)
    (folder / "skipped_records.txt").write_text(listing, encoding="utf-8")

    meta = {"source": args.source.name, "val_ratio": args.val_ratio}
    meta.update(skipped=len(bad), duplicates=duplicates, bytes={}, sha256={})
    for part in PARTS:
        residues = sum(length * number for length, number in lengths_of[part].items())
        meta[part] = {"sequences": lengths_of[part].total(), "residues": residues}
        for kind in KINDS:
            path = folder / f"{part}.{kind}"
            meta["bytes"][path.name] = path.stat().st_size
            with open(path, "rb") as file:
                meta["sha256"][path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    if not all(meta[part]["sequences"] for part in PARTS):
        text = f"to train on {meta['train']['sequences']}, held out {meta['valid']['sequences']}"
        raise Problem(f"{args.source}: {text}; expected both: more data, or another --val_ratio")
    # of the training part: residues of each kind, sequences of each length in residues
    meta["letters"] = letters.tolist()
    meta["lengths"] = dict(sorted(lengths_of["train"].items()))
    return meta


def prepare(args):
    began = time.monotonic()
    form = find_form(args.source)
    if args.out.exists():
        raise Problem(f"{args.out} exists: remove it, or give another folder")
    for old in args.out.parent.glob(f"{args.out.name}.tmp-*"):
        print(f"{old} is left of a run that was killed, or of one that writes now", file=sys.stderr)
    new = args.out.with_name(f"{args.out.name}.tmp-{os.getpid()}")
    try:
        new.mkdir(parents=True)
        meta = write_folder(new, form, args)
        (new / "meta.json").write_text(json.dumps(meta, indent=1))
        try:
            new.rename(args.out)
        except OSError:  # another run was faster, with the same data
            if not (args.out / "meta.json").exists():
                raise
    finally:
        shutil.rmtree(new, ignore_errors=True)

    train, valid = [f"{meta[part]['sequences']:,}" for part in PARTS]
    seconds = time.monotonic() - began
    print(f"{args.out}: sequences to train on: {train}; held out: {valid} ({seconds:.1f} s)")
    if meta["skipped"]:
        print(f"bad records left out: {meta['skipped']:,}, see {args.out}/skipped_records.txt")
    if meta["duplicates"]:
        print(f"duplicates left out: {meta['duplicates']:,}")


def main():
    try:
        prepare(parse_args())
        return
    except Problem as problem:
        status = 2
        message = problem
    except OSError as error:
        status = 1
        message = f"{error}; prepared data take a byte per residue and 10 per sequence"
    except BrokenProcessPool:
        status = 1
        message = "a worker was killed (out of memory?): give fewer --workers"
    except KeyboardInterrupt:
        status = 130
        message = "interrupted: nothing was written"

    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    main()
