"""
Text to token shards, the two tokenizers, and reading shards.

A shard is 256 little-endian int32 (magic 20240520, version 1, token count, zeros), then the tokens as uint16: the
format of llm.c and modded-nanogpt, whose shards run here and the other way round.
"""
import argparse
import hashlib
import json
import math
import re
from pathlib import Path

import numpy as np
import tiktoken

MAGIC, VERSION, HEADER = 20240520, 1, 256
EOT = "<|endoftext|>"


class Parser(argparse.ArgumentParser):
    """argparse, but an error is one line."""

    def __init__(self, **kwargs):
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message):
        """Ends the program for a flag that can't be understood."""
        self.exit(2, f"{self.prog}: {message} (--help lists the flags)\n")

    def fail(self, reason):
        """Ends the program for anything else that can't be done."""
        self.exit(1, f"{self.prog}: {reason}\n")


def count(text):
    """A flag's whole number of at least 1, also written 1e9."""
    try:
        value = float(text)
        if value >= 1 and value == int(value):
            return int(value)
    except (ValueError, OverflowError):
        pass
    raise argparse.ArgumentTypeError(f"needs a whole number of at least 1, like 1000 or 1e9, not {text!r}")


def whole(text):
    """A flag's whole number of at least 0."""
    return 0 if text == "0" else count(text)


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


def pick_device(name=None):
    """torch.device(name), or cuda where there is one, else cpu. ValueError for one that can't be used here."""
    import torch

    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=name, dtype=torch.float64).item()  # rotary angles need it, and mps has none
    except (RuntimeError, AssertionError, TypeError) as e:
        raise ValueError(f"device {name} can't be used here: {str(e).splitlines()[0][:70]}") from None
    return torch.device(name)


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
    manifest = Path(folder) / "manifest.json"
    return json.loads(manifest.read_text())["tokenizer"] if manifest.exists() else "gpt2"
