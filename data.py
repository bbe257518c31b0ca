"""
The data of a run: the two tokenizers, the shards that prepare_fineweb.py writes, and plain text.

A shard is 256 little-endian int32 (magic 20240520, version 1, count of tokens, zeros) and then the
tokens as uint16: the format of llm.c and modded-nanogpt, so that their shards train here, and ours
there. Each document starts with <|endoftext|>. Our shards end with a whole document, theirs may end
within one.
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

    The checkpoint of a pretrained model brings its own, a dict: the pattern that cuts a text into
    pieces, the tokens {text: id}, where a letter stands for the byte of that number, and the
    special_tokens {text: id}.
    """
    if isinstance(name, dict):
        return tiktoken.Encoding(
            "own",
            pat_str=name["pattern"],
            mergeable_ranks={token.encode("latin-1"): i for token, i in name["tokens"].items()},
            special_tokens=name["special_tokens"],
        )
    if name == "bytes":
        ranks = {bytes([byte]): byte for byte in range(256)}
        special = {EOT: 256}
        return tiktoken.Encoding(
            name, pat_str=r"(?s:.)", mergeable_ranks=ranks, special_tokens=special
        )
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
        """The number of sequences of T tokens, each with the token that follows.

        The last tokens, if they are fewer, are dropped.
        """
        return max(0, self.tokens - 1) // T

    def sequence(self, i, T):
        """Sequence i: the T + 1 tokens from number iT on, int64.

        [:-1] is the input, and [1:] are the targets.
        """
        if not 0 <= i < self.sequences(T):
            raise IndexError(f"sequence {i} of {T} tokens: there are {self.sequences(T)}")
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
    row of the source they go; finished.
    """
    path = Path(folder) / "manifest.json"
    if not path.exists():
        return None
    try:
        manifest = json.loads(path.read_bytes())
    except ValueError as e:
        raise UserError(f"{path} is damaged: {e}") from None
    if not isinstance(manifest, dict) or not {"settings", "shards", "finished"} <= manifest.keys():
        raise UserError(f"{path} is not by prepare_fineweb.py. Shards do without: move it away")
    return manifest


def check_shards(folder, manifest):
    """UserError if a shard that the manifest lists is missing, or is another."""
    for name, tokens in manifest["shards"].items():
        path = Path(folder) / name
        if not path.exists():
            raise UserError(f"{path} is missing: manifest.json lists it")
        found = len(read_shard(path))
        if found != tokens:
            raise UserError(f"{path} has {found:,} tokens, not {tokens:,} as in manifest.json")


def load_data(path):
    """What there is to train on: (train, val, name of the tokenizer, what it is, for the log).

    train and val are Shards. path is a folder of shards, a text file, or None for the manual that
    ships with Python. Raises UserError or OSError.
    """
    if path is None:
        return load_manual()
    if path.is_dir() or path == SHARDS:
        return load_shards(path)
    return load_text(path)


def load_shards(folder):
    """The shards of a folder, named like ..._train_000001.bin and ..._val_000000.bin."""
    manifest = read_manifest(folder)
    if manifest is not None:
        if not manifest["finished"]:
            remedy = "run prepare_fineweb.py again with the same flags, and it goes on"
            raise UserError(f"{folder} is only half prepared: {remedy}")
        check_shards(folder, manifest)
    arrays = {"train": [], "val": []}
    for path in sorted(Path(folder).glob("*.bin")):  # the numbers have leading zeros
        # the last of the two words counts, so that no shard is in both
        match = re.search(r"_(train|val)(_\d+)?\.bin$", path.name)
        if match:
            arrays[match[1]].append(read_shard(path))
    for split, found in arrays.items():
        if not found:
            command = "python prepare_fineweb.py"
            raise UserError(f"no *_{split}_*.bin in {folder}: `{command}` makes such shards")
    train = Shards(arrays["train"])
    val = Shards(arrays["val"])
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
            while piece := f.read(min(PIECE, len(tokens) - n)):
                utf8.decode(piece)
                tokens[n : n + len(piece)] = np.frombuffer(piece, "u1")
                n += len(piece)
        utf8.decode(b"", final=True)
    except UnicodeDecodeError as e:
        byte = n - 1 + e.start
        raise UserError(f"{path} is not UTF-8 text: {e.reason} near byte {byte:,}") from None
    tokens = tokens[:n]
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

    train_texts = []
    val_texts = []
    for i, name in enumerate(sorted(topics)):
        texts = val_texts if i % 10 == 6 else train_texts
        texts.append(topics[name].encode())
    train_lines = set(b"\n".join(train_texts).split(b"\n"))
    # in place: each val text without its share of those lines
    for i, text in enumerate(val_texts):
        lines = text.split(b"\n")
        own = [line for line in lines if len(line) < 32 or line not in train_lines]
        val_texts[i] = b"\n".join(own)

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
    pieces = []
    for text in texts:
        pieces.append(np.array([256], "<u2"))
        pieces.append(np.frombuffer(text, "u1"))
    return np.concatenate(pieces)
