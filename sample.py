"""
Text from a checkpoint of train.py.

$ python sample.py --prompt "Once upon a time"
"""
import codecs
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from data import get_tokenizer
from model import GPT


@dataclass
class Config:
    prompt: str = ""  # what the text starts with
    ckpt: Path | None = None  # file, or folder of a run (the newest below out/)
    num_samples: int = 1  # one after the other
    max_new_tokens: int = 500
    temperature: float = 0.8  # below 1 is safer, 0 always takes the likeliest token
    top_k: int | None = None  # choose among the k likeliest tokens only
    seed: int = 1337  # of the random choices
    device: str = "cuda" if torch.cuda.is_available() else "cpu"

    def __post_init__(self):
        if not self.temperature >= 0 or (self.top_k is not None and self.top_k < 1):
            raise ValueError("temperature must be 0 or more, and top_k 1 or more")


def find_checkpoint(path):
    if path is not None:
        return path / "ckpt.pt" if path.is_dir() else path
    paths = sorted(Path("out").rglob("ckpt.pt"), key=os.path.getmtime)
    if not paths:
        raise SystemExit("there is no checkpoint below out/: python train.py makes one")
    return paths[-1]


def print_sample(tokens, enc, ends):
    """Prints each token as soon as it is there. ends: the tokens at which a text is over."""
    # a token may end within a character. This decoder keeps the first half back
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    for token in tokens:
        if token.item() in ends:
            break  # the next tokens would be another document's
        print(decoder.decode(enc.decode_single_token_bytes(token.item())), end="", flush=True)
    print(decoder.decode(b"", final=True))


def main(argv=None):
    config = tyro.cli(Config, description=__doc__, args=argv, use_underscores=True)
    try:
        model = GPT.load(find_checkpoint(config.ckpt), config.device)
    except ValueError as e:
        raise SystemExit(f"sample.py: {e}")
    enc = get_tokenizer(model.extra["tokenizer"])
    ends = model.extra.get("ends", [enc.eot_token])  # a pretrained model may have others
    prompt = enc.encode(config.prompt, allowed_special="all") or [enc.eot_token]
    idx = torch.tensor([prompt], device=config.device)
    generator = torch.Generator(config.device).manual_seed(config.seed)
    choose = dict(temperature=config.temperature, top_k=config.top_k, generator=generator)
    for _ in range(config.num_samples):
        print(config.prompt, end="")
        with torch.autocast("cuda", torch.bfloat16, enabled="cuda" in config.device):
            print_sample(model.generate(idx, config.max_new_tokens, **choose), enc, ends)


if __name__ == "__main__":
    main()
