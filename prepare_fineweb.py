"""
Text to token shards, the two tokenizers, and reading shards.

    python prepare_fineweb.py                      # streams FineWeb-Edu, sample-10BT, into data/fineweb_edu
    python prepare_fineweb.py --pretokenized       # the same, ready from the hub: minutes instead of an hour
    python prepare_fineweb.py --source=novel.txt --out=data/novel --val_tokens=1e5

A shard is 256 little-endian int32 (magic 20240520, version 1, token count, zeros), then the tokens as uint16: the
format of llm.c and modded-nanogpt, whose shards run here and the other way round. Each document is <|endoftext|> and
its text; a shard's end may cut it. A stopped run goes on after its last finished shard and ends in the same bytes.
"""
import argparse
import codecs
import functools
import gzip
import hashlib
import itertools
import json
import logging
import math
import os
import platform
import re
import shutil
import signal
import sys
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import numpy as np
import tiktoken

MAGIC, VERSION, HEADER = 20240520, 1, 256
SHARDS = Path("data/fineweb_edu")
EOT = "<|endoftext|>"
PIECE = 1 << 18  # characters, about, that tiktoken gets at a time
WORD = 1 << 22  # characters without a space, at most: tiktoken takes 50 bytes for each of them
LONGEST = 100_000_000  # bytes or characters of a document, at most, where it has to be in memory as a whole


class Parser(argparse.ArgumentParser):
    """argparse, but an error is one line. A stream that can't show a character shows ? from here on."""

    def __init__(self, **kwargs):
        super().__init__(allow_abbrev=False, **kwargs)
        sys.stdout, sys.stderr = (s or open(os.devnull, "w") for s in (sys.stdout, sys.stderr))  # None if it was closed
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")

    def exit(self, status=0, message=None):
        """Ends the program. Of torchrun's processes the first says why, and so ends the others, which wait for it."""
        if status and int(os.environ.get("RANK", 0)):
            time.sleep(5)
            message = None
        super().exit(status, message)

    def error(self, message):
        """Ends the program for a flag that can't be understood."""
        self.exit(2, f"{self.prog}: {message} (--help lists the flags)\n")

    def fail(self, reason):
        """Ends the program for anything else that can't be done."""
        self.exit(1, f"{self.prog}: {reason}\n")


def count(text, least=1):
    """A flag's whole number of at least 1, also written 1e9."""
    try:
        value = float(text)
        if least <= value < 2**63 and value == int(value):
            return int(value)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"needs a whole number of at least {least}, like 1000 or 1e9, not {text!r}")


def whole(text):
    """A flag's whole number of at least 0."""
    return count(text, least=0)


def number(least=-math.inf, above=-math.inf, most=math.inf):
    """The type of a flag that takes a finite number in that range."""

    def parse(text):
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if math.isfinite(value) and least <= value <= most and value > above:
            return value
        bounds = [("at least", least), ("above", above), ("at most", most)]
        rule = " and ".join(f"{words} {bound:g}" for words, bound in bounds if math.isfinite(bound)) or "finite"
        raise argparse.ArgumentTypeError(f"needs a number {rule}, not {text!r}")

    return parse


def several(one):
    """The type of a flag that takes a comma list of what `one` takes; what is said twice counts once."""
    return lambda text: list(dict.fromkeys(one(part) for part in text.split(",")))


def one_of(names):
    """The type of a flag that takes one of names."""

    def parse(text):
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(names)}")
        return text

    return parse


def lock(file, folder):
    """Takes folder for this process, until file (of it, open) is closed. ValueError if another one has it."""
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"another run is writing to {folder}") from None


def pick_device(name=None):
    """torch.device(name), or cuda where there is one, else cpu. ValueError for one that can't be used here."""
    import torch

    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=name, dtype=torch.float64).item()  # rotary angles need it, and mps has none
    except (RuntimeError, AssertionError, TypeError) as e:
        raise ValueError(f"device {name} can't be used here: {str(e).splitlines()[0][:70]}") from None
    return torch.device(name)


def few_threads(model, device):
    """One thread for a model below 10 M parameters on a CPU: the matmuls of one token are too short to share."""
    import torch

    if device.type == "cpu" and sum(p.numel() for p in model.parameters()) < 10e6:
        torch.set_num_threads(1)


def out_of_memory(e):
    """Whether an exception says that there is no room, on a card or in the machine."""
    import torch

    signs = ("out of memory", "can't allocate memory", "ALLOC_FAILED", "Storage size calculation overflowed")
    return isinstance(e, (MemoryError, torch.OutOfMemoryError)) or any(sign in str(e) for sign in signs)


def no_compiler(e):
    """What to say of an exception that says that torch.compile found no compiler, else None."""
    if "InvalidCxxCompiler" in str(e) or "Failed to find C compiler" in str(e):
        return "--compile needs a C++ compiler: install g++, or name one in CXX; --no-compile does without"


def device_name(device):
    """What a figure is quoted with: the card's name, or the processor's and the number of threads."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        processor = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()).group(1)
    except (OSError, AttributeError):
        processor = platform.processor() or platform.machine()
    return f"cpu ({processor}), {torch.get_num_threads()} threads"


def get_tokenizer(name):
    """tiktoken's gpt2 (50,257 tokens), or bytes: 256 single bytes and <|endoftext|>, which needs no download.
    Raises ValueError for another name, and for gpt2 where its vocabulary can't be had."""
    if name == "bytes":
        ranks = {bytes([b]): b for b in range(256)}
        return tiktoken.Encoding("bytes", pat_str=r"(?s:.)", mergeable_ranks=ranks, special_tokens={EOT: 256})
    if name != "gpt2":
        raise ValueError(f"the tokenizer must be gpt2 or bytes, not {name!r}")
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as e:  # requests' errors, in many classes
        raise ValueError(
            f"tiktoken could not download the gpt2 vocabulary ({type(e).__name__}): connect once, or point "
            "TIKTOKEN_CACHE_DIR at a folder that has it"
        ) from None


class Shards:
    """The tokens of one split as one long sequence that stays on the disk.

    Shards.open(folder, "train") maps the .bin files; Shards([array, ...]) takes arrays of integers."""

    def __init__(self, arrays):
        self.arrays = list(arrays)
        self.ends = np.cumsum([len(a) for a in self.arrays], dtype=np.int64)
        self.tokens = int(self.ends[-1]) if self.arrays else 0

    @classmethod
    def open(cls, folder, split):
        """Maps *_<split>.bin and *_<split>_<number>.bin of folder, by number.
        ValueError where there are none, or for a file that is foreign or cut."""
        found = []
        for path in Path(folder).glob("*.bin"):
            if match := re.search(rf"_{split}(?:_(\d+))?\.bin$", path.name):
                found.append((int(match[1] or 0), path))
        if not found:
            raise ValueError(f"no *_{split}_*.bin in {folder}: `python prepare_fineweb.py` makes them")
        return cls(read_shard(path) for _, path in sorted(found))

    def sequences(self, T):
        """How many sequences of T (and the one token that follows each) there are; the tail is dropped."""
        return max(0, self.tokens - 1) // T

    def sequence(self, i, T):
        """Sequence i, tokens [iT, iT + T]: T + 1 of them, int64, also across the seams. [:-1] in, [1:] out."""
        start, stop = i * T, i * T + T + 1
        if not 0 <= start < stop <= self.tokens:
            raise IndexError(f"sequence {i} of {T} tokens: there are {self.sequences(T)}")
        pieces, n = [], int(np.searchsorted(self.ends, start, side="right"))
        while start < stop:
            begin = int(self.ends[n]) - len(self.arrays[n])
            pieces.append(self.arrays[n][start - begin : stop - begin])
            start += len(pieces[-1])
            n += 1
        return np.concatenate(pieces).astype(np.int64)

    def fingerprint(self):
        """A sha256 that tells one data set from another without reading all of it: of every shard its length and its
        first and last million tokens."""
        sha = hashlib.sha256()
        for a in self.arrays:
            sha.update(f"{len(a)}:".encode() + a[:1_000_000].tobytes() + a[-1_000_000:].tobytes())
        return sha.hexdigest()


def read_shard(path):
    """The tokens of one .bin file, a memory-mapped uint16 array. ValueError if it is not one, or is cut."""
    path = Path(path)
    header = np.fromfile(path, "<i4", HEADER)
    if len(header) < HEADER or header[0] != MAGIC or header[1] != VERSION:
        raise ValueError(f"{path} is not a token shard (magic {MAGIC}, version {VERSION}, 256 int32): remove it")
    tokens, there = int(header[2]), (path.stat().st_size - 4 * HEADER) / 2
    if tokens != there:
        raise ValueError(f"{path} says {tokens:,} tokens and holds {there:,.10g}: it is cut or damaged, make it again")
    return np.memmap(path, "<u2", "r", 4 * HEADER, (tokens,)) if tokens else np.empty(0, "<u2")


def shards_tokenizer(folder):
    """The name of the tokenizer that made a folder's shards: its manifest's, or gpt2 without one."""
    manifest = load_manifest(folder)
    return manifest["tokenizer"] if manifest else "gpt2"


def load_manifest(folder):
    """What manifest.json says of a folder's shards, None where there is none. ValueError if it is damaged."""
    path = Path(folder) / "manifest.json"
    if not path.exists():
        return None
    try:
        manifest = json.loads(path.read_text())
        manifest["tokenizer"], [(shard["file"], shard["tokens"], shard["documents"]) for shard in manifest["shards"]]
        return manifest
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is damaged: remove the folder and make it again") from None


def load_data(path):
    """path to (train, val, tokenizer's name, what it is): a folder of shards; or the bytes of a text file or, for None,
    of the manual that ships with Python, whose last tenth is val. Raises ValueError, OSError."""
    if path is not None and path.is_dir():
        for shard in (load_manifest(path) or dict(shards=[]))["shards"]:
            if not (path / shard["file"]).exists():
                raise ValueError(f"{path / shard['file']} is missing (manifest.json lists it): make the shards again")
        train, val = Shards.open(path, "train"), Shards.open(path, "val")
        sha256 = Shards(train.arrays + val.arrays).fingerprint()
        return train, val, shards_tokenizer(path), dict(data=str(path), data_sha256=sha256)
    if path is None:
        from pydoc_data.topics import topics

        documents = [text.encode() for text in topics.values()]
    elif path == SHARDS:
        raise ValueError(f"no shards in {SHARDS}: `python prepare_fineweb.py` makes them, or name others with --data")
    elif path.exists() and not path.is_file():
        raise ValueError(f"{path} is neither a folder of shards nor a text file")
    else:
        documents = [path.read_bytes()]
        try:
            documents[0].decode()
        except UnicodeDecodeError as e:
            raise ValueError(f"{path} is not UTF-8 text (byte {e.start:,}); of shards give the folder") from None
    eot = np.array([256], "<u2")
    tokens = np.concatenate([part for text in documents for part in (eot, np.frombuffer(text, "u1").astype("<u2"))])
    cut = len(tokens) - len(tokens) // 10
    what = dict(data=str(path or "pydoc_data.topics"), data_sha256=hashlib.sha256(b"".join(documents)).hexdigest())
    return Shards([tokens[:cut]]), Shards([tokens[cut:]]), "bytes", what


# the rest of this file writes


def fast_tokenizer(name):
    """get_tokenizer, but gpt2 with its regular expression rearranged: the alternatives that need no look-ahead are one
    group, which the engine runs as an automaton and not step by step. The same tokens, 1.6 times as fast."""
    plain = get_tokenizer(name)
    if name != "gpt2":
        return plain
    pattern = r"(?:'(?:[sdmt]|ll|ve|re)| ?(?:\p{L}+|\p{N}+|[^\s\p{L}\p{N}]+))|\s++$|\s+(?!\S)|\s"
    ranks, special = plain._mergeable_ranks, plain._special_tokens
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


# where a text can be cut and its parts have the tokens of the whole: none of gpt2's words goes on from a non-space to a
# space, and of several spaces before a word the last one stands apart. \s has more spaces: there we just don't cut
SEAM = re.compile(r"\S(?=[ \t\n\r])|[ \t\n\r](?=[ \t\n\r]\S)")


def cut(text):
    """text in pieces of about PIECE characters; the last is the rest. A million spaces and a word in one piece are too
    much for tiktoken. ValueError for a word beyond WORD."""
    start = end = 0
    while end < len(text):
        seam = SEAM.search(text, start + PIECE)
        end = seam.end() if seam else len(text)
        if end - start > PIECE + WORD:
            raise ValueError(f"more than {WORD:,} characters without a space: this is no text")
        yield text[start:end]
        start = end


def one_line(error):
    return " ".join(str(error).split())[:300] or type(error).__name__


def find(source, name, revision):
    """The files of a source, in order, and its revision: a hub dataset's commit (the given one, if any), else a hash of
    the files' sizes and first megabytes. ValueError says why there are none."""
    if Path(source).is_file():
        files = [source]
    elif re.search(r"\.(parquet|jsonl?|txt|gz)$", source):
        raise ValueError(f"there is no file {source}")
    else:
        from datasets import load_dataset_builder

        revision = None if Path(source).exists() else revision
        try:  # datasets finds the files of the config, on the hub or in the folder; the readers below read them
            splits = load_dataset_builder(source, name, revision=revision).config.data_files or {}
        except Exception as e:  # no network, unknown dataset or config, no files: of many classes
            raise ValueError(f"can't open the dataset {source} ({name or 'no --name'}): {one_line(e)}") from None
        if "train" not in splits:
            raise ValueError(f"the dataset {source} has no split train, only {', '.join(map(str, splits))}")
        files = list(splits["train"])
    if match := re.match(r"hf://[^@]*@([^/]+)/", files[0]):
        return files, match[1]
    sha = hashlib.sha256()
    for path in files:
        with open(path, "rb") as f:
            sha.update(f.read(1 << 20) + f" {f.seek(0, os.SEEK_END)} ".encode())
    return files, sha.hexdigest()


# a reader yields batches from row start on, which must be a batch's first row: a list of (row, does a document begin
# here?, function that gives its text) and the batch's size in bytes. What the function raises is the fault of its row


def read_parquet(f, start):
    """A small buffer and no pre-buffering, so that memory does not grow with the file. The rows that datasets streams
    come with its whole text column: 3.5 GB for a file of 3.1 GB."""
    import pyarrow.parquet

    table = pyarrow.parquet.ParquetFile(f, pre_buffer=False, buffer_size=1 << 22)
    if "text" not in table.schema_arrow.names:
        raise ValueError(f"no column text, only {', '.join(table.schema_arrow.names)}")
    row = 0
    for number in range(table.num_row_groups):
        group = table.metadata.row_group(number)
        if row + group.num_rows <= start:
            row += group.num_rows
            continue
        few = max(1, min(64, (1 << 20) * group.num_rows // max(1, group.total_byte_size)))  # about 1 MB
        for batch in table.iter_batches(few, row_groups=[number], columns=["text"]):
            if row >= start:
                yield [(row + i, True, cell.as_py) for i, cell in enumerate(batch["text"])], batch.nbytes
            row += len(batch)


def read_lines(f, start):
    """JSON lines; a row is a line. Blank lines are no documents."""

    def text_of(line):
        record = json.loads(line.decode())  # decoded first: json.loads is not strict about UTF-8
        if not isinstance(record, dict) or "text" not in record:
            raise ValueError("no field text")
        return record["text"]

    batch, size = [], 0
    for row, line in enumerate(iter(lambda: f.readline(LONGEST), b"")):
        if len(line) == LONGEST:
            raise ValueError(f"row {row + 1:,} is longer than {LONGEST:,} bytes: a .txt file may be")
        if row >= start and line.strip():
            batch.append((row, True, functools.partial(text_of, line)))
            size += len(line)
        if size >= PIECE:
            yield batch, size
            batch, size = [], 0
    if batch:
        yield batch, size


def read_text(f, start):
    """One document of any size, in pieces; a row is a byte."""
    f.seek(start)
    decoder, rest = codecs.getincrementaldecoder("utf-8")(), ""
    while block := f.read(4 * PIECE):
        try:
            rest += decoder.decode(block)
        except UnicodeDecodeError as e:
            raise ValueError(f"byte {f.tell() - len(e.object) + e.start:,} is not UTF-8") from None
        *pieces, rest = cut(rest) if rest else [""]
        for piece in pieces:
            yield [(start, start == 0, lambda piece=piece: piece)], len(piece)
            start += len(piece.encode())
    if rest:
        yield [(start, start == 0, lambda: rest)], len(rest)
    decoder.decode(b"", final=True)


def read(files, start):
    """(position, share of the source before it, path, batch, size) from position start on, a [file, row]."""
    opener = open
    if "://" in files[0]:
        from datasets.utils.file_utils import xopen as opener  # with retries: datasets' own streaming opens files so
    for number, path in list(enumerate(files))[start[0] :]:
        row = start[1] if number == start[0] else 0
        try:
            kind = re.search(r"\.(parquet|jsonl?|txt)(\.gz)?$", path)
            if not kind:
                raise ValueError("only .parquet, .jsonl, .jsonl.gz and .txt can be read")
            reader = {"parquet": read_parquet, "txt": read_text}.get(kind[1], read_lines)
            with opener(path, "rb") as raw:
                length = raw.seek(0, os.SEEK_END)
                raw.seek(0)
                for batch, size in reader(gzip.open(raw) if kind[2] else raw, row):
                    yield [number, batch[0][0]], (number + raw.tell() / length) / len(files), path, batch, size
        except Exception as e:
            yield [number, row], 1, path, [(None, False, e)], 0  # waits for its turn like a batch
            return


def encode(tokenizer, path, batch):
    """The tokens of a batch, uint16, up to its first error, and the error or None."""
    arrays, error = [np.empty(0, "<u2")], None
    for row, begins, get in batch:
        try:
            if row is None:
                raise get
            text = get()
            if not isinstance(text, str):
                raise ValueError(f"text is {type(text).__name__}, not a string")
            if len(text) > LONGEST:
                raise ValueError(f"text is longer than {LONGEST:,} characters: a .txt file may be")
            if begins:
                arrays.append(np.array([tokenizer.eot_token], "<u2"))
            for piece in cut(text):
                try:
                    ids = tokenizer.encode_to_numpy(piece, disallowed_special=())
                except UnicodeEncodeError:  # half a surrogate pair, which JSON can spell: encode_ordinary replaces it
                    ids = np.array(tokenizer.encode_ordinary(piece))
                arrays.append(ids.astype("<u2"))
        except Exception as e:
            error = ValueError(f"{path if row is None else f'{path}, row {row + 1:,}'}: {one_line(e)}")
            break
    return np.concatenate(arrays), error


def tokenize(files, start, name, procs):
    """(position, share, tokens) of each batch in order. procs threads work ahead: tiktoken needs no Python lock. So
    nothing is pickled and no process outlives a killed parent. Each thread has a tokenizer of its own: two that share
    one also share its regular expression's scratch memory, and took up to twice the CPU time."""
    own = threading.local()

    def work(path, batch):
        if not hasattr(own, "tokenizer"):
            own.tokenizer = fast_tokenizer(name)
        return encode(own.tokenizer, path, batch)

    with ThreadPoolExecutor(procs) as pool:
        ahead, in_flight = deque(), 0
        for item in itertools.chain(read(files, start), [None]):
            while ahead and (item is None or len(ahead) > 2 * procs or in_flight > 1 << 26):
                position, share, size, result = ahead.popleft()
                in_flight -= size
                tokens, error = result.result()
                yield position, share, tokens
                if error:
                    raise error
            if item:
                position, share, path, batch, size = item
                ahead.append((position, share, size, pool.submit(work, path, batch)))
                in_flight += size


def shard_name(number):
    return f"finewebedu_{'train' if number else 'val'}_{number:06d}.bin"


def entry(path, documents, **more):
    """What the manifest says of a shard. documents: those that begin in it."""
    tokens, sha = read_shard(path), hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(1 << 20):
            sha.update(block)
    return {"file": path.name, "documents": documents, "tokens": len(tokens), "sha256": sha.hexdigest(), **more}


def save_manifest(out, manifest):
    with open(out / "manifest.tmp", "w") as f:
        f.write(json.dumps(manifest, indent=1) + "\n")
        f.flush()
        os.fsync(f.fileno())
    os.replace(out / "manifest.tmp", out / "manifest.json")


def write_shards(args, out, manifest, files, bar):
    """Tokenizes files into the shards that the manifest does not list yet. A shard gets its name when it is complete,
    then its line in the manifest: a run that is killed in between makes it again."""
    eot, shards, f = get_tokenizer(args.tokenizer).eot_token, manifest["shards"], None
    done = sum(shard["tokens"] for shard in shards)
    # a shard's end: the position of a batch, and how many tokens of the batch lie before the end
    *start, skip = shards[-1]["end"] if shards else (0, 0, 0)

    def finish():
        path = out / shard_name(len(shards))
        f.truncate(4 * HEADER + 2 * filled)
        f.seek(0)
        f.write(np.array([MAGIC, VERSION, filled] + [0] * (HEADER - 3), "<i4").tobytes())
        f.flush()
        os.fsync(f.fileno())
        f.close()
        os.replace(f.name, path)
        shards.append(entry(path, documents, end=[*position, used]))
        save_manifest(out, manifest)

    for position, share, tokens in tokenize(files, start, args.tokenizer, args.procs):
        used, skip = skip, 0
        while used < len(tokens) and done < args.tokens:
            if f is None:
                size = min(args.shard_tokens if shards else args.val_tokens, args.tokens - done)
                f, filled, documents = begin_shard(out, size), 0, 0
            part = tokens[used : used + size - filled]
            f.write(part.tobytes())
            documents += int(np.count_nonzero(part == eot))
            filled, used, done = filled + len(part), used + len(part), done + len(part)
            if filled == size:
                finish()
                f = None
        bar.total = manifest["tokens"] or round(done / share)  # an estimate
        bar.update(done - bar.n)
        if done == args.tokens:
            return
    if not done:
        raise ValueError(f"{args.source} has no documents")
    manifest["source_ended"] = True
    if f:
        finish()
    save_manifest(out, manifest)


def begin_shard(out, tokens):
    """A file with room for so many tokens, taken now: a full disk shows before the work, not after it."""
    f = open(out / "shard.tmp", "wb")
    try:
        if hasattr(os, "posix_fallocate"):  # not on macOS
            os.posix_fallocate(f.fileno(), 0, 4 * HEADER + 2 * tokens)
    except OSError as e:
        raise ValueError(f"no room in {out} for a shard of {2 * tokens:,} bytes: {e.strerror}") from None
    f.seek(4 * HEADER)
    return f


def fetch_shards(args, out, manifest, bar):
    """Fetches the shards that the manifest does not list yet."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    shards = manifest["shards"]
    while sum(shard["tokens"] for shard in shards) < args.tokens:
        path = out / shard_name(len(shards))
        if shutil.disk_usage(out).free < 250e6:
            raise ValueError(f"no room in {out} for a shard of 200,000,000 bytes")
        try:
            hf_hub_download(args.source, path.name, repo_type="dataset", revision=manifest["revision"], local_dir=out)
        except Exception as e:
            if shards and isinstance(e, EntryNotFoundError) and not isinstance(e, LocalEntryNotFoundError):
                manifest["source_ended"] = True
                break
            raise ValueError(f"can't fetch {path.name} from {args.source}: {one_line(e)}") from None
        try:
            tokens = read_shard(path)
        except ValueError:
            path.unlink()  # or the hub's client would take it for the good one next time
            raise
        shards.append(entry(path, int(np.count_nonzero(tokens == 50256))))
        # the client notes the commit beside what it fetched; the next shards must come from the same one
        note = out / ".cache/huggingface/download" / f"{path.name}.metadata"
        if manifest["revision"] is None and note.exists():
            manifest["revision"] = note.read_text().split()[0]
        save_manifest(out, manifest)
        bar.update(len(tokens))
    save_manifest(out, manifest)
    shutil.rmtree(out / ".cache", ignore_errors=True)


def prepare(args, out):
    """Brings the folder out from what it holds to what args ask for. ValueError or OSError says why it can't."""
    from tqdm import tqdm

    began, manifest = time.time(), load_manifest(out)
    for path in sorted(out.glob("*.bin")):
        if manifest is None or not re.fullmatch(r"finewebedu_(val|train)_\d{6}\.bin", path.name):
            raise ValueError(f"{path} was not written by this program: choose another --out")
    held = manifest if manifest and manifest["shards"] else {"shards": [], "source_ended": False}
    shards = list(itertools.takewhile(lambda shard: (out / shard["file"]).exists(), held["shards"]))
    for shard in shards:
        if len(read_shard(out / shard["file"])) != shard["tokens"]:
            raise ValueError(f"{out / shard['file']} is not the one of manifest.json: remove it")
    ended = held["source_ended"] and shards == held["shards"]
    before = sum(shard["tokens"] for shard in shards)
    if shards and not (args.pretokenized or ended) and before < args.tokens:
        if shards[-1]["tokens"] < (args.shard_tokens if shards[1:] else args.val_tokens):
            before -= shards.pop()["tokens"]  # a smaller --tokens had cut it short
    finished = ended or before >= args.tokens

    # without shards a manifest binds nobody; a finished folder needs no network and may be older than the libraries
    want = {key: vars(args)[key] for key in ("source", "name", "tokenizer", "shard_tokens", "val_tokens")}
    want |= {key: held.get(key) for key in ("revision", "versions")}
    if not args.pretokenized and (not finished or Path(args.source).exists()):
        files, want["revision"] = find(args.source, args.name, want["revision"])
    if not finished:
        want["versions"] = {package: version(package) for package in ("tiktoken", "pyarrow", "datasets")}
    for key, value in want.items():
        if shards and held[key] != value:
            raise ValueError(f"{out} was made with {key} {held[key]}, not {value}: choose another --out")
    if before > args.tokens and not args.pretokenized:
        raise ValueError(f"{out} holds {before:,} tokens, more than --tokens={args.tokens:,}: choose another --out")

    if not finished:
        asked = args.tokens if args.tokens < math.inf else None
        manifest = want | {"tokens": asked, "source_ended": False, "shards": shards}
        save_manifest(out, manifest)
        with tqdm(initial=before, total=asked, unit="tok", unit_scale=True, disable=None, leave=False) as bar:
            if args.pretokenized:
                fetch_shards(args, out, manifest, bar)
            else:
                write_shards(args, out, manifest, files, bar)
    tokens, documents = (sum(shard[key] for shard in shards) for key in ("tokens", "documents"))
    seconds = time.time() - began
    print(f"{out}: {documents:,} documents, {tokens:,} tokens, {len(shards)} shards, ", end="")
    print("finished before" if finished else f"{seconds:.1f} s, {(tokens - before) / seconds:,.0f} tokens/s")
    if len(shards) == 1:
        print("all of it is val and nothing is left to train on: choose smaller --val_tokens and another --out")


def main():
    parser = Parser(prog="prepare_fineweb.py", description="Text to token shards: FineWeb-Edu, or any text.")
    add = parser.add_argument
    # what to read
    add("--source", help="dataset on the hub, folder with the layout of one, or a .parquet, .jsonl, .jsonl.gz or .txt "
        "file (a .txt is one document); default: HuggingFaceFW/fineweb-edu")  # fmt: skip
    add("--name", help="config of the dataset; default: sample-10BT, for the default source")
    add("--tokens", type=count, default=math.inf, help="stop after exactly so many, val included; default: all")
    add("--pretokenized", action="store_true", help="fetch ready gpt2 shards, whole ones until there are --tokens; "
        "default source: kjj0/finewebedu10B-gpt2")  # fmt: skip
    # what to write
    add("--out", default=SHARDS, help="folder for the shards; default: %(default)s")
    add("--shard_tokens", type=count, help="tokens per shard; default: 100e6")
    add("--val_tokens", type=count, help="tokens in the first shard, which is val; default: like the others")
    add("--tokenizer", choices=["gpt2", "bytes"], default="gpt2", help="default: %(default)s")
    add("--procs", type=count, default=os.cpu_count(), help="threads that tokenize; default: one per core, %(default)s")
    args = parser.parse_args()
    if args.pretokenized:
        if args.name or args.shard_tokens or args.val_tokens or args.tokenizer != "gpt2":
            parser.error("--pretokenized goes without --name, --shard_tokens, --val_tokens and --tokenizer")
        args.source = args.source or "kjj0/finewebedu10B-gpt2"
    else:
        args.name = args.name or (None if args.source else "sample-10BT")
        args.source = args.source or "HuggingFaceFW/fineweb-edu"
        args.shard_tokens = args.shard_tokens or 100_000_000
        args.val_tokens = args.val_tokens or args.shard_tokens
        if max(args.shard_tokens, args.val_tokens) >= 1 << 31:
            parser.error("--shard_tokens and --val_tokens must be below 2^31, which a shard's header can hold")

    out, unfinished = Path(args.out), []

    def clean():
        for path in unfinished:
            path.unlink(missing_ok=True)

    def stop(number, frame):
        clean()  # and there is nothing to unwind: a shard is there in full or not at all
        below_the_bar = "\n" if sys.stderr.isatty() else ""
        line = "stopped: finished shards are kept, the same command goes on after them"
        print(f"{below_the_bar}{parser.prog}: {line}", file=sys.stderr, flush=True)
        os._exit(128 + number)

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    logging.disable()  # the libraries' errors and retries, which we put in one line
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock(os.open(out, os.O_RDONLY), out)
        unfinished += [out / "shard.tmp", out / "manifest.tmp"]
        clean()  # what a killed run left
        prepare(args, out)
    except (ValueError, OSError, ImportError) as e:
        parser.fail(one_line(e))
    finally:
        clean()


if __name__ == "__main__":
    main()
