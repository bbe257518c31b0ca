"""
Trains GPTs, and writes ckpt.pt and log.jsonl to out/<preset>/<attn>.

$ python train.py --attn=diff                   # on a laptop, without data: some minutes on a core
$ python train.py --attn=softmax,diff,linear    # one after the other, on the same tokens
$ torchrun --standalone --nproc_per_node=8 train.py --preset=gpt2 --attn=diff

Stop it with Ctrl-C or kill -9: the same command goes on from the last checkpoint, and on a CPU,
with as many threads, it ends in the same bits. The tokens of a step follow from the data, the seed
and the number of the step: there is no data loader with a state.
"""
import argparse
import json
import math
import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
import tyro
from torch.nn.parallel import DistributedDataParallel

from data import FINEWEB, get_tokenizer, load_data, load_sequences
from model import GPT, GPTConfig

# ---- the settings

@dataclass
class Config(GPTConfig):
    """The settings of a run, those of its model among them."""

    attn: str = "softmax"  # kind of attention, or a list like softmax,diff
    vocab_size: tyro.conf.Suppress[int] = 0  # the tokenizer's
    preset: Literal["toy", "gpt2"] = "gpt2"  # toy is for a laptop, gpt2 is GPT-2 small on an H100
    data: str | None = None  # folder of prepare_fineweb.py, or text file (toy: Python's manual)
    out: str | None = None  # folder, to which the arm's name is added (out/<preset>)
    restart: bool = False  # begin anew, and discard the run that is there
    batch_size: int = 32  # sequences per micro-step, at most
    total_batch: int = 524_288  # tokens per step
    steps: int = 5341  # optimizer steps, over which the rate falls to 0
    lr: float = 1.5e-3  # peak learning rate
    warmup: int = 375  # steps in which the rate rises first
    weight_decay: float = 0.1  # AdamW's weight decay, on matrices only
    grad_clip: float = 1.0  # largest gradient norm, 0 for no limit
    seed: int = 1337  # of weights and data order
    eval_every: int = 250  # steps between evaluations; each saves a checkpoint
    eval_tokens: int = 10_485_760  # val tokens of an evaluation
    log_every: int = 10  # steps between lines of the log
    device: str = "cuda" if torch.cuda.is_available() else "cpu"  # cuda, cuda:1 or cpu
    dtype: Literal["float32", "bfloat16"] = "bfloat16" if torch.cuda.is_available() else "float32"
    compile: bool = True  # torch.compile the model (on cuda)

    def __post_init__(self):
        for name in "n_layer block_size batch_size steps lr eval_every log_every".split():
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        if self.device != "cpu" and not ("cuda" in self.device and torch.cuda.is_available()):
            raise ValueError(f"PyTorch sees no {self.device} here")
        if self.vocab_size > 0:  # main knows the data, and asks for each arm by itself
            super().__post_init__()


PRESETS = {
    "gpt2": Config(data=str(FINEWEB)),
    "toy": Config(preset="toy", n_layer=4, n_head=4, n_embd=128, block_size=256, batch_size=8,
                  total_batch=2048, steps=500, lr=2e-3, warmup=50, eval_every=100,
                  eval_tokens=65_536, log_every=20),
}

# what may differ when a run goes on: these don't say what the run is
FREE = ("preset", "data", "out", "restart", "kernel", "batch_size", "eval_every", "log_every",
        "device", "compile", "torch", "date")


def parse(argv=None, world=1):
    """A Config for each arm that a command line asks for."""
    # the preset first, since it has the defaults of all other flags
    p = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    is_gpt2 = FINEWEB.exists() and torch.cuda.is_available()
    p.add_argument("--preset", default="gpt2" if is_gpt2 else "toy")
    preset = PRESETS.get(p.parse_known_args(argv)[0].preset, PRESETS["toy"])
    config = tyro.cli(Config, description=__doc__, default=preset, args=argv, use_underscores=True)
    if config.kernel == "flash_attn":
        import flash_attn  # if it is missing, say so now
    sequences = config.total_batch // (config.block_size * world)  # of a process in a step
    config.batch_size = max(1, min(config.batch_size, sequences))
    multiple = config.block_size * config.batch_size * world
    if sequences == 0 or config.total_batch % multiple != 0:
        raise ValueError(f"total_batch must be a multiple of {multiple}, not {config.total_batch}")
    out = Path(config.out or f"out/{config.preset}")
    return [replace(config, attn=attn, out=str(out / attn)) for attn in config.attn.split(",")]


# ---- a step

@lru_cache(maxsize=2)  # the last batch of an epoch needs the order of the next one, too
def permutation(n, seed, epoch):
    return np.random.default_rng([seed, epoch]).permutation(n)


def batch(data, config, step, micro_step, rank=0, world=1):
    """The sequences of a micro-step of this process, (batch_size, T + 1).

    The epochs lie end to end, each shuffled in its own way. They are cut into steps, a step into
    micro-steps, and a micro-step into one part for each process.
    """
    n = (len(data) - 1) // config.block_size
    first = step * (config.total_batch // config.block_size)
    first += (micro_step * world + rank) * config.batch_size
    places = range(first, first + config.batch_size)
    numbers = [permutation(n, config.seed, epoch=i // n)[i % n] for i in places]
    return load_sequences(data, numbers, config.block_size).to(config.device, non_blocking=True)


def learning_rate(step, config):
    """The rate of update `step`, the first of which is 0: linear up to lr, then down to 0."""
    warmup = min(config.warmup, config.steps - 1)  # a short run has to get to its peak, too
    if step < warmup:
        return config.lr * (step + 1) / warmup
    return config.lr * (config.steps - step) / (config.steps - warmup)


def make_optimizer(model, config):
    """AdamW. Matrices decay, the embedding among them. Norms and lambda vectors do not."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    decaying = dict(params=matrices, weight_decay=config.weight_decay)
    others = dict(params=vectors, weight_decay=0.0)
    return torch.optim.AdamW([decaying, others], lr=config.lr, betas=(0.9, 0.95), fused=True)


def autocast(config):
    """Matmuls in bf16, if config.dtype says so. Weights and norms stay in float32."""
    device_type = torch.device(config.device).type
    return torch.autocast(device_type, torch.bfloat16, enabled=config.dtype == "bfloat16")


def training_step(model, optimizer, data, config, step, rank=0, world=1):
    """Makes update `step`, the first of which is 0.

    Returns two tensors, as numbers would have to wait for the GPU: the loss before the update, the
    mean over this process's sequences, and the norm of the gradient before clipping.
    """
    for param_group in optimizer.param_groups:
        param_group["lr"] = learning_rate(step, config)
    micro_steps = config.total_batch // (config.batch_size * config.block_size * world)
    loss_sum = torch.zeros((), device=config.device)
    for micro_step in range(micro_steps):
        if world > 1:
            # the processes have to average their gradients only once, in the last micro-step.
            # DistributedDataParallel.no_sync() sets the same flag
            model.require_backward_grad_sync = micro_step == micro_steps - 1
        tokens = batch(data, config, step, micro_step, rank, world)
        with autocast(config):
            # we don't keep the logits: they are large, and the backward pass needs the room
            loss = model(tokens[:, :-1], tokens[:, 1:])[1]
        (loss / micro_steps).backward()
        loss_sum += loss.detach()
    limit = config.grad_clip if config.grad_clip > 0 else math.inf
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss_sum / micro_steps, grad_norm


# ---- an evaluation

@torch.no_grad()
def evaluate(model, val, config, rank=0, world=1):
    """The mean loss in nats of the first sequences of val: the same for each arm, at each step."""
    model.eval()
    n, B = max(1, min(config.eval_tokens, len(val) - 1) // config.block_size), config.batch_size
    total = torch.zeros((), device=config.device)
    for first in range(rank * B, n, world * B):
        tokens = load_sequences(val, range(first, min(first + B, n)), config.block_size)
        tokens = tokens.to(config.device, non_blocking=True)
        with autocast(config):
            loss = model(tokens[:, :-1], tokens[:, 1:])[1]
        total += loss * len(tokens)  # the last batch may be smaller
    if world > 1:
        dist.all_reduce(total)  # each process has a part of the sequences
    model.train()
    return total.item() / n


def look_at(model, enc, config):
    """lambda of each layer, where it is one number, and a sample: the likeliest token each time."""
    text = "Once upon a time"
    x = torch.zeros(1, 1, config.n_embd, device=config.device)  # for such a lambda any x will do
    lambdas = [block.attn.lam(x) for block in model.blocks if hasattr(block.attn, "lam")]
    idx = torch.tensor([enc.encode_ordinary(text)], device=config.device)
    with autocast(config):
        tokens = [token.item() for token in model.eval().generate(idx, 40, temperature=0)]
    model.train()
    text += enc.decode(tokens, errors="backslashreplace")  # not every pipe can print U+FFFD
    return {"lambda": [round(x.item(), 4) for x in lambdas if x.ndim == 0], "sample": text}


# ---- a run

def refuse_another(there, here):
    """SystemExit if the run that is there, by the first line of its log, is not the one here."""
    for name, value in here.items():
        if name not in FREE and there.get(name) != value:
            difference = f"{name} is {there.get(name)!r} there and {value!r} here"
            sys.exit(f"{here['out']} is another run: {difference}. Take another --out or --restart")


def open_run(config, data, val):
    """Opens the run's folder, but not another run's. Returns the first line of its log."""
    ends = np.concatenate([data[:1000], data[-1000:], val[:1000], val[-1000:]])
    if ends.max() >= config.vocab_size or min(len(data), len(val)) <= config.block_size:
        raise ValueError(f"--data={config.data} is too short, or not of a tokenizer that we know")
    head = asdict(config) | dict(train_tokens=len(data), val_tokens=len(val), ends=int(ends.sum()))
    Path(config.out).mkdir(parents=True, exist_ok=True)
    log = Path(config.out) / "log.jsonl"
    if config.restart:
        for path in (log.parent / "ckpt.pt", log):
            path.unlink(missing_ok=True)
    elif log.exists() and "}\n" in log.read_text():  # a kill may have cut its first line
        refuse_another(json.loads(log.read_text().partition("\n")[0]), head)
    return head | dict(torch=str(torch.__version__), date=time.strftime("%Y-%m-%d"))


def resume(path, model, optimizer, head):
    """Loads the checkpoint. Returns its step and its copy of the log, which ends there."""
    try:
        there = GPT.load(path)
    except ValueError as e:
        sys.exit(f"{e}. --restart discards that run")
    refuse_another(there.extra["log"][0], head)
    model.load_state_dict(there.state_dict())
    optimizer.load_state_dict(there.extra["optimizer"])
    return there.extra["step"], there.extra["log"]


def train(config, head, data, val, tokenizer, rank=0, world=1):
    """Trains one model to its last step. Returns the lines of its log."""
    out = Path(config.out)
    torch.manual_seed(config.seed)  # for an arm of your own that draws its first weights itself
    model = GPT(config, config.seed).to(config.device)
    optimizer = make_optimizer(model, config)
    size = sum(p.numel() for p in model.parameters())
    step, log = 0, [head | dict(parameters=size)]
    if (out / "ckpt.pt").exists():
        step, log = resume(out / "ckpt.pt", model, optimizer, head)
    if rank == 0:
        print(f"{config.attn}: {size:,} parameters, from step {step} -> {out}")
        (out / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    compiled = model
    if config.compile and config.device.startswith("cuda"):
        torch.compiler.reset()  # or the later arms of a list would not be compiled any more
        # dynamic=False, or a smaller last batch of an evaluation would make all sizes unknown
        compiled = torch.compile(model, dynamic=False)
    trained = DistributedDataParallel(compiled) if world > 1 else compiled

    saved = logged = step
    clock = time.perf_counter()
    try:
        while step < config.steps and "diverged" not in log[-1]:
            loss, grad_norm = training_step(trained, optimizer, data, config, step, rank, world)
            step += 1
            evaluate_now = step % config.eval_every == 0 or step == config.steps
            if not evaluate_now and step % config.log_every != 0:
                continue  # to look at the loss we have to wait for the GPU
            if world > 1:
                dist.all_reduce(loss)
            record = dict(step=step, tokens=step * config.total_batch)
            record |= dict(train_loss=loss.item() / world, grad_norm=grad_norm.item())
            speed = (step - logged) * config.total_batch / (time.perf_counter() - clock)
            record |= dict(lr=learning_rate(step - 1, config), tok_per_s=round(speed))
            record["minutes_left"] = (config.steps - step) * config.total_batch / speed / 60
            if config.device.startswith("cuda") and "H100" in torch.cuda.get_device_name():
                # forward and backward as PaLM counts them (2204.02311, B), as if it were softmax
                flops = 6 * size + 12 * config.n_layer * config.n_embd * config.block_size
                record["mfu"] = speed * flops / (world * 989e12)  # of an H100's peak in bf16
            if evaluate_now:
                record["val_loss"] = evaluate(compiled, val, config, rank, world)
                record |= look_at(model, get_tokenizer(tokenizer), config)
            if not math.isfinite(record["train_loss"] + record.get("val_loss", 0)):
                # such a model does not recover, and must not replace the checkpoint
                record = dict(step=step, diverged="the last checkpoint is kept. Try a lower --lr")
            log.append(record)
            if rank == 0:
                with open(out / "log.jsonl", "a") as f:
                    f.write(json.dumps(record) + "\n")
                shown = {name: f"{x:.5g}" if type(x) is float else x for name, x in record.items()}
                print(" | ".join(f"{name} {x}" for name, x in shown.items()), flush=True)
            if rank == 0 and "val_loss" in record:
                more = dict(step=step, log=log, optimizer=optimizer.state_dict())
                model.save(out / "ckpt.pt", tokenizer=tokenizer, **more)
                saved = step
            logged = step
            clock = time.perf_counter()
    except KeyboardInterrupt:
        sys.exit(f"\nstopped at step {step}: without --restart it goes on from step {saved}")
    return log


def main(argv=None):
    """Trains the runs that a command line asks for. Returns the last val loss of each."""
    rank = int(os.environ.get("RANK", 0))  # torchrun starts `world` processes and numbers them
    world = int(os.environ.get("WORLD_SIZE", 1))
    torch.set_float32_matmul_precision("high")  # TF32, where matmuls are in float32
    try:
        configs = parse(argv, world)
        data, val, tokenizer = load_data(configs[0].data)
        configs = [replace(c, vocab_size=get_tokenizer(tokenizer).n_vocab) for c in configs]
        heads = [open_run(config, data, val) for config in configs]
    except (ValueError, OSError, ImportError) as e:
        sys.exit(f"train.py: {e}")
    if world > 1:
        if configs[0].device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
    if rank == 0:
        print(f"preset {configs[0].preset} on {configs[0].device}, {len(data):,} train tokens")
    logs = [train(*run, data, val, tokenizer, rank, world) for run in zip(configs, heads)]
    if world > 1:
        dist.destroy_process_group()
    losses = [log[-1].get("val_loss", math.inf) for log in logs]
    if rank == 0:
        for (first, *_, last), loss in zip(logs, losses):
            print(f"{first['attn']:16} val loss {loss:.4f}, {last.get('tok_per_s', 0):,} tokens/s, "
                  f"{first['parameters']:,} parameters")
        print(f"sample from it:  python sample.py --ckpt={configs[-1].out}")
        print(f"compare seeds:   python -m lab.losses {Path(configs[-1].out).parent}")
    return losses


if __name__ == "__main__":
    sys.exit(math.inf in main())  # 1 if a run diverged
