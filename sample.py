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

from cli import check_settings, one_sentence, use_module
from data import get_tokenizer
from model import GPT, Refused


@dataclass
class Config:
    prompt: str = ""  # what the text starts with
    ckpt: Path = Path("out")  # a checkpoint, or a folder, whose newest one is taken
    use: str | None = None  # module with the attention, if it is your own, like myarm
    max_new_tokens: int = 500  # the text may end before
    temperature: float = 0.8  # below 1 is safer, 0 always takes the likeliest token
    top_k: int | None = None  # choose among the k likeliest tokens only
    seed: int = 1337  # of the random choices
    device: str = "cuda" if torch.cuda.is_available() else "cpu"  # cuda, cpu or mps


def newest_checkpoint(path):
    path = path.expanduser()
    if path.is_file():
        return path
    found = sorted(path.rglob("ckpt.pt"), key=os.path.getmtime)
    if not found:
        raise Refused(f"there is no checkpoint in {path}: python train.py makes one")
    return found[-1]


def main(argv=None):
    config = tyro.cli(Config, description=__doc__, args=argv, use_underscores=True)
    with one_sentence():
        check_settings(config)
        if config.use:
            use_module(config.use)
        path = newest_checkpoint(config.ckpt)
        model, extra = GPT.load(path, config.device)
        if "tokenizer" not in extra:
            raise Refused(f"{path} was not written by train.py: it names no tokenizer")
        tokenizer = get_tokenizer(extra["tokenizer"])
    print(f"from {path}:")
    prompt = tokenizer.encode(config.prompt, allowed_special="all") or [tokenizer.eot_token]
    idx = torch.tensor([prompt], device=config.device)
    generator = torch.Generator(config.device).manual_seed(config.seed)
    print(config.prompt, end="", flush=True)
    # a token may end within a character. This decoder keeps the first half back
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in model.generate(idx, config.max_new_tokens, config.temperature, config.top_k,
                                generator):
        if token.item() == tokenizer.eot_token:
            break  # the next tokens would be another document's
        new = tokenizer.decode_single_token_bytes(token.item())
        print(decoder.decode(new), end="", flush=True)
    print(decoder.decode(b"", final=True))


if __name__ == "__main__":
    main()
