"""
The data of a run: the two tokenizers, the shards that prepare_fineweb.py writes, and plain text.

A shard is 256 little-endian int32 (magic 20240520, version 1, count of tokens, zeros) and then the
tokens as uint16: the format of llm.c and modded-nanogpt, so that their shards train here, and ours
there. Each document starts with <|endoftext|>; the end of a shard may cut it.
"""
import hashlib
import json
import os
from pathlib import Path

import numpy as np
import tiktoken

MAGIC = 20240520
VERSION = 1
HEADER = 256  # int32, so 1,024 bytes
SHARDS = Path("data/fineweb_edu")
EOT = "<|endoftext|>"


def get_tokenizer(name):
    """tiktoken's gpt2 (50,257 tokens), or bytes: the 256 bytes and <|endoftext|>, no download."""
    if name == "bytes":
        pattern = r"(?s:.)"
        ranks = {bytes([byte]): byte for byte in range(256)}
    elif name == "gpt2":
        # tiktoken's own expression is slow: one of its alternatives, `\s+(?!\S)`, looks ahead, and
        # so its engine backtracks through all of them. here the alternatives without look-ahead
        # stand in a group of their own, which the engine runs as an automaton. so we need two
        # thirds of tiktoken's time, which saves hours where there are ten billion tokens. the
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

    @classmethod
    def open(cls, folder, split):
        """The shards *_<split>*.bin of a folder. They stay on the disk, mapped into memory."""
        paths = sorted(Path(folder).glob(f"*_{split}*.bin"))  # the numbers have leading zeros
        if not paths:
            command = "python prepare_fineweb.py"
            raise ValueError(f"no *_{split}*.bin in {folder}: `{command}` makes them")
        return cls(read_shard(path) for path in paths)

    def sequences(self, T):
        """The number of sequences of T tokens, each with the token that follows. The last tokens,
        if they are fewer, are dropped."""
        return max(0, self.tokens - 1) // T

    def sequence(self, i, T):
        """Sequence i: the T + 1 tokens from number iT on, int64. [:-1] is the input, [1:] the
        targets."""
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
        """A sha256 that tells data apart: of each array's length and its first and last million
        tokens."""
        # all of them would be 20 GB to read before each run
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


def load_manifest(folder):
    """What manifest.json says of the shards in a folder. Without one: gpt2, like llm.c's."""
    path = Path(folder) / "manifest.json"
    if not path.exists():
        return {"tokenizer": "gpt2", "shards": []}
    try:
        manifest = json.loads(path.read_text())
    except ValueError as e:
        raise ValueError(f"{path} is damaged: {e}") from None
    if not isinstance(manifest, dict) or not {"tokenizer", "shards"} <= set(manifest):
        raise ValueError(f"{path} was not written by prepare_fineweb.py: move it away")
    return manifest


def load_data(path):
    """
    What there is to train on: (train, val, name of the tokenizer, what it is, for the log).
    path is a folder of shards, a text file, or None for the manual that ships with Python.
    Raises ValueError or OSError.
    """
    if path is None:
        return load_manual()
    if path.is_dir() or path == SHARDS:
        return load_shards(path)
    return load_text(path)


def load_shards(folder):
    manifest = load_manifest(folder)
    for shard in manifest["shards"]:
        read_shard(folder / shard["file"])  # a missing one would go unnoticed below
    train = Shards.open(folder, "train")
    val = Shards.open(folder, "val")
    sha256 = Shards(train.arrays + val.arrays).fingerprint()
    what = dict(data=str(folder), data_sha256=sha256, val="the val shards")
    return train, val, manifest["tokenizer"], what


def load_text(path):
    """The bytes of a text file. Its last tenth is val."""
    text = path.read_bytes()
    try:
        text.decode()
    except UnicodeDecodeError as e:
        raise ValueError(f"{path} is not UTF-8 text: {e}") from None
    tokens = byte_tokens([text])
    n_train = len(tokens) - len(tokens) // 10
    train = Shards([tokens[:n_train]])
    val = Shards([tokens[n_train:]])
    sha256 = hashlib.sha256(text).hexdigest()
    what = dict(data=str(path), data_sha256=sha256, val="the last tenth")
    return train, val, "bytes", what


def load_manual():
    """
    The bytes of Python's manual. Val is every tenth topic by name, from number 6 on: eight topics,
    a ninth of the text in each Python from 3.7 to 3.13. The manual repeats itself, and what stands
    in train tests nothing, so val loses the lines that it shares with train. Lines of less than 32
    bytes may stay: two topics can well say "Example:" without one being a copy of the other.
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
        # of the splits and not of the manual: the same text, split in another way, is other data
        data_sha256=Shards(train.arrays + val.arrays).fingerprint(),
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


def lock(file, folder):
    """Locks a folder until file, an open file in it, is closed. ValueError if it is locked."""
    try:
        import fcntl
    except ImportError:
        return  # Windows has no fcntl, so there is no lock
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"another run is writing to {folder}") from None
    except OSError:
        return  # some network file systems have no locks
