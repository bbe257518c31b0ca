"""
Trains GPTs, and writes ckpt.pt and log.jsonl to out/<preset>/<attn>.

$ python train.py --attn=diff                   # on a laptop, without data: some minutes on a core
$ python train.py --attn=softmax,diff,linear    # one after the other, on the same tokens
$ python train.py --attn=diff --preset=gpt2     # GPT-2 small on an H100, after prepare_fineweb.py
$ torchrun --standalone --nproc_per_node=8 train.py --attn=diff --preset=gpt2

Stop it with Ctrl-C or kill -9: the same command, without --restart, goes on from the last
checkpoint, and on a CPU, with as many threads, it ends in the same bits. The tokens of a step
follow from the data, the seed and the number of the step, whatever the number of GPUs: there is no
data loader with a state.

The file has the settings, a step, an evaluation, the loop, and then what comes before the loop.
"""
import argparse
import json
import math
import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
import tyro
from torch.nn.parallel import DistributedDataParallel

from check_arm import check_arm
from cli import check_settings, one_sentence, use_module
from data import FINEWEB, get_tokenizer, hash_of, load_data, load_sequences
from model import ATTENTION, GPT, GPTConfig, Refused, make_rope, read_checkpoint

RANK = int(os.environ.get("RANK", 0))  # torchrun starts WORLD processes and numbers them
WORLD = int(os.environ.get("WORLD_SIZE", 1))
# GPUs before the A100, like Colab's T4, have no fast kernels for bf16
HAS_BF16 = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 8

# ---- the settings

@dataclass
class Config(GPTConfig):
    """The settings of a run and its model: gpt2's. A command line without --preset has toy's."""

    attn: str = "softmax"  # softmax, diff, diff_v2, linear, diff_linear, or a list: softmax,diff
    vocab_size: tyro.conf.Suppress[int] = 50257  # the tokenizer's
    use: str | None = None  # module with kinds of attention of your own, like myarm
    preset: Literal["toy", "gpt2"] = "gpt2"  # toy is for a laptop, gpt2 is GPT-2 small on an H100
    data: str | None = None  # folder of prepare_fineweb.py, or text file (toy: Python's manual)
    out: str | None = None  # folder, to which the name of attn is added (out/<preset>)
    restart: bool = False  # begin anew. The old checkpoint is kept until the first new one
    batch_size: int = 32  # sequences per micro-step, at most
    total_batch: int = 524_288  # tokens per step, of all GPUs
    steps: int = 5341  # optimizer steps, over which the rate falls to 0
    lr: float = 1.5e-3  # peak learning rate
    warmup: int = 375  # steps in which the rate rises first
    weight_decay: float = 0.1  # AdamW's weight decay, on matrices only
    grad_clip: float = 1.0  # largest gradient norm, 0 for no limit
    seed: int = 1337  # of weights and data order
    eval_every: int = 250  # steps between evaluations; each saves a checkpoint
    eval_tokens: int = 10_485_760  # val tokens of an evaluation
    log_every: int = 10  # steps between printed lines. log.jsonl gets them with each checkpoint
    device: str = "cuda" if torch.cuda.is_available() else "cpu"  # cuda, cuda:1, cpu or mps
    dtype: Literal["float32", "bfloat16"] = "bfloat16" if HAS_BF16 else "float32"  # of matmuls
    compile: bool = True  # torch.compile the model (on cuda)


PRESETS = {
    "gpt2": Config(data=str(FINEWEB)),
    "toy": Config(preset="toy", vocab_size=257, n_layer=4, n_head=4, n_embd=128, block_size=256,
                  batch_size=8, total_batch=2048, steps=500, lr=2e-3, warmup=50, eval_every=100,
                  eval_tokens=65_536, log_every=20),
}

# ---- a step

def training_step(model, optimizer, data, config, step):
    """Makes update `step`, the first of which is 0.

    Returns the mean loss before the update, and the norm of the gradient before clipping. Both are
    tensors: as numbers they would have to wait for the GPU.
    """
    # for a class of yours that has dropout: other masks in each run, step and process
    torch.manual_seed(config.seed + 10**6 * step + 10**12 * RANK)
    for param_group in optimizer.param_groups:
        param_group["lr"] = learning_rate(step, config)
    micro_steps = config.total_batch // (config.batch_size * config.block_size * WORLD)
    loss_sum = torch.zeros((), device=config.device)
    for micro_step in range(micro_steps):
        if WORLD > 1:  # the processes add their gradients up only once, after the last micro-step
            model.require_backward_grad_sync = micro_step == micro_steps - 1
        tokens = batch(data, config, step, micro_step)
        with autocast(config):
            # we don't keep the logits: they are large, and the backward pass needs the room
            loss = model(tokens[:, :-1], tokens[:, 1:])[1]
        (loss / micro_steps).backward()
        loss_sum += loss.detach()
    if WORLD > 1:
        dist.all_reduce(loss_sum)
    limit = config.grad_clip or math.inf
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss_sum / (micro_steps * WORLD), grad_norm


def batch(data, config, step, micro_step):
    """The sequences of a micro-step of this process, (batch_size, T + 1).

    The epochs lie end to end, each shuffled in its own way. They are cut into steps, a step into
    micro-steps, and a micro-step into one part for each process.
    """
    n = (len(data) - 1) // config.block_size
    first = step * (config.total_batch // config.block_size)
    first += (micro_step * WORLD + RANK) * config.batch_size
    places = range(first, first + config.batch_size)
    numbers = [permutation(n, config.seed, epoch=i // n)[i % n] for i in places]
    return load_sequences(data, numbers, config.block_size).to(config.device, non_blocking=True)


@lru_cache(maxsize=2)  # a batch may go over from one epoch into the next one
def permutation(n, seed, epoch):
    return np.random.default_rng([seed, epoch]).permutation(n)


def learning_rate(step, config):
    """The rate of update `step`, the first of which is 0: linear up to lr, then down to 0."""
    warmup = min(config.warmup, config.steps - 1)  # a short run has to get to its peak, too
    if step < warmup:
        return config.lr * (step + 1) / warmup
    return config.lr * (config.steps - step) / (config.steps - warmup)


def autocast(config):
    """Matmuls in bf16, if config.dtype says so. Weights and norms stay in float32."""
    device_type = torch.device(config.device).type
    return torch.autocast(device_type, torch.bfloat16, enabled=config.dtype == "bfloat16")


def make_optimizer(model, config):
    """AdamW. Matrices decay, the embedding among them. The vectors of norms and lambdas do not."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    decaying = dict(params=matrices, weight_decay=config.weight_decay)
    others = dict(params=vectors, weight_decay=0.0)
    return torch.optim.AdamW([decaying, others], lr=config.lr, betas=(0.9, 0.95), fused=True)


# ---- an evaluation

@torch.no_grad()
def evaluate(model, val, config):
    """The mean loss in nats of the first sequences of val: the same for each run, at each step."""
    model.eval()
    n, B = max(1, min(config.eval_tokens, len(val) - 1) // config.block_size), config.batch_size
    total = torch.zeros((), device=config.device)
    for first in range(RANK * B, n, WORLD * B):
        tokens = load_sequences(val, range(first, min(first + B, n)), config.block_size)
        tokens = tokens.to(config.device, non_blocking=True)
        with autocast(config):
            loss = model(tokens[:, :-1], tokens[:, 1:])[1]
        total += loss * len(tokens)  # the last batch may be smaller
    if WORLD > 1:
        dist.all_reduce(total)
    model.train()
    return total.item() / n


@torch.no_grad()
def look_at(model, val, tokenizer, config):
    """The mean lambda of each layer that has one, and a sample of the likeliest tokens."""
    model.eval()
    lambdas = []
    idx = load_sequences(val, range(1), config.block_size)[:, :-1].to(config.device)
    prompt = torch.tensor([tokenizer.encode_ordinary("Once upon a time")], device=config.device)
    with autocast(config):
        x = model.wte(idx)  # (1, T, C)
        rope = make_rope(config, config.block_size, x.device, x.dtype)
        for block in model.blocks:
            if hasattr(block.attn, "lam"):
                lam = torch.as_tensor(block.attn.lam(block.norm1(x)))
                lambdas.append(round(lam.float().mean().item(), 4))
            x = block(x, rope)
        new = [token.item() for token in model.generate(prompt, 40, temperature=0)]
    model.train()
    found = dict(sample=tokenizer.decode(prompt[0].tolist() + new, errors="replace"))
    return {"lambda": lambdas} | found if lambdas else found


# ---- the loop

def train(config, head, data, val, tokenizer):
    """Trains one model, from its checkpoint if there is one. Returns its last val loss.

    head: the first line of a new log. It says what the run is.
    """
    torch.manual_seed(config.seed)  # for a class of yours that draws its first weights itself
    model = GPT(config, config.seed).to(config.device)
    optimizer = make_optimizer(model, config)
    size = sum(p.numel() for p in model.parameters())
    step, log = 0, [head | dict(parameters=size)]
    saved = resume(config, head)
    if saved:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step, log = saved["step"], saved["log"]
        write_log(config, log)  # a kill may have come between the checkpoint and its log
    # one set of weights under three names: `compiled` is faster, and `trained` adds the gradients
    # of all processes up. A sample calls `model`, since `compiled` would compile for each length
    compiled = model
    if config.compile and config.device.startswith("cuda"):
        torch.compiler.reset()  # or the later ones of a list would not be compiled any more
        # dynamic=False, or a smaller last batch of an evaluation would make all sizes unknown
        compiled = torch.compile(model, dynamic=False)
    trained = DistributedDataParallel(compiled) if WORLD > 1 else compiled
    print(f"{config.attn}: {size:,} parameters, from step {step} -> {config.out}")

    first = last = step  # last: the step that was logged last
    clock = time.perf_counter()
    while step < config.steps:  # all processes come to the same numbers, and decide alike
        loss, grad_norm = training_step(trained, optimizer, data, config, step)
        step += 1
        evaluate_now = step % config.eval_every == 0 or step == config.steps
        if not (evaluate_now or step % config.log_every == 0 or step == 1):
            continue  # to look at the loss we have to wait for the GPU
        record = dict(step=step, tokens=step * config.total_batch, train_loss=loss.item(),
                      grad_norm=grad_norm.item(), lr=learning_rate(step - 1, config))
        if compiled is model or last > first:  # the first line's time would include compiling
            tok_per_s = (step - last) * config.total_batch / (time.perf_counter() - clock)
            minutes_left = (config.steps - step) * config.total_batch / tok_per_s / 60
            record |= dict(tok_per_s=round(tok_per_s), minutes_left=round(minutes_left, 1))
        if evaluate_now:
            record["val_loss"] = evaluate(compiled, val, config)
            record |= look_at(model, val, tokenizer, config)
        if not math.isfinite(record["train_loss"] + record.get("val_loss", 0)):
            print(f"{config.attn} diverged at step {step}, which is not saved. Try a lower --lr")
            return math.inf
        log.append(record)
        if evaluate_now and RANK == 0:
            # the checkpoint alone is enough to go on. It has the log, too, of which the file is a
            # copy: so a --restart keeps both files of the old run until here
            model.save(Path(config.out, "ckpt.pt"), step=step, log=log,
                       tokenizer=tokenizer.name, optimizer=optimizer.state_dict())
            write_log(config, log)
        shown = {name: f"{x:.5g}" if type(x) is float else x for name, x in record.items()}
        print(" | ".join(f"{name} {x}" for name, x in shown.items()), flush=True)
        last, clock = step, time.perf_counter()
    return log[-1]["val_loss"]


def write_log(config, log):
    if RANK == 0:
        lines = [json.dumps(record) + "\n" for record in log]
        Path(config.out, "log.jsonl").write_text("".join(lines))


# ---- what comes before the loop: all that can be refused is refused here, before the first run

# what may change when a run goes on. The other settings, and the hashes, say what the run is
MAY_CHANGE = ("use", "preset", "data", "out", "restart", "kernel", "batch_size", "eval_every",
              "log_every", "device", "compile", "date")


def parse(argv=None):
    """A Config for each kind of attention that a command line asks for."""
    # the preset first, since it has the defaults of all other flags
    p = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    p.add_argument("--preset", default="toy", choices=PRESETS)
    preset = PRESETS[p.parse_known_args(argv)[0].preset]
    config = tyro.cli(Config, description=__doc__, default=preset, args=argv, use_underscores=True)
    check_settings(config)
    on_cuda_in_bf16 = config.device.startswith("cuda") and config.dtype == "bfloat16"
    if config.kernel == "flash_attn" and not (on_cuda_in_bf16 and find_spec("flash_attn")):
        raise Refused("--kernel=flash_attn needs the package flash-attn, a CUDA GPU, and "
                      "--dtype=bfloat16")
    if config.use:
        use_module(config.use)
    sequences = config.total_batch // (config.block_size * WORLD)  # of a process in a step
    config.batch_size = max(1, min(config.batch_size, sequences))
    multiple = config.block_size * config.batch_size * WORLD
    if config.total_batch % multiple != 0 or sequences == 0:
        raise Refused(f"total_batch must be a multiple of {multiple}, not {config.total_batch}")
    out = Path(config.out or f"out/{config.preset}").expanduser()
    kinds = [attn.strip() for attn in config.attn.split(",")]
    return [replace(config, attn=attn, out=str(out / attn)) for attn in kinds]


def open_data(config):
    """(train, val, tokenizer). Both arrays are longer than a sequence."""
    try:
        data, val, name = load_data(config.data)
        tokenizer = get_tokenizer(name)  # which may have to be downloaded
    except (OSError, ValueError) as e:
        raise Refused(f"--data={config.data} can't be read, or its tokenizer: {e}") from e
    if min(len(data), len(val)) <= config.block_size:
        raise Refused(f"--data={config.data} is too short: {len(data):,} tokens of train and "
                      f"{len(val):,} of val, for sequences of {config.block_size}")
    return data, val, tokenizer


def describe(config, data_hash):
    """The first line of a run's log: its settings, a hash of the data, and one of the file in which
    its kind of attention stands, model.py or yours.
    """
    head = asdict(config) | dict(data_hash=data_hash, date=time.strftime("%Y-%m-%d"))
    file = getattr(sys.modules[ATTENTION[config.attn].__module__], "__file__", None)
    if file:  # a notebook has none
        head["file_hash"] = sha256(Path(file).read_bytes()).hexdigest()[:12]
    return head


def resume(config, head):
    """What the checkpoint of this run has, or None for a new run. Refuses if it is another run."""
    path = Path(config.out, "ckpt.pt")
    if config.restart:
        return None
    if not path.exists():
        if Path(config.out, "log.jsonl").exists():  # so there was a checkpoint
            raise Refused(f"{path} is gone, but not its log: --restart discards that run")
        return None
    saved = read_checkpoint(path)
    there = saved["log"][0] if "log" in saved else {}
    for name, value in head.items():
        if name not in MAY_CHANGE and there.get(name) != value:
            raise Refused(f"{path} is of another run: {name} is {there.get(name)!r} there and "
                          f"{value!r} here. Take another --out, or --restart")
    return saved


def main(argv=None):
    """Trains the runs that a command line asks for. Returns the last val loss of each."""
    torch.set_float32_matmul_precision("high")  # TF32, where matmuls are in float32
    if WORLD > 1:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # from now on "cuda" is this one
        dist.init_process_group()
        if RANK > 0:
            sys.stdout = open(os.devnull, "w")  # one of them speaks for all
    with one_sentence():
        configs = parse(argv)
        data, val, tokenizer = open_data(configs[0])
        configs = [replace(config, vocab_size=tokenizer.n_vocab) for config in configs]
        for config in configs:
            check_arm(config)
        data_hash = hash_of(data, val)
        heads = [describe(config, data_hash) for config in configs]
        for config, head in zip(configs, heads):
            resume(config, head)  # another run is refused before the first one is trained
            try:
                Path(config.out).mkdir(parents=True, exist_ok=True)
            except OSError as e:
                raise Refused(f"--out={config.out} can't be made: {e}") from e
    print(f"preset {configs[0].preset} on {configs[0].device}, {len(data):,} tokens")
    if configs[0].preset == "toy" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # at this size more threads mostly wait for one another
    try:
        losses = [train(config, head, data, val, tokenizer) for config, head in zip(configs, heads)]
    except KeyboardInterrupt:
        sys.exit("\nstopped: the same command, without --restart, goes on from the last "
                 "checkpoint, if there is one")
    if WORLD > 1:
        dist.destroy_process_group()
    for config, loss in zip(configs, losses):
        print(f"{config.attn:16} val loss {loss:.4f}")
    finished = [config for config, loss in zip(configs, losses) if loss < math.inf]
    if finished:
        use = f" --use={config.use}" if config.use else ""
        print(f"sample from it:  python sample.py --ckpt={finished[-1].out}{use}")
    return losses


if __name__ == "__main__":
    sys.exit(1 if math.inf in main() else 0)  # 1 if a run diverged
