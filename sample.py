"""
Text from a checkpoint, printed while it is made.

$ python sample.py --prompt "Once upon a time"
"""
import codecs
import sys
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

# common first: from then on Ctrl-C ends in one line
from common import cli, find_checkpoint, flag, parse_flags, pick_device, pick_dtype, random_seed

import torch

from data import EOT, get_tokenizer
from model import GPT, round_to_bf16


@dataclass
class Config:
    """What to say, how, and on which machine. Each field is a flag."""

    prompt: str = flag("", f"the text to continue (none: {EOT}, with which each document starts)")
    ckpt: Path | None = flag(None, "checkpoint, or the folder of a run (the newest one under out/)")
    num_samples: int = flag(1, "continuations, made together as one batch")
    max_new_tokens: int = flag(500, "most tokens of a continuation")
    # how to choose among the likely tokens
    temperature: float = flag(0.8, "below 1 is safer, 0 always takes the likeliest token")
    top_k: int | None = flag(None, "choose among the k likeliest tokens only (all)")
    top_p: float | None = flag(None, "only among the likeliest that together reach this (all)")
    seed: int = flag(1337, "of the random choices", type=random_seed)
    # the machine
    device: str | None = flag(None, "cuda, cuda:1, cpu or mps (cuda where there is one, else cpu)")
    dtype: str | None = flag(
        None, "of the matmuls (bfloat16 where the card has it)", choices=["float32", "bfloat16"]
    )
    compile: bool | None = flag(None, "torch.compile a step (on cuda)")


def print_samples(steps, enc, prompt, num_samples):
    """Prints the first sample as it grows, and then the others. Returns how many tokens that were.

    steps yields the next token of every sample.
    """
    # a token may end within a character. Such a decoder keeps the first half back until the other
    # half comes
    decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in range(num_samples)]
    texts = [""] * num_samples
    ended = [False] * num_samples
    made = 0
    print(prompt, end="", flush=True)
    for tokens in steps:
        for i, token in enumerate(tokens.tolist()):
            if token == enc.eot_token:
                ended[i] = True  # the next tokens would be another document's
            if not ended[i]:
                made += 1
                new = decoders[i].decode(enc.decode_single_token_bytes(token))
                texts[i] += new
                if i == 0:
                    print(new, end="", flush=True)
        if all(ended):
            break
    print(decoders[0].decode(b"", final=True))
    for i in range(1, num_samples):
        rest = decoders[i].decode(b"", final=True)
        print(f"\n--- sample {i + 1}\n{prompt}{texts[i]}{rest}")
    return made


def main(argv=None):
    """Prints the samples. Raises UserError, ModelError and OSError for what a user can mend."""
    config = Config(**parse_flags(Config, argv, __doc__))
    device = pick_device(config.device)
    dtype = pick_dtype(device, config.dtype)
    path = find_checkpoint(config.ckpt)
    model = GPT.load(path, device, kernel="sdpa")
    if dtype == "bfloat16":
        round_to_bf16(model)  # once. Autocast alone would do it again for each token
    if device.type == "cpu" and sum(p.numel() for p in model.parameters()) < 10e6:
        torch.set_num_threads(1)  # the matmuls of one token are too short to be shared
    enc = get_tokenizer(model.extra.get("tokenizer"))

    prompt = enc.encode(config.prompt, allowed_special="all") or [enc.eot_token]
    idx = torch.tensor([prompt], device=device).repeat(config.num_samples, 1)
    choose = dict(temperature=config.temperature, top_k=config.top_k, top_p=config.top_p)
    choose["generator"] = torch.Generator(device).manual_seed(config.seed)
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
        step = None
        if config.compile or (config.compile is None and device.type == "cuda"):
            # a step is small, so most of its time is spent on launches. A CUDA graph needs only one
            step = torch.compile(model.step, mode="reduce-overhead", fullgraph=True)
            # compile now, not while somebody waits, with a cache of the same size. Greedy, so that
            # the generator stays untouched
            warmup = model.generate(idx, config.max_new_tokens, temperature=0, step=step)
            list(islice(warmup, 4))
        steps = model.generate(idx, config.max_new_tokens, step=step, **choose)
        start = time.time()
        made = print_samples(steps, enc, config.prompt, config.num_samples)
    seconds = time.time() - start
    rate = f"{made} tokens in {seconds:.2f} s, {made / seconds:,.0f} a second"
    print(f"{path} ({model.config.attn}): {rate}", file=sys.stderr)


if __name__ == "__main__":
    cli(main)
