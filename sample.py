"""
Text from a checkpoint of train.py.

$ python sample.py --prompt "Once upon a time"
"""
import codecs
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro

from data import get_tokenizer, one_sentence
from model import GPT


@dataclass
class Config:
    prompt: str = ""  # what the text starts with
    ckpt: Path | None = None  # file, or folder whose newest checkpoint is taken (out)
    num_samples: int = 1  # one after the other
    max_new_tokens: int = 500  # the text may end before
    temperature: float = 0.8  # below 1 is safer, 0 always takes the likeliest token
    top_k: int | None = None  # choose among the k likeliest tokens only
    seed: int = 1337  # of the random choices
    device: Literal["cpu", "cuda", "mps"] = "cuda" if torch.cuda.is_available() else "cpu"

    def __post_init__(self):
        if not getattr(torch, self.device).is_available():
            raise ValueError(f"PyTorch sees no {self.device} here")
        if not self.temperature >= 0 or (self.top_k is not None and self.top_k < 1):
            raise ValueError("temperature must be 0 or more, and top_k 1 or more")


def find_checkpoint(path=None):
    """The file of a checkpoint: path itself, or the newest below this folder (out/)."""
    path = Path(path or "out").expanduser()
    if path.is_file():
        return path
    found = sorted(path.rglob("ckpt.pt"), key=os.path.getmtime)
    if not found:
        raise FileNotFoundError(f"there is no checkpoint in {path}: python train.py makes one")
    if len(found) > 1:
        print(f"from {found[-1]}:", file=sys.stderr)
    return found[-1]


def print_sample(tokens, enc):
    """Prints each token as soon as it is there, to the end of the document."""
    # a token may end within a character. This decoder keeps the first half back
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    for token in tokens:
        if token.item() == enc.eot_token:
            break  # the next tokens would be another document's
        print(decoder.decode(enc.decode_single_token_bytes(token.item())), end="", flush=True)
    print(decoder.decode(b"", final=True))


def main(argv=None):
    config = tyro.cli(Config, description=__doc__, args=argv, use_underscores=True)
    with one_sentence("sample.py", ValueError):
        path = find_checkpoint(config.ckpt)
        model = GPT.load(path, config.device)
        if "tokenizer" not in model.extra:
            raise ValueError(f"{path} has no tokenizer, since train.py did not save it")
        enc = get_tokenizer(model.extra["tokenizer"])
        prompt = enc.encode(config.prompt, allowed_special="all") or [enc.eot_token]
    idx = torch.tensor([prompt], device=config.device)
    generator = torch.Generator(config.device).manual_seed(config.seed)
    choose = dict(temperature=config.temperature, top_k=config.top_k, generator=generator)
    use_bf16 = config.device == "cuda" and torch.cuda.get_device_capability()[0] >= 8
    with one_sentence("sample.py"), torch.autocast("cuda", torch.bfloat16, enabled=use_bf16):
        for _ in range(config.num_samples):
            print(config.prompt, end="")
            print_sample(model.generate(idx, config.max_new_tokens, **choose), enc)


if __name__ == "__main__":
    main()
