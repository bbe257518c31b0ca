"""
Text to token shards: FineWeb-Edu, or any text of yours. data.py describes the format.

    python prepare_fineweb.py                   # FineWeb-Edu, sample-10BT, to data/fineweb_edu
    python prepare_fineweb.py --pretokenized    # ready shards from the hub: minutes, not an hour
    python prepare_fineweb.py --source=novel.txt --out=data/novel --val_tokens=1e5

The first shard is val, the others are train. Each ends with a whole document. Stop it whenever you
like: the same command goes on after the last whole shard, and ends in the same bytes.
"""
import argparse
import json
import logging
import os
import sys
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout
from tqdm import tqdm

from data import HEADER, MAGIC, SHARDS, VERSION, count, get_tokenizer, read_manifest, read_shard

ROWS = 64  # documents that a thread tokenizes at a time
TEXTS = (".txt", ".json", ".jsonl", ".jsonl.gz", ".parquet", ".csv")  # files that hold documents
worker = threading.local()


def parse(argv):
    p = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.add_argument("--source",
                   help="dataset of the hub, a folder like one, or a .parquet, .jsonl, .jsonl.gz "
                        "or .txt file (one document); default: HuggingFaceFW/fineweb-edu")
    p.add_argument("--name", help="config of the dataset; default: sample-10BT of fineweb-edu")
    p.add_argument("--out", type=Path, default=SHARDS,
                   help="folder for the shards; default: %(default)s")
    p.add_argument("--tokens", type=count,
                   help="stop with the document that reaches so many, val included; default: all")
    p.add_argument("--shard_tokens", type=count, default=100_000_000,
                   help="a shard ends with the document that reaches so many; default: 1e8")
    p.add_argument("--val_tokens", type=count,
                   help="the same of the first shard, which is val; default: --shard_tokens")
    p.add_argument("--pretokenized", action="store_true",
                   help="fetch whole shards from the hub; default --source: kjj0/finewebedu10B-gpt2")
    args = p.parse_args(argv)
    if args.source is None and args.pretokenized:
        args.source = "kjj0/finewebedu10B-gpt2"
    elif args.source is None:
        args.source = "HuggingFaceFW/fineweb-edu"
        args.name = args.name or "sample-10BT"
    if args.val_tokens is None:
        args.val_tokens = args.shard_tokens
    for flag in ("tokens", "shard_tokens", "val_tokens"):
        if getattr(args, flag) == 0:
            p.error(f"argument --{flag}: it must be 1 or more")
    if max(args.shard_tokens, args.val_tokens) > 2e9:
        p.error("argument --shard_tokens: 2e9 at most, since a shard counts them in an int32")
    return args


# -----------------------------------------------------------------------------
# the source


def open_source(args):
    """The source as a stream of rows with a column "text", and the list of the files behind it."""
    os.environ["USE_TORCH"] = "0"  # or datasets imports torch: 0.2 GB for nothing
    from datasets import IterableDataset, load_dataset_builder
    from pyarrow.dataset import ParquetFragmentScanOptions

    if args.source.endswith(".txt"):
        dataset = IterableDataset.from_generator(read_txt, gen_kwargs={"path": args.source})
        return dataset, [describe_file(args.source)]
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
    files = [describe_file(path) for path in builder.config.data_files["train"]]
    if os.path.isdir(args.source) and args.name is None:
        # the library takes one kind of file from a folder, and is silent about the others
        taken = {os.path.realpath(path) for path, _, _ in files}
        for path in Path(args.source).rglob("*"):
            if path.name.endswith(TEXTS) and os.path.realpath(path) not in taken:
                raise ValueError(f"{path} would be left out: keep one kind of file in a folder")
    return dataset, files


def read_txt(path):
    yield {"text": Path(path).read_bytes().decode()}  # read_text would change the ends of lines


def describe_file(path):
    """[path, bytes, time of the last change]. Of a file on the hub the path names the commit."""
    if not os.path.exists(path):
        return [str(path), None, None]
    about = os.stat(path)
    return [str(path), about.st_size, about.st_mtime_ns]


# -----------------------------------------------------------------------------
# tokens


def start_worker():
    # each thread has a tokenizer of its own, because on a shared one they wait for one another
    worker.tokenizer = get_tokenizer("gpt2")


def encode(texts):
    """The tokens of each document, after <|endoftext|>."""
    documents = []
    for text in texts:
        tokens = worker.tokenizer.encode_to_numpy(text, disallowed_special=())
        documents.append(np.insert(tokens, 0, worker.tokenizer.eot_token).astype("<u2"))
    return documents


def tokenize(dataset):
    """Yields (state of the dataset before these documents, their tokens), ROWS at a time."""
    rows = iter(dataset)
    pending = deque()
    threads = os.cpu_count()
    get_tokenizer("gpt2")  # where there is no network, it fails here and says why
    # threads suffice, because tiktoken releases Python's lock while it works
    with ThreadPoolExecutor(threads, initializer=start_worker) as pool:
        while True:
            state = dataset.state_dict()
            texts = [row["text"] for row in islice(rows, ROWS)]
            if texts:
                pending.append((state, pool.submit(encode, texts)))
            if not pending:
                return
            if not texts or len(pending) > 2 * threads:
                state, future = pending.popleft()
                yield state, future.result()


# -----------------------------------------------------------------------------
# shards


def save_manifest(out, manifest):
    (out / "manifest.tmp").write_text(json.dumps(manifest, indent=1) + "\n")
    os.replace(out / "manifest.tmp", out / "manifest.json")


def begin_shard(path):
    f = open(path, "wb")
    f.write(bytes(4 * HEADER))  # the header comes last, when the tokens have been counted
    return f


def end_shard(f, tokens, path):
    """Write the header of the open file f, and give it its name."""
    header = np.zeros(HEADER, "<i4")
    header[:3] = [MAGIC, VERSION, tokens]
    f.seek(0)
    f.write(header)
    f.flush()
    os.fsync(f.fileno())
    f.close()
    os.replace(f.name, path)


def write_shards(args, manifest, dataset, bar):
    """Makes the shards that the manifest does not list yet."""
    shards = manifest["shards"]
    skip = 0
    if shards:
        # the threads had read ahead. So what was saved is where the batch of documents began in
        # which the last shard ended, and how many of that batch are written
        dataset.load_state_dict(manifest["stream"])
        skip = manifest["written"]
    done = sum(shards.values())
    tokens = 0  # in the shard that is being written
    has_text = False
    f = begin_shard(args.out / "shard.tmp")
    for state, documents in tokenize(dataset):
        for number, document in enumerate(documents):
            if number < skip:
                continue
            f.write(document)
            tokens += len(document)
            has_text = has_text or len(document) > 1  # more than <|endoftext|>
            bar.update(len(document))
            enough = args.tokens is not None and done + tokens >= args.tokens
            if enough or tokens >= (args.shard_tokens if shards else args.val_tokens):
                done += tokens
                # a shard gets its name when it is whole, and then its line in the manifest. If we
                # are killed in between, it is written again
                name = shard_name(shards)
                end_shard(f, tokens, args.out / name)
                shards[name] = tokens
                manifest |= dict(stream=state, written=number + 1, finished=enough)
                save_manifest(args.out, manifest)
                if enough:
                    return
                tokens = 0
                f = begin_shard(args.out / "shard.tmp")
        skip = 0

    # the source has ended
    if not shards and not has_text:
        raise ValueError("there is no text in it")
    if tokens > 0:
        name = shard_name(shards)
        end_shard(f, tokens, args.out / name)
        shards[name] = tokens
    else:
        f.close()
        os.remove(f.name)
    save_manifest(args.out, manifest | dict(finished=True))


def shard_name(shards):
    return f"finewebedu_{'train' if shards else 'val'}_{len(shards):06d}.bin"


def prepare(args, manifest):
    """Tokenizes the source, from where it stopped."""
    shards = manifest["shards"]
    for name, tokens in shards.items():
        if len(read_shard(args.out / name)) != tokens:
            raise ValueError(f"{name} is not the one that manifest.json lists")
    dataset, files = open_source(args)
    if manifest.setdefault("files", files) != files:
        raise ValueError("the source has changed since it was begun: choose another --out")
    save_manifest(args.out, manifest)  # says whose the shards are, before there is one
    with tqdm(total=args.tokens, initial=sum(shards.values()), unit=" tokens", unit_scale=True,
              disable=None) as bar:
        write_shards(args, manifest, dataset, bar)
    print(f"{args.out}: {sum(shards.values()):,} tokens in {len(shards)} shards")
    if len(shards) == 1:
        print("The only shard is val, so nothing is left to train on: choose a smaller "
              "--val_tokens and another --out.")


def fetch(args, manifest):
    """Fetches ready shards from the hub until there are --tokens."""
    from huggingface_hub import hf_hub_download, list_repo_files

    save_manifest(args.out, manifest)
    files = list_repo_files(args.source, repo_type="dataset")
    names = [name for name in files if name.endswith(".bin")]
    if not names:
        raise ValueError("there are no shards in it")
    names.sort(key=lambda name: name[-10:])  # by number: 000000.bin is val
    tokens = 0
    for name in names:
        if args.tokens is None or tokens < args.tokens:
            path = hf_hub_download(args.source, name, repo_type="dataset", local_dir=args.out)
            tokens += len(read_shard(path))
            print(f"{name}: {tokens:,} tokens so far")
    save_manifest(args.out, manifest | dict(finished=True))


def run(args):
    """Brings the folder args.out from what it holds to what the flags ask for."""
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    manifest = read_manifest(args.out)
    if manifest is None:
        if any(args.out.glob("*.bin")):
            raise ValueError("the folder has shards from elsewhere: choose another --out")
        manifest = dict(settings=settings, shards={}, finished=False)
    for name, value in settings.items():
        there = manifest["settings"].get(name)
        if there != value:
            raise ValueError(f"the folder has {name} {there}, not {value}: choose another --out")
    if manifest["finished"]:
        print(f"{args.out} is finished: delete it to begin anew")
    elif args.pretokenized:
        fetch(args, manifest)
    else:
        prepare(args, manifest)


def main(argv=None):
    args = parse(argv)
    logging.disable()  # of the libraries' retries and errors: we print the one that ends the run
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(args.out / "lock", timeout=0):
            run(args)
    except Timeout:
        raise ValueError(f"another process is writing to {args.out}") from None
    except Exception as e:  # of many classes, where a file is broken or the network goes away
        message = " ".join(str(e).split())
        raise ValueError(f"{args.source} -> {args.out}: {message or type(e).__name__}") from e


if __name__ == "__main__":
    try:
        main()
        status = 0
    except (ValueError, OSError) as e:
        print("prepare_fineweb.py:", e, file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        print("prepare_fineweb.py: stopped, the same command goes on", file=sys.stderr)
        status = 130
    sys.stdout.flush()
    os._exit(status)  # pyarrow's threads can hang or abort a Python that ends in the usual way
