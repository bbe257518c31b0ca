"""
The data of a run: the two tokenizers, the shards that prepare_fineweb.py writes, and plain text.

A shard is 256 little-endian int32 (magic 20240520, version 1, count of tokens, zeros) and then the
tokens as uint16: the format of llm.c and modded-nanogpt, so that their shards train here, and ours
there. Each document starts with <|endoftext|>. Our shards end with a whole document, theirs may end
within one.
"""
import argparse
import hashlib
import json
import os
import re
from pathlib import Path

import numpy as np
import tiktoken

MAGIC = 20240520
VERSION = 1
HEADER = 256  # int32, so 1,024 bytes
SHARDS = Path("data/fineweb_edu")
EOT = "<|endoftext|>"


def count(text):
    """The whole number of a flag, 0 or more, which may be written like 1e9. A type for argparse."""
    try:
        number = int(text)  # keeps all digits of a long seed. A float would round it
    except ValueError:
        number = float(text) if re.fullmatch(r"\d+(\.\d*)?(e\+?\d+)?", text) else -1
    if not text.strip().isascii() or "_" in text:
        number = -1
    if number < 0 or number == float("inf") or number != int(number):
        right = "a whole number from 0 on, like 12 or 1e9"
        raise argparse.ArgumentTypeError(f"{text!r} is not {right}")
    return int(number)


def get_tokenizer(name):
    """tiktoken's gpt2 (50,257 tokens), or bytes: the 256 bytes and <|endoftext|>, no download."""
    if name == "bytes":
        pattern = r"(?s:.)"
        ranks = {bytes([byte]): byte for byte in range(256)}
    elif name == "gpt2":
        # tiktoken's own expression is slow: one of its alternatives, `\s+(?!\S)`, looks ahead, and
        # so its engine backtracks through all of them. Here the alternatives without look-ahead
        # stand in a group of their own, which the engine runs as an automaton. So we need two
        # thirds of tiktoken's time, which saves hours where there are ten billion tokens. The
        # tokens are the same: there is a test
        words = r"(?:'(?:[sdmt]|ll|ve|re)| ?(?:\p{L}+|\p{N}+|[^\s\p{L}\p{N}]+))"
        pattern = words + r"|\s++$|\s+(?!\S)|\s"
        ranks = tiktoken.get_encoding("gpt2")._mergeable_ranks
    else:
        raise ValueError(f"the tokenizer must be gpt2 or bytes, not {name!r}")
    special = {EOT: len(ranks)}  # after all others
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


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
    """The tokens of one shard, mapped into memory. ValueError if the file is no shard or is cut."""
    header = np.fromfile(path, "<i4", HEADER)
    if len(header) < HEADER or header[0] != MAGIC or header[1] != VERSION:
        header = f"magic {MAGIC}, version {VERSION}, 256 int32"
        raise ValueError(f"{path} is not a token shard ({header})")
    tokens = int(header[2])
    if os.path.getsize(path) != 4 * HEADER + 2 * tokens:
        raise ValueError(f"{path} is cut or damaged: its header says {tokens:,} tokens")
    return np.memmap(path, "<u2", "r", offset=4 * HEADER, shape=(tokens,))  # nothing is read yet


def read_manifest(folder):
    """What prepare_fineweb.py noted of a folder of shards. None where it has not been."""
    path = Path(folder) / "manifest.json"
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text())
    except ValueError as e:
        raise ValueError(f"{path} is damaged: {e}") from None


def load_data(path):
    """What there is to train on: (train, val, name of the tokenizer, what it is, for the log).

    train and val are Shards. path is a folder of shards, a text file, or None for the manual that
    ships with Python. Raises ValueError or OSError.
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
        raise ValueError(f"{folder} is only half prepared: {remedy}")
    arrays = {"train": [], "val": []}
    for path in sorted(Path(folder).glob("*.bin")):  # the numbers have leading zeros
        # the last of the two words counts, so that no shard is in both
        match = re.search(r"_(train|val)(_\d+)?\.bin$", path.name)
        if match:
            arrays[match[1]].append(read_shard(path))
    for split, found in arrays.items():
        if not found:
            command = "python prepare_fineweb.py"
            raise ValueError(f"no *_{split}_*.bin in {folder}: `{command}` makes such shards")
    train = Shards(arrays["train"])
    val = Shards(arrays["val"])
    what = dict(data=str(folder), data_sha256=fingerprint(train, val), val="the val shards")
    return train, val, "gpt2", what


def fingerprint(train, val):
    """A sha256 that tells data apart, and how it was split."""
    both = f"train {train.fingerprint()} val {val.fingerprint()}"
    return hashlib.sha256(both.encode()).hexdigest()


def load_text(path):
    """The bytes of a text file. The last tenth is val."""
    text = path.read_bytes()
    try:
        text.decode()
    except UnicodeDecodeError as e:
        raise ValueError(f"{path} is not UTF-8 text: {e}") from None
    tokens = byte_tokens([text])
    n_train = len(tokens) - len(tokens) // 10
    train = Shards([tokens[:n_train]])
    val = Shards([tokens[n_train:]])
    # of the whole file: two texts may begin and end alike
    sha256 = hashlib.sha256(fingerprint(train, val).encode() + text).hexdigest()
    what = dict(data=str(path), data_sha256=sha256, val="the last tenth")
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
