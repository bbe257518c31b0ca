"""
What a run reads: two long arrays of tokens, train and val, and the tokenizer that made them.

A folder of prepare_fineweb.py has train.bin and val.bin, plain little-endian uint16 as in nanoGPT,
whose data sets train here, too. Each document starts with <|endoftext|>.
"""
from pathlib import Path

import numpy as np
import tiktoken
import torch

EOT = "<|endoftext|>"
FINEWEB = Path("data/fineweb_edu")  # where prepare_fineweb.py writes


def get_tokenizer(name):
    """tiktoken's gpt2, bytes (no download), or a dict of what tiktoken.Encoding takes."""
    if name == "bytes":
        ranks = {bytes([byte]): byte for byte in range(256)}
        name = dict(name=name, pat_str=r"(?s:.)", mergeable_ranks=ranks, special_tokens={EOT: 256})
    return tiktoken.Encoding(**name) if isinstance(name, dict) else tiktoken.get_encoding(name)


def load_data(path):
    """(train, val, tokenizer). path: a folder of .bin, a text file, or None: Python's manual."""
    if path is None:
        return *load_manual(), "bytes"
    if Path(path).is_dir():
        train = load_bin(Path(path) / "train.bin")
        val = load_bin(Path(path) / "val.bin")
        if (Path(path) / "meta.pkl").exists():  # of nanoGPT. To load a pickle may run code
            print(f"{path}/meta.pkl is not read: the tokens are taken for GPT-2's in samples")
        return train, val, "gpt2"
    return *load_text(path), "bytes"


def load_sequences(data, numbers, T):
    """These sequences, (len(numbers), T + 1) int64: [:-1] is the input, [1:] are the targets."""
    tokens = np.stack([data[i * T : i * T + T + 1] for i in numbers])
    tokens = torch.from_numpy(tokens.astype(np.int64))
    return tokens.pin_memory() if torch.cuda.is_available() else tokens  # copied without a wait


def load_bin(path):
    """The tokens of a file, which stay on the disk until they are looked at."""
    try:
        return np.memmap(path, "<u2", "r")
    except (OSError, ValueError) as e:
        raise ValueError(f"{path} can't be read as tokens: {e}") from e


def load_text(path):
    """The bytes of a text file. The last tenth is val."""
    try:
        text = Path(path).read_bytes()
        text.decode()
    except (OSError, UnicodeDecodeError) as e:
        hint = "prepare_fineweb.py makes data/fineweb_edu"
        raise ValueError(f"--data={path} can't be read as UTF-8 text: {e} ({hint})") from e
    tokens = byte_tokens([text])
    n_train = len(tokens) - len(tokens) // 10
    return tokens[:n_train], tokens[n_train:]


def load_manual():
    """The bytes of Python's manual. Val is every tenth topic, from number 6 on.

    The manual repeats itself. So val loses the lines that train has, too, unless they are short.
    """
    from pydoc_data.topics import topics

    texts = [topics[name].encode() for name in sorted(topics)]
    train = [text for i, text in enumerate(texts) if i % 10 != 6]
    seen = set(b"\n".join(train).split(b"\n"))
    val = []
    for text in texts[6::10]:
        lines = text.split(b"\n")
        val.append(b"\n".join(line for line in lines if len(line) < 32 or line not in seen))
    return byte_tokens(train), byte_tokens(val)


def byte_tokens(texts):
    """Documents, given as bytes: <|endoftext|> and the bytes of each."""
    pieces = []
    for text in texts:
        pieces += [np.array([256], "<u2"), np.frombuffer(text, "u1").astype("<u2")]
    return np.concatenate(pieces)
