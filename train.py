"""
Trains one GPT and writes out/<run>/ckpt.pt and out/<run>/log.jsonl.

    python train.py --attn=diff                     # the toy preset, offline, minutes on two CPU cores
    python train.py --attn=softmax --data=any.txt   # the same on the bytes of any text
    python prepare_fineweb.py && python train.py --attn=diff       # GPT-2 small on FineWeb-Edu, on a GPU

The batch of step s is a pure function of (data, seed, s), so every arm sees the same tokens in the same order.
"""
import argparse
import json
import math
import os
import sys
import time
from dataclasses import asdict, fields
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from model import ATTENTION, GPT, GPTConfig
from prepare_fineweb import SHARDS, Parser, count, device_name, get_tokenizer, load_data, number, pick_device, whole

PRESETS = {
    "toy": dict(n_layer=4, n_head=4, n_embd=128, block_size=256, batch_size=8, steps=500, lr=2e-3, warmup=50,
                eval_every=100, eval_tokens=65_536, log_every=20, save_every=100),
    "gpt2": dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, batch_size=32, total_batch=524_288,
                 tokens=2_800_000_000, lr=1.5e-3, warmup=375,
                 eval_every=250, eval_tokens=10_485_760, log_every=10, save_every=250),
}  # fmt: skip
COMMON = dict(rope_theta=10000.0, flash=True, subln=None, lambda_init=None, total_batch=None, tokens=None, steps=None,
              weight_decay=0.1, grad_clip=1.0, seed=1337)  # fmt: skip
OPTIMIZER = ("total_batch", "lr", "warmup", "weight_decay", "grad_clip", "seed")  # with the model: the folder's name
PROMPT = "Once upon a time"
PEAK = {"H100 PCIe": 756e12, "H100 80GB HBM3": 989e12, "H200": 989e12, "A100": 312e12}  # bf16 dense FLOP/s


def parse(argv):
    p = Parser(prog="train.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    both = argparse.BooleanOptionalAction
    g = p.add_argument_group("what is trained, on what (defaults come from the preset)")
    g.add_argument("--attn", default="softmax", choices=ATTENTION, help="the attention (softmax)")
    g.add_argument("--preset", choices=PRESETS, help="toy, or gpt2 where there are shards and a CUDA device")
    g.add_argument("--data", type=Path, help=f"folder of shards or text file ({SHARDS} for gpt2, Python's manual for toy)")
    g.add_argument("--out", type=Path, help="the run's folder (out/<attn> and what differs from the preset)")
    g.add_argument("--restart", action="store_true", help="train anew over a folder that holds a run")
    g = p.add_argument_group("model")
    g.add_argument("--n_layer", type=count, help="blocks")
    g.add_argument("--n_head", type=count, help="heads of the softmax model; the differential arms have half")
    g.add_argument("--n_embd", type=count, help="channels")
    g.add_argument("--block_size", type=count, help="tokens per sequence")
    g.add_argument("--rope_theta", type=number(0), help="base of the rotary angles, 0 for no positions (10000)")
    g.add_argument("--flash", action=both, help="the fast form of the attention, or the map (fast)")
    g.add_argument("--subln", action=both, help="RMSNorm on each head's output, and its factor 1 - lambda_init (diff arms)")
    g.add_argument("--lambda_init", type=number(), help="a constant instead of 0.8 - 0.6 exp(-0.3 l)")
    g = p.add_argument_group("optimization")
    g.add_argument("--batch_size", type=count, help="sequences per micro-step")
    g.add_argument("--total_batch", type=count, help="tokens per optimizer step (one micro-step in toy)")
    length = g.add_mutually_exclusive_group()
    length.add_argument("--steps", type=count, help="optimizer steps (500 in toy)")
    length.add_argument("--tokens", type=count, help="tokens, instead of steps (2.8e9 in gpt2)")
    g.add_argument("--lr", type=number(above=0), help="peak learning rate (2e-3 in toy, 1.5e-3 in gpt2)")
    g.add_argument("--warmup", type=whole, help="steps of linear warm-up, before the linear decay to 0")
    g.add_argument("--weight_decay", type=number(0), help="AdamW's, on matrices only (0.1)")
    g.add_argument("--grad_clip", type=number(above=0), help="largest gradient norm (1.0)")
    g.add_argument("--seed", type=whole, help="of the weights and of the order of the data (1337)")
    g = p.add_argument_group("watching it")
    g.add_argument("--eval_every", type=count, help="steps between evaluations")
    g.add_argument("--eval_tokens", type=count, help="val tokens per evaluation, at most what the run trains on")
    g.add_argument("--log_every", type=count, help="steps between lines of the log")
    g.add_argument("--save_every", type=count, help="steps between checkpoints")
    g = p.add_argument_group("machine")
    g.add_argument("--device", help="cuda, cuda:1, cpu, … (cuda where there is one)")
    g.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the matmuls (bfloat16 on cuda)")
    g.add_argument("--compile", action=both, help="torch.compile (on cuda)")
    args = p.parse_args(argv)

    # the machine
    try:
        args.device = pick_device(args.device)
    except ValueError as e:
        p.fail(str(e))
    cuda = args.device.type == "cuda"
    args.dtype = args.dtype or ("bfloat16" if cuda else "float32")
    args.compile = cuda if args.compile is None else args.compile

    # the preset fills what no flag said
    if args.preset is None:
        folder = args.data or SHARDS
        args.preset = "gpt2" if cuda and folder.is_dir() and any(folder.glob("*.bin")) else "toy"
    if args.data is None and args.preset == "gpt2":
        args.data = SHARDS
    preset = COMMON | PRESETS[args.preset]
    preset["total_batch"] = preset["total_batch"] or preset["batch_size"] * preset["block_size"]
    chosen = {k: v for k, v in vars(args).items() if v is not None and k in preset}
    run = preset | chosen
    if args.preset == "toy" and args.total_batch is None:
        run["total_batch"] = run["batch_size"] * run["block_size"]
    micro = run["batch_size"] * run["block_size"]
    if run["total_batch"] % micro:
        nearest = max(1, round(run["total_batch"] / micro)) * micro
        p.fail(f"--total_batch={run['total_batch']} is not a multiple of --batch_size times --block_size, {micro}: "
               f"the nearest is {nearest}")  # fmt: skip
    if args.steps is None and run["tokens"]:
        run["steps"] = math.ceil(run["tokens"] / run["total_batch"])
    run["tokens"] = run["steps"] * run["total_batch"]
    for name in run:
        setattr(args, name, run[name])

    if args.out is None:
        names = [f.name for f in fields(GPTConfig) if f.name in preset] + list(OPTIMIZER)
        args.out = Path("out") / "-".join([args.attn] + [tag(n, run[n]) for n in names if run[n] != preset[n]])
    args.warmup = min(args.warmup, args.steps - 1)
    return p, args


def tag(name, value):
    """One part of a run's name: nosubln, lr3e-3, n_layer6."""
    if isinstance(value, bool):
        return name if value else f"no{name}"
    if isinstance(value, float):
        value = np.format_float_scientific(value, trim="-", exp_digits=1) if 0 < value < 0.01 else f"{value:g}"
    return f"{name}{value}"


@lru_cache(maxsize=2)
def permutation(n, seed, epoch):
    return np.random.default_rng([seed, epoch]).permutation(n)


def sequences(data, T, numbers, vocab_size):
    """(len(numbers), T + 1) int64: those sequences of the data."""
    tokens = np.stack([data.sequence(int(i), T) for i in numbers])
    if tokens.max() >= vocab_size:
        sys.exit(f"train.py: --data holds token {tokens.max()}, its tokenizer ends below {vocab_size}: make it anew")
    return torch.from_numpy(tokens)


def batch(train, args, step, micro, vocab_size):
    """Inputs and targets of one micro-step, both (batch_size, T): the shuffled epochs laid end to end, cut in order."""
    n, per_step = train.sequences(args.block_size), args.total_batch // args.block_size
    first = step * per_step + micro * args.batch_size
    numbers = [permutation(n, args.seed, g // n)[g % n] for g in range(first, first + args.batch_size)]
    tokens = sequences(train, args.block_size, numbers, vocab_size)
    return tokens[:, :-1].to(args.device), tokens[:, 1:].to(args.device)


@torch.no_grad()
def evaluate(model, val, args, autocast, vocab_size):
    """Mean loss in nats over the first sequences of val, the same for every arm."""
    n = min(val.sequences(args.block_size), max(1, min(args.eval_tokens, args.tokens) // args.block_size))
    total = 0.0
    for first in range(0, n, args.batch_size):
        tokens = sequences(val, args.block_size, range(first, min(first + args.batch_size, n)), vocab_size)
        tokens = tokens.to(args.device)
        with autocast:
            total += model(tokens[:, :-1], tokens[:, 1:])[1].item() * len(tokens)
    return total / n


def speak(model, enc, args, autocast, max_new_tokens, **how):
    """What the model makes of PROMPT."""
    idx = torch.tensor([enc.encode_ordinary(PROMPT)], device=args.device)
    with autocast:
        new = [t.item() for t in model.generate(idx, max_new_tokens, **how)]
    return PROMPT + enc.decode([t for t in new if t != enc.eot_token], errors="replace")


def learning_rate(step, args):
    """Of the update that makes `step` updates `step + 1`: linear up to lr, then linear down to 0."""
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    return args.lr * (args.steps - step) / (args.steps - args.warmup)


def main(argv=None):
    p, args = parse(argv)
    torch.set_float32_matmul_precision("high")
    try:
        train, val, tokenizer, what = load_data(args.data)
        enc = get_tokenizer(tokenizer)
        model_fields = {f.name: getattr(args, f.name) for f in fields(GPTConfig) if f.name != "vocab_size"}
        config = GPTConfig(vocab_size=enc.n_vocab, **model_fields)
    except (ValueError, OSError, ImportError) as e:
        p.fail(str(e))
    for name, split in (("train", train), ("val", val)):
        if not split.sequences(args.block_size):
            p.fail(f"the {name} split has {split.tokens} tokens, and one sequence needs {args.block_size + 1}: "
                   "give more --data or a smaller --block_size")  # fmt: skip
    try:
        raw = GPT(config, seed=args.seed).to(args.device)
    except (RuntimeError, MemoryError) as e:
        p.fail(f"there is no room for this model: {str(e).splitlines()[0]}")
    log_path, ckpt_path = args.out / "log.jsonl", args.out / "ckpt.pt"
    if (log_path.exists() or ckpt_path.exists()) and not args.restart:
        p.fail(f"{args.out} holds a run already: --restart trains it anew, --out=… writes elsewhere")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        ckpt_path.unlink(missing_ok=True)
        log_file = open(log_path, "w", encoding="utf-8")
    except OSError as e:
        p.fail(f"can't write to --out: {e}")

    model = torch.compile(raw) if args.compile else raw
    decay = [q for q in raw.parameters() if q.ndim >= 2]
    rest = [q for q in raw.parameters() if q.ndim < 2]
    groups = [dict(params=decay, weight_decay=args.weight_decay), dict(params=rest, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
    autocast = torch.autocast(args.device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")
    machine = device_name(args.device)
    peak = next((flops for name, flops in PEAK.items() if name in machine), None)
    parameters = sum(q.numel() for q in raw.parameters())

    def log(record):
        log_file.write(json.dumps(record) + "\n")
        log_file.flush()

    head = {k: str(v) if isinstance(v, (Path, torch.device)) else v for k, v in vars(args).items()}
    head |= asdict(config) | what | dict(parameters=parameters, tokenizer=tokenizer)
    head |= dict(train_tokens=train.tokens, val_tokens=val.tokens)
    log(head | dict(device_name=machine, torch=torch.__version__, python=sys.version.split()[0]))
    print(f"{args.attn}: {parameters / 1e6:.2f} M parameters, {args.steps} steps of {args.total_batch:,} tokens, "
          f"preset {args.preset}, {machine}, {args.dtype}{', compiled' * args.compile} -> {args.out}")  # fmt: skip
    print(f"data: {what['data']}, {train.tokens:,} tokens to train on, {val.tokens:,} val, tokenizer {tokenizer}")
    if args.data is None:
        print("      (Python's own manual, byte by byte. For the real run: a GPU, python prepare_fineweb.py, another --out)")

    def save():
        raw.save(ckpt_path, tokenizer=tokenizer, step=step, run=head)

    def report(step, train_loss=None, lr=None, grad_norm=None, tok_per_s=None):
        """One line for the log and one for the reader; at evals with the val loss, the lambdas and a sample."""
        mfu = tok_per_s and peak and tok_per_s * raw.flops_per_token(args.block_size) / peak
        record = dict(step=step, tokens=step * args.total_batch, train_loss=train_loss, lr=lr, grad_norm=grad_norm)
        record |= dict(tok_per_s=tok_per_s, mfu=mfu)
        line = f"step {step:>5}/{args.steps}"
        if train_loss is not None:
            line += f" | train {train_loss:.4f} | lr {lr:.2e} | norm {grad_norm:5.2f} | {tok_per_s:,.0f} tok/s"
        if step % args.eval_every == 0 or step == args.steps:
            record["val_loss"] = evaluate(model, val, args, autocast, config.vocab_size)
            if not math.isfinite(record["val_loss"]):
                sys.exit(f"train.py: stopped at step {step}: val loss {record['val_loss']}; look at --lambda_init and --lr")
            diff = [block.attn.lambda_full().item() for block in raw.blocks if block.attn.diff]
            record |= {"lambda": diff or None, "sample": speak(raw, enc, args, autocast, 40, temperature=0)}
            line += f" | val {record['val_loss']:.4f}"
            if diff:
                line += " | lambda " + " ".join(f"{x:.2f}" for x in diff)
        log(record)
        print(line, flush=True)

    step = 0
    report(step)
    clock, since = time.perf_counter(), 0
    micro_steps = args.total_batch // (args.batch_size * args.block_size)
    while step < args.steps:
        lr = learning_rate(step, args)
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss_sum = 0.0
        for micro in range(micro_steps):
            x, y = batch(train, args, step, micro, config.vocab_size)
            with autocast:
                _, loss = model(x, y)
            (loss / micro_steps).backward()
            loss_sum = loss_sum + loss.detach()
        grad_norm = torch.nn.utils.clip_grad_norm_(raw.parameters(), args.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step == args.steps or 0 in (step % args.log_every, step % args.eval_every, step % args.save_every):
            train_loss = loss_sum.item() / micro_steps
            if not math.isfinite(train_loss + grad_norm.item()):
                sys.exit(f"train.py: stopped at step {step}: loss {train_loss:.4g}, gradient norm {grad_norm.item():.3g}; "
                         f"try a smaller --lr. What was saved before stays in {args.out}")  # fmt: skip
            seconds = time.perf_counter() - clock
            report(step, train_loss, lr, grad_norm.item(), (step - since) * args.total_batch / seconds)
            clock, since = time.perf_counter(), step
        if step % args.save_every == 0 or step == args.steps:
            save()
    generator = torch.Generator(args.device).manual_seed(0)
    print("\n" + speak(raw, enc, args, autocast, 200, temperature=0.8, generator=generator))
    print(f'\nmore of it: python sample.py --ckpt={ckpt_path} --prompt="{PROMPT}"')


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("train.py: interrupted; what was saved last stays")
    except OSError as e:  # a full disk, or a reader, `| head` say, that has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(f"train.py: stopped: {e}; what was saved last stays")
