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

import fsspec
import huggingface_hub
import numpy as np
import tiktoken
from filelock import FileLock, Timeout
from huggingface_hub.errors import HTTPError
from pyarrow import ArrowException
from pyarrow.parquet import ParquetFile
from tqdm import tqdm

from common import UserError, cli, flag, parse_flags
from data import (HEADER, MAGIC, SHARDS, VERSION, check_file, check_shards, get_tokenizer,
                  read_manifest, read_shard)

KINDS = (".parquet", ".jsonl", ".jsonl.gz")  # of files that we read
ROWS = 32  # documents that a thread tokenizes at a time
FINEWEB = "HuggingFaceFW/fineweb-edu"


@dataclass
class Config:
    source: str = flag(
        FINEWEB, f"a file ({', '.join(KINDS)}), a folder of such files, or a dataset of the hub")
    name: str | None = flag(None, "config of the dataset; default of fineweb-edu: sample-10BT")
    out: Path = flag(SHARDS, "folder for the shards")
    tokens: int | None = flag(
        None, "stop with the document that reaches so many, val included; default: all")
    shard_tokens: int = flag(100_000_000, "a shard ends with the document that reaches so many")
    val_tokens: int | None = flag(
        None, "the same of the first shard, which is val; default: --shard_tokens")
    pretokenized: bool = flag(
        False, "fetch whole shards from the hub; default --source: kjj0/finewebedu10B-gpt2")


def parse(argv):
    config = Config(**parse_flags(Config, argv, __doc__))
    if config.source == FINEWEB and config.pretokenized:
        config.source = "kjj0/finewebedu10B-gpt2"
    elif config.source == FINEWEB:
        config.name = config.name or "sample-10BT"
    elif config.source == "":
        raise UserError("--source: must not be empty")
    config.source = Path(config.source).expanduser().as_posix()  # as a dataset's name is written
    config.val_tokens = config.val_tokens or config.shard_tokens
    for name in ("shard_tokens", "val_tokens"):
        if getattr(config, name) > 2e9:
            raise UserError(f"--{name}: 2e9 at most, since a shard counts them in an int32")
    return config


# -----------------------------------------------------------------------------
# the source


@contextmanager
def naming(what, *more):
    """Turns the errors of files, of what decodes them and of the network into a UserError."""
    try:
        yield
    except (OSError, EOFError, zlib.error, ArrowException, HTTPError, *more) as e:
        raise UserError(f"{what}: {e or type(e).__name__}") from e


def find_files(config):
    """The files of the source, in order: [path, bytes, time of the last change] of each."""
    source = Path(config.source)
    like_file = config.source.lower().endswith((*KINDS, ".txt"))  # not for the hub to find
    if source.is_dir() and config.name is None:
        found = [source / name for name in glob.glob("**", root_dir=source, recursive=True)]
        files = [path for path in found if not path.is_dir() and config.out not in path.parents]
        paths = sorted(str(path) for path in files if path.name != "README.md")
    elif not source.is_dir() and (source.exists() or like_file):
        paths = [config.source]
    else:
        paths = find_dataset(config)
    return [describe_file(path) for path in paths]


def find_dataset(config):
    """The files of a dataset of the hub, or of a folder like one: those of the split train."""
    os.environ["USE_TORCH"] = "0"  # or datasets imports torch: 0.2 GB for nothing
    from datasets import load_dataset_builder
    from yaml import YAMLError

    # what is wrong with the name, or in the head of the README
    with naming(config.source, ValueError, YAMLError):
        builder = load_dataset_builder(config.source, config.name)
    if "train" not in builder.config.data_files:
        raise UserError(f"{config.source}: it has no split train")
    return [str(path) for path in builder.config.data_files["train"]]


def describe_file(path):
    """[path, bytes, time of the last change]. UserError if we can't read such a file."""
    if path.lower().endswith(".txt"):
        raise UserError(
            f"{path}: a .txt does not say where its documents end. To train on it as it is: "
            f"`python train.py --data={path}`. For shards, make a .jsonl of it: for each document "
            'a line {"text": "..."}')
    if not path.lower().endswith(KINDS):
        raise UserError(f"{path}: we read only {', '.join(KINDS)}")
    if path.startswith("hf://"):
        return [path, None, None]  # the path names the commit
    check_file(path)
    return [path, os.path.getsize(path), os.stat(path).st_mtime_ns]


def read_documents(files, first, skip):
    """Yields ([number of the file, number of the row], text), after row skip of the first file."""
    for number in range(first, len(files)):
        path = files[number][0]
        with naming(path), fsspec.open(path, compression="infer") as f:
            rows = ((row, line) for row, line in enumerate(f, 1) if line.strip())
            if path.lower().endswith(".parquet"):
                rows = read_parquet(f, skip, path)
            for row, content in rows:
                if row > skip:
                    yield [number, row], text_of(content, f"{path}, row {row}")
        skip = 0


def read_parquet(f, skip, where):
    """Yields (number of the row, arrow's value of its text). It may leave out the first skip."""
    # in small steps and without a buffer, or arrow reads far ahead: half a gigabyte
    parquet = ParquetFile(f, buffer_size=2**20, pre_buffer=False)
    if "text" not in parquet.schema_arrow.names:
        raise UserError(f"{where}: there is no column text")
    row = 0
    for group in range(parquet.num_row_groups):
        rows = parquet.metadata.row_group(group).num_rows
        if row + rows <= skip:
            row += rows
            continue
        for batch in parquet.iter_batches(ROWS, [group], ["text"], use_threads=False):
            yield from enumerate(batch["text"], row + 1)
            row += len(batch)


def text_of(content, where):
    """The text of a row, which is a line of JSON or a value of arrow."""
    try:
        if isinstance(content, bytes):
            text = json.loads(content.decode("utf-8-sig"))["text"]
        else:
            text = content.as_py()
    except (ValueError, RecursionError, TypeError, KeyError) as e:
        raise UserError(f'{where} is not like {{"text": "..."}}: {e}') from e
    if not isinstance(text, str):
        raise UserError(f"{where}: its text is not a string but {text!r:.40}")
    return text


# -----------------------------------------------------------------------------
# tokens

# tiktoken's expression for gpt2, but the alternatives that don't look ahead stand in a group. Its
# engine runs the group as an automaton, and would backtrack through alternatives that stand alone.
# That takes two thirds of the time, and the tokens are the same: there is a test
PATTERN = (
    r"(?:'(?:[sdmt]|ll|ve|re)| ?(?:\p{L}+|\p{N}+|[^\s\p{L}\p{N}]+))"
    r"|\s++$|\s+(?!\S)|\s"
)
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
    """The tokens of what tiktoken refuses: half a surrogate pair, or a million blanks."""
    # for the half U+FFFD, as in tiktoken's encode_ordinary
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


# -----------------------------------------------------------------------------
# shards


def write_shard(path, documents, limit, bar):
    """Writes documents until they have so many tokens. Returns those, and the last one's place."""
    tokens = 0
    place = None
    with open(path, "wb") as f:
        f.write(bytes(4 * HEADER))  # filled in when the tokens have been counted
        for place, document in documents:
            f.write(document)
            tokens += len(document)
            bar.update(len(document))
            if tokens >= limit:
                break
        f.seek(0)
        f.write(np.array([MAGIC, VERSION, tokens], "<i4"))
        f.flush()
        os.fsync(f.fileno())
    return tokens, place


def write_shards(config, manifest):
    """Tokenizes the source into the shards that the manifest does not list yet."""
    shards = manifest["shards"]
    done = sum(shards.values())
    documents = tokenize(read_documents(manifest["files"], *manifest["next"]))
    bar = tqdm(total=config.tokens, initial=done, unit=" tokens", unit_scale=True, disable=None)
    while config.tokens is None or done < config.tokens:
        name = f"finewebedu_{'train' if shards else 'val'}_{len(shards):06d}.bin"
        limit = config.shard_tokens if shards else config.val_tokens
        if config.tokens is not None:
            limit = min(limit, config.tokens - done)
        tokens, place = write_shard(config.out / name, documents, limit, bar)
        if tokens == 0:  # the source has ended
            os.remove(config.out / name)
            break
        # the shard counts from here on. If we are killed before, it is written again
        shards[name] = tokens
        manifest["next"] = place
        save_manifest(config.out, manifest)
        done += tokens
    bar.close()


def fetch_shards(config, manifest):
    """Fetches ready shards from the hub until there are --tokens, and not val alone."""
    shards = manifest["shards"]
    with naming(config.source, ValueError):  # of what can't be the name of a dataset
        names = huggingface_hub.list_repo_files(config.source, repo_type="dataset")
    names = [name for name in names if name.endswith(".bin") and "/" not in name]
    for name in sorted(names, key=lambda name: name[-10:]):  # by number: 000000.bin is val
        enough = config.tokens is not None and sum(shards.values()) >= config.tokens
        if name in shards or (enough and len(shards) > 1):
            continue
        with naming(f"{config.source}, {name}", RuntimeError):  # of the library for downloads
            path = huggingface_hub.hf_hub_download(
                config.source, name, repo_type="dataset", local_dir=config.out)
        shards[name] = len(read_shard(path))
        save_manifest(config.out, manifest)
        print(f"{name}: {sum(shards.values()):,} tokens so far")


def save_manifest(out, manifest):
    (out / "manifest.tmp").write_text(json.dumps(manifest, indent=1) + "\n")
    os.replace(out / "manifest.tmp", out / "manifest.json")


# -----------------------------------------------------------------------------
# main


def run(config):
    """Brings the folder config.out from what it holds to what the flags ask for."""
    out = config.out
    settings = {name: value for name, value in asdict(config).items() if name != "out"}
    begun = read_manifest(out)
    if begun is None and any(out.glob("*.bin")):
        raise UserError(f"{out} has shards from elsewhere: choose another --out")
    manifest = dict(settings=settings, files=None, shards={}, next=[0, 0], finished=False)
    if begun is not None and (begun["shards"] or begun["finished"]):
        manifest = begun  # otherwise there is nothing yet that other flags could spoil
    another = "choose another --out, or delete it"
    for name, value in settings.items():
        there = manifest["settings"].get(name)
        if there != value:
            raise UserError(f"{out} was begun with --{name}={there}, not {value}: {another}")
    shards = manifest["shards"]
    check_shards(out, manifest)

    # what is not on this disk is a commit of the hub, and stays as it is
    if not config.pretokenized and (not shards or os.path.exists(config.source)):
        files = find_files(config)
        if shards and files != manifest["files"]:
            raise UserError(f"{config.source} has changed since {out} was begun: {another}")
        manifest["files"] = files
    if manifest["finished"]:
        print(f"{out} is finished: delete it to begin anew")
        return
    if "next" not in manifest:
        raise UserError(f"{out} was begun by an older prepare_fineweb.py: {another}")
    if manifest != begun:
        save_manifest(out, manifest)  # says whose the shards are, before there is one
    if config.pretokenized:
        fetch_shards(config, manifest)
    else:
        write_shards(config, manifest)
    if not shards:
        raise UserError(f"{config.source}: there are no documents in it")
    if len(shards) == 1:
        raise UserError(
            "all of it is val, and nothing is left to train on: choose a smaller --val_tokens and "
            "another --out. (One document can't be both: then add more)")
    manifest["finished"] = True
    save_manifest(out, manifest)
    print(f"{out}: {sum(shards.values()):,} tokens in {len(shards)} shards")


def main(argv=None):
    config = parse(argv)
    logging.disable()  # of the libraries' retries: we print the error that ends the run
    config.out.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(config.out / "lock", timeout=0):
            run(config)
    except Timeout:
        raise UserError(f"another process is writing to {config.out}") from None
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the same command goes on") from None


if __name__ == "__main__":
    cli(main)
