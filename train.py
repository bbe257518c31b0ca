"""
Trains one GPT, or several in turn, and writes out/<run>/ckpt.pt and out/<run>/log.jsonl.
The kinds of attention are called arms.

On a laptop, without data and without a network (some minutes on one CPU core):
$ python train.py --attn=diff

Four arms with three seeds each, one run after the other:
$ python train.py --attn=softmax,diff,linear,diff_linear --seed=1,2,3

On one machine with eight GPUs:
$ torchrun --standalone --nproc_per_node=8 train.py --attn=diff

Stop it whenever you like, with Ctrl-C or kill -9. The same command (without --restart) goes on from
the last checkpoint, and on a CPU it ends in the same bits as if nothing had happened. (A GPU may
add up in another order.) That works because the sequences of a step follow from the data, the seed
and the number of the step: there is no data loader whose state we would have to save. It also means
that all arms see the same tokens in the same order.
"""
import argparse
import json
import math
import os
import platform
import re
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np
import tiktoken
import torch
import torch.distributed as dist
import torch.nn.functional as F
from filelock import FileLock, Timeout
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from data import SHARDS, Shards, count, get_tokenizer, load_data
from model import ATTENTION, GPT, GPTConfig, Softmax, pick_device, pick_dtype, upcast

PROMPT = "Once upon a time"  # what a sample at each evaluation starts with

# -----------------------------------------------------------------------------
# the settings of a run


def flag(default, help, **more):
    """A field of such a dataclass. more: choices or type, as argparse knows them, or many=True
    for a list like 1,2,3."""
    return field(default=default, metadata=dict(help=help, **more))


def number(text):
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    # float() also reads "inf" and "nan", which would pass for numbers
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on, like 0.5 or 1e-3")
    return value


def above_0(text):
    if number(text) == 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return number(text)


def positive(text):
    if count(text) == 0:
        raise argparse.ArgumentTypeError("must be at least 1, not 0")
    return count(text)


def arm(text):
    if text not in ATTENTION:  # an arm from another file is in it as well
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(ATTENTION)}")
    return text


@dataclass
class Config:
    """All settings of one run. Each is a flag, and the defaults are those of the preset toy."""

    # what is trained, on what
    attn: str = flag("softmax", f"one or a list of {', '.join(ATTENTION)}", type=arm, many=True)
    preset: str | None = flag(
        None, "toy or gpt2 (gpt2 if there are shards and CUDA, else toy)", choices=["toy", "gpt2"]
    )
    data: Path | None = flag(None, "folder of shards, or text file; in toy Python's own manual")
    out: Path | None = flag(
        None, "folder of the run, or of several runs' folders (out/<attn>-<what is special>)"
    )
    restart: bool = flag(False, "discard the run there and start over")

    # the model
    n_layer: int = flag(4, "blocks")
    n_head: int = flag(4, "heads of queries; diff and diff_linear have half as many of values")
    n_embd: int = flag(128, "channels")
    block_size: int = flag(256, "tokens per sequence")
    vocab_size: int = 1  # no flag: it is the tokenizer's, see open_data
    mlp_width: int | None = flag(None, "channels in the MLP (8/3 n_embd; less for diff_v2)")
    rope_theta: float = flag(10000.0, "base of the rotary embedding's angles, 0 for none")
    flash: bool = flag(True, "attention in its fast form, or else as a map")
    kernel: str = flag("sdpa", "of softmax's fast form", choices=["sdpa", "flash_attn"])
    subln: bool | None = flag(None, "RMSNorm on each head's output (in diff and diff_linear only)")
    subln_init: float = flag(1.0, "initial weight of that norm")
    lambda_init: float | None = flag(None, "of all layers (0.8 - 0.6 exp(-0.3 l) in layer l)")
    decay: bool = flag(False, "heads forget, each at a rate of its own")
    minus_average: bool = flag(False, "subtract lambda times the average map, with one map only")
    embd_init: float | None = flag(
        None, "first std of the embedding (1 / sqrt(3 n_embd))", type=above_0
    )

    # the optimization
    batch_size: int = flag(8, "sequences per micro-step of one process, at most")
    total_batch: int | None = flag(None, "tokens per step; in toy batch_size x block_size")
    steps: int = flag(500, "optimizer steps, if there is no --tokens")
    tokens: int | None = flag(None, "tokens to train on, in the place of --steps")
    lr: float = flag(2e-3, "peak learning rate, one or a list", type=above_0, many=True)
    warmup: int = flag(50, "steps in which the rate rises, before it falls to 0", type=count)
    weight_decay: float = flag(0.1, "AdamW's weight decay, on matrices only")
    grad_clip: float = flag(1.0, "largest gradient norm", type=above_0)
    seed: int = flag(1337, "of weights and data order, one or a list", type=count, many=True)

    # watching and saving
    eval_every: int = flag(100, "steps between evaluations; each saves a checkpoint")
    eval_tokens: int = flag(65_536, "val tokens, at most as many as the run trains on")
    log_every: int = flag(20, "steps between lines of the log")

    # the machine
    device: torch.device = flag(None, "cuda, cuda:1, cpu or mps (cuda if there is one)", type=str)
    dtype: str | None = flag(
        None, "of the matmuls (bfloat16 where the card has it)", choices=["float32", "bfloat16"]
    )
    compile: bool | None = flag(None, "torch.compile the model (on cuda)")
    rank: int = 0  # the number of this process, from 0. torchrun sets it, and the next one
    world: int = 1  # how many processes there are

    def __post_init__(self):
        """Fills in what follows from the other settings. ValueError if they don't fit together."""
        self.device = pick_device(self.device)
        self.dtype = pick_dtype(self.device, self.dtype)
        if self.compile is None:
            self.compile = self.device.type == "cuda"

        # each process gets the same number of whole sequences, in micro-steps of equal size
        if self.total_batch is None:
            self.total_batch = self.batch_size * self.block_size
        least = self.block_size * self.world
        if self.total_batch % least != 0:
            why = "block_size x processes"
            raise ValueError(f"--total_batch={self.total_batch} is no multiple of {least} ({why})")
        self.batch_size = min(self.batch_size, self.total_batch // least)
        while self.total_batch % (self.batch_size * least) != 0:
            self.batch_size -= 1

        if self.tokens is not None:
            self.steps = math.ceil(self.tokens / self.total_batch)
        self.tokens = self.steps * self.total_batch
        self.drop_what_changes_nothing()

    def drop_what_changes_nothing(self):
        """Sets what has no effect in this arm to its default, so that one model has one name."""
        config = self.model_config()
        if not is_ours(self.attn):
            return  # an arm from another file may do with its settings what it likes
        with torch.device("meta"):  # a layer without values, to look at
            layer = ATTENTION[self.attn](config, depth=0)
        if self.subln == layer.subln_by_default:
            self.subln = None
        if layer.subln is None:
            self.subln_init = 1.0
        if not hasattr(layer, "lambda_q1"):
            self.lambda_init = None

    def model_config(self):
        return GPTConfig(**{f.name: getattr(self, f.name) for f in fields(GPTConfig)})


# toy takes some minutes on a CPU core, on text that every Python has. gpt2 has the size of GPT-2
# small and takes some hours of an H100
PRESETS = {
    "toy": {},
    "gpt2": dict(
        data=SHARDS,
        n_layer=12,
        n_head=12,
        n_embd=768,
        block_size=1024,
        batch_size=32,
        total_batch=524_288,
        tokens=2_800_000_000,
        lr=1.5e-3,
        warmup=375,
        eval_every=250,
        eval_tokens=10_485_760,
        log_every=10,
    ),
}


def is_ours(attn):
    """Whether an arm is one of model.py, and not one that another file put into ATTENTION."""
    return ATTENTION[attn].__module__ == "model"

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
    train, val, tokenizer, about = load_data(config.data)
    T = config.block_size
    if train.sequences(T) < config.total_batch // T or val.sequences(T) < 1:
        size = f"{train.tokens:,} + {val.tokens:,} tokens"
        raise ValueError(f"{about['data']} is too short for a step and an evaluation: {size}")
    return Data(train, val, get_tokenizer(tokenizer), about | dict(tokenizer=tokenizer))


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
# a step


def learning_rate(step, config):
    """The rate of update number step, from 0: linear up to lr, then linear down to 0."""
    warmup = min(config.warmup, config.steps - 1)  # a short run has to get to its peak, too
    if step < warmup:
        return config.lr * (step + 1) / warmup
    return config.lr * (config.steps - step) / (config.steps - warmup)


def make_optimizer(model, lr, weight_decay):
    """AdamW. The matrices decay, the embedding among them, and norms and lambdas do not."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        dict(params=matrices, weight_decay=weight_decay),
        dict(params=vectors, weight_decay=0.0),
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def autocast(config):
    """Matmuls in bf16, if config.dtype says so. Weights, norms and long sums stay in float32."""
    return torch.autocast(config.device.type, torch.bfloat16, enabled=config.dtype == "bfloat16")


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
            # the processes have to average their gradients only once, in the last micro-step. The
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
    # both are still tensors. To make numbers of them we would have to wait for the GPU
    return loss_sum / micro_steps, grad_norm

# -----------------------------------------------------------------------------
# evaluation


def sequence_losses(model, tokens):
    """The mean loss in nats of each sequence of tokens (B, T + 1), (B,)."""
    logits = model.logits(model.read(tokens[:, :-1]))  # (B, T, vocab_size)
    losses = [F.cross_entropy(upcast(a), b) for a, b in zip(logits, tokens[:, 1:])]
    return torch.stack(losses)


@torch.no_grad()
def evaluate(model, val, config):
    """The mean loss in nats of the first sequences of val.

    They are the same ones for each arm, at each step, and with any number of processes.
    """
    losses_of = torch.compile(sequence_losses) if config.compile else sequence_losses
    B = config.batch_size
    wanted = min(config.eval_tokens, config.tokens)  # a short run shouldn't spend its time here
    n = min(max(1, wanted // config.block_size), val.sequences(config.block_size))
    losses = torch.zeros(n, device=config.device)
    for first in range(config.rank * B, n, config.world * B):
        # the last batch is filled up with the first sequences: a smaller one would be compiled anew
        tokens = load_sequences(val, [i % n for i in range(first, first + B)], config)
        with autocast(config):
            losses[first : first + B] = losses_of(model, tokens)[: n - first]
    if config.world > 1:
        dist.all_reduce(losses)  # each process left zeros for the sequences of the others
    return losses.cpu().double().mean().item()


def get_lambdas(model):
    """The lambda of each layer. None for the arms without one, or with one for each token."""
    lambdas = [block.attn.lambda_full() for block in model.blocks]
    return None if lambdas[0] is None else [x.item() for x in lambdas]


def sample_text(model, enc, config, max_new_tokens=40):
    """What the model makes of PROMPT if it takes the likeliest token each time."""
    idx = torch.tensor([enc.encode_ordinary(PROMPT)], device=config.device)
    with autocast(config):
        tokens = [token.item() for token in model.generate(idx, max_new_tokens, temperature=0)]
    tokens = [token for token in tokens if token != enc.eot_token]
    return PROMPT + enc.decode(tokens, errors="replace")

# -----------------------------------------------------------------------------
# the log: a line that says what the run is, and a line for each step that was looked at


def print0(*args, **kwargs):
    """Prints in the first process only, or eight GPUs would say everything eight times."""
    if int(os.environ.get("RANK", 0)) == 0:
        print(*args, **kwargs, flush=True)


def write_log(config, record):
    """Adds a line to the log. Nothing that stands there is ever changed."""
    if config.rank > 0:
        return  # the first process writes for all
    with open(config.out / "log.jsonl", "a", newline="\n") as file:
        file.write(json.dumps(record) + "\n")


def read_log(path):
    """(head, records) of a log.jsonl, with one record for each step.

    A step that was made again after a stop has more than one line, and of each field the last one
    counts. A line that a stop has cut is left out, so a log without a whole line gives ({}, []).
    """
    head = {}
    records = {}
    for line in Path(path).read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if not head:
            head = record
        else:
            step = record["step"]
            records[step] = records.get(step, {}) | record
    return head, [records[step] for step in sorted(records)]


def make_record(config, step, update, since, speed_limit):
    """What the log says of a step. An evaluation adds to it.

    update: what training_step returned, or None at the start. since: the (step, time) from which
    the speed is measured. speed_limit: what full_speed returned.
    """
    record = dict(step=step, tokens=step * config.total_batch)
    if update is None:
        return record
    loss, grad_norm = update
    if config.world > 1:
        dist.all_reduce(loss)
    # item() waits for the device. Only then we read the clock, so that its work is in the time
    record["train_loss"] = loss.item() / config.world
    record["lr"] = learning_rate(step - 1, config)
    record["grad_norm"] = grad_norm.item()
    first_step, start = since
    if step > first_step:
        seconds = time.perf_counter() - start
        record["tok_per_s"] = (step - first_step) * config.total_batch / seconds
        record["mfu"] = record["tok_per_s"] / speed_limit if speed_limit else None
    return record


def not_finite(record):
    """What is not finite in a record, "grad_norm nan" for example. "" if all is well."""
    floats = {name: value for name, value in record.items() if isinstance(value, float)}
    return ", ".join(f"{name} {x}" for name, x in floats.items() if not math.isfinite(x))


def show(record, config):
    """Prints a record."""
    parts = [f"step {record['step']:>5}/{config.steps}"]
    if "train_loss" in record:
        parts.append(f"train {record['train_loss']:.4f}")
        parts.append(f"lr {record['lr']:.2e}")
        parts.append(f"norm {record['grad_norm']:5.2f}")
    if "tok_per_s" in record:
        parts.append(f"{record['tok_per_s']:,.0f} tok/s")
        if record["mfu"] is not None:
            parts.append(f"MFU {record['mfu']:.1%}")
        left = round((config.tokens - record["tokens"]) / record["tok_per_s"])
        parts.append(f"{timedelta(seconds=left)} left")
    if "val_loss" in record:
        parts.append(f"val {record['val_loss']:.4f}")
        if record["lambda"] is not None:
            parts.append("lambda " + " ".join(f"{x:.2f}" for x in record["lambda"]))
    print0(" | ".join(parts))
    if "sample" in record:
        print0(f"      {record['sample']!r}")


# bf16 FLOP/s without sparsity, from NVIDIA's data sheets
PEAK = {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "A100": 312e12}


def device_name(device):
    """The card's name, or the processor's and the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():  # on Linux, where platform does not know the model
        name = re.search(r"(?:model name\s*: (.*)|$)", Path("/proc/cpuinfo").read_text())[1] or name
    return f"{device} ({name}), {torch.get_num_threads()} threads"


def full_speed(config):
    """The tokens per second that take the card's whole peak, so an MFU of 1. None if unknown.

    PyTorch counts the FLOPs of all matmuls, while a model without values runs forward and backward.
    Softmax runs as a map, because kernels pad with zeros. The masked half of a map counts as work.
    """
    peaks = [peak for card, peak in PEAK.items() if card in device_name(config.device)]
    if not peaks or not is_ours(config.attn):
        return None
    as_map = issubclass(ATTENTION[config.attn], Softmax)
    idx = torch.zeros(1, config.block_size, dtype=torch.int64, device="meta")
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model = GPT(replace(config.model_config(), flash=not as_map), seed=None)
        model(idx, idx)[1].backward()
    return peaks[0] * config.world * config.block_size / counter.get_total_flops()

# -----------------------------------------------------------------------------
# what a run is: its name, the first line of its log, and when it is the same run


# The first line of a log has all settings, and what make_head adds. A run may go on with other ones
# of these, which change its speed or its last digits at most. All others are its identity, and we
# refuse to go on in the folder of another run. The data's identity is its data_sha256
MAY_DIFFER = {"preset", "data", "out", "restart", "batch_size", "eval_every", "log_every"}
MAY_DIFFER |= {"flash", "kernel", "device", "compile", "rank", "world"}
MAY_DIFFER |= {"device_name", "torch", "python", "date", "commit"}
MAY_DIFFER |= {"arm", "parameters", "tokens", "val"}  # they follow from the others
# and these are not in the name of its folder either
UNNAMED = MAY_DIFFER | {"attn", "vocab_size", "steps", "eval_tokens", "dtype"}


def run_name(config, without=()):
    """The arm, and each setting that differs from the preset: diff-nosubln-lr3e-3."""
    defaults = {f.name: f.default for f in fields(Config)} | PRESETS[config.preset]
    if defaults["total_batch"] is None:
        defaults["total_batch"] = defaults["batch_size"] * defaults["block_size"]
    parts = [config.attn]
    for name, value in vars(config).items():
        if name in UNNAMED or name in without or value == defaults[name]:
            continue
        if isinstance(value, bool):
            parts.append(name if value else f"no{name}")
        elif isinstance(value, float) and 0 < value < 0.01:
            parts.append(name + np.format_float_scientific(value, trim="-", exp_digits=1))
        else:
            parts.append(name + repr(value).removesuffix(".0"))
    return "-".join(parts)


def git_commit():
    """The commit of this file's repository. None outside of a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def make_head(config, about, model):
    """The first line of a log: all that is known before the run begins."""
    head = vars(config) | about
    head["arm"] = run_name(config, without=("lr", "seed"))
    head["parameters"] = sum(p.numel() for p in model.parameters())
    head["device_name"] = device_name(config.device)
    head["torch"] = str(torch.__version__)
    head["python"] = platform.python_version()
    head["date"] = time.strftime("%Y-%m-%d")
    head["commit"] = git_commit()
    return json.loads(json.dumps(head, default=str))  # paths and devices turn into their names


def refuse_another_run(folder, there, here):
    """ValueError if the head of the run in a folder, there, is not that of our run, here."""
    differences = []
    for name, value in here.items():
        if name not in MAY_DIFFER and there.get(name) != value:
            differences.append(f"{name} is {there.get(name)!r} there and {value!r} here")
    if differences:
        remedy = "Choose another --out, or --restart it"
        raise ValueError(f"{folder} is another run's: {', '.join(differences)}. {remedy}")

# -----------------------------------------------------------------------------
# one run


@dataclass
class Run:
    """What a run works with."""

    model: GPT
    optimizer: torch.optim.Optimizer
    head: dict  # the first line of its log
    step: int | None  # of its checkpoint. None: there is none yet


def load_or_make(config, data):
    """The Run of a config: from the checkpoint in its folder, if there is one, or from the seed."""
    path = config.out / "ckpt.pt"
    step = None
    if path.exists():
        model = GPT.load(path, config.device, flash=config.flash, kernel=config.kernel)
        step = model.extra["step"]
    else:
        model = GPT(config.model_config(), config.seed).to(config.device)
    head = make_head(config, data.about, model)
    if step is not None:
        refuse_another_run(config.out, model.extra["run"], head)

    optimizer = make_optimizer(model, config.lr, config.weight_decay)
    if step is not None and step < config.steps:  # a finished run needs no optimizer
        optimizer.load_state_dict(model.extra.pop("optimizer"))
    if config.world > 1:
        # this waits for all processes, so all have looked into the folder before one writes there
        steps = [None] * config.world
        dist.all_gather_object(steps, step)
        if len(set(steps)) > 1:
            raise ValueError(f"the processes have to share the folder {config.out}, and they don't")
    return Run(model, optimizer, head, step)


def save_checkpoint(config, run, step, val_loss):
    # nobody resumes a finished run, and the optimizer is twice as large as the model
    state = run.optimizer.state_dict() if step < config.steps else None
    more = dict(tokenizer=run.head["tokenizer"], step=step, val_loss=val_loss, run=run.head)
    if config.rank == 0:
        run.model.save(config.out / "ckpt.pt", optimizer=state, **more)
    run.step = step


def train(config, data):
    """Trains one run, from where it stopped. Returns its last val loss, inf if it diverged.

    A run that has finished or diverged before returns at once.
    """
    config = replace(config, vocab_size=data.enc.n_vocab)
    config.out.mkdir(parents=True, exist_ok=True)
    # two programs must not write to one folder. The first process locks it for all
    lock = FileLock(config.out / "lock", timeout=0) if config.rank == 0 else nullcontext()
    try:
        with lock:
            return train_locked(config, data)
    except Timeout:
        raise ValueError(f"another program is training in {config.out}") from None


def train_locked(config, data):
    """Finds out whether the run is finished, lost, to be begun or to go on, and trains it then."""
    log_path = config.out / "log.jsonl"
    if config.rank == 0:
        if config.restart:
            # the checkpoint goes first. If we are killed after that, nobody goes on from it
            (config.out / "ckpt.pt").unlink(missing_ok=True)
            log_path.unlink(missing_ok=True)
        log_path.touch()
    if config.world > 1:
        dist.barrier()
    old_head, records = read_log(log_path)
    run = load_or_make(config, data)
    if run.step == config.steps:
        print0(f"{config.out}: finished, {config.steps} steps (--restart starts over)")
        return run.model.extra["val_loss"]
    if run.step is not None and any("diverged" in record for record in records):
        print0(f"{config.out}: diverged after step {run.step} (--restart starts over)")
        return math.inf
    if run.step is None and any(record["step"] > 0 for record in records):
        raise ValueError(f"{log_path} is there, but its ckpt.pt is not: --restart discards the log")

    if config.rank == 0 and (run.step is None or not old_head):
        log_path.write_text(json.dumps(run.head) + "\n")
    elif config.rank == 0:
        with open(log_path, "a") as file:
            file.write("\n")  # ends the half line that a kill may have left
    size = f"{run.head['parameters'] / 1e6:.2f} M parameters, seed {config.seed}"
    work = f"{config.steps} steps of {config.total_batch:,} tokens, peak rate {config.lr:g}"
    print0(f"{config.attn}: {size}, {work} -> {config.out}")
    try:
        return train_loop(config, data, run)
    except KeyboardInterrupt:
        without = " without --restart" if config.restart else ""
        step = run.step or 0
        raise KeyboardInterrupt(f"the same command{without} goes on after step {step}") from None


def train_loop(config, data, run):
    """The steps of a run, see train."""
    torch.compiler.reset()  # else several runs together reach torch's limit of recompilations
    model = torch.compile(run.model) if config.compile else run.model
    if config.world > 1:
        model = DistributedDataParallel(model)
    speed_limit = full_speed(config)
    if run.step is not None:
        print0(f"goes on after step {run.step}")

    first_step = step = run.step or 0
    update = None
    since = (step, time.perf_counter())  # the speed is measured from here on
    while True:
        last = step == config.steps
        evaluate_now = last or step % config.eval_every == 0
        # once in a while: look at the loss. That waits for the GPU, so we don't do it every time.
        # The step of the checkpoint from which we go on stands in the log already
        if step != run.step and (evaluate_now or step % config.log_every == 0):
            record = make_record(config, step, update, since, speed_limit)
            if evaluate_now:
                record["val_loss"] = evaluate(run.model, data.val, config)
                record["lambda"] = get_lambdas(run.model)
            # a model that is not finite does not recover, and must not replace the last checkpoint
            bad = not_finite(record)
            if bad:
                write_log(config, dict(step=step, tokens=record["tokens"], diverged=bad))
                rest = "the last checkpoint is kept, try a lower --lr"
                print0(f"{config.out} diverged at step {step}: {bad}; {rest}", file=sys.stderr)
                return math.inf
            if evaluate_now and step > 0:
                record["sample"] = sample_text(run.model, data.enc, config)
            write_log(config, record)
            show(record, config)
            if evaluate_now:
                save_checkpoint(config, run, step, record["val_loss"])
            since = (step, time.perf_counter())  # all of this was not training
        if last:
            return record["val_loss"]

        update = training_step(model, run.optimizer, data.train, config, step)
        step += 1
        if step == first_step + 1:
            # the first step compiles the model, too, so its time says nothing of the speed
            update[1].item()  # waits for the device
            since = (step, time.perf_counter())

# -----------------------------------------------------------------------------
# the command line


def comma_list(of):
    def parse_list(text):
        return list(dict.fromkeys(of(part) for part in text.split(",")))

    return parse_list


TYPES = {int: positive, float: number, str: str, Path: Path}


def parse_flags(cls, argv=None, description=None, presets=None):
    """The flags that a command line gives, as a dict: cls(**parse_flags(cls)) has all settings.

    cls is a dataclass whose fields are made by flag(). presets: {name: the defaults that differ}.
    """
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--flag=value ...]    (--help lists the flags)",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,  # a flag that is not given is not in the result
        allow_abbrev=False,
    )
    for f in fields(cls):
        more = dict(f.metadata)
        if "help" not in more:
            continue  # not a flag
        defaults = {"default": f.default}
        for name, preset in (presets or {}).items():
            defaults[name] = preset.get(f.name)
        said = [f"{name}: {value}" for name, value in defaults.items() if value is not None]
        if said:
            more["help"] += f" ({', '.join(said)})"
        kind = (get_args(f.type) or [f.type])[0]  # int of "int | None"
        if kind is bool:
            more["action"] = argparse.BooleanOptionalAction
        else:
            more.setdefault("type", TYPES.get(kind))
        if more.pop("many", False):
            more["type"] = comma_list(more["type"])
        parser.add_argument(f"--{f.name}", **more)
    return vars(parser.parse_args(argv))


def parse(argv=None):
    """A Config for each run that a command line asks for. ValueError if flags do not fit."""
    given = parse_flags(Config, argv, __doc__, PRESETS)
    if "steps" in given and "tokens" in given:
        raise ValueError("--steps and --tokens say the same thing: give one of them")
    if "steps" in given:
        given["tokens"] = None  # not the preset's

    # the real run where it can be made, else the toy
    if "preset" not in given:
        shards = any(given.get("data", SHARDS).glob("*.bin"))
        cuda = pick_device(given.get("device")).type == "cuda"
        given["preset"] = "gpt2" if shards and cuda else "toy"

    # torchrun sets these
    given["rank"] = int(os.environ.get("RANK", 0))
    given["world"] = int(os.environ.get("WORLD_SIZE", 1))
    if given["world"] > 1 and torch.cuda.is_available():
        given.setdefault("device", f"cuda:{os.environ['LOCAL_RANK']}")

    lists = {name: given.pop(name) for name in ("seed", "lr", "attn") if name in given}
    configs = []
    for values in product(*lists.values()):
        chosen = dict(zip(lists, values))
        configs.append(Config(**(PRESETS[given["preset"]] | given | chosen)))
    for config in configs:
        if len(configs) > 1 or config.out is None:
            config.out = (config.out or Path("out")) / run_name(config)
    return configs


def introduce(config, data):
    """Says what is going to happen, on what."""
    compiled = ", compiled" if config.compile else ""
    sizes = f"micro-steps of {config.batch_size} x {config.block_size} tokens"
    print0(f"preset {config.preset}, {config.dtype}{compiled}, {sizes}, processes: {config.world}")
    print0(f"on {device_name(config.device)}")
    splits = f"{data.train.tokens:,} tokens to train on, {data.val.tokens:,} val"
    print0(f"data: {data.about['data']}, {splits}, tokenizer {data.about['tokenizer']}")
    print0(f"      val is {data.about['val']}")
    if data.about["data"] == "pydoc_data.topics":
        print0("      this is Python's own manual. The real run needs a GPU and prepare_fineweb.py")


def what_next(config):
    """Says what can be done with a run."""
    path = config.out / "ckpt.pt"
    print0()
    if is_ours(config.attn):
        print0(f'sample from it:    python sample.py --ckpt={path} --prompt="{PROMPT}"')
        print0(f"look at its maps:  python -m experiments.checkpoints maps --ckpt={path}")
    else:
        # sample.py alone does not know the arm, so the file that registers it comes first
        file = ATTENTION[config.attn].__module__.replace("__main__", Path(sys.argv[0]).stem)
        command = f"import {file}, sample; sample.main(['--ckpt={path}'])"
        print0(f'sample from it:    python -c "{command}"')
    print0(f"compare runs:      python bench.py loss {config.out.parent}")


def main(argv=None):
    """Trains the runs that a command line asks for. Returns the last val loss of each.

    Raises ValueError and OSError for errors that a user can mend.
    """
    configs = parse(argv)
    if configs[0].device.type == "cuda":
        torch.cuda.set_device(configs[0].device)  # what says "cuda" means this card from here on
    if configs[0].world > 1:
        dist.init_process_group()
    torch.set_float32_matmul_precision("high")
    data = open_data(configs[0])  # the runs have the same data, sizes and device
    introduce(configs[0], data)

    losses = []
    for config in configs:
        losses.append(train(config, data))
    if configs[0].world > 1:
        dist.destroy_process_group()
    what_next(configs[-1])
    return losses


def run():
    """The program: it fails if a run diverged."""
    if math.inf in main():
        sys.exit(1)  # the reason is printed already


def cli(main):
    """Runs the main function of a program. An error that a user can mend ends in one line."""
    program = Path(sys.argv[0]).name
    try:
        main()
    except KeyboardInterrupt as e:
        reason = f", {e}" if str(e) else ""
        print(f"\n{program}: stopped{reason}", file=sys.stderr)
        sys.exit(130)  # what a shell expects after Ctrl-C
    except (ValueError, OSError) as e:
        sys.exit(f"{program}: {e}")
    except torch._dynamo.exc.TorchDynamoException as e:
        reason = " ".join(str(e).split("\n\n")[0].split())
        sys.exit(f"{program}: torch.compile failed, --no-compile does without. It says: {reason}")


if __name__ == "__main__":
    cli(run)
