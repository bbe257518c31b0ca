"""
Trains one GPT, or several in turn, and writes out/<run>/ckpt.pt and out/<run>/log.jsonl.
The four kinds of attention are called arms.

On a laptop, without data and without a network (minutes on two CPU cores):
$ python train.py --attn=diff

The four arms with three seeds each, one run after the other:
$ python train.py --attn=softmax,diff,linear,diff_linear --seed=1,2,3

On one machine with eight GPUs:
$ torchrun --standalone --nproc_per_node=8 train.py --attn=diff

Stop it whenever you like, with Ctrl-C or kill -9. The same command resumes where it stopped, and
on a CPU it ends in the same bits as if nothing had happened. (A GPU may add up in another order.)
That works because the batch of a step is a pure function of (data, seed, step, rank, number of
processes): there is no data loader whose state we would have to save. It also means that all arms
see the same tokens in the same order.
"""
import argparse
import json
import math
import os
import platform
import signal
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tiktoken
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from data import SHARDS, Shards, get_tokenizer, load_data, lock
from flags import comma_list, int_from_0, number, number_from_0, positive_int, positive_number
from model import ATTENTION, GPT, KERNELS, GPTConfig, Softmax, open_device, pick_kernel, upcast
from report import device_name

PROMPT = "Once upon a time"  # what a sample at each evaluation starts with

# bf16 FLOP/s without sparsity, from NVIDIA's data sheets. the first entry whose name is part of the
# card's name counts, so "H100 PCIe" stands before "H100"
PEAK = {"H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "A100": 312e12}

# -----------------------------------------------------------------------------
# the flags. each has its values in the two presets, or its default in the help. a flag that is not
# given is None until parse() fills it in

# toy takes a few minutes on two CPU cores, on text that every Python has. gpt2 has the size of
# GPT-2 small and takes some hours of an H100. add() puts their settings here
PRESETS = {"toy": {}, "gpt2": {}}

parser = argparse.ArgumentParser(
    prog="train.py",
    usage="%(prog)s [--flag=value ...]    (--help lists the flags)",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,  # a program that looks for --decay in a command must find it
)
switch = argparse.BooleanOptionalAction  # --name and --no-name


def arm(text):
    """The type of --attn. An arm from another file is in ATTENTION as well."""
    if text not in ATTENTION:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(ATTENTION)}")
    return text


def add(group, flag, type, help, toy=None, gpt2=None):
    """Adds a flag whose default is the preset's, and says it in --help."""
    defaults = []
    for preset, value in [("toy", toy), ("gpt2", gpt2)]:
        if value is not None:
            PRESETS[preset][flag.removeprefix("--")] = value
            defaults.append(f"{preset}: {value}")
    group.add_argument(flag, type=type, help=f"{help} ({', '.join(defaults)})")


group = parser.add_argument_group("what is trained, on what")
group.add_argument("--attn", type=comma_list(arm),
                   help=f"one or a list of {', '.join(ATTENTION)} (softmax)")
group.add_argument("--preset", choices=PRESETS,
                   help="defaults of the flags (gpt2 where there are shards and CUDA, else toy)")
group.add_argument("--data", type=Path,
                   help=f"folder of shards or text file (gpt2: {SHARDS}, toy: Python's manual)")
group.add_argument("--out", type=Path,
                   help="folder of the run, or with several runs the folder that holds theirs "
                        "(out/<attn>-<model and optimizer settings that differ from the preset>)")
group.add_argument("--restart", action="store_true", help="discard the run there and start over")

group = parser.add_argument_group("model")  # what has no default here has GPTConfig's
add(group, "--n_layer", positive_int, "blocks", toy=4, gpt2=12)
add(group, "--n_head", positive_int,
    "heads of queries and keys; the differential arms have half as many of values",
    toy=4, gpt2=12)
add(group, "--n_embd", positive_int, "channels", toy=128, gpt2=768)
add(group, "--block_size", positive_int, "tokens per sequence", toy=256, gpt2=1024)
group.add_argument("--mlp_width", type=positive_int, help="channels in the MLP (8/3 n_embd)")
group.add_argument("--rope_theta", type=number_from_0,
                   help="base of the rotary embedding's angles, 0 for no such embedding (10000)")
group.add_argument("--flash", action=switch, help="attention in its fast form, or as a map (fast)")
group.add_argument("--kernel", choices=["auto", *KERNELS], default="auto",
                   help="the kernel of the fast form of softmax and diff (auto); linear arms in "
                        "the same list of --attn ignore it")
group.add_argument("--decay", action=switch, help="heads forget, each at a rate of its own (off)")
group.add_argument("--subln", action=switch,
                   help="RMSNorm on the output of each head (on in the differential arms only)")
group.add_argument("--subln_init", type=number, help="initial weight of that norm (1)")
group.add_argument("--lambda_init", type=number,
                   help="lambda_init of all layers (0.8 - 0.6 exp(-0.3 l) in layer l, from 0)")
group.add_argument("--embd_init", type=positive_number,
                   help="standard deviation of the embedding at the start (1 / sqrt(3 n_embd))")

group = parser.add_argument_group("optimization")
add(group, "--batch_size", positive_int,
    "sequences per micro-step of one process, at most", toy=8, gpt2=32)
add(group, "--total_batch", positive_int,
    "tokens per step, of all processes together; in toy one micro-step",
    toy=2048, gpt2=524_288)
length = group.add_mutually_exclusive_group()
add(length, "--steps", positive_int, "optimizer steps", toy=500)
add(length, "--tokens", positive_int, "tokens, instead of steps", gpt2=2_800_000_000)
add(group, "--lr", comma_list(positive_number),
    "peak learning rate, one or a list", toy=2e-3, gpt2=1.5e-3)
add(group, "--warmup", int_from_0,
    "steps in which the rate rises, before it falls to 0", toy=50, gpt2=375)
add(group, "--weight_decay", number_from_0,
    "AdamW's weight decay, on matrices only", toy=0.1, gpt2=0.1)
add(group, "--grad_clip", positive_number, "largest gradient norm", toy=1.0, gpt2=1.0)
add(group, "--seed", comma_list(int_from_0),
    "seed of the first weights and of the order of the data, one or a list", toy=1337, gpt2=1337)

group = parser.add_argument_group("watching and saving")
add(group, "--eval_every", positive_int, "steps between evaluations", toy=100, gpt2=250)
add(group, "--eval_tokens", positive_int,
    "val tokens per evaluation, at most as many as the run trains on",
    toy=65_536, gpt2=10_485_760)
add(group, "--log_every", positive_int, "steps between lines of the log", toy=20, gpt2=10)
add(group, "--save_every", positive_int, "steps between checkpoints", toy=100, gpt2=250)

group = parser.add_argument_group("machine")
group.add_argument("--device", help="cuda, cuda:1, cpu or mps (cuda where there is one, else cpu)")
group.add_argument("--dtype", choices=["float32", "bfloat16"],
                   help="precision of the matmuls (bfloat16 where the card has it, else float32)")
group.add_argument("--compile", action=switch, help="torch.compile the model (on cuda)")


@dataclass
class TrainConfig:
    """All settings of one run, under the names of the flags. --help says what they do."""

    # what is trained, on what
    attn: str
    preset: str
    data: Path | None  # None: the manual that ships with Python
    out: Path  # the folder of this run
    restart: bool
    # the model
    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    vocab_size: int | None  # the tokenizer's, so it is not known before the data is open
    mlp_width: int | None
    rope_theta: float
    flash: bool
    kernel: str
    decay: bool
    subln: bool | None
    subln_init: float
    lambda_init: float | None
    embd_init: float | None
    # the optimization
    batch_size: int
    total_batch: int
    steps: int
    tokens: int
    lr: float
    warmup: int
    weight_decay: float
    grad_clip: float
    seed: int
    # watching and saving
    eval_every: int
    eval_tokens: int
    log_every: int
    save_every: int
    # the machine
    device: torch.device
    dtype: str
    compile: bool
    rank: int  # the number of this process, from 0
    world: int  # how many processes there are

    def model_config(self):
        return GPTConfig(**{name: getattr(self, name) for name in MODEL_FIELDS})


MODEL_FIELDS = [field.name for field in fields(GPTConfig)]
OPTIMIZER_FIELDS = ["total_batch", "lr", "warmup", "weight_decay", "grad_clip", "seed"]
# a run's identity: we refuse to resume in a folder whose run differs in one of these. flash is not
# among them, because the map and the fast form compute the same function
IDENTITY = [name for name in MODEL_FIELDS if name != "flash"] + OPTIMIZER_FIELDS
IDENTITY += ["steps", "eval_tokens", "tokenizer", "data_sha256"]
# a run may resume with other ones of these, which change its speed or its last digits. the log says
# so, see resume_log
MACHINE = ["device", "device_name", "dtype", "compile", "flash", "kernel", "batch_size", "world"]
MACHINE += ["torch", "python"]


def parse(argv=None):
    """The runs that a command line asks for. ValueError for flags that do not fit together."""
    flags = parser.parse_args(argv)
    given = {name: value for name, value in vars(flags).items() if value is not None}
    rank, world, device = find_process(flags.device)
    cuda = device.type == "cuda"

    # the real run where it can be made, else the toy
    shards = any((flags.data or SHARDS).glob("*.bin"))
    preset = flags.preset or ("gpt2" if shards and cuda else "toy")
    defaults = asdict(GPTConfig()) | PRESETS[preset]
    defaults["vocab_size"] = None  # it will be the tokenizer's
    defaults["data"] = SHARDS if preset == "gpt2" else None  # None is Python's manual
    # older cards than Ampere only emulate bf16
    bf16 = cuda and torch.cuda.is_bf16_supported(including_emulation=False)
    defaults["dtype"] = "bfloat16" if bf16 else "float32"
    defaults["compile"] = cuda
    settings = defaults | given | dict(preset=preset, rank=rank, world=world, device=device)
    settings |= fit_sizes(settings, given)
    return list_runs(settings, given, defaults)


def find_process(name):
    """(number of this process, how many there are, its device). torchrun sets the environment."""
    rank = int(os.environ.get("RANK", 0))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    if not 0 <= rank < world:
        remedy = "torchrun sets both. If you don't use torchrun, unset them"
        raise ValueError(f"RANK={rank} does not fit WORLD_SIZE={world}: {remedy}")
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if world > 1 and name == "cuda":
        name = f"cuda:{local_rank}"
    device = open_device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # what says "cuda" means this card from here on
    return rank, world, device


def fit_sizes(settings, given):
    """The sizes of a micro-step, a step and the run, so that they divide one another."""
    batch_size = settings["batch_size"]
    total_batch = settings["total_batch"]
    if settings["preset"] == "toy" and "total_batch" not in given:
        total_batch = batch_size * settings["block_size"]

    # each process gets the same number of whole sequences
    least = settings["block_size"] * settings["world"]
    if total_batch % least != 0:
        why = "(--block_size x processes)"
        raise ValueError(f"--total_batch={total_batch} is not a multiple of {least} {why}")
    batch_size = min(batch_size, total_batch // least)
    while total_batch % (batch_size * least) != 0:
        batch_size -= 1

    # a preset has steps or tokens. either flag replaces either of them
    length = given if "steps" in given or "tokens" in given else settings
    steps = length["steps"] if "steps" in length else math.ceil(length["tokens"] / total_batch)
    tokens = steps * total_batch
    return dict(batch_size=batch_size, total_batch=total_batch, steps=steps, tokens=tokens)


def list_runs(settings, given, defaults):
    """A TrainConfig for each seed, learning rate and arm."""
    seeds = given.get("seed", [defaults["seed"]])
    rates = given.get("lr", [defaults["lr"]])
    arms = given.get("attn", [defaults["attn"]])
    softmax_arms = [attn for attn in arms if issubclass(ATTENTION[attn], Softmax)]
    several = len(seeds) * len(rates) * len(arms) > 1

    configs = []
    for seed, lr, attn in product(seeds, rates, arms):
        run = settings | dict(seed=seed, lr=lr, attn=attn)
        if several or "out" not in given:
            run["out"] = given.get("out", Path("out")) / run_name(run, defaults)
        if softmax_arms and attn not in softmax_arms:
            run["kernel"] = "auto"  # linear arms have no kernel, but here the flag is not for them
        # a short run has to get to its peak, too. it is done after the name was made, because the
        # name is made of the settings that are not the defaults
        run["warmup"] = min(run["warmup"], run["steps"] - 1)
        configs.append(TrainConfig(**run))
    return configs


def run_name(run, defaults):
    """The name of a run's folder: its arm, and what differs from the defaults."""
    parts = [run["attn"]]
    for name in MODEL_FIELDS + OPTIMIZER_FIELDS:
        if name != "attn" and run[name] != defaults[name]:
            parts.append(run_name_part(name, run[name]))
    return "-".join(parts)


def run_name_part(name, value):
    """One part of a run's name, exact to the last digit: nosubln, lr3e-3, n_layer6."""
    if isinstance(value, bool):
        return name if value else f"no{name}"
    if isinstance(value, float) and 0 < value < 0.01:
        return name + np.format_float_scientific(value, trim="-", exp_digits=1)
    return name + repr(value).removesuffix(".0")


# -----------------------------------------------------------------------------
# the data


class Data(NamedTuple):
    """What all runs of a command train on."""

    train: Shards
    val: Shards
    enc: tiktoken.Encoding
    about: dict  # what the log of each run says of it


def open_data(config):
    """The Data of a config. ValueError if there is not enough of it."""
    train, val, tokenizer, what = load_data(config.data)
    T = config.block_size
    if train.sequences(T) < config.total_batch // T or val.sequences(T) < 1:
        size = f"{train.tokens:,} + {val.tokens:,} tokens"
        raise ValueError(f"{what['data']} is too short for a step and an evaluation: {size}")
    about = what | dict(
        tokenizer=tokenizer,
        train_tokens=train.tokens,
        val_tokens=val.tokens,
        device_name=device_name(config.device),
        torch=str(torch.__version__),
        python=platform.python_version(),
    )
    return Data(train, val, get_tokenizer(tokenizer), about)


@lru_cache(maxsize=2)  # a batch may reach into the next epoch
def permutation(n, seed, epoch):
    return np.random.default_rng([seed, epoch]).permutation(n)


def load_sequences(data, numbers, config):
    """These sequences of the data, (len(numbers), T + 1) int64, on the device."""
    sequences = [data.sequence(int(i), config.block_size) for i in numbers]
    tokens = torch.from_numpy(np.stack(sequences))
    if tokens.max() >= config.vocab_size:
        problem = f"token {tokens.max()}, but its tokenizer has {config.vocab_size} tokens"
        raise ValueError(f"--data holds {problem}. Was another tokenizer used to prepare it?")
    if config.device.type == "cuda":
        return tokens.pin_memory().to(config.device, non_blocking=True)  # we don't wait for it
    return tokens.to(config.device)


def batch(train, config, step, micro_step):
    """The sequences of a micro-step of this process, (batch_size, T + 1).

    The epochs lie end to end, each shuffled in its own way. They are cut into steps, a step into
    micro-steps, and a micro-step into one part for each process.
    """
    n = train.sequences(config.block_size)
    first = step * (config.total_batch // config.block_size)
    first += (micro_step * config.world + config.rank) * config.batch_size
    numbers = []
    for i in range(first, first + config.batch_size):
        order = permutation(n, config.seed, epoch=i // n)
        numbers.append(order[i % n])
    return load_sequences(train, numbers, config)


# -----------------------------------------------------------------------------
# evaluation


def autocast(config):
    """Matmuls in bf16, if config.dtype says so. Weights, norms and long sums stay in float32."""
    return torch.autocast(config.device.type, torch.bfloat16, enabled=config.dtype == "bfloat16")


@torch.no_grad()
def evaluate(model, val, config):
    """The mean loss in nats of the first sequences of val.

    They are the same ones for each arm, at each step, and with any number of processes.
    """
    B = config.batch_size
    wanted = min(config.eval_tokens, config.tokens)  # a short run shouldn't spend its time here
    n = min(max(1, wanted // config.block_size), val.sequences(config.block_size))
    losses = torch.zeros(n, device=config.device)
    for first in range(config.rank * B, n, config.world * B):
        # the last batch is filled up with the first sequences: a smaller one would be compiled anew
        tokens = load_sequences(val, [i % n for i in range(first, first + B)], config)
        with autocast(config):
            logits, _ = model(tokens[:, :-1], tokens[:, 1:])
        # the model's own loss is the mean of all of them, also of those that fill the batch up
        for i in range(first, min(first + B, n)):
            losses[i] = F.cross_entropy(upcast(logits[i - first]), tokens[i - first, 1:])
        del logits  # the largest tensor here, and the next ones need the room
    if config.world > 1:
        dist.all_reduce(losses)  # each process left zeros for the sequences of the others
    return losses.cpu().double().mean().item()


def get_lambdas(model):
    """The lambda of each layer. None for the arms with one map."""
    layers = [block.attn for block in model.blocks if hasattr(block.attn, "lambda_q1")]
    return [layer.lambda_full().item() for layer in layers] or None


def sample_text(model, enc, config, max_new_tokens=40):
    """What the model makes of PROMPT if it takes the likeliest token each time."""
    idx = torch.tensor([enc.encode_ordinary(PROMPT)], device=config.device)
    with autocast(config):
        tokens = [token.item() for token in model.generate(idx, max_new_tokens, temperature=0)]
    tokens = [token for token in tokens if token != enc.eot_token]
    return PROMPT + enc.decode(tokens, errors="replace")


# -----------------------------------------------------------------------------
# optimization


def learning_rate(step, config):
    """The rate of update number step, from 0: linear up to lr, then linear down to 0."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    return config.lr * (config.steps - step) / (config.steps - config.warmup)


def make_optimizer(model, lr, weight_decay):
    """AdamW. The matrices decay, the embedding among them, and norms and lambdas do not."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        dict(params=matrices, weight_decay=weight_decay),
        dict(params=vectors, weight_decay=0.0),
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def training_step(model, optimizer, train, config, step):
    """Makes update number step, counted from 0.

    Returns two tensors: the loss before the update, as the mean over this process's sequences, and
    the norm of the gradient before clipping.
    """
    for param_group in optimizer.param_groups:
        param_group["lr"] = learning_rate(step, config)

    micro_steps = config.total_batch // (config.batch_size * config.block_size * config.world)
    loss_sum = torch.zeros((), device=config.device)
    for micro_step in range(micro_steps):
        if config.world > 1:
            # the processes have to average their gradients only once, in the last micro-step. the
            # official way is a no_sync() context around the others, and this is all that it does
            model.require_backward_grad_sync = micro_step == micro_steps - 1
        tokens = batch(train, config, step, micro_step)
        with autocast(config):
            # we don't keep the logits: they are large, and the backward pass needs the room
            loss = model(tokens[:, :-1], tokens[:, 1:])[1]
        (loss / micro_steps).backward()
        loss_sum += loss.detach()

    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    # both are still tensors. to make numbers of them we would have to wait for the GPU
    return loss_sum / micro_steps, grad_norm


def count_flops(config):
    """FLOPs of the forward and backward pass of one token in a full sequence.

    PyTorch counts those of all matmuls, while a copy of the model without weights runs once. The
    usual formula, 6N + 12LCT for N parameters and L layers, holds for softmax attention only. Like
    that formula we count the masked half of a map as work.
    """
    model = GPT(config.model_config(), seed=None)
    for block in model.blocks:
        block.attn.kernel = "efficient"  # the one that pads nothing: zeros are no useful work
    idx = torch.zeros(1, config.block_size, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter:
        _, loss = model(idx, idx)
        loss.backward()
    return counter.get_total_flops() / config.block_size


def full_speed(config, name):
    """The tokens per second at an MFU of 100 %. None if the peak of this device is not in PEAK.

    MFU, the model FLOPs utilization, is the share of the peak that the model's FLOPs make up.
    """
    peaks = [peak for card, peak in PEAK.items() if card in name]
    if not peaks:
        return None
    try:
        return peaks[0] * config.world / count_flops(config)
    except RuntimeError:
        return None  # an arm from another file may not run without weights


# -----------------------------------------------------------------------------
# the log


def print0(*args, **kwargs):
    """Prints in the first process only, or eight GPUs would say everything eight times."""
    if int(os.environ.get("RANK", 0)) == 0:
        print(*args, **kwargs, flush=True)


def read_log(path):
    """(head, records) of a log.jsonl. A last line that was cut short is left out."""
    lines = Path(path).read_text().split("\n")[:-1]
    try:
        head, *records = map(json.loads, lines)
        whole = "attn" in head and all("step" in record for record in records)
    except (ValueError, TypeError):
        whole = False
    if not whole:
        raise ValueError(f"{path} is not a whole log of train.py")
    return head, records


def write_log(log_file, record):
    print(json.dumps(record), file=log_file, flush=True)


def make_head(config, about):
    """The first line of a log: all that is known before the run begins."""
    parameters = sum(p.numel() for p in GPT(config.model_config(), seed=None).parameters())
    head = vars(config) | about | dict(parameters=parameters, date=time.strftime("%Y-%m-%d"))
    return json.loads(json.dumps(head, default=str))  # paths and devices turn into their names


def make_record(config, step, update, since, speed_limit):
    """What the log says of a step. An evaluation adds to it.

    update is what training_step returned, or None at step 0. since is a step and the time at which
    it ended: the speed is the mean from there on.
    """
    record = dict(step=step, tokens=step * config.total_batch)
    record |= dict(train_loss=None, lr=None, grad_norm=None, tok_per_s=None, mfu=None)
    if update is None:
        return record
    loss, grad_norm = update
    if config.world > 1:
        dist.all_reduce(loss)
    # item() waits for the device. only then we read the clock, so that its work is in the time
    record["train_loss"] = loss.item() / config.world
    record["lr"] = learning_rate(step - 1, config)
    record["grad_norm"] = grad_norm.item()
    first_step, start = since
    if step > first_step:
        seconds = time.perf_counter() - start
        record["tok_per_s"] = (step - first_step) * config.total_batch / seconds
        if speed_limit is not None:
            record["mfu"] = record["tok_per_s"] / speed_limit
    return record


def format_record(record, config):
    """The line for the screen."""
    parts = [f"step {record['step']:>5}/{config.steps}"]
    if record["step"] > 0:
        parts.append(f"train {record['train_loss']:.4f}")
        parts.append(f"lr {record['lr']:.2e}")
        parts.append(f"norm {record['grad_norm']:5.2f}")
    if record["tok_per_s"] is not None:
        parts.append(f"{record['tok_per_s']:,.0f} tok/s")
        if record["mfu"] is not None:
            parts.append(f"MFU {record['mfu']:.1%}")
        left = round((config.tokens - record["tokens"]) / record["tok_per_s"])
        parts.append(f"{timedelta(seconds=left)} left")
    if "val_loss" in record:
        parts.append(f"val {record['val_loss']:.4f}")
        if record["lambda"] is not None:
            parts.append("lambda " + " ".join(f"{x:.2f}" for x in record["lambda"]))
        return " | ".join(parts) + f"\n      {record['sample']!r}"
    return " | ".join(parts)


def not_finite(record):
    """What is not finite in a record, "grad_norm nan" for example. "" if all is well."""
    floats = {name: value for name, value in record.items() if isinstance(value, float)}
    return ", ".join(f"{name} {x}" for name, x in floats.items() if not math.isfinite(x))


# -----------------------------------------------------------------------------
# one run


class Run(NamedTuple):
    """What a run works with. The three models share their weights."""

    model: GPT  # to save and to sample
    compiled: torch.nn.Module  # to evaluate. without --compile it is the model itself
    parallel: torch.nn.Module  # to train. in a single process it is the same as compiled
    optimizer: torch.optim.Optimizer
    resumed: int | None  # the step of the checkpoint that we resume from, if there is one
    head: dict  # the first line of the log


def refuse_another_run(folder, there, here):
    """ValueError if the head of the run in a folder, there, is not that of our run, here."""
    there = asdict(GPTConfig()) | there  # an old run may lack a new field, and had its default
    differences = []
    for name in IDENTITY:
        if there.get(name) != here[name]:
            differences.append(f"{name} is {there.get(name)!r} there and {here[name]!r} here")
    if differences:
        remedy = "Choose another --out, or --restart it"
        raise ValueError(f"{folder} is another run's: {', '.join(differences)}. {remedy}")


def start_or_resume(config, data):
    """The Run of a config: from the checkpoint in its folder, if there is one, or from the seed."""
    head = make_head(config, data.about)
    path = config.out / "ckpt.pt"
    resumed = None
    if path.exists() and not config.restart:
        model = GPT.load(path, config.device)
        refuse_another_run(config.out, model.extra.get("run", {}) | asdict(model.config), head)
        resumed = model.extra["step"]
    else:
        model = GPT(config.model_config(), config.seed).to(config.device)
    for block in model.blocks:
        block.attn.flash = config.flash  # the checkpoint's may be another, see IDENTITY

    optimizer = make_optimizer(model, config.lr, config.weight_decay)
    if resumed is not None and resumed < config.steps:  # a finished run needs no optimizer
        optimizer.load_state_dict(model.extra.pop("optimizer"))

    torch.compiler.reset()  # else several runs together reach torch's limit of recompilations
    compiled = torch.compile(model) if config.compile else model
    parallel = compiled
    if config.world > 1:
        # waits for all processes: all of them have looked into the folder before one writes there
        seen = [None] * config.world
        dist.all_gather_object(seen, resumed)
        if len(set(seen)) > 1:
            problem = f"the processes find different checkpoints in {config.out}"
            raise ValueError(f"{problem}: is it a folder that all of them share?")
        parallel = torch.nn.parallel.DistributedDataParallel(compiled)
    return Run(model, compiled, parallel, optimizer, resumed, head)


def train_run(config, data, log_file):
    """Trains one run, from where it stopped.

    Returns "finished"; "stopped", if it was told to stop and can be resumed; or "diverged", if a
    loss is not finite.
    """
    run = start_or_resume(config, data)
    if run.resumed == config.steps:
        print0(f"{config.out}: finished, {config.steps} steps (--restart starts over)")
        return "finished"

    size = f"{run.head['parameters'] / 1e6:.2f} M parameters, seed {config.seed}"
    work = f"{config.steps} steps of {config.total_batch:,} tokens, peak rate {config.lr:g}"
    print0(f"{config.attn}: {size}, {work} -> {config.out}")
    kernel, why = pick_kernel(run.model, config.kernel, getattr(torch, config.dtype))
    if kernel is not None:
        print0(f"kernel {kernel}" + (f" ({why})" if why else ""))
    if run.resumed is not None:
        print0(f"resumes after step {run.resumed}")

    if config.rank == 0 and run.resumed is None:
        # the old checkpoint goes first. if we are killed after that, nobody resumes from it
        (config.out / "ckpt.pt").unlink(missing_ok=True)
        log_file.truncate(0)
        write_log(log_file, run.head)
    elif config.rank == 0:
        resume_log(log_file, config, run)

    outcome = train_loop(config, data, run, log_file)
    if outcome == "finished":
        path = config.out / "ckpt.pt"
        print0(f'\nsample from it: python sample.py --ckpt={path} --prompt="{PROMPT}"')
    if outcome == "stopped" and config.restart:
        print0("      but leave out --restart, or it starts over")
    return outcome


def resume_log(log_file, config, run):
    """Makes the log ready for the steps after the checkpoint."""
    head, records = read_log(log_file.name)
    # cut off what it says of later steps than the checkpoint's: we make them again
    kept = [record for record in records if record["step"] <= run.resumed]
    lines = Path(log_file.name).read_bytes().splitlines(keepends=True)
    log_file.truncate(sum(len(line) for line in lines[: 1 + len(kept)]))  # 1 is the head

    # the head says how the run began. what is different from now on gets a line of its own
    for record in kept:
        head |= record.get("resumed", {})
    changed = {name: run.head[name] for name in MACHINE if run.head[name] != head.get(name)}
    if changed:
        tokens = run.resumed * config.total_batch
        write_log(log_file, dict(step=run.resumed, tokens=tokens, resumed=changed))


def train_loop(config, data, run, log_file):
    """The steps of a run, see train_run."""
    speed_limit = full_speed(config, run.head["device_name"])
    step = run.resumed or 0
    update = None
    since = (step, time.perf_counter())  # the speed is measured from here on
    while True:
        last = step == config.steps
        stop = somebody_stops(config)  # by Ctrl-C or SIGTERM
        new = step != run.resumed  # what was due at the step that we resume at was done before
        evaluate_now = new and (last or step % config.eval_every == 0)
        log_now = new and (evaluate_now or step % config.log_every == 0)
        save_now = new and (last or stop or step % config.save_every == 0)

        # once in a while: look at the loss. that waits for the GPU, so we don't do it every time
        record = {}
        if log_now or save_now:
            record = make_record(config, step, update, since, speed_limit)

        # once in a while: evaluate, and sample from the model
        if evaluate_now:
            record["val_loss"] = evaluate(run.compiled, data.val, config)
            record["lambda"] = get_lambdas(run.model)
            record["sample"] = sample_text(run.model, data.enc, config)

        # a model that is not finite does not recover, and must not replace the last checkpoint
        bad = not_finite(record)
        if bad:
            write_log(log_file, dict(step=step, tokens=record["tokens"], not_finite=bad))
            rest = "the last checkpoint is kept, try a lower --lr"
            print0(f"{config.out} stops at step {step}: {bad}; {rest}", file=sys.stderr)
            return "diverged"

        # once in a while: log and save
        if log_now:
            write_log(log_file, record)
            print0(format_record(record, config))
        if save_now and config.rank == 0:
            save_checkpoint(config, run, step, log_file)
        if log_now or save_now:
            since = (step, time.perf_counter())  # all of this was not training

        if last:
            return "finished"
        if stop:
            print0(f"stopped after step {step} of {config.steps}: the same command resumes")
            return "stopped"

        update = training_step(run.parallel, run.optimizer, data.train, config, step)
        if step == (run.resumed or 0):
            # the first step compiles the model, too, so its time says nothing of the speed
            update[1].item()  # waits for the device
            since = (step + 1, time.perf_counter())
        step += 1


def save_checkpoint(config, run, step, log_file):
    os.fsync(log_file.fileno())  # so that the log on the disk is never behind the checkpoint
    # nobody resumes a finished run, and the optimizer is twice as large as the model
    state = run.optimizer.state_dict() if step < config.steps else None
    more = dict(tokenizer=run.head["tokenizer"], step=step, run=run.head, optimizer=state)
    run.model.save(config.out / "ckpt.pt", **more)


stop_requested = False  # whether this process got Ctrl-C or SIGTERM


def request_stop(number, frame):
    """A signal handler: finish the step, save, end. A second signal ends the process at once."""
    global stop_requested
    stop_requested = True
    signal.signal(number, signal.SIG_DFL)
    # print is not safe in a signal handler: it may have been interrupted itself
    os.write(2, b"\nstopping after this step. Ctrl-C again ends it at once, without saving\n")


def somebody_stops(config):
    """Whether a process was told to stop. Then all of them stop, after the same step."""
    if config.world == 1:
        return stop_requested
    votes = torch.tensor(int(stop_requested))  # on the CPU, so that it does not wait for the GPU
    dist.all_reduce(votes)
    return votes.item() > 0


# -----------------------------------------------------------------------------
# all runs of a command


def check_run(config, data):
    """ValueError if a run can't be trained, or if its folder holds another one."""
    head = make_head(config, data.about)
    if (config.out / "ckpt.pt").exists() and not config.restart:
        # the log says whose checkpoint it is. the checkpoint may be gigabytes large, so we read it
        # only once, when its turn comes
        there, _ = read_log(config.out / "log.jsonl")
        refuse_another_run(config.out, there, head)
    # one layer is enough to see whether the kernel runs, and without a vocabulary it is made fast
    small = replace(config.model_config(), n_layer=1, vocab_size=1)
    model = GPT(small, config.seed).to(config.device)
    pick_kernel(model, config.kernel, getattr(torch, config.dtype))


def introduce(config, data):
    """Says what is going to happen, on what."""
    device = f"{data.about['device_name']}, {config.dtype}"
    if config.compile:
        device += ", compiled"
    sizes = f"micro-steps of {config.batch_size} x {config.block_size} tokens"
    print0(f"preset {config.preset}, {device}, {sizes}, processes: {config.world}")
    splits = f"{data.train.tokens:,} tokens to train on, {data.val.tokens:,} val"
    print0(f"data: {data.about['data']}, {splits}, tokenizer {data.about['tokenizer']}")
    print0(f"      val is {data.about['val']}")
    if data.about["data"] == "pydoc_data.topics":
        print0("      this is Python's own manual. The real run needs a GPU and prepare_fineweb.py")


def compile_failed(error):
    """What torch.compile says, in one line, and what helps."""
    from torch._inductor.codecache import cache_dir

    first_lines = str(error).split("\n\n")[0]
    return (
        f"torch.compile failed ({' '.join(first_lines.split())}). --no-compile does without it. "
        f"If a run was stopped while it compiled, what it left in {cache_dir()} may be damaged: "
        "delete it"
    )


def main(argv=None):
    """Trains the runs that a command line asks for.

    Returns "stopped" if they were stopped, else "diverged" if at least one run did, else
    "finished". Raises ValueError and OSError for errors that a user can mend.
    """
    configs = parse(argv)
    shared = configs[0]  # the runs have the same data, sizes and device
    if shared.world > 1:
        dist.init_process_group()
    torch.set_float32_matmul_precision("high")
    data = open_data(shared)
    # all of them before the first one is trained, so that no error comes after hours
    for config in configs:
        config.vocab_size = data.enc.n_vocab
        check_run(config, data)
    introduce(shared, data)

    outcomes = []
    for config in configs:
        config.out.mkdir(parents=True, exist_ok=True)
        # the first process writes for all
        log_path = config.out / "log.jsonl" if config.rank == 0 else os.devnull
        with open(log_path, "a", newline="\n") as log_file:
            if config.rank == 0:
                lock(log_file, config.out)
            try:
                outcomes.append(train_run(config, data, log_file))
            except torch._dynamo.exc.TorchDynamoException as e:
                raise ValueError(compile_failed(e)) from e
        if outcomes[-1] == "stopped":
            break
    if shared.world > 1:
        dist.destroy_process_group()
    if len(configs) > 1 and "stopped" not in outcomes:
        print0(f"\ncompare them: python bench.py loss {shared.out.parent}")
    for outcome in ("stopped", "diverged"):
        if outcome in outcomes:
            return outcome
    return "finished"


if __name__ == "__main__":
    signal.signal(signal.SIGINT, request_stop)
    signal.signal(signal.SIGTERM, request_stop)
    try:
        sys.exit(0 if main() == "finished" else 1)
    except (ValueError, OSError) as e:
        sys.exit(f"train.py: {e}")
