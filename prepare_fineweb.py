"""
Text to tokens: FineWeb-Edu, or a corpus of yours, to train.bin and val.bin, see data.py.

$ python prepare_fineweb.py --ready --tokens=3e9    # fetches FineWeb-Edu as tokens: minutes
$ python prepare_fineweb.py                         # tokenizes sample-10BT itself: an hour
$ python prepare_fineweb.py --source=books --out=data/books --val_tokens=1e5

A .jsonl or .json has documents like {"text": "..."}, a .parquet has a column text, a .txt is one
document, and a .bin has tokens in llm.c's format. All but .bin may end in .gz or .zst. What is
interrupted starts over.
"""
import glob
import math
import os
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import tyro
from datasets import load_dataset
from huggingface_hub import hf_hub_download, list_repo_files
from tqdm import tqdm

from data import FINEWEB, get_tokenizer, one_sentence

READY = "kjj0/finewebedu10B-gpt2"  # FineWeb-Edu as shards of llm.c, the first of them val
JSON = dict(path="json", chunksize=2**28)  # its lines may differ in other keys
KINDS = {".jsonl": JSON, ".json": JSON, ".parquet": dict(path="parquet"),
         ".txt": dict(path="text", sample_by="document")}


@dataclass
class Config:
    source: str | None = None  # file, or folder with files of these kinds (FineWeb-Edu)
    ready: bool = False  # fetch FineWeb-Edu as tokens
    out: Path = FINEWEB  # folder for train.bin and val.bin
    tokens: float = math.inf  # stop after so many, val included
    val_tokens: float = 1e8  # the first so many are val

    def __post_init__(self):
        self.out = Path(self.out).expanduser()
        if not 1 <= self.val_tokens < self.tokens:
            raise ValueError("val_tokens must be 1 or more and below tokens: the rest is train")
        if self.out.exists():
            raise ValueError(f"{self.out} is there already: delete it, or choose another --out")
        if self.source is not None:
            self.source = os.path.expanduser(self.source)
            if self.ready:
                raise ValueError("--ready fetches FineWeb-Edu, and --source is your own text")
            if not os.path.exists(self.source):
                raise ValueError(f"--source={self.source} is not there")


def tokenize(*args, **options):
    """Yields the tokens of each document of a data set, from <|endoftext|> on."""
    enc = get_tokenizer("gpt2")
    rows = iter(load_dataset(*args, **options, split="train", streaming=True))
    while batch := [row["text"] for row in islice(rows, 1024)]:
        for tokens in enc.encode_ordinary_batch(batch, num_threads=os.cpu_count()):
            yield np.array([enc.eot_token, *tokens], "<u2")


def read_shard(path):
    """Yields the tokens of a shard of llm.c, in pieces. They come behind 256 int32."""
    magic, _, n = np.fromfile(path, "<i4", count=3)
    tokens = np.fromfile(path, "<u2", offset=1024)
    if magic != 20240520 or len(tokens) != n:
        raise ValueError("it is not a whole shard of llm.c")
    yield from np.array_split(tokens, 100)


def read_ready():
    """Yields the tokens of FineWeb-Edu, which somebody else has made."""
    names = [name for name in list_repo_files(READY, repo_type="dataset") if name.endswith(".bin")]
    for name in sorted(names, key=lambda name: name[-10:]):  # by number
        yield from read_shard(hf_hub_download(READY, name, repo_type="dataset"))


def find_files(source, without):
    """Yields (path, its tokens) of a file, or of all below a folder, by name (shards by number)."""
    unread = []
    folders = os.walk(source, onerror=lambda e: unread.append(e.filename))
    paths = []
    if not os.path.isdir(source):
        paths, folders = [Path(source)], []
    for folder, subfolders, names in folders:
        paths += [Path(folder, name) for name in names]
        # it does not walk into folders that are links
        unread += filter(os.path.islink, [os.path.join(folder, name) for name in subfolders])
    paths = [path for path in paths if path.parent != without]
    for path in sorted(paths, key=lambda p: p.name[-10:] if p.suffix == ".bin" else str(p)):
        kind = Path(path.name.lower().removesuffix(".gz").removesuffix(".zst")).suffix
        if kind == ".bin":
            yield path, read_shard(path)
        elif kind in KINDS and path.stat().st_size > 0:
            yield path, tokenize(data_files=glob.escape(str(path)), **KINDS[kind])
        else:
            unread.append(str(path))
    if unread:
        more = f" and {len(unread) - 5} more" if len(unread) > 5 else ""
        tqdm.write(f"not read: {', '.join(unread[:5])}{more}")


def read(config, without):
    """Yields the tokens of all documents. without: a folder in which nothing is read."""
    if config.source:
        files = find_files(config.source, without)
    elif config.ready:
        files = [("FineWeb-Edu", read_ready())]
    else:
        files = [("FineWeb-Edu", tokenize("HuggingFaceFW/fineweb-edu", "sample-10BT"))]
    for name, documents in files:
        try:
            yield from documents
        except Exception as e:  # a file can be wrong in many ways, and the network away
            raise SystemExit(f"{name} can't be read: {type(e).__name__}: {e}")


def prepare(config):
    temporary = Path(f"{config.out}.tmp")  # it gets its name when it is whole
    temporary.mkdir(parents=True, exist_ok=True)
    total = min(config.tokens, 1e10) if config.source is None else None  # that of sample-10BT
    written = 0
    with (open(temporary / "val.bin", "wb") as val, open(temporary / "train.bin", "wb") as train,
          tqdm(total=total, unit=" tokens", unit_scale=True) as bar):
        for tokens in read(config, without=temporary):
            of_val = max(0, int(config.val_tokens) - written)
            val.write(tokens[:of_val].tobytes())
            train.write(tokens[of_val:].tobytes())
            written += len(tokens)
            bar.update(len(tokens))
            if written >= config.tokens:
                break
    if written <= config.val_tokens:
        raise SystemExit(f"{config.source} has {written:,} tokens, which is not more than "
                         f"--val_tokens={config.val_tokens:,.0f}: nothing is left for train")
    os.rename(temporary, config.out)
    print(f"{config.out} has {written:,} tokens: python train.py --data={config.out}")


def main(argv=None):
    config = tyro.cli(Config, description=__doc__, args=argv, use_underscores=True)
    with one_sentence("prepare_fineweb.py"):
        prepare(config)


if __name__ == "__main__":
    main()
