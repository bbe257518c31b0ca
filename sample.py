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

from model import GPT, KERNELS, pick_kernel
from prepare_fineweb import (EOT, Parser, count, few_threads, get_tokenizer, no_compiler, number, out_of_memory,
                             pick_device, whole)  # fmt: skip


def parse(argv):
    p = Parser(prog="sample.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--prompt", default="", help=f"the text to go on from (none: {EOT}, the start of a document)")
    p.add_argument("--ckpt", type=Path, help="the checkpoint (the newest under out/)")
    p.add_argument("--num_samples", type=count, default=1, help="continuations, made as one batch (1)")
    p.add_argument("--max_new_tokens", type=count, default=500, help=f"tokens of each, unless {EOT} ends it (500)")
    p.add_argument("--temperature", type=number(0), default=0.8, help="below 1 is safer, 0 takes the likeliest (0.8)")
    p.add_argument("--top_k", type=count, help="choose among the k likeliest tokens (all)")
    p.add_argument("--top_p", type=number(above=0, most=1), help="among the likeliest that together reach p (all)")
    p.add_argument("--seed", type=whole, default=1337, help="of the choices (1337)")
    p.add_argument("--device", help="cuda, cpu, … (cuda where there is one)")
    both = argparse.BooleanOptionalAction
    p.add_argument("--flash", action=both, default=True, help="read the prompt in the attention's fast form, or as the map")
    p.add_argument("--kernel", default="auto", choices=("auto", *KERNELS), help="softmax family's, with --flash (auto)")
    p.add_argument("--compile", action=both, help="torch.compile, a step as one CUDA graph (on cuda)")
    p.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the matmuls (bfloat16 on cuda)")
    return p, p.parse_args(argv)


def main(argv=None):
    p, args = parse(argv)
    if args.ckpt is None:
        found = sorted(Path("out").rglob("ckpt.pt"), key=lambda path: path.stat().st_mtime)
        if not found:
            p.fail("no checkpoint under out/: `python train.py --attn=diff` makes one, or name it with --ckpt")
        args.ckpt = found[-1]
    if args.ckpt.is_dir():
        args.ckpt /= "ckpt.pt"
    try:
        device = pick_device(args.device)
        model = GPT.load(args.ckpt, device)
        if "tokenizer" not in model.extra:
            raise ValueError(f"{args.ckpt} does not name its tokenizer, as those of train.py do")
        enc = get_tokenizer(model.extra["tokenizer"])
        if enc.n_vocab != model.config.vocab_size:
            raise ValueError(f"{args.ckpt} has {model.config.vocab_size} tokens and its tokenizer {enc.n_vocab}")
        dtype = torch.bfloat16 if args.dtype == "bfloat16" or (not args.dtype and device.type == "cuda") else torch.float32
        for block in model.blocks:
            block.attn.flash = args.flash
        kernel, why = pick_kernel(model, args.kernel, dtype)
    except (ValueError, OSError) as e:
        p.fail(str(e))
    print(f"{args.ckpt}: {model.config.attn}, step {model.extra.get('step')}", file=sys.stderr)
    if kernel:
        print(f"kernel: {kernel}{why and f' ({why})'}", file=sys.stderr)

    few_threads(model, device)
    prompt = enc.encode(args.prompt, allowed_special={EOT}) or [enc.eot_token]
    idx = torch.tensor([prompt], device=device).repeat(args.num_samples, 1)
    if dtype == torch.bfloat16:  # autocast would cast the weights anew for every token
        for name, p in model.named_parameters():
            p.data = p.data if "lambda" in name else p.data.bfloat16()
    generator = torch.Generator(device).manual_seed(args.seed)
    how = dict(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, generator=generator)
    # a token may hold half a character: the decoders keep it back until the other half comes
    decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in range(args.num_samples)]
    texts, going = [args.prompt] * args.num_samples, set(range(args.num_samples))
    made, first = 0, None
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        if args.compile or (args.compile is None and device.type == "cuda"):
            start, how["step"] = time.time(), torch.compile(model.step, mode="reduce-overhead", fullgraph=True)
            list(model.generate(idx, 4, **how | dict(temperature=0)))  # draws nothing, so the seed says what it said
            print(f"compiled in {time.time() - start:.0f} s", file=sys.stderr)
        print(args.prompt, end="", flush=True)
        start = time.time()
        for tokens in model.generate(idx, args.max_new_tokens, **how):
            first = first or time.time() - start
            for i, token in enumerate(tokens.tolist()):
                if i in going and token == enc.eot_token:
                    going.remove(i)
                elif i in going:
                    made += 1
                    new = decoders[i].decode(enc.decode_single_token_bytes(token))
                    texts[i] += new
                    if i == 0:  # the first sample is shown as it is made, the others after it
                        print(new, end="", flush=True)
            if not going:
                break
    seconds = time.time() - start
    print(decoders[0].decode(b"", final=True))
    for i in range(1, args.num_samples):
        print(f"\n--- sample {i + 1}\n{texts[i]}{decoders[i].decode(b'', final=True)}")
    print(f"{made} tokens in {seconds:.2f} s: {made / seconds:,.0f} tokens/s, first after {first:.3f} s", file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nsample.py: interrupted")
    except (RuntimeError, MemoryError) as e:
        if not (no_compiler(e) or out_of_memory(e)):
            raise
        sys.exit(f"sample.py: {no_compiler(e) or 'out of memory: ask for fewer --num_samples'}")
    except OSError as e:  # the reader, `| head` say, has had enough; or a full disk
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1 if isinstance(e, BrokenPipeError) else f"sample.py: {e}")
