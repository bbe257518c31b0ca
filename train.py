"""
Trains one GPT, or several in turn, and writes out/<run>/ckpt.pt and out/<run>/log.jsonl.

    python train.py --attn=diff                                             # the toy, offline, minutes on two CPU cores
    python train.py --attn=softmax,diff,linear,diff_linear --seed=1,2,3     # a comparison
    torchrun --standalone --nproc_per_node=8 train.py --attn=diff           # on eight GPUs

Stop it whenever you like: the same command goes on, and ends in the same bits as if nothing had happened.
The batch of step s is a pure function of (data, seed, s, rank, world size): every arm sees the same tokens in turn.
"""
import argparse
import json
import math
import os
import re
import signal
import sys
import time
from dataclasses import asdict, fields
from datetime import timedelta
from functools import lru_cache
from itertools import product
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from data import SHARDS, get_tokenizer, load_data, lock
from model import ATTENTION, GPT, KERNELS, GPTConfig, Softmax, pick_kernel, wide

PRESETS = dict(
    toy=dict(n_layer=4, n_head=4, n_embd=128, block_size=256, batch_size=8, total_batch=2048, steps=500, lr=2e-3,
             warmup=50, eval_every=100, eval_tokens=65_536, log_every=20, save_every=100),
    gpt2=dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, batch_size=32, total_batch=524_288, tokens=2.8e9,
              lr=1.5e-3, warmup=375, eval_every=250, eval_tokens=10_485_760, log_every=10, save_every=250))
FIELDS = [f.name for f in fields(GPTConfig)]
OPTIMIZER = ["total_batch", "lr", "warmup", "weight_decay", "grad_clip", "seed"]
# what makes a run the run it is: a folder in which one of these is another is left alone
IDENTITY = [f for f in FIELDS if f != "flash"] + OPTIMIZER + ["steps", "eval_tokens", "tokenizer", "data_sha256"]
PROMPT = "Once upon a time"
PEAK = {"H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "A100": 312e12}  # bf16 dense FLOP/s
STOPPING = []  # not empty after Ctrl-C or SIGTERM: finish the step, save and end


def count(text):
    """The type of a flag: a whole number of at least 1, also written 1e9."""
    if not 1 <= float(text) < math.inf:
        raise ValueError
    return int(float(text))


def parse(argv=None):
    """The arguments of every run that the flags ask for. ValueError for flags that don't fit together."""
    p = argparse.ArgumentParser(prog="train.py", formatter_class=argparse.RawDescriptionHelpFormatter,
                                description=__doc__, epilog="\n".join(f"preset {k}: {v}" for k, v in PRESETS.items()))
    both, default_device = argparse.BooleanOptionalAction, "cuda" if torch.cuda.is_available() else "cpu"
    g = p.add_argument_group("what is trained, on what")
    g.add_argument("--attn", type=lambda s: s.split(","), default=["softmax"], help="list of " + ", ".join(ATTENTION))
    g.add_argument("--preset", choices=PRESETS, help="the defaults below (toy; gpt2 where there are shards and CUDA)")
    g.add_argument("--data", type=Path, help=f"folder of shards or text file (gpt2: {SHARDS}, toy: Python's manual)")
    g.add_argument("--out", type=Path, help="folder of the run, or of all runs (out/<attn>-<what is not the preset's>)")
    g.add_argument("--restart", action="store_true", help="train anew over a folder that holds a run")
    g = p.add_argument_group("model")
    g.add_argument("--n_layer", type=count, help="blocks")
    g.add_argument("--n_head", type=count, help="heads of the softmax model; the differential arms have half")
    g.add_argument("--n_embd", type=count, help="channels")
    g.add_argument("--block_size", type=count, help="tokens per sequence")
    g.add_argument("--rope_theta", type=float, default=10000.0, help="base of the rotary angles, 0: none (10000)")
    g.add_argument("--flash", action=both, default=True, help="the fast form of the attention, or the map (fast)")
    g.add_argument("--kernel", choices=["auto", *KERNELS], default="auto", help="what computes the fast form of "
                   "softmax and diff (auto); beside them, the linear arms ignore it")
    g.add_argument("--decay", action=both, default=False, help="heads forget (off; sdpa then can't use FlashAttention)")
    g.add_argument("--subln", action=both, help="RMSNorm on each head's output, and 1 - lambda_init (diff arms only)")
    g.add_argument("--subln_init", type=float, default=1.0, help="initial weight of that norm (1)")
    g.add_argument("--lambda_init", type=float, help="a constant instead of 0.8 - 0.6 exp(-0.3 l)")
    g = p.add_argument_group("optimization")
    g.add_argument("--batch_size", type=count, help="sequences per micro-step of one process, at most")
    g.add_argument("--total_batch", type=count, help="tokens per step, of all processes (toy: batch_size x block_size)")
    length = g.add_mutually_exclusive_group()
    length.add_argument("--steps", type=count, help="optimizer steps")
    length.add_argument("--tokens", type=count, help="tokens, instead of steps")
    g.add_argument("--lr", type=lambda s: [float(x) for x in s.split(",")], help="peak rate, one or a comma list")
    g.add_argument("--warmup", type=int, help="steps of linear warm-up, before the linear decay to 0")
    g.add_argument("--weight_decay", type=float, default=0.1, help="AdamW's, on matrices only (0.1)")
    g.add_argument("--grad_clip", type=float, default=1.0, help="largest gradient norm (1.0)")
    g.add_argument("--seed", type=lambda s: [int(x) for x in s.split(",")], default=[1337], help="one or a list (1337)")
    g = p.add_argument_group("watching, saving, the machine")
    for name, what in dict(eval="evaluations", log="lines of the log", save="checkpoints").items():
        g.add_argument(f"--{name}_every", type=count, help=f"steps between {what}")
    g.add_argument("--eval_tokens", type=count, help="val tokens per evaluation, at most what the run trains on")
    g.add_argument("--device", default=default_device, help="cuda, cuda:1, cpu, … (cuda where there is one)")
    g.add_argument("--dtype", choices=["float32", "bfloat16"], help="of the matmuls (bfloat16 on cuda)")
    g.add_argument("--compile", action=both, help="torch.compile (on cuda)")
    given, _ = p.parse_known_args(argv)
    # torchrun's processes, and their devices
    rank, local_rank, world = (int(os.environ.get(*v)) for v in [("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)])
    if not 0 <= rank < world:
        raise ValueError(f"RANK={rank} does not fit WORLD_SIZE={world}: torchrun sets both, without it unset them")
    try:
        if world > 1 and given.device == "cuda":
            torch.cuda.set_device(local_rank)
        device = torch.zeros(1, device=given.device).device
    except (RuntimeError, AssertionError) as e:
        raise ValueError(f"--device={given.device}: {str(e).splitlines()[0]}") from None

    # the preset fills what no flag says
    cuda = device.type == "cuda"
    name = given.preset or ("gpt2" if cuda and any((given.data or SHARDS).glob("*.bin")) else "toy")
    preset = PRESETS[name] | dict(preset=name, dtype="bfloat16" if cuda else "float32", compile=cuda)
    if given.steps or given.tokens:
        preset |= dict(steps=None, tokens=None)
    p.set_defaults(**preset | dict(lr=[preset["lr"]], data=SHARDS if name == "gpt2" else None))
    args = p.parse_args(argv)
    args.rank, args.world, args.device = rank, world, device
    if name == "toy" and given.total_batch is None:
        args.total_batch = args.batch_size * args.block_size
    least = args.block_size * world
    if args.total_batch % least:
        raise ValueError(f"--total_batch={args.total_batch} is not a multiple of {least} (--block_size x processes)")
    while args.total_batch % (args.batch_size * least):
        args.batch_size -= 1
    args.steps = args.steps or math.ceil(args.tokens / args.total_batch)
    args.tokens = args.steps * args.total_batch
    runs = []
    softmax = [attn for attn in args.attn if issubclass(ATTENTION.get(attn, object), Softmax)]
    for seed, lr, attn in dict.fromkeys(product(args.seed, args.lr, args.attn)):
        run = vars(args) | dict(seed=seed, lr=lr, attn=attn, vocab_size=None)  # the vocabulary is the data's
        differs = [f for f in FIELDS[1:] + OPTIMIZER if p.get_default(f) not in (run[f], [run[f]])]
        run["out"] = (args.out or Path("out")) / "-".join([attn] + [tag(f, run[f]) for f in differs])
        run["kernel"] = args.kernel if attn in softmax or not softmax else "auto"
        run["warmup"] = min(args.warmup, args.steps - 1)
        runs.append(argparse.Namespace(**run))
    if args.out and len(runs) == 1:
        runs[0].out = args.out
    return runs


def tag(name, value):
    """One part of a run's name, exact to the last digit: nosubln, lr3e-3, n_layer6."""
    if isinstance(value, bool):
        return name if value else f"no{name}"
    small = isinstance(value, float) and 0 < value < 0.01
    text = np.format_float_scientific(value, trim="-", exp_digits=1) if small else repr(value)
    return name + text.removesuffix(".0")


def device_name(device):
    """What a figure is quoted with: the card's name, or the processor's and the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
    found = re.search(r"model name\s*: (.*)", cpuinfo)
    return f"cpu ({found[1] if found else os.uname().machine}), {torch.get_num_threads()} threads"


@lru_cache(maxsize=2)
def permutation(n, seed, epoch):
    return np.random.default_rng([seed, epoch]).permutation(n)


def sequences(data, numbers, args, vocab_size):
    """(len(numbers), T + 1) int64 on the device: those sequences of the data."""
    tokens = torch.from_numpy(np.stack([data.sequence(int(i), args.block_size) for i in numbers]))
    if tokens.max() >= vocab_size:
        raise ValueError(f"--data holds token {tokens.max()}, its tokenizer ends below {vocab_size}: make it anew")
    if args.device.type == "cuda":
        return tokens.pin_memory().to(args.device, non_blocking=True)  # nobody waits for the copy
    return tokens


def batch(train, args, step, micro, vocab_size):
    """(batch_size, T + 1): shuffled epochs end to end, cut into steps, a step into micro-steps, those into ranks."""
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
    for first in range(args.rank * B, n, args.world * B):  # always a whole batch: nothing is compiled for a smaller one
        tokens = sequences(val, [i % n for i in range(first, first + B)], args, vocab_size)
        with autocast:
            logits = model(tokens[:, :-1], tokens[:, 1:])[0]
        for i in range(first, min(first + B, n)):
            losses[i] = F.cross_entropy(wide(logits[i - first]), tokens[i - first, 1:])
        del logits  # they are large, and the next ones need room
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


def read_log(path):
    """(head, records) of a log.jsonl, without a last line that was cut short. ValueError if it is no log."""
    try:
        head, *records = [json.loads(line) for line in Path(path).read_text().split("\n")[:-1]]
        head["attn"], [record["step"] for record in records]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is not a whole log of train.py") from None
    return head, records


def saved_model(args):
    """The model to go on from, None for a run that begins. ValueError if it is another run's, naming the difference."""
    if args.restart or not (args.out / "ckpt.pt").exists():
        return None
    model, here = GPT.load(args.out / "ckpt.pt", args.device), vars(args)
    there = model.extra.get("run", {}) | asdict(model.config)
    different = [f"{k} is {there.get(k)!r} there and {here[k]!r} here" for k in IDENTITY if there.get(k) != here[k]]
    if different:
        raise ValueError(f"{args.out} is another run's: {', '.join(different)}. Choose another --out, or --restart it")
    return model


def train_one(args, train, val, enc, log_file):
    """One run, from where it stopped. True if it is finished, None if it was stopped, False if it is not finite."""
    master, ckpt_path = args.rank == 0, args.out / "ckpt.pt"
    torch.compiler.reset()  # else the runs of a comparison add up to the limit of recompilations
    raw = saved_model(args)
    resumed = raw.extra["step"] if raw else None
    if resumed == args.steps:
        print(f"{args.out}: finished, {resumed} steps (--restart trains it anew)")
        return True
    raw = raw or GPT(GPTConfig(**{f: vars(args)[f] for f in FIELDS}), args.seed).to(args.device)
    for block in raw.blocks:
        block.attn.flash = args.flash
    args.parameters = sum(q.numel() for q in raw.parameters())
    kernel, why = pick_kernel(raw, args.kernel, getattr(torch, args.dtype))
    optimizer = make_optimizer(raw, args)
    if resumed is not None:
        optimizer.load_state_dict(raw.extra.pop("optimizer"))
    model = compiled = torch.compile(raw) if args.compile else raw
    if args.world > 1:  # waits for all processes: everyone has read the folder
        model = torch.nn.parallel.DistributedDataParallel(compiled)
    autocast = torch.autocast(args.device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")
    flops = 6 * args.parameters + 12 * args.n_layer * args.n_embd * args.block_size  # a token, PaLM's appendix B
    peak = next((PEAK[name] for name in PEAK if name in args.device_name), None)
    print(f"{args.attn}: {args.parameters / 1e6:.2f} M parameters, seed {args.seed}, {args.steps} steps of "
          f"{args.total_batch:,} tokens, peak rate {args.lr:g} -> {args.out}")
    if kernel:
        print(f"kernel {kernel}" + (f" ({why})" if why else ""))
    head = json.loads(json.dumps(vars(args), default=str))
    if master and resumed is None:
        ckpt_path.unlink(missing_ok=True)
        log_file.truncate(0)
        print(json.dumps(head), file=log_file, flush=True)
    elif master:  # what the log says of steps after the checkpoint comes again
        print(f"goes on after step {resumed}")
        kept = 1 + sum(record["step"] <= resumed for record in read_log(log_file.name)[1])
        lines = Path(log_file.name).read_text().splitlines(keepends=True)
        log_file.truncate(len("".join(lines[:kept])))
    step = since = resumed or 0
    line, train_loss, lr, grad_norm, tok_per_s, mfu = "", None, None, None, None, None  # of step 0
    micro_steps = args.total_batch // (args.batch_size * args.block_size * args.world)
    clock = time.perf_counter()
    while True:
        stop = torch.tensor(len(STOPPING))
        if args.world > 1:
            dist.all_reduce(stop)  # on the CPU, where nobody waits for the device
        last, new = step == args.steps, step != resumed  # what is not new was logged and saved before
        evaluated = new and (last or step % args.eval_every == 0)
        logged = evaluated or (new and step % args.log_every == 0)
        saved = new and (last or stop > 0 or step % args.save_every == 0)
        if logged or saved:
            if step > 0:
                if args.world > 1:
                    dist.all_reduce(train_loss)
                train_loss, grad_norm = (train_loss / micro_steps).item() / args.world, grad_norm.item()
                tok_per_s = (step - since) * args.total_batch / (time.perf_counter() - clock)
                mfu = peak and tok_per_s * flops / (peak * args.world)
                left = timedelta(seconds=round((args.steps - step) * args.total_batch / tok_per_s))
                line = f" | train {train_loss:.4f} | lr {lr:.2e} | norm {grad_norm:5.2f} | {tok_per_s:,.0f} tok/s"
                line += (f" | MFU {mfu:.1%}" if mfu else "") + f" | {left} left"
            record = dict(step=step, tokens=step * args.total_batch, train_loss=train_loss, lr=lr, grad_norm=grad_norm)
            record |= dict(tok_per_s=tok_per_s, mfu=mfu)
            if evaluated:
                val_loss = evaluate(compiled, val, args, autocast, enc.n_vocab).double().mean().item()
                lambdas = [b.attn.lambda_full().item() for b in raw.blocks if hasattr(b.attn, "lambda_full")]
                record |= {"val_loss": val_loss, "lambda": lambdas or None}
                record["sample"] = speak(raw, enc, args, autocast, 40, temperature=0)
                line += f" | val {val_loss:.4f}" + (" | lambda" if lambdas else "")
                line += "".join(f" {x:.2f}" for x in lambdas) + f"\n      {record['sample']!r}"
            bad = ", ".join(f"{k} {v}" for k, v in record.items() if isinstance(v, float) and not math.isfinite(v))
            if bad:
                print(json.dumps(dict(step=step, tokens=record["tokens"], not_finite=bad)), file=log_file, flush=True)
                print(f"{args.out} stops at step {step}: {bad}; the last checkpoint stays, see --lr", file=sys.stderr)
                return False
            if logged:
                print(json.dumps(record), file=log_file, flush=True)
                print(f"step {step:>5}/{args.steps}{line}", flush=True)
            if saved and master:
                os.fsync(log_file.fileno())  # the log is never behind the checkpoint
                state = None if last else optimizer.state_dict()
                raw.save(ckpt_path, tokenizer=args.tokenizer, step=step, run=head, optimizer=state)
            clock, since = time.perf_counter(), step
        if last:
            print(f'\nmore of it: python sample.py --ckpt={ckpt_path} --prompt="{PROMPT}"')
            return True
        if stop > 0:
            print(f"stopped after step {step} of {args.steps} and saved: the same command goes on (without --restart)")
            return None

        lr = learning_rate(step, args)
        for group in optimizer.param_groups:
            group["lr"] = lr
        train_loss = 0.0
        for micro in range(micro_steps):
            if args.world > 1:
                model.require_backward_grad_sync = micro == micro_steps - 1  # the ranks' mean gradient once a step
            tokens = batch(train, args, step, micro, enc.n_vocab)
            with autocast:
                loss = model(tokens[:, :-1], tokens[:, 1:])[1]  # the logits are let go: they are large
            (loss / micro_steps).backward()
            train_loss = train_loss + loss.detach()
        grad_norm = torch.nn.utils.clip_grad_norm_(raw.parameters(), args.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1


def main(argv=None):
    """True if all runs are finished, None if stopped, False if a loss is not finite. Raises ValueError, OSError."""
    runs = parse(argv)
    first, T = runs[0], runs[0].block_size
    if first.world > 1:
        dist.init_process_group()
        sys.stdout = open(os.devnull, "w") if first.rank else sys.stdout  # the first process speaks for all
    torch.set_float32_matmul_precision("high")
    train, val, tokenizer, what = load_data(first.data)
    enc = get_tokenizer(tokenizer)
    if train.sequences(T) < first.total_batch // T or not val.sequences(T):
        raise ValueError(f"{what['data']} is too short for this: {train.tokens:,} + {val.tokens:,} tokens")
    about = what | dict(tokenizer=tokenizer, vocab_size=enc.n_vocab, train_tokens=train.tokens, val_tokens=val.tokens)
    about |= dict(device_name=device_name(first.device), torch=str(torch.__version__), python=sys.version.split()[0])
    for args in runs:
        vars(args).update(about, date=time.strftime("%Y-%m-%d"))
        GPTConfig(**{f: vars(args)[f] for f in FIELDS})  # a wrong one is refused here,
        saved_model(args)  # like a folder that holds another run: before the first run costs a minute
    print(f"preset {first.preset}, {about['device_name']}, {first.dtype}, {'compiled' if first.compile else 'eager'}, "
          f"micro-steps of {first.batch_size} x {T} tokens, processes: {first.world}")
    print(f"data: {what['data']}, {train.tokens:,} tokens to train on, {val.tokens:,} val, tokenizer {tokenizer}")
    if what["data"] == "pydoc_data.topics":
        print("      (Python's own manual. For the real run: a GPU, python prepare_fineweb.py, another --out)")
    finished = []
    for args in runs:
        args.out.mkdir(parents=True, exist_ok=True)
        with open(args.out / "log.jsonl" if args.rank == 0 else os.devnull, "a") as log_file:
            if args.rank == 0:
                lock(log_file, args.out)
            finished.append(train_one(args, train, val, enc, log_file))
        if finished[-1] is None:
            break
    if first.world > 1:
        dist.destroy_process_group()
    if len(runs) > 1:
        print(f"\ncompare them: python bench.py loss {first.out.parent}")
    return None if finished[-1] is None else all(finished)


def on_signal(number, frame):
    STOPPING.append(number)
    signal.signal(number, signal.SIG_DFL)  # the second signal does not wait


if __name__ == "__main__":
    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)
    try:
        sys.exit(1 if main() is False else 0)
    except (ValueError, OSError) as e:
        sys.exit(f"train.py: {e}")
