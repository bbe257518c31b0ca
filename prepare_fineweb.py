"""
Text to token shards.

    python prepare_fineweb.py                      # streams FineWeb-Edu, sample-10BT, into data/fineweb_edu
    python prepare_fineweb.py --pretokenized       # the same, ready from the hub: minutes instead of an hour
    python prepare_fineweb.py --source=novel.txt --out=data/novel --val_tokens=1e5

A shard is 256 int32 (magic 20240520, version 1, token count, zeros), then the tokens as uint16: the format of llm.c.
Each document is <|endoftext|> and its text; a shard's end may cut it. A stopped run goes on after its last finished
shard and ends in the same bytes.
"""
import argparse
import json
import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from data import HEADER, MAGIC, SHARDS, VERSION, get_tokenizer, load_manifest, lock, read_shard

ROWS = 64  # documents that a thread tokenizes at a time


def open_source(args, manifest):
    """The source as a dataset that streams, in the state from which the manifest's shards were made."""
    os.environ["USE_TORCH"] = "0"  # or datasets imports it: 0.2 GB
    from datasets import IterableDataset, load_dataset_builder
    from pyarrow.dataset import ParquetFragmentScanOptions

    source, files, revision = args.source, [args.source], manifest["revision"]
    if source.endswith(".txt"):  # one document, its line ends as they are
        dataset = IterableDataset.from_generator(lambda: [{"text": Path(source).read_bytes().decode()}])
    else:
        kind = {".parquet": "parquet", ".jsonl": "json", ".gz": "json"}.get(Path(source).suffix)
        place = dict(path=kind, data_files=source) if kind else dict(path=source, name=args.name, revision=revision)
        builder = load_dataset_builder(**place)
        if builder.name == "parquet":  # in small steps: as it comes, it holds several row groups with all their columns
            small = ParquetFragmentScanOptions(pre_buffer=False, use_buffered_stream=True, buffer_size=1 << 22)
            vars(builder.config).update(columns=["text"], batch_size=ROWS, fragment_scan_options=small)
        dataset, files = builder.as_streaming_dataset("train"), builder.config.data_files["train"]
        if "text" not in builder.info.features:
            raise ValueError(f"{source} has no column text")
    commit = files[0].split("@")[1].split("/")[0] if files[0].startswith("hf://") else None
    manifest["revision"] = commit or [os.path.getsize(path) for path in files]
    if manifest["shards"] and manifest["revision"] != revision:
        raise ValueError(f"{source} has changed since its first shards were made: choose another --out")
    return dataset


def tokenize(dataset, position, name, procs):
    """(position, tokens) of each batch; a position is the state of the dataset before it. Threads do, tiktoken needs no
    Python lock; but each has its own tokenizer: two on one share scratch memory, and took up to twice the CPU time."""
    tokenizers, ahead = [get_tokenizer(name) for _ in range(procs)], []

    def encode(texts):
        tokenizer, pieces = tokenizers.pop(), []
        for text in texts:
            pieces += [[tokenizer.eot_token], tokenizer.encode_to_numpy(text, disallowed_special=())]
        tokenizers.append(tokenizer)
        return np.concatenate(pieces).astype("<u2")

    if position:
        dataset.load_state_dict(position)
    with ThreadPoolExecutor(procs) as pool:
        for batch in dataset.iter(ROWS):
            ahead.append((position, pool.submit(encode, batch["text"])))
            position = dataset.state_dict()
            if len(ahead) > 2 * procs:
                first, tokens = ahead.pop(0)
                yield first, tokens.result()
        for first, tokens in ahead:
            yield first, tokens.result()


def write_shards(args, manifest):
    """Writes the shards that the manifest does not list yet. A shard gets its name when it is complete, and then its
    line in the manifest: a run that is killed in between makes it again."""
    shards, eot = manifest["shards"], get_tokenizer(args.tokenizer).eot_token
    position, skip = shards[-1]["end"] if shards else (None, 0)  # a batch, and how many of its tokens are done
    batches = tokenize(open_source(args, manifest), position, args.tokenizer, args.procs)
    tokens, used, done = [], 0, sum(shard["tokens"] for shard in shards)
    while True:
        (args.out / "manifest.tmp").write_text(json.dumps(manifest, indent=1) + "\n")
        os.replace(args.out / "manifest.tmp", args.out / "manifest.json")
        if manifest["source_ended"] or done == args.tokens:
            return
        size = min(args.shard_tokens if shards else args.val_tokens, args.tokens - done)
        filled = documents = 0
        with open(args.out / "shard.tmp", "wb") as f:
            f.seek(4 * HEADER)
            while filled < size:
                if used == len(tokens):
                    position, tokens = next(batches, (None, None))
                    if tokens is None:
                        manifest["source_ended"] = True
                        break
                    used, skip = skip, 0
                part = tokens[used : used + size - filled]
                f.write(part)
                documents += int(np.count_nonzero(part == eot))
                filled, used = filled + len(part), used + len(part)
            f.seek(0)
            f.write(np.array([MAGIC, VERSION, filled] + [0] * (HEADER - 3), "<i4"))
        if filled:
            name = f"finewebedu_{'train' if shards else 'val'}_{len(shards):06d}.bin"
            os.replace(f.name, args.out / name)
            shards.append({"file": name, "documents": documents, "tokens": filled, "end": [position, used]})
            print(f"{name}: {documents:,} documents, {filled:,} tokens", flush=True)
            done += filled


def prepare(args):
    """Brings the folder args.out from what it holds to what args ask for."""
    out, manifest = args.out, load_manifest(args.out)
    shards = manifest["shards"]
    if "source" not in manifest and any(out.glob("*.bin")):
        raise ValueError(f"{out} has shards that were not made here: choose another --out")
    want = {key: getattr(args, key) for key in ("source", "name", "tokenizer", "shard_tokens", "val_tokens")}
    if not shards:  # then a manifest binds nobody
        manifest = want | {"revision": None, "source_ended": False, "shards": shards}
    for key, value in want.items():
        if manifest[key] != value:
            raise ValueError(f"{out} was made with {key} {manifest[key]}, not {value}: choose another --out")
    done = sum(len(read_shard(out / shard["file"])) for shard in shards)  # raises for one that is missing or cut
    if done > args.tokens:
        raise ValueError(f"{out} holds {done:,} tokens, not {args.tokens:,}: choose another --out")
    if done == args.tokens or manifest["source_ended"]:
        print(f"{out}: {done:,} tokens in {len(shards)} shards, finished before")
        return
    if shards and shards[-1]["tokens"] < (args.shard_tokens if shards[1:] else args.val_tokens):
        shards.pop()  # a smaller --tokens had cut it short
    write_shards(args, manifest)
    print(f"{out}: {sum(shard['tokens'] for shard in shards):,} tokens in {len(shards)} shards")


def fetch(args):
    """Fetches shards that are ready on the hub, whole ones until there are --tokens. Those that are there stay."""
    from huggingface_hub import hf_hub_download, list_repo_files

    if "source" in load_manifest(args.out):
        raise ValueError(f"{args.out} has shards that were made here: choose another --out")
    tokens, names = 0, [name for name in list_repo_files(args.source, repo_type="dataset") if name.endswith(".bin")]
    for name in sorted(names, key=lambda name: name[-10:]):  # by number, val is 000000
        if tokens < args.tokens:
            tokens += len(read_shard(hf_hub_download(args.source, name, repo_type="dataset", local_dir=args.out)))
            print(f"{name}: {tokens:,} tokens so far", flush=True)
    if not tokens:
        raise ValueError(f"{args.source} has no shards")


def main(argv=None):
    count = lambda text: int(float(text))  # 1e9 is one, too
    parser = argparse.ArgumentParser(description="Text, or FineWeb-Edu, to token shards.", allow_abbrev=False)
    add = parser.add_argument
    add("--source", help="hub dataset, folder like one, or .parquet, .jsonl, .jsonl.gz or .txt file (one document)")
    add("--name", help="config of the dataset; default: sample-10BT, for the default source")
    add("--tokens", type=count, default=float("inf"), help="stop after exactly so many, val included; default: all")
    add("--pretokenized", action="store_true", help="fetch ready gpt2 shards, whole ones until there are --tokens")
    add("--out", type=Path, default=SHARDS, help="folder for the shards; default: %(default)s")
    add("--shard_tokens", type=count, default=100_000_000, help="tokens per shard; default: 100e6")
    add("--val_tokens", type=count, help="tokens in the first shard, which is val; default: like the others")
    add("--tokenizer", choices=["gpt2", "bytes"], default="gpt2", help="default: %(default)s")
    add("--procs", type=int, default=os.cpu_count(), help="threads that tokenize; default: %(default)s, one per core")
    args = parser.parse_args(argv)
    if not args.source:
        args.source = "kjj0/finewebedu10B-gpt2" if args.pretokenized else "HuggingFaceFW/fineweb-edu"
        args.name = args.name or "sample-10BT"
    args.val_tokens = args.shard_tokens if args.val_tokens is None else args.val_tokens
    if min(args.tokens, args.shard_tokens, args.val_tokens) < 1 or max(args.shard_tokens, args.val_tokens) >= 1 << 31:
        parser.error("a shard has 1 to 2^31 - 1 tokens")
    logging.disable()  # the libraries' errors and retries: what ends a run is one line
    args.out.mkdir(parents=True, exist_ok=True)
    with open(args.out / ".lock", "w") as f:
        lock(f, args.out)
        try:
            fetch(args) if args.pretokenized else prepare(args)
        except Exception as e:  # of many classes, where a file is broken or the network goes away
            raise ValueError(f"{args.source}: {' '.join(str(e).split())}") from e


if __name__ == "__main__":
    try:
        main()
        status = 0
    except (ValueError, OSError, OverflowError, KeyboardInterrupt) as e:
        print("prepare_fineweb.py:", str(e) or "stopped, the same command goes on", file=sys.stderr)
        status = 1
    sys.stdout.flush()
    os._exit(status)  # pyarrow's threads can hang or abort a Python that ends in the usual way
