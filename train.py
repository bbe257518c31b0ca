"""
Trains one GPT, or several in turn, and writes out/<run>/ckpt.pt and out/<run>/log.jsonl.

    python train.py --attn=diff                     # the toy preset, offline, minutes on two CPU cores
    python train.py --attn=softmax --data=any.txt   # the same on the bytes of any text
    python train.py --attn=softmax,diff,linear,diff_linear --seed=1,2,3     # a comparison: ends in a table and a figure
    python prepare_fineweb.py && python train.py --attn=diff                # GPT-2 small on FineWeb-Edu, on a GPU
    torchrun --standalone --nproc_per_node=8 train.py --attn=diff           # on eight

Stop it whenever you like: the same command goes on, and ends in the same bits as if nothing had happened.
The batch of step s is a pure function of (data, seed, s, rank, world size), so every arm sees the same tokens in the
same order.
"""
import argparse
import gc
import json
import math
import os
import signal
import sys
import time
from collections import deque
from dataclasses import asdict, fields
from datetime import timedelta
from functools import lru_cache
from itertools import product
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from model import ATTENTION, GPT, KERNELS, GPTConfig, pick_kernel, wide
from prepare_fineweb import (SHARDS, Parser, count, device_name, get_tokenizer, load_data, lock, no_compiler, number,
                             one_line, one_of, out_of_memory, pick_device, several, whole)  # fmt: skip

PRESETS = {
    "toy": dict(n_layer=4, n_head=4, n_embd=128, block_size=256, batch_size=8, steps=500, lr=2e-3, warmup=50,
                eval_every=100, eval_tokens=65_536, log_every=20, save_every=100),
    "gpt2": dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, batch_size=32, total_batch=524_288,
                 tokens=2_800_000_000, lr=1.5e-3, warmup=375,
                 eval_every=250, eval_tokens=10_485_760, log_every=10, save_every=250),
}  # fmt: skip
COMMON = dict(rope_theta=10000.0, flash=True, decay=False, subln=None, subln_init=1.0, lambda_init=None,
              total_batch=None, tokens=None, steps=None, weight_decay=0.1, grad_clip=1.0, seed=1337)  # fmt: skip
OPTIMIZER = ("total_batch", "lr", "warmup", "weight_decay", "grad_clip", "seed")  # with the model: the folder's name
# what makes a run the run it is: a folder in which one of these is another is left alone
IDENTITY = [f.name for f in fields(GPTConfig) if f.name != "flash"]
IDENTITY += [*OPTIMIZER, "steps", "eval_tokens", "tokenizer", "data_sha256"]
PROMPT = "Once upon a time"
PEAK = {"H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "A100": 312e12}  # bf16 dense FLOP/s


def parse(argv):
    """The parser, and the arguments of every run that the flags ask for."""
    p = Parser(prog="train.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    both = argparse.BooleanOptionalAction
    g = p.add_argument_group("what is trained, on what (defaults come from the preset)")
    g.add_argument("--attn", type=several(one_of(ATTENTION)), default=["softmax"], help=f"{', '.join(ATTENTION)}: one or a comma list")
    g.add_argument("--preset", choices=PRESETS, help="toy, or gpt2 where there are shards and a CUDA device")
    g.add_argument("--data", type=Path, help=f"folder of shards or text file ({SHARDS}; toy: Python's manual)")
    g.add_argument("--out", type=Path, help="the run's folder (out/<attn> and what differs from the preset); "
                   "of several runs the folder they are in")  # fmt: skip
    g.add_argument("--restart", action="store_true", help="train anew over a folder that holds a run")
    g = p.add_argument_group("model")
    g.add_argument("--n_layer", type=count, help="blocks")
    g.add_argument("--n_head", type=count, help="heads of the softmax model; the differential arms have half")
    g.add_argument("--n_embd", type=count, help="channels")
    g.add_argument("--block_size", type=count, help="tokens per sequence")
    g.add_argument("--rope_theta", type=number(0), help="base of the rotary angles, 0 for no positions (10000)")
    g.add_argument("--flash", action=both, help="the fast form of the attention, or the map (fast)")
    g.add_argument("--kernel", default="auto", choices=("auto", *KERNELS), help="softmax family's, with --flash (auto)")
    g.add_argument("--decay", action=both, help="heads forget: D_ij = gamma^(i - j) (no)")
    g.add_argument("--subln", action=both, help="RMSNorm on each head's output and the factor 1 - lambda_init (diff arms)")
    g.add_argument("--subln_init", type=number(), help="initial weight of that norm (1)")
    g.add_argument("--lambda_init", type=number(), help="a constant instead of 0.8 - 0.6 exp(-0.3 l)")
    g = p.add_argument_group("optimization")
    g.add_argument("--batch_size", type=count, help="sequences per micro-step of one process")
    g.add_argument("--total_batch", type=count, help="tokens per optimizer step, of all processes")
    length = g.add_mutually_exclusive_group()
    length.add_argument("--steps", type=count, help="optimizer steps (500 in toy)")
    length.add_argument("--tokens", type=count, help="tokens, instead of steps (2.8e9 in gpt2)")
    g.add_argument("--lr", type=several(number(above=0)), help="peak learning rate, one or a list (2e-3, gpt2: 1.5e-3)")
    g.add_argument("--warmup", type=whole, help="steps of linear warm-up, before the linear decay to 0")
    g.add_argument("--weight_decay", type=number(0), help="AdamW's, on matrices only (0.1)")
    g.add_argument("--grad_clip", type=number(above=0), help="largest gradient norm (1.0)")
    g.add_argument("--seed", type=several(whole), default=[1337], help="of weights and data order, or a list (1337)")
    g = p.add_argument_group("watching and saving")
    g.add_argument("--eval_every", type=count, help="steps between evaluations")
    g.add_argument("--eval_tokens", type=count, help="val tokens per evaluation, at most what the run trains on")
    g.add_argument("--log_every", type=count, help="steps between lines of the log")
    g.add_argument("--save_every", type=count, help="steps between checkpoints")
    g = p.add_argument_group("machine")
    g.add_argument("--device", help="cuda, cuda:1, cpu, … (cuda where there is one)")
    g.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the matmuls (bfloat16 on cuda)")
    g.add_argument("--compile", action=both, help="torch.compile (on cuda)")
    args = p.parse_args(argv)

    # the machine, and torchrun's processes
    args.rank, args.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if args.world > 1 and args.device in (None, "cuda") and torch.cuda.is_available():
        args.device = f"cuda:{os.environ['LOCAL_RANK']}"
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
    common = preset | dict(lr=[preset["lr"]]) | chosen
    if args.preset == "toy" and args.total_batch is None:
        common["total_batch"] = common["batch_size"] * common["block_size"] * (args.world if args.batch_size else 1)
    total, T, B = common["total_batch"], common["block_size"], common["batch_size"]
    if args.batch_size is None and total % (T * args.world) == 0:  # the preset's, or the next smaller one that divides
        common["batch_size"] = B = next(b for b in range(B, 0, -1) if total % (b * T * args.world) == 0)
    if total % (micro := B * T * args.world):
        processes = f" times {args.world} processes" if args.world > 1 else ""
        p.fail(f"--total_batch={total} is not a multiple of --batch_size times --block_size{processes}, {micro}: "
               f"the nearest is {max(1, round(total / micro)) * micro}")  # fmt: skip
    if args.steps is None and common["tokens"]:
        common["steps"] = math.ceil(common["tokens"] / total)
    common["tokens"] = common["steps"] * total

    runs, parent = [], args.out or Path("out")
    names = [f.name for f in fields(GPTConfig) if f.name in preset] + list(OPTIMIZER)
    for seed, lr, attn in product(args.seed, common["lr"], args.attn):
        run = common | dict(seed=seed, lr=lr)
        name = "-".join([attn] + [tag(n, run[n]) for n in names if run[n] != preset[n]])
        run |= dict(attn=attn, out=parent / name, warmup=min(run["warmup"], run["steps"] - 1))
        runs.append(argparse.Namespace(**vars(args) | run))
    if args.out and len(runs) == 1:
        runs[0].out = args.out
    return p, runs


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


def sequences(data, numbers, args, vocab_size):
    """(len(numbers), T + 1) int64 on the device: those sequences of the data."""
    tokens = np.stack([data.sequence(int(i), args.block_size) for i in numbers])
    if tokens.max() >= vocab_size:
        raise ValueError(f"--data holds token {tokens.max()}, its tokenizer ends below {vocab_size}: make it anew")
    tokens = torch.from_numpy(tokens)
    if args.device.type == "cuda":
        tokens = tokens.pin_memory()  # so that the copy need not be waited for
    return tokens.to(args.device, non_blocking=True)


def batch(train, args, step, micro, vocab_size):
    """The tokens of one micro-step of this process, (batch_size, T + 1): the shuffled epochs laid end to end, and cut
    into steps, a step into micro-steps, a micro-step into ranks."""
    n, B = train.sequences(args.block_size), args.batch_size
    first = step * (args.total_batch // args.block_size) + (micro * args.world + args.rank) * B
    numbers = [permutation(n, args.seed, g // n)[g % n] for g in range(first, first + B)]
    return sequences(train, numbers, args, vocab_size)


@torch.no_grad()
def evaluate(model, val, args, autocast, vocab_size):
    """The loss in nats of each of val's first sequences, (n,): the same ones for every arm and number of processes."""
    B, T = args.batch_size, args.block_size
    n = min(val.sequences(T), max(1, min(args.eval_tokens, args.tokens) // T))
    losses = torch.zeros(n, device=args.device)
    for first in range(args.rank * B, n, args.world * B):
        # always a whole batch, so that nothing is compiled for a smaller one
        tokens = sequences(val, [i % n for i in range(first, first + B)], args, vocab_size)
        with autocast:
            logits, _ = model(tokens[:, :-1], tokens[:, 1:])
        for i, row, target in zip(range(first, n), logits, tokens[:, 1:]):
            losses[i] = F.cross_entropy(wide(row), target)
    if args.world > 1:
        dist.all_reduce(losses)
    return losses


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


def make_optimizer(model, args):
    """AdamW that decays matrices only (embeddings included)."""
    decay = [q for q in model.parameters() if q.ndim >= 2]
    rest = [q for q in model.parameters() if q.ndim < 2]
    groups = [dict(params=decay, weight_decay=args.weight_decay), dict(params=rest, weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)


def peak_memory(device, reset=False):
    """The most bytes held since the last reset: by a GPU's tensors; without one by the whole process (Linux, else None)."""
    if device.type == "cuda":
        return torch.cuda.reset_peak_memory_stats(device) if reset else torch.cuda.max_memory_allocated(device)
    try:
        if reset:
            return Path("/proc/self/clear_refs").write_text("5") and None
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split("VmHWM:")[1].split()[0])
    except (OSError, IndexError):
        return None


def read_log(path):
    """(head, records, bytes up to the end of each line) of a log.jsonl, whose last line may be cut short. ValueError for
    any other that is not ours."""
    head, records, ends = None, [], [0]
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for n, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            needed = (record["attn"], record["seed"], record["steps"]) if head is None else (record["step"], record["tokens"])
            sound = line.endswith(b"\n") and all(type(x) is int for x in needed[-2:])
        except (ValueError, KeyError, TypeError):
            sound = False
        if not sound and n == len(lines):
            break
        if not sound:
            raise ValueError(f"line {n} of {path} is damaged: --restart trains the run anew")
        if head is None:
            head = record
        else:
            records.append(record)
        ends.append(ends[-1] + len(line))
    return head, records, ends


def build(config, seed):
    """GPT(config, seed). ValueError for one that is too large."""
    try:
        return GPT(config, seed)
    except (RuntimeError, MemoryError) as e:
        raise ValueError(f"there is no room for this model: {one_line(e)}") from None


def check(args, head):
    """Raises ValueError if the run's folder holds another run than head says, naming the difference."""
    if args.restart:
        return
    before, records, _ = read_log(args.out / "log.jsonl")
    if not records and (args.out / "ckpt.pt").exists():
        raise ValueError(f"{args.out} holds a checkpoint and no log.jsonl that says of what: --restart trains it anew")
    different = [k for k in IDENTITY if before is not None and before.get(k) != head[k]]
    if different:
        what = "; ".join(f"{k} is {before.get(k)!r} there and {head[k]!r} here" for k in different)
        raise ValueError(f"{args.out} holds another run: {what}. --out=… writes elsewhere, --restart trains it anew")


def train_one(args, head, data, stopping, alone):
    """One run, from where it stopped. True if it is finished, False if `stopping` was filled or the loss not finite."""
    train, val, enc = data
    config = GPTConfig(**{f.name: head[f.name] for f in fields(GPTConfig)})
    log_path, ckpt_path, master = args.out / "log.jsonl", args.out / "ckpt.pt", args.rank == 0
    say = print if master else lambda *a, **k: None
    gc.collect()  # the run before
    if args.device.type == "cuda":
        torch.cuda.empty_cache()
    peak_memory(args.device, reset=True)

    # the model, new or from the checkpoint
    kept = 0  # bytes of the log
    if ckpt_path.exists() and not args.restart:
        raw = GPT.load(ckpt_path, args.device)
        step = raw.extra.get("step", 0)
        _, records, ends = read_log(log_path)
        kept = ends[1 + sum(r["step"] <= step for r in records)]
        if step == args.steps:
            if records[-1]["step"] != step:
                raise ValueError(f"{log_path} lacks its last line: --restart trains the run anew")
            say(f"{args.out}: finished, {step} steps, val loss {records[-1]['val_loss']:.4f} (--restart trains it anew)")
            return True
        if "optimizer" not in raw.extra:
            raise ValueError(f"{ckpt_path} holds no optimizer to go on with: --restart trains it anew")
    else:
        raw, step = build(config, args.seed).to(args.device), 0
    for block in raw.blocks:
        block.attn.flash = args.flash
    kernel, why = pick_kernel(raw, args.kernel, getattr(torch, args.dtype))
    optimizer = make_optimizer(raw, args)
    if kept:
        optimizer.load_state_dict(raw.extra.pop("optimizer"))
    compiled = torch.compile(raw) if args.compile else raw
    model = compiled
    if args.world > 1:
        dist.barrier()  # everyone has read the folder
        model = DistributedDataParallel(compiled, [args.device] if args.device.type == "cuda" else None)
    autocast = torch.autocast(args.device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")
    peak = next((flops for name, flops in PEAK.items() if name in head["device_name"]), None)
    say(f"{args.attn}: {head['parameters'] / 1e6:.2f} M parameters, seed {args.seed}, {args.steps} steps of "
        f"{args.total_batch:,} tokens, peak rate {args.lr:g} -> {args.out}")  # fmt: skip
    if kernel:
        say(f"kernel {kernel}" + (f" ({why})" if why else ""))

    if master:
        args.out.mkdir(parents=True, exist_ok=True)
        log_file = open(log_path, "ab")
        lock(log_file, args.out)
        if not kept:
            ckpt_path.unlink(missing_ok=True)
        log_file.truncate(kept)

    def log(record):
        if master:
            log_file.write((json.dumps(record) + "\n").encode())
            log_file.flush()

    if kept:
        say(f"goes on after step {step}")
    else:
        log(head)
    shown = master and sys.stdout.isatty()
    bar = tqdm(total=args.steps, initial=step, unit="step", leave=False, disable=not shown, file=sys.stdout)

    def save():
        if master:
            os.fsync(log_file.fileno())  # the log is never behind the checkpoint
            more = {} if step == args.steps else dict(optimizer=optimizer.state_dict())
            raw.save(ckpt_path, tokenizer=head["tokenizer"], step=step, run=head, **more)

    def lambdas():
        diff = [block.attn.lambda_full() for block in raw.blocks if block.attn.branches == 2]
        return torch.stack(diff).tolist() if diff else None

    def report(train_loss=None, lr=None, grad_norm=None, tok_per_s=None):
        """One line for the log and one for the reader; at evals with the val loss, the lambdas and a sample."""
        mfu = tok_per_s and peak and tok_per_s * raw.flops_per_token(args.block_size) / (peak * args.world)
        record = dict(step=step, tokens=step * args.total_batch, train_loss=train_loss, lr=lr, grad_norm=grad_norm)
        record |= dict(tok_per_s=tok_per_s, mfu=mfu)
        line, evaluated = "", step % args.eval_every == 0 or step == args.steps
        if train_loss is not None:
            speed = f"{tok_per_s:,.0f} tok/s" + (f" | MFU {mfu:.1%}" if mfu else "")
            bar.set_postfix_str(f"loss {train_loss:.3f} | {speed}")
            left = timedelta(seconds=round((args.steps - step) * args.total_batch / tok_per_s))
            line += f" | train {train_loss:.4f} | lr {lr:.2e} | norm {grad_norm:5.2f} | {speed} | {left} left"
        if evaluated:
            losses = evaluate(compiled, val, args, autocast, config.vocab_size).double()
            record["val_loss"] = losses.mean().item()
            line += f" | val {record['val_loss']:.4f}"
            if not math.isfinite(record["val_loss"]):
                return not_finite(f"val loss {record['val_loss']}")
            if step == args.steps:
                record["val_losses"] = [round(x, 5) for x in losses.tolist()]  # by sequence
                record["peak_memory"] = peak_memory(args.device)
            record["lambda"] = lambdas()
            if record["lambda"]:
                line += " | lambda " + " ".join(f"{x:.2f}" for x in record["lambda"])
            if master:
                record["sample"] = speak(raw, enc, args, autocast, 40, temperature=0)
                line += f"\n      {record['sample']!r}"
        log(record)
        if bar.disable:
            say(f"step {step:>5}/{args.steps}{line}", flush=True)
        elif evaluated:
            bar.write(f"step {step:>5}/{args.steps}{line}")
        return True

    norms, last_lambdas = deque(maxlen=5), lambdas()

    def not_finite(what):
        bar.close()
        kept = "none was saved"
        if ckpt_path.exists():
            kept = f"the checkpoint of step {torch.load(ckpt_path, mmap=True)['step']} stays"
        seen = f"last gradient norms {' '.join(norms)}"
        if last_lambdas:
            seen += f"; last lambdas {' '.join(f'{x:.3g}' for x in last_lambdas)}"
        log(dict(step=step, tokens=step * args.total_batch, not_finite=what))
        line = f"train.py: stopped at step {step} of {args.out}: {what}; {seen}; {kept}; look at --lr and --lambda_init"
        say(line, file=sys.stderr)
        return False

    if not kept and not report():
        return False
    micro_steps = args.total_batch // (args.batch_size * args.block_size * args.world)
    coming = (batch(train, args, s, m, config.vocab_size) for s in range(step, args.steps) for m in range(micro_steps))
    tokens = next(coming)
    clock, since = time.perf_counter(), step
    while step < args.steps:
        lr = learning_rate(step, args)
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss_sum = 0.0
        for micro in range(micro_steps):
            if args.world > 1:
                model.require_backward_grad_sync = micro == micro_steps - 1  # the ranks' mean gradient once a step
            with autocast:
                loss = model(tokens[:, :-1], tokens[:, 1:])[1]
            tokens = next(coming, None)  # read and copied while the device computes
            (loss / micro_steps).backward()
            loss_sum = loss_sum + loss.detach()
        grad_norm = torch.nn.utils.clip_grad_norm_(raw.parameters(), args.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        bar.update()
        stop = torch.tensor(float(bool(stopping)))
        if args.world > 1:
            dist.all_reduce(stop)  # on the CPU, where nobody waits for the device
        last = step == args.steps
        logged = last or step % args.log_every == 0 or step % args.eval_every == 0
        saved = last or stop > 0 or step % args.save_every == 0
        if logged or saved:
            train_loss = loss_sum / micro_steps
            if args.world > 1:
                dist.all_reduce(train_loss)
            train_loss, grad_norm = train_loss.item() / args.world, grad_norm.item()
            norms.append(f"{grad_norm:.3g}")
            if not math.isfinite(train_loss + grad_norm):
                return not_finite(f"loss {train_loss:.4g}, gradient norm {grad_norm:.3g}")
            last_lambdas = lambdas()
        if logged:
            tok_per_s = (step - since) * args.total_batch / (time.perf_counter() - clock)
            if not report(train_loss, lr, grad_norm, tok_per_s):
                return False
        if saved:
            save()
        if logged or saved:
            clock, since = time.perf_counter(), step
        if stop > 0 and not last:
            stopping.append("another process was told")
            bar.close()
            how = "the same command without --restart" if args.restart else "the same command"
            say(f"stopped after step {step} of {args.steps}, saved in {args.out}: {how} goes on")
            return False
    bar.close()
    if alone and master:
        generator = torch.Generator(args.device).manual_seed(0)
        print("\n" + speak(raw, enc, args, autocast, 200, temperature=0.8, generator=generator))
        print(f'\nmore of it: python sample.py --ckpt={ckpt_path} --prompt="{PROMPT}"')
    return True


def train_all(p, runs, stopping):
    """The runs in turn, each from where it stopped. True if all of them are finished."""
    first = runs[0]
    try:
        train, val, tokenizer, what = load_data(first.data)
    except OSError as e:
        raise ValueError(one_line(e)) from None
    enc, T, say = get_tokenizer(tokenizer), first.block_size, print if first.rank == 0 else lambda *a: None
    for name, split in (("train", train), ("val", val)):
        if not split.sequences(T):
            p.fail(f"the {name} split has {split.tokens} tokens, and one sequence needs {T + 1}: "
                   "give more --data or a smaller --block_size")  # fmt: skip
    for name, split, needed in (("train", train, first.total_batch // T), ("val", val, first.batch_size)):
        if split.sequences(T) < needed:
            p.fail(f"a batch is {needed} sequences and the {name} split has {split.sequences(T)} of {T} tokens: "
                   "give more --data, or a smaller --batch_size and --total_batch")  # fmt: skip
    heads = []
    for args in runs:
        flags = {k: str(v) if isinstance(v, (Path, torch.device)) else v for k, v in vars(args).items() if k != "rank"}
        model_flags = {f.name: getattr(args, f.name) for f in fields(GPTConfig) if f.name != "vocab_size"}
        config = GPTConfig(vocab_size=enc.n_vocab, **model_flags)
        head = flags | asdict(config) | what | dict(tokenizer=tokenizer)
        parameters = sum(q.numel() for q in build(config, None).parameters())  # on the meta device: no memory
        head |= dict(train_tokens=train.tokens, val_tokens=val.tokens, parameters=parameters)
        head |= dict(device_name=device_name(args.device), torch=str(torch.__version__))
        head |= dict(python=sys.version.split()[0], date=time.strftime("%Y-%m-%d"))
        check(args, head)  # of every run, before the first one costs a minute
        heads.append(head)
    how = [f"preset {first.preset}", heads[0]["device_name"], first.dtype, "compiled" if first.compile else "eager"]
    how += [f"attention by {'its fast form' if first.flash else 'the map'}", f"micro-steps of {first.batch_size} x {T} tokens"]
    how += [f"{first.world} processes"] if first.world > 1 else []
    say(", ".join(how))
    say(f"data: {what['data']}, {train.tokens:,} tokens to train on, {val.tokens:,} val, tokenizer {tokenizer}")
    if first.data is None:
        say("      (Python's own manual, byte by byte. For the real run: a GPU, python prepare_fineweb.py, another --out)")
    finished = []
    for args, head in zip(runs, heads):
        if len(runs) > 1:
            say(f"\nrun {len(finished) + 1} of {len(runs)}")
        finished.append(train_one(args, head, (train, val, enc), stopping, len(runs) == 1))
        if stopping:
            return False
    if len(runs) > 1 and first.rank == 0:
        from bench import compare

        compare([args.out for args in runs], first.out.parent)
    return all(finished)


def main(argv=None):
    """True if all runs are finished, False if one of them is not finite."""
    p, runs = parse(argv)
    first, stopping = runs[0], []
    torch.set_float32_matmul_precision("high")
    torch.compiler.reset()
    torch._dynamo.config.recompile_limit = 64  # each arm of a comparison counts, to train and to evaluate
    if first.world > 1:
        if first.device.type == "cuda":
            torch.cuda.set_device(first.device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if first.device.type == "cuda" else "gloo")

    def stop(number, frame):
        stopping.append(number)
        signal.signal(number, signal.default_int_handler)  # the second one does not wait

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        finished = train_all(p, runs, stopping)
    except (RuntimeError, MemoryError) as e:
        if no_compiler(e):
            p.fail(no_compiler(e))
        if not out_of_memory(e):
            raise
        fits = first.total_batch // (first.block_size * first.world)
        smaller = next((b for b in range(first.batch_size // 2, 0, -1) if fits % b == 0), None)
        hint = f"try --batch_size={smaller} --total_batch={first.total_batch}" if smaller else "the model is too large"
        p.fail(f"out of memory at --batch_size={first.batch_size}: {hint}")
    except (ValueError, ImportError) as e:
        p.fail(one_line(e))
    except OSError as e:
        if isinstance(e, BrokenPipeError):  # the reader, `| head` say, has had enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        p.fail(f"stopped: {one_line(e)}; what was saved last stays, and the same command goes on from there")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if first.world > 1:
            dist.destroy_process_group()
    if stopping:
        sys.exit(0)
    return finished


if __name__ == "__main__":
    try:
        sys.exit(0 if main() else 1)
    except KeyboardInterrupt:
        sys.exit("train.py: interrupted; what was saved last stays, and the same command goes on from there")
