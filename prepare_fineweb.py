"""
Text to token shards: FineWeb-Edu, or any text of yours. data.py describes the format.

    python prepare_fineweb.py                   # FineWeb-Edu, sample-10BT, to data/fineweb_edu
    python prepare_fineweb.py --pretokenized    # ready shards from the hub: minutes, not an hour
    python prepare_fineweb.py --source=books.jsonl --out=data/books --val_tokens=1e5

A .jsonl has a document in each line, like {"text": "..."}, and a .parquet has a column text.
The first shard is val, the others are train. Each ends with a whole document. Stop it whenever you
like: the same command goes on after the last whole shard, and ends in the same bytes.
"""
import glob
import json
import logging
import os
import re
import threading
import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

# common first: from then on Ctrl-C ends in one line
from common import UserError, cli, flag, locked, parse_flags, write_json

import fsspec
import huggingface_hub
import numpy as np
import tiktoken
from huggingface_hub.errors import HTTPError
from pyarrow import ArrowException
from pyarrow.parquet import ParquetFile
from tqdm import tqdm

from data import HEADER, MAGIC, SHARDS, VERSION
from data import check_file, get_tokenizer, read_manifest, read_shard

KINDS = (".parquet", ".jsonl", ".jsonl.gz")  # of files that we read
ROWS = 32  # documents that a thread tokenizes at a time
FINEWEB = "HuggingFaceFW/fineweb-edu"
READY = "kjj0/finewebedu10B-gpt2"  # the same in shards


@dataclass
class Config:
    source: str = flag(FINEWEB, "a .parquet, .jsonl or .jsonl.gz, a folder, or a hub dataset")
    name: str | None = flag(None, "config of the dataset; default of fineweb-edu: sample-10BT")
    out: Path = flag(SHARDS, "folder for the shards")
    tokens: int | None = flag(None, "stop after so many, val included; default: all")
    shard_tokens: int = flag(100_000_000, "a shard ends with the document that reaches so many")
    val_tokens: int | None = flag(None, "the same for val, the first; default: --shard_tokens")
    pretokenized: bool = flag(False, f"fetch whole shards from the hub; default --source: {READY}")


@contextmanager
def naming(what, *more):
    """Turns the errors of files, of what decodes them and of the network into a UserError."""
    try:
        yield
    except (OSError, EOFError, zlib.error, ArrowException, HTTPError, *more) as e:
        raise UserError(f"{what}: {e or type(e).__name__}") from e


def find_files(config):
    """The files of the source, in order: [path, bytes, time of the last change] of each."""
    if os.path.isdir(config.source):
        found = glob.glob(glob.escape(config.source) + "/**", recursive=True)
        paths = sorted(path for path in found if not os.path.isdir(path))
    elif os.path.exists(config.source) or config.source.endswith((*KINDS, ".txt")):
        paths = [config.source]
    else:
        paths = find_dataset(config)
    # a copy of a dataset of the hub has a README
    return [describe_file(path) for path in paths if not path.endswith("README.md")]


def find_dataset(config):
    """The files of a dataset of the hub: those of the split train."""
    os.environ["USE_TORCH"] = "0"  # or datasets imports torch: 0.2 GB for nothing
    from datasets import load_dataset_builder

    with naming(config.source, ValueError):  # of what is wrong with the name
        builder = load_dataset_builder(config.source, config.name)
    return [str(path) for path in builder.config.data_files["train"]]


def describe_file(path):
    """[path, bytes, time of the last change]. UserError if we can't read such a file."""
    if not path.endswith(KINDS):
        raise UserError(
            f"{path}: we read only {', '.join(KINDS)}. A text can go to `python train.py "
            f'--data={path}` as it is. Or make a .jsonl, each line a document {{"text": "..."}}')
    if path.startswith("hf://"):
        return [path, None, None]  # the path names the commit
    check_file(path)
    return [path, os.path.getsize(path), os.stat(path).st_mtime_ns]


def read_documents(files, first, skip):
    """Yields ([number of the file, number of the row], text), after row skip of the first file."""
    for number in range(first, len(files)):
        path = files[number][0]
        with naming(path, UnicodeDecodeError), fsspec.open(path, compression="infer") as f:
            rows = read_parquet(f, path) if path.endswith(".parquet") else f
            for row, content in enumerate(rows, 1):
                if row > skip and content != b"\n":
                    yield [number, row], text_of(content, f"{path}, row {row}")
        skip = 0


def read_parquet(f, where):
    """Yields a {"text": ...} for each row."""
    # in small steps and without a buffer, or arrow reads far ahead: half a gigabyte
    parquet = ParquetFile(f, buffer_size=2**20, pre_buffer=False)
    if "text" not in parquet.schema_arrow.names:
        raise UserError(f"{where}: there is no column text")
    for batch in parquet.iter_batches(ROWS, columns=["text"], use_threads=False):
        yield from batch.to_pylist()


def text_of(content, where):
    """The text of a row, which is a line of JSON or a dict."""
    try:
        if isinstance(content, bytes):
            content = json.loads(content.decode("utf-8-sig"))
        text = content["text"]
    except (ValueError, TypeError, KeyError) as e:
        raise UserError(f'{where} is not like {{"text": "..."}}: {e}') from e
    if not isinstance(text, str):
        raise UserError(f"{where}: its text is not a string but {text!r:.40}")
    return text


# tiktoken's expression for gpt2, but the alternatives that don't look ahead stand in a group. Its
# engine runs the group as an automaton, and would backtrack through alternatives that stand alone.
# That takes two thirds of the time, and the tokens are the same: there is a test
PATTERN = (r"(?:'(?:[sdmt]|ll|ve|re)| ?(?:\p{L}+|\p{N}+|[^\s\p{L}\p{N}]+))"
           r"|\s++$|\s+(?!\S)|\s")
BLANK = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # what its \s takes
worker = threading.local()


def start_worker():
    # each thread has a tokenizer of its own, because on a shared one they wait for one another
    gpt2 = get_tokenizer("gpt2")
    worker.tokenizer = tiktoken.Encoding(
        "gpt2", pat_str=PATTERN, mergeable_ranks=gpt2._mergeable_ranks,
        special_tokens=gpt2._special_tokens)


def encode(documents):
    """(place, text) of each document becomes (place, tokens), from <|endoftext|> on."""
    eot = worker.tokenizer.eot_token
    encoded = []
    for place, text in documents:
        try:
            parts = [worker.tokenizer.encode_to_numpy(text, disallowed_special=())]
        except ValueError:
            parts = encode_odd(text)
        encoded.append((place, np.concatenate([[eot], *parts]).astype("<u2")))
    return encoded


def encode_odd(text):
    """The tokens of what tiktoken refuses: half a surrogate pair (U+FFFD), or a million blanks."""
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    # before the last of several blanks the expression always cuts, so we may cut there
    parts = re.split(f"(?=[{BLANK}][^{BLANK}])(?<=[{BLANK}]{{1000}})", text)
    return [worker.tokenizer.encode_to_numpy(part, disallowed_special=()) for part in parts]


def tokenize(documents):
    """Encodes documents in many threads, and yields them in their order."""
    get_tokenizer("gpt2")  # where there is no network, it fails here and says why
    threads = os.cpu_count()
    pending = deque()
    # threads suffice, because tiktoken releases Python's lock while it works
    with ThreadPoolExecutor(threads, initializer=start_worker) as pool:
        while batch := list(islice(documents, ROWS)):
            pending.append(pool.submit(encode, batch))
            if len(pending) > 2 * threads:
                yield from pending.popleft().result()
        for future in pending:
            yield from future.result()


def write_shards(config, manifest, check_lock):
    """Tokenizes the source into the shards that the manifest does not list yet."""
    shards = manifest["shards"]
    done = sum(shards.values())
    end = config.tokens or float("inf")
    documents = tokenize(read_documents(manifest["files"], *manifest["next"]))
    bar = tqdm(total=config.tokens, initial=done, unit=" tokens", unit_scale=True, disable=None)
    while done < end:
        path = config.out / f"finewebedu_{'train' if shards else 'val'}_{len(shards):06d}.bin"
        limit = config.shard_tokens if shards else config.val_tokens
        tokens = 0
        with open(path, "wb") as f:
            f.write(bytes(4 * HEADER))  # filled in when the tokens have been counted
            for place, document in documents:
                f.write(document)
                tokens += len(document)
                bar.update(len(document))
                if tokens >= min(limit, end - done):
                    break
            f.seek(0)
            f.write(np.array([MAGIC, VERSION, tokens], "<i4"))
            f.flush()
            os.fsync(f.fileno())
        if tokens == 0:  # the source has ended
            os.remove(path)
            break
        # the shard counts from here on. If we are killed before, it is written again
        check_lock()
        shards[path.name] = tokens
        manifest["next"] = place
        write_json(config.out / "manifest.json", manifest)
        done += tokens
    bar.close()


def fetch_shards(config, manifest, check_lock):
    """Fetches ready shards from the hub until there are --tokens, and not val alone."""
    shards = manifest["shards"]
    with naming(config.source, ValueError):  # of what can't be the name of a dataset
        names = huggingface_hub.list_repo_files(config.source, repo_type="dataset")
    names = [name for name in names if name.endswith(".bin") and "/" not in name]
    for name in sorted(names, key=lambda name: name[-10:]):  # by number: 000000.bin is val
        if len(shards) > 1 and sum(shards.values()) >= (config.tokens or float("inf")):
            break
        with naming(f"{config.source}, {name}", RuntimeError):  # of the library for downloads
            path = huggingface_hub.hf_hub_download(
                config.source, name, repo_type="dataset", local_dir=config.out)
        check_lock()
        shards[name] = len(read_shard(path))
        write_json(config.out / "manifest.json", manifest)
        print(f"{name}: {sum(shards.values()):,} tokens so far")


def run(config, check_lock):
    """Brings the folder config.out from what it holds to what the flags ask for."""
    out = config.out
    settings = {name: value for name, value in asdict(config).items() if name != "out"}
    begun = read_manifest(out)
    if begun is None and any(out.glob("*.bin")):
        raise UserError(f"{out} has shards from elsewhere: choose another --out")
    manifest = dict(settings=settings, files=None, shards={}, next=[0, 0], finished=False)
    if begun is not None and begun["shards"]:
        manifest = begun  # otherwise there is nothing yet that other flags could spoil
    shards = manifest["shards"]
    another = "choose another --out, or delete it"
    for name, there in manifest["settings"].items():
        if there != settings.get(name):
            raise UserError(f"{out} was begun with --{name}={there}: {another}")
    # what is not on this disk is a commit of the hub, and stays as it is
    if not config.pretokenized and (not shards or os.path.exists(config.source)):
        files = find_files(config)
        if shards and files != manifest["files"]:
            raise UserError(f"{config.source} has changed since {out} was begun: {another}")
        manifest["files"] = files
    if manifest["finished"]:
        print(f"{out} is finished: delete it to begin anew")
        return
    if manifest != begun:
        # this says whose the shards are, before there is one
        write_json(out / "manifest.json", manifest)
    if config.pretokenized:
        fetch_shards(config, manifest, check_lock)
    else:
        write_shards(config, manifest, check_lock)
    if len(shards) < 2:
        less = "choose a smaller --val_tokens and another --out"
        raise UserError(f"{config.source}: {sum(shards.values()):,} tokens are all val: {less}")
    manifest["finished"] = True
    write_json(out / "manifest.json", manifest)
    print(f"{out}: {sum(shards.values()):,} tokens in {len(shards)} shards")


def main(argv=None):
    config = Config(**parse_flags(Config, argv, __doc__))
    if config.source == FINEWEB and config.pretokenized:
        config.source = READY
    elif config.source == FINEWEB:
        config.name = config.name or "sample-10BT"
    config.source = Path(config.source).expanduser().as_posix()  # as a dataset's name is written
    config.val_tokens = config.val_tokens or config.shard_tokens
    if max(config.shard_tokens, config.val_tokens) > 2e9:
        raise UserError("a shard has 2e9 tokens at most, since it counts them in an int32")
    logging.disable()  # of the libraries' retries: we print the error that ends the run
    with locked(config.out) as check_lock:
        run(config, check_lock)


if __name__ == "__main__":
    cli(main)
