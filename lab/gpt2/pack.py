"""
Packs a text so that it travels: its tokens, compressed, and back.

$ python lab/gpt2/pack.py pack DOCUMENTS PACK     # the *.jsonl.xz of a folder, see prepare.sh
$ python lab/gpt2/pack.py unpack PACK DATA        # train.bin, val.bin and border.txt, in seconds

Each line of a .jsonl.xz is a document, {"text": ...}.
"""
import json
import lzma
import random
import sys
from pathlib import Path

import numpy as np

TEXTS = ("textbooks", "novels")


def tokens_of(path, tokenizer):
    """An array of tokens for each document. It begins with <|endoftext|>, as data.py says."""
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            tokens = tokenizer.encode_ordinary(json.loads(line)["text"])
            yield np.array([tokenizer.eot_token, *tokens], "<u2")


def pack(documents, out):
    import tiktoken  # here, since only unpack runs on the other machine

    tokenizer = tiktoken.get_encoding("gpt2")
    found = {}
    for split in ("train", "val"):
        for text in TEXTS:
            path = documents / f"{split}-{text}.jsonl.xz"
            found[split, text] = list(tokens_of(path, tokenizer))
            print(f"{path.name}: {sum(map(len, found[split, text])):,} tokens", flush=True)
    train = found["train", "textbooks"] + found["train", "novels"]
    random.Random(0).shuffle(train)  # documents; train.py shuffles sequences in each epoch, too
    textbooks = np.concatenate(found["val", "textbooks"])
    novels = np.concatenate(found["val", "novels"])
    arrays = dict(train=np.concatenate(train), val=np.concatenate((textbooks, novels)))
    out.mkdir(parents=True, exist_ok=True)
    for name, tokens in arrays.items():
        (out / f"{name}.bin.xz").write_bytes(lzma.compress(tokens.tobytes()))
    (out / "border.txt").write_text(str(len(textbooks)))  # val is textbooks up to here


def unpack(packed, out):
    out.mkdir(parents=True, exist_ok=True)
    for name in ("train.bin", "val.bin"):
        (out / name).write_bytes(lzma.decompress((packed / f"{name}.xz").read_bytes()))
    (out / "border.txt").write_text((packed / "border.txt").read_text())


if __name__ == "__main__":
    dict(pack=pack, unpack=unpack)[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
