"""
What a run reads: two long arrays of tokens, train and val, and the tokenizer that made them.

A folder of prepare_fineweb.py has train.bin and val.bin, plain little-endian uint16 as in nanoGPT,
whose data sets work here, too. Each document starts with <|endoftext|>.
"""
import pickle
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import tiktoken
import torch

EOT = "<|endoftext|>"
FINEWEB = Path("data/fineweb_edu")  # where prepare_fineweb.py writes


def get_tokenizer(name):
    """tiktoken's gpt2, "bytes", which needs no download, or "letters: abc", see Letters.

    OSError if GPT-2's vocabulary can't be had.
    """
    if name.startswith("letters:"):
        return Letters(name.removeprefix("letters:"))
    if name == "bytes":
        ranks = {bytes([byte]): byte for byte in range(256)}
        return tiktoken.Encoding(name, pat_str=r"(?s:.)", mergeable_ranks=ranks,
                                 special_tokens={EOT: 256})
    try:
        return tiktoken.get_encoding(name)
    except OSError as e:  # there is no network
        raise OSError(f"GPT-2's vocabulary can't be fetched: {e}. Where there is no network, set "
                      "TIKTOKEN_CACHE_DIR to a folder in which tiktoken has kept it") from e


class Letters:
    """The tokenizer of nanoGPT's character data: token i is letter i. Behind them <|endoftext|>."""

    def __init__(self, letters):
        self.letters = letters
        self.eot_token = len(letters)
        self.n_vocab = len(letters) + 1

    def encode_ordinary(self, text):
        unknown = set(text) - set(self.letters)
        if unknown:
            raise ValueError(f"the tokenizer has no {min(unknown)!r}: its letters are those of "
                             "the text that was trained")
        return [self.letters.index(letter) for letter in text]

    def encode(self, text, allowed_special=()):
        return self.encode_ordinary(text)

    def decode_single_token_bytes(self, token):
        return [*self.letters, EOT][token].encode()

    def decode(self, tokens, errors="strict"):
        return "".join([*self.letters, EOT][token] for token in tokens)


class PlainUnpickler(pickle.Unpickler):
    """Loads dicts, strings and numbers. A pickle that names a class or a function is refused."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it would run {module}.{name}")


def load_data(path):
    """(train, val, tokenizer). path: a folder of .bin, a text file, or None: Python's manual.

    ValueError if it can't be read, or has a token that is not in the tokenizer.
    """
    if path is None:
        return *load_manual(), "bytes"
    path = Path(path).expanduser()
    if not path.is_dir():
        return *load_text(path), "bytes"
    train, val = load_bin(path / "train.bin"), load_bin(path / "val.bin")
    tokenizer = load_letters(path / "meta.pkl") if (path / "meta.pkl").exists() else "gpt2"
    n_vocab = get_tokenizer(tokenizer).n_vocab
    for tokens in (train, val):
        for first in range(0, len(tokens), 2**24):  # in pieces: it may not fit into the memory
            largest = tokens[first : first + 2**24].max()
            if largest >= n_vocab:
                raise ValueError(f"{path} has a token {largest}, and its tokenizer only {n_vocab}")
    return train, val, tokenizer


def load_letters(path):
    """The tokenizer of a meta.pkl of nanoGPT. No code in the file is run."""
    try:
        with open(path, "rb") as f:
            itos = PlainUnpickler(f).load()["itos"]
        return "letters:" + "".join(itos[i] for i in range(len(itos)))
    except Exception as e:  # a file can be wrong in many ways
        raise ValueError(f"{path} can't be read as nanoGPT's letters: {e!r}") from e


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
    except FileNotFoundError as e:
        hint = "prepare_fineweb.py makes it" if path == FINEWEB else "name a folder or a text file"
        raise ValueError(f"--data={path} is not there: {hint}") from e
    except (OSError, UnicodeDecodeError) as e:
        hint = " (give the folder of a .bin)" if path.suffix == ".bin" else ""
        raise ValueError(f"--data={path} can't be read as UTF-8 text: {e}{hint}") from e
    tokens = byte_tokens([text])
    n_train = len(tokens) - len(tokens) // 10
    return tokens[:n_train], tokens[n_train:]


def load_manual():
    """The bytes of Python's manual. Val is every tenth topic, from number 6 on.

    The manual repeats itself. So lines of 32 bytes or more that train has, too, are left out of
    val. The manual differs a little between versions of Python, and so do the losses.
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


@contextmanager
def one_sentence(program, *errors):
    """Ends a program with one sentence for errors that its user can fix.

    These are Ctrl-C, what is wrong with a file or a disk, too little memory, and `errors`. Any
    other error is a programmer's, and keeps its traceback.
    """
    if hasattr(sys.stdout, "reconfigure"):  # not every pipe can take every letter
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(f"\n{program}: stopped")
    except (OSError, MemoryError, *errors) as e:
        sys.exit(f"{program}: {e}")
    except RuntimeError as e:
        # PyTorch has no classes for these errors, but their texts have these words
        why = {"out of memory": "too little memory", "can't allocate memory": "too little memory",
               "unexpected pos": "is the disk full?"}
        found = [why[words] for words in why if words in str(e)]
        if not found:
            raise
        sys.exit(f"{program}: {found[0]} ({str(e).splitlines()[0]:.150})")
