"""
Text from a checkpoint, as it is made.

    python sample.py --prompt "Once upon a time"
"""
import argparse
import codecs
import os
import sys
import time
from pathlib import Path

import torch

from data import EOT, get_tokenizer
from model import GPT, pick_kernel


def main(argv=None):
    """Prints the samples, the first one as it is made. Raises ValueError and OSError for what a user can mend."""
    p = argparse.ArgumentParser(prog="sample.py", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    p.add_argument("--prompt", default="", help=f"the text to go on from (none: {EOT}, the start of a document)")
    p.add_argument("--ckpt", type=Path, help="checkpoint, or folder of a run (the newest under out/)")
    p.add_argument("--num_samples", type=int, default=1, help="continuations, made as one batch (1)")
    p.add_argument("--max_new_tokens", type=lambda s: int(float(s)), default=500, help="tokens of each, at most (500)")
    p.add_argument("--temperature", type=float, default=0.8, help="below 1 is safer, 0 takes the likeliest (0.8)")
    p.add_argument("--top_k", type=int, help="choose among the k likeliest tokens (all)")
    p.add_argument("--top_p", type=float, help="choose among the likeliest that together reach p (all)")
    p.add_argument("--seed", type=int, default=1337, help="of the choices (1337)")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    p.add_argument("--device", default=device, help="cuda, cpu, … (cuda where there is one)")
    p.add_argument("--dtype", choices=["float32", "bfloat16"], help="of the matmuls (bfloat16 on cuda)")
    p.add_argument("--compile", action=argparse.BooleanOptionalAction, help="torch.compile a step (on cuda)")
    args = p.parse_args(argv)
    if min(args.num_samples, args.max_new_tokens) < 1:
        p.error("--num_samples and --max_new_tokens must be at least 1")

    found = sorted(Path("out").rglob("ckpt.pt"), key=os.path.getmtime)
    if not (args.ckpt or found):
        raise ValueError("no checkpoint under out/: `python train.py --attn=diff` makes one, or name one with --ckpt")
    path = args.ckpt or found[-1]
    path = path / "ckpt.pt" if path.is_dir() else path
    try:
        device = torch.zeros(1, device=args.device).device
    except (RuntimeError, AssertionError) as e:
        raise ValueError(f"--device={args.device}: {str(e).splitlines()[0]}") from None
    cuda = device.type == "cuda"
    model = GPT.load(path, device)
    enc = get_tokenizer(model.extra.get("tokenizer"))
    bf16 = args.dtype == "bfloat16" or (args.dtype is None and cuda)
    pick_kernel(model, "auto", torch.bfloat16 if bf16 else torch.float32)
    print(f"{path}: {model.config.attn}, step {model.extra.get('step')}", file=sys.stderr)

    if not cuda and sum(p.numel() for p in model.parameters()) < 10e6:
        torch.set_num_threads(1)  # the matmuls of one token are too short to share
    if bf16:
        for name, p in model.named_parameters():
            if "lambda" not in name:  # rounded they would be off
                p.data = p.data.bfloat16()  # once; autocast would do it for every token
    prompt = enc.encode(args.prompt, allowed_special={EOT}) or [enc.eot_token]
    idx = torch.tensor([prompt], device=device).repeat(args.num_samples, 1)
    generator = torch.Generator(device).manual_seed(args.seed)
    how = dict(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, generator=generator)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=bf16)
    if args.compile or (args.compile is None and cuda):
        how["step"] = torch.compile(model.step, mode="reduce-overhead", fullgraph=True)
        with autocast:
            list(model.generate(idx, 4, **how | dict(temperature=0)))  # compiles, and draws nothing from the generator

    # a token may hold half a character: the decoders keep it back until the other half comes
    decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in range(args.num_samples)]
    texts, ended, made, first, start = [""] * args.num_samples, set(), 0, None, time.time()
    print(args.prompt, end="", flush=True)
    with autocast:
        for tokens in model.generate(idx, args.max_new_tokens, **how):
            first = first or time.time() - start
            for i, token in enumerate(tokens.tolist()):
                if token == enc.eot_token:
                    ended.add(i)
                if i not in ended:
                    made += 1
                    new = decoders[i].decode(enc.decode_single_token_bytes(token))
                    texts[i] += new
                    print(new if i == 0 else "", end="", flush=True)
            if len(ended) == args.num_samples:
                break
    seconds = time.time() - start
    print(decoders[0].decode(b"", final=True))
    for i in range(1, args.num_samples):
        print(f"\n--- sample {i + 1}\n{args.prompt}{texts[i]}{decoders[i].decode(b'', final=True)}")
    rate = f"{made} tokens in {seconds:.2f} s: {made / seconds:,.0f} tokens/s"
    print(f"{rate}, first after {first:.3f} s", file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as e:
        sys.exit(f"sample.py: {e}")
