"""
The data of a run: the two tokenizers, the shards that prepare_fineweb.py writes, and plain text.

A shard is 256 little-endian int32 (magic 20240520, version 1, count of tokens, zeros) and then the
tokens as uint16: the format of llm.c and modded-nanogpt, so that their shards train here, and ours
there. Each document starts with <|endoftext|>, and our shards end with a whole document.
"""
import codecs
import hashlib
import json
import os
import re
from pathlib import Path

import numpy as np
import tiktoken

from common import UserError

MAGIC = 20240520
VERSION = 1
HEADER = 256  # int32, so 1,024 bytes
SHARDS = Path("data/fineweb_edu")
EOT = "<|endoftext|>"
PIECE = 2**20  # bytes of a text file that are read at a time


def get_tokenizer(name):
    """tiktoken's gpt2 (50,257 tokens), or bytes: the 256 bytes and <|endoftext|>, no download.

    The checkpoint of a pretrained model brings its own, a dict: pattern, which cuts a text into
    pieces; tokens {text: id}, where a letter stands for the byte of that number; special_tokens.
    """
    if isinstance(name, dict):
        ranks = {token.encode("latin-1"): i for token, i in name["tokens"].items()}
        return tiktoken.Encoding(
            "own", pat_str=name["pattern"], mergeable_ranks=ranks,
            special_tokens=name["special_tokens"])
    if name == "bytes":
        ranks = {bytes([byte]): byte for byte in range(256)}
        return tiktoken.Encoding(
            name, pat_str=r"(?s:.)", mergeable_ranks=ranks, special_tokens={EOT: 256})
    if name != "gpt2":
        raise UserError(f"the tokenizer must be gpt2 or bytes, not {name!r}")
    try:
        return tiktoken.get_encoding("gpt2")
    except OSError as e:  # where there is no network
        raise UserError(f"the vocabulary of gpt2 can't be fetched: {e}") from e


class Shards:
    """The tokens of one split. They may lie in several arrays and read as one long sequence."""

    def __init__(self, arrays):
        self.arrays = list(arrays)
        self.tokens = sum(len(array) for array in self.arrays)

    def sequences(self, T):
        """How many sequences of T tokens there are, each with the token that follows it."""
        return max(0, self.tokens - 1) // T

    def sequence(self, i, T):
        """The T + 1 tokens from number iT on, int64: [:-1] is the input, [1:] are the targets."""
        start = i * T
        stop = start + T + 1
        pieces = []
        for array in self.arrays:
            # start and stop are counted from the first token of this array
            if start < len(array) and stop > 0:
                pieces.append(array[max(0, start) : stop])
            start -= len(array)
            stop -= len(array)
        return np.concatenate(pieces).astype(np.int64)

    def fingerprint(self):
        """A sha256 of each array's length and its first and last million tokens."""
        # all tokens would be 20 GB to read before each run
        sha = hashlib.sha256()
        for array in self.arrays:
            sha.update(f"{len(array)}:".encode())
            sha.update(array[:1_000_000].tobytes())
            sha.update(array[-1_000_000:].tobytes())
        return sha.hexdigest()


def read_shard(path):
    """The tokens of one shard, mapped into memory. UserError if the file is no shard or is cut."""
    check_file(path)
    header = np.fromfile(path, "<i4", HEADER)
    if len(header) < HEADER or header[0] != MAGIC or header[1] != VERSION:
        raise UserError(f"{path} is not a token shard (magic {MAGIC}, version {VERSION})")
    tokens = int(header[2])
    if os.path.getsize(path) != 4 * HEADER + 2 * tokens:
        raise UserError(f"{path} is cut or damaged: its header says {tokens:,} tokens")
    return np.memmap(path, "<u2", "r", offset=4 * HEADER, shape=(tokens,))  # nothing is read yet


def check_file(path):
    """UserError if there is no file, or one without an end: a pipe, /dev/zero."""
    if not os.path.isfile(path):
        raise UserError(f"{path}: no such file, or not a regular one")


def read_manifest(folder):
    """What prepare_fineweb.py noted of a folder of shards. None where it has not been.

    settings: its flags; files: of the source; shards: {name: tokens}; next: up to which file and
    row of the source they go; finished. UserError if one of the shards is missing, or is another.
    """
    path = Path(folder) / "manifest.json"
    if not path.exists():
        return None
    try:
        manifest = json.loads(path.read_bytes())
        shards = dict(manifest["shards"])
        whole = {"settings", "finished"} <= manifest.keys()
    except (ValueError, TypeError, KeyError, AttributeError):
        whole = False
    if not whole:
        raise UserError(f"{path} is damaged, or not of prepare_fineweb.py")
    for name, tokens in shards.items():
        found = len(read_shard(Path(folder) / name))
        if found != tokens:
            raise UserError(f"{folder}/{name} has {found:,} tokens, but {tokens:,} in {path}")
    return manifest


def load_data(path):
    """What there is to train on: (train, val, name of the tokenizer, what it is, for the log).

    train and val are Shards. path: a folder of shards, a text file, or None for Python's manual.
    """
    if path is None:
        return load_manual()
    if path.is_dir() or path == SHARDS:
        return load_shards(path)
    return load_text(path)


def load_shards(folder):
    """The shards of a folder, named like ..._train_000001.bin and ..._val_000000.bin."""
    manifest = read_manifest(folder)
    if manifest is not None and not manifest["finished"]:
        remedy = "run prepare_fineweb.py again with the same flags, and it goes on"
        raise UserError(f"{folder} is only half prepared: {remedy}")
    splits = []
    for split in ("train", "val"):
        # the last word of a name counts, so that no shard is in both. Numbers have leading zeros
        ending = re.compile(rf"_{split}(_\d+)?\.bin$")
        paths = [path for path in sorted(folder.glob("*.bin")) if ending.search(path.name)]
        if not paths:
            raise UserError(f"no *_{split}_*.bin in {folder}: `python prepare_fineweb.py` makes it")
        splits.append(Shards([read_shard(path) for path in paths]))
    train, val = splits
    what = dict(data=str(folder), data_sha256=fingerprint(train, val), val="the val shards")
    return train, val, "gpt2", what


def fingerprint(train, val):
    """A sha256 that tells data apart, and how it was split."""
    both = f"train {train.fingerprint()} val {val.fingerprint()}"
    return hashlib.sha256(both.encode()).hexdigest()


def load_text(path):
    """The bytes of a text file, after <|endoftext|>. The last tenth is val."""
    check_file(path)
    tokens = np.empty(1 + os.path.getsize(path), "<u2")
    tokens[0] = 256
    n = 1  # tokens so far
    # in pieces, so that these tokens are all that lies in memory: two bytes for one of the file
    utf8 = codecs.getincrementaldecoder("utf-8")()
    try:
        with open(path, "rb") as f:
            while piece := f.read(PIECE):
                utf8.decode(piece)
                tokens[n : n + len(piece)] = np.frombuffer(piece, "u1")
                n += len(piece)
        utf8.decode(b"", final=True)
    except UnicodeDecodeError as e:
        byte = n - 1 + e.start
        raise UserError(f"{path} is not UTF-8 text: {e.reason} near byte {byte:,}") from None
    n_train = n - n // 10
    train = Shards([tokens[:n_train]])
    val = Shards([tokens[n_train:]])
    # of the whole file: two texts may begin and end alike
    sha = hashlib.sha256(fingerprint(train, val).encode())
    for start in range(1, n, PIECE):
        sha.update(tokens[start : start + PIECE].astype("u1"))
    what = dict(data=str(path), data_sha256=sha.hexdigest(), val="the last tenth")
    return train, val, "bytes", what


def load_manual():
    """The bytes of Python's manual.

    Val is every tenth topic by name, from number 6 on: eight topics, a ninth of the text in each
    Python from 3.7 to 3.13. The manual repeats itself, and what stands in train tests nothing, so
    val loses the lines that it shares with train. Lines of less than 32 bytes may stay: two topics
    can well say "Example:" without one being a copy of the other.
    """
    from pydoc_data.topics import topics

    texts = [topics[name].encode() for name in sorted(topics)]
    train_texts = [text for i, text in enumerate(texts) if i % 10 != 6]
    train_lines = set(b"\n".join(train_texts).split(b"\n"))
    val_texts = []
    for text in texts[6::10]:
        lines = text.split(b"\n")
        own = [line for line in lines if len(line) < 32 or line not in train_lines]
        val_texts.append(b"\n".join(own))
    train = Shards([byte_tokens(train_texts)])
    val = Shards([byte_tokens(val_texts)])
    what = dict(
        data="pydoc_data.topics",
        data_sha256=fingerprint(train, val),
        val="every tenth topic, without the lines of 32 bytes or more that stand in train",
    )
    return train, val, "bytes", what


def byte_tokens(texts):
    """Documents, given as bytes, in tokens of the bytes tokenizer: <|endoftext|> and the bytes."""
    tokens = []
    for text in texts:
        tokens += [256, *text]
    return np.array(tokens, "<u2")
