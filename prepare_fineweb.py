"""
Text to token shards: FineWeb-Edu, or any text of yours. data.py describes the format.

    python prepare_fineweb.py                   # FineWeb-Edu, sample-10BT, to data/fineweb_edu
    python prepare_fineweb.py --pretokenized    # ready shards from the hub: minutes, not an hour
    python prepare_fineweb.py --source=novel.txt --out=data/novel --val_tokens=1e5

The first shard is val, the others are train. Stop it whenever you like: the same command resumes
after the last whole shard, and ends in the same bytes.
"""
import argparse
import json
import logging
import math
import os
import sys
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data import HEADER, MAGIC, SHARDS, VERSION, get_tokenizer, load_manifest, lock, read_shard
from flags import positive_int

ROWS = 64  # documents that a thread tokenizes at a time
worker = threading.local()


def open_source(args):
    """The source, as a dataset that streams documents with a column "text"."""
    os.environ["USE_TORCH"] = "0"  # or datasets imports torch: 0.2 GB for nothing
    from datasets import IterableDataset, load_dataset_builder
    from pyarrow.dataset import ParquetFragmentScanOptions

    if args.source.endswith(".txt"):
        return IterableDataset.from_generator(read_txt, gen_kwargs={"path": args.source})
    if args.source.endswith(".parquet"):
        builder = load_dataset_builder("parquet", data_files=args.source)
    elif args.source.endswith((".jsonl", ".jsonl.gz")):
        builder = load_dataset_builder("json", data_files=args.source)
    else:
        builder = load_dataset_builder(args.source, args.name)  # of the hub, or a folder like that
    if builder.name == "parquet":
        builder.config.columns = ["text"]
        # in small steps and without a buffer, or arrow reads far ahead: half a gigabyte
        builder.config.batch_size = ROWS
        builder.config.fragment_scan_options = ParquetFragmentScanOptions(pre_buffer=False)
    dataset = builder.as_streaming_dataset("train")
    if "text" not in dataset.column_names:
        raise ValueError("there is no column text")
    return dataset


def read_txt(path):
    yield {"text": Path(path).read_bytes().decode()}  # read_text would change the ends of lines


def start_worker(name):
    # each thread has a tokenizer of its own, because on a shared one they wait for one another
    worker.tokenizer = get_tokenizer(name)


def encode(texts):
    """The tokens of some documents in one array, each after <|endoftext|>."""
    pieces = []
    for text in texts:
        pieces.append(np.array([worker.tokenizer.eot_token], "u4"))
        pieces.append(worker.tokenizer.encode_to_numpy(text, disallowed_special=()))
    return np.concatenate(pieces).astype("<u2")


def tokenize(dataset, args):
    """The tokens of the dataset in its order, an array for every ROWS documents."""
    pending = deque()
    # threads suffice, because tiktoken releases Python's lock while it works
    pool = ThreadPoolExecutor(args.procs, initializer=start_worker, initargs=[args.tokenizer])
    with pool:
        for batch in dataset.iter(ROWS):
            pending.append(pool.submit(encode, batch["text"]))
            if len(pending) > 2 * args.procs:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


class TokenStream:
    """Arrays of tokens, which one reads like a file."""

    def __init__(self, batches):
        self.batches = batches
        self.rest = np.empty(0, "<u2")

    def read(self, n):
        """The next tokens, n at most; none at the end."""
        if len(self.rest) == 0:
            self.rest = next(self.batches, self.rest)
        part = self.rest[:n]
        self.rest = self.rest[n:]
        return part


def write_shard(path, size, stream, eot, bar):
    """Writes the next tokens, at most size. Returns their number, and that of the documents that
        begin there."""
    tokens = 0
    documents = 0
    with open(path, "wb") as f:
        f.seek(4 * HEADER)
        while tokens < size:
            part = stream.read(size - tokens)
            if len(part) == 0:
                break
            f.write(part)
            bar.update(len(part))
            tokens += len(part)
            documents += int(np.count_nonzero(part == eot))
        header = np.zeros(HEADER, "<i4")
        header[:3] = MAGIC, VERSION, tokens
        f.seek(0)
        f.write(header)
    return tokens, documents


def shard_size(args, number):
    return args.val_tokens if number == 0 else args.shard_tokens


def last_document(out, shards, eot):
    """What the shards hold of the document that they end in. It may be longer than a shard."""
    pieces = []
    for shard in reversed(shards):
        tokens = read_shard(out / shard["file"])
        starts = np.flatnonzero(tokens == eot)
        if len(starts) > 0:
            pieces.append(tokens[starts[-1] :])
            break
        pieces.append(tokens)
    return np.concatenate(pieces[::-1])


def save_manifest(out, manifest):
    (out / "manifest.tmp").write_text(json.dumps(manifest, indent=1) + "\n")
    os.replace(out / "manifest.tmp", out / "manifest.json")


def write_shards(args, manifest, bar):
    """Makes the shards that the manifest does not list yet."""
    shards = manifest["shards"]
    eot = get_tokenizer(args.tokenizer).eot_token
    dataset = open_source(args)
    if shards:
        # skip() reads the source from its beginning. that takes minutes, where tokenizing took an
        # hour. the last document may be cut, so we tokenize it again, and pass over the part of it
        # that is written already
        documents = sum(shard["documents"] for shard in shards)
        stream = TokenStream(tokenize(dataset.skip(documents - 1), args))
        written = last_document(args.out, shards, eot)
        if not np.array_equal(stream.read(len(written)), written):
            raise ValueError("the source has changed since it was begun: choose another --out")
    else:
        stream = TokenStream(tokenize(dataset, args))
        save_manifest(args.out, manifest)  # says whose the shards are, before there is one

    done = sum(shard["tokens"] for shard in shards)
    while not manifest["source_ended"] and done < args.tokens:
        size = min(shard_size(args, len(shards)), args.tokens - done)
        tokens, documents = write_shard(args.out / "shard.tmp", size, stream, eot, bar)
        if tokens < size:
            manifest["source_ended"] = True
            if tokens == documents and not shards:  # nothing but an end of text for each
                raise ValueError("there is no text in it")
        if tokens > 0:
            # a shard gets its name when it is whole, and then its line in the manifest. if we are
            # killed in between, it is written again
            name = f"finewebedu_{'train' if shards else 'val'}_{len(shards):06d}.bin"
            os.replace(args.out / "shard.tmp", args.out / name)
            shards.append({"file": name, "documents": documents, "tokens": tokens})
            bar.write(f"{name}: {documents:,} documents, {tokens:,} tokens")
        save_manifest(args.out, manifest)
        done += tokens


def prepare(args):
    """Brings the folder args.out from what it holds to what the flags ask for."""
    manifest = load_manifest(args.out)
    shards = manifest["shards"]
    if "source" not in manifest and any(args.out.glob("*.bin")):
        raise ValueError("the folder has shards from elsewhere: choose another --out")
    binding = ("source", "name", "tokenizer", "shard_tokens", "val_tokens")
    if not shards:  # then nothing binds us
        manifest = {key: getattr(args, key) for key in binding}
        manifest |= {"source_ended": False, "shards": shards}
    for key in binding:
        before = manifest[key]
        now = getattr(args, key)
        if before != now:
            raise ValueError(f"the folder has {key} {before}, not {now}: choose another --out")

    done = sum(shard["tokens"] for shard in shards)
    if done > args.tokens:
        problem = f"the folder has {done:,} tokens, not {args.tokens:,}"
        raise ValueError(f"{problem}: choose another --out")
    finished = manifest["source_ended"] or done == args.tokens
    if shards and not finished and shards[-1]["tokens"] < shard_size(args, len(shards) - 1):
        done -= shards.pop()["tokens"]  # a smaller --tokens had cut it short
    for shard in shards:
        if len(read_shard(args.out / shard["file"])) != shard["tokens"]:
            raise ValueError(f"{shard['file']} is not the one that manifest.json lists")
    if not finished:
        total = None if args.tokens == math.inf else args.tokens
        with tqdm(total=total, initial=done, unit=" tokens", unit_scale=True, disable=None) as bar:
            write_shards(args, manifest, bar)

    done = sum(shard["tokens"] for shard in shards)
    print(f"{args.out}: {done:,} tokens in {len(shards)} shards")
    if len(shards) == 1:
        print("The only shard is val, so nothing is left to train on: choose a smaller "
              "--val_tokens and another --out.")


def fetch(args):
    """Fetches ready shards from the hub until there are --tokens. Those that are there stay."""
    from huggingface_hub import hf_hub_download, list_repo_files

    if "source" in load_manifest(args.out):
        raise ValueError("the folder has shards that were made here: choose another --out")
    files = list_repo_files(args.source, repo_type="dataset")
    names = [name for name in files if name.endswith(".bin")]
    if not names:
        raise ValueError("there are no shards in it")
    names.sort(key=lambda name: name[-10:])  # by number: 000000.bin is val
    tokens = 0
    for name in names:
        if tokens < args.tokens:
            path = hf_hub_download(args.source, name, repo_type="dataset", local_dir=args.out)
            tokens += len(read_shard(path))
            print(f"{name}: {tokens:,} tokens so far")


def main(argv=None):
    description = "Text, or FineWeb-Edu, to token shards."
    p = argparse.ArgumentParser(description=description, allow_abbrev=False)
    p.add_argument("--source",
                   help="dataset of the hub, a folder like one, or a .parquet, .jsonl, .jsonl.gz "
                        "or .txt file (one document); default: HuggingFaceFW/fineweb-edu")
    p.add_argument("--name",
                   help="config of the dataset; default: sample-10BT, for the default source")
    p.add_argument("--tokens", type=positive_int, default=math.inf,
                   help="how many, val included; default: all")
    p.add_argument("--pretokenized", action="store_true",
                   help="fetch whole gpt2 shards from the hub")
    p.add_argument("--out", type=Path, default=SHARDS,
                   help="folder for the shards; default: %(default)s")
    p.add_argument("--shard_tokens", type=positive_int, default=100_000_000,
                   help="tokens a shard; default: 100e6")
    p.add_argument("--val_tokens", type=positive_int,
                   help="tokens of the first shard, which is val; default: as the others")
    p.add_argument("--tokenizer", choices=["gpt2", "bytes"], default="gpt2",
                   help="default: %(default)s")
    p.add_argument("--procs", type=positive_int, default=os.cpu_count(),
                   help="threads; default: one per core")
    args = p.parse_args(argv)
    if args.source is None and args.pretokenized:
        args.source = "kjj0/finewebedu10B-gpt2"
    elif args.source is None:
        args.source = "HuggingFaceFW/fineweb-edu"
        args.name = args.name or "sample-10BT"
    if args.val_tokens is None:
        args.val_tokens = args.shard_tokens
    if args.pretokenized and args.tokenizer != "gpt2":
        p.error("--pretokenized shards are in gpt2 tokens")
    if max(args.shard_tokens, args.val_tokens) >= 2**31:
        p.error("a shard has fewer than 2^31 tokens: its header counts them in an int32")

    logging.disable()  # of the libraries' retries and errors: we print the one that ends the run
    args.out.mkdir(parents=True, exist_ok=True)
    with open(args.out / ".lock", "w") as f:
        lock(f, args.out)
        try:
            if args.pretokenized:
                fetch(args)
            else:
                prepare(args)
        except Exception as e:  # of many classes, where a file is broken or the network goes away
            message = " ".join(str(e).split())
            raise ValueError(f"{args.source} -> {args.out}: {message or type(e).__name__}") from e


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # a shard's line is seen when the shard is there
    try:
        main()
        status = 0
    except (ValueError, OSError) as e:
        print("prepare_fineweb.py:", e, file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        print("prepare_fineweb.py: stopped, the same command resumes", file=sys.stderr)
        status = 1
    os._exit(status)  # pyarrow's threads can hang or abort a Python that ends in the usual way
