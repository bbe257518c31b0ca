"""
Text to tokens: FineWeb-Edu, or text of yours, to train.bin and val.bin, see data.py.

$ python prepare_fineweb.py --tokens=3e9              # FineWeb-Edu, as tokens: minutes
$ python prepare_fineweb.py --tokens=3e9 --no-ready   # as text, which it tokenizes: an hour
$ python prepare_fineweb.py --source=books --out=data/books --val_tokens=1e6

A source is a file, or a folder of files. A .txt is one document. A .jsonl or .parquet has a column
"text". Each may be packed, as .gz or .zst. An interrupted run starts over.
"""
import glob
import os
import re
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import tyro
from datasets import load_dataset
from huggingface_hub import hf_hub_download, list_repo_files
from tqdm import tqdm

from cli import one_sentence
from data import FINEWEB, get_tokenizer
from model import Refused

READY = "kjj0/finewebedu10B-gpt2"  # FineWeb-Edu as shards of llm.c, the first of them val
KINDS = {  # of files, and how the library datasets reads them
    "txt": ("text", dict(sample_by="document")),
    "jsonl": ("json", {}),
    "parquet": ("parquet", {}),
}


@dataclass
class Config:
    source: Path | None = None  # your own text (FineWeb-Edu)
    ready: bool = True  # FineWeb-Edu: fetch tokens, which kjj0 has made, and not text
    out: Path = FINEWEB  # folder for train.bin and val.bin
    tokens: float = 1e10  # stop after so many, val included
    val_tokens: float = 1e8  # the first so many are val


def read_source(source):
    """Yields the documents of a file, or of all files below a folder, like {"text": "..."}."""
    paths = sorted(p for p in source.rglob("*") if p.is_file()) if source.is_dir() else [source]
    for ending, (builder, options) in KINDS.items():
        of_kind = [p for p in paths if re.search(rf"\.{ending}(\.gz|\.zst)?$", p.name, re.I)]
        if of_kind:
            files = [glob.escape(str(path)) for path in of_kind]
            yield from load_dataset(builder, data_files=files, split="train", streaming=True,
                                    **options)
        paths = [path for path in paths if path not in of_kind]
    for path in paths:
        tqdm.write(f"not read: {path}")


def tokenize(documents):
    """Yields the tokens of each document, from <|endoftext|> on."""
    enc = get_tokenizer("gpt2")
    documents = iter(documents)
    # all processors share a batch. It is small, since a document may be a book
    while texts := [document["text"] for document in islice(documents, 128)]:
        for tokens in enc.encode_ordinary_batch(texts, num_threads=os.cpu_count()):
            yield np.array([enc.eot_token, *tokens], "<u2")


def fetch():
    """Yields the tokens of the shards, which come behind 256 int32."""
    names = [name for name in list_repo_files(READY, repo_type="dataset") if name.endswith(".bin")]
    for name in sorted(names, key=lambda name: name[-10:]):  # by number
        path = hf_hub_download(READY, name, repo_type="dataset")
        yield from np.array_split(np.fromfile(path, "<u2", offset=1024), 100)


def pieces_of(config):
    if config.source:
        return tokenize(read_source(config.source))
    if config.ready:
        return fetch()
    return tokenize(load_dataset("HuggingFaceFW/fineweb-edu", "sample-10BT", split="train",
                                 streaming=True))


def main(argv=None):
    config = tyro.cli(Config, description=__doc__, args=argv, use_underscores=True)
    with one_sentence():
        if config.source and not config.source.exists():
            raise Refused(f"--source={config.source} is not there")
        if config.out.exists():
            raise Refused(f"{config.out} is there already: delete it, or choose another --out")
        if not 1 <= config.val_tokens < config.tokens:
            raise Refused("val_tokens must be 1 or more, and below tokens: the rest is train")
    temporary = Path(f"{config.out}.tmp")  # it gets its name when it is whole
    temporary.mkdir(parents=True, exist_ok=True)
    written = 0
    with (open(temporary / "val.bin", "wb") as val, open(temporary / "train.bin", "wb") as train,
          tqdm(unit=" tokens", unit_scale=True) as bar):
        for tokens in pieces_of(config):
            of_val = max(0, int(config.val_tokens) - written)
            val.write(tokens[:of_val].tobytes())
            train.write(tokens[of_val:].tobytes())
            written += len(tokens)
            bar.update(len(tokens))
            if written >= config.tokens:
                break
    if written <= config.val_tokens:
        raise SystemExit(f"there are {written:,} tokens, and all of them would be val: choose a "
                         "smaller --val_tokens")
    os.rename(temporary, config.out)
    print(f"{written:,} tokens: python train.py --data={config.out}")


if __name__ == "__main__":
    main()
