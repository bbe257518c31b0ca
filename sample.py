"""
Text from a checkpoint, printed while it is made.

$ python sample.py --prompt "Once upon a time"
"""
import argparse
import codecs
import os
import sys
import time
from pathlib import Path

import torch

from data import EOT, get_tokenizer
from flags import int_from_0, number, number_from_0, positive_int
from model import GPT, open_device, pick_kernel, round_to_bf16

parser = argparse.ArgumentParser(
    prog="sample.py",
    usage="%(prog)s [--flag=value ...]    (--help lists the flags)",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
)
# what to say
parser.add_argument("--prompt", default="",
                    help=f"the text to continue (none: {EOT}, with which each document starts)")
parser.add_argument("--ckpt", type=Path,
                    help="checkpoint, or the folder of a run (the newest one under out/)")
parser.add_argument("--num_samples", type=positive_int, default=1,
                    help="continuations, made together as one batch (1)")
parser.add_argument("--max_new_tokens", type=positive_int, default=500,
                    help="most tokens of a continuation (500)")
# how to choose among the likely tokens
parser.add_argument("--temperature", type=number_from_0, default=0.8,
                    help="below 1 is safer, 0 always takes the likeliest token (0.8)")
parser.add_argument("--top_k", type=positive_int, help="only among the k likeliest tokens (all)")
parser.add_argument("--top_p", type=number,
                    help="only among the likeliest tokens that together reach probability p (all)")
parser.add_argument("--seed", type=int_from_0, default=1337,
                    help="seed of the random choices (1337)")
# the machine
parser.add_argument("--device", help="cuda, cuda:1, cpu or mps (cuda where there is one, else cpu)")
parser.add_argument("--dtype", choices=["float32", "bfloat16"],
                    help="precision of the matmuls (bfloat16 where the card has it, else float32)")
parser.add_argument("--compile", action=argparse.BooleanOptionalAction,
                    help="torch.compile a step (on cuda)")


def find_checkpoint(path):
    """The file that --ckpt means: itself, the one in a folder, or the newest one under out/."""
    if path is None:
        checkpoints = sorted(Path("out").rglob("ckpt.pt"), key=os.path.getmtime)
        if not checkpoints:
            raise ValueError(
                "no checkpoint under out/: `python train.py --attn=diff` makes one, or name one "
                "with --ckpt"
            )
        return checkpoints[-1]
    if path.is_dir():
        path = path / "ckpt.pt"
    if not path.exists():
        raise ValueError(f"--ckpt={path}: no checkpoint there, `python train.py` makes some")
    return path


def load_model(path, device, bf16):
    """The model of a checkpoint, made ready to generate."""
    model = GPT.load(path, device)
    pick_kernel(model, "auto", torch.bfloat16 if bf16 else torch.float32)
    if bf16:
        round_to_bf16(model)  # once. autocast alone would do it again for each token
    if device.type == "cpu" and sum(p.numel() for p in model.parameters()) < 10e6:
        torch.set_num_threads(1)  # the matmuls of one token are too short to be shared
    return model


def print_samples(steps, enc, prompt, num_samples):
    """Prints the first sample as it grows, and then the others.

    steps yields the next token of every sample. Returns how many tokens that were, and the seconds
    to the first and to the last one.
    """
    # a token may end within a character. such a decoder keeps the first half back until the other
    # half comes
    decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in range(num_samples)]
    texts = [""] * num_samples
    ended = [False] * num_samples
    count = 0
    first = None
    start = time.time()
    print(prompt, end="", flush=True)
    for tokens in steps:
        tokens = tokens.tolist()  # waits for the device. only then the clock is right
        if first is None:
            first = time.time() - start
        for i, token in enumerate(tokens):
            if token == enc.eot_token:
                ended[i] = True  # the next tokens would be another document's
            if not ended[i]:
                count += 1
                new = decoders[i].decode(enc.decode_single_token_bytes(token))
                texts[i] += new
                if i == 0:
                    print(new, end="", flush=True)
        if all(ended):
            break
    seconds = time.time() - start
    print(decoders[0].decode(b"", final=True))
    for i in range(1, num_samples):
        rest = decoders[i].decode(b"", final=True)
        print(f"\n--- sample {i + 1}\n{prompt}{texts[i]}{rest}")
    return count, first, seconds


def main(argv=None):
    """Prints the samples. Raises ValueError and OSError for errors that a user can mend."""
    args = parser.parse_args(argv)
    device = open_device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_cuda = device.type == "cuda"
    bf16 = args.dtype == "bfloat16"
    if args.dtype is None:  # older cards than Ampere only emulate bf16
        bf16 = on_cuda and torch.cuda.is_bf16_supported(including_emulation=False)
    path = find_checkpoint(args.ckpt)
    model = load_model(path, device, bf16)
    enc = get_tokenizer(model.extra.get("tokenizer"))

    prompt = enc.encode(args.prompt, allowed_special={EOT}) or [enc.eot_token]
    idx = torch.tensor([prompt], device=device).repeat(args.num_samples, 1)
    # a step reads the whole cache, so it should not be larger than the text will be
    for block in model.blocks:
        block.attn.room = min(model.config.block_size, len(prompt) + args.max_new_tokens)
    choose = dict(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p)
    choose["generator"] = torch.Generator(device).manual_seed(args.seed)
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        step = None
        if args.compile or (args.compile is None and on_cuda):
            # a step is small, so most of its time is spent on launches. a CUDA graph needs only one
            step = torch.compile(model.step, mode="reduce-overhead", fullgraph=True)
            # compile now, not while somebody waits. greedy, so that the generator stays untouched
            list(model.generate(idx, 4, temperature=0, step=step))
        steps = model.generate(idx, args.max_new_tokens, step=step, **choose)
        print(f"{path}: {model.config.attn}, step {model.extra.get('step')}", file=sys.stderr)
        count, first, seconds = print_samples(steps, enc, args.prompt, args.num_samples)
    rate = f"{count} tokens in {seconds:.2f} s: {count / seconds:,.0f} tokens/s"
    print(f"{rate}, first after {first:.3f} s", file=sys.stderr)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a console of Windows may lack a character
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)  # what a shell expects after Ctrl-C
    except (ValueError, OSError) as e:
        sys.exit(f"sample.py: {e}")
    except torch._dynamo.exc.TorchDynamoException as e:
        sys.exit(f"sample.py: torch.compile failed, --no-compile does without it. It says: {e}")
